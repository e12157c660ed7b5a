"""The state of a lock object: its options, its hold, and the number of its levels."""

from __future__ import annotations

import sys
from _thread import RLock
from _thread import _local as ThreadLocal
from math import isnan
from threading import current_thread

from .. import process
from . import options
from .core import Turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread
    from typing import Any

    from .core import Core, QuietHold

DEBUG, WARNING = 10, 30
_loggers: list[Any] = []  # the logger, when the program has imported `logging`


def log(level: int, message: str, *values: object) -> None:
    if not _loggers:
        if "logging" not in sys.modules:
            return
        _loggers.append(sys.modules["logging"].getLogger("filelock"))
    if _loggers[0].isEnabledFor(level):
        _loggers[0].log(level, message, *values)


class State:
    """The options and the hold of a lock, for one thread or for all."""

    __slots__ = (
        *("blocking", "core", "counter", "hold", "is_fixed", "lifetime", "lock_file"),
        *("mode", "mutex", "poll_interval", "thread", "timeout", "turns", "acquiring_thread"),
    )

    def __init__(self, lock_file: str, **values: Any) -> None:
        self.lock_file = lock_file
        self.timeout: float = values["timeout"]
        self.mode: int = values["mode"]
        self.blocking: bool = values["blocking"]
        self.poll_interval: float = values["poll_interval"]
        self.lifetime: float | None = values["lifetime"]
        self.core: Core | None = None
        self.is_fixed = False  # does the path mean the same file after a change of the working directory?
        self.hold: QuietHold | None = None
        self.counter = 0
        self.acquiring_thread = 0  # its ident; 0: no thread is in an acquire
        self.thread: Thread = current_thread()
        self.mutex = RLock()
        self.turns = Turns()


class ThreadStates(ThreadLocal):
    """A state per thread. Python calls `__init__` again in every thread, with the same arguments."""

    def __init__(self, make: Callable[[], State]) -> None:
        self.state = make()


class Configured:
    """The options of a lock object, as its users read and set them."""

    _close_error_policy: str
    _context_error_policy: str
    _fallback_to_soft: bool
    _is_singleton: bool
    _is_thread_local: bool
    _on_acquired: Callable[[int], None] | None
    _own_options: frozenset[str]
    _preserve_lock_file: bool
    _registry: process.Registry | None = None  # until `__init__`
    _shared: State | None
    _states: ThreadStates | None

    @property
    def _state(self) -> State:
        return self._shared or self._states.state  # type: ignore[union-attr]

    def is_thread_local(self) -> bool:
        return self._is_thread_local

    @property
    def is_singleton(self) -> bool:
        return self._is_singleton

    @property
    def context_error_policy(self) -> str:
        return self._context_error_policy

    @property
    def close_error_policy(self) -> str:
        return self._close_error_policy

    @property
    def fallback_to_soft(self) -> bool:
        return self._fallback_to_soft

    @property
    def preserve_lock_file(self) -> bool:
        return self._preserve_lock_file

    @property
    def on_acquired(self) -> Callable[[int], None] | None:
        return self._on_acquired

    @property
    def lock_file(self) -> str:
        return self._state.lock_file

    @property
    def timeout(self) -> float:
        return self._state.timeout

    @timeout.setter
    def timeout(self, value: float | str) -> None:
        if isinstance(value, str | bytes | bytearray):
            from warnings import warn

            warn("setting timeout from a string is deprecated: pass a number", DeprecationWarning, stacklevel=2)
            value = float(value)
        self._state.timeout = options.seconds("timeout", value)

    @property
    def blocking(self) -> bool:
        return self._state.blocking

    @blocking.setter
    def blocking(self, value: bool) -> None:
        options.check_blocking(value)
        self._state.blocking = value

    @property
    def poll_interval(self) -> float:
        return self._state.poll_interval

    @poll_interval.setter
    def poll_interval(self, value: float) -> None:
        self._state.poll_interval = options.check_poll_interval(value)

    @property
    def lifetime(self) -> float | None:
        return self._state.lifetime

    @lifetime.setter
    def lifetime(self, value: float | None) -> None:
        state = self._state
        state.lifetime = options.check_lifetime(value, type(self), level=3)
        state.core = None

    @property
    def mode(self) -> int:
        return 0o644 if self._state.mode == options.UNSET_MODE else self._state.mode

    @property
    def has_explicit_mode(self) -> bool:
        return self._state.mode != options.UNSET_MODE

    @property
    def is_locked(self) -> bool:
        return self._state.hold is not None and self._registry is process.current_registry()

    @property
    def lock_counter(self) -> int:
        return self._state.counter if self.is_locked else 0

    def _differences(self, wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The options of this object that are not those of another construction, as (ours, theirs)."""
        others = self._own_options - {"thread_local", "mode", "is_singleton"}
        ours = {name: getattr(self, name) for name in others}
        ours |= {"thread_local": self._is_thread_local, "mode": self._state.mode}
        return {
            name: (has, wanted[name])
            for name, has in ours.items()
            if name in wanted and not _is_same(name, has, wanted[name])
        }


def _is_same(name: str, one: Any, other: Any) -> bool:
    if name in ("on_acquired", "loop", "executor"):
        return one is other
    if name == "timeout":
        return _limit(one) == _limit(other)
    return bool(one == other)


def _limit(timeout: float) -> float | str:
    return "nan" if isnan(timeout) else -1.0 if timeout < 0 or timeout == float("inf") else timeout
