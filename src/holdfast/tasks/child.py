"""The processes of a worker: what they do, and what their supervisor knows of them."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

from .. import owner, process
from ..errors import HoldfastError
from ..files import OwnedFd
from .claim import Claim
from .handler import IF_NOBODY_ELSE_DOES
from .idle import Idle
from .queue import TaskQueue

_NEVER = float("inf")
_GRACE = 1.0  # seconds for what ends itself
_A_WHILE = 1.0
_BETWEEN_LOOKS = 0.001  # seconds
# What passes: whoever meets it tries again later.
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
_DONE, _FAILED, _RETRIED, _GIVEN_BACK = range(4)
_OUTCOMES: dict[str | None, int] = {"done": _DONE, "failed": _FAILED, "retried": _RETRIED, "given back": _GIVEN_BACK}


class Counts:
    """What the threads of a child have done, in memory that it shares with its supervisor, and so survives it."""

    def __init__(self, threads: int) -> None:
        self._memory = mmap.mmap(-1, 32 * threads + 16)
        cells = memoryview(self._memory).cast("Q")
        self._cells, self._begun, self._finished = cells[:-2], cells[-2:-1], cells[-1:]

    def of(self, thread: int) -> memoryview:
        return self._cells[4 * thread : 4 * thread + 4]

    def begin(self) -> None:
        self._begun[0] = 1

    @property
    def has_begun(self) -> bool:
        """Has it had a task?"""
        return bool(self._begun[0])

    def finish(self) -> None:
        """It has come to its end. A handler can end its process as if it had: with the same status."""
        self._finished[0] = 1

    @property
    def is_finished(self) -> bool:
        return bool(self._finished[0])

    def total(self) -> list[int]:
        return [sum(self._cells[kind::4]) for kind in range(4)]


class Child:
    """What a supervisor knows of a child."""

    def __init__(self, pid: int, pipe: OwnedFd, counts: Counts) -> None:
        self.pid = pid
        self.counts = counts
        self.by = ""  # how it signs what it begins
        self.tasks: dict[str, tuple[float, float]] = {}  # by place: when each is to be ended, after how many seconds
        self.was_killed = False
        self.started = monotonic()
        self._rest = b""
        self._code: int | None = None
        os.set_blocking(pipe.fd, False)
        self._pipe = pipe
        self._pidfd = OwnedFd(os.pidfd_open(pid)) if hasattr(os, "pidfd_open") else None

    @property
    def fds(self) -> set[int]:
        """What can be read when there is news of it."""
        return {file.fd for file in (self._pipe, self._pidfd) if file is not None and file.is_open}

    def close(self) -> None:
        self._pipe.close()
        if self._pidfd is not None:
            self._pidfd.close()

    @property
    def deadline(self) -> float:
        return min((deadline for deadline, _ in self.tasks.values()), default=_NEVER)

    def hear(self) -> None:
        """Read what it says. That it has closed the pipe means nothing: its handler may have."""
        while self._pipe.is_open:
            try:
                text = os.read(self._pipe.fd, 1 << 16)
            except BlockingIOError:
                return
            if not text:
                self._pipe.close()
                return
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                self._understand(line)

    def _understand(self, line: bytes) -> None:
        kind, _, rest = line.decode().partition(" ")
        if kind == "me":
            self.by = rest
        elif kind == "begin":
            seconds, late, place = rest.split(" ")
            self.tasks[_unquote(place)] = (monotonic() + float(late), float(seconds))
        elif kind == "end":
            self.tasks.pop(_unquote(rest), None)

    def exit_code(self) -> int | None:
        """None: it lives. When it does not, whatever it has started is ended, too."""
        if self._code is None and self._state(os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._signal(signal.SIGKILL)
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # somebody else has waited for it
                self._code = 1
        return self._code

    def _state(self, options: int) -> object:
        try:
            return os.waitid(os.P_PID, self.pid, options)
        except ChildProcessError:
            return "gone"

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing that it does goes on meanwhile."""
        self._signal(signal.SIGSTOP)
        self._state(os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            if not self.was_killed:
                self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """And wait until it has let go of everything."""
        if self._code is None:
            self.was_killed = True
            self._signal(signal.SIGKILL)
            self._state(os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        if self._code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


def _quote(place: str) -> str:
    return os.fsencode(place).hex()


def _unquote(text: str) -> str:
    return os.fsdecode(bytes.fromhex(text))


class Loop:
    """One thread of a child: takes a task, does it, and takes the next one."""

    def __init__(
        self,
        queue: TaskQueue,
        run: Callable[[Claim], object],
        hooks: tuple[Callable[..., object] | None, ...],
        stop: int,
        tell: Callable[[str], None],
        counts: Counts,
        thread: int,
        *,
        drain: bool,
        tells: bool,
        ends_with_task: bool,
    ) -> None:
        self._queue = queue
        self._run = run
        self._on_start, self._on_done, self._on_failed = hooks
        self._stop = stop
        self._tell = tell
        self._drain = drain
        self._tells = tells
        self._ends_with_task = ends_with_task  # there is nothing else that this process does
        self._all_counts = counts
        self._counts = counts.of(thread)

    def work(self) -> None:
        stop = select.poll()
        stop.register(self._stop, select.POLLIN)
        taker = self._queue.taker
        taker.on_over = self._count
        looked, registry = 0.0, process.registry
        try:
            with Idle(self._queue) as idle:
                while True:
                    now = monotonic()
                    # After what has taken less than that, it is not worth asking; unless this is another process, by a
                    # fork in the handler: that one is to stop.
                    if now - looked > _BETWEEN_LOOKS or registry is not process.registry:
                        looked = now
                        if stop.poll(0):
                            return
                    claim = taker.try_claim() or self._wait(idle)
                    if claim is None:
                        return
                    try:
                        self._do(claim)
                    finally:
                        if claim.is_open:  # it could not be said how it ended: whoever takes it next goes by its file
                            claim.abandon()
                        claim = None
        finally:
            taker.leave()

    def _count(self, failed: bool) -> None:
        self._counts[_FAILED if failed else _RETRIED] += 1

    def _wait(self, idle: Idle) -> Claim | None:
        return idle.wait(None, self._stop, enough=self._queue.is_empty if self._drain else None)

    def _do(self, claim: Claim) -> None:
        task = claim.task
        self._all_counts.begin()
        tells = self._tells or task.timeout is not None
        if tells:
            longest = (task.timeout or _NEVER) + (_GRACE if getattr(self._run, "ends_itself", False) else 0)
            self._tell(f"begin {task.timeout or _NEVER} {longest} {_quote(claim.place)}")
            self._end_by_alarm(longest)
        try:
            if self._on_start is not None:
                self._call(self._on_start, claim)
            result = self._run(claim)
        except BaseException as error:  # also SystemExit: it is the task that wants to end, not the worker
            if not self._has_ended(claim):
                self._failed(claim, error)
        else:
            if claim.outcome is None or not self._has_ended(claim):
                self._completed(claim, result)
        finally:
            if tells:
                self._end_by_alarm(_NEVER)
                self._tell(f"end {_quote(claim.place)}")

    def _has_ended(self, claim: Claim) -> bool:
        """Has the handler said itself how it ended?"""
        kind = _OUTCOMES.get(claim.outcome)
        if kind is not None:
            self._counts[kind] += 1
        if claim.outcome == "done":
            self._call(self._on_done, claim)
        return claim.outcome is not None

    def _end_by_alarm(self, longest: float) -> None:
        """Ending it is up to the supervisor. If that is dead the kernel does it, whatever the handler does."""
        if self._ends_with_task:
            signal.setitimer(signal.ITIMER_REAL, 0 if longest == _NEVER else longest + IF_NOBODY_ELSE_DOES)

    def _completed(self, claim: Claim, result: object) -> None:
        try:
            claim.complete(result)
        except (TypeError, ValueError, RecursionError) as error:  # what JSON cannot say
            self._failed(claim, error)
            return
        except HoldfastError as error:
            _log(error)  # it was taken from us: another one does it
            return
        self._counts[_DONE] += 1
        if self._on_done is not None:
            self._call(self._on_done, claim)

    def _failed(self, claim: Claim, error: BaseException) -> None:
        try:
            if claim.cancelled:
                claim.cancel()
            elif claim.fail(error):
                self._counts[_RETRIED] += 1
            else:
                self._counts[_FAILED] += 1
        except HoldfastError as lost:
            _log(lost)
            return
        self._call(self._on_failed, claim, error)

    def _call(self, hook: Callable[..., object] | None, *said: object) -> None:
        """What goes wrong in it is nobody's fault but its own."""
        try:
            if hook is not None:
                hook(*said)
        except Exception as error:
            import logging

            name = getattr(hook, "__name__", repr(hook))
            logging.getLogger("holdfast").warning("%s: hook %s: %r", said[0], name, error, exc_info=error)


def work(
    queue: TaskQueue,
    run: Callable[[Claim], object],
    hooks: tuple[Callable[..., object] | None, ...],
    stop: OwnedFd,
    tell: OwnedFd,
    counts: Counts,
    *,
    threads: int,
    drain: bool,
    tells: bool,
) -> int:
    """All that a child does. Gives its exit status."""
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, _do_nothing)  # its supervisor says when it is time. (What it starts does not inherit this.)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    me = os.getpid()

    def say(text: str) -> None:
        if os.getpid() == me:  # else it was forked, and came back from the handler
            with suppress(OSError):  # the handler has closed it
                os.write(tell.fd, text.encode() + b"\n")

    say(f"me {owner.me().random.decode()}")
    failures: list[type[BaseException]] = []

    def run_one(loop: Loop) -> None:
        while True:
            try:
                return loop.work()
            except BaseException as error:
                if getattr(error, "errno", 0) not in PASSING:
                    failures.append(type(error))  # not itself, which would keep its claim
                    raise
                _log(error)  # the disk is full, for one. The other threads go on, and so does this one
            sleep(_A_WHILE)

    loops = [
        Loop(
            queue.reopened(),
            run,
            hooks,
            stop.fd,
            say,
            counts,
            thread,
            drain=drain,
            tells=tells,
            ends_with_task=threads == 1,
        )
        for thread in range(threads)
    ]
    if threads == 1:
        loops[0].work()
    else:
        running = [threading.Thread(target=run_one, args=(loop,), daemon=True) for loop in loops]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    if not failures:
        counts.finish()
    return 1 if failures else 0


def _do_nothing(number: int, frame: object) -> None:
    pass


def _log(error: BaseException) -> None:
    import logging

    logging.getLogger("holdfast").warning("%s", error)
