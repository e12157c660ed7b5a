"""Where the time of a durable append goes: in the disk, in other system calls, and in Python.

    python bench/events_profile.py [--dir DIRECTORY]

Three programs append the same events: one thread, sixteen threads, and sixteen threads on one processor. For each, the
time of an append is split. `disk` and `system calls` are measured around the calls. `Python` is the rest of the time in
which a thread ran or waited for the interpreter lock. A thread needs that lock for all of it, and for each system call
it gives the lock up and gets it back.

Before that, one thread appends in memory, where the disk takes no time, and the CPU time of an append is divided among
its parts. The shares come from the profiler, the whole from a run without it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import tempfile
import time
from collections.abc import Callable
from statistics import median
from threading import Thread, local
from typing import Any

from events_contest import event, line_of, raw_appender

from holdfast import system
from holdfast.events import AppendCondition, EventStore, Query

CALLS = ("access", "stat", "lock", "pread", "pwrite", "is_removed", "touch")
DISK = ("fdatasync", "fsync")
THREADS = 16


class Clock(local):
    """What one thread spent in calls."""

    disk = calls = 0.0
    syncs = count = 0


class Meter:
    """Counts and times calls of the system, by replacing the functions."""

    def __init__(self) -> None:
        self.totals: list[Clock] = []
        self._clock = Clock()
        for name in (*CALLS, *DISK):
            setattr(system, name, self._timed(getattr(system, name), name in DISK))

    def _timed(self, real: Callable[..., Any], is_disk: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **options)
            finally:
                taken, clock = time.perf_counter() - began, self._clock
                if is_disk:
                    clock.disk, clock.syncs = clock.disk + taken, clock.syncs + 1
                else:
                    clock.calls, clock.count = clock.calls + taken, clock.count + 1

        return call

    def take(self) -> tuple[float, float, int, int]:
        clock = self._clock
        found = clock.disk, clock.calls, clock.syncs, clock.count
        clock.disk = clock.calls = 0.0
        clock.syncs = clock.count = 0
        return found


def run(store: EventStore, meter: Meter | None, threads: int, each: int) -> dict[str, float]:
    """Microseconds per append."""
    taken: list[tuple[float, float, int, int]] = []

    def work() -> None:
        if meter is not None:
            meter.take()
        for number in range(each):
            store.append(event(number))
        if meter is not None:
            taken.append(meter.take())

    running = [Thread(target=work) for _ in range(threads)]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    many = threads * each
    found = {
        "wall": wall,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "disk": sum(one[0] for one in taken),
        "calls": sum(one[1] for one in taken),
    }
    found = {name: value / many * 1e6 for name, value in found.items()}
    found["syncs"] = sum(one[2] for one in taken) / many
    found["switches"] = (after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw) / many
    return found


PARTS = {
    "build the event, and check that its JSON can be read again": ("store.py", "_request"),
    "the condition, before the lock": ("log/engine.py", "_look_ahead"),
    "acquire the lock of the store": ("log/store_lock.py", "take"),
    "find the end of the log": ("log/commit.py", "_find_end"),
    "conditions with the lock, and the lines": ("log/commit.py", "_decide"),
    "write, and note it in the ledger and in memory": ("log/commit.py", "_write_texts"),
    "release the lock": ("log/commit.py", "_release"),
    "the turn to sync, the sync, wake the readers": ("log/disk.py", "sync"),
}


def parts(name: str, append: Callable[[int], object], many: int = 4000) -> None:
    """Print the CPU time of an append, and of its parts."""
    for number in range(many):
        append(number)
    best = float("inf")
    for _ in range(10):
        began = time.thread_time()
        for number in range(many // 4):
            append(number)
        best = min(best, (time.thread_time() - began) / (many // 4) * 1e6)
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for number in range(many):
        append(number)
    profile.disable()
    stats: Any = pstats.Stats(profile)
    rest, scale = best, best / stats.total_tt
    print(f"{name}: {best:.1f} µs of CPU time for each append, without a disk")
    for part, (file, function) in PARTS.items():
        taken = sum(
            row[3] for key, row in stats.stats.items() if key[0].endswith(f"events/{file}") and key[2] == function
        )
        rest -= taken * scale
        print(f"  {taken * scale:6.1f} µs  {part}")
    print(f"  {rest:6.1f} µs  the rest: the queue of the threads of the process, and calls between the layers")


def unconditional_and_conditional() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as room:
        store = EventStore(f"{room}/one")
        parts("an append", lambda n: store.append(event(n)))

        def conditional(number: int) -> None:
            query = Query.of(types={"OrderPlaced"}, tags={f"new:{number}"})
            store.append(event(number), AppendCondition(query))

        parts("a conditional append", conditional)


def raw(place: str, line: bytes) -> float:
    append = raw_appender(place, line)
    began = time.perf_counter()
    for number in range(300):
        append(number)
    return (time.perf_counter() - began) / 300 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=".")
    options = parser.parse_args()
    unconditional_and_conditional()
    all_processors = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(dir=options.dir) as room:
        line = line_of(room)
        cases = {
            "one thread": (1, 1500, all_processors),
            f"{THREADS} threads": (THREADS, 150, all_processors),
            f"{THREADS} threads, one processor": (THREADS, 150, {min(all_processors)}),
        }
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for is_metered in (False, True):
            meter = Meter() if is_metered else None
            for turn in range(6):
                for name, (threads, each, processors) in cases.items():
                    os.sched_setaffinity(0, all_processors)
                    floor = raw(room, line)
                    os.sched_setaffinity(0, processors)
                    found = run(EventStore(f"{room}/{name}{turn}{is_metered}"), meter, threads, each)
                    samples[name].append({**found, "floor": floor, "metered": is_metered})
        os.sched_setaffinity(0, all_processors)
    for name, found in samples.items():
        plain, metered = ([one for one in found if one["metered"] is flag] for flag in (False, True))
        print(f"{name}: {median(one['floor'] / one['wall'] for one in plain):.2f} x raw")
        for key in ("floor", "wall", "user", "system", "switches"):
            print(f"  {key:10} {median(one[key] for one in plain):8.1f}")
        for key in ("disk", "calls", "syncs"):
            print(f"  {key:10} {median(one[key] for one in metered):8.2f}   (metered)")


if __name__ == "__main__":
    main()
