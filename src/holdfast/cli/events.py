"""`holdfast events`: an event store from the shell, JSON lines in and out."""

from __future__ import annotations

import errno
import os
import sys

from ..errors import ConditionFailed, Timeout, Unsupported
from . import arguments, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

    from ..events import EventStore, Query, Report, StoredEvent

READERS = ("read", "tail", "export")
ACTIONS = ("append", "read", "tail", "head", "verify", "rebuild", "backup", "export", "import", "copy")

PROBLEMS, BUSY = 1, 75

EXAMPLES = """\
append    append events, one JSON object per line: type, and data, tags, metadata, id as you like; prints the position
          of each. All together with --batch, which prints the position of the last. --unless-type and --unless-tag:
          only if there is no event of one of the types with all of the tags; with --after N, none after N
read      print the events that match, one JSON object per line
tail      the same, and then what comes, until it is stopped; from now on, or --after N
head      print the position of the last event
verify    look at every line; exit status 1 if something is wrong
rebuild   make the index again from the log
backup    copy the store to FILE, a new directory, while others append
export    write events to FILE, whole or not at all, or to the standard output (-)
import    append what export wrote, from FILE or the standard input, whether it is there already or not; prints how many
copy      append the events of STORE to the store TARGET, with their positions, ids, times and batches; prints how many.
          It goes on where an earlier copy was killed, and refuses a TARGET with other events

STORE is a directory, or the URL of a PostgreSQL database.

exit status: 0, or 1 if a condition failed or verify found something, 75 if others kept the lock too long, 2 wrong
usage, 3 it cannot be done

examples:
  echo '{"type": "OrderPlaced", "data": {"id": 7}, "tags": ["order:7"]}' | holdfast events append /tmp/shop
  holdfast events read /tmp/shop --tag order:7
  holdfast events append /tmp/shop --unless-tag order:7 --json-line '{"type": "OrderPlaced", "tags": ["order:7"]}'
  holdfast events verify /tmp/shop
  holdfast events copy /tmp/shop postgresql://user@host/database
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.usage = f"holdfast events {'|'.join(ACTIONS)} STORE [FILE|TARGET] [options]"
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("path", metavar="STORE", help="the directory of the store, or its URL")
    parser.add_argument("file", metavar="FILE", nargs="?", help="where to read from or write to; TARGET of copy")
    parser.add_argument(
        "--type", dest="types", metavar="T", action="append", default=[], help="of this type, or another"
    )
    parser.add_argument(
        "--tag", dest="tags", metavar="T", action="append", default=[], help="with this tag, and others"
    )
    parser.add_argument("--after", metavar="N", type=int, help="only what came after this position")
    parser.add_argument("--limit", metavar="N", type=int, help="the maximum number of events")
    parser.add_argument("--backwards", action="store_true", help="the last ones first")
    parser.add_argument("--batch", action="store_true", help="append all lines together, or none")
    parser.add_argument("--json-line", metavar="JSON", help="append this event, instead of reading any")
    parser.add_argument(
        "--unless-type", metavar="T", action="append", default=[], help="append only if there is none of this type"
    )
    parser.add_argument(
        "--unless-tag", metavar="T", action="append", default=[], help="append only if there is none with these tags"
    )
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")
    parser.add_argument(
        "--lock-timeout", metavar="S", type=arguments.seconds, default=5.0, help="how long to wait for others (5)"
    )
    arguments.add_json(parser, "what verify and head say is JSON")
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    try:
        from ..events import EventStore
    except ImportError:
        raise Unsupported("holdfast events needs msgspec: pip install 'holdfast[events]'") from None
    _check_options(options)
    if options.action not in ("append", "import"):
        _must_be_there(options.path)
    try:
        store = EventStore(options.path, durable=options.durable, lock_timeout=options.lock_timeout)
        return _CALLS[options.action](store, options)
    except ConditionFailed as error:
        after = "" if options.after is None else f" after {options.after}"
        text = f"{options.path}: not appended: event {error.position} matches what must not be there{after}"
        output.complain(f"holdfast events: {output.shown(text)}")
        return PROBLEMS
    except Timeout as error:
        output.complain(f"holdfast events: {output.shown(str(error))}")
        return BUSY


def _check_options(options: argparse.Namespace) -> None:
    """What an action does not know must not be ignored: a tag that one believes to have given is not there."""
    given = {
        "FILE": options.file,
        "--type": options.types,
        "--tag": options.tags,
        "--after": options.after is not None,
        "--limit": options.limit is not None,
        "--backwards": options.backwards,
        "--batch": options.batch,
        "--json-line": options.json_line is not None,
        "--unless-type": options.unless_type,
        "--unless-tag": options.unless_tag,
    }
    for name, value in given.items():
        if value and name not in _TAKES[options.action]:
            hint = "; the event itself says so" if options.action == "append" and name in ("--type", "--tag") else ""
            raise ValueError(f"{options.action} takes no {name}{hint}")
    if options.file is not None and options.json_line is not None:
        raise ValueError("give a FILE or --json-line, not both")
    if options.action == "copy" and options.file is None:
        raise ValueError("copy needs a TARGET: holdfast events copy STORE TARGET")


_SELECTS = {"--type", "--tag", "--after"}
_TAKES: dict[str, set[str]] = {
    "append": {"FILE", "--after", "--batch", "--json-line", "--unless-type", "--unless-tag"},
    "read": _SELECTS | {"--limit", "--backwards"},
    "tail": _SELECTS | {"--limit"},
    "head": set(),
    "verify": set(),
    "rebuild": set(),
    "backup": {"FILE"},
    "export": _SELECTS | {"FILE"},
    "import": {"FILE"},
    "copy": {"FILE"},
}


def _must_be_there(path: str) -> None:
    if "://" in path:
        return
    try:
        os.stat(f"{path}/store.json")
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.exists(f"{path}/events"):  # else the store says what is missing
            raise FileNotFoundError(2, "there is no event store here", path) from None


def _query(types: list[str], tags: list[str]) -> Query:
    from ..events import Query

    return Query.of(types, tags)


def _source(options: argparse.Namespace) -> Iterable[bytes]:
    if options.json_line is not None:
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
    if options.batch:
        output.say(str(store.append(events, condition)))
        return 0
    for event in events:
        output.say(str(store.append(event, condition)))
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
    head = store.head()
    said = output.say_json({"head": head}) if options.json else output.say(str(head))
    return 0 if said else 3  # what was asked for was not given


def _verify(store: EventStore, options: argparse.Namespace) -> int:
    report = store.verify()
    if options.json:
        import msgspec

        said = output.say_json({**msgspec.to_builtins(report), "ok": report.ok})
    else:
        for problem in report.problems:
            output.say(output.shown(str(problem)))
        events = f"{_several(report.events, 'event')} in {_several(report.segments, 'segment')}"
        said = output.say(f"{events}: {_good_or_not(report)}")
    if not report.ok:
        return PROBLEMS
    return 0 if said else 3


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _good_or_not(report: Report) -> str:
    return "good" if report.ok else _several(len(report.problems), "problem")


def _rebuild(store: EventStore, options: argparse.Namespace) -> int:
    store.rebuild_index()
    return 0


def _backup(store: EventStore, options: argparse.Namespace) -> int:
    if not _is_file(options.file):
        raise ValueError("backup takes the directory that it makes: holdfast events backup STORE TARGET")
    store.backup(options.file)
    return 0


def _export(store: EventStore, options: argparse.Namespace) -> int:
    query = _query(options.types, options.tags)
    if _is_file(options.file):
        store.export(options.file, query, options.after or 0)
        return 0
    return _print(store.read(query, options.after or 0))


def _import(store: EventStore, options: argparse.Namespace) -> int:
    output.say(str(store.import_(_source(options))))
    return 0


def _copy(store: EventStore, options: argparse.Namespace) -> int:
    from ..events import EventStore

    target = EventStore(options.file, durable=options.durable, lock_timeout=options.lock_timeout)
    output.say(str(store.copy_to(target)))
    return 0


_CALLS = {
    "append": _append,
    "read": _read,
    "tail": _tail,
    "head": _head,
    "verify": _verify,
    "rebuild": _rebuild,
    "backup": _backup,
    "export": _export,
    "import": _import,
    "copy": _copy,
}
