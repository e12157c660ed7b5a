"""`holdfast lockfile`: lock files that a command acquires for the process that called it, in the words of sema.

The command itself is gone in a moment. So the lock belongs to its caller, or to `--pid`. It ends with `release`, with
that process, or when it is old. `holdfast sema` is the same group with two differences, so that scripts of the sema
tool run unchanged: `release` of a lock that is not held succeeds, and every action takes --timeout, --stale and --tag.
"""

from __future__ import annotations

import argparse
import os

from ..collect.kinds import kind_of
from ..collect.locks import lock_at, status_of
from ..errors import NotLocked, NotOwner, Timeout
from ..locks.lock_file import LockFile
from . import arguments, looking, output
from .failures import NO, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..locks.record import Record
    from ..status import Status

ACTIONS = {
    "try": "acquire a lock file if it is free",
    "acquire": "wait for a lock file and acquire it",
    "release": "release a lock file",
    "status": "print who holds a lock",
    "wait": "wait until a lock is free, without taking it",
    "clean": "remove stale lock files and what crashes left",
}
EPILOG = """\
The lock belongs to the process that called the command, and ends with it. In a Makefile, in $(…) and in ( … ) that
process ends at once: pass --pid $$ there, or use holdfast run --lock-file.
"""
STATUSES = arguments.STATUSES.format(no="1 held, not held, or timed out")
EXAMPLES = {
    "try": "holdfast lockfile try /tmp/deploy.lock --tag v1.2.3 && echo mine",
    "acquire": "holdfast lockfile acquire /tmp/deploy.lock --wait 60 --stale 15m",
    "release": "holdfast lockfile try -q /tmp/deploy.lock; holdfast lockfile release /tmp/deploy.lock",
}


def configure(name: str, parser: arguments.Parser) -> None:
    epilog = f"{EPILOG}\n{STATUSES}\n\nexamples:\n" + "".join(f"  {line}\n" for line in EXAMPLES.values())
    is_sema = name == "sema"
    parser.add_actions(
        ACTIONS, lambda action, leaf: _configure(action, leaf, is_sema), epilog.replace("lockfile ", f"{name} ")
    )


def _configure(action: str, parser: arguments.Parser, is_sema: bool) -> None:
    if action in _CALLS:
        _configure_own(action, parser)
    else:
        from . import mending, waiting

        {"status": looking, "wait": waiting, "clean": mending}[action].configure(action, parser)
    group = "sema" if is_sema else "lockfile"
    text = parser.epilog or ""
    text = text.replace("holdfast lockfile ", f"holdfast {group} ").replace(f"holdfast {action} ", f"{parser.prog} ")
    parser.epilog = text
    parser.set_defaults(is_sema=is_sema)
    if is_sema:
        for option in ("--timeout", "--stale", "--tag"):
            if option not in parser._option_string_actions:
                kind = str if option == "--tag" else arguments.time
                parser.add_argument(option, dest=f"unused{option}", type=kind, help=argparse.SUPPRESS)


def _configure_own(action: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{EPILOG}\n{STATUSES}\n\nexample:\n  {EXAMPLES[action]}\n"
    parser.must_print = False  # what was done is done, and the exit status says so
    parser.add_argument("path", metavar="PATH", help="the lock file")
    arguments.add_staleness(parser)
    if action == "release":
        parser.add_argument("-f", "--force", action="store_true", help="release any holder's lock")
    else:
        parser.add_argument("-t", "--tag", help="a text about the holder")
        parser.add_argument("--fence", action="store_true", help="tokens grow even if the clock is set back")
    if action == "acquire":
        arguments.add_wait(parser)
        arguments.add_verbose(parser)
    parser.add_argument("--pid", type=arguments.pid, help="the process that holds the lock (the calling process)")
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=_CALLS[action])


def try_(options: argparse.Namespace) -> int:
    return _acquire(options, 0)


def acquire(options: argparse.Namespace) -> int:
    return _acquire(options, arguments.timeout_of(options))


