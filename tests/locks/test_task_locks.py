"""`TaskLocks`: the seed's lock files, made dependable; and the seed's own worker beside ours."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Peer, all_in_children, in_child, survives, until

import holdfast
from holdfast import TaskLocks
from holdfast.locks.task_locks import file_name_of, task_id_of
from holdfast.locks.task_record import TaskFormat

if TYPE_CHECKING:
    from collections.abc import Callable


def seed_is_stale(path: str, stale_after: float = 300) -> bool:
    """As the seed's text has it."""
    try:
        said = json.loads(Path(path).read_text())
        age = datetime.now(timezone.utc) - datetime.fromisoformat(said["started_at"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True
    return age.total_seconds() > stale_after


def seed_acquire(path: str, worker: str, task: str) -> bool:
    if os.path.exists(path):
        if not seed_is_stale(path):
            return False
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    started = datetime.now(timezone.utc).isoformat()
    os.write(fd, json.dumps({"worker_id": worker, "started_at": started, "task_id": task}).encode())
    os.close(fd)
    return True


def ago(seconds: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(seconds=seconds)).isoformat()


def test_one_worker_has_a_task(tmp_path: Path) -> None:
    one, other = TaskLocks(tmp_path, "w1"), TaskLocks(tmp_path, "w2")
    before = time.time()
    hold = one.claim("resize-7")
    after = time.time()
    assert hold is not None and other.claim("resize-7") is None and one.claim("resize-7") is None
    said = json.loads((tmp_path / "resize-7.lock").read_text())
    assert list(said)[:3] == ["worker_id", "started_at", "task_id"]
    assert (said["worker_id"], said["task_id"], said["pid"]) == ("w1", "resize-7", os.getpid())
    assert before - 0.00001 < datetime.fromisoformat(said["started_at"]).timestamp() < after + 0.00001
    assert int(said["token"]) == hold.token
    status = other.status("resize-7")
    assert status.held and status.tag == "w1" and list(other.claimed()) == ["resize-7"]
    one.release("resize-7")
    assert not (tmp_path / "resize-7.lock").exists() and not other.status("resize-7").held
    with pytest.raises(holdfast.NotLocked):
        one.release("resize-7")
    again = other.claim("resize-7")
    assert again is not None and again.token > hold.token
    again.release()
    assert os.listdir(tmp_path) == []


def test_a_dead_workers_task_is_free_at_once(tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(path=str(tmp_path))
    peer.do("hold = holdfast.TaskLocks(path, 'w1').claim('t')")
    assert TaskLocks(tmp_path, "w2").claim("t") is None
    peer.kill()
    hold = TaskLocks(tmp_path, "w2").claim("t")
    assert hold is not None
    hold.release()


def test_the_seeds_files_are_understood_and_ours_by_it(tmp_path: Path) -> None:
    path = str(tmp_path / "t.lock")
    assert seed_acquire(path, "seed", "t")
    ours = TaskLocks(tmp_path, "w1")
    assert ours.claim("t") is None and ours.status("t").tag == "seed"
    (tmp_path / "t.lock").write_text(json.dumps({"worker_id": "seed", "started_at": ago(301), "task_id": "t"}))
    hold = ours.claim("t")
    assert hold is not None and not seed_is_stale(path) and not seed_acquire(path, "seed", "t")
    hold.release()
    assert seed_acquire(path, "seed", "t")


def test_a_long_task_is_renewed(tmp_path: Path) -> None:
    """So that the seed, which goes by age alone, does not take it."""
    path = tmp_path / "t.lock"
    hold = TaskLocks(tmp_path, "w1", stale_after=300, heartbeat=0.05).claim("t")
    assert hold is not None
    before = path.read_bytes()
    text = before.replace(json.loads(before)["started_at"].encode(), ago(299).encode())
    with open(path, "r+b") as file:
        file.write(text)
    until(lambda: datetime.fromisoformat(json.loads(path.read_text())["started_at"]).timestamp() > time.time() - 5)
    assert len(path.read_bytes()) == len(before)
    hold.release()


def test_a_lease_that_is_not_renewed_is_taken(tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(path=str(tmp_path))
    peer.do("lost = []; locks = holdfast.TaskLocks(path, 'w1', stale_after=1.5, heartbeat=0.1, on_lost=lost.append)")
    token = peer.do("hold = locks.claim('t'); value = hold.token") or peer.do("hold.token")
    other = TaskLocks(tmp_path, "w2", stale_after=1.5, heartbeat=0.5)
    assert other.claim("t") is None
    peer.stop()
    taken: list[Any] = []
    until(lambda: taken.append(other.claim("t")) or taken[-1] is not None)
    assert taken[-1].token > token
    peer.go_on()
    until(lambda: peer.do("len(lost)") == 1)
    assert peer.do("hold.lost") is True
    taken[-1].release()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"  ", b"[]", b"null", b"7", b'"x"', b"{", b"{}", b'{"started_at": null}', b'{"started_at": 7}'),
        *(
            b'{"started_at": "yesterday"}',
            b'{"worker_id": [], "started_at": "x"}',
            b"x" * 70_000,
            b"[" * 60_000,
            b"\xff",
        ),
    ],
)
def test_a_corrupted_lock_is_stale_five_seconds_after_it_was_written(content: bytes, tmp_path: Path) -> None:
    """Not at once: another worker may have created the file and not written it yet."""
    path = tmp_path / "t.lock"
    path.write_bytes(content)
    os.utime(path, (time.time() - 1,) * 2)
    locks = TaskLocks(tmp_path, "w1")
    assert locks.claim("t") is None and locks.status("t").corrupt
    os.utime(path, (time.time() - 5.01,) * 2)
    hold = locks.claim("t")
    assert hold is not None
    hold.release()


def test_a_time_without_a_zone_is_utc(tmp_path: Path) -> None:
    path = tmp_path / "t.lock"
    for age, free in ((100, False), (301, True)):
        naive = ago(age).split("+")[0]
        path.write_text(json.dumps({"worker_id": "x", "started_at": naive, "task_id": "t"}))
        hold = TaskLocks(tmp_path, "w").claim("t")
        assert (hold is not None) == free
        if hold is not None:
            hold.release()


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_the_parser_says_corrupt_and_nothing_else(content: bytes) -> None:
    try:
        TaskFormat("t", "w").parse(content)
    except holdfast.CorruptLock:
        pass


HOSTILE = [
    "../x",
    "/etc/x",
    "a/b",
    "a%2Fb",
    "a\0b",
    "..",
    ".",
    "%",
    "100%",
    "%25",
    "a\nb",
    "ü",
    " ",
    "-rf",
    "a.lock",
    "A:b",
]


@pytest.mark.parametrize("name", [".lock", "a" * 240 + ".lock", "directory.lock", "semaphore.lock", "sema.lock"])
def test_a_file_that_is_no_task_lock_hides_no_other(name: str, tmp_path: Path) -> None:
    locks = TaskLocks(tmp_path, "w")
    (tmp_path / "old.lock").write_text("{")
    os.utime(tmp_path / "old.lock", (0, 0))
    content = {"semaphore.lock": "permits=2\n", "sema.lock": "pid=1\ntimestamp=1\n"}
    if name.startswith("directory"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(content.get(name, ""))
    hold = locks.claim("zebra")
    assert hold is not None and list(locks.claimed()) == ["old", "zebra"]
    assert locks.clean() == ["old"]
    assert sorted(os.listdir(tmp_path)) == sorted([name, "zebra.lock"])
    hold.release()


def test_ids_are_names_and_not_paths(tmp_path: Path) -> None:
    room = tmp_path / "locks"
    room.mkdir()
    locks = TaskLocks(room, "w")
    holds = {task_id: locks.claim(task_id) for task_id in HOSTILE}
    assert all(hold is not None for hold in holds.values())
    assert len(os.listdir(room)) == len(HOSTILE) and os.listdir(tmp_path) == ["locks"]
    assert sorted(locks.claimed()) == sorted(HOSTILE)
    for task_id in HOSTILE:
        locks.release(task_id)
    assert os.listdir(room) == []
    for wrong in ("", "x" * 300, "ü" * 150, 7, None):
        with pytest.raises(holdfast.UnsafePath):
            locks.claim(wrong)  # type: ignore[arg-type]


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_two_ids_never_share_a_file(one: str, other: str) -> None:
    try:
        names = file_name_of(one), file_name_of(other)
    except holdfast.UnsafePath:
        return
    assert (names[0] == names[1]) == (one == other)
    assert "/" not in names[0] and "\0" not in names[0] and task_id_of(names[0]) == one


def test_cleaning(tmp_path: Path) -> None:
    def die() -> None:
        hold = TaskLocks(tmp_path, "w1").claim("dead")
        os._exit(hold is None)  # nothing is released

    assert survives(die)
    hold = TaskLocks(tmp_path, "w2").claim("alive")
    (tmp_path / "notes.txt").write_text("mine")
    assert TaskLocks(tmp_path, "w3").clean() == ["dead"]
    assert sorted(os.listdir(tmp_path)) == ["alive.lock", "notes.txt"]
    assert hold is not None
    hold.release()


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter than stale_after"):
        TaskLocks(tmp_path, "w", stale_after=10, heartbeat=10)
    with pytest.raises(ValueError, match="worker_id"):
        TaskLocks(tmp_path, "")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TaskLocks(tmp_path / "nowhere", "w").claim("t")
    assert in_child(lambda: TaskLocks(tmp_path, "w").claim("x") is not None)


def test_beside_the_seeds_worker(tmp_path: Path) -> None:
    """None of them dead or slow: never two at once, and every task is had.

    One of the seed's: two of them remove each other's files between their making and their writing.
    """
    locks, done = tmp_path / "task_locks", tmp_path / "done"
    locks.mkdir()
    done.mkdir()
    tasks = [f"task-{n}" for n in range(60)]

    def work(kind: str, name: str) -> None:
        ours = TaskLocks(locks, name)
        while not all((done / task).exists() for task in tasks):
            for task in tasks:
                path = str(locks / f"{task}.lock")
                hold = ours.claim(task) if kind == "ours" else seed_acquire(path, name, task)
                if not hold:
                    continue
                inside = os.open(done / f"{task}.inside", os.O_CREAT | os.O_EXCL)
                os.close(inside)
                if not (done / task).exists():
                    time.sleep(0.001)
                    (done / task).touch()
                os.unlink(done / f"{task}.inside")
                if kind == "ours":
                    ours.release(task)
                else:
                    os.unlink(path)

    all_in_children([partial(work, kind, name) for kind, name in (("ours", "a"), ("ours", "b"), ("seed", "c"))])
    assert os.listdir(locks) == [] and len(os.listdir(done)) == 60
