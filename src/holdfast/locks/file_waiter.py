"""Waiting for a lock file: to acquire it (`acquire`), or until it is free (`until_free`).

attempt ── held ──▶ the grant
   │ busy
   ▼
keep the file open that the name means now; until it is gone, replaced or stale:
    register for its events, look once more, sleep until an event comes or the lock may have grown old
attempt again
"""

from __future__ import annotations

from time import monotonic

from .. import system
from ..wait import RECHECK_S, Pause, check_deadline, sooner
from ..watch import Waiting
from . import local
from .engine import BUSY, Outcome, attempt_step
from .removal import Changed, NotPermitted, open_existing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..files import OwnedFd
    from ..wait import Steps
    from .file_engine import FileEngine
    from .file_hold import FileGrant
    from .publish import Entry
    from .staleness import Judgement

_MAX_VAIN_LOOKS = 3


class FileWaiter:
    """One wait for a lock file. Only its holder is in front of the waiter."""

    __slots__ = ("_deadline", "_engine", "_file", "_waiting")

    def __init__(self, engine: FileEngine, deadline: float | None) -> None:
        self._engine = engine
        self._deadline = deadline
        self._file: OwnedFd | None = None
        self._waiting = Waiting(engine.location.file)

    def acquire(self) -> Steps[FileGrant]:
        engine, waiting = self._engine, self._waiting
        in_vain = 0  # attempts in a row that failed although there was nothing to wait for
        slept = False
        grant: FileGrant | Outcome = BUSY
        try:
            while True:
                grant = yield from attempt_step(engine, engine.attempt, queued=not slept)
                if not isinstance(grant, Outcome):
                    grant.wait = local.EndedWait(self)
                    return grant
                self._close_file()
                check_deadline(self._deadline)
                slept = yield from self._wait_for_change()
                in_vain = 0 if slept else in_vain + 1
                # The file is stale, but in use as another kind of lock, or being removed, or not ours to remove.
                if in_vain > _MAX_VAIN_LOOKS:
                    yield waiting.backoff.pause(self._deadline)
        finally:
            if isinstance(grant, Outcome):
                self._close_file()
                waiting.end()
            elif not local.may_linger():
                self.close()

    def close(self) -> None:
        """Called when a lock that was acquired is released. The removed file of its last holder is closed then: the
        kernel frees it, which takes a tenth of the time of a hand-off."""
        self._close_file()
        self._waiting.end(reuse=True)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def until_free(self) -> Steps[None]:
        try:
            while not self._engine.is_free():
                check_deadline(self._deadline)
                yield from self._wait_for_change()
                self._close_file()
        finally:
            self._close_file()
            self._waiting.end()

    def _wait_for_change(self) -> Steps[bool]:
        """Wait until the file that the name means now is gone, replaced or stale. False: it is so already.

        The file stays open between looks: closing it would wake every waiter that watches it, this one included.
        """
        engine = self._engine
        entry = engine.open_entry()
        slept = False
        try:
            self._file = open_existing(entry, engine.name)
            if self._file is not None:
                slept = yield from self._wait_at(entry, self._file)
        except (Changed, FileNotFoundError):  # sshfs has no attributes of a removed file
            self._close_file()
            engine.resolve()
        except NotPermitted:
            check_deadline(self._deadline)
            yield self._waiting.backoff.pause(self._deadline)
            slept = True
        finally:
            entry.close()
        self._waiting.move(engine.location.file)
        return slept

    def _wait_at(self, entry: Entry, file: OwnedFd) -> Steps[bool]:
        engine, waiting, deadline = self._engine, self._waiting, self._deadline
        st, has_events, slept = system.fstat(file.fd), local.has_events(engine.location.file), False
        while entry.means(file.fd, st):
            judgement = engine.judge(file.fd)
            if judgement.stale:
                break
            check_deadline(deadline)
            if has_events and waiting.begin():
                continue  # registered: look once more, and only then sleep
            until = sooner(monotonic() + self._next_look(judgement, has_events), deadline)
            yield waiting.step(until) if has_events else Pause(until)
            slept = True
            waiting.drain()
        if not (has_events and system.HAS_FOLDERS):
            self._close_file()  # on a server, and on Windows, the name of a removed file is taken until it is closed
        return slept

    def _next_look(self, judgement: Judgement, has_events: bool) -> float:
        """Return in how many seconds to look although no event came: the lock may have grown old by then."""
        longest = RECHECK_S if has_events else self._engine.retry
        return longest if judgement.stale_in is None else min(longest, judgement.stale_in + 0.001)
