"""Holders and waiters of a lock: one data object behind `status()`, the error messages and the tools.

The file of a kernel lock is empty, so the kernel is asked. /proc/locks names the process that took each lock, by device
and inode. That device is the one of the mount table, not `st_dev`, which differs on btrfs and overlay. The named
processes are then asked through /proc/PID/fdinfo, which is exact, while /proc/locks changes between two pages of it.
Open-file-description locks name no process, and a lock may have been inherited from a process that has ended. Then all
processes are asked.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from . import system
from .files import OwnedFd
from .owner import command_of, describe, sees_everybody, shorten
from .paths import major_and_minor, mount_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .locks.staleness import Judgement

_MAX_NAMED_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock or waits for it.

    pid: its process id; None if this system does not show the process
    shared: it holds a shared lock
    command: its command line, if it runs on this machine
    host: the name of its machine, if it is not this one
    since: when a waiter began to wait, in seconds since the epoch
    """

    pid: int | None
    shared: bool = False
    command: str | None = None
    host: str | None = None
    since: float | None = None

    def __str__(self) -> str:
        if self.host is not None:
            return f"pid {self.pid} on {self.host}"
        return "a process that this system does not show" if self.pid is None else describe(self.pid)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a lock at one moment, as `lock.status()` returns it.

    path: the path of the lock
    kind: "lock", "semaphore", "file" (a `LockFile`) or "task" (one of `TaskLocks`)
    held: an acquire would have to wait. A semaphore with a free permit is not held
    holders, waiters: the processes that hold the lock, and those in its queue in order of arrival
    since: when the lock was acquired, in seconds since the epoch; None if unknown, as for a file that is kept
    timestamp: the time in the record of a lock file. A heartbeat renews it
    permits: the number of permits of a semaphore
    tag, token: the tag and the fencing token in the record of a lock file
    alive: the holder of a lock file is proved alive (True) or dead (False); None: it cannot be proved here
    stale: the lock file is stale: the next acquire takes it over
    stale_in: seconds until the lock file becomes stale by its age; None: it never does
    corrupt: the record of the lock file is empty or damaged
    """

    path: str
    kind: str
    held: bool
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Holder, ...] = ()
    since: float | None = None
    timestamp: int | None = None
    permits: int | None = None
    tag: str | None = None
    token: int | None = None
    alive: bool | None = None
    stale: bool = False
    stale_in: float | None = None
    corrupt: bool = False

    def explain(self) -> str:
        """Describe the state in one line: the holders, since when, and how many processes wait.

        Example: held by pid 4711 (python deploy.py) for 93.0 s, 2 more waiting
        """
        if not self.held:
            taken = f", {len(self.holders)} of {self.permits} permits taken" if self.holders else ""
            return f"free{taken}" + (", but waiters are first in its queue" if self.waiters else "")
        if self.corrupt:
            return "its record is empty or damaged, so it counts as held" + self._until_stale()
        names = ", ".join(str(holder) for holder in self.holders[:_MAX_NAMED_HOLDERS])
        if len(self.holders) > _MAX_NAMED_HOLDERS:
            names += f" and {len(self.holders) - _MAX_NAMED_HOLDERS} more"
        if self.permits is not None:
            text = f"{len(self.holders)} of {self.permits} permits held by {names}"
        else:
            text = f"{'shared' if any(holder.shared for holder in self.holders) else 'held'} by {names}"
        if self.tag:
            text += f", tag {shorten(self.tag)!r},"
        if self.since is not None:
            text += f" for {max(0.0, time.time() - self.since):.1f} s"
        others = sum(waiter.pid != os.getpid() for waiter in self.waiters)
        if others:
            text += f", {others} more waiting"
        if self.kind in ("file", "task") and self.alive is None and not self.stale:
            text += ". It is unknown whether the holder is alive, so the lock counts as held" + self._until_stale()
        return text

    def _until_stale(self) -> str:
        if self.stale_in is None:
            return " until its file is removed"
        return f" for {self.stale_in:.0f} s more. break_(), or holdfast break, releases it now"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that can be written as JSON."""
        return asdict(self)


