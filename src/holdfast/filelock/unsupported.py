"""The names of filelock that this package does not have. A call of one raises an error that names the alternative.

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
_INSTEAD = {
    "AsyncAcquireSoftReadWriteReturnProxy": _SHARED,
    "AsyncSoftFileLease": f"{_LEASE}, with `async with`",
    "AsyncSoftReadWriteLock": f"{_SHARED}, with `async with`",
    "AsyncStrictSoftFileLock": f"{_STRICT}, with `async with`",
    "CompromiseReason": _TOKEN,
    "LeaseCompromise": _TOKEN,
    "MarkerSoftFileLock": _STRICT,
    "OwnerMode": _STATUS,
    "OwnerRecord": _STATUS,
    "SoftFileLease": _LEASE,
    "SoftReadWriteLock": _SHARED,
    "StrictSoftFileClaim": _STATUS,
    "StrictSoftFileClaimState": _STATUS,
    "StrictSoftFileLock": _STRICT,
}


class _Missing:
    _instead = ""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise Unsupported(f"holdfast.filelock has no {cls.__name__}. Use {cls._instead} instead. See docs/filelock.md.")


class LeaseSettingsMismatch(ValueError):
    """Never raised: for `except` clauses of programs that use leases of filelock."""


class SoftFileLockProtocolError(OSError):
    """Never raised: for `except` clauses of programs that use strict locks of filelock."""


MISSING: dict[str, type] = {
    **{name: type(name, (_Missing,), {"_instead": instead}) for name, instead in _INSTEAD.items()},
    "LeaseSettingsMismatch": LeaseSettingsMismatch,
    "SoftFileLockProtocolError": SoftFileLockProtocolError,
}
