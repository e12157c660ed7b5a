"""What JSON parsers do not limit: how deep a text is nested. Events and tasks refuse what would exhaust the stack."""

from __future__ import annotations

_SURELY_FLAT = 100


def depth_of(text: bytes) -> int:
    """How deep JSON is nested; brackets in texts count, too, which does no harm where the limit is generous."""
    if text.count(b"[") + text.count(b"{") <= _SURELY_FLAT:
        return 0
    depth = deepest = 0
    for byte in text:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest
