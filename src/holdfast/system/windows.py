"""Windows: LockFileEx on byte ranges, and files that are opened so that they can be deleted.

`lock` is the range below 2**62, so that it excludes the whole-file locks of Rust's `File::lock` and others. A lock
belongs to its handle and ends with it, however the process ends. Windows differs from POSIX in this:

* A handle cannot lock a range that it has locked, and can unlock only exactly what it has locked. So this module
  remembers the ranges of each descriptor, and locking twice is harmless, as with flock.
* Windows does not report who has locked a range. The only way to ask is to try the range for a moment, and two
  processes that ask at once may see each other.
* A blocked LockFileEx cannot be interrupted by Ctrl-C or a deadline. It also goes before all waiters that poll, so that
  a waiter with a deadline might starve. So every waiter polls.
* Locks are mandatory: other processes cannot read or write a locked byte. Ours lie past all content.
* Share modes are locks too: .NET's `FileShare.None` keeps others from opening the file. That is busy, not an error.
* A deleted file keeps its name until the last handle is closed, unless the deletion has POSIX semantics (NTFS since
  Windows 10 1709). Waiters that try to open the name anew would keep each other from it. So `unlink` renames the file
  first where it has to. Where another program has deleted it, `open_fd` tries again.
"""

from __future__ import annotations

import _winapi
import ctypes
import errno
import msvcrt
import os
import struct
import sys
from _thread import get_native_id
from ctypes import wintypes
from time import sleep, time_ns

from .common import *
from .common import _unsupported

assert sys.platform == "win32"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SH, EX, NB, UN = 1, 2, 4, 8
EX_NB, SH_NB = EX | NB, SH | NB

O_DIRECT = 0
O_READ = os.O_RDONLY
O_EXISTING = os.O_RDWR
O_LOCK = O_EXISTING | os.O_CREAT
O_NEW = O_LOCK | os.O_EXCL
O_TMPFILE = 1 << 30  # `open_fd` refuses it
O_FOLDER = O_SYNCABLE_FOLDER = os.O_RDONLY

write, ftruncate, fstat, fsync, fdatasync = os.write, os.ftruncate, os.fstat, os.fsync, os.fsync
stat, access, readlink, listdir, mkdir, rmdir = os.stat, os.access, os.readlink, os.listdir, os.mkdir, os.rmdir
scandir, symlink, lseek, chmod, utime = os.scandir, os.symlink, os.lseek, os.chmod, os.utime
rename = os.replace
chown = mkfifo = mknod = copy_file_range = clone = exchange = link_open_file = sync_file_system = _unsupported
getxattr = setxattr = listxattr = removexattr = Watch = DirectoryWatch = _unsupported
WATCH_WRITING = WATCH_CLOSING = 0

HAS_FIFOS = HAS_FOLDERS = False

# Plus the number of the thread, which is unique on a machine: a byte that only this thread ever locks.
_OWN_BYTE = (1 << 62) + (1 << 40)

_GENERIC_READ, _GENERIC_WRITE, _DELETE = 0x80000000, 0x40000000, 0x00010000
_SHARE_EVERYTHING = 7
_CREATE_NEW, _OPEN_EXISTING, _OPEN_ALWAYS = 1, 3, 4
_OPEN_REPARSE_POINT, _IS_REPARSE_POINT = 0x00200000, 0x400
_INVALID_HANDLE = ctypes.c_void_p(-1).value
_FAIL_IMMEDIATELY, _EXCLUSIVE = 1, 2
_RENAME, _DISPOSITION, _DISPOSITION_EX = 3, 4, 21
_DELETE_WITH_POSIX_SEMANTICS = struct.pack("I", 3)

_ACCESS_DENIED, _END_OF_FILE = 5, 38
_BUSY = (32, 33, 997)  # ERROR_SHARING_VIOLATION, ERROR_LOCK_VIOLATION, ERROR_IO_PENDING
_STATUS_DELETE_PENDING = 0xC0000056
_QUERY_LIMITED_INFORMATION = 0x1000
_EPOCH = 116_444_736_000_000_000  # 1970, in units of 100 ns since 1601

_MAX_DELETION_TRIES = 100
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.016

# The ranges that each descriptor has locked: start and length, and SH or EX.
_locked: dict[int, dict[tuple[int, int], int]] = {}

_kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
_ntdll = ctypes.WinDLL("ntdll")

_HANDLE, _DWORD, _POINTER = wintypes.HANDLE, wintypes.DWORD, ctypes.c_void_p
_kernel32.CreateFileW.restype = _HANDLE
_kernel32.CreateFileW.argtypes = (wintypes.LPCWSTR, _DWORD, _DWORD, _POINTER, _DWORD, _DWORD, _HANDLE)
_kernel32.LockFileEx.argtypes = (_HANDLE, _DWORD, _DWORD, _DWORD, _DWORD, _POINTER)
_kernel32.UnlockFileEx.argtypes = (_HANDLE, _DWORD, _DWORD, _DWORD, _POINTER)
_kernel32.ReadFile.argtypes = _kernel32.WriteFile.argtypes = (_HANDLE, _POINTER, _DWORD, _POINTER, _POINTER)
_kernel32.SetFileInformationByHandle.argtypes = (_HANDLE, ctypes.c_int, _POINTER, _DWORD)
_kernel32.SetFileTime.argtypes = (_HANDLE, _POINTER, _POINTER, _POINTER)
_ntdll.RtlGetLastNtStatus.restype = _DWORD


