"""One acquire and release of a free lock, beside the bare system calls and beside other packages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from statistics import median

from measure import Place, Row, Table, paired_ratio, python_loop, take_turns

KEEP_TARGET = 3.0
EPHEMERAL_TARGETS = {"ext4": 1.5, "tmpfs": 2.0}
FAIR_TARGET = 1.2
FILE_TARGETS = {"ext4": 2.0, "tmpfs": 2.5}
DURABLE_TARGET = 1.2

FLOOR = "raw Python"
REUSED = "holdfast: with lock"
JUDGED = ("holdfast: lock.acquire().release()", REUSED, "holdfast: with Lock(path)")
UNFAIR = "holdfast: with lock, fair=False"
UNCOUNTED = "holdfast: with lock, metrics taken out"
METRICS_TARGET = 1.05

_NAMES = (
    "import os, fcntl; open, close, fstat, stat, unlink = os.open, os.close, os.fstat, os.stat, os.unlink; "
    "flock, ex, flags = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC"
)
_TAKE = "fd = open(path, flags, 0o644); flock(fd, ex); fstat(fd); stat(path); "

# Each as its documentation shows it, and one object again and again where that is possible.
PEERS = {
    "filelock.FileLock": ("import filelock; lock = filelock.FileLock(path)", "with lock: pass"),
    "fasteners.InterProcessLock": ("import fasteners; lock = fasteners.InterProcessLock(path)", "with lock: pass"),
    "portalocker.Lock": ("import portalocker; lock = portalocker.Lock(path)", "with lock: pass"),
    "zc.lockfile.LockFile": ("from zc.lockfile import LockFile", "LockFile(path).close()"),
    "flufl.lock.Lock": ("from flufl.lock import Lock; lock = Lock(path)", "with lock: pass"),
}


FILE_PEERS = {
    "filelock.SoftFileLock": ("import filelock; lock = filelock.SoftFileLock(path)", "with lock: pass"),
    "flufl.lock.Lock": ("from flufl.lock import Lock; lock = Lock(path)", "with lock: pass"),
    "lockfile.LockFile": ("import lockfile; lock = lockfile.LockFile(path)", "with lock: pass"),
}
_WRITE_NAMES = (
    "import os; open, write, close, unlink, fsync = os.open, os.write, os.close, os.unlink, os.fsync; "
    "flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC; "
    "text = b'pid=%d\\ntimestamp=1735420800\\n' % os.getpid(); folder = os.path.dirname(path); "
    "sync = lambda fd: (fsync(fd), close(fd))"
)

_COUNT_NOTHING = "from itertools import repeat; lock._acquisitions = lock._engine.metrics.cleanups.count = repeat(0)"


def _holdfast(options: str) -> dict[str, tuple[str, str]]:
    setup = f"from holdfast import Lock; lock = Lock(path{options})"
    return {
        JUDGED[0]: (setup, "lock.acquire().release()"),
        REUSED: (setup, "with lock: pass"),
        JUDGED[2]: (setup, f"with Lock(path{options}): pass"),
        "holdfast: with lock, asyncio imported": (f"import asyncio; {setup}", "with lock: pass"),
        UNFAIR: (f"from holdfast import Lock; lock = Lock(path{options}, fair=False)", "with lock: pass"),
        UNCOUNTED: (f"{setup}; {_COUNT_NOTHING}", "with lock: pass"),
    }


def _compile_floor(directory: str) -> str | None:
    compiler = shutil.which("cc")
    if compiler is None:
        print("no C compiler (cc): the raw C figures are left out")
        return None
    program = f"{directory}/floor"
    subprocess.run([compiler, "-O2", "-o", program, Path(__file__).with_name("floor.c")], check=True)
    return program


def _compare(kind: str, contestants: dict[str, tuple[str, str]], quick: bool, place: Place) -> list[Row]:
    commands = {}
    for i, (name, (setup, statement)) in enumerate(contestants.items()):
        commands[name] = python_loop(f"path = {place.directory!r} + '/{i}.lock'; {setup}", statement)
    floor = _compile_floor(place.directory) if kind else None
    if floor is not None:
        commands["raw C"] = [floor, kind, f"{place.directory}/c.lock"]
    samples = take_turns(commands, rounds=10 if quick else 15, repeats=2 if quick else 3)
    return [
        Row(name, median(times) * 1e6, "µs", paired_ratio(times, samples[FLOOR]), raw=times)
        for name, times in samples.items()
    ]


def _comparisons(rows: dict[str, Row]) -> list[Row]:
    pairs = {
        "fair=True over fair=False": (UNFAIR, FAIR_TARGET),
        "metrics over no metrics": (UNCOUNTED, METRICS_TARGET),
    }
    found = []
    for name, (without, target) in pairs.items():
        found.append(Row(name, None, "", paired_ratio(rows[REUSED].raw, rows[without].raw)))
        found[-1].at_most(target)
    return found


def keep(quick: bool, place: Place) -> Table:
    contestants = {FLOOR: (_NAMES, _TAKE + "close(fd)"), **_holdfast(", keep=True"), **PEERS}
    rows = {row.name: row for row in _compare("keep", contestants, quick, place)}
    for name, row in rows.items():
        if name in PEERS:
            behind = paired_ratio(row.raw, rows[REUSED].raw)
            row.check(f"{behind:.1f} x holdfast's, > 1", behind > 1)
        elif name in JUDGED:
            row.at_most(KEEP_TARGET)
    return Table(
        f"Free lock, keep=True, {place.kind}: open+flock+fstat+stat+close", [*rows.values(), *_comparisons(rows)]
    )


# What the rules ask for besides: a look for a queue, a look at the name before it is removed, and an unlock.
_EPHEMERAL_RULES = f"access(queue, 0); {_TAKE}stat(path); unlink(path); flock(fd, 8); close(fd)"


def ephemeral(quick: bool, place: Place) -> Table:
    contestants = {
        FLOOR: (_NAMES, _TAKE + "unlink(path); close(fd)"),
        "the system calls of the rules alone": (_NAMES + "; access, queue = os.access, path + 'q'", _EPHEMERAL_RULES),
        **_holdfast(""),
    }
    rows = {row.name: row for row in _compare("ephemeral", contestants, quick, place)}
    for name, row in rows.items():
        if name in JUDGED and place.kind in EPHEMERAL_TARGETS:
            row.at_most(EPHEMERAL_TARGETS[place.kind])
    title = f"Free lock, ephemeral, {place.kind}: create+flock+fstat+stat+unlink+close"
    return Table(title, [*rows.values(), *_comparisons(rows)])


# The system calls that the rules for lock files ask for, and nothing else: what any implementation in Python pays.
_RULES_NAMES = (
    f"{_WRITE_NAMES}; from holdfast import system as s; full = text + b'x' * 120; digits = b'0' * 20; "
    "access, fstat, stat, pwrite, link = os.access, os.fstat, os.stat, os.pwrite, s.link_open_file; queue = path + 'q'"
)
_RULES = (
    "access(queue, 0); fd = open(folder, s.O_TMPFILE, 0o644); s.lock_liveness(fd); write(fd, full); fstat(fd); "
    "link(fd, None, path); pwrite(fd, digits, 100); s.lock_removal(fd); stat(path, follow_symlinks=False); "
    "unlink(path); close(fd)"
)


def lock_file(quick: bool, place: Place) -> Table:
    setup = "from holdfast import LockFile; lock = LockFile(path, durable=False)"
    contestants = {
        FLOOR: (_WRITE_NAMES, "fd = open(path, flags, 0o644); write(fd, text); close(fd); unlink(path)"),
        "the system calls of the rules, raw": (_RULES_NAMES, _RULES),
        JUDGED[0]: (setup, "lock.acquire().release()"),
        REUSED: (setup, "with lock: pass"),
        **FILE_PEERS,
    }
    rows = {row.name: row for row in _compare("", contestants, quick, place)}
    for name, row in rows.items():
        if name in FILE_PEERS:
            behind = paired_ratio(row.raw, rows[REUSED].raw)
            row.check(f"{behind:.1f} x holdfast's, > 1", behind > 1)
        elif name in JUDGED and place.kind in FILE_TARGETS:
            row.at_most(FILE_TARGETS[place.kind])
    return Table(f"Free LockFile, durable=False, {place.kind}: O_EXCL+write+close+unlink", [*rows.values()])


def durable(quick: bool, place: Place) -> Table:
    """The raw sequence syncs what the lock has to: the file before anybody sees it, and the directory with its name."""
    raw = (
        "fd = open(path, flags, 0o644); write(fd, text); fsync(fd); close(fd); "
        "sync(open(folder, os.O_RDONLY)); unlink(path)"
    )
    contestants = {
        FLOOR: (_WRITE_NAMES, raw),
        REUSED: ("from holdfast import LockFile; lock = LockFile(path)", "with lock: pass"),
    }
    rows = _compare("", contestants, quick, place)
    rows[1].at_most(DURABLE_TARGET)
    return Table(f"Free LockFile, durable=True, {place.kind}: O_EXCL+write+fsync+fsync+close+unlink", rows)
