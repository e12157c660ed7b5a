"""The tables of an event store in PostgreSQL, and its statements.

    {p}event_store      one row: the id of the store, its format, and the counter `head`, the last position
    {p}event            the events. `first` and `last`: what was appended together. `mark`: a random number of the
                        transaction that added them, so that the next connection can see whether it was committed
    {p}event_term       what events are found by: (tag, type, position), with '' for any tag and for any type
    {p}event_document   the state of projections. The row with the empty name is their era
    {p}event_subscription   the position up to which the consumers of a subscription have handled all events

An event with the type T and the tags a, b has the terms ('', T), (a, ''), (a, T), (b, '') and (b, T). So each choice of
a type and a tag is one range of the only index of this table, in order of position, however frequent the type and the
tag are. There is no other index that the planner of the server might prefer.

A query is a list of terms, each with a type or '' and some tags. With one tag or none, a term is a range. With several
tags it is the intersection of ranges, which `_LEAP` finds: the last position of the first tag, then the last position
of the next tag up to there, and so on. If all tags have the same position, it is a match. The rarest tag leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from ..postgres import RING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .draft import Draft
    from .model import Query

VERSION = 1
_NO_END = (1 << 63) - 1
_FEW = 8  # terms
MAX_LENGTH = 1000  # bytes of a tag or a type: both, and a position, must fit into an entry of a B-tree

SCHEMA = """
create table {p}event_store (id text primary key, version integer not null, head bigint not null)
    with (fillfactor = 50);
