"""A child holds nothing of its parent's, however it was made, and cannot give away what its parent has."""

from __future__ import annotations

import os
import signal

import pytest
from support import assert_nothing_left, descriptors, is_alive, state_of, tickets, until

from holdfast import Lock, Semaphore

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this platform")

LOCKS = {
    "exclusive": "Lock(path)",
    "kept": "Lock(path, keep=True)",
    "shared": "Lock(path, shared=True)",
    "semaphore": "Semaphore(path, 1)",
}
each_kind = pytest.mark.parametrize("kind", LOCKS)
each_method = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])


def rival(kind: str, path: str) -> Lock | Semaphore:
    """What cannot be had beside a lock of this kind."""
    return Semaphore(path, 1) if kind == "semaphore" else Lock(path)


def assert_free(kind: str, path: str) -> None:
    """Nobody has it, and using it once leaves nothing behind."""
    rival(kind, path).acquire(timeout=0).release()
    assert_nothing_left(path)


@pytest.fixture
def children():
    """Pids that end with the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_alive(pid))


@each_kind
def test_a_forked_child_holds_nothing_and_cannot_release(start_peer, path, kind):
    parent = start_peer(path=path)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")

    assert parent.do("in_child(lambda: hold.released)") is True
    assert parent.do("in_child(lambda: hold.lost)") is False
    assert parent.do("in_child(lambda: hold.release())") == "NotOwner"
    assert parent.do("in_child(lambda: hold.check())") == "NotOwner"
    assert parent.do("in_child(lambda: in_child(lambda: hold.release()))") == "NotOwner"
    assert parent.do("in_child(lambda: [fd for fd in descriptors().values() if fd.startswith(path)])") == []

    assert rival(kind, path).try_acquire() is None
    parent.do("hold.check()")
    parent.do("hold.release()")
    assert_free(kind, path)


# The child leaves the block first; then the parent, still inside, looks whether the lock is refused to others.
LEAVE_IN_CHILD = """
import gc

def leave(block):
    with block:
        pid = os.fork()
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
            return rival.try_acquire() is None
    os._exit(0)

def leave_by_exception(block):
    try:
        with block:
            pid = os.fork()
            if not pid:
                raise KeyError
            assert os.waitpid(pid, 0)[1] == 0
            return rival.try_acquire() is None
    except KeyError:
        os._exit(0)

def forget():
    del globals()["hold"]
    gc.collect()
    return "forgotten"
"""


@each_kind
@pytest.mark.parametrize("leave", ["leave", "leave_by_exception"])
@pytest.mark.parametrize("block", ["lock", "lock.acquire()"])
def test_leaving_the_block_in_a_child_does_not_release(start_peer, path, kind, block, leave):
    parent = start_peer(path=path)
    parent.do(LEAVE_IN_CHILD)
    parent.do(f"lock, rival = {LOCKS[kind]}, {'Semaphore(path, 1)' if kind == 'semaphore' else 'Lock(path)'}")

    assert parent.do(f"{leave}({block})") is True

    assert_free(kind, path)


@each_kind
def test_forgetting_the_hold_in_a_child_neither_releases_nor_warns(start_peer, path, kind):
    parent = start_peer(path=path)
    parent.do(LEAVE_IN_CHILD)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")

    assert parent.do("in_child(forget)") == "forgotten"

    assert rival(kind, path).try_acquire() is None
    parent.do("hold.release()")
    assert_free(kind, path)


def test_a_child_waits_for_its_parent_like_any_other_process(start_peer, path):
    """Neither does it think that it has the lock already, nor that it would wait for itself."""
    parent = start_peer(path=path)
    parent.do("hold = Lock(path).acquire()")
    assert parent.do("in_child(lambda: Lock(path).try_acquire())") is None
    assert parent.do("in_child(lambda: Lock(path).acquire(timeout=0))") == "Busy"
    assert parent.do("in_child(lambda: Lock(path).acquire(timeout=0.01))") == "Timeout"
    parent.do(
        """
pid = os.fork()
if pid == 0:
    Lock(path).acquire().release()
    os._exit(0)
