"""What `Lock` and `Semaphore` share: one attempt at a kernel lock on the file that a path names, and its removal.

Two rules make it safe to have such files come and go:

*One name, one inode.* A kernel lock counts only if the path still names the file that was locked: compare after
locking, and if the path names another file, close and begin again.

    A holds x      B opens x      A unlinks x, closes      B gets the lock, of a file that nobody else will ever open
                                                           C creates x, locks it: two holders, had B not compared

*Nobody unlinks what may be held.* Removing needs the whole lock, exclusively, on the file that the path names. The last
holder removes the file: it tries to lock all of it. While it does, it holds a byte past the end of the file
(`mark_removal`). An attempt that finds the lock taken for that reason returns REMOVING, not BUSY. After a crash the
next holder removes the file. Where other machines see late what a name means (NFS, CIFS), nobody removes it.

A holder that came through the queue, or held for a while, leaves the file for the next waiter. If that waiter has given
up, one of the two removes the file: the waiter leaves the queue first and then looks at the lock, the holder unlocks
first and then looks at the queue.

Acquiring, from top to bottom: `base.acquire` → `_first_attempt` → `_attempt`; if that brings no hold, `_steps` → the
line and the queue (`queue`) → `first_waiter`, which repeats `_attempt`.
"""

from __future__ import annotations

import errno
import os
from time import monotonic, sleep, time

from .. import process, system
from ..errors import HoldfastError, NotALockFile
from ..files import HeldFd, OwnedFd, inode_of, named
from ..paths import LOCAL, check_directory, follow_links, mount_of
from . import base
from .base import BUSY, QUEUED, REMOVING, REPLACED, Outcome
from .first_waiter import FirstWaiter
from .queue import Queue, QueuedLock, remove_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from ..paths import Mount
    from ..wait import Step, Steps

    PathHoldType = TypeVar("PathHoldType", bound="PathHold")
else:
    PathHoldType = None

_new = object.__new__
_FRESH_S = 0.1
_MANY_RETRIES = frozenset({100, 1_000, 10_000, 100_000})
_MAX_LOOKS = 100  # at a removal under way
_MAX_DENIALS = 10
_PAUSE_S = 0.000_02
_FILE_TYPE, _REGULAR = 0o170000, 0o100000  # S_ISREG of the module stat costs an import and a call


class OpenFile(HeldFd):
    """The file of a lock, open: what it was when it was opened (`st`), and how to lock it where it is (`set_lock`)."""

    __slots__ = ("inode", "mount", "set_lock", "st")

    inode: process.Inode
    mount: Mount
    set_lock: Callable[[int, int], None]  # of a descriptor and an operation, as flock
    st: os.stat_result


class KeptOpenFile(OpenFile):
    """One that may outlive its hold: closed when it is collected."""

    __slots__ = ()

    __del__ = OwnedFd.__del__


class PathHold(base.Hold):
    """A hold that is a kernel lock on an open file."""

    # A holder that came through the queue, with a ticket or in its turn, leaves the file to the next one. One that has
    # waited also removes the empty queue, and has a turn from then on.
    __slots__ = ("_called_at", "_came_through_queue", "_file")

    _file: OpenFile
    _called_at: float  # when a waiter got the lock, on the monotonic clock; 0: it did not wait, or without a queue

    def _begin_with(self, lock: Any, file: OpenFile, queued: bool) -> None:
        self._file = file
        self._came_through_queue = queued
        self._called_at = 0.0
        self.lock = lock
        self.acquired_at = time()
        self._is_closed = False
        self._registry = registry = process.registry
        if lock.sets_time and self.acquired_at - file.st.st_mtime > _FRESH_S:
            _set_time(file)
        count = lock._count
        count()
        registry.holds[id(self)] = (file.inode, lock.shared, process.owner(), file)

    def _still_named(self) -> bool:
        return named(self.lock.path, self._file.inode) is not None

    def fileno(self) -> int:
        """The descriptor that carries the lock. A child that inherits it keeps the lock alive if this process dies."""
        if self.released:
            raise self._not_held()
        return self._file.fd

    def _release(self) -> bool:
        lock: PathLock[PathHold] = self.lock  # type: ignore[assignment]
        file = self._file
        still_named = left_for_next = False
        try:
            st = named(lock.path, file.inode)
            if st is not None:
                still_named = True
                if lock.removes_file and file.mount.removes:
                    left_for_next = self._free_name(st)
        except BlockingIOError:  # another program has locked it from end to end
            lock._metrics.cleanups_skipped.bump()
        finally:
            # Unlock before closing: a child that inherited a copy of the descriptor would keep the lock.
            try:
                lock._unlock(file)
            finally:
                self._is_closed = True
                if lock.keeps_open:
                    lock._put_away(file, still_named)
                else:
                    file.close()
        # Only now, when nobody waits for us any more: removing a directory takes its time.
        if self._called_at:
            lock._note_turn(self._called_at)
            if remove_queue(lock._queue):
                left_for_next = True
        # Others may have left the file on account of a queue that is gone now.
        if left_for_next and not system.access(lock._queue, 0):
            lock._sweep()
        return still_named

    def _free_name(self, st: os.stat_result) -> bool:
        """Remove the file, or return True: it is left for the next in the queue."""
        raise NotImplementedError


def _set_time(file: OpenFile) -> None:
    """Have the file's modification time say when it was acquired, for `status`, where it was not made just now."""
    try:
        system.touch(file.fd)
    except OSError:
        pass  # another user's file


class PathLock(QueuedLock[PathHoldType]):
    """Finding, locking, waiting for and removing the file. A subclass implements `_take` and the methods below."""

    # Attributes of the object, not of the class: Python 3.11 has no fast look-up for the latter.
    __slots__ = ("_count", "_file_type", "_hold_type", "_unchecked", "keeps_open", "removes_file", "sets_time")

    has_content = False  # may the file have content?
    shared = True  # may others hold it at the same time?

    def __init__(
        self,
        path: base.StrPath,
        kind: str,
        timeout: float | None,
        fair: bool,
        mode: int,
        hold_type: type[PathHoldType],
    ) -> None:
        QueuedLock.__init__(self, path, kind, timeout, fair, mode)
        self._file_type: type[OpenFile] = OpenFile
        self._hold_type = hold_type
        self._unchecked = True
        self.keeps_open = False  # does the file stay open after a release?
        self.removes_file = True
        self.sets_time = not self.has_content
        self._count = self._metrics.acquisitions.bump

    # What a subclass says.

    def _take(self, file: OpenFile) -> bool | Outcome:
        """Try to lock an open file. Anything but True is why not."""
        raise NotImplementedError

    def _take_all(self, file: OpenFile) -> bool:
        """Try to lock all of an open file, so that nobody else has any of it."""
        raise NotImplementedError

    def _unlock(self, file: OpenFile) -> None:
        raise NotImplementedError

    def _block(self, file: OpenFile) -> Step | None:
        """How to wait for the lock in the kernel, if that can be done."""
        return None

    def _is_ours(self, file: OpenFile, st: os.stat_result) -> bool:
        """Does the file look like one of this kind that is not in use? Then it may be removed."""
        raise NotImplementedError

    def _refuse_deadlock(self, *, asynchronous: bool) -> bool:
        """Raise if the caller would wait for itself. True: it shares the lock already, so it must not queue."""
        raise NotImplementedError

    def _put_away(self, file: OpenFile, reusable: bool) -> None:
        """The file is not locked any more, or never was."""
        file.close()

    def _note_turn(self, called_at: float) -> None: ...

    # One attempt.

    def _first_attempt(self) -> PathHoldType | Outcome:
        if self._unchecked:
            self._check_mount()
        if self.fair and system.access(self._location.queue, 0):
            return self._attempt(queued=True) if self._may_pass_queue() else QUEUED
        return self._attempt()

    def _may_pass_queue(self) -> bool:
        return False

    def _attempt(
        self, queued: bool = False, file: OpenFile | None = None, granted: bool = False
    ) -> PathHoldType | Outcome:
        """One attempt, at `file` (which stays open if it fails) or at the file that the path names.

        `queued`: in its turn, or first in the queue. `granted`: the kernel has granted the lock already.
        """
        opened, hold = file, None
        try:
            if opened is None:
                opened = self._open()
                if opened is None:
                    return REPLACED
            found = granted or self._take(opened)
            if found is True or (found is BUSY and (found := self._take_again(opened)) is True):
                st = named(self.path, opened.inode)
                if st is not None:
                    if st[6] and not self.has_content:  # another kind of lock was made of it meanwhile
                        raise self._not_a_lock_file()
                    hold_type = self._hold_type
                    hold = hold_type()
                    hold._begin_with(self, opened, queued)
                    return hold
                found = REPLACED
        except BlockingIOError:  # another program keeps us from opening, reading or marking the file
            found = BUSY
        except BaseException:  # an interrupt, for one, which may come after every line
            if hold is not None and hold._is_live:
                hold.release()
            elif opened is not None:
                opened.close()
            raise
        if file is None and opened is not None:
            self._put_away(opened, found is BUSY)
        return found  # type: ignore[return-value]

    def _take_again(self, file: OpenFile) -> bool | Outcome:
        """The lock is busy. Does a process hold it that removes the file?

        The mark comes first. If it is gone now, that process has finished: it unlinked the file, or kept it and
        unlocked, so one more attempt decides.
        """
        if not file.mount.removes:
            return BUSY
        if system.removal_marked(file.fd):
            return REMOVING
        return REPLACED if named(self.path, file.inode) is None else self._take(file)

    # Finding the file.

    def _check_mount(self) -> None:
        """Before the first file is made: one left on a file system that is refused would be in the way."""
        follow_links(os.path.dirname(self._file))  # raises UnsafePath
        check_directory(self._file)
        self._unchecked = False

    def _follow_link(self) -> None:
        """The path is a symlink, which may have been changed since."""
        self._locate(follow_links(self.path))

    def _open(self, create: bool = True) -> OpenFile | None:
        """Open the file, and make it if it is not there, unless `create` is false. None: it is not there.

        Raises NotALockFile, or Unsupported where the file system has no locks that work.
        """
        path = self._location.file
        if path is not self.path:
            self._follow_link()
            path = self._location.file
        try:
            fd = system.open_fd(path, system.O_LOCK if create else system.O_EXISTING, self.mode)
        except OSError as error:
            fd = self._open_otherwise(error) if create else self._open_to_read(error)
            if fd < 0:
                return None
            path = self._location.file
        file: OpenFile = _new(self._file_type)  # `HeldFd(fd)` in place: every acquire comes here
        try:
            if process.forks:
                process.current_registry()
            process.descriptors[id(file)] = file.fd = fd
            file.st = st = system.fstat(fd)
            mode, ino, dev, _, _, _, size, _, _, _ = st
            if mode & _FILE_TYPE != _REGULAR or (size and not self.has_content):
                raise self._not_a_lock_file()
            file.inode = (dev, ino)
            file.mount = mount = LOCAL if dev & 0xFFF00 else mount_of(dev, path)
            file.set_lock = system.lock_range if mount.ranged else system.lock
        except BaseException:  # refused, or an interrupt
            file._abandon(fd)
            raise
        return file

    def _open_otherwise(self, error: OSError) -> int:
        """The plain open failed: find the way around, or say why there is none. -1: the file vanished meanwhile."""
        if error.errno == errno.ELOOP and self._file == self.path:
            self._follow_link()
            if self._file != self.path:
                return self._open_target()
        if isinstance(error, PermissionError):
            return self._open_denied(error)
        if isinstance(error, IsADirectoryError) or error.errno == errno.ENXIO:  # a socket
            raise self._not_a_lock_file() from None
        if isinstance(error, FileNotFoundError):
            text = "the directory for this lock does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, self.path) from None
        raise error

    def _open_to_read(self, error: OSError) -> int:
        """Another user's file, and yet ours to remove, perhaps. -1: it is not there, or not to be opened."""
        try:
            return system.open_fd(self._file, system.O_READ) if isinstance(error, PermissionError) else -1
        except OSError:
            return -1

    def _open_target(self) -> int:
        try:
            return system.open_fd(self._file, system.O_LOCK, self.mode)
        except OSError as error:
            return self._open_otherwise(error)

    def _open_denied(self, error: PermissionError) -> int:
        """Open a lock file that we may not create or not write: another user's, perhaps in a sticky directory.

        With fs.protected_regular the kernel refuses O_CREAT on another user's file in a sticky directory, so ask again
        without it. flock is content with a descriptor that can only read; byte ranges are not.
        """
        for _ in range(_MAX_DENIALS):
            for flags in (system.O_EXISTING, system.O_READ):
                try:
                    return system.open_fd(self._file, flags)
                except PermissionError:
                    continue
                except FileNotFoundError:
                    break  # just removed, or never there
                except OSError as other:
                    return self._open_otherwise(other)
            else:
                raise error
            try:
                return system.open_fd(self._file, system.O_LOCK, self.mode)
            except PermissionError:
                continue
            except FileNotFoundError:
                return -1
        raise error

    def _file_was_replaced(self, retries: int) -> None:
        self._metrics.identity_retries.bump()
        if retries in _MANY_RETRIES:
            import logging

            logging.getLogger("holdfast").warning(
                "%s: the lock file was replaced %d times while this process tried to lock it. Either other "
                "processes release it faster than this one locks it (use fair=True or keep=True), or a program deletes "
                "the file, or the file system has no stable inode numbers",
                self.path,
                retries,
            )

    def _not_a_lock_file(self) -> NotALockFile:
        return NotALockFile(
            f"{self.path} is a directory, a device, a socket, a lock of another kind, or a file with content of its "
            "own. It was left untouched. A lock needs a path to itself (often the same name with .lock after it).",
            path=self.path,
        )

    def _held_by_caller(self, *, asynchronous: bool, ended: bool = False) -> list[process.Entry]:
        if not process.registry.holds:
            return []
        try:
            st = system.stat(self.path)
        except OSError:
            return []
        return process.registry.holds_of_caller(inode_of(st), asynchronous=asynchronous, ended=ended)

    # Removing it.

    def _remove(self, inode: process.Inode) -> None:
        """Unlink the file. The caller has locked all of it, and has just compared it with the path.

        If the path is a link, another thread may have followed it somewhere else meanwhile.
        """
        file = self._location.file
        try:
            if file is not self.path and named(file, inode, follow_symlinks=False) is None:
                raise FileNotFoundError
            system.unlink(file)
        except (FileNotFoundError, PermissionError):
            self._metrics.cleanups_skipped.bump()
        else:
            count = self._metrics.cleanups.bump
            count()

    def _remove_unused(self, file: OpenFile) -> None:
        """Remove the file if nobody else uses it. The caller has marked the removal.

        Another process with such a mark removes the file itself, or only looks (`status`), so try again. Its mark may
        vanish between our attempt and our look. So give up only at the second attempt without a mark.
        """
        unmarked = 0
        for _ in range(_MAX_LOOKS):
            if self._take_all(file):
                if self._confirm_removal(file):
                    self._remove(file.inode)
                return
            if system.removal_marked(file.fd):
                sleep(_PAUSE_S)
            elif unmarked:
                break
            else:
                unmarked += 1
        self._metrics.cleanups_skipped.bump()

    def _confirm_removal(self, file: OpenFile) -> bool:
        st = named(self.path, file.inode)
        return st is not None and self._is_ours(file, st)

    def _sweep(self) -> None:
        """Remove a file that was left for a waiter that has gone."""
        if not self.removes_file:
            return
        try:
            file = self._open(create=False)
            if file is None:
                return
            with file:
                if file.mount.removes and self._is_ours(file, file.st):
                    system.mark_removal(file.fd)
                    self._remove_unused(file)
        except (HoldfastError, OSError):
            pass  # not ours, or locked from end to end by another program

    # Waiting for it.

    def _steps(self, deadline: float | None, *, asynchronous: bool) -> Steps[PathHoldType]:
        shares = self._refuse_deadlock(asynchronous=asynchronous)
        queued = not shares and self._has_queue()
        registry = process.registry
        hold = None
        try:
            queue = Queue(self._queue, self.mode) if queued else None
            hold = yield from self._wait_in_line(deadline, asynchronous, queue)
        finally:
            if hold is None and registry is process.registry and not self._is_waited_for():
                self._sweep()
        if queued:
            hold._called_at = monotonic()
        return hold

    def _is_waited_for(self) -> bool:
        """Then the last waiter that gives up removes the file."""
        location = self._location
        return location.file in process.registry.lines or system.access(location.queue, 0)

    def _wait_in_front(self, deadline: float | None, asynchronous: bool) -> Steps[PathHoldType]:
        return FirstWaiter(self, deadline, asynchronous).steps()

    def _open_or_outcome(self) -> OpenFile | Outcome:
        try:
            return self._open() or REPLACED
        except BlockingIOError:
            return BUSY

    _polls = False  # does the first waiter attempt in bursts besides waiting for events?
