"""Waits for news while a page is open: file events for paths, and the notifications of servers.

A *topic* is something that pages show: the locks, one queue, one store. It has a version, which grows with each piece
of news. A page waits until the version of one of its topics has changed.

    paths                     inotify, for all directories in one instance. It reports everything that wakes the library
    events on PostgreSQL      LISTEN, as `EventStore.tail`
    queues, subscriptions     an *alarm*: from now on the next change notifies this process, and costs its writer more.
    and locks on servers      After it has rung there is a pause, so that a busy server notifies a few times a second
    locks on SMB              nothing. A page looks every 1 to 5 seconds, rarer while nothing changes

An alarm does not ring for the end of a process. So a page also looks every 15 seconds.

To look at a lock opens its file, which is an event, too. So events of a file that is only opened do not count while a
look is under way. It ends in the event loop, which takes the events of the look off the queue first. `live` looks again
after each change until nothing changes, and rarely without an event.

Nothing waits for a topic that no open page shows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from .. import system
from ..errors import HoldfastError
from ..files import OwnedFd, pipe
from ..locks.listing import Alarm
from ..wait import poll

_ALARM_S, _BETWEEN_ALARMS_S = 15.0, 0.2  # without a change, it is set again after so long
_FIRST_LOOK_S, _LAST_LOOK_S = 1.0, 5.0

Wait = Callable[[], Awaitable[object]]  # ends when there may be news


class Topic:
    """Something that pages show. `directories` are watched, each of `waits` is awaited again and again, and each of
    `alarms` has a thread."""

    def __init__(
        self,
        name: str,
        directories: Iterable[str] = (),
        waits: Iterable[Wait] = (),
        alarms: Iterable[Alarm] = (),
    ) -> None:
        self.name = name
        self.directories = set(directories)
        self.waits = list(waits)
        self.alarms = list(alarms)
        self.counts_opened = False  # a file that is opened may be a lock that is acquired
        self.version = 0
        self.users = 0
        self._mutex = threading.Lock()
        self._looks = 0  # that are under way
        self._loop: asyncio.AbstractEventLoop | None = None
        self.take_events: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []
        self._stops: list[OwnedFd] = []  # closed to end the threads
        self._changed: set[asyncio.Event] = set()

    def bump(self) -> None:
        self.version += 1
        for event in self._changed:
            event.set()

    def was_opened(self) -> None:
        """A file in one of the directories was opened."""
        if self.counts_opened and not self._looks:
            self.bump()

    @contextmanager
    def look(self) -> Iterator[None]:
        """A thread opens files in the directories, and that is no news."""
        with self._mutex:
            self._looks += 1
        try:
            yield
        finally:
            loop = self._loop
            try:
                if loop is None:
                    self._end_look()
                else:
                    loop.call_soon_threadsafe(self._end_look)
            except RuntimeError:  # the loop has ended
                pass

    def _end_look(self) -> None:
        self.take_events()
        with self._mutex:
            self._looks -= 1

    def begin(self) -> None:
        self.version += 1  # it was not watched until now
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._repeat(wait)) for wait in self.waits]
        for alarm in self.alarms:
            stopped, stop = pipe()
            self._stops.append(stop)
            threading.Thread(target=self._listen, args=[alarm, stopped], name="holdfast alarm", daemon=True).start()

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        while self._stops:
            self._stops.pop().close()

    async def _repeat(self, wait: Wait) -> None:
        while True:
            try:
                await wait()
            except (HoldfastError, OSError):
                await asyncio.sleep(_LAST_LOOK_S)
            self.bump()

    def _listen(self, alarm: Alarm, stopped: OwnedFd) -> None:
        """Set an alarm again and again, in a thread."""
        pause: float = 0
        while not poll([stopped.fd], pause):
            try:
                with alarm() as rung:
                    self._bump_soon()  # for what has changed until now
                    rings = bool(poll([stopped.fd, *rung], _ALARM_S))
                pause = _BETWEEN_ALARMS_S if rings else 0
            except Exception:  # of any library: a page without this thread would learn of nothing
                rings, pause = True, _LAST_LOOK_S
            if rings:
                self._bump_soon()

    def _bump_soon(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.bump)


class Polling:
    """The pauses between two looks at a thing that sends no events. They get longer while nothing changes."""

    def __init__(self) -> None:
        self._pause = _FIRST_LOOK_S

    def changed(self) -> None:
        self._pause = _FIRST_LOOK_S

    async def __call__(self) -> None:
        pause, self._pause = self._pause, min(_LAST_LOOK_S, self._pause * 1.5)
        await asyncio.sleep(pause)


class Watcher:
    """All topics with users, and the one inotify instance."""

    def __init__(self) -> None:
        self._watch: system.DirectoryWatch | None = None
        self._by_directory: dict[str, set[Topic]] = {}

    def use(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            topic.users += 1
            if topic.users == 1:
                topic.take_events = self._read
                topic.begin()
                self.watch(topic)

    def leave(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            topic.users -= 1
            if topic.users == 0:
                topic.end()
        if self._watch is not None and not any(topic.users for some in self._by_directory.values() for topic in some):
            self.close()

    def close(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fd)
            self._watch.close()
            self._watch = None
            self._by_directory.clear()

    def watch(self, topic: Topic) -> None:
        """Watch the directories of a topic that is in use. Call it again when there are more of them."""
        if not topic.directories:
            return
        try:
            if self._watch is None:
                self._watch = system.DirectoryWatch(OwnedFd)
                asyncio.get_running_loop().add_reader(self._watch.fd, self._read)
        except (OSError, NotImplementedError):  # no inotify here, or too many instances
            self._look_instead(topic)
            return
        for path in list(topic.directories):
            topics = self._by_directory.setdefault(path, set())
            if topic not in topics:
                topics.add(topic)
                try:
                    self._watch.add(path)
                    topic.bump()  # what came into it before is no event
                except FileNotFoundError:
                    topics.discard(topic)
                except OSError:  # too many watches, or a file system without events
                    self._look_instead(topic)

    def _look_instead(self, topic: Topic) -> None:
        if not any(isinstance(wait, Polling) for wait in topic.waits):
            topic.waits.append(Polling())
            topic.end()
            topic.begin()

    def _read(self) -> None:
        if self._watch is None:
            return
        changed, opened = self._watch.read()
        gone = [path for path in changed if not self._watch.watches(path)]
        for topic in {topic for path in changed for topic in self._by_directory.get(path, ())}:
            topic.bump()
        for topic in {topic for path in opened - changed for topic in self._by_directory.get(path, ())}:
            topic.was_opened()
        for path in gone:
            del self._by_directory[path]

    async def wait(self, topics: Iterable[Topic], versions: list[int], seconds: float) -> bool:
        """Wait until a topic has another version. False: the time is over."""
        some = list(topics)
        event = asyncio.Event()
        for topic in some:
            topic._changed.add(event)
        try:
            if [topic.version for topic in some] != versions:
                return True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
            return event.is_set()
        finally:
            for topic in some:
                topic._changed.discard(event)
