"""The index: what events are found by, in an SQLite file that can be thrown away.

    index/<number>.db    table posting (tag, kind, position), one b-tree; each event has a row for every tag, and one
                         with an empty tag. `kind` is the number of its type, in table kind
                         table state, one row: up to where the log is in it, whose index it is, and in what directory;
                         and a checksum of that

It is derived from the log, and never believed without a look: an index of another store, in a directory that was copied
(which another inode number tells), or whose last line is not in the log, is replaced by a new file with a greater
number. What it finds is compared with the event. It is not older than it says: a power failure takes back whole
transactions (`synchronous = normal`).

One process at a time writes it (`lock`), outside of the store's lock, and only what is on disk. Where other machines
write to the store too, or this process may not write, the file is in the user's cache directory, or in memory.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import nullcontext, suppress
from typing import NamedTuple
from zlib import crc32

from ... import system
from ...errors import Timeout
from ...files import OwnedFd, inode_of, named
from ...locks.lock import Lock
from ...paths import mount_at
from ...sqlite import Database, inside_sqlite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from contextlib import AbstractContextManager

    from .search import Block

_FORMAT = 2
ERRORS = (sqlite3.Error, UnicodeError)  # of a damaged file, whose text may be in the message of SQLite
_TABLES = """
create table kind (id integer primary key, name blob unique not null);
create table posting (tag blob, kind int, position int, primary key (tag, kind, position)) without rowid;
create table state (format int, owner text, position int, segment int, end int, last blob, sum int);
"""
# Small pages: a tag that is rare changes one page for each of its events.
_PRAGMAS: tuple[str, ...] = ("pragma page_size = 1024", "pragma journal_mode = wal", "pragma synchronous = normal")
_PRAGMAS += ("pragma cache_size = -4000", "pragma wal_autocheckpoint = 8000", "pragma busy_timeout = 10000")
_ORDER = "select position from posting where tag = ? and kind = ? and position between ? and ? order by position "
_FIND = {False: _ORDER + "limit ?", True: _ORDER + "desc limit ?"}
_KINDS = """
with recursive one (kind) as (
    select min(kind) from posting where tag = ?1
    union all select (select min(kind) from posting where tag = ?1 and kind > one.kind) from one where one.kind > 0)
