"""`LockFile`: who gets it, who keeps it, who learns of its loss, and what becomes of files that nobody should touch."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
from faces import Caller, Leftovers, eventually, in_thread, poke, until_waiting
from support import WAYS, Raised, assert_nothing_left, descriptors, state_of, until, until_asleep

import holdfast
from holdfast import LockFile, metrics, owner, system
from holdfast.locks import file_engine, file_hold, heartbeat, local, record, staleness, tokens
from holdfast.locks.engine import REPLACED
from holdfast.locks.file_engine import FileEngine
from holdfast.locks.record import Record, compose, parse

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="looks at Linux' ways of making a file")

POLICIES = ("proof", "old", "dead-and-old")
NOBODY = int(Path("/proc/sys/kernel/pid_max").read_text())  # pids are below it
HEX = "0123456789abcdef"


@pytest.fixture(params=["asyncio", "trio"])
def run(request):
    return lambda function, *args: anyio.run(function, *args, backend=request.param)


@pytest.fixture
def held(path):
    """Held by another thread of this process."""
    hold = in_thread(LockFile(path, tag="deploy").acquire)
    yield hold
    if not hold.released:
        with suppress(holdfast.LockLost):
            hold.release()


@pytest.fixture
def start_holder(start_peer, path):
    """Starts a process that holds the lock until it releases it or is killed, at the latest when the test ends."""
    started = []

    def start(**options):
        peer = start_peer(path=path, options=options)
        started.append(peer)
        peer.do("hold = holdfast.LockFile(path, **options).acquire()")
        return peer

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture(autouse=True)
def no_heartbeat_left():
    """What one test has left to be renewed in an hour is not the next one's business."""
    yield
    for heart in heartbeat.hearts.values():
        with heart.condition:
            heart.due.clear()
            heart.condition.notify()


@pytest.fixture(params=[True, False], ids=["durable", "not-durable"])
def durable(request):
    return request.param


def read(path) -> Record:
    return parse(Path(path).read_bytes())


def write(path, pid=NOBODY, age=0.0, **fields) -> bytes:
    """A lock file as other tools write it, or with fields of ours."""
    content = compose(Record(pid, int(time.time() - age), **fields))
    Path(path).write_bytes(content)
    return content


def set_age(path, age) -> None:
    """Change the timestamp in place: the inode, and with it the liveness byte, stay."""
    content = Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.write(re.sub(rb"timestamp=\d{10}", b"timestamp=%010d" % int(time.time() - age), content))


# Acquiring and releasing.


def test_the_file_is_there_while_it_is_held(path, durable):
    lock = LockFile(path, durable=durable)
    hold = lock.acquire()
    assert os.path.isfile(path)
    assert lock.status().held
    hold.check()
    assert not hold.lost and not hold.released
    hold.release()
    assert hold.released and not hold.lost
    assert_nothing_left(path)
    assert not lock.status().held


def test_with_lock_and_with_hold(path):
    with LockFile(path) as hold:
        hold.check()
    assert hold.released
    with LockFile(path).acquire() as hold:
        hold.check()
    assert hold.released
    assert_nothing_left(path)


def test_an_exception_in_the_block_releases_and_passes(path):
    with pytest.raises(ZeroDivisionError), LockFile(path):
        _ = 1 / 0
    assert_nothing_left(path)


def test_async_with(run, path):
    async def main():
        async with LockFile(path, tag="async") as hold:
            hold.check()
            assert read(path).tag == "async"
            assert await LockFile(path).atry_acquire() is None
        assert hold.released
        hold = await LockFile(path).aacquire()
        await hold.arelease()

    run(main)
    assert_nothing_left(path)


def test_try_acquire_gives_none_while_it_is_held(path, held):
    assert LockFile(path).try_acquire() is None
    held.release()
    hold = LockFile(path).try_acquire()
    hold.check()
    hold.release()


@pytest.fixture
def always_replaced(monkeypatch):
    """Other processes take the lock file and release it between any two calls of ours. Lists the threads that tried."""
    threads = []

    def attempt(*_):
        threads.append(threading.current_thread())
        return REPLACED

    monkeypatch.setattr(FileEngine, "_attempt_at", attempt)
    return threads


@pytest.mark.parametrize("durable", [True, False])
def test_a_lock_file_that_is_replaced_all_the_time_is_busy_and_keeps_to_the_timeout(path, always_replaced, durable):
    lock = LockFile(path, durable=durable)
    assert lock._engine.attempt() is REPLACED
    assert len(always_replaced) == file_engine._MAX_TRIES
    assert lock.try_acquire() is None
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.1)


def test_tasks_attempt_in_threads_also_after_the_first_attempt(path, always_replaced, run):
    async def main():
        assert await LockFile(path).atry_acquire() is None
        with pytest.raises(holdfast.Timeout):
            await LockFile(path).aacquire(timeout=0.1)

    run(main)
    assert threading.main_thread() not in always_replaced


def test_two_processes_exclude_each_other(path, start_holder):
    peer = start_holder()
    assert LockFile(path).try_acquire() is None
    peer.do("hold.release()")
    with LockFile(path, timeout=0):
        assert peer.do("holdfast.LockFile(path).try_acquire()") is None


@pytest.mark.parametrize("tag", ["deploy-v1.2.3", "", None], ids=repr)
def test_the_file_names_its_holder(path, tag):
    before = int(time.time())
    with LockFile(path, tag=tag) as hold:
        me = owner.me()
        found = read(path)
        assert before <= found.timestamp <= time.time()
        assert found.owner.startswith(me.random.decode())
        assert found == Record(
            os.getpid(), found.timestamp, tag, me.host, me.boot, me.start, found.owner, token=hold.token
        )
        assert Path(path).read_bytes() == compose(found)


def test_a_reader_that_knows_only_the_seed_can_use_the_file(path):
    with LockFile(path, tag="a=b"):
        lines = [line.split("=", 1) for line in Path(path).read_text("utf-8").split("\n") if line]
        assert [key for key, _ in lines[:3]] == ["pid", "timestamp", "tag"]
        assert int(lines[0][1]) == os.getpid()
        assert abs(int(lines[1][1]) - time.time()) < 60
        assert lines[2][1] == "a=b"


def test_two_holds_have_two_owner_ids(path):
    owners = set()
    for _ in range(3):
        with LockFile(path):
            owners.add(read(path).owner)
    assert len(owners) == 3


def test_zero_is_one_try_and_busy_names_holder_and_tag(path, start_holder):
    peer = start_holder(tag="deploy-v1.2.3")
    with pytest.raises(holdfast.Busy, match=rf"is busy: held by pid {peer.pid}\b.*Give a timeout") as caught:
        LockFile(path, timeout=0).acquire()
    assert path in str(caught.value) and caught.value.path == path
    assert "deploy-v1.2.3" in str(caught.value)


def test_timeout_is_waited_and_names_holder_and_tag(path, start_holder):
    peer = start_holder(tag="deploy-v1.2.3")
    before = time.monotonic()
    with pytest.raises(holdfast.Timeout, match=rf"not acquired within 0\.1 s: held by pid {peer.pid}\b") as caught:
        LockFile(path).acquire(timeout=0.1)
    assert time.monotonic() - before >= 0.1
    assert not isinstance(caught.value, holdfast.Busy)
    assert "deploy-v1.2.3" in str(caught.value)
    assert sorted(os.listdir(os.path.dirname(path))) == ["x.lock"]


