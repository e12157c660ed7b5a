"""Many processes that want one lock: is anything lost, who gets how much, and what does it cost?

`section`: 8 processes acquire and release as fast as they can, and raise a counter that is read when the lock was
acquired and written before it is released. The critical section is otherwise empty, which is the worst case for
whoever hands the lock over in order.

`waiters`: 8, 50 and 200 processes wait for one lock. Each holds it longer than a turn lasts (`process.Turn`), so that
every acquisition is a hand-off to another process. CPU time is what all of them used, user and system.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import time
from itertools import product
from statistics import median
from typing import Any

from measure import Place, Row, Table, run_children

import holdfast

PROCESSES = 8
LOWEST_SHARE, HIGHEST_SHARE = 0.9, 1.1
LEAST_THROUGHPUT = 0.7

CROWDS = (8, 50, 200)
HELD_FOR = 0.0015


# Without fairness or keep=True a file that is replaced all the time is what is measured here.
logging.getLogger("holdfast").setLevel(logging.ERROR)


def contend(lock: holdfast.Lock, seconds: float) -> dict[str, Any]:
    counter = memoryview(mmap.mmap(-1, 8)).cast("q")
    end = time.monotonic() + seconds

    def work(_: int) -> int:
        acquired = 0
        while time.monotonic() < end:
            with lock:
                seen = counter[0]
                acquired += 1
                counter[0] = seen + 1
        return acquired

    counts = run_children(PROCESSES, work)
    total = sum(counts)
    return {
        "per_second": total / seconds,
        "lost": total - counter[0],
        "shares": sorted(count * PROCESSES / total for count in counts),
    }


def section(quick: bool, places: list[Place]) -> list[Table]:
    seconds, repeats = (0.5, 1) if quick else (1.5, 3)
    kinds = list(product(places, (False, True), (None, 30), (True, False)))
    runs: dict[Any, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            place, keep, timeout, fair = kind
            lock = holdfast.Lock(f"{place.directory}/contended.lock", keep=keep, timeout=timeout, fair=fair)
            runs[kind].append(contend(lock, seconds))
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
    seconds, repeats = (1.0, 1) if quick else (3.0, 3)
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
            if number > CROWDS[0]:
                row.at_most(number / CROWDS[0])
            rows.append(row)
    return Table(f"CPU time per hand-off, fair=True, {place.kind}; the ratio is to {CROWDS[0]} waiters", rows)
