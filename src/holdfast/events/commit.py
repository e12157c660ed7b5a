"""Appending: first come, first served in the process, then under the store's lock; syncing without it.

    threads       A, B, C, D … queue up. The first leads: it takes the lock, and then everybody who is there by now
    the lock      repair what a crash left, check each condition, write all of it in one go, unlock
    the sync      once for all of them. Meanwhile other processes write, and whose sync began after our write covers us

Each request gets its own answer. A request can be withdrawn until the moment in which it is written. A write that fails
is undone before the lock is released. A sync that fails is taken back (`_take_back`), under the lock, before anybody is
told: readers do not go past what is on disk, and every writer looks at the ledger's epoch before it believes anything.
"""

from __future__ import annotations

import errno
import sys
from _thread import allocate_lock, get_ident
from time import monotonic, sleep

from .. import owner, system
from ..errors import ConditionFailed, LockLost, Timeout, WouldDeadlock
from ..locks.standing import StandingLock
from . import lines, log
from .ledger import Ledger
from .model import AppendCondition
from .view import NoSegment, View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from ..locks.kernel import KernelHold
    from .lines import Draft
    from .log import Tail

_WAITING, _TAKEN, _DONE = range(3)
_SOON, _A_MOMENT = 0.005, 0.000_02  # seconds
_LOOKS = 4
_A_WHILE = 5.0  # seconds after which who waits for the lock looks whether it is still wanted


class Request:
    """One append, from the moment it is asked for until it is answered."""

    position = 0
    error: BaseException | None = None
    state = _WAITING
    leads = False

    def __init__(self, drafts: Sequence[Draft], condition: AppendCondition | None, deadline: float | None) -> None:
        self.drafts = drafts
        self.condition = condition
        self.deadline = deadline
        self._bell = allocate_lock()
        self._bell.acquire()

    def wait(self) -> None:
        """Until it is done, or its turn to lead has come."""
        self._bell.acquire()

    def wake(self) -> None:
        if self._bell.locked():
            self._bell.release()


