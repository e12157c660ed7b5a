"""`EventStore`: events are appended to a directory, under conditions, by any number of processes, and read by others.

    <store>/store.json     what this is: format, and an id that is in every line
    <store>/.store.lock    held while somebody appends
    <store>/events/…       the log, which is the only truth (`lines`, `log`)
    <store>/ledger         up to where it is written and on disk (`ledger`); derived
    <store>/index/…        where what is (`index`); derived
    <store>/projections/…  what was made of events (`projections`)

Readers take no lock. They go up to what is on disk, and so never see a part of a batch, nor anything that is taken
back.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from time import monotonic
from typing import Any, TypeVar

import msgspec

from .. import process, system, wait
from ..errors import CorruptStore
from ..locks import base
from ..paths import mount_at
from ..watch import Waiting
from . import about, check, decisions, lines, projections
from .commit import Committer
from .decisions import Decide, Decision, Projection
from .model import AppendCondition, Event, Query, StoredEvent
from .reading import AsyncReading, AsyncTail, Reading, in_thread
from .requests import Request
from .view import NoSegment, View

State = TypeVar("State")

SEGMENT_SIZE = 2 << 20  # what is in the last one is read when a store is opened
_ALL = Query()


class EventStore:
    """An event log in a directory, which is made if it is not there.

    lock_timeout: how long an append waits for the others: None for ever, 0 one try, else seconds
    durable: what was appended survives a power failure, and readers see nothing that might not
    types: classes (msgspec Structs, dataclasses) by the type of the event whose data they are, or just the classes
    segment_size: when to begin a new file, in bytes
    mode: permissions of the files
    """

    def __init__(
        self,
        path: base.StrPath,
        *,
        lock_timeout: float | None = 5,
        durable: bool = True,
        types: Mapping[str, type] | Iterable[type] = (),
        segment_size: int = SEGMENT_SIZE,
        mode: int = 0o644,
    ) -> None:
        self.path = about.absolute(path)
        if not isinstance(segment_size, int) or not 1 <= segment_size < 1 << 31:
            raise ValueError(f"segment_size is a number of bytes below 2 GiB, not {segment_size!r}")
        self.lock_timeout = base.check_timeout(lock_timeout)
        self.durable = durable
        self.types = dict(types) if isinstance(types, Mapping) else {kind.__name__: kind for kind in types}
        for kind in self.types.values():
            if not isinstance(kind, type):
                raise TypeError(f"types are classes, not {kind!r}")
        self.id = about.open_directory(self.path, mode)
        self._tag = tag = about.tag_of(self.id)
        self._mode = mode
        mount = mount_at(system.stat(self.path).st_dev, self.path)
        self._view = View(self.path, tag, mode, shared=not mount.is_ours, anew=mount.reads_old)
        self._committer = Committer(
            self.path,
            self._view,
            tag,
            lock_timeout=self.lock_timeout,
            durable=durable,
            mode=mode,
            segment_size=segment_size,
        )
        _stores.add(self)

    def __repr__(self) -> str:
        return f"holdfast.events.EventStore({self.path!r})"

    def close(self) -> None:
        """Close all files. Not needed; whatever is done next opens them again. (A signal handler that comes while this
        thread appends or reads closes nothing.)"""
        if self._committer.is_ours:
            return
        with self._view.mutex:
            self._view.forget()
        self._committer.close()

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Appending.

    def append(self, events: Event | Iterable[Event], condition: AppendCondition | None = None) -> int:
        """Append all of the events, or none. Gives the position of the last one.

        Raises ConditionFailed if something matches the condition's query that came after its `after`, Timeout if the
        others do not let us have the lock for `lock_timeout`.
        """
        request = self._request(events, condition)
        self._committer.submit(request)
        return _answer(request)

    async def aappend(self, events: Event | Iterable[Event], condition: AppendCondition | None = None) -> int:
        """The same for asyncio and trio. Cancelling it has no effect on the store; once it is written, it is too late,
        and the cancellation comes with the next `await`."""
        from .tasks import uncancelled

        request = self._request(events, condition)
        await uncancelled(lambda: self._committer.submit(request), lambda: self._committer.queue.withdraw(request))
        return _answer(request)

    def _request(self, events: Event | Iterable[Event], condition: AppendCondition | None) -> Request:
        if isinstance(events, Event):
            events = (events,)
        elif isinstance(events, Mapping) or not isinstance(events, Iterable):
            raise TypeError(f"what is appended are Events, not {events!r}")
        if condition is not None and not isinstance(condition, AppendCondition):
            hint = "; several events are a list" if isinstance(condition, Event) else ""
            raise TypeError(f"the condition of an append is an AppendCondition, not {condition!r}{hint}")
        return Request(list(map(self._draft, events)), condition, self.lock_timeout)

    def _draft(self, event: Event) -> lines.Draft:
        if not isinstance(event, Event):
            raise TypeError(f"what is appended are Events, not {event!r}")
        kind = self.types.get(event.type) if self.types else None
        if kind is not None:  # what cannot be read again must not be written
            try:
                msgspec.convert(msgspec.to_builtins(event.data), kind)
            except msgspec.ValidationError as error:
                raise TypeError(f"the data of {event.type!r} is no {kind.__name__}: {error}") from None
        return lines.Draft(event)

    def _append_drafts(self, batches: list[list[lines.Draft]]) -> None:
        """Several appends under one lock, each whole."""
        requests = [Request(drafts, None, self.lock_timeout) for drafts in batches]
        self._committer.submit(*requests)
        for request in requests:
            _answer(request)

    # Reading.

    def head(self) -> int:
        """The position of the last event; 0 if there is none."""
        visible = self._committer.disk.visible()
        if visible is not None:
            return visible
        with self._view.mutex:
            try:
                self._view.advance()
            except NoSegment:
                return 0
            self._check_rest()
            tail = self._view.tail
            if self.durable:
                try:
                    system.fdatasync(tail.fd)
                except OSError as error:
                    if error.errno not in (errno.EROFS, errno.EINVAL, errno.EBADF):
                        raise
            return tail.head

    def _check_rest(self) -> None:
        """Is what is behind the end what a crash may leave? Others may have gone on since we looked for the end."""
        while True:
            tail = self._view.tail
            found = (tail.first, tail.head)
            try:
                tail.check_rest()
                return
            except CorruptStore:
                self._view.advance()
                if (self._view.tail.first, self._view.tail.head) == found:
                    raise

    def read(self, query: Query = _ALL, after: int = 0, limit: int | None = None, backwards: bool = False) -> Reading:
        """The events that match, in order, or the last ones first. `reading.head` is safe to use as `after`."""
        if not isinstance(query, Query):
            raise TypeError(f"a query is made with Query.of(types=…, tags=…); this is none: {query!r}")
        if not isinstance(after, int) or (limit is not None and (not isinstance(limit, int) or limit < 0)):
            wrong = f"after is a position, not {after!r}"
            if isinstance(after, int):
                wrong = f"limit is a number of events, or None for all, not {limit!r}"
            raise ValueError(wrong)
        if self._committer.is_ours:
            raise self._committer.would_deadlock()
        head = self.head()
        if self._view.has_unsaved:
            self._view.save_runs()
        with self._view.mutex:
            if head:
                self._view.advance(head)
                tail = self._view.tail
                if tail.head < head:
                    raise self._view.ends_too_soon(head)
        return Reading(self._find(query, after, head, backwards), head, limit)

    def _find(self, query: Query, after: int, head: int, backwards: bool) -> Iterator[StoredEvent]:
        view = self._view
        if head <= after:
            return iter(())
        if query.matches_all:
            found = view.stream(max(0, after), head, backwards=backwards)
        else:
            places = view.candidates(query, max(0, after), head, backwards=backwards)
            found = (event for event in view.at(places) if query.matches(event))
        return map(self._with_types, found) if self.types else found

    def _with_types(self, event: StoredEvent) -> StoredEvent:
        kind = self.types.get(event.type)
        if kind is None:
            return event
        try:
            return msgspec.structs.replace(event, data=msgspec.convert(event.data, kind))
        except msgspec.ValidationError as error:
            raise TypeError(
                f"event {event.position}: the data of {event.type!r} is no {kind.__name__}: {error}. (Without types=… "
                "it can be read as it is.)"
            ) from None

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
                wait.drive(self._news(after, deadline, head))
            except wait.DeadlinePassed:
                return

    def _news(self, after: int, deadline: float | None, had: int) -> wait.Steps[None]:
        """Until there is something behind `after`. It is not to have fewer events than it had."""
        path = self._committer.disk.ledger_path
        waiting = Waiting(path)
        watched = None
        try:
            while (head := self.head()) <= after:
                if head < had:
                    raise CorruptStore(
                        f"{self.path}: there is no event {had} any more, the last one is {head}: was the store brought "
                        "back from a copy? Begin again, after a position that it has.",
                        path=self.path,
                        position=head,
                    )
                wait.check_deadline(deadline)
                inode = _inode_of(path)
                if inode != watched:
                    waiting.move(path)
                    watched = inode
                if not self._committer.disk.sleeps():
                    yield waiting.backoff.pause(deadline)
                    continue
                if waiting.begin() or self.head() > after:
                    continue  # registered, and said so: look once more, and only then sleep
                yield waiting.step(deadline)
                waiting.drain()
        finally:
            waiting.end()

    # Deciding.

    def decide(self, *wanted: Projection[Any]) -> Decision:
        """What the projections make of the events so far, and the condition that nothing of that has changed."""
        return decisions.decide(self, wanted)

    def execute(self, decide_fn: Callable[[Decide], Iterable[Event] | None], attempts: int = 3) -> int:
        """Read, decide, append; and again if something came in between. Gives the position of the last event.

        `decide_fn` gets a function that takes projections and gives their states, and returns the events to append.
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
        """Bring a projection up to date, from where it was left, and give its state, which has to be JSON."""
        return projections.project(self, name, fn, initial, query, rebuild=rebuild)

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

    def verify(self) -> check.Report:
        """Look at every line, and at what is derived from them. Changes nothing."""
        return check.verify(self)

    def rebuild_index(self) -> None:
        """Make again what is derived from the log."""
        if self._committer.is_ours:
            raise self._committer.would_deadlock()
        self._view.rebuild()

    def export(self, target: base.StrPath | Any, query: Query = _ALL, after: int = 0) -> int:
        """Write events as JSON lines to a file or to something with `write`. Gives how many."""
        return check.export(self, target, query, after)

    def import_(self, source: base.StrPath | Iterable[bytes | str]) -> int:
        """Append what `export` wrote. What was appended together is again. Gives how many."""
        return check.import_(self, source)

    async def averify(self) -> check.Report:
        return await in_thread(self.verify)

    async def arebuild_index(self) -> None:
        await in_thread(self.rebuild_index)

    async def aexport(self, target: base.StrPath | Any, query: Query = _ALL, after: int = 0) -> int:
        return await in_thread(lambda: self.export(target, query, after))

    async def aimport_(self, source: base.StrPath | Iterable[bytes | str]) -> int:
        return await _to_its_end(lambda: self.import_(source))

    def __reduce__(self) -> tuple[object, ...]:
        options = (self.lock_timeout, self.durable, self.types, self._committer.segment_size, self._mode)
        return _open_again, (self.path, *options)


def _inode_of(path: str) -> int | None:
    try:
        return system.stat(path).st_ino
    except FileNotFoundError:
        return None


def _answer(request: Request) -> int:
    if request.error is not None:
        try:
            raise request.error
        finally:
            request.error = None  # no circle
    return request.position


def _open_again(path: str, lock_timeout: Any, durable: bool, types: Any, segment_size: int, mode: int) -> EventStore:
    return EventStore(
        path, lock_timeout=lock_timeout, durable=durable, types=types, segment_size=segment_size, mode=mode
    )


async def _to_its_end(work: Callable[[], State]) -> State:
    """In a thread, and cancelled only afterwards: what it appends must not come as a surprise."""
    from .tasks import uncancelled

    results: list[State] = []
    await uncancelled(lambda: results.append(work()), lambda: False)
    return results[0]


_stores: weakref.WeakSet[EventStore] = weakref.WeakSet()


def _begin_again() -> None:
    """In a forked child: its threads are gone, and with them whoever held a mutex."""
    for store in list(_stores):
        store._view.know_nothing()  # the same one: whoever has begun to read goes on with it
        store._committer.begin_again()


process.after_fork_in_child(_begin_again)
