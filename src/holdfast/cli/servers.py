"""Locks on servers: what the commands do if they get a URL instead of a path.

`holdfast run URL` has no descriptor that a command could inherit. So the kernel kills the command if this process is
killed (`supervise`), and the token is the remedy for what the command has started itself.

Every name that is printed is a URL without its password.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from time import monotonic, sleep

from ..collect.locks import locks_on, status_on
from ..errors import Timeout, Unsupported
from ..locks.url import ServerLock
from ..owner import hide_passwords
from . import arguments
from .progress import Progress, busy
from .run import Child, refuse_deadlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any, NoReturn

    from ..locks.server import ServerHold

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0
_REASONS = {
    **dict.fromkeys(
        ("try", "acquire", "release"),
        "a lock on a server belongs to a running process, and this command ends at once. Use: holdfast run URL -- "
        "COMMAND",
    ),
    "break": "the server has no record to remove while the holder lives. End the holder, which holdfast status URL "
    "names, and the server releases the lock",
    "clean": "the server removes the locks of holders that have died by itself. There is nothing to clean",
}


def refuse(command: str, url: str) -> NoReturn:
    """Raise the reason why a command does not take a URL."""
    raise Unsupported(f"{hide_passwords(url)}: {_REASONS[command]}.")


# run


def run(options: argparse.Namespace, command: list[str], timeout: float | None) -> int:
    lock = _lock(options)
    _block_signals_in_threads()
    _set_handlers()
    try:
        hold = _acquire(lock, timeout, options)
    except Timeout as error:
        raise busy(lock.name, error.status, timeout or 0, options.busy_code) from None
    return ServerChild(hold, options).run(command)


def _lock(options: argparse.Namespace) -> ServerLock:
    wrong = {
        "--lock-file": options.lock_file and "a lock on a server has no file",
        "--keep": options.keep and "a lock on a server has no file to keep",
        "--tag": options.tag is not None and "only a lock file has a tag",
        "--stale": options.stale is not None and "--ttl is the time after which a server releases a lock",
        "--no-fair": not options.fair and "the server decides the order of its waiters",
    }
    for option, reason in wrong.items():
        if reason:
            raise ValueError(f"{option} does not go with a URL: {reason}. Leave it out.")
    return ServerLock(
        options.target, shared=options.shared, permits=options.permits, ttl=options.ttl, on_lost=_wake_supervisor
    )


def _wake_supervisor(_: object) -> None:
    """The supervisor waits for signals, and looks at the lock when it receives this one."""
    if hasattr(signal, "SIGIO"):
        os.kill(os.getpid(), signal.SIGIO)


def _acquire(lock: ServerLock, timeout: float | None, options: argparse.Namespace) -> ServerHold:
    if timeout == 0:
        return lock.acquire(0)
    if (hold := lock.try_acquire()) is not None:
        return hold
    refuse_deadlock(lock)
    with Progress(lock, options):
        return lock.acquire(timeout)


def _block_signals_in_threads() -> None:
    """Let the kernel send the signals of this process to the main thread only.

    The supervisor blocks signals and waits for them. A thread that does not block them would receive them instead, and
    SIGTERM would end this process. A thread inherits the mask of the thread that starts it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return
    start = threading.Thread.start

    def start_blocked(thread: threading.Thread) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            start(thread)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    threading.Thread.start = start_blocked  # type: ignore[method-assign, assignment]


def _set_handlers() -> None:
    """Let SIGTERM and SIGHUP unwind a wait, so that this process leaves the queue of the server at once.

    SIGIO, which would end the process, does nothing before and after the supervisor waits for it.
    """

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, end)
    if hasattr(signal, "SIGIO"):
        signal.signal(signal.SIGIO, lambda *_: None)


class ServerChild(Child):
    """The command, while a lock on a server is held for it."""

    on_server = True

    def inherited(self) -> tuple[int, ...]:
        return ()


# status, wait, ls, top


def facts(url: str) -> dict[str, Any]:
    """The status as a dictionary, with the pid, host and command of the first holder."""
    status = status_on(url)
    first = status.holders[0] if status.holders else None
    return status.as_dict() | {name: getattr(first, name, None) for name in ("pid", "host", "command")}


def wait(options: argparse.Namespace, deadline: float | None) -> None:
    """Wait until the lock is free, or with --all until all locks of the server are. Raises Timeout."""
    if options.all:
        _wait(options, deadline)
        return
    with Progress(ServerLock(options.path), options, only_live=True):
        _wait(options, deadline)


def _wait(options: argparse.Namespace, deadline: float | None) -> None:
    pause = _FIRST_PAUSE_S
    while True:
        found = locks_on(options.path) if options.all else [status_on(options.path)]
        held = next((status for status in found if status.held), None)
        if held is None:
            return
        left = pause if deadline is None else deadline - monotonic()
        if left <= 0:
            error = Timeout(f"{held.path}: not free within {arguments.timeout_of(options):g} s", path=held.path)
            error.status = held
            raise error
        sleep(min(pause, left))
        pause = min(2 * pause, _MAX_PAUSE_S)
