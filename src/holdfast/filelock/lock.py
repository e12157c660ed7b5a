"""`BaseFileLock`: a lock that knows whether it is held, and how often. Its holds are those of a lock of Holdfast.

With `thread_local=True`, the default, each thread has a state of its own: options, a hold and a counter. Otherwise all
threads share one state; one of them at a time acquires, and the others wait for it. In a forked child the object holds
nothing, and cannot be used: construct a new one.
"""

from __future__ import annotations

import os
from _thread import get_ident
from functools import wraps
from time import monotonic
from types import GenericAlias

from .. import errors, process, wait
from ..paths import absolute
from . import options
from .core import CANCEL_CHECK_S, seconds_left
from .errors import raise_as_os_error, raise_both, timed_out
from .state import DEBUG, WARNING, Configured, State, ThreadStates, log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn, TypeVar

    from .core import CancelCheck, Core, QuietHold

    Self = TypeVar("Self", bound="BaseFileLock")
    Function = TypeVar("Function", bound=Callable[..., Any])


def not_blocking() -> bool:
    """Stands for the cancel_check of an acquire that does not block: filelock never asks one."""
    return True


class AcquireReturnProxy:
    """What `acquire` returns. A `with` block of it releases the lock at its end."""

    __slots__ = ("lock",)
    __class_getitem__: Any = classmethod(GenericAlias)

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __enter__(self) -> Any:
        return self.lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock._leave_block(error)


