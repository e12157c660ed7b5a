"""`Claim`: a task that this process works on."""

from __future__ import annotations

import json
from contextlib import suppress
from time import monotonic
from typing import Any

from .. import process
from ..errors import HoldfastError, LockLost, NotLocked
from .errors import TaskError
from .model import storable, to_json
from .policy import given_back, outcome_of
from .store import Attempt, Ending, Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .claimer import Claimer

_PROGRESS_EVERY_S = 0.1
_decode = json.JSONDecoder().raw_decode  # without `loads`, which looks for spaces around it


class Claim:
    """A task that this process works on, until it completes it, fails it or gives it back.

        with queue.claim() as task:         # completes the task, or fails it if the block raises
            print(task.payload)

    id, payload, token, tried, attempts, timeout, key, function: as in `Task`. The token grows with every attempt
    outcome: "done", "failed", "retried", "given back" or "cancelled", once the attempt has ended
    """

    def __init__(self, claimer: Claimer, attempt: Attempt) -> None:
        self.outcome: str | None = None
        self.attempt = attempt
        self.id = attempt.id
        self.token = attempt.token
        self.payload: Any = _decode(attempt.payload_json)[0]
        self.function = attempt.function
        self.tried, self.attempts = attempt.tried, attempt.attempts
        self.timeout = attempt.timeout
        self.key = attempt.key
        self._claimer = claimer
        self._reported_at = 0.0
        self._unreported: str | None = None
        self.later: Callable[[Callable[[], None]], object] | None = None  # calls it in a thread that may wait

    def __repr__(self) -> str:
        return f"<holdfast.tasks.Claim of task {self.id!r}>"

    @property
    def is_open(self) -> bool:
        """Has the attempt not ended yet?"""
        return self.outcome is None and self._claimer.registry is process.registry

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.is_open:
            return
        if error is None:
            self.complete()
        elif isinstance(error, Exception):
            self.fail(error)
        else:
            self.give_back()

    def __del__(self) -> None:
        """A claim that is dropped counts as a failed attempt. The next claim of this thread settles it."""
        with suppress(AttributeError):  # an interrupt came in __init__
            if self.is_open:
                self._claimer.drop(self.attempt)

    # While it runs.

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report progress, which `queue.get(id).progress` shows. Reports within 0.1 s of another one are left out,
        except the last one. In a coroutine of a `Worker` this does not block the event loop."""
        text = to_json([done, total, note], "progress")
        self._check_open()
        self._unreported = text
        if monotonic() - self._reported_at >= _PROGRESS_EVERY_S:
            self._reported_at = monotonic()
            if self.later is None:
                self._report()
            else:
                self.later(self._report)

    def _report(self) -> None:
        with self._claimer.mutex:  # a thread of the handler may report progress while the task ends
            text, self._unreported = self._unreported, None
            if text is not None and self.is_open and not self._claimer.store.report(self.id, self.token, text):
                self._lost()

    def check(self) -> None:
        """Raise LockLost if another worker has the task now."""
        self._check_open()
        if self._current() is None:
            self._lost()

    @property
    def cancelled(self) -> bool:
        """Was the task cancelled while it runs? A `Worker` ends it. Code that claims by hand checks this itself."""
        task = self._current()
        return task is not None and task.cancelling

    def _current(self) -> Task | None:
        """The task. None: this is not its current attempt."""
        (task,) = self._claimer.store.get([self.id])
        return task if task is not None and (task.token, task.state) == (self.token, "running") else None

    def fileno(self) -> int:
        """A descriptor for a command to inherit. As long as the command runs, no other worker gets the task."""
        return self._claimer.worker.fileno()

    # How it ends.

    def complete(self, result: object = None) -> None:
        """The task is done. With `durable`, that is on disk when this returns.

        Raises TypeError or ValueError if JSON cannot express the result. Then the task is still open.
        """
        self._complete(result)

    def _complete(self, result: object, *, may_wait: bool = False) -> None:
        text = None if result is None else to_json(result, "result")
        self._settle(Ending(self.id, self.token, "done", result_json=text), may_wait=may_wait)

    def fail(self, error: BaseException | str, *, delay: float | None = None) -> bool:
        """The attempt failed. True: the task is tried again, after `delay` seconds."""
        more = {}
        if isinstance(error, TaskError):
            text, more["output"] = str(error), storable(error.output) or None
        elif isinstance(error, str):
            text = error
        else:
            from traceback import format_exception, format_exception_only

            text = "".join(format_exception_only(type(error), error)).strip()
            more["traceback"] = storable("".join(format_exception(type(error), error, error.__traceback__)))
        ending = self._claimer.retries.failed(self.attempt, storable(text), delay, **more)
        self._settle(ending)
        return ending.state != "failed"

    def give_back(self) -> None:
        """Another worker is to do the task. This does not count as an attempt."""
        self._settle(given_back(self.attempt))

    def cancel(self) -> None:
        """The task is not to be done."""
        self._settle(Ending(self.id, self.token, "cancelled", error="cancelled"))

    def _settle(self, ending: Ending, *, may_wait: bool = False) -> None:
        """If the disk is full, the claim stays open, and this can be called again."""
        with self._claimer.mutex:
            self._check_open()
            with suppress(HoldfastError, OSError):  # that is no reason not to end
                self._report()
            if not self._claimer.settle(ending, may_wait=may_wait):
                self._lost()
            self.outcome = outcome_of(ending)

    def _check_open(self) -> None:
        if not self.is_open:
            why = "is claimed by the parent of this process"
            if self.outcome is not None:
                why = f"has ended already: {self.outcome}"
            raise NotLocked(f"task {self.id!r} {why}", path=self._claimer.store.name)

    def _lost(self) -> None:
        self.outcome = "lost"
        raise LockLost(
            f"task {self.id!r} was given to another worker, because this one counted as dead. Its result is refused.",
            path=self._claimer.store.name,
        )
