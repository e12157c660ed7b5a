"""`Snapshot`: one version of a directory, for readers that do not want to keep writers out.

It is a descriptor of the version's own directory, with a shared lock on it. Whoever would remove an old version needs
that lock exclusively, so this one stays whole and stays itself, whatever name it has by now. Who locks it may come too
late: it counts only if it is still the current one afterwards (docs/concepts.md has the timeline).

The last one to close a version that was replaced meanwhile removes it, if it may; else the next writer does. A process
that dies leaves nothing but that. A forked child has no snapshot: it opens its own. Where directories cannot be locked
(NFS, SMB) there are none: `Unsupported`.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

from .. import system, wait
from ..errors import Busy, HoldfastError, NotLocked, Timeout, Unsupported
from ..files import OwnedFd, inode_of, named, try_lock
from ..locks.lock import Lock
from ..offload import in_thread
from ..paths import mount_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .commit import Site


class Snapshot:
    """One version, for as long as this is open. `fd` is for `dir_fd=`; `path` is where the system has paths for it."""

    def __init__(
        self, path: str, timeout: float | None, site: Callable[[], Site], read: Callable[[float | None], Any]
    ) -> None:
        """`read` gives the block in which nobody commits: for waiting until there is a version."""
        self._named, self._timeout = path, timeout
        self._site, self._read = site, read
        self._folder: OwnedFd | None = None
        self.version = 0  # its number, once it is open

    @property
    def fd(self) -> int:
        if self._folder is None or not self._folder.is_open:
            raise NotLocked(f"{self._named}: this snapshot is not open here; use: with site.snapshot() as snap: …")
        return self._folder.fd

    @property
    def path(self) -> Path:
        """A path to this version, whatever its name is by now. It is good in this process only."""
        return Path(f"/proc/self/fd/{self.fd}")

    def fileno(self) -> int:
        return self.fd

    def __enter__(self) -> Snapshot:
        deadline = self._deadline()
        while not self._open():
            if self._locked_out:
                wait.drive(self._pause(deadline))
            else:
                with self._read(_left(deadline)):  # until it is there; raises if it is not
                    pass
        return self

    async def __aenter__(self) -> Snapshot:
        deadline = self._deadline()
        try:
            while not await in_thread(self._open):
                if self._locked_out:
                    await wait.adrive(self._pause(deadline))
                else:
                    async with self._read(_left(deadline)):
                        pass
        except BaseException:
            await in_thread(self.close)  # opened, and cancelled meanwhile
            raise
        return self

    def _deadline(self) -> float | None:
        self._backoff = wait.Backoff()
        return None if self._timeout is None else monotonic() + self._timeout

    def _pause(self, deadline: float | None) -> wait.Steps[None]:
        """For as long as another program has an exclusive lock on the directory itself."""
        path, timeout = self._named, self._timeout
        if timeout == 0:
            raise Busy(f"{path}: another program has an exclusive lock on the directory itself", path=path)
        if deadline is not None and monotonic() >= deadline:
            text = f"{path}: for {timeout:g} s another program has had an exclusive lock on the directory itself"
            raise Timeout(text, path=path)
        yield self._backoff.pause(deadline)

    def _open(self) -> bool:
        """False: there is none at this moment, perhaps because one is being put in the place of another."""
        place = self._site()
        mount = mount_at(os.stat(place.parent).st_dev, place.parent)
        if mount.ranged or mount.refusal:
            raise Unsupported(
                f"{place.path}: no snapshot on {mount.where} ({mount.kind}), where directories cannot be locked. "
                "Use read().",
                path=place.path,
            )
        self._locked_out = False
        while not self._locked_out:
            try:
                folder = OwnedFd(system.open_fd(place.path, system.O_SYNCABLE_FOLDER))
            except FileNotFoundError:
                return False
            # Whoever removes an old version has an exclusive lock on it. If it is still the current one afterwards, it
            # was not old when we locked it.
            locked = try_lock(folder.fd, system.SH_NB)
            version = place.version()
            current = _names(place.path, folder)
            if locked and current:
                self._folder, self.version = folder, version
                return True
            self._locked_out = current
            folder.close()
        return False

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is None or not folder.is_open:  # in a forked child, the snapshot is its parent's
            return
        with folder:
            current = _names(self._named, folder)  # not unlocked: a program that was given a copy has it, too
        if not current:
            self._tidy()

    def _tidy(self) -> None:
        """What we used may be there on our account only. One who may not remove it leaves it to the next writer."""
        try:
            place = self._site()
            hold = Lock(place.lock_file).try_acquire()
            if hold is not None:  # else a writer is at it, and sees to it
                with hold:
                    place.remove_gone()
        except (OSError, HoldfastError):
            pass

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await in_thread(self.close)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())


def _names(path: str, folder: OwnedFd) -> bool:
    st = system.fstat(folder.fd)
    return named(path, inode_of(st)) is not None
