"""The child processes of a worker: they claim tasks and run them. `worker` supervises them.

A child reports to its supervisor in two ways:

    counters    in shared memory, which survives the child: how many tasks ended in which way
    messages    lines of JSON in a pipe:
                ["worker", name]                        the name of a worker in the queue, before its first claim
                ["begin", id, token, seconds]           a task with a timeout. The supervisor ends it after `seconds`
                ["end", id, token]                      its handler has returned
                ["idle"]                                no task is ready. Only if the worker is to end then

Another pipe is closed when the child is to stop. That also happens if the supervisor is killed. Then the kernel ends a
child whose task takes too long, with SIGALRM.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from .. import process
from ..errors import HoldfastError
from ..files import OwnedFd
from ..wait import poll
from .claim import Claim
from .handler import GRACE_S, Runner
from .queue import TaskQueue
from .store import Ending

OUTCOMES = ("done", "failed", "retried", "given back", "cancelled")
COUNTERS = (*OUTCOMES, "begun", "finished")  # a handler may end its process with status 0: then it is not finished
LATER = 75  # the exit status of a child that cannot go on for a reason that passes
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = DISK_FULL | {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
FULL_PAUSE_S = 1.0
_CHECK_STOP_S = 0.001
_SUPERVISOR_LATE_S = 2.0  # then it is dead, and the kernel ends this process

log = logging.getLogger("holdfast")
Hook = Callable[..., object] | None


class Link:
    """The connection of a child to its supervisor."""

    def __init__(self, stop: OwnedFd, messages: OwnedFd, counters: Any, *, drain: bool) -> None:
        # Owned by this process: a process that the handler forks has neither.
        self._stop = OwnedFd(stop.detach())
        self._messages = OwnedFd(messages.detach())
        self._counters = counters
        self._drain = drain
        self._mutex = threading.Lock()
        self._deadlines: dict[tuple[str, int], float] = {}
        self._registry = process.registry

    @property
    def stop(self) -> int:
        """Readable when the child is to stop."""
        return self._stop.fd

    @property
    def is_stopping(self) -> bool:
        return bool(poll([self.stop], 0))

    def tell(self, *message: object) -> None:
        with self._mutex, suppress(OSError):  # the handler has closed the pipe, or the supervisor is dead
            os.write(self._messages.fd, json.dumps(message, ensure_ascii=False).encode() + b"\n")

    def tell_idle(self) -> None:
        if self._drain:
            self.tell("idle")

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
        if claim.timeout is not None:
            self.tell("end", claim.id, claim.token)
            self._deadlines.pop((claim.id, claim.token), None)
            self._set_alarm()

    def _set_alarm(self) -> None:
        with self._mutex:
            earliest = min(self._deadlines.values(), default=None)
            signal.setitimer(signal.ITIMER_REAL, 0 if earliest is None else max(0.001, earliest - monotonic()))


@dataclass
class Hooks:
    """Functions of the user. What they raise is logged."""

    start: Hook = None
    done: Hook = None
    failed: Hook = None

    def call(self, hook: Hook, claim: Claim, *more: object) -> None:
        try:
            if hook is not None:
                hook(claim, *more)
        except Exception as error:
            log.warning("%s: hook %s: %r", claim, getattr(hook, "__name__", hook), error, exc_info=error)

    def call_at_end(self, claim: Claim, failure: BaseException | None) -> None:
        if claim.outcome == "done":
            self.call(self.done, claim)
        elif failure is not None:
            self.call(self.failed, claim, failure)


def ending_of(claim: Claim, result: object, error: BaseException | None) -> tuple[Ending, BaseException | None]:
    """How an attempt ends whose handler returned a result or raised an error."""
    if error is None:
        try:
            return claim.done(result), None
        except (TypeError, ValueError, RecursionError) as unfit:  # JSON cannot express the result
            error = unfit
    if isinstance(error, MemoryError):
        import traceback

        traceback.clear_frames(error.__traceback__)  # frees the memory of the handler, so that this process can go on
    return claim.failed(error), error


class Thread:
    """One thread of a child: it runs one task after the other."""

    def __init__(self, queue: TaskQueue, runner: Runner, hooks: Hooks, link: Link) -> None:
        self._runner, self._hooks, self._link = runner, hooks, link
        self._claimer = queue.new_claimer()
        self._claimer.on_recovered = link.count
        self._claimer.on_refused = lambda number: link.count("done", -number)
        if not queue.store.is_local and hooks.done is None:  # that hook is called when the task is written as done
            self._claimer.buffered = True

    def work(self) -> None:
        claimer, link = self._claimer, self._link
        link.tell("worker", claimer.worker.name)
        checked_at = 0.0
        while True:
            try:
                now = monotonic()
                if now - checked_at > _CHECK_STOP_S:  # asking after each short task would cost more than the task
                    checked_at = now
                    if link.is_stopping:
                        break
                claim = claimer.next()
                if claim is None:
                    link.tell_idle()
                    claim = claimer.wait(None, link.stop)
                if claim is None:
                    break
                self._do(claim)
            except OSError as error:
                wait_for_space(error)
        claimer.close()

    def _do(self, claim: Claim) -> None:
        hooks, result, failure = self._hooks, None, None
        self._link.begin(claim, GRACE_S if self._runner.is_command and claim.function is None else 0.0)
        try:
            if hooks.start is not None:
                hooks.call(hooks.start, claim)
            result = self._runner.run(claim)
        except BaseException as error:  # also SystemExit: the task wants to end, not the worker
            failure = error
        self._link.end(claim)
        if claim.outcome is None:
            ending, failure = ending_of(claim, result, failure)
            if not self._settle(claim, ending):
                return
        self._link.count(claim.outcome)
        hooks.call_at_end(claim, failure)

    def _settle(self, claim: Claim, ending: Ending) -> bool:
        while True:
            try:
                if ending.state != "done" and claim.cancelled:
                    claim.cancel()
                else:
                    claim.settle(ending)
                return True
            except HoldfastError as error:
                log.warning("%s", error)  # another worker has the task
                return False
            except OSError as error:
                wait_for_space(error)


def wait_for_space(error: OSError) -> None:
    """Pause if the disk is full. Raise any other error."""
    if error.errno not in DISK_FULL:
        raise error
    log.warning("%s", error)
    sleep(FULL_PAUSE_S)


def work(
    queue: TaskQueue,
    runner: Runner,
    hooks: Hooks,
    stop: OwnedFd,
    messages: OwnedFd,
    counters: Any,
    *,
    threads: int,
    tasks: int,
    drain: bool,
) -> None:
    """All that a child does. threads: how many, or 0 for an event loop that runs `tasks` tasks at a time."""
    os.setpgid(0, 0)
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, _do_nothing)  # the supervisor decides. Commands do not inherit a function
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    run_or_leave(_work, queue, runner, hooks, Link(stop, messages, counters, drain=drain), threads, tasks)


def _work(queue: TaskQueue, runner: Runner, hooks: Hooks, link: Link, threads: int, tasks: int) -> None:
    if threads == 1:
        Thread(queue, runner, hooks, link).work()
    elif threads:
        queue.is_paused  # noqa: B018  # opens the queue, so that the threads need not
        workers = [Thread(queue, runner, hooks, link) for _ in range(threads)]
        running = [threading.Thread(target=run_or_leave, args=(worker.work,), daemon=True) for worker in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    else:
        from .loop import Loop

        Loop(queue, runner, hooks, link, tasks).work()
    link.count("finished")
    leave(0)


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


def _do_nothing(number: int, frame: object) -> None:
    pass
