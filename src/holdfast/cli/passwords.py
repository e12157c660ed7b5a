"""Passwords in the URLs on the command line: `ps` shows the arguments of a process to all users of the machine.

On Linux the arguments are in the memory of the process, so `hide_in_arguments` overwrites each password there. The
copies that Python has stay as they are. Between the start of the process and this call, `ps` shows the password.
Elsewhere nothing is done: use an environment variable (PGPASSWORD, ETCDCTL_USER) or a password file there.
"""

from __future__ import annotations

import sys

from .. import system
from ..owner import password_spans

_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat after the name of the program


def hide_in_arguments() -> None:
    """Overwrite the passwords in the arguments of this process with asterisks."""
    if sys.platform != "linux":
        return
    fields = system.read_text("/proc/self/stat").rpartition(")")[2].split()
    if len(fields) <= _ARG_END:
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 0 < start < end:  # the kernel does not show the addresses to this process
        return
    import ctypes

    position = start
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        for first, last in password_spans(argument.decode("latin-1")):  # a character for each byte
            ctypes.memset(position + first, ord("*"), last - first)
        position += len(argument) + 1
