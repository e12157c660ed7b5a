"""`TaskQueue` and `Claim`: what their users see. The engines have their own suite (test_store)."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, claim_all, claimed, in_child, until

from holdfast import LockLost, NotLocked, Timeout, UnsafePath
from holdfast.tasks import NoSuchTask, QueueFull, TaskQueue
from holdfast.tasks import claim as claim_module
from holdfast.tasks.policy import Retries


def test_a_task_from_put_to_done(queue: TaskQueue) -> None:
    id = queue.put({"n": 1}, attempts=2, timeout=7, priority=3)
    task = queue.get(id)
    assert (task.state, task.payload, task.tried, task.attempts) == ("pending", {"n": 1}, 0, 2)
    assert (task.timeout, task.priority, task.worker, task.waits) == (7, 3, None, None)
    claim = claimed(queue)
    assert (claim.id, claim.payload, claim.tried, claim.attempts, claim.timeout) == (id, {"n": 1}, 1, 2, 7)
    running = queue.get(id)
    assert running.state == "running" and running.worker is not None and running.worker.startswith(f"{os.getpid()}@")
    claim.complete({"size": 17})
    task = queue.get(id)
    assert (task.state, task.result, task.error, task.tried) == ("done", {"size": 17}, None, 1)
    assert task.started_at is not None and task.ended_at is not None
    assert task.put_at <= task.started_at <= task.ended_at
    assert queue.claim() is None
    assert queue.is_empty()


def test_two_queues_of_one_directory_are_one_queue(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(5))
    assert claim_all(TaskQueue(jobs)) == [0, 1, 2, 3, 4]
    assert {queue.get(id).state for id in ids} == {"done"}


@pytest.mark.parametrize("name", [b"not UTF-8: \xff", b"a?b#c%20 d", b"file:x"])
def test_any_name_of_a_directory_can_be_used(in_memory: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(in_memory), name)
    queue = TaskQueue(path)
    queue.put("x")
    assert claim_all(TaskQueue(path)) == ["x"] and b"queue.db" in os.listdir(path)
    queue.close()


def test_a_task_is_put_once_by_its_id(queue: TaskQueue) -> None:
    assert queue.put(1, id="a") == "a"
    assert queue.put(2, id="a") == "a"
    assert claim_all(queue) == [1]
    assert queue.put(3, id="a") == "a"
    assert claim_all(queue) == []
    assert "a" in queue and "b" not in queue


def test_many_threads_put_one_id_once(queue: TaskQueue) -> None:
    begin = threading.Barrier(8)

    def put(number: int) -> None:
        begin.wait(PATIENCE)
        queue.put(number, id="same")

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(claim_all(queue)) == 1


@pytest.mark.parametrize("id", ["a/b", "..", "ä" * 300, "x y\nz", "%", "'; drop table task; --", "-7", "_x", "_"])
def test_any_text_can_be_an_id_and_a_key(queue: TaskQueue, id: str) -> None:
    queue.put(1, id=id, key=id)
    assert claimed(queue).id == id
    assert queue.get(id).key == id


@pytest.mark.parametrize(
    ("payload", "options", "error"),
    [
        (object(), {}, TypeError),
        ({1, 2}, {}, TypeError),
        (float("nan"), {}, ValueError),
        (None, {"id": ""}, ValueError),
        (None, {"id": 7}, TypeError),
        (None, {"id": "_7"}, ValueError),
        (None, {"id": "a\0b"}, ValueError),
        (None, {"key": "half a pair: \ud800"}, ValueError),
        (None, {"id": "\ud800"}, ValueError),
        (None, {"id": "x" * 1001}, ValueError),
        (None, {"priority": 1.5}, ValueError),
        (None, {"priority": True}, ValueError),
        (None, {"priority": 10**10}, ValueError),
        (None, {"attempts": 0}, ValueError),
        (None, {"delay": -1}, ValueError),
        (None, {"delay": "5"}, TypeError),
        (None, {"delay": float("inf")}, ValueError),
        (None, {"delay": 10**400}, ValueError),
        (None, {"wait": "x"}, TypeError),
        (None, {"wait": -1}, ValueError),
        (None, {"timeout": 0}, ValueError),
        (None, {"timeout": float("nan")}, ValueError),
        (None, {"key": ""}, ValueError),
        (None, {"key": "k", "limit": 0}, ValueError),
        (None, {"limit": 2}, ValueError),
        (None, {"key": "k", "rate": "fast"}, ValueError),
        (None, {"key": "k", "rate": "0/m"}, ValueError),
        (None, {"key": "k", "rate": "10/0m"}, ValueError),
        (None, {"key": "k", "rate": f"10/{'9' * 400}d"}, ValueError),
        (None, {"key": "k", "rate": f"{'9' * 400}/m"}, ValueError),
        (None, {"key": "\U0001f512" * 1000}, ValueError),
        (None, {"id": "\U0001f512" * 1000}, ValueError),
        (None, {"key": 7}, TypeError),
        (None, {"function": ["f"]}, TypeError),
        (None, {"function": "\0"}, ValueError),
        (None, {"after": 7}, TypeError),
        (None, {"after": [7]}, TypeError),
        (None, {"after": "nobody"}, ValueError),
        (None, {"colour": "red"}, TypeError),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    queue: TaskQueue, payload: object, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        queue.put(payload, **options)
    assert sum(queue.stats().values()) == 0


def test_the_error_for_what_json_cannot_express_names_it(queue: TaskQueue) -> None:
    with pytest.raises(TypeError, match="the payload of a task must be what JSON can express: Object of type set"):
        queue.put({1})
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="the payload of a task must be what JSON can express: Circular"):
        queue.put(circle)
    queue.put(1)
    claim = queue.claim()
    assert claim is not None
    with pytest.raises(ValueError, match="the result of a task must be what JSON can express"):
        claim.complete(float("nan"))
    claim.complete()


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_payload_that_is_nested_too_deeply_is_refused(queue: TaskQueue, depth: int) -> None:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        queue.put(deep)
    queue.put(1)
    claim = claimed(queue)
    with pytest.raises(ValueError, match="nested"):
        claim.complete(deep)
    claim.complete()


@pytest.mark.parametrize("payload", ["half a pair: \ud800", "\0", "ä 💡", {"a": [1, None, True, 1.5]}, "x" * 100_000])
def test_a_payload_comes_back_as_it_was(queue: TaskQueue, payload: object) -> None:
    queue.put(payload)
    claim = claimed(queue)
    assert claim.payload == payload
    claim.complete(payload)
    assert queue.get(claim.id).result == payload


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_pending": 0},
        {"retry_after": -1},
        {"max_retry_after": "x"},
        {"keep": "7 days"},
        {"keep": -1},
        {"keep_failed": "x"},
        {"durable": "no"},
        {"mode": "rw"},
        {"mode": -1},
    ],
)
def test_wrong_settings_are_refused(jobs: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        TaskQueue(jobs, **wrong)
    assert not jobs.exists()


@pytest.mark.parametrize("where", ["", "mongodb://host/x", "http://host"])
def test_an_unknown_engine_is_refused(where: str) -> None:
    with pytest.raises(UnsafePath):
        TaskQueue(where)


# Trying again.


def test_a_failed_task_is_tried_again_and_fails_for_good_after_its_attempts(queue: TaskQueue) -> None:
    id = queue.put("x", attempts=2)
    with pytest.raises(ZeroDivisionError), claimed(queue):
        1 / 0  # noqa: B018
    task = queue.get(id)
    assert (task.state, task.tried) == ("pending", 1)
    assert "ZeroDivisionError" in (task.error or "") and "1 / 0" in (task.traceback or "")
    claim = queue.claim(timeout=PATIENCE)
    assert claim is not None and claim.id == id
    assert not claim.fail("no luck")
    task = queue.get(id)
    assert (task.state, task.error, task.tried, task.waits) == ("failed", "no luck", 2, None)
    assert [past["error"] for past in task.history] == ["ZeroDivisionError: division by zero"]
    queue.retry(id)
    assert claimed(queue).tried == 1


def test_pauses_between_attempts_grow_up_to_a_limit() -> None:
    retries = Retries(2.0, 60.0)
    for tried, longest in ((1, 2), (2, 4), (3, 8), (10, 60), (10_000, 60)):
        assert all(longest / 2 <= retries.pause_after(tried) <= longest for _ in range(20))


def test_a_task_that_is_given_back_keeps_its_place_and_its_attempts(queue: TaskQueue) -> None:
    queue.put_all([1, 2])
    claim = claimed(queue)
    claim.give_back()
    again = claimed(queue)
    assert (again.payload, again.tried) == (1, 1)
    assert again.token > claim.token


def test_an_interrupt_gives_the_task_back(queue: TaskQueue) -> None:
    id = queue.put(1)
    with pytest.raises(KeyboardInterrupt), claimed(queue):
        raise KeyboardInterrupt
    assert (queue.get(id).state, queue.get(id).tried) == ("pending", 0)


def test_a_claim_that_is_dropped_is_a_failed_attempt(queue: TaskQueue) -> None:
    id = queue.put(1, attempts=2)
    claim = claimed(queue)
    del claim
    gc.collect()
    assert queue.claim(timeout=PATIENCE) is not None
    gc.collect()
    assert queue.claim() is None
    assert queue.get(id).state == "failed"
    assert queue.get(id).error == "its claim was dropped"


def test_a_claim_ends_once(queue: TaskQueue) -> None:
    queue.put(1)
    claim = claimed(queue)
    claim.complete()
    for end in (claim.complete, claim.give_back, claim.cancel, lambda: claim.fail("x"), lambda: claim.progress(1)):
        with pytest.raises(NotLocked, match="has ended"):
            end()
    assert claim.outcome == "done" and not claim.is_open


def test_a_forked_child_cannot_end_the_claim_of_its_parent(queue: TaskQueue) -> None:
    id = queue.put(1)
    claim = claimed(queue)

    def end() -> str:
        try:
            claim.complete()
        except NotLocked as error:
            return str(error)
        return ""

    assert "parent" in in_child(end)
    assert queue.get(id).state == "running"
    claim.complete()


def test_the_result_of_a_worker_that_counts_as_dead_is_refused(queue: TaskQueue, jobs: Path) -> None:
    """Somebody deleted its file, and another worker got the task."""
    id = queue.put(1, attempts=5)
    claim = claimed(queue)
    for name in os.listdir(jobs / "workers"):
        os.unlink(jobs / "workers" / name)
    in_child(lambda: TaskQueue(jobs).claimer().recover())
    with pytest.raises(LockLost):
        claim.check()
    queue.put(2)
    again = in_child(lambda: claim_all(TaskQueue(jobs)))
    assert again == [1, 2]
    assert queue.get(id).state == "done"


def test_the_tasks_of_a_killed_process_go_to_the_next_worker(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(3))
    pid = os.fork()
    if pid == 0:
        first = claimed(TaskQueue(jobs))
        assert first.payload == 0
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert claim_all(queue) == [1, 2, 0]
    assert queue.get(ids[0]).tried == 2
    assert queue.get(ids[0]).history[0]["error"] == "the worker died"


# Progress.


def test_progress_is_seen_and_the_last_one_is_kept(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    id = queue.put(1)
    claim = claimed(queue)
    claim.progress(1, 10, "first")
    assert queue.get(id).progress == (1, 10, "first")
    monkeypatch.setattr(claim_module, "_PROGRESS_EVERY_S", 1e9)  # whatever a busy machine takes for nine calls
    for number in range(2, 11):
        claim.progress(number, 10)
    assert queue.get(id).progress == (1, 10, "first")
    claim.complete()
    assert queue.get(id).progress == (10, 10, "")
    with pytest.raises(TypeError):
        claimed_after(queue).progress(object())  # type: ignore[arg-type]


def claimed_after(queue: TaskQueue) -> Any:
    queue.put(2)
    return claimed(queue)


# Delays.


def test_delays_follow_a_clock_that_does_not_jump(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    id = queue.put(1, delay=100)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    assert queue.claim() is None
    task = queue.get(id)
    assert task.waits == "delayed" and task.due_in is not None and 50 < task.due_in <= 100
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert queue.claim() is None
    assert queue.stats()["delayed"] == 1


def test_a_claim_waits_for_a_task(queue: TaskQueue, jobs: Path) -> None:
    assert queue.claim(timeout=0.01) is None
    thread = threading.Thread(target=lambda: in_child(lambda: TaskQueue(jobs).put("late")))
    thread.start()
    claim = queue.claim(timeout=PATIENCE)
    thread.join()
    assert claim is not None and claim.payload == "late"
    queue.put("delayed", delay=0.05)
    claim = queue.claim(timeout=None)
    assert claim is not None and claim.payload == "delayed"


def test_a_long_task_does_not_keep_the_tasks_that_its_worker_has_reserved(queue: TaskQueue, jobs: Path) -> None:
    quick = TaskQueue(jobs, durable=False)
    quick.put_all(range(2000))
    for _ in range(500):
        claimed(quick).complete()
    held = claimed(quick)
    until(lambda: queue.stats()["running"] == 1)
    rest = claim_all(queue)
    assert len(rest) == 2000 - 501
    held.complete()
    until(lambda: queue.stats()["done"] == 2000)


def test_a_process_that_does_not_wait_for_the_disk_sees_what_it_has_done(jobs: Path) -> None:
    quick = TaskQueue(jobs, durable=False)
    ids = quick.put_all(range(200))
    for _ in range(100):
        claimed(quick).complete()
    assert quick.stats()["done"] == 100
    assert [quick.get(id).state for id in ids[:100]] == ["done"] * 100
    until(lambda: in_child(lambda: TaskQueue(jobs).stats()) == {**quick.stats()})


def test_a_thread_may_look_while_others_begin_to_claim(queue: TaskQueue) -> None:
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.is_set():
            queue._write()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as executor:
            looking = executor.submit(look)
            for _ in range(40):
                kept = [queue.new_claimer() for _ in range(300)]
                del kept
            has_ended.set()
            looking.result(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
        has_ended.set()


AT_EXIT = """
import sys
from holdfast.tasks import TaskQueue
queue = TaskQueue(sys.argv[1], durable=False)
queue.put_all(range(200))
for _ in range(100):
    queue.claim().complete()
