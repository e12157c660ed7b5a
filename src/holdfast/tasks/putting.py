"""How a task comes to be in a queue, and to its place: whole, once, and never in none.

    new/…        written in full
    tasks/<id>   a second name of it, which must be free: there is one task of an id
    its place    the first name becomes that of its place, by rename

Whoever dies in between has not said that it is there. What it leaves has no place, or one in new/; who puts the same
again finds that, and brings it to its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import count as counter
from time import monotonic, sleep

from .. import process, system
from ..errors import CorruptStore
from ..files import OwnedFd, read_open, remove, write_all
from ..wait import MAX_PAUSE_S, MIN_PAUSE_S
from . import journal
from .claim import Claim
from .clock import Clock
from .errors import QueueFull
from .places import IN_A_BUCKET, Places, file_name, listed, make, move, name_of, number_of, sync_folders
from .sequence import Sequence
from .sheet import Sheet, new_id, on_sheet
from .sheets import Sheets

TWO_NAMES = 2  # its own, and that of its place
_FEW = 8  # to wait for each of more takes longer than to wait for the whole file system


class Putter:
    def __init__(
        self,
        places: Places,
        sequence: Sequence,
        sheets: Sheets,
        clock: Clock,
        *,
        durable: bool,
        mode: int,
        most: int | None,
        count_waiting: Callable[[set[int] | None], list[int]],
    ) -> None:
        self._places = places
        self._sequence = sequence
        self._sheets = sheets
        self._clock = clock
        self._durable = durable
        self._mode = mode
        self._most = most
        self._count_waiting = count_waiting
        self._room = 0  # so many may be put before one has to count
        self._new_name = counter().__next__
        self._beginning = ""  # of such a name
        self._registry: process.Registry | None = None

    def put_all(self, tasks: Many[tuple[str, bytes, int, float]]) -> None:
        """One after the other, and then one wait for the disk."""
        sync = system.sync_file_system if self._durable and len(tasks) > _FEW else None
        put = 0
        try:
            for task in tasks:
                self.put(*task, sync=sync is None)
                put += 1
        finally:  # also of those before one that cannot be put
            if put and sync is not None:
                sync(self._places.tasks)

    def put_line(self, line: bytes, priority: int) -> str | None:
        """One of `put_lines`."""
        id, sheet = "", None

        def put_one(number: int) -> int:
            nonlocal id, sheet
            id = new_id(number)
            sheet = self._sheets.append(priority, number // IN_A_BUCKET, on_sheet(id, line))
            return 0 if sheet is None else 1

        self._sequence.put_some(priority, put_one)
        if sheet is None:
            return None
        if self._durable:
            sheet.sync()
        return id

    def put_lines(self, lines: Many[bytes], priority: int) -> list[str]:
        """Tasks that need no file of their own (`sheets`); their lines have an empty id. Gives the ids of those that
        were put: the others have to have a file."""
        ids: list[str] = []
        touched: dict[str, Sheet] = {}

        def put_some(first: int) -> int:
            """As many as go to one sheet."""
            room = IN_A_BUCKET - first % IN_A_BUCKET
            some = lines[len(ids) : len(ids) + room]
            new = [new_id(first + n) for n in range(len(some))]
            text = b"".join(map(on_sheet, new, some))
            sheet = self._sheets.append(priority, first // IN_A_BUCKET, text)
            if sheet is None:
                return 0
            ids.extend(new)
            touched[sheet.path] = sheet
            return len(new)

        try:
            while len(ids) < len(lines):
                before = len(ids)
                self._sequence.put_some(priority, put_some)
                if len(ids) == before:
                    break
        finally:  # also of those before one that cannot be put
            for sheet in touched.values() if self._durable else ():
                sheet.sync()
        return ids

    def put(self, id: str, line: bytes, priority: int, delay: float, *, sync: bool = True) -> None:
        name = file_name(id)
        private = self._private()
        try:
            file = OwnedFd(system.open_fd(private, system.O_NEW, self._mode))
        except FileNotFoundError:
            for folder in self._places.folders:  # somebody has tidied up
                make(folder)
            file = OwnedFd(system.open_fd(private, system.O_NEW, self._mode))
        try:
            write_all(file.fd, line)
            folders = self._put_file(file.fd, private, name, priority, delay)
            if sync and self._durable:
                if folders:
                    system.fsync(file.fd)
                    sync_folders(self._places.tasks, *folders)
                else:  # whoever put it may have died before it did, and who knows in which place it is
                    (system.sync_file_system or sync_folders)(self._places.tasks)
        except BaseException:
            remove(private)
            raise
        finally:
            file.close()

    def _private(self) -> str:
        if self._registry is not process.registry:  # this is another process
            self._beginning = f"{self._places.new}/{os.getpid()}.{os.urandom(8).hex()}."
            self._registry = process.registry  # last: there are threads
        return f"{self._beginning}{self._new_name()}"

    def _put_file(self, fd: int, private: str, name: str, priority: int, delay: float) -> list[str]:
        """Under its own name, which must be free, and then in its place. Gives the directories that have it now."""
        own = f"{self._places.tasks}/{name}"
        try:
            system.link(private, own)
        except FileExistsError:
            if not self._replace_never_put(private, name):
                remove(private)
                self.rescue(name)
                return []
        try:
            return self.enqueue(private, name, priority, delay)
        except FileNotFoundError:
            # Somebody who put the same, or looked for what the dead have left, has helped us. It may be over by now.
            if not system.access(own, 0) and not journal.has_begun(read_open(fd)):
                raise
            return []

    def _replace_never_put(self, private: str, name: str) -> bool:
        """What a power failure has left of somebody else's put of the same, of which nobody was told."""
        own = f"{self._places.tasks}/{name}"
        try:
            if not journal.was_never_put(own):
                return False
        except FileNotFoundError:
            return False
        inode = _inode(own)
        for folder in (self._places.failed, self._places.cancelled):
            if _inode(f"{folder}/{name}") == inode:
                remove(f"{folder}/{name}")
        again = self._private()
        system.link(private, again)
        system.rename(again, own)
        return True

    def enqueue(self, source: str, name: str, priority: int, delay: float) -> list[str]:
        """Bring a task to its place. Gives the directories that have a new name in them."""
        found: list[str] = []

        def move_to(target: str) -> None:
            made = move(source, target)
            folder = os.path.dirname(target)
            found.append(folder)
            while made and folder != self._places.root:
                folder = os.path.dirname(folder)
                found.append(folder)

        if delay > 0:
            now = self._clock.now()
            place = self._places.later(now + delay, priority, name)
            self._sequence.put_later(int((now + delay) * 1000), int(now * 1000), lambda: move_to(place))
        else:
            self._sequence.put(priority, lambda number: move_to(self._places.waiting(priority, number, name)))
        return found

    def rescue(self, name: str) -> bool:
        """Whoever put a task may have died before it was in its place. True: it was so, and is in its place now.

        What it leaves is in new/, or nowhere, and who puts it at this very moment has it in new/, too. Both of us may
        bring it to its place; one of us can.
        """
        own = f"{self._places.tasks}/{name}"
        try:
            file = OwnedFd(system.open_fd(own, system.O_READ))
        except OSError:
            return False
        with file:  # as long as it is open, no other file has its inode number
            try:
                task = journal.parse(read_open(file.fd), own)
            except (OSError, CorruptStore):
                return False
            return self._rescue(name, system.fstat(file.fd), task)

    def _rescue(self, name: str, st: os.stat_result, task: journal.Task) -> bool:
        own = f"{self._places.tasks}/{name}"
        if task.state != "pending":
            return False
        unplaced = self._unplaced_of(st.st_ino)
        if self._has_place(name, st, len(unplaced)):
            return False
        delay = 0 if task.history else task.delay
        if not unplaced:
            unplaced.append(self._private())
            system.link(own, unplaced[0])
        remove(f"{self._places.failed}/{name}")  # it could not be read, and somebody has mended it
        try:
            self.enqueue(unplaced[0], name, task.priority, delay)
        except FileNotFoundError:
            return False  # it has just been moved
        return True

    def _has_place(self, name: str, st: os.stat_result, unplaced: int) -> bool:
        """Besides its own name, those in new/, and that of how it ended."""
        ended = (self._places.failed, self._places.cancelled)
        others = sum(_inode(f"{folder}/{name}") == st.st_ino for folder in ended)
        return st.st_nlink - unplaced - others > 1

    def _unplaced_of(self, inode: int) -> list[str]:
        return [path for path in self._unplaced() if _inode(path) == inode]

    def _unplaced(self) -> list[str]:
        return [f"{self._places.new}/{name}" for name in listed(self._places.new)]

    def rescue_unplaced(self) -> None:
        """What dead ones have left in new/."""
        for path in self._unplaced():
            try:
                task = journal.read_file(path)
            except (OSError, CorruptStore):
                continue
            self.rescue(file_name(task.id))

    def put_again(self, claim: Claim) -> None:
        """A task that has ended, and that we have locked. Killed in between, it is found in new/."""
        name = file_name(claim.id)
        link = self._private()
        system.link(self._places.own(claim.id), link)
        claim.say(**{"is": "pending", "again": True})
        for folder in (self._places.failed, self._places.cancelled):
            remove(f"{folder}/{name}")
        try:
            folders = self.enqueue(link, name, claim.task.priority, 0)
        except FileNotFoundError:
            return  # somebody who looked for what the dead have left has helped us
        if self._durable:
            sync_folders(*folders)

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
        pause = MIN_PAUSE_S
        while self._room <= 0:
            # Others may put at the same time; so not all of what is left is ours.
            waiting = sum(self._count_waiting(set()))
            if waiting >= self._most:
                waiting = sum(self._count_waiting(None))  # without what was cancelled, which takes longer
            self._room = (self._most - waiting + 7) // 8
            if self._room > 0:
                break
            if deadline is not None and monotonic() >= deadline:
                many = "1 task waits" if waiting == 1 else f"{waiting} tasks wait"
                raise QueueFull(
                    f"{self._places.root}: {many} already. Start more workers, or wait for room with "
                    "put(…, wait=seconds).",
                    path=self._places.root,
                )
            sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_S)
        self._room -= 1


