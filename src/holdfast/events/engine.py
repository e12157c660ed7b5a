"""The port between the event store and its log: what an engine does.

An engine stores events and finds them. The face (`store`) and the modules beside it have everything else: events,
queries, decisions, projections, following, copies. An engine implements four operations:

    commit    append requests, each whole or not at all, each under its own condition
    head      the position of the last event
    read      the events that match a query, between two positions
    wait      the steps of a wait until the head changes

and a few more: `load`, `save`, `forget`, `checkpoint`, `verify`, `rebuild`, `close`. Any number of threads and
processes call them at once.

What every engine promises (tests/events/test_engines.py):

* Positions are 1, 2, 3 … without gaps or repeats, in the order in which events become visible.
* A reader that knows a head never sees an event at or below it appear later. It sees all of a batch or nothing of it.
* A condition is checked against every event before the request's own first position, and nothing comes in between. So
  of appends under conflicting conditions, one succeeds.
* A request that is answered without an error is visible to every `head` and `read` that begins afterwards, in all
  processes. If the engine is durable, it survives a power failure. A request that is answered with an error has left
  no event, unless the error says that this is not known.
* A process that is killed at any step leaves each of its requests whole or not at all, and blocks no other process.

An engine decides which requests it commits together. `requests` collects the appends of the threads of a process, and
`conditions` decides about them in order. Both are written for all engines.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from weakref import WeakSet

import msgspec

from .. import process
from ..errors import UnsafePath, Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .. import wait
    from ..locks.base import BaseLock, StrPath
    from .model import Query, StoredEvent
    from .requests import Request

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Options(msgspec.Struct, frozen=True):
    """What the user chose for an engine. An engine ignores what does not apply to it."""

    lock_timeout: float | None
    durable: bool
    segment_size: int
    mode: int


class Problem(msgspec.Struct, frozen=True):
    """Something that is wrong, and where."""

    path: str
    what: str
    line: int | None = None
    offset: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}, line {self.line} (byte {self.offset})"
        return f"{where}: {self.what}"


class Report(msgspec.Struct, frozen=True):
    """What `verify` found."""

    events: int
    segments: int  # files of the log; 0 for an engine without files
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class Document(msgspec.Struct, frozen=True):
    """A small text that the store keeps under a name: the state of a projection."""

    name: str
    where: str  # for messages: a path, or the name of a row
    content: bytes | None  # None: it was never saved
    era: bytes | None  # another one after each `forget`


class Checkpoint(ABC):
    """The position up to which the consumers of a subscription have handled all events."""

    where: str  # for messages: a path, or the name of a row
    lock: BaseLock[Any]  # its holder is the active consumer, and saves the position

    @abstractmethod
    def position(self) -> int | None:
        """The position that was saved last. None: there is no subscription with this name."""

    @abstractmethod
    def create(self, position: int) -> None:
        """Make the subscription. Its position was None."""

    @abstractmethod
    def save(self, position: int) -> None:
        """Replace the position. It survives the death of this process, and soon also a power failure."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the subscription."""

    def close(self) -> None:  # noqa: B027  # not every engine has something to close
        """Close what `save` has opened."""


