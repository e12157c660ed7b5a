"""What `Lock` and `Semaphore` share: kernel locks on the file that a path names, and the removal of that file.

Two rules make it safe to have such files come and go:

*One name, one inode.* A kernel lock counts only if the path still names the file that was locked; look after locking,
and if it is another one, close and begin again.

    A holds x      B opens x      A unlinks x, closes      B gets the lock, of a file that nobody else will ever open
                                                           C creates x, locks it: two holders, had B not looked

*Nobody unlinks what somebody may hold.* Removing needs the whole lock, exclusively, on the file that the path names.
The last one out removes: it lets go and looks whether it can have all of it. While it does, a byte past the end of
the file says so (`mark_removal`), and whoever finds the lock taken for that reason tries again instead of reporting
it busy. After a crash the next holder removes the file. Where other machines see late what a name means (NFS, CIFS),
nobody removes it.

A hold that came through a queue, or lasted a while, leaves the file for the next in the queue. If that one has given
up meanwhile, one of the two sees the other's departure and sweeps: the waiter first leaves the queue and then looks at
the lock, the holder first unlocks and then looks at the queue.
"""

from __future__ import annotations

import errno
import os
from time import monotonic, sleep

from .. import gate, system
from ..errors import HoldfastError, NotALockFile, WouldDeadlock
from ..paths import check_directory, mount_of
from ..wait import SAFETY_LOOK, Backoff, Readable, check_deadline, sooner
from . import base
from .queue import Queue, QueuedLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ..paths import Mount
    from ..wait import Step, Steps

    InodeHoldType = TypeVar("InodeHoldType", bound="InodeHold")
else:
    InodeHoldType = None

_MANY_RETRIES = frozenset({100, 1_000, 10_000, 100_000})
_PATIENCE_WITH_REMOVER = 1000
_SOON = 0.001  # seconds


class InodeHold(base.Hold):
    """A hold of what a kernel lock on an open file is."""

    # Both kinds of coming through the queue, with a ticket or in one's turn, leave the file to the next one. Who had a
    # ticket also tidies the queue up, and has a turn from then on.
    __slots__ = ("_called_at", "_came_through_queue", "_mount")

    _mount: Mount
    _called_at: float  # on the monotonic clock; 0: without a ticket


