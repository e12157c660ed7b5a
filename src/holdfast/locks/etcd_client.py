"""Calls to etcd through its JSON gateway, the watch, and the lease of this process. See `etcd`."""

from __future__ import annotations

import atexit
import base64
import http.client
import json
import os
import ssl
import threading
from contextlib import suppress
from errno import EMFILE
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .. import process, wait
from ..errors import ConnectionFailed, UnsafePath
from .renewal import clock
from .server import Lease, LeaseGone, ServerGrant, unreachable, within

_PORT = 2379
_AT_EXIT_S = 0.5
_PARAMETERS = {"ca", "cert", "key"}
_ENVIRONMENT = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
LEASE_NOT_FOUND, _DENIED, _EXHAUSTED, _UNAVAILABLE, _TOKEN_EXPIRED = 5, 7, 8, 14, 16  # codes of gRPC
_REMEDY = "Check the URL, and that the server runs and can be reached."
_TLS_REMEDY = "Check the URL, that the server can be reached, and the certificates (ca, cert, key)."
_OPEN_FILES = "Raise the limit of open files of this process (ulimit -n)."
_REMEDIES = {
    _DENIED: "Check the user's permissions for keys that begin with holdfast/.",
    _EXHAUSTED: "Compact and defragment the database, then disarm its alarm, or raise quota-backend-bytes.",
    _UNAVAILABLE: "Check that more than half of the servers of the cluster run.",
}


def encode(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()


def decode(text: str) -> str:
    return base64.b64decode(text).decode("utf-8", "surrogateescape")


class EtcdError(ConnectionFailed):
    """An error that etcd answered with. `code` is the one of gRPC."""

    def __init__(self, server: str, code: int, reason: str) -> None:
        super().__init__(f"{server}: {reason}. {_REMEDIES.get(code, _REMEDY)}")
        self.code, self.reason = code, reason


class _Connection(http.client.HTTPConnection):
    def __del__(self) -> None:
        """At the end of this process, and in a forked child. Python would warn about a socket that is not closed."""
        self.close()


class _TlsConnection(http.client.HTTPSConnection):
    __del__ = _Connection.__del__


class EtcdServer:
    """The connections of this process to one cluster."""

    def __init__(self, url: str, name: str) -> None:
        parts = urlsplit(url)
        given = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        if unknown := ", ".join(sorted(given.keys() - _PARAMETERS)):
            remedy = "Use ca, cert and key. For a ? in the name of the lock, write %3F."
            raise UnsafePath(f"{name}: unknown parameter {unknown}. {remedy}", path=name)
        settings = {key: given.get(key) or os.environ.get(_ENVIRONMENT[key]) for key in _PARAMETERS}
        userinfo, _, hosts = parts.netloc.rpartition("@")
        user, _, password = userinfo.partition(":")
        user, _, from_environment = (os.environ.get("ETCDCTL_USER", "") if not user else unquote(user)).partition(":")
        self._user, self._password = user, unquote(password) or from_environment
        self.name = f"{parts.scheme}://{hosts}"
        self._hosts = [_host_and_port(host, name) for host in hosts.split(",")]
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "etcds":
            try:
                self._tls = ssl.create_default_context(cafile=settings["ca"])
                if settings["cert"]:
                    self._tls.load_cert_chain(settings["cert"], settings["key"])
            except OSError as error:
                raise unreachable(self.name, f"the certificates cannot be read ({error})", _TLS_REMEDY) from None
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
            share = wait.time_left(until) / (tries - tried)
            try:
                return self._answer(connection or self._connect(share), method, request, monotonic() + share)
            except (OSError, UnicodeError, http.client.HTTPException, EtcdError) as error:  # UnicodeError: no host
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
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        remedy = _TLS_REMEDY if self._tls else _REMEDY
        if getattr(error, "errno", 0) == EMFILE:
            remedy = _OPEN_FILES
        return unreachable(self.name, reason, remedy)

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._hosts[0]
        if self._tls is None:
            connection: http.client.HTTPConnection = _Connection(host, port, timeout=timeout)
        else:
            connection = _TlsConnection(host, port, timeout=timeout, context=self._tls)
        # The name of a host may take long to resolve, and it may have several addresses.
        within(timeout, connection.connect, lambda _: connection.close())
        return connection

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, request: dict[str, Any], until: float
    ) -> dict[str, Any]:
        try:
            response = self._send(connection, method, request, until)
            answer = _parse(response.read())
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # else the server has closed it
            self._idle.append(connection)
        if "code" in answer or "error" in answer:
            error = EtcdError(self.name, answer.get("code", 0), str(answer.get("message") or answer.get("error")))
            if error.code == _TOKEN_EXPIRED and self._token and monotonic() < until:
                self._token = ""
                return self.call(method, request, wait.time_left(until))
            raise error
        result: dict[str, Any] = answer.get("result", answer)
        return result

    def _send(
        self, connection: http.client.HTTPConnection, method: str, request: dict[str, Any], until: float
    ) -> http.client.HTTPResponse:
        if self._user and not self._token and method != "auth/authenticate":
            self._token = self._authenticate(until)
        connection.sock.settimeout(wait.time_left(until))
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        connection.request("POST", f"/v3/{method}", json.dumps(request), headers)
        return connection.getresponse()

    def _authenticate(self, until: float) -> str:
        request = {"name": self._user, "password": self._password}
        try:
            return str(self.call("auth/authenticate", request, wait.time_left(until))["token"])
        except EtcdError as error:
            raise unreachable(self.name, error.reason, "Check the user name and the password.") from None

    def lease(self, ttl: float, timeout: float) -> EtcdLease:
        """The lease of this process for new keys. It is granted if there is none."""
        until = monotonic() + timeout
        if not self._mutex.acquire(timeout=timeout):  # another thread asks for one
            raise self._failed(TimeoutError())
        try:
            found = self._leases.get(ttl)
            if found is None or found.is_lost or clock() >= found.deadline:
                found = self._leases[ttl] = EtcdLease(self, ttl, wait.time_left(until))
            return found
        finally:
            self._mutex.release()

    def watch(self, request: dict[str, Any], timeout: float) -> Watch:
        until = monotonic() + timeout
        for tried in range(len(self._hosts)):
            share = wait.time_left(until) / (len(self._hosts) - tried)
            try:
                return self._watch(request, share)
            except (OSError, UnicodeError, http.client.HTTPException) as error:
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


