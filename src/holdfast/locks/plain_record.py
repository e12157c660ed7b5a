"""The content of a lock file without token and timestamp, as `SoftFileLock` of the package filelock writes it.

    4711                                    pid
    build7                                  host name; outside the first pid namespace with "?pidns-" and its number
    960312341234567…                        start of the process: boot id * 2**64 + clock ticks. Not on every system

Lines end in LF, also the last one. The modification time of the file is the time of the acquisition.

A holder is dead if its host is this one, and no process has its pid, or that process has another start time. An empty
file is one that filelock has created and not yet written, or one of a version before 3.22: it never counts as dead. A
record that was cut off in the middle is stale two seconds after its last change.
"""

from __future__ import annotations

import os
import re
from functools import cache

from .. import owner, system
from ..errors import CorruptLock
from ..owner import sanitise
from .record import Format, Record, Writer, other_kind

_FIRST_NAMESPACE, _FIRST_TIME_NAMESPACE = 0xEFFFFFFC, 0xEFFFFFFA  # in include/uapi/linux/nsfs.h
_MAX_HOST, _DIGEST = 253, 8  # characters of a host name, and of the digest at the end of a longer one
_MAX_PID = 2**31 - 1
_TORN_AFTER_S = 2.0
_RECORD = re.compile(rb"([0-9]{1,10})\n([\x21-\x7e]{1,253})\n(?:([0-9]{1,60})\n)?")
# The beginning of a record; and what filelock leaves at the name for a moment while it takes over a stale lock.
_TORN = re.compile(rb"[0-9]{0,10}|[0-9]{1,10}\n[\x21-\x7e]{0,253}(\n[0-9]{0,60})?|filelock/(break\n[0-9]*|released)\n?")


@cache
def _host_name() -> str:
    """The name of this machine as filelock writes it: every byte that is not printable ASCII as "?" and two digits."""
    name = os.fsencode(owner.me().host)
    text = "".join(chr(byte) if 0x21 <= byte <= 0x7E and byte != 0x3F else f"?{byte:02x}" for byte in name)
    namespace = system.pid_namespace()
    if namespace not in (0, _FIRST_NAMESPACE):
        text += f"?pidns-{namespace:x}"
    if len(text) > _MAX_HOST:
        from hashlib import sha256

        kept = _MAX_HOST - _DIGEST - 1
        text = f"{text[:kept]}-{sha256(text[kept:].encode()).hexdigest()[:_DIGEST]}"
    return text or "?"


def _counts_from_boot() -> bool:
    """Are the start times in /proc those that other processes see? Not in a time namespace of its own."""
    try:
        return system.stat("/proc/self/ns/time").st_ino == _FIRST_TIME_NAMESPACE
    except OSError:
        return True


def _boot_number() -> int:
    return int((owner.boot_id() or "0").replace("-", ""), 16)


def _boot_text(number: int) -> str | None:
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])) if number else None


class PlainFormat(Format):
    """The format of `LockFile(format="filelock")`."""

    whole_seconds = False
    has_time = False
    pid_is_proof = True
    token_from_end = 0

    def parse(self, content: bytes) -> Record:
        found = _RECORD.fullmatch(content)
        pid = int(found[1]) if found else 0
        if found is None or not 0 < pid <= _MAX_PID:
            raise CorruptLock("no pid and host")
        host = found[2].decode()
        if host != _host_name():
            return Record(pid, 0, host=sanitise(host))
        me = owner.me()
        if found[3] is None or me.start is None or not _counts_from_boot():
            return Record(pid, 0, host=me.host)
        boot, ticks = divmod(int(found[3]), 2**64)
        return Record(
            pid,
            0,
            host=me.host,
            boot=_boot_text(boot) or me.boot,
            start=f"{ticks}:{owner.namespace_of(me.start)}",
        )

    def other_kind(self, content: bytes) -> str:
        if _TORN.fullmatch(content):
            return ""
        if content.startswith(b"pid="):
            return "a lock file of the sema format"
        return other_kind(content)

    def corrupt_after(self, content: bytes, stale_after: float | None) -> float | None:
        if not content or stale_after is not None:
            return stale_after
        return _TORN_AFTER_S

    def renewal(self, content: bytes, seconds: float) -> tuple[int, bytes]:
        """Writing any byte sets the modification time."""
        return 0, content[:1]

    def writer(self, tag: str | None) -> Writer:
        return _PlainWriter(self, tag)


PLAIN = PlainFormat()


class _PlainWriter(Writer):
    """Writes the same record for every hold of a process."""

    __slots__ = ("_content",)

    def write(self, serial: int) -> bytes:
        me = owner.me()
        if self._me is not me:
            lines = [str(me.pid), _host_name()]
            if me.start is not None and _counts_from_boot():
                lines.append(str(_boot_number() << 64 | int(me.start.partition(":")[0])))
            self._content = "".join(f"{line}\n" for line in lines).encode()
            self._me = me
        return self._content
