"""`EventStore` on Windows: opened, appended to and read by several processes."""

from __future__ import annotations

import os

import pytest
from peers import Raised

import holdfast
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query

IMPORT = "from holdfast.events import *"


@pytest.fixture
def shop(tmp_path):
    """The path of a store that does not exist yet."""
    return str(tmp_path / "shop")


def test_a_store_is_made_once_and_opened_again(shop):
    with EventStore(shop) as store:
        assert store.append(Event("Ordered", {"item": "tea"}, tags={"order:1"})) == 1
        made = sorted(os.listdir(shop))
    with EventStore(shop) as store:
        assert [(event.position, event.type, event.data) for event in store.read()] == [(1, "Ordered", {"item": "tea"})]
    assert [name for name in made if name.endswith(".tmp")] == []


def test_a_condition_is_checked(shop):
    with EventStore(shop) as store:
        condition = AppendCondition(Query.of(tags={"order:1"}))
        store.append(Event("Ordered", tags={"order:1"}), condition)
        with pytest.raises(ConditionFailed):
            store.append(Event("Ordered", tags={"order:1"}), condition)
        assert store.head() == 1


def test_processes_that_open_a_new_store_at_once_share_it(shop, start_peer):
    peers = [start_peer(shop=shop) for _ in range(3)]
    for peer in peers:
        peer.do(IMPORT)
    for peer in peers:
        peer.begin("store = EventStore(shop)")
    for peer in peers:
        peer.answer()
    for number, peer in enumerate(peers):
        assert peer.do("store.append(Event('Opened'))") == number + 1
        peer.do("store.close()")
    with EventStore(shop) as store:
        assert store.verify().ok


def test_processes_append_and_read_and_each_condition_is_won_once(shop, start_peer):
    """Several segments, so that writers go from one to the next."""
    peers = [start_peer(shop=shop, me=number) for number in range(3)]
    for peer in peers:
        peer.do(IMPORT)
        peer.do("store = EventStore(shop, lock_timeout=100, segment_size=2000)")
        peer.do(
            "def work():\n"
            "    told, won = {}, 0\n"
            "    for n in range(20):\n"
            "        told[f'{me}.{n}'] = store.append(Event('T', f'{me}.{n}'))\n"
            "        tag = f'race:{n}'\n"
            "        try:\n"
            "            store.append(Event('W', n, tags={tag}), AppendCondition(Query.of(tags={tag})))\n"
            "            won += 1\n"
            "        except ConditionFailed:\n"
            "            pass\n"
            "    return told, won"
        )
    for peer in peers:
        peer.begin("work()")
    answers = [peer.answer() for peer in peers]
    told = {name: position for names, _ in answers for name, position in names.items()}
    assert sum(won for _, won in answers) == 20
    with EventStore(shop) as store:
        events = list(store.read())
        assert [event.position for event in events] == list(range(1, 81))
        assert {event.data: event.position for event in events if event.type == "T"} == told
        assert sorted(event.data for event in events if event.type == "W") == list(range(20))
        assert store.verify().ok
    for peer in peers:
        assert peer.do("store.head()") == 80
        peer.do("store.close()")


def test_a_killed_writer_blocks_no_other_writer_and_loses_no_acknowledged_event(shop, start_peer):
    peer = start_peer(shop=shop)
    peer.do(IMPORT)
    peer.do("store = EventStore(shop)")
    assert peer.do("store.append(Event('Kept'))") == 1
    peer.do("hold = Lock(shop + '/.store.lock', keep=True).acquire()")
    peer.kill()
    with EventStore(shop, lock_timeout=10) as store:
        assert store.append(Event("Next")) == 2
        assert [event.type for event in store.read()] == ["Kept", "Next"]


def test_a_held_lock_of_the_store_ends_in_a_timeout(shop, start_peer):
    with EventStore(shop, lock_timeout=0.2) as store:
        store.append(Event("First"))
        peer = start_peer(shop=shop)
        peer.do("hold = Lock(shop + '/.store.lock', keep=True).acquire()")
        with pytest.raises(holdfast.Timeout):
            store.append(Event("Second"))
        peer.do("hold.release()")
        assert store.append(Event("Second")) == 2


def test_a_follower_sees_what_another_process_appends(shop, start_peer):
    peer = start_peer(shop=shop)
    peer.do(IMPORT)
    peer.do("store = EventStore(shop)")
    with EventStore(shop) as store:
        news = store.follow(timeout=60)
        peer.do("store.append(Event('Said'))")
        assert next(news).type == "Said"
        news.close()
    peer.do("store.close()")


def test_a_store_without_its_file_is_refused(shop):
    with EventStore(shop) as store:
        store.append(Event("First"))
    os.unlink(os.path.join(shop, "store.json"))
    with pytest.raises(holdfast.CorruptStore):
        EventStore(shop)


def test_an_error_in_a_peer_is_seen_here(shop, start_peer):
    peer = start_peer(shop=shop)
    with pytest.raises(Raised, match="NameError"):
        peer.do("EventStore(shop)")
