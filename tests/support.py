"""Real processes for the tests: peers that do what they are told, and ways to see what a process is doing.

A `Peer` is a fresh interpreter without threads and without pytest. It runs code, one piece at a time:

    peer = Peer(path=path)
    peer.do("hold = Lock(path).acquire()")      waits for the answer; what the code raised is raised as `Raised`
    peer.begin("Lock(path).acquire()")          does not wait; `peer.answer()` does
    peer.kill()                                 SIGKILL

The code sees `holdfast`, `Lock`, `Semaphore`, the names given to `Peer`, and everything in this module.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
NO_PROCESS = 4_194_304  # one more than the highest pid there can be
PATIENCE = 50.0  # seconds until a test that hangs says so; nothing waits that long when it passes


class Raised(Exception):
    """The code that a peer ran raised this. `name` is the name of the exception's class."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Traceback(Exception):
    """The cause of `Raised`: where in the peer."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Peer:
    """A process that runs what it is told. Leaving the `with` block ends it and insists that it had no complaints."""

    def __init__(self, **names: object) -> None:
        import subprocess  # the peers themselves, which should start quickly, do not need these two
        from tempfile import TemporaryFile

        self._errors = TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self._expected = 0
        self.at = 0.0
        # As a module, which is compiled once, and not for each peer.
        start = f"import sys; sys.path[0] = {HERE!r}; import support; support.main()"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", start, json.dumps(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self.pid = self.process.pid

    def begin(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self._expected += 1

    def answer(self, seconds: float = PATIENCE) -> Any:
        """The value of the oldest piece of code not yet answered. `at` is the monotonic time when it was ready."""
        reply = json.loads(self._line(seconds))
        self._expected -= 1
        self.at = reply["at"]
        if "error" in reply:
            raise Raised(reply["error"], reply["text"]) from Traceback(reply["where"])
        return reply["value"]

    def do(self, code: str, seconds: float = PATIENCE) -> Any:
        assert not self._expected, "the answer to an earlier piece of code comes first"
        self.begin(code)
        return self.answer(seconds)

    def has_answered(self) -> bool:
        assert self.process.stdout is not None
        return b"\n" in self._buffer or bool(select.select([self.process.stdout], [], [], 0)[0])

    def _line(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise AssertionError(f"peer {self.pid} gave no answer within {seconds:g} s")
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                raise AssertionError(f"peer {self.pid} ended without an answer: {self.complaints()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def complaints(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(self.pid) == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def until_waiting(self, path: str) -> None:
        """Until it sleeps with the lock or a ticket of its queue open. It must not hold the lock itself."""
        until(lambda: state_of(self.pid) == "S" and self.has_open(path))
        assert not self.has_answered()

    def has_open(self, path: str) -> bool:
        return any(
            target == path or target.startswith((f"{path}.queue/", f"{path} (deleted)"))
            for target in descriptors(self.pid).values()
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            if kind is not None or self._expected:
                self.process.kill()
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                self.process.wait(PATIENCE)
            finally:
                self.kill()
            complaints = self.complaints()
            if kind is None:
                assert complaints == "", complaints
                assert self.process.returncode in (0, -signal.SIGKILL)
            else:
                sys.stderr.write(complaints)
        finally:
            self.process.stdout.close()
            self._errors.close()


def begin_together(peers: list[Peer], code: str) -> None:
    """Have all of them begin when all of them are there: starting up takes longer than many things under test."""
    for peer in peers:
        peer.do("None")
    for peer in peers:
        peer.begin(code)


def end_workers(queue: Any) -> None:
    """Kill the workers of a queue, with all that they have started, after a test that failed."""
    for task in queue.tasks(("running",)):
        pid = int(task.worker.partition("@")[0])
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def until(condition: Any, seconds: float = PATIENCE) -> None:
    """Look until `condition()` holds: for what can be seen but sends no event."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.001)


class Waited(NamedTuple):
    """A wait of this process, as the fixture `waits` records it. Both are monotonic seconds."""

    at: float
    until: float | None


