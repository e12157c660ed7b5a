"""What a user of `Lock` meets: timeouts and their words, holds and their ends, odd paths, other users, other tools."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from faces import PATIENCE, Caller, Leftovers, descriptors, eventually, in_thread, peers, until_waiting, watches

import holdfast
from holdfast import system


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


@pytest.fixture
def held(path):
    """Held by another thread of this process."""
    hold = in_thread(holdfast.Lock(path).acquire)
    yield hold
    if not hold.released:
        hold.release()


def run_python(program: str, *args: object, check: bool = True, flags: tuple[str, ...] = ()):
    """Run a program in another process; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if check:
        assert (done.returncode, done.stderr) == (0, "")
    return done


# Timeouts.


def test_no_timeout_waits_until_it_is_free(path, held):
    lock = holdfast.Lock(path)
    waiter = Caller(lambda: lock.acquire(timeout=None))
    until_waiting(lock, 1)
    held.release()
    waiter.result().release()


def test_zero_means_one_try(path, held):
    for lock, options in ((holdfast.Lock(path), {"timeout": 0}), (holdfast.Lock(path, timeout=0), {})):
        with pytest.raises(holdfast.Busy):
            lock.acquire(**options)
    assert holdfast.Lock(path).try_acquire() is None
    held.release()
    holdfast.Lock(path).acquire(timeout=0).release()


def test_acquire_waits_for_its_timeout_and_no_longer(path, held):
    before = time.monotonic()
    with pytest.raises(holdfast.Timeout) as caught:
        holdfast.Lock(path).acquire(timeout=0.1)
    assert time.monotonic() - before >= 0.1
    assert not isinstance(caught.value, holdfast.Busy)
    held.check()


def test_the_timeout_of_acquire_overrides_that_of_the_lock(path, held):
    with pytest.raises(holdfast.Busy):
        holdfast.Lock(path, timeout=PATIENCE).acquire(timeout=0)
    with pytest.raises(holdfast.Timeout, match=r"within 0\.01 s"):
        holdfast.Lock(path, timeout=0).acquire(timeout=0.01)


def test_infinity_is_no_timeout(path, held):
    lock = holdfast.Lock(path, timeout=float("inf"))
    waiter = Caller(lock.acquire)
    until_waiting(lock, 1)
    held.release()
    waiter.result().release()


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf"), "5"])
def test_an_invalid_timeout_is_refused_before_the_first_attempt(path, timeout):
    with pytest.raises(ValueError, match="timeout is seconds"):
        holdfast.Lock(path, timeout=timeout)
    with pytest.raises(ValueError, match="timeout is seconds"):
        holdfast.Lock(path).acquire(timeout=timeout)
    assert not os.path.exists(path)


@pytest.mark.parametrize("mode", ["0644", 0o100644, -1, None])
@pytest.mark.parametrize("kind", ["Lock", "LockFile", "Semaphore"])
def test_an_invalid_mode_is_refused_before_the_first_attempt(path, kind, mode):
    permits = [2] if kind == "Semaphore" else []
    with pytest.raises(ValueError, match="mode is the permissions"):
        getattr(holdfast, kind)(path, *permits, mode=mode)


# Errors.


def test_busy_is_a_timeout_is_a_timeout_error():
    assert issubclass(holdfast.Busy, holdfast.Timeout)
    assert issubclass(holdfast.Timeout, TimeoutError)
    assert issubclass(holdfast.Timeout, holdfast.HoldfastError)


def test_messages_name_the_path_the_holder_and_the_way_out(path):
    with peers() as (peer,):
        peer.acquire(path)
        with pytest.raises(holdfast.Busy) as busy:
            holdfast.Lock(path).acquire(timeout=0)
        with pytest.raises(holdfast.Timeout) as timeout:
            holdfast.Lock(path).acquire(timeout=0.01)
        for caught in (busy, timeout):
            text = str(caught.value)
            assert path in text
            assert f"held by pid {peer.pid} (" in text
            assert caught.value.path == path
        assert "Give a timeout" in str(busy.value)
        assert "0.01 s" in str(timeout.value) and "timeout=None" in str(timeout.value)


def test_a_message_says_that_it_is_shared_and_that_others_wait(path):
    with peers(2) as (holder, waiter):
        holder.acquire(path, shared=True)
        waiter.start(path)
        until_waiting(holdfast.Lock(path), 1)
        with pytest.raises(holdfast.Busy, match=rf"shared by pid {holder.pid} .*, 1 more waiting"):
            holdfast.Lock(path).acquire(timeout=0)


