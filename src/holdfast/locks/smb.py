"""Locks on an SMB server: a file that is open. The server refuses to open it a second time.

    smb://user:password@host:445/share/directory/name

    name            the lock. Its holder has it open for writing and deleting, and lets others only read it. It contains
                    `pid@host`. The server deletes it when it is closed, by its holder or by the end of the connection
    name.token      the last token. It stays

`token`: SMB has no counter, and the times of new files are too coarse: two holders in one tick of the server's kernel
(4 ms) would have the same time. So the holder reads the last token from `name.token` and writes the next one: one more,
or the time of its file on the server in microseconds, if that is greater. If the file was deleted, tokens still grow
with the clock of the server. This costs two round trips.

A file that is left over from a crash of the server is not open. The next process that acquires the lock opens it alone,
checks that its content is `pid@host`, and deletes it. Any other content is refused with NotALockFile.

Waiters are told by the server when the file is deleted (CHANGE_NOTIFY), and try again. The server does not order them.

Loss: the end of the connection is noticed at once. The open files are read every 3 seconds. If the server does not
answer for `TTL_S` seconds, the holder calls its locks lost. The server must not be faster, and should not be much
slower: Samba closes the files of a machine that has vanished after 9.7 s with these options in smb.conf, and after two
hours without them:

    socket options = TCP_NODELAY SO_KEEPALIVE TCP_KEEPIDLE=5 TCP_KEEPINTVL=2 TCP_KEEPCNT=3

Not every server locks. The first use of a share opens a private file twice, and refuses the share if that succeeds.
A program on the server itself, which does not use SMB, is not excluded. smbprotocol was chosen because it needs no
mount and no root, and can keep a file open with a share mode. It is the only SMB 3 client for Python that can watch a
directory. It cannot use descriptors above 1023.
"""

from __future__ import annotations

import os
import re
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from .. import system, wait
from ..errors import ConnectionFailed, HoldfastError, NotALockFile, UnsafePath, Unsupported
from ..files import pipe
from . import smb_file, smb_session
from .engine import BUSY, Outcome
from .server import ServerEngine, ServerGrant, Waiter, client_name, holder_of, without_password
from .smb_session import TTL_S, Refused, Share, SmbSession, explain, shares
from .smb_watch import DirectoryWatch, watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..status import Status

    Result = TypeVar("Result")

_PORT = 445
_LOOK_S = 5.0  # until a waiter tries again without an event
_POLL_S = 0.1  # the same, on a server that reports no changes, and for a file that is about to be deleted
_MAX_ROUNDS = 5  # of an attempt that finds files without a holder
_MAX_CONTENT = 1024
_CLIENT = re.compile(rb"\d+@[^\0\r\n]*")  # the content of a lock
_FORBIDDEN = re.compile(r'[\\:*?"<>|\x00-\x1f]')  # in names on Windows. A colon would name a stream of a file
_NOT_FOUND, _COLLISION = 0xC0000034, 0xC0000035
_SHARING_VIOLATION, _DELETE_PENDING = 0xC0000043, 0xC0000056
_BUSY = (_SHARING_VIOLATION, _DELETE_PENDING)


