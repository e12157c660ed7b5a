"""The output of `holdfast tasks work`: on a terminal a bar and a line for each running task, else plain lines.

The display runs in the supervisor. It reads the messages of the children (`reports`), and it alone prints, so that
output is not mixed. An attempt that is killed sends no message. So the display also reads the tasks from the queue.
"""

from __future__ import annotations

import json
import os
import sys
from binascii import a2b_base64
from tempfile import SpooledTemporaryFile
from time import monotonic, sleep

from ...errors import HoldfastError
from ...tasks import NoSuchTask
from .. import output
from .lines import Lines
from .progress import Progress
from .text import in_a_line, payload_of, progress_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ...tasks import Task, TaskQueue
    from .reports import Reporter

_AT_ONCE_S = 0.005  # messages that come within this time are read together
_LONG_S = 0.3  # after this time, the progress of a task is shown
_DRAW_EVERY_S = 0.1
_IN_MEMORY_BYTES = 1 << 20  # of the output of an attempt
_KINDS = ("done", "failed", "retry", "given back", "cancelled")


class Attempt:
    """A running one."""

    def __init__(self, id: str, tried: int, attempts: int) -> None:
        self.id = id
        self.tried = tried
        self.attempts = attempts
        self.began = monotonic()
        self.note = ""
        self.lost: OSError | None = None  # why output was lost
        self._files: dict[int, SpooledTemporaryFile[bytes]] = {}  # its output: on disk, if it is long

    def keep(self, stream: int, data: bytes) -> None:
        """Keep output of stdout (1) or stderr (2) until the attempt has ended."""
        try:
            if stream not in self._files:
                self._files[stream] = SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115  # `output` closes it
            self._files[stream].write(data)
        except OSError as error:
            self.lost = error

    def output(self, stream: int) -> Iterator[bytes]:
        file = self._files.pop(stream, None)
        if file is not None:
            with file:
                file.seek(0)
                while data := file.read(_IN_MEMORY_BYTES):
                    yield data

    @property
    def seconds(self) -> float:
        return monotonic() - self.began


