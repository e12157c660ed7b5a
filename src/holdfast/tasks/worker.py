"""`Worker`: runs the tasks of a queue, several at a time.

    supervisor    the process that calls `run`. It claims no task. It starts the children and replaces dead ones, ends
                  tasks that take too long or are cancelled, adds scheduled tasks, and deletes old ones
    children      claim tasks and run them (`child`): one process for each task at a time, one process with threads, or
                  one process with an event loop (`loop`)

The queue knows which children are alive. So the tasks of a child that is killed go back without any message from it.

To end a task, the supervisor stops its child with SIGSTOP, and checks that the child still runs the task. Then it kills
the child and settles all its tasks. It does that in one operation of the queue (`Store.end`), so that no other worker
counts the child as dead before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from time import monotonic, time
from types import FrameType
from typing import Any, Protocol

from ..errors import HoldfastError, Unsupported
from ..files import pipe
from ..wait import poll
from .child import LATER, OUTCOMES, Hooks, log
from .errors import WorkerFailed
from .handler import GRACE_S, Handler, Runner, late_text
from .policy import given_back, outcome_of
from .queue import TaskQueue
from .store import Attempt, Ending
from .supervised import Child, PassedFd

_TICK_S = 0.5  # between two looks at cancelled tasks and schedules
_SOON_S = 0.05
_PRUNE_EVERY_S = 5.0
_EARLY_S, _MAX_EARLY_DEATHS = 1.0, 5  # this number of children that die within a second is replaced at once
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Key = tuple[str, int]  # the id and the token of an attempt


@dataclass(frozen=True)
class Summary:
    """What a worker did."""

    done: int = 0
    failed: int = 0  # for good
    retried: int = 0
    given_back: int = 0
    cancelled: int = 0
    deaths: int = 0  # of its processes. What they worked on counts as retried or failed


class Observer(Protocol):
    """Shows what a worker does, in the process of its supervisor. `look` is called when one of `fds` is readable, when
    something else has happened, and every half second."""

    @property
    def fds(self) -> tuple[int, ...]: ...

    def look(self) -> None: ...


class Worker:
    """Runs the tasks of a queue: with functions that are registered with `@queue.task`, and other tasks with a handler.

    handler: a function of the claim, a coroutine function, or a command, which is a list of words
    concurrency: how many tasks run at a time
    threads: in threads of one process instead of one process each. Coroutines share one event loop in any case, and
        commands always have processes
    start: how processes start, "fork" or "spawn". "spawn" is for libraries that cannot be forked, such as CUDA and gRPC
    on_start, on_done, on_failed: called with the claim, and on_failed with the error, where the handler runs
    observer: see `Observer`
    """

    def __init__(
        self,
        queue: TaskQueue | str | os.PathLike[str],
        handler: Handler | None = None,
        *,
        concurrency: int = 1,
        threads: bool = False,
        start: str = "fork",
        on_start: Callable[..., object] | None = None,
        on_done: Callable[..., object] | None = None,
        on_failed: Callable[..., object] | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"concurrency is how many tasks run at a time, at least 1, not {concurrency!r}")
        if start not in ("fork", "spawn"):
            raise ValueError(f"start must be 'fork' or 'spawn', not {start!r}")
        self.queue = queue if isinstance(queue, TaskQueue) else TaskQueue(queue)
        self.concurrency = concurrency
        self.threads = threads
        self._start_method = start
        self._runner = Runner(self.queue.functions, handler)
        self._hooks = Hooks(on_start, on_done, on_failed)
        self._observer = observer
        self._pipes: _Pipes | None = None
        self._asked = 0  # how often it was asked to end
        if start == "spawn":
            _check_pickle(self.queue, self._runner, self._hooks)
        self._reset()

    def _reset(self) -> None:
        self._children: list[Child] = []
        self._totals = dict.fromkeys(OUTCOMES, 0)
        self._deaths = 0
        self._early_deaths = 0  # in a row, of children that had no task
        self._starts: list[float] = []
        self._drain = False
        self._tick_at = self._prune_at = 0.0
        self._cancelled_since: dict[Key, float] = {}
        self._last_warning = ""

    def stop(self) -> None:
        """Let running tasks finish, and begin no other. The second call gives running tasks back. From any thread."""
        self._asked += 1
        pipes = self._pipes
        if pipes is not None:
            with suppress(BlockingIOError):
                os.write(pipes.wake_writer.fd, b"!")

    @property
    def is_ending(self) -> bool:
        """Was it stopped, so that it begins no other task?"""
        return self._asked > 0 and (self._pipes is None or not self._pipes.stop_writer.is_open)

    def run(self, drain: bool = False) -> Summary:
        """Work until it is stopped (SIGTERM, SIGINT, `stop`), or with `drain` until no task is pending or running."""
        if not hasattr(os, "fork"):
            raise Unsupported("a Worker needs Linux or macOS. Call queue.claim() here.")
        self._reset()
        self._drain = drain
        _open_standard_files()
        self._claimer = self.queue.new_claimer()
        self._claimer.on_recovered = self._count
        self.queue.store.settle([])  # raises an error if this process may not write
        self._pipes = _Pipes()
        previous = self._catch_signals()
        try:
            self._recover()
            self._put_scheduled(monotonic())
            while self._children or self._pipes.stop_writer.is_open:
                self._supervise(self._pipes)
        finally:
            self._give_all_back()
            for kind, handler in previous.items():
                signal.signal(kind, handler)
            self._pipes.close()
            self._pipes = None
            self._asked = 0
        done, failed, retried, given, cancelled = self._totals.values()
        return Summary(done, failed, retried, given, cancelled, self._deaths)

    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop()

        previous: dict[int, Any] = {kind: signal.signal(kind, stop) for kind in _SIGNALS}
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else their status is lost
        return previous

    # Children.

    def _supervise(self, pipes: _Pipes) -> None:
        """Wait for the next event, and handle it."""
        if pipes.stop_writer.is_open:
            self._start_missing(pipes)
        fds = [pipes.wake_reader.fd, *(fd for child in self._children for fd in child.fds)]
        soonest = min([self._tick_at, *(child.deadline for child in self._children)])
        ready = poll([*fds, *(self._observer.fds if self._observer is not None else ())], soonest - monotonic())
        if pipes.wake_reader.fd in ready:
            os.read(pipes.wake_reader.fd, 4096)
        for child in list(self._children):
            if ready.intersection(child.fds):
                child.read_messages()
                self._remove_if_dead(child)
        if self._asked:
            pipes.stop_writer.close()  # the children begin no other task
        if self._asked > 1:
            self._give_all_back()
        try:
            self._look_after_tasks(pipes)
        except (OSError, HoldfastError) as error:  # the disk may be full. It is tried again
            self._warn(error)
        if self._observer is not None:
            self._observer.look()

    @property
    def _mode(self) -> tuple[int, int, int]:
        """How many children, threads in each, and tasks of an event loop."""
        if self._runner.has_coroutines and not self._runner.is_command:
            return 1, 0, self.concurrency
        if self.threads and not self._runner.is_command:
            return 1, self.concurrency, 0
        return self.concurrency, 1, 0

    def _start_missing(self, pipes: _Pipes) -> None:
        children, threads, tasks = self._mode
        while len(self._children) < children:
            self._starts = [start for start in self._starts if monotonic() - start < _EARLY_S]
            if len(self._starts) >= children + _MAX_EARLY_DEATHS:
                return  # they die at once: wait
            self._starts.append(monotonic())
            arguments = (self.queue, self._runner, self._hooks, pipes.stop_reader)
            options = {"threads": threads, "tasks": tasks, "drain": self._drain}
            self._children.append(Child(multiprocessing.get_context(self._start_method), arguments, options))

    def _remove_if_dead(self, child: Child) -> None:
        code = child.exit_code()
        if code is None or child not in self._children:
            return
        self._children.remove(child)
        child.close()
        for outcome in OUTCOMES:
            self._totals[outcome] += child.count(outcome)
        if child.was_killed or (code == 0 and child.count("finished")):
            return
        self._deaths += 1
        self._tick_at = 0.0
        self._recover()
        if any(one.count("begun") for one in (child, *self._children)):
            self._early_deaths = 0
        elif code > 0 and code != LATER and monotonic() - child.started_at < _EARLY_S:
            self._early_deaths += 1
        if self._early_deaths > self.concurrency + _MAX_EARLY_DEATHS:
            raise WorkerFailed(
                f"{self.queue.name}: the processes of this worker end before they have begun a task. Their messages "
                "above tell why.",
                path=self.queue.name,
            )

    def _recover(self) -> None:
        try:
            self._claimer.recover()
        except (OSError, HoldfastError) as error:  # another worker or the next look recovers them
            self._warn(error)

    def _count(self, outcome: str) -> None:
        self._totals[outcome] += 1

    def _warn(self, error: Exception) -> None:
        """Once in a row."""
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            log.warning("%s", error)

    # Tasks.

    def _look_after_tasks(self, pipes: _Pipes) -> None:
        now = monotonic()
        for child in list(self._children):
            if child.deadline <= now:
                self._end(child)
        if self._drain and any(child.is_idle for child in self._children):
            self._tick_at = 0.0
        if now < self._tick_at:
            return
        self._tick_at = now + _TICK_S
        if self._drain and self.queue.is_empty():
            pipes.stop_writer.close()
        self._end_cancelled(now)
        if now >= self._prune_at:
            self._prune_at = now + (_SOON_S if self.queue.prune() else _PRUNE_EVERY_S)
            self._tick_at = min(self._tick_at, self._prune_at)
        if not self._drain:
            self._put_scheduled(now)

    def _put_scheduled(self, now: float) -> None:
        """A wrong schedule is no reason to stop working."""
        try:
            following = self.queue.put_scheduled()
            if following is not None:
                self._tick_at = min(self._tick_at, now + max(0.0, following - time()))
        except (OSError, TypeError, ValueError, HoldfastError) as error:
            self._warn(error)

    def _end_cancelled(self, now: float) -> None:
        """Kill children that run cancelled tasks. Not at once: a child may have ended the task without having written
        it, and an event loop cancels its coroutines itself."""
        running = list(self.queue.store.tasks(["running"]))
        cancelled = [(task.id, task.token) for task in running if task.cancelling]
        self._cancelled_since = {key: self._cancelled_since.get(key, now) for key in cancelled}
        patience = _SOON_S if self._mode[1] else GRACE_S
        due = {key for key, since in self._cancelled_since.items() if now - since >= patience}
        self._tick_at = min(
            [self._tick_at, *(self._cancelled_since[key] + patience for key in cancelled if key not in due)]
        )
        for child in list(self._children) if due else ():
            if any((task.id, task.token) in due for task in running if task.worker in child.workers):
                self._end(child, due)

    def _end(self, child: Child, cancelled: set[Key] | None = None, *, always: bool = False) -> None:
        """End the tasks of a child that are late or cancelled, by killing it. Its other tasks are given back."""

        def choose(attempts: list[Attempt]) -> list[Ending]:
            child.pause()
            late = child.take_late()
            endings = []
            for attempt in attempts:
                key = (attempt.id, attempt.token)
                if cancelled is not None and key in cancelled:
                    endings.append(Ending(*key, "cancelled", error="cancelled"))
                elif key in late and attempt.timeout is not None:
                    endings.append(self.queue.retries.failed(attempt, late_text(attempt.timeout)))
            if not endings and not always:
                child.resume()
                return []
            ended = {(ending.id, ending.token) for ending in endings}
            endings += [given_back(attempt) for attempt in attempts if (attempt.id, attempt.token) not in ended]
            return endings if child.kill() else []

        for ending in self.queue.store.end(child.workers, choose):
            self._count(outcome_of(ending))
        self._tick_at = 0.0
        self._remove_if_dead(child)

    def _give_all_back(self) -> None:
        for child in list(self._children):
            try:
                self._end(child, always=True)
            except (OSError, HoldfastError) as error:
                self._warn(error)
            finally:
                child.kill()
            self._remove_if_dead(child)


class _Pipes:
    """The supervisor is woken by `wake_writer`. Its children stop when `stop_writer` is closed."""

    def __init__(self) -> None:
        self.wake_reader, self.wake_writer = pipe()
        self.stop_reader, self.stop_writer = pipe(reader=PassedFd)
        os.set_blocking(self.wake_writer.fd, False)

    def close(self) -> None:
        for file in (self.wake_reader, self.wake_writer, self.stop_reader, self.stop_writer):
            file.close()


def _check_pickle(queue: TaskQueue, *parts: object) -> None:
    for part in (queue, *parts):
        try:
            ForkingPickler.dumps(part)
        except Exception as error:
            raise TypeError(
                f"start='spawn' needs a handler, functions and hooks that can be pickled: {error}. Define them at the "
                "top level of a module."
            ) from error


def _open_standard_files() -> None:
    """Or the next file that is opened would be taken for one of these."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