class KernelLock(NamedTuple):
    """A line of /proc/locks, or a `lock:` line of fdinfo. `blocked`: its process waits for the lock."""

    blocked: bool
    family: str
    shared: bool
    pid: int  # 0 and below: not known
    file: tuple[str, int]  # device and inode
    start: int


_LINE = re.compile(r"\d+:\s+(->\s+)?(\w+)\s+\w+\s+(\w+)\s+(-?\d+)\s+([0-9a-f]+:[0-9a-f]+):(\d+)\s+(\d+)")


def _lines(text: str) -> list[KernelLock]:
    return [
        KernelLock(bool(blocked), family, access == "READ", int(pid), (device, int(inode)), int(start))
        for blocked, family, access, pid, device, inode, start in _LINE.findall(text)
    ]


def kernel_locks() -> list[KernelLock]:
    """Return the locks of this machine that /proc/locks shows."""
    return _lines(system.read_text("/proc/locks"))


# Families of kernel locks, and positions between which one excludes an acquire. The removal byte does not.
_FLOCKS = ("FLOCK",), range(system.REMOVAL_BYTE)
_RANGES = ("OFDLCK", "POSIX"), range(system.REMOVAL_BYTE)
_SLOTS = ("OFDLCK",), range(system.FIRST_SLOT, system.FIRST_SLOT + system.MAX_SLOTS)


def _file_of(fd: int, st: os.stat_result) -> tuple[str, int]:
    """Return device and inode as /proc/locks writes them."""
    text = system.read_text(f"/proc/self/fdinfo/{fd}")
    inode, mount = (re.search(rf"^{name}:\s*(\d+)", text, re.M) for name in ("ino", "mnt_id"))
    found = mount and re.search(rf"^{mount[1]} \d+ (\d+):(\d+) ", system.mount_table(), re.M)
    major, minor = map(int, found.groups()) if found else major_and_minor(st.st_dev)
    return f"{major:02x}:{minor:02x}", int(inode[1]) if inode else st.st_ino


def _holder(pid: int, shared: bool, since: float | None = None) -> Holder:
    return Holder(pid, shared, command_of(pid), since=since) if pid > 0 else Holder(None, shared, since=since)


def _holders(
    fd: int, st: os.stat_result, locks: tuple[tuple[str, ...], range], *, exists: bool = False
) -> tuple[Holder, ...]:
    """Return the holders of the open file. `exists`: there is a holder, although /proc/locks may not show its lock."""
    file, (families, positions) = _file_of(fd, st), locks

    def counts(line: KernelLock) -> bool:
        return line.file == file and line.family in families and line.start in positions and not line.blocked

    # The kernel writes /proc/locks in pages. A lock that is released between two pages can hide the next one.
    named = [line for line in kernel_locks() if counts(line)] or [line for line in kernel_locks() if counts(line)]
    found: list[Holder] = []
    seen: set[int] = set()
    for pids in ({line.pid for line in named}, system.list_pids() if named or exists else ()):
        for pid in () if found else sorted(pids):
            text = system.lock_lines(pid)
            # Another user's process cannot be asked: there /proc/locks has to be believed.
            lines = [line for line in named if line.pid == pid][:1] if text is None else filter(counts, _lines(text))
            for line in lines:
                # If several descriptors have one exclusive lock, all but the first have inherited it.
                if line.shared or line.start not in seen:
                    seen.add(line.start)
                    found.append(_holder(pid, line.shared))
    found = found or [_holder(0, line.shared) for line in named]
    return tuple(found) if found or not exists else (Holder(None),)


def _waiters(file: str) -> tuple[Holder, ...]:
    """Return the processes that have a ticket, in order of arrival."""
    queue = file + ".queue"
    try:
        with OwnedFd(system.open_fd(queue, system.O_SYNCABLE_FOLDER)) as folder:
            device, _ = _file_of(folder.fd, system.fstat(folder.fd))
        names = sorted(system.listdir(queue))
    except OSError:
        return ()
    # /proc/locks is read once for all of them: there may be hundreds, and an error message must not take long.
    pids = {line.file: line.pid for line in kernel_locks() if not line.blocked}
    found: list[Holder] = []
    for name in names:
        with suppress(FileNotFoundError):
            st = system.stat(f"{queue}/{name}", follow_symlinks=False)
            if (device, st.st_ino) in pids:
                # A ticket is not written to before its owner leaves, so it is as old as the wait.
                found.append(_holder(pids[device, st.st_ino], False, st.st_mtime))
    return tuple(found)


