"""Options of `Lock` and `LockFile` for files that other programs own or read."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import threading

import pytest
from faces import PATIENCE, Caller, eventually, in_thread, until_waiting
from support import NO_PROCESS, Peer

import holdfast
from holdfast import Lock, LockFile, NotALockFile, Semaphore, Timeout, UnsafePath


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


def facts(path):
    st = os.stat(path)
    return st.st_ino, st.st_size, st.st_mtime_ns, stat.S_IMODE(st.st_mode)


@pytest.fixture
def wide_umask():
    before = os.umask(0o077)
    yield
    os.umask(before)


# content=True


def test_a_data_file_can_be_locked_and_stays_as_it_is(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n1,2\n")
    os.utime(data, (1_000_000_000, 1_000_000_000))
    before = facts(data)
    for keep in (False, True):
        for shared in (False, True):
            with Lock(data, content=True, keep=keep, shared=shared):
                assert data.read_text() == "a,b\n1,2\n"
    assert facts(data) == before


def test_a_data_file_is_handed_over_and_stays_as_it_is(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n")
    before = facts(data)
    hold = in_thread(Lock(data, content=True).acquire)
    waiters = [Caller(lambda: Lock(data, content=True).acquire(timeout=PATIENCE).release()) for _ in range(3)]
    until_waiting(Lock(data, content=True), 3)
    hold.release()
    for waiter in waiters:
        waiter.result()
    assert facts(data) == before
    assert os.listdir(tmp_path) == ["table.csv"]


def test_a_holder_may_write_into_the_file(path):
    with Lock(path, content=True):
        with open(path, "w") as file:
            file.write("written by the holder")
        with pytest.raises(Timeout):
            in_thread(lambda: Lock(path, content=True).acquire(timeout=0))
    with open(path) as file:
        assert file.read() == "written by the holder"


def test_a_waiter_that_gives_up_leaves_a_data_file(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n")
    with Lock(data, content=True), pytest.raises(Timeout):
        in_thread(lambda: Lock(data, content=True).acquire(timeout=0.05))
    assert data.read_text() == "a,b\n"


def test_a_crashed_holder_leaves_a_data_file(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n")
    with Peer(path=str(data)) as peer:
        peer.do("hold = Lock(path, content=True).acquire()")
        assert Lock(data, content=True).try_acquire() is None
        peer.kill()
        with Lock(data, content=True, timeout=PATIENCE):
            assert data.read_text() == "a,b\n"
    assert data.read_text() == "a,b\n"


def test_another_kind_of_lock_is_refused_although_it_has_content(path):
    with LockFile(path), pytest.raises(NotALockFile, match="LockFile"):
        Lock(path, content=True).acquire(timeout=0)
    with Semaphore(path, 2), pytest.raises(NotALockFile, match="semaphore"):
        Lock(path, content=True, shared=True).acquire(timeout=0)


def test_without_the_option_content_is_refused(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n")
    with Lock(data, content=True), pytest.raises(NotALockFile):
        Lock(data).acquire(timeout=0)


# exact_mode


@pytest.mark.parametrize("kind", [Lock, LockFile])
@pytest.mark.parametrize("mode", [0o666, 0o640, 0o600])
def test_an_exact_mode_ignores_the_umask(path, kind, mode, wide_umask):
    with kind(path, mode=mode, exact_mode=True):
        assert stat.S_IMODE(os.stat(path).st_mode) == mode


@pytest.mark.parametrize("kind", [Lock, LockFile])
def test_the_umask_applies_without_the_option(path, kind, wide_umask):
    with kind(path, mode=0o666):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_file_that_exists_keeps_its_permissions(path):
    with open(path, "w"):
        pass
    os.chmod(path, 0o604)
    with Lock(path, mode=0o666, exact_mode=True, keep=True):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o604


def test_an_exact_mode_reaches_the_target_of_a_symlink_that_does_not_exist(tmp_path, wide_umask):
    (tmp_path / "link").symlink_to("target")
    with Lock(tmp_path / "link", mode=0o664, exact_mode=True):
        assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o664


# follow=False


@pytest.mark.parametrize("kind", [Lock, LockFile])
@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_is_refused(tmp_path, kind, exists):
    target = tmp_path / "target"
    if exists:
        target.touch()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(UnsafePath, match="follow=False"):
        kind(tmp_path / "link", follow=False).acquire(timeout=0)
    assert target.exists() is exists
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("kind", [Lock, LockFile])
def test_a_file_is_accepted_without_following(path, kind):
    with kind(path, follow=False):
        assert kind(path, follow=False).try_acquire() is None
    kind(path, follow=False).acquire(timeout=0).release()


def test_a_symlink_that_appears_during_the_wait_is_refused(tmp_path):
    path = tmp_path / "x.lock"
    lock = Lock(path, follow=False, keep=True)
    hold = in_thread(lock.acquire)
    waiter = Caller(lambda: Lock(path, follow=False, keep=True).acquire(timeout=PATIENCE))
    until_waiting(lock, 1)
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "link").rename(path)
    with pytest.raises(holdfast.LockLost):
        hold.release()
    with pytest.raises(UnsafePath):
        waiter.result()
    assert not (tmp_path / "elsewhere").exists()


# cancel_check


def test_a_wait_ends_when_cancel_check_returns_true(path):
    cancelled = threading.Event()
    hold = in_thread(Lock(path).acquire)
    waiter = Caller(lambda: Lock(path).acquire(cancel_check=cancelled.is_set))
    until_waiting(Lock(path), 1)
    cancelled.set()
    with pytest.raises(Timeout, match="cancel_check"):
        waiter.result()
    eventually(lambda: not Lock(path).status().waiters, "the waiter leaves the queue")
    hold.release()
    assert not os.path.exists(path)


def test_a_wait_ends_with_the_exception_of_cancel_check(path):
    hold = in_thread(Lock(path).acquire)
    waiter = Caller(lambda: Lock(path).acquire(timeout=PATIENCE, cancel_check=lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        waiter.result()
    hold.release()
    assert not os.path.exists(path)


def test_a_free_lock_does_not_ask(path):
    Lock(path).acquire(cancel_check=lambda: 1 / 0).release()
    with Lock(path), pytest.raises(holdfast.Busy):
        in_thread(lambda: Lock(path).acquire(timeout=0, cancel_check=lambda: 1 / 0))


@pytest.mark.parametrize("kind", [Lock, LockFile])
def test_a_waiter_that_is_asked_keeps_its_place_in_the_queue(path, kind):
    order = []
    asked = threading.Event()

    def is_cancelled():
        asked.set()
        return False

    def acquire(name, **options):
        with kind(path).acquire(**options):
            order.append(name)

    hold = in_thread(kind(path).acquire)
    first = Caller(lambda: acquire("first", cancel_check=is_cancelled))
    until_waiting(kind(path), 1)
    others = []
    for number in range(3):
        others.append(Caller(lambda number=number: acquire(number)))
        until_waiting(kind(path), 2 + number)
    asked.clear()
    assert asked.wait(PATIENCE)
    hold.release()
    for waiter in (first, *others):
        waiter.result()
    assert order == ["first", 0, 1, 2]


# format="filelock"


def test_the_filelock_format_has_a_pid_and_a_host(path):
    with LockFile(path, format="filelock", durable=False) as hold:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
        assert lines[0] == str(os.getpid()).encode()
        assert lines[-1] == b""
        assert hold.token is None
        status = LockFile(path, format="filelock").status()
        assert status.held and status.holders[0].pid == os.getpid() and status.alive
        hold.check()
    assert not os.path.exists(path)


def test_a_dead_holder_of_the_filelock_format_is_replaced(path):
    with Peer(path=path) as peer:
        peer.do("hold = holdfast.LockFile(path, format='filelock', stale_after=None).acquire()")
        assert LockFile(path, format="filelock", stale_after=None).try_acquire() is None
        peer.kill()
        LockFile(path, format="filelock", stale_after=None).acquire(timeout=PATIENCE).release()


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


@pytest.mark.parametrize("content", ["{pid}\nanother-host\n", "{dead}\nanother-host\n12345\n", ""])
def test_a_holder_that_cannot_be_probed_is_never_replaced(path, content):
    write(path, content.format(pid=os.getpid(), dead=NO_PROCESS))
    os.utime(path, (0, 0))
    assert LockFile(path, format="filelock", stale_after=None).try_acquire() is None


def own_lines(path):
    with LockFile(path, format="filelock"), open(path) as file:
        return file.read().splitlines()


def test_a_holder_whose_pid_no_process_has_is_dead(path):
    write(path, f"{NO_PROCESS}\n{own_lines(path)[1]}\n")
    LockFile(path, format="filelock", stale_after=None).acquire(timeout=0).release()


def test_a_pid_that_another_process_has_by_now_is_dead(path):
    pid, name, *start = own_lines(path)
    if not start:
        pytest.skip("this system has no start times")
    write(path, f"{pid}\n{name}\n{int(start[0]) - 1}\n")
    LockFile(path, format="filelock", stale_after=None).acquire(timeout=0).release()


def test_a_pid_without_a_start_time_counts_as_alive(path):
    write(path, f"{os.getpid()}\n{own_lines(path)[1]}\n")
    assert LockFile(path, format="filelock", stale_after=None).try_acquire() is None


@pytest.mark.parametrize("content", ["47", "4711\n", "4711\nbuil", "4711\nbuild7\n123"])
def test_a_record_that_was_cut_off_is_stale_after_two_seconds(path, content):
    write(path, content)
    assert LockFile(path, format="filelock", stale_after=None).try_acquire() is None
    os.utime(path, (1_000_000_000, 1_000_000_000))
    LockFile(path, format="filelock", stale_after=None).acquire(timeout=0).release()


@pytest.mark.parametrize("content", ["my diary\n", "pid=4711\ntimestamp=1735420800\n", "filelock/2\n"])
def test_other_content_is_refused_and_stays(path, content):
    write(path, content)
    os.utime(path, (0, 0))
    with pytest.raises(NotALockFile):
        LockFile(path, format="filelock").acquire(timeout=0)
    with open(path) as file:
        assert file.read() == content


def test_the_two_formats_refuse_each_other(path):
    with LockFile(path, format="filelock"), pytest.raises(NotALockFile):
        LockFile(path).acquire(timeout=0)
    with LockFile(path), pytest.raises(NotALockFile):
        LockFile(path, format="filelock").acquire(timeout=0)


@pytest.mark.parametrize("options", [{"tag": "x"}, {"fence": True}, {"heartbeat": 1}])
def test_what_the_filelock_format_cannot_express_is_refused(path, options):
    with pytest.raises(ValueError, match="format of filelock"):
        LockFile(path, format="filelock", **options)


def test_a_lock_with_options_survives_pickling(path):
    lock = pickle.loads(pickle.dumps(Lock(path, content=True, exact_mode=True, follow=False)))
    assert (lock.content, lock.exact_mode, lock.follow) == (True, True, False)
    again = pickle.loads(pickle.dumps(LockFile(path, format="filelock", exact_mode=True, follow=False)))
    assert (again.format, again.exact_mode, again.follow) == ("filelock", True, False)


def test_a_renewal_sets_the_time_of_a_lock_file_without_timestamp(path):
    with LockFile(path, format="filelock") as hold:
        os.utime(path, (1_000_000_000, 1_000_000_000))
        hold.renew()
        assert os.stat(path).st_mtime > 1_000_000_000


def test_flock_waits_for_a_data_file(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n")
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with Lock(data, content=True):
        done = subprocess.run([sys.executable, "-c", program, data], capture_output=True, check=False, timeout=PATIENCE)
        assert b"BlockingIOError" in done.stderr
