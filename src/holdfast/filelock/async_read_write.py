"""`AsyncReadWriteLock`: each task holds the lock for itself. Tasks wait for each other and for other processes."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager

from .. import errors, process
from .asyncio import AsyncAcquireReturnProxy
from .core import QuietHold
from .read_write import change_of_mode, first_attempt, make_core, raise_refused, read_write_timeout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from .read_write import Mode


class AsyncAcquireReadWriteReturnProxy(AsyncAcquireReturnProxy):
    """What an acquire returns. An `async with` block of it releases the lock at its end."""

    __slots__ = ()


class _Level:
    """What one task holds."""

    __slots__ = ("depth", "hold", "mode")

    def __init__(self, mode: Mode, hold: QuietHold) -> None:
        self.mode = mode
        self.hold = hold
        self.depth = 1


class AsyncReadWriteLock:
    """`ReadWriteLock` for tasks. `loop` and `executor` are accepted and have no effect."""

    def __init__(
        self,
        lock_file: str | os.PathLike[str],
        timeout: float = -1,
        *,
        blocking: bool = True,
        is_singleton: bool = True,
        loop: Any = None,
        executor: Any = None,
    ) -> None:
        self.lock_file: Any = os.fspath(lock_file)
        self.timeout = timeout
        self.blocking = blocking
        self.loop = loop
        self.executor = executor
        self._registry = process.current_registry()
        self._levels: dict[object, _Level] = {}  # by task
        self._is_closed = False

    @asynccontextmanager
    async def read_lock(self, timeout: float | None = None, *, blocking: bool | None = None) -> AsyncIterator[None]:
        async with await self.acquire_read(timeout, blocking=blocking):
            yield

    @asynccontextmanager
    async def write_lock(self, timeout: float | None = None, *, blocking: bool | None = None) -> AsyncIterator[None]:
        async with await self.acquire_write(timeout, blocking=blocking):
            yield

    async def acquire_read(
        self, timeout: float | None = None, *, blocking: bool | None = None
    ) -> AsyncAcquireReadWriteReturnProxy:
        """Share the lock with other readers."""
        return await self._acquire("read", timeout, blocking)

    async def acquire_write(
        self, timeout: float | None = None, *, blocking: bool | None = None
    ) -> AsyncAcquireReadWriteReturnProxy:
        """Hold the lock alone."""
        return await self._acquire("write", timeout, blocking)

    async def _acquire(
        self, mode: Mode, timeout: float | None, blocking: bool | None
    ) -> AsyncAcquireReadWriteReturnProxy:
        blocking = self.blocking if blocking is None else blocking
        seconds = read_write_timeout(self.timeout if timeout is None else timeout, blocking)
        self._check_usable()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an AsyncReadWriteLock is acquired inside an asyncio task only: no task runs here")
        level = self._levels.get(task)
        if level is None:
            hold = await self._take(mode, seconds)
            if self._is_closed:  # while this task waited
                hold.release_if_held()
                self._check_usable()
            self._levels[task] = _Level(mode, hold)
        elif level.mode == mode:
            level.depth += 1
        else:
            raise change_of_mode(f"lock on {self.lock_file} (lock id: {id(self)})", level.mode, mode)
        return AsyncAcquireReadWriteReturnProxy(self)

    async def _take(self, mode: Mode, seconds: float | None) -> QuietHold:
        try:
            core = make_core(self.lock_file, mode, seconds)
            found = first_attempt(core, seconds)
            return core.hold(found) if found else await core.await_(found, seconds, None)
        except errors.HoldfastError as error:
            raise_refused(error, self.lock_file)

    def _check_usable(self) -> None:
        what = f"AsyncReadWriteLock on {self.lock_file}"
        if self._registry is not process.current_registry():
            raise RuntimeError(f"{what} was invalidated by fork(); construct a new instance")
        if self._is_closed:
            raise RuntimeError(f"{what} is closed; construct a new instance")

    async def release(self, *, force: bool = False) -> None:
        """Leave one level of this task; the last one releases its hold. Raises RuntimeError if it holds none."""
        if self._registry is not process.current_registry():
            return
        task = asyncio.current_task()
        level = self._levels.get(task)
        if level is None:
            if force:
                return
            text = f"Cannot release a lock on {self.lock_file} (lock id: {id(self)})"
            raise RuntimeError(f"{text} that is not held by this task through this wrapper")
        level.depth = 0 if force else level.depth - 1
        if not level.depth:
            del self._levels[task]
            level.hold.release_if_held()

    async def _leave_block_as_task(self, error: BaseException | None) -> None:  # of the proxy
        await self.release()

    async def close(self) -> None:
        """Release what all tasks hold. The object cannot be used any more."""
        if self._registry is not process.current_registry():
            return
        self._is_closed = True
        levels, self._levels = self._levels, {}
        for level in levels.values():
            level.hold.release_if_held()
