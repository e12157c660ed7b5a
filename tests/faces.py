"""What the tests of the locks' face share: a peer in another process, obstacles to wait behind, a look at what is left.

Run as a program, this file is the peer: it takes and drops locks as it is told, one JSON object per line.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast import process
from holdfast.locks import first_waiter, local
from holdfast.locks import queue as queues
from holdfast.system import linux
from holdfast.wait import Notified

PATIENCE = 50.0  # for what must happen; a test that gets here has failed


def eventually(true: Callable[[], object], what: str) -> None:
    """Watch until something has come true. For states that give no event; never a way to guess how long things take."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.001)


def until_waiting(lock: Any, number: int) -> None:
    """Until so many have a ticket, and `status` shows them."""

    def there() -> bool:
        return number == len(lock.status().waiters) == (len(os.listdir(lock.path + ".queue")) if number else 0)

    eventually(there, f"{number} waiters at {lock.path}")


def in_thread(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call it in a thread of its own and give its result. What it acquires is not held by the calling thread."""
    return Caller(function, *args, **options).result()


class Caller(threading.Thread):
    """A thread that keeps the result of a call, or its exception."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*args, **options)
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "the thread does not end"
        if self._error is not None:
            raise self._error
        return self._result


# What is left behind.


def descriptors() -> set[tuple[int, str]]:
    """Every open descriptor and what it is, but for the inotify instance that a process keeps between two waits.

    And but for sockets: the thread that watches the sessions of earlier tests closes those that are idle.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    idle = {file.fd for file in linux._idle_instances}
    return {(fd, what) for fd, what in found if fd not in idle and not what.startswith("socket:")}


def watches() -> int:
    """How many inotify watches this process has, in whichever instance."""
    count = 0
    for name in os.listdir("/proc/self/fdinfo"):
        with suppress(OSError), open(f"/proc/self/fdinfo/{name}") as info:
            count += sum(line.startswith("inotify wd") for line in info)
    return count


class Leftovers:
    """Remembers how things were, to see later that nothing has been left behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        gc.collect()  # what other tests left is not to go meanwhile
        self._before = self._look()

    def _look(self) -> dict[str, object]:
        files = descriptors()
        return {
            "descriptors": files,
            "watches": watches(),
            "files": sorted(os.listdir(self._directory)),
            "lines": set(process.registry.lines),
            "owned": sorted(set(process.descriptors.values()) & {fd for fd, _ in files}),
            "holds": len(process.registry.holds),
        }

    def check(self) -> None:
        assert self._look() == self._before


# What to wait behind. An obstacle is a function that takes it away; taking away the first one wakes the waiter.


def stand_in_front(lock: Any) -> Callable[[], None]:
    """Take a ticket in the lock's queue, as a waiter does."""
    ticket = queues.Queue(lock.path + ".queue", lock.mode)
    assert ticket.join()

    def leave() -> None:
        ticket.leave()
        ticket.close()
        queues.remove_queue(lock.path + ".queue")

    return leave


def fill_line(lock: Any) -> Callable[[], None]:
    """Take a place in the line of this process, as a waiter does; with one place, the next waiter waits in memory."""
    place = process.LinePlace(lock.path, local.TICKETS_PER_PROCESS, Notified())
    assert place.admitted
    return place.leave


def poke(path: str) -> None:
    """Wake who watches the file, for nothing."""
    os.close(os.open(path, os.O_RDWR))


def obstacles(kind: str, path: str, monkeypatch: Any) -> tuple[Any, list[Callable[[], None]]]:
    """A lock of some kind, and what is in the way of the next who wants it, in the order in which it is met."""
    if kind == "semaphore":
        lock: Any = holdfast.Semaphore(path, 2)
        first, second = in_thread(lock.acquire), in_thread(lock.acquire)
        return lock, [lambda: poke(path), stand_in_front(lock), lambda: poke(path), first.release, second.release]
    lock = holdfast.Lock(path, shared=kind == "shared", fair=kind != "unfair", keep=kind == "kept")
    hold = in_thread(holdfast.Lock(path, keep=kind == "kept").acquire)
    hold._grant.came_through_queue = True  # such a hold leaves its file to those who wait
    holder = hold.release
    if kind == "middle":
        return lock, [stand_in_front(lock), stand_in_front(lock), lambda: poke(path), holder]
    if kind == "line":
        monkeypatch.setattr(local, "TICKETS_PER_PROCESS", 1)
        return lock, [fill_line(lock), stand_in_front(lock), lambda: poke(path), holder]
    return lock, [lambda: poke(path), lambda: poke(path), holder]


# Another process.


class Peer:
    """Another process that acquires and releases as it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def ask(self, what: str, **options: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"what": what, **options}), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        """The next thing that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer is gone"
        return json.loads(line)

    def look_only_when_told(self) -> None:
        """From now on only an event can wake its waiters: neither the safety look nor the looks of a first waiter."""
        self.ask("look only when told")

    def start(self, path: str | Path, name: str = "hold", **options: object) -> None:
        """Have it acquire, in a thread of its own, without waiting for that."""
        self.ask("acquire", name=name, path=str(path), **options)

    def acquire(self, path: str | Path, name: str = "hold", **options: object) -> None:
        self.start(path, name, **options)
        assert self.hear() == {"got": name}

    def release(self, name: str = "hold") -> None:
        self.ask("release", name=name)
        assert self.hear() == {"released": name}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()


@contextmanager
def peers(number: int = 1) -> Iterator[list[Peer]]:
    """Several at once, so that their start-up times overlap."""
    made = [Peer() for _ in range(number)]
    try:
        yield made
    finally:
        for peer in made:
            peer.close()


class _Worker:
    """The peer's side of `Peer`."""

    def __init__(self) -> None:
        self._released: dict[str, threading.Event] = {}

    def main(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            what = command.pop("what")
            if what == "look only when told":
                self._look_only_when_told()
            elif what == "release":
                self._released[command["name"]].set()
            else:
                self._released[command["name"]] = threading.Event()
                threading.Thread(target=self._acquire, kwargs=command, daemon=True).start()

    def _look_only_when_told(self) -> None:
        from support import look_only_when_told

        first_waiter.BURSTS = first_waiter.BURSTS[-1:]
        look_only_when_told()

    def _say(self, **what: object) -> None:
        os.write(1, json.dumps(what).encode() + b"\n")

    def _acquire(self, name: str, path: str, style: str = "sync", log: str | None = None, **options: Any) -> None:
        try:
            lock = (holdfast.Semaphore if "permits" in options else holdfast.Lock)(path, **options)
            if style == "sync":
                with lock:
                    self._note(name, log)
                    if log is None:
                        self._released[name].wait()
            else:
                import anyio

                anyio.run(self._acquire_async, lock, name, log, backend=style)
        except holdfast.HoldfastError as error:
            self._say(error=type(error).__name__, text=str(error))
        else:
            if log is None:
                self._say(released=name)

    async def _acquire_async(self, lock: Any, name: str, log: str | None) -> None:
        import anyio

        async with lock:
            self._note(name, log)
            while log is None and not self._released[name].is_set():
                await anyio.sleep(0.002)

    def _note(self, name: str, log: str | None) -> None:
        """Say that we are in. With a log: write it there, in the order of service, and go."""
        if log is None:
            self._say(got=name)
            return
        with open(log, "a") as file:
            file.write(name + "\n")


if __name__ == "__main__":
    _Worker().main()
