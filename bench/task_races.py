"""Two processes claim and complete the tasks of one queue until none is left, for each queue of `task_queues`."""

from __future__ import annotations

import mmap
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

from measure import run_children
from task_queues import OURS, WORKER, Ours, available

from holdfast.tasks import Claim, TaskQueue, Worker

PROCESSES = 2
WARM_UP = 10  # tasks of every process before the measurement

clock = time.monotonic


@dataclass
class Samples:
    """The figures of one queue, one for every round."""

    put: list[float] = field(default_factory=list)  # seconds for a task
    done: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # the smaller share of the tasks
    cpu: list[float] = field(default_factory=list)  # the share of the CPU time of the process with the smaller share
    counts: list[int] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)  # the smaller share of two independent loops


def share_of_loops(seconds: float = 0.03) -> float:
    """The smaller share of two processes that only count, at the same time: how evenly this machine treats them."""
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
    """Put tasks. Return the seconds for one."""
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
    """Return the seconds for a task, how many tasks each process has done, and the CPU time of each."""
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
                raise RuntimeError(f"{number - sum(done)} of {number} tasks are not found")

    results = run_children(processes, work, limit=120)
    taken = max(end for _, end, _, _ in results) - min(begin for begin, _, _, _ in results)
    counts = [count for _, _, count, _ in results]
    return taken / sum(counts), counts, [cpu for _, _, _, cpu in results]


def race_of_worker(path: str, durable: bool) -> tuple[float, list[int], list[float]]:
    """The same with a `Worker`. Its processes start at one moment, too, each in the handler of its tenth task."""
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
    kinds = available(kinds, directory, durable)
    order = [*kinds.items(), (WORKER, Ours)]
    samples = {name: Samples() for name, _ in order}
    for turn in range((3 if quick else 11) + 1):
        for name, kind in random.sample(order, len(order)):  # so that none always follows the same one
            path = f"{directory}/{durable}-{turn}-{name}"
            put = fill(kind, path, durable, number)
            done, counts, cpu = race_of_worker(path, durable) if name == WORKER else race(kind, path, durable, number)
            if turn:  # the first round warms up
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
