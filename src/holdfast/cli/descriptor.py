"""`holdfast fd`: lock a descriptor that the calling shell script has open.

    exec 9>/tmp/x.lock
    holdfast fd -n 9 || exit 75

The lock belongs to the open file, which the script shares with us: it stays when this command has ended, until the
script closes the descriptor, ends, or says `holdfast fd -u 9`.
"""

from __future__ import annotations

import errno
import os

from .. import system
from ..errors import Unsupported
from ..paths import mount_at
from ..status import of_kernel_lock
from . import arguments
from .progress import busy

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import NoReturn

EPILOG = """\
exit status: 0; 75 busy or timed out (-E changes it), 64 wrong usage, 66 the descriptor cannot be locked

examples:
  exec 9>/tmp/x.lock; holdfast fd -n 9 || exit 75
  ( holdfast fd -w 5 9 || exit; echo alone ) 9>/tmp/x.lock
"""


class _TimeIsUp(Exception):
    pass


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = EPILOG
    parser.must_print = False
    number = arguments.integer("the number of a descriptor", 0)
    parser.add_argument("fd", metavar="FD", type=number, help="the number of an open descriptor")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("-s", "--shared", action="store_true", help="a shared lock")
    mode.add_argument("-x", "--exclusive", action="store_true", help="an exclusive lock (the default)")
    mode.add_argument("-u", "--unlock", action="store_true", help="unlock it")
    arguments.add_wait(parser)
    arguments.add_busy_status(parser)
    arguments.add_json(parser)
    arguments.add_quiet(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    fd: int = options.fd
    if options.unlock and (options.no_wait or options.wait is not None):
        raise ValueError("-n and -w do not go with -u, which never waits. Leave them out.")
    try:
        device = system.fstat(fd).st_dev
    except OSError:
        raise ValueError(f"descriptor {fd} is not open; exec {fd}>FILE opens it") from None
    path = _path_of(fd)
    mount = mount_at(device, path)
    if mount.refusal is not None:
        raise Unsupported(mount.refusal, path=path)
    lock = system.lock_range if mount.ranged else system.lock
    if options.unlock:
        lock(fd, system.UN)
        return 0
    try:
        lock(fd, system.SH_NB if options.shared else system.EX_NB)
    except BlockingIOError:
        timeout = arguments.timeout_of(options)
        try:
            if timeout == 0:
                raise _TimeIsUp from None
            _begin_alarm(timeout)
            lock(fd, system.SH if options.shared else system.EX)
            _begin_alarm(None)
        except _TimeIsUp:
            status = of_kernel_lock(path, keep=True) if os.path.exists(path) else None
            raise busy(path, status, timeout or 0, options.busy_code) from None
    if not system.fstat(fd).st_nlink:
        # The next one to come makes a new file, and locks that.
        lock(fd, system.UN)
        text = (
            f"the file of descriptor {fd} was removed meanwhile; open it again, and use `holdfast run --keep` beside it"
        )
        raise FileNotFoundError(errno.ENOENT, text)
    return 0


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"descriptor {fd}"


def _begin_alarm(seconds: float | None) -> None:
    """Interrupt the wait after these seconds. None: do not interrupt it any more."""
    import signal

    def ring(*_: object) -> NoReturn:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, min(seconds or 0.0, 1e8))
