"""No two processes hold the lock at once, and no update is lost, while every tenth holder is killed.

Eight processes do a step of work under a lock: read a number, let others run, write the next number. Two of them at
once would write the same number twice. Run as a script, this file is the parent of the eight: it starts a new one for
each that was killed. Memory that all of them map outlives them and keeps the books:

    done[worker]        acquisitions so far
    intent[worker]      the number it was about to write when it was last seen; 0: none
    written[worker]     how many numbers it knows that it wrote, and which

A number that is in no list, and that no killed worker was about to write, was lost.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import import_module

import pytest
import support
from explored import explored
from support import assert_nothing_left, die_with_parent

from holdfast import Hold, Lock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this platform")

WORKERS = 8


@dataclass(frozen=True)
class Plan:
    path: str
    record: str
    acquisitions: int
    keep: bool | None = False  # None: sometimes
    fair: bool | None = True
    shares: bool = False  # three of four holders only read
    ways: tuple[str, ...] = ("blocking", "timeout", "try")
    kills: str = "holders"  # every tenth holder; or "anywhere", as many at moments that nobody chose
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    acquisitions: int
    killed: int
    number: int
    written: list[int]
    intents: list[int]  # of killed workers


class Books:
    """Numbers in memory that outlives the process that writes them. Each worker writes only its own."""

    def __init__(self, plan: Plan) -> None:
        self.share = plan.acquisitions // WORKERS
        self._memory = mmap.mmap(-1, 8 * WORKERS * (3 + self.share))
        self._numbers = memoryview(self._memory).cast("q")

    def worker(self, worker: int) -> memoryview:
        """done, intent, how many written, which."""
        size = 3 + self.share
        return self._numbers[worker * size : (worker + 1) * size]


class Worker:
    def __init__(self, plan: Plan, books: Books, number: int) -> None:
        self.plan = plan
        self.mine = books.worker(number)
        self.share = books.share
        self.record = os.open(plan.record, os.O_RDWR)
        self.random = random.Random(f"{plan.seed} {number} {self.mine[0]}")

    def run(self) -> None:
        while self.mine[0] < self.share:
            reads = self.plan.shares and self.random.random() < 0.75
            hold = self.acquire(self.lock(reads))
            self.mine[0] += 1
            # The last one is not killed, so that each worker leaves the lock in order.
            doomed = self.plan.kills == "holders" and self.mine[0] % 10 == 5 and self.mine[0] < self.share
            if reads:
                self.read(doomed)
            else:
                self.write(doomed)
            hold.release()

    def lock(self, shared: bool) -> Lock:
        keep, fair = (
            self.random.random() < 0.5 if choice is None else choice for choice in (self.plan.keep, self.plan.fair)
        )
        return Lock(self.plan.path, shared=shared, keep=keep, fair=fair)

    def acquire(self, lock: Lock) -> Hold:
        way = self.random.choice(self.plan.ways)
        if way == "blocking":
            return lock.acquire()
        if way == "timeout":
            return lock.acquire(timeout=60)
        while (hold := lock.try_acquire()) is None:
            if self.plan.ways != ("try",):
                return lock.acquire()
            os.sched_yield()
        return hold

    def write(self, doomed: bool) -> None:
        die_before = doomed and self.random.random() < 0.5
        new = self.get(0) + 1
        os.sched_yield()
        if die_before:
            os.kill(os.getpid(), signal.SIGKILL)
        self.mine[1] = new
        self.put(0, new)
        if self.plan.shares:
            os.sched_yield()
            self.put(1, new)
        if doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        self.mine[3 + self.mine[2]] = new
        self.mine[2] += 1
        self.mine[1] = 0

    def read(self, doomed: bool) -> None:
        first = self.get(0)
        os.sched_yield()
        second = self.get(1)
        assert first == second, f"a reader saw the halves {first} and {second}"
        if doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, half: int) -> int:
        return int(os.pread(self.record, 20, 20 * half))

    def put(self, half: int, value: int) -> None:
        os.pwrite(self.record, b"%020d" % value, 20 * half)


class Parent:
    """Keeps eight workers going until each has done its share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.books = Books(plan)
        self.pids: dict[int, int] = {}
        self.killed = 0
        self.next_kill = 10
        self.intents: list[int] = []
        self.random = random.Random(plan.seed)

    def start(self, worker: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                Worker(self.plan, self.books, worker).run()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        self.pids[pid] = worker

    def run(self) -> Outcome:
        for worker in range(WORKERS):
            self.start(worker)
        while self.pids:
            pid, status = self.wait()
            worker = self.pids.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.bury(worker)
                self.start(worker)
            elif status:
                sys.exit(f"worker {worker} ended with status {status}")
        return self.outcome()

    def wait(self) -> tuple[int, int]:
        if self.plan.kills == "holders":
            return os.wait()
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                return pid, status
            time.sleep(self.random.uniform(0, 0.001))
            if self.done() >= self.next_kill:
                os.kill(self.random.choice(list(self.pids)), signal.SIGKILL)
                self.next_kill += 10

    def done(self) -> int:
        return sum(self.books.worker(worker)[0] for worker in range(WORKERS))

    def bury(self, worker: int) -> None:
        self.killed += 1
        mine = self.books.worker(worker)
        if mine[1]:
            self.intents.append(mine[1])
            mine[1] = 0

    def outcome(self) -> Outcome:
        workers = [self.books.worker(worker) for worker in range(WORKERS)]
        with open(self.plan.record) as file:
            return Outcome(
                acquisitions=self.done(),
                killed=self.killed,
                number=int(file.read(20)),
                written=[number for mine in workers for number in mine[3 : 3 + mine[2]]],
                intents=self.intents,
            )


def carry_out(plan: Plan) -> Outcome:
    with open(plan.record, "w") as file:
        file.write("0" * 40)
    command = [sys.executable, "-W", "error", __file__, json.dumps(asdict(plan))]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(support.__file__)}
    parent = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert parent.stderr == ""
    outcome = Outcome(**json.loads(parent.stdout))
    explored(acquisitions=outcome.acquisitions, kills=outcome.killed)
    return outcome


