"""The content of each page: the name of its template, and what the template shows. All of this runs in threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import time
from typing import Any
from urllib.parse import urlencode

from ..collect import events as event_data
from ..collect.locks import state_of, user_of
from ..collect.search import (
    MAX_COUNT,
    WINDOW,
    Filter,
    counts_of,
    running_tasks,
    search,
    throughput,
    workers_of,
)
from ..collect.tasks import orphans_of
from ..errors import HoldfastError
from ..events import Query
from ..owner import without_passwords
from ..status import Status
from ..tasks import Task, TaskQueue
from .console import Console, Queue, Store
from .text import bars, many

PAGE = 50
FILTERS = ("state", "function", "key", "text")  # the fields of the form above a list of tasks
LONG_WAIT_S = 60.0
LAG = 1000  # events: a subscription that is further behind needs attention
STATES = ("pending", "running", "done", "failed", "cancelled")
_ORDER = {"stale": 0, "corrupt": 1, "held": 2, "shared": 2, "free": 3}

Params = Mapping[str, str]
Context = dict[str, Any]


class NotFound(Exception):
    """What the URL names is not there, or not any more."""


@dataclass(frozen=True)
class Attention:
    """Something that needs a person. `url` leads there."""

    text: str
    url: str
    level: str = "warning"  # or "bad"


def whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


# Overview.


def overview(console: Console, params: Params) -> tuple[str, Context]:
    locks = console.locks.look()
    attention = [Attention(f"{place}: {why}", "/", "bad") for place, why in console.errors.items()]
    attention += [found for status in locks for found in _about_lock(status)]
    queues = [_guarded(queue, _queue_row) for queue in console.queues.values()]
    stores = [_guarded(store, _store_row) for store in console.stores.values()]
    attention += [one for row in (*queues, *stores) for one in row["attention"]]
    held = sum(status.held for status in locks)
    return "overview.html", {
        "attention": attention,
        "locks": sorted(locks, key=lambda one: (_ORDER[state_of(one)], one.path))[:PAGE],
        "numbers": {"locks": len(locks), "held": held, "waiting": sum(len(status.waiters) for status in locks)},
        "queues": queues,
        "stores": stores,
    }


def _about_lock(status: Status) -> list[Attention]:
    url = f"/lock?{urlencode({'name': status.path}, errors='surrogateescape')}"
    found = []
    if status.stale:
        found.append(Attention(f"{status.path} is stale: its holder is dead or too old", url))
    elif status.corrupt:
        found.append(Attention(f"{status.path} has an empty or damaged record", url))
    longest = max((time() - waiter.since for waiter in status.waiters if waiter.since), default=0.0)
    if longest > LONG_WAIT_S:
        found.append(Attention(f"{len(status.waiters)} waiting for {status.path}, for over a minute", url))
    return found


def _guarded(shown: Any, row: Any) -> Context:
    """The row of a queue or a store. One that cannot be read is shown with the reason."""
    base = {"name": shown.name, "slug": shown.slug, "attention": [], "error": None}
    try:
        return {**base, **row(shown)}
    except (HoldfastError, OSError, ValueError) as error:
        text = without_passwords(str(error))
        return {**base, "error": text, "attention": [Attention(text, "/", "bad")]}


def _queue_row(shown: Queue) -> Context:
    queue, url = shown.queue, f"/queue/{shown.slug}"
    orphans = orphans_seen(queue)
    counts = counts_of(queue)
    attention = []
    if orphans:
        text = f"{many(len(orphans), 'task')} of dead workers in {shown.name}. The next worker takes over"
        attention.append(Attention(text, url, "bad"))
    if counts["failed"]:
        more = " or more" if counts["failed"] >= MAX_COUNT else ""
        text = f"{many(counts['failed'], 'failed task')}{more} in {shown.name}"
        attention.append(Attention(text, f"{url}?state=failed", "bad"))
    paused = queue.is_paused
    if paused:
        attention.append(Attention(f"{shown.name} is paused", url))
    return {"counts": counts, "paused": paused, "orphans": len(orphans), "attention": attention}


def _store_row(shown: Store) -> Context:
    store = shown.store
    followers = event_data.followers_of(store)
    last = next(iter(event_data.page(store, Query(), limit=1)), None)
    attention = [
        Attention(f"{one.kind} {one.name} of {shown.name} is {one.lag:,} events behind", f"/store/{shown.slug}")
        for one in followers
        if one.kind == "subscription" and one.lag > LAG
    ]
    return {"head": store.head(), "last": last, "followers": followers, "attention": attention}


def orphans_seen(queue: TaskQueue) -> frozenset[str]:
    """The running tasks of dead workers. What is left of other dead workers is removed."""
    try:
        return orphans_of(queue)
    except PermissionError:  # a user who may only look
        return frozenset()


# Locks.


def locks(console: Console, params: Params) -> tuple[str, Context]:
    text, only = params.get("text", ""), params.get("state", "")
    found = console.locks.look()
    shown = [
        status
        for status in sorted(found, key=lambda one: (_ORDER[state_of(one)], one.path))
        if (not only or state_of(status) == only or (only == "held" and status.held))
        and text.lower() in f"{status.path} {status.tag} {status.explain()}".lower()
    ]
    return "locks.html", {"locks": shown[:500], "found": len(shown), "all": len(found), "errors": console.errors}


def lock(console: Console, params: Params) -> tuple[str, Context]:
    path = params.get("name", "")
    status, history = console.lock(path), console.locks.history(path)
    if status is None:
        if not history:
            raise NotFound(f"There is no lock {path!r}, or not any more.")
        status = Status(path, "lock", held=False)
    return "lock.html", {
        "lock": status,
        "user": user_of(status),
        "history": history,
        "losses": sum(change.is_loss for change in history),
        "since": console.locks.seen_since,
        "stale_at": None if status.stale_in is None else round(time() + status.stale_in),
        "can_break": can_break(status),
    }


def can_break(status: Status) -> bool:
    """A kernel lock, and a lock on a server, end with their holder only."""
    return status.held and status.kind in ("file", "task") and "://" not in status.path


# Queues.


def queues(console: Console, params: Params) -> tuple[str, Context]:
    console.find()
    return "queues.html", {"queues": [_guarded(queue, _queue_row) for queue in console.queues.values()]}


def queue_of(console: Console, params: Params) -> Queue:
    try:
        return console.queues[params["slug"]]
    except KeyError:
        raise NotFound("There is no such queue, or not any more.") from None


def filter_of(console: Console, params: Params) -> Filter:
    state = params.get("state", "")
    return Filter(
        state if state in STATES else "",
        params.get("function", ""),
        params.get("key", ""),
        params.get("text", ""),
        in_data=not console.clean.keys,
    )


def queue(console: Console, params: Params) -> tuple[str, Context]:
    shown = queue_of(console, params)
    opened, wanted = shown.queue, filter_of(console, params)
    orphans = orphans_seen(opened)
    running = running_tasks(opened)
    found = search(opened, wanted, whole_number(params.get("before")), PAGE)
    workers = workers_of(opened, running, orphans)
    return "queue.html", {
        "shown": shown,
        "counts": counts_of(opened),
        "paused": opened.is_paused,
        "chart": bars(throughput(opened)),
        "workers": [replace(one, tasks=one.tasks[:3]) for one in workers[:PAGE]],
        "number_of_workers": len(workers),
        "schedules": _schedules(opened),
        "found": found,
        "filter": wanted,
        "query": {name: params[name] for name in FILTERS if params.get(name)},
        "is_first": "before" not in params,
        "orphans": orphans,
        "window": WINDOW,
        "reason": reason,
    }


def _schedules(queue: TaskQueue) -> list[Context]:
    found = []
    for name, schedule in queue.schedules().items():
        rule = schedule.cron or f"every {schedule.every:g} s"
        row: Context = {"name": name, "rule": rule, "tz": schedule.tz, "payload": schedule.payload, "error": None}
        row["function"] = schedule.function
        try:
            row["next"] = schedule.next_after(time())
        except (TypeError, ValueError) as error:
            row |= {"next": None, "error": str(error)}
        found.append(row)
    return found


def reason(task: Task, orphans: frozenset[str]) -> tuple[str, float | None]:
    """Why a task waits, or what is wrong with it; and a moment, if there is one."""
    if task.waits == "delayed":
        return "due", round(time() + (task.due_in or 0.0))
    if task.waits == "parked":
        return f"waits for key {task.key}", None
    if task.waits == "blocked":
        return "waits for other tasks", None
    if task.state == "running" and task.id in orphans:
        return "its worker is dead", None
    return ("is being cancelled", None) if task.cancelling else ("", None)


def task(console: Console, params: Params) -> tuple[str, Context]:
    shown = queue_of(console, params)
    (found,) = shown.queue.store.get([params.get("id", "")])
    if found is None:
        raise NotFound(f"There is no task {params.get('id', '')!r} in {shown.name}, or not any more.")
    orphans = orphans_seen(shown.queue) if found.state == "running" else frozenset()
    return "task.html", {"shown": shown, "task": found, "reason": reason(found, orphans)}


# Events.


def stores(console: Console, params: Params) -> tuple[str, Context]:
    console.find()
    return "stores.html", {"stores": [_guarded(store, _store_row) for store in console.stores.values()]}


def store_of(console: Console, params: Params) -> Store:
    try:
        return console.stores[params["slug"]]
    except KeyError:
        raise NotFound("There is no such event store, or not any more.") from None


def store(console: Console, params: Params) -> tuple[str, Context]:
    shown = store_of(console, params)
    types, tags = params.get("type", "").split(), params.get("tag", "").split()
    before = whole_number(params.get("before"))
    found = event_data.page(shown.store, Query.of(types, tags), before)
    return "store.html", {
        "shown": shown,
        "head": shown.store.head(),
        "events": found,
        "next": found[-1].position if len(found) == event_data.LIMIT and found[-1].position > 1 else None,
        "followers": event_data.followers_of(shown.store),
        "types": sorted({event.type for event in found}),
        "query": {name: params[name] for name in ("type", "tag") if params.get(name)},
        "is_first": before is None,
    }


def event(console: Console, params: Params) -> tuple[str, Context]:
    shown = store_of(console, params)
    position = whole_number(params.get("position")) or 0
    found = event_data.event_at(shown.store, position)
    if found is None:
        raise NotFound(f"{shown.name} has no event {position}.")
    return "event.html", {"shown": shown, "event": found, "head": shown.store.head()}
