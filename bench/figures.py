"""The figures that the repository keeps, docs/benchmarks.json: what a run measured, without the samples of each round.

    {"machine": {…}, "versions": {…},
     "sections": {NAME: {"date", "commit", "here", "quick", "load", "others", "seconds", "error", "tables"}}}

Each section says when it was measured, because `make bench ONLY=…` measures some of them again. `here` is the kind of
the file system, `others` the share of all processors that programs other than the benchmark used meanwhile.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from groups import SHORTENED
from questions import QUESTIONS, Question

WORSE = 1.25  # times: what `make bench-compare` reports
BUSY = 0.1  # of all processors

Figures = dict[str, Any]


def load(path: Path) -> Figures:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sections": {}}


def save(figures: Figures, path: Path) -> None:
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([-+\d.,e\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)  # curves
    path.write_text(text + "\n", encoding="utf-8")


def condensed(section: Figures) -> Figures:
    """A section as run.py writes it, without the samples and with four digits of each number."""
    tables = [{"title": table["title"], "rows": [_row(row) for row in table["rows"]]} for table in section["tables"]]
    return {**section, "tables": tables}


def _row(row: Figures) -> Figures:
    kept = {
        "name": row["name"],
        "value": _short(row["value"]),
        "unit": row["unit"],
        "ratio": _short(row["ratio"]),
        "missed": [check["target"] for check in row["checks"] if not check["ok"]],
        "checks": len(row["checks"]),
        "note": row["note"],
        "series": row["series"],
        "at": row["at"],
        "curve": [_short(value) for value in row["curve"]],
    }
    return {key: value for key, value in kept.items() if value not in ("", None, [], 0)}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def tables_of(figures: Figures, section: str) -> list[Figures]:
    found = figures["sections"].get(section, {}).get("tables", [])
    assert isinstance(found, list)
    return found


def columns(figures: Figures, question: Question) -> dict[str, dict[str, Figures]]:
    """For each column of the question's table, the rows by their names."""
    found = {}
    here = figures["sections"].get(question.section, {}).get("here", "")
    for label, part in question.columns.items():
        for table in tables_of(figures, question.section):
            if part.format(here=here) in table["title"]:
                found[label.format(here=here)] = {row["name"]: row for row in table["rows"]}
                break
    return found


def doubts(figures: Figures) -> list[str]:
    """Why not to believe the figures."""
    sections = figures["sections"]
    quick = [name for name, section in sections.items() if section["quick"] and name not in SHORTENED]
    busy = {name: section["others"] for name, section in sections.items() if section["others"] > BUSY}
    failed = [name for name, section in sections.items() if section["error"]]
    found = []
    if quick:
        found.append(f"{len(quick)} of {len(sections)} sections are from a quick run, with few rounds")
    if busy:
        found.append(
            f"other programs used up to {max(busy.values()):.0%} of the processors, during {len(busy)} sections"
        )
    if failed:
        found.append(f"these sections failed: {', '.join(failed)}")
    return found


def worse(before: Figures, after: Figures) -> dict[tuple[str, str, str, str], str]:
    """Our ratios that got worse by a quarter or more: (section, question, column, row), and a line of text."""
    found = {}
    for question in QUESTIONS:
        old, new = columns(before, question), columns(after, question)
        for column in new.keys() & old.keys():
            for name in question.compared():
                was, now = (side[column].get(name, {}).get("ratio") for side in (old, new))
                if was and now and (change := now / was if question.less_is_better else was / now) >= WORSE:
                    text = f"{name}, {column}: {was:.2f} x in the repository, {now:.2f} x now, {change:.2f} times worse"
                    found[question.section, question.title, column, name] = text
    return found