class Work:
    """What one hold of the lock wrote."""

    taken: Sequence[Request] = ()
    tail: Tail | None = None
    ledger: Ledger | None = None
    epoch = 0
    text = b""  # its last line
    start = 0  # and where that begins
    head = 0  # the last event, once all of it is written
    is_lost = False  # the lock was, while we wrote


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
        # Shared memory reaches the processes of this machine, and is trusted until the next boot.
        self._shares = not view.shared and owner.boot_id() is not None
        self.reset()

    def reset(self) -> None:
        """Also for a forked child, in which none of the threads that wait is there."""
        self._mutex = allocate_lock()
        self._queue: list[Request] = []
        self._leading = False
        self._shared = 1  # how many shared the last sync
        self._inside: set[int] = set()  # threads
        self._ledger: Ledger | None = None
        self._readers: Ledger | None = None
        self._safe_before = 0
        self._looked = False
        self._epoch = -1  # of what the view knows
        self._named = 0  # the segment whose name is sure to be on disk

    def forget(self) -> None:
        self._ledger = self._readers = None
        self.lock.close()

    # The queue of this process.

    def submit(self, *requests: Request) -> None:
        """Append, and wait for the answers, which are in the requests."""
        me = get_ident()
        if me in self._inside and self._is_below(sys._getframe(1)):  # a signal handler, in the middle of an append
            raise WouldDeadlock(f"{self._root}: this thread is appending already", path=self._root)
        try:
            self._inside.add(me)
            self._enqueue(requests)
            for request in requests:
                while request.state != _DONE:
                    if request.leads:
                        self._lead(request)
                    else:
                        request.wait()
                if isinstance(request.error, Timeout):
                    self._abandon(requests)  # what stands behind it must not come without it
        except BaseException:
            self._abandon(requests)
            raise
        finally:
            self._inside.discard(me)

    def _is_below(self, frame: FrameType | None) -> bool:
        """Is this append called by another one? `_inside` alone may be what an interrupt has left."""
        while frame is not None:
            if frame.f_code is Committer.submit.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _enqueue(self, requests: Iterable[Request]) -> None:
        with self._mutex:
            waiting = [request for request in requests if request.state == _WAITING]  # the others were withdrawn
            self._queue += waiting
            if waiting and not self._leading:
                self._leading = waiting[0].leads = True

    def _abandon(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.withdraw(request)
            with self._mutex:
                self._pass_on(request)

    def withdraw(self, request: Request) -> bool:
        """Take a request back. False: too late, it is being written."""
        with self._mutex:
            if request.state != _WAITING:
                return False
            request.state = _DONE
            if request in self._queue:
                self._queue.remove(request)
            self._pass_on(request)
        request.wake()
        return True

    def _pass_on(self, request: Request) -> None:
        """Let the next one lead, if this one does. With the mutex."""
        if not request.leads:
            return
        if self._queue:
            self._queue[0].leads = True
            self._queue[0].wake()
        else:
            self._leading = False
        request.leads = False  # last: who is interrupted before does all of it again

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
            self._append(work, request)
        except Exception as error:  # the same for everybody in it
            self._fail(work, request, error)
        except BaseException as error:  # an interrupt, of this thread alone
            self._interrupted(work, request, error)
            raise
        finally:
            try:
                self._answer(work, request)
            except BaseException:  # an interrupt: nobody else may be left waiting
                self._answer(work, request)
                raise
        if self.view.has_unsaved:
            self.view.save_runs()

    def _append(self, work: Work, request: Request) -> None:
        hold = None
        taken = False
        try:
            taken = self.lock.take()
            if not taken:
                hold = self._acquire(request)
                if hold is None:
                    return
            if self._take(work, request):
                with self.view.mutex:
                    self._write(work)
        finally:
            if taken or hold is not None:
                self._release(work, hold)
        self._sync(work)
        if work.is_lost and work.tail is not None and not work.tail.says(work.text, work.start):
            raise LockLost(f"{self.lock.path}: the lock was lost, and somebody wrote meanwhile", path=self.lock.path)

    def _release(self, work: Work, hold: KernelHold | None) -> None:
        """Whatever goes wrong with it, what is written is written."""
        try:
            if hold is not None:
                hold.release()
            else:
                self.lock.give_back()
        except (LockLost, OSError) as error:
            import logging

            work.is_lost = True
            logging.getLogger("holdfast").warning("%s", error)

    def _take(self, work: Work, request: Request) -> bool:
        """Take those who are there. False: this request was withdrawn meanwhile, and another one leads."""
        with self._mutex:
            if not request.leads:
                return False
            work.taken, self._queue = self._queue, []
            for one in work.taken:
                one.state = _TAKEN
        self._shared = len(work.taken)
        return True

    def _fail(self, work: Work, request: Request, error: Exception) -> None:
        if work.taken:
            for one in work.taken:
                one.error = one.error or error
            return
        with self._mutex:  # the lock was not to be had
            if request.state == _WAITING:
                request.error = error

    def _interrupted(self, work: Work, request: Request, error: BaseException) -> None:
        self.lock.drop()
        with self.view.mutex:
            self.view.forget()
        if work.head:
            try:
                self._sync(work)
            except BaseException as failure:
                for one in work.taken:
                    one.error = one.error or failure
            return
        with self._mutex:
            for one in work.taken:
                one.state = _WAITING
            self._queue = [one for one in work.taken if one is not request] + self._queue
            work.taken = [request] if request in work.taken else []
            request.error = request.error or error

    def _answer(self, work: Work, request: Request) -> None:
        if not work.taken:
            self.withdraw(request)
        with self._mutex:
            for one in work.taken:
                one.state = _DONE
            self._pass_on(request)
        for one in work.taken:
            one.wake()

    def _acquire(self, request: Request) -> KernelHold | None:
        """Wait for the lock. None: the request was withdrawn meanwhile."""
        hold = self.lock._try() or self._acquire_soon()
        while hold is None and request.leads:
            left = None if request.deadline is None else max(0.0, request.deadline - monotonic())
            try:
                hold = self.lock.acquire(_A_WHILE if left is None or left > _A_WHILE else left)
            except Timeout as error:
                if left is not None and left <= _A_WHILE:
                    raise self._timed_out(error) from None
        return hold

    def _timed_out(self, error: Timeout) -> Timeout:
        who = error.status.explain() if error.status is not None else "somebody holds it"
        said = Timeout(
            f"{self.lock.path}: not acquired within {self.lock.timeout or 0:g} s: {who}. Nothing was appended; give "
            "EventStore a longer lock_timeout to wait longer.",
            path=self.lock.path,
        )
        said.status = error.status
        return said

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
            if self.durable and self._named != tail.first:
                self._sync_names(tail)
            begin = end
            try:
                end = tail.write(drafts, texts, begin, room=self._shares)
                work.tail, work.text = tail, texts[-1]
                work.head = head + len(drafts)
            except BaseException:
                self.view.forget()
                tail.cut(begin)
                raise
            work.start = end - len(work.text)
        else:
            work.tail, work.head = tail, head
        ledger = work.ledger
        if ledger is None:
            if texts:  # in any case: before it is on the server, no other machine can see it
                self._sync_or_undo(work, head)
            return
        work.epoch = ledger.epoch
        ledger.note_written(work.head, tail.first, end)
        if not self.durable:
            ledger.release(work.head)

    def _sync_or_undo(self, work: Work, head: int) -> None:
        assert work.tail is not None
        try:
            system.fdatasync(work.tail.fd)
        except BaseException:
            work.head = 0
            self.view.forget()
            self._cut_behind(head, work.tail.first)
            raise

    def _sync_names(self, tail: Tail) -> None:
        """Whoever made the segment may not have cared, or may have died before it could."""
        log.sync_folder(self.view.events)
        if not self._named:
            log.sync_folder(self._root)
        self._named = tail.first

    def _find_end(self, work: Work) -> tuple[int, int]:
        """The last event in the log, and where it ends.

        If the ledger says so and the log agrees, nobody died, and there is no need to know what others wrote. With a
        condition there is.
        """
        ledger = work.ledger = self._usable_ledger()
        if ledger is not None:
            if ledger.epoch != self._epoch:
                self.view.forget()  # something was taken back, perhaps what we have read
                self._epoch = ledger.epoch
            tail = self.view._tail
            if tail is not None:
                head, end = ledger.end_in(tail.first)
                if end and tail.ends_at(end) and (tail.head == head or not _any_condition(work.taken)):
                    return head, end
        self._catch_up(work)
        tail = self.view.tail
        return tail.head, tail.end

    def _catch_up(self, work: Work) -> None:
        """Know everything that is in the log, and remove what a crash left of the last append."""
        ledger = work.ledger
        if ledger is not None and ledger.pending:
            self._finish_cut(ledger)
        safe = ledger.known if ledger is not None else self._safe_before
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
        if tail.repair(rest, safe, thorough=not self._looked) and self.durable:
            system.fdatasync(tail.fd)
        if ledger is None and self._shares:
            system.fdatasync(tail.fd)  # what we found counts as on disk from now on
            work.ledger = self._ledger = Ledger.make(self.ledger_path, tail.head, tail.first, self._store, self._mode)
            self._epoch = work.ledger.epoch
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
        self._named = 0
        try:
            ledger = Ledger(self.ledger_path, writable=True)
        except (FileNotFoundError, ValueError):
            self._looked = False
            return None
        if ledger.is_valid(self._store):
            self._looked = True  # somebody has, since the machine was started
            self._ledger = ledger
            return ledger
        self._safe_before = ledger.was_synced(self._store)
        self._looked = False
        return None

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

    def _roll(self, work: Work, tail: Tail, head: int, end: int) -> None:
        """Begin a new segment. What is in an older one is on disk, whoever wrote it, and however patient."""
        ledger = work.ledger
        try:
            system.fdatasync(tail.fd)
        except OSError:
            if ledger is not None:
                self._take_back_locked(ledger, head, ledger.epoch, tail.first)
            raise
        tail.cut(end)  # no room is needed in it any more
        system.fsync(tail.fd)
        log.make_segment(self.view.events, head + 1, self._mode, durable=self.durable)
        if ledger is not None:
            ledger.note_synced(head, ledger.epoch)
            ledger.note_written(head, head + 1, 0)
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
        if ledger.synced >= work.head and ledger.epoch == work.epoch:  # in this order
            return
        # In this order: if the last segment is still ours afterwards, what was written then is in it.
        written = ledger.written
        covered = written if ledger.segment == tail.first else work.head
        try:
            system.fdatasync(tail.fd)
        except OSError:
            if not self._take_back(work, ledger, tail):
                return  # another one's sync came after our write, and went well
            raise
        if not ledger.note_synced(covered, work.epoch):
            raise OSError(
                errno.EIO, "another process could not write to disk, so this append was taken back", tail.path
            )

    def _take_back(self, work: Work, ledger: Ledger, tail: Tail) -> bool:
        """A sync failed: nobody may ever see what it was for. False: it is on disk all the same."""
        with self.lock.acquire(None), self.view.mutex:
            if not ledger.in_place:
                return True  # there is another ledger now, and nobody knows what it counted on
            if ledger.epoch != work.epoch:
                return True  # done, by another one
            if ledger.synced >= work.head:
                return False
            self._take_back_locked(ledger, work.head, work.epoch, tail.first)
            return True

    def _take_back_locked(self, ledger: Ledger, head: int, epoch: int, segment: int) -> None:
        """With the store's lock. What is visible cannot be taken back: who did not want to wait for the disk saw it."""
        self.view.forget()
        safe = ledger.visible
        if safe >= head or ledger.segment != segment:
            return
        end = self._end_of(safe, segment)
        if ledger.take_back(epoch, end):
            self._finish_cut(ledger)

    def _end_of(self, safe: int, segment: int) -> int:
        found = log.Tail(self.view.events, segment, self._store, writable=True)
        if safe >= found.first:
            found.read_on(safe)
        return found.end

    def _cut_behind(self, safe: int, segment: int) -> None:
        log.Tail(self.view.events, segment, self._store, writable=True).cut(self._end_of(safe, segment))

    def _finish_cut(self, ledger: Ledger) -> None:
        """Whoever said that something is taken back may have died before it was."""
        tail = log.Tail(self.view.events, ledger.segment, self._store, writable=True)
        tail.cut(ledger.pending - 1)
        try:
            system.fdatasync(tail.fd)
        except OSError:
            pass  # the disk is broken, which is what began it
        self.view.forget()
        ledger.cut_is_done()

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
            self._readers = None
            with self.view.mutex:
                self.view.begin_again()
            ledger = self._readers = self._open_ledger()
        return ledger if ledger is not None and ledger.is_valid(self._store) else None

    def _open_ledger(self) -> Ledger | None:
        for writable in (True, False):
            try:
                return Ledger(self.ledger_path, writable=writable)
            except (OSError, ValueError) as error:
                if not isinstance(error, PermissionError) and getattr(error, "errno", 0) != errno.EROFS:
                    return None
        return None

    def sleeps(self) -> bool:
        """To be said before the last look. True: `ledger_path` is touched when something becomes visible."""
        ledger = self._readers_ledger()
        return ledger is not None and ledger.sleeps()


def _any_condition(requests: Sequence[Request]) -> bool:
    return any(request.condition is not None for request in requests)
