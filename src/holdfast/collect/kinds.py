"""What kind of lock is a file?

file       it begins with `pid=` and digits, or is a whole record of the sema format; in a list also an empty file
           that is called `….lock`
task       a JSON object with `worker_id` and `started_at`
semaphore  it begins with `permits=`
lock       it is empty, and a process has a kernel lock on it or queues for it; or it is the lock of a task queue or of
           an event store, which stays when it is free
"""

from __future__ import annotations

import os
import stat

from .. import system
from ..errors import CorruptLock
from ..files import OwnedFd
from ..locks import record

_HEAD = 64  # bytes that tell whether the rest has to be read
_KEPT = {"queue.lock": "queue.db", ".store.lock": "store.json"}  # the lock, and the file that is always beside it


def kernel_locked_inodes() -> set[int]:
    """Return the inode numbers with a kernel lock on this machine. They are a hint: devices are not compared."""
    from ..status import kernel_locks

    return {lock.file[1] for lock in kernel_locks()}


def kind_of(path: str, locked: set[int] | None = None) -> str | None:
    """What kind of lock a file is: lock, file, task, semaphore. None: none that can be told.

    `locked` is what `kernel_locked_inodes` returned, for a list of files.
    """
    try:
        file = OwnedFd(system.open_fd(os.path.realpath(path), system.O_READ))
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        return None
    with file:
        st = system.fstat(file.fd)
        if not stat.S_ISREG(st.st_mode):
            return None
        head = system.read(file.fd, _HEAD)
        if head:
            return _kind_by_content(file.fd, head)
    if st.st_ino in (kernel_locked_inodes() if locked is None else locked) or os.path.isdir(path + ".queue"):
        return "lock"
    directory, name = os.path.split(path)
    if name in _KEPT and os.path.exists(os.path.join(directory, _KEPT[name])):
        return "lock"
    # It counts as held until it is old: another tool may be about to write it.
    return "file" if locked is not None and path.endswith((".lock", ".lck")) else None


def _kind_by_content(fd: int, head: bytes) -> str | None:
    if head.startswith(b"permits="):
        return "semaphore"
    if head.lstrip().startswith(b"{"):
        from ..locks.task_record import is_task

        return "task" if is_task(_content(fd)) else None
    if not any(key in head for key in (b"pid", b"timestamp", b"tag")):
        return None
    content = _content(fd)
    try:
        record.parse(content)
    except CorruptLock:
        return None if record.SEMA.other_kind(content) else "file"
    return "file"


def _content(fd: int) -> bytes:
    return system.pread(fd, record.MAX_BYTES + 1, 0)
