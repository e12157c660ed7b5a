"""Locks on PostgreSQL, etcd and Redis beside the bare calls of a client, and beside other packages, on the same server.

`engines`: acquire and release of a free lock. The floor is the calls that a careful user of the client makes, who has
one open connection, never waits, looks at each answer, and releases only a lock that is still his:

    PostgreSQL   psycopg: pg_try_advisory_lock and pg_advisory_unlock, which psycopg prepares. A row of its own also
                 reads a sequence, as a fencing token
    Redis        redis-py: SET with NX and PX, and a script that compares and deletes
    etcd         http.client: a transaction that puts a key with a lease if there is none, and one that deletes the key
                 if it is the same one. The lease was granted before, and nobody renews it

`engines-handoff`: from one process's release to the moment when another, which was waiting, has the lock. The release
comes at a random moment, because some of the others poll.

This file is also the program that waits: `engines.py WHAT URL`.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from measure import Place, Row, Table, curve_of, paired_ratio, python_loop, take_turns

RAW, OURS, WITH_TOKEN = "bare calls of the client", "holdfast.lock", "bare calls, with a token"
MAX_RATIO = 1.3
MAX_HANDOFF_MS = {"PostgreSQL": 3.0, "Redis": 3.0, "etcd": 5.0}
_SETTLE_S = 0.05, 0.15
_COMPARE_AND_DELETE = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
)
_CONNECT = "import psycopg; c = psycopg.connect({url!r}, autocommit=True); run = lambda q: c.execute(q).fetchone()[0]"
_OURS = ("import holdfast; lock = holdfast.lock({lock!r})", "lock.acquire().release()")
_IF_REVISION = (
    "txn = lambda revision, what, key: call('kv/txn', {{'success': [{{what: key}}], "
    "'compare': [{{'key': 'YQ==', 'target': 'CREATE', 'create_revision': revision}}]}})"
)

# By engine and contestant: set-up and loop, with {url}, {host} and {port} of the server, and the URL of our {lock}.
LOOPS: dict[str, dict[str, tuple[str, str]]] = {
    "PostgreSQL": {
        RAW: (_CONNECT, "assert run('select pg_try_advisory_lock(5)'); assert run('select pg_advisory_unlock(5)')"),
        OURS: _OURS,
        WITH_TOKEN: (
            f"{_CONNECT}; c.execute('create sequence if not exists tokens')",
            "assert run(\"select case when pg_try_advisory_lock(6) then nextval('tokens') end\"); "
            "assert run('select pg_advisory_unlock(6)')",
        ),
    },
    "Redis": {
        RAW: (
            f"import redis; c = redis.Redis.from_url({{url!r}}); release = c.register_script({_COMPARE_AND_DELETE!r})",
            "assert c.set('bench', 'me', nx=True, px=10_000); assert release(keys=['bench'], args=['me'])",
        ),
        OURS: _OURS,
        "redis-py Lock": (
            "import redis; lock = redis.Redis.from_url({url!r}).lock('redis-py', timeout=10)",
            "lock.acquire(); lock.release()",
        ),
        "python-redis-lock": (
            "import redis, redis_lock; lock = redis_lock.Lock(redis.Redis.from_url({url!r}), 'prl', expire=10)",
            "lock.acquire(); lock.release()",
        ),
        "tooz": (
            "from tooz import coordination; c = coordination.get_coordinator({url!r}, b'me'); c.start(); "
            "lock = c.get_lock(b'tooz')",
            "lock.acquire(); lock.release()",
        ),
    },
    "etcd": {
        RAW: (
            "import http.client, json; c = http.client.HTTPConnection({host!r}, {port}); "
            "call = lambda what, sent: c.request('POST', '/v3/' + what, json.dumps(sent), "
            "{{'Content-Type': 'application/json'}}) or json.loads(c.getresponse().read()); "
            "put = {{'key': 'YQ==', 'value': 'bWU=', 'lease': call('lease/grant', {{'TTL': 600}})['ID']}}; "
            + _IF_REVISION,
            "found = txn(0, 'request_put', put); assert found['succeeded']; "
            "found = txn(found['header']['revision'], 'request_delete_range', {{'key': 'YQ=='}}); "
            "assert found['succeeded']",
        ),
        OURS: _OURS,
        "etcd3gw lock": (
            "import etcd3gw; c = etcd3gw.Etcd3Client({host!r}, {port}, api_path='/v3/'); lock = c.lock('gw', ttl=10)",
            "lock.acquire(); lock.release()",
        ),
    },
}


def make_lock(what: str, url: str) -> Any:
    """The lock of a contestant, with `acquire` and `release`."""
    if what == OURS:
        import holdfast

        return holdfast.lock(lock_url(url, "handoff"))
    if what == "redis-py Lock":
        import redis

        return redis.Redis.from_url(url).lock("handoff-redis-py", timeout=10)
    if what == "python-redis-lock":
        import redis
        import redis_lock

        return redis_lock.Lock(redis.Redis.from_url(url), "handoff-prl", expire=10)
    if what == "tooz":
        from tooz import coordination

        coordinator = coordination.get_coordinator(url, b"me")
        coordinator.start()
        return coordinator.get_lock(b"handoff-tooz")
    import etcd3gw

    return etcd3gw.Etcd3Client("127.0.0.1", urlsplit(url).port, api_path="/v3/").lock("handoff-etcd3gw", ttl=10)


def wait_as_told(what: str, url: str) -> None:
    lock = make_lock(what, url)
    for _ in sys.stdin:
        print("acquiring", flush=True)
        held = lock.acquire()
        while held is False:  # etcd3gw does not wait
            held = lock.acquire()
        now = time.monotonic_ns()
        (held if what == OURS else lock).release()
        print(now, flush=True)


class Pair:
    """A process that waits for the lock, and this process as its holder."""

    def __init__(self, what: str, url: str) -> None:
        self._what = what
        self._lock = make_lock(what, url)
        command = [sys.executable, __file__, what, url]
        self._waiter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiter.communicate()

    def once(self) -> float:
        """Milliseconds from the release to the acquisition by the other process."""
        assert self._waiter.stdin and self._waiter.stdout
        held = self._lock.acquire()
        self._waiter.stdin.write("go\n")
        self._waiter.stdin.flush()
        self._waiter.stdout.readline()
        time.sleep(random.uniform(*_SETTLE_S))
        released = time.monotonic_ns()
        (held if self._what == OURS else self._lock).release()
        return (int(self._waiter.stdout.readline()) - released) / 1e6


def start(engine: str, settings: dict[str, object] | None = None) -> Any:
    """A server with the settings of the tests; PostgreSQL with its own, and so with fsync, and with these."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import servers

    if engine == "PostgreSQL":
        return servers.Postgres.start(settings or {})
    if engine == "SMB":
        return servers.Samba.start()
    return servers.Redis.start() if engine == "Redis" else servers.Etcd.start()


