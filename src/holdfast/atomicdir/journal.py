"""The commit file, `<dir>.commit`: it says what is to happen, and is durable before anything does.

For where two directories cannot exchange their names in one step: the old is renamed away, the new is renamed in, the
commit file is removed. Whoever comes after a crash goes on from there. A rollback has one in any case: after an
exchange the two names are not yet those that they should be, and nothing else would tell.

It appears whole, by a rename. What fails while its writer lives is called off, so that it does not happen later; what a
crash interrupts is finished by the next one, however often that is interrupted in turn. It is JSON: `new` and `old` are
names of siblings, `inode` is that of the new version. One that another user made in a sticky or world-writable
directory is not obeyed.
"""

from __future__ import annotations

import errno
import json
import os
import re

from .. import system
from ..files import OwnedFd
from .layout import NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .layout import Siblings

_NOT_HERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_NOT_OURS = "this is no commit file of ours; find out what it is, and remove it"


def exchange(one: str, other: str) -> bool:
    """Let two directories exchange their names in one step. False: that cannot be done here."""
    try:
        system.exchange(one, other, None)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return False
    return True


class CommitFile:
    """The commit file of one directory. Whatever uses it needs the exclusive lock."""

    def __init__(self, place: Siblings) -> None:
        self._place = place
        self.path = place.path + ".commit"

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def commit(self, new: str, old: str) -> None:
        inode = os.lstat(new).st_ino
        self._write({"new": os.path.basename(new), "old": os.path.basename(old), "inode": inode})
        try:
            self.roll_forward()
        except OSError:
            self._call_off(new, old, inode)
            raise

    def _write(self, plan: dict[str, str | int]) -> None:
        private = self.path + ".tmp"
        with OwnedFd(system.open_fd(private, system.O_NEW, 0o600)) as file:
            try:
                system.write(file.fd, json.dumps(plan).encode() + b"\n")
                if self._place.durable:
                    system.fsync(file.fd)
            except BaseException:
                system.unlink(private)
                raise
        system.rename(private, self.path)
        self._place.sync_parent_or(lambda: system.unlink(self.path))

    def _read(self) -> tuple[str, str, int] | None:
        """What it says: what is to become the directory, where the one that is there goes, and an inode."""
        try:
            file = OwnedFd(system.open_fd(self.path, system.O_READ))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.EINVAL, _NOT_OURS, self.path) from None
            raise
        with file, open(file.fd, encoding="utf-8", closefd=False) as reader:
            st = system.fstat(file.fd)
            if not self._place.trusts(st):
                text = f"user {st.st_uid} made this commit file, so it was not obeyed; find out why, and remove it"
                raise PermissionError(errno.EPERM, text, self.path)
            try:
                said = json.load(reader)
                new, old, inode = said["new"], said["old"], said.get("inode", 0)
            except (ValueError, KeyError, TypeError, AttributeError):
                new = old = inode = None
        # It appears whole, so one that cannot be understood is not ours. Names lead nowhere but to our siblings.
        shape = re.escape(self._place.name) + rf"\.(?:new-[0-9a-f]{{16}}|old-{NUMBER})"
        for name in (new, old):
            if not isinstance(name, str) or not re.fullmatch(shape, name):
                raise OSError(errno.EINVAL, _NOT_OURS, self.path)
        return os.path.join(self._place.parent, new), os.path.join(self._place.parent, old), inode

    def roll_forward(self) -> None:
        """Do what it says, as far as it is not done yet. However often, and however often interrupted."""
        plan = self._read()
        if plan is None:
            return
        self._carry_out(*plan)
        old = re.search(rf"\.old-({NUMBER})$", plan[1])
        if old is not None and os.path.lexists(plan[1]):
            self._place.give_number(plan[1], int(old[1]))  # whatever a power failure has left of that
        self._place.sync_parent()
        system.unlink(self.path)
        self._place.sync_parent()

    def _carry_out(self, new: str, old: str, inode: int) -> None:
        if not self._place.has(os.path.basename(new)):
            return  # done
        if self._is_there(inode):
            self._place.rename(new, old)  # the writer exchanged the names, then crashed
            return
        if os.path.lexists(self._place.path) and os.path.lexists(old):
            self._move_aside()  # it had been moved away already: somebody has made one since (mkdir -p)
        elif os.path.lexists(self._place.path):
            if exchange(new, self._place.path):
                self._place.sync_parent()
                self._place.rename(new, old)
                return
            self._place.rename(self._place.path, old)
        system.rename(new, self._place.path)

    def _is_there(self, inode: int) -> bool:
        return os.path.lexists(self._place.path) and os.lstat(self._place.path).st_ino == inode

    def _move_aside(self) -> None:
        """Keep what somebody put in the way as a version of its own, unless nothing is in it."""
        try:
            system.rmdir(self._place.path)
        except OSError:
            self._place.rename(self._place.path, self._place.old_name(self._place.number_current()))

    def _call_off(self, new: str, old: str, inode: int) -> None:
        """What failed now must not happen some time later, when somebody finds the commit file."""
        try:
            if not os.path.lexists(new):
                return  # only what comes after it failed
            if self._is_there(inode):
                system.exchange(new, self._place.path, None)
            elif not os.path.lexists(self._place.path):
                system.rename(old, self._place.path)
            system.unlink(self.path)
            self._place.sync_parent()
        except OSError:
            pass  # then it stays, and the next one finishes it
