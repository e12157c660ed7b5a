"""What a worker does with a task: a function, a coroutine function, or a command."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from .claim import Claim

Handler = Callable[[Claim], object] | Sequence[str]

_MOST_KEPT = 1 << 16
_LONGEST_VARIABLE = 1 << 16  # a command with one of twice this length cannot be started
_LONGEST_WAIT = 2e6  # seconds, of poll(2)
IF_NOBODY_ELSE_DOES = 2.0  # seconds after which a process ends itself that its supervisor should have ended


class TaskTimeout(Exception):
    """The task took longer than it may."""

    says_all = True  # no traceback of ours tells more


def runner(handler: Handler) -> Callable[[Claim], object]:
    """A function that does the work and gives its result."""
    if not callable(handler):
        if isinstance(handler, str) or not isinstance(handler, Sequence):
            raise TypeError(f"a handler is a function, a coroutine function, or a list of words; not {handler!r}")
        return Command(handler)
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        return Coroutine(handler)
    return handler


class Coroutine:
    """A coroutine function, in an event loop of its own. It is cancelled when its time is over."""

    ends_itself = True

    def __init__(self, handler: Callable[[Claim], Any]) -> None:
        self._handler = handler

    def __call__(self, task: Claim) -> object:
        import asyncio

        async def work() -> object:
            timeout = task.task.timeout
            began = monotonic()
            try:
                return await asyncio.wait_for(self._handler(task), timeout)
            except asyncio.TimeoutError:
                if timeout is None or monotonic() - began < timeout:
                    raise  # it is the handler's own
                raise TaskTimeout(f"not done within {timeout:g} s") from None

        return asyncio.run(work())


class CommandFailed(Exception):
    """A command ended with a status other than 0."""

    says_all = True

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


class Command:
    """A command, in which `{}` stands for the payload. What it prints is its result; the end of it is kept.

    It gets HOLDFAST_TASK_ID, HOLDFAST_TASK_TOKEN and, if it is not longer than 64 KiB, HOLDFAST_TASK_PAYLOAD (JSON) in
    its environment.
    """

    def __init__(self, words: Sequence[str], report: Callable[[bytes, bytes], None] | None = None) -> None:
        if isinstance(words, str) or not words:
            raise TypeError(f"a command is a list of words, not {words!r}")
        self._words = list(words)
        self._report = report
        self.ends_itself = False

    def _patience(self, timeout: float | None) -> float | None:
        """Somebody else ends it in time, and us with it, unless that one is dead."""
        if timeout is None or timeout > _LONGEST_WAIT:
            return None
        return timeout if self.ends_itself else timeout + IF_NOBODY_ELSE_DOES / 2

    def __call__(self, task: Claim) -> object:
        payload = task.payload if isinstance(task.payload, str) else json.dumps(task.payload, ensure_ascii=False)
        words = [word.replace("{}", payload) for word in self._words]
        environment = {
            **os.environ,
            "HOLDFAST_TASK_ID": task.id,
            "HOLDFAST_TASK_TOKEN": str(task.token),
        }
        text = json.dumps(task.payload, ensure_ascii=False)
        if len(text.encode(errors="surrogatepass")) < _LONGEST_VARIABLE:
            environment["HOLDFAST_TASK_PAYLOAD"] = text
        with subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=self.ends_itself,
            pass_fds=[task.fileno()],  # as long as it runs, the task is locked, also if we are killed
        ) as process:
            try:
                said, errors = process.communicate(timeout=self._patience(task.task.timeout))
            except subprocess.TimeoutExpired:
                # Where we are the first of a group, so is everything that the command has started in it.
                os.killpg(process.pid if self.ends_itself else os.getpid(), signal.SIGKILL)
                raise TaskTimeout(f"not done within {task.task.timeout:g} s") from None
            except BaseException:
                process.kill()
                raise
        if self._report is not None:
            self._report(said, errors)
        if process.returncode:
            raise CommandFailed(_why(words, process.returncode, errors), _kept(said))
        return _kept(said) or None


def _kept(said: bytes) -> str:
    return said[-_MOST_KEPT:].decode(errors="replace").rstrip("\n")


def _why(words: Sequence[str], status: int, errors: bytes) -> str:
    how = f"signal {-status}" if status < 0 else f"status {status}"
    said = errors[-_MOST_KEPT:].decode(errors="replace").strip()
    return f"{words[0]} ended with {how}" + (f": {said}" if said else "")
