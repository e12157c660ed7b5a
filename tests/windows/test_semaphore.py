"""`Semaphore` on Windows."""

from __future__ import annotations

import os
import time

import pytest

import holdfast
from holdfast import Semaphore, process
from holdfast.system import windows


def test_as_many_processes_hold_a_semaphore_as_it_has_permits(path, start_peer):
    peer = start_peer(path=path)
    first = Semaphore(path, 2).acquire(timeout=0)
    peer.do("hold = Semaphore(path, 2).acquire(timeout=0)")
    assert Semaphore(path, 2).try_acquire() is None
    assert peer.do("Semaphore(path, 2).try_acquire() is None")
    first.release()
    second = Semaphore(path, 2).acquire(timeout=0)
    peer.do("hold.release()")
    assert os.path.exists(path)
    second.release()
    assert not os.path.exists(path)


def test_one_permit_loses_no_count(path, tmp_path, start_peer):
    counter = tmp_path / "counter"
    counter.write_text("0")
    peers = [start_peer(path=path, counter=str(counter)) for _ in range(4)]
    for peer in peers:
        peer.begin("count(Semaphore(path, 1), counter, 25)")
    for peer in peers:
        peer.answer()
    assert int(counter.read_text()) == 100
    assert not os.path.exists(path)


def test_never_more_than_there_are_permits(path, tmp_path, start_peer):
    """Each holder has a file of its own in a folder and counts the files there."""
    inside = tmp_path / "inside"
    inside.mkdir()
    peers = [start_peer(path=path, inside=str(inside), me=f"{inside}/{i}") for i in range(4)]
    for peer in peers:
        peer.do("import os")
        peer.do(
            "def most(times):\n"
            "    seen = 0\n"
            "    for _ in range(times):\n"
            "        with Semaphore(path, 2):\n"
            "            open(me, 'x').close()\n"
            "            seen = max(seen, len(os.listdir(inside)))\n"
            "            os.unlink(me)\n"
            "    return seen"
        )
    for peer in peers:
        peer.begin("most(25)")
    assert max(peer.answer() for peer in peers) <= 2
    assert not os.path.exists(path)


def test_a_killed_holder_frees_its_permit(path, start_peer):
    holder, waiter = start_peer(path=path), start_peer(path=path)
    holder.do("hold = Semaphore(path, 1).acquire()")
    waiter.begin("hold = Semaphore(path, 1).acquire()")
    waiter.until_waiting()
    holder.kill()
    waiter.answer()
    assert Semaphore(path, 1).try_acquire() is None
    waiter.do("hold.release()")
    assert not os.path.exists(path)


def test_a_deadline_passes(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Semaphore(path, 1).acquire()")
    began = time.monotonic()
    with pytest.raises(holdfast.Timeout, match=r"not acquired within 0\.2 s"):
        Semaphore(path, 1).acquire(timeout=0.2)
    assert time.monotonic() - began >= 0.2
    assert not process.descriptors and not windows._locked
    peer.do("hold.release()")


def test_another_number_of_permits_is_refused_while_a_permit_is_held(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Semaphore(path, 2).acquire()")
    with pytest.raises(holdfast.Unsupported, match=r"with 2 permits, and 3 were asked for"):
        Semaphore(path, 3).acquire()
    peer.do("hold.release()")


def test_a_file_with_other_content_is_refused_and_left_alone(path):
    with open(path, "w") as file:
        file.write("precious")
    with pytest.raises(holdfast.NotALockFile):
        Semaphore(path, 2).acquire()
    with open(path) as file:
        assert file.read() == "precious"


def test_a_caller_that_would_wait_for_itself_is_refused(path):
    with Semaphore(path, 1), pytest.raises(holdfast.WouldDeadlock):
        Semaphore(path, 1).acquire()


def test_status_shows_a_semaphore_as_held_while_no_permit_is_free(path, start_peer):
    peer, semaphore = start_peer(path=path), Semaphore(path, 2)
    assert not semaphore.status().held
    peer.do("hold = Semaphore(path, 2).acquire()")
    assert semaphore.status().holders and not semaphore.status().held
    with semaphore:
        assert semaphore.status().held
    assert not semaphore.status().held
    peer.do("hold.release()")
    assert not semaphore.status().holders and not semaphore.status().held