def test_async_timeouts(run, path, held):
    async def main():
        with pytest.raises(holdfast.Busy):
            await LockFile(path).aacquire(timeout=0)
        with pytest.raises(holdfast.Timeout, match=r"within 0\.05 s: held by pid"):
            await LockFile(path, timeout=0.05).aacquire()

    run(main)
    held.check()


@pytest.mark.parametrize(
    "options",
    [
        {"stale": "maybe"},
        {"stale_after": -1},
        {"stale_after": float("nan")},
        {"retry": 0},
        {"heartbeat": 0},
        {"heartbeat": -1},
        {"heartbeat": float("inf")},
        {"heartbeat": 10**400},
        {"timeout": -1},
    ],
    ids=repr,
)
def test_nonsense_is_refused_when_the_lock_is_made(path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LockFile(path, **options)


def test_status_tells_all_about_the_holder(path, start_holder):
    peer = start_holder(tag="deploy")
    status = LockFile(path).status()
    assert (status.kind, status.held, status.tag, status.alive) == ("file", True, "deploy", True)
    assert [holder.pid for holder in status.holders] == [peer.pid]
    assert status.token == peer.do("hold.token")
    assert status.since == read(path).timestamp
    assert not status.stale and not status.corrupt


def test_fsync_of_the_file_before_it_is_published_and_of_the_directory_after(path, monkeypatch, durable):
    synced = []
    plain = system.fsync

    def fsync(fd):
        synced.append(("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file", os.path.exists(path)))
        plain(fd)

    monkeypatch.setattr(system, "fsync", fsync)
    with LockFile(path, durable=durable):
        pass
    assert synced == ([("file", False), ("directory", True)] if durable else [])


@pytest.mark.parametrize("way", ["O_TMPFILE", "link", "O_EXCL"])
@pytest.mark.parametrize(
    ("options", "umask", "want"),
    [({}, 0o022, 0o644), ({}, 0o077, 0o600), ({"mode": 0o666}, 0o000, 0o666), ({"mode": 0o660}, 0o027, 0o640)],
    ids=["default", "private", "open", "group"],
)
def test_the_file_gets_the_mode_less_the_umask(path, monkeypatch, options, umask, want, way):
    publish_by(way, monkeypatch)
    before = os.umask(umask)
    try:
        with LockFile(path, **options):
            assert stat.S_IMODE(os.stat(path).st_mode) == want
    finally:
        os.umask(before)


# Publication.


def publish_by(way, monkeypatch) -> None:
    """Refuse what is better, as some file systems do."""
    plain = system.open_fd

    def open_fd(name, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported", name)
        return plain(name, flags, *args, **options)

    def link(*args, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if way != "O_TMPFILE":
        monkeypatch.setattr(system, "open_fd", open_fd)
    if way == "O_EXCL":
        monkeypatch.setattr(system, "link", link)


@pytest.mark.parametrize("way", ["O_TMPFILE", "link", "O_EXCL"])
def test_every_way_of_publishing_makes_the_same_file(path, tmp_path, monkeypatch, way, durable, start_peer):
    publish_by(way, monkeypatch)
    peer = start_peer(path=path)
    leftovers = Leftovers(tmp_path)
    lock = LockFile(path, tag="x", durable=durable)
    with lock as hold:
        assert os.listdir(tmp_path) == ["x.lock"]
        assert Path(path).read_bytes() == compose(read(path))
        assert read(path).token == hold.token
        assert lock.status().alive is True
        assert peer.do("holdfast.LockFile(path, stale_after=0).try_acquire()") is None
    leftovers.check()


@pytest.mark.parametrize("way", ["O_TMPFILE", "link", "O_EXCL"])
def test_every_way_of_publishing_respects_a_file_that_is_there(path, tmp_path, monkeypatch, way, durable):
    publish_by(way, monkeypatch)
    content = write(path, os.getpid())
    leftovers = Leftovers(tmp_path)
    assert LockFile(path, durable=durable).try_acquire() is None
    with pytest.raises(holdfast.Busy):
        LockFile(path, durable=durable).acquire(timeout=0)
    assert Path(path).read_bytes() == content
    leftovers.check()


def test_a_private_file_is_0600_and_has_no_other_name_until_it_is_complete(path, tmp_path, monkeypatch):
    publish_by("link", monkeypatch)
    seen = []
    plain_write, plain_link = system.write, system.link

    def look(fd):
        (name,) = os.listdir(tmp_path)
        assert re.fullmatch(rf"x\.lock\.{os.getpid()}\.[0-9a-f]{{16}}\.tmp", name)
        seen.append((stat.S_IMODE(os.fstat(fd).st_mode), os.fstat(fd).st_size > 0))

    def write_and_look(fd, content):
        look(fd)
        written = plain_write(fd, content)
        look(fd)
        return written

    def link(private, name, **options):
        assert parse((tmp_path / private).read_bytes()).pid == os.getpid()
        plain_link(private, name, **options)

    monkeypatch.setattr(system, "write", write_and_look)
    monkeypatch.setattr(system, "link", link)
    with LockFile(path, durable=True):
        assert seen == [(0o600, False), (0o600, True)]
        assert os.listdir(tmp_path) == ["x.lock"]


@pytest.mark.parametrize("way", ["O_TMPFILE", "link", "O_EXCL"])
@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_is_an_os_error_and_leaves_nothing(path, tmp_path, monkeypatch, way, failing):
    publish_by(way, monkeypatch)

    def fail(fd, *_):
        # Where there are no links, the private file is written first, and then the file itself.
        if way != "O_EXCL" or os.path.exists(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(fd, *_)

    plain = getattr(system, failing)
    leftovers = Leftovers(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(system, failing, fail)
        with pytest.raises(OSError, match="No space left"):
            LockFile(path).acquire()
    leftovers.check()
    LockFile(path).acquire(timeout=0).release()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EPERM], ids=["no /proc", "refused"])
def test_a_file_without_a_name_that_cannot_be_given_one_is_made_in_another_way(path, tmp_path, monkeypatch, number):
    """In a chroot without /proc, for instance."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(system, "link_open_file", refuse)
    leftovers = Leftovers(tmp_path)
    with LockFile(path):
        assert read(path).pid == os.getpid()
    leftovers.check()


# Tokens and timestamps.


def forget_tokens(monkeypatch) -> None:
    """As in a process that has just been started."""
    monkeypatch.setattr(tokens, "_last", {})


def set_clock(monkeypatch, nanoseconds) -> None:
    monkeypatch.setattr(tokens, "time_ns", lambda: nanoseconds)
    monkeypatch.setattr(record, "time", lambda: nanoseconds / 1e9)


@pytest.mark.parametrize("fence", [False, True])
def test_tokens_grow_in_one_process_even_if_the_clock_stands_still(path, monkeypatch, fence):
    set_clock(monkeypatch, 1_735_420_800_000_000_000)
    tokens = []
    for _ in range(5):
        with LockFile(path, fence=fence) as hold:
            assert read(path).token == hold.token
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("fence", [False, True])
def test_tokens_grow_from_process_to_process(path, start_peer, fence):
    peers = [start_peer(path=path, fence=fence) for _ in range(2)]
    tokens = []
    for _ in range(3):
        for peer in peers:
            peer.do("hold = holdfast.LockFile(path, fence=fence).acquire()")
            tokens.append(peer.do("hold.token"))
            peer.do("hold.release()")
        with LockFile(path, fence=fence) as hold:
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


def test_tokens_grow_over_a_break_and_a_kill(path, start_holder):
    first = start_holder()
    tokens = [first.do("hold.token")]
    LockFile(path).break_()
    second = start_holder()
    tokens.append(second.do("hold.token"))
    second.kill()
    with LockFile(path, timeout=0) as hold:
        tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


def test_a_token_that_was_seen_is_exceeded_although_the_clock_was_set_back(path, monkeypatch):
    far = time.time_ns() + 10**18
    write(path, NOBODY, 7200, token=far)
    with LockFile(path, timeout=0) as hold:
        assert hold.token > far


def test_with_a_fence_tokens_grow_over_restarts_and_any_clock_step(path, monkeypatch):
    tokens = []
    for nanoseconds in (1_735_420_800_000_000_000, 5, 1_735_420_800_000_000_000, 1_000_000_000):
        forget_tokens(monkeypatch)
        set_clock(monkeypatch, nanoseconds)
        with LockFile(path, fence=True) as hold:
            tokens.append(hold.token)
            assert read(path).token == hold.token
            assert Path(path + ".fence").read_bytes() == b"%d\n" % hold.token
    assert tokens == sorted(set(tokens))


def test_a_fence_is_all_that_is_left_after_the_release(path, tmp_path, durable):
    with LockFile(path, fence=True, durable=durable):
        pass
    assert os.listdir(tmp_path) == ["x.lock.fence"]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"12abc\n", b"-5\n", b"\xff", b"9" * 40, str(2**63 - 1).encode()], ids=repr
)
def test_a_corrupt_fence_is_said_and_left_and_the_lock_is_free_again(path, tmp_path, durable, content):
    """A number that leaves no room for the next token is as bad as none."""
    fence = Path(path + ".fence")
    fence.write_bytes(content)
    leftovers = Leftovers(tmp_path)
    with pytest.raises(holdfast.CorruptLock, match=r"x\.lock\.fence"):
        LockFile(path, fence=True, durable=durable).acquire(timeout=0)
    assert fence.read_bytes() == content
    leftovers.check()
    LockFile(path).acquire(timeout=0).release()


def test_a_failing_directory_sync_gives_the_lock_back(path, tmp_path, monkeypatch):
    plain = system.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        plain(fd)

    leftovers = Leftovers(tmp_path)
    monkeypatch.setattr(system, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        LockFile(path, durable=True).acquire()
    leftovers.check()


def test_the_timestamp_is_the_moment_of_acquisition_and_not_of_the_first_attempt(path, monkeypatch, held):
    lock = LockFile(path)
    set_clock(monkeypatch, 1_800_000_000_000_000_000)
    waiter = Caller(lock.acquire)
    until_waiting(lock, 1)
    set_clock(monkeypatch, 1_800_001_000_000_000_000)
    held.release()
    hold = waiter.result()
    assert read(path).timestamp == 1_800_001_000
    hold.release()


# Losing it.


def remove(path):
    os.unlink(path)


def rename_away(path):
    os.rename(path, path + ".moved")


def replace(path):
    os.unlink(path)
    write(path, 1, tag="other")


def rename_over(path):
    """What semats does: it takes rename for an exclusive create."""
    write(path + ".1.tmp", 1, tag="other")
    os.rename(path + ".1.tmp", path)


def copy_over(path):
    """Byte for byte the same, and yet another file."""
    Path(path + ".copy").write_bytes(Path(path).read_bytes())
    os.rename(path + ".copy", path)


def make_directory(path):
    os.unlink(path)
    os.mkdir(path)


def make_link(path):
    """The file is still reached, by a name that is not its own."""
    os.rename(path, path + ".moved")
    os.symlink(path + ".missing", path)


ACCIDENTS = [remove, rename_away, replace, rename_over, copy_over, make_directory, make_link]


def tree(directory) -> dict[str, object]:
    """Names, inodes and contents of everything in a directory."""
    return {
        entry.name: (
            entry.inode(),
            Path(entry.path).read_bytes() if entry.is_file(follow_symlinks=False) else None,
        )
        for entry in os.scandir(directory)
    }


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("look_first", [True, False])
def test_a_lost_lock_is_reported_and_the_file_at_its_path_stays(path, tmp_path, accident, look_first, durable):
    hold = LockFile(path, durable=durable).acquire()
    accident(path)
    before = tree(tmp_path)
    if look_first:
        assert hold.lost
        with pytest.raises(holdfast.LockLost, match="the lock is lost") as caught:
            hold.check()
        assert caught.value.path == path
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert tree(tmp_path) == before
    assert hold.released and hold.lost
    with pytest.raises(holdfast.NotLocked):
        hold.release()


def test_a_hold_that_was_lost_once_stays_lost(path):
    """Between the two, somebody else may have had the lock."""
    hold = LockFile(path).acquire()
    os.rename(path, path + ".moved")
    assert hold.lost
    os.rename(path + ".moved", path)
    assert hold.lost
    with pytest.raises(holdfast.LockLost):
        hold.check()
    with pytest.raises(holdfast.LockLost):
        hold.release()


def test_leaving_the_block_of_a_lost_lock_raises(path):
    with pytest.raises(holdfast.LockLost), LockFile(path):
        rename_over(path)
    assert read(path).tag == "other"


def test_an_exception_in_the_block_matters_more_than_the_loss(path):
    lock = LockFile(path)
    with pytest.raises(ZeroDivisionError), lock:
        _ = rename_over(path) or 1 / 0
    assert read(path).tag == "other"


def test_releasing_twice_spares_the_next_holder(path):
    hold = LockFile(path).acquire()
    hold.release()
    with LockFile(path) as successor:
        with pytest.raises(holdfast.NotLocked, match="released already"):
            hold.release()
        with pytest.raises(holdfast.NotLocked):
            hold.check()
        assert not hold.lost
        successor.check()


def test_a_paused_holder_whose_lock_was_broken_learns_of_it_and_spares_its_successor(path, start_holder):
    peer = start_holder()
    peer.stop()
    LockFile(path).break_()
    with LockFile(path, timeout=0) as hold:
        peer.begin("hold.release()")
        peer.go_on()
        with pytest.raises(Raised) as caught:
            peer.answer()
        assert caught.value.name == "LockLost"
        assert peer.do("hold.lost") is True
        hold.check()


# Staleness. What each holder left, and how old: stale under "proof", "old", "dead-and-old"?


def alive(path, start_holder, age):
    start_holder()
    set_age(path, age)


def killed(path, start_holder, age):
    start_holder().kill()
    set_age(path, age)


def foreign_alive(path, start_holder, age):
    write(path, os.getpid(), age)


def foreign_dead(path, start_holder, age):
    write(path, NOBODY, age)


def other_host(path, start_holder, age):
    write(path, NOBODY, age, host="elsewhere", boot="another", start="1:2", owner="f00", token=1)


def other_host_same_pid(path, start_holder, age):
    write(path, os.getpid(), age, host="elsewhere", boot="another", start="1:2", owner="f00", token=1)


def earlier_boot(path, start_holder, age):
    write(path, os.getpid(), age, host=owner.me().host, boot="another", start="1:2", owner="f00", token=1)


def command_that_exited(path, start_holder, age):
    """As a command line tool writes it, in the name of a process that lives on, without a liveness byte."""
    me = owner.me()
    write(path, me.pid, age, host=me.host, boot=me.boot, start=me.start)


def pid_used_again(path, start_holder, age):
    me = owner.me()
    write(path, me.pid, age, host=me.host, boot=me.boot, start=f"1:{owner.namespace_of(me.start)}")


def other_namespace(path, start_holder, age):
    me = owner.me()
    write(path, NOBODY, age, host=me.host, boot=me.boot, start="1:2")


YOUNG, OLD, FUTURE = 10, 7200, -7200
TABLE = [
    (alive, YOUNG, (False, False, False)),
    (alive, OLD, (False, True, False)),
    (alive, FUTURE, (False, False, False)),
    (killed, YOUNG, (True, False, False)),
    (killed, OLD, (True, True, True)),
    (killed, FUTURE, (True, False, False)),
    (foreign_alive, YOUNG, (False, False, False)),
    (foreign_alive, OLD, (True, True, False)),
    (foreign_alive, FUTURE, (False, False, False)),
    (foreign_dead, YOUNG, (False, False, False)),
    (foreign_dead, OLD, (True, True, True)),
    (foreign_dead, FUTURE, (False, False, False)),
    (other_host, YOUNG, (False, False, False)),
    (other_host, OLD, (True, True, True)),
    (other_host_same_pid, OLD, (True, True, True)),
    (earlier_boot, YOUNG, (True, False, False)),
    (earlier_boot, OLD, (True, True, True)),
    (command_that_exited, YOUNG, (False, False, False)),
    (command_that_exited, OLD, (False, True, False)),
    (pid_used_again, YOUNG, (True, False, False)),
    (pid_used_again, OLD, (True, True, True)),
    (other_namespace, YOUNG, (False, False, False)),
    (other_namespace, OLD, (True, True, True)),
]
AGES = {YOUNG: "young", OLD: "old", FUTURE: "future"}


@pytest.mark.parametrize(
    ("left_by", "age", "policy", "stale"),
    [
        pytest.param(left_by, age, policy, stale, id=f"{left_by.__name__}-{AGES[age]}-{policy}")
        for left_by, age, row in TABLE
        for policy, stale in zip(POLICIES, row, strict=True)
    ],
)
def test_each_policy_replaces_its_kind_of_holder(path, start_holder, left_by, age, policy, stale):
    left_by(path, start_holder, age)
    inode = os.stat(path).st_ino
    lock = LockFile(path, stale=policy, stale_after=3600)
    assert lock.status().stale is stale
    hold = lock.try_acquire()
    if stale:
        assert read(path).pid == os.getpid()
        hold.release()
        assert_nothing_left(path)
    else:
        assert hold is None
        assert os.stat(path).st_ino == inode


@pytest.mark.parametrize(
    ("left_by", "policy", "stale"),
    [
        pytest.param(left_by, policy, left_by in (killed, earlier_boot) and policy == "proof", id=f"{name}-{policy}")
        for left_by, name in ((left_by, left_by.__name__) for left_by in dict.fromkeys(row[0] for row in TABLE))
        for policy in POLICIES
        if left_by is not pid_used_again
    ],
)
def test_without_stale_after_no_lock_is_old(path, start_holder, left_by, policy, stale):
    left_by(path, start_holder, 10 * 365 * 86400)
    lock = LockFile(path, stale=policy, stale_after=None)
    assert lock.status().stale is stale
    hold = lock.try_acquire()
    assert (hold is not None) is stale
    if hold is not None:
        hold.release()


@pytest.mark.parametrize("policy", POLICIES)
def test_old_means_strictly_older_than_stale_after(path, monkeypatch, policy):
    now = 1_735_420_800
    monkeypatch.setattr(staleness, "time", SimpleNamespace(time=lambda: now))
    lock = LockFile(path, stale=policy, stale_after=3600)
    Path(path).write_bytes(compose(Record(NOBODY, now - 3600)))
    assert not lock.status().stale
    assert lock.try_acquire() is None
    Path(path).write_bytes(compose(Record(NOBODY, now - 3601)))
    assert lock.status().stale
    lock.try_acquire().release()


@pytest.mark.parametrize("error", [PermissionError, ProcessLookupError])
def test_a_process_that_may_not_be_signalled_is_alive(path, monkeypatch, error):
    write(path, 4711, OLD)
    asked = []

    def kill(pid, number):
        asked.append((pid, number))
        raise error

    monkeypatch.setattr(os, "kill", kill)
    assert LockFile(path, stale="dead-and-old").status().stale is (error is ProcessLookupError)
    assert asked == [(4711, 0)]


@pytest.mark.parametrize(
    ("left_by", "known"), [(alive, True), (killed, False), (foreign_alive, None), (other_host, None)]
)
def test_status_shows_whether_the_holder_is_proved_alive_or_dead(path, start_holder, left_by, known):
    left_by(path, start_holder, YOUNG)
    assert LockFile(path).status().alive is known


def test_a_pid_of_zero_is_not_our_process_group(path):
    write(path, 0, OLD)
    assert LockFile(path, stale="dead-and-old").status().stale


@pytest.mark.parametrize(
    "content",
    [b"", b"pid=12", b"pid=1\n", b"pid=1\r\ntimestamp=x\r\n", b"pid=1\n\xff\xfe", b"pid=1\n" + b"x" * 70_000],
    ids=lambda c: repr(c[:9]),
)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_or_damaged_file_is_held_until_it_is_old(path, content, policy):
    Path(path).write_bytes(content)
    lock = LockFile(path, stale=policy, stale_after=3600)
    status = lock.status()
    assert status.corrupt and status.held and not status.stale
    with pytest.raises(holdfast.Busy, match="empty or damaged"):
        lock.acquire(timeout=0)
    assert Path(path).read_bytes() == content
    os.utime(path, (time.time() - 7200,) * 2)
    assert LockFile(path, stale=policy, stale_after=None).try_acquire() is None
    status = lock.status()
    assert status.corrupt and status.stale
    with lock:
        assert read(path).pid == os.getpid()
        assert not lock.status().corrupt


def test_a_corrupt_file_of_the_future_is_not_old(path):
    Path(path).touch()
    os.utime(path, (time.time() + 7200,) * 2)
    assert LockFile(path, stale_after=0).try_acquire() is None


def test_a_waiter_gets_a_lock_that_grows_old_meanwhile(path):
    write(path, os.getpid())
    timestamp = read(path).timestamp
    with LockFile(path, stale_after=1.2, timeout=30):
        assert time.time() - timestamp > 1.2


# Waiting.


def until_watching(peer) -> None:
    """Until it sleeps with a watch on the lock file."""
    until(lambda: state_of(peer.pid) == "S" and "anon_inode:inotify" in descriptors(peer.pid).values())
    assert not peer.has_answered()


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "unfair"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("event", ["release", "kill", "break", "foreign release"])
def test_an_event_wakes_the_waiter(path, start_holder, start_peer, way, fair, event):
    if event == "foreign release":
        write(path, os.getpid())
    else:
        holder = start_holder()
    waiter = start_peer(path=path, way=way, fair=fair)
    waiter.do("look_only_when_told()")
    waiter.begin("hold = acquire_by(way, holdfast.LockFile(path, fair=fair))")
    until_watching(waiter)

    if event == "release":
        holder.do("hold.release()")
    elif event == "kill":
        holder.kill()
    elif event == "break":
        LockFile(path).break_()
    else:
        os.unlink(path)

    waiter.answer()  # it looks only when told, so that nothing but an event can have woken it
    assert read(path).pid == waiter.pid
    waiter.do("hold.release()")
    assert_nothing_left(path)


def test_where_no_event_can_be_had_it_looks_again_after_retry(path, monkeypatch, held):
    monkeypatch.setattr(local, "has_events", lambda _: False)
    lock = LockFile(path, retry=0.01)
    waiter = Caller(lock.acquire)
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.05)
    assert waiter.is_alive()
    held.release()
    waiter.result().release()


def test_threads_are_served_first_come_first_served(path, held):
    lock = LockFile(path)
    served = []

    def work(number):
        with lock:
            served.append(number)

    threads = []
    for number in range(6):
        threads.append(Caller(work, number))
        until_waiting(lock, number + 1)
    held.release()
    for thread in threads:
        thread.result()
    assert served == list(range(6))
    assert_nothing_left(path)


def test_threads_exclude_each_other(path):
    inside, worst = [], []

    def work():
        for _ in range(25):
            with LockFile(path, durable=False):
                inside.append(None)
                worst.append(len(inside))
                inside.pop()

    for thread in [Caller(work) for _ in range(4)]:
        thread.result()
    assert worst == [1] * 100
    assert_nothing_left(path)


# Deadlocks, forks, garbage.


def test_waiting_for_oneself_is_refused(path, tmp_path):
    os.symlink(path, tmp_path / "link")
    with LockFile(path) as hold:
        for spelling in (path, tmp_path / "link", tmp_path / "." / "x.lock"):
            with pytest.raises(holdfast.WouldDeadlock):
                LockFile(spelling).acquire()
            with pytest.raises(holdfast.WouldDeadlock):
                LockFile(spelling).acquire(timeout=60)
            assert LockFile(spelling).try_acquire() is None
        hold.check()


def test_a_task_that_would_wait_for_itself_is_told_and_another_one_waits(run, path):
    async def main():
        lock = LockFile(path)
        async with lock, anyio.create_task_group() as group:
            with pytest.raises(holdfast.WouldDeadlock):
                await lock.aacquire()

            async def other():
                with pytest.raises(holdfast.Timeout):
                    await lock.aacquire(timeout=0.05)

            group.start_soon(other)

    run(main)
    assert_nothing_left(path)


def test_a_forked_child_holds_nothing(path, start_holder):
    peer = start_holder()
    assert peer.do("in_child(hold.release)") == "NotOwner"
    assert peer.do("in_child(hold.check)") == "NotOwner"
    assert peer.do("in_child(lambda: hold.released)") is True
    peer.do(
        "def has_it_open():\n"
        "    return any(os.path.samefile(f'/proc/self/fd/{fd}', path) for fd in descriptors() if fd > 2)\n"
    )
    assert peer.do("has_it_open()") is True
    assert peer.do("in_child(has_it_open)") is False
    assert peer.do("in_child(lambda: holdfast.LockFile(path).try_acquire())") is None
    assert peer.do("hold.check()") is None
    assert read(path).pid == peer.pid
    peer.do("hold.release()")
    assert_nothing_left(path)


def test_a_forked_child_does_not_keep_its_dead_parents_lock(path, start_holder):
    peer = start_holder()
    child = peer.do("idle_child()")
    try:
        peer.kill()
        LockFile(path).acquire(timeout=0).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_acquires_in_its_own_name(path, start_peer):
    peer = start_peer(path=path)
    peer.do("lock = holdfast.LockFile(path)")
    peer.do("lock.acquire().release()")
    peer.do(
        "def child():\n"
        "    with lock:\n"
        "        with open(path) as file:\n"
        "            return file.readline() == f'pid={os.getpid()}\\n'\n"
    )
    assert peer.do("in_child(child)") is True


def test_a_forgotten_hold_is_released_with_a_warning_in_the_log(path, tmp_path, durable):
    leftovers = Leftovers(tmp_path)
    holds = [LockFile(path, durable=durable).acquire()]
    with pytest.warns(ResourceWarning, match="never released"):
        holds.clear()
    leftovers.check()


# What is left behind.


def test_acquire_and_release_leave_nothing(path, tmp_path, durable):
    leftovers = Leftovers(tmp_path)
    for options in ({}, {"fair": False}, {"tag": "x", "stale": "old"}):
        for _ in range(3):
            with LockFile(path, durable=durable, **options):
                pass
    leftovers.check()


@pytest.mark.parametrize("fair", [True, False])
def test_looking_and_timing_out_leave_nothing(path, tmp_path, held, durable, fair):
    lock = LockFile(path, durable=durable, fair=fair)
    leftovers = Leftovers(tmp_path)
    assert lock.try_acquire() is None
    lock.status()
    lock.clean()
    for timeout in (0, 0.02):
        with pytest.raises(holdfast.Timeout):
            lock.acquire(timeout=timeout)
    with pytest.raises(holdfast.NotOwner):
        lock.release_as_owner(pid=NOBODY)
    leftovers.check()


@pytest.mark.parametrize("fair", [True, False])
def test_a_cancelled_wait_leaves_nothing(run, path, tmp_path, held, durable, fair):
    async def main():
        lock = LockFile(path, durable=durable, fair=fair)
        leftovers = Leftovers(tmp_path)
        async with anyio.create_task_group() as group:
            group.start_soon(lock.aacquire)
            with anyio.fail_after(60):
                while not any("inotify" in what for what in descriptors().values()):
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        leftovers.check()

    run(main)
    held.check()


def test_breaking_and_taking_over_leave_nothing(path, tmp_path, durable):
    lock = LockFile(path, durable=durable)
    leftovers = Leftovers(tmp_path)
    write(path)
    lock.break_()
    write(path, NOBODY, OLD)
    with lock:
        pass
    write(path, NOBODY, OLD)
    lock.clean()
    leftovers.check()


# The heartbeat.


BEFORE = 1_700_000_000  # some seconds of the past, to see that a timestamp has been renewed


def beating(path, monkeypatch, **options):
    """A hold with a quick heartbeat, acquired long ago."""
    with monkeypatch.context() as patch:
        set_clock(patch, BEFORE * 10**9)
        return LockFile(path, heartbeat=0.01, **options).acquire()


def renewed_later(path):
    """The holds on this file system that wait for their next heartbeat."""
    heart = heartbeat.hearts.get(os.stat(os.path.dirname(path)).st_dev)
    return {} if heart is None else heart.due


def until_renewed(path) -> None:
    eventually(lambda: read(path).timestamp != BEFORE, f"{path} is renewed")


def test_a_heartbeat_renews_the_timestamp_in_place_and_nothing_else(path, monkeypatch):
    before = time.time()
    hold = LockFile(path, heartbeat=3600, tag="timestamp=1").acquire()
    set_age(path, OLD)
    old, inode = Path(path).read_bytes(), os.stat(path).st_ino
    hold.renew()
    new = Path(path).read_bytes()
    assert os.stat(path).st_ino == inode
    assert len(new) == len(old)
    assert before - 1 <= read(path).timestamp <= time.time()
    assert re.sub(rb"timestamp=\d{10}\n", b"", new) == re.sub(rb"timestamp=\d{10}\n", b"", old)
    hold.check()
    hold.release()
    assert_nothing_left(path)


def test_a_heartbeat_comes_by_itself_again_and_again(path, monkeypatch):
    with beating(path, monkeypatch, stale="old"):
        until_renewed(path)
        for _ in range(3):
            set_age(path, OLD)
            eventually(lambda: not LockFile(path, stale="old").status().stale, "the lock is young again")


def test_a_renewed_lock_is_not_taken_by_the_old_policy(path, monkeypatch):
    with beating(path, monkeypatch) as hold:
        until_renewed(path)
        assert LockFile(path, stale="old").try_acquire() is None
        hold.check()


def test_without_a_heartbeat_nothing_is_renewed(path):
    with LockFile(path):
        assert renewed_later(path) == {}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_on_lost_is_called_once_and_the_file_at_the_path_is_not_written_to(path, tmp_path, monkeypatch, accident):
    told = []
    told_twice = threading.Event()

    def on_lost(hold):
        told.append((hold, hold.lost))
        if len(told) > 1:
            told_twice.set()

    hold = LockFile(path, heartbeat=0.01, on_lost=on_lost).acquire()
    with heartbeat.hearts[os.stat(path).st_dev].condition:  # no beat in the middle of the accident
        accident(path)
        before = tree(tmp_path)
    eventually(lambda: told, "on_lost is called")
    assert not told_twice.wait(0.05)
    assert told == [(hold, True)]
    assert hold.lost
    with pytest.raises(holdfast.LockLost):
        hold.release()
    for name, what in tree(tmp_path).items():
        assert what == before[name] or name == "x.lock.moved"


def test_a_heartbeat_ends_with_the_release(path, monkeypatch):
    told = []
    hold = beating(path, monkeypatch, on_lost=told.append)
    until_renewed(path)
    thread = heartbeat.hearts[os.stat(path).st_dev].thread
    hold.release()
    thread.join(30)
    assert not thread.is_alive()
    assert told == []
    assert_nothing_left(path)
    with beating(path, monkeypatch):  # and another one begins with the next hold
        until_renewed(path)


def test_released_holds_with_a_slow_heartbeat_do_not_pile_up(path):
    lock = LockFile(path, heartbeat=3600, durable=False)
    for _ in range(10):
        with lock:
            pass
    assert renewed_later(path) == {}


def test_a_forgotten_hold_is_not_kept_alive_by_its_heartbeat(path):
    holds = [LockFile(path, heartbeat=3600).acquire()]
    with pytest.warns(ResourceWarning, match="never released"):
        holds.clear()
    assert_nothing_left(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_on_lost_that_raises_does_not_stop_the_other_heartbeats(path, monkeypatch):
    def complain(_):
        raise RuntimeError("lost")

    told = threading.Event()
    unlucky = LockFile(path + ".2", heartbeat=0.01, on_lost=lambda hold: (told.set(), complain(hold))).acquire()
    hold = LockFile(path, heartbeat=0.2).acquire()
    os.unlink(path + ".2")
    assert told.wait(30)
    set_age(path, OLD)
    eventually(lambda: time.time() - read(path).timestamp < OLD / 2, "the other hold is renewed")
    hold.release()
    with pytest.raises(holdfast.LockLost):
        unlucky.release()


@pytest.mark.parametrize("seconds", [5, 999_999_999])
def test_a_lock_of_a_machine_without_a_clock_can_be_renewed(path, monkeypatch, seconds):
    """It begins in 1970, with fewer digits, and learns the time from the network while the lock is held."""
    with monkeypatch.context() as patch:
        set_clock(patch, seconds * 10**9)
        hold = LockFile(path, heartbeat=3600, tag="x").acquire()
    found = read(path)
    hold.renew()
    found = found._replace(timestamp=read(path).timestamp)
    assert abs(found.timestamp - time.time()) < 60
    assert read(path) == found
    hold.release()


def test_a_heartbeat_that_meets_the_release_writes_into_no_other_file(path, tmp_path, monkeypatch):
    """The number of the closed descriptor is used again at once, by a file that has nothing to do with locks."""
    hold = LockFile(path, heartbeat=3600).acquire()
    fd = hold.fileno()
    released, written = threading.Event(), threading.Event()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious " * 20)

    def time_of_release():
        releaser = Caller(release_and_open)
        released.wait(1)  # a release that waits for the heartbeat is fine
        releasers.append(releaser)
        return time.time()

    def release_and_open():
        hold.release()
        opened = os.open(victim, os.O_RDWR)
        os.dup2(opened, fd)
        os.close(opened)
        released.set()
        written.wait(30)
        os.close(fd)

    releasers = []
    monkeypatch.setattr(file_hold, "time", SimpleNamespace(time=time_of_release))
    hold.renew()
    released.wait(30)
    written.set()
    releasers[0].result()
    assert victim.read_bytes() == b"precious " * 20
    assert not os.path.exists(path)


# By hand.


def counted(name) -> int:
    return getattr(metrics.kind("file"), name).value


def test_break_takes_the_lock_from_a_living_holder_and_is_logged_and_counted(path, start_holder, caplog):
    peer = start_holder(tag="deploy")
    breaks = counted("breaks")
    with caplog.at_level(logging.INFO, "holdfast"):
        loser = LockFile(path).break_()
    assert (loser.pid, loser.tag) == (peer.pid, "deploy")
    assert counted("breaks") == breaks + 1
    (message,) = caplog.messages
    assert path in message and f"pid {peer.pid}" in message and "deploy" in message
    assert not os.path.exists(path)
    assert peer.do("hold.lost") is True


def test_breaking_a_corrupt_lock_gives_no_record(path):
    Path(path).write_bytes(b"pid=1")
    assert LockFile(path).break_() is None
    assert_nothing_left(path)


def test_a_program_that_ends_with_a_beating_hold_ends(path):
    code = f"import holdfast; hold = holdfast.LockFile({path!r}, heartbeat=0.001).acquire()"
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=True)
        assert done.stderr == b""


@pytest.mark.parametrize("do", [LockFile.break_, LockFile.release_as_owner], ids=["break", "release"])
def test_a_lock_that_is_free_cannot_be_broken(path, do):
    with pytest.raises(holdfast.NotLocked, match="there is no lock file"):
        do(LockFile(path))


def test_a_lock_is_released_in_the_name_of_its_pid(path):
    write(path, 4711)
    LockFile(path).release_as_owner(pid=4711)
    assert_nothing_left(path)
    write(path, os.getpid())
    LockFile(path).release_as_owner()
    assert_nothing_left(path)


def test_a_process_that_is_not_the_owner_needs_force_to_release(path):
    content = write(path, 4711, tag="deploy")
    for options in ({}, {"pid": 4712}):
        with pytest.raises(holdfast.NotOwner, match=r"held by pid 4711 \(deploy\).*force"):
            LockFile(path).release_as_owner(**options)
        assert Path(path).read_bytes() == content
    LockFile(path).release_as_owner(pid=4712, force=True)
    assert_nothing_left(path)


def test_a_corrupt_lock_has_no_owner_and_force_removes_it(path):
    Path(path).write_bytes(b"pid=1\n")
    with pytest.raises(holdfast.NotOwner):
        LockFile(path).release_as_owner(pid=4711)
    assert os.path.exists(path)
    LockFile(path).release_as_owner(force=True)
    assert_nothing_left(path)


def test_the_holder_learns_that_it_was_released_by_hand(path):
    hold = LockFile(path).acquire()
    LockFile(path).release_as_owner()
    with pytest.raises(holdfast.LockLost):
        hold.release()


# Cleaning.


def test_clean_removes_a_stale_lock_and_says_so(path, start_holder):
    start_holder().kill()
    assert LockFile(path).clean() is True
    assert_nothing_left(path)
    assert LockFile(path).clean() is False


def test_clean_leaves_a_lock_that_is_not_stale(path, start_holder):
    start_holder()
    inode = os.stat(path).st_ino
    assert LockFile(path).clean() is False
    assert os.stat(path).st_ino == inode


def private(path, pid=NOBODY, digits=HEX) -> Path:
    return Path(f"{path}.{pid}.{digits}.tmp")


def test_clean_removes_the_private_files_of_dead_processes(path, tmp_path):
    for digits in (HEX, HEX[::-1]):
        private(path, digits=digits).write_bytes(b"")
    with LockFile(path):  # held or not makes no difference
        assert LockFile(path).clean() is True
    assert os.listdir(tmp_path) == []


def test_clean_leaves_everything_that_is_not_an_orphan_of_this_lock(path, tmp_path, start_peer):
    living = start_peer()
    spared = [
        private(path + ".b"),  # of the lock `x.lock.b`
        private(f"{path}.{NOBODY}"),  # of a lock whose name ends in a number
        private(tmp_path / "y.lock"),
        private(path, living.pid),
        private(path, os.getpid()),
        private(path, digits=HEX[1:]),
        private(path, digits=HEX + "0"),
        private(path, digits=HEX.upper()),
        private(path, "b"),
        private(path, "-1"),
        Path(f"{path}.{NOBODY}.tmp"),
        Path(f"{path}.{NOBODY}.{HEX}"),
        Path(f"{path}.fence"),
        Path(f"{path}.tmp"),
    ]
    for file in spared:
        file.write_bytes(b"x")
    before = tree(tmp_path)
    assert LockFile(path).clean() is False
    assert tree(tmp_path) == before


def test_clean_leaves_the_file_of_an_acquirer_in_another_pid_namespace(path):
    """Its pid means nothing here; that it holds the liveness byte does."""
    file = private(path)
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    system.lock_liveness(fd)
    assert LockFile(path).clean() is False
    assert file.exists()
    os.close(fd)
    assert LockFile(path).clean() is True
    assert not file.exists()


def test_clean_removes_the_private_file_of_a_process_killed_before_it_published(path, tmp_path, start_peer):
    peer = start_peer(path=path)
    peer.do(
        "from holdfast import system\n"
        "plain = system.open_fd\n"
        "def open_fd(name, flags, *args, **options):\n"
        "    if flags & os.O_TMPFILE == os.O_TMPFILE: raise OSError(95, 'no')\n"
        "    return plain(name, flags, *args, **options)\n"
        "system.open_fd = open_fd\n"
        "system.link = lambda *args, **options: signal.pause()\n"
    )
    peer.begin("holdfast.LockFile(path).acquire()")
    until(lambda: os.listdir(tmp_path) and state_of(peer.pid) == "S")
    assert LockFile(path).clean() is False
    (name,) = os.listdir(tmp_path)
    assert name.startswith(f"x.lock.{peer.pid}.")
    peer.kill()
    LockFile(path).acquire(timeout=0).release()
    assert LockFile(path).clean() is True
    assert os.listdir(tmp_path) == []


# Paths.


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../x", "a/..", "/tmp/../x", "x\0y", "a/"], ids=repr)
def test_an_unsafe_path_is_refused(name):
    with pytest.raises(holdfast.UnsafePath):
        LockFile(name)
    with pytest.raises(holdfast.UnsafePath):
        LockFile(os.fsencode(name))


@pytest.mark.parametrize("name", ["a..b", "..a", "a..", "...", "ü ö", "-x"])
def test_dots_in_a_name_are_fine(tmp_path, name):
    with LockFile(tmp_path / name):
        assert os.listdir(tmp_path) == [name]
    assert os.listdir(tmp_path) == []


def test_a_relative_path_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = LockFile("x.lock")
    monkeypatch.chdir("/")
    with lock:
        assert os.listdir(tmp_path) == ["x.lock"]


@pytest.mark.parametrize("chain", [["target"], ["second", "target"], ["sub/../sub/target"]], ids=repr)
def test_a_symlink_stands_for_its_target_and_stays(tmp_path, chain, durable):
    (tmp_path / "sub").mkdir()
    names = ["link", *chain]
    for name, target in zip(names, chain, strict=False):
        (tmp_path / name).symlink_to(target)
    target = tmp_path / chain[-1].replace("sub/../", "")
    lock = LockFile(tmp_path / "link", durable=durable)
    for _ in range(2):
        with lock as hold:
            hold.check()
            assert stat.S_ISREG(os.lstat(target).st_mode)
            assert (tmp_path / "link").is_symlink()
            assert LockFile(target).try_acquire() is None
            assert LockFile(tmp_path / "link").try_acquire() is None
        assert not os.path.lexists(target)
        assert (tmp_path / "link").is_symlink()


def test_a_stale_lock_behind_a_symlink_is_replaced_there(path, tmp_path):
    write(path, NOBODY, OLD)
    (tmp_path / "link").symlink_to(path)
    with LockFile(tmp_path / "link", timeout=0):
        assert read(path).pid == os.getpid()
        assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path) == ["link"]


def test_a_symlink_changed_between_two_uses_is_followed(tmp_path):
    link = tmp_path / "link"
    lock = LockFile(link)
    for target in ("one", "two"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with lock as hold:
            hold.check()
            assert sorted(os.listdir(tmp_path)) == sorted(["link", target])
    link.unlink()
    with lock:
        assert os.listdir(tmp_path) == ["link"] and not link.is_symlink()


def test_a_symlink_changed_while_held_means_a_lost_hold(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("one")
    hold = LockFile(link).acquire()
    link.unlink()
    link.symlink_to("two")
    content = write(tmp_path / "two")
    assert hold.lost
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert (tmp_path / "two").read_bytes() == content


@pytest.mark.parametrize("loop", [["link"], ["second", "link"]], ids=repr)
def test_a_symlink_loop_is_an_os_error(tmp_path, loop):
    for name, target in zip(["link", *loop], loop, strict=False):
        (tmp_path / name).symlink_to(target)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        LockFile(tmp_path / "link").acquire(timeout=0)
    assert sorted(os.listdir(tmp_path)) == before


def directory_at(path):
    os.mkdir(path)
    Path(path, "inside").touch()


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


@pytest.mark.parametrize("make", [directory_at, os.mkfifo, socket_at])
@pytest.mark.parametrize(
    "do",
    [
        LockFile.acquire,
        LockFile.try_acquire,
        LockFile.status,
        LockFile.break_,
        LockFile.clean,
        partial(LockFile.release_as_owner, force=True),
    ],
    ids=["acquire", "try", "status", "break", "clean", "force"],
)
def test_a_path_that_is_no_regular_file_is_refused_and_left(tmp_path, monkeypatch, make, do, durable):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    make("x.lock")
    before = os.lstat("x.lock")
    leftovers = Leftovers(tmp_path)
    with pytest.raises(holdfast.NotALockFile, match="left untouched"):
        do(LockFile("x.lock", stale_after=0, durable=durable))
    after = os.lstat("x.lock")
    assert (after.st_ino, after.st_mode, after.st_nlink) == (before.st_ino, before.st_mode, before.st_nlink)
    leftovers.check()


@pytest.mark.parametrize("link", [False, True], ids=["plain", "link"])
def test_the_error_names_a_missing_parent_directory(tmp_path, link, durable):
    path = tmp_path / "missing" / "x.lock"
    if link:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with pytest.raises(FileNotFoundError, match="directory for this lock does not exist; make it first") as caught:
        LockFile(path, durable=durable).acquire()
    assert caught.value.filename == str(path)


def test_the_error_names_a_parent_directory_that_was_removed_since(tmp_path, durable):
    (tmp_path / "room").mkdir()
    lock = LockFile(tmp_path / "room" / "x.lock", durable=durable)
    lock.acquire().release()
    (tmp_path / "room").rmdir()
    with pytest.raises(FileNotFoundError, match="directory for this lock does not exist; make it first"):
        lock.acquire(timeout=30)


def test_a_file_as_parent_directory_is_an_os_error(tmp_path, durable):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        LockFile(tmp_path / "file" / "x.lock", durable=durable).acquire()


@pytest.fixture(params=["durable", "writable by others"])
def swappable(request, tmp_path):
    """A lock in a directory, the directory, and how to put a link to another one in its place."""
    if request.param != "durable":
        os.chmod(tmp_path, 0o777)
    inside, elsewhere = tmp_path / "inside", tmp_path / "elsewhere"
    inside.mkdir()
    elsewhere.mkdir()

    def swap():
        inside.rename(tmp_path / "moved")
        inside.symlink_to(elsewhere)

    return LockFile(inside / "x.lock", durable=request.param == "durable"), elsewhere, swap


def test_a_directory_swapped_while_held_makes_us_remove_nothing_elsewhere(swappable):
    lock, elsewhere, swap = swappable
    hold = lock.acquire()
    swap()
    write(elsewhere / "x.lock")
    before = tree(elsewhere)
    with suppress(holdfast.LockLost):
        hold.release()
    assert tree(elsewhere) == before


@pytest.mark.parametrize("durable", [True, False])
def test_a_link_that_follows_our_file_elsewhere_does_not_make_us_remove_another_holders_file(tmp_path, durable):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("a/x.lock")
    hold = LockFile(link, durable=durable).acquire()
    (tmp_path / "a/x.lock").rename(tmp_path / "b/x.lock")
    link.unlink()
    link.symlink_to("b/x.lock")
    other = LockFile(tmp_path / "a/x.lock", durable=durable).acquire()
    with suppress(holdfast.LockLost):
        hold.release()
    assert not other.lost
    other.release()


def test_a_link_in_place_of_our_file_is_not_removed(tmp_path):
    path = tmp_path / "x.lock"
    hold = LockFile(path).acquire()
    path.rename(tmp_path / "real")
    path.symlink_to("real")
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert path.is_symlink()


def test_a_durable_lock_syncs_its_directory_also_if_a_disk_was_mounted_there_since(path, monkeypatch):
    lock = LockFile(path)
    lock._engine.location._is_safe, lock._engine.location.keeps = True, False  # as after an acquire on tmpfs
    synced = []
    real = system.fsync

    def fsync(fd):
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        real(fd)

    monkeypatch.setattr(system, "fsync", fsync)
    with lock:
        assert synced == [False, True]


def test_a_directory_swapped_while_we_acquire_makes_us_write_nothing_elsewhere(swappable, monkeypatch):
    lock, elsewhere, swap = swappable
    plain = system.link_open_file

    def swap_and_link(*args):
        swap()
        plain(*args)

    monkeypatch.setattr(system, "link_open_file", swap_and_link)
    hold = lock.acquire()
    assert os.listdir(elsewhere) == []
    with suppress(holdfast.LockLost):
        hold.release()


def test_a_directory_swapped_while_we_remove_a_stale_lock_makes_us_remove_nothing_elsewhere(swappable, monkeypatch):
    lock, elsewhere, swap = swappable
    write(lock.path, NOBODY, OLD)
    write(elsewhere / "x.lock", NOBODY, OLD)
    before = tree(elsewhere)
    plain = system.lock_removal

    def swap_and_lock(fd):
        monkeypatch.setattr(system, "lock_removal", plain)
        swap()
        plain(fd)

    monkeypatch.setattr(system, "lock_removal", swap_and_lock)
    hold = lock.try_acquire()
    assert tree(elsewhere) == before
    if hold is not None:
        with suppress(holdfast.LockLost):
            hold.release()
    assert tree(elsewhere) == before


# Counting.


def test_metrics_count_acquisitions_waits_breaks_and_losses(path, monkeypatch):
    monkeypatch.setattr(metrics, "kinds", {})
    lock = LockFile(path)
    held = in_thread(lock.acquire)
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.01)
    waiter = Caller(lock.acquire)
    until_waiting(lock, 1)
    held.release()
    hold = waiter.result()
    lock.break_()
    with pytest.raises(holdfast.LockLost):
        hold.release()
    write(path, NOBODY, OLD)
    with lock:
        pass
    taken = metrics.snapshot()
    assert {name: taken["file"][name] for name in ("acquisitions", "contended", "timeouts", "breaks", "losses")} == {
        "acquisitions": 3,
        "contended": 1,
        "timeouts": 1,
        "breaks": 2,
        "losses": 1,
    }


RECORD_WAITS = """
look_only_when_told()
from holdfast.wait import Readable
waits, block = [], Readable.block

def recorded(step):
    waits.append(step.left())
    block(step)

Readable.block = recorded
"""


def test_a_waiter_looks_within_50_ms_of_the_death_of_the_holder(path, start_peer):
    """The kernel reports the death before it drops the locks: 1, 11 and 111 ms after an event the waiter looks again.

    What is compared is how long the waiter wants to sleep, which does not depend on how busy the machine is.
    """
    holder, waiter = start_peer(path=path), start_peer(path=path)
    holder.do("hold = holdfast.LockFile(path).acquire()")
    waiter.do(RECORD_WAITS)
    waiter.begin("hold = holdfast.LockFile(path).acquire()")
    until_watching(waiter)
    poke(path)  # an event, as the death of the holder is, and the locks are not dropped yet
    until_asleep([waiter.pid])
    holder.kill()
    waiter.answer()
    until_event, *soon, until_death = waiter.do("waits")[:5]
    waiter.do("hold.release()")
    assert until_event is until_death is None
    assert all(wait <= longest for wait, longest in zip(soon, (0.001, 0.01, 0.1), strict=True))