def _acquire(options: argparse.Namespace, timeout: float | None) -> int:
    looking.refuse_url("acquire", options.path)
    stale_after = options.stale or None
    lock = LockFile(options.path, stale_after=stale_after, stale=options.policy, tag=options.tag, fence=options.fence)
    try:
        record = _acquire_now(lock, options.pid or os.getppid(), timeout, options)
    except Timeout as error:
        found = error.status
        if found is None or found.corrupt:  # a kernel lock, perhaps
            found = status_of(options.path, None, stale_after, options.policy)
        raise _busy(found, timeout, options) from None
    if options.json:
        names = ("pid", "timestamp", "tag", "token")
        output.say_json({"acquired": True, **{name: getattr(record, name) for name in names}})
    elif not options.quiet:
        output.say(f"Lock acquired: {output.shown(options.path)}")
    return 0


def _acquire_now(lock: LockFile, pid: int, timeout: float | None, options: argparse.Namespace) -> Record:
    try:
        return lock.acquire_as_owner(pid, 0)
    except Timeout:
        if timeout == 0:
            raise
    from .progress import Progress

    with Progress(lock, options, only_live=True):
        return lock.acquire_as_owner(pid, timeout)


def _busy(found: Status, timeout: float | None, options: argparse.Namespace) -> Failure:
    """With the keys of sema first."""
    pid = found.holders[0].pid if found.holders else None
    since = found.timestamp if found.since is None or found.timestamp is not None else int(found.since)
    message = f"{options.path}: {'busy' if timeout == 0 else f'not free within {timeout:g} s'}: {found.explain()}"
    lines = ["Timeout waiting for lock", *([] if options.is_sema else [f"  {output.shown(message)}"])]
    if timeout == 0:
        lines = ["Lock already held", *([] if pid is None else [f"  Holder PID: {pid}"])]
        lines += [f"  {looking.CORRUPT}"] if found.corrupt else []
    more = {"locked": True, "pid": pid, "since": since, "acquired": False}
    return Failure(NO, message, text="\n".join(lines), path=options.path, found=found, more=more)


def release(options: argparse.Namespace) -> int:
    looking.refuse_url("release", options.path)
    lock = lock_at(options.path, kind_of(options.path), options.stale or None, options.policy)
    try:
        lock.release_as_owner(options.pid or _caller(lock), force=options.force, of_dead=True)
    except NotLocked:
        return _not_held(options)
    except NotOwner:
        found = status_of(options.path, None, options.stale or None, options.policy)
        text = f"{options.path}: {found.explain()}"
        group = "sema" if options.is_sema else "lockfile"
        lines = f"holdfast {group}: {output.shown(text)}\n{_way_out(found)}"
        more = {"released": False, "locked": True}
        raise Failure(NO, text, text=lines, path=options.path, found=found, more=more) from None
    if options.json:
        output.say_json({"released": True})
    elif not options.quiet:
        output.say(f"Lock released: {output.shown(options.path)}")
    return 0


def _not_held(options: argparse.Namespace) -> int:
    text = f"Lock not held: {output.shown(options.path)}"
    if not options.is_sema:
        raise Failure(NO, text, text=text, path=options.path, more={"released": False, "locked": False})
    if options.json:
        output.say_json({"released": False, "locked": False})
    elif not options.quiet:
        output.say(text)
    return 0


def _caller(lock: LockFile) -> int:
    """The process that called us. A shell may become its last command, which is then in its own caller's place."""
    found = lock.examine()
    if found is not None and found.record is not None and found.record.pid == os.getpid() and found.alive:
        return os.getpid()
    return os.getppid()


def _way_out(found: Status) -> str:
    if found.kind not in ("file", "task"):
        return "A kernel lock cannot be taken away. It is free when the process that holds it has ended."
    return "-f releases it anyway. holdfast break also prints whose lock it was."


_CALLS = {"try": try_, "acquire": acquire, "release": release}
