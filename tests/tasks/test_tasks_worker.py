"""`Worker`: what becomes of tasks and of those who do them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import Child, descriptors, in_child, is_alive, state_of, unpacked, until

from holdfast import Lock, NotLocked, system
from holdfast.tasks import Claim, TaskQueue, Worker, WorkerFailed, child, idle, taking
from holdfast.tasks import worker as supervisor
from holdfast.tasks.verdict import Verdict


@pytest.fixture
def queue(jobs: Path) -> TaskQueue:
    return TaskQueue(jobs, durable=False, retry_after=0.01)


def note(place: Path, text: str) -> None:
    """An effect that others can see, and that cannot be half there."""
    with Lock(f"{place}.lock"), open(place, "a") as file:
        file.write(text + "\n")


def noted(place: Path) -> list[str]:
    return place.read_text().splitlines() if place.exists() else []


class Running(Child):
    """A worker in a process of its own."""

    def __init__(self, worker: Callable[[], Worker], *, drain: bool = False) -> None:
        super().__init__(lambda _: worker().run(drain=drain))
        os.close(self._readable)

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and wait until it was heard: the pipe that tells its children so is closed then."""
        before = self._pipes()
        self.kill(signal.SIGTERM)
        until(lambda: self._pipes() < before)

    def _pipes(self) -> int:
        return sum(target.startswith("pipe:") for target in descriptors(self.pid).values())

    def end(self) -> int:  # type: ignore[override]
        """Its exit code. Not what it said: its own children may live on."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("threads", [False, True])
def test_all_of_them_once(queue: TaskQueue, in_memory: Path, threads: bool) -> None:
    ids = [queue.put(number) for number in range(200)]

    def handle(task: Claim) -> int:
        note(in_memory / "out", str(task.payload))
        return task.payload * 2

    summary = Worker(queue, handle, concurrency=4, threads=threads).run(drain=True)
    assert (summary.done, summary.failed, summary.deaths) == (200, 0, 0)
    assert sorted(map(int, noted(in_memory / "out"))) == list(range(200))
    assert [queue.get(id).result for id in ids] == [number * 2 for number in range(200)]


def test_a_coroutine(queue: TaskQueue) -> None:
    async def handle(task: Claim) -> str:
        await asyncio.sleep(0)
        return task.payload.upper()

    ids = [queue.put(text) for text in "abc"]
    slow = queue.put("x", timeout=0.05, attempts=1)

    async def either(task: Claim) -> str:
        return await (asyncio.sleep(60) if task.payload == "x" else handle(task))

    assert Worker(queue, either, concurrency=2, threads=True).run(drain=True).done == 3
    assert [queue.get(id).result for id in ids] == ["A", "B", "C"]
    assert queue.get(slow).state == "failed" and "not done within 0.05 s" in queue.get(slow).error


def test_a_command(queue: TaskQueue) -> None:
    good = queue.put("hello world")
    thing = queue.put({"n": 1})
    bad = queue.put("exit 3", attempts=1)
    script = 'case "$1" in exit*) echo broken >&2; exit 3;; esac; echo "$HOLDFAST_TASK_ID got $1"'
    summary = Worker(queue, ["sh", "-c", script, "-", "{}"], concurrency=2).run(drain=True)
    assert (summary.done, summary.failed) == (2, 1)
    assert queue.get(good).result == f"{good} got hello world"
    assert queue.get(thing).result == f'{thing} got {{"n": 1}}'
    assert queue.get(bad).error == "sh ended with status 3: broken"


def test_a_command_that_takes_too_long_is_ended_with_all_it_started(queue: TaskQueue, in_memory: Path) -> None:
    id = queue.put("x", timeout=0.3, attempts=1)
    pids = in_memory / "pids"
    Worker(queue, ["sh", "-c", f"echo $$ >> {pids}; sleep 600 & echo $! >> {pids}; wait"]).run(drain=True)
    assert queue.get(id).state == "failed" and queue.get(id).error == "not done within 0.3 s"
    for pid in map(int, noted(pids)):
        until(lambda pid=pid: not is_alive(pid))


@pytest.mark.parametrize("threads", [False, True])
def test_a_handler_that_never_ends_is_ended(queue: TaskQueue, in_memory: Path, threads: bool) -> None:
    """Also one that holds the interpreter lock. With threads, the others are given back and done."""
    stuck = queue.put("stuck", timeout=2, attempts=2)
    others = [queue.put(number) for number in range(3)]

    def handle(task: Claim) -> None:
        note(in_memory / "out", str(task.payload))
        if task.payload == "stuck":
            while True:
                sum(range(10**7))
        if threads:
            until(lambda: "stuck" in noted(in_memory / "out"))

    summary = Worker(queue, handle, concurrency=2, threads=threads).run(drain=True)
    assert queue.get(stuck).state == "failed" and queue.get(stuck).error == "not done within 2 s"
    assert queue.get(stuck).tried == 2 and noted(in_memory / "out").count("stuck") == 2
    assert [queue.get(id).state for id in others] == ["done"] * 3 and summary.deaths == 0


def test_a_running_task_is_cancelled(queue: TaskQueue, in_memory: Path) -> None:
    id = queue.put("x")
    other = queue.put("y")

    def handle(task: Claim) -> None:
        note(in_memory / "out", task.payload)
        if task.payload == "x":
            time.sleep(60)

    worker = Running(lambda: Worker(queue, handle), drain=True)
    until(lambda: noted(in_memory / "out"))
    assert queue.cancel(id)
    assert worker.end() == 0
    assert queue.get(id).state == "cancelled" and queue.get(other).state == "done"
    assert noted(in_memory / "out") == ["x", "y"]


def test_sigterm_finishes_what_runs(queue: TaskQueue, in_memory: Path) -> None:
    for number in range(10):
        queue.put(number)

    def handle(task: Claim) -> None:
        note(in_memory / "begun", str(task.payload))
        until((in_memory / "go").exists)
        note(in_memory / "done", str(task.payload))

    worker = Running(lambda: Worker(queue, handle, concurrency=2))
    until(lambda: len(noted(in_memory / "begun")) == 2)
    worker.ask_to_stop()
    (in_memory / "go").touch()
    assert worker.end() == 0
    assert sorted(noted(in_memory / "done")) == ["0", "1"] and len(noted(in_memory / "begun")) == 2
    assert queue.stats()["pending"] == 8 and queue.stats()["running"] == 0


def test_the_second_sigterm_gives_it_back(queue: TaskQueue, in_memory: Path) -> None:
    id = queue.put("x", attempts=1)

    def handle(task: Claim) -> None:
        note(in_memory / "begun", "x")
        time.sleep(60)

    worker = Running(lambda: Worker(queue, handle, concurrency=2))
    until(lambda: noted(in_memory / "begun"))
    worker.ask_to_stop()
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0
    task = queue.get(id)
    assert task.state == "pending" and task.tried == 0 and task.error == "its worker was ended"


def test_who_is_killed_is_replaced_at_once(queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event: the look that the supervisor takes every half second is put off, and so is that of idle workers."""
    monkeypatch.setattr(supervisor, "_TICK", 600.0)
    monkeypatch.setattr(idle, "RECHECK_S", 600.0)

    def handle(task: Claim) -> None:
        if task.token == 1:
            note(in_memory / task.id, str(os.getpid()))
            time.sleep(600)

    worker = Running(lambda: Worker(queue, handle, concurrency=2))
    for _ in range(5):
        id = queue.put("x")
        until(lambda id=id: noted(in_memory / id))
        killed = int(noted(in_memory / id)[0])
        os.kill(killed, signal.SIGKILL)
        until(lambda killed=killed: len({*children_of(worker.pid)} - {killed}) == 2)
        until(lambda id=id: queue.get(id).state == "done")
        assert queue.get(id).tried == 2
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


