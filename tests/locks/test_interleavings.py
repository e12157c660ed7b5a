"""No order in which processes can make their system calls breaks a lock: see `explorer`.

The bounds are those of `make test`; `make prove` goes one preemption further and wanders longer.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

explorer = pytest.importorskip("explorer", reason="needs POSIX files, kernel locks and poll", exc_type=ImportError)

from explorer import Failure, Oracle, Run, explore, replay, system_calls, wander  # noqa: E402

from holdfast import Lock, LockLost, Semaphore, Timeout, Unsupported, status, system  # noqa: E402
from holdfast.locks import lock, path_lock  # noqa: E402
from holdfast.locks.queue import Queue  # noqa: E402
from holdfast.system import posix  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # a search takes as long as it takes, also on a busy machine
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
FURTHER = [2, pytest.param(3, marks=SLOW)]
LONGER = [range(60), pytest.param(range(1000, 4000), marks=SLOW)]
LONGER_IDS = ["short", "long"]

EXCLUSIVE: dict[str, Any] = {}
SHARED = {"shared": True}
PATIENT = {"timeout": 10}
SHARED_PATIENT = {"shared": True, "timeout": 10}
UNFAIR = {"fair": False}
UNFAIR_SHARED = {"fair": False, "shared": True}
UNFAIR_PATIENT = {"fair": False, "timeout": 10}
KEPT = {"keep": True}
KEPT_PATIENT = {"keep": True, "timeout": 10}


def nothing_left(run: Run, but_kept: bool = False) -> None:
    assert [name for name in os.listdir(run.directory) if not (but_kept and name == "x")] == []


def users(*kinds: dict[str, Any], times: int = 1, tick: float = 1e-6, left: list[str] | None = None) -> Any:
    """Each kind is a process that uses the lock so many times. Those without a deadline must all get it."""

    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run)
        run.symmetric = all(kind == kinds[0] for kind in kinds)
        run.tick = tick
        timeouts = []

        def use(kind: dict[str, Any]) -> None:
            for _ in range(times):
                try:
                    oracle.use(Lock(run.path, **kind).acquire())
                except Timeout:
                    assert kind.get("timeout")
                    timeouts.append(kind)

        def check() -> None:
            assert oracle.entered + len(timeouts) == len(kinds) * times
            assert os.listdir(run.directory) == (left or [])

        for kind in kinds:
            run.spawn(lambda kind=kind: use(kind))
        return check

    return scenario


PAIRS = {
    "exclusive-exclusive": users(EXCLUSIVE, EXCLUSIVE),
    "exclusive-shared": users(EXCLUSIVE, SHARED),
    "shared-shared": users(SHARED, SHARED),
    "exclusive-patient": users(EXCLUSIVE, PATIENT),
    "patient-patient": users(PATIENT, PATIENT),
    "shared-patient": users(SHARED, PATIENT),
    "exclusive-shared_patient": users(EXCLUSIVE, SHARED_PATIENT),
    "unfair-unfair": users(UNFAIR, UNFAIR),
    "unfair-unfair_shared": users(UNFAIR, UNFAIR_SHARED),
    "unfair-unfair_patient": users(UNFAIR, UNFAIR_PATIENT),
    "unfair_shared-unfair_patient": users(UNFAIR_SHARED, UNFAIR_PATIENT),
    "exclusive-unfair": users(EXCLUSIVE, UNFAIR),
    "kept-kept": users(KEPT, KEPT, left=["x"]),
    "kept-kept_patient": users(KEPT, KEPT_PATIENT, left=["x"]),
}


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("pair", PAIRS)
def test_two_processes_exclude_each_other_and_clean_up(pair: str, preemptions: int, tmp_path: Path) -> None:
    assert explore(PAIRS[pair], tmp_path, preemptions=preemptions)["runs"] > 50


CROWDS = {
    "exclusive": users(EXCLUSIVE, EXCLUSIVE, EXCLUSIVE),
    "patient": users(PATIENT, PATIENT, PATIENT, PATIENT),
    "readers_and_writers": users(SHARED, SHARED, EXCLUSIVE, SHARED_PATIENT),
    "fair_and_not": users(EXCLUSIVE, UNFAIR, SHARED, UNFAIR_PATIENT),
    "again": users(EXCLUSIVE, EXCLUSIVE, PATIENT, times=2),
    "again_after_its_turn": users(EXCLUSIVE, SHARED, PATIENT, times=2, tick=0.01),
    "unfair_again": users(UNFAIR, UNFAIR, UNFAIR_SHARED, times=2),
    "kept": users(KEPT, KEPT_PATIENT, {"keep": True, "shared": True}, times=2, left=["x"]),
}


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_a_crowd_is_excluded_and_cleans_up(crowd: str, seeds: range, tmp_path: Path) -> None:
    assert wander(CROWDS[crowd], tmp_path, seeds=seeds)["mkfifo" if crowd != "unfair_again" else "lock"] > 0


def any_crowd(seed: int) -> Any:
    """Whoever comes, in whatever way: which ones, the seed says."""
    chance = random.Random(seed)
    permits = chance.choice((None, None, None, 1, 2))
    keep = permits is None and chance.random() < 0.15
    tick = chance.choice((1e-6, 1e-3, 1e-2))
    members = [
        (
            {"fair": chance.random() < 0.75} | ({} if permits else {"keep": keep, "shared": chance.random() < 0.4}),
            [chance.choice((None, None, None, 10, 10, 0, "try", "status")) for _ in range(chance.randint(1, 3))],
            chance.choice((None, None, None, "one process")),
        )
        for _ in range(chance.randint(2, 5))
    ]

    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run, permits or 1)
        run.tick = tick

        def visit(options: dict[str, Any], ways: list[Any]) -> None:
            for way in ways:
                lock = Semaphore(run.path, permits, **options) if permits else Lock(run.path, **options)
                try:
                    if way == "status":
                        lock.status()
                    else:
                        oracle.use(lock.try_acquire() if way == "try" else lock.acquire(timeout=way))
                except Timeout:
                    assert way in (10, 0)

        for options, ways, process in members:
            run.spawn(lambda options=options, ways=ways: visit(options, ways), process)
        return lambda: nothing_left(run, but_kept=keep)

    return scenario


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 11000), marks=SLOW)], ids=LONGER_IDS)
def test_any_crowd_is_excluded_and_cleans_up(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "sees_everybody", lambda: True)  # `test_asking_for_the_status` has the other case
    for seed in seeds:
        wander(any_crowd(seed), tmp_path, seeds=[seed])


def threads(run: Run) -> Callable[[], None]:
    """Two threads of one process, which queue in memory, and another process."""
    oracle = Oracle(run)

    def use(**kind: Any) -> None:
        try:
            oracle.use(Lock(run.path, **kind).acquire())
        except Timeout:
            assert kind.get("timeout")

    run.spawn(lambda: use(fair=False, timeout=10), process="first")
    run.spawn(lambda: use(fair=False), process="first")
    run.spawn(use)
    return lambda: nothing_left(run)


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
def test_threads_that_queue_in_memory_wake_each_other(seeds: range, tmp_path: Path) -> None:
    wander(threads, tmp_path, seeds=seeds)


# Promises beyond exclusion.


def sharers_that_try(run: Run) -> Callable[[], None]:
    def use() -> None:
        hold = Lock(run.path, shared=True).try_acquire()
        assert hold is not None, "a sharer found it busy"
        run.pause()
        hold.release()

    run.symmetric = True
    run.spawn(use)
    run.spawn(use)
    return lambda: nothing_left(run)


@pytest.mark.parametrize("preemptions", FURTHER)
def test_trying_to_share_never_fails_among_sharers(preemptions: int, tmp_path: Path) -> None:
    assert explore(sharers_that_try, tmp_path, preemptions=preemptions)["removal_marked"] > 0


def hand_over(make: Callable[[Run, float | None], Any], timeouts: list[int]) -> Any:
    """One comes through the queue, and another queues behind it and may give up while the first lets go."""

    def scenario(run: Run) -> Callable[[], None]:
        held: list[str] = []
        run.exploring = False

        def hold(name: str, until: Callable[[], bool]) -> None:
            hold = make(run, None).acquire()
            held.append(name)
            run.until(until)
            run.exploring = name == "second"
            hold.release()

        def give_up() -> None:
            run.until(lambda: "second" in held)
            try:
                make(run, 10).acquire().release()
            except Timeout:
                timeouts.append(1)

        def second() -> None:
            run.until(lambda: "first" in held)
            hold("second", lambda: run.actors[2].waiting or run.actors[2].done)

        run.spawn(lambda: hold("first", lambda: run.actors[1].waiting))
        run.spawn(second)
        run.spawn(give_up)
        return lambda: nothing_left(run)

    return scenario


@pytest.mark.parametrize("preemptions", FURTHER)
def test_a_long_hold_leaves_its_file_only_to_a_waiter(preemptions: int, tmp_path: Path) -> None:
    """As above, but the holder did not come through the queue."""
    timeouts: list[int] = []

    def scenario(run: Run) -> Callable[[], None]:
        lock._BRIEF_HOLD_S = -1.0
        held: list[int] = []

        def hold() -> None:
            hold = Lock(run.path).acquire()
            held.append(1)
            run.until(lambda: run.actors[1].waiting or run.actors[1].done)
            hold.release()

        def give_up() -> None:
            run.until(lambda: bool(held))
            try:
                Lock(run.path, **PATIENT).acquire().release()
            except Timeout:
                timeouts.append(1)

        run.spawn(hold)
        run.spawn(give_up)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 50
    assert timeouts


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("kind", ["exclusive", "semaphore"])
def test_a_waiter_that_gives_up_during_the_hand_over_leaves_no_file(
    kind: str, preemptions: int, tmp_path: Path
) -> None:
    """The holder leaves the file to the waiter, and the waiter to the holder: one of them must sweep."""

    def make(run: Run, timeout: float | None) -> Any:
        if kind == "semaphore":
            return Semaphore(run.path, 1, timeout=timeout)
        return Lock(run.path, timeout=timeout)

    timeouts: list[int] = []
    explore(hand_over(make, timeouts), tmp_path, preemptions=preemptions)
    assert len(timeouts) > 10


@pytest.mark.parametrize("preemptions", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize(
    ("holder", "first", "second"),
    [(EXCLUSIVE, EXCLUSIVE, EXCLUSIVE), (SHARED, EXCLUSIVE, SHARED), (EXCLUSIVE, SHARED, EXCLUSIVE)],
    ids=["writers", "reader-behind-writer", "writer-behind-reader"],
)
def test_waiters_are_served_in_the_order_of_their_tickets(
    holder: dict[str, Any], first: dict[str, Any], second: dict[str, Any], preemptions: int, tmp_path: Path
) -> None:
    """A reader that could share with the holder still waits for the writer before it."""

    def scenario(run: Run) -> Callable[[], None]:
        happened: list[str] = []
        run.exploring = False
        run.safety_looks = False  # they let a later one pass a waiter that does not move

        def hold() -> None:
            held = Lock(run.path, **holder).acquire()
            happened.append("held")
            run.until(lambda: run.actors[1].waiting)
            happened.append("queued")
            run.exploring = True
            held.release()

        def come(name: str, kind: dict[str, Any], after: str) -> None:
            run.until(lambda: after in happened)
            held = Lock(run.path, **kind).acquire()
            happened.append(name)
            held.release()

        def check() -> None:
            assert happened == ["held", "queued", "first", "second"]
            nothing_left(run)

        run.spawn(hold)
        run.spawn(lambda: come("first", first, after="held"))
        run.spawn(lambda: come("second", second, after="queued"))
        return check

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 20


def test_a_look_at_the_queue_loses_no_wake_up(tmp_path: Path) -> None:
    """Whoever tries looks whether the tickets in the queue are alive, while their owners may just be making them."""

    def scenario(run: Run) -> Callable[[], None]:
        held: list[int] = []
        run.exploring = False

        def hold() -> None:
            hold = Lock(run.path).acquire()
            held.append(1)
            run.until(lambda: run.actors[1].waiting and run.actors[2].done)
            hold.release()

        def queue() -> None:
            run.until(lambda: bool(held))
            run.exploring = True
            Lock(run.path).acquire().release()

        def look() -> None:
            run.until(lambda: bool(held))
            assert Lock(run.path).try_acquire() is None

        run.spawn(hold)
        run.spawn(queue)
        run.spawn(look)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 50


def test_processes_that_examine_a_dead_ticket_do_not_take_each_other_for_its_owner(tmp_path: Path) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        os.mkdir(run.path + ".queue")
        os.mkfifo(run.path + ".queue/000000000001")

        def share() -> None:
            hold = Lock(run.path, shared=True).try_acquire()
            assert hold is not None, "a dead waiter counted"
            hold.release()

        for _ in range(2):
            run.spawn(share)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 50


@pytest.mark.parametrize("preemptions", FURTHER)
def test_a_file_that_is_replaced_again_and_again_loses_no_wake_up(preemptions: int, tmp_path: Path) -> None:
    """A waiter watches the file that it has open, not the one that had the name a moment before."""

    def scenario(run: Run) -> Callable[[], None]:
        held: list[int] = []
        run.exploring = False

        def replace() -> None:
            hold = Lock(run.path, **UNFAIR).acquire()
            held.append(1)
            run.until(lambda: run.actors[1].waiting)
            run.exploring = True
            hold.release()
            for _ in range(2):
                hold = Lock(run.path, **UNFAIR).acquire()
                run.pause()
                hold.release()

        def wait() -> None:
            run.until(lambda: bool(held))
            try:
                Lock(run.path, **UNFAIR_PATIENT).acquire().release()
            except Timeout:
                pass

        run.spawn(replace)
        run.spawn(wait)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 50


@pytest.mark.parametrize(
    ("shared", "container"),
    [
        pytest.param(False, False, id="exclusive"),
        pytest.param(True, False, id="shared"),
        pytest.param(False, True, id="exclusive-container"),
        pytest.param(True, True, id="shared-container"),
    ],
)
def test_status_disturbs_no_acquire(
    shared: bool, container: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, whose /proc does not show everybody, it has to ask with a lock of its own."""

    def scenario(run: Run) -> Callable[[], None]:
        def use() -> None:
            hold = Lock(run.path, shared=shared).try_acquire()
            assert hold is not None, "the status was in the way"
            hold.release()

        run.spawn(use)
        run.spawn(lambda: Lock(run.path).status())
        return lambda: nothing_left(run)

    monkeypatch.setattr(status, "sees_everybody", lambda: not container)
    assert explore(scenario, tmp_path, preemptions=3)["runs"] > 20


