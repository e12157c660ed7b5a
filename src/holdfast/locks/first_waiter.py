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
from .engine import BUSY, REMOVING, REPLACED, Outcome
from .local import MAX_REMOVALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wait import Steps
    from .path_lock import OpenFile, PathLock

_MAX_QUICK_RETRIES = 3  # then with pauses
_ATTEMPTS_BETWEEN_TASKS = 20  # about 50 µs
_PAUSE_S, _MAX_PAUSE_S = 0.000_02, 0.01

# A row applies until the waiter has waited for the first number of seconds. The second number is the length of a burst
# of attempts, the third the pause after it.
BURSTS: tuple[tuple[float, float, float], ...] = (
    (0.150, 0.001, 0.001),
    (2.000, 0.002, 0.038),
    (float("inf"), 0.002, 1.000),
)


class FirstWaiter:
    """One wait for the lock itself."""

    __slots__ = ("_asynchronous", "_began", "_deadline", "_engine", "_next_burst", "_waiting")

    def __init__(self, engine: PathLock, deadline: float | None, asynchronous: bool) -> None:
        self._engine = engine
        self._deadline = deadline
        self._asynchronous = asynchronous
        self._waiting = Waiting(engine.location.file)
        self._began = self._next_burst = monotonic()

    def steps(self) -> Steps[OpenFile]:
        engine, deadline = self._engine, self._deadline
        file: OpenFile | None = None
        found: OpenFile | Outcome = REPLACED
        granted = False
        replaced = removals = 0
        try:
            while True:
                found = REPLACED
                try:
                    file = file or engine.open()
                except BlockingIOError:  # another program keeps us from opening it
                    found = BUSY
                if file is not None:
                    found = engine.attempt(True, file, granted)
                    granted = False
                    if found:
                        return file
                check_deadline(deadline)
                if found is REMOVING and removals < MAX_REMOVALS:
                    removals += 1
                    yield Pause(sooner(monotonic() + removals * _PAUSE_S, deadline))
                elif found is REPLACED:
                    replaced += 1
                    engine.file_was_replaced(replaced)
                    if file is not None:
                        file.close()
                        file = None
                    self._waiting.move(engine.location.file)
                    if replaced > _MAX_QUICK_RETRIES:
                        yield Pause(sooner(monotonic() + min(replaced * _PAUSE_S, _MAX_PAUSE_S), deadline))
                elif file is None:
                    yield self._waiting.backoff.pause(deadline)
                else:
                    replaced = removals = 0
                    granted = yield from self._wait_for_change(file)
        finally:
            # After the lock is taken, never before: closing a watch is slow.
            self._waiting.end(reuse=bool(found))
            if file is not None and not found:
                file.close()

    def _wait_for_change(self, file: OpenFile) -> Steps[bool]:
        """True: the lock was taken meanwhile."""
        wait_op, can_block = self._engine.kind.wait_op, self._deadline is None and not self._asynchronous
        if wait_op and can_block and file.mount.blocks and not process.uses_greenlets():
            yield Granted(file.set_lock, file.fd, wait_op)
            return True
        polls = wait_op and file.mount.events  # no other program takes the slots of a semaphore
        seconds = self._burst_length() if polls else 0.0
        if seconds:
            taken = yield from self._burst(file, sooner(monotonic() + seconds, self._deadline))
            if taken:
                return True
        if file.mount.events and self._waiting.begin():
            return False  # registered: attempt once more, and only then sleep
        yield self._waiting.step(sooner(self._next_burst, self._deadline) if polls else self._deadline)
        self._waiting.drain()
        return False

    def _burst(self, file: OpenFile, until: float) -> Steps[bool]:
        """Attempt again and again until `until`. Other tasks run in between. True: the lock is taken."""
        while True:
            for _ in range(_ATTEMPTS_BETWEEN_TASKS):
                if self._engine.kind.take(file) is True:
                    return True
            now = monotonic()
            if now >= until:
                return False
            yield Pause(now)

    def _burst_length(self) -> float:
        """How many seconds to attempt for now. 0: the next burst is not due yet. See `BURSTS`."""
        now = monotonic()
        if now < self._next_burst:
            return 0.0
        length, pause = next((length, pause) for before, length, pause in BURSTS if now - self._began < before)
        self._next_burst = now + length + pause
        return length
