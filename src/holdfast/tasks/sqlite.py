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
tasks ready removes n workers from that table and wakes them after the commit. So no task is missed, and a put
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from .. import owner, process, system
from ..errors import CorruptStore, Unsupported, WouldDeadlock
from ..files import OwnedFd, inode_of, named, remove, sync_directory, try_lock
from ..locks.lock import Lock
from ..sqlite import inside_sqlite
from ..wait import RECHECK_S
from .connection import (
    BUSY_WAIT_S,
    LOOK_EVERY_S,
    MAX_WAL_BYTES,
    SOON_S,
    Connection,
    LogChanges,
    check_directory,
    explain,
)
from .reading import Result, Run, Transaction
from .sql import Store
from .sqlite_worker import Worker, is_name, wake
from .statements import READY, SCHEMA, number_of
from .store import Attempt, Changes, Ending, NewTask, Registration

VERSION = 2
_APPLICATION = 0x48467471  # "HFtq", in the header of the database
_CHECK_WAL_EVERY = 16  # commits
_CHECKPOINT_WAIT_MS = 200  # for readers. After a wait in vain, the log may grow to twice its size before the next one
_TOKENS_OF_A_BOOT = 1_000_000
Argument = TypeVar("Argument")
_clock = getattr(time, "CLOCK_BOOTTIME", None)

