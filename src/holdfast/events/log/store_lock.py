"""`StoreLock`: the lock of an event store, `.store.lock`. Its file stays open between two appends.

Locking an open file, and comparing it with the path, costs half of an acquire. The rules are those of
`Lock(keep=True)`: the lock is held only while the file is locked and the path names it. If the path names another file,
that file is opened.

A waiter with a timeout wakes up when the file is closed. So the releaser unlocks, checks for a queue, and closes the
file if there is one. A waiter that joins the queue later makes one more attempt before it sleeps.
"""

from __future__ import annotations

from ... import system
from ...errors import LockLost
from ...files import named
from ...locks.base import BaseLock
from ...locks.engine import Outcome
from ...locks.hold import Hold
from ...locks.lock import WholeFile
from ...locks.path_lock import OpenFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...locks.base import StrPath


class _KeptOpen(WholeFile):
    """The engine: it keeps the open file for the next acquire instead of closing it."""

    __slots__ = ("spare",)

    keeps_open = True

    def __init__(self, path: StrPath, mode: int) -> None:
        self.spare: list[OpenFile] = []  # at most one; a list, because popping and appending are atomic
        WholeFile.__init__(self, path, shared=False, keep=True, fair=True, mode=mode)

    def pop_spare(self) -> OpenFile | None:
        """The open file, unless a fork has closed it."""
        try:
            file = self.spare.pop()
        except IndexError:
            return None
        if not file.is_open:
            return None
        file.engine = self
        return file

    def open(self, create: bool = True) -> OpenFile:
        file = self.pop_spare()
        if file is not None and named(self.name, file.key) is None:
            file.close()
            file = None
        if file is None:
            return WholeFile.open(self, create)
        file.wait = None
        return file

    def put_away(self, file: OpenFile, reusable: bool) -> None:
        """Keep the file. The next hold gets another owner of it: an interrupted release may still close this one."""
        if not self.can_keep(reusable):
            file.close()
            return
        kept = OpenFile(file.detach())
        kept.key, kept.st, kept.mount, kept.set_lock = file.key, file.st, file.mount, file.set_lock
        self.spare.append(kept)  # without `engine`, so without a cycle: the file is closed with the engine

    def can_keep(self, reusable: bool) -> bool:
        return reusable and not self.spare and not system.access(self.location.queue, 0)


class StoreLock(BaseLock[Hold]):
    """The lock of the event store in the directory of `path`."""

    __slots__ = ("path",)

    _engine: _KeptOpen

    def __init__(self, path: StrPath, *, timeout: float | None, mode: int) -> None:
        engine = _KeptOpen(path, mode)
        BaseLock.__init__(self, engine, timeout)
        self.path = engine.name

    def attempt(self) -> Hold | Outcome:
        """One attempt to acquire, without waiting."""
        found = self._engine.first_attempt()
        return found if isinstance(found, Outcome) else Hold(self, found)

    def close(self) -> None:
        """Close the file until the next time."""
        while self._engine.spare:
            self._engine.spare.pop().close()

    def take(self) -> OpenFile | None:
        """`try_acquire` without a hold, for a caller that calls `give_back` in the same thread, in a moment.

        None: the lock is held, waiters queue for it, or the file is not open. Then use `acquire`.
        With `attempt` alone, an append with `durable=False` takes 25 % longer.
        """
        engine = self._engine
        if system.access(engine.location.queue, 0):
            return None
        file = engine.pop_spare()
        if file is None:
            return None
        try:
            if engine.take(file) is True:
                if named(self.path, file.key) is not None:
                    next(self._acquisitions)
                    return file
                file.set_lock(file.fd, system.UN)
        except BaseException:
            file.close()
            raise
        engine.put_away(file, True)
        return None

    def give_back(self, file: OpenFile) -> None:
        """Release what `take` took. Raises LockLost if the file was replaced meanwhile."""
        engine = self._engine
        try:
            still_named = named(self.path, file.key) is not None
            file.set_lock(file.fd, system.UN)
        except BaseException:
            file.close()
            raise
        if engine.can_keep(still_named):
            del file.engine  # no cycle
            engine.spare.append(file)
        else:
            file.close()
        if not still_named:
            raise LockLost(
                f"{self.path}: the lock file was removed or replaced while it was held, so another process may have "
                "held it too. Find the program that deletes it.",
                path=self.path,
            )
