"""Fixtures for the tests of `holdfast tasks`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tasks_command import HOLDFAST, Gate


@pytest.fixture
def begin(in_memory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `holdfast tasks` in the background. It is killed after the test, before its directory is removed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object, **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        started.append(subprocess.Popen([*HOLDFAST, *map(str, words)], text=True, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def gate(in_memory: Path) -> Iterator[Gate]:
    gate = Gate(in_memory)
    yield gate
    gate.end()
