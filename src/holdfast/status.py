"""Who holds a lock and who waits for it: one data object behind `status()`, the error messages and the tools.

Nothing is stored in a kernel lock's file, so all of this is asked of the system: /proc/locks names the process that
took each lock, by device and inode. The device is the one of the mount table, not `st_dev`, which differs on btrfs and
overlay. Each process that is named is then asked through /proc/*/fdinfo, which is exact. Open-file-description locks
name no process, and a lock may have been inherited from one that is gone: then all of them are asked.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from . import system
from .files import OwnedFd
from .owner import command_of, describe, sees_everybody
from .paths import major_and_minor, mount_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .locks.staleness import Judgement


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock, or waits for one. `pid` is None for one that this system does not show.

    `since` is when a waiter began to wait, in seconds since the epoch.
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
    """The state of a lock at one moment. `held`: an acquire would have to wait; a semaphore with a free permit is free.

    `since` is when the file was made or handed over, in seconds since the epoch; None where nobody knows, as for a
    file that is kept.
    """

    path: str
    kind: str
    held: bool
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Holder, ...] = ()
    since: float | None = None
    timestamp: int | None = None  # as the record of a lock file has it; a heartbeat renews it
    permits: int | None = None
    tag: str | None = None
    token: int | None = None
    alive: bool | None = None
    stale: bool = False
    stale_in: float | None = None
    corrupt: bool = False

    def explain(self) -> str:
        """In words: who has it, for how long, how many wait."""
        if not self.held:
            taken = f", {len(self.holders)} of {self.permits} permits taken" if self.holders else ""
            return f"free{taken}" + (", and others are first in its queue" if self.waiters else "")
        if self.corrupt:
            return "its file cannot be understood (is the path right?); it counts as held" + self._until_stale()
        who = ", ".join(str(holder) for holder in self.holders[:3])
        if len(self.holders) > 3:
            who += f" and {len(self.holders) - 3} more"
        text = f"held by {who}" if self.permits is None else f"{len(self.holders)} of {self.permits} held by {who}"
        if self.tag:
            text += f", tag {self.tag if len(self.tag) <= 60 else self.tag[:59] + '…'!r},"
        if any(holder.shared for holder in self.holders):
            text = text.replace("held by", "shared by", 1) if self.permits is None else text
        if self.since is not None:
            text += f" for {max(0.0, time.time() - self.since):.1f} s"
        others = sum(waiter.pid != os.getpid() for waiter in self.waiters)
        if others:
            text += f", {others} more waiting"
        if self.kind in ("file", "task") and self.alive is None and not self.stale:
            text += ". Whether that one lives cannot be known here, so it counts as held" + self._until_stale()
        return text

    def _until_stale(self) -> str:
        if self.stale_in is None:
            return " until somebody removes it"
        return f" for {self.stale_in:.0f} s more; break_() takes it away now"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# What excludes a `Lock`: flock on a local file system, byte ranges below the removal byte where ranges stand in for it.
_FLOCKS = ("FLOCK",)
_RANGES = ("OFDLCK", "POSIX")


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
    return "{:02x}:{:02x}".format(*major_and_minor(st.st_dev)), inode


def _locks_of(pid: int | str, place: tuple[str, int]) -> list[_Line] | None:
    """The locks on a file that a process has through its descriptors. None: we may not look.

    Unlike /proc/locks, which is given out page by page while it changes, this is exact.
    """
    try:
        fds = os.listdir(f"/proc/{pid}/fdinfo")
    except FileNotFoundError:
        return []
    except OSError:
        return None
    texts = (text for fd in fds for text in system.read_text(f"/proc/{pid}/fdinfo/{fd}").splitlines())
    lines = _lines("\n".join(text.removeprefix("lock:").strip() for text in texts if text.startswith("lock:")))
    return [line for line in lines if (line.device, line.inode) == place]


def _holder(pid: int | None, shared: bool) -> Holder:
    return Holder(pid, shared, None if pid is None else command_of(pid))


def _holders(fd: int, st: os.stat_result, families: tuple[str, ...], first: int = 0) -> tuple[Holder, ...]:
    """Who has a lock on the open file: those whom /proc/locks names, and if it names none, whoever can be found."""
    table = system.read_text("/proc/locks")
    if not table:
        return ()  # no locks, or a system that names no holders
    place = _place(fd, st)

    def counts(line: _Line) -> bool:
        return (line.device, line.inode) == place and _counts(line, families, first)

    named = [line for line in _lines(table) if counts(line)]
    found: list[Holder] = []
    for pid in sorted({line.pid for line in named if line.pid > 0}):
        locks = _locks_of(pid, place)
        if locks is None:  # another user's: believe what /proc/locks says
            locks = [line for line in named if line.pid == pid][:1]
        found.extend(_holder(pid, line.shared) for line in locks if counts(line))
    if not found and named:
        # Open-file-description locks name nobody, and one who took a lock may be gone, its descriptor inherited.
        return _search(place, families, first) or tuple(_holder(None, line.shared) for line in named)
    return tuple(found)


def _counts(line: _Line, families: tuple[str, ...], first: int) -> bool:
    if line.family not in families or line.blocked:
        return False
    # The removal byte and the liveness byte lie between the lock itself and the slots.
    return line.start >= first if first else line.start < system.REMOVAL_BYTE


def _search(place: tuple[str, int], families: tuple[str, ...], first: int = 0) -> tuple[Holder, ...]:
    """Who has a lock on a file, by asking every process."""
    found: list[Holder] = []
    seen: set[int] = set()
    for pid in system.list_pids():
        for line in _locks_of(pid, place) or ():
            # An exclusive lock that several processes have is one that was inherited.
            if _counts(line, families, first) and (line.shared or line.start not in seen):
                seen.add(line.start)
                found.append(_holder(pid, line.shared))
    return tuple(found)


def _waiters(file: str) -> tuple[Holder, ...]:
    """Those who have a ticket, in the order in which they will be served."""
    queue = file + ".queue"
    try:
        names = sorted(os.listdir(queue))
    except OSError:
        return ()
    # One reading for all of them: there may be hundreds, and an error message that says so must not take long.
    owners = {
        (line.device, line.inode): line.pid for line in _lines(system.read_text("/proc/locks")) if not line.blocked
    }
    found: list[Holder] = []
    device = None
    for name in names:
        try:
            ticket = OwnedFd(system.open_fd(f"{queue}/{name}", system.O_READ))
        except OSError:
            continue
        with ticket:
            st = system.fstat(ticket.fd)
            device = device or _place(ticket.fd, st)[0]
        pid = owners.get((device, st.st_ino))
        if pid is not None:
            known = pid if pid > 0 else None
            # Nothing is written to a ticket before its owner leaves.
            found.append(Holder(known, False, None if known is None else command_of(known), since=st.st_mtime))
    return tuple(found)


def of_kernel_lock(path: str, *, keep: bool) -> Status:
    file = os.path.realpath(path)
    waiters = _waiters(file)
    try:
        opened = OwnedFd(system.open_fd(file, system.O_READ))
    except BlockingIOError:  # Windows: opened by somebody who shares it with nobody
        return Status(path, "lock", held=True, holders=(Holder(None),), waiters=waiters)
    except OSError:
        return Status(path, "lock", held=False, waiters=waiters)
    with opened:
        fd, st = opened.fd, system.fstat(opened.fd)
        ranged = mount_at(st.st_dev, path).ranged
        families = _RANGES if ranged or sys.platform == "darwin" else _FLOCKS
        holders = _holders(fd, st, families)
        # The locks of other machines are not in /proc. In a container, /proc/locks is silent about a lock whose taker
        # is gone, its descriptor inherited.
        if not holders and (system.range_taken(fd) if ranged else not _is_free(fd)):
            holders = _search(_place(fd, st), families) or (Holder(None),)
    return Status(
        path,
        "lock",
        held=bool(holders),
        holders=holders,
        waiters=waiters,
        since=st.st_mtime if holders and not keep else None,
    )


def _is_free(fd: int) -> bool:
    """/proc names no holder. In a container, whose /proc does not show every process, it takes a lock to be sure.

    The mark, which is there before the lock and until after it, tells others to try again in a moment.
    """
    if sees_everybody():
        return True
    with suppress(OSError):  # another program has locked a range of it; ignore it
        system.mark_removal(fd)
    try:
        system.lock(fd, system.EX_NB)
        system.lock(fd, system.UN)
    except OSError:
        return False
    return True


def of_semaphore(path: str, permits: int) -> Status:
    file = os.path.realpath(path)
    waiters = _waiters(file)
    try:
        opened = OwnedFd(system.open_fd(file, system.O_READ))
    except BlockingIOError:
        return Status(path, "semaphore", held=True, holders=(Holder(None),), waiters=waiters, permits=permits)
    except OSError:
        return Status(path, "semaphore", held=False, waiters=waiters, permits=permits)
    with opened:
        fd, st = opened.fd, system.fstat(opened.fd)
        holders = _holders(fd, st, ("OFDLCK",), first=system.FIRST_SLOT)
        if not holders and system.slots_taken(fd):
            holders = (Holder(None, shared=True),)
        held = bool(holders) and all(system.slot_taken(fd, slot) for slot in range(permits))
        if not held:
            # A `Lock` or flock(1) has the file. A sharer is in the way only of a caller that has to write the number.
            others = tuple(holder for holder in _holders(fd, st, _FLOCKS) if not holder.shared or not st.st_size)
            if others:
                return Status(path, "semaphore", held=True, holders=others, waiters=waiters)
    return Status(path, "semaphore", held=held, holders=holders, waiters=waiters, permits=permits)


def of_lock_file(path: str, found: Judgement | None, kind: str = "file") -> Status:
    waiters = _waiters(os.path.realpath(path))
    if found is None:
        return Status(path, kind, held=False, waiters=waiters)
    if found.record is None:
        used = of_kernel_lock(path, keep=True)  # an empty file may be in use as a `Lock`
        if used.held:
            return Status(path, kind, held=True, holders=used.holders, waiters=waiters, alive=True)
    facts = found.facts()
    holder = Holder(facts.pop("pid"), False, facts.pop("command"), facts.pop("host"))
    holders = () if found.record is None else (holder,)
    return Status(path, kind, held=True, holders=holders, waiters=waiters, **facts)
