"""The child process of a worker for coroutines: one event loop runs many tasks at a time.

The loop never waits for the queue. A second thread does: it settles the tasks that have ended, and claims as many as
there is room for. It sleeps until a task ends, a task may be ready, or the child is to stop. It also calls the hooks.

A coroutine is cancelled when its timeout has passed or when its task was cancelled. A plain function runs in a thread,
which cannot be ended: the supervisor kills this process, and the other tasks go back.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic

from .. import system
from ..errors import HoldfastError
from ..files import pipe
from ..wait import poll
from .child import Link, Work, run_or_leave, wait_for_space
from .claim import Claim
from .claimer import Claimer
from .errors import Cancelled, TaskError
from .handler import GRACE_S, is_async, late_text
from .store import Woken

_LOOK_S = 0.25  # between two looks at cancelled tasks, while tasks run


class Loop:
    """Runs up to `work.size` tasks at a time."""

    def __init__(self, work: Work, link: Link) -> None:
        self._work, self._link = work, link
        self._reader, self._writer = pipe()
        os.set_blocking(self._writer.fd, False)
        self._ended: deque[tuple[Claim, object, BaseException | None]] = deque()  # with the result, or the failure
        self._reports: deque[Callable[[], None]] = deque()  # of progress
        # Only the queue's thread uses these:
        self._busy = 0
        self._looked_at = 0.0
        self._executor = ThreadPoolExecutor(work.size, "holdfast-task")
        # Only the loop's thread uses these:
        self._tasks: set[asyncio.Task[None]] = set()
        self._coroutines: dict[tuple[str, int], asyncio.Task[None] | None] = {}
        self._reasons: dict[tuple[str, int], TaskError] = {}  # why they were cancelled

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def serve() -> None:
            self._serve()
            self._loop.call_soon_threadsafe(finished.set)

        threading.Thread(target=run_or_leave, args=(serve,), daemon=True).start()
        await finished.wait()

    # The thread of the queue.

    def _serve(self) -> None:
        claimer = self._work.claimer(self._link)
        while True:
            is_stopping = self._link.is_stopping
            try:
                while self._reports:
                    with suppress(HoldfastError):
                        self._reports.popleft()()
                while self._ended:
                    self._busy -= 1
                    self._work.finish(*self._ended.popleft(), self._link)
                if self._busy and monotonic() - self._looked_at > _LOOK_S:
                    self._cancel_all()
                free = 0 if is_stopping else self._work.size - self._busy
                claims = claimer.next_ones(free) if free else []
            except OSError as error:
                wait_for_space(error)
                continue
            self._busy += len(claims)
            for claim in claims:
                claim.later = self._report
                self._work.call_hook(self._work.on_start, claim)
                self._loop.call_soon_threadsafe(self._start, claim)
            if not self._busy and (is_stopping or self._work.is_drained()):
                break
            if is_stopping:
                claimer.worker.leave()
            if not claims:
                self._wait(claimer, free > 0, is_stopping)
        claimer.close()

    def _cancel_all(self) -> None:
        self._looked_at = monotonic()
        for key in self._work.queue.store.cancelling():
            self._loop.call_soon_threadsafe(self._cancel, key, Cancelled("cancelled"))

    def _wait(self, claimer: Claimer, has_room: bool, is_stopping: bool) -> None:
        fds = [self._reader.fd] if is_stopping else [self._reader.fd, self._link.fd]
        seconds = _LOOK_S if self._busy else 3600.0
        if not has_room:
            poll(fds, seconds)
        elif claimer.store.wait(claimer.worker, seconds, *fds) is Woken.DEATH:
            claimer.recover()
        if poll([self._reader.fd], 0):
            system.read(self._reader.fd, 4096)

    # The thread of the loop.

    def _start(self, claim: Claim) -> None:
        task = self._loop.create_task(self._do(claim))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, claim: Claim) -> None:
        result: object = None
        failure: BaseException | None = None
        timer = None
        key = (claim.id, claim.token)
        try:
            call = self._work.find(claim)
            if is_async(call.func):
                self._link.begin(claim, GRACE_S)
                self._coroutines[key] = asyncio.current_task()
                if claim.timeout is not None:
                    timer = self._loop.call_later(claim.timeout, self._cancel, key, TaskError(late_text(claim.timeout)))
                result = await call()
            else:
                self._link.begin(claim, 0.0)
                result, failure = await self._loop.run_in_executor(self._executor, _call, call)
        except BaseException as error:  # also SystemExit, which would end the loop
            failure = error
        if timer is not None:
            timer.cancel()
        self._coroutines.pop(key, None)
        reason = self._reasons.pop(key, None)
        if reason is not None and isinstance(failure, asyncio.CancelledError):
            failure = reason
        self._link.end(claim)
        self._ended.append((claim, result, failure))
        self._wake()

    def _report(self, write: Callable[[], None]) -> None:
        self._reports.append(write)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full of earlier bytes
            system.write(self._writer.fd, b"!")

    def _cancel(self, key: tuple[str, int], reason: TaskError) -> None:
        task = self._coroutines.pop(key, None)
        if task is not None:
            self._reasons[key] = reason
            task.cancel()


def _call(call: Callable[[], object]) -> tuple[object, BaseException | None]:
    """A future cannot carry every exception."""
    try:
        return call(), None
    except BaseException as error:
        return None, error