@pytest.mark.parametrize("name", holdfast.errors.__all__)
def test_errors_survive_a_pickle(name):
    error = getattr(holdfast, name)("what happened", path="/some/path")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.path) == ("what happened", "/some/path")


def test_a_caught_error_survives_a_pickle(path, held):
    with pytest.raises(holdfast.Busy) as caught:
        holdfast.Lock(path).acquire(timeout=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path) == (str(caught.value), path)


# Holds.


def test_a_hold_describes_itself(path):
    before = time.time()
    with holdfast.Lock(path) as hold:
        assert before <= hold.acquired_at <= time.time()
        assert hold.token is None
        assert not hold.lost
        assert not hold.released
        hold.check()
        assert path in repr(hold)
    assert hold.released
    assert not hold.lost
    assert "released" in repr(hold)
    with pytest.raises(holdfast.NotLocked):
        hold.check()


def test_releasing_twice_raises_and_spares_the_next_holder(path):
    hold = holdfast.Lock(path).acquire()
    hold.release()
    with holdfast.Lock(path) as successor:
        with pytest.raises(holdfast.NotLocked, match="released already"):
            hold.release()
        successor.check()
        assert in_thread(holdfast.Lock(path).try_acquire) is None


def test_exactly_one_of_many_threads_releases_a_hold(path):
    hold = holdfast.Lock(path).acquire()
    barrier = threading.Barrier(8)

    def release():
        barrier.wait()
        try:
            hold.release()
        except holdfast.NotLocked:
            return 0
        return 1

    threads = [Caller(release) for _ in range(8)]
    assert sum(thread.result() for thread in threads) == 1


def test_another_thread_may_release(path):
    lock = holdfast.Lock(path)
    hold = lock.acquire()
    in_thread(hold.release)
    assert hold.released
    lock.acquire(timeout=0).release()


def test_a_hold_that_outlives_its_thread_belongs_to_no_other_thread(path):
    """Thread numbers are used again: a new thread with the old number is not the one that acquired."""
    lock = holdfast.Lock(path)

    def acquire():
        return lock.acquire(), threading.get_ident()

    hold, number = in_thread(acquire)

    def wait():
        if threading.get_ident() != number:
            return None
        with pytest.raises(holdfast.Timeout):
            lock.acquire(timeout=0.01)
        return True

    try:
        if not any(in_thread(wait) for _ in range(100)):
            pytest.skip("this platform does not use thread numbers again")
    finally:
        hold.release()


def test_a_forgotten_hold_is_released_with_a_warning(path, tmp_path):
    leftovers = Leftovers(tmp_path)
    lock = holdfast.Lock(path)
    forgotten = [lock.acquire()]
    with pytest.warns(ResourceWarning, match=f"a hold on {path} was never released"):
        forgotten.clear()
    leftovers.check()
    lock.acquire(timeout=0).release()


def test_a_forgotten_hold_is_released_where_warnings_are_errors(path):
    program = (
        "import gc, logging, os, sys, holdfast\n"
        "logging.disable()\n"
        "sys.unraisablehook = lambda what: print(what.exc_type.__name__)\n"
        "lock = holdfast.Lock(sys.argv[1])\n"
        "hold = lock.acquire()\n"
        "del hold; gc.collect()\n"
        "lock.acquire(timeout=0).release()\n"
    )
    assert run_python(program, path, flags=("-W", "error")).stdout == "ResourceWarning\n"


AT_EXIT = {
    "in a global": "hold = lock.acquire()",
    "in a global, shared": "hold = holdfast.Lock(sys.argv[1], shared=True).acquire()",
    "in a global, a semaphore": "hold = holdfast.Semaphore(sys.argv[1], 2).acquire()",
    "in a cycle": "held = [lock.acquire()]; held.append(held)",
    "in another module": "import json; json.hold = lock.acquire()",
    "in a block that exits": "with lock: sys.exit()",
}


@pytest.mark.parametrize("where", AT_EXIT)
def test_a_hold_alive_at_exit_leaves_no_file(where, tmp_path):
    done = run_python(f"import sys, holdfast\nlock = holdfast.Lock(sys.argv[1])\n{AT_EXIT[where]}", tmp_path / "x.lock")
    assert done.stdout == ""
    assert os.listdir(tmp_path) == []


def test_a_removed_file_means_a_lost_hold(path, tmp_path):
    leftovers = Leftovers(tmp_path)
    hold = holdfast.Lock(path).acquire()
    os.unlink(path)
    assert hold.lost
    with pytest.raises(holdfast.LockLost, match="removed or replaced"):
        hold.check()
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert hold.released
    leftovers.check()


