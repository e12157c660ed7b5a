"""Counters of the locks of this process, by kind of lock.

    holdfast.metrics.snapshot()            all counters as a dictionary
    holdfast.metrics.export_prometheus()   through prometheus_client; needs the extra holdfast[prometheus]

To count costs one call of a C function, which is atomic under the interpreter lock: no count is lost, and no lock is
needed.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from prometheus_client.registry import Collector, CollectorRegistry

__all__ = ["export_prometheus", "snapshot"]

# The upper bounds of the histogram of waits, in seconds.
WAIT_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
_KINDS = ("lock", "semaphore", "file")  # shown even if they were not used


class Counter:
    """Counts the calls of `bump`, which are calls of `next(count)`.

    `itertools.count` is the only exact counter that needs no lock.
    """

    __slots__ = ("count", "description")

    def __init__(self, description: str) -> None:
        self.description = description
        self.count = count()

    def bump(self) -> None:
        next(self.count)

    @property
    def value(self) -> int:
        return int(repr(self.count)[6:-1])


class Kind:
    """The counters of one kind of lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._buckets = [Counter("") for _ in range(len(WAIT_BUCKETS) + 1)]
        self._seconds = 0.0
        self.acquisitions = Counter("Locks acquired")
        self.contended = Counter("Acquisitions that had to wait")
        self.timeouts = Counter("Waits that ended without the lock")
        self.identity_retries = Counter("Locks acquired again because the path named another file by then")
        self.cleanups = Counter("Lock files removed on release or after a wait")
        self.cleanups_skipped = Counter("Lock files kept because another process uses them or removal is not permitted")
        self.breaks = Counter("Locks taken away from their holder by hand or because they were stale")
        self.losses = Counter("Holds found to be lost")

    def waited(self, seconds: float) -> None:
        next(self.contended.count)
        next(self._buckets[bisect_left(WAIT_BUCKETS, seconds)].count)
        self._seconds += seconds  # exact, too: CPython switches threads only at calls and at jumps back

    def snapshot(self) -> dict[str, Any]:
        bounds, counts = (*WAIT_BUCKETS, float("inf")), [bucket.value for bucket in self._buckets]
        values: dict[str, Any] = {name: getattr(self, name).value for name in COUNTERS}
        return values | {"wait_seconds": {"buckets": dict(zip(bounds, counts, strict=True)), "sum": self._seconds}}


COUNTERS = {name: value.description for name, value in vars(Kind("")).items() if isinstance(value, Counter)}
kinds: dict[str, Kind] = {}


def kind(name: str) -> Kind:
    return kinds.get(name) or kinds.setdefault(name, Kind(name))


def snapshot() -> dict[str, dict[str, Any]]:
    """Return all counters, by kind of lock.

    `wait_seconds` has the number of waits in each bucket, by its upper bound in seconds, and the sum of all waits.
    """
    for name in _KINDS:
        kind(name)
    return {name: counters.snapshot() for name, counters in list(kinds.items())}


def export_prometheus(registry: CollectorRegistry | None = None) -> Collector:
    """Register a collector with prometheus_client and return it. To stop: `registry.unregister(collector)`."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        needs = "export_prometheus needs prometheus_client: pip install 'holdfast[prometheus]'"
        raise ImportError(needs, name="prometheus_client") from None
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector

    class HoldfastCollector(Collector):
        def collect(self) -> Any:
            taken = snapshot()
            for name, text in COUNTERS.items():
                family = CounterMetricFamily(f"holdfast_{name}", text, labels=["kind"])
                for kind_name, values in taken.items():
                    family.add_metric([kind_name], values[name])
                yield family
            histogram = HistogramMetricFamily("holdfast_wait_seconds", "Time waited for a lock", labels=["kind"])
            for kind_name, values in taken.items():
                waits = values["wait_seconds"]
                bounds = [*map(str, WAIT_BUCKETS), "+Inf"]
                counts = accumulate(waits["buckets"].values())
                histogram.add_metric([kind_name], list(zip(bounds, counts, strict=True)), waits["sum"])
            yield histogram

    collector = HoldfastCollector()
    (registry or REGISTRY).register(collector)
    return collector
