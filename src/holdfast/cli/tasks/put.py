"""`put`, `schedule`, `unschedule`: add tasks, once or again and again."""

from __future__ import annotations

import json
import os
import sys
from time import time

from ...collect.tasks import moment, queue_at
from ...tasks import QueueFull, TaskQueue
from ...tasks.model import new_task
from ...tasks.schedule import OPTIONS, Schedule
from .. import arguments, output
from .text import in_a_line, many

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

PROBLEM, FULL = 1, 75

_HEADINGS = ("NAME", "WHEN", "NEXT", "PAYLOAD")
_CHUNK_BYTES = 1 << 16


def configure(name: str, parser: arguments.Parser) -> None:
    if name == "unschedule":
        parser.add_argument("names", metavar="NAME", nargs="+", help="the schedules")
    elif name == "schedule":
        parser.usage = "holdfast tasks schedule QUEUE NAME [PAYLOAD] --every T | --cron '…' [options]"
        parser.usage += "\n       holdfast tasks schedule QUEUE     lists the schedules"
        parser.add_argument("name", metavar="NAME", nargs="?", help="a schedule with the same name is replaced")
        parser.add_argument("payload", metavar="PAYLOAD", nargs="?", help="the payload of its tasks")
        parser.add_argument("--every", metavar="T", type=arguments.span, help="add a task every T")
        parser.add_argument("--cron", metavar="FIELDS", help="'minute hour day month weekday', as one word")
        parser.add_argument("--tz", metavar="ZONE", help="the time zone of --cron, such as Europe/Berlin (UTC)")
        _add_options(parser)
    else:
        _configure_put(parser)
        _add_options(parser)
    arguments.add_json(parser, short=False)
    arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[name])


def _configure_put(parser: arguments.Parser) -> None:
    words = "a task for each; - reads one per line from the standard input"
    parser.add_argument("payloads", metavar="PAYLOAD", nargs="*", help=words)
    parser.add_argument("--id", help="the id of the task; if it exists already, no task is added")
    parser.add_argument("--after", metavar="ID", action="append", default=[], help="wait until this task is done")
    parser.add_argument("--delay", metavar="T", type=arguments.span, default=0.0, help="wait so long before it starts")
    parser.add_argument(
        "--max-pending", metavar="N", type=arguments.at_least_one, help="exit with 75 if N tasks are pending"
    )
    parser.add_argument(
        "--wait",
        metavar="T",
        type=arguments.span,
        default=0.0,
        help="with --max-pending: wait so long (or inf) for room",
    )
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")


def _add_options(parser: arguments.Parser) -> None:
    """What every task may have."""
    parser.add_argument("--parse", action="store_true", help="the payloads are JSON, not text")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="higher priorities run first (0)")
    parser.add_argument("--attempts", metavar="N", type=arguments.at_least_one, default=3, help="try so often (3)")
    parser.add_argument("--timeout", metavar="T", type=arguments.span, help="kill an attempt after so long")
    parser.add_argument("--key", help="tasks with the same key run one at a time")
    parser.add_argument(
        "--limit", metavar="N", type=arguments.at_least_one, help="with --key: at most N tasks run at a time (1)"
    )
    parser.add_argument("--rate", metavar="N/T", help="with --key: at most N tasks start in T: 10/m, 1/30s")


