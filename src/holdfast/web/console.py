"""What the console shows: the locks with their history, the queues, the event stores.

Threads read, because a disk or a server may be slow. The event loop only waits (`watching`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic, time
from typing import Any

from .. import postgres, wait
from ..collect.locks import all_locks
from ..collect.places import Places, look_into
from ..collect.tasks import queue_at
from ..errors import HoldfastError
from ..files import inode_of
from ..locks.listing import Alarm, alarm_on
from ..owner import hide_passwords, without_passwords
from ..status import Status
from ..tasks import TaskQueue
from .text import Cleaner
from .watching import Polling, Topic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..events import EventStore

_FRESH_S = 0.05  # a look that is younger serves several pages
_MAX_CHANGES = 200
_ASK_EVERY_S, _ASK_AGAIN_S = 60.0, 5.0  # a server for its queues and stores; after an error


def slug_of(name: str) -> str:
    """A short name for URLs. The path itself stays out of them."""
    base = re.sub(r"[^A-Za-z0-9]+", "-", name.partition("?")[0].rstrip("/").rpartition("/")[2]).strip("-")[:30]
    return f"{base or 'x'}-{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:6]}"


@dataclass(frozen=True)
class Change:
    """Something that happened to a lock, at the moment at which it was seen."""

    at: float
    path: str
    what: str
    is_loss: bool = False


class Locks:
    """All locks, and what changed since the first look. Only open pages look at once when something changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        alarms = [_alarm_on(url) for url in dict.fromkeys(console.urls)]
        waits = [Polling()] if None in alarms else []
        self.topic = Topic("locks", waits=waits, alarms=filter(None, alarms))
        self.topic.counts_opened = True
        self._mutex = threading.Lock()
        self._found: dict[str, Status] = {}
        self._looked = -1.0
        self.seen_since: float | None = None  # the first look
        self.changes: deque[Change] = deque(maxlen=_MAX_CHANGES)
        self.errors: dict[str, str] = {}
        self._folders: set[str] = set()  # of waiters

    def watch_directories(self) -> None:
        """All in which a lock, a queue or a store may appear. Also pages that show no locks need them."""
        self.topic.directories = self._console.directories | self._folders

    def look(self) -> list[Status]:
        """All locks now, or a moment ago."""
        with self._mutex:
            if monotonic() - self._looked > _FRESH_S:
                self._look()
            return list(self._found.values())

    def _look(self) -> None:
        self._console.find()
        with self.topic.look():
            found: dict[str, Status] = {}
            self.errors = {}
            for place in self._console.places.locks:
                try:
                    found.update((one.path, one) for one in all_locks([place], self._console.recursive))
                except (OSError, HoldfastError) as error:
                    self.errors[hide_passwords(place)] = without_passwords(str(error))
            inside = self._console.inside
            found = {path: one for path, one in found.items() if not path.startswith(inside)}
            self._folders = {f"{path}.queue" for path in found if "://" not in path and os.path.isdir(f"{path}.queue")}
            self.watch_directories()
        self._looked = monotonic()
        now = time()
        if self.seen_since is None:
            self.seen_since = now
        else:
            for path in sorted(found.keys() | self._found.keys()):
                self.changes += [Change(now, path, *one) for one in changes(self._found.get(path), found.get(path))]
        self._found = found

    def history(self, path: str) -> list[Change]:
        """What happened to a lock, the last change first."""
        return [change for change in reversed(self.changes) if change.path == path]

    def was_broken(self, status: Status) -> None:
        """A user of the console has broken this lock."""
        with self._mutex:
            names = ", ".join(map(str, status.holders)) or "an unknown process"
            self.changes.append(Change(time(), status.path, f"broken here, lost by {names}", is_loss=True))


def changes(before: Status | None, after: Status | None) -> list[tuple[str, bool]]:
    """What happened between two looks: a text, and whether a holder lost the lock."""
    found: list[tuple[str, bool]] = []
    was, now = (
        {(holder.pid, holder.host) for holder in one.holders} if one is not None else set() for one in (before, after)
    )
    if before is not None:
        word = "lost: taken away from" if before.stale else "released by"
        found += [(f"{word} {_name(one)}", before.stale) for one in sorted(was - now, key=str)]
    if after is not None:
        found += [(f"acquired by {_name(one)}", False) for one in sorted(now - was, key=str)]
        if after.stale and not (before is not None and before.stale):
            found.append(("became stale", False))
        if before is not None and before.held and was == now and before.token != after.token:
            found.append(("acquired again by the same process", False))
    queued, queues = ([waiter.pid for waiter in one.waiters] if one is not None else [] for one in (before, after))
    found += [(f"pid {pid} began to wait", False) for pid in queues if pid not in queued]
    found += [
        (f"pid {pid} stopped waiting", False)
        for pid in queued
        if pid not in queues and pid not in {one for one, _ in now}
    ]
    return found


