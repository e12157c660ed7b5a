"""The file of a task: lines of JSON, to which everything that happens to it is added (docs/formats.md).

    {"id": "a7", "payload": {"url": "…"}, "priority": 0, "attempts": 3, "put": "2026-01-31T12:00:00.000000Z"}
    {"is": "running", "token": 1, "worker": "4711@host", "boot": "…", "at": "…"}
    {"progress": [3, 10, "third page"], "at": "…"}
    {"is": "pending", "because": "ValueError: …", "traceback": "…", "at": "…"}
    {"is": "running", "token": 2, …}
    {"is": "done", "result": 17, "at": "…"}

The first line never changes. Only who holds the kernel lock on the file adds one. A line that is not whole was being
written when its writer died, and says nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from time import gmtime, strftime, time_ns
from typing import Any

from .. import owner
from ..errors import CorruptStore
from ..files import read_all
from ..json_text import depth_of

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode
_decode = json.JSONDecoder().raw_decode  # the other one looks for blanks first, which takes as long again

LARGEST = 10**9  # priority
LONGEST = 9e9  # seconds: what the kernel can count in nanoseconds
_DEEPEST = 200
STATES = ("running", "pending", "failed", "cancelled", "done")
ENDED = frozenset({"done", "failed", "cancelled"})


@dataclass(frozen=True)
class Task:
    """What is known of a task. `state` is "pending", "running", "done", "failed" or "cancelled"."""

    id: str
    payload: Any
    state: str = "pending"
    priority: int = 0
    attempts: int = 3  # how often it may be tried
    tried: int = 0
    timeout: float | None = None
    key: str | None = None
    limit: int = 1
    delay: float = 0
    token: int = 0  # of its last attempt; greater than those of all before
    worker: str | None = None
    by: str | None = field(default=None, repr=False)  # which process exactly
    boot: str | None = field(default=None, repr=False)
    result: Any = None
    error: str | None = None
    traceback: str | None = field(default=None, repr=False)
    output: str | None = field(default=None, repr=False)  # of a command that failed, what it had printed
    progress: tuple[float, float | None, str] | None = None
    put: str | None = field(default=None, repr=False)
    started: str | None = field(default=None, repr=False)
    ended: str | None = field(default=None, repr=False)
    history: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def put_at(self) -> datetime | None:
        return _datetime(self.put)

    @property
    def started_at(self) -> datetime | None:
        """When its last attempt was begun."""
        return _datetime(self.started)

    @property
    def ended_at(self) -> datetime | None:
        return _datetime(self.ended)


def first_line(
    task_id: str,
    payload: object,
    priority: int,
    attempts: int,
    timeout: float | None,
    key: str | None,
    limit: int,
    delay: float,
) -> bytes:
    more = ""
    if timeout is not None:
        more = f', "timeout": {_encode(timeout)}'
    if key is not None:
        more += f', "key": {_encode(key)}, "limit": {limit:d}'
    if delay > 0:
        more += f', "delay": {_encode(delay)}'
    id, what = _encode(task_id) if task_id else '""', _encode(payload)
    said = f'{{"id": {id}, "payload": {what}, "priority": {priority:d}, "attempts": {attempts:d}{more}'
    text = b'%s, "put": "%s"}\n' % (said.encode("utf-8", "surrogatepass"), moment())
    if depth_of(text) > _DEEPEST:
        raise ValueError(f"a payload nested more than {_DEEPEST} deep could not be read again")
    return text


def line(said: dict[str, object], at: str = "at") -> bytes:
    said[at] = moment().decode()
    return _encode(said).encode("utf-8", "surrogatepass") + b"\n"


_second = (0, b"")  # when it begins, in microseconds, and as it is written


def moment() -> bytes:
    """Now, as it is written. Most moments are in the same second as the one before."""
    global _second
    now = time_ns() // 1000
    begin, text = _second
    if not 0 <= now - begin < 1_000_000:
        seconds = now // 1_000_000
        begin, text = _second = (seconds * 1_000_000, strftime("%Y-%m-%dT%H:%M:%S", gmtime(seconds)).encode())
    return b"%s.%06dZ" % (text, now - begin)


def done_line(result: object) -> bytes:
    if result is None:
        return b'{"is": "done", "result": null, "at": "%s"}\n' % moment()
    text = line({"is": "done", "result": result})
    if depth_of(text) > _DEEPEST:
        raise ValueError(f"a result nested more than {_DEEPEST} deep could not be read again")
    return text


_beginning: bytes = b""
_written_by: owner.Identity | None = None


def running_line(token: int) -> bytes:
    """`line`, at a third of its price: one is written for every attempt."""
    global _beginning, _written_by
    me = owner.me()
    if _written_by is not me:
        said = _encode({"worker": f"{me.pid}@{me.host}", "by": me.random.decode(), "boot": me.boot})[1:-1]
        _beginning = b', %s, "at": "' % said.encode()
        _written_by = me
    return b'{"is": "running", "token": %d%s%s"}\n' % (token, _beginning, moment())


def is_done_line(line: bytes) -> bool:
    """Is it whole, and says so?"""
    said = _object(line)
    return said is not None and said.get("is") == "done"


def read_file(path: str) -> Task:
    """What is known of a task by its file."""
    return parse(read_all(path), path)


def has_begun(text: bytes) -> bool:
    """Did anybody add a line to the one with which it was put?"""
    return text.count(b"\n") > 1


def was_never_put(path: str) -> bool:
    """Is it not even one line? Then the power failed before it was on disk, and nobody was told that it is there."""
    return b"\n" not in read_all(path).strip(b"\0")


def parse(text: bytes, path: str) -> Task:
    """What the lines say. CorruptStore: the first one does not say what there is to do."""
    first, _, rest = text.partition(b"\n")
    said = _object(first)
    if said is None or not isinstance(said.get("id"), str) or "payload" not in said:
        raise CorruptStore(
            f"{path}: its first line does not describe a task. Mend it, or remove the file.", path=path, line=1
        )
    known = _options(said)
    if not rest:
        task = object.__new__(Task)  # what it does not say is as the class says
        task.__dict__.update(known)
        return task
    return _with_history(known, [one for one in map(_object, rest.split(b"\n")) if one is not None])


def _options(said: dict[str, Any]) -> dict[str, Any]:
    """What the first line says, and can mean; somebody may have edited it."""
    priority, attempts = said.get("priority"), said.get("attempts")
    is_sound = type(priority) is type(attempts) is int and -LARGEST <= priority <= LARGEST
    if is_sound and len(said) == 5 and "put" in said:
        return said  # and nothing else, as most of them
    known = {
        "id": said["id"],
        "payload": said["payload"],
        "priority": max(-LARGEST, min(LARGEST, _integer(said.get("priority"), 0))),
        "attempts": _integer(said.get("attempts"), 3),
        "put": said.get("put"),
    }
    if "timeout" in said:
        known["timeout"] = _seconds(said["timeout"]) or None
    if isinstance(said.get("key"), str):
        known["key"], known["limit"] = said["key"], max(1, _integer(said.get("limit"), 1))
    if "delay" in said:
        known["delay"] = _seconds(said["delay"])
    return known


def _with_history(known: dict[str, Any], history: list[dict[str, Any]]) -> Task:
    tried = token = 0
    for said in history:
        at = said.get("at")
        progress = said.get("progress")
        if isinstance(progress, list) and len(progress) == 3:
            known["progress"] = tuple(progress)
        state = said.get("is")
        if not isinstance(state, str):
            continue
        if state == "running":
            tried += 1
            token = max(token + 1, _integer(said.get("token"), 0))
            known.update(worker=said.get("worker"), by=said.get("by"), boot=said.get("boot"))
            known.update(started=at, progress=None)
        elif state == "pending":
            if said.get("uncounted"):
                tried = max(0, tried - 1)
            if said.get("again"):
                tried = 0
        elif state not in ENDED:
            continue
        known["state"] = state
        known["ended"] = at if state in ENDED else None
        known["result"] = said.get("result")
        if state != "running":  # a running task still says what went wrong the last time
            known["error"] = said.get("because")
            known["traceback"] = said.get("traceback")
            known["output"] = said.get("output")
    return Task(**known, tried=tried, token=token, history=tuple(history))


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = text.decode("utf-8", "surrogatepass").strip()
        said, end = _decode(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and end == len(line) else None


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LONGEST:
        return value
    return 0


def _datetime(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