class SmbEngine(ServerEngine):
    """The lock of one path on one share."""

    shared = False

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        if not smb_session.is_installed:
            raise Unsupported("SMB needs smbprotocol, which is not installed. Run: pip install 'holdfast[smb]'")
        super().__init__(without_password(url), "smb")
        if shared or permits:
            raise Unsupported(
                f"{self.name}: an SMB server has {'no semaphores' if permits else 'no shared locks'}: a file is open "
                "for one writer. Use PostgreSQL, etcd or Redis.",
                path=self.name,
            )
        if ttl is not None:
            raise Unsupported("SMB keeps a lock as long as the connection lives: leave ttl out.")
        host, port, user, password, share, *parts = self._split(url)
        self.path = "\\".join(parts)
        self.directory, self.file_name = "\\".join(parts[:-1]), parts[-1]
        self.address = (host, port, share, user, password)
        self._share_name = f"smb://{host}:{port}/{share}"
        self.key = ("smb", host, port, share.casefold(), self.path)

    def _split(self, url: str) -> Any:
        """The host, the port, the user, the password, the share, and the parts of the path."""
        parts = urlsplit(url)
        try:
            port = parts.port or _PORT
            names = [unquote(name, errors="strict") for name in parts.path.split("/")[1:]]
        except ValueError:  # not a port, or not UTF-8
            names = []
        bad = [name for name in names if name in ("", ".", "..") or _FORBIDDEN.search(name) or name[-1] in " ."]
        if len(names) < 2 or bad or not parts.hostname or parts.query or parts.fragment:
            raise UnsafePath(
                f"{self.name}: the URL names no lock. Write smb://user:password@host:445/share/directory/name. Write "
                "special characters of the password as %40 for @ or %2F for /.",
                path=self.name,
            )
        user, password = (None if text is None else unquote(text) for text in (parts.username, parts.password))
        return (parts.hostname, port, user, password, *names)

    @property
    def _share(self) -> Share:
        return shares.get(self.address) or shares.setdefault(self.address, Share(self.address, self._share_name))

    def session(self, timeout: float) -> SmbSession:
        """The session of this process. At the first use of a share, the server must prove that it locks."""
        share, until = self._share, monotonic() + timeout
        try:
            session = share.session(timeout)
        except HoldfastError as error:
            raise type(error)(str(error).replace(self._share_name, self.name, 1), path=self.name) from None
        if not share.is_proven:
            self._prove(session, max(0.001, until - monotonic()))
            share.is_proven = True
        return session

    def on_session(self, work: Callable[[SmbSession, float], Result], timeout: float) -> Result:
        """Call `work` with the session and the deadline. If the server has ended the session, with a new one."""
        until = monotonic() + timeout
        session = self.session(timeout)
        try:
            try:
                return work(session, until)
            except ConnectionFailed:
                if session.is_open:
                    raise
            return work(self.session(max(0.001, until - monotonic())), until)
        except Refused as error:
            raise explain(self.name, error) from None

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
        return self.take(timeout)[0]

    def take(self, timeout: float) -> tuple[ServerGrant | Outcome, bool]:
        """One attempt. The second value: will a deletion of the file follow that causes no event?"""
        return self.on_session(self._take, timeout)

    def _take(self, session: SmbSession, until: float) -> tuple[ServerGrant | Outcome, bool]:
        for _ in range(_MAX_ROUNDS):
            file = session.file(self.path)
            write = file.write(client_name().encode(), send=False)
            try:
                session.ask([smb_file.create(file), write], max(0.001, until - monotonic()), file)
                return ServerGrant(self, session, file, self._next_token(session, file, until)), False
            except BaseException as error:
                _close(session, file)
                status = error.status if isinstance(error, Refused) else 0
                if status in _BUSY:
                    return BUSY, status == _DELETE_PENDING
                if status != _COLLISION:
                    raise
            if not self._delete_left_over(session, until):
                return BUSY, False
        return BUSY, True

    def _delete_left_over(self, session: SmbSession, until: float) -> bool:
        """Delete a lock that no process holds. False: a process holds it."""
        file = session.file(self.path)
        try:
            calls = [smb_file.open_alone(file), file.read(0, _MAX_CONTENT, send=False)]
            _, content = session.ask(calls, max(0.001, until - monotonic()), file)
            if content and not _CLIENT.fullmatch(content):
                raise NotALockFile(f"{self.name} is not a lock. It was not changed. Check the path.", path=self.name)
            session.ask([smb_file.delete(file)], max(0.001, until - monotonic()))
        except Refused as error:
            if error.status in _BUSY:
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
            last = int(content) if content.strip().isdigit() else 0
            token: int = max(last + 1, round(lock.creation_time.timestamp() * 1_000_000))
            calls = [file.write(b"%d\n" % token, send=False), file.close(send=False)]
            session.ask(calls, max(0.001, until - monotonic()))
        except BaseException:
            _close(session, file)
            raise
        return token

    def release_grant(self, grant: ServerGrant) -> bool:
        session: Any = grant.lease
        try:
            session.ask([grant.id.close(send=False)], TTL_S)
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
        return self.on_session(self._status, TTL_S)

    def _status(self, session: SmbSession, until: float) -> Status:
        """Read the file. If it can also be opened while others must not write to it, no process holds it."""
        try:
            since, content = self._read(session, until, alone=False)
            self._read(session, until, alone=True)
        except Refused as error:
            if error.status == _SHARING_VIOLATION:
                return self.state((holder_of(content.decode(errors="replace"), False, since),), ())
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
        try:
            session.ask([file.close(send=False)], TTL_S)
        except (HoldfastError, Refused):
            pass


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

        return engine.on_session(register, timeout)

    def attempt(self, timeout: float) -> ServerGrant | None:
        until = monotonic() + timeout
        if wait.poll([self._woken.fd], 0):
            system.read(self._woken.fd, 4096)
        if not self._watch.session.is_open:
            self._watch.remove(self._wake)
            self._watch = self._register(timeout)
        found, soon = self._engine.take(max(0.001, until - monotonic()))
        if isinstance(found, ServerGrant):
            self._watch.remove(self._wake)
            return found
        self._until = monotonic() + (_POLL_S if soon or self._watch.is_ended else _LOOK_S)
        return None

    def step(self, deadline: float | None) -> wait.Step:
        return wait.Readable(self._woken.fd, wait.sooner(self._until, deadline))

    def leave(self) -> None:
        self._watch.remove(self._wake)
