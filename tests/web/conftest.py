"""Fixtures for the tests of `holdfast web`: the console as a process, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import servers
from console_server import ConsoleServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]


@pytest.fixture
def console() -> Iterator[Callable[..., ConsoleServer]]:
    """Starts `holdfast web`; ends it with the test."""
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(ConsoleServer(*words, **options))


def find_chromium() -> Path | None:
    return servers.program("chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's chromium. It ends with the module: Playwright's event loop must not be in the way of other tests."""
    from playwright.sync_api import sync_playwright

    path = servers.installed("chromium", find_chromium)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=OPTIONS)
        yield browser
        browser.close()


class Tab:
    """A page in a browser of its own. Errors of the page's script fail the test."""

    def __init__(self, browser: Browser, server: ConsoleServer, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def open(self, path: str = "/") -> Page:
        """Open a page, and wait until it is live."""
        self.page.goto(self.server.at(path))
        self.page.wait_for_selector("main")
        self.page.wait_for_selector("#live[data-state=live]")
        return self.page

    def close(self) -> None:
        self.context.close()


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
