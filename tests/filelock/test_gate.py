"""The public tests of filelock run on `holdfast.filelock`.

They come from its source distribution. `replaced/gate_plugin.py` leaves out cases that use private names of filelock,
classes that are missing here, or a patched standard library. `exclusions.txt` lists further cases, with the reason.

A class that is imported from a private module (`from filelock._api import BaseFileLock`) counts as a private name, also
where the class itself is public and supported: those cases do not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import real

EXCLUSIONS = Path(__file__).with_name("exclusions.txt")
AT_LEAST = 0.95
MANY = 900  # cases: fewer would mean that the rules leave out too much
PLUGINS = ("pytest>=9", "pytest-asyncio", "pytest-mock", "pytest-timeout", "virtualenv")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@real.needs_python_311
def test_the_public_tests_of_filelock_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = real.source()
    report = tmp_path / "report.json"
    environment = real.environment(
        real.REPLACED,
        real.installed(*PLUGINS),
        Path(real.__file__).parents[2] / "src",
        FILELOCK_SOURCE=str(source / "src"),
        GATE_EXCLUSIONS=str(EXCLUSIONS),
        GATE_REPORT=str(report),
    )
    command = [sys.executable, "-m", "pytest", "-p", "gate_plugin", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["-q", "--tb=line", "-o", "timeout=30", f"--basetemp={tmp_path}/cases"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text("utf-8"))
    counts = Counter(found["outcomes"].values())
    failed = [case for case, outcome in found["outcomes"].items() if outcome == "failed"]
    share = counts["passed"] / (counts["passed"] + counts["failed"])
    with capsys.disabled():
        print(f"\n{dict(counts)}, {share:.1%}; excluded: {dict(Counter(found['excluded'].values()))}")
        print(*failed, sep="\n")
    assert counts["passed"] >= MANY, done.stdout
    assert share >= AT_LEAST, failed
    written = {line for line in EXCLUSIONS.read_text("utf-8").splitlines() if line and not line.startswith("#")}
    excluded = {part for case in found["excluded"] for part in (case, case.partition("[")[0], case.partition("::")[0])}
    assert written <= excluded, "these lines of exclusions.txt name no case"
