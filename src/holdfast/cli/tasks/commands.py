"""`ls`, `show`, `stats`, `retry`, `cancel`, `purge`, `recover`."""

from __future__ import annotations

import json

from ...errors import NotLocked
from ...tasks import NoSuchTask, Task
from ...tasks.journal import ENDED, STATES
from .. import arguments, output
from .text import COLOURS, age_of, as_json, in_a_line, many, payload_of, progress_of, queue_at, seconds_since, tasks_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

PROBLEM = 1

_HEADINGS = ("ID", "STATE", "PRIO", "TRIED", "AGE", "WORKER", "PROGRESS", "PAYLOAD", "ERROR")


def configure(name: str, parser: arguments.Parser) -> None:
    if name == "ls":
        parser.add_argument(
            "--state", dest="states", action="append", choices=STATES, help="only these; may be given more than once"
        )
        parser.add_argument("--limit", metavar="N", type=arguments.at_least_one, help="at most so many")
    elif name == "show":
        parser.add_argument("id", metavar="ID", help="of the task")
    elif name in ("retry", "cancel"):
        parser.add_argument("ids", metavar="ID", nargs="*", help="of the tasks")
    elif name == "purge":
        parser.add_argument(
            "--older-than", metavar="T", type=arguments.span, default=0.0, help="ended so long ago (0; 90s, 5m, 2h, 7d)"
        )
        parser.add_argument(
            "--state", dest="states", action="append", choices=sorted(ENDED), help="only these; more than once"
        )
    if name == "retry":
        parser.add_argument("--failed", action="store_true", help="all that have failed for good")
    arguments.add_json(parser)
    if name in ("retry", "cancel", "purge", "recover"):
        arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[name])


