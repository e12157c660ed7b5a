"""`holdfast wait`: until a lock is free, or all in a directory are. Takes nothing."""

from __future__ import annotations

import os
from time import monotonic

from .. import Lock, system
from ..collect.kinds import kind_of
from ..collect.locks import all_locks, lock_at, status_of
from ..errors import Timeout
from ..owner import hide_passwords
from ..wait import DeadlinePassed, check_deadline, drive
from ..watch import Waiting
from . import arguments, output
from .failures import NO, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..status import Status
    from ..wait import Steps

EPILOG = f"""\
{arguments.URLS}
{arguments.STATUSES.format(no="1 timed out")}

examples:
  holdfast wait /tmp/deploy.lock -w 60
  holdfast wait --all /tmp -w 5m
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EPILOG
    what = "the lock or its URL; with --all a directory or a server"
    parser.add_argument("path", metavar="PATH", type=arguments.looked_at, help=what)
    parser.add_argument("--all", action="store_true", help="all locks that exist now")
    arguments.add_wait(parser)
    arguments.add_staleness(parser)
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    arguments.add_verbose(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    timeout = arguments.timeout_of(options)
    deadline = None if timeout is None else monotonic() + timeout
    try:
        if arguments.is_url(options.path):
            from . import servers

            arguments.refuse_staleness(options)
            servers.wait(options, deadline)
        else:
            _wait_for_all(options, deadline)
    except Timeout as error:
        message = f"{hide_passwords(error.path or options.path)}: not free within {timeout or 0:g} s"
        text = "Timeout waiting for lock to be released"
        raise Failure(NO, message, text=text, path=error.path, found=error.status, more={"free": False}) from None
    return _free(hide_passwords(options.path), options)


def _wait_for_all(options: argparse.Namespace, deadline: float | None) -> None:
    locks = [(options.path, kind_of(options.path))]
    if options.all:
        locks = [(status.path, status.kind) for status in all_locks([options.path], recursive=False) if status.held]
    for path, kind in locks:
        _wait(path, kind, None if deadline is None else max(0.0, deadline - monotonic()), options)


def _free(path: str, options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({"free": True, "path": path})
    elif not options.quiet:
        output.say(f"{'All locks are' if options.all else 'Lock is'} free: {output.shown(path)}")
    return 0


def _wait(path: str, kind: str | None, timeout: float | None, options: argparse.Namespace) -> None:
    from .progress import Progress

    if kind in ("lock", "semaphore"):
        with Progress(Lock(path), options, only_live=True):
            _until_free(path, timeout)
        return
    file = lock_at(path, kind, options.stale or None, options.policy)
    with Progress(file, options, only_live=True):
        file.wait_until_free(timeout)


def _until_free(path: str, timeout: float | None) -> None:
    """Wait until the kernel lock, or a permit of the semaphore, is free. Reads the status and never takes the lock."""
    deadline = None if timeout is None else monotonic() + timeout

    def look() -> Status:
        return status_of(path, kind_of(path) or "lock", None, "proof")

    def steps() -> Steps[None]:
        # A look opens the file to read it. Without these events it would wake this process and all others that wait so.
        waiting = Waiting(os.path.realpath(path), system.WATCH_WRITING)
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
