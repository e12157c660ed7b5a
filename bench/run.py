"""Measure some sections of the benchmark: `python bench/run.py --only keep`. docs/benchmarks.md describes them.

`make bench` is `publish.py`, which runs this program once for each section and writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import beside
import commands
import contention
import directories
import engines
import events
import events_conditional
import events_many
import events_peers
import events_postgres
import events_takeover
import events_writers
import filelock_face
import flock_loop
import handoff
import imports
import scale
import store_lock
import tasks
import tasks_beside
import tasks_idle
import tasks_postgres
import uncontended
import web
from machine import machine
from measure import SHM, Place, Row, Table

INTERRUPTED = "interrupted"

Section = Callable[[bool, list[Place]], Iterator[Table]]


def _everywhere(measure: Callable[[bool, Place], Table]) -> Section:
    return lambda quick, places: (measure(quick, place) for place in places)


SECTIONS: dict[str, Section] = {
    "import": lambda quick, _: iter(imports.section(quick)),
    "command": lambda quick, _: iter(commands.section(quick)),
    "keep": _everywhere(uncontended.keep),
    "ephemeral": _everywhere(uncontended.ephemeral),
    "lockfile": _everywhere(uncontended.lock_file),
    "durable": _everywhere(uncontended.durable),
    "directory": _everywhere(directories.section),
    "handoff": _everywhere(handoff.section),
    "filelock": lambda quick, places: iter(filelock_face.section(quick, places)),
    "flock-loop": lambda quick, places: flock_loop.section(quick, places[-1]),
    "contention": lambda quick, places: iter(contention.section(quick, places)),
    "throughput": lambda quick, places: iter([contention.throughput(quick, places[0])]),
    "events": lambda quick, places: iter([events.durable(quick, places[0])]),
    "events-lock": store_lock.section,
    "events-processes": events.processes,
    "events-conditional": lambda quick, places: events_conditional.section(quick, places[0]),
    "events-writers": lambda quick, places: iter([events_writers.section(quick, places[0])]),
    "events-sizes": lambda quick, places: iter([events_many.sizes(quick, places[0])]),
    "events-peers": lambda quick, places: iter([events_peers.side_by_side(quick, places[0])]),
    "events-many": lambda quick, places: iter([events_many.section(quick, places[0])]),
    "events-million": lambda quick, places: iter([events.million(quick, places[0])]),
    "events-postgres": events_postgres.section,
    "events-takeover": events_takeover.section,
    "tasks": tasks.section,
    "tasks-wake": _everywhere(tasks.wake),
    "tasks-idle": _everywhere(tasks_idle.section),
    "web": lambda quick, places: iter([web.section(quick, places[-1])]),
    "tasks-many": lambda quick, places: iter([tasks.many(quick, places[0])]),
    "tasks-postgres": tasks_postgres.section,
    "tasks-many-postgres": tasks_postgres.many,
    "engines": engines.section,
    "engines-handoff": engines.handoff_section,
    "engines-scale": scale.section,
    "waiters": lambda quick, places: iter([contention.waiters(quick, places[0])]),
}


def show(table: Table) -> None:
    print(f"\n{table.title}")
    width = max(len(row.name) for row in table.rows)
    for row in table.rows:
        print(f"  {row.name:{width}}  {_number(row):>12}  {_ratio(row):>7}  {_verdict(row)}".rstrip())


def _number(row: Row) -> str:
    return "" if row.value is None else f"{row.value:,.{0 if row.value >= 1000 else 1}f} {row.unit}"


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:,.2f} x"


def _verdict(row: Row) -> str:
    texts = [f"{target} {'ok' if ok else 'MISSES'}" for target, ok in row.checks]
    return "; ".join([*texts, row.note] if row.note else texts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Holdfast beside the bare system calls and beside other packages.")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be given several times")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with the raw ones of every round, to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute, and noisier")
    parser.add_argument(
        "--beside", metavar="CHECKOUT", help="compare with the code of another checkout (--only tasks: its queues)"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the sections")
    parser.add_argument("--dir", default=".", help=f"where to lock, besides {SHM} (default: here)")
    options = parser.parse_args()

    if options.list:
        print(*SECTIONS, sep="\n")
        return 0
    about = {**machine(), "load": os.getloadavg()[0]}
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    if not os.path.isdir(SHM):
        print(f"no {SHM}: the figures of tmpfs are left out")
    sections = {name: SECTIONS[name] for name in options.only or SECTIONS}
    if options.beside:
        compared = [tasks_beside] if options.only == ["tasks"] else [beside, tasks_beside]
        sections = {
            module.__name__: lambda quick, places, module=module: module.section(quick, places, options.beside)  # type: ignore[misc]
            for module in compared
        }
    results: dict[str, dict[str, Any]] = {}

    def save() -> None:
        """After each table, so that the figures are there if a section is killed."""
        if options.json:
            temporary = f"{options.json}.temporary"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(about | {"sections": results}, file, indent=1, default=Row.as_dict)
            os.replace(temporary, options.json)

    for name, section in sections.items():
        results[name] = {"quick": options.quick, "load": os.getloadavg()[0], "error": "not finished", "tables": []}
        run_section(section, results[name], os.path.abspath(options.dir), save)
        if results[name]["error"] == INTERRUPTED:
            break
    failed = [name for name, result in results.items() if result["error"]]
    print(*(f"\nFAILED: {name}: {results[name]['error']}" for name in failed), sep="")
    tables = [Table(**table) for result in results.values() for table in result["tables"]]
    return _summary(tables) or (1 if failed else 0)


def run_section(section: Section, result: dict[str, Any], directory: str, save: Callable[[], None]) -> None:
    """Fill in its tables as they come, and the error if it fails."""
    error = ""
    try:
        with ExitStack() as stack:
            parents = [directory, *([SHM] if os.path.isdir(SHM) else [])]
            places = [stack.enter_context(Place.under(parent)) for parent in parents]
            for table in section(result["quick"], places):
                show(table)
                result["tables"].append({"title": table.title, "rows": table.rows})
                save()
    except KeyboardInterrupt:  # also how publish.py ends a section that takes too long
        traceback.print_exc()
        error = INTERRUPTED
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    result["error"] = error
    save()


def _summary(tables: list[Table]) -> int:
    checks = [(table, row, target, ok) for table in tables for row in table.rows for target, ok in row.checks]
    missed = [(table, row, target) for table, row, target, ok in checks if not ok]
    print(f"\n{len(checks) - len(missed)} of {len(checks)} targets met")
    for table, row, target in missed:
        print(f"  MISSES {target}: {table.title}: {row.name}: {_number(row)} {_ratio(row)}")
    return 1 if any(target.endswith("lost") for _, _, target in missed) else 0


if __name__ == "__main__":
    sys.exit(main())
