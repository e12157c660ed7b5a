"""`TaskQueue`: what is put is there once, in order, and each task is one worker's."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import claim_all, claimed, die_before_call, in_child, survives

from holdfast import LockLost, NotLocked, Timeout, UnsafePath, Unsupported, system
from holdfast.paths import Mount
from holdfast.tasks import NoSuchTask, QueueFull, TaskQueue, Worker, journal
from holdfast.tasks import queue as queue_module
from holdfast.tasks.journal import STATES
from holdfast.tasks.putting import Putter
from holdfast.tasks.verdict import Verdict


def test_from_put_to_done(queue: TaskQueue) -> None:
    id = queue.put({"url": "https://example.org"})
    assert queue.get(id).state == "pending" and id in queue
    claim = claimed(queue)
    assert claim.id == id and claim.payload == {"url": "https://example.org"}
    assert queue.get(id).state == "running" and queue.get(id).worker.startswith(f"{os.getpid()}@")
    claim.progress(1, 2, "half")
    claim.progress(2, 2, "too soon after the other one")
    assert queue.get(id).progress == (1, 2, "half")
    claim.complete([1, 2])
    task = queue.get(id)
    assert (task.state, task.result, task.tried, task.error) == ("done", [1, 2], 1, None)
    assert task.progress == (2, 2, "too soon after the other one"), "the last one is there"
    assert task.put_at <= task.started_at <= task.ended_at
    assert queue.claim() is None
    with pytest.raises(NotLocked):
        claim.complete()


def test_in_the_order_in_which_they_were_put(queue: TaskQueue, jobs: Path) -> None:
    other = TaskQueue(jobs)
    for number in range(2500):  # over the end of a directory, twice
        (queue, other)[number % 2].put(number)
    assert claim_all(queue) == list(range(2500))


def test_the_highest_priority_first(queue: TaskQueue) -> None:
    for priority in (0, 5, -3, 5, 100):
        queue.put(priority, priority=priority)
    first = claimed(queue)
    queue.put(7, priority=7)  # while others of a lower one are known already
    assert [first.payload, *claim_all(queue)] == [100, 7, 5, 5, 0, -3]


def test_once_by_its_id(queue: TaskQueue, jobs: Path) -> None:
    assert queue.put("first", id="a") == "a" and TaskQueue(jobs).put("second", id="a") == "a"
    assert claim_all(queue) == ["first"]
    queue.put("third", id="a")  # it has been done
    assert claim_all(queue) == [] and queue.get("a").payload == "first"


def test_by_one_id_from_many_threads(queue: TaskQueue, jobs: Path) -> None:
    barrier = threading.Barrier(4)

    def put() -> None:
        mine = TaskQueue(jobs, durable=False)
        barrier.wait()
        for number in range(100):
            mine.put(number, id=f"task {number}")

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim_all(queue)) == list(range(100))


@pytest.mark.parametrize("kind", ["nfs", "nfs4"])
def test_a_queue_is_refused_where_clients_may_read_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(queue_module, "mount_of", lambda *_: Mount(kind, "/mnt"))
    with pytest.raises(Unsupported, match=f"/mnt is {kind}, whose clients"):
        TaskQueue(tmp_path / "jobs")


@pytest.mark.parametrize("id", ["../x", "/etc/x", "a/b", "%2F", "a\0b", ".", "..", "ein Täsk", "a.b.c", "-", " "])
def test_ids_are_names(queue: TaskQueue, jobs: Path, id: str) -> None:
    before = sorted(path.name for path in jobs.parent.iterdir())
    queue.put(1, id=id)
    assert claimed(queue).id == id and queue.get(id).id == id
    assert sorted(path.name for path in jobs.parent.iterdir()) == before


def test_ids_that_cannot_be(queue: TaskQueue) -> None:
    for bad in ("", "x" * 300, 7):
        with pytest.raises(UnsafePath):
            queue.put(1, id=bad)  # type: ignore[arg-type]
    with pytest.raises(NoSuchTask, match="there is no task 'x'"):
        queue.get("x")


def test_what_is_wrong_is_said_at_once(queue: TaskQueue) -> None:
    for bad in (
        {"priority": 1.5},
        {"attempts": 0},
        {"delay": -1},
        {"timeout": 0},
        {"limit": 0},
        {"delay": float("nan")},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            queue.put(1, **bad)
    with pytest.raises((TypeError, ValueError)):
        queue.put(object())
    with pytest.raises(ValueError, match="JSON"):
        queue.put(float("nan"))
    assert queue.stats()["pending"] == 0 and list(queue) == [] and os.listdir(f"{queue.path}/new") == []


def test_a_person_can_read_it(queue: TaskQueue, jobs: Path) -> None:
    queue.put({"städte": ["Köln"]}, id="a7")
    claimed(queue).complete("fertig")
    lines = [json.loads(line) for line in (jobs / "tasks/a7").read_text().splitlines()]
    assert lines[0]["payload"] == {"städte": ["Köln"]} and "Köln" in (jobs / "tasks/a7").read_text()
    assert [line.get("is") for line in lines] == [None, "running", "done"] and lines[2]["result"] == "fertig"


def test_not_where_something_else_is(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(FileExistsError, match="precious"):
        TaskQueue(tmp_path)
    assert os.listdir(tmp_path) == ["precious"]


# Later.


def test_not_before_its_time(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    began, now = time.monotonic(), queue.clock.now()
    with monkeypatch.context() as patch:
        patch.setattr(queue.clock, "now", lambda: now)  # it stands still until we have looked
        queue.put("later", delay=0.3)
        queue.put("now")
        assert claim_all(queue) == ["now"]
        assert queue.get(next(task.id for task in queue if task.payload == "later")).state == "pending"
    claim = queue.claim(timeout=30)
    assert claim is not None and claim.payload == "later" and time.monotonic() - began > 0.29


def test_delays_over_many_directories(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    for delay in (10_000, 100, 1, 5000, 70):
        queue.put(delay, delay=delay)
    now = queue.clock.now
    for passed, due in ((2, [1]), (71, [70]), (101, [100]), (20_000, [5000, 10_000])):
        monkeypatch.setattr(queue.clock, "now", lambda passed=passed: now() + passed)
        assert claim_all(queue) == due


def test_the_clock_does_not_jump(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put("in a minute", delay=60)
    real = time.time
    for step in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda step=step: real() + step)
        assert TaskQueue(jobs).claim() is None
        queue.put("now")
        assert claim_all(TaskQueue(jobs)) == ["now"]


# Going wrong.


def test_tried_again_and_then_a_dead_letter(queue: TaskQueue, jobs: Path) -> None:
    id = queue.put("x", attempts=3)
    for attempt in (1, 2, 3):
        claim = queue.claim(timeout=30)
        assert claim is not None and claim.token == attempt
        with suppress(ValueError), claim:
            raise ValueError(f"number {attempt}")
        task = queue.get(id)
        assert task.error == f"ValueError: number {attempt}" and "test_tasks.py" in (task.traceback or "")
        assert task.state == ("failed" if attempt == 3 else "pending")
    assert queue.claim(timeout=0.1) is None and os.listdir(jobs / "failed") == [id]
    queue.retry(id)
    with queue.claim(timeout=30) as again:  # type: ignore[union-attr]
        assert again.token == 4
    task = queue.get(id)
    assert task.state == "done" and task.error is None and os.listdir(jobs / "failed") == []
    assert [said["because"] for said in task.history if "because" in said] == [
        f"ValueError: number {n}" for n in (1, 2, 3)
    ]


def test_pauses_grow(queue: TaskQueue) -> None:
    queue.retry_after, queue.retry_most = 1.0, 10.0
    for tried, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (5, 10.0), (2000, 10.0)):
        pauses = [queue._delay_after(tried) for _ in range(100)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


def test_given_back_is_no_attempt(queue: TaskQueue) -> None:
    queue.put("x", attempts=1)
    for _ in range(3):
        claimed(queue).give_back()
    claim = claimed(queue)
    assert claim.task.tried == 1 and not claim.fail("broken")


def test_an_interrupt_gives_it_back(queue: TaskQueue) -> None:
    id = queue.put("x")
    with pytest.raises(KeyboardInterrupt), claimed(queue):
        raise KeyboardInterrupt
    assert queue.get(id).state == "pending" and queue.get(id).tried == 0


def test_only_what_has_ended_can_be_retried(queue: TaskQueue) -> None:
    id = queue.put("x")
    with pytest.raises(NotLocked, match="pending"):
        queue.retry(id)
    claim = claimed(queue)
    with pytest.raises(NotLocked, match="being worked on"):
        queue.retry(id)
    claim.complete()
    queue.retry(id)
    assert claim_all(queue) == ["x"]
    with pytest.raises(NoSuchTask):
        queue.retry("nothing")


def test_cancelling(queue: TaskQueue) -> None:
    waiting, later, running, done = (queue.put(n, id=f"{n}", delay=100 * (n == 1), priority=-n) for n in range(4))
    queue.put(4, id="4", priority=9)
    first = claimed(queue)
    assert queue.cancel(waiting) and queue.cancel(later) and not first.cancelled
    assert claimed(queue).id == running  # which is let go at once, and so waits again
    assert queue.cancel(first.id) and first.cancelled
    first.complete()  # it was quicker
    assert queue.get(first.id).state == "done" and not queue.cancel(first.id)
    assert queue.cancel(running)
    assert claim_all(queue) == [3]
    assert [queue.get(id).state for id in (waiting, later, running, done)] == ["cancelled"] * 3 + ["done"]
    assert queue.stats() == {
        "pending": 0,
        "running": 0,
        "done": 2,
        "failed": 0,
        "cancelled": 3,
        "delayed": 0,
        "parked": 0,
    }
    queue.retry(later)
    assert claim_all(queue) == [1]


def test_what_was_cancelled_while_it_waited(queue: TaskQueue) -> None:
    for delay in (0, 100):
        id = queue.put("x", delay=delay)
        queue.cancel(id)
        assert queue.stats()["pending"] == 0 and queue.is_empty()
        assert queue.purge() == 1 and queue.is_empty() and queue.stats()["pending"] == 0
    id = queue.put("y")
    queue.cancel(id)
    queue.retry(id)
    assert queue.stats()["pending"] == 1 and queue.stats()["cancelled"] == 0
    assert claim_all(queue) == ["y"] and queue.is_empty()


def test_purging(queue: TaskQueue, jobs: Path) -> None:
    for number in range(5):
        queue.put(number, id=f"{number}", attempts=1)
    claimed(queue).complete()
    claimed(queue).fail("no")
    queue.cancel("2")
    running = claimed(queue)
    assert queue.purge(older_than=60) == 0 and queue.purge() == 3
    assert sorted(task.id for task in queue) == ["3", "4"] and running.task.id == "3"
    running.complete()
    assert claim_all(queue) == [4]
    assert os.listdir(jobs / "failed") == os.listdir(jobs / "cancelled") == []
    queue.put("again", id="0")
    assert claim_all(queue) == ["again"]


def test_purge_only_some(queue: TaskQueue) -> None:
    for id in ("good", "bad", "gone"):
        queue.put(id, id=id, attempts=1)
    claimed(queue).complete()
    claimed(queue).fail("no")
    queue.cancel("gone")
    with pytest.raises(ValueError, match="not 'pending'"):
        queue.purge(states=["done", "pending"])
    assert queue.purge(states=["done", "cancelled"]) == 2
    assert [task.id for task in queue] == ["bad"]


def test_many_with_one_wait_for_the_disk(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TaskQueue(jobs)
    syncs: list[int] = []
    monkeypatch.setattr(system, "fsync", lambda fd: pytest.fail("that is slow"))
    monkeypatch.setattr(system, "sync_file_system", lambda path: syncs.append(queue.stats()["pending"]))
    ids = queue.put_all(range(1500), priority=2, key="k")
    assert syncs == [1000, 1500]  # when all of them are there
    assert queue.ids("pending") == ids and queue.get(ids[7]).priority == 2
    for key in (None, "k"):
        with pytest.raises(TypeError):
            queue.put_all([*range(20), object()], key=key)  # before anything is put
    assert queue.stats()["pending"] == 1500


def test_many_until_one_cannot_be_put(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it are there, and on disk."""
    queue = TaskQueue(jobs)
    syncs: list[int] = []
    monkeypatch.setattr(system, "sync_file_system", lambda path: syncs.append(queue.stats()["pending"]))
    link, links = system.link, iter(range(12))

    def fails_at_last(*words: object, **options: object) -> None:
        if next(links, None) is None:
            raise OSError(28, "No space left on device")
        link(*words, **options)

    monkeypatch.setattr(system, "link", fails_at_last)
    with pytest.raises(OSError, match="No space"):
        queue.put_all(range(20), key="k")
    assert syncs == [12] and os.listdir(jobs / "new") == []


