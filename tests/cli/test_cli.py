"""The `holdfast` command, end to end: real processes, every option, every exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from foreign import Sema, Semats
from support import NO_PROCESS, Peer, descriptors, state_of, until

from holdfast import Lock, LockFile, Semaphore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOLDFAST = [sys.executable, "-W", "error", "-m", "holdfast"]
# `holdfast run` that looks at the lock and the command once, and later only after an event.
ONLY_EVENTS = """
import sys
from holdfast.cli import main, supervise
supervise._LOOK = supervise._SAFETY_LOOK = 3600.0
sys.exit(main())
"""
HOLDFAST_BY_EVENTS = [sys.executable, "-W", "error", "-c", ONLY_EVENTS]
PATIENCE = 60
KINDS: dict[str, tuple[str, ...]] = {"lock": (), "file": ("--lock-file",), "permits": ("-j", "1")}


def holdfast(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("timeout", PATIENCE)
    return subprocess.run(
        [*HOLDFAST, *map(os.fspath, map(_word, words))],
        capture_output=True,
        text=True,
        check=False,
        errors="surrogateescape",
        **options,
    )


def _word(word: object) -> str | os.PathLike[str]:
    return word if isinstance(word, str | os.PathLike) else str(word)


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command in the background; what is left of it in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object, program: list[str] = HOLDFAST, **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen([*program, *map(os.fspath, map(_word, words))], text=True, **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def holding(begin: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a `holdfast run` whose command says that it runs, and stays until its stdin is closed."""

    def holding(*words: object) -> subprocess.Popen[str]:
        process = begin("run", *words, "--", "sh", "-c", "echo here; cat", stdin=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    return holding


def child_of(process: subprocess.Popen[str]) -> int:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(text) == 1
    return int(text[0])


def watches(process: subprocess.Popen[str]) -> bool:
    """Does it wait for events?"""
    return "anon_inode:inotify" in descriptors(process.pid).values()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


# run


def test_run_gives_the_status_of_the_command(path: str) -> None:
    assert holdfast("run", path, "--", "true").returncode == 0
    assert holdfast("run", path, "--", "sh", "-c", "exit 7").returncode == 7
    assert holdfast("run", path, "--", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM
    assert holdfast("run", path, "--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL
    assert not os.path.exists(path)


def test_run_passes_words_input_and_output_through(path: str) -> None:
    done = holdfast("run", path, "--", "sh", "-c", 'cat; echo "$1"; echo no >&2', "sh", "-n  x", input="in\n")
    assert (done.stdout, done.stderr) == ("in\n-n  x\n", "no\n")


@pytest.mark.parametrize(
    "words",
    [
        ("-n", "PATH", "echo", "-n", "x"),
        ("PATH", "-n", "--", "echo", "-n", "x"),
        ("PATH", "--", "echo", "-n", "x"),
        ("-w", "5", "PATH", "echo", "-n", "x"),
        ("-w5", "PATH", "echo", "-n", "x"),
        ("-xw", "5", "PATH", "echo", "-n", "x"),
        ("--timeout=5", "PATH", "echo", "-n", "x"),
        ("--timeout", "5", "PATH", "echo", "-n", "x"),
        ("PATH", "-c", "printf x"),
    ],
)
def test_run_knows_where_the_command_begins(words: tuple[str, ...], path: str) -> None:
    done = holdfast("run", *(path if word == "PATH" else word for word in words))
    assert (done.returncode, done.stdout, done.stderr) == (0, "x", "")


def test_a_shell_line_is_run_by_the_users_shell(path: str) -> None:
    done = holdfast("run", path, "-c", "echo $0 $((1 + 1))", env={**os.environ, "SHELL": "/bin/bash"})
    assert done.stdout == "/bin/bash 2\n"


def test_the_lock_is_held_while_the_command_runs(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    process = holding(path)
    assert Lock(path).try_acquire() is None
    assert ended(process) == (0, "", "")
    assert not os.path.exists(path)


@pytest.mark.parametrize("words", [("-n",), ("--no-wait",), ("-w", "0"), ("-w", "0.2"), ("--timeout", "0.2")])
def test_busy_is_75_and_says_who_holds_it(
    words: tuple[str, ...], path: str, holding: Callable[..., subprocess.Popen[str]]
) -> None:
    process = holding(path)
    done = holdfast("run", *words, path, "--", "echo", "never")
    assert (done.returncode, done.stdout) == (75, "")
    assert f"held by pid {process.pid} (holdfast run " in done.stderr and done.stderr.count("\n") == 1
    assert holdfast("run", *words, "-E", "9", path, "--", "true").returncode == 9
    assert holdfast("run", *words, "--busy-code", "0", path, "--", "true").returncode == 0
    assert holdfast("run", *words, "-q", path, "--", "true").stderr == ""
    told = json.loads(holdfast("run", *words, "--json", path, "--", "true").stdout)
    assert told["path"] == path and ("not free within" if "0.2" in words else "busy") in told["error"]
    assert told["holder"]["pid"] == process.pid


def test_a_timeout_takes_as_long_as_it_says(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    holding(path)
    began = time.monotonic()
    assert holdfast("run", "-w", "0.75", path, "--", "true").returncode == 75
    assert time.monotonic() - began >= 0.75


def test_a_waiter_acquires_the_lock_after_the_release(
    path: str, holding: Callable[..., subprocess.Popen[str]], begin: Any
) -> None:
    process = holding(path)
    waiter = begin("run", path, "--", "echo", "got it")
    until(lambda: len(Lock(path).status().waiters) == 1)
    ended(process)
    assert ended(waiter)[:2] == (0, "got it\n")


def test_in_a_pipe_a_wait_says_so_once_after_a_second(
    path: str, holding: Callable[..., subprocess.Popen[str]], begin: Any
) -> None:
    process = holding(path)
    began = time.monotonic()
    waiter = begin("run", path, "--", "true")
    line = waiter.stderr.readline()
    assert time.monotonic() - began >= 1
    assert line.startswith("waiting for x.lock: 1st of 1 in the queue; held for ")
    assert f" by pid {process.pid} (holdfast run " in line
    until(lambda: len(os.listdir(f"/proc/{waiter.pid}/task")) == 1)  # the thread that writes the line has ended
    ended(process)
    assert ended(waiter) == (0, "", "")


def test_sharers_share(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    holding("-s", path)
    assert holdfast("run", "-n", "--shared", path, "--", "true").returncode == 0
    assert holdfast("run", "-n", "-x", path, "--", "true").returncode == 75
    assert holdfast("run", "-n", path, "--", "true").returncode == 75


def test_another_kind_of_lock_is_named(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    for words, advice in ((("-j", "2"), "give -j"), (("--lock-file",), "give --lock-file")):
        process = holding(*words, path)
        done = holdfast("run", "-n", path, "--", "true")
        assert done.returncode == 66 and advice in done.stderr
        if words[0] == "-j":
            status = json.loads(holdfast("status", "--json", path).stdout)
            assert len(status["holders"]) == 1, "what the command inherited is not a second holder"
        ended(process)
    process = holding(path)
    done = holdfast("lockfile", "try", path)
    assert done.returncode == 1 and f"Holder PID: {process.pid}" in done.stderr
    done = holdfast("lockfile", "release", path)
    assert done.returncode == 1 and "kernel lock cannot be taken away" in done.stderr


def test_permits(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    first, second = holding("-j", "2", path), holding("--permits", "2", path)
    assert holdfast("run", "-n", "-j", "2", path, "--", "true").returncode == 75
    assert Semaphore(path, 2).try_acquire() is None
    ended(first)
    assert holdfast("run", "-n", "-j", "2", path, "--", "true").returncode == 0
    ended(second)
    assert not os.path.exists(path)


def test_flock_is_excluded_both_ways(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    process = holding("--keep", path)
    assert subprocess.run(["flock", "-n", path, "true"], check=False).returncode == 1
    ended(process)
    assert os.path.exists(path)
    other = subprocess.Popen(["flock", path, "sh", "-c", "echo here; cat"], stdin=-1, stdout=-1, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "here\n"
    assert holdfast("run", "-n", path, "--", "true").returncode == 75
    other.communicate()
    assert holdfast("run", "-n", path, "--", "true").returncode == 0


def test_a_lock_file_with_its_tag_and_token(path: str, holding: Callable[..., subprocess.Popen[str]]) -> None:
    process = holding("--lock-file", "--tag", "deploy", path)
    status = LockFile(path).status()
    assert (status.tag, status.alive, status.holders[0].pid) == ("deploy", True, process.pid)
    ended(process)
    tokens = [int(holdfast("run", "--lock-file", path, "-c", "echo $HOLDFAST_TOKEN").stdout) for _ in range(3)]
    assert status.token is not None
    assert [status.token, *tokens] == sorted({status.token, *tokens})
    assert not os.path.exists(path)


def test_a_kernel_lock_has_no_token_and_hands_on_none(path: str) -> None:
    done = holdfast("run", path, "-c", "echo ${HOLDFAST_TOKEN-none}", env={**os.environ, "HOLDFAST_TOKEN": "1"})
    assert done.stdout == "none\n"


@pytest.mark.parametrize("kind", ["lock", "file", "permits"])
def test_a_killed_wrapper_leaves_the_lock_to_the_command(kind: str, path: str, holding: Any) -> None:
    words = KINDS[kind]
    process = holding(*words, path)
    child = child_of(process)
    process.kill()
    process.wait()
    assert state_of(child) not in ("", "Z")
    assert holdfast("run", *words, "-n", path, "--", "true").returncode == 75
    assert holdfast("run", *words, "-w", "0.3", path, "--", "true").returncode == 75
    process.communicate(timeout=PATIENCE)
    until(lambda: state_of(child) in ("", "Z"))
    assert holdfast("run", *words, "-w", "10", path, "--", "true").returncode == 0


@pytest.mark.parametrize("kind", ["lock", "file", "permits"])
def test_a_grandchild_in_the_background_does_not_keep_it(kind: str, path: str, tmp_path: Path) -> None:
    words = KINDS[kind]
    pids = tmp_path / "pid"
    line = f"sleep 1000 >/dev/null 2>&1 & echo $! >{pids}"
    done = holdfast("run", *words, path, "-c", line)
    assert (done.returncode, done.stderr) == (0, ""), "released, and not by a collector"
    try:
        assert holdfast("run", *words, "-n", path, "--", "true").returncode == 0
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("words", "inherits"), [((), True), (("-o",), False), (("--close",), False)])
def test_the_command_inherits_the_lock_unless_told_not_to(words: tuple[str, ...], inherits: bool, path: str) -> None:
    done = holdfast("run", *words, path, "--", "sh", "-c", "readlink /proc/self/fd/* 2>/dev/null; true")
    assert (path in done.stdout.split("\n")) is inherits


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_signals_are_passed_on(name: str, path: str, begin: Any) -> None:
    line = f"trap 'echo got; exit 3' {name[3:]}; echo here; while :; do sleep 0.01; done"
    process = begin("run", path, "--", "bash", "-c", line)
    assert process.stdout.readline() == "here\n"
    process.send_signal(getattr(signal, name))
    assert ended(process)[:2] == (3, "got\n")
    assert not os.path.exists(path)


def test_a_signal_that_ends_the_command_ends_us_with_its_number(path: str, holding: Any) -> None:
    process = holding(path)
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM  # its stdin is still open: only the signal can end it


def test_the_command_has_pythons_signals_back(path: str) -> None:
    def masks(text: str) -> list[int]:
        # The C library ignores its own two, 32 and 33, in what it spawns.
        return [int(line.split()[1], 16) & ~(3 << 31) for line in text.splitlines()]

    look = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
    plain = subprocess.run(look, capture_output=True, text=True, check=True)
    assert masks(holdfast("run", path, "--", *look).stdout) == masks(plain.stdout)


def test_an_interrupted_wait_ends_with_130(path: str, holding: Any, begin: Any) -> None:
    holding(path)
    waiter = begin("run", path, "--", "true")
    until(lambda: len(Lock(path).status().waiters) == 1)
    waiter.send_signal(signal.SIGINT)
    code, out, err = ended(waiter)
    assert (code, out) == (130, "") and "Traceback" not in err
    assert not os.path.exists(path + ".queue")


@pytest.mark.parametrize("kind", ["lock", "file"])
@pytest.mark.parametrize("stubborn", [False, True], ids=["", "and ignores SIGTERM"])
def test_a_lost_lock_ends_the_command(kind: str, stubborn: bool, path: str, begin: Any) -> None:
    line = ("trap '' TERM; " if stubborn else "") + "echo here; while :; do sleep 0.05; done"
    words = ("run", *KINDS[kind], "--grace", "0.3", path, "--", "sh", "-c", line)
    process = begin(*words, program=HOLDFAST_BY_EVENTS)
    assert process.stdout.readline() == "here\n"
    until(lambda: watches(process))
    os.unlink(path)
    code, _, err = ended(process)
    assert code == 76 and "the lock was lost" in err


def test_a_lock_lost_to_a_break_is_reported(path: str, begin: Any) -> None:
    process = begin("run", "--lock-file", "--json", path, "--", "sh", "-c", "echo here; exec sleep 100")
    assert process.stdout.readline() == "here\n"
    assert holdfast("break", "--yes", path).returncode == 0
    code, out, err = ended(process)
    assert code == 76
    assert json.loads(err.strip().splitlines()[-1]) == {"event": "lost", "path": path}
    assert json.loads(out)["path"] == path


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("PATH",), 64, "which command"),
        ((), 64, "TARGET"),
        (("PATH", "-n", "-w", "1", "--", "true"), 64, "not allowed with"),
        (("PATH", "-s", "-j", "2", "--", "true"), 64, "not allowed with"),
        (("PATH", "-w", "soon", "--", "true"), 64, "is not a time, such as"),
        (("PATH", "-w", "-1", "--", "true"), 64, "-w"),
        (("PATH", "-w", "nan", "--", "true"), 64, "is not a time, such as"),
        (("PATH", "-E", "256", "--", "true"), 64, "exit status"),
        (("PATH", "-j", "0", "--", "true"), 64, "number from 1 on"),
        (("PATH", "--lock-file", "-s", "--", "true"), 64, "not allowed with"),
        (("PATH", "--tag", "x", "--", "true"), 64, "--lock-file"),
        (("PATH", "-c", "true", "--", "true"), 64, "not both"),
        (("PATH", "--nonsense", "--", "true"), 64, "nonsense"),
        (("", "--", "true"), 64, "empty"),
        (("PATH/no/x", "--", "true"), 66, "does not exist"),
        (("DIRECTORY", "--", "true"), 66, "a path of its own"),
        (("CONTENT", "--", "true"), 66, "left untouched. Give the lock a path of its own"),
        (("ftp://host/x", "--", "true"), 66, "engine"),
        (("redis://host/x", "--", "true"), 64, "names no lock"),
        (("PATH", "--", "no-such-command-at-all"), 127, "no such command"),
        (("PATH", "--", "/etc/passwd"), 126, "not executable"),
    ],
)
def test_an_error_is_one_line(words: tuple[str, ...], code: int, says: str, path: str, tmp_path: Path) -> None:
    content = tmp_path / "content"
    content.write_text("data")
    places = {"PATH": path, "PATH/no/x": path + "/no/x", "DIRECTORY": str(tmp_path), "CONTENT": str(content)}
    done = holdfast("run", *(places.get(word, word) for word in words))
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr and done.stderr.count("\n") <= 2 and "Traceback" not in done.stderr
    assert content.read_text() == "data"
    assert not os.path.exists(path)


def test_debug_shows_where(path: str) -> None:
    done = holdfast("run", path + "/no/x", "--", "true", env={**os.environ, "HOLDFAST_DEBUG": "1"})
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    "name", [b"with space", b"new\nline", b"\xff\xfe not utf-8", "ünï✓".encode(), b"-dash", b"'\"$x"]
)
@pytest.mark.parametrize("kind", ["lock", "file"])
def test_any_name_will_do(name: bytes, kind: str, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    listed = holdfast("run", *KINDS[kind], path, "--", "ls", "-b", tmp_path)
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == 1
    assert holdfast("lockfile", "try", path).returncode == 0
    for words in (("status", path), ("ls", tmp_path), ("status", "--json", path), ("ls", "--json", tmp_path)):
        done = holdfast(*words)
        assert "Traceback" not in done.stderr and "\n\n" not in done.stdout
        if "--json" in words:
            assert json.loads(done.stdout)
    done = holdfast("lockfile", "release", "--force", path)
    assert done.returncode == 0
    assert os.listdir(tmp_path) == []


def test_a_relative_name_that_begins_with_a_dash(tmp_path: Path) -> None:
    assert holdfast("run", "--", "-x", "true", cwd=tmp_path).returncode == 64
    assert holdfast("run", "./-x", "--", "true", cwd=tmp_path).returncode == 0


# fd


def shell(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    script = f'holdfast() {{ "{sys.executable}" -m holdfast "$@"; }}\n{script}'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE, **options
    )


def test_the_descriptor_of_a_script(path: str) -> None:
    script = f"exec 9>'{path}'; holdfast fd -n 9 || exit 75; echo mine; cat"
    prelude = f'holdfast() {{ "{sys.executable}" -m holdfast "$@"; }}; '
    first = subprocess.Popen(["bash", "-c", prelude + script], stdin=-1, stdout=-1, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "mine\n"
    done = shell(script)
    assert (done.returncode, done.stdout) == (75, "") and f"held by pid {first.pid}" in done.stderr
    assert shell(f"exec 9>'{path}'; holdfast fd -w 0.3 -E 8 9").returncode == 8
    assert shell(f"exec 9>'{path}'; holdfast fd -n -q 9").stderr == ""
    assert json.loads(shell(f"exec 9>'{path}'; holdfast fd -n --json 9").stdout)["holder"]["pid"] == first.pid
    waiter = subprocess.Popen(
        ["bash", "-c", f'exec 9>"{path}"; "{sys.executable}" -m holdfast fd 9 && echo got it'], stdout=-1, text=True
    )
    inode = os.stat(path).st_ino
    if f":{inode} " in Path("/proc/locks").read_text():  # not in a container: see the next test
        until(lambda: re.search(rf"-> FLOCK .*:{inode} ", Path("/proc/locks").read_text()))
    first.communicate()
    assert waiter.communicate(timeout=PATIENCE)[0] == "got it\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a container")
def test_in_a_container_the_process_that_inherited_a_lock_is_named(path: str) -> None:
    """The command that took it is gone. Of such a lock, /proc/locks says nothing there."""
    command = f'"{sys.executable}" -m holdfast'
    script = f"""
    exec 9>'{path}'; {command} fd -n 9
    exec 8>'{path}'; {command} fd -n 8; echo "$? $$"
    {command} status --kind lock '{path}'
    exec 9>&-; {command} status --kind lock '{path}'
    """
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*container, "true"], stderr=-1, check=False).returncode:
        pytest.skip("no container can be made here")
    done = subprocess.run(
        [*container, "bash", "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.stdout.startswith("75 1\n") and done.stdout.count("PID: 1\n") == 1, done
    assert "busy: held by pid 1" in done.stderr, done


def test_the_descriptor_is_shared_and_unlocked(path: str) -> None:
    done = shell(
        f"exec 8>'{path}' 9>'{path}'; holdfast fd -s -n 8 && holdfast fd --shared -n 9 && holdfast fd -n -q 9"
        " || echo no; holdfast fd -u 8; holdfast fd -x -n 9 && echo alone"
    )
    assert done.stdout == "no\nalone\n"


def test_a_descriptor_of_a_file_that_was_removed_is_refused(path: str) -> None:
    done = shell(f"exec 9>'{path}'; holdfast run '{path}' -- true; holdfast fd -n 9; echo $?")
    assert done.stdout == "66\n" and "was removed meanwhile" in done.stderr and "--keep" in done.stderr


@pytest.mark.parametrize(("words", "says"), [("fd 99", "not open"), ("fd x", "not the number"), ("fd", "FD")])
def test_a_wrong_descriptor_is_wrong_usage(words: str, says: str) -> None:
    done = shell(f"holdfast {words}")
    assert done.returncode == 64 and says in done.stderr


# The commands of sema.


def as_caller(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return shell(f"{script}\n", **options)


def test_the_words_of_sema(tmp_path: Path) -> None:
    done = as_caller(
        """
        sema() { holdfast sema "$@"; echo "= $?"; }
        sema status x; sema wait x; sema try x --tag 'hello world'; sema status x
        sema try x 2>&1; sema acquire x --timeout 0.2 2>&1; sema wait x --timeout 0.2 2>&1
        sema release x; sema release x; sema acquire x; sema release x; echo "me $$"
        """,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    me = lines[-1].removeprefix("me ")
    assert lines[:3] == ["Lock status: FREE", "  Path: x", "= 0"]
    assert lines[3:7] == ["Lock is free: x", "= 0", "Lock acquired: x", "= 0"]
    assert lines[7:10] == ["Lock status: LOCKED", "  Path: x", f"  PID: {me}"]
    assert lines[10].startswith("  Timestamp: 1") and lines[11:13] == ["  Tag: hello world", "  Process running: yes"]
    rest = lines[lines.index("= 1", 12) :]
    assert rest == [
        *("= 1", "Lock already held", f"  Holder PID: {me}", "= 1", "Timeout waiting for lock", "= 1"),
        *("Timeout waiting for lock to be released", "= 1", "Lock released: x", "= 0", "Lock not held: x", "= 0"),
        *("Lock acquired: x", "= 0", "Lock released: x", "= 0", f"me {me}"),
    ]
    assert done.stderr == ""
    assert os.listdir(tmp_path) == []


def test_the_json_of_sema(path: str) -> None:
    before = int(time.time())
    done = as_caller(
        f"""
        holdfast status '{path}' --json; holdfast lockfile try '{path}' --tag 'a "quoted"
tag' --json; holdfast status '{path}' --json; holdfast lockfile try '{path}' --json
        holdfast lockfile acquire '{path}' --timeout 0.1 --json; holdfast lockfile release '{path}' --pid 1 --json
        holdfast lockfile release '{path}' --json; holdfast sema release '{path}' --json
        holdfast lockfile release '{path}' --json; holdfast lockfile try '{path}' --json; echo $$
        """
    )
    *lines, me = done.stdout.splitlines()
    free, acquired, held, refused, timed_out, not_owner, released, not_held, refused_too, again = map(json.loads, lines)
    assert free["locked"] is False
    assert acquired.keys() == {"acquired", "pid", "timestamp", "tag", "token"}
    assert (acquired["acquired"], acquired["pid"], acquired["tag"]) == (True, int(me), 'a "quoted" tag')
    assert before <= acquired["timestamp"] <= time.time() and acquired["token"] > 10**18
    assert (held["locked"], held["pid"], held["timestamp"]) == (True, int(me), acquired["timestamp"])
    assert (held["tag"], held["token"], held["corrupt"]) == ('a "quoted" tag', acquired["token"], False)
    assert (refused["locked"], refused["pid"], refused["since"]) == (True, int(me), acquired["timestamp"])
    assert timed_out["locked"] is True and timed_out["acquired"] is False
    assert not_owner["released"] is False and not_owner["holders"][0]["pid"] == int(me)
    assert released == {"released": True} and not_held == {"released": False, "locked": False}
    assert refused_too == {**not_held, "error": f"Lock not held: {path}", "path": path, "holder": None}
    assert again["acquired"] is True and again["tag"] is None
    assert done.stderr == ""


def test_quiet_says_nothing(path: str) -> None:
    done = as_caller(
        "for w in status 'lockfile try' 'lockfile try' 'lockfile acquire --timeout 0.1' status 'wait --timeout 0.1'"
        " 'lockfile release' 'lockfile release' 'sema release' wait 'break --yes' clean;"
        f" do holdfast $w -q '{path}'; echo $?; done"
    )
    assert done.stdout.split() == ["0", "0", "1", "1", "1", "1", "0", "1", "0", "0", "1", "0"]
    assert done.stderr == ""


def test_a_lock_belongs_to_its_caller_and_ends_with_it(path: str) -> None:
    done = as_caller(f"holdfast lockfile try -q '{path}' && holdfast status '{path}' >/dev/null; echo $?")
    assert done.stdout == "1\n"
    assert holdfast("status", path).stdout.count("Process running: no") == 1
    status = LockFile(path).status()
    assert status.stale and status.alive is False
    assert holdfast("lockfile", "try", path).returncode == 0, "a dead caller's lock is taken over"


def test_a_shell_that_becomes_its_last_command_owns_its_lock(path: str) -> None:
    command = f'"{sys.executable}" -m holdfast lockfile'
    script = f"{command} try {path} && exec {command} release {path}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0 and not os.path.exists(path), done


def test_a_lock_in_another_name(path: str, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    assert holdfast("lockfile", "acquire", "--pid", peer.pid, path).returncode == 0
    assert holdfast("status", "--json", path).returncode == 1
    assert holdfast("lockfile", "try", path).returncode == 1
    done = holdfast("lockfile", "acquire", "-w", "0.1", path)
    assert done.stderr.startswith(f"Timeout waiting for lock\n  {path}: not free within 0.1 s: held by pid {peer.pid}")
    done = holdfast("lockfile", "release", path)
    assert done.returncode == 1 and f"held by pid {peer.pid}" in done.stderr and "-f" in done.stderr
    waiting = LockFile(path)
    assert waiting.try_acquire() is None
    peer.kill()
    waiting.acquire(timeout=0).release()


def test_release_by_force_and_of_the_dead(path: str, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    for words in (("-f",), ("--force",), ("--pid", peer.pid)):
        assert holdfast("lockfile", "try", "--pid", peer.pid, path).returncode == 0
        assert holdfast("lockfile", "release", *words, path).returncode == 0
        assert not os.path.exists(path)
    Path(path).write_bytes(b"pid=%d\ntimestamp=%d\n" % (NO_PROCESS, time.time()))
    assert holdfast("lockfile", "release", path).stdout == f"Lock released: {path}\n"


@pytest.mark.parametrize("content", [b"", b"pid=1\ntimestamp=x\n", b"pid=1\n\xff\xff", b"pid=1"])
def test_an_empty_or_damaged_file_is_held(content: bytes, path: str) -> None:
    Path(path).write_bytes(content)
    done = holdfast("status", path)
    assert done.returncode == 1 and "LOCKED" in done.stdout and "corrupt" in done.stdout
    told = json.loads(holdfast("status", "--json", path).stdout)
    assert told["locked"] is True and told["corrupt"] is True and told["pid"] is None
    assert holdfast("lockfile", "try", path).returncode == 1
    assert holdfast("lockfile", "release", path).returncode == 1
    assert holdfast("lockfile", "try", "--stale", "0", path).returncode == 1
    os.utime(path, (1, 1))
    assert holdfast("lockfile", "try", "--stale", "0", path).returncode == 1
    assert holdfast("lockfile", "try", path).returncode == 0


@pytest.mark.parametrize("tool", [Sema, Semats])
def test_foreign_tools_understand_us_and_we_them(tool: Any, path: str) -> None:
    assert tool(path).try_acquire()
    assert holdfast("lockfile", "try", path).returncode == 1
    assert f"PID: {os.getpid()}" in holdfast("status", path).stdout
    assert tool(path).release()
    assert holdfast("lockfile", "try", "--pid", os.getpid(), path).returncode == 0
    assert not tool(path).try_acquire()
    assert holdfast("lockfile", "release", "--pid", os.getpid(), path).returncode == 0


@pytest.mark.parametrize(
    ("policy", "age", "code"), [("proof", 100, 1), ("old", 100, 0), ("old", 1, 1), ("dead-and-old", 100, 1)]
)
def test_policies(policy: str, age: int, code: int, path: str) -> None:
    Path(path).write_bytes(b"pid=%d\ntimestamp=%d\n" % (os.getpid(), time.time() - age))
    words = ("lockfile", "try", "--policy", policy, "--stale", "50" if policy != "proof" else "500", path)
    assert holdfast(*words).returncode == code


def test_permissions_of_the_file(path: str) -> None:
    holdfast("lockfile", "try", path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644


@pytest.mark.parametrize(
    "command", ["lockfile try", "sema acquire", "status", "lockfile release", "wait", "clean", "break"]
)
def test_usage_is_2_and_the_system_3(command: str, path: str, tmp_path: Path) -> None:
    assert holdfast(*command.split()).returncode == 2
    assert holdfast(*command.split(), path, "--nonsense").returncode == 2
    done = holdfast(*command.split(), tmp_path / "no" / "x")
    assert done.returncode == 3, done
    assert done.stderr.count("\n") == 1 and "does not exist" in done.stderr
    assert holdfast(*command.split(), "").returncode == 2


@pytest.mark.parametrize("command", [("lockfile", "try"), ("lockfile", "acquire"), ("run", "--lock-file"), ("run",)])
def test_an_unwritable_directory(command: tuple[str, ...], tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir(mode=0o555)
    words = [*command, str(room / "x"), *(("--", "true") if "run" in command else ())]
    obedient = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    done = subprocess.run([*obedient, *HOLDFAST, *words], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == (66 if "run" in command else 3), done
    assert "Permission denied" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tiny tmpfs")
def test_a_full_disk(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    script = f"""
    mount -t tmpfs -o size=16k,nr_inodes=64 none {room} || exit 99
    dd if=/dev/zero of={room}/fill bs=4k count=100 2>/dev/null
    for words in "lockfile try {room}/x" "run --lock-file {room}/y -- true" "run {room}/z -- true" "ls {room}"; do
      "{sys.executable}" -m holdfast $words; echo "= $?"
    done
    ls {room}
    """
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if done.returncode == 99:
        pytest.skip("no tmpfs can be mounted here")
    codes = [line for line in done.stdout.splitlines() if line.startswith("=")]
    assert codes == ["= 3", "= 66", "= 0", "= 0"], done
    assert done.stdout.splitlines()[-1] == "fill", "nothing is left of what failed"
    assert done.stderr.count("No space left on device") == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [("ls", "DIR"), ("status", "PATH"), ("lockfile", "try", "PATH"), ("doctor", "DIR"), ("--help",)]
)
def test_a_pipe_that_is_closed_early(words: tuple[str, ...], path: str, tmp_path: Path) -> None:
    places = {"DIR": str(tmp_path), "PATH": path}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*HOLDFAST, *(places.get(word, word) for word in words)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr.replace("no locks here (-r also lists subdirectories)\n", "")) == (0, "")
    assert os.path.exists(path) is ("try" in words), "what was done is done"


def test_closed_standard_streams(path: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m holdfast lockfile try {path} >&- 2>&- <&-'],
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0


# What a hostile reader found.


@pytest.mark.parametrize("kind", ["lock", "file", "permits"])
@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_a_lock_never_is_the_commands_standard_output(closed: str, kind: str, path: str) -> None:
    words = " ".join(KINDS[kind])
    line = (
        f'"{sys.executable}" -m holdfast run {words} {path} -- sh -c "echo oops; echo oops >&2; echo oops >&0" {closed}'
    )
    subprocess.run(["bash", "-c", line], check=False, timeout=PATIENCE, stderr=subprocess.DEVNULL, stdout=-3)
    done = holdfast("run", *words.split(), path, "--", "true")
    assert done.returncode == 0, done


def test_a_lock_cannot_be_acquired_for_a_dead_process(path: str, start_peer: Callable[..., Peer], begin: Any) -> None:
    done = holdfast("lockfile", "try", "--pid", NO_PROCESS, path)
    assert done.returncode == 2 and "no process" in done.stderr and not os.path.exists(path)
    peer = start_peer()
    with LockFile(path):
        waiter = begin("lockfile", "acquire", "--pid", peer.pid, path)
        until(lambda: len(LockFile(path).status().waiters) == 1)
        peer.kill()
    code, _, err = ended(waiter)
    assert code == 3 and "has ended" in err
    assert not os.path.exists(path)


def test_an_ignored_sigchld(path: str) -> None:
    """The command ends when `holdfast run` sleeps and looks no more, so that only SIGCHLD can wake it."""
    ignore = ["perl", "-e", '$SIG{CHLD}="IGNORE"; exec @ARGV', "bash", "-c", 'trap "" CHLD; exec "$@"', "bash"]
    watches, sleeps = "readlink /proc/$PPID/fd/* | grep -q inotify", "grep -q '^State:.S' /proc/$PPID/status"
    line = f"until {watches} && {sleeps}; do sleep 0.01; done; exit 3"
    command = [*ignore, *HOLDFAST_BY_EVENTS, "run", path, "--", "sh", "-c", line]
    assert subprocess.run(command, check=False, timeout=PATIENCE).returncode == 3


def test_an_alarm_reaches_the_command(path: str) -> None:
    """However early it comes: it stays blocked until `holdfast run` and then its command ask for it."""
    block = "use POSIX; sigprocmask(SIG_BLOCK, POSIX::SigSet->new(SIGALRM)); alarm 1; exec @ARGV"
    unblock = "use POSIX; sigprocmask(SIG_UNBLOCK, POSIX::SigSet->new(SIGALRM)); sleep"
    command = ["perl", "-e", block, *HOLDFAST, "run", path, "--", "perl", "-e", unblock]
    assert subprocess.run(command, check=False, timeout=PATIENCE).returncode == 128 + signal.SIGALRM


def test_output_that_cannot_be_written(path: str) -> None:
    for redirected, expected in ((">/dev/full", 0), ("2>/dev/full", 1)):  # who acquired it, has it
        line = f'"{sys.executable}" -m holdfast lockfile try {path} --pid {os.getpid()} {redirected}'
        assert subprocess.run(["bash", "-c", line], check=False, timeout=PATIENCE, stderr=-3).returncode == expected
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert holdfast("--help", env=environment).returncode == 0
    assert holdfast("lockfile", "try", path + "ü", env=environment).returncode == 0


@pytest.mark.parametrize(
    "words", [("fd", "-n", "2147483648"), ("fd", "-n", "-5"), ("run", "PATH", "-w", "1e400", "--", "true")]
)
def test_numbers_beyond_reason(words: tuple[str, ...], path: str) -> None:
    done = holdfast(*(path if word == "PATH" else word for word in words))
    assert done.returncode in (0, 64) and "Traceback" not in done.stderr


def test_control_characters_are_not_printed(tmp_path: Path) -> None:
    name = str(tmp_path / "a\x1b[31m\u009b\u202e")
    for words in (
        ("lockfile", "try", name),
        ("status", name),
        ("ls", str(tmp_path)),
        ("lockfile", "try", name + "/x"),
        ("run", name + "/x", "--", "true"),
    ):
        done = holdfast(*words)
        assert not set("\x1b\u009b\u202e") & set(done.stdout + done.stderr), words
