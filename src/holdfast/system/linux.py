"""Linux: wake-ups by inotify, and what /proc says about mounts and holders."""

from __future__ import annotations

import errno
import os
from fcntl import ioctl as _ioctl

from .posix import *

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from ..files import OwnedFd as Owner

_IN_ATTRIB, _IN_CLOSE, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x4, 0x18, 0x400, 0x800
_EVENTS = _IN_ATTRIB | _IN_CLOSE | _IN_DELETE_SELF | _IN_MOVE_SELF
WATCH_WRITING = 0x2 | 0x8 | _IN_ATTRIB  # a file is written to
WATCH_CLOSING = 0x8  # in a directory, a file is closed by one who could have written it

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2

_BUFFER, _MAX_EVENT = 4096, 272  # bytes: one event with the longest name
_FICLONE = 0x40049409
_GETVERSION = 0x80087601

_libc: ctypes.CDLL | None = None
_idle_instances: list[Owner] = []


def _load_libc() -> ctypes.CDLL:
    global _libc
    if _libc is None:
        import ctypes  # 2 ms: only a process that waits with a timeout or in an event loop pays for it

        _libc = ctypes.CDLL(None, use_errno=True)
    return _libc


def _last_error(path: str) -> OSError:
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


class Watch:
    """`fd` is readable when a process has closed, unlinked or replaced the file at `path`, or died with it open.

    `own` makes the owner of a new descriptor (`files.OwnedFd`). Closing an inotify instance waits for a grace period of
    the kernel: 60 µs to 16 ms were measured, during which the lock just acquired would lie idle. So a process keeps one
    instance from a successful wait to the next one; a wait that ends in any other way closes its instance.
    """

    __slots__ = ("_borrowed", "_events", "_file", "_watched", "fd")

    def __init__(self, path: str, own: Callable[[int], Owner], events: int = _EVENTS) -> None:
        self._events = events
        self._watched = -1
        self._borrowed = True
        self._file = _take_idle()
        if self._file is None:
            self._borrowed = False
            self._file = own(_new_instance(path))
        self.fd = self._file.fd
        try:
            self._watch(path)
        except BaseException:
            self.close()
            raise

    def _watch(self, path: str) -> None:
        self._watched = _load_libc().inotify_add_watch(self.fd, os.fsencode(path), self._events)
        if self._watched < 0:
            raise _last_error(path)

    def move(self, path: str) -> None:
        """Watch what `path` names now instead."""
        _load_libc().inotify_rm_watch(self.fd, self._watched)
        self.drain()  # that the old watch is gone is no news
        self._watch(path)

    def drain(self) -> bool:
        """Take the events off. True: there was one."""
        any_news = False
        try:
            size = _BUFFER
            while size > _BUFFER - _MAX_EVENT:  # else the kernel had no more
                size = len(read(self.fd, _BUFFER))
                any_news = True
        except BlockingIOError:
            pass
        return any_news

    def close(self, *, reuse: bool = False) -> None:
        file, self._file = self._file, None
        if file is None or not file.is_open:
            return
        if (reuse or self._borrowed) and not _idle_instances:
            if self._watched >= 0:
                _load_libc().inotify_rm_watch(self.fd, self._watched)
            self.drain()
            _idle_instances.append(file)
        else:
            file.close()


def _new_instance(path: str) -> int:
    fd: int = _load_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _last_error(path)
    return fd


def _take_idle() -> Owner | None:
    """The instance that an earlier wait has left, unless a fork has closed it."""
    while _idle_instances:
        try:
            file = _idle_instances.pop()
        except IndexError:
            break
        if file.is_open:
            return file
    return None


def exchange(one: str, other: str, folder: int | None) -> None:  # type: ignore[no-redef]
    """Let two files exchange their names, in one step."""
    _renameat2(one, other, _AT_FDCWD if folder is None else folder, _RENAME_EXCHANGE)


def rename_new(one: str, other: str) -> None:  # type: ignore[no-redef]
    """Rename, and fail with FileExistsError where the name is taken."""
    _renameat2(one, other, _AT_FDCWD, _RENAME_NOREPLACE)


def _renameat2(one: str, other: str, at: int, flags: int) -> None:
    libc = _load_libc()
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one)
    if libc.renameat2(at, os.fsencode(one), at, os.fsencode(other), flags):
        raise _last_error(one)


def generation(fd: int) -> int:  # type: ignore[no-redef]
    """A number of the file with this inode number that the next one does not have; 0 where there is none."""
    try:
        return int.from_bytes(_ioctl(fd, _GETVERSION, bytes(8))[:4], "little")
    except OSError:
        return 0


TELLS_NAMES = True


def name_of_open(fd: int) -> str:  # type: ignore[no-redef]
    """The name that the open file has now. (Not by fstat: see `is_removed`.)"""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # there is no /proc
        st = os.fstat(fd)
        return f"{st.st_dev} {st.st_ino} {st.st_nlink > 0}"


def is_removed(fd: int) -> bool:  # type: ignore[no-redef]
    """Has the file no name any more?

    Where fstat has told the time of the last change (Linux 6.13 on), the next write has to note another one, and
    syncing that to an ext4 without a journal takes one more write to the disk.
    """
    try:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")
    except FileNotFoundError:  # there is no /proc
        return os.fstat(fd).st_nlink == 0


def _sync_file_system(path: str) -> None:
    """Wait until everything on the file system of `path` is on disk."""
    fd = os.open(path, O_READ)
    try:
        if _load_libc().syncfs(fd):
            raise _last_error(path)
    finally:
        os.close(fd)


sync_file_system = _sync_file_system


def clone(reader: int, writer: int) -> None:  # type: ignore[no-redef]
    _ioctl(writer, _FICLONE, reader)


def read_text(path: str) -> str:  # type: ignore[no-redef]
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="surrogateescape")
    except OSError:
        return ""


def list_pids() -> list[int]:  # type: ignore[no-redef]
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def mount_table() -> str:  # type: ignore[no-redef]
    return read_text("/proc/self/mountinfo")
