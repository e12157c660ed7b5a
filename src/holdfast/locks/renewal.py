"""The threads that renew the leases of this process, one for each server. See `server`."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from time import monotonic

from .. import process, system, wait
from ..errors import HoldfastError
from ..files import pipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .server import Lease, ServerGrant

_IDLE_S = 5.0  # until the thread of a server without grants ends
_LOOK_S = 0.5  # until it looks again whether an idle lease has a grant
_MAX_WAKES = 100  # bytes in a pipe, which has room for thousands
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)


def clock() -> float:
    """Seconds that also count while the machine is suspended."""
    return monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


class Renewer:
    """The thread that renews the leases of this process on one server, and watches their sockets.

    It ends some seconds after the last grant was released.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._leases: dict[Lease, float] = {}  # and when each was last seen with a grant or a waiter
        self._thread: threading.Thread | None = None
        self._next = 0.0  # when the thread looks at the leases again
        self._dropped: deque[ServerGrant] = deque()
        self._woken, self._wake = pipe()

    def watch(self, lease: Lease) -> None:
        """Renew this lease, as long as it has grants or waiters."""
        with self._mutex:
            if lease in self._leases and lease.next_renewal >= self._next:
                return  # a lock that is acquired again and again does not wake the thread
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-renewal", daemon=True)
                thread.start()  # raises RuntimeError if the process may not have more threads
                self._thread = thread
            self._leases[lease] = clock()
            self._next = lease.next_renewal
            system.write(self._wake.fd, b"!")

    def drop(self, grant: ServerGrant) -> None:
        """Release a grant in a thread. Called by a finalizer: it must not block or use a mutex."""
        self._dropped.append(grant)
        if len(self._dropped) <= _MAX_WAKES:  # else the write might block: the thread waits for a server
            system.write(self._wake.fd, b"!")

    def _release_dropped(self) -> None:
        with suppress(IndexError):
            while True:
                with suppress(HoldfastError, OSError):
                    self._dropped.popleft().release()

    def _run(self) -> None:
        while (leases := self._in_use()) is not None:
            now = clock()
            sockets = [fd for fd in (lease.fileno() for lease in leases if lease.quiet_from <= now) if fd != -1]
            until = min([self._next, *(lease.quiet_from for lease in leases if lease.quiet_from > now)])
            readable = wait.poll([self._woken.fd, *sockets], max(0.0, until - now))
            if self._woken.fd in readable:
                system.read(self._woken.fd, 4096)
            if self._dropped:  # in a thread of its own: the server may be silent
                threading.Thread(target=self._release_dropped, name="holdfast-release", daemon=True).start()
            for lease in leases:
                if lease.next_renewal <= clock():
                    lease.renew_now()
                elif lease.fileno() in readable:
                    lease.look()

    def _in_use(self) -> set[Lease] | None:
        """The leases that have grants or waiters. None: there were none for some seconds, and the thread ends.

        An idle lease may get a grant that does not wake the thread: its renewal is later than `_next`.
        """
        with self._mutex:
            now = clock()
            used = {lease for lease in self._leases if (lease.grants or lease.waiters) and not lease.is_lost}
            self._leases.update(dict.fromkeys(used, now))
            self._leases = {
                lease: seen for lease, seen in self._leases.items() if now < seen + _IDLE_S and not lease.is_lost
            }
            if not self._leases and not self._dropped:
                self._thread = None
                return None
            moments = [lease.next_renewal if lease in used else now + _LOOK_S for lease in self._leases]
            self._next = min(moments, default=now + _LOOK_S)
        return used


renewers: dict[str, Renewer] = {}
process.after_fork_in_child(renewers.clear)  # a child has neither the threads nor the grants
