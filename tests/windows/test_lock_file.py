"""`LockFile` on Windows: published by a move that does not replace, alive as long as a byte is locked."""

from __future__ import annotations

import os

import pytest

import holdfast
from holdfast import LockFile, system
from holdfast.locks import record


def test_the_file_names_its_holder_and_is_removed_at_the_release(path):
    with LockFile(path, tag="deploy", timeout=0) as hold:
        with open(path, "rb") as file:
            content = file.read()
        assert content.startswith(b"pid=%d\ntimestamp=" % os.getpid())
        assert record.parse(content).tag == "deploy"
        assert record.parse(content).token == hold.token
        assert LockFile(path).status().alive
        assert LockFile(path).try_acquire() is None
    assert os.listdir(os.path.dirname(path)) == []


def test_processes_take_turns(path, tmp_path, start_peer):
    counter = tmp_path / "counter"
    counter.write_text("0")
    peers = [start_peer(path=path, counter=str(counter)) for _ in range(3)]
    for peer in peers:
        peer.begin("count(LockFile(path, durable=False), counter, 20)")
    for peer in peers:
        peer.answer()
    assert int(counter.read_text()) == 60
    assert os.listdir(tmp_path) == ["counter"]


def test_the_lock_of_a_killed_holder_is_replaced_at_once_and_that_of_a_living_one_never(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = LockFile(path).acquire()")
    assert LockFile(path, stale_after=0).try_acquire() is None
    peer.kill()
    with LockFile(path, timeout=10):
        pass


def test_one_of_many_processes_replaces_a_stale_lock_file(path, tmp_path, start_peer):
    peers = [start_peer(path=path) for _ in range(3)]
    for _ in range(10):
        with open(path, "wb") as file:
            file.write(b"pid=1\ntimestamp=1\n")
        for peer in peers:
            peer.begin("hold = LockFile(path, stale='old').try_acquire()")
        for peer in peers:
            peer.answer()
        winners = [peer for peer in peers if peer.do("hold is not None")]
        assert len(winners) <= 1
        for peer in winners:
            peer.do("hold.release()")
        if os.path.exists(path):
            os.unlink(path)


def test_a_lock_that_was_broken_is_lost(path, start_peer):
    peer = start_peer(path=path)
    hold = LockFile(path).acquire()
    peer.do("import logging")
    peer.do("logging.disable()")  # it logs that it breaks the lock
    peer.do("LockFile(path).break_()")
    peer.do("logging.disable(0)")
    peer.do("hold = LockFile(path).acquire(timeout=10)")
    assert hold.lost
    with pytest.raises(holdfast.LockLost):
        hold.release()
    peer.do("hold.check()")
    peer.do("hold.release()")


def test_foreign_records_go_by_age_and_by_pid(path):
    with open(path, "wb") as file:
        file.write(b"pid=%d\ntimestamp=1\n" % os.getpid())
    assert LockFile(path, stale="dead-and-old").try_acquire() is None
    assert system.process_exists(os.getpid())
    assert not system.process_exists(0xFFFFFFF0)
    LockFile(path).acquire(timeout=0).release()


def test_fence_and_heartbeat(path):
    lock = LockFile(path, fence=True, heartbeat=60)
    with lock as hold:
        first = hold.token
        hold.renew()
    with lock as hold:
        assert hold.token > first
    assert os.listdir(os.path.dirname(path)) == ["x.lock.fence"]


@pytest.mark.parametrize("name", [r"sub\..\..\x.lock", "sub/../../x.lock", r"..\x.lock", r"C:..\x.lock"])
def test_a_path_that_climbs_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (name, os.path.join(tmp_path, name)):
        with pytest.raises(holdfast.UnsafePath):
            LockFile(path)


def test_a_name_with_dots_in_it_is_fine(tmp_path):
    with LockFile(tmp_path / "a..b.lock", timeout=0):
        assert os.listdir(tmp_path) == ["a..b.lock"]
