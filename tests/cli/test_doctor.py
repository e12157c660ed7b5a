"""`holdfast doctor` on the directory itself. What it finds out about file systems is in `test_cli_looking`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

WHAT = "lock files are safe from other users"


def doctor(*words: object) -> str:
    """A warning does not change its exit status: the file system is good."""
    command = [sys.executable, "-m", "holdfast", "doctor", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=100).stdout


@pytest.mark.parametrize(("mode", "good"), [(0o700, True), (0o1777, True), (0o775, True), (0o777, False)])
def test_a_world_writable_directory_without_the_sticky_bit(mode: int, good: bool, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    found = json.loads(doctor("--json", place))["checks"][WHAT]
    assert found["good"] is good and ("chmod +t" in found["note"]) is not good
    assert re.search(f"{WHAT} +{'yes' if good else 'NO .*chmod .t'}", doctor(place))
