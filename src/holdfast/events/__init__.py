"""An event store in a directory: append under conditions, read, follow, decide. Needs `holdfast[events]` (msgspec)."""

from __future__ import annotations

try:
    import msgspec  # noqa: F401
except ImportError:
    raise ImportError("holdfast.events needs msgspec: pip install 'holdfast[events]'", name="msgspec") from None

from ..errors import ConditionFailed, CorruptStore
from .check import Problem, Report
from .decisions import Decision, Projection
from .model import AppendCondition, Event, Query, QueryItem, StoredEvent
from .reading import Reading
from .store import EventStore

__all__ = [
    "AppendCondition",
    "ConditionFailed",
    "CorruptStore",
    "Decision",
    "Event",
    "EventStore",
    "Problem",
    "Projection",
    "Query",
    "QueryItem",
    "Reading",
    "Report",
    "StoredEvent",
]
