"""Renewing holds in the background: one thread per file system, which ends when no hold is left to renew.

Renewing is file I/O, and a server that does not answer stops the thread. So each file system has its own thread, and
nothing here does I/O under a mutex. If a lock was taken away, the thread calls `on_lost` once and stops renewing it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from time import monotonic

from .. import process
from ..errors import HoldfastError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .file_hold import FileGrant, FileHold


class Heart:
    """The holds of one file system, and the thread that renews them."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.due: dict[weakref.ref[FileHold], float] = {}
        self.thread: threading.Thread | None = None

    def add(self, hold: weakref.ref[FileHold], every: float) -> None:
        with self.condition:
            self.due[hold] = monotonic() + every
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)
                self.thread.start()
            self.condition.notify()

    def remove(self, hold: weakref.ref[FileHold]) -> None:
        with self.condition:
            if self.due.pop(hold, None) is not None:
                self.condition.notify()

    def _run(self) -> None:
        while True:
            with self.condition:
                if not self.due:
                    self.thread = None
                    return
                first = min(self.due, key=self.due.__getitem__)
                left = self.due[first] - monotonic()
                if left > 0:
                    self.condition.wait(left)
                    continue
                del self.due[first]
            if (every := _renew(first)) is not None:
                self.add(first, every)


hearts: dict[int, Heart] = {}  # by st_dev
process.after_fork_in_child(hearts.clear)  # a child has neither the threads nor the holds


def beat(hold: FileHold, grant: FileGrant, every: float) -> None:
    """Renew `hold` every `every` seconds, until it is released, lost or dropped."""
    grant.renewed_hold = weakref.ref(hold)
    hearts.setdefault(grant.key[0], Heart()).add(grant.renewed_hold, every)


def end(hold: weakref.ref[FileHold], device: int) -> None:
    """Stop renewing a hold that is released."""
    heart = hearts.get(device)
    # At the end of the interpreter the thread has stopped, perhaps with the mutex.
    if heart is not None and not sys.is_finalizing():
        heart.remove(hold)


def _renew(reference: weakref.ref[FileHold]) -> float | None:
    """Renew a hold. Returns in how many seconds to renew it again; None: not any more."""
    hold = reference()
    if hold is None or hold.released:
        return None
    try:
        hold.renew()
    except HoldfastError:
        if hold.lost and hold.lock.on_lost is not None:
            # In a thread of its own: it may take long or raise, and other holds have to be renewed.
            threading.Thread(target=hold.lock.on_lost, args=(hold,), name="holdfast-on-lost", daemon=True).start()
        return None
    except OSError:
        pass  # the disk may come back; if it does not, the lock grows old
    return hold.lock.heartbeat
