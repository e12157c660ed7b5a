"""Tasks that are put again and again: `schedules/<name>.json`, and when each is due.

Any number of workers may look after the schedules of a queue. Who finds that one is due puts its task with an id made
of its name and of the moment, and what is put twice by one id is there once. Moments that passed while nobody looked
are not made up for, but for the last one.

A schedule is every so many seconds, or five fields as cron has them: minute, hour, day of the month, month, day of the
week; `*`, `5`, `1-5`, `*/15`, `1,2`, names of months and days. They are in UTC, in which no hour is there twice.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from .. import system
from ..files import read_all, replace_file
from .journal import LONGEST
from .places import file_name, listed, make, sync_folders

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _DAYS),
)
_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_A_MINUTE = timedelta(minutes=1)
OPTIONS = frozenset({"priority", "attempts", "timeout", "key", "limit"})  # of `put`
_SPANS = (60.0, 3600.0, 86_400.0, 86_400.0 * 31, 86_400.0 * 366 * 5)
_LONGEST_SEARCH = 366 * 5  # days; the 29th of February is never further away than that, but for one century


class Cron:
    """The minutes that a text of five fields names."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a schedule has five fields (minute hour day month weekday), not {text!r}")
        parts = _ALIASES.get(text.strip(), text).split()
        if len(parts) != len(_FIELDS):
            raise ValueError(f"a schedule has five fields (minute hour day month weekday), not {text!r}")
        sets = [_parse(part, *field) for part, field in zip(parts, _FIELDS, strict=True)]
        self._minutes, self._hours, self._days, self._months, self._weekdays = sets
        if 7 in self._weekdays:
            self._weekdays |= {0}
        # As cron has it: if both are given, either will do.
        self._either_day = not parts[2].startswith("*") and not parts[4].startswith("*")

    def _has_day(self, day: datetime) -> bool:
        if day.month not in self._months:
            return False
        by_date, by_name = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return by_date or by_name if self._either_day else by_date and by_name

    def after(self, moment: float) -> float | None:
        """The first one later than this. None: there is none."""
        found = datetime.fromtimestamp(moment, timezone.utc).replace(second=0, microsecond=0) + _A_MINUTE
        for _ in range(_LONGEST_SEARCH):
            if self._has_day(found):
                for hour in sorted(one for one in self._hours if one >= found.hour):
                    least = found.minute if hour == found.hour else 0
                    minute = min((one for one in self._minutes if one >= least), default=None)
                    if minute is not None:
                        return found.replace(hour=hour, minute=minute).timestamp()
            found = found.replace(hour=0, minute=0) + timedelta(days=1)
        return None


class Every:
    def __init__(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or not 1 <= seconds < LONGEST:
            raise ValueError(f"every is a number of seconds, at least 1, not {seconds!r}")
        self._seconds = seconds

    def after(self, moment: float) -> float:
        return (moment // self._seconds + 1) * self._seconds


def _parse(part: str, name: str, least: int, most: int, names: tuple[str, ...]) -> set[int]:
    found: set[int] = set()
    for piece in part.lower().split(","):
        span, _, step = piece.partition("/")
        begin, dash, end = span.partition("-")
        if span == "*":
            low, high = least, most
        else:
            low = _number(begin, names, least)
            high = _number(end, names, least) if dash else (most if step else low)
        by = int(step) if step.isdigit() else 0 if step else 1
        if not (least <= low <= high <= most) or by < 1 or (step and not step.isdigit()):
            raise ValueError(f"{piece!r} is no {name} of a schedule ({least} to {most})")
        found.update(range(low, high + 1, by))
    return found


def _number(text: str, names: tuple[str, ...], least: int) -> int:
    if text in names:
        return names.index(text) + least
    return int(text) if text.isascii() and text.isdigit() else -1


def last_due(when: Cron | Every, after: float, now: float) -> float | None:
    """The last moment that has come since `after`. Looked for from its end, and so not through a year of minutes."""
    for back in _SPANS:
        begin = max(after, now - back)
        due = when.after(begin)
        if due is not None and due <= now:
            while (later := when.after(due)) is not None and later <= now:
                due = later
            return due
        if begin == after:
            break
    return None


def id_of(name: str, due: float) -> str:
    """That of the task which is put for a moment."""
    moment = datetime.fromtimestamp(due, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"{name}@{moment}"


class Schedules:
    """The schedules of a queue."""

    def __init__(self, root: str, mode: int) -> None:
        self.folder = f"{root}/schedules"
        self._mode = mode
        self._seen: tuple[int, ...] = ()
        self._known: dict[str, dict[str, Any]] = {}

    def write(self, name: str, said: dict[str, object]) -> None:
        timing(said)  # what is wrong is told at once
        text = json.dumps(said, ensure_ascii=False).encode() + b"\n"
        make(self.folder)
        replace_file(f"{self.folder}/{file_name(name)}.json", text, self._mode, sync=True)
        sync_folders(self.folder)

    def remove(self, name: str) -> bool:
        try:
            system.unlink(f"{self.folder}/{file_name(name)}.json")
        except FileNotFoundError:
            return False
        return True

    def last_ids(self, now: float) -> list[str]:
        """Of what each has put last, or is to put next for a moment that is past."""
        found = []
        for name, said in self.all().items():
            with suppress(TypeError, ValueError, AttributeError, OverflowError, KeyError):  # edited, perhaps, and wrong
                due = last_due(timing(said), said["since"], now)
                if due is not None:
                    found.append(id_of(name, due))
        return found

    def all(self) -> dict[str, dict[str, Any]]:
        """By name. Read again only if the directory has changed."""
        try:
            st = system.stat(self.folder)
        except FileNotFoundError:
            return {}
        seen = (st.st_mtime_ns, st.st_ino)
        if seen != self._seen:
            self._known = {}
            for name in listed(self.folder):
                if name.endswith(".json"):
                    self._read(name)
            self._seen = seen
        return self._known

    def _read(self, name: str) -> None:
        try:
            said = json.loads(read_all(f"{self.folder}/{name}"))
            timing(said)
            complete = isinstance(said["since"], int | float) and "payload" in said and set(said["options"]) <= OPTIONS
            if not complete or not isinstance(said["name"], str):
                raise ValueError("it does not have what a schedule has")
            self._known[said["name"]] = said
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            import logging

            logging.getLogger("holdfast").warning("%s/%s is no schedule: %s", self.folder, name, error)


def timing(said: dict[str, Any]) -> Cron | Every:
    """When it is due."""
    if (said.get("cron") is None) == (said.get("every") is None):
        raise ValueError("a schedule has either cron='… five fields …' or every=seconds")
    return Cron(said["cron"]) if said.get("cron") is not None else Every(said["every"])
