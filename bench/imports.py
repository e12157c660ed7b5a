"""What `import holdfast` costs beside the modules that any such package needs.

With compiled files in place, as after an installation; they are kept in a directory of their own, so that an
environment that forbids writing them (PYTHONDONTWRITEBYTECODE) makes no difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from statistics import median

from measure import Row, Table, paired_ratio

FLOOR = "import os, fcntl, threading"
STATEMENTS = ("pass", FLOOR, "import holdfast", "import filelock")
TARGET = 1.6


def once(statement: str, environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
    return time.perf_counter() - begin


def wall_times(statements: Iterable[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of an interpreter that runs each statement, all of them in turn."""
    samples: dict[str, list[float]] = {statement: [] for statement in statements}
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for statement in samples:
            once(statement, environment)
        for _ in range(rounds):
            for statement, times in samples.items():
                times.append(once(statement, environment))
    return samples


def section(quick: bool) -> list[Table]:
    samples = wall_times(STATEMENTS, 40 if quick else 80)
    rows = []
    for statement, times in samples.items():
        ratio = paired_ratio(times, samples[FLOOR])
        row = Row(f'python -c "{statement}"', median(times) * 1e3, "ms", ratio, raw=times)
        if statement == "import holdfast":
            row.at_most(TARGET)
        rows.append(row)
    return [Table("Import: wall time of a whole interpreter", rows)]
