"""The only place that makes system calls: one module per platform behind one set of names.

The names are verbs on descriptors and paths. Most are the C functions themselves, so that this package costs one
attribute look-up. Callers write `system.unlink(path)`, never `from system import unlink`: a test replaces a name here
to observe, delay or fail every call of a lock, or to kill its process there.

    open_fd, close, read, write                       descriptors
    pread, pwrite, lseek, ftruncate, fstat, fchmod
    fsync, fdatasync, sync_file_system                durability
    stat, access, readlink, unlink, link, rename      names
    listdir, scandir, mkdir, rmdir, symlink
    chmod, utime, touch                               modes and times. `touch` sets the times to now
    chown, mkfifo, mknod, copy_file_range, clone      EOPNOTSUPP on platforms that do not have them
    link_open_file, exchange
    getxattr, setxattr, listxattr, removexattr
    is_removed, generation                            the identity of an open file
    lock, lock_range                                  kernel locks on a file. `op` is EX or SH, with NB to try, or UN
    set_range, range_locked                           kernel locks on a part of a file
    mark_removal, unmark_removal, removal_marked      the removal byte (docs/formats.md)
    lock_removal
    lock_liveness, liveness_locked                    the liveness byte of a lock file
    try_slot, slots_taken, unlock_slots               one byte per permit of a semaphore
    Watch, WATCH_WRITING, WATCH_CLOSING               events of one file. `Watch` raises OSError where there are none
    DirectoryWatch                                    events of several directories. OSError where there are none
    process_exists, list_pids, lock_lines             processes
    pid_namespace, read_text, mount_table             /proc, mounts
    HAS_FIFOS, HAS_FOLDERS                            abilities: FIFOs can be locked, directories can be opened

A lock that is busy raises BlockingIOError on every platform. `lock` is flock(2) where there is one. It belongs to the
open file description, and flock(1), Rust's `File::lock` and .NET's `FileShare` take the same lock. `lock_range` is an
open-file-description lock, for file systems on which flock is not enough. Classic fcntl locks are not used: they belong
to the process, and closing any other descriptor of the file drops them.
"""

import sys

if sys.platform == "win32":
    from .windows import *
elif sys.platform == "darwin":
    from .macos import *
elif sys.platform in ("linux", "android"):
    from .linux import *
else:
    raise ImportError(
        f"Holdfast does not support {sys.platform}, because it needs open-file-description locks (F_OFD_SETLK) as "
        "Linux and macOS have them: use Linux, macOS or Windows."
    )
from .everywhere import *