@pytest.mark.parametrize("container", [False, True], ids=["host", "container"])
def test_status_removes_nothing(container: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who use the lock keep its file, perhaps for flock(1); whoever asks need not know that."""
    Lock(path, keep=True).acquire().release()
    monkeypatch.setattr(status, "sees_everybody", lambda: not container)
    assert not Lock(path).status().held
    assert os.path.exists(path)


# Semaphores.


def permits(*numbers: int, times: int = 1, most: int | None = None, **options: Any) -> Any:
    """Each number is a process that uses the semaphore with that many permits."""

    def scenario(run: Run) -> Callable[[], None]:
        oracle = Oracle(run, most or numbers[0])
        run.symmetric = len(set(numbers)) == 1

        def use(number: int) -> None:
            for _ in range(times):
                try:
                    oracle.use(Semaphore(run.path, number, **options).acquire())
                except Timeout:
                    assert "timeout" in options
                except Unsupported:
                    assert len(set(numbers)) > 1

        for number in numbers:
            run.spawn(lambda number=number: use(number))
        return lambda: nothing_left(run)

    return scenario


SEMAPHORES = {
    "one": permits(1, 1),
    "two": permits(2, 2),
    "patient": permits(1, 1, timeout=10),
    "unfair": permits(1, 1, fair=False),
    "not_agreed": permits(1, 2, most=2),
}


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("semaphore", SEMAPHORES)
def test_two_processes_share_permits_and_clean_up(semaphore: str, preemptions: int, tmp_path: Path) -> None:
    assert explore(SEMAPHORES[semaphore], tmp_path, preemptions=preemptions)["runs"] > 50


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
@pytest.mark.parametrize("options", [{}, {"timeout": 10}, {"fair": False}], ids=["fair", "patient", "unfair"])
def test_three_processes_share_two_permits(options: dict[str, Any], seeds: range, tmp_path: Path) -> None:
    wander(permits(2, 2, 2, times=2, **options), tmp_path, seeds=seeds)


def marked(path: str) -> bool:
    """Does the file say that somebody is about to remove it? Asked without the scheduler."""
    fd = os.open(path, os.O_RDWR)
    try:
        return posix.removal_marked(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("fair", [True, False])
def test_two_permits_can_be_held_at_the_same_time(fair: bool, tmp_path: Path) -> None:
    """Whatever the first one is doing when the second comes, the second does not have to wait for its release."""

    def scenario(run: Run) -> Callable[[], None]:
        inside: list[int] = []

        def use() -> None:
            hold = Semaphore(run.path, 2, fair=fair).acquire()
            inside.append(1)
            if len(inside) == 2:
                run.touches_files()
                assert not marked(run.path), "whoever comes next would wait for the end of a removal"
            run.until(lambda: len(inside) == 2)
            hold.release()

        run.symmetric = True
        run.spawn(use)
        run.spawn(use)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 50


def test_a_free_permit_is_never_reported_busy(tmp_path: Path) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        def use() -> None:
            hold = Semaphore(run.path, 2).try_acquire()
            assert hold is not None, "two permits for two processes, and one found none"
            run.pause()
            hold.release()

        run.symmetric = True
        run.spawn(use)
        run.spawn(use)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 50


def test_a_permit_tried_in_vain_leaves_no_file(tmp_path: Path) -> None:
    """The attempt must not keep the last holder from removing the file: nobody else would."""

    def scenario(run: Run) -> Callable[[], None]:
        def use() -> None:
            hold = Semaphore(run.path, 1).try_acquire()
            if hold is not None:
                hold.release()

        run.symmetric = True
        run.spawn(use)
        run.spawn(use)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 50


def test_two_processes_can_replace_an_unused_number_of_permits_at_once(tmp_path: Path) -> None:
    """A crash left a file with another number. Neither of those who agree on the new one is told that it is in use."""

    def scenario(run: Run) -> Callable[[], None]:
        with open(run.path, "w") as file:
            file.write("permits=1\n")
        run.symmetric = True
        run.spawn(lambda: Semaphore(run.path, 2).acquire().release())
        run.spawn(lambda: Semaphore(run.path, 2).acquire().release())
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 50


# The explorer itself: what it would not find is not proved by it.


def breaking(lock_type: type[Lock], *kinds: dict[str, Any], times: int) -> Any:
    def scenario(run: Run) -> None:
        oracle = Oracle(run)

        def use(kind: dict[str, Any]) -> None:
            for _ in range(times):
                try:
                    oracle.use(lock_type(run.path, **kind).try_acquire())
                except LockLost:
                    pass  # told too late

        for kind in kinds:
            run.spawn(lambda kind=kind: use(kind))

    return scenario


BROKEN = {
    "no identity check": breaking(Lock, UNFAIR, UNFAIR, times=2),
    "removal without the lock": breaking(Lock, SHARED, SHARED, EXCLUSIVE, times=1),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_explorer_finds_two_holders(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "no identity check":  # breaks the first rule: the path may name another file than was locked
        monkeypatch.setattr(path_lock, "named", lambda path, inode: os.stat_result((0,) * 10))
    else:  # breaks the second rule: a sharer removes a file that others may hold
        monkeypatch.setattr(path_lock, "take_all", lambda file: True)
    with pytest.raises(Failure, match="holders") as found:
        explore(BROKEN[broken], tmp_path, preemptions=2)
    with pytest.raises(Failure, match="holders") as again:
        replay(BROKEN[broken], tmp_path, found.value.schedule)
    assert again.value.schedule == found.value.schedule


def test_the_explorer_finds_nothing_wrong_with_the_unbroken_lock(tmp_path: Path) -> None:
    explore(breaking(Lock, UNFAIR, UNFAIR, times=2), tmp_path, preemptions=2)


def test_the_explorer_finds_a_file_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_lock.PathLock, "remove_if_unused", lambda self: None)
    with pytest.raises(Failure, match=r"\['x'\] == \[\]"):
        explore(hand_over(lambda run, timeout: Lock(run.path, timeout=timeout), []), tmp_path)


def test_the_explorer_finds_a_sharer_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "mark_removal", lambda fd: None)
    with pytest.raises(Failure, match="a sharer found it busy"):
        explore(sharers_that_try, tmp_path)


def test_the_explorer_finds_a_lost_wake_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = explorer.Watch.real
    monkeypatch.setattr(explorer.Watch, "real", lambda _, path, own, events: watch("/", own, events))
    with pytest.raises(Failure, match="a wake-up was lost"):
        explore(permits(1, 1), tmp_path)


def test_the_explorer_finds_an_open_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = []
    monkeypatch.setattr(Queue, "close", lambda queue: tickets.append(queue._ticket))
    with pytest.raises(Failure, match="left open"):
        explore(users(EXCLUSIVE, EXCLUSIVE), tmp_path)


def test_the_explorer_finds_a_deadlock(tmp_path: Path) -> None:
    def scenario(run: Run) -> None:
        def use(first: str, second: str) -> None:
            with Lock(run.path + first), Lock(run.path + second):
                run.pause()

        run.spawn(lambda: use("a", "b"))
        run.spawn(lambda: use("b", "a"))

    with pytest.raises(Failure, match="deadlock"):
        explore(scenario, tmp_path, preemptions=1)


def test_the_same_schedule_gives_the_same_run(tmp_path: Path) -> None:
    def calls(run: Run) -> list[str]:
        return [line.partition("(")[0] for line in run.story()]

    def taken(seed: int) -> list[str]:
        words: list[str] = []

        def scenario(run: Run) -> Callable[[], None]:
            check = CROWDS["again"](run)

            def keep() -> None:
                check()
                words.extend((" ".join(run.taken), *calls(run)))

            return keep

        wander(scenario, tmp_path, seeds=[seed])
        return words

    for seed in range(20):
        schedule, *story = taken(seed)
        assert taken(seed) == [schedule, *story]
        assert calls(replay(CROWDS["again"], tmp_path, schedule)) == story


def test_every_system_call_is_a_point_where_others_may_come_in() -> None:
    assert {"open_fd", "close", "stat", "unlink", "access", "listdir", "mkdir", "rmdir", "mkfifo"} <= set(
        system_calls()
    )
    assert {"lock", "lock_range", "mark_removal", "unmark_removal", "removal_marked"} <= set(system_calls())
    assert {"try_slot", "unlock_slots", "read", "write"} <= set(system_calls())
