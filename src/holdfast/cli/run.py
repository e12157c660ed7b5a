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
from .failures import NOT_EXECUTABLE, NOT_FOUND, RUN_LOST, Failure, deadlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from ..locks.base import BaseLock
    from ..locks.hold import Hold

_HOLDERS = "HOLDFAST_RUN_PIDS"  # of the `holdfast run` commands around a command
_NO_LOCK = (
    "is a directory, a device or a file with content of its own; it was left untouched. Give the lock a path of its own"
)

EPILOG = f"""\
{arguments.URLS}
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
    parser.epilog = EPILOG
    parser.add_argument("target", metavar="TARGET", help="the path of the lock, or the URL of a lock on a server")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "-s", "--shared", action="store_true", help="a shared lock: any number of sharers at the same time"
    )
    mode.add_argument("-x", "--exclusive", action="store_true", help="an exclusive lock: one holder (the default)")
    permits = "a semaphore: at most N holders at a time"
    mode.add_argument("-j", "--permits", metavar="N", type=arguments.at_least_one, help=permits)
    mode.add_argument("--lock-file", action="store_true", help="a lock file, which names its holder, not a kernel lock")
    arguments.add_wait(parser)
    arguments.add_busy_status(parser)
    parser.add_argument("--no-fair", dest="fair", action="store_false", help="do not serve waiters in order of arrival")
    parser.add_argument("--keep", action="store_true", help="leave the file of a kernel lock in place")
    parser.add_argument("--tag", help="a text about the holder (--lock-file)")
    stale = "time until the lock of a holder that cannot be checked is stale (1h; 0: never; --lock-file)"
    parser.add_argument("--stale", metavar="TIME", type=arguments.time, help=stale)
    ttl = "time until a server releases the lock of a vanished holder (10s)"
    parser.add_argument("--ttl", metavar="TIME", type=arguments.time, help=ttl)
    arguments.add_command(parser)
    arguments.add_json(parser, "print errors as JSON, and messages on stderr as JSON lines")
    arguments.add_quiet(parser)
    arguments.add_verbose(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    command = arguments.command_of(options)
    timeout = arguments.timeout_of(options)
    if arguments.is_url(options.target):
        from . import servers

        return servers.run(options, command, timeout)
    return Child(acquire(_lock(options), timeout, options), options).run(command)


def _lock(options: argparse.Namespace) -> BaseLock[Any]:
    if options.ttl is not None:
        raise ValueError("--ttl is for locks on servers, and this is a path: leave it out")
    if options.lock_file:
        if options.keep:
            raise ValueError("--keep is for kernel locks: it does not go with --lock-file")
        from .. import LockFile

        # Renewed below, by the loop that waits for the child: no thread that signals could go to.
        stale_after = 3600.0 if options.stale is None else options.stale or None
        return LockFile(options.target, tag=options.tag, stale_after=stale_after, fair=options.fair)
    if options.tag is not None or options.stale is not None:
        raise ValueError("--tag and --stale are for lock files: add --lock-file")
    if options.permits is not None:
        if options.keep:
            raise ValueError("--keep does not go with -j: the file of a semaphore is removed with its last holder")
        from .. import Semaphore

        return Semaphore(options.target, options.permits, fair=options.fair)
    return Lock(options.target, shared=options.shared, fair=options.fair, keep=options.keep)


def acquire(lock: BaseLock[Any], timeout: float | None, options: argparse.Namespace) -> Hold:
    """Acquire a lock for a command, and show a wait. Raises Failure if the lock stays busy."""
    try:
        hold: Hold | None = lock.try_acquire()
    except NotALockFile:
        raise _other_kind(lock.name) from None
    if hold is not None:
        return hold
    from .progress import Progress, busy

    try:
        if timeout != 0:
            refuse_deadlock(lock)
        with Progress(lock, options):
            return lock.acquire(timeout)  # type: ignore[no-any-return]
    except Timeout as error:
        raise busy(lock.name, error.status, timeout or 0, options.busy_code) from None


def refuse_deadlock(lock: BaseLock[Any]) -> None:
    """Raise WouldDeadlock if a `holdfast run` or `dir` holds the lock whose command we are a part of.

    An ancestor that is another program may release its lock without waiting for us.
    """
    enclosing = {int(word) for word in os.environ.get(_HOLDERS, "").split() if word.isdecimal()}
    if not enclosing:
        return
    enclosing &= _ancestors()
    status = lock.status()
    ours = [holder.pid for holder in status.holders if holder.host is None and holder.pid in enclosing]
    if status.held and ours and (status.permits is None or len(ours) >= status.permits):
        raise deadlock(lock.name, ours[0] or 0, status)


def _ancestors() -> set[int]:
    """The parent of this process, its parent and so on, as far as this system shows them."""
    found = {os.getppid()}
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            break
        found.add(pid)
    return found


def _other_kind(path: str) -> NotALockFile:
    """What to say about a file that is not that of such a lock."""
    from ..collect.kinds import kind_of

    advice = {
        "semaphore": "is a semaphore: give -j and the number of its permits",
        "file": "is a lock file: give --lock-file",
        "lock": "is a kernel lock, and held: leave out --lock-file and -j",
    }.get(kind_of(path) or "", _NO_LOCK)
    return NotALockFile(f"{path} {advice}", path=path)


class Child:
    """The command, while the lock is held for it."""

    on_server = False  # then the kernel kills the command if this process dies, and there is no file to watch

    def __init__(self, hold: Hold, options: argparse.Namespace) -> None:
        self._hold = hold
        self._options = options
        self._renews = getattr(options, "lock_file", False)
        self._was_lost = False
        self.grace: float = options.grace

    def run(self, command: list[str]) -> int:
        """Run the command and release the lock. Returns the exit status of the command. Raises Failure."""
        self._note("acquired")
        try:
            status = self.run_only(command)
        finally:
            released = self._release()
        self._note("released")
        if self._was_lost or not released:
            text = f"{self.path}: the lock was lost while the command ran. Another process may hold it now"
            raise Failure(RUN_LOST, text, text="" if self._was_lost else None, path=self.path)
        return status

    def _release(self) -> bool:
        """False: the lock was lost before."""
        try:
            self._hold.release()
        except LockLost:
            return False
        except OSError as error:
            output.complain(f"holdfast: {output.shown(self.path)}: the lock file was not removed: {error.strerror}")
        except ConnectionFailed as error:
            text = output.shown(without_passwords(str(error)))
            output.complain(f"holdfast: the lock was not released: {text} The server releases it when it expires.")
        return True

    def run_only(self, command: list[str]) -> int:
        supervise = _by_signals if hasattr(os, "posix_spawn") and sys.platform == "linux" else _simply
        try:
            return supervise(self, command)
        except FileNotFoundError:
            raise Failure(NOT_FOUND, f"{command[0]}: no such command", silenced=False, path=self.path) from None
        except PermissionError:
            raise Failure(NOT_EXECUTABLE, f"{command[0]}: not executable", silenced=False, path=self.path) from None
        except OSError as error:
            raise Failure(NOT_EXECUTABLE, f"{command[0]}: {error.strerror}", silenced=False, path=self.path) from None

    def environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != "HOLDFAST_TOKEN"}
        environment[_HOLDERS] = f"{os.environ.get(_HOLDERS, '')} {os.getpid()}".lstrip()
        if self._hold.token is not None:
            environment["HOLDFAST_TOKEN"] = str(self._hold.token)
        return environment

    def inherited(self) -> tuple[int, ...]:
        return () if self._options.close else (self._hold.fileno(),)

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
    def path(self) -> str:
        return self._hold.lock.name

    def end_for_loss(self) -> None:
        """Say that the command is being ended."""
        self._was_lost = True
        if self._options.json:
            output.say_json({"event": "lost", "path": self.path}, to_stderr=True)
        elif not self._options.quiet:
            text = "the lock was lost; ending the command. Another process may hold it now"
            output.complain(f"holdfast run: {output.shown(self.path)}: {text}")

    def _note(self, what: str) -> None:
        if getattr(self._options, "verbose", False):
            output.note(self.path, what, json=self._options.json)


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
                child.end_for_loss()
                process.terminate()
                try:
                    process.wait(child.grace)
                except subprocess.TimeoutExpired:
                    process.kill()
                return RUN_LOST
