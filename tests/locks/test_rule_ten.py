"""Rule 10: a path is one kind of lock. No two kinds on one path ever have a holder each, in any order."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from support import PATIENCE, assert_nothing_left, until

from holdfast import Lock, LockFile, NotALockFile, Semaphore, TaskLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FLOCK = shutil.which("flock")
TWO_HOURS = 7200


class FlockHold:
    """What flock(1) holds while its command runs."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [str(FLOCK), path, "sh", "-c", "echo held; read line"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "held\n"

    def check(self) -> None:
        assert self._process.poll() is None

    def release(self) -> None:
        self._process.communicate("\n")


def try_flock(path: str) -> FlockHold | None:
    return None if subprocess.run([str(FLOCK), "-n", path, "true"], check=False).returncode else FlockHold(path)


KINDS: dict[str, Callable[[str], Any]] = {
    "lock": lambda path: Lock(path).try_acquire(),
    "shared": lambda path: Lock(path, shared=True).try_acquire(),
    "kept": lambda path: Lock(path, keep=True).try_acquire(),
    "semaphore": lambda path: Semaphore(path, 2).try_acquire(),
    "file": lambda path: LockFile(path, durable=False).try_acquire(),
    "task": lambda path: TaskLocks(os.path.dirname(path), "w").claim(os.path.basename(path).removesuffix(".lock")),
    "flock": try_flock,
}
SHARE = {("shared", "shared"), ("semaphore", "semaphore")}
PAIRS = [
    pytest.param(
        one,
        other,
        marks=pytest.mark.skipif(FLOCK is None and "flock" in (one, other), reason="flock(1) is not installed"),
    )
    for one in KINDS
    for other in KINDS
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "x.lock")


def tries(kind: str, path: str) -> Any:
    """The hold, or None if the path is refused or held."""
    try:
        return KINDS[kind](path)
    except NotALockFile:
        return None


@contextmanager
def held(kind: str, path: str) -> Iterator[Any]:
    hold = KINDS[kind](path)
    assert hold is not None
    yield hold
    hold.release()


def make_old(path: str) -> None:
    """As old as it takes for a file to count as stale."""
    long_ago = time.time() - TWO_HOURS
    if os.path.exists(path):
        os.utime(path, (long_ago, long_ago))


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "old"])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_path_that_is_held_as_one_kind_is_not_granted_as_another(one: str, other: str, old: bool, path: str) -> None:
    with held(one, path) as hold:
        if old:
            make_old(path)
        before = os.stat(path).st_ino
        second = tries(other, path)
        if (one, other) in SHARE:
            assert second is not None
            second.release()
        else:
            assert second is None
        assert os.stat(path).st_ino == before, "the file of the holder was replaced"
        if (one, one) not in SHARE:
            assert tries(one, path) is None
        hold.check()
    again = KINDS[one](path)
    assert again is not None
    again.release()


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "old"])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_path_that_was_used_as_one_kind_has_one_holder_as_another(one: str, other: str, old: bool, path: str) -> None:
    with held(one, path):
        pass
    if old:
        make_old(path)
    second = tries(other, path)
    if second is None:
        return  # refused, or counted as held: the file stays what it was
    first = tries(one, path)
    assert first is None or (one, other) in SHARE
    second.check()
    for hold in (first, second):
        if hold is not None:
            hold.release()


@pytest.mark.parametrize("other", [kind for kind in KINDS if kind != "semaphore"])
def test_the_last_permit_of_a_semaphore_excludes_every_other_kind(other: str, path: str) -> None:
    """Also if its holder came second. The first holder made the file, and has released its permit by now."""
    if other == "flock" and FLOCK is None:
        pytest.skip("flock(1) is not installed")
    first, second = Semaphore(path, 2).acquire(), Semaphore(path, 2).acquire()
    first.release()
    assert tries(other, path) is None
    second.check()
    second.release()


@pytest.mark.skipif(FLOCK is None, reason="flock(1) is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_flock_is_granted_beside_shared_locks_and_semaphores_only(kind: str, path: str) -> None:
    with held(kind, path) as hold:
        done = subprocess.run([str(FLOCK), "-n", "-s", path, "true"], check=False)
        assert (done.returncode == 0) == (kind in ("shared", "semaphore"))
        hold.check()


@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_file_that_waits_behind_a_lock_is_acquired_when_that_is_released(shared: bool, path: str) -> None:
    """The holder leaves its empty file to the next waiter, which may be one of the other kind."""
    hold = Lock(path, shared=shared).acquire()
    since = time.time()
    found: list[Any] = []
    waiter = threading.Thread(
        target=lambda: found.append(LockFile(path, durable=False, timeout=10 * PATIENCE).acquire())
    )
    waiter.start()
    until(lambda: Lock(path).status().waiters != () and time.time() - since > 0.01)  # longer than a brief hold
    hold.release()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()
    found[0].check()
    found[0].release()
    assert_nothing_left(path)


def test_status_shows_when_a_waiter_acquired_a_lock(path: str) -> None:
    """Also if the holder before it had made its file look old."""
    hold = Lock(path).acquire()
    began = time.time()
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(Lock(path).acquire(timeout=PATIENCE)))
    waiter.start()
    until(lambda: Lock(path).status().waiters != () and time.time() - began > 0.01)
    hold.release()
    waiter.join(PATIENCE)
    since = Lock(path).status().since
    assert since is not None and since >= began - 1
    found[0].release()


@pytest.mark.parametrize("shared", [False, True])
def test_the_other_kinds_name_the_holder_of_a_lock(tmp_path: Path, shared: bool) -> None:
    path = str(tmp_path / "x.lock")
    with Lock(path, shared=shared):
        for other in (Semaphore(path, 2), LockFile(path, durable=False)):
            status = other.status()
            assert status.held and not status.corrupt
            assert [holder.pid for holder in status.holders] == [os.getpid()]
            assert f"by pid {os.getpid()}" in status.explain()
