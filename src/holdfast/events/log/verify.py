"""Looking after a log: is every line good, and does what is derived from the log fit it?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from ...errors import CorruptStore
from ...sqlite import inside_sqlite
from ..engine import Problem, Report
from . import lines, segments
from .builder import Builder
from .index import ERRORS, Damaged, Foreign
from .segments import TakenBack

if TYPE_CHECKING:
    from .engine import LogEngine


def verify(engine: LogEngine) -> Report:
    view = engine.view
    visible = engine.committer.disk.visible()  # first: the log only grows
    firsts = segments.list_segments(view.events)
    problems: list[Problem] = []
    expected = 1
    for first in firsts:
        path = segments.segment_path(view.events, first)
        if first != expected:
            problems.append(Problem(path, f"begins with event {first}; {expected} comes next", position=expected))
            expected = first
        until = visible if first == firsts[-1] else None  # behind that a writer may be at work
        found = _Segment(path, expected, engine.tag, until, anew=view.anew)
        problems += found.look()
        expected = found.expected
    if visible is not None and visible > expected - 1:
        what = f"the ledger says that there are {visible} events, the log has {expected - 1}"
        problems.append(Problem(engine.committer.disk.ledger_path, what, position=expected))
    problems += _check_index(engine)
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
        with open(segments.open_segment(self.path, writable=False, anew=self._anew), "rb") as file:
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


def _check_index(engine: LogEngine) -> Iterator[Problem]:
    """What is in the index against what the log says."""
    view = engine.view
    index = view.builder.index
    path = index.folder()
    try:
        mark = index.mark()
        if not mark.position:
            return
        fresh = Builder(engine.name, engine.tag, 0o600, shared=False, anew=view.anew)
        fresh.index.stay_in_memory()
        fresh.build(mark.position)
        with inside_sqlite:
            until = mark.position  # it may grow meanwhile
            is_same = all(one == other for one, other in zip_longest(index.rows(until), fresh.index.rows(until)))
        if not is_same or view.builder.mark().position < until:
            yield Problem(path, "the index does not fit the log; rebuild_index makes it again")
    except (CorruptStore, Foreign, TakenBack):
        pass  # the log has a problem, which is reported, or the index is not believed
    except (Damaged, *ERRORS):
        yield Problem(path, "the index is damaged; it is made again when it is needed")
