"""The recorders for aggregates, applications and what they have processed (`eventsourcing.persistence`).

An event of an aggregate is an event of the store:

    type        the topic
    data        the state
    tags        "id:" and the id of the aggregate, which makes its stream
    metadata    in the notes of Holdfast (`events.model.notes_of`), which `forget` leaves:
                version: in the stream
                top: the greatest version so far, in a stream that is not in order (see below)
                tracking: the notification that was processed, with a tag "tracking:" and the name of its application

Its position is its notification id. So each application has a store of its own.

A stream has each version once. An append carries the condition that its streams are as the recorder knows them: their
last version, and the position up to which that is known. The recorder remembers this from reading and appending. It
assumes that an unknown stream is new. Only if the condition fails, it looks, and tries again or raises IntegrityError.
So an append to a stream that was read before is one operation, and no event needs a tag for its version.

Versions ascend in a stream. So a range of versions is read from one end of the stream, or from a position that is found
by halving. A version that is added behind a greater one, such as a snapshot of an earlier version, has `top`, and so
has every later event of its stream. A stream whose last event has `top` is sorted when it is read.

An event that was forgotten (`EventStore.forget`) is not given to applications. Its version counts as recorded.
"""

from __future__ import annotations

from itertools import chain, dropwhile, islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    IntegrityError,
    Notification,
    ProcessRecorder,
    StoredEvent,
    Subscription,
    Tracking,
    TrackingRecorder,
)

from .. import events
from ..events import AppendCondition, ConditionFailed, Event, EventStore, Query
from ..events.model import NOTES, notes_of
from .following import Follower
from .translation import bytes_of, json_of, translated

if TYPE_CHECKING:
    from collections.abc import Sequence

_ID, _TRACKING = "id:", "tracking:"
TRACKED = "holdfast:tracked"  # the type of an event that only says what was processed
_MAX_KNOWN = 10_000  # streams


class _Stream(NamedTuple):
    """What is known about the events with one tag."""

    last: int | None  # the greatest version or notification id; None: there is no event
    is_sorted: bool
    after: int  # the position up to which that is known


_NEW = _Stream(None, True, 0)


