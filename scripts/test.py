"""Run the tests, as many pytest processes at a time as there are processors, each with its own share of the files.

    python scripts/test.py [options of pytest]

Most tests wait for other processes, so two shares take little more than half the time of one run. Each share prints its
output when it has ended. The exit code is that of the first share that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
MAX_SHARES = 4
# Seconds, of the files that take longest; the others take about 5. Only the balance depends on these figures.
SECONDS = {
    "test_lock_file_races": 155,
    "test_lock_file_interleavings": 150,
    "test_exclusion": 107,
    "test_rule_ten_interleavings": 60,
    "test_interrupt_anywhere": 60,
    "test_atomic_dir": 43,
    "test_tasks_worker": 41,
    "test_interleavings": 38,
    "test_lock_faults": 30,
}


def shares(number: int) -> list[list[str]]:
    """The files, the longest first, each to the share with the least to do so far."""
    found: list[tuple[int, list[str]]] = [(0, []) for _ in range(number)]
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.parent.name != "windows"]
    for file in sorted(files, key=lambda file: -SECONDS.get(file.stem, 5)):
        seconds, share = min(found, key=lambda one: one[0])
        found.remove((seconds, share))
        found.append((seconds + SECONDS.get(file.stem, 5), [*share, str(file)]))
    return [share for _, share in found if share]


def main(options: list[str]) -> int:
    number = max(1, min(os.cpu_count() or 1, MAX_SHARES))
    running = []
    for files in shares(number):
        output = tempfile.TemporaryFile()  # noqa: SIM115
        cache = f"cache_dir=.pytest_cache/{len(running) + 1}"
        command = [sys.executable, "-m", "pytest", "-o", cache, *options, *files]
        running.append((subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output), output))
    print(f"Running the tests in {len(running)} processes. Each prints its output when it has ended.", flush=True)
    codes = []
    try:
        while running:
            for one in [one for one in running if one[0].poll() is not None]:
                running.remove(one)
                show(one[1])
                codes.append(one[0].returncode)
            time.sleep(0.1)
    finally:  # an interrupt
        for process, output in running:
            process.terminate()
            process.wait()
            show(output)
    return next((code for code in codes if code), 0)


def show(output: BinaryIO) -> None:
    output.seek(0)
    sys.stdout.buffer.write(output.read())
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
