"""Projections that are kept: a state in a file, with the position up to which it goes.

    projections/<name>.json    {"position": 41, "query": …, "state": …}, replaced as a whole

Both are saved together, so however often a process dies, the state has seen every event up to its position once. Names
may be any text: what is not a plain letter is written as %XX.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from ..errors import CorruptStore, UnsafePath
from ..files import replace_file
from ..locks.lock import Lock
from .model import Query, StoredEvent

if TYPE_CHECKING:
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
    path = _path_of(store, name)
    with Lock(path + ".lock", timeout=store.lock_timeout):
        position, state = (0, deepcopy(initial)) if rebuild else _load(path, initial, query)
        reading = store.read(query, after=position)
        if position > reading.head:
            raise CorruptStore(
                f"{path} goes up to event {position}, and the store ends with {reading.head}. It belongs to another "
                "store, or the store lost events; rebuild=True makes it again.",
                path=path,
            )
        saved = monotonic()
        for count, event in enumerate(reading, 1):
            state = fn(state, event)  # type: ignore[arg-type]
            if count % _LOOKED_EVERY == 0 and monotonic() - saved > _SAVED_EVERY:
                _save(path, event.position, state, query, store.durable)
                saved = monotonic()
        if reading.head != position or rebuild:
            _save(path, reading.head, state, query, store.durable)
    return state  # type: ignore[return-value]


def _path_of(store: EventStore, name: str) -> str:
    file = quote(name, safe="").replace(".", "%2E")
    if not name or len(file) > 200:
        raise UnsafePath(f"{name!r} cannot be the name of a projection: it is empty or too long", path=store.path)
    folder = f"{store.path}/projections"
    os.makedirs(folder, exist_ok=True)
    return f"{folder}/{file}.json"


def _load(path: str, initial: Any, query: Query) -> tuple[int, Any]:
    try:
        with open(path, "rb") as file:
            said = msgspec.json.decode(file.read())
        if said["query"] != _query(query):
            raise ValueError(f"{path} was made with another query; give it another name, or rebuild=True")
        return int(said["position"]), said["state"]
    except FileNotFoundError:
        return 0, deepcopy(initial)
    except (msgspec.DecodeError, TypeError, KeyError):
        text = f"{path} is damaged. Call project with rebuild=True to make it again."
        raise CorruptStore(text, path=path) from None


def _query(query: Query) -> list[list[list[str]]]:
    return sorted([sorted(item.types), sorted(item.tags)] for item in query.items)


def _save(path: str, position: int, state: Any, query: Query, durable: bool) -> None:
    saved = msgspec.json.encode({"position": position, "query": _query(query), "state": state})
    if msgspec.json.decode(saved)["state"] != state:
        raise TypeError(
            f"{path}: the state of a projection is JSON (dicts with text keys, lists, texts, numbers). This one would "
            f"come back as another one: {state!r:.200}"
        )
    replace_file(path, saved + b"\n", 0o644, sync=durable)
