"""`holdfast tasks watch`: a queue, live. On a terminal `screen` draws it; a pipe gets a snapshot for every change."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from time import sleep

from ...errors import HoldfastError, Unsupported
from ...tasks import Task, TaskQueue
from .. import arguments, output
from ..listing import relative
from .text import age_of, as_json, in_a_line, payload_of, progress_of, queue_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

_FAILURES = 5  # that are shown

EXAMPLES = """\

keys: q ends

examples:
  holdfast tasks watch /tmp/jobs
  holdfast tasks watch /tmp/jobs --json | jq .counts
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = (parser.epilog or "") + "\n" + EXAMPLES
    parser.add_argument("--every", metavar="T", type=arguments.span, default=1.0, help="seconds between looks (1)")
    parser.add_argument("--once", action="store_true", help="print how it stands now, and end")
    arguments.add_json(parser, "print JSON: one object in a line for every change")
    parser.set_defaults(call=call)


@dataclass(frozen=True)
class Snapshot:
    counts: dict[str, int]
    running: tuple[Task, ...]
    failures: tuple[Task, ...]  # the last ones first

    @property
    def what_counts(self) -> tuple[object, ...]:
        """What changes when something has happened, and not with the time."""
        running = tuple((task.id, task.token, task.progress) for task in self.running)
        return (self.counts, running, tuple((task.id, task.token) for task in self.failures))

    def summary(self) -> str:
        waiting = ", ".join(f"{self.counts[name]} {name}" for name in ("delayed", "parked") if self.counts[name])
        names = ("running", "pending", "done", "failed", "cancelled")
        texts = {name: f"{self.counts[name]} {name}" for name in names}
        if waiting:
            texts["pending"] += f" ({waiting})"
        return ", ".join(texts.values())

    def lines(self) -> list[str]:
        return [self.summary(), *map(_running_line, self.running), *map(_failure_line, self.failures)]

    def as_json(self) -> dict[str, object]:
        running, failures = [as_json(task) for task in self.running], [as_json(task) for task in self.failures]
        return {"counts": self.counts, "running": running, "failures": failures}


def _running_line(task: Task) -> str:
    what = progress_of(task) or in_a_line(payload_of(task))
    return f"  running {output.shown(task.id)} for {age_of(task)} by {output.shown(task.worker or '?')}: {what}"


def _failure_line(task: Task) -> str:
    return f"  failed {output.shown(task.id)} {age_of(task)} ago: {in_a_line(task.error)}"


class View:
    """Looks at a queue again and again. Of the failures it reads those that are new, and those that it shows."""

    def __init__(self, path: str) -> None:
        self.queue: TaskQueue = queue_at(path)
        self._known: set[str] = set()
        self._last: list[Task] = []

    def look(self) -> Snapshot:
        counts = self.queue.stats()
        running = [task for task in self._tasks(self.queue.ids("running")) if task.state == "running"]
        running.sort(key=lambda task: (task.started_at is None, task.started_at))
        return Snapshot(counts, tuple(running), tuple(self._failures()))

    def _failures(self) -> list[Task]:
        ids = self.queue.ids("failed")
        shown = {task.id for task in self._last}
        if not shown <= set(ids):
            self._known = set()  # one is not failed any more, so an older one is shown again
        found = self._tasks([id for id in ids if id not in self._known or id in shown])
        self._known = set(ids)
        found = [task for task in found if task.state == "failed"]
        found.sort(key=lambda task: task.ended_at.timestamp() if task.ended_at else 0.0, reverse=True)
        self._last = found[:_FAILURES]
        return self._last

    def _tasks(self, ids: list[str]) -> list[Task]:
        found = []
        for id in ids:
            try:
                found.append(self.queue.get(id))
            except (HoldfastError, OSError):
                pass  # purged meanwhile, or damaged
        return found


def call(options: argparse.Namespace) -> int:
    view = View(options.path)
    every = max(0.1, options.every)
    if options.json or options.once or not _on_terminal():
        return _print(view, every, options)
    try:
        from .screen import Screen
    except ImportError:
        raise Unsupported(
            "holdfast tasks watch needs Textual: pip install 'holdfast[top]'. --once shows the same, once."
        ) from None
    Screen(view, relative(options.path), every).run()
    return 0


def _on_terminal() -> bool:
    return all(map(output.on_terminal, (sys.stdin, sys.stdout, sys.stderr)))


def _print(view: View, every: float, options: argparse.Namespace) -> int:
    """Whenever something has changed."""
    before = None
    while True:
        found = view.look()
        if found.what_counts != before:
            before = found.what_counts
            read = output.say_json(found.as_json()) if options.json else output.say("\n".join(found.lines()))
            if not read:
                return 0
        if options.once:
            return 0
        sleep(every)
