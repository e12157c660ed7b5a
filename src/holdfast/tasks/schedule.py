"""When a schedule is due: at an interval in seconds, or by five fields as in cron.

The fields (`cronsim` reads them) are in UTC, or in a time zone. In a zone they mean what Debian's cron makes of them: a
moment in the hour that summer time skips comes when that hour is over, and a moment in the hour that comes twice is due
the first time. If the minute or the hour begins with `*`, no moment is moved, and the hour that comes twice counts
twice.

Workers add the task of a moment once, however many of them look (`Store.add_moment`). Of the moments that passed while
no worker ran, only the last one is made up for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from typing import Any

from .model import check_id, check_seconds, new_task
from .store import NewTask

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
OPTIONS = frozenset({"priority", "attempts", "timeout", "key", "limit", "rate"})  # of `put`
A_DAY_S = 86_400.0
_LONGEST_SHIFT_S = 3 * 3600.0


@dataclass(frozen=True)
class Schedule:
    """A task that workers add again and again."""

    name: str
    payload: Any
    cron: str | None
    every: float | None  # counted from 1970, so that all workers agree
    tz: str | None
    options: dict[str, Any]  # of `put`
    since: float  # when it was made
    function: str | None = None  # the name of a registered function

    def check(self) -> None:
        """Raises TypeError or ValueError if the schedule, or a task of it, is wrong."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a schedule must be a text that is not empty, not {self.name!r}")
        check_id(f"{self.name}@2000-01-01T00:00:00Z")
        if unknown := set(self.options) - OPTIONS:
            raise TypeError(f"a schedule cannot have {', '.join(sorted(unknown))}")
        if (self.cron is None) == (self.every is None):
            raise ValueError("a schedule needs either cron='… five fields …' or every=seconds")
        if self.cron is None and self.tz is not None:
            raise ValueError("tz needs cron")
        if self.every is not None:
            check_seconds("every", self.every, least=1)
        self.next_after(0.0)
        self.task(0.0)

    def next_after(self, now: float) -> datetime | None:
        """Its first moment later than this. None: there is none."""
        if self.every is not None:
            moment: float | None = (now // self.every + 1) * self.every
        else:
            moment = self._by_cron(now, lambda found: found > now)
        return None if moment is None else datetime.fromtimestamp(moment, timezone.utc)

    def due(self, last: float, now: float) -> float | None:
        """The last moment that has come and was not added. One more than a day ahead was added by a wrong clock."""
        after = last if self.since < last < now + A_DAY_S else self.since
        if self.every is not None:
            moment: float | None = now // self.every * self.every
        else:
            # In the hour that comes twice, begin behind it: what came the first time is later by the clock on the wall.
            went_back = max(0.0, self._offset(now - _LONGEST_SHIFT_S) - self._offset(now))
            moment = self._by_cron(now // 1 + 1 + went_back, lambda found: found <= now, reverse=True)
        return moment if moment is not None and moment > after else None

    def _zone(self) -> tzinfo:
        return timezone.utc if self.tz is None else zone_of(self.tz)

    def _offset(self, moment: float) -> float:
        """Seconds that the clock on the wall is ahead of UTC."""
        offset = datetime.fromtimestamp(moment, self._zone()).utcoffset()
        return 0.0 if offset is None else offset.total_seconds()

    def _by_cron(self, begin: float, fits: Any, *, reverse: bool = False) -> float | None:
        from cronsim import CronSim, CronSimError

        text = _ALIASES.get(self.cron.strip(), self.cron) if isinstance(self.cron, str) else ""
        local = datetime.fromtimestamp(begin, self._zone())
        try:
            if len(text.split()) != 5:
                raise CronSimError("Wrong number of fields")
            moments = (moment.timestamp() for moment in CronSim(text, local, reverse))
            return next(filter(fits, moments), None)
        except CronSimError as error:
            raise ValueError(f"cron must be minute, hour, day, month, weekday, not {self.cron!r}: {error}") from None

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
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):
        raise ValueError(
            f"there is no time zone {name!r}. Use a name such as 'Europe/Berlin'. If that is unknown, too: pip install "
            "tzdata"
        ) from None
