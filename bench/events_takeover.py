"""How long a subscription stands still when its active consumer is killed, on a directory and on PostgreSQL.

Two processes consume under one name. The active one is killed with SIGKILL. The time goes from before the kill until
the other one has got the event. It is compared with 100 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from measure import Place, Row, Table

from holdfast.events import Event, EventStore

TARGET_S = 0.1


def _consumer(name: str) -> tuple[int, int]:
    """Its pid, and a pipe that has the moment at which it got an event."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for _ in EventStore(name).subscribe("mailer"):
                os.write(writer, f"{time.monotonic():20.9f}".encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    return pid, reader


def _samples(name: str, rounds: int) -> list[float]:
    store = EventStore(name)
    store.append(Event("T"))
    store.close()
    taken = []
    active, reader = _consumer(name)
    os.read(reader, 20)
    for _ in range(rounds):
        os.close(reader)
        following, reader = _consumer(name)
        while not store.subscriptions()[0].waiting:
            time.sleep(0.01)
        killed = time.monotonic()
        os.kill(active, signal.SIGKILL)
        taken.append(float(os.read(reader, 20)) - killed)
        os.waitpid(active, 0)
        active = following
    os.close(reader)
    os.kill(active, signal.SIGKILL)
    os.waitpid(active, 0)
    return taken


def section(quick: bool, places: list[Place]) -> Iterator[Table]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import servers

    rounds = 10 if quick else 50
    server = servers.Postgres.start({})
    try:
        with server.connect("postgres") as connection:
            connection.execute("create database takeover")
        found = {
            "a directory": _samples(f"{places[0].directory}/takeover", rounds),
            "PostgreSQL": _samples(server.url("takeover"), rounds),
        }
    finally:
        server.stop()
    rows = []
    for name, taken in found.items():
        row = Row(name, 1000 * median(taken), "ms", raw=taken, note=f"the longest {1000 * max(taken):.1f} ms")
        row.check("< 100 ms", median(taken) < TARGET_S)
        rows.append(row)
    yield Table("Subscriptions: the next consumer gets the event after a SIGKILL of the active one", rows)
