"""The tables of the task engines, all SQL statements that they share, and the objects that rows become.

Tables, with the prefix of the queue before their names:

    task       one row per task, in all its states
    edge       task `task` waits for task `blocker` (`after`)
    key_rate   the earliest moment at which the next task with a key may start. Each start moves it
    schedule   its text, and the last moment that was added
    idle       a worker that waits for a task, and the moment at which it wakes
    meta       version, clock, counters

Columns of a task that need explaining:

    seq        the number of the task. The id of a task without an `id` is an underscore and this number
    ord        its place in the queue. A task that is tried again gets the next number: the back
    due        a moment of the engine's clock (`Store.now`), not of the wall clock
    admitted   of a task with a key: it counts towards the limit of its key
    reserved   0: begun. Else the worker begins it after the tasks that it has with smaller numbers

The statements are written for SQLite. In PostgreSQL `?` becomes `%s`, and these become clauses that lock the rows which
a statement returns:

    {lock}     the transaction is about to end the task, or to make another worker run it
    {skip}     the same, without the rows that another transaction has locked
    {share}    the task must not end before this transaction does

A statement with {by} exists twice: `name_seq` finds a task by its number, `name_id` by the id that the caller chose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from .store import WAITING, Attempt, Task

READY, RUNNING, DELAYED, PARKED, BLOCKED, DONE, FAILED, CANCELLED = range(8)
NAMES = ("ready", "running", "delayed", "parked", "blocked", "done", "failed", "cancelled")
NUMBERS = {name: number for number, name in enumerate(NAMES)}
_MAX_HISTORY = 20  # earlier attempts that are kept

SCHEMA = """
create table {p}task (
    seq {serial} primary key, id text, state integer not null, priority integer not null, ord bigint not null,
    due double precision, payload text not null, function text, attempts integer not null,
    tried integer not null default 0, token bigint not null default 0, timeout double precision,
    key_name text, key_limit integer not null default 0, key_interval double precision not null default 0,
    admitted integer not null default 0, worker text, reserved integer not null default 0,
    cancelling integer not null default 0, put_at double precision not null, started_at double precision,
    ended_at double precision, result text, error text, traceback text, output text, progress text, history text);
