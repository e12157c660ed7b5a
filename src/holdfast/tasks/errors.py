"""The errors of queues and workers."""

from __future__ import annotations

from ..errors import HoldfastError, Timeout


class NoSuchTask(HoldfastError, KeyError):
    """There is no task with this id: it was never put, or it was purged."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class QueueFull(Timeout):
    """`max_pending` tasks are pending, and no worker has taken one of them within the time to wait."""


class TaskError(Exception):
    """An attempt failed, and the text explains why: a timeout, a failed command, or a missing function. A traceback
    would not help."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output  # of a command


class Cancelled(TaskError):
    """The task of a coroutine was cancelled while it ran."""


class WorkerFailed(HoldfastError):
    """The processes of a worker end, one after the other, before they have begun a task."""
