"""The explorer leaves out schedules that cannot differ (see `explore`). What it leaves out must not be missed.

What an actor saw is the list of its calls with their answers. Schedules that cannot differ show every actor the same,
so that the reduced search must find exactly the views that the full search finds. Broken locks, which the reduced
search must find as well, are in `test_interleavings` and `test_lock_file_interleavings`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("explorer", reason="needs POSIX files, kernel locks and poll", exc_type=ImportError)

from explorer import Oracle, Run, explore, system_calls
from footprints import NAMES, READS, WRITES, Files, Footprint
from test_interleavings import PAIRS, SEMAPHORES
from test_lock_file_interleavings import FAIR, OLD, UNFAIR, of_the_dead, triers, users
from test_rule_ten_interleavings import meeting

from holdfast import Lock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


def contended(run: Run) -> None:
    """Two waiters behind a holder, where steps of the waiters commute."""
    oracle = Oracle(run)
    run.symmetric = True
    for _ in range(3):
        run.spawn(lambda: oracle.use(Lock(run.path, fair=False).acquire()))


def robbed(run: Run) -> Callable[[], None] | None:
    return users(UNFAIR, {**OLD, "stale": "dead-and-old"}, content=of_the_dead)(run)  # type: ignore[no-any-return]


# With the preemptions of `make test`, those of `make prove`, and kills.
SCENARIOS: dict[str, tuple[Any, int, int, int]] = {
    "exclusive-shared": (PAIRS["exclusive-shared"], 2, 3, 0),
    "unfair-unfair_patient": (PAIRS["unfair-unfair_patient"], 2, 3, 0),
    "kept-kept_patient": (PAIRS["kept-kept_patient"], 1, 2, 0),
    "semaphores": (SEMAPHORES["not_agreed"], 1, 2, 0),
    "three": (contended, 1, 2, 0),
    "lock files": (users(FAIR, FAIR, content=of_the_dead), 1, 2, 0),
    "takers of lock files": (robbed, 1, 2, 0),
    "triers": (triers(2, of_the_dead), 1, 2, 0),
    "two kinds": (meeting("lock", "file"), 1, 2, 0),
    "a kill": (meeting("lock", "shared"), 0, 1, 1),
    "a kill of two kinds": (meeting("semaphore", "file"), 0, 1, 1),
}


def views(scenario: Any, directory: Path, **bounds: Any) -> tuple[set[Any], int]:
    """What the actors saw in each schedule that came to its end, and the files that were left."""
    found: set[Any] = set()

    def noted(run: Run) -> Callable[[], None]:
        check = scenario(run)

        def note() -> None:
            if check is not None:
                check()
            saw: list[list[str]] = [[] for _ in run.actors]
            for number, name, args, answer in run._log:
                if name == "stat" and run._is_above(args[0]):
                    continue  # processes here share what they know of those directories
                # Numbers of descriptors and inodes, and names of owners, depend on the order in which they were made.
                value = answer if isinstance(answer, bool) else type(answer).__name__
                if isinstance(answer, bytes):
                    value = answer.partition(b"timestamp")[0]
                saw[number or 0].append(f"{name} {value}")
            found.add((tuple(map(tuple, saw)), tuple(sorted(os.listdir(run.directory)))))

        return note

    seen = explore(noted, directory, **bounds)
    return found, seen["runs"]


@pytest.mark.parametrize("further", [False, pytest.param(True, marks=SLOW)], ids=["short", "long"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_reduced_search_misses_nothing(name: str, further: bool, tmp_path: Path) -> None:
    scenario, near, far, kills = SCENARIOS[name]
    preemptions = far if further else near
    full, schedules = views(scenario, tmp_path, preemptions=preemptions, kills=kills, reduced=False)
    reduced, fewer = views(scenario, tmp_path, preemptions=preemptions, kills=kills)
    assert reduced == full
    assert fewer <= schedules


def test_steps_commute_only_if_neither_changes_what_the_other_sees(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    (tmp_path / "queue").mkdir()
    a, b, queue = (str(tmp_path / name) for name in ("a", "b", "queue"))
    files = Files(str(tmp_path))
    files.scan()

    def step(name: str, *args: Any) -> Footprint:
        return files.touched(name, args, {})

    with open(a) as one, open(a) as same, open(b) as other:
        look, look_too = step("stat", a), step("stat", a)
        remove, remove_other = step("unlink", a), step("unlink", b)
        lock, lock_same, lock_other = (step("lock", file.fileno(), 2) for file in (one, same, other))
        close, mark = step("close", same.fileno()), step("mark_removal", same.fileno())
    assert look.commutes(look_too)
    assert lock.commutes(lock_other) and lock.commutes(mark) and lock.commutes(look)
    assert not look.commutes(remove)
    assert not lock.commutes(lock_same) and not lock.commutes(close) and not mark.commutes(close)
    assert not remove.commutes(step("listdir", str(tmp_path)))
    assert not remove_other.commutes(step("open_fd", str(tmp_path / "new"), os.O_CREAT))
    ticket = step("mkfifo", f"{queue}/1")
    assert not ticket.commutes(step("rmdir", queue))
    assert not ticket.commutes(step("listdir", queue))
    assert not step("a call of tomorrow", 3).commutes(Footprint())
    assert not Footprint(unknown=True).commutes(Footprint())


def test_every_call_of_the_table_exists() -> None:
    assert {*READS, *WRITES, *NAMES, "link_open_file", "process_exists"} <= set(system_calls())
