"""`holdfast dir`: a command builds the next version of a directory, which replaces the old one if it succeeds."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager

from .. import AtomicDir
from ..errors import Timeout
from . import arguments, output
from .progress import Progress, in_the_way
from .run import FAILURE, LOST, MISUSE, Child, add_waiting, command_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from ..atomicdir.directory import Block

CHANGES = ("replace", "edit")
ACTIONS = (*CHANGES, "recover", "versions", "rollback")

EXAMPLES = """\
replace   run a command that fills the empty directory $HOLDFAST_NEW, which then replaces DIR if it exits with 0
edit      the same, beginning with a copy of DIR
recover   finish or undo what a crash left, now and not with the next change
versions  the numbers of the versions there are, the current one last
rollback  bring back an earlier version, the one before or --to N

exit status: that of the command; 75 busy or timed out, 76 the lock was lost, 64 wrong usage, 66 it cannot be done

examples:
  holdfast dir replace --keep 1 /tmp/site -c 'echo hello >"$HOLDFAST_NEW/index.html"'
  holdfast dir edit --keep 1 /tmp/site -c 'date >>"$HOLDFAST_NEW/index.html"'
  holdfast dir versions /tmp/site
  holdfast dir rollback /tmp/site
  holdfast dir recover /tmp/site
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.usage = (
        "holdfast dir replace|edit DIR [options] -- COMMAND …\n       holdfast dir recover|versions|rollback DIR"
    )
    parser.epilog = EXAMPLES
    parser.misuse, parser.failure, parser.takes_command, parser.own_words = MISUSE, FAILURE, True, 2
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("path", metavar="DIR", help="the directory")
    parser.add_argument("--keep", metavar="N", type=int, default=0, help="how many previous versions to keep (0)")
    parser.add_argument("--to", metavar="N", type=int, help="which version to roll back to")
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")
    parser.add_argument("-c", dest="line", metavar="LINE", help="run this line with the shell")
    add_waiting(parser)
    parser.add_argument("-o", "--close", action="store_true", help="do not let the command inherit the lock")
    parser.add_argument(
        "--grace",
        metavar="S",
        type=arguments.seconds,
        default=10.0,
        help="seconds from SIGTERM to SIGKILL if the lock is lost (10)",
    )
    arguments.add_json(parser, "what it says is JSON")
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    if options.action not in CHANGES and (options.command or options.line is not None):
        raise ValueError(f"dir {options.action} takes no command")
    timeout = 0 if options.no_wait else options.timeout
    site = AtomicDir(options.path, keep=options.keep, timeout=timeout, durable=options.durable)
    try:
        if options.action in CHANGES:
            return _change(site, options)
        return {"recover": _recover, "versions": _versions, "rollback": _rollback}[options.action](site, options)
    except Timeout as error:
        if not options.quiet:
            in_the_way(site.path, error.status, timeout or 0, json=options.json)
        return int(options.busy_code)


class Builder(Child):
    """The command that builds the new version."""

    def __init__(self, change: Block, new: Path, options: argparse.Namespace) -> None:
        super().__init__(change.hold, options)
        self._new = new

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "HOLDFAST_NEW": str(self._new)}


def _change(site: AtomicDir, options: argparse.Namespace) -> int:
    command = command_of(options)
    change = site.edit() if options.action == "edit" else site.replace()
    with Progress(site.lock, quiet=options.quiet, json=options.json):
        hold = change.acquire()
    with _signals_raise():
        new = change.enter(hold)
        assert new is not None, "only a reader has to recover first"
        return _build(site, change, new, command, options)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """A copy or a commit that gets a signal leaves nothing behind. `Child` forwards the signals to its command."""

    def end(number: int, _: object) -> None:
        for each in ours:  # to clean up takes its time, and needs no second word
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    wanted = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [number for number in wanted if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _build(site: AtomicDir, change: Block, new: Path, command: list[str], options: argparse.Namespace) -> int:
    began = time.time()
    try:
        status = Builder(change, new, options).run_only(command)
        if status:
            raise _Failed
        if not options.quiet and new.is_dir() and not any(new.iterdir()):
            empty = "the new version is empty; did the command fill $HOLDFAST_NEW?"
            output.complain(f"holdfast: {output.shown(options.path)}: {empty}")
    except BaseException as error:
        change.__exit__(type(error), error, None)
        if not isinstance(error, _Failed):
            raise
        if options.json:
            output.say_json({"committed": False, "status": status})
        elif not options.quiet and status != LOST:
            output.complain(f"holdfast: {output.shown(options.path)}: left as it was; the command ended with {status}")
        return status
    change.__exit__(None, None, None)
    if options.json:
        output.say_json({"committed": True, "version": site.version, "seconds": round(time.time() - began, 3)})
    return 0


class _Failed(Exception):
    """The command failed, so its version is dropped."""


def _recover(site: AtomicDir, options: argparse.Namespace) -> int:
    site.recover()
    if options.json:
        output.say_json({"recovered": True, "version": site.version})
    return 0


def _versions(site: AtomicDir, options: argparse.Namespace) -> int:
    found = site.versions()
    if options.json:
        output.say_json({"versions": found, "current": site.version})
    elif found:
        output.say("\n".join(map(str, found)))
    return 0


def _rollback(site: AtomicDir, options: argparse.Namespace) -> int:
    version = site.rollback(to=options.to)
    if options.json:
        output.say_json({"version": version})
    elif not options.quiet:
        output.say(f"Rolled back: {output.shown(options.path)} is version {version} now")
    return 0
