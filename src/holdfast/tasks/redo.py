"""What was promised, in one place: a log of lines that are in the files of tasks, and may not be on disk there.

A task that is put is a file with names in two directories, and to have all of that on disk takes three waits. So the
line that was written is noted here as well, and only that is waited for:

    redo/<boot>.<pid>.<16 hex>    of each process its own: {"task": …, "at": nanoseconds since the boot, "line": {…}}

Nobody reads it before the machine has been started again. Then whoever opens the queue first adds the lines that are
missing to the files of their tasks (`replay`), and what has no place is given one. When it has grown, the whole file
system is synced, and it begins anew; so too before tasks are purged, which would come back otherwise.

Who promises little does without: three waits are soon over, and leave nothing to be tidied up. Nor is it used where
other machines write, whose boots are others, or where a file system cannot be synced as a whole.
"""

from __future__ import annotations

import errno
import json
import os
from threading import RLock
from time import monotonic, monotonic_ns, sleep

from .. import gate, owner, system
from . import journal
from .places import Places, listed, make, remove, sync_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FEW = 3
_LINE = b', "line": '
_BLANK = b"\n" * (1 << 17)
_LARGE = 1 << 20
_MANY_FILES = 16
_PATIENCE, _A_MOMENT = 1.0, 0.001  # seconds


class _File:
    """An open file, closed when nobody uses it any more: others may be waiting for the disk."""

    def __init__(self, folder: str, name: str, mode: int) -> None:
        self.name = name
        self._book = gate.book
        self.fd = system.open_fd(f"{folder}/{name}", system.O_NEW, mode)
        self._book.open_fds.add(self.fd)
        self._end = self._size = 0

    def __del__(self) -> None:
        if hasattr(self, "fd") and self._book is gate.book:  # else a fork has closed it
            self._book.open_fds.discard(self.fd)
            system.close(self.fd)

    def add(self, text: bytes) -> int:
        """Locked. Room is made beforehand, so that syncing it has no size to write down. Gives where it ends."""
        if self._end and not system.pread(self.fd, 1, self._end - 1):  # somebody has emptied it
            self._end = self._size = 0
        try:
            if self._end + len(text) > self._size:
                self._size += system.pwrite(self.fd, _BLANK, self._size)
            if system.pwrite(self.fd, text, self._end) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
        except BaseException:
            system.ftruncate(self.fd, self._end)
            self._size = self._end
            raise
        self._end += len(text)
        return self._end


