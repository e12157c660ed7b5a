"""`LockFile`: held while the file exists. It survives its process; a crash leaves it behind, to be judged.

The file is the `sema` format (`record`), whole from its first moment (`publish`). Two bytes far past its content
(docs/formats.md) carry what no content can:

* the *liveness byte*, locked by the holder's process as long as it lives. A process that finds it free knows that the
  holder is gone: no pid to be reused, no hour to wait. Locks of other tools and of commands that have exited have none
* the *removal byte*, locked by the process that removes the file: the holder, a waiter that found it stale, `break_`,
  `clean`. Finding, judging and removing are in `removal`

The holder also has the kernel lock of its file, so that `Lock` and flock(1) on the same path wait for it.

A hold can be lost: a user may break the lock of a stopped process. `check`, the heartbeat and `release` compare what
the path names with what was published, and never remove anything else.

Taking over a stale file exchanges its name with that of a new one. Another tool may have replaced the stale file just
before, so that the exchange displaced a lock that is held. It is put back. A process killed before that leaves its own
record in place, whose content leads to the displaced file (`publish.displaced_name`): the next process that is about to
remove the record puts the file back, and the holder of the file finds it there in the meantime.

What is not promised: that tools which unlink without these rules leave ours alone; `check` tells.
"""

from __future__ import annotations

import errno
import sys
import time
from _thread import allocate_lock
from contextlib import suppress
from itertools import count
from time import monotonic, time_ns

from .. import owner, process, system
from ..errors import LockLost
from ..files import inode_of, named
from ..paths import mount_at
from ..wait import DeadlinePassed, drive
from . import base, heartbeat, record, tokens
from .base import BUSY, QUEUED, REPLACED, Outcome, would_deadlock
from .file_waiter import FileWaiter
from .publish import NOT_HERE, displaced_name, exchange, publish
from .queue import Queue, remove_queue
from .removal import FileLock, IsLink, Unreadable, take_removal_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Callable

    from ..files import HeldFd
    from ..wait import Steps
    from .publish import Place, Published
    from .record import Record
    from .staleness import Judgement, Policy

_serials = count()  # of the holds of this process
_MAX_TRIES = 5


class FileHold(base.Hold):
    """A held `LockFile`.

    `token` is greater than that of every earlier hold on the path. Without `fence=True` this fails if the clock is set
    back while the lock is free.
    """

    __slots__ = ("_called_at", "_content", "_file", "_inode", "_lost", "_place", "_renewing", "token")

    lock: LockFile
    token: int
    _renewing: LockType | None  # held by a thread that renews; made by the first one

    def _begin(self, lock: LockFile, file: HeldFd, inode: process.Inode, place: Place, content: bytes) -> None:
        # With what `Hold._begin` does: every acquire comes here.
        self._file = file
        self._inode = inode
        self._place = place
        self._content = content
        self._lost = self._is_closed = False
        self._renewing = None
        self._called_at = 0.0
        self.lock = lock
        self.acquired_at = time.time()
        self._registry = registry = process.registry
        count = lock._metrics.acquisitions.bump
        count()
        registry.holds[id(self)] = (inode, False, process.owner(), (file, place))

    def fileno(self) -> int:
        """The descriptor that carries the liveness byte."""
        if self.released:
            raise self._not_held()
        return self._file.fd

    def _still_named(self) -> bool:
        path, inode = self.lock.path, self._inode
        if self._lost or named(path, inode) is not None:
            return not self._lost
        name = self.lock._name_now(self._place, inode, self._content)
        if name is None:
            self._lost = True
        elif name == self._place.name and mount_at(inode[0], name).has_inodes:
            # It was put back in between, or the path is a link that leads elsewhere now.
            self._lost = named(path, inode) is None
        return not self._lost

    @property
    def lost(self) -> bool:
        """True if the lock was taken away from this hold, and from then on."""
        return self._lost or (not self.released and not self._still_named())

    def _release(self) -> bool:
        fd, inode = self._file.fd, self._inode
        try:
            return self._remove(fd, inode)
        except BaseException:
            # An interrupt: with a policy that goes by age, what is left would be held for an hour, by nobody.
            with suppress(OSError):
                self._remove(fd, inode)
            raise
        finally:
            if self.lock.heartbeat is not None:
                heartbeat.end(self, inode[0])
            # A thread that renews it has the mutex, and a later one finds no entry. When the interpreter goes down,
            # threads stop with what they have.
            if self._renewing is not None and not sys.is_finalizing():
                with self._renewing:
                    pass
            self._is_closed = True
            self._file.close()
            if self._place.folder is not None:
                self._place.release()
            if self._called_at:
                process.registry.note_turn(self.lock._file, self._called_at)
                remove_queue(self.lock._queue)

    def _remove(self, fd: int, inode: process.Inode) -> bool:
        """False: it was lost before, now or earlier."""
        place = self._place
        if not take_removal_right(fd):
            # The process that has it removes the file; if not, everybody finds that we are gone.
            self.lock._metrics.cleanups_skipped.bump()
            return not self._lost and named(self.lock.path, inode) is not None
        # The directory may have another name by now. A hold that was lost once may have had a successor meanwhile.
        path = self.lock.path
        is_same = place.name == path  # then one look is enough
        is_there = named(path, inode, follow_symlinks=not is_same) is not None
        if (is_there and is_same) or place.inode(place.name) == inode:
            self._lost = self._lost or not is_there
            if place.remove(place.name):
                return not self._lost
        removed = False
        # More than once, if a takeover had given it another name and has put it back in the moment of the removal.
        for _ in range(_MAX_TRIES):
            name = self.lock._name_now(place, inode, self._content)
            if name is None:
                break
            removed = place.remove(name) or removed
            if removed and name == place.name:
                break
        self._lost = self._lost or not removed
        return not self._lost

    def leave_standing(self) -> None:
        """Let go of the lock file without removing it: it is held in the name of another process from now on."""
        if self.released or self._registry.holds.pop(id(self), None) is None:
            raise self._not_held()
        if self.lock.heartbeat is not None:
            heartbeat.end(self, self._inode[0])
        self._file.close()
        self._place.release()
        if self._called_at:
            remove_queue(self.lock._queue)

    def renew(self) -> None:
        """Set the timestamp to now, in place: as many digits as before, in one write. Raises LockLost."""
        self.check()
        with process.registry.mutex:
            mutex = self._renewing = self._renewing or allocate_lock()
        with mutex:  # `_release` waits for it before it closes the descriptor
            if self.released:
                return
            start, text = self.lock.format.renewal(self._content, time.time())
            system.pwrite(self._file.fd, text, start)


