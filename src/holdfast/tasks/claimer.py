"""`Claimer`: takes tasks for one thread, several in one transaction if they are short.

A transaction costs more than a short task. So a thread that works on short tasks reserves the next ones together: as
many as it did in `_RESERVE_S`, at most `_MAX_RESERVED`. A durable queue in SQLite reserves nothing: there the sync of
each ending costs most.

`buffered`: endings are written together, too, with the next claim. That is so with `durable=False`, and in the `Worker`
of a queue on PostgreSQL.

A task may take longer than those before it. Then other workers must get the reserved tasks. `_Guard`, a thread of this
process, gives them back after `_GUARD_S`, and writes the endings that are still in memory.

If the process is killed, the reserved tasks are orphans that have not begun: that is no attempt. Endings that were not
written are lost, so short tasks of up to twice `_GUARD_S` are done again.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from .. import process
from ..errors import HoldfastError
from .claim import Claim
from .policy import Retries, given_back, outcome_of
from .sql import Store
from .store import Attempt, Ending, Registration, Woken

_RESERVE_S = 0.005
_RESERVE_ON_SERVER_S = 0.020  # a transaction takes a millisecond there
_MAX_RESERVED = 64
_GUARD_S = 0.010
_MAX_PAUSE_S = 1.0  # after errors
_RECOVER_EVERY_S = 1.0
_LONG_S = 3600.0

log = logging.getLogger("holdfast")


class Claimer:
    """Takes tasks for one thread. `wait` and `next` are called by that thread, all else by any thread."""

    def __init__(self, store: Store, retries: Retries, *, buffered: bool, reserves: bool) -> None:
        self.store = store
        self.retries = retries
        self.registry = process.registry
        self.begun = 0  # changes with every task
        # Called with the outcome of each task of a dead worker.
        self.on_recovered: Callable[[str], object] | None = None
        # Called with the number of buffered endings that were refused, because other workers have the tasks.
        self.on_refused: Callable[[int], object] | None = None
        self.buffered = buffered
        self._max_batch = _MAX_RESERVED if reserves else 1
        self._reserve_s = _RESERVE_S if store.is_local else _RESERVE_ON_SERVER_S
        self._worker: Registration | None = None
        self._mutex = threading.RLock()
        self._reserved: deque[Attempt] = deque()
        self._endings: list[Ending] = []
        self._dropped: deque[Attempt] = deque()
        self._open: dict[str, int] = {}  # the tokens of claims that have not ended, by id
        self._is_unsure = False  # an error or an interrupt has ended `next`
        self._batch = 1
        self._taken = 0  # from the last batch
        self._claimed_at = self._recovered_at = 0.0

    @property
    def worker(self) -> Registration:
        if self._worker is None:
            self._worker = self.store.register()
            if self.buffered:
                _guard(self)  # now: if a task uses up the memory, a thread that starts later may never begin
        return self._worker

    def fileno(self) -> int:
        return self.worker.fileno()

    def next(self, *, idle: bool = False) -> Claim | None:
        """The next task. None: no task is ready. idle: `wait` is called then."""
        try:
            with self._mutex:
                if not self._reserved:
                    self._claim(idle)
                if not self._reserved:
                    return None
                attempt = self._reserved.popleft()
                self.begun += 1
                self._taken += 1
            if self._reserved or self._endings:
                _guard(self)
            claim = Claim(self, attempt)
            self._open[claim.id] = claim.token
            return claim
        except BaseException:
            self._is_unsure = True
            raise

    def _give_lost_back(self) -> None:
        """An interrupt may have come when a task was claimed, and before its `Claim` existed."""
        known = {*self._open.items(), *((ending.id, ending.token) for ending in self._unwritten())}
        known.update((attempt.id, attempt.token) for attempt in self._reserved)
        self.store.end(
            [self.worker.name],
            lambda running: [given_back(one) for one in running if (one.id, one.token) not in known],
        )
        self._is_unsure = False

    def wait(self, deadline: float | None, *others: int) -> Claim | None:
        """The next task. None: the deadline has passed, or one of the descriptors `others` is readable."""
        while True:
            claim = self.next(idle=True)
            if claim is not None:
                return claim
            left = _LONG_S if deadline is None else deadline - monotonic()
            woken = self.store.wait(self.worker, left, *others) if left > 0 else Woken.OTHER
            if woken is Woken.DEATH:
                self.recover()
            elif woken is Woken.OTHER:
                self.worker.leave()
                return None

    def _claim(self, idle: bool) -> None:
        now = monotonic()
        took = now - self._claimed_at
        self._batch = max(
            1, min(self._max_batch, 2 * self._batch, int(self._taken * self._reserve_s / max(took, 1e-9)))
        )
        if now - self._recovered_at > _RECOVER_EVERY_S:
            self._recovered_at = now
            self.recover()
        if self._is_unsure:
            self._give_lost_back()
        endings = self._unwritten()
        self._claimed_at, self._taken = now, 0
        self._reserved.extend(self.store.claim(self.worker, self._batch, endings=endings, reserve=True, idle=idle))
        self._endings.clear()
        if self.worker.refused:
            refused, self.worker.refused = self.worker.refused, 0
            self._refused(refused)

    def recover(self) -> int:
        """Settle the tasks of dead workers. Return how many."""
        count = 0
        while orphans := self.store.orphans():
            endings = [self.retries.orphaned(attempt) for attempt in orphans]
            settled = [ending for ending, was_open in zip(endings, self.store.settle(endings), strict=True) if was_open]
            count += len(settled)
            if not settled:
                break  # another process is settling them
            for ending in settled:
                if self.on_recovered is not None and ending.counts:
                    self.on_recovered(outcome_of(ending))
        return count

    def settle(self, ending: Ending) -> bool:
        with self._mutex:
            self._open.pop(ending.id, None)
            if self.buffered and ending.state == "done" and len(self._endings) < _MAX_RESERVED:
                self._endings.append(ending)
                _guard(self)
                return True
            return self._settle([*self._unwritten(), ending])[-1]

    def _settle(self, endings: list[Ending]) -> list[bool]:
        """Write endings. The first ones of them are those in memory."""
        settled = self.store.settle(endings)
        if not all(settled[: len(self._endings)]):
            self._refused(settled[: len(self._endings)].count(False))
        self._endings.clear()
        return settled

    def _refused(self, number: int) -> None:
        log.warning("%d tasks were given to other workers. Their results are refused.", number)
        if self.on_refused is not None:
            self.on_refused(number)

    def drop(self, attempt: Attempt) -> None:
        """Called while garbage is collected, in any place of the program: takes no lock."""
        self._dropped.append(attempt)
        self._open.pop(attempt.id, None)

    def _unwritten(self) -> list[Ending]:
        """The endings in memory. The caller clears them when they are written. If that fails, they stay."""
        while self._dropped:
            self._endings.append(self.retries.failed(self._dropped.popleft(), "its claim was dropped", delay=0.0))
        return self._endings

    @property
    def has_pending(self) -> bool:
        return bool(self._reserved or self._endings or self._dropped)

    def write(self) -> None:
        """Write the endings that are in memory, so that this process reads what it wrote."""
        if (self._endings or self._dropped) and self.registry is process.registry:
            with self._mutex:
                if self._unwritten():
                    self._settle(self._endings)

    def flush(self) -> None:
        """Write endings, and give back reserved tasks."""
        if self.registry is not process.registry:
            return
        with self._mutex:
            endings = [*self._unwritten(), *map(given_back, self._reserved)]
            if endings:
                self._settle(endings)
                self._reserved.clear()

    def close(self) -> None:
        if self.registry is process.registry:
            self.flush()
            if self._worker is not None:
                self._worker.close()
                self._worker = None


class _Guard:
    """A thread that flushes the claimers whose current task takes long, or whose thread has ended."""

    def __init__(self) -> None:
        self.registry = process.registry
        self.claimers: set[Claimer] = set()  # that may have something in memory
        self.needed = threading.Event()
        threading.Thread(target=self._run, name="holdfast-reserved", daemon=True).start()

    def _run(self) -> None:
        seen: dict[int, int] = {}
        pause = _GUARD_S
        while True:
            self.needed.wait()
            threading.Event().wait(pause)
            pending = list(self.claimers)
            if not pending:
                self.needed.clear()
                if self.claimers:
                    self.needed.set()
                continue
            has_failed = False
            for claimer in pending:
                if not claimer.has_pending:
                    self._forget(claimer)
                elif seen.get(id(claimer)) == claimer.begun:
                    has_failed = not self._flush(claimer) or has_failed
            pause = min(2 * pause, _MAX_PAUSE_S) if has_failed else _GUARD_S
            seen = {id(claimer): claimer.begun for claimer in pending}
            pending.clear()
            del claimer

    def _forget(self, claimer: Claimer) -> None:
        self.claimers.discard(claimer)
        if claimer.has_pending:  # since now
            self.claimers.add(claimer)

    def _flush(self, claimer: Claimer) -> bool:
        """False: that failed. The claimer's own thread meets the same error, and raises it."""
        try:
            claimer.flush()
        except FileNotFoundError:
            self.claimers.discard(claimer)  # the queue was deleted
        except Exception:
            return False
        return True


_current: _Guard | None = None


def _guard(claimer: Claimer) -> None:
    global _current
    if _current is None or _current.registry is not process.registry:
        _current = _Guard()
        atexit.register(_flush_all)
    _current.claimers.add(claimer)
    if not _current.needed.is_set():
        _current.needed.set()


def _flush_all() -> None:
    if _current is not None and _current.registry is process.registry:
        for claimer in list(_current.claimers):
            claimer.store.patience = 1.0
            with suppress(HoldfastError, OSError):  # then its tasks are orphans
                claimer.close()
