"""The command line: argparse with errors of one line, and a way to say where a command of the user's begins.

argparse is what starts quickly: click and typer take longer to import than a whole `try` takes to run.
"""

from __future__ import annotations

import argparse
import os

from ..owner import without_passwords
from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """`misuse` and `failure` are the exit statuses for a wrong command line and for an error of the system."""

    def __init__(self, *args: object, **options: object) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.misuse = 2
        self.failure = 3
        self.takes_command = False
        self.own_words = 1  # before the command begins, options not counted
        # What the first word of a group of commands may be: what that does, and who adds its options.
        self.actions: dict[str, tuple[str, Callable[[Parser], None]]] = {}

    def _get_formatter(self) -> argparse.HelpFormatter:
        """With a width, which argparse would import shutil to find out, for every option."""
        return self.formatter_class(prog=self.prog, width=_width())  # type: ignore[call-arg]

    def error(self, message: str) -> NoReturn:
        message = output.shown(without_passwords(message))
        output.complain(f"{self.prog}: {message} ({self.prog} --help tells more)")
        raise SystemExit(self.misuse)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        if words and words[0] in self.actions:
            parser = self.action(words[0])
            # Options may stand among the words, of which there may be any number.
            return parser.parse(words[1:]) if parser.takes_command else parser.parse_intermixed_args(words[1:])
        if not self.takes_command:
            return self.parse_args(words)
        own, command = self._split(list(words))
        options = self.parse_args(own)
        options.command = command
        return options

    def action(self, name: str, into: Parser | None = None) -> Parser:
        """The parser of one of the `actions`."""
        does, configure = self.actions[name]
        parser = into or Parser(prog=f"{self.prog} {name}")
        parser.description = does[0].upper() + does[1:] + "."
        configure(parser)
        return parser

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Our words and those of the command: after `--`, or else from the first on that is neither option nor ours."""
        found, position = 0, 0
        while position < len(words):
            word = words[position]
            if word == "--":
                return words[:position], words[position + 1 :]
            if word.startswith("-") and word != "-":
                position += self._takes_next(word)
            else:
                found += 1
                if found > self.own_words:
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


URLS = """\
URLs of locks on servers: postgresql://user@host/database?name=NAME, etcd://host:2379/NAME, redis://host:6379/0/NAME,
smb://host/share/FILE
"""


def is_url(text: str) -> bool:
    """Is this the URL of a lock on a server, and not a path?"""
    scheme, colon, _ = text.partition("://")
    return bool(colon) and scheme[:1].isalpha() and scheme.translate(_IN_SCHEMES).isalnum() and scheme.isascii()


_IN_SCHEMES = str.maketrans("", "", "+.-")


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns) - 2
    try:
        return min(118, os.get_terminal_size().columns - 2)
    except OSError:
        return 98


def looked_at(text: str) -> str:
    """The path of a command that changes nothing. A '..' is resolved, because a `LockFile` refuses it."""
    if is_url(text) or os.pardir not in text:
        return text
    directory, name = os.path.split(text)
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(directory), name)


def seconds(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise ValueError(text)
    return number


seconds.__name__ = "number of seconds"


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def span(text: str) -> float:
    unit = _UNITS.get(text[-1:], 0)
    return seconds(text[:-1]) * unit if unit else seconds(text)


span.__name__ = "time (30, 1.5s, 5m, 2h, 7d)"


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


at_least_one.__name__ = "number from 1 on"


def exit_status(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 255:
        raise ValueError(text)
    return number


exit_status.__name__ = "exit status from 0 to 255"


def pid(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


pid.__name__ = "process number"


def add_json(parser: argparse.ArgumentParser, what: str = "print JSON", *, short: bool = True) -> None:
    """short: also `-j`. Not where `-j` is how many at a time."""
    parser.add_argument(*(("-j",) if short else ()), "--json", action="store_true", help=what)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing; the exit status is the answer")
