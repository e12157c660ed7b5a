"""`Worker`: runs the tasks of a queue, several at a time.

    supervisor    the process that calls `run`. It claims no task. It starts the children and replaces dead ones, ends
                  tasks that take too long or are cancelled, adds scheduled tasks, and deletes old ones
    children      claim tasks and run them (`child`): one process for each task at a time, one process with threads, or
                  one process with an event loop (`loop`)

The queue knows which children are alive. So the tasks of a child that is killed go back without any message from it.

To end a task, the supervisor kills its child and settles all its tasks. It does that in one operation of the queue
(`Store.end`), so that no other worker counts the child as dead before, and the child cannot settle the task meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from time import monotonic, time
from typing import Any, Protocol

from .. import system
from ..errors import HoldfastError, Unsupported
from ..files import OwnedFd, pipe
from ..wait import poll
from .child import LATER, OUTCOMES, Work
from .claimer import ENDING_PATIENCE_S, log
from .errors import WorkerFailed
from .handler import GRACE_S, Command, Handler, is_async, late_text
from .policy import given_back, outcome_of
from .queue import TaskQueue
from .store import Attempt, Ending
from .supervised import Child

_TICK_S = 0.5  # between two looks at cancelled tasks and schedules
_SOON_S = 0.05
_PRUNE_EVERY_S = 5.0
_MAX_EARLY_DEATHS = 5  # in a row, of children that have begun no task. Then the next one starts after a tick
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
        self.is_ending = False  # it begins no other task
        if handler is not None and not callable(handler):
            handler = Command(handler)
        functions = [one.function for one in self.queue.functions.values()]
        if handler is None and not functions:
            raise TypeError(
                "a handler is missing. Pass a function, a coroutine function or a list of words, or register functions "
                "with @queue.task before."
            )
        is_command = isinstance(handler, Command)
        is_loop = not is_command and any(map(is_async, (handler, *functions)))
        self._processes = concurrency if is_command or not (is_loop or threads) else 1
        self._work = Work(self.queue, handler, on_start, on_done, on_failed, is_loop, concurrency // self._processes)
        self._context = multiprocessing.get_context(start)
        self._observer = observer
        self._wake: OwnedFd | None = None
        self._asked = 0  # how often it was asked to end
        if start == "spawn":
            _check_pickle(self._work)

    def stop(self) -> None:
        """Let running tasks finish, and begin no other. The second call gives running tasks back. From any thread."""
        self._asked += 1
        self.queue.store.patience = lambda: ENDING_PATIENCE_S  # other workers take what it cannot give back
        if self._wake is not None:
            with suppress(OSError):  # the pipe is full, or `run` has returned
                system.write(self._wake.fd, b"!")

    def run(self, drain: bool = False) -> Summary:
        """Work until it is stopped (SIGTERM, SIGINT, `stop`), or with `drain` until no task is pending or running."""
        if not hasattr(os, "fork"):
            raise Unsupported("a Worker needs Linux or macOS. Call queue.claim() here.")
        self._work.drain = drain
        self.is_ending = False
        self._children: list[Child] = []
        self._totals = dict.fromkeys((*OUTCOMES, "deaths"), 0)
        self._early_deaths = 0  # in a row, of children that had no task
        self._tick_at = self._prune_at = self._start_at = 0.0
        self._cancelled_since: dict[Key, float] = {}
        self._last_warning = ""
        self._claimer = self.queue.new_claimer()
        self._claimer.count = self._count
        self.queue.store.settle([])  # raises an error if this process may not write
        self._woken, self._wake = pipe()
        os.set_blocking(self._wake.fd, False)
        previous = self._catch_signals()
        try:
            self._attempt(self._claimer.recover)
            self._attempt(self._put_scheduled)
            while self._children or not self.is_ending:
                self._supervise()
        finally:
            self._give_all_back()
            self.queue.store.patience = lambda: None
            for kind, handler in previous.items():
                signal.signal(kind, handler)
            self._wake.close()
            self._woken.close()
            self._asked = 0
        return Summary(**{name.replace(" ", "_"): number for name, number in self._totals.items()})

    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        previous: dict[int, Any] = {
            kind: signal.signal(kind, lambda number, frame: self.stop()) for kind in (signal.SIGTERM, signal.SIGINT)
        }
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else their status is lost
        return previous

    # Children.

    def _supervise(self) -> None:
        """Wait for the next event, and handle it."""
        if not self.is_ending:
            self._start_missing()
        fds = [self._woken.fd, *(fd for child in self._children for fd in child.fds)]
        soonest = min([self._tick_at, *(child.deadline for child in self._children)])
        ready = poll([*fds, *(self._observer.fds if self._observer is not None else ())], soonest - monotonic())
        if self._woken.fd in ready:
            system.read(self._woken.fd, 4096)
        for child in list(self._children):
            if ready.intersection(child.fds):
                child.read_messages()
                self._remove_if_dead(child)
        if self._asked:
            self._stop_children()
        if self._asked > 1:
            self._give_all_back()
        self._attempt(self._look_after_tasks)
        if self._observer is not None:
            self._observer.look()

    def _start_missing(self) -> None:
        while len(self._children) < self._processes and monotonic() >= self._start_at:
            self._children.append(Child(self._context, self._work))

    def _stop_children(self) -> None:
        if not self.is_ending:
            self.is_ending = True
            for child in self._children:
                child.stop()

    def _remove_if_dead(self, child: Child) -> None:
        code = child.exit_code()
        if code is None or child not in self._children:
            return
        self._children.remove(child)
        child.close()
        for outcome in OUTCOMES:
            self._count(outcome, child.count(outcome))
        self._tick_at = 0.0
        if child.was_killed and not child.is_settled:  # it died later than `_end` waited
            self._attempt(lambda: self._end(child, always=True))
        if child.was_killed or (code == 0 and child.count("finished")):
            return
        self._count("deaths", 1)
        self._attempt(self._claimer.recover)  # if that fails, another worker recovers its tasks
        has_begun = any(one.count("begun") for one in (child, *self._children))
        self._early_deaths = 0 if has_begun else self._early_deaths + 1
        self._start_at = monotonic() + (_TICK_S if self._early_deaths > _MAX_EARLY_DEATHS else 0.0)
        if code > 0 and code != LATER and self._early_deaths > self._processes + _MAX_EARLY_DEATHS:
            raise WorkerFailed(
                f"{self.queue.name}: the processes of this worker end before they have begun a task. Their messages "
                "above tell why.",
                path=self.queue.name,
            )

    def _count(self, outcome: str, number: int) -> None:
        self._totals[outcome] += number

    def _attempt(self, action: Callable[[], object]) -> None:
        """An error, such as a full disk or a wrong schedule, does not stop the worker. It is logged once in a row."""
        try:
            action()
        except (OSError, ValueError, HoldfastError) as error:
            if isinstance(error, WorkerFailed):
                raise
            if str(error) != self._last_warning:
                self._last_warning = str(error)
                log.warning("%s", error)

    # Tasks.

    def _look_after_tasks(self) -> None:
        now = monotonic()
        for child in list(self._children):
            if child.deadline <= now:
                self._end(child)
        if now < self._tick_at:
            return
        self._tick_at = now + _TICK_S
        if self._work.drain and self.queue.is_empty():
            self._stop_children()
        self._end_cancelled(now)
        if now >= self._prune_at:
            self._prune_at = now + (_SOON_S if self.queue.prune() else _PRUNE_EVERY_S)
            self._tick_at = min(self._tick_at, self._prune_at)
        if not self._work.drain:
            self._put_scheduled()

    def _put_scheduled(self) -> None:
        following = self.queue.put_scheduled()
        if following is not None:
            self._tick_at = min(self._tick_at, monotonic() + max(0.0, following - time()))

    def _end_cancelled(self, now: float) -> None:
        """Kill children that run cancelled tasks. Not at once: a child may have ended the task without having written
        it, and an event loop cancels its coroutines itself."""
        cancelled = self.queue.store.cancelling()
        self._cancelled_since = {key: self._cancelled_since.get(key, now) for key in cancelled}
        patience = GRACE_S if self._work.is_loop else _SOON_S
        due = {key for key, since in self._cancelled_since.items() if now - since >= patience}
        if len(due) < len(cancelled):
            self._tick_at = now + _SOON_S
        for child in list(self._children):
            if any(cancelled[key] in child.workers() for key in due):
                self._end(child, due)

    def _end(self, child: Child, cancelled: Collection[Key] = (), *, always: bool = False) -> None:
        """End the tasks of a child that are late or cancelled, by killing it. Its other tasks are given back."""
        is_dead = False

        def choose(attempts: list[Attempt]) -> list[Ending]:  # again, if the transaction must be repeated
            nonlocal is_dead
            late = child.late()
            endings = []
            for attempt in attempts:
                key = (attempt.id, attempt.token)
                if key in cancelled:
                    endings.append(Ending(*key, "cancelled", error="cancelled"))
                elif key in late:
                    endings.append(self.queue.retries.failed(attempt, late_text(attempt.timeout)))
            if not endings and not always:
                return []
            ended = {ending.id for ending in endings}
            endings += [given_back(attempt) for attempt in attempts if attempt.id not in ended]
            is_dead = child.kill()
            return endings if is_dead else []

        for ending in self.queue.store.end(child.workers, choose):
            self._count(outcome_of(ending), 1)
        child.is_settled = is_dead
        self._tick_at = 0.0
        self._remove_if_dead(child)

    def _give_all_back(self) -> None:
        for child in list(self._children):
            self._attempt(lambda child=child: self._end(child, always=True))  # type: ignore[misc]
            child.kill()
            self._remove_if_dead(child)


def _check_pickle(work: Work) -> None:
    try:
        ForkingPickler.dumps(work)
    except Exception as error:
        raise TypeError(
            f"start='spawn' needs a handler, functions and hooks that can be pickled: {error}. Define them at the top "
            "level of a module."
        ) from error
