"""Tasks in PostgreSQL: lost connections, restarts, transactions that meet, forks, and what is refused.

What every engine must do is in the conformance suite. These tests are about a server and many connections.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import servers
from support import PATIENCE, Peer, begin_together, until

from holdfast import ConnectionFailed, Unsupported
from holdfast.errors import CorruptStore
from holdfast.postgres import MAX_SILENCE
from holdfast.tasks import TaskQueue, claimer, sql
from holdfast.tasks import postgres as engine
from holdfast.tasks.claimer import Claimer
from holdfast.tasks.policy import Retries
from holdfast.tasks.postgres import VERSION, PostgresStore
from holdfast.tasks.server import MAX_SESSIONS
from holdfast.tasks.store import OPEN, Attempt, Ending, NewTask, Selection, Woken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.tasks.reading import Transaction


@pytest.fixture
def store(postgres: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres)
    yield store
    store.close()


def tasks(number: int) -> list[NewTask]:
    return [NewTask("{}") for _ in range(number)]


def done(attempts: list[Attempt]) -> list[Ending]:
    return [Ending(attempt.id, attempt.token, "done") for attempt in attempts]


def count(store: PostgresStore) -> dict[str, int]:
    return {state: number for state, number in store.count().items() if number}


# Lost connections.

CLAIM_ALL = """
from holdfast.tasks.postgres import PostgresStore
from holdfast.tasks.store import Ending

store = PostgresStore(url)
worker = store.register()

def claim_all():
    settled = []
    while store.count()["done"] < number:
        attempts = store.claim(worker, 3, reserve=True, idle=True)
        ended = store.settle([Ending(attempt.id, attempt.token, "done") for attempt in attempts])
        settled += [attempt.id for attempt, ok in zip(attempts, ended, strict=True) if ok]
        if not attempts:
            store.settle([Ending(orphan.id, orphan.token, "delayed") for orphan in store.orphans()])
            store.wait(worker, 0.1)
    worker.close()
    store.close()
    return settled
