"""Waiting for a lock that another program takes in a tight loop, without ever closing the file.

Only a blocking flock stands in the kernel's queue, so that is the floor. Waiters with a timeout and tasks must not need
more than four times as long, or than four times a blocking `Lock`: where the lock is free at most moments, or held for
some microseconds only, the time is mostly that of Python itself.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from measure import Contestant, Place, Row, Table, python_loop

LIMIT = 4.0
FLOOR = "C, blocking flock"
BLOCKING = "Lock, no timeout"
_SETUP = "from holdfast import Lock; lock = Lock(path, keep=True, timeout=10)"
_ASYNC = "import asyncio; run = asyncio.new_event_loop().run_until_complete"


class Waiter(Contestant):
    loops = 1

    def calibrate(self) -> None:
        self.run()


def section(quick: bool, place: Place) -> Iterator[Table]:
    compiler = shutil.which("cc")
    if compiler is None:
        print("no C compiler (cc): the figures beside a loop of flock are left out")
        return
    program = f"{place.directory}/flock_loop"
    subprocess.run([compiler, "-O2", "-o", program, Path(__file__).with_suffix(".c")], check=True)
    for held in (20, 200, 1000):
        for gap in (10, 150):
            yield _beside(program, held, gap, 40 if quick else 150, place)


def _beside(program: str, held: int, gap: int, rounds: int, place: Place) -> Table:
    path = f"{place.directory}/{held}-{gap}.lock"
    commands = {
        FLOOR: [program, path, "wait"],
        BLOCKING: python_loop(f"path = {path!r}; {_SETUP}", "lock.acquire(None).release()"),
        "Lock, timeout=10": python_loop(f"path = {path!r}; {_SETUP}", "lock.acquire().release()"),
        "Lock, asyncio": python_loop(f"path = {path!r}; {_SETUP}; {_ASYNC}", "run(lock.aacquire()).release()"),
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    looping = subprocess.Popen([program, path, "loop", str(held), str(gap)], stdout=subprocess.PIPE)
    try:
        assert looping.stdout is not None and looping.stdout.readline()
        with ExitStack() as stack:
            running = {name: stack.enter_context(Waiter(command)) for name, command in commands.items()}
            for waiter in running.values():
                waiter.run()
            for _ in range(rounds):
                for name, waiter in running.items():
                    time.sleep(random.uniform(0, 0.003))
                    samples[name].append(waiter.run())
    finally:
        looping.kill()
        looping.wait()
    floor = median(samples[FLOOR])
    rows = []
    for name, times in samples.items():
        row = Row(name, median(times) * 1e6, "µs", median(times) / floor, raw=times)
        row.note = f"slowest {max(times) * 1e3:.1f} ms"
        if name not in (FLOOR, BLOCKING):
            allowed = LIMIT * max(floor, median(samples[BLOCKING]))
            row.check(f"<= {LIMIT:g} x that of a blocking wait", median(times) <= allowed)
        rows.append(row)
    return Table(f"Beside a loop of flock that holds for {held} µs, with gaps of {gap} µs, {place.kind}", rows)
