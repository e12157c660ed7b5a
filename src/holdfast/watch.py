"""Wait for a file to change: by file events where there are any, else in pauses that grow."""

from __future__ import annotations

from time import monotonic

from . import system
from .files import OwnedFd
from .wait import RECHECK_S, Backoff, Readable, sooner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wait import Step

_SOON_S = 0.001


class Waiting:
    """One wait for the file at a path to change.

    When a process dies, the kernel reports that the file was closed, and only then drops its locks. So after an event
    the waiter attempts again soon, and then less and less often, even if no further event comes.

    events: a `WATCH_` constant of `system`; 0: all that may mean that the lock is free
    """

    __slots__ = ("_events", "_look", "_path", "_registered", "backoff", "watch")

    def __init__(self, path: str, events: int = 0) -> None:
        self._path = path
        self._events = events
        self._registered = False
        self.watch: system.Watch | None = None
        self._look = RECHECK_S
        self.backoff = Backoff()

    def begin(self) -> bool:
        """Register for events. True: just registered, so the caller attempts again before it sleeps.

        The caller has the file open. If the path still names that file afterwards, that file is the watched one.
        """
        if self._registered:
            return False
        try:
            if self.watch is None:
                self.watch = system.Watch(self._path, OwnedFd, self._events)
            else:
                self.watch.move(self._path)
        except OSError:
            return False  # too many watches, or the file is gone already
        self._registered = True
        return True

    def move(self, path: str) -> None:
        """The path names another file now, or none. The next `begin` registers again."""
        self._path = path
        self._registered = False

    def step(self, deadline: float | None) -> Step:
        """The step to wait for. It ends at the next recheck at the latest."""
        if self.watch is None or not self._registered:
            return self.backoff.pause(deadline)
        look = sooner(monotonic() + self._look, deadline)
        self._look = min(self._look * 10, RECHECK_S)
        return Readable(self.watch.fd, look)

    def drain(self) -> None:
        """Read all events, before the next attempt: an event after the attempt must wake the waiter."""
        if self.watch is not None and self.watch.drain():
            self._look = _SOON_S

    def end(self, *, reuse: bool = False) -> None:
        """Close the watch. `reuse`: keep the inotify instance for the next wait of this process.

        In a forked child that unwinds its parent's wait, nothing happens.
        """
        if self.watch is not None:
            self.watch.close(reuse=reuse)
            self.watch = None
