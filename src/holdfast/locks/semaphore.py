"""`Semaphore`: up to `permits` holders at once. A crash releases the permits of its process.

One file, whose content is `permits=<n>` and a line feed. A holder has a kernel lock on one byte far past the end of it,
a slot (docs/formats.md has the positions), and a shared lock on the file as a whole: an exclusive `Lock` and flock(1)
on the same path exclude it. While a process has locked the whole file exclusively, no permit is held. Then it may
write the number into an empty file, and remove the file.

    slot 0   slot 1   slot 2   slot 3        acquire: open, compare the number, lock a free slot, share the file,
    A        B        free     C                      compare the descriptor with the path
                                             release: if no other process shares the file, unlink; unlock, close

The number is written once and never changed. If the file has another number and is not in use, it is removed and made
again. If it is in use, the attempt raises `Unsupported`.

The first waiter waits for any of the slots, which no blocking system call can do. So it sleeps until an event of the
file. Each other waiter sleeps on the waiter in front of it.
"""

from __future__ import annotations

import errno

from .. import system
from ..errors import Unsupported
from ..files import OwnedFd, named, try_lock, write_at
from .base import BaseLock, check_mode, would_deadlock
from .engine import BUSY, REMOVING, REPLACED, Outcome
from .hold import Hold
from .path_lock import OpenFile, PathLock, not_a_lock_file, take_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from ..status import Status
    from .base import StrPath

MAX_PERMITS = system.MAX_SLOTS
_PREFIX = b"permits="
_MAX_BYTES = len(_PREFIX) + 8


class Permits(PathLock):
    """One of several slots of a file."""

    __slots__ = ("permits",)

    permits: int
    kind = "semaphore"
    shared = True
    wait_op = 0

    def __init__(self, path: StrPath, permits: int, *, fair: bool, mode: int) -> None:
        PathLock.__init__(self, path, keep=False, fair=fair, mode=mode)
        self.permits = permits

    def status(self) -> Status:
        from ..status import of_semaphore

        return of_semaphore(self.name, self.permits)

    def take(self, file: OpenFile) -> bool | Outcome:
        try:
            content = system.pread(file.fd, _MAX_BYTES + 1, 0)
        except PermissionError:  # CIFS: a process that has locked all of the file keeps others from reading it
            return BUSY
        try:
            return self._take_slot(file, content) if content else self._take_new(file)
        except OSError as error:
            if error.errno != errno.EBADF:  # the descriptor can only be read
                raise
            text = (
                "the users of a semaphore must be able to write its file. Make it with mode=0o666 and the umask 0, or "
                "run chmod a+w on it"
            )
            raise PermissionError(errno.EACCES, text, self.name) from None

    def _take_slot(self, file: OpenFile, content: bytes) -> bool | Outcome:
        number = parse(content)
        if number is None:
            raise not_a_lock_file(self.name)
        if number != self.permits:
            return self._replace_number(file, number)
        # The slot first: an attempt that fails must not share the file, and so keep another process from removing it.
        if not any(system.try_slot(file.fd, slot) for slot in range(self.permits)):
            return BUSY
        if try_lock(file.fd, system.SH_NB, file.set_lock):
            return True
        system.unlock_slots(file.fd)
        return BUSY

    def _take_new(self, file: OpenFile) -> bool | Outcome:
        """The file is new, or a crash left it empty: lock all of it, write the number, take a slot."""
        taken: bool | Outcome = BUSY
        system.mark_removal(file.fd)
        try:
            if take_all(file):
                content = system.pread(file.fd, _MAX_BYTES + 1, 0) or self._write_number(file)
                if file.mount.ranged:  # on an SMB server a shared lock does not take the place of an exclusive one
                    system.lock_range(file.fd, system.UN)
                taken = self._take_slot(file, content)
        finally:
            if taken is not True:
                _unlock(file)
            system.unmark_removal(file.fd)
        return taken

    def _write_number(self, file: OpenFile) -> bytes:
        content = b"%s%d\n" % (_PREFIX, self.permits)
        try:
            write_at(file.fd, content, 0)
        except OSError:  # the disk is full: an empty or incomplete file would be in the way
            if named(self.name, file.key) is not None:
                self.remove(file.key)
            raise
        return content

    def _replace_number(self, file: OpenFile, number: int) -> Outcome:
        """The file has another number: remove it if no process uses it any more."""
        if file.mount.removes:
            system.mark_removal(file.fd)
            try:
                if take_all(file):
                    if named(self.name, file.key) is not None:
                        self.remove(file.key)
                    return REPLACED
                if system.removal_marked(file.fd):
                    return REMOVING
                if named(self.name, file.key) is None:
                    return REPLACED
            finally:
                _unlock(file)
                system.unmark_removal(file.fd)
        raise Unsupported(
            f"{self.name}: other processes use this semaphore with {number} permits, and {self.permits} were asked "
            "for. Use the same number everywhere. To change it, stop all users first"
            f"{'' if file.mount.removes else ', then delete the file'}.",
            path=self.name,
        )

    def take_as_first(self, file: OpenFile) -> bool:
        return self.take(file) is True

    def is_ours(self, file: OpenFile, st: os.stat_result) -> bool:
        content = system.pread(file.fd, _MAX_BYTES + 1, 0)
        return not content or parse(content) is not None

    def may_pass_queue(self) -> bool:
        """A caller with another number of permits than the file gets its error before it queues."""
        try:
            with OwnedFd(system.open_fd(self.location.file, system.O_READ)) as file:
                return parse(system.read(file.fd, _MAX_BYTES + 1)) not in (None, self.permits)
        except OSError:
            return False

    def shares_already(self, *, asynchronous: bool) -> bool:
        if len(self.held_by_caller(asynchronous=asynchronous)) >= self.permits:
            raise would_deadlock(self.name, asynchronous, "has all the permits")
        return False


class Semaphore(BaseLock[Hold]):
    """A lock that `permits` callers can hold at the same time. All users of the path must use the same number.

    path: the file that carries the permits. It is created if it does not exist
    permits: the largest number of holders at once
    timeout, fair, mode: as for `Lock`

        with holdfast.Semaphore("gpu.sem", 2):
            train()

    `with` and `acquire` raise what they raise for `Lock`, and Unsupported if other processes use another number.
    """

    __slots__ = ("fair", "mode", "path", "permits")

    _options = ("permits", "timeout", "fair", "mode")

    def __init__(
        self, path: StrPath, permits: int, *, timeout: float | None = None, fair: bool = True, mode: int = 0o644
    ) -> None:
        if not isinstance(permits, int) or not 1 <= permits <= MAX_PERMITS:
            raise ValueError(f"permits is a number from 1 to {MAX_PERMITS}, not {permits!r}")
        engine = Permits(path, permits, fair=fair, mode=check_mode(mode))
        BaseLock.__init__(self, engine, timeout)
        self.path = engine.name
        self.permits = permits
        self.fair = engine.fair
        self.mode = mode


def _unlock(file: OpenFile) -> None:
    system.unlock_slots(file.fd)
    file.set_lock(file.fd, system.UN)


def parse(content: bytes) -> int | None:
    """Return the number in a semaphore's file, or None if it is not one."""
    digits = content.removeprefix(_PREFIX)
    if len(content) > _MAX_BYTES or digits == content or not digits.endswith(b"\n") or not digits[:-1].isdigit():
        return None
    return int(digits)
