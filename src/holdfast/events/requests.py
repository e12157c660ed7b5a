"""Appends that wait in this process, first come, first served. Every engine commits them in groups (`GroupCommit`).

    A, B, C, D … are put in. The first one leads: its thread does the work of all who are there when it takes them
    A request can be withdrawn until it is taken
    Whoever leads sees to it, whatever happens to it, that everybody it took is answered, and that the next one leads

An interrupt may come between any two lines. So everything that ends something can be done twice.
"""

from __future__ import annotations

import errno
from _thread import allocate_lock
from threading import RLock, local
from time import monotonic, sleep

from .. import process
from ..errors import WouldDeadlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Iterable, Sequence

    from .draft import Draft
    from .model import AppendCondition

WAITING, TAKEN, DONE = range(3)
_A_MOMENT = 0.000_02  # seconds
_LOOKS = 4


class Request:
    """One append, from the moment it is asked for until it is answered."""

    position = 0  # of its last event; of the last event of all if it has none
    checked = 0  # up to here its condition is known to hold
    error: BaseException | None = None
    behind: Request | None = None  # it may be appended only if that one was
    state = WAITING
    may_withdraw = False  # the caller is a task, which can be cancelled
    leads = False
    _bell: LockType | None = None
    _deadline: float | None = None

    def __init__(self, drafts: Sequence[Draft], condition: AppendCondition | None, timeout: float | None) -> None:
        self.drafts = drafts
        self.condition = condition
        self._timeout = timeout

    def hang_bell(self) -> None:
        """Before anybody sees it who may ring. Whoever leads from the beginning needs none."""
        self._bell = allocate_lock()
        self._bell.acquire()
        _ = self.deadline

    @property
    def deadline(self) -> float | None:
        """Counted from when it first had to wait."""
        if self._deadline is None and self._timeout is not None:
            self._deadline = monotonic() + self._timeout
        return self._deadline

    def wait(self) -> None:
        """Until it is done, or its turn to lead has come."""
        assert self._bell is not None
        self._bell.acquire()

    def wake(self) -> None:
        if self._bell is not None and self._bell.locked():
            self._bell.release()


class Group:
    """What one who leads has taken."""

    taken: Sequence[Request] = ()
    is_done = False  # what was asked for, for those who were not told of an error


class Queue:
    """The appends of a process that nobody has taken yet."""

    def __init__(self) -> None:
        self._mutex = RLock()  # so that one can ask whether it is one's own
        self._waiting: list[Request] = []
        self._has_leader = False
        self._together = 1  # how many were taken the last time

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[Request]:
        """Those that nobody has taken, now."""
        return tuple(self._waiting)

    @property
    def is_ours(self) -> bool:
        """Is this thread in the middle of anything here?"""
        return process.owns(self._mutex)

    def put(self, requests: Iterable[Request]) -> None:
        with self._mutex:
            for request in requests:
                if request.state != WAITING:
                    continue  # it was withdrawn
                if self._has_leader:
                    request.hang_bell()
                self._waiting.append(request)
                if not self._has_leader:
                    self._has_leader = request.leads = True

    def withdraw(self, request: Request) -> bool:
        """Take a request back. False: too late, it is being written."""
        with self._mutex:
            if request.state != WAITING:
                return False
            request.state = DONE
            if request in self._waiting:
                self._waiting.remove(request)
            self._pass_on(request)
        request.wake()
        return True

    def abandon(self, requests: Iterable[Request]) -> None:
        """Withdraw what can be withdrawn, and lead no more."""
        for request in requests:
            self.withdraw(request)
            with self._mutex:
                self._pass_on(request)

    def _pass_on(self, request: Request) -> None:
        """Let the next one lead, if this one does. With the mutex."""
        if not request.leads:
            return
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].wake()
        else:
            self._has_leader = False
        request.leads = False  # last: who is interrupted before does all of it again

    # For who leads.

    def gather(self) -> None:
        """Those who were taken together the last time are about to append again. Let them, for a moment."""
        if self._together > 1:
            for _ in range(_LOOKS):
                if len(self._waiting) >= self._together:
                    return
                sleep(_A_MOMENT)

    def take(self, leader: Request, group: Group) -> bool:
        """Everybody who is there. False: this request was withdrawn meanwhile, and another one leads."""
        with self._mutex:
            if not leader.leads:
                return False
            group.taken, self._waiting = self._waiting, []
            for request in group.taken:
                request.state = TAKEN
        self._together = len(group.taken)
        return True

    def put_back(self, leader: Request, group: Group) -> None:
        """Nothing was done for those who were taken. They come first again, but for the leader, who is done."""
        with self._mutex:
            for request in group.taken:
                request.state = WAITING
            self._waiting = [request for request in group.taken if request is not leader] + self._waiting
            group.taken = [leader] if leader in group.taken else []

    def fail(self, leader: Request, error: BaseException) -> None:
        """It could take nobody; the others try for themselves."""
        with self._mutex:
            if leader.state == WAITING:
                leader.error = error

    def answer(self, leader: Request, group: Group) -> None:
        """Those who were taken are done, and the next one leads."""
        if not group.taken:
            self.withdraw(leader)
        with self._mutex:
            for request in group.taken:
                if not group.is_done and request.error is None:
                    request.error = InterruptedError(errno.EINTR, "whoever appended it was interrupted, more than once")
                request.state = DONE
            self._pass_on(leader)
        for request in group.taken:
            if request is not leader:
                request.wake()


