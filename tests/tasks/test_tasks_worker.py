"""`Worker`: what happens to tasks, and to the processes that run them."""

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import servers
from support import Child, in_child, is_alive, processor_ticks, state_of, unpacked, until, until_asleep

from holdfast import Lock, NotLocked
from holdfast.tasks import Claim, TaskQueue, Worker, WorkerFailed, child, sqlite, supervised
from holdfast.tasks import worker as supervisor
from holdfast.tasks.handler import Command
from holdfast.tasks.sqlite import SqliteStore


@pytest.fixture
def queue(jobs: Path) -> TaskQueue:
    return TaskQueue(jobs, durable=False, retry_after=0.01)


@pytest.fixture(params=["sqlite", "postgres"])
def each_queue(request: pytest.FixtureRequest, jobs: Path) -> Iterator[TaskQueue]:
    """A queue on each engine."""
    where = jobs if request.param == "sqlite" else request.getfixturevalue("postgres")
    queue = TaskQueue(where, durable=False, retry_after=0.01)
    yield queue
    queue.close()


def note(place: Path, text: str) -> None:
    """An effect that others can see, and that cannot be half there."""
    with Lock(f"{place}.lock"), open(place, "a") as file:
        file.write(text + "\n")


def noted(place: Path) -> list[str]:
    return place.read_text().splitlines() if place.exists() else []


class Running(Child):
    """A worker in a process of its own."""

    def __init__(self, worker: Callable[[], Worker], *, drain: bool = False) -> None:
        super().__init__(lambda say: self._work(worker(), drain, say))

    @staticmethod
    def _work(worker: Worker, drain: bool, say: Callable[[str], None]) -> None:
        stop_children = worker._stop_children

        def stop() -> None:
            is_first = not worker.is_ending
            stop_children()
            if is_first:
                say("told its children to stop")

        worker._stop_children = stop  # type: ignore[method-assign]
        worker.run(drain=drain)

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and wait until the children were told."""
        self.kill(signal.SIGTERM)
        assert os.read(self._readable, 100)

    def end(self) -> int:  # type: ignore[override]
        """Its exit code. Not what it said: its own children may live on."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._readable)
        return code


@pytest.mark.parametrize("threads", [False, True])
def test_every_task_runs_once(each_queue: TaskQueue, in_memory: Path, threads: bool) -> None:
    queue = each_queue
    ids = [queue.put(number) for number in range(200)]

    def handle(task: Claim) -> int:
        note(in_memory / "out", str(task.payload))
        return task.payload * 2

    summary = Worker(queue, handle, concurrency=4, threads=threads).run(drain=True)
    assert (summary.done, summary.failed, summary.deaths) == (200, 0, 0)
    assert sorted(map(int, noted(in_memory / "out"))) == list(range(200))
    assert [queue.get(id).result for id in ids] == [number * 2 for number in range(200)]


def test_a_coroutine_handler_runs_tasks_and_is_timed_out(queue: TaskQueue) -> None:
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


def test_an_error_that_cannot_be_printed_or_stored_is_a_failed_attempt(each_queue: TaskQueue) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def handle(task: Claim) -> None:
        if task.payload == "command":
            Command(["sh", "-c", r"printf 'a\0b'; exit 1"])(task)
        raise ValueError("a\0b \ud800") if task.payload == "text" else Unprintable

    queue = each_queue
    ids = [queue.put(kind, attempts=1) for kind in ("text", "error", "command")]
    assert Worker(queue, handle).run(drain=True).deaths == 0
    text, error, command = map(queue.get, ids)
    assert text.error == r"ValueError: a\x00b \ud800" and (text.traceback or "").endswith(text.error + "\n")
    assert "Unprintable" in str(error.error) and command.output == r"a\x00b"


def test_a_command_runs_once_for_each_task(queue: TaskQueue) -> None:
    good = queue.put("hello world")
    thing = queue.put({"n": 1})
    bad = queue.put("exit 3", attempts=1)
    script = 'case "$1" in exit*) echo broken >&2; exit 3;; esac; echo "$HOLDFAST_TASK_ID got $1"'
    summary = Worker(queue, ["sh", "-c", script, "-", "{}"], concurrency=2).run(drain=True)
    assert (summary.done, summary.failed) == (2, 1)
    assert queue.get(good).result == f"{good} got hello world"
    assert queue.get(thing).result == f'{thing} got {{"n": 1}}'
    assert queue.get(bad).error == "sh ended with status 3: broken"