def _busy(why: str, path: str | None = None) -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, why, path)


def _failure(path: str | None = None) -> OSError:
    """Return the error of the last call."""
    code = ctypes.get_last_error()
    if code in _BUSY:
        return _busy("another program has locked the file, or has opened it without sharing it", path)
    return OSError(0, ctypes.FormatError(code), path, code)


def _open(path: str, access: int, disposition: int) -> int:
    """Return a handle that shares everything and that no child inherits. A symlink at the end is not followed."""
    arguments = path, access, _SHARE_EVERYTHING, None, disposition, _OPEN_REPARSE_POINT, None
    for _ in range(_MAX_DELETION_TRIES):
        handle: int = _kernel32.CreateFileW(*arguments)
        if handle != _INVALID_HANDLE:
            return handle
        status = _ntdll.RtlGetLastNtStatus()  # at once: the next system call overwrites it
        is_denied = ctypes.get_last_error() == _ACCESS_DENIED
        if is_denied and os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not is_denied or status != _STATUS_DELETE_PENDING:
            raise _failure(path)
        sleep(_MIN_PAUSE_S)
    raise _busy("the file is deleted, but another program has it open", path)


def open_fd(path: str, flags: int, mode: int = 0o777, *, dir_fd: None = None) -> int:
    """os.open with sharing. BlockingIOError: another program does not share the file. `mode` has no effect here."""
    if flags & O_TMPFILE:
        _unsupported(path)
    writes = flags & os.O_RDWR
    creates = _CREATE_NEW if flags & os.O_EXCL else _OPEN_ALWAYS
    disposition = creates if flags & os.O_CREAT else _OPEN_EXISTING
    handle = _open(path, _GENERIC_READ | (_GENERIC_WRITE if writes else 0), disposition)
    try:
        fd = msvcrt.open_osfhandle(handle, os.O_NOINHERIT | writes)
    except BaseException:
        _winapi.CloseHandle(handle)
        raise
    if os.fstat(fd).st_file_attributes & _IS_REPARSE_POINT and os.path.islink(path):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return fd


def close(fd: int) -> None:
    _locked.pop(fd, None)
    os.close(fd)


def unlink(path: str, *, dir_fd: None = None) -> None:
    """Delete a file that others may have open. PermissionError: another program does not share the deletion."""
    try:
        handle = _open(path, _DELETE, _OPEN_EXISTING)
        try:
            _delete(handle, path)
        finally:
            _winapi.CloseHandle(handle)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, error.strerror, path) from None


