"""The checkpoint of a subscription: a file of one short line, written in place.

    subscriptions/<name>.json         {"position":                  41,"sum":"0123abcd"}
    subscriptions/<name>.json.lock    held by the process that consumes

A write of one line costs some microseconds, so there is one for every event. It survives the death of the process. The
file is synced about once a second. After a power failure an older position may be there, and events come again.
`sum` is the CRC-32 of the store and the position.
"""

from __future__ import annotations

import os
import re
from time import monotonic, sleep
from typing import TYPE_CHECKING
from zlib import crc32

from ... import system
from ...errors import CorruptStore
from ...files import OwnedFd, publish_file, read_all, remove, write_at
from ...locks.lock import Lock
from ..engine import Checkpoint

if TYPE_CHECKING:
    from ..engine import Options

_LINE = re.compile(rb'\{"position": *(\d+),"sum":"([0-9a-f]{8})"\}\n')
_SYNC_EVERY_S = 1.0
_LOOKS, _PAUSE_S = 50, 0.001


class FileCheckpoint(Checkpoint):
    def __init__(self, path: str, store: bytes, options: Options) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.where = path
        self.lock = Lock(f"{path}.lock", mode=options.mode)
        self._store, self._options = store, options
        self._file: OwnedFd | None = None
        self._synced = 0.0

    def position(self) -> int | None:
        for _ in range(_LOOKS):  # a reader may see a part of a line that is being written
            try:
                text = read_all(self.where)
            except FileNotFoundError:
                return None
            found = _LINE.fullmatch(text)
            if found and self._line(int(found[1])) == text:
                return int(found[1])
            sleep(_PAUSE_S)
        raise CorruptStore(
            f"{self.where} is damaged, or was copied from another store. Call unsubscribe, and then subscribe with "
            "after= the last event that was handled.",
            path=self.where,
        )

    def _line(self, position: int) -> bytes:
        number = b"%20d" % position
        return b'{"position":%s,"sum":"%08x"}\n' % (number, crc32(self._store + number))

    def create(self, position: int) -> None:
        publish_file(self.where, self._line(position), self._options.mode, sync=self._options.durable)

    def save(self, position: int) -> None:
        if self._file is None or not self._file.is_open:
            self._file = OwnedFd(system.open_fd(self.where, system.O_EXISTING))
        write_at(self._file.fd, self._line(position), 0)
        if self._options.durable and monotonic() - self._synced > _SYNC_EVERY_S:
            system.fdatasync(self._file.fd)
            self._synced = monotonic()

    def remove(self) -> None:
        self.close()
        remove(self.where)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
