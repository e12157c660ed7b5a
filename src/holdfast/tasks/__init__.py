"""Tasks that are shared out among workers: each is done by one worker at a time.

queue = TaskQueue("jobs")
queue.put({"url": "https://example.org"})
Worker(queue, handler).run()
"""

from __future__ import annotations

from .claim import Claim
from .errors import NoSuchTask, QueueFull, WorkerFailed
from .functions import TaskFunction
from .queue import TaskQueue
from .store import Task
from .worker import Summary, Worker

__all__ = [
    "Claim",
    "NoSuchTask",
    "QueueFull",
    "Summary",
    "Task",
    "TaskFunction",
    "TaskQueue",
    "Worker",
    "WorkerFailed",
]
