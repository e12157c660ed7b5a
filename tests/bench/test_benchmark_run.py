"""A benchmark run goes on when a section fails or hangs, leaves nothing behind, and finds ratios that got worse."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from benchmark_figures import ROOT, figures, row, section

KEEP, MIDDLE = "holdfast: with lock", "Free lock, keep=True, xfs: open"


def free_lock(ratio: float, peer: float = 5.0) -> dict[str, Any]:
    return section((MIDDLE, [row(KEEP, 15.0, ratio), row("portalocker.Lock", 30.0, peer), row("raw Python", 7.0, 1.0)]))


def append(ratio: float) -> dict[str, Any]:
    rows = [row("holdfast: one thread", 300.0, ratio)]
    return section(("EventStore, durable appends of 241 bytes, xfs: times as many per second", rows))


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (free_lock(2.0), free_lock(2.4), False),
        (free_lock(2.0), free_lock(2.5), True),
        (free_lock(2.0), free_lock(1.0), False),
        (free_lock(2.0, peer=5.0), free_lock(2.0, peer=10.0), False),  # another package got slower
    ],
)
def test_a_cost_that_grew_by_a_quarter_is_reported(bench: Any, before: Any, after: Any, found: bool) -> None:
    assert bool(bench.figures.worse(figures(keep=before), figures(keep=after))) == found


@pytest.mark.parametrize(("before", "after", "found"), [(1.0, 0.85, False), (1.0, 0.8, True), (1.0, 1.5, False)])
def test_a_speed_that_shrank_is_reported(bench: Any, before: float, after: float, found: bool) -> None:
    assert bool(bench.figures.worse(figures(events=append(before)), figures(events=append(after)))) == found


def test_being_ahead_of_another_queue_by_less_is_reported(bench: Any) -> None:
    def queue(ahead: float) -> dict[str, Any]:
        title = "Claim + complete by 2 processes, 2,000 empty tasks, not durable, tmpfs: how many times"
        return section((title, [row("holdfast", 50_000.0), row("litequeue", 5_000.0, ahead)]))

    found = bench.figures.worse(figures(tasks=queue(10.0)), figures(tasks=queue(7.0)))
    assert [(key[0], key[3]) for key in found] == [("tasks", "litequeue")]
    assert not bench.figures.worse(figures(tasks=queue(10.0)), figures(tasks=queue(9.0)))


def compared(bench: Any, *runs: dict[str, Any]) -> tuple[bool, list[list[str]]]:
    asked: list[list[str]] = []

    def again(names: list[str]) -> dict[str, Any]:
        asked.append(names)
        return {name: runs[len(asked) - 1][name] for name in names}

    good = bench.publish.compare(figures(keep=free_lock(2.0), events=append(1.0)), ["keep", "events"], again)
    return good, asked


def test_a_ratio_counts_as_worse_if_it_is_worse_twice(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bad, fine = {"keep": free_lock(3.0), "events": append(1.0)}, {"keep": free_lock(2.1), "events": append(1.0)}
    assert compared(bench, fine) == (True, [["keep", "events"]])
    assert compared(bench, bad, fine) == (True, [["keep", "events"], ["keep"]])
    assert "WORSE" not in capsys.readouterr().out
    assert compared(bench, bad, bad)[0] is False
    said = capsys.readouterr().out
    assert "WORSE: keep: What does a free lock cost if the file stays? holdfast: with lock, xfs: 2.00 x" in said


def test_a_comparison_in_which_a_section_failed_is_not_good(bench: Any) -> None:
    failed = {"keep": free_lock(2.0) | {"error": "OSError"}, "events": append(1.0)}
    assert compared(bench, failed)[0] is False


def test_a_group_is_all_its_sections_without_those_that_take_minutes(bench: Any) -> None:
    sections = bench.publish.all_sections()
    everything = bench.publish.chosen([], sections)
    assert set(everything) == set(sections) - set(bench.groups.BY_NAME)
    assert "keep" in bench.publish.chosen(["locks"], sections)
    assert bench.publish.chosen(["others"], [*sections, "something-new"]) == ["something-new"]
    assert "tasks-wake" in bench.publish.chosen(["tasks"], sections)
    assert bench.publish.chosen(["tasks-wake", "keep"], sections) == ["keep", "tasks-wake"]
    assert bench.publish.chosen(["engines-scale"], sections) == ["engines-scale"]
    with pytest.raises(SystemExit, match="no group or section 'loks'"):
        bench.publish.chosen(["loks"], sections)


def test_the_time_left_shrinks_to_nothing(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(bench.publish, "clock", lambda: now[0])
    progress = bench.publish.Progress(["keep", "events"], {"keep": 30.0, "events": 60.0})
    assert progress.text("keep", 100.0) == f"[{'-' * 30}] 1/2 keep, about 1:30 left"
    now[0] = 115.0
    assert progress.text("keep", 100.0) == f"[{'#' * 5}{'-' * 25}] 1/2 keep, about 1:15 left"
    progress.end("keep", {"error": "", "seconds": 31.0})
    now[0] = 300.0  # it takes longer than it did
    assert progress.text("events", 131.0) == f"[{'#' * 30}] 2/2 events, about 0:00 left"


# Real runs.


def program(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """A program in the place of run.py. `directory` is where it may work."""
    file = tmp_path / "program.py"
    first = "import json, os, signal, subprocess, sys, time\n_, _, name, _, result, _, directory, *_ = sys.argv\n"
    file.write_text(first + body)
    monkeypatch.setattr(bench.runner, "RUN", file)


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.01)


def test_a_section_that_hangs_is_killed_with_its_children_and_its_files(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.runner, "TO_CLEAN_UP_S", 0.2)
    body = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.mkdir(f"{directory}/bench-{os.getpid()}-x")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(f"{directory}/child.new", "w") as file:
    file.write(str(child.pid))
os.rename(f"{directory}/child.new", f"{directory}/child")
time.sleep(1000)
"""
    program(bench, monkeypatch, tmp_path, body)
    child = tmp_path / "child"
    reached: list[float] = []

    def tick() -> None:  # time does not pass until the program hangs
        if child.exists() and not reached:
            reached.append(time.monotonic())
            monkeypatch.setattr(bench.runner, "clock", lambda: 1e9)

    monkeypatch.setattr(bench.runner, "clock", lambda: 0.0)
    found = bench.runner.measure("keep", False, str(tmp_path), 60.0, tick)
    assert found["error"] == "not done after 60 s"
    until_gone(int(child.read_text()))
    assert not list(tmp_path.glob("bench-*"))


