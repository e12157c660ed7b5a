"""The identity of processes: of this one, and of those that lock files and /proc name.

A pid alone does not identify a process: it is used again, and it means another process in another container or on
another machine. A process is identified by its pid, its start time, its pid namespace, and the boot id of its kernel.
Two containers on one machine have the same boot id.
"""

from __future__ import annotations

import os
from functools import cache
from time import time

from . import process, system

_CONTROL = dict.fromkeys((*range(32), 127), " ")
_FIRST_NAMESPACE = 0xEFFFFFFC  # the kernel's PROC_PID_INIT_INO
_MAX_SHOWN = 60  # characters of a command or a tag in a message


def sanitise(text: str) -> str:
    """Replace control characters by spaces. They could forge a line in a file, or steer the terminal that shows it."""
    return text.translate(_CONTROL)


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


class Identity:
    """What a record contains about the process that wrote it."""

    __slots__ = ("boot", "host", "pid", "random", "start")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.start = start_of(pid)
        self.random = os.urandom(8).hex().encode()
        self.boot = boot_id()
        self.host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


@cache
def me() -> Identity:
    return Identity(os.getpid())


process.after_fork_in_child(me.cache_clear)


@cache
def boot_id() -> str | None:
    return system.read_text("/proc/sys/kernel/random/boot_id").strip() or None


def start_of(pid: int) -> str | None:
    """Return the start time of a process of our pid namespace, with that namespace. None: the process has ended."""
    stat = system.read_text(f"/proc/{pid}/stat")
    # The command name is in parentheses and may contain anything, also spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":  # a zombie has no locks any more
        return None
    return f"{fields[19]}:{system.pid_namespace()}"


def started_at(pid: int) -> float | None:
    """Return when a process began, in seconds since the epoch."""
    start, uptime = start_of(pid), system.read_text("/proc/uptime").split()
    if start is None or not uptime:
        return None
    return time() - float(uptime[0]) + int(start.partition(":")[0]) / os.sysconf("SC_CLK_TCK")


def namespace_of(start: str) -> str:
    """Return the pid namespace in a start time."""
    return start.rpartition(":")[2]


def is_visible(host: str | None, start: str | None) -> bool:
    """Return whether a pid in a record means a process that this process can see.

    It does not on another host or in another pid namespace. Other tools write neither host nor start: their records
    count as records of processes here.
    """
    mine = me()
    if host not in (None, mine.host):
        return False
    return start is None or mine.start is None or namespace_of(start) == namespace_of(mine.start)


def sees_everybody() -> bool:
    """Return whether this is the first pid namespace, whose /proc shows the processes of all other namespaces."""
    return system.pid_namespace() == _FIRST_NAMESPACE


def command_of(pid: int) -> str | None:
    """Return the command line of a process of this machine, safe to print. None: it is not known.

    The passwords of URLs in it are left out.
    """
    program, *words = system.read_text(f"/proc/{pid}/cmdline").split("\0")
    # Of our own command, started by its script or with -m, the interpreter is left out.
    if words and os.path.basename(words[0]) == "holdfast":
        program, *words = words
    elif "holdfast" in words and words[words.index("holdfast") - 1] == "-m":
        program, *words = words[words.index("holdfast") :]
    return sanitise(" ".join(map(hide_passwords, [os.path.basename(program), *words])).strip()) or None


# Between the first colon after the user name and the last @ before the path. A password that contains / or ? should be
# percent-encoded. If it is not, everything up to the last @ is hidden, unless it can only be a port and a path.
_PASSWORD = r"://[^:@/?#\s]*:(?:([^/?#\s]*)@|(?!\d*[/?#])(\S*)@)|[?&]\w*password=([^&\s]+)"


def password_spans(argument: str) -> list[tuple[int, int]]:
    """Where the passwords of URLs begin and end in an argument of a program, which may be a URL or a shell command."""
    if "://" not in argument:
        return []
    import re

    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", argument):
        argument = re.sub(r"\s", "_", argument)  # nothing but a URL, whose password may contain spaces
    return [found.span(found.lastindex or 0) for found in re.finditer(_PASSWORD, argument)]


def hide_passwords(argument: str) -> str:
    """A URL, or another argument of a program, with *** for each password."""
    for first, last in reversed(password_spans(argument)):
        argument = f"{argument[:first]}***{argument[last:]}"
    return argument


def without_passwords(text: str) -> str:
    """A message with *** for each password of a URL in it."""
    if "://" not in text:
        return text
    import re

    return re.sub(r"\S+", lambda word: hide_passwords(word[0]), text)


def describe(pid: int) -> str:
    command = command_of(pid)
    return f"pid {pid}" if command is None else f"pid {pid} ({shorten(command)})"
