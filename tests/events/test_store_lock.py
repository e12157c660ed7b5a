"""A lock that leaves its file open between two holds excludes everybody, whatever happens to the file."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from support import Peer, descriptors, in_child, until_queued

from holdfast import Busy, Lock, LockLost, system
from holdfast.events.log.store_lock import StoreLock
from holdfast.locks.path_lock import OpenFile

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def lock(path: str) -> StoreLock:
    made = StoreLock(path, timeout=None, mode=0o644)
    made.acquire().release()
    return made


def take(lock: StoreLock) -> OpenFile:
    file = lock.take()
    assert file is not None
    return file


def open_files(path: str) -> int:
    return sum(target == path for target in descriptors().values())


def held(path: str) -> bool:
    hold = Lock(path, keep=True).try_acquire()
    if hold is not None:
        hold.release()
    return hold is None


def test_the_file_stays_open(lock: StoreLock, path: str) -> None:
    for _ in range(3):
        assert open_files(path) == 1
        with lock:
            assert held(path)
        assert not held(path)
        file = take(lock)
        assert held(path) and lock.try_acquire() is None and lock.take() is None
        lock.give_back(file)
        assert not held(path)
    lock.close()
    assert open_files(path) == 0 and not lock.take()
    lock.acquire().release()
    del lock


def test_dropping_the_lock_object_closes_the_file(path: str) -> None:
    lock = StoreLock(path, timeout=None, mode=0o644)
    lock.acquire().release()
    assert open_files(path) == 1
    del lock
    assert open_files(path) == 0


def test_a_lock_on_the_same_path_excludes_the_store_lock(lock: StoreLock, path: str) -> None:
    with Lock(path, keep=True):
        assert not lock.take() and lock.try_acquire() is None
        with pytest.raises(Busy):
            lock.acquire(0)
    lock.give_back(take(lock))


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_a_file_that_was_replaced_is_opened_anew(way: str, lock: StoreLock, path: str) -> None:
    os.unlink(path)
    if way == "replaced":
        hold = Lock(path, keep=True).acquire()
        assert not lock.take() and lock.try_acquire() is None
        hold.release()
        lock.close()  # the attempt has opened the new file
    assert lock.take() is None
    with lock:
        assert held(path)
    lock.give_back(take(lock))


def test_give_back_raises_lock_lost_after_the_file_was_removed(lock: StoreLock, path: str) -> None:
    file = take(lock)
    os.unlink(path)
    with pytest.raises(LockLost):
        lock.give_back(file)
    assert open_files(path) == 0
    lock.acquire().release()


def test_give_back_and_release_wake_a_waiter(lock: StoreLock, path: str, start_peer: Callable[..., Peer]) -> None:
    for takes in (True, False):
        peer = start_peer(path=path)
        peer.do("look_only_when_told()")
        file = take(lock) if takes else None
        hold = None if takes else lock.acquire()
        peer.begin("Lock(path, keep=True).acquire(timeout=30).release()")
        until_queued(path, 1)
        peer.until_waiting(path)
        if file is not None:
            lock.give_back(file)
        elif hold is not None:
            hold.release()
        peer.answer()
        lock.acquire().release()


def test_a_waiter_in_the_queue_comes_before_a_newcomer(
    lock: StoreLock, path: str, start_peer: Callable[..., Peer]
) -> None:
    hold = lock.acquire()
    peer = start_peer(path=path)
    peer.begin("hold = Lock(path, keep=True).acquire()")
    until_queued(path, 1)
    hold.release()
    assert not lock.take()
    peer.answer()
    peer.do("hold.release()")


def test_a_forked_child_does_not_hold_the_store_lock(lock: StoreLock, path: str) -> None:
    def child() -> list[object]:
        return [open_files(path), lock.take(), lock.try_acquire() is None]

    file = take(lock)
    assert in_child(child) == [0, None, True]
    assert held(path), "the child did not release it"
    lock.give_back(file)
    assert in_child(lambda: [lock.try_acquire() is not None, open_files(path)]) == [True, 1]
    lock.give_back(take(lock))


@pytest.mark.parametrize("queued", [False, True])
def test_giving_a_file_back_leaves_the_lock_of_another_thread_alone(
    lock: StoreLock, path: str, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    """By another thread, as soon as it was unlocked. That thread's file is not ours to put away."""
    file = take(lock)
    access = system.access
    others: list[OpenFile] = []

    def meanwhile(*_: object) -> bool:
        monkeypatch.setattr(system, "access", access)
        lock.acquire().release()  # opens another file, and leaves it open
        others.append(take(lock))
        return queued

    monkeypatch.setattr(system, "access", meanwhile)
    lock.give_back(file)
    assert held(path)
    lock.give_back(others[0])
    assert not held(path) and open_files(path) <= 1


def test_an_interrupted_release_does_not_close_the_lock_of_the_next_holder(
    lock: StoreLock, path: str, start_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is kept already, and another thread holds the lock through it."""
    hold, others = lock.acquire(), []
    put_away = type(lock._engine).put_away

    def interrupted(engine: object, file: object, reusable: bool) -> None:
        put_away(engine, file, reusable)  # type: ignore[arg-type]
        monkeypatch.undo()
        thread = threading.Thread(target=lambda: others.append(lock.acquire()))
        thread.start()
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(type(lock._engine), "put_away", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hold.release()
    others[0].check()
    assert start_peer(path=path).do("Lock(path, keep=True).try_acquire() is None")
    others[0].release()
