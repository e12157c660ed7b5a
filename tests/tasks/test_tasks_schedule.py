"""Schedules: when they are due, and that what is due is put once."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support import claim_all, until

from holdfast import UnsafePath
from holdfast.tasks import TaskQueue, Worker
from holdfast.tasks.schedule import Cron, Every


@pytest.fixture
def queue(in_memory: Path) -> TaskQueue:
    return TaskQueue(in_memory / "jobs", durable=False)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize(
    ("cron", "after", "due"),
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
def test_cron(cron: str, after: str, due: str) -> None:
    assert Cron(cron).after(moment(after)) == moment(due)


def test_never() -> None:
    assert Cron("0 0 31 2 *").after(moment("2026-01-01T00:00:00")) is None


@pytest.mark.parametrize(
    "bad", ["", "* * * *", "60 * * * *", "* * 0 * *", "5-1 * * * *", "*/0 * * * *", "x * * * *", "1/x * * * *"]
)
def test_what_is_no_schedule(bad: str) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Cron(bad)


def test_every() -> None:
    assert Every(60).after(120.0) == 180.0 and Every(60).after(121.5) == 180.0
    with pytest.raises(ValueError, match="seconds"):
        Every(0)


def test_it_is_put_once_whoever_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, other = TaskQueue(tmp_path / "jobs"), TaskQueue(tmp_path / "jobs")
    now = [moment("2026-01-31T11:59:30")]
    for one in (queue, other):
        monkeypatch.setattr(one.clock, "now", lambda: now[0])
    queue.schedule("report", {"kind": "daily"}, cron="0 * * * *", priority=3)
    assert queue.put_scheduled() == other.put_scheduled() == moment("2026-01-31T12:00:00")
    assert list(queue) == []
    now[0] = moment("2026-01-31T12:00:01")
    for one in (queue, other, queue):
        assert one.put_scheduled() == moment("2026-01-31T13:00:00")
    (task,) = queue
    assert (task.id, task.payload, task.priority) == ("report@2026-01-31T12:00:00Z", {"kind": "daily"}, 3)
    now[0] = moment("2026-01-31T18:10:00")  # nobody looked for six hours
    other.put_scheduled()
    assert sorted(task.id for task in queue) == ["report@2026-01-31T12:00:00Z", "report@2026-01-31T18:00:00Z"]
    assert TaskQueue(tmp_path / "jobs").unschedule("report") and not queue.unschedule("report")
    now[0] = moment("2026-01-31T19:10:00")
    assert queue.put_scheduled() is None


def test_what_is_wrong_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = TaskQueue(tmp_path / "jobs")
    with pytest.raises(ValueError, match="either"):
        queue.schedule("x")
    with pytest.raises(TypeError, match="delay"):
        queue.schedule("x", every=1, delay=3)
    queue.schedule("good", every=3600)
    (tmp_path / "jobs/schedules/bad.json").write_text("{")
    assert queue.put_scheduled() is not None and "bad.json is no schedule" in caplog.text


@pytest.mark.timeout(20)
def test_years_in_which_nobody_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TaskQueue(tmp_path / "jobs")
    now = [moment("2020-01-01T00:00:00")]
    monkeypatch.setattr(queue.clock, "now", lambda: now[0])
    queue.schedule("minute", cron="* * * * *")
    queue.schedule("second", every=1)
    queue.schedule("year", cron="0 0 1 jan *")
    now[0] = moment("2026-06-01T12:00:30")
    assert queue.put_scheduled() == now[0] + 1
    assert sorted(task.id for task in queue) == [
        "minute@2026-06-01T12:00:00Z",
        "second@2026-06-01T12:00:30Z",
        "year@2026-01-01T00:00:00Z",
    ]


@pytest.mark.parametrize(
    "change", [{"options": {"delay": 3}}, {"options": 7}, {"since": "x"}, {"name": None}, {"every": []}]
)
def test_a_schedule_that_somebody_has_edited(
    tmp_path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    queue = TaskQueue(tmp_path / "jobs")
    queue.schedule("x", every=3600)
    path = tmp_path / "jobs/schedules/x.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (tmp_path / "jobs/schedules").touch()
    assert TaskQueue(tmp_path / "jobs").put_scheduled() is None and "is no schedule" in caplog.text


def test_a_full_queue_is_no_reason_to_stop(tmp_path: Path) -> None:
    queue = TaskQueue(tmp_path / "jobs", max_pending=1)
    queue.schedule("x", every=1)
    path = tmp_path / "jobs/schedules/x.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "since": 0}))
    queue.put("waits")
    assert Worker(queue, lambda task: None).run(drain=True).done == 1


def test_one_that_is_wrong_is_not_in_the_way_of_the_others(queue: TaskQueue) -> None:
    for name in ("a", "z"):
        queue.schedule(name, every=1)
    folder = Path(queue.path) / "schedules"
    said = json.loads((folder / "a.json").read_text())
    for change in ({"cron": [5], "every": None}, {"options": {"priority": "high"}}, {"every": 1e300}, {"since": 1e300}):
        (folder / "a.json").unlink()
        (folder / "a.json").write_text(json.dumps({**said, **change}))
        before = queue.stats()["pending"]
        until(lambda before=before: _put(queue) or queue.stats()["pending"] > before)
    (folder / "a.json").unlink()
    os.mkfifo(folder / "a.json")
    before = queue.stats()["pending"]
    until(lambda: _put(queue) or queue.stats()["pending"] > before)


def _put(queue: TaskQueue) -> None:
    with suppress(ValueError):
        queue.put_scheduled()


@pytest.mark.parametrize(
    ("name", "payload", "every"),
    [("x" * 240, None, 1), ("a", float("nan"), 1), ("a", None, 10**400), ("a", None, float("inf"))],
)
def test_what_cannot_be_put_cannot_be_scheduled(name: str, payload: object, every: float, queue: TaskQueue) -> None:
    with pytest.raises((ValueError, UnsafePath)):
        queue.schedule(name, payload, every=every)
    assert queue.schedules.all() == {}


def test_what_was_put_last_is_not_purged(queue: TaskQueue, jobs: Path) -> None:
    """Else whoever comes next would put it again: that it is there says that it was put."""
    queue.schedule("report", every=3600)
    said = json.loads((jobs / "schedules" / "report.json").read_text())
    (jobs / "schedules" / "report.json").write_text(json.dumps({**said, "since": said["since"] - 7200}))
    os.utime(jobs / "schedules", (1, 1))
    queue.put_scheduled()
    (id,) = queue.ids("pending")
    queue.put("other")
    assert len(claim_all(queue)) == 2
    assert queue.purge() == 1 and queue.get(id).state == "done"
    TaskQueue(jobs).put_scheduled()
    assert queue.ids("pending") == []
    queue.unschedule("report")
    assert queue.purge() == 1 and id not in queue


def test_the_name_of_a_schedule(queue: TaskQueue) -> None:
    for name in ("", 5):
        with pytest.raises(ValueError, match="name of a schedule"):
            queue.schedule(name, every=5)  # type: ignore[arg-type]
