"""`Lock`: held while an open descriptor holds a kernel lock on a file. A crash releases it.

The file is empty and has no state. It exists only to be locked (`path_lock`). A file with content is refused: it is
user data, or another kind of lock. `content=True` accepts user data, and never changes or deletes it.

Releasing an exclusive lock unlinks the file before it unlocks. A sharer tries to convert its lock to an exclusive one.
If the kernel grants that, no other sharer is left, and it unlinks the file before it unlocks. With `keep=True` the
file stays the same inode. That is cheaper, and right where other tools expect to find the file. On network file
systems it always stays.

Not promised: that the file is gone at once when holders crash, or when removal is not permitted (another user's file
in a sticky directory). A program that deletes the file makes a second holder possible. `check` and `release` then
raise LockLost, and never delete the file of the second holder.
"""

from __future__ import annotations

from .. import process, system
from .base import BaseLock, check_mode, would_deadlock
from .engine import BUSY, Outcome
from .hold import Hold
from .path_lock import OpenFile, PathLock, take_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

    from ..status import Status
    from .base import StrPath


class WholeFile(PathLock):
    """The kernel lock on all of a file, exclusive or shared."""

    __slots__ = ("_op", "shared", "wait_op")

    kind = "lock"
    permits = None

    def __init__(self, path: StrPath, *, shared: bool, **options: Any) -> None:
        PathLock.__init__(self, path, **options)
        self.shared = shared
        self.wait_op = system.SH if shared else system.EX
        self._op = self.wait_op | system.NB

    def status(self) -> Status:
        from ..status import of_kernel_lock

        return of_kernel_lock(self.name, keep=not self.removes_file)

    def take(self, file: OpenFile) -> bool | Outcome:
        try:
            set_lock = file.set_lock  # Python calls a local variable faster
            set_lock(file.fd, self._op)
        except BlockingIOError:
            return BUSY
        return True

    def take_as_first(self, file: OpenFile) -> bool:
        """Take all of it: a successful shared lock would not prove that an exclusive waiter could acquire it."""
        if file.mount.removes:
            system.mark_removal(file.fd)
        return take_all(file)

    def is_ours(self, file: OpenFile, st: os.stat_result) -> bool:
        return st.st_size == 0

    def may_pass_queue(self) -> bool:
        if not self.shared:
            turn = process.registry.turns.get(self.location.file)
            return turn is not None and turn.take()
        # A caller that shares the lock may share it again. Behind a writer that waits for it, it would deadlock.
        return bool(self.held_by_caller(asynchronous=process.current_task() is not None, ended=True))

    def shares_already(self, *, asynchronous: bool) -> bool:
        held = self.held_by_caller(asynchronous=asynchronous)
        if not all(self.shared and grant.shared for grant in held):
            raise would_deadlock(self.name, asynchronous, "holds the lock")
        return bool(held)


class Lock(BaseLock[Hold]):
    """A lock on a path, for all processes of this machine, and of others where the file system allows it.

    path: the file to lock. It is created if it does not exist, and must be empty
    shared: True: any number of sharers may hold the lock at once; False: one exclusive holder
    timeout: seconds that `acquire` and `with` wait; None: for ever; 0: one attempt
    keep: leave the file in place; False: the last holder removes it
    fair: waiters are served in order of arrival; False: in any order
    mode: permissions of a new file, before the umask
    exact_mode: give a new file all of `mode`, whatever the umask. A file that exists keeps its permissions
    content: accept a file with content, such as a data file, and never change or delete it. A file that is another
        kind of lock is still refused
    follow: follow a symlink at the end of the path; False: refuse it with UnsafePath

        with holdfast.Lock("deploy.lock", timeout=60):
            deploy()

    `with` and `acquire` raise Timeout, or Busy with `timeout=0`; NotALockFile if the file has content; Unsupported
    where the file system has no locks that work; WouldDeadlock if the calling thread or task holds the lock already.
    """

    __slots__ = ("content", "exact_mode", "fair", "follow", "keep", "mode", "path", "shared")

    _options = ("shared", "timeout", "keep", "fair", "mode", "exact_mode", "content", "follow")

    def __init__(
        self,
        path: StrPath,
        *,
        shared: bool = False,
        timeout: float | None = None,
        keep: bool = False,
        fair: bool = True,
        mode: int = 0o644,
        exact_mode: bool = False,
        content: bool = False,
        follow: bool = True,
    ) -> None:
        engine = WholeFile(
            path,
            shared=shared,
            keep=keep,
            fair=fair,
            mode=check_mode(mode),
            exact_mode=exact_mode,
            content=content,
            follow=follow,
        )
        BaseLock.__init__(self, engine, timeout)
        self.path = engine.name
        self.shared = shared
        self.keep = keep
        self.fair = engine.fair
        self.mode = mode
        self.exact_mode = exact_mode
        self.content = content
        self.follow = follow
