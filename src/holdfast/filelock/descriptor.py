"""The kernel lock of `FileLock`, on a descriptor that the caller has opened."""

from __future__ import annotations

from threading import TIMEOUT_MAX

from .. import system, wait
from .options import seconds


def lock_descriptor(fd: int, *, blocking: bool = True, poll_interval: float = 0.05) -> bool:
    """Lock the file of a descriptor. False: it is locked, and `blocking` is False. `poll_interval` has no effect."""
    if blocking and not 0 < (interval := seconds("poll_interval", poll_interval)) <= TIMEOUT_MAX:
        raise ValueError(f"poll_interval must be greater than 0 and at most {TIMEOUT_MAX}, got {interval}")
    try:
        system.lock(fd, system.EX | system.NB)
    except BlockingIOError:
        if not blocking:
            return False
        wait.Granted(system.lock, fd, system.EX).block()
    return True


def unlock_descriptor(fd: int) -> None:
    """Unlock the file of a descriptor, and leave it open."""
    system.lock(fd, system.UN)
