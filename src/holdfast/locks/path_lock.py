"""The engine of `Lock` and `Semaphore`: one attempt at a kernel lock on the file that a path names, and its removal.

Two rules make it safe to create and remove such files:

*One name, one inode.* A kernel lock counts only if the path still names the file that was locked: compare after
locking, and if the path names another file, close and begin again.

    A holds x      B opens x      A unlinks x, closes      B gets the lock of a file that no other process can open
                                                           C creates x, locks it: two holders, had B not compared

*No process unlinks a file that may be held.* Removing needs the whole lock, exclusively, on the file that the path
names. The last holder removes the file: it tries to lock all of it. While it does, it holds a byte past the end of the
file (`mark_removal`). An attempt that finds the lock taken for that reason returns REMOVING, not BUSY. After a crash
the next holder removes the file. Where other machines may see an old meaning of a name (NFS, CIFS), the file stays.

A holder that came through the queue, or held the lock for a while, leaves the file for the next waiter. If that waiter
gives up, one of the two removes the file. The waiter leaves the queue first and then examines the lock. The holder
unlocks first and then examines the queue.

A subclass defines what is locked: all of the file (`lock`), or one of several permits (`semaphore`).

A symlink at the path is followed by this module, and never by the kernel: it may lead elsewhere at the next attempt,
and in a directory that others can write to, a link of another user is refused (`paths.follow_links`).
"""

from __future__ import annotations

import errno
import os
from stat import S_ISREG
from time import sleep, time

from .. import metrics, process, system
from ..errors import HoldfastError, NotALockFile
from ..files import OwnedFd, inode_of, named, open_exactly, try_lock
from ..paths import LOCAL, absolute, check_directory, follow_links, mount_of, symlink_refused
from . import local
from .engine import BUSY, QUEUED, REMOVING, REPLACED, Outcome
from .first_waiter import FirstWaiter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..paths import Mount
    from ..wait import Steps
    from .base import StrPath
    from .engine import Grant

_FRESH_S = 0.1  # a file that was modified within this time shows the time of the acquisition
_BRIEF_HOLD_S = 0.001  # after a longer hold, the cost of examining the queue does not matter
_MANY_RETRIES = 100
_MAX_DENIALS = 10
_HEAD = 8  # bytes that tell what a file with content is
OTHER_CONTENT = "a file with other content"
_MAX_LOOKS = 100  # while another process removes the file
_PAUSE_S = 0.000_02


class OpenFile(OwnedFd, local.LocalGrant):
    """The file of a lock, open. Once it is locked and the path names it, it is the grant of a hold."""

    __slots__ = ("acquired_at", "came_through_queue", "engine", "key", "mount", "set_lock", "st", "wait")

    token = None
    engine: PathLock
    key: process.Inode
    mount: Mount
    set_lock: Callable[[int, int], None]  # of a descriptor and an operation, as flock
    st: os.stat_result  # as of when it was opened
    acquired_at: float
    wait: local.EndedWait | None
    came_through_queue: bool  # with a ticket, or in its `Turn`. Its holder leaves the file to the next waiter

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.engine.shared

    def fileno(self) -> int:
        return self.fd

    def is_good(self) -> bool:
        return named(self.engine.name, self.key) is not None

    def release(self) -> bool:
        engine = self.engine
        still_named = left_for_next = False
        try:
            st = named(engine.name, self.key)
            if st is not None:
                still_named = True
                if engine.removes_file and self.mount.removes:
                    left_for_next = engine.free_name(self, st)
        except BlockingIOError:  # another program has locked it from end to end
            engine.metrics.cleanups_skipped.bump()
        finally:
            # Unlock before closing: a child that inherited a copy of the descriptor would keep the lock.
            try:
                if engine.permits is not None:
                    system.unlock_slots(self.fd)
                set_lock = self.set_lock  # Python calls a local variable faster
                set_lock(self.fd, system.UN)
            finally:
                if engine.keeps_open:
                    engine.put_away(self, still_named)
                else:
                    self.close()
        # Only now, when the next waiter can continue: removing a directory is slow.
        if self.wait is not None:
            left_for_next = self.wait.clean_up(engine.location, gives_turn=not engine.shared) or left_for_next
        # Other holders may have left the file for a queue that is gone now.
        if left_for_next and not system.access(engine.location.queue, 0):
            engine.remove_if_unused()
        return still_named


