"""`holdfast tasks` for tests: run it, and commands of tasks that wait at a gate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from support import until

HOLDFAST = [sys.executable, "-W", "error", "-m", "holdfast", "tasks"]
PATIENCE = 60


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": PATIENCE} | options
    return subprocess.run([*HOLDFAST, *map(str, words)], check=False, **options)


def call(*words: object, text: str = "", status: int = 0) -> str:
    """Run the command, check its exit status, and return its standard output and then its standard error."""
    done = run(*words, input=text)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout, stderr


class Gate:
    """A command that records that it runs, and ends when its gate is opened."""

    def __init__(self, directory: Path) -> None:
        self.began, self._directory = directory / "began", directory
        for name in "abxy":
            os.mkfifo(directory / f"gate-{name}")  # a FIFO each: a FIFO with two readers wakes one of them
        script = f'echo "$$ $1" >> {self.began}; read x < {directory}/gate-$1; echo "end $1"'
        self.command = ["sh", "-c", script, "-", "{}"]

    def lines(self) -> list[str]:
        return self.began.read_text().splitlines() if self.began.exists() else []

    def until_begun(self, number: int = 1) -> None:
        until(lambda: len(self.lines()) >= number)

    def open(self, name: str) -> None:
        """Let the command with this payload end."""
        os.close(os.open(self._directory / f"gate-{name}", os.O_WRONLY))

    def end(self) -> None:
        for line in self.lines():
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
