"""Run the long proofs and write docs/proof.md: python scripts/prove.py [part of a promise or of a test's name]

The proofs are the tests that are marked `slow`, with those under wine and on network file systems, and all other tests
with the package as under `python -O`. With an argument, only proofs that match run, and docs/proof.md stays as it is.
It stays as it is also if a proof fails. The next time, only proofs that have not passed on the same sources run.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parts import JOBS, ROOT, Case, Part, clock, files, run

PAGE = ROOT / "docs" / "proof.md"
HEADING = "## What `make prove` went through"  # from here on the page is written anew
PASSED = ROOT / ".pytest_cache" / "proved.json"
EXPLORED = "HOLDFAST_EXPLORED"
OPTIMISED = "The package keeps its promises under `python -O`"

# By the beginning of a test's name, the first that fits. The name of a test has its file before it.
PROMISES = {
    "locks/test_explorer_reduction": "The search leaves out nothing",
    "locks/test_interleavings": "A lock never has two holders, wakes its waiters and leaves no file",
    "locks/test_exclusion": "A lock never has two holders, wakes its waiters and leaves no file",
    "locks/test_state_machine": "Locks do what a model of them does",
    "locks/test_crash_points": "A killed process blocks no lock and leaves no file",
    "locks/test_conformance": "Locks on servers keep the promises of local ones",
    "locks/test_server_faults": "Locks on servers keep the promises of local ones",
    "cli/test_cli_servers": "Locks on servers keep the promises of local ones",
    "locks/test_rule_ten": "Two kinds of lock on one path never have a holder each",
    "locks/test_lock_file": "A lock file never has two holders; a holder whose lock was removed gets `LockLost`",
    "atomicdir/": "A directory is replaced as a whole or not at all",
    "events/": "An event that was appended is read by all, once and in order",
    "tasks/": "A task is done, whoever is killed",
    "cli/": "The command line completes in the shells",
    "test_windows": "The promises hold on Windows (under wine)",
    "test_network": "The promises hold on network file systems, or the lock refuses",
    "": "Other promises",
}
UNITS = {
    "schedules": "schedules, every one within the bound",
    "cut": "more cut short, which cannot differ",
    "random_schedules": "random schedules",
    "kills": "kills",
    "calls": "system calls",
    "acquisitions": "acquisitions",
    "rounds": "rounds",
}


def slow_tests() -> list[str]:
    """The test functions that are marked slow, as pytest names them."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "slow", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    cases = [line for line in done.stdout.splitlines() if "::" in line]
    return list(dict.fromkeys(case.partition("[")[0] for case in cases))


def promise_of(test: str) -> str:
    name = test.removeprefix("tests/")
    return next(promise for start, promise in PROMISES.items() if name.startswith(start))


def proofs(explored: str) -> list[Part]:
    """The network file systems are one part, which runs alone: their tests share a virtual machine."""
    environment = {EXPLORED: explored}
    tests = slow_tests()
    network = [test for test in tests if "test_network" in test]
    found = [Part(test, [test], ["-m", "slow"], environment) for test in tests if test not in network]
    if network:
        file = network[0].partition("::")[0]
        found.append(Part(file, [file], ["-m", "slow"], environment, alone=True))
    optimised = {**environment, "PYTHONPATH": str(ROOT / "tests")}
    names = [str(file.relative_to(ROOT)) for file in files()]
    for at in range(0, len(names), 6):
        some = names[at : at + 6]
        found.append(Part(f"python -O: {some[0]} …", some, ["-m", "not slow", "-p", "optimised"], optimised))
    return found


def numbers(explored: Path) -> dict[str, Counter[str]]:
    """What was gone through, by test function."""
    found: dict[str, Counter[str]] = {}
    if explored.exists():
        for line in explored.read_text().splitlines():
            entry = json.loads(line)
            test = entry.pop("test").partition("[")[0]
            found.setdefault(test, Counter()).update(entry)
    return found


def sources(part: Part) -> str:
    """A hash of all that a part runs: the package, the tests without those of other files, and these scripts."""
    own = {test.partition("::")[0] for test in part.tests}
    found = hashlib.sha256()
    for folder in ("src", "tests", "scripts"):
        for file in sorted(path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc" and path.is_file()):
            name = str(file.relative_to(ROOT))
            if name in own or not file.name.startswith("test_") or file.parent.name == "windows":
                found.update(f"{name}\0".encode() + file.read_bytes())
    return found.hexdigest()


class Passed:
    """The proofs that have passed, by name, and on which sources."""

    def __init__(self, file: Path, explored: Path) -> None:
        self._file = file
        self._explored = explored
        self._known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def take(self, part: Part) -> bool:
        """Give the part the result of an earlier run. False: it has not passed on these sources."""
        found = self._known.get(part.name)
        if found is None or found["sources"] != sources(part):
            return False
        part.seconds, part.cases = found["seconds"], [Case(**case) for case in found["cases"]]
        with self._explored.open("a") as file:
            file.writelines(json.dumps({"test": test, **numbers}) + "\n" for test, numbers in found["explored"].items())
        return True

    def note(self, part: Part) -> None:
        every = numbers(self._explored).items()
        seen = {test: counted for test, counted in every if any(one.endswith(test) for one in part.tests)}
        cases = [asdict(case) for case in part.cases]
        found = {"sources": sources(part), "seconds": part.seconds, "cases": cases, "explored": seen}
        self._known[part.name] = found
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(self._known))


