"""Projections: a state that is made of events. A projection with a name is kept, and goes on where it was left.

    {"position": 41, "event": ["3f2a…", "2026-…"], "query": …, "state": …}, replaced as a whole

State and position are saved together. So the state has seen every event up to its position once, even if a process
dies at any step. Several processes may bring one projection up to date at once: each saves a state that is right.

`event` is the id and the time of the event at the position. If the store has another event there, it was brought back
from a copy, or has lost events, and the state is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from ..errors import CorruptStore
from .model import Query, StoredEvent

if TYPE_CHECKING:
    from .engine import Document
    from .store import EventStore

State = TypeVar("State")

_SAVED_EVERY = 1.0  # seconds
_LOOKED_EVERY = 1000  # events


class Projection(msgspec.Struct, Generic[State], frozen=True):
    """A state that is made of the events that match a query: `state = apply(state, event)`, from `initial` on.

    name: the store keeps the state, which is JSON, under this name. After a change of `apply`, give another name
    """

    query: Query
    apply: Callable[[State, StoredEvent], State]
    initial: State
    name: str | None = None


def state_at(store: EventStore, projection: Projection[Any], head: int, *, save_after: int, rebuild: bool) -> Any:
    """The state up to `head`, of a projection with a name. It is saved if it has seen at least so many new events.

    rebuild: do not use what was saved
    """
    if projection.name is None:
        raise TypeError("a projection that is kept has a name")
    query, document = projection.query, store._engine.load(projection.name)
    position, state = 0, deepcopy(projection.initial)
    if not rebuild and document.content is not None:
        position, state = _load(store, document, query)
    begin, saved, unsaved = position, monotonic(), 0
    for event in store._between(query, position, head):
        state = projection.apply(state, event)
        unsaved += 1
        if unsaved % _LOOKED_EVERY == 0 and monotonic() - saved > _SAVED_EVERY:
            _save(store, document, event.position, state, query)
            saved, unsaved = monotonic(), 0
    if (begin < head and unsaved >= save_after) or rebuild:
        _save(store, document, head, state, query)
    return state


def _load(store: EventStore, document: Document, query: Query) -> tuple[int, Any]:
    where = document.where
    try:
        said = msgspec.json.decode(document.content or b"")
        position, event, state, made_with = int(said["position"]), said["event"], said["state"], said["query"]
    except (msgspec.DecodeError, TypeError, KeyError, ValueError):  # also UnicodeDecodeError
        text = f"{where} is damaged. Call project with rebuild=True to make it again."
        raise CorruptStore(text, path=where) from None
    if made_with != _query(query):
        raise ValueError(f"{where} was made with another query; give it another name, or rebuild=True")
    if event != _event_at(store, position):
        raise CorruptStore(
            f"{where} goes up to event {position}, and the store has another event there, or ends before. It belongs "
            "to another store, or the store lost events; project with rebuild=True makes it again.",
            path=where,
        )
    return position, state


def _query(query: Query) -> list[list[list[str]]]:
    return sorted([sorted(item.types), sorted(item.tags)] for item in query.items)


def _event_at(store: EventStore, position: int) -> list[str] | None:
    """The id and the time of the event at a position; None: there is none."""
    if not 0 < position <= store.head():
        return None
    event = next(store._engine.read(Query(), position - 1, position, backwards=False, limit=1))
    return [event.id, event.time.isoformat()]


def _save(store: EventStore, document: Document, position: int, state: Any, query: Query) -> None:
    content = {"position": position, "event": _event_at(store, position), "query": _query(query), "state": state}
    saved = msgspec.json.encode(content)
    if msgspec.json.decode(saved)["state"] != state:
        raise TypeError(
            f"{document.where}: the state of a projection is JSON (dicts with text keys, lists, texts, numbers). "
            f"This one would come back as another one: {state!r:.200}"
        )
    store._engine.save(document, saved + b"\n")
