"""`Hold`: a lock that is held.

    free ── acquire ──▶ held ── release ──▶ released
                         │ └─ the lock is taken away ─▶ lost (`check` and `release` raise LockLost)
                         └─ fork ─▶ the child's copy is inert (`release` raises NotOwner)

The engine's side of a hold is its grant (`engine.Grant`): it releases the lock, and finds out whether it is lost. The
hold has an entry in the registry of its process. Removing the entry is the right to release.
"""

from __future__ import annotations

import sys

from .. import process
from ..errors import HoldfastError, LockLost, NotLocked, NotOwner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, TypeVar

    from .base import BaseLock
    from .engine import Grant

    HoldType = TypeVar("HoldType", bound="Hold")


class Hold:
    """A lock that is held. Use it in a `with` block, or call `release` exactly once.

    lock: the lock that was acquired
    acquired_at: the time of the acquisition, in seconds since the epoch
    token: a number that grows with every acquisition, for locks that can be taken away from their holder. Else None

    `check` and `release` raise LockLost if the lock was taken away, NotLocked after a release, and NotOwner in a forked
    child. A hold that is dropped is released, and a ResourceWarning is logged.

        hold = holdfast.Lock("deploy.lock").acquire(timeout=60)
        try:
            deploy()
        finally:
            hold.release()
    """

    __slots__ = ("__weakref__", "_grant", "_lost", "_owner", "_registry", "lock")

    def __init__(self, lock: BaseLock[Any], grant: Grant) -> None:
        self.lock = lock
        self._grant = grant
        self._lost = False
        self._registry = registry = process.registry
        next(lock._acquisitions)
        self._owner = registry.holds[grant] = process.owner()  # from now on, `__del__` releases

    @property
    def acquired_at(self) -> float:
        """The time of the acquisition, in seconds since the epoch."""
        return self._grant.acquired_at

    @property
    def token(self) -> int | None:
        """A number that grows with every acquisition. None: the lock cannot be taken away from its holder."""
        return self._grant.token

    @property
    def released(self) -> bool:
        """True after `release`, and in a forked child."""
        return self._grant not in self._registry.holds or self._registry is not process.registry

    @property
    def lost(self) -> bool:
        """True if the lock was taken away from this hold. False while it is held, and after its release."""
        return self._lost or (not self.released and not self._grant.is_good())

    def check(self) -> None:
        """Raise LockLost if the lock was taken away, NotLocked after `release`, NotOwner in a forked child."""
        if self.released:
            raise self._not_held()
        if self._lost or not self._grant.is_good():
            raise self._loss()

    def fileno(self) -> int:
        """The descriptor that carries the lock. A child that inherits it keeps the lock if this process dies."""
        if self.released:
            raise self._not_held()
        grant: Any = self._grant
        return int(grant.fileno())

    def release(self) -> None:
        """Release the lock. Raises NotLocked the second time, LockLost if it was taken away meanwhile."""
        if process.forks:  # perhaps the fork hook of another module, in a child, and before ours
            process.current_registry()
        # Popping the entry is atomic: if two threads release at once, exactly one of them pops it.
        if self._registry.holds.pop(self._grant, None) is None:
            raise self._not_held()
        if not self._grant.release():
            raise self._loss()

    async def arelease(self) -> None:
        """`release`, for tasks. If it waits for a disk or a server, other tasks run meanwhile."""
        await self._off_loop(self.release)

    async def _off_loop(self, work: Callable[[], None]) -> None:
        if not self.lock._engine.blocks:
            work()
            return
        from ..wait import in_thread

        await in_thread(work)

    def _not_held(self) -> HoldfastError:
        name = self.lock._engine.name
        if self._registry is not process.registry:
            return NotOwner(
                f"{name}: this hold was acquired before a fork, by the parent process. Acquire the lock here.",
                path=name,
            )
        return NotLocked(f"{name}: this hold was released already. Acquire the lock again.", path=name)

    def _loss(self) -> LockLost:
        if not self._lost:
            self._lost = True
            self.lock._engine.metrics.losses.bump()
        engine = self.lock._engine
        return LockLost(
            f"{engine.name}: the lock is lost: {engine.loss}. Another process may hold it now. Check the work done "
            f"since then, and {engine.loss_remedy}.",
            path=engine.name,
        )

    def __enter__(self: HoldType) -> HoldType:
        if self.released:
            raise self._not_held()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._registry is not process.registry:
            return  # a forked child leaves its parent's block: nothing of its own to release
        try:
            self.release()
        except (HoldfastError, OSError):
            if error is None:  # else the exception of the block is more important
                raise

    async def __aenter__(self: HoldType) -> HoldType:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._off_loop(lambda: self.__exit__(kind, error, trace))

    def _drop(self) -> bool:
        """Release the lock at any moment of any thread, as garbage is collected. False: it was not held."""
        try:
            if self._grant not in self._registry.holds or self._registry is not process.current_registry():
                return False
            del self._registry.holds[self._grant]
            self._grant.drop()
        except (AttributeError, KeyError):  # never got as far as being held, or the interpreter is going down
            return False
        return True

    def __del__(self) -> None:
        try:
            if self._grant not in self._registry.holds:  # it was released, as is usual
                return
        except AttributeError:
            return
        if not self._drop() or sys.is_finalizing():  # first: where warnings are errors, nothing comes after them
            return
        text = f"a hold on {self.lock._engine.name} was never released; keep what acquire() returns, and release it"
        import logging
        import warnings

        # By default Python hides ResourceWarning, so the log has it, too.
        logging.getLogger("holdfast").warning(text)
        warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.lock!r}{', released' if self.released else ''}>"
