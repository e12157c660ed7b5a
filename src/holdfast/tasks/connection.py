"""The directory of a queue in SQLite, the connections, the lock of its writers, the watch of its log."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from time import monotonic, sleep
from typing import Any

from .. import system
from ..errors import CorruptStore, LockLost, Unsupported
from ..files import OwnedFd, try_lock, write_at
from ..locks.hold import Hold
from ..locks.lock import Lock
from ..paths import mount_of
from ..sqlite import Database, inside_sqlite, opened
from ..wait import poll
from .reading import Result, Run
from .store import Changes

# At this size SQLite copies the log into the database, and then writes it again from its beginning. So the file keeps
# its size. A sync of a file that grows takes longer, so the log of durable commits is small (3 MiB). Without these, the
# two syncs of each copy cost most of a put, so the log is large (12 MiB).
_CHECKPOINT_PAGES = {True: 1500, False: 6000}  # durable or not
_DURABLE_WAL_BYTES = 3 << 20
MAX_WAL_BYTES = 16 << 20  # a log that readers have made larger is emptied, or cut when it begins again
SOON_S = 0.001
LOOK_EVERY_S = 0.001  # for waiters, and for a database that was deleted
_READ_ONLY = (
    "this user may look at the queue and not change it. To share it with a group: chmod 2775 on the directory, "
    "mode=0o664 and the umask 002 (docs/tasks.md, Users)"
)
BUSY_WAIT_S = 60.0  # for another process that opens or closes the database
_PRAGMAS = (
    "pragma synchronous = normal",  # the log is synced by `sync`, and by SQLite itself before each checkpoint
    f"pragma journal_size_limit = {MAX_WAL_BYTES}",
    "select count(*) from sqlite_master",  # creates the log
)
_OPTIONS: dict[str, Any] = {"timeout": BUSY_WAIT_S, "cached_statements": 256}


class Connection(Database):
    """A connection of one thread of one process. After `open`, `run` runs a statement and returns a new cursor, and
    `run_alone` runs one outside of a transaction and returns the same cursor each time.

    A fork closes all connections before, and the next `open` opens them again.

    `acquire` acquires the lock of all writers. A free lock costs one system call: the file stays open. A writer that
    finds the lock held or waiters in its queue waits as `Lock` does, in order of arrival. A writer that looked into the
    queue in the last millisecond does not look again: it may go before a waiter for so long. If the file is deleted,
    writers that have it open and others do not exclude each other. Then SQLite's own locks do.

    A process that may not write here cannot create the log. If no other process has the queue open, there is none. Then
    `read` shares the lock of the writers, and reads the file without a log.
    """

    run_alone: Callable[..., Any]

    def __init__(self, directory: str, lock: Lock, durable: bool) -> None:
        Database.__init__(self)
        self.check_at = 0.0  # when to see again whether the database was deleted
        self._checkpoint = f"pragma wal_autocheckpoint = {_CHECKPOINT_PAGES[durable]}"
        self._lock = lock
        self._queue = f"{lock.path}.queue"
        self._look_at = 0.0
        self._writer: OwnedFd | None = None  # the file of the lock
        self._log: OwnedFd | None = None
        self._file = f"{directory}/queue.db"

    def open(self) -> None:
        """Open it, unless it is open. The caller has `inside_sqlite`."""
        if self.raw is None:
            self.run_alone = self.connect(self._file, *_PRAGMAS, self._checkpoint, **_OPTIONS).cursor().execute
            self.check_at = 0.0

    def read(self, work: Callable[[Run], Result]) -> Result:
        """Call `work` with `run`."""
        with inside_sqlite:
            try:
                self.open()
            except sqlite3.OperationalError:
                if system.access(self._file, os.W_OK):
                    raise
            else:
                return work(self.run)
        with OwnedFd(system.open_fd(self._lock.path, system.O_READ)) as lock:
            system.lock(lock.fd, system.SH)
            with inside_sqlite:
                if system.access(f"{self._file}-wal", os.F_OK):  # another process has opened the queue meanwhile
                    self.open()
                    return work(self.run)
                with closing(opened(self._file, *_PRAGMAS, mode="ro&immutable=1", **_OPTIONS)) as raw:
                    return work(raw.execute)

    def before_fork(self) -> None:
        super().before_fork()
        if self.raw is None:
            self._log = None

    def sync(self) -> None:
        """Wait until the log is on disk. It is not deleted as long as this connection is open."""
        if self._log is None:
            try:
                self._log = OwnedFd(system.open_fd(f"{self._file}-wal", system.O_READ))
            except FileNotFoundError:  # deleted before a fork, when all of it was in the database and on disk
                return
        system.fdatasync(self._log.fd)

    def fill_log(self, size: int) -> None:
        """Give the log the size that it will have anyway: a sync of a file that grows takes twice as long.

        The caller holds the lock of all writers. SQLite ignores zeros behind its last commit. But a program that does
        not know that lock may commit, such as the command sqlite3. So SQLite's own lock is held meanwhile.
        """
        if size >= _DURABLE_WAL_BYTES:
            return
        self.run("pragma busy_timeout = 0")
        try:
            with suppress(OSError, sqlite3.OperationalError):  # the disk is full, or such a program writes
                self.run("begin immediate")
                with OwnedFd(system.open_fd(f"{self._file}-wal", system.O_EXISTING)) as log:
                    size = system.fstat(log.fd).st_size
                    write_at(log.fd, bytes(max(0, _DURABLE_WAL_BYTES - size)), size)
        finally:
            if self.in_transaction:
                self.run("rollback")
            self.run(f"pragma busy_timeout = {int(BUSY_WAIT_S * 1000)}")

    def acquire(self) -> Hold | None:
        """Acquire the lock of all writers. None: it is held with the open file."""
        if self._writer is None:
            try:
                with self._lock.acquire():  # creates the file
                    self._writer = OwnedFd(system.open_fd(self._lock.path, system.O_EXISTING))
            except PermissionError as error:
                raise PermissionError(error.errno, _READ_ONLY, os.path.dirname(self._lock.path)) from None
        now = monotonic()
        if now >= self._look_at:
            if system.access(self._queue, 0):
                return self._lock.acquire()
            self._look_at = now + LOOK_EVERY_S
        return None if try_lock(self._writer.fd, system.EX_NB) else self._lock.acquire()

    def release(self, hold: Hold | None) -> None:
        if hold is not None:
            with suppress(LockLost):
                hold.release()
        elif self._writer is not None:
            system.lock(self._writer.fd, system.UN)

    def close(self) -> None:
        self._log = self._writer = None
        super().close()


class LogChanges(Changes):
    """Watches the write-ahead log, which the connection keeps from being deleted."""

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._watch: system.Watch | None = None
        with suppress(OSError):
            self._watch = system.Watch(path, OwnedFd, system.WATCH_WRITING)

    def wait(self, seconds: float) -> None:
        if self._watch is None:
            sleep(min(seconds, 0.05))
        elif poll([self._watch.fd], seconds):
            sleep(SOON_S)  # so that a waiter beside busy workers looks a thousand times a second at most
            self._watch.drain()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close(reuse=True)
            self._watch = None


def check_directory(path: str) -> None:
    """Create the directory. Refuse one that is used for something else, or is on a network file system."""
    names: list[str] | None = None
    try:
        names = system.listdir(path)
    except FileNotFoundError:
        os.makedirs(path, exist_ok=True)
    except NotADirectoryError:
        text = "a queue is a directory, and this is a file or below one"
        raise NotADirectoryError(errno.ENOTDIR, text, path) from None
    ours = ("queue.db", "queue.lock", "workers", "bells")
    foreign = sorted(name for name in names or () if not name.startswith(ours))
    if names and foreign and "queue.db" not in names:
        text = f"this directory contains something else ({foreign[0]}). Give the queue a directory of its own"
        if "queue.json" in foreign:
            text = (
                "this queue has the format of an earlier version (queue.json). Finish its tasks with the version that "
                "made it, and use another directory"
            )
        raise FileExistsError(errno.EEXIST, text, path)
    mount = mount_of(system.stat(path).st_dev, path)
    if not mount.events:
        if names is None:
            system.rmdir(path)
        raise Unsupported(
            f"{path}: {mount.where} is {mount.kind}, a network file system. SQLite is not safe there. Use a disk of "
            "this machine, or PostgreSQL for workers on several machines: TaskQueue('postgresql://…').",
            path=path,
        )


def explain(error: sqlite3.Error, path: str) -> Exception:
    """The error of this package or of the operating system that an SQLite error stands for."""
    text, file = str(error), f"{path}/queue.db"
    if isinstance(error, sqlite3.DataError):
        return ValueError(f"{path}: SQLite cannot store this ({text}). Store it in a file, and its path in the task.")
    if not isinstance(error, sqlite3.OperationalError) or "no such" in text:  # a table or a column
        return CorruptStore(
            f"{file} is damaged ({text}). It was left as it is. Restore it from a backup, or read what is left with "
            "the command sqlite3 and .recover.",
            path=path,
        )
    if "unable to open" in text:
        try:  # SQLite does not say why
            OwnedFd(system.open_fd(f"{path}/queue.lock", system.O_READ)).close()
            system.stat(file)
        except OSError as reason:
            return reason
    for part, number, message in (
        ("full", errno.ENOSPC, "the disk is full. What was acknowledged before is kept"),
        ("readonly", errno.EACCES, f"this process may not write here ({text})"),
        ("unable to open", errno.EACCES, f"this process may not write here ({text})"),
        ("disk I/O", errno.EIO, text),
        ("locked", errno.EBUSY, f"another program has locked the database for {BUSY_WAIT_S:g} s. End it"),
    ):
        if part in text:
            return OSError(number, message, path)
    return error
