"""/metrics: the locks, queues and stores of the console, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from ..collect.events import followers_of
from ..collect.locks import state_of
from ..collect.search import running_tasks, workers_of
from ..errors import HoldfastError
from ..tasks.store import STATES
from .console import Console
from .views import orphans_seen

_HELP = {
    "holdfast_lock_held": "1 if the lock is held",
    "holdfast_lock_stale": "1 if the holder is dead or too old",
    "holdfast_lock_holders": "Holders of a lock, or taken permits of a semaphore",
    "holdfast_lock_waiters": "Processes that wait for the lock",
    "holdfast_tasks": "Tasks by state. Counting stops at the number that holdfast_count_limit has",
    "holdfast_queue_paused": "1 if the queue is paused",
    "holdfast_queue_workers": "Workers by state: busy, idle, dead",
    "holdfast_events_head": "Position of the last event",
    "holdfast_events_lag": "Events that a subscription or projection has not seen",
    "holdfast_count_limit": "Where counting stops",
    "holdfast_unreadable": "1 for each place that cannot be read",
}
LIMIT = 1_000_000  # a count of more tasks takes too long for a scrape

Sample = tuple[str, dict[str, str], float]


def metrics(console: Console) -> str:
    """All samples, grouped by name."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in _samples(console):
        text = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items())
        by_name.setdefault(name, []).append(f"{name}{{{text}}} {value:.16g}" if text else f"{name} {value:.16g}")
    lines = []
    for name, samples in by_name.items():
        lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge", *samples]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(console: Console) -> Iterable[Sample]:
    yield "holdfast_count_limit", {}, LIMIT
    for status in console.locks.look():
        labels = {"lock": status.path, "kind": status.kind}
        yield "holdfast_lock_held", labels, float(status.held)
        yield "holdfast_lock_stale", labels, float(state_of(status) == "stale")
        yield "holdfast_lock_holders", labels, len(status.holders)
        yield "holdfast_lock_waiters", labels, len(status.waiters)
    unreadable = set(console.errors)
    for shown, samples in [(one, _of_queue) for one in console.queues.values()] + [
        (one, _of_store) for one in console.stores.values()
    ]:
        try:
            yield from list(samples(shown))
        except (HoldfastError, OSError, ValueError):
            unreadable.add(shown.name)
    for name in sorted(unreadable):
        yield "holdfast_unreadable", {"place": name}, 1


def _of_queue(shown: object) -> Iterable[Sample]:
    queue, name = shown.queue, shown.name  # type: ignore[attr-defined]
    for state, number in queue.store.count(STATES, at_most=LIMIT).items():
        yield "holdfast_tasks", {"queue": name, "state": state}, number
    yield "holdfast_queue_paused", {"queue": name}, float(queue.is_paused)
    orphans = orphans_seen(queue)
    states = [one.state for one in workers_of(queue, running_tasks(queue), orphans)]
    for state in ("busy", "idle", "dead"):
        yield "holdfast_queue_workers", {"queue": name, "state": state}, states.count(state)


def _of_store(shown: object) -> Iterable[Sample]:
    store, name = shown.store, shown.name  # type: ignore[attr-defined]
    yield "holdfast_events_head", {"store": name}, store.head()
    for one in followers_of(store):
        yield "holdfast_events_lag", {"store": name, "kind": one.kind, "name": one.name}, one.lag
