"""The port behind `TaskQueue` and `Worker`: what an engine does with tasks.

An engine stores tasks and assigns each to one worker at a time. It makes no decisions. The code above the port decides
how often a task is tried, how long it waits in between, when a schedule is due and how long results are kept.

The life of a task:

    blocked ──▶ delayed ──▶ parked ──▶ ready ── claim ──▶ running ── settle ──▶ done, failed or cancelled
     after=      delay=      key=                            └────── settle ──▶ delayed or ready

    blocked    waits for other tasks (`after`)
    delayed    waits for its due moment
    parked     has a key, and as many tasks with that key are ready or running as its limit allows
    ready      the next claim may take it

Each claim gives the task a token that is greater than all its earlier ones. A worker settles a task by id and token. If
the token is old, another worker has the task now, and settling changes nothing.

A worker registers (`Store.register`) and is alive as long as its process or a command that inherited its descriptor
runs. `orphans` returns the running tasks of dead workers. The caller settles them.

Every operation is atomic. A process that is killed in it has done all of it or nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from .. import owner

WAITING = ("ready", "delayed", "parked", "blocked")
ENDED = ("done", "failed", "cancelled")
OPEN = (*WAITING, "running")
STATES = (*OPEN, *ENDED)

NEVER = 1e300  # a moment


@dataclass(slots=True)
class NewTask:
    """A task to add. Fields that end in `_json` hold JSON text."""

    payload_json: str
    id: str | None = None  # None: the engine chooses an id, an underscore and a number
    function: str | None = None  # the name of a registered function; None: the worker's handler
    priority: int = 0
    delay: float = 0.0  # seconds
    attempts: int = 3
    timeout: float | None = None
    key: str | None = None
    limit: int = 1  # how many tasks with this key may run at a time. 0: any number
    interval: float = 0.0  # seconds between the starts of two tasks with this key
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Attempt:
    """A running task, as its worker sees it."""

    id: str
    token: int
    payload_json: str
    function: str | None
    priority: int
    attempts: int
    tried: int  # including this attempt
    timeout: float | None
    key: str | None
    begun: bool = True  # of an orphan. False: its worker had reserved it, and was still busy with an earlier task


@dataclass(slots=True)
class Ending:
    """How an attempt ended. `state` is "done", "failed" or "cancelled", or "delayed" if the task is tried again."""

    id: str
    token: int
    state: str
    delay: float = 0.0  # seconds until the task is tried again. 0: at once
    # False: the task was given back. That was no attempt, and the task keeps its place in the queue.
    counts: bool = True
    result_json: str | None = None
    error: str | None = None
    traceback: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class Task:
    """What is known about a task. `state` is "pending", "running", "done", "failed" or "cancelled"."""

    id: str
    payload: Any
    state: str
    waits: str | None  # of a pending task: "delayed", "parked" or "blocked". None: the next worker may take it
    due_in: float | None  # of a delayed task: seconds
    function: str | None
    priority: int
    attempts: int  # how often it may be tried
    tried: int
    timeout: float | None
    key: str | None
    limit: int
    token: int  # of its last attempt. It grows with every attempt
    worker: str | None
    cancelling: bool  # it runs, and was cancelled
    result: Any
    error: str | None
    traceback: str | None = field(repr=False)
    output: str | None = field(repr=False)  # of a command that failed: what it printed
    progress: tuple[float, float | None, str] | None
    put_at: datetime
    started_at: datetime | None  # its last attempt
    ended_at: datetime | None
    # Its earlier attempts: token, worker, started_at, ended_at, state, error
    history: tuple[dict[str, Any], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tasks. All conditions must hold."""

    ids: Collection[str] | None = None
    states: Collection[str] = STATES
    ended_before: float | None = None  # seconds since the epoch


class Woken(Enum):
    """Why a wait ended."""

    TASK = "there may be a task"
    DEATH = "a worker may have died"
    OTHER = "another descriptor is readable"
    TIME = "the time is over"


class Changes(ABC):
    """Watches for tasks that end. A change after the object was made is not missed."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until a task may have ended, at most so long."""

    @abstractmethod
    def close(self) -> None: ...


