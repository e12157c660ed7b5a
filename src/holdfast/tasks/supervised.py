"""A child process of a worker, as its supervisor sees it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from multiprocessing.context import BaseContext
from time import monotonic, sleep
from typing import Any

from ..files import InheritedFd, OwnedFd, pipe
from .child import COUNTERS, work

_SIGNAL_WAIT_S = 1.0  # until a process has stopped or died. Only a process that waits for a broken disk takes longer
_NEVER = float("inf")


class PassedFd(InheritedFd):
    """A descriptor that a child gets, whether it is forked or spawned."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # Windows does not have it

        return _passed, (DupFd(self.fd),)


def _passed(copy: Any) -> PassedFd:
    return PassedFd(copy.detach())


class Child:
    """A child process. It is the leader of a process group, to which commands belong."""

    def __init__(self, context: BaseContext, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        reader, writer = pipe(writer=PassedFd)
        os.set_blocking(reader.fd, False)
        self._counters = context.RawArray("Q", len(COUNTERS))
        self.workers: list[str] = []  # their names in the queue
        self.is_idle = False
        self.was_killed = False
        self.started_at = monotonic()
        self._deadlines: dict[tuple[str, int], float] = {}
        self._messages = reader
        self._rest = b""
        self._code: int | None = None
        self._process = context.Process(target=work, args=(*arguments, writer, self._counters), kwargs=options)  # type: ignore[attr-defined]
        self._process.start()
        writer.close()
        self.pid: int = self._process.pid
        with suppress(OSError):
            os.setpgid(self.pid, self.pid)  # the child does the same. The first of the two counts
        # The sentinel of `multiprocessing` is inherited by processes that the handler forks.
        self._death = OwnedFd(os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else os.dup(self._process.sentinel))

    @property
    def fds(self) -> list[int]:
        """Readable when there is a message, or when the child is dead."""
        return [file.fd for file in (self._messages, self._death) if file.is_open]

    def close(self) -> None:
        self._messages.close()
        self._death.close()
        with suppress(ValueError):
            self._process.close()

    def count(self, kind: str) -> int:
        return int(self._counters[COUNTERS.index(kind)])

    @property
    def deadline(self) -> float:
        return min(self._deadlines.values(), default=_NEVER)

    def take_late(self) -> set[tuple[str, int]]:
        """The id and token of tasks whose deadline has passed. Each is returned once."""
        now = monotonic()
        late = {key for key, deadline in self._deadlines.items() if deadline <= now}
        for key in late:
            del self._deadlines[key]
        return late

    def read_messages(self) -> None:
        """Read all messages. A closed pipe means nothing: the handler may have closed it."""
        self.is_idle = False
        while self._messages.is_open:
            try:
                text = os.read(self._messages.fd, 1 << 16)
            except BlockingIOError:
                return
            if not text:
                self._messages.close()
                return
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                self._handle(*json.loads(line))

    def _handle(self, kind: str, *rest: Any) -> None:
        if kind == "worker":
            self.workers.append(rest[0])
        elif kind == "begin":
            self._deadlines[rest[0], rest[1]] = monotonic() + rest[2]
        elif kind == "end":
            self._deadlines.pop((rest[0], rest[1]), None)
        elif kind == "idle":
            self.is_idle = True

    def exit_code(self) -> int | None:
        """None: it is alive. If it is dead, all processes that it started are killed, too."""
        if self._code is None and self._has_state(os.WEXITED):
            self._signal(signal.SIGKILL)  # before the process is reaped: until then no other group has this number
            self._code = self._process.exitcode
            if self._code is None:
                self._code = 1  # other code has waited for it
            self.read_messages()
        return self._code

    def pause(self) -> None:
        """Stop it, and read the messages that it sent before."""
        self._signal(signal.SIGSTOP)
        self._wait_for(os.WSTOPPED | os.WEXITED)
        self.read_messages()

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> bool:
        """Kill it and all that it started. False: it is not dead after a second."""
        if self._code is not None:
            return True
        self.was_killed = True
        self._signal(signal.SIGKILL)
        return self._wait_for(os.WEXITED)

    def _signal(self, number: int) -> None:
        if self._code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)  # it may not be in its group yet, or not be there for a moment

    def _has_state(self, states: int) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, states | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # other code has waited for it
            return True

    def _wait_for(self, states: int) -> bool:
        deadline = monotonic() + _SIGNAL_WAIT_S
        while not self._has_state(states):
            if monotonic() > deadline:
                return False
            sleep(0.0005)
        return True
