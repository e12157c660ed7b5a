"""`holdfast.filelock`: what programs that use the package filelock rely on."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import stat
import sys
import threading
import time

import pytest
from faces import PATIENCE, Caller, eventually, in_thread
from support import Peer, in_child

import holdfast
from holdfast import Unsupported
from holdfast import filelock as ours
from holdfast.filelock import AsyncFileLock, AsyncSoftFileLock, BaseFileLock, FileLock, SoftFileLock, Timeout
from holdfast.filelock.unsupported import MISSING

KINDS = pytest.mark.parametrize("kind", [FileLock, SoftFileLock])
IMPORT = "from holdfast.filelock import FileLock, SoftFileLock, ReadWriteLock, Timeout"


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


def is_free(kind, path):
    def attempt():
        try:
            kind(path).acquire(blocking=False).lock.release()
        except Timeout:
            return False
        return True

    return in_thread(attempt)


@KINDS
def test_a_lock_counts_how_often_it_is_acquired(path, kind):
    lock = kind(path)
    with lock as entered, lock.acquire() as again:
        assert entered is again is lock
        assert (lock.is_locked, lock.lock_counter) == (True, 2)
        lock.release()
        assert lock.lock_counter == 1
        assert not is_free(kind, path)
    assert (lock.is_locked, lock.lock_counter) == (False, 0)
    assert is_free(kind, path)


@KINDS
def test_force_leaves_all_levels(path, kind):
    lock = kind(path)
    for _ in range(3):
        lock.acquire()
    lock.release(force=True)
    assert lock.lock_counter == 0 and is_free(kind, path)
    lock.release()  # a lock that is not held stays as it is


@KINDS
def test_a_hold_of_ones_own_ends_in_timeout(path, kind):
    with kind(path):
        began = time.monotonic()
        with pytest.raises(Timeout) as caught:
            kind(path, timeout=0.1).acquire()
        assert time.monotonic() - began >= 0.1
        assert caught.value.lock_file == path
        assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, holdfast.Timeout)
        with pytest.raises(Timeout):
            kind(path, blocking=False).acquire()
        with pytest.raises(Timeout):
            kind(path).acquire(timeout=0)


@KINDS
def test_a_wait_for_oneself_without_end_raises(path, kind):
    with kind(path), pytest.raises(RuntimeError, match="Deadlock"):
        kind(path).acquire()


def test_a_hold_that_another_thread_releases_ends_a_wait_with_a_timeout(path):
    held = FileLock(path, thread_local=False)
    held.acquire()
    waiter = Caller(lambda: in_thread(lambda: FileLock(path, timeout=PATIENCE).acquire()))
    in_thread(held.release)
    waiter.result().lock.release()


def test_timeout_names_the_holder_as_its_cause(path):
    with Peer(path=path) as peer:
        peer.do(IMPORT)
        peer.do("lock = FileLock(path); lock.acquire()")
        with pytest.raises(Timeout) as caught:
            FileLock(path).acquire(timeout=0.05)
        assert str(peer.do("__import__('os').getpid()")) in str(caught.value.__cause__)
        assert str(caught.value) == f"The file lock '{path}' could not be acquired."
        peer.do("lock.release()")


def test_timeout_survives_pickling():
    again = pickle.loads(pickle.dumps(Timeout("a.lock")))
    assert (type(again), again.lock_file, repr(again)) == (Timeout, "a.lock", "Timeout('a.lock')")


@KINDS
def test_cancel_check_ends_a_wait(path, kind):
    stop = threading.Event()
    with kind(path):
        waiter = Caller(lambda: kind(path).acquire(cancel_check=stop.is_set))
        stop.set()
        with pytest.raises(Timeout):
            waiter.result()


@KINDS
def test_a_timeout_of_0_asks_cancel_check_once(path, kind):
    for answer in (False, True):
        asked = []
        with kind(path), pytest.raises(Timeout):
            kind(path).acquire(timeout=0, cancel_check=lambda: asked.append(1) or answer)  # noqa: B023
        assert asked == [1]


@pytest.mark.parametrize("kind", [AsyncFileLock, AsyncSoftFileLock])
def test_a_task_with_a_timeout_of_0_asks_cancel_check_once(path, kind):
    asked = []

    async def main():
        async with kind(path):
            with pytest.raises(Timeout):
                await kind(path).acquire(timeout=0, cancel_check=lambda: asked.append(1))

    asyncio.run(main())
    assert asked == [1]


def test_states_belong_to_threads(path):
    lock = FileLock(path, timeout=3)
    with lock:
        assert in_thread(lambda: (lock.is_locked, lock.lock_counter, lock.timeout)) == (False, 0, 3)
    shared = FileLock(path, thread_local=False)
    with shared:
        assert in_thread(lambda: shared.acquire() and shared.lock_counter) == 2
        assert shared.lock_counter == 2
        in_thread(shared.release)


def test_threads_that_share_an_object_acquire_one_after_another(path):
    lock = FileLock(path, thread_local=False)
    other = FileLock(path)
    in_thread(other.acquire)
    waiters = [Caller(lambda: lock.acquire(timeout=PATIENCE)) for _ in range(4)]
    late = Caller(lambda: lock.acquire(timeout=0.05))
    with pytest.raises(Timeout):
        late.result()
    other._held.copy().pop().thread.join()  # the thread has ended, so `force` releases its hold
    other.release(force=True)
    for waiter in waiters:
        waiter.result()
    assert lock.lock_counter == 4
    lock.release(force=True)


def test_force_releases_while_other_threads_acquire(tmp_path, monkeypatch):
    """One object locks one file for each directory that it is used in."""
    for name in "ab":
        (tmp_path / name).mkdir()
    lock, lives = FileLock("x.lock"), threading.Event()
    monkeypatch.chdir(tmp_path / "a")
    in_thread(lock.acquire)
    (state,) = lock._held

    class Ended:
        @staticmethod
        def is_alive():
            if not lives.is_set():
                lives.set()
                monkeypatch.chdir(tmp_path / "b")
                in_thread(lock.acquire)
            return False

    state.thread = Ended
    lock.release(force=True)
    assert is_free(FileLock, str(tmp_path / "a" / "x.lock")) and not is_free(FileLock, str(tmp_path / "b" / "x.lock"))
    lock.release(force=True)
    assert is_free(FileLock, str(tmp_path / "b" / "x.lock"))


def test_a_dropped_lock_is_released_without_a_warning(path):
    FileLock(path).acquire()
    gc.collect()
    assert is_free(FileLock, path)


@pytest.mark.parametrize("fails", [False, True])
def test_a_dropped_lock_calls_the_release_of_its_class(path, fails):
    calls = []

    class Mine(FileLock):
        def release(self, force=False):
            calls.append(force)
            if fails:
                raise ZeroDivisionError
            super().release(force)

    Mine(path).acquire()
    gc.collect()
    assert calls == [True] and is_free(FileLock, path)


@KINDS
def test_a_forked_child_holds_nothing(path, kind):
    lock = kind(path)
    with lock:

        def look():
            locked = lock.is_locked, lock.lock_counter
            lock.release(force=True)
            try:
                lock.acquire(timeout=0)
            except RuntimeError as error:
                text = str(error)
            return locked, text

        locked, text = in_child(look)
        assert locked == [False, 0] and "construct a new instance" in text
        assert lock.is_locked and not is_free(kind, path)


def test_singletons_are_one_object_per_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = FileLock(path, is_singleton=True)
    assert FileLock("./x.lock", is_singleton=True) is one
    assert FileLock(path) is not one
    assert SoftFileLock(path, is_singleton=True) is not one
    with pytest.raises(ValueError, match=r"differing arguments[\s\S]*timeout"):
        FileLock(path, timeout=3, is_singleton=True)
    with one, FileLock(path, is_singleton=True):
        assert one.lock_counter == 2


def test_a_singleton_that_is_found_again_while_it_is_dropped_stays_held(path):
    found = []

    def find(frame, event, _):
        if event == "call" and frame.f_code is BaseFileLock.__del__.__code__ and not found:
            found.append(FileLock(path, is_singleton=True))
            found[0].acquire()

    sys.setprofile(find)
    try:
        FileLock(path, is_singleton=True)
    finally:
        sys.setprofile(None)
    assert found[0].is_locked and not is_free(FileLock, path)
    found.clear()
    gc.collect()
    assert is_free(FileLock, path)


def test_positional_arguments(path):
    lock = FileLock(path, 5, 0o640, False)
    assert (lock.timeout, lock.mode, lock.is_thread_local()) == (5, 0o640, False)


@pytest.mark.parametrize(("mode", "found"), [(0o664, 0o664), (-1, 0o600)])
def test_a_mode_is_exact_and_no_mode_leaves_it_to_the_umask(path, mode, found):
    before = os.umask(0o077)
    try:
        with FileLock(path, mode=mode):
            assert stat.S_IMODE(os.stat(path).st_mode) == found
    finally:
        os.umask(before)


def test_the_file_stays_with_its_content(tmp_path):
    data = tmp_path / "table.csv"
    data.write_text("a,b\n")
    with FileLock(data):
        pass
    assert data.read_text() == "a,b\n"


def test_an_empty_lock_file_stays_and_a_soft_one_goes(path):
    with FileLock(path):
        inode = os.stat(path).st_ino
    with FileLock(path):
        assert os.stat(path).st_ino == inode
    os.unlink(path)
    with SoftFileLock(path):
        assert os.path.exists(path)
    assert not os.path.exists(path)


@KINDS
def test_parent_directories_are_made(tmp_path, kind):
    with kind(tmp_path / "a" / "b" / "x.lock") as lock:
        assert os.path.exists(lock.lock_file)


@KINDS
def test_a_symlink_is_refused(tmp_path, kind):
    (tmp_path / "link").symlink_to("target")
    if kind is FileLock:
        with pytest.raises(OSError, match="link"):
            kind(tmp_path / "link").acquire(timeout=0)
    else:
        with pytest.raises((OSError, Timeout)):
            kind(tmp_path / "link").acquire(timeout=0)
    assert not (tmp_path / "target").exists()


def test_on_acquired_gets_the_descriptor_once(path):
    calls = []
    lock = FileLock(path, on_acquired=lambda fd: calls.append(os.fstat(fd).st_ino))
    with lock, lock:
        assert calls == [os.stat(path).st_ino]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, holdfast.Busy])
def test_an_error_of_on_acquired_releases_the_lock(path, error):
    def fail(fd):
        raise error

    lock = FileLock(path, on_acquired=fail)
    with pytest.raises(error) as caught:
        lock.acquire()
    assert type(caught.value) is error
    assert not lock.is_locked and is_free(FileLock, path)


def test_threads_that_share_an_object_wait_for_on_acquired(path):
    began, goes_on = threading.Event(), threading.Event()

    def hook(fd):
        began.set()
        assert goes_on.wait(PATIENCE)

    lock = FileLock(path, thread_local=False, on_acquired=hook)
    first = Caller(lock.acquire)
    assert began.wait(PATIENCE)
    with pytest.raises(Timeout):
        lock.acquire(timeout=0.05)
    with pytest.raises(Timeout):
        lock.acquire(blocking=False)
    with pytest.raises(Timeout):
        lock.acquire(cancel_check=lambda: True)
    goes_on.set()
    first.result()
    with lock:
        assert lock.lock_counter == 2
    lock.release()


def test_a_subclass_with_methods_of_its_own(path):
    class Mine(FileLock):
        def __init__(self, lock_file, timeout=-1, name="x"):
            super().__init__(lock_file, timeout)
            self.name = name
            self.calls = []

        def acquire(self, *args, **options):
            self.calls.append("acquire")
            return super().acquire(*args, **options)

        def release(self, force=False):
            self.calls.append("release")
            super().release(force)

    lock = Mine(path, 3, name="y")
    with lock, lock.acquire():
        pass
    assert (lock.name, lock.timeout, lock.calls) == ("y", 3, ["acquire", "acquire", "release", "release"])
    with pytest.raises(TypeError, match="poll_interval"):
        Mine(path, poll_interval=3)


def test_a_subclass_with_options_of_its_own_can_be_a_singleton(path):
    class Mine(FileLock):
        def __init__(self, lock_file, timeout=-1, is_singleton=False, label="x"):
            super().__init__(lock_file, timeout, is_singleton=is_singleton)

    one = Mine(path, 3, is_singleton=True, label="a")
    assert Mine(path, 3, is_singleton=True, label="a") is one


def test_what_acquire_returns_can_be_annotated_with_its_lock():
    assert "UnixFileLock" in str(ours.AcquireReturnProxy[ours.UnixFileLock])


def test_a_decorated_function_holds_the_lock(path):
    lock = FileLock(path)

    @lock
    def work(value):
        return value, lock.is_locked

    assert work(3) == (3, True) and not lock.is_locked
    assert work.__name__ == "work"


def log_lines(caplog, lock):
    records = [record for record in caplog.records if record.name == "filelock"]
    assert {record.levelno for record in records} == {logging.DEBUG}
    lines = [record.getMessage().replace(str(id(lock)), "N").replace(lock.lock_file, "F") for record in records]
    caplog.clear()
    return lines


@KINDS
def test_log_lines_are_those_of_filelock(path, caplog, kind):
    caplog.set_level(logging.DEBUG, "filelock")
    lock = kind(path)
    with lock, lock:
        assert log_lines(caplog, lock) == [
            "Attempting to acquire lock N on F",
            "Lock N acquired on F",
            "Lock N acquired on F",
        ]
        other = kind(path)
        for options, last in (
            ({"blocking": False}, "Failed to immediately acquire lock N on F"),
            ({"blocking": False, "cancel_check": lambda: 1 / 0}, "Failed to immediately acquire lock N on F"),
            ({"timeout": 0}, "Timeout on acquiring lock N on F"),
            ({"timeout": 0, "cancel_check": lambda: True}, "Cancellation requested for lock N on F"),
            ({"timeout": 0.01}, "Timeout on acquiring lock N on F"),
            ({"timeout": 30, "cancel_check": lambda: True}, "Cancellation requested for lock N on F"),
        ):
            with pytest.raises(Timeout):
                other.acquire(**options)
            lines = log_lines(caplog, other)
            assert (lines[0], lines[-1]) == ("Attempting to acquire lock N on F", last)
            assert lines[1:-1] == ["Lock N not acquired on F, waiting 0.05 seconds ..."] * (len(lines) - 2)
    assert log_lines(caplog, lock) == ["Attempting to release lock N on F", "Lock N released on F"]


def test_the_line_of_an_acquire_comes_after_the_hook(path, caplog):
    caplog.set_level(logging.DEBUG, "filelock")
    lines = []
    lock = FileLock(path, on_acquired=lambda fd: lines.extend(log_lines(caplog, lock)))
    with lock:
        assert lines == ["Attempting to acquire lock N on F"]
        assert log_lines(caplog, lock) == ["Lock N acquired on F"]


def test_a_file_that_was_deleted_while_it_was_locked_is_logged(path, caplog):
    with FileLock(path):
        os.unlink(path)
    assert "lost" in caplog.text


def test_a_group_has_both_errors(path):
    class Failing(FileLock):
        def release(self, force=False):
            super().release(force)
            raise OSError("unlock")

    with pytest.raises(BaseException) as caught, Failing(path, context_error_policy="group"):  # noqa: PT011
        raise KeyError("body")
    assert [type(one) for one in caught.value.exceptions] == [KeyError, OSError]


def test_soft_locks_name_their_holder(path):
    lock = SoftFileLock(path)
    assert (lock.pid, lock.is_lock_held_by_us) == (None, False)
    with lock:
        assert (lock.pid, lock.is_lock_held_by_us) == (os.getpid(), True)
        with Peer(path=path) as peer:
            peer.do(IMPORT)
            assert peer.do("(SoftFileLock(path).pid, SoftFileLock(path).is_lock_held_by_us)") == [os.getpid(), False]
        SoftFileLock(path).break_lock()
        assert not os.path.exists(path)


def test_a_held_soft_lock_keeps_its_file_when_the_directory_changes(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = SoftFileLock("x.lock")
    with lock:
        monkeypatch.chdir(tmp_path / "other")
        assert (lock.pid, lock.is_lock_held_by_us) == (os.getpid(), True)
        lock.break_lock()
        assert not (tmp_path / "x.lock").exists()
    assert lock.pid is None


def test_a_lifetime_takes_the_lock_from_a_live_holder(path):
    with pytest.warns(FutureWarning, match="lifetime"):
        lock = SoftFileLock(path, lifetime=5)
    held = SoftFileLock(path)
    held.acquire()
    with pytest.raises(Timeout):
        lock.acquire(timeout=0)
    os.utime(path, (0, 0))
    with lock:
        held.release()  # is lost, and removes nothing
        assert os.path.exists(path)
    with pytest.warns(UserWarning, match="ignored for UnixFileLock"):
        assert FileLock(path, lifetime=5).lifetime is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeout": True}, TypeError),
        ({"timeout": "3"}, TypeError),
        ({"poll_interval": -1}, ValueError),
        ({"mode": 0o444}, ValueError),
        ({"mode": 0o1666}, ValueError),
        ({"blocking": 1}, TypeError),
        ({"context_error_policy": "x"}, ValueError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_wrong_options_are_refused(path, options, error):
    with pytest.raises(error):
        FileLock(path, **options)
    assert not os.path.exists(path)


def test_soft_locks_refuse_what_needs_a_descriptor(path):
    for options in ({"preserve_lock_file": True}, {"on_acquired": print}):
        with pytest.raises(ValueError, match="not supported by SoftFileLock"):
            SoftFileLock(path, **options)


@pytest.mark.parametrize("name", MISSING)
def test_a_name_that_is_missing_says_what_to_use(name):
    kind = getattr(ours, name)
    if not issubclass(kind, Exception):
        with pytest.raises(Unsupported, match="instead"):
            kind("x.lock")


def test_every_public_name_exists():
    for name in ours.__all__:
        assert getattr(ours, name) is not None
    assert ours.__version__ == holdfast.__version__
    assert issubclass(FileLock, BaseFileLock)
    with pytest.raises(AttributeError):
        _ = ours.nothing


def test_descriptors(path):
    with open(path, "w") as one, open(path) as other:
        assert ours.lock_descriptor(one.fileno())
        assert not ours.lock_descriptor(other.fileno(), blocking=False)
        with pytest.raises(Timeout):
            FileLock(path).acquire(timeout=0)
        waiter = Caller(lambda: ours.lock_descriptor(other.fileno()))
        ours.unlock_descriptor(one.fileno())
        assert waiter.result()


@KINDS
def test_the_lock_of_a_killed_process_is_free(path, kind):
    with Peer(path=path) as peer:
        peer.do(IMPORT)
        peer.do(f"lock = {kind.__name__.replace('Unix', '')}(path); lock.acquire()")
        assert not is_free(kind, path)
        peer.kill()
        with kind(path, timeout=PATIENCE):
            pass


def test_waiters_are_served_in_order(path):
    order = []

    def take(number):
        with FileLock(path, timeout=PATIENCE):
            order.append(number)

    lock = FileLock(path)
    lock.acquire()
    waiters = []
    for number in range(3):
        waiters.append(Caller(lambda number=number: take(number)))
        eventually(
            lambda number=number: len(holdfast.Lock(path, keep=True).status().waiters) == number + 1, "it queues"
        )
    lock.release()
    for waiter in waiters:
        waiter.result()
    assert order == [0, 1, 2]
