"""The lock file behind `SoftFileLock`. Loaded on its first use, because it takes long to import."""

from __future__ import annotations

from ..locks.file_engine import FileEngine
from ..locks.plain_record import PLAIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_RETRY_S = 0.05  # where the file system reports no events


class SoftEngine(FileEngine):
    """A lock file with the record of filelock."""

    __slots__ = ()

    def shares_already(self, *, asynchronous: bool) -> bool:
        return False


def make(name: str, *, lifetime: float | None, **modes: Any) -> FileEngine:
    return SoftEngine(
        name,
        PLAIN.writer(None),
        stale="proof" if lifetime is None else "dead-or-old",
        stale_after=lifetime,
        retry=_RETRY_S,
        durable=False,
        fence=False,
        fair=True,
        follow=False,
        **modes,
    )


def remove(engine: FileEngine) -> None:
    """Remove the lock file of any holder."""
    engine.remove_existing(lambda _: True)
