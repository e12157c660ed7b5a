"""`locks_on(url)`: the locks that a server knows, with their holders and waiters. `alarm_on(url)`: when they change.

    PostgreSQL   the table of names, joined with pg_locks. The name of a free lock stays in the table
    etcd         the keys that begin with holdfast/. A free lock has no key
    Redis        SCAN for the tokens. The token of a free lock stays

A URL with a name lists that lock alone, even if the server has never seen it. Nothing is created on the server. The
number of permits of a semaphore is the number that the server has, not one of the caller. The module of another engine
may have a function `locks_on` of its own. Without one, the URL must have a name.

An alarm waits for the next change of any lock: an event of etcd, a message of Redis, a notification of PostgreSQL. It
does not ring for these: on PostgreSQL the end of a process that holds a lock, the end of a wait without the lock, and a
lock in the transaction of the caller; on Redis a lease that expires.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlunsplit

from .. import postgres
from ..files import pipe
from .server import CALL_TIMEOUT_S, split_url
from .url import ServerLock, engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..status import Status
    from .postgres import PostgresEngine

# `with alarm() as descriptors`: one of them can be read after the next change.
Alarm = Callable[[], AbstractContextManager[list[int]]]

_BATCH = 500  # locks whose status is read in one round trip
_EXPIRING = ("holders", "waiters")  # keys of Redis with the time when each member expires
_ADVISORY_LOCKS = """select ((classid::bigint << 32) | objid::bigint), mode, granted, application_name,
    extract(epoch from (to_jsonb(l) ->> 'waitstart')::timestamptz)::float
    from pg_locks l left join pg_stat_activity a using (pid)
    where locktype = 'advisory' and objsubid = 1
    and l.database = (select oid from pg_database where datname = current_database())
    order by to_jsonb(l) ->> 'waitstart', pid"""


def locks_on(url: str) -> list[Status]:
    """Return the status of the locks of a server, or of the one lock that the URL names.

    Raises the same errors as `holdfast.lock` and its `status`.
    """
    engine = engine_of(url)
    found: Callable[[str], list[Status]] | None = getattr(sys.modules[engine.__module__], "locks_on", None)
    found = found or _LISTS.get(engine.__name__)
    return [ServerLock(url).status()] if found is None else found(url)


def alarm_on(url: str) -> Alarm | None:
    """None: the engine has none."""
    make = _ALARMS.get(engine_of(url).__name__)
    return None if make is None else make(url)


@contextmanager
def _etcd_alarm(url: str) -> Iterator[list[int]]:
    from .etcd import EtcdEngine, _after
    from .etcd_client import encode

    parts = split_url(url)
    engine = EtcdEngine(urlunsplit(parts._replace(path=f"/{parts.path[1:] or 'x'}")))
    prefix = engine.prefix if parts.path[1:] else "holdfast/"
    watch = engine.server.watch({"key": encode(prefix), "range_end": _after(prefix)}, CALL_TIMEOUT_S)
    try:
        yield [watch.fd]
    finally:
        watch.close()


@contextmanager
def _redis_alarm(url: str) -> Iterator[list[int]]:
    from .redis import RedisEngine
    from .redis_scripts import CHANGES

    parts = split_url(url)
    database = parts.path.lstrip("/").partition("/")[0]
    server = RedisEngine(urlunsplit(parts._replace(path=f"/{database or 0}/x"))).server
    woken, wake = pipe()
    os.set_blocking(wake.fd, False)
    id = os.urandom(8).hex()
    listener = server.listen(CHANGES, id, wake, CALL_TIMEOUT_S)
    try:
        yield [woken.fd]
    finally:
        listener.remove_at_once(id)


def _on_postgres(url: str) -> list[Status]:
    from .postgres import PostgresEngine
    from .postgres_sessions import TTL_S

    address, ours = postgres.split(url, ("name",))
    start = f"{address}{'&' if '?' in address else '?'}name="
    session = PostgresEngine(start + "x").sessions.borrow(TTL_S)

    def read() -> tuple[list[PostgresEngine], list[Any]]:
        with session._mutex:
            run = session.session.connection.execute
            names = _names(run, ours.get("name"))
            engines = [PostgresEngine(start + quote(name, safe=""), permits=permits) for name, permits in names]
            return engines, run(_ADVISORY_LOCKS).fetchall()

    engines, rows = postgres.explained(address, read)
    by_key: dict[int, list[Any]] = {}
    for row in rows:
        by_key.setdefault(row[0], []).append(row)
    keys = [(engine.number, engine.queue, *engine.slots) for engine in engines]
    return [
        engine.state_from([row for key in some for row in by_key.get(key, ())])
        for engine, some in zip(engines, keys, strict=True)
    ]


def _names(run: Callable[..., Any], name: str | None) -> list[tuple[str, int]]:
    """Names and permits: all that are in the table, or those of one name."""
    missing = [(name, 0)] if name else []
    if run("select to_regclass('holdfast_lock')").fetchone()[0] is None:
        return missing
    query = "select name, permits from holdfast_lock where key <> 0 and %s::text in ('', name) order by name"
    rows = run(query, [name or ""])
    return rows.fetchall() or missing


def _on_etcd(url: str) -> list[Status]:
    from .etcd import EtcdEngine

    parts = split_url(url)
    name = unquote(parts.path[1:])
    engine = EtcdEngine(urlunsplit(parts._replace(path=f"/{quote(name or 'x')}")))
    if not name:
        engine.prefix = "holdfast/"
    by_name: dict[str, list[tuple[int, str, str]]] = {name: []} if name else {}
    for entry in engine.keys(CALL_TIMEOUT_S):
        by_name.setdefault(entry[1].partition("\0")[0].removeprefix("holdfast/"), []).append(entry)
    found = []
    for each, entries in sorted(by_name.items()):
        kind = entries[0][1].partition("\0/")[2].partition("/")[0] if entries else ""
        permits = int(kind) if kind.isdigit() else 0
        listed = EtcdEngine(urlunsplit(parts._replace(path=f"/{quote(each)}")), permits=permits)
        listed.keys = lambda timeout, entries=entries: entries  # type: ignore[method-assign, misc]
        found.append(listed.status())
    return found


def _on_redis(url: str) -> list[Status]:
    from .redis import RedisEngine, _holder

    parts = split_url(url)
    database, _, name = parts.path.lstrip("/").partition("/")

    def engine_for(name: str, permits: int = 0) -> RedisEngine:
        return RedisEngine(urlunsplit(parts._replace(path=f"/{database or 0}/{quote(name)}")), permits=permits)

    server = engine_for("x").server
    names = [unquote(name)] if name else sorted(_scan(server))
    found = []
    for at in range(0, len(names), _BATCH):
        for each, holders, waiters in _members(server, names[at : at + _BATCH]):
            kind = holders[0].partition(b":")[0] if holders else b""
            engine = engine_for(each, int(kind) if kind.isdigit() else 0)
            found.append(engine.state(tuple(map(_holder, holders)), tuple(map(_holder, waiters))))
    return found


def _scan(server: Any) -> set[str]:
    """The names of the locks that have a token."""
    names: set[str] = set()
    cursor = b"0"
    while True:
        ((cursor, keys),) = ask_redis(server, [("SCAN", cursor, "MATCH", "holdfast:{*}:token", "COUNT", 1000)])
        names.update(key.decode(errors="replace")[len("holdfast:{") : -len("}:token")] for key in keys)
        if int(cursor) == 0:
            return names


def _members(server: Any, names: list[str]) -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    """The ids of the holders and waiters of each lock whose lease has not expired."""
    ((seconds, microseconds),) = ask_redis(server, [("TIME",)])
    now = int(seconds) * 1000 + int(microseconds) // 1000
    commands: list[tuple[object, ...]] = []
    for name in names:
        commands += (("ZRANGEBYSCORE", f"holdfast:{{{name}}}:{key}", f"({now}", "+inf") for key in _EXPIRING)
        commands.append(("ZRANGE", f"holdfast:{{{name}}}:queue", 0, -1))
    answers = iter(ask_redis(server, commands))
    for name, holders, alive, queue in zip(names, answers, answers, answers, strict=True):
        yield name, holders, [id for id in queue if id in set(alive)]


def ask_redis(server: Any, commands: list[tuple[object, ...]]) -> list[Any]:
    """Send commands in one round trip. Raises ConnectionFailed."""
    from redis.exceptions import RedisError

    from .redis import _ask, failure

    connection = server._connect(CALL_TIMEOUT_S)
    try:
        answers = _ask(connection, commands, monotonic() + CALL_TIMEOUT_S)
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        return answers
    except RedisError as error:
        failed = failure(server.name, error)
    finally:
        connection.disconnect()
    raise failed  # here, so that no traceback contains the error of redis-py, which may show the password


_LISTS: dict[str, Callable[[str], list[Status]]] = {
    "PostgresEngine": _on_postgres,
    "EtcdEngine": _on_etcd,
    "RedisEngine": _on_redis,
}
_ALARMS: dict[str, Callable[[str], Alarm]] = {
    "PostgresEngine": lambda url: postgres.Alarm(postgres.split(url, ("name", "prefix"))[0]),
    "EtcdEngine": lambda url: partial(_etcd_alarm, url),
    "RedisEngine": lambda url: partial(_redis_alarm, url),
}
