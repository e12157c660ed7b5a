"""The `holdfast` command: one module per group of commands, imported when one of them is called.

A module has `configure(name, parser)`, which adds the options and says what to call; that gets the options and gives
the exit status. What a command raises becomes one or two lines on stderr here, and nowhere else.
"""

from __future__ import annotations

import os
import sys

from ..errors import HoldfastError, UnsafePath
from ..owner import without_passwords
from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arguments import Parser

# In the order of the overview: the command, its module, what it does.
COMMANDS = {
    "run": ("run", "hold a lock while a command runs"),
    "dir": ("directories", "replace or edit a directory as a whole, or not at all"),
    "events": ("events", "append to an event store, read and follow it"),
    "tasks": ("tasks", "put tasks into a queue, and have workers do them"),
    "fd": ("descriptor", "lock a descriptor that the calling script has open"),
    "try": ("sema", "take a lock file if it is free"),
    "acquire": ("sema", "wait for a lock file and take it"),
    "release": ("sema", "give a lock file back"),
    "status": ("sema", "say who holds a lock"),
    "wait": ("waiting", "wait until a lock is free, without taking it"),
    "ls": ("listing", "list the locks in directories and on servers"),
    "top": ("top", "watch the locks in directories and on servers, live"),
    "clean": ("mending", "remove stale locks and what crashes left"),
    "break": ("mending", "take a lock away from its holder"),
    "doctor": ("doctor", "test what the file system of a directory, or a server, really does"),
    "completion": ("completion", "print the completion script for a shell"),
}
ALIASES = {"try-acquire": "try"}

INTERRUPTED = 130
OVERVIEW = """\
usage: holdfast COMMAND …     holdfast COMMAND --help tells more

Programs take turns.

{commands}

examples:
  holdfast run build.lock -- make          one make at a time; others wait for their turn
  holdfast run -n cron.lock -- ./nightly   or not at all: exit status 75 if another one runs
  holdfast ls -r .                         who holds what
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Gives its exit status."""
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
        return 0 if words else 2
    if name in ("-V", "--version"):
        from .. import __version__

        output.say(f"holdfast {__version__}")
        return 0
    if name not in COMMANDS and name not in ALIASES:
        output.complain(
            f"holdfast: there is no command {output.shown(repr(name))}{_similar(name)}; holdfast --help lists them"
        )
        return 2
    return _call(name, words[1:])


def parser_of(name: str, into: Parser | None = None) -> Parser:
    """The parser of one command. The others are not built: that would take longer than to run it."""
    from importlib import import_module

    from .arguments import Parser

    command = ALIASES.get(name, name)
    module, does = COMMANDS[command]
    parser = into or Parser(prog=f"holdfast {name}")
    parser.description = does[0].upper() + does[1:] + "."
    import_module(f".{module}", __name__).configure(command, parser)
    return parser


def _call(name: str, words: list[str]) -> int:
    failure, misuse = 3, 2
    try:
        parser = parser_of(name)
        failure, misuse = parser.failure, parser.misuse
        options = parser.parse(words)
        status: int = options.call(options)
        if status == 0 and output.lost() and getattr(options, "must_print", False):
            output.complain(f"holdfast {name}: standard output: {output.lost()}. The output is lost.")
            status = failure
    except SystemExit as stop:
        status = int(stop.code or 0)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (HoldfastError, OSError, ValueError, OverflowError) as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        output.complain(f"holdfast {name}: {output.shown(without_passwords(_text(error)))}")
        status = misuse if isinstance(error, UnsafePath | ValueError | OverflowError) else failure
    output.finish()
    return status


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = error.filename if isinstance(error.filename, str) else None
        return f"{where}: {error.strerror}" if where else error.strerror
    return str(error)


def _similar(name: str) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, [*COMMANDS, *ALIASES], 1)
    return f" (did you mean {found[0]}?)" if found else ""
