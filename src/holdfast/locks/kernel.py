"""`Lock`: held while an open descriptor holds a kernel lock on a file. A crash releases it.

The file is empty and carries no state; it is there only to be locked. Acquiring:

    1. look whether somebody queues for it (one system call), and if so join them: see `queue`
    2. open it, creating it if need be, and refuse it if it has content: it is somebody's data
    3. take the kernel lock on the descriptor, shared or exclusive
    4. compare the descriptor with what the path names now; if they differ, close and begin again: see `inode`

Releasing an exclusive lock unlinks the file before it unlocks. A sharer unlocks and removes the file if nobody else
has it. With `keep=True` the file stays, and stays one inode: cheaper, and right where other tools expect to find it. On
network file systems it always stays: see `inode`.

What is not promised: that the file is gone at once when holders crash, or when removal is not permitted (another
user's file in a sticky directory). Programs that delete the file behind our back cause a second holder; we find
that out on `check` and `release` (LockLost), and never delete the second holder's file.
"""

from __future__ import annotations

from sys import modules
from time import time

from .. import gate, system
from ..gate import current_thread
from ..paths import LOCAL, mount_of
from ..wait import Granted
from .inode import InodeHold, InodeLock, would_deadlock
from .queue import remove_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from ..paths import Mount
    from ..status import Status
    from ..wait import Step
    from . import base

_REGULAR = 0o10  # the type in st_mode, above its 12 permission bits
_FRESH = 0.1  # seconds
_A_WHILE = 0.001  # seconds after which a look at the queue costs nothing in comparison


class KernelHold(InodeHold):
    """A held `Lock`."""

    __slots__ = ()

    lock: Lock

    def _begin(self, lock: Lock, fd: int, inode: gate.Inode, mount: Mount, queued: bool) -> None:  # type: ignore[override]
        # What `Hold` does, without the call: this is the path that everybody takes.
        self.lock = lock
        self.acquired_at = time()
        self._outer = None
        self._mount = mount
        self._came_through_queue = queued
        self._called_at = 0.0
        lock._count()
        self._book = book = gate.book
        if "asyncio" in modules or "trio" in modules:  # else no task is worth a call either
            self._serial = book.write_down(fd, inode, lock.shared)
        else:
            self._serial = serial = book.new_serial()
            book.holds[serial] = (fd, inode, lock.shared, current_thread(), None)

    def _release(self, entry: gate.Entry) -> bool:
        lock = self.lock
        fd, inode, shared, _, _ = entry
        mount = self._mount
        set_lock = system.lock_range if mount.ranged else system.lock
        named = left_for_next = False
        try:
            st = system.stat(lock.path)
            named = (st.st_dev, st.st_ino) == inode
            # What got content meanwhile is not ours to remove.
            if named and not lock.keep and mount.removes and not st.st_size:
                if shared:
                    system.mark_removal(fd)
                    set_lock(fd, system.UN)
                    lock._remove_unused(fd, inode, mount.ranged)
                else:
                    look = self._came_through_queue or time() - self.acquired_at > _A_WHILE
                    left_for_next = look and system.access(lock._queue, 0)
                    if not left_for_next:
                        lock._remove(inode)
        except (FileNotFoundError, NotADirectoryError):
            named = False
        except BlockingIOError:  # another program has locked it from end to end
            lock._metrics.cleanups_skipped.bump()
        finally:
            # Unlock before closing: a child that inherited a copy of the descriptor would keep the lock.
            try:
                set_lock(fd, system.UN)
            finally:
                self._is_closed = True
                lock._let_go(fd, inode if named else None, mount)
        # Only now, when nobody waits for us any more: removing a directory takes its time.
        # Others may have left the file on account of a queue that is gone now.
        if self._called_at and not shared:
            gate.book.note_turn(lock._file, self._called_at)
        if (self._called_at and remove_queue(lock._queue)) or (left_for_next and not system.access(lock._queue, 0)):
            lock._sweep()
        return named


