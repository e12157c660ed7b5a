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
import time
from time import monotonic

from .. import gate, owner, record, system
from ..errors import CorruptLock, NotALockFile, NotLocked, NotOwner, UnsafePath
from ..paths import mount_at
from ..wait import SAFETY_LOOK, Pause, check_deadline, sooner
from . import base
from .inode import Waiting, would_deadlock
from .judge import POLICIES, judge
from .publish import publish
from .queue import Queue, remove_queue, wait_in_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record import Record
    from ..status import Status
    from ..wait import Steps
    from .judge import Judgement, Policy

_FORMAT, _REGULAR = 0o170000, 0o100000

# The last token that this process gave out for a path: two acquisitions may fall into one tick of the clock.
_last_tokens: dict[str, int] = {}


class FileHold(base.Hold):
    """A held `LockFile`. `token` is greater than that of every earlier hold on the path."""

    __slots__ = ("_called_at", "_content", "_folder", "_lost", "token")

    lock: LockFile
    token: int

    def __init__(self, lock: LockFile, fd: int, inode: gate.Inode, folder: int, content: bytes) -> None:
        base.Hold.__init__(self, lock, fd, inode, False)
        self._folder = folder
        self._content = content
        self._lost = False
        self._called_at = 0.0
        self._book.open_fds.add(folder)
        lock._metrics.acquisitions.bump()

    def _still_named(self) -> bool:
        entry = self._book.holds.get(self._serial)
        if entry is None or self._lost:
            return False
        if not self.lock._names(entry[1]):
            self._lost = True
        return not self._lost

    @property
    def lost(self) -> bool:
        return self._lost or base.Hold.lost.fget(self)  # type: ignore[attr-defined]

    def _release(self, entry: gate.Entry) -> bool:
        fd, inode, _, _, _ = entry
        name = self.lock._name
        try:
            system.lock_removal(fd)
            try:
                st = system.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except FileNotFoundError:
                return False
            if (st.st_dev, st.st_ino) != inode:
                return False
            system.unlink(name, dir_fd=self._folder)
        finally:
            system.close(fd)
            self._book.open_fds.discard(self._folder)
            system.close(self._folder)
            if self._called_at:
                gate.book.note_turn(self.lock._file, self._called_at)
                remove_queue(self.lock._queue)
        return True

    def renew(self) -> None:
        """Set the timestamp to now, in place: the same number of digits, in one write. Raises LockLost."""
        self.check()
        entry = self._book.holds.get(self._serial)
        if entry is not None:
            start = self._content.index(b"timestamp=") + len(b"timestamp=")
            system.pwrite(entry[0], b"%010d" % int(time.time()), start)


