"""Waiting: what an acquire algorithm may wait for, and the two drivers that do it.

An algorithm is a generator. It tries, yields what it wants to wait for, is resumed when that has come or its time is
over, and tries again. It returns what it acquired, and raises when its deadline has passed. That it is resumed proves
nothing: the algorithm attempts again. It does not know which driver runs it.

    drive(steps)          blocks the calling thread
    await adrive(steps)   other tasks run meanwhile, under asyncio or trio

When a wait is interrupted (KeyboardInterrupt, cancellation), the driver closes the generator. The `finally` blocks of
the generator clean up. There is no other clean-up, and both drivers use it.

    Readable(fd)       a descriptor can be read
    Pause()            some time has passed
    Granted(...)       the kernel has granted a lock; blocks the thread
    Notified()         another thread or task of this process has called `notify`
    Run(function)      a call that may block (fsync, a server) has returned; the async driver runs it in a thread

Clocks are monotonic. Nothing here knows what a lock is. Under gevent and eventlet, which replace `time.sleep`, `select`
and `threading` with functions that let other greenlets run, no step blocks the thread in another way.
"""

from __future__ import annotations

import sys
import threading
import time
from time import monotonic

from . import process
from .errors import NotOwner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, TypeVar

    Result = TypeVar("Result")
    Steps = Generator["Step", None, Result]

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.010, 0.500
RECHECK_S = 1.0  # after this time a waiter attempts again, even without an event


class DeadlinePassed(Exception):
    """Raised by an algorithm when its deadline has passed. The lock turns it into a `Timeout`."""


class Stopped(Exception):
    """Raised by `drive` when its `stop` function returned True."""


class Step:
    """One thing to wait for, until `until` (monotonic seconds; None: as long as it takes)."""

    __slots__ = ("until",)

    def __init__(self, until: float | None) -> None:
        self.until = until

    def left(self) -> float | None:
        # At most an hour, which every system call can express. Then the algorithm attempts and waits again.
        return None if self.until is None else min(max(0.0, self.until - monotonic()), 3600.0)

    def block(self) -> None:
        raise NotImplementedError

    async def wait(self) -> None:
        raise NotImplementedError


class Readable(Step):
    """Wait until a descriptor can be read: an inotify instance, or the FIFO of the waiter in front."""

    __slots__ = ("fd",)

    def __init__(self, fd: int, until: float | None) -> None:
        self.fd = fd
        self.until = until

    def block(self) -> None:
        poll([self.fd], self.left())

    async def wait(self) -> None:
        import anyio

        with anyio.move_on_after(self.left()):
            await anyio.wait_readable(self.fd)


class Pause(Step):
    """Wait for some time, where the system reports no events."""

    __slots__ = ()

    def block(self) -> None:
        time.sleep(self.left() or 0.0)

    async def wait(self) -> None:
        import anyio

        await anyio.sleep(self.left() or 0.0)


class Granted(Step):
    """Wait until the kernel grants the lock. Only for the blocking driver, and only without a deadline."""

    __slots__ = ("fd", "lock", "op")

    def __init__(self, lock: Callable[[int, int], None], fd: int, op: int) -> None:
        self.lock = lock
        self.fd = fd
        self.op = op
        self.until = None

    def block(self) -> None:
        self.lock(self.fd, self.op)


class Notified(Step):
    """Wait until another thread or task of this process calls `notify`."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        self._lock.release()

    def is_dead(self) -> bool:
        """Can the waiter never run again, because its event loop was closed?"""
        return False

    def block(self) -> None:
        left = self.left()
        if self._lock.acquire(timeout=-1 if left is None else left):
            self._lock.release()


class AsyncNotified(Notified):
    """The same for a task."""

    __slots__ = ("_event", "_is_closed", "_run_soon")

    def __init__(self) -> None:
        import anyio

        self._event = anyio.Event()
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_run():
            self._run_soon: Callable[..., Any] = trio.lowlevel.current_trio_token().run_sync_soon
            self._is_closed: Callable[[], bool] | None = None
        else:
            import asyncio

            loop = asyncio.get_running_loop()
            self._run_soon, self._is_closed = loop.call_soon_threadsafe, loop.is_closed

    def notify(self) -> None:
        self._call(self._event.set)

    def is_dead(self) -> bool:
        return self._is_closed() if self._is_closed is not None else not self._call(_nothing)

    def _call(self, function: Callable[[], object]) -> bool:
        try:
            self._run_soon(function)
        except RuntimeError:  # the event loop has ended
            return False
        return True

    async def wait(self) -> None:
        import anyio

        with anyio.move_on_after(self.left()):
            await self._event.wait()


def _nothing() -> None: ...


class Run(Step):
    """Wait until a function has returned. `outcome()` then returns its result, or raises its exception.

    The function runs once and to its end, even if the task that waits for it is cancelled. Then `undo` is called with
    the result, also in a thread.
    """

    __slots__ = ("_error", "_is_done", "_result", "_undo", "_work")

    def __init__(self, work: Callable[[], Any], undo: Callable[[Any], object] | None = None) -> None:
        self.until = None
        self._work = work
        self._undo = undo
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None

    def block(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._is_done = True

    async def wait(self) -> None:
        from anyio import CancelScope, CapacityLimiter, get_cancelled_exc_class
        from anyio.to_thread import run_sync

        mutex = threading.Lock()

        def call_once() -> None:
            with mutex:  # after a cancellation, a second thread waits here for the first
                if not self._is_done:
                    self.block()

        cancelled = None
        limiter = CapacityLimiter(1)  # a limiter of our own: the threads of the common one may all be waiting for us
        with CancelScope(shield=True):
            while not self._is_done:
                try:
                    await run_sync(call_once, limiter=limiter)
                except get_cancelled_exc_class() as error:  # asyncio's own `cancel`, which ignores the shield
                    cancelled = error
        if cancelled is not None:
            if self._undo is not None:
                await in_thread(self.take_back)
            raise cancelled from self._error

    def take_back(self) -> None:
        """Undo what the function did. More than once does no harm."""
        result, self._result = self._result, None
        if self._undo is not None and result is not None:
            self._undo(result)

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


async def in_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread, so that other tasks go on, and return its result or raise its exception.

    The call is made once and runs to its end. If the task is cancelled meanwhile, the cancellation is raised after it.
    """
    step = Run(work)
    await step.wait()
    return step.outcome()  # type: ignore[no-any-return]


