"""`holdfast tasks work`: a worker, whose children tell what they do (`teller`), and `bar` shows it."""

from __future__ import annotations

import os
import sys

from ...tasks import TaskQueue, Worker
from ...tasks.handler import Command, Handler
from .. import arguments, output
from .bar import Board
from .teller import Teller

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

FAILED, UNFINISHED = 1, 75

MORE = """\
{} in the command, wherever it is in a word, is the payload: a text as it is, anything else as JSON. (Not in the text of
sh -c: there a payload would be run as code.) The command also has HOLDFAST_TASK_ID, HOLDFAST_TASK_TOKEN and
HOLDFAST_TASK_PAYLOAD (JSON) in its environment. What it prints is shown when it has ended, and its last 64 KiB are
kept. If its exit status is not 0, it is tried again later, until --attempts of put are over.

SIGTERM or control-C: what runs is finished, and nothing more begun. A second one: what runs is ended and given back.

examples:
  holdfast tasks work /tmp/jobs -j 4 -- ./convert.sh {}
  holdfast tasks work /tmp/jobs --drain --python mymodule:handle
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.usage = "holdfast tasks work DIR [options] -- COMMAND … {} …"
    parser.usage += "\n       holdfast tasks work DIR [options] --python MODULE:FUNCTION"
    parser.epilog = f"{MORE.partition('examples')[0]}{parser.epilog}\n\nexamples{MORE.partition('examples')[2]}"
    parser.takes_command = True
    parser.add_argument(
        "-j", "--jobs", metavar="N", type=arguments.at_least_one, default=1, help="how many tasks at a time (1)"
    )
    parser.add_argument("--drain", action="store_true", help="end when there is nothing left to be done")
    parser.add_argument("--threads", action="store_true", help="in threads of one process, not in one process each")
    parser.add_argument("--python", metavar="M:F", help="call this function with each task, instead of a command")
    parser.add_argument(
        "--retry-after", metavar="T", type=arguments.span, default=1.0, help="until the second attempt; then twice (1)"
    )
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")
    parser.add_argument("--json", action="store_true", help="what it says on stderr is JSON lines")
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


class _Worker(Worker):
    """One that counts how often it was told to end."""

    asked = 0

    def stop(self) -> None:
        self.asked += 1
        super().stop()


def call(options: argparse.Namespace) -> int:
    teller = Teller()
    handler = _handler(options, teller)
    is_new = not os.path.exists(os.path.join(options.path, "queue.json"))
    queue = TaskQueue(options.path, durable=options.durable, retry_after=options.retry_after)
    if is_new and not (options.quiet or options.json):
        output.complain(f"made {output.shown(options.path)}, a new queue: nothing is in it yet")
    with Board(queue, teller, json=options.json, quiet=options.quiet) as board:
        worker = _Worker(
            queue,
            handler,
            concurrency=options.jobs,
            threads=options.threads,
            on_start=teller.started,
            on_done=teller.done,
            on_failed=teller.failed,
            observer=board,
        )
        board.asked = lambda: worker.asked if worker.is_ending else 0
        board.failed = worker.run(drain=options.drain).failed
    if board.counts["failed"]:
        return FAILED
    return UNFINISHED if options.drain and worker.asked and not queue.is_empty() else 0


def _handler(options: argparse.Namespace, teller: Teller) -> Handler:
    if options.python is not None:
        if options.command:
            raise ValueError("give a command or --python, not both")
        return _function(options.python)
    if not options.command:
        raise ValueError("which command? Put it after --, or give --python MODULE:FUNCTION")
    from shutil import which

    program = options.command[0]
    if "{}" not in program and which(program) is None:
        raise FileNotFoundError(2, "there is no such command", program)
    return Command(options.command, teller.printed)


def _function(text: str) -> Handler:
    """From its name, as Python finds it: in the current directory, too."""
    from importlib import import_module

    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"--python is MODULE:FUNCTION, such as mymodule:handle, not {text!r}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError("that is no function")
    except Exception as error:  # whatever the user's module raises
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        raise ValueError(f"--python {text}: {type(error).__name__}: {error} (HOLDFAST_DEBUG=1 shows where)") from None
    handler: Handler = found
    return handler
