"""Several processes on one event store: nothing is lost, nothing is there twice, whoever is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import Child, die_before_call

from holdfast import system
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query
from holdfast.events import log as segments

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return tmp_path / "shop"


def check_log(shop: Path, acknowledged: dict[str, int], attempted: set[str]) -> None:
    """Positions without gaps, every acknowledged payload at its position, nothing twice, nothing out of nowhere."""
    store = EventStore(shop)
    found = list(store.read())
    assert [event.position for event in found] == list(range(1, len(found) + 1))
    counts = Counter(event.data for event in found)
    assert max(counts.values(), default=1) == 1, "there twice"
    assert set(counts) <= attempted
    places = {event.data: event.position for event in found}
    for payload, position in acknowledged.items():
        assert places.get(payload) == position, f"{payload} was acknowledged at {position}"
    assert store.verify().ok
    for first in (False, True):
        fresh = EventStore(shop)
        if first:
            fresh.rebuild_index()
        for payload, position in random.Random(1).sample(sorted(places.items()), min(50, len(places))):
            assert [e.position for e in fresh.read(Query.of(tags={payload}))] == [position]


@pytest.mark.parametrize("total", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("durable", [True, False])
def test_a_tenth_is_killed_in_the_middle_of_an_append(durable: bool, total: int, shop: Path) -> None:
    """4 processes, each killed again and again, and replaced by one who goes on."""
    attempted: set[str] = set()
    acknowledged: dict[str, int] = {}
    EventStore(shop)

    def work(name: str, first: int, many: int, seed: int) -> Callable[[Callable[[str], None]], None]:
        def append(say: Callable[[str], None]) -> None:
            chance = random.Random(seed)
            store = EventStore(shop, durable=durable, segment_size=60_000, lock_timeout=60)
            doomed = first + chance.randrange(20)
            current = [0]

            def dying(real: Any) -> Any:
                def call(*args: Any, **options: Any) -> Any:
                    if current[0] >= doomed and chance.random() < 0.05:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **options)

                return call

            for call in ("pwrite", "fdatasync", "lock", "pread", "stat", "ftruncate", "close", "open_fd"):
                setattr(system, call, dying(getattr(system, call)))
            for number in range(first, first + many):
                current[0] = number
                payloads = [f"{name}.{number}.{part}" for part in range(1 if number % 7 else 3)]
                head = store.append([Event("T", payload, tags={payload}) for payload in payloads])
                for back, payload in enumerate(reversed(payloads)):
                    say(f"{payload} {head - back}")

        return append

    killed = 0
    for name in "abcd":
        attempted |= {f"{name}.{n}.{part}" for n in range(total) for part in range(3)}
    progress = dict.fromkeys("abcd", 0)
    children: dict[str, Child] = {}
    seed = 0
    while progress:
        for name, done in progress.items():
            if name not in children:
                seed += 1
                children[name] = Child(work(name, done, total - done, seed))
        for name, child in list(children.items()):
            code, said = child.end()
            del children[name]
            assert code in (0, -signal.SIGKILL)
            for line in said:
                payload, position = line.split()
                acknowledged[payload] = int(position)
                progress[name] = max(progress[name], int(payload.split(".")[1]) + 1)
            if code:
                killed += 1
                progress[name] += 1  # the one in the middle of which it was: there or not
            if progress[name] >= total:
                del progress[name]
    assert killed > total * 4 / 20, "about every tenth append"
    check_log(shop, acknowledged, attempted)


@pytest.mark.parametrize(("racers", "rounds", "durable"), [(2, 10_000, False), (16, 500, False), (4, 300, True)])
def test_of_those_who_race_for_a_condition_one_wins(racers: int, rounds: int, durable: bool, shop: Path) -> None:
    EventStore(shop)
    begin, go = os.pipe()

    def work(name: int) -> Callable[[Callable[[str], None]], None]:
        def race(say: Callable[[str], None]) -> None:
            store = EventStore(shop, durable=durable, lock_timeout=60, segment_size=200_000)
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
    tags = Counter(tag for event in EventStore(shop).read() for tag in event.tags)
    assert wins == rounds and len(tags) == rounds and set(tags.values()) == {1}


def test_who_looks_and_then_appends_never_acts_on_old_news(shop: Path) -> None:
    """A counter that everybody reads, and raises by one under the condition that nobody else did."""
    EventStore(shop)
    rounds = 150

    def work(say: Callable[[str], None]) -> None:
        store = EventStore(shop, lock_timeout=60, segment_size=20_000)
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
    values = [event.data for event in EventStore(shop).read()]
    assert values == list(range(1, 4 * rounds + 1))


def test_readers_see_whole_batches_in_order(shop: Path) -> None:
    """Two write, batches of every size; readers of several kinds look all the time."""
    EventStore(shop)
    deadline = time.monotonic() + 4

    def write(seed: int) -> Callable[[Callable[[str], None]], None]:
        def run(say: Callable[[str], None]) -> None:
            store = EventStore(shop, durable=bool(seed % 2), segment_size=30_000, lock_timeout=60)
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
            store = EventStore(shop, durable=False)
            seen = 0
            while time.monotonic() < deadline:
                reading = store.read(after=seen)
                events = list(reading)
                assert [e.position for e in events] == list(range(seen + 1, reading.head + 1))
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


# Killed at every call.

CALLS = ("open_fd", "close", "fstat", "stat", "access", "lock", "pread", "pwrite", "write", "ftruncate", "fdatasync")
CALLS += ("fsync", "rename", "unlink", "link", "mkdir", "listdir", "touch", "read")


def write_in_two() -> None:
    real_pwrite = system.pwrite

    def in_two(fd: int, text: bytes, at: int) -> int:
        if len(text) < 2 or not text.strip():
            return int(real_pwrite(fd, text, at))
        half = len(text) // 2
        return int(real_pwrite(fd, text[:half], at))  # the rest comes with the next call

    system.pwrite = in_two  # type: ignore[assignment]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("what", ["first", "single", "batch", "roll", "condition"])
def test_killed_at_every_call(what: str, durable: bool, in_memory: Path) -> None:
    """Beside a process that has had the store open all the time, and appends next."""
    number, outcomes = 0, set()
    while True:
        shop = in_memory / str(number)
        size = 700 if what == "roll" else 1 << 20
        before = 0
        if what != "first":
            running = EventStore(shop, durable=durable, segment_size=size)
            before = running.append([Event("T", "1", tags={"1"}), Event("T", "2", tags={"2"})])
            assert len(list(running.read(Query.of(tags={"1"})))) == 1
        added = [f"new {n}" for n in range(3 if what == "batch" else 1)]

        def work(
            say: Callable[[str], None], shop: Path = shop, size: int = size, number: int = number, added: Any = added
        ) -> None:
            store = EventStore(shop, durable=durable, segment_size=size)
            die_before_call(number, {system: CALLS})
            write_in_two()
            condition = AppendCondition(Query.of(tags={"new 0"})) if what == "condition" else None
            events = [Event("T", text + "x" * (500 if what == "roll" else 0), tags={text}) for text in added]
            say(str(store.append(events, condition)))

        code, said = Child(work).end()
        if what == "first":
            running = EventStore(shop, durable=durable, segment_size=size)
        assert running.append(Event("T", "next", tags={"next"})) in (before + 1, before + 1 + len(added))
        for store in (running, EventStore(shop)):
            found = list(store.read())
            texts = [event.data.rstrip("x") for event in found]
            assert [event.position for event in found] == list(range(1, len(found) + 1))
            old = ["1", "2"] if before else []
            assert texts in ([*old, "next"], [*old, *added, "next"]), f"killed before call {number}"
            outcomes.add("new 0" in texts)
            if said:
                assert texts == [*old, *added, "next"] and int(said[0]) == before + len(added)
            for text, event in zip(texts, found, strict=True):
                assert [e.position for e in store.read(Query.of(tags={text}))] == [event.position]
            assert store.verify().problems == ()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        number += 1
    assert number > 10 and outcomes == {True, False}


# Power failures.


class Disk:
    """What is sure to be on disk: of every segment, what it was when it was synced, and what was written since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, bytes] = {}
        self.states: list[tuple[dict[str, list[bytes]], int]] = []
        self.names: dict[int, str] = {}
        self.acknowledged = 0
        real_sync, real_write, real_cut = system.fdatasync, system.pwrite, system.ftruncate

        def note(fd: int) -> int | None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if not path.endswith(".jsonl"):
                return None
            number = os.fstat(fd).st_ino
            self.names[number] = path
            self.synced.setdefault(number, b"")
            return number

        def sync(fd: int) -> None:
            real_sync(fd)
            number = note(fd)
            if number is not None:
                self.synced[number] = Path(self.names[number]).read_bytes()

        def write(fd: int, text: bytes, at: int) -> int:
            done = real_write(fd, text, at)
            if note(fd) is not None:
                self.remember()
            return int(done)

        def cut(fd: int, at: int) -> None:
            real_cut(fd, at)
            if note(fd) is not None:
                self.remember()

        monkeypatch.setattr(system, "fdatasync", sync)
        monkeypatch.setattr(system, "fsync", sync)
        monkeypatch.setattr(system, "pwrite", write)
        monkeypatch.setattr(system, "ftruncate", cut)

    def remember(self) -> None:
        """The power could fail now."""
        now = {
            path: [self.synced[number], Path(path).read_bytes()]
            for number, path in self.names.items()
            if os.path.exists(path)
        }
        self.states.append((now, self.acknowledged))


