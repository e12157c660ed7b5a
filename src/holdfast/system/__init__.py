"""The only place that makes system calls: one module per platform behind one set of names.

The names are verbs on descriptors and paths, bound straight to the C functions where there is one, so that going
through this package costs one attribute look-up. Callers write `system.unlink(path)`, never `from system import
unlink`: a test replaces a name here and sees, delays, fails or kills at every single call that the locks make.

    open_fd, close, fstat, stat, unlink, exists          files
    lock(fd, op), lock_range(fd, op)                   kernel locks; op is EX or SH, with NB to try, or UN.
                                                       Busy is BlockingIOError, whatever the platform calls it
    mark_removal(fd), removal_marked(fd)               the removal byte (docs/formats.md)
    lock_slot(fd, slot), unlock_slot, lock_all_slots   one byte each, for semaphores
    listdir, mkdir, rmdir, mkfifo, read, write         queues
    Watch                                              wake-ups for one file, or None where there are none
    mount_table, lock_table, ...                       what the kernel says about mounts and holders

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
else:
    from .linux import *
