"""Figures as a run of the benchmark records them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def row(name: str, value: float | None = None, ratio: float | None = None, **more: Any) -> dict[str, Any]:
    given = {"name": name, "value": value, "unit": "µs", "ratio": ratio, **more}
    return {key: value for key, value in given.items() if value is not None}


def section(*tables: tuple[str, list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"date": "2026-01-31", "commit": "abc1234", "here": "xfs", "quick": False, "load": 0.1}
    given |= {"others": 0.01, "seconds": 12.0, "error": ""}
    return given | {"tables": [{"title": title, "rows": rows} for title, rows in tables]} | more


def figures(**sections: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): found for name, found in sections.items()}
    return {"machine": {"Python": "3.14.0"}, "versions": {"SQLite": "3.51.3"}, "sections": named}