def _examine(free: Status, examine: Callable[[int, os.stat_result, Status], Status]) -> Status:
    """Return `examine(fd, stat, free)` for the file of a lock, or `free` if there is no such file."""
    file = os.path.realpath(free.path)
    free = replace(free, waiters=_waiters(file))
    try:
        opened = OwnedFd(system.open_fd(file, system.O_READ))
    except BlockingIOError:  # Windows: another program does not share the file
        return replace(free, held=True, holders=(Holder(None),))
    except OSError:
        return free
    with opened:
        return examine(opened.fd, system.fstat(opened.fd), free)


def of_kernel_lock(path: str, *, keep: bool) -> Status:
    """Return the status of a `Lock`."""

    def examine(fd: int, st: os.stat_result, free: Status) -> Status:
        ranged = mount_at(st.st_dev, path).ranged
        locks = _RANGES if ranged or sys.platform == "darwin" else _FLOCKS
        holders = _holders(fd, st, locks)
        if not holders and not _is_free(fd, ranged):
            holders = _holders(fd, st, locks, exists=True)
        # 0: a sharer that left the file for the next waiter has marked it, and others hold it (`PathLock.free_name`).
        since = (st.st_mtime or None) if holders and not keep else None
        return replace(free, held=bool(holders), holders=holders, since=since)

    return _examine(Status(path, "lock", held=False), examine)


def _is_free(fd: int, ranged: bool) -> bool:
    """Return whether a file is free for which /proc names no holder.

    /proc does not show the locks of other machines. In a container, it does not show every process, and /proc/locks
    does not show a lock that was inherited from a process that has ended. So there the file is locked for a moment.
    The mark, set before the lock and cleared after it, tells other processes to try again.
    """
    if ranged:
        return not system.range_locked(fd, system.RANGE_START, system.RANGE_LENGTH)
    if sees_everybody():
        return True
    with suppress(OSError):  # another program has locked a range of the file
        system.mark_removal(fd)
    try:
        system.lock(fd, system.EX_NB)
        system.lock(fd, system.UN)
    except OSError:
        return False
    return True


def of_semaphore(path: str, permits: int) -> Status:
    """Return the status of a `Semaphore`."""

    def examine(fd: int, st: os.stat_result, free: Status) -> Status:
        holders = _holders(fd, st, _SLOTS)
        if not holders and system.slots_taken(fd):
            holders = (Holder(None, shared=True),)
        held = bool(holders) and all(system.range_locked(fd, system.FIRST_SLOT + slot, 1) for slot in range(permits))
        if not held:
            # A `Lock` or flock(1) may have the file. A shared one excludes only a caller that has to write the number.
            others = tuple(holder for holder in _holders(fd, st, _FLOCKS) if not holder.shared or not st.st_size)
            if others:
                return replace(free, held=True, holders=others, permits=None)
        return replace(free, held=held, holders=holders)

    return _examine(Status(path, "semaphore", held=False, permits=permits), examine)


def of_lock_file(path: str, found: Judgement | None, kind: str = "file") -> Status:
    """Return the status of a `LockFile` or of a lock of `TaskLocks`. `found` is None if there is no such file."""
    free = Status(path, kind, held=False, waiters=_waiters(os.path.realpath(path)))
    if found is None:
        return free
    if found.record is None:
        used = of_kernel_lock(path, keep=True)  # an empty file may be in use as a `Lock`
        if used.held:
            return replace(free, held=True, holders=used.holders, alive=True)
    facts = found.facts()
    holder = Holder(facts.pop("pid"), False, facts.pop("command"), facts.pop("host"))
    return replace(free, held=True, holders=() if found.record is None else (holder,), **facts)