class LockFile(FileLock[FileHold]):
    """A lock file of the `sema` protocol, shared with its other implementations.

    tag: what to say about the holder
    stale_after: seconds after which a lock is old; None: never. `stale` decides what that means
    stale: "proof" replaces a holder proved dead at once, keeps one proved alive, and lets age decide only where neither
        can be proved; "old" goes by age alone; "dead-and-old" wants both an old lock and a pid that does not exist
    retry: seconds between looks where no event can be had
    durable: the lock survives a power failure (fsync of the file and of its directory)
    heartbeat: renew the timestamp every so many seconds; `on_lost(hold)` is called if the lock was taken away
    fence: keep the last token in `<path>.fence`, so that tokens grow even if the clock is set back
    timeout, fair, mode: as for `Lock`
    """

    __slots__ = (
        "_composed_for",
        "_template",
        "fence",
        "heartbeat",
        "on_lost",
        "retry",
        "tag",
    )

    _options: tuple[str, ...] = ("tag", "stale_after", "stale", "timeout", "retry", "durable")
    _options += ("heartbeat", "on_lost", "fence", "fair", "mode")

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
        FileLock.__init__(self, path, timeout, fair, mode, durable, stale, stale_after)
        if not isinstance(retry, int | float) or not retry > 0:
            raise ValueError(f"retry is seconds, more than 0; not {retry!r}")
        if heartbeat is not None and (not isinstance(heartbeat, int | float) or not heartbeat > 0):
            raise ValueError(f"heartbeat is seconds, more than 0, or None for none; not {heartbeat!r}")
        if on_lost is not None and heartbeat is None:
            raise ValueError("on_lost is called by the heartbeat: give heartbeat=seconds too")
        self.tag = record.check_tag(tag)
        self.retry = retry
        self.heartbeat = heartbeat
        self.on_lost = on_lost
        self.fence = fence
        self._composed_for: object = None
        self._template = b""

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
        """Look, then publish or take over. A lock that is held costs a look, and no fsync.

        If no lock file is there, or none was seen yet and there is no fsync to save, it is quicker to publish at once.
        `queued` means that one was seen.
        """
        if self._location.file is not self.path:
            self._resolve()
        for tries in range(_MAX_TRIES):
            place = self._open_place()
            hold = None
            try:
                looks = tries or queued
                if not looks and self.durable and self._location.keeps:
                    looks = system.access(place.name, 0, dir_fd=place.folder)
                hold = self._publish_after_look(place) if looks else self._publish(place)
                if hold is not None:
                    return hold
            except (_StillHeld, Unreadable):
                return BUSY
            except IsLink:
                self._resolve()
            except _Robbed:
                pass
            finally:
                if hold is None:
                    place.leave()
        return REPLACED  # other processes take it and release it all the time

    def _publish_after_look(self, place: Place) -> FileHold | None:
        """Take the name if it is free, or its lock file is stale. None: something changed meanwhile, so look again."""
        file = self._open_existing(place)
        if file is None:
            return self._publish(place)
        with file:
            if not self._judge(file.fd).stale:
                raise _StillHeld
            return self._take_over(place, file.fd)

    def _publish(self, place: Place) -> FileHold | None:
        """Make the lock file. None: there is one."""
        content = self._compose()
        try:
            made = publish(place, content, self.mode, self.durable)
        except FileExistsError:
            return None
        except OSError as error:
            raise self._by_path(error) from None
        return self._begin(made, content)

    def _by_path(self, error: OSError) -> OSError:
        """The same error with our path, and not with what we call the file, seen from its directory."""
        return error if error.errno is None else OSError(error.errno, error.strerror, self.path)

    def _take_over(self, place: Place, stale: int) -> FileHold | None:
        """Put our lock file in the place of a stale one, in one step where that can be done.

        Tools that know nothing of the removal byte may remove the stale one too, and make their own. With a moment
        between removing and making, we could remove theirs.
        """
        if not take_removal_right(stale, _MAX_TRIES):
            return None  # another process removes it, or looks at it; the caller pauses, within its deadline
        found = self._prepare_removal(place, stale, lambda judgement: judgement.stale)
        if found is False:
            raise _StillHeld
        if found is True:
            return None
        content = self._compose()
        private = displaced_name(place.name, self.format.parse(content))
        try:
            made = exchange(place, private or "", content, self.mode, self.durable, system.fstat(stale))
        except (FileNotFoundError, FileExistsError):  # the second: another user has guessed the private name
            return None
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise self._by_path(error) from None
            self._remove_stale(place, found)
            return None
        if made is None:
            return None
        self._count_break(found)
        return self._begin(made, content)

    def _remove_stale(self, place: Place, found: Judgement) -> None:
        """Where two names cannot be exchanged."""
        try:
            if place.remove(place.name):
                self._count_break(found)
        except PermissionError as error:
            if error.errno == errno.EPERM:  # another user's file in a sticky directory
                raise _StillHeld from None
            raise self._by_path(error) from None

    def _compose(self) -> bytes:
        """The record of a new hold; what stays the same is put together once in a process."""
        me = owner.me()
        if self._composed_for is not me:
            mine = record.Record(me.pid, 0, self.tag, me.host, me.boot, me.start, "", 0)
            self._template = self.format.template(mine)
            self._composed_for = me
        return self.format.fill(self._template, time_ns() / 1e9, me.random, next(_serials))

    def _begin(self, made: Published, content: bytes) -> FileHold:
        """The name is ours, so what has to be greater than in every earlier hold is settled now."""
        hold = FileHold()
        fd, st, place = made.fd, made.st, made.place
        inode = inode_of(st)
        path = self._location.file
        try:
            hold._begin(self, made, inode, place, content)
            made.hand_over()
            token = tokens.new(path)
            if self.fence:
                # Nobody takes the lock away from the process with the removal byte, so nobody else writes the fence.
                if not take_removal_right(fd) or not self._is_at(place, fd, st):
                    raise _Robbed
                token = tokens.advance_fence(place, path, token, self.mode, self.durable)
                system.unmark_removal(fd)
            hold.token = token
            system.pwrite(fd, b"%020d" % token, self.format.token_at(content))
            if self.durable and made.keeps:
                place.sync()
            if place.inode(place.name) != inode and not self._is_at(place, fd, st):
                raise _Robbed
            if self.heartbeat is not None:
                heartbeat.beat(hold, st.st_dev, self.heartbeat)
        except BaseException:
            try:
                if hold._is_live:
                    hold.release()
                else:
                    made.take_back()
            except LockLost:
                pass  # why we gave up matters more
            raise
        return hold

    def _is_free(self) -> bool:
        found = self.examine()
        return found is None or found.stale

    def acquire_as_owner(self, pid: int, timeout: float | base.Default | None = base.DEFAULT) -> Record:
        """Acquire in the name of another process, for a command that ends before its caller does.

        Nothing in this process holds the lock afterwards. It is released by `release_as_owner(pid)`, or stale when that
        process has ended or the lock is old. Raises Timeout or Busy as `acquire` does.
        """
        from .detached import acquire_for

        return acquire_for(self, pid, timeout)

    # Waiting.

    def wait_until_free(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        """Wait until the lock is free or stale. Does not acquire it. Raises Timeout, or Busy for 0."""
        timeout = self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        try:
            drive(FileWaiter(self, deadline).until_free())
        except DeadlinePassed:
            raise self._timed_out(timeout or 0) from None

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


class _StillHeld(Exception):
    """The lock is held, or stale and not ours to take over."""


class _Robbed(Exception):
    """Another process took the lock away before this hold had its token.

    The token could be greater than that of the new holder, so the attempt starts again.
    """
