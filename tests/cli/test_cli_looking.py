"""`ls`, `clean`, `break`, `wait --all`, `doctor`, `completion`, help, and start-up: real processes again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import NO_PROCESS, Peer, until
from test_cli import HOLDFAST, PATIENCE, begin, ended, holdfast, holding, watches  # noqa: F401

from holdfast import Lock, LockFile, Semaphore, Timeout, cli
from holdfast.cli import completion, waiting
from holdfast.collect.locks import status_of

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).parents[2]


# ls


def listed(*words: object, **options: Any) -> dict[str, dict[str, Any]]:
    done = holdfast("ls", "--json", *words, **options)
    assert done.returncode == 0 and done.stderr == ""
    return {os.path.basename(entry["path"]): entry for entry in json.loads(done.stdout)}


def test_every_kind_and_state_is_listed(tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    for name, content in {
        "foreign": b"pid=%d\ntimestamp=%d\ntag=hello\n" % (os.getpid(), time.time() - 100),
        "stale": b"pid=%d\ntimestamp=1\n" % NO_PROCESS,
        "data.txt": b"nothing of ours\n",
        "notes": b"pid=once upon a time\n",
        "kept.lock": b"",
        "empty": b"",
        "broken.lock": b"pid=1\n\xff",
        "task.lock": b'{"worker_id": "w1", "started_at": "2020-01-01T00:00:00+00:00", "task_id": "t"}',
        "half.lock": b"{",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "below.lock").touch()
    peer = start_peer(at=f"{tmp_path}/".__add__(""))
    peer.do("import holdfast")
    peer.do("a = holdfast.Lock(at + 'exclusive').acquire()")
    peer.do("b = [holdfast.Lock(at + 'shared', shared=True).acquire() for _ in range(2)]")
    peer.do("c = [holdfast.Semaphore(at + 'sem', 3).acquire() for _ in range(2)]")
    peer.do("d = holdfast.LockFile(at + 'file', tag='mine').acquire()")
    waiter = start_peer()
    waiter.begin(f"import holdfast; holdfast.Lock({str(tmp_path / 'exclusive')!r}).acquire().release()")
    until(lambda: len(Lock(tmp_path / "exclusive").status().waiters) == 1)
    found = listed(tmp_path)
    assert {name: (entry["state"], entry["kind"]) for name, entry in found.items()} == {
        "exclusive": ("held", "lock"),
        "shared": ("shared", "lock"),
        "sem": ("free", "semaphore"),
        "file": ("held", "file"),
        "foreign": ("held", "file"),
        "stale": ("stale", "file"),
        "kept.lock": ("corrupt", "file"),
        "broken.lock": ("corrupt", "file"),
        "task.lock": ("stale", "task"),
    }
    assert [holder["pid"] for holder in found["sem"]["holders"]] == [peer.pid] * 2
    assert found["sem"]["permits"] == 3
    assert found["file"]["tag"] == "mine" and found["file"]["alive"] is True
    assert found["exclusive"]["user"] == found["foreign"]["user"] is not None
    assert [one["pid"] for one in found["exclusive"]["waiters"]] == [waiter.pid]
    assert 99 < time.time() - found["foreign"]["since"] < 200
    assert "below.lock" in listed("-r", tmp_path) and "below.lock" in listed(tmp_path / "deep")
    assert listed("--held", tmp_path).keys() == found.keys() - {"sem"}, "a permit is free"
    text = holdfast("ls", ".", cwd=tmp_path).stdout
    assert text.splitlines()[0].split() == ["STATE", "KIND", "AGE", "WAITING", "PID", "USER", "LOCK", "HOLDER"]
    row = next(line for line in text.splitlines() if " exclusive " in line)
    assert row.split()[:5] == ["held", "kernel", row.split()[2], "1", str(peer.pid)]
    (row,) = (line for line in text.splitlines() if " kept.lock " in line)
    assert row.endswith("empty or damaged; held until it is old")
    assert "2 of 3" in text and "[mine]" in text and "[hello]" in text and "\x1b" not in text
    peer.do("for hold in (a, *b, *c, d): hold.release()")
    waiter.answer()


def test_nothing_to_list(tmp_path: Path) -> None:
    done = holdfast("ls", tmp_path)
    assert (done.returncode, done.stdout) == (0, "") and "no locks here" in done.stderr
    assert listed(tmp_path) == {}
    done = holdfast("ls", tmp_path / "no")
    assert done.returncode == 3 and done.stderr.count("\n") == 1


def test_looking_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "stale.lock").write_bytes(b"pid=%d\ntimestamp=1\n" % NO_PROCESS)
    (tmp_path / "kept.lock").touch()
    before = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(tmp_path))
    for words in (
        ("ls", tmp_path),
        ("status", tmp_path / "stale.lock"),
        ("status", "--kind", "lock", tmp_path / "kept.lock"),
    ):
        holdfast(*words)
    assert sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(tmp_path)) == before


def test_the_age_of_a_kept_lock_is_unknown(path: str, start_peer: Callable[..., Peer]) -> None:
    Path(path).touch()
    os.utime(path, (1, 1))
    peer = start_peer(path=path)
    peer.do("hold = holdfast.Lock(path, keep=True).acquire()")
    assert listed(path)["x.lock"]["since"] is None
    assert "Held for" not in holdfast("status", path).stdout
    peer.do("hold.release()")


def test_the_status_of_kernel_locks(path: str, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(path=path)
    peer.do("hold = holdfast.Lock(path).acquire()")
    done = holdfast("status", path)
    assert done.returncode == 1 and f"PID: {peer.pid}" in done.stdout and "Kind: kernel lock" in done.stdout
    peer.do("hold.release()")
    assert holdfast("status", path).returncode == 0
    peer.do("hold = holdfast.Semaphore(path, 2).acquire()")
    done = holdfast("status", path)
    assert done.returncode == 0 and "FREE" in done.stdout and "semaphore of 2, 1 taken" in done.stdout
    said = json.loads(holdfast("status", "--json", path).stdout)
    assert said["locked"] is False and [holder["pid"] for holder in said["holders"]] == [peer.pid]
    assert holdfast("wait", "--timeout", "0", path).returncode == 0
    peer.do("other = holdfast.Semaphore(path, 2).acquire()")
    done = holdfast("status", path)
    assert done.returncode == 1 and "Kind: semaphore of 2" in done.stdout
    assert holdfast("wait", "--timeout", "0", path).returncode == 1
    peer.do("hold.release(); other.release()")


# wait


def test_wait_until_free(path: str, start_peer: Callable[..., Peer], begin: Any) -> None:  # noqa: F811
    peer = start_peer(path=path)
    for kind in ("Lock(path)", "LockFile(path)"):
        peer.do(f"hold = holdfast.{kind}.acquire()")
        waiter = begin("wait", path)
        until(lambda: watches(waiter))  # noqa: B023
        peer.do("hold.release()")
        assert ended(waiter) == (0, f"Lock is free: {path}\n", "")
        assert not os.path.exists(path), "it took nothing"


def test_wait_sleeps_while_the_lock_is_held(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look opens and closes the file, which must not wake it: it would look all the time."""
    looks = []

    def look(*arguments: Any) -> Any:
        looks.append(arguments)
        return status_of(*arguments)

    monkeypatch.setattr(waiting, "status_of", look)
    with Lock(path).acquire(), pytest.raises(Timeout):
        waiting._until_free(path, 0.5)
    assert len(looks) <= 10


