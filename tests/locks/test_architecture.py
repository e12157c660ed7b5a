"""docs/architecture.md draws the calls of an acquire as they are: the drawings are compared with traces."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast import Lock, LockFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from support import Peer

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified name")

PACKAGE = Path(holdfast.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
# Not drawn: these, all of `system`, special methods and properties.
HELPERS = {"files", "locks/record", "metrics", "owner", "paths", "process"}
PROPERTIES = {"FileEngine.blocks"}


@contextmanager
def traced(lines: list[str]) -> Iterator[None]:
    """Every call of a function of the package, indented by the calls around it. A generator is drawn once."""
    drawn: set[int] = set()
    frames: list[FrameType] = []  # kept, so that no identity is used again

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or PACKAGE not in file.parents or id(frame) in drawn:
            return
        module = file.relative_to(PACKAGE).with_suffix("").as_posix()
        name = frame.f_code.co_qualname
        if module in HELPERS or module.startswith("system/") or name in PROPERTIES or ".__" in name or "<" in name:
            return
        drawn.add(id(frame))
        frames.append(frame)
        depth, above = 0, frame.f_back
        while above is not None:
            depth += id(above) in drawn
            above = above.f_back
        lines.append(f"{'  ' * depth}{module.removeprefix('locks/')}: {name}")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def drawing(title: str) -> list[str]:
    found = re.search(rf"^## {re.escape(title)}$.*?^```text\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert found is not None, f"no drawing under {title!r}"
    return [line.partition("  #")[0].rstrip() for line in found[1].splitlines()]


def uncontended(path: str, start_peer: Callable[..., Peer]) -> list[str]:
    lock = Lock(path)
    lock.acquire().release()  # the first time, it also looks where it is
    lines: list[str] = []
    with traced(lines):
        hold = lock.acquire()
        hold.release()
    return lines


def contended(path: str, start_peer: Callable[..., Peer]) -> list[str]:
    lock = Lock(path)
    lock.acquire().release()
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()")
    lines: list[str] = []
    peer.begin("until_queued(path, 1); until_asleep([os.getppid()]); hold.release()")
    with traced(lines):
        hold = lock.acquire()
    hold.release()
    peer.answer()
    return lines


def stale(path: str, start_peer: Callable[..., Peer]) -> list[str]:
    lock = LockFile(path, durable=False)
    lock.acquire().release()
    Path(path).write_text("pid=4194303\ntimestamp=1000000000\n")
    lines: list[str] = []
    with traced(lines):
        hold = lock.acquire()
    hold.release()
    return lines


CASES = {"A free lock": uncontended, "A lock that is held": contended, "A stale lock file": stale}


@pytest.mark.parametrize("title", CASES)
def test_the_page_draws_the_calls_as_they_are(title: str, path: str, start_peer: Callable[..., Peer]) -> None:
    assert CASES[title](path, start_peer) == drawing(title)
