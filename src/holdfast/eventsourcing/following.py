"""What both kinds of subscription have in common: reading on, and waiting for news until another thread stops it."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from .. import system, wait
from ..files import pipe
from .translation import translated

if TYPE_CHECKING:
    from ..events import EventStore, Query, StoredEvent

_AT_ONCE = 500


class Follower:
    """The events that match a query behind a position, as they come.

    The engine of the store wakes it: by a file event or by a notification of the server. It does not poll.
    """

    def __init__(self, store: EventStore, query: Query, after: int) -> None:
        self._store, self._query = store, query
        self._after = after  # up to here, every event that matches was given or is ready
        self._head = 0
        self._ready: deque[StoredEvent] = deque()
        self._is_stopped = False
        self._mutex = Lock()  # one thread reads at a time
        self._reader, self._writer = pipe()

    def stop(self) -> None:
        """End every wait, now and later. Any thread may call it, more than once."""
        self._is_stopped = True
        with suppress(OSError):
            system.write(self._writer.fd, b"!")  # never read again, so that it stays readable

    def next(self) -> StoredEvent:
        """The next event. Raises StopIteration after `stop`."""
        with self._mutex, translated():
            while not self._is_stopped:
                if self._ready:
                    return self._ready.popleft()
                reading = self._store.read(self._query, self._after, _AT_ONCE)
                self._head = max(self._head, reading.head)
                self._ready.extend(reading)
                if self._ready:
                    self._after = self._ready[-1].position
                else:
                    self._after = max(self._after, reading.head)
                    self._wait()
        raise StopIteration

    def _wait(self) -> None:
        steps = self._store._news(self._after, self._head, None)
        try:
            while not self._is_stopped:
                step = next(steps)
                if isinstance(step, wait.Run):
                    step.block()
                else:
                    fds = [step.fd] if isinstance(step, wait.Readable) else []
                    wait.poll([self._reader.fd, *fds], step.left())
        except StopIteration:
            pass
        finally:
            steps.close()
