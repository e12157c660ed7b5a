"""This checkout beside another one, in one run: uncontended acquires, hand-offs, and waits beside a loop of flock.

`python bench/run.py --beside CHECKOUT`. Both sides take turns, so that what slows the machine down slows both.
`beside.py` is also the program that hands over: `beside.py HOW WHAT PATH ROUNDS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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
    for how, what in HANDED_OVER:
        # One path for each kind: a kept file is a damaged lock file, which `LockFile` waits for.
        path = f"{place.directory}/{HANDED_OVER.index((how, what))}.lock"
        samples: dict[str, list[float]] = {side: [] for side in sources}
        for _ in range(3 if quick else 6):
            for side, source in sources.items():
                samples[side] += _hand_over(source, how, what, path, 12 if quick else 25)
        new, old = samples.values()
        rows.append(_row(f"{what}, {how}", new, old, median(new) / median(old)))
    return Table(f"Hand-off, beside another checkout, {place.kind}", rows)


def _hand_over(source: str, how: str, what: str, path: str, rounds: int) -> list[float]:
    command = [sys.executable, __file__, how, what, path, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": f"{source}:{HERE}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def main(how: str, what: str, path: str, rounds: str) -> None:
    import handoff

    with handoff.Pair(how, what, path, HELD_FOR) as pair:
        pair.once()
        print(json.dumps([pair.once() for _ in range(int(rounds))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
