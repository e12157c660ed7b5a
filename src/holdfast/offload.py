"""Run a blocking call of an asyncio or trio task in a thread, so that the event loop goes on."""

from __future__ import annotations

from threading import Lock as Mutex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread and return its result, or raise its exception.

    The call is made once and runs to its end. If the task is cancelled meanwhile, the cancellation is raised after it.
    """
    from anyio import CancelScope, CapacityLimiter, get_cancelled_exc_class
    from anyio.to_thread import run_sync

    mutex = Mutex()
    results: list[Result] = []
    errors: list[BaseException] = []

    def call_once() -> None:
        with mutex:  # after a cancellation, a second thread waits here for the first
            if not results and not errors:
                try:
                    results.append(work())
                except BaseException as error:
                    errors.append(error)

    cancelled = None
    limiter = CapacityLimiter(1)  # a limiter of our own: the threads of the common one may all be waiting for us
    with CancelScope(shield=True):
        while not results and not errors:
            try:
                await run_sync(call_once, limiter=limiter)
            except get_cancelled_exc_class() as error:  # asyncio's own `cancel`, which ignores the shield
                cancelled = error
    if cancelled is not None:
        raise cancelled from (errors[0] if errors else None)
    if errors:
        raise errors[0]
    return results[0]
