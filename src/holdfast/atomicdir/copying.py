"""A copy of a whole directory tree, for `AtomicDir.edit`.

The copy keeps what `cp -a` keeps: owner, mode, times, symlinks, extended attributes, holes, and hard links of files
*within* the tree. Files share blocks with the original where the file system can clone (reflink), and never an inode,
so that writing to the copy does not write to the original. Sockets are left out.

The copier goes by descriptors, two for each level of directories, and follows no symlink. After an error, the caller
removes the partial copy. Nearly all of the time is that of ten system calls per file. Threads made it slower.
"""

from __future__ import annotations

import errno
import os
import stat

from .. import system
from ..files import OwnedFd, inode_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NO_ATTRIBUTES = frozenset({errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENODATA, errno.ENOSYS})
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")
_BUFFER, _CHUNK = 1 << 20, 1 << 30  # bytes per call, through this process and in the kernel
_FOLDER = system.O_READ | system.O_SYNCABLE_FOLDER  # without following a symlink


class Copier:
    """One copy of one tree."""

    def __init__(self) -> None:
        self._clones = True
        self._links: dict[tuple[int, int], str] = {}  # of files with several names: the path of the first copy

    def copy(self, source: str, target: str) -> None:
        """Copy the content of a directory into an empty one, and its attributes except owner and mode."""
        if not system.HAS_FOLDERS:
            from shutil import copytree

            copytree(source, target, symlinks=True, dirs_exist_ok=True)
            return
        copy_acls(None, target)  # the default list of the directory above would apply to every copy
        with OwnedFd(system.open_fd(source, _FOLDER)) as original, OwnedFd(system.open_fd(target, _FOLDER)) as copy:
            self._copy_folder(target, original.fd, copy.fd)
            st = system.fstat(original.fd)
            _copy_xattrs(original.fd, copy.fd)
            system.utime(copy.fd, ns=(st.st_atime_ns, st.st_mtime_ns))

    def _copy_folder(self, path: str, source: int, target: int) -> None:
        """Copy what is in a directory. `path` is that of the copy."""
        folders = []
        with system.scandir(source) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    self._copy_file(entry.name, path, source, target)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    _copy_special(entry.name, source, target)
        for name in folders:
            system.mkdir(name, stat.S_IRWXU, dir_fd=target)
            with (
                OwnedFd(system.open_fd(name, _FOLDER, dir_fd=source)) as original,
                OwnedFd(system.open_fd(name, _FOLDER, dir_fd=target)) as copy,
            ):
                self._copy_folder(f"{path}/{name}", original.fd, copy.fd)
                _copy_attributes(original.fd, copy.fd, system.fstat(original.fd))

    def _copy_file(self, name: str, path: str, source: int, target: int) -> None:
        with OwnedFd(system.open_fd(name, system.O_READ, dir_fd=source)) as original:
            st = system.fstat(original.fd)  # of the open file: the name may mean another one by now
            if st.st_nlink > 1 and self._linked(name, path, target, st):
                return
            mode = st.st_mode & 0o777 | stat.S_IWUSR  # for now: else only root could set attributes
            with OwnedFd(system.open_fd(name, system.O_NEW, mode, dir_fd=target)) as copy:
                self._copy_data(original.fd, copy.fd, st)
                _copy_attributes(original.fd, copy.fd, st)

    def _linked(self, name: str, path: str, target: int, st: os.stat_result) -> bool:
        """If the file was copied by another name, link that copy to this name and return True."""
        first = self._links.setdefault(inode_of(st), f"{path}/{name}")
        if first != f"{path}/{name}":
            system.link(first, name, dst_dir_fd=target, follow_symlinks=False)
            return True
        return False

    def _copy_data(self, reader: int, writer: int, st: os.stat_result) -> None:
        size = st.st_size
        if self._clones:
            try:
                system.clone(reader, writer)
                return
            except OSError:  # copying fails too, if the reason is another one
                self._clones = False
        if st.st_blocks * 512 >= size:
            _copy_range(reader, writer, 0, size)
            return
        system.ftruncate(writer, size)
        end = 0
        while end < size:
            try:
                start = system.lseek(reader, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            end = system.lseek(reader, start, os.SEEK_HOLE)
            _copy_range(reader, writer, start, end)


def _copy_special(name: str, source: int, target: int) -> None:
    """Copy a symlink, a FIFO or a device. A socket is left out: its server listens on the original."""
    st = system.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISSOCK(st.st_mode):
        return
    if stat.S_ISLNK(st.st_mode):
        system.symlink(system.readlink(name, dir_fd=source), name, dir_fd=target)
        give_owner(name, st, target)
    else:
        system.mknod(name, stat.S_IFMT(st.st_mode) | 0o600, st.st_rdev, dir_fd=target)
        system.chmod(name, give_owner(name, st, target), dir_fd=target)
    system.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_range(reader: int, writer: int, start: int, end: int) -> None:
    """Copy in the kernel, or on the server of a network file system, where that is possible."""
    while start < end:
        try:
            copied = system.copy_file_range(reader, writer, min(_CHUNK, end - start), start, start)
        except OSError:
            data = system.pread(reader, min(_BUFFER, end - start), start)
            copied = system.pwrite(writer, data, start)  # a full disk takes a part, and refuses the rest
        if not copied:
            return  # the file became shorter
        start += copied


def _copy_attributes(source: int, target: int, st: os.stat_result) -> None:
    """Give a copy the owner, the extended attributes, the mode and the times of the original."""
    made, mode = system.fstat(target), stat.S_IMODE(st.st_mode)
    if (made.st_uid, made.st_gid) != (st.st_uid, st.st_gid):
        mode = give_owner(target, st)
    _copy_xattrs(source, target)
    if mode != stat.S_IMODE(made.st_mode):  # after the owner, whose change takes setuid away
        system.fchmod(target, mode)
    system.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def give_owner(target: str | int, st: os.stat_result, folder: int | None = None) -> int:
    """Give a file the owner of another one, as far as this user may. Returns the mode that the file may have then.

    Only root may give files away. A file that gets another owner than the original loses setuid or setgid.
    """
    mode = stat.S_IMODE(st.st_mode)
    is_open = isinstance(target, int)
    try:
        system.chown(target, st.st_uid, st.st_gid, dir_fd=folder, follow_symlinks=is_open)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        if st.st_uid != os.geteuid():
            mode &= ~stat.S_ISUID
        try:
            system.chown(target, -1, st.st_gid, dir_fd=folder, follow_symlinks=is_open)
        except PermissionError:
            mode &= ~stat.S_ISGID
    return mode


def copy_acls(source: str | None, target: str) -> None:
    """Give a directory the access control lists of another one, or none."""
    for name in _ACLS:
        _if_allowed(system.removexattr, target, name)
        if source is not None:
            _if_allowed(_copy_xattr, source, target, name)


def _copy_xattrs(source: int, target: int) -> None:
    for name in _if_allowed(system.listxattr, source) or ():
        _if_allowed(_copy_xattr, source, target, name)  # the system itself sets those that it refuses (security.*)


def _copy_xattr(source: str | int, target: str | int, name: str) -> None:
    system.setxattr(target, name, system.getxattr(source, name))


def _if_allowed(call: Callable[..., Any], *args: object) -> Any:
    """Call a function on extended attributes. None: the attribute does not exist, or is not for this user."""
    try:
        return call(*args)
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return None
