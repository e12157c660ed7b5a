"""Waiting: asleep until an event comes; polling where none can come; which file system promises what."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from faces import PATIENCE, Caller, Leftovers, in_thread, peers, until_waiting
from support import until_asleep

import holdfast
from holdfast import metrics, paths, system, wait, watch
from holdfast.files import OwnedFd
from holdfast.locks import first_waiter


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


@pytest.fixture
def no_polling(monkeypatch):
    def pause(self, deadline):
        raise AssertionError("a waiter polls")

    monkeypatch.setattr(wait.Backoff, "pause", pause)


@pytest.fixture
def no_watches(monkeypatch):
    """As when fs.inotify.max_user_instances is used up."""

    def no_watch(path, *_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(system, "Watch", no_watch)


# No polling.

WAYS = [{}, {"timeout": 60}, {"style": "asyncio"}, {"style": "trio"}]


@pytest.mark.parametrize("options", [{}, {"permits": 1}])
def test_a_waiting_process_sleeps(path, options):
    """For each way to wait: a process that waits at the head of one queue and behind another waiter in a second one."""
    with peers(len(WAYS)) as processes, ExitStack() as held:
        locks = []
        for process in processes:
            process.look_only_when_told()
        for n, way in enumerate(WAYS):
            own = f"{path}.{n}"
            locks.append(holdfast.Semaphore(own, 1) if options else holdfast.Lock(own))
            held.enter_context(locks[n])
            processes[n].start(own, "head", **options, **way)
        for n, way in enumerate(WAYS):
            until_waiting(locks[n - 1], 1)
            processes[n].start(locks[n - 1].path, "behind", **options, **way)
        for lock in locks:
            until_waiting(lock, 2)
        until_asleep([process.pid for process in processes])


def acquire_after_release(lock, **options):
    """A contended acquire, in this thread, of what another thread releases as soon as it is waited for."""
    hold = in_thread(lock.acquire)

    def let_go():
        until_waiting(lock, 1)
        hold.release()

    releaser = Caller(let_go)
    lock.acquire(**options).release()
    releaser.result()


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_wait_on_a_local_file_system_never_polls(path, kind, timeout):
    acquire_after_release(holdfast.Lock(path) if kind == "lock" else holdfast.Semaphore(path, 1), timeout=timeout)


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_async_wait_on_a_local_file_system_never_polls(path, backend):
    lock = holdfast.Lock(path)

    async def main():
        hold = in_thread(lock.acquire)
        async with anyio.create_task_group() as group:

            async def let_go():
                while len(lock.status().waiters) != 1:
                    await anyio.lowlevel.checkpoint()
                hold.release()

            group.start_soon(let_go)
            async with lock:
                pass

    anyio.run(main, backend=backend)


def test_the_event_of_a_crash_wakes_a_waiter(path, monkeypatch):
    """Without the safety look, which would hide a missing event."""
    monkeypatch.setattr(watch, "RECHECK_S", 3600.0)
    lock = holdfast.Lock(path)
    with peers() as (peer,):
        peer.acquire(path)
        waiter = Caller(lambda: lock.acquire(timeout=60).release())
        until_waiting(lock, 1)
        peer.kill()
        waiter.result()


@pytest.mark.parametrize("shared", [False, True])
def test_the_events_of_release_and_removal_wake_a_waiter(path, monkeypatch, shared):
    monkeypatch.setattr(watch, "RECHECK_S", 3600.0)
    lock = holdfast.Lock(path)
    for end in ("release", "lose"):
        hold = in_thread(holdfast.Lock(path, shared=shared).acquire)
        waiter = Caller(lambda: lock.acquire(timeout=60).release())
        until_waiting(lock, 1)
        if end == "release":
            hold.release()
        else:
            os.unlink(path)
        waiter.result()
    with pytest.raises(holdfast.LockLost):
        hold.release()


def test_drain_reads_all_events(path):
    """More than one read of the kernel's queue takes."""
    Path(path).touch()
    watching = system.Watch(path, OwnedFd)
    for _ in range(400):  # the kernel merges two equal events in a row
        os.chmod(path, 0o600)
        os.close(os.open(path, os.O_RDONLY))
    assert watching.drain()
    assert not watching.drain()
    watching.close()


