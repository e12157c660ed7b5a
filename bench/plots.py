"""The plots of docs/benchmarks.md, from its figures: docs/pictures/bench-NAME.svg."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from chart import Axis, Line, chart
from figures import Figures, tables_of

HANDOFF = {
    "raw flock": "blocking flock",
    "keep=True, fair=False, blocking": "Lock, fair=False",
    "ephemeral, fair=True, blocking": "Lock",
    "ephemeral, fair=True, timeout=10": "Lock, timeout=10",
    "ephemeral, fair=True, asyncio": "Lock, asyncio",
    "LockFile, blocking": "LockFile",
    "filelock": "filelock",
}
SIZES = {
    "append, durable=False": "append an event",
    "append under a condition": "append, with a condition",
    "read the 10 events of a tag": "read 10 events by tag",
    "open, and read the last event": "open a store, read 1 event",
    "claim + complete, steady": "claim + complete a task",
    "standing": "CPU time of a hand-off",
}
SHARES_OF = 8
_PROCESSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


def _series(figures: Figures, section: str, name: str = "") -> dict[str, list[tuple[float, float]]]:
    """The lines of a section, by their names."""
    found: dict[str, list[tuple[float, float]]] = {}
    for table in tables_of(figures, section)[:1]:
        for row in table["rows"]:
            if "series" in row and name in row["series"]:
                found.setdefault(row["series"], []).append((row["at"], row["value"]))
    return {series: sorted(points) for series, points in found.items()}


def _lines(found: dict[str, list[tuple[float, float]]], names: dict[str, str] | None = None) -> list[Line]:
    return [Line((names or {}).get(name, name), points) for name, points in found.items()]


def handoff(figures: Figures) -> str:
    rows = {row["name"]: row for table in tables_of(figures, "handoff")[:1] for row in table["rows"]}
    lines = []
    for name, label in HANDOFF.items():
        if name in rows:
            curve = rows[name]["curve"]
            points = [(value, 100 * at / (len(curve) - 1)) for at, value in enumerate(curve)]
            lines.append(Line(label, points, dots=False))
    title = "From a release to the acquisition by a process that waits"
    across = Axis("microseconds", log=True)
    return chart(title, lines, across, Axis("% of the hand-offs took at most so long", low=0, high=100))


def shares(figures: Figures) -> str:
    rows = [row for table in tables_of(figures, "throughput")[:1] for row in table["rows"] if row["at"] == SHARES_OF]
    lines = []
    for row in rows:
        lines.append(Line(row["series"], [(at + 1.0, share) for at, share in enumerate(row["curve"])]))
    most = max(1.5, *(value for line in lines for _, value in line.points)) if lines else 1.5
    title = f"Share of each of {SHARES_OF} processes that want the same lock"
    across = Axis("process, by its share", marks=tuple(float(at) for at in range(1, SHARES_OF + 1)))
    return chart(title, lines, across, Axis("1 is an equal share", low=0, high=most))


def throughput(figures: Figures) -> str:
    across = Axis("processes; all but one wait", log=True, low=1, high=128, marks=_PROCESSES)
    lines = _lines(_series(figures, "throughput"))
    return chart(
        "Throughput of a lock that many processes want", lines, across, Axis("acquisitions a second", log=True)
    )


def writers(figures: Figures) -> str:
    found = _series(figures, "events-writers")
    raw = next(row["value"] for row in tables_of(figures, "events-writers")[0]["rows"] if "series" not in row)
    numbers = [number for points in found.values() for number, _ in points]
    lines = [*_lines(found), Line("write + fdatasync, 1 alone", [(min(numbers), raw), (max(numbers), raw)], dots=False)]
    across = Axis("writers: processes that append", log=True, low=1, high=16, marks=_PROCESSES[:5])
    return chart("Durable appends of several writers", lines, across, Axis("appends a second", low=0))


def sizes(figures: Figures) -> str:
    lines = _lines(_series(figures, "events-sizes"), SIZES)
    lines += _lines(_series(figures, "tasks-many", "claim + complete, steady"), SIZES)
    lines += _lines(_series(figures, "waiters", "standing"), SIZES)
    across = Axis("events in the store, tasks in the queue, or processes that wait for the lock", log=True)
    title = "Cost by the size of the store and the length of the queue"
    return chart(title, lines, across, Axis("microseconds", log=True))


# The plot, its alternative text, and the sections that it is drawn from.
PLOTS: dict[str, tuple[Callable[[Figures], str], str, tuple[str, ...]]] = {
    "handoff": (handoff, "How long hand-offs take, as a distribution", ("handoff",)),
    "throughput": (throughput, "Acquisitions a second against the number of processes", ("throughput",)),
    "shares": (shares, "The share of each process", ("throughput",)),
    "writers": (writers, "Appends a second against the number of writers", ("events-writers",)),
    "sizes": (
        sizes,
        "Cost against the size of the store and the length of the queue",
        ("events-sizes", "tasks-many", "waiters"),
    ),
}


def drawn(figures: Figures) -> Iterator[tuple[str, str]]:
    """The name and the text of each plot for which there are figures."""
    for name, (draw, _, sections) in PLOTS.items():
        if all(tables_of(figures, section) for section in sections):
            yield name, draw(figures)


def file_of(name: str, pictures: Path) -> Path:
    return pictures / f"bench-{name}.svg"
