"""What every task engine promises (`tasks.store`). One suite for all engines, with processes that are killed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from time import monotonic, time
from typing import Any

import pytest
from support import PATIENCE, until

from holdfast.tasks import sqlite
from holdfast.tasks.model import MAX_ID_BYTES
from holdfast.tasks.policy import Retries, given_back
from holdfast.tasks.queue import open_store
from holdfast.tasks.reading import Transaction
from holdfast.tasks.sql import Store
from holdfast.tasks.store import ENDED, STATES, Attempt, Ending, NewTask, Registration, Selection, Task, Woken

ENGINES = ["sqlite", "postgres"]


@pytest.fixture(params=ENGINES)
def where(request: pytest.FixtureRequest, in_memory: Path) -> str:
    if request.param == "sqlite":
        return str(in_memory / "jobs")
    url: str = request.getfixturevalue("postgres")
    return url


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    made = open_store(where, durable=False)
    yield made
    check_counts(made)
    made.close()


def check_counts(store: Store) -> None:
    """The counters agree with the tasks."""
    assert {state: count for state, count in store.count().items() if count} == dict(
        Counter(map(state_of, store.tasks()))
    )


def tasks(count: int, **options: Any) -> list[NewTask]:
    return [NewTask(f"{number}", **options) for number in range(count)]


def claim_one(store: Store, worker: Registration) -> Attempt:
    (attempt,) = store.claim(worker, 1)
    return attempt


def done(attempt: Attempt, **more: Any) -> Ending:
    return Ending(attempt.id, attempt.token, "done", **more)


def state(store: Store, id: str) -> str:
    (found,) = store.get([id])
    assert found is not None
    return state_of(found)


def state_of(task: Task) -> str:
    """The state as the engine knows it."""
    return task.waits or task.state.replace("pending", "ready")


def forked(work: Callable[[], object]) -> int:
    """The pid of a process that runs `work`. It ends with status 1 if that raises."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A process that runs `work`. Leaving the block waits for it, and insists that it did not fail."""
    pid = forked(work)
    try:
        yield pid
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    assert exit_status(pid) in (0, -signal.SIGKILL)


@contextmanager
def claimed_by_another_process(store: Store, count: int, *, reserve: bool = False) -> Iterator[tuple[int, list[str]]]:
    """The pid of a process that has claimed tasks and waits, and their ids. It is killed at the end at the latest."""
    reader, writer = os.pipe()

    def work() -> None:
        worker = store.register()
        ids = [attempt.id for attempt in store.claim(worker, count, reserve=reserve)]
        os.write(writer, " ".join(ids).encode() + b"\n")
        signal.pause()

    with child(work) as pid:
        ids = os.read(reader, 65536).decode().split()
        yield pid, ids
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.close(reader)
    os.close(writer)


# Adding.


def test_tasks_without_an_id_get_different_ids_in_order(store: Store) -> None:
    added = store.add(tasks(3))
    assert [is_new for _, is_new in added] == [True, True, True]
    assert [task.id for task in store.tasks()] == [id for id, _ in added]
    assert [task.payload for task in store.tasks()] == [0, 1, 2]


def test_a_task_with_an_id_is_added_once(store: Store) -> None:
    assert store.add([NewTask("1", id="a"), NewTask("2", id="b")]) == [("a", True), ("b", True)]
    assert store.add([NewTask("3", id="a")]) == [("a", False)]
    assert store.add([NewTask("4", id="b"), NewTask("5", id="c")]) == [("b", False), ("c", True)]
    assert [task.payload for task in store.tasks()] == [1, 2, 5]


def test_a_task_whose_id_exists_may_wait_for_a_task_that_was_deleted(store: Store) -> None:
    store.add([NewTask('"a"', id="a"), NewTask('"b"', id="b", after=("a",))])
    store.settle([done(claim_one(store, store.register()))])
    assert store.delete(Selection(ids=["a"])) == 1
    assert store.add([NewTask('"b"', id="b", after=("a",))]) == [("b", False)]
    with pytest.raises(ValueError, match="there is no such task"):
        store.add([NewTask('"c"', id="c", after=("a",))])


def test_no_more_tasks_are_added_than_there_is_room_for(store: Store) -> None:
    assert len(store.add(tasks(3), max_waiting=5)) == 3
    store.add([NewTask('"x"', id="a", delay=100)], max_waiting=5)
    assert len(store.add(tasks(3), max_waiting=5)) == 1
    assert store.add([NewTask('"x"', id="a")], max_waiting=5) == [("a", False)]
    assert store.add(tasks(1), max_waiting=5) == []