def test_an_event_may_come_before_its_cause(path, monkeypatch):
    """The kernel reports that a process which dies closed the file, and drops the lock only then."""
    monkeypatch.setattr(watch, "RECHECK_S", 3600.0)
    looked_in_vain = threading.Event()
    drain, step = watch.Waiting.drain, watch.Waiting.step
    woken = []

    def note_wake_up(waiting):
        drain(waiting)
        woken.append(1)

    def sleep_again(waiting, deadline):
        if woken:
            looked_in_vain.set()
        return step(waiting, deadline)

    monkeypatch.setattr(watch.Waiting, "drain", note_wake_up)
    monkeypatch.setattr(watch.Waiting, "step", sleep_again)
    lock = holdfast.Lock(path, keep=True)
    dying = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(dying, fcntl.LOCK_EX)
        waiter = Caller(lambda: lock.acquire(timeout=60).release())
        until_waiting(lock, 1)
        with open(path, "r+b"):
            pass  # closed: the event
        assert looked_in_vain.wait(PATIENCE)
        fcntl.flock(dying, fcntl.LOCK_UN)  # no event
        waiter.result()
    finally:
        os.close(dying)


def test_an_event_that_never_comes_costs_a_moment_only(path, monkeypatch):
    """Another process keeps a copy of the descriptor, so that nothing is closed when the lock is released."""
    monkeypatch.setattr(watch, "RECHECK_S", 0.01)
    lock = holdfast.Lock(path, keep=True)
    hold = in_thread(lock.acquire)
    copy = os.dup(hold.fileno())
    try:
        waiter = Caller(lambda: lock.acquire(timeout=60).release())
        until_waiting(lock, 1)
        hold.release()
        waiter.result()
    finally:
        os.close(copy)


# Polling.


def test_pauses_double_from_10_to_500_ms_and_are_jittered(monkeypatch):
    monkeypatch.setattr(wait, "monotonic", lambda: 1000.0)
    runs = []
    for _ in range(50):
        backoff = wait.Backoff()
        runs.append([backoff.pause(None).until - 1000.0 for _ in range(10)])
    longest = [0.010, 0.020, 0.040, 0.080, 0.160, 0.320, 0.500, 0.500, 0.500, 0.500]
    for n, most in enumerate(longest):
        pauses = [run[n] for run in runs]
        assert most / 2 - 1e-9 <= min(pauses) < most * 0.7
        assert most * 0.8 < max(pauses) <= most + 1e-9


def test_a_pause_ends_at_the_deadline(monkeypatch):
    monkeypatch.setattr(wait, "monotonic", lambda: 1000.0)
    assert wait.Backoff().pause(1000.001).until == 1000.001


@pytest.mark.usefixtures("no_watches")
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_without_watches_a_wait_polls(path, kind, tmp_path):
    leftovers = Leftovers(tmp_path)
    acquire_after_release(holdfast.Lock(path) if kind == "lock" else holdfast.Semaphore(path, 1), timeout=60)
    leftovers.check()


@pytest.mark.usefixtures("no_watches")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_without_watches_an_async_wait_polls(path, backend):
    lock = holdfast.Lock(path)

    async def main():
        hold = in_thread(lock.acquire)
        with pytest.raises(holdfast.Timeout):
            await lock.aacquire(timeout=0.01)
        releaser = Caller(lambda: (until_waiting(lock, 1), hold.release()))
        async with lock:
            pass
        releaser.result()

    anyio.run(main, backend=backend)


@pytest.mark.usefixtures("no_watches")
def test_a_poller_waits_longer_and_longer(path, monkeypatch):
    """The pauses of a real wait, counted instead of slept."""
    lengths = []
    lock = holdfast.Lock(path)
    hold = in_thread(lock.acquire)
    now = time.monotonic()
    monkeypatch.setattr(wait, "monotonic", lambda: now)
    monkeypatch.setattr(first_waiter, "BURSTS", ((float("inf"), 0.0, float("inf")),))

    def block(self):
        lengths.append(self.until - now)
        if len(lengths) == 12:
            hold.release()

    monkeypatch.setattr(wait.Pause, "block", block)
    lock.acquire(timeout=3600).release()
    assert len(lengths) == 12
    assert lengths[0] < 0.011 < lengths[3] < 0.100 < lengths[6] < 0.501
    assert max(lengths) < 0.501


# File systems.

