"""One transaction of a task engine, and the objects that rows of the table `task` become."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from .statements import DELAYED, NAMES, PARKED, READY
from .store import WAITING, Attempt, Selection, Task

NEVER = 1e300  # a moment
MAX_HISTORY = 20  # earlier attempts that are kept


class Transaction:
    """One transaction: its statements, and what it changed that others must learn of."""

    __slots__ = ("due", "ended", "first", "keys", "now", "ready", "run")

    def __init__(self, run: Callable[..., Any], now: float) -> None:
        self.run = run  # run(statement, parameters) returns a cursor
        self.now = now  # of the engine's clock
        self.ready = 0  # tasks that became ready
        self.due = False  # a task became delayed
        self.ended = False  # a task may have ended
        self.first: Sequence[Any] = ()  # cursors of statements that were sent with the begin
        self.keys: set[str] = set()  # whose parked tasks may have become ready

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


def number_of(id: str) -> int | None:
    """The number of a task whose id was chosen by the engine. None: the id was chosen by the caller."""
    digits = id[1:]
    return int(digits) if id[:1] == "_" and digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def id_of(seq: int, id: str | None) -> str:
    return f"_{seq}" if id is None else id


def attempt_of(row: Sequence[Any]) -> Attempt:
    seq, id, token, payload, function, priority, attempts, tried, timeout, key = row[:10]
    return Attempt(
        f"_{seq}" if id is None else id,
        token,
        payload,
        function,
        priority,
        attempts,
        tried,
        timeout,
        key,
    )


def task_of(row: Sequence[Any], now: float) -> Task:
    state, result, progress, history = NAMES[row[2]], row[14], row[18], row[23]
    is_waiting = state in WAITING
    return Task(
        id=id_of(row[0], row[1]),
        payload=json.loads(row[3]),
        state="pending" if is_waiting else state,
        waits=state if is_waiting and state != "ready" else None,
        due_in=max(0.0, row[12] - now) if state == "delayed" else None,
        function=row[4],
        priority=row[5],
        attempts=row[6],
        tried=row[7],
        timeout=row[9],
        key=row[10],
        limit=row[11],
        token=row[8],
        worker=row[13],
        cancelling=bool(row[22]),
        result=None if result is None else json.loads(result),
        error=row[15],
        traceback=row[16],
        output=row[17],
        progress=None if progress is None else tuple(json.loads(progress)),
        put_at=datetime.fromtimestamp(row[19], timezone.utc),
        started_at=None if row[20] is None else datetime.fromtimestamp(row[20], timezone.utc),
        ended_at=None if row[21] is None else datetime.fromtimestamp(row[21], timezone.utc),
        history=() if history is None else tuple(json.loads(history)),
    )


def ended_before(row: Sequence[Any], which: Selection) -> bool:
    return which.ended_before is None or (row[21] is not None and row[21] < which.ended_before)


def with_attempt(
    history: str | None, token: int, worker: str | None, started: Any, ended: Any, state: str, error: str | None
) -> str:
    """The history of a task with one more attempt."""
    past = [] if history is None else json.loads(history)
    past.append(
        {"token": token, "worker": worker, "started_at": started, "ended_at": ended, "state": state, "error": error}
    )
    return json.dumps(past[-MAX_HISTORY:])
