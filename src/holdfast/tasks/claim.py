"""A task that this process works on: `Claim`, and how a task is taken and ends.

    take       open its file, lock it, rename pending/… to running/…. Who cannot rename it was too late
    end        add a line to the file, and only then remove the name in running/ or rename it

A worker that dies in between leaves the file unlocked in running/, and whoever finds it there goes by its last line.
Whether it is still to be done is decided by who has it locked. A worker whose lock was lost (its machine was cut off,
and another one took the task) finds a newer token in the file, and its result is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import TracebackType

from .. import process, system
from ..errors import LockLost, NotLocked
from ..files import OwnedFd, inode_of, read_open, try_lock, write_at
from . import journal
from .journal import Task
from .places import Places, move, move_over, name_of
from .verdict import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .lines import Leaf

_A_LITTLE = 0.1  # seconds between two lines that say how far it is


class Claim:
    """A task that is ours until it is completed, failed or given back. `with` does one of these.

    `progress(done, total, note)` says how far it is.
    """

    outcome: str | None = None  # how it ended, if we have ended it
    _open = False
    _said_at = 0.0
    _progress_at = -1  # where the last line begins, if that says how far it is
    _unsaid: dict[str, object] | None = None  # how far it is, if that was too soon to be written

    def __init__(
        self, desk: Desk, file: OwnedFd, place: str, task: Task, text: bytes, leaf: Leaf | None = None
    ) -> None:
        self.task = task
        self.id = task.id
        self.payload = task.payload
        self.place = place
        self.leaf = leaf  # None: it has a file of its own
        self._desk = desk
        self._file = file
        self._end = self._begun = len(text)  # where the next line goes
        self._is_torn = not text.endswith(b"\n")  # somebody died while it wrote
        self._registry = process.registry
        self._mutex = RLock()  # a thread of the handler may say how far it is while it ends
        self._open = True

    @property
    def is_open(self) -> bool:
        """Is it still ours?"""
        return self._open

    @property
    def token(self) -> int:
        """Greater than that of every earlier attempt at this task."""
        return self.task.token

    def __repr__(self) -> str:
        return f"<claim of task {self.id!r}>"

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        if error is None:
            self.complete()
        elif isinstance(error, Exception):
            self.fail(error)
        else:
            self.give_back(f"{type(error).__name__}")

    def __del__(self) -> None:
        if self._open and self._registry is process.registry:
            self._desk.has_left_one = True
            self.abandon()

    # While it is being done.

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Say how far it is; for others to see, so not more than a few times in a second."""
        with self._mutex:
            now = monotonic()
            self._unsaid = {"progress": [done, total, note]}
            if now - self._said_at >= _A_LITTLE:
                self._said_at = now
                self._say_progress()

    def _say_progress(self) -> None:
        said, self._unsaid = self._unsaid, None
        if said is not None:
            self._replace_progress(journal.line(said))

    def _replace_progress(self, line: bytes) -> None:
        """In place of the last one, so that the file does not grow for as long as it takes."""
        self.check()
        begin, end = self._progress_at, self._end
        if begin < 0:
            begin = end
        else:
            self._end = begin
            line = line[:-1].ljust(end - begin - 1) + b"\n"
        self._add(line, check=False)
        self._progress_at = begin

    def check(self) -> None:
        """Raise LockLost if it was taken from us."""
        self._check_open()

    @property
    def cancelled(self) -> bool:
        """Has somebody asked for it to be ended?"""
        verdict = Verdict.of(self._desk.places, self.task)
        return verdict is not None and verdict.state == "cancelled"

    # What may become of it.

    def complete(self, result: object = None) -> None:
        """It is done. With `durable`, that is on disk when this returns."""
        line = journal.done_line(result)
        with self._mutex:  # a thread of the handler may just say how far it is
            leaf = self.leaf
            if leaf is None or self._end != self._begun or self._unsaid is not None or len(line) > leaf.longest:
                self._finish(line)
            else:
                if not self._open or self._registry is not process.registry:
                    self._check_open()
                leaf.complete(self.id, line, sync=self._desk.durable)
                self._open = False
            self.outcome = "done"

    def fail(self, error: BaseException | str, *, delay: float | None = None) -> bool:
        """It went wrong. It is tried again, after `delay` seconds, unless it was tried as often as it may be.

        True: it is tried again.
        """
        if self.cancelled:
            self.cancel()
            return False
        said = _describe(error)
        task = self.task
        if task.tried >= task.attempts:
            self._finish(journal.line({"is": "failed", **said}), self._desk.places.failed)
            self.outcome = "failed"
            return False
        wait = self._desk.delay_after(task.tried) if delay is None else delay
        return self._return(journal.line({"is": "pending", **said}), wait, "retried")

    def give_back(self, because: str = "given back") -> None:
        """Somebody else is to do it. This does not count as an attempt."""
        if self.cancelled:
            self.cancel()
            return
        self._return(journal.line({"is": "pending", "because": because, "uncounted": True}), 0.0, "given back")

    def cancel(self) -> None:
        """It is not to be done."""
        self._finish(journal.line({"is": "cancelled"}), self._desk.places.cancelled)
        self.outcome = "cancelled"

    def end_as(self, verdict: Verdict) -> None:
        """As somebody has decided who could not write it down: the worker had the file."""
        if verdict.state == "cancelled":
            self.cancel()
        elif verdict.state == "failed":
            self.fail(verdict.because)
        else:
            self.give_back(verdict.because)

    def settle(self) -> bool:
        """Its worker wrote down how it ended, and died before it was put away. True: now it is."""
        state = self.task.state
        if state == "pending" and self.task.tried:
            self._return(b"", 0.0)
        elif state in journal.ENDED:
            places = self._desk.places
            self._finish(b"", {"failed": places.failed, "cancelled": places.cancelled}.get(state))
        else:
            return False
        return True

    def abandon(self) -> None:
        """Let go of it as if this process had died."""
        with self._mutex:
            if self._open:
                self._close()
                self._desk.ended(self.task)

    def fileno(self) -> int:
        """The file of the task. Whoever inherits a copy of it keeps the task locked: a command, while it runs."""
        if self.leaf is not None:
            self.leaf.slot.is_shared = True
        return self._file.fd

    # Taking it.

    def begin(self) -> None:
        """Write down that we do it now."""
        task = self.task
        self._add(journal.running_line(task.token + 1))
        # It was made for this claim, and nobody else has seen it yet.
        task.__dict__.update(state="running", tried=task.tried + 1, token=task.token + 1)

    def put_back(self) -> None:
        """To where it waits, as it is."""
        self._return(b"", 0.0)

    def use(self, file: OwnedFd) -> None:
        """Its slot is another file by now."""
        self._file = file

    def has_file(self, file: OwnedFd) -> None:
        """It has one now: this, which is ours to close."""
        self.leaf = None
        self._file = file

    def say(self, **said: object) -> None:
        """Add a line."""
        self._add(journal.line(said))
        if self._desk.durable:
            system.fdatasync(self._file.fd)

    def is_named(self, path: str) -> bool:
        try:
            named, st = system.stat(path, follow_symlinks=False), system.fstat(self._file.fd)
        except FileNotFoundError:
            return False
        return inode_of(named) == inode_of(st)

    @property
    def inode(self) -> int:
        return system.fstat(self._file.fd).st_ino

    @property
    def renewed(self) -> int:
        """Changes whenever its worker gives a sign of life."""
        return system.fstat(self._file.fd).st_mtime_ns

    # How.

    def _return(self, line: bytes, delay: float, outcome: str | None = None) -> bool:
        """False: somebody has asked for it to be ended, after we had looked whether that was so."""
        with self._mutex:
            self._get_file()
            self._add_last(line)
            if line and self.cancelled:
                self.cancel()
                return False
            self.outcome = outcome
            try:
                self._desk.put_back(self.place, self.task.priority, delay)
            except FileNotFoundError:
                pass  # somebody has tidied up
            finally:
                self._close()
                self._desk.ended(self.task)
        return True

    def _finish(self, line: bytes, folder: str | None = None) -> None:
        with self._mutex:
            self._get_file()
            self._add_last(line)
            try:
                self._put_away(folder)
            finally:
                self._close()
                self._desk.ended(self.task)

    def _get_file(self) -> None:
        leaf = self.leaf
        if leaf is not None:
            self._check_open()
            if leaf.is_done:
                leaf.leave()
                self._open = False
                self._check_open()
            leaf.lines.detach(self)

    def _put_away(self, folder: str | None) -> None:
        if self._desk.durable:
            system.fdatasync(self._file.fd)
        path = f"{self._desk.places.running}/{self.place}"
        try:
            if folder is None:
                system.unlink(path)
            else:
                move_over(path, f"{folder}/{name_of(self.place)}")
        except FileNotFoundError:
            pass  # somebody has tidied up; the line is what counts

    def _add_last(self, line: bytes) -> None:
        if self._unsaid is not None:
            with suppress(TypeError, ValueError, RecursionError, OSError):  # it is no reason not to end
                self._say_progress()
        self._add(line)

    def _add(self, line: bytes, *, check: bool = True) -> None:
        with self._mutex:
            self._check_open(check)
            if self._is_torn and line:
                line = b"\n" + line
            write_at(self._file.fd, line, self._end)
            self._end += len(line)
            self._is_torn = False
            self._progress_at = -1

    def _check_open(self, check: bool = True) -> None:
        if not self._open:
            raise NotLocked(f"task {self.id!r} has ended for this worker already", path=self._desk.places.root)
        if check and not self._is_ours():
            self._close()
            raise self._lost()

    def _is_ours(self) -> bool:
        """Did nobody add a line? A locked file can only be written by who broke in, which is what we look for.

        By reading: the size may be one that this machine remembers.
        """
        return (
            self._open
            and self._registry is process.registry
            and (not self._desk.shared or not system.pread(self._file.fd, 1, self._end))
        )

    def _lost(self) -> LockLost:
        return LockLost(
            f"task {self.id!r} was taken from this worker, which was not heard of for too long, and given to another "
            "one. What it did does not count.",
            path=self._desk.places.root,
        )

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        # The collector of garbage may have come to the slot first, and closed it.
        file = self._file if self.leaf is None else self.leaf.slot.file
        with file:
            if file.is_open:
                self._desk.lock(file.fd, system.UN)  # first: a child of ours may have a copy of the descriptor


