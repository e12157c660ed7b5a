"""`AtomicDir` beside what nobody can do without: the fsyncs and the renames of a commit, and `cp -a` for a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from measure import Place, Row, Table, paired_ratio

from holdfast import AtomicDir, system

if TYPE_CHECKING:
    from collections.abc import Callable

FILES, SIZE = 1000, 4096
DURABLE_TARGET, COPY_TARGET, STEP_TARGET = 1.15, 1.2, 2.0  # the last in milliseconds


def build(directory: Path, files: int = FILES) -> None:
    data = os.urandom(SIZE)
    for number in range(files):
        folder = directory / f"d{number % 10}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(data)


def sync_raw(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            fd = os.open(f"{folder}/{name}", os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def commit_raw(room: Path) -> float:
    """The floor: the fsyncs and the exchange, without the removal of the old."""
    site, new = room / "raw", room / "raw.new"
    new.mkdir()
    build(new)
    began = time.perf_counter()
    sync_raw(str(new))
    if site.exists():
        system.exchange(str(new), str(site), None)
    else:
        os.rename(new, site)
    fd = os.open(room, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    took = time.perf_counter() - began
    shutil.rmtree(new, ignore_errors=True)
    return took


def commit(room: Path, durable: bool = True) -> float:
    change = AtomicDir(room / "site", durable=durable).replace()
    build(change.__enter__())
    began = time.perf_counter()
    change.__exit__(None, None, None)
    took = time.perf_counter() - began
    while any(".gone-" in name for name in os.listdir(room)):  # as the floor: nobody else pays for the removal
        time.sleep(0.01)
    return took


def step(room: Path, files: int) -> float:
    """A commit without fsync and with a version kept, so that nothing is removed: the step itself."""
    site = AtomicDir(room / f"step-{files}", durable=False, keep=100)
    change = site.replace()
    build(change.__enter__(), files)
    began = time.perf_counter()
    change.__exit__(None, None, None)
    return time.perf_counter() - began


def copy_raw(room: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["cp", "-a", "--reflink=auto", room / "tree", room / "copy"], check=True)
    took = time.perf_counter() - began
    shutil.rmtree(room / "copy")
    return took


def edit(room: Path) -> float:
    change = AtomicDir(room / "tree", durable=False).edit()
    began = time.perf_counter()
    change.__enter__()
    took = time.perf_counter() - began
    change.__exit__(ValueError, ValueError(), None)
    return took


def section(quick: bool, place: Place) -> Table:
    rounds = 5 if quick else 10
    with tempfile.TemporaryDirectory(dir=place.directory) as directory:
        room = Path(directory)
        (room / "tree").mkdir()
        build(room / "tree")
        contestants: dict[str, Callable[[], float]] = {
            f"fsyncs of {FILES} files, exchange, raw": lambda: commit_raw(room),
            "holdfast: replace, durable": lambda: commit(room),
            "holdfast: replace, durable=False": lambda: commit(room, durable=False),
            "holdfast: replace, durable=False, keep=100, 10 files": lambda: step(room, 10),
            f"holdfast: replace, durable=False, keep=100, {FILES} files": lambda: step(room, FILES),
            "cp -a --reflink=auto": lambda: copy_raw(room),
            "holdfast: edit, the copy": lambda: edit(room),
        }
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        for run in contestants.values():
            run()
        for _ in range(rounds):
            for name, run in contestants.items():
                samples[name].append(run())
    names = list(contestants)
    rows = []
    for name, times in samples.items():
        floor = names[5] if name in names[5:] else names[0]
        row = Row(name, median(times) * 1e3, "ms", paired_ratio(times, samples[floor]), raw=times)
        if name == names[1]:
            row.at_most(DURABLE_TARGET)
        elif name == names[6]:
            row.at_most(COPY_TARGET)
        elif name in names[2:5]:
            row.check(f"< {STEP_TARGET:g} ms", median(times) * 1e3 < STEP_TARGET)
        rows.append(row)
    return Table(f"AtomicDir, {FILES} files of {SIZE} bytes, {place.kind}", rows)
