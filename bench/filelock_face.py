"""`holdfast.filelock` beside the package filelock, in one run: a free lock, a hand-off, and the import."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median, quantiles

import handoff
import imports
from measure import Place, Row, Table, paired_ratio, python_loop, take_turns

FASTER_TARGET = 3.0
HANDOFF_TARGET_MS = 1.0
PACKAGES = ("holdfast.filelock", "filelock")
KINDS = {
    "FileLock": ("from {package} import FileLock; lock = FileLock(path)", "with lock: pass"),
    "SoftFileLock": ("from {package} import SoftFileLock; lock = SoftFileLock(path)", "with lock: pass"),
}
# One call of the event loop for many acquires, so that its cost does not count.
_MANY = "async def many(): [(await lock.acquire(), await lock.release()) for _ in range(100)]"
KINDS["AsyncFileLock, 100 times"] = (
    f"import asyncio; from {{package}} import AsyncFileLock; lock = AsyncFileLock(path); names = dict(lock=lock); "
    f"exec({_MANY!r}, names); run = asyncio.new_event_loop().run_until_complete; many = names['many']",
    "run(many())",
)


def section(quick: bool, places: list[Place]) -> list[Table]:
    return [*(_free(quick, place) for place in places), _handoff(quick, places[-1]), _import(quick)]


def _free(quick: bool, place: Place) -> Table:
    commands = {}
    for kind, (setup, statement) in KINDS.items():
        for package in PACKAGES:
            path = f"{place.directory}/{package}.{len(commands)}"
            commands[f"{package}: {kind}"] = python_loop(f"path = {path!r}; {setup.format(package=package)}", statement)
    samples = take_turns(commands, rounds=8 if quick else 20, repeats=2)
    rows = []
    for kind in KINDS:
        ours, theirs = (samples[f"{package}: {kind}"] for package in PACKAGES)
        for package, times in zip(PACKAGES, (ours, theirs), strict=True):
            rows.append(Row(f"{package}: {kind}", median(times) * 1e6, "µs", paired_ratio(times, ours), raw=times))
        if kind == "FileLock":
            times_as_fast = paired_ratio(theirs, ours)
            rows[-2].check(f"{times_as_fast:.1f} x as fast, >= {FASTER_TARGET:g}", times_as_fast >= FASTER_TARGET)
    return Table(f"holdfast.filelock, a free lock, {place.kind}", rows)


def _handoff(quick: bool, place: Place) -> Table:
    samples: dict[str, list[float]] = {package: [] for package in PACKAGES}
    with ExitStack() as stack:
        pairs = {
            how: stack.enter_context(handoff.Pair(how, "", f"{place.directory}/handoff.{how}")) for how in PACKAGES
        }
        for pair in pairs.values():
            pair.once()
        for _ in range(20 if quick else 60):
            for how, pair in pairs.items():
                samples[how].append(pair.once())
    rows = []
    for package, times in samples.items():
        row = Row(package, median(times) * 1e3, "ms", median(times) / median(samples[PACKAGES[0]]), raw=times)
        row.note = f"9 of 10 below {quantiles(times, n=10)[-1] * 1e3:.2f} ms"
        rows.append(row)
    assert rows[0].value is not None
    rows[0].check(f"< {HANDOFF_TARGET_MS:g} ms", rows[0].value < HANDOFF_TARGET_MS)
    return Table(f"holdfast.filelock, a hand-off between two processes, {place.kind}", rows)


def _import(quick: bool) -> Table:
    statements = [f"from {package} import FileLock, Timeout" for package in PACKAGES]
    samples = imports.wall_times(statements, 20 if quick else 50)
    ours, theirs = (samples[statement] for statement in statements)
    rows = [Row(f'python -c "{one}"', median(samples[one]) * 1e3, "ms", raw=samples[one]) for one in statements]
    rows[0].ratio = paired_ratio(ours, theirs)
    rows[0].at_most(1.0)
    return Table("holdfast.filelock, the import: wall time of a whole interpreter", rows)
