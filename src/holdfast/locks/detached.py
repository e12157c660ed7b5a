"""Acquiring a `LockFile` in the name of another process: a command does this for the shell that called it.

The record has the pid, the start time and the boot id of that process, and `call` in place of `owner`: no process keeps
the liveness byte, because the command ends in a moment. So the lock ends with `release_as_owner`, with that process, or
by its age.
"""

from __future__ import annotations

import errno
import os
from time import time_ns

from .. import owner, system
from . import base, record
from .lock_file import LockFile


class _WriterFor(record.Writer):
    """Writes records in the name of another process."""

    __slots__ = ("pid", "start")

    def __init__(self, pid: int, start: str | None, tag: str | None) -> None:
        record.Writer.__init__(self, record.SEMA, tag)
        self.pid = pid
        self.start = start

    def write(self, serial: int) -> bytes:
        me, now, call = owner.me(), time_ns() // 1_000_000_000, os.urandom(8).hex()
        return record.compose(record.Record(self.pid, now, self._tag, me.host, me.boot, self.start, None, 0, call))


def acquire_for(lock: LockFile, pid: int, timeout: float | base.Default | None) -> record.Record:
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**32:
        raise ValueError(f"a pid is a number from 1 on, not {pid!r}")
    start = owner.start_of(pid)
    if start is None and not system.process_exists(pid):
        raise ValueError(f"there is no process {pid} for which a lock could be acquired")
    another = LockFile(lock.path, **{name: getattr(lock, name) for name in lock._options})
    another._writer = _WriterFor(pid, start, lock.tag)
    hold = another.acquire(timeout)
    if start is not None and owner.start_of(pid) != start:
        hold.release()
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended before its lock was free", lock.path)
    found = record.parse(hold._content)._replace(token=hold.token)
    hold.leave_standing()
    return found