class _Recorder:
    """Streams in an event store. `has_text_ids`: the ids of aggregates are texts, also those that look like a UUID."""

    def __init__(self, store: EventStore, *, has_text_ids: bool = False) -> None:
        self.store = store
        self._has_text_ids = has_text_ids
        self._known: dict[str, _Stream] = {}

    def _remember(self, tag: str, stream: _Stream) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[tag] = stream

    # Appending.

    def _append(
        self, stored: Sequence[StoredEvent], tracking: Tracking | None = None, also: Sequence[Event] = ()
    ) -> int:
        """Append all or, if one of them is not new, none. Return the position of the last event."""
        tags = list(dict.fromkeys(_ID + str(event.originator_id) for event in stored))
        if len({(str(event.originator_id), event.originator_version) for event in stored}) < len(stored):
            raise IntegrityError("two of the events have the same version of the same aggregate")
        if tracking is not None:
            tags.append(_TRACKING + tracking.application_name)
        query = Query(tuple(events.QueryItem(tags=frozenset({tag})) for tag in tags))
        streams = {tag: self._known.get(tag, _NEW) for tag in tags}
        has_looked = False
        while True:
            after = min((stream.after for stream in streams.values()), default=0)
            grown = self._grown(streams, stored, tracking, has_looked)
            if grown is not None:
                batch = _batch(grown, stored, tracking)
                try:
                    position = self.store.append([*also, *batch], AppendCondition(query, after))
                except ConditionFailed:
                    pass
                else:
                    for tag, stream in grown.items():
                        self._remember(tag, stream._replace(after=position))
                    return position
            streams, has_looked = {tag: self._look(tag) for tag in tags}, True

    def _grown(
        self, streams: dict[str, _Stream], stored: Sequence[StoredEvent], tracking: Tracking | None, has_looked: bool
    ) -> dict[str, _Stream] | None:
        """The streams with the new events. None: that cannot be said before one has looked."""
        if not has_looked and len({stream.after for stream in streams.values()}) > 1:
            return None
        grown = dict(streams)
        for event in stored:
            tag, version = _ID + str(event.originator_id), event.originator_version
            last, is_sorted, after = grown[tag]
            if last is not None and version <= last:
                if not has_looked:
                    return None
                if self._select(tag, gt=version - 1, lte=version):
                    text = f"{self.store.path}: version {version} of {event.originator_id} was recorded already"
                    raise IntegrityError(text)
                is_sorted = False
            grown[tag] = _Stream(version if last is None else max(version, last), is_sorted, after)
        if tracking is not None:
            tag = _TRACKING + tracking.application_name
            last, _, after = grown[tag]
            if last is not None and tracking.notification_id <= last:
                raise IntegrityError(
                    f"{self.store.path}: notification {tracking.notification_id} of {tracking.application_name} was "
                    f"processed already, and so was {last}"
                )
            grown[tag] = _Stream(tracking.notification_id, True, after)
        return grown

    # Reading.

    def _look(self, tag: str) -> _Stream:
        """What the store says about a stream."""
        reading = self.store.read(Query.of(tags=(tag,)), limit=1, backwards=True)
        return self._learn(tag, next(reading, None), reading.head)

    def _learn(self, tag: str, last: events.StoredEvent | None, head: int) -> _Stream:
        stream = _Stream(None, True, head)
        if last is not None:
            key = "tracking" if tag.startswith(_TRACKING) else "version"
            notes = notes_of(last.metadata)
            stream = _Stream(notes.get("top", notes[key]), "top" not in notes, head)
        self._remember(tag, stream)
        return stream

    def _select(
        self, tag: str, gt: int | None = None, lte: int | None = None, desc: bool = False, limit: int | None = None
    ) -> list[events.StoredEvent]:
        """The events of a stream in order of their versions."""
        query = Query.of(tags=(tag,))
        if gt is not None or desc or limit is not None:
            backwards = self.store.read(query, backwards=True)
            last = next(backwards, None)
            if last is None:
                return []
            if self._learn(tag, last, backwards.head).is_sorted:
                if desc or limit is None:
                    not_above = dropwhile(lambda event: not _is_within(event, None, lte), chain([last], backwards))
                    found = list(islice(takewhile(lambda event: _is_within(event, gt, None), not_above), limit))
                    return found if desc else found[::-1]
                forwards = self.store.read(query, self._position(query, gt, last))
                return list(islice(takewhile(lambda event: _is_within(event, None, lte), forwards), limit))
        reading = self.store.read(query)
        found = list(reading)
        if found:
            self._learn(tag, found[-1], reading.head)
        found.sort(key=_version, reverse=desc)
        return [event for event in found if _is_within(event, gt, lte)][:limit]

    def _position(self, query: Query, gt: int | None, last: events.StoredEvent) -> int:
        """A position behind which the versions greater than `gt` begin, in a stream that is in order."""
        low, high = 0, last.position
        while gt is not None and low < high:
            middle = (low + high) // 2
            event = next(self.store.read(query, middle, 1))
            if _version(event) > gt:
                high = middle
            else:
                low = event.position
        return low

    def _id_in(self, event: events.StoredEvent) -> UUID | str:
        text = next(tag for tag in event.tags if tag.startswith(_ID))[len(_ID) :]
        if not self._has_text_ids and len(text) == 36:
            try:
                id = UUID(text)
            except ValueError:
                return text
            return id if str(id) == text else text
        return text

    def _stored(self, event: events.StoredEvent) -> StoredEvent:
        return StoredEvent(self._id_in(event), _version(event), event.type, bytes_of(event.data))

    def _notification(self, event: events.StoredEvent) -> Notification:
        state = bytes_of(event.data)
        return Notification(self._id_in(event), _version(event), event.type, state, event.position)


def _version(event: events.StoredEvent) -> int:
    return int(notes_of(event.metadata)["version"])


def _is_within(event: events.StoredEvent, gt: int | None, lte: int | None) -> bool:
    version = _version(event)
    return (gt is None or version > gt) and (lte is None or version <= lte)


