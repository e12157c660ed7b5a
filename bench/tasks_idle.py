"""What idle workers cost a put, and how soon they take over the task of a worker that was killed.

`CPU time of a put`: the CPU time of all processes, by /proc/PID/schedstat: of the one that puts, of the worker that
wakes and does the task, and of all the others. The next put comes when the task is done and 2 ms have passed.

`after SIGKILL`: from just before the kill of a worker that has a task until an idle worker has claimed that task.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measure import Place, Row, Table
from tasks import _serve as serve

from holdfast.tasks import TaskQueue

FEW, MANY = 1, 64
MORE_CPU = 2.0
TAKEN_OVER_MS = 100.0
PATIENCE_S = 30.0


def section(quick: bool, place: Place) -> Table:
    costs = {number: _costs(f"{place.directory}/{number}", number, quick) for number in (FEW, MANY)}
    base = median(costs[FEW])
    rows = []
    for number, values in costs.items():
        cost = median(values)
        row = Row(f"CPU time of a put and its task, {number} idle", cost, "µs", cost / base, raw=values)
        if number == MANY:
            row.at_most(MORE_CPU)
        rows.append(row)
    times = _take_overs(f"{place.directory}/killed", quick)
    row = Row("claimed by an idle worker after SIGKILL", median(times), "ms", raw=times)
    row.check(f"< {TAKEN_OVER_MS:g} ms", median(times) < TAKEN_OVER_MS)
    row.note = f"longest {max(times):.1f} ms"
    return Table(f"Idle workers, {place.kind}", [*rows, row])


def _claims(path: str, *, hold: bool = False) -> Callable[[Callable[[], object]], object]:
    def work(tell: Callable[[], object]) -> None:
        queue = TaskQueue(path, durable=False)
        while (claim := queue.claim(timeout=None)) is not None:
            if hold:
                tell()
                time.sleep(PATIENCE_S)
            claim.complete()
            tell()

    return work


def _told(reader: int) -> float:
    """The time that a worker has told, in seconds."""
    if not select.select([reader], [], [], PATIENCE_S)[0]:
        raise RuntimeError("no worker gets the task")
    (moment,) = struct.unpack("q", os.read(reader, 8))
    return float(moment) / 1e9


def _kill(pid: int, reader: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)


def _until_idle(queue: TaskQueue, workers: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while queue.store.read(lambda run: run("select count(*) from idle").fetchone()[0]) < workers:
        if time.monotonic() > deadline:
            raise RuntimeError("the workers do not become idle")
        time.sleep(0.005)


def _costs(path: str, workers: int, quick: bool) -> list[float]:
    """Microseconds of CPU time of each of several series of puts."""
    queue = TaskQueue(path, durable=False)
    running = [serve(_claims(path)) for _ in range(workers)]
    pids = [os.getpid(), *(pid for pid, _ in running)]
    found: list[float] = []
    try:
        _until_idle(queue, workers)
        number = 50
        for turn in range((5 if quick else 15) + 1):
            before = _cpu_ns(pids)
            for each in range(number):
                queue.put({"n": each})
                ready = select.select([reader for _, reader in running], [], [], PATIENCE_S)[0]
                if not ready:
                    raise RuntimeError("no worker gets the task")
                _told(ready[0])
                time.sleep(0.002)
            if turn:  # the first one warms up
                found.append((_cpu_ns(pids) - before) / number / 1e3)
    finally:
        for each_worker in running:
            _kill(*each_worker)
    return found


def _cpu_ns(pids: list[int]) -> int:
    return sum(
        int(path.read_text().split()[0]) for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _take_overs(path: str, quick: bool) -> list[float]:
    found = []
    for turn in range(20 if quick else 100):
        here = f"{path}/{turn}"  # a worker that was killed may have left a task
        queue = TaskQueue(here, durable=False)
        queue.put({"n": turn})
        holder = serve(_claims(here, hold=True))
        _told(holder[1])
        idle = serve(_claims(here))
        _until_idle(queue, 1)
        time.sleep(0.02)  # it noted that it is idle, and now begins to wait
        began = time.monotonic()
        _kill(*holder)
        found.append((_told(idle[1]) - began) * 1000)
        _kill(*idle)
        queue.close()
    return found
