"""Kernel locks on single bytes, the same on every platform. Each platform has `set_range` and `range_locked`."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from .windows import EX_NB, UN, range_locked, set_range
else:
    from .posix import EX_NB, UN, range_locked, set_range
from .positions import FIRST_SLOT, LIVENESS_BYTE, MAX_SLOTS, REMOVAL_BYTE


def lock_byte(fd: int, at: int) -> bool:
    """Lock the byte at a position without waiting. False: another descriptor has it locked."""
    try:
        set_range(fd, EX_NB, at, 1)
    except BlockingIOError:
        return False
    return True


def unlock_byte(fd: int, at: int) -> None:
    set_range(fd, UN, at, 1)


def unmark_removal(fd: int) -> None:
    set_range(fd, UN, REMOVAL_BYTE, 1)


def liveness_locked(fd: int) -> bool:
    return range_locked(fd, LIVENESS_BYTE, 1)


def try_slot(fd: int, slot: int) -> bool:
    return lock_byte(fd, FIRST_SLOT + slot)


def unlock_slots(fd: int) -> None:
    """Unlock all slots that this descriptor has locked."""
    set_range(fd, UN, FIRST_SLOT, MAX_SLOTS)
