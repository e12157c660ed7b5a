"""`FileHold`: a held lock file, and `FileGrant`, which checks, renews and removes the file that was published."""

from __future__ import annotations

import sys
import time
from _thread import allocate_lock
from contextlib import suppress

from .. import process, system
from ..files import inode_of, named
from . import heartbeat
from .hold import Hold
from .local import LocalGrant
from .queue import remove_queue
from .removal import MAX_WAIT_TRIES, take_removal_byte

TYPE_CHECKING = False
if TYPE_CHECKING:
    import weakref
    from _thread import LockType

    from .file_engine import FileEngine
    from .lock_file import LockFile
    from .publish import Entry


class FileGrant(LocalGrant):
    """The lock file that this process has published."""

    __slots__ = (
        *("__weakref__", "_engine", "_lost", "_renewing"),
        *("acquired_at", "called_at", "content", "entry", "key", "renewed_hold", "token"),
    )

    shared = False
    key: process.Inode
    token: int
    renewed_hold: weakref.ref[FileHold] | None  # a hold with a heartbeat

    def __init__(self, engine: FileEngine, entry: Entry, content: bytes) -> None:
        self._engine = engine
        self.entry = entry
        self.content = content
        self.key = inode_of(entry.st)
        self.acquired_at = time.time()
        self.renewed_hold = None
        self.called_at = 0.0
        self._lost = False
        self._renewing: LockType | None = None  # held by a thread that renews; made by the first one

    def fileno(self) -> int:
        """Return the descriptor that carries the liveness byte."""
        assert self.entry.file is not None
        return self.entry.file.fd

    def is_good(self) -> bool:
        if not self._lost:
            entry, path = self.entry, self._engine.name
            if entry.mount.has_inodes:
                self._lost = named(path, self.key, follow_symlinks=entry.name != path) is None
            else:
                self._lost = not entry.is_published()
        return not self._lost

    def release(self) -> bool:
        try:
            return self._remove()
        except BaseException:
            # An interrupt. Under a policy that goes by age alone, the file would count as held for an hour.
            with suppress(OSError):
                self._remove()
            raise
        finally:
            self._close()
            if self.called_at:
                location = self._engine.location
                process.registry.note_turn(location.file, self.called_at)
                remove_queue(location.queue)

    def _remove(self) -> bool:
        """Remove the file if the name still means it. False: the lock was lost before."""
        entry = self.entry
        if entry.file is None:  # an attempt that was interrupted has taken the file back
            return False
        if not take_removal_byte(self.fileno(), MAX_WAIT_TRIES):
            # Another process is removing the file. If it does not, other processes find that the holder is gone.
            self._engine.metrics.cleanups_skipped.bump()
            return self.is_good()
        # The directory may have another name by now. Then the hold is lost, and its file is removed where it is.
        is_at_path = self.is_good() and entry.name == self._engine.name
        self._lost = not ((is_at_path or entry.is_published()) and entry.remove(entry.name)) or self._lost
        return not self._lost

    def close(self) -> None:
        """Remove the file if an interrupt kept `release` from it."""
        self.entry.take_back()
        self._close()

    def _close(self) -> None:
        if self.renewed_hold is not None:
            heartbeat.end(self.renewed_hold, self.key[0])
        # A thread that renews uses the descriptor. At the end of the interpreter, threads stop with their mutexes.
        if self._renewing is not None and not sys.is_finalizing():
            with self._renewing:
                pass
        self.entry.close()

    def leave_standing(self) -> None:
        """Close the lock file without removing it. From now on it is held in the name of another process."""
        self._close()
        if self.called_at:
            remove_queue(self._engine.location.queue)

    def renew(self) -> None:
        """Set the timestamp to now, in place and in one write, unless the file is closed."""
        with process.registry.mutex:
            self._renewing = renewing = self._renewing or allocate_lock()
        with renewing:  # `close` waits for it before it closes the descriptor
            if self.entry.file is not None and self.entry.file.is_open:
                start, text = self._engine.format.renewal(self.content, time.time())
                system.pwrite(self.fileno(), text, start)


class FileHold(Hold):
    """A held `LockFile`.

    `token` is greater than the token of every earlier hold on the path. Without `fence=True` this fails if the clock is
    set back while the lock is free. `lost` is True if another process took the lock away.

        with LockFile("/var/lock/deploy.lock").acquire() as hold:
            storage.write(data, fencing_token=hold.token)
            hold.check()
    """

    __slots__ = ()

    lock: LockFile
    token: int
    _grant: FileGrant

    def __init__(self, lock: LockFile, grant: FileGrant) -> None:
        Hold.__init__(self, lock, grant)
        if lock.heartbeat is not None:
            heartbeat.beat(self, grant, lock.heartbeat)

    def renew(self) -> None:
        """Set the timestamp to now. Raises LockLost."""
        self.check()
        self._grant.renew()

    def leave_standing(self) -> None:
        """End the hold and leave the lock file in place, in the name of another process."""
        if self.released or self._registry.holds.pop(id(self), None) is None:
            raise self._not_held()
        self._grant.leave_standing()
