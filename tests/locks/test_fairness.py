"""First come, first served: over processes and threads, however each of them waits; readers and writers too.

An arrival is confirmed by the number of waiters that `status` shows, so the order of arrival is known.
"""

from __future__ import annotations

import os
import threading

import anyio
import anyio.lowlevel
import pytest
from faces import PATIENCE, Caller, eventually, in_thread, peers, until_waiting

import holdfast
from holdfast import process
from holdfast.locks import local
from holdfast.locks import queue as queues


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


# Who comes: the process, and how it waits.
ARRIVALS = {
    "threads and processes": [(0, {}), (0, {}), (1, {}), (0, {}), (2, {}), (1, {}), (2, {}), (0, {})],
    "blocking, timed and async": [
        (0, {}),
        (1, {"timeout": 60}),
        (1, {"style": "asyncio"}),
        (0, {"timeout": 60}),
        (2, {"style": "trio"}),
        (2, {}),
        (0, {"style": "trio", "timeout": 60}),
        (1, {}),
        (0, {"style": "asyncio"}),
    ],
    "readers between writers": [
        (0, {}),
        (1, {"shared": True}),
        (2, {}),
        (0, {"shared": True, "timeout": 60}),
        (1, {"timeout": 60}),
        (2, {"shared": True, "style": "trio"}),
        (0, {}),
    ],
}


@pytest.mark.parametrize(
    ("arrivals", "keep"), [*((arrivals, False) for arrivals in ARRIVALS), ("threads and processes", True)]
)
def test_served_in_the_order_of_arrival(path, tmp_path, arrivals, keep):
    lock = holdfast.Lock(path, keep=keep)
    log = tmp_path / "log"
    with peers(3) as processes:
        hold = lock.acquire()
        for n, (process, options) in enumerate(ARRIVALS[arrivals]):
            processes[process].start(path, str(n), keep=keep, log=str(log), **options)
            until_waiting(lock, n + 1)
        assert not log.exists()
        hold.release()
        eventually(lambda: not lock.status().waiters, "all are served")
        with lock:  # the last of them is through
            assert log.read_text().split() == [str(n) for n in range(len(ARRIVALS[arrivals]))]
    assert sorted(os.listdir(tmp_path)) == (["log", "x.lock"] if keep else ["log"])


def test_more_threads_than_tickets_are_served_in_the_order_of_arrival(path):
    """The rest waits in memory."""
    lock = holdfast.Lock(path)
    number = local.TICKETS_PER_PROCESS + 8
    served = []

    def work(n):
        with lock:
            served.append(n)

    hold = lock.acquire()
    threads = []
    for n in range(number):
        threads.append(Caller(work, n))
        eventually(lambda n=n: arrived(lock) == n + 1, "one more waits")
    hold.release()
    for thread in threads:
        thread.result()
    assert served == list(range(number))


def arrived(lock) -> int:
    line = process.registry.lines.get(lock.path)
    tickets = os.listdir(lock.path + ".queue") if os.path.exists(lock.path + ".queue") else []
    waiting = [place for reference in line or () if (place := reference()) is not None]
    return len(tickets) + sum(not place.admitted for place in waiting)


def test_a_newcomer_does_not_pass_the_queue(path):
    """Not even when the lock is free at this moment."""
    lock = holdfast.Lock(path)
    ticket = queues.Queue(path + ".queue", 0o644)
    assert ticket.join()
    try:
        assert not lock.status().held
        assert in_thread(lock.try_acquire) is None
        with pytest.raises(holdfast.Busy, match="waiters are first in its queue"):
            lock.acquire(timeout=0)
        in_thread(holdfast.Lock(path, fair=False).acquire, timeout=0).release()
    finally:
        ticket.leave()
    lock.acquire(timeout=0).release()


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_lock_that_is_free_during_a_hand_over_is_not_taken_out_of_turn(path, monkeypatch):
    """A waiter looks at the lock itself now and then, in case the first in the queue has been stopped. A lock that
    is free for a moment because it changes hands is no sign of that."""
    clock = Clock()
    monkeypatch.setattr(queues, "monotonic", clock)
    lock = holdfast.Lock(path)
    first, second = queues.Queue(path + ".queue", 0o644), queues.Queue(path + ".queue", 0o644)
    assert first.join() and second.join()
    waiting = second.wait(lock._engine, None)
    next(waiting)
    clock.now += queues.RECHECK_S
    next(waiting)  # it looked, found the lock free, and waits on
    assert not lock.status().held
    first.leave()
    with pytest.raises(StopIteration) as served:
        next(waiting)
    assert served.value.value is None  # now it is the first
    second.leave()


