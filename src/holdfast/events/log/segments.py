"""The log: segments of lines, of which only the last one grows.

    events/0000000001.jsonl    named by the position of the first event in it

A segment that is written to may end in blank lines: room made beforehand, so that syncing what is written into it has
no size to write down. The end of the log is behind the last whole batch; it is found by looking, and never believed:

    writer killed in the middle of its write     reader    stops before the batch that is not whole
                                                 writer    cuts it off, under the lock, before it looks at anything else

What is cut off was never acknowledged. A line that is damaged later looks the same, except that something says that it
had been on disk: the ledger, a later line, a later segment. Then nothing is cut, and `CorruptStore` says where it is.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_right

from ... import system
from ...errors import CorruptStore
from ...files import InheritedFd, OwnedFd, create_file, inode_of, named, replace_file, sync_directory, write_at
from . import lines
from .index import Mark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from ..draft import Draft

    class Adds(Protocol):
        def add(self, position: int, kind: str, tags: Iterable[str]) -> None: ...


_A_LOOK = 4096
_A_CHUNK = 1 << 20
_ROOM = 1 << 18
_BLANK = b"\n" * _ROOM
_NEAR_ENOUGH = 1 << 14
_BEGIN = re.compile(rb'\n\{"position":(\d+),')


def segment_path(folder: str, first: int) -> str:
    return f"{folder}/{first:010d}.jsonl"


def list_segments(folder: str) -> list[int]:
    """The first positions of the segments there are."""
    found = []
    for name in system.listdir(folder):
        stem, dot, kind = name.partition(".")
        if dot and kind == "jsonl" and len(stem) >= 10 and stem.isascii() and stem.isdigit():
            found.append(int(stem))
    return sorted(found)


class Tail:
    """A segment that may grow, as far as this process has read it. What it reads is added to `recent`."""

    def __init__(
        self,
        folder: str,
        tag: bytes,
        mark: Mark,
        recent: Adds,
        *,
        writable: bool = False,
        anew: bool = False,
    ) -> None:
        self.path = segment_path(folder, mark.segment)
        self.first = mark.segment
        self._writable = writable
        self._anew = anew
        self._open()
        self._tag = tag
        self._recent = recent
        self.head = mark.position  # the last event that was read
        self.end = mark.end  # the first byte behind it
        self.size = 0  # of the file, when we last looked
        self._last = mark.last  # the last bytes of the last line

    @property
    def mark(self) -> Mark:
        return Mark(self.head, self.first, self.end, self._last)

    def _open(self) -> None:
        # It is closed when this object is collected: a thread may sync it while another one uses the next segment.
        self._file = OwnedFd(open_segment(self.path, writable=self._writable, anew=self._anew))
        self.fd = self._file.fd

    def reopen(self) -> None:
        """Ask the server: other machines may have written to what this one remembers of the file."""
        self.fd = -1
        self._file.close()
        self._open()

    def says(self, text: bytes, start: int) -> bool:
        return system.pread(self.fd, len(text), start) == text

    def ends_at(self, end: int) -> bool:
        """Does a line end there, with room behind it? Then that is where the log ends."""
        return system.pread(self.fd, 3, end - 2) == b"}\n\n"

    def read_on(self, until: int | None = None) -> bytes:
        """Read what others wrote, up to a position or as far as it goes. Gives what is behind the end.

        Nothing: the file ends there. A blank line: there is room. Else: something that is no whole batch.
        """
        known = len(self._last)
        text = system.pread(self.fd, _A_LOOK, self.end - known)
        if text[:known] != self._last:
            raise TakenBack
        text = text[known:]
        asked = _A_LOOK - known
        while text and text[0] != lines.NEWLINE and (until is None or self.head < until):
            read = self._take_in(text, until)
            is_all = len(text) < asked
            text = text[read:]
            if is_all and not read:
                break
            goes_on = not text or (text[0] != lines.NEWLINE and (until is None or self.head < until))
            if goes_on and not is_all:
                asked = _A_CHUNK if read else asked * 4
                text = system.pread(self.fd, asked, self.end)
        return text

    def _take_in(self, text: bytes, until: int | None) -> int:
        start, size = self.end, 0
        for batch, size in lines.batches(text, self.head + 1, self._tag):  # noqa: B007  # used behind the loop
            for head in batch:
                self._recent.add(head.position, head.type, head.tags)
            self.head = batch[-1].position
            if until is not None and self.head >= until:
                break
        if size:
            self.end = start + size
            self._last = text[:size][-lines.SUM_LENGTH :]
        return size

    # For the holder of the lock.

    def write(self, drafts: list[Draft], texts: list[bytes], start: int, *, room: bool) -> int:
        """Write batches at the end of the log. An interrupted caller cuts them off. Returns the new end."""
        text = b"".join(texts) if len(texts) > 1 else texts[0]
        size = len(text)
        if room and start + size > self.size:
            self._make_room(start + size)
        write_at(self.fd, text, start)
        if start != self.end:  # there are events of others before it that we have not read
            return start + size
        for head, draft in enumerate(drafts, self.head + 1):
            self._recent.add(head, draft.type, draft.tags)
        self.head += len(drafts)
        self.end = start + size
        self._last = text[-lines.SUM_LENGTH :]
        return self.end

    @property
    def is_gone(self) -> bool:
        """Was the file removed?"""
        return system.is_removed(self.fd)

    def _make_room(self, needed: int) -> None:
        size = system.fstat(self.fd).st_size
        while size < needed:
            try:
                size += system.pwrite(self.fd, _BLANK, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                break  # perhaps the lines themselves still fit
        self.size = size

    def cut(self, end: int) -> None:
        """Remove everything behind `end`."""
        system.ftruncate(self.fd, end)
        self.size = end

    def repair(self, rest: bytes, known_safe: int, *, thorough: bool) -> bool:
        """Remove what a crash left behind the end. True: there was something.

        `known_safe`: up to which event everything was on disk at some time. `thorough`: the machine may have crashed,
        and so left anything anywhere in what was not synced.
        """
        if not thorough and (not rest or rest[0] == lines.NEWLINE):
            return False
        if not self.check_rest(known_safe):
            return False
        self._save_rest()
        self.cut(self.end)
        return True

    def _save_rest(self) -> None:
        """Keep whole lines in a file: the append that wrote them may have returned."""
        rest = self._all_behind_end()
        if not _good_heads(rest, self._tag):
            return
        create_file(f"{self.path}.cut-{self.end}-{os.urandom(4).hex()}", rest.rstrip(b"\n") + b"\n", 0o600)

    def check_rest(self, known_safe: int = 0) -> bool:
        """Is there something behind the end that a crash may have left? Raises if it was no crash.

        killed          the beginning of a write, and then nothing, or room
        power failure   any of the pages of a write: in between, room, or zeros
        copied by a     room, where the end was when that part was copied; then what was written later. It says that
        program         what is missing had been on disk, and so it had, but not when the copy was begun
        """
        rest = self._all_behind_end()
        if not rest.strip(b"\n"):
            return False
        good = _good_heads(rest, self._tag)
        gap = _before_good(rest, self._tag)
        has_room = gap[:1] == b"\n" or b"\n\n" in gap
        safe = max(known_safe, 0 if has_room else max((head.batch[2] for head in good), default=0))
        if safe > self.head:
            raise self.damaged(f"event {self.head + 1} is damaged: it had been on disk")
        if gap and not has_room and b"\0" not in gap:
            raise self.damaged(f"event {self.head + 1}, or one behind it, is damaged, and what comes after that is not")
        if _is_foreign(rest, self._tag):
            raise self.damaged("not ours")
        return True

    def _all_behind_end(self) -> bytes:
        parts: list[bytes] = []
        start = self.end
        while True:
            text = system.pread(self.fd, _A_CHUNK, start)
            if not text:
                return b"".join(parts)
            parts.append(text)
            start += len(text)

    def damaged(self, what: str) -> CorruptStore:
        rest = system.pread(self.fd, _A_CHUNK, self.end)
        if _is_foreign(rest, self._tag):
            what = "the lines from here on belong to another store"
        number = line_number(self.fd, self.end)
        where = f"{self.path}, line {number} (byte {self.end})" if rest.strip(b"\n") else _end_of(self.path, self.head)
        return CorruptStore(
            f"{where}: {what}. Nothing was changed; holdfast events verify tells all that is wrong.",
            path=self.path,
            line=number,
            offset=self.end,
            position=self.head + 1,
        )


class Segment(InheritedFd):
    """A segment that may have ended, open for reading. A reader in a forked child goes on with its copy."""

    def __init__(self, folder: str, first: int, *, anew: bool) -> None:
        self.path = segment_path(folder, first)
        self.first = first
        super().__init__(open_segment(self.path, writable=False, anew=anew))

    @property
    def is_replaced(self) -> bool:
        """Was it written again (`forgetting`)? Its path names another file then."""
        return named(self.path, inode_of(system.fstat(self.fd))) is None

    def find(self, position: int, last: int, end: int) -> int:
        """Where the line of an event begins, or should begin. `last` is the last event, and ends at byte `end`.

        Positions grow with the bytes: guess, look at the next line, and guess or halve again. A wrong guess, such as
        in a long line, costs time and nothing else.
        """
        low, at_low, high, at_high = 0, self.first, end, last + 1
        halve = False
        while high - low > _NEAR_ENOUGH:
            part = 0.5 if halve else (position - at_low) / max(1, at_high - at_low)
            halve = not halve
            middle = low + min(max(int((high - low) * part) - _A_LOOK, 0), high - low - 1)
            line = _BEGIN.search(system.pread(self.fd, 2 * _A_LOOK, middle))
            if line is not None and (there := int(line[1])) <= position:
                low, at_low = middle + line.start() + 1, there
            elif middle == low:
                break
            else:
                high, at_high = middle, there if line is not None else at_high
        return self._search(position, low)

    def _search(self, position: int, start: int) -> int:
        wanted = b'{"position":%d,' % position
        begin, before = start, b"\n"
        while text := system.pread(self.fd, _A_CHUNK if begin > start else _NEAR_ENOUGH + _A_LOOK, begin):
            at = (before + text).find(b"\n" + wanted)
            if at >= 0:
                return begin + at + 1 - len(before)
            before = (before + text)[-len(wanted) :]
            begin += len(text)
        return self._count_to(position) if start else begin

    def _count_to(self, position: int) -> int:
        """It is not there. Where it would be, by the number of lines."""
        start = 0
        for _ in range(position - self.first):
            start = self.end_of_line(start)
        return start

    def end_of_line(self, start: int) -> int:
        """The byte behind the newline of the line that begins there."""
        size = 4096
        while True:
            text = system.pread(self.fd, size, start)
            at = text.find(b"\n")
            if at >= 0 or len(text) < size:
                return start + (at + 1 if at >= 0 else len(text))
            size *= 4

    def damaged(self, offset: int, position: int, *, foreign: bool = False) -> CorruptStore:
        number = line_number(self.fd, offset)
        where = f"{self.path}, line {number} (byte {offset})"
        what = "belongs to another store" if foreign else "is damaged"
        if not system.pread(self.fd, 2, offset).strip(b"\n"):
            where, what = _end_of(self.path, position - 1), MISSING
        return CorruptStore(
            f"{where}: event {position} {what}. holdfast events verify tells all that is wrong.",
            path=self.path,
            line=number,
            offset=offset,
            position=position,
        )


MISSING = "is missing, with the segment that it was in"


def _end_of(path: str, last: int) -> str:
    return f"{path}, which ends with event {last}"


class TakenBack(Exception):
    """What was read before is not there any more: its append failed. So what is known of the segment is void."""


def _good_heads(text: bytes, tag: bytes) -> list[lines._Head]:
    return [lines.decode_head(line) for line in text.split(b"\n") if line and lines.is_good(line, tag)]


def _before_good(text: bytes, tag: bytes) -> bytes:
    """What is between the first line that is not good, and the next good one; nothing, if none comes behind it."""
    start, bad, is_bad = 0, 0, False
    for line in text.split(b"\n"):
        if lines.is_good(line, tag):
            if is_bad:
                return text[bad:start]
        elif not is_bad:
            is_bad, bad = True, start
        start += len(line) + 1
    return b""


def _is_foreign(text: bytes, tag: bytes) -> bool:
    return lines.is_foreign(text[: text.find(b"\n")], tag)


def line_number(fd: int, offset: int) -> int:
    """The number of the line that begins there, counted from 1 as editors do."""
    count, start = 1, 0
    while start < offset:
        text = system.pread(fd, min(_A_CHUNK, offset - start), start)
        if not text:
            break
        count += text.count(b"\n")
        start += len(text)
    return count


def segment_of(firsts: list[int], position: int) -> int:
    """The index of the segment in which an event is."""
    return bisect_right(firsts, position) - 1


def open_segment(path: str, *, writable: bool, anew: bool) -> int:
    """`anew`: each read asks the server (NFS). To open it again does not, if a process of this machine has it open. A
    lock on it does not either: the client was seen to ignore the answer when other processes read meanwhile."""
    flags = system.O_EXISTING if writable else system.O_READ
    return system.open_fd(path, flags | system.O_DIRECT if anew else flags)


def make_segment(folder: str, first: int, mode: int, *, durable: bool, anew: bool = False) -> None:
    """Make an empty segment. A process that died may have made it already. `anew`: replace it."""
    path = segment_path(folder, first)
    try:
        (replace_file if anew else create_file)(path, b"", mode)
    except FileExistsError:
        pass
    if durable:
        sync_directory(folder)
