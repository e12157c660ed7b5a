"""No order in which processes make their system calls, and no death before one of them, breaks a `LockFile`.

See `explorer`, and `test_interleavings` for the other locks. A lock file can be taken away from its holder, so here it
counts who lost it: only one whose file somebody said to have removed, and such a one is always told.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from copy import copy
from typing import TYPE_CHECKING, Any

import pytest

explorer = pytest.importorskip("explorer", reason="needs POSIX files, kernel locks and poll", exc_type=ImportError)

from explorer import Failure, Oracle, Run, explore, replay, wander  # noqa: E402
from support import NO_PROCESS  # noqa: E402

from holdfast import LockFile, LockLost, NotLocked, Timeout, owner, system  # noqa: E402
from holdfast.locks import file_engine, file_hold, publish, record  # noqa: E402
from holdfast.locks import tokens as giving_out  # noqa: E402
from holdfast.locks.engine import BUSY  # noqa: E402
from holdfast.locks.record import Record  # noqa: E402

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Use = Callable[[], object]

pytestmark = pytest.mark.timeout(600)  # a search takes as long as it takes, also on a busy machine
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
FURTHER = [1, pytest.param(2, marks=SLOW)]
FURTHER_STILL = [2, pytest.param(3, marks=SLOW)]
LONGER = [range(40), pytest.param(range(1000, 4000), marks=SLOW)]
LONGER_IDS = ["short", "long"]

FIRST_PID = 5_000_000  # of the actors, where they need different ones
LONG_AGO = 1_000_000_000


def of_the_dead(timestamp: int | None = None) -> bytes:
    """The lock of a process of ours, on this boot, whose liveness byte nobody holds."""
    me = owner.me()
    when = int(time.time()) if timestamp is None else timestamp
    return record.compose(Record(NO_PROCESS, when, "dead", me.host, me.boot, "1:1", "0123456789abcdef", 17))


FOREIGN = b"pid=%d\ntimestamp=%d\n" % (NO_PROCESS, LONG_AGO)
IN_PLACE: dict[str, Callable[[], bytes | None]] = {
    "absent": lambda: None,
    "dead": of_the_dead,
    "foreign": lambda: FOREIGN,
    "damaged": lambda: b"pid=12",
}


def put(run: Run, content: bytes | None) -> None:
    if content is not None:
        with open(run.path, "wb") as file:
            file.write(content)
        os.utime(run.path, (LONG_AGO, LONG_AGO))


class Removals(logging.Handler):
    """Whose lock files were removed without being released, by tag, as those who did it say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.tags: list[str | None] = []

    def emit(self, entry: logging.LogRecord) -> None:
        assert isinstance(entry.args, tuple)
        found: Any = entry.args[1]
        self.tags.append(None if found.record is None else found.record.tag)


@pytest.fixture
def removals() -> Iterator[Removals]:
    handler = Removals()
    logger = logging.getLogger("holdfast")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


