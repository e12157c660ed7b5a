"""Faults that use has found in kernel locks and semaphores, each with the test that shows it.

Those of lock files are in test_lock_file_faults.py, those of two kinds of lock on one path in test_rule_ten.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from explorer import system_calls
from support import Peer, in_child, tickets, until, until_queued

import holdfast
from holdfast import Lock, LockFile, NotALockFile, Semaphore, Timeout, UnsafePath, process, system, wait, watch
from holdfast.locks import engine, first_waiter, local
from holdfast.locks import queue as queues
from holdfast.locks.path_lock import PathLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS: dict[str, Callable[..., Any]] = {
    "lock": Lock,
    "shared": lambda path, **options: Lock(path, shared=True, **options),
    "kept": lambda path, **options: Lock(path, keep=True, **options),
    "semaphore": lambda path, **options: Semaphore(path, 1, **options),
}
NOBODY = 65534


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return KINDS[request.param]


@pytest.fixture
def rival(path: str) -> Iterator[Any]:
    """A lock that another open file holds."""
    hold = in_another_thread(Lock(path).acquire)
    yield hold
    hold.release()


# A fork while waiting.


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_forked_child_unwinds_the_wait_of_its_parent_without_touching_anything(
    path: str, tmp_path: Path, fair: bool, asynchronous: bool
) -> None:
    async def wait_fork_and_close() -> None:
        lock = Lock(path, fair=fair)
        steps = lock._steps(engine.BUSY, 60, asynchronous=asynchronous)
        while not isinstance(next(steps), wait.Readable):
            pass
        queue = tickets(path)
        assert len(queue) == fair

        def child() -> list[object]:
            names = [tmp_path / f"own-{number}" for number in range(20)]
            files = [open(name, "w") for name in names]  # noqa: SIM115
            steps.close()
            return [[os.fstat(file.fileno()).st_size for file in files], [file.closed for file in files], tickets(path)]

        assert in_child(child) == [[0] * 20, [False] * 20, queue]
        steps.close()
        assert not tickets(path)

    with Lock(path):
        in_another_thread(lambda: asyncio.run(wait_fork_and_close()))


def in_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# The queue.


def test_a_reader_does_not_pass_a_writer_while_others_read(path: str, start_peer: Callable[..., Peer]) -> None:
    holder, writer, reader = (start_peer(path=path) for _ in range(3))
    holder.do("hold = Lock(path, shared=True).acquire()")
    writer.begin("hold = Lock(path).acquire(timeout=60)")
    until_queued(path, 1)
    writer.until_waiting(path)  # its ticket is locked. Before that, it counts as the ticket of a dead process
    reader.do(
        "from holdfast.locks import queue\n"
        "from holdfast.locks.path_lock import PathLock\n"
        "queue.RECHECK_S = 0.01\n"
        "looks = []\n"
        "is_free = PathLock.is_free\n"
        "def note(lock):\n"
        "    with open(path + '.looks', 'a') as file:\n"
        "        file.write('.')\n"
        "    return is_free(lock)\n"
        "PathLock.is_free = note"
    )
    reader.begin("hold = Lock(path, shared=True).acquire(timeout=60)")
    until_queued(path, 2)
    until(lambda: os.path.exists(path + ".looks") and os.path.getsize(path + ".looks") >= 5)
    assert not reader.has_answered() and not writer.has_answered()
    holder.do("hold.release()")
    writer.answer()
    assert not reader.has_answered()
    writer.do("hold.release()")
    reader.answer()
    reader.do("hold.release()")


def make_ticket(kind: str, ticket: str) -> None:
    if kind == "file":
        Path(ticket).write_text("1111")
    elif kind == "directory":
        os.mkdir(ticket)
    elif kind == "symlink":
        os.symlink("/etc/passwd", ticket)
    elif kind == "dangling symlink":
        os.symlink("nowhere", ticket)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(ticket)
    else:
        os.mkfifo(ticket)


CONTENTS = ["file", "directory", "symlink", "dangling symlink", "socket", "fifo", "fifo that a stranger writes to"]
NUMBERS = ["000000000001", "000000000007", "999999999999"]


@pytest.fixture
def foreign_queue(path: str, request: pytest.FixtureRequest) -> Iterator[None]:
    kind, number = request.param
    os.mkdir(path + ".queue")
    ticket = f"{path}.queue/{number}"
    make_ticket(kind, ticket)
    stop = threading.Event()
    writers = []
    if kind == "fifo that a stranger writes to":
        fd = os.open(ticket, os.O_RDWR | os.O_NONBLOCK)

        def scribble() -> None:
            while not stop.is_set():
                try:
                    os.write(fd, b"0x10" * 100)
                except BlockingIOError:
                    time.sleep(0.001)

        writers.append(threading.Thread(target=scribble))
        writers[0].start()
    yield
    stop.set()
    for thread in writers:
        thread.join()
        os.close(fd)


FOREIGN = [(kind, number) for kind in CONTENTS for number in NUMBERS]


@pytest.mark.parametrize("foreign_queue", FOREIGN, indirect=True, ids="-".join)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_foreign_files_in_a_queue_directory_delay_no_waiter(kind: str, path: str, foreign_queue: None) -> None:
    make = KINDS[kind]
    make(path).acquire(timeout=30).release()
    with make(path):
        assert make(path).try_acquire() is None
        began = time.monotonic()
        with pytest.raises(Timeout):
            in_another_thread(lambda: make(path).acquire(timeout=0.05))
        assert time.monotonic() - began >= 0.05
    waiting = threading.Thread(target=lambda: make(path).acquire(timeout=30).release())
    with make(path):
        waiting.start()
        until(lambda: process.registry.lines)
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_foreign_entry_with_the_highest_number_leaves_room_for_tickets(path: str) -> None:
    os.makedirs(f"{path}.queue/{NUMBERS[-1]}")  # a directory, which no waiter removes
    waiting = threading.Thread(target=lambda: Lock(path).acquire(timeout=60).release())
    with Lock(path):
        waiting.start()
        until(lambda: any(len(name) == 12 and name != NUMBERS[-1] for name in tickets(path)))
    waiting.join(60)
    assert not waiting.is_alive()


needs_users = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to be two users")


def as_nobody(work: Callable[[], object]) -> object:
    def child() -> object:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return work()

    return in_child(child)


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    """A directory like /tmp, that another user can reach."""
    for above in (*tmp_path.parents, tmp_path):
        if str(above).startswith("/tmp/"):
            os.chmod(above, 0o755)
    made = tmp_path / "sticky"
    made.mkdir()
    made.chmod(0o1777)
    return made


@needs_users
def test_the_queue_of_another_user_in_a_sticky_directory_is_not_obeyed(sticky: Path) -> None:
    path = str(sticky / "x")

    def occupy() -> object:
        os.mkdir(path + ".queue", 0o755)
        os.mkfifo(path + ".queue/000000000001")
        return True

    as_nobody(occupy)
    fd = os.open(path + ".queue/000000000001", os.O_RDWR | os.O_NONBLOCK)  # as alive as a waiter can be
    system.lock(fd, system.EX_NB)
    try:
        Lock(path).acquire(timeout=0).release()
        hold = Lock(path).acquire(timeout=10)
        waiting = threading.Thread(target=lambda: Lock(path).acquire(timeout=30).release())
        waiting.start()
        until(lambda: process.registry.lines)
        hold.release()
        waiting.join(30)
        assert not waiting.is_alive()
    finally:
        os.close(fd)


@needs_users
@pytest.mark.parametrize("kind", KINDS)
def test_a_symlink_of_another_user_in_a_sticky_directory_is_not_followed(kind: str, sticky: Path) -> None:
    victim = sticky.parent / "victim"
    path = str(sticky / "x")
    as_nobody(lambda: os.symlink(victim, path))
    with pytest.raises(UnsafePath, match=f"user {NOBODY}"):
        KINDS[kind](path).try_acquire()
    assert not victim.exists()


def test_a_semaphore_whose_file_may_not_be_read_at_this_moment_is_busy(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CIFS nobody else can read a file while a process has locked all of it, as to write the number of permits."""
    answers = [PermissionError(errno.EACCES, "locked by another machine")] * 4  # an attempt reads twice
    plain = system.pread

    def pread(*args: Any) -> bytes:
        if answers:
            raise answers.pop()
        return plain(*args)

    monkeypatch.setattr(system, "pread", pread)
    assert Semaphore(path, 2).try_acquire() is None
    Semaphore(path, 2).acquire().release()
    assert not answers


