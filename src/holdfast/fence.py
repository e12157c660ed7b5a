"""Refuse the writes of a holder that has lost its lock and does not know it yet.

A holder may be stopped for longer than its lease lasts, and then go on to write. No lock can prevent that. But each
hold has a `token` that is greater than all earlier ones, and the resource can refuse a token that is older than one it
saw:

    fence = holdfast.fence.Fence()                 in the process that owns the resource
    fence.check(request.token)                     raises LockLost for an old token

    with connection.transaction():                 in the database that is the resource
        holdfast.fence.check(connection, "deploy", hold.token)
        connection.execute("update …")             only if no newer holder was here before

`check` writes the token in the same transaction as the data. The row stays locked until the commit, so that a newer
holder waits for the commit, and an older one is refused after it.
"""

from __future__ import annotations

import threading
from typing import Any

from .errors import LockLost, Unsupported

__all__ = ["Fence", "check"]

_CREATE = "create table if not exists holdfast_fence (resource text primary key, token bigint not null)"
_ADVANCE = """insert into holdfast_fence as fence (resource, token) values (%s, %s)
    on conflict (resource) do update set token = excluded.token where fence.token <= excluded.token returning token"""


class Fence:
    """Remembers the greatest token that it saw. Any thread may use it."""

    def __init__(self, token: int = 0) -> None:
        self.token = token
        self._mutex = threading.Lock()

    def check(self, token: int | None) -> None:
        """Raise LockLost if a newer token was seen."""
        wanted = _valid(token)
        with self._mutex:
            if wanted < self.token:
                raise _old(wanted, self.token)
            self.token = wanted


def check(connection: Any, resource: str, token: int | None) -> None:
    """Raise LockLost if PostgreSQL has seen a newer token for this resource. Else store the token.

    Raises Unsupported for a connection in autocommit mode without a transaction.

    connection: a psycopg connection, in the transaction that changes the resource. `check` creates the table
        `holdfast_fence` if it does not exist
    resource: a name for what the lock protects
    token: the `token` of the hold
    """
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    from . import postgres

    wanted = _valid(token)
    if not postgres.has_transaction(connection):
        raise Unsupported(
            f"the token for {resource!r} was not checked: the connection is in autocommit mode and has no transaction. "
            "A newer holder could write between the check and the write. Use `with connection.transaction():`."
        )
    cursor = Cursor(connection, row_factory=tuple_row)  # the caller may have set another kind of cursor, or of rows
    known = cursor.execute("select to_regclass('holdfast_fence')").fetchone()
    if known is None or known[0] is None:
        # Two transactions that create it at the same time: the second one waits for the first.
        cursor.execute("select pg_advisory_xact_lock(hashtextextended('holdfast_fence', 0))")
        cursor.execute(_CREATE)
    if cursor.execute(_ADVANCE, (resource, wanted)).fetchone() is None:
        newest = cursor.execute("select token from holdfast_fence where resource = %s", (resource,)).fetchone()
        raise _old(wanted, newest[0] if newest else 0)


def _valid(token: int | None) -> int:
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise TypeError(f"a token is the number hold.token, not {token!r}. Kernel locks on a path have none.")
    return token


def _old(token: int, newest: int) -> LockLost:
    return LockLost(
        f"token {token} is older than {newest}, which was seen already: another process holds the lock now. Stop, and "
        "undo the work since the lock was acquired."
    )
