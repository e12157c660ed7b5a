"""`holdfast ls`: every lock in some directories and on some servers, of all kinds, and its state."""

from __future__ import annotations

import os
import time

from ..collect.locks import all_locks, as_json, state_of, user_of
from ..errors import HoldfastError
from . import arguments, failures, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..status import Status

EXAMPLES = """\
exit status: 0; 2 wrong usage; 3 an error, such as a directory that cannot be read

examples:
  holdfast ls
  holdfast ls -r /tmp
  holdfast ls --held --json /tmp
"""
_HEADINGS = ("STATE", "KIND", "AGE", "WAITING", "PID", "USER", "LOCK", "HOLDER")


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{arguments.URLS}Without a name: all locks of the server (not on SMB).\n\n{EXAMPLES}"
    what = "directories, or URLs of servers"
    parser.add_argument("directories", metavar="DIR", nargs="*", default=["."], type=arguments.looked_at, help=what)
    parser.add_argument("-r", "--recursive", action="store_true", help="also subdirectories")
    parser.add_argument("--held", action="store_true", help="only locks that are held")
    arguments.add_json(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    found: list[Status] = []
    errors: list[OSError | HoldfastError] = []
    for directory in options.directories:
        try:
            found += all_locks([directory], options.recursive, unreadable=complain)
        except (OSError, HoldfastError) as error:
            errors.append(error)
    if options.held:
        found = [status for status in found if status.held]
    if options.json and not errors:
        output.say_json([as_json(status) for status in found])
    elif options.json:
        output.say_json({**failures.as_json(errors[0]), "locks": [as_json(status) for status in found]})
    elif found:
        output.table(_HEADINGS, [_row(status) for status in found], [_colour(status) for status in found])
    elif not errors:
        output.complain("no locks here" if options.recursive else "no locks here (-r also lists subdirectories)")
    for each in () if options.json else errors:
        failures.report("ls", each, json=False, quiet=False)
    return failures.ERROR if errors else 0


def complain(path: str, error: OSError) -> None:
    """Print that a directory cannot be read."""
    output.complain(f"holdfast ls: {output.shown(path)}: {error.strerror}")


def _colour(status: Status) -> str:
    if status.stale or status.corrupt:
        return output.YELLOW
    return output.GREEN if status.held else output.DIM


def kind_name(status: Status) -> str:
    if status.kind == "semaphore":
        return f"{len(status.holders)} of {status.permits}"
    if status.permits is not None:
        return f"{status.kind}, {len(status.holders)} of {status.permits}"
    return "kernel" if status.kind == "lock" else status.kind


def _row(status: Status) -> tuple[str, ...]:
    return (
        state_of(status),
        kind_name(status),
        age_of(status),
        str(len(status.waiters) or "-"),
        pids_of(status),
        user_of(status) or "-",
        output.shown(relative(status.path)),
        output.shown(who(status)),
    )


def relative(path: str) -> str:
    if arguments.is_url(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def age_of(status: Status) -> str:
    return "-" if not status.held or status.since is None else output.duration(time.time() - status.since)


def pids_of(status: Status) -> str:
    pids = [str(holder.pid) for holder in status.holders if holder.pid is not None]
    return "-" if not pids else pids[0] + (f"+{len(pids) - 1}" if len(pids) > 1 else "")


def who(status: Status) -> str:
    """The holder's tag, host and command, in few words."""
    if status.corrupt:
        return "empty or damaged" + ("" if status.stale else "; held until it is old")
    parts = [f"[{output.shortened(status.tag, 40)}]"] if status.tag else []
    for holder in status.holders[:1]:
        if holder.host:
            parts.append(f"on {holder.host}")
        if holder.command:
            parts.append(output.shortened(holder.command, 60))
    return " ".join(parts)
