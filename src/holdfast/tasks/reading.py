"""What all SQL engines read. `sql` has what they write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any, TypeVar

from .rows import NEVER, Transaction, id_of, number_of, task_of
from .statements import NUMBERS, STATEMENTS
from .store import OPEN, STATES, Store, Task

Result = TypeVar("Result")

PAGE = 500  # tasks that one step of a long operation reads


class SqlReader(Store):
    """The statements of an engine, and the operations that only read."""

    least_token = 0  # all new tokens are greater

    def __init__(self, *, prefix: str, mark: str, lock: str, skip: str, share: str) -> None:
        self.sql: dict[str, str] = {}
        clauses = {"p": prefix, "lock": lock, "skip": skip, "share": share, "state": "{state}"}
        for name, text in STATEMENTS.items():
            kinds = {f"{name}_id": "id = ?", f"{name}_seq": "seq = ? and id is null"} if "{by}" in text else {name: ""}
            for kind, by in kinds.items():
                self.sql[kind] = " ".join(text.format(by=by, **clauses).split()).replace("?", mark)
        self.prefix = prefix

    # What an engine adds.

    @abstractmethod
    def transact(self, work: Callable[[Transaction], Result], *, sync: bool = True) -> Result:
        """Run `work` in a transaction, and `finish` at its end. sync: if the queue is durable, wait for the disk."""

    @abstractmethod
    def read(self, work: Callable[[Callable[..., Any]], Result]) -> Result:
        """Run `work(run)`, which only reads."""

    @abstractmethod
    def now(self) -> float:
        """The clock of due moments, in seconds. It does not jump if the wall clock is set."""

    def lock_key(self, tx: Transaction, key: str) -> None:
        """Keep other transactions from admitting tasks with this key. A no-op where transactions run one by one."""

    def may_prune(self, tx: Transaction) -> bool:
        """False: another transaction is pruning now."""
        return True

    def find(self, run: Callable[..., Any], id: str, statement: str, *more: object) -> Any:
        """The first row of a statement that finds a task by its id: the user's own, or the one with its number."""
        seq = number_of(id)
        if seq is None:
            return run(self.sql[f"{statement}_id"], (id, *more)).fetchone()
        return run(self.sql[f"{statement}_seq"], (seq, *more)).fetchone()

    def time_to_wake(self, run: Callable[..., Any]) -> float:
        """The next due moment, for an idle worker. NEVER: there is none, or another idle worker wakes then."""
        due, earliest = run(self.sql["time_to_wake"]).fetchone()
        return NEVER if due is None or (earliest is not None and earliest <= due) else float(due)

    def is_paused(self) -> bool:
        return self.read(lambda run: run(self.sql["meta"], ("paused",)).fetchone()) is not None

    def get(self, ids: Sequence[str]) -> list[Task | None]:
        now = self.now()
        rows = self.read(lambda run: [self.find(run, id, "stored") for id in ids])
        return [None if row is None else task_of(row, now) for row in rows]

    def tasks(self, states: Collection[str] = STATES) -> Iterator[Task]:
        for row in merge(*(self._rows(NUMBERS[state]) for state in states), key=itemgetter(0)):
            yield task_of(row, self.now())

    def _rows(self, state: int) -> Iterator[Any]:
        """In pages, so that no read transaction keeps the write-ahead log from being emptied."""
        after = 0
        page = self.sql["page"].format(state=state)
        while rows := self.read(lambda run: run(page, (after, PAGE)).fetchall()):  # noqa: B023
            yield from rows
            after = rows[-1][0]

    def count(self) -> dict[str, int]:
        # In one statement, so that a task which changes its state meanwhile is counted once.
        query = ", ".join(f"({self.sql['count'].format(state=state)})" for state in NUMBERS.values())
        return dict(zip(NUMBERS, self.read(lambda run: run(f"select {query}").fetchone()), strict=True))

    def is_empty(self) -> bool:
        states = [f"exists (select 1 from {self.prefix}task where state = {NUMBERS[name]})" for name in OPEN]
        return not self.read(lambda run: run(f"select {' or '.join(states)}").fetchone()[0])

    def schedules(self) -> dict[str, tuple[str, float]]:
        return self.read(lambda run: {name: (text, last) for name, text, last in run(self.sql["schedules"]).fetchall()})

    def is_cancelling(self, id: str, token: int) -> bool | None:
        row = self.read(lambda run: self.find(run, id, "is_cancelling", token))
        return None if row is None else bool(row[0])

    def cancelling(self) -> list[tuple[str, int]]:
        rows = self.read(lambda run: run(self.sql["cancelling"]).fetchall())
        return [(id_of(seq, id), token) for seq, id, token in rows]