until(lambda: tickets(path))
hold.release()
"""
    )
    assert parent.do("os.waitpid(pid, 0)[1]") == 0
    assert_nothing_left(path)


def test_a_child_takes_and_releases_its_own_while_its_parent_shares(start_peer, path):
    parent = start_peer(path=path)
    parent.do("hold = Lock(path, shared=True).acquire()")
    assert parent.do("in_child(lambda: Lock(path, shared=True).acquire(timeout=0).release())") is None
    assert Lock(path).try_acquire() is None
    parent.do("hold.check()")
    parent.do("hold.release()")
    assert_nothing_left(path)


@each_kind
def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(start_peer, path, children, kind):
    parent = start_peer(path=path)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")
    children.append(parent.do("idle_child()"))
    assert rival(kind, path).try_acquire() is None

    parent.kill()

    assert is_alive(children[0])
    assert_free(kind, path)


WAIT_IN_A_THREAD = """
import threading
import warnings

warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what this is about
held, let_go = threading.Event(), threading.Event()

def wait():
    with lock:
        held.set()
        let_go.wait()

thread = threading.Thread(target=wait, daemon=True)
thread.start()
until(lambda: tickets(path))
"""


def thread_waits_and_forks(start_peer, path, children, lock, fork):
    """A peer whose thread is the head of the queue and whose child is alive, and a peer that waits behind it."""
    parent, behind = start_peer(path=path), start_peer(path=path)
    parent.do(f"lock = {lock}")
    parent.do(WAIT_IN_A_THREAD)
    # Asleep in the queue, and not on its way there: the main thread is the one that /proc/<pid>/stat tells about.
    until(lambda: sum(fd.startswith(path) for fd in descriptors(parent.pid).values()) == 2)
    behind.do("look_only_when_told()")
    behind.begin("hold = Lock(path).acquire()")
    behind.until_waiting(path)
    children.append(parent.do(f"idle_child({fork})"))
    assert len(tickets(path)) == 2
    return parent, behind


@pytest.mark.parametrize("lock", ["Lock(path)", "Lock(path, timeout=30)"])
def test_a_child_forked_while_a_thread_queues_keeps_no_place_in_the_queue(start_peer, path, children, lock):
    with Lock(path):
        parent, behind = thread_waits_and_forks(start_peer, path, children, lock, "os.fork")
        assert not [fd for fd in descriptors(children[0]).values() if fd.startswith(path)]
        parent.kill()
    behind.answer()
    behind.do("hold.release()")
    assert is_alive(children[0])
    assert_nothing_left(path)


@pytest.mark.parametrize("lock", ["Lock(path)", "Lock(path, timeout=30)"])
@pytest.mark.parametrize("fork", ["os.fork", "raw_fork"])
def test_a_thread_that_queued_during_a_fork_gets_the_lock_and_hands_it_on(start_peer, path, children, lock, fork):
    with Lock(path):
        parent, behind = thread_waits_and_forks(start_peer, path, children, lock, fork)
    assert parent.do("held.wait(30)")
    behind.until_waiting(path)
    parent.do("let_go.set(); thread.join()")
    behind.answer()
    behind.do("hold.release()")
    assert is_alive(children[0])
    assert_nothing_left(path)


@each_kind
@pytest.mark.parametrize("fork", ["os.fork", "raw_fork"])
def test_a_child_with_copies_of_all_descriptors_does_not_keep_a_released_lock(start_peer, path, children, kind, fork):
    parent = start_peer(path=path)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")
    children.append(parent.do(f"idle_child({fork})"))
    assert rival(kind, path).try_acquire() is None

    parent.do("hold.release()")

    assert_free(kind, path)


@each_kind
def test_a_copy_of_the_descriptor_in_another_program_does_not_keep_a_released_lock(start_peer, path, children, kind):
    parent = start_peer(path=path)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")
    parent.do("fd = os.dup(descriptor_of(path))")
    children.append(parent.do("idle_program(pass_fds=[fd])"))
    parent.do("os.close(fd)")
    assert path in descriptors(children[0]).values()

    parent.do("hold.release()")

    assert is_alive(children[0])
    assert_free(kind, path)


@pytest.mark.parametrize("way", ["blocking", "timeout", "asyncio"])
@each_kind
def test_a_waiter_is_not_kept_waiting_by_a_copy_of_the_descriptor(start_peer, path, children, kind, way):
    parent, waiter = start_peer(path=path), start_peer(path=path, way=way)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")
    children.append(parent.do("idle_child(raw_fork)"))
    waiter.begin(f"hold = acquire_by(way, {'Semaphore(path, 1)' if kind == 'semaphore' else 'Lock(path)'})")
    waiter.until_waiting(path)

    parent.do("hold.release()")

    # A file that stays and that somebody keeps open sends no event: that is what the safety look is for.
    waiter.answer()
    waiter.do("hold.release()")
    assert_nothing_left(path)


EXEC = {
    "subprocess": "idle_program(close_fds=False)",
    "posix_spawn": "os.posix_spawnp('sleep', ['sleep', '600'], os.environ)",
}


@each_kind
@pytest.mark.parametrize("way", EXEC)
def test_a_program_started_by_the_holder_inherits_nothing(start_peer, path, children, kind, way):
    parent = start_peer(path=path)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")
    children.append(parent.do(EXEC[way]))
    until(lambda: os.readlink(f"/proc/{children[0]}/exe") != os.readlink(f"/proc/{parent.pid}/exe"))
    assert not [fd for fd in descriptors(children[0]).values() if fd.startswith(path)]

    parent.kill()

    assert_free(kind, path)


def test_a_program_started_while_a_thread_queues_inherits_nothing(start_peer, path, children):
    parent = start_peer(path=path)
    with Lock(path):
        parent.do("lock = Lock(path, timeout=30)")
        parent.do(WAIT_IN_A_THREAD)
        # The ticket, the lock, and the watch on it.
        until(lambda: "anon_inode:inotify" in descriptors(parent.pid).values())
        children.append(parent.do(EXEC["subprocess"]))
        inherited = descriptors(children[0]).values()
        assert not [fd for fd in inherited if fd.startswith((path, "anon_inode:inotify"))]
    parent.do("held.wait()")
    parent.do("let_go.set(); thread.join()")
    assert_nothing_left(path)


@each_kind
def test_a_holder_that_executes_another_program_releases_the_lock(start_peer, path, kind):
    parent = start_peer(path=path)
    parent.do(f"hold = {LOCKS[kind]}.acquire()")

    parent.begin("os.execvp('sleep', ['sleep', '600'])")

    rival(kind, path).acquire(timeout=30).release()
    assert parent.process.poll() is None
    assert_nothing_left(path)


START_CHILD = """
import multiprocessing

