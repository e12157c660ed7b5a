"""`TaskQueue` and `Worker` beside localqueue, litequeue, huey's file storage and persist-queue.

`section`: a process puts empty tasks, each with its number as payload; then two others, which have opened the queue and
done ten tasks each, start at one moment and claim and complete them one by one until none is left. The rate is all
tasks over the time from the first start to the last completion. Every round of every contestant has a new queue in
the same directory. They take turns; the ratio is the median of the ratios within a round, as everywhere. What each
does, in the way its documentation shows, without batches:

    the system calls alone    those of Holdfast, in bare Python: what its rules cost before anybody has thought
    holdfast                  claim() and complete(); what is done is kept with its history
    holdfast, Worker          run(drain=True) with concurrency=2, to the last call of the handler, which does nothing
                              but take the time
    localqueue                get() and ack(). SQLite in Rust. RELAXED is a write-ahead log with synchronous=NORMAL: it
                              syncs at checkpoints only (there is no OFF). DURABLE is FULL: a sync for every commit, so
                              one for put, one for get and one for ack
    litequeue                 pop() and done(), with json. Not durable: synchronous=OFF on its connection; durable: FULL
    huey, FileHuey            dequeue() and execute(), which is all that its consumer does. The file is gone with
                              dequeue, so who dies loses the task, and a result of None is not stored. Nothing is
                              synced, ever. `FileStorage` is the storage alone: no task, no result, no completion
    persist-queue             SQLiteAckQueue: get() and ack(). SQLiteQueue: get(), which deletes: nothing is left to be
                              completed, who dies loses the task, and there is no target. Both look and then write,
                              without a transaction around it: two processes get some of the tasks twice, and all of
                              these count as done here. Not durable: synchronous=OFF on a connection that is not public,
                              as there is no option; durable: as it comes, which is FULL
                              Queue: get() and task_done(). Two processes cannot share it, so one has it for itself,
                              and nobody is in its way; chunks so large that it never syncs

Holdfast, `durable=True`: put syncs the sheet, complete syncs the file beside it, claim nothing: if the power fails in
between, the task is done again, as it would be if its lease had run out.

Before an ext4 without a journal makes a file, it looks at every inode that was deleted in the last minutes. So there
the figures of those who make a file for every task (huey, persist-queue's Queue) say more about what was removed than
about them. Hence also an ext4 with a journal, on a loop device.

`wake`: see there. `many`: see there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from events import journalled
from measure import Place, Row, Table, paired_ratio, run_children

from holdfast.tasks import Claim, TaskQueue, Worker

PROCESSES = 2
WARM_UP = 10  # tasks of every process before it counts
AHEAD, AHEAD_DURABLE, PUT_AHEAD = 5.0, 1.5, 1.0
SMALLEST_SHARE = 0.45
MANY, FEW, AT_MANY = 100_000, 100, 1.3
WAKE_MS = 5.0

clock = time.monotonic


# The contestants. Each one opens its queue in a directory, puts, and takes and completes one task. False: none is left.


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
        pass


class Bare:
    """The same lines, and nothing that decides: no JSON, no checks, no priorities, no care for the dead."""

    def __init__(self, path: str, durable: bool) -> None:
        self._durable = durable
        os.makedirs(path, exist_ok=True)
        self._sheet_path = f"{path}/sheet"
        self._sequence = os.open(f"{path}/sequence", os.O_RDWR | os.O_CREAT)
        self._sheet = os.open(self._sheet_path, os.O_RDWR | os.O_CREAT)
        self._done = os.open(f"{path}/done", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._slot = os.open(f"{path}/{os.urandom(8).hex()}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._slot, fcntl.LOCK_EX)
        self._end = 0
        self._next = self._known = 0

    def put(self, number: int) -> None:
        fcntl.flock(self._sequence, fcntl.LOCK_EX)
        last = int(os.pread(self._sequence, 1024, 0) or b"0") + 1
        fcntl.flock(self._sheet, fcntl.LOCK_EX)
        os.access(self._sheet_path, 0)
        os.pread(self._sheet, 1, self._end)
        if self._end % (1 << 16) == 0:
            os.pwrite(self._sheet, b"\n" * (1 << 16), self._end)
        os.pwrite(self._sheet, b"%*s%*d\n" % (_BLANK, b"", _LINE - _BLANK - 1, number), self._end)
        fcntl.flock(self._sheet, fcntl.LOCK_UN)
        os.pwrite(self._sequence, b"%032d" % last, 0)
        fcntl.flock(self._sequence, fcntl.LOCK_UN)
        self._end += _LINE
        if self._durable:
            os.fdatasync(self._sheet)

    def step(self) -> bool:
        while True:
            os.pread(self._sequence, 1024, 0)
            if self._next == self._known:
                text = os.pread(self._sheet, 1 << 12, self._next)
                self._known += len(text.rstrip(b"\n")) // (_LINE - 1) * _LINE
                if self._next == self._known:
                    return False
            at = self._next
            self._next += _LINE
            try:
                fcntl.fcntl(self._sheet, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_WRLCK, at))
            except BlockingIOError:
                continue
            line = os.pread(self._sheet, _LINE, at)
            if line.startswith(b" "):
                os.pwrite(self._slot, line[_BLANK:] + b"%135d\n" % 1, 0)
                os.pwrite(self._sheet, b"x%016d " % 1, at)
            fcntl.fcntl(self._sheet, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, at))
            if not line.startswith(b" "):
                continue
            os.write(self._done, b"%160d\n%92d\n" % (1, 1))
            if self._durable:
                os.fdatasync(self._done)
            os.pwrite(self._slot, b"\n", 0)
            return True

    def close(self) -> None:
        for fd in (self._sequence, self._sheet, self._done, self._slot):
            os.close(fd)


_BLANK, _LINE = 18, 128


def _lock_of(kind: int, at: int) -> bytes:
    return struct.pack("hhqqi", kind, 0, (1 << 60) + at, 1, 0)


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
            job = self._queue.get(timeout=0)  # block=False says that it is empty whenever somebody else is at it
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
        # auto_resume would give the tasks of the other process back.
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


OURS, WORKER, LOCALQUEUE = "holdfast", "holdfast, Worker", "localqueue"
FLOOR, WITHOUT_COMPLETION = "the system calls alone", "persist-queue, SQLiteQueue"
NOT_DURABLE: dict[str, Any] = {
    FLOOR: Bare,
    OURS: Ours,
    LOCALQUEUE: Localqueue,
    "litequeue": Litequeue,
    "huey, FileHuey": Huey,
    "huey, FileStorage alone": HueyStorage,
    "persist-queue, SQLiteAckQueue": PersistAck,
    WITHOUT_COMPLETION: PersistSqlite,
    "persist-queue, Queue, 1 process": PersistFile,
}
DURABLE = {
    name: NOT_DURABLE[name]
    for name in (FLOOR, OURS, LOCALQUEUE, "litequeue", "persist-queue, SQLiteAckQueue", WITHOUT_COMPLETION)
}


def _available(kinds: dict[str, Any], directory: str, durable: bool) -> dict[str, Any]:
    """Those that are installed; also, whatever they import is imported now."""
    found = {}
    for number, (name, kind) in enumerate(kinds.items()):
        try:
            kind(f"{directory}/try-{durable}-{number}", durable).close()
        except ImportError as error:
            print(f"{name} is left out: {error}")
        else:
            found[name] = kind
    return found


# Claim and complete, by two processes; and put.


@dataclass
class Samples:
    """Of one contestant, a number for every round."""

    put: list[float] = field(default_factory=list)  # seconds for one
    done: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # the smaller one
    cpu: list[float] = field(default_factory=list)  # of the CPU time, what the process with the smaller share had
    counts: list[int] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)  # the smaller share of two loops that have nothing in common


def share_of_loops(seconds: float = 0.03) -> float:
    """How evenly this machine treats two processes that do nothing but count, at the same time: the smaller share."""
    ready = memoryview(mmap.mmap(-1, 8 * PROCESSES)).cast("q")

    def count(me: int) -> int:
        ready[me] = 1
        while sum(ready) < PROCESSES:
            time.sleep(0)
        counted, until = 0, clock() + seconds
        while clock() < until:
            counted += 1
        return counted

    counts = run_children(PROCESSES, count, limit=60)
    return min(counts) / sum(counts)


def fill(kind: Any, path: str, durable: bool, number: int) -> float:
    """Seconds for one."""
    queue = kind(path, durable)
    for each in range(WARM_UP):
        queue.put(each)
    began = clock()
    for each in range(number):
        queue.put(each)
    taken = clock() - began
    for each in range(WARM_UP * (PROCESSES - 1)):
        queue.put(each)
    queue.close()
    return taken / number


def race(kind: Any, path: str, durable: bool, number: int) -> tuple[float, list[int], list[float]]:
    """Seconds for one, how many each process has done, and the CPU time of each."""
    processes = getattr(kind, "processes", PROCESSES)
    done = memoryview(mmap.mmap(-1, 8 * PROCESSES)).cast("q")
    ready = memoryview(mmap.mmap(-1, 8 * PROCESSES)).cast("q")

    def work(me: int) -> tuple[float, float, int, float]:
        queue = kind(path, durable)
        step = queue.step
        for _ in range(WARM_UP * PROCESSES // processes):
            assert step()
        ready[me] = 1
        while sum(ready) < processes:
            time.sleep(0)
        used = time.process_time()
        began = ended = clock()
        while True:
            if step():
                done[me] += 1
                ended = clock()
            elif sum(done) >= number:
                return began, ended, done[me], time.process_time() - used
            elif clock() - ended > 5:
                raise RuntimeError(f"{number - sum(done)} of {number} tasks are not found any more")

    results = run_children(processes, work, limit=120)
    taken = max(end for _, end, _, _ in results) - min(begin for begin, _, _, _ in results)
    counts = [count for _, _, count, _ in results]
    return taken / sum(counts), counts, [cpu for _, _, _, cpu in results]


def race_of_worker(path: str, durable: bool) -> tuple[float, list[int], list[float]]:
    """The same with a `Worker`: its processes, too, start at one moment, each in the handler of its tenth task."""
    times = memoryview(mmap.mmap(-1, 24 * PROCESSES)).cast("q")  # of each process: first, last, how many
    tickets, giver = os.pipe()
    os.write(giver, bytes(range(PROCESSES)))
    mine: list[int] = []

    def handler(task: Claim) -> None:
        if len(mine) < WARM_UP:
            mine.append(0)  # the processes of a worker have their own copy of this list
            if len(mine) == WARM_UP:
                mine[0] = os.read(tickets, 1)[0] * 3
                times[mine[0]] = 1
                while not all(times[::3]):
                    time.sleep(0)
                times[mine[0]] = time.monotonic_ns()
            return
        at = mine[0]
        times[at + 1] = time.monotonic_ns()
        times[at + 2] += 1

    def work(_: int) -> int:
        return Worker(TaskQueue(path, durable=durable), handler, concurrency=PROCESSES).run(drain=True).done

    (done,) = run_children(1, work, limit=120)
    os.close(tickets)
    os.close(giver)
    counts = list(times[2::3])
    assert done == sum(counts) + WARM_UP * PROCESSES, (done, counts)
    first, last = min(times[::3]), max(times[1::3])
    return (last - first) / 1e9 / sum(counts), counts, []


def compete(quick: bool, directory: str, kinds: dict[str, Any], durable: bool, number: int) -> dict[str, Samples]:
    kinds = _available(kinds, directory, durable)
    order = [*kinds.items(), (WORKER, Ours)]
    samples = {name: Samples() for name, _ in order}
    for turn in range((5 if quick else 11) + 1):
        for name, kind in random.sample(order, len(order)):  # so that nobody always has the same one before it
            path = f"{directory}/{durable}-{turn}-{name}"
            put = fill(kind, path, durable, number)
            done, counts, cpu = race_of_worker(path, durable) if name == WORKER else race(kind, path, durable, number)
            if turn:  # the first one warms up
                mine = samples[name]
                mine.put.append(put)
                mine.done.append(done)
                mine.shares.append(min(counts) / sum(counts))
                mine.counts.append(sum(counts))
                if name == OURS:
                    mine.loops.append(share_of_loops())
                if cpu:
                    mine.cpu.append(cpu[counts.index(min(counts))] / sum(cpu))
    return samples


def section(quick: bool, places: list[Place]) -> Iterator[Table]:
    with ExitStack() as stack:
        rooms = {f"{place.kind} here" if place is places[0] else place.kind: place.directory for place in places}
        loop = stack.enter_context(journalled(places[0].directory, megabytes=2048))
        if loop is not None:
            rooms["ext4 with a journal, on a loop device"] = loop
        else:
            print("cannot mount a loop device: the figures of ext4 with a journal are left out")
        for name, directory in rooms.items():
            number = 2000
            samples = compete(quick, directory, NOT_DURABLE, False, number)
            judged = set(samples) - {FLOOR, WITHOUT_COMPLETION}
            yield _done_table(f"{number:,} empty tasks, not durable, {name}", samples, number, AHEAD, judged)
            yield _put_table(f"Put, not durable, {name}", samples)
        for name, directory in rooms.items():
            if name == "tmpfs":
                continue  # which makes nothing durable
            number = 300 if quick else 600
            samples = compete(quick, directory, DURABLE, True, number)
            yield _done_table(f"{number:,} empty tasks, durable, {name}", samples, number, AHEAD_DURABLE, {LOCALQUEUE})
            yield _put_table(f"Put, durable, {name}", samples)


def _done_table(title: str, samples: dict[str, Samples], number: int, target: float, judged: set[str]) -> Table:
    rows = []
    for name, mine in samples.items():
        row = Row(name, 1 / median(mine.done), "/s", raw=mine.__dict__)
        if name in (OURS, WORKER):
            lost = sum(abs(count - number) for count in mine.counts)
            row.check(f"{lost} lost", lost == 0)
            share = median(mine.shares)
            row.check(_split(share) + f", at worst {_split(SMALLEST_SHARE)}", share >= SMALLEST_SHARE)
            worst = min(range(len(mine.shares)), key=mine.shares.__getitem__)
            row.note = f"worst round {_split(mine.shares[worst])}"
            if mine.cpu:
                row.note += f", of the CPU time {_split(mine.cpu[worst])}"
            if mine.loops:
                row.note += f"; two loops that share nothing {_split(median(mine.loops))}"
                row.note += f", worst round {_split(min(mine.loops))}"
        else:
            row.ratio = paired_ratio(mine.done, samples[OURS].done)
            worker = paired_ratio(mine.done, samples[WORKER].done)
            if name in judged:
                row.check(f">= {target:g} x", row.ratio >= target)
                row.check(f"Worker {worker:.2f} x, >= {target:g} x", worker >= target)
            notes = [] if name in judged else [f"Worker {worker:.2f} x"]
            if max(mine.shares) < 1:  # else it was one process
                notes.append(f"split {_split(median(mine.shares))}")
            twice = sum(mine.counts) / len(mine.counts) - number
            if twice:
                notes.append(f"{twice:.0f} done twice")
            row.note = "; ".join(notes)
        rows.append(row)
    return Table(f"Claim + complete by {PROCESSES} processes, {title}: how many times as fast holdfast is", rows)


def _split(share: float) -> str:
    return f"{share * 100:.0f}:{100 - share * 100:.0f}"


def _put_table(title: str, samples: dict[str, Samples]) -> Table:
    rows = []
    ours = samples[OURS].put
    for name, mine in samples.items():
        if name == WORKER:
            continue
        row = Row(name, 1 / median(mine.put), "/s", raw=mine.put)
        if name != OURS:
            row.ratio = paired_ratio(mine.put, ours)
            if name != FLOOR:
                row.check(f"> {PUT_AHEAD:g} x", row.ratio > PUT_AHEAD)
        rows.append(row)
    return Table(f"{title}, one process: how many times as fast holdfast is", rows)


# An idle worker.


def _serve(work: Callable[[Callable[[], object]], object]) -> tuple[int, int]:
    """A process that does `work`, which is given what to call in the handler. Its id, and the pipe with the times."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        work(lambda: os.write(writer, struct.pack("q", time.monotonic_ns())))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _end(pid: int, reader: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = clock() + 5
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if clock() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    os.close(reader)


