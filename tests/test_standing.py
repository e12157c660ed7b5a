"""A lock that leaves its file open between two holds excludes everybody, whatever happens to the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support import Peer, descriptors, in_child, until_queued

from holdfast import Busy, Lock, LockLost, system
from holdfast.locks.standing import StandingLock

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def lock(path: str) -> StandingLock:
    made = StandingLock(path, timeout=None, mode=0o644)
    made.acquire().release()
    return made


def open_files(path: str) -> int:
    return sum(target == path for target in descriptors().values())


def held(path: str) -> bool:
    hold = Lock(path, keep=True).try_acquire()
    if hold is not None:
        hold.release()
    return hold is None


def test_the_file_stays_open(lock: StandingLock, path: str) -> None:
    for _ in range(3):
        assert open_files(path) == 1
        with lock:
            assert held(path)
        assert not held(path)
        assert lock.take()
        assert held(path) and lock.try_acquire() is None and not lock.take()
        lock.give_back()
        assert not held(path)
    lock.close()
    assert open_files(path) == 0 and not lock.take()
    lock.acquire().release()
    del lock


def test_it_is_closed_with_the_object(path: str) -> None:
    lock = StandingLock(path, timeout=None, mode=0o644)
    lock.acquire().release()
    assert open_files(path) == 1
    del lock
    assert open_files(path) == 0


def test_others_exclude_it(lock: StandingLock, path: str) -> None:
    with Lock(path, keep=True):
        assert not lock.take() and lock.try_acquire() is None
        with pytest.raises(Busy):
            lock.acquire(0)
    assert lock.take()
    lock.give_back()


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_a_file_that_was_replaced_is_opened_anew(way: str, lock: StandingLock, path: str) -> None:
    os.unlink(path)
    if way == "replaced":
        hold = Lock(path, keep=True).acquire()
        assert not lock.take() and lock.try_acquire() is None
        hold.release()
    assert not lock.take()
    with lock:
        assert held(path)
    assert lock.take()
    lock.give_back()


def test_who_loses_it_is_told(lock: StandingLock, path: str) -> None:
    assert lock.take()
    os.unlink(path)
    with pytest.raises(LockLost):
        lock.give_back()
    assert open_files(path) == 0
    lock.acquire().release()


def test_waiters_are_woken(lock: StandingLock, path: str, start_peer: Callable[..., Peer]) -> None:
    for take in (True, False):
        peer = start_peer(path=path)
        peer.do("look_only_when_told()")
        hold = None
        if take:
            assert lock.take()
        else:
            hold = lock.acquire()
        peer.begin("Lock(path, keep=True).acquire(timeout=20).release()")
        until_queued(path, 1)
        peer.until_waiting(path)
        if hold is None:
            lock.give_back()
        else:
            hold.release()
        peer.answer()
        lock.acquire().release()


def test_who_queues_comes_first(lock: StandingLock, path: str, start_peer: Callable[..., Peer]) -> None:
    hold = lock.acquire()
    peer = start_peer(path=path)
    peer.begin("hold = Lock(path, keep=True).acquire()")
    until_queued(path, 1)
    hold.release()
    assert not lock.take()
    peer.answer()
    peer.do("hold.release()")


def test_a_forked_child_has_nothing_of_it(lock: StandingLock, path: str) -> None:
    def child() -> list[object]:
        return [open_files(path), lock.take(), lock.try_acquire() is None]

    assert lock.take()
    assert in_child(child) == [0, False, True]
    assert held(path), "the child did not release it"
    lock.give_back()
    assert in_child(lambda: [lock.try_acquire() is not None, open_files(path)]) == [True, 1]
    assert lock.take()
    lock.give_back()


@pytest.mark.parametrize("queued", [False, True])
def test_taken_again_before_it_was_put_away(
    lock: StandingLock, path: str, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    """By another thread, as soon as it was unlocked. What that one has is not ours to put away."""
    assert lock.take()
    access = system.access

    def meanwhile(*_: object) -> bool:
        monkeypatch.setattr(system, "access", access)
        lock.acquire().release()  # opens another one, and leaves it
        assert lock.take()
        return queued

    monkeypatch.setattr(system, "access", meanwhile)
    lock.give_back()
    assert held(path) and lock._taken is not None
    lock.give_back()
    assert not held(path) and open_files(path) <= 1


def test_a_child_forgets_what_another_thread_had_taken(lock: StandingLock) -> None:
    assert lock.take()

    def child() -> object:
        lock.close()
        return lock._taken

    assert in_child(child) is None
    lock.give_back()
