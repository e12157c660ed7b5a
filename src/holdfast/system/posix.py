"""What Linux and macOS share: files, flock, open-file-description ranges, FIFOs.

Positions of the byte ranges, all far past any content and below 2**63 (docs/formats.md):

    0 … 2**62 - 1     the lock itself, where ranges stand in for flock (NFS, CIFS)
    2**62             the removal byte: whoever has it may remove the file, or is about to
    2**62 + 1         the liveness byte: locked as long as the process that holds a lock file lives
    2**62 + 16 + n    slot n of a semaphore
"""

from __future__ import annotations

import errno
import fcntl
import os
import posix as unpatched
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

EX, SH, NB, UN = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB, fcntl.LOCK_UN
EX_NB, SH_NB = EX | NB, SH | NB

# O_NOFOLLOW: we resolve a symlink at the end ourselves, so that we never unlink the link instead of its target.
_O_COMMON = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
O_EXISTING = os.O_RDWR | _O_COMMON
O_DIRECT = getattr(os, "O_DIRECT", 0)  # past what this machine remembers of a file
O_READ = os.O_RDONLY | _O_COMMON
O_LOCK = O_EXISTING | os.O_CREAT
O_NEW = O_LOCK | os.O_EXCL
O_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
O_SYNCABLE_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without it, a directory opened for writing: EISDIR, as where the file system does not know it.
O_TMPFILE = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", os.O_DIRECTORY)


def _unsupported(path: str, *_: object, **__: object) -> NoReturn:
    """Stands in for a system call that this Python does not have."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)


open_fd = os.open
close = os.close
fstat = os.fstat
stat = os.stat
unlink = os.unlink
access = os.access
listdir = os.listdir
mkdir = os.mkdir
rmdir = os.rmdir
mkfifo = getattr(os, "mkfifo", _unsupported)
link = getattr(os, "link", _unsupported)  # Python on Android has none
rename = os.rename
# Not those of os: eventlet replaces them by ones that wait where these raise BlockingIOError.
read = unpatched.read
write = unpatched.write
pread = os.pread
pwrite = os.pwrite
fsync = os.fsync
fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has none
ftruncate = os.ftruncate
fchmod = os.fchmod
sync_file_system: Callable[[str], None] | None = None  # all at once, where that can be asked for
lock = fcntl.flock

HAS_FIFOS = hasattr(os, "mkfifo")
HAS_FOLDERS = True  # directories can be opened, and worked from

RANGE_START, RANGE_LENGTH = 0, 1 << 62
REMOVAL_BYTE = 1 << 62
LIVENESS_BYTE = REMOVAL_BYTE + 1
FIRST_SLOT, MAX_SLOTS = (1 << 62) + 16, 1 << 20

_KINDS = {SH: fcntl.F_RDLCK, EX: fcntl.F_WRLCK, UN: fcntl.F_UNLCK}

# F_OFD_SETLK, F_OFD_SETLKW and F_OFD_GETLK, as numbers: not every Python names them.
if sys.platform == "darwin":
    _SETLK, _SETLKW, _GETLK = 90, 91, 92  # <sys/fcntl.h>
    _STRUCT = struct.Struct("qqihh")

    def _pack(kind: int, start: int, length: int) -> bytes:
        return _STRUCT.pack(start, length, 0, kind, 0)

    def _unpack(answer: bytes) -> tuple[int, int, int]:
        start, length, _, kind, _ = _STRUCT.unpack(answer)
        return kind, start, length
else:
    _SETLK, _SETLKW, _GETLK = 37, 38, 36  # <asm-generic/fcntl.h>, the same on every processor
    _STRUCT = struct.Struct("hhqqi")

    def _pack(kind: int, start: int, length: int) -> bytes:
        return _STRUCT.pack(kind, 0, start, length, 0)

    def _unpack(answer: bytes) -> tuple[int, int, int]:
        kind, _, start, length, _ = _STRUCT.unpack(answer)
        return kind, start, length


def _range(fd: int, op: int, start: int, length: int) -> None:
    try:
        fcntl.fcntl(fd, _SETLK if op & NB else _SETLKW, _pack(_KINDS[op & ~NB], start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # EACCES is how CIFS says it
            raise BlockingIOError(errno.EAGAIN, "busy") from None
        raise


def _try_range(fd: int, start: int, length: int) -> bool:
    try:
        _range(fd, EX_NB, start, length)
    except BlockingIOError:
        return False
    return True


def lock_range(fd: int, op: int) -> None:
    """What `lock` does, with a byte range: for file systems whose flock does not reach the other machines."""
    _range(fd, op, RANGE_START, RANGE_LENGTH)


def lock_past_end(fd: int, op: int) -> None:
    """What `lock` does, with the liveness byte: where a range that is locked cannot be read by others (CIFS)."""
    _range(fd, op, LIVENESS_BYTE, 1)


def range_taken(fd: int) -> bool:
    """Has anybody else got what `lock_range` takes?"""
    kind, _, _ = _unpack(fcntl.fcntl(fd, _GETLK, _pack(fcntl.F_WRLCK, RANGE_START, RANGE_LENGTH)))
    return kind != fcntl.F_UNLCK


def mark_removal(fd: int) -> None:
    """Say that what follows is a removal. A read lock: several may be at it, and a read-only descriptor can say so."""
    _range(fd, SH_NB, REMOVAL_BYTE, 1)


def unmark_removal(fd: int) -> None:
    _range(fd, UN, REMOVAL_BYTE, 1)


def removal_marked(fd: int) -> bool:
    """Does somebody hold the file only to remove it? Exactly our byte: another tool's whole-file lock is no removal."""
    kind, start, length = _unpack(fcntl.fcntl(fd, _GETLK, _pack(fcntl.F_WRLCK, REMOVAL_BYTE, 1)))
    return kind != fcntl.F_UNLCK and (start, length) == (REMOVAL_BYTE, 1)