def _our_worker(path: str, durable: bool, **options: Any) -> Callable[[Callable[[], object]], object]:
    return lambda tell: Worker(TaskQueue(path, durable=durable), lambda task: tell(), **options).run()


def _our_claims(path: str) -> Callable[[Callable[[], object]], object]:
    def work(tell: Callable[[], object]) -> None:
        queue = TaskQueue(path, durable=False)
        while True:
            claim = queue.claim(timeout=None)
            assert claim is not None
            tell()
            claim.complete()

    return work


def _localqueue_worker(path: str) -> Callable[[Callable[[], object]], object]:
    def work(tell: Callable[[], object]) -> None:
        from localqueue import SimpleQueue
        from localqueue import Worker as LocalWorker

        queue: Any = SimpleQueue(path)
        LocalWorker(queue, lambda job: tell()).run()

    return work


def _huey_consumer(path: str) -> Callable[[Callable[[], object]], object]:
    def work(tell: Callable[[], object]) -> None:
        huey = Huey(path, durable=False).huey
        huey._registry._registry.clear()
        huey.task(name="_nothing")(lambda payload: tell())
        from huey.consumer import Consumer

        Consumer(huey, workers=1, periodic=False).run()

    return work


def wake(quick: bool, place: Place) -> Table:
    """Workers that wait, of several kinds, each in a process of its own. From just before put to inside the handler.

    They get a task in turn, one after a random pause of 20 to 40 ms, so that each has been idle for at least 100 ms.
    All have the settings they come with. localqueue's worker and huey's consumer poll: the first after 10 ms, then
    after half as long again each time, up to 250 ms; the other after 100 ms, 115 ms, and so on, up to 10 s. So their
    figures are as good as here only after a pause as short as here.
    """
    room = place.directory
    servers: dict[str, tuple[Callable[[int], object], Callable[[Callable[[], object]], object]]] = {
        "holdfast, Worker": (Ours(f"{room}/1", False).put, _our_worker(f"{room}/1", False)),
        "holdfast, Worker, durable": (Ours(f"{room}/2", True).put, _our_worker(f"{room}/2", True)),
        "holdfast, Worker, threads=True": (Ours(f"{room}/3", False).put, _our_worker(f"{room}/3", False, threads=True)),
        "holdfast, claim(timeout=None)": (Ours(f"{room}/4", False).put, _our_claims(f"{room}/4")),
    }
    peers: dict[str, Any] = {"localqueue, Worker": Localqueue, "huey, FileHuey, Consumer": Huey}
    for name, kind in _available(peers, room, False).items():
        path = f"{room}/{name}"
        servers[name] = (kind(path, False).put, (_localqueue_worker if kind is Localqueue else _huey_consumer)(path))
    running = {name: _serve(work) for name, (_, work) in servers.items()}
    times: dict[str, list[float]] = {name: [] for name in servers}
    try:
        for turn in range((100 if quick else 400) + 5):
            for name, (put, _) in servers.items():
                time.sleep(random.uniform(0.02, 0.04))
                began = time.monotonic_ns()
                put(turn)
                if not select.select([running[name][1]], [], [], 30)[0]:
                    raise RuntimeError(f"{name} does not wake up")
                (ended,) = struct.unpack("q", os.read(running[name][1], 8))
                if turn >= 5:  # the first ones warm up
                    times[name].append((ended - began) / 1e6)
    finally:
        for pid, reader in running.values():
            _end(pid, reader)
    rows = []
    for name, mine in times.items():
        row = Row(name, median(mine), "ms", raw=mine)
        if name.startswith("holdfast"):
            row.check(f"< {WAKE_MS:g} ms", median(mine) < WAKE_MS)
        row.note = f"p99 {sorted(mine)[int(len(mine) * 0.99)]:.1f} ms"
        rows.append(row)
    return Table(f"Wake-up of an idle worker: from before put to inside the handler, {place.kind}", rows)


