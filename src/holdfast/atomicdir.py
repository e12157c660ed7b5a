"""`AtomicDir`: a directory is replaced as a whole, or not at all.

A writer builds the next version in a private sibling, under the exclusive lock `<dir>.lock`, makes it durable, and
commits:

    exchange      the two directories exchange their names in one step (`renameat2`). The directory never vanishes
    commit file   where that cannot be done: `<dir>.commit` says what is to happen, and is durable before anything
                  does; the old is renamed away, the new is renamed in, the commit file is removed. Whoever comes after
                  a crash goes on from there

Beside the directory, never in it:

    site.lock             held by writers exclusively, by readers shared; gone when nobody uses it
    site.new-<16 hex>     being built, or, for a moment after an exchange, what was replaced. Of dead writers: removed
    site.old-<number>     an earlier version that is kept, or that a snapshot still uses
    site.commit           see above

Only who holds the lock exclusively makes, renames or removes any of these. So what is found of them under the lock was
left by the dead, except an old version on which a snapshot has a shared lock.

A reader that opens files by path one after the other may see some of the old version and some of the new, whichever way
the names are changed: never missing is not never mixed. `read` keeps writers out meanwhile; `snapshot` is a directory
descriptor, which stays with its version.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from threading import Thread
from time import sleep

from . import system, trees
from .errors import HoldfastError, NotLocked, Unsupported
from .locks import base
from .locks.kernel import Lock
from .paths import mount_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, TypeVar

    Result = TypeVar("Result")

_NOT_HERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_VERSION = "user.holdfast.version"
_NONE_YET = "there is no version of this directory yet"
_A_MOMENT = 0.02  # seconds
_A_FEW = 64  # files that are removed in a moment
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
        """Finish or undo what a crash left, and remove what is not to be kept.

        Everything else here does so where it has to; this is for doing only that.
        """
        place = Site(self)
        with self._lock(place).acquire(self._patience(timeout)):
            place.recover()

    async def arecover(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        place = Site(self)
        async with await self._lock(place).aacquire(self._patience(timeout)):
            await _in_thread(place.recover)

    @property
    def version(self) -> int:
        """The number of the version that is there, more with every commit; 0 if there is none."""
        return Site(self).version()

    def versions(self) -> list[int]:
        """The numbers of the versions there are, the current one last. Those before it can be rolled back to."""
        place = Site(self)
        current = place.version()
        return [*place.old(), *([current] if current else [])]

    def rollback(self, to: int | None = None, timeout: float | base.Default | None = base.DEFAULT) -> int:
        """Bring back an earlier version: the one before, or number `to`. What it replaces is kept in its stead."""
        place = Site(self)
        with self._lock(place).acquire(self._patience(timeout)) as hold:
            return place.rollback(to, hold)

    async def arollback(self, to: int | None = None, timeout: float | base.Default | None = base.DEFAULT) -> int:
        place = Site(self)
        async with await self._lock(place).aacquire(self._patience(timeout)) as hold:
            return await _in_thread(lambda: place.rollback(to, hold))

    def _lock(self, place: Site, *, shared: bool = False) -> Lock:
        return Lock(place.path + ".lock", shared=shared)

    def _patience(self, timeout: float | base.Default | None) -> float | None:
        return self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)


class Site:
    """The directory, where it really is, with its siblings. Whatever changes something needs the exclusive lock."""

    def __init__(self, lock: AtomicDir) -> None:
        self.path = os.path.realpath(lock.path)  # a symlink: its target is replaced, which need not exist yet
        self.parent, self.name = os.path.split(self.path)
        self.keep = lock.keep
        self.durable = lock.durable
        self._check()

    def _check(self) -> None:
        try:
            st = os.lstat(self.path)
        except FileNotFoundError:
            if not os.path.isdir(self.parent):
                text = "the directory above it does not exist; make it first"
                raise FileNotFoundError(errno.ENOENT, text, self.path) from None
            return
        if st.st_mode >> 12 != 0o4:
            raise NotADirectoryError(errno.ENOTDIR, "this is no directory; it was left as it is", self.path)
        if st.st_dev != os.stat(self.parent).st_dev or os.path.ismount(self.path):
            text = "a mount point cannot be replaced; use a directory in it"
            raise OSError(errno.EXDEV, text, self.path)

    # Names.

    def new_name(self) -> str:
        return f"{self.path}.new-{os.urandom(8).hex()}"

    def old_name(self, number: int) -> str:
        return f"{self.path}.old-{number}"

    @property
    def commit_file(self) -> str:
        return self.path + ".commit"

    def _siblings(self, pattern: str) -> list[re.Match[str]]:
        shape = re.compile(re.escape(self.name) + pattern)
        return [found for found in map(shape.fullmatch, os.listdir(self.parent)) if found is not None]

    def leftovers(self) -> list[str]:
        """What is being built, or is not needed any more: of the dead, for who holds the lock exclusively."""
        return [os.path.join(self.parent, found[0]) for found in self._siblings(r"\.(?:new-[0-9a-f]{16}|commit\.tmp)")]

    def old(self) -> list[int]:
        """The numbers of the earlier versions that are there."""
        return sorted(int(found[1]) for found in self._siblings(r"\.old-(\d{1,18})"))

    # Versions.

    def version(self) -> int:
        if not os.path.isdir(self.path):
            return 0
        return max(_number_of(self.path), max(self.old(), default=0) + 1)

    # Recovery.

    def recover(self) -> None:
        self.finish()
        self.prune()

    def finish(self) -> None:
        """Bring what the dead began to an end, forward or back."""
        self._roll_forward()
        current = _number_of(self.path)
        for path in self.leftovers():
            number = _number_of(path)
            if 0 < number < current and not os.path.lexists(self.old_name(number)):
                system.rename(path, self.old_name(number))  # replaced by an exchange, after which somebody crashed
            else:
                _discard(path)

    def _roll_forward(self) -> None:
        """Do what a commit file says, as far as it is not done yet. However often, and however often interrupted."""
        plan = self._plan()
        if plan is None:
            return
        new, old = plan
        if os.path.lexists(new):
            if os.path.lexists(self.path):
                system.rename(self.path, old)
            system.rename(new, self.path)
        self._sync_parent()
        system.unlink(self.commit_file)
        self._sync_parent()

    def _plan(self) -> tuple[str, str] | None:
        """The two names in a commit file: what is to become the directory, and where the one that is there goes."""
        try:
            with open(self.commit_file, encoding="utf-8") as file:
                said = json.load(file)
            new, old = said["new"], said["old"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            new = old = ""
        # It appears whole, so one that cannot be understood is not ours. Names lead nowhere but to our siblings.
        shape = re.escape(self.name) + r"\.(?:new-[0-9a-f]{16}|old-\d{1,18})"
        for name in (new, old):
            if not isinstance(name, str) or not re.fullmatch(shape, name):
                text = "this is no commit file of ours; find out what it is, and remove it"
                raise OSError(errno.EINVAL, text, self.commit_file)
        return os.path.join(self.parent, new), os.path.join(self.parent, old)

    # Commit.

    def commit(self, new: str, hold: base.Hold) -> None:
        """Let the directory `new` take the place of what is there."""
        number = self.version()
        if number and not _number_of(self.path):
            _set_number(self.path, number)
        _set_number(new, number + 1)
        if self.durable:
            trees.sync(new)
        hold.check()
        self.put_in_place(new, self.old_name(number))

    def put_in_place(self, new: str, old: str) -> None:
        """The step itself. What was there has the name `old` afterwards. A failed fsync is a failed commit: undone."""
        if not os.path.lexists(self.path):
            system.rename(new, self.path)
            self._sync_parent_or(lambda: system.rename(self.path, new))
            return
        try:
            system.exchange(new, self.path, None)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._commit_by_file(new, old)
            return
        self._sync_parent_or(lambda: system.exchange(new, self.path, None))
        system.rename(new, old)

    def _sync_parent_or(self, undo: Callable[[], object]) -> None:
        try:
            self._sync_parent()
        except OSError:
            undo()
            raise

    def _commit_by_file(self, new: str, old: str) -> None:
        private = self.commit_file + ".tmp"
        fd = system.open_fd(private, system.O_NEW, 0o600)
        try:
            system.write(fd, json.dumps({"new": os.path.basename(new), "old": os.path.basename(old)}).encode() + b"\n")
            if self.durable:
                system.fsync(fd)
        except BaseException:
            system.unlink(private)
            raise
        finally:
            system.close(fd)
        system.rename(private, self.commit_file)
        self._sync_parent_or(lambda: system.unlink(self.commit_file))
        self._roll_forward()

    def prune(self) -> None:
        """Remove the versions that are not to be kept, and that no snapshot uses."""
        numbers = self.old()
        for number in numbers[: max(0, len(numbers) - self.keep)]:
            self._remove_old(self.old_name(number))

    def _remove_old(self, path: str) -> None:
        try:
            fd = system.open_fd(path, system.O_SYNCABLE_FOLDER)
        except FileNotFoundError:
            return
        except PermissionError:
            fd = -1  # nobody could have a snapshot of it either
        try:
            if fd >= 0 and not _try_lock(fd, system.EX_NB):
                return
            # Another name first: a removal that is interrupted must not leave half a version.
            gone = self.new_name()
            system.rename(path, gone)
            _discard_by_and_by(gone)
        finally:
            if fd >= 0:
                system.close(fd)

    def rollback(self, to: int | None, hold: base.Hold) -> int:
        self.finish()
        numbers = self.old()
        if to is None and numbers:
            to = numbers[-1]
        if to is None or to not in numbers:
            have = ", ".join(map(str, numbers)) or "none"
            which = "earlier version" if to is None else f"earlier version {to}"
            raise NotLocked(f"{self.path}: there is no {which} to go back to; kept: {have}")
        number = self.version()
        new, old = self.old_name(to), self.old_name(number)
        if number:
            _set_number(self.path, number)
        _set_number(new, number + 1)
        hold.check()
        self.put_in_place(new, old)
        self.prune()
        return self.version()

    def _sync_parent(self) -> None:
        if self.durable:
            trees.sync_one(self.parent, folder=True)


def _discard_by_and_by(path: str) -> None:
    """Remove an old version. A large one in a thread: to commit takes no longer because the old one had many files."""
    try:
        if trees.is_small(path, _A_FEW):
            _discard(path)
            return
    except OSError:
        pass

    def discard() -> None:
        sleep(_A_MOMENT)  # first let the commit, which waits for nobody, come to its end
        _discard(path)

    Thread(target=discard, name=f"removes {os.path.basename(path)}").start()


def _discard(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        trees.remove(path)
    else:
        try:
            system.unlink(path)
        except FileNotFoundError:
            pass


def _number_of(path: str) -> int:
    """The number that a version carries itself, on file systems that can."""
    try:
        return int(os.getxattr(path, _VERSION))
    except (OSError, AttributeError, ValueError):
        return 0


def _set_number(path: str, number: int) -> None:
    try:
        os.setxattr(path, _VERSION, str(number).encode())
    except (OSError, AttributeError):
        pass


def _try_lock(fd: int, op: int) -> bool:
    try:
        system.lock(fd, op)
    except BlockingIOError:
        return False
    return True


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
        place = self._place = Site(self._atomic)
        return self._enter(self._atomic._lock(place, shared=self.shared).acquire(self._timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error is not None)

    async def __aenter__(self) -> Any:
        place = self._place = Site(self._atomic)
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
            trees.remove(new)
            return
        try:
            if os.stat(new).st_mode & 0o7777 == _WHILE_BUILT:  # unless the block gave it another one
                os.chmod(new, self._mode)
            place.commit(new, hold)
        except BaseException:
            # Unless it happened: then `new` is what was there, or gone, or the commit file says how to go on.
            if not os.path.lexists(place.commit_file) and os.path.lexists(new):
                trees.remove(new)
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
        self.fd = -1

    @property
    def path(self) -> Path:
        """A path to this version, whatever its name is by now. It is good in this process only."""
        if self.fd < 0:
            raise NotLocked(f"{self._atomic.path}: this snapshot is closed")
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
        place = Site(self._atomic)
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
            if _try_lock(fd, system.SH_NB) and _names(place.path, fd):
                self.fd = fd
                return True
            system.close(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        place = Site(self._atomic)
        current = _names(place.path, fd)
        system.close(fd)
        if not current:
            # It may have been kept on our account. If a writer is at it, that one sees to it.
            hold = self._atomic._lock(place).try_acquire()
            if hold is not None:
                with hold:
                    place.prune()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await _in_thread(self.close)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            system.close(self.fd)


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
