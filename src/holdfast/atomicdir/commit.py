"""The versions of a directory: how one takes the place of another, and what a crash leaves of that.

Every method that changes a version needs the exclusive lock of the directory:

    exchange      the two directories exchange their names in one step (`renameat2`). The directory never vanishes
    commit file   where the system cannot exchange names, and for a rollback: two renames, recorded in a `journal`

The names beside the directory are in `layout`. Only a commit removes old versions. A reader, `recover` and `rollback`
remove none.
"""

from __future__ import annotations

import errno
import os
from time import time

from .. import system
from ..errors import LockLost
from ..paths import mount_at, mounts_in
from . import trees
from .cleanup import GRACE_S, discard, remove_later, remove_unused, say_left
from .journal import CommitFile, exchange
from .layout import Siblings, number_of, set_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..locks import base


class Site(Siblings):
    """The directory and what can be done with its versions. Whatever changes something needs the exclusive lock."""

    def __init__(self, path: str, keep: int, durable: bool) -> None:
        super().__init__(path, durable)
        self.keep = keep
        self.commit_file = CommitFile(self)
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

    # Recovery.

    def recover(self) -> None:
        self.finish()
        self.remove_gone()

    def finish(self) -> None:
        """Bring what the dead began to an end, forward or back."""
        self.list_once()
        self.commit_file.roll_forward()
        self.remove_gone(GRACE_S)
        for path in self.leftovers():
            self.tidy(path)
        self.sweep_marks()

    def tidy(self, path: str) -> None:
        """Put what was being built, or was replaced just now, where it belongs."""
        try:
            number = self._replaced_number(path)
            if number and not os.path.lexists(self.old_name(number)):
                self.rename(path, self.old_name(number))
            elif os.path.isdir(path) and not os.path.islink(path):
                remove_unused(self._give_up(path))  # it may have been the directory, and a snapshot use it
            else:
                discard(path)
        except OSError as error:
            say_left(path, error)

    def settle(self, new: str) -> None:
        """After a commit that failed, or was interrupted when it had happened: then `new` is what was there before."""
        if not self.commit_file.exists():  # else that says how to go on
            self.tidy(new)
            self.sweep_marks()

    def _replaced_number(self, path: str) -> int:
        """The number of a version that was replaced by an exchange, after which somebody crashed; else 0."""
        try:
            st = os.lstat(path)
        except FileNotFoundError:
            return 0
        number = number_of(path)
        if not 0 < number < number_of(self.path):
            number = self.marks().get(st.st_ino, 0)
        return number

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
        number = self.number_current()
        set_number(new, number + 1)
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
            self.sync_parent_or(lambda: system.rename(self.path, new))
            return
        if not exchange(new, self.path):
            self.commit_file.commit(new, old)
            return
        self.sync_parent_or(lambda: system.exchange(new, self.path, None))
        self.rename(new, old)

    # Old versions.

    def _give_up(self, path: str) -> str:
        """Another name first: a removal that is interrupted must not leave half a version."""
        gone = f"{self.path}.gone-{os.urandom(8).hex()}"
        self.rename(path, gone)
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
        self.sweep_marks()

    def remove_gone(self, grace: float = 0.0) -> None:
        """Remove what was given up that long ago, and is there because somebody died or a snapshot used it."""
        for found in self.siblings(r"\.gone-[0-9a-f]{16}"):
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
        number = self.number_current()
        hold.check()
        if number:
            self.commit_file.commit(new, self.old_name(number))
        else:
            self._put_in_place(new, "")
        number = self.version()  # more than that of any other: it does not matter if we get no further
        set_number(self.path, number)
        self.sweep_marks()
        return number