def test_a_lost_hold_leaves_the_file_of_the_next_holder(path):
    loser = holdfast.Lock(path).acquire()
    os.unlink(path)
    with holdfast.Lock(path) as successor:
        assert loser.lost
        with pytest.raises(holdfast.LockLost):
            loser.release()
        successor.check()
        assert in_thread(holdfast.Lock(path).try_acquire) is None
    assert not os.path.exists(path)


def test_a_foreign_file_in_its_place_is_left_alone(path):
    hold = holdfast.Lock(path).acquire()
    os.unlink(path)
    Path(path).write_text("data")
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert Path(path).read_text() == "data"


def test_the_error_of_the_block_wins_over_the_loss(path):
    def work():
        with holdfast.Lock(path):
            os.unlink(path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


# One lock object, many users.


def test_shared_blocks_of_one_lock_object_release_their_own_holds(path):
    lock = holdfast.Lock(path, shared=True)
    number = 4
    inside = threading.Barrier(number, timeout=PATIENCE)
    may_go = [threading.Event() for _ in range(number)]
    gone = [threading.Event() for _ in range(number)]
    holds = [None] * number

    def work(n):
        with lock as outer, lock as inner:
            assert outer is not inner
            holds[n] = (outer, inner)
            inside.wait()
            assert may_go[n].wait(PATIENCE)
        assert outer.released and inner.released
        gone[n].set()

    threads = [Caller(work, n) for n in range(number)]
    order = [2, 0, 3, 1]
    for position, n in enumerate(order):
        eventually(lambda: all(holds), "all inside")
        may_go[n].set()
        assert gone[n].wait(PATIENCE)
        for other in order[position + 1 :]:
            for hold in holds[other]:
                hold.check()
    for thread in threads:
        thread.result()
    assert not os.path.exists(path)


def test_nested_blocks_end_from_the_inside(path):
    lock = holdfast.Lock(path, shared=True)
    with lock as outer:
        with lock as inner:
            pass
        assert inner.released and not outer.released
        with lock as inner:
            outer.check()
        assert inner.released and not outer.released
    assert outer.released


# Paths.


def test_a_missing_directory_is_named(tmp_path):
    lock = holdfast.Lock(tmp_path / "missing" / "x.lock")
    for acquire in (lock.acquire, lock.try_acquire, lambda: lock.acquire(timeout=1)):
        with pytest.raises(FileNotFoundError, match=r"directory for this lock does not exist.*missing/x\.lock"):
            acquire()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"x", b"\0", b"permits=2\n", b"data " * 1000])
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"keep": True}, {"fair": False}])
def test_a_file_with_content_is_refused_and_untouched(path, content, options):
    Path(path).write_bytes(content)
    before = os.stat(path)
    lock = holdfast.Lock(path, **options)
    for acquire in (lock.acquire, lock.try_acquire, lambda: lock.acquire(timeout=1)):
        with pytest.raises(holdfast.NotALockFile, match="left untouched"):
            acquire()
    after = os.stat(path)
    assert Path(path).read_bytes() == content
    assert (before.st_ino, before.st_mtime_ns, before.st_mode) == (after.st_ino, after.st_mtime_ns, after.st_mode)
    assert os.listdir(os.path.dirname(path)) == ["x.lock"]


@pytest.mark.parametrize("shared", [False, True])
def test_content_written_while_it_is_held_is_not_deleted(path, shared):
    with holdfast.Lock(path, shared=shared):
        Path(path).write_text("data")
    assert Path(path).read_text() == "data"


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_waiter_is_refused_a_file_that_got_content_meanwhile(path, held, timeout):
    lock = holdfast.Lock(path)
    waiter = Caller(lambda: lock.acquire(timeout))
    until_waiting(lock, 1)
    Path(path).write_text("data")
    held.release()
    with pytest.raises(holdfast.NotALockFile):
        waiter.result()
    assert Path(path).read_text() == "data"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_directory_or_fifo_is_refused(path, make, tmp_path):
    make(path)
    leftovers = Leftovers(tmp_path)
    for kind in (holdfast.Lock(path), holdfast.Lock(path, shared=True), holdfast.Semaphore(path, 2)):
        for acquire in (kind.acquire, kind.try_acquire):
            with pytest.raises(holdfast.NotALockFile):
                acquire()
    leftovers.check()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"pid=1\ntimestamp=1\n", "a lock file (of LockFile or holdfast lockfile)"),
        (b"permits=2\n", "the file of a semaphore"),
        (b"data", "a file with other content"),
    ],
)
def test_the_refusal_names_what_the_file_is(path, content, what):
    Path(path).write_bytes(content)
    with pytest.raises(holdfast.NotALockFile) as caught:
        holdfast.Lock(path).try_acquire()
    assert str(caught.value).startswith(f"{path} is {what}. It was left untouched. ")


