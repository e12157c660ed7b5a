"""Opening a lock file that exists, and the locks that make its removal safe.

A process that removes a lock file opens it, takes its removal byte, judges the record again, takes the kernel lock,
checks that the name still means this file, and then unlinks the name. "Read, judge, unlink" alone loses a lock:

    A reads x: stale
                        B reads x: stale
    A unlinks x
    A creates x: holds it
                        B unlinks x, which is A's
                        B creates x: two holders

`Lock`, `Semaphore` and flock(1) hold the kernel lock of a file that they use. Of lock files only a living holder does.
So a file that another kind of lock uses counts as held, however old it is. These kinds remove their files under the
kernel lock, without the removal byte. So the name is checked when this process has both.

What remains: a tool that ignores the removal byte can unlink the stale file and create its own between the last check
and the unlink. Then the unlink removes the lock of that tool.
"""

from __future__ import annotations

import errno
import time
from time import sleep

from .. import system
from ..files import OwnedFd
from ..paths import mount_at
from .publish import lock_of_private, take_kernel_lock
from .staleness import not_a_lock_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .publish import Entry
    from .staleness import Judgement

_PAUSE_S = 0.000_01
MAX_WAIT_TRIES = 1000  # about 0.01 s, and more on a busy machine


class Changed(Exception):
    """The name is a symlink, or the file was removed meanwhile. The caller resolves the path and starts again."""


class NotPermitted(PermissionError):
    """This user may not read or remove the file, or another program does not share it (Windows). It counts as held."""


def open_existing(entry: Entry, path: str) -> OwnedFd | None:
    """Open the lock file; None if there is none. Raises Changed, NotPermitted and NotALockFile."""
    for flags in (system.O_EXISTING, system.O_READ):
        try:
            return OwnedFd(entry.open(flags))
        except FileNotFoundError:
            return None
        except BlockingIOError:
            break
        except IsADirectoryError:
            raise not_a_lock_file(path, "a directory") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Changed from None
            if error.errno == errno.ENXIO:
                raise not_a_lock_file(path, "a socket, or a device that does not exist") from None
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    raise NotPermitted(errno.EACCES, "the lock file may not be read", path)


def take_removal_byte(fd: int, tries: int = 1) -> bool:
    """Try to take the right to remove an open lock file, until the descriptor is closed. False: another process has it.

    A descriptor of another user's file that can only read gets a shared lock. It excludes holders and other removers.
    """
    take = system.lock_removal
    while True:
        try:
            take(fd)
        except BlockingIOError:
            tries -= 1
            if tries <= 0:
                return False
            sleep(_PAUSE_S)
        except OSError as error:
            if error.errno != errno.EBADF or take is system.mark_removal:
                raise
            take = system.mark_removal
        else:
            return True


def excludes_other_kinds(fd: int, path: str, found: Judgement) -> bool:
    """Keep `Lock`, `Semaphore` and flock(1) away until the descriptor is closed. False: one of them has the file."""
    mount = mount_at(system.fstat(fd).st_dev, path)
    if found.record is not None and not mount.lets_read:
        return True
    # A holder of the lock file has both locks. If it dies between the first two, the third succeeds.
    if not take_kernel_lock(fd, mount) and not system.liveness_locked(fd) and not take_kernel_lock(fd, mount):
        return False
    return not system.slots_taken(fd)


def remove_private_files(entry: Entry, stale_after: float | None) -> bool:
    """Remove the private files that dead processes left of this lock file. True: there was one."""
    lock = entry.location
    names = [name for name in system.listdir(lock.parent) if lock_of_private(name) == lock.name]
    folder = f"{entry.parent}/"  # "./" where the directory is open
    return sum(_remove_private(entry, folder + name, stale_after) for name in names) > 0


def _remove_private(entry: Entry, name: str, stale_after: float | None) -> bool:
    try:
        file = OwnedFd(system.open_fd(name, system.O_EXISTING, dir_fd=entry.dir_fd))
    except OSError:
        return False
    with file:
        # Between making the file and locking its liveness byte, a process shows only its pid.
        is_old = stale_after is not None and time.time() - system.fstat(file.fd).st_mtime > stale_after
        is_dead = is_old or not system.process_exists(int(name.rsplit(".", 3)[1]))
        return is_dead and not system.liveness_locked(file.fd) and entry.remove(name)
