"""Programs that lock with filelock run on `holdfast.filelock`: in their processes, `filelock` means ours.

They come from PyPI when the test runs. The package filelock, which they also install, is there and is not used.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import real

SOURCE = Path(real.__file__).parents[2] / "src"
IS_OURS = "import filelock; assert filelock.FileLock.__module__.startswith('holdfast.'), filelock; "


def run(packages: tuple[str, ...], command: list[str], room: Path) -> str:
    """Run a Python command beside these packages."""
    environment = real.environment(real.REPLACED, SOURCE, real.installed(*packages), HOME=str(room))
    done = subprocess.run(
        [sys.executable, *command], cwd=room, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(packages: tuple[str, ...], program: str, room: Path) -> str:
    return run(packages, ["-c", IS_OURS + program], room)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_virtualenv_makes_an_environment(tmp_path: Path) -> None:
    program = """
from virtualenv import cli_run
from virtualenv.util import lock
assert lock.FileLock.__module__.startswith("holdfast.")
cli_run(["made", "--no-periodic-update"])
import subprocess
subprocess.run(["made/bin/python", "-c", "import pip"], check=True)
"""
    python(("virtualenv",), program, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tox_runs_an_environment(tmp_path: Path) -> None:
    (tmp_path / "tox.ini").write_text("[tox]\nskipsdist = true\n[testenv]\ncommands = python -c \"print('in tox')\"\n")
    out = python(("tox",), "import sys; from tox.run import main; sys.exit(main(['-e', 'py']))", tmp_path)
    assert "in tox" in out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_locking_helpers_of_huggingface_hub(tmp_path: Path) -> None:
    program = """
import threading
from huggingface_hub.utils import WeakFileLock, SoftTemporaryDirectory
with WeakFileLock("a.lock") as lock:
    assert type(lock).__module__.startswith("holdfast."), type(lock)
    try:
        with WeakFileLock("a.lock", timeout=0.2):
            raise AssertionError("held twice")
    except filelock.Timeout:
        pass
with WeakFileLock("a.lock", timeout=1):
    pass
with SoftTemporaryDirectory() as directory:
    pass
"""
    python(("huggingface_hub",), program, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_locking_helpers_of_datasets(tmp_path: Path) -> None:
    program = """
from datasets.utils._filelock import FileLock
assert issubclass(FileLock, filelock.FileLock)
long = "a" * 300 + ".lock"
with FileLock(long) as lock:
    assert lock.is_locked and len(lock.lock_file.rpartition("/")[2]) <= 255
with FileLock("x.lock", timeout=1) as lock, FileLock("y.lock"):
    import os
    assert os.path.exists("x.lock")
"""
    python(("datasets",), program, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recipe_of_pytest_xdist_makes_its_data_once(tmp_path: Path) -> None:
    (tmp_path / "test_data.py").write_text(
        """
import json, os
import pytest
from filelock import FileLock

assert FileLock.__module__.startswith("holdfast.")

@pytest.fixture(scope="session")
def data(tmp_path_factory, worker_id):
    assert worker_id != "master"
    root = tmp_path_factory.getbasetemp().parent
    file = root / "data.json"
    with FileLock(str(file) + ".lock"):
        if file.is_file():
            return json.loads(file.read_text())
        with open(os.environ["MADE"], "a") as made:
            made.write("x")
        file.write_text(json.dumps({"value": 3}))
        return {"value": 3}

@pytest.mark.parametrize("number", range(40))
def test_uses_the_data(data, number):
    assert data == {"value": 3}
"""
    )
    made = tmp_path / "made"
    program = f"import os, sys, pytest; os.environ['MADE'] = {str(made)!r}; "
    program += f"sys.exit(pytest.main(['-q', '-n', '3', '-p', 'no:cacheprovider', '--basetemp={tmp_path}/base']))"
    out = python(("pytest", "pytest-xdist"), program, tmp_path)
    assert "40 passed" in out
    assert made.read_text() == "x"
