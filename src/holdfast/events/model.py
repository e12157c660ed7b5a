"""What goes into an event store and what comes out: events, queries, conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

import msgspec

_set = msgspec.structs.force_setattr

__all__ = [
    "NOTES",
    "AppendCondition",
    "Event",
    "Query",
    "QueryItem",
    "StoredEvent",
    "forgotten",
    "is_erased",
    "notes_of",
    "with_notes",
]


NOTES = "holdfast"  # the key of the metadata under which Holdfast keeps notes of its own. `forget` leaves them


def notes_of(metadata: Any) -> dict[str, Any]:
    """The notes of Holdfast in the metadata of an event."""
    found = metadata.get(NOTES) if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def with_notes(metadata: Any, **notes: Any) -> dict[str, Any]:
    """The metadata of an event, with more notes."""
    return {**metadata, NOTES: {**notes_of(metadata), **notes}}


def forgotten(metadata: Any) -> dict[str, Any]:
    """The metadata of an event when its data is erased."""
    return {NOTES: {**notes_of(metadata), "forgotten": True}}


def is_erased(event: StoredEvent) -> bool:
    """Is there nothing left to erase? A note alone proves nothing: whoever appended the event may have written it."""
    return event.data is None and event.metadata == forgotten(event.metadata)


class Event(msgspec.Struct, frozen=True):
    """Something that happened, to be appended. `data` and `metadata` are JSON, or msgspec Structs or dataclasses."""

    type: str
    data: Any = None
    tags: Iterable[str] = frozenset()
    metadata: Any = {}
    id: str | None = None  # made up if not given

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not self.type:
            raise TypeError(f"the type of an event is a name, not {self.type!r}")
        tags = self.tags
        if not isinstance(tags, frozenset | set):
            if isinstance(tags, str | bytes):
                raise TypeError(f"tags are several texts: {{{tags!r}}}, not {tags!r}")
            if isinstance(tags, Mapping) or not isinstance(tags, Iterable):
                raise TypeError(f'tags are several texts, such as {{"order:7"}}, not {tags!r}')
            tags = frozenset(tags)
            _set(self, "tags", tags)
        for tag in tags:
            if not isinstance(tag, str) or not tag:
                raise TypeError(f"a tag is a text, not {tag!r}")
        if self.id is not None and (not isinstance(self.id, str) or not self.id):
            raise TypeError(f"the id of an event is a text, not {self.id!r}")


class StoredEvent(msgspec.Struct, frozen=True):
    """An event in a store. Its `position` is 1 for the first event, and one more for each after it."""

    position: int
    id: str
    time: datetime
    type: str
    tags: frozenset[str]
    data: Any
    metadata: Any
    batch: tuple[int, int, int]  # first and last position of what was appended together, and what was on disk then

    @property
    def is_forgotten(self) -> bool:
        """`EventStore.forget` has erased the data."""
        return self.data is None and bool(notes_of(self.metadata).get("forgotten"))


class Described(Protocol):
    """What a query looks at."""

    @property
    def type(self) -> str: ...
    @property
    def tags(self) -> Iterable[str]: ...


class QueryItem(msgspec.Struct, frozen=True):
    """Events of one of these types (none: any type) that have all of these tags."""

    types: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for field in ("types", "tags"):
            if not isinstance(texts := getattr(self, field), frozenset):  # a query must be hashable
                if isinstance(texts, str):
                    raise TypeError(f"{field} are several texts: {{{texts!r}}}, not {texts!r}")
                msgspec.structs.force_setattr(self, field, frozenset(texts))
        for text in (*self.types, *self.tags):
            if not isinstance(text, str):
                name = f"; its name is {text.__name__!r}" if isinstance(text, type) else ""
                raise TypeError(f"types and tags are texts, not {text!r}{name}")

    def matches(self, event: Described) -> bool:
        return (not self.types or event.type in self.types) and self.tags.issubset(event.tags)


class Query(msgspec.Struct, frozen=True):
    """Events that match one of the items; without any item, all events."""

    items: tuple[QueryItem, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.items, tuple):
            msgspec.structs.force_setattr(self, "items", tuple(self.items))

    @classmethod
    def of(cls, types: Iterable[str] = (), tags: Iterable[str] = ()) -> Query:
        """One item: one of the types, and all of the tags. `a | b` is a query for both."""
        for name, texts in (("types", types), ("tags", tags)):
            if isinstance(texts, str | bytes):
                raise TypeError(f"{name} are several texts: {{{texts!r}}}, not {texts!r}")
        item = QueryItem(frozenset(types), frozenset(tags))
        return cls((item,) if item.types or item.tags else ())

    @classmethod
    def all(cls) -> Query:
        return cls()

    def __or__(self, other: Query) -> Query:
        if not isinstance(other, Query):
            return NotImplemented
        if not self.items or not other.items:
            return Query()
        return Query(tuple(dict.fromkeys(self.items + other.items)))

    @property
    def matches_all(self) -> bool:
        return not self.items or any(not item.types and not item.tags for item in self.items)

    def matches(self, event: Described) -> bool:
        return not self.items or any(item.matches(event) for item in self.items)


class AppendCondition(msgspec.Struct, frozen=True):
    """Append only if nothing that matches has come after position `after`; None: if nothing ever matched."""

    fail_if_match: Query
    after: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fail_if_match, Query):
            raise TypeError(f"fail_if_match is a Query, not {self.fail_if_match!r}")
        if self.after is not None and not isinstance(self.after, int):
            raise TypeError(f"after is a position, or None for the whole history; not {self.after!r}")
