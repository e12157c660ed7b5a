"""A copy of a whole directory tree: what `AtomicDir.edit` begins with.

It has what `cp -a` keeps: owner, mode, times, symlinks, extended attributes, holes, and hard links *within* the tree.
It shares blocks with the original where the file system can clone (reflink), and never an inode: writing to the copy
must not write to the original. Sockets are left out.

It goes by descriptors and without recursion, and follows no link. What becomes something of another kind while it is
copied is an error. An error leaves a part of a copy, which is for the caller to remove.

For each file it makes nine calls to the system. Nearly all of its time is theirs, so what the loop over files does
besides is written for speed. Threads made it slower: they take turns, and a turn costs more than such a call.
"""

from __future__ import annotations

import errno
import os
import stat

from .. import system
from ..files import OwnedFd, inode_of
from .trees import COMMON, TO_CHANGE, Descent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Inode = tuple[int, int]

_NO_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.ETXTBSY, errno.EBADF}
)
_NO_ATTRIBUTES = frozenset({errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENODATA, errno.ENOSYS})
_HAS_ATTRIBUTES = hasattr(os, "listxattr")
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")
_CHUNK = 1 << 30
_SMALL = 1 << 16  # bytes that are copied more quickly by hand
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | COMMON
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | COMMON


def _descent(directory: str) -> Descent:
    return Descent(OwnedFd(os.open(directory, system.O_SYNCABLE_FOLDER)))