@pytest.mark.parametrize(
    ("said", "error"), [("OSError: full", "OSError: full"), ("", "an acquisition or a task was lost")]
)
def test_a_section_that_fails_is_reported_with_its_output_and_keeps_its_tables(
    said: str,
    error: str,
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """run.py ends with 1 and without an error if a lock or a queue lost something."""
    body = f"said = {said!r}\n"
    body += """\
row = {"name": "a", "value": 1.0, "unit": "s", "ratio": None, "checks": [], "note": "", "series": "", "at": None,
       "curve": []}
section = {"quick": False, "load": 0, "error": said, "tables": [{"title": "T", "rows": [row]}]}
with open(result, "w") as file:
    json.dump({"sections": {name: section}}, file)
sys.exit("the last words")
"""
    program(bench, monkeypatch, tmp_path, body)
    found = bench.runner.measure("keep", False, str(tmp_path), 60.0, lambda: None)
    assert found["error"] == error
    assert found["tables"] == [{"title": "T", "rows": [{"name": "a", "value": 1.0, "unit": "s"}]}]
    assert "the last words" in capsys.readouterr().out


def test_after_a_section_that_fails_the_others_run_and_the_page_is_written(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real program, with a directory in which one section cannot work."""
    (tmp_path / "pictures").mkdir()
    real = bench.runner.RUN
    body = f"""
if name == "import":
    sys.exit("boom")
os.execv(sys.executable, [sys.executable, {str(real)!r}, *sys.argv[1:]])
"""
    program(bench, monkeypatch, tmp_path, body)
    words = ["--quick", "--docs", str(tmp_path), "--dir", str(tmp_path), "import", "durable"]
    assert bench.publish.main(words) == 1
    said = capsys.readouterr().out
    assert "import: FAILED: exit status 1" in said and "boom" in said
    assert "durable: ok" in said
    text = (tmp_path / "benchmarks.md").read_text()
    assert "*Not measured: exit status 1.* `--only import`" in text
    assert "| **`with lock`** | " in text
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    assert set(kept["sections"]) == {"import", "durable"}
    assert kept["sections"]["durable"]["quick"] is True
    assert not list(tmp_path.glob("bench-*"))


def test_a_run_of_some_sections_keeps_the_others_of_the_same_machine(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pictures").mkdir()
    bench.publish.publish({"keep": free_lock(2.0)}, tmp_path)
    bench.publish.publish({"events": append(1.0)}, tmp_path)
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(kept["sections"]) == ["keep", "events"]
    kept["machine"]["Python"] = "3.0"
    (tmp_path / "benchmarks.json").write_text(json.dumps(kept))
    bench.publish.publish({"events": append(1.0)}, tmp_path)
    assert list(json.loads((tmp_path / "benchmarks.json").read_text())["sections"]) == ["events"]
    assert "from another machine" in capsys.readouterr().out


def test_processes_of_the_machine_that_are_not_ours_are_counted(bench: Any) -> None:
    """The clock of all processors runs at least as fast as that of this process."""
    busy, mine = bench.runner._busy_s(), bench.runner._mine_s()
    while bench.runner._mine_s() - mine < 0.3:
        pass
    assert bench.runner._busy_s() - busy >= 0.2
    assert os.cpu_count() and ROOT.exists()


def test_a_run_hurries_and_then_leaves_sections_out_to_end_in_its_time(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, asked = [0.0], []

    def measure(name: str, quick: bool, directory: str, limit: float, tick: Any) -> dict[str, Any]:
        asked.append((name, quick, limit))
        now[0] += 300.0
        return free_lock(2.0)

    monkeypatch.setattr(bench.publish, "clock", lambda: now[0])
    monkeypatch.setattr(bench.publish, "measure", measure)
    names = ["keep", "handoff", "events", "tasks"]
    known = dict.fromkeys(names, 200.0)
    found = bench.publish.measure_all(names, False, str(tmp_path), known)
    assert asked == [("keep", False, 150.0), ("handoff", True, 150.0), ("events", True, 150.0)]
    assert {name: result["error"] for name, result in found.items() if result["error"]} == {"tasks": "no time left"}
