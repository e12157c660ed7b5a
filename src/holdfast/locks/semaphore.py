"""`Semaphore`: up to `permits` holders at once. A crash frees what its process held.

One file, whose content is `permits=<n>` and a line feed. A holder has a kernel lock on one byte far past the end of it,
a slot (docs/formats.md has the positions). Whoever can lock all the slots knows that nobody holds any: that is the
right to write the number into an empty file, and to remove the file.

    slot 0   slot 1   slot 2   slot 3        acquire: open, compare the number, lock a free slot,
    A        B        free     C                      compare the descriptor with the path
                                             release: if nobody else has a slot, unlink; unlock, close

The number is written once and never changed: a file with another number that nobody uses is removed and made anew; one
that somebody uses is an error.

Waiting is for any of the slots, which no blocking system call can do: the first in the queue sleeps on the file's
events, the others each on the waiter before them.
"""

from __future__ import annotations

import errno
from time import sleep

from .. import gate, system
from ..errors import Unsupported
from ..paths import mount_of
from . import base
from .inode import InodeHold, InodeLock, would_deadlock
from .queue import remove_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from ..paths import Mount
    from ..status import Status

_FORMAT, _REGULAR = 0o170000, 0o100000
MOST_PERMITS = 1 << 20
_PREFIX = b"permits="
_LONGEST = len(_PREFIX) + 8
_PATIENCE_WITH_CREATOR = 1000


class SemaphoreHold(InodeHold):
    """One of the permits of a `Semaphore`, held."""

    __slots__ = ()

    lock: Semaphore

    def _begin(  # type: ignore[override]
        self, lock: Semaphore, fd: int, inode: gate.Inode, mount: Mount, queued: bool
    ) -> None:
        self._mount = mount
        self._came_through_queue = queued
        self._called_at = 0.0
        lock._metrics.acquisitions.bump()
        base.Hold._begin(self, lock, fd, inode, True)

    def _release(self, entry: gate.Entry) -> bool:
        lock = self.lock
        fd, inode, _, _, _ = entry
        named = left_for_next = False
        try:
            named = lock._names(inode)
            if named and self._mount.removes:
                system.mark_removal(fd)
                system.unlock_slots(fd, MOST_PERMITS)
                if self._came_through_queue and system.access(lock._queue, 0):
                    left_for_next = True
                else:
                    lock._remove_unused(fd, inode, True)
        except BlockingIOError:  # another program has locked it from end to end
            lock._metrics.cleanups_skipped.bump()
        finally:
            try:
                system.unlock_slots(fd, MOST_PERMITS)
            finally:
                self._is_closed = True
                system.close(fd)
        # Others may have left the file on account of a queue that is gone now.
        if (self._called_at and remove_queue(lock._queue)) or (left_for_next and not system.access(lock._queue, 0)):
            lock._sweep()
        return named