@needs_users
def test_a_file_that_is_removed_while_a_user_may_not_create_it_is_no_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users in a sticky directory: O_CREAT is refused on the other one's file, which is gone a moment later."""
    plain = system.open_fd
    answers = [PermissionError(errno.EACCES, "protected"), PermissionError(), FileNotFoundError(), PermissionError()]
    answers += [FileNotFoundError()]

    def open_fd(name: str, *args: Any, **options: Any) -> int:
        if name == path and answers:
            raise answers.pop(0)
        return plain(name, *args, **options)

    monkeypatch.setattr(system, "open_fd", open_fd)
    hold = Lock(path).try_acquire()
    assert hold is not None and not answers
    hold.release()


def test_a_directory_in_which_nothing_may_be_made_is_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fd(name: str, flags: int, *args: Any, **options: Any) -> int:
        raise PermissionError(errno.EACCES, "denied", name) if flags & os.O_CREAT else FileNotFoundError(name)

    monkeypatch.setattr(system, "open_fd", open_fd)
    with pytest.raises(PermissionError, match="denied"):
        Lock(path).try_acquire()


# Every loop checks its deadline.


@pytest.fixture
def no_stable_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that numbers a file anew whenever it is looked at."""
    plain, numbers = system.fstat, iter(range(10**6, 10**9))

    def fstat(fd: int) -> os.stat_result:
        st = plain(fd)
        return os.stat_result((st[0], next(numbers), *st[2:]))

    monkeypatch.setattr(system, "fstat", fstat)


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
@pytest.mark.parametrize("way", ["try", "zero", "timeout", "asyncio", "trio"])
def test_without_stable_inode_numbers_an_acquire_ends_in_time(
    kind: str, way: str, path: str, no_stable_inodes: None
) -> None:
    lock = KINDS[kind](path, fair=False)
    if way == "try":
        assert lock.try_acquire() is None
        return

    def acquire() -> object:
        if way in ("zero", "timeout"):
            return lock.acquire(timeout=0 if way == "zero" else 0.2)
        return anyio.run(lock.aacquire, 0.2, backend=way)

    with pytest.raises(Timeout):
        acquire()


# The line in memory.


def test_a_waiter_whose_event_loop_was_closed_delays_no_other(path: str) -> None:
    loop = asyncio.new_event_loop()
    hold = in_another_thread(Lock(path, fair=False).acquire)
    waiters = [loop.create_task(Lock(path, fair=False).aacquire()) for _ in range(2)]  # one inside, one in the line
    for task in waiters:
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    async def until_in_line() -> None:
        while len(process.registry.lines.get(path, ())) != 2:
            await asyncio.sleep(0)

    loop.run_until_complete(until_in_line())
    got: list[Any] = []
    last = threading.Thread(target=lambda: got.append(Lock(path, fair=False).acquire(timeout=30)))
    last.start()
    until(lambda: len(process.registry.lines[path]) == 3)  # else it would find the lock free, and not wait
    loop.close()
    hold.release()
    last.join()
    got[0].release()
    for task in waiters:  # the coroutines are still there, as those of a program that forgot them would be
        with suppress(RuntimeError):  # anyio misses the loop
            task.get_coro().close()


# Beside a program that takes and releases the lock all the time.

LOOP = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <time.h>

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static void spin(double seconds) { double end = now() + seconds; while (now() < end) {} }

int main(int count, char **words) {
    int fd = open(words[1], O_RDWR | O_CREAT, 0644);
    double held = atof(words[2]) / 1e6, gap = atof(words[3]) / 1e6;
    puts("ready"); fflush(stdout);
    for (;;) { flock(fd, LOCK_EX); spin(held); flock(fd, LOCK_UN); spin(gap); }
}
"""


