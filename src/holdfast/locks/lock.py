"""`Lock`: held while an open descriptor holds a kernel lock on a file. A crash releases it.

The file is empty and carries no state; it is there only to be locked. Acquiring (`path_lock`):

    1. look whether others queue for it (one system call), and if so join them: see `queue`
    2. open it, creating it if need be, and refuse it if it has content: it is user data, or another kind of lock
    3. take the kernel lock on the descriptor, shared or exclusive
    4. compare the descriptor with what the path names now; if they differ, close and begin again

Releasing an exclusive lock unlinks the file before it unlocks. A sharer tries to convert its lock to an exclusive one.
If the kernel grants that, no other sharer is left, and it unlinks the file before it unlocks. With `keep=True` the
file stays, and stays one inode: cheaper, and right where other tools expect to find it. On network file systems it
always stays.

Not promised: that the file is gone at once when holders crash, or when removal is not permitted (another user's file
in a sticky directory). Programs that delete the file cause a second holder; `check` and `release` find that out
(LockLost), and never delete the second holder's file.
"""

from __future__ import annotations

from time import time

from .. import process, system
from ..files import try_lock
from ..wait import Granted
from . import base
from .base import BUSY, Outcome, would_deadlock
from .path_lock import OpenFile, PathHold, PathLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from ..status import Status
    from ..wait import Step

_BRIEF_HOLD_S = 0.001  # seconds of holding after which a look at the queue costs nothing in comparison


class KernelHold(PathHold):
    """A held `Lock`."""

    __slots__ = ()

    lock: Lock

    def _free_name(self, st: os.stat_result) -> bool:
        lock, file = self.lock, self._file
        if st.st_size:
            return False  # it got content meanwhile, and is not ours to remove
        if lock.shared:
            system.mark_removal(file.fd)
            lock._remove_unused(file)  # our own share is not in the way
            return False
        if (self._came_through_queue or time() - self.acquired_at > _BRIEF_HOLD_S) and system.access(lock._queue, 0):
            return True
        lock._remove(file.inode)
        return False


class Lock(PathLock[KernelHold]):
    """A lock on a path, for all processes of this machine, and of others where the file system allows it.

    shared: any number of sharers at once, or one exclusive holder
    timeout: how long `acquire` and `with` wait: None for ever, 0 one try, else seconds
    keep: leave the file in place instead of removing it with the last holder
    fair: waiters are served in order of arrival; False: in any order
    mode: permissions of the file, where it has to be made
    """

    __slots__ = ("_op", "keep", "shared")

    _options = ("shared", "timeout", "keep", "fair", "mode")
    _polls = True

    def __init__(
        self,
        path: base.StrPath,
        *,
        shared: bool = False,
        timeout: float | None = None,
        keep: bool = False,
        fair: bool = True,
        mode: int = 0o644,
    ) -> None:
        PathLock.__init__(self, path, "lock", timeout, fair, mode, KernelHold)
        self.shared = shared
        self.keep = keep
        self.removes_file = self.sets_time = not keep
        self._op = system.SH_NB if shared else system.EX_NB

    def status(self) -> Status:
        from ..status import of_kernel_lock

        return of_kernel_lock(self.path, keep=self.keep)

    def _may_pass_queue(self) -> bool:
        if not self.shared:
            turn = process.registry.turns.get(self._file)
            return turn is not None and turn.take()
        # A caller that shares already may share again: to queue behind a writer that waits for it would be a deadlock.
        return bool(self._held_by_caller(asynchronous=process.current_task() is not None, ended=True))

    def _take(self, file: OpenFile) -> bool | Outcome:
        try:
            set_lock = file.set_lock
            set_lock(file.fd, self._op)
        except BlockingIOError:
            return BUSY
        return True

    def _take_all(self, file: OpenFile) -> bool:
        return try_lock(file.fd, system.EX_NB, file.set_lock)

    def _unlock(self, file: OpenFile) -> None:
        set_lock = file.set_lock
        set_lock(file.fd, system.UN)

    def _is_ours(self, file: OpenFile, st: os.stat_result) -> bool:
        return st.st_size == 0

    def _is_free(self) -> bool:
        """Could an exclusive waiter have it? A sharer that is let in beside others says nothing about that."""
        file = self._open()
        if file is None:
            return False
        with file:
            try:
                if file.mount.removes:
                    system.mark_removal(file.fd)
                return self._take_all(file)
            except BlockingIOError:  # another program has locked it from end to end
                return False

    def _block(self, file: OpenFile) -> Step | None:
        if not file.mount.blocks or process.uses_greenlets():
            return None
        return Granted(file.set_lock, file.fd, self._op & ~system.NB)

    def _note_turn(self, called_at: float) -> None:
        if not self.shared:
            process.registry.note_turn(self._file, called_at)

    def _refuse_deadlock(self, *, asynchronous: bool) -> bool:
        mine = self._held_by_caller(asynchronous=asynchronous)
        if any(not (self.shared and shared) for _, shared, *_ in mine):
            raise would_deadlock(self.path, asynchronous, "holds the lock")
        return bool(mine)
