"""The workers of a queue in SQLite: a locked file proves that a worker is alive, and a FIFO wakes it (see `sqlite`)."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import system
from ..files import OwnedFd, inode_of, named, remove, try_lock
from ..wait import RECHECK_S, poll
from .store import Registration, process_name

if TYPE_CHECKING:
    from .sqlite import SqliteStore


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

    def wait(self, seconds: float, *others: int) -> set[int]:
        watch = self._store.watch(self)
        return poll([self.bell.fd, *others, *([] if watch is None else [watch.fd])], min(seconds, self.look))

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
