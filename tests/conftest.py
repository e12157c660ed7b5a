"""What the tests share. Peers and looks into /proc are in `support`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from support import Peer

from holdfast import gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _book_is_right() -> Iterator[None]:
    """A forked child closes what the book says is open. What is in it by mistake would be somebody else's file."""
    yield
    book = gate.book
    for fd, inode, _, _, _ in book.holds.values():
        st = os.fstat(fd)
        assert (st.st_dev, st.st_ino) == inode, f"descriptor {fd} is in the book, and is another file by now"
    for fd in book.open_fds:
        os.fstat(fd)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a lock can be: nothing there yet."""
    return os.path.realpath(tmp_path / "x.lock")


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Where fsync takes no time."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """Starts peers; ends them with the test, however it goes."""
    with ExitStack() as stack:
        yield lambda **names: stack.enter_context(Peer(**names))
