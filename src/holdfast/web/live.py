"""Sends a page again, as a server-sent event, when its content has changed.

All browsers that show one URL share a `Channel`. It renders when a topic of the page has news, and sends only what
differs from what it sent before. After a change it looks again soon, until nothing changes: the kernel reports that a
file was closed before it drops the lock, and events of our own looks are left out (`watching`).

A channel ends with its last reader. A reader that comes back after its connection was lost names the content that it
has (Last-Event-ID), and gets the page only if that has changed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from time import monotonic
from typing import NamedTuple

from .watching import Polling, Topic, Watcher

_SOON_S = 0.3
_MIN_GAP_S, _MAX_GAP_S = 0.15, 5.0  # between two renderings of a page
_SHARE = 4  # a page that takes long to render is rendered less often: a fifth of the time
_ALIVE_S = 30.0  # a comment is sent, so that a lost connection is noticed
_SAFETY_S, _SAFETY_SHARE = 60.0, 3000  # a look without an event. No event reports that a lock became too old
_MAX_SAFETY_S = 600.0  # a page took so long because a server did not answer, perhaps

Topics = Callable[[], list[Topic]]  # of a page. It may have more of them when it is rendered again


class Content(NamedTuple):
    """What is inside <main>."""

    id: str
    html: str

    @classmethod
    def of(cls, html: str) -> Content:
        return cls(blake2b(html.encode(errors="replace"), digest_size=8).hexdigest(), html)

    def event(self) -> bytes:
        lines = "".join(f"data: {line}\n" for line in self.html.splitlines())
        return f"id: {self.id}\nevent: page\n{lines}\n".encode(errors="replace")


def pauses(took: float) -> tuple[float, float]:
    """The seconds until a page may be rendered again, and until it is rendered again without news."""
    gap = min(_MAX_GAP_S, max(_MIN_GAP_S, _SHARE * took))
    return gap, min(_MAX_SAFETY_S, max(_SAFETY_S, _SAFETY_SHARE * took))


class Channel:
    """One URL, and the browsers that show it."""

    def __init__(self, render: Callable[[], Awaitable[str]], topics: Topics, watcher: Watcher) -> None:
        self._render, self._topics, self._watcher = render, topics, watcher
        self._used: list[Topic] = []
        self.readers: set[asyncio.Event] = set()
        self.content: Content | None = None
        self._task: asyncio.Task[None] | None = None

    def join(self, reader: asyncio.Event) -> None:
        self.readers.add(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def leave(self, reader: asyncio.Event) -> None:
        self.readers.discard(reader)
        if not self.readers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._watcher.leave(self._used)
            self._used = []

    def _use_topics(self) -> bool:
        """Watch what the page shows now. True: there is more than before."""
        wanted = self._topics()
        added = [topic for topic in wanted if topic not in self._used]
        gone = [topic for topic in self._used if topic not in wanted]
        self._watcher.use(added)
        self._watcher.leave(gone)
        self._used = wanted
        return bool(added)

    async def _run(self) -> None:
        look_again = False
        while True:
            self._use_topics()
            versions = [topic.version for topic in self._used]
            began = monotonic()
            content = Content.of(await self._render())
            took = monotonic() - began
            for topic in self._used:
                self._watcher.watch(topic)  # there may be new directories
            is_new = content.id != (self.content and self.content.id)
            if is_new:
                self._show(content)
            gap, safety = pauses(took)
            pause = _SOON_S if is_new or look_again else safety
            await asyncio.sleep(gap)
            look_again = self._use_topics() or await self._watcher.wait(self._used, versions, pause)

    def _show(self, content: Content) -> None:
        self.content = content
        for reader in self.readers:
            reader.set()
        for topic in self._used:
            for wait in topic.waits:
                if isinstance(wait, Polling):
                    wait.changed()


class Live:
    """The channels that have readers."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._channels: dict[str, Channel] = {}
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Let all streams end, so that the server can."""
        self._ending.set()
        for channel in self._channels.values():
            for reader in channel.readers:
                reader.set()

    async def stream(
        self, url: str, seen: str, render: Callable[[], Awaitable[str]], topics: Topics
    ) -> AsyncIterator[bytes]:
        """The events for one reader. seen: the id of the content that it has."""
        channel = self._channels.get(url)
        if channel is None:
            channel = self._channels[url] = Channel(render, topics, self._watcher)
        reader = asyncio.Event()
        reader.set()
        channel.join(reader)
        try:
            yield b"retry: 1000\n\n"
            while not self._ending.is_set():
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.wait(), _ALIVE_S)
                if not reader.is_set():
                    yield b": alive\n\n"
                reader.clear()
                content = channel.content
                if content is not None and content.id != seen:
                    seen = content.id
                    yield content.event()
        finally:
            channel.leave(reader)
            if not channel.readers and self._channels.get(url) is channel:
                del self._channels[url]
