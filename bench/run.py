"""The benchmark: `make bench`, or `python bench/run.py --help`. What it measures is in docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import beside
import commands
import contention
import directories
import engines
import events
import events_many
import events_postgres
import events_takeover
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
from measure import Place, Row, Table

SHM = "/dev/shm"

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
    "events": lambda quick, places: iter([events.durable(quick, places[0])]),
    "events-lock": store_lock.section,
    "events-processes": events.processes,
    "events-peers": lambda quick, places: iter([events.side_by_side(quick, places[0])]),
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


def machine() -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Holdfast beside the bare system calls and beside other packages.")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be given several times")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with the raw ones of every round, to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute, and noisier")
    parser.add_argument(
        "--beside", metavar="CHECKOUT", help="compare with the code of another checkout (--only tasks: its queues)"
    )
    parser.add_argument("--dir", default=".", help=f"where to lock, besides {SHM} (default: here)")
    options = parser.parse_args()

    about = machine()
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    tables: list[Table] = []
    if not os.path.isdir(SHM):
        print(f"no {SHM}: the figures of tmpfs are left out")
    sections = {name: SECTIONS[name] for name in options.only or SECTIONS}
    if options.beside:
        compared = [tasks_beside] if options.only == ["tasks"] else [beside, tasks_beside]
        sections = {
            module.__name__: lambda quick, places, module=module: module.section(quick, places, options.beside)  # type: ignore[misc]
            for module in compared
        }
    for section in sections.values():
        with ExitStack() as stack:
            parents = [os.path.abspath(options.dir), *([SHM] if os.path.isdir(SHM) else [])]
            places = [stack.enter_context(Place.under(parent)) for parent in parents]
            for table in section(options.quick, places):
                show(table)
                tables.append(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(about | {"tables": {t.title: [row.as_dict() for row in t.rows] for t in tables}}, file, indent=1)
    return _summary(tables)


def _summary(tables: list[Table]) -> int:
    checks = [(table, row, target, ok) for table in tables for row in table.rows for target, ok in row.checks]
    missed = [(table, row, target) for table, row, target, ok in checks if not ok]
    print(f"\n{len(checks) - len(missed)} of {len(checks)} targets met")
    for table, row, target in missed:
        print(f"  MISSES {target}: {table.title}: {row.name}: {_number(row)} {_ratio(row)}")
    return 1 if any(target.endswith("lost") for _, _, target in missed) else 0


if __name__ == "__main__":
    sys.exit(main())
