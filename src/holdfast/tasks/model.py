"""The checks of what users pass in."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from ..json_text import depth_of
from .store import ENDED, NewTask

MAX_PRIORITY = 10**9
MAX_SECONDS = 9e9  # what the kernel can count in nanoseconds
MAX_ID_LENGTH = 1000
MAX_ID_BYTES = 2500  # in UTF-8. PostgreSQL has no index of longer ones
MAX_DEPTH = 200  # of nested JSON, so that every Python can read it
STATES = ("pending", "running", *ENDED)

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")  # a database stores neither NUL nor half of a surrogate pair
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)/([0-9]*)([smhd])")
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_DEFAULTS = (0, 0, 3, None, None, None)  # most tasks have no options
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# `JSONEncoder.encode` makes such an object at every call. This one does not look for circles: RecursionError ends it.
_make_pieces: Any = getattr(json.encoder, "c_make_encoder", None)
_pieces = _make_pieces and _make_pieces(
    None, _encoder.default, json.encoder.encode_basestring, None, ": ", ", ", False, False, False
)


def to_json(value: object, what: str = "payload") -> str:
    """JSON text. Raises TypeError or ValueError if JSON cannot express the value."""
    too_deep = f"the {what} is nested more than {MAX_DEPTH} levels deep"
    try:
        text = "".join(_pieces(value, 0)) if _pieces else _encoder.encode(value)
    except (RecursionError, TypeError, ValueError):
        try:
            text = _encoder.encode(value)  # the error of this one names a circle, too
        except RecursionError:
            raise ValueError(too_deep) from None
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"the {what} of a task must be what JSON can express: {error}") from None
    if len(text) <= MAX_DEPTH and text.isascii():
        return text
    try:
        raw = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a database does not store
        text = json.dumps(value, allow_nan=False)
        raw = text.encode()
    if depth_of(raw) > MAX_DEPTH:
        raise ValueError(too_deep)
    return text


def storable(text: str) -> str:
    """The text with escapes for what a database does not store."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def new_task(
    payload: object,
    *,
    id: str | None = None,
    function: str | None = None,
    priority: int = 0,
    delay: float = 0,
    attempts: int = 3,
    timeout: float | None = None,
    key: str | None = None,
    limit: int | None = None,
    rate: str | None = None,
    after: str | list[str] | tuple[str, ...] = (),
    **unknown: Any,
) -> NewTask:
    """Check all options. Raises TypeError or ValueError."""
    for name in unknown:
        raise TypeError(f"a task has no option {name!r}. See help(TaskQueue.put)")
    if id is not None:
        check_id(id)
    if function is not None:
        _check_text("the name of a function", function)
    if key is None and not after and (priority, delay, attempts, timeout, limit, rate) == _DEFAULTS:
        return NewTask(to_json(payload), id, function)
    _check_integer("priority", priority, -MAX_PRIORITY)
    _check_integer("attempts", attempts, 1)
    check_seconds("delay", delay)
    if timeout is not None:
        check_seconds("timeout", timeout, positive=True)
    if key is not None:
        _check_text("a key", key)
    if limit is not None:
        _check_integer("limit", limit, 1)
    if key is None and (limit is not None or rate is not None):
        raise ValueError("limit and rate need a key")
    ids = (after,) if isinstance(after, str) else tuple(after)
    for one in ids:
        if not isinstance(one, str):
            raise TypeError(f"after must be ids of tasks, not {one!r}")
    return NewTask(
        payload_json=to_json(payload),
        id=id,
        function=function,
        priority=priority,
        delay=float(delay),
        attempts=attempts,
        timeout=None if timeout is None else float(timeout),
        key=key,
        limit=limit if limit is not None else 0 if key is None or rate is not None else 1,
        interval=0.0 if rate is None else _interval_of(rate),
        after=ids,
    )


def check_id(id: str) -> None:
    _check_text("an id", id)
    if id[0] == "_" and id[1:].isdigit():
        raise ValueError(f"{id!r}: ids of an underscore and a number are chosen by the queue")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {value!r}")
    if not value or len(value) > MAX_ID_LENGTH or _UNSTORABLE.search(value) or len(value.encode()) > MAX_ID_BYTES:
        limits = f"1 to {MAX_ID_LENGTH} characters, at most {MAX_ID_BYTES} bytes in UTF-8"
        raise ValueError(f"{name} must be a text of {limits}, not {value!r}")


def check_seconds(name: str, value: float | None, *, positive: bool = False, least: float = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not least <= value < MAX_SECONDS or (positive and not value):  # also NaN
        limit = "more than 0" if positive else f"at least {least}"
        raise ValueError(f"{name} must be a number of seconds, {limit}, not {value!r}")


def _interval_of(rate: str) -> float:
    """Seconds between two starts: "10/m" is 6."""
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    number = float(match[1]) if match else 0.0
    interval = float(match[2] or 1) * _SPANS[match[3]] / number if match and number else 0.0
    if not 0 < interval < MAX_SECONDS:
        raise ValueError(f"rate must be a number per time, such as '10/m' or '1/30s', not {rate!r}")
    return interval


def seconds_of(name: str, span: float | str | None) -> float | None:
    """Seconds of a span such as "7d". None: for ever."""
    if span is None:
        return None
    if isinstance(span, str):
        match = _SPAN.fullmatch(span)
        if match is None:
            raise ValueError(f"{name} must be seconds or a text such as '7d', '2h' or '90s', not {span!r}")
        return float(match[1]) * _SPANS[match[2]]
    check_seconds(name, span)
    return span


def check_states(states: Collection[str], known: Collection[str]) -> set[str]:
    wanted = {states} if isinstance(states, str) else set(states)
    for state in wanted.difference(known):
        raise ValueError(f"states must be some of {', '.join(known)}, not {state!r}")
    return wanted


def _check_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_PRIORITY:
        raise ValueError(f"{name} must be an integer from {least} to {MAX_PRIORITY}, not {value!r}")
