"""Events in PostgreSQL: plans, transactions of the caller, lost connections, late commits, forks, and what is refused.

What every engine must do is in the conformance suite. These tests are about a server and many connections.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
import pytest
import servers
from support import Child, Peer, auntil, begin_together, in_child, until, until_asleep

import holdfast
from holdfast import ConnectionFailed, Unsupported
from holdfast.errors import CorruptStore
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query, QueryItem
from holdfast.events import postgres_statements as statements
from holdfast.events.postgres import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALL = Query.all()
BOTH = Query.of(types={"Paid"}, tags={"shop:1"})
PREFIX = "holdfast_"


@pytest.fixture
def store(postgres: str) -> Iterator[EventStore]:
    with EventStore(postgres) as store:
        yield store


@pytest.fixture
def sql(postgres: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of another program."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        yield connection


def datas(store: EventStore) -> list[Any]:
    events = list(store.read())
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    return [event.data for event in events]


# Plans. The tables are filled by SQL and not analyzed.

FILL = """
insert into holdfast_event select n, md5(n::text), now(), case when n <= {half} then 'Placed' else 'Paid' end,
    array['shop:' || case when n % 2 = 0 then 1 else 2 end, 'order:' || n], 'null', '{{}}', n, n, 0
    from generate_series(1, {number}) n;
