"""An event store: pages of events, its projections and its subscriptions, with their lag."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from .. import system
from ..events import EventStore, Query, StoredEvent

LIMIT = 100


@dataclass(frozen=True)
class Follower:
    """A projection or a subscription. `lag`: events that it has not seen yet."""

    kind: str
    name: str
    position: int
    lag: int
    facts: dict[str, Any]  # what is known besides


def page(store: EventStore, query: Query, before: int | None = None, limit: int = LIMIT) -> list[StoredEvent]:
    """The newest events that match, the last one first. before: only events with a smaller position."""
    head = store.head()
    end = head if before is None else max(0, min(head, before - 1))
    found = store._engine.read(query, 0, end, backwards=True, limit=limit)
    return [event for event, _ in zip(found, range(limit), strict=False)]


def event_at(store: EventStore, position: int) -> StoredEvent | None:
    """The event with this position."""
    if not 0 < position <= store.head():
        return None
    return next(iter(store.read(after=position - 1, limit=1)), None)


def followers_of(store: EventStore) -> list[Follower]:
    """The subscriptions of a store, and the projections that it keeps in files."""
    head = store.head()
    return [*_subscriptions(store), *_projections(store, head)]


def _projections(store: EventStore, head: int) -> list[Follower]:
    if "://" in store.path:
        return []
    folder, found = f"{store.path}/projections", []
    try:
        names = sorted(name for name in system.listdir(folder) if name.endswith(".json"))
    except OSError:
        return []
    for name in names:
        try:
            with open(f"{folder}/{name}", "rb") as file:
                position = int(json.load(file)["position"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(Follower("projection", unquote(name[: -len(".json")]), position, max(0, head - position), {}))
    return found


def _subscriptions(store: EventStore) -> list[Follower]:
    found = store.subscriptions() if hasattr(store, "subscriptions") else []
    names = ("active", "holder", "waiting")
    return [
        Follower("subscription", one.name, one.checkpoint, one.lag, {name: getattr(one, name) for name in names})
        for one in found
    ]
