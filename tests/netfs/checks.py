"""What holds between two machines that share a directory. Runs in the guest of guest.sh; prints a JSON line per check.

The checks run on the server and tell peers on the two hosts, `a` and `b`, what to do. All peers of a check see the same
directory, by the mount that is being checked:

    hosts.a.do("hold = Lock(path('x')).acquire()")
    hosts.b.do("Lock(path('x')).try_acquire()")
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import support
from support import Peer, Raised

import holdfast

if TYPE_CHECKING:
    from collections.abc import Callable

EXPORT, COUNTER = "/srv/export", "/srv/counter"
ROUNDS = 40
FCNTL, SLEEPING = "72", ("7", "23", "35", "230", "232", "270", "271", "281")  # system calls of x86_64
PATIENCE = 120.0  # emulated processors, on a machine that has other things to do


class HostPeer(Peer):
    """A peer on host `a` or `b`, or on the server itself (no name)."""

    def __init__(self, host: str = "") -> None:
        with mock.patch.object(sys, "executable", f"/srv/python-{host}" if host else sys.executable):
            super().__init__()
        self.begin("import fcntl; from netfs.checks import count, set_range")

    def answer(self, seconds: float = PATIENCE) -> Any:
        return super().answer(seconds)

    def do(self, code: str, seconds: float = PATIENCE) -> Any:
        while self._expected:
            self.answer()
        self.begin(code)
        return self.answer(seconds)

    def until_waiting(self, path: str) -> None:
        """Until it sleeps with the lock open, in the kernel's lock or between two looks, and not in a call that is slow
        here. A wait for an SMB server counts as D."""
        support.until(lambda: support.state_of(self.pid) in "SD" and self.has_open(path) and self._waits(), PATIENCE)
        assert not self.has_answered()

    def _waits(self) -> bool:
        with open(f"/proc/{self.pid}/syscall") as file:
            number, *arguments = file.read().split()
        return number in SLEEPING or (number == FCNTL and int(arguments[1], 16) == fcntl.F_OFD_SETLKW)


class Hosts:
    """Two peers on each host and one on the server. They are slow to start, so all checks use the same ones."""

    mount = directory = ""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._start()

    def _start(self) -> None:
        self.a, self.b, self.a2, self.b2, self.server = (
            self._stack.enter_context(HostPeer(host)) for host in ("a", "b", "a", "b", "")
        )

    def use(self, mount: str) -> None:
        """Go to a directory that is new to both hosts; the server has it as EXPORT/<mount>."""
        self.mount = mount
        self.directory = f"/mnt/{mount}/{mount}"
        for peer in (self.a, self.b, self.a2, self.b2):
            peer.do(f"path = {self.directory + '/'!r}.__add__")
        self.server.do(f"path = {f'{EXPORT}/{mount}/'!r}.__add__")

    def replace_a(self) -> None:
        self.a = self._stack.enter_context(HostPeer("a"))
        self.a.do(f"path = {self.directory + '/'!r}.__add__")

    def start_again(self) -> None:
        """After a check that failed: who knows what its peers still hold or wait for."""
        for peer in (self.a, self.b, self.a2, self.b2, self.server):
            peer.kill()
        self._start()

    def close(self) -> None:
        self._stack.close()


def timed(action: Callable[[], Any]) -> float:
    began = time.monotonic()
    action()
    return round(time.monotonic() - began, 3)


def raised(peer: Peer, code: str) -> Raised:
    try:
        value = peer.do(code)
    except Raised as error:
        return error
    raise AssertionError(f"{code} raised nothing, and gave {value!r}")


def refused(peer: Peer, lock: str) -> None:
    """The lock is not to be had, in whatever way one asks for it."""
    assert peer.do(f"{lock}.try_acquire()") is None
    assert raised(peer, f"{lock}.acquire(timeout=0)").name == "Busy"
    began = time.monotonic()
    assert raised(peer, f"{lock}.acquire(timeout=0.3)").name == "Timeout"
    assert time.monotonic() - began >= 0.3


def granted(peer: Peer, lock: str) -> None:
    peer.do(f"hold = {lock}.acquire(timeout=0); hold.check(); hold.release()")


# The checks. What one returns is written down beside its name: numbers to look at, not to judge by.


def an_exclusive_lock_excludes_the_other_host(hosts: Hosts) -> None:
    hosts.a.do("hold = Lock(path('x')).acquire()")
    refused(hosts.b, "Lock(path('x'))")
    refused(hosts.b, "Lock(path('x'), shared=True)")
    hosts.a.do("hold.check(); hold.release()")
    granted(hosts.b, "Lock(path('x'))")
    granted(hosts.a, "Lock(path('x'))")


def sharers_share_and_exclude_writers(hosts: Hosts) -> None:
    hosts.a.do("hold = Lock(path('s'), shared=True).acquire()")
    hosts.b.do("hold = Lock(path('s'), shared=True).acquire(timeout=0)")
    hosts.a.do("hold.release()")
    refused(hosts.a, "Lock(path('s'))")
    granted(hosts.a, "Lock(path('s'), shared=True)")
    hosts.b.do("hold.release()")
    granted(hosts.a, "Lock(path('s'))")


def a_waiter_gets_it_when_the_other_host_lets_go(hosts: Hosts) -> dict[str, float]:
    took = {}
    for name, lock in {"w": "Lock(path('w'))", "ws": "Semaphore(path('ws'), 1)"}.items():
        for way in ("blocking", "timeout", "asyncio"):
            hosts.a.do(f"hold = {lock}.acquire()")
            hosts.b.begin(f"acquire_by({way!r}, {lock}).release()")
            hosts.b.until_waiting(f"{hosts.directory}/{name}")
            hosts.a.do("hold.release()")
            took[f"{lock[:4]} {way}"] = timed(hosts.b.answer)
    return took


def a_killed_holder_holds_nothing(hosts: Hosts) -> dict[str, float]:
    took = {}
    for name, lock in {"k": "Lock(path('k'))", "ks": "Semaphore(path('ks'), 1)"}.items():
        hosts.a.do(f"hold = {lock}.acquire()")
        assert hosts.b.do(f"{lock}.try_acquire()") is None
        hosts.b.begin(f"{lock}.acquire().release()")
        hosts.b.until_waiting(f"{hosts.directory}/{name}")
        hosts.a.kill()
        took[lock[:4]] = timed(hosts.b.answer)
        hosts.replace_a()
    return took


def an_interrupt_ends_a_wait(hosts: Hosts) -> dict[str, float]:
    took = {}
    hosts.a.do("hold = Lock(path('i')).acquire()")
    for way in ("blocking", "timeout"):
        hosts.b.begin(f"acquire_by({way!r}, Lock(path('i')))")
        hosts.b.until_waiting(f"{hosts.directory}/i")
        hosts.b.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        try:
            hosts.b.answer()
            name = "nothing"
        except Raised as error:
            name = error.name
        assert name == "KeyboardInterrupt", f"{way}: it raised {name}"
        took[way] = round(time.monotonic() - began, 3)
        assert not hosts.b.has_open(f"{hosts.directory}/i")
    hosts.a.do("hold.release()")
    return took


def a_semaphore_has_its_permits_over_both_hosts(hosts: Hosts) -> None:
    two = "Semaphore(path('p'), 2)"
    hosts.a.do(f"hold = {two}.acquire()")
    hosts.b.do(f"hold = {two}.acquire(timeout=0)")
    refused(hosts.a2, two)
    refused(hosts.b2, two)
    error = raised(hosts.b2, "Semaphore(path('p'), 3).try_acquire()")
    assert error.name == "Unsupported" and "2 permits" in str(error) and " 3 were" in str(error), error
    hosts.a.do("hold.release()")
    granted(hosts.b2, two)
    granted(hosts.a2, two)
    hosts.b.do("hold.release()")
    assert raised(hosts.a, "Semaphore(path('p'), 3).try_acquire()").name == "Unsupported"
    hosts.b.do("os.unlink(path('p'))")
    granted(hosts.a, "Semaphore(path('p'), 3)")
    granted(hosts.b, "Semaphore(path('p'), 3)")


def status_knows_of_the_other_host(hosts: Hosts) -> None:
    for lock in ("Lock(path('t'), keep=True)", "Semaphore(path('ts'), 1)"):
        hosts.a.do(f"hold = {lock}.acquire()")
        assert hosts.b.do(f"{lock}.status().held") is True, lock
        hosts.a.do("hold.release()")
        assert hosts.b.do(f"{lock}.status().held") is False, lock


def nothing_is_lost_with_a_lock(hosts: Hosts) -> dict[str, float]:
    return _count_together(hosts, "Lock(path('c'), shared=shared)")


def nothing_is_lost_with_a_semaphore(hosts: Hosts) -> dict[str, float]:
    return _count_together(hosts, "Semaphore(path('cs'), 1)")


def _count_together(hosts: Hosts, lock: str) -> dict[str, float]:
    with open(COUNTER, "w") as file:
        file.write("0")
    workers = (hosts.a, hosts.b, hosts.a2, hosts.b2)
    for seed, worker in enumerate(workers):
        worker.begin(f"count(lambda shared: {lock}, {seed})")
    took = timed(lambda: [worker.answer() for worker in workers])
    with open(COUNTER) as file:
        found = int(file.read())
    assert found == len(workers) * ROUNDS, f"{found} of {len(workers) * ROUNDS} are left"
    return {"seconds": took}


def count(lock: Callable[[bool], Any], seed: int) -> None:
    """In a worker: add one, `ROUNDS` times, in a way that loses numbers if two do it at once; look now and then."""
    for number in range(seed, seed + ROUNDS):
        with _acquired(lock(False), number), open(COUNTER, "r+") as file:
            value = int(file.read())
            time.sleep(0.001)
            file.seek(0)
            file.write(str(value + 1))
        if number % 4 == 0:
            with _acquired(lock(True), number), open(COUNTER) as file:
                before = file.read()
                time.sleep(0.001)
                file.seek(0)
                assert file.read() == before


def _acquired(lock: Any, number: int) -> holdfast.Hold:
    if number % 3 == 0:
        return lock.acquire()
    if number % 3 == 1:
        return lock.acquire(timeout=PATIENCE)
    while (hold := lock.try_acquire()) is None:
        time.sleep(0.005)
    return hold


def a_range_lock_on_the_server_excludes(hosts: Hosts) -> None:
    for command in ("F_SETLK", "F_OFD_SETLK"):
        hosts.server.do(f"file = open(path('r'), 'w'); set_range(file, fcntl.{command}, fcntl.F_WRLCK)")
        refused(hosts.a, "Lock(path('r'))")
        hosts.server.do(f"set_range(file, fcntl.{command}, fcntl.F_UNLCK)")
        hosts.a.do("hold = Lock(path('r')).acquire(timeout=0)")
        error = raised(hosts.server, f"set_range(file, fcntl.{command}, fcntl.F_WRLCK)")
        assert error.name == "BlockingIOError", error
        hosts.a.do("hold.release()")
        hosts.server.do("file.close()")


def set_range(file: Any, command: int, kind: int) -> None:
    """In the peer on the server: what any program there may do with the whole of a file."""
    import struct

    fcntl.fcntl(file, command, struct.pack("hhqqi", kind, 0, 0, 0, 0))


def a_lock_taken_on_the_server_itself_is_another_lock(hosts: Hosts) -> None:
    """Not a promise but a limit: there it is a flock, of which clients hear nothing."""
    hosts.server.do("hold = Lock(path('f'), keep=True).acquire()")
    granted(hosts.a, "Lock(path('f'))")
    hosts.server.do("hold.release()")


def the_mount_is_refused(hosts: Hosts) -> None:
    option = hosts.mount.partition("-")[2] or "nolease"
    for lock in ("Lock(path('x'))", "Semaphore(path('x'), 2)"):
        for way in ("try_acquire()", "acquire(timeout=1)"):
            error = raised(hosts.a, f"{lock}.{way}")
            assert error.name == "Unsupported", error
            assert f"the mount option {option} " in str(error) and "holdfast.LockFile" in str(error), error
    assert os.listdir(f"{EXPORT}/{hosts.mount}") == []


def a_directory_is_replaced_as_a_whole(hosts: Hosts) -> dict[str, float]:
    """By two renames. Another host may see the version before, whole, for as long as it remembers names."""
    write = (
        "site = holdfast.AtomicDir(path('site'), keep=1)\n"
        "with site.replace() as new: [(new / n).write_text('%s') for n in 'ab']"
    )
    look = (
        "site = holdfast.AtomicDir(path('site'))\n"
        "with site.read() as there: found = [(there / n).read_text() for n in 'ab']"
    )
    times = {}
    for number, (writer, reader) in enumerate(((hosts.a, hosts.b), (hosts.b, hosts.a))):
        for turn in range(2):
            text = f"{number}{turn}"
            writer.do(write % text)
            writer.do(look)
            assert writer.do("found") == [text, text]
        times[f"seen by the other host, {number}"] = timed(
            lambda reader=reader, text=text: support.until(lambda: _found(reader, look, text), PATIENCE)
        )
    error = raised(hosts.a, "site.snapshot().__enter__()")
    assert error.name == "Unsupported", error
    hosts.a.do("import shutil; shutil.rmtree(path('site')); shutil.rmtree(path('site') + '.old-3')")
    return times


def _found(reader: Peer, look: str, text: str) -> bool:
    try:
        reader.do(look)
    except Raised as error:  # a name that the server has given up since; the next look asks again
        if error.name not in ("OSError", "FileNotFoundError"):
            raise
        return False
    return bool(reader.do("found") == [text, text])


def events_are_appended_from_both_hosts(hosts: Hosts) -> dict[str, float]:
    """Two processes on each: every position once, every condition won once, and what was acknowledged is there."""
    hosts.a.do("from holdfast.events import *; EventStore(path('shop')); None")
    code = (
        "from holdfast.events import *\nstore = EventStore(path('shop'), lock_timeout=100, segment_size=3000)\n"
        "said = {}\nwon = 0\n"
        "for n in range(30):\n"
        "    said['%s.' + str(n)] = store.append(Event('T', '%s.' + str(n), tags={'t'}))\n"
        "    tag = 'race:' + str(n)\n"
        "    try:\n"
        "        store.append(Event('W', n, tags={tag}), AppendCondition(Query.of(tags={tag})))\n"
        "        won += 1\n"
        "    except ConditionFailed: pass\n"
    )
    peers = {"a": hosts.a, "a2": hosts.a2, "b": hosts.b, "b2": hosts.b2}
    began = time.monotonic()
    for name, peer in peers.items():
        peer.begin(code % (name, name))
    for peer in peers.values():
        peer.answer(5 * PATIENCE)
    seconds = round(time.monotonic() - began, 1)
    found = hosts.b.do("[[e.position, e.type, e.data] for e in EventStore(path('shop')).read()]")
    assert [position for position, _, _ in found] == list(range(1, len(found) + 1))
    assert sorted(data for _, kind, data in found if kind == "W") == list(range(30))
    assert sum(peer.do("won") for peer in peers.values()) == 30
    places = {data: position for position, kind, data in found if kind == "T"}
    said = {key: at for peer in peers.values() for key, at in peer.do("said").items()}
    assert len(said) == 120
    assert said == places, (
        f"told {sorted(said.items() - places.items())}, found {sorted(places.items() - said.items())}"
    )
    assert hosts.a.do("EventStore(path('shop')).verify().ok") is True
    assert hosts.a.do("[e.position for e in EventStore(path('shop')).read(Query.of(tags={'race:3'}))].__len__()") == 1
    for peer in peers.values():
        peer.do("store.close()")
    # NFS keeps a file that is removed while it is open under another name until it is closed.
    for peer in peers.values():
        peer.do("import gc, os, shutil; gc.collect(); None")
    left = "shutil.rmtree(path('shop'), ignore_errors=True) or list(os.walk(path('shop')))"
    try:
        support.until(lambda: not hosts.a.do(left))
    except AssertionError:
        files = "[os.readlink(f.path) for f in os.scandir('/proc/self/fd') if os.path.islink(f.path)]"
        opened_by = {name: peer.do(files) for name, peer in peers.items()}
        raise AssertionError(f"files are left: {hosts.a.do(left)}; open: {opened_by}") from None
    return {"seconds for 240 appends": seconds}


def appends_with_and_without_the_lock(hosts: Hosts) -> dict[str, float]:
    """`SingleInstance_PerformanceNotDegraded` of store-lock.md: the figures of docs/benchmarks.md."""
    bench = os.path.join(os.path.dirname(__file__), "../../bench")
    hosts.a.do(f"import sys; sys.path.append({bench!r})")
    found = hosts.a.do("__import__('store_lock').compare(path('lock'), 10, 20)", 5 * PATIENCE)
    hosts.a.do("import shutil; shutil.rmtree(path('lock'))")
    locked, bare = found.values()
    ratio = median(one / other for one, other in zip(locked, bare, strict=True))
    return {"with, ms": 1000 * median(locked), "without, ms": 1000 * median(bare), "ratio": ratio}


def a_task_queue_is_refused(hosts: Hosts) -> None:
    """SQLite is not safe on a network file system. The error names PostgreSQL, and nothing is left."""
    error = raised(hosts.a, "holdfast.TaskQueue(path('jobs'))")
    assert error.name == "Unsupported"
    assert "PostgreSQL" in str(error)
    assert not hosts.b.do("import os; os.path.exists(path('jobs'))")


def nothing_but_lock_files_is_left(hosts: Hosts) -> None:
    """No queues, whose FIFOs do not reach the other host, and none of the names that NFS gives to removed files."""
    found = os.listdir(f"{EXPORT}/{hosts.mount}")
    assert [name for name in found if name.startswith(".") or name.endswith(".queue")] == [], found


BETWEEN_HOSTS = (
    an_exclusive_lock_excludes_the_other_host,
    sharers_share_and_exclude_writers,
    a_waiter_gets_it_when_the_other_host_lets_go,
    a_killed_holder_holds_nothing,
    an_interrupt_ends_a_wait,
    a_semaphore_has_its_permits_over_both_hosts,
    status_knows_of_the_other_host,
    nothing_is_lost_with_a_lock,
    nothing_is_lost_with_a_semaphore,
    a_directory_is_replaced_as_a_whole,
    events_are_appended_from_both_hosts,
    a_task_queue_is_refused,
    nothing_but_lock_files_is_left,
)
WITH_SERVER = (a_range_lock_on_the_server_excludes, a_lock_taken_on_the_server_itself_is_another_lock)
PLAN: dict[str, tuple[Callable[[Hosts], Any], ...]] = {
    "nfs4": (*BETWEEN_HOSTS, *WITH_SERVER),
    "nfs3": (*BETWEEN_HOSTS, *WITH_SERVER),
    "cifs-nolease": (*BETWEEN_HOSTS, *WITH_SERVER, appends_with_and_without_the_lock),
    # By default a client that is alone with a file keeps its locks to itself until another client comes. In 4 of 14
    # runs of `nothing_is_lost…`, on a busy machine, an unlock failed with EIO; in none of 20 with nolease.
    "cifs": (the_mount_is_refused,),
    "nfs3-local_lock=flock": (an_exclusive_lock_excludes_the_other_host,),
    "nfs3-nolock": (the_mount_is_refused,),
    "nfs3-local_lock=all": (the_mount_is_refused,),
    "nfs3-local_lock=posix": (the_mount_is_refused,),
    "cifs-nobrl": (the_mount_is_refused,),
}


def run(hosts: Hosts, mount: str) -> None:
    os.mkdir(f"{EXPORT}/{mount}")
    os.chmod(f"{EXPORT}/{mount}", 0o777)
    hosts.use(mount)
    for check in PLAN[mount]:
        began = time.monotonic()
        outcome, details = "ok", None
        try:
            details = check(hosts)
        except Exception:
            outcome = traceback.format_exc()
            hosts.start_again()
            hosts.use(mount)
        seconds = round(time.monotonic() - began, 1)
        line = {"mount": mount, "check": check.__name__, "outcome": outcome, "details": details, "seconds": seconds}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    all_hosts = Hosts()
    for name in sys.argv[1:] or PLAN:
        run(all_hosts, name)
    all_hosts.close()
