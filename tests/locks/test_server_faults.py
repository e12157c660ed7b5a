"""Faults of locks on servers that need threads, interrupts, forks or a silent server at a certain moment."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
import pytest
import servers
from faces import Caller
from support import PATIENCE, Waited, in_child, state_of, until
from test_conformance import DATABASE, QUEUES, SERVERS, Target, only, target, until_waiters  # noqa: F401

import holdfast
from holdfast import postgres, wait
from holdfast.locks import listing
from holdfast.locks.redis import Listener, RedisEngine, _RedisWaiter
from holdfast.locks.renewal import Renewer, clock, renewers
from holdfast.locks.server import Lease, ServerGrant

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 300.0  # longer than any test: a call that waits as long as this, and not for its own timeout, is a failure


WITH_QUEUE = [name for name in SERVERS if name in QUEUES]  # test_smb has the same for SMB


@contextmanager
def silent(target: Any) -> Iterator[None]:  # noqa: F811
    """Stop the processes of the server, which keep their connections and do not answer."""
    nodes = target.server.nodes if target.kind == "etcd" else [target.server]
    pids = [pid for node in nodes for pid in (node.process.pid, *servers.descendants(node.process.pid))]
    try:
        _send(pids, signal.SIGSTOP)
        until(lambda: all(state_of(pid) in ("T", "Z", "") for pid in pids))
        yield
    finally:
        _send(pids, signal.SIGCONT)


@pytest.fixture
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a server waits long, unless the caller sets a timeout. The questions after a timeout are short."""
    for module in ("server", "postgres", "postgres_sessions"):
        for name in ("CALL_TIMEOUT_S", "TTL_S"):
            monkeypatch.setattr(f"holdfast.locks.{module}.{name}", LONG_S, raising=False)
    for module in ("postgres", "etcd", "redis"):
        monkeypatch.setattr(f"holdfast.locks.{module}.STATUS_TIMEOUT_S", 0.2)


def until_asked(target: Any) -> None:  # noqa: F811
    """Until a silent server has a request that it has not read."""
    nodes = target.server.nodes if target.kind == "etcd" else [target.server]
    ports = {f"{node.port:04X}" for node in nodes}

    def has_unread() -> bool:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(line[1].partition(":")[2] in ports and int(line[4].partition(":")[2], 16) for line in lines)

    until(has_unread)


def long_ttl(target: Target) -> dict[str, float]:  # noqa: F811
    return {} if target.kind == "postgresql" else {"ttl": LONG_S}


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a process of a connection that has just ended
            os.kill(pid, number)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@only(*WITH_QUEUE)
def test_a_child_that_unwinds_the_wait_of_its_parent_does_not_end_it(target: Target) -> None:  # noqa: F811
    hold = target.lock().acquire(timeout=PATIENCE)
    waiting = Caller(begin_to_wait, target.lock()).result()
    until_waiters(target.lock(), 1)
    behind = Caller(target.lock().acquire, timeout=3 * PATIENCE)
    until_waiters(target.lock(), 2)
    assert in_child(waiting.close) is None
    hold.release()
    wait.drive(waiting).release()  # it is still in front of the other one
    behind.result().release()


def begin_to_wait(lock: Any) -> Any:
    steps = lock._steps(None, PATIENCE)
    while isinstance(step := next(steps), wait.Run):
        step.block()
    return steps


@only(*WITH_QUEUE)
def test_a_lock_that_was_granted_after_the_timeout_is_given_back(target: Target) -> None:  # noqa: F811
    lock = target.lock()
    lock.acquire(timeout=PATIENCE).release()
    with silent(target), pytest.raises(holdfast.ConnectionFailed):
        lock.acquire(timeout=0.3)
    in_another_process(target)


