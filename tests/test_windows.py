"""The Windows half, run under wine: the tests of tests/windows, with a Windows CPython."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CANNOT = 77
SETUP_AND_RUN = 840.0  # seconds; setting up downloads some 200 MB, once


@pytest.mark.slow
@pytest.mark.timeout(SETUP_AND_RUN + 60)
@pytest.mark.skipif(sys.platform == "win32", reason="on Windows, run pytest in tests/windows")
def test_the_tests_of_windows_pass_under_wine():
    process = subprocess.Popen(
        ["bash", "scripts/wine.sh"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SETUP_AND_RUN)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode == CANNOT:
        pytest.skip(output.splitlines()[-1])
    assert process.returncode == 0, output
    assert " passed" in output, output
