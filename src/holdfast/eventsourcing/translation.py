"""What two packages call differently: errors, and the bytes that are data."""

from __future__ import annotations

from base64 import b64decode, b64encode
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from eventsourcing import persistence

from .. import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first line that fits counts.
_ERRORS: list[tuple[type[Exception], type[persistence.PersistenceError]]] = [
    (errors.ConditionFailed, persistence.IntegrityError),
    (errors.Timeout, persistence.OperationalError),
    (errors.ConnectionFailed, persistence.OperationalError),
    (errors.CorruptStore, persistence.InternalError),
    (errors.Unsupported, persistence.NotSupportedError),
    (errors.WouldDeadlock, persistence.ProgrammingError),
    (errors.UnsafePath, persistence.InterfaceError),
    (errors.HoldfastError, persistence.PersistenceError),
    (TypeError, persistence.ProgrammingError),
    (ValueError, persistence.DataError),
    (OSError, persistence.OperationalError),
]


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of Holdfast as those of eventsourcing. The original is the cause."""
    try:
        yield
    except Exception as error:
        kind = next((theirs for ours, theirs in _ERRORS if isinstance(error, ours)), None)
        if kind is None and type(error).__module__.startswith("psycopg"):
            kind = persistence.DatabaseError
        if kind is None:
            raise
        raise kind(str(error)) from error


def json_of(data: bytes) -> Any:
    """Bytes as JSON: text if they are UTF-8, which the transcoders of eventsourcing make, else base64."""
    if not isinstance(data, bytes):
        raise TypeError(f"the state of an event is bytes, not {data!r:.80}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode()}


def bytes_of(data: Any) -> bytes:
    """The bytes again. The data of an event that another program has appended comes as JSON."""
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, dict) and data.keys() == {"base64"}:
        return b64decode(data["base64"])
    return msgspec.json.encode(data)
