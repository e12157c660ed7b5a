"""`LogEngine`: the operations of the port (`events.engine`), on a log in a directory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ... import system, wait
from ...errors import ConditionFailed, CorruptStore
from ...paths import mount_at
from ...watch import Waiting
from ..conditions import look_ahead
from ..engine import Checkpoint, Document, Engine, Options, Report
from . import about, verify
from .backup import backup
from .checkpoint import FileCheckpoint
from .commit import Committer
from .documents import Documents
from .forgetting import forget
from .view import NoSegment, View

if TYPE_CHECKING:
    from ...locks.base import StrPath
    from ..model import Query, StoredEvent
    from ..requests import Request


class LogEngine(Engine):
    def __init__(self, path: StrPath, options: Options) -> None:
        self.name = about.absolute(path)
        self.options = options
        self.id = about.open_directory(self.name, options.mode)
        self.tag = about.tag_of(self.id)
        mount = mount_at(system.stat(self.name).st_dev, self.name)
        self.view = View(self.name, self.tag, options.mode, shared=not mount.is_ours, anew=mount.reads_old)
        self.committer = Committer(self.name, self.view, self.tag, options)
        self.documents = Documents(f"{self.name}/projections", options)

    def commit(self, *requests: Request) -> None:
        if not self._look_ahead(requests):
            return
        self.committer.submit(*requests)
        for request in requests:
            if isinstance(error := request.error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                text = f"this process may not write to this event store ({error.strerror})"
                request.error = OSError(error.errno, text, self.name)
        if requests and requests[-1].error is None:
            self.view.builder.build_soon(requests[-1].position)

    def _look_ahead(self, requests: tuple[Request, ...]) -> bool:
        """Check the conditions as far as that is possible without the lock."""
        conditional = [request for request in requests if request.condition is not None]
        if not conditional:
            return True  # `submit` checks the thread
        self._check_thread()
        if not (head := self.head()):
            return True
        self.view.catch_up(head)
        for request in conditional:
            try:
                look_ahead(request, self.name, head, self.view.last_match)
            except (ConditionFailed, TypeError, AttributeError) as error:
                request.error = error
                return False
        return True

    def withdraw(self, request: Request) -> bool:
        return self.committer.queue.withdraw(request)

    def head(self) -> int:
        visible = self.committer.disk.visible()
        if visible is not None:
            return visible
        with self.view.mutex:
            try:
                self.view.advance()
            except NoSegment:
                return 0
            self._check_end()
            head = self.view.tail.head
        # A writer makes the ledger before it writes. If there is one now, what was read may not be on disk yet.
        visible = self.committer.disk.visible()
        return head if visible is None else visible

    def _check_end(self) -> None:
        """Without a ledger, only the log shows its end. The bytes behind it must not have been on disk."""
        while True:
            found = self.view.tail.first, self.view.tail.head
            try:
                self.view.tail.check_rest()
                return
            except CorruptStore:  # unless it has grown since it was read
                self.view.advance()
                if (self.view.tail.first, self.view.tail.head) == found:
                    raise

    def read(self, query: Query, after: int, head: int, *, backwards: bool, limit: int | None) -> Iterator[StoredEvent]:
        self._check_thread()
        view = self.view
        view.catch_up(head)
        if head <= after:
            return iter(())
        if query.matches_all:
            return view.stream(after, head, backwards=backwards)
        places = view.candidates(query, after, head, backwards=backwards)
        return (event for event in view.at(places) if query.matches(event))

    def wait(self, after: int, had: int, deadline: float | None) -> wait.Steps[int]:
        disk = self.committer.disk
        path = disk.ledger_path
        waiting = Waiting(path)
        watched = None
        try:
            while had <= (head := self.head()) <= after:
                wait.check_deadline(deadline)
                inode = _inode_of(path)
                if inode != watched:
                    waiting.move(path)
                    watched = inode
                if not disk.sleeps():
                    yield waiting.backoff.pause(deadline)
                    continue
                if waiting.begin() or self.head() > after:
                    continue  # registered, and said so: look once more, and only then sleep
                yield waiting.step(deadline)
                waiting.drain()
            return head
        finally:
            waiting.end()

    def _file_of(self, name: str) -> str:
        """The name of the file of a projection or a subscription."""
        file = quote(name, safe="").replace(".", "%2E")
        if not name or len(file) > 200:
            raise self._no_name(name)
        return file

    def load(self, name: str) -> Document:
        return self.documents.load(name, self._file_of(name))

    def save(self, document: Document, content: bytes) -> None:
        self.documents.save(document, content)

    def forget(self, tag: str) -> int:
        self._check_thread()
        return forget(self, tag)

    def checkpoint(self, name: str) -> Checkpoint:
        return FileCheckpoint(f"{self.name}/subscriptions/{self._file_of(name)}.json", self.tag, self.options)

    def checkpoints(self) -> list[str]:
        try:
            names = system.listdir(f"{self.name}/subscriptions")
        except FileNotFoundError:
            return []
        return sorted(unquote(name[: -len(".json")]) for name in names if name.endswith(".json"))

    def verify(self) -> Report:
        return verify.verify(self)

    def backup(self, target: str) -> int:
        return backup(self, target)

    def rebuild(self) -> None:
        self._check_thread()
        self.view.builder.rebuild(self.head())

    def _check_thread(self) -> None:
        if self.committer.is_ours:
            raise self.committer.would_deadlock()

    def close(self) -> None:
        if self.committer.is_ours:
            return  # a signal handler, while its thread appends or reads
        with self.view.mutex:
            self.view.forget()
        self.view.builder.close()
        self.committer.close()

    def begin_again(self) -> None:
        self.view.know_nothing()  # the same one: a reading that has begun goes on with it
        self.committer.begin_again()


def _inode_of(path: str) -> int | None:
    try:
        return system.stat(path).st_ino
    except FileNotFoundError:
        return None
