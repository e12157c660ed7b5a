"""`holdfast tasks watch`: a queue, live. On a terminal, `screen` draws it. A pipe gets a snapshot for every change."""

from __future__ import annotations

import sys
from time import sleep

from ...collect.tasks import Snapshot, look, queue_at
from ...errors import Unsupported
from .. import arguments, output
from ..listing import relative
from .text import age_of, in_a_line, payload_of, progress_of, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ...tasks import Task, TaskQueue

EXAMPLES = """\

keys: q ends

examples:
  holdfast tasks watch /tmp/jobs
  holdfast tasks watch /tmp/jobs --json | jq .counts
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = (parser.epilog or "") + "\n" + EXAMPLES
    parser.add_argument(
        "--every", metavar="TIME", type=arguments.time, default=1.0, help="time between two updates (1s)"
    )
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    arguments.add_json(parser, "print JSON: one object in a line for every change, or for an error")
    parser.set_defaults(call=call)


def summary(found: Snapshot) -> str:
    """5 running, 3 pending (1 delayed), …"""
    waiting = [f"{found.counts[name]} {name}" for name in ("delayed", "parked", "blocked") if found.counts[name]]
    names = ("running", "pending", "done", "failed", "cancelled")
    texts = {name: f"{found.counts[name]} {name}" for name in names}
    if waiting:
        texts["pending"] += f" ({', '.join(waiting)})"
    return ", ".join(texts.values()) + (", paused" if found.paused else "")


def lines(found: Snapshot) -> list[str]:
    running = [_running_line(task, found) for task in found.running]
    return [summary(found), *running, *map(failure_line, found.failures)]


def about(task: Task, found: Snapshot) -> str:
    """The last words about a running task."""
    return reason_of(task, found.orphans) or progress_of(task) or in_a_line(payload_of(task))


def _running_line(task: Task, found: Snapshot) -> str:
    worker = output.shown(task.worker or "?")
    return f"  running {output.shown(task.id)} for {age_of(task)} by {worker}: {about(task, found)}"


def failure_line(task: Task) -> str:
    return f"  failed {output.shown(task.id)} {age_of(task)} ago: {in_a_line(task.error)}"


def call(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    every = max(0.1, options.every)
    if options.json or options.once or not _on_terminal():
        return _print(queue, every, options)
    try:
        from .screen import Screen
    except ImportError:
        raise Unsupported(
            "holdfast tasks watch needs Textual: pip install 'holdfast[top]'. --once prints the same, once."
        ) from None
    name = queue.name
    Screen(queue, name if "://" in name else relative(name), every).run()
    return 0


def _on_terminal() -> bool:
    return all(map(output.on_terminal, (sys.stdin, sys.stdout, sys.stderr)))


def _print(queue: TaskQueue, every: float, options: argparse.Namespace) -> int:
    """Print a snapshot whenever something has changed."""
    before = None
    while True:
        found = look(queue)
        if found.key != before:
            before = found.key
            read = output.say_json(found.as_json()) if options.json else output.say("\n".join(lines(found)))
            if not read:
                return 0
        if options.once:
            return 0
        sleep(every)
