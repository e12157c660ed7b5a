"""/proc: processes, their locks, mounts, and the names of open files. All of it is empty on systems without /proc."""

from __future__ import annotations

import os
import sys

_HAS_PROC = sys.platform != "win32"  # under wine, a Windows program must not read the /proc of Linux
_DELETED = " (deleted)"  # the kernel adds this to the name of a file that has none any more


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


def name_of_open(fd: int) -> str:
    """Return the name that the open file has now, or a text that changes when the file loses its name.

    It does not call fstat: once fstat has reported the time of the last change (Linux 6.13 and later), the next write
    sets another time, and to sync that on ext4 without a journal takes one more write to the disk.
    """
    try:
        if _HAS_PROC:
            return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        pass
    st = os.fstat(fd)
    return f"{st.st_dev} {st.st_ino}" + ("" if st.st_nlink else _DELETED)


def is_removed(fd: int) -> bool:
    """True: the open file has no name any more."""
    return name_of_open(fd).endswith(_DELETED)