select kind from one where kind > 0"""


class Mark(NamedTuple):
    """A place in the log, behind a whole batch."""

    position: int = 0
    segment: int = 1
    end: int = 0
    last: bytes = b""  # the end of its last line


BEGINNING = Mark()


class Damaged(Exception):
    """SQLite cannot read it, or it is no index of this log."""


class Foreign(Damaged):
    """It belongs to another store, or was copied together with the store."""


class Index(Database):
    """The index of one store, for one process. Any thread may call it."""

    def __init__(self, root: str, store: bytes, mode: int, *, shared: bool) -> None:
        Database.__init__(self)
        self._root = root
        self._store = store
        self._mode = mode
        self._folder: str | None = None if shared else f"{root}/index"  # None: to be looked for. Empty: in memory
        self.known = 0  # up to here, what is in the open file was found to fit the log
        self._opened = ("", (0, 0))  # file, inode
        self._me = ""  # the owner of a file of ours
        self._names: dict[int, str] = {}  # of the kinds that were looked up
        self._ids: dict[str, int] = {}

    # Where it is.

    def folder(self) -> str:
        """Its directory; empty: it is in memory."""
        if self._folder is None:
            self._folder = _cache_of(self._root, self._store)
        return self._folder

    def stay_in_memory(self) -> None:
        self._folder = ""

    def lock(self, timeout: float | None = None) -> AbstractContextManager[object]:
        """The right to write. If this process may not write there, the index is in another place from then on."""
        while folder := self.folder():
            try:
                os.makedirs(folder, exist_ok=True)
                return Lock(f"{folder}/lock", keep=True, mode=self._mode).acquire(timeout=timeout)
            except Timeout:
                raise
            except OSError:
                self._go_elsewhere()
        return nullcontext()

    def _go_elsewhere(self) -> None:
        with inside_sqlite:
            self.close()
            cache = _cache_of(self._root, self._store)
            self._folder = "" if self._folder == cache else cache

    def _owner(self) -> str:
        """Another one in a copy."""
        number = generation = system.stat(self.folder()).st_ino
        if system.HAS_FOLDERS:
            with OwnedFd(system.open_fd(self.folder(), system.O_SYNCABLE_FOLDER)) as file:
                generation = system.generation(file.fd)
        return f"{self._store.decode()}.{number}.{generation}"

    def _files(self) -> list[int]:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = [name[:-3] for name in system.listdir(self.folder()) if name.endswith(".db")]
            return sorted(int(name) for name in names if name.isdigit())
        return []

    # Opening.

    def mark(self) -> Mark:
        """Up to where the log is in it. Raises Damaged."""
        with inside_sqlite:
            if not self._is_current() and not self._open():
                return BEGINNING
            try:
                format_, owner, *mark, sum_ = self.run("select * from state").fetchone()
                found = Mark(*mark)
                if format_ != _FORMAT or owner != self._me:
                    raise Foreign
                if sum_ != _sum_of(found):
                    raise Damaged
                return found
            except (*ERRORS, TypeError, ValueError, OSError) as error:
                raise Damaged from error

    @property
    def is_there(self) -> bool:
        return self.raw is not None

    def _is_current(self) -> bool:
        if self.raw is None:
            return False
        file, inode = self._opened
        if not file:
            return True
        with suppress(OSError):
            if named(file, inode) is not None:
                return True
        self.close()
        return False

    def _open(self) -> bool:
        for number in reversed(self._files()):
            file = f"{self._folder}/{number}.db"
            try:
                inode = inode_of(system.stat(file))
                self._me = self._owner()
                self.connect(file, *_PRAGMAS[2:])
            except (*ERRORS, OSError):
                continue
            self._opened = file, inode
            return True
        return False

    def replace(self) -> None:
        """Begin a new file. The caller has `lock`."""
        with inside_sqlite:
            self.close()
            if self.folder():
                try:
                    self._replace()
                    return
                except (sqlite3.Error, OSError):  # no room, or no right to write
                    self._folder = ""
            self._create("")

    def _replace(self) -> None:
        old = self._files()
        self._create(f"{self._folder}/{old[-1] + 1 if old else 1}.db")
        for one in old:
            for end in ("", "-wal", "-shm"):
                with suppress(OSError):
                    system.unlink(f"{self._folder}/{one}.db{end}")

    def _create(self, file: str) -> None:
        tables = _TABLES.strip().split("\n")
        self._me = self._owner() if file else ""
        state = f"insert into state values ({_FORMAT}, '{self._me}', 0, 1, 0, x'', {_sum_of(BEGINNING)})"
        self.connect(file, *_PRAGMAS, "begin", *tables, state, "commit", mode="rwc")
        self._opened = file, inode_of(system.stat(file)) if file else (0, 0)

    def before_fork(self) -> None:
        super().before_fork()
        self._forget()

    def close(self) -> None:
        super().close()
        self._forget()

    def _forget(self) -> None:
        self._opened = "", (0, 0)
        self.known = 0
        self._names, self._ids = {}, {}

    # Finding: a `search.Source`.

    def kinds(self, tag: str) -> Collection[str]:
        with inside_sqlite:
            found = [row[0] for row in self._run(_KINDS, (_bytes(tag),))]
            return [self._name(kind) for kind in found]

    def find(self, tag: str, kind: str, low: int, high: int, backwards: bool, limit: int) -> list[int]:
        with inside_sqlite:
            number = self._id(kind)
            if not number:
                return []
            found = [row[0] for row in self._run(_FIND[backwards], (_bytes(tag), number, low, high, limit))]
            try:
                is_good = found == sorted({low - 1, *found, high + 1}, reverse=backwards)[1:-1]
            except TypeError:  # not all of them are numbers
                is_good = False
            if not is_good:
                raise Damaged
            return found

    def _run(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[int, ...]]:
        try:
            if self.raw is None and not self._open():
                raise Damaged
            return self.run(statement, values).fetchall()  # type: ignore[no-any-return]
        except ERRORS as error:
            raise Damaged from error

    def _id(self, kind: str) -> int:
        number = self._ids.get(kind, 0)
        if not number:
            for (number,) in self._run("select id from kind where name = ?", (_bytes(kind),)):
                self._ids[kind], self._names[number] = number, kind
        return number

    def _name(self, number: int) -> str:
        if number not in self._names:
            for (name,) in self._run("select name from kind where id = ?", (number,)):
                text = bytes(name).decode("utf-8", "surrogatepass")
                self._names[number] = text
        try:
            return self._names[number]
        except KeyError:
            raise Damaged from None

    # Writing. The caller has `lock`.

    def write(self, block: Block, before: Mark, after: Mark) -> None:
        """Add a block of events, which begins behind `before` and ends at `after`; all of it or nothing."""
        with inside_sqlite:
            if self.mark() != before:
                raise Damaged
            try:
                self.run("begin immediate")
                try:
                    self._insert(block)
                    mark = (*after, _sum_of(after))
                    self.run("update state set position = ?, segment = ?, end = ?, last = ?, sum = ?", mark)
                    self.run("commit")
                    self.known = after.position
                except BaseException:
                    self.close()  # which takes it back
                    raise
            except ERRORS as error:
                raise Damaged from error

    def _insert(self, block: Block) -> None:
        for kind in block.kinds(""):
            if not self._id(kind):
                self.run("insert into kind (name) values (?)", (_bytes(kind),))
        rows = sorted((_bytes(tag), self._id(kind), position) for tag, kind, position in block.rows())
        assert self.raw is not None
        self.raw.executemany("insert into posting values (?, ?, ?)", rows)

    def rows(self, until: int) -> Iterator[tuple[bytes, bytes, int]]:
        """All that is in it up to a position: tag, type, position."""
        return self.run(  # type: ignore[no-any-return]
            "select tag, name, position from posting join kind on kind.id = posting.kind where position <= ? "
            "order by position, tag, name",
            (until,),
        )


def _sum_of(mark: Mark) -> int:
    return crc32(repr(tuple(mark)).encode())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _cache_of(root: str, store: bytes) -> str:
    """A directory for the index of a store, on a disk of this machine; empty: there is none."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = f"{base}/holdfast/events/{store.decode()}-{crc32(root.encode()):08x}"
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        is_local = mount_at(system.stat(folder).st_dev, folder).is_ours
    except OSError:
        return ""
    return folder if is_local and os.access(folder, os.W_OK) else ""
