"""Every interleaving, and a crash at every system call: a deterministic scheduler for the real lock code.

A scenario spawns actors. Each is a thread that stands for a process (or for one thread of a process): it runs the code
of `holdfast` as it is, on real files, but only one of them runs at a time, and before each system call the scheduler
decides who goes on. Kernel locks belong to descriptors, so threads with descriptors of their own are to each other
what processes are.

    run.spawn(script)         an actor; `process=` puts several into one process
    run.pause()               a point where others may come in between: before a script itself touches a file
    run.stay()                the same inside a critical section, where a script touches no file
    run.until(condition)      wait for something that another actor does
    explore(...)              all schedules with at most so many preemptions, and kills, depth first
    wander(...)               random schedules from a seed
    replay(...)               one schedule again, as it was printed by a failure

A schedule is one word for each point at which there was a choice: `1` actor 1 goes on; `1~` the time of actor 1, which
sleeps with a deadline, is over; `1!` the process of actor 1 is killed. A preemption is a switch away from an actor that
could have gone on, or a deadline that passes while somebody could have gone on.

What is real: files, kernel locks, FIFOs, inotify. What is not: time, which passes only when nobody can do anything or
when the schedule says so, and blocking, which becomes a try that is repeated when somebody has unlocked or closed
something. Those who are killed make no further call; their descriptors are closed as the kernel would.

A run fails if a script or the check of the scenario raises, if nobody can go on, if somebody can only go on when its
deadline or its safety look comes (a wake-up was lost), if a process closes a descriptor that it has not got or ends
with one open.
"""

from __future__ import annotations

import gc
import os
import random
import select
import shutil
import sys
import threading
from _thread import get_ident, start_new_thread
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from explored import explored
from footprints import INODES, SCRIPT, Files, Footprint

from holdfast import Hold, paths, process, system, wait, watch
from holdfast.files import InheritedFd
from holdfast.locks import base, file_waiter, first_waiter, local, lock, lock_file, path_lock, queue, removal, semaphore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Scenario = Callable[["Run"], Callable[[], None] | None]
    Option = tuple[str, int]
    Asleep = tuple[dict[int, Footprint], int]
    Choose = Callable[["Run", list[Option]], str]

# Calls that describe processes and mounts. They change nothing, and no lock depends on when they are made.
DESCRIBING = frozenset({"read_text", "mount_table", "list_pids", "lock_lines", "pid_namespace"})
LOOKS = frozenset(
    {
        *("fstat", "stat", "access", "listdir", "read", "pread", "drain"),
        *("removal_marked", "liveness_locked", "process_exists"),
    }
)
LOCKS = frozenset({"lock", "lock_range"})
LET_GO = LOCKS | {"close", "unlock_slots", "unmark_removal"}
TOUCHING = ("pause", "until")  # after these, a script may touch files itself
RECHECK_S = 1e6  # later than every deadline
MOST_STEPS = 20_000


class Killed(BaseException):
    """Raised by every system call of a killed process."""


class Redundant(Exception):
    """What is left of this run is the same as in a run that is explored elsewhere."""


class Failure(Exception):
    """A schedule that broke a promise."""

    def __init__(self, run: Run, error: BaseException) -> None:
        self.schedule = " ".join(run.taken)
        self.error = error
        calls = "\n".join(f"    {line}" for line in run.story())
        super().__init__(f"{type(error).__name__}: {error}\n  schedule: {self.schedule!r}\n{calls}")


class Process:
    """What a process has for itself: its book, its descriptors, its threads."""

    def __init__(self) -> None:
        self.registry = process.Registry()
        self.fds: set[int] = set()
        self.actors: list[Actor] = []


class Actor:
    """A thread of a process, and what it waits for, if it waits."""

    def __init__(self, run: Run, number: int, process: Process, script: Callable[[], object]) -> None:
        self.run = run
        self.number = number
        self.process = process
        self.script = script
        self.go = threading.Lock()
        self.go.acquire()
        self.waits_for = "start"
        self.ready: Callable[[], bool] | None = None
        self.until: float | None = None
        self.patient = False
        self.killed = self.done = False
        self.result: object = None
        self.thread: int | None = None
        self.step = Footprint()  # what it touches between this point and its next one
        self.step.writes.add(SCRIPT)
        self.entry: FrameType | None = None  # the call of the package that its script has made
        process.actors.append(self)
        start_new_thread(self._main, ())  # several times as quick as a Thread object, and there are thousands

    @property
    def waiting(self) -> bool:
        """Does it wait for a lock or in a queue?"""
        return self.ready is not None and self.waits_for in ("lock", "lock_range", "readable", "notified")

    def can_run(self) -> bool:
        return self.ready is None or (self.until is not None and self.until <= self.run.now) or self.ready()

    def _main(self) -> None:
        self.thread = get_ident()
        self.go.acquire()
        try:
            if not self.killed:
                self.result = self.script()
        except Killed:
            pass
        except BaseException as error:
            if not self.killed:  # what the dead have to say about it, nobody hears
                self.run.fail(error)
        self.waits_for = "end"
        self.done = True
        self.entry = None
        self.run.ended(self)


