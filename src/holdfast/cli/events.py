"""`holdfast events`: an event store from the shell, JSON lines in and out."""

from __future__ import annotations

import errno
import os
import sys

from ..errors import ConditionFailed, Timeout, Unsupported
from ..owner import hide_passwords, without_passwords
from . import arguments, output
from .failures import NO, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, BinaryIO

    from ..events import EventStore, Query, Report, StoredEvent

ACTIONS = {
    "append": "append events, one JSON object per line, and print the position of each",
    "read": "print the events that match, one JSON object per line",
    "tail": "print the events that match and are appended from now on, or after --after N, until it is stopped",
    "head": "print the position of the last event",
    "subscriptions": "list the subscriptions, with their checkpoints and the processes that consume them",
    "unsubscribe": "forget a subscription and its checkpoint",
    "forget": "erase the data of all events with TAG, and print their number",
    "verify": "check every line of the log",
    "rebuild": "delete the index and make it again from the log",
    "backup": "copy the store to TARGET, a new directory, while others append",
    "export": "write events to FILE, all of them or none, or to the standard output (-)",
    "import": "append the events that export wrote, also those that the store has already, and print their number",
    "copy": "append the events of STORE to the store TARGET, with their positions, ids, times and batches",
}
MORE = {
    "append": """\
The JSON object of an event must have "type", and may have "data", "tags", "metadata" and "id". --unless-type and
--unless-tag: append only if no event has one of the types and all of the tags. With --after N, only events after
position N count.
""",
    "forget": """\
The events stay, with their types and tags, and without their data and metadata. This cannot be undone. Backups, copies
and exports still have the data.
""",
    "copy": "A copy that was killed can be started again. It refuses a TARGET that has other events.\n",
}
STATUSES = """\
STORE is a directory, or the URL of a PostgreSQL database.

exit status: 0; 1 a condition failed, verify found something, or others kept the lock too long; 2 wrong usage; 3 an
error"""
EXAMPLES = {
    "append": """\
  echo '{"type": "OrderPlaced", "data": {"id": 7}, "tags": ["order:7"]}' | holdfast events append /tmp/shop
  holdfast events append /tmp/shop --unless-tag order:8 --json-line '{"type": "OrderPlaced", "tags": ["order:8"]}'
""",
    "read": "  holdfast events read /tmp/shop --tag order:7\n",
    "tail": "  holdfast events tail /tmp/shop --after 0 --limit 1\n",
    "forget": "  holdfast events forget /tmp/shop person:7\n",
    "verify": "  holdfast events verify /tmp/shop\n",
    "copy": "  holdfast events copy /tmp/shop postgresql://user@host/database\n",
}
_LOCK_TIMEOUT_S = 5.0


def configure(name: str, parser: arguments.Parser) -> None:
    parser.add_actions(ACTIONS, _configure, f"{STATUSES}\n\nexamples:\n{''.join(EXAMPLES.values())}")


def _configure(action: str, parser: arguments.Parser) -> None:
    examples = f"\n\nexamples:\n{EXAMPLES[action]}" if action in EXAMPLES else ""
    parser.epilog = "\n".join(filter(None, (MORE.get(action), f"{STATUSES}{examples}")))
    parser.add_argument("path", metavar="STORE", help="the directory of the store, or its URL")
    _add_operands(action, parser)
    if action in ("read", "tail", "export"):
        repeat: dict[str, Any] = {"metavar": "TEXT", "action": "append", "default": []}
        text = "may be given more than once:"
        parser.add_argument("--type", dest="types", help=f"the type; {text} one of them", **repeat)
        parser.add_argument("--tag", dest="tags", help=f"a tag; {text} all of them", **repeat)
    if action in ("append", "read", "tail", "export"):
        parser.add_argument("--after", metavar="N", type=arguments.position, help="only events after this position")
    if action in ("read", "tail"):
        parser.add_argument("--limit", metavar="N", type=arguments.position, help="the maximum number of events")
    if action == "read":
        parser.add_argument("--backwards", action="store_true", help="print the last events first")
    if action in ("append", "import", "copy", "forget", "rebuild", "unsubscribe"):
        if action in ("append", "import", "copy"):
            parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")
        arguments.add_wait(parser, _LOCK_TIMEOUT_S)
    arguments.add_json(parser)
    parser.set_defaults(call=lambda options: _call(action, options))


