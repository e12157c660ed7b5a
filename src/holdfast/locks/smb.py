"""Locks on an SMB server: a file that is open. The server refuses to open it a second time.

    smb://user:password@host:445/share/directory/name

    name.token      the lock. Its holder has it open for writing, and lets others only read it. It contains the last
                    token, and stays
    name            names the holder: it contains `pid@host`. The holder has it open for writing and deleting, and lets
                    others only read it. The server deletes it when it is closed, by its holder or by the end of the
                    connection

Only the holder of `name.token` creates and deletes `name`. Otherwise two clients could hold the lock on Samba, which
creates a file first and enters it as open a moment later. If another client finds the file in between, not open, and
deletes it, its creator holds a file without a name. When that is closed, Samba deletes the file that has the name by
then. Nothing deletes `name.token`, except `forget`.

The holder reads the last token and writes the next one. That is one more, or the time of the files in microseconds if
that is greater. So tokens grow even if `name.token` was deleted. The time alone is not enough: its resolution is a tick
of the server's kernel (4 ms), and several holders fit into that.

A server that crashes leaves `name` behind, but not open. The next holder opens it alone, checks that it contains
`pid@host`, and deletes it. Any other content is refused with NotALockFile.

The server notifies the waiters when the file is deleted (CHANGE_NOTIFY), and all of them try again, in no order.

Loss: a connection that ends is noticed at once. Every 3 seconds the holder reads its open files. If the server does not
answer for `TTL_S` seconds, the locks are lost. The server must not release them earlier. Samba releases the locks of a
machine that has vanished after 9.7 s with these options in smb.conf, and after two hours without them:

    socket options = TCP_NODELAY SO_KEEPALIVE TCP_KEEPIDLE=5 TCP_KEEPINTVL=2 TCP_KEEPCNT=3

Some servers do not lock. So the first use of a share opens a private file twice, and refuses the share if that
succeeds. A program on the server that opens the file without SMB is not excluded.
smbprotocol needs no mount and no root. It fails if its socket has a descriptor above 1023.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from .. import system, wait
from ..errors import ConnectionFailed, HoldfastError, NotALockFile, Unsupported
from ..files import pipe
from ..owner import hide_passwords
from . import smb_file, smb_session
from .engine import BUSY, Outcome
from .server import (
    CALL_TIMEOUT_S,
    STATUS_TIMEOUT_S,
    ServerEngine,
    ServerGrant,
    Waiter,
    client_name,
    holder_of,
)
from .smb_session import TTL_S, Refused, Share, SmbSession, explain, shares, split
from .smb_watch import DirectoryWatch, watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..status import Status

    Result = TypeVar("Result")

_LOOK_S = 5.0  # until a waiter tries again without an event
_POLL_S = 0.1  # the same, on a server that reports no changes, and for a file that is about to be deleted
_MAX_ROUNDS = 5  # of an attempt that finds a file without a holder
_CLOSE_S = 0.5  # short: a caller whose timeout has passed waits for it, too
_SHORT_S = 1.0  # a server that does not answer within a shorter time may be well
_MAX_CONTENT, _MAX_DIGITS = 1024, 18
_CLIENT = re.compile(rb"\d+@[^\0\r\n]*")  # the content of a lock
_NOT_FOUND, _COLLISION = 0xC0000034, 0xC0000035
_SHARING_VIOLATION, _DELETE_PENDING = 0xC0000043, 0xC0000056
_BUSY = {_SHARING_VIOLATION, _DELETE_PENDING}


class SmbEngine(ServerEngine):
    """The lock of one path on one share."""

    shared = False

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        if not smb_session.is_installed:
            raise Unsupported("SMB needs smbprotocol, which is not installed. Run: pip install 'holdfast[smb]'")
        super().__init__(hide_passwords(url), "smb")
        if shared or permits:
            raise Unsupported(
                f"{self.name}: an SMB server has {'no semaphores' if permits else 'no shared locks'}: a file is open "
                "for one writer. Use PostgreSQL, etcd or Redis.",
                path=self.name,
            )
        if ttl is not None:
            raise Unsupported("SMB keeps a lock as long as the connection lives: leave ttl out.")
        self.address, parts = split(url, self.name)
        host, port, share, *_ = self.address
        self.path = "\\".join(parts)
        self.directory, self.file_name = "\\".join(parts[:-1]), parts[-1]
        self._share_name = f"smb://{host}:{port}/{share}"
        self.key = ("smb", host, port, share.casefold(), self.path)

    @property
    def _share(self) -> Share:
        return shares.get(self.address) or shares.setdefault(self.address, Share(self.address, self._share_name))

    def session(self, timeout: float) -> SmbSession:
        """The session of this process. At the first use of a share, the server must prove that it locks."""
        share, until = self._share, monotonic() + timeout
        session = share.session(timeout)
        if not share.is_proven:
            self._prove(session, wait.time_left(until))
            share.is_proven = True
        return session

    def on_session(self, work: Callable[[SmbSession, float], Result], timeout: float) -> Result:
        """Call `work` with the session and the deadline. If the server has ended the session, with a new one."""
        until = monotonic() + timeout
        try:
            session = self.session(timeout)
            try:
                return work(session, until)
            except ConnectionFailed:
                if session.is_open:
                    raise
            return work(self.session(wait.time_left(until)), until)
        except Refused as error:
            raise explain(self.name, error) from None
        except ConnectionFailed as error:
            raise ConnectionFailed(str(error).replace(self._share_name, self.name, 1), path=self.name) from None

    def _prove(self, session: SmbSession, timeout: float) -> None:
        name = f"{self.path}.{os.urandom(8).hex()}.probe"
        first, second = session.file(name), session.file(name)
        try:
            session.ask([smb_file.create(first)], timeout, first)
            try:
                session.ask([smb_file.open_alone(second)], timeout, second)
            except Refused as error:
                if error.status != _SHARING_VIOLATION:
                    raise
            else:
                raise Unsupported(
                    f"{self.name}: this server does not lock: it opened a file twice that one client had for itself. "
                    "Use another server, or PostgreSQL, etcd or Redis.",
                    path=self.name,
                )
        except Refused as error:
            raise explain(self.name, error) from None
        finally:
            for file in (second, first):
                _close(session, file)

    # One attempt.

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        return self.on_session(self.take, timeout)[0]

    def take(self, session: SmbSession, until: float) -> tuple[ServerGrant | Outcome, bool]:
        """One attempt. The second value: may the lock become free without an event?"""
        lock, file, grant = session.file(f"{self.path}.token"), session.file(self.path), None
        try:
            last = self._open(session, lock, until)
            if last is None or not self._create(session, file, until):
                return BUSY, True
            token = self._write_token(session, (lock, file), last, until)
            file.lock = lock
            grant = ServerGrant(self, session, file, token)
            if not session.is_open:  # it was lost before it had this grant
                session.lose()
                raise explain(self.name, ConnectionResetError("the connection was lost"))
            return grant, False
        except Refused as error:
            if error.status not in _BUSY:
                raise
            return BUSY, not self._exists(session, until)
        finally:
            if grant is None:
                _close(session, file)
                _close(session, lock)

    def _open(self, session: SmbSession, lock: Any, until: float) -> int | None:
        """Open the lock, or create it. Return the last token. None: it was deleted meanwhile."""
        calls = [smb_file.open_lock(lock), smb_file.count_names(lock), lock.read(0, _MAX_CONTENT, send=False)]
        _, names, content = session.ask(calls, wait.time_left(until), lock)
        digits = content.strip() or b"0"
        if not digits.isdigit() or len(digits) > _MAX_DIGITS:
            text = f"{self.name}.token does not hold a number, and was not changed. Check the path, or delete it."
            raise NotALockFile(text, path=self.name)
        return int(digits) if names else None

    def _create(self, session: SmbSession, file: Any, until: float) -> bool:
        """Create the file that names the holder. False: one was there again and again, which no process has open."""
        for _ in range(_MAX_ROUNDS):
            try:
                session.ask(
                    [smb_file.create(file), file.write(client_name().encode(), send=False)], wait.time_left(until), file
                )
            except Refused as error:
                if error.status != _COLLISION:
                    raise
            else:
                return True
            self._delete_left_over(session, until)
        return False

    def _delete_left_over(self, session: SmbSession, until: float) -> None:
        file = session.file(self.path)
        try:
            calls = [smb_file.open_alone(file), smb_file.count_names(file), file.read(0, _MAX_CONTENT, send=False)]
            _, names, content = session.ask(calls, wait.time_left(until), file)
            if content and not _CLIENT.fullmatch(content):
                raise NotALockFile(f"{self.name} is not a lock. It was not changed. Check the path.", path=self.name)
            if names:  # else its holder has just deleted it. Samba would delete another file of this name
                session.ask([smb_file.delete(file)], wait.time_left(until))
        except Refused as error:
            if error.status != _NOT_FOUND:
                raise
        finally:
            _close(session, file)

    def _write_token(self, session: SmbSession, files: tuple[Any, ...], last: int, until: float) -> int:
        created = max(file.creation_time for file in files).timestamp()
        token: int = max(last + 1, round(created * 1_000_000))
        session.ask([files[0].write(b"%d\n" % token, send=False)], wait.time_left(until))
        return token

    def _exists(self, session: SmbSession, until: float) -> bool:
        """Is there a file that names the holder? Its deletion is the event for the waiters."""
        try:
            self._read(session, until, alone=False)
        except Refused as error:
            return error.status == _SHARING_VIOLATION
        return True

    def forget(self) -> None:
        """Delete the last token. For a name that no process uses again."""

        def delete(session: SmbSession, until: float) -> None:
            file = session.file(f"{self.path}.token")
            session.ask([smb_file.open_alone(file)], wait.time_left(until), file)
            session.ask([smb_file.delete(file), file.close(send=False)], wait.time_left(until))

        self.on_session(delete, CALL_TIMEOUT_S)

    def release_grant(self, grant: ServerGrant) -> bool:
        session: Any = grant.lease
        try:
            session.close_files(TTL_S, grant.id.lock, grant.id)  # in this order: the deletion wakes the waiters
        except Refused:  # the server has closed the file
            return False
        except ConnectionFailed:
            if session.is_open:
                raise
            return False
        return True

    def join(self, timeout: float) -> Waiter:
        return _SmbWaiter(self, timeout)

    def status(self) -> Status:
        return self.on_session(self._status, STATUS_TIMEOUT_S)

    def _status(self, session: SmbSession, until: float) -> Status:
        """Read the file. If it can also be opened while others must not write to it, no process holds it."""
        since, content = 0.0, b""
        try:
            since, content = self._read(session, until, alone=False)
            self._read(session, until, alone=True)
        except Refused as error:
            if error.status == _SHARING_VIOLATION:
                return self.state((holder_of(content.decode(errors="replace"), False, since or None),), ())
            if error.status not in (_NOT_FOUND, _DELETE_PENDING):
                raise
        return self.state((), ())

    def _read(self, session: SmbSession, until: float, *, alone: bool) -> tuple[float, bytes]:
        """In one round trip, so that the file is not open for longer: it could not be deleted meanwhile."""
        file = session.file(self.path)
        calls = [smb_file.open_for_reading(file, alone=alone), file.read(0, _MAX_CONTENT, send=False)]
        calls.append(file.close(send=False))
        _, content, _ = session.ask(calls, wait.time_left(until), file)
        return file.creation_time.timestamp(), content


def _close(session: SmbSession, file: Any) -> None:
    """Close a file if it is open, after an error or a check."""
    if file.connected and session.is_open:
        with suppress(HoldfastError, Refused):
            session.close_files(_CLOSE_S, file)


class _SmbWaiter(Waiter):
    def __init__(self, engine: SmbEngine, timeout: float) -> None:
        self._engine = engine
        self._woken, self._wake = pipe()
        self._until = 0.0
        self._watch: DirectoryWatch = self._register(timeout)

    def _register(self, timeout: float) -> DirectoryWatch:
        engine = self._engine

        def register(session: SmbSession, until: float) -> DirectoryWatch:
            return watch(session, engine.directory, engine.file_name, self._wake, wait.time_left(until))

        return self._call(register, timeout)

    def _call(self, work: Callable[[SmbSession, float], Result], timeout: float) -> Result:
        try:
            return self._engine.on_session(work, timeout)
        except ConnectionFailed:
            if timeout < _SHORT_S:  # the time of the caller is over, not that of the server
                raise wait.DeadlinePassed from None
            raise

    def attempt(self, timeout: float) -> ServerGrant | None:
        until = monotonic() + timeout
        if wait.poll([self._woken.fd], 0):
            system.read(self._woken.fd, 4096)
        if not self._watch.session.is_open:
            self._watch.remove(self._wake)
            self._watch = self._register(timeout)
        found, soon = self._call(self._engine.take, wait.time_left(until))
        if isinstance(found, ServerGrant):
            self._watch.remove(self._wake)
            return found
        self._watch.go_on()
        self._until = monotonic() + (_POLL_S if soon or self._watch.is_ended else _LOOK_S)
        return None

    def step(self, deadline: float | None) -> wait.Step:
        return wait.Readable(self._woken.fd, wait.sooner(self._until, deadline))

    def leave(self) -> None:
        self._watch.remove(self._wake)
