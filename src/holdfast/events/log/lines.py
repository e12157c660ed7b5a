"""The lines of the log, one JSON object each.

    {"position":5,"id":"…","time":"…Z","type":"…","tags":[…],"data":…,"metadata":…,"batch":[5,7,4],"sum":"…"}

`batch` says which positions were appended together, and up to which one everything was known to be on disk at that
moment. `sum` is 16 hex digits: 8 of the store, and the CRC-32 of the line up to the comma before `sum`. A line is good
if its sum is; a batch is there if all its lines are. So a reader needs nothing but the log to know where it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import count
from typing import Any
from zlib import crc32

import msgspec

from ... import process
from ..draft import Draft, encode
from ..model import StoredEvent, forgotten

NEWLINE = 10
_SUM = b',"sum":"'
SUM_LENGTH = len(_SUM) + 16 + 2  # …"}


class _Head(msgspec.Struct):
    """What an index needs to know of a line."""

    position: int
    type: str
    tags: list[str]
    batch: tuple[int, int, int]


decode = msgspec.json.Decoder(StoredEvent).decode
decode_head = msgspec.json.Decoder(_Head).decode


class _Line(msgspec.Struct):
    """All parts of a line, but for its data."""

    id: msgspec.Raw
    time: msgspec.Raw
    type: msgspec.Raw
    tags: msgspec.Raw
    metadata: Any
    position: int
    batch: msgspec.Raw


def without_data(line: bytes, tag: bytes) -> bytes:
    """A good line, without its newline, as the line of the same event without its data."""
    event = _decode_line(line)
    text = b'{"position":%d,"id":%s,"time":%s,"type":%s,"tags":%s,"data":null,"metadata":%s,"batch":%s' % (
        event.position,
        bytes(event.id),
        bytes(event.time),
        bytes(event.type),
        bytes(event.tags),
        encode(forgotten(event.metadata)),
        bytes(event.batch),
    )
    return b'%s,"sum":"%s%08x"}' % (text, tag, crc32(text))


_decode_line = msgspec.json.Decoder(_Line).decode


def compose(drafts: Sequence[Draft], first: int, safe: int, tag: bytes, now: datetime) -> list[bytes]:
    """The lines of a batch."""
    batch = b',"batch":[%d,%d,%d]' % (first, first + len(drafts) - 1, safe)
    moment = encode(now)
    lines = []
    for position, draft in enumerate(drafts, first):
        text = b'{"position":%d,"id":%s,"time":%s,%s%s' % (
            position,
            new_id() if draft.id is None else encode(draft.id),
            moment if draft.time is None else encode(draft.time),
            draft.body,
            batch,
        )
        lines.append(b'%s,"sum":"%s%08x"}\n' % (text, tag, crc32(text)))
    return lines


_id_begin = b""
_id_count = count().__next__


def new_id() -> bytes:
    """Like no other: random for each process, and counted in it. In quotes."""
    global _id_begin
    if not _id_begin:
        _id_begin = os.urandom(10).hex().encode()
    return b'"%s%012x"' % (_id_begin, _id_count())


def _forget_id() -> None:
    global _id_begin
    _id_begin = b""


process.after_fork_in_child(_forget_id)


def now() -> datetime:
    return datetime.now(timezone.utc)


def is_good(line: bytes, tag: bytes) -> bool:
    """Is this a line, without its newline, of the store with this tag?"""
    return (
        line[-SUM_LENGTH:-18] == _SUM
        and line[-10:-2] == b"%08x" % crc32(line[:-SUM_LENGTH])
        and line[-18:-10] == tag
        and line[-2:] == b'"}'
    )


def is_foreign(line: bytes, tag: bytes) -> bool:
    """Is it a good line, but of another store?"""
    return line[-18:-10] != tag and is_good(line, line[-18:-10])


def batches(text: bytes, expected: int, tag: bytes) -> Iterator[tuple[list[_Head], int]]:
    """The whole batches at the beginning of `text`, the first of which begins with position `expected`.

    Of each, what an index needs of its lines, and where it ends in the text.
    Ends before whatever is not part of one: nothing, blank lines, a line that is damaged or not there in full.
    """
    start = 0
    batch: list[_Head] = []
    first = expected
    while True:
        end = text.find(b"\n", start)
        if end <= start:
            return
        line = text[start:end]
        if not is_good(line, tag):
            return
        try:
            head = decode_head(line)
        except msgspec.DecodeError:
            return
        if head.position != expected or head.batch[0] != first or not expected <= head.batch[1]:
            return
        batch.append(head)
        expected += 1
        start = end + 1
        if head.position == head.batch[1]:
            yield batch, start
            batch = []
            first = expected
