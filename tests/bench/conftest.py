"""The modules of bench/."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark_figures import ROOT

MODULES = ("chart", "figures", "groups", "page", "plots", "publish", "questions", "runner")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if not sys.platform.startswith("linux") else None  # the benchmark reads /proc


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
