"""Schedules: when they are due, and that the task of a moment is added once."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support import claim_all

from holdfast.tasks import TaskQueue
from holdfast.tasks import queue as queue_module
from holdfast.tasks import schedule as schedule_module
from holdfast.tasks import sql as sql_module
from holdfast.tasks.schedule import Schedule


@pytest.fixture
def queue(in_memory: Path) -> TaskQueue:
    return TaskQueue(in_memory / "jobs", durable=False)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


def after(text: str, cron: str, tz: str | None = None) -> str | None:
    """The next moment of cron, and that this moment is the last one when it has come."""
    schedule = Schedule("name", None, cron, None, tz, {}, 0.0)
    schedule.check()
    found = schedule.next_after(moment(text))
    if found is None:
        return None
    assert schedule.due(0.0, found.timestamp()) == schedule.due(0.0, found.timestamp() + 0.5) == found.timestamp()
    return found.replace(tzinfo=None).isoformat()


@pytest.mark.parametrize(
    ("cron", "begin", "due"),
    [
        ("* * * * *", "2026-01-31T12:00:30", "2026-01-31T12:01:00"),
        ("* * * * *", "2026-12-31T23:59:00", "2027-01-01T00:00:00"),
        ("*/15 * * * *", "2026-01-31T12:46:00", "2026-01-31T13:00:00"),
        ("5 4 * * *", "2026-01-31T04:05:00", "2026-02-01T04:05:00"),
        ("0 9-17/4 * * *", "2026-01-31T09:00:00", "2026-01-31T13:00:00"),
        ("30 8 * * mon-fri", "2026-01-30T09:00:00", "2026-02-02T08:30:00"),
        ("0 0 * * 7", "2026-01-31T00:00:00", "2026-02-01T00:00:00"),
        ("0 0 29 2 *", "2026-01-31T00:00:00", "2028-02-29T00:00:00"),
        ("0 0 13 * fri", "2026-01-31T00:00:00", "2026-02-06T00:00:00"),
        ("0 0 13 * *", "2026-01-31T00:00:00", "2026-02-13T00:00:00"),
        ("1,2 0 1 jan,jul *", "2026-01-01T00:01:00", "2026-01-01T00:02:00"),
        ("@monthly", "2026-01-31T12:00:00", "2026-02-01T00:00:00"),
    ],
)
def test_the_next_moment_of_cron(cron: str, begin: str, due: str) -> None:
    assert after(begin, cron) == due


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "* * * *",
        "0 * * * * *",
        "60 * * * *",
        "* * 0 * *",
        "5-1 * * * *",
        "*/0 * * * *",
        "x * * * *",
        "1/x * * * *",
        "0 0 31 2 *",
        5,
    ],
)
def test_wrong_fields_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="cron"):
        after("2026-01-01T00:00:00", bad)


def test_every_counts_from_1970() -> None:
    schedule = Schedule("name", None, None, 60, None, {}, 0.0)
    for now in (120.0, 121.5):
        following = schedule.next_after(now)
        assert following is not None and following.timestamp() == 180.0 and schedule.due(0.0, now) == 120.0


class Clock:
    """The wall clock of the queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        self.set(text)
        for module in (queue_module, sql_module):
            monkeypatch.setattr(module, "time", lambda: self.now)

    def set(self, text: str) -> None:
        self.now = moment(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "2026-01-31T11:59:30")


def ids(queue: TaskQueue) -> list[str]:
    return sorted(task.id for task in queue)


