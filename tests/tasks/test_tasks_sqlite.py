"""What only the SQLite engine promises: its files, its locks, its log, and how it wakes workers."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, in_child, survives, until

from holdfast import CorruptStore, Lock, Unsupported, WouldDeadlock, owner, paths, system
from holdfast.tasks import TaskQueue, connection, sqlite, sqlite_worker
from holdfast.tasks.reading import Transaction
from holdfast.tasks.sqlite import SqliteStore
from holdfast.tasks.store import NEVER, Attempt, Ending, NewTask, Woken


@pytest.fixture
def where(in_memory: Path) -> str:
    return str(in_memory / "jobs")


@pytest.fixture
def store(where: str) -> Iterator[SqliteStore]:
    made = SqliteStore(where, durable=False)
    yield made
    made.close()


def tasks(count: int) -> list[NewTask]:
    return [NewTask(f"{number}") for number in range(count)]


def done(attempt: Attempt) -> Ending:
    return Ending(attempt.id, attempt.token, "done")


def integrity(where: str) -> str:
    """What SQLite's own check says. In another process: closing the database here would drop this process's locks."""

    def check() -> str:
        connection = sqlite3.connect(f"{where}/queue.db")
        text: str = connection.execute("pragma integrity_check").fetchone()[0]
        connection.close()
        return text

    found: str = in_child(check)
    return found


# What is in the directory.


def test_the_directory_contains_these_files(store: SqliteStore, where: str) -> None:
    store.add(tasks(1))
    store.register().close()
    assert sorted(os.listdir(where)) == ["bells", "queue.db", "queue.db-shm", "queue.db-wal", "queue.lock", "workers"]
    assert os.listdir(f"{where}/workers") == os.listdir(f"{where}/bells") == []


def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        SqliteStore(str(tmp_path))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(NotADirectoryError):
        SqliteStore(str(tmp_path / "x"))
    with pytest.raises(NotADirectoryError):
        SqliteStore(str(tmp_path / "x" / "y"))


def test_a_queue_of_a_newer_version_is_refused_and_untouched(store: SqliteStore, where: str) -> None:
    store.add(tasks(3))
    store.close()
    connection = sqlite3.connect(f"{where}/queue.db")
    connection.execute(f"pragma user_version = {sqlite.VERSION + 1}")
    connection.close()
    with pytest.raises(Unsupported, match="Upgrade"):
        SqliteStore(where)
    connection = sqlite3.connect(f"{where}/queue.db")
    assert connection.execute("select count(*) from task").fetchone() == (3,)
    connection.close()


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to look at" * 50, b""])
def test_a_file_that_is_no_queue_is_refused_and_untouched(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "queue.db").write_bytes(content)
    with pytest.raises(CorruptStore, match=r"queue\.db"):
        SqliteStore(str(tmp_path))
    assert (tmp_path / "queue.db").read_bytes() == content


def test_a_damaged_database_is_reported_and_left(where: str) -> None:
    def fill() -> None:
        store = SqliteStore(where, durable=False)
        store.add(tasks(2000))
        store.close()

    in_child(fill)
    with open(f"{where}/queue.db", "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(40_000))
    damaged = Path(f"{where}/queue.db").read_bytes()
    with pytest.raises(CorruptStore, match="damaged"):
        list(SqliteStore(where, durable=False).tasks())
    assert Path(f"{where}/queue.db").read_bytes() == damaged


def test_a_database_without_a_table_is_reported_as_damaged(where: str) -> None:
    SqliteStore(where).close()
    with closing(sqlite3.connect(f"{where}/queue.db")) as raw:
        raw.execute("drop table task")
    with pytest.raises(CorruptStore, match="damaged"):
        SqliteStore(where).add(tasks(1))


def test_a_payload_that_is_too_large_for_sqlite_is_refused_as_such(store: SqliteStore) -> None:
    store.count()  # opens the connection
    raw = store._connection().raw
    assert raw is not None
    if not hasattr(raw, "setlimit"):
        pytest.skip("this Python cannot lower the limit of 1 GB")
    raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    with pytest.raises(ValueError, match="too big"):
        store.add([NewTask("7" * 20_000)])
    assert store.count()["ready"] == 0


def test_a_network_file_system_is_refused_with_the_way_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "mount_of", lambda *_: paths.Mount("nfs4", "/mnt/share", ""))
    with pytest.raises(Unsupported, match="PostgreSQL"):
        SqliteStore(where)


def test_a_process_killed_while_it_creates_a_queue_leaves_nothing_in_the_way(where: str) -> None:
    for call in ("rename", "mkdir", "open_fd"):

        def create(call: str = call) -> None:
            def kill(*_: object, **__: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(system, call, kill)
            SqliteStore(where).register()

        pid = os.fork()
        if pid == 0:
            create()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        store = SqliteStore(where)
        store.register().close()
        store.close()
        shutil.rmtree(where)


# A full disk.


def test_a_full_disk_raises_and_keeps_what_was_acknowledged(small_disk: Path) -> None:
    store = SqliteStore(str(small_disk / "jobs"), durable=False)
    acknowledged: list[str] = []

    def fill() -> None:
        for _ in range(10_000):
            acknowledged.extend(id for id, _ in store.add([NewTask('"' + "x" * 1000 + '"')]))

    with pytest.raises(OSError, match="full") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert acknowledged
    assert [task.id for task in store.tasks()] == acknowledged
    store.close()


# The log.


def test_the_log_stays_small(store: SqliteStore, where: str) -> None:
    worker = store.register()
    largest = 0
    for _ in range(300):
        store.add([NewTask('"' + "x" * 500 + '"') for _ in range(100)])
        attempts = store.claim(worker, 100)
        store.settle([done(attempt) for attempt in attempts])
        largest = max(largest, os.stat(f"{where}/queue.db-wal").st_size)
    assert largest < 2 * sqlite.MAX_WAL_BYTES
    assert os.stat(f"{where}/queue.db").st_size > sqlite.MAX_WAL_BYTES
    assert integrity(where) == "ok"


def test_a_reader_that_stays_does_not_stop_writers(where: str) -> None:
    store = SqliteStore(where, durable=False)
    store.add(tasks(1))
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        connection = sqlite3.connect(f"file:{where}/queue.db?mode=ro", uri=True, isolation_level=None)
        connection.execute("begin")
        connection.execute("select count(*) from task").fetchone()
        begun.set()
        over.wait(PATIENCE)
        connection.execute("rollback")
        connection.close()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(PATIENCE)
    payload = '"' + "x" * 50_000 + '"'
    while os.stat(f"{where}/queue.db-wal").st_size < 3 * sqlite.MAX_WAL_BYTES:
        store.add([NewTask(payload)])
    over.set()
    thread.join()
    for _ in range(500):
        store.add([NewTask(payload)])
    assert os.stat(f"{where}/queue.db-wal").st_size < 2 * sqlite.MAX_WAL_BYTES
    store.close()


def test_the_log_of_a_durable_queue_does_not_grow_with_each_commit(where: str) -> None:
    """A sync of a file that grows takes longer. What a process has put before it is killed is there all the same."""

    def work() -> None:
        store = SqliteStore(where)
        sizes = set()
        for _ in range(50):
            store.add(tasks(1))
            sizes.add(os.stat(f"{where}/queue.db-wal").st_size)
        assert len(sizes) <= 20
        os.kill(os.getpid(), signal.SIGKILL)

    assert not survives(work)
    store = SqliteStore(where)
    assert store.count()["ready"] == 50
    assert integrity(where) == "ok"
    store.close()


def test_zeros_never_hide_what_another_program_commits(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sqlite3 does not know the lock of the writers."""
    outcomes = []
    program = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0)
