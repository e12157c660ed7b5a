"""Whole directory trees: syncing and removing them. How they are copied is in `copying`.

All go by descriptors and without recursion: a tree may be deeper than a path may be long. Removing follows no link,
also none that somebody puts in the place of a directory meanwhile, and enters no mount.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

from . import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_LONGEST = 1000  # characters of a path: of 4 bytes each at most, and the system takes 4096
COMMON = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | COMMON
_TO_READ, TO_CHANGE = 0o500, 0o700  # what its owner has to be allowed to do with a directory


def _open_below(root: int, way: str) -> int:
    """Open the directory at the end of a way that may be longer than a path."""
    fd = os.dup(root)
    while way:
        cut = way.rfind("/", 0, _LONGEST) if len(way) > _LONGEST else len(way)
        try:
            deeper = os.open(way[:cut], _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd, way = deeper, way[cut + 1 :]
    return fd


@contextmanager
def below(root: int, way: str) -> Iterator[int]:
    fd = _open_below(root, way)
    try:
        yield fd
    finally:
        os.close(fd)


def sync(directory: str) -> None:
    """Make everything in a directory durable: files, and the directories that name them."""
    if not system.HAS_FOLDERS:
        for folder, _, names in os.walk(directory):
            for name in names:
                _sync_file(os.path.join(folder, name))
        return
    opened: list[tuple[str, int]] = []
    above, name = os.path.split(directory)
    root = os.open(above, system.O_FOLDER)
    try:
        ways = [name]
        while ways:
            ways += _sync_folder(root, ways.pop(), opened)
    finally:
        for way, mode in reversed(opened):
            with below(root, way) as fd:
                os.fchmod(fd, mode)
                system.fsync(fd)
        os.close(root)


def _sync_folder(root: int, way: str, opened: list[tuple[str, int]]) -> list[str]:
    """Sync what is in a directory and itself. Gives the ways to the directories in it.

    `opened` gets those whose owner might not look into them, with their modes: for the moment it may.
    """
    above, _, name = way.rpartition("/")
    with below(root, above) as folder:
        fd, mode = _open_as_owner(name, folder, _TO_READ)
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
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o7777
    os.chmod(name, mode | 0o400, dir_fd=folder)
    try:
        return system.open_fd(name, system.O_READ, dir_fd=folder)
    finally:
        os.chmod(name, mode, dir_fd=folder)


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


def _allow(name: str, folder: int | None, rights: int) -> int:
    """Give its owner these rights on a directory, and never on what a link leads to. Gives the mode that it had."""
    if not hasattr(os, "O_PATH"):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o7777
        os.chmod(name, mode | rights, dir_fd=folder, follow_symlinks=False)
        return mode
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | COMMON, dir_fd=folder)
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
        from shutil import rmtree

        rmtree(directory)
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
