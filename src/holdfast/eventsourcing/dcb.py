"""The recorder for dynamic consistency boundaries (`eventsourcing.dcb`).

Both packages mean the same by a query and a condition, so nothing is decided here. An event has one entry in the
metadata, and only if its tags are not in order or not unique: `tags`, as they were given. Events that were forgotten
(`EventStore.forget`) are not given to applications.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventsourcing.dcb.api import (
    DCBAppendCondition,
    DCBEvent,
    DCBQuery,
    DCBReadResponse,
    DCBRecorder,
    DCBSequencedEvent,
    DCBSubscription,
)
from eventsourcing.persistence import ProgrammingError

from ..events import AppendCondition, Event, EventStore, Query, QueryItem, StoredEvent
from .following import Follower
from .translation import bytes_of, json_of, translated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class HoldfastDCBRecorder(DCBRecorder):
    """Events with tags in an event store."""

    def __init__(self, store: EventStore) -> None:
        self.store = store

    def append(self, events: Sequence[DCBEvent], condition: DCBAppendCondition | None = None) -> int:
        if not events:
            raise ProgrammingError("append needs at least one event")
        with translated():
            unless = None
            if condition is not None:
                unless = AppendCondition(_query(condition.fail_if_events_match), condition.after)
            return self.store.append(list(map(_event, events)), unless)

    def read(
        self, query: DCBQuery | None = None, *, after: int | None = None, limit: int | None = None
    ) -> HoldfastReadResponse:
        with translated():
            reading = self.store.read(_query(query), after or 0, limit)
            if limit is None:
                return HoldfastReadResponse(reading, reading.head or None)
            found = list(reading)
            return HoldfastReadResponse(iter(found), found[-1].position if found else None)

    def subscribe(
        self, query: DCBQuery | None = None, *, after: int | None = None
    ) -> DCBSubscription[HoldfastDCBRecorder]:
        with translated():
            return HoldfastDCBSubscription(self, query, after)


class HoldfastReadResponse(DCBReadResponse):
    """The events of one `read`, which are read as they are asked for, and the position up to which they go."""

    def __init__(self, found: Iterator[StoredEvent], head: int | None) -> None:
        self._found, self._head = found, head

    @property
    def head(self) -> int | None:
        return self._head

    def __next__(self) -> DCBSequencedEvent:
        with translated():
            event = next((event for event in self._found if not event.is_forgotten), None)
            if event is not None:
                return _sequenced(event)
        raise StopIteration


class HoldfastDCBSubscription(DCBSubscription[HoldfastDCBRecorder]):
    def __init__(self, recorder: HoldfastDCBRecorder, query: DCBQuery | None, after: int | None) -> None:
        super().__init__(recorder, query, after)
        self._follower = Follower(recorder.store, _query(query), after or 0)

    def stop(self) -> None:
        super().stop()
        self._follower.stop()

    def __next__(self) -> DCBSequencedEvent:
        while (event := self._follower.next()).is_forgotten:
            pass
        return _sequenced(event)


def _query(query: DCBQuery | None) -> Query:
    items = () if query is None else query.items
    return Query(tuple(QueryItem(frozenset(item.types), frozenset(item.tags)) for item in items))


def _event(event: DCBEvent) -> Event:
    tags = frozenset(event.tags)
    metadata = {} if sorted(tags) == event.tags else {"tags": event.tags}
    return Event(event.type, json_of(event.data), tags, metadata)


def _sequenced(event: StoredEvent) -> DCBSequencedEvent:
    tags = event.metadata.get("tags") or sorted(event.tags)
    return DCBSequencedEvent(DCBEvent(event.type, bytes_of(event.data), tags), event.position)
