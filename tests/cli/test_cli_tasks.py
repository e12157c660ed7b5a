"""`holdfast tasks`, as a shell uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import end_workers, until

from holdfast.tasks import TaskQueue

HOLDFAST = [sys.executable, "-W", "error", "-m", "holdfast", "tasks"]
PATIENCE = 40


@pytest.fixture
def queue(jobs: Path) -> Iterator[TaskQueue]:
    queue = TaskQueue(jobs, durable=False)
    yield queue
    end_workers(queue)


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": PATIENCE} | options
    return subprocess.run([*HOLDFAST, *map(str, words)], check=False, **options)


def call(*words: object, text: str = "", status: int = 0) -> str:
    """What it prints, on stdout and then on stderr."""
    done = run(*words, input=text)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
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
                stream.close()  # whatever else has it open


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, said, errors


class Gate:
    """A command that says that it runs, and goes on when it is let."""

    def __init__(self, place: Path) -> None:
        self.began, self._place = place / "began", place
        for name in "abxy":
            os.mkfifo(place / f"gate-{name}")  # one each: a pipe that is opened for two lets one of them through
        self.command = ["sh", "-c", f'echo "$$ $1" >> {self.began}; read x < {place}/gate-$1; echo "end $1"', "-", "{}"]

    def lines(self) -> list[str]:
        return self.began.read_text().splitlines() if self.began.exists() else []

    def until_begun(self, number: int = 1) -> None:
        until(lambda: len(self.lines()) >= number)

    def open(self, name: str) -> None:
        """For the one with this payload."""
        os.close(os.open(self._place / f"gate-{name}", os.O_WRONLY))

    def end(self) -> None:
        for line in self.lines():
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def gate(in_memory: Path) -> Iterator[Gate]:
    gate = Gate(in_memory)
    yield gate
    gate.end()


# put


def test_put(jobs: Path) -> None:
    ids = call("put", jobs, "one", "--priority", 3, "two words").split()
    assert len(ids) == 2
    queue = TaskQueue(jobs)
    assert [queue.get(id).payload for id in ids] == ["one", "two words"] and queue.get(ids[0]).priority == 3
    assert call("put", jobs, "-", "--quiet", text="a\n\n b \r\nc") == ""
    assert call("put", jobs, "--parse", '{"n": [1]}', "--id", "x") == "x\n"
    assert [queue.get(id).payload for id in queue.ids("pending")] == ["one", "two words", "a", " b ", "c", {"n": [1]}]
    assert json.loads(call("put", jobs, "--json", "--", "-5", "--drain")) == {"ids": queue.ids("pending")[-2:]}
    call("put", jobs, "again", "--id", "x")
    assert queue.get("x").payload == {"n": [1]}, "there is one by this name already"


def test_what_is_said_of_a_task(jobs: Path) -> None:
    options = ["--attempts", 7, "--timeout", "5m", "--key", "k", "--limit", 2, "--delay", "1.5h", "--id", "x"]
    call("put", jobs, "payload", *options)
    task = TaskQueue(jobs).get("x")
    assert (task.attempts, task.timeout, task.key, task.limit) == (7, 300.0, "k", 2)
    assert TaskQueue(jobs).stats()["delayed"] == 1


def test_bytes_that_are_no_text_come_back_as_they_are(jobs: Path) -> None:
    subprocess.run([*HOLDFAST, "put", jobs, "-", "-q"], input=b"caf\xe9 \xff\n", check=True)
    words = ["work", str(jobs), "--drain", "-q", "--", "printf", "%s", "{}"]
    assert subprocess.check_output([*HOLDFAST, *words], timeout=PATIENCE) == b"caf\xe9 \xff"


def test_put_a_wrong_thing(jobs: Path, in_memory: Path) -> None:
    assert "which tasks?" in call("put", jobs, status=2)
    assert "'{' is no JSON" in call("put", jobs, "--parse", "{", status=2)
    assert "--id names one task" in call("put", jobs, "a", "b", "--id", "x", status=2)
    assert "a priority is" in call("put", jobs, "a", "--priority", 10**10, status=2)
    for option in ("--attempts", "--limit", "--max-pending"):
        assert "number from 1 on" in call("put", jobs, "a", option, 0, status=2)
    assert "invalid time (30, 1.5s, 5m, 2h, 7d) value: 'soon'" in call("put", jobs, "a", "--delay", "soon", status=2)
    assert "is no JSON" in call("put", jobs, "-", "--parse", text="1\n{\n", status=2)
    assert TaskQueue(jobs).stats()["pending"] == 1, "what came before it was put"
    (in_memory / "other").mkdir()
    (in_memory / "other" / "thing").touch()
    assert "there is something else in this directory (thing)" in call("put", in_memory / "other", "a", status=3)
    assert "a queue is a directory" in call("put", in_memory / "other" / "thing", "a", status=3)


def test_put_lines_as_they_come(jobs: Path, begin: Callable[..., subprocess.Popen[str]]) -> None:
    process = begin("put", jobs, "first", "-", "last", stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    said = [process.stdout.readline().strip()]
    for text in ("one\ntwo\nth", "ree\r\n\nfour"):
        process.stdin.write(text)
        process.stdin.flush()
        said.append(process.stdout.readline().strip())
    process.stdin.close()
    process.stdin = None
    status, rest, _ = ended(process)
    queue = TaskQueue(jobs)
    assert status == 0 and [*said, *rest.split()] == queue.ids("pending")
    assert [queue.get(id).payload for id in queue.ids("pending")] == ["first", "one", "two", "three", "four", "last"]


def test_put_until_a_line_is_wrong(jobs: Path) -> None:
    said = call("put", jobs, "-", "--parse", text='{"a": 1}\n[2]\n{no\n4\n', status=2)
    assert "is no JSON" in said and "2 tasks put before" in said
    queue = TaskQueue(jobs)
    assert [queue.get(id).payload for id in queue.ids("pending")] == [{"a": 1}, [2]]


def test_schedules(jobs: Path) -> None:
    assert "next 20" in call("schedule", jobs, "nightly", "report", "--cron", "0 3 * * *", "--attempts", 5)
    call("schedule", jobs, "often", "[1]", "--parse", "--every", "90s", "--key", "k")
    table = call("schedule", jobs).splitlines()
    assert table[0].split() == ["NAME", "WHEN", "NEXT", "PAYLOAD"]
    assert [line.split("  ")[0] for line in table[1:]] == ["nightly", "often"]
    assert "03:00:00 UTC" in table[1] and "report" in table[1] and "every 1m" in table[2] and "[1]" in table[2]
    found = json.loads(call("schedule", jobs, "--json"))
    assert [(one["name"], one["cron"], one["every"], one["payload"]) for one in found] == [
        ("nightly", "0 3 * * *", None, "report"),
        ("often", None, 90, [1]),
    ]
    assert found[0]["options"]["attempts"] == 5 and found[1]["options"]["key"] == "k" and found[0]["next"]
    assert call("unschedule", jobs, "often") == "often: not put any more\n"
    assert "no such schedule" in call("unschedule", jobs, "often", status=1)
    assert len(json.loads(call("schedule", jobs, "--json"))) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x"], "either --every T or --cron"),
        (["x", "--every", "1m", "--cron", "* * * * *"], "either --every T or --cron"),
        (["x", "--cron", "61 * * * *"], "no minute"),
        (["x", "--every", "0.1s"], "at least 1"),
        (["x", "--parse", "{", "--every", "1m"], "no JSON"),
    ],
)
def test_a_wrong_schedule(jobs: Path, words: list[str], says: str) -> None:
    assert says in call("schedule", jobs, *words, status=2)
    assert not (jobs / "schedules").exists()


def test_a_scheduled_task_is_done(jobs: Path) -> None:
    call("schedule", jobs, "soon", "hello", "--every", "1s")
    queue = TaskQueue(jobs, durable=False)
    process = subprocess.Popen([*HOLDFAST, "work", str(jobs), "--", "echo", "{}"], stderr=subprocess.DEVNULL)
    try:
        until(lambda: queue.stats()["done"] >= 1)
    finally:
        process.terminate()
        process.wait()
    done = next(task for task in queue if task.state == "done")
    assert done.id.startswith("soon@") and done.result == "hello"


def test_nothing_is_made_for_a_wrong_put(jobs: Path) -> None:
    for words in ([], ["--parse", "{"], ["a", "b", "--id", "x"]):
        call("put", jobs, *words, status=2)
    assert not jobs.exists()


def test_a_full_queue(jobs: Path, begin: Callable[..., subprocess.Popen[str]]) -> None:
    text = call("put", jobs, "-", "--max-pending", 2, text="a\nb\nc\n", status=75)
    assert text.count("\n") == 3 and "2 tasks wait already; --wait T waits for room. 2 tasks put before" in text
    assert json.loads(run("put", jobs, "c", "--max-pending", 2, "--json").stdout) == {"ids": []}
    assert "tasks wait already. 0 tasks" in call("put", jobs, "c", "--max-pending", 2, "--wait", 0.05, status=75)
    waits = begin("put", jobs, "c", "--max-pending", 2, "--wait", "inf", "--id", "c")
    claim = TaskQueue(jobs).claim()
    assert claim is not None
    claim.complete()
    assert ended(waits) == (0, "c\n", "")


# Looking.


def test_there_is_no_queue(jobs: Path, in_memory: Path) -> None:
    for words in (["ls"], ["show", "x"], ["stats"], ["retry", "x"], ["cancel", "x"], ["purge"], ["recover"], ["watch"]):
        text = call(words[0], jobs, *words[1:], status=3)
        assert text == f"holdfast tasks: {jobs}: there is no queue of tasks here; holdfast tasks put makes one\n"
    assert not jobs.exists()
    (in_memory / "file").touch()
    assert "there is no queue of tasks here" in call("ls", in_memory / "file", status=3)
    jobs.mkdir()
    (jobs / "queue.json").write_text("{")
    assert "does not describe a queue" in call("ls", jobs, status=3)


def test_ls(jobs: Path, queue: TaskQueue) -> None:
    assert call("ls", jobs) == "no tasks here\n"
    queue.put("done", id="d")
    queue.claim().complete()  # type: ignore[union-attr]
    queue.put("bad", id="f", attempts=1)
    queue.claim().fail("it\nis\nbroken")  # type: ignore[union-attr]
    queue.put({"n": 1}, id="r")
    running = queue.claim()
    assert running is not None
    running.progress(3, 10, "third page")
    queue.put("later", id="p1")
    queue.put("sooner \x1b[2J", id="p2", priority=5)
    queue.put("x", id="c")
    queue.cancel("c")
    lines = call("ls", jobs).splitlines()
    assert lines[0].split() == ["ID", "STATE", "PRIO", "TRIED", "AGE", "WORKER", "PROGRESS", "PAYLOAD", "ERROR"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["r", "running"],
        ["p2", "pending"],
        ["p1", "pending"],
        ["f", "failed"],
        ["c", "cancelled"],
        ["d", "done"],
    ]
    assert f"{os.getpid()}@" in lines[1] and "3/10 third page" in lines[1] and '{"n": 1}' in lines[1]
    assert "\x1b" not in lines[2] and "sooner \\x1b[2J" in lines[2] and "1/1" in lines[4] and "it … broken" in lines[4]
    found = json.loads(call("ls", jobs, "--state", "failed", "-j", "--state", "running"))
    assert [(task["id"], task["state"]) for task in found] == [("r", "running"), ("f", "failed")]
    assert found[0]["progress"] == [3, 10, "third page"] and found[0]["started_at"].endswith("Z")
    assert len(call("ls", jobs, "--limit", 2).splitlines()) == 3
    assert "invalid choice: 'ready'" in call("ls", jobs, "--state", "ready", status=2)
    running.abandon()
    assert call("ls", jobs, "--state", "running") == "no running tasks here\n"
    assert "r   pending" in call("ls", jobs, "--state", "pending"), "its worker is gone"
    (jobs / "tasks" / "p1").write_text("{")
    assert "p1: its first line does not describe a task" in call("ls", jobs)


def test_show(jobs: Path, queue: TaskQueue) -> None:
    queue.put({"n": 1}, id="x", attempts=1, timeout=5, key="k")
    claim = queue.claim()
    assert claim is not None
    claim.progress(1, None, "begun")
    try:
        raise ValueError("no\x07")
    except ValueError as error:
        claim.fail(error)
    text = call("show", jobs, "x")
    for line in ("Task: x", "State: failed", 'Payload: {"n": 1}', "Tried: 1 of 1", "Timeout: 5 s", "Progress: 1 begun"):
        assert f"{line}\n" in text
    assert "Key: k (1 at a time)\n" in text and "Error: ValueError: no\\x07\n" in text and "\x07" not in text
    assert "Traceback:\n  Traceback (most recent call last):\n" in text and "test_cli_tasks.py" in text
    history = text.partition("History:\n")[2].splitlines()
    assert len(history) == 3 and "running: token 1, worker" in history[0] and "failed: because ValueError" in history[2]
    found = json.loads(call("show", jobs, "x", "--json"))
    assert found["history"][0]["is"] == "running" and "test_cli_tasks.py" in found["traceback"]
    unknown = f"holdfast tasks: {jobs}: there is no task 'y'; holdfast tasks ls {jobs} lists them\n"
    assert call("show", jobs, "y", status=1) == unknown
    assert "required: ID" in call("show", jobs, status=2)


def test_stats(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a")
    queue.put("b", delay=100)
    text = call("stats", jobs)
    assert text == "pending   2 (1 delayed)\nrunning   0\ndone      0\nfailed    0\ncancelled 0\n"
    assert json.loads(call("stats", jobs, "-j")) == queue.stats()


# Changing.


def test_retry(jobs: Path, queue: TaskQueue) -> None:
    queue.put_all("abc", attempts=1)
    first, second, third = queue.ids("pending")
    for _ in range(2):
        queue.claim().fail("no")  # type: ignore[union-attr]
    assert call("retry", jobs, first) == f"{first}: waits again\n"
    assert f"task '{third}' has not ended, it is pending" in call("retry", jobs, third, status=1)
    answer = json.loads(call("retry", jobs, "--failed", "nobody", "--json", status=1))
    assert answer["retried"] == [second] and "there is no task 'nobody'" in answer["errors"]["nobody"]
    assert queue.stats()["pending"] == 3
    assert call("retry", jobs, "--failed") == "no task has failed\n"
    assert "which tasks?" in call("retry", jobs, status=2)


def test_cancel(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a", id="a")
    queue.claim().complete()  # type: ignore[union-attr]
    queue.put("b", id="b")
    text = call("cancel", jobs, "nobody", "a", "b", status=1)
    assert "b: cancelled\n" in text and "there is no task 'nobody'" in text
    assert "'a' has ended already, it is done" in text
    assert queue.get("b").state == "cancelled"
    assert call("cancel", jobs, "b") == "b: was cancelled before\n", "and it stays so"
    assert "which tasks?" in call("cancel", jobs, status=2)


def test_purge_and_recover(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a", id="a")
    queue.claim().complete()  # type: ignore[union-attr]
    assert call("purge", jobs, "--older-than", "7d") == "Purged: 0 tasks\n" and "a" in queue
    assert json.loads(call("purge", jobs, "--json")) == {"purged": 1} and "a" not in queue
    assert "invalid time" in call("purge", jobs, "--older-than", "-1", status=2)
    queue.put("b", id="b")
    next((jobs / "pending").glob("*/*/*")).unlink()
    assert call("recover", jobs) == "Recovered: 1 task\n" and queue.ids("pending") == ["b"]
    assert json.loads(call("recover", jobs, "-j")) == {"recovered": 0} and call("recover", jobs, "-q") == ""


def test_wrong_words(jobs: Path) -> None:
    assert "invalid choice: 'sing'" in call("sing", jobs, status=2)
    assert "required: ACTION" in call(status=2)
    assert "unrecognized arguments: --state" in call("stats", jobs, "--state", "done", status=2)


@pytest.mark.parametrize("action", ["put", "work", "ls", "watch", "purge"])
def test_help(action: str) -> None:
    text = call(action, "--help")
    assert f"usage: holdfast tasks {action}" in text and "exit status: 0; 1 if" in text and "DIR" in text


# work


SCRIPT = 'echo "this is $1"; case "$1" in bad*) echo broken >&2; exit 3;; esac'


def test_work(jobs: Path, queue: TaskQueue) -> None:
    queue.put("good", id="g")
    queue.put("bad", id="b", attempts=2)
    done = run("work", jobs, "--drain", "--retry-after", 0.01, "--", "sh", "-c", SCRIPT, "-", "{}")
    assert (done.returncode, done.stdout) == (1, "this is good\nthis is bad\nthis is bad\n")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("done g in 0.") and lines[1] == lines[3] == "broken"
    assert lines[2] == "retry b (attempt 1 of 2): sh ended with status 3: broken"
    assert lines[4] == "failed b (attempt 2 of 2): sh ended with status 3: broken"
    assert lines[5].startswith("1 done, 1 failed, 1 retried in ") and len(lines) == 6
    assert queue.get("g").result == "this is good"
    assert "nothing done in" in call("work", jobs, "--drain", "--", "true"), "and that is status 0"


def test_work_makes_a_queue_and_says_little(jobs: Path) -> None:
    assert call("work", jobs, "--drain", "-q", "--", "true") == ""
    call("put", jobs, "bad", "--attempts", 1, "-q")
    done = run("work", jobs, "--drain", "-q", "--", "sh", "-c", SCRIPT, "-", "{}")
    assert (done.returncode, done.stdout, done.stderr) == (1, "this is bad\n", "broken\n"), "what it prints, no more"


def test_work_in_json(jobs: Path, queue: TaskQueue) -> None:
    queue.put("good", id="g")
    queue.put("bad", id="b", attempts=1)
    done = run("work", jobs, "--drain", "--json", "--", "sh", "-c", "test {} = good")
    assert done.returncode == 1 and done.stdout == ""
    first, second, last = map(json.loads, done.stderr.splitlines())
    assert (first["event"], first["id"], first["error"]) == ("done", "g", None)
    assert (first["attempt"], first["attempts"]) == (1, 3)
    assert (second["event"], second["id"], second["error"]) == ("failed", "b", "sh ended with status 1")
    assert last["event"] == "end" and (last["done"], last["failed"]) == (1, 1)


def test_what_commands_print_is_not_mixed_up(jobs: Path, queue: TaskQueue) -> None:
    letters = "abcdefgh"
    queue.put_all(letters)
    for more in ([], ["--threads"]):
        line = "head -c 300000 /dev/zero | tr '\\0' {}; echo; echo {}{}{} >&2"
        done = run("work", jobs, "--drain", "-q", "-j", 4, *more, "--", "sh", "-c", line)
        assert sorted(done.stdout.splitlines()) == [letter * 300_000 for letter in letters]
        assert sorted(done.stderr.splitlines()) == [letter * 3 for letter in letters]
        call("retry", jobs, *queue.ids("done"), "-q")


def test_a_python_function(jobs: Path, queue: TaskQueue, in_memory: Path) -> None:
    (in_memory / "mymodule.py").write_text(
        "import os\n"
        "class Group:\n"
        "    @staticmethod\n"
        "    def handle(task):\n"
        "        print('got', task.payload)\n"
        "        return len(task.payload)\n"
        "def fail(task): raise ValueError('never')\n"
        "broken = 7\n"
    )
    (in_memory / "worse.py").write_text("1 / 0")
    id = queue.put("four")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"cwd": in_memory, "env": environment}
    done = run("work", jobs, "--drain", "--python", "mymodule:Group.handle", **options)
    assert (done.returncode, done.stdout) == (0, "got four\n") and queue.get(id).result == 4
    assert done.stderr.startswith(f"done {id} in 0.")
    id = queue.put("x", attempts=1)
    done = run("work", jobs, "--drain", "--python", "mymodule:fail", **options)
    assert done.returncode == 1 and f"failed {id} (attempt 1 of 1): ValueError: never\n" in done.stderr
    for name, complaint in (
        ("mymodule", "--python is MODULE:FUNCTION"),
        ("nomodule:f", "No module named 'nomodule'"),
        ("mymodule:nothing", "has no attribute 'nothing'"),
        ("mymodule:broken", "that is no function"),
        ("worse:f", "ZeroDivisionError: division by zero"),
    ):
        done = run("work", jobs, "--python", name, **options)
        assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1


def test_lines_that_handlers_print_are_not_mixed_up(jobs: Path, queue: TaskQueue, in_memory: Path) -> None:
    (in_memory / "mymodule.py").write_text(
        "def handle(task):\n    for _ in range(2000): print(task.payload, task.payload, task.payload)\n"
    )
    queue.put_all("abcd")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words = ["work", jobs, "--drain", "-q", "-j", 4, "--python", "mymodule:handle"]
    done = run(*words, cwd=in_memory, env=environment)
    assert sorted(set(done.stdout.splitlines())) == ["a a a", "b b b", "c c c", "d d d"]


def test_work_with_wrong_words(jobs: Path) -> None:
    assert "which command? Put it after --" in call("work", jobs, status=2)
    assert "a command or --python" in call("work", jobs, "--python", "a:b", "--", "true", status=2)
    assert "no-such-thing: there is no such command" in call("work", jobs, "--", "no-such-thing", "{}", status=3)
    assert "number from 1 on" in call("work", jobs, "-j", 0, "--", "true", status=2)
    assert not jobs.exists()


def test_a_killed_process_of_a_worker(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    queue.put("x", id="x")
    worker = begin("work", jobs, "--drain", "--", *gate.command)
    gate.until_begun()
    child = int(queue.get("x").worker.partition("@")[0])  # type: ignore[union-attr]
    os.killpg(child, signal.SIGKILL)
    assert worker.stderr is not None
    assert worker.stderr.readline() == "retry x (attempt 1 of 3): the worker died\n"
    gate.until_begun(2)
    gate.open("x")
    status, said, errors = ended(worker)
    assert (status, said) == (0, "end x\n") and errors.startswith("done x in ") and "1 done, 1 retried" in errors


def test_one_that_takes_too_long(jobs: Path, queue: TaskQueue) -> None:
    queue.put("x", id="x", timeout=0.2, attempts=2)
    done = run("work", jobs, "--drain", "--retry-after", 0.01, "--", "sh", "-c", "echo; exec sleep 60")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[:2] == [
        "retry x (attempt 1 of 2): not done within 0.2 s",
        "failed x (attempt 2 of 2): not done within 0.2 s",
    ]
    assert lines[2].startswith("1 failed, 1 retried")


def test_one_that_is_cancelled(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    queue.put("x", id="x")
    worker = begin("work", jobs, "--drain", "--", *gate.command)
    gate.until_begun()
    assert call("cancel", jobs, "x") == "x: runs, and is being ended\n"
    status, _, errors = ended(worker)
    assert status == 0 and errors.startswith("cancelled x\n1 cancelled in ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Callable[..., subprocess.Popen[str]], number: int
) -> None:
    queue.put_all("abc")
    worker = begin("work", jobs, "-j", 2, "--", *gate.command)
    gate.until_begun(2)
    worker.send_signal(number)
    assert worker.stderr is not None
    assert worker.stderr.readline() == "finishing 2 that run; a second signal gives them back\n"
    gate.open("a")
    gate.open("b")
    status, said, errors = ended(worker)
    assert status == 0 and sorted(said.splitlines()) == ["end a", "end b"] and "2 done in" in errors
    assert queue.stats()["pending"] == 1 and queue.stats()["done"] == 2


def test_drain_that_was_told_to_end_says_that_something_is_left(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    for left, code in ((["b"], 75), ([], 0)):
        queue.put("a")
        worker = begin("work", jobs, "--drain", "--", *gate.command)
        gate.until_begun()
        queue.put_all(left)
        worker.terminate()
        assert worker.stderr is not None
        assert worker.stderr.readline().startswith("finishing 1")
        gate.open("a")
        assert ended(worker)[0] == code
        gate.began.unlink()
        call("work", jobs, "--drain", "-q", "--", "true")


def test_two_signals_give_back_what_runs(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    queue.put("x", id="x", attempts=1)
    worker = begin("work", jobs, "--", *gate.command)
    gate.until_begun()
    worker.terminate()
    assert worker.stderr is not None
    assert worker.stderr.readline().startswith("finishing 1 that run")
    worker.terminate()
    status, said, errors = ended(worker)
    assert (status, said) == (0, "")
    assert errors.splitlines()[:2] == ["giving back what runs", "given back x: its worker was ended"]
    task = queue.get("x")
    assert task.state == "pending" and task.tried == 0
    pid = int(gate.lines()[0].split()[0])
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_killed_supervisor(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    """Nobody is there any more to hear what its children say, much as it is. It is done all the same."""
    queue.put("x", id="x")
    queue.put("y", id="y")
    shell, option, script, *words = gate.command
    worker = begin("work", jobs, "--", shell, option, f"{script}; yes | head -c 300000", *words)
    gate.until_begun()
    worker.kill()
    worker.wait()
    gate.open("x")
    queue.wait("x", timeout=PATIENCE)
    assert queue.get("x").result.endswith("y\ny") and queue.get("x").tried == 1
    assert "1 done in" in call("work", jobs, "--drain", "--", "true") and queue.get("y").state == "done"


def test_nobody_reads_what_commands_print(jobs: Path, queue: TaskQueue) -> None:
    queue.put_all(range(20))
    work = f"{' '.join(HOLDFAST)} work {jobs} --drain -q -- head -c 100000 /dev/zero"
    line = f"{work} | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("0\n", "") and queue.stats()["done"] == 20


# watch


def test_watch_once(jobs: Path, queue: TaskQueue) -> None:
    queue.put("bad", id="f", attempts=1)
    queue.claim().fail("broken")  # type: ignore[union-attr]
    queue.put("x", id="r")
    running = queue.claim()
    assert running is not None
    queue.put("later", delay=100)
    lines = call("watch", jobs, "--once").splitlines()
    assert lines[0] == "1 running, 1 pending (1 delayed), 0 done, 1 failed, 0 cancelled"
    assert lines[1].startswith("  running r for ") and lines[1].endswith(": x") and f"by {os.getpid()}@" in lines[1]
    assert lines[2].startswith("  failed f ") and lines[2].endswith(" ago: broken")
    found = json.loads(call("watch", jobs, "--once", "--json"))
    assert found["counts"] == queue.stats() and found["running"][0]["id"] == "r" and found["failures"][0]["id"] == "f"
    running.complete()


def test_watch_prints_what_changes(jobs: Path, queue: TaskQueue, begin: Callable[..., subprocess.Popen[str]]) -> None:
    watch = begin("watch", jobs, "--every", 0.1, "--json")
    assert watch.stdout is not None

    def counts() -> dict[str, Any]:
        assert watch.stdout is not None
        return json.loads(watch.stdout.readline())

    assert counts()["counts"]["pending"] == 0
    queue.put("x", id="x", attempts=1)
    assert counts()["counts"]["pending"] == 1
    claim = queue.claim()
    assert claim is not None
    assert counts()["running"][0]["id"] == "x"
    claim.progress(1, 2, "half")
    assert counts()["running"][0]["progress"] == [1, 2, "half"]
    claim.fail("broken")
    assert counts()["failures"][0]["error"] == "broken"
    queue.retry("x")
    assert counts()["failures"] == []
    watch.stdout.close()  # nobody reads any more
    queue.put("y")
    assert watch.wait(PATIENCE) == 0


def test_watch_shows_an_older_failure_again(jobs: Path, queue: TaskQueue) -> None:
    from holdfast.cli.tasks.watch import View

    for number in range(7):
        queue.put(number, id=str(number), attempts=1)
        queue.claim().fail("no")  # type: ignore[union-attr]
    view = View(str(jobs))
    assert [task.id for task in view.look().failures] == ["6", "5", "4", "3", "2"]
    queue.retry("5")
    assert [task.id for task in view.look().failures] == ["6", "4", "3", "2", "1"]


def test_half_a_character(jobs: Path, queue: TaskQueue) -> None:
    """JSON can say it. Nobody can print it, and what else there is must not be lost for that."""
    for payload, id in (("good1", "a"), ("\ud800", "b"), ("good2", "c")):
        queue.put(payload, id=id)
    done = run("ls", jobs)
    assert done.returncode == 0 and "good1" in done.stdout and "good2" in done.stdout and "\\ud800" in done.stdout
    done = run("show", jobs, "b")
    assert done.returncode == 0 and "\\ud800" in done.stdout
