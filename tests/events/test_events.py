"""The face of an event store, what is on disk, and what happens to who finds that damaged."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pickle
import shutil
import stat
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support import PATIENCE, Peer, descriptors, in_child, state_of, until

import holdfast
from holdfast import system
from holdfast.events import (
    AppendCondition,
    ConditionFailed,
    CorruptStore,
    Event,
    EventStore,
    Projection,
    Query,
    QueryItem,
)
from holdfast.events.log import engine as log_engine
from holdfast.events.log.builder import Builder
from holdfast.paths import Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ALL = Query.all()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return tmp_path / "shop"


def orders(*numbers: int, type_: str = "OrderPlaced") -> list[Event]:
    return [Event(type_, {"id": n}, tags={f"order:{n}"}) for n in numbers]


def positions(events: Iterable[Any]) -> list[int]:
    return [event.position for event in events]


def lines_of(store: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted((store / "events").iterdir()):
        found += [json.loads(line) for line in path.read_text().split("\n") if line]
    return found


def many(store: Path, count: int, *, segment_size: int = 2000) -> EventStore:
    """A store with several segments."""
    made = EventStore(store, durable=False, segment_size=segment_size)
    for number in range(1, count + 1):
        made.append(orders(number))
    return made


# The face.


def test_appended_events_are_read(shop: Path) -> None:
    store = EventStore(shop)
    assert store.head() == 0 and list(store.read()) == [] and store.read_last() is None
    assert store.append([Event("OrderPlaced", {"id": 7}, tags={"order:7"}, metadata={"by": "me"})]) == 1
    assert store.append(Event("OrderPaid", [1, None, "ü"], tags=["order:7", "till:1"], id="mine")) == 2
    first, second = store.read()
    assert (first.position, first.type, first.data, first.tags) == (1, "OrderPlaced", {"id": 7}, {"order:7"})
    assert first.metadata == {"by": "me"} and len(first.id) == 32 and abs(first.time.timestamp() - time.time()) < 60
    assert (second.id, second.data, second.tags) == ("mine", [1, None, "ü"], {"order:7", "till:1"})
    assert store.head() == 2 and store.read_last() == second
    assert list(EventStore(shop).read()) == [first, second]


def test_a_batch_and_its_position(shop: Path) -> None:
    store = EventStore(shop)
    assert store.append(orders(1, 2, 3)) == 3
    assert store.append([]) == 3
    assert positions(store.read(after=1)) == [2, 3]
    assert [event.batch[:2] for event in store.read()] == [(1, 3)] * 3


@pytest.mark.parametrize("durable", [True, False])
def test_reading(durable: bool, shop: Path) -> None:
    store = EventStore(shop, durable=durable, segment_size=1000)
    for number in range(1, 31):
        store.append(Event("AB"[number % 2], number, tags={f"n:{number}", f"third:{number % 3}"}))
    assert len(os.listdir(shop / "events")) > 3
    for other in (store, EventStore(shop)):
        assert positions(other.read()) == list(range(1, 31))
        assert positions(other.read(backwards=True)) == list(range(30, 0, -1))
        assert positions(other.read(limit=3)) == [1, 2, 3]
        assert positions(other.read(limit=0)) == []
        assert positions(other.read(after=28)) == [29, 30] and positions(other.read(after=99)) == []
        assert positions(other.read(after=10, limit=2, backwards=True)) == [30, 29]
        third = Query.of(tags={"third:0"})
        assert positions(other.read(third)) == list(range(3, 31, 3))
        assert positions(other.read(third, after=20, backwards=True)) == [30, 27, 24, 21]
        assert positions(other.read(Query.of(types={"A"}, tags={"third:0"}))) == [6, 12, 18, 24, 30]
        assert positions(other.read(Query.of(types={"A", "B"}, tags={"n:5"}))) == [5]
        assert positions(other.read(Query.of(types=["B"]), limit=2)) == [1, 3]
        assert positions(other.read(Query.of(tags={"n:5"}) | Query.of(tags={"n:4"}))) == [4, 5]
        assert positions(other.read(Query.of(tags={"n:5"}) | ALL, after=28)) == [29, 30]
        assert positions(other.read(Query.of(tags={"n:5", "n:6"}))) == []
        last = other.read_last(third)
        assert last is not None and last.position == 30
        assert other.read_last(Query.of(types={"C"})) is None
        assert other.read(limit=1).head == 30
    with pytest.raises(ValueError, match="limit"):
        store.read(limit=-1)


def test_conditions(shop: Path) -> None:
    store = EventStore(shop)
    once = AppendCondition(Query.of(types={"OrderPlaced"}, tags={"order:7"}))
    assert store.append(orders(7), once) == 1
    with pytest.raises(ConditionFailed, match="event 1 matches") as caught:
        store.append(orders(7), once)
    assert caught.value.position == 1 and caught.value.path == str(shop) and store.head() == 1
    assert store.append(orders(8), AppendCondition(once.fail_if_match, after=1)) == 2
    store.append(orders(7))
    with pytest.raises(ConditionFailed, match="matches the condition, and came after position 1"):
        store.append(orders(7), AppendCondition(once.fail_if_match, after=1))
    assert store.append(orders(9), AppendCondition(ALL, after=3)) == 4
    with pytest.raises(ConditionFailed):
        store.append(orders(9), AppendCondition(ALL, after=3))
    for everything in (ALL, Query.of()):
        with pytest.raises(ConditionFailed):
            store.append(orders(9), AppendCondition(everything))
    assert EventStore(shop / "new").append(orders(9), AppendCondition(ALL)) == 1


def test_a_query_of_lists_and_sets_is_the_same_query() -> None:
    """Appends that are committed together look their conditions up by it. Once, a list failed all of them."""
    made: Any = QueryItem
    query = Query([made(["A"], {"t"}), made(tags=("t",))])  # type: ignore[arg-type]
    same = Query((QueryItem(frozenset({"A"}), frozenset({"t"})), QueryItem(tags=frozenset({"t"}))))
    assert query == same and hash(query) == hash(same)
    for wrong in ({"types": "A"}, {"tags": "t"}):
        with pytest.raises(TypeError, match="several texts"):
            made(**wrong)


def test_a_condition_looks_at_all_segments(shop: Path) -> None:
    many(shop, 60)
    for store in (EventStore(shop, durable=False), EventStore(shop)):
        for number in (1, 30, 59, 60):
            with pytest.raises(ConditionFailed) as caught:
                store.append(orders(99), AppendCondition(Query.of(tags={f"order:{number}"})))
            assert caught.value.position == number
            assert store.append([], AppendCondition(Query.of(tags={f"order:{number}"}), after=number)) == 60
        assert store.append([], AppendCondition(Query.of(tags={"order:61"}))) == 60
        with pytest.raises(ConditionFailed) as caught:
            store.append([], AppendCondition(Query.of(types={"OrderPlaced"}), after=17))
        assert caught.value.position == 60


NAMES = [
    "a_b",
    "a",
    "b_c",
    "x/y",
    "x_y",
    "c",
    "..",
    ".",
    "/",
    "\\",
    "\n",
    "\0",
    '"',
    "🦊",
    "\u00e9",
    "e\u0301",
    " ",
    "a b",
    "tag a",
]


def test_no_two_texts_are_taken_for_each_other(shop: Path) -> None:
    store = EventStore(shop, durable=False, segment_size=1000)
    for at, name in enumerate(NAMES, 1):
        assert store.append(Event(name, name, tags={name})) == at
    for reopened in (store, EventStore(shop)):
        for at, name in enumerate(NAMES, 1):
            assert positions(reopened.read(Query.of(tags={name}))) == [at]
            assert positions(reopened.read(Query.of(types={name}))) == [at]
            assert positions(reopened.read(Query.of(types={name}, tags={name}))) == [at]
    store.append(Event("a_b", tags={"c"}))
    store.append(Event("a", tags={"b_c"}))
    assert positions(store.read(Query.of(types={"a"}, tags={"b_c"}))) == [len(NAMES) + 2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Event(""), "type"),
        (lambda: Event(7), "type"),  # type: ignore[arg-type]
        (lambda: Event("T", tags="order:7"), "several texts"),
        (lambda: Event("T", tags={7}), "tag is a text"),  # type: ignore[arg-type]
        (lambda: Event("T", id=""), "id"),
        (lambda: Query.of(types="T"), "several texts"),
    ],
)
def test_a_value_that_is_no_event_is_refused_at_once(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_data_that_is_no_json_leaves_no_trace(shop: Path) -> None:
    store = EventStore(shop)
    for data in (
        object(),
        {1, 2, object()},
        "\ud800",
        float("nan"),
        {"deep": [None, float("-inf")]},
        Paid(float("nan")),
    ):
        with pytest.raises((TypeError, OverflowError, ValueError, msgspec.MsgspecError)):
            store.append([*orders(1), Event("T", data)])
    assert store.head() == 0 and store.append(Event("T", [1 << 70, None, 0.1])) == 1
    last = store.read_last()
    assert last is not None and last.data == [1 << 70, None, 0.1]


class Paid(msgspec.Struct):
    amount: float


@dataclass
class Placed:
    id: int
    what: str = "tea"


def test_typed_data(shop: Path) -> None:
    store = EventStore(shop, types=[Paid, Placed])
    store.append([Event("Paid", Paid(3)), Event("Placed", Placed(7)), Event("Other", {"amount": 3})])
    assert [event.data for event in store.read()] == [Paid(3), Placed(7), {"amount": 3}]
    assert [event.data for event in EventStore(shop).read()] == [{"amount": 3}, {"id": 7, "what": "tea"}, {"amount": 3}]
    last = EventStore(shop, types={"Other": Paid}).read_last()
    assert last is not None and last.data == Paid(3)


# Deciding and projecting.

COUNT = Projection(Query.of(tags={"order:7"}), lambda n, _: n + 1, 0)


def test_a_decision_and_its_condition(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(7, 8))
    decision = store.decide(COUNT)
    assert decision.state == 1 and decision.head == 2
    assert store.append(orders(7), decision.condition) == 3
    with pytest.raises(ConditionFailed):
        store.append(orders(7), decision.condition)
    both = store.decide(COUNT, Projection(Query.of(tags={"order:8"}), lambda n, _: n + 1, 10))
    assert both.state == (2, 11)
    with pytest.raises(ValueError, match="at least one"):
        store.decide()


def test_execute_decides_again(shop: Path) -> None:
    store, other = EventStore(shop), EventStore(shop)
    seen = []

    def place(decide: Any) -> list[Event]:
        seen.append(decide(COUNT))
        if len(seen) < 3:
            other.append(orders(7))
        return orders(7)

    assert store.execute(place) == 3 and seen == [0, 1, 2]
    seen.clear()
    with pytest.raises(ConditionFailed):
        store.execute(place, attempts=2)
    assert store.execute(lambda decide: None) == store.head() == 5
    with pytest.raises(ValueError, match="attempts"):
        store.execute(place, attempts=0)


def test_a_projection_goes_on_where_it_was(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1, 2, 3))
    seen: list[int] = []

    def add(total: int, event: Any) -> int:
        seen.append(event.position)
        return total + event.data["id"]

    name = "totals/ä ../x.y"
    assert store.project(name, add, 0) == 6 and seen == [1, 2, 3]
    assert store.project(name, add, 0) == 6 and seen == [1, 2, 3]
    store.append(orders(4))
    assert EventStore(shop).project(name, add, 0) == 10 and seen == [1, 2, 3, 4]
    assert store.project("only 4", add, 0, Query.of(tags={"order:4"})) == 4
    seen.clear()
    assert store.project(name, add, 0, rebuild=True) == 10 and seen == [1, 2, 3, 4]

    def fails(total: int, event: Any) -> int:
        raise KeyError

    store.append(orders(5))
    with pytest.raises(KeyError):
        store.project(name, fails, 0)
    assert store.project(name, add, 0) == 15
    (saved,) = [p for p in (shop / "projections").iterdir() if "totals" in p.name]
    saved.write_text("{")
    with pytest.raises(CorruptStore, match="rebuild=True"):
        store.project(name, add, 0)
    with pytest.raises(holdfast.UnsafePath):
        store.project("", add, 0)


# What is on disk.


def test_the_log_is_plain_lines(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(7, 8))
    store.append(Event("Line\nbreak", "two\nlines", tags={"a\nb"}))
    assert os.listdir(shop / "events") == ["0000000001.jsonl"]
    found = lines_of(shop)
    assert [line["position"] for line in found] == [1, 2, 3]
    for line in found:
        assert set(line) == {"position", "id", "time", "type", "tags", "data", "metadata", "batch", "sum"}
    assert found[1]["tags"] == ["order:8"] and found[1]["data"] == {"id": 8} and found[1]["batch"] == [1, 2, 0]
    text = (shop / "events/0000000001.jsonl").read_bytes()
    assert b"\0" not in text and text.rstrip(b"\n").count(b"\n") == 2
    grep = subprocess.run(["grep", "-c", "order:8", shop / "events/0000000001.jsonl"], capture_output=True, check=True)
    assert grep.stdout == b"1\n"


def test_segments_are_named_by_their_first_event(shop: Path) -> None:
    many(shop, 40)
    names = sorted(os.listdir(shop / "events"))
    for name in names:
        with open(shop / "events" / name) as file:
            assert json.loads(file.readline())["position"] == int(name.removesuffix(".jsonl"))
    for name in names[:-1]:
        assert not (shop / "events" / name).read_bytes().endswith(b"\n\n"), "a full segment needs no room"


def test_indexed_events_are_not_indexed_again(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(shop, 100).rebuild_index()
    monkeypatch.setattr(Builder, "_add", None)
    store = EventStore(shop)
    assert positions(store.read(Query.of(tags={"order:3"}))) == [3]
    with pytest.raises(ConditionFailed):
        store.append(orders(3), AppendCondition(Query.of(tags={"order:3"})))


def test_a_store_of_many_segments(shop: Path) -> None:
    store = many(shop, 300, segment_size=800)
    assert len(os.listdir(shop / "events")) > 64
    for reopened in (store, EventStore(shop)):
        assert positions(reopened.read(Query.of(types={"OrderPlaced"}))) == list(range(1, 301))
        for number in (1, 2, 63, 64, 65, 150, 299, 300):
            assert positions(reopened.read(Query.of(tags={f"order:{number}"}))) == [number]
    assert EventStore(shop).verify().ok


def test_a_large_event_and_a_large_batch(shop: Path) -> None:
    store = EventStore(shop, segment_size=1000)
    store.append(Event("Large", "x" * 3_000_000, tags={"large"}))
    store.append(orders(*range(500)))
    store.append(Event("Large", "y" * 5_000_000))
    for reopened in (store, EventStore(shop)):
        assert [len(e.data) for e in reopened.read(Query.of(types={"Large"}))] == [3_000_000, 5_000_000]
        assert positions(reopened.read()) == list(range(1, 503))
        assert positions(reopened.read(backwards=True)) == list(range(502, 0, -1))


# What is derived can go away.

WRECKS: dict[str, Callable[[Path], object]] = {
    "no ledger": lambda shop: (shop / "ledger").unlink(),
    "no index": lambda shop: shutil.rmtree(shop / "index"),
    "neither": lambda shop: (shutil.rmtree(shop / "index"), (shop / "ledger").unlink()),
    "empty ledger": lambda shop: (shop / "ledger").write_bytes(b""),
    "zeros": lambda shop: os.pwrite(os.open(shop / "ledger", os.O_WRONLY), b"\0" * 4096, 0),
    "garbage in the index": lambda shop: swap(shop, lambda text: text[:100] + b"xyz" * 2000),
    "half of the index": lambda shop: swap(shop, lambda text: text[: len(text) // 2]),
    "an empty index": lambda shop: swap(shop, lambda text: b""),
}


def swap(shop: Path, change: Callable[[bytes], bytes]) -> None:
    """Put another file in the place of the index. (Whoever cuts short a file that SQLite has mapped kills its user.)"""
    (path,) = (shop / "index").glob("*.db")
    text = path.read_bytes()
    for file in (shop / "index").glob("*.db*"):
        file.unlink()
    path.write_bytes(change(text))


@pytest.mark.parametrize("wreck", WRECKS)
@pytest.mark.parametrize("durable", [True, False])
def test_derived_files_are_made_again(wreck: str, durable: bool, shop: Path) -> None:
    running = many(shop, 60)
    reader = EventStore(shop)
    assert len(list(reader.read(Query.of(tags={"order:3"})))) == 1
    if wreck == "zeros":
        (shop / "ledger").unlink()
        (shop / "ledger").write_bytes(b"\0" * 4096)
    else:
        WRECKS[wreck](shop)
    fresh = EventStore(shop, durable=durable, segment_size=2000)
    assert fresh.head() == 60
    for at, store in enumerate((fresh, running, fresh), 61):
        with pytest.raises(ConditionFailed):
            store.append(orders(3), AppendCondition(Query.of(tags={"order:3"})))
        assert store.append(orders(at)) == at
        assert running.head() == fresh.head() == reader.head() == at
    for store in (fresh, running, reader, EventStore(shop)):
        assert positions(store.read()) == list(range(1, 64))
        assert positions(store.read(Query.of(tags={"order:33"}))) == [33]
    fresh.rebuild_index()
    assert EventStore(shop).verify().ok


def test_a_copied_store_does_not_believe_its_ledger(shop: Path, tmp_path: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1, 2))
    shutil.copytree(shop, tmp_path / "copy")
    store.append(orders(3))
    shutil.copy(shop / "ledger", tmp_path / "copy/ledger")  # which says that there are three
    copy = EventStore(tmp_path / "copy")
    assert copy.head() == 2 and copy.append(orders(9)) == 3
    assert [event.data["id"] for event in copy.read()] == [1, 2, 9]


def test_rebuilding_beside_others(shop: Path) -> None:
    store, other = many(shop, 60), EventStore(shop, segment_size=2000)
    other.rebuild_index()
    assert positions(store.read(Query.of(tags={"order:33"}))) == [33]
    assert store.append(orders(61)) == 61 and other.append(orders(62)) == 62
    assert positions(EventStore(shop).read(Query.of(tags={"order:61"}))) == [61]


# Damage.


def damage(shop: Path, position: int, change: Callable[[bytes], bytes]) -> tuple[Path, int]:
    """Change the line of an event. Gives its file, and its number there."""
    for path in sorted((shop / "events").iterdir()):
        text = path.read_bytes().split(b"\n")
        for number, line in enumerate(text, 1):
            if line.startswith(b'{"position":%d,' % position):
                text[number - 1] = change(line)
                with open(path, "r+b") as file:
                    file.write(b"\n".join(text))
                    file.truncate()
                return path, number
    raise AssertionError


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "another number": lambda line: line.replace(b'"id":', b'"ID":', 1),
    "half": lambda line: line[: len(line) // 2],
    "zeros": lambda line: b"\0" * len(line),
    "blank": lambda line: b"",
    "no json": lambda line: b"x" * len(line),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("position", [3, 25, 58])
def test_a_damaged_line_in_the_middle(position: int, change: str, shop: Path) -> None:
    running = many(shop, 60)
    EventStore(shop).append(orders(61))  # synced: so they had been on disk
    path, number = damage(shop, position, CHANGES[change])
    before = path.read_bytes()
    store = EventStore(shop)
    report = store.verify()
    assert any((p.path, p.line) == (str(path), number) for p in report.problems), report.problems
    with pytest.raises(CorruptStore) as caught:
        list(store.read())
    assert caught.value.position == position and str(path) in str(caught.value)
    if int(path.stem) + 1 > 40:  # in the segment that is appended to
        with pytest.raises(CorruptStore):
            store.append(orders(62), AppendCondition(Query.of(tags={"order:62"})))
    assert path.read_bytes().startswith(before[: before.rindex(b"}")]), "nothing was cut off"
    del running


def test_the_last_line_is_damaged_after_it_was_on_disk(shop: Path) -> None:
    EventStore(shop).append(orders(1, 2))
    path, _ = damage(shop, 2, CHANGES["half"])
    before = path.read_bytes()
    with pytest.raises(CorruptStore, match="had been there"):
        EventStore(shop).append(orders(3))
    assert path.read_bytes() == before
    assert not EventStore(shop).verify().ok


def test_a_segment_of_another_store(shop: Path, tmp_path: Path) -> None:
    many(shop, 60)
    many(tmp_path / "other", 60)
    (name, *_) = sorted(os.listdir(shop / "events"))[1:-1]
    shutil.copy(tmp_path / "other/events" / name, shop / "events" / name)
    store = EventStore(shop)
    assert any("another store" in str(problem) for problem in store.verify().problems)
    with pytest.raises(CorruptStore, match="another store"):
        list(store.read())


def test_a_missing_segment(shop: Path) -> None:
    many(shop, 60)
    names = sorted(os.listdir(shop / "events"))
    (shop / "events" / names[1]).unlink()
    problems = EventStore(shop).verify().problems
    assert any(p.position == int(names[1][:10]) for p in problems)
    for query in (ALL, Query.of(tags={"order:60"})):
        with pytest.raises(CorruptStore, match=rf"ends with event .* event {int(names[1][:10])} is missing"):
            list(EventStore(shop).read(query))
    (shop / "events" / names[0]).unlink()
    with pytest.raises(CorruptStore, match="first segment is missing"):
        list(EventStore(shop).read())


def test_a_path_that_is_no_store_is_refused(tmp_path: Path, shop: Path) -> None:
    (tmp_path / "file").write_text("data")
    with pytest.raises(OSError, match="directory"):
        EventStore(tmp_path / "file")
    EventStore(shop).append(orders(1))
    (shop / "store.json").write_text('{"format": 2, "id": "x"}')
    with pytest.raises(holdfast.Unsupported, match="format 2"):
        EventStore(shop)
    for text in (b"", b"[]", b"{", b'{"format": "1"}', b'{"format": 1, "id": "\xff"}'):
        (shop / "store.json").write_bytes(text)
        with pytest.raises(CorruptStore, match="does not describe"):
            EventStore(shop)
    (shop / "store.json").unlink()
    with pytest.raises(CorruptStore, match="is missing"):
        EventStore(shop)
    for wrong in ({"segment_size": 0}, {"lock_timeout": -1}):
        with pytest.raises(ValueError, match=r"segment_size|timeout"):
            EventStore(tmp_path / "x", **wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_directory_that_can_only_be_read(shop: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as room:
        os.chmod(room, 0o755)
        place = Path(room) / "shop"
        many(place, 60).rebuild_index()

        def look() -> None:
            os.setresuid(65534, 65534, 65534)
            store = EventStore(place)
            assert positions(store.read()) == list(range(1, 61))
            assert positions(store.read(Query.of(tags={"order:3"}))) == [3] and store.verify().ok
            with pytest.raises(PermissionError, match="may not write to this event store") as caught:
                store.append(orders(1))
            assert caught.value.filename == str(place), "not a file in it, of which the user knows nothing"
            assert [e.position for e in store.follow(after=58, timeout=0.05)] == [59, 60]

        assert in_child(look) is None
        shutil.rmtree(place / "index")
        (place / "ledger").unlink()
        assert in_child(look) is None


# Mistakes, and what they would cost.


@pytest.mark.parametrize("way", ["moved", "removed", "imported"])
def test_a_store_that_is_restored_while_a_process_has_it_open(way: str, shop: Path, tmp_path: Path) -> None:
    running, reader = many(shop, 30), EventStore(shop)
    assert len(list(reader.read(Query.of(tags={"order:30"})))) == 1
    shutil.copytree(shop, tmp_path / "backup")
    running.append(orders(31))
    running.export(tmp_path / "all.jsonl")
    if way == "moved":
        shop.rename(tmp_path / "aside")
    else:
        shutil.rmtree(shop)
    if way == "imported":
        EventStore(shop).import_(tmp_path / "all.jsonl")
        with pytest.raises(CorruptStore, match="another store"):
            running.append(orders(99))
        with pytest.raises(CorruptStore, match="another store"):
            list(reader.read())
        assert EventStore(shop).head() == 31
        return
    shutil.copytree(tmp_path / "backup", shop)
    assert running.append(orders(99)) == 31 and running.append(orders(100)) == 32
    for store in (running, reader, EventStore(shop)):
        assert [event.data["id"] for event in store.read()] == [*range(1, 31), 99, 100]
    assert EventStore(shop).verify().ok


def test_damage_without_a_ledger_is_no_end(shop: Path, tmp_path: Path) -> None:
    store = EventStore(shop)
    for number in range(50):
        store.append(orders(number))
    damage(shop, 16, CHANGES["another number"])
    (shop / "ledger").unlink()
    other = EventStore(shop)
    for look in (other.head, lambda: list(other.read()), lambda: other.export(tmp_path / "x")):
        with pytest.raises(CorruptStore, match="had been on disk"):
            look()


@pytest.mark.parametrize("ledger", [True, False])
def test_damage_among_what_was_not_synced(ledger: bool, shop: Path) -> None:
    store = EventStore(shop, durable=False)
    for number in range(100):
        store.append(orders(number))
    damage(shop, 3, CHANGES["another number"])
    if not ledger:
        (shop / "ledger").unlink()
    with pytest.raises(CorruptStore):
        EventStore(shop, durable=False).append(orders(1), AppendCondition(Query.of(tags={"x"})))
    assert len(lines_of(shop)) == 100


def test_lines_that_are_cut_off_are_kept_aside(shop: Path) -> None:
    """After a power failure nobody knows whether it had been acknowledged."""
    store = EventStore(shop, durable=False)
    for number in range(10):
        store.append(orders(number))
    damage(shop, 3, CHANGES["zeros"])
    (shop / "ledger").unlink()
    assert EventStore(shop, durable=False).append(orders(1)) == 3
    (cut,) = [name for name in os.listdir(shop / "events") if ".cut-" in name]
    assert (shop / "events" / cut).read_bytes().count(b"\n") == 8
    assert EventStore(shop).verify().ok


@pytest.mark.parametrize("is_indexed", [True, False])
def test_segments_that_are_missing_at_the_end(is_indexed: bool, shop: Path) -> None:
    """The ledger tells. An index that knows more than the log is made again."""
    many(shop, 60).rebuild_index()
    if not is_indexed:
        shutil.rmtree(shop / "index")
    *_, last_but_one, last = sorted((shop / "events").iterdir())
    last.unlink()
    with pytest.raises(CorruptStore, match="missing"):
        EventStore(shop).append(orders(61))
    assert "there are 60 events" in EventStore(shop).verify().problems[0].what
    (shop / "ledger").unlink()
    head = int(last.name[:10]) - 1
    for store in (EventStore(shop), EventStore(shop)):
        assert positions(store.read(Query.of(types={"OrderPlaced"}))) == list(range(1, head + 1))
    last_but_one.unlink()
    assert EventStore(shop).head() == int(last_but_one.name[:10]) - 1


def test_the_rest_of_a_log_is_the_store_after_the_ledger_was_removed(shop: Path) -> None:
    """The remedy that its errors tell of."""
    many(shop, 60)
    *_, last = sorted((shop / "events").iterdir())
    last.unlink()
    for do in (lambda store: store.append(orders(61)), lambda store: list(store.read())):
        with pytest.raises(CorruptStore, match=f"remove {shop}/ledger"):
            do(EventStore(shop))
    (shop / "ledger").unlink()
    head = EventStore(shop).head()
    assert head == int(last.name[:10]) - 1 and EventStore(shop).append(orders(61)) == head + 1
    assert EventStore(shop).verify().ok


def test_the_last_segment_is_removed_under_one_who_has_not_seen_it(shop: Path) -> None:
    store, other = EventStore(shop), EventStore(shop, segment_size=1)
    store.append(orders(1))
    other.append(orders(2))
    (shop / "events/0000000002.jsonl").unlink()
    with pytest.raises(CorruptStore, match=f"event 2 is missing.*remove {shop}/ledger"):
        store.append(orders(3))


def test_following_a_store_that_is_brought_back_from_a_copy(shop: Path, tmp_path: Path) -> None:
    many(shop, 5)
    shutil.copytree(shop, tmp_path / "copy")
    store = many(shop, 5)
    live, tail = store.follow(after=9, timeout=20), store.tail(after=9)
    assert next(live).position == asyncio.run(anext(tail)).position == 10
    shutil.rmtree(shop)
    shutil.move(tmp_path / "copy", shop)
    EventStore(shop).append(orders(1))
    for _ in range(2):
        with pytest.raises(CorruptStore, match="there is no event 10 any more, the last one is 6"):
            asyncio.run(anext(tail))
    with pytest.raises(CorruptStore, match="there is no event 10 any more, the last one is 6"):
        next(live)


def test_all_segments_are_missing(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1))
    (shop / "events/0000000001.jsonl").unlink()
    with pytest.raises(CorruptStore, match="missing"):
        EventStore(shop).append(orders(2))
    assert os.listdir(shop / "events") == []


def test_an_initial_state_is_not_changed(shop: Path) -> None:
    store, other = EventStore(shop), EventStore(shop)
    store.append(orders(1))
    seen = []
    used: Projection[list[int]] = Projection(ALL, lambda state, event: [state.append(event.position), state][1], [])

    def decide(ask: Any) -> Event:
        seen.append(list(ask(used)))
        if len(seen) == 1:
            other.append(orders(2))
        return Event("Decided")

    assert store.execute(decide) == 3 and seen == [[1], [1, 2]]
    assert used.initial == []
    start: dict[str, int] = {}

    def count(state: dict[str, int], event: Any) -> dict[str, int]:
        state[event.type] = state.get(event.type, 0) + 1
        return state

    for _ in range(2):
        assert store.project("types", count, start, rebuild=True) == {"OrderPlaced": 2, "Decided": 1}


def test_a_projection_keeps_what_it_can_bring_back(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1))
    for wrong in ({1, 2}, Paid(3), float("nan"), {1: 2}, (1, 2)):
        with pytest.raises(TypeError, match="state of a projection is JSON"):
            store.project("wrong", lambda *_, wrong=wrong: wrong, None)
    assert store.project("n", lambda n, _: n + 1, 0) == 1
    with pytest.raises(ValueError, match="another query"):
        store.project("n", lambda n, _: n + 1, 0, Query.of(tags={"x"}))
    assert store.project("n", lambda n, _: n + 1, 0, Query.of(tags={"x"}), rebuild=True) == 0


def _not_empty(store: EventStore) -> Path:
    directory = Path(store.path).parent / "mine"
    directory.mkdir()
    (directory / "data.txt").touch()
    with suppress(FileExistsError):
        EventStore(directory)
    assert os.listdir(directory) == ["data.txt"], "nothing is left in it"
    return directory


async def _async_decision(ask: Any) -> list[Event]:
    return []


@pytest.mark.parametrize(
    ("do", "error", "text"),
    [
        (lambda store: store.append("A"), TypeError, "or several, not 'A'"),
        (lambda store: store.append([{"type": "A"}]), TypeError, "or several, not"),
        (lambda store: store.append(Event("A"), Event("B")), TypeError, "several events are a list"),
        (lambda store: store.append(Event("A"), ALL), TypeError, "AppendCondition, not"),
        (lambda store: store.append([], AppendCondition(ALL, after=99)), ValueError, "after=99 is no position"),
        (lambda store: store.read("A"), TypeError, "Query.of"),
        (lambda store: store.read(after="1"), ValueError, "after is a position"),
        (lambda store: store.append({"type": "A"}), TypeError, "or several, not {'type'"),
        (lambda store: store.append(None), TypeError, "or several, not None"),
        (lambda store: Event("A", tags={"order": 7}), TypeError, "tags are several texts"),
        (lambda store: Event("A", tags=None), TypeError, "tags are several texts"),
        (lambda store: ALL | "A", TypeError, "unsupported operand"),
        (lambda store: store.read(limit=1.5), ValueError, "limit is a number"),
        (lambda store: EventStore(store.path, segment_size="4M"), ValueError, "segment_size"),
        (lambda store: store.decide(ALL), TypeError, "takes projections"),
        (lambda store: store.execute(_async_decision), TypeError, "plain function"),
        (lambda store: Query.of(types={Paid}), TypeError, "its name is 'Paid'"),
        (lambda store: Query.of(tags={7}), TypeError, "texts, not 7"),
        (lambda store: AppendCondition("A"), TypeError, "is a Query"),
        (lambda store: AppendCondition(ALL, after="1"), TypeError, "after is a position"),
        (lambda store: EventStore(store.path, types=["Paid"]), AttributeError, "__name__"),
        (lambda store: EventStore(store.path, types={"Paid": "x"}), TypeError, "classes, not 'x'"),
        (lambda store: EventStore(""), holdfast.UnsafePath, "empty"),
        (lambda store: EventStore(os.path.dirname(store.path)), FileExistsError, "something else in this directory"),
        (lambda store: EventStore(_not_empty(store)), FileExistsError, "something else in this directory"),
    ],
)
def test_misuse_is_told(do: Callable[[Any], object], error: type[Exception], text: str, shop: Path) -> None:
    store = EventStore(shop)
    with pytest.raises(error, match=text):
        do(store)
    assert store.head() == 0


def test_typed_data_is_checked_when_it_is_written(shop: Path) -> None:
    store = EventStore(shop, types=[Paid])
    with pytest.raises(TypeError, match="the data of 'Paid' is no Paid"):
        store.append(Event("Paid", {"amount": "much"}))
    EventStore(shop).append(Event("Paid", {"amount": "much"}))
    with pytest.raises(TypeError, match="event 1: the data of 'Paid'"):
        list(store.read())


@pytest.mark.parametrize("name", holdfast.errors.__all__)
def test_every_error_comes_back_from_another_process(name: str) -> None:
    kind = getattr(holdfast.errors, name)
    wanted = {"path": "p"} | ({"position": 3} if name == "ConditionFailed" else {})
    wanted |= {"line": 1, "offset": 2} if name == "CorruptStore" else {}
    error = pickle.loads(pickle.dumps(kind("text", **wanted)))
    assert type(error) is kind and str(error) == "text" and error.path == "p"
    assert all(getattr(error, key) == value for key, value in wanted.items())


# What fails leaves no trace.


def failing(number: int, real: Any) -> Any:
    calls = [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(errno.EIO, "a broken disk")
        return real(*args)

    return call


def test_a_failed_sync_is_a_failed_append(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other, reader = EventStore(shop), EventStore(shop), EventStore(shop)
    store.append(orders(1))
    other.append(orders(2))
    with monkeypatch.context() as patch:
        patch.setattr(system, "fdatasync", failing(1, system.fdatasync))
        with pytest.raises(OSError, match="broken disk"):
            store.append(orders(3, 33))
    assert store.head() == reader.head() == 2 and len(lines_of(shop)) == 2
    assert other.append(orders(4)) == 3 and store.append(orders(5)) == 4
    assert [event.data["id"] for event in reader.read()] == [1, 2, 4, 5]
    assert reader.verify().ok


def test_an_append_behind_a_failed_sync_fails_too(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writes, B writes behind it, A's sync fails: B's must not be acknowledged either."""
    a, b = EventStore(shop), EventStore(shop)
    a.append(orders(1))
    b.append(orders(2))
    at_sync, go_on = threading.Event(), threading.Event()
    real = system.fdatasync

    def slow(fd: int) -> None:
        if threading.current_thread().name == "a":
            at_sync.set()
            assert go_on.wait(30)
            raise OSError(errno.EIO, "a broken disk")
        real(fd)

    errors: dict[str, str] = {}

    def write(name: str, store: EventStore) -> None:
        try:
            store.append(orders(4))
        except OSError as error:
            errors[name] = str(error)

    monkeypatch.setattr(system, "fdatasync", slow)
    threads = [threading.Thread(target=write, args=one, name=one[0]) for one in (("a", a), ("b", b))]
    threads[0].start()
    assert at_sync.wait(30)
    threads[1].start()
    until(lambda: len(lines_of(shop)) == 4)
    go_on.set()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert "broken disk" in errors["a"] and "taken back" in errors["b"]
    assert EventStore(shop).head() == 2 and a.append(orders(5)) == 3 and b.append(orders(6)) == 4


