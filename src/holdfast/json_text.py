"""The nesting depth of JSON, which parsers do not limit. Events and tasks refuse what would exhaust the stack."""

from __future__ import annotations

from itertools import accumulate

_MAX_FLAT = 100  # brackets; a text with fewer of them is never refused


def depth_of(text: bytes) -> int:
    """Return how deep JSON is nested. Brackets in strings count, too, which is harmless with a generous limit."""
    if text.count(b"[") + text.count(b"{") <= _MAX_FLAT:
        return 0
    steps = (1 if byte in b"[{" else -1 for byte in text if byte in b"[{]}")
    return max(accumulate(steps, initial=0))
