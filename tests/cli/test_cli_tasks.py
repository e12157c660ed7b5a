"""`holdfast tasks`: the commands that add, list and change tasks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import claimed, end_workers
from tasks_command import HOLDFAST, PATIENCE, call, ended, run

from holdfast.tasks import TaskQueue

CLAIM_AND_DIE = """
import os, signal, sys
from holdfast.tasks import TaskQueue
claim = TaskQueue(sys.argv[1]).claim()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def queue(jobs: Path) -> Iterator[TaskQueue]:
    queue = TaskQueue(jobs)
    yield queue
    end_workers(queue)


def payloads(queue: TaskQueue) -> list[object]:
    return [task.payload for task in queue.tasks(("pending",))]


def ids(queue: TaskQueue) -> list[str]:
    return [task.id for task in queue.tasks(("pending",))]


# put


def test_put_adds_a_task_for_each_word_or_line_and_prints_their_ids(jobs: Path) -> None:
    first, second = call("put", jobs, "one", "--priority", 3, "two words").split()
    queue = TaskQueue(jobs)
    assert (queue.get(first).payload, queue.get(second).payload) == ("one", "two words")
    assert queue.get(first).priority == 3
    assert call("put", jobs, "-", "--quiet", text="a\n\n b \r\nc") == ""
    assert call("put", jobs, "--parse", '{"n": [1]}', "--id", "x") == "x\n"
    assert payloads(queue) == ["one", "two words", "a", " b ", "c", {"n": [1]}]
    found = json.loads(call("put", jobs, "--json", "--", "-5", "--drain"))
    assert found == {"ids": ids(queue)[-2:], "existing": []} and payloads(queue)[-2:] == ["-5", "--drain"]


def test_put_with_an_id_that_exists_says_so_and_changes_nothing(jobs: Path) -> None:
    call("put", jobs, "first", "--id", "z")
    done = run("put", jobs, "again", "--id", "z")
    assert (done.returncode, done.stdout, done.stderr) == (0, "z\n", "z exists already\n")
    assert json.loads(call("put", jobs, "again", "--id", "z", "--json")) == {"ids": ["z"], "existing": ["z"]}
    assert call("put", jobs, "again", "--id", "z", "-q") == ""
    assert payloads(TaskQueue(jobs)) == ["first"]


def test_put_stores_the_options_of_a_task(jobs: Path) -> None:
    options = ["--attempts", 7, "--time-limit", "5m", "--key", "k", "-j", 2, "--delay", "1.5h", "--id", "x"]
    call("put", jobs, "payload", *options)
    task = TaskQueue(jobs).get("x")
    assert (task.attempts, task.timeout, task.key, task.limit, task.waits) == (7, 300.0, "k", 2, "delayed")
    assert task.due_in is not None and 5000 < task.due_in <= 5400


def test_put_after_makes_a_task_wait_for_others(jobs: Path) -> None:
    call("put", jobs, "a", "--id", "a")
    call("put", jobs, "b", "--id", "b")
    call("put", jobs, "c", "--id", "c", "--after", "a", "--after", "b")
    queue = TaskQueue(jobs)
    assert queue.get("c").waits == "blocked" and "waits for other tasks" in call("ls", jobs)
    for _ in "ab":
        claimed(queue).complete()
    assert queue.get("c").waits is None
    assert "after='nothing': there is no such task" in call("put", jobs, "d", "--after", "nothing", status=2)


def test_put_rate_spaces_the_starts_of_tasks_with_a_key(jobs: Path) -> None:
    for id in "ab":
        call("put", jobs, id, "--id", id, "--key", "k", "--rate", "10/h")
    queue = TaskQueue(jobs)
    claim = queue.claim()
    assert claim is not None and claim.id == "a"
    assert queue.get("b").waits == "delayed" and (queue.get("b").due_in or 0) > 60
    assert "-j and --rate need --key" in call("put", jobs, "c", "--rate", "10/h", status=2)
    assert "rate must be a number per time" in call("put", jobs, "c", "--key", "k", "--rate", "fast", status=2)


def test_bytes_that_are_not_utf8_reach_the_command_unchanged(jobs: Path) -> None:
    subprocess.run([*HOLDFAST, "put", jobs, "-", "-q"], input=b"caf\xe9 \xff\n", check=True)
    words = ["work", str(jobs), "--drain", "-q", "--", "printf", "%s", "{}"]
    assert subprocess.check_output([*HOLDFAST, *words], timeout=PATIENCE) == b"caf\xe9 \xff"


def test_put_explains_wrong_arguments(jobs: Path, in_memory: Path) -> None:
    assert "which tasks?" in call("put", jobs, status=2)
    assert "'{' is not JSON" in call("put", jobs, "--parse", "{", status=2)
    assert "is not JSON" in call("put", jobs, "--parse", "[NaN]", status=2)
    assert "is not JSON" in call("put", jobs, "--parse", "[" * 100_000, status=2)
    assert "--id needs exactly one payload" in call("put", jobs, "a", "b", "--id", "x", status=2)
    assert "-w and -n need --max-pending" in call("put", jobs, "a", "--wait", "1s", status=2)
    assert "priority must be an integer from" in call("put", jobs, "a", "--priority", 10**10, status=2)
    for option in ("--attempts", "--jobs", "--max-pending"):
        assert "number from 1 on" in call("put", jobs, "a", option, 0, status=2)
    assert "'soon' is not a time, such as 1.5, 90s, 5m, 2h or 7d" in call("put", jobs, "a", "--delay", "soon", status=2)
    assert not jobs.exists(), "a wrong command line creates no queue"
    (in_memory / "other").mkdir()
    (in_memory / "other" / "thing").touch()
    assert "this directory contains something else (thing)" in call("put", in_memory / "other", "a", status=3)
    assert "a queue is a directory" in call("put", in_memory / "other" / "thing", "a", status=3)


def test_put_adds_lines_as_they_arrive(jobs: Path, begin: Callable[..., subprocess.Popen[str]]) -> None:
    process = begin("put", jobs, "first", "-", "last", stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    printed = [process.stdout.readline().strip()]
    for text in ("one\ntwo\nth", "ree\r\n\nfour"):
        process.stdin.write(text)
        process.stdin.flush()
        printed.append(process.stdout.readline().strip())
    process.stdin.close()
    process.stdin = None
    status, rest, _ = ended(process)
    queue = TaskQueue(jobs)
    assert status == 0 and [*printed, *rest.split()] == ids(queue)
    assert payloads(queue) == ["first", "one", "two", "three", "four", "last"]


def test_put_stops_at_a_wrong_line_and_says_how_many_were_put(jobs: Path) -> None:
    text = call("put", jobs, "-", "--parse", text='{"a": 1}\n[2]\n{no\n4\n', status=2)
    assert "is not JSON" in text and "2 tasks put before" in text
    assert payloads(TaskQueue(jobs)) == [{"a": 1}, [2]]


def test_put_into_a_full_queue_exits_with_1_or_waits_for_room(
    jobs: Path, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    text = call("put", jobs, "-", "--max-pending", 2, text="a\nb\nc\n", status=1)
    assert (
        text.count("\n") == 3 and "2 or more tasks are pending already. Wait for room with -w TIME. 2 tasks put" in text
    )
    refused = json.loads(run("put", jobs, "c", "--max-pending", 2, "--json").stdout)
    assert refused["ids"] == [] and "pending already" in refused["error"] and refused["path"] == str(jobs)
    assert "pending already. Start more" in call("put", jobs, "c", "--max-pending", 2, "-w", 0.05, status=1)
    waits = begin("put", jobs, "c", "--max-pending", 2, "--wait", "inf", "--id", "c")
    claimed(TaskQueue(jobs)).complete()
    assert ended(waits) == (0, "c\n", "")


# schedule


def test_schedules_can_be_added_listed_and_removed(jobs: Path) -> None:
    assert "next 20" in call("schedule", jobs, "nightly", "report", "--cron", "0 3 * * *", "--attempts", 5)
    call("schedule", jobs, "often", "[1]", "--parse", "--every", "90s", "--key", "k")
    table = call("schedule", jobs).splitlines()
    assert table[0].split() == ["NAME", "WHEN", "NEXT", "PAYLOAD"]
    assert [line.split("  ")[0] for line in table[1:]] == ["nightly", "often"]
    assert "03:00:00 UTC" in table[1] and "report" in table[1] and "every 1m30s" in table[2] and "[1]" in table[2]
    found = json.loads(call("schedule", jobs, "--json"))
    assert [(one["name"], one["cron"], one["every"], one["payload"]) for one in found] == [
        ("nightly", "0 3 * * *", None, "report"),
        ("often", None, 90, [1]),
    ]
    assert found[0]["options"]["attempts"] == 5 and found[1]["options"]["key"] == "k" and found[0]["next"]
    assert call("unschedule", jobs, "often") == "often: removed\n"
    assert "no such schedule" in call("unschedule", jobs, "often", status=1)
    assert len(json.loads(call("schedule", jobs, "--json"))) == 1


def test_a_schedule_follows_its_time_zone(jobs: Path) -> None:
    """In Kathmandu it is 5:45 h later than in UTC, all year."""
    assert "21:15:00 UTC" in call("schedule", jobs, "n", "--cron", "0 3 * * *", "--tz", "Asia/Kathmandu")
    assert "0 3 * * * Asia/Kathmandu" in call("schedule", jobs)
    assert json.loads(call("schedule", jobs, "--json"))[0]["tz"] == "Asia/Kathmandu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "either --every TIME or --cron"),
        (["x", "--every", "1m", "--cron", "* * * * *"], "either --every TIME or --cron"),
        (["x", "--cron", "61 * * * *"], "Bad minute"),
        (["x", "--every", "0.1s"], "at least 1"),
        (["x", "--parse", "{", "--every", "1m"], "is not JSON"),
        (["x", "--cron", "0 3 * * *", "--tz", "Mars/Base"], "there is no time zone 'Mars/Base'"),
        (["x", "--every", "1m", "--tz", "Europe/Berlin"], "--tz needs --cron"),
    ],
)
def test_a_wrong_schedule_is_explained_and_creates_no_queue(jobs: Path, words: list[str], message: str) -> None:
    assert message in call("schedule", jobs, *words, status=2)
    assert not jobs.exists()


# Where the queue is.


def test_commands_that_look_or_change_do_not_create_a_queue(jobs: Path, in_memory: Path) -> None:
    for action, *words in (
        ["ls"],
        ["show", "x"],
        ["stats"],
        ["retry", "x"],
        ["cancel", "x"],
        ["purge"],
        ["pause"],
        ["resume"],
        ["watch"],
        ["schedule"],
        ["unschedule", "x"],
        ["work", "--", "true"],
    ):
        remedy = "--create creates it" if action == "work" else "holdfast tasks put creates it"
        message = f"holdfast tasks: {jobs}: there is no task queue here. Check the path. {remedy}\n"
        assert call(action, jobs, *words, status=3) == message
    assert not jobs.exists()
    (in_memory / "file").touch()
    assert "there is no task queue here" in call("ls", in_memory / "file", status=3)


def test_a_queue_of_an_old_version_or_a_damaged_one_is_refused(jobs: Path) -> None:
    jobs.mkdir()
    (jobs / "queue.json").write_text("{}")
    for words in (["ls"], ["work", "--", "true"], ["put", "x"]):
        assert "Finish its tasks with the version that made it" in call(words[0], jobs, *words[1:], status=3)
    assert [(path.name, path.read_text()) for path in jobs.iterdir()] == [("queue.json", "{}")]
    (jobs / "queue.json").unlink()
    (jobs / "queue.db").write_text("this is not a database " * 100)
    assert "It was left as it is" in call("ls", jobs, status=3)


def test_a_url_is_not_taken_for_a_path_and_its_password_is_not_shown(in_memory: Path) -> None:
    url = "redis://user:secret@host/0"
    for words in (["ls", url], ["put", url, "x"], ["work", url, "--", "true"]):
        done = run(*words, cwd=in_memory)
        assert done.returncode == 2 and "redis://… is not a task queue. Use a directory, or postgresql" in done.stderr
        assert "secret" not in done.stderr
    assert "user:***@host" in call(url, "ls", status=2), "the words are in the wrong order"
    assert "secret" not in call(url, "ls", status=2)
    assert os.listdir(in_memory) == []


def test_a_server_that_is_away_is_an_error_without_the_password() -> None:
    text = call("ls", "postgresql://user:secret@127.0.0.1:1/db", status=3)
    assert "127.0.0.1" in text and "secret" not in text and text.count("\n") == 1


@pytest.mark.parametrize("words", ["put x", "ls", "ls --json", "stats", "show a", "watch --once"])
def test_lost_output_is_an_error(jobs: Path, queue: TaskQueue, words: str) -> None:
    queue.put("x", id="a")
    action, *rest = words.split()
    with open("/dev/full", "w") as full:
        done = run(action, jobs, *rest, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        3,
        "holdfast tasks: standard output: No space left on device. The output is lost.\n",
    )


