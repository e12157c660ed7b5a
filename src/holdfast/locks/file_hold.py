"""`FileHold`: a held lock file, and `FileGrant`, which checks, renews and removes the file that was published."""

from __future__ import annotations

import sys
import time
from _thread import allocate_lock
from contextlib import suppress

from .. import process, system
from ..files import named
from . import heartbeat
from .hold import Hold
from .local import EndedWait, LocalGrant
from .publish import PublishedFile
from .removal import MAX_WAIT_TRIES, take_removal_byte

TYPE_CHECKING = False
if TYPE_CHECKING:
    import weakref
    from _thread import LockType

    from .file_engine import FileEngine
    from .lock_file import LockFile


class FileGrant(PublishedFile, LocalGrant):
    """The lock file that this process has published."""

    __slots__ = (
        *("__weakref__", "_lost", "_renewing", "acquired_at"),
        *("content", "engine", "renewed_hold", "token", "wait"),
    )

    shared = False
    key: process.Inode
    engine: FileEngine
    content: bytes  # as it was published: without the token
    wait: EndedWait | None
    token: int | None  # None in a format without one
    renewed_hold: weakref.ref[FileHold] | None  # a hold with a heartbeat

    def begin(self, engine: FileEngine, content: bytes) -> None:
        self.engine = engine
        self.content = content
        self.acquired_at = time.time()
        self.token = None
        self.wait = None
        self.renewed_hold = None
        self._lost = False
        self._renewing: LockType | None = None  # held by a thread that renews; made by the first one

    def fileno(self) -> int:
        """Return the descriptor that carries the liveness byte."""
        return self.fd

    def is_good(self) -> bool:
        if not self._lost:
            entry, path = self.entry, self.engine.name
            if self.mount.has_inodes:
                self._lost = named(path, self.key, follow_symlinks=entry.name != path) is None
            else:
                self._lost = not self.is_published()
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
            self._end()
            if self.wait is not None:
                self.wait.clean_up(self.engine.location)

    def _remove(self) -> bool:
        """Remove the file if the name still means it. False: the lock was lost before."""
        entry = self.entry
        if not take_removal_byte(self.fd, MAX_WAIT_TRIES):
            # Another process is removing the file. If it does not, other processes find that the holder is gone.
            self.engine.metrics.cleanups_skipped.bump()
            return self.is_good()
        # The directory may have another name by now. Then the hold is lost, and its file is removed where it is.
        is_at_path = self.is_good() and entry.name == self.engine.name
        self._lost = not ((is_at_path or self.is_published()) and entry.remove(entry.name)) or self._lost
        return not self._lost

    def _end(self) -> None:
        """Stop the heartbeat, and close the file and its directory."""
        if self.renewed_hold is not None:
            heartbeat.end(self.renewed_hold, self.key[0])
        # A thread that renews uses the descriptor. At the end of the interpreter, threads stop with their mutexes.
        if self._renewing is not None and not sys.is_finalizing():
            with self._renewing:
                pass
        self.close()
        if self.entry.dir_fd is not None:
            self.entry.close()

    def leave_standing(self) -> None:
        """Close the lock file without removing it. From now on it is held in the name of another process."""
        self._end()
        if self.wait is not None:
            self.wait.clean_up(self.engine.location)

    def renew(self) -> None:
        """Set the timestamp to now, in place and in one write, unless the file is closed."""
        with process.registry.mutex:
            self._renewing = renewing = self._renewing or allocate_lock()
        with renewing:  # `_end` waits for it before it closes the descriptor
            if self.is_open:
                start, text = self.engine.format.renewal(self.content, time.time())
                system.pwrite(self.fd, text, start)


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

    def renew(self) -> None:
        """Set the timestamp to now. Raises LockLost."""
        self.check()
        self._grant.renew()

    def leave_standing(self) -> None:
        """End the hold and leave the lock file in place, in the name of another process."""
        if self.released or self._registry.holds.pop(self._grant, None) is None:
            raise self._not_held()
        self._grant.leave_standing()


class RenewedHold(FileHold):
    """A held `LockFile` with a heartbeat."""

    __slots__ = ()

    def __init__(self, lock: LockFile, grant: FileGrant) -> None:
        FileHold.__init__(self, lock, grant)
        assert lock.heartbeat is not None
        heartbeat.beat(self, grant, lock.heartbeat)