def test_a_url_in_place_of_a_path_is_explained():
    with pytest.raises(FileNotFoundError, match=r"holdfast\.lock\(url\)"):
        holdfast.Lock("redis://127.0.0.1:6379/0/x").acquire()


def test_a_device_is_refused():
    before = descriptors()
    with pytest.raises(holdfast.NotALockFile):
        holdfast.Lock("/dev/null").acquire()
    assert descriptors() == before


@pytest.mark.parametrize("path", ["", b"", "a\0b", "directory/"])
def test_an_unusable_path_is_refused(path):
    with pytest.raises(holdfast.UnsafePath) as caught:
        holdfast.Lock(path)
    assert isinstance(caught.value, ValueError)


def test_a_path_may_be_bytes_or_pathlike(tmp_path):
    paths = [str(tmp_path / "x"), os.fsencode(tmp_path / "x"), tmp_path / "x"]
    assert len({holdfast.Lock(path).path for path in paths}) == 1
    for path in paths:
        with holdfast.Lock(path):
            assert os.listdir(tmp_path) == ["x"]


def test_a_name_that_is_not_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\xfe.lock"
    try:
        os.close(os.open(path, os.O_CREAT))
        os.unlink(path)
    except OSError:
        pytest.skip("this file system takes no such names")
    lock = holdfast.Lock(path)
    held = in_thread(lock.acquire)
    with pytest.raises(holdfast.Timeout, match=r"\udcff\udcfe\.lock"):
        lock.acquire(timeout=0.01)
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff\xfe.lock"]
    held.release()
    assert os.listdir(tmp_path) == []


