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
from _thread import RLock
from _thread import _local as ThreadLocal
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
    Entry = tuple[int, Inode, bool, object, Task | None]

_modules = sys.modules


_local = ThreadLocal()


def is_mine(mutex: RLock) -> bool:
    """Does this thread have it? There is no public way to ask, but this is how `threading.Condition` does."""
    return bool(mutex._is_owned())  # type: ignore[attr-defined]


def current_thread() -> object:
    """The running thread, as an object that no later thread is mistaken for: their numbers are used again."""
    try:
        return _local.me
    except AttributeError:
        me = _local.me = object()
        return me


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
        return current_task() or current_thread()
    try:
        return _local.me
    except AttributeError:
        return current_thread()


class Turn:
    """The right to take an exclusive lock again, for a moment, without queueing again.

    A lock handed over for every few microseconds of work spends its time in context switches. So whoever came
    through the queue may come back, at most `ACQUISITIONS` times and within `SECONDS`, if the lock happens to be free
    when it asks. Waiters are delayed by at most that, and who is served next does not change.
    """

    __slots__ = ("left", "thread", "until")

    ACQUISITIONS = 64
    SECONDS = 0.001

    def __init__(self, began: float) -> None:
        self.thread = current_thread()
        self.left = self.ACQUISITIONS
        self.until = began + self.SECONDS

    def take(self) -> bool:
        if self.left <= 0 or self.thread is not current_thread() or monotonic() > self.until:
            return False
        self.left -= 1
        return True


class Line:
    """First come, first served in memory: at most `width` inside, the others wait for their bell."""

    __slots__ = ("entering", "inside", "waiting", "width")

    # Places are known by weak references: one that an interrupt kept from leaving does so when it is collected.

    def __init__(self, width: int) -> None:
        self.width = width
        self.inside = 0
        self.entering: weakref.ref[Place] | None = None  # not settled yet. The next one would overtake it
        self.waiting: deque[weakref.ref[Place]] = deque()

    def admit(self) -> None:
        while self.waiting and self.entering is None and self.inside < self.width:
            reference = self.waiting.popleft()
            place = reference()
            if place is not None:
                self.inside += 1
                self.entering = reference
                place.admitted = True
                assert place.bell is not None
                place.bell.ring()


class Place:
    """A place in a line.

    `join` first. Once `admitted`, say `settle` when others may follow (a ticket is taken), and `leave` in any case in
    the end, also if an interrupt came before or in the middle of joining.
    """

    __slots__ = ("__weakref__", "_book", "_line", "_me", "_path", "admitted", "bell")

    def __init__(self, book: Book, path: str) -> None:
        self._book = book
        self._path = path
        self._me = weakref.ref(self)
        self._line: Line | None = None
        self.admitted = False
        self.bell: Bell | None = None

    def join(self, width: int, make_bell: Callable[[], Bell]) -> None:
        bell = make_bell()
        with self._book.mutex:
            line = self._book.lines.setdefault(self._path, Line(width))
            # From here to the end nothing is called where it matters, and so nothing interrupted.
            self._line = line
            if line.inside < line.width and not line.waiting and line.entering is None:
                line.inside += 1
                line.entering = self._me
                self.admitted = True
            else:
                self.bell = bell
                line.waiting.append(self._me)

    def settle(self) -> None:
        line = self._line
        with self._book.mutex:
            if line is not None and line.entering is self._me:
                line.entering = None
                line.admit()

    def leave(self) -> None:
        with self._book.mutex:
            line = self._line or self._book.lines.get(self._path)
            if line is None:
                return
            # An interrupt may come wherever something is called. Then this is done again.
            if self.admitted:
                self.admitted = False
                line.inside -= 1
            elif self._me in line.waiting:
                line.waiting.remove(self._me)
            if line.entering is self._me:
                line.entering = None
            line.admit()
            if not line.inside and not line.waiting and self._book.lines.get(self._path) is line:
                del self._book.lines[self._path]
            self._line = None

    def __del__(self) -> None:
        if getattr(self, "_line", None) is not None and self._book is book:
            self.leave()


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
        try:
            thread = _local.me
        except AttributeError:
            thread = current_thread()
        # Weak: a task that is dropped with its hold must be collectable, or the hold would never be missed.
        self.holds[serial] = (fd, inode, shared, thread, None if task is None else weakref.ref(task))
        return serial

    def forget(self, *fds: int | None) -> None:
        """Said before descriptors are closed whose hold an interrupt has kept from coming to anything: a child would
        close what has their numbers by then."""
        self.open_fds.difference_update(fds)
        for serial in list(self.holds):  # items() would be made meanwhile, and the collector release some of them
            entry = self.holds.get(serial)
            if entry is not None and entry[0] in fds:
                self.holds.pop(serial, None)

    def note_turn(self, path: str, began: float) -> None:
        """Said on release, when nobody waits for us any more; the time runs since the lock was granted."""
        if len(self.turns) > 1000:
            self.turns.clear()
        self.turns[path] = Turn(began)

    def holds_of_caller(self, inode: Inode, *, asynchronous: bool) -> list[Entry]:
        """The live holds on `inode` that cannot be released while the caller waits."""
        thread = current_thread()
        task = current_task() if asynchronous else None
        return [
            entry
            for entry in list(self.holds.values())
            if entry[1] == inode
            and entry[3] is thread
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
