"""`holdfast doctor URL`: what a lock server really does, tested with two sessions.

The second session is that of a child process. The locks have a random name, and nothing of them stays on the server.
A URL may name a lock, which is not touched.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlunsplit

from .. import postgres
from ..errors import HoldfastError, LockLost, Unsupported
from ..locks.listing import ask_redis
from ..locks.server import CALL_TIMEOUT_S, split_url
from ..locks.url import ServerLock
from ..owner import hide_passwords, without_passwords
from . import output
from .doctor import Finding, Other, say_finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from ..locks.server import ServerHold

_PATIENCE_S = 10.0
_POLL_S = 0.01
_BLIND_S = 0.5  # until a waiter waits, on a server that does not tell
_SHORT_TTL_S = 2  # for the check of a loss: the holder asks the server after a third of it
_MAX_CLOCK_DIFFERENCE_S = 2.0


class Room:
    """A name on the server that no other program uses."""

    def __init__(self, url: str) -> None:
        self.url = url_with_name(url, f"holdfast-doctor-{os.getpid()}-{os.urandom(4).hex()}")
        self.kind = type(self.lock()._engine).__name__

    def lock(self, **options: Any) -> ServerLock:
        return ServerLock(self.url, **options)

    def other(self, **options: Any) -> Other:
        """A child that holds the lock until the block is left."""
        return Other(lambda: self.lock(**options).acquire(_PATIENCE_S), lambda hold: hold.release())


def url_with_name(url: str, name: str) -> str:
    """The URL of a lock on the same server."""
    if url.partition("://")[0].lower() in ("postgresql", "postgres"):
        address, _ = postgres.split(url, ("name",))
        return f"{address}{'&' if '?' in address else '?'}name={name}"
    parts = split_url(url)
    words = parts.path.lstrip("/").split("/")
    if parts.scheme in ("redis", "rediss", "valkey", "valkeys"):
        words[1:] = [name]
        words[0] = words[0] or "0"
    elif parts.scheme == "smb":
        words = [*words[:-1], f".{name}"] if len(words) > 1 else [*words, f".{name}"]
    else:
        words = [name]
    return urlunsplit(parts._replace(path="/" + "/".join(words)))


def call(options: argparse.Namespace) -> int:
    if not hasattr(os, "fork"):
        raise Unsupported("holdfast doctor needs a second process by fork, which this system does not have")
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    room = Room(options.path)
    room.lock().status()  # a server that does not answer, or a wrong password: one error, not one for each check
    try:
        findings = [_tried(what, check, room) for what, check in CHECKS.items()]
    finally:
        if room.kind in _CLEANERS:
            with suppress(HoldfastError, OSError):
                _CLEANERS[room.kind](room)
    safe = all(finding.good is not False for finding in findings)
    server = hide_passwords(options.path)
    if options.json:
        checks = {finding.what: {"good": finding.good, "note": finding.note} for finding in findings}
        output.say_json({"server": server, "checks": checks, "safe": safe})
        return 0 if safe else 1
    output.say(f"{output.shown(server)}\n")
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        say_finding(finding, width, {True: "yes", False: "NO", None: "-"})
    verdict = "Locks on this server work." if safe else "Locks on this server are not safe."
    output.say("\n" + output.coloured(verdict, output.GREEN if safe else output.RED))
    if room.kind == "RedisEngine":
        output.say("Redis may lose a lock when it restarts or fails over: check hold.token where that would do harm.")
    return 0 if safe else 1


def _tried(what: str, check: Callable[[Room], Finding], room: Room) -> Finding:
    try:
        found = check(room)
    except Unsupported as error:
        found = Finding("", None, str(error))
    except (HoldfastError, OSError) as error:
        found = Finding("", False, str(error))
    found.what, found.note = what, without_passwords(found.note)
    return found


# The checks.


def _exclusion(room: Room) -> Finding:
    with room.other() as other:
        if not other.did:
            return Finding("", False, "the other session did not acquire the lock")
        if (hold := room.lock().try_acquire()) is not None:
            hold.release()
            return Finding("", False, "two sessions held the lock at once")
    room.lock().acquire(_PATIENCE_S).release()
    return Finding("", True)


def _shared(room: Room) -> Finding:
    lock = room.lock(shared=True)
    with room.other(shared=True) as other:
        if not other.did:
            return Finding("", False, "the other session did not acquire the lock")
        lock.acquire(_PATIENCE_S).release()
        if (hold := room.lock().try_acquire()) is not None:
            hold.release()
            return Finding("", False, "an exclusive lock was granted beside a shared one")
    return Finding("", True)


def _semaphore(room: Room) -> Finding:
    semaphore = room.lock(permits=2)
    with room.other(permits=2) as other:
        if not other.did:
            return Finding("", False, "the other session did not acquire a permit")
        with semaphore.acquire(_PATIENCE_S):
            if (hold := semaphore.try_acquire()) is not None:
                hold.release()
                return Finding("", False, "three holders had two permits")
    return Finding("", True)


def _hand_over(room: Room) -> Finding:
    """The other session releases the lock when it sees that we wait for it."""

    def release_to_waiter(hold: ServerHold) -> None:
        until = time.monotonic() + (_BLIND_S if room.kind == "SmbEngine" else _PATIENCE_S)
        while not hold.lock.status().waiters and time.monotonic() < until:
            time.sleep(_POLL_S)
        hold.release()

    with Other(lambda: room.lock().acquire(_PATIENCE_S), release_to_waiter) as other:
        if not other.did:
            return Finding("", False, "the other session did not acquire the lock")
        other.go_on()
        room.lock().acquire(2 * _PATIENCE_S).release()
    return Finding("", True)


def _loss(room: Room) -> Finding:
    if room.kind not in _ENDINGS:
        return Finding("", None, "not tested for this engine")
    lost = threading.Event()
    options = {} if room.kind in ("PostgresEngine", "SmbEngine") else {"ttl": _SHORT_TTL_S}
    hold = room.lock(on_lost=lambda _: lost.set(), **options).acquire(_PATIENCE_S)
    began = time.monotonic()
    with suppress(HoldfastError):  # the session that ends answers no more
        _ENDINGS[room.kind](hold._grant)
    is_noticed = lost.wait(_PATIENCE_S) and hold.lost
    took = time.monotonic() - began
    with suppress(LockLost):
        hold.release()
        return Finding("", False, "the holder was not told that its session has ended")
    return Finding("", is_noticed, f"after {took:.2f} s" if is_noticed else "on_lost was not called")


def _tokens(room: Room) -> Finding:
    tokens = []
    for _ in range(3):
        with room.lock().acquire(_PATIENCE_S) as hold:
            tokens.append(hold.token)
    if None in tokens:
        return Finding("", None, "locks of this engine have no tokens")
    grow = tokens[0] < tokens[1] < tokens[2]  # type: ignore[operator]
    return Finding("", grow, "" if grow else f"they were {tokens}")


def _clock(room: Room) -> Finding:
    if room.kind not in _CLOCKS:
        return Finding("", None, "this engine does not tell its time")
    before = time.time()
    told, resolution = _CLOCKS[room.kind](room)
    after = time.time()
    difference = max(0.0, told - after) or min(0.0, told + resolution - before)
    direction = "ahead of" if difference > 0 else "behind"
    text = f"the server is {abs(difference):.3g} s {direction} this machine" if difference else "the same"
    if abs(difference) <= _MAX_CLOCK_DIFFERENCE_S:
        return Finding("", True, text)
    return Finding("", None, f"{text}. Locks do not depend on it, but times in logs differ")


CHECKS: dict[str, Callable[[Room], Finding]] = {
    "a lock excludes a second session": _exclusion,
    "shared locks": _shared,
    "semaphores": _semaphore,
    "a released lock goes to a waiter": _hand_over,
    "the holder notices a loss": _loss,
    "tokens grow": _tokens,
    "clocks agree": _clock,
}


# What each engine does in its own way.


# End the session of a grant on the server, as an administrator or a crash would.
_ENDINGS: dict[str, Callable[[Any], object]] = {
    "PostgresEngine": lambda grant: grant.lease.ask("select pg_terminate_backend(pg_backend_pid())", CALL_TIMEOUT_S),
    "EtcdEngine": lambda grant: grant._engine.call("lease/revoke", {"ID": grant.lease.id}, CALL_TIMEOUT_S),
    "RedisEngine": lambda grant: ask_redis(grant._engine.server, [("ZREM", grant._engine.keys[0], grant.id)]),
    "SmbEngine": lambda grant: grant.lease.close(),
}


def _clock_of_postgres(room: Room) -> tuple[float, float]:
    session = room.lock()._engine.sessions.borrow(CALL_TIMEOUT_S)
    (row,) = session.ask("select extract(epoch from clock_timestamp())", CALL_TIMEOUT_S)
    return float(row[0]), 0.0


def _clock_of_etcd(room: Room) -> tuple[float, float]:
    """The header Date of an answer, in whole seconds: etcd itself does not tell its time."""
    from email.utils import parsedate_to_datetime

    server = room.lock()._engine.server
    connection = server._connect(CALL_TIMEOUT_S)
    try:
        response = server._send(connection, "maintenance/status", {}, time.monotonic() + CALL_TIMEOUT_S)
        return parsedate_to_datetime(response.getheader("Date", "")).timestamp(), 1.0
    finally:
        connection.close()


def _clock_of_redis(room: Room) -> tuple[float, float]:
    ((seconds, microseconds),) = ask_redis(room.lock()._engine.server, [("TIME",)])
    return int(seconds) + int(microseconds) / 1e6, 0.0


def _clock_of_smb(room: Room) -> tuple[float, float]:
    """When the server created the file of a lock. Its resolution is a tick of the server's kernel."""
    with room.lock().acquire(_PATIENCE_S) as hold:
        grant: Any = hold._grant
        return grant.id.creation_time.timestamp(), 0.01


# The time of the server, and the length of its ticks.
_CLOCKS: dict[str, Callable[[Room], tuple[float, float]]] = {
    "PostgresEngine": _clock_of_postgres,
    "EtcdEngine": _clock_of_etcd,
    "RedisEngine": _clock_of_redis,
    "SmbEngine": _clock_of_smb,
}


def _clean_postgres(room: Room) -> None:
    engine = room.lock()._engine
    session = engine.sessions.borrow(CALL_TIMEOUT_S)
    session.ask(f"delete from holdfast_lock where key = {engine.number}", CALL_TIMEOUT_S)


# Delete what stays on the server after the last release.
_CLEANERS: dict[str, Callable[[Room], object]] = {
    "PostgresEngine": _clean_postgres,
    "RedisEngine": lambda room: ask_redis(room.lock()._engine.server, [("DEL", *room.lock()._engine.keys)]),
    "SmbEngine": lambda room: room.lock()._engine.forget(),
}