insert into holdfast_event_term (tag, type, position) {terms};
update holdfast_event_store set head = {number};
"""
NUMBER = 40_000


def fill(sql: psycopg.Connection[Any], number: int = NUMBER, half: int = NUMBER // 2) -> None:
    terms = statements._TERMS.format(new="holdfast_event")
    with sql.transaction():
        sql.execute(FILL.format(number=number, half=half, terms=terms))


QUERIES = {
    "a type": Query.of(types={"Paid"}),
    "a tag": Query.of(tags={"shop:1"}),
    "a type and a tag": BOTH,
    "two tags": Query.of(tags={"shop:1", "order:20"}),
    "types and two tags": Query.of(types={"Paid", "Placed"}, tags={"shop:1", "order:20"}),
    "two items": BOTH | Query.of(types={"Paid"}, tags={"shop:1", "order:30000"}),
}


def plan(sql: psycopg.Connection[Any], statement: tuple[str, Any]) -> str:
    """With what it did. The statement is prepared, as psycopg does it: the plan is made before the values are known."""
    text, values = statement
    used = [name for name in values if f"%({name})s" in text]
    for number, name in enumerate(used, 1):
        text = text.replace(f"%({name})s", f"${number}")
    sql.execute("prepare looked as " + text.replace("%%", "%"))
    marks = ", ".join(["%s"] * len(used))
    explain = f"explain (analyze, costs off, timing off, buffers off) execute looked ({marks})"
    rows = psycopg.ClientCursor(sql).execute(explain, [values[name] for name in used]).fetchall()
    sql.execute("deallocate looked")
    return "\n".join(line for (line,) in rows)


@pytest.mark.parametrize("analyzed", [False, True])
def test_queries_are_index_scans(analyzed: bool, store: EventStore, sql: psycopg.Connection[Any]) -> None:
    fill(sql)
    if analyzed:
        sql.execute("analyze")
    sql.execute(SETTINGS)
    for name, query in QUERIES.items():
        found = [plan(sql, statements.last_match(PREFIX, query, 0))]
        for backwards in (False, True):
            found.append(plan(sql, statements.page(PREFIX, query, 0, NUMBER, 32, backwards=backwards)))
        alone = statements.append_alone(PREFIX, store.id, "channel", "[]", [(query, 0)], 0)
        found.append(plan(sql, alone))
        for text in found:
            assert "Seq Scan" not in text, (name, text)
            assert "using holdfast_event_term_pkey" in text, (name, text)
            assert max(map(int, re.findall(r"rows=(\d+)", text))) <= 200, f"{name} reads more than a page:\n{text}"
    for backwards in (False, True):
        text = plan(sql, statements.page(PREFIX, ALL, 5, NUMBER, 32, backwards=backwards))
        assert "holdfast_event_pkey" in text and "Seq Scan" not in text


def steps(text: str) -> int:
    """How many positions the index was asked for: by all scans of it together."""
    found = re.findall(r"using holdfast_event_term_pkey.*\(actual rows=(\d+) loops=(\d+)\)", text)
    assert found, text
    return sum(max(1, int(rows)) * int(loops) for rows, loops in found)


def test_a_condition_on_a_frequent_type_and_a_frequent_tag_takes_a_few_steps(
    store: EventStore, sql: psycopg.Connection[Any]
) -> None:
    """All events of one type are before all of the other type, and each half of the events has the tag."""
    fill(sql)
    sql.execute(SETTINGS)
    placed = Query.of(types={"Placed"}, tags={"shop:1"})
    assert steps(plan(sql, statements.last_match(PREFIX, placed, 0))) == 1
    assert steps(plan(sql, statements.last_match(PREFIX, placed, NUMBER // 2))) == 1
    rare = Query.of(types={"Placed"}, tags={"shop:1", "order:20"})
    assert steps(plan(sql, statements.last_match(PREFIX, rare, 0))) <= 4, "the rarest tag leads"
    with pytest.raises(ConditionFailed) as caught:
        store.append([], AppendCondition(placed))
    assert caught.value.position == NUMBER // 2
    assert store.append(Event("Paid"), AppendCondition(placed, after=NUMBER // 2)) == NUMBER + 1


def test_pages_of_many_terms_are_complete_and_in_order(store: EventStore, sql: psycopg.Connection[Any]) -> None:
    """Terms of very different length, of which each page takes a part."""
    fill(sql, 3000, 1000)
    items = [QueryItem(frozenset({"Paid"}), frozenset({"shop:1"})), QueryItem(tags=frozenset({"order:7"}))]
    items += [QueryItem(tags=frozenset({"shop:2", f"order:{n}"})) for n in (3, 1999, 2001)]
    items += [QueryItem(frozenset({"Placed", "Paid"}), frozenset({"shop:2", f"order:{n}"})) for n in (5, 2, 2003)]
    query = Query(tuple(items))
    wanted = [event.position for event in store.read() if query.matches(event)]
    assert len(wanted) == 1000 + 6
    assert [event.position for event in store.read(query)] == wanted
    assert [event.position for event in store.read(query, backwards=True)] == wanted[::-1]
    assert [event.position for event in store.read(query, after=1998, limit=3)] == [1999, 2000, 2001]


# The transaction of the caller.


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("commits", [False, True])
def test_an_append_is_there_if_and_only_if_the_caller_commits(
    autocommit: bool, commits: bool, postgres: str, store: EventStore
) -> None:
    store.append(Event("T", 0))
    with psycopg.connect(postgres, autocommit=autocommit) as connection:
        connection.execute("create table orders (n integer)")
        connection.commit()
        with connection.transaction(force_rollback=not commits):
            connection.execute("insert into orders values (1)")
            assert store.append([Event("T", 1), Event("T", 2)], connection=connection) == 3
            assert store.append(Event("T", 3), AppendCondition(ALL, after=3), connection=connection) == 4
            assert store.head() == 1, "nobody sees it before the commit"
    assert datas(store) == ([0, 1, 2, 3] if commits else [0])
    assert store.append(Event("T")) == (5 if commits else 2)
    assert store.verify().ok


def test_a_condition_sees_the_events_of_the_callers_own_transaction(postgres: str, store: EventStore) -> None:
    """A condition that fails leaves the transaction of the caller as it was."""
    with psycopg.connect(postgres) as connection:
        connection.execute("set local lock_timeout = '77s'")
        store.append(Event("Paid", tags={"shop:1"}), connection=connection)
        with pytest.raises(ConditionFailed) as caught:
            store.append(Event("T"), AppendCondition(BOTH), connection=connection)
        assert caught.value.position == 1
        assert store.append(Event("T"), AppendCondition(BOTH, after=1), connection=connection) == 2
        assert connection.execute("show lock_timeout").fetchone() == ("77s",)
    assert store.head() == 2


def test_other_appenders_wait_until_the_caller_commits(postgres: str, store: EventStore) -> None:
    """And the error of one that does not wait so long names the holder."""
    other = EventStore(postgres, lock_timeout=0)
    results: list[int] = []
    with psycopg.connect(postgres, application_name="the shop") as connection:
        store.append(Event("T"), connection=connection)
        with pytest.raises(holdfast.Timeout, match=r"the shop \(backend \d+\) holds it, .*waits for its program"):
            other.append(Event("T"))
        with psycopg.connect(postgres) as second:
            second.execute("select 1")
            with pytest.raises(holdfast.Timeout, match="the shop"):
                other.append(Event("T"), connection=second)
            assert second.execute("select 1").fetchone() == (1,), "its transaction goes on"
        waiting = threading.Thread(target=lambda: results.append(EventStore(postgres).append(Event("T"))))
        waiting.start()
        query = "select 1 from pg_locks where not granted"
        with psycopg.connect(postgres, autocommit=True) as looking:
            until(lambda: looking.execute(query).fetchone())
        connection.commit()
        waiting.join(60)
    assert results == [2]


def test_a_snapshot_that_is_too_old_cannot_append(postgres: str, store: EventStore) -> None:
    """With "repeatable read" the condition would not see what was appended since."""
    with psycopg.connect(postgres) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("select count(*) from holdfast_event")
        store.append(Event("Paid", tags={"shop:1"}))
        with pytest.raises(psycopg.errors.SerializationFailure):
            store.append(Event("Paid", tags={"shop:1"}), AppendCondition(BOTH), connection=connection)
    assert store.head() == 1


def test_an_asynchronous_connection_is_joined_by_aappend(postgres: str, store: EventStore) -> None:
    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(postgres) as connection:
            assert await store.aappend(Event("Paid", 1, {"shop:1"}), connection=connection) == 1
            with pytest.raises(ConditionFailed):
                await store.aappend(Event("T"), AppendCondition(BOTH), connection=connection)
            assert await store.ahead() == 0
            await connection.commit()
            await store.aappend(Event("T", 2), connection=connection)
            await connection.rollback()
            with pytest.raises(TypeError, match=r"psycopg\.AsyncConnection"):
                await store.aappend(Event("T"), connection=object())

    anyio.run(work)
    assert datas(store) == [1]
    with pytest.raises(TypeError, match=r"psycopg\.Connection"):
        store.append(Event("T"), connection=object())


def test_only_postgresql_has_a_connection_to_join(tmp_path: Any) -> None:
    store = EventStore(tmp_path / "shop")
    with pytest.raises(Unsupported, match="needs an event store in PostgreSQL"):
        store.append(Event("T"), connection=object())


# Commits that come late, and readers that follow.

APPEND_SLOWLY = """
import psycopg
from holdfast.events import Event, EventStore

