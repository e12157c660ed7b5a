"""Locks on PostgreSQL: session-level advisory locks.

    key       64 bits of the SHA-256 of the lock's name. The table `holdfast_lock` has the name of each key, so that two
              names with the same key are refused. A semaphore has one more key for its queue, and one for each permit
    token     the sequence `holdfast_lock_token`, read after the lock is held. No acquire waits for the disk (see below)

A lock belongs to a session, and ends with it. So these connections are never those of the caller. All uncontended locks
of a process share one session. A session may take its own advisory lock twice, so a key that this process holds
exclusively is refused here, and a shared key or a permit is taken with a session that does not have it. A wait has a
session of its own, and its place in the server's queue.

Token: PostgreSQL logs a sequence once in 32 values, and a commit would wait until that is on the disk. These sessions
do not wait (`synchronous_commit = off`). So a crash, or a standby that takes over, may set the sequence back. Both also
empty `holdfast_lock`, which is an unlogged table, and end all sessions. The first process that then adds a name finds
the row with the key 0 missing. It moves the sequence on by `_JUMP`, or to the time in microseconds if that is more, and
waits until that is on the disk. No lock is granted before: a grant needs the row of its name. A clean restart keeps the
table, and loses nothing.

Loss: the sockets are watched, so that the end of a session is noticed at once, or up to half a second after an acquire.
A network that is cut is noticed after `TTL_S`: the session is not renewed in time, and that is sooner than the server's
keepalive ends it (`postgres`).

Semaphore: the waiters queue for the exclusive lock on its queue key. The first of them tries the permits, and waits for
a notification. A holder that releases a permit notifies if there is a first waiter. A holder that dies does not notify,
so the first waiter, and no other one, looks again every second. All holders have a shared lock on the key of the name,
which excludes a lock of the same name.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from .. import postgres, wait
from ..errors import ConnectionFailed, HoldfastError, UnsafePath, Unsupported
from .engine import BUSY, Outcome
from .postgres_sessions import TTL_S, Denied, LockSession, NoTables, Sessions, servers
from .server import STATUS_TIMEOUT_S, ServerEngine, ServerGrant, Waiter, holder_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..status import Holder, Status

    Result = TypeVar("Result")

with suppress(ImportError):  # `postgres.connect` names the remedy
    from psycopg import sql

MAX_PERMITS = 1000
_LOOK_S = 1.0
_TABLES = ("holdfast_lock", "holdfast_lock_token")
_JUMP = 1 << 32  # more tokens than a server issues between two writes to its disk, or than a standby misses
_CREATE = """
create unlogged table if not exists holdfast_lock (key bigint primary key, name text not null, permits int not null);
create sequence if not exists holdfast_lock_token"""
_BEGIN_TOKENS = "delete from holdfast_lock where key = 0"  # if only the sequence was deleted
_GRANTS = (
    "grant select, insert, update on holdfast_lock to {user}",
    "grant usage, update on sequence holdfast_lock_token to {user}",
)
TOKEN = "nextval('holdfast_lock_token')"
_MOVE_ON = f"""with crashed as (insert into holdfast_lock values (0, '', 0) on conflict do nothing returning key)
select set_config('synchronous_commit', 'on', true), setval('holdfast_lock_token', greatest({TOKEN} + {_JUMP},
(extract(epoch from clock_timestamp()) * 1000000)::bigint)) from crashed"""
_RING_FIRST = f"begin; select {postgres.RING}; commit"  # a notification is sent at the end of a transaction
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
        self._try = (
            f"select token, case when token is not null then {postgres.RING} end from (select"
            f" case when pg_try_advisory_lock{self._suffix}($1) then {TOKEN} end as token"
            " from holdfast_lock where key = $1 and permits = $2 offset 0) as found"
        )
        self._release = f"select pg_advisory_unlock{self._suffix}($1), {postgres.RING}"

    @property
    def sessions(self) -> Sessions:
        return servers.get(self.url) or servers.setdefault(self.url, Sessions(self.url))

    # One attempt.

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        sessions, until = self.sessions, monotonic() + timeout
        failure: HoldfastError = self._other_number(0)
        for _ in range(3):  # a session that has ended, and a name that a crash has deleted
            # First: the session of this process may have the key for another name.
            self._know(wait.time_left(until))
            if not self.shared and sessions.holds(self.number):
                return BUSY
            # The session of a semaphore may hold other permits of it.
            key = None if self.permits else self.number
            session = sessions.borrow(wait.time_left(until), key, exclusive=not self.shared)
            try:
                found = self._attempt(session, wait.time_left(until))
            except NoTables:
                found = None
            except ConnectionFailed as error:
                if session.is_open:
                    raise
                failure = error  # the server has ended the session since it was used
                continue
            finally:
                if self.permits:
                    sessions.forget(session, None)
            if found is not None:
                return found
            sessions.known.discard((self.lock_name, self.permits))
        raise failure

    def _know(self, timeout: float) -> None:
        """Add the name to the table, unless this process knows that it is there."""
        sessions, until = self.sessions, monotonic() + timeout
        if (self.lock_name, self.permits) in sessions.known:
            return
        if not sessions.learning.acquire(timeout=timeout):  # else each of many threads would open a session
            raise sessions.unanswered(timeout)
        try:
            if (self.lock_name, self.permits) not in sessions.known:
                # A session that has the key could take it once more, as if no process used the name.
                session = sessions.borrow(wait.time_left(until), self.number)
                try:
                    self._learn(session, wait.time_left(until))
                finally:
                    sessions.forget(session, self.number)
        finally:
            sessions.learning.release()

    def _know_again(self, timeout: float) -> None:
        """The name is not in the table any more: the server has crashed, or the name was used in another way."""
        self.sessions.known.discard((self.lock_name, self.permits))
        self._know(timeout)

    def _attempt(self, session: LockSession, timeout: float) -> ServerGrant | Outcome | None:
        """None: the table does not have the name with this number of permits."""
        if self.permits:
            return self._attempt_permit(session, timeout)
        token = None
        try:
            row = session.execute(self._try, (self.number, 0), timeout, lambda row: self._undo(session, row))
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
                f"select slot, case when slot <> 0 then {TOKEN} end, case when slot <> 0 then {postgres.RING} end"
                f" from (select case when {may}"
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
            return session.ask(query, wait.time_left(until))[-1]

        tables = ",".join(f"'{name}'" for name in _TABLES)
        row = f"{self.number}, {sql.Literal(self.lock_name).as_string(None)}, {self.permits}"
        try:
            (found,) = run(f"select count(*) from pg_class where relname in ({tables}) and pg_table_is_visible(oid)")
            if int(found) < len(_TABLES):  # one transaction
                run(f"select pg_advisory_xact_lock({key_of('holdfast tables of locks')}); {_CREATE}; {_BEGIN_TOKENS}")
            run(f"{_MOVE_ON}; insert into holdfast_lock (key, name, permits) values ({row}) on conflict do nothing")
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
        self.sessions.known.add((self.lock_name, self.permits))

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
                (row,) = session.ask(f"select {unlock}, {wake}, {postgres.RING}", TTL_S)
            else:
                row = session.execute(self._release, (self.number,), TTL_S)
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
        return f"{_RING_FIRST}; select pg_advisory_lock{self._engine._suffix}({self._engine.number})"

    def attempt(self, timeout: float) -> ServerGrant | None:
        session = self._session
        if not self._is_sent:
            self._is_sent = True
            session.send(self._query())
        rows = session.receive(0)
        return None if rows is None else self._granted(timeout)

    def _if_known(self, ask: Callable[[], Result]) -> Result | None:
        """None also if the tables were deleted."""
        try:
            return ask()
        except NoTables:
            return None

    def _granted(self, timeout: float) -> ServerGrant | None:
        engine, session, until = self._engine, self._session, monotonic() + timeout
        query = f"select {TOKEN}, {postgres.RING} {engine._row}"  # and a proof that the connection still works
        while (row := self._if_known(lambda: session.ask(query, wait.time_left(until))[0])) is None:
            engine._know_again(wait.time_left(until))
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
        return f"{_RING_FIRST}; listen {self._engine._channel}; select pg_advisory_lock({self._engine.queue})"

    def _granted(self, timeout: float) -> ServerGrant | None:
        self._is_first = True
        return self._attempt(timeout)

    def attempt(self, timeout: float) -> ServerGrant | None:
        return self._attempt(timeout) if self._is_first else super().attempt(timeout)

    def _attempt(self, timeout: float) -> ServerGrant | None:
        engine, session, until = self._engine, self._session, monotonic() + timeout
        session.session.connection.pgconn.consume_input()
        while session.session.connection.pgconn.notifies():
            pass

        def attempt() -> ServerGrant | Outcome | None:
            return engine._attempt_permit(session, wait.time_left(until), first=True)

        while (grant := self._if_known(attempt)) is None:
            engine._know_again(wait.time_left(until))
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
