"""Windows: LockFileEx on byte ranges, and files that are opened so that they can be deleted.

The positions of the ranges are those of `posix`; `lock` is the range below 2**62, so that it meets the whole-file locks
that Rust's `File::lock` and others take. Where Windows differs, this module makes up for it:

* A range that a handle has locked cannot be locked by it again, and only exactly what was locked can be unlocked. So
  we remember what each descriptor has locked, and asking twice is harmless, as with flock.
* Nobody can ask who has a range. The removal byte is looked at by trying it, and looking can meet looking.
* A blocked LockFileEx hears neither Ctrl-C nor a deadline, and whoever is blocked goes before everybody who polls,
  so that a waiter with a deadline might starve. So everybody polls.
* Locks are mandatory: a locked byte cannot be read or written by others. Ours lie past all content.
* Share modes are locks too: .NET's `FileShare.None` keeps others from opening the file. That is busy, not an error.
* A deleted file keeps its name until the last handle is closed, unless the deletion has POSIX semantics (NTFS since
  Windows 10 1709). Processes that all try to replace a deleted file would keep it, and its name, open for each other.
  So `unlink` renames the file first where it has to. Other programs do not: an open is refused then, and tried again.

Locks belong to the handle and go with it, however its process ends.
"""

from __future__ import annotations

import ctypes
import errno
import msvcrt
import os
import sys
from _thread import get_native_id
from ctypes import wintypes
from time import sleep

assert sys.platform == "win32"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SH, EX, NB, UN = 1, 2, 4, 8
EX_NB, SH_NB = EX | NB, SH | NB

O_DIRECT = 0  # there is none here
O_READ = os.O_RDONLY
O_EXISTING = os.O_RDWR
O_LOCK = O_EXISTING | os.O_CREAT
O_NEW = O_LOCK | os.O_EXCL
O_TMPFILE = 1 << 30  # not known here, and refused by `open_fd`
O_FOLDER = O_SYNCABLE_FOLDER = os.O_RDONLY

fstat = os.fstat
stat = os.stat
access = os.access
listdir = os.listdir
mkdir = os.mkdir
rmdir = os.rmdir
write = os.write
fsync = os.fsync
fdatasync = os.fsync
sync_file_system = None
ftruncate = os.ftruncate

HAS_FIFOS = False
HAS_FOLDERS = False

RANGE_START, RANGE_LENGTH = 0, 1 << 62
REMOVAL_BYTE = 1 << 62
LIVENESS_BYTE = REMOVAL_BYTE + 1
FIRST_SLOT, MAX_SLOTS = (1 << 62) + 16, 1 << 20
# Plus the number of the thread, which is unique on a machine: where nobody but that thread ever locks anything.
_OWN_BYTE = (1 << 62) + (1 << 40)

_LOCK, _MARK, _SLOT, _ALIVE = "lock", "mark", "slot", "alive"

_GENERIC_READ, _GENERIC_WRITE, _DELETE = 0x80000000, 0x40000000, 0x00010000
_SHARE_EVERYTHING = 7
_CREATE_NEW, _OPEN_EXISTING, _OPEN_ALWAYS = 1, 3, 4
_OPEN_REPARSE_POINT, _IS_REPARSE_POINT = 0x00200000, 0x400
_INVALID_HANDLE = ctypes.c_void_p(-1).value
_FAIL_IMMEDIATELY, _EXCLUSIVE = 1, 2
_RENAME, _DISPOSITION, _DISPOSITION_EX = 3, 4, 21
_DELETE_WITH_POSIX_SEMANTICS = 3

_ACCESS_DENIED, _SHARING_VIOLATION = 5, 32
_END_OF_FILE = 38
_BUSY = (33, 997)  # ERROR_LOCK_VIOLATION, ERROR_IO_PENDING
_STATUS_DELETE_PENDING = 0xC0000056
_QUERY_LIMITED_INFORMATION, _STILL_ACTIVE = 0x1000, 259

_MAX_PATH = 1024  # of a file that is renamed before it is deleted
_MAX_DELETION_TRIES = 100
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.016

# Descriptor: what it has locked, as kind, start and length.
_locked: dict[int, dict[str, tuple[int, int, int]]] = {}


class _Overlapped(ctypes.Structure):
    _fields_ = (
        ("Internal", ctypes.c_void_p),
        ("InternalHigh", ctypes.c_void_p),
        ("Offset", wintypes.DWORD),
        ("OffsetHigh", wintypes.DWORD),
        ("hEvent", wintypes.HANDLE),
    )


class _Renaming(ctypes.Structure):
    _fields_ = (
        ("ReplaceIfExists", wintypes.DWORD),
        ("RootDirectory", wintypes.HANDLE),
        ("FileNameLength", wintypes.DWORD),
        ("FileName", wintypes.WCHAR * _MAX_PATH),
    )


_kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
_ntdll = ctypes.WinDLL("ntdll")

_HANDLE, _DWORD, _POINTER = wintypes.HANDLE, wintypes.DWORD, ctypes.c_void_p
_kernel32.CreateFileW.restype = _HANDLE
_kernel32.CreateFileW.argtypes = (wintypes.LPCWSTR, _DWORD, _DWORD, _POINTER, _DWORD, _DWORD, _HANDLE)
_kernel32.CloseHandle.argtypes = (_HANDLE,)
_kernel32.LockFileEx.argtypes = (_HANDLE, _DWORD, _DWORD, _DWORD, _DWORD, _POINTER)
_kernel32.UnlockFileEx.argtypes = (_HANDLE, _DWORD, _DWORD, _DWORD, _POINTER)
_kernel32.ReadFile.argtypes = (_HANDLE, _POINTER, _DWORD, _POINTER, _POINTER)
_kernel32.WriteFile.argtypes = (_HANDLE, _POINTER, _DWORD, _POINTER, _POINTER)
_kernel32.SetFileInformationByHandle.argtypes = (_HANDLE, ctypes.c_int, _POINTER, _DWORD)
_kernel32.GetSystemTimeAsFileTime.argtypes = (_POINTER,)
_kernel32.SetFileTime.argtypes = (_HANDLE, _POINTER, _POINTER, _POINTER)
_kernel32.OpenProcess.restype = _HANDLE
_kernel32.OpenProcess.argtypes = (_DWORD, wintypes.BOOL, _DWORD)
_kernel32.GetExitCodeProcess.argtypes = (_HANDLE, _POINTER)
_ntdll.RtlGetLastNtStatus.restype = _DWORD


def _error(code: int, path: str | None = None) -> OSError:
    return OSError(0, ctypes.FormatError(code), path, code)


def _busy(why: str, path: str | None = None) -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, why, path)


def _open(path: str, access: int, disposition: int) -> int:
    """A handle that shares everything and that no child inherits. A link at the end of the path is not followed."""
    for _ in range(_MAX_DELETION_TRIES):
        handle: int = _kernel32.CreateFileW(
            path, access, _SHARE_EVERYTHING, None, disposition, _OPEN_REPARSE_POINT, None
        )
        if handle != _INVALID_HANDLE:
            return handle
        code = ctypes.get_last_error()
        if code == _SHARING_VIOLATION:
            raise _busy("opened by a program that does not share it", path)
        if code != _ACCESS_DENIED:
            raise _error(code, path)
        status = _ntdll.RtlGetLastNtStatus()  # at once: the next system call overwrites it
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if status != _STATUS_DELETE_PENDING:
            raise _error(code, path)
        sleep(_MIN_PAUSE_S)
    raise _busy("deleted, and still open somewhere", path)


def open_fd(path: str, flags: int, mode: int = 0o777, *, dir_fd: None = None) -> int:
    """os.open with sharing. BlockingIOError: somebody has it open for itself alone. `mode` means nothing here."""
    if flags & O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
    writes = flags & os.O_RDWR
    disposition = _OPEN_EXISTING
    if flags & os.O_CREAT:
        disposition = _CREATE_NEW if flags & os.O_EXCL else _OPEN_ALWAYS
    access = _GENERIC_READ | (_GENERIC_WRITE if writes else 0)
    handle = _open(path, access, disposition)
    try:
        fd = msvcrt.open_osfhandle(handle, os.O_NOINHERIT | writes)
    except BaseException:
        _kernel32.CloseHandle(handle)
        raise
    if os.fstat(fd).st_file_attributes & _IS_REPARSE_POINT and os.path.islink(path):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return fd


def close(fd: int) -> None:
    _locked.pop(fd, None)
    os.close(fd)


