"""What use has found: each of these went wrong once, with lock files of ours beside other users, tools and kinds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from support import NO_PROCESS, Peer, Raised, in_child, until

import holdfast
from holdfast import LockFile, NotALockFile, TaskLocks, owner, system
from holdfast.locks import engine, file_engine, file_hold, record, removal, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEEDS_ROOT = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can be several users")
STRANGER, USER = 12345, 23456  # user ids
LONG_AGO = 1_000_000_000
LONG = 3600.0  # seconds


def as_user(uid: int, work: Any) -> Any:
    """The value of `work()` in a process of another user, or the name of the error that it raised."""

    def change_and_work() -> Any:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return work()

    return in_child(change_and_work)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Where several users can be; the path that pytest makes is closed to others."""
    with TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


# Directories that others can write to.


@NEEDS_ROOT
@pytest.mark.parametrize("content", [b"", b"my thesis\n"], ids=["empty", "text"])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_a_symlink_of_another_user_in_a_sticky_directory_is_not_followed(
    chain: bool, durable: bool, content: bytes, shared_directory: Path, tmp_path: Path
) -> None:
    os.chmod(shared_directory, 0o1777)
    target = tmp_path / "thesis.txt"
    target.write_bytes(content)
    os.utime(target, (LONG_AGO, LONG_AGO))
    path = shared_directory / "x.lock"
    path.symlink_to(target)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    if chain:
        (shared_directory / "first").symlink_to(path)
        path = shared_directory / "first"
    lock = LockFile(path, durable=durable)
    for call in (lock.try_acquire, lambda: lock.acquire(timeout=0), lock.clean, lock.break_, lock.status):
        with pytest.raises(ValueError, match=f"user {STRANGER}"):
            call()
    assert target.read_bytes() == content and os.listdir(tmp_path) == ["thesis.txt"]


@NEEDS_ROOT
@pytest.mark.parametrize(("mode", "maker"), [(0o1777, 0), (0o777, 0), (0o755, STRANGER), (0o1777, USER)])
def test_a_symlink_that_is_trusted_is_followed(mode: int, maker: int, shared_directory: Path, tmp_path: Path) -> None:
    os.chown(shared_directory, USER, USER)  # the owner of the directory
    path = shared_directory / "x.lock"
    path.symlink_to(tmp_path / "target")
    os.chown(path, maker, maker, follow_symlinks=False)
    os.chmod(shared_directory, mode)
    with LockFile(path, durable=False):
        assert os.listdir(tmp_path) == ["target"]


@NEEDS_ROOT
@pytest.mark.parametrize("age", [0, 7200], ids=["fresh", "stale"])
def test_the_lock_file_of_another_user_in_a_sticky_directory_is_busy(age: int, shared_directory: Path) -> None:
    os.chmod(shared_directory, 0o1777)
    path = shared_directory / "x.lock"
    path.write_bytes(b"pid=%d\ntimestamp=%d\n" % (os.getpid(), time.time() - age))
    for mode in (0o666, 0o644, 0o600):
        os.chmod(path, mode)
        assert as_user(USER, LockFile(path, fair=False).try_acquire) is None
        assert as_user(USER, LockFile(path, durable=False).clean) is False
        assert as_user(USER, lambda: LockFile(path).acquire(0)) == "Busy"
        assert as_user(USER, LockFile(path).break_) == "PermissionError"
    assert os.listdir(shared_directory) == ["x.lock"]


@NEEDS_ROOT
def test_the_lock_file_of_another_user_in_a_shared_directory_is_taken_over_and_removed(shared_directory: Path) -> None:
    """As sema does: to unlink a file takes the right to write its directory."""
    path = shared_directory / "x.lock"
    fresh = b"pid=%d\ntimestamp=%d\n" % (os.getpid(), time.time())
    path.write_bytes(fresh)
    assert as_user(USER, LockFile(path).try_acquire) is None
    assert as_user(USER, lambda: LockFile(path).release_as_owner(1)) == "NotOwner"
    assert path.read_bytes() == fresh
    assert as_user(USER, lambda: LockFile(path).release_as_owner(1, force=True)) is None
    assert not path.exists()
    path.write_bytes(b"pid=%d\ntimestamp=1\n" % NO_PROCESS)
    assert as_user(USER, lambda: LockFile(path).acquire(0).release()) is None
    assert os.listdir(shared_directory) == []


