"""`Lock` on Windows: what it promises everywhere, with real processes."""

from __future__ import annotations

import _thread
import os
import time

import pytest
from peers import Peer

import holdfast
from holdfast import Lock, process
from holdfast.system import windows

PROCESSES = 4


@pytest.mark.parametrize(("keep", "times"), [(False, 200), (True, 50)], ids=["ephemeral", "kept"])
def test_no_count_is_lost_between_processes(path, tmp_path, start_peer, keep, times):
    counter = tmp_path / "counter"
    counter.write_text("0")
    peers = [start_peer(path=path, counter=str(counter)) for _ in range(PROCESSES)]
    for peer in peers:
        peer.begin(f"count(Lock(path, keep={keep}), counter, {times})")
    for peer in peers:
        peer.answer()
    assert int(counter.read_text()) == PROCESSES * times
    assert os.path.exists(path) == keep


def test_no_count_is_lost_when_half_of_the_processes_wait_with_a_timeout(path, tmp_path, start_peer):
    counter = tmp_path / "counter"
    counter.write_text("0")
    peers = [start_peer(path=path, counter=str(counter)) for _ in range(PROCESSES)]
    for i, peer in enumerate(peers):
        peer.begin(f"count(Lock(path, timeout={60 if i % 2 else None}), counter, 25)")
    for peer in peers:
        peer.answer()
    assert int(counter.read_text()) == PROCESSES * 25
    assert not os.path.exists(path)


def test_a_held_lock_excludes_every_process(path, start_peer):
    peer = start_peer(path=path)
    with Lock(path) as hold:
        hold.check()
        assert peer.do("Lock(path).try_acquire() is None")
        assert peer.do("Lock(path, shared=True).try_acquire() is None")
        assert Lock(path).try_acquire() is None
    assert not os.path.exists(path)
    assert peer.do("Lock(path).acquire(timeout=0).release()") is None
    assert not os.path.exists(path)


def test_shared_holders_hold_the_lock_together_and_exclude_an_exclusive_one(path, start_peer):
    peer = start_peer(path=path)
    first, second = Lock(path, shared=True).acquire(timeout=0), Lock(path, shared=True).acquire(timeout=0)
    peer.do("hold = Lock(path, shared=True).acquire(timeout=0)")
    first.release()
    assert Lock(path).try_acquire() is None
    second.release()
    assert Lock(path).try_acquire() is None
    peer.do("hold.release()")
    assert not os.path.exists(path)
    Lock(path).acquire(timeout=0).release()


def test_shared_holders_that_come_and_go_never_find_the_lock_busy(path, start_peer):
    peers = [start_peer(path=path) for _ in range(3)]
    with Lock(path, shared=True):
        for peer in peers:
            peer.begin("for _ in range(30): Lock(path, shared=True).acquire(timeout=0).release()")
        for peer in peers:
            peer.answer()
    assert not os.path.exists(path)


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_waiter_acquires_the_lock_when_its_holder_releases(path, start_peer, timeout):
    peer = start_peer(path=path)
    with Lock(path):
        peer.begin(f"hold = Lock(path).acquire(timeout={timeout})")
        peer.until_waiting()
    peer.answer()
    assert Lock(path).try_acquire() is None
    peer.do("hold.release()")
    assert not os.path.exists(path)


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("timeout", [None, 60])
def test_a_waiter_acquires_the_lock_when_its_holder_is_killed(path, start_peer, shared, timeout):
    holder, waiter = start_peer(path=path), start_peer(path=path)
    holder.do(f"hold = Lock(path, shared={shared}).acquire()")
    waiter.begin(f"hold = Lock(path).acquire(timeout={timeout})")
    waiter.until_waiting()
    holder.kill()
    waiter.answer()
    assert Lock(path).try_acquire() is None
    waiter.do("hold.release()")
    assert not os.path.exists(path)


