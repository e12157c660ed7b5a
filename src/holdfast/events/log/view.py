"""What one process knows of a log: where it ends, and what was appended lately, caught up with what others write.

The postings of the last events are in memory (`search.Recent`), those of the others in the index. Nothing here changes
the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from threading import RLock
from time import monotonic

from ... import process, system
from ...errors import CorruptStore
from ..model import Query, StoredEvent
from . import about, lines, segments
from .builder import Builder
from .index import Mark
from .search import Recent, Source, search
from .segments import Segment, Tail, TakenBack

_A_CHUNK = 1 << 20
_NEAR = 1 << 17
_NEAR_EVENTS = 256
_OPEN_FILES = 16
_A_WHILE = 0.02  # seconds
_FAR_BEHIND = 4096  # events


class NoSegment(CorruptStore):
    """There is none at all: a new store, or one that has lost everything."""


class View:
    """`shared`: other machines write here too, and what this one remembers of files and names may be old; `anew`: it
    remembers a file although it was opened again (NFS)."""

    def __init__(self, root: str, store: bytes, mode: int, *, shared: bool = False, anew: bool = False) -> None:
        self.shared = shared
        self.anew = anew
        self._root = root
        self.events = f"{root}/events"
        self._store = store
        self.builder = Builder(root, store, mode, shared=shared, anew=anew)
        self.know_nothing()

    def know_nothing(self) -> None:
        """As in the beginning; also in a forked child, where the thread that had the mutex may be gone."""
        self.mutex = RLock()
        self.builder.begin_again()
        self.firsts: list[int] = []
        self._tail: Tail | None = None
        self.recent = Recent(0)
        self._looked = 0.0  # whether that is still there
        self._files: dict[int, Segment] = {}

    # Catching up.

    @property
    def tail(self) -> Tail:
        """The last segment. NoSegment: there is none yet."""
        if self._tail is None:
            self._open_tail()
        assert self._tail is not None
        return self._tail

    @property
    def is_ours(self) -> bool:
        """Is this thread in the middle of anything here?"""
        return process.owns(self.mutex)

    @property
    def known(self) -> int:
        """The last event that was read; 0: nothing was, since the store was opened."""
        return 0 if self._tail is None else self._tail.head

    def _open_tail(self) -> None:
        self.firsts = segments.list_segments(self.events)
        if not self.firsts:
            raise NoSegment(f"{self.events}: all segments are missing.", path=self.events)
        if self.firsts[0] != 1:
            raise CorruptStore(
                f"{self.events}: the first segment is missing: the oldest one begins with event {self.firsts[0]}.",
                path=self.events,
            )
        mark, last = self.builder.mark(), self.firsts[-1]
        self._begin_at(mark if mark.segment == last else Mark(last - 1, last))

    def _begin_at(self, mark: Mark) -> None:
        self.recent = Recent(mark.position)
        self._tail = self._new_tail(mark)

    @property
    def if_lost(self) -> str:
        return f"If it is lost for good, remove {self._root}/ledger: it tells of what is not there"

    def ends_too_soon(self, head: int) -> CorruptStore:
        tail = self.tail
        return tail.damaged(f"event {tail.head + 1} is damaged or missing; there were {head}. {self.if_lost}")

    def _new_tail(self, mark: Mark) -> Tail:
        try:
            return Tail(self.events, self._store, mark, self.recent, writable=True, anew=self.anew)
        except OSError:  # may be a directory that can only be read
            return Tail(self.events, self._store, mark, self.recent, anew=self.anew)

    def begin_again(self) -> None:
        """Forget what is known: the files may be others than those that are open."""
        if about.tag_of(about.read_id(self._root)) != self._store:
            text = f"{self._root} is another store than the one that was opened; open it again."
            raise CorruptStore(text, path=self._root)
        self.forget()

    def forget(self) -> None:
        """Begin again: what was known of the end of the log is void."""
        self._tail = None
        self._files.clear()
        self.builder.index.known = 0  # to be compared with the log again

    def catch_up(self, head: int) -> None:
        """Read up to `head`, which is visible. What was read before and taken back since is forgotten: the last line
        that was read is compared with the log. What is visible stays as it is."""
        if head:
            with self.mutex:
                self.advance(head)
                if self.tail.head < head:
                    raise self.ends_too_soon(head)

    def advance(self, until: int | None = None) -> bytes:
        """Read what was written since, up to a position or as far as it goes. Gives what is behind that."""
        try:
            return self._advance(until)
        except BaseException:
            self.forget()  # an interrupt may have come between any two steps
            raise

    def _advance(self, until: int | None) -> bytes:
        self._drop_if_gone()
        if self.shared:
            self.tail.reopen()
        self._jump(until)
        while True:
            try:
                rest = self.tail.read_on(until)
            except TakenBack:
                self.forget()
                continue
            if rest or (until is not None and self.tail.head >= until):
                return rest
            if self.tail.head < self.tail.first or not self._has_segment(self.tail.head + 1):
                return rest
            self.go_on()

    def _jump(self, until: int | None) -> None:
        """If others have written much, what they wrote is in the index by now."""
        if until is not None and until - self.tail.head > _FAR_BEHIND:
            mark = self.builder.mark()
            if until >= mark.position > self.tail.head:
                self.firsts = segments.list_segments(self.events)
                self._begin_at(mark)

    def _has_segment(self, first: int) -> bool:
        if self.shared:  # to list a directory asks the server, to look for a name may not
            return first in segments.list_segments(self.events)
        return bool(system.access(segments.segment_path(self.events, first), 0))

    def go_on(self, first: int | None = None) -> None:
        """To a later segment, which is there. What we have not read of those before it is read when it is needed."""
        head = self.tail.head
        first = head + 1 if first is None else first
        if first != head + 1:
            self.recent = Recent(first - 1)
        try:
            self._tail = self._new_tail(Mark(first - 1, first))
        except FileNotFoundError as error:
            what = f"event {first} {segments.MISSING}"
            raise CorruptStore(f"{error.filename}: {what}. {self.if_lost}.", path=self.events, position=first) from None
        self.firsts = [*self.firsts, first] if first == head + 1 else segments.list_segments(self.events)

    def tail_in(self, segment: int, *, skip: bool) -> Tail:
        """The last segment, of which the ledger says that it is this one. `skip`: what is before it is not needed."""
        now = monotonic()
        if now - self._looked > _A_WHILE:
            # Not every time. One that was made anew does not have what the ledger tells of.
            self._looked = now
            self._drop_if_gone()
        if skip and self.tail.first < segment:
            self.go_on(segment)
        return self.tail

    def _drop_if_gone(self) -> None:
        """The last segment may have been made anew, or another program has removed it."""
        if self._tail is not None and self._tail.is_gone:
            self.forget()

    # Finding.

    def _know(self, position: int) -> None:
        """What was known before may have been forgotten meanwhile. With the mutex."""
        if self.tail.head < position:
            self.advance(position)
            if self.tail.head < position:
                raise self.ends_too_soon(position)

    def _sources(self, query: Query, after: int, until: int) -> list[tuple[Source, int, int]]:
        """What may know of events that match, behind `after` up to `until`, in order, and from where to where."""
        found: list[tuple[Source, int, int]] = []
        with self.mutex:
            self._know(until)
            base, blocks = self.recent.base, list(self.recent.blocks)
        if after < base:
            self.builder.build(base)
            found.append((self.builder, after + 1, min(base, until)))
        blocks = [block for block in blocks if block.last > after and block.first <= until and block.may_have(query)]
        found += [(block, block.first, until) for block in blocks]
        return [(source, max(low, after + 1), high) for source, low, high in found]

    def candidates(self, query: Query, after: int, until: int, *, backwards: bool) -> Iterator[int]:
        """Positions of events that match, in order. The caller reads them, and compares: an index may be damaged."""
        sources = self._sources(query, after, until)
        for source, low, high in reversed(sources) if backwards else sources:
            yield from search(source, query, low, high, backwards=backwards)

    def last_match(self, query: Query, after: int, head: int) -> int | None:
        """The last event behind `after` up to `head` that matches."""
        if query.matches_all:
            return head
        for position in self.candidates(query, after, head, backwards=True):
            if query.matches(lines.decode_head(self.line(position))):
                return position
            self.builder.distrust()
        return None

    # Reading.

    def file_of(self, position: int) -> Segment:
        """The segment in which an event is, open."""
        first = self.firsts[segments.segment_of(self.firsts, position)]
        file = self._files.get(first)
        # The last one is never written again, and to look at it would make the next sync slower (`system.is_removed`).
        if file is None or (first != self.firsts[-1] and file.is_replaced):
            if len(self._files) >= _OPEN_FILES:
                self._files.clear()
            try:
                file = self._files[first] = Segment(self.events, first, anew=self.anew)
            except FileNotFoundError as error:
                text = f"{error.filename}: event {first} {segments.MISSING}"
                raise CorruptStore(text, path=self.events, position=first) from None
        return file

    def place(self, position: int) -> tuple[Segment, int]:
        """Where an event is: its file, and where its line begins."""
        with self.mutex:
            self._know(position)
            file, tail = self.file_of(position), self.tail
            at = bisect_right(self.firsts, position)
            last = self.firsts[at] - 1 if at < len(self.firsts) else tail.head
            end = tail.end if file.first == tail.first else system.fstat(file.fd).st_size
        return file, file.find(position, last, end)

    def line(self, position: int) -> bytes:
        """The line of an event, without its newline, and good."""
        file, start = self.place(position)
        text = system.pread(file.fd, file.end_of_line(start) - start, start)
        return self._checked(text[:-1], file, start, position)

    def _checked(self, line: bytes, file: Segment, start: int, position: int) -> bytes:
        if not lines.is_good(line, self._store) or not line.startswith(b'{"position":%d,' % position):
            raise file.damaged(start, position, foreign=lines.is_foreign(line, self._store))
        return line

    def at(self, positions: Iterator[int]) -> Iterator[StoredEvent]:
        """The events at some positions. Where they are near each other, many are read at once."""
        buffer, begin, last = b"", 0, -_NEAR_EVENTS
        at = stop = 0  # in the buffer: the newlines before and behind the last line
        file: Segment | None = None
        for position in positions:
            is_near, is_back = abs(position - last) < _NEAR_EVENTS, position < last
            wanted = b'\n{"position":%d,' % position
            if is_near:
                at = buffer.rfind(wanted, 0, at + 1) if is_back else buffer.find(wanted, stop)
            if file is None or not is_near or at < 0 or (stop := buffer.find(b"\n", at + 1)) < 0:
                file, start = self.place(position)
                end = file.end_of_line(start)
                begin = max(0, start - _NEAR) if is_near and is_back else start
                until = end + _NEAR if is_near and not is_back else end
                buffer = b"\n" + system.pread(file.fd, until - begin, begin)
                at, stop = start - begin, end - begin
            last = position
            yield lines.decode(self._checked(buffer[at + 1 : stop], file, begin + at, position))

    def stream(self, after: int, until: int, *, backwards: bool) -> Iterator[StoredEvent]:
        """All events behind `after` up to `until`."""
        if until <= after:
            return
        if backwards:
            yield from self._stream_back(after, until)
            return
        store = self._store
        decode, is_good = lines.decode, lines.is_good
        position = after + 1
        while position <= until:
            file, start = self.place(position)
            began, size = position, _A_CHUNK
            while position <= until:
                text = system.pread(file.fd, size, start)
                cut = text.rfind(b"\n") + 1
                if not cut and len(text) == size:
                    size *= 2
                    continue
                for line in text[:cut].split(b"\n"):
                    if not line:
                        break
                    if not is_good(line, store):
                        raise file.damaged(start, position, foreign=lines.is_foreign(line, store))
                    event = decode(line)
                    if event.position != position:
                        raise file.damaged(start, position)
                    yield event
                    start += len(line) + 1
                    if position == until:
                        return
                    position += 1
                if not cut or text[:1] == b"\n" or len(text) < size:
                    break  # the segment ends here
            if position == began or not self._has_started(position):
                raise file.damaged(start, position)

    def _has_started(self, position: int) -> bool:
        with self.mutex:
            return position in self.firsts

    def _stream_back(self, after: int, until: int) -> Iterator[StoredEvent]:
        while until > after:
            with self.mutex:
                first = max(self.firsts[segments.segment_of(self.firsts, until)], after + 1)
            yield from reversed(list(self.stream(first - 1, until, backwards=False)))
            until = first - 1