def test_a_first_waiter_that_does_not_move_is_passed(path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(queues, "monotonic", clock)
    lock = holdfast.Lock(path)
    first, second = queues.Queue(path + ".queue", 0o644), queues.Queue(path + ".queue", 0o644)
    assert first.join() and second.join()
    waiting = second.wait(lock._engine, None)
    next(waiting)
    hold = None
    for _ in range(3):
        clock.now += queues.RECHECK_S
        try:
            next(waiting)
        except StopIteration as served:
            hold = served.value
            break
    assert hold is not None
    hold.release()
    second.leave()
    first.leave()


def test_a_killed_waiter_does_not_delay_the_queue(path, tmp_path):
    lock, log = holdfast.Lock(path), tmp_path / "log"
    with peers(3) as (first, second, third):
        hold = lock.acquire()
        for n, process in enumerate((first, second, third)):
            process.start(path, str(n), log=str(log))
            until_waiting(lock, n + 1)
        second.kill()
        first.kill()
        hold.release()
        eventually(log.exists, "the third is served")
        with lock:
            assert log.read_text().split() == ["2"]
    assert os.listdir(tmp_path) == ["log"]


def test_a_queue_of_dead_waiters_delays_no_acquire(path, tmp_path):
    lock = holdfast.Lock(path)
    with peers() as (waiter,):
        with lock:
            waiter.start(path)
            until_waiting(lock, 1)
            waiter.kill()
        assert os.path.exists(path + ".queue")
        with lock.acquire(timeout=0):
            pass
    assert os.listdir(tmp_path) == []


# Readers and writers.


def test_a_waiting_writer_stops_later_readers(path, tmp_path):
    lock, log = holdfast.Lock(path, shared=True), tmp_path / "log"
    with peers(3) as (reader, writer, later):
        reader.acquire(path, shared=True)
        writer.start(path, "writer", log=str(log))
        until_waiting(lock, 1)
        assert lock.try_acquire() is None
        later.start(path, "later", shared=True, log=str(log))
        until_waiting(lock, 2)
        assert not log.exists()
        reader.release()
        eventually(lambda: not lock.status().waiters, "both are served")
        with holdfast.Lock(path):
            assert log.read_text().split() == ["writer", "later"]


def test_readers_in_a_row_are_served_together(path):
    lock = holdfast.Lock(path)
    number = 3
    together = threading.Barrier(number, timeout=PATIENCE)

    def read():
        with holdfast.Lock(path, shared=True):
            together.wait()

    def write():
        with lock:
            return together.n_waiting

    hold = lock.acquire()
    readers = []
    for n in range(number):
        readers.append(Caller(read))
        until_waiting(lock, n + 1)
    writer = Caller(write)
    until_waiting(lock, number + 1)
    hold.release()
    for reader in readers:
        reader.result()
    assert writer.result() == 0


def test_a_reader_may_share_again_while_a_writer_waits(path):
    """Behind the writer it would wait for itself."""
    lock = holdfast.Lock(path, shared=True)
    with lock:
        writer = Caller(lambda: holdfast.Lock(path).acquire().release())
        until_waiting(lock, 1)
        lock.acquire(timeout=0).release()
        lock.acquire(timeout=60).release()
        assert in_thread(lock.try_acquire) is None
    writer.result()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiting_writer_stops_later_readers_among_tasks(path, backend):
    """All tasks share a thread; that must not make them one reader, or overlapping tasks starve the writer."""
    lock = holdfast.Lock(path, shared=True)
    order = []

    def write():
        with holdfast.Lock(path):
            order.append("writer")

    async def read():
        async with lock:
            order.append("later reader")

    async def main():
        async with anyio.create_task_group() as group, lock:
            writer = Caller(write)
            until_waiting(lock, 1)
            group.start_soon(read)
            with anyio.fail_after(PATIENCE):
                while not order and len(lock.status().waiters) < 2:
                    await anyio.lowlevel.checkpoint()
            assert order == []
        writer.result()

    anyio.run(main, backend=backend)
    assert order == ["writer", "later reader"]
