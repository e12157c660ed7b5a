"""Appending to an event store in PostgreSQL: one transaction for all requests that wait in this process.

    look ahead   each thread checks its own condition up to the visible head, without the lock. Not if that is fast:
                 a few terms, each with one tag or none
    at once      the advisory lock and the head; the events unless one breaks a condition, and a notification. These are
                 one transaction in one round trip. So the lock is never held while the server waits for this process

If another condition of the group does not hold, or a task that can be cancelled waits, it takes two round trips:

    lock         begin, the advisory lock and the head; and what breaks the conditions
    insert       the events of those whose conditions hold, the head, a notification, commit

If the connection is lost before the commit is sent, the server rolls the transaction back, and it is repeated. If it is
lost while the commit is under way, the next connection acquires the lock, so that the transaction has ended, and looks
for its mark. Only if no connection can be had, it is not known what became of the append.
"""

from __future__ import annotations

import random
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from .. import postgres
from ..errors import ConnectionFailed, CorruptStore, HoldfastError, Timeout
from . import postgres_statements as statements
from .conditions import admit, look_ahead
from .requests import DONE, Group, GroupCommit, Request

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from .draft import Draft
    from .engine import Options
    from .model import Query

    Statement = tuple[str, Any]
    Matches = dict[tuple[Query, int], int | None]  # the last event that matches, behind a position
    Steps = Generator[Statement, list[tuple[Any, ...]], None]  # statements for a connection of the caller

_FEW = 50  # events, in which any condition is checked fast


class Work(Group):
    """The requests that were taken, and the last attempt to commit them."""

    first = 0  # the position of its first event, or a guess
    known = 0  # its events are behind this position
    mark = 0  # of a transaction whose commit was sent, and that may have been committed
    only_look = False  # do not append again
    timeout: Timeout | None = None


