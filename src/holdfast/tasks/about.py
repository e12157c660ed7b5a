"""Whose directory this is: `queue.json`, with a format. A queue is made where there is nothing else."""

from __future__ import annotations

import errno
import json
import os

from .. import owner
from ..errors import CorruptStore, Unsupported
from ..files import replace_file
from .places import Places, listed, make, sync_folders

FORMAT = 2
_BEFORE_SHEETS = 1  # else the same
_ALSO_OURS = ("sequence", "limits", "schedules", "clock-", "queue.", "boot.")


def open_directory(places: Places, *, durable: bool, mode: int) -> None:
    about = f"{places.root}/queue.json"
    try:
        with open(about, "rb") as file:
            number = json.loads(file.read())["format"]
    except FileNotFoundError:
        _make(places, about, durable=durable, mode=mode)
        return
    except NotADirectoryError:
        text = "a queue is a directory, and this is a file, or is below one"
        raise NotADirectoryError(errno.ENOTDIR, text, places.root) from None
    except (ValueError, KeyError, TypeError):
        raise CorruptStore(f"{about} does not describe a queue; it was left as it is.", path=about) from None
    if number == _BEFORE_SHEETS:
        try:
            _write(about, durable=durable, mode=mode)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return  # this process may only look
    elif number != FORMAT:
        text = f"{places.root}: this queue has format {number}, and this version of Holdfast knows {FORMAT}."
        raise Unsupported(text, path=places.root)
    for folder in places.folders:
        make(folder)


def _make(places: Places, about: str, *, durable: bool, mode: int) -> None:
    make(places.root)
    ours = {"boot", *(os.path.basename(folder) for folder in places.folders)}
    others = [name for name in listed(places.root) if name not in ours and not name.startswith(_ALSO_OURS)]
    if others:
        text = f"there is something else in this directory ({others[0]}); give the queue one of its own"
        raise FileExistsError(errno.EEXIST, text, places.root)
    for folder in places.folders:
        make(folder)
    write_boot(places, mode)
    _write(about, durable=durable, mode=mode)


def write_boot(places: Places, mode: int) -> None:
    """That since the machine was started it was looked whether something was lost before (`lines`)."""
    replace_file(f"{places.root}/boot", (owner.boot_id() or "").encode() + b"\n", mode)


def _write(about: str, *, durable: bool, mode: int) -> None:
    text = json.dumps({"format": FORMAT, "what": "tasks of Holdfast"}).encode() + b"\n"
    replace_file(about, text, mode, sync=True)  # also if nobody waits for the disk later: without it, this is no queue
    if durable:
        root = os.path.dirname(about)
        sync_folders(root, os.path.dirname(root))
