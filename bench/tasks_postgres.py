"""`TaskQueue` on PostgreSQL beside procrastinate and pgqueuer, on the same server, with its default durability.

One process puts empty tasks. Then two worker processes do them. Each waits in the handler of its tenth task until the
other one is there: that is the start. The end is the moment when the server has no task left that is not done, so
completions which a worker collects in memory are counted when they are committed. The contestants take turns, each
with a new database in every round. A ratio is the median of the ratios within a round.

procrastinate: a coroutine and `concurrency=30`, as in its guide, and the default pool of its connector. pgqueuer: its
psycopg driver, and batches of 10, its default.

A completion by hand is committed when `complete` returns, so each one waits for the disk. procrastinate commits each
completion, too, so the two are compared. pgqueuer collects completions in memory (`JobStatusLogBuffer`) and commits
many of them together, as a `Worker` and `durable=False` do, so these are compared.

`many`: claims while 100 tasks wait, and while as many wait and 10,000,000 are done.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from measure import Place, Row, Table, paired_ratio, run_children
from tasks import FEW, MANY_DONE, many_rows

from holdfast.tasks import Claim, TaskQueue, Worker

PROCESSES = 2
WARM_UP = 10
HAND, WORKER, COROUTINES = "holdfast, by hand", "holdfast Worker", "holdfast Worker, coroutine, concurrency=100"
GATHERED = "holdfast, by hand, durable=False"
PROCRASTINATE, PGQUEUER = "procrastinate, concurrency=30", "pgqueuer, psycopg driver"
AHEAD = {PROCRASTINATE: 3.0, PGQUEUER: 1.0}
BY_HAND = {PROCRASTINATE: HAND, PGQUEUER: GATHERED}  # with the same promise

clock = time.monotonic


class Race:
    """What the processes of one round share: how many tasks were begun, and when the last process was there."""

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 8 * 64)).cast("q")  # pairs: how many were begun, and at the start
        self._tickets, giver = os.pipe()
        os.write(giver, bytes(range(PROCESSES)))
        os.close(giver)
        self._me: int | None = None
        self.total = 0

    def begin(self) -> None:
        """Called by the handler of every task."""
        if self._me is None:
            self._me = os.read(self._tickets, 1)[0]
        at = 2 * self._me
        self._shared[at] += 1
        if self._shared[at] == WARM_UP:
            self._shared[at + 1] = time.monotonic_ns()
            while not all(self._shared[2 * each + 1] for each in range(PROCESSES)):
                time.sleep(0)

    @property
    def begun(self) -> int:
        return sum(self._shared[::2])

    @property
    def started(self) -> float:
        return max(self._shared[1::2]) / 1e9

    def close(self) -> None:
        os.close(self._tickets)

    @property
    def is_over(self) -> bool:
        return self.begun >= self.total


def _holdfast_put(url: str, number: int) -> None:
    queue = TaskQueue(url)
    queue.put_all(range(number))
    queue.close()


def _by_hand(url: str, race: Race, durable: bool = True) -> None:
    queue = TaskQueue(url, durable=durable)
    while (task := queue.claim()) is not None:
        race.begin()
        task.complete()
    queue.close()


def _gathered(url: str, race: Race) -> None:
    _by_hand(url, race, durable=False)


def _worker(url: str, race: Race) -> None:
    def handler(task: Claim) -> None:
        race.begin()

    Worker(TaskQueue(url), handler, concurrency=PROCESSES).run(drain=True)


def _coroutines(url: str, race: Race) -> None:
    async def handler(task: Claim) -> None:
        race.begin()

    Worker(TaskQueue(url), handler, concurrency=100).run(drain=True)


def _procrastinate(url: str, race: Race | None) -> Any:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="empty")
    async def empty() -> None:
        assert race is not None
        race.begin()

    return app, empty


def _procrastinate_put(url: str, number: int) -> None:
    async def main() -> None:
        app, empty = _procrastinate(url, None)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            for _ in range(number // 1000):
                await empty.batch_defer_async(*({} for _ in range(1000)))

    asyncio.run(main())


def _procrastinate_work(url: str, race: Race) -> None:
    async def main() -> None:
        app, _ = _procrastinate(url, race)
        async with app.open_async():
            await app.run_worker_async(concurrency=30, wait=False, install_signal_handlers=False)

    asyncio.run(main())


def _pgqueuer_put(url: str, number: int) -> None:
    async def main() -> None:
        import psycopg
        from pgqueuer.db import PsycopgDriver
        from pgqueuer.queries import Queries

        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            queries = Queries(PsycopgDriver(connection))
            await queries.install()
            for _ in range(number // 1000):
                await queries.enqueue(["empty"] * 1000, [None] * 1000, [0] * 1000)

    asyncio.run(main())


def _pgqueuer_work(url: str, race: Race) -> None:
    async def main() -> None:
        import psycopg
        from pgqueuer import PgQueuer
        from pgqueuer.db import PsycopgDriver
        from pgqueuer.models import Job

        connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
        queue = PgQueuer(PsycopgDriver(connection))

        @queue.entrypoint("empty")
        async def empty(job: Job) -> None:
            race.begin()

        async def stop() -> None:
            while not race.is_over:
                await asyncio.sleep(0.01)
            queue.shutdown.set()

        await asyncio.gather(queue.run(), stop())

    asyncio.run(main())


# How tasks are put, how a process works, how many such processes there are, and how many tasks are not done.
_LEFT = "select count(*) from holdfast_task where state in (0, 1)"
Contestant = tuple[Callable[[str, int], None], Callable[[str, Race], None], int, str]
CONTESTANTS: dict[str, Contestant] = {
    HAND: (_holdfast_put, _by_hand, PROCESSES, _LEFT),
    GATHERED: (_holdfast_put, _gathered, PROCESSES, _LEFT),
    WORKER: (_holdfast_put, _worker, 1, _LEFT),
    COROUTINES: (_holdfast_put, _coroutines, PROCESSES, _LEFT),
    PROCRASTINATE: (
        _procrastinate_put,
        _procrastinate_work,
        PROCESSES,
        "select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
    ),
    PGQUEUER: (_pgqueuer_put, _pgqueuer_work, PROCESSES, "select count(*) from pgqueuer"),
}


def _round(server: Any, name: str, number: int) -> float:
    """Seconds for a task."""
    import psycopg

    put, work, processes, left = CONTESTANTS[name]
    with server.connect("postgres", user="postgres") as admin:
        admin.execute("drop database if exists bench with (force)")
        admin.execute("create database bench owner tester")
        url = server.url("bench")
        run_children(1, lambda _: put(url, number))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("vacuum analyze")
        admin.execute("checkpoint")  # so that none pays for what another one wrote
        race, ended = Race(), 0.0
        race.total = number

        def watch() -> None:
            nonlocal ended
            deadline = clock() + 100
            while not race.is_over and clock() < deadline:
                time.sleep(0.001)
            with psycopg.connect(url, autocommit=True) as connection:
                while (connection.execute(left).fetchone() or (0,))[0] and clock() < deadline:
                    time.sleep(0.001)
            ended = clock()

        run_children(processes, lambda _: work(url, race), watch, limit=120)
        race.close()
        if race.begun != number:
            raise RuntimeError(f"{name}: {race.begun} of {number} tasks were done")
        return (ended - race.started) / (number - WARM_UP * PROCESSES)


def section(quick: bool, _: list[Place]) -> Iterator[Table]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import servers

    server = servers.Postgres.start({})
    try:
        number = 2000 if quick else 4000
        samples: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for turn in range((3 if quick else 7) + 1):
            for name in random.sample(list(CONTESTANTS), len(CONTESTANTS)):
                taken = _round(server, name, number)
                if turn:  # the first round warms up
                    samples[name].append(taken)
    finally:
        server.stop()
    yield _table(samples, number)


def _table(samples: dict[str, list[float]], number: int) -> Table:
    rows = []
    for name, mine in samples.items():
        row = Row(name, 1 / median(mine), "/s", raw=mine)
        if name in AHEAD:
            row.ratio = paired_ratio(mine, samples[WORKER])
            for ours, what in ((WORKER, "Worker"), (COROUTINES, "coroutines"), (BY_HAND[name], BY_HAND[name][10:])):
                ratio, target = paired_ratio(mine, samples[ours]), AHEAD[name]
                row.check(f"{what} {ratio:.2f} x, >= {target:g} x", ratio >= target)
            if name == PGQUEUER:
                row.note = f"{HAND[10:]} {paired_ratio(mine, samples[HAND]):.2f} x"
        rows.append(row)
    title = f"{number:,} empty tasks on PostgreSQL, fsync on, {PROCESSES} processes: how many times as fast holdfast is"
    return Table(title, rows)


def many(quick: bool, _: list[Place]) -> Iterator[Table]:
    """As `tasks.many`: claims with few tasks, and with 10,000,000 done ones (100,000 with --quick)."""
    import psycopg

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import servers

    server = servers.Postgres.start({"max_wal_size": "8GB"})
    done = 100_000 if quick else MANY_DONE
    try:
        with server.connect("postgres", user="postgres") as admin:
            admin.execute("create database bench owner tester")
        url = server.url("bench")
        queues = {}
        for name, prefix in ((f"{FEW:,} waiting", "few_"), (f"{done:,} done", "many_")):
            queues[name] = f"{url}?prefix={prefix}"
            TaskQueue(queues[name]).put_all({"n": n} for n in range(FEW))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(  # in one statement. To run so many would take an hour
                """insert into many_task (state, priority, ord, payload, attempts, tried, token, put_at, started_at,
                    ended_at) select 5, 0, n, '{"n": 1}', 3, 1, 1, now, now, now
                    from generate_series(1, %s) n, extract(epoch from clock_timestamp()) now""",
                (done,),
            )
            connection.execute("vacuum analyze")
        rows = many_rows(queues, 5 if quick else 9, (200, 400))
    finally:
        server.stop()
    yield Table("TaskQueue on PostgreSQL with few and with many tasks, fsync on", rows)
