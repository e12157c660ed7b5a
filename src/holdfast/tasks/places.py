"""Where the tasks of a queue are.

    queue.json                              what this is
    tasks/<id>                              every task, under its own name, until it is purged (`journal`)
    pending/<priority>/<n>/<number>.<id>    another name of it while it waits, in order; a thousand in a directory
    delayed/<hour>/<second>/<moment>.<priority>.<id>    while it is not due
    parked/<key>/<…>.<number>.<id>          while as many of its key run as may (`limits`)
    running/<number>.<id>                   while somebody works on it, who holds the kernel lock on the file
    failed/<id>, cancelled/<id>             when it has ended so
    ending/<id>                             how an attempt is to end that runs (`claim.Verdict`)
    new/…                                   what is being put
    sheets/, slots/                         tasks without a file of their own (`sheets`)
    sequence                                the last number of every priority (`sequence`)

A task with a file has one of these names besides its own, unless it is done. It goes from one to the other by rename,
which only one can do. Nobody renames what is running without the lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .. import system
from ..files import read_all, remove, sync_directory
from ..locks.task_locks import file_name_of, task_id_of

_TRIES = 3
IN_A_BUCKET = 1000
NUMBER_DIGITS = 12

task_id = task_id_of


def file_name(id: str) -> str:
    """The name of a task's own file."""
    name = file_name_of(id)
    return f"%2E{name[1:]}" if name in (".", "..") else name


class Places:
    def __init__(self, root: str) -> None:
        self.root = root
        self.tasks = f"{root}/tasks"
        self.new = f"{root}/new"
        self.pending = f"{root}/pending"
        self.delayed = f"{root}/delayed"
        self.parked = f"{root}/parked"
        self.running = f"{root}/running"
        self.failed = f"{root}/failed"
        self.cancelled = f"{root}/cancelled"
        self.ending = f"{root}/ending"
        self.sheets = f"{root}/sheets"
        self.slots = f"{root}/slots"

    @property
    def folders(self) -> tuple[str, ...]:
        ended = (self.failed, self.cancelled, self.ending)
        lines = (self.sheets, self.slots)
        return (self.tasks, self.new, self.pending, self.delayed, self.parked, self.running, *ended, *lines)

    @property
    def put_off(self) -> tuple[tuple[str, int], ...]:
        """Where tasks wait that cannot be taken now, and how deep."""
        return (self.delayed, 2), (self.parked, 1)

    def own(self, id: str) -> str:
        """The file of a task, by its own name."""
        return f"{self.tasks}/{file_name(id)}"

    def waiting(self, priority: int, number: int, name: str) -> str:
        return f"{self.pending}/{priority}/{number // IN_A_BUCKET:09d}/{number:0{NUMBER_DIGITS}d}.{name}"

    def later(self, due: float, priority: int, name: str) -> str:
        second = int(due)
        return f"{self.delayed}/{second // 3600:07d}/{second % 3600:04d}/{int(due * 1000):014d}.{priority}.{name}"


def number_of(place: str) -> int:
    """The number in the name of a place, which is its last part or the one before the id."""
    digits = place.split(".", 1)[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def name_of(place: str) -> str:
    """The name of the task's own file, by the name of its place."""
    return place.partition(".")[2]


def move(source: str, target: str) -> bool:
    """Rename to a place whose directories may not be there yet, or be removed this very moment because it is empty.

    Raises FileNotFoundError if the source is gone. True: directories were made.
    """
    made = False
    while True:
        try:
            system.rename(source, target)
            return made
        except FileNotFoundError:
            folder = os.path.dirname(target)
            if system.access(folder, 0) or not system.access(source, 0):
                raise
            make(folder)
            made = True


def move_over(source: str, target: str) -> None:
    """`move`, also if the target is another name of the same file: to rename that does nothing, and says nothing."""
    move(source, target)
    remove(source)


def make(folder: str) -> None:
    """With those above it. Others may make and remove the same ones; but below a link to nowhere none can be made."""
    for _ in range(_TRIES):
        try:
            system.mkdir(folder)
        except FileExistsError:
            return
        except FileNotFoundError as error:
            missing = error
            make(os.path.dirname(folder))
        else:
            return
    raise missing


def listed(folder: str) -> list[str]:
    """What is in a directory, in order; nothing if it is gone."""
    try:
        names = system.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names.sort()
    return names


def content(path: str) -> bytes:
    """What is in a file; nothing if it is gone."""
    try:
        return read_all(path)
    except FileNotFoundError:
        return b""


def remove_empty(folder: str) -> None:
    try:
        system.rmdir(folder)
    except OSError:
        pass  # somebody has put something in, or was quicker


def sync_folders(*paths: str) -> None:
    for path in paths:
        sync_directory(path)


def count(folder: str, depth: int) -> int:
    """How many names are so deep below a directory."""
    if depth == 0:
        return len(listed(folder))
    return sum(count(f"{folder}/{name}", depth - 1) for name in listed(folder))


def names_in(folder: str, depth: int) -> Iterator[tuple[str, str]]:
    """The names so deep below a directory, each with its directory."""
    for name in listed(folder):
        if depth:
            yield from names_in(f"{folder}/{name}", depth - 1)
        else:
            yield folder, name
