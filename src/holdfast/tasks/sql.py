"""The SQL that all engines share: what a task is in a database, and what each operation of the port does to it.

An engine derives from `SqlStore`. It opens connections, runs a function in a transaction, claims, knows which workers
are alive, and wakes those that wait. The statements are written for SQLite and work in PostgreSQL, too: there `?`
becomes `%s`, and these become clauses that lock the rows which a statement returns:

    {lock}     the transaction is about to end the task or to change who may run it
    {skip}     the same, without the rows that another transaction has locked
    {share}    the task must not end before this transaction does
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import time
from typing import Any

from .reading import PAGE, SqlReader
from .rows import Transaction, attempt_of, ended_before, id_of, number_of, with_attempt
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
)
from .store import ENDED, Attempt, Ending, NewTask, Selection

_A_DAY_S = 86_400.0


class SqlStore(SqlReader):
    """Operations of the port in SQL."""

    # Add.

    def add_in(self, tx: Transaction, tasks: Sequence[NewTask], max_waiting: int | None) -> list[tuple[str, bool]]:
        room = None if max_waiting is None else max_waiting - self.count_waiting(tx, max_waiting)
        added = []
        for task in tasks:
            if task.id is not None and self.find(tx.run, task.id, "by") is not None:
                added.append((task.id, False))
                continue
            if room is not None:
                if room <= 0:
                    break
                room -= 1
            added.append(self._add_one(tx, task))
        return added

    def count_waiting(self, tx: Transaction, limit: int) -> int:
        """How many tasks wait. An engine may stop counting at `limit`."""
        return sum(tx.run(self.sql["count"].format(state=state)).fetchone()[0] for state in (0, 2, 3, 4))

    def _add_one(self, tx: Transaction, task: NewTask) -> tuple[str, bool]:
        values, blockers = self.row_of(tx, task)
        seq = self.insert(tx, values)
        if seq is None:
            return str(task.id), False
        for blocker in blockers:
            tx.run(self.sql["add_edge"], (blocker, seq))
        return task.id if task.id is not None else f"_{seq}", True

    def row_of(self, tx: Transaction, task: NewTask) -> tuple[tuple[Any, ...], list[int]]:
        """The values to insert for a new task, and the numbers of the tasks that it waits for."""
        state, error, blockers = READY, None, []
        for id in task.after:
            found = self.find(tx.run, id, "by")
            if found is None:
                raise ValueError(f"{self.name}: after={id!r}: there is no such task")
            if found[1] in (FAILED, CANCELLED):
                state, error = CANCELLED, f"task {id} is {NAMES[found[1]]}"
            elif found[1] != DONE:
                blockers.append(found[0])
        due = tx.now + task.delay if task.delay else None
        if state == READY:
            if blockers:
                state = BLOCKED
            elif due is not None:
                state, tx.due = DELAYED, True
            elif task.key is not None:
                state = PARKED
                tx.keys.add(task.key)
            else:
                tx.ready += 1
        values = (
            task.id,
            state,
            task.priority,
            due,
            task.payload_json,
            task.function,
            task.attempts,
            task.timeout,
            task.key,
            task.limit,
            task.interval,
            time(),
            error,
            time() if state == CANCELLED else None,
        )
        return values, list(dict.fromkeys(blockers)) if state == BLOCKED else []

    def insert(self, tx: Transaction, values: tuple[Any, ...]) -> int | None:
        """Insert a task and return its number. None: another transaction has added a task with its id."""
        seq: int = tx.run(self.sql["insert"], values).lastrowid
        return seq

    def set_schedule(self, name: str, text: str | None) -> bool:
        def work(tx: Transaction) -> bool:
            existed: bool = tx.run(self.sql["unset_schedule"], (name,)).rowcount > 0
            if text is not None:
                tx.run(self.sql["set_schedule"], (name, text))
            tx.due = True  # idle workers look again when the next moment is
            return existed

        return self.transact(work)

    def add_moment(self, name: str, moment: float, task: NewTask) -> bool:
        def work(tx: Transaction) -> bool:
            if tx.run(self.sql["set_last"], (moment, name, moment, time() + _A_DAY_S)).rowcount == 0:
                return False
            self.add_in(tx, [task], None)
            return True

        return self.transact(work)

    # Work.

    def claim_in(self, tx: Transaction, worker: str, count: int, *, reserve: bool) -> list[Attempt]:
        self.promote_due(tx)
        rows = tx.run(self.sql["ready"], (count,)).fetchall()
        now = time()
        for place, row in enumerate(rows):
            tx.run(self.sql["begin"], (worker, place if reserve else 0, now, row[0]))
        return [attempt_of(row, 1) for row in rows]

    def promote_due(self, tx: Transaction) -> None:
        """Delayed tasks whose moment has come are ready, or wait for the limit of their key."""
        rows = tx.run(self.sql["due"], (tx.now, PAGE)).fetchall()
        if not rows:
            return
        place = self._back_place(tx)
        for seq, key, admitted in rows:
            if key is not None and not admitted:
                tx.run(self.sql["back"], (PARKED, None, place, seq))
            else:
                tx.run(self.sql["back"], (READY, None, place, seq))
                tx.ready += 1
            if key is not None:
                tx.keys.add(key)

    def _back_place(self, tx: Transaction) -> int:
        """The place behind all tasks so far, and before all tasks that are added later."""
        place: int = tx.run(self.sql["back_place"]).fetchone()[0]
        return place

    def finish(self, tx: Transaction) -> None:
        """The last step of a transaction: admit parked tasks of the keys that it touched."""
        for key in sorted(tx.keys):
            self.lock_key(tx, key)
            while self._admit_next(tx, key):
                pass
        tx.keys.clear()

    def _admit_next(self, tx: Transaction, key: str) -> bool:
        row = tx.run(self.sql["parked"], (key,)).fetchone()
        if row is None:
            return False
        seq, limit, interval = row
        admitted, last_due = tx.run(self.sql["admitted"], (key,)).fetchone()
        if (limit and admitted >= limit) or (interval and last_due > tx.now):
            return False
        starts = tx.now
        if interval:
            found = tx.run(self.sql["next_at"], (key,)).fetchone()
            starts = max(tx.now, found[0]) if found else tx.now
            tx.run(self.sql["set_next_at"], (key, starts + interval))
        if starts > tx.now:
            tx.run(self.sql["admit"], (DELAYED, starts, seq))
            tx.due = True
        else:
            tx.run(self.sql["admit"], (READY, None, seq))
            tx.ready += 1
        return True

    def settle(self, endings: Sequence[Ending]) -> list[bool]:
        return self.transact(lambda tx: [self.settle_in(tx, ending) for ending in endings])

    def settle_in(self, tx: Transaction, ending: Ending) -> bool:
        row = self.find(tx.run, ending.id, "attempt", ending.token)
        if row is None:
            return False
        seq, key, tried, worker, started_at, history, cancelling, has_dependents = row
        if key is not None:
            tx.keys.add(key)
        if ending.state in ENDED or cancelling:
            state = NUMBERS["cancelled" if cancelling and ending.state != "done" else ending.state]
            texts = (ending.result_json, ending.error, ending.traceback, ending.output)
            tx.run(self.sql["end"], (state, time(), *texts, seq))
            if has_dependents:
                self._release_dependents(tx, seq, ending.id, state)
        elif not ending.counts:
            tx.run(self.sql["give_back"], (seq,))  # it stays admitted: else a rate would make it wait again
            tx.ready += 1
        else:
            due = tx.now + ending.delay if ending.delay > 0 else None
            state = DELAYED if due is not None else READY if key is None else PARKED
            tx.ready += state == READY
            tx.due = tx.due or state == DELAYED
            past = with_attempt(history, ending.token, worker, started_at, time(), "retried", ending.error)
            place = self._back_place(tx)
            tx.run(
                self.sql["again"], (state, due, place, tried, ending.error, ending.traceback, ending.output, past, seq)
            )
        return True

    def _release_dependents(self, tx: Transaction, seq: int, id: str, state: int) -> None:
        """Tasks that wait for an ended task start, or are cancelled if it was not done."""
        ended = [(seq, id, state)]
        while ended:
            blocker, name, state = ended.pop()
            tasks = [row[0] for row in tx.run(self.sql["dependents"], (blocker,)).fetchall()]
            tx.run(self.sql["cut"], (blocker,))
            for task in tasks:
                # Locked first: another transaction may end another task that it waits for.
                waits = tx.run(self.sql["waits"], (task,)).fetchone()
                if waits is None or waits[0] != BLOCKED:
                    continue
                if state != DONE:
                    tx.run(self.sql["cut_task"], (task,))
                    tx.run(self.sql["cancel"], (time(), f"task {name} is {NAMES[state]}", task))
                    ended.append((task, self._id_of(tx, task), CANCELLED))
                elif tx.run(self.sql["is_blocked"], (task,)).fetchone() is None:
                    self._unblock(tx, task, *waits[1:])

    def _id_of(self, tx: Transaction, seq: int) -> str:
        row = tx.run(self.sql["page"].format(state=CANCELLED), (seq - 1, 1)).fetchone()
        return id_of(row[0], row[1])

    def _unblock(self, tx: Transaction, seq: int, key: str | None, due: float | None) -> None:
        if due is not None and due > tx.now:
            tx.run(self.sql["state"], (DELAYED, due, seq))
            tx.due = True
        elif key is not None:
            tx.run(self.sql["state"], (PARKED, None, seq))
            tx.keys.add(key)
        else:
            tx.run(self.sql["state"], (READY, None, seq))
            tx.ready += 1

    def report(self, id: str, token: int, progress_json: str) -> bool:
        seq = number_of(id)
        name, key = ("report_id", id) if seq is None else ("report_seq", seq)
        statement = self.sql[name], (progress_json, key, token)
        done: bool = self.transact(lambda tx: tx.run(*statement).rowcount > 0, sync=False)
        return done

    def running(self, worker: str) -> list[Attempt]:
        return self.read(lambda run: self._running(run, worker))

    def end(self, workers: Sequence[str], choose: Callable[[list[Attempt]], Sequence[Ending]]) -> list[Ending]:
        def work(tx: Transaction) -> list[Ending]:
            attempts = [attempt for worker in workers for attempt in self._running(tx.run, worker, "running_locked")]
            return [ending for ending in choose(attempts) if self.settle_in(tx, ending)]

        return self.transact(work)

    def _running(self, run: Callable[..., Any], worker: str, statement: str = "running") -> list[Attempt]:
        """The first one, and all that are not reserved, have begun."""
        rows = run(self.sql[statement], (worker,)).fetchall()
        attempts = [attempt_of(row, 0) for row in rows]
        for place, (attempt, row) in enumerate(zip(attempts, rows, strict=True)):
            attempt.begun = place == 0 or row[-1] == 0
        return attempts

    # Change.

    def cancel(self, which: Selection) -> int:
        def change(tx: Transaction, seq: int, id: str, state: int) -> bool:
            if state == RUNNING:
                tx.run(self.sql["mark_cancelling"], (seq,))
                return True
            key = tx.run(self.sql["waits"], (seq,)).fetchone()[1]
            if key is not None:
                tx.keys.add(key)
            tx.run(self.sql["cut_task"], (seq,))
            tx.run(self.sql["cancel"], (time(), "cancelled", seq))
            self._release_dependents(tx, seq, id, CANCELLED)
            return True

        # In the order of a task's life: one that becomes ready meanwhile is not missed.
        return self._change(which, [BLOCKED, DELAYED, PARKED, READY, RUNNING], change)

    def retry(self, which: Selection) -> int:
        def change(tx: Transaction, seq: int, id: str, state: int) -> bool:
            key, tried, token, worker, started, ended, error, history = tx.run(self.sql["ended"], (seq,)).fetchone()
            if tried:
                history = with_attempt(history, token, worker, started, ended, NAMES[state], error)
            place = self._back_place(tx)
            tx.run(self.sql["reset"], (READY if key is None else PARKED, place, history, seq))
            tx.ready += key is None
            if key is not None:
                tx.keys.add(key)
            return True

        return self._change(which, [DONE, FAILED, CANCELLED], change)

    def delete(self, which: Selection, limit: int) -> int:
        def change(tx: Transaction, seq: int, id: str, state: int) -> bool:
            if seq == tx.run(self.sql["newest"]).fetchone()[0]:
                return False
            self.delete_in(tx, [seq])
            return True

        return self._change(which, [DONE, FAILED, CANCELLED], change, limit)

    def delete_in(self, tx: Transaction, numbers: list[int]) -> None:
        for seq in numbers:
            tx.run(self.sql["delete"], (seq,))

    def _change(
        self,
        which: Selection,
        states: list[int],
        change: Callable[[Transaction, int, str, int], bool],
        limit: int | None = None,
    ) -> int:
        """Call `change` for each selected task that is in one of the states, a page in each transaction."""
        wanted = [state for state in states if NAMES[state] in which.states]
        changed = 0
        if which.ids is not None:
            ids = list(which.ids)[:limit]
            for at in range(0, len(ids), PAGE):
                changed += self.transact(lambda tx: self._change_ids(tx, ids[at : at + PAGE], wanted, change, which))  # noqa: B023
            return changed
        for state in wanted:
            after: int | None = 0
            while after is not None and (limit is None or changed < limit):
                size = PAGE if limit is None else min(PAGE, limit - changed)
                number, after = self.transact(lambda tx: self._change_page(tx, state, after, size, change, which))  # noqa: B023
                changed += number
        return changed

    def _change_ids(self, tx: Transaction, ids: list[str], wanted: list[int], change: Any, which: Selection) -> int:
        changed = 0
        for id in ids:
            row = self.find(tx.run, id, "locked_stored")
            if row is not None and row[2] in wanted and ended_before(row, which):
                changed += change(tx, row[0], id, row[2])
        return changed

    def _change_page(
        self, tx: Transaction, state: int, after: int | None, size: int, change: Any, which: Selection
    ) -> tuple[int, int | None]:
        rows = tx.run(self.sql["locked_page"].format(state=state), (after, size)).fetchall()
        changed = sum(change(tx, row[0], id_of(row[0], row[1]), state) for row in rows if ended_before(row, which))
        return changed, rows[-1][0] if rows else None

    def prune(self, older_than: dict[str, float], limit: int) -> int:
        """A pass goes through all tasks by their number, and stops where one ended too recently. Its place is kept in
        `meta`. The next pass begins at the first task, because tasks that were passed over may have ended: a day after
        this one began, or sooner if tasks are kept for less."""
        moments = {NUMBERS[state]: moment for state, moment in older_than.items()}
        interval = min(_A_DAY_S, time() - max(older_than.values()))

        def work(tx: Transaction) -> int:
            if not self.may_prune(tx):
                return 0
            row = tx.run(self.sql["meta"], ("prune",)).fetchone()
            place, began = json.loads(row[0]) if row else (0, time())
            newest = tx.run(self.sql["newest"]).fetchone()[0]
            deleted: list[int] = []
            for seq, state, ended_at in tx.run(self.sql["prunable"], (place, limit)).fetchall():
                # A moment in the future: the clock was wrong then. It is not in the way of others.
                if seq == newest or (state in moments and moments[state] <= ended_at <= time() + _A_DAY_S):
                    if not 0 <= time() - began <= interval:
                        place, began = 0, time()
                        tx.run(self.sql["forget_rates"], (tx.now,))
                    break
                place = seq
                if state in moments and ended_at < moments[state]:
                    deleted.append(seq)
            self.delete_in(tx, deleted)
            text = json.dumps([place, began])
            if row is None or row[0] != text:
                tx.run(self.sql["set_meta"], ("prune", text))
            return len(deleted)

        return self.transact(work)

    def set_paused(self, paused: bool) -> None:
        def work(tx: Transaction) -> None:
            if paused:
                tx.run(self.sql["set_meta"], ("paused", "1"))
            else:
                tx.run(self.sql["unset_meta"], ("paused",))
                tx.ready += 1 << 30  # wake all idle workers

        self.transact(work)
