"""`AtomicDir`: a directory is replaced as a whole, or not at all.

A writer builds the next version in a private sibling, under the exclusive lock `<dir>.lock`, makes it durable, and
commits; how, and what happens after a crash, is in `versions`. Readers hold the lock shared.

A reader that opens files by path one after the other may see some of the old version and some of the new, whichever way
the names are changed: never missing is not never mixed. `read` keeps writers out meanwhile; `snapshot` is a directory
descriptor, which stays with its version.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from . import system, trees
from .errors import HoldfastError, NotLocked, Unsupported
from .locks import base
from .locks.kernel import Lock
from .paths import mount_at
from .versions import Site, discard, try_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, TypeVar

    Result = TypeVar("Result")

_NONE_YET = "there is no version of this directory yet"
_WHILE_BUILT = 0o700  # nobody else looks into what is being built


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
        if not text or text.endswith(("/.", "/..")) or text in (".", ".."):
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
        return Snapshot(self, timeout)

    def recover(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        """Finish or undo what a crash left. Kept versions stay.

        Everything else here does so where it has to; this is for doing only that.
        """
        place = self._site()
        with self._lock(place).acquire(self._patience(timeout)):
            place.recover()

    async def arecover(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        place = self._site()
        async with await self._lock(place).aacquire(self._patience(timeout)):
            await _in_thread(place.recover)

    @property
    def version(self) -> int:
        """The number of the version that is there, more with every commit; 0 if there is none."""
        return self._site().version()

    def versions(self) -> list[int]:
        """The numbers of the versions there are, the current one last. Those before it can be rolled back to."""
        place = self._site()
        current = place.version()
        return [*place.old(), *([current] if current else [])]

    def rollback(self, to: int | None = None, timeout: float | base.Default | None = base.DEFAULT) -> int:
        """Bring back an earlier version: the one before, or number `to`. What it replaces is kept in its stead."""
        place = self._site()
        with self._lock(place).acquire(self._patience(timeout)) as hold:
            return place.rollback(to, hold)

    async def arollback(self, to: int | None = None, timeout: float | base.Default | None = base.DEFAULT) -> int:
        place = self._site()
        async with await self._lock(place).aacquire(self._patience(timeout)) as hold:
            return await _in_thread(lambda: place.rollback(to, hold))

    def _lock(self, place: Site, *, shared: bool = False) -> Lock:
        return Lock(place.path + ".lock", shared=shared)

    def _site(self) -> Site:
        return Site(self.path, self.keep, self.durable)

    def _patience(self, timeout: float | base.Default | None) -> float | None:
        return self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)


class _Held:
    """A block in which the lock is held: entered and left in a thread of its own where it is `async`."""

    shared = False

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

    def _begin(self, hold: base.Hold) -> Any:
        raise NotImplementedError

    def _end(self, hold: base.Hold, failed: bool) -> None:
        raise NotImplementedError

    def _enter(self, hold: base.Hold) -> Any:
        if self._hold is not None:
            raise HoldfastError("this block is entered already; call the method again for another one")
        try:
            result = self._begin(hold)
        except BaseException:
            hold.release()
            raise
        self._hold = hold
        return result

    def _leave(self, failed: bool) -> None:
        hold, self._hold = self._hold, None
        assert hold is not None
        try:
            self._end(hold, failed)
        finally:
            if not hold.released:
                hold.__exit__(*((None, None, None) if not failed else (BaseException, BaseException(), None)))

    def __enter__(self) -> Any:
        place = self._place = self._atomic._site()
        return self._enter(self._atomic._lock(place, shared=self.shared).acquire(self._timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error is not None)

    async def __aenter__(self) -> Any:
        place = self._place = self._atomic._site()
        hold = await self._atomic._lock(place, shared=self.shared).aacquire(self._timeout)
        return await _in_thread(lambda: self._enter(hold))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _in_thread(lambda: self._leave(error is not None))


class Change(_Held):
    """A version that is being built. Committed when the block ends, dropped if it raises."""

    def __init__(self, lock: AtomicDir, timeout: float | base.Default | None, *, copies: bool) -> None:
        super().__init__(lock, timeout)
        self._copies = copies
        self._new = ""
        self._mode = 0

    def _begin(self, hold: base.Hold) -> Path:
        place = self._place
        place.finish()  # nothing that is kept is removed before this change has succeeded
        self._new = place.new_name()
        os.mkdir(self._new)
        try:
            there = os.path.isdir(place.path)
            self._mode = os.stat(place.path if there else self._new).st_mode & 0o7777
            os.chmod(self._new, _WHILE_BUILT)
            if there and self._copies:
                trees.Copier().copy(place.path, self._new)
        except BaseException:
            trees.remove(self._new)
            raise
        return Path(self._new)

    def _end(self, hold: base.Hold, failed: bool) -> None:
        place, new = self._place, self._new
        if failed:
            discard(new)
            return
        try:
            if _mode_of(new) == _WHILE_BUILT:  # unless the block gave it another one
                os.chmod(new, self._mode)
            place.commit(new, hold)
        except BaseException:
            # Unless it happened: then `new` is what was there, or gone, or the commit file says how to go on.
            if not os.path.lexists(place.commit_file):
                discard(new)
            raise
        place.prune()


class Reading(_Held):
    """The directory, while nobody commits."""

    shared = True

    def _begin(self, hold: base.Hold) -> Path | None:
        """None: a commit was begun by one who is dead, as we hold the lock. It has to be finished first."""
        if os.path.lexists(self._place.commit_file):
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


class Snapshot:
    """One version, for as long as this is open. `fd` is for `dir_fd=`; `path` is where the system has paths for it."""

    def __init__(self, lock: AtomicDir, timeout: float | base.Default | None) -> None:
        self._atomic = lock
        self._timeout = lock._patience(timeout)
        self._fd = -1
        self.version = 0  # its number, once it is open

    @property
    def fd(self) -> int:
        if self._fd < 0:
            raise NotLocked(f"{self._atomic.path}: this snapshot is not open: with site.snapshot() as snap: …")
        return self._fd

    @property
    def path(self) -> Path:
        """A path to this version, whatever its name is by now. It is good in this process only."""
        return Path(f"/proc/self/fd/{self.fd}")

    def fileno(self) -> int:
        return self.fd

    def __enter__(self) -> Snapshot:
        while not self._open():
            with self._atomic.read(self._timeout):  # until it is there; raises if it is not
                pass
        return self

    async def __aenter__(self) -> Snapshot:
        while not await _in_thread(self._open):
            async with self._atomic.read(self._timeout):
                pass
        return self

    def _open(self) -> bool:
        """False: there is none at this moment, perhaps because one is being put in the place of another."""
        place = self._atomic._site()
        mount = mount_at(os.stat(place.parent).st_dev, place.parent)
        if mount.ranged or mount.refusal:
            raise Unsupported(
                f"{place.path}: no snapshot on {mount.where} ({mount.kind}), where directories cannot be locked. "
                "Use read().",
                path=place.path,
            )
        while True:
            try:
                fd = system.open_fd(place.path, system.O_SYNCABLE_FOLDER)
            except FileNotFoundError:
                return False
            # Whoever removes an old version has an exclusive lock on it. If it is still the current one afterwards, it
            # was not old when we locked it.
            if try_lock(fd, system.SH_NB):
                version = place.version()
                if _names(place.path, fd):
                    self._fd, self.version = fd, version
                    return True
            system.close(fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            place = self._atomic._site()
            current = _names(place.path, fd)
        finally:
            system.close(fd)
        if not current:
            self._tidy(place)

    def _tidy(self, place: Site) -> None:
        """What we used may be there on our account only. One who may not remove it leaves it to the next writer."""
        try:
            hold = self._atomic._lock(place).try_acquire()
            if hold is not None:  # else a writer is at it, and sees to it
                with hold:
                    place.remove_gone()
        except (OSError, HoldfastError):
            pass

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await _in_thread(self.close)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            system.close(self._fd)


def _mode_of(path: str) -> int:
    try:
        return os.lstat(path).st_mode & 0o7777
    except FileNotFoundError:
        return 0  # the commit says so


def _names(path: str, fd: int) -> bool:
    try:
        named, opened = os.stat(path), system.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


async def _in_thread(work: Callable[[], Result]) -> Result:
    from anyio import CancelScope
    from anyio.to_thread import run_sync

    result: list[Result] = []
    with CancelScope(shield=True):  # half of a commit is none
        result.append(await run_sync(work))
    return result[0]
