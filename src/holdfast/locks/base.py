"""The face of every lock, and of what acquiring it gives.

A lock object is a description: a path and how to lock it. It can be used again and again, by any thread or task, and
holds nothing itself. Acquiring gives a `Hold`, the live thing:

    free ── acquire ──▶ held ── release ──▶ released
                         │ └─ the file is removed or replaced by somebody ─▶ lost (check and release raise LockLost)
                         └─ fork ─▶ the child's copy is nobody's (release raises NotOwner)

A kind of lock provides `_first_attempt` and `_attempt` (one attempt each, without waiting), `_steps` (the whole
algorithm, for a driver of `wait`) and `status`. It gets the rest from here, once. One attempt returns the hold, or an
`Outcome`:

    BUSY       another process or thread holds the lock
    QUEUED     waiters are first in its queue; the attempt was not made
    REPLACED   the path names another file by now: try again
    REMOVING   the lock was taken only in order to remove the file: try again in a moment
"""

from __future__ import annotations

import sys
from time import monotonic

from .. import metrics, process, wait
from ..errors import Busy, HoldfastError, LockLost, NotLocked, NotOwner, Timeout, WouldDeadlock
from ..paths import absolute

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Generic, Literal, TypeVar

    from ..status import Status

    StrPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
    HoldType = TypeVar("HoldType", bound="Hold")
else:  # Generic would import typing

    class Generic:
        __slots__ = ()

        def __class_getitem__(cls, _: object) -> type:
            return cls

    HoldType = None