class Copier:
    """One copy of one tree."""

    def __init__(self) -> None:
        self._clones = True
        self._links: dict[Inode, tuple[str, str]] = {}
        self._unsure = ~0o777 | _umask()  # bits of a mode that a new file does not get
        self._owner = (-1, -1)

    def copy(self, source: str, target: str) -> None:
        """Copy the content of a directory into an empty one, and give that its attributes, all but owner and mode."""
        if not system.HAS_FOLDERS:
            from shutil import copytree

            copytree(source, target, symlinks=True, dirs_exist_ok=True)
            return
        copy_acls(None, target)  # what the directory above gives to all that is made in it
        with _descent(source) as self._source, _descent(target) as self._target, _descent(target) as self._firsts:
            ways, done = [""], []
            while ways:
                way = ways.pop()
                done.append(way)
                ways += self._copy_folder(way)
            for way in reversed(done):  # what is in it first: that changes its times, and its mode may forbid it
                self._finish_folder(way)

    def _copy_folder(self, way: str) -> list[str]:
        """Copy what is in a directory. Gives the ways to those in it, which are made but empty."""
        deeper = []
        source, target = self._source.go(way), self._target.go(way)
        made = os.fstat(target)
        # Who owns a new file here: with setgid on the directory its group is the directory's.
        self._owner = (made.st_uid, made.st_gid if made.st_mode & stat.S_ISGID else os.getegid())
        with os.scandir(source) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_file(follow_symlinks=False):
                    self._copy_file(name, way, source, target)
                elif entry.is_dir(follow_symlinks=False):
                    os.mkdir(name, TO_CHANGE, dir_fd=target)
                    deeper.append(f"{way}/{name}" if way else name)
                else:
                    self._copy_special(name, way, source, target)
        return deeper

    def _copy_file(self, name: str, way: str, source: int, target: int) -> None:
        original = OwnedFd(os.open(name, _READ, dir_fd=source))  # `with` would cost two calls more
        try:
            reader = original.fd
            st = os.fstat(reader)  # of what we read, whatever has that name by now
            mode = st.st_mode
            if not stat.S_ISREG(mode):
                raise _changed(name)
            if st.st_nlink > 1 and self._linked(name, way, target, st):
                return
            mode &= 0o7777
            # Its owner may write it for now: else nobody but root could give it attributes.
            copy = OwnedFd(os.open(name, _CREATE, mode & 0o777 | 0o200, dir_fd=target))
            try:
                writer = copy.fd
                size = st.st_size
                if size > _SMALL or self._clones or st.st_blocks * 512 < size:
                    self._copy_data(reader, writer, st)
                elif size:  # most are small: no call of ours for them
                    written = os.pwrite(writer, os.pread(reader, size, 0), 0)
                    if written < size:
                        _copy_plainly(reader, writer, written, size)
                others = self._owner != (st.st_uid, st.st_gid)
                if others:
                    mode = give_owner(writer, st)
                _copy_xattrs(reader, writer)
                # After chown, which takes setuid away.
                if others or mode & self._unsure or not mode & 0o200:
                    os.fchmod(writer, mode)
                os.utime(writer, ns=(st.st_atime_ns, st.st_mtime_ns))
            finally:
                copy.close()
        finally:
            original.close()

    def _copy_special(self, name: str, way: str, source: int, target: int) -> None:
        st = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISSOCK(st.st_mode):  # who listens on a socket listens on the original
            return
        if stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode):
            raise _changed(name)
        if st.st_nlink > 1 and self._linked(name, way, target, st):
            return
        mode = 0
        if stat.S_ISLNK(st.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        else:
            mode = stat.S_IFMT(st.st_mode)
            os.mknod(name, mode | 0o600, st.st_rdev, dir_fd=target)
        permissions = give_owner(name, st, dir_fd=target)
        _copy_xattrs(f"/proc/self/fd/{source}/{name}", f"/proc/self/fd/{target}/{name}")
        if mode:
            os.chmod(name, permissions, dir_fd=target)
        os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=target, follow_symlinks=False)

    def _linked(self, name: str, way: str, target: int, st: os.stat_result) -> bool:
        """True: the copy has it already by another name, and by this one from now on."""
        first = self._links.setdefault(inode_of(st), (way, name))
        if first == (way, name):
            return False
        folder = self._firsts.go(first[0])
        os.link(first[1], name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
        return True

    def _copy_data(self, reader: int, writer: int, st: os.stat_result) -> None:
        size = st.st_size
        if self._clones:
            try:
                system.clone(reader, writer)
                return
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._clones = False
        if st.st_blocks * 512 < size:  # it has holes, which stay holes
            os.truncate(writer, size)
            for start, end in _data(reader, size):
                _copy_range(reader, writer, start, end)
        else:
            _copy_range(reader, writer, 0, size)

    def _finish_folder(self, way: str) -> None:
        source, target = self._source.go(way), self._target.go(way)
        st = os.fstat(source)
        if way:
            mode = give_owner(target, st)
            _copy_xattrs(source, target)
            os.fchmod(target, mode)
        else:
            _copy_xattrs(source, target)
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def _changed(name: str) -> OSError:
    text = "this became something of another kind while it was copied; find out who does not take the lock"
    return OSError(errno.ESTALE, text, name)


def give_owner(target: str | int, st: os.stat_result, **where: Any) -> int:
    """Give something the owner of another, as far as one may. Gives the mode of the other, as far as it fits then.

    Who is not root may pass on a group that it is in, and no more. What has another owner now must not act for it: no
    setuid, no setgid.
    """
    mode = st.st_mode & 0o7777
    if not hasattr(os, "chown"):
        return mode
    if not isinstance(target, int):
        where["follow_symlinks"] = False
    try:
        os.chown(target, st.st_uid, st.st_gid, **where)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        if st.st_uid != os.geteuid():
            mode &= ~stat.S_ISUID
        try:
            os.chown(target, -1, st.st_gid, **where)
        except PermissionError:
            mode &= ~stat.S_ISGID
    return mode


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
    while start < end:
        data = os.pread(reader, min(1 << 20, end - start), start)
        if not data:
            return
        # A disk that fills up takes a part, and says so only to who comes with the rest.
        start += os.pwrite(writer, data, start)


def copy_acls(source: str | None, target: str) -> None:
    """Let a directory have the access control lists of another, or none."""
    if not hasattr(os, "setxattr"):
        return
    for name in _ACLS:
        try:
            value = os.getxattr(source, name) if source is not None else None
        except OSError:
            value = None
        try:
            if value is not None:
                os.setxattr(target, name, value)
            else:
                os.removexattr(target, name)
        except OSError as error:
            if error.errno not in _NO_ATTRIBUTES:
                raise


def _copy_xattrs(source: str | int, target: str | int) -> None:
    """Of what a descriptor is open on, or what a path names, also if that is a link."""
    for name in _xattrs(source):
        follow = {} if isinstance(source, int) else {"follow_symlinks": False}
        try:
            os.setxattr(target, name, os.getxattr(source, name, **follow), **follow)
        except OSError as error:
            # Some belong to the system (security.*), which sets its own.
            if error.errno not in _NO_ATTRIBUTES or name.startswith("user."):
                raise


def _xattrs(source: str | int) -> list[str]:
    if not _HAS_ATTRIBUTES:
        return []
    try:
        return os.listxattr(source) if isinstance(source, int) else os.listxattr(source, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return []
        raise
