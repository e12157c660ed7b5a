"""Projections that are kept: a state in a document of the engine, with the position up to which it goes.

    {"position": 41, "query": …, "state": …}, replaced as a whole

Both are saved together, so however often a process dies, the state has seen every event up to its position once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import CorruptStore
from .model import Query, StoredEvent

if TYPE_CHECKING:
    from .engine import Document
    from .store import EventStore

State = TypeVar("State")

_SAVED_EVERY = 1.0  # seconds
_LOOKED_EVERY = 1000  # events


def project(
    store: EventStore,
    name: str,
    fn: Callable[[State, StoredEvent], State],
    initial: State | None,
    query: Query,
    *,
    rebuild: bool,
) -> State:
    with store._engine.document(name) as document:
        position, state = (0, deepcopy(initial)) if rebuild else _load(document, initial, query)
        reading = store.read(query, after=position)
        if position > reading.head:
            raise CorruptStore(
                f"{document.where} goes up to event {position}, and the store ends with {reading.head}. It belongs to "
                "another store, or the store lost events; rebuild=True makes it again.",
                path=document.where,
            )
        saved = monotonic()
        for count, event in enumerate(reading, 1):
            state = fn(state, event)  # type: ignore[arg-type]
            if count % _LOOKED_EVERY == 0 and monotonic() - saved > _SAVED_EVERY:
                _save(document, event.position, state, query)
                saved = monotonic()
        if reading.head != position or rebuild:
            _save(document, reading.head, state, query)
    return state  # type: ignore[return-value]


def _load(document: Document, initial: Any, query: Query) -> tuple[int, Any]:
    if document.content is None:
        return 0, deepcopy(initial)
    where = document.where
    try:
        said = msgspec.json.decode(document.content)
        if said["query"] != _query(query):
            raise ValueError(f"{where} was made with another query; give it another name, or rebuild=True")
        return int(said["position"]), said["state"]
    except (msgspec.DecodeError, TypeError, KeyError):
        text = f"{where} is damaged. Call project with rebuild=True to make it again."
        raise CorruptStore(text, path=where) from None


def _query(query: Query) -> list[list[list[str]]]:
    return sorted([sorted(item.types), sorted(item.tags)] for item in query.items)


def _save(document: Document, position: int, state: Any, query: Query) -> None:
    saved = msgspec.json.encode({"position": position, "query": _query(query), "state": state})
    if msgspec.json.decode(saved)["state"] != state:
        raise TypeError(
            f"{document.where}: the state of a projection is JSON (dicts with text keys, lists, texts, numbers). "
            f"This one would come back as another one: {state!r:.200}"
        )
    document.save(saved + b"\n")
