"""Locks on Redis and Valkey: for efficiency, not for correctness.

A lock is kept in memory by one server. A server that restarts without its data, or a replica that takes over before it
has all writes, grants the lock again while it is held. The holder learns of the loss at its next renewal, which may be
too late. If that matters, let the resource refuse an old `token` (`holdfast.fence`), or use PostgreSQL or etcd.

Keys, of which all have the name in braces, so that a cluster keeps them on one server:

    holdfast:{name}:holders   a sorted set: the id of each holder, and when it expires
    holdfast:{name}:queue     a sorted set: the id of each waiter, by its number
    holdfast:{name}:waiters   a sorted set: the id of each waiter, and when it expires
    holdfast:{name}:token     the last token. It is at least the server's clock in microseconds, so that tokens grow
                              even if a restart has lost it
    holdfast:{name}:numbers   the number of the next waiter

An id is `<kind>:<random>:<pid>@<host>`. The kind is "x" (exclusive), "s" (shared) or the number of permits. All times
are those of the server. Every operation is one script, which Redis runs alone.

Waiters are served in order. The script of a release grants the lock to the waiters whose turn it is, and publishes
their tokens and ids on the channel `holdfast:{name}:turn`. Such a grant lasts as long as the place in the queue would
have lasted. So the waiter knows until when it holds the lock without asking: the time to live, counted from before it
last renewed its place. Each process that waits has one connection that listens. A waiter also looks again when the
lease of a holder in front of it may have expired, and renews its own place.

Every script that changes a lock asks how many programs listen to the channel `holdfast:changes`, on which a console
waits. If there are any, it publishes an empty message there.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from .. import process, system, wait
from ..errors import ConnectionFailed, HoldfastError, UnsafePath, Unsupported
from ..files import OwnedFd, pipe
from ..owner import hide_passwords
from .engine import BUSY, Outcome
from .redis_scripts import ACQUIRE, CHANGES, KEYS, RELEASE, RENEW, STATUS, Script
from .renewal import clock
from .server import (
    STATUS_TIMEOUT_S,
    Lease,
    ServerEngine,
    ServerGrant,
    Waiter,
    client_name,
    holder_of,
    release_timeout,
    split_url,
    unreachable,
    within,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..status import Holder, Status

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.retry import Retry
except ImportError:
    redis = None  # type: ignore[assignment]

DEFAULT_TTL_S = 10.0
_MAX_PIPELINE = 500
_MAX_CHANNELS = 100
_MAX_TRIES = 3  # of a connection that the server closes at once
_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
_DEFAULT_REMEDY = "Check the URL, and that the server runs and can be reached."
_TLS_REMEDY = (
    "Check the URL, that the server can be reached, and the certificates (ssl_ca_certs, ssl_certfile, ssl_keyfile)."
)
_REMEDIES = {
    "invalid username-password": "Check the user name and the password.",
    "authentication": "Check the user name and the password.",
    "maxmemory": "The server is out of memory. Raise maxmemory, or delete something.",
    "max number of clients": "Close other connections, or raise maxclients on the server.",
    "too many open files": "Raise the limit of open files of this process (ulimit -n).",
    "read only": "Connect to the primary server.",
    "wrongtype": "Another program has a key of this name. Delete it, or choose another name for the lock.",
    "loading": "Try again when the server has started.",
}


class Listener:
    """The connection on which Redis publishes the waiters that got the lock, and the thread that reads it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.is_broken = False
        self._mutex = threading.Lock()
        self._confirmed: dict[str, threading.Event] = {}  # by channel
        self._pipes: dict[str, tuple[str, OwnedFd]] = {}  # of the waiters, and their channels, by id
        self._tokens: dict[str, int] = {}  # of the waiters that a release has granted the lock
        threading.Thread(target=self._run, name="holdfast-redis", daemon=True).start()

    def add(self, channel: str, id: str, pipe: OwnedFd, timeout: float) -> None:
        """Write a byte into the pipe when it is the turn of this id. `listen` looks whether the connection was lost."""
        with self._mutex:
            if self.is_broken:  # its thread has ended, and would confirm nothing
                return
            self._pipes[id] = channel, pipe
            confirmed = self._confirmed.get(channel)
            if confirmed is None:
                if len(self._confirmed) >= _MAX_CHANNELS:
                    self._unsubscribe()
                confirmed = self._confirmed[channel] = threading.Event()
                self.connection.send_command("SUBSCRIBE", channel)
        if not confirmed.wait(timeout):
            self.remove(id)
            raise redis.TimeoutError("the server did not confirm a subscription")

    def _unsubscribe(self) -> None:
        """Leave the channels that no waiter needs."""
        idle = self._confirmed.keys() - {channel for channel, _ in self._pipes.values()}
        if idle:
            self.connection.send_command("UNSUBSCRIBE", *idle)
        for channel in idle:
            del self._confirmed[channel]

    def remove(self, id: str) -> None:
        with self._mutex:
            self._pipes.pop(id, None)
            self._tokens.pop(id, None)

    def remove_at_once(self, id: str) -> None:
        """The server must not publish for it any more."""
        self.remove(id)
        with self._mutex, suppress(RedisError, OSError):
            self._unsubscribe()

    def take_token(self, id: str) -> int | None:
        """The token of a waiter, if a release has granted it the lock."""
        return self._tokens.pop(id, None)

    def _run(self) -> None:
        try:
            while True:
                if self.connection.can_read(timeout=60.0):
                    kind, channel, id = self.connection.read_response(disable_decoding=True)[:3]
                    if kind == b"subscribe" and (event := self._confirmed.get(channel.decode())) is not None:
                        event.set()
                    elif channel.decode() == CHANGES and kind == b"message":
                        self._wake_all(CHANGES)
                    elif kind == b"message":
                        token, _, id = id.decode().partition(" ")
                        self._wake(id, int(token))
        except (RedisError, OSError, ValueError, AttributeError):  # the connection was lost or closed
            with self._mutex:
                self.is_broken = True
                waiting = list(self._confirmed.values())
            for confirmed in waiting:
                confirmed.set()  # the waiter then finds out
            self._wake_all()

    def _wake_all(self, *channels: str) -> None:
        for id, (channel, _) in list(self._pipes.items()):
            if not channels or channel in channels:
                self._wake(id)

    def _wake(self, id: str, token: int | None = None) -> None:
        with self._mutex:
            if (found := self._pipes.get(id)) is not None:
                if token is not None:
                    self._tokens[id] = token
                with suppress(OSError):
                    system.write(found[1].fd, b"!")


