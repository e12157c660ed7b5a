"""Paths of locks, and the promises of the file systems under them.

A lock is identified by its path. A relative path is made absolute when the lock object is created, so that a later
chdir does not change it. A symlink at the end of a path stands for its target, even if the target does not exist yet.
It is resolved at each acquire, because symlinks may change.

`mount_of` decides how to lock: with flock on a local file system, with a byte range on a network file system whose
server does not know flock, and not at all on a file system that grants one lock twice.
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic

from . import system
from .errors import UnsafePath, Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# The traits of file systems. A file system that is not listed keeps flock and file events on this machine.
#   ours      only this machine can have written here; not known of a file system that is not listed
#   volatile  a power failure loses everything, synced or not
#   remote    no event arrives from another machine. Another machine may see for up to a minute what a name meant
#             before, so that it cannot know whether the name still means the file that it has locked
#   ranges    flock stays on the client, or is another kind of lock on the server: a byte range stands in for it
#   smb       a wait in the kernel may miss the death of the holder, and ends in EBADF when interrupted; other clients
#             cannot read a locked range
#   caches    a client may read old content from its cache, although it has acquired the lock since
#   no-locks  locks stay on the client. Inode numbers are those of paths: two names of one file have different ones
_TRAITS = {
    **dict.fromkeys(("", "bcachefs", "btrfs", "overlay", "zfs"), "ours"),
    **dict.fromkeys(("ramfs", "tmpfs"), "ours volatile"),
    **dict.fromkeys(("9p", "afs", "beegfs", "ceph", "fuse.ceph", "fuse.glusterfs"), "remote"),
    **dict.fromkeys(("gfs2", "gpfs", "lustre", "ocfs2"), "remote"),
    **dict.fromkeys(("cifs", "smb3", "smbfs"), "remote ranges smb"),
    **dict.fromkeys(("nfs", "nfs4"), "remote ranges caches"),
    "fuse.sshfs": "remote no-locks",
}
# The message names the last one that is given. After `mount -o nolock` the kernel lists local_lock=all, too.
_LOCAL_ONLY_OPTIONS = ("local_lock=posix", "local_lock=all", "nolock", "nobrl")
_SEPARATORS = (os.sep, os.altsep or os.sep)
_MAX_LINKS = 40  # as in Linux
_MAX_CHECKED = 1000
_TABLE_LIFETIME_S = 1.0  # device numbers of network mounts are used again after an unmount


class Mount:
    """How to lock on one mounted file system. `refusal` is the reason why a kernel lock is refused there."""

    def __init__(self, kind: str = "", where: str = "/", options: str = "") -> None:
        traits = _TRAITS.get(kind, "").split()
        self.kind = kind
        self.where = where
        self.is_ours = "ours" in traits
        self.keeps = "volatile" not in traits
        self.events = self.removes = "remote" not in traits  # lock files are removed where there are events
        self.ranged = "ranges" in traits
        self.blocks = "smb" not in traits
        self.reads_old = "caches" in traits
        self.has_inodes = "no-locks" not in traits
        self.refusal = None if self.has_inodes else "sshfs keeps locks on the client"
        if self.ranged:
            given = set(options.split(","))
            # With a lease, Linux's client keeps locks to itself until another machine opens the file. With leases a
            # lock was granted twice, without them never. The fault in the client is not known (docs/guarantees.md).
            if kind in ("cifs", "smb3") and "nolease" not in given:
                self.refusal = "without the mount option nolease locks may stay on the client"
            for option in filter(given.__contains__, _LOCAL_ONLY_OPTIONS):
                self.refusal = f"the mount option {option} keeps locks on the client"
        # Other processes can read a file that has a kernel lock which reaches them. Then a lock file may have one.
        self.lets_read = os.name != "nt" and self.blocks and self.refusal is None


LOCAL = Mount()
_by_device: dict[int, Mount] = {}
_checked: dict[str, float] = {}  # directories that allow kernel locks, and when to check them again
_good_until = 0.0


def mount_of(device: int, path: str) -> Mount:
    """Return the mount of `path`, for a kernel lock. Raises Unsupported where two machines could hold it at once."""
    mount = mount_at(device, path)
    if mount.refusal:
        raise Unsupported(
            f"{path}: no kernel lock on {mount.where} ({mount.kind}): {mount.refusal}, so that two machines could hold "
            "it at once. Use holdfast.LockFile there, or an engine (Redis, PostgreSQL, etcd).",
            path=path,
        )
    return mount


def check_directory(file: str) -> None:
    """Raise Unsupported if the directory of `file` is on a file system that allows no kernel locks."""
    directory = os.path.dirname(file)
    if _checked.get(directory, 0.0) > monotonic():
        return
    try:
        device = system.stat(directory).st_dev
    except OSError:
        return  # opening the file will fail with a better error
    mount_of(device, file)
    if len(_checked) > _MAX_CHECKED:
        _checked.clear()
    _checked[directory] = monotonic() + _TABLE_LIFETIME_S


def cannot_be_swapped(directory: str) -> bool:
    """Return whether only this user and root can replace this directory, or a directory above it.

    In a directory that others can write to, an entry is safe only if the directory is sticky and the entry is ours.
    """
    trusted, above, path = (0, os.geteuid()), system.stat("/"), ""
    for part in directory.split("/")[1:]:
        path += "/" + part
        here = system.stat(path, follow_symlinks=False)
        is_safe = above.st_mode & stat.S_ISVTX and here.st_uid in trusted
        others_write = above.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_safe
        if others_write or above.st_uid not in trusted or not stat.S_ISDIR(here.st_mode):
            return False
        above = here
    return True


def is_trusted(entry: os.stat_result, parent: os.stat_result) -> bool:
    """Return whether a directory entry is safe to use.

    In a sticky or world-writable directory, only entries of root, of this user and of the directory's owner are.
    """
    if not parent.st_mode & (stat.S_ISVTX | stat.S_IWOTH) or not hasattr(os, "geteuid"):
        return True
    return entry.st_uid in (0, os.geteuid(), parent.st_uid)


def stat_of(path: str) -> os.stat_result | None:
    """What a path names, without following a symlink. None: nothing."""
    try:
        return system.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None


def follow_links(path: str) -> str:
    """Return an absolute path without its symlinks, as `os.path.realpath` does. The target need not exist.

    Raises UnsafePath for a symlink that is not trusted, at the end of the path or on the way.
    """
    if os.name == "nt":
        return os.path.realpath(path)
    parts, real, links = path.split("/")[::-1], "", 0
    while parts:
        part = parts.pop()
        entry = f"{real}/{part}"
        if part == "..":
            real = real.rpartition("/")[0]
        elif part in ("", "."):
            continue
        elif not (st := stat_of(entry)) or not stat.S_ISLNK(st.st_mode):
            real = entry
        elif not is_trusted(st, system.stat(real or "/")):
            where = path if entry == path else f"{path}: {entry}"
            raise UnsafePath(
                f"{where} is a symlink that user {st.st_uid} made in a directory that others can write to. It "
                "was not followed. Remove the symlink, or give the path of its target.",
                path=path,
            )
        elif links == _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        else:
            links += 1
            target = system.readlink(entry)
            real = "" if target.startswith("/") else real
            parts += target.split("/")[::-1]
    return real or "/"


def symlink_refused(path: str) -> UnsafePath:
    return UnsafePath(
        f"{path} is a symlink, and this lock follows none (follow=False). Remove the symlink, or give the path of its "
        "target.",
        path=path,
    )


def mount_at(device: int, path: str) -> Mount:
    """Return the mount of `path`. `device` is the `st_dev` of its file."""
    global _good_until
    if device & 0xFFF00:  # a block device is always local. All others have major number 0
        return LOCAL
    now = monotonic()
    if now > _good_until:
        _by_device.clear()
        _good_until = now + _TABLE_LIFETIME_S
    found = _by_device.get(device)
    if found is None:
        found = _by_device[device] = find_mount(system.mount_table(), device, path)
    return found


def find_mount(table: str, device: int, path: str) -> Mount:
    """Look `path` up in the text of /proc/self/mountinfo: by device number, else by the longest mount point above it.

    The device number of a btrfs subvolume is in no table, so the second way is needed. Later lines cover earlier ones.
    """
    wanted = "{}:{}".format(*major_and_minor(device))
    path = os.path.realpath(path)
    best, best_rank = LOCAL, (False, -1)
    for number, where, kind, options in _mounts(table):
        above = path == where or path.startswith(where.rstrip("/") + "/")
        rank = (number == wanted, len(where) if above else -1)
        if rank >= best_rank and rank > (False, -1):
            best, best_rank = Mount(kind, where, options), rank
    return best


def mounts_in(*paths: str) -> list[str]:
    """Return all mount points at these paths or below, also of a part of the same file system, which stat hides."""
    below = tuple(path.rstrip("/") + "/" for path in paths)
    places = [where for _, where, _, _ in _mounts(system.mount_table())]
    return [place for place in places if place in paths or place.startswith(below)]


def major_and_minor(device: int) -> tuple[int, int]:
    """Return the two numbers of an `st_dev` of Linux. Windows has no os.major."""
    return device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00


def _mounts(table: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the device number, mount point, kind and options of each mount."""
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) > 5 and len(tail) > 1:
            # A space, for instance, is written as a backslash and its number in octal.
            where = os.fsencode(fields[4]).decode("unicode_escape").encode("latin-1")
            yield fields[2], os.fsdecode(where), tail[0], ",".join([fields[5], *tail[2:]])


