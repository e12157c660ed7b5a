"""`EventStore` on PostgreSQL beside the PostgreSQL recorder of eventsourcing, on one server, with fsync.

Each process appends one event after the other, under the condition that no event of this type has this tag yet. The
contestants take turns, each with a new database in every round, and in a random order. A ratio is the median of the
ratios within a round. Beside them is the floor: transactions that each insert one small row.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from events_contest import rate
from measure import Place, Row, Table, paired_ratio, run_children

from holdfast.events import AppendCondition, Event, EventStore, Query

OURS, NOT_DURABLE = "holdfast", "holdfast, durable=False"
EVENTSOURCING, FLOOR = "eventsourcing, PostgresDCBRecorderTT", "one insert in a transaction"
PROCESSES = (1, 8)

Append = Callable[[str], object]


def _holdfast(url: str, durable: bool = True) -> Append:
    store = EventStore(url, lock_timeout=60, durable=durable)

    def append(name: str) -> None:
        condition = AppendCondition(Query.of(types={"OrderPlaced"}, tags={f"order:{name}"}))
        store.append(Event("OrderPlaced", {"id": name}, tags={f"order:{name}", "shop:1"}), condition)

    return append


def _eventsourcing(url: str) -> Append:
    from eventsourcing.dcb.api import DCBAppendCondition, DCBEvent, DCBQuery, DCBQueryItem
    from eventsourcing.dcb.postgres_tt import PostgresDCBRecorderTT
    from eventsourcing.persistence import InternalError
    from eventsourcing.postgres import PostgresDatastore

    at = urlsplit(url)
    words: Any = (at.path[1:], at.hostname, at.port, at.username, at.password)
    recorder = PostgresDCBRecorderTT(PostgresDatastore(*words))
    while True:
        try:
            recorder.create_table()
            break
        except InternalError:  # several processes replace the same function
            time.sleep(0.01)

    def append(name: str) -> None:
        item = DCBQueryItem(types=["OrderPlaced"], tags=[f"order:{name}"])
        condition = DCBAppendCondition(fail_if_events_match=DCBQuery(items=[item]))
        data, tags = json.dumps({"id": name}).encode(), [f"order:{name}", "shop:1"]
        recorder.append([DCBEvent(type="OrderPlaced", data=data, tags=tags)], condition)

    return append


def _floor(url: str) -> Append:
    import psycopg

    connection = psycopg.connect(url, autocommit=True)
    connection.execute("create table if not exists floor (name text)")
    return lambda name: connection.execute("insert into floor values (%s)", [name])


CONTESTANTS: dict[str, Callable[[str], Append]] = {
    FLOOR: _floor,
    OURS: _holdfast,
    NOT_DURABLE: lambda url: _holdfast(url, False),
    EVENTSOURCING: _eventsourcing,
}


def _round(server: Any, name: str, processes: int, seconds: float) -> float:
    """Seconds per append, of all processes together."""
    with server.connect("postgres", user="postgres") as admin:
        admin.execute("drop database if exists bench with (force)")
        admin.execute("create database bench owner tester")
        url = server.url("bench")
        run_children(1, lambda _: CONTESTANTS[name](url)("first") and None)
        admin.execute("checkpoint")

        return 1 / sum(run_children(processes, lambda child: rate(CONTESTANTS[name](url), seconds, child)))


def section(quick: bool, _: list[Place]) -> Iterator[Table]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import servers

    contestants = dict(CONTESTANTS)
    try:
        import eventsourcing.dcb.postgres_tt  # noqa: F401
    except ImportError as error:
        print(f"{EVENTSOURCING} is left out: {error}")
        del contestants[EVENTSOURCING]
    server = servers.Postgres.start({})
    try:
        for processes in PROCESSES:
            samples: dict[str, list[float]] = {name: [] for name in contestants}
            for turn in range((2 if quick else 7) + 1):
                for name in random.sample(list(contestants), len(contestants)):
                    taken = _round(server, name, processes, 1.0 if quick else 2.0)
                    if turn:  # the first round warms up
                        samples[name].append(taken)
            yield _table(samples, processes)
    finally:
        server.stop()


def _table(samples: dict[str, list[float]], processes: int) -> Table:
    rows = []
    for name, mine in samples.items():
        row = Row(name, 1 / median(mine), "/s", paired_ratio(samples[FLOOR], mine), raw=mine)
        if name == OURS and EVENTSOURCING in samples:
            ahead = paired_ratio(samples[EVENTSOURCING], mine)
            row.check(f"{ahead:.2f} x eventsourcing, >= 1 x", ahead >= 1)
        rows.append(row)
    many = "1 process" if processes == 1 else f"{processes} processes"
    return Table(f"Conditional appends on PostgreSQL, fsync on, {many}: times the floor", rows)
