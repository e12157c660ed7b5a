"""Waiting in an asyncio program on Windows."""

from __future__ import annotations

import asyncio
import os

import pytest

import holdfast
from holdfast import Lock, Semaphore, process
from holdfast.system import windows

KINDS = {"lock": Lock, "semaphore": lambda path: Semaphore(path, 1)}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_tasks_take_turns(path, make):
    inside = most = 0

    async def work():
        nonlocal inside, most
        for _ in range(5):
            async with make(path):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

    async def main():
        await asyncio.gather(*(work() for _ in range(4)))

    asyncio.run(main())
    assert most == 1
    assert not os.path.exists(path)


def test_the_loop_runs_on_while_a_task_waits_for_another_process(path, make, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()" if make is Lock else "hold = Semaphore(path, 1).acquire()")

    async def main():
        assert await make(path).atry_acquire() is None
        waiting = asyncio.create_task(make(path).aacquire(timeout=60))
        while not process.descriptors:
            await asyncio.sleep(0)
        assert not waiting.done()
        peer.do("hold.release()")
        await (await waiting).arelease()

    asyncio.run(main())
    assert not os.path.exists(path)


def test_a_deadline_passes(path, make, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()" if make is Lock else "hold = Semaphore(path, 1).acquire()")

    async def main():
        with pytest.raises(holdfast.Timeout):
            await make(path).aacquire(timeout=0.1)

    asyncio.run(main())
    assert not process.descriptors and not process.registry.lines and not windows._locked
    peer.do("hold.release()")


def test_cancelling_leaves_nothing(path, make, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()" if make is Lock else "hold = Semaphore(path, 1).acquire()")

    async def main():
        waiting = asyncio.create_task(make(path).aacquire())
        while not process.descriptors:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert not process.descriptors and not process.registry.lines and not windows._locked
    peer.do("hold.release()")
    assert not os.path.exists(path)


def test_a_caller_that_would_wait_for_itself_is_refused(path, make):
    async def main():
        async with make(path):
            with pytest.raises(holdfast.WouldDeadlock):
                await make(path).aacquire()

    asyncio.run(main())
