"""`make docs`: the site builds without a warning. Its references have all that users call, and nothing else."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import ROOT

from holdfast.cli import COMMANDS, parser_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "scripts" / "docs.py"), str(target)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def text_of(page: Path) -> str:
    found = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.S)
    assert found
    return html.unescape(re.sub(r"<[^>]+>", "", found[0]))


def test_every_page_is_in_the_menu(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f'href="docs/{page.stem}.html"' in index, page
    assert 'href="CONTRIBUTING.html"' in index


def test_the_reference_of_the_command_has_every_option(site: Path) -> None:
    text = text_of(site / "docs" / "reference" / "command.html")
    for name in COMMANDS:
        parser = parser_of(name)
        for own in [parser, *(parser.action(action) for action in parser.actions)]:
            assert own.prog in text
            for option in own._actions:
                assert all(word in text for word in option.option_strings), (own.prog, option.option_strings)


@pytest.mark.parametrize("module", ["holdfast", "holdfast.tasks", "holdfast.events"])
def test_the_reference_of_the_api_shows_all_public_names_and_no_private_one(module: str, site: Path) -> None:
    public = set(__import__(module, fromlist=["x"]).__all__) - {"fence", "TaskQueue", "Worker"}  # of holdfast.tasks
    if module == "holdfast.tasks":
        public |= {"TaskQueue", "Worker"}
    text = text_of(site / "docs" / "reference" / f"{module}.html") + text_of(site / "docs" / "exceptions.html")
    assert not {name for name in public if not re.search(rf"\b{name}\b", text)}
    assert not re.findall(r"(?:^|[\s.(])(_[a-zA-Z]\w*)", text)
    assert not re.findall(r"~\w|TimeoutOption|HoldType|\bDEFAULT\b|[Cc]laimer", text)


def test_a_claim_shows_what_users_call(site: Path) -> None:
    text = text_of(site / "docs" / "reference" / "holdfast.tasks.html")
    claim = text[text.index("class Claim") : text.index("class Task¶")]
    shown = set(re.findall(r"^(?:property |async )?(\w+)[(:]", claim, re.M))
    assert {"complete", "fail", "give_back", "cancel", "progress", "check"} <= shown
    assert "Claimer" not in claim and "Attempt" not in claim


def test_all_methods_of_the_event_store_are_there_with_their_async_twins(site: Path) -> None:
    from holdfast.events import EventStore

    text = text_of(site / "docs" / "reference" / "holdfast.events.html")
    methods = [name for name, thing in vars(EventStore).items() if callable(thing) and not name.startswith("_")]
    assert {"append", "aappend", "execute", "aexecute"} <= set(methods)
    assert not [name for name in methods if not re.search(rf"\b{name}\(", text)]
