"""`make bench` and `make bench-compare`: run sections of run.py one by one, then write docs/benchmarks.*, or compare.

Each section is a process of its own, with a time limit. One that fails or hangs is reported, and the others go on. The
exit status is 1 then, and also if a ratio got worse.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from figures import Figures, load, save, worse
from groups import BY_NAME, GROUPS, SHORTENED, group_of
from machine import commit, file_system, machine, versions
from page import page
from plots import drawn, file_of
from runner import ROOT, RUN, measure

DOCS = ROOT / "docs"
BUDGET_S = 14.5 * 60  # of the 15 minutes, so that the last section has time to stop its servers
SECTION_LIMIT_S = 150.0
GUESS_S = 25.0  # of a section that was never measured
BAR = 30

clock = time.monotonic


def all_sections() -> list[str]:
    done = subprocess.run([sys.executable, str(RUN), "--list"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


def chosen(wanted: list[str], sections: list[str]) -> list[str]:
    """The sections of groups and of names; all but those that run by name only, if nothing is wanted."""
    found = []
    for name in wanted or list(GROUPS):
        if name in GROUPS:
            found += [section for section in sections if group_of(section) == name and section not in BY_NAME]
        elif name in sections:
            found.append(name)
        else:
            raise SystemExit(
                f"no group or section {name!r}; groups: {', '.join(GROUPS)}; sections: {', '.join(sections)}"
            )
    return sorted(set(found), key=sections.index)


class Progress:
    """A bar with the time left on a terminal; elsewhere a line for each section."""

    def __init__(self, names: list[str], known: dict[str, float]) -> None:
        self._guess = {name: known.get(name, GUESS_S) for name in names}
        self._left = list(names)
        self._began = clock()
        self._terminal = sys.stdout.isatty()

    def show(self, name: str, since: float) -> None:
        if self._terminal:
            print(f"\r\x1b[K{self.text(name, since)}", end="", flush=True)

    def time_left(self, name: str, since: float) -> float:
        """The expected seconds of the sections ahead, and of the rest of the one that runs."""
        return sum(self._guess[left] for left in self._left) - min(clock() - since, self._guess[name])

    def text(self, name: str, since: float) -> str:
        total, ahead = sum(self._guess.values()), self.time_left(name, since)
        full = round(BAR * (1 - ahead / total))
        number = len(self._guess) - len(self._left) + 1
        return f"[{'#' * full}{'-' * (BAR - full)}] {number}/{len(self._guess)} {name}, about {minutes(ahead)} left"

    def end(self, name: str, result: Figures) -> None:
        self._left.remove(name)
        how = f"FAILED: {result['error']}" if result["error"] else "ok"
        start = "\r\x1b[K" if self._terminal else ""
        elapsed, ahead = minutes(clock() - self._began), minutes(sum(self._guess[left] for left in self._left))
        print(f"{start}{name}: {how}, {result['seconds']:.0f} s ({elapsed}, about {ahead} left)", flush=True)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def measure_all(names: Iterable[str], quick: bool, directory: str, known: dict[str, float]) -> dict[str, Figures]:
    """In turn, within the budget: if the others would not fit, a section has few rounds."""
    names = list(names)
    progress = Progress(names, known)
    deadline = clock() + BUDGET_S
    about = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "here": file_system(directory)}
    results = {}
    for name in names:
        since = clock()
        is_short = quick or progress.time_left(name, since) > deadline - since
        if since < deadline:
            limit = min(SECTION_LIMIT_S, deadline - since)
            found = measure(name, is_short, directory, limit, partial(progress.show, name, since))
        else:
            found = {"quick": quick, "load": 0.0, "error": "no time left", "tables": [], "seconds": 0.0, "others": 0.0}
        results[name] = about | found
        progress.end(name, found)
    return results


def publish(results: dict[str, Figures], docs: Path) -> None:
    """Write the page, its figures and its plots. Figures of other sections stay, if they are of the same machine."""
    figures = load(docs / "benchmarks.json")
    about = machine()
    if figures.get("machine") != about:
        if figures["sections"]:
            print("The figures in the repository are from another machine: they are dropped.")
        figures["sections"] = {}
    sections = figures["sections"] | results
    order = [name for name in all_sections() if name in sections]
    figures = {"machine": about, "versions": versions(), "sections": {name: sections[name] for name in order}}
    save(figures, docs / "benchmarks.json")
    write(figures, docs)


def write(figures: Figures, docs: Path) -> None:
    """The page and its plots."""
    (docs / "benchmarks.md").write_text(page(figures), encoding="utf-8")
    for name, text in drawn(figures):
        file_of(name, docs / "pictures").write_text(text, encoding="utf-8")


def compare(before: Figures, names: list[str], again: Callable[[list[str]], dict[str, Figures]]) -> bool:
    """Report the ratios that got worse. Their sections are measured again: only a ratio that is worse twice counts."""
    results = again(names)
    found = worse(before, {"sections": results})
    failed = [name for name, result in results.items() if result["error"]]
    if suspects := sorted({key[0] for key in found}, key=names.index):
        print(f"Measured again, because ratios got worse: {', '.join(suspects)}", flush=True)
        twice = worse(before, {"sections": again(suspects)})
        found = {key: twice[key] for key in found if key in twice}
    for (section, question, *_), text in found.items():
        print(f"WORSE: {section}: {question} {text}")
    if not found:
        print("No ratio is 25 % worse than the one in the repository.")
    return not found and not failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure, and write docs/benchmarks.md, or compare with it.")
    parser.add_argument("only", nargs="*", help=f"a group ({', '.join(GROUPS)}) or a section; default: all groups")
    parser.add_argument("--compare", action="store_true", help="write nothing; report ratios that got 25 %% worse")
    parser.add_argument("--draw", action="store_true", help="measure nothing; write the page from its figures")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the page says so")
    parser.add_argument("--dir", default=".", help="where to lock, besides /dev/shm (default: here)")
    parser.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)  # for the tests
    options = parser.parse_args(arguments)
    if options.draw:
        write(load(options.docs / "benchmarks.json"), options.docs)
        return 0
    names = chosen(options.only, all_sections())
    before = load(options.docs / "benchmarks.json")
    known = {
        name: section["seconds"]
        for name, section in before["sections"].items()
        if section["quick"] == (options.quick or name in SHORTENED) and not section["error"]
    }

    def again(names: list[str]) -> dict[str, Figures]:
        return measure_all(names, options.quick, os.path.abspath(options.dir), known)

    if options.compare:
        return 0 if compare(before, names, again) else 1
    results = again(names)
    publish(results, options.docs)
    failed = [name for name, result in results.items() if result["error"]]
    print(f"Written: {options.docs}/benchmarks.md" + (f". FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section that runs is ended, too
    sys.exit(main())
