"""`AtomicDir`: a directory is replaced as a whole, or not at all.

A writer builds the next version in a private sibling, under the exclusive lock `<dir>.lock`, and commits (`commit`).
A reader that opens several files by path may see some of the old version and some of the new one. `read` prevents that
with the shared lock, which keeps writers out. `snapshot` is a directory descriptor, which stays with its version.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from pathlib import Path

from .. import process, system
from ..errors import HoldfastError, NotLocked
from ..locks import base
from ..locks.lock import Lock
from ..paths import stat_of
from ..wait import in_thread
from . import copying
from .cleanup import GRACE_S, remove_unused, set_mode
from .commit import Site
from .snapshot import Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..locks.hold import Hold

    TimeoutOption = float | base.Default | None

# No other user can read a version that is being built. The sticky bit has no effect there. It shows whether the block
# has set a mode: without it, a block that asks for 0o700 could not be told from one that asks for nothing.
_MODE_WHILE_BUILT = stat.S_ISVTX | stat.S_IRWXU


class AtomicDir:
    """A directory that changes in one step.

    path: the directory. It need not exist yet. A symlink stands for its target.
    keep: how many previous versions a commit keeps, for `rollback`.
    timeout: how many seconds to wait for the lock. None waits for ever, 0 tries once.
    durable: a committed version survives a power failure.

    Raises ValueError for a wrong parameter. The methods raise Timeout, or Busy for the timeout 0, UnsafePath for a
    symlink of another user, and OSError.

        site = AtomicDir("site", keep=1)
        with site.replace() as new:
            (new / "index.html").write_text("hello")
    """

    def __init__(
        self, path: base.StrPath, *, keep: int = 0, timeout: float | None = None, durable: bool = True
    ) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
            raise ValueError(f"keep is a number of versions, 0 or more, not {keep!r}")
        text = os.fsdecode(path)
        if os.path.basename(text.rstrip(os.sep + (os.altsep or ""))) in ("", os.curdir, os.pardir):
            raise ValueError(f"{text!r} names no directory that can be replaced. Pass a path that ends in a name.")
        self.path = os.path.abspath(text)
        self.keep, self.durable = keep, durable
        self.timeout = base.check_timeout(timeout)

    def __repr__(self) -> str:
        return f"holdfast.AtomicDir({self.path!r})"

    def replace(self, timeout: TimeoutOption = base.DEFAULT) -> Block:
        """`with site.replace() as new`: fill the empty directory `new`. It replaces the old one at the end.

        If the block raises, `new` is removed. Raises Timeout for a busy lock, OSError if the commit is not possible.
        """
        return Block(self, timeout, "replace")

    def edit(self, timeout: TimeoutOption = base.DEFAULT) -> Block:
        """`with site.edit() as new`: the same as `replace`, but `new` begins as a copy of the directory."""
        return Block(self, timeout, "edit")

    def read(self, timeout: TimeoutOption = base.DEFAULT) -> Block:
        """`with site.read() as path`: no writer commits meanwhile. Raises FileNotFoundError without a version."""
        return Block(self, timeout, "read")

    def snapshot(self, timeout: TimeoutOption = base.DEFAULT) -> Snapshot:
        """`with site.snapshot() as snap`: the version of this moment, while writers go on."""
        return Snapshot(self, self._timeout_of(timeout))

    def recover(self, timeout: TimeoutOption = base.DEFAULT) -> None:
        """Finish an interrupted commit, and remove what dead writers left. The other methods do so where necessary."""
        site = self._site()
        with Lock(site.lock_file).acquire(self._timeout_of(timeout)):
            site.recover()

    async def arecover(self, timeout: TimeoutOption = base.DEFAULT) -> None:
        """`recover` for a task."""
        site = self._site()
        async with await Lock(site.lock_file).aacquire(self._timeout_of(timeout)):
            await in_thread(site.recover)

    @property
    def version(self) -> int:
        """The number of the current version; 0 if there is none. Every commit and every rollback raises it."""
        return self._site().version()

    def versions(self) -> list[int]:
        """The numbers of all versions, the current one last. `rollback` can bring the others back."""
        return self._site().versions()

    def rollback(self, to: int | None = None, timeout: TimeoutOption = base.DEFAULT) -> int:
        """Bring back the previous version, or number `to`. Returns its new number. The replaced version is kept."""
        site = self._site()
        with Lock(site.lock_file).acquire(self._timeout_of(timeout)) as hold:
            return site.rollback(to, hold)

    async def arollback(self, to: int | None = None, timeout: TimeoutOption = base.DEFAULT) -> int:
        """`rollback` for a task."""
        site = self._site()
        async with await Lock(site.lock_file).aacquire(self._timeout_of(timeout)) as hold:
            return await in_thread(partial(site.rollback, to, hold))

    @property
    def lock(self) -> Lock:
        """The lock that writers hold, for its `status()`. It is beside the target if the path is a symlink."""
        return Lock(self._site().lock_file)

    def _site(self) -> Site:
        return Site(self.path, self.keep, self.durable)

    def _timeout_of(self, timeout: TimeoutOption) -> float | None:
        return self.timeout if timeout is base.DEFAULT else base.check_timeout(timeout)


class Block:
    """The `with` block of replace, edit or read, under the lock of the directory. As `async with`, it uses a thread.

    A new version is committed when the block ends, and removed if the block raises.
    """

    def __init__(self, atomic: AtomicDir, timeout: TimeoutOption, method: str) -> None:
        self._atomic, self._timeout, self._method = atomic, atomic._timeout_of(timeout), method
        self._hold: Hold | None = None

    @property
    def hold(self) -> Hold:
        """The hold of the lock. Raises NotLocked outside the block."""
        if self._hold is None:
            usage = f"with site.{self._method}() as path: …"
            raise NotLocked(f"{self._atomic.path}: the lock is held only inside the block; use: {usage}")
        return self._hold

    def _lock(self) -> Lock:
        if self._hold is not None:
            text = f"this block is entered already. Call {self._method}() again for another one."
            raise HoldfastError(f"{self._atomic.path}: {text}")
        self._site = self._atomic._site()
        return Lock(self._site.lock_file, shared=self._method == "read")

    def acquire(self) -> Hold:
        """Wait for the lock: the first half of entering the block. `enter` is the other half."""
        return self._lock().acquire(self._timeout)

    def enter(self, hold: Hold) -> Path | None:
        """Make the new version, or find the directory. None: a reader has to recover first, and enter again."""
        site = self._site
        try:
            if self._method != "read":
                path = self._begin(site)
            elif site.is_interrupted():
                return None
            elif stat_of(site.path):
                path = site.path
            else:
                raise FileNotFoundError(errno.ENOENT, "there is no version of this directory yet", site.path)
            self._hold = hold
            return Path(path)
        finally:
            if self._hold is None:
                hold.release()

    def _begin(self, site: Site) -> str:
        """Make the new version, and copy the old one into it for an edit. Returns its path."""
        site.recover(GRACE_S)
        self._new = new = site.random_path("new")
        site.check(new)
        try:
            system.mkdir(new)
            old = stat_of(site.path)
            self._like = old or system.stat(new)
            set_mode(new, _MODE_WHILE_BUILT)
            if old and self._method == "edit":
                copying.Copier().copy(site.path, new)
            elif old:
                copying.copy_acls(site.path, new)
            set_mode(new, _MODE_WHILE_BUILT)  # an access control list has changed it
            self._made = system.stat(new, follow_symlinks=False)
        except BaseException:
            remove_unused(new)
            raise
        return new

    def _leave(self, error: BaseException | None) -> None:
        hold, self._hold = self.hold, None
        if hold._registry is not process.registry:
            return  # a forked child leaves the block of its parent, whose lock and new version it does not own
        try:
            if self._method == "read":
                pass
            elif error is not None:
                remove_unused(self._new)
            else:
                self._commit(hold)
        finally:
            if not hold.released:
                hold.__exit__(None, error, None)

    def _commit(self, hold: Hold) -> None:
        try:
            self._set_owner_and_mode()
            self._site.commit(self._new, hold)
        except BaseException:
            self._site.abandon(self._new)
            raise

    def _set_owner_and_mode(self) -> None:
        """Give the new version the owner and the mode of the old one, unless the block has set others."""
        now, made, like = stat_of(self._new), self._made, self._like
        mode = stat.S_IMODE(like.st_mode)
        if now is None or not stat.S_ISDIR(now.st_mode):
            text = f"the new version is no directory any more; {self._site.path} was left as it was"
            raise NotADirectoryError(errno.ENOTDIR, text, self._new)
        if (now.st_uid, now.st_gid) == (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
            mode = copying.give_owner(self._new, like)
        if now.st_mode == made.st_mode:
            set_mode(self._new, mode)

    def __enter__(self) -> Path:
        while (path := self.enter(self.acquire())) is None:
            self._atomic.recover(self._timeout)
        return path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    async def __aenter__(self) -> Path:
        while True:
            hold = await self._lock().aacquire(self._timeout)
            try:
                path = await in_thread(partial(self.enter, hold))
            except BaseException as error:
                if self._hold is hold:  # the task was cancelled while the thread entered the block
                    await in_thread(partial(self._leave, error))
                raise
            if path is not None:
                return path
            await self._atomic.arecover(self._timeout)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await in_thread(partial(self._leave, error))
