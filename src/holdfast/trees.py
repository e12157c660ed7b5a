"""Whole directory trees: copying, syncing and removing them. What `AtomicDir` does to content.

A copy has what `cp -a` keeps: owner, mode, times, symlinks, extended attributes, holes, and hard links *within* the
tree. It shares blocks with the original where the file system can clone (reflink), and never an inode: writing to the
copy must not write to the original.

All go by descriptors and without recursion: a tree may be deeper than a path may be long. Removing follows no link,
also none that somebody puts in the place of a directory meanwhile, and enters no mount.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager

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
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")
_CHUNK = 1 << 30
_SMALL = 1 << 16  # bytes that are copied more quickly by hand
_LONGEST = 1000  # characters of a path: of 4 bytes each at most, and the system takes 4096
_COMMON = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _COMMON
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _COMMON
_HAS_ATTRIBUTES = hasattr(os, "listxattr")
_TO_READ, _TO_CHANGE = 0o500, 0o700  # what its owner has to be allowed to do with a directory


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
def _below(root: int, way: str) -> Iterator[int]:
    fd = _open_below(root, way)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened(directory: str) -> Iterator[int]:
    fd = os.open(directory, system.O_SYNCABLE_FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


class Copier:
    """One copy of one tree."""

    def __init__(self) -> None:
        self._clones = hasattr(system, "clone")
        self._links: dict[Inode, tuple[str, str]] = {}
        self._unsure = ~0o777 | _umask()  # bits of a mode that a new file does not get
        self._source = self._target = -1
        self._owner = (-1, -1)

    def copy(self, source: str, target: str) -> None:
        """Copy the content of a directory into an empty one, and give that its attributes, all but owner and mode."""
        if not system.HAS_FOLDERS:
            from shutil import copytree

            copytree(source, target, symlinks=True, dirs_exist_ok=True)
            return
        copy_acls(None, target)  # what the directory above gives to all that is made in it
        with _opened(source) as self._source, _opened(target) as self._target:
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
        with _below(self._source, way) as source, _below(self._target, way) as target:
            made = os.fstat(target)
            # Who owns a new file here: with setgid on the directory its group is the directory's.
            self._owner = (made.st_uid, made.st_gid if made.st_mode & stat.S_ISGID else os.getegid())
            with os.scandir(source) as entries:
                for entry in entries:
                    name = entry.name
                    if entry.is_file(follow_symlinks=False):
                        self._copy_file(name, way, source, target)
                    elif entry.is_dir(follow_symlinks=False):
                        os.mkdir(name, _TO_CHANGE, dir_fd=target)
                        deeper.append(f"{way}/{name}" if way else name)
                    else:
                        self._copy_special(name, way, source, target)
        return deeper

    def _copy_file(self, name: str, way: str, source: int, target: int) -> None:
        reader = os.open(name, _READ, dir_fd=source)
        try:
            st = os.fstat(reader)  # of what we read, whatever has that name by now
            mode = st.st_mode
            if not stat.S_ISREG(mode):
                raise _changed(name)
            if st.st_nlink > 1 and self._linked(name, way, target, st):
                return
            mode &= 0o7777
            # Its owner may write it for now: else nobody but root could give it attributes.
            writer = os.open(name, _CREATE, mode & 0o777 | 0o200, dir_fd=target)
            try:
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
                os.close(writer)
        finally:
            os.close(reader)

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
        first = self._links.setdefault((st.st_dev, st.st_ino), (way, name))
        if first == (way, name):
            return False
        with _below(self._target, first[0]) as folder:
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
        with _below(self._source, way) as source, _below(self._target, way) as target:
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


def sync(directory: str) -> None:
    """Make everything in a directory durable: files, and the directories that name them."""
    if not system.HAS_FOLDERS:
        for folder, _, names in os.walk(directory):
            for name in names:
                _sync_and_close(_open_to_sync(os.path.join(folder, name)))
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
            with _below(root, way) as fd:
                os.fchmod(fd, mode)
                system.fsync(fd)
        os.close(root)


def _sync_folder(root: int, way: str, opened: list[tuple[str, int]]) -> list[str]:
    """Sync what is in a directory and itself. Gives the ways to the directories in it.

    `opened` gets those whose owner might not look into them, with their modes: for the moment it may.
    """
    above, _, name = way.rpartition("/")
    with _below(root, above) as folder:
        fd, mode = _open_as_owner(name, folder, _TO_READ)
    deeper = []
    try:
        if mode is not None:
            opened.append((way, mode))
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    file = _open_to_sync(entry.name, fd)
                    try:  # as `_sync_and_close` does it, without the call
                        system.fsync(file)
                    finally:
                        system.close(file)
                elif entry.is_dir(follow_symlinks=False):
                    deeper.append(f"{way}/{entry.name}")
        system.fsync(fd)
    finally:
        os.close(fd)
    return deeper


def _open_to_sync(name: str, folder: int | None = None) -> int:
    try:
        return system.open_fd(name, system.O_READ, dir_fd=folder)
    except PermissionError:
        # A file that its owner may not read: for the moment it may.
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o7777
        os.chmod(name, mode | 0o400, dir_fd=folder)
        try:
            return system.open_fd(name, system.O_READ, dir_fd=folder)
        finally:
            os.chmod(name, mode, dir_fd=folder)


def _sync_and_close(fd: int) -> None:
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def sync_folder(path: str) -> None:
    """Make the names in a directory durable, and its own attributes."""
    if system.HAS_FOLDERS:
        _sync_and_close(system.open_fd(path, system.O_SYNCABLE_FOLDER))


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
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | _COMMON, dir_fd=folder)
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
    top, _ = _open_as_owner(directory, None, _TO_CHANGE)
    try:
        names = _empty(top, top)
        while names:
            name = names.pop()
            fd, _ = _open_as_owner(name, top, _TO_CHANGE)
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
        _allow(name, folder, _TO_CHANGE)  # where it is now is written into it
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    return new
