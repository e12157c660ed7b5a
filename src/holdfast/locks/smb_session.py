"""The sessions of this process on SMB servers: requests, and the loss of a connection. See `smb`.

smbprotocol reads the answers of a connection in a thread of its own. Requests of several threads share the connection.
A request that is not answered in time is abandoned: when its answer comes after all, the file that it opened is closed.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import uuid
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from .. import process, system
from ..errors import ConnectionFailed, HoldfastError, NotALockFile, UnsafePath, Unsupported
from ..files import OwnedFd, pipe
from ..wait import time_left
from .renewal import clock
from .server import Lease, LeaseGone, ServerGrant, unreachable, within

if TYPE_CHECKING:
    from collections.abc import Callable

    Address = tuple[str, int, str, str | None, str | None]  # host, port, share, user, password
    Call = tuple[Any, Callable[[Any], Any]]  # a message, and the function that takes its answer

try:
    from smbprotocol.connection import Connection, SMB2Echo
    from smbprotocol.exceptions import SMBException, SMBResponseException
    from smbprotocol.header import NtStatus
    from smbprotocol.open import Open
    from smbprotocol.session import Session
    from smbprotocol.tree import TreeConnect
except ImportError:
    Connection = object
    is_installed = False
else:
    is_installed = True
    logging.getLogger("smbprotocol").addHandler(logging.NullHandler())  # else a lost connection is printed

_PORT = 445
_FORBIDDEN = re.compile(r'[\\:*?"<>|\x00-\x1f]')  # in names on Windows. A colon would name a stream of a file
TTL_S = 9.0  # the keepalive of the server needs at least 9.7 s to close the files of a machine that vanished
# The server limits the number of requests without an answer (credits). Some are kept for renewals and releases.
_MAX_CALLS, _RESERVED = 8, 8
_CREDITS_S = 0.01
_MAX_RENEWED = 256
_SLICE_S = 0.5
_REMEDY = "Check the URL, and that the server runs and can be reached."
_FILE_CLOSED = {0xC0000128, 0xC0000008}  # by the administrator of the server
_SESSION_ENDED = {0xC00000C9, 0xC0000203, 0xC000035C}  # by the administrator, or because it has expired
_EXPLANATIONS: dict[int, tuple[type[HoldfastError], str, str]] = {
    0xC000006D: (ConnectionFailed, "the server refuses the login", "Check the user name and the password."),
    0xC0000022: (ConnectionFailed, "access is denied", "Give this user the right to create and delete files there."),
    0xC00000CC: (ConnectionFailed, "the server has no such share", "Check the share, the first part of the path."),
    0xC000003A: (UnsafePath, "the directory does not exist", "Create it, or check the path."),
    0xC0000103: (UnsafePath, "a part of the path is not a directory", "Check the path."),
    0xC0000033: (
        UnsafePath,
        "the server does not accept this name",
        "Choose a shorter or simpler name.",
    ),
    0xC00000BA: (NotALockFile, "it is a directory", "Check the path."),
    0xC000007F: (ConnectionFailed, "the disk of the server is full", "Delete something there."),
    **dict.fromkeys(
        (0xC000009A, 0xC000011F),
        (
            ConnectionFailed,
            "the server lets this client open no more files",
            "Release locks, or raise max open files on the server.",
        ),
    ),
    0xC00000A2: (Unsupported, "the share is read-only", "Choose a share that this user can write to."),
}


def split(url: str, name: str) -> tuple[Address, list[str]]:
    """The address of the share, and the parts of the path. `name` is the URL for messages."""
    with suppress(ValueError):  # not a host, not a port, or not UTF-8
        parts = urlsplit(url)
        share, *path = [unquote(part, errors="strict") for part in parts.path.split("/")[1:]] or [""]
        user, password = (None if text is None else unquote(text) for text in (parts.username, parts.password))
        bad = [part for part in (share, *path) if not part or part[-1] in " ." or _FORBIDDEN.search(part)]
        if path and not bad and parts.hostname and not parts.query and not parts.fragment:
            return (parts.hostname, parts.port or _PORT, share, user, password), path
    raise UnsafePath(
        f"{name}: the URL names no lock. Write smb://user:password@host:445/share/directory/name, and special "
        "characters of the password as %40 for @ or %2F for /.",
        path=name,
    )


class Refused(Exception):
    """The server has answered with an error. `status` is its NTSTATUS."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status 0x{status:08X}")
        self.status = status


def explain(name: str, error: Exception) -> HoldfastError:
    """The error to raise. It contains no text that could show the password."""
    if isinstance(error, Refused) and error.status in _EXPLANATIONS:
        kind, reason, remedy = _EXPLANATIONS[error.status]
        return kind(f"{name}: {reason}. {remedy}", path=name)
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    remedy = "Check the user name and the password." if "uthenticat" in text else _REMEDY
    return unreachable(name, text, remedy)


