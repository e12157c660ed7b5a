"""Drafts: events that are ready to be appended, but for their positions."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from ..json_text import depth_of

if TYPE_CHECKING:
    from datetime import datetime

    from .model import Event

_DEEPEST = 200


class _Body(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    type: str
    tags: list[str]
    data: Any
    metadata: Any


class _Parts(msgspec.Struct, gc=False):
    data: msgspec.Raw
    metadata: msgspec.Raw


_read_body = msgspec.json.Decoder(_Body).decode
_read_parts = msgspec.json.Decoder(_Parts).decode
encode = msgspec.json.Encoder().encode


class Draft:
    """An event to append. Everything is done here that can be done before a lock is held."""

    __slots__ = ("body", "id", "tags", "time", "type")

    def __init__(self, event: Event, time: datetime | None = None) -> None:
        self.type = event.type
        self.tags = sorted(event.tags)
        # `"type":…,"tags":[…],"data":…,"metadata":…`: JSON without its braces
        self.body = encode(_Body(event.type, self.tags, event.data, event.metadata))[1:-1]
        self.id = event.id  # None: the engine makes one up
        self.time = time  # None: when it is appended
        _refuse_what_cannot_be_read(self.body, self.type, self.tags)
        if b"null" in self.body:  # which is also what becomes of a number that JSON does not have
            _refuse_no_numbers(msgspec.to_builtins((event.data, event.metadata), enc_hook=lambda _: None))

    def parts(self) -> tuple[bytes, bytes]:
        """The JSON of the data, and of the metadata."""
        parts = _read_parts(b"{%s}" % self.body)
        return bytes(parts.data), bytes(parts.metadata)


def _refuse_what_cannot_be_read(body: bytes, kind: str, tags: list[str]) -> None:
    """Text that is put in as it is (msgspec.Raw) and says more than data, and data too deep to be read again."""
    if b"\n" in body:
        raise ValueError("the data of an event is one line of JSON")
    if depth_of(body) > _DEEPEST:
        raise ValueError(f"data nested more than {_DEEPEST} deep cannot be written")
    try:
        read = _read_body(b"{%s}" % body)
    except msgspec.DecodeError as error:
        raise ValueError(f"the data of an event is JSON: {error}") from None
    if read.type != kind or read.tags != tags:
        raise ValueError("the data of an event is JSON, and no more than its data")


def _refuse_no_numbers(data: object) -> None:
    if isinstance(data, float) and not isfinite(data):
        raise ValueError(f"{data} cannot be written as JSON")
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for part in data:
            _refuse_no_numbers(part)
