"""Locks on PostgreSQL, etcd and Redis beside the bare calls of a client, and beside other packages, on the same server.

`engines`: acquire and release of a free lock. The floor is what any client has to send: one call that takes the lock,
and one that releases it if it is still ours.

`engines-handoff`: from one process's release to the moment when another, which was waiting, has the lock.

This file is also the program that waits: `engines.py WHAT URL`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from measure import Place, Row, Table, paired_ratio, python_loop, take_turns

RAW, OURS = "bare calls of the client", "holdfast.lock"
MAX_RATIO = 1.3
MAX_HANDOFF_MS = {"PostgreSQL": 3.0, "Redis": 3.0, "etcd": 5.0}
SETTLE_S = 0.05
# Releases only if the value is still ours, as every careful client does.
_COMPARE_AND_DELETE = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
)

# By engine and contestant: set-up and loop, with {url}, {host} and {port} of the server.
LOOPS: dict[str, dict[str, tuple[str, str]]] = {
    "PostgreSQL": {
        RAW: (
            "import psycopg; c = psycopg.connect({url!r}, autocommit=True)",
            "c.execute('select pg_try_advisory_lock(5)').fetchone(); "
            "c.execute('select pg_advisory_unlock(5)').fetchone()",
        ),
        OURS: ("import holdfast; lock = holdfast.lock({url!r} + '?name=bench')", "lock.acquire().release()"),
    },
    "Redis": {
        RAW: (
            f"import redis; c = redis.Redis.from_url({{url!r}}); release = c.register_script({_COMPARE_AND_DELETE!r})",
            "c.set('bench', 'me', nx=True, px=10_000); release(keys=['bench'], args=['me'])",
        ),
        OURS: ("import holdfast; lock = holdfast.lock({url!r} + '/bench')", "lock.acquire().release()"),
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
            "key = {{'key': 'YQ==', 'value': ''}}; "
            "call = lambda what, sent: c.request('POST', '/v3/kv/' + what, json.dumps(sent)) or c.getresponse().read()",
            "call('put', key); call('deleterange', {{'key': 'YQ=='}})",
        ),
        OURS: ("import holdfast; lock = holdfast.lock({url!r} + '/bench')", "lock.acquire().release()"),
        "etcd3gw lock": (
            "import etcd3gw; c = etcd3gw.Etcd3Client({host!r}, {port}, api_path='/v3/'); lock = c.lock('gw', ttl=10)",
            "lock.acquire(); lock.release()",
        ),
    },
}


def make_lock(what: str, url: str, host: str, port: int) -> Any:
    """The lock of a contestant, with `acquire` and `release`."""
    if what == OURS:
        import holdfast

        return holdfast.lock(url + ("?name=handoff" if url.startswith("postgresql") else "/handoff"))
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

    return etcd3gw.Etcd3Client(host, port, api_path="/v3/").lock("handoff-etcd3gw", ttl=10)


def wait_as_told(what: str, url: str, host: str, port: int) -> None:
    lock = make_lock(what, url, host, port)
    for _ in sys.stdin:
        print("acquiring", flush=True)
        held = lock.acquire()
        while held is False:  # etcd3gw does not wait
            held = lock.acquire()
        now = time.monotonic_ns()
        (held if what == OURS else lock).release()
        print(now, flush=True)


def handoffs(what: str, url: str, host: str, port: int, rounds: int) -> list[float]:
    """Milliseconds from the release to the acquisition by the other process, in each round."""
    command = [sys.executable, __file__, what, url, host, str(port)]
    lock = make_lock(what, url, host, port)
    found = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waiter:
        assert waiter.stdin and waiter.stdout
        for _ in range(rounds):
            held = lock.acquire()
            waiter.stdin.write("go\n")
            waiter.stdin.flush()
            waiter.stdout.readline()
            time.sleep(SETTLE_S)
            released = time.monotonic_ns()
            (held if what == OURS else lock).release()
            found.append((int(waiter.stdout.readline()) - released) / 1e6)
        waiter.stdin.close()
    return found


def _servers() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import servers

    return {"PostgreSQL": servers.Postgres.start({}), "Redis": servers.Redis.start(), "etcd": servers.Etcd.start()}


def _url(engine: str, server: Any) -> str:
    if engine == "PostgreSQL":
        with server.connect("postgres", user="postgres") as admin:
            admin.execute("drop database if exists bench with (force)")
            admin.execute("create database bench owner tester")
        return str(server.url("bench"))
    return f"redis://127.0.0.1:{server.port}/0" if engine == "Redis" else f"etcd://127.0.0.1:{server.port}"


def section(quick: bool, _: list[Place]) -> Iterator[Table]:
    started = _servers()
    try:
        for engine, loops in LOOPS.items():
            url, port = _url(engine, started[engine]), started[engine].port
            given = {"url": url, "host": "127.0.0.1", "port": port}
            commands = {name: python_loop(*(text.format(**given) for text in loop)) for name, loop in loops.items()}
            samples = take_turns(commands, 10 if quick else 30, 1 if quick else 3)
            rows = []
            for name, mine in samples.items():
                row = Row(name, median(mine) * 1e6, ratio=paired_ratio(mine, samples[RAW]), raw=mine)
                if name == OURS:
                    row.at_most(MAX_RATIO)
                elif name != RAW:
                    ahead = paired_ratio(mine, samples[OURS])
                    row.check(f"holdfast {ahead:.2f} x as fast, >= 1 x", ahead >= 1)
                rows.append(row)
            yield Table(f"{engine}: acquire and release of a free lock", rows)
    finally:
        for server in started.values():
            server.stop()


def handoff_section(quick: bool, _: list[Place]) -> Iterator[Table]:
    started = _servers()
    try:
        for engine, loops in LOOPS.items():
            url, port = _url(engine, started[engine]), started[engine].port
            rows = []
            ours = 0.0
            for name in loops:
                if name == RAW:
                    continue
                found = handoffs(name, url, "127.0.0.1", port, 20 if quick else 100)
                row = Row(name, median(found), "ms", note=f"90 % within {quantiles(found, n=10)[-1]:.1f} ms", raw=found)
                if name == OURS:
                    ours = median(found)
                    row.check(f"<= {MAX_HANDOFF_MS[engine]:g} ms", ours <= MAX_HANDOFF_MS[engine])
                else:
                    row.check("behind holdfast", median(found) >= ours)
                rows.append(row)
            yield Table(f"{engine}: hand-off to a process that waits, median", rows)
    finally:
        for server in started.values():
            server.stop()


if __name__ == "__main__":
    wait_as_told(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
