"""The directory of a queue in SQLite, the connections of a process to it, and the lock of its writers."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from _thread import RLock
from contextlib import suppress
from urllib.request import pathname2url

from .. import process, system
from ..errors import LockLost, Unsupported
from ..files import OwnedFd, try_lock
from ..locks.hold import Hold
from ..locks.lock import Lock
from ..paths import mount_of

_OLD_FORMAT = "queue.json"
BUSY_WAIT_S = 60.0  # for another process that opens or closes the database

# Every thread that is inside SQLite has this mutex, and a fork waits for it. A child would find SQLite's own mutexes
# locked for ever by threads that it does not have.
inside_sqlite = RLock()
process.hold_during_fork(inside_sqlite)


class Connection:
    """A connection of one thread of one process."""

    def __init__(self, file: str) -> None:
        self.wal = f"{file}-wal"
        self.registry = process.registry
        self.writer: OwnedFd | None = None  # the file of `WriterLock`
        self._log: OwnedFd | None = None
        uri = f"file:{pathname2url(file)}?mode=rw"
        with inside_sqlite:
            # The store gives it to one thread. The check would also refuse that another thread closes it at the end.
            self.raw = sqlite3.connect(
                uri, uri=True, timeout=BUSY_WAIT_S, isolation_level=None, cached_statements=256, check_same_thread=False
            )
            self.run = self.raw.execute
            # The log is synced by `Syncer`, and by SQLite itself before each checkpoint.
            self.run("pragma synchronous = normal")
            self.run("pragma wal_autocheckpoint = 0")
            self.run("select count(*) from sqlite_master").fetchone()  # creates the log

    def sync(self) -> None:
        """Wait until the log is on disk. It is not deleted as long as this connection is open."""
        if self._log is None:
            self._log = OwnedFd(system.open_fd(self.wal, system.O_READ))
        system.fdatasync(self._log.fd)

    def close(self) -> None:
        for file in (self._log, self.writer):
            if file is not None:
                file.close()
        if self.registry is process.registry:
            with inside_sqlite:
                self.raw.close()

    def __del__(self) -> None:
        try:
            if self.registry is process.registry:
                self.close()
            else:  # a forked child must not finalise it
                import ctypes

                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.raw))
        except (AttributeError, TypeError, ImportError):
            pass  # never opened, or the interpreter is going down


class Syncer:
    """Threads of one process share a sync: one that begins after the commits of all of them serves all of them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._committed = self._synced = 0
        self._is_syncing = False

    def sync(self, connection: Connection) -> None:
        with self._condition:
            self._committed += 1
            mine = self._committed
            while self._synced < mine and self._is_syncing:
                self._condition.wait()
            if self._synced >= mine:
                return
            self._is_syncing, target = True, self._committed
        try:
            connection.sync()
        except BaseException:
            target = 0
            raise
        finally:
            with self._condition:
                self._is_syncing = False
                self._synced = max(self._synced, target)
                self._condition.notify_all()


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