@NEEDS_ROOT
def test_a_fence_of_another_user_in_a_sticky_directory_is_not_believed(shared_directory: Path) -> None:
    os.chmod(shared_directory, 0o1777)
    fence = shared_directory / "x.lock.fence"
    fence.write_text(f"{2**62}\n")
    os.chown(fence, STRANGER, STRANGER)
    with pytest.raises(holdfast.UnsafePath, match="another user"):
        LockFile(shared_directory / "x.lock", fence=True).try_acquire()
    assert os.listdir(shared_directory) == ["x.lock.fence"]


# User data.

DATA = [
    b"my thesis\n",
    b"\n",
    b"pid=\n",
    b"pid=once upon a time\n",
    b"pid = 12\n",
    b"tag=v1\nDEBUG=1\n",
    b"timestamp=7\nvalue=1\n",
    b"permits=3\n",
    b"{",
    b"\xff\xfe",
    bytes(100),
    json.dumps({"worker_id": "w", "started_at": "2020-01-01T00:00:00+00:00", "task_id": "x"}).encode(),
]


@pytest.mark.parametrize("content", DATA, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("old", [False, True])
def test_a_file_that_is_no_lock_file_is_refused_and_left_untouched(content: bytes, old: bool, path: str) -> None:
    Path(path).write_bytes(content)
    if old:
        os.utime(path, (LONG_AGO, LONG_AGO))
    before = os.stat(path)
    lock = LockFile(path)
    calls: list[Callable[[], object]] = [lock.try_acquire, lambda: lock.acquire(timeout=0.1), lambda: lock.acquire(0)]
    calls += [lock.clean, lock.break_, lock.status, lambda: lock.release_as_owner(force=True)]
    calls += [lambda: lock.wait_until_free(0), lambda: lock.acquire_as_owner(os.getpid(), 0)]
    for call in calls:
        with pytest.raises(NotALockFile, match="left untouched"):
            call()
    after = os.stat(path)
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert Path(path).read_bytes() == content and os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_refusal_names_the_other_kind_of_lock(path: str) -> None:
    for content, what in ((DATA[-1], "the lock of a task"), (b"permits=3\n", "semaphore"), (b"?", "other content")):
        Path(path).write_bytes(content)
        with pytest.raises(NotALockFile, match=what):
            LockFile(path).try_acquire()


@pytest.mark.parametrize("content", [b"pid=1\ntimestamp=1\n", b"permits=3\n"])
def test_a_claim_refuses_the_locks_of_other_kinds(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "t.lock"
    file.write_bytes(content)
    os.utime(file, (LONG_AGO, LONG_AGO))
    locks = TaskLocks(tmp_path, "w")
    for call in (locks.claim, locks.status):
        with pytest.raises(NotALockFile, match=r"sema format|semaphore"):
            call("t")
    assert file.read_bytes() == content


# Rule 10: a path is one kind of lock.

OURS = {
    "LockFile": "holdfast.LockFile(path)",
    "TaskLocks": "holdfast.TaskLocks(os.path.dirname(path), 'w')._lock('x')",
}
OTHERS = {
    "Lock": "Lock(path)",
    "shared": "Lock(path, shared=True)",
    "keep": "Lock(path, keep=True)",
    "Semaphore": "Semaphore(path, 2)",
}


class Kind:
    """One kind of lock on one path, in a process of its own."""

    def __init__(self, name: str, path: str, peer: Peer) -> None:
        self.name = name
        self.path = path
        self.peer = peer
        self._flock: subprocess.Popen[bytes] | None = None
        if name != "flock":
            peer.do(f"hold = None; lock = {(OURS | OTHERS)[name]}")

    def try_it(self) -> bool:
        """False: it is busy, or it is refused because it is another kind of lock."""
        if self.name == "flock":
            self._flock = subprocess.Popen(["flock", "-n", self.path, "sh", "-c", "echo in; read x"], **PIPES)
            assert self._flock.stdout is not None
            return self._flock.stdout.readline() == b"in\n" or self.end()
        try:
            self.peer.do("hold = lock.try_acquire()")
        except Raised as error:
            if error.name == "NotALockFile":
                return False
            raise
        return bool(self.peer.do("hold is not None"))

    def end(self) -> bool:
        if self._flock is not None:
            self._flock.communicate(b"\n", timeout=30)
            self._flock = None
        elif self.name != "flock":
            self.peer.do("if hold is not None: hold.release()\nhold = None")
        return False


PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def pairs() -> list[tuple[str, str]]:
    others = [*OTHERS, "flock"]
    mixed = [(ours, other) for ours in OURS for other in others]
    return [*mixed, *((other, ours) for ours, other in mixed), ("LockFile", "TaskLocks"), ("TaskLocks", "LockFile")]


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock(1)")
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "old"])
@pytest.mark.parametrize(("first", "second"), pairs())
def test_two_kinds_of_lock_on_one_path_never_have_two_holders(
    first: str, second: str, old: bool, tmp_path: Path, start_peer: Callable[..., Peer]
) -> None:
    path = str(tmp_path / "x.lock")
    one = Kind(first, path, start_peer(path=path))
    other = Kind(second, path, start_peer(path=path))
    try:
        assert one.try_it()
        inode = os.stat(path).st_ino
        if old:
            os.utime(path, (LONG_AGO, LONG_AGO))
        assert not other.try_it()
        assert os.stat(path).st_ino == inode, "the file of the first one is there"
        one.end()
        # What the first one left is free to the second one, or busy, or refused. If it is free, it is not for both.
        if old and os.path.exists(path):
            os.utime(path, (LONG_AGO, LONG_AGO))
        if other.try_it():
            assert not one.try_it()
    finally:
        one.end()
        other.end()


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock(1)")
def test_flock_waits_for_a_lock_file_and_its_release_frees_it(path: str) -> None:
    hold = LockFile(path).acquire()
    waiter = subprocess.Popen(["flock", path, "echo", "in"], **PIPES)
    until(lambda: "->" in Path("/proc/locks").read_text())
    assert waiter.poll() is None
    hold.release()
    assert waiter.communicate(timeout=30)[0] == b"in\n"


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock(1)")
@pytest.mark.parametrize("content", [b"", b"pid=1", b"pid=%d\ntimestamp=1\n" % NO_PROCESS])
def test_a_stale_file_on_which_flock_is_held_is_never_removed(content: bytes, path: str) -> None:
    Path(path).write_bytes(content)
    os.utime(path, (LONG_AGO, LONG_AGO))
    flock = subprocess.Popen(["flock", path, "sh", "-c", "echo in; read x"], **PIPES)
    assert flock.stdout is not None and flock.stdout.readline() == b"in\n"
    lock = LockFile(path)
    assert lock.try_acquire() is None and lock.clean() is False
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.05)
    for call in (lock.break_, lambda: lock.release_as_owner(force=True)):
        with pytest.raises(NotALockFile, match="in use"):
            call()
    assert Path(path).read_bytes() == content
    flock.communicate(b"\n", timeout=30)
    lock.acquire(timeout=0).release()


