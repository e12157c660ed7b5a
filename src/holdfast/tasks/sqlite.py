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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any

from .. import owner, process, system
from ..errors import CorruptStore, Unsupported, WouldDeadlock
from ..files import OwnedFd, inode_of, named, remove, sync_directory, try_lock
from ..locks.lock import Lock
from ..wait import RECHECK_S, poll
from .connection import BUSY_WAIT_S, Connection, check_directory, explain, inside_sqlite
from .reading import Result, Run, Transaction
from .sql import Store
from .statements import SCHEMA
from .store import Attempt, Changes, Registration, Woken, process_name

VERSION = 2
MAX_WAL_BYTES = 4 << 20  # the log is emptied when it is larger
_APPLICATION = 0x48467471  # "HFtq", in the header of the database
_CHECK_WAL_EVERY = 16  # commits
_CHECKPOINT_WAIT_MS = 200  # for readers. After a wait in vain, the log may grow to twice its size before the next one
_SOON_S = 0.001
_TOKENS_OF_A_BOOT = 1_000_000
_clock = getattr(time, "CLOCK_BOOTTIME", None)


class InProcess:
    """What one process has open. A forked child makes its own."""

    def __init__(self) -> None:
        self.registry = process.registry
        self.local = threading.local()  # its `connection`
        self.watch: system.Watch | None = None  # for dead workers. All idle workers of the process share it
        self.watching = threading.Lock()
        self.syncing = threading.Lock()
        self.numbers = count(1)  # of commits and syncs
        self.synced = 0  # every commit with a smaller number is on disk


class SqliteStore(Store):
    """The engine of a queue in a directory."""

    is_local = True

    def __init__(self, directory: str, *, durable: bool = True, mode: int = 0o644) -> None:
        super().__init__(p="", lock="", skip="", share="")
        self.name = self.path = os.path.abspath(directory)
        self.durable = durable
        self._mode = mode
        self._file = f"{self.path}/queue.db"
        self._lock = Lock(f"{self.path}/queue.lock", keep=True, mode=mode)
        self._in_process = InProcess()
        self._wal_limit = MAX_WAL_BYTES
        self._commits = 0
        self._sync_failed = False
        self._offset = 0.0  # of the clock
        check_directory(self.path)
        self._open()

    def close(self) -> None:
        here = self._in_process
        if here.watch is not None:
            here.watch.close()
            here.watch = None
        connection = here.local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

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
        if version != VERSION:
            raise Unsupported(
                f"{self.path}: this queue has format {version}, and this version of Holdfast knows {VERSION}. Upgrade "
                "Holdfast, or finish the tasks with the version that made the queue.",
                path=self.path,
            )
        self._learn_boot()

    def _create(self) -> None:
        """In one transaction, under the lock. A process that is killed before its end leaves no `queue.db`."""
        with self._lock:
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
                raw.executescript("begin;" + SCHEMA.format(p="", serial="integer", unlogged="") + "commit")
                raw.execute(f"pragma application_id = {_APPLICATION}")
                raw.execute(f"pragma user_version = {VERSION}")
            finally:
                raw.close()
            system.rename(private, self._file)
            sync_directory(self.path)
            sync_directory(os.path.dirname(self.path))

    def _learn_boot(self) -> None:
        """Read what belongs to this boot of the machine: what to add to its clock, and how many boots there were.

        Both are stored by the first process after a boot. A power failure may undo claims, because these are not
        synced. So the tokens of each boot begin behind all tokens of the boots before.
        """
        boot = owner.boot_id()
        if boot is None or _clock is None:
            return

        def stored(run: Run) -> list[Any]:
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
                connection = local.connection = Connection(self.path, self._lock)
            except sqlite3.Error as error:
                raise explain(error, self.path) from error
        return connection

    def transact(self, work: Callable[[Transaction], Result], *, sync: bool = True) -> Result:
        connection = self._connection()
        if connection.raw is not None and connection.raw.in_transaction:  # a signal handler
            raise WouldDeadlock(f"{self.name}: this thread is in the middle of a transaction", path=self.path)
        result, woken, has_changed = self._transact(connection, work)
        while woken and (missed := _ring(f"{self.path}/bells", woken)):  # they are dead: wake others
            _, woken, _ = self._transact(connection, lambda tx: setattr(tx, "ready", missed))
        if self.durable and sync and has_changed:
            self._sync(connection)
        return result

    def _sync(self, connection: Connection) -> None:
        """Wait until the log is on disk. Threads share a sync: one that begins after their commits serves all of them.

        After a failure, a later sync may succeed although the disk does not have what was written before. So the next
        transaction copies the log into the database, which is synced, too. Until then nothing is acknowledged.
        """
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier sync failed, and a reader keeps the log from being copied", self.path)
        here = self._here()
        mine = next(here.numbers)
        with here.syncing:
            if here.synced > mine:
                return
            target = next(here.numbers)
            try:
                connection.sync()
            except OSError:
                self._sync_failed = True
                raise
            here.synced = target

    def _transact(
        self, connection: Connection, work: Callable[[Transaction], Result]
    ) -> tuple[Result, list[str], bool]:
        hold = None
        try:
            hold = connection.acquire()
            with inside_sqlite:
                connection.open()
                return self._commit(connection, work)
        except sqlite3.Error as error:
            raise explain(error, self.path) from error
        finally:  # also if an interrupt came before `hold` was known
            try:
                connection.release(hold)
            except BaseException:  # an interrupt. Else all other writers would wait until the next write of this thread
                connection.release(hold)
                raise

    def _commit(self, connection: Connection, work: Callable[[Transaction], Result]) -> tuple[Result, list[str], bool]:
        """Return the result of `work`, the idle workers to wake, and whether a row was changed.

        One worker is woken for each task that became ready, or one to learn of a new due moment.
        """
        run, raw = connection.run, connection.raw
        assert raw is not None
        changes = raw.total_changes
        woken: list[str] = []
        try:
            run("begin immediate")
            tx = Transaction(run, self.now())
            result = work(tx)
            if tx.keys:
                self.finish(tx)
            if tx.ready or tx.due:
                woken = [row[0] for row in run("select worker from idle limit ?", (tx.ready or 1,)).fetchall()]
                for name in woken:
                    run(self.sql["forget"], (name,))
            run("commit")
        except BaseException:
            if raw.in_transaction:
                run("rollback")
            raise
        self._commits += 1
        if self._commits % _CHECK_WAL_EVERY == 0 or self._sync_failed:
            self._checkpoint_if_large(connection)
        return result, woken, raw.total_changes != changes

    def read(self, work: Callable[[Run], Result]) -> Result:
        connection = self._connection()
        try:
            with inside_sqlite:
                connection.open()
                return work(connection.run)
        except sqlite3.Error as error:
            raise explain(error, self.path) from error

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

    def insert(self, tx: Transaction, rows: list[tuple[Any, ...]]) -> list[int | None]:
        inserted = (tx.run(self.sql["insert"], row) for row in rows)
        return [cursor.lastrowid if cursor.rowcount else None for cursor in inserted]

    def register(self) -> Registration:
        return Worker(self)

    def orphans(self) -> list[Attempt]:
        """The running tasks of workers whose kernel lock is free. What else is left of dead workers is removed."""
        workers, idle = self.read(
            lambda run: [
                {row[0] for row in run(query).fetchall()} for query in (self.sql["workers"], "select worker from idle")
            ]
        )
        try:
            names = set(system.listdir(f"{self.path}/workers"))
        except FileNotFoundError:
            names = set()
        dead = {name for name in names | idle | workers if not self._is_alive(name)}
        for name in dead - workers:
            remove(f"{self.path}/workers/{name}")
            remove(f"{self.path}/bells/{name}")
        if not idle.isdisjoint(dead):
            self.forget_idle(*idle & dead)
        return self.read(lambda run: [one for name in sorted(dead & workers) for one in self.running(run, name)])

    def _is_alive(self, name: str) -> bool:
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
        here, bell = self._here(), worker.bell.fd
        with here.watching, suppress(OSError):  # too many watches: the waiter looks again every second
            if here.watch is None:
                here.watch = system.Watch(f"{self.path}/workers", OwnedFd, system.WATCH_CLOSING)
                worker.look = _SOON_S  # a worker may have died before
        watch = here.watch
        while True:
            left = min(deadline - monotonic(), worker.look, max(0.0, worker.until - self.now()))
            ready = poll([bell, *others, *([watch.fd] if watch is not None else [])], left)
            if ready.intersection(others):
                return Woken.OTHER
            if bell in ready:
                with suppress(BlockingIOError):
                    system.read(bell, 4096)
                return Woken.TASK
            if watch is not None and watch.fd in ready and watch.drain():  # one of the threads drains it
                worker.look = _SOON_S  # the kernel reports the close before it drops the lock
                return Woken.DEATH
            if not ready and (worker.look < RECHECK_S or watch is None):
                worker.look = min(worker.look * 10, RECHECK_S)
                return Woken.DEATH
            if monotonic() >= deadline:
                return Woken.TIME
            if self.read(self.has_task):  # the worker that was woken for it may be stopped
                return Woken.TASK

    def changes(self) -> Changes:
        return LogChanges(self._connection(), f"{self._file}-wal")


