"""The first waiter for a kernel lock: only the holders are before it.

    attempt ── held ──▶ the hold
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

from ..wait import Pause, check_deadline, sooner
from ..watch import Waiting
from .base import MAX_REMOVALS, REMOVING, REPLACED, Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generic

    from ..wait import Steps
    from .path_lock import OpenFile, PathHoldType, PathLock
else:
    from .base import Generic

    PathHoldType = None

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


class FirstWaiter(Generic[PathHoldType]):
    """One wait for the lock itself."""

    __slots__ = ("_asynchronous", "_bursts", "_deadline", "_lock", "_waiting")

    def __init__(self, lock: PathLock[PathHoldType], deadline: float | None, asynchronous: bool) -> None:
        self._lock = lock
        self._deadline = deadline
        self._asynchronous = asynchronous
        self._waiting = Waiting(lock._file)
        self._bursts = _Bursts()

    def steps(self) -> Steps[PathHoldType]:
        lock, deadline = self._lock, self._deadline
        file: OpenFile | Outcome = REPLACED
        found: PathHoldType | Outcome = REPLACED
        granted = False
        replaced = removals = 0
        try:
            while True:
                file = file or lock._open_or_outcome()
                found = file if isinstance(file, Outcome) else lock._attempt(True, file, granted)
                granted = False
                if not isinstance(found, Outcome):
                    return found
                check_deadline(deadline)
                if found is REMOVING and removals < MAX_REMOVALS:
                    removals += 1
                    yield Pause(sooner(monotonic() + removals * _PAUSE_S, deadline))
                elif found is REPLACED:
                    replaced += 1
                    lock._file_was_replaced(replaced)
                    if file:
                        file.close()
                        file = REPLACED
                    self._waiting.move(lock._file)
                    if replaced > _MAX_QUICK_RETRIES:  # other programs run on, whatever the file system does
                        yield Pause(sooner(monotonic() + min(replaced * _PAUSE_S, _MAX_PAUSE_S), deadline))
                elif not file:  # another program keeps us from opening it
                    yield self._waiting.backoff.pause(deadline)
                else:
                    replaced = removals = 0
                    granted = yield from self._wait_for_change(file)
        finally:
            # After the lock is taken, never before: closing a watch takes its time.
            self._waiting.end(reuse=not isinstance(found, Outcome))
            if file and isinstance(found, Outcome):
                file.close()

    def _wait_for_change(self, file: OpenFile) -> Steps[bool]:
        """True: the lock was taken meanwhile."""
        step = None if self._asynchronous or self._deadline is not None else self._lock._block(file)
        if step is not None:
            yield step
            return True
        polls = self._lock._polls and file.mount.events
        seconds = self._bursts.due() if polls else 0.0
        if seconds:
            taken = yield from self._burst(file, sooner(monotonic() + seconds, self._deadline))
            if taken:
                return True
        if file.mount.events and self._waiting.begin():
            return False  # registered: attempt once more, and only then sleep
        yield self._waiting.step(sooner(self._bursts.next, self._deadline) if polls else self._deadline)
        self._waiting.drain()
        return False

    def _burst(self, file: OpenFile, until: float) -> Steps[bool]:
        """Attempt again and again for a moment, letting other tasks run in between. True: the lock is taken."""
        while True:
            for _ in range(_ATTEMPTS_BETWEEN_TASKS):
                if self._lock._take(file) is True:
                    return True
            now = monotonic()
            if now >= until:
                return False
            yield Pause(now)


class _Bursts:
    """When to attempt in a burst: see `BURSTS`."""

    __slots__ = ("_began", "next")

    def __init__(self) -> None:
        self._began = self.next = monotonic()

    def due(self) -> float:
        """How many seconds to attempt for. 0: not yet."""
        now = monotonic()
        if now < self.next:
            return 0.0
        waited = now - self._began
        burst, pause = next((burst, pause) for before, burst, pause in BURSTS if waited < before)
        self.next = now + burst + pause
        return burst
