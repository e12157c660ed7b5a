"""The index of a log: what a search costs, where it is, who builds it, and that it is never believed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faces import Caller
from support import Child, in_child, until

from holdfast import Lock, system
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query, QueryItem
from holdfast.events.log import builder as builder_module
from holdfast.events.log import engine as log_engine
from holdfast.events.log.builder import Builder
from holdfast.events.log.index import Index
from holdfast.events.log.search import Block, Recent, search
from holdfast.paths import Mount
from holdfast.sqlite import Database, inside_sqlite

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def shop(in_memory: Path) -> Path:
    return in_memory / "shop"


def filled(shop: Path, many: int = 3000) -> EventStore:
    """Types A and B in turn. A has the tag "a", B has "b", and all have "all" and one that is rare."""
    store = EventStore(shop, durable=False, segment_size=100_000)
    events = [Event("AB"[n % 2], n, tags={"ab"[n % 2], "all", f"n:{n % 300}"}) for n in range(many)]
    for start in range(0, many, 100):
        store.append(events[start : start + 100])
    store.rebuild_index()
    return store


def positions(events: Any) -> list[int]:
    return [event.position for event in events]


# What a search costs.


@pytest.mark.parametrize(
    ("query", "most"),
    [
        (Query.of(types={"A"}, tags={"b"}), 1),  # both frequent, never together
        (Query.of(types={"A"}, tags={"all"}), 1),
        (Query.of(types={"C"}), 1),
        (Query.of(tags={"all"}), 2),  # once for each type that it has
        (Query.of(tags={"nowhere", "all"}), 1),
        (Query.of(types={"A"}, tags={"all", "n:7"}), 30),  # the rare one has 10 events, and B's are not A's
        (Query.of(types={"A"}) | Query.of(types={"B"}), 2),
    ],
)
def test_a_condition_takes_few_lookups(query: Query, most: int, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(shop)
    store = EventStore(shop, durable=False)
    lookups, find = [], Builder.find

    def counted(*words: Any) -> list[int]:
        lookups.append(words)
        return find(*words)

    monkeypatch.setattr(Builder, "find", counted)
    wanted = [event.position for event in store.read() if query.matches(event)]
    lookups.clear()
    if wanted:
        with pytest.raises(ConditionFailed) as caught:
            store.append(Event("T"), AppendCondition(query))
        assert caught.value.position == wanted[-1]
    else:
        store.append(Event("T"), AppendCondition(query))
    assert len(lookups) <= most


def test_the_index_is_not_asked_while_the_lock_is_held(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(shop)
    store = EventStore(shop, durable=False)
    asked, find = [], Index.find

    def look(*words: Any) -> list[int]:
        hold = Lock(shop / ".store.lock", keep=True).try_acquire()
        asked.append(hold is not None)
        if hold is not None:
            hold.release()
        return find(*words)

    monkeypatch.setattr(Index, "find", look)
    for number in range(20):
        store.append(Event("T"), AppendCondition(Query.of(types={"A"}, tags={f"new:{number}"})))
    assert len(asked) >= 20 and all(asked)


def test_blocks_find_what_a_list_finds() -> None:
    """Both ways, any limits, one tag or several, in pieces of any size."""
    chance = random.Random(3)
    block, events = Block(1), []
    for position in range(1, 400):
        kind, tags = chance.choice("AB"), set(chance.sample("xyz", chance.randrange(4)))
        block.add(position, kind, tags)
        events.append((position, Event(kind, tags=tags)))
    for _ in range(300):
        kinds, tags = chance.sample("ABC", chance.randrange(3)), chance.sample("xyz", chance.randrange(3))
        query = Query((QueryItem(frozenset(kinds), frozenset(tags)), QueryItem(frozenset("A"), frozenset("x"))))
        low, high = sorted(chance.sample(range(500), 2))
        wanted = [position for position, event in events if low <= position <= high and query.matches(event)]
        assert list(search(block, query, low, high, backwards=False)) == wanted
        assert list(search(block, query, low, high, backwards=True)) == wanted[::-1]


def test_the_memory_of_the_index_is_bounded() -> None:
    recent = Recent(0)
    for position in range(1, 100_001):
        recent.add(position, "T", ["t"])
    assert len(recent.blocks) == 4 and recent.base == recent.blocks[0].first - 1 > 90_000


# Who builds it.


def test_it_is_built_in_the_background(shop: Path) -> None:
    store = EventStore(shop, durable=False)
    for _ in range(15):
        store.append([Event("T", tags={"t"})] * 100)
    index = store._engine.view.builder.index
    until(lambda: index.mark().position >= 1024)


def test_a_closed_store_may_be_removed(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends the thread that builds, after the block in hand."""
    write, begun, ended = Index.write, threading.Event(), []

    def slow(*words: Any) -> None:
        begun.set()
        until(lambda: builder._is_closing)
        write(*words)
        ended.append(words)

    monkeypatch.setattr(Index, "write", slow)
    with EventStore(shop, durable=False) as store:
        builder = store._engine.view.builder
        store.append([Event("T", tags={"t"})] * 20_000)
        assert begun.wait(30)
        thread = builder._thread
    assert thread is not None and not thread.is_alive()
    assert len(ended) == 1 < 20_000 / 512
    shutil.rmtree(shop)