def test_wait_for_a_whole_directory(tmp_path: Path, start_peer: Callable[..., Peer], begin: Any) -> None:  # noqa: F811
    peer = start_peer(at=f"{tmp_path}/")
    peer.do("holds = [holdfast.LockFile(at + 'a').acquire(), holdfast.Lock(at + 'b').acquire()]")
    assert holdfast("wait", "--all", "--timeout", "0.2", tmp_path).returncode == 1
    assert json.loads(holdfast("wait", "--all", "--timeout", "0.2", "--json", tmp_path).stdout)["free"] is False
    waiter = begin("wait", "--all", tmp_path)
    until(lambda: watches(waiter))
    peer.do("holds[1].release()")
    assert waiter.poll() is None
    peer.do("holds[0].release()")
    assert ended(waiter)[:2] == (0, f"All locks are free: {tmp_path}\n")


def test_wait_for_sharers_and_semaphores_and_what_is_free_already(
    tmp_path: Path,
    start_peer: Callable[..., Peer],
    begin: Any,  # noqa: F811
) -> None:
    peer = start_peer(at=f"{tmp_path}/")
    for lock in ("Lock(at + 'x', shared=True)", "Semaphore(at + 'x', 1)"):
        peer.do(f"hold = holdfast.{lock}.acquire()")
        for words in ((tmp_path / "x",), ("--all", tmp_path)):
            assert holdfast("wait", "--timeout", "0.2", *words).returncode == 1
        waiter = begin("wait", tmp_path / "x")
        until(lambda: watches(waiter))  # noqa: B023
        peer.do("hold.release()")
        assert ended(waiter)[0] == 0
    (tmp_path / "kept.lock").touch()
    os.utime(tmp_path / "kept.lock", (1, 1))
    assert holdfast("wait", "--timeout", "5", tmp_path / "kept.lock").returncode == 0


