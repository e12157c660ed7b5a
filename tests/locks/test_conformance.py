"""One suite for the locks of every engine. Each promise is written once, and every engine has to keep it.

To add an engine, write a `Target` and add it to `TARGETS`. Faults that take long are marked slow.
"""

from __future__ import annotations

import http.server
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import anyio
import pytest
import servers
from faces import Caller, in_thread
from support import PATIENCE, Peer, Raised, auntil, begin_together, in_child, until

import holdfast
from holdfast import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., Peer]

TTL_S = 2.0
BUSY_S = 1.0  # a timeout that ends while the lock is busy. A server on a busy machine must answer within it
SLACK_S = 8.0  # for a busy machine
ODD_NAMES = (
    "two words",
    "dir/other/name",
    "100%",
    "%2F",
    "a?b&name=c#d",
    "{brace}{",
    "ключ-鍵-🔑",
    "n" * 4000,
    "'\"\\;--",
)
DATABASE = "locks"
_numbers = count(1)


class Target:
    """An engine, and what the suite has to know about it."""

    kind = ""  # of its metrics and status
    options: ClassVar[dict[str, Any]] = {}  # of every lock
    odd_names: tuple[str, ...] = ODD_NAMES
    bound_s = 0.0  # until the lock of a killed holder is free
    cut_bound_s = 0.0  # until the lock of a holder behind a cut network is free. docs/engines.md has the same number
    package = ""  # what the extra installs
    waiting = "len(lock.status().waiters)"  # in a peer: how many processes wait for the lock
    server: Any

    def __init__(self) -> None:
        self.name = f"test{os.getpid()}-{next(_numbers)}"

    def url(self, name: str) -> str:
        raise NotImplementedError

    def take_away(self) -> None:
        """Remove the lock behind the holder's back, as an administrator would."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        return self.url(self.name)

    def lock(self, name: str = "", **options: Any) -> Any:
        return holdfast.lock(self.url(name or self.name), **{**self.options, **options})

    def semaphore(self, permits: int, **options: Any) -> Any:
        return holdfast.semaphore(self.address, permits, **{**self.options, **options})


class PathTarget(Target):
    kind = "lock"
    odd_names = ("two words", "100%", "%2F", "a?b&name=c#d", "{brace}{", "ключ-鍵-🔑", "n" * 255, "'\"\\;--")

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def url(self, name: str) -> str:
        return str(self.directory / name)

    def take_away(self) -> None:
        os.unlink(self.address)


class PostgresTarget(Target):
    kind = "postgresql"
    cut_bound_s = 11.0
    package = "psycopg"
    nameless = "postgresql://127.0.0.1/test"

    def __init__(self, server: servers.Postgres) -> None:
        super().__init__()
        self.server = server
        with server.connect("postgres") as connection:  # one for all tests, so that peers keep their connections
            if connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(f"create database {DATABASE}")

    def url(self, name: str) -> str:
        return f"{self.server.url(DATABASE)}?name={quote(name, safe='')}"

    def terminate(self, *, granted: bool) -> None:
        with self.server.connect("postgres", user="postgres") as connection:
            connection.execute(
                "select pg_terminate_backend(pid, 10000) from pg_locks where locktype = 'advisory' and granted = %s",
                [granted],
            )

    def take_away(self) -> None:
        self.terminate(granted=True)


class RedisTarget(Target):
    kind = "redis"
    package = "redis"
    nameless = "redis://127.0.0.1:6379/0"
    options: ClassVar = {"ttl": TTL_S}
    bound_s = cut_bound_s = TTL_S

    def __init__(self, server: servers.Redis) -> None:
        super().__init__()
        self.server = server

    def url(self, name: str) -> str:
        return str(self.server.url(quote(name, safe="")))

    def take_away(self) -> None:
        self.server.client().delete(f"holdfast:{{{self.name}}}:holders")


class EtcdTarget(Target):
    kind = "etcd"
    nameless = "etcd://127.0.0.1:2379/"
    options: ClassVar = {"ttl": TTL_S}
    bound_s = cut_bound_s = TTL_S + 1.0  # etcd deletes expired leases twice a second

    def __init__(self, server: servers.Etcd) -> None:
        super().__init__()
        self.server = server

    def url(self, name: str) -> str:
        return self.server.url(quote(name, safe=""))

    def take_away(self) -> None:
        node = self.server.nodes[0]
        leases: Any = node.ask("lease/leases").get("leases", [])
        for lease in leases:
            node.ask("lease/revoke", ID=lease["ID"])


class SmbTarget(Target):
    """It has no shared locks, semaphores or order, and the server does not tell who waits."""

    kind = "smb"
    package = "smbprotocol"
    nameless = "smb://127.0.0.1/share/"
    odd_names = ("two words", "100%", "%2F", "a&name=c#d", "{brace}{", "ключ-鍵-🔑", "n" * 200, "';--")
    cut_bound_s = 10.0
    waiting = "__import__('servers').watches(os.getppid())"

    def __init__(self, server: servers.Samba) -> None:
        super().__init__()
        self.server = server

    def url(self, name: str) -> str:
        return self.server.url(f"store/{quote(name, safe='')}")

    def take_away(self) -> None:
        self.server.close_share("store")


TARGETS: dict[str, Callable[[pytest.FixtureRequest], Target]] = {
    "path": lambda request: PathTarget(request.getfixturevalue("tmp_path")),
    "postgresql": lambda request: PostgresTarget(request.getfixturevalue("postgres_server")),
    "redis": lambda request: RedisTarget(request.getfixturevalue("redis_server")),
    "etcd": lambda request: EtcdTarget(request.getfixturevalue("etcd_server")),
    "smb": lambda request: SmbTarget(request.getfixturevalue("samba_server")),
}
SERVERS = [name for name in TARGETS if name != "path"]
QUEUES = [name for name in TARGETS if name != "smb"]  # also shared locks and semaphores
WITH_PASSWORD = ["postgresql", "redis", "smb"]
LEASES = ["redis", "etcd"]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param](request)


def only(*names: str) -> Any:
    return pytest.mark.parametrize("target", names, indirect=True)


class Peers:
    """Peers that serve one test after the other, because starting them takes longer than most tests."""

    def __init__(self) -> None:
        self._idle: list[Peer] = []
        self._used: list[Peer] = []

    def take(self, **names: object) -> Peer:
        peer = self._idle.pop() if self._idle else Peer()
        self._used.append(peer)
        for name, value in names.items():
            peer.do(f"{name} = {value!r}")
        return peer

    def give_back(self) -> None:
        """The test is over. Every peer has released its holds, or was killed."""
        while self._used:
            peer = self._used.pop()
            if peer.process.poll() is not None or peer._expected:
                peer.__exit__(RuntimeError)
            else:
                self._idle.append(peer)  # first: else nobody closes it after a failure
                peer.do("hold = holds = lock = None")
                if complaints := peer.complaints():  # which only this test is to report
                    self._idle.remove(peer)
                    peer.__exit__(RuntimeError)
                assert complaints == ""

    def close(self) -> None:
        for peer in (*self._idle, *self._used):
            peer.__exit__(RuntimeError)


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    found = Peers()
    yield found
    found.close()


@pytest.fixture
def start(target: Target, peers: Peers) -> Iterator[Start]:
    """Starts a peer that knows the lock as `lock`."""

    def begin(**names: object) -> Peer:
        peer = peers.take(url=target.address, options=target.options, **names)
        peer.do("lock = holdfast.lock(url, **options)")
        return peer

    yield begin
    peers.give_back()


@pytest.fixture
def holder(start: Start) -> Peer:
    """Another process that holds the lock as `hold`."""
    peer = start()
    peer.do("hold = lock.acquire(timeout=30)")
    return peer


def waiters(lock: Any) -> int:
    """How many processes wait for the lock."""
    if lock.name.startswith("smb:"):
        return servers.watches(os.getpid())
    return len(lock.status().waiters)


def until_waiters(lock: Any, number: int) -> None:
    until(lambda: waiters(lock) == number)


def elapsed(began: float) -> float:
    return time.monotonic() - began


# Exclusion.


def test_processes_exclude_each_other(target: Target, start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text("0")
    peers = [start(record=str(record)) for _ in range(3)]
    begin_together(peers, "count_up(url, record, 20, holdfast.lock, **options)")
    for peer in peers:
        peer.answer()
    assert record.read_text() == "60"


def test_threads_exclude_each_other(target: Target) -> None:
    numbers = []

    def work() -> None:
        for _ in range(5):
            with target.lock(timeout=PATIENCE):
                numbers.append(len(numbers))  # not atomic
                last = numbers[-1]
                time.sleep(0)
                assert numbers[-1] == last

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == list(range(40))


@only(*QUEUES)
def test_shared_holders_exclude_an_exclusive_one(target: Target, start: Start) -> None:
    peer = start()
    peer.do("hold = holdfast.lock(url, shared=True, **options).acquire(timeout=30)")
    shared = [target.lock(shared=True).acquire(timeout=PATIENCE) for _ in range(2)]
    assert target.lock().try_acquire() is None
    for hold in shared:
        hold.release()
    assert target.lock().try_acquire() is None
    peer.do("hold.release()")
    with target.lock(timeout=0):
        assert target.lock(shared=True).try_acquire() is None


@only(*QUEUES)
def test_a_waiting_exclusive_lock_is_not_starved_by_shared_ones(target: Target, start: Start) -> None:
    holder, peer = start(), start()
    holder.do("hold = holdfast.lock(url, shared=True, **options).acquire(timeout=30)")
    peer.begin("hold = lock.acquire(timeout=30); hold.release()")
    until_waiters(target.lock(), 1)
    assert target.lock(shared=True).try_acquire() is None
    holder.do("hold.release()")
    peer.answer()


@only(*QUEUES)
def test_a_semaphore_has_its_permits(target: Target, start: Start) -> None:
    peer = start()
    peer.do("holds = [holdfast.semaphore(url, 3, **options).acquire(timeout=30) for _ in range(2)]")
    hold = target.semaphore(3).acquire(timeout=PATIENCE)
    assert target.semaphore(3).try_acquire() is None
    peer.do("holds.pop().release()")
    target.semaphore(3).acquire(timeout=PATIENCE).release()
    hold.release()
    assert not target.semaphore(3).status().held
    peer.do("holds.pop().release()")


@only(*QUEUES)
def test_a_released_permit_wakes_a_waiter(target: Target, start: Start) -> None:
    holds = [target.semaphore(2).acquire(timeout=PATIENCE) for _ in range(2)]
    peer = start()
    peer.begin("hold = holdfast.semaphore(url, 2, **options).acquire(timeout=30)")
    until_waiters(target.semaphore(2), 1)
    holds.pop().release()
    peer.answer()
    holds.pop().release()
    peer.do("hold.release()")


def test_a_caller_that_would_wait_for_itself_is_refused(target: Target) -> None:
    with target.lock(), pytest.raises(holdfast.WouldDeadlock):
        target.lock().acquire(timeout=PATIENCE)
    if target.kind == "smb":
        return
    target.name += "-semaphore"
    with target.semaphore(1), pytest.raises(holdfast.WouldDeadlock):
        target.semaphore(1).acquire(timeout=PATIENCE)


@only(*QUEUES)
@pytest.mark.parametrize("first", ["lock", "semaphore"])
def test_kinds_of_locks_on_one_name_exclude_or_refuse_each_other(target: Target, first: str) -> None:
    makers = {"lock": target.lock, "semaphore": lambda: target.semaphore(2)}
    held = makers.pop(first)().acquire(timeout=PATIENCE)
    (other,) = makers.values()
    with suppress(holdfast.Unsupported, holdfast.NotALockFile):
        assert other().try_acquire() is None
    held.check()
    held.release()
    if target.kind != "lock":  # a semaphore keeps its file
        other().acquire(timeout=PATIENCE).release()


@only(*QUEUES)
def test_another_number_of_permits_is_refused_while_the_semaphore_is_in_use(target: Target) -> None:
    with target.semaphore(2) as hold:
        with pytest.raises(holdfast.HoldfastError, match="permits"):
            target.semaphore(3).acquire(timeout=1)
        hold.check()
    if target.kind != "lock":  # a semaphore keeps its file
        target.semaphore(3).acquire(timeout=PATIENCE).release()
        target.semaphore(2).acquire(timeout=PATIENCE).release()


# Waiting.


def test_busy_and_timeout_name_the_lock_and_its_holder(target: Target, holder: Peer) -> None:
    lock = target.lock()
    assert lock.try_acquire() is None
    with pytest.raises(holdfast.Busy, match=str(holder.pid)) as busy:
        lock.acquire(timeout=0)
    began = time.monotonic()
    with pytest.raises(holdfast.Timeout, match="not acquired within") as late:
        lock.acquire(timeout=BUSY_S)
    assert BUSY_S <= elapsed(began) < SLACK_S
    for error in (busy.value, late.value):
        assert error.path == lock.name and error.status is not None and error.status.held
        assert servers.PASSWORD not in str(error)
    until_waiters(lock, 0)
    holder.do("hold.release()")


def test_only_an_acquire_that_waited_counts_as_contended(target: Target, holder: Peer) -> None:
    def counted() -> tuple[int, int]:
        kind = metrics.kind(target.kind)
        return kind.acquisitions.value, kind.contended.value

    lock = target.lock()
    acquired, contended = counted()
    with target.lock(f"{target.name}-free"):
        assert counted() == (acquired + 1, contended)
    holder.begin(f"until(lambda: {target.waiting} == 1); hold.release()")
    with lock:
        assert counted() == (acquired + 2, contended + 1)
    holder.answer()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_task_leaves_nothing_behind(target: Target, holder: Peer, backend: str) -> None:
    lock = target.lock()

    async def cancel() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lock.aacquire)
            await auntil(lambda: waiters(lock) == 1)
            tasks.cancel_scope.cancel()

    anyio.run(cancel, backend=backend)
    until_waiters(lock, 0)
    holder.do("hold.release()")
    with lock:
        pass
    assert not lock.status().held


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_tasks_acquire_wait_and_release(target: Target, holder: Peer, backend: str) -> None:
    async def use() -> None:
        lock = target.lock(timeout=PATIENCE)
        assert await lock.atry_acquire() is None
        with pytest.raises(holdfast.Timeout):
            await lock.aacquire(timeout=BUSY_S)
        holder.begin(f"until(lambda: {target.waiting} == 1); hold.release()")
        async with lock as hold:
            hold.check()
        with pytest.raises(holdfast.NotLocked):
            await hold.arelease()

    anyio.run(use, backend=backend)
    holder.answer()


@only(*QUEUES)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_waiters_are_served_in_order_of_arrival(target: Target, start: Start, tmp_path: Path, kind: str) -> None:
    made = "holdfast.lock(url, **options)" if kind == "lock" else "holdfast.semaphore(url, 1, **options)"
    lock = target.lock() if kind == "lock" else target.semaphore(1)
    order = tmp_path / "order"
    order.touch()
    hold = lock.acquire(timeout=PATIENCE)
    peers = [start(order=str(order), number=number) for number in range(4)]
    for number, peer in enumerate(peers):
        peer.begin(f"with {made}, open(order, 'a') as file: file.write(f'{{number}} ')")
        until_waiters(lock, number + 1)
    hold.release()
    for peer in peers:
        peer.answer()
    assert order.read_text() == "0 1 2 3 "


@only(*QUEUES)
def test_waiters_for_permits_are_served_in_order_of_arrival(target: Target, start: Start) -> None:
    """Two permits at once go to the first two waiters, and each later one to the next."""
    semaphore = target.semaphore(2)
    holds = [semaphore.acquire(timeout=PATIENCE) for _ in range(2)]
    peers = [start() for _ in range(4)]
    for number, peer in enumerate(peers):
        peer.begin("hold = holdfast.semaphore(url, 2, **options).acquire(timeout=30)")
        until_waiters(semaphore, number + 1)
    for hold in holds:
        hold.release()
    for peer in peers[:2]:
        peer.answer()
    for first, third in zip(peers[:2], peers[2:], strict=True):
        assert not third.has_answered()
        first.do("hold.release()")
        third.answer()
    for peer in peers[2:]:
        peer.do("hold.release()")
    assert not semaphore.status().held


@only(*QUEUES)
def test_status_names_holders_and_waiters(target: Target, holder: Peer, start: Start) -> None:
    waiter = start()
    waiter.begin("hold = lock.acquire(timeout=30)")
    lock = target.lock()
    until_waiters(lock, 1)
    status = lock.status()
    assert status.held and [found.pid for found in status.holders] == [holder.pid]
    assert [found.pid for found in status.waiters] == [waiter.pid]
    assert servers.PASSWORD not in repr(status)
    holder.do("hold.release()")
    waiter.answer()
    assert [found.pid for found in lock.status().holders] == [waiter.pid]
    waiter.do("hold.release()")
    assert not lock.status().held


# The end of a holder.


def test_the_lock_of_a_killed_holder_goes_to_the_next_one(target: Target, holder: Peer, start: Start) -> None:
    lock = target.lock()
    waiter = start()
    waiter.begin("hold = lock.acquire(timeout=30)")
    until_waiters(lock, 1)
    began = time.monotonic()
    holder.kill()
    waiter.answer()
    assert waiter.at - began < target.bound_s + SLACK_S
    waiter.do("hold.release()")


@only(*QUEUES)
def test_a_killed_waiter_does_not_block_those_behind_it(target: Target, holder: Peer, start: Start) -> None:
    lock = target.lock()
    waiter = start()
    waiter.begin("lock.acquire(timeout=30)")
    until_waiters(lock, 1)
    waiter.kill()
    behind = start()
    behind.begin("hold = lock.acquire(timeout=30); hold.release()")
    until(lambda: behind.pid in [found.pid for found in lock.status().waiters])
    began = time.monotonic()
    holder.do("hold.release()")
    behind.answer()
    assert behind.at - began < target.bound_s + SLACK_S


@only(*LEASES)
def test_a_lock_lasts_as_long_as_its_own_holder_has_asked_for(target: Target, holder: Peer) -> None:
    """Another user of the lock may ask for a longer or shorter time."""
    longer = Caller(target.lock(ttl=300).acquire, timeout=PATIENCE)
    until_waiters(target.lock(), 1)
    began = time.monotonic()
    holder.kill()
    with longer.result() as hold:
        assert elapsed(began) < target.bound_s + SLACK_S
        with pytest.raises(holdfast.Timeout):
            in_thread(target.lock(ttl=1).acquire, timeout=1.5)
        hold.check()


def test_a_lost_lock_is_reported_and_never_taken_from_the_next_holder(target: Target, start: Start) -> None:
    lost: list[object] = []
    hold = target.lock(**({} if target.kind == "lock" else {"on_lost": lost.append})).acquire(timeout=PATIENCE)
    hold.check()
    target.take_away()
    peer = start()
    peer.do("hold = lock.acquire(timeout=30)")
    until(lambda: hold.lost)
    if target.kind != "lock":
        until(lambda: lost == [hold])
    with pytest.raises(holdfast.LockLost):
        hold.check()
    with pytest.raises(holdfast.LockLost) as caught:
        hold.release()
    assert ("file" in str(caught.value)) == (target.kind == "lock")
    peer.do("hold.check()")
    assert target.lock().try_acquire() is None
    peer.do("hold.release()")
    assert len(lost) <= 1


def test_a_release_right_after_the_loss_raises(target: Target) -> None:
    hold = target.lock().acquire(timeout=PATIENCE)
    target.take_away()
    with pytest.raises(holdfast.LockLost):
        hold.release()
    target.lock().acquire(timeout=PATIENCE).release()


def test_a_held_lock_is_renewed(target: Target, start: Start) -> None:
    """Not a wait for a moment: it ends when the lease would have expired twice."""
    hold = target.lock().acquire(timeout=PATIENCE)
    peer = start(seconds=target.bound_s * 1.5)
    with pytest.raises(Raised, match=r"Timeout|Busy"):
        peer.do("lock.acquire(timeout=seconds)")
    hold.check()
    hold.release()


@only(*SERVERS)
def test_tokens_grow_across_processes(target: Target, start: Start) -> None:
    peers = [start(), start()]
    tokens = []
    for peer in peers * 3:
        peer.do("hold = lock.acquire(timeout=30)")
        tokens.append(peer.do("hold.token"))
        peer.do("hold.release()")
    assert tokens == sorted(set(tokens))


@only(*QUEUES)
def test_a_killed_holder_or_a_cancelled_waiter_costs_no_permit(target: Target, start: Start) -> None:
    semaphore = target.semaphore(2, timeout=PATIENCE)
    holder = start()
    holder.do("holds = [holdfast.semaphore(url, 2, **options).acquire(timeout=30) for _ in range(2)]")

    async def cancel() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(semaphore.aacquire)
            await auntil(lambda: waiters(semaphore) == 1)
            tasks.cancel_scope.cancel()

    anyio.run(cancel)
    until_waiters(semaphore, 0)
    holder.kill()
    holds = [semaphore.acquire() for _ in range(2)]
    assert semaphore.try_acquire() is None
    for hold in holds:
        hold.release()


# Names and URLs.


def test_odd_names_are_names(target: Target, start: Start) -> None:
    names = [f"{target.name}-{name}" if len(name) < 200 else name for name in target.odd_names]
    holds = [target.lock(name).acquire(timeout=PATIENCE) for name in names]  # none excludes another
    peer = start(urls=[target.url(name) for name in names])
    assert peer.do("[holdfast.lock(url, **options).try_acquire() for url in urls]") == [None] * len(names)
    for hold in holds:
        assert hold.lock.status().held
        hold.release()


@only(*SERVERS)
def test_a_url_without_a_name_is_refused(target: Any) -> None:
    with pytest.raises(holdfast.UnsafePath, match="names no lock"):
        holdfast.lock(target.nameless)


def test_a_bad_name_is_refused(target: Target) -> None:
    with pytest.raises(holdfast.UnsafePath) as caught:
        holdfast.lock(target.url("a\0b")).acquire(timeout=PATIENCE)
    assert servers.PASSWORD not in whole_text(caught.value)


@only("redis", "etcd")
def test_a_name_that_ends_early_is_refused(target: Target) -> None:
    """Else `deploy#1` and `deploy#2` would be one lock."""
    for number in (1, 2):
        with pytest.raises(holdfast.UnsafePath, match="Write %23"):
            holdfast.lock(f"{target.address}#{number}")


@only(*SERVERS)
@pytest.mark.parametrize("host", ["a..b", "x" * 300, "[::1", "127.0.0.1:99999", "127.0.0.1:port"])
def test_a_host_that_cannot_be_one_is_reported(target: Target, host: str) -> None:
    before, _, after = target.address.rpartition("127.0.0.1")
    with pytest.raises((holdfast.UnsafePath, holdfast.ConnectionFailed), match=r"Check|Write") as caught:
        holdfast.lock(f"{before}{host}{after.lstrip(':0123456789')}").acquire(timeout=5)
    assert servers.PASSWORD not in whole_text(caught.value)


@only("redis")
def test_a_lock_of_valkey_is_the_same(target: Target) -> None:
    url = target.address.replace("redis://", "valkey://")
    with holdfast.lock(url, ttl=TTL_S, timeout=PATIENCE) as hold:
        assert hold.lock.name.startswith("valkey://")
        assert target.lock().try_acquire() is None
        assert holdfast.lock(url).status().held


@only("smb")
def test_what_an_engine_cannot_do_is_refused_with_a_reason(target: Any) -> None:
    for ask in (lambda: target.lock(shared=True), lambda: target.semaphore(2)):
        with pytest.raises(holdfast.Unsupported, match=r"one writer\. Use PostgreSQL, etcd or Redis") as caught:
            ask()
        assert servers.PASSWORD not in whole_text(caught.value)
    for name in ("postgresql", "smb"):
        with pytest.raises(holdfast.Unsupported, match="leave ttl out"):
            holdfast.lock(f"{name}://127.0.0.1/share/x?name=x", ttl=5)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(holdfast.Unsupported, match=r"nosuch://.*Use one of postgresql"):
        holdfast.lock("nosuch://user:secret@host/name")


@only(*WITH_PASSWORD)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(target: Target, start_peer: Start) -> None:
    peer = start_peer(url=target.address, package=target.package)
    peer.do("import sys; sys.modules[package] = None")
    with pytest.raises(Raised, match=r"Unsupported: .*pip install 'holdfast\["):
        peer.do("holdfast.lock(url)")


def test_a_lock_can_be_sent_to_another_process(target: Target) -> None:
    for shared in (False, True) if target.kind != "smb" else (False,):
        lock = target.lock(timeout=0, **({"shared": True} if shared else {}))
        copy = pickle.loads(pickle.dumps(lock))
        assert (copy.name, copy.timeout, copy.shared) == (lock.name, 0, lock.shared)
        with copy:
            assert target.lock().try_acquire() is None
    assert servers.PASSWORD not in repr(copy)


# The connection.


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def assert_fails(lock: Any, *, secret: str, timeout: float = 5.0) -> None:
    """In each way to acquire: ConnectionFailed, in time, without the password."""
    for way in (lambda: lock.acquire(timeout=timeout), lambda: anyio.run(lock.aacquire, timeout)):
        began = time.monotonic()
        with pytest.raises(holdfast.ConnectionFailed) as caught:
            way()
        assert elapsed(began) < timeout + SLACK_S
        assert secret not in whole_text(caught.value)


@only(*WITH_PASSWORD)
def test_a_wrong_password_is_reported_and_not_shown(target: Target) -> None:
    lock = holdfast.lock(target.address.replace(servers.PASSWORD, "wrong-secret"), **target.options)
    assert_fails(lock, secret="wrong-secret")
    with pytest.raises(holdfast.ConnectionFailed, match="Check the user name and the password"):
        lock.acquire()


@pytest.fixture
def etcd_with_users() -> Iterator[servers.Etcd]:
    server = servers.Etcd.start()
    try:
        server.require_password()
        yield server
    finally:
        server.stop()


def test_etcd_with_users_refuses_a_wrong_password(etcd_with_users: servers.Etcd) -> None:
    with holdfast.lock(etcd_with_users.url("deploy", servers.LOGIN), timeout=PATIENCE) as hold:
        hold.check()
    lock = holdfast.lock(etcd_with_users.url("deploy", "root:wrong-secret"))
    assert_fails(lock, secret="wrong-secret")
    with pytest.raises(holdfast.ConnectionFailed, match="Check the user name and the password"):
        lock.acquire()
    with pytest.raises(holdfast.ConnectionFailed):
        holdfast.lock(etcd_with_users.url("deploy")).acquire(timeout=PATIENCE)


@only("etcd")
@pytest.mark.parametrize("answers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_dead_server_of_a_cluster_is_passed_over(target: Any, start: Start, answers: bool) -> None:
    """answers: the dead server refuses connections. Else it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = servers.free_port() if answers else silent.getsockname()[1]
        url = target.address.replace("etcd://", f"etcd://127.0.0.1:{dead},")
        with holdfast.lock(url, timeout=5, ttl=TTL_S) as hold:
            peer = start()
            peer.begin("hold = lock.acquire(timeout=30)")
            until_waiters(target.lock(), 1)
            hold.check()
        peer.answer()
        peer.begin(f"until(lambda: {target.waiting} == 1); hold.release()")
        holdfast.lock(url, ttl=TTL_S).acquire(timeout=PATIENCE).release()
        peer.answer()


