"""Descriptors that have one owner.

    with OwnedFd(system.open_fd(path, system.O_READ)) as file:
        system.read(file.fd, 100)

An `OwnedFd` closes its descriptor once: by `close`, at the end of its `with` block, or when it is collected. In a
forked child it is inert: the fork hook (`process`) has closed the child's copy, and `close` does nothing, whatever the
child has opened under the same number since. A forked child keeps an `InheritedFd`. Outside `system`, only this module
and the fork hook close a descriptor by number.

A file that is written as a whole is written in one of three ways. If that fails, nothing is left of it:

    create_file     a new name, seen from the first byte on
    publish_file    a new name, which appears together with the content
    replace_file    a name that may exist: readers see the old content or the new content
"""

from __future__ import annotations

import errno
import os
from operator import itemgetter

from . import process, system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Owner = TypeVar("Owner", bound="OwnedFd")

# The device and inode number of a stat result: the identity of a file.
inode_of: Callable[[os.stat_result], process.Inode] = itemgetter(2, 1)
_owned = process.descriptors  # popping the entry of an owner is the right to close its descriptor
_forks = process.forks
_READ_SIZE = 1 << 16  # bytes per call
_MAX_TRIES = 10


class OwnedFd:
    """An open descriptor, `fd`. It is -1 after `close`."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        try:
            if _forks:  # perhaps the fork hook of another module, in a child, and before ours
                process.current_registry()
            _owned[id(self)] = self.fd = fd
        except BaseException:  # an interrupt
            if _owned.pop(id(self), None) is not None or getattr(self, "fd", -1) == -1:  # else a fork has closed it
                system.close(fd)
            raise

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a forked child."""
        if _forks:
            process.current_registry()
        return id(self) in _owned

    def close(self) -> None:
        # Popping is atomic: if two threads close, exactly one of them closes the descriptor.
        if (fd := _owned.pop(id(self), None)) is not None:
            system.close(fd)
            self.fd = -1

    def detach(self) -> int:
        """Return the descriptor without closing it, for another owner. -1: it is not open."""
        return int(_owned.pop(id(self), -1))  # without the mark of an `InheritedNumber`

    def discard(self) -> None:
        """Close it: it was collected before it was closed."""
        self.close()

    def __enter__(self: Owner) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            if self.fd != -1:
                self.discard()
        except (AttributeError, OSError, TypeError):  # never opened, or the interpreter is going down
            pass


class InheritedFd(OwnedFd):
    """A descriptor that stays open in a forked child. It must not carry a lock. The child closes its own copy."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        OwnedFd.__init__(self, process.InheritedNumber(fd))


def named(
    path: str, inode: process.Inode, follow_symlinks: bool = True, dir_fd: int | None = None
) -> os.stat_result | None:
    """Return the stat result of `path` if it still names the file with this device and inode, else None."""
    try:
        st = system.stat(path) if follow_symlinks else system.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:  # a loop of symlinks names no file
            raise
        return None
    return st if inode_of(st) == inode else None


def try_lock(fd: int, op: int, set_lock: Callable[[int, int], None] | None = None) -> bool:
    """Lock an open file without waiting: with flock, or with `set_lock` where byte ranges stand in for it."""
    try:
        (set_lock or system.lock)(fd, op)
    except BlockingIOError:
        return False
    return True


def set_mode(fd: int, mode: int) -> None:
    """Set the permissions of an open file, unless its file system or its owner does not let us."""
    try:
        system.fchmod(fd, mode)
    except PermissionError:
        pass


def open_exactly(path: str, mode: int) -> int:
    """Open a file, or create it with all the bits of its mode, whatever the umask. A file that exists keeps its mode.

    Not a symlink. BlockingIOError: other processes create and remove the file all the time.
    """
    for _ in range(_MAX_TRIES):
        try:
            file = OwnedFd(system.open_fd(path, system.O_NEW, mode))
        except FileExistsError:
            try:
                return system.open_fd(path, system.O_EXISTING)
            except FileNotFoundError:
                continue  # it was removed meanwhile
        with file:
            set_mode(file.fd, mode)
            return file.detach()
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)


def pipe(reader: type[OwnedFd] = OwnedFd, writer: type[OwnedFd] = OwnedFd) -> tuple[OwnedFd, OwnedFd]:
    """Return the two ends of a pipe. A forked child keeps an end whose type is `InheritedFd`."""
    one, other = os.pipe()
    return reader(one), writer(other)


def read_open(fd: int) -> bytes:
    """The content of an open file, from its beginning."""
    parts, size = [], 0
    while text := system.pread(fd, _READ_SIZE, size):
        parts.append(text)
        size += len(text)
    return b"".join(parts)


def read_all(path: str) -> bytes:
    """The content of a file. A symlink is not followed."""
    with OwnedFd(system.open_fd(path, system.O_READ)) as file:
        return read_open(file.fd)


def write_all(fd: int, content: bytes) -> None:
    done = system.write(fd, content)
    while done < len(content):  # the disk is full: the next call raises ENOSPC
        done += system.write(fd, content[done:])


def write_at(fd: int, content: bytes, at: int) -> None:
    done = system.pwrite(fd, content, at)
    while done < len(content):  # the disk is full: the next call raises ENOSPC
        done += system.pwrite(fd, content[done:], at + done)


def create_file(
    path: str, content: bytes, mode: int, *, sync: bool = False, owner: tuple[int, int] | None = None
) -> None:
    """Write a new file, and give it to `owner`, a user and a group. FileExistsError: the name is taken.

    `sync` waits for the content, not for the name.
    """
    with OwnedFd(system.open_fd(path, system.O_NEW, mode)) as file:
        try:
            if content:
                write_all(file.fd, content)
            if owner is not None:
                system.chown(file.fd, *owner)  # not by its name, which another user may have replaced by a link
            if sync:
                system.fsync(file.fd)
        except BaseException:
            remove(path)
            raise


def publish_file(path: str, content: bytes, mode: int, *, sync: bool = False) -> None:
    """Write a new file that appears with its content. FileExistsError: the name is taken."""
    _write_privately(system.link, path, content, mode, sync)


def replace_file(path: str, content: bytes, mode: int, *, sync: bool = False) -> None:
    """Write a file that appears with its content, in place of the old one."""
    _write_privately(system.rename, path, content, mode, sync)


def _write_privately(publish: Callable[[str, str], None], path: str, content: bytes, mode: int, sync: bool) -> None:
    private = private_name(path)
    create_file(private, content, mode, sync=sync)
    try:
        publish(private, path)
    finally:
        remove(private)  # after a rename, it is gone. On Windows a link is a rename, too


def private_name(path: str) -> str:
    """A name beside `path`, for a file that is not complete yet."""
    return f"{path}.{os.urandom(8).hex()}.tmp"


def remove(path: str) -> None:
    """Remove a file if it exists."""
    try:
        system.unlink(path)
    except FileNotFoundError:
        pass


def sync_directory(path: str) -> None:
    """Wait until added and removed names of a directory are on disk. Windows has no such call."""
    if system.HAS_FOLDERS:
        with OwnedFd(system.open_fd(path, system.O_SYNCABLE_FOLDER)) as file:
            system.fsync(file.fd)
