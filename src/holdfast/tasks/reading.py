"""Transactions of the task engines, and the operations that only read. `sql` has those that write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from heapq import merge
from operator import itemgetter
from time import monotonic
from typing import Any, TypeVar

from .. import system
from ..errors import Unsupported
from .statements import DELAYED, NUMBERS, PARKED, READY, STATEMENTS, attempt_of, filled, id_of, number_of, task_of
from .store import NEVER, STATES, Attempt, Changes, Ending, NewTask, Registration, Task, Woken

Result = TypeVar("Result")
Run = Callable[..., Any]  # run(statement, parameters) returns a cursor

PAGE = 500  # tasks that one step of a long operation reads


class Transaction:
    """One transaction: its statements, and what it changed that others must learn of."""

    __slots__ = ("due", "ended", "keys", "now", "only_looked", "ready", "run", "starts")

    def __init__(self, run: Run, now: float) -> None:
        self.run = run
        self.now = now  # of the engine's clock
        self.ready = 0  # tasks that became ready
        self.due = False  # a task became delayed
        self.ended = False  # a task may have ended
        self.only_looked = False  # it has changed nothing that is shown
        self.keys: set[str] = set()  # whose parked tasks may have become ready
        self.starts: dict[str, float] = {}  # by key of a task that starts: seconds until the next start

    def waiting_state(self, key: str | None, due: float | None = None) -> int:
        """The state of a task that waits for its due moment, for its key, or for a worker."""
        if due is not None and due > self.now:
            self.due = True
            return DELAYED
        if key is not None:
            self.keys.add(key)
            return PARKED
        self.ready += 1
        return READY


class Reader(ABC):
    """What an engine adds, and the operations that only read.

    Any thread may call it. A forked child calls it as if it had opened it itself.
    """

    name: str  # for messages: the path, or the URL without a password
    is_local: bool  # all workers are on this machine, so that a live one never counts as dead

    def __init__(self, **clauses: str) -> None:
        self.sql = filled(STATEMENTS, **clauses)
        # Seconds to wait for a server that is away. None: as long as the engine does. Processes that end replace it.
        self.patience: Callable[[], float | None] = lambda: None

    def within(self, seconds: float | None, call: Callable[[], Result]) -> Result:
        """Return what `call` returns. It waits for a server that is away about so long at most."""
        return call()

    # What an engine adds.

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def register(self) -> Registration: ...

    @abstractmethod
    def orphans(self) -> list[Attempt]:
        """The running tasks of all dead workers."""

    @abstractmethod
    def changes(self) -> Changes:
        """Begin to watch for tasks that end."""

    @abstractmethod
    def transact(self, work: Callable[[Transaction], Result], *, sync: bool = True) -> Result:
        """Run `work` in a transaction, and `finish` at its end. sync: if the queue is durable, wait for the disk."""

    @abstractmethod
    def read(self, work: Callable[[Run], Result]) -> Result:
        """Run `work(run)`, which only reads."""

    @abstractmethod
    def now(self) -> float:
        """The clock of due moments, in seconds. It does not jump if the wall clock is set."""

    @abstractmethod
    def insert(self, tx: Transaction, rows: list[tuple[Any, ...]]) -> list[int | None]:
        """Insert tasks and return their numbers. None: another transaction has added a task with that id."""

    @abstractmethod
    def may_have_died(self, worker: Registration, ready: set[int]) -> bool:
        """May a worker have died? ready: what `worker.wait` returned"""

    def lock(self, tx: Transaction, name: str) -> None:  # noqa: B027
        """Keep out other transactions that call this. A no-op where transactions run one by one."""

    def prepare_claim(self) -> None:  # noqa: B027
        """Called before a claim begins."""

    def update_all(self, tx: Transaction, name: str, rows: list[tuple[Any, ...]]) -> None:
        """Run one of `UPDATES`. A row has the values of its columns, and the number of the task."""
        for row in rows:
            tx.run(self.sql[name], row)

    def open_attempts(self, tx: Transaction, endings: Sequence[Ending]) -> list[Any]:
        """The `OPEN_ATTEMPT` of each ending. None: its token is old.

        Other transactions must not change these tasks from now on, nor add tasks that wait for them.
        """
        return [tx.run(*self.by("attempt", ending.id, ending.token)).fetchone() for ending in endings]

    def transact_on(self, connection: Any, work: Callable[[Transaction], Result]) -> Result:
        """Run `work` in the transaction of a connection of the caller."""
        raise Unsupported(f"{self.name}: connection= needs a queue on PostgreSQL, not a directory.", path=self.name)

    def by(self, statement: str, id: str, *more: object) -> tuple[str, tuple[Any, ...]]:
        """A statement that finds a task by its id: the user's own, or the one with its number."""
        seq = number_of(id)
        return (
            (self.sql[f"{statement}_id"], (id, *more)) if seq is None else (self.sql[f"{statement}_seq"], (seq, *more))
        )

    def wait(self, worker: Registration, seconds: float, *others: int) -> Woken:
        """Wait until there may be a task for this worker, a worker may have died, or one of the descriptors `others`
        is readable. Call `claim(idle=True)` before."""
        deadline = monotonic() + seconds
        while True:
            left = min(deadline - monotonic(), worker.recheck_s, max(0.0, worker.until - self.now()))
            ready = worker.wait(left, *others)
            if ready.intersection(others):
                return Woken.OTHER
            if worker.wakeup.fd in ready:
                with suppress(BlockingIOError):
                    system.read(worker.wakeup.fd, 4096)
                return Woken.TASK
            if monotonic() >= deadline:
                return Woken.TIME
            if self.read(self.has_task):  # one is due, or the worker that was woken for it may be stopped
                return Woken.TASK
            if self.may_have_died(worker, ready):
                return Woken.DEATH

    # Look.

    def exists(self, tx: Transaction, task: NewTask) -> bool:
        return task.id is not None and tx.run(*self.by("by", task.id)).fetchone() is not None

    def newest(self, tx: Transaction) -> int:
        """The largest number of a task. The next one is the place behind all tasks so far."""
        seq: int = tx.run(self.sql["newest"]).fetchone()[0]
        return seq

    def time_to_wake(self, run: Run) -> float:
        """The next due moment, for an idle worker. NEVER: there is none, or another idle worker wakes then."""
        due, earliest = run(self.sql["time_to_wake"]).fetchone()
        return NEVER if due is None or (earliest is not None and earliest <= due) else float(due)

    def schedules(self) -> dict[str, tuple[str, float]]:
        """All schedules: the JSON text, and the last moment that was added. 0: none yet."""
        return self.read(lambda run: {name: (text, last) for name, text, last in run(self.sql["schedules"]).fetchall()})

    def running(self, run: Run, worker: str) -> list[Attempt]:
        """The running tasks of a worker. The first one, and all that are not reserved, have begun."""
        rows = run(self.sql["running"], (worker,)).fetchall()
        attempts = [attempt_of(row) for row in rows]
        for place, (attempt, row) in enumerate(zip(attempts, rows, strict=True)):
            attempt.begun = place == 0 or row[-1] == 0
        return attempts

    def cancelling(self) -> dict[tuple[str, int], str]:
        """The workers of running tasks that were cancelled, by id and token."""
        rows = self.read(lambda run: run(self.sql["cancelling"]).fetchall())
        return {(id_of(seq, id), token): worker for seq, id, token, worker in rows}

    def is_paused(self) -> bool:
        return self.read(lambda run: run(self.sql["meta"], ("paused",)).fetchone()) is not None

    def has_task(self, run: Run) -> bool:
        """Is a task ready or due?"""
        return bool(run(self.sql["has_task"], (self.now(),)).fetchone()[0])

    def get(self, ids: Sequence[str]) -> list[Task | None]:
        """Tasks by id. None for an id that does not exist."""
        now = self.now()
        rows = self.read(lambda run: [run(*self.by("stored", id)).fetchone() for id in ids])
        return [None if row is None else task_of(row, now) for row in rows]

    def tasks(self, states: Collection[str] = STATES) -> Iterator[Task]:
        """Tasks in the order in which they were added. Other processes may change them meanwhile."""
        for row in merge(*(self._rows(NUMBERS[state]) for state in states), key=itemgetter(0)):
            yield task_of(row, self.now())

    def _rows(self, state: int) -> Iterator[Any]:
        """In pages, so that no read transaction keeps the write-ahead log from being emptied."""
        after = 0
        page = self.sql["page"].format(state=state)
        while rows := self.read(lambda run: run(page, (after, PAGE)).fetchall()):  # noqa: B023
            yield from rows
            after = rows[-1][0]

    def count(self, states: Collection[str] = STATES, at_most: int | None = None) -> dict[str, int]:
        """How many tasks are in each of the states. at_most: stop counting there."""
        return self.read(lambda run: self._count(run, states, at_most))

    def _count(self, run: Run, states: Collection[str], at_most: int | None) -> dict[str, int]:
        # In one statement, so that a task which changes its state meanwhile is counted once.
        limit = 1 << 62 if at_most is None else at_most
        query = ", ".join(self.sql["count"].format(state=NUMBERS[state], limit=limit) for state in states)
        return dict(zip(states, run(f"select {query}").fetchone(), strict=True))