class Redo:
    """The log of one process."""

    def __init__(self, places: Places, mode: int, *, shared: bool) -> None:
        self._places = places
        self._folder = f"{places.root}/redo"
        self._mode = mode
        self._boot = owner.boot_id()
        self.is_usable = not shared and system.sync_file_system is not None and self._boot is not None
        self._begin()

    def _begin(self) -> None:
        self._mutex = RLock()
        self._book = gate.book
        self._file: _File | None = None
        self._promised = 0

    def promise(self, name: str, line: bytes, file: int, folders: list[str] | None = None) -> None:
        """Have it on disk that this line is in a task's file, which is open. `folders`: that have its first names."""
        if self._book is not gate.book:  # this is a forked child
            self._begin()
        self._promised += 1
        if self.is_usable and self._promised > _FEW:
            self._note(name, line)
        elif folders is not None:
            system.fsync(file)
            sync_folders(self._places.tasks, *folders)
        else:
            system.fdatasync(file)
            if self.is_usable:  # else who put it has done that
                sync_folders(self._places.tasks)

    def _note(self, name: str, line: bytes) -> None:
        head = json.dumps({"task": name, "at": monotonic_ns()}).encode()
        text = b"%s%s%s}\n" % (head[:-1], _LINE, line.strip(b"\n"))
        with self._mutex:
            file = self._lock_own()
            try:
                end = file.add(text)
            finally:
                system.lock(file.fd, system.UN)
        system.fdatasync(file.fd)  # whoever empties it meanwhile has synced everything before
        if end > _LARGE:
            self.forget(only=file.name)

    def _lock_own(self) -> _File:
        """Our own file, locked, so that nobody empties it; made if there is none, or somebody has removed it."""
        while True:
            file = self._file
            if file is None:
                file = self._file = self._make()
            system.lock(file.fd, system.EX)
            if not system.is_removed(file.fd):
                return file
            self._file = None

    def _make(self) -> _File:
        if len(listed(self._folder)) >= _MANY_FILES:
            self.forget()
        make(self._folder)
        file = _File(self._folder, f"{self._boot}.{os.getpid()}.{os.urandom(8).hex()}", self._mode)
        sync_folders(self._folder, self._places.root)
        return file

    def forget(self, only: str | None = None) -> None:
        """Have everything on disk where it belongs, so that nothing of this is needed."""
        if system.sync_file_system is None:
            return
        names = [only] if only is not None else listed(self._folder)
        files: list[tuple[str, int]] = []
        with self._mutex:
            try:
                for name in names:  # in order, as everybody does who wants several
                    fd = self._open_locked(name)
                    if fd >= 0:
                        files.append((name, fd))
                if files:
                    system.sync_file_system(self._places.tasks)
                for name, fd in files:
                    system.ftruncate(fd, 0)
                    system.fsync(fd)  # else it might be there again, and what was purged since is not
                    if name != only:
                        remove(f"{self._folder}/{name}")
            finally:
                for _, fd in files:
                    system.close(fd)

    def _open_locked(self, name: str) -> int:
        """-1: it is gone, or its process has been stopped in the middle of a write."""
        try:
            fd = system.open_fd(f"{self._folder}/{name}", system.O_EXISTING)
        except FileNotFoundError:
            return -1
        until = monotonic() + _PATIENCE
        try:
            while True:
                try:
                    system.lock(fd, system.EX_NB)
                    break
                except BlockingIOError:
                    if monotonic() > until:
                        system.close(fd)
                        return -1
                sleep(_A_MOMENT)
            if system.is_removed(fd):
                system.close(fd)
                return -1
        except BaseException:
            system.close(fd)
            raise
        return fd

    # When the machine was started again.

    def replay(self, place: Callable[[str], object]) -> None:
        """Do what is missing. `place` is told of every task that is concerned."""
        names = (
            [name for name in listed(self._folder) if not name.startswith(f"{self._boot}.")] if self.is_usable else []
        )
        if not names or not system.access(self._folder, os.W_OK):
            return  # or somebody does it who may write
        files: list[tuple[str, int]] = []
        try:
            for name in names:
                fd = self._open_locked(name)
                if fd >= 0:
                    files.append((name, fd))
            for task, lines in _lines(files).items():
                self._restore(task, lines)
                place(task)
            if files:
                assert system.sync_file_system is not None
                system.sync_file_system(self._places.tasks)
            for name, _ in files:
                remove(f"{self._folder}/{name}")
            sync_folders(self._folder)
        finally:
            for _, fd in files:
                system.close(fd)

    def _restore(self, name: str, lines: list[bytes]) -> None:
        own = f"{self._places.tasks}/{name}"
        try:
            fd = system.open_fd(own, system.O_EXISTING)
        except FileNotFoundError:
            if not _begins(lines[0]):
                return  # somebody has removed it
            make(self._places.tasks)
            fd = system.open_fd(own, system.O_NEW, self._mode)
        try:
            text = journal.read(fd)
            if b"\n" not in text.strip(b"\0"):  # nothing of it was on disk
                if not _begins(lines[0]):
                    return
                system.ftruncate(fd, 0)
                text = b""
            there = set(text.split(b"\n"))
            missing = [line for line in lines if line not in there]
            if missing:
                start = b"\n" if text and not text.endswith(b"\n") else b""
                system.pwrite(fd, start + b"\n".join(missing) + b"\n", len(text))
        finally:
            system.close(fd)


def _lines(files: list[tuple[str, int]]) -> dict[str, list[bytes]]:
    """By task, in the order in which they were written, as far as they are whole."""
    boots: dict[str, float] = {}
    found: list[tuple[str, int, str, bytes]] = []
    for name, fd in files:
        boot = name.partition(".")[0]
        boots[boot] = max(boots.get(boot, 0.0), system.fstat(fd).st_mtime)
        for text in filter(None, journal.read(fd).split(b"\n")):
            try:
                said = json.loads(text)
                found.append((boot, said["at"], said["task"], text.partition(_LINE)[2][:-1]))
            except (ValueError, KeyError, TypeError):
                continue  # room, not a whole line, or not ours
    found.sort(key=lambda one: (boots[one[0]], one[1]))
    by_task: dict[str, list[bytes]] = {}
    for _, _, task, line in found:
        by_task.setdefault(task, []).append(line)
    return by_task


def _begins(line: bytes) -> bool:
    """Is it the first line of a task, which says what there is to do?"""
    return b'"payload"' in line and b'"id"' in line