class LoopClock:
    """The clock of the running asyncio loop. A test puts it forward, so that a timeout ends when the test says so."""

    def __init__(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        real, self._ahead = loop.time, 0.0
        loop.time = lambda: real() + self._ahead  # type: ignore[method-assign]

    async def forward(self, seconds: float) -> None:
        """And let the loop run until the timeout has arrived where it is waited for."""
        import asyncio

        self._ahead += seconds
        for _ in range(10):
            await asyncio.sleep(0)


async def auntil(condition: Any, seconds: float = PATIENCE) -> None:
    """The same for a task."""
    import anyio

    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.001)


def unpacked(name: str, *packages: str) -> Path:
    """Where the files of some packages are; they are fetched if they are not there."""
    import subprocess

    checkout = Path(HERE).parent
    command = [checkout / "scripts/unpack.sh", name, *packages]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 3:
        import pytest

        pytest.skip(f"{name}: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return checkout / ".lab" / name / "root"


def state_of(pid: int) -> str:
    """R, S, D, T, Z, … as the kernel says; an empty string for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wake_ups(pid: int) -> int:
    """How often the threads of a process were woken, or lost the processor to others, so far."""
    found = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status") as file:
            found += sum(int(line.split()[1]) for line in file if "voluntary_ctxt_switches:" in line)
    return found


def processor_ticks(pid: int) -> int:
    """How long it has run so far, in units of usually 10 ms."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def until_asleep(pids: list[int]) -> None:
    """Until there was half a second in which none of them woke up. One that polls or spins never sleeps that long.

    Load does not matter: it makes a sleep longer, and never shorter.
    """

    def asleep() -> bool:
        before = [(wake_ups(pid), processor_ticks(pid)) for pid in pids]
        time.sleep(0.5)
        return before == [(wake_ups(pid), processor_ticks(pid)) for pid in pids]

    until(asleep)


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """The open descriptors of a process, and what each one is."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing, or closed meanwhile
    return found


def descriptor_of(path: str) -> int:
    """The descriptor by which this process has `path` open."""
    (found,) = (fd for fd, target in descriptors().items() if target == path)
    return found


def tickets(path: str) -> list[str]:
    """Who queues for the lock at `path`, first come first."""
    try:
        return sorted(os.listdir(f"{path}.queue"))
    except FileNotFoundError:
        return []


def until_queued(path: str, waiters: int) -> None:
    until(lambda: len(tickets(path)) == waiters)


def assert_nothing_left(path: str) -> None:
    """Neither the lock file nor its queue, nor anything else beside them."""
    name = os.path.basename(path)
    assert [found for found in os.listdir(os.path.dirname(path)) if found.startswith(name)] == []


def claimed(queue: Any) -> Any:
    """The next task of a `TaskQueue`, which must have one."""
    claim = queue.claim()
    assert claim is not None
    return claim


def claim_all(queue: Any) -> list[Any]:
    """Complete all that can be had now. Gives their payloads."""
    found = []
    while (claim := queue.claim()) is not None:
        found.append(claim.payload)
        claim.complete()
    return found


# What follows runs in peers.


def die_with_parent() -> None:
    """Where the system can do it: a test that is cut short must not leave a crowd behind."""
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Child:
    """A forked process that runs `work(say)`, where `say` writes a line. What it raises is printed."""

    def __init__(self, work: Any) -> None:
        self._readable, writable = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._readable)
                die_with_parent()
                work(lambda text: os.write(writable, text.encode() + b"\n") and None)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writable)

    def end(self) -> tuple[int, list[str]]:
        """Wait for it: its exit code, negative for a signal, and every line that it wrote in full."""
        with open(self._readable, "rb") as pipe:
            lines = pipe.read().decode().split("\n")[:-1]
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), lines


def in_child(work: Any) -> Any:
    """The value of `work()` in a forked child, or the name of what it raised."""

    def tell(say: Any) -> None:
        try:
            value = work()
        except BaseException as error:
            value = type(error).__name__
        say(json.dumps(value, default=repr))

    code, lines = Child(tell).end()
    assert code == 0
    return json.loads(lines[0])


def survives(work: Any) -> bool:
    """Run `work()` in a forked child. False: it was killed. Anything else but a good end is a failure."""
    code, _ = Child(lambda _: work()).end()
    assert code in (0, -signal.SIGKILL)
    return code == 0


def all_in_children(works: list[Any]) -> None:
    """Run each in a forked child of its own, all at once, and insist that all end well."""
    children = [Child(lambda _, work=work: work()) for work in works]
    assert [child.end()[0] for child in children] == [0] * len(works)


def die_before_call(number: int, calls: dict[Any, tuple[str, ...]]) -> None:
    """From now on count the calls of these functions, by module, and die before that one."""
    left = number

    def counted(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **options)

        return call

    for module, names in calls.items():
        for name in names:
            setattr(module, name, counted(getattr(module, name)))


def idle_child(fork: Any = os.fork) -> int:
    """The pid of a child that does nothing until it is killed."""
    readable, writable = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.dup2(writable, 1)  # the peer's pipe must end with the peer
            os.write(writable, b"\0")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.read(readable, 1)
    os.close(readable)
    os.close(writable)
    return int(pid)


def idle_program(**options: Any) -> int:
    """The pid of another program that does nothing until it is killed."""
    import subprocess

    process = subprocess.Popen(["sleep", "600"], **options)
    process.returncode = 0  # it is left running on purpose
    return process.pid


def raw_fork() -> int:
    """A fork that Python does not know of: the child keeps a copy of every descriptor."""
    import ctypes

    return int(ctypes.PyDLL(None).fork())


def held_in_child(path: str) -> bool:
    """For multiprocessing: is the lock refused to this process?"""
    from holdfast import Lock

    hold = Lock(path).try_acquire()
    if hold is not None:
        hold.release()
    return hold is None


def send_held(path: str, pipe: Any) -> None:
    pipe.send(held_in_child(path))


def count_up(path: str, record: str, rounds: int, kind: Any = None, **options: Any) -> None:
    """Under the lock, read a number, let others run, write the next number."""
    from holdfast import Lock

    for _ in range(rounds):
        with (kind or Lock)(path, **options), open(record, "r+") as file:
            number = int(file.read())
            os.sched_yield()
            file.seek(0)
            file.write(str(number + 1))


def look_only_when_told() -> None:
    """Remove the safety look, so that only an event can wake a waiter. The quick looks after an event remain."""
    from holdfast.wait import RECHECK_S, Readable

    left = Readable.left

    def left_until_event(step: Readable) -> float | None:
        seconds = left(step)
        return None if seconds is None or seconds > RECHECK_S / 2 else seconds

    Readable.left = left_until_event  # type: ignore[method-assign]


def acquire_by(way: str, lock: Any, timeout: float | None = None) -> Any:
    """Acquire in one of the four ways in which one can wait."""
    if way == "blocking":
        return lock.acquire(timeout=timeout)
    if way == "timeout":
        return lock.acquire(timeout=PATIENCE if timeout is None else timeout)
    import anyio

    return anyio.run(lock.aacquire, timeout, backend=way)


WAYS = ("blocking", "timeout", "asyncio", "trio")


def serve(names: dict[str, Any]) -> None:
    for line in sys.stdin:
        code = json.loads(line)
        reply: dict[str, Any]
        try:
            reply = {"value": run(code, names)}
        except BaseException as error:
            import traceback

            reply = {"error": type(error).__name__, "text": str(error), "where": traceback.format_exc()}
        reply["at"] = time.monotonic()
        # Unbuffered, and in one piece: a forked child must not have half an answer to repeat.
        os.write(1, json.dumps(reply, default=repr).encode() + b"\n")


def run(code: str, names: dict[str, Any]) -> Any:
    """The value of an expression; None for statements. Its asserts count also where the package runs without them."""
    try:
        compiled = compile(code, "<peer>", "eval")
    except SyntaxError:
        exec(compile(code, "<peer>", "exec", optimize=0), names)
        return None
    return eval(compiled, names)


def main() -> None:
    """What a peer runs."""
    import holdfast

    sys.path += [room.path for room in os.scandir(HERE) if room.is_dir()]

    names = {"holdfast": holdfast, "Lock": holdfast.Lock, "Semaphore": holdfast.Semaphore}
    serve({**globals(), **names, **json.loads(sys.argv[1])})
