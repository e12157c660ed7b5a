"""The files of a public project: workflows that follow their schema, metadata, and a release that installs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML  # check-jsonschema brings it

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def check(schema: str, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    return subprocess.run(command, text=True, capture_output=True, check=False)


def read(file: Path) -> Any:
    return YAML(typ="safe").load(file)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_follows_the_schema(file: Path, tmp_path: Path) -> None:
    done = check("vendor.github-workflows", file)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yml"
    broken.write_text(file.read_text().replace("runs-on:", "runs-at:"))
    assert check("vendor.github-workflows", broken).returncode != 0


def test_the_tests_run_on_three_systems_with_all_versions_of_python() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == PYTHONS
    assert jobs["others"]["strategy"]["matrix"] == {"system": ["macos-latest", "windows-latest"], "python": PYTHONS}


def test_what_the_workflows_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    made = {name for file in WORKFLOWS for name in re.findall(r"make ([a-z-]+)", file.read_text())}
    assert made and made <= targets


def test_pre_commit_runs_the_checks_of_make_lint() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    checks = {hook["entry"].removeprefix(".venv/bin/python ").replace(" --check", "") for hook in hooks}
    assert checks == {
        line.partition("$(RUN) ")[2].removesuffix(" .").replace(" --check", "") for line in lint.splitlines()[1:]
    }
    assert all({"id", "name", "entry", "language"} <= set(hook) for hook in hooks)


def test_the_metadata_names_no_system_that_is_not_tested() -> None:
    found = metadata("holdfast")
    assert found["Requires-Python"] == ">=3.10" and found["License-Expression"] == "MIT"
    assert found["Keywords"] and "Holdfast contributors" in found["Author"]
    systems = {line for line in found.get_all("Classifier", []) if line.startswith("Operating System")}
    assert systems == {"Operating System :: POSIX :: Linux"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_of_a_release_works_in_a_clean_environment() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "release.py")]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the wheel works in a clean environment" in done.stdout