class LockFile(base.BaseLock[FileHold]):
    """A lock file of the `sema` protocol, shared with its other implementations.

    tag: what to say about the holder
    stale_after: seconds after which a lock may be taken from a holder of whom nothing else is known; None: never
    stale: "proof" replaces a holder proved dead at once, keeps one proved alive, and lets age decide only where neither
        can be proved; "old" goes by age alone; "dead-and-old" wants both an old lock and a pid that does not exist
    retry: seconds between looks where no event can be had
    durable: the lock survives a power failure (fsync of the file and of its directory)
    heartbeat: renew the timestamp every so many seconds; `on_lost(hold)` is called if the lock was taken away
    fence: keep the last token in `<path>.fence`, so that tokens grow even if the clock is set back
    """

    __slots__ = (
        "_composed_for",
        "_name",
        "_parent",
        "_queue",
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
        base.BaseLock.__init__(self, path, "file", timeout, fair and system.HAS_FIFOS, mode)
        if ".." in self.path.split(os.sep):
            raise UnsafePath(f"{self.path}: a path with a component '..' may lead anywhere", path=self.path)
        if stale not in POLICIES:
            raise ValueError(f"stale is one of {', '.join(POLICIES)}, not {stale!r}")
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
        self._locate(self.path)

    def _locate(self, file: str) -> None:
        self._file = file
        self._parent, self._name = os.path.split(file)
        self._queue = file + ".queue"

    # Acquiring.

    def _try(self) -> FileHold | None:
        if not self.fair or not system.access(self._queue, 0):
            return self._attempt()
        turn = gate.book.turns.get(self._file)
        return self._attempt(queued=True) if turn is not None and turn.take() else None

    def _try_despite_queue(self) -> FileHold | None:
        if self.fair and not Queue(self._queue, self.mode).is_alive():
            return self._attempt()
        return None

    def _attempt(self, queued: bool = False) -> FileHold | None:
        while True:
            folder = self._open_folder()
            hold = None
            try:
                while not queued or self._clear(folder):
                    queued = False
                    hold = self._publish(folder)
                    if hold is not None:
                        self._settle(hold)
                        return hold
                    if not self._clear(folder):
                        return None
                return None
            except _IsLink:
                self._locate(os.path.realpath(self.path))
            finally:
                if hold is None:
                    system.close(folder)

    def _open_folder(self) -> int:
        """The directory, by descriptor: whatever happens to the path from now on, we stay in this one."""
        try:
            return system.open_fd(self._parent, system.O_SYNCABLE_FOLDER if self.durable else system.O_FOLDER)
        except FileNotFoundError:
            text = "the directory for this lock does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, self.path) from None

    def _publish(self, folder: int) -> FileHold | None:
        content = self._compose()
        try:
            fd = publish(folder, self._name, content, self.mode, self.durable, system.lock_liveness)
        except FileExistsError:
            return None
        try:
            st = system.fstat(fd)
            hold = FileHold(self, fd, (st.st_dev, st.st_ino), folder, content)
        except BaseException:
            system.close(fd)
            raise
        return hold

    def _compose(self) -> bytes:
        """The record of a new hold; the part that stays the same is made once in a process."""
        me = owner.me()
        if self._composed_for is not me:
            fixed = record.Record(me.pid, 0, self.tag, me.host, me.boot, me.start, "%b", 0)
            self._template = record.template(fixed)
            self._composed_for = me
        return self._template % (int(time.time()), _new_owner())

    def _settle(self, hold: FileHold) -> None:
        """The name is ours. What has to be later than every earlier hold is settled only now."""
        token = max(time.time_ns(), _last_tokens.get(self._file, 0) + 1)
        if self.fence:
            token = self._advance_fence(hold._folder, token)
        hold.token = _last_tokens[self._file] = token
        entry = gate.book.holds[hold._serial]
        digits = b"%0*d" % (record.TOKEN_DIGITS, token)
        system.pwrite(entry[0], digits, len(hold._content) - record.TOKEN_DIGITS - 1)
        if self.durable:
            system.fsync(hold._folder)
        if self.heartbeat is not None:
            from .heartbeat import beat

            beat(hold, self.heartbeat)

    def _advance_fence(self, folder: int, token: int) -> int:
        """Keep the last token beside the lock. We hold the lock, so nobody else writes it."""
        name = self._name + ".fence"
        last = 0
        try:
            fd = system.open_fd(name, system.O_READ, dir_fd=folder)
        except FileNotFoundError:
            pass
        else:
            try:
                digits = system.read(fd, 64).strip()
            finally:
                system.close(fd)
            if not digits.isdigit():
                raise CorruptLock(f"{self._file}.fence does not hold a number: {digits[:40]!r}", path=self.path)
            last = int(digits)
        token = max(token, last + 1)
        system.replace_file(folder, name, b"%d\n" % token, self.mode, self.durable)
        return token

    # Judging and removing.

    def _names(self, inode: gate.Inode) -> bool:
        try:
            st = system.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (st.st_dev, st.st_ino) == inode

    def _open_existing(self, folder: int) -> int:
        """The lock file, or -1 if there is none."""
        for flags in (system.O_EXISTING, system.O_READ):
            try:
                return system.open_fd(self._name, flags, dir_fd=folder)
            except FileNotFoundError:
                return -1
            except PermissionError:
                continue
            except IsADirectoryError:
                raise self._not_a_lock_file() from None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise _IsLink from None
                raise
        raise PermissionError(errno.EACCES, "the lock file may not be read", self.path)

    def _clear(self, folder: int) -> bool:
        """True: there is no lock file now; if there was a stale one, it is gone."""
        fd = self._open_existing(folder)
        if fd < 0:
            return True
        try:
            if not self._judge(fd).stale:
                return False
            return self._remove(folder, fd, lambda found: found.stale)
        finally:
            system.close(fd)

    def _remove(self, folder: int, fd: int, wanted: Callable[[Judgement], bool]) -> bool:
        """Remove the open file, if the name still means it and it is `wanted` gone. True: the name is free of it."""
        try:
            system.lock_removal(fd)
        except OSError as error:
            if error.errno == errno.EBADF:  # open for reading only: another user's
                return False
            raise
        st = system.fstat(fd)
        try:
            named = system.stat(self._name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return True
        if (named.st_dev, named.st_ino) != (st.st_dev, st.st_ino):
            return True
        judgement = self._judge(fd)
        if not wanted(judgement):
            return False
        system.unlink(self._name, dir_fd=folder)
        if judgement.record is not None and judgement.record.token is not None:
            _last_tokens[self._file] = max(_last_tokens.get(self._file, 0), judgement.record.token)
        self._metrics.breaks.bump()
        import logging

        logging.getLogger("holdfast").info("%s: removed the lock of %s", self.path, judgement)
        return True

    def _judge(self, fd: int) -> Judgement:
        if system.fstat(fd).st_mode & _FORMAT != _REGULAR:
            raise self._not_a_lock_file()
        return judge(fd, self._file, self.stale, self.stale_after)

    def _not_a_lock_file(self) -> NotALockFile:
        return NotALockFile(
            f"{self.path} is a directory or a device, not a lock file; it was left untouched.", path=self.path
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
        queued = self.fair and self._mount_has_events()
        queue = Queue(self._queue, self.mode) if queued else None
        hold = yield from wait_in_line(self, deadline, asynchronous, queue)
        if queued:
            hold._called_at = monotonic()
        return hold

    def _mount_has_events(self) -> bool:
        try:
            mount = mount_at(system.stat(self._parent).st_dev, self._file)
        except OSError:
            return False
        return mount.events and mount.refusal is None

    def _wait_in_front(self, deadline: float | None, asynchronous: bool) -> Steps[FileHold]:
        waiting = Waiting(self._file)
        hold = None
        try:
            while True:
                hold = self._attempt(queued=True)
                if hold is not None:
                    return hold
                check_deadline(deadline)
                if not self._mount_has_events():
                    yield Pause(sooner(monotonic() + self.retry, deadline))
                elif waiting.begin():
                    continue  # registered: look once more, and only then sleep
                else:
                    yield waiting.step(sooner(monotonic() + self._next_look(), deadline))
                    waiting.drain()
                    waiting.move(self._file)  # the next lock file is another one
        finally:
            waiting.end(reuse=hold is not None)

    def _next_look(self) -> float:
        """When to look although nothing happened: the lock may grow old, or its holder leave without an event."""
        stale_in = None
        judgement = self.examine()
        if judgement is not None:
            stale_in = judgement.stale_in
        return SAFETY_LOOK if stale_in is None else min(SAFETY_LOOK, stale_in + 0.001)

    # Looking and mending.

    def examine(self) -> Judgement | None:
        """What is known about the holder now; None if the lock is free."""
        folder = self._open_folder()
        try:
            fd = self._open_existing(folder)
            if fd < 0:
                return None
            try:
                return self._judge(fd)
            finally:
                system.close(fd)
        except _IsLink:
            self._locate(os.path.realpath(self.path))
            return self.examine()
        finally:
            system.close(folder)

    def status(self) -> Status:
        from ..status import of_lock_file

        return of_lock_file(self.path, self.examine())

    def break_(self) -> Record | None:
        """Take the lock away from whoever has it, by hand. Gives the record of the loser, None if it had none."""
        return self._remove_by_hand(lambda _: True)

    def release_as_owner(self, pid: int | None = None, *, force: bool = False) -> None:
        """Release a lock that another process acquired in the name of `pid` (this process, if not given)."""
        pid = os.getpid() if pid is None else pid

        def is_ours(found: Judgement) -> bool:
            if force or (found.record is not None and found.record.pid == pid):
                return True
            raise NotOwner(
                f"{self.path}: held by {found}, not by pid {pid}. Use force to release it all the same.",
                path=self.path,
            )

        self._remove_by_hand(is_ours)

    def _remove_by_hand(self, wanted: Callable[[Judgement], bool]) -> Record | None:
        folder = self._open_folder()
        try:
            fd = self._open_existing(folder)
            if fd < 0:
                raise NotLocked(f"{self.path}: nobody holds it.", path=self.path)
            try:
                judgement = self._judge(fd)
                wanted(judgement)
                if not self._remove(folder, fd, wanted):
                    raise PermissionError(errno.EACCES, "the lock file may not be removed", self.path)
            finally:
                system.close(fd)
        except _IsLink:
            self._locate(os.path.realpath(self.path))
            return self._remove_by_hand(wanted)
        finally:
            system.close(folder)
        return judgement.record

    def clean(self) -> bool:
        """Remove a stale lock, and private files that dead acquirers of this very lock left. True: there was one."""
        before = self.examine()
        folder = self._open_folder()
        try:
            cleaned = before is not None and before.stale and self._clear(folder)
            for name in system.listdir(self._parent):
                if self._is_private(name) and self._remove_private(folder, name):
                    cleaned = True
        finally:
            system.close(folder)
        return cleaned

    def _is_private(self, name: str) -> bool:
        """`<name>.<pid>.<16 hex>.tmp`, and no other lock's: the private files of `a.b` are not those of `a`."""
        if not name.startswith(self._name + ".") or not name.endswith(".tmp"):
            return False
        pid, _, rest = name[len(self._name) + 1 : -len(".tmp")].partition(".")
        return pid.isdecimal() and len(rest) == 16 and all(c in "0123456789abcdef" for c in rest)

    def _remove_private(self, folder: int, name: str) -> bool:
        try:
            fd = system.open_fd(name, system.O_EXISTING, dir_fd=folder)
        except OSError:
            return False
        try:
            pid = int(name[len(self._name) + 1 :].partition(".")[0])
            age = time.time() - system.fstat(fd).st_mtime
            old = self.stale_after is not None and age > self.stale_after
            # Between making the file and locking its liveness byte an acquirer shows only its pid.
            if system.liveness_locked(fd) or (system.process_exists(pid) and not old):
                return False
            system.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        finally:
            system.close(fd)
        return True


class _IsLink(Exception):
    """The name is a symlink: to be resolved, then begun again."""


_owner_prefix = b""


def _new_owner() -> bytes:
    """A name for one hold that no other ever has."""
    global _owner_prefix
    if not _owner_prefix:
        _owner_prefix = os.urandom(8).hex().encode()
    return b"%b%x" % (_owner_prefix, gate.book.new_serial())


def _forget_prefix() -> None:
    global _owner_prefix
    _owner_prefix = b""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_prefix)
