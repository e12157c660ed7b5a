"""A drop-in for the package filelock: its names, with the locks of Holdfast behind them.

    from holdfast.filelock import FileLock, Timeout

    with FileLock("build.lock", timeout=5):
        ...

    FileLock        a kernel lock on a file: flock on Unix. It excludes the FileLock of the package filelock
    SoftFileLock    held while the file exists. It excludes the SoftFileLock of the package filelock
    Async…          the same for tasks of asyncio
    ReadWriteLock   readers share, a writer excludes. It does not exclude the ReadWriteLock of the package filelock,
                    whose file is an SQLite database

Waiters sleep until the release and are served in order of arrival. `poll_interval` is accepted and has no effect.
Names of filelock that are not here (`unsupported`) raise an error that says what to use instead. docs/filelock.md
compares feature by feature. `python -m holdfast.filelock --check DIR` reads a program for what would change.
"""

from __future__ import annotations

import sys

from .errors import SoftFileLockLifetimeWarning, Timeout
from .kinds import SoftFileLock, UnixFileLock, WindowsFileLock, has_fcntl
from .lock import AcquireReturnProxy, BaseFileLock
from .version import __version__
from .version import version as version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .async_read_write import AsyncAcquireReadWriteReturnProxy, AsyncReadWriteLock
    from .asyncio import (
        AsyncAcquireReturnProxy,
        AsyncSoftFileLock,
        AsyncUnixFileLock,
        AsyncWindowsFileLock,
        BaseAsyncFileLock,
    )
    from .descriptor import lock_descriptor, unlock_descriptor
    from .read_write import ReadWriteLock
    from .typing import CloseErrorPolicy, ContextErrorPolicy, LockOptions

    FileLock = UnixFileLock
    AsyncFileLock = AsyncUnixFileLock
else:
    FileLock = WindowsFileLock if sys.platform == "win32" else UnixFileLock


_LOADED_ON_USE = {
    "AsyncAcquireReadWriteReturnProxy": "async_read_write",
    "AsyncAcquireReturnProxy": "asyncio",
    "AsyncFileLock": "asyncio",
    "AsyncReadWriteLock": "async_read_write",
    "AsyncSoftFileLock": "asyncio",
    "AsyncUnixFileLock": "asyncio",
    "AsyncWindowsFileLock": "asyncio",
    "BaseAsyncFileLock": "asyncio",
    "CloseErrorPolicy": "typing",
    "ContextErrorPolicy": "typing",
    "LockOptions": "typing",
    "ReadWriteLock": "read_write",
    "asyncio": "asyncio",
    "lock_descriptor": "descriptor",
    "unlock_descriptor": "descriptor",
}

__all__ = ["AcquireReturnProxy", "AsyncAcquireReadWriteReturnProxy", "AsyncAcquireReturnProxy", "AsyncFileLock"]
__all__ += ["AsyncReadWriteLock", "AsyncSoftFileLock", "AsyncUnixFileLock", "AsyncWindowsFileLock", "BaseAsyncFileLock"]
__all__ += ["BaseFileLock", "CloseErrorPolicy", "ContextErrorPolicy", "FileLock", "LockOptions", "ReadWriteLock"]
__all__ += ["SoftFileLock", "SoftFileLockLifetimeWarning", "Timeout", "UnixFileLock", "WindowsFileLock"]
__all__ += ["__version__", "asyncio", "has_fcntl", "lock_descriptor", "unlock_descriptor"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LOADED_ON_USE:
        module = import_module(f".{_LOADED_ON_USE[name]}", __name__)
        found = module if name == "asyncio" else getattr(module, name)
    else:
        found = import_module(".unsupported", __name__).MISSING.get(name)
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
