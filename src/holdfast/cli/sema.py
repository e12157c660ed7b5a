"""`try`, `acquire`, `release` and `status`: the commands of the sema tools, with their words and exit statuses.

The lock belongs to the process that called the command, or to `--pid`: the command itself is gone in a moment. It ends
with `release`, with that process, or when it is old.
"""

from __future__ import annotations

import argparse
import os
import time

from .. import system
from ..collect.kinds import kind_of
from ..collect.locks import lock_at, status_of
from ..errors import NotLocked, NotOwner, Timeout
from ..locks.lock_file import LockFile
from . import arguments, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..locks.record import Record
    from ..status import Status

HELD = 1
_CORRUPT = "An empty file may be one that another tool is about to write, or the file of a kernel lock (holdfast run)."

_STATUSES = "exit status: 0 done or free, 1 held or timed out, 2 wrong usage, 3 an error of the system\n"
EXAMPLES = {
    "try": "holdfast try /tmp/deploy.lock --tag v1.2.3 && echo mine",
    "acquire": "holdfast acquire /tmp/deploy.lock --timeout 60 --stale 900",
    "release": "holdfast release /tmp/deploy.lock",
    "status": "holdfast status /tmp/deploy.lock --json",
}


def configure(name: str, parser: arguments.Parser) -> None:
    urls = f"{arguments.URLS}\n" if name == "status" else ""
    parser.epilog = f"{urls}{_STATUSES}\nexample:\n  {EXAMPLES[name]}\n"
    what = "the lock: its path, or the URL of a lock on a server" if name == "status" else "the lock file"
    parser.add_argument("path", metavar="PATH", type=arguments.looked_at if name == "status" else str, help=what)
    parser.add_argument("--stale", metavar="S", type=arguments.seconds, default=3600.0, help=STALE_HELP)
    parser.add_argument("--policy", choices=("proof", "old", "dead-and-old"), default="proof", help=POLICY_HELP)
    if name in ("try", "acquire"):
        parser.add_argument("-t", "--tag", help="a text about the holder")
        parser.add_argument("--fence", action="store_true", help="tokens grow even if the clock is set back")
    if name in ("try", "acquire", "release"):
        parser.add_argument("--pid", type=arguments.pid, help="the process that holds the lock (the calling process)")
    if name == "release":
        parser.add_argument("-f", "--force", action="store_true", help="release any holder's lock")
    if name in ("release", "status"):
        parser.add_argument("--tag", help=argparse.SUPPRESS)  # taken by all commands of sema
    if name == "status":
        parser.add_argument("--kind", choices=("lock", "file"), help="kernel lock or lock file (the file shows which)")
    # Taken by all of them, so that one set of options fits the four.
    parser.add_argument(
        "--timeout", metavar="S", type=arguments.seconds, default=None if name == "acquire" else 0.0, help=TIMEOUT_HELP
    )
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call={"try": try_, "acquire": acquire, "release": release, "status": status}[name])


STALE_HELP = "seconds until the lock of a holder that cannot be checked is stale (3600; 0: never)"
POLICY_HELP = "a lock is stale if its holder is proved dead (proof), by age alone (old), or by both (dead-and-old)"
TIMEOUT_HELP = "wait at most this many seconds; 0: one attempt"


def lock_of(options: argparse.Namespace, **more: Any) -> LockFile:
    return LockFile(options.path, stale_after=options.stale or None, stale=options.policy, **more)


def try_(options: argparse.Namespace) -> int:
    return _acquire(options, 0)


def acquire(options: argparse.Namespace) -> int:
    return _acquire(options, options.timeout)


def refuse_url(command: str, path: str) -> None:
    """Raise Unsupported if the path is a URL."""
    if arguments.is_url(path):
        from . import servers

        servers.refuse(command, path)