@pytest.mark.parametrize("few", [True, False])
def test_many_where_the_file_system_cannot_be_synced(jobs: Path, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Or where that would take longer than to sync each."""
    queue = TaskQueue(jobs)
    fsync, syncs = system.fsync, []
    monkeypatch.setattr(system, "fsync", lambda fd: (syncs.append(fd), fsync(fd)))
    monkeypatch.setattr(system, "sync_file_system", pytest.fail if few else None)
    number = 3 if few else 20
    assert len(queue.put_all(range(number), key="k")) == number and len(syncs) >= 3 * number


def test_what_cannot_be_begun_now(queue: TaskQueue) -> None:
    began = time.monotonic()
    queue.put(0, id="now")
    queue.put(0, id="later", delay=100)
    queue.put(0, id="first.of.key", key="k")
    queue.put(0, id="second.of.key", key="k")
    one, other = claimed(queue), claimed(queue)
    assert queue.claim() is None
    put_off = queue.put_off()
    passed = time.monotonic() - began
    assert put_off["second.of.key"] is None and 99.9 - passed < put_off["later"] <= 100 and len(put_off) == 2
    one.complete()
    other.complete()
    assert list(queue.put_off()) == ["later"]


def test_waiting_for_the_end(queue: TaskQueue, jobs: Path) -> None:
    ids = queue.put_all(["a", "b"])
    with pytest.raises(Timeout, match="still pending"):
        queue.wait(ids, timeout=0.05)
    began = threading.Event()

    def work() -> None:
        began.wait()
        claim_all(TaskQueue(jobs))

    thread = threading.Thread(target=work)
    thread.start()
    began.set()
    assert [task.state for task in queue.wait(ids, timeout=30)] == ["done", "done"]
    thread.join()


# Limits.


def test_so_many_of_a_key(queue: TaskQueue, jobs: Path) -> None:
    other = TaskQueue(jobs)
    for number in range(6):
        queue.put(number, key="one user", limit=2)
    queue.put("free")
    a, b, c = claimed(queue), claimed(other), claimed(queue)
    assert (a.payload, b.payload, c.payload) == (0, 1, "free") and other.claim() is None
    assert queue.stats()["parked"] >= 1
    b.complete()
    d = queue.claim(timeout=30)
    assert d is not None and d.payload == 2 and other.claim() is None
    a.abandon()  # as if it had died
    del a
    found = []
    while len(found) < 4:
        claim = other.claim(timeout=30)
        assert claim is not None
        found.append(claim.payload)
        claim.complete()
    d.complete()
    assert sorted(found, key=str) == [0, 3, 4, 5] and other.claim() is None


def test_not_more_than_so_many(jobs: Path) -> None:
    queue = TaskQueue(jobs, max_pending=3)
    for number in range(3):
        queue.put(number, id=str(number))
    assert queue.put("again", id="1") == "1", "it is there, so nothing happens"
    with pytest.raises(QueueFull, match="3 tasks wait already"):
        queue.put("x")
    with pytest.raises(QueueFull):
        queue.put("x", wait=0.05)
    thread = threading.Thread(target=lambda: TaskQueue(jobs).claim().complete())  # type: ignore[union-attr]
    thread.start()
    queue.put("x", wait=20)
    thread.join()
    assert claim_all(queue) == [1, 2, "x"]


# Hazards.


def test_a_worker_that_lost_its_lease_completes_nothing(queue: TaskQueue, jobs: Path) -> None:
    """As if its machine had been cut off, and the server had given its lock to another one."""
    id = queue.put("x")
    queue._desk.shared = True
    slow = claimed(queue)
    other = TaskQueue(jobs)
    other._desk.lock = lambda fd, op: None  # type: ignore[assignment]
    (place,) = os.listdir(jobs / "running")
    quick = other._desk.open(f"{jobs}/running/{place}", place)
    assert quick is not None
    quick.begin()
    with pytest.raises(LockLost, match="taken from this worker"):
        slow.complete("old")
    assert queue.get(id).result is None
    quick.complete("new")
    assert queue.get(id).result == "new" and queue.get(id).token == 2


def test_a_directory_that_is_half_deleted(queue: TaskQueue, jobs: Path) -> None:
    for number in range(5):
        queue.put(number, id=f"{number}")
    import shutil

    for name in ("pending", "sequence", "new"):
        path = jobs / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    queue = TaskQueue(jobs)
    assert queue.claim() is None and queue.get("3").state == "pending"
    queue.put("new", id="5")
    assert queue.recover() == 5
    assert sorted(claim_all(queue), key=str) == [0, 1, 2, 3, 4, "new"]


def test_dead_letters_are_found_again(queue: TaskQueue, jobs: Path) -> None:
    import shutil

    queue.put("f", id="f", attempts=1)
    claimed(queue).fail("no")
    queue.put("c", id="c")
    queue.cancel("c")
    for name in ("failed", "cancelled", "pending"):
        shutil.rmtree(jobs / name)
    queue = TaskQueue(jobs)
    assert queue.recover() == 2 and queue.recover() == 0
    assert (queue.stats()["failed"], queue.stats()["cancelled"], queue.stats()["done"]) == (1, 1, 0)


def test_while_it_is_used(queue: TaskQueue, jobs: Path) -> None:
    import shutil

    queue.put("a", id="a")
    shutil.rmtree(jobs / "pending")
    (jobs / "sequence").unlink()
    (jobs / "pending").mkdir()
    assert queue.claim() is None
    TaskQueue(jobs).put("b")
    claim = queue.claim(timeout=30)
    assert claim is not None and claim.payload == "b"


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[]", b"null", b"7", b'{"id": 7}', b"\xff\xfe"])
def test_what_is_no_task_is_put_aside(
    queue: TaskQueue, jobs: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    queue.put("first", id="broken")
    queue.put("second", id="good")
    (jobs / "tasks/broken").write_bytes(content)
    assert claim_all(queue) == ["second"]
    assert os.listdir(jobs / "failed") == ["broken"] and "broken" in caplog.text


@pytest.mark.parametrize("on_sheets", [False, True])
def test_a_full_disk(small_disk: Path, on_sheets: bool) -> None:
    """What was put is there, what was not is not; what cannot be written down is not done, until there is room."""
    (small_disk / "ballast").write_bytes(b"x" * 60_000)
    queue = TaskQueue(small_disk / "jobs")
    ids = [queue.put("x" * 2000, id=None if on_sheets else "0")]
    first = claimed(queue)
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        while True:
            ids.append(queue.put("x" * 2000, id=None if on_sheets else f"{len(ids)}"))
    assert len(ids) > 20 and os.listdir(f"{queue.path}/new") == []
    with pytest.raises(OSError, match="No space left"):
        first.complete("y" * 100_000)
    first.abandon()
    assert queue.get(ids[0]).state == "pending"
    if not on_sheets:  # which have room behind what is written
        with pytest.raises(OSError, match="No space left"):
            TaskQueue(queue.path).claim()
    os.unlink(small_disk / "ballast")
    assert len(claim_all(TaskQueue(queue.path))) == len(ids)
    assert {task.id: task.state for task in queue} == dict.fromkeys(ids, "done")


def test_a_line_that_is_not_whole(queue: TaskQueue, jobs: Path) -> None:
    id = queue.put("x")
    claimed(queue).fail("no", delay=0)
    with open(jobs / "tasks" / id, "ab") as file:
        file.write(b'{"is": "do')
    assert queue.get(id).state == "pending"
    claimed(queue).complete(1)
    assert queue.get(id).state == "done" and queue.get(id).tried == 2


@pytest.mark.parametrize("left", [b"", b"\0" * 60, b'{"id": "a", "pay'])
@pytest.mark.parametrize("found_first", [False, True])
def test_the_power_fails_before_it_is_on_disk(queue: TaskQueue, jobs: Path, left: bytes, found_first: bool) -> None:
    """Its names are there, and not what is in it. Nobody was told that it is; who puts it again is."""
    queue.put("lost", id="a")
    (jobs / "tasks/a").write_bytes(left)
    if found_first:
        assert queue.claim() is None
    queue.put("again", id="a")
    assert claim_all(queue) == ["again"] and queue.get("a").state == "done"
    (jobs / "tasks/b").write_text("somebody's work, with a mistake in it\n")
    queue.put("b", id="b")
    assert (jobs / "tasks/b").read_text() == "somebody's work, with a mistake in it\n"


def test_who_puts_dies_before_it_is_in_its_place(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(queue._putter, "enqueue", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            queue.put("x", id="a")
    assert queue.claim() is None
    queue.put("x", id="a")  # says the same again
    assert claim_all(queue) == ["x"]


def test_an_editor_that_writes_a_new_file(queue: TaskQueue, jobs: Path) -> None:
    queue.put("old", id="a")
    text = (jobs / "tasks/a").read_text()
    (jobs / "tasks/new").write_text(text.replace("old", "mended"))
    (jobs / "tasks/new").rename(jobs / "tasks/a")
    assert claim_all(queue) == ["mended"] and queue.get("a").state == "done"


def test_what_is_not_a_task_is_in_nobodys_way(queue: TaskQueue, jobs: Path) -> None:
    """Whatever somebody has put there, or written into a file."""
    queue.put("good", id="good")
    for number, said in enumerate(({"is": []}, {"is": "running", "token": "x"}, {"progress": 3}, {"at": {}})):
        queue.put("odd", id=f"odd {number}", priority=1)
        with open(jobs / f"tasks/odd {number}", "a") as file:
            file.write(json.dumps(said) + "\n")
    (bucket,) = (jobs / "pending/1").iterdir()
    (bucket / "no number").touch()
    (bucket / "000000000009.directory").mkdir()
    (bucket / "000000000010.link").symlink_to("/etc/passwd")
    (jobs / "running/000000000001.directory").mkdir()
    (jobs / "running/.swp").touch()
    (jobs / "ending/good").mkdir()
    (jobs / "parked/k").mkdir()
    (jobs / "parked/k/.swp").touch()
    (jobs / "sequence").write_text("no number")
    found = claim_all(queue)
    assert sorted(map(str, found)) == ["good", *["odd"] * 4]


@pytest.mark.parametrize("bad", [{"timeout": 10**400}, {"key": ""}, {"key": "k" * 300}, {"key": "\ud800"}])
def test_what_no_worker_could_take_is_refused(queue: TaskQueue, bad: dict[str, object]) -> None:
    with pytest.raises((ValueError, UnsafePath)):
        queue.put("x", **bad)  # type: ignore[arg-type]
    deep: object = 1
    for _ in range(500):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        queue.put(deep)


def test_parked_ones_come_back_in_order(queue: TaskQueue) -> None:
    running = queue.put("first", key="k", priority=20)
    first = claimed(queue)
    assert first.id == running
    for priority in (0, 10, -5, 5):
        queue.put(priority, key="k", priority=priority)
    assert queue.claim() is None and queue.stats()["parked"] == 4
    first.complete()
    assert claim_all(queue) == [10, 5, 0, -5]


CALLS = ("open_fd", "close", "fstat", "stat", "access", "pread", "pwrite", "write", "rename", "unlink", "link", "mkdir")
ACTIONS = ["put", "later", "retry", "cancel", "claim", "complete", "fail", "give back", "take over"]


@pytest.mark.parametrize("what", ACTIONS)
def test_killed_at_every_call(what: str, in_memory: Path) -> None:
    """Whoever goes on afterwards finds every task that was acknowledged, once, and none that was cancelled."""
    number, ended = 0, False
    while not ended:
        jobs = in_memory / str(number)
        queue = TaskQueue(jobs, durable=False, retry_after=0.001)
        if what not in ("put", "later"):
            queue.put("x", id="a")
        if what == "retry":
            claimed(queue).complete()
        if what == "take over":
            in_child(lambda jobs=jobs: claimed(TaskQueue(jobs, durable=False)).id)

        def work(jobs: Path = jobs, number: int = number) -> None:
            mine = TaskQueue(jobs, durable=False, retry_after=0.001)
            claim = claimed(mine) if what in ("complete", "fail", "give back") else None
            die_before_call(number, {system: CALLS})
            if what in ("put", "later"):
                mine.put("x", id="a", delay=0.001 * (what == "later"))
            elif what == "retry":
                mine.retry("a")
            elif what == "cancel":
                mine.cancel("a")
            elif claim is None:
                claimed(mine).abandon()
            elif what == "fail":
                claim.fail("no")
            else:
                claim.complete() if what == "complete" else claim.give_back()

        ended = survives(work)
        queue = TaskQueue(jobs, durable=False)
        if what == "retry" and queue.get("a").state == "done":
            queue.retry("a")
        if what in ("put", "later", "retry"):
            queue.put("x", id="a")
        cancelled = what == "cancel" and queue.get("a").state == "cancelled"
        ran = []
        while (claim := queue.claim(timeout=0.05)) is not None:
            ran.append(claim.payload)
            claim.complete()
        states = [said["is"] for said in queue.get("a").history if "is" in said]
        if cancelled:
            assert ran == [] and states[-1] == "cancelled", (number, states)
        else:
            assert states[-1] == "done" and states.count("done") == (2 if what == "retry" else 1), (number, states)
        number += 1
    assert number > 2


def test_the_ids_in_a_state(queue: TaskQueue) -> None:
    for id in ("done", "failed.x", "cancelled"):
        queue.put(1, id=id, attempts=1)
    claimed(queue).complete()
    claimed(queue).fail("no")
    queue.cancel("cancelled")
    queue.put(1, id="low", priority=-5)
    queue.put(1, id="a/b")
    queue.put(1, id="high.5", priority=10)
    queue.put(1, id="la.ter", priority=3, delay=600)
    queue.put(1, id="running", priority=20, key="k")
    queue.put(1, id="par.ked", priority=19, key="k")
    running = claimed(queue)
    claimed(queue).give_back()  # which has the other one parked
    assert queue.ids("running") == ["running"] and queue.ids("done") == ["done"]
    assert queue.ids("failed") == ["failed.x"] and queue.ids("cancelled") == ["cancelled"]
    assert queue.ids("pending") == ["high.5", "a/b", "low", "la.ter", "par.ked"]
    assert {state: len(queue.ids(state)) for state in STATES} == {state: queue.stats()[state] for state in STATES}
    with pytest.raises(ValueError, match="not 'ready'"):
        queue.ids("ready")
    running.complete()


def test_what_is_on_its_way_is_not_done(queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for id in ("back", "new"):
        queue.put(0, id=id)
    claim = claimed(queue)

    # Given back after we looked for what waits, and before we look at what runs.
    waiting = queue._inventory._names_waiting()
    monkeypatch.setattr(queue._inventory, "_names_waiting", lambda: waiting)
    claim.give_back()
    assert queue.stats()["done"] == 0 and queue.ids("done") == []
    monkeypatch.undo()

    # Put by somebody who has been stopped before it had a place.
    [place] = jobs.glob("pending/*/*/*.new")
    place.rename(jobs / "new" / "x")
    assert queue.stats()["done"] == 0 and queue.ids("done") == []
    assert queue.stats()["pending"] == 1


# A second attack, by one who did not write this.


def test_cancelling_what_a_dead_worker_had(queue: TaskQueue, jobs: Path) -> None:
    """Its name in running/ and the one in cancelled/ are of one file: to rename that does nothing."""
    queue.put("x", id="x")
    assert not survives(lambda: queue.claim() and os.kill(os.getpid(), signal.SIGKILL))
    assert queue.cancel("x") and queue.claim() is None
    assert queue.taker.try_claim(look=True) is None
    assert os.listdir(jobs / "running") == [] and queue.get("x").state == "cancelled" and queue.is_empty()


@pytest.mark.parametrize("how", ["fail", "give back", "raise"])
def test_a_cancelled_task_is_not_done_again(how: str, queue: TaskQueue) -> None:
    queue.put("x", id="x")
    claim = claimed(queue)
    assert queue.cancel("x") and claim.cancelled
    if how == "fail":
        assert not claim.fail("no")
    elif how == "give back":
        claim.give_back()
    else:
        with pytest.raises(ZeroDivisionError), claim:
            _ = 1 / 0
    assert queue.get("x").state == "cancelled" and queue.claim() is None


def test_giving_back_does_not_take_back_a_cancellation(queue: TaskQueue) -> None:
    queue.put("x", id="x")
    claim = claimed(queue)
    assert queue.cancel("x")
    queue.taker.say_how_it_ends(claim.place, queue.get("x"), Verdict("pending", "its worker was ended"))
    claim.abandon()
    assert queue.taker.settle_place(claim.place, 0.0) and queue.get("x").state == "cancelled"


@pytest.mark.parametrize("do", ["purge", "retry"])
def test_it_is_purged_and_put_again_in_between(do: str, queue: TaskQueue, jobs: Path) -> None:
    """Between opening the file and locking it."""
    queue.put("old", id="x")
    claimed(queue).complete()
    other, lock, times = TaskQueue(jobs), queue._desk.lock, []

    def late(fd: int, op: int) -> None:
        if not times:
            times.append(other.purge())
            other.put("new", id="x")
        lock(fd, op)

    queue._desk.lock = late
    if do == "purge":
        assert queue.purge() == 0
    else:
        with pytest.raises(NotLocked, match="has not ended"):
            queue.retry("x")
    queue._desk.lock = lock
    assert times == [1] and other.get("x").payload == "new" and claim_all(other) == ["new"]


def test_a_put_that_others_have_helped_and_done_and_purged(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, enqueue = TaskQueue(jobs), Putter.enqueue

    def late(putter: Putter, *words: Any) -> list[str]:
        if putter is queue._putter:
            other.rescue()
            claimed(other).complete()
            assert other.purge() == 1
        return enqueue(putter, *words)

    monkeypatch.setattr(Putter, "enqueue", late)
    assert queue.put("x", id="x") == "x" and queue.is_empty()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESPIPE, errno.EBADMSG])
def test_one_file_that_cannot_be_read(number: int, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put("bad", id="bad")
    queue.put("good")
    pread = system.pread

    def broken(fd: int, size: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".bad"):
            raise OSError(number, os.strerror(number))
        return pread(fd, size, at)

    monkeypatch.setattr(system, "pread", broken)
    assert claimed(queue).payload == "good"


def test_what_is_no_task_in_the_way(queue: TaskQueue, jobs: Path) -> None:
    (jobs / "pending/0").mkdir(parents=True)
    (jobs / "pending/0/README").write_text("not ours")
    (jobs / "pending/0/\N{SUPERSCRIPT TWO}").mkdir()
    os.mkfifo(jobs / "tasks/fifo")
    (jobs / "tasks/folder").mkdir()
    queue.put("x", id="x", key="k")
    first = claimed(queue)
    queue.put("y", id="y", key="k")
    assert queue.claim() is None and len(list((jobs / "parked/k").iterdir())) == 1
    (jobs / "parked/k/.DS_Store").write_text("not ours")
    first.complete()
    assert claim_all(queue) == ["y"]
    (jobs / "pending/0/000000000").mkdir(exist_ok=True)
    (jobs / "pending/0/000000000/README").write_text("not ours")
    assert queue.is_empty() and {task.id for task in queue} == {"x", "y"} and queue.recover() == 0


def test_who_puts_it_again_promises_it_too(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was first may have died before it was on disk."""
    queue.put("x", id="x")
    synced: list[str] = []
    monkeypatch.setattr(system, "sync_file_system", synced.append)
    queue.put("x", id="x")
    assert synced == [f"{queue.path}/tasks"]


def test_what_was_cancelled_takes_no_room(jobs: Path) -> None:
    queue = TaskQueue(jobs, max_pending=2)
    for name in "ab":
        queue.put(name, id=name, delay=1000)
        assert queue.cancel(name)
    assert queue.put("c", id="c") == "c"


def test_a_result_that_could_not_be_read_again(queue: TaskQueue) -> None:
    result: list[object] = []
    for _ in range(300):
        result = [result]
    queue.put("x", id="x", attempts=1)
    claim = claimed(queue)
    with pytest.raises(ValueError, match="nested"):
        claim.complete(result)
    claim.complete("fine")
    assert queue.get("x").result == "fine"


@pytest.mark.parametrize("how", ["recover", "retry"])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_was_put_aside_and_mended_is_not_failed_any_more(
    queue: TaskQueue, jobs: Path, how: str, replaced: bool
) -> None:
    queue.put("x", id="x")
    path = jobs / "tasks" / "x"
    good = path.read_bytes()
    path.write_bytes(b"{broken\n")
    assert Worker(queue, lambda task: None).run(drain=True).failed == 1
    assert queue.stats()["failed"] == 1
    if replaced:
        path.unlink()
    path.write_bytes(good)
    if how == "recover":
        assert queue.recover() == 1
    else:
        queue.retry("x")
    assert claim_all(queue) == ["x"]
    stats = queue.stats()
    assert (stats["failed"], stats["done"]) == (0, 1) and queue.ids("failed") == []


def test_what_was_put_aside_and_removed_is_purged(queue: TaskQueue, jobs: Path) -> None:
    queue.put("x", id="x")
    (jobs / "tasks" / "x").write_bytes(b"{broken\n")
    assert queue.claim() is None
    (jobs / "tasks" / "x").unlink()
    assert queue.purge(states="done") == 0 and queue.stats()["failed"] == 1
    assert queue.purge() == 1 and queue.stats()["failed"] == 0


@pytest.mark.parametrize("where", ["link", "link/queue"])
def test_below_a_link_to_nowhere_there_is_no_queue(tmp_path: Path, where: str) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match="link"):
        TaskQueue(tmp_path / where)