"""


def test_a_process_that_ends_normally_writes_what_it_has_done_and_gives_back_the_rest(jobs: Path) -> None:
    import subprocess

    subprocess.run([sys.executable, "-W", "error", "-c", AT_EXIT, str(jobs)], check=True)
    stats = TaskQueue(jobs).stats()
    assert (stats["done"], stats["pending"], stats["running"]) == (100, 100, 0)
    assert {task.tried for task in TaskQueue(jobs).tasks(("pending",))} == {0}


WHILE_WRITING = """
import sys, threading, time
from holdfast.tasks import TaskQueue
queue = TaskQueue(sys.argv[1], durable=False)
settle, is_writing = queue.store.settle, threading.Event()
def slowly(endings):
    is_writing.set()
    time.sleep(0.5)
    return settle(endings)
queue.store.settle = slowly
queue.put(1)
queue.claim().complete()
is_writing.wait()
"""


def test_a_process_that_ends_while_another_thread_writes_what_it_has_done_waits_for_that(jobs: Path) -> None:
    import subprocess

    subprocess.run([sys.executable, "-W", "error", "-c", WHILE_WRITING, str(jobs)], check=True)
    assert TaskQueue(jobs).stats()["done"] == 1


# Changing.


def test_only_ended_tasks_are_retried(queue: TaskQueue) -> None:
    id = queue.put(1)
    with pytest.raises(NotLocked, match="pending"):
        queue.retry(id)
    claim = claimed(queue)
    with pytest.raises(NotLocked, match="running"):
        queue.retry(id)
    claim.complete(5)
    queue.retry(id)
    assert claimed(queue).id == id
    with pytest.raises(NoSuchTask):
        queue.retry("nobody")


def test_a_pending_task_is_cancelled(queue: TaskQueue) -> None:
    id = queue.put(1)
    assert queue.cancel(id)
    assert not queue.cancel(id)
    assert queue.claim() is None
    assert queue.get(id).state == "cancelled"
    with pytest.raises(NoSuchTask):
        queue.cancel("nobody")


@pytest.mark.parametrize("how", ["fail", "give_back", "cancel", "complete"])
def test_a_running_task_that_was_cancelled_is_not_tried_again(queue: TaskQueue, how: str) -> None:
    id = queue.put(1)
    claim = claimed(queue)
    assert not claim.cancelled
    assert queue.cancel(id)
    assert claim.cancelled
    assert queue.get(id).cancelling
    claim.fail("x") if how == "fail" else getattr(claim, how)()
    assert queue.get(id).state == ("done" if how == "complete" else "cancelled")


def test_ended_tasks_are_purged_by_state_and_age(queue: TaskQueue) -> None:
    done, failed, cancelled, pending = (queue.put(number, attempts=1) for number in range(4))
    claimed(queue).complete()
    claimed(queue).fail("x")
    queue.cancel(cancelled)
    assert queue.purge(older_than=100) == 0
    assert queue.purge(states="done") == 1
    assert done not in queue and failed in queue
    assert queue.purge() == 2
    assert pending in queue
    with pytest.raises(ValueError, match="pending"):
        queue.purge(states={"pending"})
    with pytest.raises(TypeError):
        queue.purge(older_than="7d")  # type: ignore[arg-type]


def test_done_tasks_are_pruned_after_a_while_and_failed_ones_are_kept(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = TaskQueue(jobs, keep="2h")
    ids = [queue.put(number, attempts=1) for number in range(4)]
    claimed(queue).complete()
    claimed(queue).fail("x")
    assert not queue.prune()
    from holdfast.tasks import queue as module

    real = time.time
    monkeypatch.setattr(module, "time", lambda: real() + 7300)
    assert queue.prune()
    assert [id in queue for id in ids] == [False, True, True, True]
    assert not TaskQueue(jobs, keep=None).prune()
    kept_shorter = TaskQueue(jobs, keep=None, keep_failed=60)
    assert kept_shorter.prune()
    assert [id in queue for id in ids] == [False, False, True, True]


def test_a_full_queue_refuses_a_task_or_waits_for_room(jobs: Path) -> None:
    queue = TaskQueue(jobs, max_pending=2)
    queue.put_all([1, 2])
    with pytest.raises(QueueFull, match="max_pending=2"):
        queue.put(3)
    with pytest.raises(QueueFull):
        queue.put(3, wait=0.01)
    thread = threading.Thread(target=lambda: in_child(lambda: claim_all(TaskQueue(jobs))))
    thread.start()
    queue.put(3, wait=PATIENCE)
    thread.join()
    cancelled = queue.put(4, wait=PATIENCE)
    queue.cancel(cancelled)
    assert queue.put(5, wait=None)


def test_wait_returns_when_all_tasks_have_ended(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(3))
    with pytest.raises(Timeout, match="still pending"):
        queue.wait(ids, timeout=0.01)
    thread = threading.Thread(target=lambda: in_child(lambda: claim_all(TaskQueue(jobs))))
    thread.start()
    assert [task.state for task in queue.wait(ids, timeout=PATIENCE)] == ["done"] * 3
    thread.join()
    assert queue.wait(ids[0])[0].payload == 0
    with pytest.raises(NoSuchTask):
        queue.wait(["nobody"])


def test_a_wait_for_many_tasks_does_not_read_all_of_them_at_each_change(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, read, get = 30, [], queue.store.get
    ids = queue.put_all(range(number))

    def changes(_: object) -> Iterator[None]:
        for _ in ids:
            yield
            claimed(queue).complete()
        yield

    monkeypatch.setattr(queue, "_changes", changes)
    monkeypatch.setattr(queue.store, "get", lambda some: (read.extend(some), get(some))[1])
    assert [task.id for task in queue.wait(ids)] == ids
    assert len(read) < 5 * number


def test_a_paused_queue_begins_nothing(queue: TaskQueue) -> None:
    queue.put(1)
    queue.pause()
    assert queue.is_paused and queue.claim() is None
    queue.resume()
    assert not queue.is_paused and claim_all(queue) == [1]


def test_tasks_are_listed_in_order_and_by_state(queue: TaskQueue) -> None:
    ids = queue.put_all(range(5), attempts=1)
    queue.put(5, delay=100)
    claimed(queue).complete()
    claimed(queue).fail("x")
    claim = claimed(queue)
    assert [task.payload for task in queue] == [0, 1, 2, 3, 4, 5]
    assert [task.payload for task in queue.tasks(("pending",))] == [3, 4, 5]
    assert [task.id for task in queue.tasks(("failed", "running"))] == ids[1:3]
    assert queue.stats() == {
        "pending": 3,
        "running": 1,
        "delayed": 1,
        "parked": 0,
        "blocked": 0,
        "done": 1,
        "failed": 1,
        "cancelled": 0,
    }
    with pytest.raises(ValueError, match="nonsense"):
        queue.tasks(("nonsense",))
    with pytest.raises(NoSuchTask, match="'x'"):
        queue.get("x")
    claim.complete()


def test_a_queue_can_be_pickled(queue: TaskQueue) -> None:
    queue.put(1)
    assert pickle.loads(pickle.dumps(queue)).stats() == queue.stats()


# Functions.


def test_a_registered_function_is_put_and_called(queue: TaskQueue) -> None:
    @queue.task(attempts=5, timeout=60, name="resize")
    def resize(name: str, width: int = 1) -> str:
        """Doc."""
        return f"{name} {width}"

    assert resize("a", width=2) == "a 2"
    assert resize.__doc__ == "Doc." and resize.__name__ == "resize"
    id = resize.put("a.png", width=200)
    task = queue.get(id)
    assert (task.function, task.attempts, task.timeout) == ("resize", 5, 60)
    assert task.payload == {"args": ["a.png"], "kwargs": {"width": 200}}
    other = resize.options(delay=100, id="later").put("b")
    assert (other, queue.get(other).waits, queue.get(other).attempts) == ("later", "delayed", 5)
    with pytest.raises(ValueError, match="resize"):
        queue.task(name="resize")(resize.function)
    with pytest.raises(TypeError):
        resize.put(object())
    with pytest.raises(TypeError, match="options"):  # else each attempt of the task would fail
        resize.put("a.png", id="a")
    assert queue.stats()["pending"] == 2
    assert queue.get(queue.task(max).put(1, 2)).function == "builtins.max"  # its signature is not known
    with pytest.raises(TypeError, match="colour"):
        resize.options(colour="red")
    with pytest.raises(ValueError, match="attempts"):
        queue.task(attempts=0)(lambda: None)


def test_a_full_disk_is_reported(small_disk: Path) -> None:
    queue = TaskQueue(small_disk / "jobs")
    ids: list[str] = []

    def fill() -> None:
        while True:
            ids.append(queue.put("x" * 1000))

    with pytest.raises(OSError, match="full") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert [task.id for task in queue] == ids
    queue.close()