def _name(holder: tuple[int | None, str | None]) -> str:
    pid, host = holder
    return (f"pid {pid}" if pid is not None else "an unknown process") + (f" on {host}" if host else "")


def _alarm_on(url: str) -> Alarm | None:
    try:
        return alarm_on(url)
    except HoldfastError:  # the first look shows it
        return None


class Shown:
    """A queue or a store. `name` is its path, or its URL without a password."""

    def __init__(self, place: str, topic: Topic) -> None:
        self.place, self.topic = place, topic
        self.name = hide_passwords(place)
        self.slug = slug_of(place)
        self._opened: Any = None
        self._identity: object = None
        self._mutex = threading.Lock()

    def _open(self, open: Callable[[str], Any], file: str, identity_of: Callable[[os.stat_result], object]) -> Any:
        """The object; a new one if the directory was deleted and made again. Then this file in it is another one."""
        with self._mutex:
            identity = self._identity
            if "://" not in self.place:
                with suppress(FileNotFoundError):  # deleted: the object says so
                    identity = identity_of(os.stat(f"{self.place}/{file}"))
            if self._opened is None or identity != self._identity:
                self._opened, self._identity = open(self.place), identity
            return self._opened


class Queue(Shown):
    """A task queue."""

    def __init__(self, place: str) -> None:
        paths, alarms = ([], [self._alarm]) if "://" in place else ([place, f"{place}/workers"], [])
        super().__init__(place, Topic(place, paths, alarms=alarms))

    @property
    def queue(self) -> TaskQueue:
        found: TaskQueue = self._open(queue_at, "queue.db", inode_of)  # it is kept open
        return found

    def _alarm(self) -> Any:
        store: Any = self.queue.store  # on PostgreSQL
        return store.alarm()


class Store(Shown):
    """An event store."""

    def __init__(self, place: str) -> None:
        if "://" in place:
            topic = Topic(place, waits=[self._news], alarms=[postgres.Alarm(postgres.split(place, ["prefix"])[0])])
        else:
            below = ("", "/events", "/projections", "/subscriptions")
            topic = Topic(place, [place + name for name in below])
        super().__init__(place, topic)

    @property
    def store(self) -> EventStore:
        from ..events import EventStore

        found: EventStore = self._open(EventStore, "store.json", attrgetter("st_ino", "st_ctime_ns"))
        return found

    async def _news(self) -> None:
        """PostgreSQL notifies the listening session of every append."""
        store = await asyncio.to_thread(lambda: self.store)
        head = await asyncio.to_thread(store.head)
        await wait.adrive(store._engine.wait(head, head, None))


class Console:
    """Everything that is shown."""

    def __init__(self, given: list[str], recursive: bool, redact: list[str]) -> None:
        self.given = [place if "://" in place else os.path.abspath(place) for place in given]
        self.urls = [place for place in given if "://" in place]
        self.recursive = recursive
        self.clean = Cleaner(redact)
        self.places = Places()
        self.inside: tuple[str, ...] = ()  # the paths of queues and stores. Locks in them are theirs
        self.directories: set[str] = set()  # of locks
        self.queues: dict[str, Queue] = {}
        self.stores: dict[str, Store] = {}
        self.locks = Locks(self)
        self._servers = Places()
        self._ask_at = -1.0
        self._mutex = threading.Lock()
        self.find()

    def find(self) -> None:
        """Look for locks, queues and stores that are new or gone."""
        with self._mutex, self.locks.topic.look():
            if monotonic() > self._ask_at:
                self._servers = look_into(self.urls, self.recursive)
                self._ask_at = monotonic() + (_ASK_AGAIN_S if self._servers.errors else _ASK_EVERY_S)
            paths = [place for place in self.given if "://" not in place]
            self.places = look_into(paths, self.recursive) + self._servers
            self.queues = _kept(self.queues, self.places.queues, Queue)
            self.stores = _kept(self.stores, self.places.stores, Store)
            self.inside = tuple(f"{path}/" for path in (*self.places.queues, *self.places.stores))
            self.directories = {path for path in self.places.directories if not f"{path}/".startswith(self.inside)}
            self.locks.watch_directories()

    @property
    def errors(self) -> dict[str, str]:
        return {**self.places.errors, **self.locks.errors}

    @property
    def topics(self) -> list[Topic]:
        return [self.locks.topic, *(one.topic for one in (*self.queues.values(), *self.stores.values()))]

    def lock(self, path: str) -> Status | None:
        return next((one for one in self.locks.look() if one.path == path), None)

    @property
    def title(self) -> str:
        return ", ".join(hide_passwords(place) for place in self.given)


def _kept(known: dict[str, Any], places: list[str], make: Any) -> dict[str, Any]:
    """Objects for these places. Those that exist stay, with their connections."""
    return {slug: known.get(slug) or make(place) for slug, place in ((slug_of(place), place) for place in places)}
