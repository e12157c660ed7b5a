"""An event store in a PostgreSQL database, for the processes of many machines.

    EventStore("postgresql://user@host/database?prefix=shop_")

The names of the tables begin with the prefix, `holdfast_` by default, so that several stores can share a database. The
tables and statements are in `postgres_statements`.

Positions come from a counter row, which every append changes under one advisory lock of the whole store, until its
transaction ends. So positions become visible in their order and without gaps. (A sequence would give out numbers that
are committed later than greater ones, and a reader that follows would miss them.) `postgres_append` has the details.

Readers take no lock. They ask for one page after the other, and hold no transaction between two pages: events up to a
head that was visible once never change. `postgres_listener` wakes the waiters.

A document of `project` is a row, which is replaced under an advisory lock. The row with the empty name is their era:
`forget` changes it, and what was loaded before is not saved.

Forks: a child opens sessions of its own. Clock: the server's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timezone
from typing import TYPE_CHECKING, Any

import msgspec

from .. import postgres, process, wait
from ..errors import CorruptStore, Unsupported
from . import postgres_statements as statements
from .draft import encode
from .engine import Checkpoint, Document, Engine, Options, Problem, Report
from .model import Query, StoredEvent, forgotten, is_erased
from .postgres_append import Appender
from .postgres_checkpoint import RowCheckpoint
from .postgres_listener import Listener

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .requests import Request

    Result = TypeVar("Result")

DEFAULT_PREFIX = "holdfast_"
MAX_SESSIONS = 4  # of one process, besides the one that listens and those of documents
FIRST_PAGE, MAX_PAGE = 32, 1024  # events

# Plans for tables that are empty at first and have a million rows a minute later, also before anything was analyzed.
_OFF = ("jit", "enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
SETTINGS = "; ".join(
    [
        "set default_transaction_isolation = 'read committed'",
        "set lock_timeout = 0",
        "set statement_timeout = 0",
        "set timezone = 'UTC'",
        "set plan_cache_mode = force_generic_plan",  # to plan takes longer than to run, and there is only one index
        *(f"set {name} = off" for name in _OFF),
    ]
)
_decode = msgspec.json.Decoder().decode


class _InProcess:
    """What one process has open. A forked child makes its own."""

    def __init__(self, engine: PostgresEngine) -> None:
        self.registry = process.registry
        self.pool = postgres.Pool(engine.url, MAX_SESSIONS, SETTINGS)
        self.listener = Listener(self.pool.open, f"holdfast_{engine.id}", engine.url)

    def close(self) -> None:
        self.pool.close()
        self.listener.close()


class PostgresEngine(Engine):
    """The engine for a URL. Creates the tables if they are not there."""

    id = ""

    def __init__(self, url: str, options: Options) -> None:
        postgres.check_driver()
        self.name = postgres.without_password(url)
        self.url, ours = postgres.split(url, ("prefix",))
        self._prefix = postgres.table_prefix(self.name, ours.get("prefix", DEFAULT_PREFIX))
        self.options = options
        self._in_process = _InProcess(self)
        self.id = self._run(self._open, patience=0.0)
        self._in_process.listener.channel = f"holdfast_{self.id}"
        self.appender = Appender(self.name, self._prefix, self.id, options, self.here)
        self.sql = self.appender.sql

    # Opening.

    def _open(self, session: postgres.Session) -> str:
        """Create or check the tables. Return the id of the store."""
        run = session.connection.execute

        def create() -> None:
            words = {"p": self._prefix, "id": os.urandom(16).hex(), "version": statements.VERSION}
            run(statements.SCHEMA.format(**words))

        name = f"holdfast tables {self._prefix}event"
        postgres.create_tables(session, name, lambda: self._row(run) is not None, create)
        id, version = self._row(run)
        if version != statements.VERSION:
            raise Unsupported(
                f"{self.name}: this store has format {version}, and this version of Holdfast knows "
                f"{statements.VERSION}. Use the version that made it, or a later one.",
                path=self.name,
            )
        return str(id)

    def _row(self, run: Any) -> Any:
        """The row of the store. None: there are no tables with this prefix yet."""
        # Not to_regclass: it remembers that a table did not exist before this transaction waited for the lock.
        names = [f"{self._prefix}event_store", f"{self._prefix}event"]
        query = "select count(*) from pg_class where relname = any(%s) and pg_table_is_visible(oid)"
        if run(query, [names]).fetchone() == (0,):
            return None
        try:
            rows = run(statements.STATEMENTS["store"].format(p=self._prefix)).fetchall()
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
            rows = []
        if len(rows) != 1 or len(rows[0][0]) != 32:
            raise CorruptStore(
                f"{self.name}: the tables {names[0]} and {names[1]} are not an event store of Holdfast. They were left "
                "as they are. Choose another prefix: ?prefix=…",
                path=self.name,
            )
        return rows[0]

    def here(self) -> _InProcess:
        if self._in_process.registry is not process.registry:
            self._in_process = _InProcess(self)
        return self._in_process

    def close(self) -> None:
        self.here().close()

    def _run(self, work: Callable[[postgres.Session], Result], patience: float | None = None) -> Result:
        """Call `work`, which changes nothing or can be repeated. If the connection is lost, call it on another one."""
        try:
            return self.here().pool.repeat(work, self.options.lock_timeout, patience)
        except psycopg.Error as error:
            raise postgres.explain(self.name, error, "store") from error

    def look(self, work: Callable[[Any], Result]) -> Result:
        return self._run(lambda session: work(session.connection.execute))

    # Appending.

    def commit(self, *requests: Request) -> None:
        if self.appender.is_ours:
            raise self.appender.would_deadlock()
        ready = self.appender.ready(requests, self.look)
        if ready:
            self.appender.submit(*ready)

    def withdraw(self, request: Request) -> bool:
        return self.appender.withdraw(request)

    def commit_on(self, connection: Any, request: Request) -> None:
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(f"connection= of append is a psycopg.Connection, not {type(connection).__name__}")
        if not self.appender.ready([request], self.look):
            return

        def run(statement: Any) -> Any:
            cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row).execute(*statement)
            return cursor.fetchall() if cursor.description else []

        if not connection.autocommit:
            run(("select 1",))  # begins the caller's transaction, so that the next line makes a savepoint in it
        steps = self.appender.joined(request)
        try:
            with connection.transaction():
                statement = next(steps)
                with suppress(StopIteration):
                    while True:
                        statement = steps.send(run(statement))
        except psycopg.errors.LockNotAvailable:
            raise self.look(self.appender.timed_out) from None

    async def acommit_on(self, connection: Any, request: Request) -> None:
        if not isinstance(connection, psycopg.AsyncConnection):
            raise TypeError(f"connection= of aappend is a psycopg.AsyncConnection, not {type(connection).__name__}")
        if not await wait.in_thread(lambda: self.appender.ready([request], self.look)):
            return

        async def run(statement: Any) -> Any:
            cursor = await psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row).execute(*statement)
            return await cursor.fetchall() if cursor.description else []

        if not connection.autocommit:
            await run(("select 1",))
        steps = self.appender.joined(request)
        try:
            async with connection.transaction():
                statement = next(steps)
                with suppress(StopIteration):
                    while True:
                        statement = steps.send(await run(statement))
        except psycopg.errors.LockNotAvailable:
            raise await wait.in_thread(lambda: self.look(self.appender.timed_out)) from None

    # Reading.

    def head(self) -> int:
        return self.look(self.appender.head)

    def read(self, query: Query, after: int, head: int, *, backwards: bool, limit: int | None) -> Iterator[StoredEvent]:
        if head <= after:
            return iter(())
        return self._pages(query, after, head, limit, backwards=backwards)

    def _pages(
        self, query: Query, after: int, head: int, limit: int | None, *, backwards: bool
    ) -> Iterator[StoredEvent]:
        size = FIRST_PAGE if limit is None else max(1, min(limit, MAX_PAGE))
        while head > after:
            text, values = statements.page(self._prefix, query, after, head, size, backwards=backwards)
            rows = self.look(lambda run: run(text, values).fetchall())  # noqa: B023
            yield from map(self._event, rows)
            edge = rows[-1][-1] if rows else None
            if query.matches_all and len(rows) == size:
                edge = rows[-1][0]
            if edge is None:
                return
            if backwards:
                head = edge - 1
            else:
                after = edge
            size = min(MAX_PAGE, 4 * size)

    def _event(self, row: tuple[Any, ...]) -> StoredEvent:
        position, id, time, type, tags, data, metadata, first, last, _ = row
        try:
            values = _decode(data), _decode(metadata)
        except msgspec.DecodeError as error:
            text = f"{self.name}: the data of event {position} is damaged ({error}). Restore it from a backup."
            raise CorruptStore(text, path=self.name, position=position) from None
        utc = time.astimezone(timezone.utc)
        return StoredEvent(position, id, utc, type, frozenset(tags), *values, (first, last, first - 1))

    def wait(self, after: int, had: int, deadline: float | None) -> wait.Steps[int]:
        listener = self.here().listener
        waiter = listener.join()
        try:
            while True:
                if waiter.may_look():
                    step = wait.Run(self.head)
                    yield step
                    head = int(step.outcome())
                    if not had <= head <= after:
                        return head
                wait.check_deadline(deadline)
                yield wait.Readable(waiter.fd, deadline)
        finally:
            listener.leave(waiter)

    # Documents.

    def load(self, name: str) -> Document:
        self._check_name(name)
        content, era = self.look(lambda run: run(self.sql["load"], {"name": name}).fetchone())
        return Document(name, f"the projection {name!r} of {self.name}", content, era)

    def save(self, document: Document, content: bytes) -> None:
        values = {"name": document.name, "content": content, "era": document.era}
        self._with_documents(lambda run: run(self.sql["save"], values))

    def _with_documents(self, work: Callable[[Any], object]) -> None:
        """In a transaction with the lock of the documents."""

        def locked(session: postgres.Session) -> None:
            run = session.connection.execute
            with session.connection.transaction():
                run("select pg_advisory_xact_lock(hashtextextended(%s, 1))", [f"{self.id} documents"])
                work(run)

        self._run(locked)

    def forget(self, tag: str) -> int:
        found = self.read(Query.of(tags=(tag,)), 0, self.head(), backwards=False, limit=None)
        rows = [
            {"position": event.position, "metadata": encode(forgotten(event.metadata)).decode()}
            for event in found
            if not is_erased(event)
        ]
        for begin in range(0, len(rows), MAX_PAGE):
            some = encode(rows[begin : begin + MAX_PAGE]).decode()
            self.look(lambda run: run(self.sql["forget"], [some]))  # noqa: B023
        era = os.urandom(8).hex().encode()
        self._with_documents(lambda run: (run(self.sql["forget_documents"]), run(self.sql["new_era"], [era])))
        return len(rows)

    def checkpoint(self, name: str) -> Checkpoint:
        self._check_name(name)
        return RowCheckpoint(self, name)

    def checkpoints(self) -> list[str]:
        return [name for (name,) in self.look(lambda run: run(self.sql["checkpoints"]).fetchall())]

    def _check_name(self, name: str) -> None:
        if not name or "\0" in name or len(name.encode()) > statements.MAX_LENGTH:
            raise self._no_name(name)

    # Looking after it.

    def verify(self) -> Report:
        def work(session: postgres.Session) -> Report:
            run = session.connection.execute
            with session.connection.transaction():
                run("set transaction isolation level repeatable read, read only")
                for name in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin"):
                    run(f"set local {name} = on")
                return self._report(run)

        report = self._run(work)
        problems = list(report.problems)
        events = self.read(Query(), 0, report.events, backwards=False, limit=None)
        try:
            for _ in events:
                pass
        except CorruptStore as error:
            problems.append(Problem(self.name, str(error), position=error.position))
        return Report(report.events, 0, tuple(problems))

    def _report(self, run: Any) -> Report:
        head, first, last, count = run(self.sql["check_head"]).fetchone()
        found = []
        if first != 1 or not head == last == count:
            what = f"the counter is {head}, the positions go from {first} to {last}, and there are {count} events"
            found.append(Problem(self.name, what))
        for (position,) in run(self.sql["check_order"]).fetchall():
            found.append(Problem(self.name, "the events before it are missing", position=position))
        for (position,) in run(self.sql["check_batches"]).fetchall():
            found.append(Problem(self.name, "a part of what was appended together is missing", position=position))
        for check, what in (("check_missing", "is missing"), ("check_spare", "belongs to no event")):
            for tag, kind, position in run(self.sql[check]).fetchall():
                found.append(Problem(self.name, f"the term ({tag!r}, {kind!r}) {what}: rebuild it", position=position))
        return Report(max(last, count), 0, tuple(found))

    def rebuild(self) -> None:
        def work(session: postgres.Session) -> None:
            run = session.connection.execute
            with session.connection.transaction():
                run("set local enable_seqscan = on")
                run("select pg_advisory_xact_lock(%s)", [self.appender.key])
                run(self.sql["forget_terms"])
                run(self.sql["make_terms"])

        self._run(work)

    def begin_again(self) -> None:
        self.appender.begin_again()
