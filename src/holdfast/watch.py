"""Waiting for a file to change: by its events where there are any, else in pauses that grow."""

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

    When a process dies, the kernel reports that the file was closed and only then drops its locks. So after an event
    that brought nothing the waiter looks again, soon first and then less and less often, before it trusts the next one.
    """

    __slots__ = ("_look", "_path", "_registered", "_watch", "backoff")

    def __init__(self, path: str) -> None:
        self._path = path
        self._registered = False
        self._watch: system.Watch | None = None
        self._look = RECHECK_S
        self.backoff = Backoff()

    def begin(self) -> bool:
        """Register for events. True: that is new, so the caller has to look at what happened before.

        The caller has the file open: then, if the path still names it afterwards, it is the one that is watched.
        """
        if self._registered:
            return False
        try:
            if self._watch is None:
                self._watch = system.Watch(self._path, OwnedFd)
            else:
                self._watch.move(self._path)
        except OSError:
            return False  # there are too many, or the file is gone already
        self._registered = True
        return True

    def move(self, path: str) -> None:
        """Another file has the name now, or none for the moment. `begin` registers for it."""
        self._path = path
        self._registered = False

    def step(self, deadline: float | None) -> Step:
        """What to wait for; at most until the next safety look."""
        if self._watch is None or not self._registered:
            return self.backoff.pause(deadline)
        look = sooner(monotonic() + self._look, deadline)
        self._look = min(self._look * 10, RECHECK_S)
        return Readable(self._watch.fd, look)

    def drain(self) -> None:
        """Take the events off, before the next attempt: an event that comes after it must wake the waiter."""
        if self._watch is not None and self._watch.drain():
            self._look = _SOON_S

    def end(self, *, reuse: bool = False) -> None:
        """Close the watch. `reuse`: keep the inotify instance for the next wait of this process.

        In a forked child that unwinds its parent's wait, nothing happens.
        """
        if self._watch is not None:
            self._watch.close(reuse=reuse)
            self._watch = None
