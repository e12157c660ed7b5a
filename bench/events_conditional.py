"""Durable conditional appends on one machine, by 1 and by 8 processes, beside eventsourcing on SQLite and UmaDB.

Each process appends one event after the other, under the condition that no event of this type has this tag yet.
eventsourcing on SQLite has no such condition: there an append is the first event of a new aggregate, which fails if the
aggregate has events. UmaDB is a server. All of them wait for the disk before an append returns. They take turns, each
with a new store. The floor is one process that writes the same bytes and calls fdatasync.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from uuid import uuid4

from events_contest import line_of, rate, raw_appender
from events_peers import UmaDb
from measure import Place, Row, Table, paired_ratio, run_children

from holdfast.events import AppendCondition, Event, EventStore, Query

OURS, FLOOR = "EventStore", "write + fdatasync, 1 process"
PROCESSES = (1, 8)
TYPE = "OrderPlaced"

Append = Callable[[str], object]


def _ours(path: str) -> Append:
    store = EventStore(path, lock_timeout=60)

    def append(name: str) -> None:
        condition = AppendCondition(Query.of(types={TYPE}, tags={f"order:{name}"}))
        store.append(Event(TYPE, {"id": name}, tags={f"order:{name}", "shop:1"}), condition)

    return append


def _eventsourcing(path: str) -> Append:
    from eventsourcing.persistence import StoredEvent
    from eventsourcing.sqlite import SQLiteApplicationRecorder, SQLiteDatastore

    recorder = SQLiteApplicationRecorder(SQLiteDatastore(path, lock_timeout=60))
    recorder.create_table()
    return lambda name: recorder.insert_events([StoredEvent(uuid4(), 1, TYPE, json.dumps({"id": name}).encode())])


def _umadb(address: str) -> Append:
    import umadb

    client = umadb.Client(address)

    def append(name: str) -> None:
        tags = [f"order:{name}"]
        condition = umadb.AppendCondition(umadb.Query([umadb.QueryItem(types=[TYPE], tags=tags)]), None)
        client.append([umadb.Event(TYPE, json.dumps({"id": name}).encode(), [*tags, "shop:1"])], condition)

    return append


CONTESTANTS: dict[str, Callable[[str], Append]] = {
    OURS: _ours,
    "eventsourcing, SQLite": _eventsourcing,
    "UmaDB": _umadb,
}


def _round(name: str, path: str, processes: int, seconds: float) -> float:
    """Seconds per append, of all processes together."""
    server = UmaDb(path) if name == "UmaDB" else None
    place = path if server is None else server.address
    try:
        run_children(1, lambda _: CONTESTANTS[name](place)("first") and None)
        rates = run_children(processes, lambda child: rate(CONTESTANTS[name](place), seconds, child), limit=90)
        return 1 / sum(rates)
    finally:
        if server is not None:
            server.close()


def section(quick: bool, place: Place) -> Iterator[Table]:
    raw = raw_appender(place.directory, line_of(place.directory))
    seconds = 1.0 if quick else 2.0
    for processes in PROCESSES:
        samples: dict[str, list[float]] = {FLOOR: [], **{name: [] for name in CONTESTANTS}}
        for turn in range(2 if quick else 5):
            samples[FLOOR].append(1 / rate(lambda _: raw(0), seconds / 2))
            for name in random.sample(list(CONTESTANTS), len(CONTESTANTS)):
                path = Path(place.directory, f"{processes}-{turn}-{len(name)}")
                samples[name].append(_round(name, str(path), processes, seconds))
        yield _table(samples, processes)


def _table(samples: dict[str, list[float]], processes: int) -> Table:
    rows = []
    for name, mine in samples.items():
        row = Row(name, 1 / median(mine), "/s", paired_ratio(samples[FLOOR], mine), raw=mine)
        if name not in (OURS, FLOOR):
            ahead = paired_ratio(mine, samples[OURS])
            row.check(f"EventStore is {ahead:.2f} x as fast, >= 1 x", ahead >= 1)
        rows.append(row)
    many = "1 process" if processes == 1 else f"{processes} processes"
    return Table(f"Durable conditional appends in a directory, {many}: times the floor", rows)
