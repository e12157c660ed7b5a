"""`holdfast status`: who holds a lock of whatever kind, in the words of the sema tool and with more lines."""

from __future__ import annotations

import argparse
import os
import time

from .. import system
from ..collect.kinds import kind_of
from ..collect.locks import status_of
from ..locks.lock_file import LockFile
from . import arguments, output
from .failures import NO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


CORRUPT = "An empty file may be one that another tool is about to write, or the file of a kernel lock (holdfast run)."
EPILOG = f"""\
{arguments.URLS}
{arguments.STATUSES.format(no="1 held")}

examples:
  holdfast status /tmp/deploy.lock
  holdfast status /tmp/deploy.lock --json
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EPILOG
    what = "the lock: its path, or the URL of a lock on a server"
    parser.add_argument("path", metavar="PATH", type=arguments.looked_at, help=what)
    arguments.add_staleness(parser)
    parser.add_argument("--kind", choices=("lock", "file"), help="kernel lock or lock file (the file shows which)")
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=status)


def refuse_url(command: str, path: str) -> None:
    """Raise Unsupported if the path is a URL."""
    if arguments.is_url(path):
        from . import servers

        servers.refuse(command, path)


def status(options: argparse.Namespace) -> int:
    facts = _facts(options)
    path = facts["path"] if arguments.is_url(options.path) else options.path
    if options.json:
        output.say_json(_as_json(facts))
    elif not options.quiet:
        output.say("\n".join(_lines(path, facts)))
    return NO if facts["held"] else 0


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """The status as a dictionary, with those of the first holder: pid, host, command.

    Of a lock file for which nobody queues, without `Status`: to import dataclasses takes as long as all the rest.
    """
    if arguments.is_url(options.path):
        from . import servers

        if options.kind is not None:
            raise ValueError("--kind does not go with a URL: its scheme names the kind. Leave it out.")
        arguments.refuse_staleness(options)
        return servers.facts(options.path)
    kind = options.kind or kind_of(options.path) or "file"
    lock = LockFile(options.path, stale_after=options.stale or None, stale=options.policy)
    if kind == "file" and not os.path.isdir(os.path.realpath(lock.path) + ".queue"):
        found = lock.examine()
        rest: dict[str, Any] = {"held": False} if found is None else {"held": True, **found.facts()}
        holder = {name: rest.get(name) for name in ("pid", "host", "command")}
        holders = [holder] if rest.get("pid") is not None else []
        return {"path": lock.path, "kind": "file", "holders": holders, "waiters": (), "permits": None, **rest}
    status = status_of(options.path, kind, options.stale or None, options.policy)
    facts = status.as_dict()
    first = status.holders[0] if status.holders else None
    return facts | {name: getattr(first, name, None) for name in ("pid", "host", "command")}


def _as_json(facts: dict[str, Any]) -> dict[str, object]:
    """The keys of sema first: pid, timestamp and tag are there, null or not, whenever it is locked."""
    if not facts["held"]:
        taken = {name: facts[name] for name in ("permits", "holders", "waiters")} if facts["permits"] else {}
        return {"locked": False, "path": facts["path"], "kind": facts["kind"], **taken}
    first = {"locked": True, "pid": facts["pid"], "timestamp": _timestamp(facts), "tag": facts["tag"]}
    return first | {key: value for key, value in facts.items() if key not in first and key != "held"}


def _timestamp(facts: dict[str, Any]) -> int | None:
    """As the file has it; of a kernel lock, since when it is held."""
    found = facts["since"] if facts["timestamp"] is None else facts["timestamp"]
    return None if found is None else int(found)


def _lines(path: str, facts: dict[str, Any]) -> list[str]:
    if not facts["held"]:
        lines = ["Lock status: FREE", f"  Path: {output.shown(path)}"]
        if facts["permits"]:
            lines.append(f"  Kind: semaphore of {facts['permits']}, {len(facts['holders'])} taken")
            lines.append(f"  Holders: {', '.join(str(holder['pid']) for holder in facts['holders'])}")
        return lines
    lines = ["Lock status: LOCKED", f"  Path: {output.shown(path)}"]
    if facts["corrupt"]:
        lines.append(f"  Record: corrupt. {CORRUPT}")
    if facts["pid"] is not None:
        lines.append(f"  PID: {facts['pid']}")
    if _timestamp(facts) is not None:
        lines.append(f"  Timestamp: {_timestamp(facts)}")
    if facts["tag"] is not None:
        lines.append(f"  Tag: {output.shown(facts['tag'])}")
    if facts["pid"] is not None:
        lines.append(f"  Process running: {_running(facts)}")
    return lines + _own_lines(facts)


def _running(facts: dict[str, Any]) -> str:
    if facts["alive"] is not None:
        return "yes" if facts["alive"] else "no"
    if facts["host"] is not None:
        return "unknown"
    return "yes" if system.process_exists(facts["pid"]) else "no"


def _kind(facts: dict[str, Any]) -> str:
    names = {"lock": "kernel lock", "task": "lock of a task"}
    if facts["kind"] in names:
        return names[facts["kind"]]
    name = f"semaphore of {facts['permits']}" if facts["permits"] else "lock"
    return name if facts["kind"] == "semaphore" else f"{name}, {facts['kind']}"


def _own_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    holders = facts.get("holders", ())
    if facts["kind"] != "file":
        lines.append(f"  Kind: {_kind(facts)}")
    if len(holders) > 1:
        lines.append(f"  Holders: {', '.join(str(holder['pid']) for holder in holders)}")
    if facts["command"]:
        lines.append(f"  Command: {output.shown(output.shortened(facts['command'], 200))}")
    if facts["host"]:
        lines.append(f"  Host: {output.shown(facts['host'])}")
    if facts["since"] is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["since"]))
        lines.append(f"  Held for: {output.duration(time.time() - facts['since'])}, since {since}")
    if facts["token"] is not None:
        lines.append(f"  Token: {facts['token']}")
    if facts["stale"]:
        lines.append("  Stale: yes; the next process that acquires it takes it over")
    elif facts["stale_in"] is not None:
        lines.append(f"  Stale: in {output.duration(facts['stale_in'])}, unless it is renewed")
    if facts["waiters"]:
        lines.append(f"  Waiting: {', '.join(str(waiter['pid']) for waiter in facts['waiters'])}")
    return lines