def append_slowly():
    store = EventStore(url, lock_timeout=60)
    positions = []
    with psycopg.connect(url) as connection:
        for number in range(part):
            if number % 3:
                positions.append(store.append([Event("T", name)] * (1 + number % 2)))
            else:
                positions.append(store.append(Event("T", name), connection=connection))
                connection.execute("select pg_sleep(0.003)")
                connection.commit()
    return positions
"""
FOLLOW = """
from holdfast.events import Event, EventStore, Query

def follow():
    found = []
    for event in EventStore(url).follow(Query.of(types={"T", "Last"}) if tagged else Query.all()):
        found.append(event.position)
        if event.type == "Last":
            return found
"""


def test_a_follower_misses_no_event_of_a_late_commit(
    postgres: str, store: EventStore, start_peer: Callable[..., Peer]
) -> None:
    """Eight writers, many of whose transactions stay open for a while after their events have positions."""
    writers = [start_peer(url=postgres, part=40, name=name) for name in range(8)]
    readers = [start_peer(url=postgres, tagged=tagged) for tagged in (False, True)]
    for peer, code in [*((peer, APPEND_SLOWLY) for peer in writers), *((peer, FOLLOW) for peer in readers)]:
        peer.do(code)
    for reader in readers:
        reader.begin("follow()")
    begin_together(writers, "append_slowly()")
    last = sorted(position for writer in writers for position in writer.answer(100))
    assert len(last) == len(set(last)) == 320
    end = store.append(Event("Last"))
    for reader in readers:
        assert reader.answer(60) == list(range(1, end + 1))


def test_of_sixteen_racers_one_wins_each_condition(
    postgres: str, store: EventStore, start_peer: Callable[..., Peer]
) -> None:
    """Half of the sixteen append in transactions of their own, which stay open for a while."""
    code = """
