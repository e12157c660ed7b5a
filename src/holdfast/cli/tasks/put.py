"""`put`, `schedule`, `unschedule`: what there is to do, once or again and again."""

from __future__ import annotations

import json
import os
import sys

from ...tasks import QueueFull, TaskQueue
from .. import arguments, output
from .text import in_a_line, many, queue_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

PROBLEM, FULL = 1, 75

_HEADINGS = ("NAME", "WHEN", "NEXT", "PAYLOAD")
_EVERY_TASK = ("priority", "attempts", "timeout", "key", "limit")
_A_CHUNK = 1 << 16


def configure(name: str, parser: arguments.Parser) -> None:
    if name == "unschedule":
        parser.add_argument("names", metavar="NAME", nargs="+", help="of the schedules")
    elif name == "schedule":
        parser.usage = "holdfast tasks schedule DIR NAME [PAYLOAD] --every T | --cron '…' [options]"
        parser.usage += "\n       holdfast tasks schedule DIR     lists them"
        parser.add_argument("name", metavar="NAME", nargs="?", help="of the schedule; one of this name is replaced")
        parser.add_argument("payload", metavar="PAYLOAD", nargs="?", help="what there is to do")
        parser.add_argument("--every", metavar="T", type=arguments.span, help="again and again after so long")
        parser.add_argument("--cron", metavar="FIELDS", help="minute hour day month weekday, in UTC, as one word")
        _add_options(parser)
    else:
        _configure_put(parser)
        _add_options(parser)
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[name])


def _configure_put(parser: arguments.Parser) -> None:
    words = "what there is to do, a task each; - reads one per line from the standard input"
    parser.add_argument("payloads", metavar="PAYLOAD", nargs="*", help=words)
    parser.add_argument("--id", help="its name; a task that is there already by this name is not put again")
    parser.add_argument("--delay", metavar="T", type=arguments.span, default=0.0, help="not before so long from now")
    parser.add_argument(
        "--max-pending", metavar="N", type=arguments.at_least_one, help="put none if so many wait: exit status 75"
    )
    parser.add_argument(
        "--wait", metavar="T", type=arguments.span, default=0.0, help="but first wait so long for room (inf: for ever)"
    )
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")


def _add_options(parser: arguments.Parser) -> None:
    """What every task may have."""
    parser.add_argument("--parse", action="store_true", help="the payloads are JSON, not text")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="higher ones are done first (0)")
    parser.add_argument(
        "--attempts", metavar="N", type=arguments.at_least_one, default=3, help="how often to try it (3)"
    )
    parser.add_argument("--timeout", metavar="T", type=arguments.span, help="end an attempt after so long")
    parser.add_argument("--key", help="tasks with the same key are done one after the other")
    parser.add_argument(
        "--limit", metavar="N", type=arguments.at_least_one, default=1, help="or so many at a time (with --key)"
    )


def _options_of(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _EVERY_TASK}


def put(options: argparse.Namespace) -> int:
    if not options.payloads:
        raise ValueError("which tasks? Give their payloads, or - to read one per line from the standard input")
    if options.id is not None and (len(options.payloads) > 1 or options.payloads == ["-"]):
        raise ValueError("--id names one task, so there can be one payload")
    if options.limit != 1 and options.key is None:
        raise ValueError("--limit is how many with the same --key are done at a time; there is no --key")
    if options.wait and options.max_pending is None:
        raise ValueError("--wait is for room in a queue that may be full; there is no --max-pending")
    given = [word if word == "-" else _payload(word, options) for word in options.payloads]  # wrong: no queue is made
    queue = TaskQueue(options.path, durable=options.durable, max_pending=options.max_pending)
    more = {**_options_of(options), "delay": options.delay, "wait": options.wait}
    ids: list[str] = []
    try:
        if options.id is not None:
            _say_ids(ids, [queue.put(given[0], id=options.id, **more)], options)
        for payloads in _groups(given, options) if options.id is None else ():
            _put_group(queue, payloads, ids, more, options)
    except QueueFull:
        wait = "" if options.wait else "; --wait T waits for room"
        text = f"{options.max_pending} tasks wait already{wait}. {many(len(ids))} put before"
        output.complain(f"holdfast tasks: {output.shown(options.path)}: {text}")
        return FULL
    except _BadLine as error:
        raise ValueError(f"{error}. {many(len(ids))} put before") from None
    finally:
        if options.json:
            output.say_json({"ids": ids})
    return 0


def _put_group(
    queue: TaskQueue, payloads: list[object], ids: list[str], more: dict[str, Any], options: argparse.Namespace
) -> None:
    """What is there at the same time is put at the same time: the disk is waited for once."""
    if options.max_pending is None:
        _say_ids(ids, queue.put_all(payloads, **more), options)
        return
    for payload in payloads:  # one by one, to know how far it came
        _say_ids(ids, [queue.put(payload, **more)], options)


def _say_ids(ids: list[str], new: list[str], options: argparse.Namespace) -> None:
    ids += new
    if not options.json and not options.quiet:
        output.say("\n".join(map(output.shown, new)))


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
    """The lines that have come, as they come: whoever writes them may take its time."""
    if sys.stdin is None:
        raise ValueError("there is no standard input to read from")
    rest, text = b"", b"-"
    while text:
        text = os.read(sys.stdin.fileno(), _A_CHUNK)
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
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON: {error}") from None


def schedule(options: argparse.Namespace) -> int:
    if options.name is None:
        return _list(options)
    payload = None if options.payload is None else _payload(options.payload, options)
    if (options.every is None) == (options.cron is None):
        raise ValueError("when? Give either --every T or --cron 'minute hour day month weekday'")
    queue = TaskQueue(options.path)
    queue.schedule(options.name, payload, cron=options.cron, every=options.every, **_options_of(options))
    if options.json:
        output.say_json(_as_json(queue, options.name))
    elif not options.quiet:
        moment = _next(queue, options.name)
        output.say(f"{output.shown(options.name)}: next {moment}. Workers of this queue put it when it is due.")
    return 0


def _list(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    found = sorted(queue.schedules.all())
    if options.json:
        output.say_json([_as_json(queue, name) for name in found])
    elif found:
        rows: list[tuple[str, ...]] = []
        for name in found:
            said = queue.schedules.all()[name]
            when = said["cron"] if said.get("cron") is not None else f"every {output.duration(said['every'])}"
            payload = said["payload"] if isinstance(said["payload"], str) else json.dumps(said["payload"])
            rows.append((output.shown(name), output.shown(when), _next(queue, name), in_a_line(payload, 40)))
        output.table(_HEADINGS, rows, ["0"] * len(rows))
    else:
        output.complain("no schedules here")
    return 0


def _next(queue: TaskQueue, name: str) -> str:
    moment = queue.next_scheduled(name)
    if moment is None:
        return "never"
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _as_json(queue: TaskQueue, name: str) -> dict[str, object]:
    moment = queue.next_scheduled(name)
    return {**queue.schedules.all()[name], "next": None if moment is None else moment.isoformat()}


def unschedule(options: argparse.Namespace) -> int:
    queue = queue_at(options.path)
    removed, errors = [], {}
    for name in options.names:
        if queue.unschedule(name):
            removed.append(name)
            if not options.json and not options.quiet:
                output.say(f"{output.shown(name)}: not put any more")
        else:
            errors[name] = "there is no such schedule"
            if not options.json:
                output.complain(f"holdfast tasks: {output.shown(name)}: there is no such schedule")
    if options.json:
        output.say_json({"unscheduled": removed, "errors": errors})
    return PROBLEM if errors else 0


_CALLS = {"put": put, "schedule": schedule, "unschedule": unschedule}
