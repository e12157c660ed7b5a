"""The data of events as objects of classes, and in the version that this program knows.

    types      classes by the type of the event
    upcasts    functions that turn data of one version into data of the next one

The notes in the metadata of an event (`model.notes_of`) contain the version of its data, `{"schema": 2}`. Without that
it is version 1. An event is appended with the latest version. When it is read, its data goes through the functions of
all later versions, and then becomes an object of the class. The stored event does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from .draft import Draft
from .model import Event, StoredEvent, notes_of, with_notes


class Upcast(msgspec.Struct, frozen=True):
    """`function` turns data of a type, as JSON, from version `version` into version `version + 1`."""

    type: str
    version: int
    function: Callable[[Any], Any]


def upcast(type: str, version: int, function: Callable[[Any], Any]) -> Upcast:
    """`function(data)` returns data of the version after `version`. Versions count from 1. Data is JSON."""
    if not isinstance(type, str) or not isinstance(version, int) or version < 1 or not callable(function):
        raise TypeError(f"upcast takes a type, a version from 1 on, and a function; not {(type, version, function)!r}")
    return Upcast(type, version, function)


class Schemas:
    """The classes and upcasts of one program."""

    def __init__(self, types: Mapping[str, type] | Iterable[type], upcasts: Iterable[Upcast]) -> None:
        self.types = dict(types) if isinstance(types, Mapping) else {kind.__name__: kind for kind in types}
        for kind in self.types.values():
            if not isinstance(kind, type):
                raise TypeError(f"types are classes, not {kind!r}")
        self.upcasts = tuple(upcasts)
        self._steps: dict[str, dict[int, Callable[[Any], Any]]] = {}
        for one in self.upcasts:
            if not isinstance(one, Upcast):
                raise TypeError(f"upcasts are made with upcast(type, version, function), not {one!r}")
            if self._steps.setdefault(one.type, {}).setdefault(one.version, one.function) is not one.function:
                raise ValueError(f"there are two upcasts of {one.type!r} from version {one.version}")
        for name, steps in self._steps.items():
            if sorted(steps) != list(range(min(steps), max(steps) + 1)):
                raise ValueError(f"an upcast of {name!r} is missing between version {min(steps)} and {max(steps)}")

    def __bool__(self) -> bool:
        return bool(self.types or self.upcasts)

    def _latest(self, type: str) -> int:
        return max(self._steps.get(type, ()), default=0) + 1

    def draft(self, event: Event) -> Draft:
        """The event as it is appended. Data that could not be read again is refused."""
        if not isinstance(event, Event):
            raise TypeError(f"append takes an Event or several, not {event!r}")
        kind = self.types.get(event.type)
        if kind is not None:
            try:
                msgspec.convert(msgspec.to_builtins(event.data), kind)
            except msgspec.ValidationError as error:
                raise TypeError(f"the data of {event.type!r} is no {kind.__name__}: {error}") from None
        if event.type in self._steps:
            metadata = msgspec.to_builtins(event.metadata)
            if not isinstance(metadata, dict):
                raise TypeError(
                    f"{event.type!r} has upcasts, so its metadata is a dict, with the version; not {metadata!r}"
                )
            metadata = with_notes(metadata, schema=self._latest(event.type))
            event = msgspec.structs.replace(event, metadata=metadata)
        return Draft(event)

    def read(self, event: StoredEvent) -> StoredEvent:
        """The event with its data in the latest version, as an object of its class."""
        kind, steps = self.types.get(event.type), self._steps.get(event.type, {})
        if (kind is None and not steps) or event.is_forgotten:
            return event
        version, latest = notes_of(event.metadata).get("schema", 1), self._latest(event.type)
        if type(version) is not int or version < 1:
            raise self._unreadable(event, f"has version {version!r}, and versions are whole numbers from 1 on.")
        if version > latest:
            text = f"has version {version}, and this program knows {latest}. Use a later version of the program."
            raise self._unreadable(event, text)
        data, metadata = event.data, event.metadata
        for step in range(version, latest):
            if step not in steps:
                raise self._unreadable(event, f"has version {version}, and there is no upcast from version {step}.")
            data = steps[step](data)
        if version < latest and isinstance(metadata, dict):
            metadata = with_notes(metadata, schema=latest)
        if kind is not None:
            try:
                data = msgspec.convert(data, kind)
            except msgspec.ValidationError as error:
                raise self._unreadable(event, f"is no {kind.__name__}: {error}.") from None
        return msgspec.structs.replace(event, data=data, metadata=metadata)

    @staticmethod
    def _unreadable(event: StoredEvent, why: str) -> TypeError:
        text = f"event {event.position}: the data of {event.type!r} {why} (Without types= and upcasts= it can be read.)"
        return TypeError(text)
