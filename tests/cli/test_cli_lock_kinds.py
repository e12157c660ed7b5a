"""The commands meet every kind of file: all of them come to the same judgement."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support import NO_PROCESS
from test_cli import holdfast
from test_cli_looking import listed
from test_lock_file_faults import LONG_AGO, NEEDS_ROOT, USER, as_user, of_another_namespace, shared_directory  # noqa: F401

from holdfast import TaskLocks, cli

LIVE_WORKER: dict[str, Any] = {"worker_id": "w1", "task_id": "t"}


def ago(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - seconds))


def snapshot(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ("lockfile", "try"),
        ("lockfile", "acquire", "--timeout", "0"),
        ("lockfile", "release", "-f"),
        ("break", "-y"),
        ("clean",),
    ],
)
@pytest.mark.parametrize("content", [b"my thesis\n", b"DEBUG=1\ntag=x\n", b"tag=v1\n"])
def test_a_text_file_is_refused_by_every_command(
    words: tuple[str, ...], content: bytes, old: bool, tmp_path: Path
) -> None:
    path = tmp_path / "notes.lock"
    path.write_bytes(content)
    if old:
        os.utime(path, (LONG_AGO, LONG_AGO))
    done = holdfast(*words, path)
    assert done.returncode == 3 and "not a lock file" in done.stderr and done.stdout == ""
    assert snapshot(tmp_path) == {"notes.lock": content}


def test_a_text_file_has_no_status_and_is_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "notes.lock"
    path.write_text("my thesis\n")
    assert holdfast("status", path).returncode == 3
    assert holdfast("wait", "--timeout", "0", path).returncode == 3
    assert listed(tmp_path) == {}


def test_an_empty_file_counts_as_held_until_it_is_old_for_every_command(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch()
    os.utime(path, (time.time() - 10,) * 2)
    for words in (
        ("lockfile", "try"),
        ("lockfile", "acquire", "--timeout", "0"),
        ("status",),
        ("wait", "--timeout", "0"),
    ):
        assert holdfast(*words, path).returncode == 1, words
    assert listed("--held", tmp_path)["x.lock"]["held"] is True
    assert holdfast("clean", path).stdout == "cleaned: false\n"
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert listed(tmp_path)["x.lock"]["state"] == "stale"
    assert holdfast("wait", "--timeout", "0", path).returncode == 0
    assert "Stale: yes" in holdfast("status", path).stdout
    assert holdfast("lockfile", "try", path).returncode == 0


# Locks of tasks.


@pytest.mark.parametrize("age", [0, 290, 302, 100_000])
def test_a_task_lock_is_shown_as_what_it_is(age: int, tmp_path: Path) -> None:
    path = tmp_path / "t.lock"
    path.write_text(json.dumps(LIVE_WORKER | {"started_at": ago(age)}))
    stale = age > 300
    found = listed(tmp_path)["t.lock"]
    assert (found["kind"], found["tag"], found["stale"]) == ("task", "w1", stale)
    done = holdfast("status", path)
    assert done.returncode == 1 and "Tag: w1" in done.stdout and "Kind: lock of a task" in done.stdout
    assert json.loads(holdfast("status", "--json", path).stdout)["kind"] == "task"
    assert holdfast("wait", "--timeout", "0", path).returncode == (0 if stale else 1)


@pytest.mark.parametrize("age", [0, 100_000])
@pytest.mark.parametrize(
    "words",
    [
        ("lockfile", "try"),
        ("lockfile", "acquire", "--timeout", "0"),
        ("clean",),
        ("lockfile", "try", "--policy", "old"),
    ],
)
def test_a_task_lock_is_not_acquired_or_cleaned(words: tuple[str, ...], age: int, tmp_path: Path) -> None:
    path = tmp_path / "t.lock"
    path.write_text(json.dumps(LIVE_WORKER | {"started_at": ago(age)}))
    before = snapshot(tmp_path)
    done = holdfast(*words, path)
    assert done.returncode == 3 and "the lock of a task" in done.stderr
    holdfast("clean", tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("words", [("lockfile", "release"), ("sema", "release")])
def test_a_task_lock_without_a_pid_is_not_that_of_a_dead_process(words: tuple[str, ...], tmp_path: Path) -> None:
    """The record of other workers has no pid. So only force removes it."""
    path = tmp_path / "t.lock"
    path.write_text(json.dumps(LIVE_WORKER | {"started_at": ago(0)}))
    before = snapshot(tmp_path)
    done = holdfast(*words, path)
    assert done.returncode == 1 and snapshot(tmp_path) == before
    shown = holdfast("status", path).stdout
    assert "PID" not in shown and "Process running" not in shown and "Tag: w1" in shown
    assert json.loads(holdfast("status", "--json", path).stdout)["pid"] is None
    assert holdfast(*words, "-f", path).returncode == 0 and not path.exists()


def test_a_living_workers_task_lock_can_be_broken_by_hand(tmp_path: Path) -> None:
    locks = TaskLocks(tmp_path, "w1")
    for words in (("lockfile", "release", "-f"), ("break", "-y")):
        hold = locks.claim("t")
        assert hold is not None
        assert holdfast("lockfile", "release", tmp_path / "t.lock", "--pid", NO_PROCESS).returncode == 1
        hold.check()
        assert holdfast(*words, tmp_path / "t.lock").returncode == 0
        assert hold.lost and os.listdir(tmp_path) == []
        with pytest.raises(Exception, match="lost"):
            hold.release()


# What is said about a holder.


def test_the_timestamp_is_that_of_the_file(path: str) -> None:
    Path(path).write_bytes(b"pid=%d\ntimestamp=%d\ntoken=7\n" % (os.getpid(), LONG_AGO))
    words = ("--stale", "0")
    assert f"Timestamp: {LONG_AGO}\n" in holdfast("status", *words, path).stdout
    assert json.loads(holdfast("status", "--json", *words, path).stdout)["timestamp"] == LONG_AGO
    assert json.loads(holdfast("lockfile", "try", "--json", *words, path).stdout)["since"] == LONG_AGO


def test_a_holder_in_another_pid_namespace_has_no_command_and_no_user_here(path: str) -> None:
    Path(path).write_bytes(of_another_namespace(os.getpid()))
    text = holdfast("status", path).stdout
    assert "Process running: unknown" in text and "Command:" not in text and "Host:" in text
    found = listed(os.path.dirname(path))["x.lock"]
    assert found["user"] is None and found["holders"][0]["command"] is None


# Other users.


def as_another_user(*words: object) -> int:
    """The exit status of a command of another user. Not by `exec`: that user may not be able to read this checkout."""
    return int(as_user(USER, lambda: cli.main([str(word) for word in words])))


@NEEDS_ROOT
def test_the_lock_file_of_another_user_is_busy_and_can_be_removed_by_force(
    shared_directory: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = shared_directory / "x.lock"
    content = b"pid=%d\ntimestamp=%d\n" % (os.getpid(), time.time())
    forced = [["lockfile", "release", "-f"], ["break", "-y"]]
    refused = [
        ["lockfile", "try"],
        ["lockfile", "acquire", "--timeout", "0"],
        ["status"],
        ["lockfile", "release", "--pid", "1"],
    ]
    for words in refused + forced:  # import everything that they need, as one who can
        (tmp_path / "x").write_bytes(content)
        cli.main([*words, str(tmp_path / "x")])
    for words in forced:
        path.write_bytes(content)
        for busy in refused:
            assert as_another_user(*busy, path) == 1, busy
        assert path.read_bytes() == content
        assert as_another_user(*words, path) == 0
        assert not path.exists()
    path.write_bytes(content)
    os.chmod(path, 0o600)
    assert as_another_user("lockfile", "try", path) == 1
    assert as_another_user("lockfile", "release", "-f", path) == 3
    assert path.read_bytes() == content
