"""The events that are on disk: the ledger as this process sees it, syncing, and taking back events after a failed sync.

    write A, B     under the store's lock. No reader sees them yet
    sync           without the lock, one process at a time, for all processes that wrote before it. Then the events are
                   visible
    sync fails     under the lock again: a writer cuts off the events that are not visible, and changes the epoch of the
                   ledger, before any append raises. Readers do not go past the events on disk. Every writer compares
                   the epoch before it uses what it has read earlier

Where other machines write too, there is no ledger, and every append is synced under the lock.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ... import owner, system
from ...files import remove, sync_directory
from . import segments
from .index import Mark
from .ledger import Ledger
from .search import Recent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .segments import Tail
    from .store_lock import StoreLock
    from .view import View


class Written:
    """The events that were written during one hold of the lock."""

    tail: Tail | None = None
    ledger: Ledger | None = None
    epoch = 0
    text = b""  # the last line
    start = 0  # where that line begins
    head = 0  # the last event, once all of it is written
    is_lost = False  # the lock was lost during the write


class Disk:
    """The files of the store up to the last event that is on disk, for one process."""

    def __init__(self, root: str, view: View, store: bytes, lock: StoreLock, *, durable: bool, mode: int) -> None:
        self.view = view
        self.durable = durable
        self.ledger_path = f"{root}/ledger"
        self._root = root
        self._store = store
        self._mode = mode
        self._lock = lock
        # Shared memory reaches the processes of this machine, and is trusted until the next boot.
        self.has_ledger = not view.shared and owner.boot_id() is not None
        self.forget()

    def forget(self) -> None:
        self._ledger: Ledger | None = None
        self._readers: Ledger | None = None
        self.safe_before = 0  # the last event on disk according to an earlier ledger, if there is no usable one
        self.looked = False  # True: this boot has examined the end of the log after a crash of the machine
        self._epoch = -1  # of the events that the view has read
        self.named = 0  # the segment whose name is sure to be on disk

    # Under the store's lock.

    def usable_ledger(self) -> Ledger | None:
        """The ledger that all processes use. None: there is none yet, or none for this store."""
        self.safe_before = 0
        if not self.has_ledger:
            return None
        ledger = self._ledger
        if ledger is None or not ledger.in_place:
            ledger = self._ledger = self._find_ledger()
        if ledger is not None and not ledger.is_trusted:
            self._take_back_locked(ledger)  # the process whose sync failed is dead, or waits behind us
        if ledger is not None and ledger.epoch != self._epoch:
            self.view.forget()  # events were taken back, perhaps some that we have read
            self._epoch = ledger.epoch
        return ledger

    def _find_ledger(self) -> Ledger | None:
        self.view.begin_again()  # the store itself may be another one now, brought back from a copy
        self.named = 0
        self.looked = False
        try:
            ledger = Ledger(self.ledger_path, writable=True)
        except (FileNotFoundError, ValueError):
            return None
        if ledger.is_valid(self._store):
            self.looked = True  # another process has, since the machine was started
            return ledger
        self.safe_before = ledger.was_synced(self._store)
        return None

    def make_ledger(self, tail: Tail, head: int) -> Ledger:
        system.fdatasync(tail.fd)  # all events in it count as on disk from now on
        for folder in (self._root, self.view.events):  # of writers that were killed
            for name in system.listdir(folder):
                if name.endswith(".tmp") and (folder != self._root or name.startswith("ledger.")):
                    remove(f"{folder}/{name}")
        ledger = Ledger.make(self.ledger_path, head, tail.first, self._store, self._mode)
        self._ledger = ledger
        self._epoch = ledger.epoch
        return ledger

    def sync_names(self, tail: Tail) -> None:
        """Sync the names of segments. Their maker may use `durable=False`, or have died before its sync."""
        if self.durable:
            sync_directory(self.view.events)
            if not self.named:
                sync_directory(self._root)
                with suppress(PermissionError):
                    sync_directory(os.path.dirname(self._root))
        self.named = tail.first

    def sync_or_undo(self, written: Written, head: int) -> None:
        """Sync, before another machine can see the events. Remove them if that fails."""
        assert written.tail is not None
        try:
            system.fdatasync(written.tail.fd)
        except BaseException:
            written.head = 0
            self.view.forget()
            tail = self._open_at(head, written.tail.first)
            tail.cut(tail.end)
            raise

    def sync_whole(self, ledger: Ledger | None, tail: Tail, head: int, end: int) -> None:
        """Sync all of a segment, and cut it at its end, also for writers with `durable=False`."""
        if ledger is None:
            system.fdatasync(tail.fd)
            tail.cut(end)  # no room is needed in it any more
            system.fsync(tail.fd)
            return
        try:
            ledger.take_turn()
            epoch = ledger.epoch
            if not ledger.is_trusted:
                raise _taken_back(tail)
            self._sync_file(ledger, epoch, system.fdatasync, tail)
            tail.cut(end)
            self._sync_file(ledger, epoch, system.fsync, tail)
            if not ledger.note_synced(head, epoch):
                raise _taken_back(tail)
        except OSError:
            ledger.end_turn()
            self._take_back_locked(ledger)
            raise
        finally:
            ledger.end_turn()

    def finish_cut(self, ledger: Ledger) -> None:
        """Cut off the events that are to be taken back. The process that began this may have died."""
        tail = self._tail(ledger.segment)
        try:
            ledger.take_turn()
            tail.cut(ledger.pending - 1)
            with suppress(OSError):  # the sync failed before, and may fail again
                system.fdatasync(tail.fd)
            self.view.forget()
            ledger.cut_is_done()
        finally:
            ledger.end_turn()

    # Without the lock.

    def sync(self, written: Written) -> None:
        """Sync the events. Readers see them from then on."""
        ledger, tail = written.ledger, written.tail
        if ledger is None or tail is None:
            return
        if not self.durable:
            ledger.wake()
            return
        failure: OSError | None = None
        try:
            if not ledger.take_turn(written.head, written.epoch) or ledger.has_synced(written.head, written.epoch):
                return  # another process has synced them meanwhile
            if ledger.is_trusted and ledger.epoch == written.epoch:
                covered = ledger.written_in(tail.first) or written.head
                self._sync_file(ledger, written.epoch, system.fdatasync, tail)
                if ledger.note_synced(covered, written.epoch):
                    return
        except OSError as error:
            failure = error
        finally:
            ledger.end_turn()
            ledger.wake()
        if self._take_back(written, ledger, tail):  # else the sync of another process, after our write, succeeded
            raise failure or _taken_back(tail)

    @staticmethod
    def _sync_file(ledger: Ledger, epoch: int, sync: Callable[[int], None], tail: Tail) -> None:
        """The caller has the turn. The kernel reports an error once, and an interrupt may come right after it."""
        try:
            try:
                sync(tail.fd)
            except OSError:
                ledger.distrust(epoch)  # at once: another process may be about to report success
                raise
        except BaseException as error:
            if isinstance(error.__context__, OSError):
                ledger.distrust(epoch)
            raise

    def _take_back(self, written: Written, ledger: Ledger, tail: Tail) -> bool:
        """A sync failed: no reader may ever see its events. False: they are on disk all the same."""
        with self._lock.acquire(None), self.view.mutex:
            if not ledger.in_place:
                return True  # there is another ledger now. It may have been made without these events
            if ledger.epoch != written.epoch:  # another process has taken them back, but for events on disk
                return ledger.synced < written.head or not tail.says(written.text, written.start)
            self._take_back_locked(ledger)
            return ledger.epoch != written.epoch or ledger.synced < written.head

    def _take_back_locked(self, ledger: Ledger) -> None:
        """With the store's lock. Visible events cannot be taken back: readers saw those of `durable=False`."""
        self.view.forget()
        if not ledger.pending:
            safe = ledger.visible  # it stays the same: no sync counts until the ledger is trusted again
            if safe >= ledger.written:
                try:
                    ledger.take_turn()
                    ledger.trust_again()
                finally:
                    ledger.end_turn()
                return
            ledger.take_back(self._open_at(safe, ledger.segment).end)
        self.finish_cut(ledger)

    def _tail(self, segment: int) -> Tail:
        """The segment from its beginning. The index is not used."""
        return segments.Tail(self.view.events, self._store, Mark(segment - 1, segment), Recent(0), writable=True)

    def _open_at(self, safe: int, segment: int) -> Tail:
        """A segment, read up to an event that must be there, so that no more than the rest is cut off."""
        tail = self._tail(segment)
        if safe >= tail.first:
            tail.read_on(safe)
            if tail.head < safe:
                raise tail.damaged(f"event {tail.head + 1} is damaged; it had been on disk")
        return tail

    # For readers.

    def visible(self) -> int | None:
        """The last position that readers may see. None: there is no ledger, so the log decides."""
        ledger = self._readers_ledger()
        return None if ledger is None else ledger.visible

    def sleeps(self) -> bool:
        """Announce a sleeper, before its last look. True: `ledger_path` is touched when an event becomes visible."""
        ledger = self._readers_ledger()
        return ledger is not None and ledger.sleeps()

    def _readers_ledger(self) -> Ledger | None:
        if not self.has_ledger:
            return None
        mine = (self._ledger, self._readers)
        ledger = next((one for one in mine if one is not None and one.in_place), None)
        if ledger is None:
            self._readers = None
            with self.view.mutex:
                self.view.begin_again()
            ledger = self._readers = self._open_ledger()
        return ledger if ledger is not None and ledger.is_valid(self._store) else None

    def _open_ledger(self) -> Ledger | None:
        for writable in (True, False):
            try:
                return Ledger(self.ledger_path, writable=writable)
            except (OSError, ValueError) as error:
                if not isinstance(error, PermissionError) and getattr(error, "errno", 0) != errno.EROFS:
                    return None
        return None


def _taken_back(tail: Tail) -> OSError:
    text = "another process could not write to disk, so this append was taken back"
    return OSError(errno.EIO, text, tail.path)
