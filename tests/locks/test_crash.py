"""Whoever is killed or stopped, as a holder or in the queue, holds up nobody else and leaves nothing for ever."""

from __future__ import annotations

import os
import signal

import pytest
from support import WAYS, assert_nothing_left, begin_together, tickets

from holdfast import Lock, Semaphore

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this platform")


def queue_up(start_peer, path, count, way="blocking"):
    """Peers that wait for the lock, in this order."""
    waiters = []
    for _ in range(count):
        peer = start_peer(path=path)
        peer.do("look_only_when_told()")
        peer.begin(f"hold = acquire_by({way!r}, Lock(path))")
        peer.until_waiting(path)
        waiters.append(peer)
    return waiters


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
@pytest.mark.parametrize("fair", [True, False], ids=["fair", "unfair"])
@pytest.mark.parametrize("way", WAYS)
def test_an_event_tells_the_waiter_that_the_holder_was_killed(start_peer, path, way, fair, keep):
    holder, waiter = start_peer(path=path), start_peer(path=path, way=way, fair=fair, keep=keep)
    holder.do(f"hold = Lock(path, keep={keep}).acquire()")
    waiter.do("look_only_when_told()")
    waiter.begin("hold = acquire_by(way, Lock(path, fair=fair, keep=keep))")
    waiter.until_waiting(path)

    holder.kill()

    waiter.answer()
    waiter.do("hold.release()")
    if keep:
        os.unlink(path)
    assert_nothing_left(path)


@pytest.mark.parametrize("way", ["blocking", "timeout", "asyncio"])
def test_an_event_tells_the_writer_that_the_last_sharer_was_killed(start_peer, path, way):
    sharers = [start_peer(path=path) for _ in range(2)]
    for sharer in sharers:
        sharer.do("hold = Lock(path, shared=True).acquire()")
    (writer,) = queue_up(start_peer, path, 1, way)

    sharers[0].kill()
    sharers[1].kill()

    writer.answer()
    writer.do("hold.release()")
    assert_nothing_left(path)


@pytest.mark.parametrize("way", ["blocking", "timeout", "asyncio"])
def test_an_event_tells_the_waiter_that_a_permit_came_free_by_a_kill(start_peer, path, way):
    holders = [start_peer(path=path) for _ in range(2)]
    for holder in holders:
        holder.do("hold = Semaphore(path, 2).acquire()")
    waiter = start_peer(path=path, way=way)
    waiter.do("look_only_when_told()")
    waiter.begin("hold = acquire_by(way, Semaphore(path, 2))")
    waiter.until_waiting(path)

    holders[1].kill()

    waiter.answer()
    assert Semaphore(path, 2).try_acquire() is None
    waiter.do("hold.release()")
    holders[0].do("hold.release()")
    assert_nothing_left(path)


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_the_next_holder_removes_the_file_of_a_killed_holder(start_peer, path, shared):
    holder = start_peer(path=path)
    holder.do("hold = Lock(path).acquire()")
    holder.kill()
    assert os.path.exists(path)

    with Lock(path, shared=shared, timeout=0):
        pass

    assert_nothing_left(path)


def test_the_next_user_removes_the_semaphore_file_of_a_killed_holder(start_peer, path):
    holder = start_peer(path=path)
    holder.do("holds = [Semaphore(path, 3).acquire() for _ in range(3)]")
    holder.kill()
    assert os.path.exists(path)

    with Semaphore(path, 4, timeout=0):  # nobody uses the old number any more
        pass

    assert_nothing_left(path)


@pytest.mark.parametrize("way", ["blocking", "asyncio"])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["head", "middle", "last"])
def test_a_killed_waiter_does_not_block_the_others(start_peer, path, victim, way):
    with Lock(path):
        waiters = queue_up(start_peer, path, 3, way)
        waiters.pop(victim).kill()
        late = queue_up(start_peer, path, 1, way)

    for waiter in waiters + late:
        waiter.answer()
        waiter.do("hold.release()")
    assert_nothing_left(path)


