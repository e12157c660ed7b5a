"""Faults of locks on servers that need threads, interrupts, forks or a silent server at a certain moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import servers
from faces import Caller
from support import PATIENCE, in_child, until
from test_conformance import DATABASE, SERVERS, Target, only, target, until_waiters  # noqa: F401

import holdfast
from holdfast import postgres, wait
from holdfast.locks.server import Lease, ServerGrant, clock

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_S = 3.0  # what an end may take after a timeout: the lock asks once more who holds it


@contextmanager
def silent(target: Any) -> Iterator[None]:  # noqa: F811
    """Stop the processes of the server, which keep their connections and do not answer."""
    nodes = target.server.nodes if target.kind == "etcd" else [target.server]
    pids = [pid for node in nodes for pid in (node.process.pid, *servers.descendants(node.process.pid))]
    try:
        _send(pids, signal.SIGSTOP)
        yield
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a process of a connection that has just ended
            os.kill(pid, number)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@only(*SERVERS)
def test_a_child_that_unwinds_the_wait_of_its_parent_does_not_end_it(target: Target) -> None:  # noqa: F811
    hold = target.lock().acquire(timeout=PATIENCE)
    waiting = Caller(begin_to_wait, target.lock()).result()
    until_waiters(target.lock(), 1)
    assert in_child(waiting.close) is None
    time.sleep(0.2)  # a cancelled statement ends a moment later
    assert len(target.lock().status().waiters) == 1
    waiting.close()
    hold.release()


def begin_to_wait(lock: Any) -> Any:
    steps = lock._steps(None, None)
    while isinstance(step := next(steps), wait.Run):
        step.block()
    return steps


@only(*SERVERS)
def test_a_lock_that_was_granted_after_the_timeout_is_given_back(target: Target) -> None:  # noqa: F811
    lock = target.lock()
    lock.acquire(timeout=PATIENCE).release()
    with silent(target), pytest.raises(holdfast.ConnectionFailed):
        lock.acquire(timeout=0.3)
    in_another_process(target)


@only(*SERVERS)
def test_the_timeout_of_one_thread_does_not_depend_on_the_call_of_another(target: Target) -> None:  # noqa: F811
    target.lock().acquire(timeout=PATIENCE).release()

    with silent(target):
        patient = Caller(lambda: target.lock().acquire(timeout=20).release())
        time.sleep(0.2)
        began = time.monotonic()
        with pytest.raises(holdfast.ConnectionFailed):
            target.lock(f"{target.name}-other").acquire(timeout=0.3)
        took = time.monotonic() - began
    patient.result()
    assert took < 2


@only(*SERVERS)
def test_a_wait_for_a_server_that_falls_silent_ends_soon_after_its_deadline(target: Target) -> None:  # noqa: F811
    options = {} if target.kind == "postgresql" else {"ttl": 20}
    hold = target.lock(**options).acquire(timeout=PATIENCE)
    waiting = Caller(target.lock(**options).acquire, timeout=2)
    until_waiters(target.lock(**options), 1)
    began = time.monotonic()
    with silent(target):
        with pytest.raises(holdfast.HoldfastError):
            waiting.result()
        took = time.monotonic() - began
    with suppress(holdfast.LockLost):
        hold.release()
    assert took < 2 + 2 * CALL_S


@only(*SERVERS)
def test_an_interrupted_acquire_leaves_no_lock_and_no_broken_connection(target: Target) -> None:  # noqa: F811
    kept = target.lock(f"{target.name}-kept").acquire(timeout=PATIENCE)  # so that the lease is renewed
    target.lock().acquire(timeout=PATIENCE).release()
    main = threading.get_ident()
    with silent(target):
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            target.lock().acquire(timeout=PATIENCE)
    in_another_process(target)
    target.lock().acquire(timeout=PATIENCE).release()
    kept.release()


def in_another_process(target: Target) -> None:  # noqa: F811
    """Another process can acquire the lock, and this one does not call the server meanwhile."""
    free = "import sys, holdfast; holdfast.lock(sys.argv[1]).acquire(timeout=20).release()"
    subprocess.run([sys.executable, "-c", free, target.address], check=True, timeout=60)


@only(*SERVERS)
def test_the_timeout_includes_the_first_attempt(target: Target) -> None:  # noqa: F811
    options = {} if target.kind == "postgresql" else {"ttl": 20}
    hold = target.lock(**options).acquire(timeout=PATIENCE)
    target.lock(f"{target.name}-other", **options).acquire(timeout=PATIENCE).release()
    with silent(target):
        began = time.monotonic()
        waiting = Caller(target.lock(**options).acquire, timeout=4)
        time.sleep(3)
    with pytest.raises(holdfast.Timeout):
        waiting.result()
    assert time.monotonic() - began < 6
    hold.release()


class CountedLease(Lease):
    """A lease that gets a grant at the moment when the thread that renews it finds none."""

    renewals = 0
    forgets = True

    def renew(self, timeout: float) -> list[ServerGrant]:
        self.renewals += 1
        return []

    @property
    def waiters(self) -> Any:  # type: ignore[override]
        if self.forgets and threading.current_thread().name == "holdfast-renewal":
            self.forgets = False
            self.caller = Caller(self.get_grant)
            self.caller.join(0.2)
        return set()

    @waiters.setter
    def waiters(self, _: object) -> None: ...

    def get_grant(self) -> None:
        self.grants.add(object())  # type: ignore[arg-type]
        self.watch()


def test_a_lease_that_gets_a_grant_while_it_is_forgotten_is_renewed() -> None:
    lease = CountedLease("nowhere", 1.0, clock())
    lease.watch()
    until(lambda: lease.renewals > 1)
    lease.grants.clear()


def test_a_lost_lease_with_waiters_keeps_no_thread_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Lease] = []
    monkeypatch.setattr(Lease, "renew_now", calls.append)
    lease = Lease("nowhere else", 1.0, clock() - 1)
    lease.waiters.add("a waiter")
    lease.is_lost = True
    lease.watch()
    time.sleep(0.2)
    lease.waiters.clear()
    assert len(calls) < 10


@only("postgresql")
def test_a_name_that_is_new_is_learned_within_the_timeout(target: Any) -> None:  # noqa: F811
    target.lock().acquire(timeout=PATIENCE).release()
    with target.server.connect(DATABASE) as other, other.transaction():
        other.execute("lock table holdfast_lock in access exclusive mode")
        began = time.monotonic()
        with pytest.raises(holdfast.ConnectionFailed):
            target.lock(f"{target.name}-new").acquire(timeout=0.5)
        assert time.monotonic() - began < CALL_S
    target.lock(f"{target.name}-new").acquire(timeout=PATIENCE).release()


@only("postgresql")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_closes_no_file_that_has_the_number_of_a_lost_connection(target: Any) -> None:  # noqa: F811
    session = postgres.connect(target.server.url(DATABASE))
    number = session.fileno()
    with target.server.connect("postgres", user="postgres") as admin:
        admin.execute("select pg_terminate_backend(%s)", [session.pid])
    with pytest.raises(psycopg.OperationalError):
        session.connection.execute("select 1")
    read, write = os.pipe()
    os.dup2(read, number)  # libpq has closed the socket
    assert in_child(lambda: os.fstat(number).st_ino) == os.fstat(read).st_ino
    session.close()
    for fd in {read, write, number}:
        os.close(fd)


@only("redis")
def test_a_lock_whose_answer_came_late_is_renewed_in_its_own_time(target: Any) -> None:  # noqa: F811
    """The other locks of the process were renewed meanwhile, but not this one."""
    kept = target.lock(f"{target.name}-kept").acquire(timeout=PATIENCE)
    lease = kept._grant.lease
    lease.renew_now()
    sent = clock() - 0.9 * lease.ttl
    late = ServerGrant(kept._grant._engine, lease, "x:0:1@nowhere", 1, sent)  # Redis has deleted it
    assert lease.next_renewal <= clock()
    until(lambda: late.is_lost, seconds=1)
    kept.check()
    kept.release()


def test_a_password_with_a_slash_is_not_shown() -> None:
    with pytest.raises(holdfast.UnsafePath) as raised:
        holdfast.lock("etcd://user:secret/word@127.0.0.1:1/name").acquire(timeout=1)
    assert "secret" not in "".join(traceback.format_exception(raised.value)).replace("secret/word@127", "")