class InodeLock(QueuedLock[InodeHoldType]):
    """Finding, waiting for and removing the file. A subclass says what it means to have the lock."""

    __slots__ = ("_unchecked",)

    removes_file = True
    _hold_type: type[InodeHoldType]

    def __init__(self, path: base.StrPath, kind: str, timeout: float | None, fair: bool, mode: int) -> None:
        QueuedLock.__init__(self, path, kind, timeout, fair, mode)
        self._unchecked = True

    # What a subclass says.

    def _check_file(self, fd: int, st: os.stat_result) -> bool:
        """Refuse a file that is not a lock file of this kind. Rule 8: what is not ours is left as it is.

        False: it is about to be replaced, so begin again.
        """
        raise NotImplementedError

    def _take(self, fd: int, ranged: bool) -> bool:
        """Try to lock an open file."""
        raise NotImplementedError

    def _take_all(self, fd: int, ranged: bool) -> bool:
        """Try to lock all of an open file, so that nobody else has any of it."""
        raise NotImplementedError

    def _begin(self, hold: InodeHoldType, fd: int, st: os.stat_result, mount: Mount) -> None:
        """Hold a file that was waited for; `st` is from when it was opened."""
        raise NotImplementedError

    def _block(self, fd: int, ranged: bool) -> Step | None:
        """How to wait for the lock in the kernel, if that can be done."""
        return None

    def _refuse_deadlock(self, *, asynchronous: bool) -> list[gate.Entry]:
        """Raise if the caller would wait for itself; else give the holds that it has on this lock."""
        raise NotImplementedError

    # Finding the file.

    def _check_mount(self) -> None:
        """Before the first file is made: one left on a file system that is refused would be in somebody's way."""
        check_directory(self._file)
        self._unchecked = False

    def _follow_link(self) -> None:
        """The path is a symlink, which may have been changed since."""
        self._locate(os.path.realpath(self.path))

    def _open(self) -> int:
        if self._file != self.path:
            self._follow_link()
        try:
            return system.open_fd(self._file, system.O_LOCK, self.mode)
        except OSError as error:
            return self._open_otherwise(error)

    def _open_otherwise(self, error: OSError) -> int:
        """The plain open failed: find the way around, or say why there is none."""
        if error.errno == errno.ELOOP and self._file == self.path:
            self._follow_link()
            if self._file != self.path:
                return self._open()
        if isinstance(error, PermissionError):
            return system.open_denied(self._file, error)
        if isinstance(error, IsADirectoryError):
            raise self._not_a_lock_file() from None
        if isinstance(error, FileNotFoundError):
            text = "the directory for this lock does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, self.path) from None
        raise error

    def _file_was_replaced(self, retries: int) -> None:
        self._metrics.identity_retries.bump()
        if retries in _MANY_RETRIES:
            import logging

            logging.getLogger("holdfast").warning(
                "%s: the lock file was replaced %d times while this process tried to lock it. Others are quicker "
                "all the time (fair=True or keep=True helps), or something deletes the file",
                self.path,
                retries,
            )

    def _not_a_lock_file(self) -> NotALockFile:
        return NotALockFile(
            f"{self.path} is a directory, a device or a file with content of its own. A lock needs a path to itself "
            "(often the same name with .lock after it); this one was left untouched.",
            path=self.path,
        )

    def _is_being_removed(self, fd: int, inode: gate.Inode) -> bool:
        """Was the lock taken only by somebody who removes the file? Then it is free as soon as that is done.

        Look at the mark first: a remover that had the lock when we tried, and whose mark is gone now, has removed the
        file, so the path does not name it any more.
        """
        for waited in range(_PATIENCE_WITH_REMOVER):  # it may have been stopped in the middle
            if not system.removal_marked(fd):
                return waited > 0 or not self._names(inode)
            sleep(0.000_01)
        return False

    def _held_by_caller(self, *, asynchronous: bool) -> list[gate.Entry]:
        if not gate.book.holds:
            return []
        try:
            st = system.stat(self.path)
        except OSError:
            return []
        return gate.book.holds_of_caller((st.st_dev, st.st_ino), asynchronous=asynchronous)

    # Removing it.

    def _remove(self, inode: gate.Inode) -> None:
        """Unlink the file, all of which the caller has, and which it has just compared with the path.

        If that is a link, another thread may have followed it somewhere else meanwhile.
        """
        try:
            if self._file is not self.path:
                st = system.stat(self._file, follow_symlinks=False)
                if (st.st_dev, st.st_ino) != inode:
                    raise FileNotFoundError
            system.unlink(self._file)
        except (FileNotFoundError, PermissionError):
            self._metrics.cleanups_skipped.bump()
        else:
            self._metrics.cleanups.bump()

    def _remove_unused(self, fd: int, inode: gate.Inode, ranged: bool) -> None:
        """Remove the file if nobody uses it. `fd` has nothing of it but the mark of a removal.

        One in our way that has such a mark too removes the file itself or only looks (`status`), and is soon gone. It
        may have gone between our try and our look at its mark, so two of them decide.
        """
        unmarked = 0
        for _ in range(_PATIENCE_WITH_REMOVER):
            if self._take_all(fd, ranged):
                if self._names(inode):
                    self._remove(inode)
                return
            if system.removal_marked(fd):
                sleep(0.000_01)
            elif unmarked:
                break
            else:
                unmarked += 1
        self._metrics.cleanups_skipped.bump()

    def _sweep(self) -> None:
        """Remove a file that was left for somebody who has gone."""
        if not self.removes_file:
            return
        try:
            fd = system.open_fd(self._file, system.O_EXISTING)
        except PermissionError as error:  # another user's, and yet ours to remove, perhaps
            try:
                fd = system.open_denied(self._file, error)
            except OSError:
                return
        except OSError:
            return
        try:
            st = system.fstat(fd)
            mount = mount_of(st.st_dev, self._file)
            if mount.removes and self._check_file(fd, st):
                system.mark_removal(fd)
                self._remove_unused(fd, (st.st_dev, st.st_ino), mount.ranged)
        except (HoldfastError, OSError):
            pass  # not ours, or locked from end to end by another program
        finally:
            system.close(fd)

    # Waiting for it.

    def _steps(self, deadline: float | None, *, asynchronous: bool) -> Steps[InodeHoldType]:
        mine = self._refuse_deadlock(asynchronous=asynchronous)
        queued = not mine and self._has_queue()
        hold = None
        try:
            queue = Queue(self._queue, self.mode) if queued else None
            hold = yield from self._wait_in_line(deadline, asynchronous, queue)
        finally:
            if hold is None and self.removes_file:
                self._sweep()
        if queued:
            hold._called_at = monotonic()
        return hold

    def _wait_in_front(self, deadline: float | None, asynchronous: bool) -> Steps[InodeHoldType]:
        waiting = Waiting(self._file)
        retries = 0
        hold = None
        try:
            while hold is None:
                try:
                    hold = yield from self._wait_for_file(waiting, deadline, asynchronous)
                except BlockingIOError:  # another program keeps us from opening or reading it
                    check_deadline(deadline)
                    yield waiting.backoff.pause(deadline)
                    continue
                if hold is None:
                    retries += 1
                    self._file_was_replaced(retries)
                    waiting.move(self._file)
        finally:
            # After the lock is taken, never before: closing a watch takes its time.
            waiting.end(reuse=hold is not None)
        return hold

    def _wait_for_file(
        self, waiting: Waiting, deadline: float | None, asynchronous: bool
    ) -> Steps[InodeHoldType | None]:
        """Wait for the file that the path names now. None: it names another one meanwhile."""
        hold = None
        fd = self._open()
        try:
            gate.book.open_fds.add(fd)
            st = system.fstat(fd)
            if not self._check_file(fd, st):
                return None
            inode = (st.st_dev, st.st_ino)
            mount = mount_of(st.st_dev, self._file)
            taken = False
            while True:
                taken = taken or self._take(fd, mount.ranged)
                if not self._names(inode):
                    return None
                if taken:
                    hold = self._hold_type()
                    self._begin(hold, fd, st, mount)
                    return hold
                check_deadline(deadline)
                step = None
                if deadline is None and not asynchronous and mount.blocks:
                    step = self._block(fd, mount.ranged)
                if step is None and mount.events and waiting.begin():
                    continue  # registered: try once more, and only then sleep
                yield step or waiting.step(deadline)
                taken = step is not None
                waiting.drain()
        except BaseException:
            if hold is None or not hold._has_begun:
                gate.book.forget(fd)
            raise
        finally:
            gate.book.open_fds.discard(fd)
            if hold is None or not hold._has_begun:
                system.close(fd)