class Engine(ABC):
    """The mechanism behind one event store. It opens its files or connections when it needs them."""

    name: str  # of the store in messages: its path, or its URL without a password
    id: str  # 32 hex digits: two stores never have the same

    @abstractmethod
    def commit(self, *requests: Request) -> None:
        """Append, and wait for the answers: each request gets its `position`, or its `error`.

        The requests are written in this order. If one of them fails for another reason than its own condition, those
        behind it fail, too. Raises only what the caller did not ask for: an interrupt, or `WouldDeadlock` if this
        thread is in the middle of an append or a read already (a signal handler is).
        """

    def commit_on(self, connection: Any, request: Request) -> None:
        """Append in the transaction of a connection of the caller. Raises the error of the request."""
        raise self._no_connection()

    async def acommit_on(self, connection: Any, request: Request) -> None:
        """The same for an asynchronous connection."""
        raise self._no_connection()

    def _no_connection(self) -> Unsupported:
        return Unsupported(f"{self.name}: connection= needs an event store in PostgreSQL", path=self.name)

    @abstractmethod
    def withdraw(self, request: Request) -> bool:
        """Take back a request that another thread commits. False: too late, wait for its answer."""

    @abstractmethod
    def head(self) -> int:
        """The position of the last visible event; 0 if there is none."""

    @abstractmethod
    def read(self, query: Query, after: int, head: int, *, backwards: bool, limit: int | None) -> Iterator[StoredEvent]:
        """The events that match, with `after` < position <= `head`, in order of position, or from the last one on.

        The caller got `head` from this engine. It takes at most `limit` events, and may stop at any time. What can be
        refused is refused at once, and not when the first event is asked for.
        """

    @abstractmethod
    def wait(self, after: int, had: int, deadline: float | None) -> wait.Steps[int]:
        """The steps of a wait until the head is greater than `after`, or smaller than `had`. They return the head.

        Raises `wait.DeadlinePassed`. Nothing polls where the system can report news.
        """

    @abstractmethod
    def load(self, name: str) -> Document:
        """The document with this name. Raises UnsafePath, as `checkpoint` does, if it cannot be one."""

    def _no_name(self, name: str) -> UnsafePath:
        text = f"{name!r} cannot be the name of a projection or subscription: it is empty or too long"
        return UnsafePath(text, path=self.name)

    @abstractmethod
    def save(self, document: Document, content: bytes) -> None:
        """Replace all of a document that was loaded. A process that is killed here leaves the old or the new content.

        If `forget` was called since the load, this does nothing: the content may contain data that is forgotten.
        """

    @abstractmethod
    def forget(self, tag: str) -> int:
        """Erase the data of all events with this tag, and remove all documents. Returns the number of events.

        The metadata keeps the notes of Holdfast. Positions, ids, times, types and tags stay. A process that is killed
        here leaves each event as it was, or erased. The next call does the rest.
        """

    @abstractmethod
    def checkpoint(self, name: str) -> Checkpoint:
        """The checkpoint of a subscription, which may not exist yet."""

    @abstractmethod
    def checkpoints(self) -> list[str]:
        """The names of the subscriptions, sorted."""

    @abstractmethod
    def verify(self) -> Report:
        """Look at everything. Changes nothing."""

    def backup(self, target: str) -> int:
        """Copy the store to a new directory, while others append. Returns the last position in the copy."""
        raise Unsupported(f"{self.name}: use the backup of the database, or `holdfast events export`.")

    @abstractmethod
    def rebuild(self) -> None:
        """Make again what is derived from the events, such as an index."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. Whatever is done next opens them again."""

    @abstractmethod
    def begin_again(self) -> None:
        """In a forked child, where no other thread is: not the one that appended, and not one that held a mutex."""


_engines: WeakSet[Engine] = WeakSet()


def _begin_again() -> None:
    for engine in list(_engines):
        engine.begin_again()


process.after_fork_in_child(_begin_again)


def open_engine(name: StrPath, options: Options) -> Engine:
    """The engine for a path or for the scheme of a URL. Raises Unsupported for an unknown scheme."""
    engine = _open(name, options)
    _engines.add(engine)
    return engine


def _open(name: StrPath, options: Options) -> Engine:
    found = _SCHEME.match(name) if isinstance(name, str) else None
    if found is None:
        from .log.engine import LogEngine

        return LogEngine(name, options)
    if found[1].lower() in ("postgresql", "postgres"):
        from .postgres import PostgresEngine

        return PostgresEngine(str(name), options)
    raise Unsupported(
        f"{found[1]}://…: no event store has this scheme. Give the path of a directory, or a URL postgresql://…."
    )