class Worker(Registration):
    """A worker of this process. Its file is locked until the process and all commands that inherited it have ended."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.look = RECHECK_S  # how long `wait` sleeps at most
        for folder in ("workers", "bells"):  # a copy may have left out empty ones
            with suppress(FileExistsError):
                system.mkdir(f"{store.path}/{folder}", 0o777)
        while True:
            self.name = f"{process_name()}.{os.urandom(4).hex()}"
            path, bell = f"{store.path}/workers/{self.name}", f"{store.path}/bells/{self.name}"
            self._file = OwnedFd(system.open_fd(path, system.O_NEW, 0o666))
            # Another process may have found the file before it was locked, and removed it.
            if try_lock(self._file.fd, system.EX_NB) and named(path, inode_of(system.fstat(self._file.fd))):
                system.mkfifo(bell, 0o622)
                self.bell = OwnedFd(system.open_fd(bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                return

    def fileno(self) -> int:
        return self._file.fd

    def close(self) -> None:
        if not self._file.is_open:  # also in a forked child
            return
        try:
            self.leave()
        finally:
            for folder in ("bells", "workers"):
                remove(f"{self._store.path}/{folder}/{self.name}")
            self._file.close()
            self.bell.close()


def _ring(bells: str, workers: list[str]) -> int:
    """Wake workers. Return how many are dead."""
    missed = 0
    for name in workers:
        try:
            with OwnedFd(system.open_fd(f"{bells}/{name}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as bell:
                system.write(bell.fd, b"!")
        except BlockingIOError:
            pass  # the pipe is full of earlier rings
        except OSError:
            missed += 1
    return missed


class LogChanges(Changes):
    """Watches the write-ahead log, which the connection keeps from being deleted."""

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._watch: system.Watch | None = None
        with suppress(OSError):
            self._watch = system.Watch(path, OwnedFd, system.WATCH_WRITING)

    def wait(self, seconds: float) -> None:
        if self._watch is None:
            time.sleep(min(seconds, 0.05))
        elif poll([self._watch.fd], seconds):
            time.sleep(_SOON_S)  # so that a waiter beside busy workers looks a thousand times a second at most
            self._watch.drain()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close(reuse=True)
            self._watch = None
