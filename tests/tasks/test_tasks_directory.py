"""What can happen to the directory of a queue: readers without rights, deletion, renaming, a full disk, many rounds."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, Child, Peer, claim_all, claimed, in_child, is_alive, until, until_asleep

from holdfast import owner
from holdfast.tasks import TaskQueue, Worker, WorkerFailed
from holdfast.tasks.connection import LOOK_EVERY_S
from holdfast.tasks.sqlite import SqliteStore

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


def as_nobody(work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return work()

    return run


# A user who may only read.


@as_root
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("boot", ["the same boot", "another boot"])
def test_a_user_without_write_permission_reads_a_queue(
    jobs: Path, in_memory: Path, is_open: bool, boot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.chmod(0o755)
    queue = TaskQueue(jobs)
    queue.put("x", id="a")
    claimed(queue).complete("result")
    queue.put("y", id="b")
    queue.close()
    assert not (jobs / "queue.db-wal").exists()
    if boot == "another boot":
        monkeypatch.setattr(owner, "boot_id", lambda: boot)

    def look() -> object:
        found = TaskQueue(jobs)
        assert found.stats()["pending"] == 1 and not found.is_empty() and [task.id for task in found] == ["a", "b"]
        for change in (lambda: found.put("z"), lambda: found.cancel("b")):
            with pytest.raises(PermissionError, match="umask 002"):
                change()
        with pytest.raises(PermissionError):
            found.claim()
        return found.get("a").result

    if is_open:
        opener = Peer(jobs=str(jobs))
        with opener:
            opener.do("from holdfast.tasks import TaskQueue; queue = TaskQueue(jobs)")
            assert in_child(as_nobody(look)) == "result"
    else:
        assert in_child(as_nobody(look)) == "result"
        assert sorted(os.listdir(jobs)) == ["bells", "queue.db", "queue.lock", "workers"]


@as_root
def test_no_process_writes_while_a_user_without_write_permission_reads(jobs: Path, in_memory: Path) -> None:
    in_memory.chmod(0o755)
    (in_memory / "signals").mkdir(mode=0o777)
    (in_memory / "signals").chmod(0o777)
    reading, waiting = in_memory / "signals" / "reading", in_memory / "waiting"
    TaskQueue(jobs).close()

    def number(run: Any) -> int:
        return len(run("select 1 from task").fetchall())

    def look(say: Callable[[str], None]) -> None:
        def twice(run: Any) -> list[int]:
            first = number(run)
            reading.touch()
            until(waiting.exists)
            return [first, number(run)]

        as_nobody(lambda: say(str(SqliteStore(str(jobs)).read(twice))))()

    def write(_: object) -> None:
        queue = TaskQueue(jobs)
        queue.put_all(range(3))
        queue.close()

    reader = Child(look)
    until(reading.exists)
    writer = Child(write)
    until_asleep([writer.pid])
    assert is_alive(writer.pid)
    waiting.touch()
    assert reader.end() == (0, ["[0, 0]"])
    assert writer.end() == (0, [])
    assert in_child(as_nobody(lambda: SqliteStore(str(jobs)).read(number))) == 3


@as_root
def test_two_users_share_a_queue(jobs: Path, in_memory: Path) -> None:
    """A directory of their group, `mode=0o664`, and a umask that keeps the rights of the group."""
    in_memory.chmod(0o755)
    jobs.mkdir()
    os.chown(jobs, 1001, 2000)
    jobs.chmod(0o2775)
    import multiprocessing.popen_fork  # another user may not be able to read the library
    import multiprocessing.sharedctypes  # noqa: F401

    TaskQueue(in_memory / "another").close()

    def as_user(number: int, work: Callable[[], object]) -> object:
        def run() -> object:
            os.setgroups([])
            os.setgid(2000)
            os.setuid(number)
            os.umask(0o002)
            return work()

        return in_child(run)

    def put_and_die() -> None:
        queue = TaskQueue(jobs, mode=0o664)
        queue.put_all(range(3))
        claimed(queue)

    as_user(1001, put_and_die)
    assert as_user(1002, lambda: Worker(TaskQueue(jobs, mode=0o664), lambda task: None).run(drain=True).done) == 3
    assert as_user(1001, lambda: TaskQueue(jobs, mode=0o664).stats()["done"]) == 3


# A queue that is deleted, replaced or renamed while it is open.


@pytest.mark.parametrize("way", ["deleted", "replaced", "renamed"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_queue_that_is_no_longer_there_takes_no_task(jobs: Path, way: str, durable: bool) -> None:
    queue = TaskQueue(jobs, durable=durable)
    queue.put_all(range(3))
    claim = claimed(queue)
    queue.put("x", id="before")
    if way == "renamed":
        jobs.rename(f"{jobs}2")
    else:
        shutil.rmtree(jobs)
        if way == "replaced":
            in_child(lambda: TaskQueue(jobs).put_all("abc") and None)
    time.sleep(LOOK_EVERY_S)  # a write within this time of the last one does not look again
    for call in (lambda: queue.put("y"), queue.stats, lambda: queue.get("before"), lambda: queue.cancel("before")):
        with pytest.raises(FileNotFoundError):
            call()
    with pytest.raises(FileNotFoundError):
        claim.fail("no")
    with suppress(FileNotFoundError):
        queue.close()
    if way != "deleted":
        assert in_child(lambda: claim_all(TaskQueue(f"{jobs}2" if way == "renamed" else jobs))) == (
            [1, 2, "x", 0] if way == "renamed" else ["a", "b", "c"]
        )


def test_workers_of_a_renamed_queue_end_and_lose_no_task(jobs: Path, in_memory: Path) -> None:
    queue = TaskQueue(jobs)
    queue.put_all(range(3))
    begun, over = in_memory / "begun", in_memory / "over"

    def handle(task: object) -> None:
        begun.touch()
        until(over.exists)

    def work(say: Callable[[str], None]) -> None:
        try:
            Worker(TaskQueue(jobs), handle).run(drain=True)
        except WorkerFailed:
            say("ended")

    worker = Child(work)
    until(begun.exists)
    moved = in_memory / "moved"
    jobs.rename(moved)
    over.touch()
    assert worker.end() == (0, ["ended"])
    summary = Worker(TaskQueue(moved), lambda task: None).run(drain=True)
    assert summary.done == 3


def test_a_copy_under_the_lock_of_the_writers_is_a_whole_queue(jobs: Path, in_memory: Path) -> None:
    """While workers run. Tasks that ran at the time of the copy are done again by the workers of the copy."""
    queue = TaskQueue(jobs, durable=False)
    ids = queue.put_all(range(500))
    over = in_memory / "over"

    def work() -> None:
        worker = TaskQueue(jobs, durable=False)
        while not over.exists():
            worker.put("another")
            claimed(worker).complete("x" * 1000)

    children = [Child(lambda _: work()) for _ in range(2)]
    for number in range(3):
        before = queue.stats()["done"]
        until(lambda before=before: queue.stats()["done"] > before + 100)  # type: ignore[misc]
        command = [sys.executable, "-m", "holdfast", "run", jobs / "queue.lock", "--", "cp", "-a", jobs]
        subprocess.run([*command, in_memory / f"copy{number}"], check=True)
    over.touch()
    assert [child.end()[0] for child in children] == [0, 0]
    for number in range(3):

        def check(where: Path = in_memory / f"copy{number}") -> list[object]:
            copy = TaskQueue(where, durable=False)
            (integrity,) = copy.store.read(lambda run: run("pragma integrity_check").fetchall())
            claim_all(copy)
            found = [task.id for task in copy.tasks(["done"])]
            return [*integrity, found[: len(ids)] == ids, len(found) == sum(1 for _ in copy)]

        assert in_child(check) == ["ok", True, True]


# Another user may write into a directory that is shared with a group.


@pytest.mark.parametrize("name", ["../../mine", "1@here.00000000"])
def test_no_file_is_written_or_removed_in_the_name_of_a_worker(jobs: Path, in_memory: Path, name: str) -> None:
    mine = in_memory / "mine"
    mine.write_text("data")
    queue = TaskQueue(jobs, durable=False)
    queue.put("x")
    claimed(queue).complete()
    (jobs / "bells" / "1@here.00000000").symlink_to(mine)
    queue.store.transact(lambda tx: tx.run("insert into idle values (?, 0)", (name,)))
    queue.put("y")  # wakes an idle worker
    assert mine.read_text() == "data"
    queue.store.transact(lambda tx: tx.run("insert into idle values (?, 0)", (name,)))
    assert queue.store.orphans() == [] and mine.read_text() == "data"


def test_files_that_are_no_workers_stay(jobs: Path, in_memory: Path) -> None:
    other = in_memory / "other"
    other.mkdir()
    (other / "mine").touch()
    queue = TaskQueue(jobs)
    (jobs / "workers").symlink_to(other)
    assert queue.store.orphans() == [] and queue.claim() is None
    assert (other / "mine").exists()
    queue.close()


# A worker that is killed.

WAIT_FOR_AN_EVENT = """
from holdfast.tasks import TaskQueue, claimer, sqlite_worker
queue = TaskQueue(jobs)
events = []
wait = sqlite_worker.poll
def poll(fds, seconds):
    # No wait ends because its time is over, until the kernel has reported a death.
    ready = wait(fds, seconds if events else None)
    events.extend(fd for fd in ready if fd == queue.store._in_process.watch.fd)
    return ready
