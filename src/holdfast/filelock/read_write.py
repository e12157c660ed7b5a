"""`ReadWriteLock`: readers share, a writer excludes. Kernel locks on an empty file, which stays.

The object is reentrant in one mode: all readers of a process share one hold, and the writing thread may acquire again.
A change of the mode raises RuntimeError. The ReadWriteLock of the package filelock locks an SQLite database instead, so
the two do not exclude each other. A path with such a database is refused.
"""

from __future__ import annotations

import os
from _thread import RLock, get_ident
from contextlib import contextmanager
from time import monotonic

from .. import errors, process, wait
from ..locks.lock import WholeFile
from ..paths import absolute
from .core import Core, NativeEngine, QuietHold, Turns, seconds_left
from .errors import is_directory, raise_as_os_error, timed_out
from .lock import AcquireReturnProxy
from .options import canonical, seconds_to_wait, singletons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Literal, NoReturn

    Mode = Literal["read", "write"]


def read_write_timeout(timeout: float, blocking: bool) -> float | None:
    found = seconds_to_wait(timeout, blocking)
    if found is None and timeout not in (-1, float("inf")):
        raise ValueError(f"timeout must be a non-negative number or -1, not {float(timeout)!r}")
    return found


def make_core(path: str, mode: Mode, timeout: float | None) -> Core:
    name = canonical(path) if os.pardir in path.split(os.sep) else absolute(path)
    kind = WholeFile if timeout is None else NativeEngine
    engine = kind(name, shared=mode == "read", keep=True, fair=True, mode=0o666, follow=False)
    return Core(engine, None)


def first_attempt(core: Core, timeout: float | None) -> Any:
    os.makedirs(os.path.dirname(core.name), exist_ok=True)
    return core._engine.first_attempt(timeout)


def raise_refused(error: errors.HoldfastError, path: str) -> NoReturn:
    if isinstance(error, errors.Timeout):
        raise timed_out(path, error.status, None) from (error if str(error) else None)
    if isinstance(error, errors.WouldDeadlock):
        raise RuntimeError(f"Deadlock: {error}") from error  # noqa: TRY004  # as filelock does
    if isinstance(error, errors.NotALockFile) and not is_directory(path):
        text = f"{path} has content, perhaps as the database of a ReadWriteLock of the package filelock. Give the lock"
        message = f"{text} another path, or remove the file when no program uses it."
        raise errors.NotALockFile(message, path=path) from error
    raise_as_os_error(error, path)


def change_of_mode(lock: str, held: Mode | None, wanted: Mode) -> RuntimeError:
    change = "upgrade" if wanted == "write" else "downgrade"
    return RuntimeError(f"Cannot acquire {wanted} {lock}: already holding a {held} lock ({change} not allowed)")


class ReadWriteLockMeta(type):
    def __call__(
        cls, lock_file: Any, timeout: float = -1, *, blocking: bool = True, is_singleton: bool = True, **more: Any
    ) -> Any:
        def make() -> Any:
            return super(ReadWriteLockMeta, cls).__call__(
                lock_file, timeout, blocking=blocking, is_singleton=is_singleton, **more
            )

        def differences(found: Any) -> dict[str, tuple[Any, Any]]:
            wanted = {"timeout": timeout, "blocking": blocking}
            return {
                name: (getattr(found, name), value) for name, value in wanted.items() if getattr(found, name) != value
            }

        return singletons.get(cls, lock_file, make, differences) if is_singleton else make()


