"""From one process's release to the moment when another, which was waiting, has the lock.

The holder notes the monotonic clock just before it releases, the waiter just after its acquire returned. Every
round makes sure that the waiter is asleep in its wait: it has said that it is about to acquire, and it has been in
one and the same sleep for some milliseconds.

This file is also the program that waits: `handoff.py HOW WHAT PATH`.
"""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from measure import Place, Row, Table, curve_of

TARGETS = {"blocking": 150.0, "timeout=10": 400.0, "asyncio": 400.0, "trio": 400.0}
# A waiter that is not in a blocking flock looks again and again for 160 ms, so each of its hand-offs takes so long.
SLOW_TO_SLEEP = ("timeout=10", "asyncio", "trio")
DEFAULT = "ephemeral, fair=True"
SETTLE = 0.002
FILELOCK_POLL = 0.05


class RawLock:
    """flock and nothing else, for the floor."""

    def __init__(self, path: str) -> None:
        self._path = path

    def acquire(self) -> RawLock:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return self

    def release(self) -> None:
        os.close(self._fd)


# Ours, by what is measured. A lock file is waited for by its events in any case, so it has the target of those.
OURS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "ephemeral, fair=False": {"fair": False},
    "keep=True, fair=True": {"keep": True},
    "keep=True, fair=False": {"keep": True, "fair": False},
    "LockFile": {"durable": False},
}


def make_lock(how: str, what: str, path: str) -> Any:
    if how == "raw flock":
        return RawLock(path)
    if how.endswith("filelock"):  # the package, or `holdfast.filelock`
        return import_module(how).FileLock(path)
    import holdfast

    kind = holdfast.LockFile if what == "LockFile" else holdfast.Lock
    return kind(path, timeout=10 if how == "timeout=10" else None, **OURS[what])


def wait_as_told(how: str, what: str, path: str) -> None:
    lock = make_lock(how, what, path)
    if how in ("asyncio", "trio"):
        import anyio

        anyio.run(_serve_async, lock.aacquire, backend=how)
        return
    for _ in sys.stdin:
        print("acquiring", flush=True)
        hold = lock.acquire()
        now = time.monotonic_ns()
        (lock if how.endswith("filelock") else hold).release()
        print(now, flush=True)


async def _serve_async(acquire: Callable[[], Awaitable[Any]]) -> None:
    for _ in sys.stdin:  # blocks the loop, which has nothing else to do
        print("acquiring", flush=True)
        hold = await acquire()
        now = time.monotonic_ns()
        hold.release()
        print(now, flush=True)


class Pair:
    """A waiter in a process of its own, and this process as the holder, for at least `held_for` seconds."""

    def __init__(self, how: str, what: str, path: str, held_for: float = 0.0) -> None:
        self._how = how
        self._held_for = held_for
        # filelock takes a flock too, so that its holder need not import it here, and asyncio with it.
        self._lock = make_lock("blocking" if how in TARGETS else "raw flock", what, path)
        command = [sys.executable, __file__, how, what, path]
        self._waiter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiter.communicate()

    def _asleep(self) -> str:
        """Something that changes when the waiter wakes up; empty while it is awake."""
        status = Path(f"/proc/{self._waiter.pid}/status").read_text()
        if "\nState:\tS" not in status:
            return ""
        return next(line for line in status.splitlines() if line.startswith("voluntary"))

    def _wait_until_it_waits(self) -> None:
        time.sleep(self._held_for)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            before = self._asleep()
            time.sleep(SETTLE)
            if before and before == self._asleep():
                return
        raise RuntimeError(f"the waiter ({self._how}) does not wait")

    def once(self) -> float:
        """One hand-off, in seconds."""
        assert self._waiter.stdin and self._waiter.stdout
        hold = self._lock.acquire()
        self._waiter.stdin.write("go\n")
        self._waiter.stdin.flush()
        if not self._waiter.stdout.readline():
            raise RuntimeError(f"the waiter ({self._how}) ended")
        self._wait_until_it_waits()
        if self._how == "filelock":
            time.sleep(random.uniform(0, FILELOCK_POLL))  # a poller is met at any moment between two looks
        begin = time.monotonic_ns()
        hold.release()
        end = int(self._waiter.stdout.readline())
        if end < begin:
            raise RuntimeError(f"{self._how}: acquired {begin - end} ns before the release")
        return (end - begin) / 1e9


def section(quick: bool, place: Place) -> Table:
    rounds, in_a_row = 10, 5 if quick else 10
    kinds = [("raw flock", ""), ("filelock", ""), *((how, what) for what in OURS for how in TARGETS)]
    if quick:
        kinds = [(how, what) for how, what in kinds if how not in SLOW_TO_SLEEP or what in ("LockFile", DEFAULT)]
    samples: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        pairs = {kind: stack.enter_context(Pair(*kind, f"{place.directory}/{i}.lock")) for i, kind in enumerate(kinds)}
        for pair in pairs.values():
            pair.once()
        for _ in range(rounds):
            for kind, pair in pairs.items():
                samples[kind] += [pair.once() for _ in range(1 if kind[0] == "filelock" else in_a_row)]
    floor = median(samples["raw flock", ""])
    rows = []
    for (how, what), times in samples.items():
        row = Row(f"{what}, {how}" if what else how, median(times) * 1e6, "µs", median(times) / floor, raw=times)
        row.note = f"9 of 10 below {quantiles(times, n=10)[-1] * 1e6:.0f} µs"
        row.curve = [seconds * 1e6 for seconds in curve_of(times)]
        if what:
            target = TARGETS["timeout=10" if what == "LockFile" else how]
            row.check(f"<= {target:g} µs", median(times) * 1e6 <= target)
        rows.append(row)
    return Table(f"Hand-off between two processes, {place.kind}", rows)


if __name__ == "__main__":
    wait_as_told(*sys.argv[1:])
