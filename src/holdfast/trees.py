"""Whole directory trees: copying, syncing and removing them. What `AtomicDir` does to content.

A copy has what `cp -a` keeps: owner, mode, times, symlinks, extended attributes, holes, and hard links *within* the
tree. It shares blocks with the original where the file system can clone (reflink), and never an inode: writing to the
copy must not write to the original.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from . import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Inode = tuple[int, int]

_NO_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.ETXTBSY, errno.EBADF}
)
_NO_ATTRIBUTES = frozenset({errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENODATA, errno.ENOSYS})
_CHUNK = 1 << 30
_SMALL = 1 << 16  # bytes that are copied more quickly by hand
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class Copier:
    """One copy of one tree."""

    def __init__(self) -> None:
        self._clones = hasattr(system, "clone")
        self._links: dict[Inode, str] = {}
        self._privileged = not hasattr(os, "geteuid") or os.geteuid() == 0
        self._umask = _umask()

    def copy(self, source: str, target: str) -> None:
        """Copy the content of a directory into an empty one, and give that its attributes."""
        before, made = os.stat(source), os.stat(target)
        # Who owns a new file here: with setgid on the directory its group is the directory's.
        group = made.st_gid if made.st_mode & stat.S_ISGID or not hasattr(os, "getegid") else os.getegid()
        with os.scandir(source) as entries:
            for entry in entries:
                self._copy_entry(entry, f"{target}/{entry.name}", (made.st_uid, group))
        self._copy_attributes(source, target, before)

    def _copy_entry(self, entry: os.DirEntry[str], target: str, owner: tuple[int, int]) -> None:
        st = entry.stat(follow_symlinks=False)
        kind = st.st_mode & 0o170000
        if kind == stat.S_IFDIR:
            os.mkdir(target, 0o700)
            self.copy(entry.path, target)
            return
        if st.st_nlink > 1:
            first = self._links.setdefault((st.st_dev, st.st_ino), target)
            if first != target:
                os.link(first, target, follow_symlinks=False)
                return
        if kind == stat.S_IFREG:
            self._copy_file(entry.path, target, st, owner)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(entry.path), target)
            self._copy_attributes(entry.path, target, st)
        elif kind == stat.S_IFSOCK:
            return  # the one that listens on it listens on the original
        else:
            os.mknod(target, st.st_mode, st.st_rdev)
            self._copy_attributes(entry.path, target, st)

    def _copy_file(self, source: str, target: str, st: os.stat_result, owner: tuple[int, int]) -> None:
        reader = os.open(source, _READ)
        try:
            mode = st.st_mode & 0o7777
            writer = os.open(target, _CREATE, mode & 0o777)
            try:
                if st.st_size:
                    self._copy_data(reader, writer, st)
                if owner != (st.st_uid, st.st_gid):
                    self._chown(writer, st)
                _copy_xattrs(reader, writer)
                # After chown, which takes setuid away.
                if mode & ~0o777 or owner != (st.st_uid, st.st_gid) or mode & self._umask:
                    os.fchmod(writer, mode)
                os.utime(writer, ns=(st.st_atime_ns, st.st_mtime_ns))
            finally:
                os.close(writer)
        finally:
            os.close(reader)

    def _copy_data(self, reader: int, writer: int, st: os.stat_result) -> None:
        if self._clones:
            try:
                system.clone(reader, writer)
                return
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._clones = False
        if hasattr(st, "st_blocks") and st.st_blocks * 512 < st.st_size:  # it has holes, which stay holes
            os.truncate(writer, st.st_size)
            for start, end in _data(reader, st.st_size):
                _copy_range(reader, writer, start, end)
        elif st.st_size <= _SMALL:
            os.write(writer, os.read(reader, _SMALL))
        else:
            _copy_range(reader, writer, 0, st.st_size)

    def _chown(self, writer: int, st: os.stat_result) -> None:
        try:
            os.fchown(writer, st.st_uid, st.st_gid)
        except PermissionError:
            if self._privileged:
                raise

    def _copy_attributes(self, source: str, target: str, st: os.stat_result) -> None:
        link = stat.S_ISLNK(st.st_mode)
        if hasattr(os, "lchown"):
            try:
                os.lchown(target, st.st_uid, st.st_gid)
            except PermissionError:
                if self._privileged:
                    raise
        _copy_xattrs(source, target)
        if not link:
            os.chmod(target, st.st_mode & 0o7777)
        if not link or os.utime in os.supports_follow_symlinks:
            os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns), follow_symlinks=not link)


def _umask() -> int:
    """Read, not set: other threads make files too. All bits, where it cannot be read."""
    for line in system.read_text("/proc/self/status").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o777


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, between its holes."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position


def _copy_range(reader: int, writer: int, start: int, end: int) -> None:
    position = start
    while position < end:
        try:
            copied = os.copy_file_range(reader, writer, min(_CHUNK, end - position), position, position)
        except (OSError, AttributeError):
            _copy_plainly(reader, writer, position, end)
            return
        if not copied:
            return  # it became shorter meanwhile
        position += copied


def _copy_plainly(reader: int, writer: int, start: int, end: int) -> None:
    os.lseek(reader, start, os.SEEK_SET)
    os.lseek(writer, start, os.SEEK_SET)
    left = end - start
    while left > 0:
        data = os.read(reader, min(1 << 20, left))
        if not data:
            return
        left -= len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(writer, view) :]


def _copy_xattrs(source: str | int, target: str | int) -> None:
    if not hasattr(os, "listxattr"):
        return
    follow = {} if isinstance(source, int) else {"follow_symlinks": False}
    try:
        names = os.listxattr(source, **follow)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return
        raise
    for name in names:
        try:
            os.setxattr(target, name, os.getxattr(source, name, **follow), **follow)
        except OSError as error:
            # Some belong to the system (security.*), which sets its own.
            if error.errno not in _NO_ATTRIBUTES or name.startswith("user."):
                raise


def sync(directory: str) -> None:
    """Make everything in a directory durable, bottom up: files, then the directory that names them."""
    files, folders = [], []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                files.append(entry.path)
    for path in files:
        sync_one(path)
    for path in folders:
        sync(path)
    sync_one(directory, folder=True)


def sync_one(path: str, *, folder: bool = False) -> None:
    if folder and not system.HAS_FOLDERS:
        return
    fd = _open_to_sync(path, folder)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def _open_to_sync(path: str, folder: bool) -> int:
    flags = system.O_SYNCABLE_FOLDER if folder else system.O_READ
    try:
        return system.open_fd(path, flags)
    except PermissionError:
        # A file that its owner may not read: for the moment it may.
        mode = os.stat(path, follow_symlinks=False).st_mode & 0o7777
        os.chmod(path, mode | 0o400)
        try:
            return system.open_fd(path, flags)
        finally:
            os.chmod(path, mode)


def remove(directory: str) -> None:
    """Remove a tree, also one whose directories may not be written. Never follows a symlink. Gone already is fine."""
    from shutil import rmtree

    def mend(function: object, path: str, error: object) -> None:
        kind = error[1] if isinstance(error, tuple) else error
        if isinstance(kind, FileNotFoundError):
            return
        if not isinstance(kind, PermissionError) or path in mended:
            raise kind  # type: ignore[misc]
        mended.add(path)
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            rmtree(path, **handler)
        else:
            os.unlink(path)

    mended: set[str] = set()
    handler: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": mend}
    rmtree(directory, **handler)