try:
    other.execute("create table note as select hex(zeroblob(5000))")
    print("committed")
except sqlite3.OperationalError as error:
    print(error)
"""
    write_at = connection.write_at

    def after_it(*words: Any) -> None:
        command = [sys.executable, "-c", program, f"{where}/queue.db"]
        outcomes.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        write_at(*words)

    monkeypatch.setattr(connection, "write_at", after_it)
    with closing(TaskQueue(where)) as queue:
        for number in range(20):
            queue.put(number)
        assert outcomes == ["database is locked"]
        assert queue.store.count()["ready"] == 20
        assert os.stat(f"{where}/queue.db-wal").st_size == 3 << 20


def test_the_lock_file_can_be_deleted_at_any_time(store: SqliteStore, where: str) -> None:
    for _ in range(3):
        store.add(tasks(1))
        os.unlink(f"{where}/queue.lock")
        in_child(lambda: store.add(tasks(1)))
    assert store.count()["ready"] == 6


def test_writers_wait_for_the_lock_of_the_queue(store: SqliteStore, where: str) -> None:
    store.add(tasks(1))
    hold = Lock(f"{where}/queue.lock", keep=True).acquire()
    thread = threading.Thread(target=lambda: store.add(tasks(1)))
    thread.start()
    until(lambda: os.path.exists(f"{where}/queue.lock.queue") or thread.is_alive())
    assert store.count()["ready"] == 1
    hold.release()
    thread.join(PATIENCE)
    assert store.count()["ready"] == 2


def test_a_transaction_inside_another_one_is_refused_and_the_outer_one_goes_on(store: SqliteStore) -> None:
    """A signal handler that puts a task, or a claimer that is collected, may come at any moment."""

    def outer(tx: Transaction) -> None:
        store.add_in(tx, tasks(1), None)
        with pytest.raises(WouldDeadlock):
            store.add(tasks(1))
        store.add_in(tx, tasks(1), None)

    store.transact(outer)
    assert store.count()["ready"] == 2
    in_child(lambda: store.add(tasks(1)))
    assert store.count()["ready"] == 3


# Durability.


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    synced: list[int] = []
    real = system.fdatasync
    monkeypatch.setattr(system, "fdatasync", lambda fd: (synced.append(fd), real(fd)))
    return synced


def test_a_durable_queue_syncs_before_it_returns(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(where)
    synced = counted(monkeypatch)
    store.add(tasks(3))
    assert len(synced) == 1
    worker = store.register()
    (attempt,) = store.claim(worker, 1)
    before = len(synced)
    store.settle([done(attempt)])
    assert len(synced) == before + 1
    store.close()


def test_an_existing_id_is_not_synced_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(where)
    store.add([NewTask("1", id="a")])
    synced = counted(monkeypatch)
    assert store.add([NewTask("1", id="a")]) == [("a", False)]
    assert synced == []
    store.close()


def test_threads_share_a_sync(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(where)
    store.add(tasks(1))
    waiting, go = threading.Semaphore(0), threading.Event()
    calls = []

    def numbers() -> int:
        return int(repr(store._in_process.numbers)[len("count(") : -1])

    before = numbers()

    def slow(fd: int) -> None:
        calls.append(fd)
        waiting.release()
        assert go.wait(PATIENCE)

    monkeypatch.setattr(system, "fdatasync", slow)
    threads = [threading.Thread(target=store.add, args=(tasks(1),)) for _ in range(8)]
    threads[0].start()
    assert waiting.acquire(timeout=PATIENCE)  # the first thread syncs; the others commit meanwhile
    for thread in threads[1:]:
        thread.start()
    until(lambda: store.count()["ready"] == 9)
    until(lambda: numbers() == before + 9)  # of eight commits, and of the sync that has begun
    go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(calls) == 2
    store.close()


def test_after_a_failed_sync_the_log_is_copied_before_anything_is_acknowledged(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(where)
    store.add(tasks(1))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(system, "fdatasync", fail)
    with pytest.raises(OSError, match="injected"):
        store.add(tasks(1))
    monkeypatch.undo()
    reader = sqlite3.connect(f"file:{where}/queue.db?mode=ro", uri=True, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from task").fetchone()
    with pytest.raises(OSError, match="an earlier sync failed"):
        store.add(tasks(1))
    reader.execute("rollback")
    store.add(tasks(1))
    assert os.stat(f"{where}/queue.db-wal").st_size == 0
    store.add(tasks(1))
    reader.close()
    store.close()


def test_tokens_after_a_boot_are_greater_than_all_before(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure may undo a claim whose token was used already."""
    store = SqliteStore(where)
    store.add(tasks(2))
    (first,) = store.claim(store.register(), 1)
    assert first.token == 1
    later = NewTask('"later"', delay=100)
    ((id, _),) = store.add([later])
    monkeypatch.setattr(owner, "boot_id", lambda: "another boot")
    again = SqliteStore(where)
    (second,) = again.claim(again.register(), 1)
    assert second.token == 1_000_001
    assert SqliteStore(where).claim(again.register(), 1) == []
    (waits,) = again.get([id])
    assert waits is not None and waits.due_in is not None and 90 < waits.due_in <= 100
    store.close()
    again.close()


