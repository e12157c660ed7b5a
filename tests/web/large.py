"""Large queues and event stores, made quickly, for tests and benchmarks of `holdfast web`."""

from __future__ import annotations

from time import time

from holdfast.events import Event, EventStore
from holdfast.tasks import TaskQueue

# Of every ten tasks: seven are done, one has failed, two wait. They ended in the course of the last two hours.
_INSERT = """insert into {p}task (ord, state, priority, payload, function, attempts, tried, token, key_name, put_at,
    started_at, ended_at, error) select n, case when n % 10 < 7 then 5 when n % 10 = 7 then 6 else 0 end, 0,
    '{{"photo": "img-' || n || '.jpg", "width": 1200}}', case when n % 3 = 0 then 'resize' else 'mail' end, 3, 1, n,
    case when n % 50 = 0 then 'k' || (n % 7) end, {now} - 7300,
    case when n % 10 < 8 then {now} - 7200.0 * ({number} - n) / {number} - 1 end,
    case when n % 10 < 8 then {now} - 7200.0 * ({number} - n) / {number} end,
    case when n % 10 = 7 then 'no such file' end from numbers"""


def fill_queue(queue: TaskQueue, number: int, *, only_waiting: bool = False) -> None:
    """Add tasks in all states, or tasks that wait, with one statement."""
    insert = _INSERT.replace("n % 10", "9") if only_waiting else _INSERT
    if queue.store.is_local:
        import sqlite3

        queue.put("makes the tables")
        queue.close()
        text = f"with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < {number}) "
        statement = insert.format(p="", now=time(), number=number)
        with sqlite3.connect(f"{queue.path}/queue.db", isolation_level=None) as database:
            database.execute(statement.replace("from numbers", f"from ({text}select n from numbers)"))
        database.close()
        return
    queue.put("makes the tables")
    statement = insert.format(p="holdfast_", now=time(), number=number)
    statement = statement.replace("from numbers", f"from generate_series(1, {number}) n")
    import psycopg

    with psycopg.connect(queue._where, autocommit=True) as connection:
        connection.execute(statement)
        connection.execute("analyze holdfast_task")


def fill_store(store: EventStore, number: int) -> None:
    """Append events of three types, with two tags each."""
    types = ("OrderPlaced", "OrderPaid", "OrderShipped")
    for begin in range(0, number, 500):
        store.append(
            [
                Event(types[n % 3], {"total": n % 90}, tags=[f"order:{n}", f"customer:{n % 997}"])
                for n in range(begin, min(begin + 500, number))
            ]
        )
