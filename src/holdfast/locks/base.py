"""The face of every lock, and of what acquiring it gives.

A lock object is a description: a path and how to lock it. It can be used again and again, by any thread or task, and
holds nothing itself. Acquiring gives a `Hold`, the live thing:

    free ── acquire ──▶ held ── release ──▶ released
                         │ └─ the file is removed or replaced by somebody ─▶ lost (check and release raise LockLost)
                         └─ fork ─▶ the child's copy is nobody's (release raises NotOwner)

A kind of lock provides `_try` (one attempt, no waiting, no generator: the fast path), `_steps` (the whole algorithm,
for a driver of `wait`) and `status`. It gets the rest from here, once.
"""

from __future__ import annotations

import sys
from time import monotonic, time

from .. import gate, metrics, system, wait
from ..errors import Busy, HoldfastError, LockLost, NotLocked, NotOwner, Timeout
from ..paths import absolute

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Generic, TypeVar

    from ..status import Status

    StrPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
    HoldType = TypeVar("HoldType", bound="Hold")
else:  # Generic would import typing

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


class Hold:
    """A lock that is held. Use it in a `with` block, or call `release` exactly once.

    Whoever makes one has it before it has a file, and only then says `_begin`: an interrupt that came between making it
    and keeping it would drop it, and so close a file that its maker closes, too.

    `acquired_at` is wall-clock time, for people. `token` grows with every acquisition of a lock that can be taken away
    from its holder; a kernel lock cannot be, and has None.
    """

    __slots__ = ("__weakref__", "_book", "_is_closed", "_is_counted", "_outer", "_serial", "acquired_at", "lock")

    lock: BaseLock[Any]
    acquired_at: float
    token: int | None = None

    def _begin(self, lock: BaseLock[Any], fd: int, inode: gate.Inode, shared: bool) -> None:
        self.lock = lock
        self.acquired_at = time()
        self._outer: Hold | None = None
        self._book = gate.book
        self._serial = self._book.write_down(fd, inode, shared)

    @property
    def _has_begun(self) -> bool:
        """Does it have a file, which is its own to close?"""
        return getattr(self, "_serial", None) in gate.book.holds

    def _not_held(self) -> HoldfastError:
        path = self.lock.path
        if self._book is not gate.book:
            return NotOwner(
                f"{path}: this hold was acquired before a fork. It belongs to the parent process; acquire one here.",
                path=path,
            )
        return NotLocked(f"{path}: this hold has been released already.", path=path)

    def _release(self, entry: gate.Entry) -> bool:
        """Give it back. False: it was lost before. Raises only what the system raised, and releases all the same."""
        raise NotImplementedError

    def _still_named(self) -> bool:
        """Does the path still name what this hold locked?"""
        entry = self._book.holds.get(self._serial)
        return entry is not None and self.lock._names(entry[1])

    def fileno(self) -> int:
        """The descriptor that carries the lock. A child that inherits it keeps the lock alive if this process dies."""
        entry = self._book.holds.get(self._serial) if self._book is gate.book else None
        if entry is None:
            raise self._not_held()
        return entry[0]

    @property
    def released(self) -> bool:
        return self._book is not gate.book or self._serial not in self._book.holds

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
        book = self._book
        entry = book.holds.get(self._serial) if book is gate.book else None
        if entry is None:
            raise self._not_held()
        ours = good = False
        try:
            # Popping the entry is atomic, so of two threads that release at once one gets it and the other is told.
            ours = book.holds.pop(self._serial, None) is not None
            good = ours and self._release(entry)
        except BaseException:  # also a signal's handler may have raised it, perhaps before anything was done
            self._finish_release(entry)
            raise
        if not good:
            raise self._loss() if ours else self._not_held()

    def _finish_release(self, entry: gate.Entry) -> None:
        if not getattr(self, "_is_closed", False) and self._serial not in self._book.holds:
            self._release(entry)

    async def arelease(self) -> None:
        """The same: releasing never waits."""
        self.release()

    def __enter__(self: HoldType) -> HoldType:
        if self.released:
            raise self._not_held()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._book is not gate.book:
            return  # a forked child leaves its parent's block: nothing of its own to release
        if error is None:
            self.release()
            return
        try:  # the caller's own exception matters more than what went wrong with the lock
            self.release()
        except HoldfastError:
            pass

    async def __aenter__(self: HoldType) -> HoldType:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __del__(self) -> None:
        try:
            if self._serial not in self._book.holds or self._book is not gate.book:
                return
            entry = self._book.holds.pop(self._serial, None)
        except AttributeError:  # never got as far as being held, or the interpreter is going down
            return
        if entry is not None:
            self._release(entry)  # first: where warnings are errors, nothing comes after them
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
        self._entered: dict[object, Hold] = {}

    def _try(self) -> HoldType | None:
        raise NotImplementedError

    def _try_despite_queue(self) -> HoldType | None:
        """One more attempt where `_try` gave way to a queue in which nobody is alive."""
        return None

    def _steps(self, deadline: float | None, *, asynchronous: bool) -> wait.Steps[HoldType]:
        raise NotImplementedError

    def _names(self, inode: gate.Inode) -> bool:
        """Does the path name this inode now? Asked by the path as it was given, so that a swapped link is noticed."""
        try:
            st = system.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (st.st_dev, st.st_ino) == inode

    def status(self) -> Status:
        """Who holds it and who waits, from what the system knows. Takes nothing, and disturbs nobody."""
        raise NotImplementedError

    def try_acquire(self) -> HoldType | None:
        """The lock if it is free at this moment and nobody queues for it, else None."""
        return self._try() or self._try_despite_queue()

    def acquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """Wait for the lock: for ever (None), for some seconds, or not at all (0). Raises Timeout, or Busy for 0.

        Keep the hold that it returns: one that is dropped is released. In a task, use `async with` or `aacquire`.
        """
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        return self._try() or self._acquire_later(timeout)

    def _acquire_later(self, timeout: float | None) -> HoldType:
        """`acquire` after the first attempt failed."""
        if timeout == 0:
            hold = self._try_despite_queue()
            if hold is not None:
                return hold
            raise self._timed_out(0)
        return wait.drive(self._wait(timeout, asynchronous=False))

    async def atry_acquire(self) -> HoldType | None:
        """`try_acquire` for asyncio and trio: it does not wait, and lets others run."""
        from anyio.lowlevel import checkpoint

        await checkpoint()
        return self.try_acquire()

    async def aacquire(self, timeout: float | Default | None = DEFAULT) -> HoldType:
        """`acquire` for asyncio and trio. Cancelling it leaves nothing behind."""
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        hold = await self.atry_acquire()
        if hold is not None:
            return hold
        if timeout == 0:
            raise self._timed_out(0)
        return await wait.adrive(self._wait(timeout, asynchronous=True))

    def _wait(self, timeout: float | None, *, asynchronous: bool) -> wait.Steps[HoldType]:
        """`_steps` with what every wait has: a deadline, a measurement, and an error that says who is in the way."""
        began = monotonic()
        try:
            hold = yield from self._steps(None if timeout is None else began + timeout, asynchronous=asynchronous)
        except wait.DeadlinePassed:
            self._metrics.timeouts.bump()
            raise self._timed_out(timeout or 0) from None
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

    # A lock may be entered by several threads and tasks at once, so each finds its own hold again by who it is.
    def __enter__(self) -> HoldType:
        hold = self._try() or self._acquire_later(self.timeout)
        who = gate.caller()
        hold._outer = self._entered.get(who)
        self._entered[who] = hold
        return hold

    async def __aenter__(self) -> HoldType:
        hold = await self.aacquire()
        who = gate.caller()
        hold._outer = self._entered.get(who)
        self._entered[who] = hold
        return hold

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        who = gate.caller()
        hold = self._entered.pop(who, None) or self._entered_elsewhere()
        if hold._outer is not None:
            self._entered[who] = hold._outer
        if error is not None or hold._book is not gate.book:
            hold.__exit__(kind, error, trace)
            return
        hold.release()

    def _entered_elsewhere(self) -> Hold:
        """A block may be left by another thread or task than it was entered by: an asynchronous generator that nobody
        finished is closed by a new one. The holds of a lock are as good as each other, so the last one will do."""
        try:
            return self._entered.popitem()[1]
        except KeyError:
            raise NotLocked(f"{self.path}: nobody has entered it", path=self.path) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    @property
    def release(self) -> Callable[[], None]:
        """There is none. (Not in `__getattr__`, which would make every attribute slower.)"""
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
