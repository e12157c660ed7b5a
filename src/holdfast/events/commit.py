"""Appending: first come, first served in the process, then under the store's lock; syncing without it.

    threads       A, B, C, D … queue up. The first leads: it takes the lock, and then everybody who is there by now
    the lock      repair what a crash left, check each condition, write all of it in one go, unlock
    the sync      once for all of them. Meanwhile other processes write, and whose sync began after our write covers us

Each request gets its own answer. A request can be withdrawn until the moment in which it is written. A write or sync
that fails is taken back, under the lock, before anybody is told: readers do not go past what is on disk, and every
other writer looks whether what it read last is still there.
"""

from __future__ import annotations

import errno
from _thread import LockType, allocate_lock
from time import monotonic, sleep

from .. import owner, system
from ..errors import ConditionFailed, Timeout
from ..locks.standing import StandingLock
from . import lines, log
from .ledger import Ledger
from .model import AppendCondition
from .view import NoSegment, View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..locks.kernel import KernelHold
    from .lines import Draft
    from .log import Tail

_WAITING, _TAKEN, _DONE = range(3)
_SOON, _A_MOMENT = 0.005, 0.000_02  # seconds
_LOOKS = 4


class Request:
    """One append, from the moment it is asked for until it is answered."""

    position = 0
    error: BaseException | None = None
    state = _WAITING
    leads = False
    _bell: LockType | None = None  # of one who does not lead

    def __init__(self, drafts: Sequence[Draft], condition: AppendCondition | None, deadline: float | None) -> None:
        self.drafts = drafts
        self.condition = condition
        self.deadline = deadline

    def will_wait(self) -> None:
        """To be said before anybody could wake it."""
        self._bell = allocate_lock()
        self._bell.acquire()

    def wait(self) -> None:
        """Until it is done, or its turn to lead has come."""
        assert self._bell is not None
        self._bell.acquire()

    def wake(self) -> None:
        if self._bell is not None and self._bell.locked():
            self._bell.release()