def _acquire(options: argparse.Namespace, timeout: float | None) -> int:
    refuse_url("acquire", options.path)
    lock = lock_of(options, tag=options.tag, fence=options.fence)
    pid = options.pid or os.getppid()
    try:
        record = _acquire_now(lock, pid, timeout, options)
    except Timeout as error:
        found = error.status
        if found is None or found.corrupt:  # a kernel lock, perhaps
            found = status_of(options.path, None, options.stale or None, options.policy)
        _say_held(found, timeout, options)
        return HELD
    if options.json:
        names = ("pid", "timestamp", "tag", "token")
        output.say_json({"acquired": True, **{name: getattr(record, name) for name in names}})
    elif not options.quiet:
        output.say(f"Lock acquired: {output.shown(options.path)}")
    return 0


def _acquire_now(lock: LockFile, pid: int, timeout: float | None, options: argparse.Namespace) -> Record:
    try:
        return lock.acquire_as_owner(pid, 0)
    except Timeout:
        if timeout == 0:
            raise
    from .progress import Progress

    with Progress(lock, quiet=options.quiet or options.json, only_live=True):
        return lock.acquire_as_owner(pid, timeout)


def _say_held(found: Status, timeout: float | None, options: argparse.Namespace) -> None:
    pid = found.holders[0].pid if found.holders else None
    if options.json:
        since = found.timestamp if found.since is None or found.timestamp is not None else int(found.since)
        output.say_json(_more(found, {"locked": True, "pid": pid, "since": since, "acquired": False}))
    elif options.quiet:
        pass
    elif timeout == 0:
        output.complain("Lock already held")
        if pid is not None:
            output.complain(f"  Holder PID: {pid}")
        if found.corrupt:
            output.complain(f"  {_CORRUPT}")
    else:
        output.complain("Timeout waiting for lock")


def release(options: argparse.Namespace) -> int:
    refuse_url("release", options.path)
    lock = lock_at(options.path, kind_of(options.path), options.stale or None, options.policy)
    code, text = 0, f"Lock released: {output.shown(options.path)}"
    answer: dict[str, object] = {"released": True}
    try:
        lock.release_as_owner(options.pid or _caller(lock), force=options.force, of_dead=True)
    except NotLocked:
        text, answer = f"Lock not held: {output.shown(options.path)}", {"released": False, "locked": False}
    except NotOwner:
        found = status_of(options.path, None, options.stale or None, options.policy)
        code, text, answer = HELD, "", _more(found, {"released": False, "locked": True})
        if not options.json:
            output.complain(f"holdfast release: {output.shown(options.path)}: {output.shown(found.explain())}")
            output.complain(_way_out(found))
    if options.json:
        output.say_json(answer)
    elif text and not options.quiet:
        output.say(text)
    return code


def _caller(lock: LockFile) -> int:
    """The process that called us. A shell may become its last command, which is then in its own caller's place."""
    found = lock.examine()
    if found is not None and found.record is not None and found.record.pid == os.getpid() and found.alive:
        return os.getpid()
    return os.getppid()


def _way_out(found: Status) -> str:
    if found.kind not in ("file", "task"):
        return "A kernel lock cannot be taken away; it is free when the process that holds it has ended."
    return "-f releases it anyway. holdfast break also prints whose lock it was."


def status(options: argparse.Namespace) -> int:
    facts = _facts(options)
    path = facts["path"] if arguments.is_url(options.path) else options.path
    if options.json:
        output.say_json(_as_json(facts))
    elif not options.quiet:
        output.say("\n".join(_lines(path, facts)))
    return HELD if facts["held"] else 0


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """The status as a dictionary, with those of the first holder: pid, host, command.

    Of a lock file for which nobody queues, without `Status`: to import dataclasses takes as long as all the rest.
    """
    if arguments.is_url(options.path):
        from . import servers

        if options.kind is not None:
            raise ValueError("--kind does not go with a URL: its scheme names the kind. Leave it out.")
        return servers.facts(options.path)
    kind = options.kind or kind_of(options.path) or "file"
    lock = lock_of(options)
    if kind == "file" and not os.path.isdir(os.path.realpath(lock.path) + ".queue"):
        found = lock.examine()
        rest: dict[str, Any] = {"held": False} if found is None else {"held": True, **found.facts()}
        holder = {name: rest.get(name) for name in ("pid", "host", "command")}
        holders = [holder] if rest.get("pid") is not None else []
        return {"path": lock.path, "kind": "file", "holders": holders, "waiters": (), "permits": None, **rest}
    status = status_of(options.path, kind, options.stale or None, options.policy)
    facts = status.as_dict()
    first = status.holders[0] if status.holders else None
    return facts | {name: getattr(first, name, None) for name in ("pid", "host", "command")}


