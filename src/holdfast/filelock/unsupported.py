"""The names of filelock that this package does not have. Each says what to use instead, when it is called.

They exist, so that a program that imports one of them and does not use it keeps running.
"""

from __future__ import annotations

from ..errors import Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_STRICT = "holdfast.LockFile(path), which also removes a dead holder's file safely"
_LEASE = "holdfast.LockFile(path, stale_after=seconds, stale='dead-or-old', heartbeat=seconds)"
_SHARED = "holdfast.filelock.ReadWriteLock(path), or holdfast.Lock(path, shared=True)"
_STATUS = "lock.status(), which names the holder"
_TOKEN = "hold.check() and holdfast.LockLost"


class _Missing:
    _instead = ""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise Unsupported(f"holdfast.filelock has no {cls.__name__}. Use {cls._instead} instead. See docs/filelock.md.")


class StrictSoftFileLock(_Missing):
    _instead = _STRICT


class StrictSoftFileClaim(_Missing):
    _instead = _STATUS


class StrictSoftFileClaimState(_Missing):
    _instead = _STATUS


class AsyncStrictSoftFileLock(_Missing):
    _instead = f"{_STRICT}, with `async with`"


class MarkerSoftFileLock(_Missing):
    _instead = _STRICT


class SoftFileLease(_Missing):
    _instead = _LEASE


class AsyncSoftFileLease(_Missing):
    _instead = f"{_LEASE}, with `async with`"


class SoftReadWriteLock(_Missing):
    _instead = _SHARED


class AsyncSoftReadWriteLock(_Missing):
    _instead = f"{_SHARED}, with `async with`"


class AsyncAcquireSoftReadWriteReturnProxy(_Missing):
    _instead = _SHARED


class OwnerMode(_Missing):
    _instead = _STATUS


class OwnerRecord(_Missing):
    _instead = _STATUS


class CompromiseReason(_Missing):
    _instead = _TOKEN


class LeaseCompromise(_Missing):
    _instead = _TOKEN


class LeaseSettingsMismatch(ValueError):
    """Never raised: for `except` clauses of programs that use leases of filelock."""


class SoftFileLockProtocolError(OSError):
    """Never raised: for `except` clauses of programs that use strict locks of filelock."""
