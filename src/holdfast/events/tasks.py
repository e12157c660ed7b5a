"""Work that cannot be stopped half way, in a task that can."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from anyio import CancelScope, get_cancelled_exc_class
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync


async def uncancelled(work: Callable[[], None], withdraw: Callable[[], bool]) -> None:
    """Run `work` in a thread. A cancellation withdraws it, if that is still possible.

    If not, this waits for its end and returns as if nothing had happened, so that the caller knows what it did. The
    cancellation is delivered with the next `await`.
    """
    done = Event()
    errors: list[BaseException] = []
    right = [True]  # to begin the work, or to say that no thread will

    def take_right() -> bool:
        try:
            return right.pop()
        except IndexError:
            return False

    def run() -> None:
        if not take_right():
            return
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    await checkpoint()
    cancelled: BaseException | None = None
    while not done.is_set():
        try:
            if cancelled is None:
                await run_sync(run, abandon_on_cancel=True)
            else:
                with CancelScope(shield=True):
                    await run_sync(done.wait, abandon_on_cancel=True)
        except get_cancelled_exc_class() as error:
            if cancelled is None and (take_right() or withdraw()):
                raise
            cancelled = cancelled or error
    if cancelled is not None:
        _deliver_later(cancelled)
    if errors:
        raise errors[0]


def _deliver_later(cancelled: BaseException) -> None:
    """trio and anyio's scopes cancel again by themselves; asyncio's own `task.cancel()` is said once.

    Not if the task has ended by then, or the cancellation was taken back: a timeout that was too late.
    """
    import asyncio

    if not isinstance(cancelled, asyncio.CancelledError):
        return
    if any(isinstance(text, str) and "cancel scope" in text for text in cancelled.args):
        return
    task = asyncio.current_task()

    def cancel_again() -> None:
        if task is None or task.done():
            return
        cancelling = getattr(task, "cancelling", None)  # Python 3.11
        if cancelling is not None:
            if not cancelling():
                return
            task.uncancel()  # type: ignore[attr-defined]
        task.cancel(*cancelled.args)

    asyncio.get_running_loop().call_soon(cancel_again)
