"""`holdfast tasks watch`: a queue, live. On a terminal, `screen` draws it. A pipe gets a snapshot for every change."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from heapq import nlargest
from time import monotonic, sleep

from ...errors import Unsupported
from ...tasks import Task, TaskQueue
from .. import arguments, output
from ..listing import relative
from .text import age_of, as_json, in_a_line, orphans_of, payload_of, progress_of, queue_at, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

_FAILURES = 5  # that are shown
_REST = 10  # failed tasks are read again after a pause of 10 times the duration of the last reading

EXAMPLES = """\

keys: q ends

examples:
  holdfast tasks watch /tmp/jobs
  holdfast tasks watch /tmp/jobs --json | jq .counts
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = (parser.epilog or "") + "\n" + EXAMPLES
    parser.add_argument("--every", metavar="T", type=arguments.span, default=1.0, help="time between two looks (1)")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    arguments.add_json(parser, "print JSON: one object in a line for every change", short=False)
    parser.set_defaults(call=call)


@dataclass(frozen=True)
class Snapshot:
    counts: dict[str, int]
    paused: bool
    running: tuple[Task, ...]
    failures: tuple[Task, ...]  # the last ones first
    orphans: frozenset[str]  # running tasks whose worker is dead

    @property
    def key(self) -> tuple[object, ...]:
        """Differs from that of another snapshot if something has happened, and not with the time."""
        running = tuple((task.id, task.token, task.progress, task.cancelling) for task in self.running)
        failures = tuple((task.id, task.token) for task in self.failures)
        return (self.counts, self.paused, running, failures, self.orphans)

    def summary(self) -> str:
        waiting = [f"{self.counts[name]} {name}" for name in ("delayed", "parked", "blocked") if self.counts[name]]
        names = ("running", "pending", "done", "failed", "cancelled")
        texts = {name: f"{self.counts[name]} {name}" for name in names}
        if waiting:
            texts["pending"] += f" ({', '.join(waiting)})"
        return ", ".join(texts.values()) + (", paused" if self.paused else "")

    def lines(self) -> list[str]:
        return [self.summary(), *map(self._running_line, self.running), *map(failure_line, self.failures)]

    def about(self, task: Task) -> str:
        """The last words about a running task."""
        return reason_of(task, self.orphans) or progress_of(task) or in_a_line(payload_of(task))

    def _running_line(self, task: Task) -> str:
        worker = output.shown(task.worker or "?")
        return f"  running {output.shown(task.id)} for {age_of(task)} by {worker}: {self.about(task)}"

    def as_json(self) -> dict[str, object]:
        running, failures = ([as_json(task, self.orphans) for task in some] for some in (self.running, self.failures))
        return {"counts": self.counts, "paused": self.paused, "running": running, "failures": failures}


def failure_line(task: Task) -> str:
    return f"  failed {output.shown(task.id)} {age_of(task)} ago: {in_a_line(task.error)}"


class View:
    """Looks at a queue again and again."""

    def __init__(self, path: str) -> None:
        self.queue: TaskQueue = queue_at(path)
        self._failures: tuple[Task, ...] = ()
        self._next = 0.0  # when the failed tasks are read again

    def look(self) -> Snapshot:
        counts = self.queue.stats()
        running = sorted(self.queue.tasks(("running",)), key=lambda task: (task.started_at or task.put_at, task.id))
        orphans = orphans_of(self.queue) if running else frozenset()
        return Snapshot(counts, self.queue.is_paused, tuple(running), self._newest_failures(), orphans)

    def _newest_failures(self) -> tuple[Task, ...]:
        """All failed tasks are read for this. If there are many, that takes long, and so it is not done every time."""
        now = monotonic()
        if now >= self._next:
            failed = self.queue.tasks(("failed",))
            self._failures = tuple(nlargest(_FAILURES, failed, key=lambda task: task.ended_at or task.put_at))
            self._next = now + _REST * (monotonic() - now)
        return self._failures


def call(options: argparse.Namespace) -> int:
    view = View(options.path)
    every = max(0.1, options.every)
    if options.json or options.once or not _on_terminal():
        return _print(view, every, options)
    try:
        from .screen import Screen
    except ImportError:
        raise Unsupported(
            "holdfast tasks watch needs Textual: pip install 'holdfast[top]'. --once prints the same, once."
        ) from None
    name = view.queue.name
    Screen(view, name if "://" in name else relative(name), every).run()
    return 0


def _on_terminal() -> bool:
    return all(map(output.on_terminal, (sys.stdin, sys.stdout, sys.stderr)))


def _print(view: View, every: float, options: argparse.Namespace) -> int:
    """Print a snapshot whenever something has changed."""
    before = None
    while True:
        found = view.look()
        if found.key != before:
            before = found.key
            read = output.say_json(found.as_json()) if options.json else output.say("\n".join(found.lines()))
            if not read:
                return 0
        if options.once:
            return 0
        sleep(every)
