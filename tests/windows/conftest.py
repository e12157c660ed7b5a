"""These tests run on Windows only: scripts/wine.sh runs them under wine, with pytest.ini of this folder."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from peers import Peer

if sys.platform == "win32":
    from peers import avoid_what_wine_lacks

    avoid_what_wine_lacks()

collect_ignore_glob = [] if sys.platform == "win32" else ["test_*.py"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of a lock that does not exist yet."""
    return str(tmp_path / "x.lock")


@pytest.fixture(scope="session")
def idle_peers() -> Iterator[list[Peer]]:
    """Starting a process takes a second under wine, so they are used again."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.end()


@pytest.fixture
def start_peer(idle_peers: list[Peer]) -> Iterator[Callable[..., Peer]]:
    """Start peers. A peer whose state a test has changed is ended."""
    from peers import Peer

    busy: list[Peer] = []

    def start(**names: object) -> Peer:
        peer = idle_peers.pop() if idle_peers else Peer()
        busy.append(peer)
        peer.use(**names)
        return peer

    yield start
    with ExitStack() as stack:
        for peer in busy:
            stack.callback(_give_back, peer, idle_peers)


def _give_back(peer: Peer, idle_peers: list[Peer]) -> None:
    if not peer.is_idle:
        peer.end()
        return
    try:
        peer.rest()
    except BaseException:
        peer.kill()
        peer.end()
        raise
    idle_peers.append(peer)
