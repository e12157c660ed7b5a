"""Rule 10, a queue with foreign content and forks, in every order of system calls: see `explorer`.

Kinds of lock that meet on one path never have a holder each, whatever comes in between, and whoever is killed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("explorer", reason="needs POSIX files, kernel locks and poll", exc_type=ImportError)

from explorer import Oracle, Run, explore, system_calls
from support import tickets
from test_lock_faults import in_another_thread, make_ticket

from holdfast import Lock, LockFile, NotALockFile, Semaphore, TaskLocks, Timeout, system, wait
from holdfast.files import OwnedFd
from holdfast.locks.engine import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # a search takes as long as it takes, also on a busy machine
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
FURTHER = [1, pytest.param(2, marks=SLOW)]


class Flock:
    """What flock(1) does: open, lock, and no look at what the path names afterwards."""

    shared = False

    def __init__(self, path: str) -> None:
        self.lock, self._path = self, path

    def try_acquire(self) -> Flock | None:
        self._file = OwnedFd(system.open_fd(self._path, system.O_LOCK, 0o644))
        try:
            system.lock(self._file.fd, system.EX_NB)
        except BlockingIOError:
            self._file.close()
            return None
        st = system.fstat(self._file.fd)
        if st.st_nlink:
            return self
        self._file.close()  # removed meanwhile: flock(1) would hold a file that nobody else can find
        return None

    def release(self) -> None:
        self._file.close()


KINDS: dict[str, Callable[[str], Any]] = {
    "lock": lambda path: Lock(path).try_acquire(),
    "shared": lambda path: Lock(path, shared=True).try_acquire(),
    "kept": lambda path: Lock(path, keep=True).try_acquire(),
    "semaphore": lambda path: Semaphore(path, 2).try_acquire(),
    "file": lambda path: LockFile(path, durable=False).try_acquire(),
    "task": lambda path: TaskLocks(os.path.dirname(path), "w").claim("x"),
    "flock": lambda path: Flock(path).try_acquire(),
}
PAIRS = [(one, other) for i, one in enumerate(KINDS) for other in list(KINDS)[i + 1 :]]


def meeting(one: str, other: str, old: bool = False) -> Any:
    """Two processes try the path as two kinds, twice each. `old`: it names an empty file that counts as stale."""

    def scenario(run: Run) -> None:
        oracle = Oracle(run)
        run.path = str(run.directory / "x.lock")
        if old:
            (run.directory / "x.lock").touch()
            os.utime(run.path, (0, 0))

        def use(kind: str) -> None:
            for _ in range(2):
                try:
                    hold = KINDS[kind](run.path)
                except NotALockFile:
                    continue
                if hold is not None:
                    with oracle.holding():
                        pass
                    hold.release()

        run.spawn(lambda: use(one))
        run.spawn(lambda: use(other))

    return scenario


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda kind: kind)
def test_two_kinds_never_have_a_holder_each(one: str, other: str, preemptions: int, tmp_path: Path) -> None:
    assert explore(meeting(one, other), tmp_path, preemptions=preemptions)["runs"] > 10


@pytest.mark.parametrize("preemptions", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda kind: kind)
def test_two_kinds_never_have_a_holder_each_though_one_is_killed(
    one: str, other: str, preemptions: int, tmp_path: Path
) -> None:
    assert explore(meeting(one, other), tmp_path, preemptions=preemptions, kills=1)["runs"] > 10


REMOVERS = [(one, other) for one in ("lock", "shared", "kept", "semaphore", "flock") for other in ("file", "task")]


@pytest.mark.parametrize(("one", "other"), REMOVERS, ids=lambda kind: kind)
def test_a_stale_file_is_not_removed_in_place_of_one_that_another_kind_has_made_since(
    one: str, other: str, tmp_path: Path
) -> None:
    assert explore(meeting(one, other, old=True), tmp_path, preemptions=2)["runs"] > 10


# A queue with foreign content.


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("number", ["000000000001", "999999999999"])
@pytest.mark.parametrize("content", ["file", "directory", "symlink", "fifo"])
def test_waiters_take_turns_in_a_queue_with_foreign_content(
    content: str, number: str, preemptions: int, tmp_path: Path
) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run)
        run.symmetric = True
        os.mkdir(run.path + ".queue")
        make_ticket(content, f"{run.path}.queue/{number}")

        def use() -> None:
            try:
                oracle.use(Lock(run.path).acquire(timeout=10))
            except Timeout:
                pass

        run.spawn(use)
        run.spawn(use)
        return lambda: None

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 10


# A fork at every system call of a wait.


class Unwind(BaseException):
    """Ends the wait in the child, as an exception of the program would."""


WAITS: dict[str, Callable[[str], Any]] = {
    "lock": Lock,
    "shared": lambda path: Lock(path, shared=True),
    "semaphore": lambda path: Semaphore(path, 1),
    "file": lambda path: LockFile(path, durable=False),
}


class ForkAtCall:
    """In place of the system: forks at one of its calls. The child's wait ends there; the parent's goes on."""

    def __init__(self, number: int, path: str, folder: Path) -> None:
        self.calls = 0
        self.children = 0
        self._number = number
        self._path = path
        self._folder = folder

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._number:
                self.before = tickets(self._path)
                pid = os.fork()
                if pid == 0:
                    # They get the numbers of the descriptors that the fork hook has closed.
                    self.own = [open(self._folder / f"own-{n}", "w") for n in range(12)]  # noqa: SIM115
                    raise Unwind
                self.children += 1
                assert os.waitpid(pid, 0)[1] == 0, "the child touched what is not its own"
            return real(*args, **options)

        return call

    def check(self) -> None:
        """In the child, after its wait has ended."""
        code = 1
        try:
            untouched = all(os.fstat(file.fileno()).st_size == 0 for file in self.own)
            code = 0 if untouched and tickets(self._path) == self.before and os.path.exists(self._path) else 2
        finally:
            os._exit(code)


@pytest.mark.parametrize("kind", WAITS)
def test_a_fork_at_every_system_call_of_a_wait_leaves_the_parent_alone(
    kind: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = in_another_thread(WAITS["lock" if kind == "shared" else kind](path).acquire)
    calls = {name: real for name, real in system_calls().items() if name != "close"}
    number = forked = 0
    while number == forked:
        number += 1
        fork = ForkAtCall(number, path, tmp_path)
        steps = WAITS[kind](path)._steps(BUSY, 60)
        with monkeypatch.context() as patched:
            for name, real in calls.items():
                patched.setattr(system, name, fork.wrap(real))
            try:
                while not isinstance(next(steps), wait.Readable):
                    pass
            except Unwind:
                fork.check()
        steps.close()
        forked += fork.children
        assert os.path.exists(path) and not tickets(path)
    assert forked > 10
    holder.release()
