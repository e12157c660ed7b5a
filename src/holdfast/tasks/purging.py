"""Removing what has ended: files, and lines (`sheet`)."""

from __future__ import annotations

from collections.abc import Collection
from time import time

from .. import system
from ..errors import CorruptStore, UnsafePath
from ..files import remove
from . import journal
from .claim import Desk
from .inventory import Inventory
from .journal import Task
from .lines import Lines
from .places import Places, listed
from .sheet import PURGED, TAKEN, Sheet, is_on_sheet
from .sheets import Sheets

_AN_HOUR = 3600.0


class Purge:
    def __init__(
        self, places: Places, desk: Desk, inventory: Inventory, sheets: Sheets, lines: Lines, older_than: float
    ) -> None:
        self._places = places
        self._desk = desk
        self._inventory = inventory
        self._sheets = sheets
        self._lines = lines
        self._older_than = older_than

    def files(self, states: Collection[str], kept: Collection[str]) -> int:
        """Of tasks that have one of their own, but for those that are kept."""
        removed = 0
        waiting, gone = self._inventory.cancelled_in_place(), set()
        for name in listed(self._places.tasks):
            if name in kept:
                continue
            try:
                claim = self._desk.open_named(f"{self._places.tasks}/{name}", "")
            except (OSError, CorruptStore, UnsafePath):
                continue
            if claim is not None:
                if claim.task.state in states and self._is_old(claim.task):
                    self._remove(name)
                    gone.add(claim.inode)
                    removed += 1
                claim.abandon()
        self._inventory.remove_places(gone & waiting)
        return removed + (self._put_aside() if "failed" in states else 0)

    def _put_aside(self) -> int:
        """What nobody could read, and somebody has removed from where it was to be mended."""
        removed = 0
        for name in listed(self._places.failed):
            path = f"{self._places.failed}/{name}"
            if not system.access(f"{self._places.tasks}/{name}", 0) and self._was_long_ago(path):
                remove(path)
                removed += 1
        return removed

    def _was_long_ago(self, path: str) -> bool:
        try:
            return time() - system.stat(path, follow_symlinks=False).st_mtime >= self._older_than
        except FileNotFoundError:
            return False

    def _is_old(self, task: Task) -> bool:
        return task.ended_at is None or time() - task.ended_at.timestamp() >= self._older_than

    def _remove(self, name: str) -> None:
        if is_on_sheet(name):
            self._lines.forget(name)
        for folder in (self._places.failed, self._places.cancelled, self._places.ending, self._places.tasks):
            remove(f"{folder}/{name}")

    def sheets(self) -> int:
        """Lines of what was done, and sheets that have no others."""
        removed = 0
        for sheet in self._sheets.all():
            removed += self._lines_of(sheet)
            if sheet.is_writable:
                self._sheets.remove_purged(sheet)
        self._sheets.remove_unused()
        return removed

    def _lines_of(self, sheet: Sheet) -> int:
        removed = 0
        done = sheet.done() if sheet.is_writable else {}
        for entry in sheet.entries(TAKEN) if done else ():
            if entry.id not in done or not self._is_old(journal.parse(sheet.line(entry) + done[entry.id], sheet.path)):
                continue
            with sheet.locked(entry) as got:
                if got and sheet.is_still(entry):
                    remove(f"{self._places.ending}/{entry.id}")
                    sheet.set_mark(entry, PURGED)
                    removed += 1
        return removed

    def what_was_never_put(self) -> None:
        for name in listed(self._places.new):
            path = f"{self._places.new}/{name}"
            try:
                if time() - system.stat(path).st_mtime > _AN_HOUR:
                    remove(path)
            except FileNotFoundError:
                pass
