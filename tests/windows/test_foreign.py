"""Other programs: those that lock the whole file with LockFileEx (Rust), and those that do not share it (.NET)."""

from __future__ import annotations

import os
import time

import pytest
from peers import ALL, LOCK_VIOLATION, NONE, SHARING_VIOLATION, close_handle, lock_whole_file, open_sharing

import holdfast
from holdfast import Lock, LockFile, Semaphore, process
from holdfast.locks import path_lock
from holdfast.system import windows

TAKE = {
    "locked": "handle = open_sharing(path, ALL); lock_whole_file(handle)",
    "unshared": "handle = open_sharing(path, NONE)",
}
MAKE = {"exclusive": Lock, "shared": lambda path: Lock(path, shared=True), "semaphore": lambda path: Semaphore(path, 2)}


@pytest.fixture(params=TAKE)
def foreigner(request, path, start_peer):
    """A process with another program's lock on the path."""
    peer = start_peer(path=path)
    peer.do(TAKE[request.param])
    return peer


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def test_another_programs_lock_is_busy_to_us(path, foreigner, make):
    assert make(path).try_acquire() is None
    began = time.monotonic()
    with pytest.raises(holdfast.Timeout, match=r"not acquired within 0\.2 s: (1 of 2 permits )?(held|shared) by"):
        make(path).acquire(timeout=0.2)
    assert time.monotonic() - began >= 0.2
    assert make(path).status().held
    assert not process.descriptors and not windows._locked
    foreigner.do("close_handle(handle)")
    make(path).acquire(timeout=0).release()
    assert not os.path.exists(path)


@pytest.fixture
def no_patience(monkeypatch):
    """A process that mistakes another program's lock for the removal of the file would pause here."""

    def pause(seconds):
        raise AssertionError("paused")

    for module in (windows, path_lock):
        monkeypatch.setattr(module, "sleep", pause)


def test_another_programs_lock_is_not_mistaken_for_a_removal(path, foreigner, make, no_patience):
    assert make(path).try_acquire() is None


def test_another_programs_shared_lock_is_not_mistaken_for_a_removal(path, no_patience):
    handle = open_sharing(path, ALL)
    lock_whole_file(handle, shared=True)
    assert Lock(path).try_acquire() is None
    close_handle(handle)


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("ours", ["Lock(path)", "Lock(path, shared=True)", "Semaphore(path, 2)"])
def test_a_waiter_acquires_the_lock_when_another_program_ends(path, foreigner, start_peer, ours, timeout):
    peer = start_peer(path=path)
    peer.begin(f"hold = {ours}.acquire(timeout={timeout})")
    peer.until_waiting()
    foreigner.kill()
    peer.answer()
    peer.do("hold.release()")
    assert not os.path.exists(path)


def test_another_programs_shared_lock_admits_sharers_only(path):
    handle = open_sharing(path, ALL)
    lock_whole_file(handle, shared=True)
    assert Lock(path).try_acquire() is None
    with pytest.raises(holdfast.Timeout):
        Lock(path).acquire(timeout=0.1)
    hold = Lock(path, shared=True).acquire(timeout=0)
    hold.release()
    close_handle(handle)
    Lock(path).acquire(timeout=0).release()
    assert not os.path.exists(path)


def test_our_lock_is_busy_to_other_programs(path, make):
    with make(path):
        with pytest.raises(OSError, check=lambda error: error.winerror == SHARING_VIOLATION):
            open_sharing(path, NONE)
        handle = open_sharing(path, ALL)
        with pytest.raises(OSError, check=lambda error: error.winerror == LOCK_VIOLATION):
            lock_whole_file(handle)
    lock_whole_file(handle)
    close_handle(handle)


def test_other_programs_can_share_with_our_sharers(path):
    handle = open_sharing(path, ALL)
    with Lock(path, shared=True):
        lock_whole_file(handle, shared=True)
    close_handle(handle)


def test_a_program_that_does_not_share_deletion_keeps_the_file(path):
    """As Python's own `open` does."""
    with Lock(path):
        handle = open_sharing(path, ALL & ~4)
    assert os.path.exists(path)
    close_handle(handle)
    Lock(path).acquire(timeout=0).release()
    assert not os.path.exists(path)


def test_a_lock_file_that_another_program_keeps_to_itself_is_busy(path):
    handle = open_sharing(path, NONE)
    lock = LockFile(path)
    assert lock.try_acquire() is None
    assert lock.status().held
    assert not lock.clean()
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.1)
    close_handle(handle)