class Work:
    """What one hold of the lock wrote."""

    taken: Sequence[Request] = ()
    tail: Tail | None = None
    ledger: Ledger | None = None
    epoch = 0
    start = -1  # where the write begins, once it may have begun
    head = 0  # the last event, once all of it is written


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
        self.lock = StandingLock(f"{root}/.store.lock", timeout=lock_timeout, mode=mode)
        self._root = root
        self._store = store
        self._mode = mode
        self.segment_size = segment_size
        self.ledger_path = f"{root}/ledger"
        self._ledger: Ledger | None = None
        self._readers: Ledger | None = None
        self._safe_before = 0
        self._looked = False
        # Shared memory reaches the processes of this machine, and is trusted until the next boot.
        self._shares = not view.shared and owner.boot_id() is not None
        self.reset()

    def reset(self) -> None:
        """Also for a forked child, in which none of the threads that wait is there."""
        self._mutex = allocate_lock()
        self._queue: list[Request] = []
        self._leading = False
        self._shared = 1  # how many shared the last sync

    def forget(self) -> None:
        self._ledger = self._readers = None
        self.lock.close()

    # The queue of this process.

    def submit(self, *requests: Request) -> None:
        """Append, and wait for the answers, which are in the requests."""
        with self._mutex:
            if self._leading or len(requests) > 1:
                for request in requests:
                    request.will_wait()
            self._queue += requests
            requests[0].leads = not self._leading
            self._leading = True
        try:
            for request in requests:
                while request.state != _DONE:
                    if request.leads:
                        self._lead(request)
                    else:
                        request.wait()
        except BaseException:
            for request in requests:
                self.withdraw(request)
            raise

    def withdraw(self, request: Request) -> bool:
        """Take a request back. False: too late, it is being written."""
        with self._mutex:
            if request.state != _WAITING:
                return False
            request.state = _DONE
            self._queue.remove(request)
        self._pass_on(request)
        request.wake()
        return True

    def _pass_on(self, request: Request) -> None:
        """Let the next one lead."""
        with self._mutex:
            if not request.leads:
                return
            request.leads = False
            if self._queue:
                self._queue[0].leads = True
                self._queue[0].wake()
            else:
                self._leading = False

    def _wait_for_others(self) -> None:
        """Those with whom we shared the last sync are about to append again. Let them, and share the next one, too."""
        for _ in range(_LOOKS):
            if len(self._queue) >= self._shared:
                return
            sleep(_A_MOMENT)

    def _lead(self, request: Request) -> None:
        work = Work()
        try:
            if self._shared > 1:
                self._wait_for_others()
            hold = None if self.lock.take() else self._acquire(request)
            try:
                self._take(work)
                with self.view.mutex:
                    self._write(work)
            finally:
                if hold is None:
                    self.lock.give_back()
                else:
                    hold.release()
            self._sync(work)
        except Exception as error:  # the same for everybody in it
            for one in work.taken or (request,):
                one.error = one.error or error
        except BaseException:  # an interrupt, of this thread alone
            if work.head:
                self._sync(work)
            else:
                self._put_back(work, request)
            raise
        finally:
            self._answer(work, request)
        if self.view.has_unsaved:
            self.view.save_runs()

    def _take(self, work: Work) -> None:
        with self._mutex:
            work.taken, self._queue = self._queue, []
            for one in work.taken:
                one.state = _TAKEN
        self._shared = len(work.taken)

    def _put_back(self, work: Work, request: Request) -> None:
        with self._mutex:
            for one in work.taken:
                one.state = _WAITING
            self._queue = [one for one in work.taken if one is not request] + self._queue
            work.taken = [request] if request in work.taken else []

    def _answer(self, work: Work, request: Request) -> None:
        if not work.taken:  # the lock was not to be had
            self.withdraw(request)
        for one in work.taken:
            one.state = _DONE
        self._pass_on(request)
        for one in work.taken:
            if one is not request:
                one.wake()

    def _acquire(self, request: Request) -> KernelHold:
        hold = self.lock._try() or self._acquire_soon()
        if hold is not None:
            return hold
        left = None if request.deadline is None else max(0.0, request.deadline - monotonic())
        try:
            return self.lock.acquire(left)
        except Timeout as error:
            who = error.status.explain() if error.status is not None else "somebody holds it"
            seconds = self.lock.timeout or 0
            said = Timeout(
                f"{self.lock.path}: not acquired within {seconds:g} s: {who}. Nothing was appended; give EventStore a "
                "longer lock_timeout to wait longer.",
                path=self.lock.path,
            )
            said.status = error.status
            raise said from None

    def _acquire_soon(self) -> KernelHold | None:
        """Others hold the lock for some microseconds. To queue for it, and be woken, takes longer than that.

        Who queues comes first: a queue ends this, and every now and then one who did not get it begins one.
        """
        deadline = monotonic() + _SOON
        while monotonic() < deadline:
            sleep(_A_MOMENT)
            hold = self.lock._try()
            if hold is not None or system.access(self.lock._queue, 0):
                return hold
        return None

    # Under the lock.

    def _write(self, work: Work) -> None:
        head, end = self._find_end(work)
        tail = self.view.tail
        drafts, texts = self._decide(work, head)
        if texts:
            if end and end + sum(map(len, texts)) > self.segment_size:
                self._roll(work, tail, head, end)
                tail, end = self.view.tail, 0
            try:
                work.tail, work.start = tail, end
                end = tail.write(drafts, texts, end, room=self._shares)
                work.head = head + len(drafts)
            except BaseException:
                self._undo(work)
                raise
        else:
            work.tail, work.head = tail, head
        ledger = work.ledger
        if ledger is None:
            if texts:  # in any case: before it is on the server, no other machine can see it
                self._sync_or_undo(work)
            return
        work.epoch = ledger.epoch
        ledger.note_written(work.head, tail.first, end)
        if not self.durable:
            ledger.release(work.head)

    def _find_end(self, work: Work) -> tuple[int, int]:
        """The last event in the log, and where it ends.

        If the ledger says so and the log agrees, nobody died, and there is no need to know what others wrote. With a
        condition there is.
        """
        ledger = work.ledger = self._usable_ledger()
        tail = self.view._tail
        if ledger is not None and tail is not None:
            head, end = ledger.end_in(tail.first)
            if end and tail.ends_at(end) and (tail.head == head or not _any_condition(work.taken)):
                return head, end
        self._catch_up(work)
        tail = self.view.tail
        return tail.head, tail.end

    def _undo(self, work: Work) -> None:
        assert work.tail is not None
        work.head = 0
        self.view.forget()
        work.tail.cut(work.start)

    def _sync_or_undo(self, work: Work) -> None:
        assert work.tail is not None
        try:
            system.fdatasync(work.tail.fd)
        except BaseException:
            self._undo(work)
            raise

    def _catch_up(self, work: Work) -> None:
        """Know everything that is in the log, and remove what a crash left of the last append."""
        ledger = work.ledger
        safe = ledger.synced if ledger is not None else self._safe_before
        try:
            rest = self.view.advance()
        except NoSegment:
            if safe:
                raise
            log.make_segment(self.view.events, 1, self._mode, durable=self.durable)
            rest = self.view.advance()
        tail = self.view.tail
        if safe > tail.head:
            raise tail.damaged(f"event {tail.head + 1} is damaged or missing; it had been on disk")
        if tail.repair(rest, safe, thorough=not self._looked) and self.durable:
            system.fdatasync(tail.fd)
        if ledger is None and self._shares:
            self._sync_older(0, tail)
            system.fdatasync(tail.fd)  # what we found counts as on disk from now on
            work.ledger = self._ledger = Ledger.make(self.ledger_path, tail.head, tail.first, self._mode)
        self._looked = True

    def _usable_ledger(self) -> Ledger | None:
        """The ledger that everybody uses; None: there is none yet, or none here."""
        self._safe_before = 0
        if not self._shares:
            return None
        ledger = self._ledger
        if ledger is not None and ledger.in_place:
            return ledger
        self._ledger = None
        self.view.begin_again()  # the store itself may be another one now, brought back from a copy
        try:
            ledger = Ledger(self.ledger_path, writable=True)
        except (FileNotFoundError, ValueError):
            self._looked = False
            return None
        if ledger.valid:
            self._looked = True  # somebody has, since the machine was started
            self._ledger = ledger
            return ledger
        self._safe_before = ledger.was_synced
        self._looked = False
        return None

    def _decide(self, work: Work, before: int) -> tuple[list[Draft], list[bytes]]:
        """Check the conditions, each against the log and what those before it in the queue are about to add."""
        drafts: list[Draft] = []
        texts: list[bytes] = []
        now = lines.now()
        head = before
        safe = work.ledger.synced if work.ledger is not None else (head if self.durable else 0)
        for request in work.taken:
            condition = request.condition
            if condition is not None:
                after = condition.after or 0
                if after > head:
                    request.error = ValueError(f"after={after} is no position of {self._root}, which ends with {head}")
                    continue
                match = _last_draft(drafts, condition, after, before) or self.view.last_match(
                    condition.fail_if_match, after
                )
                if match:
                    request.error = self._conflict(condition, match)
                    continue
            if request.drafts:
                texts += lines.compose(request.drafts, head + 1, safe, self._store, now)
                drafts += request.drafts
                head += len(request.drafts)
            request.position = head
        return drafts, texts

    def _conflict(self, condition: AppendCondition, position: int) -> ConditionFailed:
        since = "ever" if condition.after is None else f"since {condition.after}"
        return ConditionFailed(
            f"{self._root}: not appended: event {position} matches what must not have happened {since}. Read again, "
            "and decide again (store.execute does).",
            path=self._root,
            position=position,
        )

    def _roll(self, work: Work, tail: Tail, head: int, end: int) -> None:
        """Begin a new segment."""
        if self.durable:
            self._sync_older(0 if work.ledger is None else work.ledger.synced, tail)
            system.fdatasync(tail.fd)
        tail.cut(end)  # no room is needed in it any more
        if self.durable:
            system.fsync(tail.fd)
        log.make_segment(self.view.events, head + 1, self._mode, durable=self.durable)
        if work.ledger is not None:
            if self.durable:
                work.ledger.note_synced(head, work.ledger.epoch)
            work.ledger.note_written(head, head + 1, 0)
        self.view.go_on(head + 1)

    # Without the lock.

    def _sync(self, work: Work) -> None:
        """Have it on disk. Readers see it from then on."""
        ledger, tail = work.ledger, work.tail
        if ledger is None or tail is None:
            return
        if not self.durable:
            ledger.wake()
            return
        if ledger.synced >= work.head:
            return
        # In this order: if the last segment is still ours afterwards, what was written then is in it.
        written = ledger.written
        covered = written if ledger.segment == tail.first else work.head
        try:
            self._sync_older(ledger.synced, tail)
            system.fdatasync(tail.fd)
        except OSError:
            self._take_back(work)
            raise
        if not ledger.note_synced(covered, work.epoch):
            raise OSError(
                errno.EIO, "another process could not write to disk, so this append was taken back", tail.path
            )

    def _sync_older(self, synced: int, tail: Tail) -> None:
        """Segments that were left without a sync, by who did not want it."""
        if synced + 1 >= tail.first:
            return
        with self.view.mutex:
            files = [self.view.file_of(first) for first in self.view.firsts if first < tail.first]
        for file, after in zip(files, [*[file.first for file in files[1:]], tail.first], strict=True):
            if after > synced + 1:
                system.fdatasync(file.fd)

    def _take_back(self, work: Work) -> None:
        """A sync failed: nobody may ever see what it was for."""
        assert work.ledger is not None and work.tail is not None
        with self.lock.acquire(None), self.view.mutex:
            safe = work.ledger.take_back(work.head, work.epoch)
            self.view.forget()
            if safe < work.head:
                self._cut_behind(safe, work.tail)

    def _cut_behind(self, safe: int, tail: Tail) -> None:
        """Of the last segment, leave what is on disk. (Older ones that are not are those of who wanted it so.)"""
        found = log.Tail(self.view.events, tail.first, self._store, writable=True)
        if safe >= found.first:
            found.read_on(safe)
        found.cut(found.end)

    # For readers.

    def visible(self) -> int | None:
        """Up to where readers may go; None: nobody says, so go by the log."""
        ledger = self._readers_ledger()
        return None if ledger is None else ledger.visible

    def _readers_ledger(self) -> Ledger | None:
        if not self._shares:
            return None
        ledger = self._ledger or self._readers
        if ledger is None or not ledger.in_place:
            ledger = self._readers = None
            with self.view.mutex:
                self.view.begin_again()
            for writable in (True, False):
                try:
                    ledger = self._readers = Ledger(self.ledger_path, writable=writable)
                    break
                except PermissionError:
                    continue
                except OSError as error:
                    if error.errno != errno.EROFS:
                        return None
                except ValueError:
                    return None
        return ledger if ledger is not None and ledger.valid else None

    def sleeps(self) -> bool:
        """To be said before the last look. True: `ledger_path` is touched when something becomes visible."""
        ledger = self._readers_ledger()
        return ledger is not None and ledger.sleeps()


def _any_condition(requests: Sequence[Request]) -> bool:
    return any(request.condition is not None for request in requests)


def _last_draft(drafts: list[Draft], condition: AppendCondition, after: int, head: int) -> int | None:
    query = condition.fail_if_match
    for at in range(len(drafts) - 1, max(-1, after - head - 1), -1):
        if query.matches(drafts[at]):
            return head + 1 + at
    return None
