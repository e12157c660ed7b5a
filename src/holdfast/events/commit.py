"""Appending: under the store's lock, for all who wait in this process.

    the queue     threads wait for each other in memory, and one does the work of all (`requests`)
    the lock      repair what a crash left, check each condition, write all of it in one go, unlock
    the disk      once for all of them, without the lock (`disk`). Meanwhile other processes write, and whose sync began
                  after our write covers us

Each request gets its own answer. A write that fails is undone before the lock is released.
"""

from __future__ import annotations

from sys import _getframe
from threading import get_ident
from time import monotonic, sleep

from .. import system, wait
from ..errors import ConditionFailed, LockLost, Timeout, WouldDeadlock
from ..locks.engine import BUSY, QUEUED, Outcome
from . import lines, log
from .disk import Disk, Written
from .model import AppendCondition
from .requests import DONE, Queue, Request, Turn
from .store_lock import StoreLock
from .view import NoSegment, View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from ..locks.hold import Hold
    from ..locks.path_lock import OpenFile
    from .lines import Draft
    from .log import Tail

_SOON, _A_MOMENT = 0.005, 0.000_02  # seconds
_MANY = 100

_appending: set[int] = set()  # the threads that are, to whatever store; one may be left in it by an interrupt


class Work(Turn, Written):
    """The requests that were taken, and what was written for them."""

    lock_file: OpenFile | None = None  # the store's lock, as `StoreLock.take` returned it


