"""Applications of the `eventsourcing` package on an event store of Holdfast.

    PERSISTENCE_MODULE=holdfast.eventsourcing
    HOLDFAST_STORE=/var/lib/shop          a directory, or postgresql://user@host/database

The classes implement the recorders of `eventsourcing.persistence` and of `eventsourcing.dcb`. See
docs/from-eventsourcing.md.
"""

from __future__ import annotations

try:
    import eventsourcing.dcb.api  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"holdfast.eventsourcing needs eventsourcing 9.5 ({error}): pip install 'holdfast[eventsourcing]'",
        name=error.name,
    ) from error

from .dcb import HoldfastDCBRecorder
from .factory import HoldfastFactory
from .recorders import (
    HoldfastAggregateRecorder,
    HoldfastApplicationRecorder,
    HoldfastProcessRecorder,
    HoldfastTrackingRecorder,
)

Factory = HoldfastFactory

__all__ = [
    "Factory",
    "HoldfastAggregateRecorder",
    "HoldfastApplicationRecorder",
    "HoldfastDCBRecorder",
    "HoldfastFactory",
    "HoldfastProcessRecorder",
    "HoldfastTrackingRecorder",
]
