"""`Semaphore`: up to `permits` holders at once. A crash frees what its process held.

One file, whose content is `permits=<n>` and a line feed. A holder has a kernel lock on one byte far past the end of it,
a slot (docs/formats.md has the positions), and a shared lock on the file as a whole: an exclusive `Lock` and flock(1)
on the same path exclude it. A process that has the whole file exclusively knows that nobody holds a permit: it may
write the number into an empty file, and remove the file.

    slot 0   slot 1   slot 2   slot 3        acquire: open, compare the number, lock a free slot, share the file,
    A        B        free     C                      compare the descriptor with the path
                                             release: if nobody else shares the file, unlink; unlock, close

The number is written once and never changed: a file with another number that nobody uses is removed and made anew; one
that is in use is an error.

Waiting is for any of the slots, which no blocking system call can do: the first in the queue sleeps on the file's
events, the others each on the waiter before them.
"""

from __future__ import annotations

import errno

from .. import system
from ..errors import Unsupported
from ..files import OwnedFd, named, try_lock, write_at
from .base import BUSY, REMOVING, REPLACED, Outcome, would_deadlock
from .path_lock import OpenFile, PathHold, PathLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from ..status import Status
    from . import base

MAX_PERMITS = system.MAX_SLOTS
_PREFIX = b"permits="
_MAX_BYTES = len(_PREFIX) + 8


class SemaphoreHold(PathHold):
    """One of the permits of a `Semaphore`, held."""

    __slots__ = ()

    lock: Semaphore

    def _free_name(self, st: os.stat_result) -> bool:
        lock, file = self.lock, self._file
        if self._came_through_queue and system.access(lock._queue, 0):
            return True
        system.mark_removal(file.fd)
        lock._remove_unused(file)  # our own slot and share are not in the way
        return False


class Semaphore(PathLock[SemaphoreHold]):
    """A lock that `permits` callers can have at the same time. All users of the path must agree on the number.

    timeout, fair, mode: as for `Lock`
    """

    __slots__ = ("permits",)

    _options = ("permits", "timeout", "fair", "mode")
    has_content = True

    def __init__(
        self,
        path: base.StrPath,
        permits: int,
        *,
        timeout: float | None = None,
        fair: bool = True,
        mode: int = 0o644,
    ) -> None:
        PathLock.__init__(self, path, "semaphore", timeout, fair, mode, SemaphoreHold)
        if not isinstance(permits, int) or not 1 <= permits <= MAX_PERMITS:
            raise ValueError(f"permits is a number from 1 to {MAX_PERMITS}, not {permits!r}")
        self.permits = permits

    def status(self) -> Status:
        from ..status import of_semaphore

        return of_semaphore(self.path, self.permits)

    def _may_pass_queue(self) -> bool:
        """A caller that wants another number of permits than others gets its error before it queues."""
        try:
            with OwnedFd(system.open_fd(self._file, system.O_READ)) as file:
                return parse(system.read(file.fd, _MAX_BYTES + 1)) not in (None, self.permits)
        except OSError:
            return False

    def _take(self, file: OpenFile) -> bool | Outcome:
        try:
            return self._take_slot(file)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # The descriptor can only be read.
            text = "users of a semaphore must be able to write its file; make it with mode=0o666"
            raise PermissionError(errno.EACCES, text, self.path) from None

    def _take_slot(self, file: OpenFile) -> bool | Outcome:
        try:
            content = system.pread(file.fd, _MAX_BYTES + 1, 0)
        except PermissionError:  # CIFS: a process that has locked all of the file keeps others from reading it
            return BUSY
        return self._take_slot_of(file, content) if content else self._take_new(file)

    def _take_slot_of(self, file: OpenFile, content: bytes) -> bool | Outcome:
        number = parse(content)
        if number is None:
            raise self._not_a_lock_file()
        if number != self.permits:
            return self._replace_number(file, number)
        # The slot first: an attempt in vain must not share the file, and so keep others from removing it.
        if not any(system.try_slot(file.fd, slot) for slot in range(self.permits)):
            return BUSY
        if try_lock(file.fd, system.SH_NB, file.set_lock):
            return True
        system.unlock_slots(file.fd)
        return BUSY

    def _take_new(self, file: OpenFile) -> bool | Outcome:
        """The file is new, or left by a crash before it was written: have all of it, write the number, take a slot."""
        taken: bool | Outcome = BUSY
        system.mark_removal(file.fd)
        try:
            if self._take_all(file):
                content = system.pread(file.fd, _MAX_BYTES + 1, 0)
                if not content:
                    content = b"%s%d\n" % (_PREFIX, self.permits)
                    self._write_all(file, content)
                if file.mount.ranged:  # on an SMB server a shared lock does not take the place of an exclusive one
                    system.lock_range(file.fd, system.UN)
                taken = self._take_slot_of(file, content)
        finally:
            if taken is not True:
                self._unlock(file)
            system.unmark_removal(file.fd)
        return taken

    def _write_all(self, file: OpenFile, content: bytes) -> None:
        try:
            write_at(file.fd, content, 0)
        except OSError:  # the disk is full: an empty or incomplete file would be in the way
            if named(self.path, file.inode) is not None:
                self._remove(file.inode)
            raise

    def _replace_number(self, file: OpenFile, number: int) -> Outcome:
        """Another number: remove the file if nobody uses it any more."""
        if file.mount.removes:
            system.mark_removal(file.fd)
            try:
                if self._take_all(file):
                    if named(self.path, file.inode) is not None:
                        self._remove(file.inode)
                    return REPLACED
                if system.removal_marked(file.fd):
                    return REMOVING
                if named(self.path, file.inode) is None:
                    return REPLACED
            finally:
                self._unlock(file)
                system.unmark_removal(file.fd)
        raise Unsupported(
            f"{self.path}: other processes use this semaphore with {number} permits, and {self.permits} were asked "
            "for. Use the same number everywhere. To change it, stop all users first"
            f"{'' if file.mount.removes else ', then delete the file'}.",
            path=self.path,
        )

    def _take_all(self, file: OpenFile) -> bool:
        return try_lock(file.fd, system.EX_NB, file.set_lock)

    def _unlock(self, file: OpenFile) -> None:
        system.unlock_slots(file.fd)
        file.set_lock(file.fd, system.UN)

    def _is_ours(self, file: OpenFile, st: os.stat_result) -> bool:
        content = system.pread(file.fd, _MAX_BYTES + 1, 0)
        return not content or parse(content) is not None

    def _refuse_deadlock(self, *, asynchronous: bool) -> bool:
        if len(self._held_by_caller(asynchronous=asynchronous)) >= self.permits:
            raise would_deadlock(self.path, asynchronous, "has all the permits")
        return False


def parse(content: bytes) -> int | None:
    """The number in a semaphore's file, or None if it is not one."""
    digits = content.removeprefix(_PREFIX)
    if len(content) > _MAX_BYTES or digits == content or not digits.endswith(b"\n") or not digits[:-1].isdigit():
        return None
    return int(digits)
