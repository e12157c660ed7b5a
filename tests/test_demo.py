"""`make demo` shows five parts. Each proves something, and nothing is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(240)
def test_the_demo_shows_five_parts_that_go_well_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "\x1b" not in done.stdout and "\r" not in done.stdout
    results = re.findall(r"^  (ok|skipped|FAILED): ", done.stdout, re.M)
    assert len(results) == 5 and set(results[:4]) == {"ok"} and results[4] != "FAILED"
    assert "What to look at next" in done.stdout
    assert list(tmp_path.iterdir()) == []
