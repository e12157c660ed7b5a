"""The versions of a directory: how one takes the place of another, and what a crash leaves of that.

Whatever changes something here needs the exclusive lock (`atomicdir`):

    exchange      the two directories exchange their names in one step (`renameat2`). The directory never vanishes
    commit file   where that cannot be done: `<dir>.commit` says what is to happen, and is durable before anything
                  does; the old is renamed away, the new is renamed in, the commit file is removed. Whoever comes after
                  a crash goes on from there

Beside the directory, never in it:

    site.new-<16 hex>     being built, or, for a moment after an exchange, what was replaced. Of dead writers: removed
    site.old-<number>     an earlier version that is kept
    site.gone-<16 hex>    one that is not. It is removed when no snapshot has a shared lock on it any more, and not at
                          once: a reader that took no lock and opened the directory just before should find it whole
    site.commit           see above

What is found of the first and the last under the lock was left by the dead. Only a commit decides how many versions are
kept: whoever looks, recovers or rolls back removes none.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import deque
from threading import Lock, Thread
from time import monotonic, sleep, time

from . import system, trees
from .errors import LockLost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .locks import base

_NOT_HERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_VERSION = "user.holdfast.version"
_GRACE = 0.2  # seconds


class Site:
    """The directory, where it really is, with its siblings. Whatever changes something needs the exclusive lock."""

    def __init__(self, path: str, keep: int, durable: bool) -> None:
        self.path = os.path.realpath(path)  # a symlink: its target is replaced, which need not exist yet
        self.parent, self.name = os.path.split(self.path)
        self.keep = keep
        self.durable = durable
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
        self.remove_gone()

    def finish(self) -> None:
        """Bring what the dead began to an end, forward or back."""
        self._roll_forward()
        self.remove_gone(_GRACE)
        current = _number_of(self.path)
        for path in self.leftovers():
            number = _number_of(path)
            if 0 < number < current and not os.path.lexists(self.old_name(number)):
                system.rename(path, self.old_name(number))  # replaced by an exchange, after which somebody crashed
            else:
                discard(path)

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
        try:
            mode = os.lstat(new).st_mode
        except FileNotFoundError:
            text = f"the new version was removed or renamed while it was built; {self.path} was left as it was"
            raise FileNotFoundError(errno.ENOENT, text, new) from None
        if mode >> 12 != 0o4:
            text = f"the new version is no directory any more; {self.path} was left as it was"
            raise NotADirectoryError(errno.ENOTDIR, text, new)
        number = self.version()
        if number and not _number_of(self.path):
            _set_number(self.path, number)
        _set_number(new, number + 1)
        if self.durable:
            trees.sync(new)
        try:
            hold.check()
        except LockLost as error:
            raise LockLost(f"{error} Nothing was committed.", path=error.path) from None
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
        """Remove the versions that are not to be kept, or leave them to the last snapshot that uses them."""
        numbers = self.old()
        for number in numbers[: max(0, len(numbers) - self.keep)]:
            # Another name first: a removal that is interrupted must not leave half a version.
            gone = f"{self.path}.gone-{os.urandom(8).hex()}"
            try:
                system.rename(self.old_name(number), gone)
            except FileNotFoundError:
                continue
            _later.remove(gone)

    def remove_gone(self, grace: float = 0.0) -> None:
        """Remove what was given up that long ago, and is there because somebody died or a snapshot used it."""
        for found in self._siblings(r"\.gone-[0-9a-f]{16}"):
            path = os.path.join(self.parent, found[0])
            try:
                age = time() - os.lstat(path).st_ctime
            except FileNotFoundError:
                continue
            if not 0 <= age < grace:
                _remove_unused(path)

    def rollback(self, to: int | None, hold: base.Hold) -> int:
        self.finish()
        numbers = self.old()
        if to is None and numbers:
            to = numbers[-1]
        if to is None or to not in numbers:
            have = ", ".join(map(str, numbers)) or "none"
            which = "earlier version" if to is None else f"earlier version {to}"
            text = f"there is no {which} to go back to; kept: {have}"
            raise FileNotFoundError(errno.ENOENT, text, self.path)
        number = self.version()
        new, old = self.old_name(to), self.old_name(number)
        if number:
            _set_number(self.path, number)
        _set_number(new, number + 1)
        hold.check()
        self.put_in_place(new, old)
        return self.version()

    def _sync_parent(self) -> None:
        if self.durable:
            trees.sync_one(self.parent, folder=True)


def _remove_unused(gone: str) -> None:
    """Remove what was a version, unless a snapshot uses it."""
    try:
        fd = system.open_fd(gone, system.O_SYNCABLE_FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        fd = -1  # nobody could have a snapshot of it either
    try:
        if fd < 0 or try_lock(fd, system.EX_NB):
            discard(gone)
    finally:
        if fd >= 0:
            system.close(fd)


class Later:
    """Removes old versions in a thread, a moment after they were given up, so that a commit does not wait for it."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._waiting: deque[tuple[float, str]] = deque()
        self._running = False

    def remove(self, path: str) -> None:
        with self._mutex:
            self._waiting.append((monotonic() + _GRACE, path))
            if self._running:
                return
            self._running = True
        # No daemon: a program that ends does so a moment later rather than leave the old version to the next one.
        try:
            Thread(target=self._run, name="holdfast removes old versions").start()
        except RuntimeError:  # the program is ending already
            self._run()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._running = False
                    return
                due, path = self._waiting.popleft()
            sleep(max(0.0, due - monotonic()))
            try:
                _remove_unused(path)
            except OSError:
                pass  # the next writer tries again


_later = Later()


def _forget_thread() -> None:
    global _later
    _later = Later()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_thread)


def discard(path: str) -> None:
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


def try_lock(fd: int, op: int) -> bool:
    try:
        system.lock(fd, op)
    except BlockingIOError:
        return False
    return True
