"""Fencing tokens: each is greater than all earlier ones of its path, unless the clock is set back.

A token is the clock in nanoseconds, or one more than the greatest token that this process has issued or read. With
`fence=True` a small file beside the lock keeps the last token, so that the clock does not matter.
"""

from __future__ import annotations

from time import time_ns

from .. import process, system
from ..errors import CorruptLock, UnsafePath
from ..files import OwnedFd
from .publish import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .publish import Entry

_MAX_PATHS = 10_000
_MAX_TOKEN = 2**63 - 2  # one more must fit

# By path: two acquisitions may fall into one tick of the clock.
_last: dict[str, int] = {}


def note(path: str, token: int) -> None:
    """From now on `new` returns only greater tokens. A token that the clock reaches after 2100 is not one of ours."""
    if token > _MAX_TOKEN // 2:
        return
    with process.registry.mutex:
        _last[path] = max(token, _last.get(path, 0))


def new(path: str) -> int:
    with process.registry.mutex:
        now, last = time_ns(), _last.get(path, 0)
        token = _last[path] = now if now > last else last + 1
        if len(_last) > _MAX_PATHS:  # forget the smallest tokens: the clock is furthest past them
            for old in sorted(_last, key=_last.__getitem__)[: _MAX_PATHS // 2]:
                del _last[old]
    return token


def advance_fence(entry: Entry, path: str, token: int, mode: int, durable: bool) -> int:
    """Return a token greater than the one in the fence file, and write it there. The caller has the removal byte."""
    last = _read_fence(entry, path)
    token = max(token, last + 1)
    replace(entry, entry.name + ".fence", b"%d\n" % token, mode, durable)
    note(path, token)
    return token


def _read_fence(entry: Entry, path: str) -> int:
    try:
        file = OwnedFd(system.open_fd(entry.name + ".fence", system.O_READ, dir_fd=entry.dir_fd))
    except FileNotFoundError:
        return 0
    with file:
        if not entry.trusts(system.fstat(file.fd)):
            raise UnsafePath(
                f"{path}.fence was made by another user in a directory that others can write to, so its "
                "token is not trusted. Remove it, or keep the lock in a directory of your own.",
                path=path,
            )
        digits = system.read(file.fd, 64).strip()
    if digits.isdigit() and len(digits) <= 19 and int(digits) <= _MAX_TOKEN:
        return int(digits)
    raise CorruptLock(
        f"{path}.fence does not hold a number: {digits[:40]!r}. Find out what wrote it. Without it tokens may repeat.",
        path=path,
    )