def unlink(path: str, *, dir_fd: None = None) -> None:
    """Delete a file that others may have open. PermissionError: one of them does not share the deletion."""
    try:
        handle = _open(path, _DELETE, _OPEN_EXISTING)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, error.strerror, path) from None
    try:
        if _change(handle, _DISPOSITION_EX, _DWORD(_DELETE_WITH_POSIX_SEMANTICS)):
            return
        # Named like a private file of a lock, which `clean` removes if this process is killed before the deletion.
        renamed = _rename(handle, f"{path}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
        if not _change(handle, _DISPOSITION, ctypes.c_ubyte(1)):
            code = ctypes.get_last_error()
            if renamed:
                _rename(handle, path)
            raise _error(code, path)
    finally:
        _kernel32.CloseHandle(handle)


def _change(handle: int, kind: int, value: ctypes.Structure | ctypes._SimpleCData[int]) -> bool:
    return bool(_kernel32.SetFileInformationByHandle(handle, kind, ctypes.byref(value), ctypes.sizeof(value)))


def _rename(handle: int, path: str) -> bool:
    path = os.path.abspath(path)
    length = len(path.encode("utf-16-le", "surrogatepass"))
    return length <= 2 * _MAX_PATH and _change(handle, _RENAME, _Renaming(0, None, length, path))


def read(fd: int, length: int) -> bytes:
    try:
        return os.read(fd, length)
    except PermissionError:
        raise _busy("another program has the content locked") from None


def touch(path: str | int) -> None:
    """Set the times of a file, given by its name or its descriptor, to now. os.utime takes no descriptor here."""
    if isinstance(path, str):
        os.utime(path)
        return
    now = wintypes.FILETIME()
    _kernel32.GetSystemTimeAsFileTime(ctypes.byref(now))
    if not _kernel32.SetFileTime(msvcrt.get_osfhandle(path), None, ctypes.byref(now), ctypes.byref(now)):
        raise _error(ctypes.get_last_error())


def _transfer(call: Callable[..., int], fd: int, buffer: ctypes.Array[ctypes.c_char], length: int, offset: int) -> int:
    """Read or write at a position in one call: with a seek before it, threads would read and write anywhere."""
    done = _DWORD()
    if call(msvcrt.get_osfhandle(fd), buffer, length, ctypes.byref(done), _overlapped(offset)):
        return done.value
    code = ctypes.get_last_error()
    if code == _END_OF_FILE:
        return 0
    raise _busy("another program has the content locked") if code in _BUSY else _error(code)


def pread(fd: int, length: int, offset: int) -> bytes:
    buffer = ctypes.create_string_buffer(length)
    done = _transfer(_kernel32.ReadFile, fd, buffer, length, offset)
    return buffer.raw[:done]


def pwrite(fd: int, buffer: bytes, offset: int) -> int:
    return _transfer(_kernel32.WriteFile, fd, ctypes.create_string_buffer(buffer, len(buffer)), len(buffer), offset)


def fchmod(fd: int, mode: int) -> None:
    """Who may read a file is inherited from its directory here."""


def link(
    src: str,
    dst: str,
    *,
    src_dir_fd: None = None,
    dst_dir_fd: None = None,
    follow_symlinks: bool = True,
) -> None:
    """Publish a whole file under a name that must be free. Here that is a move, so `src` is gone afterwards."""
    rename_new(src, dst)


def rename_new(one: str, other: str) -> None:
    """Rename, and fail with FileExistsError where the name is taken."""
    try:
        os.rename(one, other)
    except PermissionError:
        if not os.path.lexists(other):
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other) from None


def rename(src: str, dst: str, *, src_dir_fd: None = None, dst_dir_fd: None = None) -> None:
    os.replace(src, dst)


def link_open_file(fd: int, folder: int | None, name: str) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)


def exchange(one: str, other: str, folder: int | None) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), one)


def clone(reader: int, writer: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def process_exists(pid: int) -> bool:
    handle = _kernel32.OpenProcess(_QUERY_LIMITED_INFORMATION, False, pid)
    if not handle:
        return int(ctypes.get_last_error()) == _ACCESS_DENIED
    try:
        code = _DWORD()
        return not _kernel32.GetExitCodeProcess(handle, ctypes.byref(code)) or code.value == _STILL_ACTIVE
    finally:
        _kernel32.CloseHandle(handle)


def mkfifo(path: str, mode: int = 0o666, *, dir_fd: None = None) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)


def _overlapped(start: int) -> ctypes._CArgObject:
    return ctypes.byref(_Overlapped(Offset=start & 0xFFFFFFFF, OffsetHigh=start >> 32))


def _lock_file(fd: int, kind: int, start: int, length: int) -> None:
    flags = _FAIL_IMMEDIATELY | (_EXCLUSIVE if kind == EX else 0)
    low, high = length & 0xFFFFFFFF, length >> 32
    if not _kernel32.LockFileEx(msvcrt.get_osfhandle(fd), flags, 0, low, high, _overlapped(start)):
        code = ctypes.get_last_error()
        raise _busy("busy") if code in _BUSY else _error(code)


def _unlock_file(fd: int, start: int, length: int) -> None:
    low, high = length & 0xFFFFFFFF, length >> 32
    if not _kernel32.UnlockFileEx(msvcrt.get_osfhandle(fd), 0, low, high, _overlapped(start)):
        raise _error(ctypes.get_last_error())


