"""The nesting depth of JSON, which parsers do not limit. Events and tasks refuse what would exhaust the stack."""

from __future__ import annotations

_MAX_FLAT = 100  # brackets; a text with fewer of them is never refused


def depth_of(text: bytes) -> int:
    """Return how deep JSON is nested. Brackets in strings count, too, which is harmless with a generous limit."""
    if text.count(b"[") + text.count(b"{") <= _MAX_FLAT:
        return 0
    depth = deepest = 0
    for byte in text:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest
