"""Finding the events that match a query, by postings: the positions of the events with a tag and a type, in order.

A `Source` knows the postings of some events: the index on disk, or a `Block` in memory. An item of a query is searched
for each of its types, or for each type that its tags have:

    no tag          the events of the type
    one tag         the events with the tag and the type, which are one list
    several tags    one list for each tag. Where they differ, the search jumps to the event that is further on. So it
                    takes at most as many steps as the shortest list is long

Nothing is read that is not asked for: a search for the last match looks only at the end of each list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import merge
from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ..model import Query, QueryItem

_FIRST, _GROWTH, _MOST = 1, 16, 2048  # positions that are asked for at once


class Source(Protocol):
    """Postings. The tag "" stands for all events of a type, whatever tags they have."""

    def kinds(self, tag: str) -> Collection[str]:
        """The types of the events with this tag."""

    def find(self, tag: str, kind: str, low: int, high: int, backwards: bool, limit: int) -> list[int]:
        """The first positions from `low` to `high`, or the last ones, from the last one on."""


class Block:
    """The postings of some events, in memory."""

    __slots__ = ("_tags", "first", "last")

    def __init__(self, first: int) -> None:
        self.first = first
        self.last = first - 1
        # Most lists have one position: a number instead of a list spares a list, and the collector's time.
        self._tags: dict[str, dict[str, int | list[int]]] = {"": {}}

    def add(self, position: int, kind: str, tags: Iterable[str]) -> None:
        self._add(position, kind, "")
        for tag in tags:
            self._add(position, kind, tag)
        self.last = position

    def _add(self, position: int, kind: str, tag: str) -> None:
        kinds = self._tags.get(tag)
        if kinds is None:
            self._tags[tag] = {kind: position}
            return
        found = kinds.get(kind)
        if found is None:
            kinds[kind] = position
        elif isinstance(found, int):
            kinds[kind] = [found, position]
        else:
            found.append(position)

    def may_have(self, query: Query) -> bool:
        """False: no event here has all tags of an item. To look at that first is the cheapest."""
        return any(all(tag in self._tags for tag in item.tags) for item in query.items)

    def kinds(self, tag: str) -> Collection[str]:
        return list(self._tags.get(tag, ()))

    def find(self, tag: str, kind: str, low: int, high: int, backwards: bool, limit: int) -> list[int]:
        found = self._tags.get(tag, {}).get(kind, ())
        if isinstance(found, int):
            return [found] if low <= found <= high else []
        start, stop = bisect_left(found, low), bisect_right(found, high)
        if backwards:
            return list(found[max(start, stop - limit) : stop][::-1])
        return list(found[start : min(stop, start + limit)])

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """All postings: tag, type, position."""
        for tag, kinds in self._tags.items():
            for kind, found in kinds.items():
                for position in (found,) if isinstance(found, int) else found:
                    yield tag, kind, position


class Recent:
    """The postings of the last events that this process has read: those behind `base`, without gaps."""

    _BLOCK, _BLOCKS = 2048, 4  # events in a block, and blocks, at most. Each search looks into each block

    def __init__(self, base: int) -> None:
        self.base = base
        self.blocks: list[Block] = []

    def add(self, position: int, kind: str, tags: Iterable[str]) -> None:
        blocks = self.blocks
        if not blocks or position - blocks[-1].first >= self._BLOCK:
            if len(blocks) >= self._BLOCKS:
                self.base = blocks[0].last
                self.blocks = blocks = blocks[1:]  # another list: a search in the old list goes on with it
            blocks.append(Block(position))
        blocks[-1].add(position, kind, tags)


def search(source: Source, query: Query, low: int, high: int, *, backwards: bool) -> Iterator[int]:
    """The positions from `low` to `high` that match, in order, or from the last one on."""
    lists = [found for item in query.items for found in _lists(source, item, low, high, backwards)]
    if len(lists) == 1:
        yield from lists[0]
        return
    last = None
    for position in merge(*lists, reverse=backwards):
        if position != last:  # else two items match it
            yield position
        last = position


def _lists(source: Source, item: QueryItem, low: int, high: int, backwards: bool) -> Iterator[Iterator[int]]:
    tags = sorted(item.tags)
    kinds: Collection[str] = item.types
    if not kinds:
        kinds = set.intersection(*(set(source.kinds(tag)) for tag in tags or ("",)))
    for kind in kinds:
        if len(tags) > 1:
            yield _common(source, tags, kind, low, high, backwards)
        else:
            yield _all(source, tags[0] if tags else "", kind, low, high, backwards)


def _all(source: Source, tag: str, kind: str, low: int, high: int, backwards: bool) -> Iterator[int]:
    limit = _FIRST
    while low <= high:
        found = source.find(tag, kind, low, high, backwards, limit)
        yield from found
        if len(found) < limit:
            return
        low, high = (low, found[-1] - 1) if backwards else (found[-1] + 1, high)
        limit = min(_MOST, limit * _GROWTH)


def _common(source: Source, tags: list[str], kind: str, low: int, high: int, backwards: bool) -> Iterator[int]:
    """The events that are in the lists of all tags."""
    agreed = at = 0  # how many lists have the position `at`, the ones before `turn`
    turn = 0
    while low <= high:
        found = source.find(tags[turn], kind, low, high, backwards, 1)
        if not found:
            return
        agreed = agreed + 1 if found[0] == at else 1
        at = found[0]
        turn = (turn + 1) % len(tags)
        if agreed == len(tags):
            yield at
            agreed = 0
            low, high = (low, at - 1) if backwards else (at + 1, high)
        else:
            low, high = (low, at) if backwards else (at, high)