@pytest.fixture(scope="module")
def loop_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc)")
    folder = tmp_path_factory.mktemp("loop")
    (folder / "loop.c").write_text(LOOP)
    subprocess.run(["cc", "-O2", "-o", folder / "loop", folder / "loop.c"], check=True)
    return str(folder / "loop")


@pytest.mark.parametrize("gap", [10, 150])
@pytest.mark.parametrize("way", ["timeout", "asyncio", "trio"])
def test_a_waiter_with_a_timeout_gets_a_lock_that_is_taken_in_a_tight_loop(
    path: str, loop_program: str, gap: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RECHECK_S", 3600.0)  # the loop never closes the file, so no event comes either
    lock = Lock(path, keep=True)
    with subprocess.Popen([loop_program, path, "200", str(gap)], stdout=subprocess.PIPE) as looping:
        try:
            assert looping.stdout is not None and looping.stdout.readline() == b"ready\n"
            for _ in range(5):
                hold = lock.acquire(60) if way == "timeout" else anyio.run(lock.aacquire, 60, backend=way)
                hold.release()
        finally:
            looping.kill()


# The event loop goes on.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("timeout", [0, 0.01])
def test_the_error_of_a_wait_is_composed_in_a_thread(
    path: str, rival: Any, backend: str, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_went_on = threading.Event()
    plain = Lock.status

    def status(lock: Lock) -> holdfast.Status:
        assert loop_went_on.wait(30), "the event loop was blocked"
        return plain(lock)

    monkeypatch.setattr(Lock, "status", status)

    async def main() -> None:
        async def tick() -> None:
            await anyio.sleep(0.02)
            loop_went_on.set()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            with pytest.raises(Timeout):
                await Lock(path).aacquire(timeout)

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_durable_lock_file_is_synced_in_a_thread(path: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_went_on = threading.Event()
    plain = system.fsync

    def fsync(fd: int) -> None:
        assert loop_went_on.wait(30), "the event loop was blocked"
        plain(fd)

    monkeypatch.setattr(system, "fsync", fsync)

    async def main() -> None:
        async def tick() -> None:
            await anyio.sleep(0.02)
            loop_went_on.set()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            async with LockFile(path, durable=True):
                assert Path(path).exists()

    anyio.run(main, backend=backend)
    assert not Path(path).exists()


# What an attempt costs.


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return real(*args, **options)

        return call

    for name, real in system_calls().items():
        monkeypatch.setattr(system, name, counted(name, real))
    return calls


@pytest.mark.parametrize("shared", [False, True])
def test_a_busy_try_makes_at_most_eight_system_calls(
    path: str, rival: Any, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock(path, shared=shared)
    assert lock.try_acquire() is None
    calls = count_calls(monkeypatch)
    assert lock.try_acquire() is None
    assert len(calls) <= 8, calls


def test_a_busy_lock_file_is_found_without_a_sync(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LockFile(path):
        calls = count_calls(monkeypatch)
        assert LockFile(path).try_acquire() is None
        assert "fsync" not in calls, calls


def test_a_lock_that_comes_free_between_two_looks_is_kept(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look of one attempt finds the lock free: then the attempt has it."""
    rival = Lock(path, keep=True).acquire()
    plain = system.removal_marked

    def release_first(fd: int) -> bool:
        rival.release()
        return plain(fd)

    monkeypatch.setattr(system, "removal_marked", release_first)
    calls = count_calls(monkeypatch)
    hold = Lock(path, keep=True).try_acquire()
    assert hold is not None
    assert calls.count("open_fd") == 1, calls
    hold.release()


# What status says.


def test_a_byte_range_lock_of_another_program_is_not_a_holder(path: str, start_peer: Callable[..., Peer]) -> None:
    Path(path).touch()
    peer = start_peer(path=path)
    for take in ("fcntl.lockf(file, fcntl.LOCK_EX)", "system.lock_range(file.fileno(), system.EX_NB)"):
        peer.do(f"import fcntl; from holdfast import system; file = open(path, 'r+'); {take}")
        assert not Lock(path).status().held
        Lock(path, keep=True).acquire(timeout=0).release()
        peer.do("file.close()")


def test_a_semaphore_with_a_free_permit_is_free(path: str) -> None:
    semaphore = Semaphore(path, 2)
    first = semaphore.acquire()
    status = semaphore.status()
    assert not status.held and len(status.holders) == 1 and "1 of 2" in status.explain()
    second = semaphore.acquire()
    assert semaphore.status().held
    first.release()
    assert not semaphore.status().held
    second.release()


@needs_users
def test_a_read_only_semaphore_file_raises_permission_error_with_the_remedy(sticky: Path) -> None:
    path = str(sticky / "x")
    with Semaphore(path, 2):

        def use(timeout: float) -> Callable[[], object]:
            def acquire() -> object:
                try:
                    Semaphore(path, 2).acquire(timeout)
                except PermissionError as error:
                    return [error.errno, error.filename, "mode=0o666" in str(error)]
                return None

            return acquire

        for timeout in (0, 5):
            assert as_nobody(use(timeout)) == [errno.EACCES, path, True]


@pytest.mark.parametrize("kind", [*KINDS, "file"])
def test_a_socket_is_not_a_lock_file(kind: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
    lock = LockFile(path) if kind == "file" else KINDS[kind](path)
    for acquire in (lock.try_acquire, lambda: lock.acquire(timeout=1)):
        with pytest.raises(NotALockFile):
            acquire()


# Greenlets.


@pytest.mark.parametrize(
    "patch", ["from gevent import monkey; monkey.patch_all()", "import eventlet; eventlet.monkey_patch()"]
)
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("first", [True, False], ids=["patched first", "imported first"])
def test_other_greenlets_run_while_a_greenlet_waits(patch: str, timeout: float | None, first: bool, path: str) -> None:
    """The greenlet that would release the lock is in the same thread as the one that waits for it."""
    library = patch.split()[1].strip(";")
    if find_spec(library) is None:  # not imported: eventlet would warn of every fork of the other tests
        pytest.skip(f"{library} is not installed")
    spawn = f"import {library}; spawn = {library}.spawn"
    code = f"""
import warnings; warnings.simplefilter("ignore")
{patch if first else "import holdfast"}
{"import holdfast" if first else patch}
{spawn}
import time
from holdfast import Lock
path, done = {path!r}, []
def wait():
    with Lock(path, timeout={timeout}):
        done.append("waited")
def hold():
    with Lock(path):
        other = spawn(wait)
        for _ in range(20):
            time.sleep(0.01)
        assert not done
        done.append("held")
    return other
other = hold()
other.{"join" if library == "gevent" else "wait"}()
assert done == ["held", "waited"], done
print("good")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "good\n", done.stderr


# The lock of an event store.


def test_an_append_waits_once_and_keeps_its_place(tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    store = str(tmp_path / "store")
    first, second = start_peer(store=store), start_peer(store=store)
    for peer in (first, second):
        peer.do(
            "from holdfast import wait\n"
            "from holdfast.events import Event, EventStore\n"
            "wait.RECHECK_S = 0.01\n"  # the append looks so often whether it is still wanted
            "opened = EventStore(store, lock_timeout=60)\n"
            "looks = []\n"
            "plain = wait.drive\n"
            "def drive(steps, stop=None):\n"
            "    def note():\n"
            "        with open(store + '.' + str(os.getpid()), 'a') as file:\n"
            "            file.write('.')\n"
            "        return stop()\n"
            "    return plain(steps, note if stop else None)\n"
            "wait.drive = drive"
        )
    lock = f"{store}/.store.lock"
    with Lock(lock, keep=True):
        first.begin("opened.append(Event('first', {}))")
        until_queued(lock, 1)
        ticket = os.stat(f"{lock}.queue/{tickets(lock)[0]}").st_ino
        second.begin("opened.append(Event('second', {}))")
        until_queued(lock, 2)
        looks = Path(f"{store}.{first.pid}")
        until(lambda: looks.exists() and looks.stat().st_size > 10)
        assert os.stat(f"{lock}.queue/{tickets(lock)[0]}").st_ino == ticket, "the append has left the queue"
    assert (first.answer(), second.answer()) == (1, 2)


def test_the_bursts_of_the_first_waiter_become_rare() -> None:
    """Tried often at first, a lock that is held for long costs its first waiter next to nothing."""
    before, burst, pause = first_waiter.BURSTS[-1]
    assert before == float("inf") and burst / (burst + pause) < 0.01
    assert max(before for before, _, _ in first_waiter.BURSTS[:-1]) <= 2
    assert queues.RECHECK_S >= 1


def test_a_try_waits_for_a_process_that_is_removing_the_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process may lose its processor in the middle, for some time slices. The pauses are counted, not slept."""
    pauses: list[float] = []
    monkeypatch.setattr(local, "monotonic", lambda: 0.0)
    monkeypatch.setattr(wait.Pause, "block", lambda step: pauses.append(step.until))
    monkeypatch.setattr(PathLock, "attempt", lambda lock: engine.REMOVING)
    assert Lock(path).try_acquire() is None
    assert 0.05 < sum(pauses) < 0.2 and pauses[0] < 0.000_1
