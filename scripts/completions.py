"""Write the completion scripts of the command into the package, from its parsers. Run it when the options change."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import shtab

from holdfast import cli
from holdfast.cli.arguments import Parser
from holdfast.cli.completion import FOLDER, SHELLS
from holdfast.errors import Unsupported

PATHS = {"PATH": shtab.FILE, "TARGET": shtab.FILE, "DIR": shtab.DIRECTORY}


def whole_parser() -> Parser:
    parser = Parser(prog="holdfast", description="Holdfast coordinates processes.")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (_, does) in cli.COMMANDS.items():
        with suppress(Unsupported):  # the extra of `web` is not installed
            _prepare(cli.parser_of(name, into=commands.add_parser(name, help=does)))
    return parser


def _prepare(parser: Parser) -> None:
    parser.epilog = None
    if parser.actions:
        parser._actions[:] = [action for action in parser._actions if action.dest != "action"]
        commands = parser.add_subparsers(metavar="ACTION")
        for name, (does, _) in parser.actions.items():
            _prepare(parser.action(name, into=commands.add_parser(name, help=does)))
    for action in parser._actions:
        if action.metavar in PATHS:
            action.complete = PATHS[str(action.metavar)]  # type: ignore[attr-defined]


def script(shell: str) -> str:
    return shtab.complete(whole_parser(), shell).rstrip() + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    for shell, name in SHELLS.items():
        (folder / name).write_text(script(shell))
