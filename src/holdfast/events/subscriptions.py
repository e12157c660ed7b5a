"""Subscriptions: events that a consumer handles one after the other, and a checkpoint that survives the consumer.

    for event in store.subscribe("mailer", query):
        send(event)                  to ask for the next event acknowledges this one

    waiting ── the lock of the name ──▶ active ── an event is given ──▶ handled ── the next is asked for ──▶ saved
                                          ▲                                                                    │
                                          └────────────────────────────────────────────────────────────────────┘

Of all processes that consume under one name, the holder of a lock is active, and the others wait for the lock. The
kernel, or the server, gives the lock to the next one when the active process dies. It goes on behind the checkpoint, so
the event that was being handled comes again, and only that one.

With a connection, the checkpoint is in the consumer's own database (`transactions`), and each event is handled exactly
once there. The checkpoint of the store is then a copy for `EventStore.subscriptions`.

A consumer whose lock is lost, because the server restarted for instance, waits for it and goes on behind the
checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from .. import wait
from ..errors import CorruptStore, HoldfastError
from .model import Query, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..locks.hold import Hold
    from .reading import Reading
    from .store import EventStore
    from .transactions import Transaction

_AT_ONCE = 256
_COPY_EVERY_S = 1.0


class SubscriptionStatus(msgspec.Struct, frozen=True):
    """How far a subscription is.

    checkpoint: all matching events up to this position were handled
    head: the position of the last event of the store
    active: a process consumes; `holder` is its description, if this machine shows it
    waiting: how many processes wait to take over
    """

    name: str
    checkpoint: int
    head: int
    active: bool
    holder: str = ""
    waiting: int = 0

    @property
    def lag(self) -> int:
        """The number of events behind the checkpoint, matching or not."""
        return self.head - self.checkpoint

    def as_dict(self) -> dict[str, Any]:
        """The fields and the lag, as a dictionary that can be written as JSON."""
        return {**msgspec.structs.asdict(self), "lag": self.lag}


def subscriptions(store: EventStore) -> list[SubscriptionStatus]:
    found = []
    for name in store._engine.checkpoints():
        checkpoint = store._engine.checkpoint(name)
        position = checkpoint.position()
        if position is None:
            continue  # it was removed meanwhile
        status = checkpoint.lock.status()
        holder = str(status.holders[0]) if status.holders else ""
        head = max(store.head(), position)
        found.append(SubscriptionStatus(name, position, head, status.held, holder, len(status.waiters)))
    return found


def unsubscribe(store: EventStore, name: str) -> bool:
    checkpoint = store._engine.checkpoint(name)
    with checkpoint.lock.acquire(store.lock_timeout):
        try:
            was_there = checkpoint.position() is not None
        except CorruptStore:
            was_there = True
        checkpoint.remove()
    return was_there


class Subscription(Iterator[StoredEvent], AsyncIterator[StoredEvent]):
    """What `EventStore.subscribe` returns: iterate over it with `for` or `async for`, in one thread or task.

    Leaving a `with` block, or `close`, lets the next process take over. The event that was given last and is not
    acknowledged comes again.
    """

    def __init__(
        self, store: EventStore, name: str, query: Query, after: int, timeout: float | None, connection: Any
    ) -> None:
        self.name = name
        self._store, self._query, self._after, self._timeout = store, query, after, timeout
        self._checkpoint = store._engine.checkpoint(name)
        self._own: Transaction | None = None
        if connection is not None:
            from .transactions import Transaction

            self._own = Transaction(connection, store.id, name)
        self._hold: Hold | None = None
        self._copied = 0.0
        self._forget()

    def _forget(self) -> None:
        self._given: StoredEvent | None = None  # and not acknowledged
        self._position = 0  # the checkpoint
        self._read = 0  # up to here all matching events were given, or are ready
        self._head = 0  # of what was read
        self._ready: deque[StoredEvent] = deque()
        self._reading: Reading | None = None

    def __next__(self) -> StoredEvent:
        if self._own is not None and self._own.is_async:
            raise TypeError("with an asynchronous connection, a subscription is read with `async for`")
        try:
            event = wait.drive(self._next(asynchronous=False))
        except BaseException:
            self.close()
            raise
        if event is None:
            self.close()
            raise StopIteration
        return event

    async def __anext__(self) -> StoredEvent:
        if self._own is not None and not self._own.is_async:
            raise TypeError("in a task, the connection of a subscription is a psycopg.AsyncConnection")
        try:
            event = await wait.adrive(self._next(asynchronous=True))
        except Exception:  # a cancellation interrupts no thread, so the next call can go on
            await self.aclose()
            raise
        if event is None:
            await self.aclose()
            raise StopAsyncIteration
        return event

    def acknowledge(self) -> None:
        """Save that the event that was given last is handled. To ask for the next event does the same."""
        wait.drive(self._acknowledge())

    async def aacknowledge(self) -> None:
        await wait.adrive(self._acknowledge())

    def close(self) -> None:
        """Let the next process take over. Iterating again waits for the turn again."""
        self._forget()
        hold, self._hold = self._hold, None
        with suppress(HoldfastError):  # it was lost
            if hold is not None:
                hold.release()
        self._checkpoint.close()

    async def aclose(self) -> None:
        await wait.in_thread(self.close)

    def __del__(self) -> None:
        if getattr(self, "_hold", None) is not None:  # as a generator would: a loop may have been left
            self._hold._drop()  # type: ignore[union-attr]

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # The steps, for threads and tasks.

    def _next(self, *, asynchronous: bool) -> wait.Steps[StoredEvent | None]:
        """The next event. None: none has come within the timeout."""
        deadline = None if self._timeout is None else monotonic() + self._timeout
        yield from self._acknowledge()
        try:
            while True:
                if not self._is_active:
                    yield from self._take_over(deadline, asynchronous=asynchronous)
                if not self._ready:
                    yield from _run(self._read_on)
                if not self._ready:
                    yield from self._store._news(self._read, self._head, deadline)
                elif (yield from self._begin(self._ready[0])):
                    self._given = self._ready.popleft()
                    return self._given
        except wait.DeadlinePassed:
            return None

    @property
    def _is_active(self) -> bool:
        return self._hold is not None and not self._hold.released and not self._hold.lost

    def _take_over(self, deadline: float | None, *, asynchronous: bool) -> wait.Steps[None]:
        yield from _run(self.close)
        left = None if deadline is None else max(0.0, deadline - monotonic())
        lock = self._checkpoint.lock
        self._hold = yield from lock._steps(None, left, asynchronous=asynchronous, explains=False)
        position = copied = yield from _run(self._load)
        if self._own is not None:
            position = yield from self._own.begin(copied)
        if position != copied:  # the last consumer was killed before it saved the copy: save it at the end
            self._copied = monotonic()
        self._position = self._read = position

    def _load(self) -> int:
        position = self._checkpoint.position()
        if position is None:
            position, head = self._after, self._store.head()
            if position > head:
                raise ValueError(f"after={position} is no position of {self._store.path}, which ends with {head}")
            self._checkpoint.create(position)
        return position

    def _read_on(self) -> None:
        """Read the next events. At the end, the checkpoint is there: none of the events before it matches."""
        try:
            if self._reading is None:
                self._reading = self._store.read(self._query, self._read)
                self._head = self._reading.head
                if self._head < self._read:
                    raise CorruptStore(
                        f"{self._checkpoint.where} is at event {self._read}, and the store ends with {self._head}: was "
                        "it brought back from a copy? Call unsubscribe, and subscribe with after=.",
                        path=self._store.path,
                    )
            found = self._reading.some(_AT_ONCE)
        except BaseException:
            self._reading = None
            raise
        self._ready.extend(found)
        if found:
            self._read = found[-1].position
            return
        self._reading = None
        if self._head > self._read or self._copied:
            self._read = self._head
            self._checkpoint.save(self._head)
            self._copied = 0.0

    def _begin(self, event: StoredEvent) -> wait.Steps[bool]:
        """Begin the transaction of an event. False: another consumer has handled it."""
        if self._own is None or (yield from self._own.advance(self._position, event.position)):
            return True
        yield from _run(self.close)
        return False

    def _acknowledge(self) -> wait.Steps[None]:
        event, self._given = self._given, None
        if event is None:
            return
        if self._own is not None and not (yield from self._own.commit(event.position)):
            yield from _run(self.close)
        if not self._is_active:
            return  # the event comes again, here or elsewhere
        self._position = event.position
        now = monotonic()
        if self._own is None or now - self._copied > _COPY_EVERY_S:
            yield from _run(lambda: self._checkpoint.save(event.position))
            self._copied = now


def _run(work: Callable[[], Any]) -> wait.Steps[Any]:
    step = wait.Run(work)
    yield step
    return step.outcome()
