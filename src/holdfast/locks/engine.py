"""The port behind every lock: what an engine does, and the grant that it returns.

An engine is the mechanism behind a lock: a kernel lock on a path (`path_lock`), a lock file (`file_engine`), or a
server. The face (`base`) has everything else. Acquiring is one algorithm:

    1. one attempt, `engine.first_attempt(timeout)`. A free lock is acquired here
    2. `engine.steps(…)`, a generator that waits and attempts again. A driver of `wait` runs it

One attempt returns a grant, or an `Outcome`:

    BUSY       another process or thread holds the lock
    QUEUED     waiters are in its queue, so no attempt was made
    REPLACED   the path names another file by now: try again
    REMOVING   the lock was taken only in order to remove the file: try again in a moment
"""

from __future__ import annotations

from .. import wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any, Literal, TypeVar

    from ..metrics import Kind as Metrics
    from ..status import Status

    GrantType = TypeVar("GrantType", bound="Grant")


class Outcome:
    """The reason why an attempt returned no grant. It is false, and a grant is true."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return self._name


BUSY, QUEUED = Outcome("BUSY"), Outcome("QUEUED")
REPLACED, REMOVING = Outcome("REPLACED"), Outcome("REMOVING")


class Grant:
    """The right to the lock, as its engine holds it. A grant that is dropped, after an interrupt, is released."""

    __slots__ = ()

    key: Hashable  # what is locked. A caller that waits for a key that it holds would wait for itself
    shared: bool  # can others hold the lock at the same time?
    acquired_at: float  # wall-clock time, for people
    token: int | None

    def release(self) -> bool:
        """Release the lock. False: it was lost before. After an OSError the lock is released, too.

        Called once. It may block if the engine does (`Engine.blocks`).
        """
        raise NotImplementedError

    def drop(self) -> None:
        """`release`, for a hold that is garbage-collected."""
        self.release()

    def is_good(self) -> bool:
        """Is the lock still held?"""
        raise NotImplementedError


class Engine:
    """The mechanism behind one lock."""

    __slots__ = ()

    name: str  # of the lock in messages: its path, or its URL without a password
    metrics: Metrics
    loss = "its file was removed or replaced while it was held"  # the usual reason, in LockLost
    loss_remedy = "find the program that deletes the file"

    @property
    def blocks(self) -> bool:
        """May an attempt or a release wait for a disk or a server? Then tasks make it in a thread."""
        raise NotImplementedError

    def first_attempt(self, timeout: float | None = None) -> Grant | Outcome:
        """One attempt, without waiting for a holder. A server must answer within the timeout, unless that is 0."""
        raise NotImplementedError

    def steps(self, found: Outcome, deadline: float | None, *, asynchronous: bool) -> wait.Steps[Any]:
        """Acquire after a first attempt that returned `found`: wait, attempt again, return the grant.

        Raises `wait.DeadlinePassed`. With the deadline 0.0 (`timeout=0`, `try_acquire`), where it would begin to wait.
        """
        raise NotImplementedError

    def status(self) -> Status:
        raise NotImplementedError


def attempt_step(
    engine: Engine, attempt: Callable[..., GrantType | Outcome], **options: object
) -> wait.Steps[GrantType | Outcome]:
    """Make one attempt. If it may wait for a disk or a server, a task makes it in a thread."""
    if not engine.blocks:
        return attempt(**options)
    step = wait.Run(lambda: attempt(**options), undo=_give_back)
    yield step
    return step.outcome()  # type: ignore[no-any-return]


def _give_back(found: Grant | Outcome) -> None:
    if not isinstance(found, Outcome):
        found.release()
