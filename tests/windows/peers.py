"""Processes that run the code that a test sends, and programs that know nothing of Holdfast.

    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()")      waits for the answer; what the code raised is raised as `Raised`
    peer.begin("Lock(path).acquire()")          does not wait; `peer.answer()` does
    peer.until_waiting()                        until that code looks, finds the lock taken and pauses
    peer.kill()                                 TerminateProcess

The code sees the names of `holdfast`, those given to `start_peer`, and everything in this module.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from ctypes import wintypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Raised(Exception):
    """The code that a peer ran raised this. `name` is the name of the exception's class."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Peer:
    """A process that runs one piece of code at a time."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._expected = 0
        self._killed = False
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def _line(self) -> Any:
        line = self.process.stdout.readline()
        assert line, f"peer {self.process.pid} ended without an answer: {self.complaints()}"
        return json.loads(line)

    def _send(self, message: object) -> None:
        self._expected += 1
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def use(self, **names: object) -> None:
        """Forget everything, and know these names."""
        self._send(names)
        assert self.answer() == "nothing held"

    def begin(self, code: str) -> None:
        self._send(code)

    def until_waiting(self) -> None:
        assert self._line() == {"waiting": True}

    def answer(self) -> Any:
        reply = self._line()
        while "waiting" in reply:
            reply = self._line()
        self._expected -= 1
        if "error" in reply:
            raise Raised(reply["error"], reply["text"])
        return reply["value"]

    def do(self, code: str) -> Any:
        self.begin(code)
        return self.answer()

    @property
    def is_idle(self) -> bool:
        return not self._killed and not self._expected

    def rest(self) -> None:
        self.use()
        complaints = self.complaints()
        assert complaints == "", complaints

    def complaints(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def kill(self) -> None:
        self._killed = True
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        try:
            if self._expected:
                self.kill()
            self.process.stdin.close()
            self.process.wait()
            complaints = self.complaints()
            assert complaints == "", complaints
            assert self._killed or self.process.returncode == 0
        finally:
            self.process.stdout.close()
            self._errors.close()


# Another program's locks.

SHARING_VIOLATION, LOCK_VIOLATION = 32, 33
ALL, NONE = 7, 0
_kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
_kernel32.CreateFileW.restype = wintypes.HANDLE
_kernel32.CreateFileW.argtypes = (
    wintypes.LPCWSTR,
    wintypes.DWORD,
    wintypes.DWORD,
    ctypes.c_void_p,
    wintypes.DWORD,
    wintypes.DWORD,
    wintypes.HANDLE,
)
_kernel32.CloseHandle.argtypes = (wintypes.HANDLE,)


def avoid_what_wine_lacks() -> None:
    """Wine 8 has no CopyFile2, which shutil.copy2 calls wherever Python names it."""
    import _winapi

    if hasattr(_winapi, "CopyFile2") and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version"):
        del _winapi.CopyFile2


def open_sharing(path: str, share: int) -> int:
    """Open or create for reading and writing; `share`: what other programs may do meanwhile."""
    handle = _kernel32.CreateFileW(path, 0xC0000000, share, None, 4, 0, None)
    if handle == wintypes.HANDLE(-1).value:
        raise ctypes.WinError(ctypes.get_last_error())
    return handle


def lock_whole_file(handle: int, *, shared: bool = False) -> None:
    """As Rust's `File::try_lock` does it."""
    overlapped = (ctypes.c_uint64 * 4)()
    flags = 1 if shared else 3
    if not _kernel32.LockFileEx(wintypes.HANDLE(handle), flags, 0, 0xFFFFFFFF, 0xFFFFFFFF, overlapped):
        raise ctypes.WinError(ctypes.get_last_error())


def close_handle(handle: int) -> None:
    assert _kernel32.CloseHandle(handle)


# What follows runs in peers.


def count(lock: Any, counter: str, times: int) -> None:
    """Add to a number in a file in a way that loses counts unless the lock excludes all other processes."""
    for _ in range(times):
        with lock:
            with open(counter) as file:
                number = int(file.read())
            with open(counter, "w") as file:
                file.write(str(number + 1))


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what, default=repr) + "\n")
    sys.stdout.flush()


def _run(code: str, names: dict[str, Any]) -> Any:
    """The value of an expression; None for statements."""
    try:
        compiled = compile(code, "<peer>", "eval")
    except SyntaxError:
        exec(compile(code, "<peer>", "exec"), names)
        return None
    return eval(compiled, names)


def _serve() -> None:
    import holdfast.process
    from holdfast import wait
    from holdfast.system import windows

    waiting = False

    def announced(pause: Callable[..., None]) -> Callable[..., None]:
        """The same pause, reported to the test before the first one of each piece of code."""

        def announce(*arguments: Any) -> None:
            nonlocal waiting
            if not waiting:
                waiting = True
                _say({"waiting": True})
            pause(*arguments)

        return announce

    avoid_what_wine_lacks()
    # Every pause goes through one of these two: a step of a wait, or the loop around a blocking lock.
    wait.Pause.block = announced(wait.Pause.block)
    windows.sleep = announced(windows.sleep)
    public = {name: getattr(holdfast, name) for name in holdfast.__all__}
    names: dict[str, Any] = {}
    for line in sys.stdin:
        message = json.loads(line)
        waiting = False
        try:
            if isinstance(message, dict):
                names = {**globals(), **public, **message}
                reply = {"value": f"{len(holdfast.process.registry.holds) or 'nothing'} held"}
            else:
                reply = {"value": _run(message, names)}
        except BaseException as error:
            reply = {"error": type(error).__name__, "text": str(error)}
        _say(reply)


if __name__ == "__main__":
    _serve()
