"""Building the index: what is in the log, and not in the index yet, is read again and added, outside of any append.

A search that needs more than is in the index builds it first (`build`). Mostly that was done before: after an append, a
thread adds what has come together (`build_soon`), unless another process does. It ends when it has caught up, or after
the block in hand when the store is closed or the process ends: what is added is added for all processes, and for good.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock, Thread, main_thread
from time import sleep

from ... import process, system
from ...errors import HoldfastError, LockLost
from ...sqlite import inside_sqlite
from . import segments
from .index import BEGINNING, Damaged, Index, Mark
from .search import Block
from .segments import Tail, TakenBack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import TypeVar

    Found = TypeVar("Found")

_AT_ONCE, _FAR_BEHIND, _LARGE = 512, 50_000, 16_384  # events
_ENOUGH = 1024
_NEWLINE = b"\n"


class Builder:
    """The index of a store, and its building. As a `search.Source`, it finds what is in the index."""

    def __init__(self, root: str, store: bytes, mode: int, *, shared: bool, anew: bool) -> None:
        self._events = f"{root}/events"
        self._store = store
        self._anew = anew
        self.index = Index(root, store, mode, shared=shared)
        self.begin_again()

    def begin_again(self) -> None:
        """In a forked child, where no thread builds."""
        self._mutex = Lock()
        self._thread: Thread | None = None
        self._is_closing = False
        self._looked = 0  # up to here it was built, or a thread was asked to build
        self._asked = 0  # up to here a search needed the index

    # Looking.

    def mark(self) -> Mark:
        """Up to where the log is in the index. It is believed if the log has that, too."""
        try:
            mark = self.index.mark()
        except Damaged:
            return BEGINNING
        if mark.position and not self._is_in_log(mark):
            return BEGINNING
        self.index.known = mark.position
        self._looked = max(self._looked, mark.position)
        return mark

    def _is_in_log(self, mark: Mark) -> bool:
        try:
            file = segments.Segment(self._events, mark.segment, anew=self._anew)
        except (FileNotFoundError, ValueError):
            return False
        with file:
            return system.pread(file.fd, len(mark.last), mark.end - len(mark.last)) == mark.last != b""

    def kinds(self, tag: str) -> Collection[str]:
        return self._tried(lambda: self.index.kinds(tag), self._asked)

    def find(self, tag: str, kind: str, low: int, high: int, backwards: bool, limit: int) -> list[int]:
        return self._tried(lambda: self.index.find(tag, kind, low, high, backwards, limit), high)

    def _tried(self, look: Callable[[], Found], until: int) -> Found:
        try:
            return look()
        except Damaged:
            self.distrust()
            self.build(until)
            return look()

    # Building.

    def build_soon(self, head: int) -> None:
        """Enough may have been appended, up to `head`. In the background."""
        if head - self._looked < _ENOUGH:
            return
        with self._mutex:
            if self._thread is not None and self._thread.is_alive():
                return
            self._looked = head
            thread = Thread(target=self._build_in_background, args=(head,), name="holdfast index", daemon=False)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter ends. What was appended is appended
                return
            self._thread = thread

    def _build_in_background(self, head: int) -> None:
        try:
            self.build(head, is_needed=False)
        except (OSError, HoldfastError, TakenBack, Damaged):
            pass  # a search that needs the index raises it

    def build(self, until: int, *, is_needed: bool = True) -> None:
        """Have the index know the log up to here, which is on disk."""
        self._asked = max(self._asked, until)
        if self.index.known >= until or self.mark().position >= until:
            return
        # Another program may delete the index meanwhile. This process still has its file open, with all it needs.
        with suppress(LockLost), self.index.lock(timeout=None if is_needed else 0):
            failures = 0
            while failures < 3:
                try:
                    mark = self._mark_or_replace()
                    if mark.position >= until:
                        break
                    self._add(mark, until)
                    if not is_needed and (self._is_closing or not main_thread().is_alive()):
                        break  # but each adds something
                except (Damaged, TakenBack):  # TakenBack: a segment was written again meanwhile
                    failures += 1
                    self.index.replace()

    def _mark_or_replace(self) -> Mark:
        mark = self.mark()
        if mark == BEGINNING and (self.index.mark() != BEGINNING or not self.index.is_there):
            self.index.replace()
        return mark

    def _add(self, before: Mark, until: int) -> None:
        """One block: whole batches of one segment."""
        block = Block(before.position + 1)
        most = _LARGE if until - before.position > _FAR_BEHIND else _AT_ONCE
        goal = min(until, before.position + most)
        tail = Tail(self._events, self._store, before, block, anew=self._anew)
        rest = tail.read_on(goal)
        first = before.position + 1
        if tail.head < first and not rest.strip(_NEWLINE) and first in segments.list_segments(self._events):
            tail = Tail(self._events, self._store, Mark(first - 1, first), block, anew=self._anew)
            rest = tail.read_on(goal)
        if tail.head < first:
            raise tail.damaged(f"event {first} {'is damaged' if rest.strip(_NEWLINE) else segments.MISSING}")
        self.index.write(block, before, tail.mark)
        sleep(0)  # other threads may go on

    def rebuild(self, until: int) -> None:
        self.distrust()
        self.build(until)

    def close(self) -> None:
        """Whoever closed the store may remove its directory: no thread writes there any more.

        Unless a signal handler closes it, and what it interrupted has the mutex that the thread waits for.
        """
        if (thread := self._thread) is not None and not process.owns(inside_sqlite):
            self._is_closing = True
            try:
                thread.join()
            finally:
                self._is_closing = False
        self.index.close()

    def distrust(self) -> None:
        """It told what is not so. Begin a new one."""
        with suppress(LockLost), self.index.lock():
            self.index.replace()
