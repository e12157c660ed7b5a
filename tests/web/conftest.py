"""Fixtures for the tests of `holdfast web`: the console as a process, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import Tab, start_chromium
from console_server import ConsoleServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def console(in_memory: Path) -> Iterator[Callable[..., ConsoleServer]]:
    """Starts `holdfast web`; ends it with the test, before its directory is removed."""
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(ConsoleServer(*words, **options))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's chromium. It ends with the module: Playwright's event loop must not be in the way of other tests."""
    with start_chromium() as browser:
        yield browser


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """Opens tabs. Each is a browser session of its own, with its own cookies."""
    tabs: list[Tab] = []

    def make(server: ConsoleServer, **options: Any) -> Tab:
        tabs.append(Tab(chromium, server, **options))
        return tabs[-1]

    yield make
    for one in tabs:
        one.close()
    assert not [error for one in tabs for error in one.errors]
