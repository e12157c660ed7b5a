"""A copy of a store that is good by itself: no room, nothing that is not on disk, no lock, ledger or index."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from ... import system
from ...files import create_file, private_name, sync_directory
from . import segments
from .segments import Segment

if TYPE_CHECKING:
    from .engine import LogEngine


def backup(engine: LogEngine, target: str) -> int:
    """Copy to a new directory, which appears when all of it is on disk. Returns the position of its last event."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "a backup is a new directory, and this is there already", target)
    private = private_name(os.path.abspath(target))
    os.makedirs(f"{private}/events")
    try:
        _copy(f"{engine.name}/store.json", f"{private}/store.json")
        for folder in ("projections", "subscriptions"):
            _copy_documents(f"{engine.name}/{folder}", f"{private}/{folder}")
        head = engine.head()  # after the documents: they tell of nothing that is not in the log
        firsts = [first for first in segments.list_segments(engine.view.events) if first <= max(head, 1)]
        for at, first in enumerate(firsts):
            path = segments.segment_path(f"{private}/events", first)
            with Segment(engine.view.events, first, anew=engine.view.anew) as file:
                size = system.fstat(file.fd).st_size
                if at + 1 == len(firsts):
                    size = file.end_of_line(file.find(head, head, size)) if head >= first else 0
                _copy_part(file, path, size)
        for folder in (f"{private}/events", private):
            sync_directory(folder)
        system.rename(private, target)
        sync_directory(os.path.dirname(os.path.abspath(target)))
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    return head


def _copy_part(file: Segment, path: str, size: int) -> None:
    create_file(path, system.pread(file.fd, size, 0), 0o644, sync=True)


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as file:
        create_file(target, file.read(), 0o644, sync=True)


def _copy_documents(source: str, target: str) -> None:
    try:
        names = system.listdir(source)
    except FileNotFoundError:
        return
    os.mkdir(target)
    for name in names:
        if name.endswith(".json"):
            with suppress(FileNotFoundError):  # `forget` or `unsubscribe` has removed it meanwhile
                _copy(f"{source}/{name}", f"{target}/{name}")
    sync_directory(target)
