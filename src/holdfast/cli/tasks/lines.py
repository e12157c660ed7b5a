"""The lower end of a terminal: lines that are drawn again and again below what is printed."""

from __future__ import annotations

import os
import sys

from ...files import InheritedFd, OwnedFd, pipe
from .. import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class Lines:
    """Lines at the end of the terminal. Text that is printed takes their place, and they are drawn below it again."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._drawn: list[str] = []
        self._rest = b""
        self._reader: OwnedFd | None = None
        self.writer: OwnedFd | None = None  # the children of the worker print into it
        if live:
            # A child keeps the reader, too: if the supervisor is killed, a handler that prints must not fail.
            self._reader, self.writer = pipe(reader=InheritedFd, writer=InheritedFd)
            os.set_blocking(self._reader.fd, False)

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self._reader is None else (self._reader.fd,)

    @property
    def are_drawn(self) -> bool:
        return bool(self._drawn)

    def draw(self, lines: list[str]) -> None:
        if lines != self._drawn:
            output.write_error(self._clearing() + _NO_WRAP + "\n".join(lines) + _WRAP)
            self._drawn = lines

    def _clearing(self) -> str:
        up = len(self._drawn) - 1
        return ("\r" + (f"\x1b[{up}A" if up > 0 else "") + "\x1b[J") if self._drawn else ""

    def _clear(self) -> None:
        if self._drawn:
            output.write_error(self._clearing())
            self._drawn = []

    def print_line(self, text: str, colour: str) -> None:
        self._clear()
        output.complain(output.coloured(text, colour, sys.stderr) if colour else text)

    def print_bytes(self, pieces: Iterable[bytes], *, to_stderr: bool) -> None:
        """Print the output of a task."""
        last = b""
        for piece in filter(None, pieces):
            self._clear()
            output.write_bytes(piece, to_stderr=to_stderr)
            last = piece
        if self._live and last and not last.endswith(b"\n"):
            output.write_bytes(b"\n", to_stderr=to_stderr)

    def print_children(self) -> None:
        """Print what the children have printed since the last call."""
        while self._reader is not None:
            try:
                data = os.read(self._reader.fd, 1 << 16)
            except BlockingIOError:
                return
            whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
            self.print_bytes([whole + newline], to_stderr=True)

    def end(self) -> None:
        self.print_children()
        self.print_bytes([self._rest], to_stderr=True)
        self._clear()
        for file in (self._reader, self.writer):
            if file is not None:
                file.close()
