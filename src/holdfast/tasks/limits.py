"""How many tasks with one key run at the same time.

Each of them holds one of the locks `limits/<key>/0` to `limits/<key>/<limit - 1>`, which a dead worker lets go of. A
task that gets none is parked, out of the way of the others, and whoever ends one of that key brings the next one back.
"""

from __future__ import annotations

from threading import Lock as Mutex

from ..locks.base import Hold
from ..locks.kernel import Lock
from .journal import Task
from .places import Places, file_name, listed, make, move, name_of, number_of, remove_empty
from .sequence import Sequence


class Limits:
    def __init__(self, places: Places, numbers: Sequence) -> None:
        self._places = places
        self._numbers = numbers
        self._folder = f"{places.root}/limits"
        self._holds: dict[str, Hold] = {}  # by the id of the task
        self._mutex = Mutex()

    def admit(self, task: Task, source: str, place: str) -> bool:
        """May it run? If not, it is parked, by who has it locked."""
        assert task.key is not None
        hold = self._try(task.key, task.limit)
        if hold is not None:
            with self._mutex:
                self._holds[task.id] = hold
            return True
        folder = f"{self._places.parked}/{file_name(task.key)}"
        try:
            move(source, f"{folder}/{-task.priority:+011d}.{task.limit}.{place}")
        except FileNotFoundError:
            return False
        # The last one may have ended before this was there to be found.
        self._bring_back(file_name(task.key))
        return False

    def ended(self, task: Task) -> None:
        """It does not run any more."""
        if task.key is None:
            return
        with self._mutex:
            hold = self._holds.pop(task.id, None)
        if hold is not None:
            hold.release()
        self._bring_back(file_name(task.key))

    def look(self) -> None:
        """Whoever should have brought one back may be dead."""
        for key in listed(self._places.parked):
            self._bring_back(key)

    def _try(self, key: str, limit: int) -> Hold | None:
        folder = f"{self._folder}/{file_name(key)}"
        make(folder)
        for slot in range(limit):
            hold = Lock(f"{folder}/{slot}", fair=False).try_acquire()
            if hold is not None:
                return hold
        return None

    def _bring_back(self, key: str) -> None:
        folder = f"{self._places.parked}/{key}"
        names = listed(folder)
        if not names:
            return
        priority, limit, place = names[0].split(".", 2)
        from .places import task_id

        hold = self._try(task_id(key), int(limit))
        if hold is None:
            return
        hold.release()
        level = -int(priority)
        target = self._places.waiting(level, number_of(place), name_of(place))
        try:
            self._numbers.put(level, lambda _: move(f"{folder}/{names[0]}", target))
        except FileNotFoundError:
            pass  # another one has
        remove_empty(folder)