def _options_of(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def put(options: argparse.Namespace) -> int:
    if not options.payloads:
        raise ValueError("which tasks? Give their payloads, or - to read one per line from the standard input")
    if options.id is not None and (len(options.payloads) > 1 or options.payloads == ["-"]):
        raise ValueError("--id needs exactly one payload")
    if options.wait and options.max_pending is None:
        raise ValueError("--wait needs --max-pending")
    given = [word if word == "-" else _payload(word, options) for word in options.payloads]
    more = {**_options_of(options), "delay": options.delay, "after": options.after}
    for payload in given:
        new_task(payload, id=options.id, **more)  # wrong options create no queue
    queue = TaskQueue(options.path, durable=options.durable, max_pending=options.max_pending)
    added = _Added(queue, options)
    try:
        if options.id is not None:
            added.put_one(given[0], **more)
        for payloads in _groups(given, options) if options.id is None else ():
            added.put_group(payloads, **more)
    except QueueFull:
        advice = "Start more workers." if options.wait else "Wait for room with --wait T."
        full = f"{queue.name}: {many(options.max_pending)} or more are pending already. {advice}"
        output.complain(f"holdfast tasks: {output.shown(full)} {many(len(added.ids))} put before")
        return FULL
    except _BadLine as error:
        raise ValueError(f"{error}. {many(len(added.ids))} put before") from None
    finally:
        if options.json:
            output.say_json({"ids": added.ids, "existing": added.existing})
    return 0


class _Added:
    """The tasks of one `put`. Prints their ids."""

    def __init__(self, queue: TaskQueue, options: argparse.Namespace) -> None:
        self.ids: list[str] = []
        self.existing: list[str] = []
        self._queue = queue
        self._options = options
        self._prints = not options.json and not options.quiet

    def put_one(self, payload: object, **more: Any) -> None:
        """A task with an id of the user's."""
        id = self._options.id
        if id in self._queue:
            self.existing.append(id)
        else:
            self._queue.put(payload, id=id, wait=self._wait, **more)
        self._add([id])
        if self.existing and self._prints:
            output.complain(f"{output.shown(id)} exists already")

    def put_group(self, payloads: list[object], **more: Any) -> None:
        """All in one transaction. If the queue may be full, one by one, to know how many were put."""
        if self._queue.max_pending is None:
            self._add(self._queue.put_all(payloads, **more))
            return
        for payload in payloads:
            self._add([self._queue.put(payload, wait=self._wait, **more)])

    @property
    def _wait(self) -> float | None:
        return None if self._options.wait == float("inf") else self._options.wait

    def _add(self, ids: list[str]) -> None:
        self.ids += ids
        if self._prints:
            output.say("\n".join(map(output.shown, ids)))


def _groups(given: list[object], options: argparse.Namespace) -> Iterator[list[object]]:
    words: list[object] = []
    for payload, word in zip(given, options.payloads, strict=True):
        if word != "-":
            words.append(payload)
            continue
        if words:
            yield words
            words = []
        yield from _lines(options)
    if words:
        yield words


class _BadLine(Exception):
    pass


def _lines(options: argparse.Namespace) -> Iterator[list[object]]:
    """Groups of lines, as the writer of the pipe writes them."""
    if sys.stdin is None:
        raise ValueError("there is no standard input to read from")
    rest, text = b"", b"-"
    while text:
        text = os.read(sys.stdin.fileno(), _CHUNK_BYTES)
        *lines, rest = (rest + text).split(b"\n") if text else (rest, b"")
        payloads: list[object] = []
        try:
            for line in lines:
                word = line.decode("utf-8", "surrogateescape").rstrip("\r")
                if word:
                    payloads.append(_payload(word, options))
        except ValueError as error:
            if payloads:
                yield payloads
            raise _BadLine(str(error)) from None
        if payloads:
            yield payloads


def _payload(text: str, options: argparse.Namespace) -> object:
    if not options.parse:
        return text
    try:
        payload = json.loads(text)
        new_task(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{output.shortened(text, 100)!r} is not JSON: {error}") from None
    return payload


def schedule(options: argparse.Namespace) -> int:
    if options.name is None:
        return _list(options)
    payload = None if options.payload is None else _payload(options.payload, options)
    if (options.every is None) == (options.cron is None):
        raise ValueError("when? Give either --every T or --cron 'minute hour day month weekday'")
    times = {"cron": options.cron, "every": options.every, "tz": options.tz}
    made = Schedule(options.name, payload, **times, options=_options_of(options), since=0.0)
    made.check()  # before a queue is made
    queue = TaskQueue(options.path)
    queue.schedule(options.name, payload, **times, **_options_of(options))
    if options.json:
        output.say_json(_as_json(queue.schedules()[options.name]))
    elif not options.quiet:
        output.say(f"{output.shown(options.name)}: next {_next(made)}. Workers of this queue add it.")
    return 0


def _list(options: argparse.Namespace) -> int:
    found = queue_at(options.path).schedules()
    if options.json:
        output.say_json([_as_json(one) for one in found.values()])
    elif found:
        rows: list[tuple[str, ...]] = [
            (output.shown(name), _when(one), _next(one), _what(one)) for name, one in found.items()
        ]
        output.table(_HEADINGS, rows, ["0"] * len(rows))
    else:
        output.complain("no schedules")
    return 0


def _when(schedule: Schedule) -> str:
    if schedule.cron is None:
        return f"every {output.duration(schedule.every or 0.0)}"
    return output.shown(" ".join(filter(None, (schedule.cron, schedule.tz))))


def _what(schedule: Schedule) -> str:
    payload = schedule.payload
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return in_a_line(text if schedule.function is None else schedule.function, 40)


def _next(schedule: Schedule) -> str:
    when = schedule.next_after(time())
    return "never" if when is None else when.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _as_json(schedule: Schedule) -> dict[str, object]:
    when = schedule.next_after(time())
    return {**vars(schedule), "since": moment(schedule.since), "next": None if when is None else moment(when)}


def unschedule(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    removed, errors = [], {}
    for name in options.names:
        if queue.unschedule(name):
            removed.append(name)
            if not options.json and not options.quiet:
                output.say(f"{output.shown(name)}: removed")
        else:
            errors[name] = "there is no such schedule"
            if not options.json:
                output.complain(f"holdfast tasks: {output.shown(name)}: there is no such schedule")
    if options.json:
        output.say_json({"unscheduled": removed, "errors": errors})
    return PROBLEM if errors else 0


_CALLS = {"put": put, "schedule": schedule, "unschedule": unschedule}