def _as_json(facts: dict[str, Any]) -> dict[str, object]:
    """The keys of sema first: pid, timestamp and tag are there, null or not, whenever it is locked."""
    if not facts["held"]:
        taken = {name: facts[name] for name in ("permits", "holders", "waiters")} if facts["permits"] else {}
        return {"locked": False, "path": facts["path"], "kind": facts["kind"], **taken}
    first = {"locked": True, "pid": facts["pid"], "timestamp": _timestamp(facts), "tag": facts["tag"]}
    return first | {key: value for key, value in facts.items() if key not in first and key != "held"}


def _timestamp(facts: dict[str, Any]) -> int | None:
    """As the file has it; of a kernel lock, since when it is held."""
    found = facts["since"] if facts["timestamp"] is None else facts["timestamp"]
    return None if found is None else int(found)


def _more(found: Status, first: dict[str, object]) -> dict[str, object]:
    """What an answer of JSON has after the keys that are its own."""
    return first | {key: value for key, value in found.as_dict().items() if key not in first and key != "held"}


def _lines(path: str, facts: dict[str, Any]) -> list[str]:
    if not facts["held"]:
        lines = ["Lock status: FREE", f"  Path: {output.shown(path)}"]
        if facts["permits"]:
            lines.append(f"  Kind: semaphore of {facts['permits']}, {len(facts['holders'])} taken")
            lines.append(f"  Holders: {', '.join(str(holder['pid']) for holder in facts['holders'])}")
        return lines
    lines = ["Lock status: LOCKED", f"  Path: {output.shown(path)}"]
    if facts["corrupt"]:
        lines.append(f"  Record: corrupt. {_CORRUPT}")
    if facts["pid"] is not None:
        lines.append(f"  PID: {facts['pid']}")
    if _timestamp(facts) is not None:
        lines.append(f"  Timestamp: {_timestamp(facts)}")
    if facts["tag"] is not None:
        lines.append(f"  Tag: {output.shown(facts['tag'])}")
    if facts["pid"] is not None:
        lines.append(f"  Process running: {_running(facts)}")
    return lines + _own_lines(facts)


def _running(facts: dict[str, Any]) -> str:
    if facts["alive"] is not None:
        return "yes" if facts["alive"] else "no"
    if facts["host"] is not None:
        return "unknown"
    return "yes" if system.process_exists(facts["pid"]) else "no"


def _kind(facts: dict[str, Any]) -> str:
    names = {"lock": "kernel lock", "task": "lock of a task"}
    if facts["kind"] in names:
        return names[facts["kind"]]
    name = f"semaphore of {facts['permits']}" if facts["permits"] else "lock"
    return name if facts["kind"] == "semaphore" else f"{name}, {facts['kind']}"


def _own_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    holders = facts.get("holders", ())
    if facts["kind"] != "file":
        lines.append(f"  Kind: {_kind(facts)}")
    if len(holders) > 1:
        lines.append(f"  Holders: {', '.join(str(holder['pid']) for holder in holders)}")
    if facts["command"]:
        lines.append(f"  Command: {output.shown(output.shortened(facts['command'], 200))}")
    if facts["host"]:
        lines.append(f"  Host: {output.shown(facts['host'])}")
    if facts["since"] is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["since"]))
        lines.append(f"  Held for: {output.duration(time.time() - facts['since'])}, since {since}")
    if facts["token"] is not None:
        lines.append(f"  Token: {facts['token']}")
    if facts["stale"]:
        lines.append("  Stale: yes; the next process that acquires it takes it over")
    elif facts["stale_in"] is not None:
        lines.append(f"  Stale: in {output.duration(facts['stale_in'])}, unless it is renewed")
    if facts["waiters"]:
        lines.append(f"  Waiting: {', '.join(str(waiter['pid']) for waiter in facts['waiters'])}")
    return lines
