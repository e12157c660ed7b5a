"""Turn a docstring of this project into reStructuredText, for Sphinx.

Docstrings are written for `help()`: paragraphs, indented examples, `names` in single backticks, and a parameter per
line, as in `timeout: seconds to wait`.
"""

from __future__ import annotations

import re
from textwrap import dedent

_FIELD = re.compile(r"^([\w*]+(?:, [\w*]+)*): (.*)")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def as_rst(text: str) -> str:
    return "\n".join(line for block in _blocks(text) for line in [*_converted(block), ""])


def _blocks(text: str) -> list[list[str]]:
    """Paragraphs. A paragraph that is indented is an example, and so are the indented paragraphs after it."""
    blocks: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.split("\n")
        if blocks and lines[0].startswith("    ") and blocks[-1][0].startswith("    "):
            blocks[-1] += ["", *lines]
        elif lines[0].strip():
            blocks.append(lines)
    return blocks


def _converted(lines: list[str]) -> list[str]:
    if lines[0].startswith("    "):
        return ["::", "", *("    " + line for line in dedent("\n".join(lines)).split("\n"))]
    if _FIELD.match(lines[0]):
        return _fields(lines)
    if _is_example(lines):
        return ["::", "", *("    " + line for line in lines)]
    before = next((at for at, line in enumerate(lines) if at and _FIELD.match(line)), len(lines))
    tail = _fields(lines[before:]) if before < len(lines) and len(lines[before:]) > 1 else lines[before:]
    text = [_marked(line.strip()) for line in lines[:before]]
    return [*text, "", *tail] if tail and tail[0].startswith("- ") else [*text, *(_marked(line) for line in tail)]


def _is_example(lines: list[str]) -> bool:
    """Code, a table or a drawing. Sphinx has removed its indentation, if nothing else follows the first line."""
    text = "\n".join(lines)
    return bool(re.search(r"\S {4,}\S|──", text) or re.match(r"(@|with |async with |from |import |def )", text))


def _fields(lines: list[str]) -> list[str]:
    """A list, with an entry for each parameter."""
    out: list[str] = []
    for line in lines:
        found = _FIELD.match(line)
        if found and not line.startswith(" "):
            names = ", ".join(f"``{name}``" for name in found[1].split(", "))
            out.append(f"- {names}: {_marked(found[2])}")
        else:
            out.append("  " + _marked(line.strip()))
    return out


def _marked(line: str) -> str:
    """Single backticks mean code. A character that means something in reStructuredText is escaped."""
    parts = _CODE.split(line)
    return "".join(f"``{part}``" if at % 2 else re.sub(r"([*|_\\])", r"\\\1", part) for at, part in enumerate(parts))
