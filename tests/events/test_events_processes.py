"""Several processes on one event store: nothing is lost, nothing is there twice, whoever is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import Child, die_before_call, until

from holdfast import system
from holdfast.events import AppendCondition, Event, EventStore, Query
from holdfast.events.log import segments

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


# Copies.


@pytest.mark.parametrize("durable", [True, False])
def test_a_copy_that_cp_makes_during_appends_is_good(durable: bool, shop: Path, tmp_path: Path) -> None:
    """It opens, and holds all that was acknowledged before the copy was begun, in order."""
    reader = EventStore(shop)
    stop = shop.parent / "stop"

    def work(name: int) -> Callable[[Callable[[str], None]], None]:
        def append(say: Callable[[str], None]) -> None:
            store = EventStore(shop, durable=durable, segment_size=20_000, lock_timeout=60)
            chance = random.Random(name)
            number = 0
            while not stop.exists():
                number += 1
                size = chance.choice([1, 1, 3])
                tags = {f"n:{number % 50}", f"w:{name}"}
                events = [Event("T", [name, number, "x" * chance.randrange(400)], tags=tags) for _ in range(size)]
                store.append(events, AppendCondition(Query.of(tags={f"not:{number}"})) if number % 5 == 0 else None)

        return append

    children = [Child(work(name)) for name in range(2)]
    copies = []
    try:
        for turn in range(25):
            until(lambda turn=turn: reader.head() > turn * 20)
            copy = tmp_path / f"copy {turn}"
            before = reader.head()
            # Its status is not asked for: files of the lock's queue come and go meanwhile.
            subprocess.run(["cp", "-a", shop, copy], check=False, stderr=subprocess.DEVNULL)
            copies.append((copy, before))
    finally:
        stop.touch()
        ends = [child.end()[0] for child in children]
    assert ends == [0, 0]
    wanted = {event.position: event.data for event in reader.read()}
    for copy, before in copies:
        store = EventStore(copy)
        assert store.head() >= before
        head = store.append(Event("mine"))
        found = list(store.read())
        assert [event.position for event in found] == list(range(1, head + 1)) and head > before
        assert all(event.data == wanted[event.position] for event in found[:-1])
        tag = Query.of(tags={"n:7"})
        assert [event.position for event in store.read(tag)] == [e.position for e in found if "n:7" in e.tags]
        assert store.verify().ok, store.verify().problems


def test_a_copy_whose_parts_are_of_different_moments_is_good(shop: Path) -> None:
    """A program copies the beginning of a segment, others append, and it copies the rest."""
    store = EventStore(shop)
    segment = shop / "events/0000000001.jsonl"
    snapshots = []
    for number in range(40):
        store.append([Event("T", [number, "x" * 100], tags={f"n:{number}"})] * (1 + number % 2))
        if number % 13 == 6:
            snapshots.append((segment.read_bytes(), store.head()))
    (early, before), _, (late, _) = snapshots
    torn = 0
    for cut in range(0, len(late.rstrip(b"\n")), 64):
        copy = shop.parent / f"copy {cut}"
        (copy / "events").mkdir(parents=True)
        shutil.copy(shop / "store.json", copy)
        (copy / "events" / segment.name).write_bytes(early[:cut] + late[cut:])
        other = EventStore(copy)
        assert other.head() >= before
        head = other.append(Event("mine"))
        found = list(other.read())
        assert [event.position for event in found] == list(range(1, head + 1)) and other.verify().ok
        torn += any(".cut-" in name for name in os.listdir(copy / "events"))
    assert torn > 20


def test_a_backup_during_appends_is_good(shop: Path, tmp_path: Path) -> None:
    store = EventStore(shop, segment_size=3000)
    stop = threading.Event()

    def append() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.append([Event("T", number, tags={"t"})] * (1 + number % 3))

    thread = threading.Thread(target=append)
    thread.start()
    try:
        until(lambda: store.head() > 0)
        for turn in range(10):
            before = store.project("count", lambda count, _: count + 1, 0)
            copied = EventStore(shop).backup(tmp_path / f"{turn}")
            assert sorted(os.listdir(tmp_path / f"{turn}")) == ["events", "projections", "store.json"]
            copy = EventStore(tmp_path / f"{turn}")
            assert copied == copy.head() >= before and copy.verify().ok
            assert copy.project("count", lambda count, _: count + 1, 0) == copied
            assert copy.append(Event("mine")) == copied + 1
    finally:
        stop.set()
        thread.join()
    with pytest.raises(FileExistsError, match="there already"):
        store.backup(tmp_path / "0")
    assert not list(tmp_path.glob("*.tmp"))


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
    store._engine.view.tail.cut(store._engine.view.tail.end)
    segments.make_segment(str(shop / "events"), 2, 0o644, durable=True)
    other = EventStore(shop, segment_size=300)
    assert other.append(Event("T")) == 2 and store.append(Event("T")) == 3
    assert [e.position for e in store.read()] == [1, 2, 3]
