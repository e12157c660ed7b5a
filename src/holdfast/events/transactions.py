"""The checkpoint of a subscription in the consumer's own database, in the transaction of the work.

    begin                  the table is there, and the row of the subscription. Nothing is open
    advance(41, 42)        the transaction begins with the checkpoint, from 41 to 42
    … the consumer handles event 42 in this transaction …
    commit(42)             both are there, or neither of them

`advance` changes nothing if the row is not at 41: another consumer has handled the event. `commit` looks whether the
row is still at 42: the consumer may have rolled back. Then the event comes again.

Each method is a generator of steps (`wait`): the calls of a `psycopg.AsyncConnection` are coroutines.
"""

from __future__ import annotations

import sqlite3
import sys
from inspect import isawaitable
from typing import Any

from .. import wait

TABLE = "holdfast_subscription"
_CREATE = f"create table if not exists {TABLE} (store text, name text, position bigint, primary key (store, name))"
_WHERE = "where store = %s and name = %s"


class _Ask(wait.Run):
    """A call of the connection, which is a coroutine if the connection is asynchronous."""

    __slots__ = ()

    async def wait(self) -> None:
        self.block()
        if isawaitable(self._result):
            self._result = await self._result


class Transaction:
    """The connection of a consumer, and the row of its subscription."""

    def __init__(self, connection: Any, store: str, name: str) -> None:
        self._connection, self._row = connection, (store, name)
        self._psycopg: Any = sys.modules.get("psycopg")  # None: so this cannot be one of its connections
        self.is_sqlite = isinstance(connection, sqlite3.Connection)
        self.is_async = self._psycopg is not None and isinstance(connection, self._psycopg.AsyncConnection)
        is_psycopg = self._psycopg is not None and isinstance(connection, self._psycopg.BaseConnection)
        if not self.is_sqlite and not is_psycopg:
            raise TypeError(
                "connection= of a subscription is a psycopg.Connection, a psycopg.AsyncConnection or a "
                f"sqlite3.Connection, not {type(connection).__name__}"
            )

    def begin(self, position: int) -> wait.Steps[int]:
        """Make the row, with this position, if it is not there. Return its position."""
        self._check_is_idle()
        if self.is_sqlite:
            yield from self._run(_CREATE)
        elif not (yield from self._run("select 1 from pg_class where oid = to_regclass(%s)", TABLE))[0]:
            yield from self._run("select pg_advisory_xact_lock(hashtextextended(%s, 0))", TABLE)
            yield from self._run(_CREATE)
        insert = f"insert into {TABLE} (store, name, position) values (%s, %s, %s) on conflict do nothing"
        yield from self._run(insert, *self._row, position)
        ((found,),) = (yield from self._run(f"select position from {TABLE} {_WHERE}", *self._row))[0]
        yield from self._call(self._connection.commit)
        return int(found)

    def _check_is_idle(self) -> None:
        wrong = ""
        if self.is_sqlite:
            if self._connection.isolation_level is None or getattr(self._connection, "autocommit", -1) is True:
                wrong = "is in autocommit mode"
            elif self._connection.in_transaction:
                wrong = "is in a transaction. Commit or roll back before"
        elif self._connection.autocommit:
            wrong = "is in autocommit mode"
        elif not self._is("IDLE"):
            wrong = "is in a transaction. Commit or roll back before"
        if wrong:
            raise ValueError(f"connection= of a subscription: each event is a transaction, and this connection {wrong}")

    def _is(self, status: str) -> bool:
        """Has the connection of psycopg this status?"""
        return not self.is_sqlite and bool(self._connection.info.transaction_status.name == status)

    def advance(self, old: int, new: int) -> wait.Steps[bool]:
        """Begin the transaction of an event. False: the row is not where it was; the transaction is rolled back."""
        update = f"update {TABLE} set position = %s {_WHERE} and position = %s"
        _, count = yield from self._run(update, new, *self._row, old)
        if count != 1:
            yield from self._call(self._connection.rollback)
        return bool(count == 1)

    def commit(self, position: int) -> wait.Steps[bool]:
        """Commit the transaction of an event. False: the consumer has rolled it back."""
        if (
            not self.is_sqlite
            and self._connection.info.transaction_status == self._psycopg.pq.TransactionStatus.INERROR
        ):
            yield from self._call(self._connection.rollback)
        rows, _ = yield from self._run(f"select position from {TABLE} {_WHERE}", *self._row)
        yield from self._call(self._connection.commit)
        return bool(list(map(tuple, rows)) == [(position,)])

    def _run(self, text: str, *values: object) -> wait.Steps[tuple[list[Any], int]]:
        return (yield from self._call(lambda: self._execute(text, values)))  # type: ignore[no-any-return]

    def _call(self, work: Any) -> wait.Steps[Any]:
        step = _Ask(work)
        yield step
        return step.outcome()

    def _execute(self, text: str, values: tuple[object, ...]) -> Any:
        if self.is_async:
            return self._aexecute(text, values)
        if self.is_sqlite:
            cursor = self._connection.cursor()
            cursor.row_factory = None
            return cursor.execute(text.replace("%s", "?"), values).fetchall(), cursor.rowcount
        cursor = self._psycopg.Cursor(self._connection, row_factory=self._psycopg.rows.tuple_row).execute(text, values)
        return cursor.fetchall() if cursor.description else [], cursor.rowcount

    async def _aexecute(self, text: str, values: tuple[object, ...]) -> Any:
        cursor = self._psycopg.AsyncCursor(self._connection, row_factory=self._psycopg.rows.tuple_row)
        await cursor.execute(text, values)
        return await cursor.fetchall() if cursor.description else [], cursor.rowcount
