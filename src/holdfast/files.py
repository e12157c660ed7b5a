"""Descriptors that have one owner.

    with OwnedFd(system.open_fd(path, system.O_READ)) as file:
        system.read(file.fd, 100)

An `OwnedFd` closes its descriptor once: by `close`, at the end of its `with` block, or when it is collected. In a
forked child it is inert: the fork hook (`process`) has closed the child's copy, and `close` does nothing, whatever the
child has opened under the same number since. No other code closes a descriptor by its number.
"""

from __future__ import annotations

from . import process, system

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import TypeVar

    Owner = TypeVar("Owner", bound="OwnedFd")


class OwnedFd:
    """An open descriptor, `fd`, until it is closed."""

    __slots__ = ("__weakref__", "_registry", "fd")

    def __init__(self, fd: int) -> None:
        try:
            self.fd = fd
            self._registry = registry = process.current_registry() if process._forks else process.registry
            registry.descriptors[id(self)] = fd
        except BaseException:  # an interrupt
            system.close(fd)
            raise

    @property
    def is_open(self) -> bool:
        """Can it be used? Not after `close`, and not in a forked child."""
        return id(self) in self._registry.descriptors

    @property
    def is_inherited(self) -> bool:
        """Does it belong to the parent of this process?"""
        return self._registry is not process.registry

    def close(self) -> None:
        # Popping is atomic: of two threads that close, one does.
        if (fd := self._registry.descriptors.pop(id(self), None)) is not None:
            system.close(fd)

    def detach(self) -> int:
        """Give the descriptor up without closing it: another owner closes it. -1: it is not open."""
        return self._registry.descriptors.pop(id(self), -1)

    def fileno(self) -> int:
        return self.fd

    def __enter__(self: Owner) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            if (fd := self._registry.descriptors.pop(id(self), None)) is not None:
                system.close(fd)
        except (AttributeError, OSError, TypeError):  # never opened, or the interpreter is going down
            pass


class InheritedFd(OwnedFd):
    """A descriptor whose copy a forked child keeps, and closes itself. It carries no lock, and is only read from."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._registry = process.inherited
        self._registry.descriptors[id(self)] = fd


def named(
    path: str, inode: process.Inode, *, dir_fd: int | None = None, follow_symlinks: bool = True
) -> os.stat_result | None:
    """What `path` names now, if that is still the file with this device and inode; else None."""
    try:
        st = system.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return st if st.st_ino == inode[1] and st.st_dev == inode[0] else None
