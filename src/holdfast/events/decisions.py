"""Decision models: what has to be known to decide something, made of events, and the condition that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import reduce
from inspect import iscoroutine
from operator import or_
from random import uniform
from time import sleep
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from ..errors import ConditionFailed
from .model import AppendCondition, Event, Query, StoredEvent

if TYPE_CHECKING:
    from .store import EventStore

State = TypeVar("State")

Decide = Callable[..., Any]


class Projection(msgspec.Struct, Generic[State], frozen=True):
    """A state that is made of the events that match a query: `state = apply(state, event)`, from `initial` on."""

    query: Query
    apply: Callable[[State, StoredEvent], State]
    initial: State


class Decision(msgspec.Struct, frozen=True):
    """What was known at a moment. `state`: of the projection, or a tuple of those of several."""

    state: Any
    condition: AppendCondition

    @property
    def head(self) -> int:
        return self.condition.after or 0


def decide(store: EventStore, wanted: Sequence[Projection[Any]]) -> Decision:
    if not wanted:
        raise ValueError("decide takes at least one projection")
    for projection in wanted:
        if not isinstance(projection, Projection):
            raise TypeError(f"decide takes projections, not {projection!r}")
    query = reduce(or_, (projection.query for projection in wanted))
    states = [deepcopy(projection.initial) for projection in wanted]
    reading = store.read(query)
    for event in reading:
        for at, projection in enumerate(wanted):
            if projection.query.matches(event):
                states[at] = projection.apply(states[at], event)
    state = states[0] if len(states) == 1 else tuple(states)
    return Decision(state, AppendCondition(query, reading.head))


def execute(store: EventStore, decide_fn: Callable[[Decide], Iterable[Event] | None], attempts: int) -> int:
    if attempts < 1:
        raise ValueError(f"attempts is a number of tries, at least 1; not {attempts!r}")
    for attempt in range(attempts):
        made: list[AppendCondition] = []

        def ask(*wanted: Projection[Any], made: list[AppendCondition] = made) -> Any:
            decision = decide(store, wanted)
            made.append(decision.condition)
            return decision.state

        events = _events(decide_fn(ask))
        if not events:
            return store.head()
        try:
            return store.append(events, _all_of(made))
        except ConditionFailed as error:
            if attempt + 1 == attempts:
                raise ConditionFailed(
                    f"{store.path}: not appended: each of {attempts} times something came in between, event "
                    f"{error.position} the last. Where many compete for the same tags, give more attempts.",
                    path=store.path,
                    position=error.position,
                ) from None
            sleep(uniform(0, 0.002 * 2**attempt))  # not in step with whoever we met
    raise AssertionError


def _events(decided: Any) -> list[Event]:
    if isinstance(decided, Event):
        return [decided]
    if iscoroutine(decided):
        decided.close()
        raise TypeError("execute and aexecute take a plain function, not an async one")
    return list(decided or ())


def _all_of(made: list[AppendCondition]) -> AppendCondition | None:
    """One condition that implies all: nothing that any of them looked at, since the first of them looked."""
    if not made:
        return None
    query = reduce(or_, (condition.fail_if_match for condition in made))
    return AppendCondition(query, min(condition.after or 0 for condition in made))
