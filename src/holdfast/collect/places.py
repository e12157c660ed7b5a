"""What the given paths and URLs contain: directories of locks, task queues, event stores, and what cannot be read.

    a file                     a lock
    a directory                its locks; queues and event stores in it and in its subdirectories
    postgresql://…             the locks of the server, and a queue and an event store if their tables exist
    etcd://… redis://… smb://… the locks of the server

Nothing is created: neither a directory nor a table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..errors import HoldfastError
from ..owner import hide_passwords, without_passwords
from .tasks import FILES

_STORE = "store.json"
_POSTGRES = ("postgresql://", "postgres://")
_TABLES = ("task", "event_store")


@dataclass
class Places:
    """What there is. Names of `errors` are paths, or URLs without passwords."""

    locks: list[str] = field(default_factory=list)  # directories, files, URLs of servers
    queues: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)  # that a change would be seen in
    errors: dict[str, str] = field(default_factory=dict)

    def __add__(self, more: Places) -> Places:
        return Places(
            self.locks + more.locks,
            self.queues + more.queues,
            self.stores + more.stores,
            self.directories + more.directories,
            {**self.errors, **more.errors},
        )


def look_into(given: list[str], recursive: bool) -> Places:
    """Find the locks, queues and event stores in paths and on servers."""
    found = Places()
    for place in given:
        try:
            if "://" in place:
                _add_server(place, found)
            elif os.path.isdir(place):
                _add_directory(os.path.normpath(place), recursive, found)
            else:
                os.stat(place)
                found.locks.append(place)
                found.directories.append(os.path.dirname(os.path.abspath(place)))
        except OSError as error:
            found.errors[place] = error.strerror or str(error)
        except HoldfastError as error:
            found.errors[hide_passwords(place)] = without_passwords(str(error))
    return found


def _add_directory(path: str, recursive: bool, found: Places) -> None:
    pending = [(path, 0)]
    while pending:
        here, depth = pending.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            if depth == 0:
                raise
            continue
        found.directories.append(here)
        names = {entry.name for entry in entries}
        if names.intersection(FILES):
            found.queues.append(here)
        elif _STORE in names:
            found.stores.append(here)
        elif depth == 0:
            found.locks.append(here)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name.endswith(".queue"):
                    found.directories.append(entry.path)
                elif recursive or depth == 0 or here in found.queues or here in found.stores:
                    pending.append((entry.path, depth + 1))


def _add_server(url: str, found: Places) -> None:
    if not url.startswith(_POSTGRES):
        found.locks.append(url)
        return
    from .. import postgres

    address, ours = postgres.split(url, ("prefix", "name"))
    prefix = postgres.table_prefix(postgres.without_password(url), ours.get("prefix", "holdfast_"))
    if "prefix" not in ours:
        found.locks.append(url)
    if "name" in ours:
        return

    def tables() -> set[str]:
        session = postgres.connect(address)
        try:
            query = "select relname from pg_class where relname = any(%s) and pg_table_is_visible(oid)"
            return {row[0] for row in session.connection.execute(query, [[prefix + name for name in _TABLES]])}
        finally:
            session.close()

    names = postgres.explained(address, tables)
    place = url if "prefix" in ours else address
    if f"{prefix}task" in names:
        found.queues.append(place)
    if f"{prefix}event_store" in names:
        found.stores.append(place)
