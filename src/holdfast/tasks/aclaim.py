"""`TaskQueue.aclaim` and `await_done`, under asyncio and trio. The calls of the queue run in threads."""

from __future__ import annotations

import os
from time import monotonic

import anyio
from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync

from .. import process
from ..errors import Timeout
from ..files import pipe
from ..wait import RECHECK_S, Run, in_thread
from .claim import Claim
from .claimer import Claimer
from .queue import TaskQueue
from .store import Task


async def aclaim(queue: TaskQueue, timeout: float | None) -> Claim | None:
    """A thread waits. If the task that calls this is cancelled, a byte in a pipe ends the wait of the thread."""
    deadline = None if timeout is None else monotonic() + timeout
    idle = queue.async_claimers
    claimer = idle.pop() if idle else None
    reader, writer = pipe()

    def claim() -> Claim | None:
        nonlocal claimer
        if claimer is None or claimer.registry is not process.registry:
            claimer = Claimer(queue.store, queue.retries, buffered=False, reserves=False)
        return claimer.next() if timeout == 0 else claimer.wait(deadline, reader.fd)

    step = Run(claim, Claim.give_back)
    try:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                await step.wait()
                group.cancel_scope.cancel()

            group.start_soon(run)
            try:
                await anyio.sleep_forever()
            finally:
                os.write(writer.fd, b"!")
    except BaseException:
        with CancelScope(shield=True):
            await in_thread(step.take_back)
        raise
    finally:
        reader.close()
        writer.close()
        if claimer is not None:
            idle.append(claimer)
    claimed: Claim | None = step.outcome()
    return claimed


async def await_done(queue: TaskQueue, ids: list[str], timeout: float | None) -> list[Task]:
    """If the task that calls this is cancelled, the thread that waits is left alone. It ends within a second."""
    deadline = None if timeout is None else monotonic() + timeout
    limiter = CapacityLimiter(1)

    def wait() -> list[Task] | None:
        left = RECHECK_S if deadline is None else deadline - monotonic()
        try:
            return queue.wait(ids, max(0.0, min(left, RECHECK_S)))
        except Timeout:
            if left <= RECHECK_S and deadline is not None:
                raise
            return None

    while True:
        tasks = await run_sync(wait, abandon_on_cancel=True, limiter=limiter)
        if tasks is not None:
            return tasks
