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

from .. import owner, system
from ..files import HeldFd, OwnedFd, inode_of, sync_directory
from ..paths import LOCAL, is_trusted, mount_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .record import Record

    Inode = tuple[int, int]

_new = object.__new__
_MAX_EXCHANGES = 100
_MAX_STEM_LENGTH = 200  # bytes of 255; a pid, 16 digits and .tmp come after it
NOT_HERE = frozenset(
    {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.ENOENT}
)


class Place:
    """Where a file is to be: a name in a directory, which is open, or of which we know that nobody can swap it."""

    __slots__ = ("_owner", "directory", "folder", "held", "made", "name", "path")

    def __init__(self, directory: str, name: str, folder: OwnedFd | None) -> None:
        self.path = f"{directory}/{name}"
        self._owner = folder
        self.folder = None if folder is None else folder.fd
        self.held = False  # by a hold, which closes the directory itself
        self.made: Published | None = None  # what can only be taken back while `folder` is open
        self.directory = directory if folder is None else "."
        self.name = name if folder is not None else self.path

    def release(self) -> None:
        """`leave`, for the hold that has it."""
        self.held = False
        self.leave()

    def leave(self) -> None:
        """Close the directory, unless a hold has it. What was published and is not held yet is taken back."""
        if self.held:
            return
        if self.made is not None:
            self.made.take_back()
            self.made = None
        if self._owner is not None:
            self._owner.close()

    def sibling(self, name: str) -> str:
        """What to call another file of this directory."""
        return name if self.folder is not None else f"{self.directory}/{name}"

    def inode(self, name: str) -> Inode | None:
        """What a name in this directory means now; None: nothing."""
        try:
            st = system.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return inode_of(st)

    def remove(self, name: str) -> bool:
        """False: there was nothing to remove."""
        try:
            system.unlink(name, dir_fd=self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def rename(self, one: str, other: str) -> None:
        system.rename(one, other, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def sync(self) -> None:
        """The names in this directory are on disk."""
        if self.folder is not None:
            system.fsync(self.folder)
        else:
            sync_directory(self.directory)

    def trusts(self, entry: os.stat_result) -> bool:
        """Was this file made by a user that we trust?"""
        return is_trusted(entry, system.stat(self.directory) if self.folder is None else system.fstat(self.folder))


class Published(HeldFd):
    """A file that was made, open, with its liveness byte locked.

    Dropped before a hold owns it, as by an interrupt, it is taken back.
    """

    __slots__ = ("is_held", "keeps", "place", "private", "st")

    is_held: bool  # by a hold, which closes it
    keeps: bool  # does the file system survive a power failure? Known from `fill` on
    place: Place
    private: str  # the name that it has until it is published
    st: os.stat_result

    def hand_over(self) -> None:
        """A hold has the file and the directory from now on."""
        self.is_held = True
        place = self.place
        if place.folder is not None:
            place.made = None
            place.held = True

    def fill(self, content: bytes, durable: bool) -> None:
        fd = self.fd
        system.lock_liveness(fd)
        device = self.st[2]
        mount = LOCAL if device & 0xFFF00 else mount_at(device, self.place.path)
        self.keeps = mount.keeps
        if mount.lets_read:  # so that `Lock` and flock(1) wait for the holder
            try:
                (system.lock_range if mount.ranged else system.lock)(fd, system.EX_NB)
            except BlockingIOError:
                raise  # published in place, and taken as another kind of lock at once
            except OSError:
                pass  # a file system without such locks
        if system.write(fd, content) < len(content):  # the disk is full, or the file may not be so large
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.place.name)
        if durable and mount.keeps:
            system.fsync(fd)

    def give_up(self, error: BaseException) -> None:
        """Publishing failed, or was interrupted: perhaps when it was done. What a signal's handler raised may be an
        OSError, too: a TimeoutError."""
        if isinstance(error, FileExistsError):
            self.close()
        else:
            self.take_back()

    def take_back(self) -> None:
        if self.is_held or not self.is_open:
            return  # or it belongs to the parent of this process
        place = self.place
        try:
            system.lock_removal(self.fd)
            if place.inode(place.name) == inode_of(system.fstat(self.fd)):
                place.remove(place.name)
            if self.private:
                place.remove(self.private)
        except OSError:
            pass  # another process removes it
        finally:
            self.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) != -1 and not self.is_held:
            self.take_back()


def _open_new(place: Place, name: str, flags: int, mode: int, private: str = "") -> Published:
    made = _new(Published)  # one call less: every acquire comes here
    made.fd = -1
    made.is_held = False
    made.place = place
    made.private = private
    if place.folder is not None:
        place.made = made
    HeldFd.__init__(made, system.open_fd(name, flags, mode, dir_fd=place.folder))
    made.st = system.fstat(made.fd)
    return made


def publish(place: Place, content: bytes, mode: int, durable: bool) -> Published:
    """Make the file. Raises FileExistsError if the name is taken."""
    try:
        made = _open_new(place, place.directory, system.O_TMPFILE, mode)
    except OSError as error:
        if error.errno not in NOT_HERE:
            raise
        return _publish_private(place, content, mode, durable)
    try:
        made.fill(content, durable)
        system.link_open_file(made.fd, place.folder, place.name)
    except BaseException as error:
        made.give_up(error)
        # No /proc to name it by, or no hard links here.
        if isinstance(error, OSError) and error.errno in NOT_HERE:
            return _publish_private(place, content, mode, durable)
        raise
    return made


def private_name(name: str) -> str:
    return _private_name(name, owner.me().pid, os.urandom(8).hex())


def displaced_name(name: str, found: Record | None) -> str | None:
    """The private name used by the takeover that published this record. None: another tool wrote the record.

    A file that the takeover displaces has this name from the exchange until it is removed or put back. Known from the
    record, it can also be put back when the process that displaced it was killed in between.
    """
    identity = found and (found.owner or found.call)
    if not found or not identity:
        return None
    try:
        digits = int(identity[:16], 16) ^ int(identity[16:] or "0", 16)
    except ValueError:
        return None
    return _private_name(name, found.pid, f"{digits & (1 << 64) - 1:016x}")


def _private_name(name: str, pid: int, digits: str) -> str:
    return f"{_stem(name)}.{pid}.{digits}.tmp"


def _stem(name: str) -> str:
    """What the names of private files begin with: that of the lock, unless it is so long that there is no room."""
    directory, slash, last = name.rpartition("/")
    text = os.fsencode(last)
    if len(text) <= _MAX_STEM_LENGTH:
        return name
    from zlib import crc32

    return f"{directory}{slash}{os.fsdecode(text[: _MAX_STEM_LENGTH - 9])}~{crc32(text):08x}"


def _make_private(place: Place, private: str, content: bytes, mode: int, durable: bool) -> Published:
    """A file that is whole, under a name that nobody looks at; for its owner's eyes only until then."""
    made = None
    try:
        made = _open_new(place, private, system.O_NEW, mode, private)
        system.fchmod(made.fd, 0o600)
        made.fill(content, durable)
        system.fchmod(made.fd, made.st.st_mode & 0o7777)  # which has what the umask left of `mode`
        return made
    except BaseException:
        if made is not None:
            made.close()
        place.remove(private)
        raise


def _publish_private(place: Place, content: bytes, mode: int, durable: bool) -> Published:
    folder = place.folder
    private = private_name(place.name)
    made = _make_private(place, private, content, mode, durable)
    try:
        system.link(private, place.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except BaseException as error:
        made.give_up(error)
        if not isinstance(error, OSError) or error.errno not in NOT_HERE:
            raise
        # Gone: somebody who could not see that we live has cleaned it away. Else there are no hard links here.
        again = _publish_private if error.errno == errno.ENOENT else _publish_in_place
        return again(place, content, mode, durable)
    finally:
        place.remove(private)
    made.private = ""
    return made


def exchange(
    place: Place, private: str, content: bytes, mode: int, durable: bool, expected: os.stat_result
) -> Published | None:
    """`publish` in place of a file that is there, in one step. None: that was not the `expected` one, and is back.

    `private` is the `displaced_name` of the record in `content`. A kill or an interrupt at any moment leaves a record
    of a dead holder in place and, under that name, the file that it displaced. `removal` looks there.
    """
    made = _make_private(place, private, content, mode, durable)
    ours, stale = inode_of(made.st), inode_of(expected)
    try:
        system.lock_removal(made.fd)  # until it is known what was displaced, none of us takes the name from us
        system.exchange(private, place.name, place.folder)
        displaced = place.inode(private)
        # None: its holder has found its file there, and released it. So the name is ours in either case.
        if displaced not in (stale, None) and not _put_back(place, private, ours, displaced):
            made.close()
            return None
        place.remove(private)
        system.unmark_removal(made.fd)
        made.private = ""
        return made
    except BaseException:
        if place.inode(private) in (ours, stale):
            made.take_back()
        made.close()
        raise


def _put_back(place: Place, private: str, ours: Inode, displaced: Inode | None) -> bool:
    """Undo an exchange: the file that got the name last keeps it. True: the displaced file was released meanwhile.

    Tools that rename over the name, or unlink it, meant the file that we displaced, and not ours. So the second
    exchange should bring back our own file. If it brings another one, that one came last: it goes back, and the one
    before it has lost.
    """
    put: Inode | None = ours
    for _ in range(_MAX_EXCHANGES):
        try:
            system.exchange(private, place.name, place.folder)
        except FileNotFoundError:
            if place.inode(private) is None:  # its holder has released it
                return put == ours and place.inode(place.name) == ours
            break
        back = place.inode(private)
        if back in (put, None):
            break
        put, displaced = displaced, back
    place.remove(private)
    return False


def _publish_in_place(place: Place, content: bytes, mode: int, durable: bool) -> Published:
    made = _open_new(place, place.name, system.O_NEW, mode)
    try:
        made.fill(content, durable)
    except BlockingIOError:
        made.close()
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place.name) from None
    except BaseException:
        # Nobody takes an empty file over before it is old, so it is still ours to remove.
        system.unlink(place.name, dir_fd=place.folder)
        made.close()
        raise
    return made


def replace(place: Place, suffix: str, content: bytes, mode: int, durable: bool) -> None:
    """Write a file beside the lock file, whole, in place of what is there."""
    name = place.name + suffix
    private = private_name(place.name)  # named like those of the lock, so that its `clean` finds what a crash leaves
    made = _make_private(place, private, content, mode, durable)
    try:
        place.rename(private, name)
    except BaseException:
        place.remove(private)
        raise
    finally:
        made.close()


def private_files(directory: str, name: str) -> list[str]:
    """The private files of this very lock, `<name>.<pid>.<16 hex>.tmp`: those of `a.b` are not those of `a`."""
    prefix = _stem(name) + "."
    return [
        entry
        for entry in system.listdir(directory)
        if entry.startswith(prefix) and entry.endswith(".tmp") and _is_private(entry[len(prefix) : -len(".tmp")])
    ]


def lock_of_private(path: str) -> str | None:
    """The lock file of which this is a private file, or None if it is none."""
    stem, _, last = path.rpartition(".")
    for _ in range(2):
        stem, _, part = stem.rpartition(".")
        last = f"{part}.{last}"
    return stem if stem and last.endswith(".tmp") and _is_private(last[: -len(".tmp")]) else None


def _is_private(middle: str) -> bool:
    pid, _, rest = middle.partition(".")
    return pid.isascii() and pid.isdigit() and len(rest) == 16 and all(c in "0123456789abcdef" for c in rest)