sqlite_worker.poll = poll
claimer._RECOVER_EVERY_S = 1e9
"""


def test_an_idle_worker_learns_of_a_killed_one_by_an_event(jobs: Path, start_peer: Callable[..., Peer]) -> None:
    queue = TaskQueue(jobs)
    queue.put("x")
    victim, idle = start_peer(jobs=str(jobs)), start_peer(jobs=str(jobs))
    victim.do("from holdfast.tasks import TaskQueue; claim = TaskQueue(jobs).claim(); claim.payload")
    idle.do(WAIT_FOR_AN_EVENT)
    idle.begin("queue.claim(timeout=None).payload")
    until(lambda: queue.store.read(lambda run: run("select count(*) from idle").fetchone()) == (1,))
    until_asleep([idle.pid])
    victim.kill()
    assert idle.answer(PATIENCE) == "x"


# A full disk.


@pytest.mark.parametrize("durable", [True, False])
def test_a_task_that_cannot_be_ended_on_a_full_disk_can_be_ended_later(small_disk: Path, durable: bool) -> None:
    queue = TaskQueue(small_disk / "jobs", durable=durable)
    ids = [queue.put(number) for number in range(5)]
    claim = claimed(queue)
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={small_disk}/filler", "status=none"], stderr=subprocess.DEVNULL, check=False
    )
    with pytest.raises(OSError, match="full") as caught:
        claim.fail("e" * 20_000)
    assert caught.value.errno == errno.ENOSPC and claim.outcome is None
    assert [(task.id, task.state) for task in queue] == [(ids[0], "running"), *((id, "pending") for id in ids[1:])]
    os.unlink(small_disk / "filler")
    claim.complete("r" * 20_000)
    assert claim_all(queue) == [1, 2, 3, 4]
    assert queue.get(ids[0]).result == "r" * 20_000
    queue.close()


# Nothing grows for ever.


@pytest.fixture(params=["sqlite", "postgres"])
def each_queue(request: pytest.FixtureRequest, jobs: Path) -> Iterator[TaskQueue]:
    where = jobs if request.param == "sqlite" else request.getfixturevalue("postgres")
    queue = TaskQueue(where, durable=False, retry_after=0, keep=0, keep_failed=0)
    yield queue
    queue.close()


def rows(queue: TaskQueue) -> dict[str, int]:
    """The number of rows of each table."""
    tables = "select name from sqlite_master where type = 'table'"
    if not queue.store.is_local:
        tables = "select relname from pg_class where relname like 'holdfast_%' and relkind = 'r'"

    def count(run: Any) -> dict[str, int]:
        return {name: run(f"select count(*) from {name}").fetchone()[0] for (name,) in run(tables).fetchall()}

    return queue.store.read(count)


def test_nothing_grows_with_the_number_of_rounds(each_queue: TaskQueue, jobs: Path) -> None:
    queue = each_queue
    queue.schedule("often", every=1)

    def die() -> None:
        claimed(queue)
        os.kill(os.getpid(), signal.SIGKILL)

    def one_round(number: int) -> tuple[dict[str, int], int]:
        ids = queue.put_all(range(20), attempts=2)
        queue.put("next", after=ids[:3])
        queue.put("cancelled", after=[queue.put("fails", attempts=1)])
        queue.put("limited", key=f"limited {number}", limit=1)
        queue.put("paced", key=f"paced {number}", rate="1000/s", id=f"paced {number}")
        queue.put("late", delay=0.001)
        queue.put("dropped", attempts=1)
        queue.put_scheduled()
        assert Child(lambda _: die()).end()[0] == -signal.SIGKILL
        while not queue.is_empty():
            claim = queue.claim(timeout=0.01)
            if claim is not None and claim.payload in ("fails", 7):
                claim.fail("wrong")
            elif claim is not None:
                claim.complete()
        queue.store._rates_forgotten_at = 0.0  # as a day later
        while queue.prune():
            pass
        here = sum(len(names) for _, _, names in os.walk(jobs)) if queue.store.is_local else 0
        found = rows(queue)
        found.pop("holdfast_session", None)  # a row for each connection of the last day
        return found, here

    first = [one_round(number) for number in range(3)]
    last = [one_round(number) for number in range(3, 12)]
    names = first[-1][0]
    assert sum(names.values()) < 12, names
    for found, files in last:
        assert all(found[name] <= max(before[name] for before, _ in first) + 1 for name in found), (first, last)
        assert files <= max(before for _, before in first), (first, last)