# Forks.


FORKS = """
import os, sys
from holdfast.tasks.sqlite import SqliteStore
from holdfast.tasks.store import NewTask
store = SqliteStore(sys.argv[1])
store.add([NewTask("1")])
worker = store.register()
pid = os.fork()
if pid == 0:
    if sys.argv[2] == "uses":
        store.add([NewTask("2")])
    sys.exit(0)   # the interpreter of the child finalises everything that it can reach
code = os.waitpid(pid, 0)[1]  # no assert: this program also runs as with `python -O`
if code:
    sys.exit(code)
store.add([NewTask("3")])
print(store.count()["ready"])
"""


@pytest.mark.parametrize("way", ["uses", "leaves"])
def test_a_child_that_ends_normally_leaves_the_connection_of_its_parent_alone(where: str, way: str) -> None:
    command = [sys.executable, "-W", "error", "-c", FORKS, where, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("3\n" if way == "uses" else "2\n", "")
    assert integrity(where) == "ok"


ORPHANED = """
import os, sys
from holdfast.tasks.sqlite import SqliteStore
from holdfast.tasks.store import NewTask
store = SqliteStore(sys.argv[1])
store.add([NewTask('"parent"')])
if os.fork():
    os.wait()
store.add([NewTask('"child"')])
print("ready", flush=True)
for _ in sys.stdin:
    store.add([NewTask('"late"')])
    print("added", flush=True)
"""


def test_a_forked_child_keeps_the_log_when_its_parent_is_dead_and_another_process_closes_the_queue(where: str) -> None:
    """SQLite deletes the log when the last connection is closed. The child must have locks of its own."""
    command = [sys.executable, "-c", ORPHANED, where]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin, parent.stdout:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.wait()
        for count in (3, 4):
            assert integrity(where) == "ok"
            print(file=parent.stdin, flush=True)
            assert parent.stdout.readline() == "added\n"
            assert in_child(lambda: SqliteStore(where).count()["ready"]) == count


def test_a_thread_begins_a_transaction_while_the_fork_of_another_thread_closes_its_connection(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add([NewTask('"first"')])
    mine = store._connection()
    closed, adds = threading.Event(), threading.Event()
    look = type(mine).in_transaction.fget
    assert look is not None and mine.raw is not None
    real = mine.raw

    class Closing:
        """Closes the connection, and goes on when the other thread has looked at it."""

        in_transaction = property(lambda self: real.in_transaction)

        def close(self) -> None:
            real.close()
            closed.set()
            assert adds.wait(PATIENCE)

    def looked(connection: connection.Connection) -> bool:
        try:
            return look(connection)
        finally:
            adds.set()

    mine.raw = Closing()  # type: ignore[assignment]
    forking = threading.Thread(target=lambda: in_child(lambda: None))
    forking.start()
    assert closed.wait(PATIENCE)
    monkeypatch.setattr(type(mine), "in_transaction", property(looked))
    store.add([NewTask('"second"')])
    forking.join()
    assert store.count()["ready"] == 2


# Waking.


def test_adding_tasks_wakes_as_many_idle_workers_as_there_are_tasks(store: SqliteStore, where: str) -> None:
    reader, writer = os.pipe()
    pids = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            worker = store.register()
            assert store.claim(worker, 1, idle=True) == []
            while store.wait(worker, PATIENCE) is not Woken.TASK:
                pass
            os.write(writer, b"w")
            signal.pause()
        pids.append(pid)
    try:
        idle = "select count(*) from idle"
        until(lambda: store.read(lambda run: run(idle).fetchone()[0]) == 8)
        store.add(tasks(3))
        assert store.read(lambda run: run(idle).fetchone()[0]) == 5
        woken = b""
        while len(woken) < 3:
            woken += os.read(reader, 10)
        store.add([NewTask("1", id="once")])
        store.add([NewTask("1", id="once")])
        assert store.read(lambda run: run(idle).fetchone()[0]) == 4
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_if_a_woken_worker_is_dead_another_one_is_woken(store: SqliteStore) -> None:
    """Its FIFO is gone, and no process has noticed its death yet."""

    def die() -> None:
        worker = store.register()
        store.claim(worker, 1, idle=True)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        die()
    os.waitpid(pid, 0)
    alive = store.register()
    assert store.claim(alive, 1, idle=True) == []
    store.add(tasks(1))
    assert store.wait(alive, PATIENCE) in (Woken.TASK, Woken.DEATH)
    assert len(store.claim(alive, 1, idle=True)) == 1


def test_an_idle_worker_takes_over_the_time_of_delayed_tasks_from_a_dead_one(store: SqliteStore) -> None:
    store.add([NewTask("later", delay=1.5)])

    def keep_the_time() -> None:
        store.claim(store.register(), 1, idle=True)
        os.kill(os.getpid(), signal.SIGKILL)

    assert not survives(keep_the_time)
    alive = store.register()
    assert store.claim(alive, 1, idle=True) == []
    assert store.orphans() == []  # what a worker does when another one has died
    until(lambda: store.wait(alive, PATIENCE) is Woken.TASK and store.claim(alive, 1, idle=True) != [])


def test_an_idle_worker_takes_a_due_task_for_which_a_stopped_one_would_wake(store: SqliteStore) -> None:
    stopped, other = store.register(), store.register()
    store.add([NewTask("later", delay=0.5)])
    assert store.claim(stopped, 1, idle=True) == store.claim(other, 1, idle=True) == []
    until(lambda: store.wait(other, PATIENCE) is Woken.TASK)
    assert len(store.claim(other, 1)) == 1


def test_many_idle_workers_that_were_killed_do_not_break_a_put(store: SqliteStore) -> None:
    rows = [(f"{number}@here.dead", NEVER) for number in range(1000)]
    store.transact(lambda tx: [tx.run("insert into idle values (?, ?)", row) for row in rows])
    store.add(tasks(1))
    assert store.read(lambda run: run("select count(*) from idle").fetchone()[0]) == 0


def test_rows_of_dead_idle_workers_are_removed(store: SqliteStore) -> None:
    store.transact(lambda tx: tx.run("insert into idle values ('1@here.dead', 0)"))
    assert store.orphans() == []
    assert store.read(lambda run: run("select count(*) from idle").fetchone()[0]) == 0


def test_a_worker_that_registers_while_others_look_for_dead_ones_is_alive(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file exists, is not locked yet, and so counts as that of a dead worker."""
    created, judged, registered = threading.Event(), threading.Event(), threading.Event()
    lock, remove, found = sqlite_worker.try_lock, sqlite.remove, []

    def try_lock(*what: Any) -> bool:
        created.set()
        assert judged.wait(PATIENCE)
        return lock(*what)

    def remove_later(path: str) -> None:
        judged.set()
        assert registered.wait(PATIENCE)
        remove(path)

    def register() -> None:
        found.append(store.register())
        registered.set()

    store.add(tasks(1))
    monkeypatch.setattr(sqlite_worker, "try_lock", try_lock)
    monkeypatch.setattr(sqlite, "remove", remove_later)
    thread = threading.Thread(target=register)
    thread.start()
    assert created.wait(PATIENCE)
    assert store.orphans() == []
    thread.join()
    assert len(store.claim(found[0], 1)) == 1 and store.orphans() == []
    found[0].close()


def test_without_inotify_a_waiter_still_looks_for_dead_workers(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "injected")

    monkeypatch.setattr(system, "Watch", fail)
    worker = store.register()
    assert store.claim(worker, 1, idle=True) == []
    assert store.wait(worker, PATIENCE) is Woken.DEATH


@pytest.mark.parametrize("folder", ["workers", "bells"])
def test_a_folder_that_a_copy_left_out_is_made_again(store: SqliteStore, where: str, folder: str) -> None:
    store.register().close()
    os.rmdir(f"{where}/{folder}")
    assert store.orphans() == []
    assert store.claim(store.register(), 1, idle=True) == []


def test_errors_name_what_is_wrong(where: str) -> None:
    store = SqliteStore(where)
    os.unlink(f"{where}/queue.db")

    def open_again() -> None:
        with pytest.raises(FileNotFoundError):
            store.count()

    assert in_child(open_again) is None
    locked = sqlite3.OperationalError("database is locked")
    assert isinstance(connection.explain(locked, where), OSError)
    store.close()


def test_a_process_has_one_inotify_instance(store: SqliteStore) -> None:
    workers = [store.register() for _ in range(4)]
    for worker in workers:
        store.claim(worker, 1, idle=True)
    waiters = [lambda worker=worker: until(lambda: store.wait(worker, PATIENCE) is Woken.TASK) for worker in workers]
    threads = [threading.Thread(target=waiter) for waiter in waiters]
    before = instances()
    for thread in threads:
        thread.start()
    until(lambda: store._in_process.watch is not None)
    assert instances() - before <= 1
    store.add(tasks(4))
    for thread in threads:
        thread.join(PATIENCE)


def instances() -> int:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("inotify" in os.readlink(link) for link in links if os.path.islink(link))


def test_one_idle_worker_keeps_the_time_of_delayed_tasks_and_passes_it_on(store: SqliteStore) -> None:
    keeper, other = store.register(), store.register()
    store.add([NewTask('"later"', delay=1000)])
    assert store.claim(keeper, 1, idle=True) == store.claim(other, 1, idle=True) == []
    untils = "select until from idle order by until"
    first, second = [row[0] for row in store.read(lambda run: run(untils).fetchall())]
    assert first < NEVER == second
    store.add(tasks(1))
    names = [row[0] for row in store.read(lambda run: run("select worker from idle").fetchall())]
    woken = keeper if keeper.name not in names else other
    assert len(store.claim(woken, 1)) == 1
    rest = other if woken is keeper else keeper
    if woken is keeper:
        while store.wait(rest, PATIENCE) is not Woken.TASK:
            pass
        assert store.claim(rest, 1, idle=True) == []
    ((only,),) = store.read(lambda run: run(untils).fetchall())
    assert only < NEVER


# Garbage, and the end of the interpreter.


@pytest.mark.parametrize("durable", [True, False])
def test_a_queue_is_collected_in_a_transaction_of_another_one(where: str, durable: bool) -> None:
    """The garbage is collected while this thread has the lock of all writers. What was completed is written, and an
    open claim was an attempt."""
    queue, other = TaskQueue(where), TaskQueue(where, durable=durable)
    first, second = queue.put(1), queue.put(2)
    gc.disable()
    try:
        claims = [other.claim(), other.claim()]
        assert claims[0] is not None
        claims[0].complete()
        other.cycle = [other, claims]  # type: ignore[attr-defined]
        del other, claims
        queue.store.transact(lambda tx: gc.collect())  # type: ignore[attr-defined]
        until(lambda: (gc.collect(), queue.claimer().recover(), queue.get(second).state)[-1] == "pending")
    finally:
        gc.enable()
    assert (queue.get(first).state, queue.get(first).tried) == ("done", 1)
    assert queue.get(second).tried == 1
    queue.close()


def test_completions_of_a_thread_that_has_ended_are_written(where: str) -> None:
    queue = TaskQueue(where, durable=False)
    id = queue.put(1, attempts=1)

    def work() -> None:
        claim = queue.claim()
        assert claim is not None
        claim.complete()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    until(lambda: in_child(lambda: SqliteStore(where).count()["done"]) == 1)
    assert queue.get(id).state == "done"
    queue.close()


def test_the_guard_of_reserved_tasks_goes_on_after_an_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TaskQueue(where, durable=False)
    queue.put(1)
    claim = queue.claim()
    assert claim is not None
    failures: list[None] = []
    settle = queue.store.settle

    def fail(endings: list[Ending]) -> list[bool]:
        if len(failures) < 3:
            failures.append(None)
            raise sqlite3.OperationalError("injected")
        return settle(endings)

    monkeypatch.setattr(queue.store, "settle", fail)
    claim.complete()
    until(lambda: in_child(lambda: SqliteStore(where).count()["done"]) == 1)
    queue.close()


EXITS = """
import sys, threading, time
from holdfast.tasks import TaskQueue
from holdfast.tasks.connection import inside_sqlite
queue = TaskQueue(sys.argv[1])
queue.put(1)
is_inside = threading.Event()
def work():
    with inside_sqlite:
        is_inside.set()
        time.sleep(1000)
threading.Thread(target=work, daemon=True).start()
is_inside.wait()
"""


def test_the_interpreter_ends_while_a_daemon_thread_is_inside_sqlite(where: str) -> None:
    command = [sys.executable, "-W", "error", "-c", EXITS, where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("durable", [True, False])
def test_a_task_is_not_lost_if_an_interrupt_comes_after_it_was_claimed(
    where: str, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = TaskQueue(where, durable=durable)
    kept_id, id = queue.put(1), queue.put(2)
    kept = queue.claim()
    claim = queue.store.claim

    def interrupted(*arguments: Any, **options: Any) -> None:
        claim(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue.store, "claim", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.claim()
    found = queue.claim()
    assert kept is not None and found is not None
    assert (kept.id, found.id, found.tried) == (kept_id, id, 1)
    kept.complete()
    found.complete()
    queue.close()
