"""The factory that `PERSISTENCE_MODULE=holdfast.eventsourcing` stands for.

    HOLDFAST_STORE          where the stores are: a directory, or a URL of PostgreSQL
    HOLDFAST_LOCK_TIMEOUT   seconds that an append waits for others, 5 by default; empty: as long as it takes
    HOLDFAST_DURABLE        "no": what was recorded last may be lost in a power failure
    ORIGINATOR_ID_TYPE      "text": ids of aggregates are never made a UUID

As everywhere in eventsourcing, the name of the application and "_" may stand in front of each. An application has a
store for each purpose, so that the positions in the store of its events are its notification ids:

    /var/lib/shop, the application "Orders"     /var/lib/shop/orders/events, …/snapshots, …/tracking, …/dcb
    postgresql://user@host/database             tables whose names begin with orders_events_, orders_snapshots_, …
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from eventsourcing.dcb.persistence import DCBInfrastructureFactory
from eventsourcing.persistence import InfrastructureFactory, TrackingRecorder
from eventsourcing.utils import Environment, EnvType, resolve_topic, strtobool

from .. import postgres
from ..events import EventStore
from .dcb import HoldfastDCBRecorder
from .recorders import (
    HoldfastAggregateRecorder,
    HoldfastApplicationRecorder,
    HoldfastProcessRecorder,
    HoldfastTrackingRecorder,
)
from .translation import translated

if TYPE_CHECKING:
    from eventsourcing.dcb.api import DCBRecorder
    from eventsourcing.persistence import AggregateRecorder, ApplicationRecorder, ProcessRecorder

_Kind = TypeVar("_Kind", bound=HoldfastTrackingRecorder | HoldfastAggregateRecorder)
_MAX_PREFIX = 30


class HoldfastFactory(InfrastructureFactory[TrackingRecorder], DCBInfrastructureFactory[TrackingRecorder]):
    """Makes recorders on stores of Holdfast."""

    STORE = "HOLDFAST_STORE"
    LOCK_TIMEOUT = "HOLDFAST_LOCK_TIMEOUT"
    DURABLE = "HOLDFAST_DURABLE"
    ORIGINATOR_ID_TYPE = "ORIGINATOR_ID_TYPE"

    aggregate_recorder_class = HoldfastAggregateRecorder
    application_recorder_class = HoldfastApplicationRecorder
    tracking_recorder_class = HoldfastTrackingRecorder
    process_recorder_class = HoldfastProcessRecorder
    dcb_recorder_class = HoldfastDCBRecorder

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        place = self.env.get(self.STORE)
        if not place:
            keys = ", ".join(self.env.create_keys(self.STORE))
            raise OSError(f"there is no event store in the environment. Set one of: {keys}")
        self._place = place
        self._name = self.env.name.lower() or "stored"
        if not re.fullmatch(r"[a-z0-9_]\w*", self._name):
            raise OSError(f"the name {self.env.name!r} of an application cannot be part of the name of a store")
        id_type = self.env.get(self.ORIGINATOR_ID_TYPE, "uuid").lower()
        if id_type not in ("uuid", "text"):
            raise OSError(f"{self.ORIGINATOR_ID_TYPE} is 'uuid' or 'text', not {id_type!r}")
        self._has_text_ids = id_type == "text"
        timeout = self.env.get(self.LOCK_TIMEOUT, "5").strip()
        try:
            self._options: dict[str, Any] = {
                "lock_timeout": float(timeout) if timeout else None,
                "durable": strtobool(self.env.get(self.DURABLE) or "yes"),
            }
        except ValueError as error:
            raise OSError(f"{self.LOCK_TIMEOUT} is a number of seconds, {self.DURABLE} is yes or no: {error}") from None
        self._stores: dict[str, EventStore] = {}

    def store(self, purpose: str) -> EventStore:
        """The event store of this application for a purpose: "events", "snapshots", "tracking" or "dcb"."""
        if purpose not in self._stores:
            with translated():
                self._stores[purpose] = EventStore(self._path(purpose), **self._options)
        return self._stores[purpose]

    def _path(self, purpose: str) -> str:
        if "://" not in self._place:
            return os.path.join(self._place, self._name, purpose)
        url, given = postgres.split(self._place, ("prefix",))
        prefix = f"{given.get('prefix', '')}{self._name}_{purpose}_"
        if len(prefix) > _MAX_PREFIX:  # the same for every process
            digest = hashlib.sha256(prefix.encode()).hexdigest()[:8]
            prefix = f"{prefix[: _MAX_PREFIX - len(digest) - 2]}_{digest}_"
        return f"{url}{'&' if '?' in url else '?'}prefix={prefix}"

    def _recorder(self, kind: type[_Kind], purpose: str, variable: str = "") -> _Kind:
        """A recorder of this class, or of its subclass that the variable names."""
        topic = self.env.get(variable) if variable else None
        chosen = resolve_topic(topic) if topic else kind
        if not issubclass(chosen, kind):
            raise OSError(f"{variable}: {topic} is no subclass of {kind.__name__}")
        return chosen(self.store(purpose), has_text_ids=self._has_text_ids)

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        return self._recorder(self.aggregate_recorder_class, purpose)

    def application_recorder(self) -> ApplicationRecorder:
        return self._recorder(self.application_recorder_class, "events", self.APPLICATION_RECORDER_TOPIC)

    def tracking_recorder(self, tracking_recorder_class: type[TrackingRecorder] | None = None) -> TrackingRecorder:
        if tracking_recorder_class is None:
            return self._recorder(self.tracking_recorder_class, "tracking", self.TRACKING_RECORDER_TOPIC)
        if not issubclass(tracking_recorder_class, HoldfastTrackingRecorder):
            name = tracking_recorder_class.__name__
            raise OSError(f"{name} is no subclass of HoldfastTrackingRecorder")
        return self._recorder(tracking_recorder_class, "tracking")

    def process_recorder(self) -> ProcessRecorder:
        return self._recorder(self.process_recorder_class, "events", self.PROCESS_RECORDER_TOPIC)

    def dcb_recorder(self) -> DCBRecorder:
        return self.dcb_recorder_class(self.store("dcb"))

    def close(self) -> None:
        """Close files and connections. A recorder that is used again opens them again."""
        for store in self._stores.values():
            store.close()
