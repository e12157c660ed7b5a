"""Looking after a store: is every line good, and does what is derived from the log fit it? Copies of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .. import system
from ..files import private_name, remove
from . import index, lines, log
from .model import Event, Query, StoredEvent

if TYPE_CHECKING:
    from .store import EventStore

_AT_ONCE = 1000

Said = TypeVar("Said", bound="_New")


class Problem(msgspec.Struct, frozen=True):
    """Something that is wrong, and where."""

    path: str
    what: str
    line: int | None = None
    offset: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}, line {self.line} (byte {self.offset})"
        return f"{where}: {self.what}"


class Report(msgspec.Struct, frozen=True):
    """What `verify` found."""

    events: int
    segments: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(store: EventStore) -> Report:
    view = store._view
    visible = store._committer.disk.visible()  # first: the log only grows
    indexed = view.last_indexed()  # a run is made when there is a segment behind it
    firsts = log.list_segments(view.events)
    problems: list[Problem] = []
    expected = 1
    for first in firsts:
        path = log.segment_path(view.events, first)
        if first != expected:
            problems.append(Problem(path, f"begins with event {first}; {expected} comes next", position=expected))
            expected = first
        until = visible if first == firsts[-1] else None  # behind that somebody may be writing
        found = _Segment(path, expected, store._tag, until, anew=view.anew)
        problems += found.look()
        expected = found.expected
    if visible is not None and visible > expected - 1:
        what = f"the ledger says that there are {visible} events, the log has {expected - 1}"
        problems.append(Problem(store._committer.disk.ledger_path, what, position=expected))
    if indexed >= (firsts[-1] if firsts else 1):
        what = f"a segment is missing: there were more than {indexed} events. {view.if_lost}"
        problems.append(Problem(view.events, what, position=indexed + 1))
    problems += _check_runs(store, firsts)
    return Report(expected - 1, len(firsts), tuple(problems))


class _Segment:
    """One segment, line by line."""

    def __init__(self, path: str, expected: int, tag: bytes, until: int | None, *, anew: bool) -> None:
        self.path = path
        self.expected = expected
        self._tag = tag
        self._until = until
        self._anew = anew
        self._problems: list[Problem] = []
        self._batch = 0  # the last event of the batch that is being looked at
        self._batch_begin = (0, 0)
        self._blank_since: tuple[int, int] | None = None

    def look(self) -> list[Problem]:
        number = offset = 0
        with open(log.open_segment(self.path, writable=False, anew=self._anew), "rb") as file:
            for text in file:
                if self._until is not None and self.expected > self._until:
                    break
                number += 1
                self._look_at(text, number, offset)
                offset += len(text)
        if self._batch >= self.expected:
            self._say("the last batch is not whole", *self._batch_begin)
        return self._problems

    def _look_at(self, text: bytes, number: int, offset: int) -> None:
        line = text.rstrip(b"\n")
        if not line:
            self._blank_since = self._blank_since or (number, offset)
            return
        if self._blank_since is not None:
            self._say("a blank line between events", *self._blank_since)
            self._blank_since = None
        wrong = self._wrong_with(line, number, offset, complete=text.endswith(b"\n"))
        if wrong is not None:
            self._say(wrong, number, offset)
            if lines.is_foreign(line, self._tag):
                return
            self.expected += 1

    def _wrong_with(self, line: bytes, number: int, offset: int, *, complete: bool) -> str | None:
        if not lines.is_good(line, self._tag):
            if lines.is_foreign(line, self._tag):
                return "this line belongs to another store"
            return "damaged: its sum does not fit" if complete else "the line is not whole"
        try:
            head = lines.decode_head(line)
        except msgspec.DecodeError as error:
            return f"damaged: {error}"
        if head.batch[0] == head.position:
            self._batch, self._batch_begin = head.batch[1], (number, offset)
        if head.position != self.expected:
            wanted, self.expected = self.expected, head.position
            return f"event {head.position} where {wanted} comes next"
        self.expected += 1
        return None

    def _say(self, what: str, number: int, offset: int) -> None:
        self._problems.append(Problem(self.path, what, number, offset, self.expected))


def _check_runs(store: EventStore, firsts: list[int]) -> Iterator[Problem]:
    """What is saved of the index against what the log says."""
    view = store._view
    for first, lasts in index.list_runs(view.index).items():
        for last in lasts:
            path = index.run_path(view.index, first, last)
            run = index.read_run(view.index, first, last, store._tag)
            if run is None:
                if os.path.exists(path):  # else it has become part of a larger one
                    yield Problem(path, "damaged; it is made again when it is needed")
                continue
            made = _runs_of_log(store, firsts, first, last)
            if made is None:
                continue  # the log has a problem there, which is told
            if bytes(made.pairs) != bytes(run.pairs) or bytes(made.offsets) != bytes(run.offsets):
                yield Problem(path, "does not fit the log; rebuild_index makes it again")


def _runs_of_log(store: EventStore, firsts: list[int], first: int, last: int) -> index.Run | None:
    runs = []
    for begin in firsts:
        if first <= begin <= last:
            tail = log.Tail(store._view.events, begin, store._tag, writable=False, anew=store._view.anew)
            tail.read_on()
            if tail.head < begin:
                return None
            runs.append(index.make_run(begin, tail.head, tail.offsets, tail.keys, tail.last_sum))
    return index.merge(runs) if runs and runs[-1].last == last else None


def export(store: EventStore, target: Any, query: Query, after: int) -> int:
    if hasattr(target, "write"):
        return _export(store, target, query, after)
    if isinstance(target, int):
        with open(target, "wb", closefd=False) as file:
            return _export(store, file, query, after)
    path = os.path.realpath(os.fsdecode(target))
    if os.path.commonpath([path, os.path.realpath(store.path)]) == os.path.realpath(store.path):
        raise ValueError(f"{path} is inside of the store itself; give it another place")
    if os.path.exists(target) and not os.path.isfile(target):  # a pipe, a terminal
        with open(target, "wb") as file:
            return _export(store, file, query, after)
    # All of it or nothing: part of an export would look like a smaller store.
    private = private_name(path)
    try:
        with open(private, "xb") as file:
            count = _export(store, file, query, after)
            file.flush()
            system.fsync(file.fileno())
        with suppress(FileNotFoundError):
            os.chmod(private, stat.S_IMODE(system.stat(path).st_mode))
        system.rename(private, path)
    except BaseException:
        remove(private)
        raise
    return count


def _export(store: EventStore, target: Any, query: Query, after: int) -> int:
    count = 0
    for event in store.read(query, after):
        target.write(as_line(event))
        count += 1
    return count


def as_line(event: StoredEvent) -> bytes:
    return msgspec.json.encode(event) + b"\n"


class _New(msgspec.Struct, forbid_unknown_fields=True):
    """An event to append. A key that is spelled wrong would be a tag that is not there."""

    type: str
    data: Any = None
    tags: list[str] = []
    metadata: Any = {}
    id: str | None = None


class _Exported(_New, forbid_unknown_fields=True):
    time: datetime | None = None
    batch: tuple[int, int, int] | None = None
    position: int | None = None
    sum: str | None = None


_read_new = msgspec.json.Decoder(_New)
_read_exported = msgspec.json.Decoder(_Exported)


def import_(store: EventStore, source: Any) -> int:
    count = 0
    with ExitStack() as stack:
        if isinstance(source, str | os.PathLike):
            source = stack.enter_context(open(source, "rb"))
        waiting: list[list[lines.Draft]] = []

        def append() -> None:
            nonlocal count, waiting
            store._append_drafts(waiting)
            count += sum(map(len, waiting))
            waiting = []

        try:
            for drafts in _drafts(source):
                waiting.append(drafts)
                if len(waiting) >= _AT_ONCE:
                    append()
            append()
        except ValueError as error:
            raise ValueError(f"{error} ({count} events before it were appended)") from None
    return count


def parse(source: Iterable[bytes | str]) -> Iterator[Event]:
    """New events in JSON lines."""
    return (event for _, event in _parse(source, _read_new))


def _parse(source: Iterable[bytes | str], decoder: msgspec.json.Decoder[Said]) -> Iterator[tuple[Said, Event]]:
    """As they are said, and as they can be appended."""
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            said = decoder.decode(line)
            event = Event(said.type, said.data, said.tags, said.metadata, said.id)
        except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError) as error:
            raise ValueError(f"line {number} is no event: {error}") from None
        yield said, event


def _drafts(source: Iterable[bytes | str]) -> Iterator[list[lines.Draft]]:
    """By batches, as they were."""
    drafts: list[lines.Draft] = []
    batch: tuple[int, int, int] | None = None
    for said, event in _parse(source, _read_exported):
        if drafts and (said.batch is None or said.batch != batch):
            yield drafts
            drafts = []
        batch = said.batch
        drafts.append(lines.Draft(event, said.time))
    if drafts:
        yield drafts
