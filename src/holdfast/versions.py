"""The versions of a directory: how one takes the place of another, and what a crash leaves of that.

Whatever changes something here needs the exclusive lock (`atomicdir`):

    exchange      the two directories exchange their names in one step (`renameat2`). The directory never vanishes
    commit file   where that cannot be done: `<dir>.commit` says what is to happen, and is durable before anything
                  does; the old is renamed away, the new is renamed in, the commit file is removed. Whoever comes after
                  a crash goes on from there. A rollback has one in any case: after an exchange the two names are not
                  yet those that they should be, and nothing else would tell

Beside the directory, never in it:

    site.new-<16 hex>     being built, or, for a moment after an exchange, what was replaced. Of dead writers: removed
    site.old-<number>     an earlier version that is kept. It carries its number as an extended attribute
    site.old-<number>.mark    its inode, where it cannot carry one
    site.gone-<16 hex>    one that is not. It is removed when no snapshot has a shared lock on it any more, and not at
                          once: a reader that took no lock and opened the directory just before should find it whole
    site.commit           see above

What is found of the first and the last under the lock was left by the dead. Only a commit decides how many versions are
kept: whoever looks, recovers or rolls back removes none. A directory that has such a name and no such number is
somebody's own, and is left alone.
"""

from __future__ import annotations

import errno
import json
import os
import re
from time import time

from . import system, trees
from .disposal import GRACE, discard, remove_later, remove_unused, say_left
from .errors import LockLost
from .paths import mount_at, mounts_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .locks import base

