"""A descriptor that goes with its object, and how files are read and written whole."""

from __future__ import annotations

import os
from contextlib import suppress

from .. import system
from ..files import OwnedFd

_A_CHUNK = 1 << 16


class OpenFile(OwnedFd):
    """A file that is closed with its object, and of which a forked child has no copy."""

    __slots__ = ()

    def __init__(self, path: str, flags: int, mode: int = 0) -> None:
        OwnedFd.__init__(self, system.open_fd(path, flags, mode))


def write_at(fd: int, text: bytes, at: int) -> None:
    done = system.pwrite(fd, text, at)
    while done < len(text):  # the disk is full, and says so the next time
        done += system.pwrite(fd, text[done:], at + done)


def read_open(fd: int) -> bytes:
    """All of it."""
    parts = [system.pread(fd, _A_CHUNK, 0)]
    while parts[-1]:
        parts.append(system.pread(fd, _A_CHUNK, sum(map(len, parts))))
    return b"".join(parts)


def read_all(path: str) -> bytes:
    try:
        file = OpenFile(path, system.O_READ)
    except FileNotFoundError:
        return b""
    try:
        return read_open(file.fd)
    finally:
        file.close()


def publish(path: str, text: bytes, mode: int, *, sync: bool = False) -> None:
    """Write a file that appears whole, in place of the one that is there. If that fails, nothing is left of it."""
    private = f"{path}.{os.urandom(8).hex()}.tmp"
    file = OpenFile(private, system.O_NEW, mode)
    try:
        write_at(file.fd, text, 0)
        if sync:
            system.fsync(file.fd)
        system.rename(private, path)
    except BaseException:
        with suppress(FileNotFoundError):
            system.unlink(private)
        raise
    finally:
        file.close()
