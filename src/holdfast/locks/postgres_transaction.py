"""A lock on PostgreSQL inside the transaction of the caller: `holdfast.lock(url, connection=connection)`."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic, time
from typing import Any

from .. import postgres, wait
from ..errors import ConnectionFailed, Unsupported
from .engine import BUSY, Grant, Outcome
from .postgres import TOKEN, PostgresEngine
from .postgres_sessions import TTL_S

with suppress(ImportError):  # `postgres.check_driver` names the remedy
    import psycopg
    from psycopg import pq
    from psycopg.rows import tuple_row


_MAX_TIMEOUT_MS = 2**31 - 1  # of PostgreSQL


class TransactionGrant(Grant):
    """A lock that ends with the transaction of the caller."""

    __slots__ = ("_connection", "acquired_at", "key", "shared", "token")

    def __init__(self, engine: TransactionEngine, token: int) -> None:
        self._connection = engine.connection
        self.key, self.shared, self.token = engine.key, engine.shared, token
        self.acquired_at = time()

    def is_good(self) -> bool:
        return bool(self._connection.info.transaction_status == pq.TransactionStatus.INTRANS)

    def release(self) -> bool:
        """Nothing to do: the commit or rollback releases the lock."""
        return True


class TransactionEngine(PostgresEngine):
    """A transaction-level advisory lock in the transaction of the caller's connection."""

    def __init__(self, url: str, connection: Any, *, shared: bool) -> None:
        super().__init__(url, shared=shared)
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(f"connection is a psycopg.Connection, not {type(connection).__name__}")
        self.connection = connection

    def first_attempt(self, timeout: float | None = None) -> Any:
        self._check(timeout)
        token = self._token(f"case when pg_try_advisory_xact_lock{self._suffix}({self.number}) then {TOKEN} end")
        return BUSY if token is None else TransactionGrant(self, token)

    def _token(self, expression: str) -> Any:
        """The value of an expression with the next token. It is read again if a crash may have set the sequence back.

        The transaction of the caller need not see the row that is then added to the table.
        """
        run = self._cursor().execute
        try:
            is_known, token = run(f"select exists (select {self._row}), {expression}").fetchone() or (True, None)
        except psycopg.errors.UndefinedTable:
            self.sessions.known.clear()
            raise ConnectionFailed(
                f"{self.name}: the tables of locks were deleted. Roll the transaction back and begin it again.",
                path=self.name,
            ) from None
        if is_known or token is None:
            return token
        self._know_again(TTL_S)
        (token,) = run(f"select {TOKEN}").fetchone() or (None,)
        return token

    def _cursor(self) -> Any:
        """The caller may have set another kind of cursor, or of rows."""
        return psycopg.Cursor(self.connection, row_factory=tuple_row)

    def _check(self, timeout: float | None) -> None:
        if not postgres.has_transaction(self.connection):
            raise Unsupported(
                f"{self.name}: the connection is in autocommit mode and has no transaction, so the lock would end at "
                "once. Use `with connection.transaction():` around it."
            )
        self._know(min(timeout or TTL_S, TTL_S))

    def steps(self, found: Outcome, deadline: float | None, *, asynchronous: bool) -> wait.Steps[Any]:
        if deadline == 0.0:  # the caller does not wait
            raise wait.DeadlinePassed
        step = wait.Run(lambda: self._wait(deadline))
        yield step
        return step.outcome()

    def _wait(self, deadline: float | None) -> TransactionGrant:
        run = self._cursor().execute
        left = 0.0 if deadline is None else max(1.0, (deadline - monotonic()) * 1000)
        change = "select set_config('lock_timeout', %s, true)"
        try:
            with self.connection.transaction():  # a savepoint: a timeout does not spoil the transaction of the caller
                (before,) = run("show lock_timeout").fetchone() or ("0",)
                run(change, [str(int(left) if left < _MAX_TIMEOUT_MS else 0)])  # 0: without a limit
                run(f"select pg_advisory_xact_lock{self._suffix}({self.number})")
                run(change, [before])  # the end of a savepoint does not
                token = self._token(TOKEN)
        except psycopg.errors.LockNotAvailable:
            raise wait.DeadlinePassed from None
        return TransactionGrant(self, token or 0)