def test_a_lock_that_is_renewed_between_the_two_judgements_is_not_removed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was old at the first look, and is not when the remover has the right to remove it."""
    hold = LockFile(path, heartbeat=LONG).acquire()
    content = Path(path).read_bytes()
    os.pwrite(hold.fileno(), b"0000000001", content.index(b"timestamp=") + len(b"timestamp="))
    take = removal.take_removal_byte
    renewed: list[bool] = []

    def renew_first(fd: int, tries: int = 1) -> bool:
        if not renewed:
            renewed.append(True)
            hold.renew()
        return take(fd, tries)

    monkeypatch.setattr(file_engine, "take_removal_byte", renew_first)
    monkeypatch.setattr(file_engine, "excludes_other_kinds", lambda *_: True)  # which would keep the file, too
    rival = LockFile(path, stale="old")
    assert rival.try_acquire() is None and rival.clean() is False
    assert renewed
    hold.check()
    hold.release()


# Time and input and output.


def test_a_busy_try_costs_one_look_and_no_fsync(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = LockFile(path)
    with LockFile(path):
        calls: list[str] = []
        for name in ("fsync", "open_fd", "write", "pread"):
            real = getattr(system, name)
            monkeypatch.setattr(
                system, name, lambda *args, name=name, real=real, **more: (calls.append(name), real(*args, **more))[1]
            )
        assert lock.try_acquire() is None
        assert calls == ["open_fd", "open_fd", "pread"], "the directory, the file, its content"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs two file systems")
def test_a_mount_that_hangs_stops_no_other_lock(path: str, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.stat(in_memory).st_dev == os.stat(os.path.dirname(path)).st_dev:
        pytest.skip("needs two file systems")
    hung, go_on = threading.Event(), threading.Event()
    slow = LockFile(path, heartbeat=0.01).acquire()
    number = slow.fileno()
    pwrite = system.pwrite

    def hang(fd: int, *args: Any) -> int:
        if fd == number:
            hung.set()
            go_on.wait(60)
        return pwrite(fd, *args)

    monkeypatch.setattr(system, "pwrite", hang)
    try:
        assert hung.wait(30)
        with LockFile(in_memory / "other", heartbeat=0.01) as other:
            content = Path(in_memory / "other").read_bytes()
            os.pwrite(other.fileno(), b"0000000001", content.index(b"timestamp=") + 10)
            until(lambda: record.parse(Path(in_memory / "other").read_bytes()).timestamp > 1)  # renewed
        with LockFile(f"{path}.beside"):
            pass
    finally:
        go_on.set()
        slow.release()


def test_a_parent_directory_that_became_a_file_is_a_lost_lock(tmp_path: Path) -> None:
    room = tmp_path / "room"
    for durable in (False, True):
        room.mkdir()
        hold = LockFile(room / "x.lock", durable=durable).acquire()
        shutil.rmtree(room)
        room.write_text("a file")
        assert hold.lost
        with pytest.raises(holdfast.LockLost):
            hold.release()
        room.unlink()


# Wrong answers.


def of_another_namespace(pid: int) -> bytes:
    me = owner.me()
    return record.compose(
        record.Record(pid, int(time.time()), "other", me.host, me.boot, "1:1", call="0123456789abcdef")
    )


def test_a_holder_in_another_pid_namespace_is_not_taken_for_a_process_here(path: str) -> None:
    for pid in (os.getpid(), NO_PROCESS):
        Path(path).write_bytes(of_another_namespace(pid))
        status = LockFile(path).status()
        assert (status.holders[0].command, status.holders[0].host, status.alive) == (None, owner.me().host, None)
        assert "python" not in status.explain()
        found = LockFile(path, stale="dead-and-old").examine()
        assert found is not None and found.alive is None and not found.is_dead


@pytest.mark.parametrize("more", [b"", b"owner=alice\n", b"host=web1\nowner=alice\ncall=7\n"])
def test_a_token_of_another_tool_is_not_a_time(more: bytes, path: str) -> None:
    Path(path).write_bytes(b"pid=%d\ntimestamp=%d\ntoken=7\n%b" % (os.getpid(), LONG_AGO, more))
    status = LockFile(path).status()
    assert status.timestamp == status.since == LONG_AGO


@pytest.mark.parametrize("token", [2**63 - 1, 2**63 - 2])
def test_a_token_of_another_tool_leaves_room_for_ours(token: int, path: str) -> None:
    Path(path).write_bytes(b"pid=1\ntimestamp=1\ntoken=%d\n" % token)
    for _ in range(2):
        with LockFile(path, fence=True, stale="old") as hold:
            assert hold.token < 2**62


def test_status_shows_the_timestamp_of_the_file_with_a_heartbeat(path: str) -> None:
    with LockFile(path, heartbeat=3600) as hold:
        later = hold.acquired_at + 100
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_hold.time, "time", lambda: later)
            hold.renew()
        status = LockFile(path).status()
        assert status.timestamp == int(later)
        assert status.since is not None and abs(status.since - hold.acquired_at) < 10


def test_the_greatest_token_that_was_seen_stays_the_greatest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread notes a greater one between the look and the store."""
    others: list[threading.Thread] = []

    class Racing(dict[str, int]):
        def race(self) -> None:
            if not others:
                others.append(threading.Thread(target=tokens.note, args=("x", 9)))
                others[0].start()
                others[0].join(0.2)

        def get(self, *args: Any) -> Any:
            found = dict.get(self, *args)
            self.race()
            return found

        def pop(self, *args: Any) -> Any:
            found = dict.pop(self, *args)
            self.race()
            return found

    monkeypatch.setattr(tokens, "_last", Racing(x=1))
    tokens.note("x", 5)
    others[0].join()
    assert tokens._last["x"] == 9


