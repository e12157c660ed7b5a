"""Many processes that want one lock: is anything lost, who gets how much, and what does it cost?

`section`: 8 processes acquire and release as fast as they can, and raise a counter that is read when the lock was
acquired and written before it is released. The critical section is otherwise empty, which is the worst case for a lock
that is handed over in order.

`throughput`: the same with 1 to 128 processes, beside a blocking flock and filelock.

`waiters`: 8, 50 and 200 processes wait for one lock. Each holds it longer than a turn lasts (`process.Turn`), so that
every acquisition is a hand-off to another process. CPU time is what all of them used, user and system.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import mmap
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from measure import Place, Row, Table, run_children

import holdfast

PROCESSES = 8
LOWEST_SHARE, HIGHEST_SHARE = 0.9, 1.1
LEAST_THROUGHPUT = 0.7

NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128)
FLOCK = "bare flock"

CROWDS = (8, 50, 200)
HELD_FOR = 0.0015


# Without fairness or keep=True a file that is replaced all the time is what is measured here.
logging.getLogger("holdfast").setLevel(logging.ERROR)


def contend(make: Callable[[], Any], seconds: float, processes: int = PROCESSES) -> dict[str, Any]:
    counter = memoryview(mmap.mmap(-1, 8)).cast("q")

    def work(_: int) -> int:
        lock = make()
        acquired, end = 0, time.monotonic() + seconds  # to fork 128 processes takes long, so not before
        while time.monotonic() < end:
            with lock:
                seen = counter[0]
                acquired += 1
                counter[0] = seen + 1
        return acquired

    counts = run_children(processes, work)
    total = sum(counts)
    return {
        "per_second": total / seconds,
        "lost": total - counter[0],
        "shares": sorted(count * processes / (total or 1) for count in counts),
    }


def section(quick: bool, places: list[Place]) -> list[Table]:
    seconds, repeats = (0.5, 1) if quick else (1.0, 2)
    kinds = list(product(places, (False, True), (None, 30), (True, False)))
    runs: dict[Any, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            place, keep, timeout, fair = kind
            lock = holdfast.Lock(f"{place.directory}/contended.lock", keep=keep, timeout=timeout, fair=fair)
            runs[kind].append(contend(lambda lock=lock: lock, seconds))  # type: ignore[misc]
    return [Table(f"{PROCESSES} processes contend, {place.kind}", _rows(runs, place)) for place in places]


def _rows(runs: dict[Any, list[dict[str, Any]]], wanted: Place) -> list[Row]:
    rows = []
    for (place, keep, timeout, fair), results in runs.items():
        if place != wanted:
            continue
        row = Row(f"{'keep=True' if keep else 'ephemeral'}, timeout={timeout}, fair={fair}", unit="/s", raw=results)
        row.value = median(run["per_second"] for run in results)
        low = median(run["shares"][0] for run in results)
        high = median(run["shares"][-1] for run in results)
        lost = sum(run["lost"] for run in results)
        shares = f"shares {low:.2f} to {high:.2f}"
        if fair:
            unfair = runs[place, keep, timeout, False]
            row.ratio = median(f["per_second"] / u["per_second"] for f, u in zip(results, unfair, strict=True))
            row.check(f">= {LEAST_THROUGHPUT} x", row.ratio >= LEAST_THROUGHPUT)
            row.check(f"{shares} in {LOWEST_SHARE} to {HIGHEST_SHARE}", low >= LOWEST_SHARE and high <= HIGHEST_SHARE)
        else:
            row.note = shares
        row.check(f"{lost} lost", lost == 0)
        rows.append(row)
    return rows


class Flock:
    """A blocking flock and nothing else: the floor."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _filelock() -> Callable[[str], Any]:
    import filelock

    return filelock.FileLock


# Each imports its package and returns what makes a lock.
CONTENDERS: dict[str, Callable[[], Callable[[str], Any]]] = {
    FLOCK: lambda: Flock,
    "Lock, fair=True": lambda: partial(holdfast.Lock, keep=True),
    "Lock, fair=False": lambda: partial(holdfast.Lock, keep=True, fair=False),
    "filelock": _filelock,
}


