"""`holdfast doctor`: what the file system of a directory really does, found out by trying.

Everything happens in a directory of its own, which is gone afterwards. "Two processes" are this one and a child.
A server is tested by `server_doctor`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

from .. import Lock, LockFile, Semaphore, system
from ..errors import HoldfastError, Unsupported
from ..files import InheritedFd, OwnedFd, create_file, pipe, sync_directory
from ..locks.publish import Entry, FileLocation, PublishedFile, publish
from ..paths import find_mount
from . import arguments, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from ..paths import Mount

EXAMPLES = """\
exit status: 0 every kind of lock is safe there; 1 some are not; 2 wrong usage; 3 an error

examples:
  holdfast doctor /tmp
  holdfast doctor --json .
"""
_PATIENCE = 2.0  # seconds for an event to come


class Finding:
    """What a check found: `good` is None where something is merely not there, and something else does its work."""

    def __init__(self, what: str, good: bool | None, note: str = "") -> None:
        self.what = what
        self.good = good
        self.note = note


def configure(name: str, parser: arguments.Parser) -> None:
    parser.epilog = f"{arguments.URLS}The test uses a random name.\n\n{EXAMPLES}"
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="a directory, a path in it, or the URL of a server"
    )
    arguments.add_json(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    if arguments.is_url(options.path):
        from . import server_doctor

        return server_doctor.call(options)
    if not hasattr(os, "fork"):
        raise Unsupported("holdfast doctor needs a second process by fork, which this system does not have")
    os.stat(options.path)  # a share that is not mounted is not there
    directory = options.path if os.path.isdir(options.path) else os.path.dirname(options.path) or "."
    room = os.path.join(directory, f".holdfast-doctor-{os.getpid()}-{os.urandom(4).hex()}")
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    try:
        try:
            os.mkdir(room, 0o700)
        except OSError as error:
            raise OSError(error.errno, f"nothing can be made there ({error.strerror})", directory) from None
        mount = find_mount(system.mount_table(), os.stat(room).st_dev, os.path.realpath(room))
        findings = [_tried(what, check, room) for what, check in CHECKS.items()]
        verdicts = [_tried(what, check, room) for what, check in KINDS.items()]
    finally:
        _remove(room)
    safe = all(finding.good for finding in verdicts)
    if options.json:
        output.say_json(
            {
                "directory": os.path.realpath(directory),
                "file_system": mount.kind or "local",
                "mounted_at": mount.where,
                "checks": {finding.what: {"good": finding.good, "note": finding.note} for finding in findings},
                "kinds": {finding.what: {"safe": finding.good, "note": finding.note} for finding in verdicts},
                "safe": safe,
            }
        )
    else:
        _show(directory, mount, findings, verdicts, safe)
    return 0 if safe else 1


def _show(directory: str, mount: Mount, findings: list[Finding], verdicts: list[Finding], safe: bool) -> None:
    kind = mount.kind or "a local disk"
    output.say(f"{output.shown(os.path.realpath(directory))}: {kind}, mounted at {output.shown(mount.where)}\n")
    width = max(len(finding.what) for finding in [*findings, *verdicts])
    for finding in findings:
        say_finding(finding, width, {True: "yes", False: "NO", None: "-"})
    output.say("")
    for finding in verdicts:
        say_finding(finding, width, {True: "safe", False: "NOT SAFE", None: "-"})
    verdict = "Every kind of lock is safe here." if safe else "Not every kind of lock is safe here."
    output.say("\n" + output.coloured(verdict, output.GREEN if safe else output.RED))


def say_finding(finding: Finding, width: int, words: dict[bool | None, str]) -> None:
    colour = {True: output.GREEN, False: output.RED, None: output.DIM}[finding.good]
    result = output.coloured(f"{words[finding.good]:8}", colour)
    output.say(f"  {finding.what:{width}}  {result}  {output.shown(finding.note)}".rstrip())


def _tried(what: str, check: Callable[[str], Finding | bool | None], room: str) -> Finding:
    try:
        found = check(room)
    except (HoldfastError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Finding(what, False, text)
    if isinstance(found, Finding):
        found.what = what
        return found
    return Finding(what, found)


def _remove(room: str) -> None:
    if not os.path.isdir(room):
        return
    for folder, directories, files in os.walk(room, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
        for name in directories:
            os.rmdir(os.path.join(folder, name))
    os.rmdir(room)


# Two processes.


class Other:
    """A child that does something, says so, and stays until `go_on`, or until the `with` block is left.

    Then it calls `then` with the result of the action, and ends.
    """

    def __init__(self, action: Callable[[], Any], then: Callable[[Any], object] = id) -> None:
        self._action, self._then = action, then

    def __enter__(self) -> Other:
        ready, told = pipe(writer=InheritedFd)
        go_on, self._go_on = pipe(reader=InheritedFd)
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                kept = self._action()  # until this process ends: then the kernel releases it
                os.write(told.fd, b"1")
                os.read(go_on.fd, 1)
                self._then(kept)
                code = 0 if kept is not None else 1
            except BaseException:
                pass
            finally:
                os._exit(code)
        told.close()
        go_on.close()
        with ready:
            self.did = os.read(ready.fd, 1) == b"1"
        return self

    def go_on(self) -> None:
        self._go_on.close()

    def __exit__(self, *_: object) -> None:
        self.go_on()
        os.waitpid(self._pid, 0)


def _excluded(room: str, name: str, lock: Callable[[int], Any]) -> bool:
    """Does a lock of another process keep us out, and let us in when it has gone?"""
    path = os.path.join(room, name)

    def take() -> OwnedFd:
        file = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        lock(file.fd)
        return file

    with Other(take) as other:
        if not other.did:
            raise OSError(errno.ENOLCK, "not even the first lock was granted")
        try:
            take().close()
            return False
        except BlockingIOError:
            pass
    take().close()
    return True


def _flock(room: str) -> bool:
    return _excluded(room, "flock", lambda fd: system.lock(fd, system.EX_NB))


def _ranges(room: str) -> bool:
    return _excluded(room, "ranges", lambda fd: system.lock_range(fd, system.EX_NB))


# One process.


def _exclusive_create(room: str) -> bool:
    path = os.path.join(room, "exclusive")
    create_file(path, b"", 0o600)
    try:
        create_file(path, b"", 0o600)
    except FileExistsError:
        return True
    return False


def _link(room: str) -> Finding:
    one, other = os.path.join(room, "one"), os.path.join(room, "other")
    for path in (one, other):
        create_file(path, b"", 0o600)
    try:
        os.link(one, other)
        return Finding("", False, "a link replaced a file that was there")
    except FileExistsError:
        pass
    except OSError as error:
        return Finding("", None, f"no hard links ({error.strerror}): a lock file is seen empty for a moment")
    os.unlink(other)
    os.link(one, other)
    same = os.stat(one).st_ino == os.stat(other).st_ino
    return Finding("", True, "" if same else "two names of one file have two inode numbers; contents are compared")


def _nameless(room: str) -> Finding:
    try:
        file = OwnedFd(system.open_fd(room, system.O_TMPFILE, 0o600))
    except OSError:
        return Finding("", None, "a private file does its work; a crash may leave one")
    with file:
        system.link_open_file(file.fd, None, os.path.join(room, "named"))
    return Finding("", True)


def _exchange(room: str) -> Finding:
    one, other = os.path.join(room, "left"), os.path.join(room, "right")
    for path in (one, other):
        with open(path, "w") as file:
            file.write(path)
    try:
        system.exchange(one, other, None)
    except OSError:
        return Finding("", None, "an AtomicDir renames twice instead; the directory is missing for a moment")
    with open(one) as file:
        return Finding("", file.read() == other)


def _publishing(room: str) -> Finding:
    """The way in which LockFile makes its file, whichever that is here: never over one that is there."""
    path = os.path.join(room, "published")
    entry = Entry(FileLocation(path))
    made = publish(PublishedFile, entry, b"first", 0o600, False)
    try:
        publish(PublishedFile, entry, b"second", 0o600, False)
    except FileExistsError:
        with open(path) as file:
            return Finding("", file.read() == "first")
    else:
        return Finding("", False, "a file that was there has been replaced")
    finally:
        made.close()


def _events(room: str) -> Finding:
    path = os.path.join(room, "events")
    with Other(lambda: open(path, "w")):
        try:
            watch = system.Watch(path, OwnedFd)
        except (OSError, NotImplementedError) as error:
            return Finding("", None, f"{error}: waiters look again and again")
        watch.drain()
    try:
        came = bool(select.select([watch.fd], [], [], _PATIENCE)[0])
    finally:
        watch.close()
    return Finding("", True) if came else Finding("", None, "none came: waiters look again and again")


def _fifo(room: str) -> Finding:
    try:
        os.mkfifo(os.path.join(room, "fifo"), 0o600)
    except (OSError, AttributeError):
        return Finding("", None, "no queue: the quickest waiter goes first")
    return Finding("", True)


def _fsync(room: str) -> bool:
    create_file(os.path.join(room, "synced"), b"x", 0o600, sync=True)
    sync_directory(room)
    return True


def _protected(room: str) -> Finding:
    if os.stat(os.path.dirname(room)).st_mode & 0o1002 != 0o002:
        return Finding("", True)
    text = "every user can remove and replace them. Set the sticky bit (chmod +t), or use a directory of your own"
    return Finding("", False, text)


# The locks themselves.


def _kind(make: Callable[[str], Any]) -> Callable[[str], Finding]:
    def check(room: str) -> Finding:
        path = os.path.join(room, "lock")
        try:
            make(path).acquire(timeout=_PATIENCE).release()
            with Other(lambda: make(path).acquire(timeout=_PATIENCE)) as other:
                excluded = other.did and make(path).try_acquire() is None
            make(path).acquire(timeout=_PATIENCE).release()
        finally:
            for name in (path, path + ".queue"):
                if os.path.isfile(name):
                    os.unlink(name)
        return Finding("", excluded, "" if excluded else "two processes held it at once")

    return check


CHECKS: dict[str, Callable[[str], Finding | bool | None]] = {
    "flock between two processes": _flock,
    "byte-range locks between two processes": _ranges,
    "O_EXCL makes a file once": _exclusive_create,
    "link never replaces": _link,
    "O_TMPFILE, then a name": _nameless,
    "publishing never replaces": _publishing,
    "two names exchanged in one step": _exchange,
    "events tell of a close": _events,
    "FIFOs, for the queue": _fifo,
    "fsync of file and directory": _fsync,
    "lock files are safe from other users": _protected,
}
KINDS: dict[str, Callable[[str], Finding | bool | None]] = {
    "Lock": _kind(Lock),
    "Semaphore": _kind(lambda path: Semaphore(path, 1)),
    "LockFile": _kind(lambda path: LockFile(path, durable=False)),
}
