"""`LockFile`: held while the file exists. The file survives its process, so a crash leaves a stale file behind.

The file has the `sema` format (`record`) and is complete from the moment it appears (`publish`). Two bytes far past its
content (docs/formats.md) carry kernel locks:

* the *liveness byte*: the holder's process keeps it locked as long as it lives. If the byte is free, the holder is
  dead. Files of other tools, and of commands that have exited, have no such lock
* the *removal byte*: a process locks it before it removes the file: the holder, a process that found the file stale,
  `break_`, `clean` (`removal`)

The holder also has the kernel lock of its file, so that flock(1) on the same path waits for it. `Lock` refuses such a
file.

A hold can be lost: a user may break the lock of a stopped process. `check`, the heartbeat and `release` compare the
file that the path names with the published one, and never remove another file.

Not promised: that tools which unlink without these rules leave our files alone. `check` finds that out.
"""

from __future__ import annotations

import errno
import os
from time import monotonic

from .. import owner, system
from ..errors import NotALockFile, NotLocked, NotOwner
from ..wait import DeadlinePassed, drive
from . import base, record
from .engine import Outcome
from .file_engine import FileEngine, is_stale
from .file_hold import FileHold, RenewedHold
from .file_waiter import FileWaiter
from .removal import NotPermitted, remove_private_files
from .staleness import POLICIES, Judgement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from .record import Record
    from .staleness import Policy

_MAX_HEARTBEAT_S = 1e9  # a thread cannot wait much longer