def test_a_path_with_two_dots_is_looked_at_as_well(tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    (tmp_path / "deep").mkdir()
    here = {"cwd": tmp_path / "deep"}
    peer = start_peer(at=f"{tmp_path}/")
    peer.do("holds = [holdfast.Lock(at + 'kernel').acquire(), holdfast.LockFile(at + 'file').acquire()]")
    assert listed("..", **here).keys() == {"kernel", "file"}
    assert {entry["path"] for entry in json.loads(holdfast("top", "--json", "..", **here).stdout)} == {
        str(tmp_path / name) for name in ("kernel", "file")
    }
    for name in ("kernel", "file"):
        done = holdfast("status", f"../{name}", **here)
        assert (done.returncode, done.stderr) == (1, "") and f"PID: {peer.pid}" in done.stdout
        assert holdfast("wait", "--timeout", "0", f"../{name}", **here).returncode == 1
    peer.do("holds.pop(0).release()")
    assert holdfast("wait", "--all", "--timeout", "0", "..", **here).returncode == 1, "the lock file is held"
    for words in (("lockfile", "try"), ("lockfile", "acquire"), ("lockfile", "release"), ("break", "-y"), ("clean",)):
        done = holdfast(*words, "../file", **here)
        assert done.returncode == 2 and "$(realpath" in done.stderr, "a command that changes a lock file refuses it"
    peer.do("holds.pop().release()")
    assert holdfast("wait", "--all", "--timeout", "0", "..", **here).returncode == 0


def test_the_locks_that_a_queue_and_a_store_keep_are_free(tmp_path: Path) -> None:
    """They are empty files. Without the files beside them they might be lock files of other tools."""
    holdfast("tasks", "put", tmp_path / "jobs", "x")
    holdfast("events", "append", tmp_path / "shop", "--json-line", '{"type": "A"}')
    for path in (tmp_path / "jobs/queue.lock", tmp_path / "shop/.store.lock"):
        assert path.exists()
        assert [(entry["state"], entry["kind"]) for entry in listed(path.parent).values()] == [("free", "lock")]
        assert holdfast("status", path).stdout.startswith("Lock status: FREE")
        assert holdfast("wait", "--timeout", "0", path).returncode == 0
        assert holdfast("wait", "--all", "--timeout", "0", path.parent).returncode == 0
        os.utime(path, (1, 1))
        assert holdfast("clean", path.parent).stdout == "cleaned: false\n"
        with Lock(path, keep=True):
            assert [entry["state"] for entry in listed(path.parent).values()] == ["held"]
        alone = tmp_path / path.name
        alone.touch()
        assert listed(alone)[path.name]["state"] == "corrupt"


# clean and break


@pytest.mark.parametrize("command", ["clean", "lockfile try", "break"])
@pytest.mark.parametrize(
    "content", ["pid /run/nginx.pid;\n", "timestamp,value\n1,2\n", "pid=/run/x.pid\n", "pid=1 2 3\n", "# pid=1\n"]
)
def test_data_is_never_deleted(content: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    os.utime(path, (1, 1))
    assert holdfast(*command.split(), path).returncode == 3
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("data", content)]


def test_clean_of_a_directory_leaves_what_is_no_lock(tmp_path: Path) -> None:
    for name, text in (
        ("doc", "precious"),
        ("void", ""),
        ("doc.1.0123456789abcdef.tmp", ""),
        ("void.1.0123456789abcdef.tmp", ""),
    ):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1, 1))
    holdfast("clean", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["doc", "void"]


def test_a_terminated_doctor_leaves_nothing(tmp_path: Path, begin: Any) -> None:  # noqa: F811
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        process = begin("doctor", tmp_path)
        until(lambda: process.poll() is not None or os.listdir(tmp_path) != [])  # noqa: B023
        process.send_signal(number)
        assert ended(process)[0] in (0, 128 + number)
        assert os.listdir(tmp_path) == []


def test_one_directory_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "x.lock").touch()
    done = holdfast("ls", tmp_path / "no", tmp_path)
    assert done.returncode == 3 and "x.lock" in done.stdout and "no" in done.stderr