def _add_operands(action: str, parser: arguments.Parser) -> None:
    if action in ("backup", "copy"):
        what = "the directory of the new store" + (", or its URL" if action == "copy" else "")
        parser.add_argument("file", metavar="TARGET", help=what)
    elif action == "forget":
        parser.add_argument("tag", metavar="TAG", help="a tag, such as person:7")
    elif action == "unsubscribe":
        parser.add_argument("name", metavar="NAME", help="the name of the subscription")
    elif action in ("append", "export", "import"):
        what = "the file to write (standard output)" if action == "export" else "the file to read (standard input)"
        parser.add_argument("file", metavar="FILE", nargs="?", help=what)
    if action == "append":
        parser.add_argument("--batch", action="store_true", help="append all lines together, or none")
        parser.add_argument("--json-line", metavar="JSON", help="append this event, and read no other")
        repeat = {"metavar": "TEXT", "action": "append", "default": []}
        text = "append only if there is no event"
        parser.add_argument("--unless-type", help=f"{text} of this type", **repeat)  # type: ignore[arg-type]
        parser.add_argument("--unless-tag", help=f"{text} with these tags", **repeat)  # type: ignore[arg-type]


def _call(action: str, options: argparse.Namespace) -> int:
    try:
        from ..events import EventStore
    except ImportError:
        raise Unsupported("holdfast events needs msgspec: pip install 'holdfast[events]'") from None
    if action == "append" and options.file is not None and options.json_line is not None:
        raise ValueError("give a FILE or --json-line, not both")
    if action not in ("append", "import"):
        _must_be_there(options.path)
    waits = "wait" in options
    timeout = arguments.timeout_of(options) if waits else _LOCK_TIMEOUT_S
    try:
        store = EventStore(options.path, durable=getattr(options, "durable", True), lock_timeout=timeout)
        return _CALLS[action](store, options)
    except ConditionFailed as error:
        after = "" if options.after is None else f" after {options.after}"
        path = hide_passwords(options.path)
        text = f"{path}: not appended: event {error.position} matches the condition{after}"
        raise Failure(NO, text, path=path, more={"position": error.position}) from None
    except Timeout as error:
        raise Failure(NO, without_passwords(str(error)), path=error.path, found=error.status) from None


def _must_be_there(path: str) -> None:
    if "://" in path:
        return
    try:
        os.stat(f"{path}/store.json")
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.exists(f"{path}/events"):  # else the store says what is missing
            text = "there is no event store here. Check the path. holdfast events append creates one"
            raise FileNotFoundError(2, text, path) from None


def _query(types: list[str], tags: list[str]) -> Query:
    from ..events import Query

    return Query.of(types, tags)


def _source(options: argparse.Namespace) -> Iterable[bytes]:
    if getattr(options, "json_line", None) is not None:  # of append
        return [os.fsencode(options.json_line)]
    return open(options.file, "rb") if _is_file(options.file) else sys.stdin.buffer


def _is_file(name: str | None) -> bool:
    return name not in (None, "", "-")


def _append(store: EventStore, options: argparse.Namespace) -> int:
    from ..events import AppendCondition
    from ..events.copies import parse

    condition = None
    if options.unless_type or options.unless_tag:
        condition = AppendCondition(_query(options.unless_type, options.unless_tag), options.after)
    elif options.after is not None:
        condition = AppendCondition(_query([], []), options.after)
    events = parse(_source(options))
    for each in [events] if options.batch else events:
        _say_number("position", store.append(each, condition), options)
    return 0


def _say_number(name: str, number: int, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({name: number})
    else:
        output.say(str(number))
    return 0


def _print(events: Iterable[StoredEvent]) -> int:
    from ..events.copies import as_line

    if sys.stdout is None:
        raise OSError(errno.EBADF, "the standard output is closed")
    stream: BinaryIO = sys.stdout.buffer
    try:
        for event in events:
            stream.write(as_line(event))
        stream.flush()
    except BrokenPipeError:
        output.finish()
    return 0


def _read(store: EventStore, options: argparse.Namespace) -> int:
    query = _query(options.types, options.tags)
    return _print(store.read(query, options.after or 0, options.limit, options.backwards))


def _tail(store: EventStore, options: argparse.Namespace) -> int:
    query = _query(options.types, options.tags)
    after = store.head() if options.after is None else options.after
    return _print(_flushed(store.follow(query, after), options.limit))


def _flushed(events: Iterator[StoredEvent], limit: int | None) -> Iterator[StoredEvent]:
    """Each is on its way before the next one is waited for."""
    if limit == 0:
        return
    for count, event in enumerate(events, 1):
        yield event
        sys.stdout.buffer.flush()
        if count == limit:
            return


def _head(store: EventStore, options: argparse.Namespace) -> int:
    return _say_number("head", store.head(), options)


def _subscriptions(store: EventStore, options: argparse.Namespace) -> int:
    found = store.subscriptions()
    if options.json:
        output.say_json([one.as_dict() for one in found])
        return 0
    for one in found:
        waiting = f", {one.waiting} more waiting" if one.waiting else ""
        consumer = f"active: {one.holder or 'a process'}{waiting}" if one.active else "no process consumes"
        lag = output.many(one.lag, "event")
        output.say(output.shown(f"{one.name}: at {one.checkpoint} of {one.head}, {lag} behind; {consumer}"))
    return 0


def _unsubscribe(store: EventStore, options: argparse.Namespace) -> int:
    was_there = store.unsubscribe(options.name)
    if not was_there:
        raise Failure(NO, f"{store.path} has no subscription {options.name!r}", path=store.path)
    return _done("unsubscribed", options)


def _verify(store: EventStore, options: argparse.Namespace) -> int:
    report = store.verify()
    if options.json:
        import msgspec

        output.say_json({**msgspec.to_builtins(report), "ok": report.ok})
    else:
        for problem in report.problems:
            output.say(output.shown(str(problem)))
        events = f"{output.many(report.events, 'event')} in {output.many(report.segments, 'segment')}"
        output.say(f"{events}: {_good_or_not(report)}")
    return 0 if report.ok else NO


def _good_or_not(report: Report) -> str:
    return "good" if report.ok else output.many(len(report.problems), "problem")


def _forget(store: EventStore, options: argparse.Namespace) -> int:
    return _say_number("forgotten", store.forget(options.tag), options)


def _rebuild(store: EventStore, options: argparse.Namespace) -> int:
    store.rebuild_index()
    return _done("rebuilt", options)


def _done(what: str, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({what: True})
    return 0


def _backup(store: EventStore, options: argparse.Namespace) -> int:
    store.backup(options.file)
    return _done("copied", options)


def _export(store: EventStore, options: argparse.Namespace) -> int:
    query = _query(options.types, options.tags)
    if _is_file(options.file):
        store.export(options.file, query, options.after or 0)
        return _done("exported", options)
    return _print(store.read(query, options.after or 0))


def _import(store: EventStore, options: argparse.Namespace) -> int:
    return _say_number("imported", store.import_(_source(options)), options)


def _copy(store: EventStore, options: argparse.Namespace) -> int:
    from ..events import EventStore

    target = EventStore(options.file, durable=options.durable, lock_timeout=arguments.timeout_of(options))
    return _say_number("copied", store.copy_to(target), options)


_CALLS: dict[str, Callable[[EventStore, argparse.Namespace], int]] = {
    "append": _append,
    "read": _read,
    "tail": _tail,
    "head": _head,
    "subscriptions": _subscriptions,
    "unsubscribe": _unsubscribe,
    "forget": _forget,
    "verify": _verify,
    "rebuild": _rebuild,
    "backup": _backup,
    "export": _export,
    "import": _import,
    "copy": _copy,
}
