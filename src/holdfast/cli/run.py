"""`holdfast run`: hold a lock while a command runs.

The child inherits the descriptor that carries the lock, so that it keeps the lock if this process is killed; and when
the child has ended, the lock is released by name, so that a grandchild in the background does not keep it.

A lock on a server is held by this process alone. See `servers`.
"""

from __future__ import annotations

import os
import sys

from .. import Lock
from ..errors import ConnectionFailed, LockLost, NotALockFile, Timeout
from ..owner import without_passwords
from . import arguments, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from ..locks.base import BaseLock
    from ..locks.hold import Hold

BUSY, LOST, MISUSE, FAILURE = 75, 76, 64, 66
NOT_EXECUTABLE, NOT_FOUND = 126, 127

EXAMPLES = """\
exit status: that of the command, 128 + n if signal n ended it; 75 busy or timed out (-E changes it), 76 the lock was
lost, 64 wrong usage, 66 the lock cannot be used, 126 and 127 the command cannot be run, 130 interrupted while waiting

examples:
  holdfast run /tmp/build.lock -- make -j4
  holdfast run -n /tmp/nightly.lock -- sleep 1 || echo "another one runs"
  holdfast run -w 2.5 -s /tmp/data.lock -- sort /etc/passwd
  holdfast run -j 4 /tmp/gpu.sem -- echo one of four
  holdfast run /tmp/x.lock -c 'date; sleep 1'
"""


def configure(name: str, parser: arguments.Parser) -> None:
    parser.usage = "holdfast run TARGET [options] -- COMMAND …\n       holdfast run TARGET [options] -c 'SHELL LINE'"
    parser.epilog = f"{arguments.URLS}\n{EXAMPLES}"
    parser.misuse, parser.failure, parser.takes_command = MISUSE, FAILURE, True
    parser.add_argument("target", metavar="TARGET", help="the path of the lock, or the URL of a lock on a server")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "-s", "--shared", action="store_true", help="a shared lock: any number of sharers at the same time"
    )
    mode.add_argument("-x", "--exclusive", action="store_true", help="an exclusive lock: one holder (the default)")
    mode.add_argument(
        "-j", "--permits", metavar="N", type=int, help="a semaphore with N permits: N holders at the same time"
    )
    add_waiting(parser)
    parser.add_argument("-o", "--close", action="store_true", help="do not let the command inherit the lock")
    parser.add_argument("-c", dest="line", metavar="LINE", help="run this line with the shell")
    parser.add_argument("--fair", action="store_true", default=True, help="first come, first served (the default)")
    parser.add_argument("--no-fair", dest="fair", action="store_false", help="in any order")
    parser.add_argument("--keep", action="store_true", help="leave the file of a kernel lock in place")
    parser.add_argument("--kind", choices=("lock", "file"), default="lock", help="kernel lock, or sema lock file")
    parser.add_argument("--tag", help="a text about the holder (--kind file)")
    parser.add_argument(
        "--stale",
        metavar="S",
        type=arguments.seconds,
        default=3600.0,
        help="seconds until a lock is old (3600; --kind file)",
    )
    parser.add_argument(
        "--ttl",
        metavar="S",
        type=arguments.seconds,
        help="seconds until a server releases a vanished holder's lock (10)",
    )
    parser.add_argument(
        "--grace",
        metavar="S",
        type=arguments.seconds,
        default=10.0,
        help="seconds from SIGTERM to SIGKILL if the lock is lost (10)",
    )
    parser.add_argument("--json", action="store_true", help="print messages on stderr as JSON lines")
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


def add_waiting(parser: argparse.ArgumentParser) -> None:
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument("-n", "--no-wait", "--nonblock", action="store_true", help="do not wait")
    waiting.add_argument(
        "-w", "--timeout", "--wait", metavar="S", type=arguments.seconds, help="wait at most this many seconds"
    )
    parser.add_argument(
        "-E", "--busy-code", metavar="N", type=arguments.exit_status, default=BUSY, help="exit status if busy (75)"
    )


def call(options: argparse.Namespace) -> int:
    command = command_of(options)
    if arguments.is_url(options.target):
        from . import servers

        return servers.run(options, command)
    lock = _lock(options)
    hold = acquire(lock, 0 if options.no_wait else options.timeout, options)
    if hold is None:
        return int(options.busy_code)
    return Child(hold, options).run(command)


def command_of(options: argparse.Namespace) -> list[str]:
    if options.line is not None:
        if options.command:
            raise ValueError("give a command or -c, not both")
        return [os.environ.get("SHELL") or "/bin/sh", "-c", options.line]
    if not options.command:
        raise ValueError("which command? Put it after --")
    return list(options.command)