class Appender(GroupCommit):
    """Appends for all threads of a process."""

    known = 0  # a position that the store had

    def __init__(self, name: str, prefix: str, id: str, options: Options, here: Callable[[], Any]) -> None:
        super().__init__(name)
        self._prefix, self._id, self._here = prefix, id, here
        self.sql = {key: text.format(p=prefix) for key, text in statements.STATEMENTS.items()}
        self.key = int.from_bytes(bytes.fromhex(id)[:8], "big", signed=True)  # of the advisory lock
        self.channel = f"holdfast_{id}"
        self.timeout, self._durable = options.lock_timeout, options.durable
        self._waits: tuple[Request, postgres.Session] | None = None  # for the lock

    # Before the lock.

    def ready(self, requests: Sequence[Request], look: Callable[[Callable[[Any], Any]], Any]) -> list[Request]:
        """Those that can be submitted. Behind one with an event that cannot be stored, none can."""
        found = []
        for at, request in enumerate(requests):
            try:
                for draft in request.drafts:
                    statements.check(draft)
            except ValueError as error:
                for other in requests[at:]:
                    other.error = error
                break
            if not self._look_ahead(request, look):
                found.append(request)
        return found

    def _look_ahead(self, request: Request, look: Callable[[Callable[[Any], Any]], Any]) -> HoldfastError | None:
        condition = request.condition
        if condition is None or self.known - (condition.after or 0) <= _FEW:
            return None
        if statements.is_fast(condition.fail_if_match):
            return None
        query, after = condition.fail_if_match, condition.after or 0
        statement = statements.look_ahead(self._prefix, self._id, query, after)
        try:
            row = look(lambda run: run(*statement).fetchone())
            if row is None:
                raise self._other_store()
            head, match = row
            look_ahead(request, self.name, head, lambda *_: head if query.matches_all else match)
            self.known = max(self.known, head)
        except HoldfastError as error:
            request.error, request.state = self._explained(Work(), error), DONE
        return request.error  # type: ignore[return-value]

    def head(self, run: Any) -> int:
        row = run(self.sql["head"], [self._id]).fetchone()
        if row is None:
            raise self._other_store()
        self.known = max(self.known, row[0])
        return int(row[0])

    def _other_store(self) -> CorruptStore:
        return CorruptStore(f"{self.name}: another store is in these tables now. Open the store again.", path=self.name)

    # The transaction of a group.

    def _new_group(self) -> Work:
        return Work()

    def _append(self, work: Work, leader: Request) -> None:  # type: ignore[override]
        try:
            self._here().pool.repeat(lambda session: self._attempt(session, work, leader), self.timeout)
            if work.timeout is not None:
                raise work.timeout
        except psycopg.Error as error:
            raise self._explained(work, postgres.explain(self.name, error, "store")) from error
        except HoldfastError as error:
            raise self._explained(work, error) from None

    def _explained(self, work: Work, error: Exception) -> Exception:
        """The error, with a word about what became of the events."""
        if work.mark:
            return ConnectionFailed(
                f"{error} The connection was lost during a commit, so it is not known whether the events were "
                f"appended. If they were, they are behind event {work.known}. Read those before you append again."
            )
        if isinstance(error, ConnectionFailed):
            return ConnectionFailed(f"{error} Nothing was appended.")
        return error

    def _attempt(self, session: postgres.Session, work: Work, leader: Request) -> None:
        is_first = not work.mark and not work.taken and not _any_withdraws(self.queue.waiting)
        if is_first and (not self.queue.take(leader, work) or self._append_at_once(session, work, leader)):
            return
        run = session.connection.execute
        found = self._lock(session, work, leader)
        if found is None:
            return
        head, matches = found
        if work.mark and self._was_committed(run, work):
            return
        if not work.taken and not self.queue.take(leader, work):
            session.close()  # the request was withdrawn. Its cancellation may still come
            return
        for request in work.taken:
            request.error = None  # of an earlier attempt
        batches = self._decide(run, work.taken, head, matches)
        if not batches:
            run("rollback")
        else:
            mark = random.getrandbits(62)
            writes = self._writes(batches, statements.rows_of(batches, mark))
            self._send(session, work, writes, batches[0][0], mark)
        self._set_done(work, head + sum(len(drafts) for _, drafts in batches))

    def _set_done(self, work: Work, head: int) -> None:
        self.known = max(self.known, head)
        work.is_done, work.mark = True, 0

    def _was_committed(self, run: Any, work: Work) -> bool:
        """With the lock. True: there is nothing more to do."""
        (first,) = run(self.sql["is_there"], (work.known, work.mark)).fetchone()
        if first is not None:
            for request in work.taken:
                request.position += first - work.first
            work.is_done = True
        work.mark = 0
        if first is None and not work.only_look:
            return False
        with suppress(
            psycopg.Error
        ):  # nothing was changed. If this connection is lost, too, that is no reason to repeat
            run("rollback")
        return True

    def _append_at_once(self, session: postgres.Session, work: Work, leader: Request) -> bool:
        """False: it has not appended, because a condition does not hold, or for another reason."""
        checks = [_check(one) for one in work.taken if one.condition is not None]
        least = max((after for _, after in checks), default=0)
        guess = max(self.known, least)
        batches = [
            (request.position - guess - len(request.drafts) + 1, list(request.drafts))
            for request in admit(work.taken, self.name, guess, lambda *_: None)
            if request.drafts
        ]
        if not batches or _any_withdraws(work.taken) or any(request.error is not None for request in work.taken):
            return False
        mark = random.getrandbits(62)
        rows = statements.rows_of(batches, mark)
        write = statements.append_alone(self._prefix, self._id, self.channel, rows, checks, least)
        try:
            _, locked, added = self._send(session, work, [("begin", None), self._locks(leader), write], guess + 1, mark)
        except psycopg.errors.LockNotAvailable:
            session.connection.rollback()
            self.queue.put_back(leader, work)  # the others came later
            work.timeout = self.timed_out(session.connection.execute)
            return True
        row, (number, match, _) = locked.fetchone(), added.fetchone()
        if not number:
            work.mark = 0
            if row is None:
                raise self._other_store()
            if match and len(work.taken) == 1:
                admit(work.taken, self.name, row[0], lambda *_: match)
                self._set_done(work, row[0])
            return work.is_done
        for request in work.taken:
            request.position += row[0] - guess
        self._set_done(work, row[0] + number)
        return True

    def _locks(self, leader: Request) -> Statement:
        """The statement that acquires the lock, and returns the head."""
        deadline = leader.deadline
        left = 0 if deadline is None else max(1, int((deadline - monotonic()) * 1000))  # 0: as long as it takes
        return self.sql["lock" if self._durable else "lock_lazily"], (str(left), self.key, self._id)

    def _send(
        self, session: postgres.Session, work: Work, writes: Iterable[Statement], first: int, mark: int
    ) -> list[Any]:
        """Run statements and commit, in one round trip. Return the cursors of the statements.

        With a commit of its own: psycopg cannot tell of a commit that fails at the end of a pipeline.
        """
        run, known = session.connection.execute, self.known
        try:
            with postgres.pipeline(session.connection):
                results = [run(*statement) for statement in writes]
                work.first, work.known, work.mark = first, known, mark
                run("commit")
        except psycopg.Error as error:
            if not postgres.is_lost(error):
                work.mark = 0  # the server has refused a statement
            raise
        return results

    def _lock(self, session: postgres.Session, work: Work, leader: Request) -> tuple[int, Matches] | None:
        """Begin a transaction, and acquire the lock. None: the time is over, or the request was withdrawn.

        Returns the head, and what breaks the conditions of the requests that wait now.
        """
        run = session.connection.execute
        checks = [_check(one) for one in (*work.taken, *self.queue.waiting) if one.condition is not None]
        self._waits = (leader, session)
        try:
            with postgres.pipeline(session.connection):
                run("begin")
                found = run(*self._locks(leader))
                asked = {each: run(*self._last_match(*each)) for each in checks if not each[0].matches_all}
        except psycopg.errors.LockNotAvailable:
            run("rollback")
            work.timeout = self.timed_out(run)
            return None
        except psycopg.errors.QueryCanceled:
            if leader.leads:
                raise
            session.close()
            return None
        finally:
            self._waits = None
        row = found.fetchone()
        if row is None:
            raise self._other_store()
        return row[0], {each: cursor.fetchall()[0][0] for each, cursor in asked.items()}

    def _last_match(self, query: Query, after: int) -> Statement:
        return statements.last_match(self._prefix, query, after)

    def _decide(
        self, run: Any, requests: Sequence[Request], head: int, matches: Matches
    ) -> list[tuple[int, list[Draft]]]:
        """The batches to append, each with its first position."""

        def last_match(query: Query, after: int, head: int) -> int | None:
            if query.matches_all:
                return head
            if (query, after) not in matches:  # its request came later
                (matches[query, after],) = run(*self._last_match(query, after)).fetchone()
            return matches[query, after]

        found = []
        for request in admit(requests, self.name, head, last_match):
            if request.drafts:
                found.append((request.position - len(request.drafts) + 1, list(request.drafts)))
        return found

    def _writes(self, batches: list[tuple[int, list[Draft]]], rows: str) -> list[Statement]:
        first, drafts = batches[-1]
        return [
            (self.sql["insert"], [rows]),
            (self.sql["set_head"], (first + len(drafts) - 1, self._id)),
            ("select pg_notify(%s, '')", [self.channel]),
        ]

    def _interrupted(self, work: Work, leader: Request, error: BaseException) -> None:  # type: ignore[override]
        """The session was closed. If the commit was not sent, that has undone all of it."""
        if work.mark:
            work.only_look = True
            try:
                self._append(work, leader)
            except Exception as failure:
                for one in work.taken:
                    one.error = one.error or failure
                return
        if not work.is_done:
            self.queue.put_back(leader, work)
            leader.error = leader.error or error

    def withdraw(self, request: Request) -> bool:
        waits = self._waits
        if not self.queue.withdraw(request):
            return False
        if waits is not None and waits[0] is request:
            with suppress(psycopg.Error):
                waits[1].connection.cancel_safe(timeout=2.0)
        return True

    def timed_out(self, run: Any) -> Timeout:
        row = run(self.sql["holder"], [self.key]).fetchone()
        who = "another program held it, and has released it since"
        if row is not None:
            doing = " and waits for its program" if row[3] else ""
            who = f"{row[0]} (backend {row[1]}) holds it, in a transaction that began {row[2] or 0:.1f} s ago{doing}"
        return Timeout(
            f"{self.name}: the lock of the appends was not acquired within {self.timeout or 0:g} s: {who}. Wait "
            "longer with lock_timeout= (--lock-timeout).",
            path=self.name,
        )

    # The transaction of the caller.

    def joined(self, request: Request) -> Steps:
        """The statements of an append in a transaction that the caller commits. They are inside a savepoint."""
        ((before,),) = yield "select current_setting('lock_timeout')", None
        left = 0 if self.timeout is None else max(1, int(self.timeout * 1000))
        rows = yield self.sql["lock"], (str(left), self.key, self._id)
        if not rows:
            raise self._other_store()
        head, match = rows[0][0], None
        if request.condition is not None:
            query, after = _check(request)
            match = head
            if not query.matches_all:
                ((match,),) = yield self._last_match(query, after)
        admit([request], self.name, head, lambda *_: match)
        if request.error is not None:
            raise request.error
        if request.drafts:
            batches = [(head + 1, list(request.drafts))]
            writes = self._writes(batches, statements.rows_of(batches, random.getrandbits(62)))
            for statement in writes:  # noqa: UP028  # what is sent is not for the list
                yield statement
        yield "select set_config('lock_timeout', %s, true)", [before]


def _check(request: Request) -> tuple[Query, int]:
    """What must not be there, and behind which position."""
    condition = request.condition
    assert condition is not None
    return condition.fail_if_match, max(condition.after or 0, request.checked)


def _any_withdraws(requests: Iterable[Request]) -> bool:
    return any(request.may_withdraw for request in requests)
