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
from ..failures import MISUSE, NO, Failure
from .text import in_a_line, report_each

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

_HEADINGS = ("NAME", "WHEN", "NEXT", "PAYLOAD")
_CHUNK_BYTES = 1 << 16


def configure(name: str, parser: arguments.Parser) -> None:
    if name == "unschedule":
        parser.add_argument("names", metavar="NAME", nargs="+", help="the schedules")
    elif name == "schedule":
        parser.usage = "holdfast tasks schedule QUEUE NAME [PAYLOAD] --every TIME | --cron '…' [options]"
        parser.usage += "\n       holdfast tasks schedule QUEUE     lists the schedules"
        parser.add_argument("name", metavar="NAME", nargs="?", help="a schedule with the same name is replaced")
        parser.add_argument("payload", metavar="PAYLOAD", nargs="?", help="the payload of its tasks")
        parser.add_argument("--every", metavar="TIME", type=arguments.time, help="the time between two tasks")
        parser.add_argument("--cron", metavar="FIELDS", help="'minute hour day month weekday', as one word")
        parser.add_argument("--tz", metavar="ZONE", help="the time zone of --cron, such as Europe/Berlin (UTC)")
        _add_options(parser)
    else:
        _configure_put(parser)
        _add_options(parser)
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[name])


def _configure_put(parser: arguments.Parser) -> None:
    words = "a task for each; - reads one per line from the standard input"
    parser.add_argument("payloads", metavar="PAYLOAD", nargs="*", help=words)
    parser.add_argument("--id", help="the id of the task; if it exists already, no task is added")
    parser.add_argument(
        "--after",
        metavar="ID",
        action="append",
        default=[],
        help="start when this task is done; may be given more than once",
    )
    parser.add_argument(
        "--delay", metavar="TIME", type=arguments.time, default=0.0, help="time before the task may start"
    )
    full = "add no task while N or more tasks are pending. Without -w, do not wait"
    parser.add_argument("--max-pending", metavar="N", type=arguments.at_least_one, help=full)
    arguments.add_wait(parser, default=0.0)
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")


def _add_options(parser: arguments.Parser) -> None:
    """What every task may have."""
    parser.add_argument("--parse", action="store_true", help="each payload is JSON, not text")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="higher priorities run first (0)")
    parser.add_argument(
        "--attempts", metavar="N", type=arguments.at_least_one, default=3, help="the maximum number of attempts (3)"
    )
    parser.add_argument("--time-limit", metavar="TIME", type=arguments.time, help="kill an attempt that takes longer")
    parser.add_argument("--key", help="tasks with the same key run one at a time (-j N: N at a time)")
    jobs = "with --key: at most N tasks run at a time (1)"
    parser.add_argument("-j", "--jobs", metavar="N", type=arguments.at_least_one, help=jobs)
    parser.add_argument("--rate", metavar="N/T", help="with --key: at most N tasks start in T: 10/m, 1/30s")


def _options_of(options: argparse.Namespace) -> dict[str, Any]:
    if options.key is None and (options.jobs is not None or options.rate is not None):
        raise ValueError("-j and --rate need --key: they limit the tasks that have the same key")
    renamed = {"limit": "jobs", "timeout": "time_limit"}
    given = {name: getattr(options, renamed.get(name, name)) for name in OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def put(options: argparse.Namespace) -> int:
    if not options.payloads:
        raise ValueError("which tasks? Give their payloads, or - to read one per line from the standard input")
    if options.id is not None and (len(options.payloads) > 1 or options.payloads == ["-"]):
        raise ValueError("--id needs exactly one payload")
    if (options.wait or options.no_wait) and options.max_pending is None:
        raise ValueError("-w and -n need --max-pending")
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
        advice = "Start more workers" if arguments.timeout_of(options) else "Wait for room with -w TIME"
        before = output.many(len(added.ids), "task")
        text = f"{queue.name}: {options.max_pending} or more tasks are pending already. {advice}. {before} put before"
        raise Failure(NO, text, path=queue.name, more=added.as_json()) from None
    except _BadLine as error:
        text = f"{error}. {output.many(len(added.ids), 'task')} put before"
        raise Failure(MISUSE, text, silenced=False, path=queue.name, more=added.as_json()) from None
    if options.json:
        output.say_json(added.as_json())
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

    def as_json(self) -> dict[str, Any]:
        return {"ids": self.ids, "existing": self.existing}

    @property
    def _wait(self) -> float | None:
        wait = arguments.timeout_of(self._options)
        return None if wait == float("inf") else wait

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
        given = (options.every, options.cron, options.tz, options.parse or None)
        if given != (None,) * 4 or _options_of(options) != {"priority": 0, "attempts": 3}:
            raise ValueError("which schedule? These options need its NAME")
        return _list(options)
    payload = None if options.payload is None else _payload(options.payload, options)
    if (options.every is None) == (options.cron is None):
        raise ValueError("when? Give either --every TIME or --cron 'minute hour day month weekday'")
    if options.tz is not None and options.cron is None:
        raise ValueError("--tz needs --cron: --every has no time zone")
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
    removed = {name: "removed" for name in options.names if queue.unschedule(name)}
    errors = {name: f"{name}: there is no such schedule" for name in options.names if name not in removed}
    report_each(options, queue.name, "unscheduled", removed, errors, "")
    return 0


_CALLS = {"put": put, "schedule": schedule, "unschedule": unschedule}
