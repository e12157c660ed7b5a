"""The command line: argparse with errors of one line, groups of actions, and the place where a user's command begins.

The same option means the same everywhere: the functions `add_…` below define what several commands have. argparse is
what starts quickly: click and typer take longer to import than a whole `lockfile try` takes to run.
"""

from __future__ import annotations

import argparse
import os

from ..owner import without_passwords
from . import output
from .failures import RUN_BUSY, Misuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """The parser of a command, or of a group of actions, each of which has its own."""

    def __init__(self, *args: object, **options: object) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.must_print = True  # output that is lost is an error: the exit status alone is no answer
        self.takes_command = False
        # What the first word of a group of commands may be: what that does, and who adds its options.
        self.actions: dict[str, tuple[str, Callable[[Parser], None]]] = {}

    def _get_formatter(self) -> argparse.HelpFormatter:
        """With a width, which argparse would import shutil to find out, for every option."""
        return self.formatter_class(prog=self.prog, width=_width())  # type: ignore[call-arg]

    def _print_message(self, message: str, file: object = None) -> None:
        """The text of --help. argparse ignores an error here."""
        output.say(message.rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        raise Misuse(f"{without_passwords(message)} ({self.prog} --help tells more)")

    def add_actions(self, actions: Mapping[str, str], configure: Callable[[str, Parser], None], epilog: str) -> None:
        """Make this a group. `actions` are their names, and what they do."""
        self.usage = f"{self.prog} ACTION …     {self.prog} ACTION --help tells more"
        width = max(map(len, actions)) + 2
        self.epilog = "\n".join(f"{name:{width}}{does}" for name, does in actions.items()) + f"\n\n{epilog}"
        for name, does in actions.items():
            self.actions[name] = does, lambda parser, name=name: configure(name, parser)  # type: ignore[misc]
        self.add_argument("action", choices=tuple(actions), metavar="ACTION", help="what to do, one of those below")

    def find(self, words: list[str]) -> tuple[Parser, list[str]]:
        """The parser of the action that the first word names, and the words after it."""
        if not self.actions or (words and words[0].startswith("-")):
            return self, words
        if not words:
            self.error(f"which action? One of {', '.join(self.actions)}")
        if words[0] not in self.actions:
            hint = similar(words[0], self.actions)
            raise Misuse(f"there is no action {words[0]!r}{hint}; {self.prog} --help lists them")
        return self.action(words[0]), words[1:]

    def action(self, name: str, into: Parser | None = None) -> Parser:
        """The parser of one of the `actions`."""
        does, configure = self.actions[name]
        parser = into or Parser(prog=f"{self.prog} {name}")
        parser.description = f"{does[0].upper()}{does[1:]}."
        configure(parser)
        return parser

    def parse(self, own: Sequence[str], command: list[str]) -> argparse.Namespace:
        """The options in our own words. Options may stand among the words, of which there may be any number."""
        several = any(action.nargs in ("*", "?", "+") for action in self._get_positional_actions())
        options = self.parse_intermixed_args(own) if several else self.parse_args(own)
        options.command = command
        if getattr(options, "quiet", False) and getattr(options, "verbose", False):
            self.error("argument -v/--verbose: not allowed with argument -q/--quiet")
        return options

    def split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Our words and those of the command: after `--`, or else from the second on that is no option."""
        found, position = 0, 0
        while self.takes_command and position < len(words):
            word = words[position]
            if word == "--":
                return words[:position], words[position + 1 :]
            if word.startswith("-") and word != "-":
                position += self._takes_next(word)
            else:
                found += 1
                if found > 1:
                    return words[:position], words[position:]
            position += 1
        return words, []

    def _takes_next(self, word: str) -> bool:
        """Is the word after this option its value?"""
        if word.startswith("--"):
            action = self._option_string_actions.get(word)
            return action is not None and action.nargs != 0
        for number, letter in enumerate(word[1:], 2):
            action = self._option_string_actions.get("-" + letter)
            if action is not None and action.nargs != 0:
                return number == len(word)
        return False


def similar(word: str, names: Iterable[str], renamed: Mapping[str, str] | None = None) -> str:
    """A hint for somebody who mistyped one of these names, or one of those that are called something else now."""
    from difflib import get_close_matches

    renamed = renamed or {}
    found = get_close_matches(word, [*names, *renamed], 1)
    return f" (did you mean {renamed.get(found[0], found[0])}?)" if found else ""


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns) - 2
    try:
        return min(118, os.get_terminal_size().columns - 2)
    except OSError:
        return 98


# Paths and URLs.

URLS = """\
URLs of locks on servers: postgresql://user@host/database?name=NAME, etcd://host:2379/NAME, redis://host:6379/0/NAME,
smb://host/share/FILE
"""


def is_url(text: str) -> bool:
    """Is this the URL of a lock on a server, and not a path?"""
    scheme, colon, _ = text.partition("://")
    return bool(colon) and scheme[:1].isalpha() and scheme.translate(_IN_SCHEMES).isalnum() and scheme.isascii()


_IN_SCHEMES = str.maketrans("", "", "+.-")


def looked_at(text: str) -> str:
    """The path of a command that changes nothing. A '..' is resolved, because a `LockFile` refuses it."""
    if is_url(text) or os.pardir not in text:
        return text
    directory, name = os.path.split(text)
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(directory), name)


# Values.

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def time(text: str) -> float:
    unit = _UNITS.get(text[-1:])
    try:
        number = float(text[:-1] if unit else text)
    except ValueError:
        number = -1
    if not number >= 0 or "_" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 1.5, 90s, 5m, 2h or 7d")
    return number * (unit or 1)


def integer(name: str, least: int, most: float = float("inf")) -> Callable[[str], int]:
    """The type of a number in this range."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most or "_" in text:
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}")
        return number

    return parse


