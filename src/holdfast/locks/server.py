"""What the engines on servers share: the lease of a grant, its renewal, and the wait.

A server keeps a lock for a client as long as it believes that the client lives. A `Lease` stands for that belief: a
session of PostgreSQL, a lease of etcd, the expiry times of Redis, a connection to an SMB server. One thread per server
renews the leases that have grants.

    the server releases the locks     `ttl` seconds after the last renewal that it received
    the holder calls itself lost      `margin` seconds earlier, counted from before that renewal was sent

So the old holder knows before there can be a new one. The clock of a lease also runs while the machine is suspended.
When the deadline of a lease has passed, only the server can tell whether it was lost: it is asked once more, and if it
does not answer, the locks are lost. A lost lock is never acquired again silently.

An engine implements `attempt`, `join`, `release_grant` and `status`. A `Waiter` is one place in the server's queue.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from time import monotonic
from urllib.parse import urlsplit

from .. import metrics, process, wait
from ..errors import ConnectionFailed, HoldfastError, UnsafePath, Unsupported
from ..owner import command_of, hide_passwords
from ..status import Holder, Status
from .base import would_deadlock
from .engine import Engine, Grant, Outcome
from .hold import Hold
from .renewal import Renewer, clock, renewers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from typing import Any
    from urllib.parse import SplitResult

CALL_TIMEOUT_S = 10.0  # for one call to a server, if the caller sets no timeout
STATUS_TIMEOUT_S = 2.0  # short, because a caller whose timeout has passed waits for it, too
_MIN_TIMEOUT_S = 0.5  # for a renewal whose deadline has passed
_RETRY_S = 0.2


def seconds_left(deadline: float | None) -> float:
    """How long a call to the server may take, if the caller waits until `deadline` (monotonic)."""
    return CALL_TIMEOUT_S if deadline is None else max(0.001, min(CALL_TIMEOUT_S, deadline - monotonic()))


def release_timeout(ttl: float) -> float:
    """How long a release may take: not as long as a lease of an hour, and less at the end of the program."""
    return min(ttl, STATUS_TIMEOUT_S if sys.is_finalizing() else CALL_TIMEOUT_S)


class LeaseGone(Exception):
    """The server does not know this lease any more: all its locks are lost."""


class Lease:
    """Keeps locks of this process on a server, as long as it is renewed."""

    def __init__(self, server: str, ttl: float, sent: float) -> None:
        self.server = server
        self.ttl = ttl
        self.margin = min(1.0, ttl / 10)
        self.grants: dict[int, weakref.ref[ServerGrant]] = {}  # by id. Weak: a grant that is dropped is released
        self.waiters: set[object] = set()  # places in queues, which need the lease, too
        self.is_lost = False
        self.registry = process.registry
        self._mutex = threading.RLock()
        self.deadline = self.next_renewal = 0.0
        self.quiet_from = 0.0  # before, another thread uses the socket: `Renewer` does not watch it
        self.answered(sent)

    def answered(self, sent: float) -> None:
        """The server has answered a call that proves to it that this process lives. `sent`: by `clock`."""
        self.deadline = max(self.deadline, sent + self.ttl - self.margin)
        self.next_renewal = sent + self.ttl / 3

    def renew(self, timeout: float) -> Iterable[ServerGrant]:
        """Ask the server to go on. Return the grants that it does not know any more.

        Raises LeaseGone, or the error of a server that does not answer.
        """
        raise NotImplementedError

    def fileno(self) -> int:
        """A socket that becomes readable when the server ends the lease. -1: there is none."""
        return -1

    def look(self) -> None:
        """The socket is readable: find out whether the lease has ended."""

    def add(self, grant: ServerGrant) -> None:
        if grant.good_until:
            sent = grant.good_until - self.ttl + self.margin
            if not self.grants:
                self.answered(sent)
            else:  # its answer may have come late, after the others were renewed
                self.deadline = min(self.deadline, grant.good_until)
                self.next_renewal = min(self.next_renewal, sent + self.ttl / 3)
        self.grants[id(grant)] = weakref.ref(grant)
        if self.is_lost:  # meanwhile
            self._lose([grant])
        self.watch()

    def watch(self) -> None:
        """Let the thread of the server renew this lease, as long as it has grants or waiters."""
        renewer = renewers.get(self.server)
        if renewer is None:
            renewer = renewers.setdefault(self.server, Renewer())
        renewer.watch(self)

    def held(self) -> list[ServerGrant]:
        """The grants that are not released."""
        return [grant for reference in list(self.grants.values()) if (grant := reference()) is not None]

    def is_good(self, grant: ServerGrant) -> bool:
        """Is the lock held? After the deadline the server is asked."""
        if self.fileno() != -1:
            self.look()
        if not grant.is_lost and clock() >= max(self.deadline, grant.good_until):
            self.renew_now()
        return not grant.is_lost

    def renew_now(self) -> None:
        with self._mutex:
            sent = clock()
            if self.is_lost:
                return
            try:
                gone = list(self.renew(max(_MIN_TIMEOUT_S, self.deadline - sent)))
            except LeaseGone:
                self.lose()
            except (HoldfastError, OSError):
                if clock() >= self.deadline:
                    self.lose()
                else:
                    self.next_renewal = min(clock() + _RETRY_S, self.deadline)
            else:
                self.answered(sent)
                self._lose(gone)

    def lose(self) -> None:
        """All locks of this lease are lost."""
        self.is_lost = True
        self._lose(self.held())

    def _lose(self, grants: list[ServerGrant]) -> None:
        for grant in grants:
            self.grants.pop(id(grant), None)
            grant.is_lost = True
            hold = grant.hold() if grant.hold is not None else None
            if hold is not None and grant.on_lost is not None:
                threading.Thread(target=grant.on_lost, args=(hold,), name="holdfast-on-lost", daemon=True).start()


class ServerGrant(Grant):
    """A lock on a server. `id` is what the server knows it by."""

    __slots__ = (
        *("__weakref__", "acquired_at", "good_until", "hold", "id", "is_lost", "is_released"),
        *("key", "lease", "on_lost", "shared", "token", "_engine"),
    )

    def __init__(self, engine: ServerEngine, lease: Lease, id: Any, token: int, sent: float | None = None) -> None:
        """sent: before the acquire was sent, if the server counts a time to live from it for this lock alone."""
        self.is_released = self.is_lost = False
        self._engine = engine
        self.key: Hashable = engine.key
        self.shared = engine.shared
        self.lease = lease
        self.id = id
        self.token: int | None = token
        self.acquired_at = time.time()
        self.good_until = 0.0 if sent is None else sent + lease.ttl - lease.margin
        self.on_lost = engine.on_lost
        self.hold: weakref.ref[Hold] | None = None
        lease.add(self)

    def is_good(self) -> bool:
        return self.lease.is_good(self)

    def release(self) -> bool:
        self.is_released = True
        self.lease.grants.pop(id(self), None)
        if self.is_lost:
            return False
        try:
            return self._engine.release_grant(self)
        except (HoldfastError, OSError):
            if clock() >= max(self.lease.deadline, self.good_until):
                return False  # the lock is gone, and that matters more than the error
            raise

    def drop(self) -> None:
        """Release the lock, as its hold is collected, or the grant itself, which an interrupt has dropped.

        This may be any moment of any thread. So the thread of the server releases it.
        """
        try:
            if self.is_released or self.is_lost or self.lease.registry is not process.current_registry():
                return
            if not sys.is_finalizing():
                renewers[self.lease.server].drop(self)
            elif self.lease.fileno() == -1:  # else the server releases the lock at the end of this process
                self.release()
        except Exception:  # it was never granted, or the interpreter is going down
            return

    __del__ = drop


class ServerHold(Hold):
    """A lock on a server that is held."""

    __slots__ = ()

    def __init__(self, lock: Any, grant: ServerGrant) -> None:
        grant.hold = weakref.ref(self)
        Hold.__init__(self, lock, grant)


class Waiter:
    """A place in the queue of a server. `attempt` and `leave` may block."""

    def attempt(self, timeout: float) -> ServerGrant | None:
        """Return the grant if it is this waiter's turn."""
        raise NotImplementedError

    def step(self, deadline: float | None) -> wait.Step:
        """What to wait for before the next attempt."""
        raise NotImplementedError

    def leave(self) -> None:
        """Leave the queue without the lock. It must not raise."""
        raise NotImplementedError


