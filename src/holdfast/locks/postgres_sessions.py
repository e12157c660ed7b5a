"""The sessions of this process on a PostgreSQL server: which of them has which advisory lock. See `postgres`."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from .. import postgres, process, wait
from ..errors import ConnectionFailed, HoldfastError
from .renewal import clock
from .server import Lease, LeaseGone, ServerGrant, within

if TYPE_CHECKING:
    from collections.abc import Callable

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg
    from psycopg import pq

TTL_S = 9.0  # the keepalive of the server needs at least 9.8 s to end a session
_MAX_SPARE = 2
# If the thread that watches for a loss also woke for each answer, acquire and release would take three times as long.
_QUIET_S = 0.2
_FRESH_S = 0.01
_SETTINGS = {
    "lock_timeout": "0",
    "statement_timeout": "0",
    "client_connection_check_interval": "2000",
    "synchronous_commit": "off",  # `postgres` explains why this is safe
    # A statement is planned once, perhaps while the table of names is still small.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
}


class Denied(ConnectionFailed):
    """The user may not do this. `reason` is the server's."""

    reason = ""


class NoTables(Denied):
    """The tables of locks were deleted, or never created."""


_REFUSED = {b"42501": Denied, b"42P01": NoTables}  # by the code of SQL


class LockSession(Lease):
    """A session on the server, with the advisory locks that it has."""

    def __init__(self, url: str) -> None:
        sent = clock()
        self.url = url
        self.session = postgres.connect(url)
        super().__init__(postgres.without_password(url), TTL_S, sent)
        # How often it has each advisory lock, or asks for it. None: how many threads use it for anything else.
        self.keys: dict[int | None, int] = {}
        self.exclusive: set[int] = set()  # those of them that are exclusive
        self.has_waiter = False  # which alone may read the socket
        self._owed: Callable[[list[Any]], object] | None = None  # what to do with an answer that came too late
        self._rows: list[tuple[Any, ...] | None] = []  # of the answer that is being received
        self._prepared: dict[str, str] = {}  # statements, and their names on the server
        self._numbers = count()
        settings = ",".join(f"('{name}', '{value}')" for name, value in _SETTINGS.items())
        self.ask(
            f"select set_config(name, value, false) from (values {settings}) as ours (name, value)"
            " join pg_settings using (name)",
            TTL_S,
        )

    @property
    def is_open(self) -> bool:
        return self.session.is_open and not self.is_lost

    def fileno(self) -> int:
        return self.session.fileno() if self.session.is_open else -1

    def answered(self, sent: float) -> None:
        super().answered(sent)
        self.quiet_from = sent + _QUIET_S

    def send(self, query: str, numbers: tuple[int, ...] | None = None) -> None:
        """numbers: the parameters, if `query` is the name of a prepared statement."""
        connection = self.session.connection.pgconn
        try:
            if numbers is None:
                connection.send_query(query.encode())
            else:
                connection.send_query_prepared(query.encode(), [b"%d" % number for number in numbers])
        except psycopg.Error as error:
            raise self.failed(error) from None

    def receive(self, timeout: float) -> list[tuple[Any, ...] | None] | None:
        """The first row of each statement that was sent. None: the server has not answered within the timeout."""
        connection = self.session.connection.pgconn
        until = monotonic() + timeout
        failed: psycopg.Error | None = None
        refused: Denied | None = None
        try:
            while True:
                while connection.is_busy():
                    left = until - monotonic()
                    if not wait.poll([self.fileno()], max(0.0, left)) and left <= 0:
                        return None
                    connection.consume_input()
                result = connection.get_result()
                if result is None:
                    break
                if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                    failed = psycopg.OperationalError(result.error_message.decode(errors="replace"))
                    kind = _REFUSED.get(result.error_field(pq.DiagnosticField.SQLSTATE) or b"")
                    if kind is not None:
                        refused = kind(str(failed))
                        refused.reason = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
                    continue  # to the end of the answer
                texts = [result.get_value(0, column) for column in range(result.nfields)] if result.ntuples else None
                row = None if texts is None else tuple(None if text is None else text.decode() for text in texts)
                self._rows.append(row)
        except psycopg.Error as error:
            failed = error
        rows, self._rows = self._rows, []
        if refused is not None:
            raise refused
        if failed is not None:
            raise self.failed(failed)
        return rows

    def ask(
        self,
        query: str,
        timeout: float,
        owed: Callable[[list[Any]], object] = len,
        numbers: tuple[int, ...] | None = None,
    ) -> list[Any]:
        """Run statements, or a prepared one with these parameters.

        If their answer comes too late, or after an interrupt, `owed` is called with it. The thread that renews this
        lease sees to that. It ends a session that does not answer.
        """
        until = monotonic() + timeout
        if not self._mutex.acquire(timeout=timeout):  # another thread waits for its answer
            raise self._silent(timeout)
        try:
            self.finish(timeout)
            sent = clock()
            self._owed = owed
            try:
                self.send(query, numbers)
                rows = self.receive(max(0.0, until - monotonic()))
            except HoldfastError:
                self._owed = None  # the server has answered, or the session has ended
                raise
            if rows is None:
                raise self._silent(timeout)
            self._owed = None
            self.answered(sent)
            return rows
        finally:
            if self._owed is not None and not self.is_lost:
                self.waiters.add(self._owed)
                self.next_renewal = clock()
                self.watch()
            self._mutex.release()

    def execute(
        self, query: str, numbers: tuple[int, ...], timeout: float, owed: Callable[[Any], object] = len
    ) -> tuple[Any, ...] | None:
        """Run a statement with parameters, and return its first row. The session parses and plans it only once."""
        until = monotonic() + timeout
        name = self._prepared.get(query)
        if name is None:
            name = f"holdfast_{next(self._numbers)}"
            self.ask(f"prepare {name} as {query}", timeout)
            self._prepared[query] = name
        (row,) = self.ask(name, wait.time_left(until), lambda rows: owed(rows[0]), numbers)
        found: tuple[Any, ...] | None = row
        return found

    def finish(self, timeout: float) -> None:
        """Receive an answer that came too late for its caller."""
        owed = self._owed
        if owed is None:
            return
        try:
            rows = self.receive(timeout)
        except HoldfastError:
            rows = []  # the statements failed
            if self.is_lost:
                raise
        if rows is None:
            raise self._silent(timeout)
        self._owed = None
        self.waiters.discard(owed)
        if rows:
            owed(rows)

    def lose(self) -> None:
        super().lose()
        self.session.close()  # libpq has closed the socket, and another file may get its number

    def _silent(self, timeout: float) -> ConnectionFailed:
        return ConnectionFailed(
            f"{self.server} did not answer within {timeout:.3g} s. Check the server, or wait longer."
        )

    def failed(self, error: Any) -> HoldfastError:
        """The error to raise. The session has ended, unless only a statement failed."""
        if self.session.connection.pgconn.status != pq.ConnStatus.OK:
            self.lose()
        return postgres.failure(self.url, error)

    def renew(self, timeout: float) -> list[ServerGrant]:
        if not self.session.is_open:
            raise LeaseGone
        try:
            self.ask("select 1", timeout)
        except ConnectionFailed:
            if not self.session.is_open or self.session.connection.pgconn.status != pq.ConnStatus.OK:
                raise LeaseGone from None
            raise
        return []

    def look(self) -> None:
        if self.has_waiter or not self._mutex.acquire(blocking=False):
            return  # another thread is waiting for an answer
        try:
            while not self.is_lost and wait.poll([self.fileno()], 0):  # the last message, then the end
                self.session.connection.pgconn.consume_input()
        except (psycopg.Error, OSError):
            self.lose()
        finally:
            self._mutex.release()

    def cancel(self) -> None:
        """End a statement that waits, and the session."""
        with suppress(psycopg.Error, AttributeError):
            self.session.connection.cancel_safe(timeout=2.0)
        self.session.close()

    def close(self) -> None:
        self.session.close()


