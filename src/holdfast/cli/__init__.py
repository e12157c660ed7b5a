"""The `holdfast` command: one module per group of commands, imported when one of them is called.

A module has `configure(name, parser)`, which adds the options and says what to call. That function gets the options and
returns the exit status. What it raises becomes an exit status and a message here, and nowhere else (`failures`).
"""

from __future__ import annotations

import os
import sys

from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arguments import Parser

# In the order of the overview: the command, its module, what it does.
COMMANDS = {
    "run": ("run", "hold a lock while a command runs"),
    "fd": ("descriptor", "lock a descriptor that the calling script has open"),
    "status": ("looking", "print who holds a lock"),
    "wait": ("waiting", "wait until a lock is free, without taking it"),
    "ls": ("listing", "list the locks in directories and on servers"),
    "top": ("top", "watch the locks in directories and on servers, live"),
    "break": ("mending", "take a lock away from its holder"),
    "clean": ("mending", "remove stale lock files and private files that crashes left"),
    "doctor": ("doctor", "test which kinds of lock are safe in a directory or on a server"),
    "lockfile": ("lockfile", "lock files that outlive the command: try, acquire, release, status, wait, clean"),
    "sema": ("lockfile", "the same as lockfile, for scripts of the sema tool: alias sema='holdfast sema'"),
    "dir": ("directories", "replace or edit a directory as a whole, or not at all"),
    "events": ("events", "append to an event store, read and follow it"),
    "tasks": ("tasks", "put tasks into a queue, and run workers that do them"),
    "web": ("web", "show locks and tasks in a browser"),
    "completion": ("completion", "print the completion script for a shell"),
}
OLD_NAMES = {name: f"lockfile {name}" for name in ("try", "acquire", "release")} | {"try-acquire": "lockfile try"}

OVERVIEW = """\
usage: holdfast COMMAND …     holdfast COMMAND --help tells more

Holdfast coordinates processes.

{commands}

examples:
  holdfast run build.lock -- make          one make at a time; others wait for their turn
  holdfast run -n cron.lock -- ./nightly   or not at all: exit status 75 if another one runs
  holdfast ls -r .                         who holds what
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status."""
    from .failures import INTERRUPTED

    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and any("://" in word for word in words):
        from .passwords import hide_in_arguments

        hide_in_arguments()
    output.prepare()
    name = words[0] if words else ""
    if name in ("", "-h", "--help", "help"):
        if len(words) > 1 and name == "help":
            return _main([*words[1:], "--help"])
        output.say(OVERVIEW.format(commands="\n".join(f"  {key:11} {does}" for key, (_, does) in COMMANDS.items())))
        return _end("holdfast", 0 if words else 2)
    if name in ("-V", "--version"):
        from .. import __version__

        output.say(f"holdfast {__version__}")
        return _end("holdfast", 0)
    return _call(name, words[1:])


def parser_of(name: str, into: Parser | None = None) -> Parser:
    """The parser of one command. The others are not built: that would take longer than to run it."""
    from importlib import import_module

    from .arguments import Parser

    module, does = COMMANDS[name]
    parser = into or Parser(prog=f"holdfast {name}")
    parser.description = f"{does[0].upper()}{does[1:]}."
    import_module(f".{module}", __name__).configure(name, parser)
    return parser


def _call(name: str, words: list[str]) -> int:
    """Run a command, and print what it raises."""
    from . import failures

    is_run, json, quiet, must_print = name in ("run", "fd"), _has_json(words), False, False
    try:
        if name not in COMMANDS:
            raise failures.Misuse(_unknown(name))
        parser, words = parser_of(name).find(words)
        own, command = parser.split(words)
        json = _has_json(own)
        options = parser.parse(own, command)
        quiet, must_print = getattr(options, "quiet", False), parser.must_print
        status: int = options.call(options)
    except SystemExit as stop:  # --help, for instance
        status = int(stop.code or 0)
        must_print = must_print or status == 0
    except KeyboardInterrupt:
        status = failures.INTERRUPTED
    except failures.EXPECTED as error:
        if os.environ.get("HOLDFAST_DEBUG") and not isinstance(error, failures.Failure | failures.Misuse):
            raise
        failures.report(name if name in COMMANDS else "", error, json=json, quiet=quiet)
        status = failures.status_of(error, is_run=is_run)
    return _end(f"holdfast {name}", status, must_print=must_print)


def _end(prog: str, status: int, *, must_print: bool = True) -> int:
    """The exit status: an error if output was lost that the command must print."""
    if must_print and output.lost():
        from .failures import ERROR

        output.complain(f"{prog}: standard output: {output.lost()}. The output is lost.")
        status = ERROR
    output.finish()
    return status


def _has_json(words: list[str]) -> bool:
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def _unknown(name: str) -> str:
    from .arguments import similar

    if name in OLD_NAMES:
        return f"holdfast {name} is now holdfast {OLD_NAMES[name]}"
    return f"there is no command {name!r}{similar(name, COMMANDS, OLD_NAMES)}; holdfast --help lists them"
