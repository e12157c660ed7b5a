"""macOS: byte ranges instead of flock, and wake-ups by kqueue. Written from the kernel's sources (xnu), never run here.

flock and open-file-description ranges are one kind of lock in this kernel: they exclude each other, and those of one
open file are merged (kern_lockf.c compares owners, not kinds). So the removal byte would vanish in a flock taken with
the same descriptor. `lock` is therefore the range below 2**62, which flock(1) and Rust's locks exclude and respect all
the same. What it costs: network file systems, which know no such ranges here, answer ENOTSUP.

A FIFO cannot be locked at all (ENOTSUP), so there are no tickets and no queue: whoever the kernel wakes goes first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import sys

from .posix import *

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..files import OwnedFd as Owner

assert sys.platform == "darwin"

HAS_FIFOS = False

_NOTE_FUNLOCK = 0x100  # <sys/event.h>; Python does not name it. Posted on unlock, and by close and death with it
_EVENTS = select.KQ_NOTE_DELETE | select.KQ_NOTE_RENAME | select.KQ_NOTE_LINK | _NOTE_FUNLOCK

WATCH_WRITING = select.KQ_NOTE_WRITE | select.KQ_NOTE_EXTEND | select.KQ_NOTE_ATTRIB  # a file is written to
WATCH_CLOSING = select.KQ_NOTE_WRITE  # names come to a directory and go; kqueue does not report that a file is closed


def lock(fd: int, op: int) -> None:  # type: ignore[no-redef]
    try:
        lock_range(fd, op)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        # An exclusive range needs a descriptor that can write. With flock, others see no mark, which costs them a try.
        fcntl.flock(fd, op)


class Watch:
    """`fd` is readable when somebody has unlocked, unlinked or replaced the file at `path`, or died with it locked."""

    __slots__ = ("_events", "_file", "_own", "_queue", "fd")

    def __init__(self, path: str, own: Callable[[int], Owner], events: int = 0) -> None:
        self._own = own
        self._events = events or _EVENTS
        self._queue = select.kqueue()  # the kernel gives a forked child no copy of it
        self.fd = self._queue.fileno()
        self._file: Owner | None = None
        try:
            self._watch(path)
        except BaseException:
            self.close()
            raise

    def _watch(self, path: str) -> None:
        # O_EVTONLY: to be told about a file without keeping its volume from being unmounted.
        self._file = self._own(os.open(path, os.O_EVTONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        # EV_CLEAR: once taken off by `drain`, an event does not come back.
        wanted = select.kevent(
            self._file.fd, select.KQ_FILTER_VNODE, select.KQ_EV_ADD | select.KQ_EV_CLEAR, self._events
        )
        self._queue.control([wanted], 0)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()  # its events go with it
            self._file = None

    def move(self, path: str) -> None:
        """Watch what `path` names now instead."""
        self._close_file()
        self._watch(path)

    def drain(self) -> bool:
        """Take off what was reported. True: there was something."""
        return bool(self._queue.control(None, 1, 0))  # one file, so at most one event

    def close(self, *, reuse: bool = False) -> None:
        self._queue.close()
        self._close_file()
