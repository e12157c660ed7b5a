"""Locks on an SMB server: a file that is open. The server refuses to open it a second time.

    smb://user:password@host:445/share/directory/name

    name            the lock. Its holder has it open for writing and deleting, and lets others only read it. It contains
                    `pid@host`. The server deletes it when it is closed, by its holder or by the end of the connection
    name.token      the last token. It stays

The holder reads the last token from `name.token`, and writes the next one. That is one more, or the time of its file in
microseconds if that is greater. So tokens grow even if `name.token` was deleted. The time alone is not enough: its
resolution is a tick of the server's kernel (4 ms), and several holders fit into that. This costs two round trips.

A server that crashes leaves the file behind, but not open. The next process that acquires the lock opens it alone,
checks that it contains `pid@host`, and deletes it. Any other content is refused with NotALockFile.

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
from ..owner import without_passwords
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
_MAX_ROUNDS = 5  # of an attempt that finds files without a holder
_CLOSE_S = 0.5  # short: a caller whose timeout has passed waits for it, too
_SHORT_S = 1.0  # a server that does not answer within a shorter time may be well
_MAX_CONTENT, _MAX_DIGITS = 1024, 18
_CLIENT = re.compile(rb"\d+@[^\0\r\n]*")  # the content of a lock
_NOT_FOUND, _COLLISION = 0xC0000034, 0xC0000035
_SHARING_VIOLATION, _DELETE_PENDING = 0xC0000043, 0xC0000056


class SmbEngine(ServerEngine):
    """The lock of one path on one share."""

    shared = False

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        if not smb_session.is_installed:
            raise Unsupported("SMB needs smbprotocol, which is not installed. Run: pip install 'holdfast[smb]'")
        super().__init__(without_passwords(url), "smb")
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
            self._prove(session, max(0.001, until - monotonic()))
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
            return work(self.session(max(0.001, until - monotonic())), until)
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
        """One attempt. The second value: will a deletion of the file follow that causes no event?"""
        for _ in range(_MAX_ROUNDS):
            file = session.file(self.path)
            write = file.write(client_name().encode(), send=False)
            try:
                session.ask([smb_file.create(file), write], max(0.001, until - monotonic()), file)
                grant = ServerGrant(self, session, file, self._next_token(session, file, until))
                if not session.is_open:  # it was lost before it had this grant
                    session.lose()
                    raise explain(self.name, ConnectionResetError("the connection was lost"))
                return grant, False
            except BaseException as error:
                _close(session, file)
                status = error.status if isinstance(error, Refused) else 0
                if status in (_SHARING_VIOLATION, _DELETE_PENDING):
                    return BUSY, status == _DELETE_PENDING
                if status != _COLLISION:
                    raise
            if not self._delete_left_over(session, until):
                return BUSY, False
        return BUSY, True

    def _delete_left_over(self, session: SmbSession, until: float) -> bool:
        """Delete a lock that no process holds. False: a process holds it.

        Samba can open a file while its holder deletes it. Deleting it again, Samba would delete the file of the next
        holder, which has the same name. So the file must still have a name, and no other client can delete it now.
        """
        file = session.file(self.path)
        try:
            calls = [smb_file.open_alone(file), smb_file.count_names(file), file.read(0, _MAX_CONTENT, send=False)]
            _, names, content = session.ask(calls, max(0.001, until - monotonic()), file)
            if not names:
                return True
            if content and not _CLIENT.fullmatch(content):
                raise NotALockFile(f"{self.name} is not a lock. It was not changed. Check the path.", path=self.name)
            session.ask([smb_file.delete(file)], max(0.001, until - monotonic()))
        except Refused as error:
            if error.status in (_SHARING_VIOLATION, _DELETE_PENDING):
                return False
            if error.status != _NOT_FOUND:
                raise
        finally:
            _close(session, file)
        return True

    def _next_token(self, session: SmbSession, lock: Any, until: float) -> int:
        """Read the last token, and write the next one. The caller holds the lock."""
        file = session.file(f"{self.path}.token")
        try:
            calls = [smb_file.open_for_writing(file), file.read(0, 32, send=False)]
            _, content = session.ask(calls, max(0.001, until - monotonic()), file)
            digits = content.strip() or b"0"
            if not digits.isdigit() or len(digits) > _MAX_DIGITS:
                text = f"{self.name}.token does not hold a number, and was not changed. Check the path, or delete it."
                raise NotALockFile(text, path=self.name)
            token: int = max(int(digits) + 1, round(lock.creation_time.timestamp() * 1_000_000))
            calls = [file.write(b"%d\n" % token, send=False), file.close(send=False)]
            session.ask(calls, max(0.001, until - monotonic()))
        except BaseException:
            _close(session, file)
            raise
        return token

    def forget(self) -> None:
        """Delete the last token. For a name that no process uses again."""

        def delete(session: SmbSession, until: float) -> None:
            file = session.file(f"{self.path}.token")
            session.ask([smb_file.open_alone(file)], max(0.001, until - monotonic()), file)
            session.ask([smb_file.delete(file), file.close(send=False)], max(0.001, until - monotonic()))

        self.on_session(delete, CALL_TIMEOUT_S)

    def release_grant(self, grant: ServerGrant) -> bool:
        session: Any = grant.lease
        try:
            session.close_file(grant.id, TTL_S)
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
        _, content, _ = session.ask(calls, max(0.001, until - monotonic()), file)
        return file.creation_time.timestamp(), content


def _close(session: SmbSession, file: Any) -> None:
    """Close a file if it is open, after an error or a check."""
    if file.connected and session.is_open:
        with suppress(HoldfastError, Refused):
            session.close_file(file, _CLOSE_S)


class _SmbWaiter(Waiter):
    def __init__(self, engine: SmbEngine, timeout: float) -> None:
        self._engine = engine
        self._woken, self._wake = pipe()
        self._until = 0.0
        self._watch: DirectoryWatch = self._register(timeout)

    def _register(self, timeout: float) -> DirectoryWatch:
        engine = self._engine

        def register(session: SmbSession, until: float) -> DirectoryWatch:
            return watch(session, engine.directory, engine.file_name, self._wake, max(0.001, until - monotonic()))

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
        found, soon = self._call(self._engine.take, max(0.001, until - monotonic()))
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
