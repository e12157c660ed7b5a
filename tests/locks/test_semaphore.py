"""`Semaphore`: never more holders than permits, whoever is killed; one number for all; first come, first served."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from faces import PATIENCE, Caller, Leftovers, eventually, in_thread, peers, until_waiting

import holdfast


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "gpu")


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def test_a_semaphore_has_as_many_holders_as_permits(path):
    semaphore = holdfast.Semaphore(path, 3)
    holds = [semaphore.try_acquire() for _ in range(3)]
    assert all(holds)
    assert semaphore.try_acquire() is None
    with pytest.raises(holdfast.Busy):
        in_thread(semaphore.acquire, timeout=0)
    holds.pop().release()
    holds.append(semaphore.acquire(timeout=0))
    for hold in holds:
        hold.check()
        hold.release()


def test_the_file_contains_the_number_and_the_last_holder_removes_it(path, tmp_path):
    leftovers = Leftovers(tmp_path)
    semaphore = holdfast.Semaphore(path, 12)
    first, second = semaphore.acquire(), semaphore.acquire()
    assert read(path) == b"permits=12\n"
    first.release()
    assert read(path) == b"permits=12\n"
    second.check()
    second.release()
    leftovers.check()


@pytest.mark.parametrize("permits", [0, -1, 2.0, "2", None, 1 << 21])
def test_an_impossible_number_of_permits_is_refused(path, permits):
    with pytest.raises(ValueError, match="permits is a number"):
        holdfast.Semaphore(path, permits)


@pytest.mark.parametrize(
    "content", [b"x", b"permits=2", b"permits=\n", b"permits=2\nmore", b"permits=-2\n", b"permits=12345678\n", b"\n"]
)
def test_a_file_with_other_content_is_refused_and_untouched(path, tmp_path, content):
    Path(path).write_bytes(content)
    before = os.stat(path)
    leftovers = Leftovers(tmp_path)
    semaphore = holdfast.Semaphore(path, 2)
    for acquire in (semaphore.acquire, semaphore.try_acquire, lambda: semaphore.acquire(timeout=1)):
        with pytest.raises(holdfast.NotALockFile, match="left untouched"):
            acquire()
    leftovers.check()
    after = os.stat(path)
    assert read(path) == content
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_another_number_of_permits_raises_an_error_with_both_numbers(path, tmp_path):
    with peers() as (peer,):
        peer.acquire(path, permits=4)
        leftovers = Leftovers(tmp_path)
        other = holdfast.Semaphore(path, 7)
        for acquire in (other.acquire, other.try_acquire, lambda: other.acquire(timeout=1)):
            with pytest.raises(holdfast.Unsupported, match=r"with 4 permits, and 7 were asked for"):
                acquire()
        leftovers.check()
        assert read(path) == b"permits=4\n"
        holdfast.Semaphore(path, 4).acquire(timeout=0).release()
        peer.release()
    with other:
        assert read(path) == b"permits=7\n"


def test_a_semaphore_file_left_by_a_crash_can_get_another_number(path, tmp_path):
    with peers() as (peer,):
        peer.acquire(path, permits=2)
        peer.kill()
        assert read(path) == b"permits=2\n"
        with holdfast.Semaphore(path, 3) as hold:
            assert read(path) == b"permits=3\n"
            hold.check()
    assert os.listdir(tmp_path) == []


def test_an_empty_file_left_by_a_crash_gets_the_number(path):
    Path(path).touch()
    with holdfast.Semaphore(path, 3):
        assert read(path) == b"permits=3\n"
    assert not os.path.exists(path)


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_crash_frees_the_slot(path, tmp_path, timeout):
    semaphore = holdfast.Semaphore(path, 2)
    with peers(2) as (stays, dies):
        stays.acquire(path, permits=2)
        dies.acquire(path, permits=2)
        waiter = Caller(semaphore.acquire, timeout=timeout)
        until_waiting(semaphore, 1)
        dies.kill()
        waiter.result().release()
        stays.release()
    assert os.listdir(tmp_path) == []


def test_the_thread_that_has_all_permits_would_deadlock(path):
    semaphore = holdfast.Semaphore(path, 2)
    with semaphore, semaphore, pytest.raises(holdfast.WouldDeadlock, match="has all the permits"):
        semaphore.acquire()
    first = semaphore.acquire()
    second = in_thread(semaphore.acquire)
    with pytest.raises(holdfast.Timeout):
        semaphore.acquire(timeout=0.01)
    first.release()
    second.release()


def test_a_removed_file_means_a_lost_hold(path):
    semaphore = holdfast.Semaphore(path, 2)
    hold = semaphore.acquire()
    os.unlink(path)
    assert hold.lost
    with semaphore as successor:
        with pytest.raises(holdfast.LockLost):
            hold.release()
        successor.check()
        assert read(path) == b"permits=2\n"


def test_status(path):
    semaphore = holdfast.Semaphore(path, 2)
    free = semaphore.status()
    assert (free.held, free.holders, free.permits, free.kind) == (False, (), 2, "semaphore")
    with peers(3) as (first, second, waits):
        first.acquire(path, permits=2)
        second.acquire(path, permits=2)
        waits.start(path, permits=2)
        until_waiting(semaphore, 1)
        status = semaphore.status()
        assert status.held
        assert {holder.pid for holder in status.holders} == {first.pid, second.pid}
        assert all("faces.py" in holder.command for holder in status.holders)
        assert [waiter.pid for waiter in status.waiters] == [waits.pid]
        with pytest.raises(holdfast.Busy) as caught:
            semaphore.acquire(timeout=0)
        assert path in str(caught.value)
        assert str(first.pid) in str(caught.value) and str(second.pid) in str(caught.value)


def test_first_come_first_served(path, tmp_path):
    semaphore = holdfast.Semaphore(path, 2)
    log = tmp_path / "log"
    styles = ["sync", "trio", "sync", "asyncio", "sync", "sync"]
    with peers(3) as workers:
        held = [semaphore.acquire(), semaphore.acquire()]
        for n, style in enumerate(styles):
            timeout = 60 if n % 2 else None
            workers[n % 3].start(path, str(n), permits=2, style=style, timeout=timeout, log=str(log))
            until_waiting(semaphore, n + 1)
        assert semaphore.try_acquire() is None
        held.pop().release()  # one slot, or two would be served at the same time
        eventually(lambda: not semaphore.status().waiters, "all are served")
        held.pop().release()
    assert log.read_text().split() == [str(n) for n in range(len(styles))]


WORKER = """
import os, sys
import holdfast
directory, path, permits = sys.argv[1], sys.argv[2], int(sys.argv[3])
mine = f"{directory}/{os.getpid()}"
semaphore = holdfast.Semaphore(path, permits)

