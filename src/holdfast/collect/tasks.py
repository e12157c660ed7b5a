"""A task queue: its counts, what runs, what failed, and a task as JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from heapq import nlargest

from ..tasks import Task, TaskQueue
from .search import newest, running_tasks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILES = ("queue.db", "queue.json")  # the second one is of an old version, which `TaskQueue` refuses with a reason
_LONG = ("history", "traceback", "output")
_FAILURES = 5  # that are shown
_SEARCHED = 500  # the newest failed tasks, among which those are that failed last


def queue_at(path: str, *, remedy: str = "holdfast tasks put creates it", **options: Any) -> TaskQueue:
    """Open a queue. Raises FileNotFoundError if the directory has no queue. A URL is not a path."""
    if "://" not in path and not any(os.path.lexists(os.path.join(path, name)) for name in FILES):
        raise FileNotFoundError(2, f"there is no task queue here. Check the path. {remedy}", path)
    return TaskQueue(path, **options)


def orphans_of(queue: TaskQueue) -> frozenset[str]:
    """The ids of running tasks whose worker is dead. The next worker recovers them."""
    return frozenset(attempt.id for attempt in queue.store.orphans())


def as_json(task: Task, orphans: frozenset[str], *, whole: bool = False) -> dict[str, object]:
    """What `holdfast tasks ls --json` prints about a task. whole: also its history, traceback and output."""
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


@dataclass(frozen=True)
class Snapshot:
    """A queue at one moment."""

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

    def as_json(self) -> dict[str, object]:
        running, failures = ([as_json(task, self.orphans) for task in some] for some in (self.running, self.failures))
        return {"counts": self.counts, "paused": self.paused, "running": running, "failures": failures}


def look(queue: TaskQueue) -> Snapshot:
    """A queue now."""
    orphans, running = orphans_of(queue), running_tasks(queue)
    failed = nlargest(_FAILURES, newest(queue, "failed", _SEARCHED), key=lambda task: task.ended_at or task.put_at)
    return Snapshot(queue.stats(), queue.is_paused, running, tuple(failed), orphans)
