"""What kind of lock is a file?

One that says `pid=` and `timestamp=` is a lock file, one that says `permits=` a semaphore, and one on which somebody
has a kernel lock, or for which somebody queues, a kernel lock; in a list also an empty one that is called `….lock`.
"""

from __future__ import annotations

import os

from .. import record, system
from ..errors import CorruptLock

_HEAD = 32  # bytes that tell what a file is


def kernel_locked_inodes() -> set[int]:
    """The inodes on which this machine knows of a kernel lock. Only a hint: devices are not compared here."""
    inodes = set()
    for line in system.read_text("/proc/locks").splitlines():
        fields = line.replace("-> ", "").split()
        if len(fields) > 5 and ":" in fields[5]:
            inodes.add(int(fields[5].rpartition(":")[2]))
    return inodes


def kind_of(path: str, locked: set[int] | None = None) -> str | None:
    """What kind of lock a file is: lock, file, semaphore. None: none that can be told."""
    try:
        fd = system.open_fd(os.path.realpath(path), system.O_READ)
    except (FileNotFoundError, IsADirectoryError):
        return None
    try:
        st = system.fstat(fd)
        if st.st_mode >> 12 != 0o10:
            return None
        head = system.read(fd, _HEAD)
        if head.startswith(b"permits="):
            return "semaphore"
        named_so = locked is not None and path.endswith((".lock", ".lck"))
        if head:
            return "file" if named_so or _is_record(fd, head) else None
    finally:
        system.close(fd)
    if st.st_ino in (kernel_locked_inodes() if locked is None else locked) or os.path.isdir(path + ".queue"):
        return "lock"
    # Nobody holds it: the empty file of a kernel lock that is kept, or one that a foreign tool is about to write.
    return "lock" if named_so else None


def _is_record(fd: int, head: bytes) -> bool:
    if b"pid" not in head and b"timestamp" not in head and b"tag" not in head:
        return False
    try:
        record.parse(system.pread(fd, record.MOST_BYTES + 1, 0))
    except CorruptLock:
        return False
    return True