# Many that wait.


def many(quick: bool, place: Place) -> Table:
    """Claims with 100 and with 100,000 waiting.

    A new process opens the queue and claims and completes 50 tasks, again and again; before each 50 but the first it
    puts as many as are missing, which is not timed. `fresh` are its first 1,000 claims, with a `TaskQueue` that knows
    nothing yet; `steady` are the next 2,000. What it takes a process to open the queue and claim one task for the very
    first time, imports apart, has a row of its own.
    """
    paths = {count: f"{place.directory}/{count}" for count in (FEW, MANY)}
    for count, path in paths.items():
        TaskQueue(path, durable=False).put_all({"n": n} for n in range(count))
    figures: dict[int, list[dict[str, float]]] = {FEW: [], MANY: []}
    for turn in range((5 if quick else 15) + 1):
        for count, path in paths.items():
            (found,) = run_children(1, lambda _, path=path: _claims(path, 1000, 2000))  # type: ignore[misc]
            if turn:
                figures[count].append(found)
    rows = []
    for what in figures[FEW][0]:
        few, lots = ([one[what] for one in figures[count]] for count in (FEW, MANY))
        for count, values in ((FEW, few), (MANY, lots)):
            row = Row(f"{what}, {count:,} waiting", median(values) * 1e6, "µs", raw=values)
            if count == MANY:
                row.ratio = paired_ratio(lots, few)
                if not what.startswith("open"):
                    row.at_most(AT_MANY)
            rows.append(row)
    return Table(f"TaskQueue with {FEW:,} and with {MANY:,} tasks waiting, durable=False, {place.kind}", rows)


def _claims(path: str, fresh: int, steady: int) -> dict[str, float]:
    block = 50
    began = clock()
    queue = TaskQueue(path, durable=False)
    claim = queue.claim()
    assert claim is not None
    opened = clock() - began
    claim.give_back()
    queue = TaskQueue(path, durable=False)
    found = {"open, and the first claim": opened}
    for name, wanted in (("fresh", fresh), ("steady", steady)):
        claiming = completing = 0.0
        for _ in range(wanted // block):
            for _ in range(block):
                began = clock()
                claim = queue.claim()
                claimed = clock()
                assert claim is not None
                claim.complete()
                completing += clock() - claimed
                claiming += claimed - began
            queue.put_all({"n": n} for n in range(block))
        found[f"claim, {name}"] = claiming / wanted
        found[f"claim + complete, {name}"] = (claiming + completing) / wanted
    return found