class Committer:
    """The one who appends for a process."""

    def __init__(
        self,
        root: str,
        view: View,
        store: bytes,
        *,
        lock_timeout: float | None,
        durable: bool,
        mode: int,
        segment_size: int,
    ) -> None:
        self.view = view
        self.durable = durable
        self.lock = StoreLock(f"{root}/.store.lock", timeout=lock_timeout, mode=mode)
        self.disk = Disk(root, view, store, self.lock, durable=durable, mode=mode)
        self._root = root
        self._store = store
        self._mode = mode
        self.segment_size = segment_size
        self.queue = Queue()

    def close(self) -> None:
        self.disk.forget()
        self.lock.close()

    def begin_again(self) -> None:
        """In a forked child, in which none of the threads that wait is there."""
        self.disk.begin_again()
        self.queue = Queue()
        self.close()

    @property
    def is_ours(self) -> bool:
        """Is this thread in the middle of an append, or of something else that changes what we know? Then whoever asks
        is a signal handler."""
        return self.view.is_ours or self.queue.is_ours or (get_ident() in _appending and self._is_below(_getframe(1)))

    def submit(self, *requests: Request) -> None:
        """Append, and wait for the answers, which are in the requests."""
        me = get_ident()
        nested = me in _appending
        if self.view.is_ours or self.queue.is_ours or (nested and self._is_below(_getframe(1))):
            raise self.would_deadlock()
        try:
            _appending.add(me)
            self.queue.put(requests)
            for request in requests:
                while request.state != DONE:
                    if request.leads:
                        self._lead(request)
                    else:
                        request.wait()
                if request.error is not None:
                    self.queue.abandon(requests)  # what stands behind it must not come without it
        except BaseException:
            try:
                self.queue.abandon(requests)
            except BaseException:
                self.queue.abandon(requests)
                raise
            raise
        finally:
            if not nested:
                _appending.discard(me)

    def would_deadlock(self) -> WouldDeadlock:
        return WouldDeadlock(f"{self._root}: this thread is appending or reading already", path=self._root)

    def _is_below(self, frame: FrameType | None) -> bool:
        """Is this append called by another one to the same store, perhaps with another object?"""
        while frame is not None:
            if frame.f_code is Committer.submit.__code__ and frame.f_locals["self"]._store == self._store:
                return True
            frame = frame.f_back
        return False

    def _lead(self, request: Request) -> None:
        work = Work()
        try:
            self.queue.gather()
            self._append(work, request)
        except Exception as error:  # the same for everybody in it
            for one in work.taken:
                one.error = one.error or error
            if not work.taken:
                self.queue.fail(request, error)
        except BaseException as error:  # an interrupt, of this thread alone
            self._interrupted(work, request, error)
            raise
        finally:
            # Nobody else may be left waiting. A function that does it again would be one more that is interrupted.
            try:
                self.queue.answer(request, work)
            except BaseException:
                try:
                    self.queue.answer(request, work)
                except BaseException:
                    self.queue.answer(request, work)
                    raise
                raise
        if self.view.has_unsaved:
            self.view.save_runs()

    def _read_ahead(self) -> None:
        """Somebody else has the lock. What we read meanwhile need not be read while others wait for us."""
        there = self.disk.visible()
        if there is not None and there - self.view.known > _MANY:
            with self.view.mutex:
                self.view.advance(there)

    def _append(self, work: Work, request: Request) -> None:
        hold = None
        try:
            work.lock_file = self.lock.take()
            if work.lock_file is None:
                if request.condition is not None:
                    self._read_ahead()
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

    def _interrupted(self, work: Work, request: Request, error: BaseException) -> None:
        if work.lock_file is not None:
            work.lock_file.close()
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
        who = error.status.explain() if error.status is not None else "somebody holds it"
        said = Timeout(
            f"{self.lock.path}: not acquired within {self.lock.timeout or 0:g} s: {who}. Nothing was appended; with a "
            "longer lock_timeout (--lock-timeout) one waits longer.",
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
        if tail.vouches_after < 0:
            tail.vouches_after = head
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
        """All of it is written, and everybody who looks sees that; or nothing is, whatever interrupts us."""
        ledger, last = work.ledger, head + len(drafts)
        try:
            end = tail.write(drafts, texts, begin, room=self.disk.has_ledger)
            work.tail, work.text, work.start = tail, texts[-1], end - len(texts[-1])
            if ledger is not None:
                work.epoch = ledger.epoch
                ledger.note_written(last, tail.first, end)
                if not self.durable:
                    ledger.release(last)
            work.head = last  # at last: from here on it is to be synced
        except BaseException:
            try:
                self._undo(work, tail, last, head, begin)
            except BaseException:
                self._undo(work, tail, last, head, begin)
                raise
            raise
        if ledger is None:  # in any case: before it is on the server, no other machine can see it
            self.disk.sync_or_undo(work, head)

    def _undo(self, work: Work, tail: Tail, last: int, head: int, begin: int) -> None:
        ledger = work.ledger
        if ledger is not None and ledger.end[0] == last:  # too late: somebody may sync it at this very moment
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

        If the ledger says so and the log agrees, nobody died, and there is no need to know what others wrote. With a
        condition there is.
        """
        ledger = work.ledger = self.disk.usable_ledger()
        if ledger is not None:
            head, end, segment = ledger.end
            if end:
                tail = self.view.tail_in(segment)
                sure = tail.first == segment and tail.ends_at(end)
                if sure and (tail.head == head or not _any_condition(work.taken)):
                    return tail, head, end
        tail = self._catch_up(work)
        return tail, tail.head, tail.end

    def _catch_up(self, work: Work) -> Tail:
        """Know everything that is in the log, and remove what a crash left of the last append."""
        ledger = work.ledger
        if ledger is not None and ledger.pending:
            self.disk.finish_cut(ledger)
        safe = ledger.known if ledger is not None else self.disk.safe_before
        try:
            rest = self.view.advance()
        except NoSegment:
            if safe:
                raise
            log.make_segment(self.view.events, 1, self._mode, durable=self.durable)
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
        """Check the conditions, each against the log and what those before it in the queue are about to add."""
        drafts: list[Draft] = []
        texts: list[bytes] = []
        now = lines.now()
        head = before
        safe = work.ledger.synced if work.ledger is not None else head
        for request in work.taken:
            if request.condition is not None:
                try:
                    self._check(request.condition, drafts, before)
                except (ConditionFailed, ValueError, TypeError, AttributeError) as error:  # its own, not the others'
                    request.error = error
                    continue
            if request.drafts:
                texts += lines.compose(request.drafts, head + 1, safe, self._store, now)
                drafts += request.drafts
                head += len(request.drafts)
            request.position = head
        return drafts, texts

    def _check(self, condition: AppendCondition, drafts: list[Draft], before: int) -> None:
        after = condition.after or 0
        if after > before + len(drafts):
            raise ValueError(f"after={after} is no position of {self._root}, which ends with {before}")
        query = condition.fail_if_match
        for at in range(len(drafts) - 1, max(-1, after - before - 1), -1):
            if query.matches(drafts[at]):
                raise self._conflict(condition, before + 1 + at)
        match = self.view.last_match(query, after)
        if match:
            raise self._conflict(condition, match)

    def _conflict(self, condition: AppendCondition, position: int) -> ConditionFailed:
        since = "ever" if condition.after is None else f"since {condition.after}"
        return ConditionFailed(
            f"{self._root}: not appended: event {position} matches what must not have happened {since}. Read again, "
            "and decide again (store.execute does).",
            path=self._root,
            position=position,
        )

    def _make_anew(self, work: Work, tail: Tail) -> Tail:
        """A segment with nothing in it. Whoever has the old one open sees that it is gone."""
        log.make_segment(self.view.events, tail.first, self._mode, durable=self.durable, anew=True)
        if work.ledger is not None:
            work.ledger.note_made_anew()
        self.view.forget()
        new = self.view.tail
        new.vouches_after = tail.first - 1
        return new

    def _roll(self, work: Work, tail: Tail, head: int, end: int) -> None:
        """Begin a new segment."""
        ledger = work.ledger
        self.disk.sync_whole(ledger, tail, head, end)
        log.make_segment(self.view.events, head + 1, self._mode, durable=self.durable)
        if ledger is not None:
            ledger.note_written(head, head + 1, 0)
        self.view.begin_segment(head + 1)


def _any_condition(requests: Sequence[Request]) -> bool:
    return any(request.condition is not None for request in requests)