create table {p}event (
    position bigint primary key,
    id text not null,
    time timestamptz not null,
    type text not null,
    tags text[] not null,
    data text not null,
    metadata text not null,
    first bigint not null,
    last bigint not null,
    mark bigint not null
);
create table {p}event_term (tag text, type text, position bigint, primary key (tag, type, position));
create table {p}event_document (name text primary key, content bytea not null);
create table {p}event_subscription (name text primary key, position bigint not null) with (fillfactor = 50);
insert into {p}event_store (id, version, head) values ('{id}', {version}, 0);
"""

_TERMS = """select tag, term.type, position from {new} as new
    cross join lateral (select '' as tag union all select unnest(tags)) as tag
    cross join lateral (values (''), (new.type)) as term (type) where tag <> '' or term.type <> ''"""
_COLUMNS = "position, id, time, type, tags, data, metadata, first, last"
_UNLESS = """cross join old
    where not exists (select from broken) and head >= %(least)s and head <= %(most)s"""
# The positions in the rows count from `base`.
_INSERT = f"""insert into {{{{p}}}}event ({_COLUMNS}, mark)
    select {{base}} + position, id, coalesce(time, (select clock_timestamp())), type, tags, data, metadata,
        {{base}} + first, {{base}} + last, mark
    from json_populate_recordset(null::{{{{p}}}}event, {{rows}}::json) {{unless}}
    returning position, type, tags"""

_LOCK = """with lock as materialized (select {lazily}set_config('lock_timeout', %s, true), pg_advisory_xact_lock(%s))
    select head from lock cross join {{p}}event_store as store where id = %s for no key update of store"""

STATEMENTS = {
    "store": "select id, version from {p}event_store",
    "head": "select head from {p}event_store where id = %s",
    # Not only for the number: it also stops a program that does not take the advisory lock, and a transaction whose
    # snapshot is older than the last append.
    # The row is locked after the advisory lock was acquired, and read as it is then.
    "lock": _LOCK.format(lazily=""),
    "lock_lazily": _LOCK.format(lazily="set_config('synchronous_commit', 'off', true), "),
    "insert": f"""with new as ({_INSERT.format(base=0, rows="%s", unless="")})
        insert into {{p}}event_term (tag, type, position) {_TERMS.format(new="new")}""",
    "set_head": "update {p}event_store set head = %s where id = %s",
    "is_there": "select min(position) from {p}event where position > %s and mark = %s",
    "forget_terms": "delete from {p}event_term",
    "make_terms": f"insert into {{p}}event_term (tag, type, position) {_TERMS.format(new='{p}event')}",
    "load": """select (select content from {p}event_document where name = %(name)s),
        (select content from {p}event_document where name = '')""",
    "save": """insert into {p}event_document (name, content) select %(name)s, %(content)s
        where (select content from {p}event_document where name = '') is not distinct from %(era)s::bytea
        on conflict (name) do update set content = excluded.content""",
    "forget": """update {p}event as event set data = 'null', metadata = new.metadata
        from json_to_recordset(%s::json) as new (position bigint, metadata text) where event.position = new.position""",
    "forget_documents": "delete from {p}event_document",
    "new_era": "insert into {p}event_document (name, content) values ('', %s)",
    "checkpoints": "select name from {p}event_subscription order by name",
    "checkpoint": "select position from {p}event_subscription where name = %s",
    "create_checkpoint": f"""insert into {{p}}event_subscription (name, position) values (%s, %s) on conflict do nothing
        returning {RING}""",
    # Not synced: what a crash of the server loses comes again.
    "save_checkpoint": f"""update {{p}}event_subscription set position = %s
        from (select set_config('synchronous_commit', 'off', true)) as lazily where name = %s returning {RING}""",
    "remove_checkpoint": f"delete from {{p}}event_subscription where name = %s returning {RING}",
    "check_head": """select head, coalesce(min(position), 1), coalesce(max(position), 0), count(position)
        from {p}event_store left join {p}event on true group by head""",
    "check_order": """select position from (select position, lag(position, 1, 0::bigint) over (order by position) as
        before from {p}event) found where position <> before + 1 order by position limit 10""",
    "check_batches": """select min(position) from {p}event group by first having min(position) <> first
        or min(last) <> max(last) or count(*) <> max(last) - first + 1 order by 1 limit 10""",
    "check_missing": f"""({_TERMS.format(new="{p}event")}) except all select tag, type, position from {{p}}event_term
        order by position limit 10""",
    "check_spare": f"""select tag, type, position from {{p}}event_term except all ({_TERMS.format(new="{p}event")})
        order by position limit 10""",
    "holder": """select coalesce(nullif(application_name, ''), 'a program'), pid,
            extract(epoch from clock_timestamp() - xact_start)::float8, state like 'idle%%'
        from pg_locks join pg_stat_activity using (pid) where locktype = 'advisory' and granted and objsubid = 1
        and pg_locks.database = (select oid from pg_database where datname = current_database())
        and (classid::bigint << 32) | objid::bigint = %s limit 1""",
}

# The positions of one term `t` between two positions, in order.
_RANGE = """select position from {p}event_term where tag = t.tag and type = t.type
    and position > t.after and position <= %(head)s order by position {order} limit %(each)s"""
_LEAP = """with recursive leap (at, step, together) as (select {start}, 0, 0 union all
        select next.position, step + 1, case when next.position = at then together + 1 else 1 end
        from leap cross join lateral (select position from {p}event_term
            where tag = t.tags[step %% cardinality(t.tags) + 1] and type = t.type
            and {inside} case when together = cardinality(t.tags) then at {on} 1 else at end
            order by position {order} limit 1) next)
    select at as position from leap where together = cardinality(t.tags) limit %(each)s"""
_FORWARDS = {
    "order": "",
    "start": "t.after + 1",
    "inside": "position <= %(head)s and position >=",
    "on": "+",
    "last": "max",
    "next": "min",
}
_BACKWARDS = {
    "order": "desc",
    "start": "%(head)s::bigint",
    "inside": "position > t.after and position <=",
    "on": "-",
    "last": "min",
    "next": "max",
}
_ARMS = {
    "ranges": f"""select number, found.position from json_to_recordset(%(ranges)s::json)
        as t (number integer, tag text, type text, after bigint) cross join lateral ({_RANGE}) as found""",
    "leaps": f"""select number, found.position from json_to_recordset(%(leaps)s::json)
        as t (number integer, tags text[], type text, after bigint) cross join lateral ({_LEAP}) as found""",
}
# Each term gives as many positions as the page may have. Behind the last one of a term that has more, other terms are
# not complete: `edge`, where the next page begins.
_PAGE = """with found as materialized ({arms}),
    edge as (select {next}(edge) as edge
        from (select {last}(position) as edge from found group by number having count(*) >= %(each)s) as more)
    select {columns}, edge from (select distinct position from found) as chosen cross join edge
    join {p}event using (position)
    where edge is null or position between least(edge, %(start)s) and greatest(edge, %(start)s)
    order by position {order}"""
# An append without a second round trip: unless an event breaks a condition, or a position is not there yet.
_ALONE = f"""with old as materialized (select head from {{p}}event_store where id = %(id)s),
    broken as materialized (select position from ({{arms}}) as found order by position desc limit 1),
    new as ({_INSERT.format(base="head", rows="%(rows)s", unless=_UNLESS)}),
    terms as (insert into {{p}}event_term (tag, type, position) {_TERMS.format(new="new")}),
    counted as (select count(*) as number from new),
    moved as (update {{p}}event_store set head = head + number from counted where id = %(id)s and number > 0)
    select number, (select position from broken), pg_notify(%(channel)s, '') from counted"""
_ALL = """select {columns}, null::bigint from {p}event where position > %(after)s and position <= %(head)s
    order by position {order} limit %(each)s"""


def is_fast(query: Query) -> bool:
    """Can its matches be found while others wait? The last match of each term is one search in the index."""
    terms = terms_of((query, 0))
    return not query.matches_all and "leaps" not in terms and len(terms["ranges"]) <= _FEW


def terms_of(*queries: tuple[Query, int]) -> dict[str, list[dict[str, Any]]]:
    """The terms of queries, each behind a position: those that are ranges, and those with several tags."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item, after in ((item, after) for query, after in queries for item in query.items):
        tags = sorted(item.tags)
        for kind in sorted(item.types) or [""]:
            number = sum(map(len, found.values()))
            term = {"number": number, "type": kind, "after": after}
            if len(tags) > 1:
                found.setdefault("leaps", []).append({**term, "tags": tags})
            else:
                found.setdefault("ranges", []).append({**term, "tag": "".join(tags)})
    return found


