"""`EventStore`: events are appended, under conditions, by any number of processes, and read and followed by others.

This is the face: it knows queries, types and tasks, and no file and no server. What stores the events is an engine
(`engine`): a log in a directory (`log`), or a database.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from time import monotonic
from typing import Any, TypeVar

import msgspec

from .. import wait
from ..errors import CorruptStore
from ..locks import base
from . import copies, decisions, projections, subscriptions
from .decisions import Decide, Decision
from .draft import Draft
from .engine import Options, Report, open_engine
from .model import AppendCondition, Event, Query, StoredEvent
from .projections import Projection
from .reading import AsyncReading, AsyncTail, Reading, in_thread
from .requests import Request
from .schemas import Schemas, Upcast
from .subscriptions import Subscription, SubscriptionStatus

State = TypeVar("State")

SEGMENT_SIZE = 2 << 20
_ALL = Query()


class EventStore:
    """An event log in a directory, which is made if it is not there, or in a database.

    path: the directory, or a URL such as postgresql://user@host/database
    lock_timeout: how long an append waits for the others: None for ever, 0 one try, else seconds
    durable: an event that was appended survives a power failure, and readers see no other events
    types: classes (msgspec Structs, dataclasses) by the type of the event whose data they are, or just the classes
    upcasts: functions that turn data of a version into data of the next one: [upcast("OrderPlaced", 1, function), …]
    segment_size: bytes in a file of the log, before a new one begins. Opening a store may read the last one
    mode: permissions of the files
    """

    def __init__(
        self,
        path: base.StrPath,
        *,
        lock_timeout: float | None = 5,
        durable: bool = True,
        types: Mapping[str, type] | Iterable[type] = (),
        upcasts: Iterable[Upcast] = (),
        segment_size: int = SEGMENT_SIZE,
        mode: int = 0o644,
    ) -> None:
        if not isinstance(segment_size, int) or not 1 <= segment_size < 1 << 31:
            raise ValueError(f"segment_size is a number of bytes below 2 GiB, not {segment_size!r}")
        self.schemas = Schemas(types, upcasts)
        self._given = path
        self._options = Options(base.check_timeout(lock_timeout), durable, segment_size, mode)
        self._engine = open_engine(path, self._options)

    @property
    def path(self) -> str:
        """The directory, or the URL without its password."""
        return self._engine.name

    @property
    def id(self) -> str:
        """Two stores never have the same."""
        return self._engine.id

    @property
    def lock_timeout(self) -> float | None:
        return self._options.lock_timeout

    @property
    def durable(self) -> bool:
        return self._options.durable

    def __repr__(self) -> str:
        return f"holdfast.events.EventStore({self.path!r})"

    def close(self) -> None:
        """Close all files. Not needed; whatever is done next opens them again. (A signal handler that comes while this
        thread appends or reads closes nothing.)"""
        self._engine.close()

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Appending.

    def append(
        self, events: Event | Iterable[Event], condition: AppendCondition | None = None, *, connection: Any = None
    ) -> int:
        """Append all of the events, or none. Returns the position of the last event.

        connection: PostgreSQL: append in the transaction of this psycopg connection. The events are there if and only
            if the caller commits. Until then all other appends to the store wait

        Raises ConditionFailed if something matches the condition's query that came after its `after`, Timeout if the
        others do not let us have the lock for `lock_timeout`.
        """
        request = self._request(events, condition)
        if connection is None:
            self._engine.commit(request)
        else:
            self._engine.commit_on(connection, request)
        return _answer(request)

    async def aappend(
        self, events: Event | Iterable[Event], condition: AppendCondition | None = None, *, connection: Any = None
    ) -> int:
        """The same for asyncio and trio; `connection` is a psycopg.AsyncConnection. Cancelling it has no effect on the
        store; once it is written, it is too late, and the cancellation comes with the next `await`."""
        from .tasks import uncancelled

        request = self._request(events, condition)
        if connection is not None:
            await self._engine.acommit_on(connection, request)
            return _answer(request)
        request.may_withdraw = True
        await uncancelled(lambda: self._engine.commit(request), lambda: self._engine.withdraw(request))
        return _answer(request)

    def _request(self, events: Event | Iterable[Event], condition: AppendCondition | None) -> Request:
        if isinstance(events, Event):
            events = (events,)
        elif isinstance(events, Mapping) or not isinstance(events, Iterable):
            raise TypeError(f"append takes an Event or several, not {events!r}")
        if condition is not None and not isinstance(condition, AppendCondition):
            hint = "; several events are a list" if isinstance(condition, Event) else ""
            raise TypeError(f"the condition of an append is an AppendCondition, not {condition!r}{hint}")
        return Request(list(map(self.schemas.draft, events)), condition, self.lock_timeout)

    def _append_drafts(self, batches: Iterable[list[Draft]], condition: AppendCondition | None = None) -> None:
        """Several appends under one lock, each whole. The condition is that of the first one, and none is appended
        without those before it."""
        requests = [Request(drafts, None, self.lock_timeout) for drafts in batches]
        if condition is not None and requests:
            requests[0].condition = condition
            for before, request in pairwise(requests):
                request.behind = before
        self._engine.commit(*requests)
        for request in requests:
            _answer(request)

    # Reading.

    def head(self) -> int:
        """The position of the last event; 0 if there is none."""
        return self._engine.head()

    def read(self, query: Query = _ALL, after: int = 0, limit: int | None = None, backwards: bool = False) -> Reading:
        """The events that match, in order, or the last ones first. `reading.head` is safe to use as `after`."""
        _check_selection(query, after)
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ValueError(f"limit is a number of events, or None for all, not {limit!r}")
        head = self.head()
        found = self._engine.read(query, max(0, after), head, backwards=backwards, limit=limit)
        return Reading(map(self.schemas.read, found) if self.schemas else found, head, limit)

    def _between(self, query: Query, after: int, head: int) -> Iterator[StoredEvent]:
        """The events that match, up to a head that was visible."""
        found = self._engine.read(query, after, head, backwards=False, limit=None)
        return map(self.schemas.read, found) if self.schemas else found

    def read_last(self, query: Query = _ALL) -> StoredEvent | None:
        """The last event that matches."""
        return next(self.read(query, limit=1, backwards=True), None)

    async def ahead(self) -> int:
        return await in_thread(self.head)

    def aread(
        self, query: Query = _ALL, after: int = 0, limit: int | None = None, backwards: bool = False
    ) -> AsyncIterator[StoredEvent]:
        """`async for event in store.aread(…)`"""
        return AsyncReading(lambda: self.read(query, after, limit, backwards))

    async def aread_last(self, query: Query = _ALL) -> StoredEvent | None:
        return await in_thread(lambda: self.read_last(query))

    def tail(self, query: Query = _ALL, after: int = 0) -> AsyncIterator[StoredEvent]:
        """What matches, from `after` on, and then what comes, as it comes; without end."""
        return AsyncTail(self, query, after)

    def follow(self, query: Query = _ALL, after: int = 0, timeout: float | None = None) -> Iterator[StoredEvent]:
        """`tail` without an event loop. Ends when nothing has come for `timeout` seconds; None: never."""
        deadline = None
        head = 0
        while True:
            reading = self.read(query, after)
            head = max(head, reading.head)
            for event in reading:
                yield event
                deadline = None
            after = max(after, reading.head)
            if deadline is None and timeout is not None:
                deadline = monotonic() + timeout
            try:
                wait.drive(self._news(after, head, deadline))
            except wait.DeadlinePassed:
                return

    def _news(self, after: int, had: int, deadline: float | None) -> wait.Steps[None]:
        """Until there is something behind `after`. The store is not to have fewer events than it had."""
        head = yield from self._engine.wait(after, had, deadline)
        if head < had:
            raise CorruptStore(
                f"{self.path}: there is no event {had} any more, the last one is {head}: was the store brought "
                "back from a copy? Begin again, after a position that it has.",
                path=self.path,
                position=head,
            )

    def subscribe(
        self,
        name: str,
        query: Query = _ALL,
        *,
        after: int = 0,
        timeout: float | None = None,
        connection: Any = None,
    ) -> Subscription:
        """The events that match, one after the other, behind a checkpoint that the store keeps under a name.

            for event in store.subscribe("mailer", Query.of(types={"OrderPlaced"})):
                send(event)

        To ask for the next event acknowledges the one before. Of the processes that consume under one name, one is
        active. If it dies, the next one goes on, with the event that was not acknowledged.

        after: where a subscription that is new begins
        timeout: end when no event has come for so many seconds; None: never
        connection: psycopg or sqlite3: the checkpoint is in its database, and the store commits with each event
        """
        _check_selection(query, after)
        return Subscription(self, name, query, after, base.check_timeout(timeout), connection)

    def subscriptions(self) -> list[SubscriptionStatus]:
        """All subscriptions: how far they are, and whether a process is active."""
        return subscriptions.subscriptions(self)

    def unsubscribe(self, name: str) -> bool:
        """Forget a subscription and its checkpoint. False: there is none. Raises Timeout while a process is active."""
        return subscriptions.unsubscribe(self, name)

    # Forgetting.

    def forget(self, tag: str) -> int:
        """Erase the data and the metadata of all events that have this tag. Returns the number of events.

        The events keep their positions, ids, times, types and tags, so conditions and positions stay as they are. Their
        data is None from then on, and `event.is_forgotten` is true. States of projections with a name are removed, and
        are made again when they are needed. docs/events.md says what else remains. If this is killed, call it again.
        """
        if not isinstance(tag, str) or not tag:
            raise TypeError(f"forget takes one tag, which is a text, not {tag!r}")
        return self._engine.forget(tag)

    async def aforget(self, tag: str) -> int:
        return await _to_its_end(lambda: self.forget(tag))

    # Deciding.

    def decide(self, *wanted: Projection[Any]) -> Decision:
        """What the projections make of the events so far, and the condition that nothing of that has changed."""
        return decisions.decide(self, wanted)

    def execute(self, decide_fn: Callable[[Decide], Iterable[Event] | None], attempts: int = 3) -> int:
        """Read, decide, append; and again if another append came in between. Returns the last position.

        `decide_fn` gets a function that takes projections and returns their states. It returns the events to append.
        """
        return decisions.execute(self, decide_fn, attempts)

    def project(
        self,
        name: str,
        fn: Callable[[State, StoredEvent], State],
        initial: State | None = None,
        query: Query = _ALL,
        *,
        rebuild: bool = False,
    ) -> State:
        """Bring a projection up to date, from where it was left. Returns its state, which must be JSON."""
        projection: Projection[Any] = Projection(query, fn, initial, name)
        return projections.state_at(self, projection, self.head(), save_after=0, rebuild=rebuild)  # type: ignore[no-any-return]

    async def adecide(self, *wanted: Projection[Any]) -> Decision:
        return await in_thread(lambda: self.decide(*wanted))

    async def aexecute(self, decide_fn: Callable[[Decide], Iterable[Event] | None], attempts: int = 3) -> int:
        return await _to_its_end(lambda: self.execute(decide_fn, attempts))

    async def aproject(
        self,
        name: str,
        fn: Callable[[State, StoredEvent], State],
        initial: State | None = None,
        query: Query = _ALL,
        *,
        rebuild: bool = False,
    ) -> State:
        return await in_thread(lambda: self.project(name, fn, initial, query, rebuild=rebuild))

    # Looking after it.

    def verify(self) -> Report:
        """Check all events and everything that is derived from them. Changes nothing."""
        return self._engine.verify()

    def rebuild_index(self) -> None:
        """Make again what is derived from the log."""
        self._engine.rebuild()

    def backup(self, target: base.StrPath) -> int:
        """Copy a store in a directory to a new directory, while others append. Returns the position of its last event.

        The copy appears as a whole, and holds all that was appended before.
        """
        return self._engine.backup(os.fsdecode(target))

    def export(self, target: base.StrPath | Any, query: Query = _ALL, after: int = 0) -> int:
        """Write events as JSON lines to a file, or to an object with `write`. Returns their number."""
        return copies.export(self, target, query, after)

    def import_(self, source: base.StrPath | Iterable[bytes | str]) -> int:
        """Append the lines that `export` wrote. A batch stays a batch. Returns the number of events."""
        return copies.import_(self, source)

    def copy_to(self, target: EventStore) -> int:
        """Append to another store, also of another engine, what it does not have yet: with the same positions, ids,
        times and batches. Returns the number of events. It goes on where an earlier call was killed.

        Raises CorruptStore if the target has other events.
        """
        return copies.copy(self, target)

    async def averify(self) -> Report:
        return await in_thread(self.verify)

    async def arebuild_index(self) -> None:
        await in_thread(self.rebuild_index)

    async def aexport(self, target: base.StrPath | Any, query: Query = _ALL, after: int = 0) -> int:
        return await in_thread(lambda: self.export(target, query, after))

    async def aimport_(self, source: base.StrPath | Iterable[bytes | str]) -> int:
        return await _to_its_end(lambda: self.import_(source))

    def __reduce__(self) -> tuple[object, ...]:
        words = {**msgspec.structs.asdict(self._options), "types": self.schemas.types, "upcasts": self.schemas.upcasts}
        return partial(EventStore, self._given, **words), ()


def _check_selection(query: Query, after: int) -> None:
    if not isinstance(query, Query):
        raise TypeError(f"a query is made with Query.of(types=…, tags=…); this is none: {query!r}")
    if not isinstance(after, int):
        raise ValueError(f"after is a position, not {after!r}")  # noqa: TRY004


def _answer(request: Request) -> int:
    if request.error is not None:
        try:
            raise request.error
        finally:
            request.error = None  # no circle
    return request.position


async def _to_its_end(work: Callable[[], State]) -> State:
    """In a thread, and cancelled only afterwards: what it appends must not come as a surprise."""
    from .tasks import uncancelled

    results: list[State] = []
    await uncancelled(lambda: results.append(work()), lambda: False)
    return results[0]
