"""Who holds a lock and who waits for it: one data object behind `status()`, the error messages and the tools.

Nothing is stored in a kernel lock's file, so all of this is asked of the system: /proc/locks names the process that
took each lock, by device and inode. The device is the one of the mount table, not `st_dev`, which differs on btrfs and
overlay. Open-file-description locks have no process there, and a lock may have been inherited from a process that is
gone; then /proc/*/fdinfo is searched for whoever has the file open with a lock on it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass

from . import system
from .owner import command_of, describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock, or waits for one. `pid` is None for one that this system does not show."""

    pid: int | None
    shared: bool = False
    command: str | None = None

    def __str__(self) -> str:
        return "a process that this system does not show" if self.pid is None else describe(self.pid)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a lock at one moment.

    `since` is when the file was made or handed over, in seconds since the epoch; None where nobody knows, as for a
    file that is kept.
    """

    path: str
    kind: str
    held: bool
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Holder, ...] = ()
    since: float | None = None
    permits: int | None = None

    def explain(self) -> str:
        """In words, for an error message: who has it, for how long, how many wait."""
        if not self.held:
            return "it was held a moment ago and is free now" if not self.waiters else "others are first in its queue"
        who = ", ".join(str(holder) for holder in self.holders[:3])
        if len(self.holders) > 3:
            who += f" and {len(self.holders) - 3} more"
        text = f"held by {who}"
        if any(holder.shared for holder in self.holders):
            text = "shared by" + text[len("held by") :]
        if self.since is not None:
            text += f" for {max(0.0, time.time() - self.since):.1f} s"
        others = sum(waiter.pid != os.getpid() for waiter in self.waiters)
        if others:
            text += f", {others} more waiting"
        return text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of /proc/locks or of a `lock:` in fdinfo."""

    blocked: bool
    family: str
    shared: bool
    pid: int
    device: str
    inode: int
    start: int


def _parse(line: str) -> _Line | None:
    fields = line.split()
    if not fields or not fields[0].endswith(":"):
        return None
    blocked = len(fields) > 1 and fields[1] == "->"
    fields = fields[2:] if blocked else fields[1:]
    try:
        family, _, access, pid, place, start = fields[:6]
        device, _, inode = place.rpartition(":")
        return _Line(blocked, family, access == "READ", int(pid), device, int(inode), int(start))
    except ValueError:
        return None


def _lines(text: str) -> list[_Line]:
    return [line for line in map(_parse, text.splitlines()) if line is not None]


def _place(fd: int, st: os.stat_result) -> tuple[str, int]:
    """Device and inode as /proc/locks writes them."""
    fields = dict(
        line.split(":", 1) for line in system.read_text(f"/proc/self/fdinfo/{fd}").splitlines() if ":" in line
    )
    inode = int(fields.get("ino", st.st_ino))
    mount = fields.get("mnt_id", "").strip()
    for line in system.mount_table().splitlines():
        words = line.split()
        if words[:1] == [mount]:
            major, _, minor = words[2].partition(":")
            return f"{int(major):02x}:{int(minor):02x}", inode
    return f"{os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}", inode


def _has_open(pid: int, st: os.stat_result) -> bool | None:
    """Does the process have the file open? None: we may not know."""
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:
        return False
    except OSError:
        return None
    for fd in fds:
        try:
            there = os.stat(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if (there.st_dev, there.st_ino) == (st.st_dev, st.st_ino):
            return True
    return False


def _search(device: str, inode: int, families: tuple[str, ...], first: int) -> list[tuple[int, _Line]]:
    """Everybody who has a lock on the file, by looking into every process that we may look into."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            fds = os.listdir(f"/proc/{name}/fdinfo")
        except OSError:
            continue
        for fd in fds:
            for text in system.read_text(f"/proc/{name}/fdinfo/{fd}").splitlines():
                line = _parse(text.removeprefix("lock:").strip()) if text.startswith("lock:") else None
                if (
                    line
                    and (line.device, line.inode) == (device, inode)
                    and line.family in families
                    and line.start >= first
                ):
                    found.append((int(name), line))
    return found


def _holder(pid: int | None, shared: bool) -> Holder:
    return Holder(pid, shared, None if pid is None else command_of(pid))


def _holders(fd: int, st: os.stat_result, families: tuple[str, ...], first: int = 0) -> tuple[Holder, ...]:
    device, inode = _place(fd, st)
    held = [
        line
        for line in _lines(system.read_text("/proc/locks"))
        if (line.device, line.inode) == (device, inode)
        and line.family in families
        and not line.blocked
        and line.start >= first
        and line.start != system.REMOVAL_BYTE
    ]
    if any(line.pid <= 0 or _has_open(line.pid, st) is False for line in held):
        seen = _search(device, inode, families, first)
        held_by = [(pid, line.shared) for pid, line in seen if line.start != system.REMOVAL_BYTE]
        unseen = len(held) - len({(line.start, pid) for pid, line in seen})
        if held_by:
            return tuple(_holder(pid, shared) for pid, shared in held_by)
        if unseen <= 0:
            return ()
        return tuple(_holder(None, line.shared) for line in held)
    return tuple(_holder(line.pid, line.shared) for line in held)


def _waiters(queue: str) -> tuple[Holder, ...]:
    """Those who have a ticket, in the order in which they will be served."""
    found: list[Holder] = []
    try:
        names = sorted(os.listdir(queue))
    except OSError:
        return ()
    for name in names:
        try:
            fd = system.open_fd(f"{queue}/{name}", system.O_READ)
        except OSError:
            continue
        try:
            found.extend(_holders(fd, system.fstat(fd), ("FLOCK",)))
        finally:
            system.close(fd)
    return tuple(found)


def of_kernel_lock(path: str, queue: str) -> Status:
    waiters = _waiters(queue)
    try:
        fd = system.open_fd(os.path.realpath(path), system.O_READ)
    except OSError:
        return Status(path, "lock", held=False, waiters=waiters)
    try:
        st = system.fstat(fd)
        holders = _holders(fd, st, ("FLOCK", "OFDLCK"))
        if not holders and not _is_free(fd):
            holders = (Holder(None),)
    finally:
        system.close(fd)
    return Status(
        path, "lock", held=bool(holders), holders=holders, waiters=waiters, since=st.st_mtime if holders else None
    )


def _is_free(fd: int) -> bool:
    """Ask with a lock of our own, for holders whom /proc does not show: those of another pid namespace.

    Nobody is known to hold it, so there is hardly anybody to disturb; the mark of a removal lets others try again.
    """
    try:
        system.mark_removal(fd)
        system.lock(fd, system.EX_NB)
    except OSError:
        return False
    return True


def of_semaphore(path: str, queue: str, permits: int) -> Status:
    waiters = _waiters(queue)
    try:
        fd = system.open_fd(os.path.realpath(path), system.O_READ)
    except OSError:
        return Status(path, "semaphore", held=False, waiters=waiters, permits=permits)
    try:
        holders = _holders(fd, system.fstat(fd), ("OFDLCK",), first=system.FIRST_SLOT)
    finally:
        system.close(fd)
    return Status(path, "semaphore", held=bool(holders), holders=holders, waiters=waiters, permits=permits)
