"""How locks on PostgreSQL, etcd, Redis and SMB scale: many waiters for one lock, and many locks that are held at once.

`waiters`: a process holds a lock. 10 others with 100 threads each wait for it: threads, because the callers of most
programs are threads, and 10 processes, because 1,000 interpreters would measure the memory of Python. Then the holder
releases, and every waiter takes its turn and releases at once. The order that the server shows in `status` before is
compared with the order of the tokens.

`held`: 10 processes acquire 1,000 locks each, with names of their own, and keep them for more than one time to live.

SMB has no queue, and its waiters all try again after each release. So `waiters` is left out there.

CPU time and memory (proportional set size) are read from /proc, of all processes of the server and of the clients. What
was there before the locks is subtracted.

This file is also the client: `scale.py wait URL NUMBER` and `scale.py hold URL NUMBER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import lock_url, start, url_of
from measure import Place, Row, Table

PROCESSES = 10
KEPT_S = 12.0  # longer than the time to live, which is 10 s on etcd and Redis
STANDING_S = 5.0
MAX_ARRIVAL_S = 40.0
MILLION = 1_000_000
MAX_CONNECTIONS = 30
ETCD_QUOTA = 2_000_000
SMB_FILES = 200
_TICK = os.sysconf("SC_CLK_TCK")

clock = time.monotonic


# The client.


def wait_as_told(url: str, number: int) -> None:
    import holdfast

    lock: Any = holdfast.lock(url)
    served: list[tuple[int, float]] = []
    errors: list[str] = []

    def take_turn() -> None:
        try:
            with lock.acquire() as hold:
                served.append((hold.token, clock()))
        except holdfast.HoldfastError as error:
            errors.append(f"{type(error).__name__}: {error}")

    lock.status()
    print("null", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=take_turn) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"served": served, "errors": errors}), flush=True)
    sys.stdin.readline()


def hold_as_told(url: str, number: int) -> None:
    import holdfast

    def name(index: int) -> str:
        return lock_url(url, f"{os.getpid()}-{index}")

    first: Any = holdfast.lock(name(number))  # opens the connections
    first.acquire().release()
    print("null", flush=True)
    sys.stdin.readline()
    holds = [holdfast.lock(name(index)).acquire() for index in range(number)]
    print("null", flush=True)
    sys.stdin.readline()
    lost = sum(hold.lost for hold in holds)
    for hold in holds:
        hold.release()
    print(json.dumps(lost), flush=True)
    sys.stdin.readline()


class Client:
    """A process that waits or holds."""

    def __init__(self, what: str, url: str, number: int) -> None:
        command = [sys.executable, __file__, what, url, str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def go_on(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("go on\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a client has ended")
        return json.loads(line)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()


# What /proc shows.


@dataclass(frozen=True)
class Usage:
    """CPU time, and memory in bytes, of some processes."""

    cpu_s: float
    memory: float

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s - other.cpu_s, self.memory - other.memory)


def usage(root: int, others: list[int]) -> Usage:
    """root: its threads and children may have ended, and count. The others have one thread each, and no children."""
    cpu_s = memory = 0.0
    for pid in (root, *others):
        try:
            if pid == root:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                cpu_s += sum(map(int, fields[11:15])) / _TICK
            else:  # a tick is too coarse for 1,000 processes
                cpu_s += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        memory += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return Usage(cpu_s, memory)


@dataclass(frozen=True)
class Lap:
    seconds: float
    clients: Usage
    server: Usage


class Watched:
    """A server and its clients. `lap` returns what both have used since the last lap."""

    def __init__(self, server: Any, clients: list[Client]) -> None:
        self._root = getattr(server, "nodes", [server])[0].process.pid
        self._clients = [client.pid for client in clients]
        self._last = self._now()
        self._at = clock()

    def _now(self) -> tuple[Usage, Usage]:
        from servers import descendants

        clients = [usage(pid, []) for pid in self._clients]
        total = Usage(sum(each.cpu_s for each in clients), sum(each.memory for each in clients))
        return total, usage(self._root, descendants(self._root))

    def lap(self, beside: Lap | None = None) -> Lap:
        """What was used since the last lap. beside: an idle lap, whose CPU time is subtracted."""
        now, at = self._now(), clock()
        seconds = at - self._at
        used = [now[index] - self._last[index] for index in range(2)]
        if beside is not None:
            used = [
                Usage(mine.cpu_s - idle.cpu_s / beside.seconds * seconds, mine.memory)
                for mine, idle in zip(used, (beside.clients, beside.server), strict=True)
            ]
        self._last, self._at = now, clock()
        return Lap(seconds, *used)


def descriptors(pids: list[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


# The measurements.


def _rows(what: str, number: float, lap: Lap, *, memory: bool = True) -> list[Row]:
    rows = []
    for name, used in (("clients", lap.clients), ("server", lap.server)):
        rows.append(Row(f"{what}: CPU time, {name}", used.cpu_s / number * 1e6, "µs"))
        if memory:
            rows.append(Row(f"{what}: memory, {name}", used.memory / number / 1024, "KiB"))
    return rows


def _waiting(lock: Any) -> int:
    """How many wait. While they arrive all at once, the server may be too busy to tell in time."""
    import holdfast

    try:
        return len(lock.status().waiters)
    except holdfast.ConnectionFailed:
        return 0


def waiters(engine: str, server: Any, url: str, number: int) -> Table:
    import holdfast

    lock: Any = holdfast.lock(lock_url(url, "waiters"))
    hold = lock.acquire()
    with ExitStack() as stack:
        each = number // PROCESSES
        clients = [stack.enter_context(Client("wait", lock_url(url, "waiters"), each)) for _ in range(PROCESSES)]
        for client in clients:
            client.answer()
        watched = Watched(server, clients)
        for client in clients:
            client.go_on()
        deadline = clock() + MAX_ARRIVAL_S
        while _waiting(lock) < number and clock() < deadline:
            time.sleep(0.2)
        arrived = watched.lap()
        open_files = descriptors([client.pid for client in clients])
        queue = [waiter.pid for waiter in lock.status().waiters]
        watched.lap()
        time.sleep(STANDING_S)
        standing = watched.lap()
        released = clock()
        hold.release()
        answers = {client.pid: client.answer() for client in clients}
        took = watched.lap()
    served = sorted((token, pid, at) for pid, answer in answers.items() for token, at in answer["served"])
    errors = [error for answer in answers.values() for error in answer["errors"]]
    out_of_order = sum(pid != expected for (_, pid, _), expected in zip(served, queue, strict=False))
    last = max(at for _, _, at in served) - released
    rows = [
        Row(
            "until all wait",
            arrived.seconds,
            "s",
            note=f"{open_files / number:.1f} descriptors of the clients for each",
        ),
        *_rows("to arrive", number, arrived),
        *_rows("to wait for a minute", number * standing.seconds / 60, standing, memory=False),
        Row("until all were served", last, "s"),
        *_rows("a turn", number, took, memory=False),
        Row("served", len(served), ""),
    ]
    rows[-1].check(f"{number} served", len(served) == number)
    rows[-1].check("in the order of the queue", not out_of_order)
    rows[-1].note = f"{out_of_order} by another process than the queue showed" + (f"; {errors[0]}" if errors else "")
    return Table(f"{engine}: {number:,} waiters on one lock, {PROCESSES} processes, for each waiter", rows)


def _connections(engine: str, server: Any) -> int | None:
    if engine == "PostgreSQL":
        with server.connect("postgres", user="postgres") as admin:
            query = "select count(*) from pg_stat_activity where datname = 'bench'"
            return int(admin.execute(query).fetchone()[0])
    return len(server.client().client_list()) - 1 if engine == "Redis" else None


def held(engine: str, server: Any, url: str, number: int) -> Table:
    with ExitStack() as stack:
        clients = [stack.enter_context(Client("hold", url, number // PROCESSES)) for _ in range(PROCESSES)]

        def next_phase() -> list[Any]:
            for client in clients:
                client.go_on()
            return [client.answer() for client in clients]

        for client in clients:
            client.answer()
        watched = Watched(server, clients)
        time.sleep(STANDING_S)
        idle = watched.lap()
        next_phase()
        acquired = watched.lap()
        connections = _connections(engine, server)
        open_files = descriptors([client.pid for client in clients])
        time.sleep(KEPT_S)
        kept = watched.lap(beside=idle)
        lost = sum(next_phase())
        released = watched.lap()
    renewal = _rows("to keep it for a second", number * kept.seconds, kept, memory=False)
    rows = [
        Row("until all were held", acquired.seconds, "s"),
        *_rows("to acquire", number, acquired),
        *renewal,
        Row("until all were released", released.seconds, "s"),
        *_rows("to release", number, released, memory=False),
        Row("connections", connections, "", note=f"{open_files} descriptors of all clients"),
        Row("lost", lost, ""),
    ]
    rows[-1].check("none lost", not lost)
    if engine == "PostgreSQL" and connections is not None:
        rows[-2].check(f"< {MAX_CONNECTIONS}", connections < MAX_CONNECTIONS)
    rows += _of_a_million(number, acquired, kept)
    return Table(f"{engine}: {number:,} locks held at once by {PROCESSES} processes, for each lock", rows)


def _of_a_million(number: int, acquired: Lap, kept: Lap) -> list[Row]:
    rows = []
    for name in ("clients", "server"):
        first, later = getattr(acquired, name), getattr(kept, name)
        gib = (first.memory + later.memory) / number * MILLION / (1 << 30)
        rows.append(Row(f"a million, calculated: memory, {name}", gib, "GiB"))
        cores = later.cpu_s / kept.seconds / number * MILLION
        rows.append(Row(f"a million, calculated: processors, {name}", cores, ""))
    return rows


# The limits.


def _until_it_fails(make: Callable[[int], Any], number: int) -> str:
    """Acquire until an error. Return its text."""
    import holdfast

    holds: list[Any] = []
    try:
        for index in range(number):
            holds.append(make(index))
    except holdfast.HoldfastError as error:
        return f"{len(holds):,} held: {type(error).__name__}: {error}"
    finally:
        for hold in holds:
            try:
                hold.release()
            except holdfast.HoldfastError:  # the same limit, or lost
                pass
    return f"{len(holds):,} held, no error"


def limits(engine: str, server: Any, url: str) -> Table:
    """Reach each limit, and see that the error names the setting."""
    import holdfast

    def hold(index: int) -> Any:
        return holdfast.lock(lock_url(url, f"{'x' * 200}-{index}")).acquire(timeout=10)

    def share(_: int) -> Any:  # on PostgreSQL, each of these has a session of its own
        return holdfast.lock(lock_url(url, "shared"), shared=True).acquire(timeout=10)

    rows = []
    for setting, prepare in LIMITS[engine].items():
        undo = prepare(server)
        text = _until_it_fails(share if setting in ("max_connections", "ulimit -n") else hold, 50_000)
        undo()
        row = Row(setting, note=text)
        row.check("the error names it", setting in text)
        rows.append(row)
    return Table(f"{engine}: at the limit", rows)


def _nothing() -> None: ...


def _open_files(_: Any) -> Callable[[], None]:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _max_memory(server: Any) -> Callable[[], None]:
    server.client().config_set("maxmemory", server.client().info("memory")["used_memory"] + 500_000)

    def undo() -> None:
        server.client().config_set("maxmemory", 0)

    return undo


LIMITS: dict[str, dict[str, Callable[[Any], Callable[[], None]]]] = {
    "PostgreSQL": {
        "ulimit -n": _open_files,
        "max_connections": lambda _: _nothing,
        "max_locks_per_transaction": lambda _: _nothing,
    },
    "Redis": {"maxmemory": _max_memory},
    "etcd": {"quota-backend-bytes": lambda _: _nothing},
    "SMB": {"max open files": lambda _: _nothing},
}


MEASURED: dict[str, Callable[..., Table]] = {"waiters": waiters, "held": held, "limits": limits}
# PostgreSQL reserves memory for locks at its start. Its check for deadlocks does not end with so many: docs/scale.md.
SETTINGS: dict[str, dict[str, object]] = {
    "waiters": {"max_connections": 1100, "deadlock_timeout": "1h"},
    "held": {"max_connections": MAX_CONNECTIONS, "max_locks_per_transaction": 400},
    "limits": {"max_connections": 20, "max_locks_per_transaction": 10},
}


def _start(engine: str, what: str) -> Any:
    if engine not in ("etcd", "SMB") or what != "limits":
        return start(engine, SETTINGS[what])
    import servers

    class SmallSamba(servers.Samba):
        def configure(self) -> None:
            super().configure()
            file = self.directory / "smb.conf"
            file.write_text(file.read_text().replace("[global]", f"[global]\n  max open files = {SMB_FILES}"))

    if engine == "SMB":
        return SmallSamba.start()

    class SmallNode(servers.EtcdNode):
        def command(self) -> list[object]:
            return [*super().command(), f"--quota-backend-bytes={ETCD_QUOTA}"]

    server = servers.Etcd([SmallNode(servers.installed("etcd-server", lambda: servers.program("etcd")), "n0")])
    server.nodes[0].choose_port()
    server.restart()
    return server


def section(quick: bool, _: list[Place]) -> Iterator[Table]:
    for engine in LIMITS:
        for what, measure in MEASURED.items():
            if engine == "SMB" and what == "waiters":
                continue
            number = {"waiters": 1000, "held": 10_000}.get(what, 0) // (10 if quick else 1)
            server = _start(engine, what)
            try:
                url = url_of(engine, server)
                yield measure(engine, server, url, number) if measure is not limits else limits(engine, server, url)
            finally:
                server.stop()


if __name__ == "__main__":
    {"wait": wait_as_told, "hold": hold_as_told}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
