"""A process may die before any of its system calls: the next one gets the lock, and nothing stays on disk for long.

First with the `explorer`, which puts the death at every point of every schedule within its bounds; then with real
processes and SIGKILL, at every call of one that is alone and of one that queues.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

explorer = pytest.importorskip("explorer", reason="needs POSIX files, kernel locks and poll", exc_type=ImportError)

from explorer import Failure, Oracle, Run, explore, system_calls, wander  # noqa: E402
from support import assert_nothing_left, state_of, tickets, until  # noqa: E402

from holdfast import Lock, Semaphore, Timeout, system  # noqa: E402

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

    from support import Peer

VICTIM = 0

KINDS: dict[str, Callable[..., Any]] = {
    "exclusive": Lock,
    "shared": lambda path, **options: Lock(path, shared=True, **options),
    "unfair": lambda path, **options: Lock(path, fair=False, **options),
    "semaphore": lambda path, **options: Semaphore(path, 1, **options),
}
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
FURTHER = [1, pytest.param(2, marks=SLOW)]
SLOW_FURTHER = [0, pytest.param(1, marks=SLOW)]


def next_one_gets_it(run: Run, make: Callable[..., Any], left: list[str] | None = None) -> None:
    """Whatever the dead left behind is no obstacle to the next process, and goes away with it."""
    make(run.path, timeout=1).acquire().release()
    assert os.listdir(run.directory) == (left or [])


def deaths(seen: Counter[str]) -> set[str]:
    return {name.removeprefix("killed before ") for name in seen if name.startswith("killed before ")}


ALONE = {
    "exclusive": {"access", "open_fd", "lock", "stat", "unlink", "close"},
    "shared": {"access", "open_fd", "lock", "stat", "mark_removal", "unlink", "close"},
    "unfair": {"open_fd", "lock", "stat", "unlink", "close"},
    "semaphore": {
        "open_fd",
        "pread",
        "mark_removal",
        "pwrite",
        "unlock_slots",
        "unmark_removal",
        "try_slot",
        "stat",
        "unlink",
        "close",
    },
}


@pytest.mark.parametrize(
    ("kind", "after"),
    [(kind, after) for kind in KINDS for after in KINDS if (kind == "semaphore") == (after == "semaphore")],
)
def test_a_death_without_competitors_leaves_a_usable_lock(kind: str, after: str, tmp_path: Path) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        def use() -> None:
            Oracle(run).use(KINDS[kind](run.path).acquire())

        run.spawn(use)
        return lambda: next_one_gets_it(run, KINDS[after])

    assert ALONE[kind] <= deaths(explore(scenario, tmp_path, preemptions=0, kills=1))


def test_a_death_with_a_kept_file_leaves_a_usable_lock(tmp_path: Path) -> None:
    def make(path: str, **options: Any) -> Lock:
        return Lock(path, keep=True, **options)

    def scenario(run: Run) -> Callable[[], None]:
        run.spawn(lambda: make(run.path).acquire().release())
        return lambda: next_one_gets_it(run, make, left=["x"])

    assert {"open_fd", "lock", "close"} <= deaths(explore(scenario, tmp_path, preemptions=0, kills=1))


def test_a_new_number_of_permits_is_possible_after_any_death(tmp_path: Path) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        run.spawn(lambda: Semaphore(run.path, 1).acquire().release())
        return lambda: next_one_gets_it(run, lambda path, **options: Semaphore(path, 2, **options))

    explore(scenario, tmp_path, preemptions=0, kills=1)


# Not alone: the others are excluded as long as the victim lives, and no longer.


def beside(victim: str, other: str, *, timeout: float | None = None) -> Any:
    """The victim, and another one that must get the lock in the end."""

    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run)
        run.killable = {VICTIM}

        def use(kind: str, **options: Any) -> bool:
            try:
                return oracle.use(KINDS[kind](run.path, **options).acquire())
            except Timeout:
                return False

        run.spawn(lambda: use(victim, timeout=timeout))
        survivor = run.spawn(lambda: use(other))

        def check() -> None:
            assert survivor.result
            next_one_gets_it(run, KINDS[other])

        return check

    return scenario


PAIRS = [
    ("exclusive", "exclusive"),
    ("exclusive", "shared"),
    ("shared", "exclusive"),
    ("shared", "shared"),
    ("unfair", "unfair"),
]
QUEUE = {"mkdir", "mkfifo", "listdir", "rmdir"}


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize(("victim", "other"), PAIRS)
def test_a_death_beside_another_process_leaves_a_usable_lock(
    victim: str, other: str, preemptions: int, tmp_path: Path
) -> None:
    died = deaths(explore(beside(victim, other), tmp_path, preemptions=preemptions, kills=1))
    assert died >= ALONE[victim] | (QUEUE if other == "exclusive" else set())


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("kind", ["exclusive", "shared", "unfair"])
def test_the_death_of_a_process_with_a_deadline_leaves_a_usable_lock(
    kind: str, preemptions: int, tmp_path: Path
) -> None:
    """It may also die while it gives up."""
    explore(beside(kind, "exclusive", timeout=10), tmp_path, preemptions=preemptions, kills=1)


@pytest.mark.parametrize("preemptions", SLOW_FURTHER)
@pytest.mark.parametrize("timeout", [None, 10])
def test_a_death_beside_another_process_leaves_a_usable_semaphore(
    timeout: float | None, preemptions: int, tmp_path: Path
) -> None:
    scenario = beside("semaphore", "semaphore", timeout=timeout)
    died = deaths(explore(scenario, tmp_path, preemptions=preemptions, kills=1))
    assert died >= ALONE["semaphore"] | (QUEUE if preemptions else set())


def line_of_three(make: Callable[..., Any], victim: int) -> Any:
    """One holds, two queue. The victim dies anywhere from the moment at which all have found their place."""

    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run)
        held: list[int] = []
        run.exploring = False
        run.safety_looks = False
        run.killable = {victim}

        def hold() -> bool:
            hold = make(run.path).acquire()
            held.append(1)
            with oracle.holding(getattr(hold.lock, "shared", False)):
                run.until(lambda: run.actors[2].waiting)
                run.exploring = True
                run.pause()
            hold.release()
            return True

        def queue(before: Callable[[], bool]) -> bool:
            run.until(before)
            return oracle.use(make(run.path).acquire())

        def check() -> None:
            assert all(actor.result for actor in run.actors if actor.number != victim)
            next_one_gets_it(run, make)

        run.spawn(hold)
        run.spawn(lambda: queue(lambda: bool(held)))
        run.spawn(lambda: queue(lambda: run.actors[1].waiting))
        return check

    return scenario


@pytest.mark.parametrize("preemptions", SLOW_FURTHER)
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["the holder", "the first in the queue", "the second"])
@pytest.mark.parametrize("kind", ["exclusive", "semaphore"])
def test_a_death_in_the_queue_does_not_block_the_others(
    kind: str, victim: int, preemptions: int, tmp_path: Path
) -> None:
    died = deaths(explore(line_of_three(KINDS[kind], victim), tmp_path, preemptions=preemptions, kills=1))
    assert "close" in died and died & {"pause", "stay"}
    if victim:
        assert ("lock" if kind == "exclusive" and victim == 1 else "readable") in died


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000, 3000), marks=SLOW)], ids=["short", "long"])
@pytest.mark.parametrize(
    "kinds",
    [
        ("exclusive", "exclusive", "exclusive"),
        ("shared", "exclusive", "shared", "exclusive"),
        ("semaphore", "semaphore", "semaphore"),
    ],
    ids=["writers", "readers-and-writers", "semaphore"],
)
def test_several_deaths_among_many_processes_leave_a_usable_lock(
    kinds: tuple[str, ...], seeds: range, tmp_path: Path
) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run)

        def use(kind: str) -> None:
            for _ in range(2):
                oracle.use(KINDS[kind](run.path).acquire())

        for kind in kinds:
            run.spawn(lambda kind=kind: use(kind))
        return lambda: next_one_gets_it(run, KINDS[kinds[0]])

    assert len(deaths(wander(scenario, tmp_path, seeds=seeds, kills=2))) > 10


def test_the_explorer_finds_a_file_that_a_death_leaves_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a queue that does not clear away the tickets of the dead, it says so."""
    from holdfast.locks.queue import Queue

    monkeypatch.setattr(Queue, "_remove_if_dead", lambda queue, name, fd: False)
    with pytest.raises(Failure):
        explore(beside("exclusive", "exclusive"), tmp_path, preemptions=1, kills=1)


