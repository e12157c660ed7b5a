"""What only queues raise."""

from __future__ import annotations

from ..errors import HoldfastError, Timeout


class NoSuchTask(HoldfastError, KeyError):
    """There is no task with this id: it was never put, or it was purged."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class QueueFull(Timeout):
    """As many tasks wait as may, and none of them was taken in the time given."""


class WorkerFailed(HoldfastError):
    """The processes of a worker end, one after the other, before they have begun a task."""
