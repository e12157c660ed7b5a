"""Appending: under the store's lock, for all requests that wait in this process.

    the queue     threads wait for each other in memory, and one does the work of all (`requests`)
    the lock      repair what a crash left, check each condition, write all of it in one go, unlock
    the disk      once for all of them, without the lock (`disk`). Meanwhile other processes write, and whose sync began
                  after our write covers us

Each request gets its own answer. A write that fails is undone before the lock is released.
"""

from __future__ import annotations

from time import monotonic, sleep

from ... import system, wait
from ...errors import LockLost, Timeout
from ...locks.engine import BUSY, QUEUED, Outcome
from ..conditions import admit
from ..requests import Group, GroupCommit, Request
from . import lines, segments
from .disk import Disk, Written
from .store_lock import StoreLock
from .view import NoSegment, View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...locks.hold import Hold
    from ...locks.path_lock import OpenFile
    from ..draft import Draft
    from ..engine import Options
    from .segments import Tail

_SOON, _A_MOMENT = 0.05, 0.000_02  # seconds. With 0.005, 16 writers append half as fast


class Work(Group, Written):
    """The requests that were taken, and what was written for them."""

    lock_file: OpenFile | None = None  # the store's lock, as `StoreLock.take` returned it


class Committer(GroupCommit):
    """Appends for all threads of a process."""

    def __init__(self, root: str, view: View, store: bytes, options: Options) -> None:
        GroupCommit.__init__(self, root)
        self.view = view
        self.durable = options.durable
        self.lock = StoreLock(f"{root}/.store.lock", timeout=options.lock_timeout, mode=options.mode)
        self.disk = Disk(root, view, store, self.lock, durable=options.durable, mode=options.mode)
        self.segment_size = options.segment_size
        self._store = store
        self._mode = options.mode

    def close(self) -> None:
        self.disk.forget()
        self.lock.close()

    def begin_again(self) -> None:
        GroupCommit.begin_again(self)
        self.close()

    @property
    def is_ours(self) -> bool:
        return self.view.is_ours or super().is_ours

    def _new_group(self) -> Work:
        return Work()

    def _append(self, work: Work, request: Request) -> None:  # type: ignore[override]
        hold = None
        try:
            work.lock_file = self.lock.take()
            if work.lock_file is None:
                hold = self._acquire(request)
                if hold is None:
                    return
            if self.queue.take(request, work):
                with self.view.mutex:
                    self._write(work)
        finally:
            if work.lock_file is not None or hold is not None:
                self._release(work, hold)
        self.disk.sync(work)
        work.is_done = True
        if work.is_lost and work.tail is not None and not work.tail.says(work.text, work.start):
            raise LockLost(
                f"{self.lock.path}: the lock was lost, and another process wrote meanwhile", path=self.lock.path
            )

    def _release(self, work: Work, hold: Hold | None) -> None:
        """If it goes wrong, what is written is written."""
        try:
            if hold is not None:
                hold.release()
            elif work.lock_file is not None:
                self.lock.give_back(work.lock_file)
        except (LockLost, OSError) as error:
            import logging

            work.is_lost = True
            logging.getLogger("holdfast").warning("%s", error)

    def _interrupted(self, work: Work, request: Request, error: BaseException) -> None:  # type: ignore[override]
        if work.lock_file is not None:
            work.lock_file.close()
        if work.ledger is not None:
            work.ledger.end_turn()
        with self.view.mutex:
            self.view.forget()
        if work.head:
            try:
                self.disk.sync(work)
            except Exception as failure:
                for one in work.taken:
                    one.error = one.error or failure
            except BaseException:  # again
                self.disk.sync(work)
            work.is_done = True
            return
        self.queue.put_back(request, work)
        request.error = request.error or error

    def _acquire(self, request: Request) -> Hold | None:
        """Wait for the lock. None: the request was withdrawn meanwhile."""
        hold = self._acquire_soon()
        if hold is not None or not request.leads:
            return hold
        # With a deadline, if need be an infinite one, the wait does not block in the kernel and can be stopped.
        left = float("inf") if request.deadline is None else max(0.0, request.deadline - monotonic())
        try:
            return wait.drive(self.lock._steps(BUSY, left), stop=lambda: not request.leads)
        except wait.Stopped:
            return None
        except Timeout as error:
            raise self._timed_out(error) from None

    def _timed_out(self, error: Timeout) -> Timeout:
        who = error.status.explain() if error.status is not None else "another process holds it"
        said = Timeout(
            f"{self.lock.path}: not acquired within {self.lock.timeout or 0:g} s: {who}. Nothing was appended. Pass a "
            "longer lock_timeout (--lock-timeout).",
            path=self.lock.path,
        )
        said.status = error.status
        return said

    def _acquire_soon(self) -> Hold | None:
        """Try for a moment: others hold the lock for some microseconds, and to queue for it takes longer than that.

        Waiters in the queue come first: a queue ends this, and every now and then a process that did not get the lock
        begins one.
        """
        deadline = monotonic() + _SOON
        while True:
            found = self.lock.attempt()
            if not isinstance(found, Outcome):
                return found
            if found is QUEUED or monotonic() > deadline:
                return None
            sleep(_A_MOMENT)

    # Under the lock.

    def _write(self, work: Work) -> None:
        tail, head, end = self._find_end(work)
        drafts, texts = self._decide(work, head)
        if texts:
            ledger = work.ledger
            spoilt = ledger is not None and ledger.is_spoilt
            if end and (spoilt or end + sum(map(len, texts)) > self.segment_size):
                self._roll(work, tail, head, end)
                tail, end = self.view.tail, 0
            elif spoilt:
                tail = self._make_anew(work, tail)
            if self.disk.named != tail.first:
                self.disk.sync_names(tail)
            self._write_texts(work, tail, drafts, texts, head, end)
        else:
            work.tail, work.head = tail, head
            if work.ledger is not None:
                work.epoch = work.ledger.epoch
                work.ledger.note_written(head, tail.first, end)

    def _write_texts(
        self, work: Work, tail: Tail, drafts: list[Draft], texts: list[bytes], head: int, begin: int
    ) -> None:
        """Write all of it, visibly for other writers, or nothing, also after an interrupt."""
        ledger, last = work.ledger, head + len(drafts)
        try:
            end = tail.write(drafts, texts, begin, room=self.disk.has_ledger)
            work.tail, work.text, work.start = tail, texts[-1], end - len(texts[-1])
            if ledger is not None:
                work.epoch = ledger.epoch
                ledger.note_written(last, tail.first, end)
                if not self.durable:
                    ledger.release(last)
            work.head = last  # as the last step: from here on it is to be synced
        except BaseException:
            try:
                self._undo(work, tail, last, head, begin)
            except BaseException:
                self._undo(work, tail, last, head, begin)
                raise
            raise
        if ledger is None:  # also with `durable=False`: other machines see only what is on the server
            self.disk.sync_or_undo(work, head)

    def _undo(self, work: Work, tail: Tail, last: int, head: int, begin: int) -> None:
        ledger = work.ledger
        if ledger is not None and ledger.end[0] == last:  # too late: another process may be syncing it
            if not self.durable:
                ledger.release(last)
            work.head = last
        elif not work.head:
            self.view.forget()
            if ledger is not None:
                ledger.note_written(head, tail.first, begin)
            tail.cut(begin)

    def _find_end(self, work: Work) -> tuple[Tail, int, int]:
        """The last segment, the last event in the log, and where it ends.

        If ledger and log agree, no writer died, and the events of other writers need not be read. For a condition they
        are read.
        """
        ledger = work.ledger = self.disk.usable_ledger()
        if ledger is not None:
            head, end, segment = ledger.end
            if end:
                # A condition is compared with all that came since: then no segment is skipped.
                needs_all = any(request.condition is not None for request in work.taken)
                tail = self.view.tail_in(segment, skip=not needs_all)
                if tail.first == segment and tail.ends_at(end) and (tail.head == head or not needs_all):
                    return tail, head, end
        tail = self._catch_up(work)
        return tail, tail.head, tail.end

    def _catch_up(self, work: Work) -> Tail:
        """Read the log to its end, and remove the part of an append that a crash left."""
        ledger = work.ledger
        if ledger is not None and ledger.pending:
            self.disk.finish_cut(ledger)
        safe = ledger.known if ledger is not None else self.disk.safe_before
        try:
            rest = self.view.advance()
        except NoSegment:
            if safe:
                raise
            segments.make_segment(self.view.events, 1, self._mode, durable=self.durable)
            rest = self.view.advance()
        tail = self.view.tail
        if safe > tail.head:
            raise tail.damaged(f"event {tail.head + 1} is damaged or missing; it had been there")
        if tail.repair(rest, safe, thorough=not self.disk.looked) and self.durable:
            system.fdatasync(tail.fd)
        if ledger is None and self.disk.has_ledger:
            work.ledger = self.disk.make_ledger(tail, tail.head)
        self.disk.looked = True
        return tail

    def _decide(self, work: Work, before: int) -> tuple[list[Draft], list[bytes]]:
        """The events to write, and their lines."""
        drafts: list[Draft] = []
        texts: list[bytes] = []
        now = lines.now()
        safe = work.ledger.synced if work.ledger is not None else before
        for request in admit(work.taken, self.name, before, self.view.last_match):
            if request.drafts:
                first = before + len(drafts) + 1
                texts += lines.compose(request.drafts, first, safe, self._store, now)
                drafts += request.drafts
        return drafts, texts

    def _make_anew(self, work: Work, tail: Tail) -> Tail:
        """Replace a segment by an empty one. Processes that have the old one open see that it was removed."""
        segments.make_segment(self.view.events, tail.first, self._mode, durable=self.durable, anew=True)
        if work.ledger is not None:
            work.ledger.note_made_anew()
        self.view.forget()
        return self.view.tail

    def begin_segment(self) -> None:
        """Begin a new segment, so that the others do not grow any more."""
        work = Work()
        with self.lock.acquire(), self.view.mutex:
            try:
                tail, head, end = self._find_end(work)
                if end:
                    self._roll(work, tail, head, end)
            except BaseException:
                self.view.forget()
                raise

    def _roll(self, work: Work, tail: Tail, head: int, end: int) -> None:
        """Begin a new segment."""
        ledger = work.ledger
        self.disk.sync_whole(ledger, tail, head, end)
        segments.make_segment(self.view.events, head + 1, self._mode, durable=self.durable)
        if ledger is not None:
            ledger.note_written(head, head + 1, 0)
        self.view.go_on(head + 1)
