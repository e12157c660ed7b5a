"""Tasks on sheets: what has no file of its own is as safe as what has one, and gets one when it needs it."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Child, all_in_children, claim_all, claimed, die_before_call, in_child, survives, until

from holdfast import LockLost, NotLocked, owner, system
from holdfast.tasks import (
    Claim,
    NoSuchTask,
    QueueFull,
    TaskQueue,
    Worker,
    finder,
    idle,
    journal,
    lines,
    putting,
    sequence,
    sheets,
)
from holdfast.tasks import queue as queue_module
from holdfast.tasks.putting import Putter
from holdfast.tasks.sheets import Sheet, Sheets
from holdfast.tasks.slots import Slot, Slots
from holdfast.tasks.verdict import Verdict

pytestmark = pytest.mark.skipif(not system.TELLS_NAMES, reason="there are no sheets here")


def leave_alone(queue: TaskQueue) -> None:
    """As if nobody had written to the sheets for long: only then is one past."""
    for path in Path(queue.path).glob("sheets/*/waiting/*"):
        os.utime(path, (1, 1))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A descriptor that can be read as soon as somebody, also a child, has registered for wake-ups and sleeps.

    Nothing but an event wakes it: the look every second is put off.
    """
    monkeypatch.setattr(idle, "RECHECK_S", 600.0)
    reader, writer = os.pipe()
    wait = idle.Watches.wait

    def tell(watches: idle.Watches, *words: Any) -> bool:
        os.write(writer, b"!")
        return wait(watches, *words)

    monkeypatch.setattr(idle.Watches, "wait", tell)
    yield reader
    os.close(reader)
    os.close(writer)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that are read, of whatever sheet."""
    read: list[int] = []
    on_page = Sheet._on_page

    def seen(sheet: Sheet, page: int) -> Any:
        read.append(page)
        return on_page(sheet, page)

    monkeypatch.setattr(Sheet, "_on_page", seen)
    return read


def sheet(queue: TaskQueue, state: str = "waiting") -> Path:
    (path,) = Path(queue.path).glob(f"sheets/*/{state}/*")
    return path


def lines_of(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line]


def files_of(queue: TaskQueue) -> list[str]:
    return sorted(os.listdir(f"{queue.path}/tasks"))


def states(queue: TaskQueue) -> dict[str, int]:
    return {state: number for state, number in queue.stats().items() if number}


def test_a_task_from_its_line_to_its_end(queue: TaskQueue, jobs: Path) -> None:
    id = queue.put({"url": "…"}, attempts=2, timeout=7)
    (line,) = lines_of(sheet(queue))
    assert line[:18] == b" " * 18
    assert json.loads(line)["id"] == id and id.startswith("1-")
    assert queue.get(id).state == "pending" and queue.get(id).timeout == 7 and id in queue
    claim = claimed(queue)
    (slot,) = os.listdir(jobs / "slots")
    assert lines_of(sheet(queue))[0][:18] == b"x" + slot.encode() + b" "
    assert (claim.id, claim.payload, claim.token, claim.task.state, claim.task.tried) == (
        id,
        {"url": "…"},
        1,
        "running",
        1,
    )
    running = queue.get(id)
    assert running.state == "running" and running.worker == f"{os.getpid()}@{owner.me().host}" and running.tried == 1
    assert queue.ids("running") == [id] and not queue.is_empty()
    claim.complete([17])
    done = queue.get(id)
    assert (done.state, done.result, done.tried, done.attempts) == ("done", [17], 1, 2)
    assert done.started_at is not None and done.ended_at is not None and done.started_at <= done.ended_at
    assert [said["is"] for said in done.history] == ["running", "done"]
    assert queue.ids("done") == [id] and [task.id for task in queue] == [id] and queue.is_empty()
    assert states(queue) == {"done": 1} and files_of(queue) == []
    with pytest.raises(NotLocked, match="has ended"):
        claim.complete()


def test_all_kinds_are_taken_in_order(queue: TaskQueue) -> None:
    for number in range(300):
        queue.put(number, id=f"own.{number}" if number % 30 == 0 or number == 41 else None, priority=number % 2)
    expected = [*range(1, 300, 2), *range(0, 300, 2)]
    assert [queue.get(id).payload for id in queue.ids("pending")] == expected
    assert claim_all(queue) == expected


def test_two_who_take_turns_take_them_in_order(queue: TaskQueue, jobs: Path) -> None:
    queue.put_all(range(20))
    both = (queue, TaskQueue(jobs))
    claims = [claimed(both[number % 2]) for number in range(20)]
    assert [claim.payload for claim in claims] == list(range(20))


def test_what_is_given_back_comes_first_again(queue: TaskQueue) -> None:
    first, second = queue.put("first"), queue.put("second")
    claimed(queue).give_back("not now")
    assert queue.get(first).error == "not now" and queue.get(first).tried == 0
    assert files_of(queue) == [first] and queue.ids("pending") == [first, second]
    queue.taker.finder.forget()  # else it is believed for a moment that what was seen comes next
    assert claim_all(queue) == ["first", "second"] and states(queue) == {"done": 2}


def test_what_fails_gets_a_file(queue: TaskQueue) -> None:
    id = queue.put("x", attempts=2)
    assert claimed(queue).fail(ValueError("no"), delay=0)
    task = queue.get(id)
    assert task.state == "pending" and task.tried == 1 and "ValueError" in str(task.traceback)
    assert not claimed(queue).fail("no, again")
    assert queue.get(id).state == "failed" and states(queue) == {"failed": 1} and files_of(queue) == [id]
    queue.retry(id)
    assert claim_all(queue) == ["x"] and queue.get(id).state == "done" and states(queue) == {"done": 1}
    assert [task.id for task in queue] == [id]


def test_progress_is_kept(queue: TaskQueue) -> None:
    id = queue.put("x")
    claim = claimed(queue)
    claim.progress(3, 10, "third")
    assert queue.get(id).progress == (3, 10, "third") and queue.get(id).state == "running"
    claim.progress(10, 10, "all")  # too soon to be written at once
    claim.complete("result")
    done = queue.get(id)
    assert (done.state, done.result, done.progress) == ("done", "result", (10, 10, "all")) and files_of(queue) == [id]


def test_a_slot_is_used_again_by_tasks_of_all_lengths(queue: TaskQueue, jobs: Path) -> None:
    sizes = (10, 3900, 1, 2000, 3)
    ids = [queue.put("x" * size) for size in sizes]
    for id, size in zip(ids, sizes, strict=True):
        claim = claimed(queue)
        running = queue.get(id)
        assert (claim.id, running.payload, len(running.history)) == (id, "x" * size, 1)
        claim.complete(size)
        assert len(os.listdir(jobs / "slots")) == 1
    assert [queue.get(id).result for id in ids] == list(sizes)


@pytest.mark.parametrize("size", [500, 1361, 2047, 3000, 3700, 3900, 3960, 4000, 4096, 8192, 65_536, 2_000_000])
def test_lines_at_the_end_of_a_page(queue: TaskQueue, jobs: Path, size: int) -> None:
    """Lines begin and end anywhere; what is longer than a page has a file."""
    payloads = [f"{number} " + "\n\u2028\"}'" + "ü" * (size // 2 + number) for number in range(9)]
    ids = [queue.put(payload) for payload in payloads]
    other = TaskQueue(jobs)
    assert [queue.get(id).payload for id in ids] == payloads
    found = []
    while (claim := (queue if len(found) % 2 else other).claim()) is not None:
        found.append(claim.payload)
        claim.complete()
    assert sorted(found) == sorted(payloads) and states(queue) == {"done": 9}


def test_what_looks_like_a_line_in_a_payload(queue: TaskQueue) -> None:
    trap = " " * 18 + '{"id": "1-0123456789abcdef", "payload": 1}'
    ids = [queue.put({"text": f"\n{trap}\n", "id": "2-0123456789abcdef", "is": "done"}) for _ in range(3)]
    assert [task.id for task in queue] == ids and states(queue) == {"pending": 3}
    for id in ids:
        claim = claimed(queue)
        assert claim.id == id
        claim.complete({"is": "running", "text": f"\n{id} {{}}\n"})
    assert states(queue) == {"done": 3} and all(queue.get(id).result["is"] == "running" for id in ids)


def test_many_on_several_sheets(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(2500))
    assert len(set(ids)) == 2500 and queue.ids("pending") == ids
    assert sorted(os.listdir(jobs / "sheets/0/waiting")) == ["000000000", "000000001", "000000002"]
    assert [queue.get(id).payload for id in ids[::500]] == list(range(0, 2500, 500))
    assert claim_all(TaskQueue(jobs)) == list(range(2500))
    leave_alone(queue)
    assert queue.claim() is None and sorted(os.listdir(jobs / "sheets/0/past")) == ["000000000", "000000001"]
    assert queue.stats()["done"] == 2500 and queue.get(ids[3]).state == "done" and queue.ids("done") == ids
    assert queue.stats()["done"] == 2500  # by what was counted before
    later = queue.put("later")
    assert later.startswith("2501-") and claim_all(queue) == ["later"]


def test_many_are_synced_once(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TaskQueue(jobs)
    queue.put("so that the sheet is there")
    synced: list[str] = []
    monkeypatch.setattr(system, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(system, "fsync", lambda fd: pytest.fail("that is slow"))
    queue.put_all(range(500))
    assert synced == [str(sheet(queue))]
    claim = claimed(queue)
    assert len(synced) == 1
    monkeypatch.undo()
    monkeypatch.setattr(system, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    claim.complete()
    assert synced[1:] == [str(jobs / "sheets/0/done/000000000")]


def test_an_id_of_a_line_is_put_again(queue: TaskQueue) -> None:
    id = queue.put("x")
    assert queue.put("y", id=id) == id and states(queue) == {"pending": 1}
    claim = claimed(queue)
    assert queue.put("y", id=id) == id and states(queue) == {"running": 1}
    claim.complete()
    assert queue.put("y", id=id) == id and claim_all(queue) == [] and queue.get(id).payload == "x"
    other = "77-0123456789abcdef"  # as if it came from another queue
    assert queue.put("z", id=other) == other and claim_all(queue) == ["z"] and queue.get(other).state == "done"


def test_max_pending_counts_lines(jobs: Path) -> None:
    queue = TaskQueue(jobs, max_pending=3)
    for number in range(3):
        queue.put(number)
    with pytest.raises(QueueFull):
        queue.put(3)
    claimed(queue).complete()
    queue.put(3)
    with pytest.raises(QueueFull):
        TaskQueue(jobs, max_pending=3).put_all([4, 5])


# Cancel, retry, purge.


def test_cancelled_while_it_waits(queue: TaskQueue) -> None:
    first, second, third = queue.put_all("abc")
    assert queue.cancel(second) and not queue.cancel(second)
    assert queue.get(second).state == "cancelled" and queue.ids("pending") == [first, third]
    assert states(queue) == {"pending": 2, "cancelled": 1}
    assert claim_all(queue) == ["a", "c"] and not queue.cancel(first)
    queue.retry(second)
    assert claim_all(queue) == ["b"] and states(queue) == {"done": 3}


def test_cancelled_while_it_runs(queue: TaskQueue) -> None:
    id = queue.put("x")
    claim = claimed(queue)
    assert not claim.cancelled and queue.cancel(id) and claim.cancelled
    with pytest.raises(NotLocked, match="being worked on"):
        queue.retry(id)
    claim.fail("ended")
    assert queue.get(id).state == "cancelled" and states(queue) == {"cancelled": 1} and claim_all(queue) == []


def test_done_again(queue: TaskQueue) -> None:
    id = queue.put("x")
    with pytest.raises(NotLocked, match="it is pending"):
        queue.retry(id)
    claimed(queue).complete(1)
    queue.retry(id)
    assert queue.get(id).state == "pending" and states(queue) == {"pending": 1}
    claimed(queue).complete(2)
    task = queue.get(id)
    assert (task.state, task.result, task.tried) == ("done", 2, 1) and states(queue) == {"done": 1}
    assert [said["is"] for said in task.history] == ["running", "done", "pending", "running", "done"]
    assert [task.id for task in queue] == [id]


def test_purge(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(1200))
    assert claimed(queue).fail("later", delay=0)
    for _ in range(1100):
        claimed(queue).complete()
    leave_alone(queue)
    assert queue.purge(older_than=100) == 0 and queue.purge(states=["failed"]) == 0
    assert queue.purge() == 1100 and states(queue) == {"pending": 100}
    with pytest.raises(NoSuchTask):
        queue.get(ids[500])
    assert ids[500] not in queue and ids[1150] in queue and queue.recover() == 0
    assert not (jobs / "sheets/0/past").exists() or os.listdir(jobs / "sheets/0/past") == []
    assert os.listdir(jobs / "sheets/0/done") == ["000000001"]
    assert len(claim_all(queue)) == 100 and queue.purge() == 100 and list(queue) == [] and queue.purge() == 0
    assert int(queue.put("next").partition("-")[0]) > 1200


def test_purged_while_somebody_looks(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(10))
    claim_all(queue)
    other = TaskQueue(jobs)
    tasks = iter(other)
    assert next(tasks).id == ids[0]
    assert queue.purge() == 10
    assert len(list(tasks)) in range(10)
    assert list(other) == []


# Those who wait.


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_who_waits_for_the_end_is_woken(jobs: Path, queue: TaskQueue, end: str, waits: int) -> None:
    id = queue.put("x", attempts=1)
    thread = threading.Thread(target=lambda: queue.wait([id]), daemon=True)
    claim = claimed(TaskQueue(jobs)) if end != "cancel" else None
    thread.start()
    os.read(waits, 1)
    if claim is None:
        assert queue.cancel(id)
    else:
        claim.complete() if end == "complete" else claim.fail("no")
    thread.join(30)
    assert not thread.is_alive()


def test_an_idle_worker_is_woken_when_the_last_one_is_done(jobs: Path, waits: int) -> None:
    """It waits for what another one does, which has no file that could be closed."""
    queue = TaskQueue(jobs)
    queue.put_all(["until the other one waits", "at once"])

    def handle(task: Claim) -> None:
        if task.payload != "at once":
            os.read(waits, 1)

    assert Worker(queue, handle, concurrency=2).run(drain=True).done == 2
    assert os.listdir(jobs / "slots") == []


# Those who die.


def test_a_dead_worker(queue: TaskQueue, jobs: Path) -> None:
    id = queue.put("x")
    assert in_child(lambda: claimed(TaskQueue(jobs)).abandon()) is None
    assert queue.get(id).state == "pending", "its worker is dead"
    claim = claimed(queue)
    assert claim.id == id and claim.token == 2 and claim.task.tried == 2 and os.listdir(jobs / "slots") == []
    claim.complete("second")
    assert [said["is"] for said in queue.get(id).history] == ["running", "pending", "running", "done"]
    assert queue.get(id).result == "second" and states(queue) == {"done": 1}


def test_the_last_attempt_of_a_dead_worker(queue: TaskQueue, jobs: Path) -> None:
    id = queue.put("x", attempts=1)
    assert in_child(lambda: claimed(TaskQueue(jobs)).abandon()) is None
    assert queue.claim() is None
    assert queue.get(id).state == "failed" and "worker died" in str(queue.get(id).error)


def test_empty_slots_of_the_dead_are_removed(queue: TaskQueue, jobs: Path) -> None:
    queue.put("x")

    def work() -> None:
        mine = TaskQueue(jobs)
        claimed(mine).complete()
        os.kill(os.getpid(), signal.SIGKILL)

    assert not survives(work) and len(os.listdir(jobs / "slots")) == 1
    assert queue.claim() is None and os.listdir(jobs / "slots") == []


CALLS = (
    *("open_fd", "close", "fstat", "stat", "access", "pread", "pwrite", "write", "rename", "unlink", "link", "mkdir"),
    *("ftruncate", "fsync", "fdatasync", "lock", "lock_byte", "unlock_byte", "name_of_open"),
)
ACTIONS = ["put", "put many", "claim", "complete", "progress", "fail", "give back", "cancel", "retry", "take over"]


@pytest.mark.parametrize("what", [*ACTIONS, "purge", "recover", "shut"])
def test_killed_at_every_call(what: str, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on finds every task that was acknowledged; none is completed twice, or done after it was ended."""
    for module in (putting, sequence, finder, sheets):
        monkeypatch.setattr(module, "IN_A_BUCKET", 5)
    number, ended = 0, False
    while not ended:
        jobs = in_memory / str(number)
        queue = TaskQueue(jobs, retry_after=0.001)
        many = what in ("purge", "shut")
        ids = queue.put_all(range(5 if many else 3)) if what not in ("put", "put many") else []
        if many:
            claim_all(queue)
            queue.put("so that the first sheet is past")
            leave_alone(queue)
        if what == "retry":
            claimed(queue).complete()
        if what in ("take over", "recover"):
            in_child(lambda jobs=jobs: claimed(TaskQueue(jobs)).abandon())
        if what == "recover":
            (slot,) = os.listdir(jobs / "slots")
            os.unlink(jobs / "slots" / slot)
        acknowledged = in_memory / f"{number}.ids"

        def work(jobs: Path = jobs, number: int = number, ids: list[str] = ids, told: Path = acknowledged) -> None:
            mine = TaskQueue(jobs, retry_after=0.001)
            claim = claimed(mine) if what in ("complete", "progress", "fail", "give back") else None
            die_before_call(number, {system: CALLS})
            if what == "put":
                told.write_text(mine.put("x"))
            elif what == "put many":
                told.write_text("\n".join(mine.put_all("abcd")))
            elif what in ("retry", "cancel"):
                getattr(mine, what)(ids[0])
                told.write_text(ids[0])
            elif what in ("purge", "recover"):
                getattr(mine, what)()
            elif what == "shut":
                mine.taker.finder.shut_sheets()
            elif claim is None:
                claimed(mine).abandon()
            elif what == "progress":
                claim.progress(1, 2)
                claim.complete()
            elif what == "fail":
                claim.fail("no", delay=0)
            else:
                claim.complete() if what == "complete" else claim.give_back()

        ended = survives(work)
        queue = TaskQueue(jobs, retry_after=0.001)
        told = acknowledged.read_text().split("\n") if acknowledged.exists() else []
        assert ended == bool(told) or what not in ("put", "put many", "retry", "cancel")
        assert all(id in queue for id in told)
        before = {task.id: task.state for task in queue}
        if what == "recover":
            queue.recover()
        if many:
            leave_alone(queue)
            queue.taker.finder.shut_sheets()
            assert not (jobs / "sheets/0/waiting/000000000").exists()
        if what == "retry":
            again = queue.get(ids[0])
            assert again.state == "pending" or not told
            queue.rescue()  # as every worker does when it begins
        ran = Counter()
        while (claim := queue.claim(timeout=0.02 if what != "purge" else 0)) is not None:
            ran[claim.id] += 1
            claim.complete()
        tasks = {task.id: task for task in queue}
        assert Counter(task.id for task in queue) == Counter(list(tasks)), "none is there twice"
        for id in {*ids, *told}:
            if what == "purge" and id not in tasks:
                assert ran[id] == 0
                continue
            assert tasks[id].state == queue.get(id).state, (number, id)
            ends = [said["is"] for said in tasks[id].history if said.get("is") in ("done", "cancelled")]
            if before.get(id) == "cancelled":
                assert (ends, ran[id]) == (["cancelled"], 0), number
            elif what == "retry" and before.get(id) == "pending" and id == ids[0]:
                assert ends == ["done", "done"], (number, ends)
            else:
                assert ends == ["done"] and ran[id] == (before[id] != "done"), (number, what, ends, ran)
        assert queue.is_empty() and queue.stats()["done"] + queue.stats()["cancelled"] == len(tasks)
        assert all(queue._lines.slots.text(name) == b"" for name in os.listdir(jobs / "slots"))
        shutil.rmtree(jobs)
        number += 1
    assert number > 5


