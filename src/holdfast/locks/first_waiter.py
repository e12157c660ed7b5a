"""The first waiter for a kernel lock: only the holders are in front of it.

    attempt ── held ──▶ the grant
       │ busy
       ▼
    wait for a change, then attempt again:
        in the kernel's own queue, if the wait has no timeout and does not belong to a task
        else for an event: a process has closed, unlinked or replaced the file, or died with it open
        else, where no events come from other machines, in pauses that grow

Some programs unlock without closing the file, so that no event comes, and lock it again within microseconds. Beside
them, a waiter for events also attempts in bursts (`BURSTS`). A wait in the kernel needs none.
"""

from __future__ import annotations

from time import monotonic

from .. import process
from ..wait import Granted, Pause, check_deadline, sooner
from ..watch import Waiting
from .engine import BUSY, QUEUED, REPLACED, Outcome
from .local import settle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wait import Steps
    from .path_lock import OpenFile, PathLock

_ATTEMPTS_BETWEEN_TASKS = 20  # about 50 µs

# A row applies until the waiter has waited for the first number of seconds. The second number is the length of a burst
# of attempts, the third the pause after it.
BURSTS: tuple[tuple[float, float, float], ...] = (
    (0.150, 0.001, 0.001),
    (2.000, 0.002, 0.038),
    (float("inf"), 0.002, 1.000),
)


class FirstWaiter:
    """One wait for the lock itself."""

    __slots__ = ("_asynchronous", "_began", "_deadline", "_engine", "_file", "_next_burst", "_waiting")

    def __init__(self, engine: PathLock, deadline: float | None, asynchronous: bool) -> None:
        self._engine = engine
        self._deadline = deadline
        self._asynchronous = asynchronous
        self._file: OpenFile | None = None
        self._waiting = Waiting(engine.location.file)
        self._began = self._next_burst = monotonic()

    def steps(self) -> Steps[OpenFile]:
        grant: OpenFile | Outcome = QUEUED
        try:
            while True:
                grant = yield from settle(self._engine, self._attempt, self._deadline, grant)
                if grant:
                    return grant
                check_deadline(self._deadline)
                file = self._file
                if file is None:
                    yield self._waiting.backoff.pause(self._deadline)
                elif self._can_block(file):
                    yield Granted(file.set_lock, file.fd, self._engine.wait_op)
                    grant = self._attempt(granted=True)
                    if grant:  # without one more call of `settle`: code that has not run for long is slow
                        return grant
                    continue
                elif (yield from self._wait_for_change(file)):
                    grant = self._attempt(granted=True)
                    continue
                grant = QUEUED
        finally:
            # After the lock is taken, never before: closing a watch is slow.
            if self._waiting.watch is not None:  # without this look, the call alone takes 2 % of a hand-off
                self._waiting.end(reuse=bool(grant))
            if self._file is not None and not grant:
                self._file.close()

    def _attempt(self, granted: bool = False) -> OpenFile | Outcome:
        """The file stays open between attempts: closing it would wake every waiter that watches it."""
        engine = self._engine
        try:
            file = self._file = self._file or engine.open()
        except BlockingIOError:  # another program keeps us from opening it
            return BUSY
        found = engine.attempt(True, file, granted)
        if found is REPLACED:
            file.close()
            self._file = None
            self._waiting.move(engine.location.file)
        return found

    def _can_block(self, file: OpenFile) -> bool:
        if self._deadline is not None or self._asynchronous or not self._engine.wait_op:
            return False
        return file.mount.blocks and not process.uses_greenlets()

    def _wait_for_change(self, file: OpenFile) -> Steps[bool]:
        """Wait for an event. True: the lock was taken in a burst."""
        polls = self._engine.wait_op and file.mount.events  # no other program takes the slots of a semaphore
        if polls and (yield from self._burst(file)):
            return True
        # `begin` is true if the waiter has just registered for events. Then it attempts once more before it sleeps.
        if not file.mount.events or not self._waiting.begin():
            yield self._waiting.step(sooner(self._next_burst, self._deadline) if polls else self._deadline)
            self._waiting.drain()
        return False

    def _burst(self, file: OpenFile) -> Steps[bool]:
        """If a burst is due (`BURSTS`), attempt again and again. Other tasks run in between. True: it is taken."""
        now = monotonic()
        if now < self._next_burst:
            return False
        length, pause = next((length, pause) for before, length, pause in BURSTS if now - self._began < before)
        self._next_burst = now + length + pause
        until = sooner(now + length, self._deadline)
        while now < until:
            for _ in range(_ATTEMPTS_BETWEEN_TASKS):
                if self._engine.take(file) is True:
                    return True
            yield Pause(now)
            now = monotonic()
        return False
