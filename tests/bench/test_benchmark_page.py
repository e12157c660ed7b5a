"""docs/benchmarks.md is made from the figures, says what they are worth, and its plots can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmark_figures import ROOT, figures, row, section

SVG = "{http://www.w3.org/2000/svg}"


def keep(**more: Any) -> dict[str, Any]:
    rows = [
        row("filelock.FileLock", 90.0, 12.0),
        row("holdfast: with lock", 15.0, 2.0),
        row("holdfast: with Lock(path)", 30.0, 4.0, missed=["<= 3 x"], checks=1),
        row("raw Python", 7.5, 1.0),
    ]
    return section(("Free lock, keep=True, xfs: open", rows), **more)


def table_under(text: str, title: str) -> list[str]:
    part = text.partition(f"### {title}")[2].partition("\n#")[0]
    return [line for line in part.splitlines() if line.startswith("|")]


def test_a_table_has_the_floor_then_ours_then_the_others(bench: Any) -> None:
    text = bench.page.page(figures(keep=keep()))
    assert table_under(text, "What does a free lock cost if the file stays?") == [
        "| | xfs |",
        "|---|---:|",
        "| open, flock, fstat, stat, close | 7.50 µs |",
        "| **`with lock`** | 15.0 µs, 2.00 x |",
        "| **`with Lock(path)`, a new object** | 30.0 µs, 4.00 x † |",
        "| filelock.FileLock | 90.0 µs, 12.0 x |",
    ]


def test_a_peer_that_we_are_not_ahead_of_is_marked(bench: Any) -> None:
    rows = [row("holdfast: with lock", 15.0, 2.0), row("portalocker.Lock", 10.0, 1.3, missed=["> 1"], checks=1)]
    text = bench.page.page(figures(keep=section(("Free lock, keep=True, xfs: open", rows))))
    assert "| portalocker.Lock | 10.0 µs, 1.30 x † |" in text.splitlines()


def test_a_missed_target_is_listed(bench: Any) -> None:
    text = bench.page.page(figures(keep=keep()))
    assert "0 of 1 targets are met" in text
    wanted = "| `keep` | Free lock, keep=True, xfs: holdfast: with Lock(path) | <= 3 x | 30.0 µs, 4.00 x |"
    assert wanted in text.splitlines()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"quick": True}, "1 of 1 sections are from a quick run"),
        ({"others": 0.4}, "other programs used up to 40% of the processors"),
        ({"error": "OSError: no space"}, "these sections failed: keep"),
    ],
)
def test_the_page_says_on_top_why_its_figures_are_doubtful(bench: Any, more: dict[str, Any], said: str) -> None:
    top = bench.page.page(figures(keep=keep(**more))).partition("\n## ")[0]
    assert "**Do not quote these figures:**" in top
    assert said in top


def test_the_page_has_no_doubts_about_a_full_run_on_a_quiet_machine(bench: Any) -> None:
    shorter = section(("x", []), quick=True)  # as `make bench` always runs it
    assert "Do not quote" not in bench.page.page(figures(keep=keep(), tasks_many=shorter))


def test_a_question_without_figures_says_why(bench: Any) -> None:
    text = bench.page.page(figures(handoff=section(error="RuntimeError: the waiter does not wait")))
    assert "*Not measured: RuntimeError: the waiter does not wait.* `--only handoff`" in text
    assert "*Not measured: not run yet.* `--only durable`" in text


def test_a_section_without_a_question_is_on_the_page_with_its_tables(bench: Any) -> None:
    new = section(("A new thing, xfs", [row("ours", 1.5, 1.25, note="twice")]))
    text = bench.page.page(figures(keep=keep(), new_thing=new))
    assert "| ours | 1.50 µs, 1.25 x | twice |" in table_under(text, "A new thing, xfs")
    assert "`--only new-thing`" in text


def test_samples_are_not_kept_and_numbers_have_four_digits(bench: Any) -> None:
    given = {"series": "", "at": None, "curve": [1.23456, 2.0], "note": "", "ratio": 1.000049, "unit": "µs"}
    measured = {"name": "a", "value": 12.3456, "raw": [1.0] * 1000, "checks": [{"target": "t", "ok": False}], **given}
    kept = bench.figures.condensed(section(("T", [measured])))["tables"][0]["rows"][0]
    assert kept == {
        "name": "a",
        "value": 12.35,
        "unit": "µs",
        "ratio": 1.0,
        "missed": ["t"],
        "checks": 1,
        "curve": [1.235, 2.0],
    }


# The page in the repository.


def recorded(bench: Any) -> dict[str, Any]:
    found: dict[str, Any] = bench.figures.load(ROOT / "docs/benchmarks.json")
    return found


def test_the_page_and_the_plots_in_the_repository_are_what_the_figures_give(bench: Any) -> None:
    found = recorded(bench)
    how = "run `python bench/publish.py --draw`"
    assert (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8") == bench.page.page(found), how
    for name, text in bench.plots.drawn(found):
        assert bench.plots.file_of(name, ROOT / "docs/pictures").read_text(encoding="utf-8") == text, how


def test_every_recorded_section_answers_its_questions(bench: Any) -> None:
    found = recorded(bench)
    for question in bench.questions.QUESTIONS:
        measured = found["sections"].get(question.section)
        if measured is None or measured["error"]:
            continue
        columns = bench.figures.columns(found, question)
        optional = {label for label in question.columns if "journal" in label}  # needs a loop device
        assert len(columns) >= len(question.columns) - len(optional), question.title
        for rows in (question.floor, question.ours):
            names = list(rows.values())
            assert not names or any(name in column for name in names for column in columns.values()), question.title


def test_the_names_of_the_lines_fit_into_the_pictures(bench: Any) -> None:
    for name, text in bench.plots.drawn(recorded(bench)):
        at = str(bench.chart.WIDTH - bench.chart.RIGHT + 36)
        names = [element.text or "" for element in drawing(text).iter(f"{SVG}text") if element.get("x") == at]
        assert names and max(map(len, names)) <= bench.chart.MAX_NAME, name


def test_the_figures_in_the_repository_are_small() -> None:
    assert (ROOT / "docs/benchmarks.json").stat().st_size < 500_000


def test_every_section_that_the_docs_name_exists(bench: Any) -> None:
    sections = set(bench.publish.all_sections())
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {
        (file.name, name)
        for file in files
        for name in re.findall(r"--only[ =]`?([a-z][a-z-]*)", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not [(file, name) for file, name in named if name not in sections]


def test_questions_and_lists_name_sections_that_exist(bench: Any) -> None:
    sections = set(bench.publish.all_sections())
    asked = {question.section for question in bench.questions.QUESTIONS}
    assert asked | set(bench.groups.BY_NAME) | set(bench.groups.SHORTENED) <= sections
    plots = {plot for question in bench.questions.QUESTIONS for plot in question.plot.split()}
    assert plots == set(bench.plots.PLOTS)


# Plots.


def lines(bench: Any, number: int = 3) -> list[Any]:
    return [bench.chart.Line(f"line <{at}>", [(1, at + 1.0), (10, at + 1.2), (1000, at + 1.1)]) for at in range(number)]


def drawing(text: str) -> ElementTree.Element:
    assert "nan" not in text and "inf" not in text
    return ElementTree.fromstring(text)


def test_a_plot_is_well_formed_and_names_every_line(bench: Any) -> None:
    axes = bench.chart.Axis("across", log=True), bench.chart.Axis("up")
    root = drawing(bench.chart.chart("A & B", lines(bench), *axes))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"A & B", "across", "up", "line <0>", "line <1>", "line <2>", "1", "10", "100", "1k"} <= set(texts)


def test_a_plot_has_colours_for_light_and_for_dark(bench: Any) -> None:
    text = bench.chart.chart("T", lines(bench), bench.chart.Axis("x"), bench.chart.Axis("y"))
    light, dark = text.partition("@media (prefers-color-scheme:dark)")[::2]
    for scheme, colours in ((light, bench.chart.LIGHT), (dark, bench.chart.DARK)):
        assert ".back{fill:" in scheme
        assert all(colour in scheme for colour in colours)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_line_can_be_told_from_the_background(bench: Any) -> None:
    for background, colours in (("#ffffff", bench.chart.LIGHT), ("#0d1117", bench.chart.DARK)):
        assert background in bench.chart.style()
        for colour in colours:
            low, high = sorted((luminance(background), luminance(colour)))
            assert (high + 0.05) / (low + 0.05) >= 3, colour


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("end", [0.0, 7.0, 20.0])
def test_everything_is_inside_the_picture_and_no_two_names_overlap(bench: Any, number: int, end: float) -> None:
    chart = bench.chart
    close = [chart.Line(f"line {at}", [(1.0, 15.0), (9.0, end + at / 100)]) for at in range(number)]
    root = drawing(chart.chart("T", close, chart.Axis("x"), chart.Axis("y", low=0)))
    for circle in root.iter(f"{SVG}circle"):
        assert chart.LEFT <= float(circle.get("cx", "")) <= chart.WIDTH - chart.RIGHT
        assert chart.TOP <= float(circle.get("cy", "")) <= chart.HEIGHT - chart.BOTTOM
    heights = sorted(
        float(text.get("y", "")) for text in root.iter(f"{SVG}text") if (text.text or "").startswith("line")
    )
    assert len(heights) == number
    assert all(after - before >= chart.LABEL_HEIGHT - 0.2 for before, after in pairwise(heights))
    assert heights[0] >= chart.TOP and heights[-1] <= chart.HEIGHT - chart.BOTTOM + 1


def test_every_plot_is_drawn_from_recorded_figures(bench: Any, tmp_path: Path) -> None:
    def curve(**more: Any) -> dict[str, Any]:
        return row(more.pop("name"), 10.0, 1.0, **more)

    points = [curve(name=f"{what}, {at}", series=what, at=at) for what in ("a", "b") for at in (1, 100)]
    shares = [curve(name="a, 8", series="a", at=8, curve=[0.5, 1.0, 1.5]), *points]
    waits = [curve(name="raw flock", curve=[5.0, 10.0, 40.0]), curve(name="filelock", curve=[5.0, 30_000.0])]
    queue = [curve(name=f"q{at}", series="claim + complete, steady", at=at) for at in (100, 10_000)]
    crowd = [curve(name=f"w{at}", series="standing", at=at) for at in (8, 200)]
    found = figures(
        handoff=section(("H", waits)),
        throughput=section(("T", shares)),
        events_writers=section(("W", [curve(name="floor"), *points])),
        events_sizes=section(("S", points)),
        tasks_many=section(("Q", queue)),
        waiters=section(("C", crowd)),
    )
    drawn = dict(bench.plots.drawn(found))
    assert set(drawn) == set(bench.plots.PLOTS)
    for text in drawn.values():
        drawing(text)
    names = [text.text for text in drawing(drawn["sizes"]).iter(f"{SVG}text")]
    assert {"a", "b", "claim + complete a task", "CPU time of a hand-off"} <= set(names)
    del found["sections"]["handoff"]
    assert set(dict(bench.plots.drawn(found))) == set(bench.plots.PLOTS) - {"handoff"}


def test_make_has_both_commands() -> None:
    for target, wanted in (("bench", "publish.py locks"), ("bench-compare", "publish.py --compare locks")):
        words = ["make", "-n", "-o", ".venv/bench-ready", target, "ONLY=locks"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip().endswith(wanted), sys.version
