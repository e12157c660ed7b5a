"""`StandingLock`: a kept `Lock` for a caller that takes it all the time. Its file stays open in between.

To lock a file that is open, and to compare it with the path, is half of what an acquire does. The rules are the same:
the lock is held only while the file is locked and the path names it. If the path names another file, that one is
opened.

A waiter with a timeout wakes up when the file is closed. So the releaser unlocks, looks for a queue, and closes the
file if there is one. A waiter that joins the queue later makes one more attempt before it sleeps. A waiter without a
queue (`fair=False`) may wake up late.
"""

from __future__ import annotations

from .. import system
from ..errors import LockLost
from ..files import named
from .lock import Lock
from .path_lock import KeptOpenFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import base
    from .path_lock import OpenFile


class StandingLock(Lock):
    __slots__ = ("_standing",)

    def __init__(self, path: base.StrPath, *, timeout: float | None, mode: int) -> None:
        self._standing: list[OpenFile] = []  # at most one; a list, because popping and appending are atomic
        Lock.__init__(self, path, keep=True, timeout=timeout, mode=mode)
        self.keeps_open = True
        self._file_type = KeptOpenFile

    def close(self) -> None:
        """Close the file until the next time."""
        while self._standing:
            self._standing.pop().close()

    def _pop_standing(self) -> OpenFile | None:
        """The open file, unless a fork has closed it."""
        try:
            file = self._standing.pop()
        except IndexError:
            return None
        return file if file.is_open else None

    def _open(self, create: bool = True) -> OpenFile | None:
        file = self._pop_standing()
        if file is not None and named(self.path, file.inode) is None:
            file.close()
            file = None
        return file or Lock._open(self, create)

    def _put_away(self, file: OpenFile, reusable: bool) -> None:
        if not reusable or self._standing or system.access(self._queue, 0):
            file.close()
        else:
            self._standing.append(file)

    def take(self) -> OpenFile | None:
        """`try_acquire` without a hold, for a caller that gives the file back in the same thread, in a moment.

        None: the lock is held, or others queue for it, or the file has to be opened; `acquire` does all of that.
        """
        if system.access(self._queue, 0):
            return None
        file = self._pop_standing()
        if file is None:
            return None
        try:
            if self._take(file) is True:
                if named(self.path, file.inode) is not None:
                    self._count()
                    return file
                self._unlock(file)
        except BaseException:
            file.close()
            raise
        self._put_away(file, True)
        return None

    def give_back(self, file: OpenFile) -> None:
        """Release what `take` took. Raises LockLost if the file was replaced meanwhile."""
        try:
            still_named = named(self.path, file.inode) is not None
            self._unlock(file)
        except BaseException:
            file.close()
            raise
        self._put_away(file, still_named)
        if not still_named:
            raise LockLost(
                f"{self.path}: the lock file was removed or replaced while it was held, so another process may have "
                "held it too. Find out what deletes it.",
                path=self.path,
            )
