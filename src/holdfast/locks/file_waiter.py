"""Waiting for a lock file to go away: to take its place (`acquire`), or only until it is free (`until_free`).

attempt ── held ──▶ the hold
   │ busy
   ▼
keep the file open that is there now; until it is gone, replaced or stale:
    register for its events, look once more, sleep until one comes or the lock may have grown old
attempt again
"""

from __future__ import annotations

from time import monotonic

from .. import system
from ..wait import RECHECK_S, Pause, check_deadline, sooner
from ..watch import Waiting
from .base import BUSY, Outcome
from .removal import IsLink, Unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wait import Steps
    from .lock_file import FileHold, LockFile
    from .staleness import Judgement

_MAX_VAIN_LOOKS = 3


class FileWaiter:
    """One wait for a lock file. Only its holder is before the waiter."""

    __slots__ = ("_deadline", "_lock", "_waiting")

    def __init__(self, lock: LockFile, deadline: float | None) -> None:
        self._lock = lock
        self._deadline = deadline
        self._waiting = Waiting(lock._file)

    def acquire(self) -> Steps[FileHold]:
        lock, waiting = self._lock, self._waiting
        in_vain = 0  # how often in a row there was nothing to wait for, and yet no lock
        slept = False
        hold: FileHold | Outcome = BUSY
        try:
            while True:
                hold = yield from lock._attempt_step(lock._attempt, queued=not slept)
                if not isinstance(hold, Outcome):
                    return hold
                check_deadline(self._deadline)
                slept = yield from self._wait_for_change()
                waiting.move(lock._file)
                in_vain = 0 if slept else in_vain + 1
                # It is stale, and in use as another kind of lock or not ours to remove. Or others keep replacing it.
                if in_vain > _MAX_VAIN_LOOKS:
                    yield waiting.backoff.pause(self._deadline)
        finally:
            waiting.end(reuse=not isinstance(hold, Outcome))

    def until_free(self) -> Steps[None]:
        lock, waiting = self._lock, self._waiting
        try:
            while True:
                found = lock.examine()
                if found is None or found.stale:
                    return
                check_deadline(self._deadline)
                yield from self._wait_for_change()
                waiting.move(lock._file)
        finally:
            waiting.end()

    def _wait_for_change(self) -> Steps[bool]:
        """Until the lock file that is there now is gone, replaced or stale. False: it is so already.

        The file stays open between looks: closing it would wake every waiter that watches it, this one included.
        """
        lock, waiting, deadline = self._lock, self._waiting, self._deadline
        place = lock._open_place()
        file = None
        slept = False
        try:
            file = lock._open_existing(place)
            if file is None:
                return slept
            fd = file.fd
            has_events = lock._has_events()
            try:
                st = system.fstat(fd)
            except FileNotFoundError:  # removed: sshfs has no attributes of it any more
                return slept
            while True:
                if not lock._is_at(place, fd, st):  # released: the case that should be quick
                    return slept
                judgement = lock._judge(fd)
                if judgement.stale:
                    return slept
                check_deadline(deadline)
                if has_events and waiting.begin():
                    continue  # registered: look once more, and only then sleep
                until = sooner(monotonic() + self._next_look(judgement, has_events), deadline)
                yield waiting.step(until) if has_events else Pause(until)
                slept = True
                waiting.drain()
        except IsLink:
            lock._resolve()
            return slept
        except Unreadable:
            check_deadline(deadline)
            yield waiting.backoff.pause(deadline)
            return True
        finally:
            place.leave()
            if file is not None:
                file.close()

    def _next_look(self, judgement: Judgement, has_events: bool) -> float:
        """In how many seconds to look although nothing happened: the lock may have grown old by then."""
        longest = RECHECK_S if has_events else self._lock.retry
        return longest if judgement.stale_in is None else min(longest, judgement.stale_in + 0.001)
