"""Removing versions that are not needed any more.

A version that cannot be removed is left where it is, and the log says so: an immutable file, a file of another user, a
mount. The next writer tries again.
"""

from __future__ import annotations

import stat
from threading import Timer

from .. import files, system
from . import trees

GRACE_S = 0.2  # a reader without a lock can read a replaced version for this long after it has opened it


def remove_unused(path: str) -> None:
    """Remove a directory unless a snapshot uses it. A file or a symlink by this name is unlinked."""
    try:
        if not stat.S_ISDIR(system.stat(path, follow_symlinks=False).st_mode):
            files.remove(path)
            return
        folder = files.OwnedFd(system.open_fd(path, system.O_SYNCABLE_FOLDER))
    except FileNotFoundError:
        return
    except (PermissionError, IsADirectoryError):  # the second: Windows opens no directory
        trees.remove(path)  # no snapshot could open it either
        return
    with folder:
        if files.try_lock(folder.fd, system.EX_NB):
            trees.remove(path)


def try_to_remove(path: str) -> None:
    """`remove_unused`, but an error is logged. A tree that is too deep for Python is a RecursionError."""
    try:
        remove_unused(path)
    except (OSError, RecursionError) as error:
        log_left(path, error)


def remove_later(path: str) -> None:
    """Remove a version after the grace, in a thread: a commit does not wait for it, but the end of the program does."""
    timer = Timer(GRACE_S, try_to_remove, [path])
    timer.name = "holdfast removes an old version"
    try:
        timer.start()
    except RuntimeError:  # the interpreter is shutting down, or there are too many threads
        try_to_remove(path)


def log_left(path: str, error: BaseException) -> None:
    import logging

    logging.getLogger("holdfast").warning("%s is left; the next writer tries to remove it again: %s", path, error)