class Outcome:
    """Why an attempt brought no hold. It is false, and a hold is true."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return self._name


BUSY, QUEUED = Outcome("BUSY"), Outcome("QUEUED")
REPLACED, REMOVING = Outcome("REPLACED"), Outcome("REMOVING")
_MAX_QUICK_RETRIES = 3  # retries without a pause
_MAX_RETRIES = 200  # retries after which `try_acquire` calls the lock busy
MAX_REMOVALS = 50  # retries after which the process that removes the file is treated as a holder: it may be stopped
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.000_05, 0.002


class Default:
    """The type of `DEFAULT`, which stands for "as the lock was made"."""

    def __repr__(self) -> str:
        return "the lock's own"


DEFAULT = Default()


class Hold:
    """A lock that is held. Use it in a `with` block, or call `release` exactly once.

    The hold is live from the `_begin` of its kind on, which enters it into the registry of the process.

    `acquired_at` is wall-clock time, for people. `token` grows with every acquisition of a lock that can be taken away
    from its holder; a kernel lock cannot be, and has None.
    """

    __slots__ = ("__weakref__", "_is_closed", "_is_counted", "_registry", "acquired_at", "lock")

    lock: BaseLock[Any]
    acquired_at: float
    token: int | None = None
    _is_closed: bool  # set by `_release`
    _registry: process.Registry

    def _adopt(self) -> None:
        """Another thread has acquired this hold for the caller."""
        entry = self._registry.holds.get(id(self))
        if entry is not None:
            self._registry.holds[id(self)] = (entry[0], entry[1], process.owner(), entry[3])

    def _owner(self) -> object:
        """The task or thread that acquired it. None: it is released, or the task is gone."""
        entry = self._registry.holds.get(id(self))
        if entry is None:
            return None
        thread, task = entry[2]
        return thread if task is None else task()

    def _not_held(self) -> HoldfastError:
        path = self.lock.path
        if self._registry is not process.registry:
            return NotOwner(
                f"{path}: this hold was acquired before a fork. It belongs to the parent process; acquire one here.",
                path=path,
            )
        return NotLocked(f"{path}: this hold has been released already.", path=path)

    def _release(self) -> bool:
        """Give it back. False: it was lost before. Raises only what the system raised, and releases all the same."""
        raise NotImplementedError

    def _still_named(self) -> bool:
        """Does the path still name what this hold locked?"""
        raise NotImplementedError

    def fileno(self) -> int:
        """The descriptor that carries the lock. A child that inherits it keeps the lock alive if this process dies."""
        raise NotImplementedError

    @property
    def _is_live(self) -> bool:
        registry = getattr(self, "_registry", None)
        return registry is not None and id(self) in registry.holds

    @property
    def released(self) -> bool:
        return id(self) not in self._registry.holds or self._registry is not process.registry

    @property
    def lost(self) -> bool:
        """True if the lock was taken away from this hold. False as long as it is good, and once it is released."""
        return not self.released and not self._still_named()

    def check(self) -> None:
        """Raise unless this hold is good at this moment."""
        if self.released:
            raise self._not_held()
        if not self._still_named():
            raise self._loss()

    def _loss(self) -> LockLost:
        if not getattr(self, "_is_counted", False):
            self._is_counted = True
            self.lock._metrics.losses.bump()
        return LockLost(
            f"{self.lock.path}: the lock is lost: its file was removed or replaced while it was held. Somebody else "
            "may hold it now; check what this process did since, and find out what deletes the file.",
            path=self.lock.path,
        )

    def release(self) -> None:
        """Give the lock back. Raises NotLocked the second time, LockLost if it was taken away meanwhile."""
        if process.forks:  # perhaps the fork hook of another module, in a child, and before ours
            process.current_registry()
        ours = False
        try:
            # Popping the entry is atomic: of two threads that release at once, one gets it.
            if self._registry.holds.pop(id(self), None) is not None:
                ours = True
                if self._release():
                    return
        except BaseException:  # perhaps an interrupt, before anything was done
            self._finish_release()
            raise
        raise self._loss() if ours else self._not_held()

    def _finish_release(self) -> None:
        if not self._is_closed and self._registry is process.registry and id(self) not in self._registry.holds:
            self._release()

    async def arelease(self) -> None:
        """`release`, for tasks. It takes microseconds; up to 0.01 s while another process removes the same file."""
        self.release()

    def __enter__(self: HoldType) -> HoldType:
        if self.released:
            raise self._not_held()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._registry is not process.registry:
            return  # a forked child leaves its parent's block: nothing of its own to release
        if error is None:
            self.release()
            return
        try:  # the caller's own exception matters more than what went wrong with the lock
            self.release()
        except (HoldfastError, OSError):
            pass

    async def __aenter__(self: HoldType) -> HoldType:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __del__(self) -> None:
        try:
            if self._is_closed or self._registry is not process.current_registry():
                return
            entry = None
            try:
                entry = self._registry.holds.pop(id(self), None)
                if entry is not None:
                    self._release()  # first: where warnings are errors, nothing comes after them
            except BaseException:
                self._finish_release()
                raise
        except AttributeError:  # never got as far as being held, or the interpreter is going down
            return
        if entry is not None:
            if sys.is_finalizing():
                return
            text = f"a hold on {self.lock.path} was never released; keep what acquire() returns until then"
            import logging
            import warnings

            # Python shows no ResourceWarning unless asked to, and a lock that was not held is worth a word.
            logging.getLogger("holdfast").warning(text)
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.lock!r}{', released' if self.released else ''}>"


class BaseLock(Generic[HoldType]):
    """What every lock can do."""

    __slots__ = ("_entered", "_metrics", "fair", "mode", "path", "timeout")

    _options: tuple[str, ...] = ()  # the names of its parameters besides the path

    def __init__(self, path: StrPath, kind: str, timeout: float | None, fair: bool, mode: int) -> None:
        self.path = absolute(path)
        self.timeout = check_timeout(timeout)
        self.fair = fair
        self.mode = mode
        self._metrics = metrics.kinds.get(kind) or metrics.kind(kind)
        self._entered: list[Hold] = []

    def _first_attempt(self) -> HoldType | Outcome:
        """`_attempt`, unless others are first in the queue."""
        raise NotImplementedError

    def _attempt(self) -> HoldType | Outcome:
        raise NotImplementedError

    def _file_was_replaced(self, retries: int) -> None:
        """Called for every REPLACED, with their number in a row."""

    def _queue_is_alive(self) -> bool:
        """After QUEUED: is any of the waiters alive?"""
        raise NotImplementedError

    def _steps(self, deadline: float | None, *, asynchronous: bool) -> wait.Steps[HoldType]:
        raise NotImplementedError

    def status(self) -> Status:
        """Return who holds the lock and who waits for it. Does not acquire it.

        In a container, whose /proc does not show every process, it may lock the file for a moment. Other processes
        try again then.
        """
        raise NotImplementedError

    def try_acquire(self) -> HoldType | None:
        """The lock if it is free at this moment and nobody queues for it, else None."""
        found = self._first_attempt()
        return found if found else wait.drive(self._settle(found))

    def _settle(self, found: HoldType | Outcome) -> wait.Steps[HoldType | None]:
        """Try again, without waiting for a holder. None: it is busy, or a living waiter is in its queue."""
        replaced = removals = 0
        backoff = None
        while isinstance(found, Outcome):
            if found is BUSY or (found is QUEUED and self._queue_is_alive()):
                return None
            if found is REMOVING:
                removals += 1
                if removals > MAX_REMOVALS:
                    return None
                # About 0.1 s in all: on a busy machine the process that removes the file has to wait for its turn.
                yield wait.Pause(monotonic() + min(removals * removals * _MIN_PAUSE_S, _MAX_PAUSE_S))
            elif found is REPLACED:
                replaced += 1
                if replaced > _MAX_RETRIES:
                    return None
                self._file_was_replaced(replaced)
                if replaced > _MAX_QUICK_RETRIES:
                    backoff = backoff or wait.Backoff(_MIN_PAUSE_S, _MAX_PAUSE_S)
                    yield backoff.pause(None)
            found = yield from self._attempt_step(self._attempt)
        return found

    def _attempt_step(
        self, attempt: Callable[..., HoldType | Outcome], **options: bool
    ) -> wait.Steps[HoldType | Outcome]:
        """One attempt; by a task in a thread, if it may wait for a disk."""
        if not self._may_block:
            return attempt(**options)
        step = wait.Run(lambda: attempt(**options))
        try:
            yield step
        except BaseException:
            if isinstance(step.result, Hold):  # cancelled meanwhile
                step.result.release()
            raise
        found: HoldType | Outcome = step.outcome()
        if isinstance(found, Hold):
            found._adopt()
        return found

    def acquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """Wait for the lock: for ever (None), for some seconds, or not at all (0). Raises Timeout, or Busy for 0.

        Keep the hold that it returns: one that is dropped is released. In a task, use `async with` or `aacquire`.
        """
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        found = self._first_attempt()
        return found if found else self._acquire_later(found, timeout)

    def _acquire_later(self, found: HoldType | Outcome, timeout: float | None) -> HoldType:
        """`acquire` after the first attempt."""
        if timeout == 0:
            hold = wait.drive(self._settle(found))
            if hold is not None:
                return hold
            raise self._timed_out(0)
        return wait.drive(self._wait(timeout, asynchronous=False))

    _may_block = False  # True: an attempt waits for a disk, so that tasks make it in a thread

    async def _afirst_attempt(self) -> HoldType | Outcome:
        if not self._may_block:
            from anyio.lowlevel import checkpoint

            await checkpoint()
        return await wait.adrive(self._attempt_step(self._first_attempt))

    async def atry_acquire(self) -> HoldType | None:
        """`try_acquire` for asyncio and trio. It does not wait for a holder, and lets other tasks run."""
        found = await self._afirst_attempt()
        return await wait.adrive(self._settle(found)) if isinstance(found, Outcome) else found

    async def aacquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """`acquire` for asyncio and trio. Cancelling it leaves nothing behind."""
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        found = await self._afirst_attempt()
        if not isinstance(found, Outcome):
            return found
        if timeout == 0:
            hold = await wait.adrive(self._settle(found))
            if hold is not None:
                return hold
            from ..offload import in_thread

            raise await in_thread(lambda: self._timed_out(0))
        return await wait.adrive(self._wait(timeout, asynchronous=True))

    def _wait(self, timeout: float | None, *, asynchronous: bool) -> wait.Steps[HoldType]:
        """`_steps` with what every wait has: a deadline, a measurement, and an error that says who is in the way."""
        began = monotonic()
        try:
            hold = yield from self._steps(None if timeout is None else began + timeout, asynchronous=asynchronous)
        except wait.DeadlinePassed:
            self._metrics.timeouts.bump()
            look = wait.Run(lambda: self._timed_out(timeout or 0))  # it reads all of /proc, perhaps
            yield look
            raise look.outcome() from None
        self._metrics.waited(monotonic() - began)
        return hold

    def _timed_out(self, timeout: float) -> Timeout:
        status = self.status()
        who = status.explain() if status.held or status.waiters else "it was held a moment ago and is free now"
        if timeout == 0:
            error: Timeout = Busy(f"{self.path} is busy: {who}. Give a timeout to wait for it.", path=self.path)
        else:
            error = Timeout(
                f"{self.path}: not acquired within {timeout:g} s: {who}. Wait longer with timeout=…, or for ever with "
                "timeout=None.",
                path=self.path,
            )
        error.status = status
        return error

    def __enter__(self) -> HoldType:
        found = self._first_attempt()
        hold: HoldType = found if found else self._acquire_later(found, self.timeout)
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
        try:
            hold = entered.pop()
        except IndexError:
            raise NotLocked(f"{self.path}: nobody has entered it", path=self.path) from None
        if entered:
            hold = self._exchange_for_own(hold)
        if error is not None:
            hold.__exit__(kind, error, trace)
            return
        try:
            hold.release()
        except NotOwner:
            pass  # a forked child leaves its parent's block: nothing of its own to release

    def _exchange_for_own(self, last: Hold) -> Hold:
        """Several threads or tasks are in a block of this lock: find the hold of the caller.

        One that was released inside its block has no owner any more. A block may also be left by another thread or task
        than it was entered by: an asynchronous generator that nobody finished is closed by a new one. Then the last
        hold will do, because the holds of a lock are as good as each other.
        """
        holds = [last, *reversed(self._entered)]
        for wanted in (process.caller(), None):
            for hold in holds:
                if hold._owner() is wanted:
                    return hold if hold is last else self._exchange(last, hold)
        return last

    def _exchange(self, last: Hold, own: Hold) -> Hold:
        try:
            self._entered.remove(own)
        except ValueError:  # another thread that leaves its block has just taken it
            return last
        self._entered.append(last)
        return own

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    @property
    def release(self) -> Callable[[], None]:
        """A lock has no release: release the hold. (Not in `__getattr__`, which would make every attribute slower.)"""
        raise AttributeError("a lock has no release; release what acquire() returned: hold = lock.acquire()")

    def __repr__(self) -> str:
        return f"holdfast.{type(self).__name__}({self.path!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """A lock is a description, and so can be sent to another process; what is held stays here."""
        return _describe_again, (type(self), self.path, {name: getattr(self, name) for name in self._options})


def _describe_again(kind: type[BaseLock[Any]], path: str, options: dict[str, Any]) -> BaseLock[Any]:
    return kind(path, **options)


def check_timeout(timeout: float | Default | None) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
        raise ValueError(f"timeout is seconds, 0 for one try, or None to wait for ever; not {timeout!r}")
    return None if timeout == float("inf") else timeout


def would_deadlock(path: str, asynchronous: bool, what: str) -> WouldDeadlock:
    return WouldDeadlock(
        f"{path}: this {'task' if asynchronous else 'thread'} {what} already and would wait for itself. Release first, "
        "or pass the hold along.",
        path=path,
    )
