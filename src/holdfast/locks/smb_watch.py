"""Changes of directories on SMB servers, which wake the waiters of locks. See `smb`."""

from __future__ import annotations

import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from .. import process, system
from ..errors import HoldfastError
from ..wait import time_left
from . import smb_file
from .server import STATUS_TIMEOUT_S
from .smb_session import Refused, SmbSession

if TYPE_CHECKING:
    from ..files import OwnedFd

with suppress(ImportError):  # `SmbEngine` names the remedy
    from smbprotocol.change_notify import (
        ChangeNotifyFlags,
        CompletionFilter,
        FileAction,
        FileNotifyInformation,
        SMB2ChangeNotifyRequest,
        SMB2ChangeNotifyResponse,
    )
    from smbprotocol.exceptions import NotifyEnumDir, SMBException

_mutex = threading.Lock()
_watches: dict[tuple[SmbSession, str], DirectoryWatch] = {}


def watch(session: SmbSession, directory: str, name: str, pipe: OwnedFd, timeout: float) -> DirectoryWatch:
    """Write a byte into the pipe when the file of this name was deleted. The waiters of a directory share a watch."""
    until = monotonic() + timeout
    key = session, directory
    with _mutex:
        found = _watches.get(key)
        if found is None or found.is_ended:
            found = _watches[key] = DirectoryWatch(key)
        found.pipes[pipe] = name.casefold()
    try:
        found.begin(time_left(until))
    except BaseException:
        found.remove(pipe)
        raise
    found.go_on()
    return found


def _reset() -> None:
    global _mutex
    _mutex = threading.Lock()
    _watches.clear()


process.after_fork_in_child(_reset)


class DirectoryWatch:
    """Writes a byte into the pipe of each waiter whose file was deleted, and into all of them when it ends.

    The server keeps the changes between two requests, so that none is missed. When all waiters are awake, the next
    request is sent after one of them has found the lock busy. So the one that acquires it does not pay for a request.
    """

    def __init__(self, key: tuple[SmbSession, str]) -> None:
        self._key = key
        self.session, directory = key
        self.pipes: dict[OwnedFd, str] = {}
        self.is_ended = False
        self._is_begun = self._is_closed = False
        self._is_idle = False  # has the thread sent no request, because all waiters are awake?
        self._is_needed = threading.Event()
        self._beginning = threading.Lock()
        self._file = self.session.file(directory)

    def begin(self, timeout: float) -> None:
        """Return when the server watches the directory."""
        with self._beginning:
            if self._is_begun:
                return
            self.session.ask([smb_file.open_directory(self._file)], timeout, self._file)
            request = self._send()
            request.response_event.wait(timeout)
            self._is_begun = True
        threading.Thread(target=self._run, args=(request,), name="holdfast-smb", daemon=True).start()

    def _send(self) -> Any:
        message = SMB2ChangeNotifyRequest()
        message["flags"] = ChangeNotifyFlags.NONE
        message["output_buffer_length"] = 4096
        message["file_id"] = self._file.file_id
        message["completion_filter"] = CompletionFilter.FILE_NOTIFY_CHANGE_FILE_NAME
        return self.session.send([message])[0]

    def _run(self, request: Any) -> None:
        try:
            while True:
                try:
                    names = _deleted(self.session.connection.receive(request)["data"].get_value())
                except NotifyEnumDir:  # there were too many changes
                    names = None
                if not self._goes_on_after(names):
                    return
                request = self._send()
        except (SMBException, HoldfastError, OSError, TypeError):
            pass  # closed, refused, or the connection has ended
        finally:
            self.is_ended = True
            self._wake(None)

    def _goes_on_after(self, names: set[str] | None) -> bool:
        """Wake waiters. Wait until one of them goes on waiting, or all have left."""
        self._wake(names)
        if self._is_idle:
            self._is_needed.wait()
        with _mutex:
            was_idle, self._is_idle = self._is_idle, False
        if self._is_closed and was_idle:
            self._close()
        return not self._is_closed

    def _wake(self, names: set[str] | None) -> None:
        """names: of the deleted files. None: any."""
        with _mutex:
            woken = [pipe for pipe, name in self.pipes.items() if names is None or name in names]
            if woken and len(woken) == len(self.pipes):
                self._is_idle = True
                self._is_needed.clear()  # before a waiter can set it
            for pipe in woken:
                with suppress(OSError):
                    system.write(pipe.fd, b"!")

    def go_on(self) -> None:
        """A waiter goes on waiting."""
        self._is_needed.set()

    def remove(self, pipe: OwnedFd) -> None:
        """A waiter leaves. The last one ends the watch. If the thread is idle, the waiter need not wait for that."""
        with _mutex:
            if self.pipes.pop(pipe, None) is None or self.pipes:
                return
            if _watches.get(self._key) is self:
                del _watches[self._key]
            self._is_closed = True
            self._is_needed.set()
            if self._is_idle:
                return
        self._close()

    def _close(self) -> None:
        if self._file.connected and self.session.is_open:
            with suppress(HoldfastError, Refused):
                self.session.close_files(STATUS_TIMEOUT_S, self._file)  # the timeout of the waiter has passed


def _deleted(answer: bytes) -> set[str]:
    """The names, in lower case, of files that are not in the directory any more."""
    response = SMB2ChangeNotifyResponse()
    response.unpack(answer)
    rest, names = response["buffer"].get_value(), set()
    while rest:
        entry = FileNotifyInformation()
        entry.unpack(rest)
        if entry["action"].get_value() in (FileAction.FILE_ACTION_REMOVED, FileAction.FILE_ACTION_RENAMED_OLD_NAME):
            names.add(entry["file_name"].get_value().casefold())
        following = entry["next_entry_offset"].get_value()
        rest = rest[following:] if following else b""
    return names
