"""What Linux and macOS share: files, flock, open-file-description ranges, FIFOs."""

from __future__ import annotations

import errno
import fcntl
import os
import posix as unpatched
import struct
import sys

from .common import *
from .common import _unsupported

EX, SH, NB, UN = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB, fcntl.LOCK_UN
EX_NB, SH_NB = EX | NB, SH | NB

# O_NOFOLLOW: Holdfast resolves a symlink at the end of a path itself, so that it never unlinks the symlink.
_O_COMMON = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
O_EXISTING = os.O_RDWR | _O_COMMON
O_DIRECT = getattr(os, "O_DIRECT", 0)  # read from the disk or server, not from the cache
O_READ = os.O_RDONLY | _O_COMMON
O_LOCK = O_EXISTING | os.O_CREAT
O_NEW = O_LOCK | os.O_EXCL
O_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
O_SYNCABLE_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Where there is no O_TMPFILE, these flags open a directory for writing: EISDIR, as on file systems without it.
O_TMPFILE = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", os.O_DIRECTORY)

HAS_FIFOS = hasattr(os, "mkfifo")
HAS_FOLDERS = True

open_fd, close = os.open, os.close
# Not those of os: eventlet replaces them by functions that wait where these raise BlockingIOError.
read, write = unpatched.read, unpatched.write
pread, pwrite, ftruncate, fstat, fchmod = os.pread, os.pwrite, os.ftruncate, os.fstat, os.fchmod
lseek, chmod, chown, utime = os.lseek, os.chmod, os.chown, os.utime
fsync, fdatasync = os.fsync, getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
stat, access, readlink, unlink, rename = os.stat, os.access, os.readlink, os.unlink, os.rename
listdir, scandir, mkdir, rmdir, symlink, mknod = os.listdir, os.scandir, os.mkdir, os.rmdir, os.symlink, os.mknod
link = getattr(os, "link", _unsupported)  # Python on Android has none
mkfifo = getattr(os, "mkfifo", _unsupported)
copy_file_range = getattr(os, "copy_file_range", _unsupported)  # macOS has none, and no such extended attributes
getxattr, setxattr = getattr(os, "getxattr", _unsupported), getattr(os, "setxattr", _unsupported)
listxattr, removexattr = getattr(os, "listxattr", _unsupported), getattr(os, "removexattr", _unsupported)
lock = fcntl.flock

_KINDS = {SH: fcntl.F_RDLCK, EX: fcntl.F_WRLCK, UN: fcntl.F_UNLCK}

_FICLONE, _GETVERSION = 0x40049409, 0x80087601

# F_OFD_SETLK, F_OFD_SETLKW and F_OFD_GETLK as numbers, because not every Python names them; and struct flock.
if sys.platform == "darwin":
    _SETLK, _SETLKW, _GETLK = 90, 91, 92  # <sys/fcntl.h>
    _FLOCK, _KIND, _START, _LENGTH = struct.Struct("qqihh"), 3, 0, 1
else:
    _SETLK, _SETLKW, _GETLK = 37, 38, 36  # <asm-generic/fcntl.h>, the same on every processor
    _FLOCK, _KIND, _START, _LENGTH = struct.Struct("hhqqi"), 0, 2, 3


def _pack(kind: int, start: int, length: int) -> bytes:
    """Return a struct flock, with 0 for pid and whence."""
    if sys.platform == "darwin":
        return _FLOCK.pack(start, length, 0, kind, 0)
    return _FLOCK.pack(kind, 0, start, length, 0)


def _set(fd: int, command: int, flock: bytes) -> None:
    try:
        fcntl.fcntl(fd, command, flock)
    except PermissionError:  # CIFS reports busy as EACCES
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None


def set_range(fd: int, op: int, start: int, length: int) -> None:
    """Lock or unlock a byte range, as `lock` does the whole file."""
    _set(fd, _SETLK if op & NB else _SETLKW, _pack(_KINDS[op & ~NB], start, length))


# Packed once: that saves 6 % of the instructions of a lock file.
_REMOVAL, _LIVENESS = (_pack(fcntl.F_WRLCK, byte, 1) for byte in (REMOVAL_BYTE, LIVENESS_BYTE))


def lock_removal(fd: int) -> None:
    """Take the right to remove a lock file. BlockingIOError: another process has that right."""
    _set(fd, _SETLK, _REMOVAL)


def lock_liveness(fd: int) -> None:
    """Lock the liveness byte of a new file, which no other process has open yet."""
    fcntl.fcntl(fd, _SETLK, _LIVENESS)


def _conflict(fd: int, start: int, length: int) -> tuple[int, int, int]:
    """Return the kind, start and length of a lock that excludes an exclusive one on this range."""
    found = _FLOCK.unpack(fcntl.fcntl(fd, _GETLK, _pack(fcntl.F_WRLCK, start, length)))
    return found[_KIND], found[_START], found[_LENGTH]


def range_locked(fd: int, start: int, length: int) -> bool:
    """True: another descriptor has a byte of this range locked."""
    return _conflict(fd, start, length)[0] != fcntl.F_UNLCK


def lock_range(fd: int, op: int) -> None:
    """Do what `lock` does with a byte range, for file systems whose flock does not reach the other machines."""
    set_range(fd, op, RANGE_START, RANGE_LENGTH)


def mark_removal(fd: int) -> None:
    """Announce a removal. It is a read lock: several processes may have it, also with a read-only descriptor."""
    set_range(fd, SH_NB, REMOVAL_BYTE, 1)


def removal_marked(fd: int) -> bool:
    """True: another process is about to remove the file. Another tool's lock on the whole file is no mark."""
    kind, *span = _conflict(fd, REMOVAL_BYTE, 1)
    return kind != fcntl.F_UNLCK and span == [REMOVAL_BYTE, 1]


def slots_taken(fd: int) -> bool:
    """True: another descriptor has a slot locked."""
    return range_locked(fd, FIRST_SLOT, MAX_SLOTS)


def touch(fd: int) -> None:
    """Set the times of an open file to now."""
    os.utime(fd)


def clone(reader: int, writer: int) -> None:
    """Make a new file share the blocks of another file until either is written to. Only Linux can."""
    fcntl.ioctl(writer, _FICLONE, reader)


def generation(fd: int) -> int:
    """Return a number that differs between two files with the same inode number; 0 where there is none."""
    try:
        return int.from_bytes(fcntl.ioctl(fd, _GETVERSION, bytes(8))[:4], "little")
    except OSError:
        return 0


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return False
    return pid > 0  # 0 and below mean process groups to kill(2)
