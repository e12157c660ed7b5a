"""Control-C after every line of acquire and release: no descriptor is closed twice, and nothing stays locked.

A signal's handler runs between two lines of Python, wherever it finds the program. The tracer puts it after each.
"""

from __future__ import annotations

import dis
import gc
import linecache
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from support import assert_nothing_left, descriptors

import holdfast
from holdfast import Lock, LockFile, Semaphore, process, system, wait, watch
from holdfast.locks import base, file_waiter, first_waiter, local, lock_file, queue
from holdfast.locks.base import BaseLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = str(Path(holdfast.__file__).parent)

KINDS: dict[str, Callable[[str], Any]] = {
    "exclusive": Lock,
    "shared": lambda path: Lock(path, shared=True),
    "kept": lambda path: Lock(path, keep=True),
    "semaphore": lambda path: Semaphore(path, 1),
    "file": lambda path: LockFile(path, durable=False),
    "durable file": LockFile,
    "fenced file": lambda path: LockFile(path, fence=True),
}


class Interrupt:
    """Raises KeyboardInterrupt before line `number` that runs in the package; `came` says whether there was one."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.came = False
        self.where = "none"

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        # What is raised where an object is collected goes nowhere, and is lost: so says Python.
        if frame.f_code.co_name == "__del__" or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        return self._line

    def _is_nothing(self, frame: Any) -> bool:
        """Handlers run when a call has ended, a function begins or a loop goes round: not before these lines.

        The line of a `with` is reported again when its block is left, before the mutex is released.
        """
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return line in ("try:", "system.close(fd)", "with process.registry.mutex:")

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line" and not self.came and not self._is_nothing(frame):
            if not self.left:
                self.came = True
                self.where = f"the interrupt at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.left -= 1
        return self._line


@pytest.fixture
def closed_twice(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were closed and not open: somebody else's, in a program with threads."""
    wrong: list[int] = []

    def close(fd: int) -> None:
        try:
            os.fstat(fd)
        except OSError:
            wrong.append(fd)
        os.close(fd)

    monkeypatch.setattr(system, "close", close)
    return wrong


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """What an earlier test left must not be collected, and interrupted, in the middle of this one.

    Frozen, it is not searched either by the hundreds of collections of this one.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def interrupted_everywhere(action: Callable[[], object], after: Callable[[str], object]) -> None:
    number = 0
    while True:
        with Interrupt(number) as interrupt:
            try:
                action()
            except KeyboardInterrupt:
                assert interrupt.came
        after(interrupt.where)
        if not interrupt.came:
            break
        number += 1
    assert number > 5


def assert_free(make: Callable[[str], Any], path: str) -> None:
    hold = make(path).try_acquire()
    assert hold is not None, "nobody can have it any more"
    hold.release()
    for leftover in ("", ".fence"):
        if os.path.exists(path + leftover):
            os.unlink(path + leftover)
    if isinstance(make(path), LockFile):
        make(path).clean()
    assert_nothing_left(path)


def lock_files_open(path: str) -> list[str]:
    """Not the directory, which an interrupt may leave open in the moment after it was opened, to nobody's harm."""
    return [target for target in descriptors().values() if target.startswith(path)]


@pytest.mark.filterwarnings("ignore:a hold on")
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_an_acquire_leaves_nothing(kind: str, path: str, closed_twice: list[int]) -> None:
    make = KINDS[kind]
    lock = make(path)
    assert_free(make, path)
    holds = []
    before = lock_files_open(path)

    def acquire() -> None:
        holds.append(lock.acquire())

    def after(where: str) -> None:
        while holds:
            holds.pop().release()
        assert lock_files_open(path) == before, f"{where} left a descriptor open"
        assert not closed_twice, f"{where} closed a descriptor twice"
        assert_free(make, path)

    interrupted_everywhere(acquire, after)


@pytest.mark.filterwarnings("ignore:a hold on")
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_a_busy_attempt_leaves_nothing(kind: str, path: str, closed_twice: list[int]) -> None:
    make = KINDS[kind]
    holder = (Lock(path) if kind == "shared" else make(path)).acquire()
    lock = make(path)

    def attempt() -> None:
        assert lock.try_acquire() is None

    def after(where: str) -> None:
        assert not closed_twice, f"{where} closed a descriptor twice"
        holder.check()

    interrupted_everywhere(attempt, after)
    holder.release()
    assert_free(make, path)


