"""Lists and counts of tasks whose cost does not grow with the queue: pages, windows, capped counts.

A list goes from the newest task to the oldest one, and stops after a page. A filter that no index answers (function,
key, text) looks at the newest `WINDOW` tasks. `Found.next` is where the following page begins, also if the window of
this one contained nothing.

The indexes of ready, delayed and parked tasks are in another order. If there are many of them, the window is one of
all tasks: many of its tasks are in that state, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import time
from typing import Any

from .. import system
from ..tasks import Task, TaskQueue
from ..tasks.statements import NUMBERS, id_of, task_of
from ..tasks.store import STATES, WAITING

WINDOW = 10_000  # tasks that one page of a filtered list looks at
_UNORDERED = ("ready", "delayed", "parked")  # by their number
MAX_COUNT = 10_000
MAX_RUNNING = 500
_MAX_ENDED = 20_000
_FIRST = 1 << 62
MINUTES = 60


@dataclass(frozen=True)
class Filter:
    """Which tasks. An empty text means any."""

    state: str = ""  # "pending", "running", "done", "failed", "cancelled"
    function: str = ""
    key: str = ""
    text: str = ""  # in the id, the function, the payload or the error
    in_data: bool = True  # False: `text` is not compared with payloads and errors, because parts of them are secret

    @property
    def states(self) -> tuple[str, ...]:
        return WAITING if self.state == "pending" else (self.state,) if self.state else STATES

    @property
    def needs_window(self) -> bool:
        return bool(self.function or self.key or self.text)

    def values(self) -> tuple[object, ...]:
        function, key = self.function or None, self.key or None
        escaped = "".join(f"!{char}" if char in "!%_" else char for char in self.text.lower())
        text = f"%{escaped}%" if self.text else None
        return (function, function, key, key, text, int(self.in_data), text)


@dataclass(frozen=True)
class Found:
    """A page of tasks. `next`: the following page begins before this number; None: this page is the last one.

    searched: the page ends because a window ended, and not because it is full
    """

    tasks: tuple[Task, ...]
    next: int | None
    searched: bool


def search(queue: TaskQueue, wanted: Filter, before: int | None = None, limit: int = 50) -> Found:
    """A page of the tasks that match, newest first."""
    rows, following, searched = _search(queue, wanted, before, limit)
    now = queue.store.now()
    return Found(tuple(task_of(row, now) for row in rows), following, searched)


def _search(queue: TaskQueue, wanted: Filter, before: int | None, limit: int) -> tuple[list[Any], int | None, bool]:
    sql, start = queue.store.sql, before or _FIRST
    counts = queue.store.count(wanted.states, at_most=WINDOW)
    states = [state for state in wanted.states if counts[state]]

    def work(run: Any) -> tuple[list[Any], int]:
        rows: list[Any] = []
        end = 0
        for state in states:
            of_all = state in _UNORDERED and counts[state] == WINDOW
            size = WINDOW // len(states) if of_all or wanted.needs_window else limit + 1
            number = NUMBERS[state]
            words = {"state": number, "of_state": "" if of_all else f"state = {number} and", "limit": size}
            some = run(sql["search"].format(**words), (start, *wanted.values(), limit + 1)).fetchall()
            rows += some
            if (of_all or wanted.needs_window) and len(some) <= limit:
                lowest, seen = run(sql["window"].format(**words), (start,)).fetchone()
                end = max(end, lowest if seen == size else 0)
        return rows, end

    rows, end = queue.store.read(work)
    rows = sorted((row for row in rows if row[0] >= end), key=lambda row: -int(row[0]))
    if len(rows) > limit:
        return rows[:limit], rows[limit - 1][0], False
    return rows, end or None, bool(end)


def matching(queue: TaskQueue, wanted: Filter) -> Iterator[list[str]]:
    """The ids of all tasks that match, in pages, newest first."""
    before = None
    while True:
        rows, before, _ = _search(queue, wanted, before, 500)
        if rows:
            yield [id_of(row[0], row[1]) for row in rows]
        if before is None:
            return


def count_matching(queue: TaskQueue, wanted: Filter, at_most: int = MAX_COUNT) -> int:
    """How many tasks match. Counting stops at `at_most`."""
    if not wanted.needs_window:
        counts = queue.store.count(wanted.states, at_most=at_most)
        return min(at_most, sum(counts.values()))
    number = 0
    for some in matching(queue, wanted):
        number += len(some)
        if number >= at_most:
            return at_most
    return number


def counts_of(queue: TaskQueue, at_most: int = MAX_COUNT) -> dict[str, int]:
    """The number of tasks in each state. Counting stops at `at_most`. `pending` contains the states after it."""
    counts = queue.store.count(at_most=at_most)
    pending = min(at_most, sum(counts[state] for state in WAITING))
    return {"pending": pending, **counts}


@dataclass(frozen=True)
class Throughput:
    """Tasks that ended in each of the last 60 minutes, the current one last."""

    done: tuple[int, ...]
    failed: tuple[int, ...]
    is_whole: bool  # False: only the newest tasks were looked at, and they all ended within the hour


def throughput(queue: TaskQueue) -> Throughput:
    """What the newest tasks tell about the last hour. There is no index of the moments at which tasks ended."""
    now = time()
    is_whole = True
    found: dict[str, tuple[int, ...]] = {}
    for state in ("done", "failed"):
        query = queue.store.sql["ended"].format(state=NUMBERS[state], limit=_MAX_ENDED)
        rows = queue.store.read(lambda run: run(query, (now - 60 * MINUTES,)).fetchall())  # noqa: B023
        minutes = [0] * MINUTES
        for minute, number in rows:
            minutes[max(0, MINUTES - 1 - max(0, int(now // 60) - minute))] += number
        found[state] = tuple(minutes)
        is_whole = is_whole and sum(minutes) < _MAX_ENDED
    return Throughput(found["done"], found["failed"], is_whole)


@dataclass(frozen=True)
class WorkerState:
    """A worker: what it runs, or that it waits, or that it is dead."""

    name: str
    state: str  # "busy", "idle", "dead"
    tasks: tuple[Task, ...]


def workers_of(queue: TaskQueue, running: tuple[Task, ...], orphans: frozenset[str]) -> list[WorkerState]:
    """The workers that run a task or wait for one."""
    names = {row[0] for row in queue.store.read(lambda run: run(queue.store.sql["idle_workers"]).fetchall())}
    if queue.store.is_local:
        try:
            names.update(system.listdir(f"{queue.path}/workers"))
        except OSError:
            pass
    by_worker: dict[str, list[Task]] = {name: [] for name in names}
    for task in running:
        by_worker.setdefault(task.worker or "?", []).append(task)
    return [
        WorkerState(
            name,
            "dead" if any(task.id in orphans for task in tasks) else "busy" if tasks else "idle",
            tuple(tasks),
        )
        for name, tasks in sorted(by_worker.items())
    ]


def running_tasks(queue: TaskQueue) -> tuple[Task, ...]:
    """The running tasks, those that began first first. At most `MAX_RUNNING`."""
    found = search(queue, Filter("running"), limit=MAX_RUNNING).tasks
    return tuple(sorted(found, key=lambda task: (task.started_at or task.put_at, task.id)))


def newest(queue: TaskQueue, state: str, number: int) -> tuple[Task, ...]:
    """The newest tasks in a state."""
    return search(queue, Filter(state), limit=number).tasks
