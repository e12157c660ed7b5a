"""What `read` and `tail` give: events one after the other, for threads and for tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from threading import Lock
from typing import TypeVar

from .. import wait
from .model import Query, StoredEvent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .store import EventStore

Value = TypeVar("Value")

_AT_ONCE = 256


class Reading(Iterator[StoredEvent]):
    """The events of one `read`. `head` was the last event of the store when it began."""

    def __init__(self, found: Iterator[StoredEvent], head: int, limit: int | None) -> None:
        self._found = found
        self.head = head
        self._left = limit
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[StoredEvent]:
        if self._left is None:
            return self._found  # a step less for every event
        return self

    def __next__(self) -> StoredEvent:
        if self._left is not None:
            if self._left <= 0:
                raise StopIteration
            self._left -= 1
        return next(self._found)

    def some(self, most: int) -> list[StoredEvent]:
        """The next few. After an error of the store: those before it, and the error when more are asked for."""
        if self._error is not None:
            raise self._error
        found: list[StoredEvent] = []
        try:
            for event in islice(self, most):
                found.append(event)  # `extend` would lose what came before an error
        except Exception as error:
            if not found:
                raise
            self._error = error
        return found


class AsyncReading(AsyncIterator[StoredEvent]):
    """A `Reading` for tasks: several events are read at once, in a thread. (No generator: those want to be closed.)

    A task may be cancelled while the thread reads. The next caller gets the events of that reading.
    """

    def __init__(self, begin: Callable[[], Reading]) -> None:
        self._begin = begin
        self._reading: Reading | None = None
        self._ready: deque[StoredEvent] = deque()
        self._mutex = Lock()

    def _read_on(self) -> None:
        with self._mutex:
            if not self._ready:
                self._ready.extend(self._some())

    def _some(self) -> list[StoredEvent]:
        if self._reading is None:
            self._reading = self._begin()
        return self._reading.some(_AT_ONCE)

    async def __anext__(self) -> StoredEvent:
        if not self._ready:
            await in_thread(self._read_on)
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.popleft()


class AsyncTail(AsyncReading):
    """The same without end."""

    def __init__(self, store: EventStore, query: Query, after: int) -> None:
        self._store = store
        self._after = after  # up to here everything was given, or is ready
        self._head = 0  # of what was read
        super().__init__(lambda: store.read(query, self._after))

    def _some(self) -> list[StoredEvent]:
        try:
            found = super()._some()
        except BaseException:
            self._reading = None  # begin again behind what was given
            raise
        # By what was found: of what is ready somebody may take all at this very moment.
        if self._reading is not None:
            self._head = max(self._head, self._reading.head)
        if found:
            self._after = found[-1].position
        else:
            self._after = max(self._after, self._head)
            self._reading = None
        return found

    async def __anext__(self) -> StoredEvent:
        while True:
            try:
                return await super().__anext__()
            except StopAsyncIteration:
                await wait.adrive(self._store._news(self._after, self._head, None))


async def in_thread(work: Callable[[], Value]) -> Value:
    from anyio.to_thread import run_sync

    return await run_sync(work)
