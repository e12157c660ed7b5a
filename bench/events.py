"""`EventStore` beside a loop of write and fdatasync: durable appends, and a store of a million events."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from threading import Thread

from events_contest import Contest, at_least, event, line_of, raw_appender
from events_peers import Eventsourcing
from measure import JOURNALLED, Place, Row, Table, paired_ratio, run_children

from holdfast.events import AppendCondition, Event, EventStore, Query

ONE_THREAD, THREADS, CONDITION, AT_A_MILLION = 0.9, 3.0, 1.15, 1.3
PROCESSES = {"journal": 1.6, "none": 1.2}
P99_MS = 5.0
READ_PER_SECOND, BY_TAG_MS, OPEN_MS, MEMORY_MB = 300_000, 1.0, 100.0, 200.0
MILLION = 1_000_000


def bare_appender(place: str, line: bytes) -> Callable[[int], object]:
    """What the rules ask for, and nothing else: the lock, what it names, ledger, end, room, and the turn to sync."""
    import fcntl

    lock, ledger = os.open(f"{place}/lock", os.O_RDWR | os.O_CREAT), os.open(f"{place}/mark", os.O_RDWR | os.O_CREAT)
    log = os.open(f"{place}/bare", os.O_RDWR | os.O_CREAT)
    end, size = [0], [0]

    def append(_: int) -> None:
        os.access(f"{place}/queue", 0)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(f"{place}/lock")
        os.stat(f"{place}/mark")
        os.pread(log, 3, end[0])
        if end[0] + len(line) > size[0]:
            size[0] += os.pwrite(log, b"\n" * (1 << 18), size[0])
        end[0] += os.pwrite(log, line, end[0])
        os.stat(f"{place}/lock")
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.access(f"{place}/queue", 0)
        fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fdatasync(log)
        fcntl.flock(ledger, fcntl.LOCK_UN)

    return append


RAW = "raw Python: write + fdatasync"
BARE = "the system calls of the rules alone"


def durable(quick: bool, place: Place) -> Table:
    """One thread, and sixteen."""
    room = place.directory
    line = line_of(room)
    contest = Contest(100)
    store = EventStore(f"{room}/one")
    contest.add(RAW, raw_appender(room, line))
    contest.add(BARE, bare_appender(room, line))
    contest.add("holdfast: one thread", lambda n: store.append(event(n)))
    contest.add(
        "holdfast: one thread, conditional",
        lambda n: store.append(event(n), AppendCondition(Query.of(types={"OrderPlaced"}, tags={f"order:{n}"}))),
    )
    contest.run(10 if quick else 40)
    rows = [
        contest.row(RAW, RAW),
        contest.row(BARE, RAW),
        at_least(contest.row("holdfast: one thread", RAW), ONE_THREAD),
        contest.row("holdfast: one thread, conditional", RAW),
    ]
    times = contest.samples
    over = Row(
        "conditional over unconditional",
        ratio=paired_ratio(times["holdfast: one thread, conditional"], times["holdfast: one thread"]),
    )
    over.at_most(CONDITION)
    rows += [over, _threads(quick, room, line)]
    return Table(f"EventStore, durable appends of {len(line)} bytes, {place.kind}: times as many per second", rows)


def _threads(quick: bool, room: str, line: bytes) -> Row:
    threads, each = 16, 60 if quick else 200
    raw = raw_appender(room, line)
    ratios, values = [], []
    store = EventStore(f"{room}/threads")
    for _ in range(3 if quick else 7):
        began = time.perf_counter()
        for n in range(200):
            raw(n)
        floor = (time.perf_counter() - began) / 200

        def work() -> None:
            for n in range(each):
                store.append(event(n))

        running = [Thread(target=work) for _ in range(threads)]
        began = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        value = (time.perf_counter() - began) / (threads * each)
        values.append(value)
        ratios.append(floor / value)
    return at_least(Row("holdfast: 16 threads", median(values) * 1e6, "µs", median(ratios), raw=ratios), THREADS)


def processes(quick: bool, places: list[Place]) -> Iterator[Table]:
    with ExitStack() as stack:
        rooms = {f"{places[0].kind} here": (places[0].directory, PROCESSES["none"])}
        loop = stack.enter_context(journalled(places[0].directory))
        if loop is not None:
            rooms["ext4 with a journal, on a loop device"] = (loop, PROCESSES["journal"])
        else:
            print("cannot mount a loop device: the figures of ext4 with a journal are left out")
        for name, (room, target) in rooms.items():
            line = line_of(room)
            rows = [_several(quick, room, line, many, target) for many in (4, 8)]
            yield Table(f"EventStore, durable, several processes, {name}: times raw, which is one process", rows)


def _several(quick: bool, room: str, line: bytes, many: int, target: float) -> Row:
    seconds = 1.0 if quick else 2.0
    raw = raw_appender(room, line)
    ratios, worst, rates = [], [], []
    for turn in range(2 if quick else 5):
        path = f"{room}/{many}-{turn}"
        EventStore(path)
        began = time.perf_counter()
        count = 0
        while time.perf_counter() - began < seconds / 2:
            raw(count)
            count += 1
        floor = count / (time.perf_counter() - began)

        def work(child: int, path: str = path) -> tuple[int, float]:
            store = EventStore(path, lock_timeout=60)
            store.append(event(child))
            times = []
            end = time.perf_counter() + seconds
            while (began := time.perf_counter()) < end:
                store.append(event(len(times)))
                times.append(time.perf_counter() - began)
            return len(times), sorted(times)[int(len(times) * 0.99)] * 1e3

        results = run_children(many, work)
        rates.append(sum(count for count, _ in results) / seconds)
        ratios.append(rates[-1] / floor)
        worst.append(max(p99 for _, p99 in results))
    row = Row(f"holdfast: {many} processes", median(rates), "a second", median(ratios), raw=ratios)
    row.check(f">= {target:g} x", median(ratios) >= target)
    row.check(f"p99 {median(worst):.1f} ms, <= {P99_MS:g}", median(worst) <= P99_MS)
    return row


@contextmanager
def journalled(directory: str, megabytes: int = 512) -> Iterator[str | None]:
    """A file system ext4 with a journal, where that can be mounted."""
    image, where = f"{directory}/ext4.image", f"{directory}/{JOURNALLED}"
    os.mkdir(where)
    with open(image, "wb") as file:
        file.truncate(megabytes << 20)
    made = os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None
    made = made and subprocess.run(["mkfs.ext4", "-q", "-F", image], check=False).returncode == 0
    made = made and subprocess.run(["mount", "-o", "loop", image, where], check=False).returncode == 0
    try:
        yield where if made else None
    finally:
        if made:
            subprocess.run(["umount", "--lazy", where], check=False)
        os.unlink(image)


# A million.


def fill(path: str, many: int, first: int = 0) -> EventStore:
    store = EventStore(path, durable=False)
    for start in range(first, first + many, 1000):
        store.append([event(n) for n in range(start, min(start + 1000, first + many))])
    return store


def million(quick: bool, place: Place) -> Table:
    many = 100_000 if quick else MILLION
    large, small = f"{place.directory}/large", f"{place.directory}/small"
    fill(large, many)
    fill(small, 1000)
    rows = [_open(large), *_read(quick, large, place.directory), _by_tag(large, many), _memory(large)]
    contest = Contest(50)
    for name, path in (("at 1,000", small), (f"at {many:,}", large)):
        for what, unless in (("unconditional", False), ("conditional, whole history", True)):
            store = EventStore(path)
            contest.add(f"{what}, {name}", _appender(store, unless))
    contest.run(10 if quick else 40)
    names = list(contest.samples)
    rows += [contest.row(name, names[0]) for name in names]
    for what, at, before in (("conditional", 3, 1), ("unconditional", 2, 0)):
        row = Row(
            f"{what}: at {many:,} over at 1,000",
            ratio=paired_ratio(contest.samples[names[at]], contest.samples[names[before]]),
        )
        row.at_most(AT_A_MILLION)
        rows.append(row)
    return Table(f"EventStore with {many:,} events, {place.kind}", rows)


def _appender(store: EventStore, unless: bool) -> Callable[[int], object]:
    def append(number: int) -> None:
        tag = f"new:{number}:{os.urandom(4).hex()}"
        condition = AppendCondition(Query.of(types={"Late"}, tags={tag})) if unless else None
        store.append(Event("Late", {"id": number}, tags={tag}), condition)

    return append


def _open(path: str) -> Row:
    times = []
    for _ in range(9):
        began = time.perf_counter()
        store = EventStore(path)
        store.head()
        assert store.read_last() is not None
        times.append((time.perf_counter() - began) * 1e3)
    row = Row("open, and read the last event", median(times), "ms", raw=times)
    row.check(f"< {OPEN_MS:g} ms", median(times) < OPEN_MS)
    return row


def _read(quick: bool, path: str, room: str) -> list[Row]:
    rates, theirs = [], []
    peer = None
    try:
        peer = Eventsourcing(f"{room}/eventsourcing")
    except ImportError as error:
        print(f"eventsourcing is left out: {error}")
    if peer is not None:
        for start in range(0, 50_000, 1000):
            peer.append([event(n) for n in range(start, start + 1000)])
    for _ in range(3):
        began = time.perf_counter()
        count = sum(1 for _ in EventStore(path).read())
        rates.append(count / (time.perf_counter() - began))
        if peer is not None:
            began = time.perf_counter()
            theirs.append(peer.read() / (time.perf_counter() - began))
    rows = [Row("full read", median(rates), "events a second", raw=rates)]
    if theirs:
        rows.append(Row("full read, eventsourcing with SQLite", median(theirs), "events a second", raw=theirs))
    goal = min([READ_PER_SECOND, *([median(theirs)] if theirs else [])])
    rows[0].check(f">= {goal:,.0f}", median(rates) >= goal)
    return rows


def _by_tag(path: str, many: int) -> Row:
    """A tag that ten events have."""
    marker = f"ten:{os.urandom(4).hex()}"
    store = EventStore(path, durable=False)
    times = []
    wanted = Query.of(tags={marker})
    for _ in range(10):
        store.append(Event("Ten", {}, tags={marker}))
    fill(path, 30_000, first=many * 2)  # so that they are in the index, not in the segment that grows
    store = EventStore(path)
    list(store.read(wanted))
    for _ in range(50):
        began = time.perf_counter()
        assert len(list(store.read(wanted))) == 10
        times.append((time.perf_counter() - began) * 1e3)
    row = Row("10 events by tag", median(times), "ms", raw=times)
    row.check(f"< {BY_TAG_MS:g} ms", median(times) < BY_TAG_MS)
    return row


def _memory(path: str) -> Row:
    """Of a process that has it open and has used it: all of it, with Python."""
    code = (
        "import sys, resource; from holdfast.events import *; s = EventStore(sys.argv[1]); s.append(Event('M'));"
        "list(s.read(Query.of(tags={'customer:7'}), limit=10)); s.read_last();"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    used = float(subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True).stdout)
    row = Row("memory of a process that has it open", used, "MB")
    row.check(f"< {MEMORY_MB:g} MB", used < MEMORY_MB)
    return row
