"""The face of a lock works with an engine that has no path, no descriptor and no inode, and whose calls block."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast import metrics, wait
from holdfast.locks.base import BaseLock, would_deadlock
from holdfast.locks.engine import BUSY, Engine, Grant, Outcome, attempt_step
from holdfast.status import Holder, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_S = 0.05  # seconds that a call to the server takes
PATIENCE_S = 30.0


class Server:
    """Keeps locks by name, and grows a token with every grant. Its calls block, and remember their thread."""

    def __init__(self) -> None:
        self.holders: dict[str, int] = {}
        self.last_token = 0
        self.threads: list[int] = []
        self._mutex = threading.Lock()

    def take(self, name: str) -> int | None:
        self._answer()
        with self._mutex:
            if name in self.holders:
                return None
            self.last_token += 1
            self.holders[name] = self.last_token
            return self.last_token

    def give_back(self, name: str, token: int) -> bool:
        self._answer()
        with self._mutex:
            if self.holders.get(name) != token:
                return False
            del self.holders[name]
            return True

    def _answer(self) -> None:
        self.threads.append(threading.get_ident())
        time.sleep(CALL_S)


class ServerGrant(Grant):
    shared = False

    def __init__(self, server: Server, key: str, token: int) -> None:
        self.server, self.key, self.token = server, key, token
        self.acquired_at = time.time()

    def release(self) -> bool:
        return self.server.give_back(self.key, self.token)

    def is_good(self) -> bool:
        return self.server.holders.get(self.key) == self.token


class ServerEngine(Engine):
    blocks = True

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, f"memory://{name}"
        self.metrics = metrics.kind("memory")

    def first_attempt(self, timeout: float | None = None) -> ServerGrant | Outcome:
        token = self.server.take(self.name)
        return BUSY if token is None else ServerGrant(self.server, self.name, token)

    def steps(self, found: Outcome, deadline: float | None, *, asynchronous: bool) -> wait.Steps[Any]:
        wait.check_deadline(deadline)
        if holdfast.process.registry.holds_of_caller(self.name, asynchronous=asynchronous):
            raise would_deadlock(self.name, asynchronous, "holds the lock")
        backoff = wait.Backoff()
        while True:
            wait.check_deadline(deadline)
            yield backoff.pause(deadline)
            grant = yield from attempt_step(self, self.first_attempt)
            if not isinstance(grant, Outcome):
                return grant

    def status(self) -> Status:
        held = self.name in self.server.holders
        return Status(self.name, "memory", held=held, holders=(Holder(None),) if held else ())


class ServerLock(BaseLock[holdfast.Hold]):
    def __init__(self, server: Server, timeout: float | None = None) -> None:
        super().__init__(ServerEngine(server, "deploy"), timeout)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def other_thread(server: Server) -> Iterator[holdfast.Hold]:
    """A hold of another thread."""
    holds: list[holdfast.Hold] = []
    thread = threading.Thread(target=lambda: holds.append(ServerLock(server).acquire()))
    thread.start()
    thread.join()
    yield holds[0]
    if not holds[0].released:
        holds[0].release()


def test_it_is_held_released_and_counted(server: Server) -> None:
    lock = ServerLock(server)
    with lock as hold:
        assert hold.token == 1 and not hold.lost and not hold.released and lock.status().held
        assert lock.try_acquire() is None
    assert hold.released and not lock.status().held
    with pytest.raises(holdfast.NotLocked, match="memory://deploy"):
        hold.release()
    with lock as hold:
        assert hold.token == 2


def test_busy_and_timeout_name_the_lock(server: Server, other_thread: holdfast.Hold) -> None:
    with pytest.raises(holdfast.Busy, match="memory://deploy is busy"):
        ServerLock(server, timeout=0).acquire()
    with pytest.raises(holdfast.Timeout, match=r"not acquired within 0\.1 s"):
        ServerLock(server).acquire(timeout=0.1)


def test_a_waiter_gets_it_after_the_release(server: Server, other_thread: holdfast.Hold) -> None:
    threading.Timer(0.1, other_thread.release).start()
    ServerLock(server).acquire(timeout=PATIENCE_S).release()


def test_a_caller_that_would_wait_for_itself_is_refused(server: Server) -> None:
    with ServerLock(server), pytest.raises(holdfast.WouldDeadlock):
        ServerLock(server).acquire(timeout=PATIENCE_S)


def test_a_lock_that_the_server_took_away_is_lost(server: Server) -> None:
    hold = ServerLock(server).acquire()
    server.holders["memory://deploy"] = 99
    assert hold.lost
    with pytest.raises(holdfast.LockLost):
        hold.check()
    with pytest.raises(holdfast.LockLost):
        hold.release()
    assert hold.released and server.holders == {"memory://deploy": 99}, "the next holder's lock was released"


@pytest.mark.parametrize("ways", ["with", "calls", "try"])
def test_no_call_to_the_server_runs_in_the_thread_of_the_event_loop(ways: str, server: Server) -> None:
    async def use() -> None:
        lock = ServerLock(server)
        if ways == "with":
            async with lock:
                pass
        else:
            hold = await (lock.aacquire() if ways == "calls" else lock.atry_acquire())
            assert hold is not None
            await hold.arelease()
        assert not server.holders

    asyncio.run(use())
    assert len(server.threads) == 2 and threading.get_ident() not in server.threads


def test_a_cancelled_acquire_leaves_nothing_behind(server: Server) -> None:
    async def cancel_in_the_call() -> None:
        task = asyncio.ensure_future(ServerLock(server).aacquire())
        while not server.threads:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_in_the_call())
    assert server.holders == {}
    assert len(server.threads) == 2 and threading.get_ident() not in server.threads
