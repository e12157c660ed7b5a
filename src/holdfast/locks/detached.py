"""Acquiring a `LockFile` in the name of another process: what a command does for the shell that called it.

The record has that process's pid, start time and boot id, and a `call` in place of an `owner`: nobody keeps the
liveness byte, because the command is gone in a moment. So the lock ends by `release_as_owner`, with that process, or by
its age.
"""

from __future__ import annotations

import errno
import os
from time import time_ns

from .. import owner, system
from . import base, record
from .lock_file import LockFile


class _ForAnother(LockFile):
    """A `LockFile` whose records name another process."""

    __slots__ = ("pid", "start")

    pid: int
    start: str | None

    def _compose(self) -> bytes:
        me = owner.me()
        return record.compose(
            record.Record(
                self.pid,
                time_ns() // 1_000_000_000,
                self.tag,
                me.host,
                me.boot,
                self.start,
                token=0,
                call=os.urandom(8).hex(),
            )
        )


def acquire_for(lock: LockFile, pid: int, timeout: float | base.Default | None) -> record.Record:
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**32:
        raise ValueError(f"a pid is a number from 1 on, not {pid!r}")
    another = _ForAnother(lock.path, **{name: getattr(lock, name) for name in lock._options})
    another.pid, another.start = pid, owner.start_of(pid)
    if another.start is None and not system.process_exists(pid):
        raise ValueError(f"there is no process {pid} for which a lock could be acquired")
    hold = another.acquire(timeout)
    if another.start is not None and owner.start_of(pid) != another.start:
        hold.release()
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended before its lock was free", lock.path)
    found = record.parse(hold._content)
    found.token = hold.token
    hold.leave_standing()
    return found
