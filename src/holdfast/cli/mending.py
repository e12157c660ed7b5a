"""`holdfast clean` and `holdfast break`: by hand, what a crash or a stuck holder left."""

from __future__ import annotations

import os
import sys

from .. import LockFile
from ..collect.kinds import kind_of
from ..collect.locks import candidates, lock_at, status_of
from ..errors import NotLocked
from . import arguments, output
from .sema import HELD, POLICY_HELP, STALE_HELP, refuse_url

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLES = {
    "clean": "examples:\n  holdfast clean /tmp/deploy.lock\n  holdfast clean /tmp\n",
    "break": "exit status: 0 broken, 1 nobody holds it, or you said no\n\n"
    "example:\n  holdfast break --yes /tmp/deploy.lock\n",
}


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EXAMPLES[name]
    what = "the lock file, or a directory of them" if name == "clean" else "the lock file"
    parser.add_argument("path", metavar="PATH", help=what)
    if name == "break":
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    else:
        parser.add_argument("--stale", metavar="S", type=arguments.seconds, default=3600.0, help=STALE_HELP)
        parser.add_argument("--policy", choices=("proof", "old", "dead-and-old"), default="proof", help=POLICY_HELP)
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
        return _is_kernel_lock(options)
    lock = lock_at(options.path, kind)
    found = lock.status()
    if not found.held:
        return _not_held(options)
    who = "its record could not be read" if found.corrupt else output.shown(found.explain())
    if not options.yes and not _agreed(f"{output.shown(options.path)}: {who}"):
        return HELD
    try:
        lock.break_()
    except NotLocked:
        return _not_held(options)
    if options.json:
        output.say_json({"broken": True, **found.as_dict()})
    elif not options.quiet:
        output.say(f"Lock broken: {output.shown(options.path)} ({who})")
    return 0


def _not_held(options: argparse.Namespace) -> int:
    if options.json:
        output.say_json({"broken": False, "locked": False})
    elif not options.quiet:
        output.complain(f"Lock not held: {output.shown(options.path)}")
    return HELD


def _is_kernel_lock(options: argparse.Namespace) -> int:
    found = status_of(options.path, None, None, "proof")
    who = output.shown(found.explain())
    if options.json:
        output.say_json({"broken": False, "locked": found.held, **found.as_dict()})
    else:
        output.complain(
            f"holdfast break: {output.shown(options.path)}: {who}. A kernel lock cannot be taken away; it is free when "
            "the process that holds it has ended."
        )
    return HELD


def _agreed(about: str) -> bool:
    output.complain(about)
    if not output.on_terminal(sys.stdin):
        output.complain("holdfast break: not a terminal, so nobody can be asked; --yes takes it away")
        return False
    output.write_error("Take it away? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