class ServerEngine(Engine):
    """The lock of one name on one server."""

    blocks = True
    loss = "the server has released it, or has not answered in time"
    loss_remedy = "check the server and the network"

    key: Hashable
    shared: bool
    permits = 0  # 0: not a semaphore
    on_lost: Callable[[Any], object] | None = None
    try_timeout: float | None = None  # how long `try_acquire` waits for an answer. None: `CALL_TIMEOUT_S`

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.metrics = metrics.kind(kind)

    # What an engine implements.

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        """One attempt, which ends within `timeout` seconds. Raises ConnectionFailed."""
        raise NotImplementedError

    def join(self, timeout: float) -> Waiter:
        """Take a place in the queue of the server."""
        raise NotImplementedError

    def release_grant(self, grant: ServerGrant) -> bool:
        """Release the lock if it is still this grant's. False: it was lost before."""
        raise NotImplementedError

    # The port.

    def first_attempt(self, timeout: float | None = None) -> ServerGrant | Outcome:
        if timeout == 0:
            timeout = self.try_timeout
        return self.attempt(CALL_TIMEOUT_S if timeout is None else min(CALL_TIMEOUT_S, timeout))

    def steps(self, found: Outcome, deadline: float | None, *, asynchronous: bool) -> wait.Steps[Any]:
        if deadline == 0.0:  # the caller does not wait
            raise wait.DeadlinePassed
        held = process.registry.holds_of_caller(self.key, asynchronous=asynchronous)
        if reason := self.conflict(held):
            raise would_deadlock(self.name, asynchronous, reason)
        waiter: Any = None
        grant = None
        registry = process.registry
        try:
            waiter = yield from _run(lambda: self.join(seconds_left(deadline)), lambda waiter: waiter.leave())
            while True:
                grant = yield from _run(lambda: waiter.attempt(seconds_left(deadline)), lambda grant: grant.release())
                if grant is not None:
                    return grant
                wait.check_deadline(deadline)
                yield waiter.step(deadline)
        except ConnectionFailed:  # perhaps only because the deadline left no time for a call
            wait.check_deadline(deadline)
            raise
        finally:
            # In a forked child, the place in the queue is its parent's.
            if waiter is not None and grant is None and process.current_registry() is registry:
                _leave(waiter, asynchronous)

    def conflict(self, held: list[Grant]) -> str:
        """The reason why a caller that has these grants would wait for itself. Empty: it would not."""
        if self.permits:
            return "has all the permits" if len(held) >= self.permits else ""
        return "holds the lock" if held and not (self.shared and all(grant.shared for grant in held)) else ""

    # For engines.

    def state(self, holders: tuple[Holder, ...], waiters: tuple[Holder, ...], token: int | None = None) -> Status:
        held = len(holders) >= self.permits if self.permits else bool(holders)
        return Status(self.name, self.metrics.name, held, holders, waiters, permits=self.permits or None, token=token)

    def other_number(self, permits: object) -> Unsupported:
        return Unsupported(
            f"{self.name}: other processes use this semaphore with {permits} permits, and {self.permits} were asked "
            "for. Use the same number everywhere. To change it, stop all users first.",
            path=self.name,
        )


