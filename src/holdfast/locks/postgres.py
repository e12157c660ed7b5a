"""Locks on PostgreSQL: session-level advisory locks.

    key       64 bits of the SHA-256 of the lock's name. The table `holdfast_lock` has the name of each key, so that two
              names with the same key are refused. A semaphore has one more key for its queue, and one for each permit
    token     the sequence `holdfast_lock_token`, read after the lock is held

A lock belongs to a session, and ends with it. So these connections are never those of the caller. All uncontended locks
of a process share one session. A session may take its own advisory lock twice, so a key that this process holds
exclusively is refused here, and a shared key or a permit is taken with a session that does not have it. A wait has a
session of its own, and its place in the server's queue.

Loss: the sockets are watched, so that the end of a session is noticed at once, or half a second after an acquire on a
session that was idle. A network that is cut is noticed after
`TTL_S`: the session is not renewed in time, and that is sooner than the server's keepalive ends it (`postgres`).

Semaphore: the waiters queue for the exclusive lock on its queue key. The first of them tries the permits, and waits for
a notification. A holder that releases a permit notifies if there is a first waiter. A holder that dies does not notify,
so the first waiter, and no other one, looks again every second. All holders have a shared lock on the key of the name,
which excludes a lock of the same name.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from .. import postgres, wait
from ..errors import ConnectionFailed, HoldfastError, UnsafePath, Unsupported
from .engine import BUSY, Grant, Outcome
from .postgres_sessions import TTL_S, Denied, LockSession, Sessions, servers
from .server import STATUS_TIMEOUT_S, ServerEngine, ServerGrant, Waiter, holder_of

if TYPE_CHECKING:
    from ..status import Holder, Status

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg
    from psycopg import pq, sql

MAX_PERMITS = 1000
_LOOK_S = 1.0
_TABLES = ("holdfast_lock", "holdfast_lock_token")
_CREATE = """
create table if not exists holdfast_lock (key bigint primary key, name text not null, permits int not null);
create sequence if not exists holdfast_lock_token"""
_GRANTS = (
    "grant select, insert, update on holdfast_lock to {user}",
    "grant usage on sequence holdfast_lock_token to {user}",
)
_TOKEN = "nextval('holdfast_lock_token')"
_HOLDERS = """select json_agg(json_build_array(key::text, mode, granted, application_name, since)
    order by since nulls first, pid) from (
    select ((classid::bigint << 32) | objid::bigint) as key, mode, granted, pid, application_name,
    extract(epoch from (to_jsonb(l) ->> 'waitstart')::timestamptz)::float as since
    from pg_locks l left join pg_stat_activity a using (pid)
    where locktype = 'advisory' and objsubid = 1
    and l.database = (select oid from pg_database where datname = current_database())) as locks
    where key = any('{%s}')"""


def key_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


class PostgresEngine(ServerEngine):
    """The lock, or semaphore, of one name in one database."""

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        postgres.check_driver()
        if ttl is not None:
            raise Unsupported("PostgreSQL keeps a lock as long as its session lives: leave ttl out.")
        super().__init__(postgres.without_password(url), "postgresql")
        self.url, ours = postgres.split(url, ("name",))
        self.lock_name = ours.get("name", "")
        if not self.lock_name or "\0" in self.lock_name:
            raise UnsafePath(f"{self.name}: the URL names no lock. Add ?name=…", path=self.name)
        if permits > MAX_PERMITS:
            raise ValueError(f"permits is a number from 1 to {MAX_PERMITS} on PostgreSQL, not {permits!r}")
        self.permits = permits
        self.shared = shared or permits > 0
        self.number = key_of(self.lock_name)
        self.queue = key_of(f"{self.lock_name}\0queue")
        self.slots = [key_of(f"{self.lock_name}\0{permit}") for permit in range(permits)]
        self.key = ("postgresql", self.url, self.lock_name)

    @property
    def sessions(self) -> Sessions:
        return servers.get(self.url) or servers.setdefault(self.url, Sessions(self.url))

    # One attempt.

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        until = monotonic() + timeout
        if not self.shared and self.sessions.holds(self.number):
            return BUSY
        failure: HoldfastError = self._other_number(0)
        for _ in range(2):
            session = self._borrow(max(0.001, until - monotonic()))
            try:
                found = self._attempt(session, max(0.001, until - monotonic()))
            except ConnectionFailed as error:
                if session.is_open:
                    raise
                failure = error  # the server has ended the session since it was used
                continue
            finally:
                if self.permits:
                    self.sessions.forget(session, None)
            if found is not None:
                return found
            self.sessions.known.discard((self.number, self.permits))  # the name was used in another way since
        raise failure

    def _borrow(self, timeout: float) -> LockSession:
        """A session for an attempt. That of a semaphore may have other permits of it."""
        until = monotonic() + timeout
        self._know(timeout)
        left = max(0.001, until - monotonic())
        return self.sessions.borrow(left, None if self.permits else self.number, exclusive=not self.shared)

    def _know(self, timeout: float) -> None:
        """Add the name to the table, unless this process knows that it is there."""
        sessions, until = self.sessions, monotonic() + timeout
        if (self.number, self.permits) in sessions.known:
            return
        if not sessions.learning.acquire(timeout=timeout):  # else each of many threads would open a session
            raise sessions.unanswered(timeout)
        try:
            if (self.number, self.permits) not in sessions.known:
                # A session that has the key could take it once more, as if no process used the name.
                session = sessions.borrow(max(0.001, until - monotonic()), self.number)
                try:
                    self._learn(session, max(0.001, until - monotonic()))
                finally:
                    sessions.forget(session, self.number)
        finally:
            sessions.learning.release()

    def _attempt(self, session: LockSession, timeout: float) -> ServerGrant | Outcome | None:
        """None: the table does not have the name with this number of permits."""
        if self.permits:
            return self._attempt_permit(session, timeout)
        token = None
        try:
            query = (
                f"select case when pg_try_advisory_lock{self._suffix}($1) then {_TOKEN} end"
                " from holdfast_lock where key = $1 and permits = $2"
            )
            row = session.execute(query, (self.number, 0), timeout, lambda row: self._undo(session, row))
            if row is None:
                return None
            token = row[0]
        finally:
            if token is None:
                self.sessions.forget(session, self.number)
        return BUSY if token is None else ServerGrant(self, session, self.number, int(token))

    @property
    def _suffix(self) -> str:
        return "_shared" if self.shared else ""

    @property
    def _row(self) -> str:
        return f"from holdfast_lock where key = {self.number} and permits = {self.permits}"

    def _attempt_permit(
        self, session: LockSession, timeout: float, *, first: bool = False
    ) -> ServerGrant | Outcome | None:
        """first: this is the first waiter, which has the queue key."""
        with session._mutex:
            free = [slot for slot in self.slots if slot not in session.keys]
            if not free:
                return BUSY
            may = "" if first else f"pg_try_advisory_xact_lock_shared({self.queue}) and "
            slots = ",".join(map(str, free))
            query = (
                f"select slot, case when slot <> 0 then {_TOKEN} end from (select case when {may}"
                f"pg_try_advisory_lock_shared({self.number}) then coalesce((select slot"
                f" from unnest(array[{slots}]::bigint[]) as slot where pg_try_advisory_lock(slot) limit 1), 0) end"
                f" as slot {self._row} offset 0) as found"
            )
            (row,) = session.ask(query, timeout, lambda rows: self._undo(session, rows[0]))
            if row is None:
                return None
            if row[0] in (None, "0"):
                if row[0] == "0":
                    self._unlock(session)
                return BUSY
            slot = int(row[0])
            self.sessions.note(session, slot, True)
            self.sessions.note(session, self.number, False)
        return ServerGrant(self, session, slot, int(row[1]))

    def _undo(self, session: LockSession, row: Any) -> None:
        """An attempt was answered too late: give back what it took."""
        if row is not None and row[0] is not None:
            self._unlock(session, row[0] if self.permits else None)

    def _unlock(self, session: LockSession, slot: Any = None) -> None:
        more = "" if slot in (None, "0") else f", pg_advisory_unlock({slot})"
        session.ask(f"select pg_advisory_unlock{self._suffix}({self.number}){more}", TTL_S)

    # The table of names.

    def _learn(self, session: LockSession, timeout: float) -> None:
        """Add the name to the table. Refuse another name with this key, or another number of permits that is in use."""
        until = monotonic() + timeout

        def run(query: str) -> Any:
            return session.ask(query, max(0.001, until - monotonic()))[-1]

        tables = ",".join(f"'{name}'" for name in _TABLES)
        row = f"{self.number}, {sql.Literal(self.lock_name).as_string(None)}, {self.permits}"
        try:
            (found,) = run(f"select count(*) from pg_class where relname in ({tables}) and pg_table_is_visible(oid)")
            if int(found) < len(_TABLES):  # one transaction
                run(f"select pg_advisory_xact_lock({key_of('holdfast tables of locks')}); {_CREATE}")
            # Not synced: a crash that loses the row ends all sessions, and each attempt looks for the row.
            lazily = "select set_config('synchronous_commit', 'off', true)"
            run(f"{lazily}; insert into holdfast_lock (key, name, permits) values ({row}) on conflict do nothing")
        except Denied as error:
            user = sql.Identifier(session.session.connection.info.user).as_string(None)
            statements = "; ".join((" ".join(_CREATE.split()), *_GRANTS)).format(user=user)
            raise Unsupported(
                f"{self.name}: this user may not create or write the table of locks ({error.reason}). As the owner of "
                f"the database, run: {statements};"
            ) from None
        name, permits = run(f"select name, permits from holdfast_lock where key = {self.number}") or ("", 0)
        if name != self.lock_name:
            raise Unsupported(
                f"{self.name}: the name {name!r} has the same key in this database. Choose another name for the lock."
            )
        if int(permits) != self.permits:
            free = f"select case when pg_try_advisory_xact_lock({self.number}) then {self.number} end"
            if run(f"update holdfast_lock set permits = {self.permits} where key = ({free}) returning key") is None:
                raise self._other_number(int(permits))
        self.sessions.known.add((self.number, self.permits))

    def _other_number(self, permits: int) -> Unsupported:
        used = f"as a semaphore with {permits} permits" if permits else "as a lock, or with another number of permits"
        return Unsupported(
            f"{self.name}: other processes use this name {used}. Use it in the same way everywhere. To change it, stop "
            "all users first.",
            path=self.name,
        )

    # Release.

    def release_grant(self, grant: ServerGrant) -> bool:
        session: Any = grant.lease
        sessions = self.sessions
        try:
            if self.permits:
                unlock = f"pg_advisory_unlock({grant.id}), pg_advisory_unlock_shared({self.number})"
                is_first = f"not pg_try_advisory_xact_lock_shared({self.queue})"
                wake = f"case when {is_first} then pg_notify('{self._channel}', '') end"
                (row,) = session.ask(f"select {unlock}, {wake}", TTL_S)
            else:
                row = session.execute(f"select pg_advisory_unlock{self._suffix}($1)", (self.number,), TTL_S)
            return row is not None and row[0] == "t"
        except ConnectionFailed:
            if not session.is_open:
                return False
            with session._mutex:  # another thread may use it
                session.cancel()  # the end of the session releases the lock
                session.lose()
            raise
        finally:
            for key in {grant.id, self.number}:
                sessions.forget(session, key)

    @property
    def _channel(self) -> str:
        return f"holdfast_{self.queue & (1 << 64) - 1:x}"

    # The wait.

    def join(self, timeout: float) -> Waiter:
        sessions = self.sessions
        with sessions.mutex:
            session = next((other for other in sessions.open_ones()[1:] if not other.keys), None)
            if session is not None:
                sessions.all.remove(session)
        session = session or sessions.open(timeout)
        session.has_waiter = True
        return _PermitWaiter(self, session) if self.permits else _LockWaiter(self, session)

    def status(self) -> Status:
        session = self.sessions.borrow(STATUS_TIMEOUT_S)
        keys = ",".join(map(str, (self.number, self.queue, *self.slots)))
        try:
            (row,) = session.ask(_HOLDERS % keys, STATUS_TIMEOUT_S)
        finally:
            self.sessions.forget(session, None)
        return self.state_from([(int(key), *rest) for key, *rest in json.loads(row[0] or "[]")])

    def state_from(self, rows: list[Any]) -> Status:
        """The status by the rows about our keys: key, mode, granted, application_name, since when it waits."""
        waits = (self.queue,) if self.permits else (self.number,)
        counted = self.slots if self.permits else [self.number]
        holders = tuple(_holder(row) for row in rows if row[2] and row[0] in counted)
        # The first waiter of a semaphore has the queue key.
        waiters = tuple(_holder(row) for row in rows if row[0] in waits and (self.permits or not row[2]))
        return self.state(holders, waiters)


def _holder(row: Any) -> Holder:
    _, mode, _, application, since = row
    return holder_of(str(application or "").removeprefix("holdfast "), mode.startswith("Share"), since)


class _LockWaiter(Waiter):
    """Waits in the server's queue for one advisory lock."""

    def __init__(self, engine: PostgresEngine, session: LockSession) -> None:
        self._engine, self._session = engine, session
        self._is_sent = False

    def _query(self) -> str:
        return f"select pg_advisory_lock{self._engine._suffix}({self._engine.number})"

    def attempt(self, timeout: float) -> ServerGrant | None:
        session = self._session
        if not self._is_sent:
            self._is_sent = True
            session.send(self._query())
        rows = session.receive(0)
        return None if rows is None else self._granted(timeout)

    def _granted(self, timeout: float) -> ServerGrant | None:
        engine, session = self._engine, self._session
        (row,) = session.ask(f"select {_TOKEN}", timeout)  # and a proof that the connection still works
        sessions = engine.sessions
        with sessions.mutex:
            session.has_waiter = False
            sessions.all.append(session)
            sessions.note(session, engine.number, not engine.shared)
        return ServerGrant(engine, session, engine.number, int(row[0]))

    def step(self, deadline: float | None) -> wait.Step:
        return wait.Readable(self._session.fileno(), deadline)

    def leave(self) -> None:
        if self._session not in self._engine.sessions.all:  # else it has the lock, or had it
            self._session.cancel()