# The same with real processes: the code below runs in a peer, and in children that it forks.


def die_before_call(number: int, kind: str, path: str) -> int:
    """Start a process that uses the lock and is killed before its `number`th system call."""
    pid = os.fork()
    if pid:
        return pid
    left = number

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    try:
        for name, real in system_calls().items():
            setattr(system, name, counted(real))
        KINDS[kind](path).acquire().release()
    finally:
        os._exit(0)


def died(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contended", [False, True], ids=["alone", "queueing"])
def test_sigkill_before_every_system_call(
    kind: str, contended: bool, path: str, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(path=path)
    peer.do("from test_crash_points import die_before_call, died")
    calls = 0
    while True:
        calls += 1
        hold = (
            KINDS["semaphore" if kind == "semaphore" else "exclusive"](path).acquire(timeout=10) if contended else None
        )
        pid = peer.do(f"die_before_call({calls}, {kind!r}, path)")
        if hold is not None:
            until(
                lambda pid=pid: state_of(pid) == "Z" or (state_of(pid) == "S" and (tickets(path) or kind == "unfair"))
            )
            hold.release()
        killed = peer.do(f"died({pid})")
        KINDS[kind](path).acquire(timeout=10).release()
        assert_nothing_left(path)
        if not killed:
            break
    assert calls > (20 if contended and kind != "unfair" else 8)