class BaseFileLock(Configured, metaclass=options.FileLockMeta):
    """What all locks of this package share. A subclass makes the lock of Holdfast behind it."""

    _has_lifetime = False
    _warning_level = 3
    _init_is_ours = True
    _own_options = frozenset(
        (
            *("timeout", "mode", "thread_local", "blocking", "is_singleton", "poll_interval", "lifetime"),
            *("context_error_policy", "close_error_policy", "fallback_to_soft", "preserve_lock_file", "on_acquired"),
        )
    )

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._init_is_ours = cls.__init__.__module__.startswith(f"{__package__}.")

    def __init__(
        self,
        lock_file: str | os.PathLike[str],
        timeout: float = -1,
        mode: int = options.UNSET_MODE,
        thread_local: bool = True,
        *,
        blocking: bool = True,
        is_singleton: bool = False,
        poll_interval: float = 0.05,
        lifetime: float | None = None,
        context_error_policy: str = "chain",
        close_error_policy: str = "default",
        fallback_to_soft: bool = True,
        preserve_lock_file: bool = False,
        on_acquired: Callable[[int], None] | None = None,
    ) -> None:
        path: Any = os.fspath(lock_file)
        values: dict[str, Any] = {"timeout": timeout, "mode": mode, "blocking": blocking}
        values |= {"poll_interval": poll_interval, "lifetime": lifetime}
        self._held: set[State] = set()
        self._is_thread_local = thread_local
        self._states = ThreadStates(lambda: State(path, **values)) if thread_local else None
        self._shared = None if thread_local else State(path, **values)
        self._is_singleton = is_singleton
        self._context_error_policy = context_error_policy
        self._close_error_policy = close_error_policy
        self._fallback_to_soft = fallback_to_soft
        self._preserve_lock_file = preserve_lock_file
        self._on_acquired = on_acquired
        self._registry = process.current_registry()

    # What a subclass defines.

    def _make_core(self, name: str, state: State) -> Core:
        raise TypeError(
            f"{type(self).__name__} is not a lock: use FileLock or SoftFileLock, or derive from one of them"
        )

    def _holder_elsewhere(self, core: Core) -> str | None:
        """The holder on another machine, for Timeout."""

    @classmethod
    def _check_native_options(cls, preserve_lock_file: bool, on_acquired: object) -> None:
        """Raise ValueError for an option that this class cannot have."""

    # Acquiring.

    def acquire(
        self: Self,
        timeout: float | None = None,
        poll_interval: float | None = None,
        *,
        poll_intervall: float | None = None,
        blocking: bool | None = None,
        cancel_check: CancelCheck = None,
    ) -> AcquireReturnProxy:
        """Wait for the lock, or count one more level if this thread holds it.

        timeout: seconds; negative: for ever; None: the timeout of the object
        blocking: False: one attempt
        cancel_check: called about ten times a second while the caller waits. True ends the wait with Timeout
        poll_interval: has no effect

        Raises Timeout, and RuntimeError if another object of this thread holds the lock and the wait has no end.
        """
        if poll_intervall is not None:
            from warnings import warn

            warn("use poll_interval instead of poll_intervall", DeprecationWarning, stacklevel=2)
            poll_interval = poll_intervall
        state, seconds, stop = self._begin(timeout, poll_interval, blocking, cancel_check)
        if self._add_level(state):
            log(DEBUG, "Lock %s acquired on %s", id(self), state.lock_file)
        elif self._is_thread_local:
            self._acquire_alone(state, seconds, stop)
        else:
            self._acquire_in_turn(state, seconds, stop)
        return AcquireReturnProxy(self)

    def _begin(
        self, timeout: float | None, poll_interval: float | None, blocking: bool | None, cancel_check: CancelCheck
    ) -> tuple[State, float | None, CancelCheck]:
        """Check the arguments of an acquire. Returns the state of the caller, the seconds to wait, and what ends it."""
        self._check_process()
        state = self._state
        if blocking is None:
            blocking = state.blocking
        else:
            options.check_blocking(blocking)
        if poll_interval is not None:
            options.check_poll_interval(poll_interval)
        seconds = options.seconds_to_wait(state.timeout if timeout is None else timeout, blocking)
        return state, seconds, cancel_check if blocking else not_blocking

    def _check_process(self) -> None:
        if self._registry is not process.current_registry():
            name = f"{type(self).__name__} on {self.lock_file}"
            raise RuntimeError(f"{name} was inherited across fork; construct a new instance")

    def _add_level(self, state: State) -> bool:
        """Count one more level if the lock is held, and no other thread is still in its acquire. False: neither."""
        with state.mutex:
            if state.hold is None or state.acquiring_thread not in (0, get_ident()):
                return False
            state.counter += 1
            return True

    def _acquire_in_turn(self, state: State, timeout: float | None, cancel_check: CancelCheck) -> None:
        if state.acquiring_thread == get_ident():
            self._refuse_reentry(state)
        deadline = None if timeout is None else monotonic() + timeout
        notified = wait.Notified()
        place = state.turns.join(notified)
        try:
            if not place.admitted:
                stop = cancel_check if timeout != 0 else None
                wait.drive(wait.until_admitted(place, notified, deadline), stop, CANCEL_CHECK_S)
            if not self._add_level(state):
                self._acquire_alone(state, seconds_left(timeout, deadline), cancel_check)
        except (wait.DeadlinePassed, wait.Stopped):
            raise timed_out(state.lock_file, None, None) from None
        finally:
            place.leave()

    def _acquire_alone(self, state: State, timeout: float | None, cancel_check: CancelCheck) -> None:
        me = get_ident()
        if state.acquiring_thread == me:
            self._refuse_reentry(state)
        state.acquiring_thread = me
        hold = None
        try:
            log(DEBUG, "Attempting to acquire lock %s on %s", id(self), state.lock_file)
            core = self._core(state)
            found = self._first_attempt(core, timeout)
            if found:
                hold = core.hold(found)
            else:
                if timeout is None:
                    self._check_deadlock(core, asynchronous=False)
                if timeout != 0:
                    self._log_wait(state)
                hold = core.wait(found, timeout, cancel_check)
            self._set_held(state, hold)
        except BaseException as error:
            if hold is None and isinstance(error, errors.HoldfastError):
                self._raise_as_filelock(error, state, timeout, cancel_check)
            self._undo_acquire(state, hold)  # an error of the hook, or an interrupt
            raise
        finally:
            state.acquiring_thread = 0

    def _refuse_reentry(self, state: State) -> NoReturn:
        text = f"Deadlock: lock '{state.lock_file}' is acquired again while this thread's acquire of it waits"
        raise RuntimeError(text)

    def _core(self, state: State) -> Core:
        """The lock of Holdfast for the path as it is meant now. While it is held, the path means the same file."""
        core = state.core
        if core is not None and (state.is_fixed or state.hold is not None):
            return core
        path = os.fsdecode(state.lock_file)
        state.is_fixed = os.path.isabs(path)
        name = absolute(path)
        if os.pardir in path.split(os.sep):
            name = options.canonical(path)
            state.is_fixed = False
        if core is None or core.name != name:
            core = state.core = self._make_core(name, state)
        return core

    def _first_attempt(self, core: Core, timeout: float | None) -> Any:
        try:
            return core._engine.first_attempt(timeout)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(core.name), exist_ok=True)
            return core._engine.first_attempt(timeout)

    def _path_now(self) -> str:
        """The file that the path means, which stays the same while the lock is held."""
        state = self._state
        is_held = state.hold is not None and state.core is not None
        return options.canonical(state.core.name if is_held and state.core is not None else state.lock_file)

    def _check_deadlock(self, core: Core, *, asynchronous: bool) -> None:
        """Raise RuntimeError if the caller would wait for itself without end."""
        from ..files import inode_of
        from ..system import stat

        try:
            key = inode_of(stat(core.name))
        except OSError:
            return
        found = process.registry.holds_of_caller(key, asynchronous=asynchronous)
        owners = [process.registry.holds.get(grant) for grant in found]
        # Another task may release what code outside of all tasks has acquired.
        if any(owner is not None and (owner[1] is not None or not asynchronous) for owner in owners):
            who = f"{type(self).__name__} instance in this {'task' if asynchronous else 'thread'}"
            text = f"Deadlock: lock '{self.lock_file}' is already held by a different {who}."
            raise RuntimeError(f"{text} Use is_singleton=True to enable reentrant locking across instances.")

    def _log_wait(self, state: State) -> None:
        message = "Lock %s not acquired on %s, waiting %s seconds ..."
        log(DEBUG, message, id(self), state.lock_file, state.poll_interval)

    def _set_held(self, state: State, hold: QuietHold) -> None:
        """Note that the lock is held, and call the hook."""
        with state.mutex:
            state.counter = 1
            state.hold = hold
            self._held.add(state)
        if self._on_acquired is not None:
            self._on_acquired(hold.fileno())
        log(DEBUG, "Lock %s acquired on %s", id(self), state.lock_file)

    def _undo_acquire(self, state: State, hold: QuietHold | None) -> None:
        """Release the lock of an acquire that failed after it had taken it."""
        if hold is not None:
            with state.mutex:
                if state.hold is hold:
                    state.hold = None
                    state.counter = 0
                    self._held.discard(state)
            hold._drop()

    def _raise_as_filelock(
        self, error: errors.HoldfastError, state: State, timeout: float | None, cancel_check: CancelCheck
    ) -> NoReturn:
        if not isinstance(error, errors.Timeout):
            raise_as_os_error(error, os.fsdecode(state.lock_file))
        is_cancelled = error.status is None
        if cancel_check is not_blocking:
            why = "Failed to immediately acquire"
        else:
            if timeout == 0:  # nothing has asked yet
                is_cancelled = cancel_check is not None and cancel_check()
            why = "Cancellation requested for" if is_cancelled else "Timeout on acquiring"
        log(DEBUG, f"{why} lock %s on %s", id(self), state.lock_file)
        holder = self._holder_elsewhere(state.core) if state.core is not None else None
        raise timed_out(state.lock_file, error.status, holder) from (error if str(error) else None)

    # Releasing.

    def release(self, force: bool = False) -> None:
        """Leave one level; the last one releases the lock. A lock that is not held stays as it is.

        force: leave all levels, and release the holds of threads that have ended
        """
        if self._registry is not process.current_registry():
            return
        state = self._shared or self._states.state  # type: ignore[union-attr]  # a call could be interrupted
        hold, counter = state.hold, state.counter
        if hold is not None:
            try:
                self._leave_level(state, force)
            except BaseException as error:
                # An interrupt before anything changed: the caller will not release the lock a second time.
                if not isinstance(error, OSError) and state.hold is hold and state.counter == counter:
                    self._leave_level(state, force)
                raise
        if force:
            for other in [one for one in list(self._held) if not one.thread.is_alive()]:  # threads change it
                self._leave_level(other, True)

    def _leave_level(self, state: State, force: bool) -> None:
        with state.mutex:
            hold = state.hold
            if hold is None:
                return
            if state.counter > 1 and not force:
                state.counter -= 1
                return
            state.hold = None  # from here on, a hold that is dropped is released
            state.counter = 0
            self._held.discard(state)
        log(DEBUG, "Attempting to release lock %s on %s", id(self), state.lock_file)
        try:
            hold.release()
        except errors.LockLost as error:
            log(WARNING, "%s", error)
        log(DEBUG, "Lock %s released on %s", id(self), state.lock_file)

    def __enter__(self: Self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_block(error)

    def _leave_block(self, error: BaseException | None) -> None:
        try:
            self.release()
        except BaseException as failure:
            if error is None or self._context_error_policy == "chain":
                raise
            raise_both(error, failure)

    def __call__(self, function: Function) -> Function:
        """Decorate a function: the lock is held while it runs."""

        @wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            with self:
                return function(*args, **options)

        return inside  # type: ignore[return-value]

    def __del__(self) -> None:
        # Another thread may still get a singleton here, and hold it. It goes a moment later, and its holds with it.
        if self._registry is process.registry and not self._is_singleton:
            try:
                self._release_dropped()
            except Exception:  # a finalizer must not raise
                pass

    def _release_dropped(self) -> None:
        self.release(force=True)  # perhaps that of a subclass
