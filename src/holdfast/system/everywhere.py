"""The same on every platform: kernel locks on single bytes, and /proc, which is empty on systems without it."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    from .windows import EX_NB, UN, range_locked, set_range
else:
    from .posix import EX_NB, UN, range_locked, set_range
from .common import FIRST_SLOT, LIVENESS_BYTE, MAX_SLOTS, REMOVAL_BYTE

_HAS_PROC = sys.platform != "win32"  # under wine, a Windows program must not read the /proc of Linux


def unmark_removal(fd: int) -> None:
    set_range(fd, UN, REMOVAL_BYTE, 1)


def liveness_locked(fd: int) -> bool:
    return range_locked(fd, LIVENESS_BYTE, 1)


def try_slot(fd: int, slot: int) -> bool:
    """Lock a slot without waiting. False: another descriptor has it locked."""
    try:
        set_range(fd, EX_NB, FIRST_SLOT + slot, 1)
    except BlockingIOError:
        return False
    return True


def unlock_slots(fd: int) -> None:
    """Unlock all slots that this descriptor has locked."""
    set_range(fd, UN, FIRST_SLOT, MAX_SLOTS)


def read_text(path: str) -> str:
    """Return the text of a file in /proc; empty if it does not exist or may not be read."""
    if not _HAS_PROC:
        return ""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="surrogateescape")
    except OSError:
        return ""


def mount_table() -> str:
    return read_text("/proc/self/mountinfo")


def list_pids() -> list[int]:
    names = os.listdir("/proc") if _HAS_PROC and os.path.isdir("/proc") else []
    return sorted(int(name) for name in names if name.isdecimal())


def lock_lines(pid: int) -> str | None:
    """Return the locks of a process's descriptors, a line each as in /proc/locks. None: permission is denied."""
    folder = f"/proc/{pid}/fdinfo"
    try:
        texts = [read_text(f"{folder}/{fd}") for fd in os.listdir(folder)]
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    return "\n".join(line for text in texts for line in text.splitlines() if line.startswith("lock:"))


def pid_namespace() -> int:
    """Return the number of the pid namespace of this process, or 0."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino if _HAS_PROC else 0
    except OSError:
        return 0


def is_removed(fd: int) -> bool:
    """Return whether the open file has no name any more.

    It does not call fstat: once fstat has reported the time of the last change (Linux 6.13 and later), the next write
    sets another time, and to sync that on ext4 without a journal takes one more write to the disk.
    """
    try:
        if _HAS_PROC:
            return os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")
    except FileNotFoundError:
        pass
    return os.fstat(fd).st_nlink == 0