@pytest.mark.parametrize(
    "wrong",
    [{"max_pending": 0}, {"max_pending": "x"}, {"retry_after": "x"}, {"retry_most": -1}, {"stale_after": float("nan")}],
    ids=str,
)
def test_settings_that_cannot_be(jobs: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TaskQueue(jobs, **wrong)


def test_an_empty_key(queue: TaskQueue) -> None:
    with pytest.raises(ValueError, match="a key is a text"):
        queue.put("x", key="")


def test_a_payload_that_is_too_long_for_an_environment(queue: TaskQueue) -> None:
    id = queue.put("x" * 200_000)
    short = queue.put("short")
    command = [sys.executable, "-c", "import os; print(len(os.environ.get('HOLDFAST_TASK_PAYLOAD', '')))"]
    assert Worker(queue, command).run(drain=True).done == 2
    assert queue.get(id).result == "0" and queue.get(short).result == "7"


def test_a_first_line_with_more_than_usual() -> None:
    line = journal.first_line("a", "x", 0, 3, None, None, 1, 0).rstrip(b"}\n")
    task = journal.parse(line + b', "timeout": "soon", "limit": 0, "key": 5, "state": "done"}\n', "a")
    assert (task.timeout, task.limit, task.key, task.state) == (None, 1, None, "pending")


def test_a_first_line_with_a_priority_that_cannot_be() -> None:
    line = journal.first_line("a", "x", 0, 3, None, None, 1, 0)
    for wrong, right in ((b"1" + b"0" * 30, 10**9), (b"-1" + b"0" * 30, -(10**9)), (b"true", 0), (b"1.5", 0)):
        assert journal.parse(line.replace(b'"priority": 0', b'"priority": ' + wrong), "a").priority == right


def test_a_clock_that_is_set_back_within_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for now, text in (
        (5_000_000_001_000, b"01:23:20.000001Z"),
        (4_999_999_999_000, b"01:23:19.999999Z"),
        (0, b"00.000000Z"),
    ):
        monkeypatch.setattr(journal, "time_ns", lambda now=now: now)
        assert journal.moment().endswith(text) and journal.moment().startswith(b"1970-01-01T")


def test_what_was_put_aside_and_removed_stays_as_long_as_other_failed_ones(queue: TaskQueue, jobs: Path) -> None:
    queue.put("x", id="x")
    (jobs / "tasks" / "x").write_bytes(b"{broken\n")
    assert queue.claim() is None
    (jobs / "tasks" / "x").unlink()
    assert queue.purge(older_than=3600) == 0
    os.utime(jobs / "failed" / "x", (1, 1))
    assert queue.purge(older_than=3600) == 1 and queue.ids("failed") == []


def test_a_schedule_that_cannot_be_written_leaves_nothing(
    queue: TaskQueue, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(system, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        queue.schedule("report", every=60)
    assert os.listdir(jobs / "schedules") == []
