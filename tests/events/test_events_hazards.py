"""Event stores when things come together: interrupts, failing syncs, cancellations, forks, many who begin at once."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import linecache
import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
from support import Child, LoopClock, in_child, survives, until

import holdfast
from holdfast import CorruptStore, Lock, system
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query, QueryItem
from holdfast.events.log import ledger as ledger_module
from holdfast.events.log.commit import Work
from holdfast.events.log.ledger import Ledger
from holdfast.events.log.search import Recent
from holdfast.events.log.segments import Tail
from holdfast.events.reading import AsyncTail
from holdfast.events.requests import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def shop(in_memory: Path) -> Path:
    return in_memory / "shop"


class Thread(threading.Thread):
    """A thread and what became of its work."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.result: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def outcome(self) -> object:
        self.join(30)
        assert not self.is_alive(), "it hangs"
        return type(self.error).__name__ if self.error is not None else self.result


class Syncs:
    """Each thread's syncs, by its name: let through, failing, or held up until told."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self._waiting: dict[str, tuple[threading.Event, threading.Event]] = {}
        self.real = system.fdatasync

    def hold(self, name: str) -> None:
        self._waiting[name] = threading.Event(), threading.Event()

    def until_held(self, name: str) -> None:
        assert self._waiting[name][0].wait(30)

    def is_held(self, name: str) -> bool:
        return self._waiting[name][0].is_set()

    def let_go(self, name: str) -> None:
        self._waiting[name][1].set()

    def __call__(self, fd: int) -> None:
        name = threading.current_thread().name
        held = self._waiting.get(name)
        if held is not None:
            held[0].set()
            assert held[1].wait(30)
        if name in self.broken:
            raise OSError(errno.EIO, "a broken disk")
        self.real(fd)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    made = Syncs()
    monkeypatch.setattr(system, "fdatasync", made)
    return made


def three(shop: Path) -> list[EventStore]:
    stores = [EventStore(shop) for _ in range(3)]
    stores[0].append([Event("base", n) for n in range(4)])
    for store in stores:
        assert len(list(store.read())) == 4
    return stores


def types(shop: Path) -> list[str]:
    store = EventStore(shop)
    found = list(store.read())
    assert [event.position for event in found] == list(range(1, len(found) + 1)) and store.verify().ok
    assert store.append(Event("later")) == len(found) + 1
    return [event.type for event in found if event.type != "base"]


def seen(shop: Path) -> list[str]:
    return [event.type for event in EventStore(shop).read()]


# Syncs that fail.


@pytest.mark.usefixtures("no_turns")
def test_two_that_fail_take_back_once(shop: Path, syncs: Syncs) -> None:
    """C appends between the two; nothing of it may be cut."""
    a, b, c = three(shop)
    for name in "ABC":
        syncs.hold(name)
    syncs.broken |= {"A", "B"}
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    second = Thread("B", lambda: b.append(Event("b")))
    syncs.until_held("B")
    syncs.let_go("B")
    assert second.outcome() == "OSError"
    third = Thread("C", lambda: c.append(Event("c")))
    syncs.until_held("C")
    syncs.let_go("A")
    syncs.let_go("C")
    assert first.outcome() == "OSError"
    assert third.outcome() == 5 and types(shop) == ["c"]


def test_an_append_that_was_taken_back_does_not_claim_the_position_of_another(shop: Path, syncs: Syncs) -> None:
    """A wrote 5 and has not synced; it is taken back, and C has another 5 that is on disk."""
    a, b, c = three(shop)
    reached, go_on = threading.Event(), threading.Event()
    real = a._engine.committer.disk.sync

    def paused(work: Any) -> None:
        reached.set()
        assert go_on.wait(30)
        real(work)

    a._engine.committer.disk.sync = paused  # type: ignore[method-assign]
    syncs.broken.add("B")
    first = Thread("A", lambda: a.append(Event("a")))
    assert reached.wait(30)
    assert Thread("B", lambda: b.append(Event("b"))).outcome() == "OSError"
    assert c.append(Event("c")) == 5
    go_on.set()
    assert first.outcome() == "OSError" and types(shop) == ["c"]


@pytest.mark.usefixtures("no_turns")
def test_events_that_were_taken_back_are_not_remembered(shop: Path, syncs: Syncs) -> None:
    a, b, c = three(shop)
    once = AppendCondition(Query.of(tags={"x"}))
    syncs.hold("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    syncs.broken.add("B")
    assert Thread("B", lambda: b.append(Event("b"))).outcome() == "OSError"
    syncs.let_go("A")
    assert first.outcome() == "OSError"
    assert c.append(Event("c", tags={"x"}), once) == 5
    with pytest.raises(ConditionFailed):
        a.append(Event("a", tags={"x"}), once)
    assert types(shop) == ["c"]


@pytest.mark.usefixtures("no_turns")
def test_a_sync_of_another_process_that_succeeds_covers_a_failed_one(shop: Path, syncs: Syncs) -> None:
    a, _, c = three(shop)
    syncs.hold("A")
    syncs.broken.add("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    assert c.append(Event("c")) == 6
    syncs.let_go("A")
    assert first.outcome() == 5 and types(shop) == ["a", "c"]


@pytest.mark.parametrize("segment_size", [1 << 20, 300])
@pytest.mark.usefixtures("no_turns")
def test_visible_events_are_not_taken_back(segment_size: int, shop: Path, syncs: Syncs) -> None:
    """Another writer did not want to wait for the disk, so readers have seen both."""
    a, _, _ = three(shop)
    impatient = EventStore(shop, durable=False, segment_size=segment_size)
    syncs.hold("A")
    syncs.broken.add("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    assert impatient.append(Event("b")) == 6
    seen = [event.type for event in EventStore(shop).read(after=4)]
    syncs.let_go("A")
    assert first.outcome() in ("OSError", 5)
    assert seen == types(shop) == ["a", "b"]


def test_a_ledger_that_is_deleted_meanwhile(shop: Path, syncs: Syncs) -> None:
    a, b, _ = three(shop)
    syncs.hold("A")
    syncs.broken.add("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    (shop / "ledger").unlink()
    assert b.append(Event("b")) == 6
    syncs.let_go("A")
    assert first.outcome() == "OSError" and types(shop) == ["a", "b"]


@pytest.mark.usefixtures("no_turns")
def test_killed_before_it_could_cut(shop: Path, syncs: Syncs) -> None:
    a, _, _ = three(shop)
    syncs.hold("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")

    def fail_and_die() -> None:
        def broken(fd: int) -> None:
            raise OSError(errno.EIO, "a broken disk")

        system.fdatasync = broken
        system.ftruncate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        EventStore(shop).append(Event("b"))

    assert not survives(fail_and_die)
    syncs.let_go("A")
    assert first.outcome() == "OSError" and types(shop) == []


@pytest.mark.usefixtures("no_turns")
def test_a_sync_that_fails_at_the_end_of_a_segment(shop: Path, syncs: Syncs) -> None:
    a, _, _ = three(shop)
    small = EventStore(shop, segment_size=300)
    syncs.hold("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    syncs.broken.add("B")
    assert Thread("B", lambda: small.append(Event("b"))).outcome() == "OSError"
    syncs.let_go("A")
    assert first.outcome() == "OSError" and types(shop) == []


# Interrupts.

FILES = (
    "events/log/commit.py",
    "events/requests.py",
    "events/log/disk.py",
    "events/log/segments.py",
    "events/log/view.py",
    "events/log/ledger.py",
    "events/log/store_lock.py",
)


class Interrupter:
    """Raises KeyboardInterrupt before the n-th line that this thread runs in one of the files."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.raised = False

    def start(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        caller = frame
        while caller is not None:
            if caller.f_code.co_name == "__del__":
                return None  # what is raised there comes to nothing
            caller = caller.f_back
        return self.line

    def line(self, frame: Any, event: str, argument: Any) -> Any:
        # A `with` is visited again when it is left, before it has released anything: no signal is handled there, nor at
        # a `try`, which does nothing, and is not within the `with` around it.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not self.raised and not text.startswith(("with ", "try:")):
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self.line


def lines_with_interrupt(step: int) -> Iterator[int]:
    yield from range(0, 2000, step)


@pytest.mark.parametrize("segment_size", [1 << 20, 350])
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_anywhere(step: int, segment_size: int, shop: Path) -> None:
    """Of one who leads; another thread waits. Nobody waits for ever, and nothing is there twice."""
    for number in lines_with_interrupt(step):
        place = shop / str(number)
        store = EventStore(place, lock_timeout=20, segment_size=segment_size)
        store.append([Event("base"), Event("base")])
        queue = store._engine.committer.queue
        queue._has_leader = True
        other = Thread("other", lambda store=store: store.append(Event("other")))  # type: ignore[misc]
        until(lambda queue=queue: len(queue.waiting))
        queue._has_leader = False
        interrupter = Interrupter(number)
        mine: object = None
        sys.settrace(interrupter.start)
        try:
            mine = store.append(Event("mine"))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert store.append(Event("next")) > 2
        told = other.outcome()
        found = [event.type for event in store.read()]
        assert found.count("other") <= 1 and found.count("mine") <= 1 and found.count("next") == 1, (number, found)
        if told != "KeyboardInterrupt":
            assert isinstance(told, int) and found[told - 1] == "other", (number, told, found)
        if isinstance(mine, int):
            assert found[mine - 1] == "mine"
        Lock(place / ".store.lock", keep=True).acquire(5).release()
        assert EventStore(place).verify().ok
        if not interrupter.raised:
            assert number > 60
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("inner", ["the same", "another object", "another store"])
@pytest.mark.parametrize("where", ["_write", "_release"])
def test_an_append_within_an_append(shop: Path, inner: str, where: str) -> None:
    """A signal handler that appends during an append, to whatever store, is refused instead of waiting for itself."""
    store = EventStore(shop)
    store.append(Event("base"))
    second = store if inner == "the same" else EventStore(shop if inner == "another object" else shop / "second")
    told: list[object] = []
    real = getattr(store._engine.committer, where)

    def within(*words: Any) -> None:
        try:
            told.append(second.append(Event("inner")))
        except holdfast.WouldDeadlock as error:
            told.append(error)
        real(*words)

    setattr(store._engine.committer, where, within)
    assert store.append(Event("outer")) == 2 and len(told) == 1
    assert isinstance(told[0], holdfast.WouldDeadlock)
    setattr(store._engine.committer, where, real)
    assert second.append(Event("later")) == (1 if inner == "another store" else 3)


# Cancellation.


def test_every_event_is_read_in_a_task(shop: Path) -> None:
    store = EventStore(shop, durable=False)
    store.append([Event("T", n) for n in range(1000)])

    async def read() -> list[int]:
        return [event.position async for event in store.aread()]

    assert asyncio.run(read()) == list(range(1, 1001))


def test_a_reader_that_is_cancelled_loses_nothing(shop: Path) -> None:
    store = EventStore(shop, durable=False)
    store.append([Event("T", n) for n in range(1500)])

    async def read() -> list[int]:
        found = []
        tail = store.tail()
        while len(found) < 1500:
            try:
                event = await asyncio.wait_for(tail.__anext__(), 0.0005 if len(found) % 200 == 0 else 5)
                found.append(event.position)
            except asyncio.TimeoutError:
                pass
        return found

    assert asyncio.run(read()) == list(range(1, 1501))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelled_at_any_time(backend: str, shop: Path) -> None:
    store = EventStore(shop, lock_timeout=20)
    store.append(Event("base"))
    told: list[tuple[int, int]] = []

    async def one(number: int) -> None:
        with anyio.move_on_after(number % 20 * 0.0002):
            told.append((number, await store.aappend(Event("T", number))))

    async def work() -> None:
        for turn in range(20):
            async with anyio.create_task_group() as group:
                for number in range(10):
                    group.start_soon(one, turn * 10 + number)
            assert await store.aappend(Event("probe", -turn)) > 0

    anyio.run(work, backend=backend)
    found = {event.data: event.position for event in store.read() if event.type == "T"}
    assert found == dict(told), "cancelled without effect, or told"


def test_asyncios_own_timeouts_when_it_is_too_late(shop: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EventStore(shop)
    store.append(Event("base"))

    at_sync, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        at_sync.set()
        assert go_on.wait(30)
        syncs.real(fd)

    monkeypatch.setattr(system, "fdatasync", slow)

    async def append_within_a_minute() -> int:
        async with asyncio.timeout(60):
            return await store.aappend(Event("T"))

    async def work() -> None:
        clock = LoopClock()

        async def too_late(append: Any, stop: Callable[[asyncio.Task[int]], Any]) -> int:
            at_sync.clear()
            go_on.clear()
            task = asyncio.create_task(append)
            assert await asyncio.to_thread(at_sync.wait, 30)
            stop(task)
            await clock.forward(120)
            assert not task.done()
            go_on.set()
            return await task

        assert await too_late(asyncio.wait_for(store.aappend(Event("T")), 60), lambda task: None) == 2
        assert await too_late(store.aappend(Event("T")), lambda task: task.cancel()) == 3
        if sys.version_info >= (3, 11):
            assert await too_late(append_within_a_minute(), lambda task: None) == 4

    asyncio.run(work())
    assert store.head() in (3, 4)


# Together.


def test_many_who_begin_at_once(shop: Path) -> None:
    for turn in range(15):
        place = shop / str(turn)
        shop.mkdir(exist_ok=True)
        begin, go = os.pipe()

        def append(_: object, place: Path = place, begin: int = begin, go: int = go) -> None:
            os.close(go)
            os.read(begin, 1)  # its end, when the last of us has begun
            EventStore(place).append(Event("T"))

        children = [Child(append) for _ in range(6)]
        os.close(begin)
        os.close(go)
        assert [child.end()[0] for child in children] == [0] * 6
        assert EventStore(place).head() == 6


def test_a_fork_while_a_thread_appends(shop: Path) -> None:
    store = EventStore(shop, lock_timeout=20)
    stop = threading.Event()

    def append() -> None:
        while not stop.is_set():
            store.append(Event("parent"))

    thread = Thread("appends", append)
    try:
        for _ in range(40):
            assert isinstance(in_child(lambda: store.append(Event("child"))), int)
    finally:
        stop.set()
        assert thread.outcome() is None
    assert sum(event.type == "child" for event in store.read()) == 40


def test_an_import_that_does_not_get_the_lock(shop: Path) -> None:
    store = EventStore(shop, lock_timeout=0.2)
    store.append(Event("base"))
    text = ['{"type": "T"}'] * 50
    with Lock(shop / ".store.lock", keep=True):
        importing = Thread("imports", lambda: store.import_(text))
        assert importing.outcome() == "Timeout"
    assert store.append(Event("next")) == 2


def test_a_bad_condition_fails_only_its_own_append(shop: Path, syncs: Syncs) -> None:
    store = EventStore(shop)
    store.append(Event("base"))
    with pytest.raises(TypeError, match="texts, not 7"):
        QueryItem(tags=[7])  # type: ignore[arg-type]
    bad = AppendCondition(Query.all(), after=99)  # which is found out when it is its turn
    syncs.hold("A")
    first = Thread("A", lambda: store.append(Event("a")))
    syncs.until_held("A")
    others = [Thread("B", lambda: store.append(Event("b"), bad)), Thread("C", lambda: store.append(Event("c")))]
    until(lambda: len(store._engine.committer.queue.waiting) == 2)
    syncs.let_go("A")
    assert first.outcome() == 2 and others[0].outcome() == "ValueError" and others[1].outcome() == 3


@pytest.mark.parametrize(
    "data",
    [msgspec.Raw(b"1\n2"), msgspec.Raw(b"garbage"), msgspec.Raw(b""), "[" * 3],
    ids=["lines", "garbage", "none", "ok"],
)
def test_data_that_could_not_be_read_again_is_not_written(data: Any, shop: Path) -> None:
    store = EventStore(shop)
    if isinstance(data, str):
        assert store.append(Event("T", data)) == 1
        return
    with pytest.raises(ValueError, match="JSON"):
        store.append(Event("T", data))
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        store.append(Event("T", deep))
    assert store.head() == 0 and store.append(Event("T")) == 1


def test_reading_goes_on_after_a_close(shop: Path) -> None:
    store = EventStore(shop, durable=False, segment_size=2000)
    for number in range(100):
        store.append(Event("T", number, tags={"t"}))
    for query in (Query.all(), Query.of(tags={"t"})):
        reading = store.read(query)
        first = next(reading)
        store.close()
        assert [first.data, *[event.data for event in reading]] == list(range(100))


def test_verify_beside_writers(shop: Path) -> None:
    store = EventStore(shop, durable=False, segment_size=3000)
    stop = threading.Event()

    def append() -> None:
        while not stop.is_set():
            store.append([Event("T", "x" * 50, tags={"t"})] * 3)

    writer = Thread("writes", append)
    try:
        for _ in range(15):
            assert EventStore(shop).verify().problems == ()
    finally:
        stop.set()
        assert writer.outcome() is None


def test_a_follower_begins_behind_the_end(shop: Path) -> None:
    store = EventStore(shop)
    store.append(Event("T"))
    following = Thread("follows", lambda: [event.position for event in islice(store.follow(after=3), 2)])
    for _ in range(4):
        store.append(Event("T"))
    assert following.outcome() == [4, 5]


def test_files_of_another_store(shop: Path, tmp_path: Path) -> None:
    """In the same directory, so that nothing but their owner tells them apart."""
    other = EventStore(tmp_path / "other", durable=False, segment_size=500)
    for number in range(40):
        other.append(Event("T", number))
    other.rebuild_index()
    other.close()
    store = EventStore(shop)
    store.append(Event("T"))
    (tmp_path / "other/index").rename(tmp_path / "index")
    if tmp_path.stat().st_dev == shop.stat().st_dev:
        os.replace(tmp_path / "index", shop / "index")
        os.replace(tmp_path / "other/ledger", shop / "ledger")
    assert EventStore(shop).head() == 1 and EventStore(shop).append(Event("T")) == 2
    assert [event.position for event in EventStore(shop).read(Query.of(types={"T"}))] == [1, 2]


# What people found who did not write this.


@pytest.mark.usefixtures("no_turns")
def test_another_process_syncs_while_a_writer_decides_what_to_take_back(shop: Path, syncs: Syncs) -> None:
    """A sync of A fails. While A looks where what is on disk ends, B's sync goes well. It is not believed any more."""
    a, b, _ = three(shop)
    syncs.hold("B")
    second = Thread("B", lambda: b.append(Event("b")))
    syncs.until_held("B")
    disk = a._engine.committer.disk
    open_at = disk._open_at

    def open_while_b_syncs(safe: int, segment: int) -> Any:
        tail = open_at(safe, segment)
        syncs.let_go("B")
        second.join(5)
        return tail

    disk._open_at = open_while_b_syncs  # type: ignore[method-assign]
    syncs.broken.add("A")
    assert Thread("A", lambda: a.append(Event("a"))).outcome() == "OSError"
    assert second.outcome() == "OSError" and types(shop) == []


@pytest.fixture
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is about to sync does so at once, as if there were two ledgers: one was deleted, and made again."""
    monkeypatch.setattr(Ledger, "take_turn", lambda *_: True)


@pytest.mark.usefixtures("no_turns")
def test_killed_when_it_was_said_that_something_is_taken_back(shop: Path, syncs: Syncs) -> None:
    """B has written behind what is taken back, and syncs before anybody has cut it: it is told that it is lost."""
    a, b, c = three(shop)
    syncs.hold("B")
    second = Thread("B", lambda: b.append(Event("b")))
    syncs.until_held("B")
    ledger = a._engine.committer.disk.usable_ledger()
    assert ledger is not None
    ledger.take_back(a._engine.committer.disk._open_at(4, 1).end)  # and is killed
    syncs.let_go("B")
    assert second.outcome() == "OSError"
    assert c.append(Event("c")) == 5 and types(shop) == ["c"]


@pytest.mark.usefixtures("no_turns")
def test_on_disk_by_another_ones_sync_before_something_else_was_taken_back(shop: Path, syncs: Syncs) -> None:
    """A's event is on disk since B synced, and stays there when C's cannot be. A, which comes late, is told so."""
    a, b, c = three(shop)
    syncs.hold("A")
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    assert Thread("B", lambda: b.append(Event("b"))).outcome() == 6
    syncs.broken.add("C")
    assert Thread("C", lambda: c.append(Event("c"))).outcome() == "OSError"
    syncs.let_go("A")
    assert first.outcome() == 5 and types(shop) == ["a", "b"]


@pytest.mark.parametrize(
    ("where", "durable", "left"),
    [("epoch", True, []), ("note_written", True, []), ("note_written", False, []), ("release", False, ["third"])],
)
def test_interrupted_between_writing_and_saying_so(shop: Path, where: str, durable: bool, left: list[str]) -> None:
    """Nothing of it is there, unless others know of it: then all of it is, and is seen."""
    EventStore(shop).append([Event("first")])
    store = EventStore(shop, durable=durable)
    store.append(Event("second"))
    ledger = store._engine.committer.disk._ledger
    assert ledger is not None
    kind = type(ledger)

    class Interrupted(kind):  # type: ignore[misc, valid-type]
        come = False

        def __getattribute__(self, name: str) -> Any:
            if name == where and Interrupted.come and sys._getframe(1).f_code.co_name == "_write_texts":
                Interrupted.come = False
                raise KeyboardInterrupt
            return kind.__getattribute__(self, name)

    ledger.__class__ = Interrupted
    Interrupted.come = True
    with pytest.raises(KeyboardInterrupt):
        store.append(Event("third"))
    assert seen(shop) == ["first", "second", *left]
    assert store.append(Event("fourth")) == 3 + len(left) and seen(shop) == ["first", "second", *left, "fourth"]
    assert EventStore(shop).verify().ok


@pytest.mark.usefixtures("no_turns")
def test_a_sync_fails_while_a_segment_is_ended(shop: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch) -> None:
    """B's sync of the old segment goes wrong right behind A's, which ends it: nothing of the two is there."""
    a, b, c = three(shop)
    syncs.hold("B")
    second = Thread("B", lambda: b.append(Event("b")))
    syncs.until_held("B")
    a._engine.committer.segment_size = 1
    ledger = a._engine.committer.disk._ledger
    assert ledger is not None
    note_synced = ledger.note_synced

    def slowly(position: int, epoch: int) -> bool:
        syncs.broken.add("B")
        syncs.let_go("B")
        until(lambda: not ledger.is_trusted)
        return note_synced(position, epoch)

    monkeypatch.setattr(ledger, "note_synced", slowly)
    assert Thread("A", lambda: a.append(Event("a"))).outcome() == "OSError"
    assert second.outcome() == "OSError"
    assert c.append(Event("c")) == 5 and types(shop) == ["c"]


def test_a_signal_handler_appends_while_its_thread_reads(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EventStore(shop)
    store.append(Event("a"))
    refused = []
    add = Recent.add

    def handler(recent: Recent, *words: Any) -> None:
        with pytest.raises(holdfast.WouldDeadlock) as caught:
            store.append(Event("b"))
        refused.append(caught.value)
        add(recent, *words)

    reader = store = EventStore(shop)
    monkeypatch.setattr(Recent, "add", handler)
    assert [event.type for event in reader.read(Query.of(types={"a"}))] == ["a"] and refused


def test_a_signal_handler_appends_while_its_thread_withdraws(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EventStore(shop)
    queue, request = store._engine.committer.queue, Request([], None, None)
    queue.put([request])
    pass_on, refused = queue._pass_on, []

    def handler(request: Request) -> None:
        monkeypatch.setattr(queue, "_pass_on", pass_on)
        with pytest.raises(holdfast.WouldDeadlock) as caught:
            store.append(Event("b"))
        refused.append(caught.value)
        pass_on(request)

    monkeypatch.setattr(queue, "_pass_on", handler)
    assert queue.withdraw(request) and refused
    assert store.append(Event("c")) == 1


def test_a_batch_that_fails_takes_those_behind_it_along(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EventStore(shop)
    for number in range(3):
        store.append(Event(f"{number}"))
    store.export(tmp_path / "all")
    other = EventStore(tmp_path / "other")
    acquire, failures = other._engine.committer._acquire, iter([OSError(24, "Too many open files")])

    def fails_once(request: Any) -> Any:
        for failure in failures:
            raise failure
        return acquire(request)

    monkeypatch.setattr(other._engine.committer, "_acquire", fails_once)
    with pytest.raises(OSError, match="Too many"):
        other.import_(tmp_path / "all")
    assert seen(tmp_path / "other") == []


def test_a_forked_worker_does_not_have_its_parents_turn(shop: Path) -> None:
    """It lives on, and its parent ends in the middle of a sync."""
    store = EventStore(shop)
    store.append([Event("a"), Event("a")])
    ledger = store._engine.committer.disk._ledger
    assert ledger is not None and ledger.take_turn()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        ledger._turn.close()  # as if we were dead: nothing is unlocked
        assert EventStore(shop).append(Event("b")) == 3
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_no_process_reports_success_for_events_whose_sync_failed(
    shop: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells only those of an error who had the file open then. D opens it later, and would hear nothing. A,
    whose event is in its way, is slow to say that its sync went wrong: D does not sync before."""
    a, _, _ = three(shop)
    failed, go_on, distrust = threading.Event(), threading.Event(), Ledger.distrust

    def slowly(ledger: Ledger, epoch: int) -> None:
        failed.set()
        assert go_on.wait(30)
        distrust(ledger, epoch)

    monkeypatch.setattr(Ledger, "distrust", slowly)
    syncs.broken.add("A")
    syncs.hold("D")
    first = Thread("A", lambda: a.append(Event("a")))
    assert failed.wait(30)
    fourth = Thread("D", lambda: EventStore(shop).append(Event("d")))
    until(lambda: (shop / "events/0000000001.jsonl").read_bytes().count(b'"type":"d"'))
    assert not syncs.is_held("D")
    go_on.set()
    syncs.let_go("D")
    assert first.outcome() == fourth.outcome() == "OSError" and types(shop) == []


def test_one_process_syncs_at_a_time(shop: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch) -> None:
    """While A syncs, B does not: it might be told that all is well by a sync that A has to do for both, and fails."""
    a, b, _ = three(shop)
    b.append(Event("before"))
    waits = threading.Event()
    monkeypatch.setattr(ledger_module, "sleep", lambda seconds: (waits.set(), time.sleep(seconds)))
    for name in "AB":
        syncs.hold(name)
    first = Thread("A", lambda: a.append(Event("a")))
    syncs.until_held("A")
    second = Thread("B", lambda: b.append(Event("b")))
    until(lambda: waits.is_set() or syncs.is_held("B"))
    assert waits.is_set() and not syncs.is_held("B")
    syncs.let_go("A")
    syncs.let_go("B")
    assert (first.outcome(), second.outcome()) == (6, 7) and types(shop) == ["before", "a", "b"]


def test_a_segment_whose_sync_failed_is_not_written_to_any_more(shop: Path, syncs: Syncs) -> None:
    a, b, _ = three(shop)
    for _ in range(2):
        syncs.broken.add("A")
        assert Thread("A", lambda: a.append(Event("a"))).outcome() == "OSError"
        syncs.broken.clear()
    assert b.append(Event("b")) == 5
    assert sorted(os.listdir(shop / "events")) == ["0000000001.jsonl", "0000000005.jsonl"]
    syncs.broken.add("A")  # and one in which nothing is yet
    assert Thread("A", lambda: a.append([Event("a", "x" * 100)])).outcome() == "OSError"
    syncs.broken.clear()
    assert a.append(Event("c")) == 6 and types(shop) == ["b", "c"]


def test_a_ledger_that_was_copied_to_the_same_inode(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backup that is put back may be: its number is used again, its generation is another one."""
    store = EventStore(shop)
    store.append(Event("a"))
    store.append(Event("b"))
    generation = system.generation
    monkeypatch.setattr(system, "generation", lambda fd: generation(fd) + 1)
    (segment,) = (shop / "events").iterdir()
    text = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(text[0])  # what the copy has of the log
    again = EventStore(shop)
    assert [event.type for event in again.read()] == ["a"] and again.append(Event("c")) == 2


def test_data_that_says_more_than_data(shop: Path) -> None:
    store = EventStore(shop)
    for text in (b'1,"position":99', b'1,"tags":["hidden"]', b'1,"type":"other"', b'1}{"a":1'):
        with pytest.raises(ValueError, match="JSON"):
            store.append(Event("T", msgspec.Raw(text)))
    assert store.append(Event("T", msgspec.Raw(b'{"a":null}'))) == 1
    assert next(iter(store.read())).data == {"a": None}


@pytest.mark.parametrize("condition", [None, AppendCondition(Query.of(tags={"x"}))])
def test_a_segment_that_is_removed_while_it_is_written_to(shop: Path, condition: AppendCondition | None) -> None:
    store = EventStore(shop)
    store.append(Event("a"))
    (segment,) = (shop / "events").iterdir()
    segment.unlink()
    with pytest.raises(CorruptStore):
        store.append(Event("b"), condition)


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("what", ["aexecute", "aimport_"])
def test_cancelled_before_it_began(shop: Path, what: str, turns: int) -> None:
    store = EventStore(shop)
    store.append(Event("x"))

    async def main() -> None:
        work = store.aexecute(lambda _: [Event("z")]) if what == "aexecute" else store.aimport_(['{"type": "z"}'])
        task = asyncio.ensure_future(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=30)
        assert done, "it hangs"
        assert store.head() == (1 if task.cancelled() else 2)

    asyncio.run(main())


def test_others_append_between_two_looks_of_a_reader_without_a_ledger(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventStore(shop)
    writer.append(Event("a"))
    reader = EventStore(shop)
    monkeypatch.setattr(type(reader._engine.committer.disk), "visible", lambda disk: None)
    check_rest, left = Tail.check_rest, [2]

    def append_first(tail: Tail, known_safe: int = 0) -> bool:
        if left[0]:
            left[0] -= 1
            writer.append(Event("b"))
            writer.append(Event("c"))
        return check_rest(tail, known_safe)

    monkeypatch.setattr(Tail, "check_rest", append_first)
    assert reader.head() == 5


# Somebody is stopped in the middle.


@contextmanager
def locked_by_another_program(path: Path) -> Iterator[None]:
    """As if its process had been stopped."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("rolls", [False, True])
def test_a_process_that_has_the_turn_to_sync_is_waited_for(rolls: bool, shop: Path) -> None:
    """Nothing becomes visible meanwhile, nothing is lost, and all goes on when it does."""
    store, other = (EventStore(shop, segment_size=1 if rolls else 1 << 20) for _ in range(2))
    store.append(Event("a"))
    with locked_by_another_program(shop / "ledger"):
        first = Thread("A", lambda: store.append(Event("b")))
        until(lambda: b'"type":"b"' in b"".join(path.read_bytes() for path in (shop / "events").iterdir()) or rolls)
        second = Thread("B", lambda: other.append(Event("b")))
        assert seen(shop) == ["a"] and first.is_alive() and second.is_alive()
    assert {first.outcome(), second.outcome()} == {2, 3} and seen(shop) == ["a", "b", "b"]


@pytest.mark.parametrize("rolls", [False, True])
def test_a_stopped_process_that_has_the_turn_to_sync_delays_the_others_once(
    rolls: bool, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EventStore(shop, segment_size=1 if rolls else 1 << 20)
    store.append(Event("a"))
    with locked_by_another_program(shop / "ledger"):
        monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.05)
        assert store.append(Event("b")) == 2
        monkeypatch.setattr(ledger_module, "_PATIENCE_S", 3600)  # the second append does not wait again
        assert store.append(Event("c")) == 3
        assert seen(shop) == ["a", "b", "c"]
    assert EventStore(shop).verify().ok


# A second attack, by one who did not write this.


@pytest.mark.parametrize("where", [(Tail, "read_on"), (Tail, "write"), (Tail, "ends_at")])
def test_a_handler_closes_the_store_in_the_middle(where: Any, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had opened the last segment again, read nothing of it, and written from its beginning."""
    store, other = EventStore(shop), EventStore(shop)
    store.append(Event("a"))
    other.append(Event("b"))
    kind, name = where
    real, closed = getattr(kind, name), []

    def with_handler(*words: Any, **options: Any) -> Any:
        found = real(*words, **options)
        store.close()
        closed.append(name)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, with_handler)
        assert store.append(Event("c"), AppendCondition(Query.of(types={"x"}))) == 3 and closed
    assert other.append(Event("d")) == 4 and seen(shop) == ["a", "b", "c", "d"] and EventStore(shop).verify().ok


@pytest.mark.parametrize("do", [lambda store: store.read_last(), lambda store: store.rebuild_index()])
def test_a_handler_reads_while_its_thread_reads(do: Any, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EventStore(shop).append([Event("a"), Event("b")])
    store, real, told = EventStore(shop), Recent.add, []

    def add(*words: Any) -> None:
        with pytest.raises(holdfast.WouldDeadlock) as caught:
            do(store)
        told.append(caught.value)
        real(*words)

    monkeypatch.setattr(Recent, "add", add)
    assert [event.type for event in store.read(Query.of(types={"a", "b"}))] == ["a", "b"] and len(told) == 2


@pytest.mark.parametrize("rolls", [False, True])
def test_a_sync_fails_and_an_interrupt_comes_with_it(rolls: bool, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of the failure once."""
    store = EventStore(shop, segment_size=1 if rolls else 1 << 20)
    store.append(Event("a"))
    fails = [OSError(errno.EIO, "a broken disk")]
    fdatasync, distrust = system.fdatasync, Ledger.distrust
    interrupts = [KeyboardInterrupt()]
    told: list[int] = []

    def sync(fd: int) -> None:
        if fails:
            raise fails.pop()
        fdatasync(fd)

    def interrupted(ledger: Ledger, epoch: int) -> None:
        if interrupts:
            raise interrupts.pop()
        told.append(1)
        distrust(ledger, epoch)

    monkeypatch.setattr(system, "fdatasync", sync)
    monkeypatch.setattr(Ledger, "distrust", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.append(Event("b"))
    assert not fails and not interrupts
    assert store.append(Event("c")) == 2 and told
    assert seen(shop) == ["a", "c"], "and it is in a segment of its own"
    assert len(list((shop / "events").glob("*.jsonl"))) == 2 and EventStore(shop).verify().ok


def test_two_interrupts_while_it_is_undone(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EventStore(shop)
    store.append(Event("a"))
    write, forget = Tail.write, store._engine.view.forget
    interrupts = [KeyboardInterrupt("second"), KeyboardInterrupt("first")]

    def interrupted(*words: Any, **options: Any) -> int:
        end = write(*words, **options)
        if len(interrupts) == 2:
            raise interrupts.pop()
        return end

    def again() -> None:
        forget()
        if len(interrupts) == 1:
            raise interrupts.pop()

    monkeypatch.setattr(Tail, "write", interrupted)
    monkeypatch.setattr(store._engine.view, "forget", again)
    with pytest.raises(KeyboardInterrupt):
        store.append(Event("b"))
    assert not interrupts and store.append(Event("c")) == 2 and seen(shop) == ["a", "c"]


def test_the_file_that_identifies_a_store_is_on_disk_whichever_process_made_it(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = system.fsync
    monkeypatch.setattr(system, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    EventStore(shop, durable=False)
    assert any("store.json" in path for path in synced) and {str(shop), str(shop.parent)} <= set(synced)


def test_events_that_are_ready_are_returned_while_a_tail_reads(shop: Path) -> None:
    """By a task that comes after one that was cancelled. The tail had taken that for the end."""
    store = EventStore(shop)
    store.append([Event("T", n) for n in range(600)])
    tail = store.tail()
    assert isinstance(tail, AsyncTail)
    taken: list[int] = []

    class Taken(deque[Any]):
        def extend(self, found: Any) -> None:
            taken.extend(event.position for event in found)

    tail._ready = Taken()
    while len(taken) < 600:
        before = len(taken)
        tail._read_on()
        assert len(taken) > before
    assert taken == list(range(1, 601))


@pytest.mark.parametrize("size", [0, 50])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_segment_is_cut_under_a_reader(size: int, backwards: bool, shop: Path) -> None:
    """It is told, and does not look for ever."""
    store = EventStore(shop, durable=False, segment_size=900)
    for number in range(20):
        store.append(Event("T", number, tags={"a"}))
    assert len(list(store.read(Query.of(tags={"a"})))) == 20
    os.truncate(sorted((shop / "events").iterdir())[1], size)
    with pytest.raises(CorruptStore):
        list(store.read(backwards=backwards))


def test_a_damaged_line_of_a_batch_with_good_ones_behind_it(shop: Path) -> None:
    """Without a ledger, and never synced: it is no end of anything, so nothing is cut off."""
    store = EventStore(shop, durable=False)
    store.append([Event("A", 1), Event("A", 2)])
    store.append(Event("B"))
    path = shop / "events/0000000001.jsonl"
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"data":2', b'"data":3'))
    (shop / "ledger").unlink()
    for do in (lambda store: list(store.read()), lambda store: store.append(Event("C"))):
        with pytest.raises(CorruptStore, match="is damaged, and what comes after that is not"):
            do(EventStore(shop, durable=False))
    path.write_bytes(text)
    assert EventStore(shop).append(Event("C")) == 4


@pytest.mark.parametrize("query", [Query.all(), Query.of(tags={"a"})])
def test_a_fork_in_the_middle_of_reading(query: Query, shop: Path) -> None:
    store = EventStore(shop)
    store.append([Event("T", n, tags={"a"}) for n in range(10)])
    reading = iter(store.read(query))
    assert next(reading).position == 1
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with store._engine.view.mutex:
            held.set()
            let_go.wait(30)

    thread = Thread("other", hold)
    assert held.wait(30)

    def in_its_child() -> list[int]:
        signal.alarm(20)
        return [event.position for event in reading]

    assert in_child(in_its_child) == list(range(2, 11))
    let_go.set()
    thread.join()


def test_a_failed_sync_of_what_others_have_made_visible(shop: Path, syncs: Syncs) -> None:
    """It stays, but the next one who waits for the disk begins a new segment."""
    careful, hasty = EventStore(shop), EventStore(shop, durable=False)
    careful.append(Event("a"))
    syncs.hold("A")
    thread = Thread("A", lambda: careful.append(Event("b")))
    syncs.until_held("A")
    hasty.append(Event("c"))
    syncs.broken.add("A")
    syncs.let_go("A")
    assert thread.outcome() == "OSError"
    assert careful.append(Event("d")) == 4 and seen(shop) == ["a", "b", "c", "d"]
    assert sorted(path.name for path in (shop / "events").iterdir()) == ["0000000001.jsonl", "0000000004.jsonl"]


def test_a_segment_that_is_made_anew_is_never_missing(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EventStore(shop)
    store.append(Event("a"))
    ledger = store._engine.committer.disk._ledger
    assert ledger is not None
    store._engine.committer.segment_size = 1
    store.append(Event("b"))
    tail = store._engine.view.tail
    work = Work()
    rename = system.rename

    def dies(source: str, target: str) -> None:
        if target == tail.path:
            raise OSError(errno.EMFILE, "Too many open files")
        rename(source, target)

    monkeypatch.setattr(system, "rename", dies)
    with pytest.raises(OSError, match="Too many"):
        store._engine.committer._make_anew(work, tail)
    assert seen(shop) == ["a", "b"]
