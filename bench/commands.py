"""What the `holdfast` command costs from start to end, beside an interpreter that imports argparse and subprocess.

The same as `hyperfine --shell=none`, with the contestants taking turns. With compiled files in place, as for `import`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measure import Row, Table, paired_ratio

FLOOR = 'python -c "import argparse, subprocess"'
TARGET = 1.5


def contestants(room: str) -> dict[str, list[str]]:
    python, script = sys.executable, Path(sys.executable).with_name("holdfast")
    command = [str(script)] if script.exists() else [python, "-m", "holdfast"]
    found = {
        FLOOR: [python, "-c", "import argparse, subprocess"],
        "holdfast run x -- true": [*command, "run", f"{room}/x", "--", "true"],
        "holdfast lockfile try y": [*command, "lockfile", "try", f"{room}/y"],
        "holdfast status y, held": [*command, "status", f"{room}/y"],
        "holdfast lockfile release y": [*command, "lockfile", "release", f"{room}/y"],
        "holdfast lockfile acquire y": [*command, "lockfile", "acquire", f"{room}/y"],
        "holdfast lockfile release y, again": [*command, "lockfile", "release", f"{room}/y"],
        "holdfast status y, free": [*command, "status", f"{room}/y"],
    }
    if shutil.which("flock"):
        found["flock x true"] = ["flock", f"{room}/z", "true"]
    return found


def once(words: list[str], environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(words, check=False, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def section(quick: bool) -> list[Table]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as room:
        commands = contestants(room)
        samples: dict[str, list[float]] = {name: [] for name in commands}
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{room}/compiled"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(2):
            for words in commands.values():
                once(words, environment)
        for _ in range(25 if quick else 60):
            for name, words in commands.items():
                samples[name].append(once(words, environment))
    rows = []
    for name, times in samples.items():
        row = Row(name, median(times) * 1e3, "ms", paired_ratio(times, samples[FLOOR]), raw=times)
        if name.startswith("holdfast"):
            row.at_most(TARGET)
        rows.append(row)
    return [Table("Command: wall time from start to end", rows)]