class AfterCall(Interrupt):
    """Exactly where handlers run: when a call has ended, before its result is kept, and where a function begins."""

    _points: ClassVar[dict[Any, set[int]]] = {}

    def __init__(self, number: int, raises: type[BaseException]) -> None:
        super().__init__(number)
        self._raises = raises

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        if super()._call(frame, event, argument) is None or self._is_collecting(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _is_collecting(self, frame: Any) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                return True
            frame = frame.f_back
        return False

    def _opcode(self, frame: Any, event: str, argument: object) -> Any:
        if event == "opcode" and not self.came and frame.f_lasti in self._points_of(frame.f_code):
            if not self.left:
                self.came = True
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: {line}"
                raise self._raises
            self.left -= 1
        return self._opcode

    def _points_of(self, code: Any) -> set[int]:
        if code not in self._points:
            before = ""
            self._points[code] = points = set()
            for instruction in dis.get_instructions(code):
                if before.startswith(("CALL", "RESUME")):
                    points.add(instruction.offset)
                before = instruction.opname
        return self._points[code]


def left_by(
    action: Callable[[], object], after: Callable[[str], object], raises: type[BaseException] = KeyboardInterrupt
) -> None:
    number = 0
    while True:
        with AfterCall(number, raises) as interrupt:
            try:
                action()
            except raises:
                assert interrupt.came
        gc.collect()  # what the traceback had
        after(interrupt.where)
        if not interrupt.came:
            break
        number += 1
    assert number > 10


@pytest.mark.skipif(sys.version_info < (3, 11), reason="handlers run elsewhere, too")
@pytest.mark.filterwarnings("ignore:a hold on")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raises", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_anywhere_in_a_with_block_leaves_nothing(
    kind: str, raises: type[BaseException], path: str, closed_twice: list[int]
) -> None:
    """At the latest when the lock object is gone, nobody has the lock. A TimeoutError is what alarms raise, and an
    OSError like those of the system."""
    make = KINDS[kind]

    def enter_and_leave() -> None:
        with make(path):
            pass

    def after(where: str) -> None:
        assert not closed_twice, f"{where} closed a descriptor twice"
        assert not process.registry.holds, f"{where} left a hold"
        lock = make(path)
        if isinstance(lock, LockFile):  # the strictest: nothing is known of the holder but its age
            lock = LockFile(path, stale="old", durable=False)
        hold = lock.try_acquire()
        assert hold is not None, f"{where} left it locked"
        hold.release()

    left_by(enter_and_leave, after, raises)


def close_what_is_left(path: str) -> None:
    """An interrupt just before a descriptor gets its owner, or just after it lost it, leaves the descriptor open.

    If it marks a removal, every later run would wait for that removal, a hundred times, and be interrupted in each.
    """
    owned = set(process.descriptors.values())
    for fd, target in descriptors().items():
        if target.startswith(path) and fd not in owned:
            os.close(fd)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes 0.5 ms. So a wait makes the same calls each time, however busy the machine is."""
    now = time.monotonic()

    def monotonic() -> float:
        nonlocal now
        now += 0.0005
        return now

    def passing(real: Any) -> Any:
        def block(step: wait.Step) -> None:
            nonlocal now
            real(step)
            now = max(now, step.until or now)

        return block

    for kind in (wait.Readable, wait.Pause, wait.Notified):
        monkeypatch.setattr(kind, "block", passing(kind.block))
    for module in (wait, watch, process, base, file_waiter, first_waiter, local, lock_file, queue):
        monkeypatch.setattr(module, "monotonic", monotonic)


@pytest.mark.usefixtures("clock")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="handlers run elsewhere, too")
@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("kind", ["exclusive", "semaphore", "file"])
def test_an_interrupt_anywhere_in_a_wait_leaves_nothing(
    kind: str, fair: bool, path: str, closed_twice: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits afterwards does not wait for a place in a line that nobody leaves."""
    monkeypatch.setattr(BaseLock, "_timed_out", lambda lock, timeout: holdfast.Timeout("", path=lock.path))
    make = KINDS[kind]
    holds: list[Any] = []
    thread = threading.Thread(target=lambda: holds.append(make(path).acquire()))
    thread.start()
    thread.join()

    def wait_in_vain() -> None:
        lock = make(path)
        lock._engine.fair = fair
        with suppress(holdfast.Timeout):
            lock.acquire(timeout=0.002)
            raise AssertionError("it is held")

    def after(where: str) -> None:
        assert not closed_twice, f"{where} closed a descriptor twice"
        places = [place for line in process.registry.lines.values() for place in line if place() is not None]
        assert not places, f"{where} left a place in the line"
        close_what_is_left(path)

    left_by(wait_in_vain, after)
    holds.pop().release()
    assert_free(make, path)
