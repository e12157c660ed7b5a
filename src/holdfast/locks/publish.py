"""Content appears with the name: making a file under a name that must be free, whole or not at all.

    O_TMPFILE + link      a file without a name is written, then given one. Nothing is left by a crash
    private file + link   where there is no O_TMPFILE (sshfs, NFS, macOS). A crash leaves `<name>.<pid>.<16 hex>.tmp`
    O_EXCL + write        where there are no hard links either (some FUSE file systems, FAT). Seen empty for a moment

`link` fails if the name is taken, on every file system, and it never shows a file without its content. Plain rename is
no alternative: it replaces what is there.
"""

from __future__ import annotations

import errno
import os

from .. import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_HERE = frozenset(
    {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.ENOENT}
)


def publish(folder: int, name: str, content: bytes, mode: int, durable: bool, prepare: Callable[[int], None]) -> int:
    """Make `name` in the directory `folder`, and return its descriptor. Raises FileExistsError if it is there.

    `prepare` is called with the descriptor before the name exists: to lock what others will look at.
    """
    if system.O_TMPFILE:
        try:
            fd = system.open_fd(".", system.O_TMPFILE, mode, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
        else:
            try:
                prepare(fd)
                system.write(fd, content)
                if durable:
                    system.fsync(fd)
                system.link_open_file(fd, folder, name)
            except BaseException:
                system.close(fd)
                raise
            return fd
    return _publish_private(folder, name, content, mode, durable, prepare)


def _fill(fd: int, content: bytes, durable: bool, prepare: Callable[[int], None]) -> None:
    prepare(fd)
    system.write(fd, content)
    if durable:
        system.fsync(fd)


def private_name(name: str) -> str:
    return f"{name}.{os.getpid()}.{os.urandom(8).hex()}.tmp"


def _publish_private(
    folder: int, name: str, content: bytes, mode: int, durable: bool, prepare: Callable[[int], None]
) -> int:
    private = private_name(name)
    fd = system.open_fd(private, system.O_NEW, mode, dir_fd=folder)
    try:
        mode = system.fstat(fd).st_mode & 0o7777  # what the umask left of it
        system.fchmod(fd, 0o600)
        _fill(fd, content, durable, prepare)
        system.fchmod(fd, mode)
        try:
            system.link(private, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if isinstance(error, FileExistsError) or error.errno not in _NOT_HERE:
                raise
            system.close(fd)
            fd = system.open_fd(name, system.O_NEW, mode, dir_fd=folder)
            _fill(fd, content, durable, prepare)
    except BaseException:
        system.close(fd)
        raise
    finally:
        try:
            system.unlink(private, dir_fd=folder)
        except FileNotFoundError:
            pass
    return fd
