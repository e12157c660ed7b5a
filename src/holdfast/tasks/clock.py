"""A clock for delays that all processes of a machine share, and that does not jump when somebody sets the time.

The wall clock of the moment in which a queue was first used since the machine was started, and what has passed since
then. It is in a file of that boot; another machine has its own. Only if the wall clock is more than a day away is it
believed instead: then it was wrong before.
"""

from __future__ import annotations

import errno
import time
from math import isfinite
from zlib import crc32

from .. import owner
from ..files import publish_file, read_all

_A_DAY = 86_400.0
_ticks = getattr(time, "CLOCK_BOOTTIME", None)


def _since_boot() -> float:
    return time.monotonic() if _ticks is None else time.clock_gettime(_ticks)


class Clock:
    def __init__(self, folder: str) -> None:
        boot = f"{owner.me().host} {owner.boot_id()}"
        self._path = f"{folder}/clock-{crc32(boot.encode()):08x}"
        self._offset: float | None = None

    def now(self) -> float:
        """Seconds since the epoch."""
        wall = time.time()
        if owner.boot_id() is None:
            return wall
        if self._offset is None:
            self._offset = self._read() or self._write(wall - _since_boot())
        steady = _since_boot() + self._offset
        return wall if abs(wall - steady) > _A_DAY else steady

    def _read(self) -> float | None:
        try:
            offset = float(read_all(self._path))
        except (FileNotFoundError, ValueError):
            return None
        return offset if isfinite(offset) else None

    def _write(self, offset: float) -> float:
        try:
            publish_file(self._path, b"%.6f\n" % offset, 0o644)
        except FileExistsError:
            pass  # another process was quicker, or what is there says nothing
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return offset  # this process may only look, and so tells nobody
        return self._read() or offset
