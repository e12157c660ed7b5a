"""Which task is next: highest priority first, then in the order in which they were put.

Nobody lists everything that waits. A process knows the names in the first directory of the highest priority, of at most
a thousand, and takes one after the other; others do the same, so what is gone was theirs. It lists again when it has
no more, or when the sequence says that something of a higher priority was put. So to find the next one costs the same
with a hundred waiting and with a hundred thousand.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Iterator
from operator import itemgetter
from random import randrange
from time import monotonic

from .. import process
from . import sequence
from .clock import Clock
from .places import IN_A_BUCKET, Places, listed, move, name_of, number_of, remove_empty
from .sequence import LATER, Sequence
from .sheet import ONLY_THIS_FILE, Entry, Sheet
from .sheets import Sheets

_IN_VAIN = 2  # so many in a row were gone: others are at the same names
_LONGEST_SKIP = 8
_BELIEVED = 0.5  # seconds: somebody may have brought something by hand
_KEPT = 8  # sheets, each of another priority, that one who takes has open
_FRESH = 0.005  # seconds for which one believes that what one has seen on a sheet comes next


class Finder:
    def __init__(self, places: Places, numbers: Sequence, sheets: Sheets, clock: Clock) -> None:
        self._places = places
        self._sheets = sheets
        self._sheet: Sheet | None = None  # the last one that was looked at
        self._opened: dict[int, Sheet] = {}  # by priority: they know how far they are done
        self._mutex, self._registry = RLock(), process.registry  # for threads
        self._numbers = numbers
        self._clock = clock
        self._seen = b""
        self._known: dict[str, int] = {}
        self._level: int | None = None  # whose names these are
        self._level_of_sheet = 0
        self._names: list[tuple[str, str | Entry]] = []  # places, and what is there; the first one last
        self._listed_at, self._listed = 0.0, b""  # when, and what was known then
        self._exhausted: dict[int, tuple[int | None, float]] = {}  # of a priority: its number, and when
        self._is_on_sheet = False  # do these come from the sheet?
        self._has_looked = False
        self.next_due: float | None = None  # by `clock`; None: nothing is delayed

    def next(self, tried: set[str]) -> tuple[str, str | Entry] | None:
        """The place of the next one that was not tried, and what is there: it may be gone, or not to be had."""
        if self._registry is not process.registry:
            self._begin_anew()
        with self._mutex:
            self._look_for_news()
            while not self._names and not self._list(tried):
                if self._numbers.read() == self._seen:
                    return None
                self._look_for_news()  # something was put, perhaps to where had been looked already
            if len(tried) >= _IN_VAIN and len(self._names) > _LONGEST_SKIP:
                # The next ones are others' too. What is skipped is found again when it is listed again.
                del self._names[-randrange(1, _LONGEST_SKIP) :]
            found = self._names.pop()
            if not self._names:
                self._leave_sheet()
            tried.add(found[0])
            return found

    def forget(self) -> None:
        if self._registry is not process.registry:
            self._begin_anew()
        with self._mutex:
            self._seen = b""
            self._names = []
            self._exhausted.clear()
            self._leave_sheet()
            self._sheet = None
            self._opened.clear()

    def _begin_anew(self) -> None:
        """This is another process, by a fork."""
        self._mutex, self._registry = RLock(), process.registry  # a thread that is not in this process may have had it
        self._sheet, self._names = None, []
        self._opened.clear()

    def _leave_sheet(self) -> None:
        if self._sheet is not None:
            self._sheet.leave_page()

    def _look_for_news(self) -> None:
        text = self._numbers.read()
        if text != self._seen:
            known = sequence.levels(text)
            changed = {level for level, number in known.items() if self._known.get(level) != number}
            self._seen, self._known = text, known
            if LATER in changed:
                self._hear_of_due(known[LATER] / 1000)
            level = self._level
            if self._names and level is not None and any(int(one) > level for one in changed if is_number(one)):
                self._names = []
        if self._sheet is not None and self._names and monotonic() - self._listed_at > _FRESH:
            self._names = []  # in a sheet it costs little to look again, and there may be one that comes before
        if self.next_due is not None and self._clock.now() >= self.next_due:
            self._move_due()

    def _list(self, tried: set[str]) -> bool:
        """The names in the first directory that has any that were not tried just now."""
        pending = self._places.pending
        now = monotonic()
        alone = now - self._listed_at < _FRESH  # we have had the last ones in no time
        self._listed_at = now
        if alone and self._sheet is not None and self._is_on_sheet and self._listed == self._seen and not tried:
            more = self._sheet.next_waiting(alone=True)  # nothing was put, so this is what comes next
            if more:
                self._level = self._level_of_sheet
                self._names = [(entry.place, entry) for entry in reversed(more)]
                return True
        self._listed = self._seen
        levels = {int(name) for name in (*listed(pending), *self._sheets.levels()) if is_number(name)}
        for level in sorted(levels, reverse=True):
            if not tried and self._is_exhausted(level, now):
                continue
            folder = f"{pending}/{level}"
            buckets, sheets = listed(folder), self._sheets.buckets(level)
            last = self._known.get(str(level), 0) // IN_A_BUCKET  # nothing is put before it any more
            for bucket in sorted({*buckets, *sheets}):
                path = f"{folder}/{bucket}"
                there = listed(path) if bucket in buckets else []
                names: list[tuple[str, str | Entry]] = [
                    (name, f"{path}/{name}")
                    for name in there
                    if name not in tried and number_of(name) and name_of(name)
                ]
                entries = self._waiting(level, bucket, last, tried, alone) if bucket in sheets else []
                if entries:
                    names = [one for one in names if one[0] < entries[-1].place]  # others come later than these
                    names += [(entry.place, entry) for entry in entries]
                if names:
                    names.sort(key=itemgetter(0), reverse=True)
                    self._level, self._names = level, names
                    self._is_on_sheet = not there  # all of them
                    return True
                if bucket in buckets and not there and is_number(bucket) and int(bucket) < last:
                    remove_empty(path)
            if not buckets:
                remove_empty(folder)
            if not tried:
                self._exhausted[level] = (self._known.get(str(level)), now)
        return False

    def _is_exhausted(self, level: int, now: float) -> bool:
        """Was nothing there when it was last looked, which is not long ago, and was nothing put since?"""
        number, at = self._exhausted.get(level, (None, 0.0))
        return number is not None and number == self._known.get(str(level)) and now - at < _BELIEVED

    def _waiting(self, level: int, bucket: str, last: int, tried: set[str], alone: bool) -> list[Entry]:
        """On a sheet."""
        sheet = self._opened.get(level)
        self._leave_sheet()
        try:
            if sheet is None or not sheet.is_at(level, bucket):
                self._opened.pop(level, None)
                sheet = self._sheets.open(level, bucket)
                if sheet is not None:
                    self._opened[level] = sheet
                    for other in list(self._opened)[:-_KEPT]:
                        del self._opened[other]
            self._sheet, self._level_of_sheet = sheet, level
            if sheet is None or not sheet.is_writable:
                return []
            found = sheet.next_waiting(tried, alone=alone)
            if not found and not tried and is_number(bucket) and int(bucket) < last:
                sheet.shut()
        except OSError as error:
            if error.errno not in ONLY_THIS_FILE:
                raise
            return []
        return found

    # What is not due yet.

    def _hear_of_due(self, moment: float) -> None:
        if self._has_looked:
            self.next_due = moment if self.next_due is None else min(self.next_due, moment)
        else:
            self.look_for_due()

    def look_for_due(self) -> None:
        self._has_looked = True
        first = next(self._delayed(), None)
        self.next_due = None if first is None else number_of(first[1]) / 1000

    def _delayed(self) -> Iterator[tuple[str, str]]:
        """The directories and names of what is delayed, the soonest first."""
        for hour in listed(self._places.delayed):
            for second in listed(f"{self._places.delayed}/{hour}"):
                folder = f"{self._places.delayed}/{hour}/{second}"
                names = listed(folder)
                yield from ((folder, name) for name in names)
                if not names:
                    remove_empty(folder)
            remove_empty(f"{self._places.delayed}/{hour}")

    def shut_sheets(self) -> None:
        """Those in which nothing waits, and nothing more comes."""
        known = sequence.levels(self._numbers.read())
        for level in filter(is_number, self._sheets.levels()):
            for sheet in self._sheets.all_of(level, ("waiting",)):
                if sheet.is_writable and is_number(sheet.name) and int(sheet.name) < known.get(level, 0) // IN_A_BUCKET:
                    sheet.shut()

    def look(self) -> bool:
        """Also for what nobody has told us of. True: the file that tells is another one by now."""
        self.forget()
        with self._mutex:
            self.look_for_due()
            return self._numbers.look_again()

    def _move_due(self) -> None:
        now = self._clock.now()
        self.next_due = None
        self._exhausted.clear()  # what we put ourselves is no news
        for folder, name in self._delayed():
            moment = number_of(name) / 1000
            if moment > now:
                self.next_due = moment
                return
            self._make_pending(f"{folder}/{name}", name_of(name))

    def _make_pending(self, source: str, rest: str) -> None:
        priority_text, _, name = rest.partition(".")
        priority = int(priority_text) if is_number(priority_text) else 0
        try:
            self._numbers.put(priority, lambda number: move(source, self._places.waiting(priority, number, name)))
        except FileNotFoundError:
            pass  # another one has moved it


def is_number(text: str) -> bool:
    return text.removeprefix("-").isdigit() and text.isascii()