_LOCK_REMOVAL = _pack(fcntl.F_WRLCK, REMOVAL_BYTE, 1)
_LOCK_LIVENESS = _pack(fcntl.F_WRLCK, LIVENESS_BYTE, 1)


def lock_removal(fd: int) -> None:
    """Take the right to remove a lock file. BlockingIOError: somebody else has it."""
    try:
        fcntl.fcntl(fd, _SETLK, _LOCK_REMOVAL)
    except PermissionError:  # how CIFS says it
        raise BlockingIOError(errno.EAGAIN, "busy") from None


def lock_liveness(fd: int) -> None:
    """Lock the liveness byte of a file that nobody else knows yet."""
    fcntl.fcntl(fd, _SETLK, _LOCK_LIVENESS)


def liveness_locked(fd: int) -> bool:
    kind, _, _ = _unpack(fcntl.fcntl(fd, _GETLK, _LOCK_LIVENESS))
    return kind != fcntl.F_UNLCK


def touch(path: str | int) -> None:
    """Set the times of a file, given by its name or its descriptor, to now."""
    os.utime(path)


def link_open_file(fd: int, folder: int | None, name: str) -> None:
    """Give a name to a file that has none."""
    # Any descriptor will do for the source, whose path is absolute; with none, Python does not follow the link.
    link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd, dst_dir_fd=folder, follow_symlinks=True)


def exchange(one: str, other: str, folder: int | None) -> None:
    """Let two files exchange their names, in one step."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), one)


def rename_new(one: str, other: str) -> None:
    """Rename, and fail with FileExistsError where the name is taken."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), one)


def clone(reader: int, writer: int) -> None:
    """Let a new file share the blocks of another one, until either is written to."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def generation(fd: int) -> int:
    """A number of the file with this inode number that the next one does not have; 0 where there is none."""
    return 0


TELLS_NAMES = False


def name_of_open(fd: int) -> str:
    """The name that the open file has now; where TELLS_NAMES."""
    return ""


def is_removed(fd: int) -> bool:
    """Has the file no name any more?"""
    return fstat(fd).st_nlink == 0


def read_text(path: str) -> str:
    """The text of a file of /proc; empty where the file is gone, may not be read, or there is no /proc."""
    return ""


def list_pids() -> list[int]:
    """The processes that /proc shows; empty where there is no /proc."""
    return []


def mount_table() -> str:
    """The mount table as Linux writes it; empty where there is none."""
    return ""


def process_exists(pid: int) -> bool:
    if pid <= 0:
        return False  # 0 and below mean process groups to kill(2)
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def try_slot(fd: int, slot: int) -> bool:
    return _try_range(fd, FIRST_SLOT + slot, 1)


def slots_taken(fd: int) -> bool:
    """Has anybody else a slot?"""
    kind, _, _ = _unpack(fcntl.fcntl(fd, _GETLK, _pack(fcntl.F_WRLCK, FIRST_SLOT, MAX_SLOTS)))
    return kind != fcntl.F_UNLCK


def slot_taken(fd: int, slot: int) -> bool:
    """Has another descriptor this slot?"""
    kind, _, _ = _unpack(fcntl.fcntl(fd, _GETLK, _pack(fcntl.F_WRLCK, FIRST_SLOT + slot, 1)))
    return kind != fcntl.F_UNLCK


def unlock_slots(fd: int) -> None:
    _range(fd, UN, FIRST_SLOT, MAX_SLOTS)


def lock_byte(fd: int, at: int) -> bool:
    """`try_slot`, at half its price."""
    try:
        fcntl.fcntl(fd, _SETLK, _pack(fcntl.F_WRLCK, at, 1))
    except (BlockingIOError, PermissionError):  # the second is how CIFS says it
        return False
    return True


def unlock_byte(fd: int, at: int) -> None:
    fcntl.fcntl(fd, _SETLK, _pack(fcntl.F_UNLCK, at, 1))
