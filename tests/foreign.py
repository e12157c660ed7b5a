"""Two foreign lock-file tools, written from the texts of the seeds, races included.

    Sema     create with O_EXCL, then write, then fsync. Stale by age alone: read, judge, unlink
    Semats   write a private file, look whether the lock is there, rename over the path. Stale: dead and old

Neither knows our removal byte, our liveness byte, or what an inode is. What they lose to each other is theirs; what
ours must promise beside them is in `test_lock_file_races`.
"""

from __future__ import annotations

import os
import time


def read(path: str) -> tuple[int, int] | None:
    """The pid and the timestamp in a lock file; None if there is none, or if it cannot be understood (yet)."""
    try:
        with open(path, "rb") as file:
            lines = file.read().decode().split("\n")
        fields = dict(line.strip().split("=", 1) for line in lines if "=" in line)
        return int(fields["pid"]), int(fields["timestamp"])
    except (FileNotFoundError, KeyError, ValueError):
        return None


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


UNWRITTEN = -1
victims: list[int] = []  # the pids whose locks this process removed, or `UNWRITTEN` for a file without content


def unlinked(path: str) -> bool:
    """Remove a file, whosever it is, and remember whose it was. False: there was none."""
    aside = f"{path}.{os.getpid()}.gone"
    try:
        os.rename(path, aside)  # as atomic as unlink, and one can still look at it
    except FileNotFoundError:
        return False
    found = read(aside)
    if found is not None:
        victims.append(found[0])
    elif not os.path.getsize(aside):
        victims.append(UNWRITTEN)
    os.unlink(aside)
    return True


class Sema:
    """The tool of sema-protocol.md."""

    def __init__(self, path: str, stale_after: float = 3600, durable: bool = False) -> None:
        self.path = path
        self.stale_after = stale_after
        self.durable = durable

    def try_acquire(self) -> bool:
        while True:
            try:
                fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                if not self._remove_if_stale():
                    return False
                continue
            os.write(fd, b"pid=%d\ntimestamp=%d\n" % (os.getpid(), int(time.time())))
            if self.durable:
                os.fsync(fd)
            os.close(fd)
            return True

    def _remove_if_stale(self) -> bool:
        found = read(self.path)
        if found is None:
            return not os.path.exists(self.path)
        if not time.time() - found[1] > self.stale_after:
            return False
        unlinked(self.path)
        return True

    def release(self) -> bool:
        """Remove the lock file, whosever it is. False: there was none."""
        return unlinked(self.path)


class Semats:
    """The tool of semats-protocol.md."""

    def __init__(self, path: str, stale_after: float = 3600, durable: bool = False) -> None:
        self.path = path
        self.stale_after = stale_after

    def try_acquire(self) -> bool:
        private = f"{self.path}.{os.getpid()}.{os.urandom(8).hex()}.tmp"
        fd = os.open(private, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(fd, b"pid=%d\ntimestamp=%d\n" % (os.getpid(), int(time.time())))
        os.close(fd)
        if os.path.exists(self.path) and not self._remove_if_stale():
            os.unlink(private)
            return False
        os.rename(private, self.path)  # the seed takes this for a test whether the file exists
        return True

    def _remove_if_stale(self) -> bool:
        found = read(self.path)
        if found is None:
            return not os.path.exists(self.path)
        pid, timestamp = found
        if exists(pid) or not time.time() - timestamp > self.stale_after:
            return False
        unlinked(self.path)
        return True

    def release(self) -> bool:
        """Remove the lock file if it is that of this process. False: it is not there, or another's."""
        found = read(self.path)
        if found is None or found[0] != os.getpid():
            return False
        return unlinked(self.path)


TOOLS = {"sema": Sema, "semats": Semats}
