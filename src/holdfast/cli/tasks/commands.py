"""`ls`, `show`, `stats`, `retry`, `cancel`, `purge`, `pause`, `resume`."""

from __future__ import annotations

import json
from itertools import chain, islice

from ...collect.tasks import as_json, moment, orphans_of, queue_at
from ...errors import NotLocked
from ...tasks import NoSuchTask, Task, TaskQueue
from ...tasks.model import STATES
from ...tasks.store import ENDED, Selection
from .. import arguments, output
from ..failures import NO, Failure
from .text import (
    COLOURS,
    age_of,
    in_a_line,
    payload_of,
    progress_of,
    reason_of,
    report_each,
    seconds_since,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

_HEADINGS = ("ID", "STATE", "PRIO", "TRIED", "AGE", "WORKER", "PROGRESS", "PAYLOAD", "ERROR")
_ORDER = ("running", "pending", "failed", "cancelled", "done")  # of `ls`
_AT_ONCE = 500  # tasks that are printed together


def configure(name: str, parser: arguments.Parser) -> None:
    if name == "ls":
        parser.add_argument(
            "--state",
            dest="states",
            action="append",
            choices=STATES,
            help="only tasks in this state; may be given more than once",
        )
        parser.add_argument("--limit", metavar="N", type=arguments.at_least_one, help="at most N tasks")
    elif name == "show":
        parser.add_argument("id", metavar="ID", help="the task")
    elif name in ("retry", "cancel"):
        parser.add_argument("ids", metavar="ID", nargs="*", help="the tasks")
    elif name == "purge":
        parser.add_argument(
            "--older-than",
            metavar="TIME",
            type=arguments.time,
            default=0.0,
            help="only tasks that ended longer ago than this (0s)",
        )
        parser.add_argument(
            "--state",
            dest="states",
            action="append",
            choices=sorted(ENDED),
            help="only tasks in this state; may be given more than once",
        )
    if name == "retry":
        parser.add_argument("--failed", action="store_true", help="all failed tasks")
    arguments.add_json(parser)
    if name not in ("ls", "show", "stats"):
        arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[name])


def ls(options: argparse.Namespace) -> int:
    """Running tasks, then pending ones and so on. Within a state, in the order in which they were put."""
    queue = queue_at(options.path)
    states = [state for state in _ORDER if not options.states or state in options.states]
    found = islice(chain.from_iterable(queue.tasks((state,)) for state in states), options.limit)
    orphans = orphans_of(queue) if "running" in states else frozenset()
    if options.json:
        _print_json(found, orphans)
        return 0
    rows = [(_row(task, orphans), COLOURS[task.state]) for task in found]
    if rows:
        output.table(_HEADINGS, [row for row, _ in rows], [colour for _, colour in rows])
    else:
        output.complain(f"no {' or '.join(options.states)} tasks" if options.states else "no tasks")
    return 0


def _print_json(tasks: Iterator[Task], orphans: frozenset[str]) -> None:
    """A JSON array, a task in each line. It is printed while it is read: a queue may have millions of tasks."""
    before = "["
    while some := [json.dumps(as_json(task, orphans)) for task in islice(tasks, _AT_ONCE)]:
        if not output.say(before + ",\n ".join(some)):
            return
        before = " ,"
    output.say("[]" if before == "[" else "]")


def _row(task: Task, orphans: frozenset[str]) -> tuple[str, ...]:
    progress = reason_of(task, orphans) or progress_of(task)
    return (
        output.shown(task.id),
        task.state,
        str(task.priority),
        f"{task.tried}/{task.attempts}",
        age_of(task),
        output.shown(task.worker or "-"),
        output.shortened(output.shown(progress), 30) or "-",
        in_a_line(_what(task), 30),
        in_a_line(task.error, 80),
    )


def _what(task: Task) -> str:
    """The payload, with the function of a call before it."""
    return payload_of(task) if task.function is None else f"{task.function} {payload_of(task)}"


