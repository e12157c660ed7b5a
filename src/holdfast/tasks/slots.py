"""Slots: what a worker has in hand of the tasks that have no file of their own (`sheets`).

A slot is a file with what the task's own would have: its line, and that it runs. Its worker holds the kernel lock on
it, for one task after the other, and so has neither to make nor to rename a file for each. Between two tasks it begins
with an empty line.

Whoever finds one that is not locked goes by the sheet: if that says that the task is in this slot, and not that it is
done, then its worker has died, and the slot becomes the task's own file.
"""

from __future__ import annotations

import os
import re

from .. import system
from ..errors import CorruptStore
from ..files import OwnedFd, read_open, remove, try_lock, write_at
from . import journal
from .journal import Task
from .places import Places, listed, make
from .sheet import TAKEN, is_on_sheet

_EMPTY = b"\n"
_NAME = re.compile("[0-9a-f]{16}")


class Slot:
    """One that is locked."""

    def __init__(self, path: str, name: str, file: OwnedFd) -> None:
        self.path, self.name, self.file = path, name, file
        self.mark = TAKEN + name.encode()  # of the line that is in it
        self.length = 0
        self.is_shared = False  # somebody may have a copy of the descriptor, and with it the lock

    @staticmethod
    def new(folder: str, mode: int) -> Slot:
        while True:
            name = os.urandom(8).hex()
            path = f"{folder}/{name}"
            file = OwnedFd(system.open_fd(path, system.O_NEW, mode))
            # Another worker may take it for the slot of a dead worker, and lock and remove it.
            if try_lock(file.fd, system.EX_NB) and system.access(path, 0):
                return Slot(path, name, file)
            file.close()

    @staticmethod
    def existing(path: str, name: str) -> Slot:
        """Raises FileNotFoundError, or BlockingIOError if somebody has it."""
        file = OwnedFd(system.open_fd(path, system.O_EXISTING))
        system.lock(file.fd, system.EX_NB)
        system.stat(path)  # whoever had it may have removed it
        return Slot(path, name, file)

    def write_again(self, mode: int) -> None:
        """If somebody has removed it."""
        if system.access(self.path, 0):
            return
        text = read_open(self.file.fd)
        old, self.file = self.file, OwnedFd(system.open_fd(self.path, system.O_NEW, mode))
        self.length = 0
        system.lock(self.file.fd, system.EX_NB)
        self.fill(text)
        self._removed = old  # a claim may still know it by its number

    def fill(self, text: bytes) -> None:
        fd = self.file.fd
        if len(text) < self.length:
            system.ftruncate(fd, len(text))  # first: what is left of the last one must not be read with this one
        self.length = len(text)
        write_at(fd, text, 0)

    def empty(self) -> None:
        system.pwrite(self.file.fd, _EMPTY, 0)

    def remove(self) -> None:
        if self.file.is_open:
            remove(self.path)
            self.file.close()


class Slots:
    """Those of a process that has a queue open."""

    def __init__(self, places: Places, mode: int) -> None:
        self._folder = places.slots
        self._mode = mode
        self._idle: list[Slot] = []

    def __del__(self) -> None:
        self.close()

    def get(self) -> Slot:
        while True:
            try:
                slot = self._idle.pop()
            except IndexError:
                break
            if slot.file.is_open:
                return slot
        try:
            return Slot.new(self._folder, self._mode)
        except FileNotFoundError:
            make(self._folder)  # somebody has tidied up
            return Slot.new(self._folder, self._mode)

    def keep(self, slot: Slot) -> None:
        """For the next one."""
        self._idle.append(slot)

    def give_back(self, slot: Slot) -> None:
        """One that is empty."""
        if slot.is_shared or not slot.file.is_open:
            slot.remove()
        else:
            self._idle.append(slot)

    def close(self) -> None:
        """Nothing more is to be done here."""
        while True:
            try:
                slot = self._idle.pop()
            except IndexError:
                return
            slot.remove()

    # Those of all.

    def names(self) -> list[str]:
        return [name for name in listed(self._folder) if _NAME.fullmatch(name)]  # not what somebody else has put there

    def path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def text(self, name: str) -> bytes:
        """What is in it; nothing if it is empty, or gone."""
        try:
            file = OwnedFd(system.open_fd(self.path(name), system.O_READ))
        except FileNotFoundError:
            return b""
        text = read_open(file.fd)
        file.close()
        return b"" if text.startswith((_EMPTY, b"\0")) else text

    def in_hand(self) -> dict[str, Task]:
        """What is in all of them, by their names. It may be done by now."""
        found = {}
        for name in self.names():
            try:
                task = journal.parse(self.text(name), name)
            except (CorruptStore, OSError):
                continue
            if is_on_sheet(task.id):
                found[name] = task
        return found