@pytest.mark.parametrize("durable", [True, False])
def test_a_failed_write_leaves_no_trace(durable: bool, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = EventStore(shop, durable=durable), EventStore(shop)
    store.append(orders(1))
    real = system.pwrite

    def half(fd: int, text: bytes, at: int) -> int:
        if at and text.strip():
            real(fd, text[: len(text) // 2], at)
            raise OSError(errno.ENOSPC, "no space left")
        return real(fd, text, at)

    with monkeypatch.context() as patch:
        patch.setattr(system, "pwrite", half)
        with pytest.raises(OSError, match="no space"):
            store.append(orders(2, 3))
    assert store.head() == 1 and len(lines_of(shop)) == 1
    assert other.append(orders(4)) == 2 and store.append(orders(5)) == 3
    assert store.verify().ok


def test_a_full_disk(small_disk: Path) -> None:
    store = EventStore(small_disk / "shop")
    count = 0
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        while True:
            assert store.append(Event("T", "x" * 3000)) == count + 1
            count += 1
    assert count > 20
    assert positions(store.read()) == list(range(1, count + 1)) and store.verify().ok
    with EventStore(small_disk / "shop") as other:
        assert other.head() == count
    store.close()


# The lock.


def test_a_timeout_says_what_is_in_the_way(shop: Path, start_peer: Callable[..., Peer]) -> None:
    store = EventStore(shop, lock_timeout=0.2)
    store.append(orders(1))
    peer = start_peer(path=str(shop / ".store.lock"))
    peer.do("hold = Lock(path, keep=True).acquire()")
    began = time.monotonic()
    with pytest.raises(holdfast.Timeout) as caught:
        store.append(orders(2))
    assert time.monotonic() - began >= 0.2
    for part in (str(shop / ".store.lock"), "0.2 s", f"pid {peer.pid}", "lock_timeout"):
        assert part in str(caught.value)
    peer.do("hold.release()")
    assert store.append(orders(2)) == 2
    assert (shop / ".store.lock").stat().st_size == 0


def test_the_lock_is_there_only_while_it_appends(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1))
    lock = holdfast.Lock(shop / ".store.lock", keep=True)
    lock.acquire(0).release()
    assert store.append(orders(2)) == 2
    lock.acquire(0).release()


def test_threads_share_a_sync(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one syncs until the others wait behind it. One of them then leads, for all."""
    store = EventStore(shop)
    store.append(orders(0))
    syncs = []
    at_sync, go_on = threading.Event(), threading.Event()
    real = system.fdatasync

    def slow(fd: int) -> None:
        syncs.append(fd)
        at_sync.set()
        assert go_on.wait(30)
        real(fd)

    monkeypatch.setattr(system, "fdatasync", slow)
    results: dict[int, int] = {}
    errors = []

    def add(number: int) -> None:
        try:
            results[number] = store.append(
                orders(number), AppendCondition(Query.of(tags={f"order:{number - 15}"})) if number >= 16 else None
            )
        except ConditionFailed:
            errors.append(number)

    first, *others = threads = [threading.Thread(target=add, args=(n,)) for n in range(1, 20)]
    first.start()
    assert at_sync.wait(30)
    for thread in others:
        thread.start()
    until(lambda: len(store._engine.committer.queue.waiting) == len(others))
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(syncs) == 2
    found = {event.data["id"]: event.position for event in store.read(after=1)}
    assert found == results, "each got its own answer"
    assert sorted([*results, *errors]) == list(range(1, 20))


def test_an_event_that_is_not_on_disk_is_not_visible_while_the_first_writer_begins(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds no ledger. Then a writer makes one, and writes, before the reader looks at the log."""
    reader, writer = EventStore(shop), EventStore(shop)
    at_sync, go_on = threading.Event(), threading.Event()
    real, advance = system.fdatasync, reader._engine.view.advance
    thread = threading.Thread(target=lambda: writer.append(orders(1)))

    def slow(fd: int) -> None:
        if writer._engine.committer.disk._ledger is not None:  # else it syncs what was there before
            at_sync.set()
            assert go_on.wait(PATIENCE)
        real(fd)

    def late(until: int | None = None) -> bytes:
        if not thread.ident:
            thread.start()
            assert at_sync.wait(PATIENCE)
        return advance(until)

    monkeypatch.setattr(system, "fdatasync", slow)
    monkeypatch.setattr(reader._engine.view, "advance", late)
    try:
        assert reader.head() == 0
    finally:
        go_on.set()
        thread.join()
    assert reader.head() == 1


def test_an_interrupted_append_is_withdrawn(shop: Path, start_peer: Callable[..., Peer]) -> None:
    import signal

    EventStore(shop).append(orders(1))
    hold = holdfast.Lock(shop / ".store.lock", keep=True).acquire()
    peer = start_peer(shop=str(shop))
    peer.do("from holdfast.events import *; store = EventStore(shop)")
    peer.begin("store.append(Event('T'))")
    peer.until_waiting(str(shop / ".store.lock"))
    peer.process.send_signal(signal.SIGINT)
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        peer.answer()
    hold.release()
    assert peer.do("store.append(Event('T'))") == 2


def test_a_forked_child_appends_for_itself(shop: Path, tmp_path: Path) -> None:
    gone = EventStore(tmp_path / "gone")  # of which the child can make nothing any more
    shutil.rmtree(gone.path)
    store = EventStore(shop)
    store.append(orders(1))
    started, go_on = threading.Event(), threading.Event()

    def hold_mutex() -> None:
        with store._engine.view.mutex:
            started.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold_mutex)
    thread.start()
    assert started.wait(30)
    try:
        assert in_child(lambda: store.append(orders(2))) == 2
    finally:
        go_on.set()
        thread.join()
    assert store.append(orders(3)) == 3 and positions(store.read()) == [1, 2, 3]


def test_a_store_can_be_sent_to_another_process(shop: Path) -> None:
    store = EventStore(shop, lock_timeout=7, durable=False, segment_size=5000)
    store.append(orders(1))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.head() == 1 and (copy.lock_timeout, copy.durable) == (7, False)


# Following.


def test_following(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1, 2))
    found: list[int] = []

    def follow() -> None:
        for event in EventStore(shop).follow(Query.of(types={"OrderPlaced"}), after=1):
            found.append(event.data["id"])
            if event.data["id"] == 5:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    for number in (3, 4, 5):
        store.append(Event("Other"))
        store.append(orders(number))
    thread.join(30)
    assert found == [2, 3, 4, 5]


def test_a_follower_wakes_without_polling(shop: Path, start_peer: Callable[..., Peer]) -> None:
    for durable in (True, False):
        store = EventStore(shop, durable=durable)
        head = store.append(orders(1))
        peer = start_peer(shop=str(shop), head=head)
        peer.do("look_only_when_told()")
        peer.do("from holdfast.events import *; events = EventStore(shop).follow(after=head)")
        peer.begin("next(events).position")
        until(lambda peer=peer: state_of(peer.pid) == "S" and "inotify" in str(descriptors(peer.pid)))
        assert store.append(orders(2)) == head + 1
        assert peer.answer() == head + 1


def test_a_follower_without_news_ends(shop: Path) -> None:
    store = EventStore(shop)
    store.append(orders(1))
    assert positions(store.follow(timeout=0.05)) == [1]


def test_where_other_machines_write_too(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shared memory: synced inside the lock, and every look asks the server."""
    monkeypatch.setattr(log_engine, "mount_at", lambda *_: Mount("cifs", options="nolease"))
    one, other = EventStore(shop, segment_size=600), EventStore(shop, durable=False, segment_size=600)
    for number in range(1, 20, 2):
        assert one.append(orders(number)) == number and other.append(orders(number + 1)) == number + 1
        assert one.head() == other.head() == number + 1
    with pytest.raises(ConditionFailed):
        one.append(orders(3), AppendCondition(Query.of(tags={"order:3"})))
    assert positions(other.read()) == list(range(1, 21)) and not (shop / "ledger").exists()
    assert positions(other.follow(after=18, timeout=0.1)) == [19, 20]
    assert EventStore(shop).verify().ok


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("query", [Query.of(), Query.of(types={"OrderPlaced"})])
def test_an_append_between_asking_and_reading(shop: Path, query: Query, backwards: bool) -> None:
    """The first append of a store looks at everything anew."""
    many(shop, 30)
    store = EventStore(shop)
    reading = store.read(query, backwards=backwards)
    store.append(orders(31))
    expected = list(range(1, 31))
    assert positions(reading) == (expected[::-1] if backwards else expected)


@pytest.mark.parametrize("kind", ["nfs", "nfs4"])
def test_each_read_asks_the_server(shop: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What this machine remembers of a segment may be old, whoever opens it, and for whatever."""
    monkeypatch.setattr(log_engine, "mount_at", lambda *_: Mount(kind, "/mnt"))
    opened, open_fd = [], system.open_fd

    def look(path: str, flags: int, *more: Any, **options: Any) -> int:
        # A thread of an earlier test may still index another store.
        if path.startswith(str(shop)) and path.endswith(".jsonl") and not flags & os.O_EXCL:
            opened.append(flags & os.O_DIRECT)
        return open_fd(path, flags & ~os.O_DIRECT, *more, **options)  # which asks for alignment on a disk

    monkeypatch.setattr(system, "open_fd", look)
    store, other = many(shop, 9, segment_size=500), EventStore(shop, segment_size=500)
    for event in range(9):
        other.append(Event("A", event), AppendCondition(Query.of(tags={"none"})))
    assert positions(store.read()) == list(range(1, 19)) and store.verify().ok
    store.rebuild_index()
    assert positions(EventStore(shop).read(Query.of(types={"A"}))) == list(range(10, 19))
    assert len(opened) > 30 and all(opened)


# Copies.


def test_export_and_import(shop: Path, tmp_path: Path) -> None:
    store = many(shop, 20)
    store.append([Event("A", 1), Event("B", 2, metadata={"x": 1})])
    assert store.export(tmp_path / "all.jsonl") == 22
    other = EventStore(tmp_path / "other")
    assert other.import_(tmp_path / "all.jsonl") == 22
    for one, copy in zip(store.read(), other.read(), strict=True):
        assert (one.id, one.time, one.type, one.tags, one.data, one.metadata, one.batch[:2]) == (
            *(copy.id, copy.time, copy.type, copy.tags, copy.data, copy.metadata, copy.batch[:2]),
        )
    assert other.import_(['{"type": "Plain"}', "", b'{"type": "Bytes", "tags": ["t"]}']) == 2
    assert other.head() == 24 and other.verify().ok
    with pytest.raises(ValueError, match=r"line 2 is no event.*\(0 events before it were appended"):
        other.import_(['{"type": "Fine"}', '{"type": 7}'])
    with pytest.raises(ValueError, match=r"line 2001 is no event.*\(1000 events before it were appended"):
        other.import_([*['{"type": "Fine"}'] * 2000, '{"type": 7}'])
    assert other.head() == 1024
    with open(tmp_path / "some.jsonl", "wb") as file:
        assert store.export(file, Query.of(tags={"order:7"})) == 1


def test_an_export_is_whole(shop: Path, tmp_path: Path) -> None:
    store = many(shop, 20)
    target = tmp_path / "all.jsonl"
    (tmp_path / "link").symlink_to(target)
    store.export(tmp_path / "link")
    target.chmod(0o600)
    first = sorted((shop / "events").iterdir())[0]
    for inside in (first, shop / "new", shop):
        with pytest.raises(ValueError, match="inside of the store"):
            store.export(inside)
    text = target.read_bytes()
    store.export(target)
    assert target.read_bytes() == text and target.stat().st_mode & 0o777 == 0o600
    first.write_bytes(first.read_bytes().replace(b'"id":2', b'"id":3'))
    with pytest.raises(CorruptStore):
        EventStore(shop).export(target)
    assert target.read_bytes() == text and sorted(os.listdir(tmp_path)) == ["all.jsonl", "link", "shop"]


def test_an_export_into_a_pipe(shop: Path) -> None:
    store = many(shop, 3)
    reader, writer = os.pipe()
    assert store.export(f"/dev/fd/{writer}") == store.export(writer) == 3
    assert os.read(reader, 1 << 16).count(b"\n") == 6
    os.close(reader)
    os.close(writer)


def test_modes(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        store = EventStore(tmp_path / "private", mode=0o600, segment_size=500)
        for n in range(5):
            store.append(orders(n))
    finally:
        os.umask(old)
    for folder, _, names in os.walk(tmp_path / "private"):
        for name in names:
            assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600, name
