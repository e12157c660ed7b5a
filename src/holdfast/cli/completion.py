"""`holdfast completion`: the script that a shell needs to complete our commands, options and paths.

The scripts are made from the parsers by scripts/completions.py, with shtab, and shipped: nothing to install for users.
"""

from __future__ import annotations

from pathlib import Path

from . import arguments, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

SHELLS = {"bash": "holdfast.bash", "zsh": "_holdfast", "fish": "holdfast.fish"}
FOLDER = Path(__file__).parent / "completions"

EXAMPLES = """\
exit status: 0; 2 wrong usage; 3 an error

examples:
  eval "$(holdfast completion bash)"                                     in ~/.bashrc
  holdfast completion zsh > ~/.zfunc/_holdfast                           a directory of $fpath
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=tuple(SHELLS), help="which shell")
    arguments.add_json(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    script = (FOLDER / SHELLS[options.shell]).read_text(encoding="utf-8")
    if options.json:
        output.say_json({"shell": options.shell, "script": script})
    else:
        output.say(script.rstrip("\n"))
    return 0
