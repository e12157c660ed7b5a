"""`holdfast tasks`: a task queue from the shell.

put         put, schedule, unschedule
commands    the short ones: ls, show, stats, retry, cancel, purge, pause, resume
work        a worker. `bar` shows what it does
watch       the live view. On a terminal, `screen` draws it
text        a task in few words, for all of them
"""

from __future__ import annotations

from .. import arguments

# In the order of the overview: the module, and what the command does.
ACTIONS = {
    "put": ("put", "add tasks, given as words or one per line, and print their ids"),
    "work": ("work", "run the tasks: a command or a Python function for each"),
    "ls": ("commands", "list tasks"),
    "show": ("commands", "print everything about a task"),
    "watch": ("watch", "watch a queue, live"),
    "stats": ("commands", "count the tasks in each state"),
    "retry": ("commands", "run ended tasks again"),
    "cancel": ("commands", "cancel tasks; running tasks are killed"),
    "purge": ("commands", "delete ended tasks: done, failed and cancelled ones"),
    "pause": ("commands", "let workers begin no task until resume"),
    "resume": ("commands", "let workers begin tasks again"),
    "schedule": ("put", "add a task again and again; without a name, list the schedules"),
    "unschedule": ("put", "remove schedules"),
}

STATUSES = """\
exit status: 0; 1 if a task failed for good, does not exist or is in the wrong state, if the queue is full (put
--max-pending), or if a signal ended work --drain before all was done; 2 wrong usage; 3 an error"""

EPILOG = f"""\
A QUEUE is a directory, or postgresql://user@host/database for workers on several machines. put and schedule create it.

{STATUSES}

examples:
  holdfast tasks put /tmp/jobs one two three
  seq 5 | holdfast tasks put /tmp/jobs - --attempts 5 --time-limit 1m
  holdfast tasks work /tmp/jobs --drain -j 2 -- echo this is {{}}
  holdfast tasks ls /tmp/jobs --state failed --state running
  holdfast tasks watch /tmp/jobs --once
  holdfast tasks retry /tmp/jobs --failed
  holdfast tasks schedule /tmp/jobs nightly report --cron '0 3 * * *' --tz Europe/Berlin
  holdfast tasks purge /tmp/jobs --older-than 7d
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.add_actions({name: does for name, (_, does) in ACTIONS.items()}, _configure, EPILOG)


def _configure(name: str, parser: arguments.Parser) -> None:
    from importlib import import_module

    parser.epilog = STATUSES
    where = parser.add_argument("path", metavar="QUEUE", help="a directory, or postgresql://user@host/database")
    if name == "work":
        where.nargs = "?"  # --app names the queue
    import_module(f".{ACTIONS[name][0]}", __name__).configure(name, parser)