def test_the_task_of_a_moment_is_added_once_by_all_workers(queue: TaskQueue, clock: Clock) -> None:
    other = TaskQueue(queue.path, durable=False)
    queue.schedule("report", {"kind": "daily"}, cron="0 * * * *", priority=3)
    assert queue.put_scheduled() == other.put_scheduled() == moment("2026-01-31T12:00:00")
    assert ids(queue) == []
    clock.set("2026-01-31T12:00:01")
    for one in (queue, other, queue):
        assert one.put_scheduled() == moment("2026-01-31T13:00:00")
    (task,) = queue
    assert (task.id, task.payload, task.priority) == ("report@2026-01-31T12:00:00Z", {"kind": "daily"}, 3)
    clock.set("2026-01-31T18:10:00")  # no worker ran for six hours
    other.put_scheduled()
    assert ids(queue) == ["report@2026-01-31T12:00:00Z", "report@2026-01-31T18:00:00Z"]
    assert other.unschedule("report") and not queue.unschedule("report")
    clock.set("2026-01-31T19:10:00")
    assert queue.put_scheduled() is None


def test_a_moment_is_not_added_again_after_its_task_was_purged_or_the_clock_was_set_back(
    queue: TaskQueue, clock: Clock
) -> None:
    queue.schedule("report", cron="0 * * * *")
    clock.set("2026-01-31T12:00:01")
    queue.put_scheduled()
    assert len(claim_all(queue)) == 1
    queue.put("newer")
    assert queue.purge() == 1
    queue.put_scheduled()
    clock.set("2026-01-31T11:59:00")
    queue.put_scheduled()
    clock.set("2026-01-31T12:00:30")
    queue.put_scheduled()
    assert [task.payload for task in queue] == ["newer"]
    clock.set("2026-01-31T13:00:00")
    queue.put_scheduled()
    assert len(ids(queue)) == 2


def test_a_clock_that_was_years_ahead_for_a_while_does_not_stop_a_schedule(queue: TaskQueue, clock: Clock) -> None:
    queue.schedule("report", cron="0 * * * *")
    clock.set("2099-01-01T00:00:01")
    queue.put_scheduled()
    clock.set("2026-01-31T13:30:00")
    queue.put_scheduled()
    assert ids(queue) == ["report@2026-01-31T13:00:00Z", "report@2099-01-01T00:00:00Z"]


@pytest.mark.timeout(20)
def test_of_years_without_a_worker_only_the_last_moment_is_made_up_for(queue: TaskQueue, clock: Clock) -> None:
    clock.set("2020-01-01T00:00:00")
    queue.schedule("minute", cron="* * * * *")
    queue.schedule("second", every=1)
    queue.schedule("year", cron="0 0 1 jan *")
    clock.set("2026-06-01T12:00:30")
    assert queue.put_scheduled() == clock.now + 1
    assert ids(queue) == ["minute@2026-06-01T12:00:00Z", "second@2026-06-01T12:00:30Z", "year@2026-01-01T00:00:00Z"]


# Time zones.


@pytest.mark.parametrize(
    ("cron", "begin", "due"),
    [
        # Winter time: 06:00 in Berlin is 05:00 in UTC. Summer time: 04:00.
        ("0 6 * * *", "2026-01-15T00:00:00", "2026-01-15T05:00:00"),
        ("0 6 * * *", "2026-07-15T00:00:00", "2026-07-15T04:00:00"),
        # 29 March: from 02:00 to 03:00, which is 01:00 in UTC.
        ("30 2 * * *", "2026-03-28T12:00:00", "2026-03-29T01:00:00"),
        ("30 2 * * *", "2026-03-29T01:00:00", "2026-03-30T00:30:00"),
        ("*/30 * * * *", "2026-03-29T00:30:00", "2026-03-29T01:00:00"),
        ("*/30 * * * *", "2026-03-29T01:00:00", "2026-03-29T01:30:00"),
        # 25 October: from 03:00 back to 02:00, which is 01:00 in UTC.
        ("30 2 * * *", "2026-10-24T12:00:00", "2026-10-25T00:30:00"),
        ("30 2 * * *", "2026-10-25T00:30:00", "2026-10-26T01:30:00"),
        ("30 2 * * *", "2026-10-25T01:15:00", "2026-10-26T01:30:00"),
        ("*/30 * * * *", "2026-10-25T00:30:00", "2026-10-25T01:00:00"),
        ("*/30 * * * *", "2026-10-25T01:00:00", "2026-10-25T01:30:00"),
        ("0 0 29 2 *", "2026-01-01T00:00:00", "2028-02-28T23:00:00"),
    ],
)
def test_cron_in_a_time_zone_follows_its_wall_clock(cron: str, begin: str, due: str) -> None:
    assert after(begin, cron, "Europe/Berlin") == due


