"""How a new version takes the place of the directory, and how a crash is repaired.

Beside the directory `site`, never in it:

    site.lock              the lock: writers exclusively, readers shared. Every step below needs the exclusive lock
    site.versions          the state file (`State` as JSON): the numbers of the versions, and the last planned commit
    site.old-<number>      an earlier version that is kept
    site.new-<16 hex>      a version that is being built. After an exchange, for a moment, the replaced version
    site.gone-<16 hex>     a replaced version that is not kept. It is removed after a grace, when no snapshot uses it

A commit makes three steps. With `durable`, step 1 is on disk before step 2 begins, step 3 before the call returns:

    1. plan      write the state file: the sibling `new` becomes the directory, the directory becomes `replaced`
    2. swap      exchange the names of `new` and the directory (renameat2), so that the directory never vanishes.
                 Where the system cannot: rename the directory to `replaced`, then `new` to the directory
    3. rename    after an exchange, the replaced version has the name `new`: rename it to `replaced`

Then `prune` renames versions beyond `keep` to `gone`, and takes their numbers off the state file. A rollback is a
commit whose `new` is `site.old-<number>`. After a crash, the next process with the lock carries out the plan:

    crash after     site           new            replaced       what is left to do
    plan            old version    new version                   swap, rename
    exchange        new version    old version                   rename. The plan has the inode of the new version
    first rename                   new version    old version    rename `new` to the directory
    last step       new version                   old version    nothing: `new` does not exist, so the commit is done

A power failure may undo steps that are not on disk, which leaves an earlier line of the table. Without the name `new`,
the old version stays, and a number is skipped. If a step fails while the writer lives, the writer goes back. After the
swap, readers may have seen the new version: it stays, and the error means that it may not survive a power failure.

A directory that another program makes between the two renames is removed if it is empty, else renamed to a free `old`
name. A user's `site.old-3` is left alone: the state file does not list it, and its number is skipped. If the state file
is lost, numbers begin at 1, and earlier versions are left alone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import suppress
from time import time
from typing import NamedTuple

from .. import files, system
from ..paths import follow_links, is_trusted, mounts_in, stat_of
from .cleanup import GRACE_S, log_left, remove_later, remove_unused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..locks.hold import Hold

_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_SIBLING = re.compile(r"(?:(?:new|gone)-[0-9a-f]{16}|old-[1-9][0-9]*)?")
_LEFTOVER = re.compile(r"\.(?:(new|gone)-[0-9a-f]{16}|versions\.[0-9a-f]{16}\.tmp)")
_IS_FILE = "this is not a directory. It was left untouched. Check the path"
_IS_MOUNT = "a mount point cannot be replaced; use a directory in it"
_IS_LOWER_LAYER = "a lower layer of an overlay (an image) cannot be renamed. Copy it once, or put it on a volume"
_NO_STATE = "this is not a state file of Holdfast. Find out what it is, and move it away"


class State(NamedTuple):
    """The content of the state file. The defaults describe a directory that Holdfast has not changed yet."""

    version: int = 0  # the number of the directory itself, once the planned commit is done
    old: tuple[int, ...] = ()  # the earlier versions that Holdfast keeps, as `<dir>.old-<number>`
    new: str = ""  # the sibling that becomes the directory: `new-<16 hex>` or `old-<number>`
    inode: int = 0  # its inode number
    replaced: str = ""  # the sibling that the directory becomes: `old-<number>`, or `gone-<16 hex>` if it is not kept


class Site:
    """The directory, where it really is, and its siblings. Methods that change something need the exclusive lock."""

    def __init__(self, path: str, keep: int, durable: bool) -> None:
        self.path = follow_links(path)  # the target of a symlink is replaced. It need not exist yet
        self.parent = os.path.dirname(self.path)
        self.keep, self.durable = keep, durable
        self.check()

    @property
    def lock_file(self) -> str:
        return follow_links(self.path + ".lock")

    def random_path(self, kind: str) -> str:
        return self._path(f"{kind}-{os.urandom(8).hex()}")

    def _path(self, sibling: str) -> str:
        return f"{self.path}.{sibling}"

    def _stat(self, sibling: str) -> os.stat_result | None:
        """The status of a sibling. None if it does not exist, or if another user made it where others can write."""
        st = stat_of(self._path(sibling))
        return st if st and self._trusts(st) else None

    def _trusts(self, st: os.stat_result) -> bool:
        """The owner of the directory is trusted, too: root changes the owner of new versions to that user."""
        if is_trusted(st, system.stat(self.parent)):
            return True
        here = stat_of(self.path)
        return here is not None and here.st_uid == st.st_uid

    def check(self, new: str = "") -> None:
        """Raise OSError if the directory cannot be replaced. With `new`, also if there are mounts in one of the two."""
        st, above = stat_of(self.path), stat_of(self.parent)
        if above is None:
            raise FileNotFoundError(errno.ENOENT, "the directory above it does not exist; make it first", self.path)
        if st and not stat.S_ISDIR(st.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, _IS_FILE, self.path)
        if st and (self.path == self.parent or st.st_dev != above.st_dev):
            raise OSError(errno.EXDEV, _IS_MOUNT, self.path)
        for where in mounts_in(self.path, new) if new else ():
            if where == self.path:
                raise OSError(errno.EXDEV, _IS_MOUNT, self.path)
            text = f"{where} is mounted in it, and would go with the old version; unmount it, or mount it elsewhere"
            raise OSError(errno.EBUSY, text, self.path)

    # The state. Readers of the numbers have no lock.

    def version(self, now: State | None = None) -> int:
        """The number of the directory; 0 if it does not exist."""
        now = now or self._read()
        return max(1, now.version - self.is_interrupted(now)) if stat_of(self.path) else 0

    def versions(self) -> list[int]:
        """The numbers of the earlier versions and of the directory, in this order."""
        now = self._read()
        current = self.version(now)
        return [number for number in self._old(now) if not current or number < current] + [current] * (current > 0)

    def is_interrupted(self, plan: State | None = None) -> bool:
        """Is a commit planned and not done? Under the shared lock, the process that planned it is dead."""
        plan = plan or self._read()
        return bool(plan.new) and self._stat(plan.new) is not None and not self._is_in_place(plan)

    def _is_in_place(self, plan: State) -> bool:
        st = stat_of(self.path)
        return st is not None and st.st_ino == plan.inode

    def _old(self, now: State) -> list[int]:
        """The earlier versions that exist. A directory with a number that is not listed is the user's."""
        return [number for number in now.old if (st := self._stat(f"old-{number}")) and stat.S_ISDIR(st.st_mode)]

    def _free_number(self, number: int) -> int:
        """The next number whose name is not taken."""
        while stat_of(self._path(f"old-{number}")):
            number += 1
        return number

    def _read(self) -> State:
        """Return the content of the state file. Raises OSError if another user or another program made it."""
        path = self._path("versions")
        try:
            file = files.OwnedFd(system.open_fd(path, system.O_READ))
        except FileNotFoundError:
            return State()
        with file:
            st = system.fstat(file.fd)
            if not self._trusts(st):
                text = f"user {st.st_uid} made this file, so it was not obeyed. Find out why, and remove it"
                raise PermissionError(errno.EPERM, text, path)
            content = files.read_open(file.fd) if stat.S_ISREG(st.st_mode) else b""
        with suppress(ValueError, TypeError):
            state = State(**json.loads(content))
            state = state._replace(old=tuple(state.old))
            numbers = (state.version, state.inode, *state.old)
            valid = all(type(number) is int and number >= 0 for number in numbers)
            if valid and _SIBLING.fullmatch(state.new) and _SIBLING.fullmatch(state.replaced):
                return state
        raise OSError(errno.EINVAL, _NO_STATE, path)

    def _write(self, now: State) -> None:
        """Replace the state file. Root gives it to the owner of the directory, who may replace it later."""
        path, st = self._path("versions"), stat_of(self.path)
        private = files.private_name(path)
        owner = (st.st_uid, st.st_gid) if st and hasattr(os, "geteuid") and os.geteuid() == 0 != st.st_uid else None
        content = json.dumps({name: value for name, value in now._asdict().items() if value})
        files.create_file(private, content.encode() + b"\n", 0o644, sync=self.durable, owner=owner)
        try:
            # ext4 begins to write a file that replaces another by a rename: 0.2 to 1.7 ms instead of 0.08 ms.
            system.exchange(private, path, None)
        except OSError:  # the system cannot, or this is the first state file
            system.rename(private, path)
        finally:
            files.remove(private)
        self._sync_parent()

    def _sync_parent(self) -> None:
        if self.durable:
            files.sync_directory(self.parent)

    # Commit.

    def commit(self, new: str, hold: Hold) -> None:
        """Put the directory `new` in the place of this one."""
        if self.durable:
            _sync_tree(new)
        self._prune(self._commit(new, self._read(), self.keep > 0, hold))

    def rollback(self, to: int | None, hold: Hold) -> int:
        """Put an earlier version in the place of the directory. Returns its new number."""
        self.recover(GRACE_S)
        now = self._read()
        old = self._old(now)
        to = old[-1] if to is None and old else to
        if to is None or to not in old:
            which, kept = "" if to is None else f" {to}", ", ".join(map(str, old)) or "none"
            text = f"there is no earlier version{which} to go back to (kept: {kept}). Commit with keep=1 (--keep 1)"
            raise FileNotFoundError(errno.ENOENT, text, self.path)
        plan = self._commit(self._path(f"old-{to}"), now, True, hold)
        self._end_rollback(plan)
        return plan.version

    def _end_rollback(self, plan: State) -> None:
        """Take the plan off the state file: the user may make a directory with the old name of this version."""
        self._sync_parent()
        self._write(State(plan.version, plan.old))

    def _commit(self, new: str, before: State, keeps: bool, hold: Hold) -> State:
        """Steps 1 to 3. Returns the plan."""
        number, replaced = before.version, self.random_path("gone")
        old = [number for number in self._old(before) if self._path(f"old-{number}") != new]
        if stat_of(self.path):
            number = self._free_number(max(1, number))
            if keeps:
                replaced = self._path(f"old-{number}")
                old.append(number)
        start = len(self.path) + 1
        inode = system.stat(new, follow_symlinks=False).st_ino
        plan = State(number + 1, tuple(old), new[start:], inode, replaced[start:])
        hold.check()
        self.check(new)
        try:
            self._write(plan)
            self._carry_out(plan)
        except BaseException:
            if self._is_in_place(plan):
                self._carry_out(plan)
            else:
                self._go_back(plan, before)
            raise
        return plan

    def _carry_out(self, plan: State) -> None:
        """Steps 2 and 3, as far as they are not done."""
        new, replaced = self._path(plan.new), self._path(plan.replaced)
        if not self._is_in_place(plan):
            if stat_of(self.path) and stat_of(replaced):  # made between the two renames
                try:
                    system.rmdir(self.path)
                except OSError:
                    system.rename(self.path, self._path(f"old-{self._free_number(plan.version)}"))
            if stat_of(self.path):
                try:
                    system.exchange(new, self.path, None)
                except OSError as error:
                    if error.errno == errno.EXDEV:
                        raise OSError(errno.EXDEV, _IS_LOWER_LAYER, self.path) from None
                    if error.errno not in _NO_EXCHANGE:
                        raise
                    system.rename(self.path, replaced)
            if not stat_of(self.path):
                system.rename(new, self.path)
        if stat_of(new):
            system.rename(new, replaced)
        self._sync_parent()

    def _go_back(self, plan: State, before: State) -> None:
        """A commit that failed must not happen later, when another process reads the plan."""
        with suppress(OSError):  # the plan stays, and the next process carries it out
            if not stat_of(self.path) and stat_of(replaced := self._path(plan.replaced)):
                system.rename(replaced, self.path)
            self._write(before)

    # After a commit, and after a crash.

    def abandon(self, new: str) -> None:
        """Remove a version that was not committed, unless the plan still needs it."""
        if self._path(self._read().new) != new:
            remove_unused(new)

    def _prune(self, now: State) -> None:
        """Give up the versions beyond `keep`. They get another name first, because a removal may be interrupted."""
        beyond = max(0, len(now.old) - self.keep)
        try:
            for number in now.old[:beyond]:
                gone = self.random_path("gone")
                system.rename(self._path(f"old-{number}"), gone)
                remove_later(gone)
            if beyond:
                self._write(now._replace(old=now.old[beyond:]))
        except OSError as error:  # the commit has happened all the same
            log_left(self.path, error)
        if now.replaced.startswith("gone-") and self._stat(now.replaced):
            remove_later(self._path(now.replaced))

    def recover(self, grace: float = 0.0) -> None:
        """Carry out the last plan. Remove what dead writers left, except versions that were replaced just now."""
        plan = self._read()
        if plan.new and self._stat(plan.new):
            self._carry_out(plan)
        if plan.new.startswith("old-"):
            self._end_rollback(plan)
        name = os.path.basename(self.path)
        for entry in system.listdir(self.parent):
            found = _LEFTOVER.fullmatch(entry, len(name)) if entry.startswith(name) else None
            st = self._stat(entry[len(name) + 1 :]) if found else None
            if found and st and not (found[1] == "gone" and 0 <= time() - st.st_ctime < grace):
                remove_unused(os.path.join(self.parent, entry))


def _sync_tree(directory: str) -> None:
    """Wait until everything in a directory is on disk: its files, and the directories that name them."""
    folders = [directory]
    try:
        for folder in folders:
            with system.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        _sync_file(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
            files.sync_directory(folder)
    except PermissionError:  # the owner may not read one of them
        with files.OwnedFd(system.open_fd(os.path.dirname(directory), system.O_READ)) as parent:
            system.sync_file_system(parent.fd)


def _sync_file(path: str) -> None:
    if system.HAS_FOLDERS:
        with files.OwnedFd(system.open_fd(path, system.O_READ)) as file:
            system.fsync(file.fd)
        return
    mode = system.stat(path, follow_symlinks=False).st_mode  # Windows syncs only a file that is open for writing
    system.chmod(path, mode | stat.S_IWRITE)
    try:
        with files.OwnedFd(system.open_fd(path, system.O_EXISTING)) as file:
            system.fsync(file.fd)
    finally:
        system.chmod(path, mode)
