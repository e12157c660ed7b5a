"""When a schedule is due: at an interval in seconds, or by five fields as in cron.

The fields are minute, hour, day of the month, month, day of the week: `*`, `5`, `1-5`, `*/15`, `1,2`, and the names of
months and days. They are in UTC, or in a time zone. In a zone, a moment in the hour that summer time skips comes an
hour later. A moment in the hour that comes twice is due the first time, or both times if the hour is `*`.

Workers add the task of a moment once, however many of them look (`Store.add_moment`). Of the moments that passed while
no worker ran, only the last one is made up for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

from .model import MAX_SECONDS, check_id, new_task
from .store import NewTask

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
OPTIONS = frozenset({"priority", "attempts", "timeout", "key", "limit", "rate"})  # of `put`
A_DAY_S = 86_400.0
_SPANS = (60.0, 3600.0, 86_400.0, 86_400.0 * 31, 86_400.0 * 366 * 5)
_MAX_SEARCH_DAYS = 366 * 5  # the 29th of February is at most that far away, except for one century


class Cron:
    """The minutes that a text of five fields names, in a time zone."""

    def __init__(self, text: str, zone: tzinfo = timezone.utc) -> None:
        if not isinstance(text, str):
            raise TypeError(f"cron must be five fields (minute hour day month weekday), not {text!r}")
        parts = _ALIASES.get(text.strip(), text).split()
        if len(parts) != len(_FIELDS):
            raise ValueError(f"cron must be five fields (minute hour day month weekday), not {text!r}")
        sets = [_parse(part, *field) for part, field in zip(parts, _FIELDS, strict=True)]
        self._minutes, self._hours, self._days, self._months, self._weekdays = sets
        if 7 in self._weekdays:
            self._weekdays |= {0}
        # As in cron: if both are given, either will do.
        self._either_day = not parts[2].startswith("*") and not parts[4].startswith("*")
        self._zone = zone

    def _has_day(self, day: datetime) -> bool:
        if day.month not in self._months:
            return False
        by_date, by_name = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return by_date or by_name if self._either_day else by_date and by_name

    def after(self, moment: float) -> float | None:
        """The first moment later than this. None: there is none."""
        return self._after_by_hour(moment) if len(self._hours) == 24 else self._after_by_day(moment)

    def _after_by_day(self, moment: float) -> float | None:
        """By the local time. The hour that comes twice is meant the first time."""
        local = datetime.fromtimestamp(moment, self._zone).replace(tzinfo=None, second=0, microsecond=0, fold=0)
        for _ in range(_MAX_SEARCH_DAYS):
            if self._has_day(local):
                for hour in sorted(one for one in self._hours if one >= local.hour):
                    for minute in sorted(self._minutes):
                        found = local.replace(hour=hour, minute=minute, tzinfo=self._zone).timestamp()
                        if found > moment:
                            return found
            local = local.replace(hour=0, minute=0) + timedelta(days=1)
        return None

    def _after_by_hour(self, moment: float) -> float | None:
        """By the time that passes. The hour that comes twice counts twice."""
        found = (moment // 60 + 1) * 60
        for _ in range(_MAX_SEARCH_DAYS * 24):
            local = datetime.fromtimestamp(found, self._zone)
            if self._has_day(local):
                minute = min((one for one in self._minutes if one >= local.minute), default=None)
                if minute is not None:
                    return found + (minute - local.minute) * 60
            found += (60 - local.minute) * 60
        return None


class Every:
    """Moments at an interval, counted from 1970, so that all workers agree."""

    def __init__(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or not 1 <= seconds < MAX_SECONDS:
            raise ValueError(f"every must be a number of seconds, at least 1, not {seconds!r}")
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
            raise ValueError(f"{piece!r} is not a {name} of cron ({least} to {most})")
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


@dataclass(frozen=True)
class Schedule:
    """A task that workers add again and again."""

    name: str
    payload: Any
    cron: str | None
    every: float | None
    tz: str | None
    options: dict[str, Any]  # of `put`
    since: float  # when it was made
    function: str | None = None  # the name of a registered function

    def check(self) -> None:
        """Raises TypeError or ValueError if the schedule, or a task of it, is wrong."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a schedule must be a text that is not empty, not {self.name!r}")
        check_id(f"{self.name}@2000-01-01T00:00:00Z")
        unknown = set(self.options) - OPTIONS
        if unknown:
            raise TypeError(f"a schedule cannot have {', '.join(sorted(unknown))}")
        self.when()
        self.task(0.0)

    def when(self) -> Cron | Every:
        if (self.cron is None) == (self.every is None):
            raise ValueError("a schedule needs either cron='… five fields …' or every=seconds")
        if self.cron is None:
            if self.tz is not None:
                raise ValueError("tz needs cron")
            return Every(self.every)  # type: ignore[arg-type]
        return Cron(self.cron, timezone.utc if self.tz is None else zone_of(self.tz))

    def due(self, last: float, now: float) -> float | None:
        """The last moment that has come and was not added. One more than a day ahead was added by a wrong clock."""
        after = last if self.since < last < now + A_DAY_S else self.since
        return last_due(self.when(), after, now)

    def next_after(self, now: float) -> datetime | None:
        """Its next moment. None: there is none."""
        moment = self.when().after(now)
        return None if moment is None else datetime.fromtimestamp(moment, timezone.utc)

    def task(self, moment: float) -> NewTask:
        """The task of a moment."""
        text = datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        return new_task(self.payload, id=f"{self.name}@{text}", function=self.function, **self.options)

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in vars(self).items() if name != "name"}, ensure_ascii=False)

    @staticmethod
    def from_json(name: str, text: str) -> Schedule:
        return Schedule(name=name, **json.loads(text))


def zone_of(name: str) -> tzinfo:
    """A time zone by its name. Raises ValueError."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise ValueError(
            f"there is no time zone {name!r}. Use a name such as 'Europe/Berlin'. If that is unknown, too: pip install "
            "tzdata"
        ) from None
