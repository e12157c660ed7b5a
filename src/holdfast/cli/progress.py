"""What a wait looks like: one live line on a terminal, one line after a second anywhere else."""

from __future__ import annotations

import os
import sys
import time
from threading import Event, Thread

from ..errors import HoldfastError
from . import output
from .failures import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from ..locks.base import BaseLock
    from ..status import Status

_FIRST_LOOK, _NEXT_LOOK, _PIPE_LOOK = 0.2, 0.5, 1.0  # seconds
_CLEAR = "\r\x1b[K"


class Progress:
    """Shows who is in the way, from another thread, until the `with` block is left."""

    def __init__(self, lock: BaseLock[Any], options: argparse.Namespace, *, only_live: bool = False) -> None:
        """only_live: where there is no terminal, show nothing but for -v."""
        self._lock = lock
        self._json: bool = options.json
        self._verbose: bool = getattr(options, "verbose", False)
        self._done = Event()
        self._live = not self._json and output.can_redraw(sys.stderr)
        self._quiet = options.quiet or (only_live and not self._live and not self._verbose)
        self._thread: Thread | None = None

    def __enter__(self) -> Progress:
        if not self._quiet:
            # A daemon: a look at the lock on a file system that hangs must not keep us here.
            self._thread = Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(1.0)
            if self._live:
                output.write_error(_CLEAR)

    def _show(self) -> None:
        try:
            self._show_until_done()
        except (HoldfastError, OSError, ValueError):
            pass  # the wait itself will tell

    def _show_until_done(self) -> None:
        if not self._live:
            if not self._done.wait(0 if self._verbose else _PIPE_LOOK):
                self._show_once()
            return
        pause = _FIRST_LOOK
        while not self._done.wait(pause) and (status := self._look()) is not None:
            text = describe(self._lock.name, status)
            # With room for the ^C that a terminal shows: a line that wraps cannot be cleared.
            output.write_error(_CLEAR + output.shortened(text, output.terminal_size(2)[0] - 4))
            pause = _NEXT_LOOK

    def _look(self) -> Status | None:
        """The status of the lock. None: this process has acquired it meanwhile."""
        status = self._lock.status()
        return None if any(holder.pid == os.getpid() for holder in status.holders) else status

    def _show_once(self) -> None:
        status = self._look()
        if status is None:
            return
        if self._json:
            output.say_json({"event": "waiting", **status.as_dict()}, to_stderr=True)
        else:
            output.complain(describe(self._lock.name, status))


def describe(path: str, status: Status) -> str:
    """What place in the queue we have, for how long it is held, and by whom: the longest last, where it may be cut."""
    text = f"waiting for {output.shown(os.path.basename(path))}: "
    pids = [waiter.pid for waiter in status.waiters]
    if os.getpid() in pids:
        text += f"{_ordinal(pids.index(os.getpid()) + 1)} of {len(pids)} in the queue; "
    if not status.held or status.corrupt:
        return text + output.shown(status.explain())
    held = "shared" if status.permits is None and status.holders[0].shared else "held"
    text += held if status.permits is None else f"{len(status.holders)} of {status.permits} held"
    if status.since is not None:
        text += f" for {output.duration(time.time() - status.since)}"
    tag = f" [{status.tag}]" if status.tag else ""
    return text + output.shown(f" by {', '.join(map(str, status.holders[:3]))}{tag}")


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def busy(path: str, status: Status | None, timeout: float, code: int) -> Failure:
    """Why the lock was not acquired."""
    who = "held a moment ago" if status is None or not (status.held or status.waiters) else status.explain()
    what = "busy" if timeout == 0 else f"not free within {timeout:g} s"
    return Failure(code, f"{path}: {what}: {who}", path=path, found=status)
