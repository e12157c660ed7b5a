"""What the terminal shows: `top` and the live line of a wait, in a real pseudo-terminal of 80 by 24."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest
import servers
from support import NO_PROCESS, Peer, end_workers, until

import holdfast
from holdfast import Lock, LockFile, TaskQueue

pyte = pytest.importorskip("pyte")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 60.0


class Terminal:
    """A program in a terminal, and what one would see there."""

    def __init__(
        self, *words: object, columns: int = 80, lines: int = 24, cwd: object = None, TERM: str = "xterm-256color"
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                if cwd is not None:
                    os.chdir(str(cwd))
                environment = {**os.environ, "TERM": TERM}
                os.execve(sys.executable, [sys.executable, "-m", "holdfast", *map(str, words)], environment)
            finally:
                os._exit(125)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.status: int | None = None

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def _read(self, seconds: float) -> bool:
        """Take in what it printed. False: it has ended."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while not condition(self.text()):
            assert time.monotonic() < deadline, f"never {what}. It shows:\n{self.text()}"
            assert self._read(0.1), f"it ended before {what}. It showed:\n{self.text()}"
        return self.text()

    def until_shows(self, *texts: str) -> str:
        return self.until(lambda screen: all(text in screen for text in texts), f"showed {texts}")

    def wait(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while self._read(0.1):
            assert time.monotonic() < deadline, f"it does not end. It shows:\n{self.text()}"
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*words: object, **options: object) -> Terminal:
        opened.append(Terminal(*words, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


# The live line.


def test_the_live_line_of_a_wait(path: str, terminal: Callable[..., Terminal], start_peer: Callable[..., Peer]) -> None:
    holder, first = start_peer(path=path), start_peer(path=path)
    holder.do("hold = holdfast.Lock(path).acquire()")
    first.begin("holdfast.Lock(path).acquire().release()")
    until(lambda: len(Lock(path).status().waiters) == 1)
    waiter = terminal("run", path, "--", "echo", "got", "it", columns=200)
    text = waiter.until_shows("waiting for x.lock: 2nd of 2 in the queue; held for ", f"by pid {holder.pid}")
    seconds = text.partition("held for ")[2]
    waiter.until(lambda screen: "2nd of 2" in screen and screen.partition("held for ")[2] != seconds, "moved on")
    assert text.count("waiting for") == 1 and waiter.text().count("waiting for") == 1, "one line, again and again"
    holder.do("hold.release()")
    first.answer()
    assert waiter.wait() == 0
    assert waiter.text().strip() == "got it", "the line is gone"


def test_the_live_line_fits_the_terminal(path: str, terminal: Callable[..., Terminal]) -> None:
    with Lock(path):
        waiter = terminal("run", path, "--", "true", columns=40)
        waiter.until_shows("waiting for x.lock")
        waiter.until(lambda _: waiter.raw.count(b"waiting for") >= 3, "drawn again and again")
        lines = [line for line in waiter.screen.display if line.strip()]
        assert len(lines) == 1 and lines[0].rstrip().endswith("…")
    assert waiter.wait() == 0


def test_control_c_while_waiting(path: str, terminal: Callable[..., Terminal]) -> None:
    with Lock(path):
        waiter = terminal("run", path, "--", "true")
        waiter.until_shows("waiting for")
        waiter.press("\x03")
        assert waiter.wait() == 130
        assert "Traceback" not in waiter.text() and "waiting" not in waiter.text()


def test_control_c_reaches_the_command_once(path: str, terminal: Callable[..., Terminal]) -> None:
    script = "n=0; trap 'n=$((n+1))' INT; echo here; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done; echo end $n"
    runner = terminal("run", path, "--", "bash", "-c", script)
    runner.until_shows("here")
    runner.press("\x03")
    assert runner.wait() == 0
    assert "end 1" in runner.text(), "the terminal sent it to the whole group; we do not send it again"


def test_control_c_on_a_server_ends_a_wait_and_reaches_the_command_once(
    postgres: str, terminal: Callable[..., Terminal]
) -> None:
    url = f"{postgres}?name=deploy"
    with holdfast.lock(url):
        waiter = terminal("run", url, "--", "true")
        waiter.until_shows("1st of 1 in the queue")
        waiter.press("\x03")
        assert waiter.wait() == 130
        assert "Traceback" not in waiter.text() and "waiting" not in waiter.text()
    script = "n=0; trap 'n=$((n+1))' INT; echo here; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done; echo end $n"
    runner = terminal("run", url, "--", "bash", "-c", script)
    runner.until_shows("here")
    runner.press("\x03")
    assert runner.wait() == 0
    assert "end 1" in runner.text()


def test_the_line_of_acquire(path: str, terminal: Callable[..., Terminal]) -> None:
    hold = LockFile(path, tag="deploy").acquire()
    waiter = terminal("lockfile", "acquire", path, "--timeout", "30")
    waiter.until_shows("waiting for x.lock", "held for", "by pid")
    hold.release()
    assert waiter.wait() == 0
    assert waiter.text().strip() == f"Lock acquired: {path}"


def test_break_asks(path: str, terminal: Callable[..., Terminal]) -> None:
    hold = LockFile(path).acquire()
    for answer, code in (("n", 1), ("", 1), ("y", 0)):
        asked = terminal("break", path, columns=150)
        asked.until_shows("Take it away? [y/N]")
        asked.press(answer + "\n")
        assert asked.wait() == code
        assert hold.lost is (code == 0)
    with pytest.raises(Exception, match="lost"):
        hold.release()


# top


@pytest.fixture
def locks(tmp_path: Path, start_peer: Callable[..., Peer]) -> Iterator[Path]:
    """Some locks: one held with two in its queue, a lock file, a stale one, and a free one."""
    pytest.importorskip("textual")
    room = tmp_path / "room"
    room.mkdir()
    (room / "free.lock").write_bytes(b"permits=3\n")
    (room / "old.lock").write_bytes(b"pid=%d\ntimestamp=1\ntag=crashed\n" % NO_PROCESS)
    holder = start_peer(at=f"{room}/")
    holder.do("a = holdfast.Lock(at + 'build.lock').acquire()")
    holder.do("b = holdfast.LockFile(at + 'deploy.lock', tag='v1.2.3').acquire()")
    waiters = [start_peer(at=f"{room}/") for _ in range(2)]
    for number, waiter in enumerate(waiters, 1):
        waiter.begin("holdfast.Lock(at + 'build.lock').acquire().release()")
        until(lambda number=number: len(Lock(room / "build.lock").status().waiters) == number)
    yield room
    holder.do("a.release()")
    for waiter in waiters:
        waiter.answer()
    holder.do("try: b.release()\nexcept holdfast.LockLost: pass")


def rows(text: str) -> list[str]:
    """The names of the locks in the table, from top to bottom."""
    return [line.split()[0] for line in text.splitlines() if line.strip().split(" ")[0].endswith(".lock")]


def test_top(locks: Path, terminal: Callable[..., Terminal]) -> None:
    top = terminal("top", "--every", "0.2", cwd=locks)
    top.until_shows("4 locks, 3 held, 2 waiting", "free.lock", "sort", "filter", "break", "quit", "v1.2.3")
    top.until(lambda screen: rows(screen) == ["build.lock", "deploy.lock", "old.lock", "free.lock"], "held ones first")
    top.until_shows("1. pid", "2. pid", "waits for")  # the queue of the lock under the cursor
    top.until_shows("by state", "v1.2.3", "HOLDER")
    for order in ("age", "waiting", "longest wait", "name"):
        top.press("s")
        top.until_shows(f"by {order}")
    top.until(lambda screen: rows(screen) == ["build.lock", "deploy.lock", "free.lock", "old.lock"], "sorted by name")
    top.press("h")
    top.until(lambda screen: rows(screen) == ["build.lock", "deploy.lock", "old.lock"], "hid the free one")
    top.press("h")
    top.press("/")
    top.until_shows("show only what contains")
    top.press("depl")
    top.until(lambda screen: rows(screen) == ["deploy.lock"], "filtered")
    top.press("\r")
    top.until(
        lambda screen: "▔" not in screen and "containing 'depl'" in screen and "v1.2.3" in screen, "closed the field"
    )
    top.press("q")
    assert top.wait() == 0


def test_top_breaks_a_lock_if_one_agrees(locks: Path, terminal: Callable[..., Terminal]) -> None:
    top = terminal("top", "--every", "0.2", cwd=locks)
    top.until_shows("build.lock")
    top.press("b")
    top.until_shows("a kernel lock cannot be taken away")
    top.press("/")
    top.until_shows("show only what contains")
    top.press("deploy\r")
    top.until(lambda screen: rows(screen) == ["deploy.lock"] and "containing 'deploy'" in screen, "filtered")
    for answer, there in (("n", True), ("y", False)):
        top.press("b")
        top.until_shows("Take it away?", "v1.2.3")
        top.press(answer)
        top.until(lambda screen: "Take it away?" not in screen, "closed the question")
        if there:
            assert (locks / "deploy.lock").exists()
        else:
            until(lambda: not (locks / "deploy.lock").exists())
    top.press("q")
    assert top.wait() == 0


def test_top_follows_what_happens(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    pytest.importorskip("textual")
    top = terminal("top", "--every", "0.1", tmp_path)
    top.until_shows("0 locks, 0 held, 0 waiting", "no locks here")
    with Lock(tmp_path / "x.lock"):
        top.until_shows("1 lock, 1 held")
    top.until_shows("0 locks")
    top.press("q")
    assert top.wait() == 0


def test_top_shows_the_locks_of_a_server(postgres: str, terminal: Callable[..., Terminal]) -> None:
    pytest.importorskip("textual")
    with holdfast.lock(f"{postgres}?name=deploy"):
        top = terminal("top", "--every", "0.1", postgres)
        text = top.until_shows("1 lock, 1 held", "name=deploy held", "postgresql://tester:***@")
        top.press("b")
        text += top.until_shows("end the holder")
    text += top.until_shows("1 lock, 0 held")
    assert servers.PASSWORD not in text
    top.press("q")
    assert top.wait() == 0


def test_top_needs_a_terminal(tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "top", tmp_path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=40,
    )
    assert done.returncode == 3 and "this needs a terminal" in done.stderr and done.stderr.count("\n") == 1


def test_top_without_textual_says_what_to_install(tmp_path: Path) -> None:
    import subprocess

    script = (
        "import sys; sys.modules['textual'] = None; from holdfast.cli import main; sys.exit(main(['top', sys.argv[1]]))"
    )
    script = script.replace("import sys;", "import sys; from holdfast.cli import output; output.on_terminal = bool;")
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False, timeout=40
    )
    assert done.returncode == 3 and "pip install 'holdfast[top]'" in done.stderr and done.stderr.count("\n") == 1


# tasks


@pytest.fixture
def jobs(in_memory: Path, terminal: object) -> Iterator[TaskQueue]:
    queue = TaskQueue(in_memory / "jobs")
    yield queue
    end_workers(queue)


HANDLER = """
import os, sys
def handle(task):
    print("hello", task.payload)
    task.progress(3, 10, "third page")
    with open(f"gate-{task.payload}") as gate:
        gate.read()
    if task.payload == "b":
        raise ValueError("it is broken")
"""


def test_the_bar_of_a_worker_counts_failed_tasks_as_failed(
    jobs: TaskQueue, in_memory: Path, terminal: Callable[..., Terminal]
) -> None:
    (in_memory / "mymodule.py").write_text(HANDLER)
    for name in "abc":
        os.mkfifo(in_memory / f"gate-{name}")
        jobs.put(name, id=f"task-{name}", attempts=1)
    words = ("tasks", "work", "jobs", "--drain", "-j", "2", "--python", "mymodule:handle")
    worker = terminal(*words, cwd=in_memory)
    text = worker.until_shows("[--------------------] 0 of 3 done", "  task-a  ", "  task-b  ", "3/10 third page")
    lines = text.splitlines()
    assert sorted(lines[:2]) == sorted([f"hello {name}".ljust(80) for name in "ab"]), "above the bar"
    assert lines[2].startswith("[----") and {line.split()[0] for line in lines[3:5]} == {"task-a", "task-b"}
    before = next(line for line in lines if "task-a" in line)
    worker.until(lambda screen: "task-a" in screen and before not in screen, "counted the seconds")
    (in_memory / "gate-b").write_text("")
    text = worker.until_shows("[xxxxxx--------------] 0 of 3 done, 1 failed", "  task-c  ")
    assert "failed task-b (attempt 1 of 1): ValueError: it is broken" in text
    assert text.count("[xxx") == 1 and "  task-b  " not in text and text.count("task-a") == 1
    for name in "ac":
        (in_memory / f"gate-{name}").write_text("")
    assert worker.wait() == 1
    lines = [line.rstrip() for line in worker.text().splitlines() if line.strip()]
    assert lines[-1].startswith("2 done, 1 failed in ") and len(lines) == 5, "the bar is gone, and nothing else is"
    assert sorted(line for line in lines if line.startswith("hello")) == ["hello a", "hello b", "hello c"]


def test_the_output_of_commands_is_above_the_bar(jobs: TaskQueue, terminal: Callable[..., Terminal]) -> None:
    """Also without a newline at its end; and many lines, over the end of the screen. The bar is there once."""
    gate = os.path.join(jobs.path, "..", "gate")
    os.mkfifo(gate)
    for number in range(1, 31):
        jobs.put(number, id=f"task-{number}")
    script = f"echo line {{}}; printf %s 'end of {{}}'; if [ {{}} = 30 ]; then read x < {gate}; fi; true"
    worker = terminal("tasks", "work", jobs.path, "--", "sh", "-c", script, lines=12)
    text = worker.until_shows("29 of 30 done", "end of 29", "  task-30  ")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert lines[-5:-2] == ["end of 28", "line 29", "end of 29"] and lines[-2].startswith("[####")
    assert text.count("of 30 done") == 1
    with open(gate, "w"):
        pass
    text = worker.until_shows("end of 30", "30 of 30 done", "waiting for tasks")
    worker.press("\x03")
    assert worker.wait() == 0
    assert worker.text().rstrip().splitlines()[-1].startswith("30 done in ")


def test_control_c_twice_gives_back_what_runs(
    jobs: TaskQueue, in_memory: Path, terminal: Callable[..., Terminal]
) -> None:
    os.mkfifo(in_memory / "gate")
    jobs.put("a long story " * 20, id="x")
    worker = terminal("tasks", "work", "jobs", "--", "cat", "gate", cwd=in_memory, columns=40)
    text = worker.until_shows("  x  ", "a long story")
    assert [len(line.rstrip()) for line in text.splitlines() if "  x  " in line] == [36], "it is cut, not wrapped"
    worker.press("\x03")
    worker.until_shows("finishing 1 running task")
    worker.press("\x03")
    assert worker.wait() == 0
    assert "given back x" in worker.text() and jobs.get("x").state == "pending"
    assert "of 1 done" not in worker.text(), "what was drawn is gone, though the terminal wrote ^C behind it"


def test_no_bar_on_a_dumb_terminal(jobs: TaskQueue, terminal: Callable[..., Terminal]) -> None:
    jobs.put("a", id="a")
    worker = terminal("tasks", "work", jobs.path, "--drain", "--", "true", TERM="dumb")
    assert worker.wait() == 0
    assert b"\x1b" not in worker.raw and b"done a in " in worker.raw


def test_watch(jobs: TaskQueue, terminal: Callable[..., Terminal]) -> None:
    pytest.importorskip("textual")
    watch = terminal("tasks", "watch", jobs.path, "--every", "0.1", columns=100)
    watch.until_shows("0 running, 0 pending, 0 done, 0 failed, 0 cancelled", "no task has failed", "q quit")
    jobs.put("x [b]", id="first", attempts=1)
    jobs.put("y", id="second", delay=100)
    watch.until_shows("2 pending (1 delayed)")
    claim = jobs.claim()
    assert claim is not None
    watch.until_shows("1 running", "first", "x [b]", "1/1", f"{os.getpid()}@", "RUNNING", "PROGRESS")
    claim.progress(1, 2, "half of it")
    watch.until_shows("1/2 half of it")
    claim.fail("it is broken")
    watch.until_shows("0 running", "1 failed", "failed first", "ago: it is broken")
    watch.until(lambda screen: "half of it" not in screen, "removed the task that ran")
    watch.press("q")
    assert watch.wait() == 0


def test_watch_without_textual_says_what_to_install(jobs: TaskQueue) -> None:
    import subprocess

    script = (
        "import sys; sys.modules['textual'] = None; from holdfast.cli import main, output; output.on_terminal = bool;"
        "sys.exit(main(['tasks', 'watch', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, jobs.path], capture_output=True, text=True, check=False, timeout=40
    )
    assert done.returncode == 3 and "pip install 'holdfast[top]'" in done.stderr and done.stderr.count("\n") == 1
