"""`StandingLock`: a kept `Lock` for one who takes it all the time, and leaves its file open in between.

To lock a file that is open, and to look whether the path still names it, is half of what an acquire does. The rules are
the same: it is held only while locked, and only if the path names it then. Where that is not so, it is opened anew.

Who waits with a timeout is woken when the file is closed. So it is closed if anybody queues, for which one looks after
unlocking: a waiter tries once more after it has joined. Who waits without queueing (`fair=False`) may be woken late.
"""

from __future__ import annotations

from .. import gate, system
from ..errors import LockLost
from .kernel import KernelHold, Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..paths import Mount
    from . import base


class StandingLock(Lock):
    __slots__ = ("_open_files", "_taken")

    _taken: tuple[gate.Book, int, gate.Inode, Mount] | None

    def __init__(self, path: base.StrPath, *, timeout: float | None, mode: int) -> None:
        # At most one; a list, because taking it out and putting it in are atomic.
        self._open_files: list[tuple[gate.Book, int, gate.Inode, Mount]] = []
        self._taken = None
        Lock.__init__(self, path, keep=True, timeout=timeout, mode=mode)

    def close(self) -> None:
        """Close the file until the next time."""
        if self._taken is not None and self._taken[0] is not gate.book:
            self._taken = None  # it was another process's, which has forked us
        while self._open_files:
            book, fd, _, _ = self._open_files.pop()
            if book is gate.book:  # else a fork has closed it
                _close(book, fd)

    def __del__(self) -> None:
        self.close()

    def take(self) -> bool:
        """`try_acquire` without a hold, for one who gives back what it took, in the same thread, in a moment.

        False: somebody has it or queues for it, or the file has to be opened; `acquire` does all of that.
        """
        if system.access(self._queue, 0):
            return False
        try:
            self._taken = self._open_files.pop()
        except IndexError:
            return False
        book, fd, inode, mount = self._taken
        if book is not gate.book:
            self._taken = None
            return False
        try:
            if not mount.ranged:
                system.lock(fd, self._op)
                if self._names(inode):
                    self._count()
                    return True
                system.lock(fd, system.UN)
        except BlockingIOError:
            pass
        except BaseException:
            self.drop()
            raise
        self._put_away()
        return False

    def give_back(self) -> None:
        """Release what `take` took. Raises LockLost if the file was replaced meanwhile."""
        taken = self._taken
        assert taken is not None
        _, fd, inode, _ = taken
        try:
            named = self._names(inode)
            system.lock(fd, system.UN)
        except BaseException:
            self.drop()
            raise
        if named and not self._open_files and not system.access(self._queue, 0):
            self._open_files.append(taken)
            if self._taken is taken:  # else somebody has taken it again since it was unlocked
                self._taken = None
        elif self._taken is taken:
            self.drop()
        else:
            _close(taken[0], fd)
        if not named:
            raise LockLost(
                f"{self.path}: the lock file was removed or replaced while it was held, so somebody else may have held "
                "it too. Find out what deletes it.",
                path=self.path,
            )

    def _put_away(self) -> None:
        """Keep what is not locked any more for the next time."""
        if self._taken is not None and not self._open_files:
            self._open_files.append(self._taken)
            self._taken = None
        else:
            self.drop()

    def drop(self) -> None:
        """Close what was taken, and so unlock it, whatever state an interrupt has left it in."""
        taken = self._taken
        if taken is not None:
            self._open_files = [one for one in self._open_files if one[1] != taken[1]]
            self._taken = None
            _close(taken[0], taken[1])

    def _let_go(self, fd: int, inode: gate.Inode | None, mount: Mount) -> None:
        if inode is None or self._open_files or system.access(self._queue, 0):
            system.close(fd)
            return
        gate.book.open_fds.add(fd)
        self._open_files.append((gate.book, fd, inode, mount))

    def _attempt(self, queued: bool = False) -> KernelHold | None:
        try:
            book, fd, inode, mount = self._open_files.pop()
        except IndexError:
            return Lock._attempt(self, queued)
        if book is not gate.book:
            return Lock._attempt(self, queued)
        hold = None
        try:
            (system.lock_range if mount.ranged else system.lock)(fd, self._op)
            if self._names(inode):
                hold = KernelHold()
                hold._begin(self, fd, inode, mount, queued)
                book.open_fds.discard(fd)
                return hold
        except BlockingIOError:
            if self._open_files:
                _close(book, fd)
            else:
                self._open_files.append((book, fd, inode, mount))
            return None
        except BaseException:
            if hold is not None and hold._has_begun:
                hold.release()
            else:
                book.forget(fd)
                system.close(fd)
            raise
        _close(book, fd)
        return Lock._attempt(self, queued)


def _close(book: gate.Book, fd: int) -> None:
    book.open_fds.discard(fd)
    system.close(fd)
