"""The child processes of a worker: they claim tasks and run them. `worker` supervises them.

A child reports to its supervisor in two ways:

    counters    in shared memory, which survives the child: how many tasks ended in which way
    messages    lines of JSON in a socket:
                ["worker", name]                        the name of a worker in the queue, before its first claim
                ["begin", id, token, seconds]           a task with a timeout. The supervisor ends it after `seconds`
                ["end", id, token]                      its handler has returned

The socket becomes readable when the child is to stop. That also happens if the supervisor is killed. Then the kernel
ends a child whose task takes too long, with SIGALRM.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from socket import socket
from time import monotonic, sleep
from typing import Any

from .. import process, system
from ..errors import HoldfastError
from ..files import OwnedFd, inode_of
from ..wait import poll
from .claim import Claim
from .claimer import ENDING_PATIENCE_S, Claimer, log
from .errors import Cancelled, TaskError
from .handler import GRACE_S, Command, is_async
from .queue import TaskQueue

OUTCOMES = ("done", "failed", "retried", "given back", "cancelled")
COUNTERS = (*OUTCOMES, "begun", "finished")  # a handler may end its process with status 0: then it is not finished
LATER = 75  # the exit status of a child that cannot go on for a reason that passes
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = _DISK_FULL | {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
FULL_PAUSE_S = 1.0
_CHECK_STOP_S = 0.001
_SUPERVISOR_LATE_S = 2.0  # then it is dead, and the kernel ends this process

Hook = Callable[..., object] | None


class Link:
    """The connection of a child to its supervisor."""

    def __init__(self, channel: socket, counters: Any) -> None:
        self._channel = OwnedFd(channel.detach())  # a process that the handler forks does not have it
        self.fd = self._channel.fd  # readable when the child is to stop
        self._inode = inode_of(system.fstat(self.fd))
        self._counters = counters
        self._mutex = threading.Lock()
        self._deadlines: dict[tuple[str, int], float] = {}
        self._registry = process.registry

    @property
    def is_stopping(self) -> bool:
        return bool(poll([self.fd], 0))

    def tell(self, *message: object) -> None:
        with self._mutex, suppress(OSError):  # the handler has closed the socket, or the supervisor is dead
            system.write(self._channel.fd, json.dumps(message, ensure_ascii=False).encode() + b"\n")

    def count(self, kind: str | None, number: int = 1) -> None:
        if kind in COUNTERS:
            with self._mutex:
                self._counters[COUNTERS.index(kind)] += number

    def begin(self, claim: Claim, grace: float) -> None:
        """grace: the child ends the task itself after its timeout. The supervisor waits so much longer"""
        self.count("begun")
        if claim.timeout is not None:
            self.tell("begin", claim.id, claim.token, claim.timeout + grace)
            self._deadlines[claim.id, claim.token] = monotonic() + claim.timeout + grace + _SUPERVISOR_LATE_S
            self._set_alarm()

    def end(self, claim: Claim) -> None:
        if process.registry is not self._registry:  # the handler has forked, and this is the other process
            leave(0)
        if not self._is_open():  # those of SQLite are closed, too. It would wait 10 s for locks that it cannot get
            log.warning("%s: its handler has closed descriptors of the worker", claim)
            leave(1)
        if claim.timeout is not None:
            self.tell("end", claim.id, claim.token)
            self._deadlines.pop((claim.id, claim.token), None)
            self._set_alarm()

    def _is_open(self) -> bool:
        try:
            return inode_of(system.fstat(self.fd)) == self._inode
        except OSError:
            return False

    def _set_alarm(self) -> None:
        with self._mutex:
            earliest = min(self._deadlines.values(), default=None)
            signal.setitimer(signal.ITIMER_REAL, 0 if earliest is None else max(0.001, earliest - monotonic()))


@dataclass
class Work:
    """What a child does. size: how many threads, or how many tasks of the event loop"""

    queue: TaskQueue
    handler: Callable[..., Any] | None
    on_start: Hook
    on_done: Hook
    on_failed: Hook
    is_loop: bool
    size: int
    drain: bool = False

    def find(self, claim: Claim) -> partial[Any]:
        """The call to make. Raises TaskError if there is none."""
        if claim.function is None:
            if self.handler is None:
                raise TaskError(
                    "this task names no function, and the worker has no handler. Start a worker that has one: "
                    "Worker(queue, handler), or holdfast tasks work QUEUE -- COMMAND"
                )
            return partial(self.handler, claim)
        function = self.queue.functions.get(claim.function)
        if function is None:
            raise TaskError(
                f"function {claim.function} is not registered in this worker. Decorate it with @queue.task in a module "
                "that the worker imports."
            )
        return partial(function.function, *claim.payload["args"], **claim.payload["kwargs"])

    def call_hook(self, hook: Hook, claim: Claim, *more: object) -> None:
        """What the hook raises is logged."""
        try:
            if hook is not None:
                hook(claim, *more)
        except Exception as error:
            log.warning("%s: hook %s: %r", claim, getattr(hook, "__name__", hook), error, exc_info=error)

    def claimer(self, link: Link) -> Claimer:
        claimer = self.queue.new_claimer()
        claimer.count = link.count
        if self.on_done is None and (self.is_loop or not self.queue.store.is_local):
            claimer.gathers = True  # else the end of a task is written before that hook is called
        link.tell("worker", claimer.worker.name)
        return claimer

    def run(self, channel: socket, counters: Any) -> None:
        os.setpgid(0, 0)
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, lambda number, frame: None)  # the supervisor decides. Commands do not inherit this
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        link = Link(channel, counters)
        self.queue.store.patience = lambda: self._patience(link)
        if self.is_loop:
            from .loop import Loop

            run_or_leave(_run, Loop(self, link).run())
        else:
            self.queue.is_paused  # noqa: B018  # opens the queue, so that the threads need not
            more = [threading.Thread(target=run_or_leave, args=(self._work, link)) for _ in range(self.size - 1)]
            for thread in more:
                thread.start()
            run_or_leave(self._work, link)
            for thread in more:
                thread.join()
        link.count("finished")
        leave(0)

    def _patience(self, link: Link) -> float | None:
        """When the worker is to end, an idle child has nothing to write. Other workers take what it has reserved."""
        is_busy = any(claimer.is_busy for claimer in self.queue.claimers())
        return ENDING_PATIENCE_S if link.is_stopping and not is_busy else None

    def is_drained(self) -> bool:
        return self.drain and self.queue.is_empty()

    def finish(self, claim: Claim, result: object, failure: BaseException | None, link: Link) -> None:
        """Settle a task whose handler has returned a result, or has failed."""
        if isinstance(failure, MemoryError):
            import traceback

            traceback.clear_frames(failure.__traceback__)  # frees the memory of the handler: this process goes on
        while claim.outcome is None:  # else the handler has settled the task itself
            try:
                if failure is None:
                    claim._complete(result, may_wait=True)
                elif isinstance(failure, Cancelled):
                    claim.cancel()
                else:
                    claim.fail(failure)
            except HoldfastError as error:
                log.warning("%s", error)  # another worker has the task
            except OSError as error:
                wait_for_space(error)
            except (TypeError, ValueError, RecursionError) as error:  # JSON cannot express the result
                failure = error
        link.count(claim.outcome)
        if claim.outcome == "done":
            self.call_hook(self.on_done, claim)
        elif failure is not None:
            self.call_hook(self.on_failed, claim, failure)

    # A thread that runs one task after the other.

    def _work(self, link: Link) -> None:
        claimer = self.claimer(link)
        checked_at = 0.0
        while True:
            try:
                now = monotonic()
                if now - checked_at > _CHECK_STOP_S:  # asking after each short task would cost more than the task
                    checked_at = now
                    if link.is_stopping:
                        break
                claim = claimer.next()
                if claim is None and self.is_drained():
                    break
                claim = claim or claimer.wait(None, link.fd)
                if claim is None:
                    break
                self._do(claim, link)
            except OSError as error:
                wait_for_space(error)
        claimer.close()

    def _do(self, claim: Claim, link: Link) -> None:
        result, failure = None, None
        link.begin(claim, GRACE_S if isinstance(self.handler, Command) and claim.function is None else 0.0)
        try:
            self.call_hook(self.on_start, claim)
            call = self.find(claim)
            result = _run(call()) if is_async(call.func) else call()
        except BaseException as error:  # also SystemExit: the task wants to end, not the worker
            failure = error
        link.end(claim)
        self.finish(claim, result, failure, link)


def _run(coroutine: Coroutine[Any, Any, object]) -> object:
    import asyncio

    return asyncio.run(coroutine)


def wait_for_space(error: OSError) -> None:
    """Pause if the disk is full. Raise any other error."""
    if error.errno not in _DISK_FULL:
        raise error
    log.warning("%s", error)
    sleep(FULL_PAUSE_S)


def run_or_leave(function: Callable[..., object], *arguments: object) -> None:
    """Call a function. If it raises, the process ends, and all its tasks go back."""
    try:
        function(*arguments)
    except (OSError, HoldfastError) as error:
        log.warning("%s", error)
        leave(LATER if getattr(error, "errno", 0) in _PASSING else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)


def leave(status: int) -> None:
    """End this process without the clean-up of its parent."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()
    os._exit(status)
