"""The lock files of task workers: a JSON object that begins with the fields of the other workers (docs/formats.md).

    {"worker_id": "w1", "started_at": "2026-01-31T12:00:00.123456+00:00", "task_id": "resize-7", "pid": 4711, …}

`started_at` is when the task was begun, or when its lease was last renewed. Other workers may write anything: `[]`, a
time without a zone (which means UTC), half an object. Content that cannot be parsed raises `CorruptLock`.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone

from ..errors import CorruptLock
from ..owner import sanitise
from .record import MAX_BYTES, SEMA, TOKEN_DIGITS, Format, Record, other_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OURS = ("host", "boot", "start", "owner")
TIME_TO_WRITE_S = 5.0  # other workers create the file first and then write it


class TaskFormat(Format):
    """The format of one task and one worker. The worker is the `tag` of the record."""

    kind = "task"
    whole_seconds = False
    time_key, owner_key = b'"started_at": "', b'"owner": "'
    token_from_end = TOKEN_DIGITS + len(b'"}\n')

    def __init__(self, task_id: str = "", worker_id: str = "") -> None:
        self._task_id = task_id
        self._worker_id = worker_id

    def parse(self, content: bytes) -> Record:
        fields = _object(content)
        pid: Any = fields.get("pid")
        token: Any = fields.get("token")
        is_pid = type(pid) is int and 0 < pid < 2**32
        is_token = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= TOKEN_DIGITS
        return Record(
            pid if is_pid else 0,
            _seconds(fields.get("started_at")),
            sanitise(str(fields.get("worker_id", ""))),
            token=int(token) if is_token else None,
            **{key: sanitise(fields[key]) for key in _OURS if isinstance(fields.get(key), str)},
        )

    def other_kind(self, content: bytes) -> str:
        """In a directory of task locks the names are ours, so only the locks of other kinds are refused."""
        try:
            SEMA.parse(content)
        except CorruptLock:
            return other_kind(content) if content.startswith(b"permits=") else ""
        return "a lock file of the sema format"

    def corrupt_after(self, content: bytes, stale_after: float | None) -> float | None:
        return TIME_TO_WRITE_S if stale_after is None else min(TIME_TO_WRITE_S, stale_after)

    def compose(self, record: Record) -> bytes:
        moment = self.time_text(record.timestamp).decode()
        fields = {"worker_id": self._worker_id, "started_at": moment, "task_id": self._task_id, "pid": record.pid}
        ours = {key: getattr(record, key) for key in _OURS if getattr(record, key) is not None}
        return json.dumps({**fields, **ours, "token": f"{record.token or 0:0{TOKEN_DIGITS}d}"}).encode() + b"\n"

    def time_text(self, seconds: float) -> bytes:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds").encode()


def is_task(content: bytes) -> bool:
    """Is this the record of a task, of ours or of another worker?"""
    try:
        return {"worker_id", "started_at"} <= _object(content).keys()
    except CorruptLock:
        return False


def _object(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_BYTES:
        raise CorruptLock(f"more than {MAX_BYTES} bytes")
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        raise CorruptLock("no JSON") from None
    if not isinstance(fields, dict):
        raise CorruptLock("no JSON object")
    return fields


def _seconds(text: Any) -> float:
    try:
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    except (AttributeError, ValueError, OverflowError):  # no text, or no time
        raise CorruptLock("no time in started_at") from None
