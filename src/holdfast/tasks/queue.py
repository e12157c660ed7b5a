"""`TaskQueue`: tasks that are shared out among workers. Each is done by one worker at a time.

The queue checks what its users pass in and decides what happens when (`policy`, `schedule`). An engine stores the tasks
(`store`): SQLite in a directory, or PostgreSQL.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from time import monotonic, time
from typing import Any

from .. import process
from ..errors import NotLocked, Timeout, UnsafePath
from ..wait import RECHECK_S, in_thread
from .claim import Claim
from .claimer import Claimer
from .errors import NoSuchTask, QueueFull
from .functions import TaskFunction
from .model import STATES, check_seconds, check_states, new_task, seconds_of
from .policy import Retries
from .schedule import Schedule
from .sql import Store
from .store import ENDED, OPEN, WAITING, NewTask, Selection, Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime

    from ..locks.base import StrPath

_AT_ONCE = 1000  # tasks in one transaction
_PRUNED_AT_ONCE = 500


class TaskQueue:
    """Tasks in a directory, which is made if it does not exist, or in PostgreSQL ("postgresql://user@host/db").

    durable: `put` and `complete` return when the disk has the data. False: completions are written together. A
        PostgreSQL server decides itself when it syncs
    max_pending: `put` raises QueueFull, or waits, while this number of tasks is pending
    retry_after, max_retry_after: seconds until the second attempt; twice as long until the third, and so on; at most
    keep, keep_failed: how long done and cancelled tasks, and failed ones, are kept: seconds, "7d", or None for ever
    mode: of the files in the directory
    """

    def __init__(
        self,
        where: StrPath,
        *,
        durable: bool = True,
        max_pending: int | None = None,
        retry_after: float = 1.0,
        max_retry_after: float = 300.0,
        keep: float | str | None = "7d",
        keep_failed: float | str | None = None,
        mode: int = 0o644,
    ) -> None:
        if max_pending is not None and (not isinstance(max_pending, int) or max_pending < 1):
            raise ValueError(f"max_pending must be an integer of at least 1 or None, not {max_pending!r}")
        if not isinstance(durable, bool):
            raise TypeError(f"durable must be True or False, not {durable!r}")
        if not isinstance(mode, int) or not 0 <= mode <= 0o777:
            raise ValueError(f"mode must be the permissions of a file, such as 0o664, not {mode!r}")
        check_seconds("retry_after", retry_after)
        check_seconds("max_retry_after", max_retry_after)
        self.retries = Retries(retry_after, max_retry_after)
        self.keep = seconds_of("keep", keep)
        self.keep_failed = seconds_of("keep_failed", keep_failed)
        self.durable = durable
        self.max_pending = max_pending
        self.functions: dict[str, TaskFunction] = {}
        self._where = os.fsdecode(where)
        self._mode = mode
        self._open()

    def _open(self) -> None:
        self.store = open_store(self._where, durable=self.durable, mode=self._mode)
        self.path = self.name = self.store.name  # the directory, or the URL without a password
        self._local = threading.local()
        self._claimers: weakref.WeakValueDictionary[int, Claimer] = weakref.WeakValueDictionary()
        self.async_claimers: list[Claimer] = []  # that no call of `aclaim` uses

    def __repr__(self) -> str:
        return f"holdfast.TaskQueue({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        opened = {"store", "_local", "_claimers", "async_claimers"}
        return {name: value for name, value in vars(self).items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def close(self) -> None:
        """Close the connection of this thread. Tasks that it has reserved are given back."""
        for claimer in self.claimers():
            claimer.close()
        self.store.close()

    # Put.

    def put(
        self,
        payload: object,
        *,
        id: str | None = None,
        wait: float | None = 0,
        connection: Any = None,
        **options: Any,
    ) -> str:
        """Add a task and return its id. If a task with this id exists, nothing happens.

        payload: anything that JSON can express
        priority: a task with a higher one comes first (0)
        delay: seconds before the first attempt (0)
        attempts: how often the task is tried before it has failed (3)
        timeout: seconds after which an attempt is killed (None)
        key, limit, rate: of the tasks with one key, `limit` run at a time (1), and `rate` of them start ("10/m")
        after: ids of tasks that must be done before
        wait: seconds to wait if the queue is full; None waits for ever, 0 raises QueueFull at once
        connection: PostgreSQL: add the task in the transaction of this connection
        """
        return self._add([new_task(payload, id=id, **options)], wait, connection)[0]

    async def aput(self, payload: object, **options: Any) -> str:
        """`put` for asyncio and trio."""
        return await in_thread(lambda: self.put(payload, **options))

    def put_all(self, payloads: Iterable[object], *, wait: float | None = 0, **options: Any) -> list[str]:
        """`put` for each payload, a thousand in one transaction. Return the ids.

        If the queue becomes full in the middle, the tasks before stay.
        """
        ids: list[str] = []
        remaining = iter(payloads)
        while some := [new_task(payload, **options) for payload in islice(remaining, _AT_ONCE)]:
            ids += self._add(some, wait)
        return ids

    def _add(self, tasks: list[NewTask], wait: float | None, connection: Any = None) -> list[str]:
        if wait:
            check_seconds("wait", wait)
        if self.max_pending is None:
            return [id for id, _ in self.store.add(tasks, connection=connection)]
        self._write()
        ids: list[str] = []
        with closing(self._changes(wait)) as changes:
            for _ in changes:
                added = self.store.add(tasks[len(ids) :], max_waiting=self.max_pending, connection=connection)
                ids += [id for id, _ in added]
                if len(ids) == len(tasks):
                    return ids
        raise QueueFull(
            f"{self.name}: the queue is full (max_pending={self.max_pending}). Wait for room with put(…, "
            "wait=seconds), or start more workers.",
            path=self.name,
        )

    def _changes(self, timeout: float | None) -> Generator[None, None, None]:
        """Yield now, and whenever a task may have ended, and every second, until the time is over."""
        deadline = None if timeout is None else monotonic() + timeout
        with closing(self.store.changes()) as changes:
            while True:
                yield
                left = RECHECK_S if deadline is None else deadline - monotonic()
                if left <= 0:
                    return
                changes.wait(min(left, RECHECK_S))

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function whose calls can be put: a decorator, with or without options of `put`.

        @queue.task(attempts=5, timeout=60)
        def resize(name, width): ...

        resize.put("a.png", width=200)      # a worker calls it
        resize("a.png", width=200)          # calls it here
        """

        def register(wrapped: Callable[..., Any]) -> TaskFunction:
            made = TaskFunction(self, wrapped, options)
            if made.name in self.functions:
                raise ValueError(f"two functions of this queue are called {made.name}. Give one of them name=…")
            self.functions[made.name] = made
            return made

        return register if function is None else register(function)

    # Schedules.

    def schedule(
        self,
        name: str,
        payload: object = None,
        *,
        cron: str | None = None,
        every: float | None = None,
        tz: str | None = None,
        **options: Any,
    ) -> None:
        """Let workers add a task again and again. A schedule with the same name is replaced.

        payload: of each task, or a function of `@queue.task`, which is called without arguments
        cron: minute, hour, day of the month, month, day of the week: "0 6 * * mon-fri"
        every: seconds, at least 1
        tz: the time zone of `cron`, such as "Europe/Berlin" (UTC)
        options: priority, attempts, timeout, key, limit, rate, as in `put`
        """
        function = None
        if isinstance(payload, TaskFunction):
            function, options = payload.name, {**payload.defaults, **options}
            payload = payload.payload_of()
        made = Schedule(name, payload, cron, every, tz, options, time(), function)
        made.check()
        self.store.set_schedule(name, made.to_json())

    def unschedule(self, name: str) -> bool:
        """Remove a schedule. False: there was none."""
        return self.store.set_schedule(name, None)

    def schedules(self) -> dict[str, Schedule]:
        """All schedules by name."""
        return {name: Schedule.from_json(name, text) for name, (text, _) in self.store.schedules().items()}

    def put_scheduled(self) -> float | None:
        """Add the tasks of all schedules that are due. Return the next moment. Workers call this."""
        now = time()
        following: list[float] = []
        wrong: Exception | None = None
        for name, (text, last) in self.store.schedules().items():
            try:
                schedule = Schedule.from_json(name, text)
                due = schedule.due(last, now)
                if due is not None:
                    self.store.add_moment(name, due, schedule.task(due))
                after = schedule.next_after(now)
                following += [] if after is None else [after.timestamp()]
            except (TypeError, ValueError) as error:  # such as a time zone that this machine does not know
                wrong = ValueError(f"{self.name}: schedule {name!r} cannot be used: {error}")
        if wrong is not None:
            raise wrong  # the other schedules are not in its way
        return min(following, default=None)

    def next_scheduled(self, name: str) -> datetime | None:
        """The next moment of a schedule. None: there is no moment, or no such schedule."""
        schedule = self.schedules().get(name)
        return None if schedule is None else schedule.next_after(time())

    # Claim.

    def claim(self, timeout: float | None = 0) -> Claim | None:
        """The next task, or None if there was none for `timeout` seconds. None waits for ever.

        with queue.claim() as task:         # completes the task, or fails it if the block raises
            print(task.payload)
        """
        return self.store.within(timeout, lambda: self.claimer().wait(timeout))

    async def aclaim(self, timeout: float | None = 0) -> Claim | None:
        """`claim` for asyncio and trio. A cancelled call claims nothing."""
        from .aclaim import aclaim

        return await aclaim(self, timeout)

    def claimer(self) -> Claimer:
        """The claimer of this thread."""
        claimer: Claimer | None = getattr(self._local, "claimer", None)
        if claimer is None or claimer.registry is not process.registry:
            claimer = self._local.claimer = self.new_claimer()
        return claimer

    def new_claimer(self) -> Claimer:
        reserves = not (self.store.is_local and self.durable)
        claimer = Claimer(self.store, self.retries, buffered=not self.durable, reserves=reserves)
        self._claimers[id(claimer)] = claimer
        return claimer

    def claimers(self) -> list[Claimer]:
        """Not `values()`: another thread may add one meanwhile."""
        return [claimer for found in self._claimers.valuerefs() if (claimer := found()) is not None]

    def _write(self) -> None:
        """Write what this process has completed, so that it sees it."""
        for claimer in self.claimers():
            claimer.write()

    # Look.

    def get(self, id: str) -> Task:
        """Everything about a task. Raises NoSuchTask."""
        return self._get([id])[0]

    def _get(self, ids: list[str]) -> list[Task]:
        self._write()
        tasks: list[Task] = []
        for id, task in zip(ids, self.store.get(ids), strict=True):
            if task is None:
                raise NoSuchTask(f"{self.name}: there is no task {id!r}", path=self.name)
            tasks.append(task)
        return tasks

    def __contains__(self, id: str) -> bool:
        return self.store.get([id])[0] is not None

    def __iter__(self) -> Iterator[Task]:
        """All tasks, in the order in which they were put."""
        return self.tasks()

    def tasks(self, states: Collection[str] = STATES) -> Iterator[Task]:
        """The tasks in these states, in the order in which they were put. Claims nothing."""
        wanted = check_states(states, STATES)
        self._write()
        return self.store.tasks([*(wanted - {"pending"}), *(WAITING if "pending" in wanted else ())])

    def stats(self) -> dict[str, int]:
        """How many tasks are in each state. `delayed`, `parked` and `blocked` are parts of `pending`."""
        self._write()
        counts = self.store.count()
        pending = sum(counts[state] for state in WAITING)
        return {"pending": pending, **{state: count for state, count in counts.items() if state != "ready"}}

    def is_empty(self) -> bool:
        """Is no task pending or running?"""
        self._write()
        return not any(self.store.count(OPEN, at_most=1).values())

    def wait(
        self, ids: str | Iterable[str], timeout: float | None = None, *, cancelled: threading.Event | None = None
    ) -> list[Task]:
        """Wait until these tasks have ended, and return them. Raises Timeout and NoSuchTask.

        cancelled: when another thread sets it, the wait ends within a second
        """
        wanted = [ids] if isinstance(ids, str) else list(ids)
        return self.store.within(timeout, lambda: self._wait(wanted, timeout, cancelled))

    def _wait(self, wanted: list[str], timeout: float | None, cancelled: threading.Event | None) -> list[Task]:
        waiting: list[str] = []  # ids of tasks that have not ended. The last one is read until it has ended
        with closing(self._changes(timeout)) as changes:
            for _ in changes:
                is_cancelled = cancelled is not None and cancelled.is_set()
                while waiting and self.get(waiting[-1]).state in ENDED:
                    waiting.pop()
                if not waiting or is_cancelled:
                    tasks = self._get(wanted)
                    waiting = [task.id for task in tasks if task.state not in ENDED]
                    if not waiting or is_cancelled:
                        return tasks
        first = self.get(waiting[-1])
        raise Timeout(
            f"{self.name}: task {first.id!r} is still {first.state}. Wait longer with timeout=…", path=self.name
        )

    async def await_done(self, ids: str | Iterable[str], timeout: float | None = None) -> list[Task]:
        """`wait` for asyncio and trio."""
        from .aclaim import await_done

        return await await_done(self, ids, timeout)

    # Change.

    def cancel(self, id: str) -> bool:
        """Cancel a task. A running one is killed by its worker. False: it has ended already."""
        self._write()
        if self.store.cancel(Selection(ids=[id])):
            return True
        self.get(id)
        return False

    def retry(self, id: str) -> None:
        """Do a task that has ended again, with all its attempts. Raises NotLocked if it has not ended."""
        self._write()
        if not self.store.retry(Selection(ids=[id])):
            raise NotLocked(f"{self.name}: task {id!r} has not ended, it is {self.get(id).state}", path=self.name)

    def purge(self, older_than: float = 0, *, states: Collection[str] = ENDED) -> int:
        """Delete tasks that ended in these states more than `older_than` seconds ago. Return how many.

        The newest task stays, so that its id is not used again.
        """
        check_seconds("older_than", older_than)
        wanted = check_states(states, ENDED)
        self._write()
        before = time() - older_than if older_than else None
        return self.store.delete(Selection(states=wanted, ended_before=before))

    def prune(self) -> bool:
        """Delete some tasks that `keep` and `keep_failed` do not keep. Workers call this. True: there may be more."""
        keep = {"done": self.keep, "cancelled": self.keep, "failed": self.keep_failed}
        older_than = {state: time() - seconds for state, seconds in keep.items() if seconds is not None}
        return bool(older_than) and self.store.prune(older_than, _PRUNED_AT_ONCE) > 0

    def pause(self) -> None:
        """Let workers begin no task until `resume`. Tasks can be put, and running ones end."""
        self.store.set_paused(True)

    def resume(self) -> None:
        self.store.set_paused(False)

    @property
    def is_paused(self) -> bool:
        return self.store.is_paused()


def open_store(where: str, *, durable: bool = True, mode: int = 0o644) -> Store:
    """The engine for a directory or a URL. Raises UnsafePath for a URL with an unknown scheme."""
    if not where:
        raise UnsafePath("an empty path cannot name a queue", path=where)
    scheme, separator, _ = where.partition("://")
    if not separator:
        from .sqlite import SqliteStore

        return SqliteStore(where, durable=durable, mode=mode)
    if scheme in ("postgresql", "postgres"):
        from .postgres import PostgresStore

        return PostgresStore(where)
    raise UnsafePath(
        f"{scheme}://… is not a task queue. Use a directory, or postgresql://user@host/database.", path=f"{scheme}://…"
    )