def test_clean(tmp_path: Path, start_peer: Callable[..., Peer]) -> None:
    (tmp_path / "stale").write_bytes(b"pid=%d\ntimestamp=1\n" % NO_PROCESS)
    (tmp_path / f"gone.{NO_PROCESS}.0123456789abcdef.tmp").touch()
    (tmp_path / f"fresh.{os.getpid()}.0123456789abcdef.tmp").touch()
    (tmp_path / "data.txt").write_text("mine")
    (tmp_path / "kept.lock").touch()
    hold = LockFile(tmp_path / "held").acquire()
    done = holdfast("clean", "--json", tmp_path)
    told = json.loads(done.stdout)
    assert told["cleaned"] is True and sorted(map(os.path.basename, told["paths"])) == ["gone", "stale"]
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["data.txt", f"fresh.{os.getpid()}.0123456789abcdef.tmp", "held", "kept.lock"]
    )
    assert holdfast("clean", tmp_path).stdout == "cleaned: false\n"
    (tmp_path / "stale").write_bytes(b"pid=%d\ntimestamp=%d\n" % (os.getpid(), time.time() - 50))
    assert holdfast("clean", tmp_path / "stale").stdout == "cleaned: false\n"
    assert holdfast("clean", "--policy", "old", "--stale", "10", tmp_path / "stale").stdout == "cleaned: true\n"
    hold.release()


def test_break_says_whose_it_was_and_logs_it(path: str) -> None:
    hold = LockFile(path, tag="deploy").acquire()
    done = holdfast("break", path)
    assert done.returncode == 1 and f"held by pid {os.getpid()}" in done.stderr and "--yes" in done.stderr
    hold.check()
    done = holdfast("break", "--yes", path)
    assert done.returncode == 0 and f"held by pid {os.getpid()}" in done.stdout and "'deploy'" in done.stdout
    assert "took the lock away" in done.stderr
    assert hold.lost
    done = holdfast("break", "-y", path)
    assert done.returncode == 1 and done.stderr == f"Lock not held: {path}\n"
    answer = json.loads(holdfast("break", "-y", "--json", path).stdout)
    assert answer == {"broken": False, "locked": False, "error": f"Lock not held: {path}", "path": path, "holder": None}
    with pytest.raises(Exception, match="lost"):
        hold.release()


def test_break_prints_no_control_character_and_nothing_with_quiet(tmp_path: Path) -> None:
    path = str(tmp_path / "x\x1b[31m\ny")
    for option in ("--yes", "--quiet"):
        assert holdfast("lockfile", "try", "-q", path, "--pid", 1).returncode == 0
        done = holdfast("break", "-y", option, path)
        assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr
        assert ("took the lock away" in done.stderr) == (option == "--yes")
    assert (done.stdout, done.stderr) == ("", "")


def test_a_kernel_lock_cannot_be_broken(path: str) -> None:
    for lock in (Lock(path), Semaphore(path, 1)):
        with lock as hold:
            done = holdfast("break", "--yes", path)
            assert done.returncode == 1 and "cannot be taken away" in done.stderr
            hold.check()


# doctor