def test_a_late_command_is_killed_with_all_that_it_started(queue: TaskQueue, in_memory: Path) -> None:
    id = queue.put("x", timeout=0.3, attempts=1)
    pids = in_memory / "pids"
    Worker(queue, ["sh", "-c", f"echo $$ >> {pids}; sleep 600 & echo $! >> {pids}; wait"]).run(drain=True)
    assert queue.get(id).state == "failed" and queue.get(id).error == "not done within 0.3 s"
    for pid in map(int, noted(pids)):
        until(lambda pid=pid: not is_alive(pid))


@pytest.mark.parametrize("threads", [False, True])
def test_a_handler_that_never_returns_is_killed(each_queue: TaskQueue, in_memory: Path, threads: bool) -> None:
    """Also one that holds the interpreter lock. With threads, the others are given back and done."""
    queue = each_queue
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


def test_a_late_task_has_failed_also_if_the_transaction_that_ends_it_is_repeated(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL repeats a transaction after a deadlock or a lost connection. Then the child is already dead."""

    class Lost(Exception):
        pass

    def end_twice(self: SqliteStore, workers: Any, choose: Any) -> Any:
        def lost(attempts: Any) -> Any:
            choose(attempts)
            raise Lost

        with suppress(Lost):
            end(self, workers, lost)
        return end(self, workers, choose)

    end = SqliteStore.end
    monkeypatch.setattr(SqliteStore, "end", end_twice)
    id = queue.put("x", timeout=0.2, attempts=1)
    summary = Worker(queue, lambda task: time.sleep(60)).run(drain=True)
    assert queue.get(id).error == "not done within 0.2 s" and (summary.failed, summary.deaths) == (1, 0)


def test_cancel_kills_a_running_task(each_queue: TaskQueue, in_memory: Path) -> None:
    queue = each_queue
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


def test_sigterm_lets_running_tasks_finish(queue: TaskQueue, in_memory: Path) -> None:
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


def test_a_second_sigterm_gives_running_tasks_back(each_queue: TaskQueue, in_memory: Path) -> None:
    queue = each_queue
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
    assert task.state == "pending" and task.tried == 0 and task.error is None


@pytest.mark.parametrize("late", ["message", "death"])
def test_tasks_are_given_back_on_a_slow_machine(
    each_queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The supervisor reads the first message of a child only when it kills it, or does not see the child die."""
    queue = each_queue
    id = queue.put("x", attempts=1)
    if late == "message":
        monkeypatch.setattr(supervised.Child, "fds", property(lambda child: [child._death.fd]))
    else:
        monkeypatch.setattr(supervised, "_SIGNAL_WAIT_S", 0.0)

    def handle(task: Claim) -> None:
        note(in_memory / "begun", "x")
        time.sleep(60)

    worker = Running(lambda: Worker(queue, handle))
    until(lambda: noted(in_memory / "begun"))
    worker.ask_to_stop()
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0
    task = queue.get(id)
    assert task.state == "pending" and task.tried == 0 and task.error is None


def test_a_killed_child_is_replaced_at_once(queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event: the periodic looks of the supervisor and of idle workers are disabled."""
    monkeypatch.setattr(supervisor, "_TICK_S", 600.0)
    monkeypatch.setattr(sqlite, "RECHECK_S", 600.0)

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
def test_a_task_that_always_kills_its_process_fails(each_queue: TaskQueue, status: int, concurrency: int) -> None:
    queue = each_queue
    poison, other = queue.put("poison", attempts=3), queue.put("other")

    def handle(task: Claim) -> None:
        if task.payload == "poison":
            os._exit(status)

    summary = Worker(queue, handle, concurrency=concurrency).run(drain=True)
    assert queue.get(other).state == "done" and summary.deaths == 3
    assert (summary.done, summary.retried, summary.failed) == (1, 2, 1)
    assert queue.get(poison).state == "failed" and "the worker died" in queue.get(poison).error


def test_the_task_of_a_dead_worker_counts_as_failed(queue: TaskQueue) -> None:
    queue.put("x", attempts=1)
    Child(lambda _: os._exit(queue.claim() is None)).end()
    summary = Worker(queue, lambda task: None).run(drain=True)
    assert (summary.done, summary.failed, summary.deaths) == (0, 1, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_run_raises_if_the_queue_cannot_be_written(queue: TaskQueue, in_memory: Path) -> None:
    in_memory.chmod(0o755)

    def work() -> object:
        os.setuid(65534)
        return Worker(queue, lambda task: None).run()

    assert in_child(work) == "PermissionError"


def test_children_finish_if_the_supervisor_is_killed(queue: TaskQueue, in_memory: Path) -> None:
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
def test_a_late_task_ends_even_if_the_supervisor_is_dead(queue: TaskQueue, in_memory: Path, kind: str) -> None:
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


def test_a_worker_opens_a_queue_by_its_path(jobs: Path) -> None:
    TaskQueue(jobs).put_all("ab")
    assert Worker(jobs, lambda task: None).run(drain=True).done == 2


def test_a_failed_command_keeps_its_output(queue: TaskQueue) -> None:
    id = queue.put("x", attempts=1)
    Worker(queue, ["sh", "-c", "echo half; echo why >&2; exit 3"]).run(drain=True)
    task = queue.get(id)
    assert (task.state, task.output, task.error) == ("failed", "half", "sh ended with status 3: why")


def test_hooks_are_called_and_a_result_that_json_cannot_express_is_a_failure(queue: TaskQueue, in_memory: Path) -> None:
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


def test_an_observer_is_called_in_the_supervisor(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is woken by its descriptor: the look every half second is put off."""
    monkeypatch.setattr(supervisor, "_TICK_S", 600.0)
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


def test_buffered_output_is_printed_once(jobs: Path) -> None:
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


def test_a_put_wakes_an_idle_worker(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event: the look every second is put off."""
    monkeypatch.setattr(sqlite, "RECHECK_S", 600.0)
    worker = Running(lambda: Worker(queue, lambda task: None, concurrency=2))
    for _ in range(21):
        queue.wait(queue.put("x"), timeout=30)
        until(lambda: all(state_of(pid) == "S" for pid in children_of(worker.pid)))
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_stop_ends_a_worker_from_another_thread(queue: TaskQueue) -> None:
    worker = Worker(queue, lambda task: None)
    queue.put("x")
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(worker.run()))
    thread.start()
    until(lambda: queue.stats()["done"] == 1)
    worker.stop()
    thread.join(30)
    assert summaries and summaries[0].done == 1


def test_a_task_that_was_given_back_is_done_by_another_worker(queue: TaskQueue, jobs: Path, in_memory: Path) -> None:
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


def test_a_child_that_was_just_in_time_is_not_killed_at_its_next_task(jobs: Path) -> None:
    # On a busy machine a task may be late many times. The pauses between its attempts stay short.
    queue = TaskQueue(jobs, durable=False, retry_after=0.01, max_retry_after=0.01)
    for number in range(40):
        queue.put("timed", id=f"timed {number}", timeout=0.03, attempts=50)
        queue.put("innocent", id=f"innocent {number}", attempts=1)

    def handle(task: Claim) -> None:
        time.sleep(0.0295 if task.payload == "timed" else 0.005)

    Worker(queue, handle, concurrency=2).run(drain=True)
    for number in range(40):
        task = queue.get(f"innocent {number}")
        assert (task.state, task.tried) == ("done", 1)


def test_a_command_that_outlives_its_worker_keeps_its_task(queue: TaskQueue, in_memory: Path) -> None:
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


def test_a_process_forked_by_the_handler_claims_no_task(
    queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_CHECK_STOP_S", 60)  # else it is a matter of how long a fork takes
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
def test_a_timeout_of_centuries_is_accepted(queue: TaskQueue, timeout: float, threads: bool) -> None:
    async def coroutine(task: Claim) -> None:
        pass

    handlers: list[Any] = [["true"], lambda task: None, coroutine]
    for handler in handlers:
        id = queue.put("x", timeout=timeout, attempts=1)
        assert Worker(queue, handler, threads=threads).run(drain=True).done == 1, queue.get(id).error
    with pytest.raises(ValueError, match="timeout"):
        queue.put("x", timeout=9.5e9)


def test_a_handler_that_forks_or_closes_all_descriptors_loses_no_other_task(queue: TaskQueue) -> None:
    ids = [queue.put(what, attempts=1) for what in ("fork and die", "close")]
    ids += [queue.put("sleep", attempts=1, timeout=1), queue.put("good", attempts=1)]

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
    assert states == ["failed", "failed", "failed", "done"]
    assert queue.get(ids[1]).error == "the worker died"


def test_two_workers_run_in_one_process(jobs: Path) -> None:
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
def test_a_handler_that_calls_exit_has_failed(queue: TaskQueue, threads: bool) -> None:
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


def test_the_command_of_a_killed_child_is_killed_before_the_next_attempt(queue: TaskQueue, in_memory: Path) -> None:
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


def test_workers_whose_clocks_differ_run_every_task_once(jobs: Path, in_memory: Path) -> None:
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


def test_killing_idle_children_does_not_stop_a_worker(queue: TaskQueue, in_memory: Path) -> None:
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


def test_a_handler_may_settle_its_task_itself(queue: TaskQueue, caplog: pytest.LogCaptureFixture) -> None:
    ends = {
        "complete": lambda task: task.complete("mine"),
        "fail": lambda task: task.fail("no", delay=100),
        "last": lambda task: task.fail("no"),
        "back": lambda task: task.give_back() if task.token == 1 else None,
    }
    for name in ends:
        queue.put(name, id=name, attempts=1 if name == "last" else 3)
    worker = Worker(queue, lambda task: ends[task.payload](task))
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(worker.run()))
    thread.start()
    wanted = {"complete": "done", "fail": "pending", "last": "failed", "back": "done"}
    until(lambda: {name: queue.get(name).state for name in ends} == wanted and queue.get("fail").tried == 1)
    worker.stop()
    thread.join(30)
    (summary,) = summaries
    assert (summary.done, summary.failed, summary.retried, summary.given_back) == (2, 1, 1, 1), summary
    assert queue.get("complete").result == "mine" and queue.get("back").state == "done"
    assert "has ended for this worker" not in caplog.text


def test_wrong_handlers_are_refused(queue: TaskQueue) -> None:
    for wrong in (5, "echo {}", None, [], ["echo", 5]):
        with pytest.raises(TypeError, match="a handler is"):
            Worker(queue, wrong)  # type: ignore[arg-type]


def test_a_settled_claim_raises_notlocked(queue: TaskQueue) -> None:
    queue.put("x")
    queue.put("y", id="y")
    for _ in range(2):
        claim = queue.claim()
        assert claim is not None
        claim.complete()
        for call in (claim.check, lambda claim=claim: claim.progress(1, 2)):
            with pytest.raises(NotLocked, match="has ended"):
                call()


class LateSupervisor(Worker):
    """It believes once that its child runs a task that it does not run, and is late."""

    flag: Path

    def _look_after_tasks(self) -> None:
        if self.flag.exists():
            self.flag.unlink()
            for one in self._children:
                one._deadlines["another", 1] = 0.0
        super()._look_after_tasks()
        if all(not one._deadlines for one in self._children):
            self.flag.with_suffix(".looked").touch()


def test_a_child_is_not_killed_for_a_task_that_it_has_ended(queue: TaskQueue, in_memory: Path) -> None:
    id = queue.put("innocent", attempts=1)

    def handle(task: Claim) -> None:
        (in_memory / "flag").touch()
        note(in_memory / "begun", "x")
        until(lambda: not (in_memory / "flag").exists() and (in_memory / "flag.looked").exists())

    worker = LateSupervisor(queue, handle)
    worker.flag = in_memory / "flag"
    summary = worker.run(drain=True)
    assert noted(in_memory / "begun") == ["x"] and queue.get(id).tried == 1
    assert (summary.done, summary.given_back, summary.deaths) == (1, 0, 0)


def test_run_raises_if_no_child_can_begin_a_task(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_claimer(queue: TaskQueue) -> Any:
        if os.getpid() == me:
            return real(queue)
        raise PermissionError(13, "Permission denied", queue.path)

    me, real = os.getpid(), TaskQueue.new_claimer
    queue.put("x")
    monkeypatch.setattr(TaskQueue, "new_claimer", new_claimer)
    with pytest.raises(WorkerFailed):
        Worker(queue, lambda task: None).run()


def test_a_running_task_ends_although_new_children_cannot_begin(
    queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.put("x", id="x")
    gate, real = in_memory / "gate", TaskQueue.new_claimer

    def handle(task: Claim) -> None:
        note(in_memory / "out", "began")
        until(gate.exists)

    def fails_later(queue: TaskQueue) -> Any:
        if (in_memory / "out").exists():
            note(in_memory / "failed", "once")
            raise PermissionError(errno.EACCES, "Permission denied", queue.path)
        return real(queue)

    monkeypatch.setattr(TaskQueue, "new_claimer", fails_later)
    worker = Running(lambda: Worker(queue, handle, concurrency=2))
    until(lambda: noted(in_memory / "out"))
    for pid in children_of(worker.pid):
        if f"{pid}@" not in str(queue.get("x").worker):
            os.kill(pid, signal.SIGKILL)
    until(lambda: len(noted(in_memory / "failed")) > 9)
    gate.write_text("")
    assert queue.wait("x", timeout=30)[0].tried == 1
    worker.kill(signal.SIGTERM)
    worker.end()


@pytest.mark.parametrize("kind", ["process", "threads", "loop"])
def test_workers_go_on_after_the_disk_was_full(
    kind: str, queue: TaskQueue, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that could not be settled are settled later. They do not run again."""
    flag, real = in_memory / "full", SqliteStore.transact
    monkeypatch.setattr(child, "FULL_PAUSE_S", 0.01)

    def transact(store: SqliteStore, work: Any, **options: Any) -> Any:
        if flag.exists():
            note(in_memory / "refused", str(os.getpid()))
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(store, work, **options)

    def handle(task: Claim) -> None:
        flag.touch()
        note(in_memory / "ran", str(task.payload))

    async def ahandle(task: Claim) -> None:
        handle(task)

    monkeypatch.setattr(SqliteStore, "transact", transact)
    worker = Running(
        lambda: Worker(queue, ahandle if kind == "loop" else handle, concurrency=2, threads=kind == "threads")
    )
    ids = queue.put_all(range(3))
    until(lambda: len(noted(in_memory / "refused")) > 10)
    while queue.stats()["done"] < 3:
        flag.unlink(missing_ok=True)
        time.sleep(0.01)
    assert [task.tried for task in queue.wait(ids, timeout=30)] == [1, 1, 1]
    assert sorted(noted(in_memory / "ran")) == ["0", "1", "2"]
    flag.unlink(missing_ok=True)
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


@pytest.mark.parametrize("total", [800, pytest.param(5000, marks=pytest.mark.slow)])
def test_killing_children_loses_and_doubles_no_task(each_queue: TaskQueue, in_memory: Path, total: int) -> None:
    """Eight processes: every task is done, and none is completed twice."""
    queue = each_queue
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
        with suppress(ProcessLookupError, ZeroDivisionError):  # it has ended meanwhile, or there is none
            os.kill(alive[killed % len(alive)], signal.SIGKILL)
            killed += 1
    effects = Counter(noted(out))
    tasks = [queue.get(id) for id in ids]
    assert killed and all(task.state == "done" for task in tasks), Counter(task.state for task in tasks)
    assert set(effects) == {str(number) for number in range(total)}
    assert queue.stats()["running"] == 0
    for task in tasks:
        assert not [past for past in task.history if past["state"] == "done"]
        assert effects[str(task.payload)] <= task.token


def test_a_server_is_restarted_while_a_worker_runs(
    postgres: str, postgres_server: servers.Postgres, in_memory: Path
) -> None:
    """Four processes: every task is done. Only tasks whose end was not written yet are done again."""
    queue = TaskQueue(postgres, retry_after=0.01)
    ids = queue.put_all(range(1500), attempts=50)
    out = in_memory / "out"

    def handle(task: Claim) -> None:
        time.sleep(0.002)
        note(out, str(task.payload))

    worker = Running(lambda: Worker(queue, handle, concurrency=4), drain=True)
    for share in (1, 2, 3):
        until(lambda share=share: len(noted(out)) > share * 300)
        postgres_server.kill()
        postgres_server.restart()
    assert worker.end() == 0
    effects = Counter(noted(out))
    assert set(effects) == {str(number) for number in range(1500)}
    for id in ids:
        task = queue.get(id)
        assert task.state == "done" and effects[str(task.payload)] <= task.token
    queue.close()


def test_a_late_command_keeps_what_it_printed(queue: TaskQueue) -> None:
    id = queue.put("x", timeout=3, attempts=1)  # long enough for a busy machine to start the shell
    summary = Worker(queue, ["sh", "-c", "echo half; echo why >&2; sleep 600"]).run(drain=True)
    task = queue.get(id)
    assert (task.output, task.error) == ("half", "not done within 3 s: why")
    assert summary.deaths == 0 and summary.failed == 1


def test_the_output_of_a_command_is_bounded(queue: TaskQueue, in_memory: Path) -> None:
    """Its last 64 KiB are kept. The memory of the worker does not grow with what the command prints."""
    peaks = in_memory / "peaks"

    def note_peak(task: Claim, *_: object) -> None:
        note(peaks, next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))

    script = (
        "set -- $1; yes 0123456789abcde | head -c $1; yes broken | head -c $1 >&2; echo end; echo over >&2; exit $2"
    )
    small = queue.put("1600 0")
    large = queue.put(f"{1 << 28} 0")
    bad = queue.put(f"{7 << 25} 3", attempts=1)
    late = queue.put(f"{1 << 40} 0", attempts=1, timeout=3)
    Worker(queue, ["sh", "-c", script, "-", "{}"], on_done=note_peak, on_failed=note_peak).run(drain=True)
    assert queue.get(small).result.endswith("\nend")
    assert len(queue.get(large).result) == (1 << 16) - 1 and queue.get(large).result.endswith("\nend")
    assert queue.get(bad).error.endswith("broken\nover") and len(queue.get(bad).error) < (1 << 16) + 100
    assert queue.get(bad).output.endswith("end")
    assert queue.get(late).error == "not done within 3 s" and queue.get(late).output.startswith("01")
    first, *others = [int(line.split()[1]) for line in noted(peaks)]
    assert max(others) < first + 8000, "kilobytes"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_command_that_prints_ten_gigabytes_has_failed_once(queue: TaskQueue, in_memory: Path) -> None:
    id, other = queue.put("x", attempts=1), queue.put("other")
    peaks = in_memory / "peaks"

    def note_peak(*_: object) -> None:
        note(peaks, next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))  # noqa: SIM115

    script = 'if [ "$1" = x ]; then head -c 10G /dev/zero; exit 3; fi'
    hooks = {"on_start": note_peak, "on_done": note_peak, "on_failed": note_peak}
    summary = Worker(queue, ["sh", "-c", script, "-", "{}"], **hooks).run(drain=True)
    assert (summary.failed, summary.done, summary.deaths) == (1, 1, 0)
    task = queue.get(id)
    assert task.error.startswith("sh ended with status 3") and task.output == r"\x00" * (1 << 16)
    assert queue.get(other).state == "done"
    before, after, *_ = map(int, noted(peaks))
    assert after < before + 8000, "kilobytes"


def test_a_handler_that_runs_out_of_memory_has_failed(queue: TaskQueue) -> None:
    bad, good = queue.put("bad", attempts=1), queue.put("good", attempts=1)

    def handle(task: Claim) -> None:
        import resource

        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
        kept = []
        while task.payload == "bad":
            kept.append(bytearray(1 << 20))

    summary = Worker(queue, handle).run(drain=True)
    assert (queue.get(bad).state, queue.get(bad).error) == ("failed", "MemoryError")
    assert queue.get(good).state == "done" and (summary.done, summary.failed) == (1, 1)


def test_workers_wait_while_the_queue_is_paused(queue: TaskQueue) -> None:
    queue.pause()
    worker = Running(lambda: Worker(queue, lambda task: None, concurrency=2), drain=True)
    id = queue.put("x")
    until(lambda: len(children_of(worker.pid)) == 2)
    until_asleep(children_of(worker.pid))
    assert queue.get(id).state == "pending"
    queue.resume()
    assert worker.end() == 0 and queue.get(id).state == "done"


def test_drain_waits_for_delayed_tasks(queue: TaskQueue) -> None:
    queue.put("later", delay=0.3)
    assert Worker(queue, lambda task: None, concurrency=2).run(drain=True).done == 1


def test_drain_ends_when_another_worker_has_done_the_last_task(queue: TaskQueue, in_memory: Path) -> None:
    queue.put("x")
    claim = queue.claim()
    assert claim is not None
    worker = Running(lambda: Worker(queue, lambda task: None), drain=True)
    until(lambda: children_of(worker.pid))
    claim.complete()
    queue.stats()  # writes it
    assert worker.end() == 0


def test_an_idle_worker_sleeps(queue: TaskQueue, in_memory: Path) -> None:
    """Its children are woken once a second, and its supervisor twice."""
    worker = Running(lambda: Worker(queue, lambda task: None, concurrency=2))
    queue.wait(queue.put("x"), timeout=30)
    idle = "select count(*) from idle"
    until(lambda: queue.store.read(lambda run: run(idle).fetchone()[0]) == 2)  # type: ignore[attr-defined]
    pids = [worker.pid, *children_of(worker.pid)]

    def is_quiet() -> bool:
        before = [processor_ticks(pid) for pid in pids]
        time.sleep(2)
        return sum(processor_ticks(pid) for pid in pids) - sum(before) <= 6  # 3 percent of one processor

    until(is_quiet)  # on a busy machine the same work takes more time of a processor
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_a_worker_prunes_old_tasks(jobs: Path) -> None:
    queue = TaskQueue(jobs, keep=0.001)
    ids = queue.put_all(range(3))
    worker = Running(lambda: Worker(queue, lambda task: None))
    until(lambda: ids[0] not in queue and ids[1] not in queue)
    assert ids[2] in queue  # the newest task stays
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_a_worker_adds_scheduled_tasks(queue: TaskQueue) -> None:
    worker = Running(lambda: Worker(queue, lambda task: None))
    queue.schedule("often", every=1)
    until(lambda: queue.stats()["done"] >= 2)
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0


def test_a_wrong_start_method_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(ValueError, match="'fork' or 'spawn', not 'forkserver'"):
        Worker(queue, print, start="forkserver")
    with pytest.raises(TypeError, match="pickled"):
        Worker(queue, lambda task: None, start="spawn")
    with pytest.raises(TypeError, match="pickled"):
        Worker(queue, print, on_done=lambda task: None, start="spawn")


SPAWNED = """
import os, sys, time
from holdfast.tasks import TaskQueue, Worker

queue = TaskQueue(sys.argv[1], retry_after=0.01)
started = os.getpid()  # another number in each child: the module is imported again

@queue.task(attempts=1, timeout=1)
def slow(seconds):
    time.sleep(seconds)
    return os.getpid() == started

@queue.task
async def shout(text):
    return text.upper()

def handle(task):
    if task.payload == "die" and sys.argv[2] == "process" and task.tried == 1:
        os._exit(9)
    return os.getpid() == started

def note(task):
    with open(sys.argv[1] + ".done", "a") as file:
        file.write(task.id + "\\n")

if __name__ == "__main__":
    if sys.argv[2] == "process":
        del queue.functions[shout.name]
    else:
        shout.options(id="shout").put("a")
    queue.put("x", id="x")
    queue.put("die", id="die")
    slow.options(id="quick", attempts=9).put(0)
    slow.options(id="slow").put(600)
    print(Worker(queue, handle, concurrency=2, start="spawn", on_done=note).run(drain=True))
"""


@pytest.mark.parametrize("kind", ["process", "loop"])
def test_spawned_children_run_tasks_and_are_replaced(jobs: Path, in_memory: Path, kind: str) -> None:
    (in_memory / "app.py").write_text(SPAWNED)
    command = [sys.executable, in_memory / "app.py", jobs, kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=100)
    queue = TaskQueue(jobs)
    assert [queue.get(id).result for id in ("x", "die", "quick")] == [True, True, True]
    assert queue.get("slow").error == "not done within 1 s"
    assert kind == "process" or queue.get("shout").result == "A"
    assert kind == "loop" or "done=3, failed=1, retried=1, given_back=0, cancelled=0, deaths=1" in done.stdout
    assert set(noted(Path(f"{jobs}.done"))) == {"x", "die", "quick"} | ({"shout"} if kind == "loop" else set())
