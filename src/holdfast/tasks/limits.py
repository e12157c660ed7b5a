"""How many tasks with one key run at the same time.

Each of them holds one of the locks `limits/<key>/0` to `limits/<key>/<limit - 1>`, which a dead worker lets go of. A
task that gets none is parked, out of the way of the others, and whoever ends one of that key brings the next one back.
"""

from __future__ import annotations

import re

from ..errors import UnsafePath
from ..locks.hold import Hold
from ..locks.lock import Lock
from .journal import LARGEST, Task
from .places import Places, file_name, listed, make, move, remove_empty, task_id
from .sequence import Sequence

_PLACE = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)\.(.+)", re.DOTALL)


def _can_be_a_name(key: str) -> bool:
    """Else somebody has edited it, and it was never admitted."""
    try:
        file_name(key)
    except UnsafePath:
        return False
    return True


class Limits:
    def __init__(self, places: Places, numbers: Sequence) -> None:
        self._places = places
        self._numbers = numbers
        self._folder = f"{places.root}/limits"
        self._holds: dict[str, Hold] = {}  # by the id of the task

    def admit(self, task: Task, source: str, place: str) -> bool:
        """May it run? If not, it is parked, by who has it locked."""
        assert task.key is not None
        hold = self._try(task.key, task.limit)
        if hold is not None:
            self._holds[task.id] = hold
            return True
        folder = f"{self._places.parked}/{file_name(task.key)}"
        try:
            number, _, name = place.partition(".")
            move(source, f"{folder}/{LARGEST - task.priority:010d}.{number}.{task.limit}.{name}")
        except FileNotFoundError:
            return False
        # The last one may have ended before this was there to be found.
        self._bring_back(file_name(task.key))
        return False

    def ended(self, task: Task) -> None:
        """It does not run any more."""
        if task.key is None or not _can_be_a_name(task.key):
            return
        hold = self._holds.pop(task.id, None)  # in one step
        if hold is not None:
            hold.release()
            remove_empty(f"{self._folder}/{file_name(task.key)}")
        self._bring_back(file_name(task.key))

    def look(self) -> None:
        """Whoever should have brought one back may be dead."""
        for key in listed(self._places.parked):
            self._bring_back(key)

    def _try(self, key: str, limit: int) -> Hold | None:
        folder = f"{self._folder}/{file_name(key)}"
        for slot in range(limit):
            while True:
                make(folder)
                try:
                    hold = Lock(f"{folder}/{slot}", fair=False).try_acquire()
                    break
                except FileNotFoundError:
                    pass  # somebody has removed the directory, because it was empty
            if hold is not None:
                return hold
        return None

    def _bring_back(self, key: str) -> None:
        folder = f"{self._places.parked}/{key}"
        first = next(filter(None, map(_PLACE.fullmatch, listed(folder))), None)  # others are not ours
        if first is None:
            return
        priority, number, limit, name = first.groups()
        hold = self._try(task_id(key), int(limit))
        if hold is None:
            return
        hold.release()
        level = LARGEST - int(priority)
        target = self._places.waiting(level, int(number), name)
        try:
            self._numbers.put(level, lambda _: move(f"{folder}/{first[0]}", target))
        except FileNotFoundError:
            pass  # another one has
        remove_empty(folder)
