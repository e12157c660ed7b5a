"""Types for annotations. `typing` takes longer to import than the locks, so this module is loaded on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

ContextErrorPolicy = Literal["chain", "group"]
CloseErrorPolicy = Literal["default", "raise", "suppress"]


class LockOptions(TypedDict, total=False):
    """The options of a lock, for a subclass that passes them on."""

    timeout: float
    mode: int
    thread_local: bool
    blocking: bool
    is_singleton: bool
    poll_interval: float
    lifetime: float | None
    context_error_policy: ContextErrorPolicy
    close_error_policy: CloseErrorPolicy
    fallback_to_soft: bool
    preserve_lock_file: bool
    on_acquired: Callable[[int], None] | None
