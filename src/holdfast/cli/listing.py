"""`holdfast ls`: every lock in some directories and on some servers, of all kinds, and its state."""

from __future__ import annotations

import os
import time

from ..errors import HoldfastError
from ..owner import without_passwords
from . import arguments, output
from .kinds import kernel_locked_inodes, kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from ..status import Status

EXAMPLES = """\
exit status: 0, or 3 if a directory or a server cannot be read

examples:
  holdfast ls
  holdfast ls -r /tmp
  holdfast ls --held --json /tmp
"""
_HEADINGS = ("STATE", "KIND", "AGE", "WAITING", "PID", "USER", "LOCK", "HOLDER")


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{arguments.URLS}Without a name: all locks of the server (not on SMB).\n\n{EXAMPLES}"
    what = "directories, or URLs of servers"
    parser.add_argument("directories", metavar="DIR", nargs="*", default=["."], type=arguments.looked_at, help=what)
    parser.add_argument("-r", "--recursive", action="store_true", help="subdirectories, too")
    parser.add_argument("--held", action="store_true", help="only locks that are held")
    arguments.add_json(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    code, everything = 0, []
    for directory in options.directories:
        try:
            everything += all_locks([directory], options.recursive)
        except OSError as error:
            output.complain(f"holdfast ls: {output.shown(directory)}: {error.strerror}")
            code = 3
        except HoldfastError as error:
            output.complain(f"holdfast ls: {output.shown(without_passwords(str(error)))}")
            code = 3
    found = [status for status in everything if status.held or not options.held]
    if options.json:
        output.say_json([as_json(status) for status in found])
        return code
    if not found:
        if code:
            return code
        output.complain("no locks here" if options.recursive else "no locks here (-r also lists subdirectories)")
        return 0
    output.table(_HEADINGS, [_row(status) for status in found], [_colour(status) for status in found])
    return code


def _colour(status: Status) -> str:
    if status.stale or status.corrupt:
        return output.YELLOW
    return output.GREEN if status.held else output.DIM


def state_of(status: Status) -> str:
    if not status.held:
        return "free"
    if status.stale:
        return "stale"
    if status.corrupt:
        return "corrupt"
    is_lock = status.permits is None and status.kind not in ("file", "task")
    return "shared" if is_lock and any(holder.shared for holder in status.holders) else "held"


def kind_name(status: Status) -> str:
    if status.kind == "semaphore":
        return f"{len(status.holders)} of {status.permits}"
    if status.permits is not None:
        return f"{status.kind}, {len(status.holders)} of {status.permits}"
    return "kernel" if status.kind == "lock" else status.kind


def _row(status: Status) -> tuple[str, ...]:
    return (
        state_of(status),
        kind_name(status),
        age_of(status),
        str(len(status.waiters) or "-"),
        pids_of(status),
        user_of(status),
        output.shown(relative(status.path)),
        output.shown(who(status)),
    )


def relative(path: str) -> str:
    if arguments.is_url(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def age_of(status: Status) -> str:
    return "-" if not status.held or status.since is None else output.duration(time.time() - status.since)


def pids_of(status: Status) -> str:
    pids = [str(holder.pid) for holder in status.holders if holder.pid is not None]
    return "-" if not pids else pids[0] + (f"+{len(pids) - 1}" if len(pids) > 1 else "")


def user_of(status: Status) -> str:
    for holder in status.holders:
        if holder.pid is not None and holder.host is None:
            return owner_of(holder.pid) or "-"
    return "-"


def owner_of(pid: int) -> str | None:
    """The user whose process this is."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        from pwd import getpwuid

        return getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def who(status: Status) -> str:
    """The holder's tag, host and command, in few words."""
    if status.corrupt:
        return "empty or damaged" + ("" if status.stale else "; held until it is old")
    parts = [f"[{output.shortened(status.tag, 40)}]"] if status.tag else []
    for holder in status.holders[:1]:
        if holder.host:
            parts.append(f"on {holder.host}")
        if holder.command:
            parts.append(output.shortened(holder.command, 60))
    return " ".join(parts)


def as_json(status: Status) -> dict[str, object]:
    return {"state": state_of(status), **status.as_dict(), "user": None if user_of(status) == "-" else user_of(status)}


# Finding them.


def all_locks(
    directories: list[str], recursive: bool, *, quiet: bool = False, stop: Callable[[], bool] = lambda: False
) -> list[Status]:
    """`quiet`: no word about directories that cannot be read. `stop` is asked for every file."""
    locked = kernel_locked_inodes()
    found: list[Status] = []
    for directory in directories:
        if arguments.is_url(directory):
            from .servers import locks_on

            found += locks_on(directory)
            continue
        for path in candidates(directory, recursive, quiet=quiet):
            if stop():
                return found
            status = status_at(path, locked)
            if status is not None:
                found.append(status)
    return found


def candidates(directory: str, recursive: bool, *, quiet: bool = False) -> Iterator[str]:
    """The regular files in a directory, or the file itself if it is one."""
    if not os.path.isdir(directory) and os.path.lexists(directory):
        yield directory
        return
    pending = [directory]
    while pending:
        here = pending.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            if here == directory:
                raise
            if not quiet:
                output.complain(f"holdfast: {output.shown(here)}: {error.strerror}")
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if recursive and not entry.name.endswith(".queue"):
                    pending.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield os.path.normpath(entry.path)


def status_at(path: str, locked: set[int]) -> Status | None:
    """The status of the lock at a path, or None if there is none."""
    from .sema import status_of

    try:
        kind = kind_of(path, locked)
        if kind is None:
            return None
        return status_of(path, kind, 3600, "proof")
    except (OSError, HoldfastError):
        return None  # gone, or not ours to read
