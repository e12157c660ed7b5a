"""Copies of a store: in JSON lines (export and import), and in another store, also of another engine (copy)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .. import system
from ..errors import ConditionFailed, CorruptStore, Timeout
from ..files import private_name, remove
from .draft import Draft
from .model import AppendCondition, Event, Query, StoredEvent

if TYPE_CHECKING:
    from .store import EventStore

_AT_ONCE = 1000
_ALL = Query()

Said = TypeVar("Said", bound="_New")


def export(store: EventStore, target: Any, query: Query, after: int) -> int:
    if hasattr(target, "write"):
        return _export(store, target, query, after)
    if isinstance(target, int):
        with open(target, "wb", closefd=False) as file:
            return _export(store, file, query, after)
    path = os.path.realpath(os.fsdecode(target))
    if os.path.commonpath([path, os.path.realpath(store.path)]) == os.path.realpath(store.path):
        raise ValueError(f"{path} is inside of the store itself; give it another place")
    if os.path.exists(target) and not os.path.isfile(target):  # a pipe, a terminal
        with open(target, "wb") as file:
            return _export(store, file, query, after)
    # All of it or nothing: part of an export would look like a smaller store.
    private = private_name(path)
    try:
        with open(private, "xb") as file:
            count = _export(store, file, query, after)
            file.flush()
            system.fsync(file.fileno())
        with suppress(FileNotFoundError):
            os.chmod(private, stat.S_IMODE(system.stat(path).st_mode))
        system.rename(private, path)
    except BaseException as error:
        remove(private)
        if isinstance(error, OSError) and error.filename == private:
            error.filename = path
        raise
    return count


def _export(store: EventStore, target: Any, query: Query, after: int) -> int:
    count = 0
    for event in _raw(store, after, store.head(), query):
        target.write(as_line(event))
        count += 1
    return count


def as_line(event: StoredEvent) -> bytes:
    return msgspec.json.encode(event) + b"\n"


class _New(msgspec.Struct, forbid_unknown_fields=True):
    """An event to append. A key that is spelled wrong would be a tag that is not there."""

    type: str
    data: Any = None
    tags: list[str] = []
    metadata: Any = {}
    id: str | None = None


class _Exported(_New, forbid_unknown_fields=True):
    time: datetime | None = None
    batch: tuple[int, int, int] | None = None
    position: int | None = None
    sum: str | None = None


_read_new = msgspec.json.Decoder(_New)
_read_exported = msgspec.json.Decoder(_Exported)


def import_(store: EventStore, source: Any) -> int:
    count = 0
    with ExitStack() as stack:
        if isinstance(source, str | os.PathLike):
            source = stack.enter_context(open(source, "rb"))
        waiting: list[list[Draft]] = []

        def append() -> None:
            nonlocal count, waiting
            store._append_drafts(waiting)
            count += sum(map(len, waiting))
            waiting = []

        try:
            for drafts in _drafts(source):
                waiting.append(drafts)
                if len(waiting) >= _AT_ONCE:
                    append()
            append()
        except ValueError as error:
            raise ValueError(f"{error} ({count} events before it were appended)") from None
    return count


def parse(source: Iterable[bytes | str]) -> Iterator[Event]:
    """New events in JSON lines."""
    return (event for _, event in _parse(source, _read_new))


def _parse(source: Iterable[bytes | str], decoder: msgspec.json.Decoder[Said]) -> Iterator[tuple[Said, Event]]:
    """As they are said, and as they can be appended."""
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            said = decoder.decode(line)
            event = Event(said.type, said.data, said.tags, said.metadata, said.id)
        except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError) as error:
            raise ValueError(f"line {number} is no event: {error}") from None
        yield said, event


def _drafts(source: Iterable[bytes | str]) -> Iterator[list[Draft]]:
    """By batches, as they were."""
    drafts: list[Draft] = []
    batch: tuple[int, int, int] | None = None
    for said, event in _parse(source, _read_exported):
        if drafts and (said.batch is None or said.batch != batch):
            yield drafts
            drafts = []
        batch = said.batch
        drafts.append(Draft(event, said.time))
    if drafts:
        yield drafts


def copy(source: EventStore, target: EventStore) -> int:
    """Append to `target` the events of `source` that it does not have yet, at the same positions. Return how many.

    Every batch is copied whole. So if this process is killed, the target has the first batches of the source, and the
    next call goes on behind them. The target may have no other events, and no other program may append to it meanwhile.
    """
    _check_beginning(source, target)
    count = 0
    drafts: list[Draft] = []
    waiting: list[list[Draft]] = []

    def append() -> None:
        """Only if the target still ends where the copy does."""
        nonlocal count, waiting
        try:
            target._append_drafts(waiting, AppendCondition(Query(), head + count))
        except ConditionFailed:
            raise _other_events(source, target) from None
        count += sum(map(len, waiting))
        waiting = []

    head = target.head()
    for event in _raw(source, head, source.head()):
        new = Event(event.type, event.data, event.tags, event.metadata, event.id)
        drafts.append(Draft(new, event.time))
        if event.position == event.batch[1]:  # the batch is complete
            waiting.append(drafts)
            drafts = []
            if len(waiting) >= _AT_ONCE or len(waiting[-1]) >= _AT_ONCE:
                append()
    append()
    _copy_checkpoints(source, target)
    return count


def _copy_checkpoints(source: EventStore, target: EventStore) -> None:
    """Let each subscription of the target be as far as that of the source, unless it is ahead or is consumed."""
    for name in source._engine.checkpoints():
        ours, theirs = source._engine.checkpoint(name), target._engine.checkpoint(name)
        with suppress(Timeout), theirs.lock.acquire(0), closing(theirs):
            position, had = ours.position(), theirs.position()
            if position is not None and had is None:
                theirs.create(min(position, target.head()))
            elif position is not None and had is not None and had < position <= target.head():
                theirs.save(position)


def _raw(store: EventStore, after: int, head: int, query: Query = _ALL) -> Iterator[StoredEvent]:
    """As they are stored, without the classes and upcasts of the store."""
    return store._engine.read(query, max(0, after), head, backwards=False, limit=None)


def _check_beginning(source: EventStore, target: EventStore) -> None:
    """Compare all events that the target has with those of the source."""
    if source.id == target.id:
        raise ValueError(f"{source.path} and {target.path} are the same store")
    head = target.head()
    if head > source.head():
        raise _other_events(source, target)
    for one, other in zip(_raw(source, 0, head), _raw(target, 0, head), strict=True):
        if _without_sync(one) != _without_sync(other):
            raise _other_events(source, target)


def _without_sync(event: StoredEvent) -> StoredEvent:
    """Without what was on disk when it was appended."""
    return msgspec.structs.replace(event, batch=(*event.batch[:2], 0))


def _other_events(source: EventStore, target: EventStore) -> CorruptStore:
    return CorruptStore(
        f"{target.path} has events that {source.path} does not have, or others appended to it meanwhile. Copy to a new "
        "store.",
        path=target.path,
    )