def check(outcome: Outcome) -> None:
    twice = [number for number, times in Counter(outcome.written).items() if times > 1]
    assert twice == []
    lost = set(range(1, outcome.number + 1)) - set(outcome.written) - set(outcome.intents)
    assert lost == set()
    assert max(outcome.written) <= outcome.number


@pytest.fixture
def record(tmp_path) -> str:
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data" / "record")


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "unfair"])
@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
@pytest.mark.parametrize("shares", [False, True], ids=["exclusive", "mixed"])
def test_no_update_is_lost_while_every_tenth_holder_is_killed(path, record, shares, keep, fair):
    acquisitions = 2_000  # many times as many in `test_no_update_is_lost_in_the_long_run`
    outcome = carry_out(Plan(path, record, acquisitions, shares=shares, keep=keep, fair=fair))

    check(outcome)
    assert outcome.acquisitions == acquisitions
    assert outcome.killed == acquisitions // 10
    if not shares:
        died_before_writing = outcome.killed - len(outcome.intents)
        assert len(outcome.written) == acquisitions - outcome.killed
        assert outcome.number == acquisitions - died_before_writing
    if keep:
        os.unlink(path)
    assert_nothing_left(path)


def test_no_update_is_lost_when_every_process_uses_the_lock_in_another_way(path, record):
    outcome = carry_out(Plan(path, record, acquisitions=4_000, shares=True, keep=None, fair=None))

    check(outcome)
    assert outcome.acquisitions == 4_000
    with Lock(path, timeout=0):  # whether the last one kept the file is anybody's guess
        pass
    assert_nothing_left(path)


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "unfair"])
def test_no_update_is_lost_when_every_process_only_tries(path, record, fair):
    outcome = carry_out(Plan(path, record, acquisitions=1_000, fair=fair, ways=("try",)))

    check(outcome)
    assert outcome.number == outcome.acquisitions - (outcome.killed - len(outcome.intents))
    assert_nothing_left(path)


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
def test_no_update_is_lost_when_processes_are_killed_anywhere(path, record, keep):
    killed = 0
    while killed <= 100:  # where the parent gets little of the processor it kills few
        outcome = carry_out(Plan(path, record, acquisitions=5_000, keep=keep, kills="anywhere"))
        check(outcome)
        killed += outcome.killed
    with Lock(path, timeout=10):  # some waiters died and left their tickets: the next one clears up
        pass
    assert_nothing_left(path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fair", [True, False, None], ids=["fair", "unfair", "both"])
@pytest.mark.parametrize("keep", [False, True, None], ids=["ephemeral", "kept", "both"])
@pytest.mark.parametrize(
    ("shares", "kills"), [(False, "holders"), (True, "holders"), (False, "anywhere")], ids=["exclusive", "mixed", "any"]
)
def test_no_update_is_lost_in_the_long_run(path, record, shares, kills, keep, fair):
    check(carry_out(Plan(path, record, acquisitions=20_000, shares=shares, kills=kills, keep=keep, fair=fair, seed=1)))

    with Lock(path, timeout=10):
        pass
    assert_nothing_left(path)


if __name__ == "__main__":
    # What the first wait of a process loads, loaded here once: a worker lives for some ten acquisitions.
    for module in ("bisect", "ctypes", "select"):
        import_module(module)
    die_with_parent()
    plan = json.loads(sys.argv[1])
    print(json.dumps(asdict(Parent(Plan(**{**plan, "ways": tuple(plan["ways"])})).run())))
