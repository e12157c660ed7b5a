"""The engine of `LockFile`: one attempt to publish a lock file, and what can be done with one that exists.

One attempt, from top to bottom:

    open the directory, if it has to be synced or another user could replace it
    look, if a file is expected or publishing costs an fsync: is there a lock file? A file that is not stale is BUSY
    remove a stale file, by the rules of `removal`
    publish our own with `link`. If another process was faster, start again
"""

from __future__ import annotations

import errno
import os
from itertools import count
from stat import S_ISLNK

from .. import metrics, process, system
from ..files import inode_of
from ..paths import absolute, check_no_parent_component, follow_links, stat_of, symlink_refused
from . import local, record, tokens
from .base import would_deadlock
from .engine import BUSY, QUEUED, REMOVING, REPLACED, Outcome
from .file_hold import FileGrant
from .file_waiter import FileWaiter
from .publish import FileLocation, publish
from .removal import MAX_WAIT_TRIES, Changed, NotPermitted, excludes_other_kinds, open_existing, take_removal_byte
from .staleness import Judgement, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..status import Status
    from ..wait import Steps
    from .base import StrPath
    from .publish import Entry
    from .staleness import Policy

    Result = TypeVar("Result")

_serials = count()  # of the holds of this process
_MAX_TRIES = 5
_MAX_LINKS = 10


