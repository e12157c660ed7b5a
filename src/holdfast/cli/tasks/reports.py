"""What the processes of `holdfast tasks work` report to their supervisor: starts, ends, and the output of commands.

Each message is a line of JSON of at most PIPE_BUF bytes, which the kernel writes as a whole or not at all.
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

_PIECE_BYTES = 2000  # of the output of a command, in one message


class Reporter:
    """A pipe. The processes of a worker write messages into it, and the supervisor reads them."""

    def __init__(self) -> None:
        # A child closes its copy of the reader when it is forked: a write fails when the supervisor is dead.
        self._reader, self._writer = pipe(writer=InheritedFd)
        os.set_blocking(self._reader.fd, False)
        self._redirected: list[tuple[OwnedFd, int]] = []
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
        """In the children, connect these descriptors to `writer`."""
        self._redirected = [(writer, fd) for fd in fds]

    def started(self, claim: Claim) -> None:
        with self._mutex:
            if self._pid != os.getpid():
                self._prepare_process()
        self._here.claim, self._here.began = claim, monotonic()
        self._write("start", claim, claim.tried, claim.attempts)

    def _prepare_process(self) -> None:
        self._pid = os.getpid()
        for writer, fd in self._redirected:
            os.dup2(writer.fd, fd)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                # Whole lines, also with PYTHONUNBUFFERED: else the lines of several children would be mixed.
                stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]

    def done(self, claim: Claim) -> None:
        self._write("done", claim, monotonic() - self._here.began)

    def failed(self, claim: Claim, error: BaseException) -> None:
        self._write("ended", claim)

    def printed(self, stdout: bytes, stderr: bytes) -> None:
        for stream, data in ((1, stdout), (2, stderr)):
            for start in range(0, len(data), _PIECE_BYTES):
                piece = b2a_base64(data[start : start + _PIECE_BYTES], newline=False).decode()
                self._write("printed", self._here.claim, stream, piece)

    def _write(self, kind: str, claim: Claim, *rest: object) -> None:
        try:
            os.write(self._writer.fd, json.dumps([kind, claim.id, claim.token, *rest]).encode() + b"\n")
        except OSError:
            pass  # the supervisor is dead, and the task goes on
