"""One transaction of a task engine, and the objects that rows of the table `task` become."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from .statements import DELAYED, NAMES
from .store import Attempt, Selection, Stored

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


def stored_of(row: Sequence[Any], now: float) -> Stored:
    due, history = row[12], row[23]
    return Stored(
        id=id_of(row[0], row[1]),
        state=NAMES[row[2]],
        payload_json=row[3],
        function=row[4],
        priority=row[5],
        attempts=row[6],
        tried=row[7],
        token=row[8],
        timeout=row[9],
        key=row[10],
        limit=row[11],
        due_in=None if due is None or row[2] != DELAYED else max(0.0, due - now),
        worker=row[13],
        result_json=row[14],
        error=row[15],
        traceback=row[16],
        output=row[17],
        progress_json=row[18],
        put_at=row[19],
        started_at=row[20],
        ended_at=row[21],
        cancelling=bool(row[22]),
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