@pytest.fixture(params=["nameless", "private", "no_links", "by_descriptor"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a file gets its name here; with the last one, in a directory that others could swap."""
    arrange(request.param, monkeypatch)
    return str(request.param)


def arrange(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_fd = system.open_fd

    def open_without_tmpfile(path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags == system.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return open_fd(path, flags, *args, **options)

    def no_link(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if way in ("private", "no_links"):
        monkeypatch.setattr(system, "open_fd", open_without_tmpfile)
    if way == "no_links":
        monkeypatch.setattr(system, "link", no_link)
    if way == "by_descriptor":
        monkeypatch.setattr(publish, "cannot_be_swapped", lambda _: False)


class Pids:
    """Gives every actor a pid of its own until it is killed: `clean` knows the owner of a private file by its pid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: Run | None = None
        me = owner.me
        exists = system.process_exists

        def actor_as_owner() -> owner.Identity:
            actor = self.run.current if self.run is not None else None
            if actor is None:
                return me()
            identity = copy(me())
            identity.pid = FIRST_PID + actor.number
            return identity

        def process_exists(pid: int) -> bool:
            assert self.run is not None
            return exists(pid) if pid < FIRST_PID else not self.run.actors[pid - FIRST_PID].killed

        monkeypatch.setattr(owner, "me", actor_as_owner)
        monkeypatch.setattr(system, "process_exists", process_exists)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> Pids:
    return Pids(monkeypatch)


def nothing_left(run: Run) -> None:
    assert os.listdir(run.directory) == []


# Exclusion: those who take nothing from the living.


def users(
    *kinds: dict[str, Any],
    times: int = 1,
    content: Callable[[], bytes | None] = lambda: None,
    tick: float = 1e-6,
    make: Callable[..., LockFile] = LockFile,
) -> Any:
    """Each kind is a process that uses the lock so many times. Those without a deadline must all get it."""

    def scenario(run: Run) -> Callable[[], None]:
        put(run, content())
        oracle = Oracle(run)
        run.symmetric = all(kind == kinds[0] for kind in kinds)
        run.tick = tick
        timeouts = []

        def use(kind: dict[str, Any]) -> None:
            for _ in range(times):
                try:
                    oracle.use(make(run.path, durable=False, **kind).acquire())
                except Timeout:
                    assert kind.get("timeout")
                    timeouts.append(kind)

        def check() -> None:
            assert oracle.entered + len(timeouts) == len(kinds) * times
            nothing_left(run)

        for kind in kinds:
            run.spawn(lambda kind=kind: use(kind))
        return check

    return scenario


def triers(number: int, content: Callable[[], bytes | None], make: Callable[..., LockFile] = LockFile) -> Any:
    """All try once. If nobody releases before all have tried, exactly one gets it."""

    def scenario(run: Run) -> Callable[[], None]:
        put(run, content())
        run.symmetric = True
        tried: list[bool] = []

        def attempt() -> None:
            hold = make(run.path, durable=False).try_acquire()
            tried.append(hold is not None)
            assert tried.count(True) <= 1, f"{tried.count(True)} holders"
            run.until(lambda: len(tried) == number)
            if hold is not None:
                hold.release()

        def check() -> None:
            assert tried.count(True) == 1, "nobody got it"
            nothing_left(run)

        for _ in range(number):
            run.spawn(attempt)
        return check

    return scenario


FAIR: dict[str, Any] = {}
PATIENT = {"timeout": 10}
UNFAIR = {"fair": False}
UNFAIR_PATIENT = {"fair": False, "timeout": 10}
PAIRS = {
    "fair": (FAIR, FAIR),
    "fair-patient": (FAIR, PATIENT),
    "unfair": (UNFAIR, UNFAIR),
    "unfair-unfair_patient": (UNFAIR, UNFAIR_PATIENT),
    "fair-unfair": (FAIR, UNFAIR),
    "old": ({"stale": "old"}, {"stale": "old"}),
    "dead-and-old": ({"stale": "dead-and-old", "fair": False}, {"stale": "dead-and-old"}),
}


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("content", IN_PLACE)
def test_two_processes_exclude_each_other_and_clean_up(
    content: str, pair: str, preemptions: int, tmp_path: Path
) -> None:
    def in_place() -> bytes | None:
        # The other policies want a dead holder's lock to be old as well.
        return of_the_dead(LONG_AGO) if content == "dead" and "old" in pair else IN_PLACE[content]()

    assert explore(users(*PAIRS[pair], content=in_place), tmp_path, preemptions=preemptions)["runs"] > 10


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("content", IN_PLACE)
def test_of_two_that_try_exactly_one_gets_it(way: str, content: str, preemptions: int, tmp_path: Path) -> None:
    further = way == "nameless"
    seen = explore(triers(2, IN_PLACE[content]), tmp_path, preemptions=preemptions + further)
    assert seen["runs"] > 5
    assert bool(seen["link"]) == (way in ("private", "no_links"))


@pytest.mark.parametrize("preemptions", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("content", IN_PLACE)
def test_of_three_that_try_exactly_one_gets_it(content: str, preemptions: int, tmp_path: Path) -> None:
    assert explore(triers(3, IN_PLACE[content]), tmp_path, preemptions=preemptions)["runs"] > 20 * preemptions


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
@pytest.mark.parametrize("content", IN_PLACE)
@pytest.mark.parametrize(
    "kinds",
    [(FAIR, FAIR, FAIR), (FAIR, UNFAIR, PATIENT), (UNFAIR, UNFAIR, UNFAIR_PATIENT)],
    ids=["fair", "mixed", "unfair"],
)
def test_three_processes_exclude_each_other_and_clean_up(
    kinds: tuple[dict[str, Any], ...], content: str, seeds: range, way: str, tmp_path: Path
) -> None:
    wander(users(*kinds, times=2, content=IN_PLACE[content]), tmp_path, seeds=seeds[: len(seeds) // 8])


@pytest.mark.parametrize("content", ["absent", "dead"])
def test_two_processes_exclude_each_other_however_the_file_gets_its_name(
    content: str, way: str, tmp_path: Path
) -> None:
    assert explore(users(FAIR, UNFAIR, content=IN_PLACE[content]), tmp_path, preemptions=1)["runs"] > 20


def threads(run: Run) -> Callable[[], None]:
    """Two threads of one process, which queue in memory, and another process."""
    put(run, of_the_dead())
    oracle = Oracle(run)

    def use(**kind: Any) -> None:
        try:
            oracle.use(LockFile(run.path, durable=False, **kind).acquire())
        except Timeout:
            assert kind.get("timeout")

    run.spawn(lambda: use(fair=False, timeout=10), process="first")
    run.spawn(lambda: use(fair=False), process="first")
    run.spawn(use)
    return lambda: nothing_left(run)


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
def test_threads_that_queue_in_memory_wake_each_other(seeds: range, tmp_path: Path) -> None:
    wander(threads, tmp_path, seeds=seeds)


# Loss: those who take from the living.


class Accounts:
    """Who held the lock, who lost it, and who said to have taken it away.

    If two were inside at the same time, one of them has lost the lock, and is told. Nobody loses it whose file nobody
    says to have removed.
    """

    def __init__(self, run: Run, removals: Removals) -> None:
        self.run = run
        self.removals = removals
        removals.tags.clear()
        self.inside: list[str] = []
        self.entered: list[str] = []
        self.pairs: list[set[str]] = []
        self.lost: set[str] = set()

    def use(self, hold: Any) -> None:
        if hold is None:
            return
        tag = hold.lock.tag
        self.pairs += [{tag, other} for other in self.inside]
        self.inside.append(tag)
        self.entered.append(tag)
        self.run.pause()
        self.inside.remove(tag)
        try:
            hold.release()
        except LockLost:
            self.lost.add(tag)
            assert hold.lost
        else:
            assert not hold.lost

    def check(self, entered: int | None = None) -> None:
        removed = [tag for tag in self.removals.tags if tag in self.entered]
        assert entered in (None, len(self.entered))
        untold = [pair for pair in self.pairs if not pair & self.lost]
        assert not untold, f"{untold} were inside together, and neither was told"
        if None not in self.removals.tags:  # somebody's who had not written its tag yet, where there are no links
            assert self.lost <= set(removed), f"lost by {self.lost}, taken from {removed}"
        nothing_left(self.run)


def tagged(run: Run, tag: str, **options: Any) -> LockFile:
    return LockFile(run.path, tag=tag, durable=False, **options)


def break_it(run: Run) -> bool:
    try:
        LockFile(run.path, durable=False).break_()
    except NotLocked:
        return False
    return True


def taking(removals: Removals, *users: dict[str, Any], breakers: int = 0, times: int = 1) -> Any:
    """Processes that use the lock, under policies that take it from the living, and some that break it by hand."""

    def scenario(run: Run) -> Callable[[], None]:
        accounts = Accounts(run, removals)

        def use(name: str, options: dict[str, Any]) -> None:
            for turn in range(times):
                accounts.use(tagged(run, f"{name}.{turn}", **options).acquire())

        for number, options in enumerate(users):
            run.spawn(lambda name=f"user {number}", options=options: use(name, options))
        for _ in range(breakers):
            run.spawn(lambda: break_it(run))
        return lambda: accounts.check(len(users) * times)

    return scenario


OLD = {"stale": "old", "stale_after": 0, "fair": False}
TAKING: dict[str, tuple[list[dict[str, Any]], int]] = {
    "a breaker beside a user": ([FAIR], 1),
    "two breakers beside a user": ([FAIR], 2),
    "a breaker beside two users": ([FAIR, UNFAIR], 1),
    "a user whom age makes stale": ([UNFAIR, OLD], 0),
    "two users that take at once": ([OLD, OLD], 0),
    "a breaker beside one that takes at once": ([OLD], 1),
}


@pytest.mark.parametrize("preemptions", FURTHER_STILL)
@pytest.mark.parametrize("case", TAKING)
def test_a_holder_whose_lock_was_broken_raises_lock_lost_and_removes_no_other_lock(
    case: str, preemptions: int, tmp_path: Path, removals: Removals
) -> None:
    users, breakers = TAKING[case]
    depth = preemptions - (len(users) + breakers > 2)
    assert explore(taking(removals, *users, breakers=breakers), tmp_path, preemptions=depth)["runs"] > 20


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
@pytest.mark.parametrize(
    ("users", "breakers"),
    [([FAIR, UNFAIR, FAIR], 2), ([OLD, OLD, OLD], 0), ([OLD, UNFAIR, FAIR], 1)],
    ids=["breakers", "takers", "both"],
)
def test_among_many_breakers_a_holder_whose_lock_was_broken_raises_lock_lost(
    users: list[dict[str, Any]], breakers: int, seeds: range, way: str, tmp_path: Path, removals: Removals
) -> None:
    seen = wander(taking(removals, *users, breakers=breakers, times=2), tmp_path, seeds=seeds)
    assert seen["unlink"] > 0


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("breakers", [1, 2])
def test_a_break_wakes_the_waiter(breakers: int, preemptions: int, tmp_path: Path, removals: Removals) -> None:
    """The holder stays until the waiter has been there; somebody breaks its lock."""

    def scenario(run: Run) -> Callable[[], None]:
        accounts = Accounts(run, removals)
        run.exploring = False

        def hold() -> None:
            hold = tagged(run, "holder").acquire()
            accounts.entered.append("holder")
            run.until(lambda: "waiter" in accounts.entered)
            assert hold.lost
            with pytest.raises(LockLost):
                hold.release()
            accounts.lost.add("holder")

        def wait() -> None:
            run.until(lambda: "holder" in accounts.entered)
            accounts.use(tagged(run, "waiter").acquire())

        def take() -> None:
            run.until(lambda: run.exploring or run.actors[1].waiting)
            run.exploring = True
            break_it(run)

        run.spawn(hold)
        run.spawn(wait)
        for _ in range(breakers):
            run.spawn(take)
        return lambda: accounts.check(2)

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 10


def test_a_release_wakes_the_waiter_and_a_waiter_sleeps_until_then(tmp_path: Path) -> None:
    """What a waiter does to look must not wake it, nor the other waiters, or they would never sleep."""

    def scenario(run: Run) -> Callable[[], None]:
        held: list[int] = []
        run.exploring = False

        def hold() -> None:
            hold = LockFile(run.path, durable=False).acquire()
            held.append(1)
            run.until(lambda: run.actors[1].waiting and run.actors[2].waiting)
            run.exploring = True
            hold.release()

        def wait() -> None:
            run.until(lambda: bool(held))
            LockFile(run.path, durable=False, fair=False).acquire().release()

        run.spawn(hold)
        run.spawn(wait)
        run.spawn(wait)
        return lambda: nothing_left(run)

    assert explore(scenario, tmp_path, preemptions=1)["runs"] > 20


@pytest.mark.parametrize("preemptions", FURTHER)
@pytest.mark.parametrize("fence", [False, True], ids=["clock", "fence"])
def test_a_process_that_takes_a_lock_over_has_the_greater_token(
    fence: bool, preemptions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is robbed before it has looked at the clock must not come away with a token greater than the robber's.

    Nor may what it writes into the fence file be the last word.
    """

    def scenario(run: Run) -> Callable[[], None]:
        tokens: dict[str, int] = {}
        lost: list[str] = []

        def look_at_the_clock() -> int:
            if run.current is not None:
                run.pause()
            return time.time_ns()

        def use(tag: str, options: dict[str, Any]) -> None:
            hold = tagged(run, tag, fence=fence, **options).acquire()
            tokens[tag] = hold.token
            run.pause()
            try:
                hold.release()
            except LockLost:
                lost.append(tag)

        def check() -> None:
            if "meek" in lost:
                assert tokens["meek"] < tokens["robber"], "who lost the lock has the greater token"
            if fence:
                with open(run.path + ".fence") as file:
                    assert int(file.read()) == max(tokens.values()), "the last token was forgotten"

        monkeypatch.setattr(giving_out, "time_ns", look_at_the_clock)
        run.spawn(lambda: use("meek", UNFAIR))
        run.spawn(lambda: use("robber", OLD))
        return check

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 20


# Cleaning.


# With two preemptions the search has no end: while the cleaner is stopped, two waiters look in turn, and no call of
# theirs moves it on.
@pytest.mark.parametrize("preemptions", [1])
@pytest.mark.parametrize("content", IN_PLACE)
def test_cleaning_disturbs_no_acquire(
    content: str, preemptions: int, way: str, tmp_path: Path, pids: Pids, removals: Removals
) -> None:
    """It removes a stale lock, and never that of a live acquirer, nor the private file that it is about to publish."""

    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        put(run, IN_PLACE[content]())
        accounts = Accounts(run, removals)
        run.spawn(lambda: accounts.use(tagged(run, "user 0").acquire()))
        run.spawn(lambda: accounts.use(tagged(run, "user 1", fair=False).acquire()))
        run.spawn(lambda: LockFile(run.path, durable=False).clean())

        def check() -> None:
            accounts.check(2)
            assert not accounts.lost

        return check

    assert explore(scenario, tmp_path, preemptions=preemptions - 1)["runs"] > 2
    wander(scenario, tmp_path, seeds=range(20 * preemptions))


def test_a_process_whose_private_file_was_cleaned_still_publishes_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another pid namespace our pid says nothing, so our private file may go before it is locked."""
    arrange("private", monkeypatch)
    monkeypatch.setattr(system, "process_exists", lambda pid: False)

    def scenario(run: Run) -> Callable[[], None]:
        seen: list[bytes] = []

        def look() -> None:
            for _ in range(3):
                run.pause()
                try:
                    with open(run.path, "rb") as file:
                        seen.append(file.read())
                except FileNotFoundError:
                    pass

        run.spawn(lambda: LockFile(run.path, durable=False, fair=False).acquire().release())
        run.spawn(lambda: LockFile(run.path, durable=False).clean())
        run.spawn(look)

        def check() -> None:
            nothing_left(run)
            assert all(record.parse(content).owner for content in seen), "seen empty or in part"

        return check

    assert explore(scenario, tmp_path, preemptions=2)["runs"] > 20


# Death.

VICTIM = 0
POLICIES = ("proof", "old", "dead-and-old")
LOCK_FILE_CALLS = {"open_fd", "lock_liveness", "write", "pwrite", "stat", "lock_removal", "unlink", "close"}
CALLS = {
    "nameless": LOCK_FILE_CALLS | {"link_open_file"},
    "private": LOCK_FILE_CALLS | {"link", "fchmod"},
    "no_links": LOCK_FILE_CALLS | {"link", "fchmod"},
    "by_descriptor": LOCK_FILE_CALLS | {"link_open_file"},
}


def deaths(seen: Counter[str]) -> set[str]:
    return {name.removeprefix("killed before ") for name in seen if name.startswith("killed before ")}


def grow_old(path: str) -> None:
    """As if it had all happened long ago."""
    try:
        with open(path, "r+b") as file:
            found = re.search(rb"timestamp=(\d{10})\n", file.read())
            if found:
                file.seek(found.start(1))
                file.write(b"%d" % LONG_AGO)
        os.utime(path, (LONG_AGO, LONG_AGO))
    except FileNotFoundError:
        pass


def next_one_gets_it(run: Run, policy: Any, whole: bool) -> None:
    """Whatever the dead left behind is no obstacle to the next process, and goes away with it, or with `clean`."""
    if policy != "proof" or not whole:
        grow_old(run.path)
    lock = LockFile(run.path, durable=False, stale=policy, timeout=1)
    hold = lock.acquire()
    assert not hold.lost
    lock.clean()
    hold.check()
    hold.release()
    nothing_left(run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("content", ["absent", "foreign"])
def test_a_process_killed_while_it_acquires_leaves_a_lock_that_the_next_one_can_take(
    content: str, policy: str, way: str, tmp_path: Path, pids: Pids
) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        put(run, IN_PLACE[content]())
        run.spawn(lambda: Oracle(run).use(LockFile(run.path, durable=False).acquire()))
        return lambda: next_one_gets_it(run, policy, whole=way != "no_links")

    died = deaths(explore(scenario, tmp_path, preemptions=0, kills=1))
    assert died >= CALLS[way] | ({"pread", "lock"} if content == "foreign" else set())


@pytest.mark.parametrize("what", ["break", "clean"])
def test_a_process_killed_while_it_removes_a_file_leaves_a_lock_that_the_next_one_can_take(
    what: str, tmp_path: Path, pids: Pids
) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        put(run, FOREIGN)
        with open(f"{run.path}.{NO_PROCESS}.0123456789abcdef.tmp", "w"):
            pass
        run.spawn(lambda: break_it(run) if what == "break" else LockFile(run.path, durable=False).clean())

        def check() -> None:
            next_one_gets_it(run, "proof", whole=True)

        return check

    died = deaths(explore(scenario, tmp_path, preemptions=0, kills=1))
    assert {"open_fd", "stat", "unlink", "close"} <= died


@pytest.mark.parametrize("what", ["clean first", "acquire first"])
def test_cleaning_after_any_death_leaves_no_private_file(
    what: str, way: str, tmp_path: Path, pids: Pids, removals: Removals
) -> None:
    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        run.spawn(lambda: LockFile(run.path, durable=False, fence=True, fair=False).acquire().release())

        def check() -> None:
            if way == "no_links":
                grow_old(run.path)
            lock = LockFile(run.path, durable=False, fence=True, timeout=1)
            if what == "clean first":
                lock.clean()
                assert set(os.listdir(run.directory)) <= {"x.fence"}
            lock.acquire().release()
            lock.clean()
            assert os.listdir(run.directory) == ["x.fence"]

        return check

    assert {"rename", "write"} <= deaths(explore(scenario, tmp_path, preemptions=0, kills=1))


def beside(*others: dict[str, Any], victim: dict[str, Any], content: str, policy: str, whole: bool, pids: Pids) -> Any:
    """The victim, and others that must get the lock in the end."""

    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        put(run, IN_PLACE[content]())
        oracle = Oracle(run)
        run.killable = {VICTIM}

        def use(**options: Any) -> bool:
            try:
                return oracle.use(LockFile(run.path, durable=False, **options).acquire())
            except Timeout:
                return False

        run.spawn(lambda: use(**victim))
        survivors = [run.spawn(lambda options=options: use(**options)) for options in others]

        def check() -> None:
            assert all(survivor.result for survivor in survivors)
            next_one_gets_it(run, policy, whole)

        return check

    return scenario


@pytest.mark.parametrize(
    ("content", "preemptions"),
    [("absent", 1), ("dead", 0), pytest.param("absent", 2, marks=SLOW), pytest.param("dead", 1, marks=SLOW)],
)
@pytest.mark.parametrize(
    ("victim", "other"),
    [(FAIR, FAIR), (UNFAIR, UNFAIR), (PATIENT, FAIR)],
    ids=["fair", "unfair", "patient"],
)
def test_a_process_killed_beside_another_leaves_that_one_its_lock(
    victim: dict[str, Any], other: dict[str, Any], content: str, preemptions: int, tmp_path: Path, pids: Pids
) -> None:
    """The other one is woken by the death, or finds the dead one's lock: there is nobody else to help it."""
    scenario = beside(other, victim=victim, content=content, policy="proof", whole=True, pids=pids)
    died = deaths(explore(scenario, tmp_path, preemptions=preemptions, kills=1))
    assert died >= LOCK_FILE_CALLS | {"pread", "liveness_locked", "link_open_file"}


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
@pytest.mark.parametrize("way", ["nameless", "private", "by_descriptor"])
@pytest.mark.parametrize("content", IN_PLACE)
def test_several_processes_killed_in_a_crowd_never_leave_two_holders(
    content: str, way: str, seeds: range, tmp_path: Path, pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(way, monkeypatch)

    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        put(run, IN_PLACE[content]())
        oracle = Oracle(run)

        def use(fair: bool) -> None:
            for _ in range(2):
                oracle.use(LockFile(run.path, durable=False, fair=fair).acquire())

        for number in range(4):
            run.spawn(lambda fair=number < 2: use(fair))
        return lambda: next_one_gets_it(run, "proof", whole=True)

    assert len(deaths(wander(scenario, tmp_path, seeds=seeds, kills=2))) > 5


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
def test_deaths_among_breakers_never_leave_two_holders(
    seeds: range, tmp_path: Path, pids: Pids, removals: Removals
) -> None:
    """The next one gets in, and nobody who lives loses the lock but to one who says so, or dies before it could."""

    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        accounts = Accounts(run, removals)
        for number, options in enumerate((OLD, UNFAIR, OLD)):
            run.spawn(lambda tag=f"user {number}", options=options: accounts.use(tagged(run, tag, **options).acquire()))
        run.spawn(lambda: break_it(run))

        def check() -> None:
            unsaid = accounts.lost - set(removals.tags)
            assert len(unsaid) <= 2 - run.kills, "each of the dead may have robbed one"
            next_one_gets_it(run, "proof", whole=True)

        return check

    wander(scenario, tmp_path, seeds=seeds, kills=2)


# A takeover beside a tool that ignores the removal byte.


class Window:
    """Open from the last check of the name by a living process that takes over a stale file to its unlink."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pids: Pids) -> None:
        self.inside: set[Any] = set()  # actors
        means, remove, take_back = publish.Entry.means, publish.Entry.remove, publish.PublishedFile.take_back
        removes_own: set[Any] = set()  # actors that remove the file that they have just published

        def note_own(file: Any) -> None:
            if pids.run is None:  # the garbage of an earlier test
                return take_back(file)
            removes_own.add(pids.run.current)
            try:
                take_back(file)
            finally:
                removes_own.discard(pids.run.current)

        def check(entry: Any, fd: int, st: os.stat_result) -> bool:
            assert pids.run is not None
            if pids.run.current in removes_own:
                return means(entry, fd, st)
            self.inside.add(pids.run.current)
            if not means(entry, fd, st):
                self.inside.discard(pids.run.current)
                return False
            return True

        def unlink(entry: Any, name: str) -> bool:
            assert pids.run is not None
            found = remove(entry, name)
            self.inside.discard(pids.run.current)
            return found

        monkeypatch.setattr(publish.PublishedFile, "take_back", note_own)
        monkeypatch.setattr(publish.Entry, "means", check)
        monkeypatch.setattr(publish.Entry, "remove", unlink)

    @property
    def is_open(self) -> bool:
        return any(actor is not None and not actor.killed for actor in self.inside)


def beside_a_naive_tool(pids: Pids, window: Window) -> Any:
    """Actor 0 takes over the stale file, and may be killed. Actor 1 replaces the file, as the seeds do. Actor 2 comes
    after actor 0. Only a file that actor 1 has made in the window may be lost."""

    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        window.inside.clear()
        put(run, FOREIGN)
        run.killable = {VICTIM}
        oracle = Oracle(run)
        done: list[bool] = []

        def try_it() -> None:
            oracle.use(LockFile(run.path, durable=False, fair=False).try_acquire())

        def make() -> bool:
            try:
                fd = os.open(run.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return False
            os.write(fd, b"pid=%d\ntimestamp=%d\n" % (os.getpid(), time.time()))
            os.close(fd)
            return True

        def replace() -> None:
            run.pause()
            if os.path.exists(run.path) and os.stat(run.path).st_mtime == LONG_AGO:
                os.unlink(run.path)
            run.pause()
            in_window = window.is_open
            if not make() or in_window:
                return
            with oracle.holding():
                run.until(lambda: bool(done))
            os.unlink(run.path)

        def come_next() -> None:
            run.until(lambda: run.actors[VICTIM].done)
            try_it()
            try_it()
            done.append(True)

        run.spawn(try_it)
        run.spawn(replace)
        run.spawn(come_next)

        def check() -> None:
            grow_old(run.path)  # of actor 1, if it was in the window and nobody removed its file
            next_one_gets_it(run, "proof", whole=False)

        return check

    return scenario


@pytest.mark.parametrize("preemptions", FURTHER)
def test_a_takeover_removes_a_fresh_lock_of_another_tool_only_in_its_window(
    preemptions: int, tmp_path: Path, pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = explore(beside_a_naive_tool(pids, Window(monkeypatch, pids)), tmp_path, preemptions=preemptions, kills=1)
    assert {"unlink", "stat", "link_open_file"} <= deaths(seen)


@pytest.mark.parametrize("seeds", LONGER, ids=LONGER_IDS)
def test_a_takeover_removes_a_fresh_lock_of_another_tool_only_in_its_window_in_any_order(
    seeds: range, tmp_path: Path, pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    wander(beside_a_naive_tool(pids, Window(monkeypatch, pids)), tmp_path, seeds=seeds, kills=1)


@pytest.mark.parametrize("preemptions", [1, *(pytest.param(number, marks=SLOW) for number in (2, 3))])
def test_a_holder_that_loses_its_lock_beside_a_naive_tool_is_told(
    preemptions: int, tmp_path: Path, removals: Removals
) -> None:
    """A tool unlinks the stale file in the window, another process acquires the lock, and the takeover removes it."""

    def scenario(run: Run) -> Callable[[], None]:
        put(run, FOREIGN)
        accounts = Accounts(run, removals)

        def unlink_stale() -> None:
            run.pause()
            if os.path.exists(run.path) and os.stat(run.path).st_mtime == LONG_AGO:
                os.unlink(run.path)

        for number in range(2):
            run.spawn(lambda tag=f"user {number}": accounts.use(tagged(run, tag, fair=False).acquire()))
        run.spawn(unlink_stale)
        return lambda: accounts.check(2)

    assert explore(scenario, tmp_path, preemptions=preemptions)["runs"] > 20


# Whoever comes, in whatever way.


def any_crowd(seed: int, removals: Removals, pids: Pids) -> Any:
    chance = random.Random(seed)
    content = chance.choice(list(IN_PLACE))
    tick = chance.choice((1e-6, 1e-3, 1e-2))
    robbers = chance.random() < 0.5
    visits = (None, None, None, 10, 0, "try", "status", "clean", *(("break",) if robbers else ()))
    members = [
        (
            {"fair": chance.random() < 0.6} | (OLD if robbers and chance.random() < 0.4 else {}),
            [chance.choice(visits) for _ in range(chance.randint(1, 3))],
            chance.choice((None, None, None, "one process")),
        )
        for _ in range(chance.randint(2, 5))
    ]

    def visit(accounts: Accounts, lock: LockFile, way: Any) -> None:
        try:
            if way == "status":
                lock.status()
            elif way == "clean":
                lock.clean()
            elif way == "break":
                break_it(accounts.run)
            else:
                accounts.use(lock.try_acquire() if way == "try" else lock.acquire(timeout=way))
        except Timeout:
            assert way in (10, 0)

    def scenario(run: Run) -> Callable[[], None]:
        pids.run = run
        put(run, IN_PLACE[content]())
        accounts = Accounts(run, removals)
        run.tick = tick

        def come(number: int, options: dict[str, Any], ways: list[Any]) -> None:
            for turn, way in enumerate(ways):
                visit(accounts, tagged(run, f"user {number}.{turn}", **options), way)

        for number, (options, ways, process) in enumerate(members):
            run.spawn(lambda n=number, options=options, ways=ways: come(n, options, ways), process)

        def check() -> None:
            LockFile(run.path, durable=False, timeout=1).acquire().release()  # it may be that all others only looked
            accounts.check()

        return check

    return scenario


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 11000), marks=SLOW)], ids=LONGER_IDS)
def test_any_crowd_is_excluded_and_cleans_up(
    seeds: range, tmp_path: Path, removals: Removals, pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        with monkeypatch.context() as patch:
            arrange(random.Random(seed).choice(("nameless", "private", "by_descriptor")), patch)
            wander(any_crowd(seed, removals, pids), tmp_path, seeds=[seed])


# The explorer itself: what it would not find is not proved by it.


def remove_naively(engine: Any, entry: Any, fd: int, wanted: Any, tries: int = 1, is_break: bool = True) -> Any:
    """The protocol of the seeds: read, judge, unlink."""
    found = engine.judge(fd)
    if not wanted(found):
        return BUSY
    entry.remove(entry.name)
    return found


@pytest.mark.parametrize("content", ["dead", "foreign"])
def test_the_explorer_finds_two_holders(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_engine.FileEngine, "remove", remove_naively)
    scenario = triers(2, IN_PLACE[content])
    with pytest.raises(Failure, match="2 holders") as found:
        explore(scenario, tmp_path, preemptions=2)
    with pytest.raises(Failure, match="2 holders") as again:
        replay(scenario, tmp_path, found.value.schedule)
    assert again.value.schedule == found.value.schedule


def test_the_explorer_finds_a_release_that_removes_the_file_of_another(
    tmp_path: Path, removals: Removals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release(grant: Any) -> bool:
        try:
            system.unlink(grant.entry.name)
        except FileNotFoundError:
            return False
        finally:
            grant.close()
        return True

    monkeypatch.setattr(file_hold.FileGrant, "release", release)
    with pytest.raises(Failure, match=r"neither was told|taken from|\.lost"):
        explore(taking(removals, UNFAIR, OLD), tmp_path, preemptions=2)
