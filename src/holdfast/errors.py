"""Everything that Holdfast raises on purpose.

    HoldfastError
    ├── Timeout           (also a TimeoutError)   waited as long as it was told to
    │   └── Busy                                  one try was asked for, and somebody has it
    ├── LockLost                                  the path no longer names what this hold locked
    ├── NotLocked                                 released twice, or never held
    ├── NotOwner                                  held, but not by you (a forked child, another process)
    ├── WouldDeadlock                             this thread or task has it and would wait for itself
    ├── CorruptLock                               a lock file that cannot be understood
    ├── NotALockFile                              the path is a directory, a device or a file with content
    ├── UnsafePath        (also a ValueError)     an empty path, a NUL byte, …
    ├── Unsupported                               this file system or platform cannot give what was asked
    ├── ConditionFailed                           something came in between: look again, decide again
    └── CorruptStore                              a line of an event store is damaged, missing or not its own

Each message names the path, who is in the way where that is known, and what to do next. A failing system call
stays the OSError that it is: "the disk is broken" is never reported as "somebody has the lock".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .status import Status

__all__ = [
    "Busy",
    "ConditionFailed",
    "CorruptLock",
    "CorruptStore",
    "HoldfastError",
    "LockLost",
    "NotALockFile",
    "NotLocked",
    "NotOwner",
    "Timeout",
    "UnsafePath",
    "Unsupported",
    "WouldDeadlock",
]


class HoldfastError(Exception):
    """The root of the tree. `path` is the lock's path as the caller spelled it, where there is one."""

    path: str | None

    def __init__(self, message: str = "", *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        """Errors come back from other processes: with all that they say, whatever their constructors want."""
        return _make_again, (type(self), self.args, self.__dict__)


def _make_again(kind: type[HoldfastError], arguments: tuple[object, ...], said: dict[str, object]) -> HoldfastError:
    error = kind.__new__(kind, *arguments)
    super(HoldfastError, error).__init__(*arguments)
    error.__dict__.update(said)
    return error


class Timeout(HoldfastError, TimeoutError):
    """The lock did not come free in the time given. `status` says who had it then."""

    status: Status | None = None


class Busy(Timeout):
    """One try was asked for (`timeout=0`), and somebody else has the lock."""


class LockLost(HoldfastError):
    """The hold is no longer good: its file was removed or replaced while it was held."""


class NotLocked(HoldfastError):
    """There is nothing to release: the hold has been released already."""


class NotOwner(HoldfastError):
    """The hold belongs to somebody else, for instance to the parent of a forked child."""


class WouldDeadlock(HoldfastError):
    """The caller already holds what it is about to wait for."""


class CorruptLock(HoldfastError):
    """A lock file whose content does not follow its format."""


class NotALockFile(HoldfastError):
    """The path names something that is not ours to lock or to remove. It was left untouched."""


class UnsafePath(HoldfastError, ValueError):
    """A path that cannot be used safely as the name of a lock."""


class Unsupported(HoldfastError):
    """The file system or the platform cannot keep the promise that was asked for."""


class ConditionFailed(HoldfastError):
    """An append was made under a condition that does not hold. `position` is the event that is in the way."""

    position: int

    def __init__(self, message: str = "", *, path: str | None = None, position: int = 0) -> None:
        super().__init__(message, path=path)
        self.position = position


class CorruptStore(HoldfastError):
    """An event store in which something is damaged. Nothing was changed. Says where, as far as that is known."""

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        line: int | None = None,
        offset: int | None = None,
        position: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.line = line
        self.offset = offset
        self.position = position
