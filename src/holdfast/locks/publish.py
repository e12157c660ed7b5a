"""The name of a lock file in its directory, and making the file so that its content appears with the name.

`publish` tries three ways. The later ones are for file systems that cannot do the earlier ones:

    O_TMPFILE + link      write a file without a name, then link it. A crash leaves nothing
    private file + link   sshfs, NFS, macOS, Windows. A crash leaves `<name>.<pid>.<16 hex>.tmp`, which `clean` removes
    O_EXCL + write        no hard links (FAT), or no room for a private name. Readers may see it empty for a moment

`link` fails if the name is taken, on every file system. `rename` is no alternative: it replaces the file of another
holder. Leaving out the first way would be 3 % slower on ext4 and 5 % on tmpfs.
"""

from __future__ import annotations

import errno
import os

from .. import owner, system
from ..files import OwnedFd, inode_of, named, set_mode, sync_directory, write_all
from ..paths import cannot_be_swapped, follow_links, is_trusted, mount_at
from .local import Location
from .record import MAX_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ..paths import Mount
    from ..process import Inode

    File = TypeVar("File", bound="PublishedFile")

_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMLINK}
_NOT_SUPPORTED |= {errno.ENAMETOOLONG}  # the private name of a lock whose name is nearly as long as possible


class Entry:
    """One name in a directory.

    Where another user could replace the directory, `dir_fd` is open and every call goes through it. It is also open
    where the directory has to be synced. Else `dir_fd` is None, and `name` is a whole path.
    """

    __slots__ = ("_directory", "dir_fd", "location", "name", "parent")

    def __init__(self, location: FileLocation, directory: OwnedFd | None = None) -> None:
        self.location = location
        self._directory = directory
        self.dir_fd = None if directory is None else directory.fd
        self.parent, self.name = (location.parent, location.file) if directory is None else (".", location.name)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()

    def means(self, fd: int, st: os.stat_result) -> bool:
        """Does the name still mean this open file? Where inode numbers are not stable, compare the records."""
        if mount_at(st.st_dev, self.location.file).has_inodes:
            return named(self.name, inode_of(st), False, self.dir_fd) is not None
        try:
            with OwnedFd(self.open(system.O_READ)) as file:
                return _same_record(*(system.pread(one, MAX_BYTES, 0) for one in (fd, file.fd)))
        except OSError:
            return False

    def open(self, flags: int) -> int:
        return system.open_fd(self.name, flags, dir_fd=self.dir_fd)

    def remove(self, name: str) -> bool:
        """False: there was no such file."""
        try:
            system.unlink(name, dir_fd=self.dir_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def sync(self) -> None:
        """Return when the names in this directory are on disk."""
        if self.dir_fd is not None:
            system.fsync(self.dir_fd)
        else:
            sync_directory(self.parent)

    def trusts(self, st: os.stat_result) -> bool:
        """Was a file of this directory made by a trusted user?"""
        return is_trusted(st, system.stat(self.parent) if self.dir_fd is None else system.fstat(self.dir_fd))


class FileLocation(Location):
    """The file of a lock file, and its directory."""

    __slots__ = ("_entry", "_is_safe", "keeps", "name", "parent")

    def __init__(self, file: str) -> None:
        Location.__init__(self, file)
        self.parent, self.name = os.path.split(file)
        self.keeps = True  # does the file system survive a power failure? True until the first look
        self._is_safe: bool | None = None
        self._entry = Entry(self)

    def open(self, durable: bool) -> Entry:
        """Open the directory if it has to be synced, or if another user could replace it. Raises UnsafePath."""
        if self._is_safe is None:
            self.keeps = mount_at(system.stat(self.parent).st_dev, self.parent).keeps
            self._is_safe = not system.HAS_FOLDERS or cannot_be_swapped(self.parent)
        syncs = durable and self.keeps and system.HAS_FOLDERS
        if self._is_safe and not syncs:
            return self._entry
        if not self._is_safe:
            follow_links(self.parent)
        flags = system.O_SYNCABLE_FOLDER if syncs else system.O_FOLDER
        return Entry(self, OwnedFd(system.open_fd(self.parent, flags)))


class PublishedFile(OwnedFd):
    """A lock file that this process makes. It is removed if it is dropped before it is closed."""

    __slots__ = ("entry", "key", "mount", "private")

    entry: Entry
    key: Inode
    mount: Mount
    private: str  # the name of the file until it is published; empty: it has no such name

    def is_published(self) -> bool:
        """Does the name still mean this file?"""
        if self.mount.has_inodes:
            return named(self.entry.name, self.key, False, self.entry.dir_fd) is not None
        return self.entry.means(self.fd, system.fstat(self.fd))

    def take_back(self) -> None:
        """Remove the file and close it, unless it is closed already, or a fork has closed it."""
        if not self.is_open:
            return
        try:
            system.lock_removal(self.fd)
            if self.entry.means(self.fd, system.fstat(self.fd)):
                self.entry.remove(self.entry.name)
            if self.private:
                self.entry.remove(self.private)
        except OSError:
            pass  # another process removes it
        finally:
            self.close()

    discard = take_back


def _same_record(one: bytes, other: bytes) -> bool:
    """Are these two looks at one file? A heartbeat or a token may have been written in between."""
    import re

    owners = [re.findall(rb"(?:owner|call)\W+([0-9a-f]+)", content) for content in (one, other)]
    return one == other or (owners[0] == owners[1] != [])


def publish(new: type[File], entry: Entry, content: bytes, mode: int, durable: bool, exact_mode: bool = False) -> File:
    """Make the file of an entry, with its liveness byte locked. Raises FileExistsError if the name is taken.

    exact_mode: whatever the umask
    """
    try:
        return _make(new, entry, entry.parent, system.O_TMPFILE, content, mode, durable, exact_mode)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED and error.errno != errno.ENOENT:
            raise
    try:
        return _make(new, entry, private_name(entry.name), system.O_NEW, content, mode, durable, exact_mode)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    return _make(new, entry, entry.name, system.O_NEW, content, mode, durable, exact_mode)


def _make(
    new: type[File], entry: Entry, name: str, flags: int, content: bytes, mode: int, durable: bool, exact_mode: bool
) -> File:
    """Make a file, lock it, write it, and link it to its name."""
    file = new(system.open_fd(name, flags, mode, dir_fd=entry.dir_fd))
    try:
        fd = file.fd
        file.entry = entry
        file.private = private = "" if name is entry.parent or name is entry.name else name
        st = system.fstat(fd)
        file.key = inode_of(st)
        file.mount = mount = mount_at(st.st_dev, entry.location.file)
        if private:
            system.fchmod(fd, 0o600)  # only its owner can read it until it is complete
        system.lock_liveness(fd)
        if mount.lets_read and not take_kernel_lock(fd, mount):  # so that `Lock` and flock(1) wait for the holder
            # Only in place: another kind of lock has found the file first, and uses it.
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), entry.name)
        write_all(fd, content)
        if durable and mount.keeps:
            system.fsync(fd)
        if exact_mode:
            set_mode(fd, mode)
        elif private:
            system.fchmod(fd, st.st_mode & 0o7777)  # the mode without the bits of the umask
        if private:
            _link_private(file)
        elif name is not entry.name:
            system.link_open_file(fd, entry.dir_fd, entry.name)
    except FileExistsError:
        if file.private:
            entry.remove(private)
        file.close()
        raise
    except BaseException:  # perhaps an interrupt, when it was done
        file.take_back()
        raise
    return file


