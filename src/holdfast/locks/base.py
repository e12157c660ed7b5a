"""The face of every lock.

A lock object is a description. It can be used again and again, by any thread or task, and holds nothing itself.
Acquiring it returns a `Hold` (`hold`). The face has the timeouts, the errors, the metrics, `with` and the async twins.
It knows no path, descriptor or server: its engine does (`engine`, which also describes the acquire algorithm).
"""

from __future__ import annotations

from time import monotonic

from .. import process, wait
from ..errors import Busy, NotLocked, NotOwner, Timeout, WouldDeadlock
from .engine import Outcome, attempt_step
from .hold import Hold

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Generic, TypeVar

    from ..status import Status
    from .engine import Engine

    StrPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
    HoldType = TypeVar("HoldType", bound=Hold)
else:  # typing takes longer to import than the rest of the package

    class Generic:
        __slots__ = ()

        def __class_getitem__(cls, _: object) -> type:
            return cls

    HoldType = None


class Default:
    """The type of `DEFAULT`, which stands for "as the lock was made"."""

    def __repr__(self) -> str:
        return "the lock's own"


DEFAULT = Default()


class BaseLock(Generic[HoldType]):
    """What every lock can do."""

    __slots__ = ("_acquisitions", "_engine", "_entered", "timeout")

    _options: tuple[str, ...] = ()  # the names of its parameters besides the path
    _hold_type: type[HoldType] = Hold  # type: ignore[assignment]

    def __init__(self, engine: Engine, timeout: float | None) -> None:
        self._engine: Any = engine
        self._acquisitions = engine.metrics.acquisitions.count
        self._entered: list[Hold] = []
        self.timeout = check_timeout(timeout)

    @property
    def name(self) -> str:
        """The path of the lock, or its URL without a password."""
        name: str = self._engine.name
        return name

    def status(self) -> Status:
        """Return the holders and the waiters of the lock. Does not acquire it.

        In a container, whose /proc does not show every process, it may lock the file for a moment. Other processes
        then try again.
        """
        status: Status = self._engine.status()
        return status

    def try_acquire(self) -> HoldType | None:
        """Return a hold if the lock is free at this moment and no waiter queues for it, else None."""
        found = self._engine.first_attempt()
        if not found:
            try:
                found = wait.drive(self._engine.steps(found, None, waits=False, asynchronous=False))
            except wait.DeadlinePassed:
                return None
        return self._hold_type(self, found)

    async def atry_acquire(self) -> HoldType | None:
        """`try_acquire` for asyncio and trio. It does not wait for a holder. Other tasks run meanwhile."""
        try:
            return await self._adrive(self._first_steps(0, explains=False))
        except wait.DeadlinePassed:
            return None

    def acquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """Wait for the lock and return a hold. In a task, use `async with` or `aacquire`.

        timeout: seconds to wait; None waits for ever, 0 makes one attempt. Default: the timeout of the lock

        Raises Timeout, or Busy for 0, and WouldDeadlock if this thread or task holds the lock already. Keep the hold: a
        hold that is dropped is released.
        """
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        found = self._engine.first_attempt(timeout)
        return self._hold_type(self, found) if found else wait.drive(self._steps(found, timeout))

    async def aacquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """`acquire` for asyncio and trio. Cancelling it leaves nothing behind."""
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        return await self._adrive(self._first_steps(timeout))

    async def _adrive(self, steps: wait.Steps[HoldType]) -> HoldType:
        if not self._engine.blocks:
            from anyio.lowlevel import checkpoint

            await checkpoint()
        return await wait.adrive(steps)

    def _first_steps(self, timeout: float | None, *, explains: bool = True) -> wait.Steps[HoldType]:
        """All of an acquire, for a task."""
        found = yield from attempt_step(self._engine, self._engine.first_attempt, timeout=timeout)
        if isinstance(found, Outcome):
            if not explains:
                found = yield from self._engine.steps(found, None, waits=False, asynchronous=True)
            else:
                return (yield from self._steps(found, timeout, asynchronous=True))
        return self._hold_type(self, found)

    def _steps(self, found: Outcome, timeout: float | None, *, asynchronous: bool = False) -> wait.Steps[HoldType]:
        """An acquire after its first attempt: with a deadline, a measurement, and an error that names the holder."""
        began = monotonic()
        deadline = None if timeout is None else began + timeout
        engine, waits = self._engine, timeout != 0
        try:
            grant = yield from engine.steps(found, deadline, waits=waits, asynchronous=asynchronous)
        except wait.DeadlinePassed:
            if waits:
                engine.metrics.timeouts.bump()
            report = wait.Run(lambda: self._timed_out(timeout or 0))  # may read all of /proc
            yield report
            raise report.outcome() from None
        if waits:
            engine.metrics.waited(monotonic() - began)
        return self._hold_type(self, grant)

    def _timed_out(self, timeout: float) -> Timeout:
        name, status = self._engine.name, self.status()
        holder = status.explain() if status.held or status.waiters else "it was held a moment ago and is free now"
        if timeout == 0:
            error: Timeout = Busy(f"{name} is busy: {holder}. Give a timeout to wait for it.", path=name)
        else:
            error = Timeout(
                f"{name}: not acquired within {timeout:g} s: {holder}. Wait longer with timeout=…, or for ever with "
                "timeout=None.",
                path=name,
            )
        error.status = status
        return error

    def __enter__(self) -> HoldType:
        found = self._engine.first_attempt(self.timeout)
        hold: HoldType = self._hold_type(self, found) if found else wait.drive(self._steps(found, self.timeout))
        self._entered.append(hold)
        return hold

    async def __aenter__(self) -> HoldType:
        hold = await self.aacquire()
        self._entered.append(hold)
        return hold

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold = self._leave()
        if error is not None:
            hold.__exit__(kind, error, trace)
            return
        try:
            hold.release()
        except NotOwner:
            pass  # a forked child leaves its parent's block: nothing of its own to release

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave().__aexit__(kind, error, trace)

    def _leave(self) -> Hold:
        """The hold of the block that the caller leaves."""
        entered = self._entered
        try:
            hold = entered.pop()
        except IndexError:
            name = self._engine.name
            raise NotLocked(
                f"{name}: this `with` block was not entered. Call __enter__ before __exit__.", path=name
            ) from None
        return self._exchange_for_own(hold) if entered else hold

    def _exchange_for_own(self, last: Hold) -> Hold:
        """Several threads or tasks are in a block of this lock: find the hold of the caller.

        A hold that was released inside its block has no owner any more. Another thread or task may leave a block than
        entered it: the event loop closes an unfinished asynchronous generator in a new task. Then the last hold is
        released, because all holds of a lock are equal.
        """
        caller = process.current_task() or process.current_thread()
        holds = [last, *reversed(self._entered)]
        own = next((hold for owner in (caller, None) for hold in holds if hold._owner() is owner), last)
        if own is last:
            return last
        try:
            self._entered.remove(own)
        except ValueError:  # another thread that leaves its block has just taken it
            return last
        self._entered.append(last)
        return own

    @property
    def release(self) -> Callable[[], None]:
        """A lock has no release: release the hold. (Not in `__getattr__`, which would make every attribute slower.)"""
        raise AttributeError("a lock has no release(). Release the hold: hold = lock.acquire(); hold.release()")

    def __repr__(self) -> str:
        return f"holdfast.{type(self).__name__}({self._engine.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """A lock is a description, and so can be sent to another process. Its holds stay here."""
        return _describe_again, (type(self), self._engine.name, {name: getattr(self, name) for name in self._options})


def _describe_again(kind: Any, name: str, options: dict[str, Any]) -> BaseLock[Any]:
    lock: BaseLock[Any] = kind(name, **options)
    return lock


def check_timeout(timeout: float | Default | None) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
        raise ValueError(f"timeout is seconds, 0 for one attempt, or None to wait for ever; not {timeout!r}")
    return None if timeout == float("inf") else timeout


def would_deadlock(name: str, asynchronous: bool, what: str) -> WouldDeadlock:
    return WouldDeadlock(
        f"{name}: this {'task' if asynchronous else 'thread'} {what} already and would wait for itself. Release the "
        "hold first, or pass it to the function that needs it.",
        path=name,
    )
