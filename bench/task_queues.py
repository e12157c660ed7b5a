"""The task queues that `bench/tasks.py` compares, each used in the way its documentation shows, without batches.

the SQL alone             the statements of Holdfast, by the module sqlite3 behind flock: the fewest calls that keep
                          its promises. It checks nothing, wakes nobody and recovers nothing
holdfast                  claim() and complete(). Done tasks stay in the table
holdfast, Worker          run(drain=True) with concurrency=2. The time ends at the last call of the handler
localqueue                get() and ack(). SQLite in Rust. RELAXED is synchronous=NORMAL, which syncs at checkpoints
                          only. There is no OFF. DURABLE is FULL: put, get and ack sync
litequeue                 pop() and done(), with json. Not durable: synchronous=OFF. Durable: FULL
huey, FileHuey            dequeue() and execute(), as in its consumer. dequeue deletes the file: a consumer that dies
                          loses the task. A result of None is not stored. It never syncs. `FileStorage` is the
                          storage alone: no task, no result, no completion
persist-queue             SQLiteAckQueue: get() and ack(). SQLiteQueue: get(), which deletes the task, so nothing is
                          left to complete. Both read and then write without a transaction around it, so that two
                          processes get some tasks twice. These count as done. Not durable: synchronous=OFF on a
                          private connection, as there is no option. Durable: FULL, its default
                          Queue: get() and task_done(). Two processes cannot share it, so one process runs alone.
                          Its chunks are so large that it never syncs
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.tasks import TaskQueue

BATCH = 64  # tasks that Holdfast claims in one transaction, at most


# Each one opens its queue in a directory, puts a task, and takes and completes a task. False: no task is left.


class Ours:
    def __init__(self, path: str, durable: bool) -> None:
        self._queue = TaskQueue(path, durable=durable)

    def put(self, number: int) -> None:
        self._queue.put({"n": number})

    def step(self) -> bool:
        claim = self._queue.claim()
        if claim is None:
            return False
        claim.complete()
        return True

    def close(self) -> None:
        if hasattr(self._queue, "close"):  # earlier versions have none
            self._queue.close()


class Statements:
    """The statements of Holdfast, by the module sqlite3 behind flock."""

    def __init__(self, path: str, durable: bool) -> None:
        from holdfast.tasks.sqlite import ADD_ALONE  # earlier versions have none
        from holdfast.tasks.statements import SCHEMA, STATEMENTS, filled

        os.makedirs(path, exist_ok=True)
        self._sql = filled(STATEMENTS, p="", lock="", skip="", share="")
        self._add_alone = ADD_ALONE
        self._durable = durable
        self._lock = os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT)
        self._claimed: deque[Any] = deque()
        self._ended: list[tuple[int, int]] = []
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._raw = sqlite3.connect(f"{path}/queue.db", isolation_level=None)
        self._run = self._raw.execute
        self._put = self._raw.cursor().execute
        self._run("pragma page_size = 2048")
        self._run("pragma journal_mode = wal")
        self._run("pragma synchronous = off")
        if self._run("select count(*) from sqlite_master").fetchone()[0] == 0:
            self._raw.executescript(SCHEMA.format(p="", serial="integer", unlogged=""))
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._log = os.open(f"{path}/queue.db-wal", os.O_RDWR)

    def put(self, number: int) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._put(self._add_alone, (None, None, json.dumps({"n": number}), 0, 3, None, 0.0))
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._sync()

    def step(self) -> bool:
        if not self._claimed:
            self._claim()
        if not self._claimed:
            return False
        seq, token, payload = self._claimed.popleft()
        json.loads(payload)
        self._ended.append((seq, token))
        if self._durable:
            self._begin()
            self._settle()
            self._commit()
            self._sync()
        return True

    def _claim(self) -> None:
        self._begin()
        self._settle()
        self._run(self._sql["due"], (0.0, 500)).fetchall()
        for row in self._run(self._sql["ready"], (1 if self._durable else BATCH,)).fetchall():
            self._run(self._sql["begin"], (row[2] + 1, "me", 0, 0.0, row[0]))
            self._claimed.append((row[0], row[2] + 1, row[3]))
        self._commit()

    def _settle(self) -> None:
        for seq, token in self._ended:
            self._run(self._sql["done_seq"], (0.0, None, seq, token))
        self._ended.clear()

    def _begin(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._run("begin immediate")

    def _commit(self) -> None:
        self._run("commit")
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _sync(self) -> None:
        if self._durable:
            os.fdatasync(self._log)

    def close(self) -> None:
        self._raw.close()
        os.close(self._log)
        os.close(self._lock)


class Localqueue:
    def __init__(self, path: str, durable: bool) -> None:
        from localqueue import DurabilityMode, SimpleQueue
        from localqueue.exceptions import Empty

        self._empty = Empty
        self._queue: Any = SimpleQueue(path, durability=DurabilityMode.DURABLE if durable else DurabilityMode.RELAXED)
        assert self._queue.diagnostics().synchronous == (2 if durable else 1)

    def put(self, number: int) -> None:
        self._queue.put({"n": number})

    def step(self) -> bool:
        try:
            job = self._queue.get(
                timeout=0
            )  # block=False reports an empty queue whenever another process holds its lock
        except self._empty:
            return False
        self._queue.ack(job)
        return True

    def close(self) -> None:
        self._queue.close()


class Litequeue:
    def __init__(self, path: str, durable: bool) -> None:
        from litequeue import LiteQueue

        os.makedirs(path, exist_ok=True)
        self._queue = LiteQueue(f"{path}/queue.db", timeout=30)
        self._queue.conn.execute(f"pragma synchronous = {'full' if durable else 'off'}")

    def put(self, number: int) -> None:
        self._queue.put(json.dumps({"n": number}))

    def step(self) -> bool:
        message = self._queue.pop()
        if message is None:
            return False
        json.loads(message.data)
        self._queue.done(message.message_id)
        return True

    def close(self) -> None:
        self._queue.close()


class Huey:
    def __init__(self, path: str, durable: bool) -> None:
        from huey import FileHuey

        logging.getLogger("huey").setLevel(logging.ERROR)
        self.huey: Any = FileHuey("bench", path=path)
        self.task = self.huey.task()(_nothing)

    def call_instead(self, function: Callable[[], object]) -> None:
        """In this process, let the consumer call this function. Its module must be that of `_nothing`."""
        self.huey._registry._registry.clear()
        self.huey.task(name="_nothing")(lambda payload: function())

    def put(self, number: int) -> None:
        self.task({"n": number})

    def step(self) -> bool:
        task = self.huey.dequeue()
        if task is None:
            return False
        self.huey.execute(task)
        return True

    def close(self) -> None:
        pass


def _nothing(payload: object) -> None:
    pass


class HueyStorage:
    def __init__(self, path: str, durable: bool) -> None:
        from huey.storage import FileStorage

        self._storage: Any = FileStorage("bench", path)

    def put(self, number: int) -> None:
        self._storage.enqueue(json.dumps({"n": number}).encode())

    def step(self) -> bool:
        data = self._storage.dequeue()
        if data is None:
            return False
        json.loads(data)
        return True

    def close(self) -> None:
        pass


class PersistAck:
    def __init__(self, path: str, durable: bool) -> None:
        from persistqueue import Empty, SQLiteAckQueue

        self._empty = Empty
        # auto_resume would give the tasks of the other process to this one.
        self._queue: Any = SQLiteAckQueue(path, auto_resume=False, timeout=30)
        if not durable:
            self._queue._conn.execute("pragma synchronous = off")

    def put(self, number: int) -> None:
        self._queue.put({"n": number})

    def step(self) -> bool:
        try:
            item = self._queue.get(block=False)
        except self._empty:
            return False
        self._queue.ack(item)
        return True

    def close(self) -> None:
        self._queue.close()


class PersistSqlite:
    def __init__(self, path: str, durable: bool) -> None:
        from persistqueue import Empty, SQLiteQueue

        self._empty = Empty
        self._queue: Any = SQLiteQueue(path, auto_commit=True, timeout=30)
        if not durable:
            self._queue._conn.execute("pragma synchronous = off")

    def put(self, number: int) -> None:
        self._queue.put({"n": number})

    def step(self) -> bool:
        try:
            self._queue.get(block=False)
        except self._empty:
            return False
        return True

    def close(self) -> None:
        self._queue.close()


class PersistFile:
    processes = 1

    def __init__(self, path: str, durable: bool) -> None:
        from persistqueue import Empty, Queue

        self._empty = Empty
        os.makedirs(path, exist_ok=True)
        self._queue: Any = Queue(path, chunksize=1 << 30, tempdir=path)

    def put(self, number: int) -> None:
        self._queue.put({"n": number})

    def step(self) -> bool:
        try:
            self._queue.get(block=False)
        except self._empty:
            return False
        self._queue.task_done()
        return True

    def close(self) -> None:
        del self._queue


OURS, WORKER, LOCALQUEUE, LITEQUEUE = "holdfast", "holdfast, Worker", "localqueue", "litequeue"
FLOOR, PERSIST_ACK, PERSIST_SQLITE = "the SQL alone", "persist-queue, SQLiteAckQueue", "persist-queue, SQLiteQueue"
NOT_DURABLE: dict[str, Any] = {
    FLOOR: Statements,
    OURS: Ours,
    LOCALQUEUE: Localqueue,
    LITEQUEUE: Litequeue,
    "huey, FileHuey": Huey,
    "huey, FileStorage alone": HueyStorage,
    PERSIST_ACK: PersistAck,
    PERSIST_SQLITE: PersistSqlite,
    "persist-queue, Queue, 1 process": PersistFile,
}
SLOW = ("huey, FileStorage alone", "persist-queue, Queue, 1 process")  # left out with --quick
DURABLE = {name: NOT_DURABLE[name] for name in (FLOOR, OURS, LOCALQUEUE, LITEQUEUE, PERSIST_ACK, PERSIST_SQLITE)}


def available(kinds: dict[str, Any], directory: str, durable: bool) -> dict[str, Any]:
    """The installed ones. Everything that they need is imported now."""
    found = {}
    for number, (name, kind) in enumerate(kinds.items()):
        try:
            kind(f"{directory}/try-{durable}-{number}", durable).close()
        except ImportError as error:
            print(f"{name} is left out: {error}")
        else:
            found[name] = kind
    return found
