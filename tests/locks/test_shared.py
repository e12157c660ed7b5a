"""Sharers never stand in each other's way, none takes the lock from another, and writers get their turn."""

from __future__ import annotations

import os
import threading

import pytest
from support import WAYS, Raised, assert_nothing_left, begin_together, until_queued

from holdfast import Busy, Lock, NotLocked, WouldDeadlock


def exclusive_is_refused(path: str) -> bool:
    hold = Lock(path, fair=False).try_acquire()
    if hold is not None:
        hold.release()
    return hold is None


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
@pytest.mark.parametrize("same_object", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_shares_of_one_thread_are_independent(start_peer, path, order, same_object, keep):
    lock = Lock(path, shared=True, keep=keep)
    other = lock if same_object else Lock(path, shared=True, keep=keep)
    holds = [lock.acquire(), other.acquire()]
    peer = start_peer(path=path)

    holds[order[0]].release()

    with pytest.raises(NotLocked):
        holds[order[0]].release()
    holds[order[1]].check()
    assert os.path.exists(path)
    assert peer.do("Lock(path).try_acquire()") is None
    holds[order[1]].release()
    peer.do("Lock(path).acquire(timeout=0).release()")
    assert_nothing_left(path)


def test_two_shares_of_two_threads_are_independent(start_peer, path):
    lock = Lock(path, shared=True)
    held, let_go = threading.Event(), threading.Event()

    def share() -> None:
        with lock:
            held.set()
            let_go.wait(30)

    thread = threading.Thread(target=share)
    with lock as mine:
        thread.start()
        assert held.wait(30)
        let_go.set()
        thread.join()
        mine.check()
        assert exclusive_is_refused(path)
    assert_nothing_left(path)


def test_a_share_inside_a_share_by_the_same_object_is_left_one_by_one(path):
    lock = Lock(path, shared=True)
    with lock as outer:
        with lock as inner:
            assert inner is not outer
        outer.check()
        assert exclusive_is_refused(path)
    assert_nothing_left(path)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_last_sharer_removes_the_file(start_peer, path, order):
    peers = [start_peer(path=path) for _ in range(3)]
    for peer in peers:
        peer.do("hold = Lock(path, shared=True).acquire()")
    inode = os.stat(path).st_ino
    for number in order[:2]:
        peers[number].do("hold.release()")
        assert os.stat(path).st_ino == inode
        assert exclusive_is_refused(path)
    peers[order[2]].do("hold.release()")
    assert_nothing_left(path)


def test_the_last_sharer_to_keep_the_file_leaves_it(path):
    with Lock(path, shared=True):
        keeper = Lock(path, shared=True, keep=True).acquire()
    keeper.release()
    assert os.path.exists(path)


SHARE_IN_A_LOOP = """
lock = Lock(path, shared=True, keep=keep, fair=fair)
refused = 0
for _ in range(tries):
    hold = lock.try_acquire()
    if hold is None:
        refused += 1
    else:
        hold.release()
"""


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "unfair"])
@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
def test_a_try_to_share_never_fails_among_sharers(start_peer, path, keep, fair):
    peers = [start_peer(path=path, keep=keep, fair=fair, tries=5_000) for _ in range(4)]
    begin_together(peers, SHARE_IN_A_LOOP)
    for peer in peers:
        peer.answer()
    assert [peer.do("refused") for peer in peers] == [0, 0, 0, 0]
    if keep:
        os.unlink(path)
    assert_nothing_left(path)


def test_a_try_to_share_never_fails_while_others_look_at_the_status(start_peer, path):
    peers = [start_peer(path=path, keep=True, fair=True, tries=5_000) for _ in range(2)]
    onlooker = start_peer(path=path)
    onlooker.do("Lock(path).status()")
    onlooker.begin("for _ in range(2_000): Lock(path).status()")
    begin_together(peers, SHARE_IN_A_LOOP)
    for peer in peers:
        peer.answer()
    onlooker.answer()
    assert [peer.do("refused") for peer in peers] == [0, 0]
    os.unlink(path)
    assert_nothing_left(path)


