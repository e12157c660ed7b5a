"""`@queue.task`: a worker runs registered functions, and tasks without a function with its handler."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from subprocess import check_call, check_output
from typing import Any

import pytest
from support import Child, until

from holdfast import Lock
from holdfast.tasks import Claim, TaskQueue, Worker

MODES: list[dict[str, Any]] = [{}, {"threads": True}]


@pytest.fixture
def queue(jobs: Path) -> TaskQueue:
    return TaskQueue(jobs, durable=False, retry_after=0.01)


@pytest.mark.parametrize("options", MODES, ids=["process", "threads"])
def test_a_worker_runs_registered_functions(queue: TaskQueue, options: dict[str, Any]) -> None:
    @queue.task
    def add(one: int, other: int = 0) -> int:
        return one + other

    @queue.task(attempts=1)
    def fail() -> None:
        raise ValueError("no")

    ids = [add.put(1, other=number) for number in range(5)]
    bad = fail.put()
    assert add(1, 2) == 3
    summary = Worker(queue, concurrency=2, **options).run(drain=True)
    assert (summary.done, summary.failed) == (5, 1)
    assert [queue.get(id).result for id in ids] == [1, 2, 3, 4, 5]
    assert queue.get(bad).error == "ValueError: no"


PROGRAM = """
from holdfast.tasks import TaskQueue

queue = TaskQueue("jobs")

@queue.task
def double(number):
    return 2 * number

if __name__ == "__main__":
    print(double.put(4))
"""


@pytest.mark.parametrize("words", [("program.py",), ("-m", "program")], ids=["file", "module"])
def test_a_program_puts_calls_for_workers_that_import_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Its functions are in the module __main__ there, and in the module `program` here."""
    (tmp_path / "program.py").write_text(PROGRAM)
    id = check_output([sys.executable, *words], cwd=tmp_path, text=True).strip()
    check_call([sys.executable, "-m", "holdfast", "tasks", "work", "--app", "program:queue", "--drain"], cwd=tmp_path)
    assert TaskQueue(tmp_path / "jobs").get(id).result == 8


def test_a_registered_function_can_be_scheduled(queue: TaskQueue) -> None:
    @queue.task(attempts=1)
    def count() -> int:
        return 7

    queue.schedule("count", count, every=1)
    until(lambda: queue.put_scheduled() and not queue.is_empty())
    Worker(queue).run(drain=True)
    task = next(iter(queue))
    assert (task.result, task.attempts, task.id.partition("@")[0]) == (7, 1, "count")


def test_tasks_without_a_function_go_to_the_handler(queue: TaskQueue) -> None:
    @queue.task
    def double(number: int) -> int:
        return 2 * number

    ids = [double.put(4), queue.put("x")]
    Worker(queue, lambda task: f"handled {task.payload}").run(drain=True)
    assert [queue.get(id).result for id in ids] == [8, "handled x"]


def test_tasks_without_a_function_go_to_the_command(queue: TaskQueue) -> None:
    """Functions run beside it, also coroutines."""

    @queue.task
    async def double(number: int) -> int:
        return 2 * number

    ids = [double.put(4), queue.put("x")]
    Worker(queue, ["echo", "printed {}"]).run(drain=True)
    assert [queue.get(id).result for id in ids] == [8, "printed x"]


def test_a_function_that_is_not_registered_fails_its_task(queue: TaskQueue, jobs: Path) -> None:
    @queue.task(attempts=1, name="app.resize")
    def resize() -> None: ...

    id = resize.put()
    other = queue.put("x", attempts=1)
    elsewhere = TaskQueue(jobs)
    elsewhere.task(print, name="print")
    assert Worker(elsewhere).run(drain=True).failed == 2
    assert "function app.resize is not registered" in elsewhere.get(id).error
    assert "@queue.task" in elsewhere.get(id).error
    assert "Worker(queue, handler)" in elsewhere.get(other).error
    assert elsewhere.get(id).traceback is None


def test_a_misspelt_argument_is_named_and_not_the_one_that_is_missing(queue: TaskQueue) -> None:
    @queue.task
    def resize(name: str, width: int) -> None: ...

    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        resize.put("a.png", widht=80)
    with pytest.raises(TypeError, match="missing a required argument: 'width'"):
        resize.put("a.png")


def test_a_worker_needs_a_handler_or_functions(queue: TaskQueue) -> None:
    with pytest.raises(TypeError, match="handler is missing"):
        Worker(queue)


