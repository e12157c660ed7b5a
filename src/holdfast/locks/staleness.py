"""Is a lock file stale? The facts about its holder, and what follows from them under each policy.

    "proof"          a holder that is proved dead is replaced at once, and one that is proved alive never; where neither
                     can be proved, age decides
    "old"            age alone decides (sema)
    "dead-and-old"   both: the pid does not exist, and the lock is old (semats)
    "dead-or-old"    proved dead, or old although alive, and so not renewed (leases of tasks)

Old means strictly older than `stale_after`. A timestamp in the future is not old. An empty or damaged file may be one
that another tool has created and not yet written, so it counts as held until its modification time is old. A file with
any other content is not a lock file, and is refused.
"""

from __future__ import annotations

import stat
import time

from .. import owner, system
from ..errors import CorruptLock, NotALockFile
from ..paths import mount_at
from . import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    from .record import Format, Record

    Policy = Literal["proof", "old", "dead-and-old", "dead-or-old"]

_FIRST_TOKEN = 10**18  # in 2001. A smaller number is the token of another tool
POLICIES = ("proof", "old", "dead-and-old", "dead-or-old")


class Judgement:
    """The facts about the holder of a lock file at one moment.

    record: the record of the holder; None: the file is empty or damaged
    age: seconds since the timestamp of the record
    alive: True or False if that is proved; None: nothing can be proved
    stale: may the next process replace the file?
    stale_in: seconds until age alone makes the file stale; None: never
    """

    __slots__ = ("age", "alive", "record", "stale", "stale_in")

    def __init__(
        self, found: Record | None, age: float, alive: bool | None, *, stale: bool, stale_in: float | None
    ) -> None:
        self.record = found
        self.age = age
        self.alive = alive
        self.stale = stale
        self.stale_in = stale_in

    @property
    def is_dead(self) -> bool:
        """Is the holder proved dead, or is there no process with its pid in this pid namespace?"""
        if self.alive is not None or self.record is None or not self.record.pid:  # a task lock may name no pid
            return self.alive is False
        return owner.is_visible(self.record.host, self.record.start) and not system.process_exists(self.record.pid)

    def facts(self) -> dict[str, Any]:
        """Return fields of a `Status`: the holder, since when it holds the lock, and when the lock will be stale."""
        found = self.record
        facts = {"alive": self.alive, "stale": self.stale, "stale_in": self.stale_in, "corrupt": found is None}
        if found is None:
            return facts | dict.fromkeys(("pid", "host", "command", "since", "timestamp", "tag", "token"))
        here = owner.is_visible(found.host, found.start)
        return facts | {
            "pid": found.pid or None,
            "host": None if here else found.host,
            "command": owner.command_of(found.pid) if here and found.pid else None,
            "since": _acquired_at(found),
            "timestamp": int(found.timestamp),
            "tag": found.tag,
            "token": found.token,
        }

    def __str__(self) -> str:
        if self.record is None:
            return "a holder whose record is empty or damaged"
        text = f"pid {self.record.pid}" if self.record.pid else "a process of unknown pid"
        if not owner.is_visible(self.record.host, self.record.start):
            text += f" on {self.record.host}"
        if self.record.tag:
            text += f" ({self.record.tag})"
        return f"{text}, {self.age:.0f} s old"


def _acquired_at(found: Record) -> float:
    """A heartbeat renews the timestamp, and not our token, which is the time of the acquisition in nanoseconds."""
    is_time = found.token is not None and found.token > _FIRST_TOKEN
    is_ours = is_time and (found.owner is not None or found.call is not None)
    return min(found.timestamp, found.token / 1e9) if is_ours and found.token else float(found.timestamp)


def judge(fd: int, path: str, form: Format, policy: Policy, stale_after: float | None) -> Judgement:
    """Judge the lock file that `fd` has open and that `path` names. Raises NotALockFile."""
    st = system.fstat(fd)
    if not stat.S_ISREG(st.st_mode):
        raise not_a_lock_file(path, "a directory, a device, a FIFO or a socket")
    now = time.time()
    content = system.pread(fd, record.MAX_BYTES + 1, 0)
    try:
        found = form.parse(content)
    except CorruptLock:
        other = form.other_kind(content)
        if other:
            raise not_a_lock_file(path, other) from None
        return decide(None, now - st.st_mtime, None, policy, form.corrupt_after(content, stale_after))
    if not form.has_time:
        found = found._replace(timestamp=st.st_mtime)
    alive = _liveness(fd, st.st_dev, path, found)
    goes_by_pid = form.pid_is_proof or policy == "dead-and-old"
    if goes_by_pid and alive is None and owner.is_visible(found.host, found.start):
        alive = system.process_exists(found.pid)
    return decide(found, now - found.timestamp, alive, policy, stale_after, whole_seconds=form.whole_seconds)


def not_a_lock_file(path: str, what: str) -> NotALockFile:
    return NotALockFile(
        f"{path} is {what}, not a lock file that can be used here. It was left untouched. Check the path.", path=path
    )


def decide(
    found: Record | None,
    age: float,
    alive: bool | None,
    policy: Policy,
    stale_after: float | None,
    *,
    whole_seconds: bool = True,
) -> Judgement:
    # sema rounds timestamps down to a second and compares whole seconds: a whole `stale_after` ends one second later.
    more = 1 if whole_seconds and found is not None and stale_after and stale_after % 1 == 0 else 0
    old = stale_after is not None and (age >= stale_after + 1 if more else age > stale_after)
    old_in = None if stale_after is None else max(0.0, stale_after + more - age)
    if found is None or policy == "old":
        return Judgement(found, age, alive, stale=old, stale_in=old_in)
    if policy == "dead-and-old":
        return Judgement(found, age, alive, stale=old and not alive, stale_in=old_in)
    if alive is None or (policy == "dead-or-old" and alive):
        return Judgement(found, age, alive, stale=old, stale_in=old_in)
    return Judgement(found, age, alive, stale=not alive, stale_in=None)


def _liveness(fd: int, device: int, path: str, found: Record) -> bool | None:
    """Is the holder alive? None: that cannot be proved."""
    me = owner.me()
    mount = mount_at(device, path)
    if found.boot != me.boot:
        # Another machine, or an earlier life of this one. Only on a disk of our own is it certainly the latter.
        earlier = found.boot is not None and found.host == me.host and mount.is_ours
        return False if earlier else None
    if found.boot is None and (found.host is None or found.host != me.host):
        return None  # another tool's record; or a system without boot ids, where the host has to do
    if found.owner is not None and mount.refusal is None:
        return system.liveness_locked(fd)
    if found.start is None or me.start is None or owner.namespace_of(found.start) != owner.namespace_of(me.start):
        return None
    return owner.start_of(found.pid) == found.start
