"""`TaskLocks`: one lock file per task, `<task id>.lock`, shared with workers that know no more than the file.

Only the format (`task_record`) and the rule for names are here. Everything else is `LockFile`. A lock is a lease: its
worker renews it. The next worker takes over a lease that was not renewed for `stale_after` seconds, and at once that
of a worker that is proved dead.
"""

from __future__ import annotations

import os
import re
from threading import Lock as Mutex

from .. import system
from ..errors import NotALockFile, NotLocked, UnsafePath
from .file_hold import FileHold
from .lock_file import LockFile
from .publish import lock_of_private
from .task_record import TaskFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    from ..status import Status
    from . import base

    Result = TypeVar("Result")

_SUFFIX = ".lock"
_MAX_NAME_BYTES = 210  # the private names of a lock file are longer
# Characters that a file name cannot have, and a '%' that would be read as an escaped one.
_UNSAFE = re.compile(r"[/\0]|%(?=[0-9A-Fa-f]{2})" if os.name != "nt" else r'[\0-\x1f<>:"/\\|?*]|%(?=[0-9A-Fa-f]{2})')


class TaskLock(LockFile):
    """The lock file of one task."""

    __slots__ = ("_format",)

    def __init__(self, path: str, task_id: str, worker_id: str, **options: Any) -> None:
        self._format = TaskFormat(task_id, worker_id)
        LockFile.__init__(self, path, stale="dead-or-old", fair=False, **options)


class TaskLocks:
    """The locks of the tasks in a directory, for one worker. All files `*.lock` in the directory are task locks.

    directory: where the lock files are. It must exist
    worker_id: a name of this worker. The lock files show it
    stale_after: seconds after which another worker may take a task whose lock was not renewed
    heartbeat: seconds between renewals; None: no renewals
    durable: claims survive a power failure
    on_lost: called with the hold, in a thread, if a task was taken away

    Raises ValueError if the heartbeat is not shorter than `stale_after`.

        locks = holdfast.TaskLocks("/srv/tasks", "worker-1")
        if hold := locks.claim("resize-7"):
            with hold:
                resize(7)
    """

    def __init__(
        self,
        directory: base.StrPath,
        worker_id: str,
        *,
        stale_after: float = 300,
        heartbeat: float | None = 60,
        durable: bool = False,
        on_lost: Callable[[FileHold], object] | None = None,
    ) -> None:
        if not isinstance(worker_id, str) or not worker_id:
            raise ValueError(f"worker_id is a str that is not empty, not {worker_id!r}")
        if heartbeat is not None and heartbeat >= stale_after:
            raise ValueError(f"heartbeat must be shorter than stale_after ({stale_after} s), not {heartbeat} s")
        self.directory = os.path.abspath(os.fsdecode(directory))
        self.worker_id = worker_id
        self._options: dict[str, Any] = {"stale_after": stale_after, "heartbeat": heartbeat, "durable": durable}
        if heartbeat is not None:
            self._options["on_lost"] = on_lost
        self._holds: dict[str, FileHold] = {}
        self._mutex = Mutex()

    def __repr__(self) -> str:
        return f"holdfast.TaskLocks({self.directory!r}, {self.worker_id!r})"

    def claim(self, task_id: str) -> FileHold | None:
        """Return the hold of a task, or None if another worker has claimed it. Takes over a dead or stale claim."""
        hold = self._lock(task_id).try_acquire()
        if hold is not None:
            with self._mutex:
                self._holds = {other: held for other, held in self._holds.items() if not held.released}
                self._holds[task_id] = hold
        return hold

    def release(self, task_id: str) -> None:
        """Release a claimed task, as `hold.release()` does.

        Raises NotLocked if this object has not claimed it, LockLost if another worker took it meanwhile.
        """
        with self._mutex:
            hold = self._holds.pop(task_id, None)
        if hold is None:
            text = f"{self.directory}: this worker has not claimed {task_id!r}. Claim it first."
            raise NotLocked(text, path=self.directory)
        hold.release()

    def status(self, task_id: str) -> Status:
        """Return the status of a task's lock. `status.tag` is the id of its worker."""
        return self._lock(task_id).status()

    def claimed(self) -> dict[str, Status]:
        """Return the status of every claimed task, by task id."""
        return {task_id: status for task_id, status in self._each(TaskLock.status) if status.held}

    def clean(self) -> list[str]:
        """Remove stale locks, and private files that dead workers left. Returns the ids of their tasks."""
        return [task_id for task_id, cleaned in self._each(TaskLock.clean) if cleaned]

    def _each(self, do: Callable[[TaskLock], Result]) -> Iterator[tuple[str, Result]]:
        """Do something with every task lock in the directory. A lock of another kind, or a foreign link, is no task."""
        for task_id in self._task_ids():
            try:
                yield task_id, do(self._lock(task_id))
            except (NotALockFile, UnsafePath):
                pass

    def _task_ids(self) -> list[str]:
        names = system.listdir(self.directory)
        files = [name if name.endswith(_SUFFIX) else lock_of_private(name) or "" for name in names]
        return sorted({task_id_of(file.removesuffix(_SUFFIX)) for file in files if file.endswith(_SUFFIX)})

    def _lock(self, task_id: str) -> TaskLock:
        path = f"{self.directory}/{file_name_of(task_id)}{_SUFFIX}"
        return TaskLock(path, task_id, self.worker_id, **self._options)


def file_name_of(task_id: str) -> str:
    """Return the file name of a task id, without `.lock`. Most ids are their own file names. No two ids share one."""
    if not isinstance(task_id, str) or not task_id:
        raise UnsafePath(f"a task id is a str that is not empty, not {task_id!r}")
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", task_id)
    try:
        if len(os.fsencode(name)) <= _MAX_NAME_BYTES:
            return name
    except UnicodeEncodeError:
        raise UnsafePath(f"{task_id!r} cannot be the name of a file") from None
    raise UnsafePath(f"a task id of {len(task_id)} characters is too long for a file name: {task_id[:40]!r}…")


def task_id_of(file_name: str) -> str:
    from urllib.parse import unquote

    return unquote(file_name, errors="surrogateescape")