def _batch(grown: dict[str, _Stream], stored: Sequence[StoredEvent], tracking: Tracking | None) -> list[Event]:
    """The events to append. `grown`: their streams afterwards."""
    batch = []
    for number, event in enumerate(stored, 1):
        tag = _ID + str(event.originator_id)
        notes: dict[str, Any] = {"version": event.originator_version}
        tags = {tag}
        if not grown[tag].is_sorted:
            notes["top"] = grown[tag].last
        if tracking is not None and number == len(stored):
            tags.add(_TRACKING + tracking.application_name)
            notes["tracking"] = tracking.notification_id
        batch.append(Event(event.topic, json_of(event.state), tags, {NOTES: notes}))
    if tracking is not None and not stored:
        tag = _TRACKING + tracking.application_name
        batch.append(Event(TRACKED, None, {tag}, {NOTES: {"tracking": tracking.notification_id}}))
    return batch


class HoldfastAggregateRecorder(_Recorder, AggregateRecorder):
    """Streams of events, such as snapshots."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        with translated():
            if stored_events:
                self._append(stored_events)
        return None

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        with translated():
            found = self._select(f"{_ID}{originator_id}", gt, lte, desc, limit)
            return [self._stored(event) for event in found if not event.is_forgotten]


class HoldfastApplicationRecorder(HoldfastAggregateRecorder, ApplicationRecorder):
    """Streams of events, which together are the sequence of an application."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        if not stored_events:
            return []
        with translated():
            last = self._append(stored_events)
        return list(range(last - len(stored_events) + 1, last + 1))

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        query = Query.of(types=topics)
        after = 0 if start is None else start - 1 if inclusive_of_start else start
        found: list[Notification] = []
        with translated():
            while len(found) < limit:
                wanted = limit - len(found)
                some = list(self.store.read(query, after, wanted))
                found += [self._notification(event) for event in some if is_notification(event)]
                if len(some) < wanted or (stop is not None and some[-1].position >= stop):
                    break
                after = some[-1].position
        return found if stop is None else [one for one in found if one.id <= stop]

    def max_notification_id(self) -> int | None:
        with translated():
            backwards = self.store.read(backwards=True)
            return next((event.position for event in backwards if is_notification(event)), None)

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        with translated():
            return HoldfastSubscription(self, gt, topics)


class HoldfastTrackingRecorder(_Recorder, TrackingRecorder):
    """What was processed of other applications: for each of them, its last notification.

    A view that keeps its state in the same store appends its own events together with the tracking.
    """

    def insert_tracking(self, tracking: Tracking, *also: Event) -> None:
        with translated():
            self._append([], tracking, also)

    def max_tracking_id(self, application_name: str) -> int | None:
        with translated():
            return self._look(_TRACKING + application_name).last


class HoldfastProcessRecorder(HoldfastTrackingRecorder, HoldfastApplicationRecorder, ProcessRecorder):
    """The sequence of an application that processes the notifications of others: its events, and what they are for."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        tracking: Tracking | None = kwargs.get("tracking")
        if tracking is None:
            return super().insert_events(stored_events)
        with translated():
            last = self._append(stored_events, tracking)
        return list(range(last - len(stored_events) + 1, last + 1)) if stored_events else []


class HoldfastSubscription(Subscription[HoldfastApplicationRecorder]):
    def __init__(self, recorder: HoldfastApplicationRecorder, gt: int | None, topics: Sequence[str]) -> None:
        super().__init__(recorder, gt, topics)
        self._follower = Follower(recorder.store, Query.of(types=topics), gt or 0)

    def stop(self) -> None:
        super().stop()
        self._follower.stop()

    def __next__(self) -> Notification:
        while not is_notification(event := self._follower.next()):
            pass
        with translated():
            return self._recorder._notification(event)


def is_notification(event: events.StoredEvent) -> bool:
    """Does it belong to an aggregate, and is its state there? Not if it only says what was processed, if another
    program appended it, or if it was forgotten."""
    return "version" in notes_of(event.metadata) and not event.is_forgotten