def test_a_signal_handler_that_closes_a_store_waits_for_no_thread(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have interrupted what that thread waits for."""
    write, begun, handled = Index.write, threading.Event(), threading.Event()

    def slow(*words: Any) -> None:
        begun.set()
        handled.wait(60)
        write(*words)

    monkeypatch.setattr(Index, "write", slow)
    store = EventStore(shop, durable=False)
    joined: list[str] = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: store.close())
    try:
        store.append([Event("T", tags={"t"})] * 2000)
        assert begun.wait(30)
        with monkeypatch.context() as patched:
            patched.setattr(store._engine.view.builder._thread, "join", lambda: joined.append("would never end"))
            with inside_sqlite:  # as an operation of a task queue in this thread
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
        handled.set()
    assert not joined
    store.close()


def test_two_threads_may_close_a_store_at_once(shop: Path) -> None:
    index = filled(shop)._engine.view.builder.index
    assert index.is_there
    with inside_sqlite:
        closing = [Caller(index.close) for _ in range(2)]

        def are_there() -> bool:
            frames = [sys._current_frames().get(thread.ident or 0) for thread in closing]
            return all(frame is not None and frame.f_code is Database.close.__code__ for frame in frames)

        until(are_there)
    for thread in closing:
        thread.result()
    assert not index.is_there


def test_an_append_is_acknowledged_even_if_no_thread_can_be_started(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with EventStore(shop, durable=False) as store:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            store.append([Event("T", tags={"t"})] * 2000)
            store.close()
        assert store.append(Event("T", tags={"t"}))
        assert len(list(store.read())) == 2001


def test_nobody_waits_in_the_background_for_the_index_of_another_process(shop: Path) -> None:
    store = EventStore(shop, durable=False)
    index = store._engine.view.builder.index
    with index.lock():
        place = index.folder()
        store.append([Event("T", tags={"t"})] * 2000)
        store.close()
    assert index.folder() == place


def test_a_process_that_ends_builds_at_least_one_block(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the processes of a shell, which append one event each, would never index anything."""
    import subprocess
    import sys

    store = EventStore(shop, durable=False)
    monkeypatch.setattr(Builder, "build_soon", lambda *_: None)
    store.append([Event("T", tags={"t"})] * 2000)
    for number in range(5):
        code = "import sys; from holdfast.events import *; EventStore(sys.argv[1]).append(Event('T'))"
        subprocess.run([sys.executable, "-c", code, shop], check=True)
        assert store._engine.view.builder.index.mark().position >= min(2000, 512 * (number + 1))


def test_killed_while_it_builds(shop: Path) -> None:
    """At each write of SQLite's log, and before each block: the next one goes on."""
    filled(shop).close()
    wanted = positions(EventStore(shop).read(Query.of(tags={"n:7"})))
    for number in range(6):
        shutil.rmtree(shop / "index")

        def work(say: Callable[[str], None], number: int = number) -> None:
            write, left = Index.write, [number]

            def dying(index: Index, *words: Any) -> None:
                if not left[0]:
                    insert = index._insert
                    index._insert = lambda block: (insert(block), os.kill(os.getpid(), signal.SIGKILL))  # type: ignore
                left[0] -= 1
                write(index, *words)

            Index.write = dying  # type: ignore[method-assign]
            EventStore(shop).rebuild_index()

        Child(work).end()
        store = EventStore(shop)
        assert positions(store.read(Query.of(tags={"n:7"}))) == wanted
        assert store.verify().ok


def test_deleted_while_it_is_built(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(shop)
    wanted = positions(store.read(Query.of(tags={"n:7"})))
    write, deleted = Index.write, []

    def interfering(index: Index, *words: Any) -> None:
        write(index, *words)
        shutil.rmtree(shop / "index", ignore_errors=True)
        deleted.append(index)

    shutil.rmtree(shop / "index")
    monkeypatch.setattr(Index, "write", interfering)
    assert positions(EventStore(shop).read(Query.of(tags={"n:7"}))) == wanted
    background = EventStore(shop, durable=False)
    background.append([Event("A", tags={"n:7"})] * 2000)  # a thread that failed would fail the test
    thread = background._engine.view.builder._thread
    assert thread is not None
    thread.join()
    assert len(deleted) > 1
    monkeypatch.undo()
    assert len(positions(EventStore(shop).read(Query.of(tags={"n:7"})))) == len(wanted) + 2000


def test_several_build_it_at_once_and_a_fork_comes_in_between(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "_AT_ONCE", 50)
    filled(shop)
    wanted = len(list(EventStore(shop).read(Query.of(tags={"n:7"}))))
    for _ in range(5):
        shutil.rmtree(shop / "index")
        stores = [EventStore(shop) for _ in range(3)]

        def read() -> int:
            return len(list(EventStore(shop).read(Query.of(tags={"n:7"}))))

        children = [Child(lambda say: say(str(read()))) for _ in range(3)]
        assert [len(list(store.read(Query.of(tags={"n:7"})))) for store in stores] == [wanted] * 3
        assert in_child(read) == wanted
        assert [child.end() for child in children] == [(0, [str(wanted)])] * 3


# Where it is, and whether it is believed.


def test_on_a_network_file_system_it_is_in_the_users_cache(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_engine, "mount_at", lambda *_: Mount("cifs", options="nolease"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = filled(shop)
    assert not (shop / "index").exists() and len(list(tmp_path.glob("holdfast/events/*/*.db"))) == 1
    assert len(positions(EventStore(shop).read(Query.of(tags={"n:7"})))) == 10
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert len(positions(EventStore(shop).read(Query.of(tags={"n:7"})))) == 10, "in memory, if need be"
    assert store.verify().ok


def test_an_index_that_is_newer_than_the_log_is_made_again(shop: Path) -> None:
    """As after a power failure, or in a copy: the log says what there is."""
    filled(shop).close()
    *_, last = sorted((shop / "events").iterdir())
    last.unlink()
    (shop / "ledger").unlink()
    store = EventStore(shop, durable=False)
    head = store.append(Event("A", tags={"b"}))
    assert head == int(last.name[:10])
    assert positions(store.read(Query.of(types={"A"}, tags={"b"}))) == [head]
    assert max(positions(store.read(Query.of(tags={"all"})))) == head - 1 and store.verify().ok


def test_an_index_with_a_wrong_posting_is_made_again(shop: Path) -> None:
    store = filled(shop)
    index = store._engine.view.builder.index
    index.run("update posting set position = position + 1000000 where tag = ? and position = 8", (b"n:7",))
    assert not store.verify().ok
    index.run("insert into posting values (?, 1, 4)", (b"n:7",))
    fresh = EventStore(shop)
    assert fresh.append([], AppendCondition(Query.of(types={"B"}, tags={"n:7"}), after=2989)) == 3000
    with pytest.raises(ConditionFailed):
        fresh.append([], AppendCondition(Query.of(tags={"n:7"}), after=3))
    store.rebuild_index()
    assert store.verify().ok and len(positions(store.read(Query.of(tags={"n:7"})))) == 10


@pytest.mark.parametrize(
    "good",
    [
        rb"n:7.(\x0a)\x94",  # a posting: event 2708 becomes a negative number
        rb"not (n)ull",  # no text any more, and SQLite quotes it in its message
        rb"\d\x0b(\xb8)",  # the state: up to event 3000 becomes up to event 2872
    ],
)
def test_an_index_with_a_changed_bit_is_made_again(good: bytes, shop: Path) -> None:
    filled(shop).close()
    (file,) = (shop / "index").glob("*.db")
    content = bytearray(file.read_bytes())
    (found,) = re.finditer(good, bytes(content), re.DOTALL)
    content[found.start(1)] ^= 0x80
    file.unlink()
    file.write_bytes(content)
    store = EventStore(shop, durable=False)
    wanted = list(range(8, 3001, 300))
    assert positions(store.read(Query.of(tags={"n:7"}))) == wanted
    assert positions(store.read(Query.of(tags={"n:7"}), backwards=True)) == wanted[::-1]
    with pytest.raises(ConditionFailed, match=f"event {wanted[-1]} matches"):
        store.append([], AppendCondition(Query.of(tags={"n:7"})))
    assert store.verify().ok


def test_its_file_is_opened_by_sqlite_alone(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To close it otherwise would end the locks that SQLite has on it."""
    opened, open_fd = [], system.open_fd

    def look(path: str, *words: Any, **more: Any) -> int:
        opened.append(path)
        return open_fd(path, *words, **more)

    monkeypatch.setattr(system, "open_fd", look)
    store = filled(shop)
    store.append(Event("T"), AppendCondition(Query.of(tags={"x"})))
    assert store.verify().ok and not [path for path in opened if ".db" in str(path)]