"""


def run_claimers(
    start_peer: Callable[..., Peer], url: str, store: PostgresStore, number: int, disturb: Callable[[], object]
) -> None:
    """Four processes work on tasks, while `disturb` is called again and again. Each task must be done exactly once."""
    peers = [start_peer(url=url, number=number) for _ in range(4)]
    for peer in peers:
        peer.do(CLAIM_ALL)
    begin_together(peers, "claim_all()")
    for _ in range(number // 20):
        store.add(tasks(20))
        disturb()
    settled = [id for peer in peers for id in peer.answer(100)]
    assert len(settled) == len(set(settled)) == number
    assert count(store) == {"done": number}


def test_a_killed_and_restarted_server_loses_and_doubles_no_task(
    postgres: str, postgres_server: servers.Postgres, store: PostgresStore, start_peer: Callable[..., Peer]
) -> None:
    rounds = iter(range(100))

    def disturb() -> None:
        if next(rounds) % 5 == 3:
            postgres_server.kill()
            postgres_server.restart()

    run_claimers(start_peer, postgres, store, 600, disturb)


def test_a_server_that_is_shut_down_and_started_loses_and_doubles_no_task(
    postgres: str, postgres_server: servers.Postgres, store: PostgresStore, start_peer: Callable[..., Peer]
) -> None:
    rounds = iter(range(100))

    def disturb() -> None:
        if next(rounds) % 5 == 3:
            postgres_server.shut_down()
            postgres_server.restart()

    run_claimers(start_peer, postgres, store, 400, disturb)


def test_ended_sessions_lose_and_double_no_task(
    postgres: str, postgres_server: servers.Postgres, store: PostgresStore, start_peer: Callable[..., Peer]
) -> None:
    query = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and usename = current_user"
    with postgres_server.connect("postgres") as connection:
        run_claimers(start_peer, postgres, store, 600, lambda: connection.execute(query, [postgres.rpartition("/")[2]]))


@pytest.fixture
def proxy(postgres: str, postgres_server: servers.Postgres) -> Iterator[tuple[servers.Proxy, PostgresStore]]:
    proxy = servers.Proxy(postgres_server.port)
    store = PostgresStore(postgres.replace(f":{postgres_server.port}/", f":{proxy.port}/"))
    yield proxy, store
    store.close()
    proxy.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operation_whose_commit_was_not_answered_is_done_once(
    proxy: tuple[servers.Proxy, PostgresStore], when: str
) -> None:
    cutter, store = proxy
    worker = store.register()

    def cut() -> None:
        cutter.cut = (b"commit\0", when)

    cut()
    added = store.add([*tasks(3), NewTask("{}", id="named")])
    assert [new for _, new in added] == [True] * 4
    assert count(store) == {"ready": 4}
    cut()
    attempts = store.claim(worker, 3)
    assert [attempt.tried for attempt in attempts] == [1, 1, 1]
    assert count(store) == {"ready": 1, "running": 3}
    cut()
    assert store.settle(done(attempts)) == [True] * 3
    cut()
    last = store.claim(worker, 5)
    assert [attempt.id for attempt in last] == ["named"]
    cut()
    assert store.settle([Ending("named", last[0].token, "delayed", delay=1000)]) == [True]
    assert count(store) == {"done": 3, "delayed": 1}
    cut()
    assert store.add([NewTask("{}", id="named")]) == [("named", False)]
    cut()
    assert store.cancel(Selection()) == 1
    assert cutter.cuts == 7
    assert cutter.cut is None
    worker.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("id", [None, "named"])
def test_one_task_is_ended_in_one_round_trip_and_once(
    proxy: tuple[servers.Proxy, PostgresStore], when: str, id: str | None
) -> None:
    cutter, store = proxy
    store.add([NewTask("1", id=id), *tasks(1)])
    first, second = store.claim(store.register(), 2)
    cutter.cut = (b"commit", "before")
    assert store.settle(done([second])) == [True]
    assert cutter.cuts == 0
    cutter.cut = (b"cut here", when)
    ending = Ending(first.id, first.token, "done", result_json='"cut here"')
    assert store.settle([ending]) == [True]
    assert cutter.cuts == 1
    assert store.settle([ending]) == [False]
    assert count(store) == {"done": 2}


def test_a_worker_learns_that_the_end_of_a_short_task_was_refused(store: PostgresStore) -> None:
    store.add(tasks(3))
    claimer = Claimer(store, Retries(1.0, 1.0), buffered=True, reserves=False)
    counted: list[tuple[str, int]] = []
    claimer.count = lambda outcome, number: counted.append((outcome, number))
    for write in (claimer.next, claimer.flush):
        claim = claimer.next()
        assert claim is not None
        with claimer.mutex:  # the guard must not write it before
            claim.complete()
            assert store.settle([Ending(claim.id, claim.token, "delayed", delay=1000.0)]) == [True]
            write()
    assert counted == [("done", -1), ("done", -1)]
    claimer.close()


EXIT = """
import sys
from holdfast.tasks import TaskQueue
queue = TaskQueue(sys.argv[1])
claim = queue.claim()
claim.complete()
claims = [queue.claim() for _ in range(3)]
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_ends_soon_while_the_server_is_away(
    store: PostgresStore, postgres: str, postgres_server: servers.Postgres
) -> None:
    store.add(tasks(100))
    process = subprocess.Popen(
        [sys.executable, "-c", EXIT, postgres],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    postgres_server.kill()
    try:
        _, errors = process.communicate(timeout=20)  # reconnecting for 30 s would be too long
    finally:
        process.kill()
        postgres_server.restart()
    assert (process.returncode, errors) == (0, "")


WORK = """
import sys
from holdfast.tasks import TaskQueue, Worker
from holdfast.tasks import postgres as engine
engine.RECONNECT_S = 600.0

class Observer:
    fds = ()
    def look(self):
        print("looked", flush=True)

Worker(TaskQueue(sys.argv[1]), print, observer=Observer()).run()
"""


def test_a_worker_that_is_to_end_does_not_wait_for_a_server_that_is_away(
    store: PostgresStore, postgres: str, postgres_server: servers.Postgres
) -> None:
    process = subprocess.Popen([sys.executable, "-c", WORK, postgres], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "looked\n"
    postgres_server.kill()
    try:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        postgres_server.restart()
    assert process.returncode == 0


def test_a_queue_is_never_empty_while_a_task_changes_its_state(store: PostgresStore) -> None:
    store.add(tasks(1))
    worker = store.register()
    over = threading.Event()

    def move() -> None:
        while not over.is_set():
            for attempt in store.claim(worker, 1):
                store.settle([Ending(attempt.id, attempt.token, "delayed")])

    with ThreadPoolExecutor() as pool:
        moving = pool.submit(move)
        try:
            for _ in range(1000):
                assert any(store.count(OPEN, at_most=1).values())
                counts = store.count()
                assert sum(counts.values()) == 1, counts
        finally:
            over.set()
        moving.result()
    worker.close()


def test_a_worker_whose_session_was_ended_keeps_the_tasks_that_no_other_worker_took(
    store: PostgresStore, postgres: str
) -> None:
    store.add(tasks(2))
    worker = store.register()
    attempts = store.claim(worker, 1)
    other = PostgresStore(postgres)
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and objsubid = 2"
        )
    until(lambda: [attempt.id for attempt in other.orphans()] == [attempts[0].id])
    store.claim(worker, 0)  # opens a new session, which acquires the same lock
    assert other.orphans() == []
    assert store.settle(done(attempts)) == [True]
    other.close()
    worker.close()


def test_a_late_completion_is_refused(store: PostgresStore, postgres: str) -> None:
    store.add(tasks(1))
    worker = store.register()
    attempts = store.claim(worker, 1)
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and objsubid = 2"
        )
    other = PostgresStore(postgres)
    taker = other.register()
    until(other.orphans)
    assert other.settle([Ending(orphan.id, orphan.token, "delayed") for orphan in other.orphans()]) == [True]
    again = other.claim(taker, 1)
    assert store.settle(done(attempts)) == [False]
    assert other.settle(done(again)) == [True]
    taker.close()
    other.close()
    worker.close()


