"""Linux: file events by inotify, and calls that only Linux has."""

from __future__ import annotations

import errno
import os
from struct import Struct as _Struct

from .posix import *

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from ..files import OwnedFd as Owner

_IN_OPEN, _IN_NAMES = 0x20, 0x100 | 0x200 | 0xC0  # names: created, deleted, moved
_IN_ATTRIB, _IN_CLOSE, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x4, 0x18, 0x400, 0x800
_EVENTS = _IN_ATTRIB | _IN_CLOSE | _IN_DELETE_SELF | _IN_MOVE_SELF
WATCH_WRITING = 0x2 | 0x8 | _IN_ATTRIB  # a file is written to
WATCH_CLOSING = 0x8  # a descriptor that could write a file of the directory is closed

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_IN_OVERFLOW, _IN_IGNORED, _IN_ISDIR = 0x4000, 0x8000, 0x40000000
_EVENT = _Struct("iIII")  # watch, events, cookie, length of the name that follows
_BUFFER, _MAX_EVENT = 4096, 272  # bytes

_libc: ctypes.CDLL | None = None
_idle_instances: list[Owner] = []  # of inotify: at most one, except for a moment between two threads


def _call(path: str, function: str, *arguments: object) -> int:
    """Call a function of the C library. An OSError reports its failure."""
    global _libc
    import ctypes  # 2 ms: only a process that waits with a timeout or in an event loop pays for it

    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    try:
        answer: int = getattr(_libc, function)(*arguments)
    except AttributeError:  # an old C library
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path) from None
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return answer


class Watch:
    """`fd` is readable when a process has closed, unlinked or replaced the file at `path`, or died with it open.

    `own` makes the owner of a new descriptor (`files.OwnedFd`). Closing an inotify instance waits for a grace period of
    the kernel: 60 µs to 16 ms were measured, during which the lock just acquired would lie idle. So a process keeps one
    instance from a successful wait to the next one. A wait that ends in any other way closes its instance.
    """

    __slots__ = ("_borrowed", "_events", "_file", "_watched", "fd")

    def __init__(self, path: str, own: Callable[[int], Owner], events: int = 0) -> None:
        self._events = events or _EVENTS
        self._watched = -1
        self._file = _take_idle()
        self._borrowed = self._file is not None
        if self._file is None:
            self._file = own(_call(path, "inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC))
        self.fd = self._file.fd
        try:
            self.move(path)
        except BaseException:
            self.close()
            raise

    def _unwatch(self) -> None:
        if _libc is not None:
            _libc.inotify_rm_watch(self.fd, self._watched)  # it fails if the kernel has removed the watch with its file

    def move(self, path: str) -> None:
        """Watch the file that `path` names now instead."""
        self._unwatch()
        self.drain()  # of a borrowed instance, too: when an earlier wait ended, its caller had the lock
        self._watched = _call(path, "inotify_add_watch", self.fd, os.fsencode(path), self._events)

    def drain(self) -> bool:
        """Take all events off. True: there was one."""
        any_events = False
        try:
            while size := len(read(self.fd, _BUFFER)):
                any_events = True
                if size <= _BUFFER - _MAX_EVENT:  # else the next event may not have fitted in
                    break
        except BlockingIOError:
            pass
        return any_events

    def close(self, *, reuse: bool = False) -> None:
        """`reuse` keeps the instance for the next wait of this process."""
        file, self._file = self._file, None
        if file is None or not file.is_open:
            return
        if (reuse or self._borrowed) and not _idle_instances:
            self._unwatch()
            _idle_instances.append(file)
        else:
            file.close()


class DirectoryWatch:
    """`fd` is readable when a file in one of the directories was opened, written to, closed, created or deleted."""

    __slots__ = ("_file", "_watched", "fd")

    def __init__(self, own: Callable[[int], Owner]) -> None:
        self._file = own(_call("", "inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC))
        self.fd = self._file.fd
        self._watched: dict[int, str] = {}

    def add(self, path: str) -> None:
        """Watch a directory, too. Adding it twice does no harm."""
        events = WATCH_WRITING | _IN_OPEN | _IN_NAMES
        self._watched[_call(path, "inotify_add_watch", self.fd, os.fsencode(path), events)] = path

    def read(self) -> tuple[set[str], set[str]]:
        """Take all events off. Return the directories with changes, and those where a file was only opened."""
        changed: set[str] = set()
        opened: set[str] = set()
        try:
            while data := read(self.fd, 1 << 16):
                while data:
                    number, events, _, length = _EVENT.unpack_from(data)
                    data = data[_EVENT.size + length :]
                    path = self._watched.get(number)
                    if events & _IN_OVERFLOW:
                        changed.update(self._watched.values())
                    elif events & _IN_IGNORED and path is not None:  # the directory is gone
                        del self._watched[number]
                        changed.add(path)
                    elif path is not None and events != _IN_OPEN | _IN_ISDIR:  # a directory was listed
                        (opened if events & _IN_OPEN else changed).add(path)
        except BlockingIOError:
            pass
        return changed, opened

    def watches(self, path: str) -> bool:
        return path in self._watched.values()

    def close(self) -> None:
        self._file.close()


def _take_idle() -> Owner | None:
    """Return the instance that an earlier wait has left, unless a fork has closed it."""
    try:
        while not (file := _idle_instances.pop()).is_open:
            pass
    except IndexError:
        return None
    return file


def exchange(one: str, other: str, folder: int | None) -> None:
    """Exchange the names of two files in one step."""
    at = _AT_FDCWD if folder is None else folder
    _call(one, "renameat2", at, os.fsencode(one), at, os.fsencode(other), _RENAME_EXCHANGE)


def link_open_file(fd: int, folder: int | None, name: str) -> None:
    """Link a file that was opened with O_TMPFILE to a name."""
    # The source path is absolute, so its directory does not matter. Without one, Python does not follow the link.
    link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd, dst_dir_fd=folder, follow_symlinks=True)


def sync_file_system(fd: int) -> None:
    """Wait until all data of the file system of an open file is on disk."""
    _call("", "syncfs", fd)