def rows(parts: list[Part], seen: dict[str, Counter[str]]) -> dict[str, list[str]]:
    """The lines of each promise's table."""
    found: dict[str, list[str]] = {}
    optimised = Counter[str]()
    for part in parts:
        if "optimised" in part.options:
            optimised.update(cases=len(part.cases), seconds=round(part.seconds))
            continue
        test = part.tests[0]
        file, _, function = test.partition("::")
        gone_through = ", ".join(
            f"{seen[test][unit]:,} {UNITS[unit]}" for unit in UNITS if seen.get(test, {}).get(unit)
        )
        skipped = Counter(case.outcome for case in part.cases if case.outcome != "passed")
        passed = f"{len(part.cases) - skipped.total():,} passed"
        missing = "".join(f"; {number} not run here: {why}" for why, number in skipped.items())
        words = function.removeprefix("test_").replace("_", " ") or Path(file).stem
        row = f"| [{words}](../{file}) | {passed}{missing} | {gone_through} | {clock(part.seconds)} |"
        found.setdefault(promise_of(test), []).append(row)
    if optimised:
        took = clock(optimised["seconds"])
        cases = f"{optimised['cases']:,} passed"
        found[OPTIMISED] = [f"| [all tests that are not slow](../tests/optimised.py) | {cases} | | {took} |"]
    return found


def page(parts: list[Part], seen: dict[str, Counter[str]]) -> str:
    seconds = sum(part.seconds for part in parts)
    total = sum(seen.values(), Counter[str]())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [
        HEADING,
        "",
        "Written by `make prove` (scripts/prove.py). Every line was a test that passed; do not edit this part.",
        "",
        f"- Commit {commit.stdout.strip()}, {datetime.date.today():%d %B %Y}, {clock(seconds)} minutes of "
        f"tests, {JOBS} processes at a time.",
        f"- {platform.python_implementation()} {platform.python_version()}, {platform.system()} "
        f"{platform.release().partition('-')[0]}, {platform.machine()}, {os.cpu_count()} processors.",
        f"- Together: {', '.join(f'{total[unit]:,} {UNITS[unit]}' for unit in UNITS if total[unit])}.",
        "",
        *BOUNDS,
    ]
    tables = rows(parts, seen)
    for promise in [*dict.fromkeys(PROMISES.values()), OPTIMISED]:
        if promise in tables:
            lines += ["", f"### {promise}", "", "| proof | cases | gone through | minutes |", "|---|---|---|---|"]
            lines += sorted(tables[promise])
    return "\n".join(lines) + "\n"


BOUNDS = """\
A schedule is an order of the system calls of two to five processes that run the real code on real files
([tests/explorer.py](../tests/explorer.py)). The search runs every schedule with at most so many preemptions, and with a
kill before every call where the test kills. It leaves out schedules that cannot differ from one that it runs: two steps
that touch nothing in common need not be tried in both orders ([tests/footprints.py](../tests/footprints.py)). A test
compares it with the full search on small examples: both show every process the same.

What this does not show: faults that need more preemptions than the bound, or more processes. The bounds are two or
three preemptions for two processes, and one or two for three. Beyond them there are random schedules. To end within
45 minutes on two processors, two bounds are lower than they were: the long run of each kind of lock among real
processes makes 20,000 acquisitions instead of 50,000, and a kill beside a stale lock file is combined with one
preemption instead of two.""".splitlines()


def main(wanted: str) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as room:
        explored = Path(room) / "explored.jsonl"
        parts = [
            part
            for part in proofs(str(explored))
            if not wanted or wanted in part.name or wanted in promise_of(part.tests[0])
        ]
        passed = Passed(PASSED, explored)
        left = [part for part in parts if not passed.take(part)]
        print(
            f"{len(left)} parts, {JOBS} at a time; {len(parts) - len(left)} have passed on these sources.", flush=True
        )
        good = run(left, passed.note)
        seen = numbers(explored)
    text = page(parts, seen)
    if not good:
        print("FAILED: docs/proof.md stays as it was.")
        return 1
    if wanted:
        print(text)
    else:
        PAGE.write_text(PAGE.read_text().partition(HEADING)[0] + text)
        print(f"All proved in {clock(time.monotonic() - began)} minutes. Written: docs/proof.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
