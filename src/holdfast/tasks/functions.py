"""`@queue.task`: functions whose calls are tasks."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .model import new_task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .queue import TaskQueue


class TaskFunction:
    """A function that can be called here, or put into a queue for a worker to call. Made by `TaskQueue.task`."""

    def __init__(self, queue: TaskQueue, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.name: str = options.pop("name", None) or f"{_module_of(function)}.{function.__qualname__}"
        self.function = function
        self._queue = queue
        self.defaults = options  # of `put`
        self._signature = None
        with suppress(ValueError):  # some functions in C have none
            self._signature = inspect.signature(function)
        functools.update_wrapper(self, function)
        new_task(None, function=self.name, **options)  # wrong options are reported here, and not at the first put

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __repr__(self) -> str:
        return f"<task function {self.name}>"

    def __reduce__(self) -> str:
        """By name: the module that registers it is imported where it is unpickled."""
        return self.function.__qualname__

    def put(self, *arguments: Any, **named: Any) -> str:
        """Let a worker call the function with these arguments. Return the id of the task.

        Raises TypeError if the function does not accept them.
        """
        return self._queue.put(self.payload_of(*arguments, **named), function=self.name, **self.defaults)

    async def aput(self, *arguments: Any, **named: Any) -> str:
        """`put` for asyncio and trio."""
        return await self._queue.aput(self.payload_of(*arguments, **named), function=self.name, **self.defaults)

    def payload_of(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The payload of a task that calls the function. Raises TypeError if it does not accept the arguments."""
        try:
            if self._signature is not None:
                self._signature.bind(*arguments, **named)
        except TypeError as error:
            error = self._unknown(arguments, named) or error
            raise TypeError(f"{self.name}: {error}. Options of the task: options(…).put(…)") from None
        return {"args": list(arguments), "kwargs": named}

    def _unknown(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> TypeError | None:
        """What is wrong if nothing is missing: a misspelt name is the cause, and the missing argument its effect."""
        assert self._signature is not None
        try:
            self._signature.bind_partial(*arguments, **named)
        except TypeError as error:
            return error
        return None

    def options(self, **options: Any) -> TaskFunction:
        """The same function with other options of `put`: `resize.options(delay=60, id="a").put("a.png")`."""
        other = TaskFunction.__new__(TaskFunction)
        vars(other).update(vars(self), defaults={**self.defaults, **options})
        new_task(None, **other.defaults)
        return other


def _module_of(function: Callable[..., Any]) -> str:
    """The name under which a worker imports the module, also if the module is the program that runs here."""
    name = function.__module__
    if name not in ("__main__", "__mp_main__"):
        return name
    module = sys.modules[name]
    if module.__spec__ is not None:  # python -m
        return module.__spec__.name
    file = getattr(module, "__file__", None)
    return name if file is None else os.path.splitext(os.path.basename(file))[0]