def test_several_who_are_killed(jobs: Path) -> None:
    """Each task has its effect, and is completed once, whoever dies when."""
    queue, number = TaskQueue(jobs, durable=False, retry_after=0.001), 400
    queue.put_all(range(number), attempts=1000)
    effects = jobs.parent / "effects"
    effects.touch()

    def work() -> None:
        mine = TaskQueue(jobs, durable=False, retry_after=0.001)
        fd = os.open(effects, os.O_WRONLY | os.O_APPEND)
        while (claim := mine.claim(timeout=0.05)) is not None:
            os.write(fd, b"%d\n" % claim.payload)
            claim.complete() if claim.payload % 7 else claim.fail("once", delay=0) if claim.task.tried < 2 else (
                claim.complete()
            )

    children: list[Child] = []
    for _ in range(30):
        while len(children) < 3:
            children.append(Child(lambda _: work()))
        before = effects.stat().st_size
        until(lambda before=before: effects.stat().st_size > before or queue.is_empty())
        os.kill(children[0].pid, signal.SIGKILL)
        assert children.pop(0).end()[0] in (0, -signal.SIGKILL)
    assert [child.end()[0] for child in children] == [0] * len(children)
    work()
    tasks = list(queue)
    assert len(tasks) == number and {task.state for task in tasks} == {"done"}
    assert all([said.get("is") for said in task.history].count("done") == 1 for task in tasks)
    seen = Counter(map(int, effects.read_text().split()))
    assert set(seen) == set(range(number)) and states(queue) == {"done": number}


def test_several_at_once(jobs: Path) -> None:
    """Some put, some take; every task is one's."""
    queue, each = TaskQueue(jobs, durable=False), 700
    out = jobs.parent / "out"

    def put(who: int) -> None:
        mine = TaskQueue(jobs, durable=False)
        for number in range(each):
            mine.put([who, number])

    def take() -> None:
        mine = TaskQueue(jobs, durable=False)
        with open(out, "a") as file:
            while (claim := mine.claim(timeout=1)) is not None:
                file.write(f"{claim.payload}\n")
                claim.complete()

    all_in_children([*(lambda who=who: put(who) for who in range(3)), take, take])
    found = Counter(out.read_text().splitlines())
    assert len(found) == 3 * each and set(found.values()) == {1} and states(queue) == {"done": 3 * each}


def test_threads_that_share_a_queue(jobs: Path) -> None:
    queue = TaskQueue(jobs, durable=False)
    queue.put_all(range(600))
    found: list[int] = []
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for number in range(100):
                queue.put(1000 + number)
                claim = claimed(queue)
                found.append(claim.payload)
                claim.complete()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    found.extend(claim_all(queue))
    assert Counter(found)[1000] == 4 and len(found) == 1000


def test_a_fork_with_an_open_queue(queue: TaskQueue) -> None:
    """The child has nothing of its parent: neither its slot, nor its page, nor what it has seen."""
    queue.put_all(range(6))
    claim = claimed(queue)

    def work() -> list[object]:
        with pytest.raises(LockLost):
            claim.complete()
        mine = claimed(queue)
        queue.put("child")
        mine.complete()
        return [mine.payload, *claim_all(queue)]

    assert in_child(work) == [1, 2, 3, 4, 5, "child"]
    assert queue.get(claim.id).state == "running"
    claim.complete("parent")
    assert queue.get(claim.id).result == "parent" and claim_all(queue) == [] and states(queue) == {"done": 7}


# What else can be.


def test_somebody_has_tidied_up(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(4))
    first = claimed(queue)
    shutil.rmtree(jobs / "slots")
    assert first.fail("no", delay=0) and queue.get(ids[0]).error == "no"
    queue.taker.finder.forget()
    second = claimed(queue)
    assert second.id == ids[0]
    third = claimed(queue)
    shutil.rmtree(jobs / "slots")
    third.abandon()
    assert queue.get(ids[1]).state == "pending" and claim_all(queue) == [2, 3]
    assert queue.recover() == 1 and claimed(queue).id == ids[1]


def test_the_sheet_is_gone(queue: TaskQueue, jobs: Path) -> None:
    queue.put("gone")
    shutil.rmtree(jobs / "sheets")
    assert queue.claim() is None
    queue._sheets._current[0]._sure_at = -1.0  # as it is a moment later
    id = queue.put("here")
    assert queue.get(id).payload == "here" and claim_all(TaskQueue(jobs)) == ["here"] == [queue.get(id).payload]


def test_the_sequence_is_gone(queue: TaskQueue, jobs: Path) -> None:
    """Its numbers begin behind all sheets: two who count apart must not write into one place."""
    first = queue.put_all(range(5))
    (jobs / "sequence").unlink()
    other = TaskQueue(jobs)
    second = [other.put(number) for number in range(5, 8)]
    third = [queue.put(number) for number in range(8, 10)]
    assert [id.partition("-")[0] for id in second] == ["1001", "1002", "1003"]
    assert len({*first, *second, *third}) == 10 and sorted(claim_all(TaskQueue(jobs))) == list(range(10))


