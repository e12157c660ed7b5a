"""`Snapshot`: one version of a directory, for readers that do not keep writers out.

A snapshot is a descriptor of the version's directory, with a shared lock on it. A process that removes an old version
needs that lock exclusively, so the version stays whole, whatever name it has by now. A reader may lock a version that
was just replaced. So the lock counts only if the version is still the current one afterwards (docs/concepts.md).

The last reader of a replaced version removes it, if it may; else the next writer does. A forked child has no snapshot:
it opens its own. Where directories cannot be locked (NFS, SMB), `snapshot` raises `Unsupported`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .. import system
from ..errors import Busy, HoldfastError, NotLocked, Unsupported
from ..files import OwnedFd, inode_of, named, try_lock
from ..paths import mount_at
from ..wait import in_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .directory import AtomicDir


class Snapshot:
    """One version, while this is open. `fd` is for `dir_fd=`. `version` is its number."""

    def __init__(self, atomic: AtomicDir, timeout: float | None) -> None:
        self._atomic, self._timeout = atomic, timeout
        self._folder: OwnedFd | None = None
        self.version = 0

    @property
    def fd(self) -> int:
        """The descriptor. Raises NotLocked if the snapshot is not open."""
        if self._folder is None or not self._folder.is_open:
            path = self._atomic.path
            raise NotLocked(f"{path}: this snapshot is not open here; use: with site.snapshot() as snap: …")
        return self._folder.fd

    @property
    def path(self) -> Path:
        """A path to this version, whatever its name is by now. It is valid in this process only."""
        return Path(f"/proc/self/fd/{self.fd}")

    def fileno(self) -> int:
        return self.fd

    def __enter__(self) -> Snapshot:
        try:
            self._open()
        except FileNotFoundError:
            with self._atomic.read(self._timeout):  # waits for a writer, and raises if there is no version
                self._open()
        return self

    async def __aenter__(self) -> Snapshot:
        try:
            try:
                await in_thread(self._open)
            except FileNotFoundError:
                async with self._atomic.read(self._timeout):
                    await in_thread(self._open)
        except BaseException:
            await in_thread(self.close)  # the task was cancelled after the thread had opened it
            raise
        return self

    def _open(self) -> None:
        """Open and lock the current version. FileNotFoundError: none exists, or a writer is between two renames."""
        site = self._atomic._site()
        mount = mount_at(system.stat(site.parent).st_dev, site.parent)
        if mount.ranged or mount.refusal:
            where = f"{mount.where} ({mount.kind}), where directories cannot be locked"
            raise Unsupported(f"{site.path}: no snapshot on {where}. Use read().", path=site.path)
        while True:
            folder = OwnedFd(system.open_fd(site.path, system.O_SYNCABLE_FOLDER))
            locked = try_lock(folder.fd, system.SH_NB)
            version = site.version()
            current = _is_at(site.path, folder)
            if locked and current:
                self._folder, self.version = folder, version
                return
            folder.close()
            if current:  # Holdfast does not lock the current version exclusively
                text = f"{site.path}: another program has an exclusive lock on the directory itself. Try again later."
                raise Busy(text, path=site.path)

    def close(self) -> None:
        """Close the snapshot. If its version was replaced, remove it unless another snapshot uses it."""
        folder, self._folder = self._folder, None
        if folder is None or not folder.is_open:  # in a forked child, the snapshot is its parent's
            return
        with folder:
            current = _is_at(self._atomic.path, folder)  # not unlocked: a program may have inherited the descriptor
        if not current:
            with suppress(OSError, HoldfastError):  # a writer has the lock, or this process may not remove it
                self._atomic.recover(timeout=0)

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await in_thread(self.close)


def _is_at(path: str, folder: OwnedFd) -> bool:
    return named(path, inode_of(system.fstat(folder.fd))) is not None