def _link_private(file: PublishedFile) -> None:
    entry, private = file.entry, file.private
    try:
        system.link(private, entry.name, src_dir_fd=entry.dir_fd, dst_dir_fd=entry.dir_fd, follow_symlinks=False)
    except FileNotFoundError:  # `clean` in another pid namespace took it for the file of a dead process
        raise FileExistsError(errno.EEXIST, "the private file was removed: try again", entry.name) from None
    entry.remove(private)  # on Windows a link is a move, and the name is gone
    file.private = ""


def take_kernel_lock(fd: int, mount: Mount) -> bool:
    """Take the lock of `Lock` and flock(1). True also where the file system has no such locks. False: it is held."""
    try:
        (system.lock_range if mount.ranged else system.lock)(fd, system.EX_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.EBADF  # EBADF: another user's file, open for reading only, where that is not enough
    return True


def replace(entry: Entry, name: str, content: bytes, mode: int, durable: bool) -> None:
    """Write another file of the directory, in place of the old one. Readers see the old content or the new content."""
    private = private_name(entry.name)  # `clean` finds what a crash leaves by this name
    try:
        with OwnedFd(system.open_fd(private, system.O_NEW, mode, dir_fd=entry.dir_fd)) as file:
            system.lock_liveness(file.fd)
            write_all(file.fd, content)
            if durable:
                system.fsync(file.fd)
            system.rename(private, name, src_dir_fd=entry.dir_fd, dst_dir_fd=entry.dir_fd)
    except BaseException:
        entry.remove(private)
        raise


def private_name(name: str) -> str:
    return f"{name}.{owner.me().pid}.{os.urandom(8).hex()}.tmp"


def lock_of_private(path: str) -> str | None:
    """The lock file of which this is a private file, `<lock file>.<pid>.<16 hex>.tmp`; None: it is not one."""
    stem, *last = path.rsplit(".", 3)
    if len(last) != 3 or not stem:
        return None
    pid, digits, suffix = last
    is_hex = len(digits) == 16 and all(digit in "0123456789abcdef" for digit in digits)
    return stem if suffix == "tmp" and is_hex and pid.isascii() and pid.isdigit() else None
