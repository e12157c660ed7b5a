"""The directory of a queue in SQLite, the connections of a process to it, and the lock of its writers."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.request import pathname2url
from weakref import WeakSet

from .. import process, system
from ..errors import CorruptStore, LockLost, Unsupported
from ..files import OwnedFd, try_lock
from ..locks.hold import Hold
from ..locks.lock import Lock
from ..paths import mount_of

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

    `acquire` acquires the lock of all writers, in order of arrival. A free lock costs two system calls: the file stays
    open. A writer that finds the lock held or waiters in its queue waits as `Lock` does. If the file is deleted,
    writers that have it open and others do not exclude each other. Then SQLite's own locks do.
    """

    run: Callable[..., Any]

    def __init__(self, directory: str, lock: Lock) -> None:
        self._registry = process.registry
        self._lock = lock
        self._queue = f"{lock.path}.queue"
        self._writer: OwnedFd | None = None  # the file of the lock
        self.raw: sqlite3.Connection | None = None
        self._log: OwnedFd | None = None
        self._file = f"{directory}/queue.db"
        with inside_sqlite:
            self.open()
            _all.add(self)

    def open(self) -> None:
        """Open it, unless it is open. The caller has `inside_sqlite`."""
        if self.raw is not None:
            return
        # The store gives it to one thread. The check would also refuse that another thread closes it.
        raw = sqlite3.connect(
            f"file:{pathname2url(self._file)}?mode=rw",
            uri=True,
            timeout=BUSY_WAIT_S,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=False,
        )
        # The log is synced by `sync`, and by SQLite itself before each checkpoint.
        raw.execute("pragma synchronous = normal")
        raw.execute("pragma wal_autocheckpoint = 0")
        raw.execute("select count(*) from sqlite_master").fetchone()  # creates the log
        self.raw, self.run = raw, raw.execute

    def before_fork(self) -> None:
        if self.raw is not None and self._registry is process.registry:
            self.raw.close()
            self.raw = self._log = None  # SQLite deletes the log if this was the last connection of all processes

    def sync(self) -> None:
        """Wait until the log is on disk. It is not deleted as long as this connection is open."""
        if self._log is None:
            try:
                self._log = OwnedFd(system.open_fd(f"{self._file}-wal", system.O_READ))
            except FileNotFoundError:  # deleted before a fork, when all of it was in the database and on disk
                return
        system.fdatasync(self._log.fd)

    def acquire(self) -> Hold | None:
        """Acquire the lock of all writers. None: it is held with the open file."""
        if self._writer is None:
            with self._lock.acquire():  # creates the file
                self._writer = OwnedFd(system.open_fd(self._lock.path, system.O_EXISTING))
        if not system.access(self._queue, 0) and try_lock(self._writer.fd, system.EX_NB):
            return None
        return self._lock.acquire()

    def release(self, hold: Hold | None) -> None:
        if hold is not None:
            with suppress(LockLost):
                hold.release()
        elif self._writer is not None:
            system.lock(self._writer.fd, system.UN)

    def close(self) -> None:
        self._log = self._writer = None
        if self._registry is process.registry and self.raw is not None:
            with inside_sqlite:
                self.raw.close()
                self.raw = None

    def __del__(self) -> None:
        try:
            if not sys.is_finalizing():  # else a daemon thread may have ended with the mutex
                self.close()
        except (AttributeError, TypeError):
            pass  # never opened, or the interpreter is going down


def _before_fork() -> None:
    for connection in list(_all):
        connection.before_fork()


process.hold_during_fork(inside_sqlite, _before_fork)


def check_directory(path: str) -> None:
    """Create the directory. Refuse one that is used for something else, or is on a network file system."""
    try:
        names = system.listdir(path)
    except FileNotFoundError:
        os.makedirs(path, exist_ok=True)
        names = []
    except NotADirectoryError:
        text = "a queue is a directory, and this is a file or below one"
        raise NotADirectoryError(errno.ENOTDIR, text, path) from None
    foreign = sorted(name for name in names if not name.startswith(("queue.db", "queue.lock", "workers", "bells")))
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


def explain(error: sqlite3.Error, path: str) -> Exception:
    """The error of this package or of the operating system that an SQLite error stands for."""
    text, file = str(error), f"{path}/queue.db"
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