import psycopg
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query

store, connection = EventStore(url, lock_timeout=60), psycopg.connect(url)
store.head()

def race():
    won = 0
    with connection:
        for number in range(60):
            condition = AppendCondition(Query.of(types={"Won"}, tags={"race:%d" % number}))
            event = Event("Won", name, {"race:%d" % number})
            try:
                if name % 2:
                    store.append(event, condition)
                else:
                    store.append(event, condition, connection=connection)
                    connection.execute("select pg_sleep(0.002)")
                won += 1
            except ConditionFailed:
                pass
            connection.commit()
    return won
"""
    peers = [start_peer(url=postgres, name=name) for name in range(16)]
    for peer in peers:
        peer.do(code)
    begin_together(peers, "race()")
    assert sum(peer.answer(100) for peer in peers) == 60 == store.head()


def test_threads_share_a_transaction(store: EventStore, sql: psycopg.Connection[Any]) -> None:
    """While one waits for the lock of another transaction, seven more come. They are committed with one mark."""
    with psycopg.connect(store._given) as holder:
        store.append(Event("First"), connection=holder)
        threads = [threading.Thread(target=store.append, args=[Event("T", n)]) for n in range(8)]
        threads[0].start()
        until(lambda: sql.execute(WAITING).fetchone())
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(store._engine.appender.queue.waiting) == 7)  # type: ignore[attr-defined]
        holder.commit()
    for thread in threads:
        thread.join(60)
    assert sorted(data for data in datas(store)[1:]) == list(range(8))
    assert sql.execute("select count(distinct mark) from holdfast_event where position > 1").fetchone() == (2,)


# Killed at every step. A trigger stops the append there, until the test has killed it.

STOP = """
create function stop() returns trigger language plpgsql as $$ begin
    perform pg_advisory_xact_lock_shared(1);
    return null;
end $$;
"""
STEPS = {
    "the insert of the events": "create trigger stop after insert on holdfast_event for each statement",
    "the insert of the terms": "create trigger stop after insert on holdfast_event_term for each statement",
    "the update of the head": "create trigger stop after update on holdfast_event_store for each statement",
    "the commit": "create constraint trigger stop after insert on holdfast_event deferrable initially deferred"
    " for each row",
}
WAITING = "select pid from pg_locks where not granted"


@pytest.fixture
def holder(postgres: str) -> Iterator[psycopg.Connection[Any]]:
    """Holds the lock that stops an append."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        yield connection


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def stop_at(step: str, sql: psycopg.Connection[Any], holder: psycopg.Connection[Any]) -> None:
    sql.execute(STOP)
    sql.execute(f"{STEPS[step]} execute function stop()")
    holder.execute("select pg_advisory_lock(1)")


