"""`TaskQueue`: tasks in a directory, each done by exactly one worker (`places`, `journal`, `claim`).

Put is atomic: a task is there whole, or not at all. By its id it is there once. Whatever happens to it is added to its
file, by who holds the kernel lock on that; a worker that dies lets go of it, and another one takes it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import groupby, islice
from time import monotonic, sleep
from typing import Any

from .. import process, system
from ..errors import CorruptStore, HoldfastError, NotLocked, UnsafePath, Unsupported
from ..files import remove
from ..locks import base
from ..paths import mount_of
from . import about, journal
from .claim import Claim, Desk
from .clock import Clock
from .errors import NoSuchTask
from .finder import Finder
from .inventory import Inventory
from .journal import Task
from .limits import Limits
from .lines import Lines
from .looking import Looker
from .places import Places, file_name, listed, make, task_id
from .putting import Putter, check_options, check_settings
from .schedule import OPTIONS, Schedules, id_of, last_due, timing
from .sequence import Sequence
from .sheet import TAKEN, WAITS, is_on_sheet
from .sheets import Sheets
from .slots import Slots
from .taking import Taker
from .verdict import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .idle import Idle

_USUAL: dict[str, Any] = {"priority": 0, "attempts": 3, "delay": 0, "timeout": None, "key": None, "limit": 1}
_A_MOMENT, _PATIENCE = 0.001, 5.0  # seconds
_AT_ONCE = 1000


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
        check_settings(max_pending, retry_after=retry_after, retry_most=retry_most, stale_after=stale_after)
        self.path = os.path.abspath(path)
        self.durable = durable
        self.max_pending = max_pending
        self.retry_after = retry_after
        self.retry_most = retry_most
        self.stale_after = stale_after
        self._mode = mode
        self._places = Places(self.path)
        about.open_directory(self._places, durable=durable, mode=mode)
        mount = mount_of(system.stat(self.path).st_dev, self.path)
        if mount.reads_old:
            raise Unsupported(
                f"{self.path}: {mount.where} is {mount.kind}, whose clients may read old content from their cache, so "
                "that two machines could run the same task. Use a disk of one machine, or CIFS with the mount option "
                "nolease.",
                path=self.path,
            )
        self.is_shared = not mount.is_ours
        self._sequence = Sequence(self._places, mode, ranged=mount.ranged)
        self.clock = Clock(self.path)
        self.schedules = Schedules(self.path, mode)
        self._put_at: dict[str, float] = {}
        usable = system.TELLS_NAMES and not self.is_shared
        self._sheets = Sheets(self._places, mode=mode, durable=durable, usable=usable)
        slots = Slots(self._places, mode)
        self._inventory = Inventory(self._places, self._sheets, slots, self.clock, self._is_at_work)
        self._local = threading.local()
        self._putter = Putter(
            self._places,
            self._sequence,
            self._sheets,
            self.clock,
            durable=durable,
            mode=mode,
            most=max_pending,
            count_waiting=self._inventory.count_waiting,
        )
        limits = Limits(self._places, self._sequence)
        self._desk = Desk(
            self._places,
            durable=durable,
            shared=self.is_shared,
            ranged=mount.ranged,
            mode=mode,
            put_back=self._putter.put_back,
            ended=limits.ended,
            delay_after=self._delay_after,
        )
        self._lines = Lines(self._places, self._sheets, slots, self._desk)
        self._looker = Looker(self._places, self._sheets, self._lines, self._is_at_work)
        finder = Finder(self._places, self._sequence, self._sheets, self.clock)
        self.taker = Taker(self._places, self._desk, finder, limits, self._lines, stale_after)

    def __repr__(self) -> str:
        return f"holdfast.TaskQueue({self.path!r})"

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
        check_options(priority, attempts, delay, timeout, key, limit)
        if self.max_pending is not None and (id is None or id not in self):
            self._putter.wait_for_room(wait)
        if id is None:
            if delay == 0 and key is None:
                line = journal.first_line("", payload, priority, attempts, timeout, key, limit, delay)
                if self._sheets.has_room_for(line) and (id := self._putter.put_line(line, priority)) is not None:
                    return id
            id = _random_id()
        elif is_on_sheet(id) and (entry := self._sheets.find(id)) is not None and entry.kind in (WAITS, TAKEN):
            if self.durable:
                entry.sheet.sync()  # whoever put it may have died before it did
            return id
        self._putter.put(
            id, journal.first_line(id, payload, priority, attempts, timeout, key, limit, delay), priority, delay
        )
        return id

    def put_all(
        self,
        payloads: Iterable[object],
        *,
        priority: int = 0,
        delay: float = 0,
        attempts: int = 3,
        timeout: float | None = None,
        key: str | None = None,
        limit: int = 1,
        wait: float | None = 0,
    ) -> list[str]:
        """`put` for each of them, and give their ids. With `durable`, much faster: the disk is waited for once."""
        check_options(priority, attempts, delay, timeout, key, limit)
        ids: list[str] = []
        payloads = iter(payloads)
        options: dict[str, Any] = {"priority": priority, "attempts": attempts, "delay": delay, "timeout": timeout}
        options.update(key=key, limit=limit)
        while some := list(islice(payloads, _AT_ONCE)):
            if self.max_pending is not None:
                ids += [self.put(payload, wait=wait, **options) for payload in some]
                continue
            lines = [journal.first_line("", payload, **options) for payload in some]
            needs_file = [delay > 0 or key is not None or not self._sheets.has_room_for(line) for line in lines]
            for has_files, group in groupby(range(len(some)), needs_file.__getitem__):
                part = list(group)
                put = [] if has_files else self._putter.put_lines([lines[number] for number in part], priority)
                named = [(_random_id(), some[number]) for number in part[len(put) :]]
                self._putter.put_all(
                    [(id, journal.first_line(id, payload, **options), priority, delay) for id, payload in named]
                )
                ids += [*put, *(id for id, _ in named)]
        return ids

    def schedule(
        self,
        name: str,
        payload: object = None,
        *,
        cron: str | None = None,
        every: float | None = None,
        **options: Any,
    ) -> None:
        """Have workers put a task again and again: `cron` is five fields, in UTC, `every` is seconds.

        In place of the schedule with this name, if there is one. The options are those of `put`.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a schedule is a text that is not empty, not {name!r}")
        file_name(name)
        said = {"name": name, "payload": payload, "cron": cron, "every": every, "options": options}
        unknown = set(options) - OPTIONS
        if unknown:
            raise TypeError(f"a schedule cannot have {', '.join(sorted(unknown))}")
        check_options(**{**_USUAL, **options})
        id = f"{name}@2000-01-01T00:00:00Z"  # that of a task that is put must be possible, and so must its first line
        file_name(id)
        journal.first_line(id, payload, 0, 1, None, None, 1, 0)
        self.schedules.write(name, {**said, "since": self.clock.now()})

    def unschedule(self, name: str) -> bool:
        """True: there was one."""
        return self.schedules.remove(name)

    def put_scheduled(self) -> float | None:
        """Put what is due by its schedule, once, whoever looks. Gives when the next one is; None: never."""
        now = self.clock.now()
        moments: list[float | None] = []
        wrong: Exception | None = None
        for name, said in self.schedules.all().items():
            try:
                moments.append(self._put_if_due(name, said, now))
            except (OSError, HoldfastError) as error:
                wrong = wrong or error
            except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                wrong = wrong or ValueError(f"{self.path}: schedule {name!r} is wrong: {error}")  # edited, perhaps
        if wrong is not None:
            raise wrong
        return min((moment for moment in moments if moment is not None), default=None)

    def _put_if_due(self, name: str, said: dict[str, Any], now: float) -> float | None:
        """Gives when it is due next."""
        when = timing(said)
        due = last_due(when, self._put_at.get(name, said["since"]), now)
        if due is not None:
            self.put(said["payload"], id=id_of(name, due), **said["options"])
            self._put_at[name] = due
        return when.after(now)

    def next_scheduled(self, name: str) -> datetime | None:
        """When a schedule is due next; None: never, or there is none of this name."""
        said = self.schedules.all().get(name)
        due = None if said is None else timing(said).after(self.clock.now())
        return None if due is None else datetime.fromtimestamp(due, timezone.utc)

    def _delay_after(self, tried: int) -> float:
        from random import uniform

        longest = min(self.retry_most, self.retry_after * 2 ** min(tried - 1, 50))
        return uniform(longest / 2, longest)

    # Taking.

    def claim(self, timeout: float | None = 0) -> Claim | None:
        """The next task, which is ours then. None: nothing was to be done for `timeout` seconds; None waits for ever.

        `with queue.claim() as task:` completes it, or has it tried again if an exception comes.
        """
        claim = self.taker.try_claim()
        if claim is not None or timeout == 0:
            return claim
        return self._idle().wait(None if timeout is None else monotonic() + timeout)

    def _idle(self) -> Idle:
        """Kept, for each thread: to close what one waits with takes longer than to wait."""
        from .idle import Idle

        idle: Idle | None = getattr(self._local, "idle", None)
        if idle is None or idle.registry is not process.registry:
            idle = self._local.idle = Idle(self)
        return idle

    def check_writable(self) -> None:
        """Raise PermissionError if this process may only look."""
        effective = os.access in os.supports_effective_ids
        for folder in (self.path, *self._places.folders):
            make(folder)  # somebody has tidied up
            if not os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
                raise PermissionError(
                    errno.EACCES, "to work on these tasks, one has to be allowed to write here", folder
                )

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

    # Looking.

    def __iter__(self) -> Iterator[Task]:
        """Every task there is, in whatever state. This claims nothing."""
        return self._looker.all()

    def get(self, id: str) -> Task:
        """What is known of a task. Raises NoSuchTask."""
        task = self._looker.find(id)
        if task is None:
            raise self._no_such(id)
        return task

    def _no_such(self, id: str) -> NoSuchTask:
        return NoSuchTask(f"{self.path}: there is no task {id!r}", path=self.path)

    def __contains__(self, id: str) -> bool:
        try:
            return self._looker.find(id) is not None
        except (CorruptStore, OSError):
            return True

    def files_of(self, id: str) -> tuple[str, ...]:
        """One of these is written to when something happens to a task."""
        return self._looker.files_of(id)

    def _is_at_work(self, path: str) -> bool:
        return self.is_shared or self._desk.is_locked(path)

    def ids(self, state: str) -> list[str]:
        """Of the tasks in a state, by where they are: no file is read. Those that wait come in their order."""
        if state not in journal.STATES:
            raise ValueError(f"a task is {', '.join(journal.STATES)}; not {state!r}")
        return [task_id(name) for name in self._inventory.names(state)]

    def put_off(self) -> dict[str, float | None]:
        """What waits and cannot be begun now, and for how many seconds; None: until others of its key have ended."""
        return self._inventory.put_off()

    def stats(self) -> dict[str, int]:
        """How many tasks are in which state. `delayed` and `parked` are among the pending ones."""
        return self._inventory.stats()

    def is_empty(self) -> bool:
        """Is there nothing left to be done, and nobody at it?"""
        return self._inventory.is_empty()

    def wait(self, ids: str | Iterable[str], timeout: float | None = None) -> list[Task]:
        """Until all of these have ended. Raises Timeout."""
        wanted = [ids] if isinstance(ids, str) else list(ids)
        deadline = None if timeout is None else monotonic() + timeout
        from .idle import ended

        return [ended(self, id, deadline) for id in wanted]

    # Changing.

    def retry(self, id: str) -> None:
        """Have a task that has ended, in whatever way, done again, with all its attempts."""
        self._give_file(id)
        with self._opened(id) as claim:
            if claim.task.state == "pending" and self._putter.rescue(file_name(id)):
                return
            if claim.task.state not in journal.ENDED:
                raise NotLocked(f"{self.path}: task {id!r} has not ended, it is {claim.task.state}", path=self.path)
            self._inventory.remove_places({claim.inode} & self._inventory.cancelled_in_place())
            self._putter.put_again(claim)

    def _give_file(self, id: str) -> None:
        """Of its own, if it has none and nobody works on it."""
        entry = None if system.access(self._places.own(id), 0) else self._sheets.find(id)
        if entry is None:
            return
        if entry.kind == WAITS:
            self._lines.give_file(entry)
        elif entry.kind == TAKEN:
            _, slot = self._lines.text(id) or (b"", "")
            claim = self._lines.left_in(slot) if slot else None
            if claim is not None:
                claim.abandon()  # its worker is dead; it has a file now
            elif self.get(id).state == "done":
                self._lines.give_file_to_done(entry)

    @contextmanager
    def _opened(self, id: str) -> Iterator[Claim]:
        """A task that nobody works on, locked. Raises NotLocked if somebody does."""
        own = self._places.own(id)
        claim = self._desk.open_named(own, "")
        if claim is None:
            if id not in self:
                raise self._no_such(id)
            raise NotLocked(f"{self.path}: task {id!r} is being worked on", path=self.path)
        try:
            yield claim
        finally:
            claim.abandon()

    def cancel(self, id: str) -> bool:
        """Have a task not be done. False: it has ended already. If it runs, its worker ends it."""
        deadline = monotonic() + _PATIENCE
        while monotonic() < deadline:
            task = self.get(id)
            if task.state in journal.ENDED:
                return False
            if self._is_locked(id):
                if task.state == "running":
                    Verdict("cancelled", "cancelled").write(self._places, task)
                    again = self.get(id)
                    if (again.state, again.token) == ("running", task.token):
                        return True  # its worker has not decided yet, and so sees that before it does
                    remove(f"{self._places.ending}/{file_name(id)}")
                    continue
                sleep(_A_MOMENT)  # it is just being begun, or ended
                continue
            try:
                self._give_file(id)
                with self._opened(id) as claim:
                    if claim.task.state in journal.ENDED:
                        return False
                    # Whoever comes to the place where it waits sees that, and removes it there.
                    claim.say(**{"is": "cancelled"})
                    with suppress(FileExistsError):
                        system.link(self._places.own(id), f"{self._places.cancelled}/{file_name(id)}")
                    return True
            except (NotLocked, FileNotFoundError):
                continue  # somebody was quicker: look again
        text = (
            f"{self.path}: task {id!r} is locked, and nobody says that it runs: its process has been stopped, perhaps"
        )
        raise NotLocked(text, path=self.path)

    def _is_locked(self, id: str) -> bool:
        """Does somebody work on it?"""
        own = self._places.own(id)
        found = None if system.access(own, 0) else self._lines.text(id)
        if found is None:
            return self._desk.is_locked(own)
        return bool(found[1]) and self._desk.is_locked(self._lines.slots.path(found[1]))

    def purge(self, older_than: float = 0, *, states: Collection[str] = journal.ENDED) -> int:
        """Remove tasks that have ended so, more than so many seconds ago. Gives how many.

        The last one of a schedule stays: that it is there says that it was put.
        """
        from .purging import Purge

        if not isinstance(older_than, int | float):
            raise TypeError(f"older_than is seconds, not {older_than!r}")
        wanted = {states} if isinstance(states, str) else set(states)
        for state in wanted - journal.ENDED:
            raise ValueError(f"what can be purged is {', '.join(sorted(journal.ENDED))}; not {state!r}")
        purge = Purge(self._places, self._desk, self._inventory, self._sheets, self._lines, older_than)
        removed = purge.files(wanted, set(map(file_name, self.schedules.last_ids(self.clock.now()))))
        if "done" in wanted:
            self.taker.finder.shut_sheets()
            removed += purge.sheets()
        self._putter.rescue_unplaced()
        purge.what_was_never_put()
        return removed

    def _file_again(self, name: str) -> bool:
        """A task that has failed, or was cancelled, and is not where these are."""
        own = f"{self._places.tasks}/{name}"
        try:
            state = journal.read_file(own).state
            folder = {"failed": self._places.failed, "cancelled": self._places.cancelled}.get(state)
            if folder is None:
                return False
            system.link(own, f"{folder}/{name}")
        except (OSError, CorruptStore):
            return False
        return True

    def rescue(self) -> None:
        """Bring to its place what somebody was putting who died. Workers do so when they begin."""
        self._putter.rescue_unplaced()

    def recover(self) -> int:
        """Give a place to what has none, because somebody died, or removed it by hand. Gives how many."""
        found = self._lines.recover()
        for name in listed(self._places.tasks):
            found += self._putter.rescue(name) or self._file_again(name)
        return found


def _random_id() -> str:
    return os.urandom(12).hex()
