"""The content of a lock file: reading and writing the `sema` format (docs/formats.md).

    pid=4711
    timestamp=1735420800
    tag=deploy-v1.2.3
    host=build7                             other tools ignore the fields from here on
    boot=0f4c9d2e-…                         one run of one kernel
    start=8812345:4026531836                start time of the process in clock ticks, and its pid namespace
    owner=9f86d081884c7d65                  the holder keeps the liveness byte of this file locked
    call=5d41402abc4b2a76                   instead of owner: acquired for that pid by a call that has ended
    token=1735420800123456789               fencing token, always 20 digits, so that it can be written in place

Lines end in LF. A reader also accepts CRLF. A line is split at its first '='. White space around key and value does not
count. A reader ignores empty lines, lines without '=' and unknown keys. If a key occurs twice, the last line counts.
`pid` and `timestamp` are required, and are plain decimal numbers.

Content that cannot be parsed raises `CorruptLock`, and nothing else: any program may have written it. An empty file,
and a file whose first line is `pid=` and digits, count as a damaged lock. Any other content is user data (rule 8).
"""

from __future__ import annotations

import os
from collections import namedtuple
from time import time

from .. import owner
from ..errors import CorruptLock
from ..owner import sanitise

MAX_BYTES = 64 * 1024
MAX_TAG_LENGTH = 10_000
_MAX_PID = 2**32 - 1
_MAX_NUMBER = 2**63 - 1
TOKEN_DIGITS = 20

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class Record(NamedTuple):
        """The fields of a lock file."""

        pid: int
        timestamp: float
        tag: str | None = None
        host: str | None = None
        boot: str | None = None
        start: str | None = None
        owner: str | None = None
        token: int | None = None
        call: str | None = None

else:  # NamedTuple would import typing
    _fields = ("pid", "timestamp", "tag", "host", "boot", "start", "owner", "token", "call")
    Record = namedtuple("Record", _fields, defaults=(None,) * 7)


def check_tag(tag: str | None) -> str | None:
    if tag is None:
        return None
    if not isinstance(tag, str):
        raise TypeError(f"a tag is a str, not {type(tag).__name__}")
    if len(tag) > MAX_TAG_LENGTH:
        raise ValueError(f"a tag has at most {MAX_TAG_LENGTH} characters, not {len(tag)}")
    return sanitise(tag).encode("utf-8", "replace").decode("utf-8")


def parse(content: bytes) -> Record:
    if len(content) > MAX_BYTES:
        raise CorruptLock(f"more than {MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptLock(f"not UTF-8 at byte {error.start}") from None
    lines = (line.partition("=") for line in text.split("\n"))
    fields = {key.strip(): value.strip() for key, equals, value in lines if equals}
    token = fields.get("token", "")
    return Record(
        _number(fields, "pid", _MAX_PID),
        _number(fields, "timestamp", _MAX_NUMBER),
        sanitise(fields["tag"]) if "tag" in fields else None,
        sanitise(fields["host"]) if "host" in fields else None,
        fields.get("boot"),
        fields.get("start"),
        fields.get("owner"),
        int(token) if _is_number(token, _MAX_NUMBER) else None,
        fields.get("call"),
    )


def _is_number(text: str, largest: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= TOKEN_DIGITS and int(text) <= largest


def _number(fields: dict[str, str], key: str, largest: int) -> int:
    text = fields.get(key)
    if text is None:
        raise CorruptLock(f"no {key}")
    if not _is_number(text, largest):
        raise CorruptLock(f"{key} is not a plain number that fits: {sanitise(text[:40])!r}")
    return int(text)


def compose(record: Record) -> bytes:
    token = None if record.token is None else f"{record.token:0{TOKEN_DIGITS}d}"
    fields = record._asdict() | {"timestamp": f"{record.timestamp:010d}", "token": None}
    lines = [*fields.items(), ("token", token)]
    return "".join([f"{key}={value}\n" for key, value in lines if value is not None]).encode()


class Format:
    """How the content of a lock file is written and read: the `sema` format. `task_record` has another one."""

    kind = "file"
    whole_seconds = True  # a record has its time in whole seconds, and so ages count in whole seconds
    time_key, owner_key = b"timestamp=", b"owner="  # the text before the time and before the owner
    has_time = True  # else the modification time of the file stands for the timestamp
    pid_is_proof = False  # is a holder on this host alive whenever any process has its pid?
    token_from_end = TOKEN_DIGITS + 1  # bytes from the first digit of the token to the end of the record. 0: no token

    def parse(self, content: bytes) -> Record:
        """Raises CorruptLock, and nothing else."""
        return parse(content)

    def compose(self, record: Record) -> bytes:
        return compose(record)

    def time_text(self, seconds: float) -> bytes:
        """The text of a time, always of the same length, so that it can be written in place."""
        return b"%010d" % seconds

    def other_kind(self, content: bytes) -> str:
        """Name the kind of a file that `parse` refuses. Empty: a lock of this format, empty or damaged."""
        first = content.split(b"\n", 1)[0].rstrip(b"\r")
        if not content or (first.startswith(b"pid=") and first[len(b"pid=") :].isdigit()):
            return ""
        from .task_record import is_task

        return "the lock of a task" if is_task(content) else other_kind(content)

    def corrupt_after(self, content: bytes, stale_after: float | None) -> float | None:
        """Return how many seconds old a damaged lock must be to be stale, by the modification time of its file."""
        return stale_after

    def renewal(self, content: bytes, seconds: float) -> tuple[int, bytes]:
        """Return the position of the time in a record, and the new text."""
        return content.index(self.time_key) + len(self.time_key), self.time_text(seconds)

    def writer(self, tag: str | None) -> Writer:
        return Writer(self, tag)


def other_kind(content: bytes) -> str:
    return "the file of a semaphore" if content.startswith(b"permits=") else "a file with other content"


SEMA = Format()


class Writer:
    """Writes the records of one lock. The constant parts are composed once per process."""

    __slots__ = ("_me", "_parts", "_tag", "format")

    def __init__(self, form: Format, tag: str | None) -> None:
        self.format = form
        self._tag = tag
        self._me: owner.Identity | None = None
        self._parts = b"", b"", b""

    def write(self, serial: int) -> bytes:
        """Return the record of a new hold. `serial` is a number that no other hold of this process has."""
        me, form = owner.me(), self.format
        if self._me is not me:
            content = form.compose(Record(me.pid, 0, self._tag, me.host, me.boot, me.start, "", 0))
            before, _, rest = content.partition(form.time_key + form.time_text(0))
            between, _, after = rest.rpartition(form.owner_key)
            self._parts = before + form.time_key, between + form.owner_key, after
            self._me = me
        before, between, after = self._parts
        return b"%b%b%b%b%x%b" % (before, form.time_text(time()), between, me.random, serial, after)


class WriterFor(Writer):
    """Writes records in the name of another process, for a command that ends in a moment.

    They have `call` in place of `owner`, because no process keeps the liveness byte locked.
    """

    __slots__ = ("pid", "start")

    def __init__(self, pid: int, tag: str | None) -> None:
        Writer.__init__(self, SEMA, tag)
        self.pid = pid
        self.start = owner.start_of(pid)

    def write(self, serial: int) -> bytes:
        me, call = owner.me(), os.urandom(8).hex()
        return compose(Record(self.pid, int(time()), self._tag, me.host, me.boot, self.start, None, 0, call))
