"""The child process of a worker for coroutines: one event loop runs many tasks at a time.

The loop never waits for the queue. A second thread does: it settles the tasks that have ended, several in one
transaction, and claims as many as there is room for. It sleeps until a task ends, a task may be ready, or the child is
to stop.

A coroutine is cancelled when its timeout has passed or when its task was cancelled. A plain function runs in a thread,
which cannot be ended: the supervisor kills this process, and the other tasks go back.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from ..files import pipe
from ..wait import poll
from .child import Hooks, Link, ending_of, log, run_or_leave, wait_for_space
from .claim import Claim
from .errors import TaskError
from .handler import GRACE_S, Runner, is_async, late_text
from .policy import outcome_of
from .queue import TaskQueue
from .store import Ending, Woken

CHECK_CANCELLED_S = 0.25  # while tasks run
_RECOVER_EVERY_S = 1.0

Outcome = tuple[Any, BaseException | None]
Ended = tuple[Claim, Ending | None, "asyncio.Future[bool]"]


class Cancelled(Exception):
    """The task was cancelled while it ran."""


class Loop:
    """Runs up to `size` tasks at a time."""

    def __init__(self, queue: TaskQueue, runner: Runner, hooks: Hooks, link: Link, size: int) -> None:
        self._runner, self._hooks, self._link, self._size = runner, hooks, link, size
        self._store = queue.store
        self._claimer = queue.new_claimer()
        self._claimer.on_recovered = link.count
        self._reader, self._writer = pipe()
        os.set_blocking(self._writer.fd, False)
        self._ended: deque[Ended] = deque()
        self._busy = 0  # tasks that are not settled. Only the queue's thread changes it
        self._executor = ThreadPoolExecutor(size, "holdfast-task")
        # Only the loop's thread uses these:
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[tuple[str, int], asyncio.Task[Outcome]] = {}
        self._reasons: dict[tuple[str, int], BaseException] = {}  # why they were cancelled

    def work(self) -> None:
        asyncio.run(self._main())
        self._claimer.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def serve() -> None:
            self._serve()
            self._loop.call_soon_threadsafe(finished.set)

        threading.Thread(target=run_or_leave, args=(serve,), daemon=True).start()
        await finished.wait()
        await asyncio.gather(*self._tasks)

    # The thread of the queue.

    def _serve(self) -> None:
        self._link.tell("worker", self._claimer.worker.name)
        recovered_at = cancelled_at = monotonic()
        while True:
            is_stopping = self._link.is_stopping
            try:
                self._settle()
                free = 0 if is_stopping else self._size - self._busy
                claimed = self._claim(free) if free else False
                if monotonic() - recovered_at > _RECOVER_EVERY_S:
                    recovered_at = monotonic()
                    self._claimer.recover()
                if self._busy and monotonic() - cancelled_at > CHECK_CANCELLED_S:
                    cancelled_at = monotonic()
                    running = self._store.tasks(["running"])
                    cancelled = [(task.id, task.token) for task in running if task.cancelling]
                    self._loop.call_soon_threadsafe(self._cancel_all, cancelled)
            except OSError as error:
                wait_for_space(error)
                continue
            if is_stopping and not self._busy:
                return
            if is_stopping:
                self._claimer.worker.leave()
            if not claimed:
                self._wait(free > 0, is_stopping)

    def _settle(self) -> None:
        """Write how tasks have ended. If that fails, they are written later."""
        ended = list(self._ended)
        for claim, _, _ in ended:
            claim.write_progress()
        endings = [ending for _, ending, _ in ended if ending is not None]
        settled = iter(self._store.settle(endings) if endings else ())
        for _, ending, is_mine in ended:
            self._ended.popleft()
            self._busy -= 1
            self._loop.call_soon_threadsafe(is_mine.set_result, ending is None or next(settled))

    def _claim(self, free: int) -> bool:
        attempts = self._store.claim(self._claimer.worker, free, idle=True)
        self._busy += len(attempts)
        if attempts:
            claims = [Claim(self._claimer, attempt) for attempt in attempts]
            self._loop.call_soon_threadsafe(self._start, claims)
        elif not self._busy:
            self._link.tell_idle()
        return bool(attempts)

    def _wait(self, has_room: bool, is_stopping: bool) -> None:
        fds = [self._reader.fd] if is_stopping else [self._reader.fd, self._link.stop]
        seconds = CHECK_CANCELLED_S if self._busy else 3600.0
        if not has_room:
            poll(fds, seconds)
        elif self._store.wait(self._claimer.worker, seconds, *fds) is Woken.DEATH:
            self._claimer.recover()
        if poll([self._reader.fd], 0):
            os.read(self._reader.fd, 4096)

    # The thread of the loop.

    def _start(self, claims: list[Claim]) -> None:
        for claim in claims:
            task = self._loop.create_task(self._do(claim))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _do(self, claim: Claim) -> None:
        hooks = self._hooks
        hooks.call(hooks.start, claim)
        result, failure = await self._run(claim)
        self._link.end(claim)
        ending = None  # the handler has settled the task itself
        if claim.outcome is None and isinstance(failure, Cancelled):
            ending = Ending(claim.id, claim.token, "cancelled", error="cancelled")
        elif claim.outcome is None:
            ending, failure = ending_of(claim, result, failure)
        is_mine: asyncio.Future[bool] = self._loop.create_future()
        self._ended.append((claim, ending, is_mine))
        with suppress(BlockingIOError):
            os.write(self._writer.fd, b"!")
        if not await is_mine:
            log.warning("task %r was given to another worker. Its result is refused.", claim.id)
            claim.outcome = "lost"
        elif ending is not None:
            claim.outcome = outcome_of(ending)
        self._link.count(claim.outcome)
        hooks.call_at_end(claim, failure)

    async def _run(self, claim: Claim) -> Outcome:
        try:
            call = self._runner.find(claim)
        except Exception as error:
            return None, error
        if not is_async(call.func):
            self._link.begin(claim, 0.0)
            return await self._loop.run_in_executor(self._executor, _run_function, call)
        self._link.begin(claim, GRACE_S)
        key = (claim.id, claim.token)
        self._running[key] = work = self._loop.create_task(_run_coroutine(call))
        timer = None
        if claim.timeout is not None:
            timer = self._loop.call_later(claim.timeout, self._cancel, key, TaskError(late_text(claim.timeout)))
        try:
            return await work
        except asyncio.CancelledError as error:
            return None, self._reasons.get(key, error)
        finally:
            if timer is not None:
                timer.cancel()
            del self._running[key]
            self._reasons.pop(key, None)

    def _cancel_all(self, keys: list[tuple[str, int]]) -> None:
        for key in keys:
            self._cancel(key, Cancelled("cancelled"))

    def _cancel(self, key: tuple[str, int], reason: BaseException) -> None:
        if key in self._running and key not in self._reasons:
            self._reasons[key] = reason
            self._running[key].cancel()


def _run_function(call: partial[Any]) -> Outcome:
    try:
        return call(), None
    except BaseException as error:  # also SystemExit: the task wants to end, not the worker
        return None, error


async def _run_coroutine(call: partial[Any]) -> Outcome:
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # asyncio lets SystemExit end the loop
        return None, error
