"""A hand-off waits for nothing that can be done later: not in the release, and not in the acquire that it ends."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from faces import Caller, in_thread, until_waiting
from support import descriptors

import holdfast
from holdfast import system

if TYPE_CHECKING:
    from pathlib import Path

CLOSING = {"close", "rmdir", "utime"}


class Calls:
    """The system calls of this process, in order, each with the thread that made it and the file it was for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.made: list[tuple[int, str, tuple[Any, ...]]] = []
        for name in names:
            monkeypatch.setattr(system, name, self._recording(name, getattr(system, name)))

    def _recording(self, name: str, call: Any) -> Any:
        def recorded(*arguments: Any, **options: Any) -> Any:
            self.made.append((threading.get_ident(), name, arguments))
            return call(*arguments, **options)

        return recorded

    def names_of(self, thread: int) -> list[str]:
        return [name for by, name, _ in self.made if by == thread]


def acquire_behind(lock: Any, calls: Calls) -> tuple[list[str], list[str]]:
    """The calls of a release, and those of the acquire in another thread that waits for it, after the waiter slept."""
    hold, acquired, waiter = lock.acquire(), [], []

    def wait() -> None:
        waiter.append(threading.get_ident())
        mine = lock.acquire()
        acquired.extend(calls.names_of(waiter[0]))
        mine.release()

    thread = threading.Thread(target=wait)
    thread.start()
    until_waiting(lock, 1)
    calls.made.clear()
    hold.release()
    released = calls.names_of(threading.get_ident())
    thread.join()
    return released, acquired


def test_a_release_marks_the_file_then_unlocks_and_then_closes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock = holdfast.Lock(tmp_path / "x.lock")
    calls = Calls(monkeypatch, *CLOSING)
    real = system.lock

    def unlock(fd: int, op: int) -> None:
        if op == system.UN:
            calls.made.append((threading.get_ident(), "unlock", (fd,)))
        real(fd, op)

    monkeypatch.setattr(system, "lock", unlock)
    released, _ = acquire_behind(lock, calls)
    assert released.index("unlock") < released.index("close")
    # Marked later, the file would look old while the next holder has it.
    assert "utime" not in released[released.index("unlock") :]


@pytest.mark.parametrize("kind", ["Lock", "LockFile"])
def test_an_acquire_closes_what_it_waited_with_only_at_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    lock = holdfast.Lock(tmp_path / "x") if kind == "Lock" else holdfast.LockFile(tmp_path / "x", durable=False)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    calls = Calls(monkeypatch, *CLOSING)
    # A waiter that an event wakes before the lock is free looks in vain, and closes what it looked at.
    assert any("close" not in acquire_behind(lock, calls)[1] for _ in range(20))
    if before:  # one inotify instance is kept for the next wait
        assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of descriptors")
@pytest.mark.parametrize("kind", [holdfast.Lock, holdfast.LockFile])
def test_a_process_with_many_locks_keeps_little_of_what_it_waited_with(tmp_path: Path, kind: Any):
    """A user has 128 inotify instances, for all programs together."""
    many, holds, before = 80, [], len(descriptors())
    each = 1 if kind is holdfast.Lock else 2
    for number in range(many):
        lock = kind(tmp_path / str(number))
        hold = in_thread(lock.acquire)
        waiter = Caller(lock.acquire)
        until_waiting(lock, 1)
        hold.release()
        holds.append(waiter.result())
    opened = [name for name in descriptors().values() if "inotify" in name]
    assert len(descriptors()) < before + many * each + 60
    assert len(opened) < 32
    for hold in holds:
        hold.release()
    assert len(descriptors()) <= before + 1


def test_a_file_that_is_left_for_the_next_waiter_looks_old(tmp_path: Path):
    lock = holdfast.Lock(tmp_path / "x.lock")
    hold = lock.acquire()
    hold._grant.came_through_queue = True  # such a hold leaves its file to those who wait
    (tmp_path / "x.lock.queue").mkdir()
    (tmp_path / "x.lock.queue/other").touch()  # so that it is not removed
    hold.release()
    assert os.stat(tmp_path / "x.lock").st_mtime == 0
    with holdfast.Lock(tmp_path / "x.lock", fair=False):
        assert lock.status().since is not None
        os.utime(tmp_path / "x.lock", (0, 0))  # as by a sharer that has released it since
        status = lock.status()
        assert status.held
        assert status.since is None
