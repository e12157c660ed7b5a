"""An event store against a list in memory: whatever is done, both say the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query, QueryItem

TEXTS = st.sampled_from(["a", "b", "a_b", "c", "b_c", "x/y", "x_y", "é", "\n", "type a", "tag a"])
ITEMS = st.builds(QueryItem, st.frozensets(TEXTS, max_size=2), st.frozensets(TEXTS, max_size=2))
QUERIES = st.builds(Query, st.lists(ITEMS, max_size=2).map(tuple))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.builds(Event, TEXTS, JSON, st.frozensets(TEXTS, max_size=3), st.dictionaries(st.text(), JSON, max_size=2))


class Model(RuleBasedStateMachine):
    """Two stores on one directory, as two processes would have them; any of them may be opened again at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.room = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.log: list[Event] = []
        self.stores = [self.open(True), self.open(False)]

    def open(self, durable: bool) -> EventStore:
        return EventStore(Path(self.room) / "store", durable=durable, segment_size=700)

    def teardown(self) -> None:
        shutil.rmtree(self.room)

    def expected(self, query: Query, after: int) -> list[int]:
        return [at for at, event in enumerate(self.log, 1) if at > after and query.matches(event)]

    @rule(which=st.integers(0, 1), events=st.lists(EVENTS, max_size=3))
    def append(self, which: int, events: list[Event]) -> None:
        assert self.stores[which].append(events) == len(self.log) + len(events)
        self.log += events

    @rule(
        which=st.integers(0, 1), events=st.lists(EVENTS, max_size=2), query=QUERIES, back=st.none() | st.integers(0, 8)
    )
    def append_if(self, which: int, events: list[Event], query: Query, back: int | None) -> None:
        after = None if back is None else max(0, len(self.log) - back)
        matches = self.expected(query, after or 0)
        try:
            head = self.stores[which].append(events, AppendCondition(query, after))
        except ConditionFailed as error:
            assert matches and error.position == matches[-1]  # noqa: PT017
        else:
            assert not matches
            self.log += events
            assert head == len(self.log)

    @rule(
        which=st.integers(0, 1),
        query=QUERIES,
        after=st.integers(0, 12),
        limit=st.none() | st.integers(0, 4),
        backwards=st.booleans(),
    )
    def read(self, which: int, query: Query, after: int, limit: int | None, backwards: bool) -> None:
        wanted = self.expected(query, after)
        if backwards:
            wanted.reverse()
        reading = self.stores[which].read(query, after, limit, backwards)
        found = list(reading)
        assert [event.position for event in found] == wanted[:limit]
        assert reading.head == len(self.log)
        for event in found:
            self.compare(event)

    def compare(self, event: Any) -> None:
        meant = self.log[event.position - 1]
        assert (event.type, event.data, event.tags, event.metadata) == (
            *(meant.type, meant.data, meant.tags, meant.metadata),
        )

    @rule(which=st.integers(0, 1), query=QUERIES)
    def read_last(self, which: int, query: Query) -> None:
        last = self.stores[which].read_last(query)
        assert (last.position if last else None) == (self.expected(query, 0) or [None])[-1]

    @rule(which=st.integers(0, 1))
    def open_again(self, which: int) -> None:
        self.stores[which] = self.open(which == 0)

    @rule(lose=st.sampled_from(["ledger", "index"]))
    def lose_what_is_derived(self, lose: str) -> None:
        path = Path(self.room) / "store" / lose
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @rule(which=st.integers(0, 1))
    def rebuild(self, which: int) -> None:
        if self.log:
            self.stores[which].rebuild_index()

    @rule(torn=st.binary(min_size=1, max_size=40))
    def crash(self, torn: bytes) -> None:
        """Somebody dies in the middle of a write."""
        if not self.log or torn[:1] == b"\n":
            return
        tail = self.open(False)._engine.view.tail
        tail.read_on()
        with open(tail.path, "r+b") as file:
            file.seek(tail.end)
            file.write(torn.replace(b"\n", b" "))

    @invariant()
    def head(self) -> None:
        for store in self.stores:
            assert store.head() == len(self.log)


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestModelLonger(Model.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(
        max_examples=1500, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
