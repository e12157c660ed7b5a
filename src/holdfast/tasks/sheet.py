"""A sheet: tasks that need no file of their own, one in a line.

Most tasks are put without an id, wait, are begun once, and are done. A file for each of them, with a name for each of
its places, takes many times as long as a line. So such a task is a line, until anything else happens to it: it fails,
is cancelled, given back, says how far it is, its worker dies. Then it gets a file of its own, and stays there.

    sheets/<priority>/waiting/<n>    lines, in the order in which they were put; about a thousand
    sheets/<priority>/past/<n>       the same when nothing in it waits any more
    sheets/<priority>/done/<n>       what became of those that were done at the first attempt
    slots/<name>                     what a worker has in hand (`slots`)

A line begins with a mark, which changes in place, and only in this order:

    blanks           it waits
    x<slot>          somebody has it in that slot; or had it there, and it is done, or has a file
    m                it has a file of its own, in tasks/, or had one
    p                it was done, and purged

Who changes a mark has that line locked: one byte, by its position, far behind the end of the file. Who adds lines has
the file locked. Behind the last line are empty ones: room for what comes, so that a line can be synced alone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic, time
from typing import NamedTuple

from .. import system
from ..errors import CorruptStore
from ..files import OwnedFd, read_open, remove, try_lock, write_all, write_at
from . import journal
from .journal import Task
from .places import NUMBER_DIGITS, content, make, sync_folders
from .sequence import lock_patiently

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .slots import Slot

WAITS, TAKEN, MOVED, PURGED = b" ", b"x", b"m", b"p"
_MARK = 18  # bytes
_BLANK = WAITS * _MARK
_BEGINNING = re.compile(rb'([ xmp][0-9a-f ]{16} )\{"id": ?"([1-9][0-9]{0,17}-[0-9a-f]{16})"')
_BEFORE_WAITING = b'\n%18s{"id":' % b""
_ID = re.compile(r"[1-9][0-9]{0,17}-[0-9a-f]{16}")
_WAITING_ID = re.compile(rb' ?"([1-9][0-9]{0,17}-[0-9a-f]{16})"').match
# What a file can be that somebody has put there, or may not be used, or is damaged.
ONLY_THIS_FILE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.EINVAL, errno.ESPIPE}
    | {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}  # the disk has a bad place there
)
_NOTHING = (b"", b"\n", b"\0")  # behind the last line
_CLOSED = ord("}")
LONGEST = 1 << 12  # of a line, or of what is done
_ROOM, _MOST_ROOM = 1 << 12, 1 << 16
_PAGE = 1 << 12
_LINES, _PAGES = 1 << 60, 1 << 61  # the bytes by which lines, and pages, are locked: far behind the end
_RECENT, _SURE, _QUIET = 2.0, 0.001, 0.02  # seconds


def is_on_sheet(id: str) -> bool:
    """Could this be the id of a line?"""
    return isinstance(id, str) and _ID.fullmatch(id) is not None


def on_sheet(id: str, line: bytes) -> bytes:
    """A line with this id, which waits; given one without an id."""
    return b'%18s{"id": "%s%s' % (b"", id.encode(), line[len(b'{"id": "') :])


def new_id(number: int) -> str:
    return f"{number}-{os.urandom(8).hex()}"


def place_of(id: str) -> str:
    """As if it had a file."""
    return f"{id.partition('-')[0].rjust(NUMBER_DIGITS, '0')}.{id}"


class Entry(NamedTuple):
    """A line, and where it is."""

    sheet: Sheet
    at: int
    length: int
    id: str
    mark: bytes  # as it was

    @property
    def kind(self) -> bytes:
        return self.mark[:1]

    @property
    def slot(self) -> str:
        return self.mark[1:].decode().strip()

    @property
    def place(self) -> str:
        return place_of(self.id)


class Sheet:
    """One of them, open."""

    def __init__(self, folder: str, name: str, state: str, mode: int, *, create: bool = False) -> None:
        self.folder, self.name, self.state = folder, name, state
        self.path = f"{folder}/{state}/{name}"
        self._mode = mode
        self._file, self.is_writable = _open(self.path, mode, create=create)
        self._named = system.name_of_open(self._file.fd)
        if self._named.endswith((" (deleted)", f"/past/{name}")) and state != "past":
            raise FileNotFoundError(errno.ENOENT, "moved while it was opened", self.path)
        self._sure_at = -1.0
        self._done: OwnedFd | None = None
        self._done_mutex = Lock()
        self._mutex = Lock()  # the threads of a process have the same locks
        self._end = 0  # what is before is written
        self._size = 0  # at least
        self._first_page = 0  # nothing waits before it
        self._page = -1  # the one at which we are

    @property
    def is_ours(self) -> bool:
        return self._file.is_open

    @property
    def inode(self) -> int:
        return system.fstat(self._file.fd).st_ino

    def is_in_place(self) -> bool:
        """Does it still have the name by which it was opened?"""
        return system.name_of_open(self._file.fd) == self._named

    def _was_in_place(self) -> bool:
        """A moment ago. Somebody may have removed it since, who could also have done so a moment later."""
        now = monotonic()
        if now - self._sure_at < _SURE:
            return True
        self._sure_at = now
        return self.is_in_place()

    @property
    def _is_quiet(self) -> bool:
        """For so long that whoever adds lines looks again whether it is in place."""
        return not 0 <= time() - system.fstat(self._file.fd).st_mtime < _QUIET

    def is_at(self, level: int, name: str) -> bool:
        return self.name == name and self.folder.endswith(f"/{level}") and self.is_in_place()

    # Adding.

    def append(self, text: bytes) -> bool:
        """Add lines. False: it is not here any more, or somebody who has it locked does not go on."""
        fd = self._file.fd
        with self._mutex:
            try:
                if not lock_patiently(fd) or not self._was_in_place():
                    return False
                end = self._end
                if system.pread(fd, 1, end) not in _NOTHING:
                    end = self._find_end()  # others have added some
                if end + len(text) >= self._size:
                    self._make_room(end + len(text) + 1)
                write_at(fd, text, end)
                self._end = end + len(text)
            finally:
                system.lock(fd, system.UN)
        return True

    def _find_end(self) -> int:
        return len(self._read().rstrip(b"\n\0")) + 1

    def _make_room(self, needed: int) -> None:
        fd = self._file.fd
        self._size = system.fstat(fd).st_size
        if self._size < needed:
            try:
                room = min(_MOST_ROOM, max(_ROOM, self._size))
                write_at(fd, b"\n" * max(room, needed - self._size), self._size)
            finally:
                self._size = system.fstat(fd).st_size

    def sync(self) -> None:
        system.fdatasync(self._file.fd)

    def shut(self) -> None:
        """Move it to where those are in which nothing waits, and to which nothing more comes."""
        with self._mutex:
            try:
                system.lock(self._file.fd, system.EX_NB)
                if self.is_in_place() and self._is_quiet and not self.waiting():
                    self._move_to(f"{self.folder}/past")
            except BlockingIOError:
                pass  # it is looked again
            finally:
                system.lock(self._file.fd, system.UN)

    def _move_to(self, folder: str) -> None:
        make(folder)
        target = f"{folder}/{self.name}"
        try:
            system.link(self.path, target)
        except FileExistsError:
            if system.stat(target).st_ino != self.inode:  # else somebody died here
                return
        except FileNotFoundError:
            return  # somebody has removed it
        remove(self.path)

    # Looking.

    def waiting(self) -> list[Entry]:
        """What waits, in order."""
        text = b"\n" + self._read()
        return self._waiting_in(text, -1, len(text))

    def next_waiting(self, without: Collection[str] = (), *, alone: bool = False) -> list[Entry]:
        """The next ones that wait, a page of them, `without` those in some places. `alone`: if possible, of the first
        page at which nobody else is.

        So those who do task after task in no time do not meet at every line. It keeps nobody from anything: what waits
        on a page at which somebody is, who is busy now, is for the next one who comes.
        """
        self.leave_page()
        page, is_first, others = self._first_page, True, []
        while True:
            mine = system.lock_byte(self._file.fd, _PAGES + page)
            if mine:
                self._page = page
            elif alone:
                if page * _PAGE > system.fstat(self._file.fd).st_size:
                    break  # somebody has locked all of it
                others.append(page)
                is_first = False
                page += 1
                continue
            waiting, ends, is_full = self._on_page(page)
            found = [entry for entry in waiting if entry.place not in without] if without else waiting
            if found:
                return found
            self.leave_page()
            if ends:
                break
            is_first = is_first and is_full
            page += 1
            if is_first:
                self._first_page = page  # nothing waits before it
        for other in others:
            found = [entry for entry in self._on_page(other)[0] if entry.place not in without]
            if found:
                return found
        return []

    def _on_page(self, page: int) -> tuple[list[Entry], bool, bool]:
        """What waits in lines that begin there. If nothing: is nothing written there, nor behind? And were all lines
        that begin there written when it was read?"""
        start, size = page * _PAGE - 1, _PAGE * 2  # with the end of the line before
        text = system.pread(self._file.fd, size, start) if page else b"\n" + system.pread(self._file.fd, size - 1, 0)
        last = text.rfind(b"\n", 0, _PAGE)  # behind it begins the last line
        while last >= 0 and len(text) == size and text.find(b"\n", last + 1) < 0:  # a long one
            size *= 2
            text = text[:1] + system.pread(self._file.fd, size - 1, start + 1)
        waiting = self._waiting_in(text, start, _PAGE - 1)
        if waiting:
            return waiting, False, False
        end = text.find(b"\n", last + 1)
        is_full = end >= _PAGE and text[end - 1] == _CLOSED if last >= 0 else len(text) > _PAGE
        # The beginning may have been read before somebody wrote, and the rest after that. Between them lines are empty.
        is_full = is_full and b"" not in text[:end].split(b"\n")[1:]
        return [], not text[: _PAGE + 1].strip(b"\n"), is_full

    def leave_page(self) -> None:
        page, self._page = self._page, -1
        if page >= 0 and self._file.is_open:
            system.unlock_byte(self._file.fd, _PAGES + page)

    def _waiting_in(self, text: bytes, start: int, most: int) -> list[Entry]:
        """The lines behind a line end, and not behind the most. (To look for the whole pattern takes much longer.)"""
        found = []
        at = text.find(_BEFORE_WAITING, 0, most + len(_BEFORE_WAITING))
        while at >= 0:
            match = _WAITING_ID(text, at + len(_BEFORE_WAITING))
            end = text.find(b"\n", at + 1)
            if end < 0:
                break
            if match is not None and (text[end - 1] == _CLOSED or _is_closed(text[at:end])):
                found.append(Entry(self, start + at + 1, end - at, match[1].decode(), _BLANK))
            at = text.find(_BEFORE_WAITING, end, most + len(_BEFORE_WAITING))
        return found

    def entries(self, marks: bytes = b" xmp") -> Iterator[Entry]:
        """All with one of these marks."""
        at = 0
        for line in self._read().split(b"\n")[:-1]:
            if line and line[0] in marks and _is_closed(line) and (match := _BEGINNING.match(line)):
                yield Entry(self, at, len(line) + 1, match[2].decode(), match[1])
            at += len(line) + 1

    def find(self, id: str) -> Entry | None:
        text, wanted = self._read(), id.encode()
        at = text.find(wanted)
        while at >= 0:
            begin = text.rfind(b"\n", 0, at) + 1
            match = _BEGINNING.match(text, begin)
            if match is not None and match[2] == wanted:
                return Entry(self, begin, text.find(b"\n", begin) + 1 - begin, id, match[1])
            at = text.find(wanted, at + 1)  # this was in somebody's payload
        return None

    def line(self, entry: Entry) -> bytes:
        """What there is to do: the first line of the file that it has not."""
        return system.pread(self._file.fd, entry.length - _MARK, entry.at + _MARK)

    def is_still(self, entry: Entry) -> bool:
        """Is it marked as it was?"""
        return system.pread(self._file.fd, _MARK, entry.at) == entry.mark

    def _read(self) -> bytes:
        return read_open(self._file.fd)

    # Changing marks.

    def take(self, entry: Entry, slot: Slot, more: bytes, *, check: bool = True) -> tuple[Task, bytes] | None:
        """Bring a line that is still marked so into a slot, with `more` behind it. None: somebody is at it, or was.

        First the slot, then the mark: who is killed in between has nothing.
        """
        fd = self._file.fd
        with self._mutex:
            if not self._file.is_open:
                return None
            try:
                if not self._lock_line(entry):
                    return None
                text = system.pread(fd, entry.length, entry.at)
                if text[:_MARK] != entry.mark:
                    return None
                line = text[_MARK:]
                try:
                    task = self._parse(line, entry)
                except CorruptStore:
                    if self._was_being_written(entry):
                        return None
                    if check:
                        raise
                    task = Task("", None)
                text = line + more
                slot.fill(text)
                self.set_mark(entry, slot.mark)
            finally:
                system.unlock_byte(fd, _LINES + entry.at)
        return task, text

    def _parse(self, line: bytes, entry: Entry) -> Task:
        try:
            task = journal.parse(line, self.path)
            if task.id == entry.id and line.endswith(b"\n"):
                return task
        except CorruptStore:
            pass
        text = f"{self.path}: the line of task {entry.id} does not say what there is to do. Mend that line."
        raise CorruptStore(text, path=self.path)

    def _was_being_written(self, entry: Entry) -> bool:
        """When it was seen, or is. The empty lines behind it make any part of it look like a line."""
        fd = self._file.fd
        if not try_lock(fd, system.SH_NB):
            return True
        try:
            end = read_open(fd).find(b"\n", entry.at) + 1
        finally:
            system.lock(fd, system.UN)
        return end != entry.at + entry.length

    @contextmanager
    def locked(self, entry: Entry) -> Iterator[bool]:
        """False: somebody else is at this line."""
        with self._mutex:
            try:
                yield self._lock_line(entry)
            finally:
                system.unlock_byte(self._file.fd, _LINES + entry.at)

    def _lock_line(self, entry: Entry) -> bool:
        """In a `try` whose end unlocks it, so that an interrupt does not leave it locked. Who has not got it unlocks
        nothing: what others have is theirs."""
        if not self.is_writable:
            raise PermissionError(errno.EACCES, "to change a task, one has to be allowed to write here", self.path)
        return system.lock_byte(self._file.fd, _LINES + entry.at)

    def set_mark(self, entry: Entry, mark: bytes) -> None:
        write_at(self._file.fd, mark.ljust(_MARK), entry.at)

    # What became of them.

    def add_done(self, id: str, begun: bytes, line: bytes, *, sync: bool) -> None:
        """The lines that a file of its own would have: that it was begun, and that it is done."""
        name = id.encode()
        text = b"\n%s %s%s %s" % (name, begun, name, line)
        file = self._done
        if file is None or not file.is_open:
            file = self._open_done(sync)
        write_all(file.fd, text)
        if sync:
            system.fdatasync(file.fd)

    def _open_done(self, sync: bool) -> OwnedFd:
        with self._done_mutex:
            if self._done is None or not self._done.is_open:
                path = f"{self.folder}/done/{self.name}"
                flags = system.O_LOCK | os.O_APPEND
                try:
                    self._done = OwnedFd(system.open_fd(path, flags, self._mode))
                except FileNotFoundError:
                    make(f"{self.folder}/done")  # somebody has tidied up
                    self._done = OwnedFd(system.open_fd(path, flags, self._mode))
                if sync:
                    sync_folders(f"{self.folder}/done")
            return self._done

    def make_done(self) -> None:
        """So that it is there to be watched."""
        self._open_done(sync=False)
        self._done = None

    @property
    def watched(self) -> tuple[str, ...]:
        """One of these is written to when something happens to a line."""
        return self.path, f"{self.folder}/done/{self.name}"

    def done(self) -> dict[str, bytes]:
        """By id, what is to be read behind the line."""
        found: dict[str, bytes] = {}
        for line in content(self.watched[1]).splitlines(keepends=True):
            name, _, rest = line.partition(b" ")
            _add_record(found, name.decode("latin-1"), rest)
        return {id: text for id, text in found.items() if text.count(b"\n") > 1}

    def version(self) -> object | None:
        """Another one whenever something was done, or a mark has changed; None if that cannot be told."""
        st = system.fstat(self._file.fd)
        if time() - st.st_mtime < _RECENT:
            return None  # a change within one tick of the clock would not be seen
        try:
            return st.st_ino, st.st_mtime_ns, system.stat(self.watched[1]).st_size
        except FileNotFoundError:
            return None

    def history(self, id: str) -> bytes:
        """The same of one; nothing if it is not done."""
        text, before, found = content(self.watched[1]), b"\n%s " % id.encode(), {id: b""}
        at = text.find(before)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            _add_record(found, id, text[at + len(before) : end + 1])
            at = text.find(before, at + 1)
        return found[id] if found[id].count(b"\n") > 1 else b""


def _open(path: str, mode: int, *, create: bool) -> tuple[OwnedFd, bool]:
    """The file, and whether one may do more than look."""
    try:
        return OwnedFd(system.open_fd(path, system.O_LOCK if create else system.O_EXISTING, mode)), True
    except OSError as error:
        if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return OwnedFd(system.open_fd(path, system.O_READ)), False


def _is_closed(line: bytes) -> bool:
    """Is it whole? Whoever has edited it may have left blanks."""
    return line.rstrip().endswith(b"}")


def _add_record(found: dict[str, bytes], id: str, line: bytes) -> None:
    if line.startswith(b'{"is": "running"'):
        found[id] = line  # anew: the one before could not be written whole
    elif id in found and journal.is_done_line(line):
        found[id] += line
