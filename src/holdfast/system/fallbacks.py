"""What macOS and Windows have in place of calls that only Linux has. Without /proc, holders are not named."""

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


def name_of_open(fd: int) -> str:
    return ""


def generation(fd: int) -> int:
    return 0


def is_removed(fd: int) -> bool:
    """True: the open file has no name any more."""
    return os.fstat(fd).st_nlink == 0


def read_text(path: str) -> str:
    return ""


def mount_table() -> str:
    return ""


def list_pids() -> list[int]:
    return []


def lock_lines(pid: int) -> str | None:
    return ""


def pid_namespace() -> int:
    return 0