class Desk:
    """Takes tasks for one queue."""

    def __init__(
        self,
        places: Places,
        *,
        durable: bool,
        shared: bool,
        ranged: bool,
        mode: int,
        put_back: Callable[[str, int, float], None],
        ended: Callable[[Task], None],
        delay_after: Callable[[int], float],
    ) -> None:
        self.places = places
        self.durable = durable
        self.mode = mode
        self.shared = shared  # other machines may be at it, too
        self.lock = system.lock_past_end if ranged else system.lock
        self.has_left_one = False  # that one may take up again
        self.put_back = put_back
        self.ended = ended
        self.delay_after = delay_after

    def take(self, source: str, place: str, admit: Callable[[Task, str, str], bool]) -> Claim | None:
        """A task that waits at `source`. None: somebody else has it, or it may not be begun now."""
        claim = self.open(source, place)
        if claim is None:
            return None
        begun = False
        try:
            if claim.task.state in journal.ENDED:
                system.unlink(source)  # it was cancelled while it waited, or waited twice
            elif self._is_replaced(claim, source):
                claim.abandon()
                return self.take(source, place, admit)
            elif claim.task.key is None or admit(claim.task, source, place):
                move(source, f"{self.places.running}/{place}")
                claim.begin()
                begun = True
        except FileNotFoundError:
            pass  # somebody was quicker
        finally:
            if not begun:
                claim.abandon()
        return claim if begun else None

    def _is_replaced(self, claim: Claim, source: str) -> bool:
        """Editors write a new file. Then what waits is not what its name says any more, and is made so again."""
        own = f"{self.places.tasks}/{name_of(claim.place)}"
        if claim.is_named(own):
            return False
        private = f"{self.places.new}/{os.getpid()}.{os.urandom(8).hex()}"
        try:
            system.link(own, private)
        except FileNotFoundError:
            return False  # somebody has removed it; what waits is all there is of it
        system.rename(private, source)
        return True

    def abandoned(self, place: str) -> Claim | None:
        """A task in running/ that nobody has locked, as its worker left it. None: somebody works on it."""
        path = f"{self.places.running}/{place}"
        # First with a descriptor that can only read: to close one that can write is news to all who watch.
        if not self.shared and self.is_locked(path):
            return None
        claim = self.open(path, place)
        if claim is not None and not claim.is_named(path):
            claim.abandon()
            return None
        return claim

    def open_named(self, path: str, place: str) -> Claim | None:
        """`open`, and what is locked is what has this name now: it may have been purged, and put again, meanwhile."""
        while True:
            claim = self.open(path, place)
            if claim is None or claim.is_named(path):
                return claim
            claim.abandon()

    def open(self, path: str, place: str) -> Claim | None:
        """Lock the file of a task, and read it. None: it is gone, or somebody has it."""
        try:
            file = OwnedFd(system.open_fd(path, system.O_EXISTING))
        except FileNotFoundError:
            return None
        claim = None
        try:
            self.lock(file.fd, system.EX_NB)
            text = read_open(file.fd)
            claim = Claim(self, file, place, journal.parse(text, path), text)
        except BlockingIOError:
            pass
        finally:
            if claim is None:
                file.close()
        return claim

    def is_locked(self, path: str) -> bool:
        """Does somebody work on it?"""
        try:
            file = OwnedFd(system.open_fd(path, system.O_EXISTING if self.shared else system.O_READ))
        except FileNotFoundError:
            return False
        with file:
            if not stat.S_ISREG(system.fstat(file.fd).st_mode):
                raise OSError(errno.EINVAL, "this is no file", path)
            if not try_lock(file.fd, system.EX_NB if self.shared else system.SH_NB, self.lock):
                return True
            self.lock(file.fd, system.UN)
            return False


def _describe(error: BaseException | str) -> dict[str, object]:
    if isinstance(error, str) or getattr(error, "says_all", False):
        output = getattr(error, "output", "")
        return {"because": str(error), **({"output": output} if output else {})}
    from traceback import format_exception, format_exception_only

    text = "".join(format_exception_only(type(error), error)).strip()
    return {"because": text, "traceback": "".join(format_exception(type(error), error, error.__traceback__))}
