"""Whole directory trees: syncing and removing them. How they are copied is in `copying`.

All go by descriptors and without recursion: a tree may be deeper than a path may be long. No link is followed, also
none that somebody puts in the place of a directory meanwhile, and removing enters no mount.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from .. import system
from ..files import OwnedFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_MAX_OPEN_DIRECTORIES = 32  # descriptors of directories: a process may not have many
COMMON = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_FOLDER = os.O_RDONLY | _DIRECTORY | COMMON
_TO_READ, TO_CHANGE = 0o500, 0o700  # what its owner has to be allowed to do with a directory


class Descent:
    """A place in a tree, and descriptors of the directories above it: each was opened in the one above, by its name.

    So no link is followed on the way, whoever puts one there, and a way may be longer than a path. Only the last few
    are kept open: who goes up further begins again at the root.
    """

    def __init__(self, root: OwnedFd) -> None:
        self._root = root
        self._names: list[str] = []
        self._folders: list[OwnedFd] = []

    def go(self, way: str) -> int:
        """The descriptor of the directory there, good until the next call."""
        names = way.split("/") if way else []
        shared = 0
        for one, other in zip(names, self._names):  # noqa: B905
            if one != other:
                break
            shared += 1
        self._go_up(shared)
        if self._folders and not self._folders[-1].is_open:
            self._go_up(0)
        for name in names[len(self._folders) :]:
            folder = OwnedFd(os.open(name, _FOLDER, dir_fd=self._fd))
            self._names.append(name)
            self._folders.append(folder)
            if len(self._folders) > _MAX_OPEN_DIRECTORIES:
                self._folders[-1 - _MAX_OPEN_DIRECTORIES].close()
        return self._fd

    @property
    def _fd(self) -> int:
        return (self._folders[-1] if self._folders else self._root).fd

    def _go_up(self, level: int) -> None:
        while len(self._folders) > level:
            self._names.pop()
            self._folders.pop().close()

    def __enter__(self) -> Descent:
        return self

    def __exit__(self, *_: object) -> None:
        self._go_up(0)
        self._root.close()


def sync(directory: str) -> None:
    """Make everything in a directory durable: files, and the directories that name them."""
    if not system.HAS_FOLDERS:
        _sync_by_paths(directory)
        return
    opened: list[tuple[str, int]] = []
    above, name = os.path.split(directory)
    with Descent(OwnedFd(os.open(above, system.O_FOLDER))) as place:
        try:
            ways = [name]
            while ways:
                ways += _sync_folder(place, ways.pop(), opened)
        finally:
            for way, mode in reversed(opened):
                fd = place.go(way)
                os.fchmod(fd, mode)
                system.fsync(fd)


def _writable_files(directory: str) -> Iterator[str]:
    """Windows: the files of a tree, each writable for the moment: one that is not can be neither synced nor removed."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                continue
            if mode & stat.S_IWRITE:
                yield path
                continue
            os.chmod(path, mode | stat.S_IWRITE)
            try:
                yield path
            finally:
                if os.path.lexists(path):
                    os.chmod(path, mode)


def _sync_by_paths(directory: str) -> None:
    for path in _writable_files(directory):
        with OwnedFd(system.open_fd(path, system.O_EXISTING)) as file:
            system.fsync(file.fd)


def _remove_by_paths(directory: str) -> None:
    from shutil import rmtree

    with suppress(FileNotFoundError):  # another process may be removing it, too
        for path in _writable_files(directory):
            system.unlink(path)
        rmtree(directory)


