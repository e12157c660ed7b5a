"""What people who did not write the locks found out by attacking them. Each of these went wrong once."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from faces import eventually, in_thread
from support import Child, in_child, until, until_queued

import holdfast
from holdfast import Lock, LockFile, Semaphore, metrics, process, system
from holdfast.locks import judge
from holdfast.record import Record

KINDS = {"lock": Lock, "semaphore": lambda path: Semaphore(path, 1), "file": LockFile}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def is_free(make, path):
    hold = make(path).try_acquire()
    if hold is not None:
        hold.release()
    return hold is not None


# A block that is left by somebody else than entered it.


def test_a_block_left_in_another_thread(make, path):
    stack = ExitStack()
    stack.enter_context(make(path))
    in_thread(stack.close)
    assert is_free(make, path)


def test_a_generator_that_another_task_ends(make, path):
    lock = make(path)

    async def numbers():
        async with lock:
            yield 1
            yield 2

    async def main():
        async for _ in numbers():
            break  # asyncio closes it, in a task of its own
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert is_free(make, path)


def test_a_block_that_nobody_entered(make, path):
    with pytest.raises(holdfast.NotLocked):
        make(path).__exit__(None, None, None)


# Names and links.


@pytest.mark.parametrize("keep", [False, True])
def test_a_link_that_went_elsewhere_and_came_back(tmp_path, keep):
    """Another hold of the same lock object has followed it meanwhile: its file is not ours to remove."""
    one, other, link = tmp_path / "one", tmp_path / "other", tmp_path / "link"

    def point_at(target):
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(target)

    lock = Lock(link, keep=keep)
    point_at(one)
    first = lock.acquire()
    point_at(other)
    second = lock.acquire()
    point_at(one)
    first.release()
    assert not is_free(Lock, str(other))
    point_at(other)
    second.release()


@pytest.mark.parametrize("length", [200, 229, 249, 250, 255])
def test_a_name_as_long_as_it_may_be(tmp_path, length):
    path = str(tmp_path / ("n" * length))
    pid = in_child(lambda: LockFile(path).acquire() and os.getpid())
    with LockFile(path, timeout=30) as hold:  # from a dead one
        assert hold.token and isinstance(pid, int)
        with pytest.raises(holdfast.Timeout, match="not acquired within"):
            in_thread(lambda: LockFile(path).acquire(timeout=0.01))
    with Lock(path), pytest.raises(holdfast.Timeout, match="not acquired within"):
        in_thread(lambda: Lock(path).acquire(timeout=0.01))
    Path(path).unlink(missing_ok=True)


def test_private_files_of_a_long_name_are_cleaned(tmp_path):
    path = str(tmp_path / ("n" * 250))
    LockFile(path + "x")
    from holdfast.locks.publish import private_files, private_name

    mine, others = private_name(path), private_name(path + "x")
    for name in (mine, others):
        Path(name).write_bytes(b"")
    assert [os.path.join(tmp_path, name) for name in private_files(str(tmp_path), "n" * 250)] == [mine]


# Content.


@pytest.mark.parametrize("stale", [False, True])
def test_a_record_that_does_not_fit_is_never_seen(path, stale):
    """Not even a part of it, which is all that the system wrote."""
    if stale:
        assert in_child(lambda: LockFile(path).acquire() and None) is None
    seen = set()

    def attempt():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for name in ("link_open_file", "exchange"):
            real = getattr(system, name)

            def look(*words, real=real):
                real(*words)
                seen.add(os.path.getsize(path))

            setattr(system, name, look)
        with pytest.raises(OSError, match="No space"):
            LockFile(path, tag="x" * 9000).acquire(timeout=0)
        return sorted(seen)

    assert in_child(attempt) == []
    assert is_free(LockFile, path)


def test_a_record_of_whole_seconds_is_not_judged_too_old_too_soon():
    def judged(age, stale_after):
        return judge.decide(Record(1, 0), age, None, "old", stale_after)

    assert not judged(1.9, 1).stale and judged(2.0, 1).stale  # taken at 0.99, it is 1.01 s old
    assert judged(1.5, 1).stale_in == 0.5
    assert judged(0.31, 0.3).stale and not judged(0.3, 0.3).stale


# Semaphores.


def test_another_number_of_permits_while_others_queue(path, start_peer, waits):
    waiter = start_peer(path=path)
    with Semaphore(path, 1):
        waiter.begin("Semaphore(path, 1).acquire().release()")
        until_queued(path, 1)
        wrong = Semaphore(path, 2)
        for attempt in (wrong.try_acquire, lambda: wrong.acquire(timeout=0), lambda: wrong.acquire(timeout=5)):
            with pytest.raises(holdfast.Unsupported, match=r"with 1 permits, and 2 were asked for"):
                attempt()
        assert waits == [], "it is refused at once"
    waiter.answer()


def test_a_semaphore_that_may_only_be_read(path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with Semaphore(path, 2):

        def attempt():
            os.setuid(65534)
            with pytest.raises(PermissionError, match="mode=0o666"):
                Semaphore(path, 2).try_acquire()

        for parent in Path(path).parents:
            parent.chmod(parent.stat().st_mode | 0o111)
        assert in_child(attempt) is None


# Heartbeats.


@pytest.mark.parametrize("how", ["ends", "blocks"])
def test_on_lost_does_not_keep_others_from_being_renewed(path, how, caplog):
    blocked = threading.Event()
    told = threading.Event()

    def on_lost(hold):
        told.set()
        if how == "ends":
            sys.exit("lost")
        blocked.wait()

    lost = LockFile(path, heartbeat=0.01, on_lost=on_lost).acquire()
    good = LockFile(path + ".2", heartbeat=0.01).acquire()
    LockFile(path).break_()
    assert told.wait(30)
    before = os.stat(path + ".2").st_mtime_ns
    eventually(lambda: os.stat(path + ".2").st_mtime_ns > before, "it is renewed")
    blocked.set()
    good.release()
    with pytest.raises(holdfast.LockLost):
        lost.release()


# Metrics.


def test_a_loss_is_counted_once(make, path):
    kind = make(path)._metrics
    before = kind.losses.value
    hold = make(path).acquire()
    os.unlink(path)
    for attempt in (hold.check, hold.check, hold.release):
        with pytest.raises(holdfast.LockLost):
            attempt()
    assert kind.losses.value == before + 1


def test_a_child_of_a_process_that_reads_its_metrics(path):
    with Lock(path):
        pass
    kind = metrics.kind("lock")
    with kind._mutex:
        assert in_child(lambda: metrics.snapshot()["lock"]["acquisitions"]) >= 1


# Forks.


@pytest.mark.parametrize("durable", [False, True])
def test_a_child_forked_while_a_lock_file_is_made_does_not_keep_its_maker_alive(path, durable, monkeypatch):
    link, children = system.link_open_file, []
    reader, writer = os.pipe()
    said, says = os.pipe()

    def fork_first(*words):
        children.append(os.fork())
        if not children[0]:
            os.close(writer)
            os.write(says, b"!")
            os.read(reader, 1)
            os._exit(0)
        os.read(said, 1)
        link(*words)

    monkeypatch.setattr(system, "link_open_file", fork_first)
    hold = LockFile(path, durable=durable).acquire()
    monkeypatch.undo()
    assert LockFile(path).examine().alive
    fd = hold.fileno()
    process.registry.holds.pop(id(hold))
    os.close(fd)  # as if we had died
    assert LockFile(path).examine().alive is False
    os.close(writer)
    os.waitpid(children[0], 0)
    for one in (reader, said, says):
        os.close(one)
    assert is_free(LockFile, path)


# Other places.


def test_status_where_nothing_can_be_written(path, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    (tmp_path / "there").mkdir()
    (tmp_path / "seen").mkdir()
    with LockFile(tmp_path / "there" / "x"):
        subprocess.run(["mount", "--bind", tmp_path / "there", tmp_path / "seen"], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path / "seen"], check=True)
            assert LockFile(tmp_path / "seen" / "x").status().held
            with pytest.raises(OSError, match=r"Read-only file system: '/.*/seen/y'"):
                LockFile(tmp_path / "seen" / "y").acquire()
        finally:
            subprocess.run(["umount", tmp_path / "seen"], check=True)


def test_a_file_left_by_root_for_a_queue_is_removed_by_who_comes_last(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    room = tmp_path / "room"
    room.mkdir(mode=0o777)
    room.chmod(0o777)
    for parent in room.parents:
        parent.chmod(parent.stat().st_mode | 0o111)
    path = str(room / "x")
    hold = Lock(path).acquire()

    def wait_as_nobody(_: object) -> None:
        os.setuid(65534)
        Lock(path).acquire().release()

    waiter = Child(wait_as_nobody)
    until(lambda: os.path.exists(path + ".queue") and len(os.listdir(path + ".queue")) == 1)
    hold.release()
    assert waiter.end()[0] == 0
    assert os.listdir(room) == []