def test_a_relative_path_stays_where_it_was_given(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    lock = holdfast.Lock("x.lock")
    monkeypatch.chdir(tmp_path / "b")
    with lock as hold:
        assert os.listdir(tmp_path / "a") == ["x.lock"]
        hold.check()
        monkeypatch.chdir(tmp_path)
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []


def spellings(directory: Path) -> dict[str, str]:
    """Other names for `directory`/real/x.lock, which is held."""
    (directory / "alias").symlink_to("real")
    (directory / "link").symlink_to("real/x.lock")
    (directory / "link to link").symlink_to("link")
    os.link(directory / "real/x.lock", directory / "hard link")
    return {
        "the same": f"{directory}/real/x.lock",
        "dots": f"{directory}/real/../real/./x.lock",
        "relative": os.path.relpath(directory / "real/x.lock"),
        "symlinked directory": f"{directory}/alias/x.lock",
        "symlink": f"{directory}/link",
        "symlink to a symlink": f"{directory}/link to link",
        "hard link": f"{directory}/hard link",
    }


def test_every_spelling_of_a_held_path_would_deadlock(tmp_path):
    (tmp_path / "real").mkdir()
    with holdfast.Lock(tmp_path / "real/x.lock", keep=True):
        for spelling, path in spellings(tmp_path).items():
            for options in ({}, {"timeout": 60}, {"shared": True}, {"fair": False}):
                with pytest.raises(holdfast.WouldDeadlock, match="this thread"):
                    holdfast.Lock(path, **options).acquire()
            assert holdfast.Lock(path).try_acquire() is None, spelling
    assert sorted(os.listdir(tmp_path)) == ["alias", "hard link", "link", "link to link", "real"]


def test_an_exclusive_acquire_by_a_sharer_would_deadlock(path):
    with holdfast.Lock(path, shared=True):
        with pytest.raises(holdfast.WouldDeadlock):
            holdfast.Lock(path).acquire()
        with holdfast.Lock(path, shared=True, timeout=60):
            pass


def test_other_threads_do_not_deadlock(path, held):
    with pytest.raises(holdfast.Timeout):
        holdfast.Lock(path).acquire(timeout=0.01)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symlink_stands_for_its_target_and_stays(tmp_path, dangling):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to("target")
    if not dangling:
        target.touch()
    lock = holdfast.Lock(link)
    for _ in range(2):
        with lock as hold:
            hold.check()
            assert target.exists() and link.is_symlink()
            assert in_thread(holdfast.Lock(target).try_acquire) is None
            assert in_thread(holdfast.Lock(link).try_acquire) is None
        assert sorted(os.listdir(tmp_path)) == ["link"]


def test_waiters_on_a_symlink_and_on_its_target_share_a_queue(tmp_path):
    (tmp_path / "link").symlink_to("target")
    held = in_thread(holdfast.Lock(tmp_path / "link").acquire)
    waiters = []
    for number, name in enumerate(["link", "target"], 1):
        waiters.append(Caller(lambda name=name: holdfast.Lock(tmp_path / name).acquire(timeout=60).release()))
        until_waiting(holdfast.Lock(tmp_path / "target"), number)
    assert len(holdfast.Lock(tmp_path / "link").status().waiters) == 2
    held.release()
    for waiter in waiters:
        waiter.result()
    assert os.listdir(tmp_path) == ["link"]


def test_a_symlink_swapped_between_two_uses_is_followed(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("one")
    lock = holdfast.Lock(link)
    with lock:
        assert sorted(os.listdir(tmp_path)) == ["link", "one"]
    swap(link, "two")
    with lock as hold:
        hold.check()
        assert in_thread(holdfast.Lock(tmp_path / "two").try_acquire) is None
        holdfast.Lock(tmp_path / "one").acquire(timeout=0).release()
    assert os.listdir(tmp_path) == ["link"]
    link.unlink()
    with lock as hold:
        hold.check()
        assert os.listdir(tmp_path) == ["link"]
    assert os.listdir(tmp_path) == []


def test_a_symlink_swapped_while_held_means_a_lost_hold(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("one")
    hold = holdfast.Lock(link).acquire()
    swap(link, "two")
    assert hold.lost
    (tmp_path / "two").touch()
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert (tmp_path / "two").exists() and link.is_symlink()


def swap(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


# Permissions.


@pytest.mark.parametrize(
    ("mode", "umask", "want"), [(0o644, 0o022, 0o644), (0o666, 0o000, 0o666), (0o660, 0o027, 0o640)]
)
def test_the_file_gets_the_mode_less_the_umask(path, mode, umask, want):
    before = os.umask(umask)
    try:
        with holdfast.Lock(path, mode=mode):
            assert stat.S_IMODE(os.stat(path).st_mode) == want
    finally:
        os.umask(before)


AS_ANOTHER_USER = """
import os, select, sys
import holdfast, holdfast.status, holdfast.locks.semaphore
from holdfast import system
import anyio, ctypes, dataclasses, json, logging, random, warnings
path = sys.argv[1]
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
"""


@pytest.fixture
def open_directory():
    """A directory that other users can reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    directory = tempfile.mkdtemp()
    os.chmod(directory, 0o755)
    yield Path(directory)
    shutil.rmtree(directory)


def as_another_user(program: str, path: Path, uid: int = 65534) -> str:
    return run_python(AS_ANOTHER_USER.format(uid=uid) + program, path).stdout


@pytest.mark.parametrize("through_link", [False, True])
def test_a_read_only_file_can_be_locked(open_directory, through_link):
    path = open_directory / "x.lock"
    path.touch(0o644)
    if through_link:
        (open_directory / "link").symlink_to(path)
    program = (
        "for options in ({}, {'shared': True}, {'timeout': 5}):\n"
        "    with holdfast.Lock(path, **options) as hold: hold.check()\n"
        "print('locked')\n"
    )
    assert as_another_user(program, open_directory / "link" if through_link else path) == "locked\n"
    assert path.exists()  # the directory does not let them remove it


def test_a_user_with_read_permission_only_is_excluded_and_can_wait(open_directory):
    path = open_directory / "x.lock"
    held = holdfast.Lock(path, keep=True).acquire()
    assert as_another_user("print(holdfast.Lock(path).try_acquire())", path) == "None\n"
    assert "within 0.01 s: held" in as_another_user(
        "try: holdfast.Lock(path).acquire(timeout=0.01)\nexcept holdfast.Timeout as error: print(error)", path
    )
    held.release()


PROTECTED_REGULAR = """
def protected(name, flags, mode=0o777, plain=system.open_fd):
    '''What the kernel does with fs.protected_regular, where that is off.'''
    if flags & os.O_CREAT and os.path.exists(name):
        directory, there = os.stat(os.path.dirname(name)), os.stat(name)
        if directory.st_mode & 0o1002 == 0o1002 and there.st_uid not in (directory.st_uid, os.geteuid()):
            raise PermissionError(13, 'Permission denied', name)
    return plain(name, flags, mode)
system.open_fd = protected
"""


def test_another_users_file_in_a_sticky_directory_can_be_locked(open_directory):
    """The kernel refuses O_CREAT on it when fs.protected_regular is set, although it may be opened."""
    os.chmod(open_directory, 0o1777)
    path = open_directory / "x.lock"
    path.touch(0o666)
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    program = PROTECTED_REGULAR + (
        "try: system.open_fd(path, system.O_LOCK)\n"
        "except PermissionError: print('refused')\n"
        "with holdfast.Lock(path) as hold:\n"
        "    hold.check()\n"
        "    print(holdfast.Lock(path).try_acquire())\n"
        "with holdfast.Lock(path, shared=True): print('locked')\n"
    )
    assert as_another_user(program, path) == "refused\nNone\nlocked\n"
    assert path.exists()  # the sticky bit does not let them remove it


def test_a_file_that_cannot_be_opened_raises_permission_error(open_directory):
    path = open_directory / "x.lock"
    path.touch(0o600)
    path.chmod(0o600)
    program = "try: holdfast.Lock(path).acquire()\nexcept PermissionError as error: print(error.filename == path)"
    assert as_another_user(program, path) == "True\n"


# Status.


def test_status_of_a_free_lock(path, tmp_path):
    status = holdfast.Lock(path).status()
    assert status == holdfast.Status(path=path, kind="lock", held=False)
    Path(path).touch()
    assert not holdfast.Lock(path).status().held
    assert os.listdir(tmp_path) == ["x.lock"]


@pytest.mark.parametrize("shared", [False, True])
def test_status_names_the_holders(path, shared):
    with peers(2) as both:
        for peer in both if shared else both[:1]:
            peer.acquire(path, shared=shared)
        status = holdfast.Lock(path).status()
        assert status.held
        assert {holder.pid for holder in status.holders} == {peer.pid for peer in (both if shared else both[:1])}
        assert all(holder.shared is shared and "faces.py" in holder.command for holder in status.holders)
        assert status.waiters == ()


def test_status_names_the_waiters_in_their_order(path):
    lock = holdfast.Lock(path)
    with peers(3) as waiting:
        with lock:
            for number, peer in enumerate(waiting, 1):
                peer.start(path, shared=number == 3)
                until_waiting(lock, number)
            status = lock.status()
            assert [holder.pid for holder in status.holders] == [os.getpid()]
            assert [waiter.pid for waiter in status.waiters] == [peer.pid for peer in waiting]
            assert json.loads(json.dumps(status.as_dict()))["waiters"][0]["pid"] == waiting[0].pid
        assert waiting[0].hear() == {"got": "hold"}


def test_status_is_exact_while_others_lock_and_unlock(path, tmp_path):
    """/proc/locks changes while it is read; nobody must appear twice, or not at all."""
    churn = (
        "import fcntl, os, sys\n"
        "fds = [os.open(f'{sys.argv[1]}/{n}', os.O_RDWR | os.O_CREAT) for n in range(10)]\n"
        "print('locking', flush=True)\n"
        "while True:\n"
        "    for how in (fcntl.LOCK_EX, fcntl.LOCK_UN):\n"
        "        for fd in fds: fcntl.flock(fd, how)\n"
    )
    (tmp_path / "others").mkdir()
    others = subprocess.Popen([sys.executable, "-c", churn, str(tmp_path / "others")], stdout=subprocess.PIPE)
    try:
        assert others.stdout.readline() == b"locking\n"
        with ExitStack() as held:
            locks = [hold_on(cpu, holdfast.Lock(f"{path}.{cpu}"), held) for cpu in os.sched_getaffinity(0)]
            for _ in range(300):
                for lock in locks:
                    assert [holder.pid for holder in lock.status().holders] == [os.getpid()]
    finally:
        others.kill()
        others.communicate()


def hold_on(cpu: int, lock: holdfast.Lock, held: ExitStack) -> holdfast.Lock:
    """The kernel keeps its locks per processor, so where one is taken decides where it stands in the table."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        held.enter_context(lock)
    finally:
        os.sched_setaffinity(0, everywhere)
    return lock


def test_status_shows_since_when_the_lock_is_held(path):
    with holdfast.Lock(path) as hold:
        assert abs(holdfast.Lock(path).status().since - hold.acquired_at) < 10


def test_status_does_not_guess_since_when_a_kept_file_is_held(path):
    lock = holdfast.Lock(path, keep=True)
    lock.acquire().release()
    os.utime(path, (1, 1))
    with lock as hold:
        since = lock.status().since
        assert since is None or abs(since - hold.acquired_at) < 10


def test_status_counts_from_the_hand_over(path, held):
    os.utime(path, (1, 1))
    lock = holdfast.Lock(path)
    waiter = Caller(lock.acquire)
    until_waiting(lock, 1)
    held._grant.came_through_queue = True  # such a hold leaves its file to those who wait
    held.release()
    hold = waiter.result()
    since = lock.status().since
    hold.release()
    assert since is None or abs(since - hold.acquired_at) < 10


@pytest.mark.parametrize("keep", [False, True])
def test_status_leaves_nothing_and_takes_nothing(path, tmp_path, keep):
    lock = holdfast.Lock(path, keep=keep)
    lock.acquire().release()
    leftovers = Leftovers(tmp_path)
    lock.status()
    leftovers.check()
    hold, before = in_thread(lock.acquire), watches()
    waiter = Caller(lambda: lock.acquire(timeout=60))
    until_waiting(lock, 1)
    eventually(lambda: watches() > before, "the waiter sleeps")  # and changes nothing any more
    busy = Leftovers(tmp_path)
    for _ in range(20):
        lock.status()
    busy.check()
    hold.check()
    hold.release()
    waiter.result().release()


def test_status_makes_no_free_lock_look_busy(path, monkeypatch):
    """It has to try the lock where /proc shows no holder; whoever comes at that moment must not be turned away."""
    lock = holdfast.Lock(path, keep=True)
    lock.acquire().release()
    asked = threading.Event()
    plain_lock, plain_marked = system.lock, system.removal_marked
    comers = []

    def lock_and_let_another_come(fd, op):
        plain_lock(fd, op)
        if not comers and threading.current_thread() is threading.main_thread():
            comers.append(Caller(lock.try_acquire))
            asked.wait(1)

    def marked(fd):
        answer = plain_marked(fd)
        asked.set()
        return answer

    monkeypatch.setattr(system, "lock", lock_and_let_another_come)
    monkeypatch.setattr(system, "removal_marked", marked)
    lock.status()
    for comer in comers:
        hold = comer.result()
        assert hold is not None
        hold.release()


# Other tools: flock(1).


needs_flock = pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock(1)")


def flock_n(path, *options: str) -> bool:
    """Does flock(1) get it at once?"""
    done = subprocess.run(["flock", "-n", *options, path, "true"], check=False)
    assert done.returncode in (0, 1)
    return done.returncode == 0


class FlockHolder:
    """flock(1), holding the lock until it is told to go."""

    def __init__(self, path: str, option: str) -> None:
        self._process = subprocess.Popen(
            ["flock", option, path, "sh", "-c", "echo in; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid

    def __enter__(self) -> FlockHolder:
        assert self._process.stdout.readline() == b"in\n"
        return self

    def go(self) -> None:
        self._process.stdin.close()

    def __exit__(self, *_: object) -> None:
        self.go()
        self._process.stdout.close()
        self._process.wait()


@needs_flock
def test_flock_is_excluded_by_us(path):
    with holdfast.Lock(path, keep=True):
        assert not flock_n(path, "-x") and not flock_n(path, "-s")
    with holdfast.Lock(path, shared=True, keep=True):
        assert not flock_n(path, "-x") and flock_n(path, "-s")
    assert flock_n(path, "-x")


@needs_flock
def test_a_data_file_that_another_program_has_locked_is_refused_and_not_busy(path):
    Path(path).write_text("data")
    lock = holdfast.Lock(path)
    with FlockHolder(path, "-x"):
        for acquire in (lock.try_acquire, lambda: lock.acquire(timeout=1)):
            with pytest.raises(holdfast.NotALockFile):
                acquire()


@needs_flock
def test_we_are_excluded_by_flock(path):
    exclusive, shared = holdfast.Lock(path, keep=True), holdfast.Lock(path, shared=True, keep=True)
    with FlockHolder(path, "-x") as holder:
        assert exclusive.try_acquire() is None and shared.try_acquire() is None
        assert [h.pid for h in exclusive.status().holders][:1] == [holder.pid]
        with pytest.raises(holdfast.Busy, match=rf"held by pid {holder.pid} \(flock "):
            exclusive.acquire(timeout=0)
    with FlockHolder(path, "-s"):
        assert exclusive.try_acquire() is None
        shared.acquire(timeout=0).release()
    exclusive.acquire(timeout=0).release()


@needs_flock
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("option", ["-x", "-s"])
def test_we_wait_for_flock(path, timeout, option):
    lock = holdfast.Lock(path)
    with FlockHolder(path, option) as holder:
        waiter = Caller(lock.acquire, timeout=timeout)
        until_waiting(lock, 1)
        holder.go()
        waiter.result().release()
    assert not os.path.exists(path)


@needs_flock
@pytest.mark.parametrize("option", ["-x", "-s"])
def test_flock_waits_for_us(path, option):
    with holdfast.Lock(path, keep=True):
        inode = os.stat(path).st_ino
        waiter = subprocess.Popen(["flock", option, path, "echo", "in"], stdout=subprocess.PIPE)
        eventually(lambda: waits_in_kernel(waiter.pid, inode), "flock waits")
    assert waiter.communicate(timeout=PATIENCE)[0] == b"in\n"


def waits_in_kernel(pid: int, inode: int) -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line and f":{inode} " in line for line in lines)


# What people try.


@pytest.mark.parametrize(
    "lock",
    [
        holdfast.Lock("/x", shared=True, timeout=3, keep=True, fair=False, mode=0o600),
        holdfast.Semaphore("/x", 4, timeout=3, fair=False, mode=0o600),
        holdfast.LockFile("/x", tag="t", stale_after=5, stale="old", retry=2, durable=False, heartbeat=9, fence=True),
    ],
    ids=["lock", "semaphore", "file"],
)
def test_a_description_can_be_sent_to_another_process(lock):
    again = pickle.loads(pickle.dumps(lock))
    assert type(again) is type(lock)
    assert [getattr(again, name) for name in ("path", *lock._options)] == [
        getattr(lock, name) for name in ("path", *lock._options)
    ]


def test_lock_release_raises_an_error_that_names_the_hold(path):
    with pytest.raises(AttributeError, match=r"Release the hold"):
        holdfast.Lock(path).release()


def test_a_dropped_hold_is_reported_in_the_log(path, caplog):
    with pytest.warns(ResourceWarning, match="keep what"):
        holdfast.Lock(path).acquire()
    assert "was never released" in caplog.text


def test_a_released_hold_cannot_be_entered(path):
    hold = holdfast.Lock(path).acquire()
    hold.release()
    with pytest.raises(holdfast.NotLocked):
        hold.__enter__()


@pytest.mark.parametrize("timeout", [True, False])
def test_a_boolean_is_not_a_timeout(path, timeout):
    with pytest.raises(ValueError, match="timeout is seconds"):
        holdfast.Lock(path).acquire(timeout)


def test_a_free_lock_is_free(path):
    assert holdfast.Lock(path).status().explain() == "free"
    assert holdfast.LockFile(path).status().explain() == "free"


def test_a_timeout_carries_the_status(path):
    with holdfast.Lock(path), pytest.raises(holdfast.Busy) as caught:
        holdfast.Lock(path, timeout=0).acquire()
    assert [holder.pid for holder in caught.value.status.holders] == [os.getpid()]


def test_a_lock_whose_queue_cannot_be_made_is_waited_for_without_one(path):
    Path(path + ".queue").touch()
    hold = in_thread(holdfast.Lock(path).acquire)
    with pytest.raises(holdfast.Timeout):
        holdfast.Lock(path).acquire(timeout=0.05)
    hold.release()


def test_a_thread_that_leaves_a_block_releases_its_own_hold(path):
    """Two threads are in a block of one lock. The one that entered first leaves first, and holds nothing afterwards."""
    lock, exclusive = holdfast.Lock(path, shared=True), holdfast.Lock(path)
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with lock as hold:
            entered.set()
            assert leave.wait(PATIENCE)
            with pytest.raises(holdfast.WouldDeadlock):
                exclusive.acquire(timeout=0.01)
            hold.check()

    with lock:
        other = Caller(stay)
        assert entered.wait(PATIENCE)
    with pytest.raises(holdfast.Timeout):
        exclusive.acquire(timeout=0.01)
    leave.set()
    other.result()
    exclusive.try_acquire().release()


def test_a_hold_released_inside_its_block_leaves_the_holds_of_other_threads_alone(path):
    lock = holdfast.Lock(path, shared=True)
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with lock as hold:
            entered.set()
            assert leave.wait(PATIENCE)
            hold.check()

    block = ExitStack()
    block.enter_context(lock).release()
    other = Caller(stay)
    assert entered.wait(PATIENCE)
    with pytest.raises(holdfast.NotLocked):
        block.close()
    leave.set()
    other.result()


@pytest.mark.parametrize("kind", [holdfast.Lock, holdfast.LockFile])
def test_a_file_that_was_replaced_by_a_loop_of_symlinks_is_a_lost_lock(kind, path):
    hold = kind(path).acquire()
    os.unlink(path)
    os.symlink(os.path.basename(path), path)
    assert hold.lost
    with pytest.raises(holdfast.LockLost):
        hold.release()