TABLE = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /nfs4 rw,relatime shared:2 - nfs4 server:/export rw,vers=4.2,local_lock=none,addr=10.0.0.1
31 21 0:41 / /nfs3 rw,relatime - nfs server:/export rw,vers=3,local_lock=none,addr=10.0.0.1
32 21 0:42 / /nfs-all rw,relatime - nfs server:/export rw,vers=3,nolock,local_lock=all
33 21 0:43 / /nfs-posix rw,relatime - nfs server:/export rw,vers=3,local_lock=posix
34 21 0:44 / /nfs-flock rw,relatime - nfs server:/export rw,vers=3,local_lock=flock
35 21 0:45 / /nfs-nolock rw,relatime - nfs server:/export rw,vers=3,nolock
36 21 0:46 / /cifs rw,relatime - cifs //server/share rw,vers=3.1.1,cache=strict,nolease
37 21 0:47 / /cifs-nobrl rw,relatime - cifs //server/share rw,vers=3.1.1,nobrl
38 21 0:48 / /ssh rw,nosuid,nodev,relatime - fuse.sshfs user@server:/ rw,user_id=0
39 21 0:49 / /with\\040a\\040space\\134 rw,relatime - nfs4 server:/ rw,local_lock=all
40 21 0:50 /sub /btrfs rw,relatime - btrfs /dev/sdb rw,subvol=/sub
41 21 0:51 / /tmp rw - tmpfs tmpfs rw
42 41 0:52 / /tmp/deep rw - nfs4 server:/ rw,local_lock=none
43 42 0:53 / /tmp/deep rw - tmpfs cover rw
45 21 0:55 / /cifs-leases rw,relatime - cifs //server/share rw,vers=3.1.1,cache=strict
44 21 0:54 / /9p rw - 9p share rw,trans=virtio
this line is no mount
"""


def device(major: int, minor: int) -> int:
    return os.makedev(major, minor)


@pytest.mark.parametrize(
    ("minor", "path", "kind", "ranged", "events", "refusal"),
    [
        (40, "/nfs4/x", "nfs4", True, False, None),
        (41, "/nfs3/x", "nfs", True, False, None),
        (42, "/nfs-all/x", "nfs", True, False, "nolock"),
        (43, "/nfs-posix/x", "nfs", True, False, "local_lock=posix"),
        (44, "/nfs-flock/x", "nfs", True, False, None),
        (45, "/nfs-nolock/x", "nfs", True, False, "nolock"),
        (46, "/cifs/x", "cifs", True, False, None),
        (55, "/cifs-leases/x", "cifs", True, False, "nolease"),
        (47, "/cifs-nobrl/x", "cifs", True, False, "nobrl"),
        (48, "/ssh/x", "fuse.sshfs", False, False, "sshfs"),
        (49, "/with a space\\/x", "nfs4", True, False, "local_lock=all"),
        (50, "/btrfs/x", "btrfs", False, True, None),
        (51, "/tmp/x", "tmpfs", False, True, None),
        (54, "/9p/x", "9p", False, False, None),
    ],
)
def test_a_mount_is_found_by_its_device(minor, path, kind, ranged, events, refusal):
    mount = paths.find_mount(TABLE, device(0, minor), path)
    assert (mount.kind, mount.ranged, mount.events) == (kind, ranged, events)
    if refusal is None:
        assert mount.refusal is None
    else:
        assert re.search(refusal, mount.refusal)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/btrfs/subvolume/x", "btrfs"),
        ("/btrfs", "btrfs"),
        ("/btrfs2/x", "ext4"),
        ("/with a space\\/y/x", "nfs4"),
        ("/nfs4/deep/down/x", "nfs4"),
        ("/elsewhere/x", "ext4"),
        ("/tmp/x", "tmpfs"),
        ("/tmp/deep/x", "tmpfs"),
    ],
)
def test_a_mount_whose_device_is_in_no_table_is_found_by_its_path(path, kind):
    """As a btrfs subvolume. The longest mount point above it counts, and the last of those mounted there."""
    assert paths.find_mount(TABLE, device(0, 999), path).kind == kind


def test_a_device_number_of_more_than_8_bits():
    line = "50 1 0:70000 / /big rw - nfs4 server:/ rw,local_lock=none"
    assert paths.find_mount(line, device(0, 70000), "/elsewhere").kind == "nfs4"


def test_without_a_table_everything_is_local():
    mount = paths.find_mount("", device(0, 40), "/nfs4/x")
    assert (mount.ranged, mount.events, mount.refusal) == (False, True, None)


@pytest.fixture
def pretend(monkeypatch):
    """Makes the directory that it gives look like one on another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        number = os.stat(directory).st_dev
        if os.major(number) != 0:
            pytest.skip("needs a directory on a file system without a block device, such as /dev/shm on tmpfs")

        def mounted_as(kind: str, options: str) -> Path:
            table = f"9 1 0:{os.minor(number)} / {directory} rw - {kind} server:/export {options}\n"
            monkeypatch.setattr(system, "mount_table", lambda: table)
            monkeypatch.setattr(paths, "_by_device", {})
            return Path(directory)

        yield mounted_as
    paths._by_device.clear()


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("nfs", "rw,nolock", "mount option nolock"),
        ("nfs", "rw,local_lock=all", "mount option local_lock=all"),
        ("nfs4", "rw,local_lock=posix", "mount option local_lock=posix"),
        ("cifs", "rw,nolease,nobrl", "mount option nobrl"),
        ("cifs", "rw,cache=none", "mount option nolease"),
        ("fuse.sshfs", "rw", "sshfs"),
    ],
)
def test_a_file_system_that_grants_one_lock_twice_is_refused(pretend, kind, options, names):
    directory = pretend(kind, options)
    for lock in (holdfast.Lock(directory / "x"), holdfast.Semaphore(directory / "y", 2)):
        for acquire in (lock.acquire, lock.try_acquire):
            with pytest.raises(holdfast.Unsupported) as caught:
                acquire()
            text = str(caught.value)
            assert names in text and kind in text and str(directory) in text
            assert "holdfast.LockFile" in text
    assert os.listdir(directory) == []  # an empty file would be in the way of a LockFile there