class _PermitWaiter(_LockWaiter):
    """Waits in the queue of a semaphore, and then for one of its permits."""

    def __init__(self, engine: PostgresEngine, session: LockSession) -> None:
        super().__init__(engine, session)
        self._is_first = False

    def _query(self) -> str:
        return f"listen {self._engine._channel}; select pg_advisory_lock({self._engine.queue})"

    def _granted(self, timeout: float) -> ServerGrant | None:
        self._is_first = True
        return self._attempt(timeout)

    def attempt(self, timeout: float) -> ServerGrant | None:
        return self._attempt(timeout) if self._is_first else super().attempt(timeout)

    def _attempt(self, timeout: float) -> ServerGrant | None:
        engine, session = self._engine, self._session
        session.session.connection.pgconn.consume_input()
        while session.session.connection.pgconn.notifies():
            pass
        grant = engine._attempt_permit(session, timeout, first=True)
        if grant is None:
            raise engine._other_number(0)
        if isinstance(grant, Outcome):
            return None
        session.ask(f"unlisten *; select pg_advisory_unlock({engine.queue})", timeout)
        with engine.sessions.mutex:
            session.has_waiter = False
            engine.sessions.all.append(session)
        return grant

    def step(self, deadline: float | None) -> wait.Step:
        if not self._is_first:
            return super().step(deadline)
        return wait.Readable(self._session.fileno(), wait.sooner(monotonic() + _LOOK_S, deadline))


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
        self._check()
        query = f"select case when pg_try_advisory_xact_lock{self._suffix}({self.number}) then {_TOKEN} end"
        row = self.connection.execute(query).fetchone()
        return BUSY if row is None or row[0] is None else TransactionGrant(self, row[0])

    def _check(self) -> None:
        if self.connection.autocommit and self.connection.info.transaction_status == pq.TransactionStatus.IDLE:
            raise Unsupported(
                f"{self.name}: the connection is in autocommit mode and has no transaction, so the lock would end at "
                "once. Use `with connection.transaction():` around it."
            )
        self._know(TTL_S)

    def steps(self, found: Outcome, deadline: float | None, *, asynchronous: bool) -> wait.Steps[Any]:
        if deadline == 0.0:  # the caller does not wait
            raise wait.DeadlinePassed
        step = wait.Run(lambda: self._wait(deadline))
        yield step
        return step.outcome()

    def _wait(self, deadline: float | None) -> TransactionGrant:
        run = self.connection.execute
        left = 0 if deadline is None else max(1, int((deadline - monotonic()) * 1000))
        try:
            with self.connection.transaction():  # a savepoint: a timeout does not spoil the transaction of the caller
                run(f"set local lock_timeout = {left}")
                run(f"select pg_advisory_xact_lock{self._suffix}({self.number})")
                token = (run(f"select {_TOKEN}").fetchone() or (0,))[0]
        except psycopg.errors.LockNotAvailable:
            raise wait.DeadlinePassed from None
        return TransactionGrant(self, token)