class PathLock(local.LocalEngine):
    """A kernel lock at one path. A subclass defines what is locked of the open file, and how."""

    __slots__ = (
        *("_is_checked", "content", "exact_mode", "fair", "follow"),
        *("location", "metrics", "mode", "name", "removes_file"),
    )

    blocks = False
    keeps_open = False
    kind: str  # its name in metrics
    shared: bool  # may others hold it at the same time?
    permits: int | None  # how many at most, written in the file. None: the file is empty
    wait_op: int  # the operation with which the kernel waits for the lock. 0: it cannot

    def __init__(
        self,
        path: StrPath,
        *,
        keep: bool,
        fair: bool,
        mode: int,
        content: bool = False,
        exact_mode: bool = False,
        follow: bool = True,
    ) -> None:
        self.name = absolute(path)
        self.content = content
        self.exact_mode = exact_mode
        self.follow = follow
        self.removes_file = not keep
        self.fair = fair and system.HAS_FIFOS
        self.mode = mode
        self.metrics = metrics.kind(self.kind)
        self.location = local.Location(self.name)
        self._is_checked = False

    def take(self, file: OpenFile) -> bool | Outcome:
        """Try to lock the file. Returns True, or the reason why it failed."""
        raise NotImplementedError

    def take_as_first(self, file: OpenFile) -> bool:
        """Could the first waiter acquire the lock? The caller closes the file."""
        raise NotImplementedError

    def is_ours(self, file: OpenFile, st: os.stat_result) -> bool:
        """Has the file the content of this kind? Then it may be removed when it is not in use."""
        raise NotImplementedError

    def may_pass_queue(self) -> bool:
        """May the caller make an attempt although waiters are in the queue?"""
        raise NotImplementedError

    # One attempt.

    def first_attempt(self, timeout: float | None = None) -> OpenFile | Outcome:
        if not self._is_checked:
            follow_links(os.path.dirname(self.name))  # raises UnsafePath
            check_directory(self.name)
            self._is_checked = True
        if self.fair and system.access(self.location.queue, 0):
            return self.attempt(queued=True) if self.may_pass_queue() else QUEUED
        return self.attempt()

    def attempt(self, queued: bool = False, file: OpenFile | None = None, granted: bool = False) -> OpenFile | Outcome:
        """Open the file, lock it, and check that the path still names it.

        file: attempt at this one, which is open, and stays open if that fails
        granted: the kernel has granted the lock already
        """
        opened = file
        try:
            if opened is None:
                opened = self.open()
            found = granted or self.take(opened)
            if found is True or (found is BUSY and (found := self._take_again(opened)) is True):
                st = named(self.name, opened.key)
                if st is not None:
                    if st.st_size and self.permits is None:  # another kind of lock was made of it meanwhile
                        self._check_content(opened.fd)
                    opened.acquired_at = now = time()
                    opened.came_through_queue = queued
                    opened.wait = None
                    shows_time = self.removes_file and self.permits is None and not st.st_size
                    if shows_time and (queued or now - opened.st.st_mtime > _FRESH_S):
                        try:  # `status` shows the modification time as the time of the acquisition
                            system.touch(opened.fd)
                        except OSError:
                            pass  # another user's file
                    return opened
                found = REPLACED
        except BlockingIOError:  # another program keeps us from opening, reading or marking the file
            found = BUSY
        except BaseException:  # refused, or an interrupt
            if opened is not None:
                opened.close()
            raise
        if file is None and opened is not None:
            self.put_away(opened, found is BUSY)
        return found  # type: ignore[return-value]

    def _take_again(self, file: OpenFile) -> bool | Outcome:
        """Find out whether the lock is busy only because a process is removing the file.

        That process sets the removal mark before it locks the file. Without the mark, it has perhaps just finished:
        it unlinked the file, or it kept the file and unlocked it. So one more attempt decides.
        """
        if not file.mount.removes:
            return BUSY
        if system.removal_marked(file.fd):
            return REMOVING
        return REPLACED if named(self.name, file.key) is None else self.take(file)

    # The file.

    def open(self, create: bool = True) -> OpenFile:
        """Open the file. Create it if it does not exist, unless `create` is false.

        Raises OSError, NotALockFile, UnsafePath, or Unsupported where the file system has no locks that work.
        """
        path, flags = self.location.file, system.O_LOCK if create else system.O_EXISTING
        try:
            if path is not self.name:
                path = self._follow_link()
            fd = open_exactly(path, self.mode) if self.exact_mode and create else system.open_fd(path, flags, self.mode)
        except OSError as error:
            fd = self._open_otherwise(error, flags)
            path = self.location.file
        file = OpenFile(fd)
        try:
            file.engine = self
            file.st = st = system.fstat(fd)
            if not S_ISREG(st.st_mode):
                raise not_a_lock_file(self.name, "a device, a FIFO or a directory")
            if st.st_size and self.permits is None:
                self._check_content(fd)
            file.key = inode_of(st)
            device = st.st_dev
            file.mount = mount = LOCAL if device & 0xFFF00 else mount_of(device, path)
            file.set_lock = system.lock_range if mount.ranged else system.lock
        except BaseException:  # refused, or an interrupt
            file.close()
            raise
        return file

    def _follow_link(self) -> str:
        """Resolve the symlink again, because it may have changed. Returns the path of the target."""
        self.location = local.Location(follow_links(self.name))
        return self.location.file

    def _check_content(self, fd: int) -> None:
        """Raise NotALockFile for a file with content, unless all content is accepted that is no other kind of lock."""
        what = content_of(fd)
        if not self.content or what != OTHER_CONTENT:
            raise not_a_lock_file(self.name, what)

    def _open_otherwise(self, error: OSError, flags: int) -> int:
        """Open the file in another way after the plain open failed, or raise the reason."""
        try:
            if isinstance(error, PermissionError):
                return self._open_denied(error, flags)
            if error.errno == errno.ELOOP and not self.follow:
                raise symlink_refused(self.name)
            if error.errno == errno.ELOOP and self.location.file is self.name:
                path = self._follow_link()
                return open_exactly(path, self.mode) if self.exact_mode else system.open_fd(path, flags, self.mode)
        except OSError as other:
            if other is not error:
                return self._open_otherwise(other, flags)
        if isinstance(error, IsADirectoryError) or error.errno == errno.ENXIO:  # a socket
            what = "a directory" if isinstance(error, IsADirectoryError) else "a socket"
            raise not_a_lock_file(self.name, what) from None
        if isinstance(error, FileNotFoundError):
            text = "the directory for this lock does not exist; make it first"
            if "://" in self.name:
                text += ". If this is the URL of a server, use holdfast.lock(url) or holdfast.semaphore(url, permits)"
            raise FileNotFoundError(errno.ENOENT, text, self.name) from None
        raise error

    def _open_denied(self, error: OSError, flags: int) -> int:
        """Open another user's file, which may come and go meanwhile.

        With fs.protected_regular the kernel refuses O_CREAT on it in a sticky directory, so try again without. flock
        works on a descriptor that can only read. Byte ranges do not.
        """
        for _ in range(_MAX_DENIALS):
            for other_flags in (system.O_EXISTING, system.O_READ, flags):
                try:
                    return system.open_fd(self.location.file, other_flags, self.mode)
                except (PermissionError, FileNotFoundError):
                    continue
        raise error

    def put_away(self, file: OpenFile, reusable: bool) -> None:
        """Close the file: it is not locked any more, or never was."""
        file.close()

    def file_was_replaced(self, retries: int) -> None:
        self.metrics.identity_retries.bump()
        if retries == _MANY_RETRIES:
            import logging

            logging.getLogger("holdfast").warning(
                "%s: the lock file was replaced %d times while this process tried to lock it. Either other "
                "processes release it faster than this one locks it (use fair=True or keep=True), or a program deletes "
                "the file, or the file system has no stable inode numbers",
                self.name,
                retries,
            )

    # Removing it.

    def free_name(self, file: OpenFile, st: os.stat_result) -> bool:
        """Remove the file before it is unlocked. True: it is left for the next waiter."""
        if st.st_size and self.permits is None:
            return False  # it got content meanwhile, and is not ours to remove
        held_briefly = self.shared or time() - file.acquired_at <= _BRIEF_HOLD_S
        if (file.came_through_queue or not held_briefly) and system.access(self.location.queue, 0):
            if self.permits is None:
                try:  # the next waiter may be a `LockFile`, for which an empty file is stale when it is old
                    system.utime(file.fd, (0, 0))
                except OSError:
                    pass  # another user's file
            return True
        if self.shared:
            system.mark_removal(file.fd)
            self._remove_marked(file)  # our own share is not in the way
        else:
            self.remove(file.key)
        return False

    def remove(self, inode: process.Inode) -> None:
        """Unlink the file. The caller has locked all of it, and has just compared it with the path.

        If the path is a link, another thread may have followed it somewhere else meanwhile.
        """
        file = self.location.file
        try:
            if file is not self.name and named(file, inode, follow_symlinks=False) is None:
                raise FileNotFoundError
            system.unlink(file)
        except (FileNotFoundError, PermissionError):
            self.metrics.cleanups_skipped.bump()
        else:
            next(self.metrics.cleanups.count)

    def _remove_marked(self, file: OpenFile) -> None:
        """Remove the file if no other process uses it. The caller has marked the removal.

        Another process with such a mark removes the file itself, or only reads its status, so try again. Its mark may
        vanish between the attempt and the check of the mark. So give up only at the second attempt without a mark.
        """
        unmarked = 0
        for _ in range(_MAX_LOOKS):
            if take_all(file):
                st = named(self.name, file.key)
                if st is not None and self.is_ours(file, st):
                    self.remove(file.key)
                return
            if system.removal_marked(file.fd):
                sleep(_PAUSE_S)
            elif unmarked:
                break
            else:
                unmarked += 1
        self.metrics.cleanups_skipped.bump()

    def remove_if_unused(self) -> None:
        """Remove a file that was left for a waiter that has gone."""
        if not self.removes_file:
            return
        try:
            with self.open(create=False) as file:
                if file.mount.removes and self.is_ours(file, file.st):
                    system.mark_removal(file.fd)
                    self._remove_marked(file)
        except (HoldfastError, OSError):
            pass  # it is gone, another kind of file, or locked from end to end by another program

    # Waiting for it.

    def held_by_caller(self, *, asynchronous: bool, ended: bool = False) -> list[Grant]:
        try:
            st = system.stat(self.name)
        except OSError:
            return []
        return process.registry.holds_of_caller(inode_of(st), asynchronous=asynchronous, ended=ended)

    def is_free(self) -> bool:
        with self.open() as file:
            try:
                return self.take_as_first(file)
            except BlockingIOError:  # another program has locked it from end to end
                return False

    def wait_in_front(self, deadline: float | None, *, asynchronous: bool) -> Steps[OpenFile]:
        return FirstWaiter(self, deadline, asynchronous).steps()

    def gave_up(self) -> None:
        """Remove the file, unless others wait: then the last waiter that gives up does."""
        if self.location.file not in process.registry.lines and not system.access(self.location.queue, 0):
            self.remove_if_unused()


def take_all(file: OpenFile) -> bool:
    """Try to lock all of an open file exclusively."""
    return try_lock(file.fd, system.EX_NB, file.set_lock)


def not_a_lock_file(path: str, what: str = OTHER_CONTENT) -> NotALockFile:
    return NotALockFile(
        f"{path} is {what}. It was left untouched. Give this lock a path of its own, which no other kind of lock "
        "and no other file uses.",
        path=path,
    )


def content_of(fd: int) -> str:
    """What a file is that has content, and so is not that of a `Lock`."""
    try:
        content = system.pread(fd, _HEAD, 0)
    except OSError:  # another program has locked it from end to end
        content = b""
    kinds = {b"pid=": "a lock file (of LockFile or holdfast lockfile)", b"permits=": "the file of a semaphore"}
    return next((kind for head, kind in kinds.items() if content.startswith(head)), OTHER_CONTENT)