def url_of(engine: str, server: Any) -> str:
    """The URL of a server without the name of a lock, for other clients."""
    if engine == "PostgreSQL":
        with server.connect("postgres", user="postgres") as admin:
            admin.execute("drop database if exists bench with (force)")
            admin.execute("create database bench owner tester")
        return str(server.url("bench"))
    return str(server.url("store" if engine == "SMB" else "")).removesuffix("/")


def lock_url(url: str, name: str) -> str:
    return url + (f"?name={name}" if url.startswith("postgresql") else f"/{name}")


def section(quick: bool, _: list[Place]) -> Iterator[Table]:
    for engine, loops in LOOPS.items():
        server = start(engine)
        try:
            url = url_of(engine, server)
            given = {"url": url, "host": "127.0.0.1", "port": urlsplit(url).port, "lock": lock_url(url, "bench")}
            commands = {name: python_loop(*(text.format(**given) for text in loop)) for name, loop in loops.items()}
            samples = take_turns(commands, 20 if quick else 30, 2 if quick else 3)
        finally:
            server.stop()
        rows = []
        for name, mine in samples.items():
            row = Row(name, median(mine) * 1e6, ratio=paired_ratio(mine, samples[RAW]), raw=mine)
            if name == OURS:
                row.at_most(MAX_RATIO)
            elif name not in (RAW, WITH_TOKEN):
                ahead = paired_ratio(mine, samples[OURS])
                row.check(f"holdfast {ahead:.2f} x as fast, >= 1 x", ahead >= 1)
            rows.append(row)
        yield Table(f"{engine}: acquire and release of a free lock", rows)


def handoff_section(quick: bool, _: list[Place]) -> Iterator[Table]:
    for engine, loops in LOOPS.items():
        names = [name for name in loops if name not in (RAW, WITH_TOKEN)]
        samples: dict[str, list[float]] = {name: [] for name in names}
        server = start(engine)
        try:
            url = url_of(engine, server)
            with ExitStack() as stack:
                pairs = {name: stack.enter_context(Pair(name, url)) for name in names}
                for pair in pairs.values():
                    pair.once()
                for _ in range(30 if quick else 100):
                    for name, pair in pairs.items():
                        samples[name].append(pair.once())
        finally:
            server.stop()
        ours = median(samples[OURS])
        rows = []
        for name, found in samples.items():
            row = Row(name, median(found), "ms", note=f"9 of 10 within {quantiles(found, n=10)[-1]:.1f} ms", raw=found)
            row.curve = [1000 * ms for ms in curve_of(found)]
            if name == OURS:
                row.check(f"<= {MAX_HANDOFF_MS[engine]:g} ms", ours <= MAX_HANDOFF_MS[engine])
            else:
                row.check(f"holdfast {median(found) / ours:.1f} x as fast, >= 1 x", median(found) >= ours)
            rows.append(row)
        yield Table(f"{engine}: hand-off to a process that waits, median", rows)


if __name__ == "__main__":
    wait_as_told(*sys.argv[1:])
