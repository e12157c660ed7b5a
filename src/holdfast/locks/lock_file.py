"""`LockFile`: held while the file exists. The file survives its process, so a crash leaves a stale file behind.

The file has the `sema` format (`record`) and is complete from the moment it appears (`publish`). Two bytes far past its
content (docs/formats.md) carry kernel locks:

* the *liveness byte*: the holder's process keeps it locked as long as it lives. If the byte is free, the holder is
  dead. Files of other tools, and of commands that have exited, have no such lock
* the *removal byte*: a process locks it before it removes the file: the holder, a process that found the file stale,
  `break_`, `clean` (`removal`)

The holder also has the kernel lock of its file, so that `Lock` and flock(1) on the same path wait for it.

One attempt, from top to bottom:

    open the directory, if it has to be synced or another user could replace it
    look, if a file is expected or publishing costs an fsync: is there a lock file? A file that is not stale is BUSY
    remove a stale file, by the rules of `removal`
    publish our own with `link`. If another process was faster, start again

A hold can be lost: a user may break the lock of a stopped process. `check`, the heartbeat and `release` compare the
file that the path names with the published one, and never remove another file.

Not promised: that tools which unlink without these rules leave our files alone. `check` finds that out.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from itertools import count
from time import monotonic

from .. import owner, process, system
from ..errors import LockLost, NotALockFile, NotLocked, NotOwner
from ..files import inode_of
from ..paths import check_no_parent_component, follow_links
from ..wait import DeadlinePassed, drive
from . import base, heartbeat, record, tokens
from .base import BUSY, QUEUED, REMOVING, REPLACED, Outcome, would_deadlock
from .file_hold import FileHold
from .file_waiter import FileWaiter
from .publish import FileLocation, publish
from .queue import Queue, QueuedLock
from .removal import (
    MAX_WAIT_TRIES,
    Changed,
    NotPermitted,
    excludes_other_kinds,
    open_existing,
    remove_private_files,
    take_removal_byte,
)
from .staleness import POLICIES, Judgement, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..status import Status
    from ..wait import Steps
    from .publish import Entry
    from .record import Record
    from .staleness import Policy

    Result = TypeVar("Result")

_serials = count()  # of the holds of this process
_MAX_TRIES = 5
_MAX_LINKS = 10


class LockFile(QueuedLock[FileHold]):
    """A lock file of the `sema` protocol, shared with its other implementations.

    path: the lock file. Its directory must exist
    tag: a text about the holder, for people
    stale_after: seconds after which a lock is old; None: never. `stale` says what follows
    stale: "proof" replaces a holder that is proved dead at once, never replaces one that is proved alive, and goes by
        age where neither can be proved; "old" goes by age alone; "dead-and-old" requires an old lock and a pid that
        does not exist
    retry: seconds between attempts where the file system reports no events
    durable: the lock survives a power failure (fsync of the file and of its directory)
    heartbeat: renew the timestamp every so many seconds
    on_lost: called with the hold, in a thread, when a heartbeat finds that the lock was taken away
    fence: keep the last token in `<path>.fence`, so that tokens grow even if the clock is set back
    timeout: seconds that `acquire` and `with` wait; None: for ever; 0: one attempt
    fair: waiters are served in order of arrival; False: in any order
    mode: permissions of the file

    Raises ValueError or TypeError for a wrong parameter, UnsafePath for a path with a component '..'. Acquiring raises
    Timeout, or Busy for the timeout 0, WouldDeadlock if this thread or task holds the lock already, NotALockFile if
    the path names another file, and OSError.

        with holdfast.LockFile("/var/lock/deploy.lock", tag="v1.2.3", timeout=60) as hold:
            deploy()
    """

    __slots__ = (
        *("_writer", "durable", "fence", "heartbeat", "on_lost"),
        *("retry", "stale", "stale_after", "tag"),
    )

    _options: tuple[str, ...] = ("tag", "stale_after", "stale", "timeout", "retry", "durable")
    _options += ("heartbeat", "on_lost", "fence", "fair", "mode")

    format = record.SEMA
    _location: FileLocation
    _location_type = FileLocation

    def __init__(
        self,
        path: base.StrPath,
        *,
        tag: str | None = None,
        stale_after: float | None = 3600,
        stale: Policy = "proof",
        timeout: float | None = None,
        retry: float = 0.1,
        durable: bool = True,
        heartbeat: float | None = None,
        on_lost: Callable[[FileHold], object] | None = None,
        fence: bool = False,
        fair: bool = True,
        mode: int = 0o644,
    ) -> None:
        check_no_parent_component(path)
        QueuedLock.__init__(self, path, "file", timeout, fair, mode)
        if stale not in POLICIES:
            raise ValueError(f"stale is one of {', '.join(POLICIES)}, not {stale!r}")
        if stale_after is not None and (not isinstance(stale_after, int | float) or not stale_after >= 0):
            raise ValueError(f"stale_after is seconds, or None for never; not {stale_after!r}")
        if not isinstance(retry, int | float) or not retry > 0:
            raise ValueError(f"retry is seconds, more than 0; not {retry!r}")
        if heartbeat is not None and (not isinstance(heartbeat, int | float) or not heartbeat > 0):
            raise ValueError(f"heartbeat is seconds, more than 0, or None for none; not {heartbeat!r}")
        if on_lost is not None and heartbeat is None:
            raise ValueError("on_lost is called by the heartbeat: give heartbeat=seconds too")
        self.tag = record.check_tag(tag)
        self.stale_after = stale_after
        self.stale = stale
        self.retry = retry
        self.durable = durable
        self.heartbeat = heartbeat
        self.on_lost = on_lost
        self.fence = fence
        self._writer = record.Writer(self.format, self.tag)

    # Acquiring.

    @property
    def _may_block(self) -> bool:  # type: ignore[override]
        return self.durable and self._location.keeps

    def _first_attempt(self) -> FileHold | Outcome:
        location = self._location
        if not self.fair or not system.access(location.queue, 0):
            return self._attempt()
        turn = process.registry.turns.get(location.file)
        return self._attempt(queued=True) if turn is not None and turn.take() else QUEUED

    def _attempt(self, queued: bool = False) -> FileHold | Outcome:
        """Publish the lock file, or take over a stale one. A lock that is held costs a look, and no fsync.

        If no lock file was seen yet (`queued`), and there is no fsync to save, it is quicker to publish at once.
        """
        if self._location.file is not self.path:
            self._resolve()
        looks = queued or (self.durable and self._location.keeps)
        for _ in range(_MAX_TRIES):
            entry = self._open_entry()
            found: FileHold | Outcome = REPLACED
            try:
                found = self._attempt_at(entry, looks)
                if found is not REPLACED:
                    return found
            except NotPermitted:
                return BUSY
            except Changed:
                self._resolve()
            except OSError as error:
                raise self._by_path(error) from None
            finally:
                if not found:
                    entry.take_back()
                    entry.close()
            looks = True
        return REPLACED  # other processes acquire and release it all the time

    def _attempt_at(self, entry: Entry, looks: bool) -> FileHold | Outcome:
        file = open_existing(entry, self.path) if looks else None
        if file is not None:
            with file:
                removed = self._remove(entry, file.fd, _is_stale)
            if isinstance(removed, Outcome):
                return removed
        content = self._writer.write(next(_serials))
        try:
            publish(entry, content, self.mode, self.durable)
        except FileExistsError:
            return REPLACED
        hold, is_complete = FileHold(), False
        try:
            hold._begin(self, entry, content)
            is_complete = self._complete(hold)
        finally:
            if not is_complete and hold._is_live:
                with suppress(LockLost):
                    hold.release()
        return hold if is_complete else REPLACED

    def _complete(self, hold: FileHold) -> bool:
        """Give a new hold its token. Only now is it certain to be greater than all earlier tokens.

        False: another process took the lock away before. The token may be greater than that of the new holder.
        """
        entry, file, fd = hold._entry, self._location.file, hold._fd
        hold.token = tokens.new(file)
        if self.fence:
            # No process takes the lock away from the one with the removal byte, so no other writes the fence file.
            if not take_removal_byte(fd, MAX_WAIT_TRIES) or not entry.is_published():
                return False
            hold.token = tokens.advance_fence(entry, file, hold.token, self.mode, self.durable)
            system.unmark_removal(fd)
        system.pwrite(fd, b"%020d" % hold.token, len(hold._content) - self.format.token_from_end)
        if self.durable and entry.mount.keeps:
            entry.sync()
        if not entry.is_published():
            return False
        if self.heartbeat is not None:
            heartbeat.beat(hold, entry.st.st_dev, self.heartbeat)
        return True

    def _open_entry(self) -> Entry:
        try:
            return self._location.open(self.durable)
        except OSError as error:
            raise self._by_path(error) from None

    def _by_path(self, error: OSError) -> OSError:
        """The same error with the path of the lock, and not with the name of a file in its directory."""
        if error.errno is None:
            return error
        text = "the directory for this lock does not exist; make it first"
        return OSError(error.errno, text if error.errno == errno.ENOENT else error.strerror, self.path)

    def _resolve(self) -> None:
        """The path is a symlink, or was one at the last look: find its target."""
        file = follow_links(self.path)
        self._locate(self.path if file == self.path else file)

    def acquire_as_owner(self, pid: int, timeout: float | base.Default | None = base.DEFAULT) -> Record:
        """Acquire in the name of another process, for a command that ends before its caller does.

        Nothing in this process holds the lock afterwards. `release_as_owner(pid)` releases it. It is stale when that
        process has ended, or when it is old. Raises Timeout or Busy as `acquire` does.
        """
        if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**32:
            raise ValueError(f"a pid is a number from 1 on, not {pid!r}")
        another = LockFile(self.path, **{name: getattr(self, name) for name in self._options})
        another._writer = writer = record.WriterFor(pid, self.tag)
        if writer.start is None and not system.process_exists(pid):
            raise ValueError(f"there is no process {pid} for which a lock could be acquired")
        hold = another.acquire(timeout)
        if writer.start is not None and owner.start_of(pid) != writer.start:
            hold.release()
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended before its lock was free", self.path)
        hold.leave_standing()
        return record.parse(hold._content)._replace(token=hold.token)

    # Waiting.

    def wait_until_free(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        """Wait until the lock is free or stale. Does not acquire it. Raises Timeout, or Busy for 0."""
        timeout = self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        try:
            drive(FileWaiter(self, deadline).until_free())
        except DeadlinePassed:
            raise self._timed_out(timeout or 0) from None

    def _is_free(self) -> bool:
        found = self.examine()
        return found is None or found.stale

    def _steps(self, deadline: float | None, *, asynchronous: bool) -> Steps[FileHold]:
        try:
            st = system.stat(self.path)
        except OSError:
            pass
        else:
            if process.registry.holds_of_caller(inode_of(st), asynchronous=asynchronous):
                raise would_deadlock(self.path, asynchronous, "holds the lock")
        queue = Queue(self._queue, self.mode) if self._has_queue() else None
        hold = yield from self._wait_in_line(deadline, asynchronous, queue)
        if queue is not None:
            hold._called_at = monotonic()
        return hold

    def _wait_in_front(self, deadline: float | None, asynchronous: bool) -> Steps[FileHold]:
        return FileWaiter(self, deadline).acquire()

    # Judging and removing a file that exists.

    def _judge(self, fd: int) -> Judgement:
        try:
            found = judge(fd, self.path, self.format, self.stale, self.stale_after)
        except FileNotFoundError:  # sshfs has no attributes of a removed file
            raise Changed from None
        if found.record is not None and found.record.token is not None:
            tokens.note(self._file, found.record.token)
        return found

    def _remove(
        self, entry: Entry, fd: int, wanted: Callable[[Judgement], bool], tries: int = 1, is_break: bool = True
    ) -> Judgement | Outcome:
        """Remove the open file if `wanted` is true of it. Returns its judgement if the name is free of it now.

        BUSY: it is not wanted, or in use by another kind of lock. REMOVING: another process is removing it.
        """
        if not wanted(self._judge(fd)):
            return BUSY
        if not take_removal_byte(fd, tries):
            return REMOVING
        found = self._judge(fd)
        if not entry.means(fd, system.fstat(fd)):
            return found
        if not wanted(found) or not excludes_other_kinds(fd, self.path, found):
            return BUSY
        try:
            # Another tool, which does not wait for the removal byte, may be quicker.
            if entry.remove(entry.name) and is_break:
                self._count_break(found)
        except PermissionError as error:
            if error.errno == errno.EPERM:
                raise NotPermitted(errno.EPERM, "another user's lock file in a sticky directory", self.path) from None
            raise self._by_path(error) from None
        return found

    def _count_break(self, found: Judgement) -> None:
        import logging

        self._metrics.breaks.bump()
        log = logging.getLogger("holdfast")
        if found.alive:
            log.warning("%s: took the lock away from %s, which is alive", self.path, found)
        else:
            log.info("%s: removed the lock of %s", self.path, found)

    # By hand.

    def _with_existing(self, do: Callable[[Entry, int], Result]) -> Result | None:
        """Do something with the lock file, opened; None if there is none."""
        for _ in range(_MAX_LINKS):
            entry = self._open_entry()
            try:
                file = open_existing(entry, self.path)
                if file is None:
                    return None
                with file:
                    return do(entry, file.fd)
            except Changed:
                self._resolve()
            finally:
                entry.close()
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)

    def examine(self) -> Judgement | None:
        """Return the facts about the holder; None if the lock is free."""
        try:
            return self._with_existing(lambda entry, fd: self._judge(fd))
        except NotPermitted:
            return Judgement(None, 0.0, None, stale=False, stale_in=None)

    def status(self) -> Status:
        """Return the holder, since when it holds the lock, and the waiters. Does not acquire the lock."""
        from ..status import of_lock_file

        return of_lock_file(self.path, self.examine(), self.format.kind)

    def break_(self) -> Record | None:
        """Remove the lock file of any holder. Returns the holder's record; None: it was empty or damaged.

        Raises NotLocked if there is no lock file, NotALockFile if another kind of lock uses it.
        """
        return self._release_or_break(lambda _: True)

    def release_as_owner(self, pid: int | None = None, *, force: bool = False, of_dead: bool = False) -> None:
        """Release a lock that was acquired for `pid` (default: this process).

        `force=True` releases any holder's lock; `of_dead=True` also that of a dead holder. Raises NotOwner if another
        process holds it, NotLocked if no process does.
        """
        pid = os.getpid() if pid is None else pid

        def is_ours(found: Judgement) -> bool:
            if force or (found.record is not None and (found.record.pid == pid or (of_dead and found.is_dead))):
                return True
            raise NotOwner(
                f"{self.path}: held by {found}, not by pid {pid}. Use force to release it all the same.",
                path=self.path,
            )

        self._release_or_break(is_ours, is_break=force)

    def _release_or_break(self, wanted: Callable[[Judgement], bool], *, is_break: bool = True) -> Record | None:
        try:
            found = self._with_existing(lambda entry, fd: self._remove(entry, fd, wanted, MAX_WAIT_TRIES, is_break))
        except NotPermitted as error:
            raise PermissionError(error.errno, error.strerror, self.path) from None
        if found is None:
            raise NotLocked(f"{self.path}: nobody holds it.", path=self.path)
        if isinstance(found, Outcome):
            raise NotALockFile(
                f"{self.path} was not removed: it is in use by a Lock, a Semaphore or flock(1), or another process is "
                "removing it. Try again later.",
                path=self.path,
            )
        return found.record

    def clean(self) -> bool:
        """Remove a stale lock file, and private files that dead processes left of it. True: there was one."""
        try:
            cleaned = bool(self._with_existing(lambda entry, fd: self._remove(entry, fd, _is_stale, MAX_WAIT_TRIES)))
        except PermissionError:
            cleaned = False  # another user's
        return self.clean_private_files() or cleaned

    def clean_private_files(self) -> bool:
        """Remove only the private files that dead processes left. True: there was one."""
        entry = self._open_entry()
        try:
            return remove_private_files(entry, self.stale_after)
        finally:
            entry.close()


def _is_stale(found: Judgement) -> bool:
    return found.stale
