"""The ledger: up to where the log is written, and up to where it is on disk. Memory shared by the processes of a host.

It is derived from the log, and disposable. A few numbers of 8 bytes, each written in one store:

    0  "hfledger"        3  written: in the log up to here     6  epoch: how often what was written was taken back
    1  its own inode*    4  synced: on disk up to here         7  the first position of the last segment
    2  a hash of the     5  released: visible although it      8  a reader sleeps until an event becomes visible
       boot                 is not on disk                     9  where in that segment 3 ends
   11  the store's tag     12  where it is to be cut + 1       10  3 + 9, if both are good
   13  a sync has          14  the last segment in which
       failed                  a sync failed

* with its generation, where there is one. It tells a copy from the original, and 2 tells a ledger from before the last
boot. Of such a ledger only one fact is used: the events that were on disk then are on disk. The holder of the store's
lock changes `written`, `released` and 7. The process that has the turn to sync, a flock on the ledger, changes
`synced`, `epoch` and 13. Readers go up to `visible`.

A change of memory wakes no process. A reader that is about to sleep sets 8, looks once more, and waits until the file
is touched. A process that makes events visible reads 8 afterwards. Each makes a system call between writing one number
and reading the other, so at least one of them sees the number of the other. (A touch at each append would cost as much
as a write.)
"""

from __future__ import annotations

import mmap
from threading import RLock
from time import monotonic, sleep
from zlib import crc32

from ... import owner, process, system
from ...files import OwnedFd, create_file, inode_of, named, private_name, try_lock

_MAGIC = int.from_bytes(b"hfledger", "little")
_INODE, _BOOT, _WRITTEN, _SYNCED, _RELEASED, _EPOCH, _SEGMENT, _SLEEPERS, _END, _CHECK, _STORE = range(1, 12)
_PENDING, _DISTRUST, _SPOILT = range(12, 15)
_SIZE = 4096
_A_WHILE = 0.000_35  # seconds; looking more often takes the time that the sync needs
_PATIENCE_S = 5.0  # with a process that has the turn to sync. It may be stopped


def _boot() -> int:
    return crc32((owner.me().boot or "").encode()) or 1


def _number_of(fd: int, inode: int) -> int:
    """Numbers of inodes are used again, by copies that are put in the place of what they were copied from."""
    return inode ^ system.generation(fd) << 32 & (1 << 64) - 1


