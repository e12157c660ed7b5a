"""What lock files say: reading and writing the `sema` format (docs/formats.md).

    pid=4711
    timestamp=1735420800
    tag=deploy-v1.2.3
    host=build7                             ours from here on; readers that do not know them ignore them
    boot=0f4c9d2e-…                         which run of which kernel
    start=8812345:4026531836                start time of the process in clock ticks, and its pid namespace
    owner=9f86d081884c7d65                  the holder keeps the liveness byte of this file locked
    call=5d41402abc4b2a76                   instead of owner: acquired for that pid by a call that has ended
    token=1735420800123456789               fencing token, always 20 digits, so that it can be written in place

Lines end in LF, and may end in CRLF when read. A line is split at its first '='; white space around key and value does
not count; empty lines, lines without '=' and unknown keys are ignored; of two lines with one key the last counts. `pid`
and `timestamp` are needed, and are plain decimal numbers.

Content that cannot be parsed raises `CorruptLock`, and nothing else: any program may have written it. An empty file and
one whose first line is `pid=` and digits, count as a damaged lock. Any other content is the user's data (rule 8).
"""

from __future__ import annotations

from ..errors import CorruptLock
from ..owner import sanitise

MAX_BYTES = 64 * 1024
MAX_TAG_LENGTH = 10_000
_MAX_PID = 2**32 - 1
_MAX_NUMBER = 2**63 - 1
TOKEN_DIGITS = 20


class Record:
    """The content of a lock file."""

    __slots__ = ("boot", "call", "host", "owner", "pid", "start", "tag", "timestamp", "token")

    def __init__(
        self,
        pid: int,
        timestamp: float,
        tag: str | None = None,
        host: str | None = None,
        boot: str | None = None,
        start: str | None = None,
        owner: str | None = None,
        token: int | None = None,
        call: str | None = None,
    ) -> None:
        self.pid = pid
        self.timestamp = timestamp
        self.tag = tag
        self.host = host
        self.boot = boot
        self.start = start
        self.owner = owner
        self.token = token
        self.call = call

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("pid", "timestamp", "tag", "host", "token"))
        return f"Record({fields})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]


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
    fields = {}
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            fields[key.strip()] = value.strip()
    token = fields.get("token", "")
    return Record(
        _number(fields, "pid", _MAX_PID),
        _number(fields, "timestamp", _MAX_NUMBER),
        sanitise(fields["tag"]) if "tag" in fields else None,
        _printable(fields.get("host")),
        fields.get("boot"),
        fields.get("start"),
        fields.get("owner"),
        int(token) if _is_number(token, _MAX_NUMBER) else None,
        fields.get("call"),
    )


def _printable(text: str | None) -> str | None:
    return None if text is None else sanitise(text)


def _is_number(text: str, largest: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= largest


def _number(fields: dict[str, str], key: str, largest: int) -> int:
    text = fields.get(key)
    if text is None:
        raise CorruptLock(f"no {key}")
    if not _is_number(text, largest):
        raise CorruptLock(f"{key} is not a plain number that fits: {sanitise(text[:40])!r}")
    return int(text)


def template(record: Record) -> bytes:
    """The bytes of a record for `%` with a timestamp and the two parts of an owner, the rest being as given."""
    head, tail = compose(record).replace(b"%", b"%%").split(b"timestamp=%010d\n" % record.timestamp, 1)
    before, after = tail.rsplit(b"owner=\n", 1)
    return head + b"timestamp=%010d\n" + before + b"owner=%b%x\n" + after


def compose(record: Record) -> bytes:
    lines = [f"pid={record.pid}\ntimestamp={record.timestamp:010d}\n"]
    if record.tag is not None:
        lines.append(f"tag={record.tag}\n")
    lines += [
        f"{key}={value}\n"
        for key, value in (
            ("host", record.host),
            ("boot", record.boot),
            ("start", record.start),
            ("owner", record.owner),
            ("call", record.call),
        )
        if value is not None
    ]
    if record.token is not None:
        lines.append(f"token={record.token:0{TOKEN_DIGITS}d}\n")
    return "".join(lines).encode()


class Format:
    """How the content of a lock file is written and read; this one is sema's, `task_record` has another."""

    kind = "file"
    whole_seconds = True  # the time in a record is rounded down, and ages count in whole seconds

    def parse(self, content: bytes) -> Record:
        """Raises CorruptLock, and nothing else."""
        return parse(content)

    def other_kind(self, content: bytes) -> str:
        """What a file is that `parse` cannot read; empty if it counts as a lock of this format, empty or damaged."""
        if not content or _is_damaged(content):
            return ""
        from .task_record import is_task

        return "the lock of a task" if is_task(content) else other_kind(content)

    def corrupt_after(self, stale_after: float | None) -> float | None:
        """How old a damaged lock must be to be stale, by the modification time of its file."""
        return stale_after

    def template(self, record: Record) -> bytes:
        """What stays the same of the records of a process, for `fill`."""
        return template(record)

    def fill(self, template: bytes, seconds: float, random: bytes, serial: int) -> bytes:
        return template % (seconds, random, serial)

    def renewal(self, content: bytes, seconds: float) -> tuple[int, bytes]:
        """Where the time stands, and what to write there: as many bytes as before."""
        return content.index(b"timestamp=") + len(b"timestamp="), b"%010d" % seconds

    def token_at(self, content: bytes) -> int:
        return len(content) - TOKEN_DIGITS - 1

    def same_owner(self, one: bytes, other: bytes) -> bool:
        """Are both the record of one hold?"""
        try:
            mine, theirs = self.parse(one), self.parse(other)
            return (mine.owner or mine.call) is not None and (mine.owner, mine.call) == (theirs.owner, theirs.call)
        except CorruptLock:
            return False


def _is_damaged(content: bytes) -> bool:
    """Does it begin as a record does, with a line of `pid=` and digits?"""
    first = content.split(b"\n", 1)[0].rstrip(b"\r")
    return first.startswith(b"pid=") and first[len(b"pid=") :].isdigit()


def other_kind(content: bytes) -> str:
    return "the file of a semaphore" if content.startswith(b"permits=") else "a file with other content"


SEMA = Format()
