"""An event store in a directory or in PostgreSQL: append under conditions, read, follow, decide.

Needs `holdfast[events]` (msgspec); for PostgreSQL also `holdfast[postgres]`.
"""

from __future__ import annotations

try:
    import msgspec  # noqa: F401
except ImportError:
    raise ImportError("holdfast.events needs msgspec: pip install 'holdfast[events]'", name="msgspec") from None

from ..errors import ConditionFailed, CorruptStore
from .decisions import Decision
from .engine import Problem, Report
from .model import AppendCondition, Event, Query, QueryItem, StoredEvent
from .projections import Projection
from .reading import Reading
from .schemas import Upcast, upcast
from .store import EventStore
from .subscriptions import Subscription, SubscriptionStatus

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
    "Subscription",
    "SubscriptionStatus",
    "Upcast",
    "upcast",
]
