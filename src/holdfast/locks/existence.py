"""`LockFile`: held while the file exists. It survives its process; a crash leaves it behind, to be judged.

The file is the `sema` format (`record`), whole from its first moment (`publish`). Two bytes far past its content
(docs/formats.md) carry what no content can:

* the *liveness byte*, locked by the holder's process as long as it lives. Whoever finds it free knows that the holder
  is gone: no pid to be reused, no hour to wait. Locks of other tools, and of commands that have exited, have none
* the *removal byte*, locked by whoever removes the file: the holder, a waiter that found it stale, `break_`, `clean`

Every removal takes the removal byte of the file that it has open, sees that the name still means this file, reads and
judges it again, and only then unlinks. "Read, judge, unlink" alone loses a lock now and then:

    A reads x: stale
                        B reads x: stale
    A unlinks x
    A creates x: holds it
                        B unlinks x, which is A's
                        B creates x: two holders

A hold can be lost: somebody may break the lock of a stopped process. `check`, the heartbeat and `release` compare what
the path names with what was published, and never remove anything else.

What is not promised: that tools which unlink without these rules leave ours alone; `check` tells.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from time import monotonic, sleep, time_ns

from .. import gate, owner, record, system
from ..errors import CorruptLock, LockLost, NotALockFile, NotLocked, NotOwner, UnsafePath
from ..paths import cannot_be_swapped, mount_at
from ..wait import SAFETY_LOOK, Pause, check_deadline, sooner
from . import base, heartbeat
from .inode import Waiting, would_deadlock
from .judge import POLICIES, judge
from .publish import NOT_HERE, Place, exchange, private_files, publish, replace
from .queue import Queue, QueuedLock, remove_queue
from .semaphore import MOST_PERMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..record import Record
    from ..status import Status
    from ..wait import Steps
    from .judge import Judgement, Policy

    Result = TypeVar("Result")

_MANY_IN_VAIN = 3
_SOME_TRIES, _MANY_TRIES = 5, 60
_PATIENCE_WITH_REMOVER = 1000
_MANY_TOKENS = 10_000
_REGULAR = 0o10  # the type in st_mode, above its 12 permission bits

# The greatest token that this process gave out or saw, by path: two acquisitions may fall into one tick of the clock.
_last_tokens: dict[str, int] = {}


class FileHold(base.Hold):
    """A held `LockFile`. `token` is greater than that of every earlier hold on the path."""

    __slots__ = ("_called_at", "_content", "_lost", "_place", "token")

    lock: LockFile
    token: int

    def __init__(self, lock: LockFile, fd: int, inode: gate.Inode, place: Place, content: bytes) -> None:
        # What `Hold` does, without the call.
        self.lock = lock
        self.acquired_at = time.time()
        self._outer = None
        self._book = book = gate.book
        self._serial = book.write_down(fd, inode, False)
        self._place = place
        self._content = content
        self._lost = False
        self._called_at = 0.0
        if place.folder is not None:
            book.open_fds.add(place.folder)
        lock._metrics.acquisitions.bump()

    def _still_named(self) -> bool:
        if not self._lost and not base.Hold._still_named(self):
            entry = self._book.holds.get(self._serial)
            self._lost = entry is None or not self.lock._says(self._place, entry[1], self._content)
        return not self._lost

    @property
    def lost(self) -> bool:
        """True if the lock was taken away from this hold, and from then on."""
        return self._lost or (not self.released and not self._still_named())

    def _release(self, entry: gate.Entry) -> bool:
        fd, (dev, ino), _, _, _ = entry
        name, folder = self._place.name, self._place.folder
        try:
            if not _take_removal_right(fd):
                # Whoever has it removes the file; if not, everybody finds that we are gone.
                self.lock._metrics.cleanups_skipped.bump()
                return not self._lost and self.lock._names((dev, ino))
            st = system.stat(name, dir_fd=folder, follow_symlinks=False)
            if (st.st_ino == ino and st.st_dev == dev) or self.lock._says(self._place, (dev, ino), self._content):
                system.unlink(name, dir_fd=folder)
                return not self._lost  # who lost it once may have had a successor meanwhile
        except FileNotFoundError:
            pass
        finally:
            if self.lock.heartbeat is not None:
                heartbeat.end(self)
            # Who renews it has the mutex, and whoever comes later finds no entry. When the interpreter goes down,
            # threads stop with what they have.
            if not sys.is_finalizing():
                with self._book.mutex:
                    pass
            system.close(fd)
            if folder is not None:
                self._book.open_fds.discard(folder)
                system.close(folder)
            if self._called_at:
                gate.book.note_turn(self.lock._file, self._called_at)
                remove_queue(self.lock._queue)
        self._lost = True
        return False

    def renew(self) -> None:
        """Set the timestamp to now, in place: as many digits as before, in one write. Raises LockLost."""
        self.check()
        with self._book.mutex:  # `_release` waits for it before it closes the descriptor
            entry = self._book.holds.get(self._serial)
            if entry is None:
                return
            start = self._content.index(b"timestamp=") + len(b"timestamp=")
            system.pwrite(entry[0], b"%010d" % int(time.time()), start)


class LockFile(QueuedLock[FileHold]):
    """A lock file of the `sema` protocol, shared with its other implementations.

    tag: what to say about the holder
    stale_after: seconds after which a lock may be taken from a holder of whom nothing else is known; None: never
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
        "_name",
        "_parent",
        "_safe_place",
        "_template",
        "durable",
        "fence",
        "heartbeat",
        "on_lost",
        "retry",
        "stale",
        "stale_after",
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
        QueuedLock.__init__(self, path, "file", timeout, fair, mode)
        if ".." in self.path.split(os.sep):
            raise UnsafePath(
                f"{self.path}: a path with a component '..' may lead anywhere; give os.path.realpath of it",
                path=self.path,
            )
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
        self._composed_for: object = None
        self._template = b""
        self._parent, self._name = os.path.split(self.path)
        self._safe_place: Place | None = None

    def _locate(self, file: str) -> None:
        QueuedLock._locate(self, file)
        self._parent, self._name = os.path.split(file)
        self._safe_place = None

    # Acquiring.

    def _try(self) -> FileHold | None:
        if not self.fair or not system.access(self._queue, 0):
            return self._attempt()
        turn = gate.book.turns.get(self._file)
        return self._attempt(queued=True) if turn is not None and turn.take() else None

    def _attempt(self, queued: bool = False) -> FileHold | None:
        if self._file is not self.path:
            self._resolve()
        while True:
            place = self._safe_place or self._open_place()
            hold = None
            try:
                # Who waits has seen a lock file, and looks at it before trying.
                hold = None if queued else self._publish(place)
                tries = 0
                while hold is None and tries < _MANY_TRIES:
                    hold = self._publish_after_look(place)
                    tries += 1
                    if hold is None and tries > _SOME_TRIES:
                        # Others are at it too, and where a name stays until all have closed the file (Windows) we are
                        # in each other's way. Not all of us pause equally long.
                        sleep(0.000_1 * tries * (os.getpid() % 7 + 1))
                return hold
            except _StillHeld:
                return None
            except _IsLink:
                self._resolve()
            except _Robbed:
                pass
            finally:
                if hold is None:
                    _leave_place(place)

    def _resolve(self) -> None:
        """The path is a symlink, and may have been changed since: find out what it stands for."""
        before = self._file
        self._locate(os.path.realpath(self.path))
        if self._file == before and os.path.islink(self._file):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)

    def _open_place(self) -> Place:
        """The directory, by descriptor where it could be swapped: we stay in it, whatever happens to the path."""
        try:
            if not system.HAS_FOLDERS or (not self.durable and cannot_be_swapped(self._parent)):
                self._safe_place = Place(self._parent, self._name, None)
                return self._safe_place
            folder = system.open_fd(self._parent, system.O_SYNCABLE_FOLDER if self.durable else system.O_FOLDER)
            return Place(self._parent, self._name, folder)
        except FileNotFoundError:
            text = "the directory for this lock does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, self.path) from None

    def _publish_after_look(self, place: Place) -> FileHold | None:
        """Take the name if it is free, or its lock file is stale. None: something changed meanwhile, so look again."""
        fd = self._open_existing(place)
        if fd < 0:
            return self._publish(place)
        try:
            if not self._judge(fd).stale:
                raise _StillHeld
            return self._take_over(place, fd)
        finally:
            system.close(fd)

    def _publish(self, place: Place) -> FileHold | None:
        """Make the lock file. None: there is one."""
        content = self._compose()
        try:
            fd, st = publish(place, content, self.mode, self.durable)
        except FileExistsError:
            return None
        return self._begin(place, fd, st, content)

    def _take_over(self, place: Place, stale: int) -> FileHold | None:
        """Put our lock file in the place of a stale one, in one step where that can be done.

        Tools that know nothing of the removal byte may remove the stale one too, and make their own. With a moment
        between removing and making, we could remove theirs.
        """
        found = self._prepare_removal(place, stale, lambda judgement: judgement.stale)
        if found is False:
            raise _StillHeld
        if found is True:
            return None
        if found.foreign:
            self._put_away(place, found)
            return None
        content = self._compose()
        try:
            made = exchange(place, content, self.mode, self.durable, system.fstat(stale))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
            self._put_away(place, found)
            return None
        if made is None:
            return None
        self._count_break(found)
        return self._begin(place, *made, content)

    def _compose(self) -> bytes:
        """The record of a new hold; what stays the same is put together once in a process."""
        me = owner.me()
        if self._composed_for is not me:
            self._template = record.template(record.Record(me.pid, 0, self.tag, me.host, me.boot, me.start, "", 0))
            self._composed_for = me
        return self._template % (time_ns() // 1_000_000_000, me.random, gate.book.new_serial())

    def _begin(self, place: Place, fd: int, st: os.stat_result, content: bytes) -> FileHold:
        """The name is ours, so what has to be greater than in every earlier hold is settled now."""
        try:
            hold = FileHold(self, fd, (st.st_dev, st.st_ino), place, content)
        except BaseException:
            system.close(fd)  # which says that we are gone
            raise
        try:
            token = time_ns()
            last = _last_tokens.get(self._file, 0)
            if token <= last:
                token = last + 1
            if self.fence:
                # Nobody takes the lock away from who has the removal byte, so nobody else writes the fence.
                if not _take_removal_right(fd) or not self._is_at(place, fd, st):
                    raise _Robbed
                token = self._advance_fence(place, token)
                system.unmark_removal(fd)
            hold.token = token
            self._note_token(token)
            system.pwrite(fd, b"%020d" % token, len(content) - record.TOKEN_DIGITS - 1)
            if self.durable and place.folder is not None:
                system.fsync(place.folder)
            if not self._is_at(place, fd, st):
                raise _Robbed
            if self.heartbeat is not None:
                heartbeat.beat(hold, self.heartbeat)
        except BaseException:
            try:
                hold.release()
            except LockLost:
                pass  # why we gave up matters more
            finally:
                place.folder = None  # it was the hold's, and is closed
            raise
        return hold

    def _advance_fence(self, place: Place, token: int) -> int:
        """Keep the last token beside the lock. We hold the lock, so nobody else writes it."""
        name = place.name + ".fence"
        last = 0
        try:
            fd = system.open_fd(name, system.O_READ, dir_fd=place.folder)
        except FileNotFoundError:
            pass
        else:
            try:
                digits = system.read(fd, 64).strip()
            finally:
                system.close(fd)
            if not (digits.isdigit() and len(digits) <= 19 and int(digits) < 2**63 - 1):
                raise CorruptLock(
                    f"{self._file}.fence does not hold a number: {digits[:40]!r}. See what wrote it: without it tokens "
                    "may repeat.",
                    path=self.path,
                )
            last = int(digits)
        token = max(token, last + 1)
        replace(place, ".fence", b"%d\n" % token, self.mode, self.durable)
        return token

    # Judging and removing.

    def _open_existing(self, place: Place) -> int:
        """The lock file, or -1 if there is none."""
        for flags in (system.O_EXISTING, system.O_READ):
            try:
                return system.open_fd(place.name, flags, dir_fd=place.folder)
            except FileNotFoundError:
                return -1
            except PermissionError:
                continue
            except IsADirectoryError:
                raise self._not_a_lock_file() from None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise _IsLink from None
                if error.errno == errno.ENXIO:
                    raise self._not_a_lock_file() from None  # a socket, or a device that is not there
                raise
        raise PermissionError(errno.EACCES, "the lock file may not be read", self.path)

    def _prepare_removal(self, place: Place, fd: int, wanted: Callable[[Judgement], bool]) -> Judgement | bool:
        """Whose lock is removed, if the name still means the open file and it is `wanted` gone.

        The removal byte is ours then, until the descriptor is closed. True: the name is free of it already. False: it
        is to stay, or not ours to remove.
        """
        try:
            if not _take_removal_right(fd):
                return False
        except OSError as error:
            if error.errno == errno.EBADF:  # open for reading only: another user's
                return False
            raise
        if not self._is_at(place, fd):
            return True
        judgement = self._judge(fd)
        if not wanted(judgement):
            return False
        if judgement.record is None and _is_locked(fd):
            raise self._not_a_lock_file()
        return judgement

    def _remove(self, place: Place, fd: int, wanted: Callable[[Judgement], bool], *, by_owner: bool = False) -> bool:
        """Remove the open file, if the name still means it and it is `wanted` gone. True: the name is free of it."""
        found = self._prepare_removal(place, fd, wanted)
        if isinstance(found, bool):
            return found
        self._put_away(place, found, by_owner=by_owner)
        return True

    def _put_away(self, place: Place, found: Judgement, *, by_owner: bool = False) -> None:
        """Free the name. What does not look like a lock file is kept under another one."""
        saved = ""
        try:
            if found.foreign:
                saved = f"{place.name}.saved-{os.urandom(4).hex()}"
                system.rename(place.name, saved, src_dir_fd=place.folder, dst_dir_fd=place.folder)
            else:
                system.unlink(place.name, dir_fd=place.folder)
        except FileNotFoundError:
            return  # another tool, which does not wait for the removal byte, was quicker
        if not by_owner:
            self._count_break(found, saved)

    def _count_break(self, found: Judgement, saved: str = "") -> None:
        self._metrics.breaks.bump()
        self._log_removal(found, saved)

    def _log_removal(self, judgement: Judgement, saved: str) -> None:
        import logging

        log = logging.getLogger("holdfast")
        if saved:
            log.warning("%s did not look like a lock file and was old: it is %s now", self.path, saved)
        elif judgement.alive:
            log.warning("%s: took the lock away from %s, which is alive", self.path, judgement)
        else:
            log.info("%s: removed the lock of %s", self.path, judgement)

    def _is_at(self, place: Place, fd: int, st: os.stat_result | None = None) -> bool:
        """Is the open file the one that has the name?"""
        st = st or system.fstat(fd)
        try:
            named = system.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if named.st_ino == st.st_ino and named.st_dev == st.st_dev:
            return True
        return self._says(place, (st.st_dev, st.st_ino), system.pread(fd, record.MOST_BYTES, 0))

    def _says(self, place: Place, inode: gate.Inode, content: bytes) -> bool:
        """Is the file with this name the one with that inode and content? For file systems without inode numbers."""
        if mount_at(inode[0], self._file).has_inodes:
            return False
        try:
            fd = system.open_fd(place.name, system.O_READ, dir_fd=place.folder)
        except FileNotFoundError:
            return False
        try:
            there = system.read(fd, record.MOST_BYTES)
        finally:
            system.close(fd)
        return there == content or record.same_owner(there, content)

    def _judge(self, fd: int) -> Judgement:
        if system.fstat(fd).st_mode >> 12 != _REGULAR:
            raise self._not_a_lock_file()
        judgement = judge(fd, self._file, self.stale, self.stale_after)
        if judgement.record is not None and judgement.record.token is not None:
            self._note_token(max(_last_tokens.get(self._file, 0), judgement.record.token))
        return judgement

    def _note_token(self, token: int) -> None:
        _last_tokens[self._file] = token
        if len(_last_tokens) > _MANY_TOKENS:
            _last_tokens.pop(next(iter(_last_tokens)), None)

    def _not_a_lock_file(self) -> NotALockFile:
        return NotALockFile(
            f"{self.path} is a directory, a device, a FIFO, or the file of a Lock or Semaphore that is held, and not "
            "that of a LockFile; it was left untouched.",
            path=self.path,
        )

    # Waiting.

    def _steps(self, deadline: float | None, *, asynchronous: bool) -> Steps[FileHold]:
        try:
            st = system.stat(self.path)
        except OSError:
            pass
        else:
            if gate.book.holds_of_caller((st.st_dev, st.st_ino), asynchronous=asynchronous):
                raise would_deadlock(self.path, asynchronous, "holds the lock")
        queue = Queue(self._queue, self.mode) if self._has_queue() else None
        hold = yield from self._wait_in_line(deadline, asynchronous, queue)
        if queue is not None:
            hold._called_at = monotonic()
        return hold

    def _wait_in_front(self, deadline: float | None, asynchronous: bool) -> Steps[FileHold]:
        waiting = Waiting(self._file)
        in_vain = 0  # how often in a row there was nothing to wait for, and yet no lock
        slept = False
        hold = None
        try:
            while True:
                hold = self._attempt(queued=not slept)
                if hold is not None:
                    return hold
                check_deadline(deadline)
                slept = yield from self._wait_for_change(waiting, deadline)
                waiting.move(self._file)
                in_vain = 0 if slept else in_vain + 1
                if in_vain > _MANY_IN_VAIN:  # it is stale, and we may not remove it
                    yield waiting.backoff.pause(deadline)
        finally:
            waiting.end(reuse=hold is not None)

    def _wait_for_change(self, waiting: Waiting, deadline: float | None) -> Steps[bool]:
        """Until the lock file that is there now is gone, replaced or stale. False: it is so already.

        It stays open meanwhile: to open and close it for each look would wake us, being news to whoever watches it.
        """
        place = self._open_place()
        fds = {fd for fd in (place.folder,) if fd is not None}
        slept = False
        try:
            fd = self._open_existing(place)
            if fd < 0:
                return slept
            fds.add(fd)
            gate.book.open_fds |= fds
            has_events = self._has_events()
            while True:
                if not self._is_at(place, fd):  # released: the case that should be quick
                    return slept
                judgement = self._judge(fd)
                if judgement.stale:
                    return slept
                check_deadline(deadline)
                if has_events and waiting.begin():
                    continue  # registered: look once more, and only then sleep
                until = sooner(monotonic() + self._next_look(judgement, has_events), deadline)
                yield waiting.step(until) if has_events else Pause(until)
                slept = True
                waiting.drain()
        except _IsLink:
            self._resolve()
            return slept
        finally:
            gate.book.open_fds -= fds
            for fd in fds:
                system.close(fd)

    def _next_look(self, judgement: Judgement, has_events: bool) -> float:
        """In how many seconds to look although nothing happened: the lock may have grown old by then."""
        longest = SAFETY_LOOK if has_events else self.retry
        return longest if judgement.stale_in is None else min(longest, judgement.stale_in + 0.001)

    # Looking and mending.

    def examine(self) -> Judgement | None:
        """What is known about the holder now; None if the lock is free."""
        return self._with_existing(lambda place, fd: self._judge(fd))

    def _with_existing(self, do: Callable[[Place, int], Result]) -> Result | None:
        """Do something with the lock file, opened; None if there is none."""
        while True:
            place = self._open_place()
            try:
                fd = self._open_existing(place)
                if fd < 0:
                    return None
                try:
                    return do(place, fd)
                finally:
                    system.close(fd)
            except _IsLink:
                self._resolve()
            finally:
                _leave_place(place)

    def status(self) -> Status:
        from ..status import of_lock_file

        return of_lock_file(self.path, self.examine())

    def break_(self) -> Record | None:
        """Take the lock away from whoever has it, by hand. Gives the record of the loser, None if it had none."""
        return self._remove_by_hand(lambda _: True)

    def release_as_owner(self, pid: int | None = None, *, force: bool = False) -> None:
        """Release a lock that was acquired in the name of `pid` (this process, if not given), by whatever process."""
        pid = os.getpid() if pid is None else pid

        def is_ours(found: Judgement) -> bool:
            if force or (found.record is not None and found.record.pid == pid):
                return True
            raise NotOwner(
                f"{self.path}: held by {found}, not by pid {pid}. Use force to release it all the same.",
                path=self.path,
            )

        self._remove_by_hand(is_ours, by_owner=not force)

    def _remove_by_hand(self, wanted: Callable[[Judgement], bool], *, by_owner: bool = False) -> Record | None:
        def remove(place: Place, fd: int) -> Judgement:
            judgement = self._judge(fd)
            if not self._remove(place, fd, wanted, by_owner=by_owner):
                raise PermissionError(errno.EACCES, "this user may not write the lock file, nor remove it", self.path)
            return judgement

        judgement = self._with_existing(remove)
        if judgement is None:
            raise NotLocked(f"{self.path}: nobody holds it.", path=self.path)
        return judgement.record

    def clean(self) -> bool:
        """Remove a stale lock, and private files that dead acquirers of this very lock left. True: there was one."""
        cleaned = self._with_existing(lambda place, fd: self._remove(place, fd, lambda found: found.stale)) or False
        place = self._open_place()
        try:
            for name in private_files(self._parent, self._name):
                cleaned = self._remove_private(place, name) or cleaned
        finally:
            _leave_place(place)
        return cleaned

    def _remove_private(self, place: Place, name: str) -> bool:
        path = place.name[: -len(self._name)] + name
        try:
            fd = system.open_fd(path, system.O_EXISTING, dir_fd=place.folder)
        except OSError:
            return False
        try:
            pid = int(name[len(self._name) + 1 :].partition(".")[0])
            age = time.time() - system.fstat(fd).st_mtime
            old = self.stale_after is not None and age > self.stale_after
            # Between making the file and locking its liveness byte an acquirer shows only its pid.
            if system.liveness_locked(fd) or (system.process_exists(pid) and not old):
                return False
            system.unlink(path, dir_fd=place.folder)
        except FileNotFoundError:
            return False
        finally:
            system.close(fd)
        return True


class _StillHeld(Exception):
    """The lock is held, or stale and not ours to take over."""


class _Robbed(Exception):
    """Taken away before its token was settled, which might then be greater than the robber's: to be begun again."""


class _IsLink(Exception):
    """The name is a symlink: to be resolved, then begun again."""


def _is_locked(fd: int) -> bool:
    """Does a `Lock` or a `Semaphore` use this file? Then it has no record, and is not ours to judge."""
    if system.slots_taken(fd, MOST_PERMITS) or system.range_taken(fd):
        return True
    try:
        system.lock(fd, system.EX_NB)  # we have the removal byte, so nobody takes this for a holder
        system.lock(fd, system.UN)
    except BlockingIOError:
        return True
    return False


def _take_removal_right(fd: int) -> bool:
    """Others have it for microseconds. False: one of them has been stopped in the middle."""
    for _ in range(_PATIENCE_WITH_REMOVER):
        try:
            system.lock_removal(fd)
        except BlockingIOError:
            sleep(0.000_01)
        else:
            return True
    return False


def _leave_place(place: Place) -> None:
    if place.folder is not None:
        system.close(place.folder)
