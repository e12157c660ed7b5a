"""What this process knows about its own locks: descriptors, holds, the line of waiters in memory, and fork.

The kernel excludes other holders. This module keeps the records of one process:

* descriptors: every `files.OwnedFd` that is open. A forked child closes its copies once, without unlocking: an unlock
  acts on the open file description, which the child shares with its parent.
* holds: a thread or task that is about to wait for itself gets `WouldDeadlock`. Holds are found by device and inode,
  so two spellings of a path, a symlink or a hard link make no difference.
* lines: threads and tasks of this process wait for a path in memory, in order of arrival. Only a few of them at a
  time (one, where there is no queue in front of the lock) use the file system.
* turns: see `Turn`.

Fork: there is one hook, at the end of this module. The child closes all owned descriptors and gets a new registry.
Each hold remembers the registry that it was made in, so the child's copy is inert. A module with state that a child
must not use registers a function with `after_fork_in_child`.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import RLock
from _thread import _local as ThreadLocal
from time import monotonic

from . import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any

    from .locks.engine import Grant
    from .wait import Notified

    Inode = tuple[int, int]  # st_dev, st_ino
    Key = Hashable  # what is locked: an inode, or a name on a server
    Task = weakref.ref[object]
    Line = list[weakref.ref["LinePlace"]]  # in order of arrival
    Owner = tuple[object, Task | None]  # of a hold: the thread, and the task if there is one

_modules = sys.modules
_local = ThreadLocal()


def owns(mutex: RLock) -> bool:
    """Does this thread own the mutex? `threading.Condition` calls the same method; there is no public way."""
    return bool(mutex._is_owned())  # type: ignore[attr-defined]


def uses_greenlets() -> bool:
    """Did gevent or eventlet replace the blocking functions of the standard library? Then nothing may block the thread:
    all greenlets share it."""
    if "gevent.monkey" in _modules:
        return bool(_modules["gevent.monkey"].is_module_patched("time"))
    if "eventlet.patcher" in _modules:
        return bool(_modules["eventlet.patcher"].is_monkey_patched("time"))
    return False


def current_thread() -> object:
    """The running thread (or greenlet), as an object: the numbers of threads are used again."""
    if "greenlet" in _modules and uses_greenlets():
        return _modules["greenlet"].getcurrent()
    try:
        return _local.me
    except AttributeError:
        me = _local.me = object()
        return me


def current_task() -> object | None:
    """The running asyncio or trio task; the loop itself inside a callback; None in a plain thread."""
    if "asyncio" in _modules:
        running = getattr(_modules["asyncio"], "_get_running_loop", None)
        loop = running() if running is not None else None
        if loop is not None:
            return _modules["asyncio"].current_task(loop) or loop  # type: ignore[no-any-return]
    in_trio_task = getattr(_modules.get("trio.lowlevel"), "in_trio_task", None)
    return _modules["trio.lowlevel"].current_task() if in_trio_task is not None and in_trio_task() else None


def owner() -> Owner:
    """The running thread and the running task, as the registry of holds has them.

    The reference is weak: a task that is dropped together with its hold must be collectable, so that the hold is
    released. Every acquire calls this, so the result for a thread without tasks is kept.
    """
    if "asyncio" in _modules or "trio" in _modules or "greenlet" in _modules:
        task = current_task()
        return current_thread(), None if task is None else weakref.ref(task)
    try:
        me: tuple[object, None] = _local.owner
    except AttributeError:
        me = _local.owner = (current_thread(), None)
    return me


class Turn:
    """The right to take an exclusive lock again, for a moment, without joining the queue again.

    A lock that is handed over for every few microseconds of work spends its time in context switches. A holder that
    came through the queue may therefore acquire again, at most `ACQUISITIONS` times and within `SECONDS`, if the lock
    is free. Waiters are delayed by at most that, and their order does not change.
    """

    __slots__ = ("left", "thread", "until")

    ACQUISITIONS = 64
    SECONDS = 0.001

    def __init__(self, began: float) -> None:
        self.thread = current_thread()
        self.left = self.ACQUISITIONS
        self.until = began + self.SECONDS

    def take(self) -> bool:
        if self.left <= 0 or self.thread is not current_thread() or monotonic() > self.until:
            return False
        self.left -= 1
        return True


class LinePlace:
    """The place of one waiter in the line for `path`. Once `admitted`, it may use the file system.

    The waiter joins the queue of all processes and then calls `admit_next`. It calls `leave` in any case. The line has
    weak references: if an interrupt keeps a waiter from leaving, its place is free when it is collected.

    width: how many waiters may be admitted at a time
    """

    __slots__ = ("__weakref__", "_has_joined", "_line", "_me", "_notified", "_path", "_registry", "_width", "admitted")

    def __init__(self, path: str, width: int, notified: Notified) -> None:
        self._path = path
        self._width = width
        self._notified = notified
        self._registry = registry
        self._has_joined = self.admitted = False
        with registry.mutex:
            self._line = registry.lines.setdefault(path, [])
            self._me = weakref.ref(self)
            self._line.append(self._me)
            self._admit()

    def _admit(self) -> None:
        """Admit the next waiter, if fewer than `width` are admitted and all of these have joined the queue.

        A waiter whose event loop was closed cannot run any more. Its place is removed.
        """
        number = 0
        for reference in list(self._line):
            place = reference()
            if place is None or place._notified.is_dead():
                self._line.remove(reference)
                continue
            if not place.admitted and number < place._width:
                place.admitted = True
                place._notified.notify()
            if not place._has_joined:
                return
            number += 1

    @property
    def is_inherited(self) -> bool:
        """Does it belong to the parent of this process, whose wait a forked child unwinds?"""
        return self._registry is not registry

    def admit_next(self) -> None:
        """Admit the next waiter. A waiter that is not admitted calls it, too: the one in front may be collected."""
        with self._registry.mutex:
            self._has_joined = self.admitted
            self._admit()

    def leave(self) -> None:
        if self.is_inherited:
            return
        line, lines = self._line, registry.lines
        with registry.mutex:
            if self._me in line:
                line.remove(self._me)
            if line:
                self._admit()
            if not line and lines.get(self._path) is line:
                del lines[self._path]


def _has_ended(task: Task) -> bool:
    """Is an asyncio or trio task gone, or its coroutine finished?"""
    found: Any = task()
    coroutine = found.get_coro() if hasattr(found, "get_coro") else getattr(found, "coro", None)
    return getattr(coroutine, "cr_frame", None) is None


class Registry:
    """The state of one process. There is one, `process.registry`, and a new one in every forked child."""

    __slots__ = ("holds", "lines", "mutex", "turns")

    def __init__(self) -> None:
        # The owners of the live holds, by the grant of the hold. Popping the entry is the right to release the hold.
        self.holds: dict[Grant, Owner] = {}
        self.turns: dict[str, Turn] = {}
        self.lines: dict[str, Line] = {}
        # Reentrant: a generator collected in the middle of `LinePlace` may run `leave` in the same thread.
        self.mutex = RLock()

    def note_turn(self, path: str, began: float) -> None:
        """Note a `Turn` of the caller, which has just released the lock. began: when the lock was granted to it."""
        if len(self.turns) > 1000:
            self.turns.clear()
        self.turns[path] = Turn(began)

    def holds_of_caller(self, key: Key, *, asynchronous: bool, ended: bool = False) -> list[Grant]:
        """The grants of live holds on `key` that cannot be released while the caller waits.

        `ended`: also holds of tasks that have ended. Code outside the event loop may keep those.
        """
        thread = current_thread()
        task = current_task() if asynchronous else None
        return [
            grant
            for grant, (of_thread, of) in list(self.holds.items())
            if grant.key == key
            and of_thread is thread
            # A blocked thread stops all its tasks; a task that waits stops only itself and the code below its loop.
            and (not asynchronous or of is None or of() is task or (ended and _has_ended(of)))
        ]


registry = Registry()
descriptors: dict[int, int] = {}  # of every `files.OwnedFd` that is open, by the id of that object


class InheritedNumber(int):
    """The number of a descriptor that a forked child keeps."""


class SharedNumber(int):
    """The number of a descriptor that a library closes, too. Then it may be the number of another file by now."""

    inode: int

    def is_closed(self) -> bool:
        return system.fstat(self).st_ino != self.inode


_in_child: list[Callable[[], object]] = []
_held: list[tuple[RLock, Callable[[], object]]] = []
forks: list[None] = []  # one entry per fork under way: this may be a child whose hook has not run yet
_pid = os.getpid()


def hold_during_fork(mutex: RLock, before: Callable[[], object]) -> None:
    """Let a fork wait until no thread has this mutex, which protects a library that has mutexes of its own.

    before: called before the fork. Not called if the forking thread has the mutex: then a signal handler forks
    """
    _held.append((mutex, before))


def after_fork_in_child(reset: Callable[[], object]) -> None:
    """Call `reset` in every forked child, in the order of registration."""
    _in_child.append(reset)


def current_registry() -> Registry:
    """The registry of this process. In a child where another module's fork hook runs first, it runs our hook."""
    if forks:
        _begin_in_child()
    return registry


def _before_fork() -> None:
    for mutex, before in _held:
        is_inside = owns(mutex)
        mutex.acquire()
        if not is_inside:
            before()
    forks.append(None)


def _after_fork() -> None:
    forks.pop()
    for mutex, _ in _held:
        mutex.release()


def _begin_in_child() -> None:
    """The fork hook. If the hook of another module uses Holdfast first, it runs then, and not a second time."""
    global registry, _pid
    if _pid == os.getpid():  # another thread of the parent, or the second time
        return
    _pid = os.getpid()
    _after_fork()
    forks.clear()
    old, registry = registry, Registry()
    old.holds.clear()
    # A copy of the keys alone, each looked up again: garbage that is collected meanwhile closes its own descriptors.
    for key in list(descriptors):
        if isinstance(descriptors.get(key), InheritedNumber) or (fd := descriptors.pop(key, None)) is None:
            continue
        try:
            if not (isinstance(fd, SharedNumber) and fd.is_closed()):
                system.close(fd)
        except OSError:
            pass
    for reset in _in_child:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_in_child)
