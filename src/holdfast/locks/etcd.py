"""Locks on etcd: keys with a lease, through the JSON gateway of every etcd server.

    holdfast/<name>/<kind>/<lease in hex>-<number>      a holder or a waiter. Its value is `pid@host`

The kind is "x" (exclusive), "s" (shared), or the number of permits. etcd orders the keys by the revision in which they
were created. A key holds the lock if no earlier key of the name excludes it: an exclusive key is excluded by every
earlier one, a shared key by earlier exclusive ones, a permit by as many earlier ones as there are permits. The revision
is the token: it grows with every change of the database.

A waiter watches the last of the earlier keys that exclude it, so that a release wakes one waiter. For a permit it
watches all keys of the name. Then it reads the keys again, its own too: a waiter whose lease has expired holds nothing.

A process has one lease on a server for each time to live, and etcd deletes the keys of a lease that is not renewed.
A URL may name several servers of a cluster: when one does not answer, the next one is asked.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import threading
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .. import process, wait
from ..errors import ConnectionFailed, HoldfastError, UnsafePath
from .engine import BUSY, Outcome
from .server import (
    STATUS_TIMEOUT_S,
    Lease,
    LeaseGone,
    ServerEngine,
    ServerGrant,
    Waiter,
    client_name,
    clock,
    holder_of,
    unreachable,
    without_password,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..status import Status

DEFAULT_TTL_S = 10.0
_PORT = 2379
_PARAMETERS = {"ca", "cert", "key"}
_ENVIRONMENT = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
_LEASE_NOT_FOUND, _DENIED, _UNAVAILABLE, _TOKEN_EXPIRED = 5, 7, 14, 16  # codes of gRPC
_REMEDY = "Check the URL, and that the server runs and can be reached."
_REMEDIES = {
    _DENIED: "Check the user's permissions for keys that begin with holdfast/.",
    _UNAVAILABLE: "Check that more than half of the servers of the cluster run.",
}
_numbers = count(1)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode("utf-8", "surrogateescape")


def _after(prefix: str) -> str:
    """The end of the range of all keys that begin with a prefix."""
    encoded = prefix.encode("utf-8", "surrogateescape")
    return base64.b64encode(encoded[:-1] + bytes([encoded[-1] + 1])).decode()


class EtcdError(ConnectionFailed):
    """An error that etcd answered with. `code` is the one of gRPC."""

    def __init__(self, server: str, code: int, reason: str) -> None:
        super().__init__(f"{server}: {reason}. {_REMEDIES.get(code, _REMEDY)}")
        self.code, self.reason = code, reason


class EtcdServer:
    """The connections of this process to one cluster."""

    def __init__(self, url: str, name: str) -> None:
        parts = urlsplit(url)
        given = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        if unknown := given.keys() - _PARAMETERS:
            raise ValueError(f"{name}: unknown parameter {', '.join(sorted(unknown))}; known: ca, cert, key")
        settings = {key: given.get(key) or os.environ.get(_ENVIRONMENT[key]) for key in _PARAMETERS}
        userinfo, _, hosts = parts.netloc.rpartition("@")
        user, _, password = userinfo.partition(":")
        user, _, from_environment = (os.environ.get("ETCDCTL_USER", "") if not user else unquote(user)).partition(":")
        self._user, self._password = user, unquote(password) or from_environment
        self.name = f"{parts.scheme}://{hosts}"
        self._hosts = [_host_and_port(host, name) for host in hosts.split(",")]
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "etcds":
            self._tls = ssl.create_default_context(cafile=settings["ca"])
            if settings["cert"]:
                self._tls.load_cert_chain(settings["cert"], settings["key"])
        self._idle: list[http.client.HTTPConnection] = []
        self._leases: dict[float, EtcdLease] = {}
        self._mutex = threading.Lock()
        self._token = ""

    def call(self, method: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request, and return its answer. Raises EtcdError and ConnectionFailed.

        A request may reach the cluster twice, if the answer of one server is lost and the next one is asked.
        """
        until = monotonic() + timeout
        backoff = wait.Backoff()
        while True:
            try:
                return self._call_each(method, request, until)
            except EtcdError as error:  # a cluster that elects a leader answers again soon
                if error.code != _UNAVAILABLE or monotonic() >= until:
                    raise
            backoff.pause(until).block()

    def _call_each(self, method: str, request: dict[str, Any], until: float) -> dict[str, Any]:
        """Ask one server after the other. Each has its share of the time, because it may be silent."""
        connection: http.client.HTTPConnection | None = None
        with suppress(IndexError):  # none, or another thread was faster
            connection = self._idle.pop()
        tries = len(self._hosts) + (connection is not None)
        for tried in range(tries):
            share = max(0.001, until - monotonic()) / (tries - tried)
            try:
                return self._answer(connection or self._connect(share), method, request, monotonic() + share)
            except (OSError, http.client.HTTPException, EtcdError) as error:
                if isinstance(error, EtcdError) and error.code != _UNAVAILABLE:
                    raise
                if connection is None:
                    self._next_host()
                connection, failure = None, error
        raise self._failed(failure)

    def _next_host(self) -> None:
        """The next connection goes to another server."""
        self._hosts = [*self._hosts[1:], self._hosts[0]]

    def _failed(self, error: Exception) -> ConnectionFailed:
        if isinstance(error, ConnectionFailed):
            return error
        if isinstance(error, ssl.SSLError):
            return unreachable(self.name, f"TLS: {error}", "Check the certificates: the parameters ca, cert and key.")
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return unreachable(self.name, reason, _REMEDY)

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._hosts[0]
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        connection.connect()
        return connection

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, request: dict[str, Any], until: float
    ) -> dict[str, Any]:
        try:
            response = self._send(connection, method, request, until)
            answer = json.loads(response.read() or b"{}")
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # else the server has closed it
            self._idle.append(connection)
        if "code" in answer or "error" in answer:
            error = EtcdError(self.name, answer.get("code", 0), str(answer.get("message") or answer.get("error")))
            if error.code == _TOKEN_EXPIRED and self._user and method != "auth/authenticate":
                self._token = ""
                return self.call(method, request, max(0.001, until - monotonic()))
            raise error
        result: dict[str, Any] = answer.get("result", answer)
        return result

    def _send(
        self, connection: http.client.HTTPConnection, method: str, request: dict[str, Any], until: float
    ) -> http.client.HTTPResponse:
        if self._user and not self._token and method != "auth/authenticate":
            self._token = self._authenticate(until)
        connection.sock.settimeout(max(0.001, until - monotonic()))
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        connection.request("POST", f"/v3/{method}", json.dumps(request), headers)
        return connection.getresponse()

    def _authenticate(self, until: float) -> str:
        request = {"name": self._user, "password": self._password}
        try:
            return str(self.call("auth/authenticate", request, max(0.001, until - monotonic()))["token"])
        except EtcdError as error:
            raise unreachable(self.name, error.reason, "Check the user name and the password.") from None

    def lease(self, ttl: float, timeout: float) -> EtcdLease:
        """The lease of this process for new keys. It is granted if there is none."""
        with self._mutex:
            found = self._leases.get(ttl)
            if found is None or found.is_lost or clock() >= found.deadline:
                found = self._leases[ttl] = EtcdLease(self, ttl, timeout)
            return found

    def watch(self, request: dict[str, Any], timeout: float) -> Watch:
        until = monotonic() + timeout
        for tried in range(len(self._hosts)):
            share = max(0.001, until - monotonic()) / (len(self._hosts) - tried)
            try:
                return self._watch(request, share)
            except (OSError, http.client.HTTPException) as error:
                self._next_host()
                failure = error
        raise self._failed(failure)

    def _watch(self, request: dict[str, Any], timeout: float) -> Watch:
        connection = self._connect(timeout)
        try:
            response = self._send(connection, "watch", {"create_request": request}, monotonic() + timeout)
            if response.status != http.client.OK:
                raise http.client.HTTPException(f"HTTP status {response.status}")
            response.readline()  # it is created
        except BaseException:
            connection.close()
            raise
        return Watch(connection, response)


