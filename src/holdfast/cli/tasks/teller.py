"""What the children of `holdfast tasks work` say: what is begun and how it ended, and what commands printed.

Each message is a line of JSON of at most PIPE_BUF bytes, which is written into the pipe as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from binascii import b2a_base64
from time import monotonic

from ...files import InheritedFd, pipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...files import OwnedFd
    from ...tasks import Claim

_A_PIECE = 2000  # bytes of what a command printed, in one message


class Teller:
    """What the children of a worker call."""

    def __init__(self) -> None:
        # A child closes its copy of the reader when it is forked: a write fails when the supervisor is gone.
        self._reader, self._writer = pipe(writer=InheritedFd)
        os.set_blocking(self._reader.fd, False)
        self._instead: list[tuple[OwnedFd, int]] = []
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._here = threading.local()

    @property
    def reader(self) -> int:
        return self._reader.fd

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def redirect(self, fds: list[int], writer: OwnedFd) -> None:
        """What else a child prints on these goes into a pipe, too."""
        self._instead = [(writer, fd) for fd in fds]

    def started(self, claim: Claim) -> None:
        with self._mutex:
            if self._pid != os.getpid():
                self._settle_in()
        self._here.claim, self._here.began = claim, monotonic()
        self._tell("start", claim, claim.task.tried, claim.task.attempts)

    def _settle_in(self) -> None:
        """This is a new process."""
        self._pid = os.getpid()
        for writer, fd in self._instead:
            os.dup2(writer.fd, fd)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                # A line at a time, also with PYTHONUNBUFFERED: pieces of lines would meet those of other children.
                stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]

    def done(self, claim: Claim) -> None:
        self._tell("done", claim, monotonic() - self._here.began)

    def failed(self, claim: Claim, error: BaseException) -> None:
        self._tell("ended", claim)

    def printed(self, said: bytes, errors: bytes) -> None:
        for stream, data in ((1, said), (2, errors)):
            for start in range(0, len(data), _A_PIECE):
                piece = b2a_base64(data[start : start + _A_PIECE], newline=False).decode()
                self._tell("printed", self._here.claim, stream, piece)

    def _tell(self, kind: str, claim: Claim, *rest: object) -> None:
        try:
            os.write(self._writer.fd, json.dumps([kind, claim.id, claim.token, *rest]).encode() + b"\n")
        except OSError:
            pass  # the supervisor is gone; the task goes on
