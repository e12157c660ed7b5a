"""Names of locks, and what the file system under them can promise.

A lock is known by its path. Relative paths are fixed when the lock object is made, so that a later chdir does not
turn one lock into another. A symlink at the end of a path stands for its target, also when the target does not exist
yet; that is resolved when the lock is taken, because links may change in between.

`mount_of` answers the question that decides how to lock: is this a local file system, a network one whose servers
know byte ranges but not flock, or one that is known to grant the same lock twice?
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic

from . import system
from .errors import UnsafePath, Unsupported

# flock stays on the client here, or reaches the server as another kind of lock than a local flock on the server.
_SMB = frozenset({"cifs", "smb3", "smbfs"})
_BY_RANGE = _SMB | {"nfs", "nfs4"}
# No event arrives from another machine.
_REMOTE = _BY_RANGE | {"9p", "afs", "ceph", "fuse.ceph", "fuse.glusterfs", "gfs2", "lustre", "ocfs2", "beegfs", "gpfs"}
# Disks of this machine that have no device number of their own.
_OURS = frozenset({"", "bcachefs", "btrfs", "overlay", "ramfs", "tmpfs", "zfs"})
_NO_LOCKS = {"fuse.sshfs": "sshfs keeps locks on the client"}
_LOCAL_ONLY_OPTIONS = {
    "nobrl": "the mount option nobrl keeps byte-range locks on the client",
    "nolock": "the mount option nolock keeps locks on the client",
    "local_lock=all": "the mount option local_lock=all keeps locks on the client",
    "local_lock=posix": "the mount option local_lock=posix keeps byte-range locks on the client",
}
# Linux's client keeps locks to itself while it is alone with a file, and hands them to the server when another machine
# comes. With such leases a lock was granted twice, without them never; where in the client is not known (guarantees).
_LEASES = "without the mount option nolease locks may stay on the client"
_SEPARATORS = (os.sep, os.altsep or os.sep)
_MAX_LINKS = 40  # as Linux has it
_TABLE_LIFETIME_S = 1.0  # device numbers of network mounts are used again after an unmount


class Mount:
    """How to lock on one mounted file system."""

    __slots__ = (
        "blocks",
        "events",
        "has_inodes",
        "is_ours",
        "keeps",
        "kind",
        "lets_read",
        "ranged",
        "reads_old",
        "refusal",
        "removes",
        "where",
    )

    def __init__(self, kind: str = "", where: str = "/", options: str = "") -> None:
        self.kind = kind
        self.where = where
        # sshfs numbers paths, not files: two names of one file differ, and so may two looks at one name.
        self.has_inodes = kind not in _NO_LOCKS
        self.is_ours = kind in _OURS  # no other machine can have written here; where we do not know, it may have
        self.events = kind not in _REMOTE and kind not in _NO_LOCKS
        # Other machines may see for up to a minute what a name meant before. Whether it still means the file that was
        # locked cannot be known there, so lock files are not removed.
        self.removes = self.events
        # A wait in the kernel for an SMB server may miss the death of the holder, and ends in EBADF when interrupted.
        self.blocks = kind not in _SMB
        self.ranged = kind in _BY_RANGE
        # A client may read what it remembers of a file or a directory, although it has got the lock since.
        self.reads_old = kind in ("nfs", "nfs4")
        self.refusal = _NO_LOCKS.get(kind)
        if self.ranged:
            given = set(options.split(","))
            self.refusal = next((why for option, why in _LOCAL_ONLY_OPTIONS.items() if option in given), None)
            if kind in ("cifs", "smb3") and "nolease" not in given:
                self.refusal = self.refusal or _LEASES
        self.keeps = kind not in ("ramfs", "tmpfs")  # else a power failure takes everything, synced or not
        # Can others read a file on which there is a kernel lock that reaches them? Then a lock file may have one.
        self.lets_read = os.name != "nt" and kind not in _SMB and self.refusal is None

    def check_reading(self, path: str) -> None:
        """Raise Unsupported where what another machine wrote under a lock may not be seen by who has it next."""
        if self.reads_old:
            raise Unsupported(
                f"{path}: {self.where} is {self.kind}, whose clients go by what they remember of files and names, so "
                "that two machines might do the same task. Keep it on a disk of one machine, or on CIFS with the mount "
                "option nolease.",
                path=path,
            )

    def refuse(self, path: str) -> Unsupported:
        return Unsupported(
            f"{path}: no kernel lock on {self.where} ({self.kind}): {self.refusal}, so that two machines would both be "
            "granted it. Use holdfast.LockFile there, or an engine (Redis, PostgreSQL, etcd).",
            path=path,
        )


LOCAL = Mount()
_by_device: dict[int, Mount] = {}
_checked: dict[str, float] = {}  # directories, and until when that is good
_good_until = 0.0


def mount_of(device: int, path: str) -> Mount:
    """The mount that `path` is on, for a kernel lock. Raises Unsupported where there would be two holders."""
    mount = mount_at(device, path)
    if mount.refusal:
        raise mount.refuse(path)
    return mount


def check_directory(file: str) -> None:
    """Raise Unsupported if no kernel lock may be taken where `file` is, or is to be made."""
    directory = os.path.dirname(file) if os.name == "nt" else file[: file.rindex("/")] or "/"
    if _checked.get(directory, 0.0) > monotonic():
        return
    try:
        device = system.stat(directory).st_dev
    except OSError:
        return  # opening the file tells what is wrong
    mount_of(device, file)
    if len(_checked) > 1000:
        _checked.clear()
    _checked[directory] = monotonic() + _TABLE_LIFETIME_S


def cannot_be_swapped(directory: str) -> bool:
    """True: nobody but this user and root can put another directory, or a link, in place of this one or one above it.

    In a directory that others may write, an entry is safe only if that directory is sticky and the entry is ours.
    """
    trusted = (0, os.geteuid())
    above = system.stat("/")
    path = ""
    for part in directory.split("/")[1:]:
        path += "/" + part
        here = system.stat(path, follow_symlinks=False)
        others_write = above.st_mode & 0o022 and not (above.st_mode & 0o1000 and here.st_uid in trusted)
        if others_write or above.st_uid not in trusted or not stat.S_ISDIR(here.st_mode):
            return False
        above = here
    return True


def is_trusted(entry: os.stat_result, parent: os.stat_result) -> bool:
    """Is this directory entry safe to use? In a sticky or world-writable directory, only entries of root, this user or
    the directory's owner are."""
    if not parent.st_mode & 0o1002 or not hasattr(os, "geteuid"):
        return True
    return entry.st_uid in (0, os.geteuid(), parent.st_uid)


