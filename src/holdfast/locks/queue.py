"""Fairness: a queue in front of a lock, first come, first served, over all processes and threads.

The queue of `x` is the directory `x.queue`. Each waiter has a ticket in it, a FIFO whose name is a number, one more
than the highest when it came. It keeps the FIFO open for writing and holds a kernel lock on it. Whoever comes next
opens that FIFO for reading: the kernel reports its end when the waiter in front closes it, and also when it dies. So
each waiter sleeps on exactly one other, no matter how many there are, and nothing polls.

    x.queue/000000000007   the first: waits for the lock itself
    x.queue/000000000008   waits for 7
    x.queue/000000000009   waits for 8. If 8 gives up or is killed: looks again, and waits for 7

Leaving: write a byte to the FIFO, unlink the ticket, close. The byte says whether one was the first; if so, the next
one is the first now and need not look. It is also for the case that a child has inherited a copy of the descriptor,
which keeps the FIFO open.

The directory is removed, if it is empty, by whoever gives up waiting, and by who got the lock when it releases that;
whoever was about to put a ticket into it makes it again.

A ticket nobody holds the kernel lock of belongs to a dead waiter. It is removed by whoever finds it, under rule 2: lock
it, see that the name still means this file, unlink.

The queue orders; it excludes nobody. So what can go wrong costs a place in the line at the worst. Where no ticket can
be had (the directory is not writable, the disk is full, the file system knows no FIFOs), one waits without. A waiter
that is stopped (SIGSTOP) at the head would hold up all others although the lock is free: so everybody looks at the lock
itself once in a while (`SAFETY_LOOK`), and passes a first one that did not take a free lock from one look to the next.
"""

from __future__ import annotations

import errno
import os
from time import monotonic

from .. import gate, system
from ..paths import mount_at
from ..wait import SAFETY_LOOK, AsyncBell, Bell, Pause, Readable, Rung, check_deadline, sooner
from . import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ..wait import Steps

    HoldType = TypeVar("HoldType", bound=base.Hold)
else:
    HoldType = None

# How many waiters of one process have tickets at a time; the others wait in memory. Each ticket costs a descriptor.
TICKETS_PER_PROCESS = 32
_MOMENT = 0.001  # seconds

# What a waiter that leaves tells the next one.
_WAS_FIRST, _GAVE_UP = b"1", b"0"

_NO_QUEUE_HERE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EOPNOTSUPP,
    errno.EMFILE,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
}


