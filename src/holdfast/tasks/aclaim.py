"""`TaskQueue.aclaim` and `await_done`, under asyncio and trio. The calls of the queue run in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import anyio
from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync

from .. import process, system
from ..files import pipe
from ..wait import Run, in_thread
from .claim import Claim
from .claimer import Claimer
from .queue import TaskQueue
from .store import Task


async def aclaim(queue: TaskQueue, timeout: float | None) -> Claim | None:
    """A thread waits. If the task that calls this is cancelled, a byte in a pipe ends the wait of the thread."""
    idle = queue.async_claimers
    claimer = idle.pop() if idle else None
    if claimer is None or claimer.registry is not process.registry:
        claimer = Claimer(queue.store, queue.retries, buffered=False, reserves=False)
    reader, writer = pipe()
    step = Run(lambda: queue.store.within(timeout, lambda: claimer.wait(timeout, reader.fd)), Claim.give_back)
    try:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                await step.wait()
                group.cancel_scope.cancel()

            group.start_soon(run)
            try:
                await anyio.sleep_forever()
            finally:
                system.write(writer.fd, b"!")
    except BaseException:
        with CancelScope(shield=True):
            await in_thread(step.take_back)
        raise
    finally:
        reader.close()
        writer.close()
        idle.append(claimer)
    claimed: Claim | None = step.outcome()
    return claimed


async def await_done(queue: TaskQueue, ids: str | Iterable[str], timeout: float | None) -> list[Task]:
    """If the task that calls this is cancelled, the thread that waits is left alone. It ends within a second."""
    cancelled = threading.Event()
    try:
        return await run_sync(
            lambda: queue.wait(ids, timeout, cancelled=cancelled), abandon_on_cancel=True, limiter=CapacityLimiter(1)
        )
    finally:
        cancelled.set()