def test_coroutines_run_at_the_same_time_in_one_process(queue: TaskQueue) -> None:
    """A hundred of them meet: each waits until all have begun."""
    met: list[int] = []

    @queue.task(timeout=60)
    async def meet() -> int:
        met.append(1)
        while len(met) < 100:
            await asyncio.sleep(0.001)
        return os.getpid()

    ids = [meet.put() for _ in range(100)]
    summary = Worker(queue, concurrency=100).run(drain=True)
    assert summary.done == 100 and len({queue.get(id).result for id in ids}) == 1


def test_no_more_coroutines_run_than_concurrency_allows(queue: TaskQueue) -> None:
    running: list[int] = []

    async def handle(task: Claim) -> int:
        running.append(1)
        await asyncio.sleep(0.001)
        try:
            return len(running)
        finally:
            running.pop()

    ids = queue.put_all(range(60))
    assert Worker(queue, handle, concurrency=5).run(drain=True).done == 60
    assert max(queue.get(id).result for id in ids) <= 5


def test_each_coroutine_has_its_own_timeout(queue: TaskQueue, in_memory: Path) -> None:
    cleaned = in_memory / "cleaned"

    async def handle(task: Claim) -> str:
        if task.payload == "own":
            raise asyncio.TimeoutError("of the handler")
        if task.payload == "late":
            try:
                await asyncio.sleep(600)
            finally:
                cleaned.touch()
        while not cleaned.exists():
            await asyncio.sleep(0.001)
        return "in time"

    late = queue.put("late", timeout=0.2, attempts=1)
    own = queue.put("own", timeout=60, attempts=1)
    others = queue.put_all("abc", timeout=60)
    summary = Worker(queue, handle, concurrency=10).run(drain=True)
    assert queue.get(late).error == "not done within 0.2 s" and "of the handler" in queue.get(own).error
    assert [queue.get(id).result for id in others] == ["in time"] * 3
    assert (summary.done, summary.failed, summary.deaths, summary.given_back) == (3, 2, 0, 0)


def test_a_cancelled_coroutine_is_cancelled_in_its_loop(queue: TaskQueue, in_memory: Path) -> None:
    begun, cancelled = in_memory / "begun", in_memory / "cancelled"

    async def handle(task: Claim) -> None:
        begun.touch()
        try:
            await asyncio.sleep(0 if task.payload == "other" else 600)
        except asyncio.CancelledError:
            cancelled.touch()
            raise

    id = queue.put("x")
    results: list[Any] = []
    worker = Worker(queue, handle, concurrency=10)
    thread = threading.Thread(target=lambda: results.append(worker.run(drain=True)))
    thread.start()
    until(begun.exists)
    other = queue.put("other")
    assert queue.cancel(id)
    thread.join(30)
    assert cancelled.exists() and queue.get(id).state == "cancelled" and queue.get(other).state == "done"
    assert (results[0].cancelled, results[0].deaths) == (1, 0)


