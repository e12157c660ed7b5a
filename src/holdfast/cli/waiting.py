"""`holdfast wait`: until a lock is free, or all in a directory are. Takes nothing."""

from __future__ import annotations

import argparse
import os
from time import monotonic

from .. import Lock
from ..collect.kinds import kind_of
from ..collect.locks import all_locks, lock_at, status_of
from ..errors import Timeout
from ..owner import without_passwords
from ..wait import DeadlinePassed, check_deadline, drive
from ..watch import Waiting
from . import arguments, output
from .sema import HELD, POLICY_HELP, STALE_HELP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..status import Status
    from ..wait import Steps

EXAMPLES = """\
exit status: 0 free, 1 timed out, 2 wrong usage, 3 an error of the system

examples:
  holdfast wait /tmp/deploy.lock --timeout 60
  holdfast wait --all /tmp --timeout 60
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{arguments.URLS}\n{EXAMPLES}"
    what = "the lock or its URL; with --all a directory or a server"
    parser.add_argument("path", metavar="PATH", type=arguments.looked_at, help=what)
    parser.add_argument("--all", action="store_true", help="all locks that exist now")
    parser.add_argument("--timeout", metavar="S", type=arguments.seconds, help="wait at most this many seconds")
    parser.add_argument("--stale", metavar="S", type=arguments.seconds, default=3600.0, help=STALE_HELP)
    parser.add_argument("--policy", choices=("proof", "old", "dead-and-old"), default="proof", help=POLICY_HELP)
    parser.add_argument("--tag", help=argparse.SUPPRESS)  # taken by all commands of sema
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    if arguments.is_url(options.path):
        return _on_server(options)
    locks = [(options.path, kind_of(options.path))]
    if options.all:
        locks = [(status.path, status.kind) for status in all_locks([options.path], recursive=False) if status.held]
    deadline = None if options.timeout is None else monotonic() + options.timeout
    for path, kind in locks:
        try:
            _wait(path, kind, None if deadline is None else max(0.0, deadline - monotonic()), options)
        except Timeout as error:
            return _timed_out(error, options)
    return _free(options.path, options)


def _on_server(options: argparse.Namespace) -> int:
    from . import servers

    try:
        servers.wait(options, None if options.timeout is None else monotonic() + options.timeout)
    except Timeout as error:
        return _timed_out(error, options)
    return _free(without_passwords(options.path), options)


def _free(path: str, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({"free": True, "path": path})
    elif not options.quiet:
        output.say(f"{'All locks are' if options.all else 'Lock is'} free: {output.shown(path)}")
    return 0


def _wait(path: str, kind: str | None, timeout: float | None, options: argparse.Namespace) -> None:
    from .progress import Progress

    quiet = options.quiet or options.json
    if kind in ("lock", "semaphore"):
        with Progress(Lock(path), quiet=quiet, only_live=True):
            _until_free(path, timeout)
        return
    file = lock_at(path, kind, options.stale or None, options.policy)
    with Progress(file, quiet=quiet, only_live=True):
        file.wait_until_free(timeout)


def _until_free(path: str, timeout: float | None) -> None:
    """Wait until the kernel lock, or a permit of the semaphore, is free. Reads the status and never takes the lock."""
    deadline = None if timeout is None else monotonic() + timeout

    def look() -> Status:
        return status_of(path, kind_of(path) or "lock", None, "proof")

    def steps() -> Steps[None]:
        waiting = Waiting(os.path.realpath(path))
        try:
            while look().held:
                check_deadline(deadline)
                if waiting.begin():
                    continue
                yield waiting.step(deadline)
                waiting.drain()
                waiting.move(os.path.realpath(path))  # another file may have the name by now
        finally:
            waiting.end()

    try:
        drive(steps())
    except DeadlinePassed:
        error = Timeout(f"{path}: not free within {timeout:g} s", path=path)
        error.status = look()
        raise error from None


def _timed_out(error: Timeout, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({"free": False, **(error.status.as_dict() if error.status is not None else {})})
    elif not options.quiet:
        output.complain("Timeout waiting for lock to be released")
    return HELD
