"""What the commands print: lines for people, JSON for programs.

Lock paths, tags and command lines may hold anything. Nothing of it reaches the terminal as a control character, names
that are no UTF-8 come out as they went in, and a reader that has gone is no error: what was done is done.

Output that cannot be written for another reason, such as a full disk, is lost. `lost` returns why. All commands exit
with an error then, except those whose exit status alone is the answer (`Parser.must_print`).
"""

from __future__ import annotations

import os
import sys

from ..files import OwnedFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import TextIOWrapper

# What steers a terminal, breaks a line, or turns the direction of writing.
_CONTROL = (
    {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
    | {9: "\\t", 10: "\\n", 13: "\\r"}
    | {number: f"\\u{number:04x}" for number in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
)

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


_lost: str | None = None


def lost() -> str | None:
    """Why a part of the standard output was not written. None: all of it was."""
    return _lost


def prepare() -> None:
    global _lost
    _lost = None
    _fill_standard_descriptors()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _fill_standard_descriptors() -> None:
    """Where the caller has closed 0, 1 or 2, a lock file must not get that number: a command would write into it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # closed again by exec
        pass
    OwnedFd(fd).close()


def say(text: str) -> bool:
    """False: no process reads it."""
    global _lost
    if sys.stdout is None:
        _lost = "it is closed"
    return _write(sys.stdout, text + "\n")


def complain(text: str) -> None:
    _write(sys.stderr, text + "\n")


def note(path: str, what: str, *, json: bool) -> None:
    """A step, for -v."""
    if json:
        say_json({"event": what, "path": path}, to_stderr=True)
    else:
        complain(f"holdfast: {shown(path)}: {what}")


def say_json(value: object, *, to_stderr: bool = False) -> bool:
    import json

    text = json.dumps(value)
    return _write(sys.stderr, text + "\n") if to_stderr else say(text)


def print_log(*, quiet: bool = False) -> None:
    """Print the warnings that Holdfast logs like every other line, unless a program of the user configures logging."""
    import logging

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not quiet and not logging.getLogger().handlers:
                complain("\n".join(map(shown, self.format(record).splitlines())))

    logging.getLogger("holdfast").addHandler(Lines(logging.WARNING))


def write_error(text: str) -> None:
    """To stderr, as it is."""
    _write(sys.stderr, text)


def write_bytes(data: bytes, *, to_stderr: bool = False) -> None:
    """Print the output of another program unchanged."""
    global _lost
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is not None:
        _write(stream.buffer, data)
    elif data and not to_stderr:
        _lost = "it is closed"


def _write(stream: TextIOWrapper | object, text: str | bytes) -> bool:
    if stream is None:  # closed by the caller
        return False
    try:
        stream.write(text)  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]
        return True
    except UnicodeEncodeError as error:
        return _write(stream, error.object.encode(errors="backslashreplace").decode())
    except (OSError, ValueError) as error:
        _note_loss(stream, error)
        _discard(stream)
        return False


def _note_loss(stream: object, error: Exception) -> None:
    global _lost
    if stream in (sys.stdout, getattr(sys.stdout, "buffer", None)) and not isinstance(error, BrokenPipeError):
        _lost = getattr(error, "strerror", None) or str(error)


def _discard(stream: object) -> None:
    """Send what is still to come nowhere, so that it does not fail again when Python ends."""
    with OwnedFd(os.open(os.devnull, os.O_WRONLY)) as nowhere:
        try:
            os.dup2(nowhere.fd, stream.fileno())  # type: ignore[attr-defined]
        except (OSError, ValueError):
            pass


def finish() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                _discard(stream)


def shown(text: str) -> str:
    """Safe to print, in one line."""
    text = text.translate(_CONTROL)
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half a character, which JSON can say, and nothing else
        text = text.encode(errors="backslashreplace").decode()
    return text


def on_terminal(stream: object) -> bool:
    try:
        return stream is not None and bool(stream.isatty())  # type: ignore[attr-defined]
    except ValueError:
        return False


def can_redraw(stream: object) -> bool:
    """Is it a terminal on which lines can be drawn again?"""
    return on_terminal(stream) and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str, stream: object = None) -> str:
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not on_terminal(stream):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]], colours: list[str]) -> None:
    """Columns as wide as they need to be; on a terminal lines are cut, not wrapped."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row, colour in zip([headings, *rows], [BOLD, *colours], strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        say(coloured(_fitting(text), colour))


def _fitting(text: str) -> str:
    return shortened(text, terminal_size(1)[0]) if on_terminal(sys.stdout) else text


def terminal_size(fd: int) -> tuple[int, int]:
    """Columns and lines."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return 80, 24
    return max(20, size.columns or 80), max(4, size.lines or 24)


def duration(seconds: float) -> str:
    """Short, for people: 0.4s, 12s, 3m05s, 2h11m, 4d03h."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def many(number: int, what: str) -> str:
    """1 lock, 2 locks."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
