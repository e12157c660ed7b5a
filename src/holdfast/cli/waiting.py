"""`holdfast wait`: until a lock is free, or all in a directory are. Takes nothing."""

from __future__ import annotations

from time import monotonic

from .. import Lock, LockFile
from ..errors import Timeout
from . import arguments, output
from .sema import HELD, POLICY_HELP, STALE_HELP

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
exit status: 0 free, 1 timed out, 2 wrong usage, 3 an error of the system

examples:
  holdfast wait /tmp/deploy.lock --timeout 60
  holdfast wait --all /tmp --timeout 60
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("path", metavar="PATH", help="the lock, or with --all a directory of locks")
    parser.add_argument("--all", action="store_true", help="all locks that are in the directory now")
    parser.add_argument("--timeout", metavar="S", type=arguments.seconds, help="wait at most so many seconds")
    parser.add_argument("--stale", metavar="S", type=arguments.seconds, default=3600.0, help=STALE_HELP)
    parser.add_argument("--policy", choices=("proof", "old", "dead-and-old"), default="proof", help=POLICY_HELP)
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    from .listing import all_locks

    paths = [options.path]
    if options.all:
        paths = [status.path for status in all_locks([options.path], recursive=False) if status.held]
    deadline = None if options.timeout is None else monotonic() + options.timeout
    for path in paths:
        try:
            _wait(path, None if deadline is None else max(0.0, deadline - monotonic()), options)
        except Timeout as error:
            return _timed_out(error, options)
    if options.json:
        output.say_json({"free": True, "path": options.path})
    elif not options.quiet:
        output.say(f"{'All locks are' if options.all else 'Lock is'} free: {output.shown(options.path)}")
    return 0


def _wait(path: str, timeout: float | None, options: argparse.Namespace) -> None:
    from .kinds import kind_of
    from .progress import Progress

    kind = kind_of(path)
    if kind == "semaphore":
        raise ValueError(f"{path}: a semaphore is not free or taken as a whole; holdfast status tells how many hold it")
    if kind == "lock":
        # In the kernel there is no other way to wait for a lock than to get it: shared, and for no time at all.
        lock = Lock(path, shared=True)
        with Progress(lock, quiet=options.quiet or options.json, only_live=True):
            lock.acquire(timeout).release()
        return
    file = LockFile(path, stale_after=options.stale or None, stale=options.policy)
    with Progress(file, quiet=options.quiet or options.json, only_live=True):
        file.wait_until_free(timeout)


def _timed_out(error: Timeout, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({"free": False, **(error.status.as_dict() if error.status is not None else {})})
    elif not options.quiet:
        output.complain("Timeout waiting for lock to be released")
    return HELD