def lives(pid):
    # The kernel says that a process is ending before it drops the locks of that process.
    try:
        with open(f"/proc/{pid}/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not flags & 0x4

while True:
    for _ in range(20):
        with semaphore:
            os.close(os.open(mine, os.O_CREAT))
            inside = sum(map(lives, os.listdir(directory)))
            if inside > permits:
                print("too many:", inside, flush=True)
            os.unlink(mine)
    print("ok", flush=True)
"""


def test_never_more_than_permits_while_holders_are_killed(path, tmp_path):
    """Each holder shows a mark while it is inside, and counts the marks of the living."""
    marks = tmp_path / "marks"
    marks.mkdir()
    permits, kills = 2, 8
    chance = random.Random()

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", WORKER, str(marks), path, str(permits)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    workers = [start() for _ in range(4)]
    try:
        for n in range(3 * kills):
            worker = chance.choice(workers)
            assert worker.stdout.readline() == "ok\n"
            if n % 3 == 0:
                workers.remove(worker)
                end(worker)
                workers.append(start())
    finally:
        for worker in workers:
            end(worker)
    with holdfast.Semaphore(path, permits, timeout=PATIENCE):
        pass
    assert os.listdir(tmp_path) == ["marks"]


def end(worker: subprocess.Popen) -> None:
    worker.kill()
    said = worker.communicate()[0].split("\n")
    assert set(said) <= {"ok", ""}, said