def test_a_healthy_file_system(tmp_path: Path) -> None:
    done = holdfast("doctor", tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    for text in ("flock between two processes", "O_TMPFILE", "O_EXCL", "link", "exchanged", "events", "fsync", "safe"):
        assert text in done.stdout
    assert "NO" not in done.stdout
    told = json.loads(holdfast("doctor", "--json", tmp_path).stdout)
    assert told["safe"] is True and all(check["good"] for check in told["checks"].values())
    assert os.listdir(tmp_path) == []


SABOTAGE = """
import sys
from holdfast import system
from holdfast.cli import main
setattr(system, {name!r}, lambda *_, **__: {value})
sys.exit(main(["doctor", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("lock", "None", r"flock between two processes +NO"),
        ("lock", "None", r"Lock +NOT SAFE +two processes held it at once"),
        ("lock_range", "None", r"byte-range locks between two processes +NO"),
        ("try_slot", "True", r"Semaphore +NOT SAFE"),
    ],
)
def test_a_file_system_that_grants_twice_is_found_out(name: str, value: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGE.format(name=name, value=value), tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == (1 if "SAFE" in says or name == "lock" else 0), done
    assert re.search(says, done.stdout), done.stdout
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = holdfast("doctor", tmp_path / "no" / "x")
    assert done.returncode == 3 and done.stderr.count("\n") == 1


# dir


def test_a_directory_is_replaced_by_what_a_command_builds(tmp_path: Path) -> None:
    site = tmp_path / "site"

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return holdfast("dir", *words)

    assert run("replace", site, "--keep", 1, "-c", 'echo one >"$HOLDFAST_NEW/a"').returncode == 0
    assert run("edit", "--keep", 1, site, "sh", "-c", 'echo two >"$HOLDFAST_NEW/b"').returncode == 0
    assert {path.name: path.read_text() for path in site.iterdir()} == {"a": "one\n", "b": "two\n"}
    assert run("versions", site).stdout == "1\n2\n"
    assert json.loads(run("versions", "--json", site).stdout) == {"versions": [1, 2], "current": 2}
    failed = run("edit", site, "--", "sh", "-c", 'rm "$HOLDFAST_NEW/a"; exit 5')
    assert failed.returncode == 3 and "the command ended with 5" in failed.stderr
    assert sorted(os.listdir(site)) == ["a", "b"] and sorted(os.listdir(tmp_path)) == [
        "site",
        "site.old-1",
        "site.versions",
    ]
    assert run("edit", site, "--", "sh", "-c", "kill -9 $$").returncode == 3
    assert run("edit", site, "--", "no-such-command-at-all").returncode == 3
    assert run("rollback", site).returncode == 0 and os.listdir(site) == ["a"]
    assert run("rollback", "--to", 9, site).returncode == 1
    assert run("versions", tmp_path / "nothing").returncode == run("rollback", tmp_path / "nothing").returncode == 3
    assert json.loads(run("replace", "--json", "--no-durable", site, "--", "true").stdout)["committed"] is True
    assert sorted(os.listdir(tmp_path)) == ["site", "site.versions"]
    (tmp_path / "site.new-0123456789abcdef").mkdir()
    assert json.loads(run("recover", "--json", site).stdout)["recovered"] is True
    assert sorted(os.listdir(tmp_path)) == ["site", "site.versions"]
    for words in (
        ("replace", site),
        ("frob", site),
        ("recover", site, "--", "true"),
        ("replace",),
        ("edit", "..", "-c", ":"),
    ):
        done = run(*words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    (tmp_path / "file").touch()
    assert run("replace", tmp_path / "file", "--", "true").returncode == 3


def test_a_directory_that_another_program_changes(tmp_path: Path, begin: Any) -> None:  # noqa: F811
    site = tmp_path / "site"
    first = begin("dir", "replace", site, "--", "sh", "-c", "echo here; cat", stdin=subprocess.PIPE)
    assert first.stdout.readline() == "here\n"
    busy = holdfast("dir", "edit", "-n", site, "--", "true")
    assert busy.returncode == 1 and f"held by pid {first.pid}" in busy.stderr
    assert holdfast("dir", "recover", "-w", "0.2", site).returncode == 1
    first.terminate()
    assert first.wait(60) == 3  # before `ended` closes its stdin, at which `cat` would end
    ended(first)
    assert os.listdir(tmp_path) == [], "terminated: nothing was committed, nothing is left"


# completion, help, start-up


def test_the_completion_scripts_are_those_of_the_parsers(tmp_path: Path) -> None:
    subprocess.run([sys.executable, CHECKOUT / "scripts/completions.py", tmp_path], check=True, timeout=PATIENCE)
    for shell, name in completion.SHELLS.items():
        fresh = (tmp_path / name).read_text()
        assert (completion.FOLDER / name).read_text() == fresh, "run scripts/completions.py"
        assert holdfast("completion", shell).stdout == fresh
    assert holdfast("completion", "csh").returncode == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("holdfast ru", "run"),
        ("holdfast run --sha", "--shared"),
        ("holdfast completion z", "zsh"),
        ("holdfast st", "status"),
        ("holdfast tasks wo", "work"),
        ("holdfast tasks work --dr", "--drain"),
    ],
)
def test_bash_completes(line: str, expected: str) -> None:
    script = """
    source "$1"
    COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDS=($2) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    "$(complete -p holdfast | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", completion.FOLDER / "holdfast.bash", line],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert expected in done.stdout.split(), done


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "web"])
def test_help_has_examples_that_work(command: str, tmp_path: Path) -> None:
    done = holdfast(command, "--help")
    assert done.returncode == 0 and done.stderr == "" and "example" in done.stdout
    assert holdfast("help", command).stdout == done.stdout
    if command in ("top", "completion"):
        return
    (tmp_path / "Makefile").write_text("all:\n")  # for the example with make
    examples = done.stdout.partition("example")[2].splitlines()[1:]
    for line in filter(str.strip, examples):
        script = f'holdfast() {{ "{sys.executable}" -m holdfast "$@"; }}\n{line.replace("/tmp", str(tmp_path))}'
        ran = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        no_server = "://" in line and "Check the URL" in ran.stderr
        assert "Traceback" not in ran.stderr and ran.returncode in ((3,) if no_server else (0, 1)), (line, ran)
        assert "usage" not in ran.stderr and "--help tells more" not in ran.stderr, (line, ran)


