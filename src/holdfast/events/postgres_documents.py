"""What an event store in PostgreSQL keeps besides its events: the documents of projections, and checkpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .. import postgres
from ..errors import Timeout
from ..locks.url import ServerLock
from .engine import Checkpoint, Document

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .postgres import PostgresEngine

    Result = TypeVar("Result")


class Row(Document):
    """A document in a row."""

    def __init__(self, engine: PostgresEngine, session: postgres.Session, name: str) -> None:
        self._engine, self._session, self._name = engine, session, name
        self.where = f"the projection {name!r} of {engine.name}"

    def _do(self, work: Callable[[Any], Result]) -> Result:
        try:
            return work(self._session.connection.execute)
        except psycopg.Error as error:
            if postgres.is_lost(error):
                raise postgres.failure(self._engine.url, error) from None
            raise postgres.explain(self._engine.name, error, "store") from error

    def begin(self) -> None:
        """Acquire the lock, and load the content."""
        timeout = self._engine.options.lock_timeout
        limit = 0 if timeout is None else max(1, int(timeout * 1000))

        def work(run: Any) -> Any:
            run(f"set lock_timeout = {limit}")
            try:
                run("select pg_advisory_lock(hashtextextended(%s, 1))", [f"{self._engine.id} {self._name}"])
            except psycopg.errors.LockNotAvailable:
                return None
            run("set lock_timeout = 0")
            if not self._engine.options.durable:
                run("set synchronous_commit = off")
            return run(self._engine.sql["load"], [self._name]).fetchall()

        rows = self._do(work)
        if rows is None:
            text = f"{self.where}: not acquired within {timeout or 0:g} s. Another process brings it up to date."
            raise Timeout(text, path=self._engine.name)
        self.content = bytes(rows[0][0]) if rows else None

    def save(self, content: bytes) -> None:
        self._do(lambda run: run(self._engine.sql["save"], (self._name, content)))


class RowCheckpoint(Checkpoint):
    """A checkpoint in a row. Its lock is one of `holdfast.lock`."""

    def __init__(self, engine: PostgresEngine, name: str) -> None:
        self._engine, self._name = engine, name
        self.where = f"the subscription {name!r} of {engine.name}"
        lock = quote(f"subscription {name} {engine.id}", safe="")
        self.lock = ServerLock(f"{engine.url}{'&' if '?' in engine.url else '?'}name={lock}")

    def _do(self, statement: str, *values: object) -> Any:
        return self._engine.look(lambda run: run(self._engine.sql[statement], values))

    def position(self) -> int | None:
        row = self._do("checkpoint", self._name).fetchone()
        return None if row is None else int(row[0])

    def create(self, position: int) -> None:
        self._do("create_checkpoint", self._name, position)

    def save(self, position: int) -> None:
        self._do("save_checkpoint", position, self._name)

    def remove(self) -> None:
        self._do("remove_checkpoint", self._name)
