"""The test cases that the eventsourcing package publishes, on both engines of the event store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

pytest.importorskip("eventsourcing", reason="eventsourcing needs Python 3.11")

from eventsourcing.dcb import tests as dcb_cases
from eventsourcing.tests import application as application_cases
from eventsourcing.tests import persistence as cases
from eventsourcing.tests import projection as projection_cases
from eventsourcing.utils import Environment

from holdfast.events import Event, Query
from holdfast.eventsourcing import (
    HoldfastAggregateRecorder,
    HoldfastApplicationRecorder,
    HoldfastFactory,
    HoldfastProcessRecorder,
    HoldfastTrackingRecorder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eventsourcing.persistence import Tracking

MODULE = "holdfast.eventsourcing"
MAPPER = "eventsourcing.dcb.msgpack:MessagePackMapper"


class OnLog:
    @pytest.fixture(autouse=True)
    def _place(self, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from self.opened(str(in_memory), monkeypatch)


class OnPostgres:
    @pytest.fixture(autouse=True)
    def _place(self, postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from self.opened(postgres, monkeypatch)


class Place:
    def opened(self, place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        settings = {"PERSISTENCE_MODULE": MODULE, "HOLDFAST_STORE": place, "HOLDFAST_LOCK_TIMEOUT": "60"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with HoldfastFactory(Environment("testapp", settings)) as self.own:
            yield
            self.own.close()


def on_both_engines(case: type) -> None:
    """One class for each engine, which pytest collects."""
    for engine in (OnLog, OnPostgres):
        name = f"{case.__name__}{engine.__name__}"
        globals()[name] = type(name, (engine, Place, case), {"__module__": __name__})


@on_both_engines
class TestAggregateRecorder(cases.AggregateRecorderTestCase):
    def create_recorder(self) -> Any:
        return self.own.aggregate_recorder()


@on_both_engines
class TestSnapshotRecorder(cases.AggregateRecorderTestCase):
    def create_recorder(self) -> Any:
        return self.own.aggregate_recorder("snapshots")


@on_both_engines
class TestApplicationRecorder(cases.ApplicationRecorderTestCase[Any]):
    def create_recorder(self) -> Any:
        return self.own.application_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


@on_both_engines
class TestProcessRecorderAsApplicationRecorder(cases.ApplicationRecorderTestCase[Any]):
    def create_recorder(self) -> Any:
        return self.own.process_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


@on_both_engines
class TestTrackingRecorder(cases.TrackingRecorderTestCase):
    def create_recorder(self) -> Any:
        return self.own.tracking_recorder()


@on_both_engines
class TestProcessRecorder(cases.ProcessRecorderTestCase):
    def create_recorder(self) -> Any:
        return self.own.process_recorder()


@on_both_engines
class TestNotificationIds(cases.NonInterleavingNotificationIDsBaseCase):
    def create_recorder(self) -> Any:
        return self.own.application_recorder()


class OtherTrackingRecorder(HoldfastTrackingRecorder):
    pass


@on_both_engines
class TestFactory(cases.InfrastructureFactoryTestCase[HoldfastFactory]):
    def setUp(self) -> None:
        self.env = self.own.env
        super().setUp()

    def expected_factory_class(self) -> type:
        return HoldfastFactory

    def expected_aggregate_recorder_class(self) -> type:
        return HoldfastAggregateRecorder

    def expected_application_recorder_class(self) -> type:
        return HoldfastApplicationRecorder

    def expected_tracking_recorder_class(self) -> type:
        return HoldfastTrackingRecorder

    def tracking_recorder_subclass(self) -> type:
        return OtherTrackingRecorder

    def expected_process_recorder_class(self) -> type:
        return HoldfastProcessRecorder


@on_both_engines
class TestDCBRecorder(dcb_cases.DCBRecorderTestCase):
    def test_append_read(self) -> None:
        self._test_append_read(self.own.dcb_recorder())

    def test_append_read_behind_other_events(self) -> None:
        recorder = self.own.dcb_recorder()
        recorder.append([dcb_cases.DCBEvent("other", b"", [])] * 3)
        self._test_append_read(recorder, 3)

    def test_append_subscribe(self) -> None:
        self._test_append_subscribe(self.own.dcb_recorder())


@on_both_engines
class TestExampleApplication(application_cases.ExampleApplicationTestCase):
    expected_factory_topic = "holdfast.eventsourcing.factory:HoldfastFactory"


def created(count: int, event: object) -> int:
    return count + 1


class CountersView(HoldfastTrackingRecorder, projection_cases.EventCountersView):
    """A view whose state is projected from events that are appended together with the tracking."""

    def get_created_event_counter(self) -> int:
        return self.store.project("created", created, 0, Query.of(types={"created"}))

    def get_subsequent_event_counter(self) -> int:
        return self.store.project("subsequent", created, 0, Query.of(types={"subsequent"}))

    def incr_created_event_counter(self, tracking: Tracking) -> None:
        self.insert_tracking(tracking, Event("created"))

    def incr_subsequent_event_counter(self, tracking: Tracking) -> None:
        self.insert_tracking(tracking, Event("subsequent"))


@on_both_engines
class TestView(projection_cases.EventCountersViewTestCase):
    def construct_event_counters_view(self) -> Any:
        return self.own.tracking_recorder(CountersView)


@on_both_engines
class TestProjectionOfAggregates(projection_cases.AggregateEventCountersProjectionTestCase):
    view_class = CountersView


@on_both_engines
class TestProjectionOfDecisions(projection_cases.TaggedDecisionCountersProjectionTestCase):
    view_class = CountersView
    env: ClassVar[dict[str, str]] = {"MAPPER_TOPIC": MAPPER}


@on_both_engines
class TestEventSourcedProjection(projection_cases.EventSourcedProjectionTestCase):
    pass
