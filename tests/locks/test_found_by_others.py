"""What people who did not write the locks found out by attacking them. Each of these went wrong once."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from faces import eventually, in_thread
from support import Child, in_child, tickets, until, until_asleep, until_queued

import holdfast
from holdfast import Lock, LockFile, Semaphore, process, system, wait
from holdfast.locks import publish, staleness
from holdfast.locks.record import Record

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


def test_leaving_a_block_that_was_not_entered_raises_not_locked(make, path):
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


@pytest.mark.parametrize("length", [220, 250, 255])
def test_a_name_with_no_room_for_a_private_name(tmp_path, length, monkeypatch):
    def no_links_of_open_files(*_):
        raise OSError(errno.EOPNOTSUPP, "no /proc here")

    monkeypatch.setattr(system, "link_open_file", no_links_of_open_files)
    path = str(tmp_path / ("n" * length))
    with LockFile(path) as hold:
        hold.check()
        assert not LockFile(path).clean()
    assert os.listdir(tmp_path) == []


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
        real = system.link_open_file

        def look(*words):
            real(*words)
            seen.add(os.path.getsize(path))

        system.link_open_file = look
        with pytest.raises(OSError, match="File too large"):
            LockFile(path, tag="x" * 9000).acquire(timeout=0)
        return sorted(seen)

    assert in_child(attempt) == []
    assert is_free(LockFile, path)


def test_a_record_of_whole_seconds_is_not_judged_too_old_too_soon():
    def judged(age, stale_after):
        return staleness.decide(Record(1, 0), age, None, "old", stale_after)

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
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
    for thread in threading.enumerate():
        if thread.name == "holdfast-on-lost":
            thread.join()  # else pytest reports its SystemExit in a later test


# Metrics.


def test_a_loss_is_counted_once(make, path):
    kind = make(path)._engine.metrics
    before = kind.losses.value
    hold = make(path).acquire()
    os.unlink(path)
    for attempt in (hold.check, hold.check, hold.release):
        with pytest.raises(holdfast.LockLost):
            attempt()
    assert kind.losses.value == before + 1


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
    process.registry.holds.pop(hold._grant)
    hold._grant.close()  # as if we had died
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


def test_a_file_left_by_root_for_a_queue_is_removed_by_the_last_waiter(tmp_path):
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


# A second attack.


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_child_forked_by_a_signal_handler_does_not_go_on_with_the_wait(path, tmp_path, timeout, monkeypatch):
    """The child opens files, which get the numbers of the descriptors that the fork hook has closed."""
    children = []

    def wait(say):
        def fork(*_):
            pid = os.fork()
            if pid == 0:
                children.append([open(tmp_path / f"log{i}", "w") for i in range(8)])  # noqa: SIM115
            else:
                children.append(pid)

        signal.signal(signal.SIGUSR1, fork)
        say("ready")
        try:
            Lock(path).acquire(timeout).release()
            say("acquired")
        except holdfast.NotOwner:
            say("refused")
        if isinstance(children[0], int):
            os.waitpid(children[0], 0)

    with Lock(path):
        waiter = Child(wait)
        until_queued(path, 1)
        until_asleep([waiter.pid])
        os.kill(waiter.pid, signal.SIGUSR1)
        until((tmp_path / "log7").exists)
        time.sleep(0.1)  # in which the child would get the lock
    assert waiter.end() == (0, ["ready", "refused", "acquired"])


def test_a_child_forked_between_two_steps_of_a_wait_is_refused():
    """Its descriptors are closed, so the wait fails there with an error of the system."""

    def work(say):
        def steps():
            yield wait.Pause(0.0)
            pid = os.fork()
            if pid == 0:
                os.read(-1, 1)
            os.waitpid(pid, 0)
            return "acquired"

        try:
            say(wait.drive(steps()))
        except holdfast.NotOwner:
            say("refused")

    assert Child(work).end() == (0, ["refused", "acquired"])


def test_a_task_of_a_forked_child_does_not_go_on_with_its_parents_wait(path, tmp_path, start_peer):
    holder = start_peer(path=path)
    holder.do("hold = holdfast.Lock(path).acquire()")

    async def main():
        waiter = asyncio.create_task(Lock(path).aacquire(60))
        while not tickets(path):
            await asyncio.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            files = [open(tmp_path / f"log{i}", "w") for i in range(8)]  # noqa: SIM115
            try:
                await asyncio.wait_for(waiter, 1)
            except BaseException:  # of the child's broken event loop, too
                os._exit(0)
            os._exit(len(files))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        holder.do("hold.release()")
        (await waiter).release()

    asyncio.run(main())


def test_a_lock_file_published_in_place_does_not_share_its_file_with_a_lock(path, monkeypatch):
    """Where there are no hard links, the file has its name before it is locked."""

    def no_links(*_, **__):
        raise OSError(errno.EPERM, "no hard links here")

    real, locks = system.lock_liveness, []

    def lock_liveness(fd):
        if os.path.exists(path) and not locks:
            locks.append(Lock(path).try_acquire())
        real(fd)

    monkeypatch.setattr(system, "link", no_links)
    monkeypatch.setattr(system, "link_open_file", no_links)
    monkeypatch.setattr(system, "lock_liveness", lock_liveness)
    assert LockFile(path).try_acquire() is None
    assert locks[0] is not None
    locks[0].check()
    locks[0].release()
    with LockFile(path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("kind", [*KINDS, "file, not durable"])
def test_another_users_symlink_on_the_way_is_refused(kind, mode, tmp_path):
    make = KINDS.get(kind, lambda path: LockFile(path, durable=False))
    (tmp_path / "mine").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "app").symlink_to(tmp_path / "mine")
    os.lchown(tmp_path / "open" / "app", 65534, 65534)
    (tmp_path / "open").chmod(mode)
    with pytest.raises(holdfast.UnsafePath, match="user 65534"):
        make(tmp_path / "open" / "app" / "x").acquire()
    assert os.listdir(tmp_path / "mine") == []


def test_a_waiter_behind_another_waits_where_a_program_has_locked_the_whole_file(path, start_peer):
    """The second waiter looks at the lock once a second."""
    holder, first, other = (start_peer(path=path) for _ in range(3))
    holder.do("hold = holdfast.Lock(path, keep=True).acquire()")
    other.do("import fcntl; fd = os.open(path, os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX)")
    first.begin("holdfast.Lock(path, keep=True).acquire().release()")
    until_queued(path, 1)
    with pytest.raises(holdfast.Timeout):
        Lock(path, keep=True, timeout=1.5).acquire()
    holder.do("hold.release()")
    first.answer()


def test_no_fsync_runs_in_the_event_loop_behind_a_waiter_that_was_stopped(path, monkeypatch, start_peer):
    loop_thread, synced = threading.get_ident(), []
    real = system.fsync

    def fsync(fd):
        synced.append(threading.get_ident())
        real(fd)

    holder, first = start_peer(path=path), start_peer(path=path)
    holder.do("hold = holdfast.LockFile(path).acquire()")
    first.begin("holdfast.LockFile(path).acquire().release()")
    until_queued(path, 1)
    until_asleep([first.pid])  # its ticket is locked
    first.stop()
    monkeypatch.setattr(system, "fsync", fsync)

    async def main():
        waiter = asyncio.create_task(LockFile(path).aacquire(60))
        while len(tickets(path)) < 2:
            await asyncio.sleep(0.01)
        holder.do("hold.release()")
        (await waiter).release()

    asyncio.run(main())
    first.go_on()
    first.answer()
    assert synced and loop_thread not in synced


@pytest.mark.parametrize("dead", [True, False])
def test_a_long_queue_of_the_dead_lets_other_tasks_run(path, dead):
    os.mkdir(path + ".queue")
    for number in range(1, 2001):
        name = f"{path}.queue/{number:012d}"
        if dead:
            os.mkfifo(name)
        else:
            Path(name).touch()

    async def main():
        turns = 0
        waiter = asyncio.create_task(Lock(path).aacquire(60))
        while not waiter.done():
            turns += 1
            await asyncio.sleep(0)
        (await waiter).release()
        return turns

    assert asyncio.run(main()) > 50


def test_a_lock_file_in_a_directory_that_was_renamed_is_lost(tmp_path):
    (tmp_path / "room").mkdir()
    hold = LockFile(tmp_path / "room" / "x").acquire()
    (tmp_path / "room").rename(tmp_path / "moved")
    (tmp_path / "room").mkdir()
    with LockFile(tmp_path / "room" / "x"), pytest.raises(holdfast.LockLost):
        hold.release()
    assert os.listdir(tmp_path / "moved") == []


def test_an_error_of_the_release_does_not_hide_that_of_the_block(path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(errno.EACCES, "not now")

    with pytest.raises(ValueError, match="mine"), Lock(path):  # noqa: PT012
        monkeypatch.setattr(system, "stat", fail)
        raise ValueError("mine")
    monkeypatch.undo()
    assert is_free(Lock, path)


def test_a_private_name_that_another_user_has_guessed_does_not_stop_an_acquire(path, monkeypatch):
    planted, real = [], publish.private_name

    def plant(name):
        private = real(name)
        if not planted:
            planted.append(private)
            Path(os.path.dirname(path), private).write_text("a file of the other user")
        return private

    def no_links_of_open_files(*_):
        raise OSError(errno.EOPNOTSUPP, "no /proc here")

    monkeypatch.setattr(publish, "private_name", plant)
    monkeypatch.setattr(system, "link_open_file", no_links_of_open_files)
    with LockFile(path, timeout=10):
        assert len(planted) == 1
    assert Path(os.path.dirname(path), planted[0]).read_text() == "a file of the other user"


def test_timeouts_do_not_wait_for_each_others_status(path, tmp_path, monkeypatch):
    """A mount that hangs must not hold up the error of another lock."""
    hanging, go_on = threading.Event(), threading.Event()
    real = Lock.status

    def status(lock):
        if lock.path == path:
            hanging.set()
            go_on.wait(60)
        return real(lock)

    other = str(tmp_path / "other")
    monkeypatch.setattr(Lock, "status", status)
    with Lock(path), Lock(other):
        thread = threading.Thread(target=lambda: Lock(path, timeout=0).try_acquire() or Lock(path)._timed_out(0))
        thread.start()
        assert hanging.wait(60)
        with pytest.raises(holdfast.Busy):
            Lock(other).acquire(0)
        go_on.set()
        thread.join()
