"""What the code above the task engines and an engine exchange.

An engine (`sql.Store`) stores tasks and assigns each to one worker at a time. It makes no decisions. The code above it
decides how often a task is tried, how long it waits in between, when a schedule is due and how long results are kept.

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
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from .. import owner
from ..files import OwnedFd

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

    _store: Any  # its engine
    name: str  # unique, and readable: it begins with `process_name`
    refused = 0  # endings that were settled by `claim`, and whose token was old
    is_idle = False  # its last claim found no task, and asked to be woken
    until = NEVER  # an idle worker wakes at this moment of the engine's clock
    recheck_s: float  # and looks for dead workers after so many seconds
    wakeup: OwnedFd  # readable when a task may be there for it

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor for a command to inherit. The worker counts as alive as long as the command runs."""

    @abstractmethod
    def wait(self, seconds: float, *others: int) -> set[int]:
        """Wait until it is woken, or one of the descriptors is readable. Return which. `wakeup` is not drained."""

    def leave(self) -> None:
        """The worker does not wait any more, and calls neither `wait` nor `claim` soon."""
        if self.is_idle:
            self.is_idle = False
            self._store.forget_idle(self.name)

    @abstractmethod
    def close(self) -> None:
        """The worker has no running task any more."""


def process_name() -> str:
    """pid@host"""
    me = owner.me()
    host = "".join(char if char.isalnum() or char in "-." else "-" for char in me.host)[:60]
    return f"{me.pid}@{host}"
