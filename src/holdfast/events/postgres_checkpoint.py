"""The checkpoint of a subscription to an event store in PostgreSQL: a row, and a lock of `holdfast.lock`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..locks.url import ServerLock
from .engine import Checkpoint

if TYPE_CHECKING:
    from .postgres import PostgresEngine


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
