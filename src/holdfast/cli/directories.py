"""`holdfast dir`: a command builds the next version of a directory, which replaces the old one if it succeeds."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager

from .. import AtomicDir
from ..errors import Timeout
from . import arguments, output
from .failures import ERROR, NO, Failure
from .progress import Progress, busy
from .run import Child, refuse_deadlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ..atomicdir.directory import Block

ACTIONS = {
    "replace": "run a command that fills the empty directory $HOLDFAST_NEW, which then replaces DIR",
    "edit": "run a command that changes $HOLDFAST_NEW, a copy of DIR, which then replaces DIR",
    "versions": "print the numbers of all versions, the current one last",
    "rollback": "bring back an earlier version: the previous one, or --to N",
    "recover": "finish or undo a change that a crash interrupted; the next change would do so, too",
}
CHANGES = ("replace", "edit")
STATUSES = """\
exit status: 0; 1 busy or timed out, or there is no such version; 2 wrong usage; 3 an error, or the command failed"""
EXAMPLES = {
    "replace": "holdfast dir replace --keep 1 /tmp/site -c 'echo hello >\"$HOLDFAST_NEW/index.html\"'",
    "edit": "holdfast dir edit --keep 1 /tmp/site -c 'date >>\"$HOLDFAST_NEW/index.html\"'",
    "versions": "holdfast dir versions /tmp/site",
    "rollback": "holdfast dir rollback /tmp/site",
    "recover": "holdfast dir recover /tmp/site",
}


def configure(name: str, parser: arguments.Parser) -> None:
    examples = "".join(f"  {line}\n" for line in EXAMPLES.values())
    parser.add_actions(ACTIONS, _configure, f"{STATUSES}\n\nexamples:\n{examples}")


def _configure(action: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{STATUSES}\n\nexample:\n  {EXAMPLES[action]}\n"
    parser.add_argument("path", metavar="DIR", help="the directory")
    if action in CHANGES:
        keep = "how many previous versions to keep (0)"
        parser.add_argument("--keep", metavar="N", type=arguments.position, default=0, help=keep)
    if action != "versions":
        parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")
        arguments.add_wait(parser)
        arguments.add_quiet(parser)
    if action in CHANGES:
        parser.usage = f"holdfast dir {action} DIR [options] -- COMMAND …"
        parser.usage += f"\n       holdfast dir {action} DIR [options] -c 'SHELL LINE'"
        arguments.add_command(parser)
    if action == "rollback":
        parser.add_argument("--to", metavar="N", type=arguments.at_least_one, help="which version to roll back to")
    arguments.add_json(parser)
    parser.set_defaults(call=versions if action == "versions" else _under_lock(_CALLS[action]))


def _under_lock(change: Callable[[AtomicDir, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def call(options: argparse.Namespace) -> int:
        output.print_log()
        timeout = arguments.timeout_of(options)
        keep = getattr(options, "keep", 0)
        site = AtomicDir(options.path, keep=keep, timeout=timeout, durable=options.durable)
        try:
            return change(site, options)
        except Timeout as error:
            raise busy(site.path, error.status, timeout or 0, NO) from None

    return call


class Builder(Child):
    """The command that builds the new version."""

    def __init__(self, change: Block, new: Path, options: argparse.Namespace) -> None:
        super().__init__(change.hold, options)
        self._new = new

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "HOLDFAST_NEW": str(self._new)}


def replace(site: AtomicDir, options: argparse.Namespace) -> int:
    return _change(site, site.replace(), options)


def edit(site: AtomicDir, options: argparse.Namespace) -> int:
    return _change(site, site.edit(), options)


def _change(site: AtomicDir, change: Block, options: argparse.Namespace) -> int:
    command = arguments.command_of(options)
    if arguments.timeout_of(options) != 0:
        refuse_deadlock(site.lock)
    with Progress(site.lock, options):
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
            text = f"{site.path}: left as it was; the command ended with {status}"
            raise Failure(ERROR, text, path=site.path, more={"committed": False, "status": status})
        if not options.quiet and new.is_dir() and not any(new.iterdir()):
            empty = "the new version is empty; did the command fill $HOLDFAST_NEW?"
            output.complain(f"holdfast dir: {output.shown(options.path)}: {empty}")
    except BaseException as error:
        change.__exit__(type(error), error, None)
        if isinstance(error, Failure) and error.status != ERROR:  # the command did not start
            raise Failure(ERROR, str(error), silenced=False, path=site.path, more={"committed": False}) from None
        raise
    change.__exit__(None, None, None)
    if options.json:
        output.say_json({"committed": True, "version": site.version, "seconds": round(time.time() - began, 3)})
    return 0


def recover(site: AtomicDir, options: argparse.Namespace) -> int:
    site.recover()
    if options.json:
        output.say_json({"recovered": True, "version": site.version})
    return 0


def versions(options: argparse.Namespace) -> int:
    site = AtomicDir(options.path)
    found = _versions(site)
    if options.json:
        output.say_json({"versions": found, "current": site.version})
    else:
        output.say("\n".join(map(str, found)))
    return 0


def _versions(site: AtomicDir) -> list[int]:
    found = site.versions()
    if not found:
        raise FileNotFoundError(2, "there is no directory here, and no version of it", site.path)
    return found


def rollback(site: AtomicDir, options: argparse.Namespace) -> int:
    found = _versions(site)
    if options.to is not None and options.to not in found[:-1]:
        kept = ", ".join(map(str, found[:-1])) or "none"
        raise Failure(NO, f"{site.path}: there is no earlier version {options.to} (kept: {kept})", path=site.path)
    version = site.rollback(to=options.to)
    if options.json:
        output.say_json({"version": version})
    elif not options.quiet:
        output.say(f"Rolled back: {output.shown(options.path)} is version {version} now")
    return 0


_CALLS = {"replace": replace, "edit": edit, "recover": recover, "rollback": rollback}