def test_threads_that_share_a_lock_see_all_of_a_changed_link(tmp_path: Path) -> None:
    """None of them looks for the one name in the other directory."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("one/x.one")
    lock = LockFile(link, durable=False, fair=False)
    stop = threading.Event()
    wrong: list[object] = []

    def use() -> None:
        while not stop.is_set():
            hold = lock.try_acquire()
            location = lock._engine.location
            if os.path.basename(location.parent) not in (os.path.basename(location.name)[2:], tmp_path.name):
                wrong.append(location.file)
            if hold is not None:
                try:
                    hold.release()
                except holdfast.LockLost:
                    pass  # the link leads elsewhere

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(300):
        (tmp_path / "new").symlink_to(("one/x.one", "two/x.two")[turn % 2])
        os.rename(tmp_path / "new", link)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert os.listdir(tmp_path / "one") + os.listdir(tmp_path / "two") == []


@pytest.mark.parametrize("make", [holdfast.Lock, lambda path: LockFile(path, durable=False)], ids=["lock", "file"])
def test_a_changed_link_gives_the_lock_a_new_location(make: Callable[[str], Any], tmp_path: Path) -> None:
    """The old one never changes: another thread may be in the middle of an attempt there."""
    link = tmp_path / "link"
    link.symlink_to("one")
    lock = make(str(link))
    lock.acquire().release()
    before = lock._engine.location
    parts = {name: getattr(before, name) for name in ("file", "queue")}
    link.unlink()
    link.symlink_to("two")
    lock.acquire().release()
    assert lock._engine.location.file == str(tmp_path / "two")
    assert {name: getattr(before, name) for name in parts} == parts and before.file == str(tmp_path / "one")


# Task locks.


def test_a_corrupted_task_lock_is_understood_by_python_without_asserts(tmp_path: Path) -> None:
    (tmp_path / "t.lock").write_text('{"started_at": null}')
    os.utime(tmp_path / "t.lock", (LONG_AGO, LONG_AGO))
    code = f"import holdfast; holdfast.TaskLocks({str(tmp_path)!r}, 'w').claim('t').release()"
    subprocess.run([sys.executable, "-O", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("whole_second", [False, True])
@pytest.mark.parametrize(("age", "free"), [(299.7, False), (300.3, True)])
def test_a_task_lock_is_stale_when_it_is_older_than_300_seconds(
    age: float, free: bool, whole_second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the second of which other workers write no fraction, and of ours to the microsecond."""
    began = 1_800_000_000 if whole_second else 1_800_000_000.5
    moment = datetime.fromtimestamp(began, timezone.utc).isoformat()
    (tmp_path / "t.lock").write_text(json.dumps({"worker_id": "x", "started_at": moment, "task_id": "t"}))
    monkeypatch.setattr("holdfast.locks.staleness.time.time", lambda: began + age)
    hold = TaskLocks(tmp_path, "w").claim("t")
    assert (hold is not None) == free
    if hold is not None:
        hold.release()


