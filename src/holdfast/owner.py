"""Who am I, who is that, and is it still there?

A pid alone says little: it is used again, means something else in another container, and nothing at all on another
machine. A process is known by its pid together with its start time, its pid namespace, and the boot of the kernel that
it runs on. Two containers on one machine have one boot id.
"""

from __future__ import annotations

import os
from time import time

from . import process, system

_CONTROL = dict.fromkeys((*range(32), 127), " ")


def sanitise(text: str) -> str:
    """Control characters become spaces: they could forge a line in a file, or steer the terminal that shows it."""
    return text.translate(_CONTROL)


class Identity:
    """What a record says about the process that wrote it."""

    __slots__ = ("boot", "host", "pid", "random", "start")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.start = start_of(pid)
        self.random = os.urandom(8).hex().encode()
        self.boot = boot_id()
        self.host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


_FIRST_NAMESPACE = 0xEFFFFFFC  # the kernel's PROC_PID_INIT_INO

_me: Identity | None = None
_boot_id: str | None = None


def me() -> Identity:
    global _me
    if _me is None:
        _me = Identity(os.getpid())
    return _me


def _forget_me() -> None:
    global _me
    _me = None


process.after_fork_in_child(_forget_me)


def boot_id() -> str | None:
    global _boot_id
    if _boot_id is None:
        _boot_id = system.read_text("/proc/sys/kernel/random/boot_id").strip() or None
    return _boot_id


def start_of(pid: int) -> str | None:
    """When a process of our pid namespace began, with that namespace; None if there is no such process any more."""
    stat = system.read_text(f"/proc/{pid}/stat")
    # The command name stands in parentheses and may contain anything, also spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":  # a zombie has let go of everything
        return None
    return f"{fields[19]}:{_namespace()}"


def started_at(pid: int) -> float | None:
    """When a process began, in seconds since the epoch."""
    start, uptime = start_of(pid), system.read_text("/proc/uptime").split()
    if start is None or not uptime:
        return None
    return time() - float(uptime[0]) + int(start.partition(":")[0]) / os.sysconf("SC_CLK_TCK")


def namespace_of(start: str) -> str:
    """The pid namespace in a start time."""
    return start.rpartition(":")[2]


def is_visible(host: str | None, start: str | None) -> bool:
    """Does a pid in a record mean a process that we can see? Not on another host or in another pid namespace.

    Other tools write neither host nor start; their records count as those of processes beside us.
    """
    mine = me()
    if host not in (None, mine.host):
        return False
    return start is None or mine.start is None or namespace_of(start) == namespace_of(mine.start)


def sees_everybody() -> bool:
    """Are we in the first pid namespace, whose /proc shows the processes of all others too?"""
    return _namespace() == _FIRST_NAMESPACE


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def command_of(pid: int) -> str | None:
    """The command line of a process of this machine, or None where it cannot be had. Safe to print."""
    program, *words = system.read_text(f"/proc/{pid}/cmdline").split("\0")
    # Our own command, by its script or by -m: the interpreter before it says nothing.
    if words and os.path.basename(words[0]) == "holdfast":
        program, *words = words
    elif "holdfast" in words and words[words.index("holdfast") - 1] == "-m":
        program, *words = words[words.index("holdfast") :]
    return sanitise(" ".join([os.path.basename(program), *words]).strip()) or None


def describe(pid: int) -> str:
    command = command_of(pid)
    if command is None:
        return f"pid {pid}"
    return f"pid {pid} ({command if len(command) <= 60 else command[:59] + '…'})"
