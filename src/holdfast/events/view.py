"""What one process knows of a log: read once, and caught up with what others write since.

The segments that do not grow any more are known by their runs (`index`), the last one by its `Tail` (`log`). Nothing
here changes the log, but for saving runs, which are derived from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from threading import RLock
from time import monotonic

from .. import process, system
from ..errors import CorruptStore
from . import about, index, lines, log
from .log import Segment, Tail, TakenBack
from .model import Query, QueryItem, StoredEvent

_NEWLINE = b"\n"
_A_CHUNK = 1 << 20
_NEAR = 1 << 16
_MERGED = 8
_MOST_EVENTS = 1 << 31
_OPEN_FILES = 16
_A_WHILE = 0.02  # seconds


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
        self.index = f"{root}/index"
        self._store = store
        self._mode = mode
        self.know_nothing()

    def know_nothing(self) -> None:
        """As in the beginning; also in a forked child, in which whoever had the mutex may be gone."""
        self.mutex = RLock()
        self.firsts: list[int] = []
        self._tail: Tail | None = None
        self._looked = 0.0  # whether that is still there
        self._runs: list[index.Run] = []  # as far as they were looked at
        self._unsaved: list[index.Run] = []
        self._unread = False
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
        # In this order: a run is made when there is a segment behind it.
        indexed = self.last_indexed()
        self.firsts = log.list_segments(self.events)
        if not self.firsts and not indexed:
            raise NoSegment(f"{self.events}: all segments are missing.", path=self.events)
        if indexed >= (self.firsts[-1] if self.firsts else 1):
            raise CorruptStore(
                f"{self.events}: a segment is missing: there were more than {indexed} events. {self.if_lost}.",
                path=self.events,
                position=indexed + 1,
            )
        if self.firsts[0] != 1:
            raise CorruptStore(
                f"{self.events}: the first segment is missing: the oldest one begins with event {self.firsts[0]}.",
                path=self.events,
            )
        self._tail = self._new_tail(self.firsts[-1])

    @property
    def if_lost(self) -> str:
        return f"If it is lost for good, remove {self.index} and {self._root}/ledger: they tell of what is not there"

    def ends_too_soon(self, head: int) -> CorruptStore:
        tail = self.tail
        return tail.damaged(f"event {tail.head + 1} is damaged or missing; there were {head}. {self.if_lost}")

    def last_indexed(self) -> int:
        """The last event in a run, if that is one of this store."""
        runs = [(lasts[0], first) for first, lasts in index.list_runs(self.index).items()]
        for last, first in sorted(runs, reverse=True):
            if index.belongs_to(self.index, first, last, self._store):
                return last
        return 0

    def _new_tail(self, first: int) -> Tail:
        try:
            return Tail(self.events, first, self._store, writable=True, anew=self.anew)
        except OSError:  # may be a directory that can only be read
            return Tail(self.events, first, self._store, writable=False, anew=self.anew)

    def begin_again(self) -> None:
        """Forget what is known: the files may be others than those that are open."""
        if about.tag_of(about.read_id(self._root)) != self._store:
            text = f"{self._root} is another store than the one that was opened; open it again."
            raise CorruptStore(text, path=self._root)
        self.forget()

    def forget(self) -> None:
        """Begin again: what was known of the end of the log is void."""
        self._tail = None
        self._runs = []
        self._files.clear()

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

    def _has_segment(self, first: int) -> bool:
        if self.shared:  # to list a directory asks the server, to look for a name may not
            return first in log.list_segments(self.events)
        return bool(system.access(log.segment_path(self.events, first), 0))

    def go_on(self, first: int | None = None) -> None:
        """To a later segment, which is there. What we have not read of those before it is read when it is needed."""
        tail = self.tail
        try:
            new = self._new_tail(tail.head + 1 if first is None else first)
        except FileNotFoundError as error:
            what = f"event {first or tail.head + 1} {log.MISSING}"
            raise CorruptStore(f"{error.filename}: {what}. {self.if_lost}.", path=self.events, position=first) from None
        if new.first == tail.head + 1:
            run = index.make_run(tail.first, tail.head, tail.offsets, tail.keys, tail.last_sum)
            if self._indexed_to == tail.first:
                self._runs.append(run)
            self._unsaved.append(run)
            self.firsts.append(new.first)
        else:
            self.firsts = log.list_segments(self.events)
        self._tail = new

    def begin_segment(self, first: int) -> None:
        """`go_on` to one that we have made. So it is up to us to see to it that those before it are indexed."""
        self.go_on(first)
        self._unread = not self._unsaved

    def tail_in(self, segment: int) -> Tail:
        """The last segment, of which the ledger says that it is this one. Nothing is read that is not needed."""
        now = monotonic()
        if now - self._looked > _A_WHILE:
            # Not every time. One that was made anew does not have what the ledger tells of.
            self._looked = now
            self._drop_if_gone()
        tail = self.tail
        if tail.first < segment:
            self.go_on(segment)
            tail = self.tail
        return tail

    def _drop_if_gone(self) -> None:
        """The last segment may have been made anew, or somebody has removed it."""
        if self._tail is not None and self._tail.is_gone:
            self.forget()

    @property
    def has_unsaved(self) -> bool:
        return self._unread or bool(self._unsaved)

    # Runs.

    def save_runs(self) -> None:
        """Save what is not saved yet, and make one run of eight. To fail is no harm: it can be made again."""
        try:
            with self.mutex:
                self._unread = False
                _ = self.runs
                unsaved, self._unsaved = self._unsaved, []
            for run in unsaved:
                self._save(run)
            while self._merge_runs():
                pass
        except (OSError, CorruptStore):
            pass  # who reads what is damaged is told

    def _save(self, run: index.Run) -> None:
        if index.read_run(self.index, run.first, run.last, self._store) is not None:
            return
        try:
            system.mkdir(self.index)
        except FileExistsError:
            pass
        index.write_run(self.index, run, self._store, self._mode)

    @property
    def runs(self) -> list[index.Run]:
        """The runs of all segments but the last one, in order."""
        if self._indexed_to < self.tail.first:
            self._runs += self._load_runs(self._indexed_to, self.tail.first)
        return self._runs

    @property
    def _indexed_to(self) -> int:
        """The first event that is not in one of the runs."""
        return self._runs[-1].last + 1 if self._runs else 1

    def _load_runs(self, first: int, end: int) -> list[index.Run]:
        there = index.list_runs(self.index)
        firsts = set(self.firsts)
        runs: list[index.Run] = []
        while first < end:
            run = None
            for last in there.get(first, ()):
                if last < end and last + 1 in firsts:
                    run = index.read_run(self.index, first, last, self._store)
                    if run is not None and run.last_sum == self._last_sum(last):
                        break
                    run = None
            if run is None:
                run = self._make_run(first)
                self._unsaved.append(run)
            runs.append(run)
            first = run.last + 1
        return runs

    def _last_sum(self, position: int) -> bytes:
        """The sum of the last line of the segment that ends with this event."""
        file = self.file_of(position)
        size = system.fstat(file.fd).st_size
        return system.pread(file.fd, 11, max(0, size - 11))[:8]

    def _make_run(self, first: int) -> index.Run:
        """Read a segment that is not the last one."""
        last = self.firsts[bisect_right(self.firsts, first)] - 1
        tail = Tail(self.events, first, self._store, writable=False, anew=self.anew)
        rest = tail.read_on(last)
        if tail.head != last or rest.strip(_NEWLINE):
            what = "there is something behind the last event"
            if tail.head < last:
                what = f"event {tail.head + 1} {'is damaged' if rest.strip(_NEWLINE) else log.MISSING}"
            raise tail.damaged(what)
        return index.make_run(first, last, tail.offsets, tail.keys, tail.last_sum)

    def _segments_in(self, run: index.Run) -> int:
        return bisect_right(self.firsts, run.last) - bisect_left(self.firsts, run.first)

    def _merge_runs(self) -> bool:
        """Make one of the last eight, if they are of one size. It takes its time, so others may go on meanwhile."""
        with self.mutex:
            last = self.runs[-_MERGED:]
            sizes = {(self._segments_in(run) - 1).bit_length() // 3 for run in last}
        if len(last) < _MERGED or len(sizes) > 1 or last[-1].last - last[0].first > _MOST_EVENTS:
            return False
        merged = index.read_run(self.index, last[0].first, last[-1].last, self._store)
        if merged is None:  # else another process has made it
            merged = index.merge(last)
            self._save(merged)
        with self.mutex:
            runs = self._runs
            at = next((at for at, run in enumerate(runs) if run is last[0]), -1)
            if at < 0 or runs[at : at + _MERGED] != last:
                return False  # somebody has begun again; the file is there for the next time
            runs[at : at + _MERGED] = [merged]
        for run in last:
            index.remove(self.index, run.first, run.last)
        return True

    def rebuild(self) -> None:
        """Make all runs again, from the log."""
        with self.mutex:
            self.forget()
            try:
                self.advance()
            except NoSegment:
                return
            for first, lasts in index.list_runs(self.index).items():
                for last in lasts:
                    index.remove(self.index, first, last)
            self._runs = [self._make_run(first) for first in self.firsts[:-1]]
            self._unsaved = list(self._runs)
        self.save_runs()

    # Finding.

    def _source(self, position: int) -> index.Run | Tail:
        if position >= self.tail.first:
            return self.tail
        return self.runs[bisect_right(self.runs, position, key=lambda run: run.first) - 1]

    def _sources(self, after: int, until: int) -> list[index.Run | Tail]:
        """What may know of events behind `after` up to `until`."""
        tail = self.tail
        found: list[index.Run | Tail] = []
        if after + 1 < tail.first:
            found.extend(run for run in self.runs if run.last > after and run.first <= until)
        if until >= tail.first:
            found.append(tail)
        return found

    def _know(self, position: int) -> None:
        """What was known before may have been forgotten meanwhile. With the mutex."""
        if self.tail.head < position:
            self.advance(position)
            if self.tail.head < position:
                raise self.ends_too_soon(position)

    def candidates(self, query: Query, after: int, until: int, *, backwards: bool) -> Iterator[int]:
        """Positions of events that may match, in order. Whoever asks has to read and compare."""
        with self.mutex:
            self._know(until)
            sources = self._sources(after, until)
        for source in reversed(sources) if backwards else sources:
            with self.mutex:
                found: set[int] = set()
                for item in query.items:
                    found.update(index.positions(source, item, after, until))
            yield from sorted(found, reverse=backwards)

    def last_match(self, query: Query, after: int) -> int | None:
        """The last event behind `after` that matches, among all that are written. For who holds the lock."""
        head = self.tail.head
        if head <= after:
            return None
        if query.matches_all:
            return head
        for source in reversed(self._sources(after, head)):
            matches = [match for item in query.items if (match := self._last_in(source, item, after, head))]
            if matches:
                return max(matches)
        return None

    def _last_in(self, source: index.Run | Tail, item: QueryItem, after: int, until: int) -> int | None:
        found = index.positions(source, item, after, until)
        if source is self.tail:  # which knows the keys themselves
            return found[-1] if found else None
        for at in range(len(found) - 1, -1, -1):
            if item.matches(lines.decode_head(self.line(found[at]))):
                return found[at]
        return None

    # Reading.

    def file_of(self, position: int) -> Segment:
        """The segment in which an event is, open."""
        first = self.firsts[log.segment_of(self.firsts, position)]
        file = self._files.get(first)
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                self._files.clear()
            try:
                file = self._files[first] = Segment(self.events, first, anew=self.anew)
            except FileNotFoundError as error:
                text = f"{error.filename}: event {first} {log.MISSING}"
                raise CorruptStore(text, path=self.events, position=first) from None
        return file

    def place(self, position: int) -> tuple[Segment, int, int]:
        """Where an event is: file, first byte, and the one behind its newline; 0: look for that."""
        with self.mutex:
            self._know(position)
            source = self._source(position)
            file = self.file_of(position)
            start = source.offset(position)
            next_one = position + 1
            if isinstance(source, Tail):
                return file, start, source.offset_after(position)
            if next_one > source.last or next_one in self._first_set(file):
                return file, start, 0
            return file, start, source.offset(next_one)

    def _first_set(self, file: Segment) -> Sequence[int]:
        at = bisect_right(self.firsts, file.first)
        return self.firsts[at : at + 1]

    def line(self, position: int) -> bytes:
        """The line of an event, without its newline, and good."""
        file, start, stop = self.place(position)
        text = system.pread(file.fd, (stop or file.end_of_line(start)) - start, start)
        return self._checked(text[:-1], file, start, position)

    def _checked(self, line: bytes, file: Segment, start: int, position: int) -> bytes:
        if not lines.is_good(line, self._store) or not line.startswith(b'{"position":%d,' % position):
            raise file.damaged(start, position, foreign=lines.is_foreign(line, self._store))
        return line

    def at(self, positions: Iterator[int]) -> Iterator[StoredEvent]:
        """The events at some positions. Where they are near each other, many are read at once."""
        buffer, begin, owner, last = b"", 0, None, -1
        for position in positions:
            file, start, stop = self.place(position)
            stop = stop or file.end_of_line(start)
            if file is not owner or start < begin or stop > begin + len(buffer):
                near = file is owner and abs(start - last) < _NEAR
                begin = max(0, start - _NEAR) if near and start < last else start
                owner = file
                buffer = system.pread(file.fd, max(stop, begin + _NEAR * 2) - begin if near else stop - begin, begin)
            last = start
            line = buffer[start - begin : stop - begin - 1]
            yield lines.decode(self._checked(line, file, start, position))

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
            file, start, _ = self.place(position)
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
            return position in self._first_set(self.file_of(position - 1))

    def _stream_back(self, after: int, until: int) -> Iterator[StoredEvent]:
        while until > after:
            with self.mutex:
                first = max(self.firsts[log.segment_of(self.firsts, until)], after + 1)
            yield from reversed(list(self.stream(first - 1, until, backwards=False)))
            until = first - 1