def ls(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    states = tuple(options.states or STATES)
    found = sorted(tasks_in(queue, states), key=_order)[: options.limit]
    if options.json:
        output.say_json([as_json(task) for task in found])
    elif found:
        put_off = queue.put_off()
        output.table(_HEADINGS, [_row(task, put_off) for task in found], [COLOURS[task.state] for task in found])
    else:
        output.complain(f"no {' or '.join(options.states)} tasks here" if options.states else "no tasks here")
    return 0


def _order(task: Task) -> tuple[object, ...]:
    """What runs, what waits in its order, and what has ended."""
    priority = -task.priority if task.state == "pending" else 0
    return (STATES.index(task.state), priority, task.put_at is None, task.put_at and task.put_at.timestamp())


def _why_not_yet(task: Task, put_off: dict[str, float | None]) -> str:
    """Of one that waits and cannot be begun now."""
    if task.state != "pending" or task.id not in put_off:
        return ""
    seconds = put_off[task.id]
    return f"for key {task.key}" if seconds is None else f"due in {output.duration(seconds)}"


def _row(task: Task, put_off: dict[str, float | None]) -> tuple[str, ...]:
    progress = _why_not_yet(task, put_off) or progress_of(task)
    return (
        output.shown(task.id),
        task.state,
        str(task.priority),
        f"{task.tried}/{task.attempts}",
        age_of(task),
        output.shown(task.worker or "-"),
        output.shortened(output.shown(progress), 30) or "-",
        in_a_line(payload_of(task), 30),
        in_a_line(task.error, 80),
    )


def show(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    try:
        task = queue.get(options.id)
    except NoSuchTask as error:
        _complain_about(error, options)
        return PROBLEM
    if options.json:
        output.say_json(as_json(task, whole=True))
    else:
        output.say("\n".join(_lines(task, queue.put_off() if task.state == "pending" else {})))
    return 0


def _complain_about(error: Exception, options: argparse.Namespace) -> None:
    advice = f"; holdfast tasks ls {options.path} lists them" if isinstance(error, NoSuchTask) else ""
    output.complain(f"holdfast tasks: {output.shown(f'{error}{advice}')}")


def _lines(task: Task, put_off: dict[str, float | None]) -> list[str]:
    facts: dict[str, object] = {
        "Task": task.id,
        "State": ", ".join(filter(None, (task.state, _why_not_yet(task, put_off)))),
        "Payload": payload_of(task),
        "Priority": task.priority,
        "Tried": f"{task.tried} of {task.attempts}",
        "Timeout": None if task.timeout is None else f"{task.timeout:g} s",
        "Key": None if task.key is None else f"{task.key} ({task.limit} at a time)",
        "Worker": task.worker,
        "Progress": progress_of(task) or None,
        **{
            name: f"{moment.isoformat(sep=' ', timespec='seconds')} ({output.duration(seconds_since(moment))} ago)"
            for name, moment in (("Put", task.put_at), ("Started", task.started_at), ("Ended", task.ended_at))
            if moment is not None
        },
        "Result": None if task.result is None else json.dumps(task.result, ensure_ascii=False),
    }
    lines = [f"{name}: {output.shown(str(value))}" for name, value in facts.items() if value is not None]
    for name, text in (("Error", task.error), ("Output", task.output), ("Traceback", task.traceback)):
        if text:
            inside = [f"  {output.shown(line)}" for line in text.strip().splitlines()]
            lines += [f"{name}: {inside[0].strip()}"] if len(inside) == 1 else [f"{name}:", *inside]
    return lines + (["History:", *map(_event, task.history)] if task.history else [])


def _event(said: dict[str, object]) -> str:
    """A line of its history."""
    rest = {name: value for name, value in said.items() if name not in ("at", "is", "boot", "traceback", "uncounted")}
    words = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in rest.items()]
    what = f"{said['is']}: " if "is" in said and words else str(said.get("is", ""))
    return f"  {output.shown(str(said.get('at', '?')))}  {in_a_line(what + ', '.join(words), 300)}"


def stats(options: argparse.Namespace) -> int:
    counted = queue_at(options.path).stats()
    if options.json:
        output.say_json(counted)
        return 0
    for state in ("pending", "running", "done", "failed", "cancelled"):
        why = ", ".join(f"{counted[name]} {name}" for name in ("delayed", "parked") if counted[name])
        output.say(f"{state:9} {counted[state]}" + (f" ({why})" if state == "pending" and why else ""))
    return 0


def retry(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    return _for_each(options, queue.ids("failed") if options.failed else [], queue.retry, "retried", "waits again")


def cancel(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)

    def end(id: str) -> str | None:
        if not queue.cancel(id):
            if queue.get(id).state != "cancelled":
                raise NotLocked(f"{queue.path}: task {id!r} has ended already, it is {queue.get(id).state}")
            return "was cancelled before"
        return "runs, and is being ended" if queue.get(id).state == "running" else None

    return _for_each(options, [], end, "cancelled", "cancelled")


def _for_each(
    options: argparse.Namespace, more: list[str], change: Callable[[str], str | None], name: str, what: str
) -> int:
    """Change every task asked for, also if it cannot be done to one of them."""
    ids = [*dict.fromkeys([*options.ids, *more])]
    if not ids and not getattr(options, "failed", False):
        raise ValueError("which tasks? Give their ids; holdfast tasks ls lists them")
    changed, errors = [], {}
    for id in ids:
        try:
            text = change(id) or what
        except (NoSuchTask, NotLocked) as error:
            errors[id] = str(error)
            if not options.json:
                _complain_about(error, options)
            continue
        changed.append(id)
        if not options.json and not options.quiet:
            output.say(f"{output.shown(id)}: {text}")
    if options.json:
        output.say_json({name: changed, "errors": errors})
    elif not ids and not options.quiet:
        output.complain("no task has failed")
    return PROBLEM if errors else 0


def purge(options: argparse.Namespace) -> int:
    number = queue_at(options.path).purge(options.older_than, states=options.states or ENDED)
    return _say_number("purged", f"Purged: {many(number)}", number, options)


def recover(options: argparse.Namespace) -> int:
    number = queue_at(options.path).recover()
    return _say_number("recovered", f"Recovered: {many(number)}", number, options)


def _say_number(name: str, text: str, number: int, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({name: number})
    elif not options.quiet:
        output.say(text)
    return 0


_CALLS = {
    "ls": ls,
    "show": show,
    "stats": stats,
    "retry": retry,
    "cancel": cancel,
    "purge": purge,
    "recover": recover,
}
