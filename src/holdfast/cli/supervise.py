"""Waiting for a child, for signals to pass on to it, and for the loss of its lock, all in one place: sigtimedwait.

The signals stay blocked, so none is lost between two calls. One from the terminal goes to the whole foreground group,
to the child too, and is not passed on a second time; the kernel says where each comes from. Events on the lock's file
arrive as SIGIO.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from time import monotonic

from .. import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .run import Child

LOST = 76
_PASSED_ON = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGWINCH")
    if hasattr(signal, name)
}
# Python ignores these; the command should not.
_RESET = [signal.SIGPIPE, signal.SIGXFSZ]
_LOOK = 1.0  # seconds between looks where the file system tells of no events
_SAFETY_LOOK = 10.0


def supervise(child: Child, command: list[str]) -> int:
    waited_for = {*_PASSED_ON, signal.SIGCHLD, signal.SIGIO}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    watch = None
    try:
        pid = _spawn(child, command, before)
        watch = _watch(child.path)
        return _wait(child, pid, waited_for, _LOOK if watch is None else _SAFETY_LOOK, watch)
    finally:
        if watch is not None:
            watch.close()
        # What came after the child had ended is for nobody.
        while signal.sigtimedwait(waited_for, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(child: Child, command: list[str], mask: set[int]) -> int:
    fds = child.inherited()
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawnp(command[0], command, child.environment(), setsigmask=mask, setsigdef=_RESET)
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def _watch(path: str) -> system.Watch | None:
    """Have the kernel send SIGIO when something happens to the file."""
    try:
        watch = system.Watch(os.path.realpath(path))
    except OSError:
        return None
    try:
        fcntl.fcntl(watch.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(watch.fd, fcntl.F_SETFL, fcntl.fcntl(watch.fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        watch.close()
        return None
    return watch


def _wait(child: Child, pid: int, waited_for: set[signal.Signals], look: float, watch: system.Watch | None) -> int:
    kill_at = None  # when patience with a child that was told to end is over
    look_next = 0.0  # at once: it may have been lost before we watched
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return LOST if kill_at is not None else code if code >= 0 else 128 - code
        patience = look_next if kill_at is None else max(0.0, kill_at - monotonic())
        look_next = look
        came = signal.sigtimedwait(waited_for, patience)
        if came is not None and came.si_signo in _PASSED_ON:
            if came.si_code <= 0:  # sent by a process, and not by the kernel to the whole group
                _send(pid, came.si_signo)
        elif came is not None and came.si_signo == signal.SIGCHLD:
            pass
        elif kill_at is not None:
            if monotonic() >= kill_at:
                _send(pid, signal.SIGKILL)
                kill_at = sys.maxsize
        else:
            if watch is not None:
                watch.drain()
            if child.is_lost():
                child.say_lost("the lock was taken away; ending the command")
                _send(pid, signal.SIGTERM)
                kill_at = monotonic() + child.grace


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
