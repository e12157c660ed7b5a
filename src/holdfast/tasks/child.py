"""The processes of a worker: what they do, and what their supervisor knows of them."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from time import monotonic

from ..errors import HoldfastError
from .claim import Claim
from .idle import Idle
from .queue import TaskQueue

_NEVER = float("inf")
_GRACE = 1.0  # seconds for what ends itself
_DONE, _FAILED, _RETRIED, _GIVEN_BACK = range(4)


class Counts:
    """What the threads of a child have done, in memory that it shares with its supervisor, and so survives it."""

    def __init__(self, threads: int) -> None:
        self._memory = mmap.mmap(-1, 32 * threads)
        self._cells = memoryview(self._memory).cast("Q")

    def of(self, thread: int) -> memoryview:
        return self._cells[4 * thread : 4 * thread + 4]

    def total(self) -> list[int]:
        return [sum(self._cells[kind::4]) for kind in range(4)]


class Child:
    """What a supervisor knows of a child."""

    def __init__(self, pid: int, fd: int, counts: Counts) -> None:
        self.pid = pid
        self.fd = fd
        self.counts = counts
        self.tasks: dict[str, tuple[float, float]] = {}  # by place: when each is to be ended, after how many seconds
        self.was_killed = False
        self._rest = b""

    @property
    def deadline(self) -> float:
        return min((deadline for deadline, _ in self.tasks.values()), default=_NEVER)

    def hear(self) -> bool:
        """Read what it says. False: it is dead."""
        os.set_blocking(self.fd, False)
        while True:
            try:
                text = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not text:
                return False
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                self._understand(line)

    def _understand(self, line: bytes) -> None:
        kind, _, rest = line.decode().partition(" ")
        if kind == "begin":
            seconds, _, place = rest.partition(" ")
            self.tasks[place] = (monotonic() + float(seconds), float(seconds))
        elif kind == "end":
            self.tasks.pop(rest, None)


class Loop:
    """One thread of a child: takes a task, does it, and takes the next one."""

    def __init__(
        self,
        queue: TaskQueue,
        run: Callable[[Claim], object],
        hooks: tuple[Callable[..., object] | None, ...],
        stop: int,
        tell: Callable[[bytes], None],
        counts: memoryview,
        *,
        drain: bool,
        tells: bool,
    ) -> None:
        self._queue = queue
        self._run = run
        self._on_start, self._on_done, self._on_failed = hooks
        self._stop = stop
        self._tell = tell
        self._drain = drain
        self._tells = tells
        self._counts = counts

    def work(self) -> None:
        with Idle(self._queue) as idle:
            while not _readable(self._stop):
                claim = self._queue.taker.try_claim() or self._wait(idle)
                if claim is None:
                    return
                self._do(claim)

    def _wait(self, idle: Idle) -> Claim | None:
        return idle.wait(None, self._stop, enough=self._queue.is_empty if self._drain else None)

    def _do(self, claim: Claim) -> None:
        task = claim.task
        tells = self._tells or task.timeout is not None
        if tells:
            longest = (task.timeout or _NEVER) + (_GRACE if getattr(self._run, "ends_itself", False) else 0)
            self._tell(b"begin %f %s\n" % (longest, claim.place.encode()))
        try:
            if self._on_start is not None:
                self._on_start(claim)
            result = self._run(claim)
        except BaseException as error:
            self._failed(claim, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._completed(claim, result)
        finally:
            if tells:
                self._tell(b"end %s\n" % claim.place.encode())

    def _completed(self, claim: Claim, result: object) -> None:
        try:
            claim.complete(result)
        except (TypeError, ValueError) as error:  # what JSON cannot say
            self._failed(claim, error)
            return
        except HoldfastError as error:
            _log(error)  # it was taken from us: another one does it
            return
        self._counts[_DONE] += 1
        if self._on_done is not None:
            self._on_done(claim)

    def _failed(self, claim: Claim, error: BaseException) -> None:
        try:
            if claim.cancelled:
                claim.cancel()
            elif claim.fail(error):
                self._counts[_RETRIED] += 1
            else:
                self._counts[_FAILED] += 1
        except HoldfastError as lost:
            _log(lost)
            return
        if self._on_failed is not None:
            self._on_failed(claim, error)


def work(
    queue: TaskQueue,
    run: Callable[[Claim], object],
    hooks: tuple[Callable[..., object] | None, ...],
    stop: int,
    tell: int,
    counts: Counts,
    *,
    threads: int,
    drain: bool,
    tells: bool,
) -> int:
    """All that a child does. Gives its exit status."""
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, _do_nothing)  # its supervisor says when it is time. (What it starts does not inherit this.)

    def say(text: bytes) -> None:
        os.write(tell, text)

    loops = [
        Loop(queue.reopened(), run, hooks, stop, say, counts.of(thread), drain=drain, tells=tells)
        for thread in range(threads)
    ]
    if threads == 1:
        loops[0].work()
    else:
        running = [threading.Thread(target=loop.work, daemon=True) for loop in loops]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    return 0


def _do_nothing(number: int, frame: object) -> None:
    pass


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


def _log(error: BaseException) -> None:
    import logging

    logging.getLogger("holdfast").warning("%s", error)
