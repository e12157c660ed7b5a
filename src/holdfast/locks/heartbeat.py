"""Renewing holds in the background: one thread per process, which ends when there is nothing left to renew.

A hold whose lock was taken away is told so once (`on_lost`), and not renewed any more.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from time import monotonic

from ..errors import HoldfastError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .existence import FileHold

_condition = threading.Condition()
_due: dict[weakref.ref[FileHold], float] = {}
_thread: threading.Thread | None = None


def _begin_anew() -> None:
    """In a forked child, which has neither the thread nor the holds, and must not wait for a lock of its parent's."""
    global _condition, _thread
    _condition = threading.Condition()
    _due.clear()
    _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def beat(hold: FileHold, every: float) -> None:
    """Renew `hold` every so many seconds, until it is released, lost or forgotten."""
    global _thread
    with _condition:
        _due[weakref.ref(hold)] = monotonic() + every
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="holdfast-heartbeat", daemon=True)
            _thread.start()
        _condition.notify()


def end(hold: FileHold) -> None:
    """The hold is released: nothing is due any more."""
    if sys.is_finalizing():
        return  # the thread has stopped, perhaps with the lock of the condition in its hands
    with _condition:
        if _due.pop(weakref.ref(hold), None) is not None:
            _condition.notify()


def _run() -> None:
    global _thread
    while True:
        with _condition:
            if not _due:
                _thread = None
                return
            first = min(_due, key=_due.__getitem__)
            left = _due[first] - monotonic()
            if left > 0:
                _condition.wait(left)
                continue
            del _due[first]
        _renew(first)


def _renew(reference: weakref.ref[FileHold]) -> None:
    hold = reference()
    if hold is None or hold.released:
        return
    every, on_lost = hold.lock.heartbeat, hold.lock.on_lost
    try:
        hold.renew()
    except HoldfastError:
        if hold.lost and on_lost is not None:
            # In a thread of its own: it may take its time, and others are to be renewed.
            threading.Thread(target=_tell, args=(on_lost, hold), name="holdfast-on-lost", daemon=True).start()
    except OSError:
        _again(reference, every)  # the disk may come back; if it does not, the lock grows old
    else:
        _again(reference, every)


def _tell(on_lost: Callable[[FileHold], object], hold: FileHold) -> None:
    try:
        on_lost(hold)
    except BaseException:
        import logging

        logging.getLogger("holdfast").exception("%s: on_lost failed", hold.lock.path)


def _again(reference: weakref.ref[FileHold], every: float | None) -> None:
    if every is not None:
        with _condition:
            _due[reference] = monotonic() + every
