"""The locks in some directories and on some servers, each with its status."""

from __future__ import annotations

import os

from .. import system
from ..errors import HoldfastError, NotALockFile
from ..files import OwnedFd
from ..locks.lock_file import LockFile
from ..owner import hide_passwords, started_at
from .kinds import kernel_locked_inodes, kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ..status import Status

_HEAD = 64


# One lock.


def lock_at(path: str, kind: str | None, stale_after: float | None = 3600, policy: Any = "proof") -> LockFile:
    """The lock file that is there. The lock of a task is judged as `TaskLocks` does, whatever the options."""
    if kind != "task":
        return LockFile(path, stale_after=stale_after, stale=policy)
    from ..locks.task_locks import TaskLock

    return TaskLock(path, "", "", stale_after=300)


def status_of(path: str, kind: str | None, stale_after: float | None = 3600, policy: Any = "proof") -> Status:
    """The status of a lock of any kind. A kernel lock is recognised only while it is held: its file is empty."""
    kind = kind or kind_of(path)
    if kind == "semaphore":
        return _semaphore_status(path)
    if kind == "lock":
        from ..locks.lock import Lock

        return _without_old_time(Lock(path).status())
    return lock_at(path, kind, stale_after, policy).status()


def _semaphore_status(path: str) -> Status:
    from ..locks.lock import Lock
    from ..locks.semaphore import parse
    from ..status import of_semaphore

    try:
        with OwnedFd(system.open_fd(path, system.O_READ)) as file:
            permits = parse(system.read(file.fd, _HEAD))
    except FileNotFoundError:  # its last holder has removed it meanwhile
        return Lock(path).status()
    if permits is None:
        raise NotALockFile(f"{path}: this begins like a semaphore and goes on otherwise", path=path)
    return of_semaphore(os.path.abspath(path), permits)


def _without_old_time(found: Status) -> Status:
    """The file of a kernel lock that is kept is older than its holder: then it is unknown since when it is held."""
    from dataclasses import replace

    began = [started_at(holder.pid) for holder in found.holders if holder.pid is not None]
    earliest = min((moment for moment in began if moment is not None), default=None)
    if found.since is None or earliest is None or found.since >= earliest - 0.1:
        return found
    return replace(found, since=None)


def state_of(status: Status) -> str:
    """free, held, shared, stale or corrupt"""
    if not status.held:
        return "free"
    if status.stale:
        return "stale"
    if status.corrupt:
        return "corrupt"
    is_lock = status.permits is None and status.kind not in ("file", "task")
    return "shared" if is_lock and any(holder.shared for holder in status.holders) else "held"


def user_of(status: Status) -> str | None:
    """The user whose process holds the lock, if it runs on this machine."""
    for holder in status.holders:
        if holder.pid is not None and holder.host is None:
            return owner_of(holder.pid)
    return None


def owner_of(pid: int) -> str | None:
    """The user whose process this is."""
    try:
        uid = system.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        from pwd import getpwuid

        return getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def as_json(status: Status) -> dict[str, object]:
    """What `holdfast ls --json` prints about a lock."""
    return {"state": state_of(status), **status.as_dict(), "user": user_of(status)}


# All locks.


def locks_on(url: str) -> list[Status]:
    """The locks of a server, or the one that the URL names. Their names are URLs without passwords."""
    from dataclasses import replace

    from ..locks import listing

    return [replace(status, path=hide_passwords(status.path)) for status in listing.locks_on(url)]


def status_on(url: str) -> Status:
    """The status of the lock that the URL names."""
    from ..locks.url import ServerLock

    ServerLock(url)  # raises UnsafePath if the URL has no name
    (status,) = locks_on(url)
    return status


def all_locks(
    places: list[str],
    recursive: bool,
    *,
    unreadable: Callable[[str, OSError], object] = lambda path, error: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Status]:
    """The locks in directories and on servers.

    unreadable: called with each directory below that cannot be read. A given place that cannot be read raises
    stop: called for every file. True ends the search
    """
    from ..locks.url import is_url

    locked = kernel_locked_inodes()
    found: list[Status] = []
    for place in places:
        if is_url(place):
            found += locks_on(place)
            continue
        for path in candidates(place, recursive, unreadable):
            if stop():
                return found
            status = status_at(path, locked)
            if status is not None:
                found.append(status)
    return found


def candidates(
    directory: str, recursive: bool, unreadable: Callable[[str, OSError], object] = lambda path, error: None
) -> Iterator[str]:
    """The regular files in a directory, or the file itself if it is one."""
    if not os.path.isdir(directory) and os.path.lexists(directory):
        yield directory
        return
    pending = [directory]
    while pending:
        here = pending.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            if here == directory:
                raise
            unreadable(here, error)
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if recursive and not entry.name.endswith(".queue"):
                    pending.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield os.path.normpath(entry.path)


def status_at(path: str, locked: set[int]) -> Status | None:
    """The status of the lock at a path, or None if there is none."""
    try:
        kind = kind_of(path, locked)
        return None if kind is None else status_of(path, kind)
    except (OSError, HoldfastError):
        return None  # gone, or this user may not read it
