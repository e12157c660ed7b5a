"""How a task comes to be in a queue, and to its place: whole, once, and never in none.

    new/…        written in full
    tasks/<id>   a second name of it, which must be free: there is one task of an id
    its place    the first name becomes that of its place, by rename

Whoever dies in between has not said that it is there. What it leaves has no place, or one in new/; who puts the same
again finds that, and brings it to its place.
"""

from __future__ import annotations

import os
from itertools import count as counter
from time import monotonic, sleep

from .. import system
from ..errors import CorruptStore
from . import journal
from .clock import Clock
from .errors import QueueFull
from .journal import Task
from .places import Places, count, file_name, listed, move, name_of, number_of, remove, sync_folders
from .sequence import Sequence

TWO_NAMES = 2  # its own, and that of its place
_A_MOMENT = 0.01  # seconds between looks for room


class Putter:
    def __init__(
        self, places: Places, sequence: Sequence, clock: Clock, *, durable: bool, mode: int, most: int | None
    ) -> None:
        self._places = places
        self._sequence = sequence
        self._clock = clock
        self._durable = durable
        self._mode = mode
        self._most = most
        self._room = 0  # so many may be put before one has to count
        self._new_name = counter().__next__

    def put(self, id: str, line: bytes, priority: int, delay: float) -> None:
        name = file_name(id)
        private = self._private()
        fd = system.open_fd(private, system.O_NEW, self._mode)
        try:
            rest = line
            while rest:
                rest = rest[system.write(fd, rest) :]
            target = self._put_file(private, name, priority, delay)
            if self._durable and target:
                system.fsync(fd)
                sync_folders(self._places.tasks, os.path.dirname(target))
        except BaseException:
            remove(private)
            raise
        finally:
            system.close(fd)

    def _private(self) -> str:
        return f"{self._places.new}/{os.getpid()}.{self._new_name()}.{os.urandom(4).hex()}"

    def _put_file(self, private: str, name: str, priority: int, delay: float) -> str | None:
        """Under its own name, which must be free, and then in its place. None: there is one already."""
        own = f"{self._places.tasks}/{name}"
        try:
            system.link(private, own)
        except FileExistsError:
            remove(private)
            self.rescue(own)
            return None
        try:
            return self.enqueue(private, name, priority, delay)
        except FileNotFoundError:
            if not system.access(own, 0):
                raise
            return None  # somebody who put the same has helped us

    def enqueue(self, source: str, name: str, priority: int, delay: float) -> str:
        found = []

        def move_to(number: int) -> None:
            found.append(self._places.waiting(priority, number, name))
            move(source, found[-1])

        def move_later(_: int) -> None:
            found.append(self._places.later(now + delay, priority, name))
            move(source, found[-1])

        if delay > 0:
            now = self._clock.now()
            self._sequence.put_later(int((now + delay) * 1000), int(now * 1000), move_later)
        else:
            self._sequence.put(priority, move_to)
        return found[-1]

    def rescue(self, own: str) -> bool:
        """Whoever put a task may have died before it was in its place. True: it was so, and is in its place now."""
        try:
            st, task = system.stat(own), journal.read_file(own)
        except (FileNotFoundError, CorruptStore):
            return False
        if task.state != "pending" or st.st_nlink > TWO_NAMES:
            return False
        if st.st_nlink == 1:
            self.give_place(task)
            return True
        for name in listed(self._places.new):
            path = f"{self._places.new}/{name}"
            try:
                if system.stat(path).st_ino == st.st_ino:
                    self.enqueue(path, file_name(task.id), task.priority, 0)
                    return True
            except FileNotFoundError:
                pass  # it has just been moved
        return False

    def give_place(self, task: Task) -> None:
        """To a task that has none."""
        name = file_name(task.id)
        link = self._private()
        system.link(f"{self._places.tasks}/{name}", link)
        self.enqueue(link, name, task.priority, 0)

    def put_back(self, place: str, priority: int, delay: float) -> None:
        """From running/ to where it waits: for a time, or in its old place."""
        name = name_of(place)
        source = f"{self._places.running}/{place}"
        if delay > 0:
            self.enqueue(source, name, priority, delay)
        else:
            self._sequence.put(priority, lambda _: move(source, self._places.waiting(priority, number_of(place), name)))

    def wait_for_room(self, wait: float | None) -> None:
        assert self._most is not None
        deadline = None if wait is None else monotonic() + wait
        while self._room <= 0:
            self._room = (self._most - self._count_waiting() + 1) // 2 if self._most else 0
            if self._room > 0:
                break
            if deadline is not None and monotonic() >= deadline:
                raise QueueFull(
                    f"{self._places.root}: {self._most} tasks wait already. Start more workers, or wait for room with "
                    "put(…, wait=seconds).",
                    path=self._places.root,
                )
            sleep(_A_MOMENT)
        self._room -= 1

    def _count_waiting(self) -> int:
        return count(self._places.pending, 2) + sum(count(folder, depth) for folder, depth in self._places.put_off)