def test_a_coroutine_that_blocks_its_loop_is_killed(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tasks of the loop are given back, and done by the next process."""
    monkeypatch.setattr("holdfast.tasks.loop.GRACE_S", 0.5)

    async def handle(task: Claim) -> int:
        if task.payload == "stuck":
            time.sleep(600)
        return task.tried

    ids = [queue.put("stuck", timeout=0.5, attempts=1), *queue.put_all("abc", attempts=1)]
    Worker(queue, handle, concurrency=10).run(drain=True)
    assert queue.get(ids[0]).error == "not done within 0.5 s"
    assert [queue.get(id).result for id in ids[1:]] == [1, 1, 1]


def test_functions_and_coroutines_run_at_the_same_time_in_one_worker(queue: TaskQueue) -> None:
    """A function runs in a thread, so that the loop goes on."""
    met = threading.Event()

    @queue.task
    def wait() -> bool:
        return met.wait(30)

    @queue.task
    async def meet() -> None:
        met.set()

    ids = [wait.put(), meet.put()]
    Worker(queue, concurrency=2).run(drain=True)
    assert queue.get(ids[0]).result is True and queue.get(ids[1]).state == "done"


def test_coroutines_fail_and_call_hooks_as_functions_do(queue: TaskQueue, in_memory: Path) -> None:
    out = in_memory / "out"

    async def handle(task: Claim) -> object:
        task.progress(1, 2)
        task.progress(2, 2)
        if task.payload == "exit":
            raise SystemExit(3)
        if task.payload == "self":
            task.complete("mine")
        return object() if task.payload == "odd" else 1

    def note(task: Claim, error: BaseException | None = None) -> None:
        with open(out, "a") as file:
            file.write(f"{task.payload} {task.outcome} {type(error).__name__}\n")

    names = ["good", "exit", "odd", "self"]
    ids = [queue.put(name, attempts=1) for name in names]
    summary = Worker(queue, handle, concurrency=4, on_start=note, on_done=note, on_failed=note).run(drain=True)
    assert (summary.done, summary.failed, summary.deaths) == (2, 2, 0)
    assert sorted(out.read_text().splitlines()) == sorted(
        [f"{name} None NoneType" for name in names]
        + ["good done NoneType", "self done NoneType", "exit failed SystemExit", "odd failed TypeError"]
    )
    assert queue.get(ids[3]).result == "mine" and queue.get(ids[0]).progress == (2, 2, "")


def test_coroutines_of_a_killed_process_are_done_by_the_next_one(queue: TaskQueue, in_memory: Path) -> None:
    async def handle(task: Claim) -> None:
        (in_memory / f"{task.id} {os.getpid()}").touch()
        if task.token == 1:
            await asyncio.sleep(600)

    ids = queue.put_all(range(5))
    worker = Child(lambda _: Worker(queue, handle, concurrency=10).run(drain=True))
    until(lambda: len(list(in_memory.glob("_*"))) == 5)
    os.kill(int(next(in_memory.glob("_*")).name.split()[1]), signal.SIGKILL)
    assert worker.end()[0] == 0
    assert [(queue.get(id).state, queue.get(id).tried) for id in ids] == [("done", 2)] * 5


def test_sigterm_lets_coroutines_finish(queue: TaskQueue, in_memory: Path) -> None:
    async def handle(task: Claim) -> None:
        (in_memory / task.id).touch()
        while not (in_memory / "go").exists():
            await asyncio.sleep(0.001)

    class Observer:
        fds = ()

        def look(self) -> None:
            if working.is_ending:
                (in_memory / "ending").touch()

    ids = queue.put_all(range(5))
    working = Worker(queue, handle, concurrency=2, observer=Observer())
    worker = Child(lambda _: working.run())
    until(lambda: len(list(in_memory.glob("_*"))) == 2)
    os.kill(worker.pid, signal.SIGTERM)
    until((in_memory / "ending").exists)
    (in_memory / "go").touch()
    assert worker.end()[0] == 0
    states = [queue.get(id).state for id in ids]
    assert states[:2] == ["done", "done"] and states[-1] == "pending" and "running" not in states


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
@pytest.mark.parametrize("is_coroutine", [True, False])
def test_a_completion_by_a_handler_is_stored_when_complete_returns(
    engine: str, is_coroutine: bool, jobs: Path, request: pytest.FixtureRequest, in_memory: Path
) -> None:
    """Although a worker writes the ends of short tasks together."""
    where = jobs if engine == "sqlite" else request.getfixturevalue("postgres")
    queue = TaskQueue(where)
    ids = queue.put_all(range(30))

    def handle(task: Claim) -> None:
        task.complete()
        with open(in_memory / "states", "a") as file:
            file.write(TaskQueue(where).get(task.id).state + "\n")  # another object: it has nothing to write

    async def ahandle(task: Claim) -> None:
        handle(task)

    Worker(queue, ahandle if is_coroutine else handle).run(drain=True)
    assert (in_memory / "states").read_text().split() == ["done"] * len(ids)
    queue.close()


def test_progress_in_a_coroutine_does_not_block_the_loop(queue: TaskQueue, in_memory: Path) -> None:
    """Also while another process has the lock of all writers."""
    begun, locked, went_on = (in_memory / name for name in ("begun", "locked", "went on"))

    async def handle(task: Claim) -> str:
        begun.touch()
        while not locked.exists():
            await asyncio.sleep(0.001)
        task.progress(1, 2, "first half")
        went_on.touch()
        return "result"

    id = queue.put("x")
    worker = Worker(queue, handle)
    thread = threading.Thread(target=lambda: worker.run(drain=True))
    thread.start()
    until(begun.exists)
    with Lock(f"{queue.path}/queue.lock", keep=True):
        locked.touch()
        until(went_on.exists)
    thread.join(30)
    assert (queue.get(id).progress, queue.get(id).result) == ((1, 2, "first half"), "result")