@pytest.mark.usefixtures("patient_calls")
@only(*WITH_QUEUE)
def test_the_timeout_of_one_thread_does_not_depend_on_the_call_of_another(target: Target) -> None:  # noqa: F811
    target.lock().acquire(timeout=PATIENCE).release()
    with silent(target):
        patient = Caller(lambda: target.lock().acquire(timeout=LONG_S).release())
        until_asked(target)
        other = target.lock(f"{target.name}-other")
        with pytest.raises(holdfast.ConnectionFailed):
            Caller(other.acquire, timeout=0.3).result()
        assert patient.is_alive()
    patient.result()


@pytest.mark.usefixtures("patient_calls")
@only(*WITH_QUEUE)
def test_a_try_is_given_up_within_the_timeout_of_the_lock(target: Target) -> None:  # noqa: F811
    target.lock().acquire(timeout=PATIENCE).release()
    lock = target.lock(timeout=0.3)
    with silent(target):
        for ask in (lock.try_acquire, lambda: lock.acquire(timeout=0), lambda: anyio.run(lock.atry_acquire)):
            with pytest.raises(holdfast.ConnectionFailed):
                Caller(ask).result()
    in_another_process(target)


@pytest.mark.slow
@pytest.mark.usefixtures("patient_calls")
@only(*WITH_QUEUE)
def test_a_wait_for_a_server_that_falls_silent_ends_soon_after_its_deadline(target: Target) -> None:  # noqa: F811
    hold = target.lock(**long_ttl(target)).acquire(timeout=PATIENCE)
    waiting = Caller(target.lock(**long_ttl(target)).acquire, timeout=2)
    until_waiters(target.lock(), 1)
    with silent(target), pytest.raises(holdfast.HoldfastError):
        waiting.result()
    with suppress(holdfast.LockLost):
        hold.release()


