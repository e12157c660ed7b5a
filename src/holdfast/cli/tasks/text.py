"""A task in few words, and a queue that must exist."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields
from datetime import datetime, timezone

from ...tasks import Task, TaskQueue
from .. import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COLOURS = {
    "running": output.GREEN,
    "failed": output.RED,
    "cancelled": output.YELLOW,
    "done": output.DIM,
    "pending": "0",
}
_FILES = ("queue.db", "queue.json")  # the second one is of an old version, which `TaskQueue` refuses with a reason
_LONG = ("history", "traceback", "output")


def queue_at(path: str, *, remedy: str = "holdfast tasks put creates it", **options: Any) -> TaskQueue:
    """Open a queue. Raises FileNotFoundError if the directory has no queue. A URL is not a path."""
    if "://" not in path and not any(os.path.lexists(os.path.join(path, name)) for name in _FILES):
        raise FileNotFoundError(2, f"there is no task queue here. Check the path. {remedy}", path)
    return TaskQueue(path, **options)


def orphans_of(queue: TaskQueue) -> frozenset[str]:
    """The ids of running tasks whose worker is dead. The next worker recovers them."""
    return frozenset(attempt.id for attempt in queue.store.orphans())


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


def as_json(task: Task, orphans: frozenset[str], *, whole: bool = False) -> dict[str, object]:
    names = [field.name for field in fields(task) if whole or field.name not in _LONG]
    found = {name: _to_json(name, getattr(task, name)) for name in names}
    return {**found, "orphaned": task.state == "running" and task.id in orphans}


def _to_json(name: str, value: Any) -> object:
    if name == "history":
        return [{key: _to_json(key, one) for key, one in attempt.items()} for attempt in value]
    return moment(value) if name.endswith("_at") and value is not None else value


def moment(when: datetime | float) -> str:
    """2026-01-02T03:04:05Z, from a datetime or the seconds of a history."""
    if not isinstance(when, datetime):
        when = datetime.fromtimestamp(when, timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def many(number: int, what: str = "task") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
