"""`FileHold`: a held lock file. It checks, renews and removes the file that this process has published."""

from __future__ import annotations

import sys
import time
from _thread import allocate_lock
from contextlib import suppress

from .. import process, system
from ..files import inode_of, named
from . import base, heartbeat
from .queue import remove_queue
from .removal import MAX_WAIT_TRIES, take_removal_byte

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType

    from .lock_file import LockFile
    from .publish import Entry


class FileHold(base.Hold):
    """A held `LockFile`.

    `token` is greater than the token of every earlier hold on the path. Without `fence=True` this fails if the clock is
    set back while the lock is free. `lost` is True if another process took the lock away.

        with LockFile("/var/lock/deploy.lock").acquire() as hold:
            storage.write(data, fencing_token=hold.token)
            hold.check()
    """

    __slots__ = ("_called_at", "_content", "_entry", "_fd", "_lost", "_renewing", "token")

    lock: LockFile
    token: int
    _renewing: LockType | None  # held by a thread that renews; made by the first one

    def _begin(self, lock: LockFile, entry: Entry, content: bytes) -> None:
        assert entry.file is not None
        self._entry = entry
        self._fd = entry.file.fd
        self._content = content
        self._lost = self._is_closed = False
        self._renewing = None
        self._called_at = 0.0
        self.lock = lock
        self.acquired_at = time.time()
        self._registry = registry = process.registry
        lock._metrics.acquisitions.bump()
        registry.holds[id(self)] = (inode_of(entry.st), False, process.owner(), entry)

    def fileno(self) -> int:
        """Return the descriptor that carries the liveness byte."""
        if self.released:
            raise self._not_held()
        return self._fd

    def _still_named(self) -> bool:
        if not self._lost:
            entry, path = self._entry, self.lock.path
            if entry.mount.has_inodes:
                self._lost = named(path, inode_of(entry.st), follow_symlinks=entry.name != path) is None
            else:
                self._lost = not entry.is_published()
        return not self._lost

    @property
    def lost(self) -> bool:
        """True if the lock was taken away from this hold, and from then on."""
        return self._lost or (not self.released and not self._still_named())

    def _release(self) -> bool:
        try:
            return self._remove()
        except BaseException:
            # An interrupt. Under a policy that goes by age alone, the file would count as held for an hour.
            with suppress(OSError):
                self._remove()
            raise
        finally:
            self._close()
            if self._called_at:
                process.registry.note_turn(self.lock._file, self._called_at)
                remove_queue(self.lock._queue)

    def _remove(self) -> bool:
        """Remove the file if the name still means it. False: the lock was lost before."""
        entry = self._entry
        if entry.file is None:  # an attempt that was interrupted has taken the file back
            return False
        if not take_removal_byte(self._fd, MAX_WAIT_TRIES):
            # Another process is removing the file. If it does not, other processes find that the holder is gone.
            self.lock._metrics.cleanups_skipped.bump()
            return self._still_named()
        # The directory may have another name by now. Then the hold is lost, and its file is removed where it is.
        is_at_path = self._still_named() and entry.name == self.lock.path
        self._lost = not ((is_at_path or entry.is_published()) and entry.remove(entry.name)) or self._lost
        return not self._lost

    def _close(self) -> None:
        if self.lock.heartbeat is not None:
            heartbeat.end(self, self._entry.st.st_dev)
        # A thread that renews uses the descriptor. At the end of the interpreter, threads stop with their mutexes.
        if self._renewing is not None and not sys.is_finalizing():
            with self._renewing:
                pass
        self._is_closed = True
        self._entry.close()

    def leave_standing(self) -> None:
        """Close the lock file without removing it. From now on it is held in the name of another process."""
        if self.released or self._registry.holds.pop(id(self), None) is None:
            raise self._not_held()
        self._close()
        if self._called_at:
            remove_queue(self.lock._queue)

    def renew(self) -> None:
        """Set the timestamp to now, in place and in one write. Raises LockLost."""
        self.check()
        with process.registry.mutex:
            self._renewing = renewing = self._renewing or allocate_lock()
        with renewing:  # `_close` waits for it before it closes the descriptor
            if not self.released:
                start, text = self.lock.format.renewal(self._content, time.time())
                system.pwrite(self._fd, text, start)
