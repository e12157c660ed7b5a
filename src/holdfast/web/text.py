"""How values become text: times, numbers, JSON without secrets, the bars of a chart."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup, escape

from ..collect.search import MAX_COUNT, Throughput
from ..owner import without_passwords

REDACTED = "[redacted]"
# A key and what comes between it and its value: password=x, "password": "x", ('password', 'x'), --password x
_KEY = r"""(?<!\w)(?:--?(?:{0})\s+|(?:{0})(?:\\*["']?\s*[:=]|\\*["']\s*,)\s*)(?!\\*["']?\[redacted\])"""
_SCHEME = r"(?:(?:bearer|basic|digest)\s+)?"
_OPENED = re.compile(rf"""{_SCHEME}(?:[bru]{{0,2}}(?=\\*["'])|[\w.]*(?=[\[({{]))""", re.I)  # b'x', ['x'], Secret('x')
_PLAIN = re.compile(rf"""{_SCHEME}[^\s,;&"'()\]}}]*""", re.I)
_MARK = re.compile(r"""\"{3}|'{3}|\\*["']|[\[({]|[\])}]""")
_BAR, _HEIGHT = 10, 72  # of the chart, in its own units


class Cleaner:
    """Removes secrets: the passwords of URLs, and the values of the given keys, also in texts such as `token=abc`."""

    def __init__(self, keys: Collection[str] = ()) -> None:
        self.keys = frozenset(key.strip().lower() for key in keys) - {""}
        names = "|".join(map(re.escape, sorted(self.keys)))
        self._key = re.compile(_KEY.format(names), re.I) if names else None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {
                self(key) if isinstance(key, str) else key: REDACTED if str(key).lower() in self.keys else self(one)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self(one) for one in value]
        return value

    def _text(self, text: str) -> str:
        if self.keys and text.lstrip()[:1] in ("{", "["):
            try:
                return json.dumps(self(json.loads(text)), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return self._without_secrets(text)

    def _without_secrets(self, text: str) -> str:
        parts, at = [], 0
        while self._key is not None and (found := self._key.search(text, at)):
            end = _end_of_value(text, found.end())
            parts += [text[at : found.end()], REDACTED if end > found.end() else ""]
            at = end
        text = "".join(parts) + text[at:]
        return without_passwords(text)

    def final(self, value: Any) -> Any:
        """A value as a template writes it. `Markup` contains only texts that went through this already."""
        return self._without_secrets(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def json(self, value: Any, indent: int | None = None) -> str:
        return json.dumps(self(value), ensure_ascii=False, indent=indent, default=str)

    def line(self, value: Any, width: int = 120) -> str:
        """A value in a line: a text as it is, everything else as JSON."""
        return shortened(self(value) if isinstance(value, str) else self.json(value), width)


def _end_of_value(text: str, at: int) -> int:
    """A value in quotes or brackets ends with its last one, or with the text; else with the next space or separator."""
    opened = _OPENED.match(text, at)
    if opened is None:
        plain = _PLAIN.match(text, at)
        return plain.end() if plain else at
    depth, at = 0, opened.end()
    while mark := _MARK.search(text, at):
        at = mark.end()
        if mark[0] in "[({":
            depth += 1
        elif mark[0] in "])}":
            depth -= 1
        else:
            at = _end_of_quote(text, mark[0], at)
        if depth == 0:
            return at
    return len(text)


def _end_of_quote(text: str, mark: str, at: int) -> int:
    """In a quote of a quote, each mark has backslashes: one, three, seven. A mark in its text has more."""
    if mark in ("'''", '"""'):
        end = text.find(mark, at)
        return end + 3 if end >= 0 else len(text)
    escapes = len(mark) - 1
    for found in re.compile(rf"\\*{mark[-1]}").finditer(text, at):
        if (len(found[0]) - 1) % (2 * escapes + 2) == escapes:
            return found.end()
    return len(text)


def query(values: dict[str, Any]) -> Markup:
    """The query of a link. It must stay as it is, so `Cleaner.final` does not see it."""
    return escape(urlencode(values, errors="surrogateescape"))


def shortened(text: str, width: int) -> str:
    text = " ".join(text[: 4 * width].split())
    return text if len(text) <= width else text[: width - 1] + "…"


def when(moment: datetime | float | None, mode: str = "ago") -> str | Markup:
    """A moment. The script of the page writes it as "3 min ago"; the exact moment is its tooltip.

    mode: "ago", "for" (a duration since then) or "in"
    """
    if moment is None:
        return "-"
    if not isinstance(moment, datetime):
        moment = datetime.fromtimestamp(moment, timezone.utc)
    exact = moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    shown = exact[:19].replace("T", " ") + " UTC"
    return Markup('<time datetime="{}" data-mode="{}">{}</time>').format(exact, mode, shown)


def number(value: int, cap: int = 0) -> str | Markup:
    """1,234. A number that reached the limit of counting says so."""
    if cap and value >= cap:
        return Markup('<span title="Counting stops at {0}.">{0}+</span>').format(f"{cap:,}")
    return f"{value:,}"


def count(value: int) -> str | Markup:
    return number(value, MAX_COUNT)


def many(value: int, what: str) -> str:
    return f"{value:,} {what}{'' if value == 1 else 's'}"


def bars(found: Throughput) -> dict[str, Any]:
    """The chart of an hour: a bar of two parts for each minute."""
    highest = max(1, *(done + failed for done, failed in zip(found.done, found.failed, strict=True)))
    parts = []
    for place, (done, failed) in enumerate(zip(found.done, found.failed, strict=True)):
        ago = len(found.done) - 1 - place
        tip = f"{'this minute' if not ago else f'{ago} min ago'}: {done:,} done, {failed:,} failed"
        low, high = round(_HEIGHT * failed / highest, 1), round(_HEIGHT * done / highest, 1)
        parts.append({"x": place * _BAR, "failed": low, "done": high, "tip": tip})
    return {
        "parts": parts,
        "height": _HEIGHT,
        "width": len(parts) * _BAR,
        "bar": _BAR - 2,
        "highest": highest,
        "done": sum(found.done),
        "failed": sum(found.failed),
        "is_whole": found.is_whole,
    }
