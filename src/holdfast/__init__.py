"""Programs take turns: locks between threads, tasks, processes and machines.

The names below are the whole public face. Those that most programs do not need are loaded when first used.
"""

from __future__ import annotations

from .errors import (
    Busy,
    ConditionFailed,
    CorruptLock,
    CorruptStore,
    HoldfastError,
    LockLost,
    NotALockFile,
    NotLocked,
    NotOwner,
    Timeout,
    UnsafePath,
    Unsupported,
    WouldDeadlock,
)
from .locks.hold import Hold
from .locks.lock import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .atomicdir.directory import AtomicDir
    from .locks.lock_file import LockFile
    from .locks.semaphore import Semaphore
    from .locks.task_locks import TaskLocks
    from .status import Status
    from .tasks.queue import TaskQueue
    from .tasks.worker import Worker

__all__ = [
    "AtomicDir",
    "Busy",
    "ConditionFailed",
    "CorruptLock",
    "CorruptStore",
    "Hold",
    "HoldfastError",
    "Lock",
    "LockFile",
    "LockLost",
    "NotALockFile",
    "NotLocked",
    "NotOwner",
    "Semaphore",
    "Status",
    "TaskLocks",
    "TaskQueue",
    "Timeout",
    "UnsafePath",
    "Unsupported",
    "Worker",
    "WouldDeadlock",
]

__version__ = "0.1.0"

_LOADED_ON_USE = {
    "AtomicDir": ".atomicdir",
    "LockFile": ".locks.lock_file",
    "Semaphore": ".locks.semaphore",
    "Status": ".status",
    "TaskLocks": ".locks.task_locks",
    "TaskQueue": ".tasks.queue",
    "Worker": ".tasks.worker",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_LOADED_ON_USE[name], __name__), name)
    return found
