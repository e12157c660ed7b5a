"""A lock that is a file: finding it, judging it, and removing it under the rule that makes that safe.

Every removal takes the removal byte of the file that it has open, sees that the name still means this file, reads and
judges it again, and only then frees the name. "Read, judge, unlink" alone loses a lock now and then:

    A reads x: stale
                        B reads x: stale
    A unlinks x
    A creates x: holds it
                        B unlinks x, which is A's
                        B creates x: two holders

What does not look like a lock file at all is not deleted, but kept under another name.
"""

from __future__ import annotations

import errno
import os
import time
from time import sleep

from .. import record, system
from ..errors import NotALockFile, NotLocked, NotOwner, UnsafePath
from ..paths import cannot_be_swapped, follow_links, mount_at
from . import base, tokens
from .judge import POLICIES, judge
from .publish import Place, private_files
from .queue import QueuedLock
from .semaphore import MOST_PERMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .. import gate
    from ..record import Record
    from ..status import Status
    from .judge import Judgement, Policy

    HoldType = TypeVar("HoldType", bound=base.Hold)
    Result = TypeVar("Result")
else:
    HoldType = None

_PATIENCE_WITH_REMOVER = 1000
_REGULAR = 0o10  # the type in st_mode, above its 12 permission bits


class FileLock(QueuedLock[HoldType]):
    """What can be done with a lock file that is there. A subclass says how one is made."""

    __slots__ = ("_name", "_parent", "_safe_place", "durable", "stale", "stale_after")

    format = record.SEMA

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
        QueuedLock.__init__(self, path, "file", timeout, fair, mode)
        if ".." in self.path.split(os.sep):
            raise UnsafePath(
                f"{self.path}: a path with a component '..' may lead anywhere; give os.path.realpath of it",
                path=self.path,
            )
        if stale not in POLICIES:
            raise ValueError(f"stale is one of {', '.join(POLICIES)}, not {stale!r}")
        if stale_after is not None and (not isinstance(stale_after, int | float) or not stale_after >= 0):
            raise ValueError(f"stale_after is seconds, or None for never; not {stale_after!r}")
        self.durable = durable
        self.stale = stale
        self.stale_after = stale_after
        self._parent, self._name = os.path.split(self.path)
        self._safe_place: Place | None = None

    # Finding it.

    def _locate(self, file: str) -> None:
        QueuedLock._locate(self, file)
        self._parent, self._name = os.path.split(file)
        self._safe_place = None

    def _resolve(self) -> None:
        """The path is a symlink, and may have been changed since: find out what it stands for."""
        self._locate(follow_links(self.path))

    def _open_place(self) -> Place:
        """The directory, by descriptor where it could be swapped: we stay in it, whatever happens to the path."""
        try:
            if not system.HAS_FOLDERS or (not self.durable and cannot_be_swapped(self._parent)):
                self._safe_place = Place(self._parent, self._name, None)
                return self._safe_place
            flags = system.O_SYNCABLE_FOLDER if self.durable else system.O_FOLDER
            return Place(self._parent, self._name, system.open_fd(self._parent, flags))
        except FileNotFoundError:
            text = "the directory for this lock does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, self.path) from None

    def _open_existing(self, place: Place) -> int:
        """The lock file, or -1 if there is none."""
        for flags in (system.O_EXISTING, system.O_READ):
            try:
                return system.open_fd(place.name, flags, dir_fd=place.folder)
            except FileNotFoundError:
                return -1
            except PermissionError:
                continue
            except IsADirectoryError:
                raise self._not_a_lock_file() from None
            except OSError as error:
                if error.errno == errno.EROFS:
                    continue
                if error.errno == errno.ELOOP:
                    raise IsLink from None
                if error.errno == errno.ENXIO:
                    raise self._not_a_lock_file() from None  # a socket, or a device that is not there
                raise
        raise PermissionError(errno.EACCES, "the lock file may not be read", self.path)

    # Judging it.

    def _judge(self, fd: int) -> Judgement:
        if system.fstat(fd).st_mode >> 12 != _REGULAR:
            raise self._not_a_lock_file()
        judgement = judge(fd, self._file, self.format, self.stale, self.stale_after)
        if judgement.record is not None and judgement.record.token is not None:
            tokens.note(self._file, judgement.record.token)
        return judgement

    def _not_a_lock_file(self) -> NotALockFile:
        return NotALockFile(
            f"{self.path} is a directory, a device, a FIFO, or the file of a Lock or Semaphore that is held, and not "
            "that of a LockFile; it was left untouched.",
            path=self.path,
        )

    def _is_at(self, place: Place, fd: int, st: os.stat_result | None = None) -> bool:
        """Is the open file the one that has the name?"""
        st = st or system.fstat(fd)
        try:
            named = system.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if named.st_ino == st.st_ino and named.st_dev == st.st_dev:
            return True
        return self._says(place, (st.st_dev, st.st_ino), system.pread(fd, record.MOST_BYTES, 0))

    def _says(self, place: Place, inode: gate.Inode, content: bytes) -> bool:
        """Is the file with this name the one with that inode and content? For file systems without inode numbers."""
        if mount_at(inode[0], self._file).has_inodes:
            return False
        try:
            fd = system.open_fd(place.name, system.O_READ, dir_fd=place.folder)
        except FileNotFoundError:
            return False
        try:
            there = system.read(fd, record.MOST_BYTES)
        finally:
            system.close(fd)
        return there == content or self.format.same_owner(there, content)

    # Removing it.

    def _prepare_removal(self, place: Place, fd: int, wanted: Callable[[Judgement], bool]) -> Judgement | bool:
        """Whose lock is removed, if the name still means the open file and it is `wanted` gone.

        The removal byte is ours then, until the descriptor is closed. True: the name is free of it already. False: it
        is to stay, or not ours to remove.
        """
        try:
            if not take_removal_right(fd):
                return False
        except OSError as error:
            if error.errno == errno.EBADF:  # open for reading only: another user's
                return False
            raise
        if not self._is_at(place, fd):
            return True
        judgement = self._judge(fd)
        if not wanted(judgement):
            return False
        if judgement.record is None and _is_locked(fd):
            raise self._not_a_lock_file()
        return judgement

    def _remove(self, place: Place, fd: int, wanted: Callable[[Judgement], bool], *, by_owner: bool = False) -> bool:
        """Remove the open file, if the name still means it and it is `wanted` gone. True: the name is free of it."""
        found = self._prepare_removal(place, fd, wanted)
        if isinstance(found, bool):
            return found
        self._put_away(place, found, by_owner=by_owner)
        return True

    def _put_away(self, place: Place, found: Judgement, *, by_owner: bool = False) -> None:
        """Free the name. What does not look like a lock file is kept under another one."""
        saved = ""
        try:
            if found.foreign:
                saved = f"{place.name}.saved-{os.urandom(4).hex()}"
                system.rename(place.name, saved, src_dir_fd=place.folder, dst_dir_fd=place.folder)
            else:
                system.unlink(place.name, dir_fd=place.folder)
        except FileNotFoundError:
            return  # another tool, which does not wait for the removal byte, was quicker
        if not by_owner:
            self._count_break(found, saved)

    def _count_break(self, found: Judgement, saved: str = "") -> None:
        self._metrics.breaks.bump()
        self._log_removal(found, saved)

    def _log_removal(self, judgement: Judgement, saved: str) -> None:
        import logging

        log = logging.getLogger("holdfast")
        if saved:
            log.warning("%s did not look like a lock file: it is %s now", self.path, saved)
        elif judgement.alive:
            log.warning("%s: took the lock away from %s, which is alive", self.path, judgement)
        else:
            log.info("%s: removed the lock of %s", self.path, judgement)

    # By hand.

    def examine(self) -> Judgement | None:
        """What is known about the holder now; None if the lock is free."""
        return self._with_existing(lambda place, fd: self._judge(fd))

    def _with_existing(self, do: Callable[[Place, int], Result]) -> Result | None:
        """Do something with the lock file, opened; None if there is none."""
        while True:
            place = self._open_place()
            try:
                fd = self._open_existing(place)
                if fd < 0:
                    return None
                try:
                    return do(place, fd)
                finally:
                    system.close(fd)
            except IsLink:
                self._resolve()
            finally:
                leave_place(place)

    def status(self) -> Status:
        from ..status import of_lock_file

        return of_lock_file(self.path, self.examine())

    def break_(self) -> Record | None:
        """Take the lock away from whoever has it, by hand. Gives the record of the loser, None if it had none."""
        return self._remove_by_hand(lambda _: True)

    def release_as_owner(self, pid: int | None = None, *, force: bool = False, of_dead: bool = False) -> None:
        """Release a lock that was acquired in the name of `pid` (this process, if not given), by whatever process.

        Another's lock only with `force`, or, with `of_dead`, if that one has ended.
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
                raise PermissionError(errno.EACCES, "this user may not write the lock file, nor remove it", self.path)
            return judgement

        judgement = self._with_existing(remove)
        if judgement is None:
            raise NotLocked(f"{self.path}: nobody holds it.", path=self.path)
        return judgement.record

    def clean(self) -> bool:
        """Remove a stale lock, and private files that dead acquirers of this very lock left. True: there was one."""
        cleaned = self._with_existing(lambda place, fd: self._remove(place, fd, lambda found: found.stale)) or False
        return self.clean_private_files() or cleaned

    def clean_private_files(self) -> bool:
        """Only the private files that dead acquirers left. True: there was one."""
        cleaned = False
        place = self._open_place()
        try:
            for name in private_files(self._parent, self._name):
                cleaned = self._remove_private(place, name) or cleaned
        finally:
            leave_place(place)
        return cleaned

    def _remove_private(self, place: Place, name: str) -> bool:
        path = place.name[: -len(self._name)] + name
        try:
            fd = system.open_fd(path, system.O_EXISTING, dir_fd=place.folder)
        except OSError:
            return False
        try:
            pid = int(name.rsplit(".", 3)[1])
            age = time.time() - system.fstat(fd).st_mtime
            old = self.stale_after is not None and age > self.stale_after
            # Between making the file and locking its liveness byte an acquirer shows only its pid.
            if system.liveness_locked(fd) or (system.process_exists(pid) and not old):
                return False
            system.unlink(path, dir_fd=place.folder)
        except FileNotFoundError:
            return False
        finally:
            system.close(fd)
        return True


class IsLink(Exception):
    """The name is a symlink: to be resolved, then begun again."""


def _is_locked(fd: int) -> bool:
    """Does a `Lock` or a `Semaphore` use this file? Then it has no record, and is not ours to judge."""
    if system.slots_taken(fd, MOST_PERMITS) or system.range_taken(fd):
        return True
    try:
        system.lock(fd, system.EX_NB)  # we have the removal byte, so nobody takes this for a holder
        system.lock(fd, system.UN)
    except BlockingIOError:
        return True
    return False


def take_removal_right(fd: int) -> bool:
    """Others have it for microseconds. False: one of them has been stopped in the middle."""
    for _ in range(_PATIENCE_WITH_REMOVER):
        try:
            system.lock_removal(fd)
        except BlockingIOError:
            sleep(0.000_01)
        else:
            return True
    return False


def leave_place(place: Place) -> None:
    """Close the directory, once: a hold and its acquirer share the place, and an interrupt may make both leave."""
    if place.made is not None:
        place.made.take_back()
        place.made = None
    folder, place.folder = place.folder, None
    if folder is not None:
        system.close(folder)
