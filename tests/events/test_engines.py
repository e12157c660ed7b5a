"""What every engine of the event store promises (`holdfast.events.engine`), by one suite for all of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support import Child, Waited, auntil, until

import holdfast
from holdfast import Unsupported
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query, QueryItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ALL = Query.all()


def positions(events: Iterable[Any]) -> list[int]:
    return [event.position for event in events]


def in_the_way(store: EventStore, condition: AppendCondition) -> int | None:
    """The event that a condition fails for; None: it holds."""
    try:
        store.append([], condition)
    except ConditionFailed as error:
        return error.position
    return None


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """What becomes of them in as many threads."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"mongodb://…: no event store has this scheme"):
        EventStore("mongodb://localhost/shop")


# store-lock.md, its unit tests. "Acquires the lock when nobody holds it" is the first append of each test.


@pytest.mark.parametrize("timeout", [0.0, 0.2])
def test_an_append_times_out_while_another_process_appends(timeout: float, place: Any, waits: list[Waited]) -> None:
    store = place.store(lock_timeout=timeout)
    with place.locked():
        began = time.monotonic()
        (error,) = together([lambda: store.append(Event("T"))])
        assert isinstance(error, holdfast.Timeout)
        assert time.monotonic() - began >= timeout
        assert timeout or not waits, "without a timeout it does not wait"
        assert all(one.until is not None and one.until <= waits[0].at + timeout for one in waits)
    assert store.append(Event("T")) == 1


def test_the_lock_is_released_after_each_append(place: Any) -> None:
    one, other = place.store(lock_timeout=0), place.store(lock_timeout=0)
    for number in range(1, 20, 2):
        assert one.append(Event("T")) == number and other.append(Event("T")) == number + 1


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_cancelled_append_ends_while_another_process_appends(when: str, place: Any, waits: list[Waited]) -> None:
    store = place.store(lock_timeout=None)

    async def work() -> None:
        with place.locked():
            async with anyio.create_task_group() as group:
                if when == "before":
                    group.cancel_scope.cancel()
                group.start_soon(store.aappend, Event("T"))
                if when != "before":
                    await auntil(lambda: place.has_waiter(waits))
                    group.cancel_scope.cancel()

    anyio.run(work)
    assert store.head() == 0


# store-lock.md, its integration tests: two instances on one store.


def test_two_instances_append_at_once(place: Any) -> None:
    stores = [place.store(lock_timeout=60), place.store(lock_timeout=60)]
    works = [
        lambda store=store, text=f"{name}.{n}": store.append(Event("T", text))
        for name, store in enumerate(stores)
        for n in range(50)
    ]
    found = together(works)
    assert sorted(found) == list(range(1, 101)), "no gaps, no duplicates"
    there = {event.data: event.position for event in stores[0].read()}
    assert len(there) == 100, "and nothing was overwritten"
    assert [there[f"{name}.{n}"] for name in (0, 1) for n in range(50)] == found


def test_two_instances_decide_at_once(place: Any) -> None:
    stores = [place.store(lock_timeout=60), place.store(lock_timeout=60)]
    for turn in range(50):
        query = Query.of(tags={f"seat:{turn}"})
        barrier = threading.Barrier(2)

        def decide(store: EventStore, query: Query = query, turn: int = turn, barrier: Any = barrier) -> int:
            reading = store.read(query)
            assert list(reading) == []
            barrier.wait(30)
            return store.append(Event("Sold", tags={f"seat:{turn}"}), AppendCondition(query, after=reading.head))

        results = together([lambda store=store, decide=decide: decide(store) for store in stores])
        assert sorted(type(result) is ConditionFailed for result in results) == [False, True]


def test_twelve_writers(place: Any) -> None:
    """Each appends until all have their part. If one starved, the others would go on until it times out."""
    place.store()
    part = 50

    def write(name: int) -> Callable[[Callable[[str], None]], None]:
        def run(say: Callable[[str], None]) -> None:
            store = place.store(lock_timeout=30)
            left, seen, count = dict.fromkeys(range(12), part), 0, 0
            while any(number > 0 for number in left.values()):
                store.append(Event("T", name))
                count += 1
                reading = store.read(after=seen)
                for event in reading:
                    left[event.data] -= 1
                seen = reading.head
            say(str(count))

        return run

    ends = [child.end() for child in [Child(write(name)) for name in range(12)]]
    assert [code for code, _ in ends] == [0] * 12
    counts = [int(count) for _, lines in ends for count in lines]
    assert min(counts) >= part and place.store().head() == sum(counts)


# The rules of a dynamic consistency boundary (the DCB specification).


