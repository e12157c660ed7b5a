"""Locks, lock files, semaphores, atomic directories and task queues that coordinate programs.

    import holdfast

    with holdfast.Lock("build.lock", timeout=5):
        ...                                # one process, thread or task at a time

    Lock            a kernel lock on a path, exclusive or shared
    LockFile        a lock file with pid, time and tag, which also works between machines
    lock, semaphore the same on PostgreSQL, etcd, Redis or SMB, by URL; `fence` refuses a holder that lost its lock
    Semaphore       a number of permits on a path
    TaskLocks       a directory with one lock per task, for workers
    AtomicDir       a directory that is replaced as a whole
    TaskQueue       a directory of tasks; `Worker` runs them
    Hold            a lock that is held, as `acquire` returns it
    Status          the holders and waiters of a lock, as `status` returns it

Errors are in one tree under `HoldfastError`: see `help(holdfast.errors)`. `holdfast.events` has the event store.
"""

from __future__ import annotations

from . import errors
from .errors import *  # noqa: F403
from .locks.hold import Hold
from .locks.lock import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import fence
    from .atomicdir.directory import AtomicDir
    from .locks.lock_file import LockFile
    from .locks.semaphore import Semaphore
    from .locks.task_locks import TaskLocks
    from .locks.url import lock, semaphore
    from .status import Status
    from .tasks.queue import TaskQueue
    from .tasks.worker import Worker

__all__ = ["AtomicDir", "Hold", "Lock", "LockFile", "Semaphore", "Status", "TaskLocks", "TaskQueue", "Worker"]
__all__ += ["fence", "lock", "semaphore"]
__all__ += errors.__all__

__version__ = "0.1.0"

_LOADED_ON_USE = {
    "AtomicDir": ".atomicdir",
    "LockFile": ".locks.lock_file",
    "Semaphore": ".locks.semaphore",
    "Status": ".status",
    "TaskLocks": ".locks.task_locks",
    "TaskQueue": ".tasks.queue",
    "Worker": ".tasks.worker",
    "fence": ".fence",
    "lock": ".locks.url",
    "semaphore": ".locks.url",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_LOADED_ON_USE[name], __name__)
    found = globals()[name] = module if name == "fence" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
