"""The web console: how long a page takes with 1,000,000 tasks and events, and what 50 open pages cost.

`page`: from the request to the whole answer, over HTTP, the median of 10, after one request that counts separately: the
index of an event store, for instance, reads what was appended since its last use.

`idle`: the processor time of the server within 70 s in which nothing happens, while 50 different pages of it are open.

`until it is shown`: from the end of a put to the arrival of the new page in one of 50 open pages.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from measure import Place, Row, Table

from holdfast.events import EventStore
from holdfast.tasks import TaskQueue

MANY, FEW = 1_000_000, 100_000
PAGE_MS = 200.0
PAGES, IDLE_S, IDLE_SHARE = 50, 70.0, 0.02
QUEUE = ["", "?state=pending", "?state=done", "?function=resize", "?key=k3", "?text=img-77", "?text=nowhere"]
STORE = ["", "?type=OrderPaid", "?tag=customer:7", "?type=OrderPaid&tag=order:7"]


def section(quick: bool, place: Place) -> Table:
    tests = Path(__file__).parent.parent / "tests"
    sys.path[:0] = [str(tests), str(tests / "web")]
    from console_server import ConsoleServer, slug
    from large import fill_queue, fill_store

    number = FEW if quick else MANY
    queue = TaskQueue(f"{place.directory}/jobs")
    fill_queue(queue, number)
    waiting = TaskQueue(f"{place.directory}/waiting")
    fill_queue(waiting, number, only_waiting=True)
    fill_store(EventStore(f"{place.directory}/shop"), number)
    rows = []
    with ConsoleServer(place.directory) as server:
        jobs, shop = slug(server, "queue", "jobs"), slug(server, "store")
        paths = ["/", "/queues", "/stores", "/metrics", slug(server, "queue", "waiting")]
        for path in [*paths, *(f"{jobs}{query}" for query in QUEUE), *(f"{shop}{query}" for query in STORE)]:
            rows.append(_page(server, path, path.replace(jobs, "queue").replace(shop, "store")))
        rows += _open_pages(server, queue, jobs, shop)
    return Table(f"holdfast web with {number:,} tasks and events, {place.kind}", rows)


def _page(server: Any, path: str, name: str) -> Row:
    first, *times = [_milliseconds(server, path) for _ in range(11)]
    row = Row(f"page {name}", median(times), "ms", raw=times, note=f"the first one {first:.0f} ms")
    row.check(f"< {PAGE_MS:g} ms", median(times) < PAGE_MS)
    return row


def _milliseconds(server: Any, path: str) -> float:
    began = time.perf_counter()
    answer = server.get(path)
    assert answer.status == 200, path
    return (time.perf_counter() - began) * 1000


def _open_pages(server: Any, queue: TaskQueue, jobs: str, shop: str) -> list[Row]:
    from console_server import Stream

    paths = ["/", "/locks", jobs, shop, f"{jobs}?state=failed"]
    with ExitStack() as stack:
        streams = [
            stack.enter_context(Stream(server, f"{path}{'&' if '?' in path else '?'}n={number}"))
            for number in range(PAGES // len(paths))
            for path in paths
        ]
        for stream in streams:
            stream.next()
        _until_quiet(server.pid)
        before = _cpu(server.pid)
        time.sleep(IDLE_S)
        used = _cpu(server.pid) - before
        idle = Row(f"CPU time of an idle second, {len(streams)} open pages", used / IDLE_S * 1000, "ms")
        idle.check(f"< {IDLE_SHARE * 1000:g} ms", used / IDLE_S < IDLE_SHARE)
        times = [_shown(queue, streams[2], number) for number in range(5)]
        return [idle, Row(f"until it is shown, {len(streams)} open pages", median(times), "ms", raw=times)]


def _until_quiet(pid: int) -> None:
    """The pages look again after they have opened."""
    used = _cpu(pid)
    while True:
        time.sleep(3)
        if _cpu(pid) - used < 0.05:
            return
        used = _cpu(pid)


def _shown(queue: TaskQueue, stream: Any, number: int) -> float:
    queue.put(number, id=f"shown-{number}")
    began = time.perf_counter()
    stream.until(f"task-shown-{number}")
    return (time.perf_counter() - began) * 1000


def _cpu(pid: int) -> float:
    """Seconds of processor time, by the scheduler, in nanoseconds."""
    return sum(
        int(task.joinpath("schedstat").read_text().split()[0]) / 1e9 for task in Path(f"/proc/{pid}/task").iterdir()
    )
