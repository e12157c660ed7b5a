"""What applications of eventsourcing see of aggregates whose events were forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

pytest.importorskip("eventsourcing", reason="eventsourcing needs Python 3.11")

from eventsourcing.application import AggregateNotFoundError, Application
from eventsourcing.dcb.api import DCBAppendCondition, DCBEvent, DCBQuery, DCBQueryItem
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import IntegrityError, StoredEvent, Tracking
from eventsourcing.utils import Environment

from holdfast.eventsourcing import HoldfastFactory

if TYPE_CHECKING:
    from pathlib import Path


class Person(Aggregate):
    @event("Born")
    def __init__(self, name: str) -> None:
        self.name = name

    @event("Renamed")
    def rename(self, name: str) -> None:
        self.name = name


def people(place: Path) -> Application[Any]:
    return Application({"PERSISTENCE_MODULE": "holdfast.eventsourcing", "HOLDFAST_STORE": str(place)})


def recorders(place: Path) -> HoldfastFactory:
    return HoldfastFactory(Environment("app", {"HOLDFAST_STORE": str(place)}))


def test_a_forgotten_aggregate_is_not_found_and_the_others_are(in_memory: Path) -> None:
    app = people(in_memory)
    jane, john = Person("Jane"), Person("John")
    app.save(jane, john)
    jane.rename("Jane Roe")
    app.save(jane)
    assert app.recorder.store.forget(f"id:{jane.id}") == 2
    again = people(in_memory)
    with pytest.raises(AggregateNotFoundError):
        again.repository.get(jane.id)
    assert again.repository.get(john.id).name == "John"
    assert [one.originator_id for one in again.recorder.select_notifications(1, 10)] == [john.id]
    assert again.recorder.max_notification_id() == 2
    jane.rename("Jane Doe")
    app.save(jane)
    assert [one.originator_version for one in app.recorder.select_events(jane.id)] == [3]


def test_the_versions_of_a_forgotten_aggregate_stay_recorded(in_memory: Path) -> None:
    id = uuid4()
    with recorders(in_memory) as own:
        own.application_recorder().insert_events([StoredEvent(id, version, "T", b"x") for version in (1, 2)])
        own.application_recorder().store.forget(f"id:{id}")
    with recorders(in_memory) as own, pytest.raises(IntegrityError):
        own.application_recorder().insert_events([StoredEvent(id, 2, "T", b"x")])


def test_processed_notifications_stay_known_when_the_events_are_forgotten(in_memory: Path) -> None:
    id = uuid4()
    with recorders(in_memory) as own:
        own.process_recorder().insert_events([StoredEvent(id, 1, "T", b"x")], tracking=Tracking("upstream", 7))
        own.process_recorder().store.forget(f"id:{id}")
    with recorders(in_memory) as own:
        recorder = own.process_recorder()
        assert recorder.max_tracking_id("upstream") == 7
        with pytest.raises(IntegrityError):
            recorder.insert_tracking(Tracking("upstream", 7))


def test_forgotten_events_are_left_out_of_decisions_and_hold_conditions(in_memory: Path) -> None:
    with recorders(in_memory) as own:
        recorder = own.dcb_recorder()
        recorder.append([DCBEvent("A", b"1", ["person:7"]), DCBEvent("A", b"2", ["person:8"])])
        recorder.store.forget("person:7")
        assert [one.position for one in recorder.read()] == [2]
        assert recorder.read(limit=1).head == 1
        with recorder.subscribe() as subscription:
            assert next(subscription).position == 2
        jane = DCBQuery(items=[DCBQueryItem(tags=["person:7"])])
        with pytest.raises(IntegrityError):
            recorder.append([DCBEvent("A", b"3", [])], DCBAppendCondition(fail_if_events_match=jane))
