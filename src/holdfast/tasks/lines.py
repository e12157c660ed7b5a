"""Tasks on sheets: how one is taken, and how it gets a file of its own.

    take       the line is written into a slot, and then marked with the name of that
    done       that is written down beside the sheet, and then the slot is empty
    a file     the slot gets the task's own name, and then a place in running/, and then the line is marked as moved

Whoever dies in between leaves a slot that is not locked. What is done is done; what is in a slot by its mark goes on
from there, by whoever finds it (`left_in`); what is not was never taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import owner, system
from ..errors import CorruptStore
from ..files import OwnedFd
from . import journal
from .about import write_boot
from .claim import Claim, Desk
from .places import Places, content, make, move, move_over, number_of, sync_folders
from .sheet import LONGEST, MOVED, ONLY_THIS_FILE, PURGED, TAKEN, WAITS, Entry, Sheet
from .sheets import Sheets
from .slots import Slot, Slots

_TRIES = 3
_BEGUN = {"state": "running", "tried": 1, "token": 1}


class Lines:
    def __init__(self, places: Places, sheets: Sheets, slots: Slots, desk: Desk) -> None:
        self._places = places
        self._sheets = sheets
        self.slots = slots
        self._desk = desk
        self._is_looked_after = False  # since the machine was started

    def take(self, entry: Entry, place: str) -> Claim | None:
        """Begin a task that waits. None: somebody else has it."""
        claim = self._take(entry, place, journal.running_line(1))
        if claim is not None:
            # It was made for this claim, and nobody else has seen it yet.
            claim.task.__dict__.update(_BEGUN)
        return claim

    def _take(self, entry: Entry, place: str, more: bytes) -> Claim | None:
        slot = self.slots.get()
        taken = entry.sheet.take(entry, slot, more)  # if this fails, or is interrupted, it is as if we had died
        if taken is None:
            self.slots.keep(slot)
            return None
        task, text = taken
        return Claim(self._desk, slot.file, place, task, text, Leaf(self, entry, slot, more))

    def give_file(self, entry: Entry) -> str | None:
        """One that waits, or that nobody has: then it waits, with a file of its own. Gives its place; None: somebody
        was quicker."""
        claim = self._take(entry, entry.place, b"")
        if claim is None:
            return None
        claim.put_back()
        return self._places.waiting(claim.task.priority, number_of(claim.place), claim.id)

    def give_file_to_done(self, entry: Entry) -> None:
        """One that is to be done again, perhaps."""
        sheet = entry.sheet
        with sheet.locked(entry) as got:
            history = sheet.history(entry.id)
            if not got or not history or not sheet.is_still(entry):
                return
            slot = self.slots.get()  # if this is interrupted, `left_in` goes on
            slot.fill(sheet.line(entry) + history)
            self._link(slot, entry.id)
            if self._desk.durable:
                system.fsync(slot.file.fd)
                sync_folders(self._places.tasks)
            sheet.set_mark(entry, MOVED)
            slot.remove()  # not to be used again: it is the task's file

    def set_aside(self, entry: Entry) -> bool:
        """What nobody can do must not be in the way of the others. It is left to a person, in failed/. False: somebody
        was quicker."""
        slot = self.slots.get()
        if entry.sheet.take(entry, slot, b"", check=False) is None:
            self.slots.keep(slot)
            return False
        self._link(slot, entry.id)
        move_over(slot.path, f"{self._places.failed}/{entry.id}")
        entry.sheet.set_mark(entry, MOVED)
        slot.file.close()
        return True

    # What the dead have left.

    def left_in(self, name: str) -> Claim | None:
        """What was in a slot that nobody has locked, with a file of its own now. None: nothing."""
        path = self.slots.path(name)
        # First with a descriptor that can only read: to close one that can write is news to all who watch.
        if self._desk.is_locked(path):
            return None
        try:
            slot = Slot.existing(path, name)
        except (FileNotFoundError, BlockingIOError):
            return None  # somebody was quicker
        claim = self._opened(slot)
        if claim is not None:
            self.detach(claim)
        return claim

    def _opened(self, slot: Slot) -> Claim | None:
        """None: it has nothing, and is removed; or somebody is at the line, and it is looked again."""
        text = self.slots.text(slot.name)
        try:
            task = journal.parse(text, slot.path)
            entry = self._sheets.find(task.id)
        except CorruptStore:
            entry = None
        if entry is None:
            slot.remove()
            return None
        with entry.sheet.locked(entry) as got:
            if got and self._is_left_in(slot, task.id):
                return Claim(self._desk, slot.file, entry.place, task, text, Leaf(self, entry, slot, b""))
            if got:
                slot.remove()
            else:
                slot.file.close()
        return None

    def _is_left_in(self, slot: Slot, id: str) -> bool:
        """Is it in this slot, by its mark, and not done?"""
        entry = self._sheets.find(id)  # again: it is locked now
        if entry is None or entry.kind != TAKEN:
            return False
        if entry.sheet.history(id):
            if self._is_own(slot, id):
                entry.sheet.set_mark(entry, MOVED)  # somebody died who gave it a file
            return False
        if system.access(f"{self._places.tasks}/{id}", 0) and not self._is_own(slot, id):
            entry.sheet.set_mark(entry, MOVED)  # it has one, and this is not it
            return False
        return slot.name.startswith(entry.slot)  # whoever is killed may have written half of a mark

    def recover(self) -> int:
        """Have what is lost wait again. Gives how many."""
        found = 0
        for entry in list(self._lost()):
            try:
                found += self.give_file(entry) is not None
            except CorruptStore:
                self.set_aside(entry)
        return found

    def _mend_marks(self) -> None:
        """They are not synced when a task ends, but how it ended is: it does not wait, whatever its mark says."""
        for sheet in filter(_is_writable, self._sheets.all()):
            waiting = list(sheet.entries(WAITS))
            done = sheet.done() if waiting else {}
            for entry in waiting:
                has_file = system.access(f"{self._places.tasks}/{entry.id}", 0)
                if not has_file and entry.id not in done:
                    continue
                with sheet.locked(entry) as got:
                    if got and sheet.is_still(entry):
                        sheet.set_mark(entry, MOVED if has_file else TAKEN)

    def _lost(self) -> Iterator[Entry]:
        """What was taken, is not done, and is nowhere: the power has failed, or somebody has tidied up."""
        for sheet in filter(_is_writable, self._sheets.all()):
            # The power can have failed between the two halves of a mark. And nobody looks at what waits on old sheets:
            # it was put there by somebody who had been stopped for long.
            is_past = sheet.state == "past"
            taken = [entry for entry in sheet.entries(TAKEN + WAITS) if entry.kind == TAKEN or entry.slot or is_past]
            done = sheet.done() if taken else {}
            missing = [entry for entry in taken if entry.id not in done and not self._is_in_hand(entry)]
            done = sheet.done() if missing else {}  # again: it is done before it leaves its slot
            for entry in missing:
                if entry.id not in done and not system.access(f"{self._places.tasks}/{entry.id}", 0):
                    yield entry

    def look_after_boot(self) -> None:
        """When the machine has been started since somebody was here, what was in hand is in no hand any more, and what
        was not synced may be lost: a slot, though the mark that names it is there."""
        boot = owner.boot_id()
        if self._is_looked_after or self._desk.shared or boot is None:
            return
        if self._last_boot() != boot:
            self._mend_marks()
            self.recover()
            write_boot(self._places, self._desk.mode)
        self._is_looked_after = True

    def _last_boot(self) -> str:
        try:
            return content(f"{self._places.root}/boot").decode(errors="replace").strip()
        except OSError as error:
            if error.errno not in ONLY_THIS_FILE:
                raise
            return ""  # something else is in its place, and is replaced

    def _is_in_hand(self, entry: Entry) -> bool:
        return bool(entry.slot) and self.slots.text(entry.slot).startswith(entry.sheet.line(entry))

    # A file of its own.

    def detach(self, claim: Claim) -> None:
        """Each step only if it is not done yet: whoever was interrupted in it may call it again."""
        leaf = claim.leaf
        assert leaf is not None
        slot, places = leaf.slot, self._places
        place = f"{places.running}/{claim.place}"
        if not self._is_own(slot, leaf.entry.id):
            self._link(slot, leaf.entry.id)
            claim.use(slot.file)
        if self._desk.durable:
            system.fsync(slot.file.fd)
            sync_folders(places.tasks)
        if not claim.is_named(place):
            move(slot.path, place)
        if self._desk.durable:
            sync_folders(places.running)
        leaf.entry.sheet.set_mark(leaf.entry, MOVED)
        claim.has_file(OwnedFd(slot.file.detach()))

    def _link(self, slot: Slot, id: str) -> None:
        """What is in a slot gets the task's own name."""
        own = f"{self._places.tasks}/{id}"
        for last in (False, True):
            try:
                system.link(slot.path, own)
            except FileExistsError:
                if not self._is_own(slot, id):  # else somebody died here
                    raise CorruptStore(f"{own}: there are two tasks with this id", path=own) from None
            except FileNotFoundError:
                if last:
                    raise
                make(self._places.tasks)  # somebody has tidied up
                make(self._places.slots)
                slot.write_again(self._desk.mode)
            else:
                return

    def _is_own(self, slot: Slot, id: str) -> bool:
        try:
            return system.stat(f"{self._places.tasks}/{id}").st_ino == system.fstat(slot.file.fd).st_ino
        except FileNotFoundError:
            return False

    def forget(self, id: str) -> None:
        """A task with a file of its own is to be removed. Somebody may have died before the line was marked."""
        entry = self._sheets.find(id)
        if entry is not None and entry.kind in (TAKEN, MOVED):
            if entry.kind == TAKEN:
                entry.sheet.set_mark(entry, MOVED)
            if self._desk.durable:
                entry.sheet.sync()  # else it would wait again after a power failure

    # Looking.

    def text(self, id: str) -> tuple[bytes, str] | None:
        """What the task's own file would say, and the slot in which it is. None: it has one, or is not there."""
        for _ in range(_TRIES):
            entry = self._sheets.find(id)
            if entry is None or entry.kind in (MOVED, PURGED):
                return None
            line = entry.sheet.line(entry)
            if entry.kind == WAITS:
                return line, ""
            history = entry.sheet.history(id)
            if history:
                return line + history, ""
            text = self.slots.text(entry.slot) if entry.slot else b""
            if text.startswith(line):
                return text, entry.slot
            if system.access(f"{self._places.tasks}/{id}", 0):
                return None  # it has just got one
        return line, ""  # `_lost`; else, it would have been done by the second look


def _is_writable(sheet: Sheet) -> bool:
    return sheet.is_writable


class Leaf:
    """What a claim knows of a task without a file."""

    def __init__(self, lines: Lines, entry: Entry, slot: Slot, begun: bytes) -> None:
        self.lines = lines
        self.entry = entry
        self.slot = slot
        self._begun = begun  # the line that says so

    _is_completing = _has_left = False
    longest = LONGEST

    @property
    def is_done(self) -> bool:
        """Was it written down, though whoever did so was interrupted?"""
        return self._is_completing and bool(self.entry.sheet.history(self.entry.id))

    def leave(self) -> None:
        """Once: whoever was interrupted in it may call it again."""
        if not self._has_left:
            self.slot.empty()
            self._has_left = True
            self.lines.slots.give_back(self.slot)

    def complete(self, id: str, line: bytes, *, sync: bool) -> None:
        self._is_completing = True
        self.entry.sheet.add_done(id, self._begun, line, sync=sync)
        self.leave()