at_least_one = integer("a number from 1 on", 1)
position = integer("a number from 0 on", 0)
exit_status = integer("an exit status from 0 to 255", 0, 255)
pid = integer("the number of a process", 1)


# Options that mean the same everywhere.


def add_json(parser: argparse.ArgumentParser, what: str = "print JSON, also for an error") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="print each step on stderr")


def add_wait(parser: argparse.ArgumentParser, default: float | None = None) -> None:
    """`timeout_of` returns what was given."""
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument("-n", "--no-wait", "--nonblock", action="store_true", help="do not wait")
    text = "wait at most this long" + ("" if default is None else f" ({default:g}s)")
    waiting.add_argument(
        "-w", "--wait", "--timeout", dest="wait", metavar="TIME", type=time, default=default, help=text
    )


def timeout_of(options: argparse.Namespace) -> float | None:
    return 0.0 if options.no_wait else options.wait


def add_busy_status(parser: argparse.ArgumentParser) -> None:
    text = f"exit status if busy or timed out ({RUN_BUSY})"
    parser.add_argument("-E", "--busy-code", metavar="N", type=exit_status, default=RUN_BUSY, help=text)


_STALE_S, _POLICY = 3600.0, "proof"


def add_staleness(parser: argparse.ArgumentParser) -> None:
    stale = "time until the lock of a holder that cannot be checked is stale (1h; 0: never)"
    parser.add_argument("--stale", metavar="TIME", type=time, default=_STALE_S, help=stale)
    policy = "a lock is stale if its holder is proved dead (proof), by age alone (old), or by both (dead-and-old)"
    parser.add_argument("--policy", choices=(_POLICY, "old", "dead-and-old"), default=_POLICY, help=policy)


def refuse_staleness(options: argparse.Namespace) -> None:
    """For the lock of a URL."""
    if options.stale != _STALE_S or options.policy != _POLICY:
        raise ValueError("--stale and --policy do not go with a URL: the server decides. Leave them out.")


def add_command(parser: Parser) -> None:
    """What follows is a command of the user's."""
    parser.takes_command, parser.must_print = True, False
    parser.add_argument("-c", dest="line", metavar="LINE", help="run this line with the shell")
    parser.add_argument("-o", "--close", action="store_true", help="do not let the command inherit the lock")
    text = "time from SIGTERM to SIGKILL if the lock is lost (10s)"
    parser.add_argument("--grace", metavar="TIME", type=time, default=10.0, help=text)


def command_of(options: argparse.Namespace) -> list[str]:
    if options.line is not None:
        if options.command:
            raise ValueError("give a command or -c, not both")
        return [os.environ.get("SHELL") or "/bin/sh", "-c", options.line]
    if not options.command:
        raise ValueError("which command? Put it after --")
    return list(options.command)


STATUSES = "exit status: 0; {no}; 2 wrong usage; 3 an error"
