"""Promises kept by one wait for the disk: what a power failure leaves is made good by the next one to open."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import in_child

from holdfast import owner, system
from holdfast.tasks import TaskQueue, redo

pytestmark = pytest.mark.skipif(system.sync_file_system is None, reason="there is no redo log here")


@pytest.fixture(autouse=True)
def _from_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "_FEW", 0)


@pytest.fixture
def jobs(in_memory: Path) -> Path:
    return in_memory / "jobs"


@pytest.fixture
def start_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The machine."""
    boots = iter(range(1000))
    return lambda: monkeypatch.setattr(owner, "_boot_id", f"boot-{next(boots)}")


def logs(jobs: Path) -> list[Path]:
    return sorted((jobs / "redo").glob("*"))


def payloads(queue: TaskQueue) -> list[object]:
    found = []
    while (claim := queue.claim()) is not None:
        found.append(claim.payload)
        claim.complete()
    return found


def lose_power(before: Path, now: Path, after: Path, chance: random.Random) -> None:
    """What may be there afterwards, if only the redo log was synced since `before`: of each file what it was, what it
    is, a part of it, or zeros; and each of its names, or not."""
    shutil.copytree(before, after)
    for folder, _, names in os.walk(now):
        (after / Path(folder).relative_to(now)).mkdir(exist_ok=True)
        if folder.endswith("/redo"):
            for name in names:
                shutil.copy(f"{folder}/{name}", after / "redo" / name)
    inodes: dict[int, list[Path]] = {}
    for folder, _, names in os.walk(now):
        for name in names:
            path = Path(folder, name)
            if "redo" not in path.parts:
                inodes.setdefault(path.stat().st_ino, []).append(path.relative_to(now))
    for paths in inodes.values():
        text = (now / paths[0]).read_bytes()
        old = next((before / path for path in paths if (before / path).exists()), None)
        least = len(old.read_bytes()) if old is not None else 0
        size = chance.choice([len(text), len(text), least, chance.randint(least, len(text))])
        text = text[:size] + (b"\0" * (len(text) - size) if chance.random() < 0.5 else b"")
        kept = [path for path in paths if (before / path).exists() or chance.random() < 0.5]
        for path in paths:
            (after / path).unlink(missing_ok=True)
        for path in kept:
            if path is kept[0]:
                (after / path).write_bytes(text)
            else:
                os.link(after / kept[0], after / path)
    for folder, _, names in os.walk(before):
        for name in names:
            path = Path(folder, name).relative_to(before)
            if not (now / path).exists() and path.parts[0] != "redo" and chance.random() < 0.5:
                (after / path).unlink(missing_ok=True)  # it was removed since


@pytest.mark.parametrize("seed", range(60))
def test_the_power_fails(in_memory: Path, start_again: Callable[[], None], seed: int) -> None:
    """Every task that somebody was told of is there, and done if somebody was told so; the others wait, once each."""
    chance = random.Random(seed)
    start_again()
    now = in_memory / "now"
    queues = [TaskQueue(now), TaskQueue(now)]
    waiting = {str(n): queues[0].put(n, id=str(n)) for n in range(3)}
    shutil.copytree(now, in_memory / "before")
    for log in logs(in_memory / "before"):
        log.unlink()  # all of that is on disk
    done: set[str] = set()
    for number in range(3, 12):
        queue = chance.choice(queues)
        if chance.random() < 0.6:
            waiting[str(number)] = queue.put(number, id=str(number), priority=chance.choice([0, 0, 1]))
        elif (claim := queue.claim()) is not None:
            claim.complete("said")
            del waiting[claim.id]
            done.add(claim.id)
    lose_power(in_memory / "before", now, in_memory / "after", chance)
    start_again()
    queue = TaskQueue(in_memory / "after")
    assert {id for id in done if queue.get(id).state != "done" or queue.get(id).result != "said"} == set()
    assert {queue.get(id).state for id in waiting} <= {"pending"}
    assert sorted(map(str, payloads(queue))) == sorted(waiting)
    assert logs(in_memory / "after") == [] or all(log.name.startswith("boot-1.") for log in logs(in_memory / "after"))
    assert {task.state for task in queue} <= {"done"}


