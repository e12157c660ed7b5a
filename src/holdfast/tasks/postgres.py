"""Tasks in a PostgreSQL database, for the processes of many machines.

    store = open_store("postgresql://user@host/database?prefix=mail_")

The names of the tables begin with the prefix, `holdfast_` by default, so that several queues can share a database.
`sql` has the tables that all engines share. This engine adds:

    idle      a worker that waits for a task, or a process that waits for changes. It is not logged: a crash empties it
    session   the mark of the last transaction that each connection has committed
    worker    a sequence: the numbers of workers and of their processes

Transactions run at the same time, at the isolation level "read committed". Claims skip rows that others have locked.
Tasks with the same key are admitted under an advisory lock. If the server ends a deadlock, the transaction is repeated.

Lost connections: see `server_transactions`. Workers that live or die: see `server_workers`.

Waking: NOTIFY takes a lock of the whole server, so it must be rare. A claim that finds no task adds its worker to the
table `idle`, commits, and looks once more for a task. A transaction that made n tasks ready commits, and then removes n
rows from `idle` and notifies these workers. If both happen at the same time, at least one of them sees the other. A
process that dies between its commit and its notification wakes nobody: idle workers look again every second.

Clock: the server's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic, time
from typing import Any

from .. import postgres
from ..errors import CorruptStore, Unsupported
from .rows import NEVER, Transaction, attempt_of, number_of
from .server_statements import CLOCK, MORE_TABLES, SERIAL, VERSION, filled
from .server_transactions import COMMIT, ServerStore, send
from .server_workers import LOOK_S, WORKER, InProcess, ServerChanges, Worker
from .statements import NUMBERS, READY, SCHEMA
from .store import ENDED, Attempt, Changes, Ending, NewTask, Registration, Woken

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..postgres import Statement

DEFAULT_PREFIX = "holdfast_"


def open_store(url: str) -> PostgresStore:
    """Open the queue of a URL, and create its tables if they do not exist."""
    return PostgresStore(url)


class PostgresStore(ServerStore):
    """The engine of a queue on a PostgreSQL server. See the head of this module."""

    is_local = False

    def __init__(self, url: str) -> None:
        postgres.check_driver()
        self.name = postgres.without_password(url)
        self.url, ours = postgres.split(url, ("prefix",))
        prefix = ours.get("prefix", DEFAULT_PREFIX)
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,29}", prefix):
            raise ValueError(
                f"{self.name}: the prefix {prefix!r} is not a plain name. Use at most 30 lower-case letters, digits "
                "and underscores, and begin with a letter or an underscore."
            )
        super().__init__(
            prefix=prefix, mark="%s", lock="for update", skip="for no key update skip locked", share="for key share"
        )
        self.table, self._database = 0, 0
        self._in_process = InProcess(self)
        self.attempt(self._open, patience=0.0)

    def close(self) -> None:
        self._in_process.close()

    # Opening.

    def _open(self, session: postgres.Session) -> None:
        """Create or check the tables."""
        run = session.connection.execute
        if self._version(run) is None:
            with session.connection.transaction():
                run("select pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"holdfast tables {self.prefix}"])
                if self._version(run) is None:
                    run(
                        SCHEMA.format(p=self.prefix, serial=SERIAL) + MORE_TABLES.format(p=self.prefix, version=VERSION)
                    )
        version = int(self._version(run))
        if version > VERSION:
            raise Unsupported(
                f"{self.name}: this queue has format {version}, and this version of Holdfast knows {VERSION}. Upgrade "
                "Holdfast."
            )
        query = f"select '{self.prefix}task'::regclass::oid::bigint, oid::bigint from pg_database"
        row = run(f"{query} where datname = current_database()").fetchone()
        self.table, self._database = row or (0, 0)
        self.sql |= filled(self.prefix, self.locks)
        session.number = self.here().home.new_number(session)

    def _version(self, run: Callable[..., Any]) -> Any:
        """None: there are no tables with this prefix yet."""
        # Not to_regclass: it remembers that a table did not exist before this transaction waited for the lock.
        query = "select count(*) from pg_class where relname = any(%s) and pg_table_is_visible(oid)"
        if run(query, [[f"{self.prefix}meta", f"{self.prefix}task"]]).fetchone() == (0,):
            return None
        try:
            (version,) = run(f"select value from {self.prefix}meta where name = 'version'").fetchone()
            return int(version)
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, TypeError, ValueError):
            raise CorruptStore(
                f"{self.name}: the tables {self.prefix}meta and {self.prefix}task are not a task queue of Holdfast. "
                "They were left as they are. Choose another prefix: ?prefix=…"
            ) from None

    @property
    def locks(self) -> str:
        """A query for the locks of the workers that are alive: `pid`, and `objid`, the number of the worker."""
        return (
            "select pid, objid from pg_locks where locktype = 'advisory' and granted and objsubid = 2"
            f" and database = {self._database} and classid = {self.table}"
        )

    # Locks.

    def lock_key(self, tx: Transaction, key: str) -> None:
        tx.run(
            f"select pg_advisory_xact_lock('{self.prefix}key_rate'::regclass::oid::bigint::bit(32)::integer, "
            "hashtext(%s))",
            (key,),
        )

    def _lock_meta(self, tx: Transaction, function: str, number: int) -> bool:
        table = f"'{self.prefix}meta'::regclass::oid::bigint::bit(32)::integer"
        return tx.run(f"select {function}({table}, {number})").fetchone()[0] is not False

    def may_prune(self, tx: Transaction) -> bool:
        tx.run(self.sql["forget_sessions"])
        return self._lock_meta(tx, "pg_try_advisory_xact_lock", 1)

    # Add.

    def add(
        self, tasks: Sequence[NewTask], *, max_waiting: int | None = None, connection: Any = None
    ) -> list[tuple[str, bool]]:
        if connection is None:
            return self.transact(lambda tx: self.add_in(tx, tasks, max_waiting))
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(f"connection= is a psycopg.Connection, not {type(connection).__name__}")

        def run(sql: str, values: Sequence[Any] = ()) -> Any:
            return psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row).execute(sql, values)

        if not connection.autocommit:
            run("select 1")  # begins the caller's transaction, so that the next line makes a savepoint in it
        with connection.transaction():
            tx = Transaction(run, run(f"select {CLOCK}").fetchone()[0])
            added = self.add_in(tx, tasks, max_waiting)
            self.finish(tx)
            if tx.ready or tx.due:  # nobody knows which workers are idle when the caller commits
                run("select pg_notify(%s, '')", [f"{self.prefix}all"])
        return added

    def add_in(self, tx: Transaction, tasks: Sequence[NewTask], max_waiting: int | None) -> list[tuple[str, bool]]:
        if max_waiting is not None or any(task.after for task in tasks):
            return super().add_in(tx, tasks, max_waiting)
        rows = [self.row_of(tx, task)[0] for task in tasks]
        found = (
            tx.run(self.sql["insert_all"], [list(column) for column in zip(*rows, strict=True)]).fetchall()
            if rows
            else []
        )
        return [
            (task.id if task.id is not None else f"_{seq}", is_new)
            for task, (seq, is_new) in zip(tasks, found, strict=True)
        ]

    def insert(self, tx: Transaction, values: tuple[Any, ...]) -> int | None:
        seq, is_new = tx.run(self.sql["insert_all"], [[value] for value in values]).fetchone()
        return seq if is_new else None

    def count_waiting(self, tx: Transaction, limit: int) -> int:
        self._lock_meta(tx, "pg_advisory_xact_lock", 2)  # two transactions must not fill the same room
        return int(tx.run(self.sql["waiting"], [limit] * 4).fetchone()[0])

    # Work.

    def register(self) -> Registration:
        return self.retried(lambda: Worker(self, self.here()))

    def claim(
        self,
        worker: Registration,
        count: int,
        *,
        endings: Sequence[Ending] = (),
        reserve: bool = False,
        idle: bool = False,
    ) -> list[Attempt]:
        assert isinstance(worker, Worker)

        settling, claiming = self._settling(endings), self._claiming(worker, count, reserve)
        refused = 0

        def work(tx: Transaction) -> list[Attempt]:
            nonlocal refused
            refused = self._settled(tx, endings, tx.first[: len(settling)]).count(False)
            promoted, claimed, *forgotten = tx.first[len(settling) :]
            attempts = self._claimed(tx, promoted, claimed)
            if tx.keys:
                self.finish(tx)
            if tx.ready > 0 and len(attempts) < count:  # a task became ready after the claim was sent
                more = self._claiming(worker, count - len(attempts), reserve)
                attempts += self._claimed(tx, *(tx.run(*statement) for statement in more[:2]))
            tx.ready = max(0, tx.ready - len(attempts))  # these need no other worker
            until = forgotten[0].fetchone() if forgotten else None
            if attempts and until is not None and until[0] < NEVER:
                tx.due = True  # another idle worker must wake at that moment
            return attempts

        self.retried(self.here().home.open)
        for _ in range(3):
            attempts = self.transact(work, first=[*settling, *claiming])
            worker.refused += refused
            settling, endings, worker.is_idle = [], (), False
            if attempts or not idle:
                break
            self._become_idle(worker)
            if not self.read(lambda run: run(self.sql["look"]).fetchone()[0]):
                break
            claiming = self._claiming(worker, count, reserve)
        return attempts

    def _claiming(self, worker: Worker, count: int, reserve: bool) -> list[Statement]:
        statements: list[Statement] = [
            (self.sql["promote"], ()),
            (self.sql["claim"].format(count=int(count)), (worker.name, time(), reserve)),
        ]
        return [*statements, (self.sql["forget"], (worker.name,))] if worker.is_idle else statements

    def _claimed(self, tx: Transaction, promoted: Any, claimed: Any) -> list[Attempt]:
        for state, key in promoted.fetchall():
            tx.ready += state == READY
            if key is not None:
                tx.keys.add(key)
        return [attempt_of(row) for row in sorted(claimed.fetchall(), key=lambda row: row[-1])]

    def _become_idle(self, worker: Worker) -> None:
        worker.until = self.read(self.time_to_wake)
        worker.is_idle = True
        self.ask(worker.name, WORKER, worker.until)

    def ask(self, name: str, kind: int, until: float) -> None:
        """Ask for one notification."""
        channel = self.here().home.channel
        self.read(lambda run: run(self.sql["ask"], [name, kind, channel, until]))

    def forget(self, name: str) -> None:
        self.read(lambda run: run(self.sql["forget"], [name]))

    def forget_idle(self, worker: Worker) -> None:
        """A worker that ends is not idle any more. If it was woken for a task, another one gets that task."""

        def work(tx: Transaction) -> None:
            tx.run(self.sql["forget"], [worker.name])
            tx.ready = 1

        self.transact(work)

    def settle(self, endings: Sequence[Ending]) -> list[bool]:
        if len(endings) == 1 and self._end_at_once(endings[0]):
            return [True]
        return self.transact(lambda tx: self._settled(tx, endings, tx.first), first=self._settling(endings))

    def _end_at_once(self, ending: Ending) -> bool:
        """End one task in one round trip, if nothing else depends on it. It needs no mark: if the answer is lost, the
        token and the time in the row tell whether it was done."""
        statements = self._settling([ending], "end_alone")
        was_sent = False

        def work(session: postgres.Session) -> bool:
            nonlocal was_sent
            may_be_done, was_sent = was_sent, True
            cursors: list[Any] = []
            send(session.connection, (*statements, COMMIT, (self.sql["wake"], [0])), cursors)
            if cursors[1].fetchone() is not None:
                return True
            if not may_be_done:
                return False
            row = self.find(session.connection.execute, ending.id, "stored")
            return row is not None and (row[8], row[21]) == (ending.token, statements[1][1][0])

        return bool(statements) and self.attempt(work)

    def _settling(self, endings: Sequence[Ending], end: str = "end_some") -> list[Statement]:
        """Lock the tasks, and end those that no other task waits for. In two statements: while the first one waits for
        a lock, a task may be added that waits for one of them, and the second one must see it."""
        statements: list[Statement] = []
        for by in ("seq", "id"):
            some = [(ending, number_of(ending.id)) for ending in endings]
            rows = [
                (
                    ending.id if seq is None else seq,
                    ending.token,
                    NUMBERS[ending.state],
                    *map(_without_nul, (ending.result_json, ending.error, ending.traceback, ending.output)),
                )
                for ending, seq in some
                if (by == "id") == (seq is None) and ending.state in ENDED
            ]
            if rows:
                columns = [list(column) for column in zip(*rows, strict=True)]
                statements += [
                    (self.sql[f"lock_some_{by}"], columns[:1]),
                    (self.sql[f"{end}_{by}"], [time(), *columns]),
                ]
        return statements

    def _settled(self, tx: Transaction, endings: Sequence[Ending], cursors: Sequence[Any]) -> list[bool]:
        done: dict[object, str | None] = {task: key for cursor in cursors[1::2] for task, key in cursor.fetchall()}
        tx.ended = tx.ended or bool(endings)
        settled = []
        for ending in endings:
            seq = number_of(ending.id)
            task: object = ending.id if seq is None else seq
            if task in done:
                key = done.pop(task)
                if key is not None:
                    tx.keys.add(key)
                settled.append(True)
            else:
                settled.append(self.settle_in(tx, _printable(ending)))
        return settled

    def orphans(self) -> list[Attempt]:
        def work(run: Callable[..., Any]) -> list[str]:
            run(self.sql["forget_dead"])
            return [row[0] for row in run(self.sql["orphans"]).fetchall()]

        return [attempt for name in self.read(work) for attempt in self.running(name)]

    def wait(self, worker: Registration, seconds: float, *others: int) -> Woken:
        assert isinstance(worker, Worker)
        deadline = monotonic() + seconds
        while True:
            left = min(deadline - monotonic(), LOOK_S, max(0.0, worker.until - self.now()))
            ready = self.here().home.wait(worker.bell, left, *others)
            if ready.intersection(others):
                return Woken.OTHER
            if ready or self.now() >= worker.until:
                worker.bell.silence()
                return Woken.TASK
            if monotonic() >= deadline:
                return Woken.TIME
            query = f"{self.sql['look']}, ({self.sql['any_dead']})"
            is_ready, is_dead = self.read(lambda run: run(query).fetchone())  # noqa: B023
            if is_ready or is_dead:
                return Woken.TASK if is_ready else Woken.DEATH

    def changes(self) -> Changes:
        return self.retried(lambda: ServerChanges(self, self.here()))

    def delete_in(self, tx: Transaction, numbers: list[int]) -> None:
        if numbers:
            tx.run(f"delete from {self.prefix}task where seq = any(%s)", [numbers])


def _printable(ending: Ending) -> Ending:
    error, traceback, output = map(_without_nul, (ending.error, ending.traceback, ending.output))
    return replace(ending, error=error, traceback=traceback, output=output)


def _without_nul(text: str | None) -> str | None:
    """PostgreSQL has no text with a NUL character."""
    return text if text is None else text.replace("\0", "\\x00")
