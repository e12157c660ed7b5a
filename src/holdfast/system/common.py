"""What the platform modules share: the byte ranges that locks use, and a stand-in for calls that a platform lacks."""

from __future__ import annotations

import errno
import os

# All positions lie past any content and below 2**63 (docs/formats.md).
RANGE_START, RANGE_LENGTH = 0, 1 << 62  # the lock itself, where a range stands in for flock
REMOVAL_BYTE = 1 << 62  # its holder may remove the file, or is about to
LIVENESS_BYTE = REMOVAL_BYTE + 1  # locked while the process that holds a lock file lives
FIRST_SLOT, MAX_SLOTS = REMOVAL_BYTE + 16, 1 << 20  # one byte per permit of a semaphore


def _unsupported(*arguments: object, **_: object) -> None:
    """Stand in for a system call that this platform, or this Python, does not have."""
    path = next((argument for argument in arguments if isinstance(argument, str)), None)
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
