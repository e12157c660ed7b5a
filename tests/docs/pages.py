"""The code blocks of README.md and docs/, and how the tests run them.

All blocks of a page run in order, in one empty directory. Blocks in `python` share their names. Blocks in `sh` run with
`bash -eu`. In `console`, a line that begins with `$ ` runs, and the lines after it are its output. `…` stands for any
text. `json`, `jsonl` and `toml` are parsed. Other languages are not run. A block without a language is a mistake.

A comment in front of a block says what else there is to know. It is not shown on the page:

    <!-- example: not run, because … -->    for what needs another machine, or changes this one
    <!-- example: raises Timeout -->        the block ends with this error
    <!-- example: exit 75 -->               the block in `sh` ends with this exit status
    <!-- example: prints -->                the block is what the block before it has printed, with `…` for any text
    <!-- example: file deploy.py -->        the block is written into this file
    <!-- example: until "listening" -->     the block in `sh` does not end: it runs until it has printed this
    <!-- example: setup sh                  runs here, and is not shown. Also `setup python`
    mkdir site
    -->

A URL of a server in a block becomes the URL of a server of the tests: `in_tests` does that by the scheme.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "pycon", "sh", "console", "json", "jsonl", "toml"}
SHOWN = {
    "text",
    "yaml",
    "ini",
    "crontab",
    "sql",
    "diff",
    "html",
    "rust",
    "js",
    "typescript",
    "c",
    "csharp",
    "dockerfile",
}

_COMMENT = re.compile(r"<!--\s*example:\s*(.*?)\s*-->\s*$", re.S)
_URL = re.compile(
    r"(?P<scheme>postgresql|redis|etcd)://(?P<where>[^\s'\"`)?/]+)"
    r"(?P<path>/[\w.-]+)?"
)


@dataclass(frozen=True)
class Block:
    """A block of code: its text, the line of the page on which it begins, and what the comment in front of it says."""

    page: str
    line: int
    language: str
    text: str
    note: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in LANGUAGES and not self.note.startswith("not run")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Every block of the page, and what runs for it without being shown."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = page.read_text(encoding="utf-8").splitlines()
    note, at = "", 0
    while at < len(lines):
        line = lines[at].strip()
        if line.startswith("<!-- example:"):
            begin = at
            while "-->" not in lines[at]:
                at += 1
            found = _COMMENT.match("\n".join(lines[begin : at + 1]).strip())
            assert found, f"{name}:{begin + 1}: this comment has no end"
            note = found[1]
            if note.startswith("setup "):
                first, _, text = note.partition("\n")
                yield Block(name, begin + 1, first.removeprefix("setup ").strip(), text)
                note = ""
        elif opening := re.fullmatch(r"(```+)\s*([\w+-]*).*", line):
            begin, indent = at, len(lines[at]) - len(lines[at].lstrip())
            at += 1
            while lines[at].strip() != opening[1]:
                at += 1
            yield Block(name, begin + 1, opening[2], "\n".join(text[indent:] for text in lines[begin + 1 : at]), note)
            note = ""
        elif line:
            note = ""
        at += 1


def in_tests(text: str, server: Callable[[str], str]) -> str:
    """The text with the URLs of the servers of the tests. `server("redis")` is the URL of such a server.

    A name of a lock, a number of a database and parameters stay as they are. A PostgreSQL URL keeps no database.
    """

    def replaced(found: re.Match[str]) -> str:
        base = server(found["scheme"]).rstrip("/")
        return base if found["scheme"] == "postgresql" else base + (found["path"] or "")

    return _URL.sub(replaced, text)
