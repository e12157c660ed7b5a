"""This checkout beside another one, in one run: uncontended acquires, hand-offs, and waits beside a loop of flock.

`python bench/run.py --beside CHECKOUT`. Both sides take turns, so that what slows the machine down slows both.
`beside.py` is also the program that hands over: `beside.py HOW WHAT PATH`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from measure import Place, Row, Table, paired_ratio, python_loop, take_turns

HERE = Path(__file__).parent
LIMIT = 1.05
# Seconds. The waiters of one checkout may become quiet later than those of the other, and code that was not run for
# longer is slower: it has left the caches. So both sides hold the lock equally long.
HELD_FOR = 0.2

UNCONTENDED = {
    "with Lock": "lock = Lock(path)",
    "with Lock, keep=True": "lock = Lock(path, keep=True)",
    "with Lock, shared=True": "lock = Lock(path, shared=True)",
    "with Semaphore of 2": "lock = Semaphore(path, 2)",
    "with LockFile, durable=False": "lock = LockFile(path, durable=False)",
    "with LockFile, durable=True": "lock = LockFile(path)",
}
HANDED_OVER = [
    (how, what)
    for what in ("ephemeral, fair=True", "keep=True, fair=False", "LockFile")
    for how in ("blocking", "timeout=10", "asyncio")
]


def section(quick: bool, places: list[Place], other: str) -> Iterator[Table]:
    sources = {"this checkout": str(HERE.parent / "src"), "the other": str(Path(other).resolve() / "src")}
    for place in places:
        yield _uncontended(quick, place, sources)
    yield _handoff(quick, places[0], sources)


def _row(name: str, new: list[float], old: list[float], ratio: float) -> Row:
    row = Row(name, median(new) * 1e6, "µs", ratio, raw=[new, old])
    row.note = f"the other {median(old) * 1e6:.1f} µs"
    row.at_most(LIMIT)
    return row


def _uncontended(quick: bool, place: Place, sources: dict[str, str]) -> Table:
    names = "from holdfast import Lock, LockFile, Semaphore"
    rows = []
    for i, (name, make) in enumerate(UNCONTENDED.items()):
        path = f"path = {place.directory!r} + '/{i}.lock'"
        commands = {
            side: python_loop(f"sys.path.insert(0, {source!r}); {names}; {path}; {make}", "with lock: pass")
            for side, source in sources.items()
        }
        samples = take_turns(commands, rounds=30 if quick else 100, repeats=3 if quick else 5)
        new, old = samples.values()
        rows.append(_row(name, new, old, paired_ratio(new, old)))
    return Table(f"Uncontended, beside another checkout, {place.kind}", rows)


def _handoff(quick: bool, place: Place, sources: dict[str, str]) -> Table:
    rows = []
    for i, (how, what) in enumerate(HANDED_OVER):
        samples: dict[str, list[float]] = {side: [] for side in sources}
        for _ in range(8 if quick else 16):  # new processes each time: which cores they get matters most
            with ExitStack() as stack:
                sides = {
                    side: stack.enter_context(_Side(source, how, what, f"{place.directory}/{i}-{j}.lock"))
                    for j, (side, source) in enumerate(sources.items())
                }
                for _ in range(5 if quick else 10):
                    for side, pair in sides.items():
                        samples[side].append(pair.once())
        new, old = samples.values()
        rows.append(_row(f"{what}, {how}", new, old, median(new) / median(old)))
    return Table(f"Hand-off, beside another checkout, {place.kind}", rows)


class _Side:
    """A process that runs this file with the source of one checkout."""

    def __init__(self, source: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{source}:{HERE}"}
        command = [sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> _Side:
        self.once()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def once(self) -> float:
        """One hand-off, in seconds."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def main(how: str, what: str, path: str) -> None:
    import handoff

    with handoff.Pair(how, what, path, HELD_FOR) as pair:
        for _ in sys.stdin:
            print(pair.once(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