class ReadWriteLock(metaclass=ReadWriteLockMeta):
    """A lock between processes with one writer or any number of readers.

    timeout: seconds to wait; -1: for ever
    blocking: False: one attempt
    is_singleton: one object per path
    """

    def __init__(
        self,
        lock_file: str | os.PathLike[str],
        timeout: float = -1,
        *,
        blocking: bool = True,
        is_singleton: bool = True,
    ) -> None:
        self.lock_file: Any = os.fspath(lock_file)
        self.timeout = timeout
        self.blocking = blocking
        self._registry = process.current_registry()
        self._mutex = RLock()
        self._turns = Turns()
        self._hold: QuietHold | None = None
        self._mode: Mode | None = None
        self._levels: dict[int, int] = {}  # by thread
        self._is_closed = False

    def _path_now(self) -> str:
        return canonical(self.lock_file)

    @classmethod
    def get_lock(
        cls, lock_file: str | os.PathLike[str], timeout: float = -1, *, blocking: bool = True
    ) -> ReadWriteLock:
        """Return the one object for the path."""
        return cls(lock_file, timeout, blocking=blocking)

    def acquire_read(self, timeout: float | None = None, *, blocking: bool | None = None) -> AcquireReturnProxy:
        """Share the lock with other readers. Raises Timeout, and RuntimeError if this object holds it for writing."""
        return self._acquire("read", timeout, blocking)

    def acquire_write(self, timeout: float | None = None, *, blocking: bool | None = None) -> AcquireReturnProxy:
        """Hold the lock alone. Raises Timeout, and RuntimeError if another thread holds it through this object."""
        return self._acquire("write", timeout, blocking)

    @contextmanager
    def read_lock(self, timeout: float | None = None, *, blocking: bool | None = None) -> Iterator[None]:
        self.acquire_read(timeout, blocking=blocking)
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def write_lock(self, timeout: float | None = None, *, blocking: bool | None = None) -> Iterator[None]:
        self.acquire_write(timeout, blocking=blocking)
        try:
            yield
        finally:
            self.release()

    def _acquire(self, mode: Mode, timeout: float | None, blocking: bool | None) -> AcquireReturnProxy:
        blocking = self.blocking if blocking is None else blocking
        seconds = read_write_timeout(self.timeout if timeout is None else timeout, blocking)
        self._check_usable()
        if not self._add_level(mode):
            deadline = None if seconds is None else monotonic() + seconds
            notified = wait.Notified()
            place = self._turns.join(notified)
            try:
                if not place.admitted:
                    wait.drive(wait.until_admitted(place, notified, deadline))
                if not self._add_level(mode):
                    self._take(mode, seconds_left(seconds, deadline))
            except wait.DeadlinePassed:
                raise timed_out(self.lock_file, None, None) from None
            except errors.HoldfastError as error:
                raise_refused(error, self.lock_file)
            finally:
                place.leave()
        return AcquireReturnProxy(self)

    def _take(self, mode: Mode, timeout: float | None) -> None:
        self._check_usable()
        core = make_core(self.lock_file, mode, timeout)
        found = first_attempt(core, timeout)
        hold = core.hold(found) if found else core.wait(found, timeout, None)
        with self._mutex:
            self._hold, self._mode, self._levels = hold, mode, {get_ident(): 1}

    def _check_usable(self) -> None:
        if self._registry is not process.current_registry():
            raise RuntimeError(f"ReadWriteLock on {self.lock_file} was invalidated by fork(); construct a new instance")
        if self._is_closed:
            raise RuntimeError(f"ReadWriteLock on {self.lock_file} is closed; construct a new instance")

    def _add_level(self, mode: Mode) -> bool:
        """Count one more level if the lock is held in this mode."""
        me = get_ident()
        with self._mutex:
            if self._hold is None:
                return False
            lock = f"lock on {self.lock_file} (lock id: {id(self)})"
            if mode != self._mode:
                raise change_of_mode(lock, self._mode, mode)
            if mode == "write" and me not in self._levels:
                (other,) = self._levels
                raise RuntimeError(f"Cannot acquire write {lock} from thread {me} while it is held by thread {other}")
            self._levels[me] = self._levels.get(me, 0) + 1
            return True

    def release(self, *, force: bool = False) -> None:
        """Leave one level; the last one releases the lock. Raises RuntimeError if the thread holds none.

        force: leave all levels
        """
        if self._registry is not process.current_registry():
            return
        me = get_ident()
        with self._mutex:
            if not force and me not in self._levels:
                lock = f"lock on {self.lock_file} (lock id: {id(self)})"
                raise RuntimeError(
                    f"Cannot release a {lock} that is not held"
                    if self._hold is None
                    else f"Cannot release {self._mode} {lock} from thread {me}, which does not hold it"
                )
            hold = self._leave_level(me, force)
        if hold is not None:
            hold.release_if_held()

    def _leave_level(self, me: int, force: bool) -> QuietHold | None:
        """Leave a level. Returns the hold if that was the last one."""
        if not force:
            self._levels[me] -= 1
            if not self._levels[me]:
                del self._levels[me]
            if self._levels:
                return None
        hold, self._hold, self._mode, self._levels = self._hold, None, None, {}
        return hold

    def _leave_block(self, error: BaseException | None) -> None:  # of the proxy
        self.release()

    def close(self) -> None:
        """Release the lock, whichever thread holds it. The object cannot be used any more."""
        self.release(force=True)
        self._is_closed = True

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is not None and self._registry is process.registry:
            hold._drop()
