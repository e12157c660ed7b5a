"""`Claimer`: takes tasks for one thread, several in one transaction if they are short.

A transaction costs more than a short task. So a thread that works on short tasks reserves the next ones together: as
many as it did in `_RESERVE_S`, at most `_MAX_RESERVED`. A durable queue in SQLite reserves nothing: there the sync of
each ending costs most.

`buffered`: endings are written together, too, with the next claim. That is so with `durable=False`, on both engines.
`gathers`: only the endings that the worker itself settles are. That is so in a `Worker` that runs coroutines, or on
PostgreSQL. `complete` by a handler writes at once.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, sleep

from .. import process
from ..errors import HoldfastError
from .claim import Claim
from .policy import Retries, given_back, outcome_of
from .sql import Store
from .store import Attempt, Ending, Registration, Woken

_RESERVE_S = 0.005
_RESERVE_ON_SERVER_S = 0.050  # a transaction takes a millisecond there
_GATHER_S = 0.020  # the same, if endings wait in memory until the last reserved task has ended
_MAX_RESERVED = 64
_GUARD_S = 0.010
_RETRY_S = 0.1  # after an error
ENDING_PATIENCE_S = 1.0  # with a server that is away, when the process is to end
_RECOVER_EVERY_S = 1.0
_LONG_S = 3600.0

log = logging.getLogger("holdfast")


class Claimer:
    """Takes tasks for one thread. `wait` and `next` are called by that thread, all else by any thread."""

    def __init__(self, store: Store, retries: Retries, *, buffered: bool, reserves: bool) -> None:
        self.store, self.retries, self.buffered = store, retries, buffered
        self.gathers = False
        self.registry = process.registry
        self.mutex = threading.RLock()
        self.begun = 0  # changes with every task
        self.is_guarded = False
        # Called with an outcome and a number: tasks of dead workers, and -n "done" if n buffered endings are refused.
        self.count: Callable[[str, int], object] = lambda outcome, number: None
        self._max_batch = _MAX_RESERVED if reserves else 1
        self._worker: Registration | None = None
        self._reserved: deque[Attempt] = deque()
        self._endings: list[Ending] = []
        self._open: dict[str, int] = {}  # the tokens of claims that have not ended, by id
        self._is_unsure = False  # an error or an interrupt has ended `Store.claim`
        self._batch = 1
        self._begun_before = 0
        self._claimed_at = self._recovered_at = 0.0

    @property
    def worker(self) -> Registration:
        if self._worker is None:
            self._worker = self.store.register()
            if self.buffered or self.gathers:
                _guard(self)  # now: if a task uses up the memory, a thread that starts later may never begin
        return self._worker

    def next(self, *, idle: bool = False) -> Claim | None:
        """The next task. None: no task is ready. idle: `wait` is called then."""
        with self.mutex:
            if not self._reserved:
                per_second = (self.begun - self._begun_before) / max(monotonic() - self._claimed_at, 1e-9)
                self._batch = max(1, min(self._max_batch, 2 * self._batch, int(per_second * self._reserve_s())))
                self._reserved.extend(self._take(self._batch, reserve=True, idle=idle))
                self._begun_before, self._claimed_at = self.begun, monotonic()
                if len(self._reserved) > 1 and not self.is_guarded:
                    _guard(self)
            return self._begin(self._reserved.popleft()) if self._reserved else None

    def _reserve_s(self) -> float:
        if self.store.is_local:
            return _RESERVE_S
        return _GATHER_S if self.buffered or self.gathers else _RESERVE_ON_SERVER_S

    def next_ones(self, count: int) -> list[Claim]:
        """Up to `count` tasks, which all begin now. If there is none, `Store.wait` is called then."""
        with self.mutex:
            return [self._begin(attempt) for attempt in self._take(count, reserve=False, idle=True)]

    def _begin(self, attempt: Attempt) -> Claim:
        self.begun += 1
        self._open[attempt.id] = attempt.token
        return Claim(self, attempt)

    def wait(self, timeout: float | None, *others: int) -> Claim | None:
        """The next task. None: the time is over, or one of the descriptors `others` is readable."""
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            claim = self.next(idle=timeout != 0)
            if claim is not None or timeout == 0:
                return claim
            left = _LONG_S if deadline is None else deadline - monotonic()
            woken = self.store.wait(self.worker, left, *others) if left > 0 else Woken.OTHER
            if woken is Woken.DEATH:
                self.recover()
            elif woken is Woken.OTHER:
                self.worker.leave()
                return None

    def _take(self, count: int, *, reserve: bool, idle: bool) -> list[Attempt]:
        if monotonic() - self._recovered_at > _RECOVER_EVERY_S:
            self._recovered_at = monotonic()
            self.recover()
        if self._is_unsure:
            self._give_lost_back()
        endings = list(self._endings)
        try:
            attempts = self.store.claim(self.worker, count, endings=endings, reserve=reserve, idle=idle)
        except BaseException:
            self._is_unsure = True
            raise
        del self._endings[: len(endings)]
        if self.worker.refused:
            self._refused(self.worker.refused)
            self.worker.refused = 0
        return attempts

    def _give_lost_back(self) -> None:
        """An error or an interrupt may have come when tasks were claimed."""
        known = {*self._open.items(), *((ending.id, ending.token) for ending in self._endings)}
        self.store.end(
            lambda: [self.worker.name],
            lambda running: [given_back(one) for one in running if (one.id, one.token) not in known],
        )
        self._is_unsure = False

    def recover(self) -> int:
        """Settle the tasks of dead workers. Return how many."""
        count = 0
        while orphans := self.store.orphans():
            endings = [self.retries.orphaned(attempt) for attempt in orphans]
            settled = [ending for ending, was_open in zip(endings, self.store.settle(endings), strict=True) if was_open]
            if not settled:
                break  # another process is settling them
            count += len(settled)
            for ending in settled:
                if ending.counts:
                    self.count(outcome_of(ending), 1)
        return count

    def settle(self, ending: Ending, *, may_wait: bool = False) -> bool:
        """False: another worker has the task. may_wait: the caller does not promise that the end is written"""
        with self.mutex:
            may_wait = self.buffered or (self.gathers and may_wait)
            if may_wait and ending.state == "done" and len(self._endings) < _MAX_RESERVED:
                self._endings.append(ending)
                if not self.is_guarded:
                    _guard(self)
                is_mine = True
            else:
                is_mine = self._write([ending])[-1]
            self._open.pop(ending.id, None)
            return is_mine

    def drop(self, attempt: Attempt) -> None:
        """Its claim is collected, in any place of the program: this takes no lock. It is written later."""
        self._endings.append(self.retries.failed(attempt, "its claim was dropped", 0.0))
        self._open.pop(attempt.id, None)

    def _write(self, more: Iterable[Ending]) -> list[bool]:
        """Settle the endings in memory, and then `more`. If that fails, they stay in memory."""
        buffered = list(self._endings)
        endings = [*buffered, *more]
        settled = self.store.settle(endings) if endings else []
        del self._endings[: len(buffered)]
        if refused := settled[: len(buffered)].count(False):
            self._refused(refused)
        return settled

    def _refused(self, number: int) -> None:
        log.warning("%d tasks were given to other workers. Their results are refused.", number)
        self.count("done", -number)

    @property
    def is_busy(self) -> bool:
        """Has it a task to end, or the end of one to write?"""
        return bool(self._open or self._endings)

    @property
    def has_pending(self) -> bool:
        return bool(self._reserved or self._endings)

    def write(self) -> None:
        """Write the endings that are in memory, so that this process reads what it wrote."""
        if self._endings and self.registry is process.registry:
            with self.mutex:
                self._write([])

    def flush(self) -> None:
        """Write endings, and give back reserved tasks."""
        if self.registry is process.registry:
            with self.mutex:
                self._write(map(given_back, self._reserved))
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
        self.claimers: dict[Claimer, int] = {}  # that may have something in memory, with their `begun` at the last look
        self._needed = threading.Event()
        threading.Thread(target=self._run, name="holdfast-reserved", daemon=True).start()

    def add(self, claimer: Claimer, begun: int = -1) -> None:
        claimer.is_guarded = True
        self.claimers[claimer] = begun
        self._needed.set()

    def _run(self) -> None:
        while True:
            self._needed.wait()
            self._needed.clear()
            sleep(_GUARD_S)
            self._look()

    def _look(self) -> None:
        for claimer, begun in list(self.claimers.items()):
            if claimer.begun != begun:
                self.add(claimer, claimer.begun)
                continue
            is_gone = False
            try:
                claimer.flush()  # it stays in `claimers`: if the process ends meanwhile, `_flush_all` waits for it
            except FileNotFoundError:
                is_gone = True  # the queue was deleted
            except Exception:  # the claimer's own thread meets the same error, and raises it
                sleep(_RETRY_S)
            with claimer.mutex:  # its thread may add it again
                if claimer.has_pending and not is_gone:
                    self.add(claimer, claimer.begun)
                else:
                    claimer.is_guarded = False
                    del self.claimers[claimer]


_current: _Guard | None = None


def _guard(claimer: Claimer) -> None:
    global _current
    if _current is None or _current.registry is not process.registry:
        _current = _Guard()
        atexit.register(_flush_all)
    _current.add(claimer)


def _flush_all() -> None:
    if _current is not None and _current.registry is process.registry:
        for claimer in list(_current.claimers):
            claimer.store.patience = lambda: ENDING_PATIENCE_S
            with suppress(HoldfastError, OSError):  # then its tasks are orphans
                claimer.close()
