"""Locks on PostgreSQL: tokens after a crash, keys that collide, connections, poolers, and users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import servers
from faces import Caller
from support import PATIENCE, until

import holdfast
from holdfast.locks import postgres as engine_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support import Peer

# The server seldom writes tokens to its disk on its own.
LAZY = {**servers.SETTINGS, "wal_writer_delay": "10s", "checkpoint_timeout": "1h"}


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Postgres]:
    found = servers.Postgres.start(LAZY)
    with found.connect("postgres") as connection:
        connection.execute("create database locks")
    yield found
    found.stop()


@pytest.fixture
def url(server: servers.Postgres, request: pytest.FixtureRequest) -> str:
    if not server.is_ready():
        server.restart()
    return f"{server.url('locks')}?name={request.node.name}"


def last_token(server: servers.Postgres) -> int:
    with server.connect("locks") as connection:
        return int(connection.execute("select last_value from holdfast_lock_token").fetchone()[0])


def crash(server: servers.Postgres) -> None:
    server.kill()
    server.restart()


def lose_tokens(server: servers.Postgres, url: str) -> int:
    """The last token before a crash that the server has forgotten after it."""
    lock = holdfast.lock(url, timeout=PATIENCE)
    lock.acquire().release()
    crash(server)  # what was written before is on the disk
    with lock:
        pass
    for _ in range(10):
        for _ in range(100):
            with lock as hold:
                token = hold.token
        crash(server)
        assert isinstance(token, int)
        if last_token(server) < token:
            return token
        with lock:  # the server has written by chance just before it died: once more
            pass
    pytest.fail("the server forgets no token")


def in_transaction(server: servers.Postgres, url: str) -> int | None:
    with server.connect("locks") as connection, connection.transaction():
        hold = holdfast.lock(url, connection=connection).acquire(timeout=PATIENCE)
        hold.release()  # the end of the transaction releases the lock
        return hold.token


def behind_a_transaction(server: servers.Postgres, url: str) -> int | None:
    """The token of a lock of a transaction that waits for another one."""
    with server.connect("locks") as connection:
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(%s)", [engine_module.key_of(url.rpartition("=")[2])])
            waiting = Caller(in_transaction, server, url)
            query = "select 1 from pg_locks where locktype = 'advisory' and not granted"
            until(lambda: connection.execute(query).fetchone())
        return waiting.result()  # type: ignore[no-any-return]


def after_a_wait(server: servers.Postgres, url: str) -> int | None:
    """The token of a waiter whose lock another program had, which does not know the table of names."""
    with server.connect("locks") as connection:
        key = engine_module.key_of(url.rpartition("=")[2])
        connection.execute("select pg_advisory_lock(%s)", [key])
        lock = holdfast.lock(url)
        engine: Any = lock._engine  # type: ignore[union-attr]
        waiter = engine.join(PATIENCE)
        assert waiter.attempt(PATIENCE) is None
        connection.execute("select pg_advisory_unlock(%s)", [key])
        granted: list[Any] = []

        def is_granted() -> bool:
            granted.append(waiter.attempt(PATIENCE))
            return granted[-1] is not None

        until(is_granted)
        granted[-1].release()
        return granted[-1].token  # type: ignore[no-any-return]


def acquired(_: servers.Postgres, url: str) -> int | None:
    with holdfast.lock(url, timeout=PATIENCE) as hold:
        return hold.token


def permitted(_: servers.Postgres, url: str) -> int | None:
    with holdfast.semaphore(f"{url}-semaphore", 2, timeout=PATIENCE) as hold:
        return hold.token


@pytest.mark.parametrize("take", [acquired, permitted, in_transaction, behind_a_transaction, after_a_wait])
def test_tokens_grow_over_a_crash_that_lost_the_last_ones(
    server: servers.Postgres, url: str, take: Callable[[servers.Postgres, str], int | None]
) -> None:
    if take is permitted:
        with holdfast.semaphore(f"{url}-semaphore", 2, timeout=PATIENCE):
            pass
    before = lose_tokens(server, url)
    after = take(server, url)
    assert after is not None and after > before
    with holdfast.lock(url, timeout=PATIENCE) as hold:
        assert hold.token == after + 1  # the sequence was moved on once


@pytest.mark.parametrize("dropped", ["table holdfast_lock", "sequence holdfast_lock_token"])
@pytest.mark.parametrize("take", [acquired, permitted, in_transaction, after_a_wait])
def test_tables_that_were_deleted_are_created_again(
    server: servers.Postgres, url: str, dropped: str, take: Callable[[servers.Postgres, str], int | None]
) -> None:
    """A lock that is held stays held, and tokens do not begin with 1 again."""
    before = take(server, url)
    with holdfast.lock(f"{url}-held", timeout=PATIENCE) as held:
        with server.connect("locks") as connection:
            connection.execute(f"drop {dropped}")
        if take is in_transaction:  # the failure has spoiled it
            with pytest.raises(holdfast.ConnectionFailed, match="Roll the transaction back"):
                take(server, url)
        after = take(server, url)
        assert before is not None and after is not None
        assert after > before if "table" in dropped else after > 1_000_000_000_000_000
        assert holdfast.lock(f"{url}-held").try_acquire() is None
        held.check()


def test_tokens_are_not_moved_on_by_a_clean_restart(server: servers.Postgres, url: str) -> None:
    with holdfast.lock(url, timeout=PATIENCE) as hold:
        before = hold.token
    server.shut_down()
    server.restart()
    with holdfast.lock(url, timeout=PATIENCE) as hold:
        assert isinstance(before, int) and hold.token == before + 1


def test_no_acquire_waits_for_the_disk(server: servers.Postgres, url: str) -> None:
    def synced() -> int:
        with server.connect("locks") as connection:
            return int(connection.execute("select wal_sync + wal_write from pg_stat_wal").fetchone()[0])

    with holdfast.lock(url, timeout=PATIENCE):
        pass
    before = synced()
    for _ in range(500):  # a sequence is logged 15 times
        holdfast.lock(url).acquire(timeout=PATIENCE).release()
    assert synced() - before < 10


def test_two_names_with_the_same_key_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "key_of", len)
    with holdfast.lock(f"{url}-a", timeout=PATIENCE) as hold:
        with pytest.raises(holdfast.Unsupported, match="has the same key in this database"):
            holdfast.lock(f"{url}-b").acquire(timeout=PATIENCE)
        hold.check()


def test_uncontended_locks_of_a_process_share_one_connection(
    server: servers.Postgres, url: str, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(url=url)
    peer.do("locks = [holdfast.lock(f'{url}-{number}', timeout=30) for number in range(50)]")
    with server.connect("locks") as connection:
        query = "select count(*) from pg_stat_activity where application_name like %s"

        def connections() -> int:
            return int(connection.execute(query, [f"%{peer.pid}@%"]).fetchone()[0])

        peer.do("holds = [lock.acquire() for lock in locks]")
        assert connections() == 1
        peer.do("[hold.release() for hold in holds]")
        assert connections() == 1


def test_a_lock_through_a_pooler_is_refused_or_works(server: servers.Postgres, url: str) -> None:
    with servers.PgBouncer(server, "transaction") as pooler:
        with pytest.raises(holdfast.Unsupported, match="pooler in transaction mode") as caught:
            holdfast.lock(pooler.url(url)).acquire(timeout=PATIENCE)
        assert servers.PASSWORD not in str(caught.value)
    with servers.PgBouncer(server, "session") as pooler, holdfast.lock(pooler.url(url), timeout=PATIENCE) as hold:
        assert holdfast.lock(url).try_acquire() is None
        hold.check()


def test_another_user_of_the_database_is_excluded(server: servers.Postgres, url: str) -> None:
    """It gets the rights that the error names, and sees the holder."""
    holdfast.lock(url).acquire(timeout=PATIENCE).release()
    other = url.replace(f"{servers.USER}:", "guest:")
    with server.connect("locks", user="postgres") as admin:
        admin.execute(f"create role guest login password '{servers.PASSWORD}'")
    with pytest.raises(holdfast.Unsupported, match="As the owner of the database, run: ") as caught:
        holdfast.lock(other).acquire(timeout=PATIENCE)
    with server.connect("locks") as owner:
        owner.execute(str(caught.value).partition("run: ")[2])
    with holdfast.lock(other, timeout=PATIENCE):
        assert holdfast.lock(url).try_acquire() is None
        assert holdfast.lock(url).status().held
    with holdfast.lock(url, timeout=PATIENCE):
        assert holdfast.lock(other).try_acquire() is None


def test_a_database_that_only_reads_is_refused(server: servers.Postgres, url: str) -> None:
    """As a standby is."""
    with server.connect("locks") as owner:
        owner.execute("alter role current_user in database locks set default_transaction_read_only = on")
    try:
        with pytest.raises(holdfast.ConnectionFailed, match=r"read-only.*Connect to the primary server"):
            holdfast.lock(f"{url}&application_name=new").acquire(timeout=PATIENCE)  # with a session of its own
    finally:
        with server.connect("locks", user="postgres") as admin:
            admin.execute(f"alter role {servers.USER} in database locks reset default_transaction_read_only")
