"""Decision models: what has to be known to decide something, made of events, and the condition that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import reduce
from inspect import iscoroutine
from operator import or_
from random import uniform
from time import sleep
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConditionFailed, CorruptStore
from . import projections
from .model import AppendCondition, Event
from .projections import Projection

if TYPE_CHECKING:
    from .store import EventStore

Decide = Callable[..., Any]

_SAVE_AFTER = 64  # events. To read as many costs no more than to save


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
    head = store.head()
    states = [deepcopy(one.initial) if one.name is None else _kept(store, one, head) for one in wanted]
    _read_all(store, [(at, one) for at, one in enumerate(wanted) if one.name is None], head, states)
    query = reduce(or_, (projection.query for projection in wanted))
    return Decision(states[0] if len(states) == 1 else tuple(states), AppendCondition(query, head))


def _read_all(store: EventStore, wanted: list[tuple[int, Projection[Any]]], head: int, states: list[Any]) -> None:
    """Make the states of projections that are not kept, with one reading for all of them."""
    if wanted:
        query = reduce(or_, (projection.query for _, projection in wanted))
        for event in store._between(query, 0, head):
            for at, projection in wanted:
                if projection.query.matches(event):
                    states[at] = projection.apply(states[at], event)


def _kept(store: EventStore, projection: Projection[Any], head: int) -> Any:
    """The state of a projection with a name. A saved state that is damaged, or of another history, is made again."""
    try:
        return projections.state_at(store, projection, head, save_after=_SAVE_AFTER, rebuild=False)
    except CorruptStore as error:
        if error.position is not None:  # the log is damaged
            raise
        return projections.state_at(store, projection, head, save_after=_SAVE_AFTER, rebuild=True)


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
                    f"{store.path}: not appended: in all {attempts} attempts another event came first, event "
                    f"{error.position} the last time. If many programs use the same tags, give more attempts.",
                    path=store.path,
                    position=error.position,
                ) from None
            sleep(uniform(0, 0.002 * 2**attempt))  # at random, so that two competitors do not meet again
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
