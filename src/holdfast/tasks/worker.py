"""`Worker`: does the tasks of a queue, several at a time, and outlives what it does them with.

    supervisor    the process that calls `run`. It takes no task. It starts its children, and new ones when they die,
                  ends tasks that take too long or are cancelled, renews leases, and passes on the signals
    children      take tasks and do them (`child`). One for each task at a time; or one for all, with threads

What a child works on it holds by a kernel lock. So a child that is killed has let go of its task before anybody knows,
and the next one takes it. The supervisor needs no word from a child for that, but for timeouts and leases: the child
says what it begins and ends, in a pipe. Another pipe tells the children, by being closed, that they are to finish: also
if it is the supervisor that dies.

To end a task, its child is stopped first. While it stands still, one sees whether it is still at that task; if so, it
is written down how this ends, and only then is it killed. So nobody is killed who has just begun the next one, and
whoever takes the task afterwards knows.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any, Protocol

from .. import system
from ..errors import HoldfastError, Unsupported
from ..files import InheritedFd, OwnedFd, pipe
from .child import PASSING, Child, Counts, work
from .errors import WorkerFailed
from .handler import Command, Handler, runner
from .journal import Task
from .queue import TaskQueue
from .verdict import Verdict

_TICK = 0.5
_SOON, _OFTEN = 0.2, 5  # seconds, times: a child that dies so soon, and often, is not started again at once
_LATER = 75  # the exit status of a child that could not go on, for a reason that passes
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FAILED, _RETRIED, _GIVEN_BACK, _CANCELLED = 1, 2, 3, 4
_BETWEEN_LOOKS = 0.25  # seconds
_PATIENCE = 0.5  # seconds for what a killed child has started to be gone, too
_GIVE_BACK = Verdict("pending", "its worker was ended")


@dataclass(frozen=True)
class Summary:
    """What a worker did."""

    done: int = 0
    failed: int = 0  # for good
    retried: int = 0
    given_back: int = 0
    cancelled: int = 0
    deaths: int = 0  # of its processes; what each was at counts as retried, or failed, when another one takes it


class Observer(Protocol):
    """One who shows what a worker does, in the process of its supervisor: `look` is called when one of `fds` can be
    read, when something else has happened, and every half a second."""

    @property
    def fds(self) -> tuple[int, ...]: ...

    def look(self) -> None: ...


class Worker:
    """Does the tasks of a queue with a handler: a function of the task (sync or async), or a command, a list of words.

    concurrency: how many at a time
    threads: in threads of one process instead of one process each
    heartbeat: seconds between renewals of what runs, for workers on other machines
    on_start, on_done, on_failed: called with the task, and on_failed with the error, where the handler runs
    observer: see `Observer`
    """

    def __init__(
        self,
        queue: TaskQueue | str | os.PathLike[str],
        handler: Handler,
        *,
        concurrency: int = 1,
        threads: bool = False,
        heartbeat: float = 60.0,
        on_start: Callable[..., object] | None = None,
        on_done: Callable[..., object] | None = None,
        on_failed: Callable[..., object] | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"concurrency is how many tasks are done at a time, not {concurrency!r}")
        if not isinstance(queue, TaskQueue):
            queue = TaskQueue(queue)
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
        self._observer = observer
        self._children: dict[int, Child] = {}  # by pid
        self._pipes: _Pipes | None = None
        self._asked = 0  # how often it was asked to end
        self._deaths = 0
        self._in_vain = 0  # in a row
        self._starts: list[float] = []
        self._renewed_at = self._looked_at = 0.0
        self._total = [0, 0, 0, 0, 0]
        self._drain = False
        self._next_scheduled: float | None = None
        self._trouble = ""

    def stop(self) -> None:
        """Let what runs be finished, and begin nothing more; the second time, give back what runs. From any thread."""
        self._asked += 1
        pipes = self._pipes
        if pipes is not None:
            with suppress(BlockingIOError):
                os.write(pipes.wake_writer.fd, b"!")

    @property
    def is_ending(self) -> bool:
        """Was it stopped, so that nothing more is begun?"""
        return self._asked > 0 and (self._pipes is None or not self._pipes.stop_writer.is_open)

    def run(self, drain: bool = False) -> Summary:
        """Work until it is stopped (SIGTERM, SIGINT, `stop`), or, with `drain`, until nothing is left to be done."""
        if not hasattr(os, "fork"):
            raise Unsupported("a Worker needs processes that can be forked; use queue.claim() here")
        self._drain = drain
        self._total = [0, 0, 0, 0, 0]
        self._deaths = self._in_vain = 0
        self.queue.check_writable()
        _open_standard_files()
        self._pipes = _Pipes()
        before = self._catch_signals()
        try:
            self.queue.rescue()
            self._put_scheduled()
            for _ in range(1 if self.threads else self.concurrency):
                self._start()
            while self._children:
                self._supervise()
        finally:
            self._asked = 2
            self._kill_all()
            for kind, handler in before.items():
                signal.signal(kind, handler)
            self._pipes.close()
            self._pipes = None
            self._asked = 0
        done, failed, retried, given_back, cancelled = self._total
        return Summary(done, failed, retried, given_back, cancelled, self._deaths)

    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop()

        before: dict[int, Any] = {kind: signal.signal(kind, stop) for kind in _SIGNALS}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else nobody is told how they ended
        return before

    # Children.

    def _start(self) -> None:
        assert self._pipes is not None
        reader, writer = pipe(writer=InheritedFd)
        threads = self.concurrency if self.threads else 1
        counts = Counts(threads)
        self._starts.append(monotonic())
        _flush()  # else the child has a copy of what is still to be printed, and prints it, too
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                status = work(
                    self.queue,
                    self._run,
                    self._hooks,
                    OwnedFd(self._pipes.stop_reader.detach()),  # a handler that forks does not pass them on
                    OwnedFd(writer.detach()),
                    counts,
                    threads=threads,
                    drain=self._drain,
                    tells=self.queue.is_shared,
                )
            except (OSError, HoldfastError) as error:
                logging.getLogger("holdfast").warning("%s", error)
                if getattr(error, "errno", 0) in PASSING:
                    status = _LATER
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                _flush()
                os._exit(status)
        writer.close()
        with suppress(OSError):
            os.setpgid(pid, pid)  # whoever of us comes first
        self._children[pid] = Child(pid, reader, counts)

    def _supervise(self) -> None:
        """Wait for the next thing to happen, and see to it."""
        poll = select.poll()
        assert self._pipes is not None
        wake = self._pipes.wake_reader.fd
        poll.register(wake, select.POLLIN)
        observed = () if self._observer is None else self._observer.fds
        for fd in (*observed, *(fd for child in self._children.values() for fd in child.fds)):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(int(self._how_long() * 1000) + 1)}
        if wake in ready:
            os.read(wake, 4096)
        for child in list(self._children.values()):
            if ready.intersection(child.fds):
                child.hear()
            self._bury_if_dead(child)
        if self._asked:
            self._pipes.stop_writer.close()  # nothing more is begun
        if self._asked > 1:
            self._kill_all()
        try:
            self._look_after_tasks()
        except OSError as error:  # the disk is full, for one. What cannot be done now is tried again
            self._say_trouble(error)
        if self._observer is not None:
            self._observer.look()

    def _look_after_tasks(self) -> None:
        self._end_late()
        now = monotonic()
        if now - self._looked_at >= _BETWEEN_LOOKS:
            self._looked_at = now
            self._end_cancelled()
            self._renew()
            if not self._drain:
                self._put_scheduled()

    def _put_scheduled(self) -> None:
        """What is wrong with one of them, or that the queue is full, is no reason to stop working."""
        try:
            self._next_scheduled = self.queue.put_scheduled()
        except (OSError, TypeError, ValueError, HoldfastError) as error:
            self._next_scheduled = None  # it is looked again soon enough
            self._say_trouble(error)

    def _say_trouble(self, error: Exception) -> None:
        """Once."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            logging.getLogger("holdfast").warning("%s", error)

    def _how_long(self) -> float:
        soonest = min((child.deadline for child in self._children.values()), default=float("inf")) - monotonic()
        if self._next_scheduled is not None:
            soonest = min(soonest, self._next_scheduled - self.queue.clock.now())
        return max(0.0, min(_TICK, soonest))

    def _bury_if_dead(self, child: Child) -> None:
        code = child.exit_code()
        if code is None or self._children.pop(child.pid, None) is None:
            return
        child.hear()
        child.close()
        for kind, number in enumerate(child.counts.total()):
            self._total[kind] += number
        if code == 0 and child.counts.is_finished:
            return
        if not child.was_killed:
            self._deaths += 1
            if any(one.counts.has_begun for one in (child, *self._children.values())):
                self._in_vain = 0
            elif code > 0 and code != _LATER and monotonic() - child.started < _SOON * 5:
                self._in_vain += 1
            if self._in_vain > self.concurrency + _OFTEN:
                raise WorkerFailed(
                    f"{self.queue.path}: the processes of this worker end before they have begun a task; they said why",
                    path=self.queue.path,
                )
        if not self._asked:
            self._wait_if_they_die_at_once()
            self._start()

    def _wait_if_they_die_at_once(self) -> None:
        self._starts = [start for start in self._starts if monotonic() - start < _SOON * 5]
        if len(self._starts) > self.concurrency + _OFTEN:
            threading.Event().wait(_SOON * 5)

    # Ending tasks.

    def _end_late(self) -> None:
        now = monotonic()
        for child in list(self._children.values()):
            late = {
                place: Verdict("failed", f"not done within {seconds:g} s")
                for place, (deadline, seconds) in child.tasks.items()
                if deadline <= now
            }
            if late:
                self._end(child, late)

    def _end_cancelled(self) -> None:
        if not self.queue.taker.any_verdict():
            return
        running = self.queue.taker.running()
        cancelled = self.queue.taker.cancelled(running)
        for child in list(self._children.values()):
            mine = {place: Verdict("cancelled", "cancelled") for place in cancelled if running[place].by == child.by}
            if mine:
                self._end(child, mine)

    def _end(self, child: Child, verdicts: dict[str, Verdict]) -> None:
        """End what a child does, unless it is not at it any more; no verdicts: in any case. The rest is given back."""
        with child.standing_still():
            child.hear()
            running = self._running_of(child)
            if verdicts and not running.keys() & verdicts.keys():
                for place in verdicts:
                    child.tasks.pop(place, None)
                return
            for place, task in running.items():
                self.queue.taker.say_how_it_ends(place, task, verdicts.get(place, _GIVE_BACK))
            child.kill()
        until = monotonic() + _PATIENCE
        for place, task in running.items():
            self.queue.taker.settle_place(place, until)
            state = verdicts.get(place, _GIVE_BACK).state
            if state == "failed":
                self._total[_FAILED if task.tried >= task.attempts else _RETRIED] += 1
            else:
                self._total[_CANCELLED if state == "cancelled" else _GIVEN_BACK] += 1
        child.tasks.clear()
        self._bury_if_dead(child)

    def _running_of(self, child: Child) -> dict[str, Task]:
        return {place: task for place, task in self.queue.taker.running().items() if task.by == child.by}

    def _kill_all(self) -> None:
        """Give back whatever is being done."""
        for child in list(self._children.values()):
            try:
                self._end(child, {})
            except OSError as error:
                logging.getLogger("holdfast").warning("%s", error)
            finally:
                child.kill()
            self._bury_if_dead(child)

    def _renew(self) -> None:
        if not self.queue.is_shared or monotonic() - self._renewed_at < self._heartbeat:
            return
        self._renewed_at = monotonic()
        for child in self._children.values():
            for place in child.tasks:
                with suppress(FileNotFoundError):
                    system.touch(f"{self.queue._places.running}/{place}")


class _Pipes:
    """How the supervisor is woken, and how it tells its children to stop: by closing `stop_writer`."""

    def __init__(self) -> None:
        self.wake_reader, self.wake_writer = pipe()
        self.stop_reader, self.stop_writer = pipe(reader=InheritedFd)
        os.set_blocking(self.wake_writer.fd, False)

    def close(self) -> None:
        for file in (self.wake_reader, self.wake_writer, self.stop_reader, self.stop_writer):
            file.close()


def _open_standard_files() -> None:
    """Or the next file that is opened would be taken for one of these."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it any more
            stream.flush()
