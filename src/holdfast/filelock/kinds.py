"""`UnixFileLock`, `WindowsFileLock` and `SoftFileLock`."""

from __future__ import annotations

import sys

from .. import errors, owner
from .core import Core, NativeEngine
from .lock import BaseFileLock
from .options import UNSET_MODE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..locks.file_engine import FileEngine
    from ..locks.staleness import Judgement
    from .state import State

has_fcntl = sys.platform != "win32"
_OTHERS_WRITE = 0o022  # no other account may write a record that a waiter believes


class _NativeFileLock(BaseFileLock):
    """A kernel lock on all of the file. The file stays after the release, and may have content."""

    def _make_core(self, name: str, state: State) -> Core:
        is_exact = state.mode != UNSET_MODE
        mode = state.mode if is_exact else 0o666
        engine = NativeEngine(
            name, shared=False, keep=True, fair=True, mode=mode, content=True, exact_mode=is_exact, follow=False
        )
        return Core(engine, None)


class UnixFileLock(_NativeFileLock):
    """A lock with flock."""


class WindowsFileLock(_NativeFileLock):
    """A lock with LockFileEx."""


class SoftFileLock(BaseFileLock):
    """Held while its file exists. The file has the pid, the host and the start time of its holder.

    A holder on this machine that has ended is replaced at once. With `lifetime`, a holder is replaced after so many
    seconds, even if it is alive.
    """

    _has_lifetime = True

    @classmethod
    def _check_native_options(cls, preserve_lock_file: bool, on_acquired: object) -> None:
        if preserve_lock_file:
            text = f"preserve_lock_file=True is not supported by {cls.__name__}"
            raise ValueError(f"{text}: unlinking its marker is how it releases")
        if on_acquired is not None:
            text = f"on_acquired is not supported by {cls.__name__}"
            raise ValueError(f"{text}: only native locks expose the lock descriptor")

    def _make_core(self, name: str, state: State) -> Core:
        return Core(self._engine(name, state), None)

    def _engine(self, name: str, state: State) -> FileEngine:
        from .soft_engine import make

        is_exact = state.mode != UNSET_MODE
        mode = (state.mode if is_exact else 0o666) & ~_OTHERS_WRITE
        return make(name, mode=mode, exact_mode=is_exact, lifetime=state.lifetime)

    def _examine(self) -> Judgement | None:
        engine = self._core(self._state)._engine
        try:
            return engine.examine()  # type: ignore[attr-defined, no-any-return]
        except (errors.HoldfastError, OSError):
            return None

    def _holder_elsewhere(self, core: Core) -> str | None:
        found = self._examine()
        if found is None:
            return None
        record = found.record
        if record is None:
            return "an owner that recorded no PID (filelock before 3.22, or one that is still writing its record)"
        return None if owner.is_visible(record.host, record.start) else f"pid {record.pid} on {record.host}"

    @property
    def pid(self) -> int | None:
        """The pid in the lock file. None: there is no lock file, or no pid in it."""
        found = self._examine()
        return found.record.pid if found is not None and found.record is not None else None

    @property
    def is_lock_held_by_us(self) -> bool:
        """Does the lock file name this process?"""
        found, me = self._examine(), owner.me()
        if found is None or found.record is None or found.record.pid != me.pid:
            return False
        return owner.is_visible(found.record.host, found.record.start) and found.alive is not False

    def break_lock(self) -> None:
        """Remove the lock file of any holder."""
        from .soft_engine import remove

        try:
            remove(self._core(self._state)._engine)  # type: ignore[arg-type]
        except (errors.HoldfastError, OSError):
            pass
