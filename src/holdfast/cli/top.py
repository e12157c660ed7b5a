"""`holdfast top`: the locks in some directories and on some servers, live.

The screen itself is `screen`, which needs Textual.
"""

from __future__ import annotations

import os
import sys

from ..errors import Unsupported
from . import arguments, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
keys: s sorts by the next column, / filters, h hides free locks, b breaks a lock file (asks first), q ends

exit status: 0; 2 wrong usage; 3 an error

examples:
  holdfast top
  holdfast top -r /tmp --every 0.5
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{arguments.URLS}Without a name: all locks of the server (not on SMB).\n\n{EXAMPLES}"
    what = "directories, or URLs of servers"
    parser.add_argument("directories", metavar="DIR", nargs="*", default=["."], type=arguments.looked_at, help=what)
    parser.add_argument("-r", "--recursive", action="store_true", help="also subdirectories")
    parser.add_argument(
        "--every", metavar="TIME", type=arguments.time, default=1.0, help="time between two updates (1s)"
    )
    arguments.add_json(parser, "print the locks once, as JSON, and exit")
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    from ..collect.locks import all_locks, as_json
    from .listing import complain

    if options.json:
        found = all_locks(options.directories, options.recursive, unreadable=complain)
        output.say_json([as_json(status) for status in found])
        return 0
    for directory in options.directories:  # one that cannot be read: say so before the screen opens
        if arguments.is_url(directory):
            all_locks([directory], recursive=False)
        else:
            os.scandir(directory).close()
    if not output.on_terminal(sys.stdin) or not output.on_terminal(sys.stderr):
        raise Unsupported("this needs a terminal; holdfast ls shows the same, once")
    try:
        from .screen import Screen
    except ImportError:
        raise Unsupported(
            "holdfast top needs Textual: pip install 'holdfast[top]'. holdfast ls shows the same, once."
        ) from None
    Screen(options.directories, options.recursive, max(0.1, options.every)).run()
    return 0
