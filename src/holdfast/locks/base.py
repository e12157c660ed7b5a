"""The face of every lock.

A lock object is a description. It can be used again and again, by any thread or task, and holds nothing itself.
Acquiring it returns a `Hold` (`hold`). The face has the timeouts, the errors, the metrics, `with` and the async twins.
It knows no path, descriptor or server: its engine does (`engine`, which also describes the acquire algorithm).
"""

from __future__ import annotations

from time import monotonic

from .. import process, wait
from ..errors import Busy, NotLocked, Timeout, WouldDeadlock
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
_CANCEL_CHECK_S = 0.1
_NEVER = float("inf")  # the deadline of a wait that the driver must be able to end, and so does not leave to the kernel


class BaseLock(Generic[HoldType]):
    """What every lock can do."""

    __slots__ = ("_acquisitions", "_engine", "_entered", "timeout")

    _options: tuple[str, ...] = ()  # the names of its parameters besides the path
    _hold_type: type[HoldType] = Hold  # type: ignore[assignment]

    def __init__(self, engine: Engine, timeout: float | None) -> None:
        self._engine = engine
        self._acquisitions = engine.metrics.acquisitions.count
        self._entered: list[HoldType] = []
        self.timeout = check_timeout(timeout)

    @property
    def name(self) -> str:
        """The path of the lock, or its URL without a password."""
        return self._engine.name

    def status(self) -> Status:
        """Return the holders and the waiters of the lock. Does not acquire it.

        In a container, whose /proc does not show every process, it may lock the file for a moment. Other processes
        then try again.
        """
        return self._engine.status()

    def try_acquire(self) -> HoldType | None:
        """Return a hold if the lock is free at this moment and no waiter queues for it, else None."""
        found: Any = self._engine.first_attempt(0)
        if not found:
            try:
                found = wait.drive(self._engine.steps(found, 0.0, asynchronous=False))
            except wait.DeadlinePassed:
                return None
        return self._hold_type(self, found)

    async def atry_acquire(self) -> HoldType | None:
        """`try_acquire` for asyncio and trio. It does not wait for a holder. Other tasks run meanwhile."""
        try:
            return await self._adrive(0, explains=False)
        except wait.DeadlinePassed:
            return None

    def acquire(
        self, timeout: float | Default | None = DEFAULT, *, cancel_check: Callable[[], bool] | None = None
    ) -> HoldType:
        """Wait for the lock and return a hold. In a task, use `async with` or `aacquire`.

        timeout: seconds to wait; None waits for ever, 0 makes one attempt. Default: the timeout of the lock
        cancel_check: called about ten times a second while the caller waits, which keeps its place in the queue. True
            ends the wait with Timeout. An exception ends it, too, and is raised

        Raises Timeout, or Busy for 0, and WouldDeadlock if this thread or task holds the lock already. Keep the hold: a
        hold that is dropped is released.
        """
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        found: Any = self._engine.first_attempt(timeout)
        return self._hold_type(self, found) if found else self._wait(found, timeout, cancel_check)

    def _wait(
        self,
        found: Outcome | None,
        timeout: float | None,
        cancel_check: Callable[[], bool] | None,
        began: float | None = None,
    ) -> HoldType:
        if cancel_check is None or timeout == 0:
            return wait.drive(self._steps(found, timeout, began=began))
        try:
            return wait.drive(self._steps(found, timeout, never=_NEVER, began=began), cancel_check, _CANCEL_CHECK_S)
        except wait.Stopped:
            name = self._engine.name
            raise Timeout(f"{name}: not acquired, because cancel_check ended the wait.", path=name) from None

    async def aacquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """`acquire` for asyncio and trio. Cancelling it leaves nothing behind."""
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        return await self._adrive(timeout)

    async def _adrive(self, timeout: float | None, *, explains: bool = True) -> HoldType:
        if not self._engine.blocks:
            from anyio.lowlevel import checkpoint

            await checkpoint()
        return await wait.adrive(self._steps(None, timeout, asynchronous=True, explains=explains))

    def _steps(
        self,
        found: Outcome | None,
        timeout: float | None,
        *,
        asynchronous: bool = False,
        explains: bool = True,
        never: float | None = None,
        began: float | None = None,
    ) -> wait.Steps[HoldType]:
        """An acquire whose first attempt returned `found`, or None: it is not made yet.

        explains: raise Timeout or Busy, which name the holder; False: `wait.DeadlinePassed`
        never: the deadline of a wait without a timeout
        began: the timeout counts from this moment (monotonic). None: from now on
        """
        engine, began = self._engine, monotonic() if began is None else began
        grant: Any = found
        if found is None:
            grant = yield from attempt_step(engine, engine.first_attempt, timeout=timeout)
        if not grant:
            deadline = never if timeout is None else began + timeout if timeout else 0
            try:
                grant = yield from engine.steps(grant, deadline, asynchronous=asynchronous)
            except wait.DeadlinePassed:
                if not explains:
                    raise
                if timeout:
                    engine.metrics.timeouts.bump()
                report = wait.Run(lambda: self._timed_out(timeout or 0))  # may read all of /proc
                yield report
                raise report.outcome() from None
            if timeout != 0:
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
        found: Any = self._engine.first_attempt(self.timeout)
        hold = self._hold_type(self, found) if found else wait.drive(self._steps(found, self.timeout))
        self._entered.append(hold)
        return hold

    async def __aenter__(self) -> HoldType:
        hold = await self.aacquire()
        self._entered.append(hold)
        return hold

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered
        hold = entered.pop() if entered else self._not_entered()
        if entered:
            hold = self._hold_of_caller(hold)
        if error is None and hold._registry is process.registry:
            hold.release()
        else:
            hold.__exit__(kind, error, trace)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold = self._entered.pop() if self._entered else self._not_entered()
        await self._hold_of_caller(hold).__aexit__(kind, error, trace)

    def _hold_of_caller(self, last: HoldType) -> HoldType:
        """The hold of the block that the caller leaves. `last` is the one that was entered last.

        Several threads or tasks may be in a block of this lock. A caller that did not enter (the event loop closes an
        asynchronous generator in a new task) gets the last hold: all are equal.
        """
        entered, caller = self._entered, process.owner()
        hold = next((one for one in (last, *reversed(entered)) if one._owner == caller), last)
        if hold is not last:
            try:
                entered.remove(hold)
            except ValueError:  # another thread that leaves its block has just popped it
                return last
            entered.append(last)
        return hold

    def _not_entered(self) -> HoldType:
        name = self._engine.name
        raise NotLocked(f"{name}: this `with` block was not entered. Call __enter__ before __exit__.", path=name)

    @property
    def release(self) -> None:
        """A lock has no release: release the hold. (Not in `__getattr__`, which would make every attribute slower.)"""
        raise AttributeError("a lock has no release(). Release the hold: hold = lock.acquire(); hold.release()")

    def __repr__(self) -> str:
        return f"holdfast.{type(self).__name__}({self._engine.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """A lock is a description, and so can be sent to another process. Its holds stay here."""
        from functools import partial

        return partial(type(self), **{name: getattr(self, name) for name in self._options}), (self._engine.name,)


def check_timeout(timeout: float | Default | None) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
        raise ValueError(f"timeout is seconds, 0 for one attempt, or None to wait for ever; not {timeout!r}")
    return None if timeout == float("inf") else timeout


def check_mode(mode: int) -> int:
    if not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise ValueError(f"mode is the permissions of the file as a number, such as 0o644; not {mode!r}")
    return mode


def would_deadlock(name: str, asynchronous: bool, what: str) -> WouldDeadlock:
    return WouldDeadlock(
        f"{name}: this {'task' if asynchronous else 'thread'} {what} already and would wait for itself. Release the "
        "hold first, or pass it to the function that needs it.",
        path=name,
    )
