"""Durable appends by 1 to 16 processes, to an `EventStore` and to an SQLite table that syncs each commit.

The floor is one process that writes the same bytes and calls fdatasync. All of them take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from events_contest import event, line_of, raw_appender
from events_peers import Sqlite
from measure import Place, Row, Table, run_children

from holdfast.events import EventStore

WRITERS = (1, 2, 4, 8, 16)
FLOOR = "write + fdatasync, 1 process"


class DurableSqlite(Sqlite):
    journal = "wal"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._db.execute("pragma synchronous = full")
        self._db.execute("pragma busy_timeout = 60000")


def _ours(path: str) -> Callable[[int], object]:
    store = EventStore(path, lock_timeout=60)
    return lambda number: store.append(event(number))


def _sqlite(path: str) -> Callable[[int], object]:
    table = DurableSqlite(f"{path}.sqlite")
    return lambda number: table.append([event(number)])


STORES: dict[str, Callable[[str], Callable[[int], object]]] = {"EventStore": _ours, "SQLite, synchronous=FULL": _sqlite}


def _rate(append: Callable[[int], object], seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        append(count)
        count += 1
    return count / (time.perf_counter() - began)


def section(quick: bool, place: Place) -> Table:
    seconds, turns = (0.5, 1) if quick else (1.0, 3)
    raw = raw_appender(place.directory, line_of(place.directory))
    floors: list[float] = []
    rates: dict[tuple[str, int], list[float]] = {}
    for turn in range(turns):
        floors.append(_rate(raw, seconds))
        for writers in WRITERS:
            for name, opened in STORES.items():
                path = f"{place.directory}/{writers}-{turn}"
                opened(path)(0)  # makes it

                def work(_: int, opened: Callable[[str], Callable[[int], object]] = opened, path: str = path) -> float:
                    return _rate(opened(path), seconds)

                rates.setdefault((name, writers), []).append(sum(run_children(writers, work, limit=90)))
    rows = [Row(FLOOR, median(floors), "/s", 1.0, raw=floors)]
    for (name, writers), mine in rates.items():
        ratio = median(rate / floor for rate, floor in zip(mine, floors, strict=True))
        rows.append(Row(f"{name}, {writers}", median(mine), "/s", ratio, series=name, at=writers, raw=mine))
    return Table(f"Durable appends a second by the number of writers, {place.kind}: times the floor", rows)
