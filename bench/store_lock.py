"""`EventStore.append` with and without the store's lock, by one process that has the store to itself.

This is `SingleInstance_PerformanceNotDegraded` of store-lock.md: the median latency of sequential appends, at most 5 %
apart. tests/netfs/checks.py runs `compare` on CIFS. A third store makes the system calls of the lock and nothing else:
what any lock in Python that looks for waiters and for a replaced file costs.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from measure import Place, Row, Table, paired_ratio

from holdfast.events import Event, EventStore
from holdfast.events.log.store_lock import StoreLock

WITH, WITHOUT, BARE = "with the store's lock", "without it", "with the system calls of the lock alone"
LIMIT = 1.05
APPENDS = 100


class NoLock(StoreLock):
    """The store's lock, except that taking it and giving it back do nothing."""

    def take(self) -> Any:
        return self

    def give_back(self, file: object) -> None:
        pass


class BareLock(NoLock):
    """The six system calls of the store's lock: is there a queue, lock, compare; compare, unlock, is there a queue."""

    __slots__ = ("_fd", "_queue_path")

    def __init__(self, path: str, *, timeout: float | None, mode: int) -> None:
        NoLock.__init__(self, path, timeout=timeout, mode=mode)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        self._queue_path = path + ".queue"

    def take(self) -> Any:
        os.access(self._queue_path, 0)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(self.path)
        return self

    def give_back(self, file: object) -> None:
        os.stat(self.path)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.access(self._queue_path, 0)


LOCKS = {WITHOUT: NoLock, BARE: BareLock}


def open_store(path: str, name: str, *, durable: bool) -> EventStore:
    store = EventStore(path, durable=durable)
    if name != WITH:
        committer = store._engine.committer
        committer.lock = committer.disk._lock = LOCKS[name](committer.lock.path, timeout=None, mode=0o644)
    return store


def append(store: EventStore, number: int) -> float:
    event = Event("OrderPlaced", {"id": number, "total": 19.9}, tags={f"order:{number}"})
    began = time.perf_counter()
    store.append(event)
    return time.perf_counter() - began


def compare(
    directory: str,
    rounds: int,
    appends: int = APPENDS,
    *,
    durable: bool = True,
    kinds: tuple[str, ...] = (WITH, WITHOUT),
) -> dict[str, list[float]]:
    """The median latency of every round, in seconds.

    The stores take turns with every append, because a disk that others use is slow for a while and then quick.
    """
    stores = {name: open_store(f"{directory}/{number}", name, durable=durable) for number, name in enumerate(kinds)}
    names = list(kinds)
    medians: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(appends):
            for name in names:
                times[name].append(append(stores[name], number))
            names.reverse()
        for name in names if turn else ():  # the first round warms up
            medians[name].append(median(times[name]))
    for store in stores.values():
        store.close()
    return medians


def section(quick: bool, places: list[Place]) -> Iterator[Table]:
    from events import journalled

    here = places[0]
    yield _table(quick, here.directory, f"{here.kind} here")
    with journalled(here.directory) as loop:
        if loop is not None:
            yield _table(quick, loop, "ext4 with a journal, on a loop device")


def _table(quick: bool, directory: str, where: str) -> Table:
    rows = []
    for durable in (True, False):
        kind = "durable" if durable else "not durable"
        kinds = (WITHOUT, BARE, WITH)
        found = compare(f"{directory}/{kind}", 10 if quick else 40, durable=durable, kinds=kinds)
        for name in kinds:
            ratio = paired_ratio(found[name], found[WITHOUT])
            rows.append(Row(f"{kind}, {name}", median(found[name]) * 1e6, "µs", ratio, raw=found[name]))
        if durable:
            rows[-1].at_most(LIMIT)
    return Table(f"EventStore, one process, the store's lock, {where}: median latency of {APPENDS} appends", rows)
