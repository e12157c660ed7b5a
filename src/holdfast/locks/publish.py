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
from ..files import OwnedFd, inode_of, sync_directory, write_all
from ..paths import cannot_be_swapped, follow_links, is_trusted, mount_at
from .location import Location
from .record import MAX_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..paths import Mount
    from ..process import Inode

_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.ENOENT}
_NOT_SUPPORTED |= {errno.ENAMETOOLONG}  # the private name of a lock whose name is nearly as long as possible


class Entry:
    """One name in a directory, and the file that this process has published under it (`file`).

    Where another user could replace the directory, `dir_fd` is open and every call goes through it. It is also open
    where the directory has to be synced. Else `dir_fd` is None, and `name` is a whole path.

    The entry owns both descriptors. An entry that is dropped before a hold has released it removes its file.
    """

    __slots__ = ("_directory", "dir_fd", "file", "location", "mount", "name", "parent", "private", "st")

    mount: Mount  # of the published file
    st: os.stat_result  # of the published file

    def __init__(self, location: FileLocation, directory: OwnedFd | None = None) -> None:
        self.file: OwnedFd | None = None
        self.location = location
        self._directory = directory
        self.dir_fd = None if directory is None else directory.fd
        self.parent, self.name = (location.parent, location.file) if directory is None else (".", location.name)
        self.private = ""  # the name of the file until it is published

    def close(self) -> None:
        """Close both descriptors. The file stays."""
        if self.file is not None:
            self.file.close()
        if self._directory is not None:
            self._directory.close()

    def take_back(self) -> None:
        """Remove the published file, unless it is closed already (or a fork has closed it), and close it."""
        file = self.file
        if file is None or not file.is_open:
            return
        try:
            system.lock_removal(file.fd)
            if self.means(file.fd, system.fstat(file.fd)):
                self.remove(self.name)
            if self.private:
                self.remove(self.private)
        except OSError:
            pass  # another process removes it
        finally:
            file.close()
            self.file = None

    def __del__(self) -> None:
        file = getattr(self, "file", None)  # None, too, if an interrupt came in `__init__`
        if file is not None and file.fd != -1:
            self.take_back()

    def inode(self) -> Inode | None:
        """The file that the name means now; None: there is none."""
        try:
            return inode_of(system.stat(self.name, dir_fd=self.dir_fd, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def means(self, fd: int, st: os.stat_result) -> bool:
        """Does the name still mean this open file? Where inode numbers are not stable, compare the records."""
        if mount_at(st.st_dev, self.location.file).has_inodes:
            return self.inode() == inode_of(st)
        try:
            with OwnedFd(self.open(system.O_READ)) as file:
                return _same_record(*(system.pread(one, MAX_BYTES, 0) for one in (fd, file.fd)))
        except OSError:
            return False

    def is_published(self) -> bool:
        """Does the name still mean the file that this process has published?"""
        if self.mount.has_inodes:
            return self.inode() == inode_of(self.st)
        return self.file is not None and self.means(self.file.fd, self.st)

    def open(self, flags: int) -> int:
        return system.open_fd(self.name, flags, dir_fd=self.dir_fd)

    def sibling(self, name: str) -> str:
        """How to call another file of this directory."""
        return name if self.dir_fd is not None else f"{self.parent}/{name}"

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

    __slots__ = ("_is_safe", "keeps", "name", "parent")

    def __init__(self, file: str) -> None:
        Location.__init__(self, file)
        self.parent, self.name = os.path.split(file)
        self.keeps = True  # does the file system survive a power failure? True until the first look
        self._is_safe: bool | None = None

    def open(self, durable: bool) -> Entry:
        """Open the directory if it has to be synced, or if another user could replace it. Raises UnsafePath."""
        if self._is_safe is None:
            self.keeps = mount_at(system.stat(self.parent).st_dev, self.parent).keeps
            self._is_safe = not system.HAS_FOLDERS or cannot_be_swapped(self.parent)
        syncs = durable and self.keeps and system.HAS_FOLDERS
        if self._is_safe and not syncs:
            return Entry(self)
        if not self._is_safe:
            follow_links(self.parent)
        flags = system.O_SYNCABLE_FOLDER if syncs else system.O_FOLDER
        return Entry(self, OwnedFd(system.open_fd(self.parent, flags)))


def _same_record(one: bytes, other: bytes) -> bool:
    """Are these two looks at one file? A heartbeat or a token may have been written in between."""
    import re

    owners = [re.findall(rb"(?:owner|call)\W+([0-9a-f]+)", content) for content in (one, other)]
    return one == other or (owners[0] == owners[1] != [])


def publish(entry: Entry, content: bytes, mode: int, durable: bool) -> None:
    """Make the file of an entry, with its liveness byte locked. Raises FileExistsError if the name is taken."""
    try:
        try:
            fd = _make(entry, entry.parent, system.O_TMPFILE, content, mode, durable)
            system.link_open_file(fd, entry.dir_fd, entry.name)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            entry.take_back()
            _publish_otherwise(entry, content, mode, durable)
    except FileExistsError:
        entry.close()
        raise
    except BaseException:  # perhaps an interrupt, when it was done
        entry.take_back()
        raise


def _publish_otherwise(entry: Entry, content: bytes, mode: int, durable: bool) -> None:
    entry.private = private = private_name(entry.name)
    try:
        fd = _make(entry, private, system.O_NEW, content, mode, durable)
        system.fchmod(fd, entry.st.st_mode & 0o7777)  # the mode without the bits of the umask
        try:
            system.link(private, entry.name, src_dir_fd=entry.dir_fd, dst_dir_fd=entry.dir_fd, follow_symlinks=False)
        except FileNotFoundError:  # `clean` in another pid namespace took it for the file of a dead process
            raise FileExistsError(errno.EEXIST, "the private file was removed: try again", entry.name) from None
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED or error.errno == errno.ENOENT:
            raise
        entry.take_back()
        entry.private = ""
        _make(entry, entry.name, system.O_NEW, content, mode, durable)
    finally:
        if entry.private and entry.file is not None:  # else another user has guessed the private name
            entry.remove(private)  # on Windows a link is a move, and the name is gone


def _make(entry: Entry, name: str, flags: int, content: bytes, mode: int, durable: bool) -> int:
    """Make a file, lock it and write it. Only its owner can read a private file until it is complete."""
    entry.file = file = OwnedFd(system.open_fd(name, flags, mode, dir_fd=entry.dir_fd))
    fd = file.fd
    entry.st = system.fstat(fd)
    entry.mount = mount = mount_at(entry.st.st_dev, entry.location.file)
    if entry.private:
        system.fchmod(fd, 0o600)
    system.lock_liveness(fd)
    if mount.lets_read and not take_kernel_lock(fd, mount):  # so that `Lock` and flock(1) wait for the holder
        # Only in place: another kind of lock has found the file first, and uses it.
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), entry.name)
    write_all(fd, content)
    if durable and mount.keeps:
        system.fsync(fd)
    return fd


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