class Sessions:
    """The sessions of this process on one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.mutex = threading.RLock()
        self._opening = threading.Lock()
        self.all: list[LockSession] = []
        self.known: set[tuple[str, int]] = set()  # names and permits that are in the table
        self.learning = threading.Lock()  # while a thread adds to them

    def open(self, timeout: float) -> LockSession:
        """A new session."""

        def late(session: LockSession) -> None:
            session.close()

        try:
            session: LockSession = within(timeout, lambda: LockSession(self.url), late)
        except TimeoutError:
            raise self.unanswered(timeout) from None
        return session

    def unanswered(self, timeout: float) -> ConnectionFailed:
        return ConnectionFailed(
            f"{postgres.without_password(self.url)} did not answer within {timeout:.3g} s. Check the URL, and that the "
            "server runs, or wait longer."
        )

    def borrow(self, timeout: float, key: int | None = None, *, exclusive: bool = False) -> LockSession:
        """A session that does not have this key, and counts as having it until `forget`. None: any session."""
        session = self._find(key, exclusive)
        if session is not None:
            return session
        until = monotonic() + timeout
        if not self._opening.acquire(timeout=timeout):
            raise self.unanswered(timeout)
        try:
            session = self._find(key, exclusive)
            if session is None:
                session = self.open(wait.time_left(until))
                with self.mutex:
                    self.all.append(session)
                    self.note(session, key, exclusive)
        finally:
            self._opening.release()
        return session

    def _find(self, key: int | None, exclusive: bool) -> LockSession | None:
        with self.mutex:
            for session in self.all:
                if (key is None or key not in session.keys) and self._is_open(session):
                    self.note(session, key, exclusive)
                    return session
            self.open_ones()
        return None

    def _is_open(self, session: LockSession) -> bool:
        quiet = clock() - session.quiet_from
        if quiet > _FRESH_S - _QUIET_S and (
            quiet < 0 or not session.grants
        ):  # else it has just answered, or is watched
            session.look()
        return session.is_open

    def open_ones(self) -> list[LockSession]:
        self.all = [session for session in self.all if self._is_open(session)]
        return self.all

    def holds(self, key: int) -> bool:
        """Does this process hold the key exclusively, or ask for it?"""
        with self.mutex:
            return any(key in session.exclusive and session.is_open for session in self.all)

    def note(self, session: LockSession, key: int | None, exclusive: bool) -> None:
        with self.mutex:
            session.keys[key] = session.keys.get(key, 0) + 1
            if exclusive and key is not None:
                session.exclusive.add(key)

    def forget(self, session: LockSession, key: int | None) -> None:
        """The session does not have this key any more. A session that no thread needs is closed."""
        with self.mutex:
            if key is not None:
                session.exclusive.discard(key)
            session.keys[key] -= 1
            if not session.keys[key]:
                del session.keys[key]
            spare = [other for other in self.all if not other.keys]
            if not session.keys and len(spare) > _MAX_SPARE and session in self.all:
                self.all.remove(session)
                session.close()


servers: dict[str, Sessions] = {}  # by URL
process.after_fork_in_child(servers.clear)