def test_a_query_is_any_item_and_an_item_is_any_type_with_all_tags(place: Any) -> None:
    """Against a filter that is written down the other way round, over all small queries."""
    store = place.store(durable=False)
    kinds, tags = ["A", "B", "C"], ["x", "y", "z"]
    chance = random.Random(4)
    for _ in range(60):
        size = chance.choice([1, 1, 5])
        store.append([Event(chance.choice(kinds), tags=chance.sample(tags, chance.randrange(4))) for _ in range(size)])
    events = list(store.read())
    assert positions(events) == list(range(1, store.head() + 1))
    items = [
        QueryItem(frozenset(chance.sample(kinds, many % 3)), frozenset(chance.sample(tags, many // 3 % 4)))
        for many in range(36)
    ]
    for other in (store, place.store()):
        for at in range(0, 36, 2):
            query = Query(tuple(items[at : at + 1 + at % 3]))
            wanted = [
                event.position
                for event in events
                if any(
                    (event.type in item.types or not item.types) and not item.tags - event.tags for item in query.items
                )
            ]
            assert positions(other.read(query)) == wanted
            assert positions(other.read(query, backwards=True)) == wanted[::-1]
            for after in (0, 30, store.head() - 1):
                behind = [position for position in wanted if position > after]
                assert positions(other.read(query, after=after)) == behind
                assert positions(other.read(query, after=after, limit=2, backwards=True)) == behind[::-1][:2]
                assert in_the_way(other, AppendCondition(query, after=after)) == (behind[-1] if behind else None)


def test_a_condition_without_after_looks_at_all_of_the_history(place: Any) -> None:
    store = place.store()
    once = AppendCondition(Query.of(types={"OrderPlaced"}, tags={"order:7"}))
    assert store.append(Event("OrderPlaced", tags={"order:7"}), once) == 1
    with pytest.raises(ConditionFailed, match="event 1 matches") as caught:
        store.append(Event("OrderPlaced", tags={"order:7"}), once)
    assert caught.value.position == 1 and store.head() == 1
    assert store.append(Event("OrderPlaced", tags={"order:8"}), AppendCondition(once.fail_if_match, after=1)) == 2


def test_a_condition_sees_the_appends_that_are_committed_with_it(place: Any) -> None:
    """Sixteen threads of one process, which share a write, and one condition."""
    store = place.store()
    condition = AppendCondition(Query.of(types={"Won"}))
    barrier = threading.Barrier(16)

    def race() -> int:
        barrier.wait(30)
        return int(store.append([Event("Won"), Event("Won")], condition))

    results = together([race] * 16)
    assert sorted(type(result).__name__ for result in results) == ["ConditionFailed"] * 15 + ["int"]
    assert store.head() == 2


def test_a_position_that_is_not_there_yet_is_no_boundary(place: Any) -> None:
    store = place.store()
    with pytest.raises(ValueError, match="after=99 is no position"):
        store.append([], AppendCondition(ALL, after=99))


@pytest.mark.parametrize(("racers", "rounds", "durable"), [(2, 10_000, False), (16, 500, False), (4, 300, True)])
def test_of_those_who_race_for_a_condition_one_wins(racers: int, rounds: int, durable: bool, place: Any) -> None:
    place.store()
    begin, go = os.pipe()

    def work(name: int) -> Callable[[Callable[[str], None]], None]:
        def race(say: Callable[[str], None]) -> None:
            store = place.store(durable=durable, lock_timeout=60, segment_size=200_000)
            os.close(go)
            os.read(begin, 1)
            won = 0
            for number in range(rounds):
                tag = f"race:{number}"
                query = Query.of(types={"Won"}, tags={tag})
                condition = AppendCondition(query)
                if number % 2:
                    reading = store.read(query)
                    if list(reading):
                        continue
                    condition = AppendCondition(query, after=reading.head)
                try:
                    store.append(Event("Won", name, tags={tag}), condition)
                    won += 1
                except ConditionFailed:
                    pass
            say(str(won))

        return race

    children = [Child(work(n)) for n in range(racers)]
    os.close(begin)
    os.close(go)
    wins = 0
    for child in children:
        code, said = child.end()
        assert code == 0
        wins += int(said[0])
    tags = Counter(tag for event in place.store().read() for tag in event.tags)
    assert wins == rounds and len(tags) == rounds and set(tags.values()) == {1}


def test_a_writer_that_reads_and_then_appends_never_acts_on_old_news(place: Any) -> None:
    """A counter that everybody reads, and raises by one under the condition that nobody else did."""
    place.store()
    rounds = 150

    def work(say: Callable[[str], None]) -> None:
        store = place.store(lock_timeout=60, segment_size=20_000)
        query = Query.of(types={"Counted"})
        done = 0
        while done < rounds:
            reading = store.read(query, backwards=True, limit=1)
            last = next(reading, None)
            value = last.data if last else 0
            try:
                store.append(Event("Counted", value + 1), AppendCondition(query, after=reading.head))
                done += 1
            except ConditionFailed:
                pass

    for child in [Child(work) for _ in range(4)]:
        assert child.end()[0] == 0
    values = [event.data for event in place.store().read()]
    assert values == list(range(1, 4 * rounds + 1))


# Readers.


def test_readers_see_whole_batches_in_order(place: Any) -> None:
    """Two write, batches of every size; readers of several kinds look all the time."""
    place.store()
    deadline = time.monotonic() + 4

    def write(seed: int) -> Callable[[Callable[[str], None]], None]:
        def run(say: Callable[[str], None]) -> None:
            store = place.store(durable=bool(seed % 2), segment_size=30_000, lock_timeout=60)
            chance = random.Random(seed)
            count = 0
            while time.monotonic() < deadline:
                count += 1
                size = chance.choice([1, 2, 3, 50])
                name = f"{seed}.{count}"
                store.append([Event("T", [name, part, size], tags={name, f"w:{seed}"}) for part in range(size)])

        return run

    def read(seed: int) -> Callable[[Callable[[str], None]], None]:
        def run(say: Callable[[str], None]) -> None:
            store = place.store(durable=False)
            seen = 0
            while time.monotonic() < deadline:
                reading = store.read(after=seen)
                events = list(reading)
                assert positions(events) == list(range(seen + 1, reading.head + 1))
                assert not events or events[-1].batch[1] == events[-1].position, "a part of a batch"
                assert store.head() >= reading.head
                if events:
                    name = events[seed % len(events)].data[0]
                    parts = [e.data[1] for e in store.read(Query.of(tags={name}))]
                    assert parts == list(range(len(parts))) and len(parts) == events[seed % len(events)].data[2]
                seen = reading.head
            say(str(seen))

        return run

    children = [Child(write(n)) for n in (1, 2)] + [Child(read(n)) for n in range(3)]
    for child in children:
        assert child.end()[0] == 0


def test_killed_writers_leave_whole_batches_and_no_gaps(place: Any) -> None:
    """Each is killed from outside, at any moment, after it has acknowledged a few appends."""
    place.store()
    acknowledged: dict[str, int] = {}
    chance = random.Random(9)
    for turn in range(12):

        def work(say: Callable[[str], None], turn: int = turn) -> None:
            store = place.store(lock_timeout=60)
            for number in range(10_000):
                name = f"{turn}.{number}"
                head = store.append([Event("T", [name, part], tags={name}) for part in range(3)])
                say(f"{name} {head}")

        reader = place.store()
        wanted = reader.head() + 3 * chance.randrange(1, 20)
        child = Child(work)
        until(lambda reader=reader, wanted=wanted: reader.head() >= wanted)
        os.kill(child.pid, signal.SIGKILL)
        code, said = child.end()
        assert code == -signal.SIGKILL
        for line in said:
            name, head = line.split()
            acknowledged[name] = int(head)
    events = list(place.store().read())
    assert positions(events) == list(range(1, len(events) + 1))
    parts: dict[str, list[int]] = {}
    for event in events:
        parts.setdefault(event.data[0], []).append(event.data[1])
        if event.data[0] in acknowledged and event.data[1] == 2:
            assert event.position == acknowledged[event.data[0]]
    assert set(acknowledged) <= set(parts) and all(part == [0, 1, 2] for part in parts.values())


# The rest of the port.


def test_a_wait_ends_when_the_head_changes(place: Any) -> None:
    store = place.store()
    store.append(Event("T"))
    (first, second), other = ([], []), place.store()
    following = threading.Thread(target=lambda: [first.append(event.position) for event in _two(other.follow(after=1))])
    following.start()
    for _ in range(2):
        second.append(store.append(Event("T")))
    following.join(60)
    assert first == second == [2, 3]
    assert positions(other.follow(after=1, timeout=0.05)) == [2, 3]


def _two(events: Iterator[Any]) -> Iterator[Any]:
    for _ in range(2):
        yield next(events)


def test_processes_that_project_one_name_at_once_count_each_event_once(place: Any) -> None:
    store = place.store()
    for number in range(40):
        store.append(Event("T", number))

    def work(say: Callable[[str], None]) -> None:
        store = place.store(lock_timeout=60)
        for _ in range(10):
            store.append(Event("T", 1))
            say(str(store.project("sum/ä ../x", lambda total, event: total + event.data, 0)))

    children = [Child(work) for _ in range(4)]
    assert [child.end()[0] for child in children] == [0] * 4
    assert store.project("sum/ä ../x", lambda total, event: total + event.data, 0) == sum(range(40)) + 40


def test_what_is_verified_is_good_and_can_be_rebuilt(place: Any) -> None:
    store = place.store(segment_size=1000)
    for number in range(20):
        store.append(Event("T", number, tags={f"n:{number}"}))
    for _ in range(2):
        report = store.verify()
        assert report.ok and report.events == 20
        assert positions(store.read(Query.of(tags={"n:3"}))) == [4]
        store.rebuild_index()


def test_a_closed_store_opens_again(place: Any) -> None:
    with place.store() as store:
        assert store.append(Event("T")) == 1
    assert store.append(Event("T")) == 2 and place.store().head() == 2
