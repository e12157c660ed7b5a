"""What `holdfast tasks work` shows: a bar and a line for each task that runs on a terminal, plain lines anywhere else.

The board is in the supervisor, hears what the children say (`teller`), and is the only one to write, so that nothing is
mixed up. An attempt that is ended by force says nothing any more: then, and for progress, it reads the task's file.
"""

from __future__ import annotations

import json
import os
import sys
from binascii import a2b_base64
from collections import deque
from time import monotonic, sleep

from ...errors import HoldfastError
from .. import output
from .lines import Lines
from .text import in_a_line, payload_of, progress_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...tasks import Task, TaskQueue
    from .teller import Teller

_AT_ONCE = 0.005  # seconds
_LONG = 0.3  # seconds after which one wants to know more of a task than that it runs
_BETWEEN_DRAWINGS = 0.1
_BETWEEN_COUNTS = 0.5
_RATE_OVER = 10.0


class Attempt:
    """One that runs."""

    def __init__(self, id: str, tried: int, attempts: int) -> None:
        self.id = id
        self.tried = tried
        self.attempts = attempts
        self.began = monotonic()
        self.note = ""
        self.printed: list[tuple[int, bytes]] = []

    @property
    def seconds(self) -> float:
        return monotonic() - self.began


class Board:
    def __init__(self, queue: TaskQueue, teller: Teller, *, json: bool, quiet: bool) -> None:
        self.counts = dict.fromkeys(("done", "failed", "retry", "given back", "cancelled"), 0)
        # How often the worker was told to end, once it begins nothing more.
        self.asked: Callable[[], int] = lambda: 0
        self.failed = 0  # as the worker has counted, at its end: also those that a dead one had, who tells nothing
        self._queue = queue
        self._teller = teller
        self._json = json
        self._quiet = quiet
        self._live = not json and not quiet and output.can_redraw(sys.stderr)
        self._lines = Lines(self._live)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._rest = b""
        self._began = monotonic()
        self._heard_at = self._looked_at = self._drawn_at = 0.0
        self._said_asked = 0
        self._left = Left(queue)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._teller.reader, *self._lines.fds)

    def __enter__(self) -> Board:
        terminals = [fd for fd, stream in ((1, sys.stdout), (2, sys.stderr)) if output.on_terminal(stream)]
        if self._lines.writer is not None:
            self._teller.redirect(terminals, self._lines.writer)
            self._draw()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._hear()
            self._look_at_tasks(0.0)
            self.counts["failed"] = max(self.counts["failed"], self.failed)
            self._lines.end()
            if kind is None:
                self._say_summary()
        finally:
            self._teller.close()

    # What there is to be seen.

    def look(self) -> None:
        if monotonic() - self._heard_at < _AT_ONCE:
            sleep(_AT_ONCE)  # so that a supervisor of very short tasks is not woken for each of them
        self._hear()
        self._lines.hear()
        self._heard_at = monotonic()
        if self._said_asked < self.asked():
            self._said_asked = self.asked()
            self._say_asked()
        now = monotonic()
        if now - self._looked_at > _LONG:
            self._looked_at = now
            self._look_at_tasks(_LONG)
        if self._live and (not self._lines.are_drawn or now - self._drawn_at > _BETWEEN_DRAWINGS):
            self._drawn_at = now
            self._draw()

    def _hear(self) -> None:
        while True:
            try:
                text = os.read(self._teller.reader, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                self._understand(*json.loads(line))

    def _understand(self, kind: str, id: str, token: int, *rest: Any) -> None:
        if kind == "start":
            self._attempts[id, token] = Attempt(id, *rest)
            return
        attempt = self._attempts.get((id, token))
        if attempt is None:
            return  # the file of the task has said so before
        if kind == "printed":
            attempt.printed.append((rest[0], a2b_base64(rest[1])))
        elif kind == "done":
            self._ended(id, token, {"is": "done"}, rest[0])
        else:
            self._ended(id, token, self._look_at(id, token, attempt), attempt.seconds)

    def _look_at_tasks(self, longer_than: float) -> None:
        """How far those are that take their time. One whose process is gone has ended without a word."""
        over = {}
        for (id, token), attempt in self._attempts.items():
            if attempt.seconds >= longer_than:
                said = self._look_at(id, token, attempt)
                if said is not None:
                    over[id, token] = said
        if over:
            self._hear()  # what they said before they ended, and most often that they have
        for (id, token), said in over.items():
            if (id, token) in self._attempts:
                self._ended(id, token, said, self._attempts[id, token].seconds)

    def _look_at(self, id: str, token: int, attempt: Attempt) -> dict[str, Any] | None:
        """How it has ended."""
        try:
            task = self._queue.get(id)
        except (HoldfastError, OSError):
            return {"is": "purged"}  # or damaged
        attempt.note = progress_of(task) or in_a_line(payload_of(task))
        return outcome(task, token)

    def _ended(self, id: str, token: int, said: dict[str, Any] | None, seconds: float) -> None:
        if said is None:
            return  # it was taken from us meanwhile
        attempt = self._attempts.pop((id, token))
        for stream in (1, 2):
            self._lines.print(b"".join(data for to, data in attempt.printed if to == stream), to_stderr=stream == 2)
        kind = str(said["is"])
        if kind == "pending":
            kind = "given back" if said.get("uncounted") else "retry"
        if kind not in self.counts:
            return
        self.counts[kind] += 1
        self._left.ended += kind not in ("retry", "given back")
        self._say(kind, attempt, in_a_line(said.get("because")), seconds)

    # Saying it.

    def _say(self, kind: str, attempt: Attempt, because: str, seconds: float) -> None:
        if self._quiet or (self._live and kind == "done"):
            return
        if self._json:
            said = {"event": kind, "id": attempt.id, "attempt": attempt.tried, "attempts": attempt.attempts}
            output.say_json({**said, "seconds": round(seconds, 3), "error": because or None}, to_stderr=True)
            return
        text = f"{kind} {output.shown(attempt.id)}"
        if kind == "done":
            text += f" in {output.duration(seconds)}"
        elif kind in ("failed", "retry"):
            text += f" (attempt {attempt.tried} of {attempt.attempts})"
        if because and kind != "cancelled":
            text += f": {because}"
        self._lines.say(text, {"failed": output.RED, "retry": output.YELLOW}.get(kind, ""))

    def _say_asked(self) -> None:
        running = len(self._attempts)
        if self._json or self._quiet:
            return
        if self._said_asked > 1:
            self._lines.say("giving back what runs", output.YELLOW)
        elif running:
            self._lines.say(f"finishing {running} that run; a second signal gives them back", output.YELLOW)

    def _say_summary(self) -> None:
        seconds = monotonic() - self._began
        if self._json:
            output.say_json({"event": "end", **self.counts, "seconds": round(seconds, 3)}, to_stderr=True)
        elif not self._quiet:
            names = {"retry": "retried"}
            words = [f"{number} {names.get(kind, kind)}" for kind, number in self.counts.items() if number]
            output.complain(f"{', '.join(words) or 'nothing done'} in {output.duration(seconds)}")

    def _draw(self) -> None:
        columns, rows = output.terminal_size(2)
        lines = [self._bar(columns)]
        shown = list(self._attempts.values())[: max(1, rows - 3)]
        for attempt in shown:
            lines.append(f"  {output.shown(attempt.id)}  {output.duration(attempt.seconds)}  {attempt.note}".rstrip())
        if len(shown) < len(self._attempts):
            lines.append(f"  and {len(self._attempts) - len(shown)} more")
        # With room for the ^C^C that a terminal shows: a line that wraps cannot be cleared.
        self._lines.draw([output.shortened(line, columns - 4) for line in lines])

    def _bar(self, columns: int) -> str:
        finished, left, rate = self._left.look()
        total = finished + left
        width = 20 if columns >= 60 else 8
        filled = width * finished // total if total else width
        text = f"[{'#' * filled}{'-' * (width - filled)}] {finished} of {total} done"
        if self.counts["failed"]:
            text += f", {self.counts['failed']} failed"
        if rate:
            text += f", {rate:.1f}/s" + (f", {output.duration(left / rate)} left" if left else "")
        if self._said_asked:
            return text + ", finishing"
        return text + ("" if left else ", waiting for tasks")


def outcome(task: Task, token: int) -> dict[str, Any] | None:
    """How one attempt at a task ended, by its history. None: it has not."""
    found = False
    for said in task.history:
        if said.get("is") == "running":
            if found:
                return {"is": "pending", "because": "the worker died"}
            found = said.get("token") == token
        elif found and "is" in said:
            return said
    return None


class Left:
    """How many tasks of the queue have ended since we began, whoever did them, how many are left, and how fast it goes.

    To count takes a while if there are many, so it is not done all the time: in between, ours are known.
    """

    def __init__(self, queue: TaskQueue) -> None:
        self.ended = 0  # ours
        self._queue = queue
        self._first: int | None = None
        self._finished = self._total = 0
        self._next = 0.0
        self._seen: deque[tuple[float, int]] = deque()

    def look(self) -> tuple[int, int, float]:
        """Ended, left, and how many in a second."""
        now = monotonic()
        if now >= self._next:
            self._count()
            took = monotonic() - now
            self._next = now + max(_BETWEEN_COUNTS, 20 * took)
        finished = max(self._finished, self.ended)
        self._seen.append((now, finished))
        while now - self._seen[0][0] > _RATE_OVER:
            self._seen.popleft()
        began, before = self._seen[0]
        return finished, max(0, self._total - finished), (finished - before) / (now - began) if now > began else 0.0

    def _count(self) -> None:
        counted = self._queue.stats()
        ended = counted["done"] + counted["failed"] + counted["cancelled"]
        if self._first is None:
            self._first = ended
        self._finished = max(0, ended - self._first)
        self._total = self._finished + counted["pending"] + counted["running"]
