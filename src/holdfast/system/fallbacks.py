"""What macOS and Windows have in place of calls that only Linux has."""

from __future__ import annotations

import errno
import os


def _unsupported(*arguments: object, **_: object) -> None:
    """Stand in for a system call that this platform, or this Python, does not have."""
    path = next((argument for argument in arguments if isinstance(argument, str)), None)
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)


clone = exchange = link_open_file = _unsupported
sync_file_system = None
TELLS_NAMES = False


def generation(fd: int) -> int:
    return 0
