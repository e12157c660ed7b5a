"""`Worker`: does the tasks of a queue, several at a time, and outlives what it does them with.

    supervisor    the process that calls `run`. It takes no task. It starts its children, and new ones when they die,
                  ends tasks that take too long or are cancelled, renews leases, and passes on the signals
    children      take tasks and do them (`child`). One for each task at a time; or one for all, with threads

What a child works on it holds by a kernel lock. So a child that is killed has let go of its task before anybody knows,
and the next one takes it. The supervisor needs no word from a child for that, but for timeouts and leases: the child
says what it begins and ends, in a pipe. That pipe also tells who dies. Another pipe tells the children, by being
closed, that they are to finish: also if it is the supervisor that dies.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from .. import owner, system
from ..paths import mount_at
from .child import Child, Counts, work
from .claim import Verdict
from .handler import Command, Handler, runner
from .journal import Task
from .queue import TaskQueue

_TICK = 0.5
_SOON = 0.2  # seconds: a child that dies so soon, and often, is not started again at once
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RETRIED, _GIVEN_BACK = 2, 3


@dataclass(frozen=True)
class Summary:
    """What a worker did."""

    done: int = 0
    failed: int = 0  # for good
    retried: int = 0
    given_back: int = 0
    deaths: int = 0  # of its processes


class Worker:
    """Does the tasks of a queue with a handler: a function of the task (sync or async), or a command, a list of words.

    concurrency: how many at a time
    threads: in threads of one process instead of one process each
    heartbeat: seconds between renewals of what runs, for workers on other machines
    on_start, on_done, on_failed: called with the task, and on_failed with the error, where the handler runs
    """

    def __init__(
        self,
        queue: TaskQueue,
        handler: Handler,
        *,
        concurrency: int = 1,
        threads: bool = False,
        heartbeat: float = 60.0,
        on_start: Callable[..., object] | None = None,
        on_done: Callable[..., object] | None = None,
        on_failed: Callable[..., object] | None = None,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"concurrency is how many tasks are done at a time, not {concurrency!r}")
        if heartbeat >= queue.stale_after:
            raise ValueError(f"a heartbeat every {heartbeat} s is too late for {queue.stale_after} s of stale_after")
        self.queue = queue
        self.concurrency = concurrency
        self._run = runner(handler)
        self.threads = threads
        if isinstance(self._run, Command):
            self._run.ends_itself = threads  # else its supervisor ends it, and whatever it has started
        self._heartbeat = heartbeat
        self._hooks = (on_start, on_done, on_failed)
        self._children: dict[int, Child] = {}  # by the pipe in which it tells
        self._stop_reader, self._stop_writer = -1, -1
        self._asked = 0  # how often it was asked to end
        self._wake_writer = -1
        self._deaths = 0
        self._starts: list[float] = []
        self._renewed_at = 0.0
        self._total = [0, 0, 0, 0]
        self._drain = False
        self._next_scheduled: float | None = None
        self._known_verdicts: set[tuple[str, int]] = set()
        mount = mount_at(system.stat(queue.path).st_dev, queue.path)
        self._needs_lease = not mount.is_ours

    def stop(self) -> None:
        """Let what runs be finished, and begin nothing more; the second time, give back what runs. From any thread."""
        self._asked += 1
        if self._wake_writer >= 0:
            os.write(self._wake_writer, b"!")

    def run(self, drain: bool = False) -> Summary:
        """Work until it is stopped (SIGTERM, SIGINT, `stop`), or, with `drain`, until nothing is left to be done."""
        self._drain = drain
        self._asked = 0
        self._total = [0, 0, 0, 0]
        self._deaths = 0
        self._known_verdicts = self.queue.taker.verdicts()
        wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._stop_reader, self._stop_writer = os.pipe()
        before = self._catch_signals()
        try:
            for _ in range(1 if self.threads else self.concurrency):
                self._start()
            while self._children:
                self._supervise(wake_reader)
        finally:
            self._kill_all()
            for kind, handler in before.items():
                signal.signal(kind, handler)
            writer, self._wake_writer = self._wake_writer, -1
            for fd in (wake_reader, writer, self._stop_reader, self._stop_writer):
                if fd >= 0:
                    os.close(fd)
            self._stop_reader = self._stop_writer = -1
        done, failed, retried, given_back = self._total
        return Summary(done, failed, retried, given_back, self._deaths)

    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop()

        return {kind: signal.signal(kind, stop) for kind in _SIGNALS}

    # Children.

    def _start(self) -> None:
        reader, writer = os.pipe()
        threads = self.concurrency if self.threads else 1
        counts = Counts(threads)
        self._starts.append(monotonic())
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                os.close(reader)
                os.close(self._stop_writer)
                os.close(self._wake_writer)
                for other in self._children:
                    os.close(other)
                status = work(
                    self.queue,
                    self._run,
                    self._hooks,
                    self._stop_reader,
                    writer,
                    counts,
                    threads=threads,
                    drain=self._drain,
                    tells=self._needs_lease,
                )
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writer)
        self._children[reader] = Child(pid, reader, counts)

    def _supervise(self, wake_reader: int) -> None:
        """Wait for the next thing to happen, and see to it."""
        poll = select.poll()
        for fd in (wake_reader, *self._children):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(int(self._how_long() * 1000) + 1)]
        if wake_reader in ready:
            os.read(wake_reader, 4096)
        for fd in ready:
            if fd in self._children and not self._children[fd].hear():
                self._bury(self._children.pop(fd))
        if self._asked and self._stop_writer >= 0:
            os.close(self._stop_writer)  # nothing more is begun
            self._stop_writer = -1
        if self._asked > 1:
            self._kill_all()
        self._end_what_is_over()
        self._renew()
        if not self._drain:
            self._next_scheduled = self.queue.put_scheduled()

    def _how_long(self) -> float:
        soonest = min((child.deadline for child in self._children.values()), default=float("inf")) - monotonic()
        if self._next_scheduled is not None:
            soonest = min(soonest, self._next_scheduled - self.queue.clock.now())
        return max(0.0, min(_TICK, soonest))

    def _bury(self, child: Child) -> None:
        """It has ended: as it was told to, or not."""
        os.close(child.fd)
        _, status = os.waitpid(child.pid, 0)
        for kind, number in enumerate(child.counts.total()):
            self._total[kind] += number
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if not child.was_killed:
            self._deaths += 1
        if not self._asked:
            self._wait_if_they_die_at_once()
            self._start()

    def _wait_if_they_die_at_once(self) -> None:
        self._starts = [start for start in self._starts if monotonic() - start < _SOON * 5]
        if len(self._starts) > self.concurrency + 5:
            threading.Event().wait(_SOON * 5)

    def _end_what_is_over(self) -> None:
        """Tasks that take too long, or that somebody has cancelled."""
        now = monotonic()
        for child in list(self._children.values()):
            for place, (deadline, timeout) in list(child.tasks.items()):
                if deadline <= now:
                    self._end(child, place, Verdict("failed", f"not done within {timeout:g} s"))
        asked_for = self.queue.taker.verdicts()
        if asked_for - self._known_verdicts:
            self._end_cancelled({id for id, _ in asked_for - self._known_verdicts})
        self._known_verdicts = asked_for

    def _end_cancelled(self, ids: set[str]) -> None:
        children = {child.pid: child for child in self._children.values()}
        for place, task in self.queue.taker.running().items():
            child = children.get(_pid_of(task))
            if child is not None and task.id in ids and task.state == "running":
                self._end(child, place, Verdict("cancelled", "cancelled"))

    def _end(self, child: Child, place: str, verdict: Verdict) -> None:
        """Kill who does it. What else that one did is given back."""
        others = [other for other in self._places_of(child) if other != place] if self.threads else []
        for other in others:
            self.queue.taker.end_attempt(other, Verdict("pending", "its worker was ended"), lambda: None)
        self.queue.taker.end_attempt(place, verdict, lambda: self._kill(child))
        for other in others:
            self.queue.taker.settle_place(other)
        child.tasks.clear()
        self._total[_RETRIED if verdict.state == "failed" else _GIVEN_BACK] += 1

    def _places_of(self, child: Child) -> list[str]:
        return [place for place, task in self.queue.taker.running().items() if _pid_of(task) == child.pid]

    def _kill(self, child: Child) -> None:
        child.was_killed = True
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to have a group of its own yet
            os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # then it has let go of everything

    def _kill_all(self) -> None:
        """Give back whatever is being done."""
        while self._children:
            _, child = self._children.popitem()
            places = self._places_of(child)
            for place in places:
                self.queue.taker.end_attempt(place, Verdict("pending", "its worker was ended"), lambda: None)
            child.hear()
            self._kill(child)
            for place in places:
                self._total[_GIVEN_BACK] += self.queue.taker.settle_place(place)
            self._bury(child)

    def _renew(self) -> None:
        if not self._needs_lease or monotonic() - self._renewed_at < self._heartbeat:
            return
        self._renewed_at = monotonic()
        for child in self._children.values():
            for place in child.tasks:
                try:
                    system.touch(f"{self.queue._places.running}/{place}")
                except FileNotFoundError:
                    pass


def _pid_of(task: Task) -> int:
    """Of the worker, if that is on this machine."""
    pid, _, host = (task.worker or "").partition("@")
    mine = host == owner.me().host and task.boot == owner.boot_id()
    return int(pid) if mine and pid.isdigit() else 0
