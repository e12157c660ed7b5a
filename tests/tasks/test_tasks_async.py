"""`aput`, `aclaim` and `await_done`, under asyncio and trio."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from support import auntil, until

from holdfast import Timeout
from holdfast.tasks import Claim, NoSuchTask, TaskQueue, sqlite

BACKENDS = ["asyncio", "trio"]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def queue(jobs: Path) -> TaskQueue:
    return TaskQueue(jobs, retry_after=0.01)


def run(backend: str, work: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(work, backend=backend)


def test_a_coroutine_puts_claims_and_waits(backend: str, queue: TaskQueue) -> None:
    async def work() -> None:
        id = await queue.aput({"n": 1}, priority=3)
        claim = await queue.aclaim()
        assert claim is not None and claim.payload == {"n": 1}
        assert await queue.aclaim() is None
        claim.complete("result")
        (task,) = await queue.await_done(id, timeout=30)
        assert task.result == "result"

    run(backend, work)


def test_a_waiting_claim_is_woken_by_a_put(backend: str, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event. The loop runs other tasks meanwhile."""
    monkeypatch.setattr(sqlite, "RECHECK_S", 600.0)
    claims: list[Claim | None] = []

    async def claim() -> None:
        claims.append(await queue.aclaim(timeout=60))

    async def work() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(claim)
            await anyio.to_thread.run_sync(lambda: until(lambda: idle(queue) == 3))
            for payload in "abc":
                await queue.aput(payload)
        assert sorted(claim.payload for claim in claims if claim is not None) == ["a", "b", "c"]
        for one in claims:
            assert one is not None
            one.complete()

    run(backend, work)
    assert queue.stats()["done"] == 3


def idle(queue: TaskQueue) -> int:
    """How many workers wait for a task."""
    count: int = queue.store.read(lambda run: run("select count(*) from idle").fetchone()[0])  # type: ignore[attr-defined]
    return count


def test_a_cancelled_claim_claims_nothing(backend: str, queue: TaskQueue) -> None:
    async def work() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(queue.aclaim, None)
            await auntil(lambda: idle(queue) == 1)
            group.cancel_scope.cancel()
        id = await queue.aput("x")
        task = queue.get(id)
        assert (task.state, task.tried) == ("pending", 0)
        claim = await queue.aclaim()
        assert claim is not None
        claim.complete()

    run(backend, work)


def test_a_claim_that_is_cancelled_too_late_is_given_back(
    backend: str, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has claimed a task when the cancellation arrives."""
    id = queue.put("x")
    real = queue.store.claim
    reached: list[bool] = []

    async def work() -> None:
        async with anyio.create_task_group() as group:

            def claim(*arguments: Any, **options: Any) -> Any:
                attempts = real(*arguments, **options)
                if attempts and not reached:
                    reached.append(True)
                    anyio.from_thread.run_sync(group.cancel_scope.cancel)
                return attempts

            monkeypatch.setattr(queue.store, "claim", claim)
            group.start_soon(queue.aclaim, None)
        assert reached
        task = queue.get(id)
        assert (task.state, task.tried) == ("pending", 0)

    run(backend, work)


def test_many_claims_share_few_workers(backend: str, queue: TaskQueue, jobs: Path) -> None:
    """A claim after another one uses the same worker. It lives as long as its claims."""

    async def work() -> None:
        await queue.aput("a")
        await queue.aput("b")
        claims = [await queue.aclaim(), await queue.aclaim()]
        assert len(list((jobs / "workers").iterdir())) == 1
        queue.async_claimers.clear()
        gc.collect()
        assert TaskQueue(jobs).claimer().recover() == 0
        for claim in claims:
            assert claim is not None
            claim.complete()

    run(backend, work)


def test_await_done_waits_and_raises(backend: str, queue: TaskQueue) -> None:
    async def work() -> None:
        id = await queue.aput("x")
        with pytest.raises(Timeout, match="still pending"):
            await queue.await_done(id, timeout=0.01)
        with pytest.raises(NoSuchTask):
            await queue.await_done(["y"], timeout=1)
        with anyio.move_on_after(0.05) as scope:
            await queue.await_done(id)
        assert scope.cancelled_caught
        async with anyio.create_task_group() as group:
            group.start_soon(queue.await_done, id, 30)
            claim = await queue.aclaim()
            assert claim is not None
            claim.complete()

    run(backend, work)


def test_asyncio_may_cancel_a_claim_itself(backend: str, queue: TaskQueue) -> None:
    if backend != "asyncio":
        pytest.skip("Task.cancel of asyncio")

    async def work() -> None:
        task = asyncio.ensure_future(queue.aclaim(None))
        await auntil(lambda: idle(queue) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.aclaim(None), 0.05)
        assert (await queue.aput("x")) and queue.stats()["pending"] == 1

    asyncio.run(work())
