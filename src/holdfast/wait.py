"""Waiting: what an acquire algorithm may wait for, and the two drivers that do it.

An algorithm is a generator. It tries, yields what it wants to wait for, is resumed when that has come or its time is
over, and tries again; it returns what it acquired and raises when its deadline has passed. Being resumed promises
nothing: the algorithm always looks for itself. It never knows which driver runs it.

    drive(steps)          blocks the calling thread
    await adrive(steps)   lets the other tasks run, under asyncio or trio

When a wait is interrupted (KeyboardInterrupt, cancellation), the driver closes the generator, whose `finally` blocks
leave nothing behind: that is the only clean-up path, and both drivers share it.

Clocks are monotonic. Nothing here knows what a lock is.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, TypeVar

    Result = TypeVar("Result")
    Steps = Generator["Step", None, Result]

FIRST_PAUSE, LONGEST_PAUSE = 0.010, 0.500
SAFETY_LOOK = 1.0


class DeadlinePassed(Exception):
    """Raised by an algorithm whose time is over; the lock that runs it makes a readable error of it."""


class Step:
    """One thing to wait for, until `until` (monotonic seconds; None: as long as it takes)."""

    __slots__ = ("until",)

    def __init__(self, until: float | None) -> None:
        self.until = until

    def left(self) -> float | None:
        # At most an hour at a time, which every system call can express; the algorithm looks and waits again.
        return None if self.until is None else min(max(0.0, self.until - monotonic()), 3600.0)

    def block(self) -> None:
        raise NotImplementedError

    async def wait(self) -> None:
        raise NotImplementedError


class Readable(Step):
    """Until a descriptor can be read: an inotify instance, the FIFO of the waiter in front."""

    __slots__ = ("fd",)

    def __init__(self, fd: int, until: float | None) -> None:
        self.fd = fd
        self.until = until

    def block(self) -> None:
        import select

        left = self.left()
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        # Rounded up: a wait that ends too early is a wait more.
        poll.poll(None if left is None else int(left * 1000) + 1)

    async def wait(self) -> None:
        import anyio

        left = self.left()
        with anyio.move_on_after(left):
            await anyio.wait_readable(self.fd)


class Pause(Step):
    """For a while: where no event can be had."""

    __slots__ = ()

    def block(self) -> None:
        sleep(self.left() or 0.0)

    async def wait(self) -> None:
        import anyio

        await anyio.sleep(self.left() or 0.0)


class Granted(Step):
    """Until the kernel grants the lock. Only the blocking driver can do this, and only without a deadline."""

    __slots__ = ("fd", "lock", "op")

    def __init__(self, lock: Callable[[int, int], None], fd: int, op: int) -> None:
        self.lock = lock
        self.fd = fd
        self.op = op
        self.until = None

    def block(self) -> None:
        self.lock(self.fd, self.op)


class Bell:
    """Rung by another thread or task of this process, at most once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        self._lock.release()

    def block(self, left: float | None) -> None:
        if self._lock.acquire(timeout=-1 if left is None else left):
            self._lock.release()

    async def wait(self, left: float | None) -> None:
        raise NotImplementedError


class AsyncBell(Bell):
    __slots__ = ("_event", "_from_outside")

    def __init__(self) -> None:
        import anyio

        self._event = anyio.Event()
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_run():
            self._from_outside: Callable[..., Any] = trio.lowlevel.current_trio_token().run_sync_soon
        else:
            import asyncio

            self._from_outside = asyncio.get_running_loop().call_soon_threadsafe

    def ring(self) -> None:
        try:
            self._from_outside(self._event.set)
        except RuntimeError:
            pass  # that loop is gone, and its waiter with it
        except Exception as error:
            if type(error).__name__ != "RunFinishedError":
                raise

    async def wait(self, left: float | None) -> None:
        import anyio

        with anyio.move_on_after(left):
            await self._event.wait()


class Rung(Step):
    """Until a bell rings."""

    __slots__ = ("bell",)

    def __init__(self, bell: Bell, until: float | None) -> None:
        self.bell = bell
        self.until = until

    def block(self) -> None:
        self.bell.block(self.left())

    async def wait(self) -> None:
        await self.bell.wait(self.left())


class Backoff:
    """Pauses that double from 10 to 500 ms, each shortened at random by up to half so that pollers spread out."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def pause(self, deadline: float | None) -> Pause:
        from random import uniform

        length = uniform(self._next / 2, self._next)
        self._next = min(self._next * 2, LONGEST_PAUSE)
        return Pause(sooner(monotonic() + length, deadline))


def sooner(moment: float, deadline: float | None) -> float:
    return moment if deadline is None or moment < deadline else deadline


def check_deadline(deadline: float | None) -> None:
    if deadline is not None and monotonic() >= deadline:
        raise DeadlinePassed


def drive(steps: Steps[Result]) -> Result:
    try:
        while True:
            try:
                step = next(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            step.block()
    finally:
        steps.close()


async def adrive(steps: Steps[Result]) -> Result:
    try:
        while True:
            try:
                step = next(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            await step.wait()
    finally:
        steps.close()
