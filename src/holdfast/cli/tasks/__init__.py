"""`holdfast tasks`: a queue of tasks from the shell.

put         put, schedule, unschedule
commands    the short ones: ls, show, retry, cancel, purge, stats, recover
work        a worker; what it shows is `bar`
watch       the live view; on a terminal `screen` draws it
text        a task in few words, for all of them
"""

from __future__ import annotations

from .. import arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# In the order of the overview: the module, and what it does.
ACTIONS = {
    "put": ("put", "add tasks, given as words or one per line; print their ids"),
    "work": ("work", "do the tasks, with a command for each or a Python function"),
    "ls": ("commands", "list tasks"),
    "show": ("commands", "tell everything about a task"),
    "watch": ("watch", "watch a queue, live"),
    "stats": ("commands", "count the tasks in each state"),
    "retry": ("commands", "have tasks that have ended done again"),
    "cancel": ("commands", "have tasks not be done; one that runs is ended"),
    "purge": ("commands", "remove tasks that have ended: done, failed and cancelled ones"),
    "schedule": ("put", "have a task put again and again; without a name, list what is"),
    "unschedule": ("put", "end schedules: what they put is not put any more"),
    "recover": ("commands", "find tasks that a crash left where nobody sees them"),
}

STATUSES = """\
A time T is a number of seconds, or 90s, 5m, 2h, 7d.

exit status: 0; 1 if a task failed for good, is unknown or in the wrong state; 2 wrong usage, 3 it cannot be done; 75 if
the queue is full (put --max-pending), or if work --drain was told to end before all was done"""

EXAMPLES = f"""\
{{actions}}

A queue is a directory. put and work make it if it is not there. What commands print and how they ended is kept.

{STATUSES}

examples:
  holdfast tasks put /tmp/jobs one two three
  seq 5 | holdfast tasks put /tmp/jobs - --attempts 5 --timeout 60
  holdfast tasks work /tmp/jobs --drain -j 2 -- echo this is {{{{}}}}
  holdfast tasks ls /tmp/jobs --state failed --state running
  holdfast tasks watch /tmp/jobs --once
  holdfast tasks retry /tmp/jobs --failed
  holdfast tasks schedule /tmp/jobs nightly report --cron '0 3 * * *'
  holdfast tasks purge /tmp/jobs --older-than 7d
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.usage = "holdfast tasks ACTION DIR …     holdfast tasks ACTION --help tells more"
    parser.epilog = EXAMPLES.format(actions="\n".join(f"{key:11}{does}" for key, (_, does) in ACTIONS.items()))
    parser.actions = {key: (does, _configuring(key)) for key, (_, does) in ACTIONS.items()}
    parser.add_argument("action", choices=tuple(ACTIONS), metavar="ACTION", help="what to do, one of those below")


def _configuring(name: str) -> Callable[[arguments.Parser], None]:
    def configure(parser: arguments.Parser) -> None:
        from importlib import import_module

        parser.epilog = STATUSES
        parser.add_argument("path", metavar="DIR", help="the directory of the queue")
        import_module(f".{ACTIONS[name][0]}", __name__).configure(name, parser)

    return configure
