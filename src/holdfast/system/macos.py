"""macOS: byte ranges instead of flock, and file events by kqueue. Written from the kernel's sources (xnu), not run yet.

This kernel has one kind of lock: flock and open-file-description ranges exclude each other, and the locks of one open
file are merged (kern_lockf.c compares owners, not kinds). A flock would absorb the removal byte of its descriptor. So
`lock` is the range below 2**62, which flock(1) and Rust's locks exclude and respect. The price: on network file
systems, which have no such ranges here, locks fail with ENOTSUP.

A FIFO cannot be locked (ENOTSUP), so there are no tickets and no queue: the kernel chooses the next holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import sys

from .common import _unsupported
from .posix import *

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..files import OwnedFd as Owner

assert sys.platform == "darwin"

HAS_FIFOS = False
exchange = link_open_file = sync_file_system = DirectoryWatch = _unsupported

_NOTE_FUNLOCK = 0x100  # <sys/event.h>, not named by Python: the file was unlocked, also by close or by death
_EVENTS = select.KQ_NOTE_DELETE | select.KQ_NOTE_RENAME | select.KQ_NOTE_LINK | _NOTE_FUNLOCK

WATCH_WRITING = select.KQ_NOTE_WRITE | select.KQ_NOTE_EXTEND | select.KQ_NOTE_ATTRIB  # a file is written to
WATCH_CLOSING = select.KQ_NOTE_WRITE  # a directory gains or loses a name: kqueue does not report a close


def lock(fd: int, op: int) -> None:  # type: ignore[no-redef]
    try:
        lock_range(fd, op)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        # An exclusive range needs a descriptor that can write. With flock, others see no mark and try once in vain.
        fcntl.flock(fd, op)


class Watch:
    """`fd` is readable when a process has unlocked, unlinked or replaced the file at `path`, or died with it locked."""

    __slots__ = ("_events", "_file", "_own", "_queue", "fd")

    def __init__(self, path: str, own: Callable[[int], Owner], events: int = 0) -> None:
        self._own = own
        self._events = events or _EVENTS
        self._queue = select.kqueue()  # a forked child inherits no copy
        self.fd = self._queue.fileno()
        self._file: Owner | None = None
        try:
            self.move(path)
        except BaseException:
            self.close()
            raise

    def move(self, path: str) -> None:
        """Watch the file that `path` names now instead."""
        self._close_file()
        # O_EVTONLY: a watch does not keep the volume from being unmounted.
        self._file = self._own(os.open(path, os.O_EVTONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        flags = select.KQ_EV_ADD | select.KQ_EV_CLEAR  # EV_CLEAR: `drain` takes an event off for good
        self._queue.control([select.kevent(self._file.fd, select.KQ_FILTER_VNODE, flags, self._events)], 0)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()  # its events go with it
            self._file = None

    def drain(self) -> bool:
        """Take all events off. True: there was one."""
        return bool(self._queue.control(None, 1, 0))  # one file, so at most one event

    def close(self, *, reuse: bool = False) -> None:
        self._queue.close()
        self._close_file()
