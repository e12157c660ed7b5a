"""States that are kept: a decision or a projection over a long history reads only the new events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support import Child

from holdfast.events import ConditionFailed, CorruptStore, Event, EventStore, Projection, Query

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOLD = Query.of(types={"SeatSold"}, tags={"show:1"})
SALE = Event("SeatSold", tags={"show:1"})


def seats(seen: list[int], name: str | None = "seats:1") -> Projection[int]:
    def apply(left: int, event: Any) -> int:
        seen.append(event.position)
        return left - 1

    return Projection(SOLD, apply, 1000, name)


def test_a_decision_over_a_long_history_reads_only_the_new_events(place: Any) -> None:
    store = place.store()
    store.append([SALE] * 200)
    first: list[int] = []
    assert store.decide(seats(first)).state == 800 and len(first) == 200
    store.append([SALE, Event("Other"), SALE])

    def work(say: Callable[[str], None]) -> None:
        seen: list[int] = []
        reads = 0
        store = place.store()
        real = store._engine.read

        def read(*args: Any, **options: Any) -> Any:
            nonlocal reads
            for event in real(*args, **options):
                reads += 1
                yield event

        store._engine.read = read
        decision = store.decide(seats(seen))
        say(f"{decision.state} {decision.head} {seen} {reads <= 4}")

    assert Child(work).end() == (0, ["798 203 [201, 203] True"])


def test_a_decision_that_is_kept_conflicts_as_any_other(place: Any) -> None:
    store, other = place.store(), place.store()
    store.append([SALE] * 100)
    for name in ("seats:1", None):
        store.decide(seats([], name))
        decision = store.decide(seats([], name))
        other.append(SALE)
        with pytest.raises(ConditionFailed):
            store.append(SALE, decision.condition)
    assert store.execute(lambda decide: [SALE] if decide(seats([])) == 898 else []) == 103


def test_several_projections_are_of_one_moment(place: Any) -> None:
    """One is kept, another is not, and a third was kept at another time."""
    store = place.store()
    store.append([SALE] * 100)
    store.decide(seats([]))
    store.append([SALE, Event("Opened")] * 70)
    opened: Projection[int] = Projection(Query.of(types={"Opened"}), lambda n, _: n + 1, 0, "opened")
    for _ in range(2):
        decision = store.decide(seats([]), opened, seats([], None))
        assert decision.state == (830, 70, 830) and decision.head == 240


def test_few_new_events_are_not_saved(in_memory: Path) -> None:
    store = EventStore(in_memory / "shop")
    store.append([SALE] * 10)
    store.decide(seats([]))
    assert not (in_memory / "shop/projections").exists()


def test_project_and_decide_share_what_is_kept_under_a_name(place: Any) -> None:
    store = place.store()
    store.append([SALE] * 5)
    seen: list[int] = []
    assert store.project("seats:1", seats([]).apply, 1000, SOLD) == 995
    assert store.decide(seats(seen)).state == 995 and seen == []


def test_a_state_that_was_kept_later_than_the_head_that_was_asked_for_counts_no_event_twice(place: Any) -> None:
    """Another process saves a later state between the look at the head and the look at the state."""
    store, other = place.store(), place.store()
    store.append([SALE] * 5)
    real = store._engine.load

    def load(name: str) -> Any:
        other.append([SALE] * 3)
        other.project("n", lambda n, _: n + 1, 0)
        return real(name)

    store._engine.load = load
    assert store.project("n", lambda n, _: n + 1, 0) == 8
    assert other.project("n", lambda n, _: n + 1, 0) == 8


def test_a_damaged_state_is_made_again_for_a_decision(in_memory: Path) -> None:
    store = EventStore(in_memory / "shop")
    store.append([SALE] * 100)
    store.decide(seats([]))
    (kept,) = (in_memory / "shop/projections").glob("*.json")
    good = kept.read_bytes()
    moved = [good.replace(b'"position":100', b'"position":' + other) for other in (b"1000", b'"x"', b"null")]
    for text in (b"{", b"[]", *moved, good.replace(b'"state"', b'"st\xffte"')):
        kept.write_bytes(text)
        with pytest.raises(CorruptStore, match="rebuild=True"):
            store.project("seats:1", seats([]).apply, 1000, SOLD)
        assert store.decide(seats([])).state == 900
        assert store.project("seats:1", seats([]).apply, 1000, SOLD) == 900


def test_a_state_of_another_history_is_not_believed(in_memory: Path) -> None:
    """The store was brought back from a copy and has other events by now, at the same positions."""
    store = EventStore(in_memory / "shop")
    store.append([SALE] * 60)
    store.backup(in_memory / "copy")
    copy = EventStore(in_memory / "copy")
    store.append([SALE] * 60)
    copy.append([Event("Other")] * 60)
    store.decide(seats([]))
    (kept,) = (in_memory / "shop/projections").glob("*.json")
    (in_memory / "copy/projections").mkdir(exist_ok=True)
    (in_memory / "copy/projections" / kept.name).write_bytes(kept.read_bytes())
    assert copy.decide(seats([])).state == 940


def test_one_name_for_two_queries_is_refused(place: Any) -> None:
    store = place.store()
    store.append([SALE] * 100)
    store.decide(seats([]))
    with pytest.raises(ValueError, match="another query"):
        store.decide(Projection(Query.of(types={"Other"}), lambda n, _: n, 0, "seats:1"))