class Run:
    """One execution of a scenario."""

    def __init__(self, directory: Path, choose: Choose, kills: int, asleep: Asleep = ({}, 0)) -> None:
        self.directory = directory
        self._home = str(directory)
        self._files = Files(self._home)
        self.path = str(directory / "x")
        self.actors: list[Actor] = []
        self.now = 1000.0
        # A scenario may change these.
        self.exploring = True  # False: everybody goes on as long as it can, until the part that matters begins
        self.symmetric = False  # all actors are alike, so that it does not matter who is the first
        self.killable: set[int] | None = None
        self.safety_looks = True
        self.tick = 1e-6  # how long a call takes
        self.kills = kills
        self.current: Actor | None = None
        self.taken: list[str] = []
        self.choices: list[list[Option]] = []
        # For `explore`: the actors that sleep, after so many choices. And of each choice: the actors that slept
        # then, and the step of the actor that went on, if it was not preempted.
        self._asleep, self._asleep_after = dict(asleep[0]), asleep[1]
        self.slept: list[dict[int, Footprint]] = []
        self.went_on: list[tuple[int, Footprint] | None] = []
        self.calls: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._log: list[tuple[int | None, str, object, object]] = []
        self._choose = choose
        self._processes: dict[object, Process] = {}
        self._over = threading.Lock()
        self._over.acquire()
        self._doomed: list[Actor] = []
        self._interrupted = False
        self._steps = self._progress = self._releases = 0

    # For scenarios.

    def spawn(self, script: Callable[[], object], process: object = None) -> Actor:
        number = len(self.actors)
        home = self._processes.setdefault(number if process is None else process, Process())
        self.actors.append(Actor(self, number, home, script))
        return self.actors[-1]

    def pause(self) -> None:
        self._point("pause")

    def stay(self) -> None:
        """The same, for a script that touches no file before its next call."""
        self._point("stay")

    def touches_files(self) -> None:
        """For a script that looks at files itself, not right after `pause` or `until`: nothing commutes with that."""
        assert self.current is not None
        self.current.step.unknown = True

    def until(self, condition: Callable[[], bool]) -> None:
        self._point("until", ready=condition)

    # The scheduler. It runs in whichever thread has reached a point.

    def execute(self, check: Callable[[], None] | None) -> None:
        self._files.scan()
        self._pass_on(None)
        try:
            self._over.acquire()
        except BaseException:
            self._interrupted = True
            self._over.acquire()
            raise
        self.current = None
        for home in self._processes.values():
            if home.fds and self.error is None:
                self.error = AssertionError(f"left open: {sorted(home.fds)}")
            self._close_all(home)
        if check is not None and self.error is None:
            process.registry = (
                process.Registry()
            )  # the check is one more process, which has nothing to do with the others
            try:
                check()
            except Exception as error:
                self.error = error

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        for actor in self.actors:
            self._kill(actor)

    def ended(self, actor: Actor) -> None:
        self._progress += 1
        actor.step.writes.add(SCRIPT)
        self._wake(actor.process, actor.step)
        self._log.append((actor.number, "killed" if actor.killed else "ends", (), None))
        if all(other.done for other in actor.process.actors) and actor.killed:
            self._close_all(actor.process)
        self._pass_on(actor)

    def _kill(self, actor: Actor) -> None:
        for thread in actor.process.actors:
            if not thread.killed and not thread.done:
                thread.killed = True
                self._doomed.append(thread)
        # As after a fork: nothing that is collected now is closed or released by it.
        _forget(process.descriptors, actor.process.fds)
        actor.process.registry.holds.clear()
        actor.process.registry = process.registry = process.Registry()

    def _close_all(self, home: Process) -> None:
        self._releases += 1
        for fd in home.fds:
            with suppress(OSError):
                os.close(fd)
        _forget(process.descriptors, home.fds)
        home.fds.clear()
        home.registry.holds.clear()

    def _point(
        self,
        what: str,
        args: object = (),
        ready: Callable[[], bool] | None = None,
        until: float | None = None,
        patient: bool = False,
    ) -> None:
        actor = self.current
        assert actor is not None, "the check had to wait"
        if actor.killed:
            raise Killed
        # Whether an actor waits, and how long, can depend on any call of another. `until` depends on scripts only.
        self._end_step(actor, waits=ready is not None and what != "until", touches_files=what in TOUCHING)
        actor.waits_for, actor.ready, actor.until, actor.patient = what, ready, until, patient
        if ready is not None:
            self._log.append((actor.number, f"waits: {what}", args, None))
        self._pass_on(actor)
        if actor.killed:
            raise Killed
        actor.ready = actor.until = None

    def _end_step(self, actor: Actor, waits: bool, touches_files: bool) -> None:
        """The actor has reached its next point."""
        frame, entry = sys._getframe(2), None
        while frame is not None:
            if frame.f_globals["__name__"].startswith("holdfast."):
                entry = frame
            frame = frame.f_back
        if entry is None or entry is not actor.entry:
            actor.step.writes.add(SCRIPT)  # its script has run since the last point
        if actor.waits_for in TOUCHING:
            self._files.scan()
        actor.step.unknown |= waits
        self._wake(actor.process, actor.step)
        actor.entry = entry
        actor.step = Footprint(unknown=waits or touches_files)

    def _wake(self, home: Process, step: Footprint) -> None:
        """Wake the actors whose next step does not commute with this one of a process."""
        for number, other in list(self.sleepers().items()):
            if self.actors[number].process is home or not other.commutes(step):
                del self._asleep[number]

    def sleepers(self) -> dict[int, Footprint]:
        return self._asleep if len(self.taken) >= self._asleep_after else {}

    def _pass_on(self, actor: Actor | None) -> None:
        try:
            assert not self._interrupted or self.error, "interrupted"
            chosen = self._next(actor)
        except Exception as error:
            self.fail(error)
            chosen = self._next(actor)
        if chosen is actor:
            return
        if chosen is None:
            self._over.release()
            return
        self.current = chosen
        process.registry = chosen.process.registry
        chosen.go.release()
        if actor is not None and not actor.done:
            actor.go.acquire()

    def _next(self, actor: Actor | None) -> Actor | None:
        while self._doomed:
            doomed = self._doomed.pop()
            if not doomed.done:
                return doomed
        if all(other.done for other in self.actors):  # first: a run that was too long has to end, too
            return None
        self._steps += 1
        self.now += self.tick
        if self._steps > MOST_STEPS:
            raise AssertionError(f"no end after {MOST_STEPS} steps")
        options = self._options(actor)[: None if self.exploring and not (self.symmetric and actor is None) else 1]
        word = options[0][0]
        asleep = self.sleepers()
        if len(options) > 1:
            word = self._choose(self, options)
            self.choices.append(options)
            self.taken.append(word)
            self.slept.append(dict(asleep))
            goes_on = actor is not None and word == str(actor.number) and options[0][0] == word
            self.went_on.append((actor.number, actor.step) if actor is not None and goes_on else None)
        chosen = self.actors[int(word.rstrip("~!"))]
        if word.isdigit() and chosen.number in asleep:
            raise Redundant
        if word.endswith("~"):
            assert chosen.until is not None
            self.now = max(self.now, chosen.until)
            self._log.append((chosen.number, "its time is over", (), None))
        if word.endswith("!"):
            self.kills -= 1
            self.calls[f"killed before {chosen.waits_for}"] += 1
            self._wake(chosen.process, self._files.closing(chosen.process.fds))
            self._kill(chosen)
            return self._doomed.pop()
        return chosen

    def _options(self, actor: Actor | None) -> list[Option]:
        """What can happen next, and how many preemptions each costs. The first is what happens if nobody chooses."""

        def looks(other: Actor) -> bool:
            return (other.until or 0.0) - self.now > RECHECK_S / 2

        alive = [other for other in self.actors if not other.done]
        able = [other for other in alive if other.can_run()]
        if actor in able:
            able.remove(actor)
            able.insert(0, actor)
        options = [(str(other.number), int(actor in able and other is not actor)) for other in able]
        sleeping = sorted((o for o in alive if o.until is not None and o not in able), key=lambda o: o.until or 0.0)
        if able:
            options += [(f"{o.number}~", 1) for o in sleeping if not o.patient and (self.safety_looks or not looks(o))]
        elif sleeping:
            # A pause goes first: the time of a safety look may come before its end, if time was let pass earlier.
            first = next((other for other in sleeping if other.patient), None)
            if first is None:
                raise AssertionError(f"a wake-up was lost: only time could help actor {sleeping[0].number}")
            options.append((f"{first.number}~", 0))
        else:
            raise AssertionError("deadlock: nobody can go on")
        if self.kills:
            options += [(f"{o.number}!", 0) for o in alive if self.killable is None or o.number in self.killable]
        return options

    # What the locks meet instead of the system.

    def call(self, name: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        actor = self.current
        # The check of the scenario, when all is over, or a thread that another test has left behind.
        if actor is None or actor.thread != get_ident():
            return real(*args, **options)
        if actor.killed:
            raise Killed
        # Before a call whose answer nobody can change, nobody needs to come in: that is to come in before the next one.
        if name != "fstat" and not (name == "stat" and self._is_above(args[0])):
            self._point(name, args)
        self.calls[name] += 1
        while True:
            try:
                answer = self._real(actor, name, real, args, options)
            except BlockingIOError:
                if name not in LOCKS or args[1] & system.NB:
                    raise
                self._wait_for_release(name, args)
            else:
                return answer

    def _is_above(self, path: str) -> bool:
        """Is it the directory of this run, or one that leads there? Those stay as they are."""
        return path == "/" or f"{self._home}/".startswith(f"{path}/")

    def _real(
        self, actor: Actor, name: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        fds = actor.process.fds
        if name == "close":
            assert args[0] in fds, f"closes descriptor {args[0]}, which it has not got"
        if name in LOCKS:
            fd, op = args
            args = (fd, op if op == system.UN else op | system.NB)
        above = name == "stat" and self._is_above(args[0])
        touched = Footprint() if above else self._files.touched(name, args, options)
        try:
            answer = real(*args, **options)
        except OSError as error:
            actor.step.add(touched, failed=True)
            self._log.append((actor.number, name, args, error))
            raise
        actor.step.add(touched, failed=False)
        if INODES in touched.reads and "link" not in name:
            self._files.made(actor.number, name, args, options, answer)
        # Who only looked, or tried in vain, is no reason for others to look again.
        self._progress += name not in LOOKS and answer is not False
        self._releases += name in LET_GO
        if name == "open_fd":
            fds.add(answer)
        if name == "close":
            fds.discard(args[0])
        self._log.append((actor.number, name, args, answer))
        return answer

    def _wait_for_release(self, name: str, args: object) -> None:
        seen = self._releases
        self._point(name, args, ready=lambda: self._releases != seen)

    def wait_readable(self, step: wait.Readable) -> None:
        poll = select.poll()
        poll.register(step.fd, select.POLLIN)
        self._point("readable", (step.fd,), ready=lambda: bool(poll.poll(0)), until=step.until)

    def wait_pause(self, step: wait.Pause) -> None:
        self.sleep(step.left() or 0.0)

    def wait_notified(self, step: wait.Notified) -> None:
        self._point("notified", ready=lambda: not step._lock.locked(), until=step.until)

    def sleep(self, seconds: float) -> None:
        """Until others have changed something: to look again before that would show the same."""
        seen = self._progress
        self._point("sleep", (seconds,), ready=lambda: self._progress != seen, until=self.now + seconds, patient=True)

    def story(self) -> list[str]:
        """The calls of the run, one a line, for people."""
        lines = []
        for number, name, args, answer in self._log:
            shown = ", ".join(self._show(arg) for arg in args) if isinstance(args, tuple) else ""
            lines.append(f"{number}: {name}({shown})" + ("" if answer is None else f" -> {self._show(answer)}"))
        return lines

    def _show(self, value: object) -> str:
        if isinstance(value, os.stat_result):
            return f"inode {value.st_ino}"
        return repr(value).replace(str(self.directory) + "/", "")


def _forget(owners: dict[int, int], fds: set[int]) -> None:
    for owner, fd in list(owners.items()):
        if fd in fds:
            owners.pop(owner, None)


class WatchFd(InheritedFd):
    """Kept from one run to the next, and closed by the system itself, not by a run."""

    __slots__ = ()

    def close(self) -> None:
        if self.detach() >= 0:
            os.close(self.fd)


class Watch:
    """The real watch, whose descriptor is its process's, and whose making is a system call like the others."""

    real = system.Watch

    def __init__(self, run: Run, path: str, own: object, events: int = 0) -> None:
        self._run = run
        self._watch = run.call("watch", self.real, path, WatchFd, events)
        self.fd = self._watch.fd
        self._process = run.current.process if run.current else None
        if self._process:
            self._process.fds.add(self.fd)

    def move(self, path: str) -> None:
        self._run.call("move_watch", self._watch.move, path)

    def drain(self) -> bool:
        return bool(self._run.call("drain", self._watch.drain))

    def close(self, *, reuse: bool = False) -> None:
        self._run.call("close_watch", self._close)

    def _close(self) -> None:
        if self._process:
            self._process.fds.discard(self.fd)
        self._watch.close(reuse=True)  # quicker than to end it; the last one is ended by `no_idle_watch_left`


def system_calls() -> dict[str, Callable[..., Any]]:
    """Every function of `system` that a lock may call."""
    return {
        name: value
        for name, value in vars(system).items()
        if isinstance(value, BuiltinFunctionType | FunctionType) and not name.startswith("_") and name not in DESCRIBING
    }


@contextmanager
def in_place_of_the_system(run: Run) -> Iterator[None]:
    """Let the locks meet a run instead."""

    def method(function: Callable[[Any], None]) -> Callable[[Any], None]:
        # A function of a class gets the object that it is called on, as the bound method of a run would not.
        def block(step: Any) -> None:
            function(step)

        return block

    changes: list[tuple[Any, str, object]] = [
        (system, name, partial(run.call, name, real)) for name, real in system_calls().items()
    ]
    changes += [
        (system, "Watch", partial(Watch, run)),
        (wait.Readable, "block", method(run.wait_readable)),
        (wait.Notified, "block", method(run.wait_notified)),
        (wait.Pause, "block", method(run.wait_pause)),
        # The clock of the day goes on during a run, and must make no difference between two runs.
        (paths, "_checked", {}),
        (path_lock, "_FRESH_S", float("inf")),
        (path_lock, "_BRIEF_HOLD_S", float("inf")),
        (watch, "_SOON_S", RECHECK_S),  # here, who dies reports its end when all its locks are gone
        (first_waiter, "BURSTS", ((float("inf"), 0.0, float("inf")),)),  # a burst of attempts would be one attempt here
        (process, "registry", process.registry),
    ]
    names = {"monotonic": lambda: run.now, "sleep": run.sleep, "RECHECK_S": RECHECK_S}
    locks = (base, file_waiter, first_waiter, local, lock, lock_file, path_lock, queue, removal, semaphore)
    for module in (wait, watch, process, paths, *locks):
        changes += [(module, name, value) for name, value in names.items() if hasattr(module, name)]
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


@contextmanager
def no_idle_watch_left() -> Iterator[None]:
    """End the watch that `system` keeps for the next wait: that of an earlier test now, so that no actor closes it, and
    at the end that of this one, which leaves the descriptors that it found."""
    _end_idle_watches()
    try:
        yield
    finally:
        _end_idle_watches()


def _end_idle_watches() -> None:
    platform = sys.modules.get("holdfast.system.linux")
    while platform is not None and platform._idle_instances:
        platform._idle_instances.pop().close()


def _empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.unlink(entry)


def _execute(scenario: Scenario, directory: Path, choose: Choose, kills: int, asleep: Asleep = ({}, 0)) -> Run:
    run = Run(directory, choose, kills, asleep)
    random.seed(0)  # so that a pause has the same length in two runs of one schedule
    try:
        with in_place_of_the_system(run):
            run.execute(scenario(run))
    finally:
        _empty(directory)
    if run.error is not None and not isinstance(run.error, Redundant):
        raise Failure(run, run.error) from run.error
    return run


def _follow(words: Iterable[str]) -> Choose:
    """Take these choices, then the first of each that is free and lets no actor go on that sleeps."""
    wanted = list(words)

    def choose(run: Run, options: list[Option]) -> str:
        at = len(run.taken)
        if at >= len(wanted):
            asleep = run.sleepers()
            free = (word for word, cost in options if not cost and word.isdigit() and int(word) not in asleep)
            return next(free, options[0][0])
        if wanted[at] not in dict(options):
            raise RuntimeError(f"this schedule does not fit: {wanted[at]!r} is none of {options} at choice {at}")
        return wanted[at]

    return choose


def _chance(seed: int) -> Choose:
    chance = random.Random(seed)
    # Some runs switch all the time and some hardly ever: some bugs need the one and some the other.
    switching = chance.choice((0.05, 0.2, 0.5, 0.9))

    def choose(run: Run, options: list[Option]) -> str:
        if chance.random() > switching:
            return options[0][0]
        likely = [word for word, _ in options if word.isdigit()]
        if likely and chance.random() < 0.9:
            return chance.choice(likely)
        return chance.choice(options)[0]

    return choose


def explore(
    scenario: Scenario, directory: Path, *, preemptions: int = 2, kills: int = 0, reduced: bool = True
) -> Counter[str]:
    """Run every schedule within the bounds, except those that cannot differ from another one.

    Returns how many there were, as `runs`, how often each call was made, and how often an actor was killed before it.

    The reduction is a sleep set. An actor A is about to make step a. To preempt A there, run only steps that commute
    with a, and then return to A, ends in the same state as to preempt A after a. That other schedule needs no more
    preemptions, so A sleeps until a step that does not commute with a wakes it. A run that goes on with an actor that
    sleeps is cut short; `cut` is how many of the runs were.

    (Usual sleep sets let every actor sleep that was explored before. With a bound on preemptions this would be wrong:
    the schedule that stands for the other one could need more of them.)
    """
    gc.collect()  # what other tests left must not be closed in the middle, as if an actor did
    seen: Counter[str] = Counter()
    todo: list[tuple[tuple[str, ...], int, dict[int, Footprint]]] = [((), preemptions, {})]
    with no_idle_watch_left():
        while todo:
            prefix, left, asleep = todo.pop()
            run = _execute(scenario, directory, _follow(prefix), kills, (asleep, len(prefix)))
            seen += run.calls
            seen["runs"] += 1
            seen["cut"] += run.error is not None
            for at in range(len(prefix), len(run.choices)):
                before = run.taken[:at]
                slept = run.slept[at]
                sleeps = dict([went_on]) if reduced and (went_on := run.went_on[at]) else {}
                todo += [
                    ((*before, word), left - cost, {**slept, **sleeps})
                    for word, cost in run.choices[at]
                    if word != run.taken[at] and cost <= left and not (word.isdigit() and int(word) in slept)
                ]
    explored(schedules=seen["runs"] - seen["cut"], cut=seen["cut"], kills=kills_of(seen), calls=calls_of(seen))
    return seen


def kills_of(seen: Counter[str]) -> int:
    return sum(number for name, number in seen.items() if name.startswith("killed before "))


def calls_of(seen: Counter[str]) -> int:
    return sum(seen.values()) - kills_of(seen) - seen["runs"] - seen["cut"]


def wander(scenario: Scenario, directory: Path, *, seeds: Iterable[int], kills: int = 0) -> Counter[str]:
    """Run one random schedule for each seed."""
    gc.collect()  # what other tests left must not be closed in the middle, as if an actor did
    seen: Counter[str] = Counter()
    with no_idle_watch_left():
        for seed in seeds:
            seen += _execute(scenario, directory, _chance(seed), kills).calls
            seen["runs"] += 1
    explored(random_schedules=seen["runs"], kills=kills_of(seen), calls=calls_of(seen))
    return seen


def replay(scenario: Scenario, directory: Path, schedule: str, *, kills: int = 0) -> Run:
    """Run one schedule again. Gives the run, whose `story()` is what happened."""
    gc.collect()  # what other tests left must not be closed in the middle, as if an actor did
    with no_idle_watch_left():
        return _execute(scenario, directory, _follow(schedule.split()), kills)


class Oracle:
    """Who holds a lock at this moment. Whoever enters next to somebody it may not be next to has broken the lock."""

    def __init__(self, run: Run, permits: int = 1) -> None:
        self.run = run
        self.permits = permits
        self.inside: list[bool] = []
        self.entered = 0

    def check(self) -> None:
        if False in self.inside:
            assert len(self.inside) <= self.permits, f"{len(self.inside)} holders"

    @contextmanager
    def holding(self, shared: bool = False) -> Iterator[None]:
        self.inside.append(shared)
        self.entered += 1
        try:
            self.check()
            self.run.stay()
            yield
        finally:
            self.inside.remove(shared)

    def use(self, hold: Hold | None) -> bool:
        """Be inside, come out, release. False: there is nothing to release."""
        if hold is None:
            return False
        with self.holding(getattr(hold.lock, "shared", False)):
            pass
        hold.release()
        return True
