"""The events that the benchmarks of the event store append, and contestants that take turns in one process."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measure import Row, paired_ratio

from holdfast.events import Event, EventStore


def event(number: int) -> Event:
    return Event("OrderPlaced", {"id": number, "total": 19.9}, tags={f"order:{number}", f"customer:{number % 1000}"})


def line_of(place: str) -> bytes:
    """As many bytes as one event takes."""
    with tempfile.TemporaryDirectory(dir=place) as room:
        EventStore(room).append(event(123_456))
        return Path(room, "events/0000000001.jsonl").read_bytes().split(b"\n")[0] + b"\n"


class Contest:
    """Contestants that take turns, each for `loops` loops, in one process."""

    def __init__(self, loops: int) -> None:
        self._loops = loops
        self._steps: dict[str, Callable[[int], object]] = {}
        self._count = 0
        self.samples: dict[str, list[float]] = {}

    def add(self, name: str, step: Callable[[int], object]) -> None:
        self._steps[name] = step
        self.samples[name] = []

    def run(self, rounds: int) -> None:
        for turn in range(rounds + 1):
            for name, step in self._steps.items():
                self._count += self._loops
                began = time.perf_counter()
                for number in range(self._count, self._count + self._loops):
                    step(number)
                if turn:  # the first one warms up
                    self.samples[name].append((time.perf_counter() - began) / self._loops)

    def row(self, name: str, floor: str) -> Row:
        """Its speed: how many times as many per second as the floor."""
        times = self.samples[name]
        return Row(name, median(times) * 1e6, "µs", paired_ratio(self.samples[floor], times), raw=times)


def rate(append: Callable[[str], object], seconds: float, child: int = 0) -> float:
    """Appends a second by one process. The names of the events differ between children."""
    append(f"{child}.warm")
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        append(f"{child}.{count}")
        count += 1
    return count / (time.perf_counter() - began)


def at_least(row: Row, limit: float) -> Row:
    assert row.ratio is not None
    row.check(f">= {limit:g} x", row.ratio >= limit)
    return row


def raw_appender(place: str, line: bytes) -> Callable[[int], object]:
    fd = os.open(f"{place}/raw", os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def append(_: int) -> None:
        os.write(fd, line)
        os.fdatasync(fd)

    return append
