"""Who is that? What this machine can tell about a process."""

from __future__ import annotations

from . import system


def command_of(pid: int) -> str | None:
    """The command line of a process of this machine, or None where it cannot be had. Safe to print."""
    words = system.read_text(f"/proc/{pid}/cmdline").split("\0")
    text = printable(" ".join(words).strip())
    return text or None


def printable(text: str) -> str:
    """Control characters become spaces: what another process calls itself must not steer a terminal."""
    return "".join(" " if ord(c) < 32 or ord(c) == 127 else c for c in text)


def describe(pid: int) -> str:
    command = command_of(pid)
    if command is None:
        return f"pid {pid}"
    return f"pid {pid} ({command if len(command) <= 60 else command[:59] + '…'})"