def last_match(p: str, query: Query, after: int) -> tuple[str, dict[str, Any]]:
    """The statement for the position of the last event that matches a query, which does not match all events."""
    terms = terms_of((query, after))
    arms = " union all ".join(_ARMS[kind] for kind in terms)
    text = f"select max(position) from ({arms}) as found".format(p=p, **_BACKWARDS)
    return text, {**_as_json(terms), "head": _NO_END, "each": 1}


def look_ahead(p: str, id: str, query: Query, after: int) -> tuple[str, dict[str, Any]]:
    """The statement for the head, and for the last match behind a position, both of one moment."""
    text, values = ("select null", {}) if query.matches_all else last_match(p, query, after)
    return f"select head, ({text}) from {p}event_store where id = %(id)s", {**values, "id": id}


def append_alone(
    p: str, id: str, channel: str, rows: str, conditions: Sequence[tuple[Query, int]], least: int
) -> tuple[str, dict[str, Any]]:
    """The statement that appends, with positions that count from the head, unless an event matches one of the queries
    behind its position, or the head is below `least`. It returns the number of events that it added, and a match."""
    terms = terms_of(*((query, after) for query, after in conditions if not query.matches_all))
    most = min((after for query, after in conditions if query.matches_all), default=_NO_END)
    arms = " union all ".join(_ARMS[kind] for kind in terms) or "select null::bigint as position where false"
    words = {"id": id, "channel": channel, "rows": rows, "least": least, "most": most, "head": _NO_END, "each": 1}
    return _ALONE.replace("{arms}", arms).format(p=p, **_BACKWARDS), {**_as_json(terms), **words}


def page(p: str, query: Query, after: int, head: int, each: int, *, backwards: bool) -> tuple[str, dict[str, Any]]:
    """The statement for the next events, from one end of what is between two positions. It finds at least `each`, if
    there are as many, and `edge`: None if there are no more, else the position up to which all were found."""
    words = {"p": p, "columns": _COLUMNS, **(_BACKWARDS if backwards else _FORWARDS)}
    values = {"after": after, "head": head, "each": each, "start": head if backwards else after + 1}
    if query.matches_all:
        return _ALL.format(**words), values
    terms = terms_of((query, after))
    arms = " union all ".join(_ARMS[kind] for kind in terms).format(**words)
    return _PAGE.format(arms=arms, **words), {**_as_json(terms), **values}


def _as_json(terms: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    return {kind: msgspec.json.encode(found).decode() for kind, found in terms.items()}


def rows_of(batches: Iterable[tuple[int, list[Draft]]], mark: int) -> str:
    """The events to insert: batches, each with its first position."""
    rows: list[dict[str, Any]] = []
    for first, drafts in batches:
        last = first + len(drafts) - 1
        for position, draft in enumerate(drafts, first):
            data, metadata = draft.parts()
            row = {"position": position, "id": draft.id or uuid4().hex, "time": draft.time, "type": draft.type}
            row |= {"tags": draft.tags, "data": data.decode(), "metadata": metadata.decode()}
            rows.append({**row, "first": first, "last": last, "mark": mark})
    return msgspec.json.encode(rows).decode()


def check(draft: Draft) -> None:
    """Raise ValueError for what the tables cannot contain."""
    for what, text in (("type", draft.type), *(("tag", tag) for tag in draft.tags), ("id", draft.id or "")):
        if "\0" in text:
            raise ValueError(f"the {what} {text!r} contains a NUL character, which PostgreSQL does not store")
        if len(text.encode()) > MAX_LENGTH:
            raise ValueError(f"the {what} {text[:40]!r}… has more than {MAX_LENGTH} bytes, the limit in PostgreSQL")