def test_what_was_purged_does_not_come_back(jobs: Path, in_memory: Path, start_again: Callable[[], None]) -> None:
    start_again()
    queue, other = TaskQueue(jobs), TaskQueue(jobs)
    queue.put("first", id="a")
    other.put("second", id="b")
    assert payloads(queue) == ["first", "second"] and len(logs(jobs)) == 2
    assert queue.purge() == 2 and logs(jobs) == []
    other.put("third", id="c")  # in a new file, for its own is gone
    assert len(logs(jobs)) == 1
    start_again()
    assert payloads(TaskQueue(jobs)) == ["third"]


def test_a_task_of_the_same_name(jobs: Path, start_again: Callable[[], None]) -> None:
    start_again()
    queue = TaskQueue(jobs)
    queue.put("old", id="a")
    assert payloads(queue) == ["old"] and queue.purge() == 1
    queue.put("new", id="a")
    shutil.rmtree(jobs / "tasks")
    shutil.rmtree(jobs / "pending")
    start_again()
    assert payloads(TaskQueue(jobs)) == ["new"]


def test_it_begins_anew_when_it_is_large(
    jobs: Path, start_again: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo, "_LARGE", 2000)
    sync, synced = system.sync_file_system, []
    assert sync is not None
    start_again()
    queue = TaskQueue(jobs)
    monkeypatch.setattr(system, "sync_file_system", lambda path: (synced.append(len(logs(jobs))), sync(path)))
    for number in range(60):
        queue.put(number)
    (log,) = logs(jobs)
    assert 3 <= len(synced) <= 6 and len(log.read_bytes().strip()) < 2500
    (jobs / "tasks" / queue.put("last", id="last")).unlink()
    start_again()
    assert sorted(map(str, payloads(TaskQueue(jobs)))) == sorted([*map(str, range(60)), "last"])


def test_many_processes_leave_few_files(jobs: Path, start_again: Callable[[], None]) -> None:
    start_again()
    TaskQueue(jobs)
    for number in range(40):
        TaskQueue(jobs).put(number)
    assert len(logs(jobs)) <= redo._MANY_FILES and len(payloads(TaskQueue(jobs))) == 40


def test_who_promises_little_does_without(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "_FEW", 3)
    queue = TaskQueue(jobs)
    for number in range(3):
        queue.put(number)
    assert not (jobs / "redo").exists()
    queue.put(3)
    assert len(logs(jobs)) == 1


def test_a_forked_child_has_its_own(jobs: Path, start_again: Callable[[], None]) -> None:
    start_again()
    queue = TaskQueue(jobs)
    queue.put("ours")
    in_child(lambda: queue.put("the child's") and None)
    queue.put("ours, too")
    assert len(logs(jobs)) == 2
    for name in ("tasks", "pending"):
        shutil.rmtree(jobs / name)
    start_again()
    assert payloads(TaskQueue(jobs)) == ["ours", "the child's", "ours, too"]


def test_the_disk_is_full(jobs: Path, start_again: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot be promised anything is told so, and what was promised before holds."""
    start_again()
    queue = TaskQueue(jobs)
    queue.put("kept")
    (log,) = logs(jobs)
    pwrite, promise = system.pwrite, queue._redo.promise
    with monkeypatch.context() as patch:
        patch.setattr(
            system, "pwrite", lambda fd, text, at: pwrite(fd, text[:5], at) if b"line" in text else pwrite(fd, text, at)
        )
        with pytest.raises(OSError, match="No space"):
            promise("nothing", b'{"line": 1}\n', -1)
    queue.put("kept, too")
    assert log.read_bytes().count(b"\n{") == 1 and b"nothing" not in log.read_bytes()
    for name in ("tasks", "pending"):
        shutil.rmtree(jobs / name)
    start_again()
    assert payloads(TaskQueue(jobs)) == ["kept", "kept, too"]


def test_several_open_it_at_once(jobs: Path, start_again: Callable[[], None]) -> None:
    start_again()
    queue = TaskQueue(jobs)
    for number in range(50):
        queue.put(number)
    for name in ("tasks", "pending"):
        shutil.rmtree(jobs / name)
    start_again()
    threads = [threading.Thread(target=TaskQueue, args=(jobs,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert payloads(TaskQueue(jobs)) == list(range(50)) and logs(jobs) != []


def test_what_others_have_put_there(jobs: Path, start_again: Callable[[], None]) -> None:
    start_again()
    queue = TaskQueue(jobs)
    queue.put("good")
    (jobs / "redo" / "notes.txt").write_text("not ours\n{}\n[1]\n" + '{"task": "x"}\n')
    start_again()
    assert payloads(TaskQueue(jobs)) == ["good"]