def follow_links(path: str) -> str:
    """Return an absolute path without its symlinks, as `os.path.realpath` does. The target need not exist.

    Raises UnsafePath for a symlink that is not trusted, at the end of the path or on the way.
    """
    if os.name == "nt":
        return os.path.realpath(path)
    parts, real, links = path.split("/")[::-1], "", 0
    while parts:
        part = parts.pop()
        if part == "..":
            real = real.rpartition("/")[0]
        elif part not in ("", "."):
            entry = f"{real}/{part}"
            if not _is_link(entry, real or "/", path):
                real = entry
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(entry)
            real = "" if target.startswith("/") else real
            parts += target.split("/")[::-1]
    return real or "/"


def _is_link(entry: str, parent: str, path: str) -> bool:
    try:
        st = system.stat(entry, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISLNK(st.st_mode):
        return False
    if not is_trusted(st, system.stat(parent)):
        raise UnsafePath(
            f"{path}: {entry} is a symlink that user {st.st_uid} made in a directory that others can write to. It was "
            "not followed. Remove the symlink, or give the path of its target.",
            path=path,
        )
    return True


def mount_at(device: int, path: str) -> Mount:
    """The mount that `path` is on; `device` is the `st_dev` of its file."""
    global _good_until
    if device & 0xFFF00:  # a block device: always local. The others share major number 0
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

    A btrfs subvolume has a device number that is in no table, hence the second way. Later lines cover earlier ones.
    """
    wanted = "{}:{}".format(*major_and_minor(device))
    path = os.path.realpath(path)
    best, best_rank = LOCAL, (False, -1)
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 6 or len(tail) < 2:
            continue
        where = _unescape(fields[4])
        above = path == where or path.startswith(where.rstrip("/") + "/")
        rank = (fields[2] == wanted, len(where) if above else -1)
        if rank >= best_rank and rank > (False, -1):
            options = fields[5] + "," + (tail[2] if len(tail) > 2 else "")
            best, best_rank = Mount(tail[0], where, options), rank
    return best


def major_and_minor(device: int) -> tuple[int, int]:
    """The two numbers of an `st_dev` of Linux. Windows has no os.major."""
    return device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00


def mounts_in(*paths: str) -> list[str]:
    """Where something is mounted at a path or below it, also a part of the same file system, which no stat shows."""
    fields = [line.split(" ", 5) for line in system.mount_table().splitlines()]
    places = [_unescape(field[4]) for field in fields if len(field) > 5]
    below = tuple(path.rstrip("/") + "/" for path in paths)
    return [place for place in places if place in paths or place.startswith(below)]


def _unescape(field: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal."""
    if "\\" not in field:
        return field
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def check_no_parent_component(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None:
    """Raise UnsafePath for a path as it was given that has a component '..': `absolute` resolves it on Windows."""
    name = os.fsdecode(path)
    components = os.path.splitdrive(name)[1].replace(_SEPARATORS[1], os.sep).split(os.sep)
    if os.pardir in components:
        raise UnsafePath(
            f"{name}: a path with a component '..' may lead anywhere; give os.path.realpath of it",
            path=name,
        )


def absolute(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The path as it was given, made absolute. Neither '..' nor a link is resolved: that happens in use."""
    name = path if type(path) is str else os.fsdecode(path)
    if not name:
        raise UnsafePath("an empty path cannot name a lock", path=name)
    if "\0" in name:
        raise UnsafePath(f"{name!r}: a path cannot contain a NUL byte", path=name)
    if name.endswith(_SEPARATORS):
        raise UnsafePath(f"{name}: this names a directory; a lock is a file", path=name)
    if os.name == "nt":  # Windows itself takes '..' as text, and has a current directory on every drive
        return os.path.abspath(name)
    return name if name[0] == "/" else os.path.join(os.getcwd(), name)
