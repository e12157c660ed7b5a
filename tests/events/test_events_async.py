"""The event store in an event loop: the same, cancellation, and following without polling."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support import Waited, auntil, descriptors, tickets

import holdfast
from holdfast import system
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Projection, Query

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BACKENDS = ["asyncio", "trio"]


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    return lambda work: anyio.run(work, backend=request.param)


@pytest.fixture
def store(tmp_path: Path) -> EventStore:
    return EventStore(tmp_path / "shop")


def test_the_same_in_a_task(store: EventStore, run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        assert await store.aappend([Event("A", 1, tags={"x"}), Event("B", 2)]) == 2
        once = AppendCondition(Query.of(tags={"x"}))
        with pytest.raises(ConditionFailed):
            await store.aappend(Event("A"), once)
        assert await store.ahead() == 2
        assert [event.position async for event in store.aread()] == [1, 2]
        assert [event.position async for event in store.aread(Query.of(types={"B"}), backwards=True)] == [2]
        last = await store.aread_last()
        assert last is not None and last.position == 2
        decision = await store.adecide(Projection(Query.of(tags={"x"}), lambda n, _: n + 1, 0))
        assert decision.state == 1
        assert await store.aexecute(lambda decide: [Event("C")]) == 3
        assert await store.aproject("n", lambda n, _: n + 1, 0) == 3
        assert (await store.averify()).ok
        await store.arebuild_index()
        assert await store.aexport(tmp_path / "x") == 3 and await store.aimport_(tmp_path / "x") == 3

    run(work)


def test_many_tasks(store: EventStore, run: Any) -> None:
    async def work() -> None:
        async def add(n: int) -> None:
            results[n] = await store.aappend(Event("T", n))

        results: dict[int, int] = {}
        async with anyio.create_task_group() as group:
            for n in range(60):
                group.start_soon(add, n)
        assert {event.data: event.position for event in store.read()} == results

    run(work)


def test_a_cancelled_append_has_no_effect(store: EventStore, run: Any) -> None:
    store.append(Event("T"))
    lock = holdfast.Lock(f"{store.path}/.store.lock", keep=True)

    async def work() -> None:
        with lock.acquire():
            with anyio.move_on_after(0.05) as scope:
                await store.aappend(Event("Cancelled"))
            assert scope.cancelled_caught
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(store.aappend, Event("Cancelled"))
                await auntil(lambda: tickets(lock.path))
                group.cancel_scope.cancel()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.aappend(Event("Cancelled"))
        assert await store.aappend(Event("T")) == 2

    run(work)
    assert [event.type for event in store.read()] == ["T", "T"]


def written_already(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    at_sync, go_on = threading.Event(), threading.Event()
    real = system.fdatasync

    def slow(fd: int) -> None:
        at_sync.set()
        assert go_on.wait(30)
        real(fd)

    monkeypatch.setattr(system, "fdatasync", slow)
    return at_sync, go_on


def test_too_late_to_cancel(store: EventStore, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(Event("T"))
    at_sync, go_on = written_already(store, monkeypatch)

    async def work() -> None:
        results = []

        async def append() -> None:
            results.append(await store.aappend(Event("T")))
            await anyio.sleep(0)
            results.append("not cancelled")

        async with anyio.create_task_group() as group:
            group.start_soon(append)
            await anyio.to_thread.run_sync(at_sync.wait)
            group.cancel_scope.cancel()
            go_on.set()
        assert results == [2], "it knows what it did, and is cancelled then"

    run(work)
    assert store.head() == 2


def test_too_late_for_asyncios_own_cancel(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(Event("T"))
    at_sync, go_on = written_already(store, monkeypatch)
    results: list[Any] = []

    async def append() -> None:
        results.append(await store.aappend(Event("T")))
        await asyncio.sleep(0)
        results.append("not cancelled")

    async def work() -> None:
        task = asyncio.create_task(append())
        await asyncio.to_thread(at_sync.wait)
        task.cancel()
        for _ in range(10):  # it arrives
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert results == [2] and store.head() == 2


def test_tail(store: EventStore, run: Any) -> None:
    store.append([Event("A", 1), Event("B", 2)])

    async def work() -> None:
        found = []

        async def follow() -> None:
            async for event in store.tail(Query.of(types={"A"}), after=0):
                found.append(event.data)
                if event.data == 5:
                    return

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            for number in (3, 4, 5):
                await auntil(lambda before=[1, 3, 4][: number - 2]: found == before)
                await store.aappend([Event("B"), Event("A", number)])
        assert found == [1, 3, 4, 5]

    run(work)


def test_a_cancelled_tail_leaves_nothing(store: EventStore, run: Any, waits: list[Waited]) -> None:
    async def follow() -> None:
        async for _ in store.tail():
            pass

    async def cancel_while_it_waits() -> None:
        waits.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await auntil(lambda: waits)
            group.cancel_scope.cancel()

    async def work() -> None:
        store.append(Event("T"))
        await cancel_while_it_waits()
        before = sum("inotify" in target for target in descriptors().values())
        await cancel_while_it_waits()
        assert sum("inotify" in target for target in descriptors().values()) == before

    run(work)