context = multiprocessing.get_context(method)
hold = Lock(path).acquire()
"""


@each_method
def test_a_multiprocessing_child_holds_nothing(start_peer, path, method):
    parent = start_peer(path=path, method=method)
    parent.do(START_CHILD)
    parent.do(
        """
def ask_child():
    ours, theirs = context.Pipe()
    child = context.Process(target=send_held, args=(path, theirs))
    child.start()
    answer = ours.recv()
    child.join()
    child.close()
    ours.close()
    theirs.close()
    return answer
"""
    )
    assert parent.do("ask_child()") is True
    parent.do("hold.check()")
    parent.do("hold.release()")
    assert parent.do("ask_child()") is False
    assert_nothing_left(path)


@each_method
def test_a_multiprocessing_child_that_outlives_its_parent_does_not_keep_the_lock(start_peer, path, children, method):
    parent = start_peer(path=path, method=method)
    parent.do(START_CHILD)
    parent.do("child = context.Process(target=signal.pause); child.start()")
    children.append(parent.do("child.pid"))
    until(lambda: state_of(children[0]) == "S")

    parent.kill()

    assert is_alive(children[0])
    assert_free("exclusive", path)


@each_method
def test_multiprocessing_children_take_turns(start_peer, path, tmp_path, method):
    record = tmp_path / "record"
    record.write_text("0")
    parent = start_peer(path=path, method=method, record=str(record))
    parent.do("import multiprocessing; context = multiprocessing.get_context(method)")
    parent.do("children = [context.Process(target=count_up, args=(path, record, 100)) for _ in range(4)]")
    parent.do("[child.start() for child in children]")
    parent.do("[child.join() for child in children]")
    assert parent.do("[child.exitcode for child in children]") == [0, 0, 0, 0]
    assert record.read_text() == "400"
    assert_nothing_left(path)
