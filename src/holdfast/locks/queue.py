"""Fairness: a queue in front of a lock, in order of arrival, over all processes and threads.

The queue of `x` is the directory `x.queue`. Each waiter has a ticket in it, a FIFO whose name is a number, one more
than the highest when the waiter came. The waiter keeps the FIFO open for writing and holds a kernel lock on it. The
next waiter opens that FIFO for reading: the kernel reports its end when the waiter in front closes it, and also when it
dies. So each waiter sleeps on exactly one other, no matter how many there are, and nothing polls.

    x.queue/000000000007   the first: waits for the lock itself
    x.queue/000000000008   waits for 7
    x.queue/000000000009   waits for 8. If 8 gives up or is killed: waits for 7

Leaving: write a byte to the FIFO, unlink the ticket, close. The byte tells whether the waiter was the first. If so, the
next waiter is the first now, and does not list the directory. The byte also wakes the next waiter while the FIFO is
open: a new holder closes its own when it releases the lock, and a child may have inherited a copy of the descriptor.

A waiter that gives up removes the directory if it is empty, and so does a holder that came through the queue, when it
releases. A waiter that was about to put a ticket into it makes it again.

A ticket whose kernel lock is free belongs to a dead waiter. Any waiter may remove it: lock the ticket, check that the
name still means this file, unlink it.

The queue only orders waiters; the lock itself excludes them. So a fault in the queue costs at worst the order. Where a
waiter cannot have a ticket (the directory is not writable, the disk is full, the file system has no FIFOs), it waits
without one. An entry that is not a FIFO is ignored. In a directory that others can write to, entries of another user
are ignored, too (rule 11).

A first waiter that is stopped (SIGSTOP) does not take a free lock. So every waiter checks the lock itself from time to
time (`RECHECK_S`). If two checks in a row find it free behind the same first waiter, the waiter passes it.
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic

from .. import system
from ..files import OwnedFd, inode_of, named, try_lock
from ..paths import is_trusted
from ..wait import RECHECK_S, Pause, Readable, check_deadline, sooner
from .engine import Outcome, attempt_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wait import Steps
    from .local import LocalEngine, LocalGrant

_MAX_TRIES = 1000  # for a ticket
_TICKETS_BETWEEN_TASKS = 20  # of waiters that have gone; about 1 ms
_MAX_TICKET = "999999999000"  # higher numbers are not tickets of ours, and would leave no room
_PAUSE_S = 0.001

# The byte that a leaving waiter writes for the next waiter.
_WAS_FIRST, _GAVE_UP = b"1", b"0"

# The directory is not writable, full, or on a file system without FIFOs: wait without a ticket.
_NO_QUEUE_HERE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP}
_NO_QUEUE_HERE |= {errno.EMFILE, errno.ENOTDIR, errno.ENAMETOOLONG}


class Queue:
    """One waiter's view of the queue at `path`, and its ticket."""

    __slots__ = ("_before", "_is_first", "_mode", "_name", "_ticket", "_trusts_all", "path")

    def __init__(self, path: str, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._ticket: OwnedFd | None = None
        self._name = ""
        self._before: list[str] = []
        self._is_first = False

    def _names(self) -> list[str]:
        """The names of tickets, in no order. Nothing else in the directory counts."""
        try:
            return [name for name in system.listdir(self.path) if len(name) == 12 and name.isdecimal()]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES):
                return []
            raise

    def is_usable(self) -> bool:
        """Is it a directory that a trusted user made? A queue that does not exist is usable, too."""
        try:
            here = system.stat(self.path, follow_symlinks=False)
            above = system.stat(os.path.dirname(self.path))
        except FileNotFoundError:
            self._trusts_all = not self._mode & 0o022  # as `_make_directory` will make it
            return True
        except OSError:
            return False
        self._trusts_all = not here.st_mode & 0o022
        return stat.S_ISDIR(here.st_mode) and is_trusted(here, above)

    def is_alive(self) -> bool:
        """Is there a waiter that is alive? Removes the tickets of dead ones."""
        if not self.is_usable():
            return False
        for name in self._names():
            ticket = self._open(name)
            if ticket is not None:
                with ticket:
                    if not self._remove_if_dead(name, ticket) and _news(ticket) is None:
                        return True
        remove_queue(self.path)
        return False

    def join(self) -> bool:
        """Take a ticket. False: there can be no queue here."""
        try:
            return self.is_usable() and any(self._take_ticket() for _ in range(_MAX_TRIES))
        except OSError as error:
            if error.errno not in _NO_QUEUE_HERE:
                raise
            return False

    def _take_ticket(self) -> bool:
        names = self._names()
        self._before = [name for name in names if name < _MAX_TICKET]
        if not names:
            self._make_directory()
        self._name = f"{int(max(self._before)) + 1 if self._before else 1:012d}"
        path = f"{self.path}/{self._name}"
        try:
            system.mkfifo(path, self._mode)
            self._ticket = ticket = OwnedFd(system.open_fd(path, system.O_EXISTING))
        except (FileExistsError, FileNotFoundError):
            return False  # another waiter was quicker, or removed the directory, or our ticket, which looked dead
        try:
            system.lock(ticket.fd, system.EX_NB)
            if system.fstat(ticket.fd).st_nlink:
                return True
        except BlockingIOError:
            pass  # another waiter is about to remove it: it looked dead
        ticket.close()
        return False

    def _make_directory(self) -> None:
        # A user that may use the lock may queue for it: where it is readable, the directory can be searched too.
        try:
            system.mkdir(self.path, self._mode | (self._mode & 0o444) >> 2 | 0o700)
        except FileExistsError:
            if not self.is_usable():
                raise PermissionError(errno.EACCES, "another user made this queue", self.path) from None

    def _open(self, name: str) -> OwnedFd | None:
        """Open a ticket. None: it is gone, or it is not a ticket that counts."""
        try:
            ticket = OwnedFd(system.open_fd(f"{self.path}/{name}", system.O_READ))
        except OSError:
            return None
        try:
            st = system.fstat(ticket.fd)
            if stat.S_ISFIFO(st.st_mode) and (self._trusts_all or is_trusted(st, system.stat(self.path))):
                return ticket
        except FileNotFoundError:
            pass
        ticket.close()
        return None

    def _remove_if_dead(self, name: str, ticket: OwnedFd) -> bool:
        """True: the owner of the ticket is dead, and the ticket is removed."""
        if not try_lock(ticket.fd, system.EX_NB):
            return False
        path, inode = f"{self.path}/{name}", inode_of(system.fstat(ticket.fd))
        if named(path, inode, follow_symlinks=False) is not None:
            try:
                system.unlink(path)
            except (FileNotFoundError, PermissionError):
                pass
        return True

    def wait(self, engine: LocalEngine, deadline: float | None) -> Steps[LocalGrant | None]:
        """Wait until this waiter is the first. Returns a grant if the lock was free behind a stopped first waiter."""
        suspect = ""  # the first in the queue when a check found the lock free: perhaps it is stopped
        before = sorted(self._before)  # newcomers take higher numbers, so these can only become fewer
        gone = 0
        while before:
            check_deadline(deadline)
            look_again = monotonic() + RECHECK_S
            news = yield from self._listen(before[-1], look_again, deadline)
            if news == _WAS_FIRST:
                break
            if news is not None:
                before.pop()
                gone += 1
                if gone % _TICKETS_BETWEEN_TASKS == 0:  # there may be thousands: let other tasks run
                    yield Pause(monotonic())
            elif monotonic() >= look_again:
                before = sorted({*before} & {*self._names()})
                if not before or not engine.is_free():
                    suspect = ""
                elif suspect == before[0]:
                    found = yield from attempt_step(engine, engine.attempt, queued=True)
                    if not isinstance(found, Outcome):
                        return found
                else:
                    suspect = before[0]
        self._is_first = True
        return None

    def _listen(self, name: str, until: float, deadline: float | None) -> Steps[bytes | None]:
        """Wait for news of the waiter with this ticket. None: it is still there."""
        ticket = self._open(name)
        if ticket is None:
            return _GAVE_UP
        with ticket:
            news = _news(ticket)
            if news is None:
                yield Readable(ticket.fd, sooner(until, deadline))
                news = _news(ticket)
            if news == b"" and not self._remove_if_dead(name, ticket):
                # Just being made, or examined by another process: no event would wake this waiter.
                yield Pause(sooner(monotonic() + _PAUSE_S, deadline))
                return None
            return news

    def leave(self) -> None:
        """Give the ticket back. In a forked child that unwinds its parent's wait, nothing happens."""
        ticket = self._ticket
        if ticket is None or not ticket.is_open:
            return
        try:
            system.write(ticket.fd, _WAS_FIRST if self._is_first else _GAVE_UP)
            system.unlink(f"{self.path}/{self._name}")
        except OSError:
            pass

    def close(self) -> None:
        """Close the ticket, after `leave`. The kernel frees the FIFO, so a holder does it after its release."""
        if self._ticket is not None:
            self._ticket.close()
            self._ticket = None


def _news(ticket: OwnedFd) -> bytes | None:
    """Read the byte of a waiter that left. None: it still waits. Empty: no process has the FIFO open to write."""
    try:
        return system.read(ticket.fd, 1)
    except BlockingIOError:
        return None


def remove_queue(path: str) -> bool:
    """Remove the directory of a queue if it is empty. True: it was removed."""
    try:
        system.rmdir(path)
    except OSError:
        return False  # not empty, gone, or not ours
    return True
