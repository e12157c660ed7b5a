"""Every `holdfast …` in the text and in the blocks of the pages is a command that exists, with options that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import ROOT, pages

from holdfast.cli import COMMANDS, parser_of

PAGES = {str(page.relative_to(ROOT)): page for page in [*pages(), ROOT / "SECURITY.md"]}
_LINE = re.compile(r"(?:^|[`(;|&$] ?|\$\()holdfast ([a-z][^`\n]*)", re.M)


def mentions(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:sh|console|crontab)\n(.*?)^```", text, re.S | re.M):
        yield from _LINE.findall(block)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    yield from (span.removeprefix("holdfast ") for span in re.findall(r"`(holdfast [a-z][^`]*)`", plain))


def wrong(line: str) -> str | None:
    """Why this line cannot be right."""
    words = re.split(r"\s+(?:#|\|\||&&|;|>|<|\|)\s|[;]|\s{3,}", line)[0].split(" -- ")[0].split()
    name = words[0].strip("…,.")
    if name in ("help", "…") or name.endswith(":"):  # `holdfast run: …` is a message
        return None
    if name not in COMMANDS:
        return f"there is no command {name}"
    parser, rest = parser_of(name), words[1:]
    if parser.actions and rest and re.fullmatch(r"[a-z]+", rest[0]):
        if rest[0] not in parser.actions:
            return f"there is no action {name} {rest[0]}"
        parser, rest = parser.action(rest[0]), rest[1:]
    known = {option for action in parser._actions for option in action.option_strings}
    known |= {
        option for leaf in parser.actions for action in parser.action(leaf)._actions for option in action.option_strings
    }
    for word in rest:
        option = word.partition("=")[0].rstrip("…),.")
        if word == "-c":
            break
        if re.fullmatch(r"--?[a-z][a-z-]*|-[A-Z]", option) and option not in known:
            return f"{parser.prog} has no {option}"
    return None


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_command_on_a_page_exists_with_its_options(name: str) -> None:
    assert not [(line, why) for line in mentions(PAGES[name]) if (why := wrong(line))]


def test_a_command_that_does_not_exist_is_found() -> None:
    assert wrong("try x.lock") == "there is no command try"
    assert wrong("lockfile grab x.lock") == "there is no action lockfile grab"
    assert wrong("run --kind file x -- make --jobs") == "holdfast run has no --kind"
    assert wrong("run -n x -- make --kind") is None