class FileEngine(local.LocalEngine):
    """The lock file at one path. `LockFile` describes the options."""

    __slots__ = (
        *("durable", "exact_mode", "fair", "fence", "follow", "format", "location", "metrics", "mode"),
        *("name", "retry", "stale", "stale_after", "writer"),
    )

    location: FileLocation

    def __init__(
        self,
        path: StrPath,
        writer: record.Writer,
        *,
        stale: Policy,
        stale_after: float | None,
        retry: float,
        durable: bool,
        fence: bool,
        fair: bool,
        mode: int,
        exact_mode: bool,
        follow: bool,
    ) -> None:
        check_no_parent_component(path)
        self.name = absolute(path)
        self.location = FileLocation(self.name)
        self.writer = writer
        self.format = writer.format
        self.stale = stale
        self.stale_after = stale_after
        self.retry = retry
        self.durable = durable
        self.fence = fence
        self.fair = fair and system.HAS_FIFOS
        self.mode = mode
        self.exact_mode = exact_mode
        self.follow = follow
        self.metrics = metrics.kind("file")

    @property
    def blocks(self) -> bool:
        return self.durable and self.location.keeps

    def status(self) -> Status:
        from ..status import of_lock_file

        return of_lock_file(self.name, self.examine(), self.format.kind)

    # One attempt.

    def first_attempt(self, timeout: float | None = None) -> FileGrant | Outcome:
        location = self.location
        if not self.fair or not system.access(location.queue, 0):
            return self.attempt()
        turn = process.registry.turns.get(location.file)
        return self.attempt(queued=True) if turn is not None and turn.take() else QUEUED

    def attempt(self, queued: bool = False) -> FileGrant | Outcome:
        """Publish the lock file, or take over a stale one. A lock that is held costs a look, and no fsync.

        If no lock file was seen yet (`queued`), and there is no fsync to save, it is quicker to publish at once.
        """
        if self.location.file is not self.name:
            self.resolve()
        looks = queued or (self.durable and self.location.keeps)
        for _ in range(_MAX_TRIES):
            entry: Entry | None = None
            found: FileGrant | Outcome = REPLACED
            try:
                entry = self.location.open(self.durable)
                found = self._attempt_at(entry, looks)
                if found is not REPLACED:
                    return found
            except NotPermitted:
                return BUSY
            except Changed:
                self.resolve()
            except OSError as error:
                raise self._by_path(error) from None
            finally:
                if not found and entry is not None:
                    entry.close()
            looks = True
        return REPLACED  # other processes acquire and release it all the time

    def _attempt_at(self, entry: Entry, looks: bool) -> FileGrant | Outcome:
        file = open_existing(entry, self.name) if looks else None
        if file is not None:
            with file:
                removed = self.remove(entry, file.fd, is_stale)
            if isinstance(removed, Outcome):
                return removed
        content = self.writer.write(next(_serials))
        try:
            grant = publish(FileGrant, entry, content, self.mode, self.durable, self.exact_mode)
        except FileExistsError:
            return REPLACED
        is_ours = False
        try:
            grant.begin(self, content)
            is_ours = self._complete(grant)
        finally:
            if not is_ours:
                grant.take_back()
        return grant if is_ours else REPLACED

    def _complete(self, grant: FileGrant) -> bool:
        """Give a new grant its token. Only now is it certain to be greater than all earlier tokens.

        False: another process took the lock away before. The token may be greater than that of the new holder.
        """
        entry, fd, token_from_end = grant.entry, grant.fd, self.format.token_from_end
        if token_from_end:
            token = tokens.new(self.location.file)
            if self.fence:
                # No process takes the lock away from the one with the removal byte, so no other writes the fence file.
                if not take_removal_byte(fd, MAX_WAIT_TRIES) or not grant.is_published():
                    return False
                token = tokens.advance_fence(entry, self.location.file, token, self.mode, self.durable)
                system.unmark_removal(fd)
            grant.token = token
            system.pwrite(fd, b"%020d" % token, len(grant.content) - token_from_end)
        if self.durable and grant.mount.keeps:
            entry.sync()
        return grant.is_published()

    def open_entry(self) -> Entry:
        try:
            return self.location.open(self.durable)
        except OSError as error:
            raise self._by_path(error) from None

    def _by_path(self, error: OSError) -> OSError:
        """The same error with the path of the lock, and not with the name of a file in its directory."""
        if error.errno is None:
            return error
        text = "the directory for this lock does not exist; make it first"
        return OSError(error.errno, text if error.errno == errno.ENOENT else error.strerror, self.name)

    def resolve(self) -> None:
        """The path is a symlink, or was one at the last look: find its target."""
        if not self.follow:
            st = stat_of(self.name)
            if st is not None and S_ISLNK(st.st_mode):
                raise symlink_refused(self.name)
            return
        file = follow_links(self.name)
        self.location = FileLocation(self.name if file == self.name else file)

    # Waiting.

    def is_free(self) -> bool:
        found = self.examine()
        return found is None or found.stale

    def shares_already(self, *, asynchronous: bool) -> bool:
        try:
            st = system.stat(self.name)
        except OSError:
            return False
        if process.registry.holds_of_caller(inode_of(st), asynchronous=asynchronous):
            raise would_deadlock(self.name, asynchronous, "holds the lock")
        return False

    def wait_in_front(self, deadline: float | None, *, asynchronous: bool) -> Steps[FileGrant]:
        return FileWaiter(self, deadline).acquire()

    # Judging and removing a file that exists.

    def judge(self, fd: int) -> Judgement:
        try:
            found = judge(fd, self.name, self.format, self.stale, self.stale_after)
        except FileNotFoundError:  # sshfs has no attributes of a removed file
            raise Changed from None
        if found.record is not None and found.record.token is not None:
            tokens.note(self.location.file, found.record.token)
        return found

    def remove(
        self, entry: Entry, fd: int, wanted: Callable[[Judgement], bool], tries: int = 1, is_break: bool = True
    ) -> Judgement | Outcome:
        """Remove the open file if `wanted` is true of it. Returns its judgement if the name is free of it now.

        BUSY: it is not wanted, or in use by another kind of lock. REMOVING: another process is removing it.
        """
        if not wanted(self.judge(fd)):
            return BUSY
        if not take_removal_byte(fd, tries):
            return REMOVING
        found = self.judge(fd)
        is_ours = wanted(found) and excludes_other_kinds(fd, self.name, found)
        # Only now: a `Lock` removes its file without the removal byte, but never without the kernel lock.
        if not entry.means(fd, system.fstat(fd)):
            return found
        if not is_ours:
            return BUSY
        try:
            # Another tool, which does not wait for the removal byte, may be quicker.
            if entry.remove(entry.name) and is_break:
                self._count_break(found)
        except PermissionError as error:
            if error.errno == errno.EPERM:
                raise NotPermitted(errno.EPERM, "another user's lock file in a sticky directory", self.name) from None
            raise self._by_path(error) from None
        return found

    def _count_break(self, found: Judgement) -> None:
        import logging

        self.metrics.breaks.bump()
        log = logging.getLogger("holdfast")
        if found.alive:
            log.warning("%s: took the lock away from %s, which is alive", self.name, found)
        else:
            log.info("%s: removed the lock of %s", self.name, found)

    def _with_existing(self, do: Callable[[Entry, int], Result]) -> Result | None:
        """Do something with the lock file, opened; None if there is none."""
        for _ in range(_MAX_LINKS):
            entry = self.open_entry()
            try:
                file = open_existing(entry, self.name)
                if file is None:
                    return None
                with file:
                    return do(entry, file.fd)
            except Changed:
                self.resolve()
            finally:
                entry.close()
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.name)

    def remove_existing(
        self, wanted: Callable[[Judgement], bool], *, is_break: bool = True
    ) -> Judgement | Outcome | None:
        """`remove` the lock file; None if there is none."""
        return self._with_existing(lambda entry, fd: self.remove(entry, fd, wanted, MAX_WAIT_TRIES, is_break))

    def examine(self) -> Judgement | None:
        """Return the facts about the holder; None if the lock is free."""
        try:
            return self._with_existing(lambda entry, fd: self.judge(fd))
        except NotPermitted:
            return Judgement(None, 0.0, None, stale=False, stale_in=None)


def is_stale(found: Judgement) -> bool:
    return found.stale