_NOT_HERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_VERSION = "user.holdfast.version"
_NUMBER = r"[1-9]\d{0,17}"
_NOT_OURS = "this is no commit file of ours; find out what it is, and remove it"


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
        above = os.stat(self.parent)
        if st.st_dev != above.st_dev or st.st_ino == above.st_ino or (os.name == "nt" and os.path.ismount(self.path)):
            raise self._is_mount()

    def _is_mount(self) -> OSError:
        return OSError(errno.EXDEV, "a mount point cannot be replaced; use a directory in it", self.path)

    def check_replaceable(self, new: str | None = None) -> None:
        """Raise if another directory cannot take this one's place: before it is built, and again when it is there."""
        self._check()
        for where in mounts_in(self.path, *([new] if new else [])):
            if where == self.path:
                raise self._is_mount()
            text = f"{where} is mounted in it, and would go with the old version; unmount it, or mount it elsewhere"
            raise OSError(errno.EBUSY, text, self.path)

    def check_layer(self, new: str) -> None:
        """Raise if the directory is in a lower layer of an overlay (an image), whose directories cannot be renamed.

        Nothing tells but a rename. This one fails in any case, because its target is not empty.
        """
        if mount_at(os.stat(self.path).st_dev, self.path).kind != "overlay":
            return
        os.mkdir(new + "/x")
        try:
            system.rename(self.path, new)
        except OSError as error:
            if error.errno == errno.EXDEV:
                text = (
                    "this directory is in a lower layer of an overlay (of an image), and cannot be renamed there. "
                    "Copy it once (cp -a, rm -r, mv), or put it on a volume"
                )
                raise OSError(errno.EXDEV, text, self.path) from None
        finally:
            os.rmdir(new + "/x")

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

    def _trusts(self, st: os.stat_result) -> bool:
        """In a sticky directory everybody may make something by our names. What others made there means nothing.

        In one that is not, whoever may write it may as well replace the directory itself.
        """
        above = os.stat(self.parent)
        if not above.st_mode & 0o1000 or not hasattr(os, "geteuid"):
            return True
        owners = {0, os.geteuid(), above.st_uid}
        if os.path.lexists(self.path):
            owners.add(os.lstat(self.path).st_uid)
        return st.st_uid in owners

    # Versions.

    def version(self) -> int:
        if not os.path.isdir(self.path):
            return 0
        return max(_number_of(self.path), max(self.old(), default=0) + 1)

    def old(self) -> list[int]:
        """The numbers of the earlier versions that are there."""
        numbers = sorted(int(found[1]) for found in self._siblings(rf"\.old-({_NUMBER})"))
        return [number for number in numbers if self._is_version(number)]

    def _is_version(self, number: int) -> bool:
        path = self.old_name(number)
        try:
            st = os.lstat(path)
        except FileNotFoundError:
            return False
        if st.st_mode >> 12 != 0o4 or not self._trusts(st):
            return False
        return _number_of(path) == number or self._marks().get(st.st_ino) == number

    def _marks(self) -> dict[int, int]:
        """The numbers of versions that do not carry them, by inode."""
        marks = {}
        for found in self._siblings(rf"\.old-({_NUMBER})\.mark"):
            try:
                with open(os.path.join(self.parent, found[0]), encoding="utf-8") as file:
                    if self._trusts(os.fstat(file.fileno())):
                        marks[int(file.read())] = int(found[1])
            except (OSError, ValueError):
                continue  # removed meanwhile, or cut short by a power failure
        return marks

    def _give_number(self, path: str, number: int) -> None:
        if _number_of(path) == number:
            return
        if not _set_number(path, number):
            self._mark(path, number)
        elif self.durable:
            trees.sync_folder(path)

    def _mark(self, path: str, number: int) -> None:
        mark = self.old_name(number) + ".mark"
        discard(mark)
        fd = system.open_fd(mark, system.O_NEW, 0o644)
        try:
            system.write(fd, b"%d\n" % os.lstat(path).st_ino)
            if self.durable:
                system.fsync(fd)
        finally:
            system.close(fd)

    def _sweep_marks(self) -> None:
        for found in self._siblings(rf"\.old-({_NUMBER})\.mark"):
            if not os.path.lexists(self.old_name(int(found[1]))):
                self.drop(os.path.join(self.parent, found[0]))

    def _number_current(self) -> int:
        """The number under which what is there now can be kept; it carries it from here on. 0: there is nothing."""
        number = self.version()
        while number and os.path.lexists(self.old_name(number)):  # somebody's own, so not to be replaced by ours
            number += 1
        if number:
            self._give_number(self.path, number)
        return number

    def unnumber(self, copy: str) -> None:
        """A copy is not the version that it is a copy of."""
        if _number_of(copy):
            _set_number(copy, 0)

    # Recovery.

    def recover(self) -> None:
        self.finish()
        self.remove_gone()

    def finish(self) -> None:
        """Bring what the dead began to an end, forward or back."""
        self._roll_forward()
        self.remove_gone(GRACE)
        for path in self.leftovers():
            self.tidy(path)
        self._sweep_marks()

    def tidy(self, path: str) -> None:
        """Put what was being built, or was replaced just now, where it belongs."""
        try:
            number = self._replaced_number(path)
            if number and not os.path.lexists(self.old_name(number)):
                system.rename(path, self.old_name(number))
            elif os.path.isdir(path) and not os.path.islink(path):
                remove_unused(self._give_up(path))  # it may have been the directory, and a snapshot use it
            else:
                discard(path)
        except OSError as error:
            say_left(path, error)

    def settle(self, new: str) -> None:
        """After a commit that failed, or was interrupted when it had happened: then `new` is what was there before."""
        if not os.path.lexists(self.commit_file):  # else that says how to go on
            self.tidy(new)
            self._sweep_marks()

    def _replaced_number(self, path: str) -> int:
        """The number of a version that was replaced by an exchange, after which somebody crashed; else 0."""
        try:
            st = os.lstat(path)
        except FileNotFoundError:
            return 0
        number = _number_of(path)
        if not 0 < number < _number_of(self.path):
            number = self._marks().get(st.st_ino, 0)
        return number if self._trusts(st) else 0

    def drop(self, path: str) -> None:
        """Remove what was being built and is not wanted."""
        try:
            discard(path)
        except OSError as error:
            say_left(path, error)

    # Commit.

    def check_built(self, new: str) -> None:
        try:
            mode = os.lstat(new).st_mode
        except FileNotFoundError:
            text = f"the new version was removed or renamed while it was built; {self.path} was left as it was"
            raise FileNotFoundError(errno.ENOENT, text, new) from None
        if mode >> 12 != 0o4:
            text = f"the new version is no directory any more; {self.path} was left as it was"
            raise NotADirectoryError(errno.ENOTDIR, text, new)

    def commit(self, new: str, hold: base.Hold) -> None:
        """Let the directory `new` take the place of what is there."""
        number = self._number_current()
        _set_number(new, number + 1)
        if self.durable:
            trees.sync(new)
        try:
            hold.check()
        except LockLost as error:
            raise LockLost(f"{error} Nothing was committed.", path=error.path) from None
        self.check_replaceable(new)
        self._put_in_place(new, self.old_name(number))

    def _put_in_place(self, new: str, old: str) -> None:
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

    def _sync_parent(self) -> None:
        if self.durable:
            trees.sync_folder(self.parent)

    # The commit file.

    def _commit_by_file(self, new: str, old: str) -> None:
        inode = os.lstat(new).st_ino
        self._write_plan({"new": os.path.basename(new), "old": os.path.basename(old), "inode": inode})
        try:
            self._roll_forward()
        except OSError:
            self._call_off(new, old, inode)
            raise

    def _write_plan(self, plan: dict[str, str | int]) -> None:
        private = self.commit_file + ".tmp"
        fd = system.open_fd(private, system.O_NEW, 0o600)
        try:
            system.write(fd, json.dumps(plan).encode() + b"\n")
            if self.durable:
                system.fsync(fd)
        except BaseException:
            system.unlink(private)
            raise
        finally:
            system.close(fd)
        system.rename(private, self.commit_file)
        self._sync_parent_or(lambda: system.unlink(self.commit_file))

    def _plan(self) -> tuple[str, str, int] | None:
        """What a commit file says: what is to become the directory, where the one that is there goes, and an inode."""
        try:
            fd = system.open_fd(self.commit_file, system.O_READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.EINVAL, _NOT_OURS, self.commit_file) from None
            raise
        with open(fd, encoding="utf-8") as file:
            st = system.fstat(fd)
            if not self._trusts(st):
                text = f"user {st.st_uid} made this, who may not replace the directory; find out why, and remove it"
                raise PermissionError(errno.EPERM, text, self.commit_file)
            try:
                said = json.load(file)
                new, old, inode = said["new"], said["old"], said.get("inode", 0)
            except (ValueError, KeyError, TypeError, AttributeError):
                new = old = inode = None
        # It appears whole, so one that cannot be understood is not ours. Names lead nowhere but to our siblings.
        shape = re.escape(self.name) + rf"\.(?:new-[0-9a-f]{{16}}|old-{_NUMBER})"
        for name in (new, old):
            if not isinstance(name, str) or not re.fullmatch(shape, name):
                raise OSError(errno.EINVAL, _NOT_OURS, self.commit_file)
        return os.path.join(self.parent, new), os.path.join(self.parent, old), inode

    def _roll_forward(self) -> None:
        """Do what a commit file says, as far as it is not done yet. However often, and however often interrupted."""
        plan = self._plan()
        if plan is None:
            return
        self._carry_out(*plan)
        old = re.search(rf"\.old-({_NUMBER})$", plan[1])
        if old is not None and os.path.lexists(plan[1]):
            self._give_number(plan[1], int(old[1]))  # whatever a power failure has left of that
        self._sync_parent()
        system.unlink(self.commit_file)
        self._sync_parent()

    def _carry_out(self, new: str, old: str, inode: int) -> None:
        if not os.path.lexists(new):
            return  # done
        if self._is_there(inode):
            system.rename(new, old)  # exchanged, and then somebody crashed
            return
        if os.path.lexists(self.path) and os.path.lexists(old):
            self._move_aside()  # it had been moved away already: somebody has made one since (mkdir -p)
        elif os.path.lexists(self.path):
            try:
                system.exchange(new, self.path, None)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                system.rename(self.path, old)
            else:
                self._sync_parent()
                system.rename(new, old)
                return
        system.rename(new, self.path)

    def _is_there(self, inode: int) -> bool:
        return os.path.lexists(self.path) and os.lstat(self.path).st_ino == inode

    def _move_aside(self) -> None:
        """Keep what somebody put in the way as a version of its own, unless nothing is in it."""
        try:
            system.rmdir(self.path)
        except OSError:
            system.rename(self.path, self.old_name(self._number_current()))

    def _call_off(self, new: str, old: str, inode: int) -> None:
        """What failed now must not happen some time later, when somebody finds the commit file."""
        try:
            if not os.path.lexists(new):
                return  # only what comes after it failed
            if self._is_there(inode):
                system.exchange(new, self.path, None)
            elif not os.path.lexists(self.path):
                system.rename(old, self.path)
            system.unlink(self.commit_file)
            self._sync_parent()
        except OSError:
            pass  # then it stays, and the next one finishes it

    # Old versions.

    def _give_up(self, path: str) -> str:
        """Another name first: a removal that is interrupted must not leave half a version."""
        gone = f"{self.path}.gone-{os.urandom(8).hex()}"
        system.rename(path, gone)
        return gone

    def prune(self) -> None:
        """Remove the versions that are not to be kept, or leave them to the last snapshot that uses them."""
        numbers = self.old()
        for number in numbers[: max(0, len(numbers) - self.keep)]:
            try:
                remove_later(self._give_up(self.old_name(number)))
            except FileNotFoundError:
                continue
            except OSError as error:  # the commit has happened all the same
                say_left(self.old_name(number), error)
        self._sweep_marks()

    def remove_gone(self, grace: float = 0.0) -> None:
        """Remove what was given up that long ago, and is there because somebody died or a snapshot used it."""
        for found in self._siblings(r"\.gone-[0-9a-f]{16}"):
            path = os.path.join(self.parent, found[0])
            try:
                if not 0 <= time() - os.lstat(path).st_ctime < grace:
                    remove_unused(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                say_left(path, error)

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
        new = self.old_name(to)
        self.check_replaceable(new)
        number = self._number_current()
        hold.check()
        if number:
            self._commit_by_file(new, self.old_name(number))
        else:
            self._put_in_place(new, "")
        number = self.version()  # more than that of any other: it does not matter if we get no further
        _set_number(self.path, number)
        self._sweep_marks()
        return number


def _number_of(path: str) -> int:
    """The number that a version carries itself, on file systems that can."""
    try:
        return int(os.getxattr(path, _VERSION))
    except (OSError, AttributeError, ValueError):
        return 0


def _set_number(path: str, number: int) -> bool:
    """False: it cannot carry one."""
    value = str(number).encode()
    try:
        try:
            os.setxattr(path, _VERSION, value)
        except PermissionError:
            # One that its owner may not write: for the moment it may.
            mode = os.lstat(path).st_mode & 0o7777
            os.chmod(path, mode | 0o200)
            try:
                os.setxattr(path, _VERSION, value)
            finally:
                os.chmod(path, mode)
    except (OSError, AttributeError):
        pass
    return _number_of(path) == number