def show(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    try:
        task = queue.get(options.id)
    except NoSuchTask as error:
        raise Failure(NO, _text_of(error, queue), path=queue.name) from None
    orphans = orphans_of(queue) if task.state == "running" else frozenset()
    if options.json:
        output.say_json(as_json(task, orphans, whole=True))
    else:
        output.say("\n".join(_lines(task, orphans)))
    return 0


def _text_of(error: Exception, queue: TaskQueue) -> str:
    return f"{error}. holdfast tasks ls {queue.name} lists them" if isinstance(error, NoSuchTask) else str(error)


def _lines(task: Task, orphans: frozenset[str]) -> list[str]:
    at_a_time = f" ({task.limit} at a time)" if task.limit else ""
    facts: dict[str, object] = {
        "Task": task.id,
        "State": ", ".join(filter(None, (task.state, reason_of(task, orphans)))),
        "Function": task.function,
        "Payload": payload_of(task),
        "Priority": task.priority,
        "Tried": f"{task.tried} of {task.attempts}",
        "Timeout": None if task.timeout is None else f"{task.timeout:g} s",
        "Key": None if task.key is None else f"{task.key}{at_a_time}",
        "Worker": task.worker,
        "Progress": progress_of(task) or None,
        **{
            name: f"{when.isoformat(sep=' ', timespec='seconds')} ({output.duration(seconds_since(when))} ago)"
            for name, when in (("Put", task.put_at), ("Started", task.started_at), ("Ended", task.ended_at))
            if when is not None
        },
        "Result": None if task.result is None else json.dumps(task.result, ensure_ascii=False),
    }
    lines = [f"{name}: {output.shown(str(value))}" for name, value in facts.items() if value is not None]
    for name, text in (("Error", task.error), ("Output", task.output), ("Traceback", task.traceback)):
        if text:
            inside = [f"  {output.shown(line)}" for line in text.strip().splitlines()]
            lines += [f"{name}: {inside[0].strip()}"] if len(inside) == 1 else [f"{name}:", *inside]
    return lines + (["Earlier attempts:", *map(_attempt, task.history)] if task.history else [])


def _attempt(past: dict[str, object]) -> str:
    """A line of the history."""
    began = past["started_at"]
    error = f": {past['error']}" if past["error"] else ""
    when = moment(began) if isinstance(began, int | float) else "-"
    text = in_a_line(f"{past['state']} by {past['worker']}{error}", 300)
    return f"  {when}  {text}"


def stats(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    counted, is_paused = queue.stats(), queue.is_paused
    if options.json:
        output.say_json({**counted, "paused": is_paused})
        return 0
    why = ", ".join(f"{counted[name]} {name}" for name in ("delayed", "parked", "blocked") if counted[name])
    lines = [f"{state:9} {counted[state]}" for state in STATES]
    lines[0] += f" ({why})" if why else ""
    if is_paused:
        lines.append("The queue is paused: workers begin no task until holdfast tasks resume.")
    output.say("\n".join(lines))
    return 0


def retry(options: argparse.Namespace) -> int:
    if not options.ids and not options.failed:
        raise ValueError("which tasks? Give their ids, or --failed. holdfast tasks ls lists them")
    queue = queue_at(options.path)
    failed: list[str] = []
    if options.failed:
        failed = [task.id for task in queue.tasks(("failed",))]
        queue.store.retry(Selection(ids=failed))  # all in few transactions
    return _for_each(options, queue, queue.retry, "retried", "pending again", failed)


def cancel(options: argparse.Namespace) -> int:
    if not options.ids:
        raise ValueError("which tasks? Give their ids. holdfast tasks ls lists them")
    queue = queue_at(options.path)

    def end(id: str) -> str | None:
        if queue.cancel(id):
            return "cancelled; its worker kills it" if queue.get(id).state == "running" else None
        state = queue.get(id).state
        if state != "cancelled":
            raise NotLocked(f"{queue.name}: task {id!r} has ended already, it is {state}")
        return "was cancelled before"

    return _for_each(options, queue, end, "cancelled", "cancelled", [])


def _for_each(
    options: argparse.Namespace,
    queue: TaskQueue,
    change: Callable[[str], str | None],
    name: str,
    what: str,
    changed: list[str],
) -> int:
    """Change every task, also if one of them cannot be changed. `changed`: these were changed already."""
    lines = dict.fromkeys(changed, what)
    errors = {}
    for id in dict.fromkeys(options.ids):
        if id in lines:
            continue
        try:
            lines[id] = change(id) or what
        except (NoSuchTask, NotLocked) as error:
            errors[id] = _text_of(error, queue)
    report_each(options, queue.name, name, lines, errors, "no task has failed")
    return 0


def purge(options: argparse.Namespace) -> int:
    number = queue_at(options.path).purge(options.older_than, states=options.states or ENDED)
    return _print_change(options, {"purged": number}, f"Purged: {output.many(number, 'task')}")


def pause(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    queue.pause()
    text = f"{queue.name}: paused. Running tasks end, and no task begins until holdfast tasks resume."
    return _print_change(options, {"paused": True}, text)


def resume(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    queue.resume()
    return _print_change(options, {"paused": False}, f"{queue.name}: resumed. Workers begin tasks.")


def _print_change(options: argparse.Namespace, value: dict[str, object], text: str) -> int:
    if options.json:
        output.say_json(value)
    elif not options.quiet:
        output.say(output.shown(text))
    return 0


_CALLS = {
    "ls": ls,
    "show": show,
    "stats": stats,
    "retry": retry,
    "cancel": cancel,
    "purge": purge,
    "pause": pause,
    "resume": resume,
}
