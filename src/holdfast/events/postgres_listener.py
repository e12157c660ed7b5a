"""News of appends: one session of a process listens for all of its waiters, in a thread.

    waiter = listener.join()
    while no event has come:
        if waiter.may_look():              the session listens, so that no later append is missed
            look at the head
        wait until waiter.fd is readable   rung by a notification, and when a lost session was replaced
    listener.leave(waiter)

The thread reads every notification, also while no thread waits: a session that did not read would fill the queue of
notifications of the server. The thread ends, and closes the session, some time after the last waiter has left.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from .. import postgres
from ..errors import ConnectionFailed, HoldfastError
from ..files import pipe
from ..wait import poll

with suppress(ImportError):  # `postgres.connect` names the remedy
    import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable

LINGER_S = 5.0
RECONNECT_S = 30.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0


class _Bell:
    """A pipe: another thread wakes the one that waits until it can be read."""

    def __init__(self) -> None:
        self._reader, self._writer = pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end.fd, False)

    @property
    def fd(self) -> int:
        return self._reader.fd

    def ring(self) -> None:
        with suppress(BlockingIOError):  # full of earlier rings
            os.write(self._writer.fd, b"!")

    def hush(self) -> None:
        with suppress(BlockingIOError):
            while len(os.read(self._reader.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Waiter(_Bell):
    """One wait for an append."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self.error: HoldfastError | None = None

    def may_look(self) -> bool:
        """Does the session listen? Raises ConnectionFailed if the server is away for long."""
        self.hush()
        if self.error is not None:
            raise self.error
        return self._listener.is_listening


class Listener:
    """The session of a process that listens, and its thread. A forked child makes its own."""

    is_listening = False

    def __init__(self, connect: Callable[[], postgres.Session], channel: str, url: str) -> None:
        self._connect, self.channel, self._url = connect, channel, url
        self._mutex = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._control: _Bell | None = None  # of the thread, while there is one

    def join(self) -> Waiter:
        waiter = Waiter(self)
        with self._mutex:
            self._waiters.add(waiter)
            if self._control is None:
                self._control = _Bell()
                threading.Thread(target=self._run, args=[self._control], name="holdfast listener", daemon=True).start()
            else:
                self._control.ring()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        with self._mutex:
            self._waiters.discard(waiter)
            if self._control is not None and not self._waiters:
                self._control.ring()
            waiter.close()

    def close(self) -> None:
        """End the thread, unless a follower waits."""
        with self._mutex:
            control = self._control
            if control is not None and not self._waiters:
                self._control, self.is_listening = None, False
                control.ring()

    def _ring(self, error: HoldfastError | None = None) -> None:
        with self._mutex:
            for waiter in self._waiters:
                waiter.error = error
                waiter.ring()

    # The thread.

    def _run(self, control: _Bell) -> None:
        try:
            while True:
                session = self._connected(control)
                try:
                    self._listen(session, control)
                except (psycopg.Error, OSError):  # it was lost
                    self._set_listening(control, False)
                finally:
                    session.close()
        except _Ended:
            control.close()

    def _set_listening(self, control: _Bell, is_listening: bool) -> None:
        with self._mutex:
            if self._control is control:
                self.is_listening = is_listening

    def _connected(self, control: _Bell) -> postgres.Session:
        """Connect and listen. Repeat that for some time, and then tell the waiters."""
        until, pause = monotonic() + RECONNECT_S, _MIN_PAUSE_S
        while True:
            try:
                session = self._connect()
                self._begin(session)
            except HoldfastError as error:
                if monotonic() >= until or not isinstance(error, ConnectionFailed):
                    self._ring(error)
                self._rest(control, pause)
                pause = min(_MAX_PAUSE_S, 2 * pause)
                continue
            self._set_listening(control, True)
            self._ring()  # notifications may have been lost
            return session

    def _begin(self, session: postgres.Session) -> None:
        try:
            postgres.explained(self._url, lambda: session.connection.execute(f'listen "{self.channel}"'))
        except BaseException:
            session.close()  # at once: libpq may have closed the socket
            raise

    def _listen(self, session: postgres.Session, control: _Bell) -> None:
        connection = session.connection.pgconn
        while True:
            ready = self._rest(control, None, session.fileno())
            if session.fileno() in ready:
                connection.consume_input()
                count = 0
                while connection.notifies():
                    count += 1
                if count:
                    self._ring()

    def _rest(self, control: _Bell, seconds: float | None, *others: int) -> set[int]:
        """Wait for one of the descriptors. Raises _Ended after some time without waiters, or if it was closed."""
        while True:
            nobody = not self._waiters
            ready = poll([control.fd, *others], LINGER_S if nobody else seconds)
            if control.fd in ready:
                control.hush()
            with self._mutex:
                if self._control is not control or (nobody and not ready and not self._waiters):
                    if self._control is control:
                        self._control, self.is_listening = None, False
                    raise _Ended
            if not nobody or ready.intersection(others):
                return ready


class _Ended(Exception):
    """The thread has nothing to do any more."""
