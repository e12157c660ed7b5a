"""A package that adds a scheme with an entry point: installed for one process, which uses it as any other engine."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support import Raised, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support import Peer

ENGINE = '''
"""Locks that are directories. The server is the file system."""

import os
import time
from urllib.parse import urlsplit

from holdfast import Unsupported, wait
from holdfast.locks.engine import BUSY
from holdfast.locks.server import Lease, ServerEngine, ServerGrant, Waiter, client_name, clock, holder_of


class ZooLease(Lease):
    def renew(self, timeout):
        return [grant for grant in self.held() if not os.path.isdir(grant.id)]


class ZooEngine(ServerEngine):
    def __init__(self, url, *, shared=False, permits=0, ttl=None):
        super().__init__(url, "zoo")
        if shared or permits:
            raise Unsupported("zoo has exclusive locks only: use another engine", path=url)
        self.shared = False
        self.path = urlsplit(url).path
        self.key = ("zoo", self.path)

    def attempt(self, timeout):
        try:
            os.mkdir(self.path)
        except FileExistsError:
            return BUSY
        open(self.path + "/" + client_name(), "x").close()
        return ServerGrant(self, ZooLease("zoo", 0.3, clock()), self.path, time.time_ns())

    def join(self, timeout):
        return ZooWaiter(self)

    def release_grant(self, grant):
        try:
            for name in os.listdir(grant.id):
                os.unlink(grant.id + "/" + name)
            os.rmdir(grant.id)
        except FileNotFoundError:
            return False
        return True

    def status(self):
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return self.state(tuple(holder_of(name, False) for name in names), ())


class ZooWaiter(Waiter):
    def __init__(self, engine):
        self.engine = engine

    def attempt(self, timeout):
        return self.engine.attempt(timeout) or None

    def step(self, deadline):
        return wait.Pause(wait.sooner(time.monotonic() + 0.01, deadline))

    def leave(self):
        pass
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the packages of a process are: one that works, and one that cannot be loaded."""
    room = tmp_path / "packages"
    room.mkdir()
    (room / "zoo_engine.py").write_text(ENGINE)
    for name, target in (("zoo", "zoo_engine:ZooEngine"), ("broken", "not_there:Engine")):
        about = room / f"{name}_engine-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-engine\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[holdfast.engines]\n{name} = {target}\n")
        (about / "RECORD").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(room))
    return room


def test_a_package_adds_an_engine(installed: Path, tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    url = f"zoo://here{tmp_path}/deploy"
    holder, waiter = start_peer(url=url), start_peer(url=url)
    holder.do("hold = holdfast.lock(url).acquire(timeout=30)")
    waiter.do("lock = holdfast.lock(url)")
    assert waiter.do("lock.try_acquire()") is None
    with pytest.raises(Raised, match=f"Timeout: .*held by pid {holder.pid}"):
        waiter.do("lock.acquire(timeout=0.1)")
    waiter.begin("hold = lock.acquire(timeout=30)")
    holder.do("hold.check(); first = hold.token; hold.release()")
    waiter.answer()
    assert waiter.do("hold.token") > holder.do("first")
    (tmp_path / "deploy").rename(tmp_path / "moved")  # an administrator takes the lock away
    until(lambda: waiter.do("hold.lost"))
    with pytest.raises(Raised, match="LockLost"):
        waiter.do("hold.release()")
    with pytest.raises(Raised, match="Unsupported: zoo has exclusive locks only"):
        waiter.do("holdfast.semaphore(url, 2)")


def test_the_commands_know_the_engine(installed: Path, tmp_path: Path) -> None:
    url = f"zoo://here{tmp_path}/deploy"
    inside = f"{sys.executable} -m holdfast status --json {url}; {sys.executable} -m holdfast ls {url}"
    command = [sys.executable, "-m", "holdfast", "run", url, "-c", inside]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert '"locked": true' in done.stdout and '"kind": "zoo"' in done.stdout and url in done.stdout
    assert not (tmp_path / "deploy").exists()


def test_a_package_that_cannot_be_loaded_is_named(installed: Path, start_peer: Callable[..., Peer]) -> None:
    with pytest.raises(Raised, match=r"Unsupported: broken://…: .*No module named 'not_there'.*not_there:Engine"):
        start_peer().do("holdfast.lock('broken://here/deploy')")
    with pytest.raises(Raised, match="no engine has this scheme"):
        start_peer().do("holdfast.lock('unknown://here/deploy')")
