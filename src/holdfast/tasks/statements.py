"""The tables of the task engines, and all SQL statements. `sql` runs them.

Tables, with the prefix of the queue before their names:

    task       one row per task, in all its states
    edge       task `task` waits for task `blocker` (`after`)
    key_rate   the earliest moment at which the next task with a key may start
    schedule   its text, and the last moment that was added
    meta       version, clock, counters

Columns of a task that need explaining:

    seq        the number of the task. The id of a task without an `id` is an underscore and this number
    ord        its place in the queue. A task that is tried again gets the next number: the back
    due        a moment of the engine's clock (`SqlStore.now`), not of the wall clock
    admitted   of a task with a key: it counts towards the limit of its key
    reserved   0: begun. Else the worker begins it after the tasks that it has with smaller numbers
"""

from __future__ import annotations

READY, RUNNING, DELAYED, PARKED, BLOCKED, DONE, FAILED, CANCELLED = range(8)
NAMES = ("ready", "running", "delayed", "parked", "blocked", "done", "failed", "cancelled")
NUMBERS = {name: number for number, name in enumerate(NAMES)}

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
create index {p}task_running on {p}task (worker) where state = 1;
create index {p}task_delayed on {p}task (due) where state = 2;
create index {p}task_parked on {p}task (key_name, priority desc, ord, seq) where state = 3;
create index {p}task_blocked on {p}task (seq) where state = 4;
create index {p}task_failed on {p}task (seq) where state = 6;
create index {p}task_cancelled on {p}task (seq) where state = 7;
create index {p}task_admitted on {p}task (key_name) where admitted = 1;
create table {p}edge (blocker bigint not null, task bigint not null, primary key (blocker, task));
create index {p}edge_task on {p}edge (task);
create table {p}key_rate (key_name text primary key, next_at double precision not null);
create table {p}schedule (name text primary key, text text not null, last double precision not null);
create table {p}meta (name text primary key, value text not null);
"""

ATTEMPT = "seq, id, token, payload, function, priority, attempts, tried, timeout, key_name"
_STORED = (
    "seq, id, state, payload, function, priority, attempts, tried, token, timeout, key_name, key_limit, due, worker, "
    "result, error, traceback, output, progress, put_at, started_at, ended_at, cancelling, history"
)

_RUNNING = f"select {ATTEMPT}, reserved from {{p}}task where state = 1 and worker = ? order by reserved, seq"

STATEMENTS = {
    "insert": """insert into {p}task (id, state, priority, ord, due, payload, function, attempts, timeout, key_name,
        key_limit, key_interval, put_at, error, ended_at)
        values (?, ?, ?, (select coalesce(max(seq), 0) + 1 from {p}task), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
    "newest": "select coalesce(max(seq), 0) from {p}task",
    "by": "select seq, state from {p}task where {by} {share}",
    "ready": f"""select {ATTEMPT} from {{p}}task
        where state = 0 and not exists (select 1 from {{p}}meta where name = 'paused')
        order by priority desc, ord, seq limit ? {{skip}}""",
    "begin": """update {p}task set state = 1, token = ?, tried = tried + 1, worker = ?, reserved = ?, started_at = ?,
        progress = null where seq = ?""",
    "due": "select seq, key_name, admitted from {p}task where state = 2 and due <= ? order by due limit ? {skip}",
    "time_to_wake": "select (select min(due) from {p}task where state = 2), (select min(until) from {p}idle)",
    "state": "update {p}task set state = ?, due = ? where seq = ?",
    "back": "update {p}task set state = ?, due = null, ord = ? where seq = ?",
    "parked": """select seq, key_limit, key_interval from {p}task where state = 3 and key_name = ?
        order by priority desc, ord, seq limit 1 {skip}""",
    "admitted": "select count(*), coalesce(max(due), 0) from {p}task where admitted = 1 and key_name = ?",
    "admit": "update {p}task set state = ?, due = ?, admitted = 1 where seq = ?",
    "next_at": "select next_at from {p}key_rate where key_name = ?",
    "set_next_at": """insert into {p}key_rate (key_name, next_at) values (?, ?)
        on conflict (key_name) do update set next_at = excluded.next_at""",
    "forget_rates": "delete from {p}key_rate where next_at < ?",
    "attempt": """select seq, key_name, tried, worker, started_at, history, cancelling,
        exists (select 1 from {p}edge where blocker = {p}task.seq)
        from {p}task where {by} and token = ? and state = 1 {lock}""",
    "end": """update {p}task set state = ?, ended_at = ?, result = ?, error = ?, traceback = ?, output = ?,
        admitted = 0, cancelling = 0 where seq = ?""",
    "again": """update {p}task set state = ?, due = ?, ord = ?, tried = ?, error = ?, traceback = ?, output = ?,
        history = ?, admitted = 0, cancelling = 0, reserved = 0 where seq = ?""",
    "give_back": """update {p}task set state = 0, due = null, tried = tried - 1, cancelling = 0, reserved = 0
        where seq = ?""",
    "report": "update {p}task set progress = ? where {by} and token = ? and state = 1",
    "is_cancelling": "select cancelling from {p}task where {by} and token = ? and state = 1",
    "cancelling": "select seq, id, token from {p}task where state = 1 and cancelling = 1",
    "running": _RUNNING,
    "running_locked": _RUNNING + " {lock}",
    "workers": "select distinct worker from {p}task where state = 1",
    "add_edge": "insert into {p}edge (blocker, task) values (?, ?)",
    "dependents": "select seq, id from {p}edge join {p}task on seq = task where blocker = ? order by seq",
    "cut": "delete from {p}edge where blocker = ?",
    "cut_task": "delete from {p}edge where task = ?",
    "is_blocked": "select 1 from {p}edge where task = ? limit 1",
    "waits": "select state, key_name, due from {p}task where seq = ? {lock}",
    "mark_cancelling": "update {p}task set cancelling = 1 where seq = ?",
    "cancel": """update {p}task set state = 7, ended_at = ?, error = ?, admitted = 0 where seq = ?""",
    "reset": """update {p}task set state = ?, due = null, ord = ?, tried = 0, ended_at = null, result = null,
        history = ?, admitted = 0, cancelling = 0, reserved = 0 where seq = ?""",
    "ended": """select key_name, tried, token, worker, started_at, ended_at, error, history
        from {p}task where seq = ?""",
    "delete": "delete from {p}task where seq = ?",
    "page": f"select {_STORED} from {{p}}task where state = {{state}} and seq > ? order by seq limit ?",
    "stored": f"select {_STORED} from {{p}}task where {{by}}",
    "prunable": "select seq, state, ended_at from {p}task where seq > ? order by seq limit ? {skip}",
    "count": "select count(*) from {p}task where state = {state}",
    "meta": "select value from {p}meta where name = ?",
    "set_meta": """insert into {p}meta (name, value) values (?, ?)
        on conflict (name) do update set value = excluded.value""",
    "unset_meta": "delete from {p}meta where name = ?",
    "schedules": "select name, text, last from {p}schedule order by name",
    "set_schedule": """insert into {p}schedule (name, text, last) values (?, ?, 0)
        on conflict (name) do update set text = excluded.text, last = 0""",
    "unset_schedule": "delete from {p}schedule where name = ?",
    "set_last": "update {p}schedule set last = ? where name = ? and (last < ? or last > ?)",
}
STATEMENTS |= {f"locked_{name}": f"{STATEMENTS[name]} {{lock}}" for name in ("page", "stored")}
