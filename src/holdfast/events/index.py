"""What events are found by, in the segments that do not grow any more: sorted numbers in files.

A run covers some segments in a row. It has, for every event, where it begins in its segment, and one number of 64 bits
for every key (type or tag) of every event: the CRC-32 of the key, and the event's place in the run. They are sorted, so
that the events with a key are next to each other. Two keys may have the same CRC; so whoever finds an event here reads
it, and looks.

    index/<first>-<last>.run   "holdfast run 1\\n", numbers, offsets, pairs; made whole, never changed, told by its sum

They are read into memory, some 30 bytes for an event: mapped, a file that somebody cuts short would kill whoever looks
at it. Eight runs of the same size become one. All of it is derived from the log: what is missing or does not fit is
made again.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

from .. import files, system
from .model import QueryItem

_MAGIC = b"holdfast run 1\n\0"
# store, first, last, number of pairs, sum of the offsets and pairs, the last line's sum
_HEADER = struct.Struct("<16s8sQQQQ8s")
_PARTS, _PART_BITS = 16, 60
_NAME = re.compile(r"(\d{10,})-(\d{10,})\.run")


class Run:
    """The events from `first` to `last`."""

    __slots__ = ("first", "last", "last_sum", "offsets", "pairs")

    def __init__(
        self, first: int, last: int, offsets: memoryview | array[int], pairs: memoryview | array[int], last_sum: bytes
    ) -> None:
        self.first = first
        self.last = last
        self.offsets = offsets
        self.pairs = pairs
        self.last_sum = last_sum

    def find(self, key: str, after: int, until: int) -> Span:
        """The events that may have this key, among those behind `after` up to `until`."""
        pairs = self.pairs
        low = code_of(key) << 32
        start = bisect_left(pairs, low + max(0, after + 1 - self.first))
        stop = bisect_left(pairs, low + max(0, min(until, self.last) + 1 - self.first), start)
        return Span(pairs, start, stop, self.first)

    def offset(self, position: int) -> int:
        return self.offsets[position - self.first]


class Span(Sequence[int]):
    """Some positions of a run, in order; made only as far as they are asked for."""

    __slots__ = ("_first", "_pairs", "_start", "_stop")

    def __init__(self, pairs: memoryview | array[int], start: int, stop: int, first: int) -> None:
        self._pairs = pairs
        self._start = start
        self._stop = stop
        self._first = first

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._first + (self._pairs[self._start + index] & 0xFFFFFFFF)


def run_path(folder: str, first: int, last: int) -> str:
    return f"{folder}/{first:010d}-{last:010d}.run"


def list_runs(folder: str) -> dict[int, list[int]]:
    """The runs there are: by the first event of each, the last events, longest run first."""
    found: dict[int, list[int]] = {}
    try:
        names = system.listdir(folder)
    except FileNotFoundError:
        return found
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), []).append(int(match[2]))
    for lasts in found.values():
        lasts.sort(reverse=True)
    return found


def make_run(first: int, last: int, offsets: array[int], keys: dict[str, int | list[int]], last_sum: bytes) -> Run:
    pairs: list[int] = []
    for key, positions in keys.items():
        code = (code_of(key) << 32) - first
        if isinstance(positions, int):
            pairs.append(code + positions)
        else:
            pairs += [code + position for position in positions]
    pairs.sort()
    return Run(first, last, offsets, array("Q", pairs), last_sum)


def merge(runs: list[Run]) -> Run:
    """One run of several in a row; a sixteenth of the pairs at a time, so that they need not all be objects at once."""
    first = runs[0].first
    offsets, pairs = array("I"), array("Q")
    for run in runs:
        offsets.extend(run.offsets)
    for part in range(_PARTS):
        some: list[int] = []
        for run in runs:
            begin = bisect_left(run.pairs, part << _PART_BITS)
            end = bisect_left(run.pairs, (part + 1) << _PART_BITS) if part + 1 < _PARTS else len(run.pairs)
            by = run.first - first
            some += [pair + by for pair in run.pairs[begin:end]]
        some.sort()  # a few sorted parts: hardly more than reading them
        pairs.extend(some)
    return Run(first, runs[-1].last, offsets, pairs, runs[-1].last_sum)


def write_run(folder: str, run: Run, store: bytes, mode: int) -> None:
    offsets = bytes(run.offsets)
    offsets += b"\0" * (-len(offsets) % 8)
    body = offsets + bytes(run.pairs)
    header = _HEADER.pack(_MAGIC, store, run.first, run.last, len(run.pairs), crc32(body), run.last_sum)
    files.replace_file(run_path(folder, run.first, run.last), header + body, mode)


def read_run(folder: str, first: int, last: int, store: bytes) -> Run | None:
    """None: it is not there, or does not fit."""
    try:
        with open(run_path(folder, first, last), "rb") as file:
            view = memoryview(file.read())
    except FileNotFoundError:
        return None
    count = last - first + 1
    start = _HEADER.size
    middle = start + count * 4 + (-count * 4 % 8)
    if len(view) < middle:
        return None
    magic, owner, said_first, said_last, pairs, total, last_sum = _HEADER.unpack(view[:start])
    if (magic, owner, said_first, said_last) != (_MAGIC, store, first, last) or len(view) != middle + 8 * pairs:
        return None
    if crc32(view[start:]) != total:
        return None
    return Run(first, last, view[start : start + 4 * count].cast("I"), view[middle:].cast("Q"), last_sum)


def belongs_to(folder: str, first: int, last: int, store: bytes) -> bool:
    """Is this file what its name says, and of this store?"""
    try:
        with open(run_path(folder, first, last), "rb") as file:
            header = file.read(_HEADER.size)
    except FileNotFoundError:
        return False
    return len(header) == _HEADER.size and _HEADER.unpack(header)[:4] == (_MAGIC, store, first, last)


def remove(folder: str, first: int, last: int) -> None:
    files.remove(run_path(folder, first, last))


def code_of(key: str) -> int:
    return crc32(key.encode("utf-8", "surrogatepass"))


class Source(Protocol):
    """What knows the keys of events: a run, or the last segment."""

    @property
    def first(self) -> int: ...
    def find(self, key: str, after: int, until: int) -> Sequence[int]: ...


def positions(source: Source, item: QueryItem, after: int, until: int) -> Sequence[int]:
    """The events of a source that match an item, or may."""
    found: Sequence[int] | None = None
    for tag in item.tags:
        more = source.find("tag " + tag, after, until)
        if not more:
            return ()
        if found is None:
            found = more
        else:
            few, many = (found, more) if len(found) < len(more) else (more, found)
            found = [position for position in few if _contains(many, position)]
    if item.types:
        of_types = [source.find("type " + name, after, until) for name in item.types]
        if found is not None:
            return [position for position in found if any(_contains(one, position) for one in of_types)]
        if len(of_types) == 1:
            return of_types[0]
        return sorted({position for one in of_types for position in one})
    return range(max(after + 1, source.first), until + 1) if found is None else found


def _contains(positions: Sequence[int], position: int) -> bool:
    at = bisect_left(positions, position)
    return at < len(positions) and positions[at] == position
