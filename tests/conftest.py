"""What the tests share. Peers and looks into /proc are in `support`."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from support import Peer, Waited

import holdfast
from holdfast import process, wait
from holdfast.tasks import claimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    import servers

    from holdfast.tasks import TaskQueue


# A shell that runs the tests in the background, or nohup, has them ignore signals that tests send to their children.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


# What tests run is not a part of the `make test` that runs the tests: `make` would print each directory that it enters.
for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(variable, None)

# A child that becomes another user may not be able to read the checkout. So the modules that the package loads on first
# use are loaded here, whatever the order of the tests is.
for room in ("", "locks", "atomicdir", "events", "tasks"):
    for found in pkgutil.iter_modules([str(Path(holdfast.__file__).parent / room)]):
        if not found.ispkg and found.name != "__main__":
            importlib.import_module(".".join(filter(None, ("holdfast", room, found.name))))


def pytest_collection_finish() -> None:
    """What is there now stays. Not to look through it each time garbage is collected saves minutes."""
    import hypothesis  # noqa: F401  # which asks the collector who refers to what, and is not told of what is frozen

    gc.collect()
    gc.freeze()


def is_open(fd: int, inode: tuple[int, int] | None = None) -> bool:
    try:
        st = os.fstat(fd)
    except OSError:
        return False
    return inode is None or (st.st_dev, st.st_ino) == inode


@pytest.fixture(autouse=True)
def _registry_is_right() -> Iterator[None]:
    """A forked child closes what the registry says is open. A wrong number in it would be a file of the program."""
    yield
    # Threads may still end, and garbage be collected meanwhile: what is wrong now and still there afterwards is wrong.
    # A socket that libpq has closed stays until its session ends. A child knows it by its inode.
    found = process.descriptors.copy().items()
    closed = [(owner, fd) for owner, fd in found if not (isinstance(fd, process.SharedNumber) or is_open(fd))]
    assert not [(owner, fd) for owner, fd in closed if process.descriptors.get(owner) == fd]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a lock can be: nothing there yet."""
    return os.path.realpath(tmp_path / "x.lock")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Waited]:
    """Every wait of this process for a lock, in order: to compare deadlines, which load does not change."""
    found: list[Waited] = []

    def recorded(real: Any) -> Any:
        def block(step: wait.Step) -> Any:
            found.append(Waited(time.monotonic(), step.until))
            return real(step)

        return block

    for kind in (wait.Readable, wait.Pause, wait.Granted, wait.Notified):
        for name in ("block", "wait"):
            monkeypatch.setattr(kind, name, recorded(getattr(kind, name)))
    return found


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Where fsync takes no time."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
        # Threads of queues and stores that a test has not closed may still write, and the directory is to be removed.
        claimer._flush_all()
        for thread in threading.enumerate():
            if thread.name == "holdfast index":
                thread.join()


@pytest.fixture
def jobs(in_memory: Path) -> Path:
    """Where a queue of tasks can be."""
    return in_memory / "jobs"


@pytest.fixture
def queue(jobs: Path) -> TaskQueue:
    from holdfast.tasks import TaskQueue

    return TaskQueue(jobs, retry_after=0.01)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.Postgres]:
    """A PostgreSQL server of this process. It starts with the first test that needs it."""
    import servers

    server = servers.Postgres.start()
    try:
        yield server
    finally:
        server.stop()


_databases = count(1)


@pytest.fixture
def postgres(postgres_server: servers.Postgres) -> Iterator[str]:
    """The URL of a new database."""
    if not postgres_server.is_ready():  # an earlier test has stopped it, and failed
        postgres_server.restart()
    name = f"test{next(_databases)}"
    with postgres_server.connect("postgres") as connection:
        connection.execute(f"create database {name}")
    yield postgres_server.url(name)
    with postgres_server.connect("postgres", user="postgres") as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.Redis]:
    """A Redis server of this process."""
    import servers

    server = servers.Redis.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[servers.Etcd]:
    """An etcd server of this process, with one node."""
    import servers

    server = servers.Etcd.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def samba_server() -> Iterator[servers.Samba]:
    """A Samba server of this process."""
    import servers

    from holdfast.locks import smb_session

    server = servers.Samba.start()
    try:
        yield server
    finally:
        for share in smb_session.shares.values():
            if share._session is not None:
                share._session.lose()
        smb_session.shares.clear()
        server.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 300 kB."""
    room = tmp_path / "small"
    room.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", room]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount")
    try:
        yield room
    finally:
        subprocess.run(["umount", "--lazy", room], check=True)


@pytest.fixture
def start_peer(in_memory: Path) -> Iterator[Callable[..., Peer]]:
    """Starts peers; ends them with the test, however it goes, and before its directory is removed."""
    with ExitStack() as stack:
        yield lambda **names: stack.enter_context(Peer(**names))
