"""A lock that is a file: finding it, judging it, and removing it under the rule that makes that safe.

Every removal takes the removal byte of the file that it has open, sees that the name still means this file, reads and
judges it again, and only then frees the name. "Read, judge, unlink" alone loses a lock now and then:

    A reads x: stale
                        B reads x: stale
    A unlinks x
    A creates x: holds it
                        B unlinks x, which is A's
                        B creates x: two holders

Every removal also takes the kernel lock of the file, which `Lock`, `Semaphore` and flock(1) have on a file that they
use. Only a living holder of a lock file has that lock, too. A file that another kind uses is held, whatever its age.
"""

from __future__ import annotations

import errno
import os
import time
from time import sleep

from .. import system
from ..errors import HoldfastError, NotALockFile, NotLocked, NotOwner
from ..files import OwnedFd, inode_of
from ..paths import cannot_be_swapped, check_no_parent_component, follow_links, mount_at
from . import base, record, tokens
from .publish import Place, displaced_name, private_files
from .queue import Location, QueuedLock
from .staleness import POLICIES, Judgement, judge, not_a_lock_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .. import process
    from ..status import Status
    from .record import Record
    from .staleness import Policy

    HoldType = TypeVar("HoldType", bound=base.Hold)
    Result = TypeVar("Result")
else:
    HoldType = None

_MAX_REMOVAL_TRIES = 1000
_MAX_LOOKS = 10


class FileLocation(Location):
    """The file of a lock file, and its directory."""

    __slots__ = ("keeps", "name", "parent", "safe_place")

    def __init__(self, file: str) -> None:
        Location.__init__(self, file)
        self.parent, self.name = os.path.split(file)
        self.keeps = True  # does the file system survive a power failure?
        self.safe_place: Place | None = None  # for all attempts, where no descriptor is needed


