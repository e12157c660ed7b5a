"""The path of a kernel lock: where the file is, and how it is opened.

A symlink at the path is followed by this module, and never by the kernel: it may lead elsewhere at the next attempt,
and in a directory that others can write to, a link of another user is refused (`paths.follow_links`).
"""

from __future__ import annotations

import errno
import os

from .. import system
from ..errors import NotALockFile
from ..paths import check_directory, follow_links

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .path_lock import PathLock

_MAX_DENIALS = 10


class Location:
    """The file of a lock, which is the target if the path is a symlink, and the directory of its queue.

    Both are in one object, so that a thread sees them change together.
    """

    __slots__ = ("file", "queue")

    def __init__(self, file: str) -> None:
        self.file = file
        self.queue = file + ".queue"


def check(location: Location) -> None:
    """Refuse an unsafe path or file system before a file is created there."""
    follow_links(os.path.dirname(location.file))  # raises UnsafePath
    check_directory(location.file)


def follow_link(engine: PathLock) -> str:
    """Resolve the symlink again, because it may have changed. Returns the path of the target."""
    engine.location = Location(follow_links(engine.name))
    return engine.location.file


def open_otherwise(engine: PathLock, error: OSError, create: bool) -> int:
    """Open the file in another way after the plain open failed, or raise the reason. -1: there is no file."""
    path, name = engine.location.file, engine.name
    if not create:  # another user's file, which this process may be able to remove
        try:
            return system.open_fd(path, system.O_READ) if isinstance(error, PermissionError) else -1
        except OSError:
            return -1
    if error.errno == errno.ELOOP and path == name and (path := follow_link(engine)) != name:
        try:
            return system.open_fd(path, system.O_LOCK, engine.mode)
        except OSError as other:
            error = other
    if isinstance(error, PermissionError):
        return _open_denied(engine, error)
    if isinstance(error, IsADirectoryError) or error.errno == errno.ENXIO:  # a socket
        raise not_a_lock_file(name) from None
    if isinstance(error, FileNotFoundError):
        text = "the directory for this lock does not exist; make it first"
        raise FileNotFoundError(errno.ENOENT, text, name) from None
    raise error


def _open_denied(engine: PathLock, error: PermissionError) -> int:
    """Open a lock file that this user may not create or not write: another user's, perhaps in a sticky directory.

    With fs.protected_regular the kernel refuses O_CREAT on another user's file in a sticky directory, so try again
    without it. flock works on a descriptor that can only read. Byte ranges do not.
    """
    file = engine.location.file
    for _ in range(_MAX_DENIALS):
        for flags in (system.O_EXISTING, system.O_READ):
            try:
                return system.open_fd(file, flags)
            except PermissionError:
                continue
            except FileNotFoundError:
                break  # just removed, or never there
            except OSError as other:
                return open_otherwise(engine, other, create=True)
        else:
            raise error
        try:
            return system.open_fd(file, system.O_LOCK, engine.mode)
        except PermissionError:
            continue
        except FileNotFoundError:
            return -1
    raise error


def not_a_lock_file(path: str) -> NotALockFile:
    return NotALockFile(
        f"{path} is a directory, a device, a socket, a lock of another kind, or a file with content of its own. It was "
        "left untouched. A lock needs a path to itself (often the same name with .lock after it).",
        path=path,
    )
