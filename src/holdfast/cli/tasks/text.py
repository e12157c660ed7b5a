"""A task in few words, and a queue that must be there."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields

from ...errors import CorruptStore
from ...tasks import NoSuchTask, Task, TaskQueue
from .. import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from typing import Any

COLOURS = {
    "running": output.GREEN,
    "failed": output.RED,
    "cancelled": output.YELLOW,
    "done": output.DIM,
    "pending": "0",
}


def queue_at(path: str, **options: Any) -> TaskQueue:
    """The queue of a directory, which must be one."""
    try:
        os.stat(f"{path}/queue.json")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(2, "there is no queue of tasks here; holdfast tasks put makes one", path) from None
    return TaskQueue(path, **options)


def tasks_in(queue: TaskQueue, states: tuple[str, ...]) -> Iterator[Task]:
    """Those in one of these states. Files of others are not read, but for what runs: a worker may have died."""
    seen: set[str] = set()
    for state in dict.fromkeys((*states, "running")):
        for id in queue.ids(state):
            if id not in seen:
                seen.add(id)
                try:
                    task = queue.get(id)
                except NoSuchTask:
                    continue  # purged meanwhile
                except CorruptStore as error:
                    output.complain(f"holdfast tasks: {output.shown(str(error))}")
                    continue
                if task.state in states:
                    yield task


def seconds_since(moment: datetime | None) -> float:
    return 0.0 if moment is None else max(0.0, time.time() - moment.timestamp())


def age_of(task: Task) -> str:
    """How long it has been in its state: it runs, it has ended, or it waits."""
    since = task.ended_at or (task.started_at if task.state == "running" else None) or task.put_at
    return output.duration(seconds_since(since)) if since is not None else "-"


def progress_of(task: Task) -> str:
    """3/10 third page."""
    if task.progress is None:
        return ""
    done, total, note = task.progress
    text = _number(done) if total is None else f"{_number(done)}/{_number(total)}"
    return f"{text} {output.shown(str(note))}".strip()


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else output.shown(str(value))


def payload_of(task: Task) -> str:
    return task.payload if isinstance(task.payload, str) else json.dumps(task.payload, ensure_ascii=False)


def in_a_line(text: str | None, width: int = 200) -> str:
    """Its first line, and safe to print. Of a text that ends with what matters, such as an error, also that."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return output.shortened(output.shown(" … ".join(lines[:1] + lines[1:][-1:])), width)


def as_json(task: Task, *, whole: bool = False) -> dict[str, object]:
    times = ("put", "started", "ended")
    left_out = times if whole else (*times, "history", "traceback", "by", "boot")
    said = {field.name: getattr(task, field.name) for field in fields(task) if field.name not in left_out}
    return said | {f"{name}_at": getattr(task, name) for name in times}


def many(number: int, what: str = "task") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
