"""The directory of a queue in SQLite, the connections of a process to it, and the lock of its writers."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import threading
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.request import pathname2url
from weakref import WeakSet

from .. import process, system
from ..errors import CorruptStore, LockLost, Unsupported
from ..files import OwnedFd, try_lock
from ..locks.hold import Hold
from ..locks.lock import Lock
from ..paths import mount_of

_OLD_FORMAT = "queue.json"
BUSY_WAIT_S = 60.0  # for another process that opens or closes the database

# Every thread that is inside SQLite has this mutex, and a fork waits for it. A child would find SQLite's own mutexes
# locked for ever by threads that it does not have.
inside_sqlite = RLock()
_all: WeakSet[Connection] = WeakSet()


class Connection:
    """A connection of one thread of one process. `run` runs a statement, after `open`.

    A fork closes all connections before, and the next `open` opens them again. SQLite notes in memory which POSIX locks
    its process has on a file. A child that inherits these notes would open the file and believe that it has the locks
    of its parent. Then another process that closes the database would delete the log that the child still writes.
    """

    run: Callable[..., Any]

    def __init__(self, file: str) -> None:
        self.wal = f"{file}-wal"
        self.registry = process.registry
        self.writer: OwnedFd | None = None  # the file of `WriterLock`
        self.raw: sqlite3.Connection | None = None
        self._log: OwnedFd | None = None
        self._log_may_be_old = False
        self._uri = f"file:{pathname2url(file)}?mode=rw"
        with inside_sqlite:
            self.open()
            _all.add(self)

    def open(self) -> None:
        """Open it, unless it is open. The caller has `inside_sqlite`."""
        if self.raw is None:
            self._open()

    def _open(self) -> None:
        # The store gives it to one thread. The check would also refuse that another thread closes it.
        raw = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=BUSY_WAIT_S,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=False,
        )
        # The log is synced by `Syncer`, and by SQLite itself before each checkpoint.
        raw.execute("pragma synchronous = normal")
        raw.execute("pragma wal_autocheckpoint = 0")
        raw.execute("select count(*) from sqlite_master").fetchone()  # creates the log
        self.raw, self.run = raw, raw.execute

    def before_fork(self) -> None:
        if self.raw is not None and self.registry is process.registry:
            self._log_may_be_old = True  # SQLite deletes the log if this was the last connection of all processes
            self.raw.close()
            self.raw = None

    def sync(self) -> None:
        """Wait until the log is on disk. It is not deleted as long as this connection is open."""
        if self._log is None or self._log_may_be_old:
            self._log_may_be_old = False
            try:
                self._log = OwnedFd(system.open_fd(self.wal, system.O_READ))
            except FileNotFoundError:  # deleted before a fork, when all of it was in the database and on disk
                self._log_may_be_old = True
                return
        system.fdatasync(self._log.fd)

    def close(self) -> None:
        for file in (self._log, self.writer):
            if file is not None:
                file.close()
        self._log = self.writer = None
        if self.registry is process.registry and self.raw is not None:
            with inside_sqlite:
                self.raw.close()
                self.raw = None

    def __del__(self) -> None:
        try:
            if sys.is_finalizing():
                return  # a daemon thread may have ended with the mutex
            if self.registry is process.registry:
                self.close()
            elif self.raw is not None:  # a child that was not forked by Python must not finalise it
                import ctypes

                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.raw))
        except (AttributeError, TypeError, ImportError):
            pass  # never opened, or the interpreter is going down


def _before_fork() -> None:
    for connection in list(_all):
        connection.before_fork()


process.hold_during_fork(inside_sqlite, _before_fork)


class Syncer:
    """Threads of one process share a sync: one that begins after the commits of all of them serves all of them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = count(1)
        self._synced = 0  # every commit with a smaller number is on disk

    def sync(self, connection: Connection) -> None:
        mine = next(self._numbers)
        with self._mutex:
            if self._synced < mine:
                target = next(self._numbers)
                connection.sync()
                self._synced = target


class WriterLock:
    """The lock of all writers of a queue, in order of arrival.

    A free lock costs two system calls: the file stays open. A writer that finds the lock held or waiters in its queue
    waits as `Lock` does. If the file is deleted, writers that have it open and others do not exclude each other. Then
    SQLite's own locks do.
    """

    def __init__(self, path: str, mode: int) -> None:
        self._lock = Lock(path, keep=True, mode=mode)
        self._queue = f"{path}.queue"

    def creating(self) -> Lock:
        """The lock itself, for a process that has no connection yet."""
        return self._lock

    def acquire(self, connection: Connection) -> Hold | None:
        """None: the lock is held with the file of the connection."""
        file = connection.writer
        if file is None:
            with self._lock.acquire():  # creates the file
                file = connection.writer = OwnedFd(system.open_fd(self._lock.path, system.O_EXISTING))
        if not system.access(self._queue, 0) and try_lock(file.fd, system.EX_NB):
            return None
        return self._lock.acquire()

    def release(self, connection: Connection, hold: Hold | None) -> None:
        if hold is not None:
            with suppress(LockLost):
                hold.release()
        elif connection.writer is not None:
            system.lock(connection.writer.fd, system.UN)


def check_directory(path: str) -> None:
    """Create the directory. Refuse one that is used for something else, or is on a network file system."""
    try:
        names = system.listdir(path)
    except FileNotFoundError:
        os.makedirs(path, exist_ok=True)
        names = []
    except NotADirectoryError:
        raise NotADirectoryError(
            errno.ENOTDIR, "a queue is a directory, and this is a file or below one", path
        ) from None
    if _OLD_FORMAT in names and "queue.db" not in names:
        raise Unsupported(
            f"{path}: this queue was made by an earlier version of Holdfast. It was left as it is. Finish its tasks "
            "with that version, and give the new queue another directory.",
            path=path,
        )
    foreign = sorted(name for name in names if not name.startswith(("queue.", "workers", "bells")))
    if foreign and "queue.db" not in names:
        text = f"this directory contains something else ({foreign[0]}). Give the queue a directory of its own"
        raise FileExistsError(errno.EEXIST, text, path)
    mount = mount_of(system.stat(path).st_dev, path)
    if not mount.events:
        raise Unsupported(
            f"{path}: {mount.where} is {mount.kind}, a network file system. SQLite is not safe there. Use a disk of "
            "this machine, or PostgreSQL for workers on several machines: TaskQueue('postgresql://…').",
            path=path,
        )


def explain(error: sqlite3.Error, path: str, file: str) -> Exception:
    """The error of this package or of the operating system that an SQLite error stands for."""
    text = str(error)
    if not isinstance(error, sqlite3.OperationalError):
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
