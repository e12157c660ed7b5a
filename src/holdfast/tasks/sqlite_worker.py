"""The workers of a queue in SQLite: a locked file proves that a worker is alive, and a FIFO wakes it (see `sqlite`)."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import system
from ..files import OwnedFd, inode_of, named, remove, try_lock
from ..wait import RECHECK_S, poll
from .store import Registration, process_name

if TYPE_CHECKING:
    from .sqlite import SqliteStore


_NAME = re.compile(r"[0-9]+@[\w.-]+\.[0-9a-f]{8}")


def is_name(text: str) -> bool:
    """Can this be the name of a worker? Other users may share the directory, and write what they like into the table
    `idle` and the folders. No file with another name is opened or removed."""
    return _NAME.fullmatch(text) is not None


class Worker(Registration):
    """A worker of this process. Its file is locked until the process and all commands that inherited it have ended."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.recheck_s = RECHECK_S  # how long `wait` sleeps at most
        for folder in ("workers", "bells"):  # a copy may have left out empty ones
            with suppress(FileExistsError):
                system.mkdir(f"{store.path}/{folder}", 0o777)
        while True:
            self.name = f"{process_name()}.{os.urandom(4).hex()}"
            path, fifo = f"{store.path}/workers/{self.name}", f"{store.path}/bells/{self.name}"
            self._file = OwnedFd(system.open_fd(path, system.O_NEW, 0o666))
            # Another process may have found the file before it was locked, and removed it.
            if try_lock(self._file.fd, system.EX_NB) and named(path, inode_of(system.fstat(self._file.fd))):
                system.mkfifo(fifo, 0o622)
                self.wakeup = OwnedFd(system.open_fd(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                return

    def wait(self, seconds: float, *others: int) -> set[int]:
        watch = self._store.watch(self)
        return poll([self.wakeup.fd, *others, *([] if watch is None else [watch.fd])], min(seconds, self.recheck_s))

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
            self.wakeup.close()


def wake(bells: str, workers: list[str]) -> int:
    """Wake workers. Return how many are dead."""
    return sum(not (is_name(name) and _wake(f"{bells}/{name}")) for name in workers)


def _wake(fifo: str) -> bool:
    try:
        with OwnedFd(system.open_fd(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
            return stat.S_ISFIFO(system.fstat(file.fd).st_mode) and system.write(file.fd, b"!") == 1
    except BlockingIOError:  # the pipe is full of earlier rings
        return True
    except OSError:
        return False
