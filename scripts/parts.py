"""Run parts of the tests, as many at a time as there are processors, the longest first: for `test.py` and `prove.py`.

Each part is a pytest process of its own. The parts are not the workers of pytest-xdist: such a worker has a second
thread, and the tests fork, which Python 3.12 warns about where there are threads. What the tests took is kept in
.pytest_cache/seconds.json, for the order of the next run and for the estimate of the time left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
MAX_JOBS = 4
JOBS = max(1, min(os.cpu_count() or 1, MAX_JOBS))
SECONDS = ROOT / ".pytest_cache" / "seconds.json"
BYTES_PER_SECOND = 2000  # of a file of tests that never ran here; a guess is enough for the order
NO_TESTS = 5  # exit code of pytest
_numbers = count()


@dataclass
class Case:
    """One test, as it went."""

    name: str
    seconds: float
    outcome: str  # "passed", "failed" or why it was skipped


@dataclass
class Part:
    """What one pytest process runs. `alone`: no other part runs at the same time."""

    name: str
    tests: list[str]
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    seconds: float = 0.0
    code: int = 0
    cases: list[Case] = field(default_factory=list)

    def start(self, report: str, output: BinaryIO) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
        # A directory of its own for temporary files: each pytest that starts makes the common one private again, while
        # tests of another part run as a user who has to get in.
        command.append(f"--basetemp={Path(report).with_suffix('')}")
        environment = {**os.environ, **self.environment}
        command += [*self.options, *self.tests]
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)

    @property
    def ok(self) -> bool:
        return self.code in (0, NO_TESTS)

    def summary(self) -> str:
        skipped = sum(case.outcome not in ("passed", "failed") for case in self.cases)
        failed = sum(case.outcome == "failed" for case in self.cases)
        words = [f"{len(self.cases) - skipped - failed} passed"]
        words += [f"{number} {word}" for number, word in ((failed, "FAILED"), (skipped, "skipped")) if number]
        return ", ".join(words) if self.ok or failed else f"FAILED with exit code {self.code}"


def files() -> list[Path]:
    return [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.parent.name != "windows"]


def guesses() -> dict[str, float]:
    """How many seconds each file, or test function, took the last time."""
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(SECONDS.read_text()).items()}
    except (OSError, ValueError):
        return {}


def guess(part: Part, known: dict[str, float]) -> float:
    return sum(
        known.get(test) or (ROOT / test.partition("::")[0]).stat().st_size / BYTES_PER_SECOND for test in part.tests
    )


def seconds_of(test: str, part: Part) -> float:
    """What the cases of a file, or test function, took together."""
    file, _, function = test.partition("::")
    dotted = file.removesuffix(".py").replace("/", ".")
    return sum(
        case.seconds
        for case in part.cases
        if case.name.startswith(dotted) and (not function or case.name.partition("::")[2].startswith(function))
    )


@dataclass
class Running:
    part: Part
    report: Path
    output: BinaryIO
    process: subprocess.Popen[bytes]
    since: float

    def end(self) -> None:
        self.part.code, self.part.seconds = self.process.returncode, time.monotonic() - self.since
        self.part.cases = read_report(self.report)


def run(parts: list[Part], passed: Callable[[Part], object] = lambda part: None) -> bool:
    """Run them, and print how each went, with the output of those that failed. False: at least one failed.

    passed: called with each part that has passed
    """
    known = guesses()
    left = sorted(parts, key=lambda part: (not part.alone, -guess(part, known)))
    running: list[Running] = []
    began = time.monotonic()
    done = 0
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as room:
        try:
            while left or running:
                while left and may_start(left[0], [other.part for other in running]):
                    running.append(begin(left.pop(0), Path(room)))
                for ended in [other for other in running if other.process.poll() is not None]:
                    running.remove(ended)
                    ended.end()
                    done += 1
                    ahead = sum(guess(part, known) for part in (*left, *(other.part for other in running))) / JOBS
                    progress = f"{done}/{len(parts)}, {clock(time.monotonic() - began)}, about {clock(ahead)} left"
                    print(f"[{progress}] {ended.part.name}: {ended.part.summary()} in {ended.part.seconds:.0f} s")
                    sys.stdout.flush()
                    if ended.part.ok:
                        passed(ended.part)
                    else:
                        show(ended.output)
                    ended.output.close()
                time.sleep(0.05)
        finally:  # an interrupt
            for other in running:
                other.process.terminate()
                other.process.wait()
                show(other.output)
                other.output.close()
    remember(parts, known)
    return all(part.ok for part in parts)


def may_start(part: Part, running: list[Part]) -> bool:
    alone = part.alone or any(other.alone for other in running)
    return not running if alone else len(running) < JOBS


def begin(part: Part, room: Path) -> Running:
    # A short name: the path of a socket has at most 107 bytes.
    report, output = room / f"{next(_numbers)}.xml", tempfile.TemporaryFile()  # noqa: SIM115
    return Running(part, report, output, part.start(str(report), output), time.monotonic())


def remember(parts: list[Part], known: dict[str, float]) -> None:
    found = {test: round(seconds_of(test, part), 1) for part in parts for test in part.tests}
    SECONDS.parent.mkdir(exist_ok=True)
    SECONDS.write_text(json.dumps(known | found))


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def read_report(report: Path) -> list[Case]:
    """What became of each test, from the XML that pytest writes."""
    if not report.exists():
        return []
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if failed else "passed" if skipped is None else skipped.get("message", "skipped")
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append(Case(name, float(case.get("time", 0)), outcome))
    return found


def show(output: BinaryIO) -> None:
    output.seek(0)
    print(output.read().decode(errors="replace"), flush=True)