def _run(work: Callable[[], Any], undo: Callable[[Any], object]) -> wait.Steps[Any]:
    step = wait.Run(work, undo)
    registry = process.registry
    try:
        yield step
    except BaseException:  # an interrupt
        if process.current_registry() is registry:  # else a forked child unwinds the wait of its parent
            step.take_back()
        raise
    return step.outcome()


def _leave(waiter: Waiter, asynchronous: bool) -> None:
    if asynchronous and not sys.is_finalizing():
        # A task that is cancelled must not block the event loop.
        threading.Thread(target=waiter.leave, name="holdfast-leave", daemon=True).start()
    else:
        waiter.leave()


def within(timeout: float, work: Callable[[], Any], undo: Callable[[Any], object]) -> Any:
    """Call `work`, which may block for long, in a thread. Raises TimeoutError; a later result is passed to `undo`."""
    if sys.is_finalizing():  # no thread can be started any more
        return work()
    mutex = threading.Lock()
    done = threading.Event()
    results: list[Any] = []
    errors: list[BaseException] = []
    is_late = False

    def call() -> None:
        try:
            result = work()
        except BaseException as error:
            errors.append(error)
        else:
            with mutex:
                results.append(result)
            if is_late:
                undo(result)
        done.set()

    threading.Thread(target=call, name="holdfast-call", daemon=True).start()
    in_time = done.wait(timeout)
    with mutex:
        is_late = not in_time and not results
    if errors:
        raise errors[0]
    if is_late:
        raise TimeoutError
    return results[0]


def client_name() -> str:
    """pid@host of this process, which the servers show as the holder."""
    return f"{os.getpid()}@{socket.gethostname()}"


def holder_of(client: str, shared: bool, since: float | None = None) -> Holder:
    """The process that a server shows as `client_name`."""
    pid, _, host = client.partition("@")
    if not pid.isdigit():
        return Holder(None, shared, since=since)
    if host == socket.gethostname():
        return Holder(int(pid), shared, command_of(int(pid)), since=since)
    return Holder(int(pid), shared, None, host or None, since)


def split_url(url: str) -> SplitResult:
    """The parts of a URL. Raises UnsafePath."""
    name = hide_passwords(url)
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:
            parts.port  # noqa: B018  # a number, or a ValueError
    except ValueError:
        remedy = "Check the host and the port. Write [::1] for an IPv6 address, and %2F for / in a password."
        raise UnsafePath(f"{name}: the URL is not valid. {remedy}", path=name) from None
    if parts.fragment or url.endswith("#"):
        raise UnsafePath(f"{name}: a # ends the URL before the name of the lock does. Write %23 for it.", path=name)
    return parts


def unreachable(name: str, reason: object, remedy: str) -> ConnectionFailed:
    return ConnectionFailed(f"{name}: {reason}. {remedy}", path=name)