class Registration(ABC):
    """A worker that the engine knows to be alive. One thread uses it. One that is collected counts as dead."""

    name: str  # unique, and readable: it begins with `process_name`
    refused = 0  # endings that were settled by `claim`, and whose token was old
    is_idle = False  # its last claim found no task, and asked to be woken
    until = NEVER  # an idle worker wakes at this moment of the engine's clock

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor for a command to inherit. The worker counts as alive as long as the command runs."""

    @abstractmethod
    def leave(self) -> None:
        """The worker does not wait any more, and calls neither `wait` nor `claim` soon."""

    @abstractmethod
    def close(self) -> None:
        """The worker has no running task any more."""


def process_name() -> str:
    """pid@host"""
    me = owner.me()
    host = "".join(char if char.isalnum() or char in "-." else "-" for char in me.host)[:60]
    return f"{me.pid}@{host}"


class Store(ABC):
    """Tasks on one engine. Any thread may call it. A forked child calls it as if it had opened it itself."""

    name: str  # for messages: the path, or the URL without a password
    is_local: bool  # all workers are on this machine, so that a live one never counts as dead
    patience: float | None = None  # seconds to wait for a server that is away. None: as long as the engine does

    @abstractmethod
    def close(self) -> None: ...

    # Add.

    @abstractmethod
    def add(
        self, tasks: Sequence[NewTask], *, max_waiting: int | None = None, connection: Any = None
    ) -> list[tuple[str, bool]]:
        """Add tasks. Return the id of each, and whether it is new: a task whose id exists stays as it is.

        max_waiting: add as many as there is room for, in order, and return only these
        connection: add them in the transaction of this connection of the caller, where the engine can
        Raises ValueError if a task in `after` does not exist.
        """

    @abstractmethod
    def set_schedule(self, name: str, text: str | None) -> bool:
        """Store a schedule as JSON text, or remove it. Return whether there was one."""

    @abstractmethod
    def schedules(self) -> dict[str, tuple[str, float]]:
        """All schedules: the JSON text, and the last moment that was added. 0: none yet."""

    @abstractmethod
    def add_moment(self, name: str, moment: float, task: NewTask) -> bool:
        """Add the task of one moment of a schedule. False: this moment or a later one was added already.

        A later one that is more than a day ahead does not count: a wrong clock has added it.
        """

    # Work.

    @abstractmethod
    def register(self) -> Registration: ...

    @abstractmethod
    def claim(
        self,
        worker: Registration,
        count: int,
        *,
        endings: Sequence[Ending] = (),
        reserve: bool = False,
        idle: bool = False,
    ) -> list[Attempt]:
        """Assign up to `count` ready tasks to a worker: highest priority first, then oldest first.

        endings: settle these before, in the same transaction
        reserve: the worker begins the tasks one after the other
        idle: if there is no task, the worker is about to call `wait`, and wants to be woken
        """

    @abstractmethod
    def settle(self, endings: Sequence[Ending]) -> list[bool]:
        """End attempts. False for each whose token is old."""

    @abstractmethod
    def end(self, workers: Sequence[str], choose: Callable[[list[Attempt]], Sequence[Ending]]) -> list[Ending]:
        """Call `choose` with the running tasks of these workers, and settle what it returns. Return what was settled.

        `choose` may kill the workers. No other process settles these tasks meanwhile, so none of them is an orphan.
        """

    @abstractmethod
    def report(self, id: str, token: int, progress_json: str) -> bool:
        """Store the progress of an attempt. False: its token is old."""

    @abstractmethod
    def orphans(self) -> list[Attempt]:
        """The running tasks of all dead workers."""

    @abstractmethod
    def wait(self, worker: Registration, seconds: float, *others: int) -> Woken:
        """Wait until there may be a task for this worker, a worker may have died, or one of the descriptors `others`
        is readable. Call `claim(idle=True)` before."""

    @abstractmethod
    def changes(self) -> Changes:
        """Begin to watch for tasks that end."""

    # Change.

    @abstractmethod
    def cancel(self, which: Selection) -> int:
        """Cancel tasks that have not ended. A running one is only marked, and its worker ends it. Return how many."""

    @abstractmethod
    def retry(self, which: Selection) -> int:
        """Make ended tasks wait again, with all their attempts. Return how many."""

    @abstractmethod
    def delete(self, which: Selection) -> int:
        """Delete ended tasks. Return how many. The newest task stays, because its number must not be used again."""

    @abstractmethod
    def prune(self, older_than: dict[str, float], limit: int) -> int:
        """Look at the next `limit` tasks, and delete those that ended before the moment for their state. Return how
        many were deleted."""

    @abstractmethod
    def set_paused(self, paused: bool) -> None:
        """While a queue is paused, `claim` returns nothing."""

    # Look.

    @abstractmethod
    def is_paused(self) -> bool: ...

    @abstractmethod
    def get(self, ids: Sequence[str]) -> list[Task | None]:
        """Tasks by id. None for an id that does not exist."""

    @abstractmethod
    def tasks(self, states: Collection[str] = STATES) -> Iterator[Task]:
        """Tasks in the order in which they were added. Other processes may change them meanwhile."""

    @abstractmethod
    def count(self, states: Collection[str] = STATES, at_most: int | None = None) -> dict[str, int]:
        """How many tasks are in each of the states. at_most: stop counting there."""
