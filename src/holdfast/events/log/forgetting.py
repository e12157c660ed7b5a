"""Forgetting: segments are written again, without the data of the events that have a tag.

    roll       if such an event is in the last segment, a new one begins (under the store's lock). So no segment that
               is written again grows meanwhile
    rewrite    one segment after the other: a new file, synced, renamed to the name of the old one. Positions, ids,
               times, types, tags and batches stay, so the index stays right, but for the place where it ends
    documents  the states of projections are removed. They may contain data that is forgotten

Appends and reads go on meanwhile. A reader that has the old file open goes on with it, and opens the new one for the
next event. A process that is killed leaves each segment old or new.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

from ... import system
from ...errors import CorruptStore
from ...files import read_all, remove, replace_file, sync_directory
from ...locks.lock import Lock
from ..model import Query, is_erased
from . import lines, segments
from .index import Mark
from .search import Block

if TYPE_CHECKING:
    from .engine import LogEngine


def forget(engine: LogEngine, tag: str) -> int:
    """Erase the data of all events with the tag that are visible now. Returns the number of events."""
    with Lock(f"{engine.name}/.forget.lock", timeout=engine.options.lock_timeout).acquire():
        found = engine.read(Query.of(tags=(tag,)), 0, engine.head(), backwards=False, limit=None)
        positions = [event.position for event in found if not is_erased(event)]
        folder = engine.view.events
        firsts = segments.list_segments(folder)
        if positions and positions[-1] >= firsts[-1]:
            engine.committer.begin_segment()
            firsts = segments.list_segments(folder)
        _remove_unfinished(folder, firsts[:-1])
        for first, end in pairwise(firsts):
            wanted = positions[bisect_left(positions, first) : bisect_left(positions, end)]
            if wanted:
                _rewrite(engine, first, wanted)
        _rewrite_cut_lines(engine, tag)
        sync_directory(folder)
        engine.documents.remove_all()
        return len(positions)


def _remove_unfinished(folder: str, firsts: list[int]) -> None:
    """New files of an earlier call that was killed. (A new last segment may be made by another process right now.)"""
    ours = tuple(f"{first:010d}.jsonl." for first in firsts)
    for name in system.listdir(folder):
        if name.startswith(ours) and name.endswith(".tmp"):
            remove(f"{folder}/{name}")


def _rewrite(engine: LogEngine, first: int, positions: list[int]) -> None:
    path, index = segments.segment_path(engine.view.events, first), engine.view.builder.index
    left = set(positions)
    found = read_all(path).split(b"\n")
    for position, line in enumerate(found, first):
        is_wanted = position in left and lines.is_good(line, engine.tag)
        if is_wanted and line.startswith(b'{"position":%d,' % position):
            found[position - first] = lines.without_data(line, engine.tag)
            left.remove(position)
    if left:
        position = min(left)
        what = f"{path}: event {position} is damaged, and was left as it is. Restore the segment, and forget again."
        raise CorruptStore(what, path=path, position=position)
    with index.lock():  # no process looks for the end of the index in the new file before it is noted
        mark = engine.view.builder.mark()
        _replace(path, b"\n".join(found))
        if mark.position and mark.segment == first:
            text = b"".join(line + b"\n" for line in found[: mark.position - first + 1])
            after = Mark(mark.position, first, len(text), text[-lines.SUM_LENGTH :])
            index.write(Block(mark.position + 1), mark, after)


def _replace(path: str, text: bytes) -> None:
    replace_file(path, text, stat.S_IMODE(system.stat(path).st_mode), sync=True)


def _rewrite_cut_lines(engine: LogEngine, tag: str) -> None:
    """The files of lines that an append has cut off after a power failure."""
    for name in system.listdir(engine.view.events):
        if ".jsonl.cut-" not in name or name.endswith(".tmp"):
            continue
        path = f"{engine.view.events}/{name}"
        found = read_all(path).split(b"\n")
        for at, line in enumerate(found):
            if lines.is_good(line, engine.tag) and tag in lines.decode_head(line).tags:
                found[at] = lines.without_data(line, engine.tag)
        _replace(path, b"\n".join(found))
