"""What this process knows about its own locks: who holds which, whose turn it is, who queues in memory.

Nothing here excludes anybody: exclusion comes from the kernel alone, and forgetting everything on this page would
cost speed and good manners, never correctness. It serves four ends:

* `would_deadlock`: a thread or task that is about to wait for itself is told so. Locks are known by device and inode,
  so two spellings of a path, a symlink or a hard link make no difference.
* `Line`: threads and tasks wait for a path in memory, first come first served, and only a few of them at a time
  (one, where there is no queue in front of the lock) meet the file system.
* `turns`: see `Turn`.
* fork: the child holds nothing. It closes its copies without unlocking, because an unlock acts on the open file
  description, which it shares with its parent. Every hold remembers the `Book` it was written in; the child
  begins a new one, and so knows which holds are not its own.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import RLock, get_ident
from collections import deque
from itertools import count
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .wait import Bell

    Inode = tuple[int, int]  # st_dev, st_ino
    Task = weakref.ref[object]
    # A live hold: descriptor, what it locks, shared or not, and who took it. A tuple: it is made on every acquire.
    Entry = tuple[int, Inode, bool, int, Task | None]

_modules = sys.modules


def current_task() -> object | None:
    """The running asyncio or trio task; the loop itself inside a callback; None in a plain thread."""
    if "asyncio" in _modules:
        running = getattr(_modules["asyncio"], "_get_running_loop", None)
        loop = running() if running is not None else None
        if loop is not None:
            return _modules["asyncio"].current_task(loop) or loop  # type: ignore[no-any-return]
    if "trio" in _modules:
        try:
            return _modules["trio"].lowlevel.current_task()  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            pass
    return None


def caller() -> object:
    """Something to know the running task or thread by."""
    if "asyncio" in _modules or "trio" in _modules:
        return current_task() or get_ident()
    return get_ident()


class Turn:
    """The right to take an exclusive lock again, for a moment, without queueing again.

    A lock handed over for every few microseconds of work spends its time in context switches. So whoever came
    through the queue may come back, at most `ACQUISITIONS` times and within `SECONDS`, if the lock happens to be free
    when it asks. Waiters are delayed by at most that, and who is served next does not change.
    """

    __slots__ = ("left", "thread", "until")

    ACQUISITIONS = 16
    SECONDS = 0.001

    def __init__(self) -> None:
        self.thread = get_ident()
        self.left = self.ACQUISITIONS
        self.until = monotonic() + self.SECONDS

    def take(self) -> bool:
        if self.left <= 0 or self.thread != get_ident() or monotonic() > self.until:
            return False
        self.left -= 1
        return True


class Line:
    """First come, first served in memory: at most `width` inside, the others wait for their bell."""

    __slots__ = ("inside", "waiting")

    def __init__(self) -> None:
        self.inside = 0
        self.waiting: deque[Place] = deque()


class Place:
    """A place in a line. `leave` must be called, whether it was ever admitted or not."""

    __slots__ = ("_book", "_path", "admitted", "bell")

    def __init__(self, book: Book, path: str, width: int, make_bell: Callable[[], Bell]) -> None:
        self._book = book
        self._path = path
        self.bell: Bell | None = None
        with book.mutex:
            line = book.lines.setdefault(path, Line())
            self.admitted = line.inside < width and not line.waiting
            if self.admitted:
                line.inside += 1
            else:
                self.bell = make_bell()
                line.waiting.append(self)

    def leave(self) -> None:
        with self._book.mutex:
            line = self._book.lines.get(self._path)
            if line is None:
                return
            if not self.admitted:
                line.waiting.remove(self)
            elif line.waiting:
                successor = line.waiting.popleft()
                successor.admitted = True
                assert successor.bell is not None
                successor.bell.ring()
            else:
                line.inside -= 1
            if not line.inside and not line.waiting:
                del self._book.lines[self._path]


class Book:
    """The state of one process. There is one, `gate.book`, and a new one in every forked child."""

    __slots__ = ("holds", "lines", "mutex", "new_serial", "open_fds", "turns")

    def __init__(self) -> None:
        self.holds: dict[int, Entry] = {}  # by serial number; popping the entry is what makes a release happen once
        self.new_serial = count().__next__
        self.open_fds: set[int] = set()  # descriptors of waits under way
        self.turns: dict[str, Turn] = {}
        self.lines: dict[str, Line] = {}
        # Reentrant: a generator collected in the middle of `Place` may run `leave` in the same thread.
        self.mutex = RLock()

    def write_down(self, fd: int, inode: Inode, shared: bool) -> int:
        """Note a new hold. The serial number is the right to release it."""
        serial = self.new_serial()
        task = current_task() if "asyncio" in _modules or "trio" in _modules else None
        # Weak: a task that is dropped with its hold must be collectable, or the hold would never be missed.
        self.holds[serial] = (fd, inode, shared, get_ident(), None if task is None else weakref.ref(task))
        return serial

    def begin_turn(self, path: str) -> None:
        if len(self.turns) > 1000:
            self.turns.clear()
        self.turns[path] = Turn()

    def holds_of_caller(self, inode: Inode, *, asynchronous: bool) -> list[Entry]:
        """The live holds on `inode` that cannot be released while the caller waits."""
        thread = get_ident()
        task = current_task() if asynchronous else None
        return [
            entry
            for entry in list(self.holds.values())
            if entry[1] == inode
            and entry[3] == thread
            # A blocked thread stops all its tasks; a task that waits stops only itself and the code below its loop.
            and (not asynchronous or entry[4] is None or entry[4]() is task)
        ]


book = Book()


def _begin_new_book() -> None:
    global book
    old, book = book, Book()
    for fd in {entry[0] for entry in old.holds.values()} | old.open_fds:
        try:
            os.close(fd)
        except OSError:
            pass


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_new_book)