@pytest.mark.parametrize("status", [9, 0])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_who_ends_its_worker_every_time(queue: TaskQueue, status: int, concurrency: int) -> None:
    poison, other = queue.put("poison", attempts=3), queue.put("other")

    def handle(task: Claim) -> None:
        if task.payload == "poison":
            os._exit(status)

    summary = Worker(queue, handle, concurrency=concurrency).run(drain=True)
    assert queue.get(other).state == "done" and summary.deaths == 3
    assert (summary.done, summary.retried, summary.failed) == (1, 2, 1)
    assert queue.get(poison).state == "failed" and "the worker died" in queue.get(poison).error


def test_what_a_dead_worker_had_counts_as_failed(queue: TaskQueue) -> None:
    queue.put("x", attempts=1)
    Child(lambda _: os._exit(queue.claim() is None)).end()
    summary = Worker(queue, lambda task: None).run(drain=True)
    assert (summary.done, summary.failed, summary.deaths) == (0, 1, 0)


def test_children_that_cannot_begin(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and does not try for ever."""

    def reopened(queue: TaskQueue) -> TaskQueue:
        raise PermissionError(13, "Permission denied", queue.path)

    queue.put("x")
    monkeypatch.setattr(TaskQueue, "reopened", reopened)
    with pytest.raises(WorkerFailed):
        Worker(queue, lambda task: None).run()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_worker_that_may_not_write(queue: TaskQueue, in_memory: Path) -> None:
    in_memory.chmod(0o755)

    def work() -> object:
        os.setuid(65534)
        return Worker(queue, lambda task: None).run()

    assert in_child(work) == "PermissionError"


def test_the_supervisor_is_killed(queue: TaskQueue, in_memory: Path) -> None:
    """Its children finish what they do, and end."""
    queue.put_all(range(5))

    def handle(task: Claim) -> None:
        note(in_memory / "pids", str(os.getpid()))
        until((in_memory / "go").exists)

    worker = Running(lambda: Worker(queue, handle))
    until(lambda: noted(in_memory / "pids"))
    worker.kill(signal.SIGKILL)
    worker.end()
    (in_memory / "go").touch()
    until(lambda: not is_alive(int(noted(in_memory / "pids")[0])))
    assert queue.stats()["done"] == 1 and queue.stats()["pending"] == 4


@pytest.mark.parametrize("kind", ["function", "coroutine", "command"])
def test_a_late_task_is_ended_also_if_the_supervisor_is_dead(queue: TaskQueue, in_memory: Path, kind: str) -> None:
    """By the kernel: a handler may hold the interpreter lock, which `re` does for some days here."""
    id = queue.put("x", timeout=2, attempts=2)  # the supervisor is dead by then

    def handle(task: Claim) -> None:
        note(in_memory / "pids", str(os.getpid()))
        re.match("(a+)+$", "a" * 60 + "b")

    async def handle_later(task: Claim) -> None:
        handle(task)

    script = f"echo $$ >> {in_memory}/pids; sleep 60 & wait"
    handler = {"function": handle, "coroutine": handle_later, "command": ["sh", "-c", script]}[kind]
    worker = Running(lambda: Worker(queue, handler))
    until(lambda: noted(in_memory / "pids"))
    worker.kill(signal.SIGKILL)
    worker.end()
    assert queue.get(id).state == "running"
    again = queue.claim(timeout=30)
    assert again is not None and again.token == 2
    until(lambda: not is_alive(int(noted(in_memory / "pids")[0])))
    again.complete()


def test_a_worker_of_a_path(jobs: Path) -> None:
    TaskQueue(jobs).put_all("ab")
    assert Worker(jobs, lambda task: None).run(drain=True).done == 2


def test_what_a_command_printed_before_it_failed(queue: TaskQueue) -> None:
    id = queue.put("x", attempts=1)
    Worker(queue, ["sh", "-c", "echo half; echo why >&2; exit 3"]).run(drain=True)
    task = queue.get(id)
    assert (task.state, task.output, task.error) == ("failed", "half", "sh ended with status 3: why")


def test_hooks_and_results_that_cannot_be_kept(queue: TaskQueue, in_memory: Path) -> None:
    good, bad, odd = queue.put("good"), queue.put("bad", attempts=1), queue.put("odd", attempts=1)

    def handle(task: Claim) -> object:
        if task.payload == "bad":
            raise ValueError("no")
        return object() if task.payload == "odd" else 1

    out = in_memory / "out"
    Worker(
        queue,
        handle,
        on_start=lambda task: note(out, f"start {task.payload}"),
        on_done=lambda task: note(out, f"done {task.payload}"),
        on_failed=lambda task, error: note(out, f"failed {task.payload} {type(error).__name__}"),
    ).run(drain=True)
    assert noted(out) == [
        "start good",
        "done good",
        "start bad",
        "failed bad ValueError",
        "start odd",
        "failed odd TypeError",
    ]
    assert [queue.get(id).state for id in (good, bad, odd)] == ["done", "failed", "failed"]


def test_an_observer_in_the_supervisor(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is woken by its descriptor: the look every half second is put off."""
    monkeypatch.setattr(supervisor, "_TICK", 600.0)
    reader, writer = os.pipe()
    heard, pids = [], set()

    class Observer:
        fds = (reader,)

        def look(self) -> None:
            pids.add(os.getpid())
            if select.select([reader], [], [], 0)[0]:
                heard.append(os.read(reader, 100))
                os.write(answered, b"!")

    asked, answered = os.pipe()

    def handle(task: Claim) -> int:
        os.write(writer, b"hello")
        return len(os.read(asked, 1))  # the supervisor was woken for it

    ids = [queue.put(number) for number in range(20)]
    Worker(queue, handle, observer=Observer()).run(drain=True)
    assert heard == [b"hello"] * 20 and pids == {os.getpid()} and all(queue.get(id).result for id in ids)
    for fd in (reader, writer, asked, answered):
        os.close(fd)


def test_what_is_printed_is_printed_once(jobs: Path) -> None:
    code = (
        "import sys; from holdfast.tasks import *; print('before')\n"
        "Worker(TaskQueue(sys.argv[1]), lambda task: print('task', task.payload), concurrency=2).run(drain=True)"
    )
    TaskQueue(jobs).put_all("abc")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", code, jobs], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    assert sorted(done.stdout.splitlines()) == ["before", "task a", "task b", "task c"]


def test_an_idle_worker_wakes(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event: the look every second is put off."""
    monkeypatch.setattr(idle, "RECHECK_S", 600.0)
    worker = Running(lambda: Worker(queue, lambda task: None, concurrency=2))
    for _ in range(21):
        queue.wait(queue.put("x"), timeout=30)
        until(lambda: all(state_of(pid) == "S" for pid in children_of(worker.pid)))
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_stopped_from_another_thread(queue: TaskQueue) -> None:
    worker = Worker(queue, lambda task: None)
    queue.put("x")
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(worker.run()))
    thread.start()
    until(lambda: queue.stats()["done"] == 1)
    worker.stop()
    thread.join(30)
    assert summaries and summaries[0].done == 1


def test_what_is_given_back_is_not_cancelled_by_others(queue: TaskQueue, jobs: Path, in_memory: Path) -> None:
    """Two workers; one of them is ended, and so are tasks that take too long. Nobody said cancel."""
    ids = [queue.put(number, attempts=20, timeout=0.4 if number % 2 else None) for number in range(8)]

    def handle(task: Claim) -> None:
        note(in_memory / "begun", str(task.payload))
        if task.token == 1:
            time.sleep(60 if task.payload % 2 else 0.3)

    workers = [Running(lambda: Worker(TaskQueue(jobs, retry_after=0.01), handle, concurrency=2)) for _ in range(2)]
    until(lambda: len(noted(in_memory / "begun")) >= 4)
    workers[0].ask_to_stop()
    workers[0].kill(signal.SIGTERM)
    assert workers[0].end() == 0
    assert {task.state for task in queue.wait(ids, timeout=30)} == {"done"}
    workers[1].kill(signal.SIGTERM)
    assert workers[1].end() == 0


def test_who_is_just_in_time_is_not_killed_at_the_next_task(queue: TaskQueue) -> None:
    for number in range(40):
        queue.put("timed", id=f"timed {number}", timeout=0.03, attempts=50)
        queue.put("innocent", id=f"innocent {number}", attempts=1)

    def handle(task: Claim) -> None:
        time.sleep(0.0295 if task.payload == "timed" else 0.005)

    Worker(queue, handle, concurrency=2).run(drain=True)
    for number in range(40):
        task = queue.get(f"innocent {number}")
        assert (task.state, task.tried) == ("done", 1)


def test_nobody_is_killed_for_what_it_does_not_do(
    queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a supervisor were late: its child has ended that task, and is at the next one."""
    id = queue.put("innocent", attempts=1)

    def handle(task: Claim) -> None:
        note(in_memory / "begun", "x")
        until((in_memory / "looked").exists)

    def late(worker: Worker) -> None:
        if noted(in_memory / "begun") and not (in_memory / "looked").exists():
            for child in list(worker._children.values()):
                worker._end(child, {"000000000000.another": Verdict("failed", "not done in time")})
            (in_memory / "looked").touch()

    monkeypatch.setattr(Worker, "_end_late", late)
    summary = Worker(queue, handle).run(drain=True)
    assert noted(in_memory / "begun") == ["x"] and queue.get(id).tried == 1
    assert (summary.done, summary.given_back, summary.deaths) == (1, 0, 0)


def test_only_a_cancellation_of_this_attempt_cancels_it(queue: TaskQueue) -> None:
    queue.put("x")
    claim = queue.claim()
    assert claim is not None
    for state, token, cancelled in (
        ("failed", 1, False),
        ("pending", 1, False),
        ("cancelled", 0, False),
        ("cancelled", 1, True),
    ):
        Verdict(state, "").write(queue._places, replace(claim.task, token=token))
        assert bool(queue.taker.cancelled(queue.taker.running())) is claim.cancelled is cancelled


def test_a_command_that_outlives_everybody_keeps_its_task(queue: TaskQueue, in_memory: Path) -> None:
    """Its worker is killed, supervisor and all. The task is begun again when the command has ended, not before."""
    id = queue.put("x")
    script = f"cd {in_memory}; echo start $PPID >> out; until [ -e go ]; do sleep 0.02; done; echo end >> out"
    worker = Running(lambda: Worker(queue, ["sh", "-c", script]))
    until(lambda: noted(in_memory / "out"))
    worker.kill(signal.SIGKILL)
    worker.end()
    child = int(noted(in_memory / "out")[0].split()[1])
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_alive(child))
    assert queue.claim() is None and queue.get(id).state == "running"
    (in_memory / "go").touch()
    again = queue.claim(timeout=30)
    assert again is not None and again.token == 2
    assert [line.split()[0] for line in noted(in_memory / "out")] == ["start", "end"]


def test_what_comes_back_from_a_handler_that_forks_takes_no_other_task(
    queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_BETWEEN_LOOKS", 60)  # else it is a matter of how long a fork takes
    queue.put_all(range(50))
    log = in_memory / "log"

    def handler(task: Claim) -> None:
        with open(log, "a") as file:
            file.write(f"{task.payload} {os.getpid()}\n")
        if task.payload == 10 and (pid := os.fork()):
            os.waitpid(pid, 0)  # what it does, it does before us

    assert Worker(queue, handler).run(drain=True).done == 50
    said = [line.split() for line in log.read_text().splitlines()]
    assert [number for number, _ in said] == [str(number) for number in range(50)]
    assert len({pid for _, pid in said}) == 1


@pytest.mark.parametrize("timeout", [30 * 86400.0, 8.9e9])
@pytest.mark.parametrize("threads", [False, True])
def test_a_very_long_timeout(queue: TaskQueue, timeout: float, threads: bool) -> None:
    async def coroutine(task: Claim) -> None:
        pass

    handlers: list[Any] = [["true"], lambda task: None, coroutine]
    for handler in handlers:
        id = queue.put("x", timeout=timeout, attempts=1)
        assert Worker(queue, handler, threads=threads).run(drain=True).done == 1, queue.get(id).error
    with pytest.raises(ValueError, match="timeout"):
        queue.put("x", timeout=9.5e9)


def test_a_handler_that_forks_or_closes_everything(queue: TaskQueue, in_memory: Path) -> None:
    ids = [queue.put(what, attempts=1, timeout=1) for what in ("fork and die", "close", "sleep")]
    ids.append(queue.put("good", attempts=1))

    def handle(task: Claim) -> None:
        if task.payload == "fork and die":
            if os.fork() == 0:
                time.sleep(60)
            os._exit(9)
        if task.payload == "close":
            os.closerange(3, 200)
        if task.payload == "sleep":
            time.sleep(60)

    Worker(queue, handle).run(drain=True)
    states = [queue.get(id).state for id in ids]
    assert states[0] == states[2] == "failed" and states[3] == "done"


def test_two_workers_in_one_process(jobs: Path) -> None:
    workers = [Worker(TaskQueue(jobs), lambda task: None) for _ in range(2)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    queue = TaskQueue(jobs)
    queue.wait(queue.put("x"), timeout=30)
    for worker, thread in zip(workers, threads, strict=True):
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("threads", [False, True])
def test_who_wants_to_exit_has_failed(queue: TaskQueue, threads: bool) -> None:
    bad = [queue.put("exit", attempts=1) for _ in range(6)]
    good = [queue.put("good") for _ in range(6)]

    def handle(task: Claim) -> None:
        if task.payload == "exit":
            sys.exit(3)

    def raises(task: Claim) -> None:
        raise ValueError("a hook")

    summary = Worker(queue, handle, concurrency=3, threads=threads, on_start=raises, on_done=raises).run(drain=True)
    assert (summary.done, summary.failed, summary.deaths) == (6, 6, 0)
    assert {queue.get(id).error for id in bad} == {"SystemExit: 3"}
    assert {queue.get(id).state for id in good} == {"done"}


def test_the_command_of_a_killed_process_is_ended_before_it_is_begun_again(queue: TaskQueue, in_memory: Path) -> None:
    id = queue.put("x")
    script = f'cd {in_memory}; echo "start $PPID" >> out; [ "$HOLDFAST_TASK_TOKEN" = 2 ] || sleep 60; echo end >> out'
    worker = Running(lambda: Worker(queue, ["sh", "-c", script]))
    until(lambda: noted(in_memory / "out"))
    os.kill(int(noted(in_memory / "out")[0].split()[1]), signal.SIGKILL)
    assert queue.wait(id, timeout=30)[0].tried == 2
    assert [line.split()[0] for line in noted(in_memory / "out")] == ["start", "start", "end"]
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_all_the_time(jobs: Path, in_memory: Path) -> None:
    """Eight processes, one of them killed every 200 ms: every task has its effect, none is completed twice."""
    total = 5000
    queue = TaskQueue(jobs, durable=False, retry_after=0.01)
    ids = [queue.put(number, attempts=50) for number in range(total)]
    out = in_memory / "out"

    def handle(task: Claim) -> None:
        time.sleep(0.008)
        note(out, str(task.payload))

    worker = Running(lambda: Worker(queue, handle, concurrency=8), drain=True)
    killed = 0
    while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
        time.sleep(0.2)
        try:
            alive = children_of(worker.pid)
        except OSError:
            break
        if alive:
            os.kill(alive[killed % len(alive)], signal.SIGKILL)
            killed += 1
    effects = Counter(noted(out))
    tasks = [queue.get(id) for id in ids]
    assert killed and all(task.state == "done" for task in tasks), Counter(task.state for task in tasks)
    assert set(effects) == {str(number) for number in range(total)}
    for task in tasks:
        assert [said.get("is") for said in task.history].count("done") == 1
        assert effects[str(task.payload)] <= task.tried


def test_the_clock_is_set_while_they_work(jobs: Path, in_memory: Path) -> None:
    """Two workers whose clocks differ by two hours, as libfaketime makes them."""
    library = next(unpacked("faketime", "libfaketime").glob("usr/lib/*/faketime/libfaketime.so.1"))
    queue = TaskQueue(jobs, durable=False)
    ids = [queue.put(number, delay=0.5 * (number % 2)) for number in range(40)]
    code = (
        "import sys; from holdfast.tasks import *\n"
        "def handle(task): open(sys.argv[2], 'a').write(f'{task.payload}\\n')\n"
        "Worker(TaskQueue(sys.argv[1]), handle).run(drain=True)"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, jobs, in_memory / "out"], env={**environment, "FAKETIME": f"{step}h"}
        )
        for step in ("+1", "-1")
    ]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert [queue.get(id).state for id in ids] == ["done"] * 40
    assert Counter(noted(in_memory / "out")) == Counter(map(str, range(40)))


@pytest.mark.parametrize("threads", [False, True])
def test_the_disk_is_full_for_a_while(
    threads: bool, queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever works goes on when there is room again; however often it was refused."""
    flag = in_memory / "full"
    flag.write_text("")
    real = system.pwrite

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if flag.exists() and b'"is": ' in data:
            note(in_memory / "refused", str(os.getpid()))
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    ids = queue.put_all(range(3))
    monkeypatch.setattr(system, "pwrite", pwrite)
    worker = Running(lambda: Worker(queue, lambda task: None, concurrency=2, threads=threads))
    until(lambda: len(noted(in_memory / "refused")) > (4 if threads else 10))
    assert (len(set(noted(in_memory / "refused"))) == 1) == threads, "a thread tries again, and the others go on"
    flag.unlink()
    assert [task.state for task in queue.wait(ids, timeout=30)] == ["done"] * 3
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_idle_children_are_killed_while_one_works(queue: TaskQueue, in_memory: Path) -> None:
    """That is no reason for a worker to give up."""
    queue.put("x", id="x")
    gate = in_memory / "gate"

    def handle(task: Claim) -> None:
        note(in_memory / "out", str(os.getpid()))
        until(gate.exists)

    worker = Running(lambda: Worker(queue, handle, concurrency=2))
    until(lambda: noted(in_memory / "out"))
    known = {int(noted(in_memory / "out")[0])}
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")

    def new_ones() -> set[int]:
        return set(map(int, children.read_text().split())) - known

    while len(known) < 10:
        until(new_ones)
        for pid in new_ones():
            known.add(pid)
            os.kill(pid, signal.SIGKILL)
    gate.write_text("")
    assert queue.wait("x", timeout=30)[0].tried == 1
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_children_cannot_begin_while_one_works(
    queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What works is not given up for that."""
    queue.put("x", id="x")
    gate, reopened = in_memory / "gate", TaskQueue.reopened

    def handle(task: Claim) -> None:
        note(in_memory / "out", "began")
        until(gate.exists)

    def fails_later(queue: TaskQueue) -> TaskQueue:
        if (in_memory / "out").exists():
            note(in_memory / "failed", "once")
            raise PermissionError(errno.EACCES, "Permission denied", queue.path)
        return reopened(queue)

    monkeypatch.setattr(TaskQueue, "reopened", fails_later)
    worker = Running(lambda: Worker(queue, handle, concurrency=2))
    until(lambda: noted(in_memory / "out"))
    for pid in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split():
        if f"{pid}@" not in str(queue.get("x").worker):
            os.kill(int(pid), signal.SIGKILL)
    until(lambda: len(noted(in_memory / "failed")) > 9)
    gate.write_text("")
    assert queue.wait("x", timeout=30)[0].tried == 1
    worker.kill(signal.SIGTERM)
    worker.end()


def test_a_command_that_takes_a_moment_to_die_is_waited_for(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the task locked, too: its worker is dead before it is."""
    queue.put("x", id="x")
    claim = queue.claim()
    assert claim is not None
    queue.taker.say_how_it_ends(claim.place, queue.get("x"), Verdict("pending", "its worker was ended"))
    monkeypatch.setattr(taking, "sleep", lambda seconds: claim.abandon())
    assert queue.taker.settle_place(claim.place, time.monotonic() + 20)
    assert queue.get("x").state == "pending" and queue.get("x").error == "its worker was ended"


def test_a_handler_that_says_itself_how_it_ends(queue: TaskQueue, caplog: pytest.LogCaptureFixture) -> None:
    ends = {
        "complete": lambda task: task.complete("mine"),
        "fail": lambda task: task.fail("no", delay=100),
        "last": lambda task: task.fail("no"),
        "back": lambda task: task.give_back() if task.token == 1 else None,
    }
    for name in ends:
        queue.put(name, id=name, attempts=1 if name == "last" else 3)
    worker = Worker(queue, lambda task: ends[task.payload](task))
    threading.Timer(1.0, worker.stop).start()
    summary = worker.run()
    assert (summary.done, summary.failed, summary.retried, summary.given_back) == (2, 1, 1, 1), summary
    assert queue.get("complete").result == "mine" and queue.get("back").state == "done"
    assert "has ended for this worker" not in caplog.text


def test_what_is_no_handler(queue: TaskQueue) -> None:
    for wrong in (5, "echo {}", None):
        with pytest.raises(TypeError, match="a handler is"):
            Worker(queue, wrong)  # type: ignore[arg-type]


def test_a_claim_that_has_ended_says_so(queue: TaskQueue) -> None:
    queue.put("x")
    queue.put("y", id="y")
    for _ in range(2):
        claim = queue.claim()
        assert claim is not None
        claim.complete()
        for call in (claim.check, lambda claim=claim: claim.progress(1, 2)):
            with pytest.raises(NotLocked, match="has ended"):
                call()