@only(*WITH_QUEUE)
def test_an_interrupted_acquire_leaves_no_lock_and_no_broken_connection(target: Target) -> None:  # noqa: F811
    kept = target.lock(f"{target.name}-kept").acquire(timeout=PATIENCE)  # so that the lease is renewed
    target.lock().acquire(timeout=PATIENCE).release()
    main = threading.get_ident()

    def interrupt() -> None:
        until_asked(target)
        signal.pthread_kill(main, signal.SIGINT)

    with silent(target):
        interrupter = Caller(interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.lock().acquire(timeout=PATIENCE)
        interrupter.result()
    in_another_process(target)
    target.lock().acquire(timeout=PATIENCE).release()
    kept.release()


def in_another_process(target: Target) -> None:  # noqa: F811
    """Another process can acquire the lock, and this one does not call the server meanwhile."""
    free = "import sys, holdfast; holdfast.lock(sys.argv[1]).acquire(timeout=20).release()"
    subprocess.run([sys.executable, "-c", free, target.address], check=True, timeout=60)


@pytest.mark.usefixtures("patient_calls")
@only(*WITH_QUEUE)
def test_the_timeout_includes_the_first_attempt(target: Target, waits: list[Waited]) -> None:  # noqa: F811
    hold = target.lock(**long_ttl(target)).acquire(timeout=PATIENCE)
    with silent(target):
        waiting = Caller(target.lock(**long_ttl(target)).acquire, timeout=PATIENCE)
        until_asked(target)
        asked = time.monotonic()
    until(lambda: waits)
    hold.release()
    waiting.result().release()
    deadlines = [found.until for found in waits if found.until is not None]
    assert deadlines and max(deadlines) <= asked + PATIENCE


@only("redis", "etcd")
def test_a_release_does_not_wait_for_a_silent_server_as_long_as_a_long_lease(
    target: Target,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.locks.server.CALL_TIMEOUT_S", 0.3)
    hold = target.lock(ttl=LONG_S).acquire(timeout=PATIENCE)
    with silent(target), pytest.raises(holdfast.ConnectionFailed):
        Caller(hold.release).result()


@only("redis", "etcd")
def test_a_release_after_the_deadline_says_that_the_lock_is_lost_and_not_that_the_server_is_away(
    target: Target,  # noqa: F811
) -> None:
    hold = target.lock(ttl=1).acquire(timeout=PATIENCE)
    with silent(target):
        until(lambda: clock() >= max(hold._grant.lease.deadline, hold._grant.good_until))
        with pytest.raises(holdfast.LockLost):
            hold.release()


@only("redis", "etcd")
def test_a_lock_is_lost_by_a_suspend_that_was_longer_than_its_lease(
    target: Target,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of a suspended machine goes on, and `time.monotonic` does not. The server does not answer."""
    hold = target.lock(ttl=LONG_S).acquire(timeout=PATIENCE)
    read = time.clock_gettime
    with silent(target):
        assert not hold.lost
        monkeypatch.setattr(time, "clock_gettime", lambda id: read(id) + (id == time.CLOCK_BOOTTIME) * LONG_S)
        assert hold.lost
        monkeypatch.undo()
        with pytest.raises(holdfast.LockLost):
            hold.release()


# Grants that are dropped.


@pytest.mark.usefixtures("patient_calls")
@only(*WITH_QUEUE)
def test_a_finalizer_does_not_call_the_server(target: Target) -> None:  # noqa: F811
    """Garbage is collected in any thread, at any time. So another thread releases the lock."""
    holds = [target.lock(**long_ttl(target)).acquire(timeout=PATIENCE)]
    with silent(target), pytest.warns(ResourceWarning, match="never released"):
        Caller(holds.clear).result()
    in_another_process(target)


@only(*SERVERS)
def test_a_grant_that_an_interrupt_drops_is_released(target: Target) -> None:  # noqa: F811
    """Before there is a hold. The other lock keeps the lease or session of this process alive."""
    kept = target.lock(f"{target.name}-kept").acquire(timeout=PATIENCE)
    cycle: list[Any] = [target.lock()._engine.first_attempt()]
    cycle.append(cycle)
    assert target.lock().try_acquire() is None
    del cycle
    gc.collect()
    in_another_process(target)
    assert target.lock()._engine.first_attempt()  # and the reference to it is gone at once
    in_another_process(target)
    kept.check()
    kept.release()


@only("etcd")
def test_a_place_in_the_queue_that_an_interrupt_drops_is_left(target: Target) -> None:  # noqa: F811
    kept = target.lock(f"{target.name}-kept").acquire(timeout=PATIENCE)
    engine = target.lock()._engine
    place = engine.add(PATIENCE)
    assert target.lock().try_acquire() is None
    del place
    in_another_process(target)
    kept.release()
    program = "import sys, holdfast; holdfast.lock(sys.argv[1], ttl=300)._engine.add(20)"  # and the program ends
    subprocess.run([sys.executable, "-c", program, target.address], check=True, timeout=60)
    in_another_process(target)


@only(*SERVERS)
def test_a_program_that_ends_with_a_hold_leaves_no_lock(target: Target) -> None:  # noqa: F811
    program = "import sys, holdfast; hold = holdfast.lock(sys.argv[1], **eval(sys.argv[2])).acquire(timeout=20)"
    options = {} if target.kind in ("postgresql", "smb") else {"ttl": LONG_S}
    command = [sys.executable, "-W", "default", "-c", program, target.address, repr(options)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert done.stderr == ""
    in_another_process(target)


@only(*SERVERS)
def test_a_child_that_ends_with_the_hold_of_its_parent_does_not_release_it(target: Target) -> None:  # noqa: F811
    """The child drops one hold, and has the other until its interpreter ends. It writes into none of its files."""
    program = """
import os, sys, warnings, holdfast
warnings.simplefilter("ignore")
hold = holdfast.lock(sys.argv[1], **eval(sys.argv[2])).acquire(timeout=20)
dropped = holdfast.lock(sys.argv[1] + "-dropped", **eval(sys.argv[2])).acquire(timeout=20)
child = os.fork()
if not child:
    opened = [os.memfd_create("empty") for _ in range(100)]  # they get the numbers of what the child does not have
    del dropped
    assert not [fd for fd in opened if os.fstat(fd).st_size]
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
dropped.release()
hold.release()
"""
    options = {} if target.kind in ("postgresql", "smb") else {"ttl": LONG_S}
    command = [sys.executable, "-c", program, target.address, repr(options)]
    subprocess.run(command, check=True, timeout=60)


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
            until(lambda: not self.caller.is_alive() or self.is_in_watch())
        return set()

    @waiters.setter
    def waiters(self, _: object) -> None: ...

    def get_grant(self) -> None:
        self.grants[0] = weakref.ref(self)  # type: ignore[arg-type]
        self.watch()

    def is_in_watch(self) -> bool:
        """Has the thread that gets the grant come as far as the mutex?"""
        frame: Any = sys._current_frames().get(self.caller.ident or 0)
        return frame is not None and frame.f_code is Renewer.watch.__code__


def test_a_lease_that_gets_a_grant_while_it_is_forgotten_is_renewed() -> None:
    lease = CountedLease("nowhere", 1.0, clock())
    lease.watch()
    until(lambda: lease.renewals > 1)
    lease.grants.clear()


@pytest.mark.usefixtures("patient_calls")
@only("postgresql")
def test_the_end_of_a_session_that_was_idle_before_the_lock_is_noticed(
    target: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An acquire on an idle session does not wake the thread that watches the sockets."""
    monkeypatch.setattr("holdfast.locks.renewal._IDLE_S", LONG_S)
    lost = threading.Event()
    lock = holdfast.lock(target.address, on_lost=lambda _: lost.set())
    for _ in range(3):
        lock.acquire(timeout=PATIENCE).release()
    hold: Any = lock.acquire(timeout=PATIENCE)
    session = hold._grant.lease.session
    with target.server.connect("postgres", user="postgres") as admin:
        admin.execute("select pg_terminate_backend(%s)", [session.pid])
    assert lost.wait(PATIENCE)
    until(lambda: not session._socket.is_open)
    with pytest.raises(holdfast.LockLost):
        hold.release()


@only("postgresql")
def test_answers_do_not_wake_the_thread_that_watches_for_a_loss(
    target: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would compete with the thread that waits for them, and acquire and release would take three times as long."""
    looks: list[Renewer] = []
    in_use = Renewer._in_use
    monkeypatch.setattr(Renewer, "_in_use", lambda self: looks.append(self) or in_use(self))
    monkeypatch.setattr("holdfast.locks.postgres_sessions._QUIET_S", LONG_S)
    with target.lock(f"{target.name}-kept", timeout=PATIENCE):
        for _ in range(300):
            target.lock().acquire(timeout=PATIENCE).release()
    assert len(looks) < 100  # some, because the thread also renews


def test_a_lease_is_renewed_although_a_thread_could_not_be_started_before(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = CountedLease("nowhere at all", 1.0, clock())
    lease.forgets = False
    lease.grants[0] = weakref.ref(lease)  # type: ignore[arg-type]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            lease.watch()
    lease.watch()
    until(lambda: lease.renewals > 0)
    lease.grants.clear()


def test_a_lost_lease_with_waiters_keeps_no_thread_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Lease] = []
    monkeypatch.setattr(Lease, "renew_now", calls.append)
    lease = Lease("nowhere else", 1.0, clock() - 1)
    lease.waiters.add("a waiter")
    lease.is_lost = True
    lease.watch()
    until(lambda: lease not in renewers["nowhere else"]._leases)
    lease.waiters.clear()
    assert not calls


@pytest.mark.usefixtures("patient_calls")
@only("postgresql")
def test_a_name_that_is_new_is_learned_within_the_timeout(target: Any) -> None:  # noqa: F811
    target.lock().acquire(timeout=PATIENCE).release()
    with target.server.connect(DATABASE) as other, other.transaction():
        other.execute("lock table holdfast_lock in access exclusive mode")
        with pytest.raises(holdfast.ConnectionFailed):
            Caller(target.lock(f"{target.name}-new").acquire, timeout=0.5).result()
    target.lock(f"{target.name}-new").acquire(timeout=PATIENCE).release()


@only("postgresql")
def test_a_lock_of_a_transaction_does_not_change_the_permits_of_a_semaphore_in_use(target: Any) -> None:  # noqa: F811
    semaphore = holdfast.semaphore(target.address, 2)
    with semaphore.acquire(timeout=PATIENCE), target.server.connect(DATABASE) as other, other.transaction():
        with pytest.raises(holdfast.Unsupported, match="semaphore with 2 permits"):
            holdfast.lock(target.address, connection=other).try_acquire()
        semaphore.acquire(timeout=PATIENCE).release()


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
def test_a_program_may_connect_any_number_of_times(target: Target) -> None:  # noqa: F811
    """The pool of redis-py 8 makes 100 connections in the life of a process."""
    with target.lock():
        for _ in range(60):
            (found,) = listing.locks_on(target.url(target.name))
            assert found.held


@only("redis")
@pytest.mark.parametrize("query", ["tls=1", "socket_timeout=soon"])
def test_a_parameter_that_the_client_does_not_have_is_named(target: Target, query: str) -> None:  # noqa: F811
    with pytest.raises(holdfast.UnsafePath, match=query.partition("=")[0]):
        holdfast.lock(f"{target.url(target.name)}?{query}").acquire()


@only("redis")
def test_a_lock_whose_answer_came_late_is_renewed_in_its_own_time(target: Any) -> None:  # noqa: F811
    """The other locks of the process were renewed meanwhile, but not this one."""
    kept = target.lock(f"{target.name}-kept").acquire(timeout=PATIENCE)
    lease = kept._grant.lease
    lease.renew_now()
    sent = clock() - 0.9 * lease.ttl
    with lease._mutex:  # the thread that renews waits
        late = ServerGrant(kept._grant._engine, lease, "x:0:1@nowhere", 1, sent)  # Redis has deleted it
        assert lease.next_renewal <= clock()
    until(lambda: late.is_lost)
    kept.check()
    kept.release()


@only("redis")
@pytest.mark.parametrize("fault", ["", "the message is lost", "the place may have expired"])
def test_a_release_grants_the_lock_to_the_next_waiter(
    target: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """It does not ask again, unless it has to."""
    asked: list[int] = []
    take = RedisEngine.take

    def counted(self: RedisEngine, id: str, timeout: float, *, waits: bool) -> Any:
        asked.append(waits)
        return take(self, id, timeout, waits=waits)

    monkeypatch.setattr(RedisEngine, "take", counted)
    attempt = _RedisWaiter.attempt

    def attempt_late(self: _RedisWaiter, timeout: float) -> Any:
        self._sent -= LONG_S
        return attempt(self, timeout)

    if fault == "the message is lost":
        monkeypatch.setattr(Listener, "take_token", lambda *_: None)
    elif fault:
        monkeypatch.setattr(_RedisWaiter, "attempt", attempt_late)
    lock = target.lock(ttl=LONG_S)
    first = lock.acquire(timeout=PATIENCE)
    waiting = Caller(lock.acquire, timeout=PATIENCE)
    until_waiters(lock, 1)
    first.release()
    with waiting.result() as hold:
        assert hold.token > first.token
        assert len(target.lock().status().holders) == 1
        hold.check()
    assert asked.count(True) == (2 if fault else 1)
    in_another_process(target)


def test_a_password_with_a_slash_is_not_shown() -> None:
    with pytest.raises(holdfast.UnsafePath) as raised:
        holdfast.lock("etcd://user:secret/word@127.0.0.1:1/name").acquire(timeout=1)
    assert "secret" not in "".join(traceback.format_exception(raised.value)).replace("secret/word@127", "")
