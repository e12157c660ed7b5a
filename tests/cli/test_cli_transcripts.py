"""The examples of every help text run, and print what the transcripts say.

A transcript is tests/cli/transcripts/COMMAND.txt: `$ ` and a line of the shell, then what it prints, with `…` for any
text, and `[exit status N]` unless that is 0. All lines of a transcript run in one directory, which stands for /tmp.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.play import matches

from holdfast.cli import COMMANDS, parser_of

TRANSCRIPTS = {file.stem: file for file in sorted(Path(__file__).with_name("transcripts").glob("*.txt"))}
# Examples that run in other tests, or need another machine.
ELSEWHERE = {
    r"postgresql://user@host": "test_cli_events and test_cli_tasks_work have a server",
    r"^holdfast top|^holdfast tasks watch jobs( --json.*)?$": "they do not end: test_cli_terminal",
    r"^holdfast tasks work.*(convert.sh|mymodule)": "test_cli_tasks_work has such a program",
    r"^holdfast events (forget|subscriptions|unsubscribe)": "test_cli_events",
    r"holdfast web": "it does not end: the tests of the console",
    r"holdfast completion": "test_cli_shells, in the shells",
    r"wait --all": "test_cli_looking; other tests have locks in /tmp",
}


def examples(name: str) -> set[str]:
    """The examples in the help of a command and of its actions, without /tmp."""
    parser = parser_of(name)
    texts = [own.format_help() for own in (parser, *(parser.action(action) for action in parser.actions))]
    lines = [line for text in texts for line in text.partition("\nexample")[2].splitlines() if line.startswith("  ")]
    return {line.strip().replace("/tmp/", "").replace("/tmp", ".") for line in lines}


def steps(text: str) -> list[tuple[str, str]]:
    return [(step.partition("\n")[0], step.partition("\n")[2]) for step in re.split(r"^\$ ", text, flags=re.M)[1:]]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_help_text_is_in_a_transcript(name: str) -> None:
    text = TRANSCRIPTS[name].read_text(encoding="utf-8") if name in TRANSCRIPTS else ""
    missing = examples(name) - {command for command, _ in steps(text)}
    assert examples(name)
    assert not [line for line in missing if not any(re.search(pattern, line) for pattern in ELSEWHERE)]


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_lines_of_a_transcript_print_what_it_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("all:\n\t@echo made\n")
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for command, wanted in steps(TRANSCRIPTS[name].read_text(encoding="utf-8")):
        words = ["bash", "-c", f"exec 2>&1\n{command}"]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, text=True, capture_output=True, check=False
        )
        found = done.stdout + (f"[exit status {done.returncode}]\n" if done.returncode else "")
        assert matches(wanted, found), f"$ {command}\n{found}\nand not\n{wanted}"
