"""What a process has open for a queue on PostgreSQL: sessions for its threads, and its home session.

The home session does two things, as long as the process lives:

    it holds one advisory lock per worker      other processes see in pg_locks that the worker is alive
    it listens                                 notifications for the idle workers of this process arrive here

The lock of a worker has two numbers: the oid of the table of tasks, and the number at the end of the worker's name. A
command that inherits the socket of the home session keeps the session open, and so the worker alive.

If the home session is lost, the next call opens another one, which acquires the same locks. Until then the workers of
this process count as dead, and another process may give their tasks to other workers.

After a restart of the server all workers have lost their locks. They get some seconds to acquire them again
(`server_statements.RESTART_GRACE_S`). The name of a worker contains the start time of the server at which it
registered, to tell it from one that died since.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING

from .. import postgres, process
from ..errors import ConnectionFailed
from ..files import OwnedFd, pipe
from ..wait import poll
from .rows import NEVER
from .store import Changes, Registration, process_name

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from .postgres import PostgresStore

MAX_SESSIONS = 4  # of one process, besides its home session
LOOK_S = 1.0  # between two looks of an idle worker, for what sends no notification: a worker that died
_BETWEEN_CHANGES_S = 0.005
WORKER, WATCHER = 0, 1  # kinds of rows in the table `idle`

# Plans for a table that is small at first and has a million rows a minute later: always by an index, never by a sort.
_OFF = ("jit", "enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin")
_SETTINGS = "; ".join(["set default_transaction_isolation = 'read committed'", *(f"set {name} = off" for name in _OFF)])


class InProcess:
    """The sessions of one process. A forked child makes its own."""

    def __init__(self, store: PostgresStore) -> None:
        self.registry = process.registry
        self.home = Home(store)
        self._store, self._url = store, store.url
        self._condition = threading.Condition()
        self._free: list[postgres.Session] = []
        self._number = 0

    def renewed(self) -> InProcess:
        """Of a forked child."""
        return InProcess(self._store)

    @contextmanager
    def session(self) -> Iterator[postgres.Session]:
        """A session for one operation."""
        session = self._take()
        try:
            yield session
        finally:
            # Checked without a lock: no other thread knows the session.
            is_clean = (
                session.is_open and session.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            )
            if not is_clean:
                session.close()
            with self._condition:
                if is_clean:
                    self._free.append(session)
                else:
                    self._number -= 1
                self._condition.notify()

    def _take(self) -> postgres.Session:
        with self._condition:
            while not self._free and self._number >= MAX_SESSIONS:
                self._condition.wait()
            if self._free:
                return self._free.pop()
            self._number += 1
        try:
            session = postgres.connect(self._url)
            postgres.explained(self._url, lambda: session.connection.execute(_SETTINGS))
            session.number = postgres.explained(self._url, lambda: self.home.new_number(session))
            return session
        except BaseException:
            with self._condition:
                self._number -= 1
                self._condition.notify()
            raise

    def close(self) -> None:
        self.home.close()
        with self._condition:
            while self._free:
                self._free.pop().close()
                self._number -= 1


class Home:
    """The home session of a process. It is opened by the first worker, and again after it was lost."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._session: postgres.Session | None = None
        self._numbers: set[int] = set()  # of the workers
        self._bells: dict[str, Bell] = {}  # of the workers and watchers, by their name
        self.channel = ""

    def open(self) -> postgres.Session:
        """The session, with all notifications handed out that have arrived. Raises ConnectionFailed."""
        with self._lock:
            if self._session is not None and self._receive(self._session):
                return self._session
            self._session = postgres.explained(self._store.url, self._connect)
            for bell in self._bells.values():  # notifications may have been lost
                bell.ring()
            return self._session

    def _receive(self, session: postgres.Session) -> bool:
        """False: the session was lost."""
        if not session.is_open:
            return False
        if not poll([session.fileno()], 0):
            return True
        try:
            notifications = list(session.connection.notifies(timeout=0))
            for notification in notifications:
                if notification.channel == self.channel:
                    bells = [bell] if (bell := self._bells.get(notification.payload)) is not None else []
                else:
                    bells = list(self._bells.values())
                for bell in bells:
                    bell.ring()
            if not notifications:  # perhaps the last words of the server
                session.connection.execute("select 1")
        except psycopg.OperationalError:
            session.close()
        return session.is_open

    def _connect(self) -> postgres.Session:
        session = postgres.connect(self._store.url)
        run = session.connection.execute
        try:
            if not self.channel:
                self.channel = f"{self._store.prefix}{self.new_number(session)}"
            run(f'listen "{self.channel}"; listen "{self._store.prefix}all"')
            if self._numbers:
                # The server may not know yet that the old session is lost.
                numbers = list(self._numbers)
                run(
                    f"select pg_terminate_backend(pid) from ({self._store.locks}) held where objid = any(%s)", [numbers]
                )
                run("select pg_advisory_lock(%s, number) from unnest(%s::integer[]) number", [self._class, numbers])
        except BaseException:
            session.close()
            raise
        return session

    def new_number(self, session: postgres.Session) -> int:
        """0 before the tables exist."""
        if not self._store.table:
            return 0
        (number,) = session.connection.execute(f"select nextval('{self._store.prefix}worker')").fetchone() or (0,)
        return int(number)

    @property
    def _class(self) -> int:
        """The first number of the locks: an oid, as a signed integer."""
        return self._store.table - (1 << 32 if self._store.table >= 1 << 31 else 0)

    def register(self, bell: Bell) -> str:
        """Acquire the lock of a new worker. Return its name."""
        with self._lock:
            number, boot = postgres.explained(self._store.url, self._lock_new_number)
            name = f"{process_name()}.{boot}.{number}"
            self._numbers.add(number)
            self._bells[name] = bell
            return name

    def _lock_new_number(self) -> tuple[int, int]:
        """Acquire the lock of a new worker. Return its number, and the start time of the server."""
        run = self.open().connection.execute
        query = f"select nextval('{self._store.prefix}worker'), extract(epoch from pg_postmaster_start_time())::bigint"
        number, boot = run(query).fetchone() or (0, 0)
        run("select pg_advisory_lock(%s, %s::integer)", [self._class, number])
        return number, boot

    def unregister(self, name: str) -> None:
        with self._lock:
            number = int(name.rpartition(".")[2])
            self._numbers.discard(number)
            self._bells.pop(name, None)
            with suppress(psycopg.OperationalError):  # the session was lost, and the lock with it
                if self._session is not None and self._session.is_open:
                    arguments = [self._class, number]
                    self._session.connection.execute("select pg_advisory_unlock(%s, %s::integer)", arguments)

    def listen(self, name: str, bell: Bell | None) -> None:
        """Ring this bell for notifications with this name. None: no longer."""
        with self._lock:
            self.open()
            if bell is None:
                self._bells.pop(name, None)
            else:
                self._bells[name] = bell

    def wait(self, bell: Bell, seconds: float, *others: int) -> set[int]:
        """Wait until this bell rings or another descriptor is readable. Return which: nothing if the time is over."""
        deadline = monotonic() + seconds
        mine = [bell.fileno(), *others]
        pause = 0.05
        while True:
            left = deadline - monotonic()
            try:
                session = [self.open().fileno()]
                pause = 0.05
            except ConnectionFailed:
                session, left, pause = [], min(left, pause), min(2 * pause, LOOK_S)
            ready = poll([*mine, *session], left)
            if ready.intersection(mine) or monotonic() >= deadline:
                return ready.intersection(mine)

    def close(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session.close()


class Bell:
    """A pipe that wakes one waiting thread. It is made by the first wait."""

    def __init__(self) -> None:
        self._ends: tuple[OwnedFd, OwnedFd] | None = None
        self._is_rung = False

    def fileno(self) -> int:
        if self._ends is None:
            self._ends = pipe()
            for end in self._ends:
                os.set_blocking(end.fd, False)
            if self._is_rung:
                self.ring()
        return self._ends[0].fd

    def ring(self) -> None:
        self._is_rung = True
        if self._ends is not None:
            with suppress(BlockingIOError):  # full of earlier rings
                os.write(self._ends[1].fd, b"!")

    def silence(self) -> None:
        self._is_rung = False
        with suppress(BlockingIOError):
            os.read(self.fileno(), 4096)

    def close(self) -> None:
        for end in self._ends or ():
            end.close()


class Worker(Registration):
    """A worker of this process."""

    def __init__(self, store: PostgresStore, here: InProcess) -> None:
        self._store = store
        self._here = here
        self._is_closed = False
        self.bell = Bell()
        self.is_idle = False  # it may be in the table `idle`
        self.until = NEVER
        self.name = here.home.register(self.bell)

    def fileno(self) -> int:
        return self._here.home.open().fileno()

    def leave(self) -> None:
        if self.is_idle and self._here.registry is process.registry:
            self._store.forget_idle(self)

    def close(self) -> None:
        if self._is_closed or self._here.registry is not process.registry:
            return
        self._is_closed = True
        try:
            self.leave()
        finally:
            self._here.home.unregister(self.name)
            self.bell.close()


class ServerChanges(Changes):
    """Watches for tasks that end. Its row in the table `idle` asks for one notification."""

    def __init__(self, store: PostgresStore, here: InProcess) -> None:
        self._store = store
        self._here = here
        self._bell = Bell()
        self._name = os.urandom(8).hex()
        here.home.listen(self._name, self._bell)
        self._store.ask(self._name, WATCHER, NEVER)

    def wait(self, seconds: float) -> None:
        if self._here.home.wait(self._bell, min(seconds, LOOK_S)):
            sleep(_BETWEEN_CHANGES_S)
        self._bell.silence()
        self._store.ask(self._name, WATCHER, NEVER)

    def close(self) -> None:
        if self._here.registry is process.registry:
            with suppress(ConnectionFailed):
                self._here.home.listen(self._name, None)
                self._store.forget(self._name)
            self._bell.close()
