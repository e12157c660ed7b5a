"""The last number of every priority: the order of what is put, and the sign that something was.

Each has a line of 32 bytes, the priority and the number. The line `later` has the moment at which something that was
delayed is due, in milliseconds: the soonest that its writer knew.

Whoever puts a task has the file locked meanwhile, and writes the number when the task is in its place: who reads a new
number finds the task. Nothing rests on it but order and wake-ups: a number twice is no harm, since the names of places
end with the id, and a file that is lost is made again.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable
from time import monotonic, sleep

from .. import process, system
from ..files import OwnedFd, inode_of, try_lock
from .places import IN_A_BUCKET, Places, listed, number_of

LATER = "later"
_LINE = 32
_SHORT = 1 << 7
_SIZES = (_SHORT, 1 << 12, 1 << 20)
_A_MOMENT, _PATIENCE = 0.000_05, 1.0  # seconds


class Sequence:
    def __init__(self, places: Places, mode: int, *, ranged: bool = False) -> None:
        self.path = f"{places.root}/sequence"
        self._places = places
        self._mode = mode
        self._set_lock = system.lock_past_end if ranged else system.lock
        self._mutex = RLock()  # whoever has it may drop a claim, at any time, by the collector of garbage
        self._file: OwnedFd | None = None
        self._registry = process.registry

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def fd(self) -> int:
        file = self._file
        if file is None or not file.is_open:
            if self._registry is not process.registry:
                self._mutex = RLock()  # a thread that is not in this process may have had it
            self._registry = process.registry
            file = self._file = OwnedFd(system.open_fd(self.path, system.O_LOCK, self._mode))
        return file.fd

    def look_again(self) -> bool:
        """Open the file anew if it is another one by now. True: it is."""
        try:
            st, mine = system.stat(self.path), system.fstat(self.fd)
            if inode_of(st) == inode_of(mine):
                return False
        except FileNotFoundError:
            pass
        self.close()
        return True

    def read(self) -> bytes:
        """Different whenever something was put since."""
        fd = self.fd
        text = system.pread(fd, _SHORT, 0)
        return text if len(text) < _SHORT else _read(fd)

    def put(self, level: int, move: Callable[[int], object]) -> None:
        """Give `move` the next number of a priority."""

        def put_one(first: int) -> int:
            move(first)
            return 1

        self.put_some(level, put_one)

    def put_some(self, level: int, put: Callable[[int], int]) -> None:
        """Give `put` the next number of a priority; it gives how many it has used."""

        def change(last: int) -> int:
            last = last or self._highest(level)
            return last + put(last + 1)

        self._write(str(level), change)

    def put_later(self, due: int, now: int, move: Callable[[], object]) -> None:
        """Say when something is due, in milliseconds, unless something is sooner."""

        def change(soonest: int) -> int:
            move()
            return soonest if now < soonest <= due else due

        self._write(LATER, change)

    def _write(self, level: str, change: Callable[[int], int]) -> None:
        fd = self.fd
        with self._mutex:
            try:
                self._lock(fd)
                at, number = _find(_read(fd), level)
                system.pwrite(fd, b"%-12s%019d\n" % (level.encode(), change(number)), at)
            finally:
                self._set_lock(fd, system.UN)

    def _lock(self, fd: int) -> None:
        """Not for ever: who has it may have been stopped, and nothing rests on it but the order."""
        lock_patiently(fd, self._set_lock)

    def _highest(self, level: int) -> int:
        """The file is new, or its beginning is lost: what is waiting says how far it had come."""
        buckets = [name for name in listed(f"{self._places.pending}/{level}") if name.isascii() and name.isdigit()]
        names = listed(f"{self._places.pending}/{level}/{buckets[-1]}") if buckets else []
        last = max((number_of(name) for name in names), default=int(buckets[-1]) * IN_A_BUCKET if buckets else 0)
        sheets = [name for state in ("waiting", "past") for name in listed(f"{self._places.sheets}/{level}/{state}")]
        behind = max((int(name) + 1 for name in sheets if name.isascii() and name.isdigit()), default=0)
        return max(last, behind * IN_A_BUCKET)


def lock_patiently(fd: int, set_lock: Callable[[int, int], None] = system.lock) -> bool:
    """Wait for at most a second. False: the holder does not release it."""
    pause, until = _A_MOMENT, monotonic() + _PATIENCE
    while not try_lock(fd, system.EX_NB, set_lock):
        if monotonic() >= until:
            return False
        sleep(pause)
        pause = min(pause * 2, _A_MOMENT * 16)
    return True


def _read(fd: int) -> bytes:
    for size in _SIZES:  # a buffer as large is made for it
        text = system.pread(fd, size, 0)
        if len(text) < size:
            break
    return text


def levels(text: bytes) -> dict[str, int]:
    """The numbers by priority."""
    found = {}
    for start in range(0, len(text), _LINE):
        level, number = _parse(text[start : start + _LINE])
        if level:
            found[level] = number
    return found


def _parse(line: bytes) -> tuple[str, int]:
    level, digits = line[:12].decode("ascii", "replace").strip(), line[12:31]
    return (level, int(digits)) if len(line) == _LINE and digits.isdigit() else ("", 0)


def _find(text: bytes, level: str) -> tuple[int, int]:
    """Where the line of a priority is or is to be, and its number."""
    begin = b"%-12s" % level.encode()
    if len(text) == _LINE and text.startswith(begin) and text[12:31].isdigit():
        return 0, int(text[12:31])  # nobody has used another priority
    at = 0
    while at < len(text):
        if text.startswith(begin, at):
            return at, _parse(text[at : at + _LINE])[1]
        at += _LINE
    return len(text) // _LINE * _LINE, 0