def test_the_longest_id_and_key_are_stored(store: Store) -> None:
    random = Random(1)  # a database would compress a text that repeats itself
    longest = "".join(chr(random.randrange(0x10000, 0x20000)) for _ in range(MAX_ID_BYTES // 4))
    store.add([NewTask("1", id=longest, key=longest, interval=1.0), NewTask("2", key=longest)])
    store.set_schedule(longest, "{}")
    assert claim_one(store, store.register()).id == longest


def test_racing_processes_add_a_task_once(store: Store) -> None:
    results = race(8, lambda number: store.add([NewTask(f"{number}", id="same")])[0][1])
    assert sorted(results) == [False] * 7 + [True]
    assert store.count()["ready"] == 1


def race(count: int, work: Callable[[int], object]) -> list[Any]:
    """The results of processes that start at the same moment."""
    start_reader, start_writer = os.pipe()
    readers = []
    pids = []
    for number in range(count):
        reader, writer = os.pipe()

        def run(number: int = number, writer: int = writer) -> None:
            os.close(start_writer)
            os.read(start_reader, 1)
            os.write(writer, repr(work(number)).encode())

        pids.append(forked(run))
        os.close(writer)
        readers.append(reader)
    os.close(start_reader)
    os.close(start_writer)
    results = []
    for reader in readers:
        with os.fdopen(reader) as file:
            results.append(file.read())
    assert [exit_status(pid) for pid in pids] == [0] * count
    return [eval(result) for result in results]


# Claiming and settling.


def test_higher_priorities_come_first_then_older_tasks(store: Store) -> None:
    store.add([NewTask('"a"'), NewTask('"b"', priority=5), NewTask('"c"', priority=-1), NewTask('"d"', priority=5)])
    worker = store.register()
    assert [attempt.payload_json for attempt in store.claim(worker, 10)] == ['"b"', '"d"', '"a"', '"c"']
    assert store.claim(worker, 1) == []


def test_a_task_that_is_tried_again_goes_to_the_back_and_one_that_is_given_back_keeps_its_place(store: Store) -> None:
    store.add(tasks(4))
    worker = store.register()
    first, second = store.claim(worker, 2)
    assert store.settle([Ending(first.id, first.token, "delayed"), given_back(second)]) == [True, True]
    again = store.claim(worker, 10)
    assert [attempt.payload_json for attempt in again] == ["1", "2", "3", "0"]
    assert [attempt.tried for attempt in again] == [1, 1, 1, 2]


def test_a_token_grows_and_an_old_one_settles_nothing(store: Store) -> None:
    ((id, _),) = store.add(tasks(1))
    worker = store.register()
    tokens = []
    for _ in range(3):
        attempt = claim_one(store, worker)
        tokens.append(attempt.token)
        assert store.settle([given_back(attempt)]) == [True]
        assert store.settle([done(attempt)]) == [False]
        assert not store.report(id, attempt.token, "[1, 2]")
    assert tokens == sorted(set(tokens))
    assert state(store, id) == "ready"


@pytest.mark.parametrize("id", [None, "mine"])
@pytest.mark.parametrize("ending", ["done", "failed", "delayed"])
def test_a_late_ending_is_refused_while_another_worker_has_the_task(store: Store, id: str | None, ending: str) -> None:
    store.add([NewTask("1", id=id)])
    late = claim_one(store, store.register())
    store.settle([given_back(late)])
    attempt = claim_one(store, store.register())
    assert store.settle([Ending(late.id, late.token, ending, 5)]) == [False]
    assert state(store, late.id) == "running"
    assert store.settle([done(late), done(attempt)]) == [False, True]
    assert state(store, late.id) == "done"


def test_how_a_task_ended_is_kept(store: Store) -> None:
    store.add([NewTask("1", id="a", timeout=3, key="k", limit=2), NewTask("2", id="b")])
    worker = store.register()
    a, b = store.claim(worker, 2)
    assert store.report("a", a.token, '[1, 2, "x"]')
    store.settle([done(a, result_json='"r"')])
    store.settle([Ending("b", b.token, "failed", error="e", traceback="t", output="o")])
    one, two = store.get(["a", "b"])
    assert one is not None and two is not None
    assert (one.state, one.result, one.progress, one.worker) == ("done", "r", (1, 2, "x"), worker.name)
    assert (one.timeout, one.key, one.limit, one.tried, one.token) == (3, "k", 2, 1, a.token)
    assert (two.state, two.error, two.traceback, two.output) == ("failed", "e", "t", "o")
    assert one.started_at is not None and one.ended_at is not None and one.put_at <= one.started_at <= one.ended_at
    assert store.get(["c"]) == [None]


def test_earlier_attempts_are_kept_in_the_history(store: Store) -> None:
    ((id, _),) = store.add([NewTask("1", attempts=100)])
    worker = store.register()
    for number in range(30):
        attempt = claim_one(store, worker)
        store.settle([Ending(id, attempt.token, "delayed", error=f"error {number}")])
    (found,) = store.get([id])
    assert found is not None
    assert [past["error"] for past in found.history] == [f"error {number}" for number in range(10, 30)]
    assert {past["state"] for past in found.history} == {"retried"}


def test_endings_are_settled_before_the_claim_of_the_same_call(store: Store) -> None:
    store.add(tasks(3, key="k"))
    worker = store.register()
    attempt = claim_one(store, worker)
    (following,) = store.claim(worker, 5, endings=[done(attempt)])
    assert following.payload_json == "1"
    assert state(store, attempt.id) == "done"


def test_racing_processes_claim_every_task_once(store: Store) -> None:
    store.add(tasks(2000))

    def work(number: int) -> list[str]:
        worker = store.register()
        found = []
        while attempts := store.claim(worker, 1 + number, reserve=True):
            assert all(store.settle([done(attempt) for attempt in attempts]))
            found += [attempt.id for attempt in attempts]
        worker.close()
        return found

    found = [id for ids in race(4, work) for id in ids]
    assert len(found) == len(set(found)) == 2000
    assert store.count()["done"] == 2000


# Delays, keys and dependencies.


def next_attempt(store: Store, worker: Registration) -> Attempt:
    """Wait for a task as a worker does."""
    deadline = monotonic() + PATIENCE
    while monotonic() < deadline:
        found = store.claim(worker, 1, idle=True)
        if found:
            return found[0]
        store.wait(worker, PATIENCE)
    raise AssertionError("no task came")


def test_a_delayed_task_comes_when_it_is_due(store: Store) -> None:
    worker = store.register()
    store.add([NewTask('"first"')])  # what the first claim prepares does not count
    store.settle([done(claim_one(store, worker))])
    began = monotonic()
    store.add([NewTask('"late"', delay=1.0), NewTask('"never"', delay=10_000), NewTask('"now"')])
    assert claim_one(store, worker).payload_json == '"now"'
    late = next_attempt(store, worker)
    assert late.payload_json == '"late"'
    assert monotonic() - began >= 1.0
    store.settle([Ending(late.id, late.token, "delayed", 0.1)])
    (stored,) = store.get([late.id])
    assert stored is not None and stored.waits == "delayed" and stored.due_in is not None and stored.due_in <= 0.1
    assert next_attempt(store, worker).id == late.id
    assert store.count()["delayed"] == 1


def test_a_key_limits_how_many_run_at_a_time(store: Store) -> None:
    store.add(tasks(5, key="k", limit=2))
    store.add([NewTask('"other"'), NewTask('"another key"', key="j")])
    worker = store.register()
    first = store.claim(worker, 10)
    assert [attempt.payload_json for attempt in first] == ["0", "1", '"other"', '"another key"']
    assert store.count()["parked"] == 3
    store.settle([done(first[1])])
    (following,) = store.claim(worker, 10)
    assert following.payload_json == "2"
    store.settle([given_back(following)])
    assert claim_one(store, worker).payload_json == "2"
    store.cancel(Selection(ids=[first[0].id]))
    store.settle([Ending(first[0].id, first[0].token, "cancelled")])
    assert claim_one(store, worker).payload_json == "3"


def test_racing_workers_keep_to_the_limit_of_a_key(store: Store, in_memory: Path) -> None:
    store.add(tasks(200, key="k", limit=2))
    room = in_memory / "inside"
    room.mkdir()

    def work(number: int) -> int:
        worker, most = store.register(), 0
        while True:
            attempts = store.claim(worker, 1)
            if not attempts:
                if not store.count()["parked"] + store.count()["ready"]:
                    return most
                continue
            path = room / f"{number}"
            path.touch()
            most = max(most, len(list(room.iterdir())))
            path.unlink()
            assert store.settle([done(attempts[0])]) == [True]

    assert max(race(4, work)) <= 2
    assert store.count()["done"] == 200


def test_a_task_that_was_reserved_and_given_back_does_not_wait_for_its_rate_again(store: Store) -> None:
    store.add([NewTask("1", key="k", limit=0, interval=3600.0)])
    worker = store.register()
    (attempt,) = store.claim(worker, 1, reserve=True)
    store.settle([Ending(attempt.id, attempt.token, "delayed", counts=False)])
    (again,) = store.claim(worker, 1)
    assert (again.id, again.tried) == (attempt.id, 1)
    store.settle([done(again)])


def test_a_rate_spaces_the_starts_of_tasks_with_a_key(store: Store) -> None:
    ids = [id for id, _ in store.add(tasks(3, key="k", limit=0, interval=1000))]
    worker = store.register()
    store.settle([done(claim_one(store, worker))])
    assert store.claim(worker, 5) == []
    second, third = store.get(ids[1:])
    assert second is not None and third is not None
    assert second.due_in is not None and 500 < second.due_in <= 1000
    assert store.count()["parked"] == 1


def test_all_tasks_with_a_rate_come_in_the_end(store: Store) -> None:
    store.add(tasks(3, key="k", limit=0, interval=0.05))
    worker = store.register()
    for number in range(3):
        attempt = next_attempt(store, worker)
        assert attempt.payload_json == f"{number}"
        store.settle([done(attempt)])


def pass_delay(store: Store, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the engine shows a later moment from now on."""
    real = store.now
    monkeypatch.setattr(store, "now", lambda: real() + seconds)


def test_tasks_with_a_rate_do_not_start_together_after_a_time_without_claims(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [id for id, _ in store.add(tasks(5, key="k", limit=0, interval=1000))]
    worker = store.register()
    store.set_paused(True)
    for _ in range(3):
        pass_delay(store, 2000, monkeypatch)
        assert store.claim(worker, 5) == []
    store.set_paused(False)
    assert [attempt.id for attempt in store.claim(worker, 5)] == ids[:1]
    pass_delay(store, 5000, monkeypatch)
    assert [attempt.id for attempt in store.claim(worker, 5)] == ids[1:2]


def test_cancelled_tasks_do_not_delay_others_with_their_rate(store: Store) -> None:
    ids = [id for id, _ in store.add(tasks(50, key="k", limit=0, interval=1000))]
    worker = store.register()
    (attempt,) = store.claim(worker, 1)
    for id in ids[1:-1]:
        assert store.cancel(Selection(ids=[id])) == 1
    (last,) = store.get(ids[-1:])
    assert last is not None and last.due_in is not None and last.due_in <= 1000
    store.settle([done(attempt)])


def test_all_tasks_with_a_rate_are_cancelled(store: Store) -> None:
    store.add(tasks(700, key="k", limit=0, interval=1000))
    store.add(tasks(600, key="k", limit=0, interval=1000, priority=1))
    assert store.cancel(Selection()) == 1300


@pytest.mark.parametrize("ends", ["retried", "killed"])
def test_an_attempt_that_failed_counts_towards_the_rate(store: Store, ends: str) -> None:
    (id, _), _ = store.add(tasks(2, key="k", limit=0, interval=1000))
    worker = store.register()
    (attempt,) = store.claim(worker, 1)
    assert attempt.id == id
    retries = Retries()
    ending = retries.orphaned(attempt) if ends == "killed" else retries.failed(attempt, "error", 0.0)
    assert store.settle([ending]) == [True]
    assert store.claim(worker, 5) == []
    assert store.count() | {"delayed": 1, "parked": 1} == store.count()


def test_a_task_starts_when_the_tasks_before_it_are_done(store: Store) -> None:
    store.add([NewTask('"a"', id="a"), NewTask('"b"', id="b")])
    store.add([NewTask('"c"', id="c", after=("a", "b")), NewTask('"d"', id="d", after=("c",))])
    assert (state(store, "c"), state(store, "d")) == ("blocked", "blocked")
    worker = store.register()
    a, b = store.claim(worker, 9)
    store.settle([done(a)])
    assert store.claim(worker, 9) == []
    store.settle([done(b)])
    c = claim_one(store, worker)
    assert c.id == "c"
    store.settle([done(c)])
    assert claim_one(store, worker).id == "d"
    store.add([NewTask('"e"', id="e", after=("a",))])
    assert claim_one(store, worker).id == "e"


def test_a_task_is_cancelled_if_a_task_before_it_fails(store: Store) -> None:
    store.add([NewTask('"a"', id="a")])
    store.add([NewTask('"b"', id="b", after=("a",)), NewTask('"d"', id="d")])
    store.add([NewTask('"c"', id="c", after=("b", "d"))])
    worker = store.register()
    a, d = store.claim(worker, 9)
    store.settle([Ending("a", a.token, "failed", error="e")])
    assert (state(store, "b"), state(store, "c")) == ("cancelled", "cancelled")
    store.settle([done(d)])
    assert store.claim(worker, 9) == []
    store.add([NewTask('"e"', id="e", after=("a",))])
    assert state(store, "e") == "cancelled"
    (b,) = store.get(["b"])
    assert b is not None and b.error == "task a is failed"


def test_a_task_cannot_wait_for_an_unknown_one(store: Store) -> None:
    with pytest.raises(ValueError, match="there is no such task"):
        store.add([NewTask('"fine"'), NewTask('"a"', after=("nobody",))])
    assert sum(store.count().values()) == 0


# Changing.


def test_waiting_tasks_are_cancelled_and_running_ones_are_marked(store: Store) -> None:
    store.add([NewTask('"r"', id="r"), NewTask('"w"', id="w"), NewTask('"d"', id="d", delay=9), NewTask('"x"', id="x")])
    worker = store.register()
    r = claim_one(store, worker)
    assert store.cancel(Selection(ids=["r", "w", "d", "nobody"])) == 3
    assert (state(store, "r"), state(store, "w"), state(store, "d")) == ("running", "cancelled", "cancelled")
    assert [(task.id, task.token, task.cancelling) for task in store.tasks(["running"])] == [("r", r.token, True)]
    assert store.settle([Ending("r", r.token, "delayed", 5)]) == [True]
    assert state(store, "r") == "cancelled"
    assert store.cancel(Selection(ids=["r"])) == 0
    x = claim_one(store, worker)
    store.cancel(Selection(ids=["x"]))
    store.settle([done(x)])
    assert state(store, "x") == "done"


def test_running_tasks_that_were_cancelled_are_known_with_their_workers(store: Store) -> None:
    store.add([*tasks(2), NewTask("3", id="mine")])
    worker = store.register()
    first, _, third = store.claim(worker, 3)
    assert store.cancel(Selection(ids=[first.id, "mine"])) == 2
    assert store.cancelling() == {(first.id, first.token): worker.name, ("mine", third.token): worker.name}
    store.settle([done(first), done(third)])
    assert store.cancelling() == {}


def test_all_tasks_of_some_states_are_cancelled(store: Store) -> None:
    store.add(tasks(1200))
    store.add(tasks(3, delay=100))
    assert store.cancel(Selection(states=["ready"])) == 1200
    assert store.count()["delayed"] == 3
    assert store.count()["cancelled"] == 1200


def test_an_ended_task_is_tried_again_with_all_attempts(store: Store) -> None:
    store.add([NewTask('"a"', id="a", attempts=1), NewTask('"b"', id="b")])
    worker = store.register()
    a = claim_one(store, worker)
    assert store.retry(Selection(ids=["a"])) == 0
    store.settle([Ending("a", a.token, "failed", error="e")])
    assert store.retry(Selection(ids=["a", "b"])) == 1
    assert [attempt.id for attempt in store.claim(worker, 5)] == ["b", "a"]
    (found,) = store.get(["a"])
    assert found is not None and found.tried == 1 and found.token > a.token
    assert [past["error"] for past in found.history] == ["e"]


def test_ended_tasks_are_deleted_except_the_newest(store: Store) -> None:
    store.add(tasks(10))
    worker = store.register()
    attempts = store.claim(worker, 10)
    store.settle([done(attempt) for attempt in attempts[:4]])
    assert store.delete(Selection(states=ENDED, ended_before=time() - 100)) == 0
    assert store.delete(Selection(states=ENDED)) == 4
    store.settle([done(attempt) for attempt in attempts[4:]])
    store.delete(Selection(states=ENDED))
    newest = attempts[-1].id
    ((id, _),) = store.add(tasks(1))
    assert id not in {attempt.id for attempt in attempts}
    assert newest not in {id}


def test_pruning_goes_through_all_tasks_and_keeps_recent_ones(store: Store) -> None:
    store.add(tasks(30))
    worker = store.register()
    attempts = store.claim(worker, 20)
    store.settle([done(attempt) for attempt in attempts[:10]])
    store.settle([Ending(attempt.id, attempt.token, "failed", error="e") for attempt in attempts[10:15]])
    assert store.prune({"done": time() - 100}, 7) == 0
    moments = {"done": time() + 100}
    assert [store.prune(moments, 7) for _ in range(5)] == [7, 3, 0, 0, 0]
    counts = store.count()
    assert (counts["done"], counts["failed"], counts["running"], counts["ready"]) == (0, 5, 5, 10)


def test_a_short_lived_process_prunes_behind_many_tasks_that_are_kept(store: Store) -> None:
    store.add([*tasks(20), *tasks(1, priority=1), *tasks(1)])
    (attempt,) = store.claim(store.register(), 1)
    store.settle([done(attempt)])
    assert store.prune({"done": time() + 100}, 7) == 1
    assert store.get([attempt.id]) == [None]


def test_a_task_that_ended_again_does_not_keep_later_tasks_from_being_pruned(store: Store) -> None:
    ids = [id for id, _ in store.add(tasks(4))]
    worker = store.register()
    store.settle([done(attempt) for attempt in store.claim(worker, 3)])
    moment = time()
    assert store.retry(Selection(ids=ids[:1])) == 1
    (attempt,) = [one for one in store.claim(worker, 4) if one.id == ids[0]]
    store.settle([done(attempt)])
    assert store.prune({"done": moment}, 500) == 2
    assert [task is not None for task in store.get(ids)] == [True, False, False, True]


def test_a_paused_queue_gives_no_task(store: Store) -> None:
    store.add(tasks(1))
    worker = store.register()
    store.set_paused(True)
    store.set_paused(True)
    assert store.is_paused()
    assert store.claim(worker, 1, idle=True) == []
    store.set_paused(False)
    assert not store.is_paused()
    assert store.wait(worker, PATIENCE) is Woken.TASK
    assert len(store.claim(worker, 1)) == 1


# Schedules.


def test_racing_processes_add_the_task_of_a_moment_once(store: Store) -> None:
    assert not store.set_schedule("s", '{"x": 1}')
    added = race(8, lambda number: store.add_moment("s", 1000.0, NewTask('"p"', id="s@1000")))
    assert sorted(added) == [False] * 7 + [True]
    assert store.schedules() == {"s": ('{"x": 1}', 1000.0)}
    assert not store.add_moment("s", 999.0, NewTask('"p"', id="s@999"))
    assert store.add_moment("s", 1001.0, NewTask('"p"', id="s@1001"))
    assert store.set_schedule("s", None)
    assert not store.add_moment("s", 1002.0, NewTask('"p"', id="s@1002"))
    assert store.count()["ready"] == 2


def test_a_moment_that_a_wrong_clock_added_does_not_stop_a_schedule(store: Store) -> None:
    store.set_schedule("s", "{}")
    assert store.add_moment("s", time() + 1e9, NewTask('"p"', id="far ahead"))
    assert store.add_moment("s", time(), NewTask('"p"', id="now"))


# Workers.


def test_the_tasks_of_a_killed_worker_are_orphans_and_reserved_ones_have_not_begun(store: Store) -> None:
    store.add(tasks(5))
    with claimed_by_another_process(store, 3, reserve=True) as (pid, ids):
        assert store.orphans() == []
        os.kill(pid, signal.SIGKILL)
        until(store.orphans)  # a server learns a moment later that a process has died
        found = store.orphans()
        assert [attempt.id for attempt in found] == ids
        assert [attempt.begun for attempt in found] == [True, False, False]
        assert store.settle([Retries().orphaned(attempt) for attempt in found]) == [True] * 3
        assert store.orphans() == []
    worker = store.register()
    assert [(attempt.payload_json, attempt.tried) for attempt in store.claim(worker, 9)] == [
        ("1", 1),
        ("2", 1),
        ("3", 1),
        ("4", 1),
        ("0", 2),
    ]


def test_tasks_that_were_not_reserved_have_all_begun(store: Store) -> None:
    store.add(tasks(3))
    with claimed_by_another_process(store, 3) as (pid, _):
        os.kill(pid, signal.SIGKILL)
        until(store.orphans)
        assert [attempt.begun for attempt in store.orphans()] == [True, True, True]


def test_a_worker_that_closes_leaves_no_orphan(store: Store) -> None:
    store.add(tasks(1))

    def work() -> None:
        worker = store.register()
        attempt = claim_one(store, worker)
        store.settle([done(attempt)])
        worker.close()

    with child(work):
        pass
    assert store.orphans() == []


def test_an_idle_worker_wakes_for_a_task_and_for_a_death(store: Store) -> None:
    store.add(tasks(1))
    with claimed_by_another_process(store, 1) as (pid, _):
        worker = store.register()
        assert store.claim(worker, 1, idle=True) == []
        with child(lambda: store.add([NewTask('"new"')])):
            attempt = next_attempt(store, worker)
        assert attempt.payload_json == '"new"'
        assert store.claim(worker, 1, idle=True) == []
        while store.wait(worker, 0.05) is not Woken.TIME:
            pass  # a death of an earlier process may still be reported
        assert store.claim(worker, 1, idle=True) == []
        os.kill(pid, signal.SIGKILL)
        deadline = monotonic() + PATIENCE
        while not (orphans := store.orphans()):
            assert monotonic() < deadline
            store.wait(worker, PATIENCE)
        store.settle([Retries().orphaned(one) for one in orphans])
        assert next_attempt(store, worker).tried == 2


def test_a_wait_ends_when_another_descriptor_is_readable(store: Store) -> None:
    reader, writer = os.pipe()
    worker = store.register()
    assert store.claim(worker, 1, idle=True) == []
    os.write(writer, b"x")
    deadline = monotonic() + PATIENCE
    while (woken := store.wait(worker, PATIENCE, reader)) is not Woken.OTHER:
        assert monotonic() < deadline, woken
    os.close(reader)
    os.close(writer)


def test_a_change_is_noticed(store: Store) -> None:
    store.add(tasks(1))
    worker = store.register()
    attempt = claim_one(store, worker)
    changes = store.changes()
    with child(lambda: store.settle([done(attempt)])):
        deadline = monotonic() + PATIENCE
        while state(store, attempt.id) != "done":
            assert monotonic() < deadline
            changes.wait(PATIENCE)
    changes.close()


def test_a_forked_child_has_its_own_connection(store: Store) -> None:
    store.add(tasks(2))
    worker = store.register()
    attempt = claim_one(store, worker)

    def work() -> None:
        assert claim_one(store, store.register()).payload_json == "1"
        worker.close()  # of the parent: nothing happens

    for _ in range(3):
        with child(lambda: store.get(["x"])):
            pass
    with child(work):
        pass
    assert store.settle([done(attempt)]) == [True]
    until(store.orphans)  # a server learns a moment later that a process has ended
    assert [one.payload_json for one in store.orphans()] == ["1"]


# Killed at every step of every operation.


def op_add(store: Store) -> None:
    store.add([NewTask('"new"', id="n1"), NewTask('"new"', id="n2", delay=5), NewTask('"new"', id="n3", key="k")])


def op_add_after(store: Store) -> None:
    store.add([NewTask('"new"', id="n1", after=("a", "run")), NewTask('"new"', id="n2", after=("n1",))])


def op_claim(store: Store) -> None:
    store.claim(store.register(), 3, reserve=True)


def op_claim_idle(store: Store) -> None:
    worker = store.register()
    store.claim(worker, 100)
    store.claim(worker, 1, idle=True)


def of_run(store: Store, ending: str, **more: Any) -> Ending:
    (found,) = store.get(["run"])
    assert found is not None
    return Ending("run", found.token, ending, **more)


def op_end(store: Store) -> None:
    (found,) = store.get(["run"])
    assert found is not None and found.worker is not None
    store.end(lambda: [str(found.worker)], lambda running: [Ending(one.id, one.token, "failed") for one in running])


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "add": op_add,
    "add tasks that wait for others": op_add_after,
    "claim": op_claim,
    "claim until idle": op_claim_idle,
    "complete": lambda store: store.settle([of_run(store, "done", result_json="1")]),
    "fail": lambda store: store.settle([of_run(store, "failed", error="e")]),
    "try again": lambda store: store.settle([of_run(store, "delayed", error="e")]),
    "give back": lambda store: store.settle([of_run(store, "delayed", counts=False)]),
    "report": lambda store: store.report("run", of_run(store, "done").token, "[1, 2]"),
    "cancel": lambda store: store.cancel(Selection(ids=["run", "a", "parked", "key"])),
    "retry": lambda store: store.retry(Selection(states=["failed"])),
    "delete": lambda store: store.delete(Selection(states=["failed"])),
    "prune": lambda store: store.prune({"failed": time() + 1}, 10),
    "end the tasks of a worker": op_end,
    "schedule": lambda store: store.set_schedule("s", "{}"),
    "unschedule": lambda store: store.set_schedule("old", None),
    "add a moment": lambda store: store.add_moment("old", 5.0, NewTask('"m"', id="old@5")),
    "pause": lambda store: store.set_paused(True),
}


def prepare(store: Store) -> Registration:
    """A failed task, a running one with one that waits for it, ready ones, three with a key, and two with a rate."""
    worker = store.register()
    store.add([NewTask('"f"', id="failed", attempts=1)])
    failed = claim_one(store, worker)
    store.settle([Ending("failed", failed.token, "failed", error="e")])
    store.add([NewTask('"run"', id="run", key="key")])
    claim_one(store, worker)
    store.add([NewTask('"later"', id="later", after=("run",)), NewTask('"parked"', id="parked", key="key")])
    store.add([NewTask('"a"', id="a"), NewTask('"b"', id="b"), NewTask('"key"', id="key", key="other")])
    store.add(tasks(2, key="rate", limit=0, interval=0.001))
    store.set_schedule("old", '{"o": 1}')
    return worker


def picture(store: Store) -> object:
    """Everything that an operation may change, without what differs from run to run."""
    shown = []
    for task in store.tasks():
        shown.append((task.id, state_of(task), task.tried, task.token, task.error, task.result, task.progress))
        shown[-1] += (task.cancelling, len(task.history))
    return shown, store.schedules(), store.is_paused(), {state: store.count()[state] for state in STATES}


def killed_at(step: int, operation: Callable[[Store], object], where: str, patch: pytest.MonkeyPatch) -> bool:
    """Run the operation in a process that is killed before its statement number `step`. False: it had fewer."""

    def work() -> None:
        store = open_store(where, durable=False)
        left = [step]

        def counting(run: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return run(*arguments)

            return counted

        if isinstance(store, sqlite.SqliteStore):
            connection = store._connection()
            connection.run = counting(connection.run)  # type: ignore[method-assign]
            connection.run_alone = counting(connection.run_alone)  # type: ignore[method-assign]
        else:
            real = Transaction.__init__

            def init(self: Transaction, run: Callable[..., Any], now: float) -> None:
                real(self, counting(run), now)

            Transaction.__init__ = init  # type: ignore[method-assign]
        operation(store)

    status = exit_status(forked(work))
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_killed_process_has_done_all_of_an_operation_or_nothing(
    name: str, where: str, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OPERATIONS[name]
    store = open_store(where, durable=False)
    workers = [prepare(store)]
    for step in range(1, 1000):
        before = picture(store)
        was_killed = killed_at(step, operation, where, monkeypatch)
        recover(store)
        after = picture(store)
        check_counts(store)
        if not was_killed:
            break
        if after != before and name not in ("claim", "claim until idle"):
            # It was killed after the commit. From here on, each run finds the work done.
            assert step > 1
            break
    else:
        raise AssertionError("it never came to an end")
    # Whatever happened, the queue goes on: all its tasks can be done.
    store.set_paused(False)
    store.settle([of_run(store, "done")])
    worker = store.register()

    def all_done() -> bool:
        recover(store)  # a server may have learnt only now that the process has ended
        assert all(store.settle([done(attempt) for attempt in store.claim(worker, 10)]))
        return not any(store.count(("ready", "running", "parked", "blocked")).values())

    until(all_done)
    for one in workers:
        one.close()
    store.close()


def recover(store: Store) -> None:
    """What a killed process had claimed goes back, as if it had not begun: then the picture is that of before."""
    while orphans := store.orphans():
        store.settle([given_back(attempt) for attempt in orphans])


def test_a_task_that_ended_while_the_clock_was_wrong_does_not_keep_others_from_being_pruned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(tasks(3))
    worker = store.register()
    first, second, _ = store.claim(worker, 3)
    with monkeypatch.context() as patch:
        for module in ("sql", "postgres"):
            patch.setattr(f"holdfast.tasks.{module}.time", lambda: time() + 1e8)
        patch.setattr("time.time", lambda: time() + 1e8)  # of the other modules
        store.settle([done(first)])
        store.prune({"done": time() + 1e8 - 1000}, 10)
    store.settle([done(second)])
    until(lambda: store.prune({"done": time() - 0.01}, 10) == 1)
    assert [task is None for task in store.get([first.id, second.id])] == [False, True]
