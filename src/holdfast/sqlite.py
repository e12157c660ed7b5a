"""Connections to SQLite, and forks.

A fork closes all connections before, and `Database.connect` opens them again. SQLite notes in memory which POSIX locks
its process has on a file. A child that inherits these notes would open the file and believe that it has the locks of
its parent. Then another process that closes the database would delete the log that the child still writes.

For the same reason nothing else in a process may open and close the file of a database that it has open.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from _thread import RLock
from collections.abc import Callable
from pathlib import PurePath
from typing import Any
from weakref import WeakSet

from . import process

# Every thread that is inside SQLite has this mutex, and a fork waits for it. A child would find SQLite's own mutexes
# locked for ever by threads that it does not have.
inside_sqlite = RLock()
_all: WeakSet[Database] = WeakSet()


class Database:
    """A connection of one process. `run` runs a statement, after `connect`. The caller has `inside_sqlite`."""

    run: Callable[..., Any]

    def __init__(self) -> None:
        self._registry = process.registry
        self.raw: sqlite3.Connection | None = None

    def connect(self, file: str, *statements: str, mode: str = "rw", **options: Any) -> sqlite3.Connection:
        """Open a file, and run some statements. See `opened`."""
        raw = opened(file, *statements, mode=mode, **options)
        self._registry = process.registry
        self.raw, self.run = raw, raw.execute
        _all.add(self)
        return raw

    @property
    def in_transaction(self) -> bool:
        """Is the calling thread, to which the connection belongs, in a transaction?"""
        try:
            return self.raw is not None and self.raw.in_transaction
        except (AttributeError, sqlite3.ProgrammingError):  # another thread forks, and closes it at this moment
            return False

    def before_fork(self) -> None:
        if self.raw is not None and self._registry is process.registry:
            self.raw.close()
            self.raw = None  # SQLite deletes the log if this was the last connection of all processes

    def close(self) -> None:
        if self._registry is process.registry and self.raw is not None:
            with inside_sqlite:
                raw, self.raw = self.raw, None
                if raw is not None:  # else another thread has just closed it
                    raw.close()

    def __del__(self) -> None:
        try:
            if not sys.is_finalizing():  # else a daemon thread may have ended with the mutex
                self.close()
        except (AttributeError, TypeError):
            pass  # never opened, or the interpreter is going down


def opened(file: str, *statements: str, mode: str = "rw", **options: Any) -> sqlite3.Connection:
    """Open a file, and run some statements. An empty name stands for a temporary file.

    One thread at a time uses the connection. SQLite's own check would also forbid that another thread closes it.
    """
    uri = f"{PurePath(os.path.abspath(file)).as_uri()}?mode={mode}" if file else ""
    raw: sqlite3.Connection = sqlite3.connect(
        uri, uri=bool(file), isolation_level=None, check_same_thread=False, **options
    )
    try:
        for statement in statements:
            raw.execute(statement).fetchall()
    except BaseException:
        raw.close()
        raise
    return raw


def _before_fork() -> None:
    for database in list(_all):
        database.before_fork()


process.hold_during_fork(inside_sqlite, _before_fork)