@pytest.mark.parametrize("kind", ["nfs4", "cifs"])
def test_a_network_file_system_gets_ranges_and_is_polled(pretend, kind, monkeypatch):
    directory = pretend(kind, "rw,local_lock=none" if kind == "nfs4" else "rw,nolease")

    def no_watch(path, *_):
        raise AssertionError("no event comes from another machine")

    monkeypatch.setattr(system, "Watch", no_watch)
    lock = holdfast.Lock(directory / "x")
    hold = in_thread(lock.acquire)
    fd = hold.fileno()
    assert "OFDLCK" in Path(f"/proc/self/fdinfo/{fd}").read_text()
    assert lock.status().held
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.03)
    pauses = []
    plain = wait.Pause.block

    def block(self):
        pauses.append(self)
        plain(self)
        if not hold.released:
            hold.release()

    monkeypatch.setattr(wait.Pause, "block", block)
    lock.acquire(timeout=60).release()
    assert pauses
    assert os.listdir(directory) == ["x"]  # other machines may see late what a name means, so it stays


def test_ranges_share_and_exclude_as_flock_does(pretend):
    directory = pretend("nfs4", "rw,local_lock=none")
    shared, exclusive = holdfast.Lock(directory / "x", shared=True), holdfast.Lock(directory / "x")
    with shared, shared.acquire(timeout=0):
        assert exclusive.try_acquire() is None
    with exclusive:
        assert shared.try_acquire() is None
    assert os.listdir(directory) == ["x"]  # other machines may see late what a name means, so it stays


# A file that is replaced all the time.


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_file_that_is_replaced_again_and_again_is_reported(path, kind, monkeypatch, caplog):
    """Whenever it has the lock, somebody else has put another file in its place."""
    rounds = 150
    lock = holdfast.Lock(path) if kind == "lock" else holdfast.Semaphore(path, 2)
    name = "lock" if kind == "lock" else "try_slot"
    plain = getattr(system, name)
    replaced = []

    def replace_then_lock(*args):
        if len(replaced) < rounds:
            replaced.append(None)
            os.unlink(path)
            Path(path).touch()
        return plain(*args)

    monkeypatch.setattr(system, name, replace_then_lock)
    before = metrics.kind(kind).identity_retries.value
    with caplog.at_level("WARNING", logger="holdfast"):
        lock.acquire(timeout=0).release()
    assert metrics.kind(kind).identity_retries.value - before == rounds
    [record] = caplog.records
    assert record.name == "holdfast"
    assert path in record.getMessage() and "100 times" in record.getMessage()


def test_fewer_replacements_are_not_reported(path, monkeypatch, caplog):
    plain = system.lock
    replaced = []

    def replace_then_lock(fd, op):
        if len(replaced) < 99:
            replaced.append(None)
            os.unlink(path)
        plain(fd, op)

    monkeypatch.setattr(system, "lock", replace_then_lock)
    with caplog.at_level("WARNING", logger="holdfast"):
        holdfast.Lock(path).acquire(timeout=0).release()
    assert caplog.records == []