def test_a_schedule_follows_its_time_zone_in_the_queue(queue: TaskQueue, clock: Clock) -> None:
    queue.schedule("report", cron="0 6 * * *", tz="Europe/Berlin")
    clock.set("2026-02-01T05:00:00")
    queue.put_scheduled()
    assert ids(queue) == ["report@2026-02-01T05:00:00Z"]
    assert queue.next_scheduled("report") == datetime(2026, 2, 2, 5, tzinfo=timezone.utc)
    assert queue.next_scheduled("nothing") is None


def test_a_moment_in_the_hour_that_comes_twice_is_made_up_for_in_that_hour(queue: TaskQueue, clock: Clock) -> None:
    queue.schedule("report", cron="30 2 * * *", tz="Europe/Berlin")
    clock.set("2026-10-25T01:10:00")  # 02:10 in Berlin, for the second time
    queue.put_scheduled()
    assert ids(queue) == ["report@2026-10-25T00:30:00Z"]


# Bad input.


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("", {"every": 5}, ValueError),
        (5, {"every": 5}, ValueError),
        ("x" * 1000, {"every": 5}, ValueError),
        ("a", {}, ValueError),
        ("a", {"every": 5, "cron": "* * * * *"}, ValueError),
        ("a", {"every": 0}, ValueError),
        ("a", {"every": True}, TypeError),
        ("a", {"every": 10**400}, ValueError),
        ("a", {"every": float("inf")}, ValueError),
        ("a", {"every": 5, "tz": "Europe/Berlin"}, ValueError),
        ("a", {"cron": "99 * * * *"}, ValueError),
        ("a", {"cron": "0 0 * * *", "tz": "Europe/Nowhere"}, ValueError),
        ("a", {"cron": "0 0 * * *", "tz": "../../etc/passwd"}, ValueError),
        ("a", {"every": 5, "delay": 3}, TypeError),
        ("a", {"every": 5, "priority": "high"}, ValueError),
        ("a", {"every": 5, "payload": float("nan")}, ValueError),
    ],
)
def test_a_wrong_schedule_is_refused_before_anything_is_written(
    queue: TaskQueue, name: str, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        queue.schedule(name, **options)  # type: ignore[arg-type]
    assert queue.schedules() == {}


def test_a_function_that_needs_arguments_is_no_schedule(queue: TaskQueue) -> None:
    @queue.task
    def resize(name: str) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'name'"):
        queue.schedule("resize", resize, every=60)
    assert queue.schedules() == {}


def test_a_schedule_that_cannot_be_used_is_not_in_the_way_of_the_others(
    queue: TaskQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance because this machine does not know its time zone."""
    queue.schedule("a", cron="0 * * * *", tz="Europe/Berlin")
    queue.schedule("b", cron="0 * * * *")

    def unknown(name: str) -> None:
        raise ValueError(f"there is no time zone {name!r}")

    monkeypatch.setattr(schedule_module, "zone_of", unknown)
    clock.set("2026-01-31T12:00:01")
    with pytest.raises(ValueError, match="schedule 'a'"):
        queue.put_scheduled()
    assert ids(queue) == ["b@2026-01-31T12:00:00Z"]


def test_a_schedule_is_replaced_by_its_name(queue: TaskQueue) -> None:
    queue.schedule("a", 1, every=3600)
    queue.schedule("a", 2, every=1)
    assert queue.schedules()["a"].payload == 2
    before = time.time()
    while queue.put_scheduled() is not None and not ids(queue):
        assert time.time() - before < 60
    assert [task.payload for task in queue] == [2]