def _range(fd: int, op: int, purpose: str, start: int, length: int) -> None:
    mine = _locked.setdefault(fd, {})
    have, want = mine.get(purpose), (op & ~NB, start, length)
    if have == want:
        return
    if have is not None:  # as with flock, what one had is lost even if the other cannot be had
        del mine[purpose]
        _unlock_file(fd, *have[1:])
    if op != UN:
        _lock_file(fd, *want)
        mine[purpose] = want


def _try_range(fd: int, purpose: str, start: int, length: int) -> bool:
    try:
        _range(fd, EX_NB, purpose, start, length)
    except BlockingIOError:
        return False
    return True


def _is_free(fd: int, byte: int) -> bool:
    try:
        _lock_file(fd, EX, byte, 1)
    except BlockingIOError:
        return False
    _unlock_file(fd, byte, 1)
    return True


def _covered(fd: int) -> bool:
    """Is there a lock on everything? That is another program's."""
    return not _is_free(fd, _OWN_BYTE + get_native_id())


def lock(fd: int, op: int) -> None:
    pause = _MIN_PAUSE_S
    while True:
        try:
            return _range(fd, op, _LOCK, RANGE_START, RANGE_LENGTH)
        except BlockingIOError:
            if op & NB:
                raise
        sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_S)


lock_range = lock
lock_past_end = lock


TELLS_NAMES = False


def name_of_open(fd: int) -> str:
    return ""


def generation(fd: int) -> int:
    """There is none here."""
    return 0


def is_removed(fd: int) -> bool:
    """Has the file no name any more?"""
    return fstat(fd).st_nlink == 0


def range_taken(fd: int) -> bool:
    """Has anybody else got what `lock` takes? Asked by taking it."""
    try:
        lock(fd, EX_NB)
    except BlockingIOError:
        return True
    lock(fd, UN)
    return False


def mark_removal(fd: int) -> None:
    while True:
        try:
            return _range(fd, SH_NB, _MARK, REMOVAL_BYTE, 1)
        except BlockingIOError:
            if _covered(fd):
                raise
        sleep(_MIN_PAUSE_S)  # another process reads the mark at this moment


def unmark_removal(fd: int) -> None:
    _range(fd, UN, _MARK, REMOVAL_BYTE, 1)


def removal_marked(fd: int) -> bool:
    """Has another descriptor the removal byte? Asked by trying it, which our own mark would prevent."""
    ours = _MARK in _locked.get(fd, ())
    if ours:
        unmark_removal(fd)
    marked = not _is_free(fd, REMOVAL_BYTE) and not _covered(fd)
    if ours:
        mark_removal(fd)
    return marked


def lock_removal(fd: int) -> None:
    """Take the right to remove a lock file. BlockingIOError: somebody else has it."""
    _range(fd, EX_NB, _MARK, REMOVAL_BYTE, 1)


def lock_liveness(fd: int) -> None:
    _range(fd, EX_NB, _ALIVE, LIVENESS_BYTE, 1)


def liveness_locked(fd: int) -> bool:
    """Asked by trying it. Two who ask at once may each take the other for the holder, and ask again later."""
    return not _is_free(fd, LIVENESS_BYTE)


def try_slot(fd: int, slot: int) -> bool:
    return _try_range(fd, _SLOT, FIRST_SLOT + slot, 1)


def slots_taken(fd: int) -> bool:
    """Has anybody else a slot? Asked by taking all for a moment, with the mark that lets others try again."""
    try:
        mark_removal(fd)
    except BlockingIOError:
        return True
    taken = not _try_range(fd, _SLOT, FIRST_SLOT, MAX_SLOTS)
    unlock_slots(fd)
    unmark_removal(fd)
    return taken


def slot_taken(fd: int, slot: int) -> bool:
    """Has another descriptor this slot? Asked by trying it."""
    return not _is_free(fd, FIRST_SLOT + slot)


def unlock_slots(fd: int) -> None:
    """Let go of what this descriptor has, be it one slot or all."""
    _range(fd, UN, _SLOT, FIRST_SLOT, MAX_SLOTS)


def lock_byte(fd: int, at: int) -> bool:
    return _try_range(fd, f"byte {at}", at, 1)


def unlock_byte(fd: int, at: int) -> None:
    _range(fd, UN, f"byte {at}", at, 1)


WATCH_WRITING = WATCH_CLOSING = 0


class Watch:
    """There is none: Windows tells nobody that a range was unlocked. Waits look again after ever longer pauses."""

    fd: int

    def __init__(self, path: str, own: object, events: int = 0) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

    def move(self, path: str) -> None: ...

    def drain(self) -> bool:
        return False

    def close(self, *, reuse: bool = False) -> None: ...


def read_text(path: str) -> str:
    """There is no /proc here."""
    return ""


def list_pids() -> list[int]:
    return []


def mount_table() -> str:
    return ""