@pytest.mark.parametrize("step", STEPS)
def test_a_backend_that_is_killed_at_any_step_appends_whole_and_once(
    step: str, store: EventStore, sql: psycopg.Connection[Any], holder: psycopg.Connection[Any]
) -> None:
    store.append(Event("T", 0))
    stop_at(step, sql, holder)
    thread, results = in_thread(lambda: store.append([Event("T", 1, {"a"}), Event("T", 2)], AppendCondition(BOTH)))
    until(lambda: sql.execute(WAITING).fetchone())
    ended = sql.execute("select pg_terminate_backend(pid, 30000) from pg_locks where not granted").fetchall()
    assert ended == [(True,)]
    assert store.head() == 1, "nothing of it is there"
    holder.execute("select pg_advisory_unlock(1)")
    thread.join(60)
    assert results == [3] and datas(store) == [0, 1, 2]
    assert store.verify().ok


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_is_killed_at_any_step_appends_whole_or_not_at_all(
    step: str, comes_back: bool, postgres: str, postgres_server: servers.Postgres, sql: Any, holder: Any
) -> None:
    # The timeout is also that of the lock that stops the append, until the server is killed.
    store = EventStore(postgres, lock_timeout=60 if comes_back else 2.0)
    store.append(Event("T", 0))
    stop_at(step, sql, holder)
    thread, results = in_thread(lambda: store.append([Event("T", 1, {"a"}), Event("T", 2)]))
    until(lambda: sql.execute(WAITING).fetchone())
    postgres_server.kill()
    if not comes_back:
        thread.join(60)
    postgres_server.restart()
    thread.join(60)
    if comes_back:
        assert results == [3]
    else:
        assert isinstance(results[0], ConnectionFailed)
        assert ("not known" in str(results[0])) != ("Nothing was appended." in str(results[0]))
    assert datas(store) == ([0, 1, 2] if comes_back else [0])
    assert store.verify().ok


@pytest.fixture
def proxy(postgres: str, postgres_server: servers.Postgres) -> Iterator[tuple[servers.Proxy, EventStore]]:
    proxy = servers.Proxy(postgres_server.port)
    with EventStore(postgres.replace(f":{postgres_server.port}/", f":{proxy.port}/")) as store:
        yield proxy, store
    proxy.close()


SYNC = b"S\0\0\0\4"  # the end of a pipeline, which commits what has no begin


@pytest.mark.parametrize("message", [b"for no key update", b"json_populate_recordset", SYNC])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_append_whose_connection_is_cut_happens_once(
    message: bytes, when: str, proxy: tuple[servers.Proxy, EventStore]
) -> None:
    wire, store = proxy
    store.append(Event("T", 0))
    for number in (1, 2):
        wire.cut = message, when
        condition = AppendCondition(Query.of(tags={f"n:{number}"}))
        assert store.append(Event("T", number, {f"n:{number}"}), condition) == 1 + number
        assert wire.cuts == number
    assert datas(store) == [0, 1, 2]