def test_a_try_to_share_never_fails_among_threads_that_share(path):
    refused = []
    start = threading.Barrier(4)

    def share() -> None:
        lock = Lock(path, shared=True)
        start.wait()
        for _ in range(1_000):
            hold = lock.try_acquire()
            if hold is None:
                refused.append(1)
            else:
                hold.release()

    threads = [threading.Thread(target=share) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == []
    assert_nothing_left(path)


@pytest.mark.parametrize("way", ["blocking", "asyncio"])
def test_a_waiting_writer_stops_later_readers_and_goes_first(start_peer, path, way):
    writer, reader = start_peer(path=path, way=way), start_peer(path=path, way=way)
    with Lock(path, shared=True):
        writer.begin("hold = acquire_by(way, Lock(path))")
        writer.until_waiting(path)
        assert reader.do("Lock(path, shared=True).try_acquire()") is None
        with pytest.raises(Raised, match="Busy"):
            reader.do("Lock(path, shared=True).acquire(timeout=0)")
        with pytest.raises(Raised, match="Timeout"):
            reader.do("acquire_by(way, Lock(path, shared=True), timeout=0.05)")
        reader.begin("hold = acquire_by(way, Lock(path, shared=True))")
        reader.until_waiting(path)
    writer.answer()
    reader.until_waiting(path)
    writer.do("hold.release()")
    reader.answer()
    reader.do("hold.release()")
    assert_nothing_left(path)


def test_readers_behind_a_writer_share_again_once_it_is_done(start_peer, path):
    peers = [start_peer(path=path) for _ in range(4)]
    with Lock(path):
        for peer in peers:
            peer.begin("hold = Lock(path, shared=True).acquire()")
            peer.until_waiting(path)
    for peer in peers:  # nobody has released yet: all of them are in together
        peer.answer()
    for peer in peers:
        peer.do("hold.release()")
    assert_nothing_left(path)


READ_UNTIL_TOLD = """
hold.release()
while not os.path.exists(path + "-end"):
    with lock:
        time.sleep(0.002)  # long enough for the other readers to come in: it is never free by itself
"""

WRITE_FORTY_TIMES = """
for _ in range(40):
    with Lock(path, keep=keep):
        pass
"""


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
def test_no_writer_starves_among_readers(start_peer, path, keep):
    readers = [start_peer(path=path, keep=keep) for _ in range(6)]
    writers = [start_peer(path=path, keep=keep) for _ in range(2)]
    for reader in readers:
        reader.do("lock = Lock(path, shared=True, keep=keep); hold = lock.acquire()")
    begin_together(readers, READ_UNTIL_TOLD)
    begin_together(writers, WRITE_FORTY_TIMES)
    for writer in writers:  # each wait is for the six readers and the other writer. Unfair, it would hardly ever end
        writer.answer()
    open(path + "-end", "w").close()
    for reader in readers:
        reader.answer()
    os.unlink(path + "-end")
    if keep:
        os.unlink(path)
    assert_nothing_left(path)


@pytest.mark.parametrize("way", WAYS)
def test_sharing_again_while_a_writer_waits_is_no_deadlock(start_peer, path, way):
    reader, writer = start_peer(path=path, way=way), start_peer(path=path)
    reader.do("lock = Lock(path, shared=True); outer = acquire_by(way, lock)")
    writer.begin("hold = Lock(path).acquire()")
    writer.until_waiting(path)

    reader.do("inner = acquire_by(way, lock)")
    reader.do("another = lock.try_acquire()")
    for hold in ("outer", "another", "inner"):
        assert not writer.has_answered()
        reader.do(f"{hold}.release()")

    writer.answer()
    writer.do("hold.release()")
    assert_nothing_left(path)


def test_sharing_again_in_the_same_task_while_a_writer_waits_is_no_deadlock(start_peer, path):
    reader, writer = start_peer(path=path), start_peer(path=path)
    reader.begin(
        """
import asyncio

async def share_twice():
    async with Lock(path, shared=True):
        until(lambda: tickets(path))
        async with Lock(path, shared=True):
            pass

asyncio.run(share_twice())
"""
    )
    writer.do("until(lambda: Lock(path).status().held)")
    writer.begin("hold = Lock(path).acquire()")
    reader.answer()
    writer.answer()
    writer.do("hold.release()")
    assert_nothing_left(path)


@pytest.mark.parametrize("timeout", [None, 5])
def test_exclusive_after_shared_by_the_same_thread_would_deadlock(path, timeout, waits):
    with Lock(path, shared=True) as hold:
        with pytest.raises(WouldDeadlock, match="already"):
            Lock(path).acquire(timeout=timeout)
        assert waits == [], "it is refused at once"
        assert Lock(path).try_acquire() is None
        with pytest.raises(Busy):
            Lock(path).acquire(timeout=0)
        hold.check()
    assert_nothing_left(path)


def test_shared_after_exclusive_by_the_same_thread_would_deadlock(path):
    with Lock(path) as hold:
        with pytest.raises(WouldDeadlock, match="already"):
            Lock(path, shared=True).acquire()
        assert Lock(path, shared=True).try_acquire() is None
        hold.check()
    assert_nothing_left(path)


def test_exclusive_after_shared_by_another_thread_waits(path):
    done = threading.Event()

    def write() -> None:
        with Lock(path, timeout=30):
            done.set()

    thread = threading.Thread(target=write)
    with Lock(path, shared=True):
        thread.start()
        until_queued(path, 1)
        assert not done.is_set()
    thread.join()
    assert done.is_set()
    assert_nothing_left(path)
