"""One grammar for all commands: the same options, times, exit statuses and errors everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import COMMANDS, OLD_NAMES, arguments, parser_of


def sh(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A line of the shell, in which `holdfast` is the command."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )


def parsers() -> Iterator[arguments.Parser]:
    for name in COMMANDS:
        parser = parser_of(name)
        yield from [parser.action(action) for action in parser.actions] or [parser]


SHORT = {  # what a short option is called in full, in whichever command has it
    "-n": {"--no-wait"},
    "-w": {"--wait"},
    "-j": {"--permits", "--jobs"},
    "-q": {"--quiet"},
    "-v": {"--verbose"},
    "-s": {"--shared"},
    "-E": {"--busy-code"},
    "-r": {"--recursive"},
    "-t": {"--tag"},
    "-f": {"--force"},
    "-y": {"--yes"},
    "-o": {"--close"},
    "-x": {"--exclusive"},
    "-u": {"--unlock"},
    "-h": {"--help"},
    "-c": set(),
}


def test_a_short_option_means_the_same_in_every_command() -> None:
    for parser in parsers():
        for option in parser._actions:
            short = [word for word in option.option_strings if not word.startswith("--")]
            assert all(word in SHORT for word in short), (parser.prog, short)
            for word in short:
                assert not SHORT[word] or SHORT[word] & set(option.option_strings), (parser.prog, word)


def test_every_time_takes_a_unit() -> None:
    assert [arguments.time(text) for text in ("1.5", "+5", "90s", "5m", "2h", "7d")] == [1.5, 5, 90, 300, 7200, 604800]
    for parser in parsers():
        for option in parser._actions:
            if option.metavar == "TIME":
                assert option.type is not None and option.type("5m") == 300, (parser.prog, option.option_strings)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_answers_with_the_new_one(name: str, tmp_path: Path) -> None:
    done = sh(f"holdfast {name} x.lock", tmp_path)
    assert done.returncode == 2 and f"is now holdfast {OLD_NAMES[name]}" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "holdfast ls --json",
        "holdfast ls",
        "holdfast status x.lock",
        "holdfast status x.lock --json",
        "holdfast doctor .",
        "holdfast lockfile status x.lock",
        "holdfast events head shop",
        "holdfast events read shop",
        "holdfast tasks put jobs x",
        "holdfast tasks stats jobs",
        "holdfast dir versions site",
        "holdfast --help",
        "holdfast --version",
        "holdfast tasks put --help",
        "holdfast run --help",
        "holdfast tasks work jobs --drain -q -- echo {}",
    ],
)
def test_lost_output_is_an_error(line: str, tmp_path: Path) -> None:
    before = (
        'touch x.lock; holdfast events append shop --json-line \'{"type": "A"}\'; holdfast dir replace site -c true'
    )
    assert sh(f"{before}; holdfast tasks put jobs a", tmp_path).returncode == 0
    done = sh(f"{line} >/dev/full", tmp_path)
    assert done.returncode == 3 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert sh("holdfast tasks put jobs b", tmp_path).returncode == 0
    done = sh(f"{line} >&-", tmp_path)
    assert done.returncode == 3 and "closed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "status", "error"),
    [
        ("holdfast run nodir/x --json -- true", 66, "does not exist"),
        ("holdfast run x --json -- nosuchcommand", 127, "no such command"),
        ("holdfast run --json x", 64, "which command?"),
        ("holdfast status data.txt --json", 3, "data.txt"),
        ("holdfast ls nodir --json", 3, "No such file"),
        ("holdfast lockfile release x --json", 1, "not held"),
        ("holdfast lockfile try nodir/x --json", 3, "nodir"),
        ("holdfast tasks work nojobs --json -- true", 3, "there is no task queue here"),
        ("holdfast tasks show jobs nope --json", 1, "no task"),
        ("holdfast dir versions nosite --json", 3, "no directory here"),
        ("holdfast events read nostore --json", 3, "nostore"),
        (
            'echo \'{"type": "A"}\' | holdfast events append shop >e; holdfast events export shop nodir/f --json',
            3,
            "nodir/f: No",
        ),
        ("holdfast wait --json", 2, "required"),
        ("holdfast frobnicate --json", 2, "no command"),
    ],
)
def test_an_error_in_json_is_one_object_on_stdout(line: str, status: int, error: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("hello\n")
    sh("holdfast tasks put jobs a", tmp_path)
    done = sh(line, tmp_path)
    assert done.returncode == status, done
    found = json.loads(done.stdout)
    assert error in found["error"] and {"path", "holder"} <= set(found)
    assert done.stderr == ""


def test_the_holder_is_in_the_error_of_a_busy_lock(tmp_path: Path) -> None:
    done = sh("holdfast lockfile try -q x --tag v1 --pid 1; holdfast run -n x --lock-file --json -- true", tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 75 and found["holder"]["pid"] == 1 and found["path"].endswith("/x")


@pytest.mark.parametrize("kind", ["", "-s", "--lock-file", "-j 1", "--keep"])
def test_a_command_inside_its_own_lock_is_refused(kind: str, tmp_path: Path) -> None:
    inner = "" if kind == "-s" else kind  # the outer one shares, the inner one wants it alone
    done = sh(f"holdfast run {kind} x -- holdfast run {inner} x -- echo inside", tmp_path)
    assert done.returncode == 66 and "deadlock" in done.stderr and done.stdout == ""
    deeper = sh(f"holdfast run {kind} x -- sh -c 'holdfast run y -- holdfast run {inner} x -- echo inside'", tmp_path)
    assert deeper.returncode == 66 and "deadlock" in deeper.stderr


def test_a_second_permit_or_share_inside_the_first_is_granted(tmp_path: Path) -> None:
    assert sh("holdfast run -j 2 x -- holdfast run -j 2 x -- echo inside", tmp_path).stdout == "inside\n"
    assert sh("holdfast run -s y -- holdfast run -s y -- echo inside", tmp_path).stdout == "inside\n"


@pytest.mark.parametrize(
    "line",
    [
        "holdfast lockfile try x --wait 5",
        "holdfast lockfile release x --tag v1",
        "holdfast tasks stats jobs --priority 5",
        "holdfast events head shop --limit 5",
        "holdfast dir versions site --keep 1",
        "holdfast dir rollback site --keep 1",
        "holdfast dir recover site --keep 1",
        "holdfast status x -j",
    ],
)
def test_an_option_that_an_action_does_not_use_is_refused(line: str, tmp_path: Path) -> None:
    done = sh(line, tmp_path)
    assert done.returncode == 2 and "unrecognized arguments" in done.stderr


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ("holdfast fd -u -n 9 9>x", 64, "do not go with -u"),
        ("holdfast status --stale 5 redis://127.0.0.1:1/0/x", 2, "do not go with a URL"),
        ("holdfast wait --policy old redis://127.0.0.1:1/0/x", 2, "do not go with a URL"),
        ("holdfast tasks schedule jobs --tz UTC", 2, "need its NAME"),
        ("holdfast tasks schedule jobs --priority 1", 2, "need its NAME"),
        ("holdfast tasks work jobs --threads -- true", 2, "goes with --python or --app"),
        ("holdfast tasks put jobs x -j 2", 2, "need --key"),
        ("holdfast run -q -v x -- true", 64, "not allowed with argument -q"),
        ("holdfast run --ttl 5 x -- true", 64, "for locks on servers"),
        ("holdfast run --tag v1 x -- true", 64, "add --lock-file"),
    ],
)
def test_an_option_that_has_no_effect_with_the_others_is_refused(
    line: str, status: int, reason: str, tmp_path: Path
) -> None:
    sh("holdfast tasks put jobs a", tmp_path)
    done = sh(line, tmp_path)
    assert done.returncode == status and reason in done.stderr


def test_release_of_a_lock_that_is_not_held_is_an_error_except_for_sema(tmp_path: Path) -> None:
    assert sh("holdfast lockfile release x", tmp_path).returncode == 1
    assert sh("holdfast sema release x --timeout +5 --stale +60 --tag v1", tmp_path).returncode == 0


def test_counts_are_singular_and_plural(tmp_path: Path) -> None:
    from holdfast.cli.output import many

    assert (many(1, "lock"), many(2, "lock"), many(0, "lock")) == ("1 lock", "2 locks", "0 locks")