def test_the_next_waiter_acquires_when_the_first_was_killed_after_the_lock_came_free(start_peer, path):
    """The head is stopped, so that it cannot take the free lock, and then killed: the kill is the only event."""
    with Lock(path):
        head, second = queue_up(start_peer, path, 2)
        head.stop()
    assert not second.has_answered()

    head.kill()

    second.answer()
    second.do("hold.release()")
    assert_nothing_left(path)


@pytest.mark.parametrize("way", ["blocking", "asyncio"])
def test_a_stopped_first_waiter_delays_the_others_for_a_few_seconds_at_most(start_peer, path, way):
    second = start_peer(path=path, way=way)
    second.do("__import__('anyio')")
    with Lock(path):
        (head,) = queue_up(start_peer, path, 1)
        second.begin("hold = acquire_by(way, Lock(path))")
        second.until_waiting(path)
        head.stop()

    second.answer()  # after two safety looks: one to notice, one to be sure
    second.do("hold.release()")

    head.go_on()
    head.answer()
    head.do("hold.release()")
    assert_nothing_left(path)


def kill_all_who_want(start_peer, path, lock="Lock(path)"):
    """A lock file and a queue, both of which belong only to the dead."""
    peers = [start_peer(path=path) for _ in range(4)]
    for number, peer in enumerate(peers):
        peer.begin(f"hold = {lock}.acquire()")
        if number:
            peer.until_waiting(path)
        else:
            peer.answer()
    for peer in reversed(peers):
        peer.kill()
    assert len(tickets(path)) == 3
    assert os.path.exists(path)


def use(lock, way):
    if way == "try":
        hold = lock.try_acquire()
        assert hold is not None
        hold.release()
    else:
        with lock:
            pass


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("blocking", {}),
        ("timeout", {"timeout": 10}),
        ("zero timeout", {"timeout": 0}),
        ("try", {}),
        ("shared", {"shared": True}),
        ("try", {"shared": True}),
    ],
)
def test_the_next_user_removes_a_queue_of_dead_waiters(start_peer, path, way, options):
    kill_all_who_want(start_peer, path)

    use(Lock(path, **options), way)

    assert_nothing_left(path)


@pytest.mark.parametrize(("way", "timeout"), [("blocking", None), ("timeout", 10), ("try", None)])
def test_the_next_user_of_a_semaphore_removes_a_queue_of_dead_waiters(start_peer, path, way, timeout):
    kill_all_who_want(start_peer, path, "Semaphore(path, 1)")

    use(Semaphore(path, 1, timeout=timeout), way)

    assert_nothing_left(path)


def test_a_queue_of_dead_waiters_makes_no_concurrent_try_busy(start_peer, path):
    kill_all_who_want(start_peer, path)
    peers = [start_peer(path=path) for _ in range(4)]
    begin_together(peers, "hold = Lock(path, shared=True).try_acquire()")
    for peer in peers:
        peer.answer()
        assert peer.do("hold is not None")
        peer.do("hold.release()")
    assert_nothing_left(path)


def test_status_does_not_name_a_killed_holder(start_peer, path):
    holder = start_peer(path=path)
    holder.do("hold = Lock(path).acquire()")
    assert [found.pid for found in Lock(path).status().holders] == [holder.pid]
    (waiter,) = queue_up(start_peer, path, 1)
    assert [found.pid for found in Lock(path).status().waiters] == [waiter.pid]

    waiter.kill()
    holder.kill()

    status = Lock(path).status()
    assert not status.held
    assert status.holders == status.waiters == ()
    use(Lock(path), "blocking")
    assert_nothing_left(path)


def test_a_waiter_killed_while_others_come_and_go_leaves_a_working_queue(start_peer, path):
    """Many rounds, the victim at a place that the round's number decides."""
    with Lock(path) as outer:
        waiters = queue_up(start_peer, path, 4)
        for number in range(8):
            waiters.pop(number % 4).kill()
            waiters += queue_up(start_peer, path, 1)
        outer.check()
    for waiter in waiters:
        waiter.answer()
        waiter.do("hold.release()")
    assert_nothing_left(path)