# A ready task, in one statement and its own transaction. If a worker is idle, `payload` must not be null, so the
# statement is ignored. It is also ignored if a task with that id exists.
ADD_ALONE = f"""insert or ignore into task (id, function, payload, priority, attempts, timeout, put_at, state, ord)
    values (?, ?, case when exists (select 1 from idle) then null else ? end, ?, ?, ?, ?, {READY},
        (select coalesce(max(seq), 0) + 1 from task))"""


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
        self._inode: process.Inode | None = None  # of `queue.db`
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
        self._inode = inode_of(system.stat(self._file))
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
            known = stored(tx.run)  # another process may be the first
            if known[0] == boot:
                return known
            tx.run(self.sql["set_meta"], ("boot", json.dumps(following)))
            return following

        known = self.read(stored)
        if known[0] != boot:
            following = [boot, time.time() - time.clock_gettime(_clock), known[2] + 1]
            known = following
            with suppress(PermissionError):  # a user who may only read
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
            connection = local.connection = Connection(self.path, self._lock, self.durable)
        return connection

    def transact(self, work: Callable[[Transaction], Result], *, sync: bool = True) -> Result:
        connection = self._connection()
        if connection.in_transaction:  # a signal handler
            raise WouldDeadlock(f"{self.name}: this thread is in the middle of a transaction", path=self.path)
        result, woken, has_changed = self._locked(connection, self._commit, work)
        while woken and (missed := wake(f"{self.path}/bells", woken)):  # they are dead: wake others
            _, woken, _ = self._locked(connection, self._commit, lambda tx: setattr(tx, "ready", missed))
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

    def _locked(self, connection: Connection, step: Callable[[Connection, Argument], Result], of: Argument) -> Result:
        """Call `step`, which commits, under the lock of all writers."""
        hold = None
        try:
            hold = connection.acquire()
            with inside_sqlite:
                connection.open()
                if (now := monotonic()) >= connection.check_at:
                    self._check_file()
                    connection.check_at = now + LOOK_EVERY_S
                result = step(connection, of)
                self._commits += 1
                if self._commits % _CHECK_WAL_EVERY == 0 or self._sync_failed:
                    self._checkpoint_if_large(connection)
                return result
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
        return result, woken, raw.total_changes != changes

    def read(self, work: Callable[[Run], Result]) -> Result:
        connection = self._connection()
        try:
            result = connection.read(work)
        except sqlite3.Error as error:
            raise explain(error, self.path) from error
        self._check_file()
        return result

    def _check_file(self) -> None:
        if self._inode is not None and named(self._file, self._inode) is None:
            text = "queue.db was deleted, replaced or renamed while this queue was open. Open it again: TaskQueue(…)"
            raise FileNotFoundError(errno.ENOENT, text, self.path)

    def _checkpoint_if_large(self, connection: Connection) -> None:
        """Empty the write-ahead log if readers have made it large, unless one still needs it."""
        try:
            size = system.stat(f"{self._file}-wal").st_size
        except FileNotFoundError:
            return
        if size <= self._wal_limit and not self._sync_failed:
            if self.durable:
                connection.fill_log(size)
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
        if len(tasks) == 1 and max_waiting is None and connection is None:
            (task,) = tasks
            if task.key is None and not task.delay and not task.after:
                mine = self._connection()
                if not mine.in_transaction:  # else `transact` refuses this
                    number = self._locked(mine, _insert, task)
                    if number is not None:
                        if self.durable:
                            self._sync(mine)
                        return [(task.id or f"_{number}", True)]
        return super().add(tasks, max_waiting=max_waiting, connection=connection)

    def insert(self, tx: Transaction, rows: list[tuple[Any, ...]]) -> list[int | None]:
        inserted = (tx.run(self.sql["insert"], row) for row in rows)
        return [cursor.lastrowid if cursor.rowcount else None for cursor in inserted]

    def settle_in(self, tx: Transaction, endings: Sequence[Ending]) -> list[bool]:
        """As in `Store`. Most tasks are done, have no key, and no task waits for them: one statement ends them."""
        now, settled, others = time.time(), [], []
        for ending in endings:
            seq = number_of(ending.id)
            by, task = ("done_id", ending.id) if seq is None else ("done_seq", seq)
            values = (now, ending.result_json, task, ending.token)
            settled.append(ending.state == "done" and tx.run(self.sql[by], values).rowcount == 1)
            if not settled[-1]:
                others.append(ending)
        of_others = iter(super().settle_in(tx, others))
        return [is_done or next(of_others) for is_done in settled]

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
            names = set(filter(is_name, system.listdir(f"{self.path}/workers")))
        except FileNotFoundError:
            names = set()
        dead = {name for name in names | idle | workers if not self._is_alive(name, has_tasks=name in workers)}
        if not idle.isdisjoint(dead):
            self.forget_idle(*idle & dead)
        return self.read(lambda run: [one for name in sorted(dead & workers) for one in self.running(run, name)])

    def _is_alive(self, name: str, *, has_tasks: bool) -> bool:
        """Is its kernel lock held? The files of a dead worker without tasks are removed under that lock: a process that
        is about to register as this worker finds that it cannot lock its file, and chooses another name."""
        if not is_name(name):
            return False
        path = f"{self.path}/workers/{name}"
        try:
            # Read-only: closing a file that could be written wakes all idle workers.
            file = OwnedFd(system.open_fd(path, system.O_READ))
        except FileNotFoundError:
            return False
        with file:
            if not try_lock(file.fd, system.EX_NB):
                return True
            if not has_tasks and named(path, inode_of(system.fstat(file.fd))):
                remove(f"{self.path}/bells/{name}")
                remove(path)
            return False

    def watch(self, worker: Worker) -> system.Watch | None:
        """Watches for dead workers. None: there are too many watches, so the waiter looks again every second."""
        here = self._here()
        with here.watching, suppress(OSError):
            if here.watch is None:
                here.watch = system.Watch(f"{self.path}/workers", OwnedFd, system.WATCH_CLOSING)
                worker.recheck_s = SOON_S  # a worker may have died before
        return here.watch

    def may_have_died(self, worker: Registration, ready: set[int]) -> bool:
        watch = self._here().watch
        if watch is not None and watch.fd in ready and watch.drain():  # one of the threads drains it
            worker.recheck_s = SOON_S  # the kernel reports the close before it drops the lock
            return True
        if not ready and (worker.recheck_s < RECHECK_S or watch is None):
            worker.recheck_s = min(worker.recheck_s * 10, RECHECK_S)
            return True
        return False

    def changes(self) -> Changes:
        self.read(lambda run: None)  # opens the connection, which keeps the log
        return LogChanges(self._connection(), f"{self._file}-wal")


def _insert(connection: Connection, task: NewTask) -> int | None:
    """Add a task that is ready at once. None: a worker is idle and must be woken, or the id exists."""
    values = (task.id, task.function, task.payload_json, task.priority, task.attempts, task.timeout, time.time())
    cursor = connection.run_alone(ADD_ALONE, values)
    return cursor.lastrowid if cursor.rowcount else None