create unique index {p}task_id on {p}task (id) where id is not null;
create index {p}task_ready on {p}task (priority desc, ord, seq) where state = 0;
create index {p}task_running on {p}task (seq) where state = 1;
create index {p}task_delayed on {p}task (due) where state = 2;
create index {p}task_parked on {p}task (key_name, priority desc, ord, seq) where state = 3;
create index {p}task_blocked on {p}task (seq) where state = 4;
create index {p}task_done on {p}task (seq) where state = 5;
create index {p}task_failed on {p}task (seq) where state = 6;
create index {p}task_cancelled on {p}task (seq) where state = 7;
create index {p}task_admitted on {p}task (key_name) where admitted = 1;
create table {p}edge (blocker bigint not null, task bigint not null, primary key (blocker, task));
create index {p}edge_task on {p}edge (task);
create table {p}key_rate (key_name text primary key, next_at double precision not null);
create table {p}schedule (name text primary key, text text not null, last double precision not null);
create {unlogged} table {p}idle (worker text primary key, until double precision not null);
create table {p}meta (name text primary key, value text not null);
"""

_ATTEMPT = "seq, id, token, payload, function, attempts, tried, timeout, key_name"
_STORED = (
    "seq, id, state, payload, function, priority, attempts, tried, token, timeout, key_name, key_limit, due, worker, "
    "result, error, traceback, output, progress, put_at, started_at, ended_at, cancelling, history"
)
_STORED_NAMES = _STORED.replace("key_name", "key").replace("key_limit", "limit").split(", ")
COLUMNS = (
    "id, state, priority, due, payload, function, attempts, timeout, key_name, key_limit, key_interval, put_at, error, "
    "ended_at"
)  # of a new task

OPEN_ATTEMPT = """seq, key_name, tried, worker, started_at, history, cancelling,
    exists (select 1 from {p}edge where blocker = {p}task.seq)"""
# Updates of many tasks: what is the same for all, and the columns that have a value for each, besides `seq`.
UPDATES = {
    "begin": (
        "state = 1, tried = {p}task.tried + 1, progress = null",
        ["token", "worker", "reserved", "started_at"],
    ),
    "end": (
        "admitted = 0, cancelling = 0",
        ["state", "ended_at", "result", "error", "traceback", "output"],
    ),
}

STATEMENTS = {
    "insert": f"""insert into {{p}}task ({COLUMNS}, ord)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (select coalesce(max(seq), 0) + 1 from {{p}}task))
        on conflict (id) where id is not null do nothing""",
    "newest": "select coalesce(max(seq), 0) from {p}task",
    "by": "select seq, state from {p}task where {by} {share}",
    "ready": f"""select {_ATTEMPT}, key_interval from {{p}}task
        where state = 0 and not exists (select 1 from {{p}}meta where name = 'paused')
        order by priority desc, ord, seq limit ? {{skip}}""",
    "due": "select seq, key_name, admitted from {p}task where state = 2 and due <= ? order by due limit ? {skip}",
    "has_task": """select exists (select 1 from {p}task where state = 0
            and not exists (select 1 from {p}meta where name = 'paused'))
        or exists (select 1 from {p}task where state = 2 and due <= ?)""",
    "time_to_wake": """select (select min(due) from {p}task where state = 2),
        (select min(until) from {p}idle where until >= 0)""",
    "ask": """insert into {p}idle (worker, until) values (?, ?)
        on conflict (worker) do update set until = excluded.until""",
    "forget": "delete from {p}idle where worker = ?",
    "state": "update {p}task set state = ?, due = ? where seq = ?",
    "back": "update {p}task set state = ?, due = null, ord = ? where seq = ?",
    "parked": """select seq, key_limit, key_interval from {p}task where state = 3 and key_name = ?
        order by priority desc, ord, seq limit 1 {skip}""",
    "admitted": """select count(*), count(case when key_interval > 0 and state <> 1 then 1 end) from {p}task
        where admitted = 1 and key_name = ?""",
    "admit": "update {p}task set state = ?, due = ?, admitted = 1 where seq = ?",
    "next_at": "select next_at from {p}key_rate where key_name = ?",
    "set_next_at": """insert into {p}key_rate (key_name, next_at) values (?, ?)
        on conflict (key_name) do update set next_at = excluded.next_at""",
    "forget_rates": "delete from {p}key_rate where next_at < ?",
    "attempt": f"select {OPEN_ATTEMPT} from {{p}}task where {{by}} and token = ? and state = 1",
    "done": f"""update {{p}}task set state = {DONE}, ended_at = ?, result = ?, error = null, traceback = null,
        output = null, admitted = 0, cancelling = 0 where {{by}} and token = ? and state = {RUNNING} and key_name
            is null and not exists (select 1 from {{p}}edge where blocker = {{p}}task.seq)""",
    "again": """update {p}task set state = ?, due = ?, ord = ?, tried = ?, error = ?, traceback = ?, output = ?,
        history = ?, admitted = 0, cancelling = 0, reserved = 0 where seq = ?""",
    "give_back": """update {p}task set state = 0, due = null, tried = tried - 1, cancelling = 0, reserved = 0
        where seq = ?""",
    "report": "update {p}task set progress = ? where seq = ? and token = ? and state = 1",
    "running": f"""select {_ATTEMPT}, reserved from {{p}}task where state = 1 and worker = ? order by reserved, seq
        {{lock}}""",
    "cancelling": "select seq, id, token, worker from {p}task where state = 1 and cancelling = 1",
    "workers": "select distinct worker from {p}task where state = 1",
    "add_edge": "insert into {p}edge (blocker, task) values (?, ?)",
    "dependents": "select seq, id from {p}edge join {p}task on seq = task where blocker = ? order by seq",
    "cut": "delete from {p}edge where blocker = ?",
    "cut_task": "delete from {p}edge where task = ?",
    "is_blocked": "select 1 from {p}edge where task = ? limit 1",
    "waits": "select state, key_name, due from {p}task where seq = ? {lock}",
    "mark_cancelling": "update {p}task set cancelling = 1 where seq = ?",
    "cancel": "update {p}task set state = 7, ended_at = ?, error = ?, admitted = 0 where seq = ?",
    "reset": """update {p}task set state = ?, due = null, ord = ?, tried = 0, ended_at = null, result = null,
        history = ?, admitted = 0, cancelling = 0, reserved = 0 where seq = ?""",
    "delete": "delete from {p}task where seq = ?",
    "page": f"select {_STORED} from {{p}}task where state = {{state}} and seq > ? order by seq limit ?",
    "search": f"""select {_STORED} from (select * from {{p}}task where {{of_state}} seq < ?
            order by seq desc limit {{limit}}) t
        where state = {{state}} and (cast(? as text) is null or function = cast(? as text))
            and (cast(? as text) is null or key_name = cast(? as text))
            and (cast(? as text) is null or lower(coalesce(id, '_' || seq) || ' ' || coalesce(function, '') || ' '
                || case when ? = 1 then payload || ' ' || coalesce(error, '') else '' end)
                like cast(? as text) escape '!')
        order by seq desc limit ?""",
    "window": """select min(seq), count(*) from (select seq from {p}task where {of_state} seq < ?
        order by seq desc limit {limit}) t""",
    "ended": """select cast(ended_at as bigint) / 60 as minute, count(*) from (select ended_at, seq from {p}task
        where state = {state} order by seq desc limit {limit}) t where ended_at >= ? group by minute""",
    "idle_workers": "select worker from {p}idle where until >= 0 order by worker",
    "stored": f"select {_STORED} from {{p}}task where {{by}}",
    "prunable": """select seq, ended_at from {p}task where state = {state} and ended_at <= ? order by seq limit ?
        {skip}""",
    "count": "(select count(*) from (select 1 from {p}task where state = {state} limit {limit}) s)",
    "meta": "select value from {p}meta where name = ?",
    "set_meta": """insert into {p}meta (name, value) values (?, ?)
        on conflict (name) do update set value = excluded.value""",
    "unset_meta": "delete from {p}meta where name = ?",
    "schedules": "select name, text, last from {p}schedule order by name",
    "last": "select last from {p}schedule where name = ? {lock}",
    "set_schedule": """insert into {p}schedule (name, text, last) values (?, ?, 0)
        on conflict (name) do update set text = excluded.text, last = 0""",
    "unset_schedule": "delete from {p}schedule where name = ?",
    "set_last": "update {p}schedule set last = ? where name = ?",
}
STATEMENTS |= {
    name: f"update {{p}}task set {same}, {' = ?, '.join(columns)} = ? where seq = ?"
    for name, (same, columns) in UPDATES.items()
}
STATEMENTS |= {f"locked_{name}": f"{STATEMENTS[name]} {{lock}}" for name in ("page", "stored")}


def filled(statements: dict[str, str], mark: str = "?", **clauses: str) -> dict[str, str]:
    """The statements of an engine."""
    found = {}
    clauses |= {name: f"{{{name}}}" for name in ("state", "of_state", "limit")}
    for name, text in statements.items():
        kinds = {f"{name}_id": "id = ?", f"{name}_seq": "seq = ? and id is null"} if "{by}" in text else {name: ""}
        for kind, by in kinds.items():
            found[kind] = " ".join(text.format(by=by, **clauses).split()).replace("?", mark)
    return found


def number_of(id: str) -> int | None:
    """The number of a task whose id was chosen by the engine. None: the id was chosen by the caller."""
    digits = id[1:]
    return int(digits) if id[:1] == "_" and digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def id_of(seq: int, id: str | None) -> str:
    return f"_{seq}" if id is None else id


def attempt_of(row: Sequence[Any]) -> Attempt:
    return Attempt(id_of(row[0], row[1]), *row[2:9])


def by_name(row: Sequence[Any]) -> dict[str, Any]:
    """A row of `_STORED`. Columns that are fields of `Task`, too, have their names."""
    return dict(zip(_STORED_NAMES, row, strict=True))


def task_of(row: Sequence[Any], now: float) -> Task:
    fields = by_name(row)
    seq, id, number, due = (fields.pop(name) for name in ("seq", "id", "state", "due"))
    state = NAMES[number]
    is_waiting = state in WAITING
    for name in ("payload", "result", "progress", "history"):
        fields[name] = None if fields[name] is None else json.loads(fields[name])
    for name in ("put_at", "started_at", "ended_at"):
        fields[name] = None if fields[name] is None else datetime.fromtimestamp(fields[name], timezone.utc)
    fields["progress"] = fields["progress"] and tuple(fields["progress"])
    fields["history"] = tuple(fields["history"] or ())
    return Task(
        id=id_of(seq, id),
        state="pending" if is_waiting else state,
        waits=state if is_waiting and state != "ready" else None,
        due_in=max(0.0, due - now) if state == "delayed" else None,
        cancelling=bool(fields.pop("cancelling")),
        **fields,
    )


def with_attempt(history: str | None, **attempt: Any) -> str:
    """The history of a task with one more attempt."""
    past = [] if history is None else json.loads(history)
    return json.dumps([*past, attempt][-_MAX_HISTORY:])
