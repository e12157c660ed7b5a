"""Servers tell open pages of changes, and nobody pays for that while no page is open."""

from __future__ import annotations

import asyncio
import html
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg
import pytest
import servers
from console_server import ConsoleServer, Stream, slug
from support import Peer, processor_ticks, until

import holdfast
from holdfast import postgres as pg
from holdfast.events import Event, EventStore
from holdfast.locks import listing
from holdfast.tasks import TaskQueue
from holdfast.tasks import postgres as tasks_postgres
from holdfast.tasks.server import ServerChanges
from holdfast.wait import poll
from holdfast.web import watching

Start = Callable[..., ConsoleServer]
PeerStart = Callable[..., Peer]

# Only an event can change a page of this server within the patience of these tests.
NEVER_LOOKS = """
from holdfast.web import live, watching
live._SAFETY_S = watching._ALARM_S = watching._FIRST_LOOK_S = watching._LAST_LOOK_S = 3600.0
"""


@pytest.fixture(params=["redis", "etcd", "postgres"])
def locks_url(request: pytest.FixtureRequest) -> str:
    """A server of locks, without the name of a lock."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres"))
    return str(request.getfixturevalue(f"{request.param}_server").url("").rstrip("/"))


def named(url: str, name: str) -> str:
    return f"{url}?name={name}" if url.startswith("postgres") else f"{url}/{name}"


def until_without(page: Stream, text: str) -> None:
    while text in page.next():
        pass


def until_calm(server: ConsoleServer) -> None:
    """Until it has rendered its page for the last time. It renders again soon after an event, and would see another
    change by chance."""

    def is_calm() -> bool:
        before = processor_ticks(server.pid)
        time.sleep(1)
        return processor_ticks(server.pid) - before <= 1

    until(is_calm)


def change(server: ConsoleServer, peer: Peer, code: str) -> None:
    until_calm(server)
    peer.do(code)


# Open pages learn of everything.


def test_a_lock_on_a_server_is_shown_at_once(console: Start, locks_url: str, start_peer: PeerStart) -> None:
    url = named(locks_url, "alarm-shown")
    holder, waiter = start_peer(url=url), start_peer(url=url)
    server = console(locks_url, prelude=NEVER_LOOKS)
    with Stream(server, "/locks") as page:
        page.next()
        change(server, holder, "hold = holdfast.lock(url).acquire()")
        text = page.until(f"pid {holder.pid}")
    links = re.findall(r'href="(/lock[?]name=[^"]*)"', text)
    with Stream(server, next(html.unescape(link) for link in links if "alarm-shown" in link)) as page:
        page.next()
        until_calm(server)
        waiter.begin("hold = holdfast.lock(url).acquire()")
        page.until(f"pid {waiter.pid}")
        change(server, holder, "hold.release()")
        page.until(f"acquired by pid {waiter.pid}")
        waiter.answer()
        change(server, waiter, "hold.release()")
        page.until(f"released by pid {waiter.pid}")


def test_a_permit_on_a_server_is_shown_at_once(console: Start, locks_url: str, start_peer: PeerStart) -> None:
    peer = start_peer(url=named(locks_url, "alarm-permit"))
    server = console(locks_url, prelude=NEVER_LOOKS)
    with Stream(server, "/locks") as page:
        page.next()
        change(server, peer, "hold = holdfast.semaphore(url, 2).acquire()")
        page.until(f"pid {peer.pid}")
        change(server, peer, "hold.release()")
        until_without(page, f"pid {peer.pid}")


def test_every_change_of_a_queue_on_postgresql_is_shown_at_once(
    console: Start, postgres: str, start_peer: PeerStart
) -> None:
    peer = start_peer(url=postgres)
    peer.do("from holdfast.tasks import TaskQueue; queue = TaskQueue(url, retry_after=0)")
    server = console(postgres, prelude=NEVER_LOOKS)
    with Stream(server, slug(server, "queue")) as page:
        page.next()
        for code, shown in (
            ("queue.put('text', id='first', attempts=1)", "task-first"),
            ("claim = queue.claim()", "busy"),
            ("claim.progress(3, 8)", '<progress value="3" max="8"'),
            ("claim.fail('went wrong')", "went wrong"),
            ("queue.pause()", ">paused<"),
            ("queue.put(1, id='keyed', key='k'), queue.put(2, id='blocked', after='keyed')", "task-blocked"),
            ("queue.cancel('blocked')", "cancelled</span>"),
            ("queue.schedule('nightly', 1, every=60)", "nightly"),
        ):
            change(server, peer, code)
            page.until(shown)
        change(server, peer, "queue.purge(states=['failed'])")
        until_without(page, "went wrong")


def test_a_subscription_on_postgresql_is_shown_at_once(console: Start, postgres: str, start_peer: PeerStart) -> None:
    EventStore(postgres).append([Event("A")] * 5)
    peer = start_peer(url=postgres)
    peer.do("from holdfast.events import EventStore; store = EventStore(url)")
    server = console(postgres, prelude=NEVER_LOOKS)
    with Stream(server, slug(server, "store")) as page:
        page.next()
        change(server, peer, "reader = store.subscribe('mailer'); event = next(reader)")
        page.until(f"pid {peer.pid}")
        change(server, peer, "reader.acknowledge()")
        page.until('<b class="lag">4</b>')
        change(server, peer, "reader.close()")
        until_without(page, f"pid {peer.pid}")


def test_a_change_is_shown_within_half_a_second(console: Start, postgres: str) -> None:
    """A busy machine gets more than one chance. Each change is shown by an event."""
    queue = TaskQueue(postgres)
    server = console(postgres, prelude=NEVER_LOOKS)
    with Stream(server, slug(server, "queue")) as page:
        page.next()

        def is_quick() -> bool:
            began = monotonic()
            page.until(f"task-{queue.put(1)}")
            return monotonic() - began < 0.5

        until(is_quick)
    queue.close()


def test_two_consoles_learn_of_everything_when_one_of_them_ends(
    console: Start, locks_url: str, start_peer: PeerStart
) -> None:
    peer = start_peer(url=named(locks_url, "alarm-two"))
    one, other = console(locks_url, prelude=NEVER_LOOKS), console(locks_url, prelude=NEVER_LOOKS)
    with Stream(other, "/locks") as second:
        with Stream(one, "/locks") as first:
            first.next()
            second.next()
            peer.do("hold = holdfast.lock(url).acquire()")
            first.until(f"pid {peer.pid}")
            second.until(f"pid {peer.pid}")
        one.stop()
        change(other, peer, "hold.release()")
        until_without(second, f"pid {peer.pid}")


# Without an open page.


def publishes(server: servers.Redis) -> int:
    found: dict[str, Any] = server.client().info("commandstats")
    return int(found.get("cmdstat_publish", {"calls": 0})["calls"])


def test_redis_publishes_nothing_without_an_open_page(console: Start, redis_server: servers.Redis) -> None:
    url = redis_server.url("").rstrip("/")
    client = redis_server.client()

    def listeners() -> int:
        return int(client.pubsub_numsub("holdfast:changes")[0][1])

    until(lambda: listeners() == 0)
    server = console(url)
    before = publishes(redis_server)
    with holdfast.lock(f"{url}/alarm-none").acquire():
        pass
    assert publishes(redis_server) == before
    with Stream(server, "/locks") as page:
        page.next()
        until(lambda: listeners() == 1)
        with holdfast.lock(f"{url}/alarm-none").acquire():
            until(lambda: publishes(redis_server) > before)
    until(lambda: listeners() == 0)


def test_postgresql_notifies_nobody_without_an_open_page(postgres: str) -> None:
    """A session that only listens hears nothing. One that sets the alarm does."""
    store = EventStore(postgres)
    store.append(Event("A"))
    lock, semaphore = holdfast.lock(f"{postgres}?name=a"), holdfast.semaphore(f"{postgres}?name=s", 1)
    listener = pg.connect(postgres)
    listener.connection.execute("listen holdfast_changes")

    def change() -> None:
        with lock.acquire(), semaphore.acquire():
            assert not semaphore.try_acquire()
        with store.subscribe("mailer") as reader:
            next(reader)

    def heard() -> int:
        listener.connection.execute("select 1")
        return len(list(listener.connection.notifies(timeout=0)))

    change()
    assert heard() == 0
    with pg.Alarm(postgres)() as rung:
        change()
        assert poll(rung, 30) == set(rung)
        assert heard() > 0
    heard()  # the alarm tells others that it has ended
    change()
    assert heard() == 0
    listener.close()
    store.close()


def test_a_queue_notifies_an_alarm_once_and_nobody_without_one(postgres: str) -> None:
    queue = TaskQueue(postgres)
    store: Any = queue.store
    listener = pg.connect(postgres)
    for number in range(1, 20):  # of workers, and so of the channels that alarms listen to
        listener.connection.execute(f'listen "holdfast_{number}"')

    def change() -> None:
        queue.put(1)
        claim = queue.claim()
        assert claim is not None
        claim.complete()
        assert queue.claim() is None

    def heard() -> int:
        listener.connection.execute("select 1")
        return len(list(listener.connection.notifies(timeout=0)))

    change()
    assert heard() == 0
    with store.alarm() as rung:
        change()
        change()
        assert poll(rung, 30) and heard() == 1
    with store.alarm() as rung:
        assert queue.claim() is None and heard() == 0, "a claim that found nothing has changed nothing"
    change()
    assert heard() == 0
    listener.close()
    queue.close()


def test_nothing_is_left_on_a_server_when_the_last_page_is_closed(console: Start, postgres: str) -> None:
    TaskQueue(postgres).put(1)
    EventStore(postgres).append(Event("A"))
    server = console(postgres)
    observer = pg.connect(postgres)

    def is_watched() -> tuple[bool, bool]:
        query = f"""select (select count(*) > 0 from holdfast_idle where until < -1), (select count(*) > 0 from pg_locks
            where locktype = 'advisory' and (classid::bigint << 32) | objid::bigint = {pg._ALARM})"""
        found = observer.connection.execute(query).fetchone()
        assert found is not None
        return bool(found[0]), bool(found[1])

    with Stream(server, "/") as page:
        page.next()
        until(lambda: is_watched() == (True, True))
    until(lambda: is_watched() == (False, False))
    observer.close()


def test_nothing_is_left_on_etcd_when_the_last_page_is_closed(console: Start, etcd_server: servers.Etcd) -> None:
    url = etcd_server.url("").rstrip("/")
    server = console(url)

    def watchers() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{etcd_server.nodes[0].port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("etcd_debugging_mvcc_watcher_total "))

    before = watchers()
    with Stream(server, "/locks") as page:
        page.next()
        until(lambda: watchers() > before)
    until(lambda: watchers() == before)


# An alarm.


def test_an_alarm_rings_for_the_one_lock_that_the_url_names(etcd_server: servers.Etcd) -> None:
    url = etcd_server.url("alarm-one")
    alarm = listing.alarm_on(url)
    assert alarm is not None
    with alarm() as rung:
        with holdfast.lock(etcd_server.url("alarm-other")).acquire():
            assert not poll(rung, 0.3)
        with holdfast.lock(url).acquire():
            assert poll(rung, 30)


def test_a_second_alarm_on_postgresql_rings_when_the_first_one_ends(postgres: str) -> None:
    """It has not the advisory lock, so it sets itself again. Then changes ring for it."""
    first, second = pg.Alarm(postgres), pg.Alarm(postgres)
    lock = holdfast.lock(f"{postgres}?name=a")
    with lock.acquire():
        pass
    leading = first()
    leading.__enter__()
    with second() as rung:
        assert not poll(rung, 0)
        leading.__exit__(None, None, None)
        assert poll(rung, 30)
    with second() as rung, lock.acquire():
        assert poll(rung, 30)


def test_an_alarm_on_postgresql_keeps_no_notification(postgres: str) -> None:
    alarm, lock = pg.Alarm(postgres), holdfast.lock(f"{postgres}?name=a")
    for _ in range(3):
        with alarm() as rung, lock.acquire():
            assert poll(rung, 30)
    with alarm._pool.session() as session:
        assert not list(session.connection.notifies(timeout=0))


def test_an_alarm_misses_no_transaction_that_began_before_it(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a transaction does not know of the alarm. So it is to be seen, once the alarm is set."""
    monkeypatch.setattr(tasks_postgres, "UNSEEN_S", 2.0)
    queue = TaskQueue(postgres)
    store: Any = queue.store
    id = queue.put(1)
    begun, is_asked = threading.Event(), threading.Event()

    def change() -> None:
        def work(tx: Any) -> None:
            tx.run("select 1").fetchone()
            begun.set()
            assert is_asked.wait(30)
            time.sleep(0.1)
            tx.run(f"update holdfast_task set payload = '2' where seq = {id[1:]}")

        store.transact(work)

    ask = ServerChanges._ask
    monkeypatch.setattr(ServerChanges, "_ask", lambda changes: (ask(changes), is_asked.set()))
    changing = threading.Thread(target=change)
    changing.start()
    assert begun.wait(30)
    with store.alarm() as rung:
        assert queue.get(id).payload == 2 or poll(rung, 1)
    changing.join()
    queue.close()


def test_a_topic_goes_on_after_any_error_of_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a statement that takes longer than the server allows."""
    monkeypatch.setattr(watching, "_LAST_LOOK_S", 0.01)
    calls: list[int] = []

    def alarm() -> Any:
        calls.append(1)
        raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")

    async def watch() -> None:
        topic = watching.Topic("x", alarms=[alarm])
        topic.begin()
        before = topic.version
        while len(calls) < 3 or topic.version == before:
            await asyncio.sleep(0.01)
        topic.end()

    asyncio.run(asyncio.wait_for(watch(), 30))