def test_a_reader_that_has_gone_is_not_an_error(jobs: Path, queue: TaskQueue) -> None:
    queue.put_all("x" * 1000 for _ in range(1000))
    line = f"{' '.join(HOLDFAST)} ls {jobs} --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("[0\n", "")


# Look.


def test_ls_lists_tasks_by_state(jobs: Path, queue: TaskQueue) -> None:
    assert call("ls", jobs) == "no tasks\n"
    queue.put("done", id="d")
    claimed(queue).complete()
    queue.put("bad", id="f", attempts=1)
    claimed(queue).fail("it\nis\nbroken")
    queue.put({"n": 1}, id="r")
    running = claimed(queue)
    running.progress(3, 10, "third page")
    queue.put("first \x1b[2J", id="p1")
    queue.put("second", id="p2", delay=1000)
    queue.put("x", id="c")
    queue.cancel("c")
    lines = call("ls", jobs).splitlines()
    assert lines[0].split() == ["ID", "STATE", "PRIO", "TRIED", "AGE", "WORKER", "PROGRESS", "PAYLOAD", "ERROR"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["r", "running"],
        ["p1", "pending"],
        ["p2", "pending"],
        ["f", "failed"],
        ["c", "cancelled"],
        ["d", "done"],
    ]
    assert f"{os.getpid()}@" in lines[1] and "3/10 third page" in lines[1] and '{"n": 1}' in lines[1]
    assert "\x1b" not in lines[2] and "first \\x1b[2J" in lines[2] and "due in 16m" in lines[3]
    assert "1/1" in lines[4] and "it … broken" in lines[4]
    found = json.loads(call("ls", jobs, "--state", "failed", "--json", "--state", "running"))
    assert [(task["id"], task["state"]) for task in found] == [("r", "running"), ("f", "failed")]
    assert found[0]["progress"] == [3, 10, "third page"] and found[0]["started_at"].endswith("Z")
    assert [line.split()[0] for line in call("ls", jobs, "--limit", 2).splitlines()] == ["ID", "r", "p1"]
    assert "invalid choice: 'ready'" in call("ls", jobs, "--state", "ready", status=2)
    running.give_back()
    assert call("ls", jobs, "--state", "running") == "no running tasks\n"
    assert json.loads(call("ls", jobs, "--state", "running", "--json")) == []


def test_ls_with_a_limit_does_not_read_the_whole_queue(jobs: Path, queue: TaskQueue) -> None:
    """Of the 20,000 tasks, it reads one page."""
    from argparse import Namespace

    from holdfast.cli.tasks import commands
    from holdfast.tasks import reading

    queue.put_all(range(20_000))
    read: list[int] = []
    real = reading.task_of
    options = Namespace(path=str(jobs), states=None, limit=3, json=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "task_of", lambda row, now: read.append(1) or real(row, now))
        assert commands.ls(options) == 0
    assert len(read) == 3


def test_ls_prints_all_tasks_of_a_long_queue_as_one_json_array(jobs: Path, queue: TaskQueue) -> None:
    queue.put_all(range(1201))
    assert [task["payload"] for task in json.loads(call("ls", jobs, "--json"))] == list(range(1201))


def test_the_task_of_a_dead_worker_is_shown_as_such_until_a_worker_recovers_it(jobs: Path, queue: TaskQueue) -> None:
    queue.put("x", id="x")
    died = subprocess.run([sys.executable, "-c", CLAIM_AND_DIE, str(jobs)], check=False, timeout=PATIENCE)
    assert died.returncode == -signal.SIGKILL
    assert "its worker died" in call("ls", jobs) and "running, its worker died\n" in call("show", jobs, "x")
    assert "its worker died" in call("watch", jobs, "--once")
    assert json.loads(call("ls", jobs, "--json"))[0]["orphaned"] is True
    claimed(queue)
    assert "its worker died" not in call("ls", jobs)


def test_show_prints_everything_about_a_task(jobs: Path, queue: TaskQueue) -> None:
    queue.put({"n": 1}, id="x", attempts=2, timeout=5, key="k")
    claimed(queue).fail("at first", delay=0)
    claim = claimed(queue)
    claim.progress(1, None, "begun")
    try:
        raise ValueError("no\x07")
    except ValueError as error:
        claim.fail(error)
    text = call("show", jobs, "x")
    for line in ("Task: x", "State: failed", 'Payload: {"n": 1}', "Tried: 2 of 2", "Timeout: 5 s", "Progress: 1 begun"):
        assert f"{line}\n" in text
    assert "Key: k (1 at a time)\n" in text and "Error: ValueError: no\\x07\n" in text and "\x07" not in text
    assert "Traceback:\n  Traceback (most recent call last):\n" in text and "test_cli_tasks.py" in text
    past = text.partition("Earlier attempts:\n")[2].splitlines()
    assert len(past) == 1 and f"retried by {os.getpid()}@" in past[0] and past[0].endswith(": at first")
    found = json.loads(call("show", jobs, "x", "--json"))
    assert [(one["token"], one["state"]) for one in found["history"]] == [(1, "retried")]
    assert "test_cli_tasks.py" in found["traceback"] and found["history"][0]["started_at"].endswith("Z")
    unknown = f"holdfast tasks: {jobs}: there is no task 'y'. holdfast tasks ls {jobs} lists them\n"
    assert call("show", jobs, "y", status=1) == unknown
    assert "required: ID" in call("show", jobs, status=2)


def test_stats_counts_the_tasks_in_each_state(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a", id="a")
    queue.put("b", delay=100)
    queue.put("c", after="a")
    text = call("stats", jobs)
    assert text == "pending   3 (1 delayed, 1 blocked)\nrunning   0\ndone      0\nfailed    0\ncancelled 0\n"
    assert json.loads(call("stats", jobs, "--json")) == {**queue.stats(), "paused": False}


# Change.


def test_retry_runs_ended_tasks_again(jobs: Path, queue: TaskQueue) -> None:
    first, second, third = queue.put_all("abc", attempts=1)
    for _ in range(2):
        claimed(queue).fail("no")
    queue.claimer().flush()  # the third task may be reserved
    assert call("retry", jobs, first) == f"{first}: pending again\n"
    assert f"task '{third}' has not ended, it is pending" in call("retry", jobs, third, status=1)
    answer = json.loads(call("retry", jobs, "--failed", "nobody", "--json", status=1))
    assert answer["retried"] == [second] and "there is no task 'nobody'" in answer["errors"]["nobody"]
    assert queue.stats()["pending"] == 3
    assert call("retry", jobs, "--failed") == "no task has failed\n"
    assert "which tasks?" in call("retry", jobs, status=2)


def test_cancel_cancels_tasks_that_have_not_ended(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a", id="a")
    claimed(queue).complete()
    queue.put("b", id="b")
    text = call("cancel", jobs, "nobody", "a", "b", status=1)
    assert "b: cancelled\n" in text and "there is no task 'nobody'" in text
    assert "'a' has ended already, it is done" in text
    assert queue.get("b").state == "cancelled"
    assert call("cancel", jobs, "b") == "b: was cancelled before\n"
    assert "which tasks?" in call("cancel", jobs, status=2)


def test_purge_deletes_ended_tasks(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a", id="a")
    claimed(queue).complete()
    queue.put("b", id="b")
    assert call("purge", jobs, "--older-than", "7d") == "Purged: 0 tasks\n" and "a" in queue
    assert call("purge", jobs, "--state", "failed") == "Purged: 0 tasks\n" and "a" in queue
    assert json.loads(call("purge", jobs, "--json")) == {"purged": 1} and "a" not in queue and "b" in queue
    assert "is not a time" in call("purge", jobs, "--older-than", "-1", status=2)


def test_a_paused_queue_gives_out_no_task_until_it_is_resumed(jobs: Path, queue: TaskQueue) -> None:
    queue.put("a")
    assert call("pause", jobs).startswith(f"{jobs}: paused.")
    assert queue.claim() is None
    assert "The queue is paused" in call("stats", jobs) and json.loads(call("stats", jobs, "--json"))["paused"] is True
    assert call("watch", jobs, "--once").strip().endswith(", paused")
    assert call("resume", jobs, "-q") == ""
    assert claimed(queue).payload == "a" and "paused" not in call("stats", jobs)


def test_wrong_words_are_explained(jobs: Path) -> None:
    assert "there is no action 'sing'" in call("sing", jobs, status=2)
    assert "which action? One of put, work, " in call(status=2)
    assert "unrecognized arguments: --state" in call("stats", jobs, "--state", "done", status=2)
    assert "unrecognized arguments: -j" in call("ls", jobs, "-j", status=2), "-j is how many at a time"


@pytest.mark.parametrize("action", ["put", "work", "ls", "watch", "purge", "pause", "schedule"])
def test_each_action_has_its_own_help(action: str) -> None:
    text = call(action, "--help")
    assert f"usage: holdfast tasks {action}" in text and "exit status: 0; 1 if" in text and "QUEUE" in text


def test_half_of_a_surrogate_pair_is_printed_escaped(jobs: Path, queue: TaskQueue) -> None:
    """JSON can express it, and no encoding can. The other tasks are listed, too."""
    for payload, id in (("good1", "a"), ("\ud800", "b"), ("good2", "c")):
        queue.put(payload, id=id)
    done = run("ls", jobs)
    assert done.returncode == 0 and "good1" in done.stdout and "good2" in done.stdout and "\\ud800" in done.stdout
    done = run("show", jobs, "b")
    assert done.returncode == 0 and "\\ud800" in done.stdout
