"""`holdfast events copy`: a store moves between engines, also when the copy is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from support import Child, until

from holdfast.errors import CorruptStore
from holdfast.events import Event, EventStore, Query

if TYPE_CHECKING:
    from pathlib import Path

WAYS = ["to postgres", "to a directory", "between directories"]


@pytest.fixture(params=WAYS)
def places(request: pytest.FixtureRequest, in_memory: Path) -> tuple[str, str]:
    """Where from and where to."""
    directory = str(in_memory / "shop")
    if request.param == "between directories":
        return directory, str(in_memory / "other")
    url = request.getfixturevalue("postgres")
    return (directory, url) if request.param == "to postgres" else (url, directory)


def fill(store: EventStore, number: int) -> None:
    """Batches of several sizes, among them one that is larger than what is copied at once, with strange content."""
    store.append(
        Event("Ä\n", {"text": "\0\x7fü€😀", "big": 2**60, "f": 0.1}, {"a b", "ä"}, {"m": [None, True]}, "my id")
    )
    store.append([Event("Large", n, {"large", f"n:{n}"}) for n in range(1500)])
    for n in range(number):
        store.append([Event("T", [n, part], {f"n:{n}"}) for part in range(1 + n % 3)])


def contents(store: EventStore) -> list[Any]:
    return [(e.position, e.id, e.time, e.type, e.tags, e.data, e.metadata, e.batch[:2]) for e in store.read()]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "events", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_copy_has_the_same_positions_ids_times_and_batches(places: tuple[str, str]) -> None:
    source, target = EventStore(places[0], durable=False), EventStore(places[1])
    fill(source, 30)
    done = run("copy", *places, "--no-durable")
    assert (done.returncode, done.stdout) == (0, f"{source.head()}\n"), done.stderr
    assert contents(target) == contents(source)
    assert target.verify().ok and target.id != source.id
    assert [event.position for event in target.read(Query.of(tags={"n:3"}))] == [
        event.position for event in source.read(Query.of(tags={"n:3"}))
    ]
    source.append(Event("Late", 1))
    assert run("copy", *places).stdout == "1\n" and run("copy", *places).stdout == "0\n"
    assert target.append(Event("Next")) == source.head() + 1


def test_a_copy_that_is_killed_again_and_again_goes_on(places: tuple[str, str]) -> None:
    """Killed by SIGKILL after it has appended something more."""
    source, target = EventStore(places[0], durable=False), EventStore(places[1])
    fill(source, 3000)
    heads = [0]
    for _ in range(3):
        child = Child(lambda _: EventStore(places[0]).copy_to(EventStore(places[1], durable=False)))
        until(lambda: target.head() > heads[-1])
        os.kill(child.pid, signal.SIGKILL)
        assert child.end()[0] in (0, -signal.SIGKILL)
        heads.append(target.head())
        assert contents(target) == contents(source)[: heads[-1]]
        last = next(target.read(backwards=True, limit=1))
        assert last.batch[1] == last.position, "a batch is whole"
    assert len(set(heads)) == 4 and heads[1] < source.head(), "it was killed in the middle"
    assert source.copy_to(target) == source.head() - heads[-1]
    assert contents(target) == contents(source) and target.verify().ok


def test_a_target_with_other_events_is_refused(places: tuple[str, str]) -> None:
    source, target = EventStore(places[0], durable=False), EventStore(places[1])
    for number in range(5):
        source.append(Event("T", number, id=str(number)))
    assert source.copy_to(target) == 5
    target.append(Event("T", 5))
    source.append(Event("T", 5))
    with pytest.raises(CorruptStore, match=r"has events that .* does not have"):
        source.copy_to(target)
    done = run("copy", *places)
    assert done.returncode == 3 and "Copy to a new store" in done.stderr
    with pytest.raises(ValueError, match="are the same store"):
        source.copy_to(EventStore(places[0]))


def test_an_append_to_the_target_during_a_copy_ends_the_copy(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.events import copies

    source, target = EventStore(places[0], durable=False), EventStore(places[1])
    fill(source, 5)
    real = copies._check_beginning

    def check(*stores: EventStore) -> None:
        real(*stores)
        monkeypatch.setattr(copies, "_raw", later)

    raw = copies._raw

    def later(store: EventStore, after: int, head: int) -> Any:
        EventStore(places[1]).append(Event("Other"))
        return raw(store, after, head)

    monkeypatch.setattr(copies, "_check_beginning", check)
    with pytest.raises(CorruptStore, match="others appended to it meanwhile"):
        source.copy_to(target)
    assert [event.type for event in target.read()] == ["Other"]


def test_the_classes_of_a_store_do_not_change_what_is_copied(in_memory: Path, postgres: str) -> None:
    import msgspec

    class Paid(msgspec.Struct):
        amount: int = 1

    plain = EventStore(in_memory / "shop", durable=False)
    plain.append(Event("Paid", {"amount": 7, "note": "kept"}))
    source, target = EventStore(in_memory / "shop", types=[Paid]), EventStore(postgres, types=[Paid])
    assert source.copy_to(target) == 1
    assert next(EventStore(postgres).read()).data == {"amount": 7, "note": "kept"}


def test_times_before_the_epoch_and_with_another_zone_are_kept(in_memory: Path, postgres: str) -> None:
    line = b'{"type":"T","time":"%s"}'
    source, target = EventStore(in_memory / "shop", durable=False), EventStore(postgres)
    source.import_([line % b"1931-01-31T12:00:00.123456Z", line % b"2026-01-31T23:59:59.999999+05:30"])
    assert source.copy_to(target) == 2
    assert contents(source) == contents(target)
    assert next(target.read()).time == datetime(1931, 1, 31, 12, 0, 0, 123456, timezone.utc)
