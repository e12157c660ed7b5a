"""The errors that Holdfast raises.

    HoldfastError
    ├── Timeout           (also a TimeoutError)   the lock was not acquired within the timeout
    │   └── Busy                                  the lock is held, and the timeout is 0
    ├── LockLost                                  the file of the lock was removed or replaced while it was held
    ├── NotLocked                                 there is no lock to release
    ├── NotOwner                                  the lock is held by another process
    ├── WouldDeadlock                             this thread or task holds the lock already
    ├── CorruptLock                               the content of a lock file is damaged
    ├── NotALockFile                              the path names user data, a directory or a device
    ├── UnsafePath        (also a ValueError)     the path is empty, is not trusted, or cannot name a lock
    ├── Unsupported                               this file system or platform cannot keep a promise
    ├── ConnectionFailed                          a server cannot be reached, or refuses the connection
    ├── ConditionFailed                           an event breaks the condition of an append
    └── CorruptStore                              an event store or a task queue is damaged

A message names the path, the reason (such as the holder), and what to do next. A system call that fails stays the
OSError that it is: an I/O failure is never reported as a lock that is held.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .status import Status

__all__ = ["Busy", "ConditionFailed", "ConnectionFailed", "CorruptLock", "CorruptStore", "HoldfastError", "LockLost"]
__all__ += ["NotALockFile", "NotLocked", "NotOwner", "Timeout", "UnsafePath", "Unsupported", "WouldDeadlock"]


class HoldfastError(Exception):
    """The base of all errors of Holdfast. `path` is the path of the lock as the caller passed it, if there is one."""

    def __init__(self, message: str = "", *, path: str | None = None, **details: int | None) -> None:
        super().__init__(message)
        self.path = path
        vars(self).update(details)


class Timeout(HoldfastError, TimeoutError):
    """The lock was not acquired within the timeout. `status` describes its holders and waiters at that time.

    Wait longer with `timeout=`, or look at `error.status.holders`.
    """

    status: Status | None = None


class Busy(Timeout):
    """The lock is held, and the caller did not want to wait (`timeout=0`). Try again later, or pass a timeout."""


class LockLost(HoldfastError):
    """The file of the lock was removed or replaced while it was held, so another process may hold the lock now.

    `check` and `release` raise it. Stop the work that the lock protects, and undo it or do it again.
    """


class NotLocked(HoldfastError):
    """There is no lock to release or to break: it was released already. This is usually a mistake in the program."""


class NotOwner(HoldfastError):
    """The lock is held by another process, for instance by the parent of a forked child. Release it there."""


class WouldDeadlock(HoldfastError):
    """This thread or task holds the lock already and would wait for itself. Locks are not reentrant."""


class CorruptLock(HoldfastError):
    """The content of a lock file does not follow its format. Check the path, and remove the file by hand."""


class NotALockFile(HoldfastError):
    """The path names something that Holdfast did not make. It was not touched. Check the path."""


class UnsafePath(HoldfastError, ValueError):
    """The path cannot be used safely: it is empty, or follows a symlink of another user. Pass another path."""


class Unsupported(HoldfastError):
    """The file system or the platform cannot keep what was asked for. The message names an alternative."""


class ConnectionFailed(HoldfastError):
    """A server cannot be reached, or refuses the connection. The message names the server, the reason and the remedy.

    An operation that was under way when a connection was lost may or may not have been done.
    """


class ConditionFailed(HoldfastError):
    """Another event came before an append and breaks its condition. `position` is the position of that event.

    Read again, decide again, and append again, or let `EventStore.execute` do so.
    """

    position: int = 0


class CorruptStore(HoldfastError):
    """An event store or a task queue is damaged. Nothing was changed. Restore the file from a backup, or mend it.

    `line`, `offset` and `position` locate the damage in the file `path`, as far as they are known.
    """

    line: int | None = None
    offset: int | None = None
    position: int | None = None
