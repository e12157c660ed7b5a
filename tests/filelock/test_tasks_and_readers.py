"""`AsyncFileLock`, `ReadWriteLock` and `AsyncReadWriteLock`."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from functools import partial

import pytest
from faces import in_thread
from support import Peer, in_child

from holdfast import NotALockFile
from holdfast.filelock import (
    AsyncFileLock,
    AsyncReadWriteLock,
    AsyncSoftFileLock,
    FileLock,
    ReadWriteLock,
    SoftFileLock,
    Timeout,
)

KINDS = pytest.mark.parametrize("kind", [AsyncFileLock, AsyncSoftFileLock])


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


@KINDS
def test_an_asynchronous_lock_excludes_the_synchronous_one(path, kind):
    async def main():
        lock = kind(path)
        async with lock as entered, await lock.acquire():
            assert entered is lock and lock.lock_counter == 2
            with pytest.raises(Timeout):
                await kind(path).acquire(timeout=0.05)
            with pytest.raises(Timeout):
                await kind(path).acquire(blocking=False)
            with pytest.raises(Timeout):
                (FileLock if kind is AsyncFileLock else SoftFileLock)(path).acquire(timeout=0)
            with pytest.raises(RuntimeError, match="Deadlock"):
                await kind(path).acquire()
        assert not lock.is_locked

    asyncio.run(main())


@KINDS
def test_a_task_waits_for_what_another_task_releases(path, kind):
    """Code outside of all tasks has acquired it."""
    lock = (FileLock if kind is AsyncFileLock else SoftFileLock)(path)

    async def main():
        waiter = asyncio.ensure_future(kind(path).acquire())
        await asyncio.sleep(0)
        lock.release()
        async with await waiter as held:
            assert held.is_locked

    with lock:
        asyncio.run(main())


@KINDS
def test_tasks_wait_for_each_other(path, kind):
    async def main():
        inside = []

        async def work(number):
            async with kind(path):
                inside.append(number)
                assert len(inside) == 1
                await asyncio.sleep(0)
                inside.remove(number)

        await asyncio.gather(*(work(number) for number in range(10)))

    asyncio.run(main())


def test_a_cancelled_acquire_leaves_nothing(path):
    async def main():
        async with AsyncFileLock(path):
            lock = AsyncFileLock(path)
            task = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not lock.is_locked
        async with lock:
            assert lock.lock_counter == 1

    asyncio.run(main())


def test_tasks_that_share_an_object_count_levels(path):
    async def main():
        lock = AsyncFileLock(path)
        other = AsyncFileLock(path)
        await other.acquire()
        tasks = [asyncio.create_task(lock.acquire()) for _ in range(3)]
        await asyncio.sleep(0.01)
        await other.release()
        await asyncio.gather(*tasks)
        assert lock.lock_counter == 3
        await lock.release(force=True)

    asyncio.run(main())


def test_cancel_check_ends_the_wait_of_a_task(path):
    async def main():
        async with AsyncFileLock(path):
            with pytest.raises(Timeout):
                await AsyncFileLock(path).acquire(cancel_check=lambda: True, timeout=30)

    asyncio.run(main())


def test_an_error_of_on_acquired_releases_the_lock_of_a_task(path):
    async def main():
        lock = AsyncFileLock(path, on_acquired=lambda fd: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await lock.acquire()
        assert not lock.is_locked
        FileLock(path).acquire(timeout=0).lock.release()

    asyncio.run(main())


def test_a_synchronous_block_of_an_asynchronous_lock_is_refused(path):
    with pytest.raises(NotImplementedError, match="async with"):
        AsyncFileLock(path).__enter__()
    with pytest.raises(ValueError, match="run_in_executor"):
        AsyncFileLock(path, thread_local=True)


# Readers and writers.


def test_readers_share_and_a_writer_excludes(path):
    lock = ReadWriteLock(path, is_singleton=False)
    other = ReadWriteLock(path, is_singleton=False)
    with lock.read_lock(), other.read_lock(), pytest.raises(Timeout):
        ReadWriteLock(path, 0.05, is_singleton=False).acquire_write()
    with lock.write_lock():
        with pytest.raises(Timeout):
            other.acquire_read(blocking=False)
        with Peer(path=path) as peer:
            peer.do("from holdfast.filelock import ReadWriteLock, Timeout")
            peer.begin("ReadWriteLock(path).acquire_read(10) and None")
            lock.release()
            peer.answer()
            lock.acquire_read()
            lock.release()
            peer.do("ReadWriteLock(path).close()")
        lock.acquire_write()


def test_a_reader_that_wants_to_write_is_refused(path):
    lock = ReadWriteLock(path)
    with lock.read_lock(), lock.read_lock(), pytest.raises(RuntimeError, match="upgrade"):
        lock.acquire_write(0)
    with lock.write_lock(), lock.write_lock():
        with pytest.raises(RuntimeError, match="downgrade"):
            lock.acquire_read(0)
        with pytest.raises(RuntimeError, match="held by thread"):
            in_thread(partial(lock.acquire_write, 0))
    with pytest.raises(RuntimeError, match="not held"):
        lock.release()


def test_a_wait_for_oneself_without_end_raises(path):
    with ReadWriteLock(path).read_lock(), pytest.raises(RuntimeError, match="Deadlock"):
        ReadWriteLock(path, is_singleton=False).acquire_write()

    async def main():
        async with AsyncReadWriteLock(path).write_lock():
            with pytest.raises(RuntimeError, match="Deadlock"):
                await AsyncReadWriteLock(path).acquire_read()

    asyncio.run(main())


def test_a_thread_releases_only_its_own_level(path):
    lock = ReadWriteLock(path)
    with lock.read_lock():
        with pytest.raises(RuntimeError, match="does not hold it"):
            in_thread(lock.release)

        def share():
            lock.acquire_read()
            lock.release()

        in_thread(share)
        with pytest.raises(Timeout):
            ReadWriteLock(path, is_singleton=False).acquire_write(0)


def test_a_read_write_lock_is_one_object_per_path(path):
    lock = ReadWriteLock(path)
    assert ReadWriteLock.get_lock(path) is lock
    with pytest.raises(ValueError, match="differing"):
        ReadWriteLock(path, 3)
    lock.close()
    with pytest.raises(RuntimeError, match="closed"):
        lock.acquire_read()


def test_the_database_of_the_real_lock_is_refused_and_stays(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE x (y)")
    connection.close()
    with pytest.raises(NotALockFile, match="database"):
        ReadWriteLock(path).acquire_read()
    with open(path, "rb") as file:
        assert file.read(15) == b"SQLite format 3"


def test_a_forked_child_cannot_use_the_object_of_its_parent(path):
    lock = ReadWriteLock(path)
    with lock.write_lock():

        def look():
            try:
                lock.acquire_write(0)
            except RuntimeError as error:
                return str(error)
            return ""

        assert "fork" in in_child(look)


def test_each_task_holds_for_itself(path):
    async def main():
        lock = AsyncReadWriteLock(path)
        order = []

        async def write():
            async with lock.write_lock():
                order.append("write")

        async with lock.read_lock():
            async with lock.read_lock():
                writer = asyncio.create_task(write())
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="upgrade"):
                await lock.acquire_write(0)
            order.append("read")
        await writer
        assert order == ["read", "write"]
        with pytest.raises(RuntimeError, match="not held"):
            await lock.release()
        async with await lock.acquire_write():
            with pytest.raises(Timeout):
                ReadWriteLock(path).acquire_read(0)
        await lock.close()
        with pytest.raises(RuntimeError, match="closed"):
            await lock.acquire_read()

    asyncio.run(main())


def test_a_task_that_waits_while_the_object_is_closed_gets_nothing(path):
    async def main():
        held = AsyncReadWriteLock(path)
        await held.acquire_write()
        lock = AsyncReadWriteLock(path)
        waiter = asyncio.create_task(lock.acquire_read())
        await asyncio.sleep(0.01)
        await lock.close()
        await held.release()
        with pytest.raises(RuntimeError, match="closed"):
            await waiter
        async with held.write_lock(timeout=0):
            pass

    asyncio.run(main())


def test_an_object_of_tasks_that_is_dropped_is_released_without_a_warning(path, recwarn):
    async def main():
        await AsyncReadWriteLock(path).acquire_write()
        gc.collect()
        ReadWriteLock(path).acquire_write(0).lock.release()

    asyncio.run(main())
    assert not recwarn.list
