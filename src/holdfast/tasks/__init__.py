"""Tasks that are shared out among workers: each is done by exactly one.

queue = TaskQueue("jobs")
queue.put({"url": "https://example.org"})
Worker(queue, handler).run()
"""

from __future__ import annotations

from .claim import Claim
from .errors import NoSuchTask, QueueFull, WorkerFailed
from .journal import Task
from .queue import TaskQueue
from .worker import Summary, Worker

__all__ = ["Claim", "NoSuchTask", "QueueFull", "Summary", "Task", "TaskQueue", "Worker", "WorkerFailed"]