def _delete(handle: int, path: str) -> None:
    if _change(handle, _DISPOSITION_EX, _DELETE_WITH_POSIX_SEMANTICS):
        return
    # Named like a private file of a lock, which `clean` removes if this process is killed before the deletion.
    renamed = _rename(handle, f"{path}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
    if not _change(handle, _DISPOSITION, b"\1"):
        failure = _failure(path)
        if renamed:
            _rename(handle, path)
        raise failure


def _change(handle: int, kind: int, value: bytes) -> bool:
    return bool(_kernel32.SetFileInformationByHandle(handle, kind, value, len(value)))


def _rename(handle: int, path: str) -> bool:
    name = os.path.abspath(path).encode("utf-16-le", "surrogatepass")
    # FILE_RENAME_INFO: do not replace, no root directory, the length of the name, the name.
    return _change(handle, _RENAME, struct.pack("IPI", 0, 0, len(name)) + name + bytes(2))


def read(fd: int, length: int) -> bytes:
    try:
        return os.read(fd, length)
    except PermissionError:
        raise _busy("another program has locked the content") from None


def touch(fd: int) -> None:
    """Set the times of an open file to now. os.utime takes no descriptor here."""
    now = struct.pack("Q", time_ns() // 100 + _EPOCH)
    if not _kernel32.SetFileTime(msvcrt.get_osfhandle(fd), None, now, now):
        raise _failure()


def generation(fd: int) -> int:
    return 0


def _transfer(call: Callable[..., int], fd: int, buffer: ctypes.Array[ctypes.c_char], length: int, offset: int) -> int:
    """Read or write at a position in one call. After a separate seek, another thread might move the position."""
    done = _DWORD()
    if call(msvcrt.get_osfhandle(fd), buffer, length, ctypes.byref(done), _overlapped(offset)):
        return done.value
    if ctypes.get_last_error() == _END_OF_FILE:
        return 0
    raise _failure()


def pread(fd: int, length: int, offset: int) -> bytes:
    buffer = ctypes.create_string_buffer(length)
    done = _transfer(_kernel32.ReadFile, fd, buffer, length, offset)
    return buffer.raw[:done]


def pwrite(fd: int, buffer: bytes, offset: int) -> int:
    return _transfer(_kernel32.WriteFile, fd, ctypes.create_string_buffer(buffer, len(buffer)), len(buffer), offset)


def fchmod(fd: int, mode: int) -> None:
    """Do nothing: a file inherits its permissions from its directory here."""


def link(src: str, dst: str, *, src_dir_fd: None = None, dst_dir_fd: None = None, follow_symlinks: bool = True) -> None:
    """Publish a file under a new name. Here that is a move, so `src` is gone afterwards."""
    try:
        os.rename(src, dst)
    except PermissionError:
        if not os.path.lexists(dst):
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst) from None


def process_exists(pid: int) -> bool:
    try:
        handle = _winapi.OpenProcess(_QUERY_LIMITED_INFORMATION, False, pid)
    except OSError as error:
        return error.winerror == _ACCESS_DENIED
    try:
        return _winapi.GetExitCodeProcess(handle) == _winapi.STILL_ACTIVE
    finally:
        _winapi.CloseHandle(handle)


def _overlapped(start: int) -> ctypes.Array[ctypes.c_char]:
    """An OVERLAPPED structure: Internal, InternalHigh, Offset with OffsetHigh, hEvent."""
    return ctypes.create_string_buffer(struct.pack("PPQP", 0, 0, start, 0))


def _lock_file(fd: int, kind: int, start: int, length: int) -> None:
    flags = _FAIL_IMMEDIATELY | (_EXCLUSIVE if kind == EX else 0)
    low, high = length & 0xFFFFFFFF, length >> 32
    if not _kernel32.LockFileEx(msvcrt.get_osfhandle(fd), flags, 0, low, high, _overlapped(start)):
        raise _failure()


def _unlock_file(fd: int, start: int, length: int) -> None:
    low, high = length & 0xFFFFFFFF, length >> 32
    if not _kernel32.UnlockFileEx(msvcrt.get_osfhandle(fd), 0, low, high, _overlapped(start)):
        raise _failure()


def set_range(fd: int, op: int, start: int, length: int) -> None:
    """Lock or unlock a range. As with flock, another lock of this descriptor on it is lost, even if this one fails."""
    kind, mine = op & ~NB, _locked.setdefault(fd, {})
    if mine.get((start, length)) == kind:
        return
    for own in [own for own in list(mine) if start <= own[0] < start + length]:
        del mine[own]
        _unlock_file(fd, *own)
    if kind != UN:
        _lock_file(fd, kind, start, length)
        mine[start, length] = kind


def lock_removal(fd: int) -> None:
    """Take the right to remove a lock file. BlockingIOError: another process has that right."""
    set_range(fd, EX_NB, REMOVAL_BYTE, 1)


def lock_liveness(fd: int) -> None:
    """Lock the liveness byte of a new file, which no other process has open yet."""
    set_range(fd, EX_NB, LIVENESS_BYTE, 1)


def range_locked(fd: int, start: int, length: int) -> bool:
    """True: another descriptor has a byte of this range locked, or tries it at this moment."""
    try:
        _lock_file(fd, EX, start, length)
    except BlockingIOError:
        return True
    _unlock_file(fd, start, length)
    return False


def _covered(fd: int) -> bool:
    """True: another program has locked the whole file."""
    return range_locked(fd, _OWN_BYTE + get_native_id(), 1)


def lock(fd: int, op: int) -> None:
    """Lock or unlock the file as flock does, by polling."""
    pause = _MIN_PAUSE_S
    while True:
        try:
            return set_range(fd, op, RANGE_START, RANGE_LENGTH)
        except BlockingIOError:
            if op & NB:
                raise
        sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_S)


lock_range = lock


def mark_removal(fd: int) -> None:
    while True:
        try:
            return set_range(fd, SH_NB, REMOVAL_BYTE, 1)
        except BlockingIOError:
            if _covered(fd):
                raise
        sleep(_MIN_PAUSE_S)  # another process tries the byte at this moment


def removal_marked(fd: int) -> bool:
    """True: another descriptor has the removal byte. An own mark would exclude the try, so it is dropped meanwhile."""
    ours = (REMOVAL_BYTE, 1) in _locked.get(fd, ())
    if ours:
        set_range(fd, UN, REMOVAL_BYTE, 1)
    marked = range_locked(fd, REMOVAL_BYTE, 1) and not _covered(fd)
    if ours:
        mark_removal(fd)
    return marked


def slots_taken(fd: int) -> bool:
    """True: another descriptor has a slot. A process that fails because of this try sees the mark and tries again."""
    try:
        mark_removal(fd)
    except BlockingIOError:
        return True
    taken = range_locked(fd, FIRST_SLOT, MAX_SLOTS)
    set_range(fd, UN, REMOVAL_BYTE, 1)
    return taken
