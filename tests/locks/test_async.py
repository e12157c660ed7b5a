"""The async face, under asyncio and trio: the same lock, a loop that runs on, and nothing left by a cancelled wait."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from itertools import count

import anyio
import anyio.lowlevel
import pytest
from faces import Leftovers, Peer, in_thread, obstacles, peers

import holdfast
from holdfast import process
from holdfast.locks import local


@pytest.fixture(params=["asyncio", "trio"])
def run(request):
    return lambda function, *args: anyio.run(function, *args, backend=request.param)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


async def other_task(function, *args):
    """Await it in a task of its own: what it acquires is not held by the calling task."""
    results = []

    async def call():
        results.append(await function(*args))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
    return results[0]


async def until_in_line(path, number):
    """Until so many tasks of this process wait for the lock, with a ticket or in memory."""
    with anyio.fail_after(60):
        while True:
            line = process.registry.lines.get(path)
            if line is not None and len(line) == number:
                return
            await anyio.lowlevel.checkpoint()


def test_acquires_and_releases(run, path):
    async def main():
        lock = holdfast.Lock(path)
        hold = await lock.aacquire()
        assert os.path.exists(path)
        hold.check()
        await hold.arelease()
        assert hold.released
        assert not os.path.exists(path)
        with pytest.raises(holdfast.NotLocked):
            await hold.arelease()

    run(main)


def test_async_with_lock_and_with_hold(run, path):
    async def main():
        async with holdfast.Lock(path) as hold:
            assert not hold.released
        assert hold.released
        async with await holdfast.Lock(path).aacquire() as hold:
            assert not hold.released
        assert hold.released
        assert not os.path.exists(path)

    run(main)


def test_one_try_returns_none_or_raises_busy(run, path):
    async def main():
        lock = holdfast.Lock(path)
        held = await lock.atry_acquire()
        assert await other_task(lock.atry_acquire) is None
        with pytest.raises(holdfast.Busy):
            await lock.aacquire(timeout=0)
        await held.arelease()
        async with holdfast.Lock(path, timeout=0):
            pass

    run(main)


def test_timeout_passes(run, path):
    async def main():
        lock = holdfast.Lock(path, timeout=0.05)
        held = await other_task(lock.aacquire)
        before = anyio.current_time()
        with pytest.raises(holdfast.Timeout, match=r"not acquired within 0\.05 s: held by pid"):
            await lock.aacquire()
        assert anyio.current_time() - before >= 0.05
        held.release()
        assert os.listdir(os.path.dirname(path)) == []

    run(main)


def test_a_lock_that_comes_free_in_time_is_acquired(run, path):
    async def main():
        lock = holdfast.Lock(path)
        held = await other_task(lock.aacquire)
        async with anyio.create_task_group() as group:

            async def wait():
                async with await lock.aacquire(timeout=60):
                    assert held.released

            group.start_soon(wait)
            await until_in_line(path, 1)
            held.release()

    run(main)


def test_tasks_exclude_each_other(run, path):
    inside = []

    async def work(lock):
        for _ in range(20):
            async with lock:
                inside.append(None)
                await anyio.lowlevel.checkpoint()
                assert len(inside) == 1
                inside.pop()

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(work, holdfast.Lock(path))

    async def alone():
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(work, holdfast.Lock(path))

    run(alone)
    assert os.listdir(os.path.dirname(path)) == []


def test_tasks_and_a_process_exclude_each_other(run, path, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    program = (
        "import sys, holdfast\n"
        "lock, counter = holdfast.Lock(sys.argv[1]), sys.argv[2]\n"
        "for _ in range(200):\n"
        "    with lock:\n"
        "        value = int(open(counter).read())\n"
        "        open(counter, 'w').write(str(value + 1))\n"
    )

    async def work():
        for _ in range(50):
            async with holdfast.Lock(path):
                value = int(counter.read_text())
                await anyio.lowlevel.checkpoint()
                counter.write_text(str(value + 1))

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(work)

    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, path, str(counter)]) as other:
        run(main)
        assert other.wait() == 0
    assert counter.read_text() == "400"
    assert sorted(os.listdir(tmp_path)) == ["counter"]


@pytest.mark.parametrize("kind", ["head", "middle", "line", "semaphore"])
def test_the_loop_runs_while_a_task_waits(run, path, kind, monkeypatch):
    """Another task of the same loop takes the obstacles away; a blocked loop would never get to it."""
    lock, in_the_way = obstacles(kind, path, monkeypatch)

    async def main():
        async with anyio.create_task_group() as group:

            async def clear():
                await until_in_line(path, 2 if kind == "line" else 1)
                for take_away in in_the_way:
                    for _ in range(10):
                        await anyio.lowlevel.checkpoint()
                    take_away()

            group.start_soon(clear)
            async with lock:
                pass

    run(main)
    assert os.listdir(os.path.dirname(path)) == []


def test_waits_for_another_process(run, path):
    async def main(peer: Peer):
        async with anyio.create_task_group() as group:

            async def let_go():
                await until_in_line(path, 1)
                peer.ask("release", name="hold")

            group.start_soon(let_go)
            async with holdfast.Lock(path):
                pass
        assert peer.hear() == {"released": "hold"}

    with peers() as (peer,):
        peer.acquire(path)
        run(main, peer)


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_200_tasks_are_served_in_the_order_in_which_they_came(run, path, kind):
    number = 200
    assert number > local.TICKETS_PER_PROCESS
    served = []

    async def work(lock, n):
        async with lock:
            served.append(n)

    async def main():
        lock = holdfast.Lock(path) if kind == "lock" else holdfast.Semaphore(path, 1)
        held = await other_task(lock.aacquire)
        async with anyio.create_task_group() as group:
            for n in range(number):
                group.start_soon(work, lock, n)
                await until_in_line(path, n + 1)
            held.release()

    run(main)
    assert served == list(range(number))
    assert os.listdir(os.path.dirname(path)) == []
    assert not process.registry.lines


# Deadlocks.


def test_a_task_that_would_wait_for_itself_gets_would_deadlock(run, path):
    async def main():
        lock = holdfast.Lock(path)
        async with lock:
            with pytest.raises(holdfast.WouldDeadlock, match="this task"):
                await lock.aacquire()
            with pytest.raises(holdfast.WouldDeadlock):
                await holdfast.Lock(path, shared=True).aacquire(timeout=60)

    run(main)


def test_a_task_may_wait_for_another_task_of_its_thread(run, path):
    async def main():
        lock = holdfast.Lock(path)
        async with anyio.create_task_group() as group:

            async def wait():
                async with lock:
                    pass

            async with lock:
                group.start_soon(wait)
                await until_in_line(path, 1)

    run(main)


def test_a_blocking_acquire_below_a_task_that_holds_gets_would_deadlock(run, path):
    """It would stop the loop, and with it the task that has the lock."""

    async def main():
        lock = holdfast.Lock(path)
        held = await other_task(lock.aacquire)
        with pytest.raises(holdfast.WouldDeadlock, match="this thread"):
            lock.acquire()
        with pytest.raises(holdfast.WouldDeadlock):
            lock.acquire(timeout=60)
        held.release()

    run(main)


def test_a_task_whose_thread_holds_the_lock_gets_would_deadlock(run, path):
    """The code that called the loop cannot release before the loop ends."""

    async def main():
        with pytest.raises(holdfast.WouldDeadlock):
            await holdfast.Lock(path).aacquire()

    with holdfast.Lock(path):
        run(main)


def test_a_blocking_acquire_in_another_thread_may_wait_for_a_task(run, path):
    lock = holdfast.Lock(path)

    async def main():
        async with lock:
            waiter = threading.Thread(target=lambda: lock.acquire().release())
            waiter.start()
            await until_in_line(path, 1)
        waiter.join()

    run(main)


# Cancellation.


class Stepped:
    """Awaits a coroutine and calls back around each of its awaits: when it is about to sleep, when it has woken."""

    def __init__(self, coroutine, asleep, awake):
        self._coroutine, self._asleep, self._awake = coroutine, asleep, awake

    def __await__(self):
        steps = self._coroutine.__await__()
        resume, value = steps.send, None
        for n in count():
            try:
                trap = resume(value)
            except StopIteration as done:
                return done.value
            self._asleep(n)
            try:
                value = yield trap
                resume = steps.send
            except BaseException as error:
                value, resume = error, steps.throw
            self._awake(n)


class Attempt:
    """One contended acquire, cancelled at its n-th await, at one of three moments."""

    MOMENTS = ("while it waits", "as its turn comes", "when its turn has come")

    def __init__(self, kind, path, monkeypatch, moment, n):
        self.lock, self._in_the_way = obstacles(kind, path, monkeypatch)
        self._moment, self._n = moment, n
        self.cancelled = False
        self.hold = None

    async def acquire(self, cancel):
        self._cancel = cancel
        self.hold = await Stepped(self.lock.aacquire(), self._asleep, self._awake)

    def _asleep(self, n):
        if (self._moment, n) != ("while it waits", self._n) and self._in_the_way:
            self._in_the_way.pop(0)()
        if self._moment != "when its turn has come":
            self._cancel_at(n)

    def _awake(self, n):
        if self._moment == "when its turn has come":
            self._cancel_at(n)

    def _cancel_at(self, n):
        if n == self._n:
            self.cancelled = True
            self._cancel()

    def finish(self):
        """Everybody else goes too; what is left after that is what the cancelled one has left."""
        if self.hold is not None:
            self.hold.release()
        for take_away in self._in_the_way:
            take_away()


async def by_scope(attempt):
    with anyio.CancelScope() as scope:
        await attempt.acquire(scope.cancel)


async def by_task(attempt):
    """asyncio's own cancellation, which is delivered once and not again."""

    async def body():
        await attempt.acquire(asyncio.current_task().cancel)

    task = asyncio.create_task(body())
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None


