"""A task in few words."""

from __future__ import annotations

import json
import time

from ...tasks import Task
from .. import output
from ..failures import NO, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from datetime import datetime

COLOURS = {
    "running": output.GREEN,
    "failed": output.RED,
    "cancelled": output.YELLOW,
    "done": output.DIM,
    "pending": "0",
}


def seconds_since(moment: datetime | None) -> float:
    return 0.0 if moment is None else max(0.0, time.time() - moment.timestamp())


def age_of(task: Task) -> str:
    """How long the task runs, waits, or has ended."""
    since = task.ended_at or (task.started_at if task.state == "running" else None) or task.put_at
    return output.duration(seconds_since(since))


def progress_of(task: Task) -> str:
    """3/10 third page."""
    if task.progress is None:
        return ""
    done, total, note = task.progress
    text = _number(done) if total is None else f"{_number(done)}/{_number(total)}"
    return f"{text} {output.shown(str(note))}".strip()


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else output.shown(str(value))


def reason_of(task: Task, orphans: frozenset[str] = frozenset()) -> str:
    """Why the next worker does not take a pending task, or what is wrong with a running one."""
    if task.waits == "delayed":
        return f"due in {output.duration(task.due_in or 0.0)}"
    if task.waits == "parked":
        return f"waits for key {task.key}"
    if task.waits == "blocked":
        return "waits for other tasks"
    if task.state == "running" and task.id in orphans:
        return "its worker died"
    return "being cancelled" if task.cancelling else ""


def payload_of(task: Task) -> str:
    return task.payload if isinstance(task.payload, str) else json.dumps(task.payload, ensure_ascii=False)


def in_a_line(text: str | None, width: int = 200) -> str:
    """The first line of a text, and its last line, where an error usually is. Safe to print."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return output.shortened(output.shown(" … ".join(lines[:1] + lines[1:][-1:])), width)


def report_each(
    options: argparse.Namespace, path: str, name: str, lines: dict[str, str], errors: dict[str, str], nothing: str
) -> None:
    """Print what was done to each of several things. Raises Failure if that failed for one of them."""
    if options.json and not errors:
        output.say_json({name: list(lines), "errors": errors})
    elif lines and not options.quiet and not options.json:
        output.say("\n".join(f"{output.shown(id)}: {text}" for id, text in lines.items()))
    elif not errors and not options.quiet:
        output.complain(nothing)
    if errors:
        texts = list(errors.values())
        text = "\n".join(f"holdfast tasks: {output.shown(text)}" for text in texts)
        more = {name: list(lines), "errors": errors}
        raise Failure(NO, texts[0], text=text, path=path, silenced=False, more=more)