class LockFile(base.BaseLock[FileHold]):
    """A lock file of the `sema` protocol, shared with its other implementations.

    path: the lock file. Its directory must exist
    tag: a text about the holder, for people
    stale_after: seconds after which a lock is old; None: never
    stale: "proof" replaces a holder that is proved dead at once, never replaces one that is proved alive, and goes by
        age where neither can be proved; "old" goes by age alone; "dead-and-old" requires an old lock and a pid that
        does not exist
    retry: seconds between attempts where the file system reports no events
    durable: the lock survives a power failure (fsync of the file and of its directory)
    heartbeat: seconds between two renewals of the timestamp; None: it is not renewed
    on_lost: called with the hold, in a thread, when a heartbeat finds that the lock was taken away
    fence: keep the last token in `<path>.fence`, so that tokens grow even if the clock is set back
    timeout: seconds that `acquire` and `with` wait; None: for ever; 0: one attempt
    fair: waiters are served in order of arrival; False: in any order
    mode: permissions of the file
    exact_mode: give the file all of `mode`, whatever the umask
    follow: follow a symlink at the end of the path; False: refuse it with UnsafePath
    format: "sema"; or "filelock", which `SoftFileLock` of the package filelock reads and writes. That one has no tag,
        no token and no timestamp, so it goes without `tag`, `fence` and `heartbeat`, and `hold.token` is None

    Raises ValueError or TypeError for a wrong parameter, UnsafePath for a path with a component '..'. Acquiring raises
    Timeout, or Busy for the timeout 0, WouldDeadlock if this thread or task holds the lock already, NotALockFile if
    the path names another file, and OSError.

        with holdfast.LockFile("/var/lock/deploy.lock", tag="v1.2.3", timeout=60) as hold:
            deploy()
    """

    __slots__ = (
        *("_hold_type", "durable", "exact_mode", "fair", "fence", "follow", "format"),
        *("heartbeat", "mode", "on_lost", "path", "retry", "stale", "stale_after", "tag"),
    )

    _options: tuple[str, ...] = ("tag", "stale_after", "stale", "timeout", "retry", "durable")
    _options += ("heartbeat", "on_lost", "fence", "fair", "mode", "exact_mode", "follow", "format")

    _engine: FileEngine
    _format = record.SEMA

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
        exact_mode: bool = False,
        follow: bool = True,
        format: Literal["sema", "filelock"] = "sema",
    ) -> None:
        _check_staleness(stale, stale_after, retry)
        if heartbeat is not None and (not isinstance(heartbeat, int | float) or not 0 < heartbeat < _MAX_HEARTBEAT_S):
            raise ValueError(f"heartbeat is seconds, more than 0, or None for none; not {heartbeat!r}")
        if on_lost is not None and heartbeat is None:
            raise ValueError("on_lost is called by the heartbeat: pass heartbeat=seconds, too")
        if format not in ("sema", "filelock"):
            raise ValueError(f"format is sema or filelock, not {format!r}")
        if format == "filelock" and (tag is not None or fence or heartbeat is not None):
            raise ValueError("the format of filelock has no tag, token and timestamp: leave out tag, fence, heartbeat")
        self.tag = record.check_tag(tag)
        self.stale_after = stale_after
        self.stale = stale
        self.retry = retry
        self.durable = durable
        self.heartbeat = heartbeat
        self.on_lost = on_lost
        self.fence = fence
        self.mode = base.check_mode(mode)
        self.exact_mode = exact_mode
        self.follow = follow
        self.format = format
        engine = FileEngine(
            path,
            self._content_format().writer(self.tag),
            stale=stale,
            stale_after=stale_after,
            retry=retry,
            durable=durable,
            fence=fence,
            fair=fair,
            mode=mode,
            exact_mode=exact_mode,
            follow=follow,
        )
        base.BaseLock.__init__(self, engine, timeout)
        self._hold_type = FileHold if heartbeat is None else RenewedHold
        self.path = engine.name
        self.fair = engine.fair

    def _content_format(self) -> record.Format:
        if self.format == "sema":
            return self._format
        from .plain_record import PLAIN

        return PLAIN

    def acquire_as_owner(self, pid: int, timeout: float | base.Default | None = base.DEFAULT) -> Record:
        """Acquire in the name of another process, for a command that ends before its caller does.

        Nothing in this process holds the lock afterwards. `release_as_owner(pid)` releases it. It is stale when that
        process has ended, or when it is old. Raises Timeout or Busy as `acquire` does.
        """
        if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**32:
            raise ValueError(f"a pid is a number from 1 on, not {pid!r}")
        if self.format != "sema":
            raise ValueError("only a lock file of the sema format can be acquired for another process")
        another = LockFile(self.path, **{name: getattr(self, name) for name in self._options})
        another._engine.writer = writer = record.WriterFor(pid, self.tag)
        if writer.start is None and not system.process_exists(pid):
            raise ValueError(f"there is no process {pid} for which a lock could be acquired")
        hold = another.acquire(timeout)
        if writer.start is not None and owner.start_of(pid) != writer.start:
            hold.release()
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended before its lock was free", self.path)
        hold.leave_standing()
        return record.parse(hold._grant.content)._replace(token=hold.token)

    def wait_until_free(self, timeout: float | base.Default | None = base.DEFAULT) -> None:
        """Wait until the lock is free or stale. Does not acquire it. Raises Timeout, or Busy for 0."""
        timeout = self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        try:
            drive(FileWaiter(self._engine, deadline).until_free())
        except DeadlinePassed:
            raise self._timed_out(timeout or 0) from None

    def examine(self) -> Judgement | None:
        """Return the facts about the holder; None if the lock is free."""
        return self._engine.examine()

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
                f"{self.path}: held by {found}, not by pid {pid}. Use force to release it anyway.",
                path=self.path,
            )

        self._release_or_break(is_ours, is_break=force)

    def _release_or_break(self, wanted: Callable[[Judgement], bool], *, is_break: bool = True) -> Record | None:
        try:
            found = self._engine.remove_existing(wanted, is_break=is_break)
        except NotPermitted as error:
            raise PermissionError(error.errno, error.strerror, self.path) from None
        if found is None:
            raise NotLocked(f"{self.path}: there is no lock file, so the lock is free.", path=self.path)
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
            cleaned = bool(self._engine.remove_existing(is_stale))
        except PermissionError:
            cleaned = False  # another user's
        return self.clean_private_files() or cleaned

    def clean_private_files(self) -> bool:
        """Remove only the private files that dead processes left. True: there was one."""
        entry = self._engine.open_entry()
        try:
            return remove_private_files(entry, self.stale_after)
        finally:
            entry.close()


def _check_staleness(stale: Policy, stale_after: float | None, retry: float) -> None:
    if stale not in POLICIES:
        raise ValueError(f"stale is one of {', '.join(POLICIES)}, not {stale!r}")
    if stale_after is not None and (not isinstance(stale_after, int | float) or not stale_after >= 0):
        raise ValueError(f"stale_after is seconds, or None for never; not {stale_after!r}")
    if not isinstance(retry, int | float) or not retry > 0:
        raise ValueError(f"retry is seconds, more than 0; not {retry!r}")
