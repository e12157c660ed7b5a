"""Which steps of two actors commute: the independence relation of the explorer's partial-order reduction.

A step is a system call and the code up to the next one. Its footprint is what it reads and writes: names, lists of
directories, and aspects of inodes (content, links, one for each kind of kernel lock). Two steps commute if neither
writes what the other reads or writes. A call that is not listed here commutes with nothing.

    SCRIPT      what the scripts of a scenario share, such as a list of those who are inside
    INODES      which inode numbers are free: a new file can get the number of a removed one
    PROCESSES   which processes are alive
"""

from __future__ import annotations

import os
import stat
from typing import Any

SCRIPT, INODES, PROCESSES = "script", "inodes", "processes"
LOCK_ASPECTS = ("flock", "range", "removal", "liveness", "slots")

# What a call with a descriptor as its first argument reads and writes of the inode.
READS = {
    "pread": ("content",),
    "fsync": ("content",),
    "fdatasync": ("content",),
    "fstat": ("content", "links"),
    "is_removed": ("links",),
    "close": ("links",),
    "removal_marked": ("removal",),
    "liveness_locked": ("liveness",),
    "slots_taken": ("slots",),
}
WRITES = {
    "read": ("content",),
    "write": ("content",),
    "pwrite": ("content",),
    "fchmod": ("links",),
    "lock": ("flock",),
    "lock_range": ("range",),
    "mark_removal": ("removal",),
    "unmark_removal": ("removal",),
    "lock_removal": ("removal",),
    "lock_liveness": ("liveness",),
    "try_slot": ("slots",),
    "unlock_slots": ("slots",),
    "close": LOCK_ASPECTS,
}
MAKERS = ("open_fd", "mkdir", "mkfifo", "link")
NAMES = ("open_fd", "stat", "access", "listdir", "unlink", "link", "rename", "exchange", "mkdir", "rmdir", "mkfifo")


class Footprint:
    """What a step reads and writes. `unknown`: perhaps everything."""

    __slots__ = ("reads", "unknown", "writes")

    def __init__(self, *, unknown: bool = False) -> None:
        self.reads: set[object] = set()
        self.writes: set[object] = set()
        self.unknown = unknown

    def commutes(self, other: Footprint) -> bool:
        return (
            not (self.unknown or other.unknown)
            and self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )

    def add(self, call: Footprint, *, failed: bool) -> None:
        """Add the footprint of a call. A call that failed changed nothing, but read what it would have changed."""
        self.reads |= call.reads
        (self.reads if failed else self.writes).update(call.writes)
        self.unknown |= call.unknown


class Files:
    """The files of a run. Footprints of two runs are compared, so that inodes have names that do not depend on numbers.

    A file that was there before is called by its path, a new file by its maker and how many files that one has made.
    """

    def __init__(self, home: str) -> None:
        self._home = home
        self._names: dict[tuple[int, int], object] = {}
        self._made: dict[int, int] = {}

    def scan(self) -> None:
        """Name all inodes by their present paths: at the start, and after a step that could touch any file."""
        self._names.clear()
        for folder, folders, files in os.walk(self._home):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                st = os.lstat(path)
                self._names[st.st_dev, st.st_ino] = path

    def made(self, maker: int, name: str, args: tuple[Any, ...], options: dict[str, Any], answer: Any) -> None:
        """A call has made a file."""
        path = self._path(args[0], options.get("dir_fd")) if name != "open_fd" else ""
        st = os.lstat(path) if path else os.fstat(answer)
        self._made[maker] = self._made.get(maker, 0) + 1
        self._names[st.st_dev, st.st_ino] = (maker, self._made[maker])

    def touched(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Footprint:
        """What a call is about to touch."""
        found = Footprint()
        try:
            if name in READS or name in WRITES:
                self._add_descriptor(found, name, args[0])
            elif name == "process_exists":
                found.reads.add(PROCESSES)
            elif name == "link_open_file":
                found.writes.add((self._name(os.fstat(args[0])), "links"))
                self._add_path(found, "link", self._path(args[2], args[1]), 0)
            elif name in NAMES:
                folder = args[2] if name == "exchange" else options.get("dir_fd", options.get("dst_dir_fd"))
                for path in args[:2] if name in ("link", "rename", "exchange") else args[:1]:
                    self._add_path(found, name, self._path(path, folder), args[1] if name == "open_fd" else 0)
            else:
                found.unknown = True
        except (OSError, TypeError, KeyError):
            found.unknown = True
        return found

    def closing(self, fds: set[int]) -> Footprint:
        """What the end of a process touches."""
        found = Footprint()
        found.writes |= {SCRIPT, PROCESSES}
        for fd in fds:
            found.add(self.touched("close", (fd,), {}), failed=False)
        return found

    def _name(self, st: os.stat_result) -> object:
        return self._names[st.st_dev, st.st_ino]

    def _path(self, path: str, folder: int | None) -> str:
        return path if path.startswith("/") else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)

    def _add_descriptor(self, found: Footprint, name: str, fd: int) -> None:
        st = os.fstat(fd)
        inode = self._name(st)
        found.reads.update((inode, aspect) for aspect in READS.get(name, ()))
        found.writes.update((inode, aspect) for aspect in WRITES.get(name, ()))
        if name == "close" and st.st_nlink == 0:
            found.writes.add(INODES)

    def _add_path(self, found: Footprint, name: str, path: str, flags: int) -> None:
        if not path.startswith(self._home) or "(deleted)" in path:
            found.unknown = True
            return
        above = os.path.dirname(path)
        while len(above) > len(self._home):
            found.reads.add(above)
            above = os.path.dirname(above)
        try:
            st = os.lstat(path)
        except FileNotFoundError:
            st = None
        if st is not None and stat.S_ISLNK(st.st_mode):
            found.unknown = True
        if name in ("open_fd", "stat", "access", "listdir") and not (st is None and flags & os.O_CREAT):
            found.reads.add(path)
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                found.reads.add(INODES)
            elif name == "listdir":
                found.reads.add((path, "list"))
            elif name != "open_fd" and st is not None:
                found.reads |= {(self._name(st), "content"), (self._name(st), "links"), (path, "list")}
            return
        found.writes |= {path, (os.path.dirname(path), "list")}
        if st is not None:
            found.writes.add((self._name(st), "links"))
            found.reads.add((path, "list"))
        # A new file takes a free number, whoever else takes one. A removal frees one.
        (found.reads if name in MAKERS else found.writes).add(INODES)
