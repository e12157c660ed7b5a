"""Getting rid of versions of a directory that nobody needs any more.

What cannot be removed (a file made immutable, another user's, something mounted in it) is left where it is and said
in the log: it is no reason to keep writers from their work, and the next one tries again.
"""

from __future__ import annotations

import os
from collections import deque
from threading import Lock, Thread
from time import monotonic, sleep

from .. import process, system
from ..files import OwnedFd, try_lock
from . import trees

GRACE_S = 0.2  # so long, a reader that took no lock can read a replaced version that it has just opened


def discard(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        trees.remove(path)
    else:
        try:
            system.unlink(path)
        except FileNotFoundError:
            pass


def drop(path: str) -> None:
    """Remove what was being built and is not wanted, if that can be done."""
    try:
        discard(path)
    except OSError as error:
        say_left(path, error)


def remove_unused(gone: str) -> None:
    """Remove what was a version, unless a snapshot uses it."""
    try:
        folder = OwnedFd(system.open_fd(gone, system.O_SYNCABLE_FOLDER))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (PermissionError, IsADirectoryError):  # the second on Windows, which opens no directory
        discard(gone)  # nobody could have a snapshot of it either
        return
    with folder:
        if try_lock(folder.fd, system.EX_NB):
            discard(gone)


def say_left(path: str, error: BaseException) -> None:
    import logging

    logging.getLogger("holdfast").warning("%s is left; the next writer tries to remove it again: %s", path, error)


class Later:
    """Removes old versions in a thread, a moment after they were given up, so that a commit does not wait for it."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._waiting: deque[tuple[float, str]] = deque()
        self._running = False

    def remove(self, path: str) -> None:
        with self._mutex:
            self._waiting.append((monotonic() + GRACE_S, path))
            if self._running:
                return
            self._running = True
        # No daemon: a program that ends does so a moment later rather than leave the old version to the next one.
        try:
            Thread(target=self._run, name="holdfast removes old versions").start()
        except RuntimeError:  # the program is ending already
            self._run()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._running = False
                    return
                due, path = self._waiting.popleft()
            sleep(max(0.0, due - monotonic()))
            try:
                remove_unused(path)
            except OSError:
                pass  # the next writer tries again, and says so
            except BaseException as error:  # whatever it is, the others still wait to be removed
                say_left(path, error)


later = Later()


def remove_later(path: str) -> None:
    later.remove(path)


def _forget_thread() -> None:
    global later
    later = Later()


process.after_fork_in_child(_forget_thread)