@only("etcd")
def test_a_lock_whose_release_failed_is_free_when_the_server_is_back(target: Any, start: Start) -> None:
    """The process still renews the lease, because it holds another lock."""
    kept = target.lock("kept", ttl=9).acquire(timeout=PATIENCE)
    hold = target.lock(ttl=9).acquire(timeout=PATIENCE)
    target.server.shut_down()
    try:
        with pytest.raises(holdfast.ConnectionFailed):
            hold.release()
    finally:
        target.server.restart()
    peer = start()
    peer.do("hold = lock.acquire(timeout=15); hold.release()")
    kept.check()
    kept.release()


@only(*SERVERS)
def test_a_connection_that_is_cut_loses_the_lock_only_where_it_is_the_lock(target: Target, start: Start) -> None:
    """A lease outlives its connection, and so does a place in the queue. A session ends with it."""
    port = port_of(target)
    proxy = servers.Proxy(port)
    url = target.address.replace(f":{port}", f":{proxy.port}")
    far, waiter = start(far=url), start(far=url)
    far.do("hold = holdfast.lock(far, **options).acquire(timeout=30)")
    waiter.begin("hold = holdfast.lock(far, **options).acquire(timeout=30)")
    until_waiters(target.lock(), 1)
    proxy.cut_all()
    if target.kind in LEASES:
        far.do("hold.check(); hold.release()")
    else:
        far.do("until(lambda: hold.lost)")
        with pytest.raises(Raised, match="LockLost"):
            far.do("hold.release()")
    if target.kind == "postgresql":
        with pytest.raises(Raised, match="ConnectionFailed"):
            waiter.answer()
    else:
        waiter.answer()
        waiter.do("hold.check(); hold.release()")
    target.lock().acquire(timeout=PATIENCE).release()
    proxy.close()


