"""`TaskQueue` and `Worker` beside localqueue, litequeue, huey's file storage and persist-queue (see `task_queues`).

`section`: one process puts empty tasks. Then two other processes, which have opened the queue and done ten tasks each,
start at one moment and claim and complete tasks until none is left. The rate is the number of tasks divided by the time
from the first start to the last completion. Every queue has a new directory in every round. The queues take turns. A
ratio is the median of the ratios within a round.

Holdfast, `durable=True`: put and complete sync the write-ahead log, claim does not. If the power fails after a claim,
the task runs again.

ext4 without a journal looks at every inode that was deleted in the last minutes before it creates a file. So the
figures of queues with a file for every task (huey, persist-queue's Queue) depend on the files that were deleted before.
Hence also ext4 with a journal, on a loop device.

`wake`: from `put` to the handler of an idle worker. `many`: claims while many tasks wait, or many are done.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

from events import journalled
from measure import Place, Row, Table, paired_ratio, run_children
from task_queues import (
    DURABLE,
    FLOOR,
    LITEQUEUE,
    LOCALQUEUE,
    NOT_DURABLE,
    OURS,
    PERSIST_ACK,
    SLOW,
    WORKER,
    Huey,
    Localqueue,
    Ours,
    available,
)
from task_races import PROCESSES, Samples, compete

from holdfast.tasks import TaskQueue, Worker

AHEAD = {PERSIST_ACK: 2.5, LITEQUEUE: 6.0, LOCALQUEUE: 6.0}
AHEAD_DURABLE = {PERSIST_ACK: 1.5, LITEQUEUE: 1.5, LOCALQUEUE: 1.5}
PUT_AHEAD = 1.0
SMALLEST_SHARE = 0.45
WAKE_MS = 3.0
FEW, MANY_WAITING, MANY_DONE = 100, 1_000_000, 10_000_000
AT_MANY, OPEN_MS = 1.5, 100.0

clock = time.monotonic


# Claim and complete, by two processes, and put.


def section(quick: bool, places: list[Place]) -> Iterator[Table]:
    with ExitStack() as stack:
        rooms = {f"{place.kind} here" if place is places[0] else place.kind: place.directory for place in places}
        loop = stack.enter_context(journalled(places[0].directory, megabytes=2048))
        if loop is not None:
            rooms["ext4 with a journal, on a loop device"] = loop
        else:
            print("cannot mount a loop device: the figures of ext4 with a journal are left out")
        for name, directory in rooms.items():
            number = 1000 if quick else 2000
            kinds = {name: kind for name, kind in NOT_DURABLE.items() if not (quick and name in SLOW)}
            samples = compete(quick, directory, kinds, False, number)
            yield _done_table(f"{number:,} empty tasks, not durable, {name}", samples, number, AHEAD)
            yield _put_table(f"Put, not durable, {name}", samples)
        for name, directory in rooms.items():
            if name == "tmpfs":
                continue  # nothing is durable there
            number = 300 if quick else 600
            samples = compete(quick, directory, DURABLE, True, number)
            yield _done_table(f"{number:,} empty tasks, durable, {name}", samples, number, AHEAD_DURABLE)
            yield _put_table(f"Put, durable, {name}", samples)


def _done_table(title: str, samples: dict[str, Samples], number: int, targets: dict[str, float]) -> Table:
    rows = []
    for name, mine in samples.items():
        row = Row(name, 1 / median(mine.done), "/s", raw=mine.__dict__)
        if name in (OURS, WORKER):
            _check_ours(row, mine, number)
        else:
            _compare(row, mine, samples, number, targets.get(name))
        rows.append(row)
    return Table(f"Claim + complete by {PROCESSES} processes, {title}: how many times as fast holdfast is", rows)


def _check_ours(row: Row, mine: Samples, number: int) -> None:
    lost = sum(abs(count - number) for count in mine.counts)
    row.check(f"{lost} lost", lost == 0)
    share = median(mine.shares)
    row.check(_split(share) + f", at worst {_split(SMALLEST_SHARE)}", share >= SMALLEST_SHARE)
    worst = min(range(len(mine.shares)), key=mine.shares.__getitem__)
    row.note = f"worst round {_split(mine.shares[worst])}"
    if mine.cpu:
        row.note += f", of the CPU time {_split(mine.cpu[worst])}"
    if mine.loops:
        row.note += f"; two independent loops {_split(median(mine.loops))}, worst round {_split(min(mine.loops))}"


def _compare(row: Row, mine: Samples, samples: dict[str, Samples], number: int, target: float | None) -> None:
    row.ratio = paired_ratio(mine.done, samples[OURS].done)
    worker = paired_ratio(mine.done, samples[WORKER].done)
    notes = [] if target is not None else [f"Worker {worker:.2f} x"]
    if target is not None:
        row.check(f">= {target:g} x", row.ratio >= target)
        row.check(f"Worker {worker:.2f} x, >= {target:g} x", worker >= target)
    if max(mine.shares) < 1:  # else one process ran alone
        notes.append(f"split {_split(median(mine.shares))}")
    twice = sum(mine.counts) / len(mine.counts) - number
    if twice:
        notes.append(f"{twice:.0f} done twice")
    row.note = "; ".join(notes)


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
    """Start a process that calls `work(tell)`; its handler calls `tell`. Return its pid and the pipe with the times."""
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
        queue = Huey(path, durable=False)
        queue.call_instead(tell)
        from huey.consumer import Consumer

        Consumer(queue.huey, workers=1, periodic=False).run()

    return work


def wake(quick: bool, place: Place) -> Table:
    """The time from just before put to inside the handler, for idle workers of several kinds, a process each.

    They get a task in turn, with a random pause of 20 to 40 ms between two, so that each was idle for at least 100 ms.
    All have their default settings. localqueue's worker and huey's consumer poll: the first after 10 ms, then after
    half as long again each time, up to 250 ms, the other after 100 ms, 115 ms, and so on, up to 10 s. After a longer
    pause, they take longer.
    """
    room = place.directory
    servers: dict[str, tuple[Callable[[int], object], Callable[[Callable[[], object]], object]]] = {
        "holdfast, Worker": (Ours(f"{room}/1", False).put, _our_worker(f"{room}/1", False)),
        "holdfast, Worker, durable": (Ours(f"{room}/2", True).put, _our_worker(f"{room}/2", True)),
        "holdfast, Worker, threads=True": (Ours(f"{room}/3", False).put, _our_worker(f"{room}/3", False, threads=True)),
        "holdfast, claim(timeout=None)": (Ours(f"{room}/4", False).put, _our_claims(f"{room}/4")),
    }
    peers: dict[str, Any] = {"localqueue, Worker": Localqueue, "huey, FileHuey, Consumer": Huey}
    for name, kind in available(peers, room, False).items():
        path = f"{room}/{name}"
        servers[name] = (kind(path, False).put, (_localqueue_worker if kind is Localqueue else _huey_consumer)(path))
    running = {name: _serve(work) for name, (_, work) in servers.items()}
    times: dict[str, list[float]] = {name: [] for name in servers}
    try:
        for turn in range((60 if quick else 400) + 5):
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


# Many tasks.


def many(quick: bool, place: Place) -> Table:
    """Claims with 100 tasks waiting, with 10,000 and 1,000,000 waiting, and with 100 waiting and 10,000,000 done.

    A new process opens the queue and claims and completes 50 tasks, again and again. In between it puts as many, which
    is not timed. `fresh` are its first 1,000 claims, `steady` the next 2,000. The time to open the queue and claim the
    first task has a row of its own. --quick has 100,000 instead of both large numbers.
    """
    waiting, done = (100_000, 100_000) if quick else (MANY_WAITING, MANY_DONE)
    sizes = {f"{number:,} waiting": (number, 0) for number in (FEW, 10_000, waiting)} | {f"{done:,} done": (FEW, done)}
    paths = {name: f"{place.directory}/{number}" for number, name in enumerate(sizes)}
    for name, (tasks, ended) in sizes.items():
        TaskQueue(paths[name], durable=False).put_all({"n": n} for n in range(tasks))
        if ended:
            run_children(1, lambda _, path=paths[name], ended=ended: _add_done(path, ended), limit=600)  # type: ignore[misc]
    rows = many_rows(paths, 5 if quick else 15, (1000, 2000))
    return Table(f"TaskQueue with few and with many tasks, durable=False, {place.kind}", rows)


def many_rows(queues: dict[str, str], turns: int, numbers: tuple[int, int]) -> list[Row]:
    """Rows for several queues. Each is compared with the first one."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in queues}
    for turn in range(turns + 1):
        for name, where in queues.items():
            (found,) = run_children(1, lambda _, where=where: _claims(where, *numbers))  # type: ignore[misc]
            if turn:
                figures[name].append(found)
    few, *others = queues
    rows = []
    for what in figures[few][0]:
        base = [one[what] for one in figures[few]]
        rows.append(_at(Row(f"{what}, {few}", median(base) * 1e6, "µs", raw=base), what, few))
        for name in others:
            values = [one[what] for one in figures[name]]
            ratio = paired_ratio(values, base)
            row = _at(Row(f"{what}, {name}", median(values) * 1e6, "µs", ratio, raw=values), what, name)
            if what.startswith("open"):
                row.check(f"< {OPEN_MS:g} ms", median(values) * 1000 < OPEN_MS)
            else:
                row.at_most(AT_MANY)
            rows.append(row)
    return rows


def _at(row: Row, what: str, name: str) -> Row:
    number, state = name.split()
    if state == "waiting":
        row.series, row.at = what, int(number.replace(",", ""))
    return row


def _add_done(path: str, number: int) -> None:
    """Add done tasks in one statement. To run so many would take an hour."""
    raw = sqlite3.connect(f"{path}/queue.db", isolation_level=None)
    raw.execute("pragma synchronous = off")
    raw.execute(
        """with recursive count (n) as (select 1 union all select n + 1 from count where n < ?)
        insert into task (state, priority, ord, payload, attempts, tried, token, put_at, started_at, ended_at)
        select 5, 0, n, '{"n": 1}', 3, 1, 1, ?, ?, ? from count""",
        (number, time.time(), time.time(), time.time()),
    )
    raw.close()


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
