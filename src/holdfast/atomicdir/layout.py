"""What stands beside a directory that is replaced as a whole: the names of its versions, and their numbers.

    site.new-<16 hex>     being built, or, for a moment after an exchange, what was replaced. Of dead writers: removed
    site.old-<number>     an earlier version that is kept. It carries its number as an extended attribute
    site.old-<number>.mark    its inode, where it cannot carry one
    site.gone-<16 hex>    one that is not kept. It is removed when no snapshot has a shared lock on it any more, and not
                          at once: a reader that took no lock and opened the directory just before finds it whole
    site.commit           what is to happen (`journal`)
    site.lock             what writers hold exclusively and readers share

Under the lock, `site.new-…` and `site.commit` were left by a dead writer. A directory that has the name of a version
and does not carry its number belongs to the user and is left alone. So is every sibling that another user made in a
sticky or world-writable directory.
"""

from __future__ import annotations

import os
import re
import stat

from .. import system
from ..files import OwnedFd
from ..paths import follow_links, is_trusted
from . import trees
from .cleanup import discard, drop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_VERSION = "user.holdfast.version"
_MARK_SIZE = 32  # bytes, more than a number of an inode has
NUMBER = r"[1-9]\d{0,17}"


class Siblings:
    """The directory, where it really is, with its siblings. Whatever changes something needs the exclusive lock."""

    def __init__(self, path: str, durable: bool) -> None:
        self.path = follow_links(path)  # a symlink: its target is replaced, which need not exist yet
        self.parent, self.name = os.path.split(self.path)
        self.durable = durable
        self._listed: set[str] | None = None

    # Names.

    def new_name(self) -> str:
        return f"{self.path}.new-{os.urandom(8).hex()}"

    def old_name(self, number: int) -> str:
        return f"{self.path}.old-{number}"

    @property
    def lock_file(self) -> str:
        return follow_links(self.path + ".lock")

    def list_once(self) -> None:
        """List the directory above once, for all that the holder of the exclusive lock does from here on.

        Until the release only the holder adds siblings, with `rename` and `give_number`.
        """
        self._listed = set(system.listdir(self.parent))

    def _added(self, path: str) -> None:
        if self._listed is not None:
            self._listed.add(os.path.basename(path))

    def rename(self, path: str, new: str) -> None:
        system.rename(path, new)
        self._added(new)

    def siblings(self, pattern: str) -> list[re.Match[str]]:
        """The siblings by such a name, but for those of other users in a directory that others can write to."""
        shape = re.compile(re.escape(self.name) + pattern)
        matches = map(shape.fullmatch, system.listdir(self.parent) if self._listed is None else self._listed)
        return [found for found in matches if found is not None and self.has(found[0])]

    def has(self, name: str) -> bool:
        """Is there a trusted sibling by this name?"""
        try:
            return self.trusts(os.lstat(os.path.join(self.parent, name)))
        except FileNotFoundError:
            return False

    def leftovers(self) -> list[str]:
        """What is being built, or is not needed any more: of the dead, for who holds the lock exclusively."""
        return [os.path.join(self.parent, found[0]) for found in self.siblings(r"\.(?:new-[0-9a-f]{16}|commit\.tmp)")]

    def trusts(self, st: os.stat_result) -> bool:
        """Versions have the owner of the directory, also those that root made. So its owner is trusted, too."""
        if is_trusted(st, os.stat(self.parent)):
            return True
        return os.path.lexists(self.path) and os.lstat(self.path).st_uid == st.st_uid

    # Numbers.

    def version(self) -> int:
        if not os.path.isdir(self.path):
            return 0
        return max(number_of(self.path), max(self.old(), default=0) + 1)

    def old(self) -> list[int]:
        """The numbers of the earlier versions that are there."""
        numbers = sorted(int(found[1]) for found in self.siblings(rf"\.old-({NUMBER})"))
        return [number for number in numbers if self._is_version(number)]

    def _is_version(self, number: int) -> bool:
        path = self.old_name(number)
        try:
            st = os.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(st.st_mode):
            return False
        return number_of(path) == number or self.marks().get(st.st_ino) == number

    def marks(self) -> dict[int, int]:
        """The numbers of versions that do not carry them, by inode."""
        marks = {}
        for found in self.siblings(rf"\.old-({NUMBER})\.mark"):
            try:
                with OwnedFd(system.open_fd(os.path.join(self.parent, found[0]), system.O_READ)) as file:
                    marks[int(system.read(file.fd, _MARK_SIZE))] = int(found[1])
            except (OSError, ValueError):
                continue  # removed meanwhile, or cut short by a power failure
        return marks

    def give_number(self, path: str, number: int) -> None:
        if number_of(path) == number:
            return
        if not set_number(path, number):
            self._mark(path, number)
        elif self.durable:
            trees.sync_folder(path)

    def _mark(self, path: str, number: int) -> None:
        mark = self.old_name(number) + ".mark"
        discard(mark)
        self._added(mark)
        with OwnedFd(system.open_fd(mark, system.O_NEW, 0o644)) as file:
            system.write(file.fd, b"%d\n" % os.lstat(path).st_ino)
            if self.durable:
                system.fsync(file.fd)

    def sweep_marks(self) -> None:
        for found in self.siblings(rf"\.old-({NUMBER})\.mark"):
            if not os.path.lexists(self.old_name(int(found[1]))):
                drop(os.path.join(self.parent, found[0]))

    def number_current(self) -> int:
        """The number under which what is there now can be kept; it carries it from here on. 0: there is nothing."""
        number = self.version()
        while number and os.path.lexists(self.old_name(number)):  # somebody's own, so not to be replaced by ours
            number += 1
        if number:
            self.give_number(self.path, number)
        return number

    def unnumber(self, copy: str) -> None:
        """A copy is not the version that it is a copy of."""
        if number_of(copy):
            set_number(copy, 0)

    # Durability.

    def sync_parent(self) -> None:
        if self.durable:
            trees.sync_folder(self.parent)

    def sync_parent_or(self, undo: Callable[[], object]) -> None:
        try:
            self.sync_parent()
        except OSError:
            undo()
            raise


def number_of(path: str) -> int:
    """The number that a version carries itself, on file systems that can."""
    try:
        return int(os.getxattr(path, _VERSION))
    except (OSError, AttributeError, ValueError):
        return 0


def set_number(path: str, number: int) -> bool:
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
    return number_of(path) == number