class Display:
    """An observer of a `Worker`."""

    def __init__(self, queue: TaskQueue, reporter: Reporter, *, json: bool, quiet: bool) -> None:
        self.counts = dict.fromkeys(_KINDS, 0)
        self.signals: Callable[[], int] = lambda: 0  # how many signals have asked the worker to end
        self.failed = 0  # as the worker has counted them. A killed attempt sends no message
        self._queue = queue
        self._reporter = reporter
        self._json = json
        self._quiet = quiet
        self._live = not json and not quiet and output.can_redraw(sys.stderr)
        self._lines = Lines(self._live)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._rest = b""
        self._began = monotonic()
        self._read_at = self._looked_at = self._drawn_at = 0.0
        self._signals_shown = 0
        self._progress = Progress(queue, self.counts)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._reporter.reader, *self._lines.fds)

    def __enter__(self) -> Display:
        terminals = [fd for fd, stream in ((1, sys.stdout), (2, sys.stderr)) if output.on_terminal(stream)]
        if self._lines.writer is not None:
            self._reporter.redirect(terminals, self._lines.writer)
            self._draw()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._read()
            self._look_at_tasks(0.0)
            self.counts["failed"] = max(self.counts["failed"], self.failed)
            self._lines.end()
            if kind is None:
                self._print_summary()
        finally:
            self._reporter.close()

    # Reading.

    def look(self) -> None:
        """Called by the supervisor when one of `fds` is readable, and from time to time."""
        if monotonic() - self._read_at < _AT_ONCE_S:
            sleep(_AT_ONCE_S)  # so that very short tasks do not wake the supervisor one by one
        self._read()
        self._lines.print_children()
        self._read_at = now = monotonic()
        if self._signals_shown < self.signals():
            self._signals_shown = self.signals()
            self._print_signal()
        if now - self._looked_at > _LONG_S:
            self._looked_at = now
            self._look_at_tasks(_LONG_S)
        if self._live and (not self._lines.are_drawn or now - self._drawn_at > _DRAW_EVERY_S):
            self._drawn_at = now
            self._draw()

    def _read(self) -> None:
        while True:
            try:
                text = os.read(self._reporter.reader, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                self._handle(*json.loads(line))

    def _handle(self, kind: str, id: str, token: int, *rest: Any) -> None:
        if kind == "start":
            self._attempts[id, token] = Attempt(id, *rest)
            return
        attempt = self._attempts.get((id, token))
        if attempt is None:
            return  # the queue has shown before that it has ended
        if kind == "printed":
            attempt.keep(rest[0], a2b_base64(rest[1]))
        elif kind == "done":
            self._end(id, token, ("done", None), rest[0])
        else:
            self._end(id, token, self._look_at(id, token, attempt), attempt.seconds)

    def _look_at_tasks(self, longer_than: float) -> None:
        """Read the progress of attempts that take long. A killed attempt has ended without a message."""
        ended = {}
        for (id, token), attempt in self._attempts.items():
            if attempt.seconds >= longer_than:
                outcome = self._look_at(id, token, attempt)
                if outcome is not None:
                    ended[id, token] = outcome
        if ended:
            self._read()  # most of them have sent a message meanwhile
        for (id, token), outcome in ended.items():
            if (id, token) in self._attempts:
                self._end(id, token, outcome, self._attempts[id, token].seconds)

    def _look_at(self, id: str, token: int, attempt: Attempt) -> tuple[str, str | None] | None:
        """How it has ended. None: it has not, or that is not known now."""
        try:
            task = self._queue.get(id)
        except NoSuchTask:
            return "purged", None
        except (HoldfastError, OSError):
            return None
        attempt.note = progress_of(task) or in_a_line(payload_of(task))
        return outcome_of(task, token)

    def _end(self, id: str, token: int, outcome: tuple[str, str | None] | None, seconds: float) -> None:
        if outcome is None:
            return  # the queue shows it later
        kind, error = outcome
        attempt = self._attempts.pop((id, token))
        for stream in (1, 2):
            self._lines.print_bytes(attempt.output(stream), to_stderr=stream == 2)
        if attempt.lost is not None:
            text = f"a part of the output of {output.shown(id)} is lost: {attempt.lost}"
            self._lines.print_line(text, output.RED)
        if kind in self.counts:
            self.counts[kind] += 1
            self._print_end(kind, attempt, in_a_line(error), seconds)

    # Printing.

    def _print_end(self, kind: str, attempt: Attempt, error: str, seconds: float) -> None:
        if self._quiet or (self._live and kind == "done"):
            return
        if self._json:
            event = {"event": kind, "id": attempt.id, "attempt": attempt.tried, "attempts": attempt.attempts}
            output.say_json({**event, "seconds": round(seconds, 3), "error": error or None}, to_stderr=True)
            return
        text = f"{kind} {output.shown(attempt.id)}"
        if kind == "done":
            text += f" in {output.duration(seconds)}"
        elif kind in ("failed", "retry"):
            text += f" (attempt {attempt.tried} of {attempt.attempts})"
        if error and kind != "cancelled":
            text += f": {error}"
        self._lines.print_line(text, {"failed": output.RED, "retry": output.YELLOW}.get(kind, ""))

    def _print_signal(self) -> None:
        running = len(self._attempts)
        if self._json or self._quiet:
            return
        if self._signals_shown > 1:
            self._lines.print_line("giving running tasks back", output.YELLOW)
        elif running:
            tasks = "1 running task" if running == 1 else f"{running} running tasks"
            self._lines.print_line(f"finishing {tasks}; a second signal gives them back", output.YELLOW)

    def _print_summary(self) -> None:
        seconds = monotonic() - self._began
        if self._json:
            output.say_json({"event": "end", **self.counts, "seconds": round(seconds, 3)}, to_stderr=True)
        elif not self._quiet:
            names = {"retry": "retried"}
            words = [f"{number} {names.get(kind, kind)}" for kind, number in self.counts.items() if number]
            output.complain(f"{', '.join(words) or 'nothing done'} in {output.duration(seconds)}")

    def _draw(self) -> None:
        columns, rows = output.terminal_size(2)
        lines = [self._progress.bar(columns) + (", finishing" if self._signals_shown else "")]
        shown = list(self._attempts.values())[: max(1, rows - 3)]
        for attempt in shown:
            lines.append(f"  {output.shown(attempt.id)}  {output.duration(attempt.seconds)}  {attempt.note}".rstrip())
        if len(shown) < len(self._attempts):
            lines.append(f"  and {len(self._attempts) - len(shown)} more")
        # With room for the ^C^C that a terminal shows: a line that wraps cannot be cleared.
        self._lines.draw([output.shortened(line, columns - 4) for line in lines])


def outcome_of(task: Task, token: int) -> tuple[str, str | None] | None:
    """How one attempt at a task ended, and its error. None: it runs."""
    for past in task.history:
        if past["token"] == token:
            return ("retry" if past["state"] == "retried" else past["state"]), past["error"]
    if task.token == token and task.state == "running":
        return None
    if task.token == token and task.state != "pending":
        return task.state, task.error
    return "given back", None