class Semaphore(InodeLock[SemaphoreHold]):
    """A lock that `permits` callers can have at the same time. All who use the path must agree on the number.

    timeout, fair, mode: as for `Lock`
    """

    __slots__ = ("permits",)

    _options = ("permits", "timeout", "fair", "mode")
    _hold_type = SemaphoreHold

    def __init__(
        self,
        path: base.StrPath,
        permits: int,
        *,
        timeout: float | None = None,
        fair: bool = True,
        mode: int = 0o644,
    ) -> None:
        InodeLock.__init__(self, path, "semaphore", timeout, fair, mode)
        if not isinstance(permits, int) or not 1 <= permits <= MOST_PERMITS:
            raise ValueError(f"permits is a number from 1 to {MOST_PERMITS}, not {permits!r}")
        self.permits = permits

    def status(self) -> Status:
        from ..status import of_semaphore

        return of_semaphore(self.path, self.permits)

    def _try(self) -> SemaphoreHold | None:
        if self._unchecked:
            self._check_mount()
        if not self.fair or not system.access(self._queue, 0):
            return self._attempt()
        # Whoever wants another number of permits than others is told so before it queues.
        return self._attempt() if parse(self._read_again()) not in (None, self.permits) else None

    def _attempt(self, queued: bool = False) -> SemaphoreHold | None:
        retries = 0
        while True:
            fd, hold = -1, None
            try:
                fd = self._open()
                st = system.fstat(fd)
                inode = (st.st_dev, st.st_ino)
                mount = mount_of(st.st_dev, self._file)
                if not self._check_file(fd, st):
                    pass
                elif self._take(fd, True):
                    if self._names(inode):
                        hold = SemaphoreHold()
                        hold._begin(self, fd, inode, mount, queued)
                        return hold
                elif not mount.removes or (not self._is_being_removed(fd, inode) and not self._take(fd, True)):
                    return None
            except BlockingIOError:
                return None  # another program keeps us from opening, reading or marking it
            except BaseException as error:
                if hold is None or not hold._has_begun:
                    gate.book.forget(fd)
                if isinstance(error, OSError) and error.errno == errno.EBADF:  # it can only be read
                    text = "who uses a semaphore must be able to write its file; make it with mode=0o666"
                    raise PermissionError(errno.EACCES, text, self.path) from None
                raise
            finally:
                if fd >= 0 and (hold is None or not hold._has_begun):
                    system.close(fd)
            retries += 1
            self._file_was_replaced(retries)

    def _check_file(self, fd: int, st: os.stat_result) -> bool:
        """See that the file says our number, writing it if it says none."""
        if st.st_mode & _FORMAT != _REGULAR:
            raise self._not_a_lock_file()
        number = parse(system.read(fd, _LONGEST + 1) or self._number_of_new(fd))
        if number is None:
            raise self._not_a_lock_file()
        return number == self.permits or self._replace_number(fd, st, number)

    def _number_of_new(self, fd: int) -> bytes:
        """The file is new, or left by a crash before it was written: whoever has all slots writes, the others wait."""
        content = b"%s%d\n" % (_PREFIX, self.permits)
        system.mark_removal(fd)
        try:
            for _ in range(_PATIENCE_WITH_CREATOR):
                if system.try_all_slots(fd, MOST_PERMITS):
                    there = system.read(fd, _LONGEST + 1)
                    if not there:
                        system.write(fd, content)
                    system.unlock_slots(fd, MOST_PERMITS)
                    return there or content
                there = self._read_again()
                if there:
                    return there
                sleep(0.000_1)
        finally:
            system.unmark_removal(fd)
        return b""

    def _read_again(self) -> bytes:
        """What the file says now: perhaps its creator wrote it after we read it, and has a slot for long.

        By a new descriptor, because NFS asks the server only when a file is opened.
        """
        try:
            fd = system.open_fd(self._file, system.O_READ)
        except OSError:
            return b""
        try:
            return system.read(fd, _LONGEST + 1)
        finally:
            system.close(fd)

    def _replace_number(self, fd: int, st: os.stat_result, number: int) -> bool:
        """Another number: remove the file if nobody uses it any more. False: it is gone, or going."""
        removes = mount_of(st.st_dev, self._file).removes
        if removes:
            system.mark_removal(fd)
            if system.try_all_slots(fd, MOST_PERMITS):
                if self._names((st.st_dev, st.st_ino)):
                    self._remove((st.st_dev, st.st_ino))
                return False
            if self._is_being_removed(fd, (st.st_dev, st.st_ino)):
                return False
        raise Unsupported(
            f"{self.path}: this semaphore has {number} permits for those who use it now, and {self.permits} were "
            "asked for. All its users must give the same number; change it in all of them while none of them runs"
            f"{'' if removes else ', and remove the file then'}.",
            path=self.path,
        )

    def _take(self, fd: int, ranged: bool) -> bool:
        return any(system.try_slot(fd, slot) for slot in range(self.permits))

    def _take_all(self, fd: int, ranged: bool) -> bool:
        return system.try_all_slots(fd, MOST_PERMITS)

    def _begin(self, hold: SemaphoreHold, fd: int, st: os.stat_result, mount: Mount) -> None:
        hold._begin(self, fd, (st.st_dev, st.st_ino), mount, True)

    def _refuse_deadlock(self, *, asynchronous: bool) -> list[gate.Entry]:
        if len(self._held_by_caller(asynchronous=asynchronous)) >= self.permits:
            raise would_deadlock(self.path, asynchronous, "has all the permits")
        return []


def parse(content: bytes) -> int | None:
    """The number in a semaphore's file, or None if it is not one."""
    digits = content.removeprefix(_PREFIX)
    if len(content) > _LONGEST or digits == content or not digits.endswith(b"\n") or not digits[:-1].isdigit():
        return None
    return int(digits)
