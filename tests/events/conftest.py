"""Where the tests of events make their stores: `place` runs a test once for each engine."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support import Waited

from holdfast import Lock
from holdfast.events import Event, EventStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class LogPlace:
    """Where stores of this engine are made. An engine on a server has a class with the same methods."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory / "shop")

    def store(self, **options: Any) -> EventStore:
        return EventStore(self.name, **options)

    def locked(self) -> AbstractContextManager[object]:
        """As if another process were in the middle of an append."""
        return Lock(f"{self.name}/.store.lock", keep=True)

    def has_waiter(self, waits: list[Waited]) -> bool:
        return bool(waits)


class PostgresPlace:
    def __init__(self, url: str) -> None:
        self.name = url

    def store(self, **options: Any) -> EventStore:
        return EventStore(self.name, **options)

    @contextmanager
    def locked(self) -> Iterator[object]:
        """Another transaction has appended, and is not committed yet."""
        with psycopg.connect(self.name) as connection:
            self.store().append(Event("Other"), connection=connection)
            yield
            connection.rollback()

    def has_waiter(self, waits: list[Waited]) -> bool:
        with psycopg.connect(self.name) as connection:
            return bool(connection.execute("select 1 from pg_locks where not granted").fetchall())


@pytest.fixture(params=["log", "postgres"])
def place(request: pytest.FixtureRequest) -> Any:
    if request.param == "log":
        return LogPlace(request.getfixturevalue("in_memory"))
    return PostgresPlace(request.getfixturevalue("postgres"))