def _sync_folder(place: Descent, way: str, opened: list[tuple[str, int]]) -> list[str]:
    """Sync what is in a directory and itself. Gives the ways to the directories in it.

    `opened` gets those whose owner might not look into them, with their modes: for the moment it may.
    """
    above, _, name = way.rpartition("/")
    folder, mode = _open_as_owner(name, place.go(above), _TO_READ)
    deeper = []
    with folder:
        if mode is not None:
            opened.append((way, mode))
        with os.scandir(folder.fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    _sync_file(entry.name, folder.fd)
                elif entry.is_dir(follow_symlinks=False):
                    deeper.append(f"{way}/{entry.name}")
        system.fsync(folder.fd)
    return deeper


def _sync_file(name: str, folder: int | None = None) -> None:
    mode = None
    try:
        file = OwnedFd(system.open_fd(name, system.O_READ, dir_fd=folder))
    except PermissionError:  # its owner may not read it: for the moment it may
        mode = _allow(name, folder, 0o400, kind=0)
        file = OwnedFd(system.open_fd(name, system.O_READ, dir_fd=folder))
    with file:
        if mode is not None:
            system.fchmod(file.fd, mode)
        system.fsync(file.fd)


def sync_folder(path: str) -> None:
    """Make the names in a directory durable, and its own attributes."""
    if not system.HAS_FOLDERS:
        return
    with OwnedFd(system.open_fd(path, system.O_SYNCABLE_FOLDER)) as folder:
        system.fsync(folder.fd)


def _open_as_owner(name: str, folder: int | None, rights: int) -> tuple[OwnedFd, int | None]:
    """Open a directory, with these rights for its owner. Gives the descriptor, and the mode if it had another one."""
    try:
        opened = OwnedFd(os.open(name, _FOLDER, dir_fd=folder))
    except PermissionError as error:
        try:
            mode = _allow(name, folder, rights)
        except PermissionError:  # it is another one's
            raise error from None
        return OwnedFd(os.open(name, _FOLDER, dir_fd=folder)), mode
    st = os.fstat(opened.fd)
    mode = st.st_mode & 0o7777
    if mode & rights == rights or st.st_uid != os.geteuid():
        return opened, None
    os.fchmod(opened.fd, mode | rights)
    return opened, mode


def _allow(name: str, folder: int | None, rights: int, kind: int = _DIRECTORY) -> int:
    """Give its owner these rights on a directory, and never on what a link leads to. Gives the mode that it had."""
    if not hasattr(os, "O_PATH"):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o7777
        os.chmod(name, mode | rights, dir_fd=folder, follow_symlinks=False)
        return mode
    with OwnedFd(os.open(name, os.O_PATH | kind | COMMON, dir_fd=folder)) as entry:
        mode = os.fstat(entry.fd).st_mode & 0o7777
        os.chmod(f"/proc/self/fd/{entry.fd}", mode | rights)
        return mode


def remove(directory: str) -> None:
    """Remove a tree, also one whose directories may not be written. Gone already is fine.

    A directory that has something in it is moved up to the top before that is removed: no tree is too deep then, and
    the system refuses to move a mount point, also one on the same device, before we are in it.
    """
    if not system.HAS_FOLDERS:
        _remove_by_paths(directory)
        return
    if _remove_empty(directory, None):
        return
    with _open_as_owner(directory, None, TO_CHANGE)[0] as top:
        names = _empty(top.fd, top.fd)
        while names:
            name = names.pop()
            with _open_as_owner(name, top.fd, TO_CHANGE)[0] as folder:
                names += _empty(folder.fd, top.fd)
            os.rmdir(name, dir_fd=top.fd)
    os.rmdir(directory)


def _empty(folder: int, top: int) -> list[str]:
    """Remove what is in a directory. What has something in it itself is moved to the top; gives its names there."""
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    moved = []
    for name, is_folder in entries:
        if not is_folder:
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
        elif not _remove_empty(name, folder):
            moved.append(_move(name, folder, top))
    return moved


def _remove_empty(name: str, folder: int | None) -> bool:
    """Remove a directory if there is nothing in it, and nothing mounted on it (EBUSY)."""
    try:
        os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        return False
    return True


def _move(name: str, folder: int, top: int) -> str:
    new = os.urandom(8).hex()
    try:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:
        _allow(name, folder, TO_CHANGE)  # where it is now is written into it
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    return new
