"""Blocking work, for a task: it runs in a thread, and the other tasks go on.

It is done once and wholly, however often the task is cancelled meanwhile: half of a commit is none. Who was cancelled
hears of it when the work is done. Known to asyncio and trio.
"""

from __future__ import annotations

from threading import Lock as Mutex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Result = TypeVar("Result")


class _Once:
    """Work that is done once, however many threads ask for it: the later ones wait, and find its outcome."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._mutex = Mutex()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        with self._mutex:
            if self.done:
                return
            try:
                self.result = self._work()
            except BaseException as error:
                self.error = error
            self.done = True


async def in_thread(work: Callable[[], Result]) -> Result:
    """Gives what `work` gives, or raises what it raised."""
    from anyio import CancelScope, CapacityLimiter, get_cancelled_exc_class
    from anyio.to_thread import run_sync

    once, cancelled = _Once(work), None
    limiter = CapacityLimiter(1)  # not the one that all threads of the program share: they may be waiting for us
    with CancelScope(shield=True):
        while not once.done:
            try:
                await run_sync(once.do, limiter=limiter)
            except get_cancelled_exc_class() as error:  # asyncio's own, which knows no shield
                cancelled = error
    if cancelled is not None:
        raise cancelled from once.error
    if once.error is not None:
        raise once.error
    result: Result = once.result
    return result
