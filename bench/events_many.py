"""`EventStore` with ten million events and a million tags: what must not grow with the history.

The log is generated, and indexed, before anything is measured: 2.2 GB, and 0.6 GB of index. All events carry one tag.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from zlib import crc32

from events_contest import Contest
from measure import Place, Row, Table, paired_ratio

from holdfast.events import AppendCondition, Event, EventStore, Query

MANY, TAGS, SEGMENT = 10_000_000, 1_000_000, 2 << 20
CONDITION, OPEN_MS, MEMORY_MB = 1.3, 50.0, 80.0
KINDS = ("OrderPlaced", "OrderPaid", "MailSent")


def generate(path: str, many: int, tags: int = TAGS) -> None:
    """What as many appends would have written, without them."""
    tag = b"%08x" % crc32(EventStore(path, durable=False).id.encode())
    lines: list[bytes] = []
    first, size = 1, 0
    for position in range(1, many + 2):
        text = (
            f'{{"position":{position},"id":"{position:032x}","time":"2026-01-31T12:00:00.123456Z",'
            f'"type":"{KINDS[position % 3]}","tags":["customer:{position * 7919 % tags}","shop"],'
            f'"data":{{"id":{position},"total":19.9}},"metadata":{{}},"batch":[{position},{position},{position - 1}]'
        ).encode()
        line = b'%s,"sum":"%s%08x"}\n' % (text, tag, crc32(text))
        if size + len(line) > SEGMENT or position > many:
            with open(f"{path}/events/{first:010d}.jsonl", "wb") as file:
                file.write(b"".join(lines))
            lines, first, size = [], position, 0
        lines.append(line)
        size += len(line)


def section(quick: bool, place: Place) -> Table:
    many = 1_000_000 if quick else MANY
    large, small = f"{place.directory}/large", f"{place.directory}/small"
    generate(large, many)
    began = time.perf_counter()
    EventStore(large).rebuild_index()
    rows = [Row("building the index", time.perf_counter() - began, "s")]
    store = EventStore(small, durable=False)
    for number in range(1000):
        store.append(Event(KINDS[number % 3], {"id": number}, tags={f"customer:{number}", "shop"}))
    contest = Contest(30)
    for what, query in QUERIES.items():
        for name, path in (("at 1,000", small), (f"at {many:,}", large)):
            contest.add(f"{what}, {name}", _appender(EventStore(path), query))
    contest.run(8 if quick else 30)
    for what in QUERIES:
        names = [f"{what}, at 1,000", f"{what}, at {many:,}"]
        rows += [contest.row(name, names[0]) for name in names]
        over = Row(f"{what}: over that at 1,000", ratio=paired_ratio(*(contest.samples[name] for name in names[::-1])))
        over.at_most(CONDITION)
        rows.append(over)
    return Table(f"EventStore with {many:,} events, {place.kind}", [*rows, *_fresh(large, small)])


QUERIES: dict[str, Callable[[str], Query]] = {
    "a type, and a tag that is new": lambda new: Query.of(types={"OrderPlaced"}, tags={new}),
    "a tag that is new": lambda new: Query.of(tags={new}),
    "a type that never was, and the tag of all events": lambda new: Query.of(types={"Never"}, tags={"shop"}),
    "a new tag, and the tag of all events": lambda new: Query.of(types={"OrderPlaced"}, tags={new, "shop"}),
}


def _appender(store: EventStore, query: Callable[[str], Query]) -> Callable[[int], object]:
    def append(number: int) -> None:
        tag = f"new:{number}:{os.urandom(4).hex()}"
        store.append(Event("OrderPlaced", {"id": number}, tags={tag}), AppendCondition(query(tag)))

    return append


SIZES = (1_000, 10_000, 100_000, 1_000_000)


def sizes(quick: bool, place: Place) -> Table:
    """Appends under a condition, reads by a tag of ten events, and opening, with a thousand to a million events."""
    contests = {"open, and read the last event": Contest(3), "read the 10 events of a tag": Contest(10)}
    contests |= {"append, durable=False": Contest(30), "append under a condition": Contest(30)}  # last: the stores grow
    opened, read, append, conditional = contests.values()
    wanted = Query.of(tags={"customer:7"})
    for many in SIZES:
        path = f"{place.directory}/{many}"
        generate(path, many, many // 10)
        EventStore(path).rebuild_index()
        store = EventStore(path, durable=False)
        append.add(str(many), lambda n, store=store: store.append(Event("Late", {"id": n})))  # type: ignore[misc]
        conditional.add(str(many), _appender(store, QUERIES["a type, and a tag that is new"]))
        read.add(str(many), lambda _, store=store: list(store.read(wanted)))  # type: ignore[misc]
        opened.add(str(many), lambda _, path=path: EventStore(path).read_last())  # type: ignore[misc]
    rows = []
    for what, contest in contests.items():
        contest.run(8 if quick else 25)
        for many in SIZES:
            mine = contest.samples[str(many)]
            ratio = paired_ratio(mine, contest.samples[str(SIZES[0])])
            rows.append(Row(f"{what}, {many:,}", median(mine) * 1e6, "µs", ratio, series=what, at=many, raw=mine))
    return Table(f"EventStore by the number of events, {place.kind}; the ratio is to {SIZES[0]:,} events", rows)


# Opens, appends under a condition, reads by tag, follows: one process, from its first step on.
_PROCESS = """
import sys, resource, time
from holdfast.events import *
from holdfast.events.log.engine import LogEngine
import sqlite3
began = time.perf_counter()
store = EventStore(sys.argv[1])
store.head()
opened = time.perf_counter()
store.append(Event("OrderPlaced", tags={sys.argv[2]}), AppendCondition(Query.of({"OrderPlaced"}, {sys.argv[2]})))
appended = time.perf_counter()
assert len(list(store.read(Query.of(tags={"customer:7"})))) > 0
assert len(list(store.follow(after=store.head() - 1, timeout=0.01))) == 1
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print((opened - began) * 1e3, (appended - opened) * 1e3, memory)
"""


def _fresh(large: str, small: str) -> list[Row]:
    found: dict[str, list[list[float]]] = {large: [], small: []}
    for _ in range(9):
        for path, samples in found.items():
            program = [sys.executable, "-c", _PROCESS, path, f"new:{os.urandom(4).hex()}"]
            samples.append(
                [float(one) for one in subprocess.run(program, capture_output=True, check=True).stdout.split()]
            )
    opening, first, memory = ([sample[at] for sample in found[large]] for at in range(3))
    rows = [Row("opening", median(opening), "ms", raw=opening), Row("memory", max(memory), "MB", raw=memory)]
    rows[0].check(f"< {OPEN_MS:g} ms", median(opening) < OPEN_MS)
    rows[1].check(f"< {MEMORY_MB:g} MB", max(memory) < MEMORY_MB)
    before = [sample[1] for sample in found[small]]
    over = Row(
        "first conditional append of a process, over that at 1,000", median(first), "ms", paired_ratio(first, before)
    )
    over.at_most(CONDITION)
    return [*rows, over]
