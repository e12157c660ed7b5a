"""The two tables of tests that come with the idea of a store lock, line by line; and writers that do not starve."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support import Child, Waited, auntil

import holdfast
from holdfast import Lock
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def shop(in_memory: Path) -> Path:
    return in_memory / "shop"


# Its unit tests.


def test_acquires_the_lock_when_nobody_holds_it(shop: Path) -> None:
    EventStore(shop).append(Event("T"))
    assert (shop / ".store.lock").is_file()


@pytest.mark.parametrize("timeout", [0.0, 0.2])
def test_fails_while_another_holds_it(timeout: float, shop: Path, waits: list[Waited]) -> None:
    store = EventStore(shop, lock_timeout=timeout)
    with Lock(shop / ".store.lock", keep=True):
        began = time.monotonic()
        (error,) = together([lambda: store.append(Event("T"))])  # by this very thread it would be a deadlock
        assert isinstance(error, holdfast.Timeout)
        assert time.monotonic() - began >= timeout
        assert bool(waits) == bool(timeout), "without a timeout it does not wait"
        assert all(one.until is not None and one.until <= waits[0].at + timeout for one in waits)
    assert store.append(Event("T")) == 1


def test_releases_it(shop: Path) -> None:
    one, other = EventStore(shop, lock_timeout=0), EventStore(shop, lock_timeout=0)
    for number in range(1, 20, 2):
        assert one.append(Event("T")) == number and other.append(Event("T")) == number + 1


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_cancelled_append_ends_while_another_holds_the_lock(when: str, shop: Path, waits: list[Waited]) -> None:
    store = EventStore(shop, lock_timeout=None)

    async def work() -> None:
        with Lock(shop / ".store.lock", keep=True):
            async with anyio.create_task_group() as group:
                if when == "before":
                    group.cancel_scope.cancel()
                group.start_soon(store.aappend, Event("T"))
                if when != "before":
                    await auntil(lambda: waits)
                    group.cancel_scope.cancel()

    anyio.run(work)
    assert store.head() == 0


# Its integration tests: two instances on one directory.


def together(works: list[Any]) -> list[Any]:
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_instances_append_at_once(shop: Path) -> None:
    stores = [EventStore(shop, lock_timeout=60), EventStore(shop, lock_timeout=60)]
    works = [
        lambda store=store, text=f"{name}.{n}": store.append(Event("T", text))
        for name, store in enumerate(stores)
        for n in range(50)
    ]
    positions = together(works)
    assert sorted(positions) == list(range(1, 101)), "no gaps, no duplicates"
    found = {event.data: event.position for event in stores[0].read()}
    assert len(found) == 100, "and nothing was overwritten"
    assert [found[f"{name}.{n}"] for name in (0, 1) for n in range(50)] == positions


def test_two_instances_decide_at_once(shop: Path) -> None:
    stores = [EventStore(shop, lock_timeout=60), EventStore(shop, lock_timeout=60)]
    for turn in range(50):
        query = Query.of(tags={f"seat:{turn}"})

        barrier = threading.Barrier(2)

        def decide(store: EventStore, query: Query = query, turn: int = turn, barrier: Any = barrier) -> int:
            reading = store.read(query)
            assert list(reading) == []
            barrier.wait(30)
            return store.append(Event("Sold", tags={f"seat:{turn}"}), AppendCondition(query, after=reading.head))

        results = together([lambda store=store, decide=decide: decide(store) for store in stores])
        assert sorted(type(result) is ConditionFailed for result in results) == [False, True]


# Nobody starves.


def test_twelve_writers(shop: Path) -> None:
    """Each appends until all have their part. If one starved, the others would go on until it times out."""
    EventStore(shop)
    part = 50

    def write(name: int) -> Callable[[Callable[[str], None]], None]:
        def run(say: Callable[[str], None]) -> None:
            store = EventStore(shop, lock_timeout=30)
            left, seen, count = dict.fromkeys(range(12), part), 0, 0
            while any(number > 0 for number in left.values()):
                store.append(Event("T", name))
                count += 1
                reading = store.read(after=seen)
                for event in reading:
                    left[event.data] -= 1
                seen = reading.head
            say(str(count))

        return run

    ends = [child.end() for child in [Child(write(name)) for name in range(12)]]
    assert [code for code, _ in ends] == [0] * 12
    counts = [int(count) for _, lines in ends for count in lines]
    assert min(counts) >= part and EventStore(shop).head() == sum(counts)
