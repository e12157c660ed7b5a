"""Whole directory trees: syncing and removing them. How they are copied is in `copying`.

All go by descriptors and without recursion: a tree may be deeper than a path may be long. No link is followed, also
none that somebody puts in the place of a directory meanwhile, and removing enters no mount.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from . import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_KEPT = 32  # descriptors of directories: a process may not have many
COMMON = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_FOLDER = os.O_RDONLY | _DIRECTORY | COMMON
_TO_READ, TO_CHANGE = 0o500, 0o700  # what its owner has to be allowed to do with a directory


class Descent:
    """A place in a tree, and descriptors of the directories above it: each was opened in the one above, by its name.

    So no link is followed on the way, whoever puts one there, and a way may be longer than a path. Only the last few
    are kept open: who goes up further begins again at the root.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: list[str] = []
        self._fds: list[int] = []  # -1: not open any more

    def go(self, way: str) -> int:
        """The descriptor of the directory there, good until the next call."""
        names = way.split("/") if way else []
        shared = 0
        for one, other in zip(names, self._names):  # noqa: B905
            if one != other:
                break
            shared += 1
        self._go_up(shared)
        if self._fds and self._fds[-1] < 0:
            self._go_up(0)
        for name in names[len(self._fds) :]:
            fd = os.open(name, _FOLDER, dir_fd=self._fds[-1] if self._fds else self._root)
            self._names.append(name)
            self._fds.append(fd)
            if len(self._fds) > _KEPT:
                os.close(self._fds[-1 - _KEPT])
                self._fds[-1 - _KEPT] = -1
        return self._fds[-1] if self._fds else self._root

    def _go_up(self, level: int) -> None:
        while len(self._fds) > level:
            self._names.pop()
            fd = self._fds.pop()
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """All but the root, which is the caller's."""
        self._go_up(0)


def sync(directory: str) -> None:
    """Make everything in a directory durable: files, and the directories that name them."""
    if not system.HAS_FOLDERS:
        _sync_by_paths(directory)
        return
    opened: list[tuple[str, int]] = []
    above, name = os.path.split(directory)
    root = os.open(above, system.O_FOLDER)
    place = Descent(root)
    try:
        ways = [name]
        while ways:
            ways += _sync_folder(place, ways.pop(), opened)
    finally:
        try:
            for way, mode in reversed(opened):
                fd = place.go(way)
                os.fchmod(fd, mode)
                system.fsync(fd)
        finally:
            place.close()
            os.close(root)


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
        fd = system.open_fd(path, system.O_EXISTING)
        try:
            system.fsync(fd)
        finally:
            system.close(fd)


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
    fd, mode = _open_as_owner(name, place.go(above), _TO_READ)
    deeper = []
    try:
        if mode is not None:
            opened.append((way, mode))
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    _sync_file(entry.name, fd)
                elif entry.is_dir(follow_symlinks=False):
                    deeper.append(f"{way}/{entry.name}")
        system.fsync(fd)
    finally:
        os.close(fd)
    return deeper


def _sync_file(name: str, folder: int | None = None) -> None:
    try:
        fd = system.open_fd(name, system.O_READ, dir_fd=folder)
    except PermissionError:
        fd = _open_unreadable(name, folder)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def _open_unreadable(name: str, folder: int | None) -> int:
    """Open a file that its owner may not read: for the moment it may."""
    mode = _allow(name, folder, 0o400, kind=0)
    fd = system.open_fd(name, system.O_READ, dir_fd=folder)
    system.fchmod(fd, mode)
    return fd


def sync_folder(path: str) -> None:
    """Make the names in a directory durable, and its own attributes."""
    if not system.HAS_FOLDERS:
        return
    fd = system.open_fd(path, system.O_SYNCABLE_FOLDER)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def _open_as_owner(name: str, folder: int | None, rights: int) -> tuple[int, int | None]:
    """Open a directory, with these rights for its owner. Gives the descriptor, and the mode if it had another one."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=folder)
    except PermissionError as error:
        try:
            mode = _allow(name, folder, rights)
        except PermissionError:  # it is another one's
            raise error from None
        return os.open(name, _FOLDER, dir_fd=folder), mode
    st = os.fstat(fd)
    mode = st.st_mode & 0o7777
    if mode & rights == rights or st.st_uid != os.geteuid():
        return fd, None
    os.fchmod(fd, mode | rights)
    return fd, mode


def _allow(name: str, folder: int | None, rights: int, kind: int = _DIRECTORY) -> int:
    """Give its owner these rights on a directory, and never on what a link leads to. Gives the mode that it had."""
    if not hasattr(os, "O_PATH"):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o7777
        os.chmod(name, mode | rights, dir_fd=folder, follow_symlinks=False)
        return mode
    fd = os.open(name, os.O_PATH | kind | COMMON, dir_fd=folder)
    try:
        mode = os.fstat(fd).st_mode & 0o7777
        os.chmod(f"/proc/self/fd/{fd}", mode | rights)
        return mode
    finally:
        os.close(fd)


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
    top, _ = _open_as_owner(directory, None, TO_CHANGE)
    try:
        names = _empty(top, top)
        while names:
            name = names.pop()
            fd, _ = _open_as_owner(name, top, TO_CHANGE)
            try:
                names += _empty(fd, top)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
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
