"""Tasks in an SQLite database, for the processes of one machine.

    queue.db, queue.db-wal, queue.db-shm    the database and its write-ahead log
    queue.lock                              the lock of all writers
    workers/<name>                          a worker, which holds a kernel lock on its file as long as it lives
    bells/<name>                            a FIFO. A byte in it wakes an idle worker

Every write transaction and every checkpoint runs under `queue.lock`. Writers are served in order and woken without
polling, so no writer meets SQLITE_BUSY. Two writers or checkpointers at a time are also what the WAL-reset bug of
SQLite before 3.51.3 needs. Readers do not take the lock.

A connection belongs to one thread. It is closed before a fork, because SQLite forbids that a child inherits it. No code
of this process opens or closes `queue.db` itself: that would drop SQLite's POSIX locks.

A claim that finds no task adds its worker to the table `idle`, in the same transaction. A transaction that makes n
tasks ready removes n workers from that table and rings their bells after the commit. So no task is missed, and a put
wakes no more workers than there are tasks. If a woken worker dies, the kernel closes its file in `workers`, which all
idle workers watch.

Delayed tasks: one idle worker wakes at the next due moment (`until` in the table `idle`). When it gets a task instead,
it rings another one.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from .. import owner, process, system
from ..errors import CorruptStore, Unsupported, WouldDeadlock
from ..files import OwnedFd, remove, sync_directory, try_lock
from ..wait import RECHECK_S, poll
from .connection import BUSY_WAIT_S, Connection, WriterLock, check_directory, explain, inside_sqlite
from .local_workers import SOON_S, InProcess, LogChanges, Worker, make_folders, ring
from .reading import Result
from .rows import NEVER, Transaction
from .sql import SqlStore
from .statements import DONE, NUMBERS, SCHEMA
from .store import Attempt, Changes, Ending, NewTask, Registration, Woken

VERSION = 1
MAX_WAL_BYTES = 4 << 20  # the log is emptied when it is larger
_APPLICATION = 0x48467471  # "HFtq", in the header of the database
_CHECK_WAL_EVERY = 16  # commits
_CHECKPOINT_WAIT_MS = 200  # for readers. After a wait in vain, the log may grow to twice its size before the next one

_IDLE = "create table idle (worker text primary key, until double precision not null)"
_TOKENS_OF_A_BOOT = 1_000_000
_clock = getattr(time, "CLOCK_BOOTTIME", None)


class SqliteStore(SqlStore):
    """The engine of a queue in a directory."""

    is_local = True

    def __init__(self, directory: str, *, durable: bool = True, mode: int = 0o644) -> None:
        super().__init__(prefix="", mark="?", lock="", skip="", share="")
        self.sql["idle"] = "select worker from idle"
        self.name = self.path = os.path.abspath(directory)
        self.durable = durable
        self._mode = mode
        self._file = f"{self.path}/queue.db"
        self._in_process = InProcess()
        self._wal_limit = MAX_WAL_BYTES
        self._commits = 0
        self._sync_failed = False
        check_directory(self.path)
        self._lock = WriterLock(f"{self.path}/queue.lock", mode)
        self._offset = 0.0  # of the clock
        self._open()

    def close(self) -> None:
        self._in_process.close()

    # Opening.

    def _open(self) -> None:
        """Create or check the schema."""
        if not system.access(self._file, os.F_OK):
            self._create()
        application, version = self.read(
            lambda run: [run(f"pragma {name}").fetchone()[0] for name in ("application_id", "user_version")]
        )
        if application != _APPLICATION:
            raise CorruptStore(f"{self._file} is not a task queue of Holdfast. It was left as it is.", path=self.path)
        if version > VERSION:
            raise Unsupported(
                f"{self.path}: this queue has format {version}, and this version of Holdfast knows {VERSION}. Upgrade "
                "Holdfast.",
                path=self.path,
            )
        self._learn_boot()

    def _create(self) -> None:
        """In one transaction, under the lock. A process that is killed before its end leaves no `queue.db`."""
        with self._lock.creating():
            if system.access(self._file, os.F_OK):
                return
            private = f"{self._file}.new"
            for name in (private, f"{private}-wal", f"{private}-shm", f"{private}-journal"):
                remove(name)  # of a process that was killed
            OwnedFd(system.open_fd(private, system.O_NEW, self._mode)).close()
            raw = sqlite3.connect(private, isolation_level=None)
            try:
                raw.execute("pragma page_size = 2048")  # small pages: a commit writes a few of them to the log
                raw.execute("pragma journal_mode = wal")
                raw.executescript("begin;" + SCHEMA.format(p="", serial="integer") + _IDLE + "; commit")
                raw.execute(f"pragma application_id = {_APPLICATION}")
                raw.execute(f"pragma user_version = {VERSION}")
            finally:
                raw.close()
            system.rename(private, self._file)
            sync_directory(self.path)
            sync_directory(os.path.dirname(self.path))
        make_folders(self.path)

    def _learn_boot(self) -> None:
        """Read what belongs to this boot of the machine: what to add to its clock, and how many boots there were.

        Both are stored by the first process after a boot. A power failure may undo claims, because these are not
        synced. So the tokens of each boot begin behind all tokens of the boots before.
        """
        boot = owner.boot_id()
        if boot is None or _clock is None:
            return

        def stored(run: Callable[..., Any]) -> list[Any]:
            row = run(self.sql["meta"], ("boot",)).fetchone()
            return ["", 0.0, -1] if row is None else json.loads(row[0])

        def work(tx: Transaction) -> list[Any]:
            known = stored(tx.run)
            if known[0] != boot:
                known = [boot, time.time() - time.clock_gettime(_clock), known[2] + 1]
                tx.run(self.sql["set_meta"], ("boot", json.dumps(known)))
            return known

        known = self.read(stored)
        if known[0] != boot:
            known = self.transact(work)
        self._offset, self.least_token = known[1], known[2] * _TOKENS_OF_A_BOOT

    def now(self) -> float:
        if _clock is None or owner.boot_id() is None:
            return time.time()
        return time.clock_gettime(_clock) + self._offset

    # Transactions.

    def _here(self) -> InProcess:
        if self._in_process.registry is not process.registry:
            self._in_process = InProcess()
        return self._in_process

    def _connection(self) -> Connection:
        local = self._here().local
        try:
            connection: Connection = local.connection
        except AttributeError:
            try:
                connection = local.connection = Connection(self._file)
            except sqlite3.Error as error:
                raise self._explain(error) from error
        return connection

    def transact(self, work: Callable[[Transaction], Result], *, sync: bool = True) -> Result:
        connection = self._connection()
        if connection.raw is not None and connection.raw.in_transaction:  # a signal handler, or garbage is collected
            raise WouldDeadlock(f"{self.name}: this thread is in the middle of a transaction", path=self.path)
        result, woken = self._transact(connection, work)
        while missed := ring(f"{self.path}/bells", woken):  # they are dead: wake others
            _, woken = self._transact(connection, lambda tx: setattr(tx, "ready", missed))
        if self.durable and sync:
            self._sync(connection)
        return result

    def _sync(self, connection: Connection) -> None:
        """Wait until the log is on disk.

        After a failure, a later sync may succeed although the disk does not have what was written before. So the next
        transaction copies the log into the database, which is synced, too. Until then nothing is acknowledged.
        """
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier sync failed, and a reader keeps the log from being copied", self.path)
        try:
            self._here().syncer.sync(connection)
        except OSError:
            self._sync_failed = True
            raise

    def _transact(self, connection: Connection, work: Callable[[Transaction], Result]) -> tuple[Result, list[str]]:
        hold = None
        try:
            hold = self._lock.acquire(connection)
            with inside_sqlite:
                connection.open()
                return self._commit(connection, work)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        finally:  # also if an interrupt came before `hold` was known
            try:
                self._lock.release(connection, hold)
            except BaseException:  # an interrupt. Else all other writers would wait until the next write of this thread
                self._lock.release(connection, hold)
                raise

    def _commit(self, connection: Connection, work: Callable[[Transaction], Result]) -> tuple[Result, list[str]]:
        """Return the result of `work`, and the idle workers to wake."""
        run = connection.run
        try:
            run("begin immediate")
            tx = Transaction(run, self.now())
            result = work(tx)
            if tx.keys:
                self.finish(tx)
            woken = self._choose_idle(tx) if tx.ready or tx.due else []
            run("commit")
        except BaseException:
            if connection.raw is not None and connection.raw.in_transaction:
                run("rollback")
            raise
        self._commits += 1
        if self._commits % _CHECK_WAL_EVERY == 0 or self._sync_failed:
            self._checkpoint_if_large(connection)
        return result, woken

    def read(self, work: Callable[[Callable[..., Any]], Result]) -> Result:
        connection = self._connection()
        try:
            with inside_sqlite:
                connection.open()
                return work(connection.run)
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _explain(self, error: sqlite3.Error) -> Exception:
        return explain(error, self.path, self._file)

    def _checkpoint_if_large(self, connection: Connection) -> None:
        """Empty the write-ahead log, unless a reader still needs it."""
        try:
            size = system.stat(f"{self._file}-wal").st_size
        except FileNotFoundError:
            return
        if size <= self._wal_limit and not self._sync_failed:
            return
        connection.run(f"pragma busy_timeout = {_CHECKPOINT_WAIT_MS}")
        try:
            failed = connection.run("pragma wal_checkpoint(truncate)").fetchone()[0] != 0
        except sqlite3.OperationalError:  # the disk may be full. The transaction is committed all the same
            failed = True
        connection.run(f"pragma busy_timeout = {int(BUSY_WAIT_S * 1000)}")
        self._wal_limit = 2 * size if failed else MAX_WAL_BYTES
        self._sync_failed = self._sync_failed and failed

    # Operations that differ from other engines.

    def add(
        self, tasks: Sequence[NewTask], *, max_waiting: int | None = None, connection: Any = None
    ) -> list[tuple[str, bool]]:
        if connection is not None:
            raise Unsupported(f"{self.name}: connection= needs a queue on PostgreSQL, not a directory.", path=self.path)
        known = [task.id for task in tasks if task.id is not None]
        if known and len(known) == len(tasks):
            found = self.read(lambda run: [self.find(run, id, "by") for id in known])
            if all(found):
                return [(id, False) for id in known]  # nothing to write, and nothing to sync
        return self.transact(lambda tx: self.add_in(tx, tasks, max_waiting))

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

        def work(tx: Transaction) -> list[Attempt]:
            for ending in endings:
                self.settle_in(tx, ending)
            self.finish(tx)  # a key whose task ended may have a task for this worker
            if worker.is_idle:
                tx.run("delete from idle where worker = ?", name)
            attempts = self.claim_in(tx, worker.name, count, reserve=reserve)
            tx.ready = max(0, tx.ready - len(attempts))  # these need no other worker
            if attempts:
                tx.due = tx.due or keeps_time
                worker.next_is_idle = False
            elif idle:
                worker.until = self.time_to_wake(tx.run)
                tx.run("insert into idle (worker, until) values (?, ?)", (worker.name, worker.until))
                worker.next_is_idle = True
                tx.due = False
            return attempts

        name = (worker.name,)
        keeps_time = worker.is_idle and worker.until < NEVER
        if idle:
            worker.prepare(self)
        worker.next_is_idle = False
        attempts = self.transact(work, sync=bool(endings))  # a claim that a power failure undoes is no loss
        worker.is_idle = worker.next_is_idle
        return attempts

    def _choose_idle(self, tx: Transaction) -> list[str]:
        """Idle workers to wake: one for each task that became ready, or one to learn of a new due moment."""
        found = tx.run("select worker from idle limit ?", (tx.ready or 1,)).fetchall()
        for row in found:
            tx.run("delete from idle where worker = ?", row)
        return [row[0] for row in found]

    def register(self) -> Registration:
        return Worker(self)

    def forget_idle(self, worker: Worker) -> None:
        """A worker does not wait any more. If it was woken for a task, or keeps the time, another one does that."""

        def work(tx: Transaction) -> None:
            tx.run("delete from idle where worker = ?", (worker.name,))
            tx.ready = 1
            tx.due = True

        if worker.is_idle:
            worker.is_idle = False
            self.transact(work, sync=False)

    def orphans(self) -> list[Attempt]:
        """The running tasks of workers whose kernel lock is free. What else is left of dead workers is removed."""
        workers, idle = self.read(
            lambda run: [{row[0] for row in run(self.sql[name]).fetchall()} for name in ("workers", "idle")]
        )
        try:
            names = set(system.listdir(f"{self.path}/workers"))
        except FileNotFoundError:
            names = set()
        dead = [name for name in names | idle | workers if not self._is_alive(name)]
        for name in dead:
            if name not in workers:
                remove(f"{self.path}/workers/{name}")
                remove(f"{self.path}/bells/{name}")
        if not idle.isdisjoint(dead):
            self._forget_dead(idle.intersection(dead))
        return [attempt for name in dead if name in workers for attempt in self.running(name)]

    def _forget_dead(self, workers: set[str]) -> None:
        """One of them may have been the one that wakes at the next due moment."""

        def work(tx: Transaction) -> None:
            for name in workers:
                tx.run("delete from idle where worker = ?", (name,))
            tx.due = True

        self.transact(work, sync=False)

    def _is_alive(self, name: str) -> bool:
        if name in self._here().workers:
            return True
        try:
            # Read-only: closing a file that could be written wakes all idle workers.
            file = OwnedFd(system.open_fd(f"{self.path}/workers/{name}", system.O_READ))
        except FileNotFoundError:
            return False
        with file:
            return not try_lock(file.fd, system.EX_NB)

    def wait(self, worker: Registration, seconds: float, *others: int) -> Woken:
        assert isinstance(worker, Worker)
        deadline = monotonic() + seconds
        while True:
            with self._here().watching(f"{self.path}/workers", worker) as watch:
                left = min(deadline - monotonic(), worker.look, max(0.0, worker.until - self.now()))
                ready = poll([worker.bell.fd, *others, *([watch.fd] if watch is not None else [])], left)
            if ready.intersection(others):
                return Woken.OTHER
            if worker.bell.fd in ready:
                with suppress(BlockingIOError):
                    system.read(worker.bell.fd, 4096)
                return Woken.TASK
            if watch is not None and watch.fd in ready:
                watch.drain()
                worker.look = SOON_S  # the kernel reports the close before it drops the lock
                return Woken.DEATH
            if worker.look < RECHECK_S or not self._here().is_watching:
                worker.look = min(worker.look * 10, RECHECK_S)
                return Woken.DEATH
            if monotonic() >= deadline:
                return Woken.TIME
            if self.read(self._has_task):  # the worker that was woken for it may be stopped
                return Woken.TASK

    def _has_task(self, run: Callable[..., Any]) -> bool:
        due = run(self.sql["time_to_wake"]).fetchone()[0]
        return (due is not None and due <= self.now()) or run(self.sql["ready"], (1,)).fetchone() is not None

    def changes(self) -> Changes:
        return LogChanges(self._connection(), f"{self._file}-wal")

    def delete_in(self, tx: Transaction, numbers: list[int]) -> None:
        super().delete_in(tx, numbers)
        if numbers:
            row = tx.run(self.sql["meta"], ("deleted",)).fetchone()
            tx.run(self.sql["set_meta"], ("deleted", str(int(row[0] if row else 0) + len(numbers))))

    def count(self) -> dict[str, int]:
        """Done tasks are what is left of all numbers: counting them would take as long as the history is."""

        def work(run: Callable[..., Any]) -> dict[str, int]:
            run("begin")
            try:
                counts = {
                    name: run(self.sql["count"].format(state=state)).fetchone()[0]
                    for name, state in NUMBERS.items()
                    if state != DONE
                }
                deleted = run(self.sql["meta"], ("deleted",)).fetchone()
                newest = run(self.sql["newest"]).fetchone()[0]
            finally:
                run("rollback")
            return counts | {"done": newest - int(deleted[0] if deleted else 0) - sum(counts.values())}

        return self.read(work)