def test_a_timeout_names_the_holder(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()")
    began = time.monotonic()
    with pytest.raises(holdfast.Timeout, match=r"not acquired within 0\.3 s: held by a process that"):
        Lock(path).acquire(timeout=0.3)
    assert time.monotonic() - began >= 0.3
    with pytest.raises(holdfast.Busy, match="busy: held by"):
        Lock(path, timeout=0).acquire()
    assert not process.descriptors and not windows._locked
    peer.do("hold.release()")


def test_ctrl_c_ends_a_wait_and_leaves_nothing(path, start_peer, monkeypatch):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()")

    def pause(seconds):
        _thread.interrupt_main()
        time.sleep(seconds)

    monkeypatch.setattr(windows, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        Lock(path).acquire()
    assert not process.descriptors and not process.registry.lines and not windows._locked
    peer.do("hold.release()")
    assert not os.path.exists(path)


def test_a_file_with_content_is_refused_and_left_alone(path):
    with open(path, "w") as file:
        file.write("precious")
    for lock in (Lock(path), Lock(path, shared=True), Lock(path, keep=True), Lock(path, timeout=5)):
        with pytest.raises(holdfast.NotALockFile):
            lock.acquire()
    with open(path) as file:
        assert file.read() == "precious"


def test_a_directory_is_refused_and_left_alone(tmp_path):
    with pytest.raises(holdfast.NotALockFile):
        Lock(tmp_path).acquire()
    with pytest.raises(holdfast.UnsafePath):
        Lock(f"{tmp_path}/")
    assert tmp_path.is_dir()


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; make it first"):
        Lock(tmp_path / "no" / "x.lock").acquire()


def test_a_caller_that_would_wait_for_itself_is_refused_under_any_spelling(path):
    folder, name = os.path.split(path)
    with Lock(path):
        for spelling in (path, path.upper(), f"{folder}/.\\{name}", f"{folder}\\..\\{os.path.basename(folder)}/{name}"):
            for shared in (False, True):
                with pytest.raises(holdfast.WouldDeadlock):
                    Lock(spelling, shared=shared, timeout=5).acquire()
    with Lock(path, shared=True), pytest.raises(holdfast.WouldDeadlock):
        Lock(path).acquire()
    assert not os.path.exists(path)


def test_a_path_without_folder_is_fixed_when_the_lock_is_made(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drive = os.path.splitdrive(tmp_path)[0]
    locks = [Lock("x.lock"), Lock(f"{drive}x.lock")]
    monkeypatch.chdir(tmp_path.parent)
    for lock in locks:
        with lock:
            assert os.path.exists(path)


def test_a_symlink_stands_for_its_target(path, tmp_path):
    link = tmp_path / "link"
    try:
        link.symlink_to(path)
    except OSError:
        pytest.skip("no symbolic links here")
    if not link.is_symlink():
        pytest.skip("no symbolic links here")
    with Lock(link):
        assert Lock(path).try_acquire() is None
        with pytest.raises(holdfast.WouldDeadlock):
            Lock(path).acquire()
    assert link.is_symlink() and not os.path.exists(path)


def test_a_hold_is_released_once(path):
    hold = Lock(path).acquire()
    hold.release()
    with pytest.raises(holdfast.NotLocked):
        hold.release()


def test_a_forgotten_hold_is_released_with_a_warning(path):
    with pytest.warns(ResourceWarning, match="never released"):
        Lock(path).acquire()
    assert not os.path.exists(path)


def test_a_child_does_not_inherit_the_lock(path, start_peer):
    with Lock(path):
        child = Peer()
    try:
        Lock(path).acquire(timeout=0).release()
    finally:
        child.end()


def test_status_shows_a_lock_as_held_and_as_free(path, start_peer):
    peer = start_peer(path=path)
    assert not Lock(path).status().held
    for shared in (False, True):
        peer.do(f"hold = Lock(path, shared={shared}).acquire()")
        status = Lock(path).status()
        assert status.held and len(status.holders) == 1 and status.since is not None
        peer.do("hold.release()")
        assert not Lock(path).status().held
    with Lock(path, keep=True):
        assert Lock(path).status().held
    assert os.path.exists(path) and not Lock(path).status().held


def test_status_shows_the_time_of_the_acquire_of_an_older_file(path):
    with open(path, "w"):
        pass
    os.utime(path, (1, 1))
    began = time.time()
    with Lock(path):
        assert Lock(path).status().since > began - 1


def test_status_does_not_acquire_the_lock(path, start_peer):
    Lock(path, keep=True).acquire().release()
    peer = start_peer(path=path)
    peer.begin("for _ in range(100): Lock(path).status()")
    for _ in range(100):
        Lock(path, keep=True).acquire(timeout=0).release()
    peer.answer()
