"""What a worker calls for a task: a function registered with `@queue.task`, the handler, or a command."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from .. import system
from ..wait import poll
from .claim import Claim
from .errors import TaskError

Handler = Callable[[Claim], object] | Sequence[str]

GRACE_S = 5.0  # for a coroutine or a command that the child ends itself. Then the supervisor kills the child
_KEPT_BYTES = 1 << 16  # of what a command prints
_MAX_VARIABLE_BYTES = 1 << 16  # a command with a variable of twice this size cannot be started


def late_text(seconds: float | None, errors: str = "") -> str:
    return f"not done within {seconds:g} s" + (f": {errors}" if errors else "")


def is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Command:
    """A command, in which `{}` is replaced by the payload. Its result is the end of what it prints.

    Its environment contains HOLDFAST_TASK_ID, HOLDFAST_TASK_TOKEN and, if it is not longer than 64 KiB,
    HOLDFAST_TASK_PAYLOAD (JSON). It runs in the process group of a worker's child, which runs one command at a time.

    report: called with each piece of stdout or stderr, while the command runs. The other one is empty
    """

    def __init__(self, words: Sequence[str], report: Callable[[bytes, bytes], None] | None = None) -> None:
        is_list = isinstance(words, Sequence) and not isinstance(words, str)
        if not is_list or not words or not all(isinstance(word, str) for word in words):
            raise TypeError(f"a handler is a function, a coroutine function or a list of words, not {words!r}")
        self._words = list(words)
        self._report = report

    def __call__(self, claim: Claim) -> object:
        text = json.dumps(claim.payload, ensure_ascii=False)
        payload = claim.payload if isinstance(claim.payload, str) else text
        words = [word.replace("{}", payload) for word in self._words]
        environment = {**os.environ, "HOLDFAST_TASK_ID": claim.id, "HOLDFAST_TASK_TOKEN": str(claim.token)}
        if len(text.encode(errors="surrogatepass")) < _MAX_VARIABLE_BYTES:
            environment["HOLDFAST_TASK_PAYLOAD"] = text
        lock = claim.fileno()  # while the command runs, the worker counts as alive, even if this process is killed
        with subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if lock == -1 else (lock,),
        ) as process:
            try:
                output, errors = self._read(process, claim.timeout)
                is_late = process.returncode is None
                if is_late:
                    _kill_group()
            except BaseException:
                process.kill()
                raise
        if is_late:
            raise TaskError(late_text(claim.timeout, errors), output)
        if process.returncode:
            status = process.returncode
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise TaskError(f"{words[0]} ended with {how}" + (f": {errors}" if errors else ""), output)
        return output or None

    def _read(self, process: subprocess.Popen[bytes], timeout: float | None) -> tuple[str, str]:
        """Read until the command has ended or its time is over. Return the end of its stdout and of its stderr."""
        assert process.stdout is not None and process.stderr is not None
        deadline = None if timeout is None else monotonic() + timeout
        output, errors = bytearray(), bytearray()
        kept = {process.stdout.fileno(): output, process.stderr.fileno(): errors}
        while kept and (deadline is None or monotonic() < deadline):
            for fd in poll(list(kept), None if deadline is None else deadline - monotonic()):
                data = system.read(fd, _KEPT_BYTES)
                kept[fd] += data
                del kept[fd][:-_KEPT_BYTES]
                if self._report is not None:
                    self._report(*((data, b"") if kept[fd] is output else (b"", data)))
                if not data:
                    del kept[fd]
        with suppress(subprocess.TimeoutExpired):
            process.wait(None if deadline is None else min(max(0.0, deadline - monotonic()), 1e6))
        return _text(output), _text(errors)


def _kill_group() -> None:
    """Kill the command and all that it started. They are in the process group of this process, which leaves it first.

    If the supervisor is dead, there is no group to go to: this process is killed, too.
    """
    with suppress(OSError):
        os.setpgid(0, os.getpgid(os.getppid()))
    os.killpg(os.getpid(), signal.SIGKILL)
    os.setpgid(0, 0)


def _text(data: bytearray) -> str:
    return data.decode(errors="replace").rstrip("\n")