class Queue:
    """One waiter's view of the queue at `path`, and its ticket."""

    __slots__ = ("_before", "_book", "_fd", "_is_first", "_mode", "_name", "path")

    def __init__(self, path: str, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._book = gate.book
        self._fd = -1
        self._name = ""
        self._before: list[str] = []
        self._is_first = False

    def tickets(self) -> list[str]:
        """Ticket names, in no order. Nothing else in the directory counts."""
        try:
            return [name for name in system.listdir(self.path) if len(name) == 12 and name.isdecimal()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return []
            raise

    def is_alive(self) -> bool:
        """Does anybody queue? Clears away the tickets of the dead."""
        for name in self.tickets():
            try:
                fd = system.open_fd(f"{self.path}/{name}", system.O_READ)
            except (FileNotFoundError, PermissionError):
                continue
            alive = not self._remove_if_dead(name, fd) and _news(fd) is None
            system.close(fd)
            if alive:
                return True
        remove_queue(self.path)
        return False

    def join(self) -> bool:
        """Take a ticket. False: there is no queue to be had here."""
        try:
            while not self._take_ticket():
                pass
        except OSError as error:
            if error.errno not in _NO_QUEUE_HERE:
                raise
            return False
        return True

    def _take_ticket(self) -> bool:
        self._before = names = self.tickets()
        if not names:
            self._make_directory()
        self._name = f"{int(max(names)) + 1 if names else 1:012d}"
        path = f"{self.path}/{self._name}"
        try:
            system.mkfifo(path, self._mode)
            fd = system.open_fd(path, system.O_EXISTING)
        except (FileExistsError, FileNotFoundError):
            return False  # somebody was quicker, or removed the directory, or our ticket, which looked dead
        gate.book.open_fds.add(fd)
        self._fd = fd
        try:
            system.lock(fd, system.EX_NB)
            if system.fstat(fd).st_nlink:
                return True
        except BlockingIOError:
            pass  # somebody is about to remove it: it looked dead
        except BaseException:
            self._drop_ticket()
            raise
        self._drop_ticket()
        return False

    def _make_directory(self) -> None:
        # Whoever may use the lock may queue for it: where it is readable, the directory can be searched too.
        try:
            system.mkdir(self.path, self._mode | (self._mode & 0o444) >> 2 | 0o700)
        except FileExistsError:
            pass

    def _drop_ticket(self) -> None:
        fd, self._fd = self._fd, -1
        gate.book.open_fds.discard(fd)
        system.close(fd)

    def _names(self, name: str, fd: int) -> bool:
        try:
            named = system.stat(f"{self.path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        st = system.fstat(fd)
        return (named.st_dev, named.st_ino) == (st.st_dev, st.st_ino)

    def _remove_if_dead(self, name: str, fd: int) -> bool:
        """True: the ticket belongs to nobody, and is gone now."""
        try:
            system.lock(fd, system.EX_NB)
        except BlockingIOError:
            return False
        if self._names(name, fd):
            try:
                system.unlink(f"{self.path}/{name}")
            except (FileNotFoundError, PermissionError):
                pass
        return True

    def wait(self, waiter: QueuedLock[HoldType], deadline: float | None) -> Steps[HoldType | None]:
        """Until we are the first. The lock itself, if it turned out to be free behind a waiter that does not move."""
        suspect = ""  # the first in the queue, at a look that found the lock free: it should have taken it
        ignored: set[str] = set()  # dead ones that we may not remove, and those of others that we may not look at
        before = self._before  # nobody comes in before us, so we look again only when one of these goes
        while before:
            look_again = monotonic() + SAFETY_LOOK
            news = yield from self._listen(max(before), ignored, look_again, deadline)
            if news == _WAS_FIRST:
                break
            if news is None and monotonic() >= look_again:
                hold = waiter._attempt(queued=True)
                if hold is not None and suspect == min(before):
                    return hold
                suspect = ""
                if hold is not None:
                    hold.release()
                    suspect = min(before)
            before = [name for name in self.tickets() if name < self._name and name not in ignored]
        self._is_first = True
        return None

    def _listen(self, name: str, ignored: set[str], until: float, deadline: float | None) -> Steps[bytes | None]:
        """Wait for news of the waiter with this ticket: see `_news`."""
        try:
            fd = system.open_fd(f"{self.path}/{name}", system.O_READ)
        except FileNotFoundError:
            return _GAVE_UP
        except PermissionError:
            ignored.add(name)
            return _GAVE_UP
        gate.book.open_fds.add(fd)
        try:
            news = _news(fd)
            if news is None:
                check_deadline(deadline)
                yield Readable(fd, sooner(until, deadline))
                news = _news(fd)
            if news == b"":
                if self._remove_if_dead(name, fd):
                    ignored.add(name)
                else:  # just being made, or examined by others: nothing would wake us
                    check_deadline(deadline)
                    yield Pause(sooner(monotonic() + _MOMENT, deadline))
            return news
        finally:
            gate.book.open_fds.discard(fd)
            system.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0 and self._book is gate.book:  # an interrupt kept it from leaving
            self.leave()

    def leave(self) -> None:
        if self._fd < 0:
            return
        try:
            system.write(self._fd, _WAS_FIRST if self._is_first else _GAVE_UP)
            system.unlink(f"{self.path}/{self._name}")
        except OSError:
            pass
        self._drop_ticket()


def _news(fd: int) -> bytes | None:
    """What the owner of a ticket said when it left. None: it is there. Empty: nobody has it open; it may be dead."""
    try:
        return system.read(fd, 1)
    except BlockingIOError:
        return None


def remove_queue(path: str) -> bool:
    """Remove the directory of a queue, unless somebody is in it. True: it was there, and is not any more."""
    try:
        system.rmdir(path)
    except OSError:
        return False  # not empty, gone, or not ours
    return True


class QueuedLock(base.BaseLock[HoldType]):
    """A lock at a path, with a queue beside it."""

    __slots__ = ("_file", "_queue")

    def __init__(self, path: base.StrPath, kind: str, timeout: float | None, fair: bool, mode: int) -> None:
        base.BaseLock.__init__(self, path, kind, timeout, fair and system.HAS_FIFOS, mode)
        self._file = self.path
        self._queue = self._file + ".queue"

    def _locate(self, file: str) -> None:
        """`file` is what the path stands for: itself, or the target of the link that it is."""
        self._file = file
        self._queue = file + ".queue"

    # What a kind of lock says.

    def _attempt(self, queued: bool = False) -> HoldType | None:
        """One try for the lock, at the file that the path names. `queued`: in one's turn, or first in the queue."""
        raise NotImplementedError

    def _wait_in_front(self, deadline: float | None, asynchronous: bool) -> Steps[HoldType]:
        """Wait for the lock itself: nobody is before us but its holders."""
        raise NotImplementedError

    # What all of them do.

    def _try_despite_queue(self) -> HoldType | None:
        if self.fair and not Queue(self._queue, self.mode).is_alive():
            return self._attempt()
        return None

    def _has_queue(self) -> bool:
        """Tickets are FIFOs, which do not reach other machines: there, whoever is quickest goes first."""
        return self.fair and self._has_events()

    def _has_events(self) -> bool:
        """Does the file system tell us what others do to the file?"""
        try:
            return mount_at(system.stat(os.path.dirname(self._file)).st_dev, self._file).events
        except OSError:
            return False

    def _wait_in_line(self, deadline: float | None, asynchronous: bool, queue: Queue | None) -> Steps[HoldType]:
        """The way to a lock that was not free: the line of this process, the queue of all of them, the lock itself."""
        width = TICKETS_PER_PROCESS if queue is not None else 1
        place = gate.Place(gate.book, self._file)
        hold = None
        try:
            place.join(width, AsyncBell if asynchronous else Bell)
            while not place.admitted:
                check_deadline(deadline)
                assert place.bell is not None
                yield Rung(place.bell, deadline)
            joined = queue is not None and queue.join()
            place.settle()
            if queue is not None and joined:
                hold = yield from queue.wait(self, deadline)
            if hold is None:
                hold = yield from self._wait_in_front(deadline, asynchronous)
            return hold
        finally:
            if queue is not None:
                queue.leave()
                if hold is None:
                    remove_queue(queue.path)
            place.leave()
