"""The operations of the port in SQL, for all engines. `statements` has the tables and the statements.

An engine derives from `Store`. It opens connections, runs a function in a transaction, knows which workers are
alive, and wakes those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import time
from typing import Any

from .reading import PAGE, Reader, Transaction
from .statements import (
    BLOCKED,
    CANCELLED,
    DELAYED,
    DONE,
    FAILED,
    NAMES,
    NUMBERS,
    PARKED,
    READY,
    RUNNING,
    attempt_of,
    by_name,
    id_of,
    with_attempt,
)
from .store import ENDED, NEVER, WAITING, Attempt, Ending, NewTask, Registration, Selection

_A_DAY_S = 86_400.0


class Store(Reader):
    """Operations of the port in SQL."""

    least_token = 0  # all new tokens are greater
    _rates_forgotten_at = 0.0

    # Add.

    def add(
        self, tasks: Sequence[NewTask], *, max_waiting: int | None = None, connection: Any = None
    ) -> list[tuple[str, bool]]:
        """Add tasks. Return the id of each, and whether it is new: a task whose id exists stays as it is.

        max_waiting: add as many as there is room for, in order, and return only these
        connection: add them in the transaction of this connection of the caller, where the engine can
        Raises ValueError if a task in `after` does not exist.
        """

        def work(tx: Transaction) -> list[tuple[str, bool]]:
            return self.add_in(tx, tasks, max_waiting)

        return self.transact(work) if connection is None else self.transact_on(connection, work)

    def add_in(self, tx: Transaction, tasks: Sequence[NewTask], max_waiting: int | None) -> list[tuple[str, bool]]:
        if max_waiting is not None:
            self.lock(tx, "room")
            tasks = self._fitting(tx, tasks, max_waiting - sum(self._count(tx.run, WAITING, max_waiting).values()))
        if not any(task.after for task in tasks):
            return self._add_some(tx, tasks)
        added = []
        for task in tasks:  # one by one: a task may wait for one before it
            added += [(str(task.id), False)] if self.exists(tx, task) else self._add_some(tx, [task])
        return added

    def _fitting(self, tx: Transaction, tasks: Sequence[NewTask], room: int) -> list[NewTask]:
        """The first ones that there is room for. A task whose id exists needs none."""
        fitting = []
        for task in tasks:
            if not self.exists(tx, task):
                room -= 1
            if room < 0:
                break
            fitting.append(task)
        return fitting

    def _add_some(self, tx: Transaction, tasks: Sequence[NewTask]) -> list[tuple[str, bool]]:
        new = [self._row_of(tx, task) for task in tasks]
        numbers = self.insert(tx, [row for row, _ in new])
        added = []
        for task, seq, (row, blockers) in zip(tasks, numbers, new, strict=True):
            if seq is None:
                tx.ready -= row[1] == READY
            else:
                for blocker in blockers:
                    tx.run(self.sql["add_edge"], (blocker, seq))
            added.append((f"_{seq}" if task.id is None else task.id, seq is not None))
        return added

    def _row_of(self, tx: Transaction, task: NewTask) -> tuple[tuple[Any, ...], list[int]]:
        """The values to insert for a new task, and the numbers of the tasks that it waits for."""
        state, error, blockers = READY, None, []
        for id in dict.fromkeys(task.after):
            found = tx.run(*self.by("by", id)).fetchone()
            if found is None:
                raise ValueError(f"{self.name}: after={id!r}: there is no such task")
            if found[1] in (FAILED, CANCELLED):
                state, error = CANCELLED, f"task {id} is {NAMES[found[1]]}"
            elif found[1] != DONE:
                blockers.append(found[0])
        due = tx.now + task.delay if task.delay else None
        if state == READY:
            state = BLOCKED if blockers else tx.waiting_state(task.key, due)
        now = time()
        # In the order of `COLUMNS`.
        first = (task.id, state, task.priority, due, task.payload_json, task.function, task.attempts, task.timeout)
        more = (task.key, task.limit, task.interval, now, error, now if state == CANCELLED else None)
        return (*first, *more), blockers if state == BLOCKED else []

    def set_schedule(self, name: str, text: str | None) -> bool:
        """Store a schedule as JSON text, or remove it. Return whether there was one."""

        def work(tx: Transaction) -> bool:
            existed = tx.run(self.sql["last"], (name,)).fetchone() is not None
            if text is None:
                tx.run(self.sql["unset_schedule"], (name,))
            else:
                tx.run(self.sql["set_schedule"], (name, text))
            tx.due = True  # idle workers look again when the next moment is
            return existed

        return self.transact(work)

    def add_moment(self, name: str, moment: float, task: NewTask) -> bool:
        """Add the task of one moment of a schedule. False: this moment or a later one was added already.

        A later one that is more than a day ahead does not count: a wrong clock has added it.
        """

        def work(tx: Transaction) -> bool:
            row = tx.run(self.sql["last"], (name,)).fetchone()
            if row is None or moment <= row[0] <= time() + _A_DAY_S:
                return False
            tx.run(self.sql["set_last"], (moment, name))
            self.add_in(tx, [task], None)
            return True

        return self.transact(work)

    # Work.

    def claim(
        self,
        worker: Registration,
        count: int,
        *,
        endings: Sequence[Ending] = (),
        reserve: bool = False,
        idle: bool = False,
    ) -> list[Attempt]:
        """Assign up to `count` ready tasks to a worker: highest priority first, then oldest first.

        endings: settle these before, in the same transaction
        reserve: the worker begins the tasks one after the other
        idle: if there is no task, the worker is about to call `wait`, and wants to be woken
        """

        def work(tx: Transaction) -> tuple[list[Attempt], int, float | None, bool]:
            refused = self.settle_in(tx, endings).count(False)
            if self.is_local:
                self.finish(tx)  # a key whose task ended may have a task for this worker
            if worker.is_idle:
                tx.run(self.sql["forget"], (worker.name,))
            attempts = self._claim_in(tx, worker.name, count, reserve)
            tx.only_looked = not attempts and not endings and worker.is_idle == idle
            tx.ready = max(0, tx.ready - len(attempts))  # these need no other worker
            until = None
            if attempts:
                tx.due = tx.due or (worker.is_idle and worker.until < NEVER)  # another one must wake at that moment
            elif idle:
                until = self.time_to_wake(tx.run)
                tx.run(self.sql["ask"], (worker.name, until))
                tx.due = False
            return attempts, refused, until, bool(tx.keys)

        self.prepare_claim()
        for _ in range(1 if self.is_local else 3):
            # A claim that a power failure of this machine undoes is no loss.
            attempts, refused, until, has_keys = self.transact(work, sync=bool(endings) or not self.is_local)
            endings = ()
            worker.refused += refused
            worker.is_idle = until is not None
            worker.until = NEVER if until is None else until
            # Where transactions run at the same time, one may have added a task before the worker was seen to be idle.
            # There, tasks are admitted at the end only: a transaction that locks a key, and then another one, may meet
            # one that does the same the other way round.
            if attempts or self.is_local or not (has_keys or (worker.is_idle and self.read(self.has_task))):
                break
        return attempts

    def _claim_in(self, tx: Transaction, worker: str, count: int, reserve: bool) -> list[Attempt]:
        due = tx.run(self.sql["due"], (tx.now, PAGE))
        ready = tx.run(self.sql["ready"], (count,))
        if self._promote(tx, due.fetchall()):
            if self.is_local:
                self.finish(tx)
            ready = tx.run(self.sql["ready"], (count,))
        rows = ready.fetchall()
        now = time()
        attempts = [attempt_of(row) for row in rows]
        begun = []
        for place, (attempt, row) in enumerate(zip(attempts, rows, strict=True)):
            attempt.token = max(attempt.token, self.least_token) + 1
            attempt.tried += 1
            begun.append((attempt.token, worker, place if reserve else 0, now, row[0]))
            if attempt.key is not None and (interval := row[-1]):
                tx.keys.add(attempt.key)
                tx.starts[attempt.key] = interval
        self.update_all(tx, "begin", begun)
        return attempts

    def _promote(self, tx: Transaction, rows: list[Any]) -> bool:
        """Delayed tasks whose moment has come are ready, or wait for the limit of their key."""
        place = self.newest(tx) + 1 if rows else 0
        for seq, key, admitted in rows:
            if admitted:  # it waited for its rate, and keeps its place
                tx.run(self.sql["state"], (tx.waiting_state(None), None, seq))
            else:
                tx.run(self.sql["back"], (tx.waiting_state(key), place, seq))
        return bool(rows)

    def forget_idle(self, *workers: str) -> None:
        """These workers do not wait any more. If one was woken for a task, or keeps the time, another one does that."""

        def work(tx: Transaction) -> None:
            for worker in workers:
                tx.run(self.sql["forget"], (worker,))
            tx.ready = 1

        self.transact(work, sync=False)

    def finish(self, tx: Transaction) -> None:
        """The last step of a transaction: admit parked tasks of the keys that it touched."""
        for key in sorted(tx.keys):
            self.lock(tx, f"key {key}")
            if key in tx.starts:
                tx.run(self.sql["set_next_at"], (key, tx.now + tx.starts.pop(key)))
            while self._admit_next(tx, key):
                pass
        tx.keys.clear()

    def _admit_next(self, tx: Transaction, key: str) -> bool:
        row = tx.run(self.sql["parked"], (key,)).fetchone()
        if row is None:
            return False
        seq, limit, interval = row
        admitted, not_begun = tx.run(self.sql["admitted"], (key,)).fetchone()
        # Of the tasks with a rate, one waits to begin. So they do not pile up while no worker takes them.
        if (limit and admitted >= limit) or (interval and not_begun):
            return False
        starts = tx.now
        if interval:
            found = tx.run(self.sql["next_at"], (key,)).fetchone()
            starts = max(tx.now, found[0]) if found else tx.now
        state = tx.waiting_state(None, starts)
        tx.run(self.sql["admit"], (state, starts if state == DELAYED else None, seq))
        return True

    def settle(self, endings: Sequence[Ending]) -> list[bool]:
        """End attempts. False for each whose token is old."""
        return self.transact(lambda tx: self.settle_in(tx, endings))

    def settle_in(self, tx: Transaction, endings: Sequence[Ending]) -> list[bool]:
        rows = self.open_attempts(tx, endings) if endings else []
        ended = []
        for ending, row in zip(endings, rows, strict=True):
            if row is None:
                continue
            seq, key, tried, worker, started_at, history, cancelling, has_dependents = row
            if key is not None:
                tx.keys.add(key)
            if ending.state in ENDED or cancelling:
                state = NUMBERS["cancelled" if cancelling and ending.state != "done" else ending.state]
                texts = (ending.result_json, ending.error, ending.traceback, ending.output)
                ended.append((state, time(), *texts, seq))
                if has_dependents:
                    self._release_dependents(tx, seq, ending.id, state)
            elif not ending.counts:
                tx.run(self.sql["give_back"], (seq,))  # it stays admitted: else a rate would make it wait again
                tx.ready += 1
            else:
                due = tx.now + ending.delay if ending.delay > 0 else None
                last = {"token": ending.token, "worker": worker, "started_at": started_at, "ended_at": time()}
                past = with_attempt(history, **last, state="retried", error=ending.error)
                waiting = (tx.waiting_state(key, due), due, self.newest(tx) + 1, tried)
                tx.run(self.sql["again"], (*waiting, ending.error, ending.traceback, ending.output, past, seq))
        self.update_all(tx, "end", ended)
        tx.ended = tx.ended or bool(ended)
        return [row is not None for row in rows]

    def _release_dependents(self, tx: Transaction, seq: int, id: str, state: int) -> None:
        """Tasks that wait for an ended task start, or are cancelled if it was not done."""
        ended = [(seq, id, state)]
        while ended:
            blocker, name, state = ended.pop()
            dependents = tx.run(self.sql["dependents"], (blocker,)).fetchall()
            tx.run(self.sql["cut"], (blocker,))
            for task, own_id in dependents:
                # Locked first: another transaction may end another task that it waits for.
                waits = tx.run(self.sql["waits"], (task,)).fetchone()
                if waits is None or waits[0] != BLOCKED:
                    continue
                if state != DONE:
                    tx.run(self.sql["cut_task"], (task,))
                    tx.run(self.sql["cancel"], (time(), f"task {name} is {NAMES[state]}", task))
                    ended.append((task, id_of(task, own_id), CANCELLED))
                elif tx.run(self.sql["is_blocked"], (task,)).fetchone() is None:
                    _, key, due = waits
                    now_waits = tx.waiting_state(key, due)
                    tx.run(self.sql["state"], (now_waits, due if now_waits == DELAYED else None, task))

    def end(
        self, workers: Callable[[], Iterable[str]], choose: Callable[[list[Attempt]], Sequence[Ending]]
    ) -> list[Ending]:
        """Call `choose` with the running tasks of these workers, and settle what it returns. Return what was settled.

        `choose` may kill the workers. No other process settles these tasks meanwhile, so none of them is an orphan.
        workers: called in the transaction. A process may have become a worker just before
        """

        def work(tx: Transaction) -> list[Ending]:
            endings = choose([attempt for worker in list(workers()) for attempt in self.running(tx.run, worker)])
            settled = zip(endings, self.settle_in(tx, endings), strict=True)
            return [ending for ending, was_open in settled if was_open]

        return self.transact(work)

    def report(self, id: str, token: int, progress_json: str) -> bool:
        """Store the progress of an attempt. False: its token is old."""

        def work(tx: Transaction) -> bool:
            row = tx.run(*self.by("attempt", id, token)).fetchone()
            if row is not None:
                tx.run(self.sql["report"], (progress_json, row[0], token))
            return row is not None

        return self.transact(work, sync=False)

    # Change.

    def cancel(self, which: Selection) -> int:
        """Cancel tasks that have not ended. A running one is only marked, and its worker ends it. Return how many."""

        def change(tx: Transaction, row: dict[str, Any]) -> None:
            seq = row["seq"]
            if row["state"] == RUNNING:
                tx.run(self.sql["mark_cancelling"], (seq,))
                return
            if row["key"] is not None:
                tx.keys.add(row["key"])
            tx.ended = True
            tx.run(self.sql["cut_task"], (seq,))
            tx.run(self.sql["cancel"], (time(), "cancelled", seq))
            self._release_dependents(tx, seq, id_of(seq, row["id"]), CANCELLED)

        # In the order of a task's life, so that a task that becomes ready meanwhile is not missed.
        # Parked tasks come before the delayed one with their key, and again, if others were due meanwhile.
        return self._change(which, [BLOCKED, *2 * [PARKED, DELAYED], READY, RUNNING], change)

    def retry(self, which: Selection) -> int:
        """Make ended tasks wait again, with all their attempts. Return how many."""

        def change(tx: Transaction, row: dict[str, Any]) -> None:
            history = row["history"]
            if row["tried"]:
                last = {name: row[name] for name in ("token", "worker", "started_at", "ended_at", "error")}
                history = with_attempt(history, **last, state=NAMES[row["state"]])
            tx.run(self.sql["reset"], (tx.waiting_state(row["key"]), self.newest(tx) + 1, history, row["seq"]))

        return self._change(which, [DONE, FAILED, CANCELLED], change)

    def delete(self, which: Selection) -> int:
        """Delete ended tasks. Return how many. The newest task stays, because its number must not be used again."""

        def change(tx: Transaction, row: dict[str, Any]) -> bool:
            is_newest = bool(row["seq"] == self.newest(tx))
            if not is_newest:
                tx.run(self.sql["delete"], (row["seq"],))
            return not is_newest

        return self._change(which, [DONE, FAILED, CANCELLED], change)

    def _change(
        self, which: Selection, states: list[int], change: Callable[[Transaction, dict[str, Any]], bool | None]
    ) -> int:
        """Call `change` for each selected task that is in one of the states, a page in each transaction. Return how
        often it did not return False."""
        wanted = [state for state in states if NAMES[state] in which.states]
        before = NEVER if which.ended_before is None else which.ended_before

        def change_all(tx: Transaction, rows: Iterable[Any]) -> int:
            found = (by_name(row) for row in rows if row is not None)  # each is read when the one before is changed
            fitting = (row for row in found if row["state"] in wanted and (row["ended_at"] or 0.0) < before)
            return sum(change(tx, row) is not False for row in fitting)

        changed = 0
        if which.ids is not None:
            ids = list(which.ids)
            for at in range(0, len(ids), PAGE):
                some = [self.by("locked_stored", id) for id in ids[at : at + PAGE]]
                changed += self.transact(lambda tx: change_all(tx, (tx.run(*one).fetchone() for one in some)))  # noqa: B023
            return changed

        def change_page(tx: Transaction, state: int, after: int) -> tuple[int, int]:
            rows = tx.run(self.sql["locked_page"].format(state=state), (after, PAGE)).fetchall()
            return change_all(tx, rows), rows[-1][0] if rows else 0

        for state in wanted:
            after = -1
            while after:
                number, after = self.transact(lambda tx: change_page(tx, state, after))  # noqa: B023
                changed += number
        return changed

    def prune(self, older_than: dict[str, float], limit: int) -> int:
        """Delete tasks that ended in a state before its moment: of each state some of the `limit` oldest numbers."""
        moments = {NUMBERS[state]: moment for state, moment in older_than.items()}

        def work(tx: Transaction) -> int:
            newest = self.newest(tx)
            deleted: list[int] = []
            for state, moment in moments.items():
                # A moment in the future: the clock was wrong then. It is not in the way of others.
                rows = tx.run(self.sql["prunable"].format(state=state), (time() + _A_DAY_S, limit)).fetchall()
                deleted += [seq for seq, ended_at in rows if seq != newest and ended_at < moment]
            tx.only_looked = not deleted
            for seq in deleted:
                tx.run(self.sql["delete"], (seq,))
            if not 0 <= time() - self._rates_forgotten_at <= _A_DAY_S:
                self._rates_forgotten_at = time()
                tx.run(self.sql["forget_rates"], (tx.now,))
            return len(deleted)

        return self.transact(work)

    def set_paused(self, paused: bool) -> None:
        """While a queue is paused, `claim` returns nothing."""

        def work(tx: Transaction) -> None:
            if paused:
                tx.run(self.sql["set_meta"], ("paused", "1"))
            else:
                tx.run(self.sql["unset_meta"], ("paused",))
                tx.ready += 1 << 30  # wake all idle workers

        self.transact(work)
