"""The errors and warnings of the package filelock, and how the errors of the locks behind them become theirs."""

from __future__ import annotations

import builtins
import errno
import os

from .. import errors, system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ..status import Status


class Timeout(errors.Timeout):
    """The lock was not acquired in time. It is a TimeoutError, and a `holdfast.Timeout`.

    lock_file: the path of the lock, as it was passed
    holder: of a soft lock on another machine
    """

    def __init__(self, lock_file: str, holder: str | None = None) -> None:
        TimeoutError.__init__(self)
        self.path = lock_file
        self._lock_file = lock_file
        self._holder = holder

    def __reduce__(self) -> tuple[type[Timeout], tuple[str], dict[str, object]]:
        return type(self), (self._lock_file,), {**vars(self), "status": None}

    def __str__(self) -> str:
        text = f"The file lock '{self._lock_file}' could not be acquired."
        return text if self._holder is None else f"{text} It is held by {self._holder}, which this host cannot probe."

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._lock_file!r})"

    @property
    def lock_file(self) -> str:
        return self._lock_file


class SoftFileLockLifetimeWarning(FutureWarning):
    """With `lifetime`, a waiter takes the lock away from a holder that is alive."""


def raise_as_os_error(error: errors.HoldfastError, path: str) -> NoReturn:
    """Raise the error of filelock where Holdfast refuses a path. An error unknown there is raised as is."""
    if "\0" in path:
        raise ValueError("embedded null byte") from error
    code = 0 if path else errno.ENOENT
    if path and (path.endswith(os.sep) or is_directory(path)):
        code = errno.EISDIR
    elif path and isinstance(error, errors.UnsafePath):  # a symlink
        code = errno.ELOOP
    if code:
        raise OSError(code, os.strerror(code), path) from error
    raise error


def is_directory(path: str) -> bool:
    from stat import S_ISDIR

    try:
        return S_ISDIR(system.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def timed_out(path: str, status: Status | None, holder: str | None) -> Timeout:
    error = Timeout(path, holder)
    error.status = status
    return error


def raise_both(error: BaseException, failure: BaseException) -> NoReturn:
    """Raise the error of a block together with that of the release of its lock."""
    group: Any = getattr(builtins, "BaseExceptionGroup", None)
    if group is None:  # Python 3.10, where anyio installs this package
        from importlib import import_module

        group = import_module("exceptiongroup").BaseExceptionGroup
    failure.__context__ = None
    raise group("lock body and release both failed", [error, failure]) from None
