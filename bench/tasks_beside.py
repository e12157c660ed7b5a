"""Task queues of this checkout beside another one, in one run: `python bench/run.py --beside CHECKOUT --only tasks`.

Both sides take turns, each round in new processes. `tasks_beside.py PATH NUMBER` is also the program of one side: it
puts empty tasks, two processes claim and complete them, and it prints the seconds for a put and for a task.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from measure import Place, Row, Table, paired_ratio

HERE = Path(__file__).parent
NUMBER = 2000
HALF_THE_RATE = 2.0  # times as long for a task


def section(quick: bool, places: list[Place], other: str) -> Iterator[Table]:
    sources = {"this": str(HERE.parent / "src"), "other": str(Path(other).resolve() / "src")}
    for place in places:
        yield _table(quick, place, sources)


def _table(quick: bool, place: Place, sources: dict[str, str]) -> Table:
    samples: dict[str, list[tuple[float, float]]] = {side: [] for side in sources}
    for turn in range((5 if quick else 15) + 1):
        for side, source in sources.items():
            found = _run(source, f"{place.directory}/tasks-{side}-{turn}")
            if turn:  # the first round warms up
                samples[side].append(found)
    rows = []
    for number, name in enumerate(("put, one process", "claim + complete, two processes")):
        new, old = ([found[number] for found in samples[side]] for side in sources)
        row = Row(name, median(new) * 1e6, "µs", paired_ratio(new, old), raw=[new, old])
        row.note = f"the other {median(old) * 1e6:.1f} µs"
        if number == 1:
            row.at_most(HALF_THE_RATE)
        rows.append(row)
    return Table(f"{NUMBER:,} empty tasks, not durable, beside another checkout, {place.kind}", rows)


def _run(source: str, path: str) -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPATH": f"{source}:{HERE}"}
    command = [sys.executable, __file__, path, str(NUMBER)]
    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    put, done = json.loads(text)
    return put, done


def main(path: str, number: int) -> None:
    from task_queues import Ours
    from task_races import fill, race

    put = fill(Ours, path, False, number)
    done, counts, _ = race(Ours, path, False, number)
    assert sum(counts) == number, counts
    print(json.dumps([put, done]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
