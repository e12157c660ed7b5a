"""How a caller waits for a lock at a path, from top to bottom.

    line     threads and tasks of this process wait in memory, in order of arrival (`process.LinePlace`)
    queue    the first few of each process wait behind tickets, in order of arrival (`queue.Queue`)
    front    the first waiter of all waits for the lock itself (`engine.wait_in_front`)

A caller that does not wait attempts again only if the file was replaced or is being removed.
"""

from __future__ import annotations

import os
from time import monotonic

from .. import process, system, wait
from ..paths import mount_at
from .engine import BUSY, QUEUED, REPLACED, Engine, Grant, Outcome, attempt_step
from .queue import Queue, remove_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .file_waiter import FileWaiter

    GrantType = TypeVar("GrantType", bound="LocalGrant")


# How many waiters of one process have tickets at a time; the others wait in memory. Each ticket costs a descriptor.
TICKETS_PER_PROCESS = 32
_MAX_QUICK_RETRIES = 3  # retries without a pause
_FEW_DESCRIPTORS = 64  # a process that has more open closes at once what a wait has left
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.000_05, 0.002
# Retries after which the lock counts as busy. A process that removes the file may be stopped.
_MAX_REMOVALS, _MAX_REPLACED = 50, 200


class Location:
    """The file of a lock, which is the target if the path is a symlink, and the directory of its queue.

    Both are in one object, so that a thread sees them change together.
    """

    __slots__ = ("file", "queue")

    def __init__(self, file: str) -> None:
        self.file = file
        self.queue = file + ".queue"


class LocalGrant(Grant):
    """A grant for a lock at a path."""

    __slots__ = ()

    wait: EndedWait | None  # None: it was acquired without waiting


def may_linger() -> bool:
    """May what a wait has left stay open while its lock is held? Not for all locks of a process that holds hundreds:
    the number of descriptors is limited, and so is the number of inotify instances of a user (128)."""
    return len(process.descriptors) < _FEW_DESCRIPTORS


class EndedWait:
    """What a wait leaves until its lock is released: closing it earlier would keep the new holder waiting."""

    __slots__ = ("_began", "_queue", "_waiter")

    def __init__(self, waiter: FileWaiter | None = None) -> None:
        self._waiter = waiter
        self._queue: Queue | None = None

    def note_queue(self, queue: Queue) -> None:
        """The wait was in this queue, and ends now."""
        self._queue = queue
        self._began = monotonic()

    def clean_up(self, location: Location, *, gives_turn: bool = True) -> bool:
        """Called when the lock is free. True: the queue was empty, and is removed."""
        if self._waiter is not None:
            self._waiter.close()
        if self._queue is None:
            return False
        self._queue.close()
        if gives_turn:
            process.registry.note_turn(location.file, self._began)
        return remove_queue(location.queue)


class LocalEngine(Engine):
    """An engine for a lock at a path. Subclasses have the methods that raise NotImplementedError here."""

    __slots__ = ()

    location: Location
    fair: bool
    mode: int

    def attempt(self, queued: bool = False) -> LocalGrant | Outcome:
        """Make one attempt without regard to the queue. `queued`: the caller is first in it, or has a `Turn`."""
        raise NotImplementedError

    def is_free(self) -> bool:
        """Could the first waiter acquire the lock at this moment?"""
        raise NotImplementedError

    def shares_already(self, *, asynchronous: bool) -> bool:
        """Does the caller share the lock, so that it must not queue? Raises if it would wait for itself."""
        raise NotImplementedError

    def wait_in_front(self, deadline: float | None, *, asynchronous: bool) -> wait.Steps[LocalGrant]:
        """Wait for the lock itself. The caller is the first waiter."""
        raise NotImplementedError

    def gave_up(self) -> None:
        """Called when a wait ended without the lock."""

    def file_was_replaced(self, retries: int) -> None:
        """Called for every REPLACED, with their number in a row."""

    def steps(self, found: Outcome, deadline: float | None, *, asynchronous: bool) -> wait.Steps[LocalGrant]:
        """Wait in the line of this process, then in the queue of all processes, then for the lock itself."""
        if deadline == 0:
            return (yield from self._retry(found))
        grant: LocalGrant | None = None
        shares = self.shares_already(asynchronous=asynchronous)
        queue = Queue(self.location.queue, self.mode) if not shares and self._has_queue() else None
        notified = wait.AsyncNotified() if asynchronous else wait.Notified()
        place = process.LinePlace(self.location.file, 1 if queue is None else TICKETS_PER_PROCESS, notified)
        try:
            if not place.admitted:
                yield from wait.until_admitted(place, notified, deadline)
            joined = queue is not None and queue.join()
            place.admit_next()
            if queue is not None and joined:
                grant = yield from queue.wait(self, deadline)
            if grant is None:
                grant = yield from self.wait_in_front(deadline, asynchronous=asynchronous)
            if queue is not None:
                grant.wait = grant.wait or EndedWait()  # type: ignore[misc]  # an attribute of each subclass
                grant.wait.note_queue(queue)
            return grant
        finally:
            if queue is not None:
                queue.leave()
                if grant is None or not may_linger():
                    queue.close()
                if grant is None:
                    remove_queue(queue.path)
            place.leave()
            if grant is None and not place.is_inherited:
                self.gave_up()

    def _retry(self, found: Outcome) -> wait.Steps[LocalGrant]:
        """Attempt again, unless the lock is known to be busy."""
        if found is QUEUED and Queue(self.location.queue, self.mode).is_alive():
            raise wait.DeadlinePassed
        grant = yield from settle(self, self.attempt, None, found)
        if isinstance(grant, Outcome):
            raise wait.DeadlinePassed
        return grant

    def _has_queue(self) -> bool:
        """Tickets are FIFOs, which do not reach other machines: there, waiters are served in any order."""
        return self.fair and has_events(self.location.file)


def settle(
    engine: LocalEngine,
    attempt: Callable[[], GrantType | Outcome],
    deadline: float | None,
    found: GrantType | Outcome = QUEUED,
) -> wait.Steps[GrantType | Outcome]:
    """Attempt again while the file is being replaced or removed. Returns a grant, or BUSY.

    found: the result of the last attempt; QUEUED: no attempt was made yet
    """
    removals = replaced = 0
    while not found and found is not BUSY:
        if found is REPLACED:
            replaced += 1
            engine.file_was_replaced(replaced)
        elif found is not QUEUED:
            removals += 1
        if replaced > _MAX_REPLACED or removals > _MAX_REMOVALS:
            return BUSY
        if removals or replaced > _MAX_QUICK_RETRIES:
            wait.check_deadline(deadline)
            # About 0.1 s in all: on a busy machine the process that removes the file has to wait for a processor.
            pause = min((removals + replaced) ** 2 * _MIN_PAUSE_S, _MAX_PAUSE_S)
            yield wait.Pause(wait.sooner(monotonic() + pause, deadline))
        found = yield from attempt_step(engine, attempt)
    return found


def has_events(file: str) -> bool:
    """Does the file system report what other processes do to the file?"""
    try:
        return mount_at(system.stat(os.path.dirname(file)).st_dev, file).events
    except OSError:
        return False
