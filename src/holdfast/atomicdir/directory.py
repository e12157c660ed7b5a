"""`AtomicDir`: a directory is replaced as a whole, or not at all.

A writer builds the next version in a private sibling, under the exclusive lock `<dir>.lock`, makes it durable, and
commits; how, and what happens after a crash, is in `commit`. Readers hold the lock shared.

A reader that opens files by path one after the other may see some of the old version and some of the new, whichever way
the names are changed: never missing is not never mixed. `read` keeps writers out meanwhile; `snapshot` is a directory
descriptor, which stays with its version.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import Path

from .. import process
from ..errors import HoldfastError, NotLocked, WouldDeadlock
from ..locks import base
from ..locks.lock import Lock
from ..offload import in_thread
from . import copying
from .cleanup import drop
from .commit import Site
from .snapshot import Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any, NoReturn

_MAX_LOOKS = 20
_NONE_YET = "there is no version of this directory yet"
# Nobody else looks into what is being built. The sticky bit does nothing there; without it, nobody could tell whether
# the block has asked for 0o700.
_WHILE_BUILT = 0o1700


class AtomicDir:
    """A directory that changes as one step.

    keep: how many previous versions to keep, for `rollback`
    timeout: how long to wait for the lock: None for ever, 0 one try, else seconds
    durable: what was committed survives a power failure
    """

    def __init__(
        self, path: base.StrPath, *, keep: int = 0, timeout: float | None = None, durable: bool = True
    ) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
            raise ValueError(f"keep is a number of versions, not {keep!r}")
        text = os.fsdecode(path)
        if os.path.basename(text.rstrip(os.sep + (os.altsep or ""))) in ("", os.curdir, os.pardir):
            raise ValueError(f"the path of a directory to replace has a name at its end, not {text!r}")
        self.path = os.path.abspath(text)
        self.keep = keep
        self.timeout = base.check_timeout(timeout)
        self.durable = durable

    def __repr__(self) -> str:
        return f"holdfast.AtomicDir({self.path!r})"

    # What one can do.

    def replace(self, timeout: float | base.Default | None = base.DEFAULT) -> Change:
        """`with site.replace() as new`: fill the empty directory `new`, which then takes the place of the old one."""
        return Change(self, timeout, copies=False)

    def edit(self, timeout: float | base.Default | None = base.DEFAULT) -> Change:
        """The same, beginning with a copy of what is there."""
        return Change(self, timeout, copies=True)

    def read(self, timeout: float | base.Default | None = base.DEFAULT) -> Reading:
        """`with site.read() as path`: nobody commits meanwhile."""
        return Reading(self, timeout)

    def snapshot(self, timeout: float | base.Default | None = base.DEFAULT) -> Snapshot:
        """`with site.snapshot() as snap`: the version of this moment, for as long as one likes; writers go on."""
        return Snapshot(self.path, self._patience(timeout), self._site, self.read)

    def recover(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        """Finish or undo what a crash left. Kept versions stay.

        Everything else here does so where it has to; this is for doing only that.
        """
        place = self._site()
        with self._acquire(place, timeout):
            place.recover()

    async def arecover(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        place = self._site()
        async with await self._aacquire(place, timeout):
            await in_thread(place.recover)

    @property
    def version(self) -> int:
        """The number of the version that is there, more with every commit; 0 if there is none."""
        return self._site().version()

    def versions(self) -> list[int]:
        """The numbers of the versions there are, the current one last. Those before it can be rolled back to."""
        place = self._site()
        for _ in range(_MAX_LOOKS):  # without the lock: what was the current one a moment ago may be an old one by now
            current = place.version()
            found = [number for number in place.old() if number < current or not current]
            if place.version() == current:
                break
        return [*found, current] if current else found

    def rollback(self, to: int | None = None, timeout: float | base.Default | None = base.DEFAULT) -> int:
        """Bring back an earlier version: the one before, or number `to`. What it replaces is kept in its stead."""
        place = self._site()
        with self._acquire(place, timeout) as hold:
            return place.rollback(to, hold)

    async def arollback(self, to: int | None = None, timeout: float | base.Default | None = base.DEFAULT) -> int:
        place = self._site()
        async with await self._aacquire(place, timeout) as hold:
            return await in_thread(lambda: place.rollback(to, hold))

    @property
    def lock(self) -> Lock:
        """The lock that writers hold, where the directory really is: for its `status()`."""
        return Lock(self._site().lock_file)

    def _acquire(self, place: Site, timeout: float | base.Default | None, *, shared: bool = False) -> base.Hold:
        with _explained(place):
            return Lock(place.lock_file, shared=shared).acquire(self._patience(timeout))

    async def _aacquire(self, place: Site, timeout: float | base.Default | None, *, shared: bool = False) -> base.Hold:
        with _explained(place):
            return await Lock(place.lock_file, shared=shared).aacquire(self._patience(timeout))

    def _site(self) -> Site:
        return Site(self.path, self.keep, self.durable)

    def _patience(self, timeout: float | base.Default | None) -> float | None:
        return self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)


@contextmanager
def _explained(place: Site) -> Iterator[None]:
    try:
        yield
    except WouldDeadlock:
        text = (
            f"{place.path}: you are inside a block of this AtomicDir already; leave it first, or do both in one block"
        )
        raise WouldDeadlock(text, path=place.path) from None


class _Held:
    """A block in which the lock is held: entered and left in a thread of its own where it is `async`."""

    shared = False
    usage = ""

    def __init__(self, lock: AtomicDir, timeout: float | base.Default | None) -> None:
        self._atomic = lock
        self._timeout = lock._patience(timeout)
        self._hold: base.Hold | None = None

    @property
    def hold(self) -> base.Hold:
        """The lock, while the block is entered."""
        if self._hold is None:
            raise NotLocked(f"{self._atomic.path}: the lock is held only inside the block")
        return self._hold

    def __repr__(self) -> str:
        return f"<a block of {self._atomic!r}; use: {self.usage}>"

    def _no_path(self) -> NoReturn:
        raise TypeError(f"this is no path, but the block that gives one; use: {self.usage}")

    def __truediv__(self, _: object) -> NoReturn:
        self._no_path()

    def __fspath__(self) -> NoReturn:
        self._no_path()

    def _begin(self, hold: base.Hold) -> Any:
        raise NotImplementedError

    def _end(self, hold: base.Hold, failed: bool) -> None:
        raise NotImplementedError

    def _prepare(self) -> Site:
        if self._hold is not None:
            raise HoldfastError("this block is entered already; call the method again for another one")
        self._place = self._atomic._site()
        return self._place

    def acquire(self) -> base.Hold:
        """The first half of entering: wait for the lock. `enter` is the other one."""
        return self._atomic._acquire(self._prepare(), self._timeout, shared=self.shared)

    def enter(self, hold: base.Hold) -> Any:
        try:
            result = self._begin(hold)
        except BaseException:
            hold.release()
            raise
        self._hold = hold
        return result

    def _leave(self, failed: bool) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            raise NotLocked(f"{self._atomic.path}: this block was not entered; use: {self.usage}")
        if hold._registry is not process.registry:
            return  # a forked child leaves its parent's block: the lock and what is being built are not its own
        try:
            self._end(hold, failed)
        finally:
            if not hold.released:
                hold.__exit__(*((None, None, None) if not failed else (BaseException, BaseException(), None)))

    def __enter__(self) -> Any:
        return self.enter(self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error is not None)

    async def __aenter__(self) -> Any:
        hold = await self._atomic._aacquire(self._prepare(), self._timeout, shared=self.shared)
        try:
            return await in_thread(lambda: self.enter(hold))
        except BaseException:
            if self._hold is hold:  # entered, and cancelled meanwhile
                await in_thread(lambda: self._leave(failed=True))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await in_thread(lambda: self._leave(error is not None))


class Change(_Held):
    """A version that is being built. Committed when the block ends, dropped if it raises."""

    def __init__(self, lock: AtomicDir, timeout: float | base.Default | None, *, copies: bool) -> None:
        super().__init__(lock, timeout)
        self._copies = copies
        self.usage = f"with site.{'edit' if copies else 'replace'}() as new"
        self._new = ""

    def _begin(self, hold: base.Hold) -> Path:
        place = self._place
        place.finish()  # nothing that is kept is removed before this change has succeeded
        place.check_replaceable()
        self._new = place.new_name()
        try:
            os.mkdir(self._new)
            self._furnish()
        except BaseException:
            drop(self._new)
            raise
        return Path(self._new)

    def _furnish(self) -> None:
        place, new = self._place, self._new
        there = os.path.isdir(place.path)
        self._like = os.stat(place.path if there else new)
        os.chmod(new, _WHILE_BUILT)
        if there:
            place.check_layer(new)
            if self._copies:
                copying.Copier().copy(place.path, new)
                place.unnumber(new)
            else:
                copying.copy_acls(place.path, new)
            os.chmod(new, _WHILE_BUILT)  # access control lists have changed it
        self._made = os.lstat(new)

    def _end(self, hold: base.Hold, failed: bool) -> None:
        place, new = self._place, self._new
        if failed:
            drop(new)
            return
        try:
            place.check_built(new)
            self._dress()
            place.commit(new, hold)
        except BaseException:
            place.settle(new)
            raise
        place.prune()

    def _dress(self) -> None:
        """Give it the owner and the mode of the old version, unless the block gave it others."""
        now, made, mode = os.lstat(self._new), self._made, self._like.st_mode & 0o7777
        if (now.st_uid, now.st_gid) == (made.st_uid, made.st_gid) != (self._like.st_uid, self._like.st_gid):
            mode = copying.give_owner(self._new, self._like)
        if now.st_mode == made.st_mode:
            os.chmod(self._new, mode)


class Reading(_Held):
    """The directory, while nobody commits."""

    shared = True
    usage = "with site.read() as path"

    def _begin(self, hold: base.Hold) -> Path | None:
        """None: a commit was begun by one who is dead, as we hold the lock. It has to be finished first."""
        if self._place.commit_file.exists():
            return None
        if not os.path.isdir(self._place.path):
            raise FileNotFoundError(errno.ENOENT, _NONE_YET, self._place.path)
        return Path(self._place.path)

    def _end(self, hold: base.Hold, failed: bool) -> None:
        pass

    def __enter__(self) -> Path:
        while True:
            path: Path | None = super().__enter__()
            if path is not None:
                return path
            self._leave(failed=False)
            self._atomic.recover(self._timeout)

    async def __aenter__(self) -> Path:
        while True:
            path: Path | None = await super().__aenter__()
            if path is not None:
                return path
            self._leave(failed=False)
            await self._atomic.arecover(self._timeout)
