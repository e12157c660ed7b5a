"""Transactions on a PostgreSQL server: they are repeated after a deadlock or a lost connection, and done once.

If a connection is lost before the commit is sent, the server rolls the transaction back, and it is repeated on a new
connection. If the connection is lost while the commit is under way, nobody knows whether it was done. So each
transaction writes a random mark into the row of its connection in the table `session`. The next connection waits until
that transaction has ended, and compares the mark. `pg_xact_status` is no proof: a server that crashed uses the ids of
lost transactions again.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import postgres, process
from ..errors import ConnectionFailed, CorruptStore, HoldfastError
from .reading import Result
from .rows import Transaction
from .server_workers import InProcess
from .sql import SqlStore

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..postgres import Statement

RECONNECT_S = 30.0
COMMIT: tuple[str, Sequence[Any]] = (
    "",
    (),
)  # for `send`: ends the transaction of the statements before, which had no begin
_MAX_DEADLOCKS = 20  # in a row, before a transaction is given up


class _Begun(NamedTuple):
    """A transaction, to find out later whether it was committed."""

    number: int  # of the session
    mark: int
    pid: int  # of the server's process
    xid: str


class ServerStore(SqlStore):
    """A store whose tables are on a server."""

    url: str
    _in_process: InProcess
    _offset = 0.0  # of the server's clock

    def here(self) -> InProcess:
        if self._in_process.registry is not process.registry:
            self._in_process = self._in_process.renewed()
        return self._in_process

    def now(self) -> float:
        return monotonic() + self._offset

    @property
    def _reconnect_s(self) -> float:
        return RECONNECT_S if self.patience is None else self.patience

    def transact(
        self, work: Callable[[Transaction], Result], *, sync: bool = True, first: Sequence[Statement] = ()
    ) -> Result:
        """first: statements that are sent together with the begin. `tx.first` has their cursors."""
        if not sync:
            first = [*first, ("set local synchronous_commit = off", ())]
        unsure: tuple[_Begun, Result] | None = None  # the answer to its commit was lost

        def attempt(session: postgres.Session) -> Result:
            nonlocal unsure
            if unsure is not None:
                if self._was_committed(session, unsure[0]):
                    return unsure[1]
                unsure = None
            tx, begun = self._begin(session, first)
            result = work(tx)
            if tx.keys:
                self.finish(tx)
            unsure = (begun, result)
            self._commit(session, tx)
            return result

        return self.attempt(attempt)

    def _begin(self, session: postgres.Session, first: Sequence[Statement]) -> tuple[Transaction, _Begun]:
        mark = random.getrandbits(62)
        begin = (("begin isolation level read committed", ()), (self.sql["mark"], (session.number, mark)))
        cursors: list[Any] = []
        send(session.connection, (*begin, *first), cursors)
        now, xid = cursors[1].fetchone()
        self._offset = now - monotonic()
        tx = Transaction(session.connection.execute, now)
        tx.first = cursors[2:]
        return tx, _Begun(session.number, mark, session.pid, xid)

    def _commit(self, session: postgres.Session, tx: Transaction) -> None:
        connection = session.connection
        wake = min(tx.ready or int(tx.due), 1 << 30)
        if not (wake or tx.ended):
            connection.execute("commit")
            return
        cursors: list[Any] = []
        try:
            send(connection, (("commit", ()), (self.sql["wake"], [wake])), cursors)
        except psycopg.Error:
            # Idle workers look again after a second. What matters is whether the commit was answered.
            if not cursors or cursors[0].statusmessage != "COMMIT":
                raise

    def _was_committed(self, session: postgres.Session, begun: _Begun) -> bool:
        run = session.connection.execute
        # The server may not know yet that the connection is lost, and the transaction may still hold its locks.
        query = "select pg_terminate_backend(pid) from pg_stat_activity where pid = %s and backend_xid = %s::text::xid"
        run(query, [begun.pid, str(int(begun.xid) % (1 << 32))])
        return bool(run(self.sql["last_mark"], [begun.number]).fetchone() == (begun.mark,))

    def read(self, work: Callable[[Callable[..., Any]], Result]) -> Result:
        return self.attempt(lambda session: work(session.connection.execute))

    def attempt(self, work: Callable[[postgres.Session], Result], patience: float | None = None) -> Result:
        """Call `work` with a session. Repeat it after a deadlock or a lost connection."""
        deadline = monotonic() + (self._reconnect_s if patience is None else patience)
        pause, deadlocks = 0.0, 0
        while True:
            try:
                with self.here().session() as session:
                    try:
                        return work(session)
                    except psycopg.OperationalError as error:
                        if (error.sqlstate or "")[:3] == "57P":  # the server shuts down
                            session.close()
                        raise
            except ConnectionFailed as error:
                failed: HoldfastError = error
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                deadlocks += 1
                if deadlocks == _MAX_DEADLOCKS:
                    raise
                continue
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if session.is_open:
                    raise self._explained(error) from error
                failed = postgres.failure(self.url, error)
            except psycopg.Error as error:
                raise self._explained(error) from error
            if monotonic() >= deadline:
                raise failed
            sleep(pause * random.uniform(0.5, 1.0))
            pause = min(1.0, 2 * pause or 0.02)

    def _explained(self, error: psycopg.Error) -> Exception:
        text = " ".join(str(error).split())
        if isinstance(error, psycopg.errors.DiskFull):
            return OSError(errno.ENOSPC, f"the disk of the server is full ({text}). What was acknowledged is kept")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return PermissionError(
                errno.EACCES, f"{self.name}: {text}. Grant the user the right to create tables, or to use these"
            )
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            return ConnectionFailed(f"{self.name}: this server is read-only. Connect to the primary server.")
        if isinstance(error, psycopg.errors.UndefinedTable):
            return CorruptStore(f"{self.name}: {text}. The tables of this queue were deleted. Open the queue again.")
        if isinstance(error, psycopg.DataError):
            return ValueError(f"{self.name}: {text}")
        return error

    def retried(self, work: Callable[[], Result]) -> Result:
        """Call `work` until the server can be reached."""
        deadline = monotonic() + self._reconnect_s
        while True:
            try:
                return work()
            except ConnectionFailed:
                if monotonic() >= deadline:
                    raise
            sleep(random.uniform(0.05, 0.2))


def send(
    connection: psycopg.Connection[Any], statements: Iterable[Statement], cursors: list[psycopg.Cursor[Any]]
) -> None:
    """Send statements in one round trip. Their cursors are appended, also if a later statement fails."""
    failed: psycopg.Error | None = None
    try:
        with connection.pipeline() as pipeline:
            try:
                for sql, values in statements:
                    if sql:
                        cursors.append(connection.execute(sql, values))
                    else:
                        pipeline.sync()
            except psycopg.Error as error:
                failed = error  # not raised here: the end of the pipeline would log a second error
    except psycopg.Error as error:
        failed = failed or error
    if failed is not None:
        raise failed
