"""Waiting for something to do, or for something to be done, without looking all the time.

    sequence      is written when a task was put
    running/      a file in it is closed: a task has ended, or its worker has
    slots/        the same: a worker has ended. For one who waits until all is done: a file in it is written to

A look every second is for what nobody tells: other machines, and what somebody did by hand.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from time import monotonic
from types import TracebackType

from .. import process, system
from ..errors import Timeout
from ..files import OwnedFd
from ..wait import MAX_PAUSE_S, MIN_PAUSE_S, RECHECK_S
from .claim import Claim
from .journal import ENDED, Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .queue import TaskQueue


class Watches:
    """Some files and directories of which one wants to know that they were written to."""

    def __init__(self, *wanted: tuple[str, int]) -> None:
        self._watches: list[system.Watch] = []
        self.complete = True
        for path, events in wanted:
            try:
                watch = system.Watch(path, OwnedFd, events)
            except OSError:
                self.complete = False  # too many, or there are none here
                continue
            self._watches.append(watch)

    def wait(self, seconds: float | None, *others: int) -> bool:
        """True: one of the `others`, descriptors, can be read."""
        poll = select.poll()
        for fd in (*(watch.fd for watch in self._watches), *others):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else max(0, int(seconds * 1000) + 1))}
        for watch in self._watches:
            if watch.fd in ready:
                watch.drain()
        return any(fd in ready for fd in others)

    def close(self) -> None:
        while self._watches:
            self._watches.pop().close()

    def __del__(self) -> None:
        self.close()


class Idle:
    """For one who has nothing to do."""

    def __init__(self, queue: TaskQueue) -> None:
        self.registry = process.registry
        self._queue = queue
        self._watches: Watches | None = None
        self._pause = MIN_PAUSE_S

    def __enter__(self) -> Idle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watches is not None:
            self._watches.close()
            self._watches = None

    def wait(self, deadline: float | None, *others: int, enough: Callable[[], bool] | None = None) -> Claim | None:
        """The next task. None: it is too late, or one of the `others` can be read, or it is `enough`."""
        queue = self._queue
        if self._watches is None:
            self._watches = self._watch(enough is not None)
        look_at = monotonic() + RECHECK_S
        while True:
            # Registered first: what comes after this try wakes us.
            claim = queue.taker.try_claim(look=True)
            if claim is not None:
                self._pause = MIN_PAUSE_S
                return claim
            now = monotonic()
            if (deadline is not None and now >= deadline) or (enough is not None and enough()):
                return None
            if now >= look_at:
                look_at = now + RECHECK_S
                if queue.taker.finder.look():
                    self._watches.close()
                    self._watches = self._watch(enough is not None)
                    continue
            if self._watches.wait(self._how_long(now, look_at, deadline), *others):
                return None

    def _watch(self, until_all_is_done: bool) -> Watches:
        queue = self._queue
        queue._sequence.read()  # so that it is there to be watched
        places = queue._places
        return Watches(
            (queue._sequence.path, system.WATCH_WRITING),
            (places.running, system.WATCH_CLOSING),
            # Who takes task after task writes to its slot, and does not close it.
            (places.slots, system.WATCH_WRITING if until_all_is_done else system.WATCH_CLOSING),
        )

    def _how_long(self, now: float, look_at: float, deadline: float | None) -> float:
        until = look_at if deadline is None else min(look_at, deadline)
        due = self._queue.taker.finder.next_due
        seconds = until - now
        if due is not None:
            seconds = min(seconds, max(0.0, due - self._queue.clock.now()))
        assert self._watches is not None
        if self._queue.is_shared or not self._watches.complete:  # nobody tells us
            seconds = min(seconds, self._pause)
            self._pause = min(self._pause * 2, MAX_PAUSE_S)
        return seconds


def ended(queue: TaskQueue, id: str, deadline: float | None) -> Task:
    """The task, once it has ended."""
    task = queue.get(id)
    if task.state in ENDED:
        return task
    watched: tuple[str, ...] = ()
    watches = Watches()
    try:
        while True:
            files = queue.files_of(id)
            if files != watched:  # it has got one of its own
                watches.close()
                watched = files
                watches = Watches(*((path, system.WATCH_WRITING) for path in files))
            task = queue.get(id)
            if task.state in ENDED:
                return task
            now = monotonic()
            if deadline is not None and now >= deadline:
                raise Timeout(
                    f"{queue.path}: task {id!r} is still {task.state}. Wait longer with timeout=…", path=queue.path
                )
            longest = RECHECK_S if watches.complete and not queue.is_shared else MAX_PAUSE_S / 10
            watches.wait(longest if deadline is None else min(longest, deadline - now))
    finally:
        watches.close()
