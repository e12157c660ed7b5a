"""Whose events these are: `store.json`, with a format and an id that is in every line."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from zlib import crc32

import msgspec

from ... import system
from ...errors import CorruptStore, UnsafePath, Unsupported
from ...files import publish_file, read_all, sync_directory
from . import segments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...locks.base import StrPath

FORMAT = 1
_OURS = ("events", "index", "projections", "subscriptions", "ledger", ".store.lock", ".forget.lock", "store.json")

_IS_FILE = "an event store is a directory, and this is a file or below one. It was left untouched. Check the path"


def absolute(path: StrPath) -> str:
    text = os.fsdecode(path)
    if not text:
        raise UnsafePath("an empty path cannot name an event store", path=text)
    return os.path.abspath(text)


def tag_of(name: str) -> bytes:
    """The first part of the checksum in every line of the store with this id."""
    return b"%08x" % crc32(name.encode())


def open_directory(path: str, mode: int) -> str:
    """Make the directory if it does not exist. Returns the id of the store."""
    while True:
        try:
            return read_id(path)
        except FileNotFoundError:
            _make(path, mode)
        except NotADirectoryError:
            raise NotADirectoryError(errno.ENOTDIR, _IS_FILE, path) from None


def read_id(path: str) -> str:
    about = f"{path}/store.json"
    text = read_all(about)
    try:
        said = msgspec.json.decode(text)
        number, name = said["format"], said["id"]
        if not isinstance(number, int) or not isinstance(name, str):
            raise TypeError
    except (msgspec.DecodeError, TypeError, KeyError, UnicodeDecodeError):
        raise CorruptStore(f"{about} does not describe an event store; it was left as it is.", path=about) from None
    if number != FORMAT:
        raise Unsupported(
            f"{path}: this store has format {number}, and this version of Holdfast knows {FORMAT}. Use the version "
            "that made it, or a later one.",
            path=path,
        )
    return name


def _make(path: str, mode: int) -> None:
    made = _missing(path)
    error = _not_new(path)
    try:
        if error is None:
            os.makedirs(f"{path}/events", exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, _IS_FILE, path) from None
    if error is not None:
        if not os.path.exists(f"{path}/store.json"):  # else another process has made the store meanwhile
            raise error
        return
    text = msgspec.json.encode({"format": FORMAT, "id": os.urandom(16).hex()}) + b"\n"
    with suppress(FileExistsError):  # another process was quicker
        # Synced also if the store is not durable: without this file, the events have no owner.
        publish_file(f"{path}/store.json", text, mode, sync=True)
    for folder in (path, *made):
        sync_directory(folder)


def _missing(path: str) -> list[str]:
    """The directories that get a new entry if this one is made."""
    found = [os.path.dirname(path)]
    while not os.path.isdir(found[-1]):
        found.append(os.path.dirname(found[-1]))
    return found


def _not_new(path: str) -> Exception | None:
    """Why no store can be made here."""
    try:
        others = [name for name in system.listdir(path) if not name.startswith(_OURS)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    if others:
        text = f"there is something else in this directory ({others[0]}); give the event store one of its own"
        return FileExistsError(errno.EEXIST, text, path)
    if os.path.isdir(f"{path}/events") and segments.list_segments(f"{path}/events"):
        about = f"{path}/store.json"
        text = f"{about} is missing, so the store of these events is not known. Restore it from a copy of the store."
        return CorruptStore(text, path=about)
    return None
