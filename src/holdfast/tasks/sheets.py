"""The sheets of a queue (`sheet`): which there are, where the next line goes, and what becomes of old ones."""

from __future__ import annotations

from collections.abc import Iterator

from .. import system
from ..files import remove
from .places import IN_A_BUCKET, Places, listed, make, sync_folders
from .sheet import LONGEST, ONLY_THIS_FILE, TAKEN, WAITS, Entry, Sheet, is_on_sheet

_KEPT = 8  # sheets, each of another priority, that one who puts has open


class Sheets:
    """All of a queue."""

    def __init__(self, places: Places, *, mode: int, durable: bool, usable: bool) -> None:
        self._root = places.sheets
        self._mode = mode
        self._durable = durable
        self.usable = usable  # for what is put; what is there is done in any case
        self._current: dict[int, Sheet] = {}  # of each priority, the one that is being written

    # Adding.

    def has_room_for(self, line: bytes) -> bool:
        """A long one has a file: who reads a sheet reads all of it."""
        return self.usable and len(line) <= LONGEST

    def append(self, level: int, bucket: int, text: bytes) -> Sheet | None:
        """Add lines to a sheet, which is made if it is not there. None: it cannot be done here, or now."""
        name = f"{bucket:09d}"
        sheet = self._current.get(level)
        try:
            for _ in range(2):
                if sheet is None or sheet.name != name or not sheet.is_ours:
                    sheet = self._make(level, name)
                    if sheet is None:
                        return None
                    self._current[level] = sheet
                    for other in list(self._current)[:-_KEPT]:
                        self._current.pop(other, None)
                if sheet.append(text):
                    return sheet
                sheet = None
        except OSError as error:
            if error.errno not in ONLY_THIS_FILE:
                raise
        return None

    def _make(self, level: int, name: str) -> Sheet | None:
        folder = f"{self._root}/{level}"
        try:
            sheet = Sheet(folder, name, "waiting", self._mode, create=True)
        except FileNotFoundError:
            for state in ("waiting", "past", "done"):
                make(f"{folder}/{state}")
            sheet = Sheet(folder, name, "waiting", self._mode, create=True)
        past = self.open(level, name, "past")
        if past is not None:  # who was stopped for so long has to take the next number
            if past.inode != sheet.inode:  # else somebody is just moving it there
                remove(sheet.path)
            return None
        sheet.make_done()
        if self._durable:  # who has made it may have died before it did this
            sync_folders(f"{folder}/waiting", f"{folder}/done", folder, self._root)
        return sheet

    # Looking.

    def levels(self) -> list[str]:
        return listed(self._root)

    def buckets(self, level: int | str) -> list[str]:
        """Those in which something may wait."""
        return listed(f"{self._root}/{level}/waiting")

    def open(self, level: int | str, name: str, state: str = "waiting") -> Sheet | None:
        try:
            return Sheet(f"{self._root}/{level}", name, state, self._mode)
        except FileNotFoundError:
            return None

    def all(self) -> Iterator[Sheet]:
        for level in self.levels():
            yield from self.all_of(level, ("waiting", "past"))  # in which order they go

    def all_of(self, level: str, states: tuple[str, ...]) -> Iterator[Sheet]:
        for name in sorted({name for state in states for name in listed(f"{self._root}/{level}/{state}")}):
            seen = set()
            for state in states:
                try:
                    sheet = self.open(level, name, state)
                except OSError as error:
                    if error.errno not in ONLY_THIS_FILE:
                        raise
                    continue
                if sheet is not None and sheet.inode not in seen:  # for a moment it has both names
                    seen.add(sheet.inode)
                    yield sheet

    def find(self, id: str) -> Entry | None:
        if not is_on_sheet(id):
            return None
        name = f"{int(id.partition('-')[0]) // IN_A_BUCKET:09d}"
        for level in self.levels():
            for state in ("waiting", "past"):
                sheet = self.open(level, name, state)
                entry = None if sheet is None else sheet.find(id)
                if entry is not None:
                    return entry
        return None

    def remove_purged(self, sheet: Sheet) -> None:
        """If nothing is left in it."""
        if sheet.state == "past" and not any(sheet.entries(WAITS + TAKEN)):
            if self._durable:
                sheet.sync()  # else a power failure could leave it without the marks, and without what was done
            remove(sheet.path)
            remove(sheet.watched[1])

    def remove_unused(self) -> None:
        """What was done on sheets that are not there any more: somebody died who removed them."""
        for level in self.levels():
            folder = f"{self._root}/{level}"
            for name in listed(f"{folder}/done"):
                if not system.access(f"{folder}/waiting/{name}", 0) and not system.access(f"{folder}/past/{name}", 0):
                    remove(f"{folder}/done/{name}")
