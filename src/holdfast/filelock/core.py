"""The locks of Holdfast behind the objects of this package: no check for deadlocks, and holds that may be dropped.

A caller that waits for a hold of its own thread or task gets Timeout, if it has a timeout. So the engines wait for such
a hold, too. `BaseFileLock` refuses a wait for it without end.
"""

from __future__ import annotations

from time import monotonic

from .. import process, wait
from ..errors import LockLost, Timeout
from ..locks.base import BaseLock
from ..locks.hold import Hold
from ..locks.lock import WholeFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..locks.engine import Outcome
    from ..locks.local import LocalEngine

    CancelCheck = Callable[[], bool] | None

CANCEL_CHECK_S = 0.1
_NEVER = float("inf")


class QuietHold(Hold):
    """A hold that is released without a warning when it is dropped."""

    __slots__ = ()

    def __del__(self) -> None:
        self._drop()

    def release_if_held(self) -> None:
        """Release the lock. Nothing happens if it was lost."""
        try:
            self.release()
        except LockLost:
            pass


class NativeEngine(WholeFile):
    """A kernel lock on all of a file. A caller that waits for itself gets Timeout."""

    __slots__ = ()

    def shares_already(self, *, asynchronous: bool) -> bool:
        return False


class Core(BaseLock[QuietHold]):
    """A lock of Holdfast at one path."""

    __slots__ = ()

    _hold_type = QuietHold
    _engine: LocalEngine

    def hold(self, grant: Any) -> QuietHold:
        return QuietHold(self, grant)

    def wait(self, found: Outcome, timeout: float | None, cancel_check: CancelCheck) -> QuietHold:
        """Go on after a first attempt in vain. Raises `holdfast.Timeout`."""
        if timeout == 0:
            try:
                return wait.drive(self._steps(found, 0, explains=False))
            except wait.DeadlinePassed:
                raise Timeout(path=self.name) from None
        return self._wait(found, timeout, cancel_check)

    async def await_(self, found: Outcome, timeout: float | None, cancel_check: CancelCheck) -> QuietHold:
        """`wait`, for a task."""
        never = None if cancel_check is None else _NEVER
        steps = self._steps(found, timeout, asynchronous=True, explains=bool(timeout), never=never)
        try:
            return await wait.adrive(steps, cancel_check if timeout != 0 else None, CANCEL_CHECK_S)
        except (wait.DeadlinePassed, wait.Stopped):
            raise Timeout(path=self.name) from None


class Turns:
    """The threads and tasks that want to change the state of one shared object, in order of arrival."""

    __slots__ = ("_key",)

    def __init__(self) -> None:
        self._key = f"filelock object {id(self)}"

    def join(self, notified: wait.Notified) -> process.LinePlace:
        return process.LinePlace(self._key, 1, notified)


def seconds_left(timeout: float | None, deadline: float | None) -> float | None:
    """What is left of a timeout that ends at `deadline`. A timeout of 0 stays 0: one attempt."""
    return max(deadline - monotonic(), 0.0) if deadline and timeout else timeout
