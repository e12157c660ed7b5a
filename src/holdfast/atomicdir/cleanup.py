"""Removing whole directory trees: versions that are not needed any more.

A version that cannot be removed is left, and the log says so: an immutable file, a file of another user, a mount, or
before Python 3.13 more than about 900 levels of directories. The next writer tries again.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from threading import Timer

from .. import system
from ..files import OwnedFd, try_lock
from ..paths import mounts_in

GRACE_S = 0.2  # a reader without a lock can read a replaced version for this long after it has opened it


def remove(directory: str) -> None:
    """Remove a tree, also if its owner may not write to it. A tree that does not exist is no error."""
    from shutil import rmtree

    for where in mounts_in(directory):  # rmtree would empty it
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), where)
    with suppress(FileNotFoundError):
        try:
            rmtree(directory)
        except PermissionError:
            _make_writable(directory)
            rmtree(directory)


def _make_writable(directory: str) -> None:
    """Let the owner change every directory of a tree. No symlink is followed."""
    if not system.HAS_FOLDERS:  # Windows does not remove a read-only file
        for folder, _, names in os.walk(directory):
            for name in names:
                system.chmod(os.path.join(folder, name), stat.S_IWRITE)
        return
    set_mode(directory, stat.S_IRWXU)
    for _, names, _, fd in os.fwalk(directory):
        for name in names:
            with suppress(NotADirectoryError):  # a symlink to a directory
                set_mode(name, stat.S_IRWXU, fd)


def set_mode(name: str, mode: int, folder: int | None = None) -> None:
    """Set the mode of a directory. A symlink that another user puts in its place is not followed."""
    if not hasattr(os, "O_PATH"):
        system.chmod(name, mode, dir_fd=folder, follow_symlinks=not system.HAS_FOLDERS)  # Windows knows only True
        return
    # An O_PATH descriptor needs no right to read, but fchmod refuses it.
    with OwnedFd(system.open_fd(name, system.O_FOLDER | os.O_NOFOLLOW, dir_fd=folder)) as entry:
        system.chmod(f"/proc/self/fd/{entry.fd}", mode)


def remove_unused(path: str) -> None:
    """Remove a directory unless a snapshot uses it. A file or a symlink is unlinked. An error is logged."""
    try:
        if not stat.S_ISDIR(system.stat(path, follow_symlinks=False).st_mode):
            system.unlink(path)
            return
        try:
            folder = OwnedFd(system.open_fd(path, system.O_SYNCABLE_FOLDER))
        except (PermissionError, IsADirectoryError):  # the second: Windows opens no directory
            remove(path)  # no snapshot could open it either
            return
        with folder:
            if try_lock(folder.fd, system.EX_NB):
                remove(path)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError) as error:  # the second: the tree is too deep
        log_left(path, error)


def remove_later(path: str) -> None:
    """Remove a version after the grace, in a thread: a commit does not wait for it, but the end of the program does."""
    timer = Timer(GRACE_S, remove_unused, [path])
    timer.name = "holdfast removes an old version"
    with suppress(RuntimeError):  # too many threads, or the program ends: the next writer removes the version
        timer.start()


def log_left(path: str, error: BaseException) -> None:
    import logging

    logging.getLogger("holdfast").warning("%s is left; the next writer tries to remove it again: %s", path, error)