class Ledger:
    """An open ledger. Whatever changes it needs one of the two locks."""

    def __init__(self, path: str, *, writable: bool) -> None:
        self.path = path
        self._file = OwnedFd(system.open_fd(path, system.O_EXISTING if writable else system.O_READ))
        self._fd = self._file.fd
        st = system.fstat(self._fd)
        if st.st_size < _SIZE:
            raise ValueError("too short")
        self.inode = inode_of(st)
        self._number = _number_of(self._fd, st.st_ino)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(self._fd, _SIZE, access=access)
        self._cells = memoryview(self._memory).cast("Q")
        # The turn to sync, among processes and among the threads of this one. It has an open file of its own: a forked
        # child keeps a copy of the mapped one, and must not keep the turn of a parent that dies.
        self._turn = OwnedFd(system.open_fd(path, system.O_READ))
        if inode_of(system.fstat(self._turn.fd)) != self.inode:
            raise ValueError("replaced")
        self._mutex = RLock()
        self._is_stuck = False  # the last wait for the turn was in vain

    @classmethod
    def make(cls, path: str, head: int, segment: int, store: bytes, mode: int) -> Ledger:
        """Replace the ledger by a new one. The caller holds the store's lock, and has synced all events."""
        private = private_name(path)
        create_file(private, b"\0" * _SIZE, mode)
        ledger = cls(private, writable=True)
        cells = ledger._cells
        cells[_INODE], cells[_BOOT], cells[_STORE] = ledger._number, _boot(), int(store, 16)
        cells[_WRITTEN] = cells[_SYNCED] = head
        cells[_SEGMENT] = segment
        cells[0] = _MAGIC
        system.rename(private, path)
        ledger.path = path
        return ledger

    def is_valid(self, store: bytes) -> bool:
        """Is this a ledger of this store, made here since the last boot?"""
        return self._is_of(store) and self._cells[_BOOT] == _boot()

    def _is_of(self, store: bytes) -> bool:
        cells = self._cells
        return cells[0] == _MAGIC and cells[_INODE] == self._number and cells[_STORE] == int(store, 16)

    @property
    def in_place(self) -> bool:
        """Is it the one that others find?"""
        st = named(self.path, self.inode)
        return st is not None and st.st_size >= _SIZE  # cut short, to look at it would kill us

    def was_synced(self, store: bytes) -> int:
        """What was on disk at some time, also before the last boot."""
        return self._cells[_SYNCED] if self._is_of(store) else 0

    @property
    def known(self) -> int:
        """Up to where events have certainly been in the log: what was written in full, or seen."""
        cells = self._cells
        written = cells[_WRITTEN]
        return max(self.visible, written if cells[_CHECK] == written + cells[_END] else 0)

    @property
    def visible(self) -> int:
        return max(self._cells[_SYNCED], self._cells[_RELEASED])

    @property
    def synced(self) -> int:
        return self._cells[_SYNCED]

    @property
    def written(self) -> int:
        return self._cells[_WRITTEN]

    def written_in(self, segment: int) -> int:
        """The last event that was written; 0: that may be in a later segment than this one."""
        # In this order: if this is the last segment afterwards, what had been written is in it.
        written = self._cells[_WRITTEN]
        return written if self._cells[_SEGMENT] == segment else 0

    @property
    def segment(self) -> int:
        return self._cells[_SEGMENT]

    @property
    def epoch(self) -> int:
        """Grows whenever something is taken back: when that is said, not when it is done."""
        return self._cells[_EPOCH] + (self._cells[_PENDING] != 0)

    # For the holder of the store's lock.

    def note_written(self, position: int, segment: int, end: int) -> None:
        """The log ends with this event, in that segment. One may be killed between any two of the numbers."""
        cells = self._cells
        cells[_CHECK] = 0
        cells[_SEGMENT] = segment
        cells[_END] = end
        cells[_WRITTEN] = position
        cells[_CHECK] = position + end

    @property
    def end(self) -> tuple[int, int, int]:
        """The last event, where it ends, and in which segment; 0: that is not sure, or there is nothing in it."""
        cells = self._cells
        head, end = cells[_WRITTEN], cells[_END]
        return (head, end, cells[_SEGMENT]) if cells[_CHECK] == head + end else (0, 0, 0)

    def release(self, position: int) -> None:
        """Make it visible. Say `wake` afterwards, when the lock is released."""
        self._cells[_RELEASED] = position

    # For all processes.

    def take_turn(self, position: int = 0, epoch: int = 0) -> bool:
        """Wait for one's turn to sync. False: it is on disk up to a position by now, by another one's sync.

        One at a time: of two processes that sync a file at once, one may see a success although the other
        one's sync, which does the work for both, fails. But not for ever: a process that is stopped would stop all
        others. After some seconds the caller syncs without the turn.
        """
        until = monotonic() + (0.0 if self._is_stuck else _PATIENCE_S)
        while not self._try_turn():
            if position and self.has_synced(position, epoch):
                return False
            if monotonic() >= until:
                self._is_stuck = True
                return True
            sleep(_A_WHILE)
        self._is_stuck = False
        return True

    def _try_turn(self) -> bool:
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if try_lock(self._turn.fd, system.EX_NB):
                return True
        except BaseException:
            self.end_turn()
            raise
        self._mutex.release()
        return False

    def end_turn(self) -> None:
        """End the turn. It may be called twice, and without the turn."""
        while process.owns(self._mutex):
            system.lock(self._turn.fd, system.UN)
            self._mutex.release()

    def has_synced(self, position: int, epoch: int) -> bool:
        """Is it on disk up to here, and was nothing taken back since? In this order."""
        cells = self._cells
        return cells[_SYNCED] >= position and cells[_EPOCH] + (cells[_PENDING] != 0) == epoch

    def distrust(self, epoch: int) -> None:
        """A sync went wrong. Until a process has taken back what is not visible, no other one reports success.

        The caller has the turn.
        """
        if self.epoch == epoch:  # else that was done since
            self._cells[_DISTRUST] = 1

    @property
    def is_spoilt(self) -> bool:
        """Has a sync of the last segment gone wrong? Then what is written to it later may be lost, too: ext4 was seen
        to sync it without an error, and to give back zeros."""
        return self._cells[_SPOILT] == self._cells[_SEGMENT]

    def note_made_anew(self) -> None:
        """The segment is another file now. Only for the holder of the store's lock."""
        self._cells[_SPOILT] = 0

    @property
    def is_trusted(self) -> bool:
        return not self._cells[_DISTRUST]

    def note_synced(self, position: int, epoch: int) -> bool:
        """Note that events up to here are on disk. The caller has the turn. False: they are taken back."""
        cells = self._cells
        if self.epoch != epoch or cells[_DISTRUST]:
            return False
        cells[_SYNCED] = max(cells[_SYNCED], position)
        return True

    def take_back(self, end: int) -> None:
        """Note that the events that are not visible are to be cut off at `end`: `pending`.

        For the holder of the store's lock, while the ledger is not trusted, so that no event becomes visible. One
        number has it all: a process that is killed here has written it or has not.
        """
        self._cells[_CHECK] = 0
        self._cells[_PENDING] = end + 1

    def trust_again(self) -> None:
        """No event is to be taken back. The segment gets no more events all the same."""
        self._cells[_SPOILT] = self._cells[_SEGMENT]
        self._cells[_DISTRUST] = 0

    @property
    def pending(self) -> int:
        """One more than where the last segment is to be cut; 0: it is not."""
        return self._cells[_PENDING]

    def cut_is_done(self) -> None:
        """The caller has the turn. The order matters: other processes read these numbers meanwhile."""
        cells = self._cells
        cells[_WRITTEN] = self.visible
        cells[_SPOILT] = cells[_SEGMENT]
        cells[_EPOCH] += 1
        cells[_PENDING] = 0
        cells[_DISTRUST] = 0

    def wake(self) -> None:
        """Wake the readers that sleep. The caller has made a system call since it made events visible."""
        if self._cells[_SLEEPERS]:
            self._cells[_SLEEPERS] = 0
            system.touch(self._fd)

    def sleeps(self) -> bool:
        """Note that a reader looks for the last time before it sleeps. False: it may not write, and has to poll."""
        try:
            self._cells[_SLEEPERS] = 1
        except TypeError:  # we may only read it
            return False
        return True
