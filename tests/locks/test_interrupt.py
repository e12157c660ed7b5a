"""Control-C during a wait: KeyboardInterrupt comes out at once and leaves no descriptor, file, watch or ticket."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading

import pytest
from faces import Caller, Leftovers, eventually, in_thread, obstacles, until_waiting

import holdfast
from holdfast import system, wait


@pytest.fixture(autouse=True)
def python_handles_sigint():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def main_thread_sleeps_in(step: str) -> bool:
    frame = sys._current_frames()[threading.main_thread().ident]
    if frame.f_code.co_filename == wait.__file__ and frame.f_code.co_name == "poll":
        frame = frame.f_back
    code = frame.f_code
    waits = code.co_name == "block" and code.co_filename == wait.__file__
    return waits and type(frame.f_locals["self"]).__name__ == step


def interrupted(step: str, acquire, *args, **options):
    """Call it in the main thread and press Control-C as soon as that sleeps in a step of this kind."""

    def press():
        eventually(lambda: main_thread_sleeps_in(step), f"the main thread sleeps in {step}")
        os.kill(os.getpid(), signal.SIGINT)

    presser = Caller(press)
    with pytest.raises(KeyboardInterrupt):
        acquire(*args, **options)
    presser.result()


@pytest.mark.parametrize(
    ("kind", "timeout", "step", "met"),
    [
        ("head", None, "Granted", 2),
        ("head", 60, "Readable", 2),
        ("shared", None, "Granted", 2),
        ("shared", 60, "Readable", 2),
        ("kept", None, "Granted", 2),
        ("unfair", None, "Granted", 2),
        ("unfair", 60, "Readable", 2),
        ("middle", None, "Readable", 0),
        ("middle", 60, "Readable", 1),
        ("middle", None, "Granted", 3),
        ("line", None, "Notified", 0),
        ("line", 60, "Notified", 0),
        ("line", None, "Readable", 1),
        ("semaphore", None, "Readable", 1),
        ("semaphore", None, "Readable", 2),
        ("semaphore", 60, "Readable", 2),
    ],
)
@pytest.mark.parametrize("waited_before", [False, True])
def test_an_interrupted_wait_leaves_nothing(kind, timeout, step, met, waited_before, tmp_path, monkeypatch):
    """`met` obstacles are gone before the wait begins, so that it is the next one which is waited for."""
    if waited_before:
        wait_once(tmp_path / "before")
    path = str(tmp_path / "x.lock")
    leftovers = Leftovers(tmp_path)
    lock, in_the_way = obstacles(kind, path, monkeypatch)
    for take_away in in_the_way[:met]:
        take_away()
    with_others = Leftovers(tmp_path)
    interrupted(step, lock.acquire, timeout=timeout)
    with_others.check()
    for take_away in in_the_way[met:]:
        take_away()
    if kind == "kept":
        os.unlink(path)
    leftovers.check()
    with lock:
        pass
    if kind == "kept":
        os.unlink(path)
    leftovers.check()


def wait_once(path):
    """A wait that succeeded, after which the process keeps its inotify instance."""
    lock = holdfast.Lock(path)
    held = in_thread(lock.acquire)

    def let_go():
        until_waiting(lock, 1)
        held.release()

    releaser = Caller(let_go)
    lock.acquire(timeout=60).release()
    releaser.result()


def test_an_interrupted_poll_leaves_nothing(tmp_path, monkeypatch):
    def no_watch(path, *_):
        raise OSError(errno.EMFILE, "too many watches", path)

    monkeypatch.setattr(system, "Watch", no_watch)
    leftovers = Leftovers(tmp_path)
    lock = holdfast.Lock(tmp_path / "x.lock")
    held = in_thread(lock.acquire)
    interrupted("Pause", lock.acquire, timeout=60)
    held.release()
    leftovers.check()


def test_an_interrupt_in_a_with_block_releases(tmp_path):
    lock = holdfast.Lock(tmp_path / "x.lock")
    leftovers = Leftovers(tmp_path)

    def work():
        with lock:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        work()
    leftovers.check()
