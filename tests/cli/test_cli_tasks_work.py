"""`holdfast tasks work` and `watch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import claimed, end_workers, until
from tasks_command import HOLDFAST, PATIENCE, Gate, call, ended, run

from holdfast.tasks import TaskQueue

Begin = Callable[..., subprocess.Popen[str]]
SCRIPT = 'echo "this is $1"; case "$1" in bad*) echo broken >&2; exit 3;; esac'
APP = """
from holdfast.tasks import TaskQueue
queue = TaskQueue("jobs")

@queue.task(attempts=1)
def resize(name, width):
    print("resizing", name)
    return f"{name} {width}"

@queue.task(attempts=1)
def fail():
    raise ValueError("never")

empty = TaskQueue("jobs")
number = 7
"""
HANDLERS = """
class Group:
    @staticmethod
    def handle(task):
        print('got', task.payload)
        return len(task.payload)

def fail(task): raise ValueError('never')

broken = 7
"""


@pytest.fixture
def queue(jobs: Path) -> Iterator[TaskQueue]:
    queue = TaskQueue(jobs)
    yield queue
    end_workers(queue)


def test_work_runs_a_command_for_each_task_and_reports_each_end(jobs: Path, queue: TaskQueue) -> None:
    queue.put("good", id="g")
    queue.put("bad", id="b", attempts=2)
    done = run("work", jobs, "--drain", "--retry-after", 0.01, "--", "sh", "-c", SCRIPT, "-", "{}")
    assert (done.returncode, done.stdout) == (1, "this is good\nthis is bad\nthis is bad\n")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("done g in ") and lines[1] == lines[3] == "broken"
    assert lines[2] == "retry b (attempt 1 of 2): sh ended with status 3: broken"
    assert lines[4] == "failed b (attempt 2 of 2): sh ended with status 3: broken"
    assert lines[5].startswith("1 done, 1 failed, 1 retried in ") and len(lines) == 6
    assert queue.get("g").result == "this is good"
    assert "nothing done in" in call("work", jobs, "--drain", "--", "true"), "and the exit status is 0"


def test_work_creates_a_queue_only_with_create(jobs: Path) -> None:
    assert "--create creates it" in call("work", jobs, "--drain", "-q", "--", "true", status=3)
    assert not jobs.exists()
    assert call("work", jobs, "--drain", "-q", "--create", "--", "true") == "" and jobs.exists()


def test_a_quiet_worker_prints_only_the_output_of_commands(jobs: Path) -> None:
    call("put", jobs, "bad", "--attempts", 1, "-q")
    done = run("work", jobs, "--drain", "-q", "--", "sh", "-c", SCRIPT, "-", "{}")
    assert (done.returncode, done.stdout, done.stderr) == (1, "this is bad\n", "broken\n")


def test_work_reports_in_json(jobs: Path, queue: TaskQueue) -> None:
    queue.put("good", id="g")
    queue.put("bad", id="b", attempts=1)
    done = run("work", jobs, "--drain", "--json", "--", "sh", "-c", "test {} = good")
    assert done.returncode == 1 and done.stdout == ""
    first, second, last = map(json.loads, done.stderr.splitlines())
    assert (first["event"], first["id"], first["error"]) == ("done", "g", None)
    assert (first["attempt"], first["attempts"]) == (1, 3)
    assert (second["event"], second["id"], second["error"]) == ("failed", "b", "sh ended with status 1")
    assert last["event"] == "end" and (last["done"], last["failed"]) == (1, 1)


def test_the_output_of_each_command_is_printed_whole_and_in_one_piece(jobs: Path, queue: TaskQueue) -> None:
    letters = "abcdefgh"
    queue.put_all(letters)
    line = "head -c 300000 /dev/zero | tr '\\0' {}; echo; echo {}{}{} >&2"
    done = run("work", jobs, "--drain", "-q", "-j", 4, "--", "sh", "-c", line)
    assert sorted(done.stdout.splitlines()) == [letter * 300_000 for letter in letters]
    assert sorted(done.stderr.splitlines()) == [letter * 3 for letter in letters]


def test_work_loses_no_output_of_commands_silently(jobs: Path, queue: TaskQueue) -> None:
    queue.put("x")
    with open("/dev/full", "w") as full:
        words = ("work", jobs, "--drain", "-q", "--", "echo", "{}")
        done = run(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 3 and "No space left on device. The output is lost." in done.stderr
    assert queue.stats()["done"] == 1, "the task is done all the same"


def test_work_calls_a_python_function(jobs: Path, queue: TaskQueue, in_memory: Path) -> None:
    (in_memory / "mymodule.py").write_text(HANDLERS)
    (in_memory / "worse.py").write_text("1 / 0")
    id = queue.put("four")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"cwd": in_memory, "env": environment}
    done = run("work", jobs, "--drain", "--python", "mymodule:Group.handle", **options)
    assert (done.returncode, done.stdout) == (0, "got four\n") and queue.get(id).result == 4
    assert done.stderr.startswith(f"done {id} in ")
    id = queue.put("x", attempts=1)
    done = run("work", jobs, "--drain", "--python", "mymodule:fail", **options)
    assert done.returncode == 1 and f"failed {id} (attempt 1 of 1): ValueError: never\n" in done.stderr
    for name, message in (
        ("mymodule", "--python must be MODULE:FUNCTION"),
        ("nomodule:f", "No module named 'nomodule'"),
        ("mymodule:nothing", "has no attribute 'nothing'"),
        ("mymodule:broken", "--python mymodule:broken is not a function"),
        ("worse:f", "ZeroDivisionError: division by zero"),
    ):
        done = run("work", jobs, "--python", name, **options)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_work_app_runs_all_registered_functions_of_a_queue(jobs: Path, queue: TaskQueue, in_memory: Path) -> None:
    (in_memory / "myapp.py").write_text(APP)
    queue.put({"args": ["a.png"], "kwargs": {"width": 200}}, id="r", function="myapp.resize", attempts=1)
    queue.put({"args": [], "kwargs": {}}, id="f", function="myapp.fail", attempts=1)
    done = run("work", "--drain", "--app", "myapp:queue", cwd=in_memory)
    assert done.returncode == 1 and done.stdout == "resizing a.png\n"
    assert "failed f (attempt 1 of 1): ValueError: never\n" in done.stderr
    assert queue.get("r").result == "a.png 200"
    assert "myapp.resize" in call("ls", jobs) and "Function: myapp.resize\n" in call("show", jobs, "r")


def test_work_app_explains_what_is_wrong_with_the_application(in_memory: Path) -> None:
    (in_memory / "myapp.py").write_text(APP)
    (in_memory / "needy.py").write_text("import noapp\n")
    for words, message in (
        (["--app", "myapp:number"], "--app myapp:number is a int, not a TaskQueue"),
        (["--app", "myapp:empty"], "has no functions. Register them with @empty.task"),
        (["--app", "myapp"], "--app must be MODULE:QUEUE"),
        (["--app", "noapp:queue"], "No module named 'noapp' (run this in the directory of the module"),
        (["--app", "needy:queue"], "No module named 'noapp' (HOLDFAST_DEBUG=1"),
        (["jobs", "--app", "myapp:queue"], "names the queue already. Leave 'jobs' out"),
        (["--app", "myapp:queue", "--no-durable"], "do not go with --app"),
        (["jobs", "--app", "myapp:queue", "--", "true"], "give only one of: a command, --python, --app"),
    ):
        done = run("work", *words, cwd=in_memory)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_lines_that_handlers_print_are_not_mixed(jobs: Path, queue: TaskQueue, in_memory: Path) -> None:
    (in_memory / "mymodule.py").write_text(
        "def handle(task):\n    for _ in range(2000): print(task.payload, task.payload, task.payload)\n"
    )
    queue.put_all("abcd")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words = ["work", jobs, "--drain", "-q", "-j", 4, "--python", "mymodule:handle"]
    done = run(*words, cwd=in_memory, env=environment)
    assert sorted(set(done.stdout.splitlines())) == ["a a a", "b b b", "c c c", "d d d"]


def test_work_explains_wrong_arguments(jobs: Path) -> None:
    assert "which command? Put it after --" in call("work", jobs, status=2)
    assert "give only one of: a command" in call("work", jobs, "--python", "a:b", "--", "true", status=2)
    assert "which queue?" in call("work", "--python", "a:b", status=2)
    assert "no-such-thing: there is no such command" in call("work", jobs, "--", "no-such-thing", "{}", status=3)
    assert "number from 1 on" in call("work", jobs, "-j", 0, "--", "true", status=2)
    assert not jobs.exists()


def test_a_scheduled_task_is_added_and_done_by_a_worker(jobs: Path, begin: Begin) -> None:
    call("schedule", jobs, "soon", "hello", "--every", "1s")
    queue = TaskQueue(jobs)
    worker = begin("work", jobs, "--", "echo", "{}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: queue.stats()["done"] >= 1)
    worker.terminate()
    assert worker.wait(PATIENCE) == 0
    done = next(queue.tasks(("done",)))
    assert done.id.startswith("soon@") and done.result == "hello"


def test_a_task_whose_process_is_killed_is_tried_again(jobs: Path, queue: TaskQueue, gate: Gate, begin: Begin) -> None:
    queue.put("x", id="x")
    worker = begin("work", jobs, "--drain", "--", *gate.command)
    gate.until_begun()
    child = int(queue.get("x").worker.partition("@")[0])  # type: ignore[union-attr]
    os.killpg(child, signal.SIGKILL)
    assert worker.stderr is not None
    assert worker.stderr.readline() == "retry x (attempt 1 of 3): the worker died\n"
    gate.until_begun(2)
    gate.open("x")
    status, printed, errors = ended(worker)
    assert (status, printed) == (0, "end x\n") and errors.startswith("done x in ") and "1 done, 1 retried" in errors


def test_an_attempt_that_takes_longer_than_its_timeout_fails(jobs: Path, queue: TaskQueue) -> None:
    queue.put("x", id="x", timeout=0.2, attempts=2)
    done = run("work", jobs, "--drain", "-j", 1, "--retry-after", 0.01, "--", "sh", "-c", "exec sleep 600")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[:2] == [
        "retry x (attempt 1 of 2): not done within 0.2 s",
        "failed x (attempt 2 of 2): not done within 0.2 s",
    ]
    assert lines[2].startswith("1 failed, 1 retried")


def test_a_running_task_that_is_cancelled_is_killed(jobs: Path, queue: TaskQueue, gate: Gate, begin: Begin) -> None:
    queue.put("x", id="x")
    worker = begin("work", jobs, "--drain", "--", *gate.command)
    gate.until_begun()
    assert call("cancel", jobs, "x").startswith("x: cancelled")
    status, _, errors = ended(worker)
    assert status == 0 and errors.startswith("cancelled x\n1 cancelled in ")
    pid = int(gate.lines()[0].split()[0])
    until(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_tasks_finish(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Begin, number: int
) -> None:
    queue.put_all("abc")
    worker = begin("work", jobs, "-j", 2, "--", *gate.command)
    gate.until_begun(2)
    worker.send_signal(number)
    assert worker.stderr is not None
    assert worker.stderr.readline() == "finishing 2 running tasks; a second signal gives them back\n"
    gate.open("a")
    gate.open("b")
    status, printed, errors = ended(worker)
    assert status == 0 and sorted(printed.splitlines()) == ["end a", "end b"] and "2 done in" in errors
    assert queue.stats()["pending"] == 1 and queue.stats()["done"] == 2


@pytest.mark.parametrize(("left", "code"), [(["b"], 1), ([], 0)])
def test_drain_that_a_signal_ends_exits_with_1_if_tasks_are_left(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Begin, left: list[str], code: int
) -> None:
    queue.put("a")
    worker = begin("work", jobs, "--drain", "--", *gate.command)
    gate.until_begun()
    queue.put_all(left)
    worker.terminate()
    assert worker.stderr is not None
    assert worker.stderr.readline().startswith("finishing 1 running task;")
    gate.open("a")
    assert ended(worker)[0] == code


def test_a_second_signal_gives_running_tasks_back(jobs: Path, queue: TaskQueue, gate: Gate, begin: Begin) -> None:
    queue.put("x", id="x", attempts=1)
    worker = begin("work", jobs, "--", *gate.command)
    gate.until_begun()
    worker.terminate()
    assert worker.stderr is not None
    assert worker.stderr.readline().startswith("finishing 1 running task")
    worker.terminate()
    status, printed, errors = ended(worker)
    assert (status, printed) == (0, "")
    assert errors.splitlines()[:2] == ["giving running tasks back", "given back x"]
    task = queue.get("x")
    assert task.state == "pending" and task.tried == 0
    pid = int(gate.lines()[0].split()[0])
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_task_ends_well_after_its_supervisor_was_killed(
    jobs: Path, queue: TaskQueue, gate: Gate, begin: Begin
) -> None:
    """The child cannot report to its supervisor any more. Its task is done all the same."""
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


def test_a_reader_that_has_gone_does_not_fail_tasks(jobs: Path, queue: TaskQueue) -> None:
    queue.put_all(range(20))
    work = f"{' '.join(HOLDFAST)} work {jobs} --drain -q -- head -c 100000 /dev/zero"
    line = f"{work} | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("0\n", "") and queue.stats()["done"] == 20


# watch


def test_watch_once_prints_a_snapshot(jobs: Path, queue: TaskQueue) -> None:
    queue.put("bad", id="f", attempts=1)
    claimed(queue).fail("broken")
    queue.put("x", id="r")
    running = claimed(queue)
    queue.put("later", delay=100)
    lines = call("watch", jobs, "--once").splitlines()
    assert lines[0] == "1 running, 1 pending (1 delayed), 0 done, 1 failed, 0 cancelled"
    assert lines[1].startswith("  running r for ") and lines[1].endswith(": x") and f"by {os.getpid()}@" in lines[1]
    assert lines[2].startswith("  failed f ") and lines[2].endswith(" ago: broken")
    found = json.loads(call("watch", jobs, "--once", "--json"))
    assert found["counts"] == queue.stats() and found["running"][0]["id"] == "r" and found["failures"][0]["id"] == "f"
    running.complete()


def test_watch_prints_a_snapshot_for_every_change(jobs: Path, queue: TaskQueue, begin: Begin) -> None:
    watch = begin("watch", jobs, "--every", 0.1, "--json")
    assert watch.stdout is not None

    def until_shown(what: Callable[[dict[str, Any]], bool]) -> None:
        assert watch.stdout is not None
        while not what(json.loads(watch.stdout.readline())):
            pass

    until_shown(lambda seen: seen["counts"]["pending"] == 0)
    queue.put("x", id="x", attempts=1)
    until_shown(lambda seen: seen["counts"]["pending"] == 1)
    claim = claimed(queue)
    until_shown(lambda seen: [task["id"] for task in seen["running"]] == ["x"])
    claim.progress(1, 2, "half")
    until_shown(lambda seen: seen["running"][0]["progress"] == [1, 2, "half"])
    claim.fail("broken")
    until_shown(lambda seen: [task["error"] for task in seen["failures"]] == ["broken"])
    queue.retry("x")
    until_shown(lambda seen: seen["failures"] == [])
    watch.stdout.close()
    queue.put("y")
    assert watch.wait(PATIENCE) == 0, "a reader that has gone is not an error"


def test_watch_shows_the_five_newest_failures(jobs: Path, queue: TaskQueue) -> None:
    from holdfast.collect.tasks import look

    for number in (3, 1, 2, 0, 6, 5, 4):
        queue.put(number, id=str(number), attempts=1)
    for _ in range(7):
        claimed(queue).fail("no")
    assert [task.id for task in look(TaskQueue(jobs)).failures] == ["4", "5", "6", "0", "2"]
    queue.retry("5")
    assert [task.id for task in look(TaskQueue(jobs)).failures] == ["4", "6", "0", "2", "1"]


def test_how_an_attempt_ended_follows_from_the_token(queue: TaskQueue) -> None:
    from holdfast.cli.tasks.bar import outcome_of

    queue.put("x", id="x", attempts=2)
    first = claimed(queue)
    assert outcome_of(queue.get("x"), first.token) is None
    first.give_back()
    assert outcome_of(queue.get("x"), first.token) == ("given back", None)
    second = claimed(queue)
    assert outcome_of(queue.get("x"), first.token) == ("given back", None)
    second.fail("broken", delay=0)
    assert outcome_of(queue.get("x"), second.token) == ("retry", "broken")
    third = claimed(queue)
    third.fail("again")
    assert outcome_of(queue.get("x"), third.token) == ("failed", "again")
    queue.retry("x")
    assert outcome_of(queue.get("x"), third.token) == ("failed", "again")
    assert outcome_of(queue.get("x"), second.token) == ("retry", "broken")
    fourth = claimed(queue)
    fourth.complete()
    assert outcome_of(queue.get("x"), fourth.token) == ("done", None)


def test_every_command_works_with_a_postgresql_url_and_shows_no_password(postgres: str) -> None:
    printed = []

    def on_server(action: str, *words: object, status: int = 0) -> str:
        printed.append(call(action, postgres, *words, status=status))
        return printed[-1]

    assert on_server("put", "good", "--id", "g") == "g\n"
    on_server("put", "bad", "--id", "b", "--attempts", 1)
    on_server("pause")
    assert "The queue is paused" in on_server("stats")
    on_server("resume")
    text = on_server("work", "--drain", "--", "sh", "-c", SCRIPT, "-", "{}", status=1)
    assert "this is good\n" in text and "failed b (attempt 1 of 1)" in text and "1 done, 1 failed in" in text
    assert [line.split()[:2] for line in on_server("ls").splitlines()[1:]] == [["b", "failed"], ["g", "done"]]
    assert "State: done\n" in on_server("show", "g")
    assert "there is no task 'x'" in on_server("show", "x", status=1)
    assert "1 failed" in on_server("watch", "--once")
    assert on_server("retry", "--failed") == "b: pending again\n"
    assert on_server("cancel", "b") == "b: cancelled\n"
    on_server("schedule", "often", "--every", "1h")
    assert "often" in on_server("schedule") and on_server("unschedule", "often") == "often: removed\n"
    assert on_server("purge").startswith("Purged: ")
    assert ":not-to-be-seen@" in postgres and not any("not-to-be-seen" in text for text in printed)
