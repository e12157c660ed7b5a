"""On one path, the locks of `holdfast.filelock` and those of the package filelock exclude each other.

The real locks run in a process of their own, which finds the package in a directory that was made for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import real
from faces import PATIENCE, Caller
from support import Peer

from holdfast.filelock import FileLock, SoftFileLock, Timeout

pytestmark = real.needs_python_311
KINDS = pytest.mark.parametrize("kind", [FileLock, SoftFileLock])
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import filelock
assert "holdfast" not in filelock.__file__
lock = getattr(filelock, sys.argv[2])(sys.argv[3])
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except filelock.Timeout:
        print("Timeout", flush=True)
"""


class Real:
    """A process with a lock of the package filelock."""

    def __init__(self, kind: type, path: str) -> None:
        name = "SoftFileLock" if kind is SoftFileLock else "FileLock"
        command = [sys.executable, "-c", PROGRAM, str(real.installed(f"filelock=={real.VERSION}")), name, path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Real:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def begin(self, statement: str) -> None:
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def do(self, statement: str) -> str:
        self.begin(statement)
        return self.answer()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


@KINDS
def test_a_real_holder_excludes_ours(path, kind):
    with Real(kind, path) as other:
        assert other.do("lock.acquire()") == "done"
        with pytest.raises(Timeout):
            kind(path).acquire(timeout=0.05)
        with pytest.raises(Timeout):
            kind(path).acquire(blocking=False)
        assert other.do("lock.release()") == "done"
        kind(path).acquire(timeout=PATIENCE).lock.release()


@KINDS
def test_our_holder_excludes_a_real_one(path, kind):
    with Real(kind, path) as other:
        with kind(path):
            assert other.do("lock.acquire(timeout=0.1)") == "Timeout"
        assert other.do("lock.acquire(timeout=30)") == "done"


@KINDS
def test_a_lock_is_handed_over_both_ways(path, kind):
    with Real(kind, path) as other:
        lock = kind(path)
        for _ in range(3):
            lock.acquire()
            other.begin("lock.acquire(timeout=30)")
            lock.release()
            assert other.answer() == "done"
            waiter = Caller(lambda: kind(path, thread_local=False).acquire(timeout=PATIENCE).lock)
            assert other.do("lock.release()") == "done"
            waiter.result().release()


@KINDS
def test_the_lock_of_a_killed_real_holder_is_ours_at_once(path, kind):
    with Real(kind, path) as other:
        assert other.do("lock.acquire()") == "done"
        waiter = Caller(lambda: kind(path, thread_local=False).acquire(timeout=PATIENCE).lock)
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait()
        waiter.result().release()


@KINDS
def test_the_lock_of_our_killed_holder_is_theirs(path, kind):
    with Real(kind, path) as other, Peer(path=path) as peer:
        peer.do("from holdfast.filelock import FileLock, SoftFileLock")
        peer.do(f"lock = {'SoftFileLock' if kind is SoftFileLock else 'FileLock'}(path); lock.acquire()")
        assert other.do("lock.acquire(timeout=0.1)") == "Timeout"
        peer.kill()
        assert other.do("lock.acquire(timeout=30)") == "done"


def test_a_soft_lock_has_the_record_that_filelock_writes(path):
    with Real(SoftFileLock, path) as other:
        assert other.do("lock.acquire()") == "done"
        assert SoftFileLock(path).pid == other.process.pid
        with open(path, "rb") as file:
            theirs = file.read().split(b"\n")
        assert other.do("lock.release()") == "done"
        with SoftFileLock(path), open(path, "rb") as file:
            ours = file.read().split(b"\n")
            assert other.do(f"assert lock.pid == {os.getpid()}") == "done"
    assert (len(ours), ours[1]) == (len(theirs), theirs[1])
    assert ours[0] == str(os.getpid()).encode()


@KINDS
def test_ours_and_real_ones_never_hold_at_once(path, kind):
    """Both count in a file, without any other protection."""
    counter = path + ".count"
    with open(counter, "w") as file:
        file.write("0")
    rounds = 30
    step = "n = int(open(C).read()); f = open(C, 'w'); f.write(str(n + 1)); f.close()"
    with Real(kind, path) as other:
        other.begin(f"C = {counter!r}")
        other.answer()
        loop = f"for _ in range({rounds}):\n with lock: {step}"
        other.begin(f"exec({loop!r})")
        lock = kind(path)
        for _ in range(rounds):
            with lock:
                with open(counter) as file:
                    number = int(file.read())
                with open(counter, "w") as file:
                    file.write(str(number + 1))
        assert other.answer() == "done"
    with open(counter) as file:
        assert file.read() == str(2 * rounds)
