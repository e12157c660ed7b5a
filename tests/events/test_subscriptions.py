"""What subscriptions promise, on every engine: at least once, one active process per name, a checkpoint that lasts."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
import pytest
from support import Child, Peer, auntil, die_before_call, until

import holdfast
import holdfast.system
from holdfast import CorruptStore, UnsafePath
from holdfast.events import Event, EventStore, Query
from holdfast.events.transactions import TABLE, Transaction
from holdfast.locks.postgres_sessions import LockSession

if TYPE_CHECKING:
    import servers

READY = "import holdfast.events; store = holdfast.events.EventStore(url); sub = store.subscribe('mailer')"


def positions(events: Any) -> list[int]:
    return [event.position for event in events]


def filled(place: Any, number: int) -> EventStore:
    store: EventStore = place.store()
    store.append([Event("T", at, tags={"even" if at % 2 == 0 else "odd"}) for at in range(1, number + 1)])
    return store


def lag_of(store: EventStore, name: str = "mailer") -> int:
    (status,) = [one for one in store.subscriptions() if one.name == name]
    return status.lag


def rest(store: EventStore, name: str = "mailer") -> list[int]:
    """What a killed consumer left. The server notices its end some milliseconds later."""
    until(lambda: not store._engine.checkpoint(name).lock.status().held)
    return positions(store.subscribe(name, timeout=0))


def test_a_subscription_goes_on_behind_its_checkpoint(place: Any) -> None:
    store = filled(place, 6)
    even = Query.of(tags={"even"})
    with store.subscribe("mailer", even) as events:
        assert next(events).position == 2
        assert next(events).position == 4  # which acknowledges 2
    assert positions(place.store().subscribe("mailer", even, timeout=0)) == [4, 6]
    assert positions(store.subscribe("mailer", even, timeout=0)) == []
    store.append([Event("T", tags={"odd"}), Event("T", tags={"even"})])
    assert positions(store.subscribe("mailer", even, timeout=0)) == [8]
    assert positions(store.subscribe("other", even, after=4, timeout=0)) == [6, 8]


def test_an_acknowledged_event_does_not_come_again(place: Any) -> None:
    store = filled(place, 3)
    for event in (events := store.subscribe("mailer")):
        if event.position == 2:
            events.acknowledge()
            break
    events.close()
    assert positions(store.subscribe("mailer", timeout=0)) == [3]


def test_the_active_process_gets_new_events_without_polling(place: Any) -> None:
    store = filled(place, 1)
    with Peer(url=place.name) as peer:
        peer.do(READY)
        assert peer.do("next(sub).position") == 1
        for position in range(2, 6):
            peer.begin("next(sub).position")
            until(lambda: lag_of(store) == 0)  # it has acknowledged, and waits
            assert store.append(Event("T")) == position == peer.answer()


def test_one_process_is_active_and_the_next_takes_over_at_once_when_it_is_killed(place: Any) -> None:
    """Several times, and the fastest one counts: the processors may be busy."""
    store = filled(place, 20)
    took = []
    active = Peer(url=place.name)
    active.do(READY)
    assert active.do("next(sub).position") == 1
    for turn in range(1, 6):
        with Peer(url=place.name) as waiting:
            waiting.do(READY)
            waiting.begin("next(sub).position")
            until(lambda: [one.waiting for one in store.subscriptions()] == [1])
            status = store.subscriptions()[0]
            assert status.active and f"pid {active.pid}" in status.holder and not waiting.has_answered()
            assert active.do("next(sub).position") == turn + 1
            os.kill(active.pid, signal.SIGKILL)
            killed = time.monotonic()
            assert waiting.answer() == turn + 1  # which was not acknowledged
            took.append(waiting.at - killed)
            active.__exit__(None)
            if turn < 5:
                active = Peer(url=place.name)
                active.do(READY)
                waiting.begin("sub.close()")
                waiting.answer()
                assert active.do("next(sub).position") == turn + 1
    assert min(took) < 0.1


def test_killed_consumers_lose_nothing_and_repeat_one_event_each(place: Any) -> None:
    store = filled(place, 400)

    def consume(say: Any) -> None:
        for event in place.store().subscribe("mailer", timeout=10):
            say(str(event.position))
            if event.position == 400:
                return

    chance, said, kills = random.Random(7), [], 0
    while not store.subscriptions() or store.subscriptions()[0].checkpoint < 399:
        before = store.subscriptions()[0].checkpoint if kills else 0
        children = [Child(consume) for _ in range(3)]
        wanted = min(399, before + chance.randrange(1, 60))
        until(lambda wanted=wanted: store.subscriptions() and store.subscriptions()[0].checkpoint >= wanted)
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        kills += len(children)
        for child in children:
            said += [int(line) for line in child.end()[1]]
    said += rest(store)
    counted = Counter(said)
    assert sorted(counted) == list(range(1, 401))
    assert sum(counted.values()) - 400 <= kills


CALLS: dict[str, Any] = {
    "log": {holdfast.system: ("open_fd", "pwrite", "lock", "unlink", "rename", "link", "fdatasync", "fsync", "stat")},
    "postgres": {psycopg.Connection: ("execute", "connect"), LockSession: ("ask", "send", "receive")},
}


def test_a_consumer_that_is_killed_at_any_step_loses_nothing(place: Any) -> None:
    calls = CALLS["log" if "://" not in place.name else "postgres"]
    for number in count():
        store = place.store()
        store.unsubscribe("mailer")
        if number == 0:
            store.append([Event("T"), Event("T"), Event("T")])

        def consume(say: Any, number: int = number) -> None:
            store = place.store()
            die_before_call(number, calls)
            for event in store.subscribe("mailer", timeout=0):
                say(str(event.position))

        code, lines = Child(consume).end()
        handled = [*map(int, lines), *rest(store)]
        assert sorted(set(handled)) == [1, 2, 3] and len(handled) <= 4
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert number > 8


# With a connection of the consumer.


def test_each_event_counts_once_in_the_database_of_the_consumer(place: Any, in_memory: Path) -> None:
    """SQLite. The consumer is killed at every step."""
    store = filled(place, 4)
    for number in count():
        path = str(in_memory / f"{number}.db")

        def consume(_: Any, number: int = number, path: str = path) -> None:
            connection = sqlite3.connect(path)
            connection.execute("create table if not exists handled (position int)")
            die_before_call(number, {Transaction: ("_execute", "_call")})
            for event in place.store().subscribe(f"totals {path}", connection=connection, timeout=0):
                connection.execute("insert into handled values (?)", [event.position])

        code, _ = Child(consume).end()
        until(lambda name=f"totals {path}": not store._engine.checkpoint(name).lock.status().held)
        assert Child(lambda _, consume=consume: consume(_, 1 << 30)).end()[0] == 0
        with sqlite3.connect(path) as connection:
            assert connection.execute("select position from handled").fetchall() == [(1,), (2,), (3,), (4,)]
        connection.close()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert number > 20


def test_a_copied_checkpoint_that_a_killed_consumer_left_behind_is_brought_up_to_date(place: Any) -> None:
    store = filled(place, 3)
    database = sqlite3.connect(":memory:")
    assert positions(store.subscribe("totals", connection=database, timeout=0)) == [1, 2, 3]
    store._engine.checkpoint("totals").save(1)  # as if it had been killed between its commit and the copy
    assert lag_of(store, "totals") == 2
    assert positions(store.subscribe("totals", connection=database, timeout=0)) == []
    assert lag_of(store, "totals") == 0


def test_each_event_counts_once_in_the_transaction_of_a_postgres_consumer(place: Any, postgres: str) -> None:
    """Two consumers of a name, killed again and again. The database need not be that of the store."""
    store = filled(place, 150)
    with psycopg.connect(postgres, autocommit=True) as looking:
        looking.execute("create table handled (position int)")

        def count_handled() -> int:
            return int(looking.execute("select count(*) from handled").fetchone()[0])  # type: ignore[index]

        def consume(_: Any) -> None:
            with psycopg.connect(postgres) as connection:
                for event in place.store().subscribe("totals", connection=connection, timeout=10):
                    connection.execute("insert into handled values (%s)", [event.position])

        for wanted in (1, 2, 20, 50, 51, 90, 140):
            children = [Child(consume), Child(consume)]
            until(lambda wanted=wanted: count_handled() >= wanted)
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                child.end()
        until(lambda: not store.subscriptions()[0].active)
        with psycopg.connect(postgres) as connection:
            for event in store.subscribe("totals", connection=connection, timeout=0):
                connection.execute("insert into handled values (%s)", [event.position])
        rows = looking.execute("select position from handled order by position").fetchall()
    assert [row[0] for row in rows] == list(range(1, 151)) and lag_of(store, "totals") == 0


@pytest.fixture(params=["sqlite", "psycopg"])
def database(request: pytest.FixtureRequest, in_memory: Path) -> Any:
    """Two connections to a database of a consumer, and its parameter mark."""
    if request.param == "sqlite":
        path = str(in_memory / "consumer.db")
        connections: list[Any] = [sqlite3.connect(path), sqlite3.connect(path, isolation_level=None)]
    else:
        url = request.getfixturevalue("postgres")
        connections = [psycopg.connect(url), psycopg.connect(url, autocommit=True)]
    connections[1].execute("create table handled (position int)")
    yield connections
    for connection in connections:
        connection.close()


def handled(database: Any) -> list[int]:
    return [row[0] for row in database[1].execute("select position from handled order by position").fetchall()]


def test_an_event_whose_transaction_is_rolled_back_comes_again(place: Any, database: Any) -> None:
    store, connection = filled(place, 3), database[0]
    seen = []
    for event in store.subscribe("totals", connection=connection, timeout=0):
        seen.append(event.position)
        connection.execute(f"insert into handled values ({event.position})")
        if len(seen) in (1, 3):
            connection.rollback()
            connection.execute("select * from handled").fetchall()
    assert seen == [1, 1, 2, 2, 3] and handled(database) == [1, 2, 3]


def test_an_event_whose_statement_failed_comes_again(place: Any, postgres: str) -> None:
    store = filled(place, 2)
    seen = []
    with psycopg.connect(postgres) as connection:
        for event in store.subscribe("totals", connection=connection, timeout=0):
            seen.append(event.position)
            if len(seen) == 1:
                with pytest.raises(psycopg.Error):
                    connection.execute("select no_such_column")
    assert seen == [1, 1, 2]


def test_the_consumer_may_commit_and_leave_the_loop_or_roll_back_and_leave_it(place: Any, database: Any) -> None:
    store, connection = filled(place, 3), database[0]
    for ends in (connection.rollback, connection.commit):
        with store.subscribe("totals", connection=connection) as events:
            event = next(events)
            connection.execute(f"insert into handled values ({event.position})")
            ends()
        assert event.position == 1
    for event in store.subscribe("totals", connection=connection, timeout=0):
        connection.execute(f"insert into handled values ({event.position})")
        connection.commit()
    assert handled(database) == [1, 2, 3]


def test_a_consumer_that_lost_its_turn_cannot_count_an_event_again(place: Any, database: Any) -> None:
    """Another process has handled the event meanwhile, and says so in the row."""
    store, connection = filled(place, 4), database[0]
    seen = []
    for event in store.subscribe("totals", connection=connection, timeout=0):
        seen.append(event.position)
        if event.position == 2:
            connection.commit()
            database[1].execute(f"update {TABLE} set position = 3")
    assert seen == [1, 2, 4]


def test_a_connection_that_cannot_carry_a_transaction_is_refused(place: Any, database: Any, postgres: str) -> None:
    store = filled(place, 1)
    with pytest.raises(ValueError, match="autocommit"):
        next(store.subscribe("totals", connection=database[1]))
    database[0].execute("insert into handled values (1)")
    with pytest.raises(ValueError, match="is in a transaction"):
        next(store.subscribe("totals", connection=database[0]))
    with pytest.raises(TypeError, match=r"psycopg\.Connection"):
        store.subscribe("totals", connection=object())
    assert handled(database) == [] and lag_of(store, "totals") == 1


# Tasks.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_tasks_subscribe_take_over_and_can_be_cancelled(backend: str, place: Any) -> None:
    store = filled(place, 3)
    seen: list[int] = []

    async def consume(name: str) -> None:
        async with store.subscribe(name) as events:
            async for event in events:
                seen.append(event.position)

    async def main() -> None:
        scopes = [anyio.CancelScope(), anyio.CancelScope()]

        async def cancellable(scope: anyio.CancelScope) -> None:
            with scope:
                await consume("mailer")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancellable, scopes[0])
            await auntil(lambda: seen == [1, 2, 3] and lag_of(store) == 0)
            tasks.start_soon(cancellable, scopes[1])
            await auntil(lambda: store.subscriptions()[0].waiting or "://" not in place.name)
            scopes[0].cancel()
            await store.aappend(Event("T"))
            await auntil(lambda: seen == [1, 2, 3, 4] and lag_of(store) == 0)
            scopes[1].cancel()
        # A cancelled task may have closed its connection. The server notices that a moment later.
        await auntil(lambda: not store.subscriptions()[0].active)

    anyio.run(main, backend=backend)


def test_a_cancelled_wait_for_an_event_loses_nothing(place: Any) -> None:
    store = filled(place, 2)

    async def main() -> None:
        async with store.subscribe("mailer") as events:
            assert (await anext(events)).position == 1
            assert (await anext(events)).position == 2
            for position in (3, 4):
                with anyio.move_on_after(0.05):
                    await anext(events)
                assert lag_of(store) == 0
                store.append(Event("T"))
                assert (await anext(events)).position == position
            await events.aacknowledge()
        assert lag_of(store) == 0

    anyio.run(main)


def test_tasks_use_an_asynchronous_connection(place: Any, postgres: str) -> None:
    store = filled(place, 3)

    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(postgres) as connection:
            await connection.execute("create table handled (position int)")
            await connection.commit()
            seen = []
            async for event in store.subscribe("totals", connection=connection, timeout=0):
                seen.append(event.position)
                await connection.execute("insert into handled values (%s)", [event.position])
                if len(seen) == 2:
                    await connection.rollback()
            assert seen == [1, 2, 2, 3]
            rows = await (await connection.execute("select position from handled")).fetchall()
            assert rows == [(1,), (2,), (3,)]
            with pytest.raises(TypeError, match="async for"):
                next(store.subscribe("totals", connection=connection))
        with sqlite3.connect(":memory:") as other, pytest.raises(TypeError, match="AsyncConnection"):
            await anext(store.subscribe("totals", connection=other))
        other.close()

    anyio.run(main)


# Looking after them.


def test_subscriptions_are_listed_and_removed(place: Any) -> None:
    store = filled(place, 5)
    assert store.subscriptions() == [] and not store.unsubscribe("mailer")
    positions(store.subscribe("a/ä ../x", timeout=0))
    other = place.store(lock_timeout=0)
    with store.subscribe("mailer") as events:
        next(events)
        found = {one.name: one for one in other.subscriptions()}
        assert [(one.checkpoint, one.head, one.lag, one.active) for one in found.values()] == [
            (5, 5, 0, False),
            (0, 5, 5, True),
        ]
        assert list(found) == ["a/ä ../x", "mailer"] and f"pid {os.getpid()}" in found["mailer"].holder
        in_child = Child(lambda _: other.unsubscribe("mailer"))
        assert in_child.end()[0] == 1 and len(store.subscriptions()) == 2
    assert store.unsubscribe("mailer") and len(store.subscriptions()) == 1
    assert positions(store.subscribe("mailer", after=3, timeout=0)) == [4, 5]


def test_a_name_that_cannot_be_one_is_refused(place: Any) -> None:
    store = filled(place, 1)
    for name in ("", "x" * 2000):
        with pytest.raises(UnsafePath, match="cannot be the name"):
            store.subscribe(name)
    with pytest.raises(TypeError, match="a query is made with"):
        store.subscribe("mailer", "T")  # type: ignore[arg-type]


def test_a_copy_goes_on_where_the_source_is(place: Any, tmp_path: Path) -> None:
    store = filled(place, 4)
    copy = EventStore(tmp_path / "copy")
    for after in (2, 3):
        store.unsubscribe("mailer")
        with store.subscribe("mailer", after=after) as events:
            next(events)
        store.copy_to(copy)
        assert copy.subscriptions()[0].checkpoint == after
    assert positions(copy.subscribe("mailer", timeout=0)) == [4]
    store.copy_to(copy)
    assert copy.subscriptions()[0].checkpoint == 4  # which is ahead of the source


def test_a_store_that_ends_before_the_checkpoint_is_reported(place: Any) -> None:
    """It was brought back from an older copy."""
    store = filled(place, 2)
    with pytest.raises(ValueError, match="after=9 is no position"):
        next(store.subscribe("mailer", after=9))
    positions(store.subscribe("mailer", timeout=0))
    store._engine.checkpoint("mailer").save(9)
    with pytest.raises(CorruptStore, match="ends with 2: was it brought back from a copy"):
        next(store.subscribe("mailer"))
    assert store.unsubscribe("mailer") and positions(store.subscribe("mailer", after=1, timeout=0)) == [2]


# The log.


def test_a_backup_has_the_checkpoints(in_memory: Path) -> None:
    store = EventStore(in_memory / "shop")
    store.append([Event("T"), Event("T")])
    with store.subscribe("mailer") as events:
        next(events), next(events)
    store.backup(in_memory / "backup")
    assert positions(EventStore(in_memory / "backup").subscribe("mailer", timeout=0)) == [2]


@pytest.mark.parametrize("content", [b"", b'{"position":                   1,"sum":"00000000"}\n', b"\0" * 54])
def test_a_damaged_checkpoint_is_reported_and_can_be_replaced(content: bytes, in_memory: Path) -> None:
    store = EventStore(in_memory / "shop")
    store.append([Event("T"), Event("T")])
    positions(store.subscribe("mailer", timeout=0))
    (in_memory / "shop/subscriptions/mailer.json").write_bytes(content)
    for ask in (store.subscriptions, lambda: next(store.subscribe("mailer"))):
        with pytest.raises(CorruptStore, match=r"mailer\.json is damaged"):
            ask()
    assert store.unsubscribe("mailer") and positions(store.subscribe("mailer", after=1, timeout=0)) == [2]


def test_an_event_that_is_damaged_stops_the_consumer_behind_the_good_ones(in_memory: Path) -> None:
    store = EventStore(in_memory / "shop", segment_size=1)
    for number in range(4):
        store.append(Event("T", number))
    path = in_memory / "shop/events/0000000003.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"data":2', b'"data":7'))
    seen = []
    events = (seen.append(event.position) for event in store.subscribe("mailer"))
    with pytest.raises(CorruptStore, match=r"0000000003"):
        list(events)
    assert seen == [1, 2] and store.subscriptions()[0].checkpoint == 2


# PostgreSQL.


def test_a_consumer_goes_on_after_a_restart_of_the_server(postgres: str, postgres_server: servers.Postgres) -> None:
    store = EventStore(postgres, lock_timeout=60)
    store.append([Event("T"), Event("T")])
    with store.subscribe("mailer") as events:
        assert next(events).position == 1
        postgres_server.kill()
        postgres_server.restart()
        position = next(events).position
        assert position == 2 or (position, next(events).position) == (1, 2)
        store.append(Event("T"))
        until(lambda: next(events).position == 3)
