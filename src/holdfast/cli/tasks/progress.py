"""The bar of `holdfast tasks work`: how many tasks have ended since the worker began, and how many are left."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from .. import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...tasks import TaskQueue

_COUNT_EVERY_S = 0.5
_REST = 20  # the next count begins after a pause of 20 times the duration of the last one
_RATE_OVER_S = 10.0
_ENDED = ("done", "failed", "cancelled")


@dataclass
class Progress:
    """Counts the tasks of a queue, whichever worker did them.

    Counting takes a while if there are many tasks. In between, `own` is what this worker has counted itself.
    """

    queue: TaskQueue
    own: dict[str, int]
    _first: dict[str, int] | None = None  # the counts when the worker began
    _counts: dict[str, int] = field(default_factory=dict)  # how many have ended since then
    _total: int = 0
    _paused: bool = False
    _next: float = 0.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def bar(self, columns: int) -> str:
        """[####xx----] 4 of 10 done, 2 failed, 3.0/s, 1.3s left"""
        self._count_if_due()
        counts = {state: max(self._counts[state], self.own[state]) for state in _ENDED}
        ended = sum(counts.values())
        total = max(self._total, ended)
        width = 20 if columns >= 60 else 8
        # Both ends are rounded down, so that the bar is full only when all tasks have ended.
        good = width * (counts["done"] + counts["cancelled"]) // total if total else width
        filled = width * ended // total if total else width
        text = f"[{'#' * good}{'x' * (filled - good)}{'-' * (width - filled)}] {counts['done']} of {total} done"
        text += "".join(f", {counts[state]} {state}" for state in ("failed", "cancelled") if counts[state])
        left, rate = total - ended, self._rate(ended)
        if rate:
            text += f", {rate:.1f}/s" + (f", {output.duration(left / rate)} left" if left else "")
        return text + (", paused" if self._paused else "" if left else ", waiting for tasks")

    def _rate(self, ended: int) -> float:
        now = monotonic()
        self._seen.append((now, ended))
        while now - self._seen[0][0] > _RATE_OVER_S:
            self._seen.popleft()
        began, before = self._seen[0]
        return (ended - before) / (now - began) if now > began else 0.0

    def _count_if_due(self) -> None:
        began = monotonic()
        if began < self._next:
            return
        found = self.queue.stats()
        if self._first is None:
            self._first = found
        self._counts = {state: max(0, found[state] - self._first[state]) for state in _ENDED}
        self._total = sum(self._counts.values()) + found["pending"] + found["running"]
        self._paused = self.queue.is_paused
        self._next = began + max(_COUNT_EVERY_S, _REST * (monotonic() - began))