def poll(fds: list[int], seconds: float | None) -> set[int]:
    """Wait until at least one of the descriptors can be read, and return those. None waits as long as it takes."""
    import select

    if not hasattr(select, "poll"):  # eventlet, Windows
        return {*select.select(fds, [], [], seconds)[0]}
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    # Rounded up: a wait that ends too early is one wait more.
    timeout = None if seconds is None else min(1 << 30, max(0, int(seconds * 1000 + 0.999)))
    return {fd for fd, _ in poller.poll(timeout)}


class Backoff:
    """Pauses that double up to half a second. Each is shortened at random by up to half, so that pollers spread out."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = _MIN_PAUSE_S

    def pause(self, deadline: float | None) -> Pause:
        from random import uniform

        length = uniform(self._next / 2, self._next)
        self._next = min(self._next * 2, _MAX_PAUSE_S)
        return Pause(sooner(monotonic() + length, deadline))


def sooner(moment: float, deadline: float | None) -> float:
    return moment if deadline is None or moment < deadline else deadline


def time_left(until: float) -> float:
    """The seconds until a moment. Never 0: many functions take a timeout of 0 as none, or fail before they look."""
    return max(0.001, until - monotonic())


def until_admitted(place: process.LinePlace, notified: Notified, deadline: float | None) -> Steps[None]:
    """Wait until a place in a line of this process is admitted. Raises `DeadlinePassed`."""
    while not place.admitted:
        check_deadline(deadline)
        notified.until = sooner(monotonic() + RECHECK_S, deadline)
        yield notified
        if not place.admitted:
            place.admit_next()


def check_deadline(deadline: float | None) -> None:
    if deadline is not None and monotonic() >= deadline:
        raise DeadlinePassed


class _Stop:
    """Calls a function that may end a wait: at every step, and at least once a second, or every so many seconds."""

    __slots__ = ("_every", "_function", "_next")

    def __init__(self, function: Callable[[], bool], every: float | None) -> None:
        self._function = function
        self._every = every
        self._next = 0.0

    def check(self, step: Step) -> None:
        """Raises `Stopped`. The step ends in time for the next call."""
        now = monotonic()
        if self._every is None or now >= self._next:
            if self._function():
                raise Stopped
            self._next = now + (RECHECK_S if self._every is None else self._every)
        step.until = sooner(self._next, step.until)


def drive(steps: Steps[Result], stop: Callable[[], bool] | None = None, every: float | None = None) -> Result:
    """Run an algorithm in this thread. `stop` is called about once a second: True ends the wait with `Stopped`.

    every: call `stop` once in so many seconds

    It is not called while the kernel grants a lock (`Granted`). An algorithm with a deadline does not wait like that.
    """
    registry = process.registry
    check = None if stop is None else _Stop(stop, every).check
    try:
        while True:
            try:
                step = next(steps)
                if check is not None:
                    check(step)
                step.block()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            finally:
                if process.registry is not registry:
                    raise _forked()
    finally:
        steps.close()


async def adrive(steps: Steps[Result], stop: Callable[[], bool] | None = None, every: float | None = None) -> Result:
    """Run an algorithm in this task. The parameters are those of `drive`."""
    registry = process.registry
    check = None if stop is None else _Stop(stop, every).check
    try:
        while True:
            try:
                step = next(steps)
                if check is not None:
                    check(step)
                await step.wait()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            finally:
                if process.registry is not registry:
                    raise _forked()
    finally:
        steps.close()


def _forked() -> NotOwner:
    """The error in a child that was forked during a wait, and that would go on with it.

    The descriptors of the wait are closed there. Their numbers may stand for other files of the child.
    """
    return NotOwner("this process was forked during a wait for a lock, which is its parent's. Acquire again here.")
