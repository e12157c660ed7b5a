"""Data of earlier versions becomes data of the latest one when it is read (`holdfast.events.schemas`)."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from holdfast.events import AppendCondition, Event, EventStore, Projection, Query, upcast

if TYPE_CHECKING:
    from pathlib import Path


class OrderPlaced(msgspec.Struct):
    id: int
    cents: int
    currency: str


def to_cents(data: Any) -> Any:
    return {"id": data["id"], "cents": data["euros"] * 100}


def with_currency(data: Any) -> Any:
    return {**data, "currency": "EUR"}


SECOND = upcast("OrderPlaced", 1, to_cents)
THIRD = upcast("OrderPlaced", 2, with_currency)
TYPES = {"OrderPlaced": OrderPlaced}
LATEST = OrderPlaced(1, 200, "EUR")


def history(place: Any) -> Any:
    """Options of the latest program. The store has an event of each of its three versions, and another type."""
    place.store().append(Event("OrderPlaced", {"id": 1, "euros": 2}, tags={"order:1"}, metadata={"by": "a"}))
    place.store(upcasts=[SECOND]).append(Event("OrderPlaced", {"id": 1, "cents": 200}, tags={"order:1"}))
    latest = {"types": TYPES, "upcasts": [THIRD, SECOND]}
    place.store(**latest).append([Event("OrderPlaced", LATEST, tags={"order:1"}), Event("Other", 7)])
    return latest


@pytest.mark.parametrize("version", ["2", None, 1.5, True, 0, [1]])
def test_a_version_that_is_no_number_is_reported_with_the_event(version: object, place: Any) -> None:
    place.store().append(Event("OrderPlaced", {"id": 1, "euros": 2}, metadata={"holdfast": {"schema": version}}))
    with pytest.raises(TypeError, match="event 1: the data of 'OrderPlaced' has version"):
        list(place.store(upcasts=[SECOND]).read())
    assert [event.data for event in place.store().read()] == [{"id": 1, "euros": 2}]


def test_each_version_is_read_as_the_latest(place: Any) -> None:
    store = place.store(**history(place))
    assert [event.data for event in store.read()] == [LATEST, LATEST, LATEST, 7]
    assert [event.metadata for event in store.read(limit=1)] == [{"by": "a", "holdfast": {"schema": 3}}]
    assert [event.data for event in store.read(backwards=True, limit=2)] == [7, LATEST]
    assert store.read_last(Query.of(types={"OrderPlaced"})).data == LATEST
    assert next(store.follow()).data == LATEST
    assert next(store.subscribe("s", timeout=5)).data == LATEST
    total = Projection(Query.of(types={"OrderPlaced"}), lambda sum, event: sum + event.data.cents, 0)
    assert store.decide(total).state == 600
    assert store.project("total", total.apply, 0, total.query) == 600

    async def first() -> Any:
        tail = store.tail()
        return (await anext(tail)).data

    assert anyio.run(first) == LATEST


def test_stored_events_do_not_change(place: Any) -> None:
    store = place.store(**history(place))
    list(store.read())
    assert [event.data for event in place.store().read()] == [
        {"id": 1, "euros": 2},
        {"id": 1, "cents": 200},
        {"id": 1, "cents": 200, "currency": "EUR"},
        7,
    ]


def test_a_condition_and_a_pickled_store_work_with_versions(place: Any) -> None:
    store = pickle.loads(pickle.dumps(place.store(**history(place))))
    head = store.append(Event("OrderPlaced", LATEST), AppendCondition(Query.of(tags={"order:2"})))
    assert store.read_last().data == LATEST and store.read_last().position == head


def test_a_program_that_does_not_know_the_version_says_so(place: Any) -> None:
    history(place)
    for options, why in (
        ({"upcasts": [SECOND]}, "event 3: .* has version 3, and this program knows 2. Use a later version"),
        ({"types": TYPES, "upcasts": [THIRD]}, "event 1: .* has version 1, and there is no upcast from version 1"),
        ({"types": {"OrderPlaced": dict}}, "event 2: .* has version 2, and this program knows 1"),
    ):
        store = place.store(**options)
        with pytest.raises(TypeError, match=why):
            list(store.read())
        assert store.read_last(Query.of(types={"Other"})).data == 7


def test_export_and_copies_keep_the_version_that_is_stored(in_memory: Path) -> None:
    class Here:
        @staticmethod
        def store(**options: Any) -> EventStore:
            return EventStore(in_memory / "a", **options)

    latest = history(Here)
    file = io.BytesIO()
    Here.store(**latest).export(file)
    assert b'"euros":2' in file.getvalue()
    EventStore(in_memory / "b").import_(file.getvalue().splitlines())
    Here.store(**latest).copy_to(EventStore(in_memory / "c", **latest))
    for name in "bc":
        found = EventStore(in_memory / name, **latest).read()
        assert [event.data for event in found] == [LATEST, LATEST, LATEST, 7]


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda: upcast("T", 0, to_cents), TypeError, "version from 1 on"),
        (lambda: upcast("T", 1, "f"), TypeError, "a function"),  # type: ignore[arg-type]
        (lambda: [to_cents], TypeError, "are made with upcast"),
        (lambda: [SECOND, upcast("OrderPlaced", 1, with_currency)], ValueError, "two upcasts"),
        (lambda: [SECOND, upcast("OrderPlaced", 3, with_currency)], ValueError, "missing between version 1 and 3"),
    ],
)
def test_wrong_upcasts_are_refused(make: Any, error: type[Exception], why: str, in_memory: Path) -> None:
    with pytest.raises(error, match=why):
        EventStore(in_memory / "shop", upcasts=make())
    assert not (in_memory / "shop").exists()


def test_data_and_metadata_that_cannot_have_a_version_are_refused(in_memory: Path) -> None:
    store = EventStore(in_memory / "shop", types=TYPES, upcasts=[SECOND, THIRD])
    with pytest.raises(TypeError, match="is no OrderPlaced"):
        store.append(Event("OrderPlaced", {"id": 1, "euros": 2}))
    with pytest.raises(TypeError, match="its metadata is a dict"):
        store.append(Event("OrderPlaced", LATEST, metadata=[1]))
    assert store.head() == 0
