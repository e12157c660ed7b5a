"""Debian's chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import servers
from console_server import ConsoleServer
from support import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]


@contextmanager
def start_chromium() -> Iterator[Browser]:
    """The browser. Its package is installed if it is missing."""
    from playwright.sync_api import sync_playwright

    program = servers.installed("chromium", lambda: servers.program("chromium"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(program), args=OPTIONS, timeout=120_000)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page in a browser of its own. Errors of the page's script fail the test."""

    def __init__(self, browser: Browser, server: ConsoleServer, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(1000 * PATIENCE)
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