def test_the_overview() -> None:
    for words in ((), ("--help",), ("-h",), ("help",)):
        done = holdfast(*words)
        assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)
        assert done.returncode == (0 if words else 2)
    assert re.fullmatch(r"holdfast \d+\.\d+\.\d+\n", holdfast("--version").stdout)
    done = holdfast("relaese", "x")
    assert done.returncode == 2 and "did you mean lockfile release?" in done.stderr


@pytest.mark.parametrize("words", ["tasks", "tasks lss", "events raed", "lockfile tri"])
def test_a_group_of_commands_says_what_its_actions_are(words: str) -> None:
    done = holdfast(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    name, _, mistyped = words.partition(" ")
    hint = f"there is no action {mistyped!r} (did you mean " if mistyped else "which action? One of "
    assert done.stderr.startswith(f"holdfast {name}: {hint}") and done.stderr.count("\n") == 1


def test_colours_only_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "x.lock").touch()
    assert "\x1b" not in holdfast("ls", tmp_path).stdout
    script = "script -qec '{} ls {}' /dev/null".format(" ".join(HOLDFAST), tmp_path)
    for colour, environment in ((True, {}), (False, {"NO_COLOR": "1"}), (False, {"TERM": "dumb"})):
        env = (
            {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | environment
        )
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=True, env=env, timeout=PATIENCE
        )
        assert ("\x1b[" in done.stdout) is colour


NEVER_NEEDED = (
    "asyncio",
    "anyio",
    "dataclasses",
    "inspect",
    "subprocess",
    "typing",
    "shutil",
    "ctypes",
    "textual",
    "json",
)


@pytest.mark.parametrize(
    "words",
    [("run", "PATH", "--", "true"), ("lockfile", "try", "PATH"), ("status", "PATH"), ("sema", "release", "PATH")],
)
def test_the_hot_paths_import_little(words: tuple[str, ...], path: str) -> None:
    script = (
        "import sys; from holdfast.cli import main; code = main(sys.argv[1:]);"
        f"print(*[name for name in {NEVER_NEEDED!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *(path if word == "PATH" else word for word in words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "\n")


def test_a_semaphore_that_is_removed_while_its_status_is_read_is_free(tmp_path: Path) -> None:
    """`kind_of` saw the file, and its last holder removed it before it was opened."""
    assert not status_of(str(tmp_path / "x"), "semaphore", None, "proof").held