class Waiting:
    """One wait for a file to change: by its events where there are any, else in pauses that grow.

    Of one who dies, the kernel reports that the file was closed and only then drops its locks. So after an event that
    brought nothing one looks again, soon first and then less and less often, and only then trusts the next event.
    """

    __slots__ = ("_look", "_path", "_registered", "_watch", "backoff")

    def __init__(self, path: str) -> None:
        self._path = path
        self._registered = False
        self._watch: system.Watch | None = None
        self._look = SAFETY_LOOK
        self.backoff = Backoff()

    def begin(self) -> bool:
        """Register for events. True: that is new, so what happened before it has to be looked at.

        Only with the file open: then, if the path still names it afterwards, it is the one that is watched.
        """
        if self._registered:
            return False
        try:
            if self._watch is None:
                self._watch = system.Watch(self._path)
                gate.book.open_fds.add(self._watch.fd)
            else:
                self._watch.move(self._path)
        except OSError:
            return False  # there are too many, or the file is gone already
        self._registered = True
        return True

    def move(self, path: str) -> None:
        """Another file has the name now, or none for the moment. `begin` registers for it, with what we have."""
        self._path = path
        self._registered = False

    def step(self, deadline: float | None) -> Step:
        """What to wait for; at the latest after the safety look one looks for news that no event told."""
        if self._watch is None or not self._registered:
            return self.backoff.pause(deadline)
        look = sooner(monotonic() + self._look, deadline)
        self._look = min(self._look * 10, SAFETY_LOOK)
        return Readable(self._watch.fd, look)

    def drain(self) -> None:
        """Take the events off; before the next try, because what comes after it must wake us."""
        if self._watch is not None and self._watch.drain():
            self._look = _SOON

    def end(self, *, reuse: bool = False) -> None:
        if self._watch is not None:
            gate.book.open_fds.discard(self._watch.fd)
            self._watch.close(reuse=reuse)
            self._watch = None


def would_deadlock(path: str, asynchronous: bool, what: str) -> WouldDeadlock:
    return WouldDeadlock(
        f"{path}: this {'task' if asynchronous else 'thread'} {what} already and would wait for itself. Release first, "
        "or pass the hold along.",
        path=path,
    )
