"""What is in a queue, by the names of places, and the marks on sheets: no other file is opened for it.

Others go on meanwhile, so a task may be seen in two places or in none. It counts as done only if it has no other name
but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from .. import system
from ..errors import CorruptStore
from . import journal
from .clock import Clock
from .finder import is_number
from .journal import STATES
from .places import Places, count, listed, name_of, names_in, number_of, task_id
from .putting import TWO_NAMES
from .sheet import MOVED, PURGED, Entry, Sheet
from .sheets import Sheets
from .slots import Slots


class Inventory:
    def __init__(
        self, places: Places, sheets: Sheets, slots: Slots, clock: Clock, is_locked: Callable[[str], bool]
    ) -> None:
        self._is_locked = is_locked  # does somebody work on the task with this file?
        self._places = places
        self._sheets = sheets
        self._slots = slots
        self._counted: dict[str, tuple[object, int]] = {}  # of sheets in which nothing waits, how many were done
        self._clock = clock
        self._known_done: set[str] = set()

    def names(self, state: str) -> list[str]:
        """Of the files of the tasks in a state."""
        places = self._places
        if state == "running":
            return [name for name, is_dead in self._names_begun() if not is_dead]
        if state == "pending":
            gone = set(listed(places.cancelled))  # and perhaps still where they waited
            left = [name for name, is_dead in self._names_begun() if is_dead]
            return left + [name for name in self._names_waiting() if name not in gone]
        if state == "done":
            done = self._names_done()
            there = [name for name in listed(places.tasks) if name in done]
            return there + [id for sheet in self._sheets.all() for id in self._done_on(sheet)]
        return listed(places.failed if state == "failed" else places.cancelled)

    def _names_begun(self) -> list[tuple[str, bool]]:
        """What somebody has begun, and whether that one is dead: then it waits for the next one."""
        begun = {name_of(place): f"{self._places.running}/{place}" for place in listed(self._places.running)}
        for slot, task in self._slots.in_hand().items():
            begun.setdefault(task.id, self._slots.path(slot))
        return [(name, self._is_dead(path)) for name, path in begun.items()]

    def _is_dead(self, path: str) -> bool:
        with suppress(OSError):
            return not self._is_locked(path)
        return False

    def _names_done(self) -> set[str]:
        """Those that have no place any more. Not to have seen it in one is not enough: it may be on its way."""
        others = {name for other in STATES if other != "done" for name in self.names(other)}
        found = set(listed(self._places.tasks)) - others
        known = self._known_done
        done = {name for name in found if name in known or self._has_one_name(name)}
        self._known_done = done
        return done

    def _has_one_name(self, name: str) -> bool:
        own = f"{self._places.tasks}/{name}"
        try:
            st = system.stat(own, follow_symlinks=False)
            return st.st_nlink == 1 or (self._is_in_new(st.st_ino) and journal.read_file(own).state == "done")
        except (FileNotFoundError, CorruptStore):
            return False  # purged

    def _is_in_new(self, inode: int) -> bool:
        """It is being put; or was about to be done again, by somebody who died."""
        for name in listed(self._places.new):
            with suppress(FileNotFoundError):
                if system.stat(f"{self._places.new}/{name}", follow_symlinks=False).st_ino == inode:
                    return True
        return False

    def _names_waiting(self) -> list[str]:
        places = self._places
        on_sheets: dict[str, list[str]] = {}
        for level, entry in self._waiting_on_sheets():
            on_sheets.setdefault(level, []).append(entry.place)
        levels = sorted({*filter(is_number, listed(places.pending)), *on_sheets}, key=int, reverse=True)
        found = [
            name_of(place)
            for level in levels
            for place in sorted(
                [*on_sheets.get(level, ()), *(place for _, place in names_in(f"{places.pending}/{level}", 1))]
            )
        ]
        parts = {places.delayed: 2, places.parked: 3}  # before the name
        return found + [
            place.split(".", parts[folder])[-1]
            for folder, depth in places.put_off
            for _, place in names_in(folder, depth)
        ]

    def _waiting_on_sheets(self) -> Iterator[tuple[str, Entry]]:
        for level in filter(is_number, self._sheets.levels()):
            for sheet in self._sheets.all_of(level, ("waiting",)):
                yield from ((level, entry) for entry in sheet.waiting())

    def _done_on(self, sheet: Sheet) -> list[str]:
        """The ids of those that were done there, and have no file."""
        done = sheet.done()
        gone = {entry.id for entry in sheet.entries(MOVED + PURGED)} if done else set()
        return [id for id in done if id not in gone]

    def _count_done_on_sheets(self) -> int:
        total, known = 0, self._counted
        self._counted = {}
        for sheet in self._sheets.all():
            seen = sheet.version()
            key, number = known.get(sheet.path, (None, 0))
            if seen is None or key != seen:
                number = len(self._done_on(sheet))
            self._counted[sheet.path] = (seen, number)
            total += number
        return total

    def put_off(self) -> dict[str, float | None]:
        """What waits and cannot be begun now, and for how many seconds; None: until others of its key have ended."""
        places, now = self._places, self._clock.now()
        found: dict[str, float | None] = {}
        for _, place in names_in(places.parked, 1):
            found[task_id(place.split(".", 3)[-1])] = None
        for _, place in names_in(places.delayed, 2):
            found[task_id(place.split(".", 2)[-1])] = max(0.0, number_of(place) / 1000 - now)
        return found

    def count_waiting(self, gone: set[int] | None = None) -> list[int]:
        """How many wait in pending/, and in those for what is put off."""
        gone = self.cancelled_in_place() if gone is None else gone
        pending, *rest = [
            self._count(folder, depth, gone) for folder, depth in ((self._places.pending, 2), *self._places.put_off)
        ]
        return [pending + sum(1 for _ in self._waiting_on_sheets()), *rest]

    def stats(self) -> dict[str, int]:
        """How many tasks are in which state. `delayed` and `parked` are among the pending ones."""
        places = self._places
        gone = self.cancelled_in_place()
        begun = [is_dead for _, is_dead in self._names_begun()]
        running = begun.count(False)
        pending, delayed, parked = self.count_waiting(gone)
        pending += begun.count(True)
        pending += delayed + parked
        failed, cancelled = len(listed(places.failed)), len(listed(places.cancelled))
        return {
            "pending": pending,
            "running": running,
            "done": len(self._names_done()) + self._count_done_on_sheets(),
            "failed": failed,
            "cancelled": cancelled,
            "delayed": delayed,
            "parked": parked,
        }

    def cancelled_in_place(self) -> set[int]:
        """The inodes of what was cancelled and not yet removed from where it waits."""
        found = set()
        for name in listed(self._places.cancelled):
            with suppress(FileNotFoundError):
                st = system.stat(f"{self._places.cancelled}/{name}")
                if st.st_nlink > TWO_NAMES:
                    found.add(st.st_ino)
        return found

    def _count(self, folder: str, depth: int, without: set[int]) -> int:
        number = count(folder, depth)
        for where, name in names_in(folder, depth) if without else ():
            with suppress(FileNotFoundError):
                number -= system.stat(f"{where}/{name}").st_ino in without
        return number

    def is_empty(self) -> bool:
        """Is there nothing left to be done, and nobody at it?"""
        places = self._places
        if self._slots.in_hand() or any(True for _ in self._waiting_on_sheets()) or self._slots.in_hand():
            return False
        # What runs first and last: it may be given back meanwhile.
        folders = ((places.running, 0), (places.pending, 2), *places.put_off, (places.running, 0))
        there = (name for folder, depth in folders for _, name in names_in(folder, depth))
        if not any(name[:1].isdigit() and name_of(name) for name in there):
            return True  # what else is there is not ours
        gone = self.cancelled_in_place()
        return bool(gone) and not any(self._count(folder, depth, gone) for folder, depth in folders)

    def remove_places(self, inodes: set[int]) -> None:
        """Of what was cancelled while it waited."""
        for folder, depth in ((self._places.pending, 2), *self._places.put_off) if inodes else ():
            for where, name in names_in(folder, depth):
                with suppress(FileNotFoundError):
                    if system.stat(f"{where}/{name}").st_ino in inodes:
                        system.unlink(f"{where}/{name}")
