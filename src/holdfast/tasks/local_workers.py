"""The workers of a queue in SQLite: which of them live, how an idle one is woken, and how changes are noticed."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from .. import process, system
from ..files import OwnedFd, inode_of, named, remove, try_lock
from ..wait import RECHECK_S, poll
from .connection import Connection, Syncer
from .rows import NEVER
from .store import Changes, Registration, process_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .sqlite import SqliteStore

SOON_S = 0.001


class InProcess:
    """What one process has open. A forked child makes its own."""

    def __init__(self) -> None:
        self.registry = process.registry
        self.local = threading.local()
        self.syncer = Syncer()
        self.workers: set[str] = set()
        self._watch: system.Watch | None = None
        self._watcher: Worker | None = None

    @property
    def is_watching(self) -> bool:
        return self._watch is not None

    def watching(self, path: str, worker: Worker) -> Watching:
        return Watching(self, path, worker)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        connection = getattr(self.local, "connection", None)
        if connection is not None:
            del self.local.connection
            connection.close()


class Watching:
    """One of the waiting threads of a process watches for dead workers: a process has one inotify instance."""

    def __init__(self, here: InProcess, path: str, worker: Worker) -> None:
        self._here, self._path, self._worker = here, path, worker

    def __enter__(self) -> system.Watch | None:
        here = self._here
        if here._watcher is not None:
            return None
        here._watcher = self._worker
        if here._watch is None:
            with suppress(OSError):  # too many watches: the waiter looks again every second
                here._watch = system.Watch(self._path, OwnedFd, system.WATCH_CLOSING)
                self._worker.look = SOON_S  # a worker may have died before
        return here._watch

    def __exit__(self, *_: object) -> None:
        if self._here._watcher is self._worker:
            self._here._watcher = None


def make_folders(path: str) -> None:
    for folder in ("workers", "bells"):
        with suppress(FileExistsError):
            system.mkdir(f"{path}/{folder}", 0o777)


class Worker(Registration):
    """A worker of this process. Its file is locked until the process and all commands that inherited it have ended."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._here = store._here()
        self.until = NEVER
        self.look = RECHECK_S
        self.is_idle = self.next_is_idle = False
        self._bell: OwnedFd | None = None
        while True:
            self.name = f"{process_name()}.{os.urandom(4).hex()}"
            path = f"{store.path}/workers/{self.name}"
            self._here.workers.add(self.name)
            try:
                self._file = OwnedFd(system.open_fd(path, system.O_NEW, 0o666))
            except FileNotFoundError:
                make_folders(store.path)
                continue
            # Another process may have found the file before it was locked, and removed it.
            if try_lock(self._file.fd, system.EX_NB) and named(path, inode_of(system.fstat(self._file.fd))):
                return
            self._here.workers.discard(self.name)

    @property
    def bell(self) -> OwnedFd:
        assert self._bell is not None
        return self._bell

    def prepare(self, store: SqliteStore) -> None:
        """Make the bell, before the worker is found in the table `idle`."""
        if self._bell is None:
            path = f"{store.path}/bells/{self.name}"
            try:
                system.mkfifo(path, 0o622)
            except FileNotFoundError:
                make_folders(store.path)
                system.mkfifo(path, 0o622)
            except FileExistsError:
                pass
            self._bell = OwnedFd(system.open_fd(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._file.fd

    def leave(self) -> None:
        self._store.forget_idle(self)

    def close(self) -> None:
        if self._here.registry is not process.registry or self.name not in self._here.workers:
            return
        try:
            self._store.forget_idle(self)
        finally:
            self._here.workers.discard(self.name)
            for folder in ("bells", "workers"):
                remove(f"{self._store.path}/{folder}/{self.name}")
            self._file.close()
            if self._bell is not None:
                self._bell.close()

    def drop(self) -> bool:
        """Takes no lock. `orphans` removes what is left, in this process or another one."""
        self._here.workers.discard(self.name)
        self._file.close()
        if self._bell is not None:
            self._bell.close()
        return True


def ring(bells: str, workers: list[str]) -> int:
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
            return
        if poll([self._watch.fd], seconds):
            time.sleep(SOON_S)  # so that a waiter beside busy workers looks a thousand times a second at most
            self._watch.drain()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close(reuse=True)
            self._watch = None