def _host_and_port(text: str, name: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        return str(parts.hostname or "127.0.0.1"), parts.port or _PORT
    except ValueError:
        raise UnsafePath(f"{name}: {text} is no host and port. Write host:port,host:port", path=name) from None


class Watch:
    """A stream of events. Everything that can be read from it means that something has changed."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response
        self.fd = connection.sock.fileno()

    def close(self) -> None:
        self._connection.close()
        self._response.close()


_servers: dict[str, EtcdServer] = {}
process.after_fork_in_child(_servers.clear)


class EtcdLease(Lease):
    """A lease of etcd. All locks of this process with the same time to live have it."""

    def __init__(self, server: EtcdServer, ttl: float, timeout: float) -> None:
        sent = clock()
        answer = server.call("lease/grant", {"TTL": max(1, int(ttl))}, timeout)
        self._server = server
        self.id = str(answer["ID"])
        self._unwanted: set[str] = set()
        super().__init__(server.name, float(answer["TTL"]), sent)

    def renew(self, timeout: float) -> list[ServerGrant]:
        answer = self._server.call("lease/keepalive", {"ID": self.id}, timeout)
        if int(answer.get("TTL", 0)) <= 0:
            raise LeaseGone
        with suppress(ConnectionFailed):
            for key in list(self._unwanted):
                self._server.call("kv/deleterange", {"key": _encode(key)}, self.ttl / 10)
                self._unwanted.discard(key)
        return []

    def discard(self, key: str) -> None:
        """Delete a key with the next renewal, which would keep it alive otherwise."""
        self._unwanted.add(key)

    def delete(self, key: str, timeout: float) -> bool:
        """Delete a key. False: it was not there."""
        try:
            answer = self._server.call("kv/deleterange", {"key": _encode(key)}, timeout)
        except BaseException:
            self.discard(key)
            raise
        return int(answer.get("deleted", 0)) > 0


class EtcdEngine(ServerEngine):
    """The lock, or semaphore, of one name in one cluster."""

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        parts = urlsplit(url)
        super().__init__(without_password(url), "etcd")
        name = unquote(parts.path[1:])
        if not name or "\0" in name or not parts.netloc.rpartition("@")[2]:
            raise UnsafePath(
                f"{self.name}: the URL names no lock. Write etcd://host:2379/name, or etcd://host:2379,host:2379/name",
                path=self.name,
            )
        self.url = f"{parts.scheme}://{parts.netloc}/?{parts.query}"
        self.shared = shared or permits > 0
        self.permits = permits
        self.kind = str(permits) if permits else "s" if shared else "x"
        self.ttl = DEFAULT_TTL_S if ttl is None else float(ttl)
        self.key = ("etcd", self.url, name)
        self.prefix = f"holdfast/{name}\0/"

    @property
    def server(self) -> EtcdServer:
        return _servers.get(self.url) or _servers.setdefault(self.url, EtcdServer(self.url, self.name))

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        """Add our key if the name has no key. Else add it and look, unless a look shows that it would have to wait."""
        until = monotonic() + timeout
        found = self.add(timeout, only_if_free=True)
        if isinstance(found, ServerGrant):
            return found
        if self.kind == "x" or self.excluding(found, None):
            return BUSY
        place: Place | None = self.add(max(0.001, until - monotonic()))
        assert place is not None
        try:
            if self.excluding(self.keys(max(0.001, until - monotonic())), place):
                return BUSY
            grant, place = place.grant(), None
            return grant
        except LeaseGone:
            return BUSY  # this process was stopped or cut off
        finally:
            if place is not None:
                place.leave(timeout)

    def add(self, timeout: float, *, only_if_free: bool = False) -> Any:
        """Add a key of ours. Return its place, or with `only_if_free` the grant or the keys that are there."""
        until = monotonic() + timeout
        for _ in range(2):
            lease = self.server.lease(self.ttl, max(0.001, until - monotonic()))
            key = f"{self.prefix}{self.kind}/{int(lease.id):x}-{next(_numbers)}"
            put = {"request_put": {"key": _encode(key), "value": _encode(client_name()), "lease": lease.id}}
            keys = {"key": _encode(key)}
            if only_if_free:
                keys = {"key": _encode(self.prefix), "range_end": _after(self.prefix)}
            compare = {"target": "CREATE", "result": "LESS", "create_revision": "1", **keys}
            request = {"compare": [compare], "success": [put], "failure": [{"request_range": keys}]}
            try:
                answer = self.call("kv/txn", request, max(0.001, until - monotonic()))
            except EtcdError as error:
                if error.code != _LEASE_NOT_FOUND:
                    raise
                lease.lose()
                continue
            except ConnectionFailed:  # the key may be there
                lease.discard(key)
                raise
            revision = int(answer["header"]["revision"])
            if not answer.get("succeeded"):
                found = _keys(answer["responses"][0]["response_range"])
                ours = [entry[0] for entry in found if entry[1] == key]  # the request has reached the cluster twice
                if not ours:
                    return found
                revision = ours[0]
            place = Place(self, lease, key, revision)
            return place.grant() if only_if_free else place
        raise unreachable(self.name, "the lease was lost at once", "Raise ttl, or check the clocks of the servers.")

    def call(self, method: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        return self.server.call(method, request, timeout)

    def keys(self, timeout: float) -> list[tuple[int, str, str]]:
        """The revision, key and value of all holders and waiters, in order of arrival."""
        request = {"key": _encode(self.prefix), "range_end": _after(self.prefix)}
        return _keys(self.call("kv/range", request, timeout))

    def excluding(self, keys: list[tuple[int, str, str]], place: Place | None) -> list[tuple[int, str, str]]:
        """The earlier keys that keep this place from holding the lock. None: a place behind all of them."""
        if place is not None and not any(key == place.key for _, key, _ in keys):
            raise LeaseGone
        earlier = [entry for entry in keys if place is None or entry[0] < place.revision]
        others = [entry for entry in earlier if self.kind_of(entry[1]) != self.kind]
        if self.permits:
            for _, key, _ in others:
                if self.kind_of(key).isdigit():
                    raise self.other_number(self.kind_of(key))
            return earlier if others or len(earlier) >= self.permits else []
        return earlier if self.kind == "x" else others

    def kind_of(self, key: str) -> str:
        return key[len(self.prefix) :].partition("/")[0]

    def release_grant(self, grant: ServerGrant) -> bool:
        lease: Any = grant.lease
        return bool(lease.delete(grant.id, self.ttl))

    def join(self, timeout: float) -> Waiter:
        return EtcdWaiter(self, self.add(timeout))

    def status(self) -> Status:
        keys = self.keys(STATUS_TIMEOUT_S)
        number = 0
        for _ in keys:  # holders are the longest run of first keys that do not exclude each other
            kinds = {self.kind_of(key) for _, key, _ in keys[: number + 1]}
            kind = next(iter(kinds))
            if number and (len(kinds) > 1 or kind == "x" or (kind.isdigit() and number >= int(kind))):
                break
            number += 1
        found = [holder_of(client, self.kind_of(key) != "x") for _, key, client in keys]
        return self.state(tuple(found[:number]), tuple(found[number:]), keys[0][0] if keys else None)


def _keys(answer: dict[str, Any]) -> list[tuple[int, str, str]]:
    found = [
        (int(entry["create_revision"]), _decode(entry["key"]), _decode(entry.get("value", "")))
        for entry in answer.get("kvs", ())
    ]
    return sorted(found)


class Place:
    """A key of ours: a place in the queue of a lock."""

    def __init__(self, engine: EtcdEngine, lease: EtcdLease, key: str, revision: int) -> None:
        self._engine, self._lease = engine, lease
        self.key, self.revision = key, revision
        lease.waiters.add(self)
        lease.watch()

    def grant(self) -> ServerGrant:
        grant = ServerGrant(self._engine, self._lease, self.key, self.revision)
        self._lease.waiters.discard(self)
        return grant

    def leave(self, timeout: float) -> None:
        self._lease.waiters.discard(self)
        with suppress(HoldfastError, OSError):
            self._lease.delete(self.key, timeout)


class EtcdWaiter(Waiter):
    def __init__(self, engine: EtcdEngine, place: Place) -> None:
        self._engine, self._place = engine, place
        self._watch: Watch | None = None

    def attempt(self, timeout: float) -> ServerGrant | None:
        """Look, watch what is in front, and look again: what was deleted in between causes no event."""
        engine, until = self._engine, monotonic() + timeout
        self._end_watch()
        try:
            excluding = engine.excluding(engine.keys(timeout), self._place)
            if excluding:
                key = engine.prefix if engine.permits else excluding[-1][1]
                request = {"key": _encode(key), "filters": ["NOPUT"]}
                if engine.permits:
                    request["range_end"] = _after(key)
                self._watch = engine.server.watch(request, max(0.001, until - monotonic()))
                excluding = engine.excluding(engine.keys(max(0.001, until - monotonic())), self._place)
        except LeaseGone:  # this process was stopped or cut off: wait at the end of the queue
            self._place.leave(timeout)
            self._place = engine.add(max(0.001, until - monotonic()))
            return self.attempt(max(0.001, until - monotonic()))
        if excluding:
            return None
        self._end_watch()
        return self._place.grant()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def step(self, deadline: float | None) -> wait.Step:
        until = wait.sooner(monotonic() + self._engine.ttl, deadline)
        return wait.Pause(until) if self._watch is None else wait.Readable(self._watch.fd, until)

    def leave(self) -> None:
        self._end_watch()
        self._place.leave(self._engine.ttl)
