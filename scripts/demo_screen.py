"""What the parts of `make demo` print. On a terminal with colours, and with lines that are drawn again."""

from __future__ import annotations

import os
import sys

LIVE = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
CODES = ("\033[1m", "\033[32m", "\033[31m", "\033[2m", "\033[0m")
BOLD, GREEN, RED, DIM, PLAIN = CODES if LIVE else ("",) * len(CODES)


def progress(text: str) -> None:
    """A line that the next one replaces. In a pipe there is none."""
    if LIVE:
        print(f"\r\033[K  {DIM}{text}{PLAIN}", end="", flush=True)


def end_progress() -> None:
    if LIVE:
        print("\r\033[K", end="", flush=True)
