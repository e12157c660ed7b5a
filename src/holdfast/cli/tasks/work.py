"""`holdfast tasks work`: a worker. Its processes report what they do (`reports`), and `bar` shows it."""

from __future__ import annotations

import os
import sys

from ...collect.tasks import queue_at
from ...tasks import TaskQueue, Worker
from ...tasks.handler import Command, Handler
from .. import arguments, output
from ..failures import NO
from .bar import Display
from .reports import Reporter

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

MORE = """\
{} in the command, also within a word, becomes the payload: text as it is, anything else as JSON. Do not use {} in the
script of sh -c: the shell would run a payload as code. Pass it as an argument: sh -c 'echo "$1"' - {}
The environment of the command contains HOLDFAST_TASK_ID, HOLDFAST_TASK_TOKEN and HOLDFAST_TASK_PAYLOAD (JSON). The
output of the command is printed when it ends, and its last 64 KiB are stored as the result. If its exit status is not
0, the attempt has failed, and the task is tried again later, up to its --attempts.

SIGTERM or control-C: running tasks are finished, and no task is begun. A second signal: running tasks are killed and
given back to the queue, which does not count as an attempt.

examples:
  holdfast tasks work /tmp/jobs -j 4 -- ./convert.sh {}
  holdfast tasks work /tmp/jobs --drain --python mymodule:handle
  holdfast tasks work --app mymodule:queue
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.usage = "holdfast tasks work QUEUE [options] -- COMMAND … {} …"
    parser.usage += "\n       holdfast tasks work QUEUE [options] --python MODULE:FUNCTION"
    parser.usage += "\n       holdfast tasks work [options] --app MODULE:QUEUE"
    parser.epilog = f"{MORE.partition('examples')[0]}{parser.epilog}\n\nexamples{MORE.partition('examples')[2]}"
    parser.takes_command = True
    parser.add_argument(
        "-j",
        "--jobs",
        metavar="N",
        type=arguments.at_least_one,
        default=1,
        help="the maximum number of tasks that run at a time (1)",
    )
    parser.add_argument("--drain", action="store_true", help="exit when no task is pending or running")
    parser.add_argument("--create", action="store_true", help="create the queue if it does not exist")
    parser.add_argument(
        "--threads", action="store_true", help="run --python or --app in threads of one process, not in a process each"
    )
    parser.add_argument("--python", metavar="M:F", help="call this function with each task")
    parser.add_argument("--app", metavar="M:Q", help="run the functions that this TaskQueue has registered")
    parser.add_argument(
        "--retry-after",
        metavar="TIME",
        type=arguments.time,
        help="pause before the second attempt (1s); then twice as long",
    )
    parser.add_argument("--no-durable", dest="durable", action="store_false", help="do not wait for the disk")
    arguments.add_json(parser, "print JSON lines on stderr, and an error as JSON")
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


class _Worker(Worker):
    """Counts the signals that ask it to end."""

    signals = 0

    def stop(self) -> None:
        self.signals += 1
        super().stop()


def call(options: argparse.Namespace) -> int:
    _check(options)
    output.print_log()
    reporter = Reporter()
    handler = _handler(options, reporter)
    queue = _queue(options)
    with Display(queue, reporter, json=options.json, quiet=options.quiet) as display:
        worker = _Worker(
            queue,
            handler,
            concurrency=options.jobs,
            threads=options.threads,
            on_start=reporter.started,
            on_done=reporter.done,
            on_failed=reporter.failed,
            observer=display,
        )
        display.signals = lambda: worker.signals if worker.is_ending else 0
        display.failed = worker.run(drain=options.drain).failed
    is_unfinished = options.drain and worker.signals and not queue.is_empty()
    return NO if display.counts["failed"] or is_unfinished else 0


def _check(options: argparse.Namespace) -> None:
    given = [bool(options.command), options.python is not None, options.app is not None]
    if sum(given) > 1:
        raise ValueError("give only one of: a command, --python, --app")
    if not any(given):
        raise ValueError("which command? Put it after --, or give --python MODULE:FUNCTION or --app MODULE:QUEUE")
    if options.command and options.threads:
        raise ValueError("--threads goes with --python or --app: a command is always a process of its own")
    if options.app is None and options.path is None:
        raise ValueError("which queue? Give its directory or URL")
    if options.app is not None:
        if options.path is not None:
            raise ValueError(f"--app {options.app} names the queue already. Leave {options.path!r} out")
        if options.retry_after is not None or not options.durable or options.create:
            raise ValueError("--retry-after, --no-durable and --create do not go with --app: its TaskQueue decides")


def _queue(options: argparse.Namespace) -> TaskQueue:
    if options.app is not None:
        return _app(options.app)
    settings = {"durable": options.durable}
    if options.retry_after is not None:
        settings["retry_after"] = options.retry_after
    if options.create:
        return TaskQueue(options.path, **settings)
    return queue_at(options.path, remedy="--create creates it", **settings)


def _app(text: str) -> TaskQueue:
    queue = _imported("--app", "MODULE:QUEUE", text)
    if not isinstance(queue, TaskQueue):
        raise ValueError(f"--app {text} is a {type(queue).__name__}, not a TaskQueue")  # noqa: TRY004
    if not queue.functions:
        raise ValueError(f"--app {text} has no functions. Register them with @{text.partition(':')[2]}.task")
    return queue


def _handler(options: argparse.Namespace, reporter: Reporter) -> Handler | None:
    if options.app is not None:
        return None
    if options.python is not None:
        handler = _imported("--python", "MODULE:FUNCTION", options.python)
        if not callable(handler):
            raise ValueError(f"--python {options.python} is not a function")
        return handler
    from shutil import which

    program = options.command[0]
    if "{}" not in program and which(program) is None:
        raise FileNotFoundError(2, "there is no such command", program)
    return Command(options.command, reporter.printed)


def _imported(option: str, form: str, text: str) -> object:
    """An object by its name, as Python finds it, and in the current directory."""
    from importlib import import_module

    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{option} must be {form}, not {text!r}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the user's module raises
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        remedy = "HOLDFAST_DEBUG=1 prints the traceback"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            remedy = "run this in the directory of the module, or add that to PYTHONPATH"
        raise ValueError(f"{option} {text}: {type(error).__name__}: {error} ({remedy})") from None
    return found
