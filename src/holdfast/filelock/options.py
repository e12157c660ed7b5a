"""The options of a lock, checked as filelock checks them, and the classes that share one object per path."""

from __future__ import annotations

import os
from _thread import RLock
from abc import ABCMeta
from math import inf, isfinite, isnan, nan, ulp
from threading import TIMEOUT_MAX
from weakref import WeakValueDictionary

from .. import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UNSET_MODE = -1  # no mode was passed: the umask decides
_OWNER_READS_AND_WRITES = 0o600
POLICIES = {
    "context_error_policy": ("chain", "group"),
    "close_error_policy": ("default", "raise", "suppress"),
}


def seconds(name: str, value: Any) -> float:
    """A number of seconds as a float. Any kind of number, but no bool and no text."""
    if type(value) is float or type(value) is int:
        number: Any = value
    else:
        number = _other_number(name, value)
    try:
        found = float(number)
    except OverflowError:
        raise ValueError(f"{name} is too large to be a number of seconds: {value!r}") from None
    return -ulp(0.0) if found == 0 and number < 0 else found  # a tiny negative number stays negative


def _other_number(name: str, value: Any) -> Any:
    from decimal import Decimal
    from numbers import Real

    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    return nan if isinstance(value, Decimal) and value.is_snan() else value


def check_blocking(blocking: object) -> None:
    if not isinstance(blocking, bool):
        raise TypeError(f"blocking must be a bool, not {type(blocking).__name__}")


def check_poll_interval(value: Any) -> float:
    found = seconds("poll_interval", value)
    if found < 0 or not isfinite(found):
        raise ValueError(f"poll_interval must be finite and non-negative, not {found!r}")
    if found > TIMEOUT_MAX:
        raise ValueError(f"poll_interval must not exceed threading.TIMEOUT_MAX ({TIMEOUT_MAX}), got {found!r}")
    return found


def seconds_to_wait(timeout: Any, blocking: bool) -> float | None:
    """How long an acquire waits: None for ever, 0 for one attempt."""
    found = seconds("timeout", timeout)
    if not blocking:
        return 0.0
    if isnan(found):
        raise ValueError("timeout must be a number of seconds, not nan")
    return None if found < 0 or found == inf else found


def check_mode(mode: Any, kind: str) -> None:
    if mode == UNSET_MODE:
        return
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise TypeError(f"mode must be an int, not {type(mode).__name__}")
    if not 0 <= mode <= 0o777:
        raise ValueError(f"mode={mode:#o} must be within 0o000-0o777 for {kind}")
    if ~mode & _OWNER_READS_AND_WRITES:
        raise ValueError(f"mode={mode:#o} must grant the owner read and write for {kind}")


def check_policy(name: str, value: object) -> None:
    allowed = POLICIES[name]
    if value not in allowed:
        *others, last = (repr(one) for one in allowed)
        text = f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}"
        raise ValueError(f"{name} must be {text}, got {value!r}")


def check_lifetime(value: Any, kind: Any, *, level: int) -> float | None:
    """The lifetime of a lock of this class. A class that has none ignores it with a warning."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        value = seconds("lifetime", value)
    if value < 0 or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"lifetime must be finite and non-negative, not {value!r}")
    from warnings import warn

    if not kind._has_lifetime:
        text = f"lifetime is ignored for {kind.__name__}: a kernel lock cannot be taken away by the age of its file"
        warn(f"{text}; only SoftFileLock has one", stacklevel=level)
        return None
    from .errors import SoftFileLockLifetimeWarning

    text = f"{kind.__name__}(lifetime=...) goes by the age of the file, and can take the lock away from a live holder"
    warn(f"{text}; use holdfast.LockFile(heartbeat=...)", SoftFileLockLifetimeWarning, stacklevel=level)
    found: float = value
    return found


def canonical(path: str | os.PathLike[str]) -> str:
    """One key for all spellings of a path. A symlink at its end stays."""
    parent, name = os.path.split(os.fspath(path))
    resolve = os.path.abspath if os.name == "nt" else os.path.realpath
    return os.path.join(resolve(parent or os.curdir), name)


class Singletons:
    """The objects of the classes with `is_singleton=True`, one per class and path, as long as one is in use."""

    def __init__(self) -> None:
        self.begin()
        process.after_fork_in_child(self.begin)

    def begin(self) -> None:
        self.mutex = RLock()
        self.objects: WeakValueDictionary[tuple[type, str], Any] = WeakValueDictionary()

    def get(self, kind: type, path: Any, make: Callable[[], Any], differences: Callable[[Any], dict[str, Any]]) -> Any:
        """Return the object of this class for the path, or make it."""
        key = kind, canonical(path)
        with self.mutex:
            found = self.objects.get(key)
            if found is None or found._path_now() != key[1]:
                found = self.objects[key] = make()
                return found
        different = differences(found)
        if different:
            lines = [
                f"\n\t{name} (existing lock has {has} but {want} was passed)" for name, (has, want) in different.items()
            ]
            text = "Singleton lock instances cannot be initialized with differing arguments\nNon-matching arguments: "
            raise ValueError(text + "".join(lines))
        return found


singletons = Singletons()


class FileLockMeta(ABCMeta):
    """Checks the options of a new lock, and passes those on that the `__init__` of its class accepts."""

    def __call__(
        cls,
        lock_file: str | os.PathLike[str],
        timeout: float = -1,
        mode: int = UNSET_MODE,
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
        **more: Any,
    ) -> Any:
        kind: Any = cls
        options = {
            "timeout": seconds("timeout", timeout),
            "mode": mode,
            "thread_local": thread_local,
            "blocking": blocking,
            "is_singleton": is_singleton,
            "poll_interval": check_poll_interval(poll_interval),
            "lifetime": check_lifetime(lifetime, kind, level=kind._warning_level),
            "context_error_policy": context_error_policy,
            "close_error_policy": close_error_policy,
            "fallback_to_soft": fallback_to_soft,
            "preserve_lock_file": preserve_lock_file,
            "on_acquired": on_acquired,
            **more,
        }
        check_blocking(blocking)
        check_mode(mode, cls.__name__)
        for policy in POLICIES:
            check_policy(policy, options[policy])
        kind._check_native_options(preserve_lock_file, on_acquired)
        options = accepted(cls, options)

        def make() -> Any:
            return super(FileLockMeta, cls).__call__(lock_file, **options)

        if not is_singleton:
            return make()
        wanted = {"timeout": options.get("timeout", timeout), **options}
        return singletons.get(cls, lock_file, make, lambda found: found._differences(wanted))


def accepted(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a subclass with an `__init__` of its own accepts. The others must have their defaults."""
    if getattr(kind, "_init_is_ours", False):
        known = kind._own_options  # type: ignore[attr-defined]
        unknown = sorted(name for name in options if name not in known)
        parameters = dict.fromkeys(known)
    else:
        from inspect import Parameter, signature

        found = signature(kind.__init__).parameters  # type: ignore[misc]
        if any(one.kind is Parameter.VAR_KEYWORD for one in found.values()):
            return options
        defaults = {name: one.default for name, one in signature(type(kind).__call__).parameters.items()}
        parameters = {
            name: None
            for name, one in found.items()
            if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        }
        unknown = sorted(
            name
            for name, value in options.items()
            if name not in parameters and (name not in defaults or value != defaults[name])
        )
    if unknown:
        raise TypeError(f"{kind.__name__} does not support non-default lock options: {', '.join(unknown)}")
    return {name: value for name, value in options.items() if name in parameters}
