"""What the sections share: rows of a table, contestants that take turns, and children that start together.

A contestant is a process of its own that loops when told to, so that nobody pays for what another one imported. All of
them take turns in short rounds, floor included. Round i of one is divided by round i of the floor, and the median of
these ratios counts: whatever slows the machine down for a while slows down both.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from machine import file_system

PREFIX = "bench-"  # of the directories that are made, then the process id
JOURNALLED = "ext4"  # in such a directory: a loop device, see events.py
SHM = "/dev/shm"
REMOVAL_S = 10.0
ROUND_SECONDS = 0.02  # shorter ones measure how a contestant wakes up


@dataclass
class Row:
    name: str
    value: float | None = None
    unit: str = "µs"
    ratio: float | None = None
    checks: list[tuple[str, bool]] = field(default_factory=list)
    note: str = ""
    raw: Any = None
    # For the plots: the line that this point is on and where, or the whole line (quantiles, or shares).
    series: str = ""
    at: float | None = None
    curve: list[float] = field(default_factory=list)

    def check(self, target: str, ok: bool) -> None:
        self.checks.append((target, ok))

    def at_most(self, limit: float) -> None:
        """Judge the ratio."""
        assert self.ratio is not None
        self.check(f"<= {limit:g} x", self.ratio <= limit)

    def as_dict(self) -> dict[str, Any]:
        """With `raw`, which may be megabytes."""
        return {**self.__dict__, "checks": [{"target": text, "ok": ok} for text, ok in self.checks]}


@dataclass
class Table:
    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Place:
    """A directory to lock in, and the kind of file system it is on."""

    directory: str
    kind: str

    @classmethod
    @contextmanager
    def under(cls, parent: str) -> Iterator[Place]:
        made = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent)
        try:
            yield cls(made, file_system(made))
        finally:
            remove(made)


def remove(directory: str) -> None:
    """Remove it, although a thread of a store that is still open may add a file meanwhile."""
    deadline = time.monotonic() + REMOVAL_S
    while os.path.exists(directory) and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)
    if os.path.exists(directory):
        print(f"cannot remove {directory}")


def paired_ratio(samples: list[float], floor: list[float]) -> float:
    return median(a / b for a, b in zip(samples, floor, strict=True))


def curve_of(samples: list[float], points: int = 40) -> list[float]:
    """The quantiles of the samples, from the smallest to the largest."""
    ordered = sorted(samples)
    return [ordered[round(number / points * (len(ordered) - 1))] for number in range(points + 1)]


_LOOP = """
import sys
from itertools import repeat
from time import perf_counter as clock
def main():
    {setup}
    for line in sys.stdin:
        loops = repeat(None, int(line))
        begin = clock()
        for _ in loops:
            {statement}
        print(clock() - begin, flush=True)
main()
"""


def python_loop(setup: str, statement: str) -> list[str]:
    """The command of a contestant in Python. Both texts are one line; what `setup` names is a local variable."""
    return [sys.executable, "-c", _LOOP.format(setup=setup, statement=statement)]


class Contestant:
    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.loops = 1

    def run(self) -> float:
        """One round: seconds per loop."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{self.loops}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a contestant ended with code {self._process.wait()}: {self._process.args!r}")
        return float(answer) / self.loops

    def calibrate(self) -> None:
        self.run()
        self.loops = 20
        self.loops = max(1, int(ROUND_SECONDS / self.run()))

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def take_turns(commands: dict[str, list[str]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per loop of every contestant in every round. Each repeat begins with new processes."""
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        with ExitStack() as stack:
            running = {name: stack.enter_context(Contestant(command)) for name, command in commands.items()}
            for contestant in running.values():
                contestant.calibrate()
            for _ in range(rounds):
                for name, contestant in running.items():
                    samples[name].append(contestant.run())
    return samples


def run_children(
    number: int, work: Callable[[int], Any], meanwhile: Callable[[], None] | None = None, limit: float = 60.0
) -> list[Any]:
    """Fork, start all children at one moment, and give what `work(i)` returned in each, in no order.

    `meanwhile` runs in the parent after the start. Children that are not done after `limit` seconds are killed.
    """
    gate_read, gate_write = os.pipe()
    result_read, result_write = os.pipe()
    pids = []
    for i in range(number):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(gate_write)
                os.read(gate_read, 1)  # the end of the file is the signal to start
                os.write(result_write, json.dumps(work(i)).encode() + b"\n")  # short, so written in one piece
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(gate_read)
    os.close(result_write)
    os.close(gate_write)
    try:
        if meanwhile is not None:
            meanwhile()
        results = _read_lines(result_read, time.monotonic() + limit)
    finally:
        os.close(result_read)
        failed = _reap(pids)
    if failed or len(results) != number:
        raise RuntimeError(f"{number - len(results)} of {number} children gave no result, {failed} failed")
    return results


def _read_lines(fd: int, deadline: float) -> list[Any]:
    text = b""
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(fd, 65536)
        if not piece:
            break
        text += piece
    return [json.loads(line) for line in text.splitlines()]


def _reap(pids: list[int]) -> int:
    failed = 0
    for pid in pids:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            time.sleep(0.05)  # its result is read, so it is at its last line, or it hangs
            done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        failed += status != 0
    return failed
