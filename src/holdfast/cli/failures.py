"""How a command ends that did not do what was asked: one exception, printed in one place.

`holdfast run` and `fd` have exit statuses of their own, because theirs must differ from those of the command. All other
commands have four.
"""

from __future__ import annotations

import os

from ..errors import HoldfastError, UnsafePath, WouldDeadlock
from ..owner import hide_passwords, without_passwords
from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..status import Status

NO = 1  # busy, timed out, not held, not found, a condition failed, a task failed
MISUSE, ERROR = 2, 3
INTERRUPTED = 130
RUN_MISUSE, RUN_ERROR, RUN_BUSY, RUN_LOST = 64, 66, 75, 76
NOT_EXECUTABLE, NOT_FOUND = 126, 127


class Failure(Exception):
    """Ends a command with this exit status.

    text: what people read on stderr, if it is not the message with the name of the command before it
    path, found: the lock, and its status when it was looked at
    silenced: -q suppresses it, because the exit status says the same
    more: further keys for --json
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        text: str | None = None,
        path: str | None = None,
        found: Status | None = None,
        silenced: bool = True,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.text, self.silenced = status, text, silenced
        self.path, self.found, self.more = path, found, more or {}


class Misuse(Exception):
    """The command line is wrong."""


def status_of(error: BaseException, *, is_run: bool) -> int:
    if isinstance(error, Failure):
        return error.status
    if isinstance(error, Misuse | UnsafePath | ValueError | OverflowError):
        return RUN_MISUSE if is_run else MISUSE
    return RUN_ERROR if is_run else ERROR


def report(name: str, error: BaseException, *, json: bool, quiet: bool) -> None:
    """Print an error: one object on stdout with --json, else one or two lines on stderr."""
    if json:
        output.say_json(as_json(error))
    elif not (quiet and isinstance(error, Failure) and error.silenced):
        text = error.text if isinstance(error, Failure) else None
        if text is None:
            text = f"{f'holdfast {name}'.strip()}: {output.shown(message_of(error))}"
        if text:
            output.complain(text)


def message_of(error: BaseException) -> str:
    """Without passwords. A `Failure` names what was looked at, whose passwords are hidden already."""
    return str(error) if isinstance(error, Failure) else without_passwords(_text_of(error))


def _text_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = error.filename if isinstance(error.filename, str) else None
        return f"{where}: {error.strerror}" if where else error.strerror
    return str(error)


def as_json(error: BaseException) -> dict[str, object]:
    """`error`, `path` and `holder` are always there. A lock that was looked at adds what `status --json` has."""
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    found: Status | None = getattr(error, "found", None) or getattr(error, "status", None)
    if isinstance(error, Failure):
        found = error.found
    facts: dict[str, Any] = {} if found is None else found.as_dict()
    holder = next(iter(facts.get("holders", ())), None)
    if path is None:
        path = facts.get("path")
    shown = hide_passwords(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
    more: dict[str, Any] = error.more if isinstance(error, Failure) else {}
    first = {"error": message_of(error), "path": shown, "holder": holder}
    return {**more, **first, **{name: value for name, value in facts.items() if name not in ("path", *more)}}


def deadlock(path: str, pid: int, found: Status) -> WouldDeadlock:
    text = f"{path}: held by pid {pid}, which waits for this command: a deadlock. Do not acquire a lock inside itself"
    error = WouldDeadlock(text, path=path)
    vars(error)["found"] = found
    return error


EXPECTED = (Failure, Misuse, HoldfastError, OSError, ValueError, OverflowError)
