"""`holdfast clean` and `holdfast break`: by hand, what a crash or a stuck holder left."""

from __future__ import annotations

import os
import sys

from .. import LockFile
from ..collect.kinds import kind_of
from ..collect.locks import candidates, lock_at, status_of
from ..errors import NotLocked
from . import arguments, output
from .failures import NO, Failure
from .looking import refuse_url

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..status import Status

EPILOGS = {
    "clean": f"{arguments.STATUSES.format(no='0 also if there was nothing to remove')}\n\n"
    "examples:\n  holdfast clean /tmp/deploy.lock\n  holdfast clean /tmp\n",
    "break": f"{arguments.STATUSES.format(no='1 not held, a kernel lock, or you answered no')}\n\n"
    "example:\n  holdfast break --yes /tmp/deploy.lock\n",
}
_KERNEL_LOCK = "A kernel lock cannot be taken away. It is free when the process that holds it has ended."


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EPILOGS[name]
    what = "the lock file, or a directory of them" if name == "clean" else "the lock file"
    parser.add_argument("path", metavar="PATH", help=what)
    if name == "break":
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    else:
        arguments.add_staleness(parser)
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=clean if name == "clean" else break_)


def clean(options: argparse.Namespace) -> int:
    refuse_url("clean", options.path)
    cleaned = [path for path in _lock_files(options.path) if _clean(path, options)]
    if options.json:
        output.say_json({"cleaned": bool(cleaned), "paths": cleaned})
    elif not options.quiet:
        output.say(f"cleaned: {'true' if cleaned else 'false'}")
        if os.path.isdir(options.path):
            for path in cleaned:
                output.say(f"  {output.shown(path)}")
    return 0


def _clean(path: str, options: argparse.Namespace) -> bool:
    lock = LockFile(path, stale_after=options.stale or None, stale=options.policy)
    if os.path.isdir(options.path) and os.path.lexists(path) and kind_of(path) != "file":
        return lock.clean_private_files()  # what has their name is something else
    return lock.clean()


def _lock_files(path: str) -> list[str]:
    """The lock files of a directory, those included of which only private files are left."""
    if not os.path.isdir(path):
        return [path]
    from ..locks.publish import lock_of_private

    found = set()
    for file in candidates(path, recursive=False):
        lock = lock_of_private(file)
        try:
            if lock is not None:
                found.add(lock)
            elif kind_of(file) == "file":
                found.add(file)
        except OSError:
            continue  # not ours to read
    return sorted(found)


def break_(options: argparse.Namespace) -> int:
    refuse_url("break", options.path)
    kind = kind_of(options.path)
    if kind in ("lock", "semaphore"):
        found = status_of(options.path, None, None, "proof")
        message = f"{options.path}: {found.explain()}. {_KERNEL_LOCK}"
        more = {"broken": False, "locked": found.held}
        raise Failure(NO, message, silenced=False, path=options.path, found=found, more=more)
    lock = lock_at(options.path, kind)
    found = lock.status()
    if not found.held:
        raise _not_held(options.path)
    who = "its record could not be read" if found.corrupt else found.explain()
    if not options.yes:
        _ask(f"{options.path}: {who}", options.path, found)
    output.print_log(quiet=options.quiet)
    try:
        lock.break_()
    except NotLocked:
        raise _not_held(options.path) from None
    if options.json:
        output.say_json({"broken": True, **found.as_dict()})
    elif not options.quiet:
        output.say(f"Lock broken: {output.shown(options.path)} ({output.shown(who)})")
    return 0


def _not_held(path: str) -> Failure:
    text = f"Lock not held: {output.shown(path)}"
    return Failure(NO, text, text=text, path=path, more={"broken": False, "locked": False})


def _ask(about: str, path: str, found: Status) -> None:
    """Raises Failure unless the user agrees."""
    if not output.on_terminal(sys.stdin):
        text = f"{about}. There is no terminal to ask; --yes takes it away"
        raise Failure(NO, text, silenced=False, path=path, found=found, more={"broken": False})
    output.complain(output.shown(about))
    output.write_error("Take it away? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failure(NO, f"{path}: left as it is", path=path, found=found, more={"broken": False})