class Lock(InodeLock[KernelHold]):
    """A lock on a path, for all processes of this machine, and of others where the file system allows it.

    shared: any number of sharers at once, or one exclusive holder
    timeout: how long `acquire` and `with` wait: None for ever, 0 one try, else seconds
    keep: leave the file in place instead of removing it with the last holder
    fair: first come, first served; False lets whoever is quickest go first
    mode: permissions of the file, where it has to be made
    """

    __slots__ = ("_count", "_op", "keep", "shared")

    _options = ("shared", "timeout", "keep", "fair", "mode")
    _hold_type = KernelHold

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
        InodeLock.__init__(self, path, "lock", timeout, fair, mode)
        self.shared = shared
        self.keep = keep
        self._op = system.SH_NB if shared else system.EX_NB
        self._count = self._metrics.acquisitions.bump

    @property
    def removes_file(self) -> bool:  # type: ignore[override]
        return not self.keep

    def status(self) -> Status:
        from ..status import of_kernel_lock

        return of_kernel_lock(self.path, keep=self.keep)

    def _try(self) -> KernelHold | None:
        if self._unchecked:
            self._check_mount()
        if not self.fair or not system.access(self._queue, 0):
            return self._attempt()
        turn = gate.book.turns.get(self._file)
        if turn is not None and not self.shared and turn.take():
            return self._attempt(queued=True)
        # A caller that shares already may share again: to queue behind a writer that waits for it would be a deadlock.
        if self.shared and self._held_by_caller(asynchronous=gate.current_task() is not None):
            return self._attempt()
        return None

    def _attempt(self, queued: bool = False) -> KernelHold | None:
        retries = 0
        while True:
            fd, hold, busy = -1, None, False
            if self._file is not self.path:
                self._follow_link()
            try:
                try:
                    fd = system.open_fd(self._file, system.O_LOCK, self.mode)
                except OSError as error:
                    fd = self._open_otherwise(error)
                st = system.fstat(fd)
                mode, ino, dev, _, _, _, size, _, _, _ = st  # half the price of naming them one by one
                if size or mode >> 12 != _REGULAR:
                    raise self._not_a_lock_file()
                inode = (dev, ino)
                mount = LOCAL if dev & 0xFFF00 else mount_of(dev, self._file)
                try:
                    (system.lock_range if mount.ranged else system.lock)(fd, self._op)
                except BlockingIOError:
                    # Once more in the end: whoever looked at the lock only to remove the file may have let it be.
                    busy = not mount.removes or (
                        not self._is_being_removed(fd, inode) and not self._take(fd, mount.ranged)
                    )
                else:
                    named = system.stat(self.path)
                    if named.st_ino == ino and named.st_dev == dev:
                        hold = KernelHold()
                        hold._begin(self, fd, inode, mount, queued)
                        if hold.acquired_at - st.st_mtime > _FRESH and not self.keep:
                            _say_when(fd)
                        return hold
            except FileNotFoundError:
                if fd < 0:
                    raise
                # else it was unlinked between our open and our lock
            except BaseException as error:  # an interrupt, for one, which may come after every line
                self._abandon(fd, hold, error)
                return None
            system.close(fd)
            if busy:
                return None
            retries += 1
            self._file_was_replaced(retries)

    def _abandon(self, fd: int, hold: KernelHold | None, error: BaseException) -> None:
        """Undo an attempt that went wrong, and raise the error unless it means that the lock is busy."""
        if hold is not None and hold._has_begun:
            hold.release()
        elif fd >= 0:
            gate.book.forget(fd)
            system.close(fd)
        elif isinstance(error, BlockingIOError):
            return  # Windows: opened by somebody who shares it with nobody
        raise error

    def _let_go(self, fd: int, inode: gate.Inode | None, mount: Mount) -> None:
        """The file is unlocked. `inode`: what it is, if the path still names it."""
        system.close(fd)

    def _check_file(self, fd: int, st: os.stat_result) -> bool:
        if st.st_size or st.st_mode >> 12 != _REGULAR:
            raise self._not_a_lock_file()
        return True

    def _take(self, fd: int, ranged: bool) -> bool:
        return _try_lock(fd, self._op, ranged)

    def _take_all(self, fd: int, ranged: bool) -> bool:
        return _try_lock(fd, system.EX_NB, ranged)

    def _begin(self, hold: KernelHold, fd: int, st: os.stat_result, mount: Mount) -> None:
        hold._begin(self, fd, (st.st_dev, st.st_ino), mount, True)
        if hold.acquired_at - st.st_mtime > _FRESH and not self.keep:
            _say_when(fd)

    def _block(self, fd: int, ranged: bool) -> Step:
        return Granted(system.lock_range if ranged else system.lock, fd, self._op & ~system.NB)

    def _refuse_deadlock(self, *, asynchronous: bool) -> list[gate.Entry]:
        mine = self._held_by_caller(asynchronous=asynchronous)
        if any(not (self.shared and shared) for _, _, shared, _, _ in mine):
            raise would_deadlock(self.path, asynchronous, "holds the lock")
        return mine


def _say_when(fd: int) -> None:
    """Have the file's modification time say when it was acquired, for `status`, where it was not made just now."""
    try:
        system.touch(fd)
    except OSError:
        pass  # another user's file


def _try_lock(fd: int, op: int, ranged: bool) -> bool:
    try:
        (system.lock_range if ranged else system.lock)(fd, op)
    except BlockingIOError:
        return False
    return True