@pytest.mark.parametrize("message", [b"for no key update", b"mark = ", b"rollback"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_append_whose_next_connection_is_cut_too_happens_once(
    message: bytes, when: str, proxy: tuple[servers.Proxy, EventStore]
) -> None:
    """The first connection is lost after the commit, and the second one while it looks what became of it."""
    wire, store = proxy
    store.append(Event("T", 0))
    wire.cut, wire.then = (SYNC, "after"), (message, when)
    assert store.append(Event("T", 1, {"n:1"}), AppendCondition(Query.of(tags={"n:1"}))) == 2
    assert wire.cuts == 2
    assert store.append(Event("T", 2)) == 3
    assert datas(store) == [0, 1, 2]


@pytest.mark.parametrize("message", [b"begin", b"for no key update", b"json_populate_recordset", b"commit"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_append_of_a_task_whose_connection_is_cut_happens_once(
    message: bytes, when: str, proxy: tuple[servers.Proxy, EventStore]
) -> None:
    """Because it can be cancelled while it waits for the lock, it takes two round trips."""
    wire, store = proxy

    async def main() -> None:
        await store.aappend(Event("T", 0))
        for number in (1, 2):
            wire.cut = message, when
            condition = AppendCondition(Query.of(tags={f"n:{number}"}))
            assert await store.aappend(Event("T", number, {f"n:{number}"}), condition) == 1 + number
            assert wire.cuts == number

    anyio.run(main)
    assert datas(store) == [0, 1, 2]


def test_what_became_of_a_commit_is_not_known_if_no_connection_can_be_had(
    proxy: tuple[servers.Proxy, EventStore], postgres: str
) -> None:
    wire, _ = proxy
    store = EventStore(postgres.rpartition(":")[0] + f":{wire.port}/" + postgres.rpartition("/")[2], lock_timeout=0.1)
    wire.cut = SYNC, "after"
    wire.close()
    with pytest.raises(ConnectionFailed, match=r"not known whether the events were appended.*they are behind event 0"):
        store.append(Event("T", 1))
    assert wire.cuts == 1 and datas(EventStore(postgres)) == [1], "this time they were"


def test_an_append_whose_commit_the_server_refuses_appends_nothing(store: EventStore, sql: Any) -> None:
    sql.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin raise 'not today'; end $$;"
        " create constraint trigger refuse after insert on holdfast_event deferrable initially deferred"
        " for each row execute function refuse()"
    )
    with pytest.raises(psycopg.errors.RaiseException, match="not today"):
        store.append(Event("T", 1))
    sql.execute("drop trigger refuse on holdfast_event")
    assert datas(store) == []
    assert store.append(Event("T", 2)) == 1 and datas(store) == [2]


def test_an_append_whose_condition_is_one_search_takes_one_round_trip(
    proxy: tuple[servers.Proxy, EventStore],
) -> None:
    """Also if its condition does not hold."""
    wire, store = proxy
    store.append([Event("T", 0, {"a", "b"})] * 100)
    fast, slow = Query.of(types={"T"}, tags={"a"}), Query.of(types={"T"}, tags={"a", "b"})
    before = wire.counted(SYNC)
    assert store.append(Event("T", 1), AppendCondition(Query.of(tags={"c"}))) == 101
    assert wire.counted(SYNC) == before + 1
    with pytest.raises(ConditionFailed, match="event 100 matches"):
        store.append(Event("T", 1), AppendCondition(fast))
    assert wire.counted(SYNC) == before + 2
    with pytest.raises(ConditionFailed, match="event 100 matches"):
        store.append(Event("T", 1), AppendCondition(slow))


def test_an_append_of_a_task_under_a_condition_takes_two_round_trips(proxy: tuple[servers.Proxy, EventStore]) -> None:
    wire, store = proxy
    store.append([Event("T", 0, {"a", "b"})] * 100)
    before = wire.counted(SYNC)

    async def main() -> None:
        assert await store.aappend(Event("T", 1), AppendCondition(Query.of(tags={"c"}))) == 101

    anyio.run(main)
    assert wire.counted(SYNC) == before + 2


# Servers that are away, restarted, or read-only.


def test_a_server_that_is_away_is_an_error_within_the_timeout(postgres: str, postgres_server: servers.Postgres) -> None:
    store = EventStore(postgres, lock_timeout=0.2)
    store.append([Event("T", 0)] * 60)  # so that a condition is checked before the lock
    postgres_server.shut_down()
    for condition in (None, AppendCondition(Query.of(tags={"a", "b"}))):
        with pytest.raises(ConnectionFailed, match="Nothing was appended") as caught:
            store.append(Event("T", 1), condition)
        assert servers.PASSWORD not in str(caught.value)
    for work in (store.head, lambda: list(store.read()), lambda: list(store.follow()), lambda: EventStore(postgres)):
        with pytest.raises(ConnectionFailed, match="Cannot connect"):
            work()
    postgres_server.restart()
    assert store.append(Event("T", 1)) == 61 and datas(store) == [0] * 60 + [1]


def test_a_wrong_password_is_refused_and_not_shown(postgres: str) -> None:
    with pytest.raises(ConnectionFailed, match="Check the user name and the password") as caught:
        EventStore(postgres.replace(servers.PASSWORD, "wrong-one"))
    assert "wrong-one" not in str(caught.value)


def test_a_server_that_is_read_only_can_be_read(postgres: str, store: EventStore, sql: Any) -> None:
    store.append(Event("T", 0))
    sql.execute(f"alter database {sql.info.dbname} set default_transaction_read_only = on")
    there = EventStore(postgres)
    with pytest.raises(ConnectionFailed, match=r"read-only. Connect to the primary server.*Nothing was appended"):
        there.append(Event("T", 1))
    assert datas(there) == [0]
    with pytest.raises(ConnectionFailed, match="read-only"):
        EventStore(postgres + "?prefix=new_")


def test_a_follower_goes_on_after_a_restart(
    postgres: str, postgres_server: servers.Postgres, store: EventStore
) -> None:
    """Its session listens again, and looks for what was appended meanwhile."""
    found: list[Any] = []
    following = EventStore(postgres)
    events = following.follow()
    store.append(Event("T", 0))
    assert next(events).data == 0
    thread, _ = in_thread(lambda: found.extend([next(events).data, next(events).data]))
    with postgres_server.connect("postgres") as looking:
        until(lambda: looking.execute("select 1 from pg_stat_activity where query like 'listen %'").fetchone())
    listener = following._engine.here().listener  # type: ignore[attr-defined]
    connect, may_connect = listener._connect, threading.Event()
    listener._connect = lambda: may_connect.wait(60) and connect()
    postgres_server.shut_down()
    postgres_server.restart()
    for number in (1, 2):  # nobody listens
        store.append(Event("T", number))
    may_connect.set()
    thread.join(60)
    assert found == [1, 2]


def test_a_follower_sleeps_while_no_event_comes(postgres: str, store: EventStore, start_peer: Any) -> None:
    peer = start_peer(url=postgres, tagged=False)
    peer.do(FOLLOW)
    peer.begin("follow()")
    until_asleep([peer.pid])
    assert store.append(Event("Last")) == 1
    assert peer.answer() == [1]


def test_the_session_that_listens_is_closed_without_a_follower(
    store: EventStore, sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.events import postgres_listener

    monkeypatch.setattr(postgres_listener, "LINGER_S", 0.05)
    for _ in range(2):
        store.append(Event("T"))
        assert len(list(store.follow(timeout=0.05))) == store.head()
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "holdfast listener"])
        until(lambda: not sql.execute("select 1 from pg_stat_activity where query like 'listen %'").fetchone())


def test_tasks_follow_too(store: EventStore) -> None:
    """Several in one process, on one session."""

    async def follow(found: list[int]) -> None:
        async for event in store.tail():
            found.append(event.position)

    async def work() -> None:
        lists: list[list[int]] = [[] for _ in range(5)]
        async with anyio.create_task_group() as group:
            for found in lists:
                group.start_soon(follow, found)
            for number in range(1, 4):
                await store.aappend(Event("T"))
                await auntil(lambda number=number: lists == [list(range(1, number + 1))] * 5)
            group.cancel_scope.cancel()

    anyio.run(work)


# Forks, and what one process has open.


def test_a_forked_child_appends_and_leaves_the_sessions_of_its_parent_alone(store: EventStore) -> None:
    store.append(Event("T", 0))
    backends = [session.pid for session in store._engine.here().pool._free]  # type: ignore[attr-defined]
    assert backends
    children = [Child(lambda _: store.append(Event("T", 1)) and store.close()) for _ in range(3)]
    assert [child.end()[0] for child in children] == [0] * 3
    assert in_child(store.head) == 4
    assert store.append(Event("T", 2)) == 5
    assert [session.pid for session in store._engine.here().pool._free] == backends  # type: ignore[attr-defined]


def test_a_fork_while_another_thread_waits_for_the_lock(postgres: str, store: EventStore, sql: Any) -> None:
    with psycopg.connect(postgres) as connection:
        store.append(Event("T", 0), connection=connection)
        thread, results = in_thread(lambda: store.append(Event("T", 1)))
        until(lambda: sql.execute(WAITING).fetchone())
        assert in_child(store.head) == 0
        assert in_child(lambda: EventStore(postgres, lock_timeout=0).append(Event("T"))) == "Timeout"
        connection.commit()
    thread.join(60)
    assert results == [2] and datas(store) == [0, 1]


def test_without_durable_the_commit_does_not_wait_for_the_disk(postgres: str, sql: Any) -> None:
    found = []
    for durable in (True, False):
        store = EventStore(postgres, durable=durable)
        if durable:
            sql.execute(
                "create table seen (value text); create function see() returns trigger language plpgsql as $$ begin"
                " insert into seen values (current_setting('synchronous_commit')); return null; end $$;"
                " create trigger see after insert on holdfast_event for each statement execute function see()"
            )
        store.append(Event("T"))
        found = [value for (value,) in sql.execute("select value from seen").fetchall()]
    assert found == ["on", "off"]


# Verify and rebuild, and what is refused.

DAMAGE = {
    "delete from holdfast_event where position = 2": [
        "the counter is 4",
        "missing",
        "was appended together",
        "no event",
    ],
    "update holdfast_event_store set head = 9": ["the counter is 9"],
    "delete from holdfast_event where position = 4": ["the counter is 4, the positions go from 1 to 3", "no event"],
    "delete from holdfast_event_term where position = 3 and tag = 'b'": ["is missing: rebuild it"],
    "insert into holdfast_event_term values ('x', 'T', 1)": ["belongs to no event"],
    "update holdfast_event set data = '{' where position = 1": ["the data of event 1 is damaged"],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds_damage(damage: str, store: EventStore, sql: Any) -> None:
    store.append([Event("T", n, {"a", "b"}) for n in range(3)])
    store.append(Event("T"))
    assert store.verify().ok and store.verify().events == 4
    sql.execute(damage)
    text = " ".join(map(str, store.verify().problems))
    for words in DAMAGE[damage]:
        assert words in text
    if "_term" in damage:
        store.rebuild_index()
        assert store.verify().ok


UNSTORABLE = [Event("T\0"), Event("T", tags={"a" * 1001}), Event("T", tags={"\0"}), Event("ä" * 501)]


@pytest.mark.parametrize("event", UNSTORABLE)
def test_an_event_that_the_tables_cannot_contain_is_refused(event: Event, store: EventStore) -> None:
    with pytest.raises(ValueError, match="PostgreSQL"):
        store.append([Event("Good"), event])
    assert store.head() == 0
    longest = Event("T" * 1000, "\0 ä", {os.urandom(500).hex()}, {"n": "\0"}, id="x" * 1000)
    assert store.append(longest) == 1
    (stored,) = store.read(Query.of({longest.type}, longest.tags))
    assert (stored.data, stored.metadata, stored.id) == (longest.data, longest.metadata, longest.id)


def test_stores_with_different_prefixes_share_a_database(postgres: str, store: EventStore) -> None:
    other = EventStore(postgres + "?prefix=other_")
    store.append(Event("T", 1))
    assert other.head() == 0 and other.id != store.id == EventStore(postgres).id
    with pytest.raises(ValueError, match="not a plain name"):
        EventStore(postgres + "?prefix=Bad-One")


def test_processes_that_open_a_new_database_at_once_make_one_store(postgres: str, start_peer: Any) -> None:
    peers = [start_peer(url=postgres) for _ in range(6)]
    for peer in peers:
        peer.do("from holdfast.events import EventStore")
    begin_together(peers, "EventStore(url).id")
    assert len({peer.answer() for peer in peers}) == 1


def test_tables_of_another_program_or_another_format_are_left_alone(postgres: str, sql: Any) -> None:
    sql.execute("create table holdfast_event (n integer)")
    with pytest.raises(CorruptStore, match="are not an event store of Holdfast"):
        EventStore(postgres)
    EventStore(postgres + "?prefix=new_")
    sql.execute("update new_event_store set version = 2")
    with pytest.raises(Unsupported, match="format 2, and this version of Holdfast knows 1"):
        EventStore(postgres + "?prefix=new_")


def test_tables_that_were_made_again_are_another_store(postgres: str, store: EventStore, sql: Any) -> None:
    tables = ("event", "event_store", "event_term", "event_document", "event_subscription")
    sql.execute(f"drop table {', '.join(f'holdfast_{table}' for table in tables)}")
    with pytest.raises(CorruptStore, match="were deleted"):
        store.append(Event("T"))
    EventStore(postgres).append(Event("T"))
    with pytest.raises(CorruptStore, match="another store is in these tables"):
        store.append(Event("T"))