class _Inside(local):
    """The mutex that a thread has while it appends, to whatever store."""

    def __init__(self) -> None:
        self.mutex = RLock()


_inside = _Inside()


def is_appending() -> bool:
    """Is this thread in the middle of an append? Then the caller is a signal handler."""
    return process.owns(_inside.mutex)


class GroupCommit:
    """Commits the requests of the threads of a process in groups. An engine implements the three steps at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue = Queue()

    def begin_again(self) -> None:
        """In a forked child, in which none of the threads that wait is there."""
        self.queue = Queue()

    @property
    def is_ours(self) -> bool:
        """Is this thread in the middle of something that changes what we know? Then the caller is a signal handler."""
        return self.queue.is_ours or is_appending()

    def would_deadlock(self) -> WouldDeadlock:
        return WouldDeadlock(f"{self.name}: this thread is appending or reading already", path=self.name)

    def submit(self, *requests: Request) -> None:
        """Append, and wait for the answers, which are in the requests."""
        if self.is_ours:
            raise self.would_deadlock()
        with _inside.mutex:
            try:
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

    def _lead(self, request: Request) -> None:
        group = self._new_group()
        try:
            self.queue.gather()
            self._append(group, request)
        except Exception as error:  # the same for everybody in it
            for one in group.taken:
                one.error = one.error or error
            if not group.taken:
                self.queue.fail(request, error)
        except BaseException as error:  # an interrupt, of this thread alone
            self._interrupted(group, request, error)
            raise
        finally:
            # Nobody else may be left waiting. A function that does it again would be one more that is interrupted.
            try:
                self.queue.answer(request, group)
            except BaseException:
                try:
                    self.queue.answer(request, group)
                except BaseException:
                    self.queue.answer(request, group)
                    raise
                raise

    def _new_group(self) -> Group:
        return Group()

    def _append(self, group: Group, leader: Request) -> None:
        """Take the requests that wait (`queue.take`), append them, and set `group.is_done`. Several are one write.

        If it raises, and nothing says otherwise, nothing of the group was appended.
        """
        raise NotImplementedError

    def _interrupted(self, group: Group, leader: Request, error: BaseException) -> None:
        """An interrupt came in the middle of `_append`. Either finish the group, or undo it and put it back."""
        raise NotImplementedError
