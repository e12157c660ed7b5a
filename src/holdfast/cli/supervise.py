"""Waiting for a child, for signals to pass on to it, and for the loss of its lock, all in one place: sigtimedwait.

The signals stay blocked, so none is lost between two calls. One from the terminal goes to the whole foreground group,
to the child too, and is not passed on a second time; the kernel says where each comes from. Events on the lock's file
arrive as SIGIO. The thread that renews a lock on a server sends SIGIO when the lock is lost.

The command of a lock on a server cannot inherit the lock. The kernel kills it when this process dies, with the signal
that the command asks for between fork and exec (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import fcntl
import os
import signal
from math import inf
from time import monotonic

from .. import system
from ..files import InheritedFd, OwnedFd, pipe
from .failures import RUN_LOST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .run import Child

_PASSED_ON = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGWINCH")
    if hasattr(signal, name)
}
# The kernel sends these to all of the terminal's foreground group.
_FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH}
# Python ignores these; the command should not.
_RESET = [signal.SIGPIPE, signal.SIGXFSZ]
# A command that ends in a moment needs no watch, whose making and closing would take longer than the command itself.
_A_MOMENT = 0.05  # seconds
_LOOK = 1.0  # seconds between looks where the file system tells of no events
_SAFETY_LOOK = 10.0
_LONGEST = 1e6  # what the system can wait for
_PR_SET_PDEATHSIG = 1


def supervise(child: Child, command: list[str]) -> int:
    """Run the command and wait for it. Gives its exit status, or 76."""
    signals = {*_PASSED_ON, signal.SIGCHLD, signal.SIGIO}
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored by some who start us, and then nobody gets to know how it ended
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        return _Supervisor(child, _spawn(child, command, before), signals).run()
    finally:
        # What came after the child had ended is for nobody.
        while signal.sigtimedwait(signals, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(child: Child, command: list[str], mask: set[int]) -> int:
    if child.on_server:
        return _spawn_bound(command, child.environment(), mask)
    fds = child.inherited()
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawnp(command[0], command, child.environment(), setsigmask=mask, setsigdef=_RESET)
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def _spawn_bound(command: list[str], environment: dict[str, str], mask: set[int]) -> int:
    """Start a command that the kernel kills when this process dies.

    posix_spawn cannot do that, and a program in between (setpriv) is not everywhere. Other threads run here, so the
    child calls nothing between fork and exec that may wait for one of them.
    """
    import ctypes
    import warnings

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()
    failed, report = pipe(writer=InheritedFd)  # closed by exec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the other threads
        pid = os.fork()
    if pid == 0:
        try:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:  # else it has died already
                _reset_signals(mask)
                os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(report.fd, str(error.errno).encode())
        finally:
            os._exit(1)
    report.close()
    with failed:
        number = int(os.read(failed.fd, 16) or 0)
    if number:
        os.waitpid(pid, 0)
        raise OSError(number, os.strerror(number))
    return pid


def _reset_signals(mask: set[int]) -> None:
    """Handlers of Python end with exec. A signal that comes before that must do what it will do after it."""
    for number in (*_PASSED_ON, *_RESET):
        if number in _RESET or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Supervisor:
    def __init__(self, child: Child, pid: int, signals: set[signal.Signals]) -> None:
        self._child = child
        self._pid = pid
        self._signals = signals
        self._watch: system.Watch | None = None
        self._look = _A_MOMENT
        self._kill_at: float | None = None  # when patience with a child that was told to end is over

    def run(self) -> int:
        try:
            while True:
                ended, status = os.waitpid(self._pid, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    return RUN_LOST if self._kill_at is not None else code if code >= 0 else 128 - code
                self._wait()
        finally:
            if self._watch is not None:
                self._watch.close()

    def _wait(self) -> None:
        """For one thing to happen, and do what is to be done then."""
        patience = self._look if self._kill_at is None else max(0.0, self._kill_at - monotonic())
        came = signal.sigtimedwait(self._signals, min(patience, _LONGEST))
        if came is not None and came.si_signo in _PASSED_ON:
            if came.si_code <= 0 or came.si_signo not in _FROM_TERMINAL:  # else the child has got it from there
                self._send(came.si_signo)
        elif came is not None and came.si_signo == signal.SIGCHLD:
            pass
        elif self._kill_at is None:
            self._look_at_lock()
        elif monotonic() >= self._kill_at:
            self._send(signal.SIGKILL)
            self._kill_at = inf

    def _look_at_lock(self) -> None:
        if self._look == _A_MOMENT:
            self._watch = None if self._child.on_server else _watch(self._child.path)
            self._look = _LOOK if self._watch is None else _SAFETY_LOOK
        if self._watch is not None:
            self._watch.drain()
        if self._child.is_lost():
            self._child.end_for_loss()
            self._send(signal.SIGTERM)
            self._kill_at = monotonic() + self._child.grace

    def _send(self, number: int) -> None:
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            pass


def _watch(path: str) -> system.Watch | None:
    """Have the kernel send SIGIO when something happens to the file."""
    try:
        watch = system.Watch(os.path.realpath(path), OwnedFd)
    except OSError:
        return None
    try:
        fcntl.fcntl(watch.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(watch.fd, fcntl.F_SETFL, fcntl.fcntl(watch.fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        watch.close()
        return None
    return watch
