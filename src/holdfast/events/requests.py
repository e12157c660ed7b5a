"""Appends that wait in this process, first come, first served. Every engine commits them in groups (`GroupCommit`).

    A, B, C, D … are put in. The first one leads: its thread takes all requests that wait, and appends them
    A request can be withdrawn until it is taken
    The leader answers every request that it took, also after an error or an interrupt, and then lets the next one lead

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
    _wakeup: LockType | None = None
    _deadline: float | None = None

    def __init__(self, drafts: Sequence[Draft], condition: AppendCondition | None, timeout: float | None) -> None:
        self.drafts = drafts
        self.condition = condition
        self._timeout = timeout

    def prepare_to_wait(self) -> None:
        """Before another thread sees the request, and may wake it. A request that leads at once never waits."""
        self._wakeup = allocate_lock()
        self._wakeup.acquire()
        _ = self.deadline

    @property
    def deadline(self) -> float | None:
        """The timeout counts from the first moment at which the request had to wait."""
        if self._deadline is None and self._timeout is not None:
            self._deadline = monotonic() + self._timeout
        return self._deadline

    def wait(self) -> None:
        """Until it is done, or its turn to lead has come."""
        assert self._wakeup is not None
        self._wakeup.acquire()

    def wake(self) -> None:
        if self._wakeup is not None and self._wakeup.locked():
            self._wakeup.release()


class Group:
    """The requests that a leader has taken."""

    taken: Sequence[Request] = ()
    is_done = False  # all of them are appended, but for those that have an error


class Queue:
    """The appends of a process that no leader has taken yet."""

    def __init__(self) -> None:
        self._mutex = RLock()  # so that a thread can ask whether it has it
        self._waiting: list[Request] = []
        self._has_leader = False
        self._together = 1  # how many were taken the last time

    @property
    def waiting(self) -> Sequence[Request]:
        """The requests that no leader has taken."""
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
                    request.prepare_to_wait()
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
        request.leads = False  # last: a thread that is interrupted before this does all of it again

    # For the leader.

    def gather(self) -> None:
        """Wait a moment for the requests of the threads whose last requests were taken together."""
        if self._together > 1:
            for _ in range(_LOOKS):
                if len(self._waiting) >= self._together:
                    return
                sleep(_A_MOMENT)

    def take(self, leader: Request, group: Group) -> bool:
        """Take all requests that wait. False: the leader was withdrawn meanwhile, and another request leads."""
        with self._mutex:
            if not leader.leads:
                return False
            group.taken, self._waiting = self._waiting, []
            for request in group.taken:
                request.state = TAKEN
        self._together = len(group.taken)
        return True

    def put_back(self, leader: Request, group: Group) -> None:
        """Put the requests back at the front of the queue: none was appended. The leader is not put back."""
        with self._mutex:
            for request in group.taken:
                request.state = WAITING
            self._waiting = [request for request in group.taken if request is not leader] + self._waiting
            group.taken = [leader] if leader in group.taken else []

    def fail(self, leader: Request, error: BaseException) -> None:
        """The leader could take no request. The others try for themselves."""
        with self._mutex:
            if leader.state == WAITING:
                leader.error = error

    def answer(self, leader: Request, group: Group) -> None:
        """Answer the requests that were taken, and let the next one lead."""
        if not group.taken:
            self.withdraw(leader)
        with self._mutex:
            for request in group.taken:
                if not group.is_done and request.error is None:
                    request.error = InterruptedError(
                        errno.EINTR, "the thread that appended it was interrupted more than once"
                    )
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
                        self.queue.abandon(requests)  # a request with `behind` must not be appended without it
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
        except Exception as error:  # the same for all requests of the group
            for one in group.taken:
                one.error = one.error or error
            if not group.taken:
                self.queue.fail(request, error)
        except BaseException as error:  # an interrupt, of this thread alone
            self._interrupted(group, request, error)
            raise
        finally:
            # No other thread may be left waiting. The repetition is no function: that could be interrupted, too.
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