def test_a_line_that_somebody_has_broken(queue: TaskQueue, jobs: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad, evil, good = queue.put("bad"), queue.put("evil"), queue.put("good")
    path = sheet(queue)
    text = path.read_bytes()
    text = text.replace(b'"payload": "bad"', b'"payload": "ba}"').replace(b'"attempts": 3', b'"attempts"= 3', 1)
    text = text.replace(b'"payload": "evil"', b'"id": "../../etc"')
    path.write_bytes(text)
    assert claim_all(queue) == ["good"]
    assert sorted(os.listdir(jobs / "failed")) == sorted([bad, evil]) and "put aside" in caplog.text
    assert queue.get(good).state == "done" and not (jobs.parent / "etc").exists()


def test_a_line_that_is_just_being_written(queue: TaskQueue, jobs: Path) -> None:
    """It is neither taken nor put aside: who writes it has the sheet locked."""
    queue.put({"a": {"b": 1}})
    path = sheet(queue)
    whole = path.read_bytes()
    line = whole.rstrip(b"\n")
    torn = line[: line.index(b"}") + 1]
    path.write_bytes(torn.ljust(len(whole), b"\n"))
    with open(path, "rb") as writer:
        system.lock(writer.fileno(), system.EX)
        assert queue.claim() is None and os.listdir(jobs / "failed") == []
        path.write_bytes(whole)
    assert claim_all(queue) == [{"a": {"b": 1}}]


def test_garbage_behind_the_last_line(queue: TaskQueue, jobs: Path) -> None:
    queue.put("first")
    path = sheet(queue)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\n")) + 1
    path.write_bytes(whole[:end] + b'                  {"id": "2-01' + whole[end + 29 :])
    other = TaskQueue(jobs)
    other.put("second")
    queue.put("third")
    assert claim_all(TaskQueue(jobs)) == ["first", "second", "third"]


def test_a_record_that_could_not_be_written_whole(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = queue.put("x")
    claim = claimed(queue)
    write, left = system.write, [100]

    def full(fd: int, text: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, left[0] = text[: left[0]], 0
        return write(fd, part)

    for _ in range(2):
        left[0] = 250
        monkeypatch.setattr(system, "write", full)
        with pytest.raises(OSError, match="No space"):
            claim.complete(1)
        monkeypatch.undo()
        assert queue.get(id).state == "running"
    claim.complete(2)
    task = queue.get(id)
    assert (task.state, task.result, task.tried) == ("done", 2, 1)
    assert [one.result for one in queue] == [2] and states(queue) == {"done": 1}


def test_an_interrupt_when_it_is_done_already(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    id = queue.put("x")

    empty, times = Slot.empty, iter([1])

    def interrupted(slot: Slot) -> None:
        for _ in times:
            raise KeyboardInterrupt
        empty(slot)

    monkeypatch.setattr(Slot, "empty", interrupted)
    with pytest.raises((KeyboardInterrupt, NotLocked)), claimed(queue) as claim:
        claim.complete("done")
    monkeypatch.undo()
    assert queue.get(id).state == "done" and claim_all(queue) == [] and states(queue) == {"done": 1}


def test_after_a_power_failure(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks were on disk, or half of one, and the slots were not."""
    queue = TaskQueue(jobs)
    ids = queue.put_all(range(5))
    claims = [claimed(queue) for _ in range(4)]
    claims[1].complete()
    claims[2].fail("no", delay=0)
    path = sheet(queue)
    text = path.read_bytes()
    at = text.index(b'{"id": "%s"' % ids[3].encode()) - 18
    path.write_bytes(text[:at] + b" " + text[at + 1 :])  # the second half of the mark
    for claim in (claims[0], claims[3]):
        claim.abandon()
    for slot in (jobs / "slots").iterdir():
        slot.write_bytes(b"\0" * 100)
    assert TaskQueue(jobs).stats()["pending"] == 2
    (jobs / "boot").write_text("another one\n")
    after = TaskQueue(jobs)
    assert claim_all(after) == [0, 2, 3, 4] and states(after) == {"done": 5}
    assert (jobs / "boot").read_text().strip() == owner.boot_id()


def test_who_may_only_look(queue: TaskQueue, jobs: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("one has to be root to become another user")
    ids = queue.put_all("abc")
    claim = claimed(queue)
    claimed(queue).complete("result")
    os.chmod(jobs.parent, 0o755)

    def look() -> list[object]:
        os.setuid(65534)
        mine = TaskQueue(jobs)
        return [mine.stats()["done"], [mine.get(id).state for id in ids], mine.get(ids[1]).result, len(list(mine))]

    assert in_child(look) == [1, ["running", "done", "pending"], "result", 3]
    claim.complete()


def test_another_machine_gives_it_a_file(queue: TaskQueue, jobs: Path) -> None:
    """Through a network file system one does not see who has a slot on the machine with the disk."""
    ids = queue.put_all("abc")
    first = claimed(queue)
    there = TaskQueue(jobs)
    there._desk.shared = there.is_shared = True
    claim = there.claim()
    assert claim is not None and claim.id == ids[1] and claim.leaf is None
    assert there.claim(timeout=0.05) is not None
    first.complete()
    claim.complete()
    assert queue.get(ids[0]).state == queue.get(ids[1]).state == "done"


def test_a_command_keeps_only_its_own_task(queue: TaskQueue, jobs: Path) -> None:
    """What a command leaves behind has the lock of its slot, so that is not used again."""
    queue.put_all(["x", "y"])
    claim = claimed(queue)
    copy = os.dup(claim.fileno())
    claim.complete()
    assert os.listdir(jobs / "slots") == []
    assert in_child(lambda: claimed(TaskQueue(jobs)).abandon()) is None
    assert claimed(TaskQueue(jobs)).payload == "y"
    os.close(copy)


def test_a_queue_from_before_there_were_sheets(jobs: Path) -> None:
    TaskQueue(jobs).put("x", id="old")
    shutil.rmtree(jobs / "sheets")
    shutil.rmtree(jobs / "slots")
    (jobs / "boot").unlink()
    (jobs / "queue.json").write_text('{"format": 1, "what": "tasks of Holdfast"}\n')
    queue = TaskQueue(jobs)
    queue.put("new")
    assert claim_all(queue) == ["x", "new"] and json.loads((jobs / "queue.json").read_text())["format"] == 2


def test_no_descriptors_are_left(jobs: Path) -> None:
    def use() -> None:
        queue = TaskQueue(jobs)
        ids = queue.put_all(range(1100))
        claim_all(queue)
        queue.put("failed", attempts=1)
        claimed(queue).fail("no")
        queue.cancel(queue.put("cancelled"))
        assert list(queue) and queue.stats() and queue.ids("done") and queue.get(ids[0])
        queue.wait(ids[:3], timeout=1)
        queue.purge()

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1 and os.listdir(jobs / "slots") == []


def test_a_sheet_that_is_none(queue: TaskQueue, jobs: Path) -> None:
    """A directory, or a link, where the next one would be: then tasks have files."""
    (jobs / "sheets/0/waiting").mkdir(parents=True)
    (jobs / "sheets/0/waiting/000000000").mkdir()
    (jobs / "sheets/0/waiting/README").write_text("not ours")
    (jobs / "sheets/README").write_text("not ours")
    (jobs / "sequence").write_bytes(b"%-12s%019d\n" % (b"0", 7))
    id = queue.put("x")
    assert files_of(queue) == [id] and queue.stats()["pending"] == 1 and claim_all(queue) == ["x"]
    assert queue.purge() == 1 and queue.recover() == 0 and queue.is_empty() and list(queue) == []


@pytest.mark.parametrize("until", [2000, 4090, 4096])
def test_a_page_whose_beginning_was_read_before_it_was_written_and_the_rest_after_that(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    """Nothing keeps a reader from it. What was not seen must not be believed not to be there."""
    queue.put_all(range(3))
    found = claim_all(queue)
    before = sheet(queue).read_bytes()[:until]
    TaskQueue(jobs).put_all(range(3, 80))
    pread, times = system.pread, iter([1])

    def pread_torn(fd: int, size: int, at: int) -> bytes:
        text = pread(fd, size, at)
        if size > 4096 and at == 0:
            for _ in times:
                return before.ljust(until, b"\n") + text[until:]
        return text

    monkeypatch.setattr(system, "pread", pread_torn)
    found += claim_all(queue)
    assert not list(times)
    assert sorted(found) == list(range(80))
    assert found != list(range(80)), "it was not torn"


def test_a_page_that_is_done_is_not_read_again_wherever_its_lines_begin(in_memory: Path, pages: list[int]) -> None:
    for length in range(150):  # more than the others have
        queue = TaskQueue(in_memory / f"{length}", durable=False)
        queue.put_all(["x" * length, *range(100, 190)])
        assert len(claim_all(queue)) == 91
        pages.clear()
        queue.taker.finder._sheet.next_waiting()  # type: ignore[union-attr]
        assert len(pages) <= 2, (length, pages)


def test_the_page_of_another_is_no_obstacle(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(range(100))
    first = claimed(queue)  # and is at the first page from now on
    other = TaskQueue(jobs)
    assert sorted(claim_all(other)) == list(range(1, 100)) and first.id == ids[0]
    assert isinstance(other.taker.finder._sheet, Sheet) and queue.claim() is None


def test_a_sheet_is_not_gone_on_with_before_what_is_more_urgent(queue: TaskQueue) -> None:
    """Also if nothing was put since it was looked at."""
    queue.put_all(range(3))
    queue.put_all([f"urgent {number}" for number in range(1500)], priority=5, key="k", limit=2000)
    found = claim_all(queue)
    assert found[:1500] == [f"urgent {number}" for number in range(1500)] and found[1500:] == [0, 1, 2]


def test_a_line_that_somebody_keeps_locked_is_in_nobodys_way(queue: TaskQueue, jobs: Path) -> None:
    """Somebody was stopped while it took it."""
    queue.put_all(["x" * 4000, *range(40)])
    other = TaskQueue(jobs)
    (first, *_) = other._sheets.open(0, "000000000").waiting()  # type: ignore[union-attr]
    with first.sheet.locked(first):
        assert claim_all(queue) == list(range(40)) and queue.claim(timeout=0.05) is None
    assert claim_all(queue) == ["x" * 4000]


def test_a_purged_one_does_not_come_back(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody had died between the file that it got and the mark that says so."""
    id = queue.put("x")
    claim = claimed(queue)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sheet, "set_mark", killed)
    with pytest.raises(KeyboardInterrupt):
        claim.fail("no", delay=0)
    monkeypatch.undo()
    claim.abandon()
    assert lines_of(sheet(queue))[0].startswith(b"x")
    other = TaskQueue(jobs)
    assert claim_all(other) == ["x"] and other.recover() == 0 and other.purge() == 1
    assert other.recover() == 0 and id not in other and claim_all(other) == []


def test_interrupted_while_it_is_taken(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after the mark: it is as if who took it had died."""
    ids = queue.put_all("ab")
    set_mark = Sheet.set_mark
    for marks in (True, False):

        def interrupted(sheet: Sheet, *words: Any, marks: bool = marks) -> None:
            if marks:
                set_mark(sheet, *words)
            raise KeyboardInterrupt

        monkeypatch.setattr(Sheet, "set_mark", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.claim()
        monkeypatch.undo()
    assert sorted(claim_all(TaskQueue(jobs))) == ["a", "b"]
    assert all(queue._lines.slots.text(name) == b"" for name in os.listdir(jobs / "slots"))
    assert [queue.get(id).tried for id in ids] == [2, 1]


def test_thousands_of_priorities(queue: TaskQueue, jobs: Path) -> None:
    """Each has its sheet; who puts has only a few of them open, and who takes does not read them all for each task."""
    before = len(os.listdir("/proc/self/fd"))
    for priority in range(1000):
        queue.put(priority, priority=priority)
    assert len(os.listdir("/proc/self/fd")) < before + 30
    assert sum(path.stat().st_size for path in jobs.glob("sheets/*/waiting/*")) < 5_000_000
    assert claimed(queue).payload == 999
    took = []
    for _ in range(100):
        began = time.thread_time()
        claimed(queue).complete()
        took.append(time.thread_time() - began)
    assert sorted(took)[50] < 0.02


def test_what_was_never_begun_is_not_ended_by_what_was_said_of_it(queue: TaskQueue, jobs: Path) -> None:
    """Its worker was killed, on purpose, between the slot and the mark."""
    id = queue.put("x", attempts=1)
    slot = Slot.new(str(jobs / "slots"), 0o644)
    slot.fill(lines_of(sheet(queue))[0][18:] + b'\n{"is": "running", "token": 1, "at": ""}\n')
    ((place, task),) = queue.taker.running().items()
    queue.taker.say_how_it_ends(place, task, Verdict("failed", "not done within 1 s"))
    slot.file.close()
    assert not queue.taker.settle_place(place, time.monotonic() + 1)
    assert os.listdir(jobs / "ending") == [] == os.listdir(jobs / "slots")
    assert claim_all(queue) == ["x"] and queue.get(id).state == "done"


# What one who did not write it has found.


def half_written(queue: TaskQueue, payload: object, at: bytes) -> tuple[Path, bytes, bytes]:
    """A sheet with one line; the same when its writer had come only to there; and when it is whole."""
    queue.put(payload)
    path = sheet(queue)
    whole = path.read_bytes()
    torn = whole[: whole.index(at) + len(at)]
    return path, torn.ljust(len(whole), b"\n"), whole


def test_a_line_that_was_being_written_when_it_was_seen(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is whole when it is taken: its length is wrong, and it is not put aside for that."""
    path, torn, whole = half_written(queue, [{"k": 1}, {"k": 2}], b'{"k": 1}')
    path.write_bytes(torn)
    take = Sheet.take

    def late(sheet: Sheet, *words: Any, **options: Any) -> Any:
        with open(path, "r+b") as file:
            file.write(whole)
        return take(sheet, *words, **options)

    monkeypatch.setattr(Sheet, "take", late)
    assert queue.claim() is None and os.listdir(jobs / "failed") == []
    assert claim_all(queue) == [[{"k": 1}, {"k": 2}]]


@pytest.mark.parametrize("written", [100, 3000, 4090, 4200, 7000])
def test_a_line_over_two_pages_that_was_being_written(queue: TaskQueue, jobs: Path, written: int) -> None:
    """Who has seen a part of it looks there again."""
    queue.put("x" * 3000)
    assert claim_all(queue) == ["x" * 3000]
    path = sheet(queue)
    before = path.read_bytes()
    end = len(before.rstrip(b"\n")) + 1
    line = b'%18s{"id": "2-0123456789abcdef", "payload": "%s", "priority": 0}\n' % (b"", b"y" * 3900)
    room = b"\n" * 70_000
    path.write_bytes((before[:end] + line)[: max(end + 1, written)] + room)
    assert [queue.claim() for _ in range(3)] == [None] * 3
    path.write_bytes(before[:end] + line + room)
    TaskQueue(jobs).put("z")
    assert claim_all(queue) == ["y" * 3900, "z"]


def test_marks_that_a_power_failure_has_undone(jobs: Path) -> None:
    """They are not synced. What was done stays done, and what was cancelled stays so."""
    queue = TaskQueue(jobs)
    done, cancelled, failed, _ = queue.put_all(["done", "cancelled", "failed", "waits"], attempts=1)
    path = sheet(queue)
    before = path.read_bytes()
    assert queue.cancel(cancelled)
    claimed(queue).complete(1)
    claimed(queue).fail("no")
    with open(path, "r+b") as file:
        file.write(before)
    (jobs / "boot").write_text("another one\n")
    assert claim_all(TaskQueue(jobs)) == ["waits"]
    assert states(queue) == {"done": 2, "cancelled": 1, "failed": 1}
    assert [queue.get(id).state for id in (done, cancelled, failed)] == ["done", "cancelled", "failed"]


def test_what_is_purged_is_synced_first(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave lines without marks, and nothing that says that they were done."""
    queue = TaskQueue(jobs)
    failed, *_ = queue.put_all(range(1001), attempts=1)
    claimed(queue).fail("no")
    claim_all(queue)
    leave_alone(queue)
    said: list[str] = []
    fdatasync, unlink = system.fdatasync, system.unlink
    monkeypatch.setattr(
        system, "fdatasync", lambda fd: (said.append(os.readlink(f"/proc/self/fd/{fd}")), fdatasync(fd))
    )
    monkeypatch.setattr(system, "unlink", lambda path, **_: (said.append(f"- {path}"), unlink(path)))
    assert queue.purge() == 1001
    marks, past = f"{jobs}/sheets/0/past/000000000", [f"- {jobs}/tasks/{failed}", f"- {jobs}/sheets/0/past/000000000"]
    for removed in past:
        assert any(name.endswith("/000000000") for name in said[: said.index(removed)]), (removed, said)
    assert marks in said


@pytest.mark.parametrize("cut", [b'{"k": 1}', b'"result": '])
def test_a_completion_that_was_torn(queue: TaskQueue, jobs: Path, cut: bytes) -> None:
    """Its worker was killed in the middle of the write. It looks like a line as soon as another one follows."""
    id, other = queue.put("x"), queue.put("y")
    claimed(queue).complete([{"k": 1}, {"k": 2}])
    (path,) = (jobs / "sheets/0/done").iterdir()
    text = path.read_bytes()
    slot = jobs / "slots" / lines_of(sheet(queue))[0][1:17].decode()
    path.write_bytes(text[: text.index(cut) + len(cut)])
    slot.write_bytes(lines_of(sheet(queue))[0][18:] + b"\n" + text.split(b" ", 1)[1].split(b"\n")[0] + b"\n")
    claimed(queue).complete()
    assert queue.get(other).state == "done" and queue.ids("done") == [other]
    del queue
    gc.collect()
    after = TaskQueue(jobs)
    slot.exists() or slot.write_bytes(b"")
    after.recover()
    assert claim_all(after) == ["x"] and after.get(id).state == "done"


def test_an_id_of_a_purged_line_is_put_anew(queue: TaskQueue) -> None:
    done, failed = queue.put("done"), queue.put("failed", attempts=1)
    claimed(queue).complete()
    claimed(queue).fail("no")
    assert queue.purge() == 2
    for id in (done, failed):
        assert queue.put("again", id=id) == id and queue.get(id).payload == "again"
    assert claim_all(queue) == ["again", "again"] and states(queue) == {"done": 2}


@pytest.mark.parametrize("half", [0, 1, 9, 15])
def test_half_a_mark_of_the_dead(queue: TaskQueue, jobs: Path, half: int) -> None:
    queue.put("x")
    assert in_child(lambda: claimed(TaskQueue(jobs)).abandon()) is None
    path = sheet(queue)
    text = path.read_bytes()
    path.write_bytes((text[: 1 + half].ljust(18)) + text[18:])
    assert claim_all(queue) == ["x"] and os.listdir(jobs / "slots") == []


def test_half_a_mark_of_the_living(queue: TaskQueue, jobs: Path) -> None:
    """A slot of one who died before it marked the line, and another one who is just marking it."""
    queue.put("x")
    slot = Slot.new(str(jobs / "slots"), 0o644)
    slot.fill(lines_of(sheet(queue))[0][18:] + b"\n")
    slot.file.close()
    other = TaskQueue(jobs)
    (line,) = other._sheets.open(0, "000000000").waiting()  # type: ignore[union-attr]
    with line.sheet.locked(line):
        line.sheet.set_mark(line, b"x")
        assert queue.claim() is None and queue.taker.try_claim(look=True) is None
        assert os.listdir(jobs / "slots") == [slot.name]
        line.sheet.set_mark(line, b"x" + b"f" * 16)
    assert queue.taker.try_claim(look=True) is None and os.listdir(jobs / "slots") == []


def test_a_broken_line_does_not_keep_others_from_being_recovered(queue: TaskQueue, jobs: Path) -> None:
    queue.put_all("abc")
    claims = [claimed(queue) for _ in range(3)]
    shutil.rmtree(jobs / "slots")
    for claim in claims:
        claim.abandon()
    path = sheet(queue)
    path.write_bytes(path.read_bytes().replace(b'"payload": "a"', b'"payload": =a='))
    assert TaskQueue(jobs).recover() == 2 and claim_all(TaskQueue(jobs)) == ["b", "c"]
    assert queue.stats()["failed"] == 1


def test_what_gets_a_file_while_one_looks_is_seen(queue: TaskQueue, jobs: Path) -> None:
    queue.put("file", id="file")
    ids = queue.put_all(range(5))
    other = TaskQueue(jobs)
    tasks = iter(other)
    assert next(tasks).id == "file"
    for id in ids:
        assert queue.cancel(id)
    assert sorted(task.id for task in tasks) == sorted(ids)


def test_a_putter_that_was_stopped_for_long(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sheet is past by now: no second one with the same number is made."""
    first = queue.put_all(range(999))
    assert len(claim_all(queue)) == 999
    append = Sheets.append

    def late(sheets: Sheets, level: int, bucket: int, text: bytes) -> Sheet | None:
        monkeypatch.undo()
        other = TaskQueue(jobs)
        other._sequence._lock = lambda fd: None  # type: ignore[method-assign]
        other.put_all(range(5))
        assert len(claim_all(other)) == 5
        leave_alone(other)
        assert TaskQueue(jobs).claim() is None and os.listdir(jobs / "sheets/0/past") == ["000000000"]
        return append(sheets, level, 0, text)

    monkeypatch.setattr(Sheets, "append", late)
    monkeypatch.setattr(queue._sheets, "_current", {})
    id = queue.put("late")
    assert claim_all(queue) == ["late"] and id in queue and not (jobs / "sheets/0/waiting/000000000").exists()
    assert len(list(queue)) == 1005 and first[0] in queue and queue.purge() == 1005 and list(queue) == []


def test_a_drain_ends_when_one_who_goes_on_has_done_the_last_one(jobs: Path, waits: int) -> None:
    queue = TaskQueue(jobs)
    queue.put("last")
    claim = claimed(queue)
    worker = Worker(TaskQueue(jobs), lambda task: None, threads=True)
    thread = threading.Thread(target=lambda: worker.run(drain=True), daemon=True)
    thread.start()
    os.read(waits, 1)
    claim.complete()
    thread.join(30)
    assert not thread.is_alive()


def test_what_cannot_be_counted_is_no_reason_to_fail(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all("ab")
    shutil.rmtree(jobs / "sheets/0/done")
    os.utime(sheet(queue), (1, 1))
    assert states(queue) == {"pending": 2} and queue.get(ids[0]).state == "pending" and len(list(queue)) == 2
    (jobs / "sheets/0/done").mkdir()
    (jobs / "sheets/0/done/000000077").write_text("of a sheet that was removed")
    assert queue.purge() == 0 and os.listdir(jobs / "sheets/0/done") == []
    assert claim_all(queue) == ["a", "b"]


def test_many_of_which_some_are_long(queue: TaskQueue) -> None:
    payloads = ["a", "b" * 5000, "c", "d", "e" * 9000, "f"]
    ids = queue.put_all(payloads)
    assert [queue.get(id).payload for id in ids] == payloads and queue.ids("pending") == ids
    assert len(files_of(queue)) == 2 and claim_all(queue) == payloads
    id = queue.put("long result")
    claimed(queue).complete("x" * 5000)
    assert queue.get(id).result == "x" * 5000 and id in files_of(queue) and queue.stats()["done"] == 7


def test_what_is_put_while_one_reads_from_page_to_page(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page on which there was room when it was read is read again."""
    queue.put("x" * 1000)
    assert len(claim_all(queue)) == 1
    on_page, others = Sheet._on_page, iter([TaskQueue(jobs)])

    def late(sheet: Sheet, page: int) -> Any:
        found = on_page(sheet, page)
        for other in others:
            other.put("y" * 3900)  # begins on the first page, and ends on the second
        return found

    monkeypatch.setattr(Sheet, "_on_page", late)
    queue.taker.finder.forget()  # else it is believed for a moment that nothing is there, and nothing is read
    assert claim_all(queue) == ["y" * 3900], "at once: the sequence says that there is something new"


def test_a_claim_that_was_dropped_is_there_again_at_once(queue: TaskQueue) -> None:
    queue.put("x")
    queue.put("y", id="y")
    for _ in range(2):
        assert queue.claim() is not None  # and nobody keeps it
    assert sorted(claim_all(queue)) == ["x", "y"]


def test_the_dead_do_not_run(queue: TaskQueue, jobs: Path) -> None:
    """Where it is counted, and where it is looked at."""
    ids = [queue.put("x"), queue.put("y", id="y")]

    def work() -> None:
        mine = TaskQueue(jobs)
        _claims = [claimed(mine), claimed(mine)]
        assert sorted(queue.ids("running")) == sorted(ids) and states(queue) == {"running": 2}
        os.kill(os.getpid(), signal.SIGKILL)

    assert not survives(work)
    assert states(queue) == {"pending": 2} and sorted(queue.ids("pending")) == sorted(ids) and not queue.is_empty()
    assert queue.ids("running") == [] and {queue.get(id).state for id in ids} == {"pending"}


def test_who_has_a_sheet_locked_and_does_not_go_on(queue: TaskQueue) -> None:
    """Nobody writes into it meanwhile: what is put gets a file."""
    queue.put("first")
    with open(sheet(queue), "rb") as file:
        system.lock(file.fileno(), system.EX)
        id = queue.put("second")
    assert files_of(queue) == [id] and claim_all(queue) == ["first", "second"]


def test_a_sheet_is_past_when_nothing_waits_and_it_is_left_alone(queue: TaskQueue, jobs: Path) -> None:
    queue.put_all(range(1001))
    first = queue._sheets.open(0, "000000000")
    assert first is not None
    os.utime(first.path, (1, 1))
    first.shut()
    assert (jobs / "sheets/0/waiting/000000000").exists(), "something waits there"
    claim_all(queue)
    os.utime(first.path)
    first.shut()
    assert (jobs / "sheets/0/waiting/000000000").exists(), "somebody has just written to it"
    os.utime(first.path, (time.time() + 3600, time.time() + 3600))  # the clock was set back
    first.shut()
    assert not (jobs / "sheets/0/waiting/000000000").exists() and (jobs / "sheets/0/past/000000000").exists()
    assert queue.stats()["done"] == 1001


def test_what_is_done_while_one_recovers_is_not_lost(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not done when it was looked for there, and not in its slot when it was looked for there."""
    queue.put("x")
    claim, other = claimed(queue), TaskQueue(jobs)
    is_in_hand = other._lines._is_in_hand

    def late(entry: Any) -> bool:
        claim.complete()
        return is_in_hand(entry)

    monkeypatch.setattr(other._lines, "_is_in_hand", late)
    assert other.recover() == 0 and claim_all(other) == [] and states(other) == {"done": 1}


# What another one who did not write it has found.


def test_threads_that_complete_on_one_sheet_at_once(queue: TaskQueue) -> None:
    """What is done is written through one descriptor, which nobody closes meanwhile."""
    for _ in range(30):
        queue = TaskQueue(queue.path, durable=False)
        queue.put_all(range(8))
        claims = [claimed(queue) for _ in range(8)]
        start, wrong = threading.Barrier(8), []

        def complete(claim: Claim, start: threading.Barrier = start, wrong: list[BaseException] = wrong) -> None:
            start.wait(30)
            try:
                claim.complete()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=complete, args=(claim,)) for claim in claims]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == []
    assert states(queue) == {"done": 240}


def test_a_sheet_that_is_moved_while_it_is_opened(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.put_all(range(1001))
    claim_all(queue)
    other = queue._sheets.open(0, "000000000")
    assert other is not None
    name_of_open = system.name_of_open

    def late(fd: int) -> str:
        monkeypatch.undo()
        os.utime(other.path, (1, 1))
        other.shut()
        return name_of_open(fd)

    monkeypatch.setattr(system, "name_of_open", late)
    assert queue._sheets.open(0, "000000000") is None and (jobs / "sheets/0/past/000000000").exists()
    other.shut()  # has nothing to do any more
    assert TaskQueue(jobs).claim() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("at", ["set_mark", "sync"])
def test_interrupted_while_it_gets_a_file(jobs: Path, monkeypatch: pytest.MonkeyPatch, error: Any, at: str) -> None:
    """And then given back by `with`: the steps that were done are not done again."""
    queue = TaskQueue(jobs, retry_after=0.001)
    id = queue.put("x")
    times = iter([1])
    set_mark, sync_folders = Sheet.set_mark, lines.sync_folders

    def interrupted(*words: Any) -> None:
        for _ in times:
            raise error
        set_mark(*words) if at == "set_mark" else sync_folders(*words)

    claim = claimed(queue)
    monkeypatch.setattr(*((Sheet, "set_mark") if at == "set_mark" else (lines, "sync_folders")), interrupted)
    with pytest.raises((KeyboardInterrupt, OSError), match=None if error is KeyboardInterrupt else "Input"), claim:
        claim.fail("no", delay=0)
    monkeypatch.undo()
    assert files_of(queue) == [id] and os.listdir(jobs / "running") == []
    again = queue.claim(timeout=5)
    assert again is not None
    again.complete()
    assert states(queue) == {"done": 1} and queue.get(id).error is None
    assert all(queue._lines.slots.text(name) == b"" for name in os.listdir(jobs / "slots"))


def test_a_slot_beside_a_file_is_removed(queue: TaskQueue, jobs: Path) -> None:
    """However that came to be, it is not looked at for ever."""
    id = queue.put("x")
    assert in_child(lambda: claimed(TaskQueue(jobs)).abandon()) is None
    (slot,) = (jobs / "slots").iterdir()
    shutil.copy(slot, jobs / "tasks" / id)
    assert queue.claim() is None and not slot.exists()
    assert lines_of(sheet(queue))[0].startswith(b"m")


def test_cancelled_when_its_worker_is_dead(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "sleep", lambda seconds: pytest.fail("it waits for one who is dead"))
    for own in (None, "own"):
        id = queue.put("x", id=own)
        assert in_child(lambda: claimed(TaskQueue(jobs)).abandon()) is None
        assert queue.cancel(id)
        assert queue.get(id).state == "cancelled" and claim_all(TaskQueue(jobs)) == []


def test_a_sheet_that_one_may_not_write(queue: TaskQueue, jobs: Path) -> None:
    """What is on it is passed over, and one does what one may."""
    if os.geteuid() != 0:
        pytest.skip("one has to be root to become another user")
    id = queue.put("not yours")
    for path in (jobs, *jobs.rglob("*")):
        os.chmod(path, 0o777 if path.is_dir() else 0o666)
    os.chmod(sheet(queue), 0o644)
    os.chmod(jobs.parent, 0o755)

    def work() -> list[object]:
        os.setuid(65534)
        mine = TaskQueue(jobs, mode=0o666)
        mine.put("mine", id="mine")
        found = claim_all(mine)
        with pytest.raises(PermissionError):
            mine.cancel(id)
        return [found, mine.purge(), mine.recover(), mine.stats()["pending"]]

    assert in_child(work) == [["mine"], 1, 0, 1]
    assert claim_all(queue) == ["not yours"]


@pytest.mark.parametrize("end", ["give_back", "fail"])
@pytest.mark.parametrize("id", [None, "own"])
def test_cancelled_when_its_worker_has_just_looked(
    jobs: Path, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch, end: str, id: str | None
) -> None:
    """It looks once more when it has written down how it ended: either it sees that, or who cancels sees this."""
    id = queue.put("x", id=id)
    claim, other = claimed(queue), TaskQueue(jobs)
    add = Claim._add_last

    def late(claim: Claim, line: bytes) -> None:
        monkeypatch.undo()
        assert other.cancel(id)
        add(claim, line)

    monkeypatch.setattr(Claim, "_add_last", late)
    getattr(claim, end)("because")
    assert claim_all(TaskQueue(jobs)) == [] and queue.get(id).state == "cancelled"


def test_the_first_line_of_a_putter_that_was_stopped(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sheet was moved between its opening and its first line."""
    queue.put_all(range(999))
    claim_all(queue)
    TaskQueue(jobs).put_all([1, 2])
    claim_all(queue)
    append = Sheet.append

    def late(sheet: Sheet, text: bytes) -> bool:
        monkeypatch.undo()
        os.utime(sheet.path, (1, 1))
        sheet.shut()
        return append(sheet, text)

    fresh = TaskQueue(jobs)
    monkeypatch.setattr(fresh._sequence, "put_some", lambda level, put: put(999))
    monkeypatch.setattr(Sheet, "append", late)
    id = fresh.put("late")
    assert claim_all(TaskQueue(jobs)) == ["late"] and id in queue


def test_what_waits_on_an_old_sheet_is_recovered(queue: TaskQueue, jobs: Path) -> None:
    queue.put("x")
    (jobs / "sheets/0/past").mkdir(exist_ok=True)
    os.rename(sheet(queue), jobs / "sheets/0/past/000000000")
    assert TaskQueue(jobs).claim() is None
    assert queue.recover() == 1 and claim_all(TaskQueue(jobs)) == ["x"]


def test_a_slot_is_given_back_once(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at the very end."""
    queue.put_all("abc")
    give_back, times = Slots.give_back, iter([1])

    def interrupted(slots: Slots, slot: Slot) -> None:
        give_back(slots, slot)
        for _ in times:
            raise KeyboardInterrupt

    monkeypatch.setattr(Slots, "give_back", interrupted)
    with pytest.raises((KeyboardInterrupt, NotLocked)), claimed(queue) as claim:
        claim.complete()
    monkeypatch.undo()
    first, second = claimed(queue), claimed(queue)
    assert first.leaf is not None and second.leaf is not None and first.leaf.slot is not second.leaf.slot
    first.complete()
    assert queue.get(second.id).state == "running"
    second.complete()
    assert states(queue) == {"done": 3}


def test_who_purges_goes_on_with_what_is_urgent(queue: TaskQueue) -> None:
    queue.put_all(range(200), priority=5)
    queue.put_all([f"urgent {number}" for number in range(100)], priority=10)
    found = []
    for _ in range(300):
        claim = claimed(queue)
        found.append(claim.payload)
        claim.complete()
        if len(found) % 29 == 0:
            queue.purge()
    assert all(isinstance(payload, str) for payload in found[:100])


def test_an_id_is_seen_while_it_gets_a_file(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    id = queue.put("x")
    other, on_sheet = TaskQueue(jobs), queue._looker._on_sheet

    def late(id: str) -> Any:
        other._give_file(id)
        return on_sheet(id)

    monkeypatch.setattr(queue._looker, "_on_sheet", late)
    assert id in queue and queue.get(id).state == "pending"


def test_put_again_by_one_who_is_helped(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    id = queue.put("x")
    claimed(queue).complete()
    other, enqueue = TaskQueue(jobs), Putter.enqueue

    def late(putter: Putter, *words: Any) -> Any:
        monkeypatch.undo()
        other.rescue()
        return enqueue(putter, *words)

    monkeypatch.setattr(Putter, "enqueue", late)
    queue.retry(id)
    assert claim_all(other) == ["x"] and states(other) == {"done": 1}


def test_a_retry_that_is_interrupted_is_counted_once(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = queue.put("x")
    claimed(queue).complete()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sheet, "set_mark", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.retry(id)
    monkeypatch.undo()
    gc.collect()
    assert TaskQueue(jobs).claim() is None and states(queue) == {"done": 1} and queue.ids("done") == [id]


def test_progress_that_a_thread_says_at_the_end(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = queue.put_all("ab")
    claim = claimed(queue)
    done_line = journal.done_line

    def late(result: object) -> bytes:
        claim.progress(1, 2, "of the first")
        return done_line(result)

    monkeypatch.setattr(journal, "done_line", late)
    claim.complete()
    monkeypatch.undo()
    assert claimed(queue).id == second
    assert queue.get(second).progress is None and queue.get(first).progress == (1, 2, "of the first")


def test_another_machine_does_not_see_who_has_a_slot(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it takes none from anybody."""
    queue.put("x")
    claim, there = claimed(queue), TaskQueue(jobs)
    there._desk.shared = there.is_shared = True
    there._desk.lock = lambda fd, op: None  # type: ignore[assignment]
    monkeypatch.setattr(system, "lock", lambda fd, op: None)
    assert there.taker.try_claim(look=True) is None and len(os.listdir(jobs / "slots")) == 1
    monkeypatch.undo()
    claim.complete()
    assert states(queue) == {"done": 1}


def test_a_mark_that_changes_within_a_tick_of_the_clock_is_counted(queue: TaskQueue) -> None:
    queue.put_all("ab")
    claim_all(queue)
    st = sheet(queue).stat()
    assert states(queue) == {"done": 2}
    assert queue.purge() == 2
    os.utime(sheet(queue), ns=(st.st_atime_ns, st.st_mtime_ns))
    assert states(queue) == {}


def test_an_id_in_the_payload_of_an_earlier_one(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["1-0123456789abcdef", "2-0123456789abcdef"]
    monkeypatch.setattr(putting, "new_id", lambda number: ids[number - 1])
    queue.put({"id": ids[1], "text": " " * 18})
    assert ids[1] not in queue
    queue.put("second")
    assert queue.get(ids[1]).payload == "second" and queue.get(ids[0]).payload["id"] == ids[1]
    assert claimed(queue).id == ids[0] and queue.get(ids[1]).state == "pending"


def test_to_look_at_what_is_lost_takes_no_time(queue: TaskQueue, jobs: Path) -> None:
    queue.put_all(range(900))
    claim_all(queue)
    shutil.rmtree(jobs / "sheets/0/done")
    began = time.thread_time()
    assert len(list(queue)) == 900 and time.thread_time() - began < 3


def test_a_task_that_is_done_between_two_looks(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not among those that are done, then it is, and then it is not in its slot any more."""
    id = queue.put("x")
    claim, other = claimed(queue), TaskQueue(jobs)
    text = other._lines.slots.text

    def late(name: str) -> bytes:
        if claim.is_open:
            claim.complete("result")
        return text(name)

    monkeypatch.setattr(other._lines.slots, "text", late)
    assert other.get(id).result == "result"


@pytest.mark.parametrize("other", ["bootstrap.sh", "boots", "sheets.txt"])
def test_a_directory_of_somebody_else_is_not_taken_for_a_queue(jobs: Path, other: str) -> None:
    jobs.mkdir()
    (jobs / other).write_text("not ours")
    with pytest.raises(FileExistsError, match=other):
        TaskQueue(jobs)
    assert os.listdir(jobs) == [other]


def test_a_link_in_place_of_a_file_is_not_followed(queue: TaskQueue, jobs: Path) -> None:
    """Neither of the sheet that is to be written, nor of the boot that is noted."""
    precious = jobs.parent / "precious"
    precious.write_text("as it was")
    (jobs / "sheets/0/waiting").mkdir(parents=True)
    (jobs / "sheets/0/waiting/000000000").symlink_to(precious)
    (jobs / "sequence").write_bytes(b"%-12s%019d\n" % (b"0", 7))
    (jobs / "boot").unlink()
    (jobs / "boot").symlink_to(precious)
    queue.put("x")
    assert claim_all(TaskQueue(jobs)) == ["x"] and precious.read_text() == "as it was"


# What somebody else has found who had not written it.


@pytest.mark.parametrize("folder", ["slots", "running"])
@pytest.mark.parametrize("what", ["name", "pipe"])
def test_what_is_no_slot_and_no_task_does_not_keep_anybody_awake(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch, folder: str, what: str
) -> None:
    """To open it for writing, and to close it, would wake whoever had done so."""
    place = "0" * 16 if folder == "slots" else "000000000001.abc"
    path = os.fsencode(jobs / folder / place)
    if what == "pipe":
        os.mkfifo(path)
    else:
        path += b"\xff"
        Path(os.fsdecode(path)).write_bytes(b"mine\n")
    open_fd, opened = system.open_fd, []

    def open_seen(name: str, flags: int, *words: Any, **more: Any) -> int:
        opened.append((os.fsencode(name), flags))
        return open_fd(name, flags, *words, **more)

    monkeypatch.setattr(system, "open_fd", open_seen)
    for _ in range(2):
        assert queue.taker.try_claim(look=True) is None
    if what == "pipe" or folder == "slots":
        assert os.path.lexists(path)
        assert (path, system.O_EXISTING) not in opened
    queue.put("x")
    assert claim_all(queue) == ["x"]


def test_threads_do_not_spoil_what_one_has_seen(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """One looks in vain, and is stopped in the middle; another one puts two, and takes one. The second is not lost."""
    for priority in (0, 5):
        queue.put("first", priority=priority)
        claimed(queue).complete()
    queue.taker.finder.forget()
    remove_empty, here, go = finder.remove_empty, threading.Event(), threading.Event()

    def remove_late(folder: str) -> None:
        if threading.current_thread() is looking and folder.endswith("/5"):
            here.set()
            go.wait(0.3)
        remove_empty(folder)

    monkeypatch.setattr(finder, "remove_empty", remove_late)
    in_vain: list[Claim | None] = []
    looking = threading.Thread(target=lambda: in_vain.append(queue.claim()))
    looking.start()
    assert here.wait(30)
    queue.put_all(["x", "y"], priority=5)
    first = queue.claim()
    go.set()
    looking.join()
    mine = [claim for claim in (first, *in_vain) if claim is not None]
    monkeypatch.setattr(finder, "_FRESH", 0)  # one looks again
    queue.put("low")
    found = [claim.payload for claim in mine] + claim_all(queue)
    assert sorted(found[:2]) == ["x", "y"] and found[2] == "low"
    for claim in mine:
        claim.complete()


def test_a_sheet_that_somebody_has_locked_holds_up_nobody(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "_PATIENCE", 600.0)
    queue.put_all(range(999))
    with open(sheet(queue), "rb") as file:
        system.lock(file.fileno(), system.SH_NB)
        assert len(claim_all(queue)) == 999
        queue.put_all(range(3))
        for _ in range(3):
            queue.taker.finder.forget()
            claimed(queue).complete()


def test_a_sheet_of_which_every_byte_is_locked(queue: TaskQueue) -> None:
    """By some tool that only reads it. Whoever looks for a task comes to an end all the same."""
    import fcntl

    queue.put_all(range(100))
    claimed(queue).complete()
    found = queue.taker.finder._sheet
    assert found is not None
    found.leave_page()
    with open(sheet(queue), "rb") as file:
        fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_RDLCK, 0, 0, 0, 0))
        assert len(found.next_waiting(alone=True)) > 0
        assert queue.claim() is None
    assert len(claim_all(queue)) == 99


def test_the_next_ones_of_a_sheet_are_of_its_priority(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at last, in vain, by one who had had something of a higher priority before."""
    other, third = TaskQueue(jobs), TaskQueue(jobs)
    for priority in (3, 0, 5):
        queue.put("old", priority=priority)
        claimed(queue).complete()
    monkeypatch.setattr(finder, "_FRESH", 60)  # else it is a matter of how long this takes
    assert queue.claim() is None
    append, seen = other._sheets.append, []

    def look_too_soon(*words: Any) -> Sheet | None:
        sheet = append(*words)
        seen.append(queue.claim())  # the lines are there, and the number is not written yet
        return sheet

    other._sheets.append = look_too_soon  # type: ignore[method-assign]
    other.put_all(["zero"] * 5)
    third.put("three", priority=3)
    assert len(seen) == 1 and claimed(queue).payload == "three"


@pytest.mark.parametrize("how", ["nothing is left of it", "something comes first"])
def test_whoever_leaves_a_page_says_so(queue: TaskQueue, jobs: Path, how: str) -> None:
    queue.put_all(range(3), priority=1)
    claims = [claimed(queue)]
    page = TaskQueue(jobs)._sheets.open(1, "000000000")
    assert page is not None

    def is_left() -> bool:
        got = system.lock_byte(page._file.fd, 1 << 61)
        system.unlock_byte(page._file.fd, 1 << 61)
        return got

    assert not is_left()
    if how == "something comes first":
        queue.put("urgent", priority=2)
        claims.append(claimed(queue))
        assert claims[-1].payload == "urgent"
    else:
        claims += [claimed(queue) for _ in range(2)]
    assert is_left()
    for claim in claims:
        claim.complete()


@pytest.mark.parametrize("how", ["a claim", "a look"])
def test_interrupted_when_a_line_is_just_locked(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    id = queue.put("x")
    lock_byte = system.lock_byte

    def interrupted(fd: int, at: int) -> bool:
        got = lock_byte(fd, at)
        if at < 1 << 61:  # a line, not a page
            raise KeyboardInterrupt
        return got

    monkeypatch.setattr(system, "lock_byte", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = queue.claim() if how == "a claim" else queue.cancel(id)
    monkeypatch.undo()
    assert claim_all(TaskQueue(jobs)) == ["x"]


def test_interrupted_when_a_sheet_is_just_locked(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put("x")
    lock, times = system.lock, iter([1])

    def interrupted(fd: int, op: int) -> None:
        lock(fd, op)
        if "/sheets/" in system.name_of_open(fd):
            for _ in times:
                raise KeyboardInterrupt

    monkeypatch.setattr(system, "lock", interrupted)
    monkeypatch.setattr(sequence.lock_patiently, "__defaults__", (interrupted,))
    with pytest.raises(KeyboardInterrupt):
        queue.put("y")
    monkeypatch.undo()
    monkeypatch.setattr(sequence, "_PATIENCE", 600.0)
    TaskQueue(jobs).put("z")
    assert claim_all(queue) == ["x", "z"]


def test_a_claim_that_was_interrupted_while_it_was_made(queue: TaskQueue) -> None:
    half = Claim.__new__(Claim)
    assert not half.is_open
    del half


@pytest.mark.parametrize(
    "edit",
    [
        lambda line: line + b"  ",
        lambda line: line + b"\r",
        lambda line: line.replace(b', "priority"', b',\r "priority"'),
        lambda line: line[:18] + line[18:].replace(b'": ', b'":').replace(b', "', b',"'),
    ],
    ids=["blanks", "CR LF", "CR", "compact"],
)
def test_a_line_that_an_editor_has_written(queue: TaskQueue, edit: Any) -> None:
    ids = queue.put_all(["first", "second", "third"])
    path = sheet(queue)
    first, second, rest = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join([first, edit(second), rest]))
    assert queue.get(ids[1]).payload == "second" and queue.stats()["pending"] == 3
    assert [task.id for task in queue] == ids and queue.ids("pending") == ids
    assert claim_all(queue) == ["first", "second", "third"]
    assert states(queue) == {"done": 3} and queue.get(ids[1]).state == "done"
    assert queue.purge() == 3


def test_a_claim_that_the_collector_finds_while_something_is_put(queue: TaskQueue) -> None:
    """To end it is to put what its key had kept waiting: the same thread has the sequence then."""
    for number in range(2):
        queue.put(number, key="k")
    claim = claimed(queue)
    assert queue.claim() is None, "the other one is parked"
    cycle: list[Any] = [claim]
    cycle.append(cycle)
    del claim, cycle
    queue._sequence.put(0, lambda _: gc.collect())
    assert sorted(claim_all(queue)) == [0, 1]


def test_sheets_of_several_priorities_are_not_read_from_the_beginning_again(queue: TaskQueue, pages: list[int]) -> None:
    queue.put_all(range(700), priority=2)
    assert len(claim_all(queue)) == 700
    queue.put_all(range(100), priority=1)
    pages.clear()
    for number in range(20):
        queue.put("urgent", priority=2)
        for payload in ("urgent", number):
            claim = claimed(queue)
            assert claim.payload == payload
            claim.complete()
    assert len(pages) < 8 * 20, "of twenty-five"


def test_a_claim_and_its_slot_that_the_collector_finds(queue: TaskQueue) -> None:
    """In whatever order: each descriptor is closed once."""
    queue.put_all(range(20))
    claims = [claimed(queue) for _ in range(20)]
    while claims:
        claim = claims.pop()
        assert claim.leaf is not None
        slot = claim.leaf.slot
        slot.__dict__["cycle"] = [slot.file, claim] if len(claims) % 2 else [claim, slot.file]
        del claim, slot
        gc.collect()
    assert sorted(claim_all(queue)) == list(range(20))


def test_news_of_one_priority_among_many(queue: TaskQueue, jobs: Path) -> None:
    other = TaskQueue(jobs)
    for priority in range(9):
        other.put(priority, priority=priority)
    assert claim_all(queue) == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    other.put_all(range(10, 20))
    claims = [claimed(queue)]
    for priority in (5, 7, 8):
        other.put("urgent", priority=priority)
        claims.append(claimed(queue))
    assert [claim.payload for claim in claims] == [10, "urgent", "urgent", "urgent"]
    for claim in claims:
        claim.complete()


@pytest.mark.parametrize("more", ['"timeout": "soon"', '"key": 5', '"state": "done"', '"history": 7'])
def test_a_line_that_says_something_else_in_place_of_when_it_was_put(queue: TaskQueue, more: str) -> None:
    id = queue.put("x")
    path = sheet(queue)
    before, _, after = path.read_bytes().partition(b', "put": ')
    path.write_bytes(before + b", " + more.encode() + after[after.index(b"}") :])
    claim = claimed(queue)
    assert (claim.id, claim.task.state, claim.task.timeout, claim.task.key) == (id, "running", None, None)
    assert claim.task.history == ()
    claim.complete()
    assert states(queue) == {"done": 1}


def test_what_somebody_else_has_put_aside_is_not_counted_again(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that it cannot be read. One of them has put it aside, and says so."""
    queue.put("x")
    path = sheet(queue)
    path.write_bytes(path.read_bytes().replace(b'"payload"', b'"paylode"'))
    other = TaskQueue(jobs)
    counted: list[str] = []
    queue.taker.on_over = lambda failed: counted.append("we")
    other.taker.on_over = lambda failed: counted.append("they")
    set_aside, times = lines.Lines.set_aside, iter([1])

    def too_late(mine: lines.Lines, *words: Any) -> bool:
        for _ in times:
            assert other.claim() is None
        return set_aside(mine, *words)

    monkeypatch.setattr(lines.Lines, "set_aside", too_late)
    assert queue.claim() is None
    assert counted == ["they"] and queue.stats()["failed"] == 1