def port_of(target: Target) -> int:
    return int(target.server.nodes[0].port if target.kind == "etcd" else target.server.port)


def at_port(target: Target, port: int) -> str:
    url = target.address.replace(f":{port_of(target)}", f":{port}")
    return url.replace("etcd://", f"etcd://user:{servers.PASSWORD}@")


@only(*SERVERS)
def test_a_server_that_does_not_run_is_reported(target: Target) -> None:
    lock = holdfast.lock(at_port(target, servers.free_port()), **target.options)
    assert_fails(lock, secret=servers.PASSWORD)
    for call in (lock.try_acquire, lock.status):
        with pytest.raises(holdfast.ConnectionFailed, match="Check the URL"):
            call()


@only(*SERVERS)
def test_a_server_that_does_not_answer_is_reported_within_the_timeout(target: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lock = holdfast.lock(at_port(target, silent.getsockname()[1]), **target.options)
        assert_fails(lock, secret=servers.PASSWORD, timeout=0.2)


@only(*SERVERS)
def test_a_name_server_that_does_not_answer_is_reported_within_the_timeout(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over, answered = threading.Event(), threading.Event(), threading.Event()

    def resolve(*_: object, **__: object) -> list[Any]:
        asked.set()
        over.wait(PATIENCE)
        answered.set()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    lock = holdfast.lock(target.address.replace("127.0.0.1", "nosuch.invalid"), **target.options)
    try:
        with pytest.raises(holdfast.ConnectionFailed, match=r"no answer in time|did not answer"):
            lock.acquire(timeout=0.2)
        assert asked.is_set() and not answered.is_set()
    finally:
        over.set()


def test_a_server_that_is_not_etcd_is_reported() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        lock = holdfast.lock(f"etcd://127.0.0.1:{other.server_port}/deploy")
        with pytest.raises(holdfast.ConnectionFailed, match="does not answer like etcd"):
            lock.acquire(timeout=PATIENCE)


@only("redis")
def test_a_process_leaves_the_channels_that_no_waiter_needs(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.locks.redis._MAX_CHANNELS", 2)
    for number in range(5):
        with target.lock(f"{target.name}-{number}"), pytest.raises(holdfast.Timeout):
            in_thread(target.lock(f"{target.name}-{number}").acquire, timeout=BUSY_S)
    until(lambda: len(target.server.client().pubsub_channels(f"holdfast:{{{target.name}*")) <= 2)


@pytest.fixture
def restarted(target: Target) -> Iterator[Callable[[], None]]:
    """Restarts the server, and starts it after a test that failed in between."""

    def restart() -> None:
        target.server.shut_down()
        target.server.restart()

    yield restart
    if not target.server.is_ready():
        target.server.restart()


@only(*SERVERS)
def test_a_restart_of_the_server_never_leaves_two_holders(
    target: Target, start: Start, restarted: Callable[[], None]
) -> None:
    hold = target.lock().acquire(timeout=PATIENCE)
    assert hold.token is not None
    peer = start()
    restarted()
    if target.kind == "etcd":  # keeps locks and leases on disk
        with suppress(holdfast.LockLost):
            hold.release()
    else:
        until(lambda: hold.lost)
        with pytest.raises(holdfast.LockLost):
            hold.release()
    peer.do("hold = lock.acquire(timeout=30)")
    assert peer.do("hold.token") > hold.token
    assert target.lock().try_acquire() is None
    peer.do("hold.release()")


@only(*SERVERS)
def test_a_waiter_notices_the_restart_of_the_server(
    target: Target, start: Start, holder: Peer, restarted: Callable[[], None]
) -> None:
    lock = target.lock()
    waiter = start()
    waiter.begin("with lock.acquire(timeout=30) as hold: hold.check()")  # lost, if it got the lock before the restart
    until_waiters(lock, 1)
    holder.kill()
    restarted()
    with suppress(Raised):
        waiter.answer()
    lock.acquire(timeout=PATIENCE).release()


@only(*SERVERS)
@pytest.mark.usefixtures("restarted")
def test_a_waiter_whose_server_goes_away_gets_an_error_before_its_timeout(
    target: Target, holder: Peer, start: Start
) -> None:
    waiter = start()
    waiter.begin("lock.acquire(timeout=3600)")
    until_waiters(target.lock(), 1)
    target.server.shut_down()
    with pytest.raises(Raised, match=r"ConnectionFailed|EtcdError"):  # the latter is a subclass
        waiter.answer()
    holder.kill()


@only("postgresql")
def test_a_waiter_whose_backend_is_terminated_gets_an_error(target: Any, holder: Peer, start: Start) -> None:
    waiter = start()
    waiter.begin("lock.acquire(timeout=30)")
    until_waiters(target.lock(), 1)
    target.terminate(granted=False)
    with pytest.raises(Raised, match=r"ConnectionFailed: .*terminating connection"):
        waiter.answer()
    holder.do("hold.release()")
    waiter.do("hold = lock.acquire(timeout=30); hold.release()")


# Processes.


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_holds_nothing_and_the_parent_keeps_its_lock(target: Target, start: Start) -> None:
    lock = target.lock()
    hold = lock.acquire(timeout=PATIENCE)

    def in_the_child() -> list[object]:
        with pytest.raises(holdfast.NotOwner):
            hold.release()
        with target.lock(f"{target.name}-other", timeout=PATIENCE):
            return [hold.released, lock.try_acquire()]

    assert in_child(in_the_child) == [True, None]
    hold.check()
    peer = start()
    assert peer.do("lock.try_acquire()") is None
    hold.release()
    assert in_child(lambda: lock.acquire(timeout=PATIENCE).release()) is None
    peer.do("hold = lock.acquire(timeout=30); hold.release()")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_one_process_holds_a_lock_on_every_engine(request: pytest.FixtureRequest) -> None:
    """Its threads, tasks and children find all of them held."""
    locks = [make(request).lock() for make in TARGETS.values()]
    holds = [lock.acquire(timeout=PATIENCE) for lock in locks]

    async def find_held() -> list[object]:
        found: list[object] = [None] * len(locks)

        async def try_one(number: int) -> None:
            found[number] = await locks[number].atry_acquire()

        async with anyio.create_task_group() as tasks:
            for number in range(len(locks)):
                tasks.start_soon(try_one, number)
        return found

    assert anyio.run(find_held) == [None] * len(locks)
    assert [in_thread(lock.try_acquire) for lock in locks] == [None] * len(locks)
    assert in_child(lambda: [(hold.released, lock.try_acquire()) for hold, lock in zip(holds, locks, strict=True)]) == [
        [True, None]
    ] * len(locks)
    for hold in holds:
        hold.check()
        hold.release()


# Faults that take long.


def mingle(url: str, options: dict[str, Any], record: str, seconds: float) -> int:
    """In a peer: threads acquire in all ways, with short timeouts and cancellations. Returns the number of holds.

    Each holder writes its kind into a file, and looks which other kinds are there.
    """
    import fcntl
    import random

    def change(kind: str, number: int) -> None:
        with open(record, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = json.loads(file.read())
            held[kind] += number
            assert held["exclusive"] <= 1 and not (held["exclusive"] and held["shared"]) and held["permit"] <= 2, held
            file.seek(0)
            file.write(json.dumps(held).ljust(80))

    async def acquire(lock: Any, timeout: float) -> Any:
        with anyio.move_on_after(random.random() / 10):
            return await lock.aacquire(timeout)

    def work() -> int:
        until, holds = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            kind = random.choice(("exclusive", "shared", "permit")) if not url.startswith("smb:") else "exclusive"
            lock: Any = holdfast.lock(url, shared=kind == "shared", **options)
            if kind == "permit":
                lock = holdfast.semaphore(f"{url}-semaphore", 2, **options)
            timeout = random.choice((0, 0.3, PATIENCE))
            # On a busy machine, 0.3 s may be too short for a new connection.
            with suppress(holdfast.Timeout, *[holdfast.ConnectionFailed] if timeout == 0.3 else []):
                hold = anyio.run(acquire, lock, timeout) if random.random() < 0.3 else lock.acquire(timeout)
                if hold is not None:
                    change(kind, 1)
                    change(kind, -1)
                    hold.release()
                    holds += 1
        return holds

    return sum(caller.result() for caller in [Caller(work) for _ in range(4)])


@pytest.mark.slow
def test_threads_tasks_and_processes_that_mingle_never_break_exclusion(
    target: Target, start: Start, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    record.write_text('{"exclusive": 0, "shared": 0, "permit": 0}')
    peers = [start(record=str(record)) for _ in range(3)]
    begin_together(peers, "__import__('test_conformance').mingle(url, options, record, 10)")
    assert all(peer.answer(60) > 0 for peer in peers)
    assert not any(json.loads(record.read_text()).values())
    until_waiters(target.lock(), 0)
    assert not target.lock().status().held


@pytest.mark.slow
@only(*SERVERS)
def test_a_holder_behind_a_cut_network_knows_before_the_next_holder(target: Target, start_peer: Start) -> None:
    with servers.FarNetwork(target.server) as network:
        far = start_peer(url=network.url(target.address), options=target.options)
        near = start_peer(url=target.address, options=target.options)
        far.do(network.enter())
        far.do("hold = holdfast.lock(url, **options).acquire(timeout=30)")
        near.do("lock = holdfast.lock(url, **options)")
        near.begin("hold = lock.acquire(timeout=90)")
        until_waiters(target.lock(), 1)
        began = time.monotonic()
        network.cut()
        far.begin("until(lambda: hold.lost, 90)")
        near.answer(90)
        far.answer(90)
        assert far.at < near.at < began + target.cut_bound_s + SLACK_S
        network.connect()
        with pytest.raises(Raised, match="LockLost"):
            far.do("hold.release()")
        near.do("hold.check()")
        near.do("hold.release()")


@pytest.mark.slow
@only(*SERVERS)
def test_a_waiter_behind_a_cut_network_gets_an_error_and_blocks_no_other(
    target: Target, start_peer: Start, holder: Peer, start: Start
) -> None:
    with servers.FarNetwork(target.server) as network:
        if target.kind != "etcd":  # the network restarts the server, and only etcd keeps the lock
            with pytest.raises(Raised, match="LockLost"):
                holder.do("hold.release()")
            holder.do("hold = lock.acquire(timeout=30)")
        far = start_peer(url=network.url(target.address), options=target.options)
        far.do(network.enter())
        far.begin("holdfast.lock(url, **options).acquire(timeout=3)")
        until_waiters(target.lock(), 1)
        network.cut()
        began = time.monotonic()
        with pytest.raises(Raised, match=r"Timeout|ConnectionFailed"):
            far.answer()
        assert far.at - began < 3 + SLACK_S
        holder.do("hold.release()")
        near = start()
        near.do("hold = lock.acquire(timeout=60); hold.release()", 60)
        network.connect()


@pytest.mark.slow
def test_a_lock_survives_the_end_of_the_leader_of_a_cluster(start_peer: Start) -> None:
    cluster = servers.Etcd.start(3)
    try:
        holder, waiter, other = (start_peer(url=cluster.url("deploy")) for _ in range(3))
        holder.do("hold = holdfast.lock(url, ttl=10).acquire(timeout=30)")
        waiter.begin("hold = holdfast.lock(url, ttl=10).acquire(timeout=60); hold.check()")
        until_waiters(holdfast.lock(cluster.url("deploy")), 1)
        cluster.kill_leader()
        other.do("hold = holdfast.lock(url + '-other', ttl=10).acquire(timeout=30); hold.release()")
        holder.do("hold.check(); hold.release()")
        waiter.answer(60)
        assert other.do("holdfast.lock(url).try_acquire()") is None
        waiter.do("hold.release()")
        other.do("hold = holdfast.lock(url).acquire(timeout=30); hold.release()")
    finally:
        cluster.stop()


@pytest.mark.slow
@only("redis")
def test_a_server_out_of_memory_refuses_and_still_releases(target: Any) -> None:
    hold = target.lock().acquire(timeout=PATIENCE)
    client = target.server.client()
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(holdfast.ConnectionFailed, match="out of memory"):
            target.lock("another").acquire(timeout=PATIENCE)
        hold.release()
        assert not target.lock().status().held
    finally:
        client.config_set("maxmemory", "0")
        client.close()
    target.lock("another").acquire(timeout=PATIENCE).release()


@pytest.mark.slow
@only(*LEASES)
def test_a_suspended_holder_finds_its_lock_lost(target: Target, holder: Peer, start: Start) -> None:
    holder.stop()
    began = time.monotonic()
    hold = target.lock().acquire(timeout=PATIENCE)
    assert elapsed(began) < target.bound_s + SLACK_S
    holder.go_on()
    with pytest.raises(Raised, match="LockLost"):
        holder.do("hold.release()")
    hold.check()
    hold.release()


@pytest.mark.slow
@only(*LEASES)
@pytest.mark.parametrize("jump", ["-30d", "+400d"])
def test_a_clock_of_the_client_that_jumps_loses_no_lock(target: Target, jump: str, tmp_path: Path) -> None:
    """faketime changes the wall clock of the holder, which then keeps the lock for longer than its lease."""
    program = """
import sys, time, select, holdfast
with holdfast.lock(sys.argv[1], ttl=float(sys.argv[2]), timeout=20) as hold:
    before = time.time()
    print("held", flush=True)
    while abs(time.time() - before) < 86400:
        select.select([], [], [], 0.01)
    until = time.monotonic() + 2 * float(sys.argv[2])
    while time.monotonic() < until:
        hold.check()
        select.select([], [], [], 0.1)
"""
    servers.installed("faketime", lambda: servers.program("faketime"))
    clock = tmp_path / "clock"
    clock.write_text("+0")
    environment = {**os.environ, **dict.fromkeys(("FAKETIME_DONT_FAKE_MONOTONIC", "FAKETIME_NO_CACHE"), "1")}
    environment["FAKETIME_TIMESTAMP_FILE"] = str(clock)
    command = ["faketime", "-f", "+0", "env", "-u", "FAKETIME", sys.executable, "-c", program]
    other = subprocess.Popen([*command, target.address, str(TTL_S)], env=environment, stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "held\n"
    clock.write_text(jump)
    with pytest.raises(holdfast.Timeout):
        target.lock().acquire(timeout=TTL_S * 1.5)
    assert other.wait(PATIENCE) == 0
    other.communicate()
    target.lock().acquire(timeout=PATIENCE).release()


@pytest.mark.slow
@only("postgresql", "smb")
def test_a_suspended_holder_keeps_its_session(target: Target, holder: Peer) -> None:
    holder.stop()
    with pytest.raises(holdfast.Timeout):
        target.lock().acquire(timeout=15)
    holder.go_on()
    holder.do("hold.check(); hold.release()")