class FileLock(QueuedLock[HoldType]):
    """What can be done with a lock file that is there. A subclass says how one is made."""

    __slots__ = ("durable", "stale", "stale_after")

    format = record.SEMA
    _location: FileLocation
    _location_type = FileLocation

    def __init__(
        self,
        path: base.StrPath,
        timeout: float | None,
        fair: bool,
        mode: int,
        durable: bool,
        stale: Policy,
        stale_after: float | None,
    ) -> None:
        check_no_parent_component(path)
        QueuedLock.__init__(self, path, "file", timeout, fair, mode)
        if stale not in POLICIES:
            raise ValueError(f"stale is one of {', '.join(POLICIES)}, not {stale!r}")
        if stale_after is not None and (not isinstance(stale_after, int | float) or not stale_after >= 0):
            raise ValueError(f"stale_after is seconds, or None for never; not {stale_after!r}")
        self.durable = durable
        self.stale = stale
        self.stale_after = stale_after

    # Finding it.

    def _resolve(self) -> None:
        """The path is a symlink, or was one when it was last looked at: find out what it stands for now."""
        file = follow_links(self.path)
        self._locate(self.path if file == self.path else file)

    def _open_place(self) -> Place:
        """The directory, by descriptor where it could be swapped: we stay in it, whatever happens to the path."""
        location = self._location
        if location.safe_place is not None:
            return location.safe_place
        parent, name = location.parent, location.name
        try:
            if self.durable:
                location.keeps = mount_at(system.stat(parent).st_dev, parent).keeps
            needs_descriptor = self.durable and location.keeps and system.HAS_FOLDERS  # to sync it
            if not needs_descriptor and (not system.HAS_FOLDERS or cannot_be_swapped(parent)):
                location.safe_place = Place(parent, name, None)
                return location.safe_place
            follow_links(parent)  # raises UnsafePath
            flags = system.O_SYNCABLE_FOLDER if self.durable else system.O_FOLDER
            return Place(parent, name, OwnedFd(system.open_fd(parent, flags)))
        except FileNotFoundError:
            text = "the directory for this lock does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, self.path) from None

    def _open_existing(self, place: Place) -> OwnedFd | None:
        """The lock file, or None if there is none."""
        for flags in (system.O_EXISTING, system.O_READ):
            try:
                return OwnedFd(system.open_fd(place.name, flags, dir_fd=place.folder))
            except FileNotFoundError:
                return None
            except BlockingIOError:
                raise Unreadable from None
            except PermissionError:
                continue
            except IsADirectoryError:
                raise not_a_lock_file(self.path, "a directory") from None
            except OSError as error:
                if error.errno == errno.EROFS:
                    continue
                if error.errno == errno.ELOOP:
                    raise IsLink from None
                if error.errno == errno.ENXIO:
                    raise not_a_lock_file(self.path, "a socket, or a device that does not exist") from None
                raise
        raise Unreadable

    # Judging it.

    def _judge(self, fd: int) -> Judgement:
        try:
            judgement = judge(fd, self.path, self.format, self.stale, self.stale_after)
        except FileNotFoundError:
            raise Removed from None
        if judgement.record is not None and judgement.record.token is not None:
            tokens.note(self._file, judgement.record.token)
        return judgement

    def _is_at(self, place: Place, fd: int, st: os.stat_result | None = None) -> bool:
        """Is the open file the one that has the name?"""
        try:
            inode = inode_of(st or system.fstat(fd))
        except FileNotFoundError:  # sshfs has no attributes of an open file that was removed
            return False
        if place.inode(place.name) == inode:
            return True
        # Most file systems need no read, which allocates 64 KiB.
        return not self._has_inodes(inode) and self._says(place, system.pread(fd, record.MAX_BYTES, 0))

    def _has_inodes(self, inode: process.Inode) -> bool:
        """Are the inode numbers stable on the file system of this file?"""
        return mount_at(inode[0], self.path).has_inodes

    def _says(self, place: Place, content: bytes) -> bool:
        """Has the file with this name the same content, or owner? For file systems without stable inode numbers."""
        there = _read(place)
        return there is not None and (there == content or self.format.same_owner(there, content))

    def _name_now(self, place: Place, inode: process.Inode, content: bytes) -> str | None:
        """The name that the file of a hold has now: its own, or a private one until a takeover has put it back."""
        for _ in range(_MAX_LOOKS):
            top = place.inode(place.name)
            if top == inode:
                return place.name
            private = self._displaced_name(place)
            if private is not None and place.inode(private) == inode:
                return private
            if place.inode(place.name) == top:
                break
        return place.name if not self._has_inodes(inode) and self._says(place, content) else None

    def _displaced_name(self, place: Place) -> str | None:
        """The private name of the file that the one with our name displaced, if it did."""
        content = _read(place)
        try:
            return None if content is None else displaced_name(place.name, self.format.parse(content))
        except HoldfastError:
            return None

    # Removing it.

    def _prepare_removal(self, place: Place, fd: int, wanted: Callable[[Judgement], bool]) -> Judgement | bool:
        """Whose lock is removed, if the name still means the open file and it is `wanted` gone.

        The removal byte is ours then, until the descriptor is closed. True: the name is free of it already. False: it
        is to stay, or another process uses it.
        """
        if not take_removal_right(fd):
            return False
        if not self._is_at(place, fd):
            return True
        judgement = self._judge(fd)
        if not wanted(judgement) or not self._take_kernel_lock(fd, judgement):
            return False
        return self._put_back_displaced(place, fd, judgement) or judgement

    def _take_kernel_lock(self, fd: int, found: Judgement) -> bool:
        """Keep `Lock`, `Semaphore` and flock(1) away until the descriptor is closed. False: one of them has it."""
        mount = mount_at(system.fstat(fd).st_dev, self.path)
        if found.record is not None and not mount.lets_read:
            return True
        try:
            (system.lock_range if mount.ranged else system.lock)(fd, system.EX_NB)
        except BlockingIOError:
            return system.liveness_locked(fd)  # then it is the holder of the lock file that has it
        except OSError as error:
            return error.errno != errno.EBADF  # EBADF: open for reading only, another user's. Else: no such locks here
        return not system.slots_taken(fd)

    def _put_back_displaced(self, place: Place, fd: int, found: Judgement) -> bool:
        """Finish a takeover that was killed: put back what it displaced, unless that is stale. True: it is back."""
        private = displaced_name(place.name, found.record)
        if private is None:
            return False
        try:
            entry = system.stat(private, dir_fd=place.folder, follow_symlinks=False)
            if not place.trusts(entry):
                return False
            if inode_of(entry) == inode_of(system.fstat(fd)) or self._is_stale(place, private):
                place.remove(private)
                return False
            place.rename(private, place.name)
        except (FileNotFoundError, NotADirectoryError):
            return False  # it displaced nothing, or the holder has released it
        return True

    def _is_stale(self, place: Place, name: str) -> bool:
        with OwnedFd(system.open_fd(name, system.O_READ, dir_fd=place.folder)) as file:
            try:
                return self._judge(file.fd).stale
            except NotALockFile:
                return False

    def _remove(self, place: Place, fd: int, wanted: Callable[[Judgement], bool], *, by_owner: bool = False) -> bool:
        """Remove the open file, if the name still means it and it is `wanted` gone. True: the name is free of it."""
        found = self._prepare_removal(place, fd, wanted)
        if isinstance(found, bool):
            return found
        # Another tool, which does not wait for the removal byte, may be quicker.
        if place.remove(place.name) and not by_owner:
            self._count_break(found)
        return True

    def _count_break(self, found: Judgement) -> None:
        import logging

        self._metrics.breaks.bump()
        log = logging.getLogger("holdfast")
        if found.alive:
            log.warning("%s: took the lock away from %s, which is alive", self.path, found)
        else:
            log.info("%s: removed the lock of %s", self.path, found)

    # By hand.

    def examine(self) -> Judgement | None:
        """What is known about the holder now; None if the lock is free."""
        try:
            return self._with_existing(lambda place, fd: self._judge(fd))
        except Unreadable:
            return Judgement(None, 0.0, None, stale=False, stale_in=None)

    def _with_existing(self, do: Callable[[Place, int], Result]) -> Result | None:
        """Do something with the lock file, opened; None if there is none."""
        for _ in range(_MAX_LOOKS):
            place = self._open_place()
            try:
                file = self._open_existing(place)
                if file is None:
                    return None
                with file:
                    return do(place, file.fd)
            except IsLink:
                self._resolve()
            finally:
                place.leave()
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)

    def status(self) -> Status:
        from ..status import of_lock_file

        return of_lock_file(self.path, self.examine(), self.format.kind)

    def break_(self) -> Record | None:
        """Remove the lock file, whoever holds the lock. Returns the holder's record; None: it was empty or damaged."""
        return self._remove_by_hand(lambda _: True)

    def release_as_owner(self, pid: int | None = None, *, force: bool = False, of_dead: bool = False) -> None:
        """Release a lock that was acquired for `pid` (default: this process).

        `force=True` releases any holder's lock; `of_dead=True` also that of a dead holder.
        """
        pid = os.getpid() if pid is None else pid

        def is_ours(found: Judgement) -> bool:
            if force or (found.record is not None and (found.record.pid == pid or (of_dead and found.is_dead))):
                return True
            raise NotOwner(
                f"{self.path}: held by {found}, not by pid {pid}. Use force to release it all the same.",
                path=self.path,
            )

        self._remove_by_hand(is_ours, by_owner=not force)

    def _remove_by_hand(self, wanted: Callable[[Judgement], bool], *, by_owner: bool = False) -> Record | None:
        def remove(place: Place, fd: int) -> Judgement:
            judgement = self._judge(fd)
            if not self._remove(place, fd, wanted, by_owner=by_owner):
                raise NotALockFile(
                    f"{self.path} was not removed: it is in use by a Lock, a Semaphore or flock(1), or another process "
                    "is removing it. Try again later.",
                    path=self.path,
                )
            return judgement

        try:
            judgement = self._with_existing(remove)
        except Unreadable:
            raise PermissionError(
                errno.EACCES, "the lock file may not be read, so it is not removed", self.path
            ) from None
        if judgement is None:
            raise NotLocked(f"{self.path}: nobody holds it.", path=self.path)
        return judgement.record

    def clean(self) -> bool:
        """Remove a stale lock, and private files that dead acquirers of this very lock left. True: there was one."""
        try:
            cleaned = self._with_existing(lambda place, fd: self._remove(place, fd, lambda found: found.stale)) or False
        except (PermissionError, Unreadable):
            cleaned = False  # another user's
        return self.clean_private_files() or cleaned

    def clean_private_files(self) -> bool:
        """Only the private files that dead acquirers left. True: there was one."""
        cleaned = False
        place = self._open_place()
        try:
            location = self._location
            for name in private_files(location.parent, location.name):
                cleaned = self._remove_private(place, place.sibling(name)) or cleaned
        finally:
            place.leave()
        return cleaned

    def _remove_private(self, place: Place, name: str) -> bool:
        try:
            file = OwnedFd(system.open_fd(name, system.O_EXISTING, dir_fd=place.folder))
        except OSError:
            return False
        with file:
            needed = self._may_be_needed(file.fd, int(name.rsplit(".", 3)[1]))
            return not needed and not system.liveness_locked(file.fd) and place.remove(name)

    def _may_be_needed(self, fd: int, pid: int) -> bool:
        """Does a living process use this private file, or was it displaced by a takeover that was killed?

        A lock that was displaced may go when it is old. A user's file may not. A number is the next fence file.
        """
        content = system.pread(fd, record.MAX_BYTES, 0)
        try:
            found = self.format.parse(content) if content and not content.strip().isdigit() else None
        except HoldfastError:
            return True
        age = time.time() - system.fstat(fd).st_mtime
        if self.stale_after is not None and age > self.stale_after:
            return False
        # Between making the file and locking its liveness byte an acquirer shows only its pid.
        return system.process_exists(pid) or (found is not None and found.pid != pid)


class IsLink(Exception):
    """The name is a symlink: to be resolved, then begun again."""


class Removed(IsLink):
    """The open file was deleted (sshfs cannot stat it any more). The caller starts again, as for a link."""


class Unreadable(Exception):
    """This user may not read the file, or another program keeps it to itself (Windows). So it counts as held."""


def _read(place: Place) -> bytes | None:
    """The content of the file with the lock's name; None if there is none, or if it may not be read."""
    try:
        with OwnedFd(system.open_fd(place.name, system.O_READ, dir_fd=place.folder)) as file:
            return system.read(file.fd, record.MAX_BYTES)
    except OSError:  # also a directory or a FIFO
        return None


def take_removal_right(fd: int, tries: int = _MAX_REMOVAL_TRIES) -> bool:
    """Take the removal byte, which others have for microseconds. False: another process keeps it.

    A descriptor that can only read, of another user's file, gets it shared: no holder and no other remover has it then.
    """
    take = system.lock_removal
    for _ in range(tries):
        try:
            take(fd)
        except BlockingIOError:
            sleep(0.000_01)
        except OSError as error:
            if error.errno != errno.EBADF or take is system.mark_removal:
                raise
            take = system.mark_removal
        else:
            return True
    return False