def test_after_a_restart_workers_have_time_to_come_back(
    store: PostgresStore, postgres: str, postgres_server: servers.Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres_server.kill()
    postgres_server.restart()  # so that it starts twice within a second on a quick machine
    store.add(tasks(2))
    worker = store.register()
    attempts = store.claim(worker, 2)
    postgres_server.kill()
    postgres_server.restart()
    monkeypatch.setattr(engine, "RESTART_GRACE_S", 3600)  # on a busy machine, the store below is opened late
    other = PostgresStore(postgres)
    assert other.orphans() == []
    assert store.settle(done(attempts)) == [True, True]
    other.close()
    monkeypatch.setattr(engine, "RESTART_GRACE_S", 0)
    store.add(tasks(1))
    store.claim(worker, 1)
    postgres_server.kill()
    postgres_server.restart()
    other = PostgresStore(postgres)
    assert len(other.orphans()) == 1
    other.close()
    worker.close()


def test_a_server_that_stays_away_is_reported(
    store: PostgresStore, postgres_server: servers.Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RECONNECT_S", 0.2)
    worker = store.register()
    postgres_server.kill()
    try:
        for call in (lambda: store.add(tasks(1)), store.count, lambda: store.claim(worker, 1), store.register):
            with pytest.raises(ConnectionFailed, match="refused") as caught:
                call()
            assert servers.PASSWORD not in str(caught.value)
        assert store.wait(worker, 0.2) is Woken.TIME
    finally:
        postgres_server.restart()
    assert store.add(tasks(1))[0][1]
    assert len(store.claim(worker, 1)) == 1
    worker.close()


def test_a_claim_waits_for_a_server_that_is_away_no_longer_than_for_a_task(
    postgres: str, postgres_server: servers.Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RECONNECT_S", 1e6)
    queue = TaskQueue(postgres)
    id = queue.put("x")
    claim = queue.claim()
    assert claim is not None
    postgres_server.kill()
    try:
        for call in (queue.claim, lambda: queue.claim(timeout=1.5), lambda: queue.wait(id, timeout=1)):
            with pytest.raises(ConnectionFailed):
                call()
    finally:
        postgres_server.restart()
    assert queue.claim(timeout=0.1) is None  # and not for a server that is there
    claim.complete()
    queue.close()


def test_workers_that_are_cut_off_lose_their_tasks_within_the_bound(
    postgres: str, postgres_server: servers.Postgres, start_peer: Callable[..., Peer]
) -> None:
    """Two of four workers are behind a cable that is cut. The others get their tasks, and late completions are refused.

    The limit of the wait has a margin for a busy machine. Without keepalives the server would wait for two hours.
    """
    with servers.FarNetwork(postgres_server) as network:
        store = PostgresStore(postgres)
        store.add(tasks(8))
        near = [start_peer(url=postgres, number=2) for _ in range(2)]
        far = [start_peer(url=network.url(postgres), number=2) for _ in range(2)]
        for peer in far:
            peer.do(network.enter())
        for peer in (*near, *far):
            peer.do(REGISTER)
        network.cut()
        until(lambda: len(store.orphans()) == 4, PATIENCE + MAX_SILENCE)
        assert store.settle([Ending(orphan.id, orphan.token, "delayed") for orphan in store.orphans()]) == [True] * 4
        near[0].do("attempts += store.claim(worker, 8)")
        for peer in far:
            peer.begin(SETTLE)
        network.connect()
        assert [peer.answer() for peer in far] == [[False] * 2] * 2
        assert [ok for peer in near for ok in peer.do(SETTLE)] == [True] * 8
        assert count(store) == {"done": 8}
        for peer in (*near, *far):
            peer.do("worker.close(); store.close()")
        store.close()


# Workers that live, die, and are woken.

SETTLE = "store.settle([Ending(attempt.id, attempt.token, 'done') for attempt in attempts])"
REGISTER = """
from holdfast.tasks.postgres import VERSION, PostgresStore
from holdfast.tasks.store import Ending
store = PostgresStore(url)
worker = store.register()
attempts = store.claim(worker, number, reserve=True)
"""


def test_the_tasks_of_a_killed_process_are_orphans(
    store: PostgresStore, postgres: str, start_peer: Callable[..., Peer]
) -> None:
    store.add(tasks(3))
    peer = start_peer(url=postgres, number=2)
    peer.do(REGISTER)
    assert store.orphans() == []
    peer.kill()
    until(store.orphans)
    assert [(orphan.tried, orphan.begun) for orphan in store.orphans()] == [(1, True), (1, False)]


def test_a_command_that_inherited_the_descriptor_keeps_the_worker_alive(
    store: PostgresStore, postgres: str, start_peer: Callable[..., Peer]
) -> None:
    store.add(tasks(1))
    peer = start_peer(url=postgres, number=1)
    peer.do(REGISTER)
    peer.do(
        "import subprocess\n"
        "command = subprocess.Popen(['sleep', '1000'], pass_fds=[worker.fileno()], stdin=subprocess.DEVNULL,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    )
    pid = peer.do("command.pid")
    try:
        peer.kill()
        # A worker that was killed later is dead, and this one is alive.
        other = start_peer(url=postgres, number=0)
        other.do(REGISTER)
        name = other.do("worker.name")
        other.kill()
        number = int(name.rpartition(".")[2])
        until(lambda: number not in alive(store))
        assert store.orphans() == []
    finally:
        os.kill(pid, 9)
    until(store.orphans)


def alive(store: PostgresStore) -> set[int]:
    return {row[1] for row in store.read(lambda run: run(store.sql["locks"]).fetchall())}


def test_an_idle_worker_is_woken_by_a_new_task(
    store: PostgresStore, postgres: str, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(url=postgres, number=1)
    peer.do(REGISTER)
    peer.do("assert store.claim(worker, 1, idle=True) == []")
    peer.begin("store.wait(worker, 1000).name, len(store.claim(worker, 1))")
    store.add(tasks(1))
    assert peer.answer() == ["TASK", 1]


def test_an_idle_worker_wakes_when_a_task_is_due(store: PostgresStore) -> None:
    worker = store.register()
    store.add([NewTask("{}", delay=0.05)])
    claimed: list[Attempt] = []
    while not claimed:
        claimed = store.claim(worker, 1, idle=True)
        if not claimed:
            assert store.wait(worker, PATIENCE) is Woken.TASK
    worker.close()


def test_a_put_wakes_one_idle_worker_per_task(store: PostgresStore) -> None:
    workers = [store.register() for _ in range(3)]
    for worker in workers:
        assert store.claim(worker, 1, idle=True) == []
    store.add(tasks(2))
    (left,) = store.read(lambda run: run("select count(*) from holdfast_idle").fetchone())
    assert left == 1
    for worker in workers:
        worker.close()


def test_a_put_sends_no_notification_if_no_worker_is_idle(store: PostgresStore, postgres: str) -> None:
    worker = store.register()
    with psycopg.connect(postgres, autocommit=True) as listener:
        for number in range(20):
            listener.execute(f'listen "holdfast_{number}"')
        listener.execute("listen holdfast_all; listen the_end")
        store.add(tasks(2))
        store.settle(done(store.claim(worker, 1)))
        listener.execute("notify the_end")
        assert [each.channel for each in listener.notifies(stop_after=1)] == ["the_end"]
    worker.close()


def test_changes_are_noticed(store: PostgresStore, postgres: str, start_peer: Callable[..., Peer]) -> None:
    store.add(tasks(1))
    peer = start_peer(url=postgres, number=1)
    peer.do(REGISTER)
    changes = store.changes()
    peer.begin(SETTLE)
    while count(store) != {"done": 1}:
        changes.wait(PATIENCE)
    changes.close()
    assert peer.answer() == [True]


def test_waiting_returns_when_another_descriptor_is_readable(store: PostgresStore) -> None:
    worker = store.register()
    reader, writer = os.pipe()
    assert store.claim(worker, 1, idle=True) == []
    os.write(writer, b"!")
    assert store.wait(worker, PATIENCE, reader) is Woken.OTHER
    os.close(reader)
    os.close(writer)
    worker.close()


# Transactions that meet.


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call functions at the same moment, each in a thread."""
    barrier = threading.Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(begin, call) for call in calls]]


def test_many_processes_create_the_tables_together(postgres: str) -> None:
    peers = [Peer(url=postgres) for _ in range(4)]
    begin_together(peers, "from holdfast.tasks.postgres import PostgresStore; PostgresStore(url).close()")
    for peer in peers:
        peer.answer()
        peer.__exit__(None, None, None)


def test_one_of_two_puts_with_the_same_id_is_new(store: PostgresStore) -> None:
    for number in range(30):
        put = lambda id=f"a{number}": store.add([NewTask("{}", id=id)])[0][1]  # noqa: E731
        assert sorted(together(put, put, put)) == [False, False, True]


def test_a_task_whose_blockers_end_together_becomes_ready(store: PostgresStore) -> None:
    worker = store.register()
    for number in range(30):
        store.add([NewTask("{}", id=f"a{number}"), NewTask("{}", id=f"b{number}")])
        store.add([NewTask("{}", id=f"c{number}", after=(f"a{number}", f"b{number}"))])
        one, other = store.claim(worker, 2)
        together(lambda one=one: store.settle(done([one])), lambda other=other: store.settle(done([other])))
        last = store.claim(worker, 2)
        assert [attempt.id for attempt in last] == [f"c{number}"]
        store.settle(done(last))
    worker.close()


def test_a_task_that_is_added_while_its_blocker_ends_becomes_ready(store: PostgresStore) -> None:
    worker = store.register()
    for number in range(30):
        store.add([NewTask("{}", id=f"a{number}")])
        (blocker,) = store.claim(worker, 1)
        together(
            lambda n=number: store.add([NewTask("{}", id=f"b{n}", after=(f"a{n}",))]),
            lambda blocker=blocker: store.settle(done([blocker])),
        )
        last = store.claim(worker, 2)
        assert [attempt.id for attempt in last] == [f"b{number}"]
        store.settle(done(last))
    worker.close()


def test_a_limit_holds_for_transactions_that_meet(store: PostgresStore) -> None:
    workers = [store.register() for _ in range(4)]
    store.add([NewTask("{}", key="k", limit=2) for _ in range(60)])
    running: list[Attempt] = []
    ended = 0

    def work(worker: Any) -> None:
        nonlocal ended
        while ended < 60:
            attempts = store.claim(worker, 1)
            running.extend(attempts)
            assert len(running) <= 2
            for attempt in attempts:
                running.remove(attempt)
                assert store.settle(done([attempt])) == [True]
                ended += 1

    together(*(lambda worker=worker: work(worker) for worker in workers))
    assert count(store) == {"done": 60}
    for worker in workers:
        worker.close()


def test_a_transaction_locks_keys_in_one_order(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two claims could wait for each other, until the server ends one of them after a second."""
    locked: list[tuple[Transaction, str]] = []
    lock = store.lock

    def note(tx: Transaction, name: str) -> None:
        locked.append((tx, name))
        lock(tx, name)

    monkeypatch.setattr(store, "lock", note)
    store.add([NewTask("1", key="b"), NewTask("2", key="b"), NewTask("3", key="a", limit=0, interval=3600.0)])
    worker = store.register()
    (first,) = store.claim(worker, 1)
    (second,) = store.claim(worker, 2, endings=[Ending(first.id, first.token, "done")])
    assert (first.key, second.key) == ("b", "a")
    for transaction in {id(tx): tx for tx, _ in locked}.values():
        names = [name for tx, name in locked if tx is transaction]
        assert names == sorted(names)
    (third,) = store.claim(worker, 2, endings=[Ending(second.id, second.token, "done")])
    assert third.key == "b"


def test_a_claim_finds_the_task_whose_key_its_own_ending_frees(store: PostgresStore) -> None:
    store.add([NewTask("1", key="k"), NewTask("2", key="k")])
    worker = store.register()
    (first,) = store.claim(worker, 1)
    (second,) = store.claim(worker, 1, endings=[Ending(first.id, first.token, "done")])
    assert second.key == "k"


def test_two_puts_do_not_fill_the_same_room(store: PostgresStore) -> None:
    added = together(*(lambda: store.add(tasks(3), max_waiting=7) for _ in range(4)))
    assert sum(map(len, added)) == 7
    assert count(store) == {"ready": 7}


def test_cancel_and_claim_at_the_same_time_miss_no_task(store: PostgresStore) -> None:
    worker = store.register()
    for _ in range(10):
        store.add(tasks(30))
        attempts, cancelled = together(lambda: store.claim(worker, 15), lambda: store.cancel(Selection()))
        marked = [task for task in store.tasks(["running"]) if task.cancelling]
        assert cancelled == 30 - len(attempts) + len(marked)
        store.settle([Ending(attempt.id, attempt.token, "done") for attempt in attempts])
        assert set(count(store)) <= {"done", "cancelled"}
    worker.close()


def test_claims_use_the_indexes_whatever_the_server_knows_about_the_table(store: PostgresStore) -> None:
    store.add(tasks(1))
    fill = (
        "insert into holdfast_task (seq, ord, state, due, priority, payload, attempts, put_at)"
        " select s, s, s % 6, 1e12, 0, '{}', 3, 0"
        " from (select nextval('holdfast_task_seq_seq') s from generate_series(1, 20000)) numbers"
    )
    plans = {}

    def explain(run: Callable[..., Any]) -> None:
        run("analyze holdfast_task")  # the server believes that the table is small
        run(fill)
        for name, values in (("ready", [10]), ("due", [0.0, 10]), ("has_task", [0.0]), ("running", ["w"])):
            rows = run(f"explain {store.sql[name]}", values).fetchall()
            plans[name] = "\n".join(row[0] for row in rows)

    store.read(explain)
    assert "Index Scan using holdfast_task_ready" in plans["ready"]
    assert "Index Scan using holdfast_task_running" in plans["running"]
    assert "Index Cond: (due <=" in plans["due"]
    assert "Index Cond: (due <=" in plans["has_task"]
    assert "Seq Scan" not in "".join(plans.values())


@pytest.mark.parametrize(("durable", "most"), [(True, 400), (False, 100)])
def test_claims_by_hand_share_transactions_and_without_durable_completions_do(
    postgres: str, durable: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GATHER_S", "_RESERVE_ON_SERVER_S", "_GUARD_S"):
        monkeypatch.setattr(claimer, name, 1.0)  # on a busy machine, fewer tasks would share a transaction
    queue = TaskQueue(postgres, durable=durable)
    queue.put_all(range(300))
    number = 0
    run_once = queue.store._attempt

    def counted(*arguments: Any) -> Any:
        nonlocal number
        number += 1
        return run_once(*arguments)

    queue.store._attempt = counted
    for _ in range(300):
        claim = queue.claim()
        assert claim is not None
        claim.complete()
    assert number <= most
    until(lambda: TaskQueue(postgres).stats()["done"] == 300)


# The caller's transaction.


def test_a_task_in_the_transaction_of_the_caller_is_rolled_back_with_it(store: PostgresStore, postgres: str) -> None:
    with psycopg.connect(postgres) as connection:
        assert store.add([NewTask("{}", id="a")], connection=connection) == [("a", True)]
        assert count(store) == {}
        connection.rollback()
    assert count(store) == {}


@pytest.mark.parametrize("factory", [psycopg.rows.tuple_row, psycopg.rows.dict_row])
def test_a_task_in_the_transaction_of_the_caller_is_committed_with_it(
    store: PostgresStore, postgres: str, factory: Any
) -> None:
    worker = store.register()
    with psycopg.connect(postgres, row_factory=factory) as connection:
        connection.execute("create table orders (number integer)")
        store.add([NewTask("{}", id="a"), NewTask("{}", key="k")], connection=connection)
        connection.execute("insert into orders values (1)")
        assert store.claim(worker, 1, idle=True) == []
        connection.commit()
        assert store.wait(worker, PATIENCE) is Woken.TASK
    assert len(store.claim(worker, 5)) == 2
    worker.close()


def test_an_error_leaves_the_transaction_of_the_caller_usable(store: PostgresStore, postgres: str) -> None:
    with psycopg.connect(postgres) as connection:
        with pytest.raises(ValueError, match="there is no such task"):
            store.add([NewTask("{}"), NewTask("{}", after=("nothing",))], connection=connection)
        store.add([NewTask("{}", id="a")], connection=connection)
        connection.commit()
    assert [task.id for task in store.tasks()] == ["a"]


def test_a_connection_in_autocommit_mode_adds_at_once(store: PostgresStore, postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        store.add([NewTask("{}", id="a")], connection=connection)
        assert count(store) == {"ready": 1}
        with connection.transaction(force_rollback=True):
            store.add([NewTask("{}", id="b")], connection=connection)
        assert count(store) == {"ready": 1}


def test_another_kind_of_connection_is_refused(store: PostgresStore) -> None:
    with pytest.raises(TypeError, match=r"psycopg\.Connection"):
        store.add(tasks(1), connection="postgresql://")


# What is refused.


def test_a_newer_format_is_refused_and_left_as_it_is(postgres: str) -> None:
    PostgresStore(postgres).close()
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("update holdfast_meta set value = '99' where name = 'version'; drop table holdfast_idle")
        with pytest.raises(Unsupported, match=r"format 99.*Upgrade"):
            PostgresStore(postgres)
        assert connection.execute("select to_regclass('holdfast_idle')").fetchone() == (None,)


def test_tables_of_version_2_are_migrated_once_by_processes_that_come_together(postgres: str) -> None:
    store = PostgresStore(postgres)
    worker = store.register()
    store.add(tasks(2))
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(
            "drop function holdfast_end_one; update holdfast_meta set value = '2' where name = 'version'"
        )
        migrated = together(*(lambda: PostgresStore(postgres) for _ in range(4)))
        assert connection.execute("select value from holdfast_meta where name = 'version'").fetchone() == (
            str(VERSION),
        )
    (attempt,) = migrated[0].claim(worker, 1)
    assert migrated[1].settle([Ending(attempt.id, attempt.token, "done")]) == [True]
    assert count(migrated[2]) == {"ready": 1, "done": 1}
    worker.close()


@pytest.mark.parametrize("name", ["meta", "task"])
def test_tables_of_another_program_are_refused(postgres: str, name: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"create table holdfast_{name} (x integer)")
        with pytest.raises(CorruptStore, match=r"Choose another prefix"):
            PostgresStore(postgres)
        (number,) = connection.execute("select count(*) from pg_tables where tablename like 'holdfast%'").fetchone()
        assert number == 1
    PostgresStore(f"{postgres}?prefix=mine_").close()


def test_two_queues_share_a_database(postgres: str) -> None:
    one, other = PostgresStore(f"{postgres}?prefix=one_"), PostgresStore(f"{postgres}?prefix=other_")
    one.add([NewTask("{}", id="a", key="k")])
    worker = one.register()
    assert len(one.claim(worker, 1)) == 1
    assert other.get(["a"]) == [None]
    assert other.orphans() == one.orphans() == []
    assert "prefix=one_" in one.name
    worker.close()
    one.close()
    other.close()


@pytest.mark.parametrize("prefix", ["", "A", "a-b", "a%22b", "a.b", "1a", "a" * 31, "é"])
def test_a_prefix_that_is_no_plain_name_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        PostgresStore(f"postgresql://127.0.0.1:1/db?prefix={prefix}")


def test_a_wrong_password_is_not_shown(postgres: str) -> None:
    with pytest.raises(ConnectionFailed, match="Check the user name and the password") as caught:
        PostgresStore(postgres.replace(servers.PASSWORD, "wrong-one"))
    assert "wrong-one" not in str(caught.value) + repr(caught.value)


def test_a_user_without_rights_gets_an_error_with_the_remedy(postgres: str, postgres_server: servers.Postgres) -> None:
    with postgres_server.connect("postgres", user="postgres") as connection:
        connection.execute(f"create role visitor login password '{servers.PASSWORD}'")
    try:
        with pytest.raises(PermissionError, match=r"permission denied for [a-z_ ]+\. Grant the user the right"):
            PostgresStore(postgres.replace(f"{servers.USER}:", "visitor:"))
    finally:
        with postgres_server.connect("postgres", user="postgres") as connection:
            connection.execute("drop role visitor")


# Forks and threads.


def test_a_forked_child_opens_its_own_sessions(store: PostgresStore) -> None:
    store.add(tasks(2))
    worker = store.register()
    attempts = store.claim(worker, 1)
    if (pid := os.fork()) == 0:
        status = 1
        try:
            worker.close()  # of the parent: this does nothing
            mine = store.register()
            assert mine.name != worker.name
            assert len(store.claim(mine, 1)) == 1
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    until(lambda: len(store.orphans()) == 1)
    assert store.orphans()[0].id != attempts[0].id
    assert store.settle(done(attempts)) == [True]
    worker.close()


def test_threads_share_a_few_sessions(store: PostgresStore, postgres: str) -> None:
    worker = store.register()
    together(*(lambda: store.add(tasks(5)) for _ in range(20)))
    assert count(store) == {"ready": 100}
    query = """select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
        and backend_type = 'client backend'"""  # the server may be at work on the tables itself
    with psycopg.connect(postgres) as connection:
        (sessions,) = connection.execute(query).fetchone() or (0,)
    assert sessions <= 1 + MAX_SESSIONS
    worker.close()


def test_an_idle_worker_learns_that_the_clock_of_the_server_has_jumped(store: PostgresStore) -> None:
    store.add([NewTask("1", delay=1.0)])
    worker = store.register()
    assert store.claim(worker, 1, idle=True) == []
    store._offset -= 3600  # as after an hour in which this machine slept
    assert store.wait(worker, PATIENCE) is Woken.TASK
    assert len(store.claim(worker, 1)) == 1


def test_the_clock_is_the_servers(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "time", lambda: 0.0)
    store.add([NewTask("{}", delay=1000)])
    (task,) = store.tasks()
    assert task.due_in is not None and 990 < task.due_in <= 1000
    (due,) = store.read(lambda run: run("select due from holdfast_task").fetchone())
    assert abs(due - 1000 - time.time()) < 60
