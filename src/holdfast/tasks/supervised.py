"""A child process of a worker, as its supervisor sees it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from multiprocessing.context import BaseContext
from socket import socketpair
from time import monotonic
from typing import Any

from .. import system
from ..files import OwnedFd
from ..wait import poll
from .child import COUNTERS, Work

_SIGNAL_WAIT_S = 1.0  # until a process has died. Only a process that waits for a broken disk takes longer


class Child:
    """A child process. It is the leader of a process group, to which commands belong."""

    def __init__(self, context: BaseContext, work: Work) -> None:
        ours, theirs = socketpair()
        self._channel = OwnedFd(ours.detach())  # the other children do not have it
        os.set_blocking(self._channel.fd, False)
        self._counters = context.RawArray("Q", len(COUNTERS))
        self._workers: set[str] = set()
        self.was_killed = False
        self.is_settled = False  # all its tasks were settled after it was killed
        self._deadlines: dict[tuple[str, int], float] = {}
        self._late: set[tuple[str, int]] = set()
        self._rest = b""
        self._code: int | None = None
        self._process = context.Process(target=work.run, args=(theirs, self._counters))  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        with suppress(OSError):
            os.setpgid(self.pid, self.pid)  # the child does the same. The first of the two counts
        # The sentinel of `multiprocessing` is inherited by processes that the handler forks.
        self._death = OwnedFd(os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else os.dup(self._process.sentinel))

    @property
    def fds(self) -> list[int]:
        """Readable when there is a message, or when the child is dead."""
        return [file.fd for file in (self._channel, self._death) if file.is_open]

    def stop(self) -> None:
        """Let it begin no other task."""
        with suppress(OSError):
            system.write(self._channel.fd, b"!")

    def close(self) -> None:
        self._channel.close()
        self._death.close()
        with suppress(ValueError):
            self._process.close()

    def count(self, kind: str) -> int:
        return int(self._counters[COUNTERS.index(kind)])

    @property
    def deadline(self) -> float:
        return min(self._deadlines.values(), default=float("inf"))

    def workers(self) -> set[str]:
        """Their names in the queue. A worker sends its name before it claims a task."""
        self.read_messages()
        return self._workers

    def late(self) -> set[tuple[str, int]]:
        """The id and token of tasks whose deadline has passed, and that have not ended."""
        self.read_messages()
        now = monotonic()
        for key in [key for key, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[key]
            self._late.add(key)
        return self._late

    def read_messages(self) -> None:
        """Read all messages. A closed socket means nothing: the handler may have closed it."""
        while self._channel.is_open:
            try:
                text = system.read(self._channel.fd, 1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:
                text = b""
            if not text:
                self._channel.close()
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                self._handle(*json.loads(line))

    def _handle(self, kind: str, *rest: Any) -> None:
        if kind == "worker":
            self._workers.add(rest[0])
        elif kind == "begin":
            self._deadlines[rest[0], rest[1]] = monotonic() + rest[2]
        else:
            self._deadlines.pop((rest[0], rest[1]), None)
            self._late.discard((rest[0], rest[1]))

    def exit_code(self) -> int | None:
        """None: it is alive. If it is dead, all processes that it started are killed, too."""
        if self._code is None and poll([self._death.fd], 0):
            self._kill()  # before the process is reaped: until then no other group has this number
            self._code = self._process.exitcode
            if self._code is None:
                self._code = 1  # other code has waited for it
            self.read_messages()
        return self._code

    def kill(self) -> bool:
        """Kill it and all that it started. False: it is not dead after a second."""
        if self._code is not None:
            return True
        self.was_killed = True
        self._kill()
        return bool(poll([self._death.fd], _SIGNAL_WAIT_S))

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it may not be in its group yet, or not be there for a moment
