"""`put`, `ls`, `show`, `stats`, `retry`, `cancel`, `purge`, `recover`."""

from __future__ import annotations

import json
import sys
from itertools import chain, islice

from ...errors import NotLocked
from ...tasks import NoSuchTask, QueueFull, Task, TaskQueue
from ...tasks.journal import STATES
from .. import arguments, output
from .text import COLOURS, age_of, as_json, in_a_line, many, payload_of, progress_of, queue_at, seconds_since, tasks_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

PROBLEM, FULL = 1, 75

_HEADINGS = ("ID", "STATE", "PRIO", "TRIED", "AGE", "WORKER", "PROGRESS", "PAYLOAD", "ERROR")


def configure(name: str, parser: arguments.Parser) -> None:
    if name == "put":
        _configure_put(parser)
    elif name == "ls":
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
    if name == "retry":
        parser.add_argument("--failed", action="store_true", help="all that have failed for good")
    arguments.add_json(parser)
    if name in ("put", "retry", "cancel", "purge", "recover"):
        arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[name])


def _configure_put(parser: arguments.Parser) -> None:
    words = "what there is to do, a task each; - reads one per line from the standard input"
    parser.add_argument("payloads", metavar="PAYLOAD", nargs="*", help=words)
    parser.add_argument("--parse", action="store_true", help="the payloads are JSON, not text")
    parser.add_argument("--id", help="its name; a task that is there already by this name is not put again")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="higher ones are done first (0)")
    parser.add_argument("--delay", metavar="T", type=arguments.span, default=0.0, help="not before so long from now")
    parser.add_argument(
        "--attempts", metavar="N", type=arguments.at_least_one, default=3, help="how often to try it (3)"
    )
    parser.add_argument("--timeout", metavar="T", type=arguments.span, help="end an attempt after so long")
    parser.add_argument("--key", help="tasks with the same key are done one after the other")
    parser.add_argument(
        "--limit", metavar="N", type=arguments.at_least_one, default=1, help="or so many at a time (with --key)"
    )
    parser.add_argument(
        "--max-pending", metavar="N", type=arguments.at_least_one, help="put none if so many wait: exit status 75"
    )
    parser.add_argument(
        "--wait", metavar="T", type=arguments.span, default=0.0, help="but first wait so long for room (inf: for ever)"
    )
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")


def put(options: argparse.Namespace) -> int:
    if not options.payloads:
        raise ValueError("which tasks? Give their payloads, or - to read one per line from the standard input")
    if options.id is not None and (len(options.payloads) > 1 or options.payloads == ["-"]):
        raise ValueError("--id names one task, so there can be one payload")
    payloads = _payloads(options)
    first = list(islice(payloads, 1))  # if that is wrong, no queue is made
    queue = TaskQueue(options.path, durable=options.durable, max_pending=options.max_pending)
    names = ("id", "priority", "delay", "attempts", "timeout", "key", "limit", "wait")
    more = {name: getattr(options, name) for name in names}
    ids = []
    try:
        for payload in chain(first, payloads):
            ids.append(queue.put(payload, **more))
            if not options.json and not options.quiet:
                output.say(output.shown(ids[-1]))
    except QueueFull:
        wait = "" if options.wait else "; --wait T waits for room"
        text = f"{options.max_pending} tasks wait already{wait}. {many(len(ids))} put before"
        output.complain(f"holdfast tasks: {output.shown(options.path)}: {text}")
        return FULL
    finally:
        if options.json:
            output.say_json({"ids": ids})
    return 0


def _payloads(options: argparse.Namespace) -> Iterator[object]:
    for word in options.payloads:
        if word != "-":
            yield _payload(word, options)
            continue
        for line in sys.stdin.buffer:
            text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
            if text:
                yield _payload(text, options)


def _payload(text: str, options: argparse.Namespace) -> object:
    if not options.parse:
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON: {error}") from None


def ls(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    states = tuple(options.states or STATES)
    found = sorted(tasks_in(queue, states), key=_order)[: options.limit]
    if options.json:
        output.say_json([as_json(task) for task in found])
    elif found:
        output.table(_HEADINGS, [_row(task) for task in found], [COLOURS[task.state] for task in found])
    else:
        output.complain(f"no {' or '.join(options.states)} tasks here" if options.states else "no tasks here")
    return 0


def _order(task: Task) -> tuple[object, ...]:
    """What runs, what waits in its order, and what has ended."""
    priority = -task.priority if task.state == "pending" else 0
    return (STATES.index(task.state), priority, task.put_at is None, task.put_at and task.put_at.timestamp())


def _row(task: Task) -> tuple[str, ...]:
    return (
        output.shown(task.id),
        task.state,
        str(task.priority),
        f"{task.tried}/{task.attempts}",
        age_of(task),
        output.shown(task.worker or "-"),
        output.shortened(progress_of(task), 30) or "-",
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
        output.say("\n".join(_lines(task)))
    return 0


def _complain_about(error: Exception, options: argparse.Namespace) -> None:
    advice = f"; holdfast tasks ls {options.path} lists them" if isinstance(error, NoSuchTask) else ""
    output.complain(f"holdfast tasks: {output.shown(f'{error}{advice}')}")


def _lines(task: Task) -> list[str]:
    facts: dict[str, object] = {
        "Task": task.id,
        "State": task.state,
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
    for name, text in (("Error", task.error), ("Traceback", task.traceback)):
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
    return _for_each(options, queue.ids("failed") if options.failed else [], queue.retry, "retried", "is done again")


def cancel(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)

    def end(id: str) -> str | None:
        if not queue.cancel(id) and queue.get(id).state != "cancelled":
            raise NotLocked(f"{queue.path}: task {id!r} has ended already, it is {queue.get(id).state}")
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
    number = queue_at(options.path).purge(options.older_than)
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
    "put": put,
    "ls": ls,
    "show": show,
    "stats": stats,
    "retry": retry,
    "cancel": cancel,
    "purge": purge,
    "recover": recover,
}
