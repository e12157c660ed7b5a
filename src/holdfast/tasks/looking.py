"""What is known of a task, wherever it is: in a file of its own, on a sheet, in a slot.

A task that is marked as running, and that nobody has locked, waits: its worker is dead, and the next one takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from .. import system
from ..errors import CorruptStore
from . import journal
from .journal import Task
from .lines import Lines
from .places import Places, listed
from .sheet import PURGED, TAKEN, is_on_sheet
from .sheets import Sheets


class Looker:
    def __init__(self, places: Places, sheets: Sheets, lines: Lines, is_at_work: Callable[[str], bool]) -> None:
        self._places = places
        self._sheets = sheets
        self._lines = lines
        self._is_at_work = is_at_work  # does somebody work on the task with this file?

    def find(self, id: str) -> Task | None:
        """None: there is no such task."""
        for _ in range(2 if is_on_sheet(id) else 1):  # it may get a file between the two looks
            try:
                return self._in_file(self._places.own(id))
            except FileNotFoundError:
                task = self._on_sheet(id)
            if task is not None:
                return task
        return None

    def all(self) -> Iterator[Task]:
        names = listed(self._places.tasks)
        for name in names:
            with suppress(OSError, CorruptStore):  # purged meanwhile, damaged, or no file: `find` says how
                yield self._in_file(f"{self._places.tasks}/{name}")
        files = set(names)
        for sheet in self._sheets.all():
            done = sheet.done()
            for entry in sheet.entries():
                if entry.id in files or entry.kind == PURGED:
                    continue
                with suppress(CorruptStore):
                    if entry.id in done and entry.kind == TAKEN:
                        yield journal.parse(sheet.line(entry) + done[entry.id], sheet.path)
                    elif (task := self.find(entry.id)) is not None:  # also if it has got a file meanwhile
                        yield task

    def files_of(self, id: str) -> tuple[str, ...]:
        """One of these is written to when something happens to a task."""
        own = self._places.own(id)
        entry = None if system.access(own, 0) else self._sheets.find(id)
        return (own,) if entry is None else entry.sheet.watched

    def _in_file(self, path: str) -> Task:
        task = self._unless_dead(lambda: (journal.read_file(path), path))
        assert task is not None
        return task

    def _on_sheet(self, id: str) -> Task | None:
        return self._unless_dead(lambda: self._line(id))

    def _line(self, id: str) -> tuple[Task, str] | None:
        found = self._lines.text(id)
        if found is None:
            return None
        text, slot = found
        try:
            task = journal.parse(text, id)
        except CorruptStore:
            path = self.files_of(id)[0]
            raise CorruptStore(f"{path}: the line of task {id} does not describe one. Mend it.", path=path) from None
        return task, self._lines.slots.path(slot) if slot else ""

    def _unless_dead(self, look: Callable[[], tuple[Task, str] | None]) -> Task | None:
        """`look` gives a task, and the file that its worker has locked if it runs."""
        for _ in range(2):  # it may have ended between the two looks
            found = look()
            if found is None:
                return None
            task, path = found
            if not path or task.state != "running" or self._is_at_work(path):
                return task
        object.__setattr__(task, "state", "pending")
        return task
