"""The locks for tasks of asyncio. No attempt waits, so none needs a thread: the event loop makes it itself.

`run_in_executor`, `executor` and `loop` are accepted and have no effect. Cancelling an acquire leaves nothing behind.
"""

from __future__ import annotations

import os
from time import monotonic

from .. import errors, wait
from . import options
from .core import CANCEL_CHECK_S, seconds_left
from .errors import raise_both, timed_out
from .kinds import SoftFileLock, UnixFileLock, WindowsFileLock
from .lock import BaseFileLock
from .state import DEBUG, State, log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn, TypeVar

    from .core import CancelCheck

    Self = TypeVar("Self", bound="BaseAsyncFileLock")

__all__ = ["AsyncAcquireReturnProxy", "AsyncSoftFileLock", "AsyncUnixFileLock", "AsyncWindowsFileLock"]
__all__ += ["BaseAsyncFileLock"]


class AsyncAcquireReturnProxy:
    """What `acquire` returns. An `async with` block of it releases the lock at its end."""

    __slots__ = ("lock",)

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    async def __aenter__(self) -> Any:
        return self.lock

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.lock._leave_block_as_task(error)


class AsyncFileLockMeta(options.FileLockMeta):
    """Adds the options of asynchronous locks. All threads share one state by default."""

    def __call__(
        cls,
        lock_file: str | os.PathLike[str],
        timeout: float = -1,
        mode: int = options.UNSET_MODE,
        thread_local: bool = False,
        *,
        loop: Any = None,
        run_in_executor: bool = True,
        executor: Any = None,
        **more: Any,
    ) -> Any:
        if thread_local and run_in_executor:
            raise ValueError("run_in_executor is not supported when thread_local is True")
        more |= {"loop": loop, "run_in_executor": run_in_executor, "executor": executor}
        return super().__call__(lock_file, timeout, mode, thread_local, **more)


class BaseAsyncFileLock(BaseFileLock, metaclass=AsyncFileLockMeta):
    """What all locks for tasks share."""

    _warning_level = 4
    _own_options = BaseFileLock._own_options | {"loop", "run_in_executor", "executor"}

    def __init__(
        self,
        lock_file: str | os.PathLike[str],
        timeout: float = -1,
        mode: int = options.UNSET_MODE,
        thread_local: bool = False,
        *,
        blocking: bool = True,
        is_singleton: bool = False,
        poll_interval: float = 0.05,
        lifetime: float | None = None,
        context_error_policy: str = "chain",
        close_error_policy: str = "default",
        fallback_to_soft: bool = True,
        preserve_lock_file: bool = False,
        on_acquired: Callable[[int], None] | None = None,
        loop: Any = None,
        run_in_executor: bool = True,
        executor: Any = None,
    ) -> None:
        super().__init__(
            lock_file,
            timeout,
            mode,
            thread_local,
            blocking=blocking,
            is_singleton=is_singleton,
            poll_interval=poll_interval,
            lifetime=lifetime,
            context_error_policy=context_error_policy,
            close_error_policy=close_error_policy,
            fallback_to_soft=fallback_to_soft,
            preserve_lock_file=preserve_lock_file,
            on_acquired=on_acquired,
        )
        self.executor = executor
        self._loop = loop
        self._run_in_executor = run_in_executor

    @property
    def loop(self) -> Any:
        return self._loop

    @property
    def run_in_executor(self) -> bool:
        return self._run_in_executor

    async def acquire(  # type: ignore[override]
        self,
        timeout: float | None = None,
        poll_interval: float | None = None,
        *,
        blocking: bool | None = None,
        cancel_check: CancelCheck = None,
    ) -> AsyncAcquireReturnProxy:
        """`BaseFileLock.acquire` for a task. Other tasks run meanwhile."""
        state, seconds, stop = self._begin(timeout, poll_interval, blocking, cancel_check)
        if not self._add_level(state):
            await self._acquire_in_turn_as_task(state, seconds, stop)
        return AsyncAcquireReturnProxy(self)

    async def _acquire_in_turn_as_task(self, state: State, timeout: float | None, cancel_check: CancelCheck) -> None:
        deadline = None if timeout is None else monotonic() + timeout
        notified = wait.AsyncNotified()
        place = state.turns.join(notified)
        try:
            if not place.admitted:
                stop = cancel_check if timeout != 0 else None
                await wait.adrive(wait.until_admitted(place, notified, deadline), stop, CANCEL_CHECK_S)
            if not self._add_level(state):
                await self._acquire_as_task(state, seconds_left(timeout, deadline), cancel_check)
        except (wait.DeadlinePassed, wait.Stopped):
            raise timed_out(state.lock_file, None, None) from None
        finally:
            place.leave()

    async def _acquire_as_task(self, state: State, timeout: float | None, cancel_check: CancelCheck) -> None:
        hold = None
        try:
            log(DEBUG, "Attempting to acquire lock %s on %s", id(self), state.lock_file)
            core = self._core(state)
            found = self._first_attempt(core, timeout)
            if found:
                hold = core.hold(found)
            else:
                if timeout is None:
                    self._check_deadlock(core, asynchronous=True)
                if timeout != 0:
                    self._log_wait(state)
                hold = await core.await_(found, timeout, cancel_check)
            self._set_held(state, hold)
        except BaseException as error:
            if hold is None and isinstance(error, errors.HoldfastError):
                self._raise_as_filelock(error, state, timeout, cancel_check)
            self._undo_acquire(state, hold)  # an error of the hook, or an interrupt
            raise

    async def release(self, force: bool = False) -> None:  # type: ignore[override]
        """`BaseFileLock.release` for a task."""
        BaseFileLock.release(self, force)

    def _release_dropped(self) -> None:
        BaseFileLock.release(self, force=True)  # nothing would run a coroutine

    def __enter__(self) -> NoReturn:
        raise NotImplementedError("Use `async with`: acquire and release of this lock are coroutines.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError("Use `async with`: acquire and release of this lock are coroutines.")

    async def __aenter__(self: Self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave_block_as_task(error)

    async def _leave_block_as_task(self, error: BaseException | None) -> None:
        try:
            await self.release()
        except BaseException as failure:
            if error is None or self._context_error_policy == "chain":
                raise
            raise_both(error, failure)


class AsyncUnixFileLock(UnixFileLock, BaseAsyncFileLock):
    """`UnixFileLock` for tasks."""


class AsyncWindowsFileLock(WindowsFileLock, BaseAsyncFileLock):
    """`WindowsFileLock` for tasks."""


class AsyncSoftFileLock(SoftFileLock, BaseAsyncFileLock):
    """`SoftFileLock` for tasks."""


AsyncFileLock = AsyncWindowsFileLock if os.name == "nt" else AsyncUnixFileLock


def __dir__() -> list[str]:
    return list(__all__)
