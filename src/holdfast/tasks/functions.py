"""`@queue.task`: functions whose calls are tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .model import new_task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .queue import TaskQueue


class TaskFunction:
    """A function that can be called here, or put into a queue for a worker to call. Made by `TaskQueue.task`."""

    def __init__(self, queue: TaskQueue, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.name: str = options.pop("name", None) or f"{function.__module__}.{function.__qualname__}"
        self.function = function
        self._queue = queue
        self._options = options
        functools.update_wrapper(self, function)
        new_task(None, **options)  # wrong options are reported here, and not at the first put

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __repr__(self) -> str:
        return f"<task function {self.name}>"

    def __reduce__(self) -> str:
        """By name: the module that registers it is imported where it is unpickled."""
        return self.function.__qualname__

    def put(self, *arguments: Any, **named: Any) -> str:
        """Let a worker call the function with these arguments. Return the id of the task."""
        return self._queue.put(_call(arguments, named), function=self.name, **self._options)

    async def aput(self, *arguments: Any, **named: Any) -> str:
        """`put` for asyncio and trio."""
        return await self._queue.aput(_call(arguments, named), function=self.name, **self._options)

    def options(self, **options: Any) -> TaskFunction:
        """The same function with other options of `put`: `resize.options(delay=60, id="a").put("a.png")`."""
        return TaskFunction(self._queue, self.function, {**self._options, **options, "name": self.name})


def _call(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The payload of a call."""
    return {"args": list(arguments), "kwargs": named}
