"""What the tests share. Peers and looks into /proc are in `support`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from support import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