def test_our_task_lock_has_microseconds_and_keeps_its_length(tmp_path: Path) -> None:
    earliest = time.time()
    hold = TaskLocks(tmp_path, "w").claim("t")
    assert hold is not None
    before = (tmp_path / "t.lock").read_bytes()
    began = datetime.fromisoformat(json.loads(before)["started_at"])
    assert earliest - 0.00001 < began.timestamp() < time.time() + 0.00001
    assert earliest <= hold.acquired_at <= time.time()
    hold.renew()
    after = (tmp_path / "t.lock").read_bytes()
    assert len(after) == len(before) and json.loads(after)["started_at"] > json.loads(before)["started_at"]
    hold.release()


def test_an_attempt_does_not_sleep_while_another_process_keeps_the_removal_byte(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process may be stopped. The caller pauses between attempts, and lets other tasks run meanwhile."""
    Path(path).touch()
    os.utime(path, (LONG_AGO, LONG_AGO))
    sleeps: list[float] = []
    monkeypatch.setattr(removal, "sleep", sleeps.append)
    lock = LockFile(path, durable=False)
    remover = os.open(path, os.O_RDWR)
    try:
        system.lock_removal(remover)
        assert lock._engine.attempt() is engine.REMOVING and not sleeps
        with pytest.raises(holdfast.Timeout):
            lock.acquire(timeout=0.05)
    finally:
        os.close(remover)
    lock.acquire(timeout=60).release()


def test_a_holder_that_dies_while_its_lock_is_broken_is_not_taken_for_another_kind_of_lock(
    path: str, start_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start_peer(path=path)
    holder.do("hold = holdfast.LockFile(path, durable=False).acquire()")
    lock, busy = system.lock, []

    def die_after_it_was_busy(fd: int, op: int) -> None:
        try:
            lock(fd, op)
        except BlockingIOError:
            busy.append(fd)
            holder.kill()
            raise

    monkeypatch.setattr(system, "lock", die_after_it_was_busy)
    LockFile(path).break_()
    assert busy and not os.path.exists(path)
