"""`make test` runs every test once, and `make prove` writes docs/proof.md only if every proof has passed."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module `parts`, which remembers how long tests took in a place of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import parts

    monkeypatch.setattr(parts, "SECONDS", tmp_path / "cache" / "seconds.json")
    return parts


def part(scripts: Any, file: Path, text: str, **options: Any) -> Any:
    file.write_text(text)
    found = scripts.Part(file.name, [os.path.relpath(file, ROOT)], ["-c", str(ROOT / "pyproject.toml")], **options)
    found.environment["PYTHONOPTIMIZE"] = ""  # the asserts of its tests count, also where these tests run with -O
    return found


def test_every_file_of_tests_is_in_one_part(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "test", raising=False)  # Python has a package of that name
    import test

    found = Counter(name for part in test.parts([]) for name in part.tests)
    assert set(found.values()) == {1}
    assert set(found) == {str(file.relative_to(ROOT)) for file in scripts.files()}
    assert str(Path(__file__).relative_to(ROOT)) in found


def test_a_part_that_fails_prints_its_output_and_is_not_lost_among_others(
    scripts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = part(scripts, tmp_path / "test_good.py", "def test_it(): pass\n")
    bad = part(scripts, tmp_path / "test_bad.py", "def test_it(): pass\ndef test_bad(): assert 'a fault' == ''\n")
    broken = part(scripts, tmp_path / "test_broken.py", "import nothing_of_this_name\n")
    assert not scripts.run([good, bad, broken])
    output = capfd.readouterr().out
    assert "test_good.py: 1 passed" in output
    assert "test_bad.py: 1 passed, 1 FAILED" in output and "'a fault'" in output
    assert "test_broken.py" in output and "nothing_of_this_name" in output
    assert good.ok and not bad.ok and not broken.ok
    assert len(json.loads(scripts.SECONDS.read_text())) == 3


def test_a_part_that_runs_alone_has_no_other_beside_it(scripts: Any) -> None:
    alone, other = scripts.Part("alone", [], [], alone=True), scripts.Part("other", [], [])
    assert scripts.may_start(alone, []) and scripts.may_start(other, [])
    assert not scripts.may_start(alone, [other]) and not scripts.may_start(other, [alone])
    assert not scripts.may_start(other, [other] * scripts.JOBS)


@pytest.mark.parametrize("fails", [False, True])
def test_the_page_of_proofs_is_written_only_if_all_have_passed(
    fails: bool, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prove

    page = tmp_path / "proof.md"
    page.write_text("as it was")
    text = f"""
from explored import explored
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_it(n):
    explored(schedules=600, kills=n)
    assert not {fails}

def test_elsewhere():
    pytest.skip("only on the moon")
"""

    def proofs(explored: str) -> list[Any]:
        made = part(scripts, tmp_path / "test_proof.py", text, environment={prove.EXPLORED: explored})
        made.tests = [f"{made.tests[0]}::test_it", f"{made.tests[0]}::test_elsewhere"]
        return [made]

    monkeypatch.setattr(prove, "PAGE", page)
    monkeypatch.setattr(prove, "PASSED", tmp_path / "proved.json")
    monkeypatch.setattr(prove, "proofs", proofs)
    assert prove.main("") == fails
    if fails:
        assert page.read_text() == "as it was"
        return
    written = page.read_text()
    monkeypatch.setattr(prove.Part, "start", None)  # nothing has changed, so nothing runs again
    assert prove.main("") == 0
    assert page.read_text() == written
    assert written.startswith("as it was") and written.count(prove.HEADING) == 1  # the promises stay
    assert "2 passed; 1 not run here: only on the moon" in written
    assert "1,200 schedules" in written and "3 kills" in written
    assert platform.node() not in written.split()


def test_what_a_test_went_through_is_written_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from explored import explored

    file = tmp_path / "explored.jsonl"
    monkeypatch.delenv("HOLDFAST_EXPLORED", raising=False)
    explored(rounds=1)
    monkeypatch.setenv("HOLDFAST_EXPLORED", str(file))
    explored(rounds=2)
    explored(rounds=3, kills=1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["rounds"] for line in lines] == [2, 3]
    assert {line["test"].rpartition("::")[2] for line in lines} == {
        "test_what_a_test_went_through_is_written_only_where_it_is_asked_for"
    }