def _lock(options: argparse.Namespace) -> BaseLock[Any]:
    if options.ttl is not None:
        raise ValueError("--ttl is for locks on servers, and this is a path: leave it out")
    if options.kind == "file":
        if options.shared or options.permits is not None:
            raise ValueError("a lock file has one holder: --kind file goes with neither -s nor -j")
        from .. import LockFile

        # Renewed below, by the loop that waits for the child: no thread that signals could go to.
        return LockFile(options.target, tag=options.tag, stale_after=options.stale or None, fair=options.fair)
    if options.tag is not None:
        raise ValueError("only a lock file has a tag: add --kind file")
    if options.permits is not None:
        from .. import Semaphore

        return Semaphore(options.target, options.permits, fair=options.fair)
    return Lock(options.target, shared=options.shared, fair=options.fair, keep=options.keep)


def acquire(lock: BaseLock[Hold], timeout: float | None, options: argparse.Namespace) -> Hold | None:
    try:
        hold = lock.try_acquire()
    except NotALockFile:
        raise _other_kind(lock.name) from None
    if hold is not None:
        return hold
    from .progress import Progress, in_the_way

    try:
        if timeout == 0:
            return lock.acquire(0)
        with Progress(lock, quiet=options.quiet, json=options.json):
            return lock.acquire(timeout)
    except Timeout as error:
        if not options.quiet:
            in_the_way(lock.name, error.status, timeout or 0, json=options.json)
        return None


def _other_kind(path: str) -> NotALockFile:
    """What to say about a file that is not that of such a lock."""
    from ..collect.kinds import kind_of

    advice = {
        "semaphore": "is a semaphore: give -j and the number of its permits",
        "file": "is a lock file: give --kind file",
        "lock": "is a kernel lock, and held: leave out --kind and -j",
    }.get(kind_of(path) or "", "is a directory, a device or a file with content of its own; it was left untouched")
    return NotALockFile(f"{path} {advice}", path=path)


class Child:
    """The command, while the lock is held for it."""

    on_server = False  # then the kernel kills the command if this process dies, and there is no file to watch

    def __init__(self, hold: Hold, options: argparse.Namespace) -> None:
        self._hold = hold
        self._close: bool = options.close
        self._grace: float = options.grace
        self._json: bool = options.json
        self._quiet: bool = options.quiet
        self._renews = getattr(options, "kind", None) == "file"

    def run(self, command: list[str]) -> int:
        """Run the command and release the lock. Gives the exit status."""
        status = self.run_only(command)
        try:
            self._hold.release()
        except LockLost:
            if status != LOST:
                self.say_lost("the lock was lost while the command ran")
            return LOST
        except OSError as error:
            output.complain(f"holdfast: {output.shown(self.path)}: the lock file was not removed: {error.strerror}")
        except ConnectionFailed as error:
            text = output.shown(without_passwords(str(error)))
            output.complain(f"holdfast: the lock was not released: {text} The server releases it when it expires.")
        return status

    def run_only(self, command: list[str]) -> int:
        supervise = _by_signals if hasattr(os, "posix_spawn") and sys.platform == "linux" else _simply
        try:
            return supervise(self, command)
        except FileNotFoundError:
            output.complain(f"holdfast: {output.shown(command[0])}: no such command")
            return NOT_FOUND
        except PermissionError:
            output.complain(f"holdfast: {output.shown(command[0])}: not executable")
        except OSError as error:
            output.complain(f"holdfast: {output.shown(command[0])}: {error.strerror}")
        return NOT_EXECUTABLE

    def environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != "HOLDFAST_TOKEN"}
        if self._hold.token is not None:
            environment["HOLDFAST_TOKEN"] = str(self._hold.token)
        return environment

    def inherited(self) -> tuple[int, ...]:
        return () if self._close else (self._hold.fileno(),)

    def is_lost(self) -> bool:
        try:
            if self._hold.lost:
                return True
            if self._renews:
                self._hold.renew()  # type: ignore[attr-defined]
        except LockLost:
            return True
        except OSError:
            pass  # the path cannot be reached now: look again later
        return False

    @property
    def grace(self) -> float:
        return self._grace

    @property
    def path(self) -> str:
        return self._hold.lock.name

    def say_lost(self, what: str) -> None:
        if self._json:
            output.say_json({"event": "lost", "path": self.path}, to_stderr=True)
        elif not self._quiet:
            output.complain(f"holdfast: {output.shown(self.path)}: {what}. Another process may hold it now")


def _by_signals(child: Child, command: list[str]) -> int:
    from .supervise import supervise

    return supervise(child, command)


def _simply(child: Child, command: list[str]) -> int:
    """Where signals cannot be waited for: a look every second."""
    import signal
    import subprocess

    fds = child.inherited()
    inherit: dict[str, Any] = {"pass_fds": fds} if os.name == "posix" else {"close_fds": not fds}
    with subprocess.Popen(command, env=child.environment(), **inherit) as process:
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda number, _: process.send_signal(number))
        while True:
            try:
                status = process.wait(1.0)
                return status if status >= 0 else 128 - status
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                continue  # the child has got it too, and decides
            if child.is_lost():
                child.say_lost("the lock was lost; ending the command")
                process.terminate()
                try:
                    process.wait(child.grace)
                except subprocess.TimeoutExpired:
                    process.kill()
                return LOST