def check_no_parent_component(path: Path) -> None:
    """Raise UnsafePath for a path that has a component '..'. Called before `absolute`, which resolves it on Windows."""
    name = os.fsdecode(path)
    if os.pardir in os.path.splitdrive(name)[1].replace(_SEPARATORS[1], os.sep).split(os.sep):
        raise UnsafePath(
            f"{name}: a path with a component '..' may lead anywhere. Pass the real path: os.path.realpath(path) in "
            "Python, $(realpath PATH) in a shell.",
            path=name,
        )


def absolute(path: Path) -> str:
    """Make a path absolute. '..' and symlinks stay: they are resolved at each acquire."""
    name = path if type(path) is str else os.fsdecode(path)
    if not name:
        raise UnsafePath("The path is empty. Pass the path of a file.", path=name)
    if "\0" in name:
        raise UnsafePath(f"{name!r}: a path cannot contain a NUL byte. Remove it.", path=name)
    if name.endswith(_SEPARATORS):
        raise UnsafePath(f"{name}: a lock is a file, but this names a directory. Add a file name.", path=name)
    if os.name == "nt":  # Windows itself takes '..' as text, and has a current directory on every drive
        return os.path.abspath(name)
    return name if name[0] == "/" else os.path.join(os.getcwd(), name)