def _inode(path: str) -> int:
    try:
        return system.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0


def check_options(
    priority: int, attempts: int, delay: float, timeout: float | None, key: str | None, limit: int
) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > journal.LARGEST:
        most = journal.LARGEST
        raise ValueError(f"a priority is a whole number between -{most} and {most}, not {priority!r}")
    if not isinstance(attempts, int) or attempts < 1:
        raise ValueError(f"attempts is how often a task may be tried, not {attempts!r}")
    if not isinstance(delay, int | float) or not 0 <= delay < journal.LONGEST:
        raise ValueError(f"delay is seconds, not {delay!r}")
    if timeout is not None and (not isinstance(timeout, int | float) or not 0 < timeout < journal.LONGEST):
        raise ValueError(f"timeout is seconds, or None; not {timeout!r}")
    if key is not None:
        if not isinstance(key, str) or not key:
            raise ValueError(f"a key is a text that is not empty, not {key!r}")
        file_name(key)  # raises UnsafePath if it cannot be one
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit is how many may run at once, not {limit!r}")


def check_settings(max_pending: int | None, **seconds: float) -> None:
    """Those of a queue."""
    if max_pending is not None and (not isinstance(max_pending, int) or max_pending < 1):
        raise ValueError(f"max_pending is how many tasks may wait, or None; not {max_pending!r}")
    for name, value in seconds.items():
        if not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"{name} is seconds, not {value!r}")
