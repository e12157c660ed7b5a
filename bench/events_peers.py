"""Appends that wait for no disk: `EventStore` beside SQLite, a file per event, eventsourcing and UmaDB."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from events_contest import Contest, at_least, event
from measure import Place, Table

from holdfast.events import Event, EventStore

BATCH = 100
BATCHES_TARGET = 5.0


class Sqlite:
    """The table that a program without an event store would make."""

    journal = "delete"  # as it comes

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute(f"pragma journal_mode = {self.journal}")
        self._db.execute("pragma synchronous = off")
        self._db.execute("create table if not exists events (position integer primary key, id, time, type, tags, data)")

    def append(self, events: list[Event]) -> None:
        db = self._db
        db.execute("begin immediate")
        for one in events:
            tags, data = json.dumps(sorted(one.tags)), json.dumps(one.data)
            db.execute(
                "insert into events (id, time, type, tags, data) values (?, ?, ?, ?, ?)",
                (os.urandom(16).hex(), time.time(), one.type, tags, data),
            )
        db.execute("commit")


class SqliteWal(Sqlite):
    journal = "wal"


class FilePerEvent:
    """One file per event, a ledger, and a file per tag."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        (self._path / "tags").mkdir(parents=True)
        self._head = 0

    def append(self, events: list[Event]) -> None:
        for one in events:
            self._head += 1
            text = json.dumps({"type": one.type, "tags": sorted(one.tags), "data": one.data})
            (self._path / f"{self._head:010d}.json").write_text(text)
            for tag in one.tags:
                with open(self._path / "tags" / tag.replace("/", "_"), "a") as file:
                    file.write(f"{self._head}\n")
        temporary = self._path / "ledger.tmp"
        temporary.write_text(str(self._head))
        temporary.rename(self._path / "ledger")


class Eventsourcing:
    def __init__(self, path: str) -> None:
        from eventsourcing.sqlite import SQLiteApplicationRecorder, SQLiteDatastore

        self._recorder = SQLiteApplicationRecorder(SQLiteDatastore(path))
        self._recorder.create_table()

    def append(self, events: list[Event]) -> None:
        from eventsourcing.persistence import StoredEvent

        self._recorder.insert_events(
            [StoredEvent(uuid4(), 1, one.type, json.dumps(one.data).encode()) for one in events]
        )

    def read(self) -> int:
        count = 0
        while True:
            found = self._recorder.select_notifications(count + 1, 1000)
            for one in found:
                json.loads(one.state)
            count += len(found)
            if len(found) < 1000:
                return count


class EventsourcingDcb:
    """Its DCB recorder, which is in memory (the other one needs PostgreSQL)."""

    def __init__(self, path: str) -> None:
        from eventsourcing.dcb.popo import InMemoryDCBRecorder

        self._recorder = InMemoryDCBRecorder()

    def append(self, events: list[Event]) -> None:
        from eventsourcing.dcb.api import DCBEvent

        self._recorder.append([DCBEvent(one.type, json.dumps(one.data).encode(), sorted(one.tags)) for one in events])


class UmaDb:
    """A server of its own; durable. It is asked by a client of its own, which starts threads: fork before that."""

    def __init__(self, path: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            at = free.getsockname()
        self.address = f"http://127.0.0.1:{at[1]}"
        program = Path(sys.executable).with_name("umadb")
        if not program.exists():
            raise ImportError("no umadb")
        self.process = subprocess.Popen(
            [program, "--listen", f"127.0.0.1:{at[1]}", "--db-path", path],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(200):
            try:
                socket.create_connection(at).close()
                break
            except OSError:
                time.sleep(0.05)

    @cached_property
    def _client(self) -> Any:
        import umadb

        return umadb.Client(self.address)

    def append(self, events: list[Event]) -> None:
        import umadb

        self._client.append([umadb.Event(one.type, json.dumps(one.data).encode(), sorted(one.tags)) for one in events])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Ours:
    def __init__(self, path: str) -> None:
        self._store = EventStore(path, durable=False)

    def append(self, events: list[Event]) -> None:
        self._store.append(events)


OURS, SQLITE = "holdfast: durable=False", "SQLite, synchronous=OFF"
PEERS: dict[str, Any] = {
    OURS: Ours,
    SQLITE: Sqlite,
    "SQLite, synchronous=OFF, with a write-ahead log": SqliteWal,
    "a file per event": FilePerEvent,
    "eventsourcing, SQLite": Eventsourcing,
    "eventsourcing, DCB in memory": EventsourcingDcb,
    "UmaDB (durable)": UmaDb,
}


def side_by_side(quick: bool, place: Place) -> Table:
    made: dict[str, Any] = {}
    for name, kind in PEERS.items():
        try:
            made[name] = kind(f"{place.directory}/{len(made)}")
        except ImportError as error:
            print(f"{name} is left out: {error}")
    single, batches = Contest(20), Contest(4)
    for name, store in made.items():
        single.add(name, lambda n, store=store: store.append([event(n)]))  # type: ignore[misc]
        batches.add(name, lambda n, store=store: store.append([event(i) for i in range(n, n + BATCH)]))  # type: ignore[misc]
    single.run(10 if quick else 40)
    batches.run(5 if quick else 15)
    for store in made.values():
        if hasattr(store, "close"):
            store.close()
    rows = []
    for name in made:
        row = single.row(name, SQLITE)
        if name == OURS:
            at_least(row, 1.0)
        rows.append(row)
    for name in made:
        row = batches.row(name, SQLITE)
        row.name += f", batches of {BATCH}"
        row.value = (row.value or 0) / BATCH
        if name == OURS:
            rate = median(single.samples[SQLITE]) * 1e6 / row.value
            row.check(f"{rate:.1f} x SQLite's single appends, >= {BATCHES_TARGET:g}", rate >= BATCHES_TARGET)
        rows.append(row)
    return Table(f"Appends that wait for no disk, per event, {place.kind}: times SQLite's speed", rows)
