"""`holdfast.fence`: a resource refuses the token of a holder that has lost its lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import servers
from faces import Caller
from support import PATIENCE, until

import holdfast
from holdfast import fence


@pytest.fixture(scope="module")
def postgres() -> Iterator[servers.Postgres]:
    server = servers.Postgres.start()
    with server.connect("postgres") as connection:
        connection.execute("create database fence")
    yield server
    server.stop()


@pytest.fixture
def connection(postgres: servers.Postgres) -> Iterator[Any]:
    with postgres.connect("fence") as connection:
        connection.execute("drop table if exists holdfast_fence, site")
        yield connection


def test_a_fence_in_memory_refuses_an_older_token() -> None:
    gate = fence.Fence()
    gate.check(5)
    gate.check(5)  # the same holder again
    gate.check(7)
    with pytest.raises(holdfast.LockLost, match="token 5 is older than 7"):
        gate.check(5)
    assert gate.token == 7


@pytest.mark.parametrize("token", [None, "7", True, -1, 1.5])
def test_a_token_is_a_number(token: Any) -> None:
    with pytest.raises(TypeError, match=r"hold\.token"):
        fence.Fence().check(token)


def test_a_transaction_with_an_older_token_changes_nothing(connection: Any) -> None:
    connection.execute("create table site (version int)")
    connection.execute("insert into site values (0)")

    def write(token: int, version: int) -> None:
        with connection.transaction():
            fence.check(connection, "deploy", token)
            connection.execute("update site set version = %s", (version,))

    write(3, 1)
    write(8, 2)
    with pytest.raises(holdfast.LockLost, match="token 3 is older than 8"):
        write(3, 3)
    assert connection.execute("select version from site").fetchone() == (2,)
    with connection.transaction():
        fence.check(connection, "another resource", 1)


def test_a_check_outside_a_transaction_is_refused(connection: Any) -> None:
    """It would be committed before the write that it protects."""
    with pytest.raises(holdfast.Unsupported, match=r"autocommit.*connection\.transaction\(\)"):
        fence.check(connection, "deploy", 1)
    connection.autocommit = False
    fence.check(connection, "deploy", 1)
    connection.commit()


def test_an_older_holder_waits_for_the_commit_of_a_newer_one_and_is_refused(
    connection: Any, postgres: servers.Postgres
) -> None:
    with connection.transaction():
        fence.check(connection, "deploy", 1)
    outcome: list[BaseException | None] = []

    def write_late() -> None:
        with postgres.connect("fence") as other:
            try:
                with other.transaction():
                    fence.check(other, "deploy", 1)
            except holdfast.LockLost as error:
                outcome.append(error)
            else:
                outcome.append(None)

    with connection.transaction():
        fence.check(connection, "deploy", 2)
        thread = threading.Thread(target=write_late)
        thread.start()
        thread.join(0.2)
        assert not outcome, "it did not wait for the commit"
    thread.join()
    assert isinstance(outcome[0], holdfast.LockLost)


def test_the_token_of_a_lock_on_the_server_passes(connection: Any, postgres: servers.Postgres) -> None:
    lock = holdfast.lock(postgres.url("fence") + "?name=deploy")
    for _ in range(2):
        with lock as hold, connection.transaction():
            fence.check(connection, "deploy", hold.token)


def test_a_lock_in_a_transaction_ends_with_it(connection: Any, postgres: servers.Postgres) -> None:
    url = postgres.url("fence") + "?name=in-transaction"
    with connection.transaction():
        hold = holdfast.lock(url, connection=connection).acquire()
        assert hold.token and not hold.lost
        assert holdfast.lock(url).try_acquire() is None
        hold.release()  # the end of the transaction releases the lock
        assert holdfast.lock(url).try_acquire() is None
    holdfast.lock(url).acquire(timeout=10).release()


def test_a_timeout_in_a_transaction_does_not_spoil_it(connection: Any, postgres: servers.Postgres) -> None:
    url = postgres.url("fence") + "?name=busy"
    with holdfast.lock(url).acquire(), connection.transaction():
        lock = holdfast.lock(url, connection=connection)
        assert lock.try_acquire() is None
        with pytest.raises(holdfast.Timeout):
            lock.acquire(timeout=1.0)
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_wait_in_a_transaction_does_not_change_its_lock_timeout(connection: Any, postgres: servers.Postgres) -> None:
    lock = holdfast.lock(postgres.url("fence") + "?name=kept", connection=connection)
    for timeout in (10, 1e9, None):
        with connection.transaction():
            connection.execute("set local lock_timeout = '17s'")
            holder = holdfast.lock(postgres.url("fence") + "?name=kept").acquire(timeout=PATIENCE)
            waiting = Caller(lock.acquire, timeout=timeout)
            until(lambda: lock.status().waiters)
            holder.release()
            waiting.result().release()
            assert connection.execute("show lock_timeout").fetchone() == ("17s",)


def test_the_cursors_and_rows_of_the_caller_do_not_matter(connection: Any, postgres: servers.Postgres) -> None:
    connection.row_factory, connection.cursor_factory = psycopg.rows.dict_row, psycopg.RawCursor
    url = postgres.url("fence") + "?name=rows"
    with connection.transaction():
        holder = holdfast.lock(url).acquire(timeout=PATIENCE)
        waiting = Caller(holdfast.lock(url, connection=connection).acquire, timeout=PATIENCE)
        until(lambda: holdfast.lock(url).status().waiters)
        holder.release()
        hold = waiting.result()
        assert isinstance(hold.token, int) and hold.token > holder.token
        fence.check(connection, "rows", hold.token)
        with pytest.raises(holdfast.LockLost):
            fence.check(connection, "rows", hold.token - 1)
        hold.release()


def test_a_new_name_in_a_transaction_is_learned_within_the_timeout(connection: Any, postgres: servers.Postgres) -> None:
    url = postgres.url("fence")
    holdfast.lock(f"{url}?name=known").acquire(timeout=PATIENCE).release()
    with postgres.connect("fence") as other, other.transaction(), connection.transaction():
        other.execute("lock table holdfast_lock in access exclusive mode")
        with pytest.raises(holdfast.ConnectionFailed, match=r"did not answer within 0\."):
            holdfast.lock(f"{url}?name=unknown", connection=connection).acquire(timeout=0.5)


def test_a_lock_in_a_transaction_needs_one(connection: Any, postgres: servers.Postgres) -> None:
    lock = holdfast.lock(postgres.url("fence") + "?name=none", connection=connection)
    with pytest.raises(holdfast.Unsupported, match=r"connection\.transaction\(\)"):
        lock.acquire()