def throughput(quick: bool, place: Place) -> Table:
    """Acquisitions a second of 1 to 128 processes: all but one of them wait."""
    seconds, repeats = (0.3, 1) if quick else (0.4, 2)
    contenders = dict(CONTENDERS)
    if importlib.util.find_spec("filelock") is None:
        print("filelock is left out: it is not installed")
        del contenders["filelock"]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for processes, (name, load) in product(NUMBERS, contenders.items()):
            path = f"{place.directory}/{name}.lock"

            # In a process of its own: filelock imports asyncio, for which Holdfast looks then. Each of the processes
            # that contend makes its own lock, because filelock refuses one from before a fork.
            def run(_: int, load: Any = load, path: str = path, processes: int = processes) -> dict[str, Any]:
                return contend(partial(load(), path), seconds, processes)

            runs.setdefault((name, processes), []).extend(run_children(1, run))
    rows = []
    for (name, processes), mine in runs.items():
        row = Row(f"{name}, {processes}", unit="/s", series=name, at=processes, raw=mine)
        row.value = median(run["per_second"] for run in mine)
        floor = runs[FLOCK, processes]
        row.ratio = median(run["per_second"] / raw["per_second"] for run, raw in zip(mine, floor, strict=True))
        row.curve = [median(shares) for shares in zip(*(run["shares"] for run in mine), strict=True)]
        lost = sum(run["lost"] for run in mine)
        row.check(f"{lost} lost", lost == 0)
        rows.append(row)
    return Table(f"Acquisitions a second by the number of processes, {place.kind}", rows)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def crowd(lock: holdfast.Lock, number: int, seconds: float) -> dict[str, float]:
    """`arriving`: all queue up behind a holder and take one turn each. `standing`: they go on, and the queue stays."""
    last = memoryview(mmap.mmap(-1, 8)).cast("q")
    queue = lock.path + ".queue"
    hold = lock.acquire()

    def let_them_queue() -> None:
        deadline = time.monotonic() + 30
        while not os.path.isdir(queue) or len(os.listdir(queue)) < number:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{number} waiters did not queue")
            time.sleep(0.005)
        hold.release()

    def turn(me: int) -> bool:
        with lock:
            handed_over = last[0] != me
            last[0] = me
            time.sleep(HELD_FOR)
        return handed_over

    def work(i: int) -> tuple[float, float, int]:
        begin = _cpu_seconds()
        turn(i + 1)
        arrived = _cpu_seconds()
        end = time.monotonic() + seconds
        turns = 0
        while time.monotonic() < end:
            turns += turn(i + 1)
        return arrived - begin, _cpu_seconds() - arrived, turns

    results = run_children(number, work, let_them_queue)
    turns = sum(turns for _, _, turns in results)
    return {
        "arriving": sum(cpu for cpu, _, _ in results) / number,
        "standing": sum(cpu for _, cpu, _ in results) / turns,
        "turns": turns,
    }


def waiters(quick: bool, place: Place) -> Table:
    seconds, repeats = (1.0, 1) if quick else (2.0, 2)
    runs: dict[int, list[dict[str, float]]] = {number: [] for number in CROWDS}
    for _ in range(repeats):
        for number in CROWDS:
            runs[number].append(crowd(holdfast.Lock(f"{place.directory}/crowded.lock"), number, seconds))
    rows = []
    for what in ("arriving", "standing"):
        first = median(run[what] for run in runs[CROWDS[0]])
        for number in CROWDS:
            cpu = median(run[what] for run in runs[number])
            row = Row(f"{number} waiting processes, {what}", cpu * 1e6, "µs", cpu / first, raw=runs[number])
            row.series, row.at = what, number
            if number > CROWDS[0]:
                row.at_most(number / CROWDS[0])
            rows.append(row)
    return Table(f"CPU time per hand-off, fair=True, {place.kind}; the ratio is to {CROWDS[0]} waiters", rows)
