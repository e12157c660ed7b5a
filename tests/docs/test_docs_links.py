"""Links between pages and into the repository lead somewhere, and each promise links to the test that shows it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from docs.pages import ROOT, pages

PAGES = {str(page.relative_to(ROOT)): page for page in [*pages(), ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]}
_FENCE = re.compile(r"^```.*?^```", re.S | re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(text: str) -> list[str]:
    return [link for link in _LINK.findall(_FENCE.sub("", text)) if not re.match(r"\w+:", link)]


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", _FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def broken(name: str, text: str) -> list[str]:
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    assert not broken(name, PAGES[name].read_text(encoding="utf-8"))


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/nothing.md) [b](docs/cli.md#no-such-part) [c](docs/cli.md) [d](https://example.org)"
    assert broken("README.md", text) == ["docs/nothing.md", "docs/cli.md#no-such-part"]


def test_every_page_can_be_reached_from_another_or_from_the_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_pages

    menu = {f"{page}.md" for group in site_pages.PAGES.values() for page in group}
    linked = menu | {
        os.path.relpath((page.parent / link.partition("#")[0]).resolve(), ROOT)
        for page in PAGES.values()
        for link in links(page.read_text(encoding="utf-8"))
    }
    assert not set(PAGES) - {"README.md"} - linked


def rows(name: str) -> list[str]:
    """The rows of the tables of a page, without their headings."""
    text = _FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    return [row for table in re.findall(r"^\|[-| ]+\|\n((?:\|.*\n?)+)", text, re.M) for row in table.splitlines()]


def is_shown(row: str) -> bool:
    return bool(re.search(r"\]\(\.\./tests/[\w/]+\.py\)|\]\(benchmarks\.md\)", row))


def test_every_promise_links_to_a_test_or_a_benchmark() -> None:
    assert len(rows("docs/proof.md")) > 10
    assert not [row for row in rows("docs/proof.md") if not is_shown(row)]
    assert not is_shown("| it is fast | very | |")


@pytest.mark.parametrize("part", ["Always", "Of lock files", "Of directories"])
def test_every_guarantee_links_to_its_tests(part: str) -> None:
    """A bullet has a link of its own, or the section ends with one for all of them."""
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    promised, _, _ = section.partition("\nNot promised:")
    bullets = re.split(r"^- ", promised, flags=re.M)[1:]
    assert len(bullets) > 3
    for_all = re.search(r"^The tests: .*\.\./tests/", section, re.M)
    assert for_all or not [bullet for bullet in bullets if "](../tests/" not in bullet]


def test_the_timelines_are_those_of_the_script_and_each_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import timelines

    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for name, timeline in timelines.TIMELINES.items():
        picture = f"pictures/timeline-{name}.svg"
        assert f"]({picture})" in page
        assert (ROOT / "docs" / picture).read_text(encoding="utf-8") == timelines.svg(*timeline), "run the script again"


def test_the_architecture_names_every_part_of_the_package() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## ")[0]
    package = ROOT / "src" / "holdfast"
    parts = {f"{entry.name}/" if entry.is_dir() else entry.stem for entry in package.iterdir()}
    unnamed = {part for part in parts if f"`{part}`" not in table}
    assert unnamed <= {"__init__", "__main__", "__pycache__/", "py"}


def test_the_tree_of_exceptions_is_that_of_the_classes() -> None:
    import holdfast
    import holdfast.tasks

    page = (ROOT / "docs" / "exceptions.md").read_text(encoding="utf-8")
    tree = page.partition("```text\n")[2].partition("```")[0].splitlines()
    public = {name: getattr(module, name) for module in (holdfast, holdfast.tasks) for name in module.__all__}
    errors = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    shown: list[tuple[int, str]] = []
    for line in tree:
        found = re.match(r"([│├└─ ]*)(\w+)(?:.*also an? (\w+))?", line)
        assert found
        depth, name, also = len(found[1]) // 4, found[2], found[3]
        above = next((other for level, other in reversed(shown) if level == depth - 1), "Exception")
        shown.append((depth, name))
        builtin = Exception if above == "Exception" else public[above]
        assert issubclass(public[name], builtin)
        assert also is None or also in {kind.__name__ for kind in public[name].__mro__}
    assert {name for _, name in shown} == errors
