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
from ..files import OwnedFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    Inode = tuple[int, int]

_LONGEST_STEM = 200  # bytes of 255; a pid, 16 digits and .tmp come after it
NOT_HERE = frozenset(
    {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.ENOENT}
)


class Place:
    """Where a file is to be: a name in a directory, which is open, or of which we know that nobody can swap it."""

    __slots__ = ("_owner", "directory", "folder", "made", "name")

    def __init__(self, directory: str, name: str, folder: OwnedFd | None) -> None:
        self._owner = folder
        self.folder = None if folder is None else folder.fd
        self.made: Published | None = None  # what can only be taken back while `folder` is open
        self.directory = directory if folder is None else "."
        self.name = name if folder is not None else f"{directory}/{name}"

    def leave(self) -> None:
        """Close the directory. What was published and is not held yet is taken back."""
        if self.made is not None:
            self.made.take_back()
            self.made = None
        if self._owner is not None:
            self._owner.close()


class Published:
    """A file that was made, with its liveness byte locked, and not yet anybody's hold.

    Dropped, as by an interrupt, it is taken back.
    """

    __slots__ = ("file", "place", "private", "st")

    st: os.stat_result

    def __init__(self, place: Place) -> None:
        self.place = place
        self.private = ""  # the name that it has until it is published
        self.file: OwnedFd | None = None
        if place.folder is not None:
            place.made = self

    def open(self, name: str, flags: int, mode: int) -> None:
        self.file = OwnedFd(system.open_fd(name, flags, mode, dir_fd=self.place.folder))

    @property
    def open_file(self) -> OwnedFd:
        assert self.file is not None
        return self.file

    @property
    def fd(self) -> int:
        return self.open_file.fd

    def hand_over(self) -> None:
        """The file belongs to a hold from now on."""
        self.file = None
        self.place.made = None

    def fill(self, content: bytes, durable: bool) -> None:
        system.lock_liveness(self.fd)
        if system.write(self.fd, content) < len(content):  # the disk is full, or the file may not be so large
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.place.name)
        if durable:
            system.fsync(self.fd)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def give_up(self, error: BaseException) -> None:
        """Publishing failed, or was interrupted: perhaps when it was done. What a signal's handler raised may be an
        OSError, too: a TimeoutError."""
        if isinstance(error, FileExistsError):
            self.close()
        else:
            self.take_back()

    def take_back(self) -> None:
        if self.file is None or not self.file.is_open:
            return
        place = self.place
        try:
            system.lock_removal(self.fd)
            if _inode_of(place, place.name) == _inode(system.fstat(self.fd)):
                system.unlink(place.name, dir_fd=place.folder)
            if self.private:
                _forget(place, self.private)
        except OSError:
            pass  # somebody else removes it
        finally:
            self.close()

    def __del__(self) -> None:
        if getattr(self, "file", None) is not None:
            self.take_back()


def publish(place: Place, content: bytes, mode: int, durable: bool) -> Published:
    """Make the file. Raises FileExistsError if the name is taken."""
    made = Published(place)
    try:
        made.open(place.directory, system.O_TMPFILE, mode)
    except OSError as error:
        if error.errno not in NOT_HERE:
            raise
        return _publish_private(place, content, mode, durable)
    try:
        made.fill(content, durable)
        made.st = system.fstat(made.fd)
        system.link_open_file(made.fd, place.folder, place.name)
    except BaseException as error:
        made.give_up(error)
        # No /proc to name it by, or no hard links here.
        if isinstance(error, OSError) and error.errno in NOT_HERE and not isinstance(error, FileExistsError):
            return _publish_private(place, content, mode, durable)
        raise
    return made


def private_name(name: str) -> str:
    return f"{_stem(name)}.{os.getpid()}.{os.urandom(8).hex()}.tmp"


def _stem(name: str) -> str:
    """What the names of private files begin with: that of the lock, unless it is so long that there is no room."""
    directory, slash, last = name.rpartition("/")
    text = os.fsencode(last)
    if len(text) <= _LONGEST_STEM:
        return name
    from zlib import crc32

    return f"{directory}{slash}{os.fsdecode(text[: _LONGEST_STEM - 9])}~{crc32(text):08x}"


def _make_private(place: Place, private: str, content: bytes, mode: int, durable: bool) -> Published:
    """A file that is whole, under a name that nobody looks at; for its owner's eyes only until then."""
    made = Published(place)
    try:
        made.private = private
        made.open(private, system.O_NEW, mode)
        made.st = system.fstat(made.fd)  # what the umask left of the mode is in it
        system.fchmod(made.fd, 0o600)
        made.fill(content, durable)
        system.fchmod(made.fd, made.st.st_mode & 0o7777)
        return made
    except BaseException:
        made.close()
        _forget(place, private)
        raise


def _forget(place: Place, private: str) -> None:
    try:
        system.unlink(private, dir_fd=place.folder)
    except FileNotFoundError:
        pass


def _publish_private(place: Place, content: bytes, mode: int, durable: bool) -> Published:
    folder = place.folder
    private = private_name(place.name)
    made = _make_private(place, private, content, mode, durable)
    try:
        system.link(private, place.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except BaseException as error:
        made.give_up(error)
        if isinstance(error, FileExistsError) or not isinstance(error, OSError) or error.errno not in NOT_HERE:
            raise
        # Gone: somebody who could not see that we live has cleaned it away. Else there are no hard links here.
        again = _publish_private if error.errno == errno.ENOENT else _publish_in_place
        return again(place, content, mode, durable)
    finally:
        _forget(place, private)
    made.private = ""
    return made


def exchange(place: Place, content: bytes, mode: int, durable: bool, expected: os.stat_result) -> Published | None:
    """`publish` in place of a file that is there, in one step. None: that was not the `expected` one, and is back."""
    private = private_name(place.name)
    made = _make_private(place, private, content, mode, durable)
    ours, stale = _inode(made.st), _inode(expected)
    try:
        system.exchange(private, place.name, place.folder)
        found = _inode_of(place, private)
        if found == stale:
            made.private = ""
            return made
        _put_back(place, private, ours, found)
    except BaseException:
        made.close()
        raise
    finally:
        # After an interrupt it may be somebody's lock. That is not ours to remove; `clean` finds it when it is old.
        if _inode_of(place, private) in (ours, stale):
            _forget(place, private)
    made.close()
    return None


def _put_back(place: Place, private: str, ours: Inode | None, found: Inode | None) -> None:
    """Undo an exchange, as if it had never been: whoever had the name last has it in the end.

    Tools that rename over the name, or unlink it, meant what we have taken away, and not ours. So what comes back
    should be what we put there. If it is another file, that one came last: it goes back, and the one before has lost.
    """
    put = ours
    try:
        while True:
            system.exchange(private, place.name, place.folder)
            back = _inode_of(place, private)
            if back == put:
                break
            put, found = found, back
    except FileNotFoundError:
        _forget(place, private)
        raise
    _forget(place, private)


def _inode_of(place: Place, name: str) -> Inode | None:
    try:
        return _inode(system.stat(name, dir_fd=place.folder, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _inode(st: os.stat_result) -> Inode:
    return st.st_dev, st.st_ino


def _publish_in_place(place: Place, content: bytes, mode: int, durable: bool) -> Published:
    made = Published(place)
    made.open(place.name, system.O_NEW, mode)
    try:
        made.st = system.fstat(made.fd)
        made.fill(content, durable)
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
    folder = place.folder
    made = _make_private(place, private, content, mode, durable)
    try:
        system.rename(private, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _forget(place, private)
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