class RedisServer:
    """The connections of this process to one server."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        try:
            pool = redis.ConnectionPool.from_url(
                url, protocol=2, retry=Retry(NoBackoff(), 0), client_name=f"holdfast-{client_name()}"
            )
            # Not pool.make_connection: redis-py 8 makes 100 of them at most, and counts also those that were closed.
            self._new_connection: Callable[[], Any] = partial(pool.connection_class, **pool.connection_kwargs)
            self._new_connection()
        except (TypeError, ValueError) as error:
            raise UnsafePath(
                f"{name}: redis-py refuses a parameter of the URL: {error}. After the ?, use its parameters, such as "
                "ssl_ca_certs. For TLS, begin with rediss://",
                path=name,
            ) from None
        self._idle: list[Any] = []
        self._mutex = threading.Lock()
        self._listener: Listener | None = None

    def run(self, script: Script, engine: RedisEngine, *arguments: object, timeout: float) -> Any:
        (answer,) = self.run_all(script, [(engine, arguments)], timeout)
        return answer

    def run_all(self, script: Script, calls: list[tuple[RedisEngine, tuple[object, ...]]], timeout: float) -> list[Any]:
        """Run a script several times, in one round trip."""
        until = monotonic() + timeout
        connection = self._connect(timeout)
        commands = [("EVALSHA", script.sha, len(KEYS), *engine.keys, engine.channel, *given) for engine, given in calls]
        try:
            answers = _ask(connection, commands, until)
            if any(isinstance(answer, redis.exceptions.NoScriptError) for answer in answers):
                _ask(connection, [("SCRIPT", "LOAD", script.text)], until)  # the server has not seen it since its start
                answers = _ask(connection, commands, until)
            for answer in answers:
                if isinstance(answer, RedisError):
                    raise answer
        except RedisError as error:
            connection.disconnect()
            failed = failure(self.name, error)
        except BaseException:
            connection.disconnect()
            raise
        else:
            self._idle.append(connection)
            return answers
        raise failed  # here, so that no traceback contains the error of redis-py, which may show the password

    def _connect(self, timeout: float) -> Any:
        while self._idle:
            with suppress(RedisError, IndexError):  # the server has closed it, or another thread was faster
                idle = self._idle.pop()
                if not idle.can_read(timeout=0):
                    return idle
                idle.disconnect()
        connection = self._new_connection()
        connection.socket_connect_timeout = connection.socket_timeout = timeout
        try:
            within(timeout, connection.connect, lambda _: connection.disconnect())
        except TimeoutError:
            failed = failure(self.name, redis.TimeoutError("no answer in time"))
        except (RedisError, UnicodeError) as error:  # the latter: not the name of a host
            failed = failure(self.name, error)
        else:
            return connection
        raise failed

    def listen(self, channel: str, id: str, pipe: OwnedFd, timeout: float) -> Listener:
        until = monotonic() + timeout
        for _ in range(_MAX_TRIES):
            listener = self._open_listener(wait.time_left(until))
            try:
                listener.add(channel, id, pipe, wait.time_left(until))
            except redis.TimeoutError as error:
                failed = failure(self.name, error)
                break
            except RedisError as error:
                listener.is_broken = True
                failed = failure(self.name, error)
            else:
                if not listener.is_broken:
                    return listener
                failed = failure(self.name, redis.ConnectionError("the connection was lost"))
        raise failed

    def _open_listener(self, timeout: float) -> Listener:
        if not self._mutex.acquire(timeout=timeout):
            raise failure(self.name, redis.TimeoutError("no answer in time"))
        try:
            if self._listener is None or self._listener.is_broken:
                self._listener = Listener(self._connect(timeout))
            return self._listener
        finally:
            self._mutex.release()


def _ask(connection: Any, commands: list[tuple[object, ...]], until: float) -> list[Any]:
    """Send commands together. Return their answers, and the errors of those that failed."""
    connection.send_packed_command(connection.pack_commands(commands))
    answers: list[Any] = []
    for _ in commands:
        if not connection.can_read(timeout=max(0.0, until - monotonic())):
            raise redis.TimeoutError("no answer in time")
        try:
            answers.append(connection.read_response())
        except redis.ResponseError as error:
            answers.append(error)
    return answers


_servers: dict[str, RedisServer] = {}
_leases: dict[tuple[str, float], RedisLease] = {}
process.after_fork_in_child(_servers.clear)
process.after_fork_in_child(_leases.clear)


def failure(name: str, error: Exception) -> ConnectionFailed:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    default = _TLS_REMEDY if name.startswith(("rediss:", "valkeys:")) else _DEFAULT_REMEDY
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words.lower() in text.lower()), default)
    return unreachable(name, text, remedy)


class RedisLease(Lease):
    """The locks of this process on one server that have the same time to live."""

    def __init__(self, server: RedisServer, ttl: float) -> None:
        super().__init__(server.name, ttl, clock())
        self._server = server

    def renew(self, timeout: float) -> list[ServerGrant]:
        grants = self.held()
        gone = []
        for at in range(0, len(grants), _MAX_PIPELINE):
            some = grants[at : at + _MAX_PIPELINE]
            calls: list[Any] = [(grant._engine, (grant.id, int(self.ttl * 1000))) for grant in some]
            answers = self._server.run_all(RENEW, calls, timeout)
            gone += [grant for grant, known in zip(some, answers, strict=True) if not known]
        return gone


class RedisEngine(ServerEngine):
    """The lock, or semaphore, of one name on one server."""

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        if redis is None:
            raise Unsupported("Redis needs redis-py, which is not installed. Run: pip install 'holdfast[redis]'")
        super().__init__(hide_passwords(url), "redis")
        parts = split_url(url)
        database, _, name = parts.path.lstrip("/").partition("/")
        name = unquote(name)
        if not parts.hostname or not database.isdecimal() or not database.isascii() or not name or "\0" in name:
            raise UnsafePath(
                f"{self.name}: the URL names no lock. After the host, give the number of the database and the name of "
                "the lock: redis://host:6379/0/name",
                path=self.name,
            )
        scheme = _SCHEMES.get(parts.scheme, parts.scheme)
        self.url = urlunsplit((scheme, parts.netloc, f"/{database}", parts.query, ""))
        self.shared = shared or permits > 0
        self.permits = permits
        self.kind = str(permits) if permits else "s" if shared else "x"
        self.ttl = DEFAULT_TTL_S if ttl is None else float(ttl)
        self.key = ("redis", self.url, name)
        self.keys = [f"holdfast:{{{name}}}:{key}" for key in KEYS]
        self.channel = f"holdfast:{{{name}}}:turn"

    @property
    def server(self) -> RedisServer:
        return _servers.get(self.url) or _servers.setdefault(self.url, RedisServer(self.url, _address(self.name)))

    def lease(self) -> RedisLease:
        """The lease for a new grant."""
        found = _leases.get((self.url, self.ttl))
        if found is None or found.is_lost:
            found = _leases[self.url, self.ttl] = RedisLease(self.server, self.ttl)
        return found

    def new_id(self) -> str:
        return f"{self.kind}:{os.urandom(8).hex()}:{client_name()}"

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        return self.take(self.new_id(), timeout, waits=False)[0] or BUSY

    def take(self, id: str, timeout: float, *, waits: bool) -> tuple[ServerGrant | None, float]:
        """Return the grant, and else the seconds until a lease in front of the caller may expire."""
        sent = clock()
        taken, value = self.server.run(ACQUIRE, self, id, int(self.ttl * 1000), int(waits), timeout=timeout)
        if taken < 0:
            raise self.other_number(int(value))
        if not taken:
            return None, int(value) / 1000
        return ServerGrant(self, self.lease(), id, int(value), sent), 0.0

    def release_grant(self, grant: ServerGrant) -> bool:
        return bool(self.server.run(RELEASE, self, grant.id, timeout=release_timeout(self.ttl)))

    def join(self, timeout: float) -> Waiter:
        return _RedisWaiter(self, timeout)

    def status(self) -> Status:
        found = self.server.run(STATUS, self, timeout=STATUS_TIMEOUT_S)
        holders, waiters = (tuple(_holder(id) for id in some) for some in found)
        return self.state(holders, waiters)


class _RedisWaiter(Waiter):
    def __init__(self, engine: RedisEngine, timeout: float) -> None:
        self._engine = engine
        self._id = engine.new_id()
        self._woken, self._wake = pipe()
        self._until = 0.0
        self._sent = 0.0  # before it last renewed its place (`clock`)
        self._listener = engine.server.listen(engine.channel, self._id, self._wake, timeout)

    def attempt(self, timeout: float) -> ServerGrant | None:
        engine = self._engine
        if wait.poll([self._woken.fd], 0):
            system.read(self._woken.fd, 4096)
        lease, token = engine.lease(), self._listener.take_token(self._id)
        if token is not None and clock() < self._sent + engine.ttl - lease.margin:  # else it may have expired
            self._listener.remove(self._id)
            return ServerGrant(engine, lease, self._id, token, self._sent)
        if self._listener.is_broken:
            self._listener = engine.server.listen(engine.channel, self._id, self._wake, timeout)
        self._sent = clock()
        grant, soonest = engine.take(self._id, timeout, waits=True)
        if grant is None:
            # Its own place in the queue has to be renewed, too.
            self._until = monotonic() + min(soonest, engine.ttl / 3)
        else:
            self._listener.remove(self._id)
        return grant

    def step(self, deadline: float | None) -> wait.Step:
        return wait.Readable(self._woken.fd, wait.sooner(self._until, deadline))

    def leave(self) -> None:
        self._listener.remove(self._id)
        with suppress(HoldfastError, OSError):
            # Not longer: the timeout of the caller has passed. Redis forgets the place when its time is over.
            self._engine.server.run(RELEASE, self._engine, self._id, timeout=STATUS_TIMEOUT_S)


def _holder(id: bytes) -> Holder:
    kind, _, client = id.decode().split(":", 2)
    return holder_of(client, kind != "x")


def _address(name: str) -> str:
    """The URL of the server, without the lock."""
    parts = urlsplit(name)
    return f"{parts.scheme}://{parts.netloc}"
