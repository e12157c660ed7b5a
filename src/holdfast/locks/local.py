"""How a caller waits for a lock at a path, from top to bottom.

    line     threads and tasks of this process wait in memory, in order of arrival (`process.Line`)
    queue    the first few of each process wait behind tickets, in order of arrival (`queue.Queue`)
    front    the first waiter of all waits for the lock itself (`engine.wait_in_front`)

A caller that does not wait (`waits=False`) attempts again only if the file was replaced or is being removed.
"""

from __future__ import annotations

import os
from time import monotonic

from .. import process, system, wait
from ..paths import mount_at
from .engine import BUSY, QUEUED, REMOVING, REPLACED, Engine, Grant, Outcome, attempt_step
from .queue import Queue, remove_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .location import Location

# How many waiters of one process have tickets at a time; the others wait in memory. Each ticket costs a descriptor.
TICKETS_PER_PROCESS = 32
MAX_REMOVALS = 50  # retries after which the process that removes the file is treated as a holder: it may be stopped
_MAX_QUICK_RETRIES = 3  # retries without a pause
_MAX_RETRIES = 200  # retries after which the lock counts as busy
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.000_05, 0.002


class LocalGrant(Grant):
    """A grant for a lock at a path."""

    __slots__ = ()

    called_at: float  # when a waiter in the queue acquired it, on the monotonic clock; 0.0: without the queue


class LocalEngine(Engine):
    """An engine for a lock at a path. Subclasses have the methods that raise NotImplementedError here."""

    __slots__ = ()

    location: Location
    fair: bool
    mode: int

    def attempt(self, queued: bool = False) -> LocalGrant | Outcome:
        """Make one attempt without regard to the queue. `queued`: the caller is first in it, or has a `Turn`."""
        raise NotImplementedError

    def file_was_replaced(self, retries: int) -> None:
        """Called for every REPLACED, with their number in a row."""

    def steps(
        self, found: Outcome, deadline: float | None, *, waits: bool, asynchronous: bool
    ) -> wait.Steps[LocalGrant]:
        """Wait in the line of this process, then in the queue of all processes, then for the lock itself."""
        if not waits:
            return (yield from _retry(self, found))
        grant: LocalGrant | None = None
        is_done = False
        shares = self.shares_already(asynchronous=asynchronous)
        queue = Queue(self.location.queue, self.mode) if not shares and has_queue(self) else None
        place = process.LinePlace(self.location.file)
        try:
            try:
                notification = wait.AsyncNotification() if asynchronous else wait.Notification()
                place.join(TICKETS_PER_PROCESS if queue is not None else 1, notification)
                while not place.admitted:
                    wait.check_deadline(deadline)
                    yield wait.Notified(notification, wait.sooner(monotonic() + wait.RECHECK_S, deadline))
                    if not place.admitted:
                        place.admit_others()
                joined = queue is not None and queue.join()
                place.admit_others()
                if queue is not None and joined:
                    grant = yield from queue.wait(self, deadline)
                if grant is None:
                    grant = yield from self.wait_in_front(deadline, asynchronous=asynchronous)
                if queue is not None:
                    grant.called_at = monotonic()  # type: ignore[misc]  # a slot of each subclass
            finally:
                if queue is not None:
                    queue.leave()
                    if grant is None and not place.is_inherited:
                        remove_queue(queue.path)
                place.leave()
            is_done = True
        finally:
            if not is_done and not place.is_inherited:
                self.gave_up()
        return grant

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


def _retry(engine: LocalEngine, found: LocalGrant | Outcome) -> wait.Steps[LocalGrant]:
    """Attempt again until the lock is taken, or known to be busy: then raise `DeadlinePassed`."""
    replaced = removals = 0
    backoff = wait.Backoff(_MIN_PAUSE_S, _MAX_PAUSE_S)
    while not found:
        if found is BUSY or (found is QUEUED and Queue(engine.location.queue, engine.mode).is_alive()):
            raise wait.DeadlinePassed
        if found is REMOVING:
            removals += 1
            if removals > MAX_REMOVALS:
                raise wait.DeadlinePassed
            # About 0.1 s in all: on a busy machine the process that removes the file has to wait for its turn.
            yield wait.Pause(monotonic() + min(removals * removals * _MIN_PAUSE_S, _MAX_PAUSE_S))
        elif found is REPLACED:
            replaced += 1
            if replaced > _MAX_RETRIES:
                raise wait.DeadlinePassed
            engine.file_was_replaced(replaced)
            if replaced > _MAX_QUICK_RETRIES:
                yield backoff.pause(None)
        found = yield from attempt_step(engine, engine.attempt)
    return found


def has_queue(engine: LocalEngine) -> bool:
    """Tickets are FIFOs, which do not reach other machines: there, waiters are served in any order."""
    return engine.fair and has_events(engine.location.file)


def has_events(file: str) -> bool:
    """Does the file system report what other processes do to the file?"""
    try:
        return mount_at(system.stat(os.path.dirname(file)).st_dev, file).events
    except OSError:
        return False
