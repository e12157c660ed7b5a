"""What a process has open for a queue on PostgreSQL: sessions for its threads, and its home session.

The home session does two things for each worker of the process, as long as the process lives:

    it holds an advisory lock        other processes see in pg_locks that the worker is alive
    it listens to a channel          a notification wakes the worker

The lock of a worker has two numbers: the oid of the table of tasks, and the number at the end of the worker's name. A
command that inherits the socket of the home session keeps the session open, and so the worker alive.

If the home session is lost, the next call opens another one, which acquires the same locks. Until then the workers of
this process count as dead, and another process may give their tasks to other workers.

After a restart of the server all workers have lost their locks. They get some seconds to acquire them again
(`postgres.RESTART_GRACE_S`). The name of a worker contains the start time of the server at which it registered, to tell
it from one that died since.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .. import postgres, process, system
from ..errors import ConnectionFailed
from ..files import pipe
from ..wait import poll
from .store import Changes, Registration, process_name

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from .postgres import PostgresStore

MAX_SESSIONS = 4  # of one process, besides its home session
ENDS, EVERY_CHANGE = -1.0, -2.0  # what a process waits for, as `until` in the table `idle`
LOOK_S = 1.0  # between two looks of an idle worker, for what sends no notification: a worker that died
# Of the server, in microseconds: it may start twice in a second.
START_TIME = "(1000000 * extract(epoch from pg_postmaster_start_time()))::bigint"
_BETWEEN_CHANGES_S = 0.005
UNSEEN_S = 0.05  # a transaction that was about to commit did not see who waits. So a waiter looks again

# Plans for a table that is small at first and has a million rows a minute later: always by an index, never by a sort.
_OFF = ("jit", "enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin")
_SETTINGS = "; ".join(["set default_transaction_isolation = 'read committed'", *(f"set {name} = off" for name in _OFF)])


class InProcess:
    """The sessions of one process. A forked child makes its own."""

    def __init__(self, url: str, prefix: str, locks: str) -> None:
        self.registry = process.registry
        self._url, self._prefix, self._locks = url, prefix, locks
        self._pool = postgres.Pool(url, MAX_SESSIONS, _SETTINGS)
        self._mutex = threading.RLock()
        self._home: postgres.Session | None = None
        self._workers: WeakValueDictionary[int, Worker] = WeakValueDictionary()  # by their number
        self.collected: deque[int] = deque()  # the numbers of workers that were collected

    def close(self) -> None:
        with self._mutex:
            if self._home is not None:
                self._home.close()
        self._pool.close()

    @contextmanager
    def session(self) -> Iterator[postgres.Session]:
        """A session for one operation. After an error it is closed."""
        with self._pool.session() as session:
            session.number = session.number or random.getrandbits(62)
            yield session

    # The home session. It is opened by the first worker, and again after it was lost.

    def home(self) -> postgres.Session:
        """The home session, with all notifications handed out that have arrived. Raises ConnectionFailed."""
        with self._mutex:
            if self._home is None or not self._receive(self._home):
                self._home = postgres.explained(self._url, self._connect)
                self._wake(f"{self._prefix}all")  # notifications may have been lost
            return self._home

    def _receive(self, session: postgres.Session) -> bool:
        """False: the session was lost."""
        try:
            if session.is_open and poll([session.fileno()], 0):  # a notification, or the last words of the server
                session.connection.execute("select 1")
        except psycopg.OperationalError:
            session.close()
        return session.is_open

    def _wake(self, channel: str) -> None:
        name = channel[len(self._prefix) :]
        for number, worker in list(self._workers.items()):
            if name in ("all", str(number)):
                worker.wake()

    def _connect(self) -> postgres.Session:
        session = postgres.connect(self._url)
        run = session.connection.execute
        session.connection.add_notify_handler(lambda notification: self._wake(notification.channel))
        try:
            run(f'listen "{self._prefix}all"')
            numbers = list(self._workers)
            # The server may not know yet that the old session is lost.
            run(f"select pg_terminate_backend(pid) from ({self._locks}) held where objid = any(%s)", [numbers])
            for number in numbers:
                self._acquire(session, number)
        except BaseException:
            session.close()
            raise
        return session

    def _acquire(self, session: postgres.Session, number: int) -> None:
        session.connection.execute(f'listen "{self._prefix}{number}"')
        self._call(session, "pg_advisory_lock", number)

    def _call(self, session: postgres.Session, function: str, number: int) -> None:
        table = f"'{self._prefix}task'::regclass::oid::bigint::bit(32)::integer"
        session.connection.execute(f"select {function}({table}, {number})")

    def register(self, worker: Worker) -> tuple[int, int]:
        """Return the number of a new worker, and the start time of the server."""

        def work() -> tuple[int, int]:
            session = self.home()
            query = f"select nextval('{self._prefix}worker'), {START_TIME}"
            number, boot = session.connection.execute(query).fetchone() or (0, 0)
            self._workers[number] = worker
            self._acquire(session, number)
            return number, boot

        with self._mutex:
            return postgres.explained(self._url, work)

    def unregister(self, number: int) -> None:
        with self._mutex, suppress(psycopg.OperationalError):  # the session was lost, and the lock with it
            self._workers.pop(number, None)
            if self._home is not None and self._home.is_open:
                self._home.connection.execute(f'unlisten "{self._prefix}{number}"')
                self._call(self._home, "pg_advisory_unlock", number)

    def unregister_collected(self) -> None:
        with self._mutex:
            while self.collected:
                self.unregister(self.collected.popleft())


class Worker(Registration):
    """A worker of this process, and a pipe that wakes it."""

    number = 0
    recheck_s = LOOK_S

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._here = store.here()
        self.wakeup, self._writer = pipe()
        for end in (self.wakeup, self._writer):
            os.set_blocking(end.fd, False)
        self.number, boot = self._here.register(self)
        self.name = f"{process_name()}.{boot}.{self.number}"

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a forked child."""
        return self.wakeup.is_open

    def fileno(self) -> int:
        return self._here.home().fileno()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full of earlier rings
            system.write(self._writer.fd, b"!")

    def wait(self, seconds: float, *others: int) -> set[int]:
        deadline = monotonic() + seconds
        mine = [self.wakeup.fd, *others]
        pause = 0.05
        while True:
            left = deadline - monotonic()
            try:
                session = [self._here.home().fileno()]
                pause = 0.05
            except ConnectionFailed:
                session, left, pause = [], min(left, pause), min(2 * pause, LOOK_S)
            ready = poll([*mine, *session], left).intersection(mine)
            if ready or monotonic() >= deadline:
                return ready

    def close(self) -> None:
        if not self.is_open:
            return
        try:
            self.leave()
        finally:
            self._here.unregister(self.number)
            self.wakeup.close()
            self._writer.close()

    def __del__(self) -> None:
        if self.number and self.is_open:
            self._here.collected.append(self.number)


class ServerChanges(Changes):
    """Watches for tasks that end, or for every change. Its row in the table `idle` asks for one notification."""

    def __init__(self, store: PostgresStore, worker: Worker, until: float = ENDS) -> None:
        self._store, self._worker, self._until = store, worker, until
        self._ask()

    def _ask(self) -> None:
        self._store.read(lambda run: run(self._store.sql["ask"], (self._worker.name, self._until)))
        self._pause = UNSEEN_S

    def wait(self, seconds: float) -> None:
        is_woken = self._worker.wait(min(seconds, self._pause))
        if is_woken:
            system.read(self._worker.wakeup.fd, 4096)
            sleep(_BETWEEN_CHANGES_S)
        if is_woken or self._pause == LOOK_S:
            self._ask()
        else:
            self._pause = LOOK_S

    def close(self) -> None:
        if self._worker.is_open:
            with suppress(ConnectionFailed):
                self._store.read(lambda run: run(self._store.sql["forget"], (self._worker.name,)))
            self._worker.close()