def survivors(old: bytes, new: bytes, chance: random.Random) -> bytes:
    """What may be found of a file: of every page the old or the new, and a length in between."""
    page = 512
    size = chance.choice([len(old), len(new), chance.randint(min(len(old), len(new)), max(len(old), len(new)))])
    parts = []
    for start in range(0, size, page):
        source = chance.choice([old, new])
        piece = source[start : start + page]
        parts.append(piece + b"\0" * (min(page, size - start) - len(piece)))
    return b"".join(parts)[:size]


@pytest.mark.parametrize("segment_size", [1 << 20, 3000])
def test_after_a_power_failure(segment_size: int, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = in_memory / "shop"
    store = EventStore(shop, segment_size=segment_size)
    payloads: list[str] = []
    chance = random.Random(7)
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        for number in range(40):
            batch = [f"{number}.{part}." + "x" * chance.randrange(300) for part in range(chance.choice([1, 1, 4]))]
            payloads += batch
            disk.acknowledged = store.append([Event("T", text, tags={"t"}) for text in batch])
            disk.remember()
    assert len(disk.states) > 80
    for at, (state, acknowledged) in chance.sample(list(enumerate(disk.states)), 60):
        for way in range(4):
            room = in_memory / f"after {at} {way}"
            (room / "events").mkdir(parents=True)
            (room / "store.json").write_bytes((shop / "store.json").read_bytes())
            for path, (old, new) in state.items():
                text = {0: old, 1: new}.get(way) if way < 2 else survivors(old, new, chance)
                segment = room / "events" / os.path.basename(path)
                segment.write_bytes(text or b"")
                os.utime(segment, (0, 0))  # before the machine was started again
            after = EventStore(room, segment_size=segment_size)
            head = after.append(Event("T", "after"))
            found = [event.data for event in after.read()]
            assert found[-1] == "after" and head == len(found) and len(found) > acknowledged
            assert found[:-1] == payloads[: len(found) - 1], f"state {at}, way {way}"
            assert after.verify().ok
            after.close()
            shutil.rmtree(room)


def test_the_next_segment_is_named_by_what_is_there(shop: Path) -> None:
    """A crash between making a segment and writing to it."""
    store = EventStore(shop, segment_size=300)
    store.append([Event("T", "x" * 300)])
    store._view.tail.cut(store._view.tail.end)
    segments.make_segment(str(shop / "events"), 2, 0o644, durable=True)
    other = EventStore(shop, segment_size=300)
    assert other.append(Event("T")) == 2 and store.append(Event("T")) == 3
    assert [e.position for e in store.read()] == [1, 2, 3]
