"""`TaskQueue`: tasks in a directory, each done by exactly one worker (`places`, `journal`, `claim`).

Put is atomic: a task is there whole, or not at all. By its id it is there once. Whatever happens to it is added to its
file, by who holds the kernel lock on that; a worker that dies lets go of it, and another one takes it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count as counter
from time import monotonic, sleep
from typing import Any

from .. import owner, system
from ..errors import CorruptStore, NotLocked, UnsafePath, Unsupported
from ..locks import base
from ..paths import mount_at
from . import journal
from .claim import Claim, Desk, Verdict
from .clock import Clock
from .errors import NoSuchTask, QueueFull
from .finder import Finder, count, names_in
from .journal import Task
from .limits import Limits
from .places import Places, file_name, listed, make, move, name_of, number_of, task_id
from .sequence import LATER, Sequence

FORMAT = 1
_LARGEST = 10**9
_A_SECOND = 1.0
_BETWEEN_LOOKS = 0.5  # seconds after which who is busy looks for tasks of the dead


class TaskQueue:
    """Tasks in a directory, which is made if it is not there.

    durable: what is put, and how it ended, survives a power failure
    max_pending: `put` refuses more than so many that wait, or waits itself
    retry_after, retry_most: seconds until the second attempt, twice as many until the third, and so on
    stale_after: seconds after which a task is taken from a worker on another machine that is not heard of
    """

    def __init__(
        self,
        directory: base.StrPath,
        *,
        durable: bool = True,
        max_pending: int | None = None,
        retry_after: float = 1.0,
        retry_most: float = 300.0,
        stale_after: float = 300.0,
        mode: int = 0o644,
    ) -> None:
        path = os.fsdecode(directory)
        if not path:
            raise UnsafePath("an empty path cannot name a queue", path=path)
        self.path = os.path.abspath(path)
        self.durable = durable
        self.max_pending = max_pending
        self.retry_after = retry_after
        self.retry_most = retry_most
        self.stale_after = stale_after
        self._mode = mode
        self._places = Places(self.path)
        self._open()
        mount = mount_at(system.stat(self.path).st_dev, self.path)
        if mount.refusal:
            raise mount.refuse(self.path)
        self.is_shared = not mount.is_ours
        self._sequence = Sequence(self._places, mode)
        self.clock = Clock(self.path)
        self._finder = Finder(self._places, self._sequence, self.clock)
        self.limits = Limits(self._places, self._sequence)
        self._desk = Desk(
            self._places,
            durable=durable,
            shared=self.is_shared,
            ranged=mount.ranged,
            put_back=self._put_back,
            ended=self.limits.ended,
            delay_after=self._delay_after,
        )
        self._looked_at = 0.0
        self._leases: dict[str, tuple[int, float]] = {}
        self._room = 0  # so many may be put before one has to count
        self._new_name = counter().__next__

    def __repr__(self) -> str:
        return f"holdfast.TaskQueue({self.path!r})"

    def _open(self) -> None:
        about = f"{self.path}/queue.json"
        try:
            with open(about, "rb") as file:
                said = json.loads(file.read())
            number = said["format"]
        except FileNotFoundError:
            self._make(about)
            return
        except (ValueError, KeyError, TypeError):
            raise CorruptStore(f"{about} does not describe a queue; it was left as it is.", path=about) from None
        if number != FORMAT:
            raise Unsupported(
                f"{self.path}: this queue has format {number}, and this version of Holdfast knows {FORMAT}.",
                path=self.path,
            )
        for folder in self._places.folders:
            make(folder)

    def _make(self, about: str) -> None:
        make(self.path)
        ours = {os.path.basename(folder) for folder in self._places.folders} | {"sequence", "limits", "queue.json"}
        others = [name for name in listed(self.path) if name not in ours and not name.startswith(("clock-", "queue."))]
        if others:
            text = f"there is something else in this directory ({others[0]}); give the queue one of its own"
            raise FileExistsError(errno.EEXIST, text, self.path)
        for folder in self._places.folders:
            make(folder)
        private = f"{about}.{os.urandom(8).hex()}.tmp"
        fd = system.open_fd(private, system.O_NEW, self._mode)
        try:
            system.write(fd, json.dumps({"format": FORMAT, "what": "tasks of Holdfast"}).encode() + b"\n")
            if self.durable:
                system.fsync(fd)
        finally:
            system.close(fd)
        system.rename(private, about)
        if self.durable:
            _sync_folders(self.path, os.path.dirname(self.path))

    # Putting.

    def put(
        self,
        payload: object,
        *,
        id: str | None = None,
        priority: int = 0,
        delay: float = 0,
        attempts: int = 3,
        timeout: float | None = None,
        key: str | None = None,
        limit: int = 1,
        wait: float | None = 0,
    ) -> str:
        """Add a task, and give its id. If there is one with this id, nothing happens.

        payload: whatever JSON can say
        delay: seconds before which it is not begun
        attempts: how often it is tried before it has failed
        timeout: seconds after which an attempt is ended
        key, limit: of the tasks with one key, so many run at the same time
        wait: how long to wait if there are `max_pending`; 0: QueueFull at once, None: for ever
        """
        _check(priority, attempts, delay, timeout, limit)
        if self.max_pending is not None:
            self._wait_for_room(wait)
        if id is None:
            id = os.urandom(12).hex()
        name = file_name(id)
        line = journal.first_line(id, payload, priority, attempts, timeout, key, limit)
        private = self._private()
        fd = system.open_fd(private, system.O_NEW, self._mode)
        try:
            _write_all(fd, line)
            target = self._put_file(private, name, priority, delay)
            if self.durable and target:
                system.fsync(fd)
                _sync_folders(self._places.tasks, os.path.dirname(target))
        except BaseException:
            _unlink(private)
            raise
        finally:
            system.close(fd)
        return id

    def _private(self) -> str:
        return f"{self._places.new}/{os.getpid()}.{self._new_name()}.{os.urandom(4).hex()}"

    def _put_file(self, private: str, name: str, priority: int, delay: float) -> str | None:
        """Under its own name, which must be free, and then in its place. None: there is one already."""
        own = f"{self._places.tasks}/{name}"
        try:
            system.link(private, own)
        except FileExistsError:
            if not self._is_stranded(own):
                _unlink(private)
                return None
            system.unlink(private)  # who put it died before it was in its place
            system.link(own, private)
        return self._enqueue(private, name, priority, delay)

    def _enqueue(self, source: str, name: str, priority: int, delay: float) -> str:
        found = []

        def move_to(number: int) -> None:
            if delay > 0:
                found.append(self._places.later(self.clock.now() + delay, priority, name))
            else:
                found.append(self._places.waiting(priority, number, name))
            move(source, found[-1])

        self._sequence.put(LATER if delay > 0 else priority, move_to)
        return found[-1]

    def _is_stranded(self, own: str) -> bool:
        """Is it in no place, although it has not ended? Then who put it, or put it back, died."""
        try:
            if system.stat(own).st_nlink > 1:
                return False
            return self._read(own).state == "pending"
        except (FileNotFoundError, CorruptStore):
            return False

    def put_all(self, payloads: Iterable[object], **options: Any) -> list[str]:
        """`put` for each of them."""
        return [self.put(payload, **options) for payload in payloads]

    def _wait_for_room(self, wait: float | None) -> None:
        assert self.max_pending is not None
        deadline = None if wait is None else monotonic() + wait
        while self._room <= 0:
            self._room = (self.max_pending - self._count_waiting() + 1) // 2 if self.max_pending else 0
            if self._room > 0:
                break
            if deadline is not None and monotonic() >= deadline:
                raise QueueFull(
                    f"{self.path}: {self.max_pending} tasks wait already. Start more workers, or wait for room with "
                    "put(…, wait=seconds).",
                    path=self.path,
                )
            sleep(0.01)
        self._room -= 1

    def _count_waiting(self) -> int:
        places = self._places
        return count(places.pending, 2) + count(places.delayed, 1) + count(places.parked, 1)

    def _put_back(self, place: str, priority: int, delay: float) -> None:
        """From running/ to where it waits: for a time, or in its old place."""
        name = name_of(place)
        source = f"{self._places.running}/{place}"
        if delay > 0:
            self._enqueue(source, name, priority, delay)
        else:
            self._sequence.put(priority, lambda _: move(source, self._places.waiting(priority, number_of(place), name)))

    def _delay_after(self, tried: int) -> float:
        from random import uniform

        longest = min(self.retry_most, self.retry_after * 2 ** min(tried - 1, 50))
        return uniform(longest / 2, longest)

    # Taking.

    def claim(self, timeout: float | None = 0) -> Claim | None:
        """The next task, which is ours then. None: nothing was to be done for `timeout` seconds; None waits for ever.

        `with queue.claim() as task:` completes it, or has it tried again if an exception comes.
        """
        claim = self._try_claim()
        if claim is not None or timeout == 0:
            return claim
        from .idle import Idle

        with Idle(self) as idle:
            return idle.wait(None if timeout is None else monotonic() + timeout)

    def _try_claim(self) -> Claim | None:
        now = monotonic()
        if now - self._looked_at > _BETWEEN_LOOKS:
            self._looked_at = now
            claim = self._take_over()
            if claim is not None:
                return claim
        for source, place in self._finder:
            try:
                claim = self._desk.take(source, place, self.limits.admit)
            except CorruptStore as error:
                self._put_aside(source, place, error)
                continue
            if claim is not None:
                self._finder.found()
                return claim
        return None

    def _take_over(self) -> Claim | None:
        """One that a dead worker has left."""
        there = listed(self._places.running)
        self._leases = {place: lease for place, lease in self._leases.items() if place in there}
        for place in there:
            try:
                claim = self._desk.abandoned(place)
            except CorruptStore as error:
                self._put_aside(f"{self._places.running}/{place}", place, error)
                continue
            if claim is not None and self._go_on(claim):
                return claim
        self.limits.look()
        return None

    def _go_on(self, claim: Claim) -> bool:
        """With what somebody left. True: by doing it, now."""
        task = claim.task
        if not self._is_over(claim):
            claim.abandon()
            return False
        if self.settle(claim):
            return False
        if task.state == "running":
            if task.tried >= task.attempts:
                claim.fail(f"the worker died, the last of {task.tried} times")
                return False
            claim.say(**{"is": "pending", "because": "the worker died"})
        if task.key is not None and not self.limits.admit(task, f"{self._places.running}/{claim.place}", claim.place):
            claim.abandon()
            return False
        claim.begin()
        return True

    def settle(self, claim: Claim) -> bool:
        """Put it away if that was decided: by its worker, or by somebody about its worker."""
        if claim.settle():
            return True
        verdict = Verdict.of(self._places, claim.task) if claim.task.state == "running" else None
        if verdict is not None:
            claim.end_as(verdict)
        return verdict is not None

    def _is_over(self, claim: Claim) -> bool:
        """It is not locked. Is that enough? Of a worker on another machine, not before its lease has run out."""
        task = claim.task
        if not self.is_shared or task.state != "running" or task.boot in (None, owner.boot_id()):
            return True
        seen, since = self._leases.get(claim.place, (0, 0.0))
        if seen != claim.renewed:
            self._leases[claim.place] = (claim.renewed, monotonic())  # by our own clock: theirs may be wrong
            return False
        return monotonic() - since > self.stale_after

    def _put_aside(self, source: str, place: str, error: CorruptStore) -> None:
        """What nobody can do must not be in the way of the others. It is left to a person, in failed/."""
        import logging

        logging.getLogger("holdfast").warning("%s", error)
        try:
            move(source, f"{self._places.failed}/{name_of(place)}")
        except FileNotFoundError:
            pass

    def end_attempt(self, place: str, verdict: Verdict, kill: Callable[[], None]) -> None:
        """End a task whose worker has to be killed for that. Whoever gets it afterwards does as the verdict says."""
        try:
            task = self._read(f"{self._places.running}/{place}")
        except (FileNotFoundError, CorruptStore):
            kill()
            return
        verdict.write(self._places, task)
        kill()
        self.settle_place(place)

    def settle_place(self, place: str) -> bool:
        """If its worker is dead, and it was said how this ends."""
        claim = self._desk.abandoned(place)
        if claim is None:
            return False
        settled = self.settle(claim)
        if not settled:
            claim.abandon()
        return settled

    def running(self) -> dict[str, Task]:
        """What is being done, by its place in running/."""
        found = {}
        for place in listed(self._places.running):
            try:
                found[place] = self._read(f"{self._places.running}/{place}")
            except (FileNotFoundError, CorruptStore):
                pass
        return found

    def verdicts(self) -> list[str]:
        """The ids of tasks that are to be ended, or were."""
        return [task_id(name) for name in listed(self._places.ending)]

    def reopened(self) -> TaskQueue:
        """The same queue, for another process or thread."""
        return TaskQueue(
            self.path,
            durable=self.durable,
            max_pending=self.max_pending,
            retry_after=self.retry_after,
            retry_most=self.retry_most,
            stale_after=self.stale_after,
            mode=self._mode,
        )

    def look(self) -> None:
        """Forget what is known of what waits: somebody may have changed it by hand."""
        self._finder.look()
        self._looked_at = 0.0

    # Looking.

    def __iter__(self) -> Iterator[Task]:
        """Every task there is, in whatever state. This claims nothing."""
        for name in listed(self._places.tasks):
            try:
                yield self._read(f"{self._places.tasks}/{name}")
            except (FileNotFoundError, CorruptStore):
                pass  # purged meanwhile, or damaged: `get` says how

    def get(self, id: str) -> Task:
        """What is known of a task. Raises NoSuchTask."""
        try:
            return self._read(self._own(id))
        except FileNotFoundError:
            raise self._no_such(id) from None

    def _no_such(self, id: str) -> NoSuchTask:
        return NoSuchTask(f"{self.path}: there is no task {id!r}", path=self.path)

    def __contains__(self, id: str) -> bool:
        return os.path.exists(self._own(id))

    def _own(self, id: str) -> str:
        return f"{self._places.tasks}/{file_name(id)}"

    def _read(self, path: str) -> Task:
        fd = system.open_fd(path, system.O_READ)
        try:
            task = journal.parse(journal.read(fd), path)
        finally:
            system.close(fd)
        if task.state == "running" and not self.is_shared and not self._desk.is_locked(path):
            fd = system.open_fd(path, system.O_READ)  # it may have ended between the two looks
            try:
                task = journal.parse(journal.read(fd), path)
            finally:
                system.close(fd)
            if task.state == "running":
                object.__setattr__(task, "state", "pending")  # its worker is dead, and the next one takes it
        return task

    def stats(self) -> dict[str, int]:
        """How many tasks are in which state. `delayed` and `parked` are among the pending ones."""
        places = self._places
        delayed, parked = count(places.delayed, 1), count(places.parked, 1)
        running, failed = len(listed(places.running)), len(listed(places.failed))
        pending = count(places.pending, 2) + delayed + parked
        total = len(listed(places.tasks))
        cancelled = len(listed(places.cancelled))
        ended = max(0, total - pending - running - failed - cancelled)
        return {
            "pending": pending,
            "running": running,
            "done": ended,
            "failed": failed,
            "cancelled": cancelled,
            "delayed": delayed,
            "parked": parked,
        }

    def is_empty(self) -> bool:
        """Is there nothing left to be done, and nobody at it?"""
        places = self._places
        for folder, depth in ((places.pending, 2), (places.running, 0), (places.delayed, 1), (places.parked, 1)):
            if next(names_in(folder, depth), None) is not None:
                return False
        return True

    def wait(self, ids: str | Iterable[str], timeout: float | None = None) -> list[Task]:
        """Until all of these have ended. Raises Timeout."""
        wanted = [ids] if isinstance(ids, str) else list(ids)
        deadline = None if timeout is None else monotonic() + timeout
        from .idle import ended

        return [ended(self, id, deadline) for id in wanted]

    # Changing.

    def retry(self, id: str) -> None:
        """Have a task that has ended, in whatever way, done again, with all its attempts."""
        with self._opened(id) as claim:
            if claim.task.state not in journal.ENDED:
                raise NotLocked(f"{self.path}: task {id!r} has not ended, it is {claim.task.state}", path=self.path)
            claim.say(**{"is": "pending", "again": True})
            for folder in (self._places.failed, self._places.cancelled):
                _unlink(f"{folder}/{file_name(id)}")
            self._give_place(claim.task)

    def _give_place(self, task: Task) -> None:
        """To a task that has none."""
        name = file_name(task.id)
        link = self._private()
        system.link(f"{self._places.tasks}/{name}", link)
        self._enqueue(link, name, task.priority, 0)

    @contextmanager
    def _opened(self, id: str) -> Iterator[Claim]:
        """A task that nobody works on, locked. Raises NotLocked if somebody does."""
        own = self._own(id)
        claim = self._desk.open(own, "")
        if claim is None:
            if not system.access(own, 0):
                raise self._no_such(id)
            raise NotLocked(f"{self.path}: task {id!r} is being worked on", path=self.path)
        try:
            yield claim
        finally:
            claim.abandon()

    def cancel(self, id: str) -> bool:
        """Have a task not be done. False: it has ended already. If it runs, its worker ends it."""
        while True:
            task = self.get(id)
            if task.state in journal.ENDED:
                return False
            if self._desk.is_locked(self._own(id)):
                Verdict("cancelled", "cancelled").write(self._places, task)
                if self.get(id).token == task.token:
                    return True
                continue  # it has just been begun, or begun again
            try:
                with self._opened(id) as claim:
                    if claim.task.state in journal.ENDED:
                        return False
                    claim.say(**{"is": "cancelled"})
                    place = self._place_of(id)
                    if place is not None:
                        move(place, f"{self._places.cancelled}/{file_name(id)}")
                    return True
            except (NotLocked, FileNotFoundError):
                continue  # somebody was quicker: look again

    def purge(self, older_than: float = 0) -> int:
        """Remove tasks that have ended more than so many seconds ago. Gives how many."""
        import time

        removed = 0
        for task in self:
            if task.state not in journal.ENDED:
                continue
            if task.ended_at is not None and time.time() - task.ended_at.timestamp() < older_than:
                continue
            name = file_name(task.id)
            for folder in (self._places.failed, self._places.cancelled, self._places.ending):
                _unlink(f"{folder}/{name}")
            _unlink(f"{self._places.tasks}/{name}")
            removed += 1
        self._remove_what_was_never_put()
        return removed

    def _remove_what_was_never_put(self) -> None:
        import time

        for name in listed(self._places.new):
            path = f"{self._places.new}/{name}"
            try:
                if time.time() - system.stat(path).st_mtime > 3600:
                    _unlink(path)
            except FileNotFoundError:
                pass

    def recover(self) -> int:
        """Give a place to what has none, because somebody died, or removed it by hand. Gives how many."""
        found = 0
        for name in listed(self._places.tasks):
            own = f"{self._places.tasks}/{name}"
            if self._is_stranded(own):
                self._give_place(self._read(own))
                found += 1
        return found

    def _place_of(self, id: str) -> str | None:
        """Where a task waits. Looked for: nobody needs it but who cancels."""
        name = file_name(id)
        places = self._places
        for folder, depth in ((places.pending, 2), (places.delayed, 1), (places.parked, 1), (places.running, 0)):
            for where, place in names_in(folder, depth):
                if place.endswith(f".{name}"):
                    return f"{where}/{place}"
        return None


def _check(priority: int, attempts: int, delay: float, timeout: float | None, limit: int) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > _LARGEST:
        raise ValueError(f"a priority is a whole number between -{_LARGEST} and {_LARGEST}, not {priority!r}")
    if not isinstance(attempts, int) or attempts < 1:
        raise ValueError(f"attempts is how often a task may be tried, not {attempts!r}")
    if not isinstance(delay, int | float) or not 0 <= delay < 1e10:
        raise ValueError(f"delay is seconds, not {delay!r}")
    if timeout is not None and (not isinstance(timeout, int | float) or not timeout > 0):
        raise ValueError(f"timeout is seconds, or None; not {timeout!r}")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit is how many may run at once, not {limit!r}")


def _write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[system.write(fd, text) :]


def _unlink(path: str) -> None:
    try:
        system.unlink(path)
    except FileNotFoundError:
        pass


def _sync_folders(*paths: str) -> None:
    for path in paths:
        fd = system.open_fd(path, system.O_SYNCABLE_FOLDER)
        try:
            system.fsync(fd)
        finally:
            system.close(fd)
