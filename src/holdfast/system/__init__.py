"""The only place that makes system calls: one module per platform behind one set of names.

The names are verbs on descriptors and paths, bound straight to the C functions where there is one, so that going
through this package costs one attribute look-up. Callers write `system.unlink(path)`, never `from system import
unlink`: a test replaces a name here and sees, delays, fails or kills at every single call that the locks make.

    open_fd, close, read, write                       descriptors
    pread, pwrite, ftruncate, fstat, fchmod, touch
    fsync, fdatasync, sync_file_system                durability
    stat, access, unlink, link, rename                names
    listdir, mkdir, rmdir, mkfifo
    link_open_file, rename_new, exchange, clone       calls that raise EOPNOTSUPP where a platform has none
    is_removed, name_of_open, generation              what became of an open file
    lock, lock_range, lock_past_end, range_taken      kernel locks; op is EX or SH, with NB to try, or UN. Busy is
                                                      BlockingIOError on every platform
    mark_removal, unmark_removal, removal_marked      the removal byte (docs/formats.md)
    lock_removal
    lock_liveness, liveness_locked                    the liveness byte of a lock file
    try_slot, slot_taken, slots_taken, unlock_slots   one byte per permit of a semaphore
    lock_byte, unlock_byte                            one byte at any position
    Watch, WATCH_WRITING, WATCH_CLOSING               events of one file; `Watch` raises OSError where there are none
    process_exists, list_pids                         processes
    read_text, mount_table                            /proc, mounts
    HAS_FIFOS, HAS_FOLDERS, TELLS_NAMES               what the platform can do

`lock` is flock(2) where there is one: it belongs to the open file description, and it is what flock(1), Rust's
`File::lock` and .NET's `FileShare` take. `lock_range` is an open-file-description lock for file systems on which
flock is not enough. Classic fcntl locks are not used at all: they belong to the process, and closing any other
descriptor of the file drops them.
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