def _late(name: str) -> HoldfastError:
    return unreachable(name, "no answer in time", _REMEDY)


class _Socket:
    """The socket of a connection. A forked child does not keep it."""

    def __init__(self, plain: socket.socket) -> None:
        self._file = OwnedFd(plain.detach())

    def fileno(self) -> int:
        return self._file.fd

    def send(self, data: bytes) -> int:
        return system.write(self._file.fd, data)

    def recv(self, size: int) -> bytes:
        return system.read(self._file.fd, size)

    def shutdown(self, how: int) -> None:
        plain = socket.socket(fileno=self._file.fd)
        try:
            plain.shutdown(how)
        finally:
            plain.detach()

    def close(self) -> None:
        self._file.close()


class _Connection(Connection):  # type: ignore[misc]
    """A connection that tells its end: `ended` is readable then."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(uuid.uuid4(), host, port)
        self.ended, self._end = pipe()

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def _process_message_thread(self) -> None:
        transport = self.transport
        with transport._sock_lock:
            transport._sock = _Socket(transport._sock)
        try:
            super()._process_message_thread()
        finally:
            self._end.close()


class SmbSession(Lease):
    """A session on one share, with the files that it has open."""

    def __init__(self, address: Address, name: str, timeout: float) -> None:
        """name: the URL of the share without a password, for messages."""
        host, port, share, user, password = address
        sent = clock()
        process.current_registry()  # in a forked child, the hook runs before the first descriptor is opened
        connection = _Connection(host, port)
        self.connection: Any = connection

        def open_tree() -> Any:
            connection.connect(timeout=max(1, int(timeout)))
            session = Session(connection, user, password, require_encryption=False)
            session.connect()
            tree = TreeConnect(session, rf"\\{host}\{share}")
            tree.connect()
            return tree

        failed: HoldfastError | None = None
        try:
            self.tree: Any = within(timeout, open_tree, lambda _: self.close())
        except TimeoutError:
            # In a thread: it waits until the connection is there, perhaps for a name server.
            threading.Thread(target=self.close, name="holdfast-close", daemon=True).start()
            raise _late(name) from None
        except SMBResponseException as error:
            failed = explain(name, Refused(error.status))
        except (SMBException, OSError, ValueError) as error:
            failed = explain(name, error)
        if failed is not None:  # here, so that no traceback contains an error that may show the password
            self.close()
            raise failed
        super().__init__(name, TTL_S, sent)
        self._calls = threading.BoundedSemaphore(_MAX_CALLS)
        self._sending = threading.Lock()
        self._turn = 0

    @property
    def is_open(self) -> bool:
        return self.connection.is_open and not self.is_lost

    def fileno(self) -> int:
        return self.connection.ended.fd if not self.is_lost else -1

    def look(self) -> None:
        if not self.connection.is_open:
            self.lose()

    def lose(self) -> None:
        super().lose()
        self.close()  # else the files stay open if the server comes back

    def close(self) -> None:
        if self.connection.transport is not None:
            with suppress(OSError):
                self.connection.transport.close()

    # Requests.

    def file(self, path: str) -> Any:
        return Open(self.tree, path)

    def ask(self, calls: list[Call], timeout: float, file: Any = None) -> list[Any]:
        """Send requests about one file, in one round trip, and return their answers. Raises Refused.

        file: is opened by the first request. It is closed if the answer comes too late
        """
        sent, until = clock(), monotonic() + timeout
        if not self._calls.acquire(timeout=timeout):
            raise self._silent(timeout)
        try:
            requests = self.send([message for message, _ in calls], related=True, until=until)
            answers = self._answers(calls, requests, sent, timeout, file)
        finally:
            self._calls.release()
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer
        return answers

    def close_files(self, timeout: float, *files: Any) -> None:
        """Close files, one after the other. If no answer comes in time, the server closes them later.

        Raises Refused if one of them is not open.
        """
        for answer in self._ask([file.close(send=False) for file in files], timeout):
            if isinstance(answer, Refused):
                raise answer

    def _ask(self, calls: list[Call], timeout: float) -> list[Any]:
        """Send requests that are not about one file."""
        sent = clock()
        return self._answers(calls, self.send([message for message, _ in calls]), sent, timeout)

    def _answers(
        self, calls: list[Call], requests: list[Any], sent: float, timeout: float, file: Any = None
    ) -> list[Any]:
        """The answers, and the errors of requests that failed."""
        until = monotonic() + timeout - (clock() - sent)
        for request in requests:
            if not self._wait(request, until):
                threading.Thread(
                    target=self._abandon, args=(calls, requests, file), name="holdfast-smb", daemon=True
                ).start()
                raise self._silent(timeout)
        answers = self._receive(calls, requests)
        for answer in answers:
            if isinstance(answer, Refused) and answer.status in _SESSION_ENDED:
                raise self._broken(SMBException("the server has ended the session"))
        self.answered(sent)
        return answers

    def send(self, messages: list[Any], *, related: bool = False, until: float | None = None) -> list[Any]:
        """until: wait for credits until then, and leave some for renewals and releases."""
        needed = len(messages) + (0 if until is None else _RESERVED)
        tree, window = self.tree, self.connection.sequence_window
        while self.connection.is_open:
            with self._sending:
                if window["high"] - window["low"] >= needed:
                    return self._send(messages, tree.session.session_id, tree.tree_connect_id, related=related)
            if until is None or monotonic() >= until:
                raise unreachable(self.server, "too many requests have no answer", _REMEDY)
            sleep(_CREDITS_S)
        raise self._broken(SMBException("the server has closed the connection"))

    def _send(self, *arguments: Any, related: bool) -> list[Any]:
        try:
            return self.connection.send_compound(*arguments, related=related)  # type: ignore[no-any-return]
        except (SMBException, OSError) as error:
            raise self._broken(error) from None

    def _wait(self, request: Any, until: float) -> bool:
        """Wait for the answer. False: it has not come in time. At the end of the connection there is none."""
        while self.connection.is_open:
            left = until - monotonic()
            if request.response_event.wait(max(0.0, min(left, _SLICE_S))):
                with request.response_event_lock:
                    response = request.response
                    if response is None or response["status"].get_value() != NtStatus.STATUS_PENDING:
                        break
                    request.response_event.clear()
            elif left <= 0:
                return False
        return True

    def _receive(self, calls: list[Call], requests: list[Any]) -> list[Any]:
        answers: list[Any] = []
        try:
            for (_, receive), request in zip(calls, requests, strict=True):
                try:
                    if request.response is None:
                        raise SMBException("the server has closed the connection")
                    answers.append(receive(request))
                except SMBResponseException as error:
                    answers.append(b"" if error.status == NtStatus.STATUS_END_OF_FILE else Refused(error.status))
        except (SMBException, OSError, ValueError) as error:
            raise self._broken(error) from None
        return answers

    def _abandon(self, calls: list[Call], requests: list[Any], file: Any) -> None:
        with suppress(HoldfastError, Refused):
            for request in requests:
                self._wait(request, float("inf"))
            self._receive(calls, requests)
            if file is not None and file.connected:
                self.close_files(TTL_S, file)

    def _silent(self, timeout: float) -> HoldfastError:
        if timeout >= 1 and not self.grants:
            self.lose()  # the next attempt begins with a new connection
        return _late(self.server)

    def _broken(self, error: Exception) -> HoldfastError:
        self.lose()
        return explain(self.server, error)

    # The lease.

    def renew(self, timeout: float) -> list[ServerGrant]:
        """Read a byte of each open file. Of more than 256 files, each renewal reads some."""
        if not self.is_open:
            raise LeaseGone
        everything = self.held()
        start = self._turn % len(everything) if len(everything) > _MAX_RENEWED else 0
        self._turn += _MAX_RENEWED
        grants = everything[start : start + _MAX_RENEWED]
        gone = []
        try:
            if not grants:
                self._ask([(SMB2Echo(), self.connection.receive)], timeout)
            for at in range(0, len(grants), _MAX_CALLS):
                some = grants[at : at + _MAX_CALLS]
                calls = [grant.id.read(0, 1, send=False) for grant in some]
                for grant, answer in zip(some, self._ask(calls, timeout), strict=True):
                    if isinstance(answer, Refused) and answer.status in _FILE_CLOSED:
                        gone.append(grant)
        except ConnectionFailed:
            if not self.is_open:
                raise LeaseGone from None
            raise
        return [grant for grant in gone if id(grant) in self.grants]  # not those that were released meanwhile


class Share:
    """The session of this process on one share. Another one is opened when it is lost."""

    def __init__(self, address: Address, name: str) -> None:
        self._address, self._name = address, name
        self._opening = threading.Lock()
        self._session: SmbSession | None = None
        self.is_proven = False  # does the server lock?

    def session(self, timeout: float) -> SmbSession:
        found = self._session
        if found is not None and found.is_open:
            return found
        until = monotonic() + timeout
        if not self._opening.acquire(timeout=timeout):
            raise _late(self._name)
        try:
            found = self._session
            if found is None or not found.is_open:
                found = self._session = SmbSession(self._address, self._name, time_left(until))
            return found
        finally:
            self._opening.release()


shares: dict[Address, Share] = {}
process.after_fork_in_child(shares.clear)