def _parse(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise http.client.HTTPException("the server does not answer like etcd 3.4 or later")
    return found


def _host_and_port(text: str, name: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        return str(parts.hostname or "127.0.0.1"), parts.port or _PORT
    except ValueError:
        # `text` is not shown: it is a part of the password, if that contains a slash.
        raise UnsafePath(
            f"{name}: a part of the URL is no host and port. Write host:port,host:port, and %2F for / in a password.",
            path=name,
        ) from None


class Watch:
    """A stream of events. Everything that can be read from it means that something has changed."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response
        self.fd = connection.sock.fileno()

    def close(self) -> None:
        self._connection.close()
        self._response.close()


servers: dict[str, EtcdServer] = {}


def _delete_unwanted() -> None:
    """The connections stay: a hold that is collected after this is released through them."""
    for server in servers.values():
        for lease in server._leases.values():
            lease.delete_unwanted(_AT_EXIT_S)


process.after_fork_in_child(servers.clear)
atexit.register(_delete_unwanted)


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
        self.delete_unwanted(self.ttl / 10)
        return []

    def delete_unwanted(self, timeout: float) -> None:
        with suppress(ConnectionFailed):
            for key in list(self._unwanted):
                self._server.call("kv/deleterange", {"key": encode(key)}, timeout)
                self._unwanted.discard(key)

    def discard(self, key: str) -> None:
        """Delete a key with the next renewal, which would keep it alive otherwise, or at the end of this process."""
        self._unwanted.add(key)

    def delete(self, key: str, timeout: float) -> bool:
        """Delete a key. False: it was not there."""
        try:
            answer = self._server.call("kv/deleterange", {"key": encode(key)}, timeout)
        except BaseException:
            self.discard(key)
            raise
        return int(answer.get("deleted", 0)) > 0