@pytest.mark.parametrize("moment", Attempt.MOMENTS)
@pytest.mark.parametrize("kind", ["head", "middle", "line", "semaphore", "shared", "unfair"])
@pytest.mark.parametrize(
    ("backend", "cancelled_attempt"), [("asyncio", by_scope), ("asyncio", by_task), ("trio", by_scope)]
)
def test_an_acquire_that_is_cancelled_at_any_await_leaves_nothing(
    backend, cancelled_attempt, kind, moment, path, tmp_path, monkeypatch
):
    async def main():
        for n in count():
            leftovers = Leftovers(tmp_path)
            attempt = Attempt(kind, path, monkeypatch, moment, n)
            await cancelled_attempt(attempt)
            assert attempt.hold is not None or attempt.cancelled
            attempt.finish()
            leftovers.check()
            again = attempt.lock.try_acquire()
            assert again is not None
            again.release()
            leftovers.check()
            if not attempt.cancelled:
                return n
        raise AssertionError

    awaits = anyio.run(main, backend=backend)
    assert awaits >= 3  # or the obstacles were none


def test_a_kept_file_stays_after_a_cancelled_wait(run, path, monkeypatch, tmp_path):
    async def main():
        attempt = Attempt("kept", path, monkeypatch, "while it waits", 1)
        await by_scope(attempt)
        assert attempt.cancelled and attempt.hold is None
        attempt.finish()

    run(main)
    assert os.listdir(tmp_path) == ["x.lock"]


def test_a_cancelled_waiter_in_the_middle_does_not_delay_the_others(run, path):
    served = []

    async def main():
        lock = holdfast.Lock(path)
        held = in_thread(lock.acquire)
        scopes = []

        async def work(n):
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                async with lock:
                    served.append(n)

        async with anyio.create_task_group() as group:
            for n in range(5):
                group.start_soon(work, n)
                await until_in_line(path, n + 1)
            scopes[0].cancel()
            scopes[2].cancel()
            await until_in_line(path, 3)
            held.release()

    run(main)
    assert served == [1, 3, 4]
